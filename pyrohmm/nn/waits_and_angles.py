"""Emission families with a concentration that bisection finds: gamma and von Mises."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pyro.distributions import Gamma, VonMises
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from ..distributions.modified import von_mises_cdf
from .closed_form import Maximum, Statistics, check_mode
from .family import (
    Components,
    check_strengths,
    falling_root,
    family,
    positive,
    spread,
)


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

    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "concentration": constraints.positive,
        "rate": constraints.positive,
    }
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

    def concentration_prior(self) -> TorchDistribution:
        """Gamma concentrations."""
        return Gamma(*self.concentration_gamma).expand(self.shape)

    def rate_prior(self) -> TorchDistribution:
        """Gamma rates."""
        return Gamma(*self.rate_gamma).expand(self.shape)

    def components(self) -> TorchDistribution:
        """Positive numbers."""
        return Gamma(self.concentration, self.rate)

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """The values and their logarithms."""
        return {"sums": values, "logs": values.log()}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode: the rate in closed form, the concentration where the slope is zero."""
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
            best = falling_root(slope, sums)
            best = best.masked_fill((known == 0) & (not self.has_prior("concentration")), torch.nan)
        else:
            best = self.concentration.detach().double().expand_as(sums)
        return {"concentration": best, "rate": rate(best)}, []

    def _exponents(self, name: str) -> tuple[Tensor | float, Tensor | float]:
        """Powers of a parameter and of its exponential in the prior; zeros if there is none."""
        if not self.has_prior(name):
            return 0.0, 0.0
        shape, rate = getattr(self, f"{name}_gamma").double()
        check_mode(name, shape)
        return shape - 1, rate


gamma = family("gamma", GammaEmission, dim=0)


class Angle(VonMises):
    """Von Mises; the density of torch is by polynomials, right to eight digits."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density, by a scaled Bessel function that is exact at any concentration."""
        fall = -2 * torch.sin((value - self.loc) / 2).square()  # cos - 1 without cancellation
        scale = torch.special.i0e(self.concentration).log() + math.log(2 * math.pi)
        return self.concentration * fall - scale

    def cdf(self, value: Tensor) -> Tensor:
        """Probability that an angle lies between -π and ``value``, both in one turn."""
        return von_mises_cdf(value, self.loc, self.concentration)


class VonMisesEmission(Components, emits=(torch_dist.VonMises, Angle)):
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

    flat = True
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "concentration": constraints.positive,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor = 0.0,
        weight: float = 1e-7,
        concentration: float | Tensor = 1.0,
        rate: float | Tensor = 1e-6,
    ) -> None:
        super().__init__(num_states, dim)
        check_strengths(weight, 1.0)
        self.weight = weight
        self.register_buffer("prior_loc", spread("loc", loc, self.shape))
        self.register_buffer("strength", positive("concentration", concentration, self.shape))
        self.register_buffer("rate", positive("rate", rate, self.shape))

    def concentration_prior(self) -> TorchDistribution:
        """Gamma concentrations."""
        return Gamma(self.strength, self.rate)

    def loc_prior(self) -> TorchDistribution:
        """Directions, von Mises given the concentrations."""
        return Angle(self.prior_loc, self.weight * self.concentration)

    def components(self) -> TorchDistribution:
        """Angles."""
        concentration = self.concentration  # read first: the prior of the mean depends on it
        return Angle(self.loc, concentration)

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """Cosines and sines."""
        return {"cosines": values.cos(), "sines": values.sin()}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Direction and length of the resultant, with those of the prior."""
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
        if self.is_free("concentration"):
            above, below = torch.zeros_like(length), torch.zeros_like(length)
            if self.has_prior("concentration"):
                check_mode("concentration", self.strength)
                above, below = above + self.strength - 1, below + self.rate
            mode["concentration"] = _concentration_mode(
                length - below, above, statistics["known"], weight
            )
        return mode, []


von_mises = family("von_mises", VonMisesEmission, dim=0)


def _concentration_mode(length: Tensor, power: Tensor, known: Tensor, weight: float) -> Tensor:
    r"""The κ in [1e-9, 1e9] that maximises a concave function, by bisection on its slope.

    .. math:: \kappa R + a \log \kappa - n \log I_0(\kappa) - \log I_0(w \kappa)

    for R = ``length``, a = ``power`` and n = ``known``.
    """

    def mean_length(kappa: Tensor) -> Tensor:
        return torch.special.i1e(kappa) / torch.special.i0e(kappa)

    def slope(kappa: Tensor) -> Tensor:
        rise = length + power / kappa - known * mean_length(kappa)
        return rise - weight * mean_length(weight * kappa)

    undetermined = (known == 0) & (length == 0) & (power == 0)
    return falling_root(slope, length).masked_fill(undetermined, torch.nan)
