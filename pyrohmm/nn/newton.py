"""Emission families whose M-step is Newton's method, by the exact derivatives of log-densities.

A family says what it emits, and where Newton's method starts: from the mean and the variance of the
observations of a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pyro
import torch
from pyro.distributions import Beta, Gamma, LogNormal, NegativeBinomial, Normal, Uniform, VonMises
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints, transform_to

from ..distributions import modified
from ..distributions.hard_zeros import (
    arguments_of,
    exact_log_prob,
    first_reaching,
    without_events,
)
from ..ops import newton
from ..ops.products import add_rows, integers_of
from .closed_form import Maximum, Statistics, check_mode
from .family import Components, Number, check_strengths, family, filled, positive

DIRECTED = 0.9999  # largest mean resultant length of angles: they are known to 1e-4 radians
LARGEST = 1e3  # df or total_count, by which t is normal and small counts Poisson to all digits
NARROW = 1e-4  # of a unit, the least scale under default priors
EVEN = 1.01  # concentration of Gamma priors that are zero at zero, and all but constant elsewhere
EXAMPLE = 0.5  # in the support of all families, to stand for what is missing


class NewtonComponents(Components):
    """Base of families of independent components whose M-step is Newton's method.

    Subclasses define ``kind``, ``supports``, ``defaults`` and ``moments``.

    Args:
        num_states: K.
        dim: D; zero for scalars.
        **priors: Of an entry of a parameter, by name.

    Attributes:
        defaults: Priors by name, as functions of ones ``([D])``.
    """

    defaults: ClassVar[dict[str, Callable[[Tensor], Any]]] = {}
    summed, flat = False, True

    def __init__(self, num_states: int, dim: int = 0, **priors: TorchDistribution | None) -> None:
        super().__init__(num_states, dim)
        given = {name: prior for name, prior in priors.items() if prior is not None}
        if not given.keys() <= self.defaults.keys():
            raise TypeError(f"priors are those of {', '.join(self.defaults)}; got {[*given]}.")
        of_data = {name.rpartition("_")[0] for name in self.of_moments}
        self.of_data = bool(of_data) and not of_data & given.keys()
        self._priors: dict[str, tuple[Any, list[str]]] = {}
        for name, default in self.defaults.items():
            prior = given.get(name) or default(torch.ones(self.shape[1:]))
            if not isinstance(prior, torch_dist.Distribution):
                raise TypeError(f"{name} must be a prior, such as Gamma(2.0, 1.0); got {prior!r}.")
            arguments = arguments_of(prior)
            self._priors[name] = type(prior), list(arguments)
            for argument, value in arguments.items():
                buffer = value.detach().to(torch.get_default_dtype()).clone()
                self.register_buffer(f"{name}_{argument}", buffer)

    def prior(self, name: str) -> Any:
        """The prior of each entry of a parameter."""
        kind, arguments = self._priors[name]
        found = {argument: getattr(self, f"{name}_{argument}") for argument in arguments}
        return kind(**found, validate_args=False).expand(self.shape)

    moments: Any  # (mean, variance) -> parameters, by name, with about these

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """Parameters ``(R, K, [D])`` at which Newton's method starts.

        Args:
            values: ``(M, [D])``; NaN is missing.
            weights: ``(R, M, K)``.
        """
        values, weights = self._known(values, weights)
        total = weights.sum(1)
        mean = (weights * values).sum(1) / total
        variance = (weights * (values - mean.unsqueeze(1)).square()).sum(1) / total
        least = 1e-6 * mean.square() + 1e-12
        mean, variance = mean.nan_to_num(EXAMPLE), variance.nan_to_num(1.0)
        return self.moments(mean, variance.maximum(least.nan_to_num(1e-6)))

    def _known(self, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``(M, 1, [D])`` and weights ``(R, M, K, [D])``, zero where one is missing."""
        weights = weights.unsqueeze(-1) if self.dim and weights.dim() == 3 else weights
        values = values.unsqueeze(1)
        return values.nan_to_num(EXAMPLE), weights * ~values.isnan()

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Constraints of all parameters, with dots in those of parts; scales may be bounded."""
        found = dict(self.supports)
        if "scale_low" in self._buffers:
            ends = self.scale_low.double(), self.scale_high.double()
            found["scale"] = constraints.interval(*ends)
        return found

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Values and their weights, and the parameters so far, ``(R, K, [D])``.

        If values are integers, they are those in their range, with the sums of weights.
        """
        if current is None:
            found = self.begin(values.double(), weights.double())
        else:
            found = self.values_of(without_events(current))
        shape = len(weights), *self.shape
        start = {f"start.{n}": v.double().reshape(-1, *self.shape).expand(shape)
                 for n, v in found.items()}  # fmt: skip
        values, weights = _by_value(values, weights)
        return {"each.values": values.double(), "each.weights": weights.double()} | start

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: mode of each state and component, by Newton's method in unconstrained space."""
        values, weights = self._known(statistics["each.values"], statistics["each.weights"])
        names = [*self.spaces()]
        mean = (weights * values).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        ends = {"total_count": (100 * mean.nan_to_num()).clamp(min=LARGEST)}
        ends["df"], never = torch.full_like(mean, LARGEST), torch.full_like(mean, torch.inf)
        high = torch.stack([ends.get(name.rpartition(".")[2], never) for name in names], -1).log()

        def log_likelihood(module: Any) -> Tensor:
            logs = exact_log_prob(module.components(), values)
            return torch.where(weights > 0, logs * weights, 0.0).sum(-2 - bool(self.dim), True)

        starts = {name: statistics[f"start.{name}"].unsqueeze(1).unsqueeze(0) for name in names}
        mode = mode_by_newton(self, starts, log_likelihood, high=high)
        known = (weights > 0).any(1)
        for name in names:
            mode[name] = mode[name].squeeze(1)
            if not self.has_prior(name):
                mode[name] = mode[name].masked_fill(~known, torch.nan)
        return mode, []


def mode_by_newton(
    module: Any,
    starts: Statistics,
    log_likelihood: Callable[[Any], Tensor],
    low: Tensor | float = -math.inf,
    high: Tensor | float = math.inf,
) -> Statistics:
    """Mode of parameters of which each entry has a density of its own, priors included.

    Args:
        module: Has the parameters, whose ``spaces()`` are mapped to the reals.
        starts: ``(S, *B)`` by name, of which the one with the highest end counts; a frozen
            parameter stays as it is.
        log_likelihood: From a copy of the module with such parameters to ``(S, *B)``.
        low: Least real number ``(*B, P)``, if the start is not less.
        high: Largest real number ``(*B, P)``, if the start is not more.
    """
    links = {name: transform_to(space) for name, space in module.spaces().items()}
    free = [module.is_free(name) for name in links]
    for name, is_free in zip(links, free):
        if not is_free:
            part, last = module.owner(name)
            starts[name] = getattr(part, last).detach().double().expand_as(starts[name])
    points = torch.stack([link.inv(starts[name]) for name, link in links.items()], -1)
    low = (points - 1e-6).minimum(torch.as_tensor(low).to(points))  # the start itself has slopes
    high = (points + 1e-6).maximum(torch.as_tensor(high).to(points))

    def values(point: Tensor) -> Statistics:
        parts = point.reshape(points.shape).clamp(low, high).unbind(-1)
        return {name: link(part) for (name, link), part in zip(links.items(), parts)}

    def log_joint(point: Tensor) -> Tensor:
        found = values(point)
        other = module.at(found)
        total = log_likelihood(other)
        for name in filter(module.has_prior, links):
            part, last = other.owner(name)
            total = total + part.prior(last).log_prob(found[name])
        return total.flatten()

    with pyro.validation_enabled(False):
        derivatives, opened = newton.of_function(log_joint), torch.tensor(free).to(points.device)
        best = newton.maximized(log_joint, derivatives, points.flatten(0, -2), opened)
        mode = values(best)
        if len(points) > 1:
            chosen = log_joint(best).reshape(points.shape[:-1]).argmax(0, keepdim=True)
            mode = {name: value.gather(0, chosen) for name, value in mode.items()}
    return {name: value.squeeze(0) for name, value in mode.items()}


def _by_value(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sum weights by distinct integer value, ``(R, U, K, [D])``; unchanged if these are many."""
    counted = integers_of(values)
    if counted is None:
        return values, weights
    numbers, index = counted
    places, size = index.reshape(len(index), -1).unbind(-1), len(numbers) + 1
    sums = torch.stack([
        torch.stack([add_rows(weight, place, size)[:-1] for place in places], -1)
        for weight in weights
    ])  # fmt: skip
    return (numbers.unsqueeze(-1), sums) if values.dim() > 1 else (numbers, sums.squeeze(-1))


class LogNormalEmission(NewtonComponents, emits=torch_dist.LogNormal):
    """Emission family of positive numbers whose logarithms are normal.

    Sites: ``emission.loc``, ``emission.scale``, of the logarithms, each ``(K, D)``, or ``(K,)`` for
    ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one number a step. Components are independent; NaN ones are missing.
        loc: Prior of the means of logarithms; by default normal with a deviation of 30, about the
            logarithm of the mean of the data that are fitted.
        scale: Prior of their standard deviations; by default uniform between 1e-4 and 10, so
            that that of equal numbers is not zero.
    """

    kind = LogNormal
    supports: ClassVar = {"loc": constraints.real, "scale": constraints.positive}
    defaults: ClassVar = {
        "loc": lambda ones: Normal(0 * ones, 30.0),
        "scale": lambda _: Uniform(NARROW, 10.0),
    }
    of_moments: ClassVar = {"loc_loc": lambda _, size, sd: size.log()}
    power = 0

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Log-normal parameters by the method of moments."""
        spread = (variance / mean.square()).log1p()
        return {"loc": mean.log() - spread / 2, "scale": spread.sqrt()}


class WeibullEmission(NewtonComponents, emits=(torch_dist.Weibull, modified.StableWeibull)):
    """Emission family of positive numbers: waits whose hazard rises or falls with time.

    Sites: ``emission.scale``, ``emission.concentration``, each ``(K, D)``, or ``(K,)`` for
    ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one number a step. Components are independent; NaN ones are missing.
        scale: Prior, in the unit of the data; by default all but constant up to a hundred times
            the mean of the data that are fitted.
        concentration: Prior of the shapes; by default all but constant up to 1000.

    Example:
        >>> waits = Sequences.from_list([[0.1, 0.2, 0.3, 0.1]])
        >>> fit = fit_em(TabularHMM(1, weibull()), waits)
        >>> bool((fit.hmm(waits).emission.mean - 0.175).abs() < 0.02)
        True
    """

    kind = modified.StableWeibull
    supports: ClassVar = {"scale": constraints.positive, "concentration": constraints.positive}
    defaults: ClassVar = {
        "scale": lambda ones: Gamma(EVEN, 0.01 * ones),
        "concentration": lambda _: Gamma(EVEN, 1e-3),
    }
    of_moments: ClassVar = {"scale_rate": lambda _, size, sd: 0.01 / size}
    power = 1

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Weibull scale and shape by the method of moments, approximately."""
        shape = (variance.sqrt() / mean).clamp(0.05, 20.0) ** -1.086
        return {"scale": mean / torch.lgamma(1 + 1 / shape).exp(), "concentration": shape}


class BetaEmission(NewtonComponents, emits=(torch_dist.Beta, modified.BetaWithCdf)):
    """Emission family of shares between 0 and 1, both excluded.

    Sites: ``emission.concentration1``, ``emission.concentration0``, each ``(K, D)``, or ``(K,)``
    for ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one number a step. Components are independent; NaN ones are missing.
        concentration1: Prior; by default Gamma(1.01, 1e-6), all but constant.
        concentration0: Prior; by default the same.
    """

    kind = modified.BetaWithCdf
    supports: ClassVar = dict.fromkeys(("concentration1", "concentration0"), constraints.positive)
    defaults: ClassVar = {name: lambda _: Gamma(EVEN, 1e-6) for name in supports}

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Beta parameters by the method of moments."""
        size = (mean * (1 - mean) / variance - 1).clamp(min=0.1)
        return {"concentration1": mean * size, "concentration0": (1 - mean) * size}


class StudentTEmission(NewtonComponents, emits=(torch_dist.StudentT, modified.StudentTWithCdf)):
    """Emission family of numbers with heavy tails: outliers do not draw the mean of a state.

    Sites: ``emission.df``, ``emission.loc``, ``emission.scale``, each ``(K, D)``, or ``(K,)`` for
    ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one number a step. Components are independent; NaN ones are missing.
        df: Prior of the degrees of freedom; by default all but constant up to 1e5, which leaves
            a mode where the likelihood has it. The posterior of few observations is then one of
            normal distributions: sample it with Gamma(2, 0.1) (Juárez and Steel, 2010).
        loc: Prior of the locations; by default, with ``scale``, normal about the mean m of the
            data, with a deviation of ten of their standard deviations s.
        scale: Prior of the scales; by default uniform between s / 1e4 and 10 s, so that that of
            equal numbers is not zero. Until a fit sets them, and if one of the two priors is given,
            m is 0 and s is 1.
    """

    kind = modified.StudentTWithCdf
    supports: ClassVar = {
        "df": constraints.positive,
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    defaults: ClassVar = {
        "df": lambda _: Gamma(EVEN, 1e-5),
        "loc": lambda ones: Normal(0 * ones, 10.0),
        "scale": lambda ones: Uniform(NARROW * ones, 10 * ones),
    }
    of_moments: ClassVar = {
        "loc_loc": lambda mean, *_: mean,
        "loc_scale": lambda *moments: 10 * moments[2],
        "scale_low": lambda *moments: NARROW * moments[2],
        "scale_high": lambda *moments: 10 * moments[2],
    }
    power = 2

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Student-t parameters by the method of moments, with ten degrees of freedom."""
        return {"df": torch.full_like(mean, 10.0), "loc": mean, "scale": (0.8 * variance).sqrt()}


class NegativeBinomialEmission(NewtonComponents, emits=torch_dist.NegativeBinomial):
    """Emission family of counts that vary more than Poisson ones.

    Sites: ``emission.total_count``, ``emission.probs``, each ``(K, D)``, or ``(K,)`` for ``dim=0``;
    the mean is ``total_count * probs / (1 - probs)``.

    Args:
        num_states: K.
        dim: D; zero for one count a step. Components are independent; NaN ones are missing.
        total_count: Prior; by default all but constant up to 1e4 times the mean of the data that
            are fitted, if this is above 10.
        probs: Prior; by default Beta(1, 1).
    """

    kind = NegativeBinomial
    supports: ClassVar = {"total_count": constraints.positive, "probs": constraints.unit_interval}
    defaults: ClassVar = {
        "total_count": lambda ones: Gamma(EVEN, 1e-5 * ones),
        "probs": lambda _: Beta(1.0, 1.0),
    }
    of_moments: ClassVar = {"total_count_rate": lambda mean, *_: 1e-4 / mean.clamp(min=10.0)}

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Negative binomial parameters by the method of moments, with variance above the mean."""
        mean = mean.clamp(min=1e-3)
        size = mean.square() / (variance - mean).maximum(0.01 * mean)
        return {"total_count": size, "probs": mean / (mean + size)}


class WrappedCauchyEmission(NewtonComponents, emits=modified.WrappedCauchy):
    """Emission family of angles in radians with heavy tails.

    Sites: ``emission.loc``, ``emission.concentration``, the mean direction and the mean resultant
    length, each ``(K, D)``, or ``(K,)`` for ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one angle a step. Components are independent; NaN ones are missing.
        loc: Prior; by default von Mises of concentration 0.001.
        concentration: Prior; by default Beta(1, 1.1).
    """

    kind = modified.WrappedCauchy
    supports: ClassVar = {"loc": constraints.real, "concentration": constraints.unit_interval}
    defaults: ClassVar = {
        "loc": lambda _: VonMises(0.0, 0.001),
        "concentration": lambda _: Beta(1.0, 1.1),
    }

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Constraints of parameters; the concentration stays below one, its singular value."""
        return self.supports | {"concentration": constraints.interval(0.0, DIRECTED)}

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """Newton start: direction and length of the mean resultant."""
        values, weights = self._known(values, weights)
        east, north = ((weights * f(values)).sum(1) for f in (torch.cos, torch.sin))
        length = torch.hypot(east, north) / weights.sum(1)
        return {
            "loc": torch.atan2(north, east),
            "concentration": length.nan_to_num(0.1).clamp(0.01, 0.99),
        }


# Concentrations by bisection ---------------------------------------------------------------------


class GammaEmission(Components, emits=torch_dist.Gamma):
    r"""Emission family of positive numbers, gamma in each state and component.

    .. math:: \alpha_k \sim \mathrm{Gamma}(a, b), \quad \beta_k \sim \mathrm{Gamma}(c, d)

    The M-step takes the best rate :math:`\beta` of each concentration :math:`\alpha`, and by
    bisection the concentration of the highest density, which is a concave problem.

    Sites: ``emission.concentration``, then ``emission.rate``, each ``(K, D)``, or ``(K,)`` for
    ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one number a step. Components are independent; NaN ones are missing.
        concentration: a and b.
        rate: c and d, in the unit of the data: a small d is weak. By default c is 1.01, and d
            1e-7 times the mean of the data that are fitted.

    Example:
        >>> waits = Sequences.from_list([[0.1, 0.2, 0.3, 0.1]])
        >>> fit = fit_em(TabularHMM(1, gamma()), waits)
        >>> bool((fit.hmm(waits).emission.mean - 0.175).abs() < 0.02)
        True
    """

    kind = Gamma
    supports: ClassVar = {"concentration": constraints.positive, "rate": constraints.positive}
    of_moments: ClassVar = {
        "rate_gamma": lambda _, size, sd: torch.stack([0 * size + 1.01, 1e-7 * size])
    }
    flat, power = True, -1

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        concentration: tuple[float, float] = (1.01, 1e-6),
        rate: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(num_states, dim)
        self.of_data = rate is None
        for name, pair in (("concentration", concentration), ("rate", rate or (1.01, 1e-7))):
            wide = torch.tensor(pair).reshape(2, *(1,) * bool(dim))
            self.register_buffer(f"{name}_gamma", positive(name, wide, (2, *self.shape[1:])))

    def prior(self, name: str) -> Any:
        """Gamma prior of the parameter ``name``."""
        return Gamma(*getattr(self, f"{name}_gamma")).expand(self.shape)

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """Sufficient statistics of each value, by name: the value and its logarithm."""
        return {"sums": values, "logs": values.log()}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: the rate in closed form, the concentration as the root of the slope."""
        known, sums, logs = (statistics[name] for name in ("known", "sums", "logs"))
        power, fall = self._exponents("concentration")
        above, below = self._exponents("rate")

        def rate(concentration: Tensor) -> Tensor:
            if not self.is_free("rate"):
                return self.rate.detach().double().expand_as(sums)
            return (known * concentration + above) / (sums + below)

        def slope(concentration: Tensor) -> Tensor:
            likelihood = logs + known * (rate(concentration).log() - concentration.digamma())
            return likelihood + power / concentration - fall

        if self.is_free("concentration"):
            best = _falling_root(slope, sums)
            best = best.masked_fill((known == 0) & (not self.has_prior("concentration")), torch.nan)
        else:
            best = self.concentration.detach().double().expand_as(sums)
        return {"concentration": best, "rate": rate(best)}, []

    def _exponents(self, name: str) -> tuple[Tensor | float, Tensor | float]:
        """Exponents of the Gamma prior of a parameter, shape - 1 and rate; zeros without one."""
        if not self.has_prior(name):
            return 0.0, 0.0
        shape, rate = getattr(self, f"{name}_gamma").double()
        check_mode(name, shape)
        return shape - 1, rate


class VonMisesEmission(Components, emits=(torch_dist.VonMises, modified.Angle)):
    r"""Emission family of angles in radians, von Mises in each state and component.

    .. math:: \kappa_k \sim \mathrm{Gamma}(a, b), \quad
              \mu_k \sim \mathrm{VonMises}(m, w \kappa_k)

    Angles that differ by multiples of 2π are the same, so that a mean direction is one where the
    mean of a normal family has no sense: wind, turning angles, the hour of a day. The
    M-step takes the direction of the resultant, and by bisection the κ where its mean length is
    :math:`I_1(\kappa) / I_0(\kappa)`, prior included, which is a concave problem (Mardia and Jupp,
    2000, Directional Statistics, section 5.3).

    Sites: ``emission.concentration``, then ``emission.loc``, each ``(K, D)``, or ``(K,)`` for
    ``dim=0``.

    Args:
        num_states: K.
        dim: D; zero for one angle a step. Components are independent; NaN ones are missing.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior direction is worth; hardly any by default.
        concentration: a, at least one for EM; a number, ``(D,)`` or ``(K, D)``.
        rate: b, of the same shapes.

    Example:
        >>> north = torch.tensor([[0.1, -0.1, 6.2, 0.0]])  # 6.2 is next to zero
        >>> fit = fit_em(TabularHMM(1, von_mises(0)), Sequences(north, torch.tensor([4])))
        >>> abs(fit.parameters["module.emission.loc"].item()) < 0.1
        True
    """

    kind, flat = modified.Angle, True
    # concentrations first: the prior of directions depends on them
    supports: ClassVar = {"concentration": constraints.positive, "loc": constraints.real}

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: Number = 0.0,
        weight: float = 1e-7,
        concentration: Number = 1.0,
        rate: Number = 1e-6,
    ) -> None:
        super().__init__(num_states, dim)
        check_strengths(weight, 1.0)
        self.weight = weight
        self.register_buffer("prior_loc", filled("loc", loc, self.shape))
        self.register_buffer("strength", positive("concentration", concentration, self.shape))
        self.register_buffer("rate", positive("rate", rate, self.shape))

    def concentration_prior(self) -> TorchDistribution:
        """Gamma prior of the concentrations."""
        return Gamma(self.strength, self.rate)

    def loc_prior(self) -> TorchDistribution:
        """Von Mises prior of the directions, given the concentrations."""
        return modified.Angle(self.prior_loc, self.weight * self.concentration)

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """Cosines and sines of the angles."""
        return {"cosines": values.cos(), "sines": values.sin()}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: direction and concentration by the resultant, the prior's included."""
        weight = self.weight if self.has_prior("loc") else 0.0
        east = statistics["cosines"] + weight * self.prior_loc.cos()
        north = statistics["sines"] + weight * self.prior_loc.sin()
        mode = {}
        if self.is_free("loc"):
            none = (east == 0) & (north == 0)
            mode["loc"] = torch.atan2(north, east).masked_fill(none, torch.nan)
            length = torch.hypot(east, north)
        else:
            length = east * self.loc.cos() + north * self.loc.sin()
        if not self.is_free("concentration"):
            return mode, []
        known, power = statistics["known"], torch.zeros_like(length)
        if self.has_prior("concentration"):
            check_mode("concentration", self.strength)
            length, power = length - self.rate, power + self.strength - 1

        def mean_length(kappa: Tensor) -> Tensor:
            return torch.special.i1e(kappa) / torch.special.i0e(kappa)

        def slope(kappa: Tensor) -> Tensor:  # of the log density, which is concave
            rise = length + power / kappa - known * mean_length(kappa)
            return rise - weight * mean_length(weight * kappa)

        undetermined = (known == 0) & (length == 0) & (power == 0)
        best = _falling_root(slope, length).masked_fill(undetermined, torch.nan)
        return mode | {"concentration": best}, []


def _falling_root(slope: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Root in [1e-9, 1e9] of a decreasing function of positive numbers, by bisection."""
    ends = torch.full_like(like, math.log(1e-9)), torch.full_like(like, math.log(1e9))
    return first_reaching(lambda logs: ~(slope(logs.exp()) > 0), *ends).exp()


log_normal = family("log_normal", LogNormalEmission, dim=0)
weibull = family("weibull", WeibullEmission, dim=0)
beta = family("beta", BetaEmission, dim=0)
student_t = family("student_t", StudentTEmission, dim=0)
negative_binomial = family("negative_binomial", NegativeBinomialEmission, dim=0)
wrapped_cauchy = family("wrapped_cauchy", WrappedCauchyEmission, dim=0)
gamma = family("gamma", GammaEmission, dim=0)
von_mises = family("von_mises", VonMisesEmission, dim=0)
