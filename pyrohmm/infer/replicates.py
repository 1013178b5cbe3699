"""Intervals that need more fits of one model: the bootstrap, and profiles of the likelihood.

All of them are climbed as one batch of copies of the model, from the fit and in coordinates in
which the information of the fit is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from .._checks import check_kind, check_size
from ..distributions.hmm import HMM
from ..ops.newton import Peak, climb
from .uncertainty import Information, graded, normal_quantile

FAR = 4.0  # standard errors over which a profile is first looked at, on either side
GRID = 12  # points of a profile on either side
CLOSE = 0.05  # share of a limit, from one point to the next, that is fine enough
HOLD = 30.0  # curvature, in units of that of the fit, that holds a parameter near a value
TIE = 1e-3  # standard deviations from the estimate that are rounding of a replicate's fit
ROUNDS = 4  # times that a profile is looked at farther away, or nearer


class Copies:
    """B copies of the model of a fit, each of data of its own.

    Args:
        information: Of the fit.
        each: What differs between copies, by name, of each of the pieces of the data: ``values``
            ``(B, N, T, *E)``, ``labels`` ``(B, N, T)``, and ``weights`` ``(B, N)``, how often each
            sequence counts.
    """

    def __init__(
        self, information: Information, each: Sequence[dict[str, Tensor]] | None = None
    ) -> None:
        if type(information) is not Information:
            text = "method must be 'delta' where random effects are integrated out"
            raise ValueError(f"{text}; got 'bootstrap' or 'profile'.")
        self.information = information
        self.each = each or [{}] * len(information.pieces)
        # coordinates in which the information is the identity
        self.root = torch.linalg.cholesky(information.matrix)
        information.check_copies()

    def at(self, place: Tensor) -> Tensor:
        """Free coordinates ``(B, P)`` of whitened places ``(B, P)``."""
        return torch.linalg.solve_triangular(self.root, place, upper=False, left=False)

    def peaks(self, count: int, **options: Any) -> Peak:
        """Maximise the log joint density of each of ``count`` copies, from the fit."""
        return climb(self, self.root.new_zeros(count, len(self.root)), **options)

    def __call__(self, place: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint densities ``(B',)`` of the copies ``rows``, and their gradients."""
        score = lambda u, chosen: self.score(self.at(u), chosen)  # noqa: E731
        parts = (part for part, _ in self.information.pieces)
        return graded(score, place, self.information.room(*parts), rows)

    def score(self, u: Tensor, rows: Tensor) -> Tensor:
        """Log joint densities ``(B',)`` at free coordinates ``(B', P)``."""
        total: Any = 0.0
        for (data, share), each in zip(self.information.pieces, self.each):
            own = {name: part[rows].to(data.device) for name, part in each.items()}
            weights = own.pop("weights", None)
            data = data.with_total(data.total) if own else data
            for name, part in own.items():
                setattr(data, name, part)
            total = total + share * self.information.run(u, data, weights)[0]
        return total

    def matched(self, u: Tensor) -> Tensor:
        """Mask ``(B,)`` of the copies whose states have not changed places with the fit's."""
        parts, own = [part for part, _ in self.information.pieces], self.information.num_states

        def states(u: Tensor) -> Tensor:
            """Posteriors ``(B, 1, M, K)`` of all steps."""
            found = []
            for data in parts:
                hmm = self.information.at(u, data).expand(torch.Size([len(u), len(data)]))
                found.append(hmm.posterior(data.values).state_probs[:, data.exists])
            return torch.cat(found, 1).unsqueeze(1)

        reference = states(torch.zeros_like(u[:1]))[0]
        pieces = u.split(self.information.room(*parts))
        matches = torch.cat([match_states(states(some), reference) for some in pieces])
        return (matches == torch.arange(own)).all(-1)


@dataclass
class Bootstrap:
    """Bootstrap replicates: fits of one model to simulated or resampled data.

    Attributes:
        information: Of the fit.
        coordinates: ``(B, P)``, free coordinates of the replicates that count.
        failed: Number of replicates that have not converged; they do not count.
        switched: Number of those whose states have changed places; they do not count either.
    """

    information: Information
    coordinates: Tensor
    failed: int = 0
    switched: int = 0

    def __repr__(self) -> str:
        text = f"Bootstrap({len(self.coordinates)} replicates; {self.failed} have not converged, "
        return text + f"in {self.switched} states have changed places)"

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of the replicates by name, ``(B, ...)``."""
        values = self.information.packing.values(self.coordinates)
        return {name: value.detach() for name, value in values.items()}

    def std_errors(self) -> dict[str, Tensor]:
        """Standard deviations of parameters over replicates; NaN of those held at a boundary."""
        return {name: self._masked(name, value.std(0)) for name, value in self.parameters.items()}

    def _masked(self, name: str, limit: Tensor) -> Tensor:
        """NaN for the entries that are held at the boundary."""
        return limit.masked_fill(self.information.std_errors()[name].isnan(), torch.nan)

    def of(self, function: Callable[[HMM], Tensor]) -> Tensor:
        """Evaluate a function of the HMM of each replicate, ``(B, ...)``."""
        with torch.no_grad():
            return torch.stack([function(self.information.at(u)) for u in self.coordinates])

    def intervals(
        self, level: float = 0.95, of: Callable[[HMM], Tensor] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Limits of the parameters by name, or of a function ``of`` the HMM under "of".

        Quantiles over the replicates, corrected for the bias of their median (BC; Efron and
        Tibshirani, 1993, chapter 14).
        """
        if of is not None:
            return {"of": _corrected(self.of(of), self.information.of(of)[0], level)}
        centres = {part.name: part.estimate for part in self.information.coordinates}
        found = {}
        for name, value in self.parameters.items():
            low, high = _corrected(value, centres[name], level)
            found[name] = self._masked(name, low), self._masked(name, high)
        return found


def _corrected(values: Tensor, centre: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Bias-corrected bootstrap quantiles of ``(B, ...)`` values."""
    z, count = normal_quantile(level), len(values)
    values, centre = values.double(), centre.double()
    tied = (values - centre).abs() <= TIE * values.std(0)
    below = torch.where(tied, 0.5, (values < centre).double()).mean(0)
    bias = torch.special.ndtri(below.clamp(0.5 / count, 1 - 0.5 / count))
    ordered = values.sort(0).values

    def quantile(shift: float) -> Tensor:
        rank = torch.special.ndtr(2 * bias + shift) * (count + 1) - 1
        rank = rank.clamp(0, count - 1)
        first = rank.floor().long().unsqueeze(0)
        low, high = (ordered.gather(0, k)[0] for k in (first, (first + 1).clamp(max=count - 1)))
        return torch.lerp(low, high, rank - rank.floor())

    return quantile(-z), quantile(z)


def bootstrap(
    information: Information, num_samples: int = 200, parametric: bool = True
) -> Bootstrap:
    """Bootstrap a fit: refit the model to simulated or resampled data."""
    check_size("num_samples", num_samples, 2)
    check_kind("parametric", parametric, bool, "True or False", "False resamples sequences.")
    data = information.data
    parts = [part for part, _ in information.pieces]
    if not parametric:
        if len(data) < 2:
            raise ValueError("data has one sequence, which says nothing: take parametric=True.")
        drawn = torch.randint(len(data), (num_samples, len(data)))
        weights = torch.zeros(num_samples, len(data), dtype=torch.double)
        weights.scatter_add_(1, drawn, torch.ones_like(weights))
        members = data.bucket_members if len(parts) > 1 else [torch.arange(len(data))]
        each = [{"weights": weights[:, chosen]} for chosen in members]
    else:
        if data.labels is not None and data.labels.dtype == torch.bool:
            raise ValueError("labels that are booleans cannot be simulated: take parametric=False.")
        each, here = [], torch.zeros(len(information.labels)).double()
        for part in parts:
            hmm = information.at(here, part)
            values, states = hmm.sample_with_states(torch.Size([num_samples]))
            values = values.to(part.values.dtype)
            if values.dtype.is_floating_point:
                values = values.masked_fill(part.values.isnan(), torch.nan)
            each.append({"values": values})
            if part.labels is not None:
                each[-1]["labels"] = torch.where(part.labels >= 0, states, -1)
    copies = Copies(information, each)
    peak = copies.peaks(num_samples)
    u = copies.at(peak.place)[peak.converged]
    if len(u) < 2:
        raise ValueError(f"none of {num_samples} replicates has converged: use fewer states.")
    same = copies.matched(u)
    return Bootstrap(information, u[same], num_samples - len(u), int((~same).sum()))


# Profiles -----------------------------------------------------------------------------------------


class _Held(Copies):
    """Model copies with one parameter entry penalised towards ``(B,)`` values, for profiles."""

    def __init__(self, information: Information, label: str) -> None:
        super().__init__(information)
        if label not in information.entries:
            some = ", ".join(information.labels[:4])
            raise ValueError(f"of must name an entry of a parameter, such as {some}; got {label}.")
        self.part, self.entry = information.entries[label]
        errors = information.std_errors()[self.part.name]
        if errors.flatten()[self.entry].isnan():
            text = f"of must name an entry inside its space; {label} is held at the boundary"
            raise ValueError(f"{text}, and has no profile.")
        ends = (self.part.estimate, *self.part.interval(errors, 1.0))
        self.centre, low, high = (self.part.scale(end).flatten()[self.entry].cpu() for end in ends)
        self.error = (high - low) / 2
        self.wanted = torch.zeros(1, dtype=torch.double)

    def number(self, u: Tensor) -> Tensor:
        """The held entry ``(B,)`` on its interval scale, in standard errors from its estimate."""
        own = self.information.packing.split(u)[self.part.name]
        value = self.part.value(own).reshape(len(u), -1)[:, self.entry].to(u)
        return (self.part.scale(value) - self.centre) / self.error

    def score(self, u: Tensor, rows: Tensor) -> Tensor:
        """Log joint densities, less a quadratic penalty that holds the number near its value."""
        away = self.number(u) - self.wanted[rows]
        return super().score(u, rows).to(u) - HOLD / 2 * away.square()

    def profile(self, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Values of the held entry near ``wanted``, and the profile log joint densities there.

        At the maximum the slope of the log joint is along that of the number: it is the greatest
        for the number that is reached, whatever the square.
        """
        self.wanted = wanted
        peak = self.peaks(len(wanted), tolerance=1e-9)
        number = self.number(self.at(peak.place))
        value = peak.value + HOLD / 2 * (number - wanted).square()
        return number[peak.converged], value[peak.converged]


def crossing(profile: Callable[[Tensor], tuple[Tensor, Tensor]], grid: Tensor, z: float) -> Tensor:
    """Distance from the top at which a profile's likelihood-ratio root is ``z``; else infinity.

    Args:
        profile: From places to those near them, and the greatest log joint densities there.
        grid: Rising places, the first of which is the top.
        z: Of a normal interval.
    """
    place, value = torch.zeros(0).double(), torch.zeros(0).double()
    for _ in range(ROUNDS):
        near, found = profile(grid)
        place, order = torch.cat([place, near]).sort()
        value = torch.cat([value, found])[order]
        root = (2 * (value[0] - value)).clamp(min=0).sqrt()
        above = (root >= z).nonzero()
        last = int(above[0]) if len(above) else len(place) - 1
        low, high = place[last - 1], place[last]
        if not len(above):
            low, high = high, 4 * high
        elif high - low < CLOSE * high:
            break
        grid = torch.linspace(low, high, GRID + 1).double()[1:]
    if not len(above):
        return torch.tensor(torch.inf).double()
    return torch.lerp(low, high, (z - root[last - 1]) / (root[last] - root[last - 1]))


def profile_interval(information: Information, label: str, level: float) -> tuple[Tensor, Tensor]:
    r"""Limits of an entry of a parameter by the likelihood ratio.

    All values :math:`\theta_0` with
    :math:`2 (\ell(\hat\theta) - \max_{\theta = \theta_0} \ell) \le \chi^2_1`, found from points of
    the profile that are climbed as one batch. A side on which the log joint never falls so far has
    the boundary as its limit.
    """
    held, limits = _Held(information, label), []
    for sign in (-1.0, 1.0):

        def side(places: Tensor, sign: float = sign) -> tuple[Tensor, Tensor]:
            number, value = held.profile(sign * places)
            return sign * number, value

        z = normal_quantile(level)
        grid = torch.linspace(0.0, FAR * z / 2, GRID + 1).double()
        limits.append(sign * crossing(side, grid, z))
    low, high = (held.part.scale.inv(held.centre + held.error * limit) for limit in limits)
    return low, high


def match_states(states: Tensor, reference: Tensor) -> Tensor:
    """Match the states of R models to those of a reference, by the Hungarian algorithm.

    The matching maximises the overlap of the posteriors of matched states: the sum over steps of
    the products of their probabilities.

    Args:
        states: ``(R, N, T, K)``, posteriors of R models.
        reference: ``(N, T, K)``, the posterior they are compared with.

    Returns:
        ``(R, K)`` integers: the state of the reference for each state.

    Example:
        >>> reference = torch.tensor([[[0.9, 0.1], [0.2, 0.8]]])
        >>> match_states(torch.stack([reference, reference.flip(-1)]), reference)
        tensor([[0, 1],
                [1, 0]])
    """
    overlap = torch.einsum("rntk,ntj->rkj", states, reference).cpu().numpy()
    matches = [linear_sum_assignment(weights, maximize=True)[1] for weights in overlap]
    return torch.stack([torch.as_tensor(match) for match in matches])
