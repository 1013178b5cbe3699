"""Emission families made of others: joined, shared by states, with zeros, censored, truncated."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import pyro
import torch
from pyro.distributions import Beta
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from .._arrays import to_tensor
from .._checks import check_integers
from ..distributions import modified
from ..distributions.hard_zeros import exact_log_prob, without_events
from ..distributions.observation import Streams, Tied, inside_support
from ..ops.products import accumulated
from .closed_form import (
    EmissionMStep,
    Maximum,
    Statistics,
    inside,
    mode_of_part,
    row_mode,
    sample_of_part,
    under,
)
from .emissions import from_distribution
from .family import Components, Emission, EmissionFamily, build_part
from .newton import EXAMPLE, NewtonComponents
from .normals import take_moments

LEAST, MOST = 1e-12, 1 - 1e-7  # probabilities of a further zero: EM would not leave 0 and 1
ROUNDS = 10  # of EM over what zeros are, in one M-step


def streams(*families: EmissionFamily) -> EmissionFamily:
    """Emission family of several observations at once, independent given the state.

    Observations are vectors of floating point, in which each family has its own components: see
    :class:`pyrohmm.distributions.Streams`. Where all components of a stream are NaN, it is missing.

    Sites: those of the families, as ``emission.parts.0.…``, ``emission.parts.1.…``.

    Example:
        >>> module = streams(categorical(4), normal(2))(3)
        >>> module().event_shape
        torch.Size([3])
    """
    if not families or not all(map(callable, families)):
        text = f"families must be emission families, at least one; got {families!r:.200}"
        raise ValueError(f"{text}. Give such as streams(normal(2), categorical(3)).")
    return partial(StreamsEmission, families=families)


class _Composite(Emission):
    """Base of emissions of parts with closed M-steps, each of which has its own statistics."""

    def add(self, name: str, family: EmissionFamily, num_states: int) -> PyroModule:
        """Build a part for ``num_states`` states, and check that its M-step is closed."""
        part = build_part(name, "an emission family", "normal(2)", family, num_states)
        if not isinstance(part, EmissionMStep) or getattr(part, "in_time", False):
            raise TypeError(
                f"{name} must have a closed M-step, and emit observations that depend on the state "
                f"alone; got {type(part).__name__}. Make it the whole emission of the module."
            )
        self.summed &= getattr(part, "summed", True)
        return part

    def members(self) -> dict[str, Any]:
        """Submodules with M-steps, by the prefix of their names."""
        return {"part.": self.part}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step of each part by itself."""
        values, notes = Statistics(), list[str]()
        for prefix, part in self.members().items():
            mode, remarks = mode_of_part(part, prefix, statistics)
            values, notes = values | mode, notes + remarks
        return values, notes

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample the parameters of each part that can be sampled."""
        samples = Statistics()
        for prefix, part in self.members().items():
            samples |= sample_of_part(part, prefix, statistics, current)
        return samples


class StreamsEmission(_Composite, emits=Streams):
    """Joint emission of several observations: see :func:`streams`."""

    def __init__(self, num_states: int, families: tuple[EmissionFamily, ...]) -> None:
        super().__init__()
        parts = [self.add("families of streams", family, num_states) for family in families]
        self.parts = PyroModule[torch.nn.ModuleList](parts)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of the parts of a distribution, if all have closed M-steps."""
        parts = [from_distribution(part) for part in base.parts]
        if not all(isinstance(part, EmissionMStep) for part in parts):
            return None
        built = iter(parts)
        return cls(0, tuple(lambda _: next(built) for _ in parts))

    def members(self) -> dict[str, Any]:
        """Submodules with M-steps, by the prefix of their names."""
        return {f"parts.{i}.": part for i, part in enumerate(self.parts)}

    def forward(self) -> TorchDistribution:
        """Product distribution of independent streams, batched over states."""
        return Streams([part() for part in self.parts])

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Statistics of each part, under its name; a step at which it is missing does not count."""
        with torch.no_grad():
            joined = self.forward() if current is None else current
        statistics: Statistics = {}
        for i, (part, piece) in enumerate(zip(self.parts, joined.split(values))):
            present, weight = ~piece.isnan().reshape(len(piece), -1).all(-1), weights
            if not bool(present.all()):
                piece, weight = piece[present], weights[:, present]
            emission = None if current is None else joined.parts[i]
            statistics |= under(f"parts.{i}.", part.statistics(piece, weight, emission))
        return statistics

    def take_moments(self, moments: Tensor) -> float:
        """Rescale the default priors of every stream; returns the summed loss offset."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            joined = self.forward()
        fits = moments.shape[1:] == joined.event_shape
        return sum(map(take_moments, self.parts, joined.split(moments))) if fits else 0.0


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
    numbers = to_tensor("index", index)
    check_integers("index", numbers)
    if numbers.dim() != 1 or sorted(set(numbers.tolist())) != list(range(int(numbers.max()) + 1)):
        text = f"index must be (K,) integers that use all numbers from 0; got {index}"
        raise ValueError(f"{text}. Number them without gaps.")
    return partial(TiedEmission, family=family, index=numbers)


class TiedEmission(_Composite, emits=Tied):
    """Emission with distributions shared by states: see :func:`tied`."""

    def __init__(self, num_states: int, family: EmissionFamily, index: Tensor) -> None:
        super().__init__()
        if len(index) != num_states:
            text = f"index must have K = {num_states} entries; got {len(index)}"
            raise ValueError(f"{text}. Give one number for each state.")
        self.register_buffer("index", index.long())
        self.num_distinct = int(index.max()) + 1
        self.part = self.add("family", family, self.num_distinct)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of the distinct emissions of a distribution, if it has a closed M-step."""
        part = from_distribution(base.base)
        if not isinstance(part, EmissionMStep):
            return None
        module = cls(len(base.index), lambda _: part, base.index)
        module.num_distinct = base.base.batch_shape[-1]  # some perhaps unused
        return module

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        return Tied(self.part(), self.index)

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Statistics of the distinct emissions."""
        weights = weights.double()
        member = torch.nn.functional.one_hot(self.index, self.num_distinct).to(weights)
        base = None if current is None else current.base
        return under("part.", self.part.statistics(values, weights @ member, base))

    def take_moments(self, moments: Tensor) -> float:
        """Rescale the default priors of the distinct emissions; returns the loss offset."""
        return take_moments(self.part, moments)


# Further zeros, and limits ------------------------------------------------------------------------


class _Modified(NewtonComponents):
    """Base of families around another, ``part``, of independent components."""

    def __init__(self, num_states: int, inner: EmissionFamily, **priors: TorchDistribution) -> None:
        part: Any = build_part("family", "an emission family", "normal(2)", inner, num_states)
        shapes = {tuple(getattr(part, "shape", ()))}
        if isinstance(part, Components):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                shapes = {tuple(getattr(part, name).shape) for name in part.supports}
        if not isinstance(part, Components) or len(shapes) != 1:
            got = type(part).__name__
            raise TypeError(f"family must be of independent components, as normal(0); got {got}.")
        super().__init__(num_states, part.dim, **priors)
        self.part = part

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution whose part has independent components; None else."""
        inner = getattr(base, "base_dist", None) or base.base
        part = from_distribution(inner.to_event(len(distribution.event_shape)))
        return cls.around(part, base) if isinstance(part, Components) else None

    around: Any  # (part, base) -> the module of ``base`` whose parameters are those of ``part``

    def spaces(self) -> dict[str, constraints.Constraint]:
        """Supports of all parameters."""
        return {f"part.{name}": space for name, space in self.part.spaces().items()} | self.supports

    def take_moments(self, moments: Tensor) -> float:
        """Rescale the default priors of the part; returns the loss offset."""
        return take_moments(self.part, moments)

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """Newton start: M-step of the part, as if it were not modified."""
        return under("part.", self.part.m_step(self.part.statistics(values, weights, None))[0])

    def values_of(self, distribution: Any) -> Statistics:
        """The parameters of a distribution that the family emits, by name."""
        inner = getattr(distribution, "base_dist", None) or distribution.base
        return under("part.", self.part.values_of(inner))


def zero_inflated(
    family: EmissionFamily,
    gate: TorchDistribution = Beta(1.0, 1.0),  # noqa: B008
) -> EmissionFamily:
    """Emission family of counts, or of positive numbers, with further zeros in each state.

    Of counts, a zero may be of both kinds; a zero among positive numbers, such as a day without
    rain, or an animal that does not move, is none of the part.

    Sites: those of ``family``, as ``emission.part.…``, and ``emission.gate``, the probability of a
    further zero.

    Args:
        family: Of independent components, such as :func:`poisson` or :func:`gamma`.
        gate: Prior of the probabilities.

    Example:
        >>> data = Sequences.from_list([[0, 0, 0, 5, 7, 0, 6]])
        >>> fit = fit_em(TabularHMM(1, zero_inflated(poisson())), data)
        >>> fit.parameters["module.emission.gate"].round(decimals=1)
        tensor([0.6000])
    """
    return partial(ZeroInflatedEmission, inner=family, gate=gate)


class ZeroInflatedEmission(_Modified, emits=modified.ZeroInflated):
    """Emission of counts or positive numbers with further zeros: see :func:`zero_inflated`."""

    supports: ClassVar = {"gate": constraints.unit_interval}
    defaults: ClassVar = {"gate": lambda _: Beta(1.0, 1.0)}

    def __init__(self, num_states: int, inner: EmissionFamily, **priors: TorchDistribution) -> None:
        super().__init__(num_states, inner, **priors)
        self.summed = self.part.summed and issubclass(self._priors["gate"][0], torch_dist.Beta)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self.of_counts = self.part.components().support.is_discrete

    @classmethod
    def around(cls, part: Any, base: Any) -> Emission:
        """The module with the gates of ``base``."""
        module = cls(base.batch_shape[0], lambda _: part)
        module.set_points(gate=base.gate.expand(base.batch_shape))
        return module

    def components(self) -> TorchDistribution:
        """Zero-inflated distributions of the components, ``(K, [D])``."""
        return modified.ZeroInflated(self.part.components(), gate=self.gate)

    def begin(self, values: Tensor, weights: Tensor) -> Statistics:
        """Newton start: M-step of the part without zeros, and a gate near the fraction of zeros."""
        zero = values == 0
        start = super().begin(values.masked_fill(zero, torch.nan), weights)
        _, weights = self._known(values, weights)
        share = (weights * zero.unsqueeze(1)).sum(1) / weights.sum(1)
        return start | {"gate": 0.05 + 0.9 * share.nan_to_num(0.1)}

    def values_of(self, distribution: Any) -> Statistics:
        """The parameters of a distribution that the family emits, by name."""
        return super().values_of(distribution) | {"gate": distribution.gate}

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Statistics of the part without zeros, number of zeros, and expected zeros of the part.

        If the part has no closed M-step, those for Newton's method.
        """
        if not self.summed:
            return super().statistics(values, weights, current)
        zero = values == 0
        others = self.part.statistics(torch.where(zero, torch.nan, values), weights, None)
        zeros = accumulated(weights, zero.reshape(len(zero), -1).to(weights))
        zeros = zeros.reshape(len(weights), *self.shape)
        base = None if current is None else without_events(current)
        own = 0.5 * self.of_counts if base is None else self._own_zeros(base)
        return under("part.", others) | {"zeros": zeros, "own": zeros * own}

    def _own_zeros(self, distribution: Any) -> Tensor:
        """Posterior probabilities ``(R, K, [D])`` that a zero is one of the part's."""
        if not self.of_counts:
            return torch.zeros(())
        gate = distribution.gate.double().reshape(-1, *self.shape)
        logs = exact_log_prob(distribution.base_dist, torch.zeros_like(distribution.gate))
        own = (1 - gate) * logs.double().reshape(gate.shape).exp()
        return (own / (gate + own)).nan_to_num(0.0)

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: by some steps of EM, in which a zero is one of the part's or a further one."""
        if not self.summed:
            return super().m_step(statistics)
        zeros, own, others = statistics["zeros"], statistics["own"], inside(statistics, "part.")
        at_zero = {"known": 1.0} | (self.part.features(torch.zeros(())) if self.of_counts else {})
        ends = self.gate_concentration1, self.gate_concentration0
        prior = torch.stack([end.expand(self.shape) for end in ends], -1)
        for _ in range(ROUNDS if self.of_counts else 1):
            with_own = {n: x + own * at_zero[n] if self.of_counts else x for n, x in others.items()}
            mode, notes = self.part.m_step(with_own)
            counts = torch.stack([zeros - own, others["known"] + own], -1)
            gate = row_mode(counts, prior if self.has_prior("gate") else None)[..., 0]
            mode = under("part.", mode) | {"gate": gate.clamp(LEAST, MOST)}
            free = {name: value for name, value in mode.items() if self.is_free(name)}
            with pyro.validation_enabled(False):
                own = zeros * self._own_zeros((self.at(free) if free else self).components())
        return mode, notes


def censored(
    family: EmissionFamily, lower: float | None = None, upper: float | None = None
) -> EmissionFamily:
    """Emission family of numbers that are recorded as a limit where they are beyond it.

    As measurements below a detection limit, which count with the probability to be there.

    Sites: those of ``family``, as ``emission.part.…``.

    Args:
        family: Of independent components whose cumulative probabilities have derivatives:
            :func:`normal` ``(0)``, :func:`log_normal`, :func:`weibull`, or counts.
        lower: Observations that are smaller are recorded as this number.
        upper: Observations that are larger are recorded as this number.

    Raises:
        ValueError: If there is no limit, or the lower one is not below the upper one.

    Example:
        >>> data = Sequences.from_list([[0.0, 0.0, 0.4, 1.2, 0.0, 0.7]])
        >>> fit = fit_em(TabularHMM(1, censored(normal(0), lower=0.0)), data)
        >>> bool(fit.parameters["module.emission.part.loc"] < data.values.mean())
        True
    """
    return _limited(family, modified.Censored, lower, upper)


def truncated(
    family: EmissionFamily, lower: float | None = None, upper: float | None = None
) -> EmissionFamily:
    """Emission family of numbers of which only those between limits are observed.

    As group sizes, of which none is zero: ``truncated(poisson(), lower=1)``.

    Sites: those of ``family``, as ``emission.part.…``.

    Args:
        family: As of :func:`censored`.
        lower: The least number that is observed.
        upper: The largest one.

    Raises:
        ValueError: If there is no limit, or the lower one is not below the upper one.

    Example:
        >>> data = Sequences.from_list([[1, 1, 2, 1, 1, 3]])
        >>> fit = fit_em(TabularHMM(1, truncated(poisson(), lower=1)), data)
        >>> bool(fit.parameters["module.emission.part.rate"] < 1)  # the mean of those seen is 1.5
        True
    """
    return _limited(family, modified.Truncated, lower, upper)


def _limited(family: EmissionFamily, build: Any, lower: Any, upper: Any) -> EmissionFamily:
    """Emission family between limits, which are checked here."""
    low = -math.inf if lower is None else lower
    if (lower is None and upper is None) or not low < (math.inf if upper is None else upper):
        text = f"lower must be less than upper, one may be None; got {lower}, {upper}"
        raise ValueError(f"{text}. Give the smaller as lower.")
    return partial(_LimitedEmission, inner=family, build=build, limits=(lower, upper))


class _LimitedEmission(_Modified, emits=(modified.Censored, modified.Truncated)):
    """Emission of numbers with limits: see :func:`censored` and :func:`truncated`."""

    def __init__(self, num_states: int, inner: EmissionFamily, build: Any, limits: Any) -> None:
        super().__init__(num_states, inner)
        self.build, self.limits = build, limits
        leaves = {n: torch.full(self.shape, EXAMPLE, requires_grad=True) for n in self.spaces()}
        found = self.at(leaves).components()
        ends = torch.tensor([float(limit) for limit in limits if limit is not None])
        ends = ends.reshape(-1, *(1,) * len(self.shape))
        if not bool(inside_support(found.base, ends).all()):
            raise ValueError(
                f"lower and upper must lie inside the support of the family; got {limits}. Exact "
                "zeros among positive numbers are those of zero_inflated(...)."
            )
        try:
            with torch.enable_grad():
                found.log_prob(ends).sum().backward()
        except (NotImplementedError, RuntimeError) as error:
            raise TypeError(
                "family must have cumulative probabilities with derivatives, as normal, "
                f"log_normal and counts; those of {type(self.part).__name__} have none."
            ) from error

    @classmethod
    def around(cls, part: Any, base: Any) -> Emission:
        """The module with the limits of ``base``."""
        return cls(base.batch_shape[0], lambda _: part, type(base), (base.lower, base.upper))

    def components(self) -> TorchDistribution:
        """Censored or truncated distributions of the components, ``(K, [D])``."""
        found: TorchDistribution = self.build(self.part.components(), *self.limits)
        return found
