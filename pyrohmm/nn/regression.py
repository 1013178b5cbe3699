r"""Covariates: transitions, first states and emissions that depend on a linear predictor.

``data.covariates`` holds the columns of all design matrices: see :func:`pyrohmm.formulas`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pyro.distributions import Categorical, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints, transform_to

from .._checks import check_booleans, check_shape, check_size
from ..data.formulas import Columns, as_columns
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.observation import Tied
from ..ops import newton
from .base import HMMModule
from .closed_form import Prior, Statistics, inside, under
from .family import EmissionFamily, build_emission


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
        self.columns, self.shape, self.scale = columns, shape, scale
        size: tuple[int, ...] = (*shape, max(len(columns.indices), 1))
        self.register_buffer("free", free)
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


def _maximized(
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


def _after_zero(logits: Tensor) -> Tensor:
    """Logits with a zero before the last dimension's entries."""
    return torch.cat([logits.new_zeros(*logits.shape[:-1], 1), logits], -1)


def _normal(module: Linear, scale: float, shape: tuple[int, ...]) -> TorchDistribution:
    return Normal(0.0, scale).expand(shape).to_event(len(shape))


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
                found[name] = _after_zero(predictor)
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

        def value(predictors: Tensor) -> Tensor:
            if len(self.shape) > 1:
                parts = [predictors]
            else:
                parts = list(predictors.unbind(-1))
            logs = self.linked(parts).log_prob(values)
            return torch.where(weights > 0, logs * weights, 0.0)

        parts = {f"{name}.coefficients": getattr(self, name) for name in self.names}
        return _maximized(parts, current, 1, data.covariates[seen].double(), value)


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


class RegressionHMM(HMMModule):
    r"""HMM whose transitions, first states and emissions depend on covariates.

    .. math:: p(z_{t+1} = j \mid z_t = i) = \frac{\exp(x_t^\top \beta_{ij})}
              {\sum_k \exp(x_t^\top \beta_{ik})}, \quad \beta_{ii} = 0

    a multinomial logit against staying, with the covariates of the step that is left, as in
    depmixS4 and momentuHMM.

    Sites or parameters: ``transition.coefficients`` ``(K, K - 1, P)``, row i for the transitions
    from i to the other states in their order; ``initial.coefficients`` ``(K - 1, P)``, of logits
    against the first state; and those of ``emission``. They are points without priors, and fits are
    of maximum likelihood; with ``scale`` they have normal priors.

    Args:
        num_states: K.
        emission: An emission family; with covariates that of :func:`regression`.
        transition: Columns of the covariates, from :func:`pyrohmm.formulas` or as numbers; None
            for an intercept alone.
        initial: The same, for the first state; read at the first step.
        scale: Standard deviation of a normal prior of these coefficients; None for no prior.
        transition_allowed: ``(K, K)`` booleans, which transitions are possible; all by default.
            Staying is.
        transition_free: ``(K, K - 1, P)`` booleans, False where a coefficient of the transitions is
            zero; all are free by default. ``transition.coefficients`` are then ``(F,)``, the free
            ones in their order.

    Raises:
        ValueError: If booleans are of another shape, or staying is not allowed.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> x = torch.randn(1, 200, 1)
        >>> covariates = torch.cat([torch.ones(1, 200, 1), x], -1)
        >>> counts = Poisson((1.0 + 0.5 * x[..., 0]).exp()).sample()
        >>> data = Sequences(counts, torch.tensor([200]), covariates=covariates)
        >>> module = RegressionHMM(1, regression(Poisson, rate=[0, 1]))
        >>> fit = fit_map(MarginalModel(module), data, num_iterations=300)
        >>> (module.emission.rate.coefficients - torch.tensor([1.0, 0.5])).abs().max() < 0.1
        tensor(True)
    """

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        transition: Columns | Sequence[int] | None = None,
        initial: Columns | Sequence[int] | None = None,
        scale: float | None = None,
        *,
        transition_allowed: Tensor | None = None,
        transition_free: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states = num_states
        shape = num_states, num_states - 1
        others = ~torch.eye(num_states, dtype=torch.bool)
        self.register_buffer("place", others.cumsum(-1) * others)
        columns = as_columns("transition", transition)
        size = *shape, max(len(columns.indices), 1)
        if transition_free is not None:
            check_booleans("transition_free", transition_free)
            check_shape("transition_free", transition_free, size, "(K, K - 1, P)")
        barred = None
        if transition_allowed is not None:
            check_booleans("transition_allowed", transition_allowed)
            check_shape("transition_allowed", transition_allowed, others.shape, "(K, K)")
            if not bool(transition_allowed.diagonal().all()):
                raise ValueError("transition_allowed must be True on its diagonal, for staying.")
            barred = ~transition_allowed
            possible = transition_allowed[others].reshape(*shape, 1).expand(size)
            transition_free = possible & (True if transition_free is None else transition_free)
        self.register_buffer("barred", barred)
        self.transition = Linear(columns, shape, scale, transition_free)
        self.initial = Linear(as_columns("initial", initial), shape[1:], scale)
        self.emission = build_emission(emission, num_states)

    def forward(
        self, lengths: Tensor, observed: Tensor | None = None, covariates: Tensor | None = None
    ) -> HMM:
        """Build the HMM for ``covariates`` ``(*B, T, C)``."""
        if covariates is None:
            raise ValueError(
                "data has no covariates, which this module needs: Sequences(..., covariates=)."
            )
        logits = _after_zero(self.transition(covariates[..., :-1, :]))
        logits = logits.gather(-1, self.place.expand(logits.shape))  # zero on the diagonal
        if self.barred is not None:
            logits = logits.masked_fill(self.barred, -torch.inf)
        start = _after_zero(self.initial(covariates[..., 0, :]))
        per_step = isinstance(self.emission, RegressionEmission)
        emission = self.emission(covariates) if per_step else self.emission()
        return HMM(
            start.log_softmax(-1),
            logits.log_softmax(-1),
            emission,
            lengths,
            observed,
            transition_per_step=True,
            emission_per_step=per_step,
        )

    def emission_module(self) -> PyroModule | None:
        """The emission, if it does not depend on covariates."""
        return None if isinstance(self.emission, RegressionEmission) else self.emission

    @property
    def by_steps(self) -> list[str]:
        """Names of the parameters that :meth:`maximize` returns; none if a prior is a user's."""
        own = {n: part for n, part in self.named_modules() if isinstance(part, Linear)}
        if not all(isinstance(p, Prior) for x in own.values() for p in x._pyro_samples.values()):
            return []
        return [f"{name}.coefficients" for name in own]

    def entry_names(self) -> dict[str, list[str]]:
        """Names of the coefficients for tables: ``"transition 0 → 1: dose"``, by parameter."""
        found: dict[str, list[str]] = {}
        for name, part in self.named_modules():
            if not isinstance(part, Linear):
                continue
            free = (
                torch.ones(*part.shape, len(part.columns.names)) if part.free is None else part.free
            )
            own = found[f"{name}.coefficients"] = []
            for *place, column in free.nonzero().tolist():
                if part is self.transition:  # by the states entered, not their order
                    place[1] += place[1] >= place[0]
                elif part is self.initial:
                    place[0] += 1
                where = " → ".join(map(str, place))
                own.append(f"{name} {where}: {part.columns.names[column]}")
        return found

    def maximize(self, data: Sequences, counts: Statistics, current: Statistics) -> Statistics:
        """The mode of the coefficients, by Newton's method: see :class:`StepsMStep`."""
        covariates = data.covariates
        assert covariates is not None
        size, restarts = self.num_states, len(current["initial.coefficients"])
        found: Statistics = {}
        if size > 1:
            initial = counts["log_initial"].reshape(restarts, -1, size).double()
            first = covariates[:, 0].double()
            start = {"initial.coefficients": self.initial}
            found |= _maximized(start, current, 0, first, partial(_of_rows, counts=initial))
        if size > 1 and data.num_steps > 1:
            left = data.exists[:, 1:]
            pairs = counts["log_transition"].reshape(restarts, *left.shape, size, size)
            order = self.place.argsort(-1)  # staying first
            rows = pairs[:, left].double().movedim(1, 2)  # (R, K, M, K)
            rows = rows.gather(-1, order.unsqueeze(1).expand(rows.shape)).flatten(0, 1)
            barred = self.barred
            if barred is not None:
                barred = barred.gather(-1, order).repeat(restarts, 1).unsqueeze(1)
            value = partial(_of_rows, counts=rows, barred=barred)
            moves = {"transition.coefficients": self.transition}
            found |= _maximized(moves, current, 1, covariates[:, :-1][left].double(), value)
        if isinstance(self.emission, RegressionEmission):
            states = counts["states"].reshape(restarts, *data.observed.shape, size)
            own = self.emission.maximize(data, states, inside(current, "emission."))
            found |= under("emission.", own)
        return found

    def begin_at(self, hmm: HMM) -> RegressionHMM:
        """Set the intercepts to the parameters of an HMM without covariates, and the rest to zero.

        The likelihood has many optima, and few of them are good: fit a model without covariates
        first, with restarts. The first column of each part must be the intercept, and coefficients
        be points.

        Args:
            hmm: An HMM with the emission that these coefficients are of, without covariates.

        Returns:
            The module itself.
        """
        with torch.no_grad():
            logs = hmm.log_transition.clamp(min=-20.0)
            logs = logs - logs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            self._set(self.transition, logs[self.place > 0].reshape(self.num_states, -1))
            start = hmm.log_initial.clamp(min=-20.0)
            self._set(self.initial, start[1:] - start[0])
            if isinstance(self.emission, RegressionEmission):
                for name, value in self.emission.predictors_of(hmm.emission).items():
                    self._set(getattr(self.emission, name), value)
        return self

    def _set(self, part: Linear, intercepts: Tensor) -> None:
        value = torch.zeros(*part.shape, max(len(part.columns.indices), 1)).to(intercepts)
        value[..., 0] = intercepts
        part.coefficients = value if part.free is None else value[part.free]


def _of_rows(predictors: Tensor, counts: Tensor, barred: Tensor | None = None) -> Tensor:
    """Expected log-probabilities ``(B, M)`` of multinomial logits, against the first outcome.

    Args:
        predictors: ``(B, M, K - 1)``, of the other outcomes.
        counts: ``(B, M, K)``.
        barred: ``(B, 1, K)`` booleans, outcomes that are impossible.
    """
    logits = _after_zero(predictors)
    if barred is not None:
        logits = logits.masked_fill(barred, -torch.inf)
    return torch.where(counts > 0, counts * logits.log_softmax(-1), 0.0).sum(-1)
