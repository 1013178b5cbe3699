"""Standard errors and intervals of a fit, from the curvature of its log joint density."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import hardshrink
from tqdm import tqdm

from .._checks import check_share
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.base import PYRO
from .coordinates import IDENTITY, LOG, POINT, Coordinates, Packing, names_of
from .models import EnumeratedModel, MarginalModel, to_model_device
from .objective import APART, check_copies, log_joint, num_copies
from .plates import hmm_at, in_plate, pieces_of, wide

FAR = 0.1  # nats below the maximum, some half of a standard error away from it
CELLS = 1 << 22  # copies x sequences x steps x states of one pass
FEWEST = 16  # copies that are faster as one batch than one by one
SMALL = 1e-3  # share of the largest rate, below which one is at the boundary that counts
VANISHING = 0.01  # nats or less where it is zero: transitions that are expected, or observations
LEAST = 1e-6  # nats for a change by a factor of e: such a parameter is not determined
RANK = 1e-9  # eigenvalues of the scaled information below this are directions without curvature
ROUNDING = 1e-6  # share of a slope along a flat direction that is rounding
STEP = 1e-3  # of central differences, in standard errors given the other coordinates
EPS = torch.finfo(torch.double).eps
REACH = EPS**0.2  # of differences of gradients, in scales of the coordinates
ALIKE = 1e-5  # of curvatures: by how much those of one step and of two may differ
PROBES = 1e-11, 1e-6, 0.1  # of a real number, in units of the data, by which its scale is found
ROUNDS = 6  # of finding the others
MOST_PARAMETERS = 3_000  # the Hessian has as many columns, each a gradient of the gradient


class Covariance(NamedTuple):
    """Covariance of estimates.

    Attributes:
        names: Of the E entries, such as "module.transition[0, 1]".
        matrix: ``(E, E)``.
    """

    names: list[str]
    matrix: Tensor


class NoMaximum(ValueError):
    """The estimate is no maximum of the log joint, or not the only one near it."""


class Information:
    r"""Observed information of a fit: minus the Hessian of its log joint density at the estimate.

    The log joint density is that of the data and of the priors, if the model has some, so that
    intervals are those of maximum likelihood, or of a normal approximation to the posterior. The
    Hessian is made of differences of exact gradients, in double precision and right to some eight
    digits, in coordinates in which the estimate is not on a boundary; the delta method maps it to
    any function of the fitted HMM.

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
        self.model, self.data = doubled(model), to_model_device(model, None, data).to(torch.float64)
        self.names = entry_names(model)
        self.pieces = pieces_of(self.model, self.data)
        self.probe = self.pieces[0][0]
        points, spaces, nodes = points_of(self.model, self.probe)
        spaces = {**spaces, **supports}
        unit = 1.0
        if (seen := data.known_values).dtype.is_floating_point:
            unit = float(seen.nan_to_num().std()) or 1.0
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
            text = f"standard errors need 1 to {MOST_PARAMETERS:,} free parameters; got {count:,}"
            raise ValueError(f"{text}. Freeze some, or take fit.bootstrap(data).")
        self.entries = {label: (part, i) for part in self.coordinates
                        for i, label in enumerate(names_of(part.name, part.estimate))}  # fmt: skip
        found = [self.entries.get(label) for label in self.labels]
        each = [math.nan if at is None else at[0].estimate.flatten()[at[1]].item() for at in found]
        sizes = torch.tensor(each, dtype=torch.double)
        owners = [part for part in self.coordinates for _ in part.labels]
        largest = [float(p.estimate.max()) if p.scale is LOG else -math.inf for p in owners]
        self.small = sizes < SMALL * torch.tensor(largest).double()
        self.real = torch.tensor([part.scale is IDENTITY for part in owners])  # coefficients
        units = (sizes / unit).nan_to_num(0.0).square().clamp(min=1.0)
        self.least = LEAST / torch.where(self.real, units, 1.0)
        # inside a plate values have the dimension of a batch already
        names = {part.name for part in self.coordinates} & nodes.keys()
        self.plated = {name for name in names if in_plate(nodes[name])}
        self.num_states, self.copied = nodes["_RETURN"]["value"].num_states, True
        self._compute()

    @cached_property
    def hmm(self) -> HMM:
        """The HMM at the estimates."""
        return self.at(torch.zeros(len(self.labels), dtype=torch.double))

    def values_at(self, u: Tensor) -> dict[str, Tensor]:
        """Parameters by name at coordinates ``(P,)``, or of B copies of the model, ``(B, P)``."""
        values = self.packing.values(u)
        return values if u.dim() == 1 else wide(values, self.plated)

    def run(
        self, u: Tensor, data: Sequences | None = None, weights: Tensor | None = None
    ) -> tuple[Tensor, HMM]:
        """Log joint densities at coordinates ``(P,)``, or of copies ``(B, P)``, and the HMM."""
        data, copies = self.data if data is None else data, None if u.dim() == 1 else len(u)
        joint, hmm = log_joint(self.model, data, self.values_at(u), copies, weights)
        return joint.likelihood + joint.prior, hmm

    def room(self, *parts: Sequences) -> int:
        """Number of model copies, on all of the parts, evaluated in one batch."""
        steps = sum(len(part) * part.num_steps for part in parts)
        return max(1, CELLS // (steps * self.num_states))

    def at(self, u: Tensor, data: Sequences | None = None) -> HMM:
        """The HMM at coordinates ``u`` ``(P,)``."""
        return self.built(self.values_at(u), data)

    def built(self, values: Mapping[str, Tensor], data: Sequences | None) -> HMM:
        """Build the HMM at parameter values, for ``data``, by default the fitted sequences.

        Of those that are too ragged to be padded it is that of the first bucket.
        """
        data = data or (self.probe if self.data.is_ragged else self.data)
        with PYRO, pyro.get_param_store().scope(), pyro.validation_enabled(False):
            return hmm_at(self.model, values, data, {})

    def check_copies(self) -> None:
        """Raise unless copies of the model have the density of one."""
        here = self.values_at(torch.zeros(len(self.labels)).double()).values()
        steps = torch.arange(num_copies(self.probe, self.num_states, here)).double()
        u = (APART * steps).unsqueeze(1).expand(-1, len(self.labels))

        def pair() -> tuple[Tensor, Tensor]:
            alone = torch.stack([self.run(each, self.probe)[0] for each in u])
            return alone, self.run(u, self.probe)[0]

        check_copies(pair, self.values_at(u), self.probe.num_observed)

    def gradients(self, places: Tensor) -> Tensor:
        """Gradients of the log joint density at coordinates ``(B, P)``, by batches of copies."""
        total = torch.zeros_like(places)
        for part, weight in self.pieces:
            room = self.room(part) if self.copied else 1
            alone = room < FEWEST
            of = lambda u, _: self.run(u[0], part)[0][None] if alone else self.run(u, part)[0]  # noqa: B023, E731
            total += weight * graded(of, places, 1 if alone else room)[1]
        return total

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Gradient ``(P,)`` and Hessian ``(P, P)`` of the log joint density at the estimate."""
        try:
            if self.room(self.probe) >= FEWEST:
                self.check_copies()
        except (TypeError, ValueError):
            self.copied = False
        here = torch.zeros(1, len(self.labels), dtype=torch.double)
        return self.gradients(here)[0], self.derivatives(self.gradients)

    def derivatives(self, gradients: Callable[[Tensor], Tensor]) -> Tensor:
        r"""Derivatives ``(P, *)`` of gradients, by central differences of the fourth order.

        A step is :math:`\epsilon^{1/5}` of the scale of a coordinate. That is one, and of real
        numbers a tenth of what one observation says; it is shortened where curvatures over one step
        and over two differ by more than rounding.

        Args:
            gradients: From places ``(B, P)`` to ``(B, *)``, of which the first P are gradients.
        """
        count, every = self.data.num_observed, torch.eye(len(self.labels), dtype=torch.double)

        def along(todo: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            """Differences over steps along some coordinates, and the curvatures among them."""
            place = step.unsqueeze(1) * every[todo]
            ahead, back = gradients(torch.cat([place, -place])).chunk(2)
            found = (ahead - back) / (2 * step.unsqueeze(1))
            return found, found.gather(1, todo.unsqueeze(1))[:, 0]

        scale, todo = every.new_ones(len(every)), self.real.nonzero()[:, 0]
        for probe in PROBES:
            if len(todo):
                bend = along(todo, probe * scale[todo])[1].abs()
                curved = bend > self.least[todo]
                scale[todo] = torch.where(curved, (count / bend).sqrt() / 10, 1.0)
                todo = todo[~curved]
        todo, rows = torch.arange(len(every)), torch.zeros(0)
        for _ in range(ROUNDS):
            step = REACH * scale[todo]
            (near, bend), (far, other) = along(todo, step), along(todo, 2 * step)
            found = (4 * near - far) / 3
            rows = rows.index_copy(0, todo, found) if len(rows) else found
            apart = (bend - other).abs() / (ALIKE * bend.abs() + 4 * EPS * count / step)
            apart = apart.nan_to_num(torch.inf)
            scale[todo] *= torch.where(apart > 1, (0.01 / apart).sqrt().clamp(min=1e-4), 1.0)
            todo = todo[apart > 1]
            if not len(todo):
                break
        return rows

    def _compute(self) -> None:
        slope, hessian = self.slopes()
        self.matrix = -(hessian + hessian.mT) / 2
        lost = self._vanishing()
        self.held += [label for label, at in zip(self.labels, lost.tolist()) if at]
        self.matrix = self.matrix.masked_fill(lost | lost.unsqueeze(-1), 0.0)
        self.matrix[lost, lost] = 1.0
        self._check_rank()
        self.covariance = torch.linalg.inv(self.matrix) - self.flat @ self.flat.mT
        self.covariance[lost, lost], slope = 0.0, slope.masked_fill(lost, 0.0)
        self.decrement = float(slope @ self.covariance @ slope) / 2
        if self.decrement > FAR:
            below = f"the fit ended {self.decrement:.2g} nats below the maximum near it"
            cure = "a smaller tolerance or module.double(), and give its own data"
            raise NoMaximum(f"{below}: fit on, with {cure}.")

    def _vanishing(self) -> Tensor:
        """Mask ``(P,)`` of coordinates on the boundary, along which the log joint is flat."""
        curvature = self.matrix.diagonal().abs()
        vanishing = self.small & (curvature < VANISHING)
        return vanishing | (self.real & (curvature < self.least))

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
        missing = ~self.matrix.isfinite().all(-1)
        if bool(missing.any()):
            along = self._listed(missing.nonzero()[:, 0])
            raise ValueError(
                f"fit must have a finite gradient; it is infinite or NaN along {along}. Give those "
                "a prior that keeps them off their boundary, or take fit.bootstrap(data)."
            )
        scale = self.matrix.diagonal().abs().maximum(self.least).sqrt()
        values, vectors = torch.linalg.eigh(self.matrix / scale / scale.unsqueeze(-1))
        vectors = hardshrink(vectors, ROUNDING)
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
        elif bool(self.real[share > ROUNDING].all()):
            self.held += [self.labels[i] for i in order.tolist()]
            curved = vectors[:, flat] * scale.unsqueeze(-1)
            self.matrix = self.matrix + curved @ curved.mT
            return
        raise NoMaximum(f"the observed information is not positive definite: {reason} "
                        f"{self._listed(order)}. Use fewer states, or a prior.")  # fmt: skip

    def _errors(self, slopes: Tensor) -> Tensor:
        """Standard errors ``(*)`` given gradients ``(*, P)``; NaN if these lie along ``flat``."""
        variance = torch.einsum("...p,pq,...q->...", slopes, self.covariance, slopes)
        along, size = (slopes @ self.flat).abs(), slopes.abs() @ self.flat.abs()
        moved = (along > ROUNDING * size).any(-1)
        return variance.clamp(min=0.0).sqrt().masked_fill(moved, torch.nan)

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Gradients ``(E, P)`` and standard errors of all entries of the parameters."""
        rows, places = [], torch.arange(len(self.labels)).split(self.packing.sizes)
        for part, own in zip(self.coordinates, places):
            origin = torch.zeros(len(own), dtype=torch.double)
            slopes: Any = torch.autograd.functional.jacobian(part.value, origin)
            wide = torch.zeros(part.estimate.numel(), len(self.labels), dtype=torch.double)
            wide[:, own] = slopes.reshape(len(wide), len(own))
            rows.append(wide.masked_fill(self.covariance.diagonal() == 0, 0.0))
        every = torch.cat(rows)
        return every, self._errors(every).masked_fill((every == 0).all(-1), torch.nan)

    def std_errors(self) -> dict[str, Tensor]:
        """Standard errors of the parameters, by name; NaN for entries that are held."""
        sizes = [part.estimate.numel() for part in self.coordinates]
        errors = self._entries()[1].to(self.data.device).split(sizes)
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
        data = data and to_model_device(self.model, None, data).to(torch.float64)

        def at(u: Tensor) -> Tensor:
            return function(self.at(u, data))

        slopes = differences(at, STEP * self.matrix.diagonal().rsqrt()).movedim(0, -1)
        slopes = slopes.masked_fill(self.covariance.diagonal() == 0, 0.0)
        if not bool((slopes != 0).any()):
            text = "of must depend on the fitted parameters; its derivative is zero"
            raise ValueError(f"{text}. Compute it from the HMM that it is given.")
        with torch.no_grad():
            value = torch.as_tensor(at(torch.zeros(len(self.labels)).double()))
        return value, self._errors(slopes).to(value)

    def interval(self, part: Coordinates, error: Tensor, z: float) -> tuple[Tensor, Tensor]:
        """Confidence limits of a parameter, ``z`` standard errors ``error`` away."""
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


def graded(
    score: Callable[[Tensor, Tensor], Tensor], places: Tensor, room: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Values ``(B,)``, gradients ``(B, P)`` of a batched function, in batches of ``room`` points.

    Args:
        score: The function.
        places: ``(B, P)``.
        room: How many of them make a batch.
        rows: ``(B,)``, their numbers; 0, 1, ... by default.
    """
    rows = torch.arange(len(places)) if rows is None else rows
    values, slopes = [], []
    for some, chosen in shown([*zip(places.split(room), rows.split(room))]):
        with torch.enable_grad():
            leaf = some.detach().requires_grad_()
            value = score(leaf, chosen)
            slopes += torch.autograd.grad(value.sum(), leaf)
        values.append(value.detach().to(places))
    return torch.cat(values), torch.cat(slopes)


def differences(function: Callable[[Tensor], Any], steps: Tensor) -> Tensor:
    """Derivatives ``(P, *)`` at zero by central differences over ``steps`` ``(P,)``.

    Args:
        function: Of a place ``(P,)``; called without gradients and with common random numbers.
        steps: Of each coordinate.
    """

    def at(place: Tensor) -> Tensor:
        with PYRO, torch.no_grad(), torch.random.fork_rng(devices=[]):
            return torch.as_tensor(function(place)).double().cpu()

    ends = [at(place) for place in shown(torch.cat([steps.diag(), -steps.diag()]))]
    ahead, back = torch.stack(ends).unflatten(0, (2, -1))
    apart = torch.where(ahead == back, 0.0, ahead - back)
    return apart / (2 * steps).reshape(-1, *(1,) * (apart.dim() - 1))


def shown(items: Any) -> Any:
    """Iterate with a progress bar, shown on a terminal after two seconds."""
    return tqdm(items, leave=False, disable=None, delay=2)


def _listed(names: list[str]) -> str:
    """List of names as text, cut after six."""
    return ", ".join(names[:6]) + (" and others" if len(names) > 6 else "")


def normal_quantile(level: float) -> float:
    """Half the width, in standard errors, of a normal interval of ``level``."""
    check_share("level", level)
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


def entry_names(model: Any) -> dict[str, list[str]]:
    """Names of the entries of parameters, by parameter, where the module of a model has some."""
    module: Any = getattr(model, "module", None)
    known = module.entry_names() if hasattr(module, "entry_names") else {}
    return {f"module.{name}": own for name, own in known.items()}


def doubled(model: Any) -> Any:
    """A copy of a module in double precision, of PyroParams alone; functions as they are."""
    if not isinstance(model, torch.nn.Module):
        return model
    model = copy.deepcopy(model).double()
    for part in model.modules():
        for name, value in list(part._parameters.items()) if isinstance(part, PyroModule) else ():
            if not (value is None or name.endswith(POINT)):  # a plain one, which takes no values
                setattr(part, name, PyroParam(value.detach()))
    return model
