"""Emission families of normal vectors with independent components, and mixtures of them.

Sums of squares are taken about a centre, and a variance without a prior never falls below a small
share of that of the data. A prior without hyperparameters takes location and scales from the data
that it is fitted to, so that the unit of the data does not matter: it is flat between two scales, a
small one, from within states, and a large one, of all data.
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch
from pyro.distributions import Categorical, Dirichlet, MixtureSameFamily, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from .._checks import check_size
from .._sync import exceeds
from ..distributions.hard_zeros import is_spherical, log_probs
from ..distributions.observation import log_prob_per_component
from ..distributions.units import FlatVariance, InUnits, InverseGamma, flat_step
from ..ops.log_space import log
from .closed_form import Maximum, Statistics, row_mode, sample_rows
from .family import (
    Components,
    Emission,
    EmissionFamily,
    Number,
    check_strengths,
    family,
    filled,
    positive,
)

ROUNDING = 1e-14  # share of its mean below which a standard deviation is rounding
LEAST_OF_STATE = 10.0  # observations, by which a deviation within states is known
LEAST_STEPS = 0.1  # share of a standard deviation that one step of the dtype may be
SMALLEST = 1e-12  # share of the data's variance that one without a prior never falls below
LOWER, UPPER = 0.1, 5.0  # ends of a flat prior, by variances within states and of all data
_sums = itemgetter("known", "sums", "squares")
MEANS = 100.0  # variance of the prior of means beside a flat one, by that of all data


class CentredEmission(Emission):
    """An emission with means ``loc`` whose sums are taken about the buffer ``prior_loc``.

    A flat prior has no hyperparameters but these; another one is conjugate. Subclasses say how
    means follow from variances or covariances, and these from means.

    Attributes:
        spread: Name of the parameter of variances or covariances.
        upper: Large scale of a flat prior; infinite in a conjugate one.
    """

    spread: ClassVar[str]
    prior_loc: Tensor
    upper: Tensor
    dim: int
    # (statistics, variances or None, sampled) -> means, the prior included
    _means: Any
    _regression: Any  # (means) -> parameters of the mean by name
    _mode_of_spread: Any  # (statistics, means) -> mode of variances, and remarks
    _given: Any  # (means, current) -> those of the current parameters
    _sample_spread: Any  # (statistics, means, current) -> sample of variances
    # (variances of all data, within states) -> set scales of priors; log-units
    _set_spread: Any

    @property
    def centre(self) -> Tensor:
        """Shift subtracted from values before squares are summed, which would cancel; ``(D,)``."""
        return self.constants["centre"]

    @property
    def constants(self) -> dict[str, Tensor]:
        """Hyperparameter buffers in float64, and ``centre``; cached until a buffer is replaced."""
        buffers, (made_of, wide) = self._buffers, self.__dict__.get("_of_buffers", ({}, {}))
        if [*map(id, buffers.values())] != [*map(id, made_of.values())]:
            wide = {name: part.double() for name, part in buffers.items() if part is not None}
            wide["centre"] = wide["prior_loc"].flatten(0, -1 - bool(self.dim)).mean(0)
            self.__dict__["_of_buffers"] = dict(buffers), wide
        return wide

    def set_points(self, **values: Tensor) -> None:
        """Make values parameters without priors; sums are then about the value of ``loc``."""
        super().set_points(**values)
        if "loc" in values:
            self.prior_loc = like(self.prior_loc, values["loc"].detach())
            self.of_data = False

    def take_moments(self, moments: Tensor) -> float:
        r"""Give the prior the location and scale of data, unless hyperparameters were given.

        Args:
            moments: ``(4, D)`` or ``(4,)``, of the observations: see :func:`moments_of`; or with
                a further deviation within states, about what else the mean depends on.

        Returns:
            By how much minus the log joint density exceeds that of data, and of parameters, in
            units of the standard deviations s of the data: :math:`\log s_d` for each component
            known and each mean, and what the scales add. Zero if the prior stays.

        Raises:
            ValueError: If squares of the data leave the range of the dtype of the parameters.
        """
        if moments.shape[1:] != ((self.dim,) if self.dim else ()):
            return 0.0  # what builds the HMM explains it
        known, mean, variance, *within = moments
        varies = variance.sqrt() > ROUNDING * mean.abs()  # not NaN either
        _check_range(mean[varies], variance[varies], self.prior_loc.dtype)
        if not self.of_data:
            return 0.0
        variance = torch.where(varies, variance, 1.0)
        least = 100 * torch.finfo(self.prior_loc.dtype).tiny
        within = [
            torch.where(varies, x.square(), 1.0).minimum(variance).clamp(min=least) for x in within
        ]
        self.prior_loc = like(self.prior_loc, mean.nan_to_num(0.0))
        numbers = known + self.prior_loc.numel() // max(self.dim, 1)
        return float((numbers * variance.log()).sum()) / 2 + self._set_spread(variance, *within)

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: mode of the joint posterior of means, and variances or covariances."""
        spread, notes, name = None, list[str](), self.spread
        weak = self.flat and any(self.has_prior(other) for other in self.supports if other != name)
        for _ in range(1 + weak):  # beside a weak prior of means two are enough
            means = self._means(statistics, spread)
            if self.is_free(name):
                spread, notes = self._mode_of_spread(statistics, means)
            else:
                spread = getattr(self, name).double()
        return self._regression(means) | {name: spread}, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample variances or covariances, then means, given sufficient statistics."""
        means, name = self._means(statistics), self.spread
        if self.flat:
            means = self._given(means, current)
        if self.has_prior(name):
            spread = self._sample_spread(statistics, means, current)
        else:
            spread = getattr(self, name).double()
        samples = self._regression(self._means(statistics, spread, sampled=True)) | {name: spread}
        return {name: value for name, value in samples.items() if self.has_prior(name)}

    def complete(self, state: dict[str, Any], prefix: str) -> None:
        """Add the buffer that a ``state_dict`` from before priors could be flat lacks."""
        state.setdefault(f"{prefix}upper", torch.full_like(self.upper, torch.inf))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Load the saved prior, flat or conjugate."""
        self.complete(state, prefix)
        self.__dict__.pop("_of_buffers", None)
        super()._load_from_state_dict(state, prefix, *rest)
        self.flat = bool(self.upper.isfinite().all())


class NormalEmission(CentredEmission, Components, emits=torch_dist.Normal):
    r"""Emission family of vectors whose components are independent and normal in each state.

    With hyperparameters the prior is conjugate:

    .. math:: \sigma^2_{kd} \sim \mathrm{InvGamma}(a, b_d), \quad
              \mu_{kd} \sim \mathrm{Normal}(m_d, \sigma^2_{kd} / w)

    If neither m nor b is given they are mean and variance of the data of a fit, which sets them
    before its first step, so that the unit of the data does not matter; :func:`scale_priors` does
    the same for NUTS. Until then, and if one of them alone is given, m is 0 and b is 1.

    Without any, the prior is flat between two scales of the data, so that estimates are those of
    maximum likelihood, but for a variance that would shrink to zero, as with one observation:

    .. math:: p(\sigma^2_{kd}) \propto \exp\Big(-\frac{s_d^2}{10 \sigma^2_{kd}}
              - \frac{\sigma^2_{kd}}{5 v_d}\Big), \quad
              \mu_{kd} \sim \mathrm{Normal}(m_d, 100 v_d)

    Here m and v are mean and variance of all data, and s is at most about the standard deviation in
    the narrowest state of 100 observations: see :func:`moments_of`. Where each state has as many,
    the prior moves no mean and no variance of EM and MAP by more than a tenth of its standard
    error. Until data set them, m is 0 and v and s are 1.

    Sites: ``emission.variance`` ``(K, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        num_states: K.
        dim: D, the number of components of an observation, whose event shape is ``(D,)``. With
            zero, observations are scalars, of an empty event shape.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth; 0.01 if another is given.
        concentration: a; 2 if another is given.
        rate: b, a number or ``(D,)``.
        spherical: Whether a state has one variance: see :func:`normal_spherical`.

    Example:
        >>> data = Sequences.from_list([[[1e10], [3e10]]])
        >>> fit_em(TabularHMM(1, normal(1)), data).parameters["module.emission.loc"].item()
        20000000000.0
    """

    spread = "variance"
    rate: Tensor
    shape: Tensor  # type: ignore[assignment]  # of the prior of the variance
    supports: ClassVar = {"variance": constraints.positive, "loc": constraints.real}

    def __init__(
        self,
        num_states: int,
        dim: int = 1,
        loc: Number | None = None,
        weight: float | None = None,
        concentration: float | None = None,
        rate: Number | None = None,
        spherical: bool = False,
        _inner: tuple[int, ...] = (),
    ) -> None:
        Emission.__init__(self)
        self.dim = dim
        shape = (num_states, *_inner, dim) if dim else (num_states,)
        self.of_data = loc is None and rate is None
        self.flat = self.of_data and weight is None and concentration is None
        weight = 0.01 if weight is None else weight
        concentration = 2.0 if concentration is None else concentration
        check_strengths(weight, concentration)
        self.weight, self.spherical = weight, spherical
        self.register_buffer("prior_loc", filled("loc", 0.0 if loc is None else loc, shape))
        each = shape[:-1] if spherical else shape
        self.register_buffer("rate", positive("rate", 1.0 if rate is None else rate, each))
        self.register_buffer("shape", torch.full_like(self.rate, concentration))
        self.register_buffer("upper", torch.full_like(self.rate, torch.inf))
        if self.flat:
            self._set_spread(torch.ones(()), torch.ones(()))
        self.add_parameters(variance=each, loc=shape)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution: one scale ``(K, 1)`` of vectors is one variance a state."""
        spherical = bool(distribution.event_shape) and is_spherical(base)
        size, dim = distribution.batch_shape[0], sum(distribution.event_shape)
        module = cls(size, dim, spherical=spherical)
        module._set_normals(base)
        return module

    def _set_normals(self, base: Any) -> None:
        """Make means and variances of a distribution parameters without priors."""
        shape = self.prior_loc.shape
        variance = base.variance[..., 0] if self.spherical else base.variance.expand(shape)
        self.set_points(variance=variance, loc=base.loc.expand(shape))

    def _set_spread(self, variance: Tensor, within: Tensor) -> float:
        if self.spherical:
            variance, within = variance.mean(), within.mean()
        self.rate = like(self.rate, variance)
        units = float(self.rate.log().sum())
        if self.flat:
            self.rate = like(self.rate, LOWER * within)
            self.upper = like(self.rate, UPPER * variance)
            self.shape = torch.full_like(self.rate, -1.0)
        return units

    def variance_prior(self) -> TorchDistribution:
        """Prior of the variances: inverse gamma, or flat."""
        if self.flat:
            return FlatVariance(self.rate, self.upper)
        return InverseGamma(self.shape, self.rate)

    def loc_prior(self) -> TorchDistribution:
        """Normal prior of the means, given the variances if conjugate."""
        unit = self._wide(self.upper / UPPER if self.flat else self.rate)
        variance = MEANS * unit if self.flat else self._wide(self.variance) / self.weight
        return InUnits(Normal(self.prior_loc, variance.sqrt()), self.prior_loc, unit.sqrt())

    def _wide(self, variance: Tensor) -> Tensor:
        return variance.unsqueeze(-1) if self.spherical else variance

    def components(self) -> TorchDistribution:
        """Normal distribution of the components."""
        variance = self._wide(self.variance)  # read first: the prior of the mean depends on it
        return Normal(self.loc, variance.sqrt())

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """The values about the centre, and their squares."""
        values = values - self.centre
        return {"sums": values, "squares": values.square()}

    def _weight(self) -> float:
        """Pseudo-count of the prior mean; zero if flat, or without a prior of means."""
        return self.weight if self.has_prior("loc") and not self.flat else 0.0

    def _means(self, statistics: Statistics, variance: Any = None, sampled: bool = False) -> Tensor:
        """Mode of the means less the centre, or a sample; a flat prior's only beside variances."""
        known, sums, _ = _sums(statistics)
        centre, prior_loc, upper = itemgetter("centre", "prior_loc", "upper")(self.constants)
        if not self.is_free("loc"):
            return (self.loc.double() - centre).expand_as(sums)
        weight: Any = self._weight()
        if variance is not None and self.flat and self.has_prior("loc"):
            weight = self._wide(variance * UPPER / (MEANS * upper))
        loc = (weight * (prior_loc - centre) + sums) / (weight + known)
        if not sampled or not self.has_prior("loc"):
            return loc
        return torch.normal(loc, (self._wide(variance) / (weight + known)).sqrt())

    def _regression(self, means: Tensor) -> dict[str, Tensor]:
        return {"loc": means + self.centre}

    def _given(self, means: Tensor, current: Statistics) -> Tensor:
        loc = current["loc"] if self.has_prior("loc") else self.loc
        return loc.double() - self.centre

    def _squares(self, statistics: Statistics, loc: Tensor) -> Tensor:
        """Sums of squares about means, a conjugate prior of these included."""
        known, sums, squares = _sums(statistics)
        scatter = squares - 2 * loc * sums + known * loc**2
        if not self.flat:
            prior_loc = self.constants["prior_loc"] - self.centre
            scatter = scatter + self._weight() * (loc - prior_loc) ** 2
        return self._summed(scatter.nan_to_num(0.0).clamp(min=0.0))  # of a mean without data

    def _mode_of_spread(self, statistics: Statistics, loc: Tensor) -> tuple[Tensor, list[str]]:
        """The mode of variances, given means, and remarks."""
        count = statistics["known"] + 1.0 if self._weight() else statistics["known"]
        above, below = 0.5 * self._squares(statistics, loc), 0.5 * self._summed(count)
        if self.has_prior("variance"):
            rate, shape, upper = itemgetter("rate", "shape", "upper")(self.constants)
            above, below = above + rate, below + shape + 1
            root = (below.square() + 4 * above / upper).sqrt()
            return 2 * above / (below + root), []
        variance = torch.maximum(above / below, self._floor(statistics))  # NaN stays
        low = variance > above / below
        return variance, [] if exceeds((~low).all().byte(), 0) else [floor_note("variance")]

    def _sample_spread(self, statistics: Statistics, loc: Tensor, current: Statistics) -> Tensor:
        """Variances given means if the prior is flat, by an MCMC step; else of any means."""
        known, scatter = self._summed(statistics["known"]), self._squares(statistics, loc)
        rate, shape = itemgetter("rate", "shape")(self.constants)
        if not self.flat:
            return (rate + scatter / 2) / torch._standard_gamma(shape + known / 2)
        old, about = (x[..., None, None] for x in (current["variance"], 2 * rate + scatter))
        return flat_step(old, self.upper.unsqueeze(-1), known, about)[..., 0, 0]

    def _summed(self, sums: Tensor) -> Tensor:
        """Sum over the components that share a variance."""
        return sums.sum(-1) if self.spherical else sums

    def _floor(self, statistics: Statistics) -> Tensor:
        """Variance floor by moments pooled over states, which broadcasts with ``(R, K, ...)``."""
        over = tuple(range(1, statistics["sums"].dim() - bool(self.dim)))
        known, sums, squares = (part.sum(over, keepdim=True) for part in _sums(statistics))
        mean = sums / known
        floor = floor_of(squares / known - mean**2, mean + self.centre, self.prior_loc.dtype)
        return floor.mean(-1) if self.spherical else floor


normal = family("normal", NormalEmission, dim=0)


def normal_spherical(dim: int, *prior: Any, **named: Any) -> EmissionFamily:
    """Emission family of normal vectors with one variance for all the components of a state.

    Priors are those of :func:`normal`.

    Sites: ``emission.variance`` ``(K,)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        *prior: ``loc``, ``weight``, ``concentration`` and ``rate``, as of :func:`normal`; the
            default rate is the mean over components of the variance of the data.
        **named: The same by name.
    """
    check_size("dim", dim)
    return normal(dim, *prior, **{**named, "spherical": True})


class MixtureEmission(NormalEmission, emits=torch_dist.MixtureSameFamily):
    """Emission family of vectors that are a mixture of C normal distributions in each state.

    Components of a vector are independent given the component of the mixture; priors are those of
    :func:`normal`, and a Dirichlet one on the weights.

    Sites: ``emission.weights`` ``(K, C)``, ``emission.variance`` ``(K, C, D)`` and
    ``emission.loc`` ``(K, C, D)``.

    Args:
        num_states: K.
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``; of the data by default, with ``rate``.
        weight: How many observations the prior mean is worth.
        concentration: Of the inverse gamma prior of the variance.
        rate: Of the inverse gamma prior of the variance, a number or ``(D,)``; by default the
            variance of the data.
        weights_concentration: Of the Dirichlet prior of the weights.
        spherical: Whether a component has one variance: see :func:`normal_spherical`.
        num_components: C, given by name.
    """

    supports: ClassVar = {"weights": constraints.simplex, **NormalEmission.supports}

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: Number | None = None,
        weight: float | None = None,
        concentration: float | None = None,
        rate: Number | None = None,
        weights_concentration: float = 1.0,
        spherical: bool = False,
        *,
        num_components: int,
    ) -> None:
        inner, shape = (num_components,), (num_states, num_components)
        super().__init__(num_states, dim, loc, weight, concentration, rate, spherical, inner)
        strength = positive("weights_concentration", weights_concentration, shape)
        self.num_components = num_components
        self.register_buffer("concentration", strength)
        self.add_parameters(weights=shape)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a mixture of normal vectors of independent components."""
        part = base.component_distribution
        inner = getattr(part, "base_dist", None)
        if not isinstance(inner, torch_dist.Normal) or len(part.event_shape) != 1:
            return None
        (states, components), dim = part.batch_shape, part.event_shape[0]
        module = cls(states, dim, spherical=is_spherical(inner), num_components=components)
        module._set_normals(inner)
        module.set_points(weights=base.mixture_distribution.probs.expand(part.batch_shape))
        return module

    def weights_prior(self) -> TorchDistribution:
        """Dirichlet prior of the mixture weights."""
        return Dirichlet(self.concentration)

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        return MixtureSameFamily(Categorical(logits=log(self.weights)), super().forward())

    def augments(self, values: Tensor) -> bool:
        """True: the mixture component of each observation is a latent variable."""
        return True

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Moments of each mixture component, weighted by its posterior responsibilities."""
        if current is None or len(values) == 0:
            shares = _scatter(values, weights, self.num_components)
        else:
            parts = log_prob_per_component(current, values)
            logits = parts + log_probs(current.mixture_distribution)
            shares = logits.softmax(-1)  # ([R,] M, K, C)
            if self.imputes:
                chosen = torch_dist.Categorical(logits=logits).sample()
                shares = torch.nn.functional.one_hot(chosen, self.num_components)
        joint = weights.double().unsqueeze(-1) * shares  # (R, M, K, C)
        sums = super().statistics(values, joint.flatten(2), None)
        sums = {name: each.unflatten(1, joint.shape[2:]) for name, each in sums.items()}
        return sums | {"counts": joint.sum(1)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: modes of the mixture components, and of their weights."""
        values, notes = super().m_step(statistics)
        prior = self.concentration if self.has_prior("weights") else None
        return values | {"weights": row_mode(statistics["counts"], prior)}, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample means and variances of the components, and mixture weights."""
        samples = super().sample_parameters(statistics, current)
        if self.has_prior("weights"):
            samples["weights"] = sample_rows(statistics["counts"] + self.concentration)
        return samples


normal_mixture = family("normal_mixture", MixtureEmission, num_components=1, dim=1)


def _scatter(values: Tensor, weights: Tensor, num_components: int) -> Tensor:
    """Initial responsibilities ``(R, M, K, C)``: of the nearest of C sampled values per state."""
    if len(values) == 0:
        return weights.new_zeros(*weights.shape, num_components)
    filled = torch.where(values.isnan(), values.nanmean(0).nan_to_num(0.0), values)
    shares = []
    for column in weights.movedim(-1, 1).flatten(0, 1):
        chance = column[: 2**24] + 1e-9  # more than that torch does not take
        centres = filled[torch.multinomial(chance, num_components, replacement=True)]
        nearest = torch.cdist(filled, centres).argmin(-1)
        shares.append(torch.nn.functional.one_hot(nearest, num_components))
    return torch.stack(shares).unflatten(0, weights[:, 0].shape).movedim(1, 2).double()


# What normal families share ----------------------------------------------------------------------


def floor_of(spread: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """Variance floor without a prior: by the data's variance, and by the rounding of ``dtype``."""
    square = mean.nan_to_num(0.0) ** 2
    spread = spread.nan_to_num(0.0)
    square = torch.where((square == 0) & (spread <= 0), 1.0, square)  # all data are zero
    return torch.maximum(SMALLEST * spread, torch.finfo(dtype).eps ** 2 * square)


def floor_note(name: str) -> str:
    """Remark that the parameter ``name`` was held at its floor."""
    return f"a {name} was held at its floor, {SMALLEST:g} of the data's: a state emits one value."


def like(buffer: Tensor, values: Tensor) -> Tensor:
    """Copy of ``values`` in the form of ``buffer``, which guides of earlier fits may hold."""
    return values.to(buffer).expand(buffer.shape).clone()


def moments_of(values: Tensor, num_states: int = 1) -> Tensor:
    r"""Number, mean, variance, and deviation within states, of components of ``(M, *E)``.

    The last is about that in the narrowest of states with n observations, or less. Where these have
    a standard deviation s, j of them in a row are about :math:`\sqrt{2 \pi} s j / n` apart near the
    mean, and closer if other states have values there. For each value the distance to that which
    has j = n/3 more between is taken, and of n/2 of the values it is less than what is returned.
    Equal values, as of rounded data, have no distance, and count as one. All in float64.

    NaN is missing; a component of which nothing is known has a mean of NaN.

    Args:
        values: ``(M, *E)``.
        num_states: K; n is 100, or M / K if that is less, but 10 at least: fewer show no deviation.
    """
    wide = values.double()
    mean = wide.nanmean(0)
    variance = (wide - mean).square().nanmean(0)
    columns = values.reshape(len(values), mean.numel()).mT.cpu().numpy()
    found = torch.tensor([_within(column, num_states) for column in columns]).to(wide)
    within = found.reshape(mean.shape).minimum(variance.sqrt())
    return torch.stack([(~wide.isnan()).sum(0).double(), mean, variance, within])


def _within(values: np.ndarray, num_states: int) -> float:
    """Deviation within the narrowest state, by :func:`moments_of`; infinite if all are equal."""
    values = np.sort(values)  # in a third of torch's time
    values = values[: np.searchsorted(values, np.nan)]
    size = min(max(len(values) / num_states, LEAST_OF_STATE), 100.0)
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True))[: len(values)]  # of runs
    counts, ahead = np.diff(ends, prepend=-1), ends + max(int(size / 3), 1)
    first, ahead = ends[ahead < len(values)], ahead[ahead < len(values)]
    if len(first) == 0:
        return math.inf
    last = np.repeat(ends, counts)[ahead]
    widths = (values[last].astype(np.float64) - values[first]) / (last - first)
    nearest = np.argpartition(widths, min(len(widths), int(size / 2)) - 1)[: int(size / 2)]
    nearest = nearest[widths[nearest].argsort()]
    place = np.searchsorted(counts[nearest].cumsum(), int(size / 2))
    width = widths[nearest[min(place, len(nearest) - 1)]]
    return float(width) * size / math.sqrt(2 * math.pi)


def merged(first: Tensor, second: Tensor) -> Tensor:
    """The moments of two sets of observations together (Chan, Golub and LeVeque, 1983).

    The deviation within states is the smaller one: that of both together is not known.
    """
    total = first[0] + second[0]
    share = second[0] / total
    apart = second[1] - first[1]
    mean = first[1] + share * apart
    variance = (1 - share) * first[2] + share * second[2] + share * (1 - share) * apart.square()
    both = torch.cat([torch.stack([total, mean, variance]), first[3:].minimum(second[3:])])
    return torch.where(first[0] == 0, second, torch.where(second[0] == 0, first, both))


def take_moments(emission: Any, moments: Tensor) -> float:
    """Rescale default priors to the data's moments; returns the loss offset, zero without any."""
    return emission.take_moments(moments) if hasattr(emission, "take_moments") else 0.0


def _check_range(mean: Tensor, variance: Tensor, dtype: torch.dtype) -> None:
    """Raise if a variance over- or underflows, or the rounding of a mean exceeds its deviation."""
    limits, spread = torch.finfo(dtype), variance.sqrt()
    bad = (variance < limits.tiny / limits.eps) | (variance > limits.max * limits.eps)
    lost = limits.eps * mean.abs() > LEAST_STEPS * spread
    if bool((bad | lost).any()):
        i = int((bad | lost).byte().argmax())
        why = f"whose square {dtype} does not hold. Change the unit of"
        if lost[i]:
            why = f"which is lost in {dtype} about {mean[i]:.10g}. Subtract an origin from"
        raise ValueError(
            f"data has a standard deviation of {spread[i]:.3g}, {why} the data, or compute in "
            "float64: module.double(), and values of float64."
        )
