"""Unconstrained coordinates of variables, all of them as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints, transform_to
from torch.distributions.transforms import (
    AffineTransform,
    ExpTransform,
    IndependentTransform,
    SigmoidTransform,
    StickBreakingTransform,
    Transform,
)
from torch.nn.functional import pad

BOUNDARY = 1e-7  # probabilities, counts and shares of the largest rate below this count as zero
POINT = "_unconstrained"  # end of the names of what PyroParams are kept in
AT_LEAST = constraints.greater_than_eq
IDENTITY, LOG, LOGIT = AffineTransform(0.0, 1.0), ExpTransform().inv, SigmoidTransform().inv


class ProbitSticks(StickBreakingTransform):
    r"""Stick-breaking transform with probit breaks: entry k takes :math:`\Phi(x_k)` of the rest.

    Where counts are few the posterior of probabilities reaches down to zero. The tail there is that
    of a normal distribution; with logistic shares it is exponential, and much longer.
    """

    def _call(self, x: Tensor) -> Tensor:
        taken, left = torch.special.log_ndtr(torch.stack([x, -x]))
        logs = pad(taken, (0, 1)) + pad(left.cumsum(-1), (1, 0))
        return logs.exp().clamp(min=torch.finfo(x.dtype).tiny)

    def _inverse(self, y: Tensor) -> Tensor:
        rest = y.double().flip(-1).cumsum(-1).flip(-1)
        shares = torch.stack([y.double()[..., :-1], rest[..., 1:]]) / rest[..., :-1]
        low, high = torch.special.ndtri(shares)
        return torch.where(low < 0, low, -high).to(y)  # of the smaller one, which is not rounded

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Log absolute Jacobian determinant by the first K - 1 probabilities."""
        rest = y[..., 1:].flip(-1).cumsum(-1)[..., 1:].log().sum(-1)
        return rest - 0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)


def _base(support: Any) -> Any:
    """A support without the dimensions of an event that were added to it."""
    added = isinstance(support, constraints.independent)
    return _base(support.base_constraint) if added else support


def coordinates(support: constraints.Constraint) -> Any:
    """Transform from unconstrained coordinates to the support of a variable."""
    if isinstance(_base(support), type(constraints.simplex)):
        return IndependentTransform(ProbitSticks(), support.event_dim - 1)
    return biject_to(support)


class Packing:
    """Map between variables by name and one vector ``(*, D)`` of unconstrained coordinates.

    Args:
        transforms: From coordinates to the space of each variable, by name.
        shapes: Of the coordinates of each, by name.
    """

    def __init__(self, transforms: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> None:
        self.transforms, self.shapes = transforms, shapes
        self.sizes = [math.prod(shape) for shape in shapes.values()]

    @classmethod
    def of(cls, transforms: Mapping[str, Any], values: Mapping[str, Tensor]) -> Packing:
        """Packing for values ``(R, ...)`` by name."""
        return cls(transforms, {n: to.inv(values[n]).shape[1:] for n, to in transforms.items()})

    def flat(self, values: Mapping[str, Tensor]) -> Tensor:
        """Concatenated coordinates ``(R, D)`` of values ``(R, ...)``."""
        parts = [to.inv(values[name]) for name, to in self.transforms.items()]
        return torch.cat([part.reshape(len(part), -1) for part in parts], -1)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split coordinates ``(*, D)`` into those of each variable, in its shape."""
        parts = zip(self.shapes.items(), flat.split(self.sizes, -1))
        return {name: part.reshape(flat.shape[:-1] + shape) for (name, shape), part in parts}

    def values(self, flat: Tensor) -> dict[str, Tensor]:
        """Values ``(*, ...)`` of the variables at coordinates ``(*, D)``."""
        return {name: self.transforms[name](part) for name, part in self.split(flat).items()}

    def log_volume(self, flat: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Log absolute Jacobian determinant ``(*)`` of the map from coordinates to values."""
        total = flat.new_zeros(flat.shape[:-1])
        for name, part in self.split(flat).items():
            slope = self.transforms[name].log_abs_det_jacobian(part, values[name])
            total = total + slope.reshape(*total.shape, -1).sum(-1)
        return total


@dataclass(frozen=True)
class Coordinates:
    r"""Unconstrained coordinates :math:`u \in R^P` of one parameter, zero at its estimate.

    Rows of probabilities are a softmax over their positive entries, positive numbers an
    exponential, anything else the bijection of its support. Entries on the boundary are held.

    Attributes:
        name: Of the parameter.
        estimate: Its value.
        labels: P names, of single coordinates.
        held: Names of the entries that are held at the boundary.
        value: From u ``(*, P)`` to the value of the parameter.
        scale: On which intervals are symmetric: its function, and the inverse.
    """

    name: str
    estimate: Tensor
    labels: list[str]
    held: list[str]
    value: Callable[[Tensor], Tensor]
    scale: Transform

    @classmethod
    def of(cls, name: str, estimate: Tensor, support: Any, unit: float = 1.0) -> Coordinates:
        """Unconstrained coordinates of a parameter in ``support``; ``unit`` is that of the data."""
        estimate, base = estimate.detach().double(), _base(support)
        named = type(support).__name__
        scale: Transform = IDENTITY
        forward: Any = torch.exp  # of coordinates, which are ``origin`` at the estimate
        edge = estimate  # what entries outside are held at
        whole = estimate.dim() > 0 and bool(((estimate.sum(-1) - 1).abs() < 1e-4).all())
        positive = isinstance(base, constraints.greater_than | AT_LEAST) and base.lower_bound == 0
        if whole and (base is constraints.simplex or "Simplex" in named):
            scale, inside, unit = LOGIT, estimate > BOUNDARY, 1.0
            largest = torch.zeros_like(inside).scatter(-1, estimate.argmax(-1, keepdim=True), True)
            free, forward = inside & ~largest, partial(torch.softmax, dim=-1)
            edge, origin = torch.zeros_like(estimate), estimate.log()
            origin = origin.masked_fill(~inside, -torch.inf)
        elif positive or "Positive" in named:
            least = BOUNDARY  # below which an entry counts as zero; none where the unit is small
            if not isinstance(base, AT_LEAST):
                rates = "Positive" in named and estimate.numel()
                least = BOUNDARY * float(estimate.max()) if rates else 0.0
            scale, inside, unit = LOG, estimate > least, 1.0
            free, origin = inside, estimate.log().masked_fill(~inside, 0.0)
            # of zeros: a density of a rate of zero has no second derivative
            edge = estimate.clamp(min=1e-100 if isinstance(base, AT_LEAST) else 0.0)
        else:
            kind = type(base).__name__
            triangular = "Cholesky" in kind or "PositiveDefinite" in kind
            forward = transform_to(support) if triangular else biject_to(support)
            origin = forward.inv(estimate)
            inside = origin.isfinite()
            if base is constraints.unit_interval:
                scale = LOGIT
                inside = inside & (estimate > BOUNDARY) & (estimate < 1 - BOUNDARY)
            free = inside.tril() if triangular else inside
            origin = origin.masked_fill(~free, 0.0)

        def value(u: Tensor) -> Tensor:
            change = u @ torch.eye(free.numel(), dtype=u.dtype)[free.flatten().cpu()]
            change = change.to(origin.device).reshape(u.shape[:-1] + free.shape)
            moved = forward(origin + unit * change)
            return moved if bool(inside.all()) else torch.where(inside, moved, edge)

        names = [f"{name}, free coordinate {n}" for n in range(free.numel())]
        if free.numel() == estimate.numel():
            names = names_of(name, estimate)
        labels = [label for label, at in zip(names, free.flatten().tolist()) if at]
        held = [label for label, at in zip(names, inside.flatten().tolist()) if not at]
        return cls(name, estimate, labels, held, value, scale)

    def interval(self, error: Tensor, z: float) -> tuple[Tensor, Tensor]:
        """Limits ``z`` standard errors below and above the estimates, computed on ``scale``."""
        at = self.scale(self.estimate)
        width = z * error * self.scale.log_abs_det_jacobian(self.estimate, at).exp()
        return self.scale.inv(at - width), self.scale.inv(at + width)


def names_of(name: str, value: Tensor) -> list[str]:
    """Names of the entries of a parameter, row by row."""
    places = torch.ones(value.shape).nonzero().tolist() if value.dim() else [[]]
    return [f"{name}{place or ''}" for place in places]


def columns_of(
    parts: Mapping[str, Mapping[str, Tensor]], names: Mapping[str, list[str]] | None = None
) -> dict[str, list[Any]]:
    """Columns of a table of parameters: the values of each in their order, by column."""
    columns: dict[str, list[Any]] = {"parameter": []}
    for name, values in parts.items():
        own = names_of(name, next(iter(values.values())))
        columns["parameter"] += (names or {}).get(name, own)
        for column, value in values.items():
            columns.setdefault(column, []).extend(value.flatten().tolist())
    return columns
