"""``ContinuousTimeHMM``: the distribution over sequences observed at irregular times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import INTEGERS, broadcast_shapes, check_broadcast, check_real
from .._transforms import beside, transforming, uncompiled
from ..chains.rates import Gaps, RateChain, diagonal, log_transitions, over_gaps
from .autoregressive import Autoregressive
from .base import SequenceOptions
from .forecast import Forecast
from .hmm import HMM


class ContinuousTimeHMM(HMM):
    r"""Sequences emitted by a Markov chain in continuous time, observed at irregular times.

    .. math:: p(z_{t+1} = j \mid z_t = i) = \bigl(e^{Q (\tau_{t+1} - \tau_t)}\bigr)_{ij}

    The chain stays in state i for an exponential time of mean :math:`-1 / q_{ii}`, and goes to j
    with probability :math:`-q_{ij} / q_{ii}`; what happens between two observations is summed out.
    With gaps of one it is an :class:`HMM` with the transitions :math:`e^Q`.

    It is an ``HMM`` whose transitions change with the step, ``(*B, T-1, K, K)``, and has its
    queries. Exponentials are computed once for each distinct gap of the batch, unless sequences
    have rates of their own. A step that is not observed may stand at any time: the posterior there
    is that of the state between observations.

    Args:
        log_initial: ``(K,)``, log-probabilities of the state at the first step.
        rates: ``(K, K)``, the rate of transitions from row to column, in the unit of ``times``;
            the diagonal is minus the sum of the others. Zeros stay zero: a row of zeros is of a
            state that is never left.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        times: ``(*B, T)``, when each step is, increasing along a sequence; padding may be anything.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.
        exact_entry: ``(K,)`` booleans, True for states that are never left and whose entry is
            always seen at its very time, such as a death: at such a step the evidence has the
            density :math:`\sum_{r \ne j} (e^{Q \Delta})_{ir} q_{rj}` of entering j from i, per unit
            of time, in place of a probability. The observation must tell these states from
            others, and at a step that is not observed nothing was entered. Then ``log_transition``
            holds such densities, and there are no samples at given times.
        rates_per_step: Whether ``rates`` are ``(T-1, K, K)``, of each gap between two steps. Then
            ``sojourn_times``, ``next_state_probs``, ``transition_at`` and ``occupancy_times`` are
            those of the rates of each gap, with a dimension ``T-1`` before the others.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) a rate is negative,
            rows of rates do not sum to zero, a state of ``exact_entry`` is left, or times do not
            increase.

    Example:
        >>> rates = torch.tensor([[-0.1, 0.1], [0.5, -0.5]])
        >>> coins = Categorical(probs=torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> times = torch.tensor([0.0, 0.5, 10.0])
        >>> hmm = ContinuousTimeHMM(torch.zeros(2).log_softmax(-1), rates, coins, torch.tensor(3),
        ...                         times)
        >>> hmm.log_transition.exp()
        tensor([[[0.9568, 0.0432],
                 [0.2160, 0.7840]],
        <BLANKLINE>
                [[0.8339, 0.1661],
                 [0.8305, 0.1695]]])
        >>> hmm.log_prob(torch.tensor([1, 1, 0])).exp()
        tensor(0.2079)
        >>> hmm.sojourn_times
        tensor([10.,  2.])
    """

    @uncompiled
    def __init__(
        self,
        log_initial: Tensor,
        rates: Tensor,
        emission: TorchDistribution,
        lengths: Tensor,
        times: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        exact_entry: Tensor | None = None,
        rates_per_step: bool = False,
        **data: Unpack[SequenceOptions],
    ) -> None:
        chain = RateChain(log_initial, rates, times, lengths, exact_entry, observed, rates_per_step)
        self._compose(chain, emission, lengths, observed, validate_args, **data)

    @property
    def times(self) -> Tensor:
        """Time of each step, ``(*B, T)``, in float64."""
        return self.chain.times.to(self.rates.device).double()

    @property
    def rates(self) -> Tensor:
        """Transition rate matrix ``(K, K)``, or ``(T-1, K, K)`` per step; rows sum to zero."""
        return self.chain.rates

    @property
    def rates_per_step(self) -> bool:
        """Whether each gap between steps has a rate matrix of its own."""
        return self.chain.rates_per_step

    @property
    def exact_entry(self) -> Tensor | None:
        """Mask ``(K,)`` of states whose time of entry is observed exactly; or None."""
        return self.chain.exact_entry

    @property
    def log_transition(self) -> Tensor:
        r"""Log-probabilities ``(*b, T-1, K, K)`` over gaps, :math:`\log p(z_{t+1} \mid z_t)`."""
        matrices = self.chain.matrices
        steps = (*matrices.shape[:-3], self.num_steps - 1, *matrices.shape[-2:])
        return matrices.expand(steps)

    def with_lengths(
        self, lengths: Tensor, observed: Tensor | None = None, times: Tensor | None = None
    ) -> ContinuousTimeHMM:
        """Copy with the same parameters for sequences of other lengths and times.

        Args:
            lengths: ``(*B)`` integers.
            observed: ``(*B, T)`` booleans; all by default.
            times: ``(*B, T)``; those of this distribution by default.
        """
        times = self.times if times is None else times
        return self.replace(lengths=lengths, observed=observed, times=times, allowed=None)

    # The chain between observations

    @property
    def sojourn_times(self) -> Tensor:
        """Mean sojourn time in each state, ``(*B, K)``; inf in a state that is never left."""
        return -1 / self.rates.diagonal(dim1=-2, dim2=-1).masked_fill(self._absorbing, -0.0)

    @property
    def next_state_probs(self) -> Tensor:
        """Jump-chain probabilities ``(*B, K, K)`` of the next state; zero rows if absorbing."""
        leave = -self.rates.diagonal(dim1=-2, dim2=-1).masked_fill(self._absorbing, -1.0)
        return (self.rates / leave.unsqueeze(-1)).masked_fill(diagonal(self.rates), 0.0)

    @property
    def _absorbing(self) -> Tensor:
        return self.rates.diagonal(dim1=-2, dim2=-1) == 0

    def transition_at(self, gaps: Tensor) -> Tensor:
        """Transition probabilities over each of some lengths of time, ``(*B, *g, K, K)``.

        Args:
            gaps: ``(*g)``, not negative.

        Example:
            >>> even = torch.zeros(2).log_softmax(-1)
            >>> decay = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
            >>> hmm = ContinuousTimeHMM(even, decay, Normal(torch.zeros(2), 1.0), torch.tensor(1),
            ...                         torch.tensor([0.0]))
            >>> hmm.transition_at(torch.tensor(2.0))
            tensor([[0.1353, 0.8647],
                    [0.0000, 1.0000]])
        """
        return log_transitions(self._over(gaps), gaps).exp()

    def _over(self, gaps: Tensor) -> Tensor:
        """Rate matrices ``(*B, *1, K, K)`` that broadcast with checked gaps ``(*g)``."""
        check_real("gaps", gaps)
        wrong = ~((gaps >= 0) & (gaps < torch.inf))
        if self._validate_args and not transforming() and bool(wrong.any()):
            text = f"gaps must be finite and not negative; got {gaps[wrong][0].item():g}"
            raise ValueError(f"{text}. Take differences of times in order.")
        shape = *self.rates.shape[:-2], *(1,) * gaps.dim(), *self.rates.shape[-2:]
        return self.rates.reshape(shape)

    def occupancy_times(self, gaps: Tensor) -> Tensor:
        r"""Expected time in state j within each length of time from being in i, ``(*B, *g, K, K)``.

        .. math:: \int_0^\tau \bigl(e^{Q u}\bigr)_{ij} \, du

        Args:
            gaps: ``(*g)``, not negative.

        Example:
            >>> even = torch.zeros(2).log_softmax(-1)
            >>> decay = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
            >>> hmm = ContinuousTimeHMM(even, decay, Normal(torch.zeros(2), 1.0), torch.tensor(1),
            ...                         torch.tensor([0.0]))
            >>> hmm.occupancy_times(torch.tensor(2.0))
            tensor([[0.8647, 1.1353],
                    [0.0000, 2.0000]])
        """
        rates, size = self._over(gaps).double(), self.num_states
        one = torch.eye(size).to(rates).expand_as(rates)
        upper = torch.cat([rates, one], -1)  # the integral is a block of an exponential
        both = torch.cat([upper, torch.zeros_like(upper)], -2) * gaps.to(rates)[..., None, None]
        return torch.linalg.matrix_exp(both)[..., :size, size:].to(self.rates.dtype)

    def passage_times(self, states: Sequence[int]) -> Tensor:
        """Mean first-passage time ``(*B, K)`` from each state to one of ``states``.

        It is zero from these states, and infinite where none of them may ever be entered.

        Args:
            states: One or several of 0 to K - 1.

        Raises:
            ValueError: If there is none, one is not a state, or rates change with the step.

        Example:
            >>> even = torch.zeros(3).log_softmax(-1)
            >>> rates = torch.tensor([[-1.0, 0.5, 0.5], [0.0, -0.2, 0.2], [0.0, 0.0, 0.0]])
            >>> hmm = ContinuousTimeHMM(even, rates, Normal(torch.zeros(3), 1.0), torch.tensor(1),
            ...                         torch.tensor([0.0]))
            >>> hmm.passage_times([2]), hmm.passage_times([1])
            (tensor([3.5000, 5.0000, 0.0000]), tensor([inf, 0., inf]))
        """
        rates, size = self.rates.double(), self.num_states
        self.chain.check_rates("passage_times")
        wanted, every = torch.as_tensor(states).cpu().reshape(-1), torch.arange(size)
        if wanted.dtype not in INTEGERS or not len(wanted) or not torch.isin(wanted, every).all():
            text = f"states must be some of 0 to K - 1 = {size - 1}; got {wanted.tolist()}"
            raise ValueError(f"{text}. Count them from 0.")
        target = torch.isin(every, wanted).to(rates.device)
        reached = ((rates > 0) & ~target.unsqueeze(-1)) | diagonal(rates)
        for _ in range(size.bit_length()):  # by paths of 2, 4, ... transitions
            reached = (reached.double() @ reached.double()) > 0
        never = ~reached[..., target].any(-1)
        lost = (reached & never.unsqueeze(-2)).any(-1)
        inner = ~lost & ~target
        both = inner.unsqueeze(-1) & inner.unsqueeze(-2)
        system = torch.where(both, -rates, diagonal(rates).to(rates))
        found = torch.linalg.solve(system, inner.to(rates).unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(lost, torch.inf).to(self.rates.dtype)

    # Queries given values (*B, T, *E)

    def forecast(self, values: Tensor, times: Tensor) -> Forecast:  # type: ignore[override]
        r"""Predictive distributions :math:`p(x_\tau \mid x_{1:T})` at times to come.

        Args:
            values: ``(*B, T, *E)``, observations.
            times: ``(*B, H)``, none before the last step of its sequence.

        Returns:
            A distribution of batch shape ``(*B, H)``; its ``states`` ``(*B, H, K)`` are the
            probabilities of the states at these times.

        Raises:
            ValueError: If a time is infinite or lies before the last step, parameters change with
                the step, or the emission depends on earlier observations; or (with
                ``validate_args``) a sequence has probability zero.

        Example:
            >>> decay = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
            >>> hmm = ContinuousTimeHMM(torch.tensor([1.0, 0.0]).log(), decay,
            ...                         Normal(torch.tensor([0.0, 1.0]), 1.0), torch.tensor(1),
            ...                         torch.tensor([0.0]))
            >>> hmm.forecast(torch.zeros(1), torch.tensor([0.5, 2.0])).mean
            tensor([0.3935, 0.8647])
        """
        if self.emission_per_step or isinstance(self.emission, Autoregressive):
            self.chain.check_constant("forecast of this emission")
        self.chain.check_rates("forecast")
        gaps = self.gaps_after(times)
        now = self.state_probs_ahead(values, 0).unsqueeze(-2)
        hmm = beside(now, self)
        matrices = over_gaps(hmm.rates, Gaps.of(gaps)).exp()
        return Forecast((now @ matrices.to(now.dtype)).squeeze(-2), hmm.emission, times)

    def gaps_after(self, times: Tensor) -> Tensor:
        """Time ``(*B, H)`` from the last step of each sequence to ``times`` ``(*B, H)``.

        Raises:
            ValueError: If (with ``validate_args``) one is infinite or lies before the last step.
        """
        check_real("times", times)
        check_broadcast({"times": times.shape[:-1], "HMM": self.batch_shape})
        last = (self.lengths - 1).to(self.times.device).unsqueeze(-1)
        shape = broadcast_shapes(self.times.shape[:-1], self.lengths.shape)
        ends = self.times.expand(*shape, self.num_steps).gather(-1, last.expand(*shape, 1))
        gaps = times.to(ends) - ends
        checked = self._validate_args and not transforming()
        if checked and not bool((finite := times.isfinite()).all()):
            text = f"times must be finite; got {times[~finite][0].item()}"
            raise ValueError(f"{text}. Far ahead states are as hmm.stationary().")
        if checked and bool((early := gaps < 0).any()):
            end, gap = ends.expand_as(gaps)[early][0].item(), gaps[early][0].item()
            raise ValueError(
                f"times must not precede the last step of a sequence; got {end + gap:g}, and that "
                f"is at {end:g}. Ask the posterior of states between steps."
            )
        return gaps
