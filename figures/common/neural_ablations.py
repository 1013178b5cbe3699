"""What the paper and code of the neural HMM have besides: a baseline, noise, other emissions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from pyro.distributions import Categorical
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyrohmm import HMM, BlockHMM, NeuralHMM
from pyrohmm._checks import check_floats, check_shape, check_size
from pyrohmm._precision import at_least_single
from pyrohmm.distributions.block_hmm import BlockSymbols
from pyrohmm.nn.neural import LinearDropout, Residual, check_dropout
from pyrohmm.ops.blocks.states import Blocks


class ScalarHMM(NeuralHMM):
    """HMM whose logits are the parameters, with blocks and state dropout (eq. 2).

    A baseline of :class:`NeuralHMM`.

    Args:
        num_states: K.
        num_symbols: V.
        blocks: Which states may emit which symbol; all of them by default.
        dropout: As in :class:`NeuralHMM`.
    """

    def __init__(
        self,
        num_states: int,
        num_symbols: int,
        *,
        blocks: Blocks | None = None,
        dropout: float | LinearDropout = 0.0,
    ) -> None:
        super().__init__(num_states, num_symbols, 1, blocks=blocks, dropout=dropout)
        for name in [name for name, _ in self.named_children()] + ["bias"]:
            delattr(self, name)  # there are no networks
        self.words = nn.Identity()
        width = num_states if blocks is None else blocks.width
        self.start = nn.Parameter(torch.randn(num_states))
        self.transition = nn.Parameter(torch.randn(num_states, num_states))
        self.emit = nn.Parameter(torch.randn(num_symbols, width))

    def _build(
        self, states: Tensor | None, blocks: Blocks | None, lengths: Tensor, observed: Tensor | None
    ) -> HMM:
        every = slice(None) if states is None else states
        start, transition, emit = self.start, self.transition, self.emit
        initial = start[every].log_softmax(-1)
        matrix = transition[every][:, every].log_softmax(-1)
        if blocks is None or self.blocks is None:
            emission = Categorical(logits=emit.mT[every])  # (K, V)
            return HMM(initial, matrix, emission, lengths, observed)
        table = normalised(emit, self.blocks)
        if states is not None:
            places = _places(self.blocks, states.cpu())[self.blocks.symbol_block].to(table.device)
            table = table.gather(1, places.clamp(min=0))
        return BlockHMM(initial, matrix, table, blocks, lengths, observed)


def _places(blocks: Blocks, states: Tensor) -> Tensor:
    """Which places of each block hold the states that ``Blocks.keep`` keeps, ``(B, w')``.

    -1 where fewer than w' are kept, the number of the block that keeps most.
    """
    kept = torch.isin(blocks.states, states)
    order = (~kept).byte().argsort(dim=-1, stable=True)
    return order.masked_fill(~kept.gather(-1, order), -1)[:, : int(kept.sum(-1).max())]


def allocate(
    num_states: int, assignment: Tensor, counts: Tensor | None = None, power: float = 1.0
) -> Tensor:
    """Divide states among clusters, equally or by how often their words occur.

    What is not whole goes by the largest remainders, to the first clusters where they are equal.
    Clusters whose share is below one get one state, and the others divide the rest.

    Args:
        num_states: K, at least C.
        assignment: ``(V,)`` integers, the cluster of each word.
        counts: ``(V,)`` integers, at least 0, how often each word occurs; by default the clusters
            get equally many.
        power: From 0 to 1. A cluster's share is the sum of its counts to this power: in proportion
            by default; 0.5, the root, leaves more to rare clusters.

    Returns:
        ``(C,)`` long, at least 1 each, K in sum.

    Raises:
        ValueError: If there are fewer states than clusters, a cluster has no word, no word occurs,
            or the power is out of range.
    """
    sizes = torch.bincount(assignment.long()).cpu().numpy()
    if not sizes.all():
        raise ValueError(
            f"assignment must have a word in every cluster; {sizes.argmin()} has none."
        )
    check_size("num_states", num_states, len(sizes))
    if not 0 <= power <= 1:
        raise ValueError(f"power must be from 0, equal shares, to 1, in proportion; got {power}.")
    mass: np.ndarray = np.ones(len(sizes))
    if counts is not None:
        check_shape("counts", counts, tuple(assignment.shape), "(V,)")
        mass = np.bincount(assignment.cpu().numpy(), counts.cpu().numpy()) ** power
        if not mass.sum() > 0:
            raise ValueError("counts must be at least 0, and not all of them 0.")
    out = np.ones(len(sizes), np.int64)
    large, left = np.arange(len(sizes)), num_states
    while True:
        share = mass[large] * left  # in units of one over the sum of their masses
        total = mass[large].sum()
        if (share >= total).all():
            break
        large, left = large[share >= total], left - int((share < total).sum())
    whole, remainder = np.divmod(share, total)
    out[large] = whole
    most = np.argsort(-remainder, kind="stable")[: left - int(out[large].sum())]
    out[large[most]] += 1
    return torch.from_numpy(out).to(assignment.device)


def normalised(logits: Tensor, blocks: Blocks) -> Tensor:
    """Log-probabilities of symbols in the states of their blocks, ``(V, w)``; -inf beyond a block.

    Args:
        logits: ``(V, w)``, of each symbol in the states of its block; finite.
        blocks: Which states those are. Each state has a softmax over its symbols.
    """
    rows = blocks.states[blocks.symbol_block].to(logits.device)
    place = rows.masked_fill(rows < 0, blocks.num_states).flatten()
    peak = logits.new_full((blocks.num_states + 1,), -torch.inf)
    peak = peak.scatter_reduce(0, place, logits.detach().flatten(), "amax")
    shifted = (logits.flatten() - peak[place]).exp()
    total = peak + torch.zeros_like(peak).index_add(0, place, shifted).log()
    logs = logits - total.index_select(0, place).view_as(logits)
    return logs.masked_fill(rows < 0, -torch.inf)


# Other vectors of words, other states of words ---------------------------------------------------


class CharCNN(PyroModule):
    r"""A vector for each word, from its letters: convolutions, and a maximum over positions.

    Every word is spelt with a mark before and after it. For each width there are filters of that
    many letters, whose maxima over the word go through tanh. Shorter words are padded with zeros.

    Args:
        words: The V words.
        dim: D.
        char_dim: Of the embeddings of letters.
        widths: Of the filters.
        num_filters: For each width; the values of all filters are then joined, and go through a
            highway layer and a linear map to D numbers. By default there are D for each width, and
            they are summed.

    Example:
        >>> CharCNN(["the", "cat", "cats"], dim=6)().shape
        torch.Size([3, 6])
    """

    def __init__(
        self,
        words: Sequence[str],
        dim: int,
        *,
        char_dim: int = 16,
        widths: Sequence[int] = (1, 2, 3, 4, 5, 6, 7),
        num_filters: int | None = None,
    ) -> None:
        super().__init__()
        if len(words) == 0 or not all(isinstance(word, str) and word for word in words):
            raise ValueError("words must be strings of at least one letter, and at least one word.")
        letters = sorted({letter for word in words for letter in word})
        lengths = torch.tensor([len(word) + 2 for word in words])
        order = lengths.argsort(stable=True)
        self.lengths, self.counts = (part.tolist() for part in lengths.unique(return_counts=True))
        code = {letter: number for number, letter in enumerate(letters, 2)}  # 0, 1: marks
        spelt = [[0, *(code[letter] for letter in words[word]), 1] for word in order.tolist()]
        spellings = torch.tensor([number for word in spelt for number in word])
        self.register_buffer("spellings", spellings, persistent=False)  # shortest words first
        self.register_buffer("place", order.argsort(), persistent=False)
        self.letter = nn.Parameter(torch.randn(len(letters) + 2, char_dim))
        if num_filters is not None:
            total = num_filters * len(widths)
            self.gate = PyroModule[nn.Linear](total, total)
            self.carry = PyroModule[nn.Linear](total, total)
            self.out = PyroModule[nn.Linear](total, dim, bias=False)
        self.joined = num_filters is not None
        self.filters = PyroModule[nn.ModuleList](
            [PyroModule[nn.Conv1d](char_dim, num_filters or dim, width) for width in widths]
        )

    def forward(self) -> Tensor:
        """The vectors, ``(V, D)``."""
        letters = self.letter[self.spellings]
        sizes = [count * length for count, length in zip(self.counts, self.lengths)]
        groups = [
            self._filtered(part.view(count, length, -1).mT)
            for part, count, length in zip(letters.split(sizes), self.counts, self.lengths)
        ]
        joined = torch.cat(groups)[self.place]
        if not self.joined:
            return joined
        gate = self.gate(joined).sigmoid()
        return self.out(gate * self.carry(joined).relu() + (1 - gate) * joined)

    def _filtered(self, letters: Tensor) -> Tensor:
        """Maxima of the filters over words of one length, ``(n, char_dim, L)``."""
        values = []
        for kernel in self.filters:
            short = max(0, kernel.kernel_size[0] - letters.size(-1))
            values.append(kernel(nn.functional.pad(letters, (0, short))).amax(-1).tanh())
        return torch.cat(values, -1) if self.joined else torch.stack(values).sum(0)


class RandomStatesHMM(NeuralHMM):
    """A :class:`NeuralHMM` in which each word has states of its own, drawn uniformly.

    A state that no word has then takes the place of one that several have.

    Args:
        sizes: As of :class:`NeuralHMM`.
        states_per_symbol: How many states may emit a word.
        **options: Of :class:`NeuralHMM`, without blocks and dropout.
    """

    def __init__(self, *sizes: int, states_per_symbol: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        size, count = self.num_states, self.num_symbols
        rows = [torch.randperm(size)[:states_per_symbol] for _ in range(count)]
        members = torch.stack(rows).flatten()
        uses = members.bincount(minlength=size)
        for state in (uses == 0).nonzero().flatten().tolist():
            spare = int((uses[members] > 1).byte().argmax())
            uses[members[spare]] -= 1
            uses[state], members[spare] = 1, state
        never = torch.ones(size, count, dtype=torch.bool)
        never[members, torch.arange(count).repeat_interleave(states_per_symbol)] = False
        self.register_buffer("never", never, persistent=False)

    def _build(self, *parts: Any) -> HMM:
        hmm = super()._build(*parts)
        logits = hmm.emission.logits.masked_fill(self.never, -torch.inf)
        emission = Categorical(logits=logits)
        return HMM(hmm.log_initial, hmm.log_transition, emission, hmm.lengths, hmm.observed)


# Noise in training ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingNoise:
    r"""Dropout of transitions, columns, first states and words in training; all states remain.

    What is left out has probability zero, and the rest is normalised again. Of the states of a
    block at least one can be first, and at least one entered from each state, so that no sequence
    becomes impossible. All K² transitions are computed where some are left out: state dropout costs
    less.

    Args:
        transition: Of single transitions, chosen for each pair of states (unstructured dropout).
        column: Of states, which no transition enters.
        start: Of states, which are not first.
        word: Of words that tell no state of their block from another: uniform over those that the
            state may emit. Which they are is summed out, :math:`(1 - s) \, p(x|z) + s / V_z`.

    Raises:
        ValueError: If a share is not at least 0 and less than 1.
    """

    transition: float = 0.0
    column: float = 0.0
    start: float = 0.0
    word: float = 0.0

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            check_dropout(name, share)

    def __call__(self, hmm: HMM) -> HMM:
        """The HMM without what is left out this time; its states emit symbols."""
        blocks = hmm.blocks if isinstance(hmm, BlockHMM) else None
        initial, size = hmm.log_initial, hmm.num_states
        transition: Any = hmm.transition if isinstance(hmm, BlockHMM) else hmm.log_transition
        if self.start:
            initial = _only(initial, _sample_kept(torch.rand_like(initial), blocks, self.start))
        if self.transition or self.column:
            transition = hmm.log_transition
            columns = _sample_kept(torch.rand_like(initial), blocks, self.column)
            chances = torch.rand_like(transition).masked_fill(~columns, -1.0)
            transition = _only(transition, _sample_kept(chances, blocks, self.transition))
        if not isinstance(hmm, BlockHMM):
            count = initial.new_tensor(hmm.emission.logits.size(-1))
            emission = Categorical(logits=self._blurred(hmm.emission.logits, count))
            return HMM(initial, transition, emission, hmm.lengths, hmm.observed)
        symbols = hmm.symbols
        if self.word:
            rows = hmm.blocks.states[hmm.blocks.symbol_block]
            counts = torch.bincount(rows[rows >= 0], minlength=size).to(initial)
            table = self._blurred(hmm.log_emission, counts[rows.to(initial.device)])
            symbols = BlockSymbols(table, hmm.blocks)
        return BlockHMM(initial, transition, symbols, hmm.blocks, hmm.lengths, hmm.observed)

    def _blurred(self, log_probs: Tensor, count: Tensor) -> Tensor:
        """Log of (1 - s) p + s / count."""
        if not self.word:
            return log_probs
        return torch.logaddexp(
            log_probs + math.log1p(-self.word), math.log(self.word) - count.log()
        )


def _only(log_probs: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities of what is kept, normalised again."""
    return log_probs.masked_fill(~kept, -torch.inf).log_softmax(-1)


def _sample_kept(chances: Tensor, blocks: Blocks | None, share: float) -> Tensor:
    """Whether each number is at least ``share``, or the largest of its block, ``(*, K)``."""
    kept = chances >= share
    if blocks is None:
        return kept.scatter(-1, chances.argmax(-1, keepdim=True), True)
    rows = blocks.states.to(chances.device)
    places = chances[..., rows.clamp(min=0)].masked_fill(rows < 0, -torch.inf).argmax(-1)
    return kept.scatter(-1, rows[torch.arange(len(rows), device=rows.device), places], True)


class _Noisy:
    """A model with noise: what :class:`TrainingNoise` leaves out at each call in training mode."""

    def __init__(self, *sizes: int, noise: TrainingNoise, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.noise = noise

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths``."""
        hmm = super().forward(lengths, observed)
        return self.noise(hmm) if self.training else hmm

    def continue_from(self, *_: Any) -> Any:
        """Refused."""
        raise ValueError("sequences continue in windows only without noise.")


class NoisyNeuralHMM(_Noisy, NeuralHMM):
    """A :class:`NeuralHMM` with noise."""


class NoisyScalarHMM(_Noisy, ScalarHMM):
    """A :class:`ScalarHMM` with noise."""


# Emissions -----------------------------------------------------------------------------------


class ProjectedEmbedding(PyroModule):
    """A vector for each symbol, a linear map of a shorter or known one: of rank R at most.

    Args:
        table: ``(V, R)``, such as of word2vec, which stays as it is; an ``nn.Parameter`` is learnt.
        dim: D.
    """

    def __init__(self, table: Tensor, dim: int) -> None:
        super().__init__()
        check_floats("table", table)
        if isinstance(table, nn.Parameter):
            self.table = table
        else:
            self.register_buffer("table", table)
        rank = table.size(-1)
        self.map = nn.Parameter(torch.empty(rank, dim).uniform_(-1, 1) * (rank * dim) ** -0.5)

    def forward(self) -> Tensor:
        """The vectors, ``(V, D)``."""
        return self.table @ self.map


class PreviousSymbols(PyroModule):
    """A vector of the n symbols before each step: the expert of a feed-forward n-gram.

    Args:
        num_symbols: V.
        dim: D.
        lags: n.
    """

    def __init__(self, num_symbols: int, dim: int, lags: int = 2) -> None:
        super().__init__()
        check_size("lags", lags)
        self.num_symbols, self.lags = num_symbols, lags
        self.table = nn.Parameter(torch.randn(num_symbols + 1, dim))  # the last: before the first
        self.joint = PyroModule[nn.Linear](lags * dim, dim)
        self.net = Residual(dim)

    def forward(self, symbols: Tensor) -> Tensor:
        """From symbols ``(N, T)`` to vectors ``(N, T, D)``."""
        padded = nn.functional.pad(symbols, (self.lags, 0), value=self.num_symbols)[:, :-1]
        before = padded.unfold(-1, self.lags, 1)  # (N, T, n)
        return self.net(self.joint(self.table[before].flatten(-2)))


def log_product(
    table: Tensor, words: Tensor, context: Tensor, symbols: Tensor, blocks: Blocks
) -> Tensor:
    r"""Log-probabilities of symbols under a product of experts, ``(M, w)``; -inf beyond a block.

    .. math:: p(x | z, c) = p(x | z) \, e^{c \cdot E_x} \Big/
              \sum_{x'} p(x' | z) \, e^{c \cdot E_{x'}}

    over the symbols of the block: one product of matrices for each block that occurs, in float64,
    as the experts may all but exclude each other.

    Args:
        table: ``(V, w)``, log p(x | z), of :func:`log_emission`.
        words: ``(V, D)``, E.
        context: ``(M, D)``, c.
        symbols: ``(M,)``, x.
        blocks: Which states may emit which symbol; disjoint.
    """
    owner, parts, order = blocks.symbol_block[symbols.cpu()], [], []
    for block in owner.unique().tolist():
        token = (owner == block).nonzero().squeeze(-1).to(table.device)
        word = (blocks.symbol_block == block).nonzero().squeeze(-1).to(table.device)
        width = int(blocks.sizes[block])
        scores, rows = context[token] @ words[word].mT, table[word, :width]
        scores = scores.double().log_softmax(-1)
        total = (scores.exp() @ rows.double().exp()).log()
        place = torch.searchsorted(word, symbols[token])
        product = rows[place] + (scores.gather(1, place.unsqueeze(-1)) - total).to(rows.dtype)
        space = (0, table.size(1) - width)
        parts.append(torch.nn.functional.pad(product, space, value=-torch.inf))
        order.append(token)
    return torch.cat(parts)[torch.cat(order).argsort()]


class ExpertSymbols(BlockSymbols):
    r"""Products of two experts: of the state, and of the symbols before.

    .. math:: p(x_t | z_t, x_{<t}) \propto p(x_t | z_t) \, \exp(c(x_{<t}) \cdot E_{x_t})

    normalised over the symbols of the block.

    Args:
        log_probs: As of :class:`BlockSymbols`, :math:`\log p(x|z)`.
        blocks: They are disjoint.
        words: ``(V, D)``, E.
        context: From symbols ``(N, T)`` to vectors c ``(N, T, D)``, each of the symbols before.
    """

    def __init__(
        self, log_probs: Tensor, blocks: Blocks, words: Tensor, context: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(log_probs, blocks)
        self.words, self.context = words, context

    def _of(
        self, symbols: Tensor, values: Tensor | None, lengths: Tensor, check: bool
    ) -> tuple[Tensor, Tensor]:
        blocks, alone = super()._of(symbols, values, lengths, check)
        vectors = at_least_single(self.context(symbols)).to(self.words.dtype).flatten(0, 1)
        found = log_product(self.log_probs, self.words, vectors, symbols.flatten(), self.blocks)
        return blocks, found.view_as(alone)

    def refuse(self, query: str) -> NoReturn:
        """Raise: every symbol must be given."""
        raise NotImplementedError(
            f"every symbol must be given, as the next depends on it: there is no {query}."
        )

    def likelihood(
        self, values: Tensor, lengths: Tensor, observed: Tensor | None = None, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods with every step observed: see :meth:`BlockSymbols.likelihood`."""
        if observed is not None:
            self.refuse("missing step")
        return super().likelihood(values, lengths, None, check)

    @property
    def distribution(self) -> NoReturn:
        """Refused: it depends on the symbols before."""
        self.refuse("emission of all states")

    def sample(self, states: Tensor) -> NoReturn:
        """Refused, as :attr:`distribution`."""
        self.refuse("sample")


class ExpertHMM(NeuralHMM):
    """A :class:`NeuralHMM` whose emissions are products of two experts: :class:`ExpertSymbols`.

    Args:
        sizes: As of :class:`NeuralHMM`.
        context: Called with symbols ``(N, T)``, returns vectors ``(N, T, D)`` of the symbols before
            each, such as :class:`PreviousSymbols`.
        **options: Of :class:`NeuralHMM`, among them blocks.
    """

    def __init__(self, *sizes: int, context: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        if self.blocks is None:
            raise ValueError("context needs blocks.")
        self.context = context

    def _build(self, *parts: Any) -> BlockHMM:
        hmm: Any = super()._build(*parts)
        words = at_least_single(self.words())
        symbols = ExpertSymbols(hmm.log_emission, hmm.blocks, words, self.context)
        return BlockHMM(
            hmm.log_initial, hmm.transition, symbols, hmm.blocks, hmm.lengths, hmm.observed
        )

    def continue_from(self, *_: Any) -> Any:
        """Refused."""
        raise ValueError("sequences continue in windows only without context.")
