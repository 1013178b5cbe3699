"""Positive numbers: gamma emissions, for waiting times, amounts and step lengths."""

from __future__ import annotations

from typing import ClassVar

import torch
from pyro.distributions import Gamma
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from .closed_form import Maximum, Statistics, check_mode
from .family import Components, falling_root, family, positive


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
        rate: c and d, in the unit of the data: a small d is weak.

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

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        concentration: tuple[float, float] = (2.0, 0.5),
        rate: tuple[float, float] = (1.0, 0.01),
    ) -> None:
        super().__init__(num_states, dim)
        for name, pair in (("concentration", concentration), ("rate", rate)):
            self.register_buffer(f"{name}_gamma", positive(name, torch.tensor(pair), (2,)))

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
