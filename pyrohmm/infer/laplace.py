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

``fit_smooth`` finds the weights of smooth terms by the generalised Fellner-Schall method.
The coefficients b of a term, d of them, are independent normal with a standard deviation
:math:`\sigma`. The marginal likelihood of :math:`\sigma`, all coefficients integrated out by
Laplace's method, has its maximum where

.. math:: \sigma^2 = |b|^2 / e, \quad e = d - \operatorname{tr} V / \sigma^2

with b the most probable coefficients and V their covariance, of the exact observed information of
the HMM; e are the effective degrees of freedom (Wood and Fasiolo, 2017, Biometrics 73; the change
of the curvature with b is left out there, as here).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to, constraints

from .._checks import check_size, names_checked
from .._choices import first_values
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.regression import Linear
from ..ops.newton import Peak, climb
from .coordinates import LOG, Coordinates, Packing
from .marginal import Marginal
from .models import exclusive, to_model_device, unweighted
from .objective import APART, check_copies, latent_sites, num_copies
from .parameters import Values
from .plates import Point, in_plate, marks_of, sequence_plates, wide
from .replicates import crossing
from .results import Fit
from .training import check_model_and_data
from .uncertainty import FAR, VANISHING, Information, differences, points_of

ROUNDS = 10  # of climbs, each with nodes where the last one ended
ZERO = 3.0  # of a logarithm, below which a number is of no account
SAME = 1e-3  # nats by which the log marginal may change there
UNSEEN = 1e-6  # nats by which it may as such a number is raised
FITS = 50  # of a model with smooth terms, each with new weights
SETTLED = 0.01  # degrees of freedom by which the last of them may change a term
LONGER = 1.5  # power of the change of a spread; the method is cautious, by a half or more
LEAST = 1e-4  # spread of a curve that is not there


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
    """Observed information of the Laplace or quadrature marginal likelihood.

    Args:
        marginal: Of one copy of the model, at the estimates.
        values: The estimates, without random effects.
        supports: Their supports, by name.

    Attributes:
        drift: ``(P, G, d)``, derivatives of the most probable effects by the coordinates.
        blocks: ``(G, d, d)``, inverse covariances of the effects given the estimates.
    """

    def __init__(
        self, marginal: Marginal, values: Mapping[str, Tensor], supports: Mapping[str, Any]
    ) -> None:
        self.marginal = marginal
        super().__init__(marginal.model, values, supports, marginal.data)

    def at(self, u: Tensor, data: Sequences | None = None, away: Tensor | float = 0.0) -> HMM:
        """The HMM at coordinates ``u`` ``(P,)``, with effects ``away`` from their modes."""
        b = self.marginal.modes[0] + torch.tensordot(u, self.drift, 1) + away
        return self.built({**self.values_at(u), **self.marginal.single(b)}, data)

    def of(
        self, function: Callable[[HMM], Tensor], data: Sequences | None = None
    ) -> tuple[Tensor, Tensor]:
        """Value and standard error of a function of the HMM; random effects add to the error."""
        value, error = super().of(function, data)
        data = data and to_model_device(self.model, None, data).to(torch.float64)
        here, b = torch.zeros(len(self.labels), dtype=torch.double), self.marginal.modes[0]
        scale = self.blocks.diagonal(dim1=-2, dim2=-1).rsqrt().flatten()

        def at(away: Tensor) -> Tensor:
            return function(self.at(here, data, away.reshape(b.shape)))

        slopes = differences(at, 1e-3 * scale)
        slopes = slopes.movedim(0, -1).unflatten(-1, b.shape)
        own = torch.einsum("...gi,gij,...gj->...", slopes, torch.linalg.inv(self.blocks), slopes)
        return value, (error.square() + own.to(error.device)).sqrt()

    def _vanishing(self) -> Tensor:
        """Mask of coordinates on the boundary, scalar standard deviations at zero included."""
        numbers = [p.name for p in self.coordinates if p.scale is LOG and p.estimate.dim() == 0]
        alone = torch.tensor([label in numbers for label in self.labels])
        self.zero = alone & (self.matrix.diagonal().abs() < VANISHING)
        return super()._vanishing() | self.zero

    def interval(self, part: Coordinates, error: Tensor, z: float) -> tuple[Tensor, Tensor]:
        """Confidence interval; for a standard deviation at zero, by profile likelihood."""
        if part.name not in self.labels or not self.zero[self.labels.index(part.name)]:
            return super().interval(part, error, z)
        own, marginal = self.labels.index(part.name), self.marginal

        def function(place: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, slope, *_ = marginal.at(self.values_at, place, rows)
            slope[:, own] = 0.0
            return value, slope

        def profile(values: Tensor) -> tuple[Tensor, Tensor]:
            """Profile log marginal likelihood at values of the parameter."""
            rows = torch.arange(len(values))
            place = torch.zeros(len(values), len(self.labels)).double()
            place[:, own] = (values / part.estimate.item()).log()
            marginal.widen(len(values))
            marginal.settle(self.values_at(place), rows)
            peak = climb(function, place).place
            marginal.settle(self.values_at(peak), rows)
            return values, function(peak, rows)[0]

        upper = crossing(profile, torch.logspace(-6, 6, 37, dtype=torch.double), z)
        return torch.zeros_like(upper), upper

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of the log marginal likelihood at the estimates."""
        size, marginal = len(self.labels), self.marginal
        here = torch.zeros(1, size, dtype=torch.double)
        marginal.settle(self.values_at(here), torch.zeros(1).long())
        rows = self.derivatives(self._ends)
        (end,) = self._ends(here)
        marginal.modes = end[size:].reshape(1, marginal.members, -1)
        self.drift = rows[:, size:].unflatten(-1, marginal.modes.shape[1:])
        return end[:size], rows[:, :size]

    def _ends(self, places: Tensor) -> Tensor:
        """Gradient of the log marginal and centres of the effects, joined: ``(B, P + G d)``."""
        self.marginal.widen(len(places))
        rows = torch.arange(len(places))
        _, slopes, centres, blocks = self.marginal.at(self.values_at, places, rows)
        self.blocks = blocks[-1]
        return torch.cat([slopes, centres.flatten(1)], -1)


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
        """Observed information of the marginal likelihood at the estimates.

        Args:
            data: The sequences that were fitted.
        """
        with self.at_rest():
            marginal = Marginal(self.model, data, self.random)
            fixed = {name: value.double() for name, value in self.parameters.items()}
            effects = {name: fixed.pop(name) for name in self.random}
            plated = self.random if marginal.plated else ()
            marginal.modes = marginal.packing.flat(wide(effects, plated, 0)).unsqueeze(0).cpu()
            return LaplaceInformation(marginal, fixed, self.supports)

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
        found, slopes = {}, torch.func.vmap(torch.func.jacrev(marginal.packing.values))(b[0])
        for name, mode in marginal.packing.values(b[0]).items():
            own = slopes[name].reshape(len(b[0]), -1, b.size(-1))
            variance = torch.einsum("gei,gij,gej->ge", own, spread, own)
            like, parts = self.parameters[name], (mode.detach(), variance.sqrt())
            found[name] = Effect(*(part.reshape(like.shape).to(like.device) for part in parts))
        return found

    def aic(self, data: Sequences) -> float:
        """Akaike information criterion of the marginal likelihood, not counting random effects.

        Args:
            data: The sequences that were fitted.
        """
        return -2 * self.log_marginal + 2 * len(self.information(data).labels)


class _Search:
    """Search over all but the random effects: R starts in unconstrained coordinates."""

    def __init__(self, marginal: Marginal, start: Mapping[str, Tensor], restarts: int) -> None:
        self.marginal = marginal
        model, data, random = marginal.model, marginal.data, marginal.random
        scope = pyro.get_param_store().scope()
        with poutine.block(), torch.no_grad(), scope, first_values(data.device):
            points, spaces, nodes = points_of(model, data)
            traces = [poutine.trace(model).get_trace(data) for _ in range(restarts)]
        latent = {n: space for n, space in latent_sites(traces[0])[0].items() if n not in random}
        self.supports: dict[str, Any] = {n: spaces[n] or constraints.real for n in points} | latent
        self.plated = {name for name in self.supports if in_plate(nodes[name])}
        if unknown := sorted(set(start) - set(self.supports) - set(random)):
            known = ", ".join(self.supports) or "no parameters"
            raise ValueError(
                f"start has {unknown[0]!r}, which the model has not; it has {known}. Leave it out."
            )
        samples = [{name: trace.nodes[name]["value"] for name in latent} for trace in traces]
        rows = [{**points, **sample, **start} for sample in samples]
        to: Any = {name: biject_to(space) for name, space in self.supports.items()}
        values = {n: torch.stack([row[n].detach().double() for row in rows]).cpu() for n in to}
        self.packing = Packing.of(to, values)
        self.names = [n for n, shape in self.packing.shapes.items() for _ in range(shape.numel())]
        self.place = self.packing.flat(values)
        if not self.names:
            text = "model has no parameters but random effects: there is nothing to fit"
            raise ValueError(f"{text}. Free some, or give them priors.")

    def wide(self, place: Tensor) -> Values:
        """Parameters broadcast over sequences, as copies of the model take them."""
        return wide(self.packing.values(place), self.plated)

    def __call__(self, place: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log marginals ``(B',)`` of the copies ``rows``, and their gradients."""
        value, slope, *_ = self.marginal.at(self.wide, place, rows)
        return value, slope

    def check(self) -> None:
        """Raise unless copies of the model have the density of one, and effects are independent."""
        marginal = self.marginal
        marginal.widen(len(self.place))
        known = self.packing.values(self.place[0]) | marginal.packing.values(marginal.modes)
        copies = num_copies(marginal.data, marginal.num_states, known.values())
        places = self.place[0] + APART * torch.arange(copies).double().unsqueeze(1)
        b = torch.zeros(copies, *marginal.modes.shape[1:]).double()

        def joint(u: Tensor) -> Tensor:
            return marginal.joint(self.wide(u), b[: len(u)])

        def pair() -> tuple[Tensor, Tensor]:
            return torch.cat([joint(place.unsqueeze(0)) for place in places]), joint(places)

        values = self.wide(places) | marginal.packing.values(b)
        check_copies(pair, values, marginal.data.num_observed)
        marginal.check_independent(self.wide(self.place))

    def climb(self, num_steps: int, tolerance: float) -> tuple[Tensor, Peak]:
        """Maximise the log marginal from each start; also its values at the starts."""
        marginal, every = self.marginal, torch.arange(len(self.place))
        by_nodes = marginal.widths is not None
        if by_nodes:
            marginal.settle(self.wide(self.place), every)
        first = self(self.place, every)[0]
        peak = climb(self, self.place, num_steps, tolerance)
        for _ in range(ROUNDS if by_nodes else 0):  # with nodes where they should be
            marginal.settle(self.wide(peak.place), every)
            before, peak = peak, climb(self, peak.place, num_steps, tolerance)
            if bool(((peak.value - before.value).abs() < tolerance).all()):
                break
        return first, peak

    def raised(self, place: Tensor, row: Tensor) -> tuple[Tensor, list[str]]:
        """Increase vanishing standard deviations while the log marginal hardly changes; ``(1, P)``.

        Much smaller ones are lost in the rounding of the effects. Also notes that name them.
        """

        def value(place: Tensor) -> float:
            self.marginal.settle(self.wide(place), row)
            return float(self(place, row)[0])

        top, notes = value(place), []
        for name, step in zip(self.names, ZERO * torch.eye(place.size(1), dtype=place.dtype)):
            alone = self.supports[name] is constraints.positive and not self.packing.shapes[name]
            if alone and abs(value(place - step) - top) < SAME:
                notes.append(f"{name} is zero: no such effect, or too few members to see it")
                while abs(value(place + step) - top) < UNSEEN and place @ step < 0:
                    place = place + step
        return place, notes


@names_checked
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
    marginal = Marginal(model, data, random)
    search = _Search(marginal, dict(start or {}), restarts)
    search.check()
    first, peak = search.climb(num_steps, tolerance)
    best = int(peak.value.nan_to_num(-torch.inf, neginf=-torch.inf).argmax())
    if not bool(peak.value[best].isfinite()):
        raise ValueError("no start has a marginal likelihood: give start=, near what is expected.")
    return _result(model, search, first[best], Peak(*(part[[best]] for part in peak)), begin, best)


def _result(
    model: Any, search: _Search, first: Tensor, peak: Peak, begin: float, best: int
) -> LaplaceFit:
    """The fit of the best start."""
    marginal, row, random = search.marginal, torch.tensor([best]), list(search.marginal.random)
    place, notes = search.raised(peak.place, row)
    modes = marginal.settle(search.wide(place), row)
    if not marginal.resolved:
        raise ValueError(f"nodes miss the posterior of {random[0]!r}: scale it, or use fit_mcmc.")
    values = {name: value[0] for name, value in search.packing.values(place).items()}
    values |= marginal.single(modes[0])
    to: Any = {"dtype": torch.get_default_dtype(), "device": marginal.data.device}
    values = {name: value.detach().to(**to) for name, value in values.items()}
    with poutine.block(), pyro.get_param_store().scope():
        plates = sequence_plates(marginal.model, marginal.data)
    gap, converged = peak.gap.item(), bool(peak.converged)
    reason = f"the estimated gap to the maximum is {gap:.1g} nats"
    if not converged:
        reason = "it took all steps"
        reason += f", and ended {gap:.2g} nats below the maximum" if gap > FAR else ""
    supports = {**search.supports, **{n: s["fn"].support for n, s in marginal.random.items()}}
    return LaplaceFit(
        model, Point(values), -torch.cat([first.reshape(1), peak.value]), converged, reason,
        time.perf_counter() - begin, marginal.data.num_observed, list(values), method="Laplace",
        window=1, supports=supports, parameters=values, plates=plates,
        marks=marks_of(marginal.data) if plates else None, log_marginal=peak.value.item(),
        random=random, notes=notes,
    )  # fmt: skip


# Weights of smooth terms ------------------------------------------------------------------------


class _Curvature(Information):
    """Covariance of the parameters, zero along directions that the data do not determine."""

    def _compute(self) -> None:
        _, hessian = self.slopes()
        matrix = -(hessian + hessian.mT) / 2
        self.covariance = torch.linalg.pinv(matrix, rtol=1e-12, hermitian=True) * self.unit**2


def fit_smooth(
    fit_once: Callable[..., Fit],
    *,
    module: Any,
    data: Any,
    start: Any,
    restarts: int | None,
    **options: Any,
) -> Fit:
    """The fit of a module at weights of its smooth terms that maximise the marginal likelihood.

    Args:
        fit_once: Fits a module whose weights are known, from ``start`` and with ``restarts``.
        module: With smooth terms.
        data: The sequences.
        start: Of the first fit.
        restarts: Of the first fit; the best goes on.
        **options: Of all fits.
    """
    if options["checkpoint"] is not None or not isinstance(data, Sequences):
        text = "smooth terms of unknown weight need data as one Sequences, and checkpoint=None"
        raise ValueError(f"{text}; got {type(data).__name__}, {options['checkpoint']!r}.")
    module = copy.deepcopy(module)
    parts = unweighted(module)
    for part in parts.values():
        part.spread.fill_(1.0)
    before = torch.tensor(torch.inf)
    for _ in range(FITS):
        fit = fit_once(module, data, start=start, restarts=restarts, **options)
        start, restarts = fit, 1
        known = {n: p for n, p in fit.parameters.items() if n in fit.supports}
        information = _Curvature(fit.model, known, fit.supports, data)
        freedom = [
            _update(part, f"module.{n}.smooth", fit, information) for n, part in parts.items()
        ]
        now = torch.cat(freedom)
        if bool(((now - before).abs() < SETTLED).all()):
            break
        before = now
    else:
        fit.converged = False
        fit.reason = f"weights of smooth terms still changed in the last of {FITS} fits"
        fit.notes.append(fit.reason)
    for name, own in zip(parts, freedom):
        fit.model.module.get_submodule(name).freedom = own  # type: ignore[attr-defined]
    fit.notes.append(
        f"smooth terms have {', '.join(f'{e:.1f}' for e in now.clamp(min=0))} degrees of freedom"
    )
    return fit


def _update(part: Linear, name: str, fit: Fit, information: Information) -> Tensor:
    """Update a part's smoothing weights from its coefficients; return degrees of freedom."""
    own = information.labels.index(f"{name}[{', '.join('0' * (len(part.shape) + 1))}]")
    b = fit.parameters[name].double()
    variance = information.covariance.diagonal()[own : own + b.numel()].reshape(b.shape)
    freedom = torch.zeros(part.spread.shape, dtype=torch.double)
    square = freedom.clone()
    terms = torch.tensor(part.terms)
    freedom.index_add_(-1, terms, 1 - variance / part.spread.double()[..., part.terms] ** 2)
    square.index_add_(-1, terms, b.square())
    ratio = (square / freedom).sqrt() / part.spread
    ratio = torch.where(freedom > 1e-9, ratio**LONGER, 1.0)  # without data it stays
    part.spread.copy_((ratio * part.spread).clamp(min=LEAST))
    return freedom.flatten()
