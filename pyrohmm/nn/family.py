"""``Emission``: the base of this package's emission families, and what their M-steps share.

In shapes, M is the number of observations and R that of batched restarts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_number
from .._sync import exceeds
from ..ops.products import weighted_sums
from .closed_form import is_free

EmissionFamily = Callable[[int], PyroModule]


class Family(PyroModule):
    """Parameters that have priors, are points, or are frozen by :func:`pyrohmm.freeze`."""

    def set_priors(self, **priors: Callable[[Any], TorchDistribution]) -> None:
        """Make parameters random variables: by name, the method that makes their prior.

        They can be pickled, which lambda functions cannot.
        """
        for name, prior in priors.items():
            setattr(self, name, PyroSample(partial(prior)))  # Pyro would rename the method itself

    def is_free(self, name: str) -> bool:
        """Whether the parameter ``name`` is fitted."""
        return is_free(self, name)

    def has_prior(self, name: str) -> bool:
        """Whether the parameter ``name`` has a prior."""
        return name in self._pyro_samples


class Emission(Family):
    """Base of the emission modules of this package.

    Subclasses define ``forward()`` and, for an M-step in closed form, ``statistics`` and
    ``m_step`` of :class:`pyrohmm.nn.closed_form.EmissionMStep`; without them EM takes gradient
    steps. A parameter that is neither a ``PyroSample`` nor a ``PyroParam`` is frozen: see
    :func:`pyrohmm.freeze`.

    Attributes:
        supports: Support of each parameter, by its name.
        in_time: Whether an observation depends on those before it.
    """

    in_time: ClassVar[bool] = False
    supports: ClassVar[dict[str, constraints.Constraint]] = {}

    def set_points(self, **values: Tensor) -> None:
        """Make parameters points without priors, with these values."""
        for name, value in values.items():
            if name in self._pyro_samples:
                delattr(self, name)
            setattr(self, name, PyroParam(value.detach().clone(), self.supports[name]))


def build_emission(emission: EmissionFamily | None, num_states: int) -> PyroModule:
    """The module of emissions of K states: see :func:`build_part`."""
    return build_part("emission", "an emission family", "normal(2)", emission, num_states)


def build_part(name: str, kind: str, example: str, family: Any, num_states: int) -> PyroModule:
    """The module that a family makes for K states.

    Args:
        name: Of the argument.
        kind: Of family.
        example: Of such a family.
        family: Called with K, returns a ``PyroModule``.
        num_states: K.

    Raises:
        TypeError: If ``family`` is not a family, or what it makes is not a ``PyroModule``.
    """
    if not callable(family) or isinstance(family, torch.distributions.Distribution):
        raise TypeError(f"{name} must be {kind}, such as {example}; got {type(family).__name__}.")
    part = family(num_states)
    if isinstance(part, partial):
        raise TypeError(
            f"{name} must be {kind}, which is made by a call, such as {example}; got "
            f"{getattr(family, '__name__', family)} itself."
        )
    if not isinstance(part, PyroModule):
        raise TypeError(
            f"{name} must return a PyroModule when it is called with K; got "
            f"{type(part).__name__}. Put the parameters into one, as PyroParam or PyroSample."
        )
    return part


def moments(
    values: Tensor, weights: Tensor, about: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted counts, sums and sums of squares of the components that are known, in float64.

    Args:
        values: ``(M, D)``; NaN is missing.
        weights: ``(R, M, K)``.
        about: Origin of the sums, ``(D,)``.

    Returns:
        ``(R, K, 1)`` or, if some are missing, ``(R, K, D)``; ``(R, K, D)``; ``(R, K, D)``.
    """
    dim = values.size(-1)
    # in a tenth of the time of isnan().any()
    complete = exceeds((~values.sum().isnan()).byte(), 0)

    def features(values: Tensor) -> Tensor:
        known = torch.ones_like(values[:, :1])
        values = values - about
        if not complete:
            missing = values.isnan()
            known, values = (~missing).to(values), values.masked_fill(missing, 0.0)
        return torch.cat([known, values, values.square()], -1)

    sizes = [1 if complete else dim, dim, dim]
    known, sums, squares = weighted_sums(weights, values, features, sum(sizes)).split(sizes, -1)
    return known, sums, squares


def spread(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a floating-point tensor of ``shape``."""
    floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    tensor = torch.as_tensor(value, dtype=None if floating else torch.get_default_dtype())
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} must be finite; got {tensor[~tensor.isfinite()][0].item()}.")
    try:
        wide = tensor.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number or have a shape that broadcasts to {shape}; got "
            f"{tuple(tensor.shape)}."
        ) from None
    try:
        return wide.clone()
    except RuntimeError as error:
        raise ValueError(
            f"{name} has shape {shape} for num_states: int {shape[0]}, more than there is memory."
        ) from error


def positive(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a positive tensor of ``shape``."""
    tensor = spread(name, value, shape)
    if not bool((tensor > 0).all()):
        raise ValueError(f"{name} must be positive; got a smallest value of {tensor.min().item()}.")
    return tensor


def check_strengths(weight: float, concentration: float) -> None:
    """Raise unless both are positive and finite."""
    for name, value in (("weight", weight), ("concentration", concentration)):
        check_number(name, value)
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite; got {value}.")
