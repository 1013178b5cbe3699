"""Standard errors and intervals of a fit, from the curvature of its log joint density."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.base import PYRO
from .coordinates import IDENTITY, LOG, Coordinates, Packing, names_of
from .models import EnumeratedModel, MarginalModel
from .objective import log_joint
from .plates import detached, in_plate, wide

FAR = 0.1  # nats below the maximum, some half of a standard error away from it
CHUNK = 16  # columns of the Hessian that are computed as one batch
SMALL = 1e-3  # share of the largest rate, below which one is at the boundary that counts
VANISHING = 0.01  # nats or less where it is zero: transitions that are expected, or observations
LEAST = 1e-6  # nats for a change by a factor of e: such a parameter is not determined
RANK = 1e-9  # eigenvalues of the scaled information below this are directions without curvature
ROUNDING = 1e-6  # share of a slope along a flat direction that is rounding
STEP = 1e-3  # of central differences, in standard errors given the other coordinates
MOST_PARAMETERS = 3_000  # the Hessian has as many columns, each a gradient of the gradient


class Covariance(NamedTuple):
    """Covariance of estimates.

    Attributes:
        names: Of the E entries, such as "module.transition[0, 1]".
        matrix: ``(E, E)``.
    """

    names: list[str]
    matrix: Tensor


class Information:
    r"""Observed information of a fit: minus the Hessian of its log joint density at the estimate.

    The log joint density is that of the data and of the priors, if the model has some, so that
    intervals are those of maximum likelihood, or of a normal approximation to the posterior. The
    Hessian is exact, in double precision, in coordinates in which the estimate is not on a
    boundary; the delta method maps it to any function of the fitted HMM.

    The states are those of the fit: intervals hold within one labelling of the states.

    References:
        Lystig and Hughes (2002), Exact computation of the observed information matrix for hidden
        Markov models.

    Args:
        model: The Pyro model of the fit, which returns an HMM.
        values: The estimates of its latent variables, by name.
        supports: Their supports, by name.
        data: The sequences that were fitted, labels included if the fit kept to them.

    Attributes:
        labels: P names of the free coordinates.
        held: Entries that the fit has left on the boundary of their space, such as probabilities
            of zero or coefficients at infinity (separation), and real numbers that the data do not
            determine; they are held there and have no interval.
        flat: ``(P, F)``, directions of real numbers along which the log joint does not change.
        names: Names of the entries of parameters as tables have them, by parameter, where a module
            has better ones than their indices.
        matrix: ``(P, P)``, the observed information, in nats.
        decrement: Newton's estimate of how far the log joint is below its maximum, in nats.
        hmm: The fitted HMM, in double precision.

    Raises:
        ValueError: If the information is singular or the estimate no maximum; the message names
            the parameters.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        values: Mapping[str, Tensor],
        supports: Mapping[str, Any],
        data: Sequences,
    ) -> None:
        if isinstance(model, EnumeratedModel):
            model = MarginalModel(model.module, model.log_prior)  # the same density
        self.model, self.data = doubled(model), double_of(data)
        module: Any = getattr(model, "module", None)
        known = module.entry_names() if hasattr(module, "entry_names") else {}
        self.names: dict[str, list[str]] = {f"module.{name}": own for name, own in known.items()}
        points, spaces, nodes = points_of(self.model, self.data)
        spaces = {**spaces, **supports}
        unit = 1.0
        if data.values.dtype.is_floating_point:
            unit = float(data.values[data.observed].nan_to_num().std()) or 1.0
        self.unit = unit  # of coordinates that are real numbers
        self.coordinates = [
            Coordinates.of(name, value, spaces.get(name, constraints.real), unit)
            for name, value in {**points, **values}.items()
            if value.numel()
        ]
        shapes = {part.name: torch.Size([len(part.labels)]) for part in self.coordinates}
        self.packing = Packing({part.name: part.value for part in self.coordinates}, shapes)
        self.labels = [label for part in self.coordinates for label in part.labels]
        self.held = [label for part in self.coordinates for label in part.held]
        if self.held and not self.labels:
            raise ValueError("all parameters are at the boundary of their space, no errors exist: "
                             f"{_listed(self.held)}. A prior keeps them inside.")  # fmt: skip
        if not 0 < (count := len(self.labels)) <= MOST_PARAMETERS:
            raise ValueError(f"{count:,} free parameters; at most {MOST_PARAMETERS:,} are.")
        # inside a plate values have the dimension of a batch already
        names = {part.name for part in self.coordinates} & nodes.keys()
        self.plated = {name for name in names if in_plate(nodes[name])}
        self._compute()
        with torch.no_grad():
            hmm = self.run(torch.zeros(len(self.labels), dtype=torch.double))[1]
        self.hmm: HMM = detached(hmm)

    def values_at(self, u: Tensor) -> dict[str, Tensor]:
        """Parameters by name at coordinates ``(P,)``, or of B copies of the model, ``(B, P)``."""
        values = self.packing.values(u)
        return values if u.dim() == 1 else wide(values, self.plated)

    def run(self, u: Tensor, data: Sequences | None = None) -> tuple[Tensor, HMM]:
        """Log joint density at coordinates ``u`` ``(P,)``, and the HMM there."""
        joint, hmm = log_joint(self.model, self.data if data is None else data, self.values_at(u))
        return joint.likelihood + joint.prior, hmm

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Gradient ``(P,)`` and Hessian ``(P, P)`` of the log joint density at the estimate."""
        u = torch.zeros(len(self.labels), dtype=torch.double)
        score = torch.func.grad(lambda u: self.run(u)[0])
        slope, pull, *_ = torch.func.vjp(score, u)
        columns = torch.func.vmap(lambda v: pull(v)[0], chunk_size=CHUNK)
        return slope, columns(torch.eye(len(u), dtype=u.dtype))

    def _compute(self) -> None:
        slope, hessian = self.slopes()
        self.matrix = -(hessian + hessian.mT).detach() / 2
        lost = self._vanishing()
        self.held += [label for label, at in zip(self.labels, lost.tolist()) if at]
        self.matrix = self.matrix.masked_fill(lost | lost.unsqueeze(-1), 0.0)
        self.matrix[lost, lost] = 1.0
        self._check_rank()
        self.covariance = torch.linalg.inv(self.matrix) - self.flat @ self.flat.mT
        self.covariance[lost, lost], slope = 0.0, slope.detach().masked_fill(lost, 0.0)
        self.decrement = float(slope @ self.covariance @ slope) / 2
        if self.decrement > FAR:
            below = f"the fit ended {self.decrement:.2g} nats below the maximum near it"
            raise ValueError(f"{below}: fit on, with a smaller tolerance, and give its own data.")

    def _vanishing(self) -> Tensor:
        """Mask ``(P,)`` of coordinates on the boundary, along which the log joint is flat."""
        small: list[bool] = []
        sizes: list[float] = []
        for part in self.coordinates:
            values = dict(zip(names_of(part.name, part.estimate), part.estimate.flatten().tolist()))
            least = SMALL * max(values.values()) if part.scale is LOG else -math.inf
            small += [values.get(label, math.inf) < least for label in part.labels]
            sizes += [values.get(label, 0.0) / self.unit for label in part.labels]
        curvature, size = self.matrix.diagonal().abs(), torch.tensor(sizes, dtype=torch.double)
        real = self._real()
        self.least = LEAST / torch.where(real, size.square().clamp(min=1.0), 1.0)  # in any unit
        vanishing = torch.tensor(small) & (curvature < VANISHING)
        return vanishing | (real & (curvature < self.least))

    def _real(self) -> Tensor:
        """Mask ``(P,)`` of coordinates of real-valued entries, such as coefficients."""
        return torch.tensor([p.scale is IDENTITY for p in self.coordinates for _ in p.labels])

    def _listed(self, at: Tensor) -> str:
        """Names of the first six coordinates ``at``, as tables have them."""
        known: dict[str, str] = {}
        for part in self.coordinates:
            own = names_of(part.name, part.estimate)
            known |= zip(own, self.names.get(part.name, own))
        return _listed([known.get(self.labels[i], self.labels[i]) for i in at.tolist()])

    def _check_rank(self) -> None:
        """Raise unless the information is positive definite, naming the directions that are not.

        Of real numbers, such as coefficients that separate, they are kept apart in ``flat``.
        """
        missing = ~self.matrix.isfinite()
        if bool(missing.any()):
            own = missing.diagonal() if bool(missing.diagonal().any()) else missing.any(-1)
            raise ValueError(
                f"second derivatives are not finite along {self._listed(own.nonzero()[:, 0])}, as "
                "where components are missing (NaN): freeze these, or use fit_gibbs."
            )
        scale = self.matrix.diagonal().abs().maximum(self.least).sqrt()
        values, vectors = torch.linalg.eigh(self.matrix / scale / scale.unsqueeze(-1))
        flat = values < RANK * len(values)
        self.flat = vectors[:, flat] / scale.unsqueeze(-1)
        if not bool(flat.any()):
            return
        share = vectors[:, flat].square().sum(-1)
        order = share.argsort(descending=True)
        order = order[share[order] > 0.1]
        reason = "the log joint does not change along"
        if bool((values < -RANK * len(values)).any()):
            reason = "the estimate is no maximum along"
        elif bool(self._real()[share > ROUNDING].all()):
            self.held += [self.labels[i] for i in order.tolist()]
            curved = vectors[:, flat] * scale.unsqueeze(-1)
            self.matrix = self.matrix + curved @ curved.mT
            return
        raise ValueError(f"the observed information is not positive definite: {reason} "
                         f"{self._listed(order)}. Use fewer states, or a prior.")  # fmt: skip

    def _errors(self, slopes: Tensor) -> Tensor:
        """Standard errors ``(*)`` given gradients ``(*, P)``; NaN if these lie along ``flat``."""
        variance = torch.einsum("...p,pq,...q->...", slopes, self.covariance, slopes)
        along, size = (slopes @ self.flat).abs(), slopes.abs() @ self.flat.abs()
        moved = (along > ROUNDING * size).any(-1)
        return variance.clamp(min=0.0).sqrt().masked_fill(moved, torch.nan)

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Gradients ``(E, P)`` and standard errors of all entries of the parameters."""
        rows = []
        for part, own in zip(
            self.coordinates, torch.arange(len(self.labels)).split(self.packing.sizes)
        ):
            origin = torch.zeros(len(own), dtype=torch.double)
            slopes: Any = torch.autograd.functional.jacobian(part.value, origin)
            wide = torch.zeros(part.estimate.numel(), len(self.labels), dtype=torch.double)
            wide[:, own] = slopes.reshape(len(wide), len(own))
            rows.append(wide.masked_fill(self.covariance.diagonal() == 0, 0.0))
        every = torch.cat(rows)
        return every, self._errors(every).masked_fill((every == 0).all(-1), torch.nan)

    def std_errors(self) -> dict[str, Tensor]:
        """Standard errors of the parameters, by name; NaN for entries that are held."""
        errors = self._entries()[1].split([part.estimate.numel() for part in self.coordinates])
        parts = zip(self.coordinates, errors)
        return {part.name: error.reshape(part.estimate.shape) for part, error in parts}

    def natural(self) -> Covariance:
        """Covariance of all entries of the parameters, by the delta method; NaN for those held."""
        names = [name for p in self.coordinates for name in names_of(p.name, p.estimate)]
        rows, errors = self._entries()
        matrix, held = rows @ self.covariance @ rows.mT, errors.isnan()
        return Covariance(names, matrix.masked_fill(held | held.unsqueeze(-1), torch.nan))

    def of(
        self, function: Callable[[HMM], Tensor], data: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        """Value and standard error, by the delta method, of a function of the fitted HMM.

        Its slopes are central differences, over a thousandth of a standard error: the function may
        be any query, and need not be differentiable by autograd.

        Args:
            function: From an :class:`HMM` to a tensor.
            data: The HMM is built for these sequences, such as ones with other covariates; for the
                sequences that were fitted by default.

        Raises:
            ValueError: If the function does not change with any parameter.
        """
        data = None if data is None else double_of(data)

        def at(u: Tensor) -> Tensor:
            return function(self.run(u, data)[1])

        steps = STEP * self.matrix.diagonal().rsqrt()
        slopes = differences(partial(evaluated, at), steps).movedim(0, -1)
        slopes = slopes.masked_fill(self.covariance.diagonal() == 0, 0.0)
        if not bool((slopes != 0).any()):
            raise ValueError("of must be a function that changes with the parameters of the fit.")
        with torch.no_grad():
            value = at(torch.zeros(len(self.labels)).double())
        return torch.as_tensor(value), self._errors(slopes)

    def interval(self, part: Coordinates, error: Tensor, z: float) -> tuple[Tensor, Tensor]:
        """Lower and upper limits of a parameter."""
        return part.interval(error, z)

    def intervals(
        self, level: float = 0.95, of: Callable[[HMM], Tensor] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Lower and upper limits of the parameters by name, or of a function under ``"of"``.

        Intervals of probabilities are symmetric in the logit, those of positive numbers in the
        logarithm, all others in the number itself. Entries that are held have NaN.

        Args:
            level: Of confidence.
            of: From an :class:`HMM` to a tensor; None for the parameters.
        """
        z = normal_quantile(level)
        if of is None:
            errors = self.std_errors()
            return {p.name: self.interval(p, errors[p.name], z) for p in self.coordinates}
        value, error = self.of(of)
        return {"of": (value - z * error, value + z * error)}


def differences(function: Callable[[Tensor], Tensor], steps: Tensor) -> Tensor:
    """Derivatives ``(P, *)`` at zero by central differences over ``steps`` ``(P,)``.

    Args:
        function: From places ``(B, P)`` to values ``(B, *)``.
        steps: Of each coordinate.
    """
    places = torch.cat([steps.diag(), -steps.diag()])
    ahead, back = function(places).unflatten(0, (2, len(steps)))
    apart = torch.where(ahead == back, 0.0, ahead - back)
    return apart / (2 * steps).reshape(-1, *(1,) * (apart.dim() - 1))


def evaluated(function: Callable[[Tensor], Any], places: Tensor) -> Tensor:
    """Evaluate a function at several places, without gradients and with common random numbers."""
    values = []
    for place in places:
        with PYRO, torch.no_grad(), torch.random.fork_rng(devices=[]):
            values.append(torch.as_tensor(function(place)).double())
    return torch.stack(values)


def _listed(names: list[str]) -> str:
    """The first six names."""
    return ", ".join(names[:6]) + (" and others" if len(names) > 6 else "")


def normal_quantile(level: float) -> float:
    """Half the width, in standard errors, of a normal interval of ``level``."""
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}.")
    return math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.double)).item()


def points_of(model: Any, data: Sequences) -> tuple[dict[str, Tensor], dict[str, Any], Any]:
    """Values and supports of the parameters of ``model`` without a prior; sites of a trace."""
    with PYRO, poutine.block(), torch.no_grad():
        nodes = poutine.trace(model).get_trace(data).nodes
    params = {name: node for name, node in nodes.items() if node["type"] == "param"}
    plain = [name.replace("$$$", ".") for name in params if "$$$" in name]
    if plain:
        raise ValueError(
            f"{plain[0]} is one of a plain torch module: take PyroModule[torch.nn.Linear](...)."
        )
    values = {name: node["value"] for name, node in params.items()}
    spaces = {name: node["kwargs"].get("constraint") for name, node in params.items()}
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for path, part in parts:
        for name, (support, _) in getattr(part, "_pyro_params", {}).items():
            spaces[f"{path}.{name}"] = support
    return values, spaces, nodes


def doubled(model: Any) -> Any:
    """A copy of a module in double precision; functions as they are."""
    return copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model


def double_of(data: Sequences) -> Sequences:
    """The sequences in double precision."""
    return data._map(
        lambda x: x.double() if x.dtype.is_floating_point else x,
        data.lengths, data.total, data.indices,
    )  # fmt: skip
