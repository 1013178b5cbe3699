r"""Messages along a chain, scaled or in log space, by compiled code or by torch operations.

How sums over paths are computed
--------------------------------
Messages are probabilities scaled to sum to one at every step, so a step is one matrix product:
:math:`\alpha_t \propto (\alpha_{t-1} A) \circ e_t`, and the evidence is the sum of the logarithms
of the norms (Rabiner, 1989, section V.A). The gradient is the forward-backward algorithm itself:
the derivative by ``log_likelihood`` is p(z_t | x), that by ``log_transition`` the expected number
of moves (Eisner, 2016). No tape of T steps is kept; memory is O(T K) a sequence.

Scaled numbers can underflow, and then sums lose paths that later turn out to matter. Each
sequence is watched for that. Write q for the smallest positive product of a step, of arriving
mass :math:`\alpha_{t-1} A` and likelihood, s for the norm of the step, and a for the smallest
positive transition probability. What a step loses is below ``tiny * K / s`` in every state, and
it loses nothing if q > ``tiny`` and a q / s >= ``tiny``. So every mass p that arrives at the next
step is right to rounding unless one of these fails and p < ``tiny * K / (s * eps)``. A sequence
where that happens is computed again in float64, and where it happens there, in log space. If
a^2 >= ``tiny * K / eps``, which holds for most matrices without zeros, it cannot happen and
nothing needs to be watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import lookup
from .chain import Chain, exists
from .torch_chain import (
    backward_by_chunks,
    backward_by_steps,
    chunk_length,
    forward_by_chunks,
    forward_by_steps,
    log_space_by_steps,
)


class Scales(NamedTuple):
    """Forward messages, and what is needed to go back."""

    evidence: Tensor  # (G, n), log, in float64; means nothing where not exact
    alpha: Tensor  # (T, G, n, K), sums to one; zero at padded steps and where not exact
    total: Tensor  # (T, G, n), norm of the step
    exact: Tensor  # (G, n), False where the numbers left their range
    transition: Tensor  # (S, G, K, K), probabilities
    watched: bool  # whether zeros or tiny probabilities made it necessary to watch each step
    weight: Tensor | None  # (T, G, n, K), likelihood over its peak; only for torch operations


def forward(chain: Chain, dtype: torch.dtype) -> Scales:
    """Forward messages in numbers of ``dtype``."""
    log_transition = chain.transition.detach().to(dtype)
    log_initial = chain.initial.detach().to(dtype)
    likelihood = chain.likelihood.detach().to(dtype)
    steps, groups, size, num_states = likelihood.shape
    tiny, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    slack = tiny * num_states / eps
    least = min(_least(log_transition), _least(log_initial))  # a hard zero counts as 0 here
    watched = least**2 < slack
    if watched:
        least = min(_least(log_transition, positive=True), _least(log_initial, positive=True))
    transition = log_transition.exp().contiguous()
    initial = log_initial.exp()
    alpha = torch.empty_like(likelihood)
    total = likelihood.new_empty(likelihood.shape[:-1])
    exact = torch.ones(chain.lengths.shape, dtype=torch.bool, device=likelihood.device)
    limits = (least if watched else -1.0, tiny, slack)
    kernels = compiled(likelihood)
    if kernels is not None:
        evidence = total.new_empty(chain.lengths.shape, dtype=torch.float64)
        kernels.run(
            kernels.passes(size)[0],
            groups * size,
            steps * num_states**2,
            initial.view(-1),
            transition,
            likelihood.view(-1),
            chain.lengths.view(-1),
            limits[0],
            math.log(tiny),
            *limits[1:],
            alpha.view(-1),
            total.view(-1),
            evidence.view(-1),
            exact.view(-1),
        )
        return Scales(evidence, alpha, total, exact, transition, watched, None)
    weight, peak = _weigh(likelihood, watched)
    march = forward_by_steps
    if not watched and chunk_length(transition, weight, chain.lengths):
        march = forward_by_chunks
    march(initial, transition, weight, chain.lengths, limits, alpha, total, exact)
    if not bool(exact.all()):
        alpha.masked_fill_(~exact.unsqueeze(-1), 0.0)
        total.masked_fill_(~exact, 1.0)
    logs = total.double().log() + peak
    if bool((chain.lengths < steps).any()):
        logs = logs.masked_fill(~exists(chain.lengths, likelihood).squeeze(-1), 0.0)
    return Scales(logs.sum(0), alpha, total, exact, transition, watched, weight)


def backward(
    chain: Chain, scaled: Scales, factor: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Backward messages.

    Args:
        chain: The arguments.
        scaled: Forward messages.
        factor: ``(G, n)``, what to multiply each sequence's results by; one by default.

    Returns:
        p(z_t | x) ``(T, G, n, K)``; the message ``(T, G, n, K)`` whose entry t > 0, times
        :math:`\alpha_{t-1} A`, is the law of the pair of states t-1 and t; whether both are
        exact ``(G, n)``. Zero where they are not.
    """
    alpha, total, transition = scaled.alpha, scaled.total, scaled.transition
    exact = scaled.exact.clone()
    gamma, message = torch.empty_like(alpha), torch.empty_like(alpha)
    steps, groups, size, num_states = gamma.shape
    if scaled.weight is None:
        kernels = compiled(gamma)
        assert kernels is not None
        if factor is None:
            factor = alpha.new_ones(exact.shape)
        kernels.run(
            kernels.passes(size)[1],
            groups * size,
            steps * num_states**2,
            transition,
            chain.likelihood.detach().to(alpha.dtype).view(-1),
            chain.lengths.view(-1),
            factor.to(alpha.dtype).contiguous().view(-1),
            math.log(torch.finfo(alpha.dtype).tiny),
            alpha.view(-1),
            total.view(-1),
            exact.view(-1),
            gamma.view(-1),
            message.view(-1),
        )
        return gamma, message, exact
    march: Callable[..., None] = backward_by_steps
    if not scaled.watched and chunk_length(transition, scaled.weight, chain.lengths):
        march = backward_by_chunks
    march(transition, scaled.weight, chain.lengths, alpha, total, exact, gamma, message)
    if not bool(exact.all()):
        gamma.masked_fill_(~exact.unsqueeze(-1), 0.0)
        message.masked_fill_(~exact.unsqueeze(-1), 0.0)
    if factor is not None:
        factor = factor.to(alpha.dtype).unsqueeze(-1)
        gamma.mul_(factor)
        message.mul_(factor)
    return gamma, message, exact


def _weigh(likelihood: Tensor, watched: bool) -> tuple[Tensor, Tensor]:
    """Likelihoods over their peak ``(T, G, n, K)``, and the logarithms of the peaks."""
    peak = likelihood.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weight = likelihood - peak
    tiny = torch.finfo(likelihood.dtype).tiny
    floor = math.log(tiny) + 0.1  # exp takes long at the end of its range, and beyond
    low = weight < floor
    weight.clamp_(min=floor).exp_().masked_fill_(low, tiny if watched else 0.0)
    if watched:  # only hard zeros may be zero
        weight.masked_fill_(likelihood.isneginf(), 0.0)
    return weight, peak.squeeze(-1)


def _least(logs: Tensor, positive: bool = False) -> float:
    """Smallest probability; with ``positive``, hard zeros do not count."""
    if positive:
        logs = logs.masked_fill(logs.isneginf(), 0.0)
    return math.exp(min(logs.amin().item(), 0.0)) if logs.numel() else 1.0


def compiled(messages: Tensor) -> ModuleType | None:
    """The compiled recursions where they are faster than matrix products of torch."""
    small = messages.size(-1) <= 128 or messages.shape[1:-1].numel() <= 4
    return lookup.kernels() if small and messages.device.type == "cpu" else None


# Log space ---------------------------------------------------------------------------------------


def in_log_space(chain: Chain, smooth: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything in logarithms and float64, for the sequences that need it.

    Returns:
        Evidence ``(G * n)``; states ``(T, G, n, K)`` and moves ``(S, G * n, K, K)``, which mean
        nothing unless ``smooth``; log p(x_{1:t}, z_t) ``(T, G, n, K)``.
    """
    initial, transition, likelihood = (part.detach().double().contiguous() for part in chain[:3])
    lengths = chain.lengths
    num_states = likelihood.size(-1)
    kernels = lookup.kernels() if likelihood.device.type == "cpu" else None
    if kernels is not None:
        messages, gamma = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
        evidence = likelihood.new_zeros(lengths.shape)
        moves = likelihood.new_zeros(len(transition), lengths.numel(), num_states, num_states)
        kernels.run(
            kernels.log_space,
            lengths.numel(),
            10 * len(likelihood) * num_states**2,
            initial,
            transition,
            transition.mT.contiguous(),
            likelihood,
            lengths,
            smooth,
            messages,
            evidence,
            gamma,
            moves,
        )
        return evidence.flatten(), gamma, moves, messages
    own = transition.repeat_interleave(lengths.size(1), 1)  # one matrix a sequence
    with torch.enable_grad():
        given = own.requires_grad_(), likelihood.requires_grad_()
        single = Chain(
            initial.reshape(-1, 1, num_states),
            own,
            likelihood.reshape(len(likelihood), -1, 1, num_states),
            lengths.reshape(-1, 1),
        )
        evidence, messages = log_space_by_steps(*single)
        evidence = evidence.flatten()
        moves, gamma = torch.autograd.grad(evidence.sum(), given, materialize_grads=True)
    return evidence.detach(), gamma, moves, messages.detach().reshape(likelihood.shape)
