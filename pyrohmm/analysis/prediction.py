"""Prediction: one step ahead, continuation, imputation, marginals of observations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM
from ..distributions.sampling import sample_emission, sample_emission_per_step
from ..ops import recursions
from .chains import (
    _check_constant,
    _check_possible,
    _known,
    _normalised,
    _over_events,
    _predicted,
    _read,
)

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
        laws = recursions.filtered(*hmm.log_factors(values), hmm.lengths)
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
        draw = sample_emission_per_step if hmm.emission_per_step else sample_emission
        drawn = draw(hmm.emission, states).to(values.dtype)
        missing = torch.zeros_like(states, dtype=torch.bool)
        if hmm.observed is not None:
            missing = (hmm.exists & ~hmm.observed).expand(states.shape)
        return torch.where(_over_events(missing, hmm), drawn, values)


def observation_marginals(hmm: HMM, values: Tensor) -> Forecast:
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
        >>> observation_marginals(hmm, torch.tensor([9.5, math.nan])).mean
        tensor([10., 10.])
    """
    evidence, states, _ = hmm.posterior(values)
    _check_possible(evidence)
    states = states.masked_fill(~hmm.exists.unsqueeze(-1), 1.0)  # so that sampling is possible
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
