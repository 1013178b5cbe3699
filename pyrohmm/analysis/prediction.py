"""Prediction: one step ahead, continuation, imputation, marginals of observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import check_size, check_tensor
from .._transforms import beside
from ..chains.blocks import CarriedState
from ..chains.markov import MarkovChain
from ..chains.paths import PathFactors, normalised
from ..chains.rates import Gaps, over_gaps
from ..distributions.autoregressive import Autoregressive
from ..distributions.base import check_possible
from ..distributions.block_hmm import BlockHMM
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.forecast import Forecast, sample_in_time
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from ..ops import recursions
from ..ops.blocks import queries as block_queries
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.log_space import logsumexp


def chain_factors(hmm: HMM, values: Tensor) -> PathFactors:
    """Join the parameters of ``hmm`` and observations ``(*B, T, *E)``."""
    if isinstance(hmm, BlockHMM):
        return PathFactors.joined(*hmm.log_factors(values), hmm.lengths)
    return PathFactors.of(hmm.chain, hmm.log_likelihood(values), hmm.lengths)


def in_blocks(hmm: HMM) -> TypeGuard[BlockHMM]:
    """Whether queries are computed from block to block, not by the matrix of all transitions."""
    return isinstance(hmm, BlockHMM) and hmm.carried is None


def refuse_autoregressive(hmm: HMM, purpose: str) -> None:
    """Raise if the emission depends on the observations before, which ``purpose`` does not know."""
    if not isinstance(hmm, BlockHMM) and isinstance(hmm.emission, Autoregressive):
        raise ValueError(
            f"{purpose} needs observations that depend on the state alone; the emission of hmm is "
            f"{type(hmm.emission).__name__}. hmm.posterior, hmm.forecast and continuation know of "
            "earlier observations."
        )


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
        with torch.no_grad():
            blocks, shape = hmm.log_chain(values, trim=True)
            return block_queries.at_steps(blocks, block_queries.predictive(blocks), shape)
    chain = chain_factors(hmm, values)
    scores = logsumexp(chain.predicted() + chain.likelihood, -1)
    informative = hmm.known
    if hmm.allowed is not None:
        informative = informative | (chain.exists & ~hmm.allowed.all(-1))
    if isinstance(hmm, ContinuousTimeHMM) and hmm.exact_entry is not None:
        informative = chain.exists  # of no entry where nothing is observed
    if isinstance(hmm, HSMM) and not hmm.censored_end:  # where a segment ends
        later = torch.nn.functional.pad(chain.exists[..., 1:], (0, 1))
        informative = informative | (chain.exists & ~later)
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
    if isinstance(hmm, ContinuousTimeHMM):
        return _continued_in_time(hmm, values, num_steps)
    check_size("num_steps", num_steps)  # type: ignore[arg-type]
    hmm.check_constant("continuation", markov=False)
    if not isinstance(hmm.chain, MarkovChain):
        hmm = hmm.expanded()
    if in_blocks(hmm) and isinstance(hmm.transition, InnerProductTransition):
        if (
            hmm.observed is None
            and hmm.lengths.dim() == 1
            and values.dim() == 1 + len(hmm.event_shape)
        ):
            return _continued(hmm, hmm.transition, values, int(num_steps))
    final = _last_state(hmm, values)
    first = normalised(logsumexp(final.unsqueeze(-1) + hmm.log_transition, -2))
    return hmm.replace(
        log_initial=first,
        emission=_emission_ahead(hmm, values),
        lengths=torch.full(first.shape[:-1], int(num_steps)),
        observed=None,
        allowed=None,
    )


def _last_state(hmm: HMM, values: Tensor) -> Tensor:
    """Filtered log-probabilities ``(*B, K)`` of the state at the last step of each sequence."""
    filtered = recursions.filtered(*hmm.log_factors(values), hmm.lengths)
    batch = filtered.shape[:-2]
    last = (hmm.lengths.expand(batch) - 1).to(filtered.device)[..., None, None]
    final = filtered.gather(-2, last.expand(*batch, 1, hmm.num_states)).squeeze(-2)
    check_possible(final.logsumexp(-1))
    return final


def _emission_ahead(hmm: HMM, values: Tensor) -> TorchDistribution:
    """The emission of the steps that follow ``values``."""
    emission = hmm.emission
    if isinstance(emission, Autoregressive):
        return emission.after(*hmm.prepare_values(values), hmm.lengths)
    return emission


def _continued_in_time(hmm: ContinuousTimeHMM, values: Tensor, times: int | Tensor) -> HMM:
    """:func:`continuation` at ``times`` ``(*B, H)``."""
    hmm.chain.check_samples("continuation")
    hmm.chain.check_rates("continuation")
    check_tensor("times", times)
    gaps = hmm.gaps_after(cast(Tensor, times))
    final = _last_state(hmm, values)
    matrix = over_gaps(hmm.rates, Gaps.of(gaps[..., :1])).squeeze(-3)
    first = normalised(logsumexp(final.unsqueeze(-1) + matrix, -2))
    return hmm.replace(
        log_initial=first,
        emission=_emission_ahead(hmm, values),
        lengths=torch.full(first.shape[:-1], gaps.size(-1)),
        times=times,
        observed=None,
        allowed=None,
    )


def _continued(
    hmm: BlockHMM, transition: InnerProductTransition, values: Tensor, num_steps: int
) -> HMM:
    """:func:`continuation` in blocks, of values ``(N, T, *E)``."""
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
        samples = samples.to(values.dtype)
        missing = torch.zeros_like(states, dtype=torch.bool)
        if hmm.observed is not None:
            missing = (hmm.exists & ~hmm.observed).expand(states.shape)
        missing = missing.reshape(missing.shape + (1,) * (len(hmm.event_shape) - 1))
        return torch.where(missing, samples, values)


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
    states = posterior.state_probs.masked_fill(
        ~hmm.exists.unsqueeze(-1), 1.0
    )  # so that sampling is possible
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
        return self._forecast.probs.squeeze(-2)

    @property
    def mean(self) -> Tensor:
        return self._forecast.mean.squeeze(self._dim)

    @property
    def variance(self) -> Tensor:
        return self._forecast.variance.squeeze(self._dim)

    def quantiles(self, probs: Sequence[float] | Tensor = (0.05, 0.5, 0.95)) -> Tensor:
        return self._forecast.quantiles(probs).squeeze(self._dim)

    def log_prob(self, values: Tensor) -> Tensor:
        return self._forecast.log_prob(values.unsqueeze(self._dim)).squeeze(-1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self._forecast.sample(sample_shape).squeeze(self._dim)
