"""What EM must know of an emission, and what closed M-steps share.

In shapes, M is the number of observations and R that of restarts, which are fitted side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

EmissionFamily = Callable[[int], PyroModule]
Statistics = dict[str, Tensor]


class Emission(PyroModule):
    """An emission whose M-step has a closed form.

    Subclasses define ``forward()``, ``statistics`` and ``maximise``. A parameter that is neither
    a ``PyroSample`` nor a ``PyroParam`` is frozen: see :func:`pyrohmm.freeze`.

    Attributes:
        supports: Where each parameter lives, by its name.
    """

    supports: ClassVar[dict[str, constraints.Constraint]] = {}

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """What the observations say about the parameters: sums over observations.

        Args:
            values: ``(M, *E)``; NaN components are missing.
            weights: ``(R, M, K)``, probability of each state at each observation.
            current: The distribution the weights were computed with, of batch shape ``(K,)`` or
                ``(R, 1, K)``; None at the start.
        """
        raise NotImplementedError(f"{type(self).__name__} must define statistics.")

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """The most probable parameters given the statistics.

        Returns:
            The free parameters by name, each ``(R, ...)``, NaN where no observation and no prior
            says anything; and remarks, such as that a variance was held at its floor.
        """
        raise NotImplementedError(f"{type(self).__name__} must define maximise.")

    def is_free(self, name: str) -> bool:
        """Whether the parameter ``name`` is fitted."""
        return is_free(self, name)

    def has_prior(self, name: str) -> bool:
        """Whether the parameter ``name`` has a prior."""
        return name in self._pyro_samples

    def set_points(self, **values: Tensor) -> None:
        """Make parameters points without priors, with these values."""
        for name, value in values.items():
            if name in self._pyro_samples:
                delattr(self, name)
            setattr(self, name, PyroParam(value.detach().clone(), self.supports[name]))
            if name == "loc":  # so that sums are taken about it
                self.prior_loc.copy_(value.detach().expand(self.prior_loc.shape))


def build_emission(emission: EmissionFamily | None, num_states: int) -> PyroModule:
    """What the family makes for K states.

    Raises:
        TypeError: If it is no family, or what it makes is no ``PyroModule``.
    """
    if not callable(emission) or isinstance(emission, torch.distributions.Distribution):
        raise TypeError(
            "emission must be an emission family, such as categorical(num_symbols); got "
            f"{type(emission).__name__}."
        )
    part = emission(num_states)
    if isinstance(part, partial):
        raise TypeError(
            "emission must be an emission family, which is made by a call, such as normal(2) "
            f"or categorical(6); got {getattr(emission, '__name__', emission)} itself."
        )
    if not isinstance(part, PyroModule):
        raise TypeError(
            "emission must return a PyroModule when it is called with K; got "
            f"{type(part).__name__}. Put the parameters into one, as PyroParam or PyroSample."
        )
    return part


def is_free(module: PyroModule, name: str) -> bool:
    """Whether the parameter ``name`` of ``module`` itself has a prior, or is a point that moves."""
    if name in module._pyro_params:
        return getattr(module, f"{name}_unconstrained").requires_grad
    return name in module._pyro_samples


def row_mode(counts: Tensor, concentration: Tensor | None) -> Tensor:
    """Mode of rows of probabilities ``(*, V)`` given counts and a Dirichlet prior, if any.

    Raises:
        ValueError: If a concentration is below one, for then there is no mode.
    """
    counts = with_prior(counts, concentration)
    return counts / counts.sum(-1, keepdim=True)


def with_prior(counts: Tensor, concentration: Tensor | None) -> Tensor:
    """Counts ``(*, V)`` and the pseudo-counts of a Dirichlet prior, if any, in float64.

    Raises:
        ValueError: If a concentration is below one.
    """
    if concentration is None:
        return counts.double()
    check_mode("concentration", concentration)
    return counts.double() + (concentration - 1)


def check_mode(name: str, concentration: Tensor) -> None:
    """Raise at concentrations below one, with which a density has no maximum."""
    if bool((concentration < 1).any()):
        raise ValueError(
            f"{name} below one has no most probable value, which EM looks for; got "
            f"{concentration.min().item():g}. Use fit_svi, or a {name} of at least one."
        )


def moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted counts, sums and sums of squares of the components that are known, in float64.

    Args:
        values: ``(M, D)``; NaN is missing.
        weights: ``(R, M, K)``.

    Returns:
        ``(R, K, 1)`` or, if some are missing, ``(R, K, D)``; ``(R, K, D)``; ``(R, K, D)``.
    """
    weights = weights.double().mT  # (R, K, M)
    values = values.double()
    known = ~values.isnan()
    if bool(known.all()):
        count = weights.sum(-1, keepdim=True)
    else:
        count = weights @ known.double()
        values = values.masked_fill(~known, 0.0)
    return count, weights @ values, weights @ values.square()


def spread(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a floating-point tensor of ``shape``."""
    own = isinstance(value, Tensor) and value.dtype.is_floating_point
    tensor = torch.as_tensor(value, dtype=None if own else torch.get_default_dtype())
    try:
        return tensor.expand(shape).clone()
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number or have a shape that broadcasts to {shape}; got "
            f"{tuple(tensor.shape)}."
        ) from None


def positive(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a positive tensor of ``shape``."""
    tensor = spread(name, value, shape)
    if not bool((tensor > 0).all()):
        raise ValueError(f"{name} must be positive; got a smallest value of {tensor.min().item()}.")
    return tensor


def check_strengths(weight: float, concentration: float) -> None:
    """Raise unless both are positive."""
    if not min(weight, concentration) > 0:
        raise ValueError(
            f"weight and concentration must be positive; got {weight} and {concentration}."
        )


def check_dim(dim: int) -> None:
    """Raise unless ``dim`` is a whole number of at least 0."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int; got {type(dim).__name__}.")
    if dim < 0:
        raise ValueError(f"dim must be at least 0 (scalars); got {dim}.")
