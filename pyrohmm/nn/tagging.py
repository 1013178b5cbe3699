"""``NeuralTagger``: a neural HMM whose states emit a word and a tag."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_integers, check_size
from .._choices import first_values
from .._precision import at_least_single, full_precision
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.tagged_hmm import TaggedHMM as TaggedHMM
from ..distributions.tagged_hmm import TagPath as TagPath
from ..distributions.tagged_hmm import WordAndTag as WordAndTag
from ..ops.blocks import states as state_blocks
from ..ops.blocks.states import Blocks
from .neural import NeuralHMM, Residual


class NeuralTagger(NeuralHMM):
    r"""A :class:`pyrohmm.NeuralHMM` whose states emit tags too; it builds a :class:`TaggedHMM`.

    .. math:: p(y|z) \propto \exp(E_y \cdot g'(E_z) + b_y)

    over all tags, with a separate :class:`~pyrohmm.nn.neural.Residual` g'. Blocks are those of
    words.

    Args:
        num_states: K.
        num_symbols: V, of words.
        num_tags: Y.
        hidden_dim: D.
        blocks: Which states may emit which word; by default all states are one block.
        **options: Those of :class:`pyrohmm.NeuralHMM`.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> text = Sequences.from_list([[0, 1, 2, 1], [2, 1]], labels=[[0, 1, 0, 1], [0, 1]])
        >>> model = MarginalModel(NeuralTagger(4, 3, 2, hidden_dim=8))
        >>> fit = fit_map(model, tagged(text), num_iterations=100, learning_rate=0.02)
        >>> new = tagged(Sequences.from_list([[2, 1, 0]]))
        >>> fit.hmm(new).best_tags(new.values)
        tensor([[0, 1, 0]])
    """

    @first_values()
    def __init__(
        self,
        num_states: int,
        num_symbols: int,
        num_tags: int,
        hidden_dim: int = 256,
        *,
        blocks: Blocks | None = None,
        **options: Any,
    ) -> None:
        check_size("num_tags", num_tags)
        if blocks is None:
            check_size("num_states", num_states)
            check_size("num_symbols", num_symbols)
            blocks = state_blocks.from_clusters(
                torch.zeros(num_symbols, dtype=torch.long), num_states
            )
        super().__init__(num_states, num_symbols, hidden_dim, blocks=blocks, **options)
        self.num_tags = num_tags
        self.tag_net = Residual(hidden_dim)
        self.tag = nn.Parameter(
            torch.empty(num_tags, hidden_dim).uniform_(-1, 1) * hidden_dim**-0.5
        )
        self.tag_bias = nn.Parameter(torch.zeros(num_tags))

    def _build(
        self, states: Tensor | None, blocks: Blocks | None, lengths: Tensor, observed: Tensor | None
    ) -> HMM:
        words = super()._build(states, blocks, lengths, observed)
        *_, emit = self._vectors(states)
        emit = self.tag_net(emit)
        with full_precision(emit):
            logits = at_least_single(emit) @ self.tag.mT + self.tag_bias
            return TaggedHMM(words, logits.log_softmax(-1))


def tagged(data: Sequences) -> Sequences:
    """Words and tags as pairs ``(N, T, 2)``; -1 for the tags of data without labels.

    Args:
        data: Words ``(N, T)``; its labels, if there are some, are tags, -1 where not known.

    Raises:
        ValueError: If values are not one symbol a step, or labels are sets.

    Example:
        >>> data = Sequences.from_list([[3, 1]], labels=[[0, -1]])
        >>> tagged(data).values, tagged(data.without_labels()).values
        (tensor([[[ 3,  0],
                 [ 1, -1]]]), tensor([[[ 3, -1],
                 [ 1, -1]]]))
    """
    check_integers("values", data.values)
    if data.values.dim() != 2:
        raise ValueError(f"values must be (N, T) symbols; got {tuple(data.values.shape)}.")
    tags = torch.full_like(data.values, -1) if data.labels is None else data.labels
    if tags.dtype == torch.bool:
        raise ValueError("labels must be integer tags, -1 where one is not known; got booleans.")
    pairs = torch.stack([data.values, tags.to(data.values.dtype)], -1)
    new = data.without_labels()
    new.values = pairs
    return new
