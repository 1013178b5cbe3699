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

from functools import partial
from typing import Any, ClassVar

import torch
from pyro.distributions import Bernoulli, Beta, Categorical, Dirichlet, Gamma, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_integers, check_size
from ..distributions.observation import Streams, Tied
from ..ops.log_space import log
from ..ops.lookup import add_rows
from .family import (
    Emission,
    EmissionFamily,
    Statistics,
    check_dim,
    check_mode,
    moments,
    positive,
    row_mode,
)
from .normals import CovarianceEmission, MixtureEmission, NormalEmission

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


def from_distribution(distribution: Any) -> PyroModule:
    """The emission module with the values of ``distribution`` as points, without priors.

    One with a closed M-step where there is one for the distribution, else a
    :class:`PointEmission`.

    Example:
        >>> type(from_distribution(Poisson(torch.tensor([1.0, 5.0])))).__name__
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
        parts = [from_distribution(part) for part in distribution.parts]
        closed = all(isinstance(part, Emission) for part in parts)
        if closed:
            built = iter(parts)
            return StreamsEmission(0, tuple(lambda _: next(built) for _ in parts))
    elif isinstance(distribution, Tied):
        inner = from_distribution(distribution.base)
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
