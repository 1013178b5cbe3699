r"""Families of durations: how long the states of a semi-Markov model last.

A family of durations is called with K and returns a ``PyroModule`` whose call returns
log-probabilities ``(K, D)`` of durations of 1 to D steps. With ``statistics`` and ``m_step``, as of
:class:`Durations`, EM maximises it exactly; else by gradient steps.

With c_d expected segments of d steps, of which n are first segments that began before the data,
durations of probabilities f(d) have the expected complete-data log-likelihood

.. math:: \sum_d c_d \log f(d) - n \log \sum_d d \, f(d)

since a moment in time falls into a duration in proportion to its length (Vardi, 1982, Nonparametric
estimation in the presence of length bias).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import Beta, Dirichlet, Gamma, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..distributions.hard_zeros import exact_log_prob
from ..ops.log_space import log
from . import emissions
from .closed_form import Family, Maximum, Statistics, check_mode, sample_rows, with_prior
from .family import Number, family, positive
from .newton import mode_by_newton

BOUND = 30.0  # of unconstrained parameters: exp(-30) is no rate and exp(30) longer than any D

DurationFamily = Callable[[int], PyroModule]


def truncated_log_probs(distribution: TorchDistribution, max_duration: int) -> Tensor:
    """Log-probabilities of durations d with ``d - 1`` from a distribution of counts, given d <= D.

    Args:
        distribution: Of 0, 1, 2, ..., of batch shape ``(*B, K)``; it must have a mean.
        max_duration: D; what is longer has no probability, and the rest is normalised.

    Returns:
        ``(*B, K, D)``.

    Example:
        >>> from pyrohmm.nn.durations import truncated_log_probs
        >>> truncated_log_probs(Poisson(torch.tensor([1.0])), 3).exp()
        tensor([[0.4000, 0.4000, 0.2000]])
    """
    shape = (max_duration,) + (1,) * len(distribution.batch_shape)
    counts = torch.arange(max_duration).to(distribution.mean).reshape(shape)
    possible = distribution.support.check(counts)
    scores = exact_log_prob(distribution, counts.masked_fill(~possible, 0.0))
    return scores.masked_fill(~possible, -torch.inf).movedim(0, -1).log_softmax(-1)


class Durations(Family):
    """Base of the families of durations.

    Subclasses define ``forward``, ``starts``, and the prior of each parameter in ``supports``.
    """

    def __init__(self, num_states: int, max_duration: int, **hyperparameters: Number) -> None:
        super().__init__()
        self.max_duration = max_duration
        for name, value in hyperparameters.items():
            self.register_buffer(name, positive(name, value, (num_states,)))
        self.add_parameters(**dict.fromkeys(self.supports, (num_states,)))

    starts: Any  # (counts) -> Newton starts (S, R, K) by name; the best of the S ends is taken

    def statistics(self, counts: Tensor, left_censored: Tensor | None) -> Statistics:
        """Sufficient statistics: these counts, if a parameter is free.

        Args:
            counts: ``(R, K, D)``, expected numbers of segments by their whole durations.
            left_censored: ``(R, K)``, how many of these are first segments that were there
                before the data, and so are found in proportion to their length; None if
                there are none.
        """
        if not any(map(self.is_free, self.supports)):
            return {}
        return {"counts": counts} | ({"first": left_censored} if left_censored is not None else {})

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: mode under truncation at D; NaN where nothing determines it."""
        for prior in map(self.prior, filter(self.has_prior, self.supports)):
            for part in prior.arg_constraints:
                if part.startswith("concentration"):
                    check_mode(part, getattr(prior, part))
        return self._mode(**statistics) if statistics else {}, []

    def _mode(self, counts: Tensor, first: Tensor | None = None) -> dict[str, Tensor]:
        """Mode of the parameters by Newton's method in unconstrained space.

        Args:
            counts: ``(R, K, D)``.
            first: ``(R, K)``, how many of these began before the data; None if there are none.
        """
        steps = torch.arange(1, counts.size(-1) + 1, device=counts.device).to(counts)

        def log_likelihood(module: Any) -> Tensor:
            logs = module.forward()
            total = (counts * logs).sum(-1)
            if first is not None:
                total = total - first * (logs + steps.log()).logsumexp(-1)
            return total

        mode = mode_by_newton(self, self.starts(counts), log_likelihood, -BOUND, BOUND)
        unknown = counts.sum(-1) == 0
        return {
            name: value if self.has_prior(name) else value.masked_fill(unknown, torch.nan)
            for name, value in mode.items() if self.is_free(name)
        }  # fmt: skip


class FreeDurations(Durations):
    """Family of durations: a free probability of each, with Dirichlet priors.

    Site: ``duration.probs``, ``(K, D)``. EM has a closed form.

    Args:
        num_states: K.
        max_duration: D.
        concentration: Of the priors; a number, ``(D,)`` or ``(K, D)``.

    Example:
        >>> free_durations(4)(2)().shape
        torch.Size([2, 4])
    """

    supports: ClassVar = {"probs": constraints.simplex}

    def __init__(self, num_states: int, max_duration: int, concentration: Number = 1.0) -> None:
        super().__init__(num_states, max_duration)
        shape = num_states, max_duration
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.add_parameters(probs=shape)

    def probs_prior(self) -> TorchDistribution:
        """Dirichlet prior of the rows."""
        return Dirichlet(self.concentration)

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return log(self.probs)

    def _mode(self, counts: Tensor, first: Tensor | None = None) -> dict[str, Tensor]:
        prior = self.concentration if self.has_prior("probs") else None
        return {"probs": free_probs(with_prior(counts, prior), first)}

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample rows from their Dirichlet posteriors."""
        if not self.has_prior("probs"):
            return {}
        return {"probs": sample_rows(statistics["counts"] + self.concentration)}


class GeometricDurations(Durations):
    r"""Family of durations: geometric, as in a Markov chain, with Beta priors.

    .. math:: p(d) = q (1 - q)^{d - 1} \text{ for } d < D, \quad p(D) = (1 - q)^{D - 1}

    The last entry holds all that is longer, so that with sequences of up to D steps the model is
    that of a :class:`TabularHMM` with 1 - q on the diagonal.

    Site: ``duration.leave``, ``(K,)``, the probability q to leave at each step. EM has a closed
    form.

    Args:
        num_states: K.
        max_duration: D.
        leave: Of the prior, how many leaves it is worth, plus one; a number or ``(K,)``.
        stay: Of the prior, how many stays it is worth, plus one; a number or ``(K,)``.

    Example:
        >>> durations = geometric_durations(3)(1)
        >>> freeze(durations, "leave", torch.tensor([0.5]))
        >>> durations().exp()
        tensor([[0.5000, 0.2500, 0.2500]])
    """

    supports: ClassVar = {"leave": constraints.unit_interval}

    def __init__(
        self, num_states: int, max_duration: int, leave: Number = 1.0, stay: Number = 1.0
    ) -> None:
        super().__init__(num_states, max_duration, prior_leave=leave, prior_stay=stay)

    def leave_prior(self) -> TorchDistribution:
        """Beta prior of the probabilities ``leave``."""
        return Beta(self.prior_leave, self.prior_stay)

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(*B, D)``."""
        leave = self.leave.unsqueeze(-1)
        count = torch.arange(self.max_duration, device=leave.device)
        stays = torch.where(count > 0, count * log(1 - leave), 0.0)  # 0 times -inf is NaN
        return torch.where(count < self.max_duration - 1, stays + log(leave), stays)

    def starts(self, counts: Tensor) -> dict[str, Tensor]:
        """Newton start for ``leave``: its closed-form mode, pseudo-counts included."""
        return {"leave": self._share(counts).nan_to_num(0.5).unsqueeze(0)}

    def _share(self, counts: Tensor) -> Tensor:
        steps = torch.arange(counts.size(-1), device=counts.device).to(counts)
        leaves, stays = counts[..., :-1].sum(-1), (counts * steps).sum(-1)
        if self.has_prior("leave"):
            leaves, stays = leaves + self.prior_leave - 1, stays + self.prior_stay - 1
        return leaves / (leaves + stays)

    def _mode(self, counts: Tensor, first: Tensor | None = None) -> dict[str, Tensor]:
        """Mode of ``leave``: closed form, or Newton's method if segments are left-censored."""
        share = self._share(counts)
        found = share if first is None else super()._mode(counts, first)["leave"]
        return {"leave": torch.where(share.isnan(), share, found)}


class PoissonDurations(Durations):
    """Family of durations: d - 1 is Poisson, given d <= D, each mean with a Gamma prior.

    Site: ``duration.rate``, ``(K,)``, the mean of d - 1 before the cut at D. EM maximises it by
    Newton steps in one dimension.

    Args:
        num_states: K.
        max_duration: D; choose it beyond any duration: what is longer has no probability.
        concentration: Of the prior; a number or ``(K,)``.
        rate: Of the prior; a number or ``(K,)``; by default 1 / D, and 0.1 for a D below ten.

    Example:
        >>> poisson_durations(4)(2)().shape
        torch.Size([2, 4])
    """

    supports: ClassVar = {"rate": constraints.positive}

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        concentration: Number = 1.0,
        rate: Number | None = None,
    ) -> None:
        rate = 1 / max(max_duration, 10) if rate is None else rate
        super().__init__(num_states, max_duration, concentration=concentration, prior_rate=rate)

    def rate_prior(self) -> TorchDistribution:
        """Gamma prior of the rates."""
        return Gamma(self.concentration, self.prior_rate)

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(*B, D)``."""
        return truncated_log_probs(Poisson(self.rate), self.max_duration)

    def starts(self, counts: Tensor) -> dict[str, Tensor]:
        """Newton start for ``rate``: the mean of d - 1."""
        return {"rate": _mean_count(counts).unsqueeze(0)}


class NegativeBinomialDurations(Durations):
    r"""Family of durations: d - 1 is negative binomial, given d <= D.

    With mean m and shape r the variance of d - 1 is :math:`m + m^2 / r`: r = 1 is geometric, a
    large r Poisson. Both have Gamma priors.

    Sites: ``duration.average``, ``(K,)``, the mean of d - 1 before the cut at D, and
    ``duration.shape``, ``(K,)``. EM maximises them by Newton steps in two dimensions.

    Args:
        num_states: K.
        max_duration: D; choose it beyond any duration: what is longer has no probability.
        concentration: Of the prior of the mean; a number or ``(K,)``.
        rate: Of the prior of the mean; a number or ``(K,)``; by default as of Poisson durations.
        shape_concentration: Of the prior of the shape; a number or ``(K,)``.
        shape_rate: Of the prior of the shape; a number or ``(K,)``. By default all but
            constant.

    Example:
        >>> negative_binomial_durations(4)(2)().shape
        torch.Size([2, 4])
    """

    supports: ClassVar = {"average": constraints.positive, "shape": constraints.positive}

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        concentration: Number = 1.0,
        rate: Number | None = None,
        shape_concentration: Number = 1.0,
        shape_rate: Number = 1e-6,
    ) -> None:
        rate = 1 / max(max_duration, 10) if rate is None else rate
        priors = {"concentration": concentration, "rate": rate}
        priors |= {"shape_concentration": shape_concentration, "shape_rate": shape_rate}
        super().__init__(num_states, max_duration, **priors)

    def average_prior(self) -> TorchDistribution:
        """Gamma prior of the means."""
        return Gamma(self.concentration, self.rate)

    def shape_prior(self) -> TorchDistribution:
        """Gamma prior of the shapes."""
        return Gamma(self.shape_concentration, self.shape_rate)

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(*B, D)``."""
        average, shape = (part.double().unsqueeze(-1) for part in (self.average, self.shape))
        steps = torch.arange(1, self.max_duration).to(average)
        # of each number of further steps over that of one less
        ratios = (shape + steps - 1).log() - (shape + average).log() + average.log() - steps.log()
        logs = torch.nn.functional.pad(ratios.cumsum(-1), (1, 0)).log_softmax(-1)
        return logs.to(self.average.dtype)

    def starts(self, counts: Tensor) -> dict[str, Tensor]:
        """Newton starts: the mean of d - 1 with several shapes, lest a local maximum is found."""
        mean = _mean_count(counts)
        shapes = torch.stack([torch.full_like(mean, shape) for shape in (0.5, 3.0, 30.0)])
        return {"average": mean.expand_as(shapes), "shape": shapes}


free_durations = family("free_durations", FreeDurations, max_duration=1)
geometric_durations = family("geometric_durations", GeometricDurations, max_duration=1)
poisson_durations = family("poisson_durations", PoissonDurations, max_duration=1)
negative_binomial_durations = family(
    "negative_binomial_durations", NegativeBinomialDurations, max_duration=1
)


def _mean_count(counts: Tensor) -> Tensor:
    """Mean of d - 1 by counts ``(R, K, D)``, from which Newton's method starts."""
    steps = torch.arange(counts.size(-1), device=counts.device).to(counts)
    return ((counts * steps).sum(-1) + 0.1) / (counts.sum(-1) + 0.1)


def parametric_durations(distribution: Any, max_duration: int) -> DurationFamily:
    """Family of durations: d - 1 of any distribution on counts, given d <= D; without priors.

    Its arguments start at their values, and are fitted by maximum likelihood; EM takes gradient
    steps.

    Args:
        distribution: Of 0, 1, 2, ..., of batch shape ``(K,)``.
        max_duration: D; what is longer has no probability.

    Raises:
        ValueError: If the batch shape of ``distribution`` is not ``(K,)``, when it is called.

    Example:
        >>> parametric_durations(Poisson(torch.tensor([3.0, 5.0])), 20)(2)().shape
        torch.Size([2, 20])
    """
    check_size("max_duration", max_duration)
    return partial(ParametricDurations, distribution=distribution, max_duration=max_duration)


class ParametricDurations(PyroModule):
    """Durations of any distribution on counts: see :func:`parametric_durations`."""

    def __init__(self, num_states: int, distribution: Any, max_duration: int) -> None:
        super().__init__()
        self.part: Any = emissions.parametric(distribution)(num_states)
        self.max_duration = max_duration

    def forward(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return truncated_log_probs(self.part(), self.max_duration)


def free_probs(counts: Tensor, first: Tensor | None) -> Tensor:
    """Maximum-likelihood probabilities ``(*B, D)`` of durations, first segments left-censored.

    They are :math:`c_d / (C - n + u d)`, and u is where they sum to one; NaN without any count.
    """
    if first is None:
        return counts / counts.sum(-1, keepdim=True)
    steps = torch.arange(1, counts.size(-1) + 1, device=counts.device).to(counts)
    others = (counts.sum(-1) - first).clamp(min=0.0).unsqueeze(-1)
    root = first.unsqueeze(-1) / counts.size(-1)  # the sum falls, and is at least one here
    for _ in range(100):  # Newton steps on a convex function, from the left
        probs = counts / (others + root * steps)
        fall = (probs * steps / (others + root * steps)).sum(-1, keepdim=True)
        step = (probs.sum(-1, keepdim=True) - 1) / fall
        if not bool((step > 1e-15 * root).any()):
            break
        root = torch.where(first.unsqueeze(-1) > 0, root + step.clamp(min=0.0), root)
    return probs / probs.sum(-1, keepdim=True)
