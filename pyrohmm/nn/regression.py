r"""Linear predictors of covariates, and emissions that depend on them.

``data.covariates`` holds the columns of all design matrices: see :func:`pyrohmm.formulas`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from pyro.distributions import Categorical, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints, transform_to
from torch.distributions.transforms import Transform

from .._checks import broadcast_shapes, check_size
from ..data.formulas import Columns, as_columns
from ..distributions.hard_zeros import exact_log_prob
from ..distributions.observation import Tied
from ..distributions.units import Reparametrized
from ..ops import newton
from .base import OwnParameters
from .closed_form import Family, Penalty, Prior, Statistics
from .family import EmissionFamily
from .newton import LARGEST

NEAR = 0.1  # share of what a Newton step promises, to which its rise is known where the last ends
BOUNDS = {"total_count": 1e6, "df": LARGEST}  # by which counts are Poisson, and t is normal


class Units(Transform):
    """Transform coefficients of standardised columns to coefficients ``(*, P)`` of the columns.

    Args:
        mean: ``(P,)``, of the columns; zero where they are not centred.
        spread: ``(P,)``, of the columns.
        level: ``(P,)``, the inverse of the constant column in its place; zero elsewhere.
    """

    domain = codomain = constraints.real_vector
    bijective = True

    def __init__(self, mean: Tensor, spread: Tensor, level: Tensor) -> None:
        super().__init__()
        self.mean, self.spread, self.level = mean, spread, level

    def _call(self, x: Tensor) -> Tensor:
        x = x / self.spread
        return x - (x @ self.mean).unsqueeze(-1) * self.level

    def _inverse(self, y: Tensor) -> Tensor:
        return (y + (y @ self.mean).unsqueeze(-1) * self.level) * self.spread

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Log absolute Jacobian determinant: minus the sum of the log spreads."""
        return -self.spread.log().sum().expand(x.shape[:-1])


class Linear(Family):
    r"""Linear predictors :math:`x^\top \beta`, a vector of coefficients for each output.

    Site or parameter: ``coefficients`` ``(*shape, P)``: points without a prior, near zero at first,
    or normal with ``prior_scale``. With ``free`` they are ``(F,)``, those that are not zero.
    That of an offset is one. Columns of smooth terms come last, and have ``smooth``
    ``(*shape, Q)``, normal with the standard deviation of their term.

    Attributes:
        spread: ``(*shape, S)``, standard deviations of the smooth terms, NaN until they are known.

    Args:
        columns: P columns of the covariates; None for an intercept alone.
        shape: Of the outputs.
        prior_scale: Standard deviation of the normal prior; None for no prior.
        free: ``(*shape, P)`` booleans, False where a coefficient is zero; all are free by default.
    """

    def __init__(
        self, columns: Columns, shape: Any, prior_scale: float | None, free: Tensor | None = None
    ) -> None:
        super().__init__()
        if prior_scale is not None and not (isinstance(prior_scale, Real) and prior_scale > 0):
            text = f"prior_scale must be a positive number or None; got {prior_scale!r}"
            raise ValueError(f"{text}. It is a standard deviation; None means no prior.")
        terms = columns.smooths
        order = sorted(range(len(terms)), key=lambda i: bool(terms[i]))
        if any(terms):
            names, indices = zip(*((columns.names[i], columns.indices[i]) for i in order))
            columns = columns._replace(names=names, indices=indices)
            free = None if free is None else free[..., order]
        curves = list(dict.fromkeys(filter(None, terms)))
        self.terms = [curves.index(terms[i]) for i in order if terms[i]]  # of each column of theirs
        self.columns, self.shape, self.prior_scale = columns, shape, prior_scale
        self.width = len(terms) - len(self.terms)
        offset = torch.tensor([name.startswith("offset(") for name in columns.names])
        one = None
        if bool(offset.any()):
            possible = torch.ones(*shape, len(terms), dtype=torch.bool) if free is None else free
            free, one = possible & ~offset, possible & offset
        self.register_buffer("free", free)
        self.register_buffer("one", one)
        self.register_buffer("prior_loc", torch.zeros(()), persistent=False)  # for its dtype
        size = (*shape, self.width) if free is None else (int(free[..., : self.width].sum()),)
        self.of_data = bool(curves)  # these have their standard deviations from a fit
        if self.terms:
            self.register_buffer("spread", torch.full((*shape, len(curves)), torch.nan))
            self.smooth = PyroSample(Penalty(_curves))
        if prior_scale is None:
            self.coefficients = PyroParam(torch.empty(size), constraints.real)
            self.redraw()
        else:
            self.coefficients = PyroSample(Prior(partial(_normal, scale=prior_scale, shape=size)))

    def redraw(self) -> None:
        """Sample first values of coefficients without a prior, which are small."""
        first = 0.1 * torch.randn_like(self.coefficients)
        self.first = (first.clone().requires_grad_(),)  # neither a parameter nor an identity
        self.coefficients = first

    def design(self, covariates: Tensor) -> Tensor:
        """Design matrix ``(*B, P)`` of ``covariates`` ``(*B, C)``."""
        if not self.columns.indices:
            return covariates.new_ones(*covariates.shape[:-1], 1)
        if max(self.columns.indices) >= covariates.size(-1) or min(self.columns.indices) < 0:
            last, got = covariates.size(-1) - 1, ", ".join(map(str, self.columns.indices))
            text = f"columns must be covariates of the data, 0 to {last}; got {got}"
            raise ValueError(f"{text}. Count columns from 0.")
        return torch.stack([covariates[..., index] for index in self.columns.indices], -1)

    def in_units(self, covariates: Tensor | None, level: float = 0.0) -> None:
        """Parametrise coefficients without priors by standardised columns ``(M, C)``, or undo it.

        Values with which the module was made are coordinates, of predictors about ``level`` if a
        column is constant. Frozen ones stay.
        """
        learnt = any(point.requires_grad for point in self.parameters())
        if not (self.standardisation if covariates is None else learnt):
            return
        with torch.no_grad():
            value: Tensor = self.coefficients.clone()
            space: constraints.Constraint = constraints.real
            if covariates is not None:
                columns = self.design(covariates)[..., : self.width].to(value)
                is_first = torch.equal(value, self.first[0].to(value))
                if self.columns.indices:
                    units = self._units(columns)
                    space = Reparametrized(constraints.real_vector, units)
                    value = units(value) if is_first else value
                if is_first and level:
                    value = value + self._level(columns, level)
            self._pyro_params["coefficients"] = space, self._pyro_params["coefficients"][1]
            self.coefficients = value

    @property
    def standardisation(self) -> list[Tensor]:
        """Means, spreads and levels of columns that coefficients are parametrised by, if any."""
        space, _ = self._pyro_params.get("coefficients", (None, None))
        units = getattr(space, "transform", None)
        return [units.mean, units.spread, units.level] if isinstance(units, Units) else []

    def _level(self, columns: Tensor, level: float) -> Tensor:
        """Coefficients of predictors equal to ``level``, by the first constant column (M, P)."""
        constant = (columns == columns[:1]).all(0) & (columns[0] != 0)
        first = constant & (constant.cumsum(0) == 1)
        table = torch.where(first, level / columns[0], 0.0).expand(*self.shape, -1)
        return table if self.free is None else table[self.free[..., : self.width]]

    def _units(self, columns: Tensor) -> Units:
        """Standardisation of design columns ``(M, P)``, centred where there is an intercept."""
        mean, square = columns.mean(0), columns.square().mean(0).sqrt()
        spread = columns.std(0, correction=0)
        constant = (spread <= 1e-5 * square) & (square > 0)
        if self.free is not None:
            free = self.free[..., : self.width]
            square = square.expand(free.shape)[free]
        if self.free is not None or not bool(constant.any()):
            zeros = torch.zeros_like(square)
            return Units(zeros, torch.where(square > 0, square, 1.0), zeros)
        level = torch.zeros_like(mean)
        first = int(constant.byte().argmax())
        level[first] = 1 / mean[first]
        spread = torch.where(~constant & (spread > 0), spread, torch.where(constant, square, 1.0))
        return Units(mean * ~constant, spread, level)

    def table(self, coefficients: Tensor, smooth: Tensor | None = None) -> Tensor:
        """All coefficients ``(*, *shape, P)``, fixed zeros and ones of offsets included."""
        if self.free is not None:
            free = self.free[..., : self.width]
            held = torch.zeros_like(free) if self.one is None else self.one[..., : self.width]
            held = held.to(coefficients).flatten().expand(*coefficients.shape[:-1], -1)
            coefficients = held.index_copy(-1, free.flatten().nonzero().squeeze(-1), coefficients)
            coefficients = coefficients.unflatten(-1, free.shape)
            if smooth is not None:
                smooth = smooth * self.free[..., self.width :]
        if smooth is None:
            return coefficients
        lead = broadcast_shapes(coefficients.shape[:-1], smooth.shape[:-1])
        return torch.cat([x.expand(*lead, x.size(-1)) for x in (coefficients, smooth)], -1)

    @property
    def precision(self) -> Tensor:
        """Prior precisions ``(*shape, P)`` of the coefficients, zero without a prior."""
        own = self.prior_scale**-2 if self.prior_scale and self.has_prior("coefficients") else 0.0
        plain = self.prior_loc.new_full((*self.shape, self.width), own)
        if not self.terms:
            return plain
        return torch.cat([plain, self.spread[..., self.terms] ** -2], -1)

    def forward(self, covariates: Tensor) -> Tensor:
        """Predictors ``(*B, *shape)`` of ``covariates`` ``(*B, C)``.

        Coefficients may have dimensions of chains or restarts on their left; those stand for as
        many of the first dimensions of the covariates, or are before them.
        """
        table = self.table(self.coefficients, self.smooth if self.terms else None)
        x = self.design(covariates).to(table.dtype)
        if table.dim() == len(self.shape) + 1:
            predicted = torch.nn.functional.linear(x, table.flatten(0, -2))
        else:  # (R, 1, *shape, P), with (N, P) or (N, T, P)
            rows = x if x.dim() > 2 else x.unsqueeze(-2)
            predicted = rows @ table.flatten(-1 - len(self.shape), -2).mT
            predicted = predicted if x.dim() > 2 else predicted.squeeze(-2)
        return predicted.unflatten(-1, self.shape)


def mode_of(
    parts: dict[str, Linear], current: Statistics, rows: int, covariates: Tensor,
    value: newton.Terms,
) -> Statistics:  # fmt: skip
    """M-step of coefficients by Newton's method, for a function of their predictors, with priors.

    Newton's method ends where its steps are as good as it expects, all but at the maximum: that of
    the next M-step is another one.

    Args:
        parts: By the names of their coefficients, which have the same first dimensions.
        current: Coefficients ``(R, ...)`` where Newton's method starts, by name.
        rows: How many of the first dimensions of the shape have coefficients of their own, so that
            these are separate problems: B = R, times their sizes.
        covariates: ``(M, C)``.
        value: Terms of the function: see :func:`pyrohmm.ops.newton.of_predictors`.
    """
    tables: list[Tensor] = []
    free: list[Tensor] = []
    precision: list[Tensor] = []
    designs: list[Tensor] = []
    for name, part in parts.items():
        curves = current[_smooth(name)].double() if part.terms else None
        table = part.table(current[name].double(), curves).flatten(0, rows)  # (B, *outputs, P)
        open_to = torch.ones_like(part.precision).bool() if part.free is None else part.free
        open_to = open_to & part.is_free("coefficients")
        tables.append(table.flatten(1))
        for rest, found in ((open_to, free), (part.precision.double(), precision)):
            rest = rest.flatten(0, rows - 1) if rows else rest.unsqueeze(0)
            found.append(rest.flatten(1).repeat(len(table) // len(rest), 1))
        designs += [part.design(covariates)] * (tables[-1].size(1) // table.size(-1))
    functions = newton.of_predictors(value, designs, torch.cat(precision, 1))
    start, opened = torch.cat(tables, 1), torch.cat(free, 1)
    best = newton.maximized(*functions, start, opened, share=NEAR)
    modes = {}
    for (name, part), piece in zip(parts.items(), best.split([t.size(1) for t in tables], 1)):
        table = piece.reshape(len(current[name]), *part.shape, -1)
        plain = table[..., : part.width]
        modes[name] = plain if part.free is None else plain[:, part.free[..., : part.width]]
        if part.terms:
            modes[_smooth(name)] = table[..., part.width :]
    return modes


def _smooth(name: str) -> str:
    """The name of the coefficients of smooth terms, from that of the others."""
    return f"{name.removesuffix('coefficients')}smooth"


def after_zero(logits: Tensor) -> Tensor:
    """Prepend a zero, the logit of the reference category, along the last dimension."""
    return torch.cat([logits.new_zeros(*logits.shape[:-1], 1), logits], -1)


def _normal(module: Linear, scale: float, shape: tuple[int, ...]) -> TorchDistribution:
    return Normal(module.prior_loc, scale).expand(shape).to_event(len(shape))


def _curves(module: Linear) -> TorchDistribution:
    if bool(module.spread.isnan().any()):
        raise ValueError("the weights of smooth terms are not known. fit_em estimates them: give "
                         "its fit.model to others.")  # fmt: skip
    prior = Normal(module.prior_loc, module.spread[..., module.terms])
    return prior.to_event(len(module.shape) + 1)


class RegressionEmission(OwnParameters):
    """Emissions whose parameters are linked to linear predictors: see :func:`regression`."""

    def __init__(
        self,
        num_states: int,
        kind: type[TorchDistribution],
        parameters: dict[str, Columns],
        prior_scale: float | None,
        num_symbols: int | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.names = kind, list(parameters)
        others = () if num_symbols is None else (num_symbols - 1,)
        self.shape: tuple[int, ...] = (num_states, *others)
        for name, columns in parameters.items():
            setattr(self, name, Linear(columns, self.shape, prior_scale))

    def forward(self, covariates: Tensor) -> TorchDistribution:
        """Emission distribution of each step, ``(*B, T, K)``."""
        return self.linked([getattr(self, name)(covariates) for name in self.names])

    def linked(self, predictors: list[Tensor]) -> TorchDistribution:
        """Emission distribution given the linear predictors of its parameters."""
        found: dict[str, Any] = {}
        for name, predictor in zip(self.names, predictors):
            if len(self.shape) > 1:  # logits of symbols against the first
                found[name] = after_zero(predictor)
            else:
                value = transform_to(self.kind.arg_constraints[name])(predictor)
                found[name] = value.clamp(max=BOUNDS.get(name, math.inf))
        return self.kind(**found, validate_args=False)

    def predictors_of(self, emission: Any) -> dict[str, Tensor]:
        """Linear predictors, by parameter, of an emission without covariates: inverse links."""
        index = slice(None)
        if isinstance(emission, Tied):
            emission, index = emission.base, emission.index
        found = {name: getattr(emission, name)[index] for name in self.names}
        if len(self.shape) > 1:
            return {"logits": found["logits"][:, 1:] - found["logits"][:, :1]}
        links = self.kind.arg_constraints
        return {name: transform_to(links[name]).inv(value) for name, value in found.items()}

    def maximize(
        self, values: Tensor, covariates: Tensor, states: Tensor, current: Statistics
    ) -> Statistics:
        """M-step: mode of the coefficients given the smoothed posterior ``(R, M, K)``."""
        values, weights = values.double(), states.mT.flatten(0, 1)  # (R K, M)

        def terms(emission: TorchDistribution, rows: slice) -> Tensor:
            weight = weights[:, rows]
            return torch.where(weight > 0, exact_log_prob(emission, values[rows]) * weight, 0.0)

        return self.mode(covariates, terms, current)

    def mode(
        self, covariates: Tensor, terms: Callable[[Any, slice], Tensor], current: Statistics
    ) -> Statistics:
        """Coefficients by name that maximise ``terms`` ``(R K, m)`` of the linked distribution.

        Args:
            covariates: ``(M, C)``.
            terms: Of a distribution of batch shape ``(R K, m)``, and which observations these are.
            current: Coefficients where Newton's method starts.
        """
        parts = {f"{name}.coefficients": getattr(self, name) for name in self.names}
        return mode_of(
            parts, current, 1, covariates, lambda x, rows: terms(self.of_predictors(x), rows)
        )

    def of_predictors(self, predictors: Tensor) -> TorchDistribution:
        """Emission distribution given the predictors ``(*, Q)`` of all parameters."""
        several = len(self.shape) > 1
        return self.linked([predictors] if several else list(predictors.unbind(-1)))


def regression(
    kind: type[TorchDistribution],
    *,
    prior_scale: float | None = None,
    num_symbols: int | None = None,
    **parameters: Columns | Sequence[int] | None,
) -> EmissionFamily:
    r"""Emission family of generalized linear models, one for each state.

    Each parameter of a distribution of single numbers is linked to a linear predictor: the identity
    for real parameters (``Normal``'s ``loc``, ``Bernoulli``'s ``logits``), the exponential for
    positive ones (``Poisson``'s ``rate``, ``Normal``'s ``scale``), the logistic function for
    probabilities. ``Categorical`` has ``logits`` against symbol 0.

    Sites or parameters: ``emission.NAME.coefficients`` ``(K, P)``; of a ``Categorical``
    ``emission.logits.coefficients`` ``(K, V - 1, P)``.

    Args:
        kind: A class of distributions, such as ``pyro.distributions.Poisson``.
        prior_scale: Standard deviation of a normal prior of all coefficients; None for no prior.
        num_symbols: V, of a ``Categorical``.
        **parameters: Columns of the covariates for each parameter of ``kind``, from
            :func:`pyrohmm.formulas` or as numbers; None for an intercept alone, as have those that
            ``kind`` needs and that are not given.

    Raises:
        ValueError: If ``kind`` has no parameter of a name, or none is given; or a ``Categorical``
            has no ``num_symbols`` or no ``logits``.

    Example:
        >>> family = regression(Poisson, rate=[0, 1])
        >>> sorted(dict(family(3).named_parameters()))
        ['rate.coefficients_unconstrained']
    """
    if not isinstance(kind, type) or not issubclass(kind, torch.distributions.Distribution):
        got = getattr(kind, "__name__", kind)
        raise TypeError(f"kind must be a class of distributions, such as Normal; got {got}.")
    known = set(getattr(kind, "arg_constraints", ()))
    if not parameters or not set(parameters) <= known or isinstance(parameters.get("scale"), Real):
        raise ValueError(
            f"parameters must be those of {kind.__name__}, {', '.join(sorted(known))}; got "
            f"{', '.join(parameters) or 'none'}. The standard deviation of a prior is prior_scale=."
        )
    if (kind is Categorical) != (num_symbols is not None) or (
        num_symbols is not None and set(parameters) != {"logits"}
    ):
        text = "num_symbols must be given for a Categorical with logits, and for no other kind"
        raise ValueError(f"{text}; got {kind.__name__} and num_symbols={num_symbols}.")
    if num_symbols is not None:
        check_size("num_symbols", num_symbols, 2)
    if {"probs", "logits"} <= known and not {"probs", "logits"} & set(parameters):
        parameters["logits"] = None
    needed = inspect.signature(kind.__init__).parameters.values()
    every: dict[str, Any] = {
        part.name: None for part in needed if part.name in known and part.default is part.empty
    }
    every |= parameters
    columns = {name: as_columns(name, part) for name, part in every.items()}
    rest: Any = {"prior_scale": prior_scale, "num_symbols": num_symbols}
    return partial(RegressionEmission, kind=kind, parameters=columns, **rest)
