r"""Covariates: transitions, first states and emissions that depend on a linear predictor.

``data.covariates`` holds the columns of all design matrices: see :func:`pyrohmm.formulas`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from pyro.distributions import Normal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints, transform_to

from .._checks import check_size
from ..data.formulas import Columns, as_columns
from ..distributions.hmm import HMM
from ..distributions.observation import Tied
from .base import HMMModule
from .family import EmissionFamily, build_emission


class Linear(PyroModule):
    r"""Linear predictors :math:`x^\top \beta`, a vector of coefficients for each output.

    Site or parameter: ``coefficients`` ``(*shape, P)``: points without a prior, near zero at first,
    or normal with ``scale``.

    Args:
        columns: P columns of the covariates; None for an intercept alone.
        shape: Of the outputs.
        scale: Standard deviation of the normal prior; None for no prior.
    """

    def __init__(self, columns: Columns, shape: tuple[int, ...], scale: float | None) -> None:
        super().__init__()
        self.columns, self.shape = columns, shape
        size = (*shape, max(len(columns.indices), 1))
        if scale is None:
            self.coefficients = PyroParam(0.1 * torch.randn(size), constraints.real)
        else:
            prior = partial(_normal, scale=scale, shape=size)
            self.coefficients = PyroSample(prior)

    def forward(self, covariates: Tensor) -> Tensor:
        """Predictors ``(*B, *shape)`` of ``covariates`` ``(*B, C)``.

        Coefficients may have dimensions of chains or restarts on their left; those stand for as
        many of the first dimensions of the covariates, or are before them.
        """
        if not self.columns.indices:
            x = covariates.new_ones(*covariates.shape[:-1], 1)
        else:
            if max(self.columns.indices) >= covariates.size(-1) or min(self.columns.indices) < 0:
                raise ValueError(
                    f"columns must lie between 0 and {covariates.size(-1) - 1}, those of the "
                    f"covariates of the data; got {', '.join(map(str, self.columns.indices))}."
                )
            x = covariates[..., self.columns.indices]
        table = self.coefficients
        if table.dim() == len(self.shape) + 1:
            predicted = torch.nn.functional.linear(x, table.flatten(0, -2))
        else:  # (R, 1, *shape, P), with (N, P) or (N, T, P)
            rows = x if x.dim() > 2 else x.unsqueeze(-2)
            predicted = rows @ table.flatten(-1 - len(self.shape), -2).mT
            predicted = predicted if x.dim() > 2 else predicted.squeeze(-2)
        return predicted.unflatten(-1, self.shape)


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
    ) -> None:
        super().__init__()
        self.kind, self.names = kind, list(parameters)
        for name, columns in parameters.items():
            setattr(self, name, Linear(columns, (num_states,), scale))

    def forward(self, covariates: Tensor) -> TorchDistribution:
        """The distribution ``(*B, T, K)`` of each step."""
        found: dict[str, Any] = {}
        for name in self.names:
            link = transform_to(self.kind.arg_constraints[name])
            found[name] = link(getattr(self, name)(covariates))
        return self.kind(**found, validate_args=False)


def regression(
    kind: type[TorchDistribution],
    *,
    scale: float | None = None,
    **parameters: Columns | Sequence[int] | None,
) -> EmissionFamily:
    r"""Emission family of generalized linear models, one for each state.

    Each parameter of a distribution of single numbers is linked to a linear predictor: the identity
    for real parameters (``Normal``'s ``loc``, ``Bernoulli``'s ``logits``), the exponential for
    positive ones (``Poisson``'s ``rate``, ``Normal``'s ``scale``), the logistic function for
    probabilities.

    Sites or parameters: ``emission.NAME.coefficients`` ``(K, P)``.

    Args:
        kind: A class of distributions, such as ``pyro.distributions.Poisson``.
        scale: Standard deviation of a normal prior of all coefficients; None for no prior.
        **parameters: Columns of the covariates for each parameter of ``kind``, from
            :func:`pyrohmm.formulas` or as numbers; None for an intercept alone, as have those that
            ``kind`` needs and that are not given.

    Raises:
        ValueError: If ``kind`` has no parameter of a name, or none is given.

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
    needed = inspect.signature(kind.__init__).parameters.values()
    every: dict[str, Any] = {
        part.name: None for part in needed if part.name in known and part.default is part.empty
    }
    every |= parameters
    columns = {name: as_columns(name, part) for name, part in every.items()}
    return partial(RegressionEmission, kind=kind, parameters=columns, scale=scale)


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
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states = num_states
        shape = num_states, num_states - 1
        self.transition = Linear(as_columns("transition", transition), shape, scale)
        self.initial = Linear(as_columns("initial", initial), shape[1:], scale)
        others = (~torch.eye(num_states, dtype=torch.bool)).cumsum(-1)
        self.register_buffer("place", others * ~torch.eye(num_states, dtype=torch.bool))
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
                for name in self.emission.names:
                    link = transform_to(self.emission.kind.arg_constraints[name])
                    emission, index = hmm.emission, slice(None)
                    if isinstance(emission, Tied):
                        emission, index = emission.base, emission.index
                    value = getattr(emission, name)[..., index]
                    self._set(getattr(self.emission, name), link.inv(value))
        return self

    def _set(self, part: Linear, intercepts: Tensor) -> None:
        value = torch.zeros_like(part.coefficients)
        value[..., 0] = intercepts
        part.coefficients = value
