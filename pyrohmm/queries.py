r"""Questions about a sequence that go beyond its states: paths, entropy, gaps, residuals, dwelling.

Every function reads an :class:`HMM` and ``values`` ``(*B, T, *E)``, as the methods of the HMM do,
and answers for the whole batch at once. Steps that are padded or not observed say nothing, whatever
``values`` hold there. Parameters may change with the step unless it is said that they may not.
Logarithms are natural: probabilities are in nats. No gradient passes.

Probabilities and scores are float64, whatever the model's numbers are: they are sums over long
sequences, and tails of distributions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import recursions
from ._checks import check_broadcast, check_integers, check_lengths, check_size
from .hmm import HMM, Forecast, emit, emit_per_step

# Paths --------------------------------------------------------------------------------------------


def k_best(hmm: HMM, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    r"""The ``count`` most probable paths of states, best first.

    The list Viterbi algorithm: the best paths into each state are kept at each step, so that the
    answer is exact. The first path is that of :meth:`HMM.viterbi`.

    Args:
        hmm: The model.
        values: ``(*B, T, *E)``, observations.
        count: How many paths to find, C.

    Returns:
        Paths ``(*B, C, T)``, integers, 0 at padded steps; and their log p(x, z) ``(*B, C)``, in
        nats. Where fewer than C paths are possible the rest have -inf, and hold 0.

    Raises:
        TypeError: If ``count`` is not an int.
        ValueError: If ``count`` is less than one.

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
    with torch.no_grad():
        chain = _read(hmm, values)
        num_steps, num_states = chain.likelihood.shape[-2:]
        first = chain.initial + chain.likelihood[..., 0, :]
        scores = first.new_full((*first.shape, count), -torch.inf)  # of the C best into each state
        scores[..., 0] = first
        own = torch.arange(num_states * count, device=first.device)
        pointers = []  # where each of the K C paths came from, among those of the step before
        for t in range(1, num_steps):
            moved = chain.matrix(t).mT.unsqueeze(-1) + scores.unsqueeze(-3)  # (*B, to, from, C)
            ranked, order = moved.flatten(-2).sort(dim=-1, descending=True, stable=True)
            exists = chain.exists[..., t, None, None]
            arrived = ranked[..., :count] + chain.likelihood[..., t, :, None]
            scores = torch.where(exists, arrived, scores)
            origin = order[..., :count].flatten(-2)
            pointers.append(torch.where(exists.squeeze(-1), origin, own))
        ranked, order = scores.flatten(-2).sort(dim=-1, descending=True, stable=True)
        log_joint, place = ranked[..., :count], order[..., :count]
        path = [place // count]
        for pointer in reversed(pointers):
            place = pointer.gather(-1, place)
            path.append(place // count)
        paths = torch.stack(path[::-1], -1)
        real = chain.exists.unsqueeze(-2) & ~log_joint.isneginf().unsqueeze(-1)
        return paths.masked_fill(~real, 0), log_joint


def path_entropy(hmm: HMM, values: Tensor) -> Tensor:
    r"""Entropy of the path of states given the observations, in nats, shape ``(*B)``.

    .. math:: H(z_{1:T} | x) = -\sum_z p(z | x) \log p(z | x)

    It is zero when the observations leave one path only, and at most :math:`T \log K`. A sequence
    of probability zero has no paths: its entropy is given as zero.

    Args:
        hmm: The model.
        values: ``(*B, T, *E)``, observations.

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
    with torch.no_grad():
        chain = _read(hmm, values)
        law = _normalised(chain.initial + chain.likelihood[..., 0, :])
        entropy = torch.zeros_like(law)  # of the states before, given the state at t
        for t in range(1, hmm.num_steps):
            pairs = law.unsqueeze(-1) + chain.matrix(t)
            arrived = pairs.logsumexp(-2)
            share = (pairs - _finite(arrived).unsqueeze(-2)).exp()  # of the states at t - 1
            before = (share * entropy.unsqueeze(-1) + torch.special.entr(share)).sum(-2)
            exists = chain.exists[..., t, None]
            law = torch.where(exists, _normalised(arrived + chain.likelihood[..., t, :]), law)
            entropy = torch.where(exists, before, entropy)
        last = law.exp()
        return (last * entropy + torch.special.entr(last)).sum(-1).clamp(min=0.0)


# Observations to come, and missing ones -----------------------------------------------------------


def predictive_log_prob(hmm: HMM, values: Tensor) -> Tensor:
    r"""Log-probability of each observation given those before it, in nats, shape ``(*B, T)``.

    .. math:: \log p(x_t | x_{1:t-1})

    Steps that are padded or not observed hold 0, so that the sum over steps is
    :meth:`HMM.log_prob`; a label counts as an observation. What is observed holds -inf from where
    it has become impossible.

    Args:
        hmm: The model.
        values: ``(*B, T, *E)``, observations.

    Example:
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sticky, coins, torch.tensor(3))
        >>> predictive_log_prob(hmm, torch.tensor([1, 1, 1])).exp()
        tensor([0.7000, 0.7457, 0.7772], dtype=torch.float64)
    """
    with torch.no_grad():
        chain = _read(hmm, values)
        scores = (_predicted(chain) + chain.likelihood).logsumexp(-1)
        told = _known(hmm, chain)
        if hmm.allowed is not None:
            told = told | (chain.exists & ~hmm.allowed.all(-1))
        return scores.masked_fill(~told, 0.0)


def continuation(hmm: HMM, values: Tensor, num_steps: int) -> HMM:
    """The joint law of the ``num_steps`` observations that follow ``values``: itself an HMM.

    Its ``sample_with_states`` draws continuations and their states, its ``log_prob`` scores them.
    :meth:`HMM.forecast` gives the law of each step alone. The law of its first state is a constant
    for gradients.

    Args:
        hmm: The model; it must not change with the step.
        values: ``(*B, T, *E)``, observations.
        num_steps: How many steps ahead, H.

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
    check_size("num_steps", num_steps)
    _check_constant(hmm, "continuation")
    with torch.no_grad():
        laws = recursions.filtered(*hmm._chain(values), hmm.lengths)
        batch = laws.shape[:-2]
        last = (hmm.lengths.expand(batch) - 1).to(laws.device)
        law = laws.gather(-2, last[..., None, None].expand(*batch, 1, hmm.num_states)).squeeze(-2)
        _check_possible(law.logsumexp(-1))
        first = _normalised((law.unsqueeze(-1) + hmm.log_transition).logsumexp(-2))
    return HMM(
        first,
        hmm.log_transition,
        hmm.emission,
        torch.full(batch, num_steps),
        validate_args=hmm._validate_args,
    )


def impute(hmm: HMM, values: Tensor, sample_shape: Any = ()) -> Tensor:
    """Fill the steps that are not observed by joint draws given those that are.

    Args:
        hmm: The model; its ``observed`` says which steps are missing.
        values: ``(*B, T, *E)``, observations.
        sample_shape: How many times to draw, ``*S``.

    Returns:
        ``(*S, *B, T, *E)``, of the dtype of ``values``. Observed and padded steps are as given.

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
        _check_possible(hmm.log_prob(values))
        states = hmm.sample_states(values, sample_shape)
        draw = emit_per_step if hmm.emission_per_step else emit
        drawn = draw(hmm.emission, states).to(values.dtype)
        missing = torch.zeros_like(states, dtype=torch.bool)
        if hmm.observed is not None:
            missing = (hmm._exists() & ~hmm.observed).expand(states.shape)
        return torch.where(_over_events(missing, hmm), drawn, values)


def observation_laws(hmm: HMM, values: Tensor) -> Forecast:
    r"""The law of an observation at each step, given all that was observed.

    .. math:: \sum_k p(z_t = k | x) \, p(x_t | k)

    At a missing step this is the law of what is missing there, and its ``mean`` or ``probs`` the
    imputation by expectation; each step has its own law, so that its samples are not joint:
    :func:`impute` draws those. At an observed step it is the law of a second observation of the
    same state. At padded steps the law means nothing.

    Args:
        hmm: The model; its ``observed`` says which steps are missing.
        values: ``(*B, T, *E)``, observations.

    Returns:
        A distribution of batch shape ``(*B, T)``; see :class:`Forecast`.

    Raises:
        ValueError: If a sequence has probability zero.

    Example:
        >>> sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
        >>> levels = Normal(torch.tensor([0.0, 10.0]), 1.0)
        >>> seen = torch.tensor([True, False])
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sure, levels, torch.tensor(2), seen)
        >>> observation_laws(hmm, torch.tensor([9.5, math.nan])).mean
        tensor([10., 10.])
    """
    evidence, states, _ = hmm.posterior(values)
    _check_possible(evidence)
    states = states.masked_fill(~hmm._exists().unsqueeze(-1), 1.0)  # so that sampling is possible
    states = states / states.sum(-1, keepdim=True)
    return (_ForecastPerStep if hmm.emission_per_step else Forecast)(states, hmm.emission)


class _ForecastPerStep(Forecast):
    """A :class:`Forecast` whose emission has batch shape ``(*b, H, K)``: one for each step."""

    def __init__(self, states: Tensor, emission: Any) -> None:
        super().__init__(states, emission)
        self._each = Forecast(states.unsqueeze(-2), emission)  # batch shape (*B, H, 1)
        self._one = -1 - len(self.event_shape)

    @property
    def probs(self) -> Tensor:
        return self._each.probs.squeeze(-2)

    @property
    def mean(self) -> Tensor:
        return self._each.mean.squeeze(self._one)

    @property
    def variance(self) -> Tensor:
        return self._each.variance.squeeze(self._one)

    def log_prob(self, values: Tensor) -> Tensor:
        return self._each.log_prob(values.unsqueeze(self._one)).squeeze(-1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self._each.sample(sample_shape).squeeze(self._one)


# Dwelling -----------------------------------------------------------------------------------------


def dwell_time_mean(hmm: HMM) -> Tensor:
    r"""Mean number of steps that a visit to each state lasts, shape ``(*B, K)``.

    .. math:: 1 / (1 - A_{kk})

    It is infinite for a state that is never left.

    Args:
        hmm: The model; its ``log_transition`` must not change with the step.

    Raises:
        ValueError: If ``log_transition`` changes with the step.

    Example:
        >>> matrix = torch.tensor([[0.9, 0.1], [0.0, 1.0]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), matrix.log(), coins, torch.tensor(5))
        >>> dwell_time_mean(hmm)
        tensor([10., inf])
    """
    return (-_log_leave(hmm)).exp()


def dwell_time_log_prob(hmm: HMM, num_steps: int) -> Tensor:
    r"""Log-probability that a visit to a state lasts 1, 2, ... steps, in nats.

    .. math:: \log p(d | k) = (d - 1) \log A_{kk} + \log (1 - A_{kk})

    Args:
        hmm: The model; its ``log_transition`` must not change with the step.
        num_steps: The longest visit to score, D.

    Returns:
        ``(*B, K, D)``: entry d - 1 is that of a visit of d steps. A state that is never left has
        -inf throughout.

    Raises:
        TypeError: If ``num_steps`` is not an int.
        ValueError: If ``num_steps`` is less than one, or ``log_transition`` changes with the step.

    Example:
        >>> matrix = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), matrix.log(), coins, torch.tensor(5))
        >>> dwell_time_log_prob(hmm, 3).exp()
        tensor([[0.5000, 0.2500, 0.1250],
                [1.0000, 0.0000, 0.0000]])
    """
    check_size("num_steps", num_steps)
    leave = _log_leave(hmm).unsqueeze(-1)
    stay = hmm.log_transition.detach().diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    more = torch.arange(num_steps, device=stay.device)
    return (more * stay).masked_fill(more == 0, 0.0) + leave  # 0 times -inf is NaN


def runs(states: Tensor, lengths: Tensor, num_states: int, *, complete: bool = False) -> Tensor:
    """Count how long the visits to each state last in paths that were decoded or drawn.

    Args:
        states: ``(*B, T)`` integers, paths.
        lengths: ``(*B)`` integers, the number of steps of each path.
        num_states: K.
        complete: Whether to leave out each path's last visit, which its end cuts off.

    Returns:
        ``(K, T)`` integers: entry ``[k, d - 1]`` is the number of visits to state k that lasted d
        steps, over all paths.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If states or lengths are out of range, or their shapes disagree.

    Example:
        >>> runs(torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 0, 0]]), torch.tensor([5, 3]), 2)
        tensor([[0, 2, 0, 0, 0],
                [1, 0, 1, 0, 0]])
    """
    check_integers("states", states)
    check_integers("lengths", lengths)
    check_size("num_states", num_states)
    if states.dim() == 0:
        raise ValueError("states must have shape (*B, T); got a scalar. Use unsqueeze(-1).")
    num_steps = states.size(-1)
    check_lengths(lengths, num_steps)
    batch = check_broadcast({"states": states.shape[:-1], "lengths": lengths.shape})
    states = states.long().expand(*batch, num_steps).reshape(-1, num_steps)
    ends = lengths.to(states.device).expand(batch).reshape(-1, 1)
    exists = torch.arange(num_steps, device=states.device) < ends
    real = states[exists]
    if int(real.min()) < 0 or int(real.max()) >= num_states:
        raise ValueError(
            f"states must lie between 0 and K - 1 = {num_states - 1}; got values from "
            f"{int(real.min())} to {int(real.max())}. Give the number of states of the model."
        )
    starts = exists.clone()
    starts[:, 1:] &= states[:, 1:] != states[:, :-1]
    visit = starts.flatten().cumsum(0) - 1  # numbers the visits of all paths
    duration = visit[exists.flatten()].bincount()
    place = states[starts] * num_steps + duration - 1
    if complete:
        last = visit.reshape(states.shape).gather(1, ends - 1).squeeze(1)
        cut = torch.zeros_like(place, dtype=torch.bool).index_fill(0, last, True)
        place = place[~cut]
    return place.bincount(minlength=num_states * num_steps).reshape(num_states, num_steps)


def _log_leave(hmm: HMM) -> Tensor:
    """Log-probability of moving to another state; one minus staying would lose its digits."""
    if hmm.transition_per_step:
        raise ValueError(
            "hmm must have one log_transition for all steps, for dwell times to have one law; this "
            "one has a matrix for each move. Take one of them, or count visits with runs."
        )
    matrix = hmm.log_transition.detach()
    own = torch.eye(matrix.size(-1), dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(own, -torch.inf).logsumexp(-1)


# Residuals ----------------------------------------------------------------------------------------


class PseudoResiduals(NamedTuple):
    r"""Where each observation lies within the law that the other observations give it.

    If the model is true, a number drawn uniformly from ``lower`` to ``upper`` is uniform on [0, 1].
    The two are equal when observations are continuous. Steps that are padded or not observed have
    the limits 0 and 1.

    Attributes:
        lower: ``(*B, T)``, :math:`P(X_t < x_t | \cdot)`.
        upper: ``(*B, T)``, :math:`P(X_t \le x_t | \cdot)`.
    """

    lower: Tensor
    upper: Tensor

    def normal(self) -> PseudoResiduals:
        """Both limits as quantiles of the standard normal law; those of 0 and 1 are infinite."""
        return PseudoResiduals(torch.special.ndtri(self.lower), torch.special.ndtri(self.upper))

    def middle(self) -> Tensor:
        """Normal quantile ``(*B, T)`` of the midpoint; 0 at padded and missing steps."""
        return torch.special.ndtri((self.lower + self.upper) / 2)

    def sample(self) -> Tensor:
        """Draw randomised residuals ``(*B, T)``: standard normal, if the model is true."""
        share = torch.rand_like(self.lower)
        return torch.special.ndtri(torch.lerp(self.lower, self.upper, share))


def pseudo_residuals(hmm: HMM, values: Tensor, *, forecast: bool = False) -> PseudoResiduals:
    r"""Pseudo-residuals, which show outliers and emissions of a wrong form.

    .. math:: P(X_t \le x_t | x_{1:t-1}, x_{t+1:T})

    Forecast pseudo-residuals, given the past alone, are also independent from step to step if the
    model is true; the ordinary ones, given all other observations, are not.

    Args:
        hmm: The model, of scalar observations: categorical, Bernoulli, binomial, Poisson, or any
            continuous law that has a ``cdf``.
        values: ``(*B, T)``, observations.
        forecast: Whether to condition on the past alone.

    Returns:
        Limits ``(*B, T)`` of uniform pseudo-residuals. They are 0 and 1 also where the observations
        conditioned on are impossible, and so give no law.

    Raises:
        ValueError: If an observation is not a scalar, or its cumulative probabilities are not
            known.

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
    if hmm.emission.event_shape:
        raise ValueError(
            "hmm must have scalar observations, for only those can be ordered; got event shape "
            f"{tuple(hmm.emission.event_shape)} of the emission. Build an HMM of one coordinate."
        )
    with torch.no_grad():
        chain = _read(hmm, values)
        law = _predicted(chain) if forecast else _predicted(chain) + _onward(chain)
        law = _normalised(law)
        unknown = ~_known(hmm, chain) | law.isneginf().all(-1)
        lower, upper = (
            (law.exp() * limit).sum(-1).clamp(0.0, 1.0) for limit in _limits(hmm, values)
        )
        return PseudoResiduals(lower.masked_fill(unknown, 0.0), upper.masked_fill(unknown, 1.0))


def _limits(hmm: HMM, values: Tensor) -> tuple[Tensor, Tensor]:
    """Probability in each state of less than each value, and of at most it, ``(*B, T, K)``."""
    seen, _ = hmm._prepare(values)
    emission: Any = hmm.emission
    if isinstance(
        emission,
        torch.distributions.Categorical
        | torch.distributions.Bernoulli
        | torch.distributions.Binomial,
    ):
        symbols = emission.enumerate_support(expand=False)  # 0, 1, ..., first dimension
        weights = emission.log_prob(symbols).exp().movedim(0, -1)  # (*b, [T,] K, V)
        upto = torch.nn.functional.pad(weights.cumsum(-1), (1, 0))
        upto = upto if hmm.emission_per_step else upto.unsqueeze(-3)
        index = seen.long()[..., None, None]  # (*B, T, 1, 1)
        shape = torch.broadcast_shapes(upto.shape[:-1], index.shape[:-1])
        upto, index = upto.expand(*shape, upto.size(-1)), index.expand(*shape, 1)
        return upto.gather(-1, index).squeeze(-1), upto.gather(-1, index + 1).squeeze(-1)
    if isinstance(emission, torch.distributions.Poisson):

        def at_most(count: Tensor) -> Tensor:
            return torch.special.gammaincc(
                (count.double() + 1).clamp(min=1), emission.rate.double()
            )

        upper = _in_each_state(hmm, at_most, seen)
        lower = _in_each_state(hmm, at_most, seen - 1)
        return torch.where((seen > 0).unsqueeze(-1), lower, 0.0), upper
    try:
        if emission.support.is_discrete:
            raise NotImplementedError
        upper = _in_each_state(hmm, lambda value: emission.cdf(value.double()), seen)
    except NotImplementedError:
        raise ValueError(
            "hmm must have an emission whose cumulative probabilities are known: Categorical, "
            "Bernoulli, Binomial, Poisson, or a continuous law with a cdf; got "
            f"{type(emission).__name__}. Write a subclass that has a cdf."
        ) from None
    return upper, upper


def _in_each_state(hmm: HMM, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply what broadcasts with the emission's batch to ``values`` ``(*B, T)``: ``(*B, T, K)``."""
    if hmm.emission_per_step:
        return function(values.unsqueeze(-1))
    return function(values.movedim(-1, 0).unsqueeze(-1)).movedim(0, -2)


# What the queries share ---------------------------------------------------------------------------


class _Chain(NamedTuple):
    """Parameters and data of the whole batch; a padded step has log-likelihood 0."""

    initial: Tensor  # (*B, K)
    transition: Tensor  # (*b, 1|T-1, K, K)
    likelihood: Tensor  # (*B, T, K)
    exists: Tensor  # (*B, T)

    def matrix(self, t: int) -> Tensor:
        """Log-probabilities of the move that leads to step ``t``, counted from 0."""
        return self.transition[..., t - 1 if self.transition.size(-3) > 1 else 0, :, :]


def _read(hmm: HMM, values: Tensor) -> _Chain:
    """Join parameters and data."""
    initial, transition, likelihood = hmm._chain(values)
    batch = torch.broadcast_shapes(hmm.batch_shape, likelihood.shape[:-2])
    exists = hmm._exists().expand(*batch, hmm.num_steps)
    # in float64: sums over long sequences, and the tails of distributions
    return _Chain(
        initial.double().expand(*batch, hmm.num_states),
        transition.double(),
        likelihood.double().masked_fill(~exists.unsqueeze(-1), 0.0),
        exists,
    )


def _known(hmm: HMM, chain: _Chain) -> Tensor:
    """Which steps exist and are observed, ``(*B, T)``."""
    return chain.exists if hmm.observed is None else chain.exists & hmm.observed


def _predicted(chain: _Chain) -> Tensor:
    """Law of each state given the observations before it, as logarithms, ``(*B, T, K)``."""
    law = chain.initial
    laws = [law]
    for t in range(1, chain.likelihood.size(-2)):
        filtered = _normalised(law + chain.likelihood[..., t - 1, :])
        law = (filtered.unsqueeze(-1) + chain.matrix(t)).logsumexp(-2)
        laws.append(law)
    return torch.stack(laws, -2)


def _onward(chain: _Chain) -> Tensor:
    """Log p(x_{t+1:T} | z_t), up to a constant for each step, ``(*B, T, K)``."""
    message = torch.zeros_like(chain.initial)
    messages = [message]
    for t in range(chain.likelihood.size(-2) - 1, 0, -1):
        seen = (chain.likelihood[..., t, :] + message).unsqueeze(-2)
        arrived = _normalised((chain.matrix(t) + seen).logsumexp(-1))
        message = torch.where(chain.exists[..., t, None], arrived, message)
        messages.append(message)
    return torch.stack(messages[::-1], -2)


def _normalised(scores: Tensor) -> Tensor:
    """Subtract the log of the sum; where every score is -inf they stay so."""
    return scores - _finite(scores.logsumexp(-1, keepdim=True))


def _finite(norm: Tensor) -> Tensor:
    """Zero for minus infinity, so that subtracting it makes no NaN."""
    return norm.masked_fill(norm.isneginf(), 0.0)


def _over_events(mask: Tensor, hmm: HMM) -> Tensor:
    """Give a mask of steps the dimensions of an observation."""
    return mask.reshape(mask.shape + (1,) * len(hmm.emission.event_shape))


def _check_possible(log_evidence: Tensor) -> None:
    """Raise if a sequence has probability zero."""
    count = int(log_evidence.isneginf().sum())
    if count:
        raise ValueError(
            f"values must be possible under the model; {count} of {log_evidence.numel()} sequences "
            "have probability zero, so that nothing follows from them. Leave them out: their "
            "hmm.log_prob(values) is -inf."
        )


def _check_constant(hmm: HMM, name: str) -> None:
    """Raise if the parameters change with the step."""
    if hmm.transition_per_step or hmm.emission_per_step:
        raise ValueError(
            f"{name} needs a model that does not change with the step; this one has parameters per "
            "step. Extend them, and mark the steps to come as not observed."
        )
