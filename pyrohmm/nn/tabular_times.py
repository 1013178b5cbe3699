"""Tabular modules of time: states with explicit durations, and rates of transitions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_booleans, check_shape, check_size
from ..chains.base import ExpectedCounts
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.hmm import HMM
from ..distributions.sparse import SparseGamma, SparsePositive
from ..distributions.structured_hmm import HSMM
from ..ops.log_space import log
from .closed_form import (
    Maximum,
    Statistics,
    check_mode,
    mode_of_part,
    sample_of_part,
    under,
    with_priors,
)
from .durations import DurationFamily, free_durations
from .family import Emission, EmissionFamily, Number, build_part, positive
from .tabular import ChainTables, TabularHMM


class TabularHSMM(TabularHMM, builds=HSMM):
    r"""Hidden semi-Markov model with Dirichlet priors on every row, and durations of any family.

    As :class:`TabularHMM`, but the states last for explicit durations, and none follows itself:
    the diagonal of ``transition`` is exactly zero. See :class:`HSMM`.

    ``fit_map``, ``fit_svi`` and NUTS read it by :class:`MarginalModel`; :class:`EnumeratedModel`
    has a site for each step of :meth:`HSMM.expanded`, for small K · D. ``fit_em`` maximises
    durations exactly, and by gradient steps only those of :func:`parametric_durations`.

    Sites: ``initial`` ``(K,)``, ``transition`` ``(K, K)``, and those of ``duration`` and
    ``emission``.

    Args:
        num_states: K, at least 2.
        emission: An emission family: see :class:`TabularHMM`.
        durations: A family of durations, such as :func:`free_durations`, :func:`poisson_durations`,
            :func:`negative_binomial_durations`, :func:`geometric_durations` or
            :func:`parametric_durations`: called with K, it returns a ``PyroModule`` that returns
            log-probabilities ``(K, D)``.
        initial_concentration: Of the prior of the first state; a number or ``(K,)``.
        transition_concentration: Of the priors of the rows; a number, ``(K,)`` or ``(K, K)``.
        initial_allowed: ``(K,)`` booleans, in which states a sequence may begin; all by default.
        transition_allowed: ``(K, K)`` booleans, which transitions between different states are
            possible; all by default.
        censored_end: Whether the last segment may go on after the data: see :class:`HSMM`.
        censored_start: Whether the first segment was there before the data: see :class:`HSMM`.
        priors: False for maximum likelihood: see :func:`fit_em`.

    Raises:
        ValueError: If ``num_states`` is less than two, or a concentration is not positive or has
            the wrong shape.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = TabularHSMM(2, categorical(6), poisson_durations(30))
        >>> hsmm = module(torch.tensor([3, 1]))  # a sample from the prior
        >>> hsmm.log_transition.exp(), hsmm.log_duration.shape
        (tensor([[0., 1.],
                [1., 0.]]), torch.Size([2, 30]))
    """

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        durations: DurationFamily,
        initial_concentration: Number = 1.0,
        transition_concentration: Number = 1.0,
        *,
        initial_allowed: Tensor | None = None,
        transition_allowed: Tensor | None = None,
        censored_end: bool = True,
        censored_start: bool = False,
        priors: bool = True,
    ) -> None:
        check_size("num_states", num_states, 2)
        others = _others(num_states, transition_allowed)
        super().__init__(
            num_states, emission, initial_concentration, transition_concentration,
            initial_allowed=initial_allowed, transition_allowed=others,
        )  # fmt: skip
        kind, example = "a family of durations", "free_durations(max_duration)"
        self.duration = build_part("durations", kind, example, durations, num_states)
        if isinstance(self.duration, Emission):
            got = type(self.duration).__name__
            raise TypeError(f"durations must be {kind}; got that of a {got}.")
        self.censored_end, self.censored_start = censored_end, censored_start
        with_priors(self, priors)

    @classmethod
    def _like(cls, hmm: Any, emission: Any) -> ChainTables:
        ends = {"censored_end": hmm.censored_end, "censored_start": hmm.censored_start}
        return cls(hmm.num_states, emission, free_durations(hmm.max_duration), **ends)

    def _take_values(self, hmm: HMM) -> None:
        ChainTables._take_values(self, hmm)
        self.duration.set_points(probs=hmm.chain.log_duration.exp())

    def tables(self) -> dict[str, Any]:
        """Arguments of the HSMM: log-probability tables, log durations and censoring flags."""
        ends = {"censored_end": self.censored_end, "censored_start": self.censored_start}
        return super().tables() | {"log_duration": self.duration()} | ends

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Sufficient statistics: expected counts of free tables, and of durations."""
        chain = super().statistics(expected)
        if not hasattr(self.duration, "m_step"):
            return chain
        left_censored = expected.counts["log_initial"] if self.censored_start else None
        lasted = self.duration.statistics(expected.counts["log_duration"], left_censored)
        return chain | under("duration.", lasted)

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: normalised counts, and the mode of durations if they have an M-step."""
        chain = {name: value for name, value in statistics.items() if "." not in name}
        values, notes = super().m_step(chain)
        if hasattr(self.duration, "m_step"):
            mode, remarks = mode_of_part(self.duration, "duration.", statistics)
            values, notes = values | mode, notes + remarks
        return values, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample rows of probabilities, and durations if they can be sampled."""
        samples = super().sample_parameters(statistics, current)
        return samples | sample_of_part(self.duration, "duration.", statistics, current)


def _others(num_states: int, allowed: Tensor | None) -> Tensor:
    """Mask ``(K, K)`` of the possible transitions between different states."""
    others = ~torch.eye(num_states, dtype=torch.bool)
    if allowed is None:
        return others
    check_booleans("transition_allowed", allowed)
    check_shape("transition_allowed", allowed, (num_states, num_states), "(K, K)")
    return others.to(allowed.device) & allowed


def given_times(times: Tensor | None) -> Tensor:
    """Return the times of the data; raise if there are none."""
    if times is None:
        raise ValueError(
            "data has no times, which a model in continuous time needs: Sequences(..., times=), "
            "times= of from_list, or time= of from_dataframe."
        )
    return times


class TabularContinuousTimeHMM(ChainTables, builds=ContinuousTimeHMM):
    r"""HMM in continuous time with a Gamma prior on every rate of transitions.

    .. math:: \pi \sim \mathrm{Dir}(c), \quad q_{ij} \sim \mathrm{Gamma}(a_{ij}, b_{ij})
              \quad (i \ne j)

    For observations at irregular times, which the data carry: ``Sequences(..., times=)``. See
    :class:`ContinuousTimeHMM`. ``fit_map``, ``fit_svi`` and NUTS read it by
    :class:`MarginalModel`. ``fit_em`` maximises the rates in closed form: expected numbers of
    transitions over expected times spent in the states, those between observations included (Liu
    et al., 2015, Efficient learning of continuous-time hidden Markov models for disease
    progression).

    Sites: ``initial`` ``(K,)``, ``rates`` ``(K, K)``, whose diagonal is zero, and those of
    ``emission``.

    Args:
        num_states: K.
        emission: An emission family: see :class:`TabularHMM`.
        initial_concentration: Of the prior of the first state; a number or ``(K,)``.
        rate_concentration: a, a number, ``(K,)`` or ``(K, K)``. With one and a small ``rate_time``
            the prior is all but flat.
        rate_time: b, likewise, in the unit of the times: the time without transitions that the
            prior is worth. The mean of a rate is a / b. By default it is one until a fit makes it a
            tenth of the median time between observations.
        initial_allowed: ``(K,)`` booleans, in which states a sequence may begin; all by default.
        transition_allowed: ``(K, K)`` booleans, from which states which others are entered
            directly; all by default. The diagonal is not read, and a state from which none is
            entered is never left. See :func:`left_to_right`.
        exact_entry: ``(K,)`` booleans, which of the states that are never left are entered at
            observed times, such as death: see :class:`ContinuousTimeHMM`.
        priors: False for maximum likelihood: see :func:`fit_em`.

    Raises:
        ValueError: If ``num_states`` is less than one, or a number is not positive or has the wrong
            shape.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 0, 1, 2], [0, 2]],
        ...                            times=[[0.0, 0.5, 4.0, 4.5], [1.0, 9.0]])
        >>> module = TabularContinuousTimeHMM(3, categorical(3),
        ...                                   transition_allowed=left_to_right(3, jump=1))
        >>> hmm = module(data.lengths, times=data.times)  # a sample from the prior
        >>> (hmm.rates > 0).int()
        tensor([[0, 1, 0],
                [0, 0, 1],
                [0, 0, 0]], dtype=torch.int32)
        >>> fit = fit_em(module, data, num_iterations=20)
        >>> bool(fit.losses[-1] < fit.losses[0])
        True
    """

    rate_time: Tensor

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        initial_concentration: Number = 1.0,
        rate_concentration: Number = 1.0,
        rate_time: Number | None = None,
        *,
        initial_allowed: Tensor | None = None,
        transition_allowed: Tensor | None = None,
        exact_entry: Tensor | None = None,
        priors: bool = True,
    ) -> None:
        super().__init__(num_states, emission)
        square = num_states, num_states
        others = _others(num_states, transition_allowed)
        self.of_data, rate_time = rate_time is None, 1.0 if rate_time is None else rate_time
        for name, value in (("rate_concentration", rate_concentration), ("rate_time", rate_time)):
            self.register_buffer(name, positive(name, value, square))
        self.add_rows("initial", initial_concentration, (num_states,), initial_allowed)
        self.register_buffer("transition_allowed", others)
        self.register_buffer("exact_entry", exact_entry)
        if bool(others.any()):
            self.supports = self.supports | {"rates": SparsePositive(others)}  # type: ignore[misc]
            self.add_parameters(rates=square)
        else:  # there is nothing to fit
            self.register_buffer("rates", torch.zeros(square))
        with_priors(self, priors)

    @classmethod
    def _like(cls, hmm: Any, emission: Any) -> TabularContinuousTimeHMM:
        limits = {"transition_allowed": hmm.chain.possible, "exact_entry": hmm.exact_entry}
        return cls(hmm.num_states, emission, **limits)

    def _take_values(self, hmm: HMM) -> None:
        """Replace tables by values of ``hmm``, as parameters without priors; zero rates stay."""
        super()._take_values(hmm)
        if "rates" in self._pyro_samples:
            self.set_points(rates=hmm.chain.rates.masked_fill(~hmm.chain.possible, 0.0))

    def set_times(self, median: float) -> None:
        """Scale the default prior of the rates by the median time between observations."""
        if self.of_data:
            self.rate_time = torch.full_like(self.rate_time, median / 10)

    def rates_prior(self) -> SparseGamma:
        """Gamma prior of the rates."""
        return SparseGamma(self.rate_concentration, self.rate_time, self.transition_allowed)

    def forward(
        self, lengths: Tensor, observed: Tensor | None = None, times: Tensor | None = None
    ) -> ContinuousTimeHMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)`` at ``times`` ``(*B, T)``."""
        rates = self.rates
        return ContinuousTimeHMM(
            log(self.initial), rates - rates.sum(-1).diag_embed(), self.emission(), lengths,
            given_times(times), observed, exact_entry=self.exact_entry,
        )  # fmt: skip

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: normalised first states; rates as transitions over times in the states."""
        found, _ = super().m_step({n: c for n, c in statistics.items() if n == "initial"})
        if "rates" in statistics:
            number = statistics["rates"].double()
            time = number.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).expand_as(number)
            if self.has_prior("rates"):
                check_mode("rate_concentration", self.rate_concentration)
                number, time = number + self.rate_concentration - 1, time + self.rate_time
            found["rates"] = (number / time).masked_fill(~self.transition_allowed, 0.0)
        return found, []
