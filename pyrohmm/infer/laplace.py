r"""``fit_laplace``: maximum marginal likelihood of models with random effects.

Random effects :math:`b_g` are latent variables in a plate of G members, such as one for each
subject. Given the other parameters they are independent, and

.. math::
    \log \int p(x, b \mid \theta) \, db \approx \log p(x, \hat b \mid \theta)
    + \tfrac{Gd}{2} \log 2\pi - \tfrac12 \sum_g \log |H_g|

with the most probable effects :math:`\hat b(\theta)`, found by Newton steps of all members at once,
and :math:`H_g` ``(d, d)``, minus the second derivatives of one member. All derivatives are exact;
that of :math:`\hat b` is by the implicit function (Kristensen et al., 2016, TMB: Automatic
Differentiation and Laplace Approximation).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to, constraints

from .._checks import check_size
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.base import PYRO
from ..ops.newton import Peak, climb
from .guides import Point
from .marginal import Marginal, Values
from .models import exclusive
from .objective import APART, check_copies, each_alone, latent_sites
from .plates import AtValues, in_plate, marks_of, sequence_plates
from .results import Fit
from .training import check_model_and_data
from .uncertainty import (
    FAR,
    LOG,
    VANISHING,
    Coordinates,
    Information,
    differences,
    double_of,
    points_of,
)

ROUNDS = 10  # of climbs, each with nodes where the last one ended
ZERO = 3.0  # of a logarithm, below which a number is of no account
SAME = 1e-3  # nats by which the log marginal may change there
UNSEEN = 1e-6  # nats by which it may as such a number is raised
STEP = 1e-4  # of central differences of the exact gradient


class Effect(NamedTuple):
    """Predicted random effects.

    Attributes:
        mode: ``(G, ...)``, the most probable values given the data and the estimates; of a single
            number of each sequence, which is integrated by quadrature, the posterior mean (of a
            positive one, that of its logarithm).
        std_error: ``(G, ...)``; it counts the uncertainty of the estimates.
    """

    mode: Tensor
    std_error: Tensor


class LaplaceInformation(Information):
    """Observed information of a marginal likelihood: see :class:`Information`.

    Its Hessian is that of central differences of the exact gradient.

    Args:
        marginal: Of one copy of the model, at the estimates.
        values: The estimates, without random effects.
        supports: Their supports, by name.
        effects: The most probable random effects.

    Attributes:
        drift: ``(P, G, d)``, derivatives of the most probable effects by the coordinates.
        blocks: ``(G, d, d)``, inverse covariances of the effects given the estimates.
    """

    def __init__(
        self,
        marginal: Marginal,
        values: Mapping[str, Tensor],
        supports: Mapping[str, Any],
        effects: Mapping[str, Tensor],
    ) -> None:
        self.marginal = marginal
        super().__init__(marginal.model, values, supports, marginal.data, effects)

    def run(
        self, u: Tensor, data: Sequences | None = None, away: Tensor | float = 0.0
    ) -> tuple[Tensor, HMM]:
        """Nothing, and the HMM at coordinates ``u`` and ``away`` from the most probable effects."""
        marginal = self.marginal
        effects = marginal.single(marginal.modes[0] + torch.tensordot(u, self.drift, 1) + away)
        with PYRO, poutine.block(), pyro.get_param_store().scope(), pyro.validation_enabled(False):
            with AtValues({**self.values_at(u), **effects}):
                return u.sum(), self.model(self.data if data is None else data)

    def of(
        self, function: Callable[[HMM], Tensor], data: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        """Value and standard error of a function of the HMM, that of the effects included."""
        value, error = super().of(function, data)
        data = None if data is None else double_of(data)
        here, b = torch.zeros(len(self.labels), dtype=torch.double), self.marginal.modes[0]
        scale = self.blocks.diagonal(dim1=-2, dim2=-1).rsqrt().flatten()
        slopes = differences(
            lambda away: function(self.run(here, data, away.reshape(b.shape))[1]), scale
        ).unflatten(-1, b.shape)
        own = torch.einsum("...gi,gij,...gj->...", slopes, torch.linalg.inv(self.blocks), slopes)
        return value, (error.square() + own).sqrt()

    def _vanishing(self) -> Tensor:
        """Also positive numbers alone, such as the spread of effects that there are none of."""
        alone = [
            p.scale is LOG and p.estimate.dim() == 0 for p in self.coordinates for _ in p.labels
        ]
        self.zero = torch.tensor(alone) & (self.matrix.diagonal().abs() < VANISHING)
        return super()._vanishing() | self.zero

    def interval(self, part: Coordinates, error: Tensor, z: float) -> tuple[Tensor, Tensor]:
        """As of :class:`Information`; of a spread of zero, from zero to a limit by its profile."""
        if part.name not in self.labels or not self.zero[self.labels.index(part.name)]:
            return super().interval(part, error, z)
        upper = self._upper(part, z)
        return torch.zeros_like(upper), upper

    def _upper(self, part: Coordinates, z: float) -> Tensor:
        """The value of a number at zero where twice its profile has fallen by the square of z."""
        own = self.labels.index(part.name)
        values, falls = torch.logspace(-6, 6, 37, dtype=torch.double), torch.empty(0)
        for _ in range(2):
            place = torch.zeros(len(values), len(self.labels), dtype=torch.double)
            place[:, own] = (values / part.estimate).log()
            top = self._profile(place, own)
            falls = (2 * (top[0] - top)).clamp(min=0.0).sqrt()
            above = (falls >= z).nonzero().flatten()
            if not len(above):
                return torch.tensor(torch.inf, dtype=torch.double)
            first = max(int(above[0]) - 1, 0)
            ends, low, high = values[[0, first, first + 1]], falls[first], falls[first + 1]
            values = torch.cat(
                [ends[:1], torch.lerp(ends[1], ends[2], torch.linspace(0, 1, 12).double())]
            )
        return torch.lerp(ends[1], ends[2], (z - low) / (high - low))

    def _profile(self, place: Tensor, own: int) -> Tensor:
        """The greatest log marginals ``(B,)`` where one coordinate stays as in ``place``."""
        marginal, rows = self.marginal, torch.arange(len(place))
        marginal.widen(len(place))
        marginal.settle(self.values_at(place), rows)

        def function(place: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                leaf = place.detach().clone().requires_grad_()
                value, slope, *_ = marginal(self.values_at(leaf), leaf, rows)
            slope[:, own] = 0.0
            return value, slope

        peak = climb(function, place).place
        marginal.settle(self.values_at(peak), rows)
        return function(peak, rows)[0]

    def sampled(self, u: Tensor) -> HMM:
        """The HMM at sampled coordinates, with sampled effects."""
        spread = torch.linalg.cholesky(torch.linalg.inv(self.blocks))
        away = spread @ torch.randn(*spread.shape[:-1], 1, dtype=torch.double)
        return self.run(u, None, away.squeeze(-1))[1]

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of the log marginal likelihood at the estimates."""
        size, marginal = len(self.labels), self.marginal
        step = STEP * torch.eye(size, dtype=torch.double)
        marginal.settle(self.values_at(step[:1] * 0), torch.zeros(1).long())
        gradients, modes = [], []
        for u in torch.cat([step, -step, step[:1] * 0]).split(marginal.room):
            marginal.widen(len(u))
            leaf = u.clone().requires_grad_()
            _, slope, b, blocks = marginal(self.values_at(leaf), leaf, torch.arange(len(u)))
            gradients.append(slope)
            modes.append(b)
        slope, b = torch.cat(gradients), torch.cat(modes)
        marginal.modes, self.blocks = b[-1:], blocks[-1]
        self.drift = (b[:size] - b[size:-1]) / (2 * STEP)
        return slope[-1], (slope[:size] - slope[size:-1]) / (2 * STEP)


@dataclass(repr=False)
class LaplaceFit(Fit):
    """A fit of :func:`fit_laplace`.

    ``parameters`` are the estimates, and the most probable random effects. Intervals are of the
    marginal likelihood; variances of random effects are parameters like others.

    Attributes:
        log_marginal: Log marginal likelihood at the estimates, in nats, with their log prior.
        random: Names of the random effects.
    """

    log_marginal: float = math.nan
    random: list[str] = field(default_factory=list)

    def information(self, data: Sequences) -> LaplaceInformation:
        """Observed information of the marginal likelihood: see :class:`Information`.

        Args:
            data: The sequences that were fitted.
        """
        with self.at_rest():
            marginal = Marginal(_doubled(self.model), double_of(data), self.random)
            effects = {name: self.parameters[name].double() for name in self.random}
            free = [
                marginal.to[name].inv(value).reshape(marginal.members, -1)
                for name, value in effects.items()
            ]
            marginal.modes = torch.cat(free, -1).unsqueeze(0)
            fixed = {name: v for name, v in self.parameters.items() if name not in self.random}
            return LaplaceInformation(marginal, fixed, self.supports, effects)

    def effects(self, data: Sequences) -> dict[str, Effect]:
        """Predictions of the random effects, by name.

        Args:
            data: The sequences that were fitted.
        """
        information = self.information(data)
        marginal, covariance = information.marginal, information.covariance
        drift, b = information.drift, marginal.modes
        spread = torch.einsum("pgi,pq,qgj->gij", drift, covariance, drift)
        spread = spread + torch.linalg.inv(information.blocks)
        found = {}
        for name, mode in marginal.effects(b[0]).items():

            def one(coordinates: Tensor, name: str = name) -> Tensor:
                return marginal.effects(coordinates)[name]

            slopes = torch.func.vmap(torch.func.jacrev(one))(b[0])
            slopes = slopes.reshape(len(b[0]), -1, b.size(-1))
            variance = torch.einsum("gei,gij,gej->ge", slopes, spread, slopes)
            shape = self.parameters[name].shape
            found[name] = Effect(mode.detach().reshape(shape), variance.sqrt().reshape(shape))
        return found

    def aic(self, data: Sequences) -> float:
        """Akaike's criterion of the marginal likelihood: random effects do not count, nor shrink.

        Args:
            data: The sequences that were fitted.
        """
        return -2 * self.log_marginal + 2 * len(self.information(data).labels)


def _doubled(model: Any) -> Any:
    return copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model


class _Starts:
    """Parameters without random effects, in unconstrained coordinates of R starts."""

    def __init__(
        self,
        model: Callable[..., Any],
        data: Sequences,
        random: Sequence[str],
        start: Mapping[str, Tensor],
        restarts: int,
    ) -> None:
        with pyro.get_param_store().scope():
            points, spaces = points_of(model, data)
        self.supports: dict[str, Any] = {n: spaces[n] or constraints.real for n in points}
        samples = []
        with poutine.block(), torch.no_grad(), pyro.get_param_store().scope():
            for _ in range(restarts):
                trace = poutine.trace(model).get_trace(data)
                found, _ = latent_sites(trace)
                self.supports |= {n: space for n, space in found.items() if n not in random}
                samples.append({n: trace.nodes[n]["value"] for n in found if n not in random})
        self.plated = {name for name in self.supports if in_plate(trace.nodes[name])}
        if unknown := sorted(set(start) - set(self.supports) - set(random)):
            known = ", ".join(self.supports) or "no parameters"
            raise ValueError(f"start has {unknown[0]!r}, which the model has not; it has {known}.")
        rows = [{**points, **sample, **start} for sample in samples]
        self.to = {name: biject_to(space) for name, space in self.supports.items()}
        free = {
            name: torch.stack([to.inv(row[name].detach().double()) for row in rows])
            for name, to in self.to.items()
        }
        self.shapes = {name: value.shape[1:] for name, value in free.items()}
        self.names = [n for n, shape in self.shapes.items() for _ in range(shape.numel())]
        self.place = torch.cat([value.reshape(restarts, -1) for value in free.values()], -1)

    def values(self, place: Tensor) -> Values:
        """Parameters ``(R, ...)`` by name."""
        pieces = place.split([shape.numel() for shape in self.shapes.values()], -1)
        parts = zip(self.to.items(), self.shapes.values(), pieces)
        return {name: to(x.reshape(x.shape[:-1] + shape)) for (name, to), shape, x in parts}

    def wide(self, place: Tensor) -> Values:
        """Parameters with a dimension of sequences, as copies of the model take them."""
        values = self.values(place)
        return {n: v if n in self.plated else v.unsqueeze(1) for n, v in values.items()}


@exclusive()
def fit_laplace(
    model: Callable[..., Any],
    data: Sequences,
    random: Sequence[str],
    *,
    start: Mapping[str, Tensor] | None = None,
    restarts: int = 1,
    num_steps: int = 300,
    tolerance: float = 1e-6,
) -> LaplaceFit:
    r"""Maximise :math:`\log \int p(x, b \mid \theta) \, db` over parameters, by Laplace's method.

    Random effects b are integrated out by a normal approximation around their most probable values,
    for each member of their plate, so that their variance can be estimated: at the maximum over
    effects *and* variance the variance is zero. Priors of other variables count, as in
    :func:`fit_map`.

    Args:
        model: A Pyro model whose random effects are in one plate, of sequences or of groups.
            Parameters must keep dimensions to their left, as for restarts of :func:`fit_map`.
        data: The sequences.
        random: Names of the random effects; or of the coefficients of a smooth function, one
            vector outside every plate.
        start: Initial values by name, such as ``fit.parameters`` of another fit; others are sampled
            from their priors, and effects start at zero in unconstrained coordinates.
        restarts: R starts, climbed as one batch; the best is kept.
        num_steps: Largest number of evaluations of the marginal likelihood.
        tolerance: End so far below the maximum, in nats.

    Returns:
        A fit whose ``intervals``, ``std_errors`` and ``information`` are those of the marginal
        likelihood, with ``effects(data)``, ``log_marginal`` and ``aic(data)``.

    Raises:
        ValueError: If ``random`` names what is not in a plate, or effects of its members depend on
            each other; or if no start has a marginal likelihood.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> values = torch.randn(30, 1) + torch.randn(30, 4)  # subjects and their observations
        >>> data = Sequences(values, torch.full((30,), 4))
        >>> def model(data):
        ...     mean = pyro.param("mean", torch.tensor(0.0))
        ...     spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
        ...     with pyro.plate("subjects", len(data)):
        ...         own = pyro.sample("own", Normal(0.0, spread))
        ...         zero = torch.zeros(1, dtype=own.dtype)
        ...         loc = (mean + own).unsqueeze(-1)
        ...         hmm = HMM(zero, zero.unsqueeze(0), Normal(loc, 1.0), data.lengths)
        ...         pyro.sample("x", hmm, obs=data.values)
        ...     return hmm
        >>> fit = fit_laplace(model, data, ["own"])
        >>> fit.parameters["spread"]
        tensor(0.9937)
    """
    begin = time.perf_counter()
    check_model_and_data(model, data)
    check_size("restarts", restarts)
    check_size("num_steps", num_steps)
    random = [random] if isinstance(random, str) else list(random)
    own, data = _doubled(model), double_of(data)
    marginal = Marginal(own, data, random)
    starts = _Starts(own, data, random, dict(start or {}), restarts)
    if not starts.place.size(-1):
        raise ValueError("model has no parameters but random effects: there is nothing to fit.")
    marginal.widen(restarts)
    places, b = starts.place[0] + APART, torch.zeros(3, *marginal.modes.shape[1:]).double()

    def joint(u: Tensor) -> Tensor:
        return marginal.joint(starts.wide(u), b[: len(u)], torch.zeros(len(u)).long())

    wide = {**starts.wide(places), **marginal.effects(b)}
    check_copies(lambda: each_alone(joint, places), wide)
    marginal.check_independent(starts.wide(starts.place))

    ascent = _climbed(marginal, starts, num_steps, tolerance)
    return _result(model, own, data, marginal, starts, ascent, begin)


def _climbed(
    marginal: Marginal, starts: _Starts, num_steps: int, tolerance: float
) -> tuple[Tensor, Peak]:
    """Log marginals of the starts, and the maxima near them."""
    function, every = partial(_evaluate, marginal, starts), torch.arange(len(starts.place))
    if marginal.widths is not None:
        marginal.settle(starts.wide(starts.place), every)
    first = function(starts.place, every)[0]
    peak = climb(function, starts.place, num_steps, tolerance)
    for _ in range(ROUNDS if marginal.widths is not None else 0):  # with nodes where they should be
        marginal.settle(starts.wide(peak.place), every)
        before, peak = peak, climb(function, peak.place, num_steps, tolerance)
        if bool(((peak.value - before.value).abs() < tolerance).all()):
            break
    return first, peak


def _evaluate(
    marginal: Marginal, starts: _Starts, place: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Log marginals of some starts, and their slopes."""
    found = []
    for some, chosen in zip(place.split(marginal.room), rows.split(marginal.room)):
        with torch.enable_grad():
            leaf = some.detach().clone().requires_grad_()
            found.append(marginal(starts.wide(leaf), leaf, chosen)[:2])
    values, slopes = zip(*found)
    return torch.cat(values), torch.cat(slopes)


def _result(
    model: Callable[..., Any],
    own: Callable[..., Any],
    data: Sequences,
    marginal: Marginal,
    starts: _Starts,
    ascent: tuple[Tensor, Peak],
    begin: float,
) -> LaplaceFit:
    """The best of all starts as a fit."""
    (first, peak), random = ascent, list(marginal.random)
    scores = peak.value.nan_to_num(-torch.inf, neginf=-torch.inf)
    best = int(scores.argmax())
    if not bool(scores[best].isfinite()):
        raise ValueError("no start has a marginal likelihood: give start=, near what is expected.")
    row = torch.tensor([best])
    place, notes = _raised(marginal, starts, peak.place[row], row)
    values = {name: value[0] for name, value in starts.values(place).items()}
    modes = marginal.settle(starts.wide(place), row)
    if not marginal.resolved:
        raise ValueError(
            f"the posterior of {random[0]!r} is too wide, or has modes too narrow, for the nodes "
            "that integrate it. Scale it by its spread, or sample with fit_mcmc."
        )
    values |= marginal.single(modes[0])
    values = {name: v.detach().to(torch.get_default_dtype()) for name, v in values.items()}
    with poutine.block(), pyro.get_param_store().scope():
        plates = sequence_plates(own, data)
    converged = bool(peak.converged[best])
    reason = (
        f"the estimated gap to the maximum is {peak.gap[best]:.1g} nats"
        if converged
        else "it took all steps"
    )
    if not converged and peak.gap[best] > FAR:
        reason += f", and ended {peak.gap[best]:.2g} nats below the maximum"
    supports = {**starts.supports, **{n: s["fn"].support for n, s in marginal.random.items()}}
    return LaplaceFit(
        model, Point(values), -torch.stack([first[best], scores[best]]), converged, reason,
        time.perf_counter() - begin, data.num_observed, list(values), method="Laplace", window=1,
        supports=supports, parameters=values, plates=plates,
        fitted=marks_of(data) if plates else None, log_marginal=float(scores[best]),
        random=random, notes=notes,
    )  # fmt: skip


def _raised(
    marginal: Marginal, starts: _Starts, place: Tensor, row: Tensor
) -> tuple[Tensor, list[str]]:
    """The place ``(1, P)`` with numbers that are zero as large as the log marginal allows.

    Much smaller ones are lost in the rounding of the effects. Also notes that name these numbers.
    """

    def value(place: Tensor) -> float:
        marginal.settle(starts.wide(place), row)
        return float(_evaluate(marginal, starts, place, row)[0])

    names, top, notes = starts.names, value(place), []
    for name, step in zip(names, ZERO * torch.eye(len(names), dtype=place.dtype)):
        alone = starts.supports[name] is constraints.positive and not starts.shapes[name]
        if alone and abs(value(place - step) - top) < SAME:
            notes.append(f"{name} is zero: there is no such effect in the data, or too few members "
                         "to see it")  # fmt: skip
            while abs(value(place + step) - top) < UNSEEN and place @ step < 0:
                place = place + step
    return place, notes
