"""Emission families whose M-step is Newton's method, by the exact derivatives of log-densities.

A family says what it emits, and where Newton's method starts: from the mean and the variance of the
observations of a state.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pyro
import torch
from pyro.distributions import (
    Beta,
    Gamma,
    LogNormal,
    NegativeBinomial,
    Normal,
    Uniform,
    VonMises,
)
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints, transform_to

from ..distributions import modified
from ..distributions.constructors import arguments_of
from ..distributions.hard_zeros import exact_log_prob
from ..ops import newton
from .closed_form import Maximum, Statistics
from .family import Components, family

DIRECTED = 0.9999  # largest mean resultant length of angles: they are known to 1e-4 radians
LARGEST = 1e3  # df or total_count, by which t is normal and small counts Poisson to all digits
NARROW = 1e-4  # of a unit, the least scale under default priors
EXAMPLE = 0.5  # in the support of all families, to stand for what is missing


class NewtonComponents(Components):
    """Base of families of independent components whose M-step is Newton's method.

    Subclasses define ``kind``, ``supports`` and ``moments``, and pass on priors by name.

    Attributes:
        kind: The distribution of a component, of parameters with the names in ``supports``.
    """

    kind: ClassVar[Any]
    summed, flat = False, True

    def __init__(self, num_states: int, dim: int, **priors: TorchDistribution) -> None:
        super().__init__(num_states, dim)
        self._priors: dict[str, tuple[Any, list[str]]] = {}
        for name, prior in priors.items():
            if not isinstance(prior, torch_dist.Distribution):
                raise TypeError(
                    f"{name} must be a prior, such as pyro.distributions.Gamma(2.0, 1.0); got "
                    f"{type(prior).__name__}."
                )
            arguments = arguments_of(prior)
            self._priors[name] = type(prior), list(arguments)
            for argument, value in arguments.items():
                self.register_buffer(
                    f"{name}_{argument}", value.detach().to(torch.get_default_dtype()).clone()
                )
            self.set_priors(**{name: partial(_wide, name=name)})

    def prior(self, name: str) -> Any:
        """The prior of each entry of a parameter."""
        kind, arguments = self._priors[name]
        found = {argument: getattr(self, f"{name}_{argument}") for argument in arguments}
        return kind(**found, validate_args=False)

    def components(self) -> TorchDistribution:
        """The distribution of the components."""
        return self.kind(**{name: getattr(self, name) for name in self.supports})

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Parameters by name with about this mean and variance, which are positive."""
        raise NotImplementedError

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """Parameters ``(R, K, [D])`` at which Newton's method starts.

        Args:
            values: ``(M, [D])``; NaN is missing.
            weights: ``(R, M, K)``.
        """
        weights = weights.unsqueeze(-1) if self.dim else weights
        values = values.unsqueeze(1)  # (M, 1, [D])
        weights = weights * ~values.isnan()
        total, values = weights.sum(1), values.nan_to_num(EXAMPLE)
        mean = (weights * values).sum(1) / total
        variance = (weights * (values - mean.unsqueeze(1)).square()).sum(1) / total
        least = 1e-6 * mean.square() + 1e-12
        mean, variance = mean.nan_to_num(EXAMPLE), variance.nan_to_num(1.0)
        return self.moments(mean, variance.maximum(least.nan_to_num(1e-6)))

    def values_of(self, distribution: Any) -> Statistics:
        """The parameters of a distribution that the family emits, by name."""
        return {name: getattr(distribution, name) for name in self.supports}

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Supports of all parameters, with dots for those of parts; those of bounded scales."""
        found = dict(self.supports)
        if "scale_low" in self._buffers:
            ends = self.scale_low.double(), self.scale_high.double()
            found["scale"] = constraints.interval(*ends)
        return found

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """The observations, their weights, and the parameters so far, ``(R, K, [D])``."""
        if current is None:
            found = self.begin(values.double(), weights.double())
        else:
            base: Any = current
            while isinstance(base, torch_dist.Independent):
                base = base.base_dist
            found = self.values_of(base)
        shape = len(weights), *self.shape
        start = {f"start.{n}": v.double().reshape(-1, *self.shape).expand(shape)
                 for n, v in found.items()}  # fmt: skip
        return {"values": values.double(), "weights": weights.double()} | start

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of each state and component, by Newton's method in unconstrained space."""
        values, weights = statistics["values"].unsqueeze(1), statistics["weights"]
        weights = weights.unsqueeze(-1) if self.dim else weights
        weights = weights * ~values.isnan()  # (R, M, K, [D])
        values = values.nan_to_num(EXAMPLE)
        links = {name: transform_to(space) for name, space in self.spaces().items()}
        owners = {name: self._owner(name) for name in links}
        lead = statistics[f"start.{next(iter(links))}"].unsqueeze(1).shape
        start = [link.inv(statistics[f"start.{name}"]) for name, link in links.items()]
        for i, (owner, name) in enumerate(owners.values()):
            if not owner.is_free(name):
                link = list(links.values())[i]
                start[i] = link.inv(getattr(owner, name).detach().double()).expand_as(start[i])

        points = torch.stack(start, -1).flatten(0, -2)
        mean = (weights * values).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
        ends = {"total_count": (100 * mean.nan_to_num()).clamp(min=LARGEST)}
        ends["df"], never = torch.full_like(mean, LARGEST), torch.full_like(mean, torch.inf)
        largest = torch.stack([ends.get(name, never) for _, name in owners.values()], -1).log()
        most = (points + 1e-6).maximum(largest.flatten(0, -2))  # the start itself has slopes

        def log_joint(point: Tensor) -> Tensor:
            parts = point.minimum(most).reshape(*lead, -1).unbind(-1)
            found = {name: link(part) for (name, link), part in zip(links.items(), parts)}
            module = self.at(found)
            logs = exact_log_prob(module.components(), values)
            total = torch.where(weights > 0, logs * weights, 0.0).sum(1, keepdim=True)
            for name, (owner, last) in owners.items():
                if owner.has_prior(last):
                    own = module._owner(name)[0]
                    total = total + own.prior(last).log_prob(found[name])
            return total.flatten()

        free = torch.tensor([owner.is_free(name) for owner, name in owners.values()])
        known = (weights > 0).any(1)
        with pyro.validation_enabled(False):
            best = newton.maximized(
                log_joint, newton.of_function(log_joint), points, free.to(values.device)
            ).minimum(most)
        mode = {}
        for (name, link), part in zip(links.items(), best.reshape(*lead, -1).squeeze(1).unbind(-1)):
            owner, last = owners[name]
            mode[name] = link(part)
            if not owner.has_prior(last):
                mode[name] = mode[name].masked_fill(~known, torch.nan)
        return mode, []

    def _owner(self, name: str) -> tuple[Any, str]:
        """The module that has a parameter, and its name there."""
        path, _, last = name.rpartition(".")
        return self.get_submodule(path), last


def _wide(module: NewtonComponents, name: str) -> TorchDistribution:
    return module.prior(name).expand(module.shape).to_event(len(module.shape))


def _not_zero(unit: Tensor) -> TorchDistribution:
    """Prior of scales that keeps that of equal numbers from zero, and is constant elsewhere."""
    return Uniform(NARROW * unit, 10 * unit)


def _even(num: float, dim: int = 0) -> TorchDistribution:
    """Prior next to a constant for numbers far below ``1 / num``; proper, and zero at zero."""
    return Gamma(1.01, torch.full((dim,) if dim else (), num))


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
    of_moments: ClassVar = {"loc_loc": lambda _, size, sd: size.log()}
    power = 0
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "loc": constraints.real,
        "scale": constraints.positive,
    }

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        loc: TorchDistribution | None = None,
        scale: TorchDistribution | None = None,
    ) -> None:
        self.of_data, wide = loc is None, torch.ones((dim,) if dim else ())
        loc = Normal(0 * wide, 30.0) if loc is None else loc
        scale = _not_zero(torch.ones(())) if scale is None else scale
        super().__init__(num_states, dim, loc=loc, scale=scale)

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Those of the log-normal with this mean and variance."""
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
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "scale": constraints.positive,
        "concentration": constraints.positive,
    }
    of_moments: ClassVar = {"scale_rate": lambda _, size, sd: 0.01 / size}
    power = 1

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        scale: TorchDistribution | None = None,
        concentration: TorchDistribution | None = None,
    ) -> None:
        self.of_data = scale is None
        priors = {"scale": scale or _even(0.01, dim), "concentration": concentration or _even(1e-3)}
        super().__init__(num_states, dim, **priors)

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """By the power of the coefficient of variation."""
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
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "concentration1": constraints.positive,
        "concentration0": constraints.positive,
    }

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        concentration1: TorchDistribution = Gamma(1.01, 1e-6),  # noqa: B008
        concentration0: TorchDistribution = Gamma(1.01, 1e-6),  # noqa: B008
    ) -> None:
        priors = {"concentration1": concentration1, "concentration0": concentration0}
        super().__init__(num_states, dim, **priors)

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Those of the beta with this mean and variance."""
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
    of_moments: ClassVar = {
        "loc_loc": lambda mean, *_: mean,
        "loc_scale": lambda *moments: 10 * moments[2],
        "scale_low": lambda *moments: NARROW * moments[2],
        "scale_high": lambda *moments: 10 * moments[2],
    }
    power = 2
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "df": constraints.positive,
        "loc": constraints.real,
        "scale": constraints.positive,
    }

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        df: TorchDistribution = Gamma(1.01, 1e-5),  # noqa: B008
        loc: TorchDistribution | None = None,
        scale: TorchDistribution | None = None,
    ) -> None:
        self.of_data, wide = loc is None and scale is None, torch.ones((dim,) if dim else ())
        priors = {
            "loc": Normal(0 * wide, 10.0) if loc is None else loc,
            "scale": _not_zero(wide) if scale is None else scale,
        }
        super().__init__(num_states, dim, df=df, **priors)

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Those of ten degrees of freedom."""
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
    of_moments: ClassVar = {"total_count_rate": lambda mean, *_: 1e-4 / mean.clamp(min=10.0)}
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "total_count": constraints.positive,
        "probs": constraints.unit_interval,
    }

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        total_count: TorchDistribution | None = None,
        probs: TorchDistribution = Beta(1.0, 1.0),  # noqa: B008
    ) -> None:
        self.of_data = total_count is None
        priors = {"total_count": total_count or _even(1e-5, dim), "probs": probs}
        super().__init__(num_states, dim, **priors)

    def moments(self, mean: Tensor, variance: Tensor) -> Statistics:
        """Those of the negative binomial with this mean, and this variance if it is larger."""
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
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "loc": constraints.real,
        "concentration": constraints.unit_interval,
    }

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        loc: TorchDistribution = VonMises(0.0, 0.001),  # noqa: B008
        concentration: TorchDistribution = Beta(1.0, 1.1),  # noqa: B008
    ) -> None:
        super().__init__(num_states, dim, loc=loc, concentration=concentration)

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Supports; of equal angles the length is not one, where densities are infinite."""
        return self.supports | {"concentration": constraints.interval(0.0, DIRECTED)}

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """Direction and length of the mean resultant."""
        weights = weights.unsqueeze(-1) if self.dim else weights
        values = values.unsqueeze(1)
        weights = weights * ~values.isnan()
        values = values.nan_to_num(0.0)
        east, north = ((weights * f(values)).sum(1) for f in (torch.cos, torch.sin))
        length = torch.hypot(east, north) / weights.sum(1)
        return {
            "loc": torch.atan2(north, east),
            "concentration": length.nan_to_num(0.1).clamp(0.01, 0.99),
        }


log_normal = family("log_normal", LogNormalEmission, dim=0)
weibull = family("weibull", WeibullEmission, dim=0)
beta = family("beta", BetaEmission, dim=0)
student_t = family("student_t", StudentTEmission, dim=0)
negative_binomial = family("negative_binomial", NegativeBinomialEmission, dim=0)
wrapped_cauchy = family("wrapped_cauchy", WrappedCauchyEmission, dim=0)
