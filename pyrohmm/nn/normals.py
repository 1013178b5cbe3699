"""Emission families of normal vectors with independent components, and mixtures of them.

Sums of squares are taken about a centre, and a variance without a prior never falls below a small
share of that of the data. A prior whose location and scale are not given takes those of the data
that it is fitted to, so that the unit of the data does not matter.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pyro.distributions import Categorical, Dirichlet, MixtureSameFamily, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from .._checks import check_size
from .._sync import exceeds
from ..distributions.constructors import is_spherical
from ..distributions.hard_zeros import log_probs
from ..distributions.observation import log_prob_per_component
from ..distributions.units import InUnits, InverseGamma
from ..ops.log_space import log
from .closed_form import Maximum, Statistics, row_mode, sample_rows
from .family import (
    Components,
    Emission,
    EmissionFamily,
    averaged,
    check_strengths,
    family,
    positive,
    spread,
)

ROUNDING = 1e-14  # share of its mean below which a standard deviation is rounding
LEAST_STEPS = 0.1  # share of a standard deviation that one step of the dtype may be
SMALLEST = 1e-12  # share of the data's variance that one without a prior never falls below


class CentredEmission(Emission):
    """An emission with means ``loc`` whose sums are taken about the buffer ``prior_loc``.

    Attributes:
        of_data: Whether the prior takes location and scale from the data of a fit.
    """

    prior_loc: Tensor
    dim: int
    of_data = False

    @property
    def centre(self) -> Tensor:
        """Origin of the sums, ``(D,)`` or ``()``: squares of numbers far from zero would cancel."""
        loc = self.prior_loc.double()
        return loc.reshape(-1, *loc.shape[loc.dim() - bool(self.dim) :]).mean(0)

    def set_points(self, **values: Tensor) -> None:
        """Make parameters points without priors; sums are then about the value of ``loc``."""
        super().set_points(**values)
        if "loc" in values:
            self.prior_loc.copy_(values["loc"].detach().expand(self.prior_loc.shape))
            self.of_data = False

    def scale_prior(self, moments: Tensor) -> float:
        r"""Give the prior the location and scale of data, unless hyperparameters were given.

        Args:
            moments: ``(3, D)`` or ``(3,)``, of the observations: see :func:`moments_of`.

        Returns:
            By how much minus the log joint density exceeds that of data, and of parameters, in
            units of the standard deviations s of the data: :math:`\log s_d` for each component
            known and each mean, and what the scales add. Zero if the prior stays.

        Raises:
            ValueError: If squares of the data leave the range of the dtype of the parameters.
        """
        if moments.shape[1:] != ((self.dim,) if self.dim else ()):
            return 0.0  # what builds the HMM explains it
        known, mean, variance = moments
        varies = variance.sqrt() > ROUNDING * mean.abs()  # not NaN either
        _check_range(mean[varies], variance[varies], self.prior_loc.dtype)
        if not self.of_data:
            return 0.0
        variance = torch.where(varies, variance, 1.0)
        self.prior_loc = like(self.prior_loc, mean.nan_to_num(0.0))
        numbers = known + self.prior_loc.numel() // max(self.dim, 1)
        return float((numbers * variance.log()).sum()) / 2 + self._set_spread(variance)

    def _set_spread(self, variance: Tensor) -> float:
        """Take the scale of the prior from the variance of each component; returns log-units."""
        raise NotImplementedError


class NormalEmission(CentredEmission, Components, emits=torch_dist.Normal):
    r"""Emission family of vectors whose components are independent and normal in each state.

    The prior is conjugate and weak, and keeps the variance of a state with a single observation
    from shrinking to zero:

    .. math:: \sigma^2_{kd} \sim \mathrm{InvGamma}(a, b_d), \quad
              \mu_{kd} \sim \mathrm{Normal}(m_d, \sigma^2_{kd} / w)

    If neither m nor b is given they are mean and variance of the data of a fit, which sets them
    before its first step, so that the unit of the data does not matter; :func:`scale_priors` does
    the same for NUTS. Until then, and if one of them alone is given, m is 0 and b is 1.

    Sites: ``emission.variance`` ``(K, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        num_states: K.
        dim: D, the number of components of an observation, whose event shape is ``(D,)``. With
            zero, observations are scalars, of an empty event shape.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth.
        concentration: a.
        rate: b, a number or ``(D,)``.
        spherical: Whether a state has one variance: see :func:`normal_spherical`.

    Example:
        >>> data = Sequences.from_list([[[1e10], [3e10]]])
        >>> fit_em(TabularHMM(1, normal(1)), data).parameters["module.emission.loc"].item()
        20000000000.0
    """

    rate: Tensor
    shape: Tensor  # type: ignore[assignment]  # of the prior of the variance
    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "variance": constraints.positive,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int = 1,
        loc: float | Tensor | None = None,
        weight: float = 0.01,
        concentration: float = 2.0,
        rate: float | Tensor | None = None,
        spherical: bool = False,
    ) -> None:
        Emission.__init__(self)
        self.dim = dim
        shape = (num_states, dim) if dim else (num_states,)
        self._add_normals(shape, loc, weight, concentration, rate, spherical)

    def _add_normals(
        self,
        shape: tuple[int, ...],
        loc: float | Tensor | None,
        weight: float,
        concentration: float,
        rate: float | Tensor | None,
        spherical: bool,
    ) -> None:
        """Add means of ``shape``, and variances: one for each row of them if ``spherical``."""
        check_strengths(weight, concentration)
        self.weight, self.spherical = weight, spherical
        self.of_data = loc is None and rate is None
        self.register_buffer("prior_loc", spread("loc", 0.0 if loc is None else loc, shape))
        each = shape[:-1] if spherical else shape
        self.register_buffer("rate", positive("rate", 1.0 if rate is None else rate, each))
        self.register_buffer("shape", torch.full_like(self.rate, concentration))
        self.add_parameters(variance=each, loc=shape)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution: one scale ``(K, 1)`` of vectors is one variance a state."""
        module = cls(
            distribution.batch_shape[0],
            sum(distribution.event_shape),
            spherical=bool(distribution.event_shape) and is_spherical(base),
        )
        module._set_normals(base)
        return module

    @classmethod
    def merged(cls, arguments: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor] | None:
        """Mean and standard deviation of the mixture."""
        loc, scale = averaged(arguments["loc"], weights), arguments["scale"]
        spread = averaged((arguments["loc"] - loc).square(), weights)
        if scale.shape != arguments["loc"].shape:  # one for all components
            spread = spread.mean(-1, keepdim=True)
        return {"loc": loc, "scale": (averaged(scale.square(), weights) + spread).sqrt()}

    def _set_normals(self, base: Any) -> None:
        """Make means and variances points, with the values of a distribution."""
        shape = self.prior_loc.shape
        variance = base.variance[..., 0] if self.spherical else base.variance.expand(shape)
        self.set_points(variance=variance, loc=base.loc.expand(shape))

    def _set_spread(self, variance: Tensor) -> float:
        self.rate = like(self.rate, variance.mean() if self.spherical else variance)
        return float(self.rate.log().sum())

    def variance_prior(self) -> TorchDistribution:
        """Inverse gamma variances."""
        return InverseGamma(self.shape, self.rate)

    def loc_prior(self) -> TorchDistribution:
        """Normal means, given the variances."""
        unit = self.rate.unsqueeze(-1) if self.spherical else self.rate
        prior = Normal(self.prior_loc, (self._wide() / self.weight).sqrt())
        return InUnits(prior, self.prior_loc, unit.sqrt())

    def _wide(self) -> Tensor:
        variance = self.variance
        return variance.unsqueeze(-1) if self.spherical else variance

    def components(self) -> TorchDistribution:
        """Normal components."""
        variance = self._wide()  # read first: the prior of the mean depends on it
        return Normal(self.loc, variance.sqrt())

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """The values about the centre, and their squares."""
        values = values - self.centre
        return {"sums": values, "squares": values.square()}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode of the normal-inverse-gamma posterior."""
        weight, loc, scatter = self._about_means(statistics)
        mode = {"loc": loc + self.centre} if self.is_free("loc") else {}
        if not self.is_free("variance"):
            return mode, []
        count = statistics["known"] + (1.0 if weight else 0.0)
        if self.spherical:
            scatter, count = scatter.sum(-1), count.sum(-1)
        above, below = 0.5 * scatter.clamp(min=0.0), 0.5 * count
        if self.has_prior("variance"):
            above, below = above + self.rate.double(), below + self.shape.double() + 1
            return mode | {"variance": above / below}, []
        mode["variance"] = torch.maximum(above / below, self._floor(statistics))  # NaN stays
        low = mode["variance"] > above / below
        return mode, [] if exceeds((~low).all().byte(), 0) else [floor_note("variance")]

    def _about_means(self, statistics: Statistics) -> tuple[float, Tensor, Tensor]:
        """Weight of the prior mean, posterior means about the centre, squares about the means."""
        known, sums, squares = (statistics[name] for name in ("known", "sums", "squares"))
        prior_loc = self.prior_loc.double() - self.centre
        weight = self.weight if self.has_prior("loc") else 0.0
        loc = (weight * prior_loc + sums) / (weight + known)
        if not self.is_free("loc"):
            loc = (self.loc.double() - self.centre).expand_as(sums)
        scatter = squares - 2 * loc * sums + known * loc**2 + weight * (loc - prior_loc) ** 2
        return weight, loc, scatter.nan_to_num(0.0)  # of a mean without observations

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Variances and means from their normal-inverse-gamma posterior."""
        weight, loc, scatter = self._about_means(statistics)
        samples, known, count = {}, statistics["known"], statistics["known"]
        if self.has_prior("variance"):
            if self.spherical:
                scatter, count = scatter.sum(-1), known.sum(-1)
            above = self.rate.double() + 0.5 * scatter.clamp(min=0.0)
            gammas = torch._standard_gamma(self.shape.double() + 0.5 * count)
            samples["variance"] = variance = above / gammas
        else:
            variance = self.variance.double()
        if self.has_prior("loc"):
            wide = variance.unsqueeze(-1) if self.spherical else variance
            samples["loc"] = torch.normal(loc + self.centre, (wide / (weight + known)).sqrt())
        return samples

    def _floor(self, statistics: Statistics) -> Tensor:
        """Least variances, which broadcast with ``(R, K, ...)``, by moments of all the states."""
        over = tuple(range(1, statistics["sums"].dim() - bool(self.dim)))
        known, sums, squares = (
            statistics[name].sum(over, keepdim=True) for name in ("known", "sums", "squares")
        )
        mean = sums / known
        floor = floor_of(squares / known - mean**2, mean + self.centre, self.prior_loc.dtype)
        return floor.mean(-1) if self.spherical else floor


normal = family("normal", NormalEmission, dim=0)


def normal_spherical(
    dim: int,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | None = None,
) -> EmissionFamily:
    """Emission family of normal vectors with one variance for all the components of a state.

    Priors are those of :func:`normal`.

    Sites: ``emission.variance`` ``(K,)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``; of the data by default, with ``rate``.
        weight: How many observations the prior mean is worth.
        concentration: Of the inverse gamma prior of the variance.
        rate: Of the inverse gamma prior of the variance; by default the mean over components of
            the variance of the data.
    """
    check_size("dim", dim)
    return normal(dim, loc, weight, concentration, rate, spherical=True)


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

    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "weights": constraints.simplex,
        **NormalEmission.supports,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor | None = None,
        weight: float = 0.01,
        concentration: float = 2.0,
        rate: float | Tensor | None = None,
        weights_concentration: float = 1.0,
        spherical: bool = False,
        *,
        num_components: int,
    ) -> None:
        Emission.__init__(self)
        self.dim, self.num_components = dim, num_components
        shape = (num_states, num_components, dim)
        self.register_buffer(
            "concentration", positive("weights_concentration", weights_concentration, shape[:2])
        )
        self.add_parameters(weights=shape[:2])
        self._add_normals(shape, loc, weight, concentration, rate, spherical)

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

    @classmethod
    def merged(cls, arguments: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor] | None:
        """None: a mixture of two is of more components."""
        return None

    def weights_prior(self) -> TorchDistribution:
        """Dirichlet rows."""
        return Dirichlet(self.concentration)

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        weights = self.weights
        return MixtureSameFamily(Categorical(logits=log(weights)), super().forward())

    def augments(self, values: Tensor) -> bool:
        """True: the component of each observation."""
        return True

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Moments for each component, weighted by its probability given state and value."""
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
        """The mode for the moments of each component, and for the weights."""
        values, notes = super().m_step(statistics)
        prior = self.concentration if self.has_prior("weights") else None
        return values | {"weights": row_mode(statistics["counts"], prior)}, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Means and variances of the components, and Dirichlet weights."""
        samples = super().sample_parameters(statistics, current)
        if self.has_prior("weights"):
            samples["weights"] = sample_rows(statistics["counts"] + self.concentration)
        return samples


normal_mixture = family("normal_mixture", MixtureEmission, num_components=1, dim=1)


def _scatter(values: Tensor, weights: Tensor, num_components: int) -> Tensor:
    """First shares ``(R, M, K, C)``: each value goes to the nearest of C values of its state."""
    if len(values) == 0:
        return weights.new_zeros(*weights.shape, num_components)
    filled = torch.where(values.isnan(), values.nanmean(0).nan_to_num(0.0), values)
    shares = []
    for share in weights:
        columns = []
        for column in share.T:
            chance = column[: 2**24] + 1e-9  # more than that torch does not take
            centres = filled[torch.multinomial(chance, num_components, replacement=True)]
            nearest = torch.cdist(filled, centres).argmin(-1)
            columns.append(torch.nn.functional.one_hot(nearest, num_components))
        shares.append(torch.stack(columns, 1))
    return torch.stack(shares).double()


# What normal families share ----------------------------------------------------------------------


def floor_of(spread: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """The least variance without a prior: by that of the data, and by the rounding of ``dtype``."""
    square = mean.nan_to_num(0.0) ** 2
    spread = spread.nan_to_num(0.0)
    square = torch.where((square == 0) & (spread <= 0), 1.0, square)  # all data are zero
    return torch.maximum(SMALLEST * spread, torch.finfo(dtype).eps ** 2 * square)


def floor_note(name: str) -> str:
    """Remark that the parameter ``name`` was held at its floor."""
    return (
        f"a {name} was held at its floor, {SMALLEST:g} of that of the data: a state emits a single "
        "value. A prior, or fewer states, would prevent it."
    )


def like(buffer: Tensor, values: Tensor) -> Tensor:
    """New numbers for a buffer: the old ones are still those of guides of earlier fits."""
    return values.to(buffer).expand(buffer.shape).clone()


def moments_of(values: Tensor) -> Tensor:
    """Number, mean and variance of each component of observations ``(M, *E)``, in float64.

    NaN is missing; a component of which nothing is known has a mean of NaN.
    """
    mean = values.double().nanmean(0)
    variance = (values.double() - mean).square().nanmean(0)
    return torch.stack([(~values.isnan()).sum(0).double(), mean, variance])


def merged(first: Tensor, second: Tensor) -> Tensor:
    """The moments of two sets of observations together (Chan, Golub and LeVeque, 1983)."""
    total = first[0] + second[0]
    share = second[0] / total
    apart = second[1] - first[1]
    mean = first[1] + share * apart
    variance = (1 - share) * first[2] + share * second[2] + share * (1 - share) * apart.square()
    both = torch.stack([total, mean, variance])
    return torch.where(first[0] == 0, second, torch.where(second[0] == 0, first, both))


def scale_prior(emission: Any, moments: Tensor) -> float:
    """:meth:`CentredEmission.scale_prior` of an emission that defines it; zero of others."""
    method = getattr(emission, "scale_prior", None)
    return 0.0 if method is None else method(moments)


def _check_range(mean: Tensor, variance: Tensor, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` holds variances, and shares of them, and tells means apart."""
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
