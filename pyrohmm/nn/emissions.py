r"""Emission families: the distribution of an observation in each state, with priors.

A family is a function of the number of states K that returns a ``PyroModule`` whose own call
returns a distribution batched over the K states: :func:`categorical`, :func:`normal` and the
others here, or a user's own class. A module with the two methods of
:class:`pyrohmm.nn.closed_form.EmissionMStep` is maximised in closed form by EM, any other by
gradient steps. Vectors may be observed in part: NaN components are missing.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import Bernoulli, Beta, Categorical, Dirichlet, Gamma, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..distributions.context_tables import AutoregressiveCategorical
from ..distributions.observation import Streams, Tied, is_spherical, is_tied
from ..distributions.vector_autoregression import AutoregressiveNormal
from ..ops.log_space import log
from ..ops.lookup import add_rows
from .autoregressive import autoregressive_from
from .circular import VonMisesEmission
from .closed_form import EmissionMStep, Maximum, Statistics, check_mode, row_mode, sample_rows
from .composed import StreamsEmission, TiedEmission
from .family import Emission, EmissionFamily, moments, positive
from .mixtures import MixtureEmission
from .normals import CovarianceEmission, NormalEmission

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

    supports: ClassVar[dict[str, constraints.Constraint]] = {"probs": constraints.simplex}

    def __init__(
        self, num_states: int, num_symbols: int, concentration: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        shape = (num_states, num_symbols)
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.set_priors(probs=CategoricalEmission._prior)

    def _prior(self) -> TorchDistribution:
        return Dirichlet(self.concentration).to_event(1)

    def forward(self) -> TorchDistribution:
        """The distribution of a symbol, batched over states."""
        return Categorical(logits=log(self.probs))

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of times each state emits each symbol."""
        size = self.concentration.size(-1)
        counts = [add_rows(weight, values.long(), size).mT for weight in weights]
        return {"counts": torch.stack(counts)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Shares of the counts, with those of the prior."""
        if not self.is_free("probs"):
            return {}, []
        prior = self.concentration if self.has_prior("probs") else None
        return {"probs": row_mode(statistics["counts"], prior)}, []

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Rows from their Dirichlet posteriors."""
        if not self.has_prior("probs"):
            return {}
        return {"probs": sample_rows(statistics["counts"] + self.concentration)}


def bernoulli(
    dim: int, concentration1: float | Tensor = 1.0, concentration0: float | Tensor = 1.0
) -> EmissionFamily:
    """Emission family of vectors of D independent zeros and ones, with Beta priors.

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

    supports: ClassVar[dict[str, constraints.Constraint]] = {"probs": constraints.unit_interval}

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
        self.set_priors(probs=BernoulliEmission._prior)

    def _prior(self) -> TorchDistribution:
        return Beta(self.ones, self.zeros).to_event(2)

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        return Bernoulli(probs=self.probs).to_event(1)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected numbers of ones, and of observations."""
        known, sums, _ = moments(values, weights)
        return {"known": known.expand_as(sums), "ones": sums}

    def m_step(self, statistics: Statistics) -> Maximum:
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
        dim: D, the number of independent components; with zero, observations are scalars.
        concentration: Of the prior; a number or ``(D,)``.
        rate: Of the prior, how many observations it is worth; a number or ``(D,)``.
    """
    check_size("dim", dim, 0)
    return partial(PoissonEmission, dim=dim, concentration=concentration, rate=rate)


class PoissonEmission(Emission):
    """Counts: see :func:`poisson`."""

    supports: ClassVar[dict[str, constraints.Constraint]] = {"rate": constraints.nonnegative}

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
        self.set_priors(rate=PoissonEmission._prior)

    def _prior(self) -> TorchDistribution:
        return Gamma(self.concentration, self.weight).to_event(self.concentration.dim())

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        return Poisson(self.rate).to_event(1) if self.dim else Poisson(self.rate)

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Expected number of observations and sum of counts."""
        known, sums, _ = moments(values if self.dim else values.unsqueeze(-1), weights)
        counts = {"known": known.expand_as(sums), "sums": sums}
        return counts if self.dim else {name: count.squeeze(-1) for name, count in counts.items()}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Mean counts, with those of the prior."""
        if not self.is_free("rate"):
            return {}, []
        above, below = statistics["sums"], statistics["known"]
        if self.has_prior("rate"):
            check_mode("concentration", self.concentration)
            above, below = above + self.concentration - 1, below + self.weight
        return {"rate": above / below}, []


# Any distribution ---------------------------------------------------------------------------------


def parametric(distribution: Any) -> EmissionFamily:
    """Emission family of any distribution batched over K states: its arguments, without priors.

    They start at their values, and are fitted by maximum likelihood; EM takes gradient steps.

    Example:
        >>> from pyro.distributions import VonMises
        >>> family = parametric(VonMises(torch.tensor([0.0, 1.0]), torch.ones(2)))
        >>> family(2)().batch_shape
        torch.Size([2])
    """
    return partial(_of_points, distribution=distribution)


def _of_points(num_states: int, distribution: Any) -> PyroModule:
    if tuple(distribution.batch_shape) != (num_states,):
        raise ValueError(
            f"distribution must have batch shape (K,) = ({num_states},); got "
            f"{tuple(distribution.batch_shape)}."
        )
    return PointEmission(distribution)


class PointEmission(PyroModule):
    """The emission of any distribution, its arguments as parameters without priors.

    Arguments that are counts, such as ``total_count`` of a binomial, and those that are no
    parameters, such as a temperature, stay as they are.

    Raises:
        TypeError: If the distribution is not determined by its arguments, as mixtures of others are
            not, or if its support depends on its parameters, as that of a uniform distribution,
            which gradient steps cannot fit.

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
        _check_support(distribution)
        try:
            self._take(distribution)
            same = bool(self._pyro_params) and _agree(distribution, self._build())
        except Exception as error:
            raise TypeError(
                f"emission {self.family.__name__} cannot be built from its arguments. Write a "
                "PyroModule that returns it."
            ) from error
        if not same:
            raise TypeError(
                f"emission {self.family.__name__} has arguments that are not its parameters. Write "
                "a PyroModule that returns it."
            )

    def _take(self, distribution: Any) -> None:
        """Make the arguments of a distribution parameters or constants."""
        known = distribution.arg_constraints
        other = {name for same in _SAME for name in same[1:] if same[0] in known}
        self.names = tuple(name for name in known if name not in other)
        for name in self.names:
            value, constraint = getattr(distribution, name), known[name]
            if constraint.is_discrete:
                self.register_buffer(name, torch.as_tensor(value).detach().clone())
            else:
                setattr(self, name, PyroParam(value.detach().clone(), constraint))
        for name in inspect.signature(self.family.__init__).parameters:
            if name not in (*known, "validate_args") and hasattr(distribution, name):
                value = getattr(distribution, name)
                if isinstance(value, Tensor):
                    self.register_buffer(name, value.detach().clone())
                else:
                    setattr(self, name, value)
                self.names += (name,)

    def forward(self) -> TorchDistribution:
        """The distribution with the parameters as they are now."""
        built = self._build()
        return built.to_event(self.events) if self.events else built

    def _build(self) -> Any:
        arguments = {name: getattr(self, name) for name in self.names}
        if self.family in _CATEGORICAL:
            arguments = {"logits": log(arguments["probs"])}
        return self.family(**arguments)


_SAME = (  # alternative arguments of one distribution: the first is kept
    ("probs", "logits"),
    ("scale_tril", "covariance_matrix", "precision_matrix"),
    ("gate", "gate_logits"),
)
_CATEGORICAL = (Categorical, torch.distributions.Categorical)


def _check_support(distribution: Any) -> None:
    """Raise if the support of a distribution depends on what would be fitted."""
    support = distribution.support
    bounds = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
    if not support.is_discrete and any(isinstance(bound, Tensor) for bound in bounds):
        raise TypeError(
            f"emission {type(distribution).__name__} has a support that depends on its parameters, "
            "which gradient steps cannot fit. Write a PyroModule that returns it, with constant "
            "bounds."
        )


def _agree(one: Any, other: Any) -> bool:
    """Whether two distributions give a sample of the first the same probability."""
    if (one.batch_shape, one.event_shape) != (other.batch_shape, other.event_shape):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        values = one.sample()
        scores = one.log_prob(values), other.log_prob(values)
    return torch.allclose(*scores, rtol=1e-3, atol=1e-3, equal_nan=True)


def from_distribution(distribution: Any) -> PyroModule:
    """The emission module with the values of ``distribution`` as points, without priors.

    One with a closed M-step where there is one for the distribution, else a
    :class:`PointEmission`.

    What stands for several is one parameter: the scale ``(K, 1)`` of a normal vector is one
    variance for each state, as of :func:`pyrohmm.nn.normals.normal_spherical`, and one covariance
    ``(D, D)`` for all states stays one, as of :func:`pyrohmm.nn.normals.normal_tied`.

    Example:
        >>> type(from_distribution(Poisson(torch.tensor([1.0, 5.0])))).__name__
        'PoissonEmission'
    """
    events = len(distribution.event_shape)
    base = distribution
    while isinstance(base, torch.distributions.Independent):
        base = base.base_dist
    dim = distribution.event_shape[0] if events == 1 else 0
    shape = distribution.batch_shape + distribution.event_shape
    module: Emission | None = None
    if isinstance(distribution, Streams):
        parts = [from_distribution(part) for part in distribution.parts]
        if all(isinstance(part, EmissionMStep) for part in parts):
            built = iter(parts)
            return StreamsEmission(0, tuple(lambda _: next(built) for _ in parts))
    elif isinstance(distribution, Tied):
        inner = from_distribution(distribution.base)
        if isinstance(inner, EmissionMStep):
            module = TiedEmission(len(distribution.index), lambda _: inner, distribution.index)
            module.num_distinct = distribution.base.batch_shape[-1]  # some perhaps unused
            return module
    elif isinstance(distribution, AutoregressiveNormal | AutoregressiveCategorical):
        module = autoregressive_from(distribution, from_distribution(distribution.initial))
    elif len(distribution.batch_shape) != 1 or events > 1:
        pass
    elif type(base) in _CATEGORICAL and not events:
        module = CategoricalEmission(*base.probs.shape)
        module.set_points(probs=base.probs)
    elif isinstance(base, torch.distributions.Bernoulli) and events:
        module = BernoulliEmission(*shape)
        module.set_points(probs=base.probs)
    elif isinstance(base, torch.distributions.Poisson):
        module = PoissonEmission(shape[0], dim)
        module.set_points(rate=base.rate.expand(shape))
    elif isinstance(base, torch.distributions.VonMises):
        module = VonMisesEmission(shape[0], dim)
        concentration = base.concentration.expand(shape)
        module.set_points(concentration=concentration, loc=base.loc.expand(shape))
    elif isinstance(base, torch.distributions.Normal):
        spherical = dim > 1 and is_spherical(base)
        module = NormalEmission(shape[0], dim, spherical=spherical)
        variance = base.variance[:, 0] if spherical else base.variance.expand(shape)
        module.set_points(variance=variance, loc=base.loc.expand(shape))
    elif isinstance(base, torch.distributions.MultivariateNormal):
        tied = is_tied(base)
        module = CovarianceEmission(shape[0], dim, tied=tied)
        covariance = base.covariance_matrix.expand(shape + shape[-1:])
        module.set_points(covariance=covariance[0] if tied else covariance, loc=base.loc)
    elif isinstance(base, torch.distributions.MixtureSameFamily) and events:
        part = base.component_distribution
        inner = getattr(part, "base_dist", None)
        if isinstance(inner, torch.distributions.Normal) and len(part.event_shape) == 1:
            shape = part.batch_shape + part.event_shape  # (K, C, D)
            spherical = is_spherical(inner)
            module = MixtureEmission(shape[0], shape[1], shape[2], spherical=spherical)
            variance = inner.variance[..., 0] if spherical else inner.variance.expand(shape)
            module.set_points(
                weights=base.mixture_distribution.probs.expand(shape[:2]),
                variance=variance,
                loc=inner.loc.expand(shape),
            )
    if module is None:
        return PointEmission(distribution)
    return module.to(next(iter(module.parameters())).device)
