r"""Messages along a chain, scaled or in log space.

How sums over paths are computed
--------------------------------
Messages are probabilities scaled to sum to one at every step, so a step is one matrix product:
:math:`\alpha_t \propto (\alpha_{t-1} A) \circ e_t`, and the evidence is the sum of the logarithms
of the norms (Rabiner, 1989, section V.A). The gradient is the forward-backward algorithm itself:
the derivative by ``log_likelihood`` is p(z_t | x), that by ``log_transition`` the expected number
of transitions (Eisner, 2016). No tape of T steps is kept; memory is O(T K) per sequence.

Scaled numbers can underflow, and then sums lose paths that later turn out to matter. Each
sequence is watched for that. Write q for the smallest positive product of a step, of arriving
mass :math:`\alpha_{t-1} A` and likelihood, s for the norm of the step, and a for the smallest
positive transition probability. Factors below ``tiny`` are raised to it. What a step loses or adds
is below ``tiny * K / s`` in every state, and it is nothing if q > ``2 tiny`` (no factor was raised,
whatever the rounding) and a q / s >= ``2 tiny``. So every mass p that arrives at the next step is
right to rounding unless one of these fails and p < ``tiny * K / (s * eps)``. If
a^2 >= ``tiny * K / eps``, which holds for most matrices without zeros, that cannot happen and
nothing needs to be watched. Transitions may have densities above one: ``tiny`` then stands for the
smallest number times the largest of them, by which an error is multiplied.

Where it happens, most often nothing is lost that matters: well separated observations leave mass
only in one state, and transitions that are never seen are all but zero. So where a matrix is shared
by all sequences, these sequences go on to their end, and a bound of the loss is computed on the way
back. Let :math:`\beta_t` be the backward message, so that
:math:`L_t = \prod_{u \le t} s_u \; \alpha_t \cdot \beta_t` is the evidence of
messages that are computed up to t and exact from there on. Then :math:`L_t` and :math:`L_{t - 1}`
differ by no more than ``(K + 4) tiny`` :math:`/ s_t \sum_k \beta_t(k)`, and the evidence by no
more than the sum of that over the steps; relatively, by that of
``(K + 4) tiny / (s_t P_t)`` with :math:`P_t = \alpha_t \cdot \beta_t / \sum_k \beta_t(k)`. The
backward messages that are computed lose something too: below ``(K + 2) tiny`` if
:math:`e \circ \beta` is scaled to sum to one before it is multiplied with A. That is added at every
step, so that they are never too small. If the bound is not rounding, the sequence is computed again
in float64, and where that is not enough, in log space.

Both ways at once
-----------------
On an accelerator a small product takes no longer than its launch, so messages go both ways in one
product a step: :math:`b_t \propto e_t \circ (A b_{t+1})` beside :math:`\alpha_t`. The posterior is
:math:`\gamma_t = \alpha_t \circ \beta_t / P_t` with :math:`\beta_t = A b_{t+1}` and
:math:`P_t = \alpha_t \cdot \beta_t`, and nothing needs to be watched on the way: what a step loses
is below ``tiny * K / s`` of the forward message, and counts by the backward one, which is at most
one, and by the same floor never too small: else the way back could lose the very paths that were
lost on the way there. So all losses together are at most ``3 tiny K / (s P)``, summed over the
steps, of the evidence, and one comparison at the end says whether that is rounding. As
:math:`s_t P_t \ge a^2`, it is for the same matrices for which nothing needs to be watched.
Densities of transitions above one are not in that bound.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._sync import exceeds
from .backends import Backend, backend_for
from .chain import Chain
from .log_space import finite_or_zero, largest
from .masks import exists
from .torch_chain import both_ways_by_steps


class Messages(NamedTuple):
    """Scaled forward messages, and what the backward pass needs.

    Attributes:
        evidence: ``(G, n)``, log, in float64; undefined where not exact.
        alpha: ``(T, G, n, K)``, p(z_t | x_{1:t}); zero at padded steps and where not exact.
        total: ``(T, G, n)``, norm of each step.
        exact: ``(G, n)``, False where the numbers left their range.
        transition: ``(S, G, K, K)``, probabilities.
        watched: Whether zeros or tiny probabilities made it necessary to watch each step.
        seen: ``(T, G, n, K)``, likelihoods in the form that ``backend`` reads.
        backend: Computes the backward pass too.
    """

    evidence: Tensor
    alpha: Tensor
    total: Tensor
    exact: Tensor
    transition: Tensor
    watched: bool
    seen: Tensor
    backend: Backend


def forward(chain: Chain, dtype: torch.dtype) -> Messages:
    """Forward messages in numbers of ``dtype``."""
    log_transition = chain.transition.detach().to(dtype)
    log_initial = chain.initial.detach().to(dtype)
    likelihood = chain.likelihood.detach().to(dtype)
    transition = log_transition.exp().contiguous()
    tiny, eps = torch.finfo(dtype).tiny * _largest(transition), torch.finfo(dtype).eps
    slack = tiny * likelihood.size(-1) / eps
    least = min(_least(log_transition), _least(log_initial))  # a hard zero counts as 0 here
    watched = least**2 < slack
    if watched:
        least = min(_least(finite_or_zero(log_transition)), _least(finite_or_zero(log_initial)))
    alpha = torch.empty_like(likelihood)
    total = likelihood.new_empty(likelihood.shape[:-1])
    exact = torch.ones(chain.lengths.shape, dtype=torch.bool, device=likelihood.device)
    evidence = total.new_empty(chain.lengths.shape, dtype=torch.float64)
    backend = backend_for(likelihood.device)
    seen = backend.forward(
        log_initial.exp(), transition, likelihood, chain.lengths,
        (least if watched else -1.0, 2 * tiny, slack), alpha, total, evidence, exact,
    )  # fmt: skip
    return Messages(evidence, alpha, total, exact, transition, watched, seen, backend)


def backward(
    chain: Chain, scaled: Messages, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Smoothed marginals and backward messages.

    Args:
        chain: The arguments.
        scaled: Forward messages.
        factor: ``(G, n)``, multiplies each sequence's results; one by default.

    Returns:
        p(z_t | x_{1:T}) ``(T, G, n, K)``; the message ``(T, G, n, K)`` whose entry t > 0, times
        :math:`\alpha_{t-1} A`, is the joint distribution of the states t-1 and t; whether both
        are exact ``(G, n)``. Zero where they are not.
    """
    exact = scaled.exact.clone()
    gamma, message = torch.empty_like(scaled.alpha), torch.empty_like(scaled.alpha)
    scaled.backend.backward(
        scaled.transition, scaled.seen, chain.lengths, scaled.watched,
        None if factor is None else factor.to(gamma.dtype), scaled.alpha, scaled.total, exact,
        gamma, message,
    )  # fmt: skip
    return gamma, message, exact


class Smoothed(NamedTuple):
    """Messages of both ways, all of them zero in sequences that are not exact.

    Attributes:
        evidence: ``(G, n)``, log, in float64.
        alpha: ``(T, G, n, K)``, p(z_t | x_{1:t}); at padded steps anything.
        gamma: ``(T, G, n, K)``, p(z_t | x_{1:T}); zero at padded steps.
        message: ``(T, G, n, K)``, as that of :func:`backward`; zero at padded steps.
        exact: ``(G, n)``, False where the numbers left their range; None if they did nowhere.
        transition: ``(S, G, K, K)``, probabilities.
    """

    evidence: Tensor
    alpha: Tensor
    gamma: Tensor
    message: Tensor
    exact: Tensor | None
    transition: Tensor


def both_ways(chain: Chain, dtype: torch.dtype) -> Smoothed:
    """Forward and backward messages side by side, by torch; the host waits once."""
    initial, transition, likelihood = (part.detach().to(dtype) for part in chain[:3])
    steps, num_states = len(likelihood), likelihood.size(-1)
    limits = torch.finfo(dtype)
    peak = likelihood.amax(-1, keepdim=True)
    weight = (likelihood - peak).exp_()  # NaN, hence not exact, where no state is possible
    last = padded = None
    if bool((chain.lengths < steps).any()):
        time = torch.arange(steps).reshape(-1, 1, 1)
        masks = torch.stack([time >= chain.lengths - 1, time >= chain.lengths]).unsqueeze(-1)
        last, padded = masks.to(weight.device, non_blocking=True)
    alpha, total, beta, transition = both_ways_by_steps(initial, transition, weight, last)
    gamma = alpha * beta
    agreement = gamma.sum(-1, keepdim=True)
    mass = total * agreement
    gamma.div_(agreement)
    message = weight.mul_(beta).div_(mass)
    logs = total.double().log().add_(peak)
    if padded is not None:
        for part, filler in ((gamma, 0.0), (message, 0.0), (logs, 0.0), (mass, 1.0)):
            part.masked_fill_(padded, filler)
    evidence, exact = logs.sum((0, -1)), None
    least = 3 * steps * num_states * limits.tiny / limits.eps
    if not exceeds(mass.amin(), least):
        exact = (mass > least).all(0).squeeze(-1)
        lost = ~exact.unsqueeze(-1)
        alpha, gamma, message = (part.masked_fill(lost, 0.0) for part in (alpha, gamma, message))
        evidence = evidence.masked_fill(~exact, 0.0)
    return Smoothed(evidence, alpha, gamma, message, exact, transition)


def _largest(transition: Tensor) -> float:
    """Largest density, or one."""
    return max(transition.amax().item(), 1.0) if transition.numel() else 1.0


def _least(logs: Tensor) -> float:
    """Smallest probability."""
    return math.exp(min(logs.amin().item(), 0.0)) if logs.numel() else 1.0


def in_log_space(
    chain: Chain, with_posterior: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything in logarithms and float64, for the sequences that need it.

    The largest logarithm of each step and matrix is subtracted first, lest sums over steps grow so
    large that none of their digits are left for the differences.

    Returns:
        Log evidence ``(G * n)``; p(z_t | x_{1:T}) ``(T, G, n, K)`` and expected transition counts
        ``(S, G * n, K, K)``, which are undefined unless ``with_posterior``; log p(x_{1:t}, z_t) but
        for a number at each step, ``(T, G, n, K)``.
    """
    initial, transition, likelihood = (part.detach().double() for part in chain[:3])
    peak, most = largest(likelihood, (-1,)), largest(transition, (-2, -1))
    wide = Chain(initial, transition - most, likelihood - peak, chain.lengths)
    found = backend_for(likelihood.device).log_space(wide, with_posterior)
    evidence, states, pairs, forward = found
    taken = exists(chain.lengths - 1, len(likelihood) - 1, likelihood.device).movedim(-1, 0)
    shift = peak.sum((0, -1)) + (most.squeeze(-1) * taken).sum(0)
    return evidence + shift.flatten(), states, pairs, forward
