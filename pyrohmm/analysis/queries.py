"""Posterior queries of an HMM, by topic: decoding, prediction, dwell times, residuals, segments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .._checks import check_size
from ..chains.paths import logsumexp, normalised
from ..distributions.autoregressive import Autoregressive
from ..distributions.base import check_possible
from ..distributions.hmm import HMM
from ..distributions.quantiles import cdf
from ..ops import recursions
from ..ops.blocks import queries as block_queries
from .dwell_times import Segment as Segment
from .dwell_times import dwell_counts as dwell_counts
from .dwell_times import dwell_time_hazard as dwell_time_hazard
from .dwell_times import dwell_time_log_prob as dwell_time_log_prob
from .dwell_times import dwell_time_log_survival as dwell_time_log_survival
from .dwell_times import dwell_time_mean as dwell_time_mean
from .dwell_times import prevalence as prevalence
from .dwell_times import segments as segments
from .prediction import chain_factors, in_blocks, refuse_autoregressive
from .prediction import continuation as continuation
from .prediction import impute as impute
from .prediction import observation_marginals as observation_marginals
from .prediction import predictive_log_prob as predictive_log_prob


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
        List Viterbi decoding algorithms with applications (Seshadri and Sundberg, 1994).

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
    if in_blocks(hmm):
        with torch.no_grad():
            states, best = hmm.chain.k_best(hmm._read(values, check=True), count)
        paths = states.movedim(0, -2).masked_fill(best.isneginf().unsqueeze(-1), 0)
    else:
        paths, best = chain_factors(hmm, values).k_best(count)
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
    if in_blocks(hmm):
        with torch.no_grad():
            blocks, shape = hmm.log_chain(values)
            found, left = (part.reshape(shape[:-1]) for part in block_queries.entropy(blocks))
    else:
        found, left = chain_factors(hmm, values).entropy()
    check_possible(left)
    return found


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
    visits = entered.new_zeros(*entered.shape[:-1], hmm.num_states)
    return visits.index_add(-1, state_of, entered)


class PseudoResiduals(NamedTuple):
    r"""Cumulative probability of each observation given the other observations.

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
        """Both limits as quantiles of the standard normal; those of 0 and 1 are infinite."""
        return PseudoResiduals(torch.special.ndtri(self.lower), torch.special.ndtri(self.upper))

    def middle(self) -> Tensor:
        """Normal quantile ``(*B, T, *E)`` of the midpoint; 0 at padded and missing steps."""
        return torch.special.ndtri((self.lower + self.upper) / 2)

    def sample(self) -> Tensor:
        """Sample randomised residuals ``(*B, T, *E)``: standard normal, if the model is true."""
        share = torch.rand_like(self.lower)
        return torch.special.ndtri(torch.lerp(self.lower, self.upper, share))


def pseudo_residuals(hmm: HMM, values: Tensor, *, forecast: bool = False) -> PseudoResiduals:
    r"""Pseudo-residuals, which show outliers and emissions of a wrong form.

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
        probs = log_probs.exp() @ one_hot(chain.state_of, hmm.num_states).to(log_probs)
        seen, events = hmm.prepare_values(values)[0], len(hmm.event_shape) - 1
        wide = (..., *(None,) * events)
        unknown = ~hmm.known[wide] | seen.isnan()
        limits = _in_each_state(hmm, seen.nan_to_num(0.0).double())
        lower, upper = ((probs[wide] * limit).sum(-1 - events).clamp(0.0, 1.0) for limit in limits)
        return PseudoResiduals(lower.masked_fill(unknown, 0.0), upper.masked_fill(unknown, 1.0))


def _in_each_state(hmm: HMM, values: Tensor) -> list[Tensor]:
    """Probability in each state of less than each value, and of at most it, ``(*B, T, K, *E)``."""
    emission, at = hmm.emission, -len(hmm.event_shape)
    if hmm.emission_per_step:
        return [cdf(emission, values.unsqueeze(at), below) for below in (True, False)]
    parts = [(emission, values.movedim(at, 0))]  # time first: the batch of the emission is last
    if isinstance(emission, Autoregressive):
        windows, first = emission.windows(values).movedim(at - 1, 0), emission.num_first
        now, context = windows.select(at, -1), windows.narrow(at, 0, emission.lags)[first:]
        parts = [(emission.initial, now[:first]), (emission.given(context), now[first:])]
    pairs = [[cdf(part, each.unsqueeze(at), below) for part, each in parts if len(each)]
             for below in (True, False)]  # fmt: skip
    return [torch.cat(pair).movedim(0, at - 1) for pair in pairs]
