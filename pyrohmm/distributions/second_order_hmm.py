"""``SecondOrderHMM``: a chain whose next state depends on the two before it."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import (
    check_broadcast,
    check_floats,
    check_integers,
    check_log_simplex,
    check_size,
    check_trailing,
)
from ..ops import second_order
from ..ops.recursions import ExpectedCounts
from ..ops.sampling import CategoricalTable, sample_path
from .autoregressive import Autoregressive
from .forecast import Forecast, states_ahead
from .hmm import HMM
from .observation import Tied
from .structured import StructuredHMM


class SecondOrderPosterior(NamedTuple):
    """The posterior of a :class:`SecondOrderHMM`.

    Attributes:
        log_evidence: ``(*B)``, in nats.
        states: ``(*B, T, K)``, smoothed marginals; zero at padded steps.
        transitions: ``(*B, K, K)``, expected number of transitions between adjacent states.
        triples: ``(*B, K, K, K)``, expected number of uses of each entry of ``log_transition``.
    """

    log_evidence: Tensor
    states: Tensor
    transitions: Tensor
    triples: Tensor


class SecondOrderHMM(StructuredHMM):
    r"""Sequences emitted by a chain of states, each of which depends on the two before it.

    .. math:: p(x_{1:T}) = \sum_{z_{1:T}} p(z_1) \, p(z_2 | z_1)
              \prod_{t=3}^T p(z_t | z_{t-2}, z_{t-1}) \prod_{t=1}^T p(x_t | z_t)

    Queries are those of :class:`HMM`, exact, in time O(T K³): messages are of pairs of states, and
    pair (i, j) is followed by (j, k) alone. :meth:`expanded` is the same distribution as an ``HMM``
    whose states are the pairs, at O(T K⁴).

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_second: ``(K, K)``, of the second state given the first; row = from, column = to.
        log_transition: ``(K, K, K)``, of the next state given the two before it, the earlier one
            first: [i, j, k] is that of k after i, j.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) probabilities do not
            sum to one.

    Example:
        >>> even = torch.full((2,), 0.5).log()
        >>> twice = torch.tensor([[[0.1, 0.9], [0.1, 0.9]], [[0.9, 0.1], [0.9, 0.1]]])  # 0 0 1 1 0
        >>> levels = Normal(torch.tensor([0.0, 1.0]), 0.4)
        >>> hmm = SecondOrderHMM(even, even.expand(2, 2), twice.log(), levels, torch.tensor(5))
        >>> hmm.viterbi(torch.tensor([0.0, 0.1, 0.9, 0.5, 0.5]))
        tensor([0, 0, 1, 1, 0])
        >>> hmm.expanded().num_states
        6
    """

    order = 2
    _of_transition = "log_second"
    _recursions = second_order
    _arguments = "log_initial", "log_second", "log_transition"

    def __init__(
        self,
        log_initial: Tensor,
        log_second: Tensor,
        log_transition: Tensor,
        emission: TorchDistribution,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
    ) -> None:
        check_floats("log_initial", log_initial)
        size, cure = log_initial.shape[-1:].numel(), "K is that of log_initial."
        tables = {"log_second": log_second, "log_transition": log_transition}
        for (name, table), core in zip(tables.items(), (2, 3)):
            check_floats(name, table)
            shape = f"({', '.join('K' * core)})"
            check_trailing(name, table, (size,) * core, shape, cure)
        check_integers("lengths", lengths)
        outer = {"log_second": log_second.shape[:-2], "log_transition": log_transition.shape[:-3]}
        super().__init__(
            log_initial, log_second, emission,
            lengths.expand(check_broadcast(outer | {"lengths": lengths.shape})), observed,
            validate_args, emission_per_step=emission_per_step, allowed=allowed,
        )  # fmt: skip
        self.log_second, self._log_transition = log_second, log_transition
        if self._validate_args:
            check_log_simplex("log_transition", log_transition)

    def permute_states(self, order: Tensor) -> SecondOrderHMM:
        """The same with its states in another order: see :meth:`HMM.permute_states`."""
        first = HMM(
            self.log_initial, self.log_second, self.emission, self.lengths, validate_args=False,
            emission_per_step=self.emission_per_step, allowed=self.allowed,
        ).permute_states(order)  # fmt: skip
        order = order.to(self.log_initial.device).long()
        table = self.log_transition[..., order, :, :][..., order, :][..., order]
        return self.replace(
            log_initial=first.log_initial, log_second=first.log_transition, log_transition=table,
            emission=first.emission, allowed=first.allowed,
        )  # fmt: skip

    def expanded(self) -> HMM:
        """The same distribution as an HMM of K (K + 1) states, of which most transitions are zero.

        State j is that of a first step; state (1 + i) K + j stands for j after i. What is written
        for any Markov chain reads it, at the cost of its matrix of K (K + 1) rows and columns.
        """
        size, tables = self.num_states, self._log_transitions()
        initial = torch.nn.functional.pad(self.log_initial, (0, size**2), value=-torch.inf)
        same = torch.eye(size, dtype=torch.bool, device=tables.device).unsqueeze(-1)
        after = tables.unsqueeze(-2).expand(*tables.shape[:-1], size, size)  # [c, i, j, k], i = j
        after = after.masked_fill(~same, -torch.inf).flatten(-2).flatten(-3, -2)
        matrix = torch.nn.functional.pad(after, (size, 0), value=-torch.inf)
        index = torch.arange(size, device=tables.device).repeat(size + 1)
        emission = self.emission
        new = HMM(
            initial, matrix,
            emission.permuted(index) if isinstance(emission, Autoregressive)
            else Tied(emission, index),
            self.lengths, self.observed, validate_args=False,
            emission_per_step=self.emission_per_step,
            allowed=None if self.allowed is None else self.allowed[..., index],
        )  # fmt: skip
        return self._validated_alike(new)

    # Parameters and data as the recursions read them

    def check_markov(self, purpose: str) -> NoReturn:
        """Raise: ``purpose`` needs a chain whose next state depends on the state alone."""
        raise ValueError(
            f"{purpose} needs a chain whose next state depends on one state; that of this "
            "SecondOrderHMM depends on two. Pass hmm.expanded(), whose states are pairs."
        )

    def _log_transitions(self) -> Tensor:
        """``(*B, K + 1, K, K)``: of the second state, and of the next one after each state."""
        second, after = self.log_second.unsqueeze(-3), self.log_transition
        batch = torch.broadcast_shapes(second.shape[:-3], after.shape[:-3])
        return torch.cat([part.expand(*batch, *part.shape[-3:]) for part in (second, after)], -3)

    def log_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Those of a Markov chain, which this is not: raises ValueError. See :meth:`expanded`."""
        self.check_markov("log_factors")

    def counted_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, ...]:
        """As :meth:`HMM.counted_factors`; tables ``(*B, K + 1, K, K)``, ``log_second`` first."""
        likelihood = self._factors(values, check)[-1]
        return self.log_initial, self._log_transitions(), likelihood

    @property
    def counted_tables(self) -> int:
        """K + 1: that of the second state, and one for each state two steps before."""
        return self.num_states + 1

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.log_initial, self.log_second, self.log_transition

    # Queries given values (*B, T, *E)

    def log_joint(self, values: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` with one path ``(*B, T)``; ``(*B)``, in nats."""
        exists, states = self.exists, self._path(states)
        likelihood, tables = self._factors(values)[-1], self._log_transitions()
        batch = torch.broadcast_shapes(self.batch_shape, likelihood.shape[:-2], states.shape[:-1])
        states = states.expand(*batch, self.num_steps)
        emitted = likelihood.expand(*batch, *likelihood.shape[-2:])
        emitted = emitted.gather(-1, states.unsqueeze(-1)).squeeze(-1).masked_fill(~exists, 0.0)
        first = self.log_initial.expand(*batch, self.num_states).gather(-1, states[..., :1])
        earlier = torch.nn.functional.pad(states[..., :-2] + 1, (1, 0))[..., : self.num_steps - 1]
        entry = (earlier * self.num_states + states[..., :-1]) * self.num_states + states[..., 1:]
        taken = tables.flatten(-3).expand(*batch, tables.shape[-3:].numel()).gather(-1, entry)
        taken = taken.masked_fill(~exists[..., 1:], 0.0)
        return first.squeeze(-1) + emitted.sum(-1) + taken.sum(-1)

    def posterior(self, values: Tensor) -> SecondOrderPosterior:  # type: ignore[override]
        r"""Smoothed posterior: :math:`p(z_t \mid x_{1:T})`, ``(*B, T, K)``, zero at padded steps.

        Also expected numbers of transitions: see :class:`SecondOrderPosterior`.
        """
        initial, second, table, likelihood = self._factors(values)
        batch = torch.broadcast_shapes(self.batch_shape, likelihood.shape[:-2])
        size = self.num_states
        second, table = second.expand(*batch, size, size), table.expand(*batch, *(size,) * 3)
        counts = second_order.expected_counts(initial, second, table, likelihood, self.lengths)
        self._check_evidence(counts.log_evidence, values)
        pairs = counts.second + counts.transitions.sum(-3)
        return SecondOrderPosterior(counts.log_evidence, counts.states, pairs, counts.transitions)

    def uniform(self) -> SecondOrderHMM:
        """The same with all first states and transitions that it allows equally probable."""
        parts = dict(zip(self._arguments, self._tables()))
        zeros = {n: torch.zeros_like(p).masked_fill(p.isneginf(), -torch.inf)
                 for n, p in parts.items()}  # fmt: skip
        return self.replace(**{name: part.log_softmax(-1) for name, part in zeros.items()})

    def expected_counts(self, values: Tensor) -> ExpectedCounts:
        """Expected counts given ``values``: the E-step.

        Those of transitions are ``(*b, K + 1, K, K)``: see :meth:`counted_factors`.
        """
        counts = self.counts_of(self._restricted_likelihood(values))
        self._check_evidence(counts.log_evidence, values)
        return counts

    def counts_of(self, likelihood: Tensor) -> ExpectedCounts:
        """As :meth:`expected_counts`, given log-likelihoods ``(*B, T, K)``."""
        counts = second_order.expected_counts(*self._tables(), likelihood, self.lengths)
        tables = counts.second.unsqueeze(-3), counts.transitions
        batch = torch.broadcast_shapes(*(part.shape[:-3] for part in tables))
        both = torch.cat([part.expand(*batch, *part.shape[-3:]) for part in tables], -3)
        return ExpectedCounts(counts.log_evidence, counts.initial, both, counts.states)

    def forecast(self, values: Tensor, num_steps: int) -> Forecast:
        r"""Predictive distributions :math:`p(x_{T+h} \mid x_{1:T})` of the next H observations.

        As :meth:`HMM.forecast`.

        Raises:
            ValueError: Also if the emission depends on earlier observations: see :meth:`expanded`.
        """
        check_size("num_steps", num_steps)
        self.check_constant("forecast", markov=False)
        if isinstance(self.emission, Autoregressive):
            self.check_markov("forecast of observations that depend on those before")
        return Forecast(states_ahead(self, values, num_steps), self.emission)

    def stationary(self) -> Tensor:
        r"""Share of the time that is spent in each state in the long run, ``(*B, K)``."""
        pairs = self.expanded().stationary()
        return pairs.unflatten(-1, (-1, self.num_states)).sum(-2)

    # Sampling

    def sample_prior_states(self, shape: torch.Size) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T})`, ``(*shape, T)``; ``shape`` ends in ``(*B)``."""
        if self.allowed is not None:
            return self._sample_without_values(shape)
        size = self.num_states
        initial = CategoricalTable(self.log_initial.unsqueeze(-2))
        table = CategoricalTable(self._log_transitions().flatten(-3, -2))  # rows: pairs (c, j)

        def after(_: int, pairs: Tensor) -> Tensor:
            return (pairs % size + 1) * size + table.sample(pairs)

        first = initial.sample(torch.zeros(shape, dtype=torch.long))
        return sample_path(first, self.num_steps, after) % size
