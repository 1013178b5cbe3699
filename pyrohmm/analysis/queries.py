"""Posterior queries of an HMM, by topic: decoding, prediction, dwell times, residuals, segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .._checks import all_names_checked, check_size, check_tensor
from .._choices import CACHED
from .._transforms import beside
from ..chains.blocks import BlockLikelihood, CarriedState
from ..chains.markov import MarkovChain, PathFactors
from ..chains.rates import Gaps, over_gaps
from ..distributions.autoregressive import Autoregressive, with_past
from ..distributions.base import check_possible
from ..distributions.block_hmm import BlockHMM
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.forecast import Forecast, cdf, sample_in_time
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..distributions.structured_hmm import HSMM
from ..ops import recursions
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.log_space import logsumexp, normalised
from .dwell_times import Segment as Segment
from .dwell_times import dwell_counts as dwell_counts
from .dwell_times import dwell_time_hazard as dwell_time_hazard
from .dwell_times import dwell_time_log_prob as dwell_time_log_prob
from .dwell_times import dwell_time_log_survival as dwell_time_log_survival
from .dwell_times import dwell_time_mean as dwell_time_mean
from .dwell_times import prevalence as prevalence
from .dwell_times import segments as segments


def chain_factors(hmm: HMM, values: Tensor) -> PathFactors:
    """Path factors of a chain and of the log-likelihoods of observations ``(*B, T, *E)``."""
    return PathFactors.of(hmm.chain, hmm.log_likelihood(values), hmm.lengths)


def in_blocks(hmm: HMM) -> TypeGuard[BlockHMM]:
    """Whether queries compute within blocks of states, without the full transition matrix."""
    return isinstance(hmm, BlockHMM) and hmm.carried is None


def path_factors(hmm: HMM, values: Tensor) -> tuple[list[PathFactors], BlockLikelihood | None]:
    """Path factors of all sequences; with blocks, of chunks of sequences, over positions in blocks.

    In blocks also the log-likelihoods, unless steps are missing, where the state may be any.
    """
    if in_blocks(hmm):
        seen = hmm._read(values, check=True)
        if not hmm.chain.has_gaps(seen):
            return [PathFactors.joined(*part) for _, part in hmm.chain.in_places(seen)], seen
    return [chain_factors(hmm, values)], None


def refuse_autoregressive(hmm: HMM, purpose: str) -> None:
    """Raise if the emission is autoregressive, for which ``purpose`` is not defined."""
    if not isinstance(hmm, BlockHMM) and isinstance(hmm.emission, Autoregressive):
        kind = type(hmm.emission).__name__
        raise ValueError(f"{purpose} needs emissions that depend on the state alone, not {kind}.")


def predictive_log_prob(hmm: HMM, values: Tensor) -> Tensor:
    r"""Log-probability of each observation given those before it, in nats, shape ``(*B, T)``.

    .. math:: \log p(x_t | x_{1:t-1})

    Steps that are padded or not observed hold 0, so that the sum over steps is
    :meth:`HMM.log_prob`; a label, that a segment ends with the data, and with ``exact_entry`` that
    nothing is entered at a step that is not observed, counts as an observation.
    What is observed holds -inf from where it has become impossible. Of a
    :class:`pyrohmm.BlockHMM` it is a constant for gradients.

    Args:
        hmm: The model. Of an :class:`HSMM` it takes the time of a chain of K · D states.
        values: ``(*B, T, *E)``, observations.

    Example:
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sticky, coins, torch.tensor(3))
        >>> predictive_log_prob(hmm, torch.tensor([1, 1, 1])).exp()
        tensor([0.7000, 0.7457, 0.7772], dtype=torch.float64)
    """
    if in_blocks(hmm):
        scores = hmm.chain.predictive(hmm._read(values, check=True))
    else:
        chain = chain_factors(hmm, values)
        scores = logsumexp(chain.predicted() + chain.likelihood, -1)
    exists = hmm.exists.expand(scores.shape)
    informative = hmm.known
    if hmm.allowed is not None:
        informative = informative | (exists & ~hmm.allowed.all(-1))
    if isinstance(hmm, ContinuousTimeHMM) and hmm.exact_entry is not None:
        informative = exists  # of no entry where nothing is observed
    if isinstance(hmm, HSMM) and not hmm.censored_end:  # where a segment ends
        later = torch.nn.functional.pad(exists[..., 1:], (0, 1))
        informative = informative | (exists & ~later)
    return scores.masked_fill(~informative, 0.0)


def continuation(hmm: HMM, values: Tensor, num_steps: int | Tensor) -> HMM:
    r"""Joint predictive distribution :math:`p(x_{T+1:T+H} \mid x_{1:T})`, itself an HMM.

    Its ``sample_with_states`` samples continuations and their states, its ``log_prob`` scores them.
    :meth:`HMM.forecast` gives the marginal of each step. In blocks all of it is a constant for
    gradients. Where the next state depends on more than the state, as in an
    :class:`HSMM`, its states are those of ``hmm.expanded()``; so are those of a
    :class:`pyrohmm.FactorialHMM`. That of a :class:`pyrohmm.BlockHMM` of inner products is in
    blocks, too.

    Args:
        hmm: The model; it must not change with the step.
        values: ``(*B, T, *E)``, observations.
        num_steps: How many steps ahead, H. Of a :class:`pyrohmm.ContinuousTimeHMM` the times of
            these steps, ``(*B, H)``, all after the last one.

    Returns:
        An HMM of batch shape ``(*B)`` and event shape ``(H, *E)``, every sequence H steps long.

    Raises:
        TypeError: If ``num_steps`` is not an int.
        ValueError: If ``num_steps`` is less than one, the model changes with the step, so that
            what follows is not known, or a sequence has probability zero.

    Example:
        >>> flip = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> shown = Categorical(probs=torch.eye(2))
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), flip, shown, torch.tensor([3, 2]))
        >>> ahead = continuation(hmm, torch.tensor([[0, 1, 0], [0, 1, 0]]), 4)
        >>> values, states = ahead.sample_with_states()
        >>> values
        tensor([[1, 0, 1, 0],
                [0, 1, 0, 1]])
    """
    ahead: Any = num_steps
    further: dict[str, Any] = {"observed": None, "allowed": None}
    if isinstance(hmm, ContinuousTimeHMM):
        hmm.chain.check_samples("continuation")
        hmm.chain.check_rates("continuation")
        check_tensor("times", ahead)
        gaps = hmm.gaps_after(ahead)
        further["times"], ahead = ahead, gaps.size(-1)
        matrix = over_gaps(hmm.rates, Gaps.of(gaps[..., :1])).squeeze(-3)
    else:
        check_size("num_steps", ahead)
        hmm.check_constant("continuation", markov=False)
        hmm = hmm if isinstance(hmm.chain, MarkovChain) else hmm.expanded()
        if in_blocks(hmm) and isinstance(hmm.transition, InnerProductTransition):
            one_batch = hmm.lengths.dim() == 1 and values.dim() == 1 + len(hmm.event_shape)
            if hmm.observed is None and one_batch:
                return _continued(hmm, hmm.transition, values, ahead)
        matrix = hmm.log_transition
    filtered = recursions.filtered(*hmm.log_factors(values), hmm.lengths)
    batch = filtered.shape[:-2]
    last = (hmm.lengths.expand(batch) - 1).to(filtered.device)[..., None, None]
    final = filtered.gather(-2, last.expand(*batch, 1, hmm.num_states)).squeeze(-2)
    check_possible(final.logsumexp(-1))
    first = normalised(logsumexp(final.unsqueeze(-1) + matrix, -2))
    if isinstance(hmm.emission, Autoregressive):
        further["emission"] = hmm.emission.after(*hmm.prepare_values(values), hmm.lengths)
    lengths = torch.full(first.shape[:-1], int(ahead))
    return hmm.replace(log_initial=first, lengths=lengths, **further)


def _continued(
    hmm: BlockHMM, transition: InnerProductTransition, values: Tensor, num_steps: int
) -> HMM:
    """Block HMM of the steps after ``values`` ``(N, T, *E)``."""
    final = hmm.final_state(values)
    check_possible(final.log_probs.logsumexp(-1))
    with torch.no_grad():
        carried = CarriedState.of(transition, *final)
    ahead = beside(final.log_probs, hmm).replace(lengths=torch.full_like(hmm.lengths, num_steps))
    return cast(BlockHMM, ahead).continue_from(carried)


def impute(hmm: HMM, values: Tensor, sample_shape: Sequence[int] = ()) -> Tensor:
    """Fill the steps that are not observed by joint samples given those that are.

    Args:
        hmm: The model; its ``observed`` says which steps are missing.
        values: ``(*B, T, *E)``, observations.
        sample_shape: How many times to sample, ``*S``.

    Returns:
        ``(*S, *B, T, *E)``, of the dtype of ``values``. Observed and padded steps are as given,
        also where a single component of an observed vector is NaN.

    Raises:
        ValueError: If a sequence has probability zero.

    Example:
        >>> flip = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> shown = Categorical(probs=torch.eye(2))
        >>> seen = torch.tensor([False, True, False, False])
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), flip, shown, torch.tensor(4), seen)
        >>> impute(hmm, torch.tensor([7, 1, 7, 7]))
        tensor([0, 1, 0, 1])
    """
    with torch.no_grad():
        check_possible(hmm.log_prob(values))
        values = hmm.values_of(values)
        states = hmm.sample_states(values, sample_shape)
        if not isinstance(hmm, BlockHMM) and isinstance(hmm.emission, Autoregressive):
            samples = sample_in_time(hmm.emission, states, *hmm.prepare_values(values))
        else:
            samples = hmm.sample_observations(states)
        missing = (hmm.exists & ~hmm.known).expand(states.shape)
        missing = missing.reshape(missing.shape + (1,) * (len(hmm.event_shape) - 1))
        return torch.where(missing, samples.to(values.dtype), values)


def observation_marginals(hmm: HMM, values: Tensor) -> Forecast:
    r"""Marginal distribution of an observation at each step, given all that was observed.

    .. math:: p(x'_t \mid x_{1:T}) = \sum_k p(z_t = k \mid x_{1:T}) \, p(x'_t \mid z_t = k)

    At a missing step this is the distribution of what is missing there, and its ``mean`` or
    ``probs`` the imputation by expectation; these are marginals, so that samples of different steps
    are not joint: :func:`impute` samples those. At an observed step it is the distribution of a
    second observation of the same state. At padded steps it means nothing.

    Args:
        hmm: The model; its ``observed`` says which steps are missing.
        values: ``(*B, T, *E)``, observations.

    Returns:
        A distribution of batch shape ``(*B, T)``; see :class:`Forecast`.

    Raises:
        ValueError: If a sequence has probability zero, or the emission depends on the observations
            before.

    Example:
        >>> sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
        >>> levels = Normal(torch.tensor([0.0, 10.0]), 1.0)
        >>> seen = torch.tensor([True, False])
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sure, levels, torch.tensor(2), seen)
        >>> observation_marginals(hmm, torch.tensor([9.5, math.nan])).mean
        tensor([10., 10.])
    """
    refuse_autoregressive(hmm, "observation_marginals")
    posterior = hmm.posterior(values)
    check_possible(posterior.log_evidence)
    padding = ~hmm.exists.unsqueeze(-1)  # where sampling is to be possible
    states = posterior.state_probs.masked_fill(padding, 1.0)
    states = states / states.sum(-1, keepdim=True)
    kind = _ForecastPerStep if hmm.emission_per_step else Forecast
    return kind(states, beside(states, hmm).emission)


class _ForecastPerStep(Forecast):
    """A :class:`Forecast` whose emission has batch shape ``(*b, H, K)``: one for each step."""

    def __init__(self, states: Tensor, emission: Any) -> None:
        super().__init__(states, emission)
        self._forecast = Forecast(states.unsqueeze(-2), emission)  # batch shape (*B, H, 1)
        self._dim = -1 - len(self.event_shape)

    @property
    def probs(self) -> Tensor:
        return self._forecast.probs.squeeze(-2 if is_categorical(self.emission) else -1)

    mean: Any = property(lambda self: self._forecast.mean.squeeze(self._dim))
    variance: Any = property(lambda self: self._forecast.variance.squeeze(self._dim))

    def quantiles(self, probs: Sequence[float] | Tensor = (0.05, 0.5, 0.95)) -> Tensor:
        return self._forecast.quantiles(probs).squeeze(self._dim)

    def log_prob(self, values: Tensor) -> Tensor:
        return self._forecast.log_prob(values.unsqueeze(self._dim)).squeeze(-1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self._forecast.sample(sample_shape).squeeze(self._dim)


def k_best(hmm: HMM, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    r"""The C paths of largest :math:`p(z_{1:T} \mid x_{1:T})`, best first.

    Exact, by the list Viterbi algorithm. The first path is that of :meth:`HMM.viterbi`.

    Args:
        hmm: The model. Of an :class:`HSMM` it takes the time of a chain of K · D states, of a
            :class:`SecondOrderHMM` that of a chain of K (K + 1).
        values: ``(*B, T, *E)``, observations.
        count: How many paths to find, C.

    Returns:
        Paths ``(*B, C, T)``, integers, 0 at padded steps; and their log p(x, z) ``(*B, C)``, in
        nats. Where fewer than C paths are possible the rest have -inf, and hold 0. Of a
        :class:`BlockHMM` they are constants for gradients.

    Raises:
        TypeError: If ``count`` is not an int.
        ValueError: If ``count`` is less than one, or a sequence has probability zero.

    References:
        A tree-trellis based fast search for the N best sentences (Soong and Huang, 1991).

    Example:
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sticky, coins, torch.tensor(2))
        >>> paths, log_joint = k_best(hmm, torch.tensor([1, 0]), 3)
        >>> paths
        tensor([[0, 0],
                [1, 1],
                [1, 0]])
        >>> log_joint.exp()
        tensor([0.1125, 0.0405, 0.0225], dtype=torch.float64)
    """
    check_size("count", count)
    parts, seen = path_factors(hmm, values)
    paths, best = map(torch.cat, zip(*(part.k_best(count) for part in parts)))
    if seen is not None:
        paths = cast(BlockHMM, hmm).chain.at_places(paths.movedim(1, 0), seen).movedim(0, -2)
        best = best.reshape(*seen.batch, count)
        paths = paths.masked_fill(best.isneginf().unsqueeze(-1), 0)
    check_possible(best[..., 0])
    return paths, best


def path_entropy(hmm: HMM, values: Tensor) -> Tensor:
    r"""Entropy of the path of states given the observations, in nats, shape ``(*B)``.

    .. math:: H(z_{1:T} | x) = -\sum_z p(z | x) \log p(z | x)

    It is zero when the observations leave one path only, and at most :math:`T \log K`. Of a
    :class:`BlockHMM` it is a constant for gradients.

    Args:
        hmm: The model. Of an :class:`HSMM` it takes the time of a chain of K · D states, of a
            :class:`SecondOrderHMM` that of a chain of K (K + 1).
        values: ``(*B, T, *E)``, observations.

    Raises:
        ValueError: If a sequence has probability zero.

    References:
        Efficient computation of the hidden Markov model entropy for a given observation sequence
        (Hernando, Crespi and Cybenko, 2005).

    Example:
        >>> blank = Categorical(probs=torch.ones(2, 1))
        >>> fair = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(fair[0], fair, blank, torch.tensor(3))
        >>> path_entropy(hmm, torch.tensor([0, 0, 0])) / math.log(2)  # three tosses
        tensor(3., dtype=torch.float64)
    """
    parts, seen = path_factors(hmm, values)
    pairs = [part.entropy() for part in parts]
    found, left = pairs[0] if seen is None else map(torch.cat, zip(*pairs))
    check_possible(left)
    return found if seen is None else found.reshape(seen.batch)


def expected_visits(hmm: HMM, values: Tensor) -> Tensor:
    r"""Expected number of visits to each state given the observations, ``(*B, K)``.

    .. math:: p(z_1 = k \mid x) + \sum_{t > 1} p(z_{t-1} \neq k, z_t = k \mid x)

    A visit is a run of steps in one state: as :math:`\sum_t p(z_t = k \mid x)` is the expected time
    in a state, their ratio is the mean length of a visit.

    Args:
        hmm: The model. Of an :class:`HSMM` it takes the time of a chain of K · D states, of a
            :class:`SecondOrderHMM` that of a chain of K (K + 1).
        values: ``(*B, T, *E)``, observations.

    Raises:
        ValueError: If a sequence has probability zero.

    Example:
        >>> seen = Categorical(probs=torch.eye(2))
        >>> fair = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(fair[0], fair, seen, torch.tensor(5))
        >>> expected_visits(hmm, torch.tensor([0, 0, 1, 0, 0]))
        tensor([2., 1.], dtype=torch.float64)
    """
    initial, transition, likelihood, _, state_of = chain_factors(hmm, values)
    found = recursions.posterior(initial, transition, likelihood, hmm.lengths)
    check_possible(found.log_evidence)
    stays = state_of.unsqueeze(-1) == state_of
    entered = found.state_probs[..., 0, :] + found.transitions.masked_fill(stays, 0.0).sum(-2)
    return entered.new_zeros(*entered.shape[:-1], hmm.num_states).index_add(-1, state_of, entered)


class PseudoResiduals(NamedTuple):
    r"""Conditional CDF at each observation given others: P(X < x) and P(X <= x).

    If the model is true, a number drawn uniformly from ``lower`` to ``upper`` is uniform on [0, 1].
    The two are equal when observations are continuous. Steps that are padded or not observed, and
    missing components, have the limits 0 and 1.

    Attributes:
        lower: ``(*B, T, *E)``, :math:`P(X_t < x_t | \cdot)`.
        upper: ``(*B, T, *E)``, :math:`P(X_t \le x_t | \cdot)`.
    """

    lower: Tensor
    upper: Tensor

    def normal(self) -> PseudoResiduals:
        """Standard normal quantiles of both CDF limits; infinite for 0 and 1."""
        return PseudoResiduals(torch.special.ndtri(self.lower), torch.special.ndtri(self.upper))

    def middle(self) -> Tensor:
        """Normal quantile ``(*B, T, *E)`` of the midpoint; 0 at padded and missing steps."""
        return torch.special.ndtri((self.lower + self.upper) / 2)

    def sample(self) -> Tensor:
        """Sample randomised residuals ``(*B, T, *E)``: standard normal, if the model is true."""
        return torch.special.ndtri(torch.lerp(self.lower, self.upper, torch.rand_like(self.lower)))


def pseudo_residuals(hmm: HMM, values: Tensor, *, forecast: bool = False) -> PseudoResiduals:
    r"""Pseudo-residuals of each observation, which show outliers and misspecified emissions.

    .. math:: P(X_t \le x_t | x_{1:t-1}, x_{t+1:T})

    Forecast pseudo-residuals, given the past alone, are also independent from step to step if the
    model is true; the ordinary ones, given all other observations, are not.

    Args:
        hmm: The model, of symbols, counts, or any distribution that has a ``cdf``, also one of your
            own; vectors of such have residuals of each component, whose conditional distribution
            is the marginal one.
        values: ``(*B, T, *E)``, observations.
        forecast: Whether to condition on the past alone.

    Returns:
        Limits ``(*B, T, *E)`` of uniform pseudo-residuals, without gradients.

    Raises:
        ValueError: If cumulative probabilities are not known, observations depend on those
            before and ``forecast`` is not set, or a sequence has probability zero.

    References:
        Hidden Markov Models for Time Series, 2nd edition, section 6.2 (Zucchini, MacDonald and
        Langrock, 2016).

    Example:
        >>> levels = Normal(torch.tensor([0.0, 10.0]), 1.0)
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sticky, levels, torch.tensor(3))
        >>> residuals = pseudo_residuals(hmm, torch.tensor([0.0, 0.0, 4.0]), forecast=True)
        >>> residuals.upper
        tensor([0.2500, 0.4500, 0.9000], dtype=torch.float64)
    """
    hmm.chain.check_samples("pseudo_residuals")
    if not forecast:
        refuse_autoregressive(hmm, "pseudo_residuals without forecast=True")
    with torch.no_grad():
        chain = chain_factors(hmm, values)
        log_probs = chain.predicted()
        check_possible(logsumexp(log_probs + chain.likelihood, -1).sum(-1))
        log_probs = normalised(log_probs if forecast else log_probs + chain.backward())
        probs, wide = log_probs.exp(), (..., *(None,) * (len(hmm.event_shape) - 1))
        if len(chain.state_of) > hmm.num_states:
            probs = probs @ one_hot(chain.state_of, hmm.num_states).to(probs)
        seen = hmm.prepare_values(values)[0]
        unknown = ~hmm.known[wide] | seen.isnan()
        limits = _conditional_cdf(hmm, seen.nan_to_num(0.0).double(), probs[wide])
        lower, upper = (limit.clamp(0.0, 1.0) for limit in limits)
        return PseudoResiduals(lower.masked_fill(unknown, 0.0), upper.masked_fill(unknown, 1.0))


def _conditional_cdf(hmm: HMM, values: Tensor, weights: Tensor) -> list[Tensor]:
    """P(X < x) and P(X <= x) of values ``(*B, T, *E)``, given ``weights`` ``(*B, T, K, *1)``."""
    emission, at = hmm.emission, -len(hmm.event_shape)
    parts, time = [(emission, values, weights)], at
    if not hmm.emission_per_step:  # time first: the batch of the emission is last
        time, past = 0, with_past(emission, values)
        values, weights = values.movedim(at, 0), weights.movedim(at - 1, 0)
        size = max(1, CACHED // (values[0].numel() * weights.size(at)))
        parts = [(emission, *pair) for pair in zip(values.split(size), weights.split(size))]
    if isinstance(emission, Autoregressive):
        first, context = emission.num_first, past.movedim(at - 1, 0).narrow(at, 0, emission.lags)
        parts = [(emission.initial, values[:first], weights[:first])] if first else []
        if len(values) > first:
            parts.append((emission.given(context[first:]), values[first:], weights[first:]))
    limits = []
    for below in (True, False):
        found = [(w * cdf(part, x.unsqueeze(at), below)).sum(at) for part, x, w in parts]
        limits.append(torch.cat(found).movedim(time, at))
    return limits


all_names_checked(
    globals(), dwell_counts, dwell_time_hazard, dwell_time_log_prob, dwell_time_log_survival,
    dwell_time_mean, prevalence, segments,
)  # fmt: skip
