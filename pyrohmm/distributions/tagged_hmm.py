r"""``TaggedHMM``: states that emit a word and a tag, and the most probable tags of words.

.. math:: p(w, y, z) = \prod_t p(w_t | z_t) \, p(y_t | z_t) \, p(z_t | z_{t-1})

Values are pairs ``(N, T, 2)`` of integers, a word and its tag, -1 where the tag is not known; one
call fits sequences with all tags, with some and with none. K states, V words, Y tags, B blocks of
at most w states.

References:
    Scaling Hidden Markov Language Models (Chiu and Rush, 2020), section 5.2 of the first draft
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_floats, check_integers, check_log_simplex, check_shape, check_trailing
from .._precision import full_precision
from .._transforms import refuse_transforms, transforming
from ..ops.log_space import step_mask
from ..ops.products import take_rows
from ..ops.tensor_cache import lazy
from .block_hmm import BlockHMM, BlockSymbols
from .forecast import sample_emission
from .observation import Streams


class WordAndTag(Streams):
    """A word and a tag, independent given the state: pairs of integers, -1 where one is missing.

    Args:
        words: Batched over the K states.
        tags: The same.

    Example:
        >>> both = WordAndTag(Categorical(torch.ones(2, 4)), Categorical(torch.ones(2, 3)))
        >>> both.log_prob(torch.tensor([[3, 1], [3, -1]])).exp()
        tensor([0.0833, 0.2500])
    """

    def __init__(self, words: Categorical, tags: Categorical) -> None:
        super().__init__([words, tags])

    @property
    def support(self) -> constraints.Constraint:
        """Pairs of integers; -1 is allowed."""
        sizes = [part.logits.size(-1) for part in self.parts]
        return _pairs_below(sizes, self.parts[0].logits)

    def split(self, values: Tensor) -> list[Tensor]:
        """The words and the tags of ``(*, 2)``, as floating point with NaN where one is missing."""
        values = values if values.dtype.is_floating_point else values.to(self.parts[0].logits.dtype)
        return list(values.masked_fill(values < 0, torch.nan).unbind(-1))

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Pairs of word and tag, ``(*, 2)``."""
        return torch.stack(torch.broadcast_tensors(*pieces), -1)

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> WordAndTag:
        """Expand to a larger batch."""
        return WordAndTag(*(part.expand(torch.Size(batch_shape)) for part in self.parts))


def _pairs_below(sizes: list[int], like: Tensor) -> constraints.Constraint:
    """Constraint: whole numbers from -1, of which each component is below its size."""
    numbers = constraints.integer_interval(-1, like.new_tensor(sizes) - 1)
    return constraints.independent(numbers, 1)


class TaggedSymbols(BlockSymbols):
    """Words emitted by the states of their blocks, and tags that any state may emit.

    Args:
        words: The words.
        log_tags: ``(K, Y)``, log-probabilities of tags in each state.
        log_unknown: ``(K,)``, score of a tag that is not known; zeros, which sum it out, by
            default.
    """

    event_shape = torch.Size((2,))

    def __init__(
        self, words: BlockSymbols, log_tags: Tensor, log_unknown: Tensor | None = None
    ) -> None:
        super().__init__(words.log_probs, words.blocks)
        check_floats("log_tags", log_tags)
        check_shape("log_tags", log_tags, (self.blocks.num_states, log_tags.size(-1)), "(K, Y)")
        self.words, self.log_tags, self.log_missing = words, log_tags, log_unknown

    @property
    def support(self) -> constraints.Constraint:
        """Pairs of integers; -1 is a tag that is not known."""
        return _pairs_below([self.blocks.num_symbols, self.log_tags.size(-1)], self.log_tags)

    @lazy
    def distribution(self) -> TorchDistribution:
        """Dense emission of words and tags in all K states, computed on access."""
        return WordAndTag(self.words.distribution, Categorical(logits=self.log_tags))

    def split(self, values: Tensor, known: Tensor, check: bool = True) -> tuple[Tensor, Tensor]:
        """Words and tags ``(*B, T)`` of ``values`` ``(*B, T, 2)``; 0 and -1 where not ``known``.

        ``check`` is whether to read the tags of an accelerator in order to check them.

        Raises:
            TypeError: If ``values`` are not integers.
            ValueError: If a tag is not below Y.
        """
        check_integers("values", values)
        refuse_transforms("a model of words and tags")
        words, tags = values.long().unbind(-1)
        words, tags = words.masked_fill(~known, 0), tags.masked_fill(~known, -1)
        if not check and tags.device.type != "cpu":
            return words, tags
        low, high = int(tags.min()), int(tags.max())
        num_tags = self.log_tags.size(-1)
        if low < -1 or high >= num_tags:
            raise ValueError(
                f"tags must lie between 0 and Y - 1 = {num_tags - 1}, or be -1 where they are not "
                f"known; got values from {low} to {high}. Count tags from 0."
            )
        return words, tags

    def likelihood(
        self, values: Tensor, lengths: Tensor, observed: Tensor | None = None, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of words and tags ``(N, T, 2)`` in the states of each word's block."""
        known = step_mask(lengths, values.size(1), values.device)
        known = known if observed is None else known & observed
        words, tags = self.split(values, known, check)
        same = None if observed is not None else values
        blocks, log_likelihood = self._of(words, same, lengths, check)
        unknown = self.log_missing
        unknown = self.log_tags.new_zeros(len(self.log_tags)) if unknown is None else unknown
        states = self.blocks.states.clamp(min=0).flatten().to(tags.device)
        table = torch.cat([self.log_tags.mT, unknown.unsqueeze(0)])  # the last for -1
        table = table.index_select(-1, states).reshape(-1, self.blocks.width)
        rows = torch.where(tags < 0, self.log_tags.size(-1), tags) * self.blocks.num_blocks
        return blocks, log_likelihood + take_rows(table, rows + blocks.to(tags.device))

    def sample(self, states: Tensor) -> Tensor:
        """Sample a word and a tag ``(*, 2)`` from each of ``states``."""
        tags = sample_emission(Categorical(logits=self.log_tags), states)
        return torch.stack([self.words.sample(states), tags], -1)


class TagPath(NamedTuple):
    """The most probable states and tags.

    Attributes:
        states: ``(*B, T)`` integers; padded steps hold 0.
        tags: The same.
    """

    states: Tensor
    tags: Tensor


class TaggedHMM(BlockHMM):
    r"""A :class:`pyrohmm.BlockHMM` whose states emit a tag beside each word.

    Any state may emit any tag. Its values are pairs ``(*B, T, 2)``; at a step whose tag is -1 the
    tag is summed out, so that with none known ``log_prob`` is that of the words. What a
    ``BlockHMM`` answers within blocks, this one does too.

    Tags of words are found exactly, by three rules: :meth:`best_tags` is right most often,
    :meth:`best_path` is the most probable path of states and tags, :meth:`sample_tags` samples
    from :math:`p(y | w)`. (The most probable path of tags alone, with the states summed out,
    cannot be found in polynomial time.) Tags that are known are kept, and condition the others.

    Args:
        words: The chain and its words.
        log_tags: ``(K, Y)``, log-probabilities of tags in each state.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the number of states differs, or (with the ``validate_args`` of ``words``)
            a row of ``log_tags`` does not sum to one.

    Example:
        >>> clusters = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> even = torch.full((4, 4), 0.25).log()
        >>> emission = torch.tensor([[0.5], [0.5], [1.0]]).log().expand(3, 2)
        >>> words = BlockHMM(even[0], even, emission, clusters, torch.tensor(2))
        >>> tags = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.0, 1.0], [0.5, 0.5]]).log()
        >>> TaggedHMM(words, tags).tag_probs(torch.tensor([[0, -1], [2, -1]]))
        tensor([[0.8000, 0.2000],
                [0.2500, 0.7500]])
    """

    _emission: TaggedSymbols

    def __init__(self, words: BlockHMM, log_tags: Tensor) -> None:
        if not isinstance(words, BlockHMM) or isinstance(words, TaggedHMM):
            text = f"words must be a BlockHMM; got {type(words).__name__}"
            raise TypeError(f"{text}. Call a module with blocks.")
        symbols, data = TaggedSymbols(words.symbols, log_tags), (words.lengths, words.observed)
        self._compose(words.chain, symbols, *data, validate_args=False, allowed=words.allowed)
        words._validated_alike(self)
        if self._validate_args and not transforming():
            check_log_simplex("log_tags", log_tags)

    @property
    def log_tags(self) -> Tensor:
        r"""Tag log-probabilities ``(K, Y)``, :math:`\log p(y_t \mid z_t)`."""
        return self._emission.log_tags

    @property
    def num_tags(self) -> int:
        """Number of tags, Y."""
        return self.log_tags.size(-1)

    @property
    def words(self) -> BlockHMM:
        """HMM of the words alone, with tags summed out."""
        return self._copied(BlockHMM, emission=self._emission.words)

    # Tags

    def log_prob_of_tags(self, values: Tensor) -> Tensor:
        r"""Log-probability of the tags that are known given the words, ``(*B)``, in nats.

        Two evidences: :math:`\log p(w, y) - \log p(w)`.
        """
        words, _ = self._split(values)
        return self.log_prob(values) - self.words.log_prob(words)

    def tag_probs(self, values: Tensor) -> Tensor:
        r"""Probability of each tag at each step, ``(*B, T, Y)``; zero at padded steps.

        .. math:: p(y_t | w) = \sum_k p(y_t | z_t = k) \, p(z_t = k | w)

        holds exactly, for a tag depends on nothing but its state. A known tag has probability one.
        """
        words, tags = self._split(values)
        with torch.no_grad(), full_precision(self.log_tags):
            if self.observed is not None:
                probs = self.posterior(values).state_probs @ self.log_tags.exp()
            else:
                probs = self._tag_probs(self.block_posterior(values).probs, words)
            tags = tags.expand(probs.shape[:-1]).unsqueeze(-1)
            known = torch.arange(self.num_tags, device=tags.device) == tags
            return torch.where(tags >= 0, known.to(probs.dtype), probs)

    def _tag_probs(self, state_probs: Tensor, words: Tensor) -> Tensor:
        """Tag probabilities ``(*B, T, Y)`` from state posteriors ``(*B, T, w)`` in word blocks."""
        blocks = self.blocks.symbol_block[words.cpu()].expand(state_probs.shape[:-1]).flatten()
        flat, table = state_probs.flatten(0, -2), self.log_tags.exp()
        probs = flat.new_zeros(len(flat), self.num_tags)
        for block in blocks.unique().tolist():
            steps = (blocks == block).nonzero().squeeze(-1).to(flat.device)
            states = self.blocks.states[block]
            states = states[states >= 0].to(flat.device)
            probs[steps] = flat[steps, : len(states)] @ table[states]
        return probs.reshape(*state_probs.shape[:-1], self.num_tags)

    def best_tags(self, values: Tensor) -> Tensor:
        """The most probable tag of each step by itself, ``(*B, T)`` integers; padded steps hold 0.

        No other rule is right at more steps, in expectation under the model.
        """
        return self.tag_probs(values).argmax(-1)

    def best_path(self, values: Tensor) -> TagPath:
        """The most probable path of states and tags together.

        At a tag that is not known each state has its most probable one. (:meth:`viterbi` is the
        path of states alone, with such tags summed out.)
        """
        _, tags = self._split(values)
        with torch.no_grad():
            best = self.log_tags.max(-1)
            symbols = TaggedSymbols(self._emission.words, self.log_tags, best.values)
            states = self._copied(emission=symbols).viterbi(values)
            path = torch.where(tags < 0, best.indices[states], tags)
        return TagPath(states, path.masked_fill(~self.exists, 0))

    def sample_tags(self, values: Tensor, sample_shape: Sequence[int] = ()) -> Tensor:
        r"""Sample tags from :math:`p(y | w)`, ``(*S, *B, T)`` integers; padded steps hold 0."""
        _, tags = self._split(values)
        with torch.no_grad():
            states = self.sample_states(values, sample_shape)
            samples = sample_emission(Categorical(logits=self.log_tags), states)
            return torch.where(tags < 0, samples, tags).masked_fill(~self.exists, 0)

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Words and tags ``(*B, T)``; 0 and -1 where a step is padded or missing."""
        check_trailing("values", values, (self.num_steps, 2), "(T, 2)")
        return self._emission.split(values, self.known)
