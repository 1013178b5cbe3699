r"""Exact inference in chains of states with explicit durations: hidden semi-Markov models.

A sequence is cut into segments. Each has a state and a duration d of 1 to D steps; the next state
is drawn when it ends. The last segment may be cut by the end of the sequence (``censored_end``),
and then counts with the probability that it lasts at least as long as is seen, or it ends there.
The first segment begins with the sequence, or it was there before (``censored_start``): its state
is drawn from ``log_initial``, and that r of its steps remain has the stationary probability

.. math:: p(r | k) = \sum_{d \ge r} p(d | k) \; / \; \sum_d d \, p(d | k)

of a process seen at any time. Every function reads the tensors of
:mod:`pyrohmm.ops.recursions` and a further one; batch dimensions broadcast:

``log_initial``     ``(*B, K)``     log p of the first segment's state
``log_transition``  ``(*B, K, K)``  log p of the next segment's state, row = from, column = to
``log_duration``    ``(*B, K, D)``  log p(d | k); entry d - 1 is that of d steps
``log_likelihood``  ``(*B, T, K)``  log p(x_t | z_t)
``lengths``         ``(*B)``        number of steps that exist; padding is on the right

Time is O(T K (K + D)) per sequence, memory O(T K); the chain over pairs of state and duration is
never made. Everything is summed in float64, by torch in logarithms and by compiled loops scaled, in
logarithms where numbers leave their range; it comes back in the dtype of the arguments; -inf is
legal everywhere.

Source: Yu, 2010, Hidden semi-Markov models; the gradient as in
:mod:`pyrohmm.ops.recursions`; the steps that remain: Cox, 1962, Renewal theory
(forward recurrence time).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import broadcast_shapes
from .._precision import recomputing
from .._transforms import gradients, refuse_transforms
from . import forward
from .dense.chain import check_arguments
from .log_space import logsumexp
from .recursions import ExpectedCounts


def log_survival(log_duration: Tensor) -> Tensor:
    r"""Log-probability :math:`\log \sum_{d' \ge d} p(d' \mid k)` to last at least d steps.

    Args:
        log_duration: ``(*B, K, D)``, log-probabilities.

    Returns:
        ``(*B, K, D)``: entry d - 1 is that of d steps.

    Example:
        >>> log_survival(torch.tensor([[0.5, 0.0, 0.5]]).log()).exp()
        tensor([[1.0000, 0.5000, 0.5000]])
    """
    sums, width = log_duration.double(), 1
    while width < sums.size(-1):  # sums of this many entries, of twice as many, ...
        beyond = pad(sums[..., width:], (0, width), value=-torch.inf)
        sums, width = logsumexp(torch.stack([sums, beyond]), 0), 2 * width
    return sums.to(log_duration.dtype)


def log_mean_duration(log_duration: Tensor) -> Tensor:
    r"""Log of the mean duration :math:`\log \sum_d d \, p(d \mid k)`, ``(*B, K)``.

    Args:
        log_duration: ``(*B, K, D)``, log-probabilities.

    Example:
        >>> log_mean_duration(torch.tensor([[0.5, 0.0, 0.5]]).log()).exp()
        tensor([2.])
    """
    logs = log_duration.double()
    steps = torch.arange(1, logs.size(-1) + 1, dtype=logs.dtype, device=logs.device)
    return logsumexp(logs + steps.log(), -1).to(log_duration.dtype)


def segment_weights(
    log_duration: Tensor, censored_end: bool, censored_start: bool, log_mean: Tensor | None = None
) -> Tensor:
    """Log weights of segments by censoring at either end, ``(2, 2, *B, K, D)`` in float64.

    The first index is one for the first segment, the second one for the last. The log mean duration
    ``(*B, K)`` may be given, if it is to be a constant.
    """
    duration = log_duration.double()
    survival = log_survival(duration) if censored_end or censored_start else duration
    right = survival if censored_end else duration
    left, both = duration, right
    if censored_start:
        log_mean = log_mean_duration(duration) if log_mean is None else log_mean
        left = survival - log_mean.unsqueeze(-1)
        both = log_survival(left) if censored_end else left
    return torch.stack([duration, right, left, both]).unflatten(0, (2, 2))


def _arranged(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor, log_likelihood: Tensor,
    lengths: Tensor, censored_end: bool, censored_start: bool, log_mean: Tensor | None = None,
) -> forward.Arranged:  # fmt: skip
    """Convert to the form of :mod:`.forward`, with messages over the steps of a segment."""
    parts = check_arguments(log_initial, log_transition.unsqueeze(-3), log_likelihood, lengths)
    num_states, shape = parts.initial.size(-1), log_duration.shape
    if shape[-2:-1] != (num_states,) or shape[-1] < 1:
        raise ValueError(
            f"log_duration must have shape (*B, K, D) with K = {num_states} and D at least 1; got "
            f"{tuple(shape)}. Column d is of d + 1 steps."
        )
    weights = segment_weights(log_duration, censored_end, censored_start, log_mean)
    weights = weights.mT.movedim((0, 1), (-4, -3))  # (*b, 2, 2, D, K)
    initial = pad(log_initial.unsqueeze(-2), (0, 0, 0, shape[-1] - 1), value=-torch.inf)
    logs, batch = log_transition[..., None, None, :, :], broadcast_shapes(shape[:-2], parts.batch)
    found = forward.arrange(initial, logs, log_likelihood, parts.lengths, batch, weights)
    return found._replace(dtype=torch.promote_types(parts.dtype, log_duration.dtype))


def log_evidence(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor, log_likelihood: Tensor,
    lengths: Tensor, censored_end: bool = True, censored_start: bool = False,
) -> Tensor:  # fmt: skip
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, states and durations summed out, ``(*B)``.

    Differentiable by the first four arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero. Without ``censored_end``, the evidence is that of the
    observations *and* of a segment that ends with them.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> two = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).log()  # each segment lasts two steps
        >>> likelihood = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]).log()
        >>> first = torch.tensor([1.0, 0.0]).log()
        >>> log_evidence(first, swap, two, likelihood, torch.tensor(3)).exp()
        tensor(0.5040)
    """
    parts = log_initial, log_transition, log_duration, log_likelihood, lengths
    return forward.log_evidence(_arranged(*parts, censored_end, censored_start))


@recomputing
def expected_counts(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor, log_likelihood: Tensor,
    lengths: Tensor, censored_end: bool = True, censored_start: bool = False,
) -> ExpectedCounts:  # fmt: skip
    """Expected counts under the posterior, as gradients of the evidence (Fisher's identity).

    Those of durations have the shape of ``log_duration``: a segment that is cut counts with the
    whole durations that it may have. A sequence of probability zero counts nowhere.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> even = torch.full((2, 2), 0.5).log()
        >>> likelihood = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).log()
        >>> expected_counts(even[0], swap, even, likelihood, torch.tensor(3)).counts["log_duration"]
        tensor([[0.0000, 1.0000],
                [0.5000, 0.5000]])
    """
    leads = log_initial.shape[:-1], log_transition.shape[:-2], log_duration.shape[:-2]
    batch = broadcast_shapes(*leads, log_likelihood.shape[:-2], lengths.shape)
    log_likelihood = log_likelihood.expand(*batch, *log_likelihood.shape[-2:])
    logs = log_initial, log_transition, log_duration, log_likelihood
    # a first segment that is cut is divided by the mean duration, which no count is derived from
    log_mean = log_mean_duration(log_duration.double())

    def log_evidence(*logs: Tensor) -> Tensor:
        parts: Any = *logs, lengths, censored_end, censored_start, log_mean
        return forward.log_evidence(_arranged(*parts))

    evidence, (*counts, states) = gradients(log_evidence, *logs)
    names = "log_initial", "log_transition", "log_duration"
    return ExpectedCounts(evidence, states, dict(zip(names, counts)))


def filtered(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor, log_likelihood: Tensor,
    lengths: Tensor, censored_start: bool = False,
) -> Tensor:  # fmt: skip
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    Whether the sequence goes on after step t is not known to them. They are -inf at padded steps,
    and from the step at which the observations become impossible.
    """
    parts = log_initial, log_transition, log_duration, log_likelihood, lengths
    return forward.filtered(_arranged(*parts, True, censored_start))


@torch.no_grad()
def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor, log_likelihood: Tensor,
    lengths: Tensor, censored_end: bool = True, censored_start: bool = False,
) -> Tensor:  # fmt: skip
    r"""Most probable states and durations :math:`\arg\max_{z, d} p(z, d \mid x_{1:T})`.

    Returns:
        ``(*B, T)`` integers, the states; 0 at padded steps. Where no state follows itself, the
        segments are the runs of equal states.
    """
    refuse_transforms("the most probable path")
    parts = log_initial, log_transition, log_duration, log_likelihood, lengths
    return forward.viterbi(_arranged(*parts, censored_end, censored_start))


@torch.no_grad()
def sample_states(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor, log_likelihood: Tensor,
    lengths: Tensor, num_samples: int = 1, censored_end: bool = True, censored_start: bool = False,
) -> Tensor:  # fmt: skip
    r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`: filter forward, sample backward.

    Returns:
        ``(num_samples, *B, T)`` integers; 0 at padded steps.
    """
    refuse_transforms("samples of paths")
    parts = log_initial, log_transition, log_duration, log_likelihood, lengths
    return forward.sample_states(_arranged(*parts, censored_end, censored_start), num_samples)


# Segments of paths ------------------------------------------------------------------------------


def boundaries(states: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Starts and ends of segments of paths ``(*B, T)``, and how long they have lasted so far.

    Args:
        states: Integers; a segment is a run of equal ones.
        present: Booleans, which steps exist.

    Returns:
        Booleans, booleans and integers, all ``(*B, T)``.
    """
    differ = states[..., 1:] != states[..., :-1]
    opens = pad(differ, (1, 0), value=True) & present
    later = pad(opens[..., 1:] | ~present[..., 1:], (0, 1), value=True)
    steps = torch.arange(states.size(-1), device=states.device).expand(states.shape)
    start = steps.masked_fill(~opens, 0).cummax(-1).values
    return opens, later & present, steps - start + 1
