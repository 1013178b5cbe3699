"""Quantiles of mixtures; sampling given states; ``Forecast``: observations at future steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from pyro.distributions import Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Independent, MixtureSameFamily, MultivariateNormal, constraints

from .._checks import (
    OwnChecks,
    broadcast_shapes,
    check_broadcast,
    check_probs,
    check_real,
    check_shape,
    check_share,
    check_trailing,
    sample_size,
)
from .._choices import CACHED
from ..data.sequences import check_sequences
from ..data.tables import rows_ahead
from ..ops.markov import CategoricalTable, sample_chain
from .autoregressive import Autoregressive, AutoregressiveCategorical, AutoregressiveNormal
from .hard_zeros import REACH, bounds, cdf_of_counts, first_reaching, log_probs, without_events
from .modified import Angle, WrappedCauchy
from .observation import Streams, Tied, is_categorical, log_likelihood


def cdf(distribution: Any, values: Tensor, below: bool = False) -> Tensor:
    """Cumulative probability ``(*A, K, *E)`` of each component of ``values``, in each state.

    A distribution takes part by its method ``cdf(values)``; one with atoms also by
    ``cdf_below(values)``, the probability of less. Counts without a ``cdf`` have the sum of their
    probabilities, vectors the marginals of their components.

    Args:
        distribution: Of batch shape ``(*b, K)``.
        values: ``(*A, 1, *E)``; they may lie outside of the support.
        below: Whether it is the probability of less than each value.

    Raises:
        ValueError: If it is not known.

    Example:
        >>> cdf(Poisson(torch.tensor([1.0])), torch.tensor([[0.0], [1.0]])).float()
        tensor([[0.3679],
                [0.7358]])
    """
    at = -1 - len(distribution.event_shape)
    if isinstance(distribution, Tied):
        return cdf(distribution.base, values, below).index_select(at, distribution.index)
    if isinstance(distribution, Streams):
        pieces = zip(distribution.parts, distribution.split(values))
        return distribution.join([cdf(part, piece, below) for part, piece in pieces])
    if isinstance(distribution, Independent):
        return cdf(distribution.base_dist, values, below)
    if isinstance(distribution, MixtureSameFamily):
        weights = distribution.mixture_distribution.probs
        parts = cdf(distribution.component_distribution, values.unsqueeze(at), below)
        return (parts * weights.reshape(weights.shape + (1,) * (-1 - at))).sum(at)
    if isinstance(distribution, MultivariateNormal):
        distribution = Normal(distribution.mean, distribution.stddev)
    return _own_cdf(distribution, values, below)


def _own_cdf(distribution: Any, values: Tensor, below: bool) -> Tensor:
    """CDF of a univariate distribution; P(X < x) if ``below``."""
    distribution = copy.copy(distribution)
    distribution._validate_args = False
    discrete, atoms = distribution.support.is_discrete, hasattr(distribution, "cdf_below")
    if discrete:
        values = values.ceil() - 1 if below else values.floor()
    elif not atoms:
        low, high = (end.to(values) for end in bounds(distribution))
        values = values.maximum(low).minimum(high)
    try:
        own = distribution.cdf_below if below and atoms and not discrete else distribution.cdf
        return own(values).clamp(0.0, 1.0)
    except NotImplementedError:
        if not discrete or distribution.event_shape:
            raise ValueError(
                "cumulative probabilities are known of symbols, counts, and distributions with a "
                f"cdf; {type(distribution).__name__} has none. Write a subclass with cdf(values)."
            ) from None
    return cdf_of_counts(distribution, values)


def mixture_quantiles(weights: Tensor, emission: Any, probs: Tensor) -> Tensor | None:
    """Quantiles ``(Q, *B, H, *E)`` of mixtures over states; None without a cdf, or a finite spread.

    Args:
        weights: ``(*B, H, K)``, of the states.
        emission: Batched over the K states, ``(*b, K)``.
        probs: ``(Q,)``, between 0 and 1; of these two, the ends of the support.
    """
    if isinstance(emission, Tied):
        shared = weights.new_zeros(*weights.shape[:-1], emission.base.batch_shape[-1])
        shared = shared.index_add(-1, emission.index, weights)
        return mixture_quantiles(shared, emission.base, probs)
    if is_categorical(emission):
        return symbol_quantiles(weights @ emission.probs, probs)
    if isinstance(emission, Streams):
        found: list[Any] = [mixture_quantiles(weights, part, probs) for part in emission.parts]
        return emission.join(found) if all(part is not None for part in found) else None
    try:
        cdf(emission, emission.mean)
        reach = REACH * emission.stddev
    except (ValueError, NotImplementedError, AttributeError):
        return None
    if not bool(reach.isfinite().all()):
        return None
    events = len(emission.event_shape)
    # steps to the left, so that the rest of the dimensions are those of the parameters
    weights = weights.movedim(-2, 0).unflatten(-1, (-1,) + (1,) * events)  # (H, *B, K, *1)
    kind = _count_quantiles if emission.support.is_discrete else _bisected_quantiles
    return kind(weights, emission, -1 - events, probs).movedim(1, -1 - events)


def symbol_quantiles(symbols: Tensor, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, *B)`` of symbols in the order of their numbers.

    Args:
        symbols: ``(*B, V)``, their probabilities.
        probs: ``(Q,)``, between 0 and 1.
    """
    return _first_to_sum_to(symbols.movedim(-1, 0).cumsum(0), probs)


def _first_to_sum_to(upto: Tensor, probs: Tensor) -> Tensor:
    """Inverse of cumulative probabilities ``(n, *)`` at each of ``probs``, ``(Q, *)``.

    That of 0 is the first that has a mass, that of 1 the last.
    """
    limits = torch.finfo(upto.dtype)
    probs = probs.to(upto).reshape(-1, *(1,) * upto.dim())
    wanted = (probs * (1 - 8 * limits.eps)).clamp(min=limits.tiny)
    wanted = torch.where(probs == 1, upto[-1:], wanted)
    return (upto < wanted).sum(1).clamp(max=len(upto) - 1)


def _count_quantiles(weights: Tensor, emission: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of counts: the least whose mixture cdf reaches ``probs``."""
    _, most = _ends(weights, emission, state)
    last = (emission.mean + REACH * emission.stddev + 20).amax(state).minimum(most).max()
    counts = torch.arange(int(last) + 1).to(weights).reshape(-1, *(1,) * weights.dim())
    found = _first_to_sum_to((weights * cdf(emission, counts)).sum(state), probs).to(weights)
    above = (probs.to(found) == 1).reshape(-1, *(1,) * most.dim()) & most.isposinf()
    return found.masked_fill(above, torch.inf)


def _bisected_quantiles(weights: Tensor, emission: Any, state: int, probs: Tensor) -> Tensor:
    """Quantiles ``(Q, H, *B, *E)`` of continuous components, by bisection of the cdf."""
    least, most = _ends(weights, emission, state)
    probs = probs.to(weights).reshape(-1, *(1,) * (weights.dim() - 1))

    def reached(value: Tensor) -> Tensor:
        return (weights * cdf(emission, value.unsqueeze(state))).sum(state) >= probs

    reach, short = REACH * emission.stddev, True
    while short:
        low = (emission.mean - reach).amin(state).maximum(least)
        high = (emission.mean + reach).amax(state).minimum(most)
        outside = reached(low) & (low > least) | ~reached(high) & (high < most)
        short, reach = bool((outside & (probs > 0) & (probs < 1)).any()), 2 * reach
    found = first_reaching(reached, low.expand_as(outside), high.expand_as(outside))
    return torch.where(probs == 0, least, torch.where(probs == 1, most, found))


def _ends(weights: Tensor, emission: Any, state: int) -> tuple[Tensor, Tensor]:
    """Bounds ``(H, *B, *E)`` of the union of supports of the states with positive weight."""
    low, high = (end.to(weights) for end in _bounds(emission))
    low, high = low.where(weights > 0, torch.inf), high.where(weights > 0, -torch.inf)
    return low.amin(state), high.amax(state)


def _bounds(emission: Any) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of the support of each component, ``(*b, K, *E)``."""
    if isinstance(emission, MixtureSameFamily):
        low, high = _bounds(emission.component_distribution)
        at = -1 - len(emission.event_shape)
        return low.amin(at), high.amax(at)
    shape, base = emission.batch_shape + emission.event_shape, without_events(emission)
    low, high = bounds(base)
    if isinstance(base, Angle | WrappedCauchy):  # whose distribution functions are of one turn
        low, high = low.new_tensor(-math.pi), high.new_tensor(math.pi)
    return low.expand(shape), high.expand(shape)


NUM_SAMPLES = 10_000  # for quantiles, where no distribution function is known


def sample_emission(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample an observation ``(*B, T, *E)`` from each of ``states`` ``(*B, T)``."""
    if isinstance(emission, Autoregressive):
        return sample_in_time(emission, states)
    if isinstance(emission, Streams):
        streams = (part.expand(emission.batch_shape) for part in emission.parts)
        return emission.join([sample_emission(part, states) for part in streams])
    time_major = states.movedim(-1, 0)
    if is_categorical(emission):
        return CategoricalTable(log_probs(emission)).sample(time_major).movedim(0, -1)
    shape = states.shape[:-1] + emission.batch_shape[-1:] + emission.event_shape
    parts = time_major.split(max(1, CACHED // max(1, shape.numel())))
    samples = [sample_emission_per_step(emission, part) for part in parts]
    return torch.cat(samples).movedim(0, states.dim() - 1)


def sample_in_time(
    emission: Autoregressive,
    states: Tensor,
    values: Tensor | None = None,
    known: Tensor | None = None,
) -> Tensor:
    """Ancestral sampling of observations ``(*B, T, *E)``, each given those before it.

    Args:
        emission: Of the observations.
        states: ``(*B, T)``.
        values: ``(*B, T, *E)``, observations that stand where they are ``known``.
        known: ``(*B, T)`` booleans; without them all are sampled.
    """
    events, at = (1,) * len(emission.event_shape), states.dim() - 1
    past = torch.empty(*states.shape[:-1], 0, *emission.event_shape).to(emission.history)
    found = []
    for t, state in enumerate(states.unbind(-1)):
        now = sample_emission(emission.next(past), state.unsqueeze(-1))
        if values is not None and known is not None:
            fixed = known[..., t].reshape(*known.shape[:-1], 1, *events)
            given = values.narrow(values.dim() - 1 - len(events), t, 1)
            now = torch.where(fixed, given.to(now), now)
        found.append(now)
        past = torch.cat([past.to(now), now], at)
        past = past.narrow(at, int(past.size(at) > emission.lags), min(len(found), emission.lags))
    return torch.cat(found, at)


def sample_emission_per_step(emission: TorchDistribution, states: Tensor) -> Tensor:
    """Sample observations from an emission ``(*b, T, K)``, by samples in all K states."""
    values = emission.expand(states.shape + emission.batch_shape[-1:]).sample()  # (*B, T, K, *E)
    index = states.reshape(states.shape + (1,) * (1 + len(emission.event_shape)))
    index = index.expand(*states.shape, 1, *emission.event_shape)
    return values.gather(states.dim(), index).squeeze(states.dim())


class Forecast(OwnChecks):
    r"""Predictive distributions of observations: mixtures of the emissions of the K states.

    .. math:: p(x_{T+h} | x_{1:T}) = \sum_k p(z_{T+h} = k | x_{1:T}) \, p(x_{T+h} | k)

    These are marginals: samples at different steps are not a joint sequence; for that see
    :func:`pyrohmm.queries.continuation`. After an impossible past all states are zero:
    probabilities and densities are zero then, moments NaN.

    Args:
        state_probs: ``(*B, H, K)``, probabilities of the states at each of the H steps ahead.
        emission: Distribution of an observation, batched over the K states.
        times: ``(H,)`` or ``(*B, H)``, of continuous time.

    Example:
        >>> forecast = Forecast(torch.tensor([[0.5, 0.5]]), Normal(torch.tensor([-2.0, 2.0]), 1.0))
        >>> forecast.mean, forecast.variance
        (tensor([0.]), tensor([5.]))
        >>> low, high = forecast.interval(0.9)
        >>> bool(((low + high).abs() < 1e-5).all())
        True
    """

    def __init__(
        self, state_probs: Tensor, emission: TorchDistribution, times: Tensor | None = None
    ) -> None:
        self.state_probs, self.emission, self.times = state_probs, emission, times
        super().__init__(state_probs.shape[:-1], emission.event_shape, validate_args=False)

    def __repr__(self) -> str:
        return (
            f"Forecast({self.state_probs.size(-2)} steps; mixture over {self.state_probs.size(-1)} "
            f"states of {type(self.emission).__name__}; batch shape "
            f"{tuple(self.state_probs.shape[:-2])}, event shape {tuple(self.event_shape)})"
        )

    @property
    def support(self) -> constraints.Constraint:
        """Support of the emission."""
        return self.emission.support

    @property
    def probs(self) -> Tensor:
        """Probabilities of symbols ``(*B, H, V)``; of yes and no, that of yes ``(*B, H)``."""
        probs = self._moment("probs")
        return self.state_probs @ probs if is_categorical(self.emission) else self._average(probs)

    @property
    def mean(self) -> Tensor:
        """Mean of the observation, ``(*B, H, *E)``."""
        return self._average(self._moment("mean"))

    @property
    def variance(self) -> Tensor:
        """Variance of the observation, ``(*B, H, *E)``: within states and between them."""
        events = len(self.event_shape)
        within = self._average(self._moment("variance"))
        centres = self._moment("mean").unsqueeze(-2 - events)  # (*B, 1, K, *E)
        apart = (centres - self.mean.unsqueeze(-1 - events)) ** 2  # (*B, H, K, *E)
        weights = self.state_probs.reshape(self.state_probs.shape + (1,) * events)
        return within + (weights * apart).sum(-1 - events)

    def quantiles(self, probs: Sequence[float] | Tensor = (0.05, 0.5, 0.95)) -> Tensor:
        """Predictive quantiles, ``(Q, *B, H, *E)``, separately for each component of a vector.

        They are those of the mixture: exact to rounding for symbols, counts and components whose
        distribution function is known, such as those of normal distributions; for others from
        ten thousand samples. Symbols are taken in the order of their numbers. After an impossible
        past they mean nothing.

        Args:
            probs: Q numbers between 0 and 1, in a list, a tensor or an array. Of 0 and 1 the
                quantiles are the ends of the support, which may be infinite; of symbols, the first
                and the last that have a probability.

        Raises:
            ValueError: If a probability is not between 0 and 1; or is 0 or 1, and quantiles are
                of samples.

        Example:
            >>> dice = Categorical(torch.tensor([[0.2, 0.8], [0.6, 0.4]]))
            >>> Forecast(torch.tensor([[0.5, 0.5]]), dice).quantiles([0.3, 0.5])
            tensor([[0],
                    [1]])
        """
        wanted = check_probs("probs", probs)
        with torch.no_grad():
            found = self._exact_quantiles(wanted)
            if found is not None and found.shape[1:] == self.shape():
                return found
            if bool(((wanted == 0) | (wanted == 1)).any()):
                raise ValueError(
                    "probs must lie between 0 and 1, both excluded, where quantiles are of "
                    f"samples, as those of {type(self.emission).__name__} are; got "
                    f"{wanted.tolist()}. Give such as 0.001."
                )
            samples = self.sample((NUM_SAMPLES,)).cpu().double().numpy()
            method: Any = "inverted_cdf" if self.support.is_discrete else "linear"
            sampled = numpy.quantile(samples, wanted.tolist(), axis=0, method=method)
            quantiles = torch.as_tensor(sampled).to(self.state_probs)
            if found is not None:  # of the first step
                quantiles.narrow(len(self.batch_shape), 0, 1).copy_(found)
            return quantiles

    def _exact_quantiles(self, probs: Tensor) -> Tensor | None:
        """Quantiles ``(Q, *B, H, *E)``, or of the first step; None if there is no closed form."""
        return mixture_quantiles(self.state_probs, self.emission, probs)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Limits ``(*B, H, *E)`` of the central predictive interval of this probability.

        Args:
            level: Between 0 and 1.
        """
        check_share("level", level)
        low, high = self.quantiles([(1 - level) / 2, (1 + level) / 2])
        return low, high

    def to_dataframe(self, data: Any, level: float = 0.9) -> Any:
        """Table with a row for each step ahead: its sequence, its time, and what is predicted.

        Args:
            data: The sequences that were forecast: of ``fit.forecast(data, H)``.
            level: Probability of the interval.

        Returns:
            A table as of :meth:`Sequences.to_dataframe`: the columns ``by`` and ``time``, or "step"
            where times do not go on by one step. Of symbols their probabilities, "p0", "p1", ...;
            else "mean", "lower" and "upper", of vectors "mean0", "mean1", ...

        Raises:
            ValueError: If ``data`` are not N sequences, the batch shape being ``(N, H)``.

        Example:
            >>> table = {"who": ["b", "b", "a"], "day": [1, 2, 1], "x": [0, 0, 1]}
            >>> data = Sequences.from_dataframe(table, by="who", columns="x", time="day")
            >>> dice = Categorical(torch.tensor([[0.25, 0.75]]))
            >>> Forecast(torch.ones(2, 1, 1), dice).to_dataframe(data)
              who  day    p0    p1
            0   b    3  0.25  0.75
            1   a    2  0.25  0.75
        """
        check_sequences("data", data)
        size = self.state_probs.size(-2)
        check_shape("forecast", self.state_probs, (len(data), size, self.state_probs.size(-1)),
                    "(N, H, K)", "Give the data that were forecast.")  # fmt: skip
        if is_categorical(self.emission) or isinstance(self.emission, AutoregressiveCategorical):
            parts = {"p": self.probs}
        else:
            parts = dict(zip(("mean", "lower", "upper"), (self.mean, *self.interval(level))))
        columns: dict[str, Any] = {}
        for name, part in parts.items():
            flat = part.detach().cpu().reshape(len(data) * size, -1).numpy()
            single = not (self.event_shape or name == "p")
            columns |= {f"{name}{'' if single else d}": x for d, x in enumerate(flat.T)}
        return rows_ahead(data, columns, size, self.times)

    def _moment(self, name: str) -> Tensor:
        """Moment ``name`` of the emission, in the dtype of the state probabilities."""
        try:
            return getattr(self.emission, name).to(self.state_probs.dtype)
        except NotImplementedError:
            kind = type(self.emission).__name__
            cure = "Define it in the class, or take quantiles(probs) or samples."
            raise NotImplementedError(f"{kind} has no {name}. {cure}") from None

    def _unknown(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no cdf, icdf and entropy: take quantiles(probs), samples, "
            "or queries.pseudo_residuals of what has been observed."
        )

    cdf = icdf = entropy = _unknown

    def _average(self, moment: Tensor) -> Tensor:
        """Average of a moment ``(*B, K, *E)`` over the state probabilities."""
        event = self.event_shape
        flat = moment.reshape(*self.emission.batch_shape, event.numel())
        impossible = (self.state_probs == 0).all(-1, keepdim=True)
        average = (self.state_probs @ flat).masked_fill(impossible, torch.nan)
        return average.reshape(self.batch_shape + event)

    def log_prob(self, values: Tensor) -> Tensor:
        """Log-density of each observation ``(*B, H)``, given ``values`` ``(*B, H, *E)``.

        Values broadcast with the batch shape: ``(N, H, *E)`` are the same for all of R restarts.
        """
        check_real("values", values)
        event = self.event_shape
        check_trailing("values", values, tuple(event), "(*E)")
        batch = values.shape[: values.dim() - len(event)]
        check_broadcast({"values": batch, "Forecast": self.batch_shape})
        self._check_whole(values)
        # as many dimensions as the parameters, so that those of steps and of batch stay apart
        values = values.reshape((1,) * (len(self.batch_shape) - len(batch)) + values.shape)
        likelihood = log_likelihood(self.emission, values).to(self.state_probs.dtype)
        return (likelihood + self.state_probs.log()).logsumexp(-1)

    def _check_whole(self, values: Tensor) -> None:
        """Raise if discrete values are not whole numbers; NaN counts as missing."""
        single = self.support.is_discrete and not self.event_shape
        if single and values.is_floating_point() and bool((values.nan_to_num().frac() != 0).any()):
            wrong = values[values.nan_to_num().frac() != 0][0]
            text = f"values must be whole numbers, as the emission is discrete; got {wrong:g}"
            raise ValueError(f"{text}. Call .round().")

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample each observation, ``(*S, *B, H, *E)``."""
        with torch.no_grad():
            shape = sample_size(sample_shape)
            states = torch.distributions.Categorical(probs=self.state_probs).sample(shape)
            return sample_emission(self.emission, states)


class AutoregressiveForecast(Forecast):
    r"""A :class:`Forecast` of observations that depend on those before them.

    Samples are joint sequences of H observations, each generated from those before it. Means and
    variances of :class:`AutoregressiveNormal` and probabilities of
    :class:`AutoregressiveCategorical` are exact, the observations between being summed out; so are
    log-densities, but for those of normal vectors more than one step ahead, which have no closed
    form. Quantiles are exact of symbols, and one step ahead; else of samples.

    Args:
        state_probs: ``(*B, H, K)``, probabilities of the states at each of the H steps ahead.
        emission: With the last observations as its history.
        log_transition: ``(*b, K, K)``.
    """

    emission: Autoregressive

    def __init__(self, states: Tensor, emission: Autoregressive, log_transition: Tensor) -> None:
        super().__init__(states, emission)
        self.log_transition = log_transition

    @property
    def probs(self) -> Tensor:
        """Probabilities of symbols ``(*B, H, V)``, if observations are symbols."""
        if not isinstance(self.emission, AutoregressiveCategorical):
            raise self._refusal("probabilities", "Take samples.")
        return self.emission.probs_ahead(self.state_probs, self.log_transition)

    @property
    def mean(self) -> Tensor:
        """Mean of the observation, ``(*B, H, D)``, if it is a normal vector."""
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        """Variance of the observation, ``(*B, H, D)``, if it is a normal vector."""
        return self._moments()[1]

    def _moments(self) -> tuple[Tensor, Tensor]:
        if not isinstance(self.emission, AutoregressiveNormal):
            raise self._refusal("moments", "Take samples.")
        impossible = (self.state_probs == 0).all(-1, keepdim=True)
        mean, variance = self.emission.moments(self.state_probs, self.log_transition)
        return mean.masked_fill(impossible, torch.nan), variance.masked_fill(impossible, torch.nan)

    def log_prob(self, values: Tensor) -> Tensor:
        """Log-density of each observation ``(*B, H)``, the others being summed out.

        Args:
            values: ``(*B, H, *E)``; see :meth:`Forecast.log_prob`.

        Raises:
            ValueError: If it has no closed form.
        """
        check_real("values", values)
        check_trailing("values", values, (self.state_probs.size(-2), *self.event_shape), "(H, *E)")
        if isinstance(self.emission, AutoregressiveCategorical):
            self._check_whole(values)
            logs = self.probs.log()
            shape = broadcast_shapes(values.shape, logs.shape[:-1])
            index = values.long().expand(shape).unsqueeze(-1)
            return logs.expand(*shape, logs.size(-1)).gather(-1, index).squeeze(-1)
        if self.state_probs.size(-2) > 1:
            cure = "Score whole continuations: continuation(hmm, past, H).log_prob(values)."
            raise self._refusal("log-densities more than one step ahead", cure)
        values = values.to(torch.promote_types(values.dtype, self.state_probs.dtype))
        self.emission.check_context(values, None)
        return (self.emission.log_likelihood(values) + self.state_probs.log()).logsumexp(-1)

    def _exact_quantiles(self, probs: Tensor) -> Tensor | None:
        if isinstance(self.emission, AutoregressiveCategorical):
            return symbol_quantiles(self.probs, probs)
        following = self.emission.given(self.emission.history)
        return mixture_quantiles(self.state_probs[..., :1, :], following, probs)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample sequences of observations, ``(*S, *B, H, *E)``."""
        with torch.no_grad():
            shape, first = sample_size(sample_shape) + self.batch_shape, self.state_probs[..., 0, :]
            matrices = self.log_transition.unsqueeze(-3)
            states = sample_chain(first.log(), matrices, shape[:-1], shape[-1])
            return sample_in_time(self.emission, states)

    def _refusal(self, what: str, cure: str) -> ValueError:
        kind = type(self.emission).__name__
        return ValueError(f"a forecast of {kind} has no {what} in closed form. {cure}")
