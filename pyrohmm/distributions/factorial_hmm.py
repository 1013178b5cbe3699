"""``FactorialHMM``: several independent chains of hidden states behind one observation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, NoReturn

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import (
    check_broadcast,
    check_floats,
    check_integers,
    check_log_simplex,
    check_range,
    check_trailing,
)
from ..ops import factorial
from ..ops import stationary as stationary_ops
from ..ops.recursions import ExpectedCounts
from ..ops.sampling import CategoricalTable, sample_path
from .hmm import HMM
from .structured import StructuredHMM


class FactorialPosterior(NamedTuple):
    """The posterior of a :class:`FactorialHMM`.

    Attributes:
        log_evidence: ``(*B)``, in nats.
        states: ``(*B, T, K)``, smoothed marginals of the product states; zero at padded steps.
        chains: M of ``(*B, T, K_m)``, those of each chain.
        transitions: M of ``(*B, K_m, K_m)``, expected number of transitions of each chain.
    """

    log_evidence: Tensor
    states: Tensor
    chains: tuple[Tensor, ...]
    transitions: tuple[Tensor, ...]


class FactorialHMM(StructuredHMM):
    r"""Sequences emitted by M independent Markov chains of hidden states together.

    .. math:: p(x_{1:T}) = \sum_{z^1, \dots, z^M} \prod_t p(x_t | z_t^1, \dots, z_t^M)
              \prod_m p(z_1^m) \prod_{t > 1} p(z_t^m | z_{t-1}^m)

    A factorial hidden Markov model (Ghahramani and Jordan, 1997). Its K = K_1 ⋯ K_M product states
    are those of an :class:`HMM`, numbered with the last chain fastest: :meth:`chain_states` tells
    those of each chain. Queries are those of ``HMM``, exact, the transition of one chain after
    another: in time O(T K (K_1 + ⋯ + K_M)), where an ``HMM`` of the same states takes O(T K²).
    :meth:`expanded` is that ``HMM``; ``log_transition`` is its matrix, made when it is read, as by
    :meth:`forecast`.

    Args:
        log_initials: M of ``(K_m,)``, log-probabilities of the first state of each chain.
        log_transitions: M of ``(K_m, K_m)``, of its next state; row = from, column = to.
        emission: Distribution of an observation, batched over the K product states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a product state is known not to be; see
            :meth:`restrict_chains`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If there is no chain, shapes or devices disagree, or (with ``validate_args``)
            probabilities do not sum to one.

    Example:
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> even = torch.full((2,), 0.5).log()
        >>> levels = Normal(torch.tensor([0.0, 1.0, 5.0, 6.0]), 0.3)  # 5 of one chain, 1 of another
        >>> hmm = FactorialHMM([even, even], [sticky, sticky], levels, torch.tensor(4))
        >>> values = torch.tensor([0.1, 1.1, 6.2, 5.9])
        >>> hmm.chain_states(hmm.viterbi(values))
        tensor([[0, 0],
                [0, 1],
                [1, 1],
                [1, 1]])
        >>> hmm.posterior(values).chains[0][:, 1].round(decimals=2)  # the chain of 5
        tensor([0., 0., 1., 1.])
    """

    _of_transition = "log_transitions"
    _recursions = factorial
    _arguments = "log_initials", "log_transitions"

    def __init__(
        self,
        log_initials: Sequence[Tensor],
        log_transitions: Sequence[Tensor],
        emission: TorchDistribution,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
    ) -> None:
        initials, transitions = _check_chains(log_initials, log_transitions)
        self.log_initials, self.log_transitions = initials, transitions
        check_integers("lengths", lengths)
        leads = {f"log_transitions[{m}]": t.shape[:-2] for m, t in enumerate(transitions)}
        lengths = lengths.expand(check_broadcast(leads | {"lengths": lengths.shape}))
        product = factorial.ProductTransition(transitions)
        super().__init__(
            reduce(_outer, initials), product, emission, lengths, observed, validate_args,
            emission_per_step=emission_per_step, allowed=allowed,
        )  # fmt: skip
        if self._validate_args:
            for m, table in enumerate(transitions):
                check_log_simplex(f"log_transitions[{m}]", table)

    @property
    def sizes(self) -> tuple[int, ...]:
        """K_1, ..., K_M: the number of states of each chain."""
        return tuple(table.size(-1) for table in self.log_transitions)

    def __repr__(self) -> str:
        return (
            super()
            .__repr__()
            .replace(f"({self.num_states} states", f"({' x '.join(map(str, self.sizes))} states", 1)
        )

    def expanded(self) -> HMM:
        """The same distribution as an HMM of the K product states, with its K x K matrix."""
        new = HMM(
            self.log_initial, self.log_transition, self.emission, self.lengths, self.observed,
            validate_args=False, emission_per_step=self.emission_per_step, allowed=self.allowed,
        )  # fmt: skip
        return self._validated_alike(new)

    def permute_states(self, order: Tensor) -> NoReturn:
        """Product states in another order are those of no chains: raises ValueError."""
        raise ValueError(
            "permute_states needs one chain; the states of this FactorialHMM are those of several. "
            "Pass hmm.expanded()."
        )

    # Product states and those of each chain

    def chain_states(self, states: Tensor) -> Tensor:
        """The state of each chain, ``(*S, *B, T, M)``, of product states ``(*S, *B, T)``."""
        check_integers("states", states)
        check_range("states", states, self.num_states, "K - 1", "K is that of the product.")
        parts = []
        for size in reversed(self.sizes):
            parts.append(states % size)
            states = states // size
        return torch.stack(parts[::-1], -1)

    def product_states(self, chains: Tensor) -> Tensor:
        """Product states ``(*S, *B, T)`` of the state of each chain, ``(*S, *B, T, M)``."""
        check_integers("chains", chains)
        check_trailing("chains", chains, (len(self.sizes),), "(M,)", "M is the number of chains.")
        states = torch.zeros_like(chains[..., 0])
        for m, (size, part) in enumerate(zip(self.sizes, chains.unbind(-1))):
            check_range(f"chains[..., {m}]", part, size, "K_m - 1", "Chains are in their order.")
            states = states * size + part
        return states

    def restrict_chains(self, labels: Tensor) -> HMM:
        """The same model, with the states of some chains at some steps known.

        As :meth:`HMM.restrict`, which takes product states.

        Args:
            labels: ``(*B, T, M)`` integers, the state of each chain, -1 where it is not known.

        Raises:
            ValueError: If a label is not below the number of states of its chain.
        """
        check_integers("labels", labels)
        check_trailing("labels", labels, (self.num_steps, len(self.sizes)), "(T, M)")
        parts = self.chain_states(torch.arange(self.num_states, device=labels.device))
        for m, size in enumerate(self.sizes):
            known = labels[..., m][self.exists.expand(labels.shape[:-1])].clamp(min=0)
            check_range(f"labels of chain {m}", known, size, f"K_{m + 1} - 1")
        wide = labels.unsqueeze(-2)
        return self.restrict(((wide == parts) | (wide < 0)).all(-1))

    def _marginals(self, probs: Tensor) -> tuple[Tensor, ...]:
        """Marginals ``(*, K_m)`` of each chain, of those of the product states ``(*, K)``."""
        wide = probs.unflatten(-1, self.sizes)
        axes = range(-len(self.sizes), 0)
        return tuple(
            wide.sum([other for other in axes if other != axis]) if len(axes) > 1 else wide
            for axis in axes
        )

    # Parameters and data as the recursions read them

    @property
    def num_counted(self) -> int:
        """Number of states of all chains, side by side: see :meth:`counted_factors`."""
        return sum(self.sizes)

    def counted_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, ...]:
        """As :meth:`HMM.counted_factors`, of all chains side by side.

        Log-probabilities of the first states ``(*B, S)`` with S = K_1 + ⋯ + K_M, of transitions
        ``(*B, 1, S, S)``, which are -inf between chains, and of the observations ``(*B, T, K)``.
        """
        likelihood = self._restricted_likelihood(values)
        if check:
            self._check_evidence(likelihood.amax(-1), values)
        initial = _side_by_side(self.log_initials)
        return initial, _diagonal(self.log_transitions, -torch.inf).unsqueeze(-3), likelihood

    def _tables(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.log_initial, self.log_transitions

    # Queries given values (*B, T, *E)

    def log_joint(self, values: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` with one path ``(*B, T)``; ``(*B)``, in nats."""
        exists, states = self.exists, self._path(states)
        initial, transitions, likelihood = self._factors(values)
        batch = torch.broadcast_shapes(self.batch_shape, likelihood.shape[:-2], states.shape[:-1])
        states = states.expand(*batch, self.num_steps)
        emitted = likelihood.expand(*batch, *likelihood.shape[-2:])
        emitted = emitted.gather(-1, states.unsqueeze(-1)).squeeze(-1).masked_fill(~exists, 0.0)
        start = initial.expand(*batch, self.num_states).gather(-1, states[..., :1]).squeeze(-1)
        total = start + emitted.sum(-1)
        for table, path in zip(transitions, self.chain_states(states).unbind(-1)):
            size = table.size(-1)
            flat = table.expand(*batch, size, size).flatten(-2)
            taken = flat.gather(-1, path[..., :-1] * size + path[..., 1:])
            total = total + taken.masked_fill(~exists[..., 1:], 0.0).sum(-1)
        return total

    def posterior(self, values: Tensor) -> FactorialPosterior:  # type: ignore[override]
        r"""Smoothed posterior of the product states and of each chain.

        See :class:`FactorialPosterior`.
        """
        initial, transitions, likelihood = self._factors(values)
        batch = torch.broadcast_shapes(self.batch_shape, likelihood.shape[:-2])
        each = [table.expand(*batch, *table.shape[-2:]) for table in transitions]
        counts = factorial.expected_counts(initial, each, likelihood, self.lengths)
        self._check_evidence(counts.log_evidence, values)
        marginals = self._marginals(counts.states)
        return FactorialPosterior(counts.log_evidence, counts.states, marginals, counts.transitions)

    def uniform(self) -> FactorialHMM:
        """The same with all first states and transitions that it allows equally probable."""

        def even(parts: tuple[Tensor, ...]) -> list[Tensor]:
            zeros = [torch.zeros_like(p).masked_fill(p.isneginf(), -torch.inf) for p in parts]
            return [part.log_softmax(-1) for part in zeros]

        return self.replace(
            log_initials=even(self.log_initials), log_transitions=even(self.log_transitions)
        )

    def expected_counts(self, values: Tensor) -> ExpectedCounts:
        """Expected counts given ``values``, of all chains side by side: the E-step.

        Those of first states are ``(*b, S)`` and those of transitions ``(*b, 1, S, S)``, zero
        between chains: see :meth:`counted_factors`.
        """
        counts = self.counts_of(self._restricted_likelihood(values))
        self._check_evidence(counts.log_evidence, values)
        return counts

    def counts_of(self, likelihood: Tensor) -> ExpectedCounts:
        """As :meth:`expected_counts`, given log-likelihoods ``(*B, T, K)``."""
        counts = factorial.expected_counts(*self._tables(), likelihood, self.lengths)
        initial = _side_by_side(self._marginals(counts.initial))
        transitions = _diagonal(counts.transitions, 0.0).unsqueeze(-3)
        return ExpectedCounts(counts.log_evidence, initial, transitions, counts.states)

    def stationary(self) -> Tensor:
        r"""Stationary distribution of the product states, ``(*B, K)``: that of every chain."""
        chains = [stationary_ops.stationary(table).log() for table in self.log_transitions]
        return reduce(_outer, chains).exp()

    def sample_prior_states(self, shape: torch.Size) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T})`, ``(*shape, T)``; ``shape`` ends in ``(*B)``."""
        if self.allowed is not None:
            return self._sample_without_values(shape)

        def path(initial: Tensor, transition: Tensor) -> Tensor:
            first, table = CategoricalTable(initial.unsqueeze(-2)), CategoricalTable(transition)
            start = first.sample(torch.zeros(shape, dtype=torch.long))
            return sample_path(start, self.num_steps, lambda _, states: table.sample(states))

        return self.product_states(
            torch.stack([*map(path, self.log_initials, self.log_transitions)], -1)
        )


def _check_chains(
    log_initials: Sequence[Tensor], log_transitions: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Raise unless there is a first state and a matrix for each of some chains."""
    initials, transitions = tuple(log_initials), tuple(log_transitions)
    if not initials or len(initials) != len(transitions):
        raise ValueError(
            "log_initials and log_transitions must hold a tensor for each of at least one chain; "
            f"got {len(initials)} and {len(transitions)}."
        )
    for m, (initial, table) in enumerate(zip(initials, transitions)):
        check_floats(f"log_initials[{m}]", initial)
        check_floats(f"log_transitions[{m}]", table)
        if initial.dim() < 1:
            raise ValueError(f"log_initials[{m}] must have shape (*B, K_m); got a scalar.")
        shape, cure = (initial.size(-1),) * 2, f"K_m is that of log_initials[{m}]."
        check_trailing(f"log_transitions[{m}]", table, shape, "(K_m, K_m)", cure)
    return initials, transitions


def _outer(first: Tensor, second: Tensor) -> Tensor:
    """Log-probabilities of pairs ``(*, K_1 K_2)`` of independent states."""
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """``(*B, S)`` of parts ``(*b, K_m)``."""
    batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*batch, part.size(-1)) for part in parts], -1)


def _diagonal(parts: Sequence[Tensor], beside: float) -> Tensor:
    """``(*B, S, S)`` with the parts ``(*b, K_m, K_m)`` on the diagonal."""
    batch = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
    sizes = [part.size(-1) for part in parts]
    rows = []
    for m, part in enumerate(parts):
        pads = sum(sizes[:m]), sum(sizes[m + 1 :])
        wide = part.expand(*batch, *part.shape[-2:])
        rows.append(torch.nn.functional.pad(wide, pads, value=beside))
    return torch.cat(rows, -2)
