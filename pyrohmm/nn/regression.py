r"""Linear predictors of covariates, and emissions that depend on them.

``data.covariates`` holds the columns of all design matrices: see :func:`pyrohmm.formulas`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from pyro.distributions import Categorical, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints, transform_to

from .._checks import check_size
from ..data.formulas import Columns, as_columns
from ..data.sequences import Sequences
from ..distributions.observation import Tied
from ..ops import newton
from .closed_form import Prior, Statistics
from .family import EmissionFamily


class Linear(PyroModule):
    r"""Linear predictors :math:`x^\top \beta`, a vector of coefficients for each output.

    Site or parameter: ``coefficients`` ``(*shape, P)``: points without a prior, near zero at first,
    or normal with ``scale``. With ``free`` they are ``(F,)``, those that are not zero.

    Args:
        columns: P columns of the covariates; None for an intercept alone.
        shape: Of the outputs.
        scale: Standard deviation of the normal prior; None for no prior.
        free: ``(*shape, P)`` booleans, False where a coefficient is zero; all are free by default.
    """

    def __init__(
        self,
        columns: Columns,
        shape: tuple[int, ...],
        scale: float | None,
        free: Tensor | None = None,
    ) -> None:
        super().__init__()
        if scale is not None and not (isinstance(scale, Real) and scale > 0):
            raise ValueError(
                "scale must be the standard deviation of the prior of coefficients, a positive "
                f"number, or None; got {scale}."
            )
        self.columns, self.shape, self.scale = columns, shape, scale
        size: tuple[int, ...] = (*shape, max(len(columns.indices), 1))
        self.register_buffer("free", free)
        self.register_buffer("prior_loc", torch.zeros(()), persistent=False)  # for its dtype
        if free is not None:
            size = (int(free.sum()),)
        if scale is None:
            self.coefficients = PyroParam(0.1 * torch.randn(size), constraints.real)
        else:
            self.coefficients = PyroSample(Prior(partial(_normal, scale=scale, shape=size)))

    def design(self, covariates: Tensor) -> Tensor:
        """Columns ``(*B, P)`` of ``covariates`` ``(*B, C)``."""
        if not self.columns.indices:
            return covariates.new_ones(*covariates.shape[:-1], 1)
        if max(self.columns.indices) >= covariates.size(-1) or min(self.columns.indices) < 0:
            raise ValueError(
                f"columns must lie between 0 and {covariates.size(-1) - 1}, those of the "
                f"covariates of the data; got {', '.join(map(str, self.columns.indices))}."
            )
        return covariates[..., self.columns.indices]

    def table(self, coefficients: Tensor) -> Tensor:
        """All coefficients ``(*, *shape, P)``, zeros included."""
        if self.free is None:
            return coefficients
        zeros = coefficients.new_zeros(*coefficients.shape[:-1], self.free.numel())
        full = zeros.index_copy(-1, self.free.flatten().nonzero().squeeze(-1), coefficients)
        return full.unflatten(-1, self.free.shape)

    def forward(self, covariates: Tensor) -> Tensor:
        """Predictors ``(*B, *shape)`` of ``covariates`` ``(*B, C)``.

        Coefficients may have dimensions of chains or restarts on their left; those stand for as
        many of the first dimensions of the covariates, or are before them.
        """
        x = self.design(covariates)
        table = self.table(self.coefficients)
        if table.dim() == len(self.shape) + 1:
            predicted = torch.nn.functional.linear(x, table.flatten(0, -2))
        else:  # (R, 1, *shape, P), with (N, P) or (N, T, P)
            rows = x if x.dim() > 2 else x.unsqueeze(-2)
            predicted = rows @ table.flatten(-1 - len(self.shape), -2).mT
            predicted = predicted if x.dim() > 2 else predicted.squeeze(-2)
        return predicted.unflatten(-1, self.shape)

    @property
    def fitted(self) -> bool:
        """Whether the coefficients have a prior, or are points that are fitted."""
        point = getattr(self, "coefficients_unconstrained", None)
        return "coefficients" in self._pyro_samples or (point is not None and point.requires_grad)


def mode_of(
    parts: dict[str, Linear], current: Statistics, rows: int, covariates: Tensor, value: Any
) -> Statistics:
    """Coefficients by name that maximise a function of their predictors, priors included.

    Args:
        parts: By the names of their coefficients, which have the same first dimensions.
        current: Coefficients ``(R, ...)`` where Newton's method starts, by name.
        rows: How many of the first dimensions of the shape have coefficients of their own, so that
            these are separate problems: B = R, times their sizes.
        covariates: ``(M, C)``.
        value: From predictors ``(B, M, Q)`` to terms ``(B, M)``.
    """
    tables, free, designs, precision = [], [], [], []
    for name, part in parts.items():
        table = part.table(current[name].double()).flatten(0, rows)  # (B, *outputs, P)
        open_to = torch.full(part.shape + table.shape[-1:], part.fitted, device=table.device)
        open_to = open_to if part.free is None else open_to & part.free
        open_to = open_to.flatten(0, rows - 1) if rows else open_to.unsqueeze(0)
        tables.append(table.flatten(1))
        free.append(open_to.flatten(1).repeat(len(table) // len(open_to), 1))
        outputs = tables[-1].size(1) // table.size(-1)
        designs += [part.design(covariates)] * outputs
        square = torch.zeros(table.size(-1)).to(table) if part.scale is None else (
            torch.full((table.size(-1),), part.scale**-2).to(table))  # fmt: skip
        precision += [square] * outputs
    functions = newton.of_predictors(value, designs, torch.cat(precision).diag())
    best = newton.maximized(*functions, torch.cat(tables, 1), torch.cat(free, 1))
    found = {}
    for (name, part), piece in zip(parts.items(), best.split([t.size(1) for t in tables], 1)):
        table = piece.reshape(len(current[name]), *part.shape, -1)
        found[name] = table if part.free is None else table[:, part.free]
    return found


def after_zero(logits: Tensor) -> Tensor:
    """Logits with a zero before the last dimension's entries."""
    return torch.cat([logits.new_zeros(*logits.shape[:-1], 1), logits], -1)


def _normal(module: Linear, scale: float, shape: tuple[int, ...]) -> TorchDistribution:
    return Normal(module.prior_loc, scale).expand(shape).to_event(len(shape))


class RegressionEmission(PyroModule):
    """Emissions whose parameters are linked to linear predictors: see :func:`regression`."""

    def __init__(
        self,
        num_states: int,
        kind: type[TorchDistribution],
        parameters: dict[str, Columns],
        scale: float | None,
        num_symbols: int | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.names = kind, list(parameters)
        self.shape: tuple[int, ...] = (num_states,)
        if num_symbols is not None:
            self.shape = num_states, num_symbols - 1
        for name, columns in parameters.items():
            setattr(self, name, Linear(columns, self.shape, scale))

    def forward(self, covariates: Tensor) -> TorchDistribution:
        """The distribution ``(*B, T, K)`` of each step."""
        return self.linked([getattr(self, name)(covariates) for name in self.names])

    def linked(self, predictors: list[Tensor]) -> TorchDistribution:
        """The distribution with these predictors of its parameters."""
        found: dict[str, Any] = {}
        for name, predictor in zip(self.names, predictors):
            if len(self.shape) > 1:  # logits of symbols against the first
                found[name] = after_zero(predictor)
            else:
                found[name] = transform_to(self.kind.arg_constraints[name])(predictor)
        return self.kind(**found, validate_args=False)

    def predictors_of(self, emission: Any) -> dict[str, Tensor]:
        """The predictors, by parameter, of an emission without covariates."""
        index = slice(None)
        if isinstance(emission, Tied):
            emission, index = emission.base, emission.index
        if len(self.shape) > 1:
            logits = emission.logits[index]
            return {"logits": logits[:, 1:] - logits[:, :1]}
        return {
            name: transform_to(self.kind.arg_constraints[name]).inv(getattr(emission, name)[index])
            for name in self.names
        }

    def maximize(self, data: Sequences, states: Tensor, current: Statistics) -> Statistics:
        """Coefficients by name, given the smoothed posterior of the states ``(R, N, T, K)``."""
        seen = data.observed
        values = data.values[seen].double()
        assert data.covariates is not None
        weights = states[:, seen].mT.flatten(0, 1).double()  # (R K, M)

        def terms(emission: TorchDistribution) -> Tensor:
            return torch.where(weights > 0, emission.log_prob(values) * weights, 0.0)

        return self.mode(data.covariates[seen].double(), terms, current)

    def mode(
        self, covariates: Tensor, terms: Callable[[Any], Tensor], current: Statistics
    ) -> Statistics:
        """Coefficients by name that maximise ``terms`` ``(R K, M)`` of the linked distribution.

        Args:
            covariates: ``(M, C)``.
            terms: Of a distribution of batch shape ``(R K, M)``.
            current: Coefficients where Newton's method starts.
        """
        parts = {f"{name}.coefficients": getattr(self, name) for name in self.names}
        return mode_of(parts, current, 1, covariates, lambda x: terms(self.of_predictors(x)))

    def of_predictors(self, predictors: Tensor) -> TorchDistribution:
        """The distribution with predictors ``(*, Q)`` of all parameters."""
        several = len(self.shape) > 1
        return self.linked([predictors] if several else list(predictors.unbind(-1)))


def regression(
    kind: type[TorchDistribution],
    *,
    scale: float | None = None,
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
        scale: Standard deviation of a normal prior of all coefficients; None for no prior.
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
    known = set(getattr(kind, "arg_constraints", ()))
    if not parameters or not set(parameters) <= known:
        raise ValueError(
            f"parameters must be those of {getattr(kind, '__name__', kind)}, "
            f"{', '.join(sorted(known))}; got {', '.join(parameters) or 'none'}."
        )
    if (kind is Categorical) != (num_symbols is not None) or (
        num_symbols is not None and set(parameters) != {"logits"}
    ):
        raise ValueError(
            "a Categorical, and no other kind, needs num_symbols, and has logits: "
            "regression(Categorical, num_symbols=3, logits=...)."
        )
    if num_symbols is not None:
        check_size("num_symbols", num_symbols, 2)
    needed = inspect.signature(kind.__init__).parameters.values()
    every: dict[str, Any] = {
        part.name: None for part in needed if part.name in known and part.default is part.empty
    }
    every |= parameters
    columns = {name: as_columns(name, part) for name, part in every.items()}
    return partial(
        RegressionEmission, kind=kind, parameters=columns, scale=scale, num_symbols=num_symbols
    )
