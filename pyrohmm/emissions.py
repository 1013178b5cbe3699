r"""Emission families: what a state emits, with priors, and what EM needs to know of it.

A family is anything that, called with the number of states K, returns a ``PyroModule`` whose own
call returns a distribution batched over the K states: :func:`categorical`, :func:`normal` and the
others here, or a user's own class.

If the module is an :class:`Emission`, EM maximises in closed form: ``statistics`` adds up what the
observations say, ``maximise`` finds the mode of the posterior of the parameters. Any other module
is maximised by gradient steps. Vectors may be known in part: NaN components are missing.

In shapes, M is the number of observations and R that of restarts, which are fitted side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    Dirichlet,
    Gamma,
    InverseGamma,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
)
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from ._checks import check_integers, check_size
from ._lookup import add_rows
from .distributions import InverseWishart, Streams, Tied, covariance_matrix, known_log_prob

EmissionFamily = Callable[[int], PyroModule]
Statistics = dict[str, Tensor]
SMALLEST = 1e-12  # share of the data's variance that one without a prior never falls below


class Emission(PyroModule):
    """An emission whose M-step has a closed form.

    Subclasses define ``forward()``, ``statistics`` and ``maximise``. A parameter that is neither
    a ``PyroSample`` nor a ``PyroParam`` is frozen: see :func:`pyrohmm.freeze`.

    Attributes:
        spaces: Where each parameter lives, by its name.
    """

    spaces: ClassVar[dict[str, constraints.Constraint]] = {}

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """What the observations say about the parameters: sums over observations.

        Args:
            values: ``(M, *E)``; NaN components are missing.
            weights: ``(R, M, K)``, probability of each state at each observation.
            current: The distribution the weights were computed with, of batch shape ``(K,)`` or
                ``(R, 1, K)``; None at the start.
        """
        raise NotImplementedError(f"{type(self).__name__} must define statistics.")

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """The most probable parameters given the statistics.

        Returns:
            The free parameters by name, each ``(R, ...)``, NaN where no observation and no prior
            says anything; and remarks, such as that a variance was held at its floor.
        """
        raise NotImplementedError(f"{type(self).__name__} must define maximise.")

    def is_free(self, name: str) -> bool:
        """Whether the parameter ``name`` is fitted."""
        return is_free(self, name)

    def has_prior(self, name: str) -> bool:
        """Whether the parameter ``name`` has a prior."""
        return name in self._pyro_samples

    def set_points(self, **values: Tensor) -> None:
        """Make parameters points without priors, with these values."""
        for name, value in values.items():
            if name in self._pyro_samples:
                delattr(self, name)
            setattr(self, name, PyroParam(value.detach().clone(), self.spaces[name]))
            if name == "loc":  # so that sums are taken about it
                self.prior_loc.copy_(value.detach().expand(self.prior_loc.shape))


def is_free(module: PyroModule, name: str) -> bool:
    """Whether the parameter ``name`` of ``module`` itself has a prior, or is a point that moves."""
    if name in module._pyro_params:
        return getattr(module, f"{name}_unconstrained").requires_grad
    return name in module._pyro_samples


# Symbols and counts ------------------------------------------------------------------------------


def categorical(num_symbols: int, concentration: float | Tensor = 1.0) -> EmissionFamily:
    """Emission family of symbols 0 to V - 1, each row with a Dirichlet prior.

    Site: ``emission.probs`` ``(K, V)``.

    Args:
        num_symbols: V.
        concentration: Of the prior; a number, ``(V,)`` or ``(K, V)``. One is flat.
    """
    check_size("num_symbols", num_symbols)
    return partial(CategoricalEmission, num_symbols=num_symbols, concentration=concentration)


class CategoricalEmission(Emission):
    """Symbols with Dirichlet priors: see :func:`categorical`."""

    spaces: ClassVar[dict[str, constraints.Constraint]] = {"probs": constraints.simplex}

    def __init__(
        self, num_states: int, num_symbols: int, concentration: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        shape = (num_states, num_symbols)
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.probs = PyroSample(lambda self: Dirichlet(self.concentration).to_event(1))

    def forward(self) -> TorchDistribution:
        """The distribution of a symbol, batched over states."""
        return Categorical(logits=log(self.probs))

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of times each state emits each symbol."""
        if values.dtype.is_floating_point:  # a stream beside others
            missing = values.isnan()
            weights = weights.masked_fill(missing.unsqueeze(-1), 0.0)
            values = values.masked_fill(missing, 0.0).long()
        size = self.concentration.size(-1)
        counts = [add_rows(each, values.long(), size).mT for each in weights]
        return {"counts": torch.stack(counts)}

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """Shares of the counts, with those of the prior."""
        if not self.is_free("probs"):
            return {}, []
        return {"probs": row_mode(statistics["counts"], self._prior("probs"))}, []

    def _prior(self, name: str) -> Tensor | None:
        return self.concentration if self.has_prior(name) else None


def bernoulli(
    dim: int, concentration1: float | Tensor = 1.0, concentration0: float | Tensor = 1.0
) -> EmissionFamily:
    """Emission family of vectors of D independent zeros and ones, each chance with a Beta prior.

    Observations are floating point, so that single components may be missing (NaN).

    Site: ``emission.probs`` ``(K, D)``, the probabilities of a one.

    Args:
        dim: D.
        concentration1: Of the prior, for ones; a number, ``(D,)`` or ``(K, D)``. One is flat.
        concentration0: The same for zeros.
    """
    check_size("dim", dim)
    return partial(
        BernoulliEmission, dim=dim, concentration1=concentration1, concentration0=concentration0
    )


class BernoulliEmission(Emission):
    """Vectors of zeros and ones: see :func:`bernoulli`."""

    spaces: ClassVar[dict[str, constraints.Constraint]] = {"probs": constraints.unit_interval}

    def __init__(
        self,
        num_states: int,
        dim: int,
        concentration1: float | Tensor = 1.0,
        concentration0: float | Tensor = 1.0,
    ) -> None:
        super().__init__()
        shape = (num_states, dim)
        self.register_buffer("ones", positive("concentration1", concentration1, shape))
        self.register_buffer("zeros", positive("concentration0", concentration0, shape))
        self.probs = PyroSample(lambda self: Beta(self.ones, self.zeros).to_event(2))

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        return Bernoulli(probs=self.probs).to_event(1)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected numbers of ones, and of observations."""
        known, sums, _ = moments(values, weights)
        return {"known": known.expand_as(sums), "ones": sums}

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """Shares of ones, with those of the prior."""
        if not self.is_free("probs"):
            return {}, []
        ones, zeros = statistics["ones"], statistics["known"] - statistics["ones"]
        prior = None
        if self.has_prior("probs"):
            prior = torch.stack([self.ones, self.zeros], -1)
        return {"probs": row_mode(torch.stack([ones, zeros], -1), prior)[..., 0]}, []


def poisson(
    dim: int = 0, concentration: float | Tensor = 1.0, rate: float | Tensor = 0.1
) -> EmissionFamily:
    """Emission family of counts, Poisson in each state, each rate with a Gamma prior.

    The default prior is weak for counts of the order of ten.

    Site: ``emission.rate``, ``(K, D)``, or ``(K,)`` for scalars.

    Args:
        dim: D, the number of independent components; zero stands for scalar observations.
        concentration: Of the prior; a number or ``(D,)``.
        rate: Of the prior, how many observations it is worth; a number or ``(D,)``.
    """
    check_dim(dim)
    return partial(PoissonEmission, dim=dim, concentration=concentration, rate=rate)


class PoissonEmission(Emission):
    """Counts: see :func:`poisson`."""

    spaces: ClassVar[dict[str, constraints.Constraint]] = {"rate": constraints.nonnegative}

    def __init__(
        self,
        num_states: int,
        dim: int = 0,
        concentration: float | Tensor = 1.0,
        rate: float | Tensor = 0.1,
    ) -> None:
        super().__init__()
        shape = (num_states, dim) if dim else (num_states,)
        self.dim = dim
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.register_buffer("weight", positive("rate", rate, shape))
        events = len(shape)
        self.rate = PyroSample(lambda self: Gamma(self.concentration, self.weight).to_event(events))

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        return Poisson(self.rate).to_event(1) if self.dim else Poisson(self.rate)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of observations and sum of counts."""
        known, sums, _ = moments(values if self.dim else values.unsqueeze(-1), weights)
        known = known.expand_as(sums)
        return {"known": known, "sums": sums} if self.dim else {
            "known": known.squeeze(-1), "sums": sums.squeeze(-1)
        }  # fmt: skip

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """Mean counts, with those of the prior."""
        if not self.is_free("rate"):
            return {}, []
        above, below = statistics["sums"], statistics["known"]
        if self.has_prior("rate"):
            check_mode("concentration", self.concentration)
            above, below = above + self.concentration - 1, below + self.weight
        return {"rate": above / below}, []


# Normal vectors ----------------------------------------------------------------------------------


def normal(
    dim: int = 1,
    loc: float | Tensor = 0.0,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | Tensor = 1.0,
) -> EmissionFamily:
    r"""Emission family of vectors whose components are independent and normal in each state.

    The prior is conjugate; the defaults are weak for data of zero mean and unit variance, and
    keep the variance of a state that owns a single point from shrinking to zero:

    .. math:: \sigma^2_{kd} \sim \mathrm{InvGamma}(a, b_d), \quad
              \mu_{kd} \sim \mathrm{Normal}(m_d, \sigma^2_{kd} / w)

    Sites: ``emission.variance`` ``(K, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, the number of components of an observation; the event shape is ``(D,)``. Zero
            stands for scalar observations, with an empty event shape.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth.
        concentration: a.
        rate: b, a number or ``(D,)``.
    """
    check_dim(dim)
    return partial(
        NormalEmission, dim=dim, loc=loc, weight=weight, concentration=concentration, rate=rate
    )


def normal_spherical(
    dim: int,
    loc: float | Tensor = 0.0,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float = 1.0,
) -> EmissionFamily:
    """As :func:`normal`, with one variance for all the components of a state.

    Sites: ``emission.variance`` ``(K,)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``.
        weight: How many observations the prior mean is worth.
        concentration: Of the inverse gamma prior of the variance.
        rate: Of the inverse gamma prior of the variance.
    """
    check_size("dim", dim)
    return partial(
        NormalEmission,
        dim=dim,
        loc=loc,
        weight=weight,
        concentration=concentration,
        rate=rate,
        spherical=True,
    )


def normal_full(
    dim: int,
    loc: float | Tensor = 0.0,
    weight: float = 0.01,
    degrees: float | None = None,
    scale: float | Tensor = 1.0,
) -> EmissionFamily:
    r"""Emission family of normal vectors with a covariance matrix for each state.

    .. math:: \Sigma_k \sim \mathrm{InvWishart}(\nu, \Psi), \quad
              \mu_k \sim \mathrm{Normal}(m, \Sigma_k / w)

    Sites: ``emission.covariance`` ``(K, D, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth.
        degrees: :math:`\nu`, D + 2 by default, with which the prior mean of the covariance is
            :math:`\Psi`.
        scale: :math:`\Psi`, a number (times the identity) or ``(D, D)``.
    """
    check_size("dim", dim)
    return partial(
        CovarianceEmission, dim=dim, loc=loc, weight=weight, degrees=degrees, scale=scale
    )


def normal_tied(
    dim: int,
    loc: float | Tensor = 0.0,
    weight: float = 0.01,
    degrees: float | None = None,
    scale: float | Tensor = 1.0,
) -> EmissionFamily:
    """As :func:`normal_full`, with one covariance matrix ``(D, D)`` for all the states.

    Sites: ``emission.covariance`` ``(D, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``.
        weight: How many observations the prior mean is worth.
        degrees: Of the inverse Wishart prior, D + 2 by default.
        scale: Of the inverse Wishart prior, a number (times the identity) or ``(D, D)``.
    """
    check_size("dim", dim)
    return partial(
        CovarianceEmission,
        dim=dim,
        loc=loc,
        weight=weight,
        degrees=degrees,
        scale=scale,
        tied=True,
    )


def normal_mixture(
    num_components: int,
    dim: int,
    loc: float | Tensor = 0.0,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | Tensor = 1.0,
    weights_concentration: float = 1.0,
) -> EmissionFamily:
    """Emission family of vectors that are a mixture of C normal distributions in each state.

    Components of a vector are independent given the component of the mixture; priors are those of
    :func:`normal`, and a Dirichlet one on the weights.

    Sites: ``emission.weights`` ``(K, C)``, ``emission.variance`` ``(K, C, D)`` and
    ``emission.loc`` ``(K, C, D)``.

    Args:
        num_components: C.
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``.
        weight: How many observations the prior mean is worth.
        concentration: Of the inverse gamma prior of the variance.
        rate: Of the inverse gamma prior of the variance, a number or ``(D,)``.
        weights_concentration: Of the Dirichlet prior of the weights.
    """
    check_size("num_components", num_components)
    check_size("dim", dim)
    return partial(
        MixtureEmission,
        num_components=num_components,
        dim=dim,
        loc=loc,
        weight=weight,
        concentration=concentration,
        rate=rate,
        weights_concentration=weights_concentration,
    )


class NormalEmission(Emission):
    """Independent normal components with a conjugate prior: see :func:`normal`."""

    spaces: ClassVar[dict[str, constraints.Constraint]] = {
        "variance": constraints.positive,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor = 0.0,
        weight: float = 0.01,
        concentration: float = 2.0,
        rate: float | Tensor = 1.0,
        spherical: bool = False,
    ) -> None:
        super().__init__()
        check_strengths(weight, concentration)
        shape = (num_states, dim) if dim else (num_states,)
        self.dim, self.weight, self.spherical = dim, weight, spherical
        self.register_buffer("prior_loc", spread("loc", loc, shape))
        own = (num_states,) if spherical else shape
        self.register_buffer("rate", positive("rate", rate, own))
        self.register_buffer("shape", torch.full_like(self.rate, concentration))
        events = len(shape)
        self.variance = PyroSample(
            lambda self: InverseGamma(self.shape, self.rate).to_event(len(own))
        )
        self.loc = PyroSample(
            lambda self: Normal(self.prior_loc, (self._wide() / self.weight).sqrt()).to_event(
                events
            )
        )

    def _wide(self) -> Tensor:
        variance = self.variance
        if self.spherical:
            variance = variance.unsqueeze(-1).expand(*variance.shape, self.dim)
        return variance

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        variance = self._wide()
        each = Normal(self.loc, variance.sqrt())
        return each.to_event(1) if self.dim else each

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of observations, their sums and sums of squares, about the centre."""
        values = values if self.dim else values.unsqueeze(-1)
        known, sums, squares = moments(values.double() - centre(self), weights)
        return {"known": known.expand_as(sums), "sums": sums, "squares": squares}

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """The mode of the normal-inverse-gamma posterior."""
        return maximise_normal(self, statistics, flat=not self.dim)


class CovarianceEmission(Emission):
    """Normal vectors with covariance matrices: see :func:`normal_full`, :func:`normal_tied`."""

    spaces: ClassVar[dict[str, constraints.Constraint]] = {
        "covariance": covariance_matrix,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor = 0.0,
        weight: float = 0.01,
        degrees: float | None = None,
        scale: float | Tensor = 1.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        check_strengths(weight, 1.0)
        self.dim, self.weight, self.tied = dim, weight, tied
        self.degrees = dim + 2.0 if degrees is None else float(degrees)
        self.register_buffer("prior_loc", spread("loc", loc, (num_states, dim)))
        matrix = torch.as_tensor(scale, dtype=self.prior_loc.dtype)
        if matrix.dim() == 0:
            matrix = matrix * torch.eye(dim)
        proper = matrix.shape == (dim, dim) and torch.equal(matrix, matrix.mT)
        if not proper or bool(torch.linalg.cholesky_ex(matrix)[1]):
            raise ValueError(
                f"scale must be a positive number or a positive definite matrix ({dim}, {dim}); "
                f"got {tuple(matrix.shape)}."
            )
        self.register_buffer("scale", matrix)
        InverseWishart(self.degrees, matrix)  # complains of degrees
        batch = () if tied else (num_states,)
        self.covariance = PyroSample(
            lambda self: InverseWishart(self.degrees, self.scale.expand(*batch, dim, dim)).to_event(
                len(batch)
            )
        )
        self.loc = PyroSample(
            lambda self: MultivariateNormal(self.prior_loc, self._wide() / self.weight).to_event(1)
        )

    def _wide(self) -> Tensor:
        covariance = self.covariance
        return covariance.unsqueeze(-3) if self.tied else covariance

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        covariance = self._wide()
        return MultivariateNormal(self.loc, covariance)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of observations, sum, and sum of outer products.

        Missing components are those expected given the known ones and the state (Dempster, Laird
        and Rubin, 1977), with their covariance; at the start, when nothing is known of the state,
        the means of what is known.
        """
        weights = weights.double()
        count = weights.sum(1)
        missing = values.isnan()
        if not bool(missing.any()):
            values = values.double() - centre(self)
            sums = weights.mT @ values
            squares = torch.einsum("rmk,md,me->rkde", weights, values, values)
        elif current is None:
            mean = values.double().nanmean(0).nan_to_num(0.0)
            filled = torch.where(missing, mean, values.double())
            return self.statistics(filled, weights, None)
        else:
            sums, squares = _completed(values, weights, current, centre(self))
        return {"count": count, "sums": sums, "squares": squares}

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """The mode of the normal-inverse-Wishart posterior."""
        count, sums, squares = (statistics[each] for each in ("count", "sums", "squares"))
        found: dict[str, Tensor] = {}
        notes: list[str] = []
        prior_loc = self.prior_loc.double() - centre(self)
        weight = self.weight if self.has_prior("loc") else 0.0
        if self.is_free("loc"):
            loc = (weight * prior_loc + sums) / (weight + count).unsqueeze(-1)
            found["loc"] = loc + centre(self)
        else:
            loc = (self.loc.double() - centre(self)).expand_as(sums)
        if self.is_free("covariance"):
            cross = loc.unsqueeze(-1) * sums.unsqueeze(-2)
            outer = loc.unsqueeze(-1) * loc.unsqueeze(-2)
            scatter = squares - cross - cross.mT + count[..., None, None] * outer
            apart = loc - prior_loc
            scatter = scatter + weight * apart.unsqueeze(-1) * apart.unsqueeze(-2)
            scatter = scatter.nan_to_num(0.0)  # a mean of which nothing is known
            divisor = count + (1.0 if weight else 0.0)
            if self.tied:
                scatter, divisor = scatter.sum(1), divisor.sum(1)
            if self.has_prior("covariance"):
                scatter = scatter + self.scale.double()
                divisor = divisor + self.degrees + self.dim + 1
            matrix = scatter / divisor[..., None, None]
            dtype = self.prior_loc.dtype
            # what cannot be told from a singular matrix has no inverse
            floor = 8 * torch.finfo(dtype).eps * matrix.diagonal(dim1=-2, dim2=-1)
            if not self.has_prior("covariance"):
                total = squares.sum(1).diagonal(dim1=-2, dim2=-1) / count.sum(1, keepdim=True)
                mean = sums.sum(1) / count.sum(1, keepdim=True)
                least = floor_of(total - mean**2, mean + centre(self), dtype)  # (R, D)
                least = least.reshape(len(least), *(1,) * (matrix.dim() - 3), -1)
                floor = torch.maximum(floor, least)
            matrix, low = _lift(matrix, floor)
            if bool(low.any()):
                singular = (
                    f"a covariance was as good as singular in {dtype}: components are almost "
                    "functions of each other. Drop some, or compute in float64."
                )
                notes.append(
                    singular if self.has_prior("covariance") else _floor_note("covariance")
                )
            found["covariance"] = matrix
        return found, notes


class MixtureEmission(Emission):
    """Mixtures of normal vectors in each state: see :func:`normal_mixture`."""

    spaces: ClassVar[dict[str, constraints.Constraint]] = {
        "weights": constraints.simplex,
        "variance": constraints.positive,
        "loc": constraints.real,
    }

    def __init__(
        self,
        num_states: int,
        num_components: int,
        dim: int,
        loc: float | Tensor = 0.0,
        weight: float = 0.01,
        concentration: float = 2.0,
        rate: float | Tensor = 1.0,
        weights_concentration: float = 1.0,
    ) -> None:
        super().__init__()
        check_strengths(weight, concentration)
        self.dim, self.weight, self.spherical = dim, weight, False
        self.num_components = num_components
        shape = (num_states, num_components, dim)
        self.register_buffer("prior_loc", spread("loc", loc, shape))
        self.register_buffer("rate", positive("rate", rate, shape))
        self.register_buffer("shape", torch.full_like(self.rate, concentration))
        self.register_buffer(
            "concentration", positive("weights_concentration", weights_concentration, shape[:2])
        )
        self.weights = PyroSample(lambda self: Dirichlet(self.concentration).to_event(1))
        self.variance = PyroSample(lambda self: InverseGamma(self.shape, self.rate).to_event(3))
        self.loc = PyroSample(
            lambda self: Normal(self.prior_loc, (self.variance / self.weight).sqrt()).to_event(3)
        )

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        weights, variance = self.weights, self.variance
        return MixtureSameFamily(
            Categorical(logits=log(weights)), Normal(self.loc, variance.sqrt()).to_event(1)
        )

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Moments for each component, weighted by its probability given state and value."""
        if current is None or len(values) == 0:
            shares = _scatter(values, weights, self.num_components)
        else:
            parts = known_log_prob(current.component_distribution, values[:, None, None])
            logits = parts + current.mixture_distribution.logits
            shares = logits.softmax(-1)  # ([R,] M, K, C)
        each = weights.double().unsqueeze(-1) * shares  # (R, M, K, C)
        known, sums, squares = moments(values.double() - centre(self), each.flatten(2))
        shape = each.sum(1).shape + values.shape[-1:]  # (R, K, C, D)
        return {
            "counts": each.sum(1),
            "known": known.expand_as(sums).reshape(shape),
            "sums": sums.reshape(shape),
            "squares": squares.reshape(shape),
        }

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """The mode for the moments of each component, and for the weights."""
        found, notes = maximise_normal(self, statistics, flat=False)
        if self.is_free("weights"):
            prior = self.concentration if self.has_prior("weights") else None
            found["weights"] = row_mode(statistics["counts"], prior)
        return found, notes


# Families made of others -------------------------------------------------------------------------


def streams(*families: EmissionFamily) -> EmissionFamily:
    """Emission family of several observations at once, independent given the state.

    Observations are vectors of floating point, in which each family has its own components: see
    :class:`pyrohmm.distributions.Streams`. What a stream does not say at a step is NaN.

    Sites: those of the families, as ``emission.parts.0.…``, ``emission.parts.1.…``.

    Example:
        >>> module = streams(categorical(4), normal(2))(3)
        >>> module().event_shape
        torch.Size([3])
    """
    if not families:
        raise ValueError("families is empty; wanted at least one emission family.")
    return partial(StreamsEmission, families=families)


class StreamsEmission(Emission):
    """Several observations at once: see :func:`streams`."""

    def __init__(self, num_states: int, families: tuple[EmissionFamily, ...]) -> None:
        super().__init__()
        self.parts = PyroModule[torch.nn.ModuleList]([family(num_states) for family in families])
        for part in self.parts:
            if not isinstance(part, Emission):
                raise TypeError(
                    "families of streams must have a closed M-step; got "
                    f"{type(part).__name__}. Write one PyroModule that returns a Streams."
                )

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        return Streams([part() for part in self.parts])

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Those of each part, under its name."""
        with torch.no_grad():
            joined = self.forward() if current is None else current
        return {
            f"parts.{i}.{name}": value
            for i, (part, piece) in enumerate(zip(self.parts, joined.split(values)))
            for name, value in _stream_statistics(
                part, piece, weights, None if current is None else current.parts[i]
            ).items()
        }

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """Each part by itself."""
        found: dict[str, Tensor] = {}
        notes: list[str] = []
        for i, part in enumerate(self.parts):
            begin = f"parts.{i}."
            own = {
                name.removeprefix(begin): value
                for name, value in statistics.items()
                if name.startswith(begin)
            }
            values, remarks = part.maximise(own)
            found |= {begin + name: value for name, value in values.items()}
            notes += remarks
        return found, notes


def _stream_statistics(
    part: Emission, values: Tensor, weights: Tensor, current: TorchDistribution | None
) -> Statistics:
    """Statistics of one stream; where all of it is missing, the step does not count for it."""
    if values.dim() > 1 and isinstance(part, MixtureEmission | CovarianceEmission):
        absent = values.isnan().all(-1)
        values = values.masked_fill(absent.unsqueeze(-1), 0.0)
        weights = weights.masked_fill(absent.unsqueeze(-1), 0.0)
    return part.statistics(values, weights, current)


def tied(family: EmissionFamily, index: Tensor | list[int]) -> EmissionFamily:
    """Emission family in which states share emissions: state k has number ``index[k]``.

    Sites: those of ``family``, for as many states as there are distinct emissions.

    Args:
        family: Called with the number of distinct emissions.
        index: ``(K,)`` integers from 0, all of them used.

    Example:
        >>> tied(categorical(4), [0, 0, 1])(3)().batch_shape
        torch.Size([3])
    """
    numbers = torch.as_tensor(index)
    check_integers("index", numbers)
    if numbers.dim() != 1 or sorted(set(numbers.tolist())) != list(range(int(numbers.max()) + 1)):
        raise ValueError(
            f"index must be (K,) integers that use all numbers from 0; got {numbers.tolist()}."
        )
    return partial(TiedEmission, family=family, index=numbers)


class TiedEmission(Emission):
    """States that share emissions: see :func:`tied`."""

    def __init__(self, num_states: int, family: EmissionFamily, index: Tensor) -> None:
        super().__init__()
        if len(index) != num_states:
            raise ValueError(f"index must have one entry for each of K = {num_states} states; "
                             f"got {len(index)}.")  # fmt: skip
        self.register_buffer("index", index.long())
        self.num_distinct = int(index.max()) + 1
        part = family(self.num_distinct)
        if not isinstance(part, Emission):
            raise TypeError(f"family must have a closed M-step; got {type(part).__name__}.")
        self.part = part

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        return Tied(self.part(), self.index)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Those of the distinct emissions."""
        weights = weights.double()
        member = torch.nn.functional.one_hot(self.index, self.num_distinct).to(weights)
        inner = None if current is None else current.base
        found = self.part.statistics(values, weights @ member, inner)
        return {f"part.{name}": value for name, value in found.items()}

    def maximise(self, statistics: Statistics) -> tuple[dict[str, Tensor], list[str]]:
        """Those of the distinct emissions."""
        own = {name.removeprefix("part."): value for name, value in statistics.items()}
        found, notes = self.part.maximise(own)
        return {f"part.{name}": value for name, value in found.items()}, notes


def parametric(distribution: Any) -> EmissionFamily:
    """Emission family of any distribution batched over K states: its arguments, without priors.

    They start at the values given, and are fitted by maximum likelihood; EM takes gradient steps.

    Example:
        >>> from pyro.distributions import VonMises
        >>> family = parametric(VonMises(torch.tensor([0.0, 1.0]), torch.ones(2)))
        >>> family(2)().batch_shape
        torch.Size([2])
    """

    def family(num_states: int) -> PyroModule:
        if tuple(distribution.batch_shape) != (num_states,):
            raise ValueError(
                f"distribution must have batch shape (K,) = ({num_states},); got "
                f"{tuple(distribution.batch_shape)}."
            )
        return PointEmission(distribution)

    return family


class PointEmission(PyroModule):
    """The emission of a given distribution, its arguments as parameters without priors.

    Arguments that are counts, such as ``total_count`` of a binomial, stay as they are.

    Raises:
        TypeError: If the distribution is not determined by tensors that its class names in
            ``arg_constraints``, as mixtures of others are not.

    Example:
        >>> emission = PointEmission(Normal(torch.zeros(3), torch.ones(3)))
        >>> sorted(name for name, _ in emission.named_parameters())
        ['loc_unconstrained', 'scale_unconstrained']
    """

    def __init__(self, distribution: Any) -> None:
        super().__init__()
        self.events = 0
        while isinstance(distribution, torch.distributions.Independent):
            self.events += distribution.reinterpreted_batch_ndims
            distribution = distribution.base_dist
        self.family = type(distribution)
        self.names = tuple(
            name
            for name in self.family.arg_constraints
            if not any(name in same[1:] and same[0] in self.family.arg_constraints
                       for same in _SAME)
        )  # fmt: skip
        for name in self.names:
            value = getattr(distribution, name)
            constraint: Any = self.family.arg_constraints[name]
            if constraint.is_discrete:
                self.register_buffer(name, torch.as_tensor(value).detach().clone())
            else:
                setattr(self, name, PyroParam(value.detach().clone(), constraint))
        try:
            again = self.forward()
        except Exception as error:
            raise TypeError(
                f"emission {self.family.__name__} cannot be built from its arguments "
                f"{self.names}. Write a PyroModule that returns it."
            ) from error
        shape = again.batch_shape + again.event_shape
        if shape[: len(distribution.batch_shape)] != distribution.batch_shape:
            raise TypeError(f"emission {self.family.__name__} has arguments that are not tensors.")

    def forward(self) -> TorchDistribution:
        """The distribution with the parameters as they are now."""
        given = {name: getattr(self, name) for name in self.names}
        if issubclass(self.family, torch.distributions.Categorical):
            given = {"logits": log(given["probs"])}
        built = self.family(**given)
        return built.to_event(self.events) if self.events else built


_SAME = (  # arguments that say the same: the first is kept
    ("probs", "logits"),
    ("scale_tril", "covariance_matrix", "precision_matrix"),
)


def of(distribution: Any) -> PyroModule:
    """The emission module with the values of ``distribution`` as points, without priors.

    One with a closed M-step where there is one for the distribution, else a
    :class:`PointEmission`.

    Example:
        >>> type(of(Poisson(torch.tensor([1.0, 5.0])))).__name__
        'PoissonEmission'
    """
    events = len(distribution.event_shape)
    base = distribution
    while isinstance(base, torch.distributions.Independent):
        base = base.base_dist
    dim = distribution.event_shape[0] if events == 1 else 0
    own = distribution.batch_shape + distribution.event_shape
    module: Emission | None = None
    if isinstance(distribution, Streams):
        parts = [of(part) for part in distribution.parts]
        closed = all(isinstance(part, Emission) for part in parts)
        if closed:
            built = iter(parts)
            return StreamsEmission(0, tuple(lambda _: next(built) for _ in parts))
    elif isinstance(distribution, Tied):
        inner = of(distribution.base)
        if isinstance(inner, Emission):
            module = TiedEmission(len(distribution.index), lambda _: inner, distribution.index)
            module.num_distinct = distribution.base.batch_shape[-1]  # some perhaps unused
            return module
    elif len(distribution.batch_shape) != 1 or events > 1:
        pass
    elif isinstance(base, torch.distributions.Categorical) and not events:
        module = CategoricalEmission(*base.probs.shape)
        module.set_points(probs=base.probs)
    elif isinstance(base, torch.distributions.Bernoulli) and events:
        module = BernoulliEmission(*own)
        module.set_points(probs=base.probs)
    elif isinstance(base, torch.distributions.Poisson):
        module = PoissonEmission(own[0], dim)
        module.set_points(rate=base.rate.expand(own))
    elif isinstance(base, torch.distributions.Normal):
        module = NormalEmission(own[0], dim)
        module.set_points(variance=base.variance.expand(own), loc=base.loc.expand(own))
    elif isinstance(base, torch.distributions.MultivariateNormal):
        module = CovarianceEmission(own[0], dim)
        covariance = base.covariance_matrix.expand(own + own[-1:])
        module.set_points(covariance=covariance, loc=base.loc.expand(own))
    elif isinstance(base, torch.distributions.MixtureSameFamily) and events:
        part = base.component_distribution
        inner = getattr(part, "base_dist", None)
        if isinstance(inner, torch.distributions.Normal) and len(part.event_shape) == 1:
            shape = part.batch_shape + part.event_shape
            module = MixtureEmission(shape[0], shape[1], shape[2])
            module.set_points(
                weights=base.mixture_distribution.probs.expand(shape[:2]),
                variance=inner.variance.expand(shape),
                loc=inner.loc.expand(shape),
            )
    if module is None:
        return PointEmission(distribution)
    return module.to(next(iter(module.parameters())).device)


# What M-steps share ------------------------------------------------------------------------------


def row_mode(counts: Tensor, concentration: Tensor | None) -> Tensor:
    """Mode of rows of probabilities ``(*, V)`` given counts and a Dirichlet prior, if any.

    Raises:
        ValueError: If a concentration is below one, for then there is no mode.
    """
    counts = counts.double()
    if concentration is not None:
        check_mode("concentration", concentration)
        counts = counts + (concentration - 1)
    return counts / counts.sum(-1, keepdim=True)


def check_mode(name: str, concentration: Tensor) -> None:
    """Raise at concentrations below one, with which a density has no maximum."""
    if bool((concentration < 1).any()):
        raise ValueError(
            f"{name} below one has no most probable value, which EM looks for; got "
            f"{concentration.min().item():g}. Use fit_svi, or a {name} of at least one."
        )


def moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted counts, sums and sums of squares of the components that are known, in float64.

    Args:
        values: ``(M, D)``; NaN is missing.
        weights: ``(R, M, K)``.

    Returns:
        ``(R, K, 1)`` or, if some are missing, ``(R, K, D)``; ``(R, K, D)``; ``(R, K, D)``.
    """
    weights = weights.double().mT  # (R, K, M)
    values = values.double()
    known = ~values.isnan()
    if bool(known.all()):
        count = weights.sum(-1, keepdim=True)
    else:
        count = weights @ known.double()
        values = values.masked_fill(~known, 0.0)
    return count, weights @ values, weights @ values.square()


def maximise_normal(
    part: Any, statistics: Statistics, flat: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """The mode of ``loc`` and ``variance`` of independent normal components.

    Args:
        part: The module: its priors, and what of it is frozen.
        statistics: ``known``, ``sums`` and ``squares``, ``(R, K, ..., D)``.
        flat: Whether observations are scalars, so that D = 1 is to be dropped.
    """
    known, sums, squares = (statistics[name] for name in ("known", "sums", "squares"))
    if flat:
        known, sums, squares = (each.squeeze(-1) for each in (known, sums, squares))
    found: dict[str, Tensor] = {}
    notes: list[str] = []
    middle = centre(part).squeeze(-1) if flat else centre(part)
    prior_loc = part.prior_loc.double() - middle
    weight = part.weight if part.has_prior("loc") else 0.0
    if part.is_free("loc"):
        loc = (weight * prior_loc + sums) / (weight + known)
        found["loc"] = loc + middle
    else:
        loc = (part.loc.double() - middle).expand_as(sums)
    if part.is_free("variance"):
        scatter = squares - 2 * loc * sums + known * loc**2 + weight * (loc - prior_loc) ** 2
        scatter = scatter.nan_to_num(0.0)  # a mean of which nothing is known
        count = known + (1.0 if weight else 0.0)
        if part.spherical:
            scatter, count = scatter.sum(-1), count.sum(-1)
        above, below = 0.5 * scatter.clamp(min=0.0), 0.5 * count
        if part.has_prior("variance"):
            above, below = above + part.rate.double(), below + part.shape.double() + 1
        variance = above / below
        if not part.has_prior("variance"):
            over = tuple(range(1, known.dim() - (0 if flat else 1)))  # all but restart, component
            mean = sums.sum(over) / known.sum(over)
            spread = squares.sum(over) / known.sum(over) - mean**2
            floor = floor_of(spread, mean + middle, part.prior_loc.dtype)
            if part.spherical:
                floor = floor.mean(-1)
            shape = (len(floor),) + (1,) * (variance.dim() - floor.dim()) + floor.shape[1:]
            held = torch.maximum(variance, floor.reshape(shape))  # NaN stays
            if bool((held > variance).any()):
                notes.append(_floor_note("variance"))
            variance = held
        found["variance"] = variance
    return found, notes


def centre(part: Any) -> Tensor:
    """What sums are taken about, ``(D,)``: squares of numbers far from zero would cancel."""
    loc = part.prior_loc.double()
    return loc.reshape(-1, max(part.dim, 1)).mean(0)


def floor_of(spread: Tensor, mean: Tensor, dtype: torch.dtype) -> Tensor:
    """The least variance without a prior: of the data's, and of what ``dtype`` can tell apart."""
    rounding = torch.finfo(dtype).eps ** 2 * (1 + mean.nan_to_num(0.0) ** 2)
    return torch.maximum(SMALLEST * spread.nan_to_num(0.0), rounding)


def _floor_note(name: str) -> str:
    return (
        f"a {name} was held at its floor, {SMALLEST:g} of that of the data: a state has come to "
        "stand for a single value. A prior, or fewer states, would prevent it."
    )


def _lift(matrix: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """Raise eigenvalues, in units of the floor of each component, to at least one.

    Args:
        matrix: ``(*, D, D)``; where it is NaN it stays.
        floor: ``(*, D)``, least variance of each component.
    """
    unit = floor.sqrt()
    scale = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    inside = matrix / scale
    bad = ~inside.isfinite().all(-1).all(-1)
    eye = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
    values, vectors = torch.linalg.eigh(torch.where(bad[..., None, None], eye, inside))
    low = (values < 1).any(-1) & ~bad
    lifted = (vectors * values.clamp(min=1).unsqueeze(-2)) @ vectors.mT * scale
    return torch.where(low[..., None, None], lifted, matrix), low


def _completed(
    values: Tensor, weights: Tensor, current: Any, about: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums and sums of outer products ``(R, K, D[, D])``, missing components as expected."""
    dim = values.size(-1)
    restarts, _, states = weights.shape
    values, loc = values.double() - about, current.loc.double() - about
    loc = loc.reshape(-1, *loc.shape[-2:]).expand(restarts, states, dim)
    matrix = current.covariance_matrix.double()
    matrix = matrix.reshape(-1, *matrix.shape[-3:]).expand(restarts, states, dim, dim)
    missing = values.isnan()
    sums, squares = torch.zeros_like(loc), torch.zeros_like(matrix)
    for pattern in missing.unique(dim=0):
        here = (missing == pattern).all(-1)
        share, seen = weights[:, here], values[here]  # (R, m, K), (m, D)
        known, absent = (~pattern).nonzero().squeeze(-1), pattern.nonzero().squeeze(-1)
        whole = seen.nan_to_num(0.0).expand(restarts, states, -1, dim).clone()  # (R, K, m, D)
        extra = torch.zeros_like(matrix)
        if len(absent):
            inner = matrix[..., known.unsqueeze(-1), known]
            across = matrix[..., absent.unsqueeze(-1), known]
            slope = torch.linalg.solve(inner, across.mT).mT if len(known) else across
            residual = seen[:, known] - loc[..., known].unsqueeze(-2)
            whole[..., absent] = loc[..., absent].unsqueeze(-2) + residual @ slope.mT
            left = matrix[..., absent.unsqueeze(-1), absent] - slope @ across.mT
            extra[..., absent.unsqueeze(-1), absent] = left
        weighted = share.mT.unsqueeze(-1) * whole
        sums = sums + weighted.sum(-2)
        squares = squares + weighted.mT @ whole + share.sum(1)[..., None, None] * extra
    return sums, squares


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


def log(probs: Tensor) -> Tensor:
    """Logarithm whose gradient at zero is zero: a hard zero stays what it is, and makes no NaN."""
    zero = probs == 0
    return probs.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


def spread(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a floating-point tensor of ``shape``."""
    own = isinstance(value, Tensor) and value.dtype.is_floating_point
    tensor = torch.as_tensor(value, dtype=None if own else torch.get_default_dtype())
    try:
        return tensor.expand(shape).clone()
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number or have a shape that broadcasts to {shape}; got "
            f"{tuple(tensor.shape)}."
        ) from None


def positive(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a positive tensor of ``shape``."""
    tensor = spread(name, value, shape)
    if not bool((tensor > 0).all()):
        raise ValueError(f"{name} must be positive; got a smallest value of {tensor.min().item()}.")
    return tensor


def check_strengths(weight: float, concentration: float) -> None:
    """Raise unless both are positive."""
    if not min(weight, concentration) > 0:
        raise ValueError(
            f"weight and concentration must be positive; got {weight} and {concentration}."
        )


def check_dim(dim: int) -> None:
    """Raise unless ``dim`` is a whole number of at least 0."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int; got {type(dim).__name__}.")
    if dim < 0:
        raise ValueError(f"dim must be at least 0 (scalars); got {dim}.")
