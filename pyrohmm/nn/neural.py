r"""``NeuralHMM``: softmaxes of networks applied to embeddings, for tens of thousands of states.

Symbols belong to blocks of states (:mod:`pyrohmm.ops.blocks.states`), and states are
dropped at random in training.

References:
    Scaling Hidden Markov Language Models (Chiu and Rush, 2020),
    https://aclanthology.org/2020.emnlp-main.103
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, cast

import torch
from pyro.distributions import Categorical
from pyro.nn import PyroModule
from torch import Tensor, nn

from .._checks import check_positive_number, check_size
from .._choices import first_values
from .._precision import at_least_single, full_precision
from ..chains.blocks import CarriedState
from ..distributions.block_hmm import BlockHMM, BlockSymbols, FinalState
from ..distributions.hmm import HMM
from ..ops.blocks.inner_products import InnerProductTransition, log_emission
from ..ops.blocks.states import Blocks
from ..ops.products import take_rows
from ..ops.tensor_cache import cached, cached_on
from .base import HMMModule

USES = ("start", "leave", "enter", "emit")  # of the embedding of a state


class Residual(PyroModule):
    r"""A residual block whose last operation is a layer normalisation (eq. 3).

    .. math:: f(E) = g(\mathrm{ReLU}(E W_1)), \quad
              g(D) = \mathrm{LayerNorm}(\mathrm{ReLU}(D W_2) + D)

    Args:
        dim: D, of what goes in and of what comes out.

    Example:
        >>> Residual(8)(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = PyroModule[nn.Linear](dim, dim)
        self.outer = PyroModule[nn.Linear](dim, dim)
        self.norm = PyroModule[nn.LayerNorm](dim)

    def forward(self, vectors: Tensor) -> Tensor:
        """Apply the block to vectors ``(*, D)``."""
        hidden = self.inner(vectors).relu()
        return self.norm(self.outer(hidden).relu() + hidden)


class StateEmbedding(PyroModule):
    """Embeddings of states: one table, or one of states and one of blocks, half of each.

    Args:
        num_states: K.
        dim: D.
        blocks: With these the embedding is factored: D / 2 numbers of the state, and D / 2 of its
            block, which a :class:`Residual` joins.
        scale: Initial standard deviation; by default :math:`D^{-1/2}`.

    Raises:
        ValueError: If it is to be factored, and D is odd.
    """

    def __init__(
        self, num_states: int, dim: int, blocks: Blocks | None = None, scale: float | None = None
    ) -> None:
        super().__init__()
        scale = dim**-0.5 if scale is None else scale
        state_dim = dim
        if blocks is not None:
            if dim % 2:
                text = f"factored embeddings need an even dimension; got {dim}"
                raise ValueError(f"{text}. Add one to it.")
            state_dim = dim // 2
            self.block = nn.Parameter(scale * torch.randn(blocks.num_blocks, state_dim))
            self.register_buffer("owner", blocks.owner.to(self.block.device), persistent=False)
        self.state = nn.Parameter(scale * torch.randn(num_states, state_dim))

    def forward(self, states: Tensor | None) -> Tensor:
        """The embeddings of ``states``, or of all, ``(n, D)``."""
        vectors = self.state if states is None else take_rows(self.state, states)
        if "owner" not in self._buffers:
            return vectors
        block = take_rows(self.block, self.owner if states is None else self.owner[states])
        return torch.cat([block, vectors], -1)


class SymbolEmbedding(PyroModule):
    """Embedding table, a vector for each symbol, ``(V, D)``.

    Args:
        num_symbols: V.
        dim: D.
    """

    def __init__(self, num_symbols: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(num_symbols, dim).uniform_(-1, 1) * dim**-0.5)

    def forward(self) -> Tensor:
        """Embedding vectors of all symbols, ``(V, D)``."""
        return self.table


@dataclass(frozen=True)
class LinearDropout:
    """Dropout rate of states that is linear in the calls in training mode, then constant.

    A fit that goes on from its checkpoint with more steps may have a larger ``num_steps``.

    Args:
        begin: Share at the first call, at least 0 and less than 1.
        end: Share at call ``num_steps`` and after it.
        num_steps: Such as the number of steps of the fit.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> share = LinearDropout(0.5, 0.0, 100)
        >>> share(0), share(50), share(200)
        (0.5, 0.25, 0.0)
    """

    begin: float
    end: float
    num_steps: int
    may_differ: ClassVar[tuple[str, ...]] = ("num_steps",)  # from that of a checkpoint
    by_call: ClassVar[bool] = True  # a number of Python, which a captured graph would not see again

    def __post_init__(self) -> None:
        check_dropout("begin", self.begin)
        check_dropout("end", self.end)
        check_size("num_steps", self.num_steps)

    def __call__(self, step: int) -> float:
        """Dropout rate at a ``step``, from 0."""
        return self.begin + (self.end - self.begin) * min(1.0, step / self.num_steps)


def check_dropout(name: str, share: float) -> None:
    """Raise unless ``share`` is a dropout rate, at least 0 and less than 1."""
    if not isinstance(share, Real) or not 0 <= share < 1:
        text = f"{name} must be at least 0 and less than 1; got {share!r}"
        raise ValueError(f"{text}. 0 drops nothing.")


def sample_kept_states(blocks: Blocks, kept: Blocks, device: torch.device) -> Tensor:
    """Sample states of ``blocks``, as many of each as ``kept`` has, all alike: ascending, ``(n,)``.

    They are drawn on the ``device``, by its generator, and the host does not wait for them.
    """
    uniform = torch.rand(blocks.num_states, dtype=torch.float64, device=device)
    keys = blocks.without_padding(blocks.by_block(uniform), 2.0)
    least = keys.topk(kept.width, largest=False).indices
    states = cached_on(device, blocks.states).gather(1, least)
    return kept.of_states(kept.without_padding(states, blocks.num_states).sort(-1).values)


def _check_particles(module: PyroModule) -> None:
    """Raise if a variable with a prior has several particles, which networks cannot take."""
    for path, part in module.named_modules():
        for name, prior in getattr(part, "_pyro_samples", {}).items():
            prior = prior if hasattr(prior, "event_shape") else prior(part)
            dims = len(prior.batch_shape + prior.event_shape)
            shape = getattr(part, name).shape
            if len(shape) != dims:
                raise ValueError(
                    f"{f'{path}.{name}'.lstrip('.')} must have {dims} dimensions; got shape "
                    f"{tuple(shape)}. Models with thousands of states take one set of parameters "
                    "at a time: use vectorize_particles=False, or Predictive(parallel=False)."
                )


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether tensors are equal, of the same types and on the same devices."""
    return len(some) == len(others) and all(
        (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
        for a, b in zip(some, others)
    )


class NeuralHMM(HMMModule):
    r"""HMM whose logits are inner products of networks of embeddings (eq. 3, 4).

    .. math:: p(z'|z) \propto \exp(E_{z'} \cdot f(E_z)), \quad
              p(x|z) \propto \exp(E_x \cdot g(E_z) + b_x), \quad
              p(z_1) \propto \exp(w \cdot h(E_{z_1}) + c)

    with a :class:`Residual` each for f, g and h. With ``blocks`` each symbol is emitted by the
    states of its block alone, and inference is exact at :math:`O(w^2)` a step. The sum in
    :math:`p(z'|z)` takes :math:`O(K^2 D)` each time parameters change; ``two_level`` transitions,

    .. math:: p(z'|z) = p(b'|z) \, p(z'|z, b'), \quad
              p(b'|z) = \mathrm{softmax}(M f(E_z) + m), \quad
              p(z'|z, b') \propto \exp(E_{z'} \cdot f(E_z)) \text{ in block } b',

    need no sum over all states (a parameterization of this package, from no paper).

    Parameters have no priors, so that :func:`pyrohmm.fit_map` is maximum likelihood. Any may have
    one, as in every ``PyroModule``; particles then come one at a time
    (``vectorize_particles=False``). Under ``torch.autocast`` networks, and
    the inner products within blocks, are in lower precision; probabilities are not.

    Args:
        num_states: K.
        num_symbols: V.
        hidden_dim: D.
        blocks: Which states may emit which symbol; all of them by default.
        two_level: Whether transitions have two levels; with blocks.
        tied: Whether a state has one embedding for all its uses, or four: as first state, left,
            entered and emitting.
        factored: Whether half of each embedding is that of the block; see :class:`StateEmbedding`.
        dropout: Share of the states of each block that is left out, at each call in training mode:
            see :func:`sample_kept_states`. The HMM then has fewer states, and costs less. A
            :class:`LinearDropout` changes with the calls, such as from 0.5 to none at the end.
        scale: Initial standard deviation of the embeddings of states; by default
            :math:`D^{-1/2}`, with which that of logits is about one. With 1, as in the code, the
            initial transitions are nearly deterministic, and training takes longer.
        words: Called without arguments, returns vectors of symbols ``(V, D)``; by default a
            :class:`SymbolEmbedding`.

    Raises:
        ValueError: If a size is less than one, or arguments do not fit each other.

    Example:
        >>> from pyrohmm import blocks
        >>> _ = pyro.set_rng_seed(0)
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 0, 1, 1]), 4)
        >>> module = NeuralHMM(8, 5, hidden_dim=16, blocks=two, dropout=0.5)
        >>> module(torch.tensor([3, 2])).num_states, module.eval()(torch.tensor([3, 2])).num_states
        (4, 8)
    """

    may_differ = ("num_drawn",)  # from that of a checkpoint, which restores it

    @first_values()
    def __init__(
        self,
        num_states: int,
        num_symbols: int,
        hidden_dim: int = 256,
        *,
        blocks: Blocks | None = None,
        two_level: bool = False,
        tied: bool = True,
        factored: bool = False,
        dropout: float | LinearDropout = 0.0,
        scale: float | None = None,
        words: Any = None,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        check_size("num_symbols", num_symbols)
        check_size("hidden_dim", hidden_dim)
        if blocks is not None and (blocks.num_states, blocks.num_symbols) != (
            num_states, num_symbols,
        ):  # fmt: skip
            raise ValueError(
                f"blocks must be of {num_states} states and {num_symbols} symbols, as the model; "
                f"got {blocks}. Make them of its vocabulary."
            )
        if not isinstance(dropout, LinearDropout):
            check_dropout("dropout", dropout)
        else:
            self.register_buffer("num_drawn", torch.tensor(0))
        if blocks is None and (two_level or factored):
            name = "two_level" if two_level else "factored"
            text = f"{name}=True needs blocks of states, blocks=; got None"
            raise ValueError(f"{text}. Make them by blocks.from_clusters.")
        if scale is not None:
            check_positive_number("scale", scale, "Leave it out for the default.")
        self.num_states, self.num_symbols, self.blocks = num_states, num_symbols, blocks
        self.dropout: float | LinearDropout = dropout
        one = torch.tensor([0], device="cpu"), torch.tensor([num_states], device="cpu")
        self._partition = Blocks(*one) if blocks is None else blocks
        parts = [] if blocks is None else [blocks.symbol_block, blocks.sizes, blocks.states]
        self._digest = zlib.crc32(repr([part.tolist() for part in parts]).encode())
        self._lazy_last: tuple[list[Tensor], HMM] | None = None
        for use in USES:
            if use == USES[0] or not tied:
                table = StateEmbedding(num_states, hidden_dim, blocks if factored else None, scale)
            setattr(self, f"{use}_vectors", table)
            if factored:
                setattr(self, f"{use}_joint", Residual(hidden_dim))
        self.factored, self.two_level, self.tied = factored, two_level, tied
        self.start_net, self.leave_net = Residual(hidden_dim), Residual(hidden_dim)
        self.emit_net = Residual(hidden_dim)
        self.start_score = PyroModule[nn.Linear](hidden_dim, 1)
        if two_level:
            assert blocks is not None
            self.block_score = PyroModule[nn.Linear](hidden_dim, blocks.num_blocks)
        self.words = SymbolEmbedding(num_symbols, hidden_dim) if words is None else words
        self.bias = nn.Parameter(torch.zeros(num_symbols))

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        _check_particles(self)
        sampled = any(getattr(part, "_pyro_samples", ()) for part in self.modules())
        is_fixed = isinstance(self.words, nn.Module) and not sampled
        if self.training or torch.is_grad_enabled() or not is_fixed:
            self._lazy_last = None
            return self._build(*self._kept(), lengths, observed)
        # without gradients the last HMM still holds, if no number has changed
        numbers = [*self.parameters(), *self.buffers()]
        if self._lazy_last is not None and _are_same(self._lazy_last[0], numbers):
            return self._lazy_last[1].replace(lengths=lengths, observed=observed)
        hmm = self._build(None, self.blocks, lengths, observed)
        self._lazy_last = [tensor.clone() for tensor in numbers], hmm
        return hmm

    def get_extra_state(self) -> Tensor:
        """Extra entry of ``state_dict``: a digest of the blocks."""
        return torch.tensor(self._digest)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise if the saved parameters are of a model with other blocks."""
        if int(state) != self._digest:
            raise ValueError(
                "the parameters are of a model with other blocks, in which other states emit the "
                "symbols. Build the module with the blocks that were saved."
            )

    def _kept(self) -> tuple[Tensor | None, Blocks | None]:
        """Sample the states that dropout keeps, None if all of them, and their blocks."""
        share = self.dropout
        if not (self.training and share):
            return None, self.blocks
        if isinstance(share, LinearDropout):
            share = share(self._next_call())
        if share == 0:
            return None, self.blocks
        kept = self._partition.keep(share)
        states = sample_kept_states(self._partition, kept, next(self.parameters()).device)
        return states, None if self.blocks is None else kept

    def _next_call(self) -> int:
        """Count a call in training mode: how many there were, read if others have counted some."""
        count = cached(self.num_drawn, lambda: int(self.num_drawn))
        self.num_drawn += 1
        return cached(self.num_drawn, lambda: count + 1) - 1

    def _build(
        self, states: Tensor | None, blocks: Blocks | None, lengths: Tensor, observed: Tensor | None
    ) -> HMM:
        start, leave, enter, emit = self._vectors(states)
        start = self.start_score(self.start_net(start)).squeeze(-1)
        leave, emit, words = self.leave_net(leave), self.emit_net(emit), self.words()
        with full_precision(leave):  # networks may do with less, probabilities may not
            vectors, parts = leave, (start, leave, enter, emit, words)
            start, leave, enter, emit, words = map(at_least_single, parts)
            initial = start.log_softmax(-1)
            if blocks is None:
                transition = (leave @ enter.mT).log_softmax(-1)
                emission = Categorical(logits=emit @ words.mT + self.bias)
                return HMM(initial, transition, emission, lengths, observed)
            logits = self.block_score(leave) if self.two_level else None
            matrix = InnerProductTransition(vectors, enter.to(vectors.dtype), blocks, logits)
            symbols = BlockSymbols(log_emission(emit, words, self.bias, blocks), blocks)
            return BlockHMM(initial, matrix, symbols, blocks, lengths, observed)

    def _vectors(self, states: Tensor | None, uses: tuple[str, ...] = USES) -> list[Tensor]:
        """State embeddings for each of ``uses``, of ``states`` or of all states."""
        if self.tied:
            vectors = [self.start_vectors(states)] * len(uses)
        else:
            vectors = [getattr(self, f"{use}_vectors")(states) for use in uses]
        if self.factored:
            return [getattr(self, f"{use}_joint")(vector) for use, vector in zip(uses, vectors)]
        return vectors

    def continue_from(
        self, lengths: Tensor, ending: FinalState | None, continues: Tensor
    ) -> tuple[BlockHMM, Tensor]:
        """The HMM for sequences of which some continue others.

        The final state of those has a fixed distribution, without gradients; the transition from
        it to the first step is one of this HMM. In training mode states are dropped, but each final
        state can still be left.

        Args:
            lengths: ``(N,)`` integers.
            ending: Final states of the others, numbered as those of the whole model.
            continues: ``(N,)`` integers, which of the others each continues; -1 if none.

        Returns:
            The HMM, and which states of the whole model its states are, ``(K',)``.
        """
        if self.blocks is None:
            text = "continue_from needs a module with blocks of states; this one has none"
            raise ValueError(f"{text}. Give blocks=, or fit without windows.")
        _check_particles(self)
        every = torch.arange(self.num_states, device=next(self.parameters()).device)
        states, blocks = self._kept()
        hmm = cast(BlockHMM, self._build(states, blocks, lengths, None))
        goes_on = continues >= 0
        if ending is not None and bool(goes_on.any()):
            rows = ending.states[continues.clamp(min=0)]
            leave = self.leave_net(self._vectors(rows.clamp(min=0).flatten(), ("leave",))[0])
            with full_precision(leave):
                logits = self.block_score(at_least_single(leave)) if self.two_level else None
                transition = cast(InnerProductTransition, hmm.transition)
                shares = transition.log_block_probs_from(leave, logits)
            log_probs = ending.log_probs[continues.clamp(min=0)].detach()
            log_probs = log_probs.masked_fill(rows < 0, -torch.inf)
            leave, shares = (part.unflatten(0, rows.shape) for part in (leave, shares))
            hmm = hmm.continue_from(CarriedState(leave, shares, log_probs, goes_on))
        return hmm, every if states is None else states
