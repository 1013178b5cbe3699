"""The recursions as torch operations, a step at a time, for any device and any number of states.

Tensors are time-major: ``T`` steps of ``G`` groups of ``n`` sequences with ``K`` states; each
group has transition matrices ``(S, G, K, K)`` with S = 1 or T - 1. ``lengths``
``(G, n)`` is on the CPU. Results are written into the tensors given last. What is computed, and
when it is exact, is said in :mod:`pyrohmm.ops.message_passing`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .log_space import logsumexp


class _Rows(NamedTuple):
    """Sequences sorted by falling length, so that those still running are the first rows."""

    order: Tensor | None  # (G * n), None if all have the same length
    counts: list[int]  # rows that exist at step t in any group
    ended: Tensor | None  # (T, G, n, 1), only if the groups differ in their lengths

    @classmethod
    def of(cls, lengths: Tensor, weight: Tensor) -> _Rows:
        """Sort ``lengths`` ``(G, n)`` within each group."""
        steps, groups, size, _ = weight.shape
        if bool((lengths == steps).all()):
            return cls(None, [size] * steps, None)
        ranked, order = lengths.sort(dim=-1, descending=True, stable=True)
        order = (order + size * torch.arange(groups).unsqueeze(-1)).flatten()
        alive = torch.arange(steps).reshape(-1, 1, 1) < ranked  # (T, G, n)
        uneven = bool((ranked != ranked[0]).any())
        ended = (~alive).unsqueeze(-1).to(weight.device) if uneven else None
        return cls(order.to(weight.device), alive.any(1).sum(-1).tolist(), ended)

    def sort(self, tensor: Tensor) -> Tensor:
        """Bring ``(T, G, n, ...)`` into this order."""
        if self.order is None:
            return tensor
        return tensor.flatten(1, 2).index_select(1, self.order).reshape(tensor.shape)

    def unsort(self, target: Tensor, tensor: Tensor) -> None:
        """Write ``(T, G, n, ...)`` in this order to ``target``, in the original one."""
        if self.order is not None:
            target.flatten(1, 2).index_copy_(1, self.order, tensor.flatten(1, 2))


def _product(
    matrices: Tensor, rows: int, transposed: bool = False
) -> Callable[[Tensor, int], Tensor]:
    """A function ``(messages, step)`` that returns ``messages @ matrices[step]``."""
    steps, groups, num_states, _ = matrices.shape
    factors = matrices.mT if transposed else matrices
    if groups > 1 or steps != 1:
        return lambda x, t: torch.bmm(x, factors[t if steps > 1 else 0])
    matrix, packed = factors[0, 0], None
    if matrix.device.type == "cpu" and matrix.dtype == torch.float32 and num_states >= 256:
        weight = matrix.mT.contiguous()  # for matrices transposed, this is no copy
        packed = _pack(weight, rows)
    if packed is None:
        return lambda x, t: torch.mm(x[0], matrix).unsqueeze(0)
    multiply = torch.ops.mkl._mkl_linear
    return lambda x, t: multiply(x[0], packed, weight, None, rows).unsqueeze(0)


def _pack(transposed: Tensor, rows: int) -> Tensor | None:
    """The matrix in the layout that MKL multiplies by fastest, where torch was built with MKL.

    Packing once, not at every step, saves a quarter of the time at K = 1024.
    """
    try:
        return torch.ops.mkl._mkl_reorder_linear_weight(transposed, rows)
    except (AttributeError, RuntimeError):
        return None


def forward_by_steps(
    initial: Tensor,
    transition: Tensor,
    weight: Tensor,
    lengths: Tensor,
    limits: tuple[float, float, float],
    alpha: Tensor,
    total: Tensor,
    exact: Tensor,
) -> None:
    """Fill the forward messages ``alpha``, their norms ``total``, and ``exact``."""
    least, tiny, slack = limits
    rows = _Rows.of(lengths, weight)
    weight, initial = rows.sort(weight), rows.sort(initial[None])[0]
    sorted_alpha = alpha if rows.order is None else torch.zeros_like(alpha)
    sorted_total = total if rows.order is None else torch.ones_like(total)
    sound = torch.ones_like(total[0], dtype=torch.bool)
    smallest = product = scale = torch.ones_like(total[0])
    multiply = _product(transition, weight.size(2))
    for t, count in enumerate(rows.counts):
        seen, norm = weight[t, :, :count], sorted_total[t, :, :count].unsqueeze(-1)
        message = sorted_alpha[t, :, :count]
        arrived = initial if t == 0 else multiply(sorted_alpha[t - 1, :, :count], t - 1)
        if least >= 0:
            faint = (product[:, :count] <= tiny) | (smallest[:, :count] * least < tiny)
            faint &= arrived.amin(-1) * scale[:, :count] < slack
            if rows.ended is not None:
                faint &= ~rows.ended[t, :, :count, 0]
            sound[:, :count] &= ~faint
            alive = (arrived > 0) & (seen > 0)
        torch.mul(arrived, seen, out=message)
        torch.sum(message, -1, keepdim=True, out=norm)
        if least >= 0:
            product = message.masked_fill(~alive, torch.inf).amin(-1)
            scale = norm.squeeze(-1)
            smallest = product / scale
        message.div_(norm)
    if rows.ended is not None:
        sorted_alpha.masked_fill_(rows.ended, 0.0)
        sorted_total.masked_fill_(rows.ended.squeeze(-1), 1.0)
    sound &= ((sorted_total >= slack) & (sorted_total < torch.inf)).all(0)
    if rows.order is None:
        exact.copy_(sound)
    else:
        rows.unsort(alpha, sorted_alpha)
        rows.unsort(total, sorted_total)
        rows.unsort(exact[None], sound[None])


def backward_by_steps(
    transition: Tensor,
    weight: Tensor,
    lengths: Tensor,
    alpha: Tensor,
    total: Tensor,
    exact: Tensor,
    gamma: Tensor,
    message: Tensor,
    last: Tensor | None = None,
) -> None:
    """Fill the marginals ``gamma`` and backward messages; clear ``exact`` where out of range.

    ``last`` is the message ``(G, n, K)`` that arrives at the last step; ones by default.
    """
    rows = _Rows.of(lengths, weight)
    forward, weight = rows.sort(alpha), rows.sort(weight)
    norms = rows.sort(total).unsqueeze(-1)
    never = forward == 0  # also at padded steps
    masked = bool(never.any())
    smoothed, sent = gamma, message
    if rows.order is not None:
        smoothed, sent = torch.zeros_like(gamma), torch.zeros_like(message)
    multiply = _product(transition, weight.size(2), transposed=True)
    end = torch.ones_like(forward[0])  # what arrives at the last step of a sequence
    beta = end if last is None else last
    for t in range(len(weight) - 1, -1, -1):
        count = rows.counts[t]
        if t < len(weight) - 1:
            going = rows.counts[t + 1]
            beta = multiply(sent[t + 1, :, :going], t)
            if rows.ended is not None:
                beta = torch.where(rows.ended[t + 1, :, :going], end[:, :going], beta)
            if going < count:
                beta = torch.cat([beta, end[:, going:count]], 1)
        torch.mul(forward[t, :, :count], beta[:, :count], out=smoothed[t, :, :count])
        back = torch.mul(weight[t, :, :count], beta[:, :count], out=sent[t, :, :count])
        back.div_(norms[t, :, :count])
        if masked:
            back.masked_fill_(never[t, :, :count], 0.0)
    norm = smoothed.sum(-1, keepdim=True)  # one at each step, but for a drift by rounding
    norm.masked_fill_(never.all(-1, keepdim=True), 1.0)
    drift = (norm - 1).abs().amax().item()
    sound = torch.ones_like(exact)
    if not drift < 16 * torch.finfo(norm.dtype).eps:
        steady = (norm[1:] / norm[:-1] - 1).abs() < 1e-2
        usable = (norm > 0) & norm.isfinite()
        sound = (steady.all(0) & usable.all(0)).squeeze(-1)
        smoothed.div_(norm)
        sent[1:].div_(norm[:-1])
    if rows.order is not None:
        rows.unsort(gamma, smoothed)
        rows.unsort(message, sent)
        ranked, sound = sound, torch.empty_like(exact)
        rows.unsort(sound[None], ranked[None])
    exact &= sound


def both_ways_by_steps(
    log_initial: Tensor, log_transition: Tensor, weight: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled messages of both ways, four kernels a step: the way back is a second set of groups.

    On that way each probability is larger by as much as a product may lose, so that no message is
    too small.

    Args:
        log_initial: ``(G, n, K)``.
        log_transition: ``(S, G, K, K)``.
        weight: ``(T, G, n, K)``; one at padded steps.
        last: ``(T, G, n, 1)`` booleans, True from the last step of each sequence on; None if all
            have T steps.

    Returns:
        Forward messages ``(T, G, n, K)``, their norms ``(T, G, n, 1)``, what the later steps say of
        each state, up to a factor, ``(T, G, n, K)``, and transition probabilities.
    """
    steps, groups, num_states, _ = log_transition.shape
    matrices = log_transition.new_empty(steps, 2 * groups, num_states, num_states)
    transition, floor = matrices[:, :groups], (num_states + 2) * torch.finfo(weight.dtype).tiny
    torch.exp(log_transition, out=transition)
    torch.add(transition if steps == 1 else transition.flip(0), floor, out=matrices[:, groups:].mT)
    if last is None:
        seen, restart = torch.cat([weight, weight.flip(0)], 1), None
    else:  # back, a sequence begins anew at its last step
        going, ending = weight.masked_fill(last, 0.0), weight.masked_fill(~last, 0.0)
        seen = torch.cat([weight, going.flip(0)], 1)
        restart = torch.cat([torch.zeros_like(weight), ending.flip(0)], 1)
    arrived, state = torch.empty_like(seen), torch.empty_like(seen)
    norm = seen.new_empty(*seen.shape[:-1], 1)
    torch.exp(log_initial, out=arrived[0, :groups])
    arrived[0, groups:].fill_(1.0)
    for t in range(len(weight)):
        if t > 0:
            matrix = matrices[t - 1 if len(matrices) > 1 else 0]
            torch.bmm(state[t - 1], matrix, out=arrived[t])
        if restart is None:
            torch.mul(arrived[t], seen[t], out=state[t])
        else:
            torch.addcmul(restart[t], arrived[t], seen[t], out=state[t])
        torch.sum(state[t], -1, keepdim=True, out=norm[t])
        state[t].div_(norm[t])
    later = arrived[:, groups:].flip(0)
    return (
        state[:, :groups],
        norm[:, :groups],
        later if last is None else later.masked_fill_(last, 1.0),
        transition,
    )


def log_space_by_steps(
    initial: Tensor, transition: Tensor, likelihood: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Evidence ``(G, n)`` and messages log p(x_{1:t}, z_t) ``(T, G, n, K)``, by plain autograd."""
    alpha = initial + likelihood[0]  # (G, n, K)
    alphas = [alpha]
    for t in range(1, len(likelihood)):
        matrix = transition[t - 1 if len(transition) > 1 else 0].unsqueeze(1)  # (G, 1, K, K)
        arrived = logsumexp(alpha.unsqueeze(-1) + matrix, -2) + likelihood[t]
        exists = (t < lengths).unsqueeze(-1).to(alpha.device)
        alpha = torch.where(exists, arrived, alpha)
        alphas.append(alpha)
    return logsumexp(alpha, -1), torch.stack(alphas)


def viterbi_by_steps(
    initial: Tensor, transition: Tensor, likelihood: Tensor, lengths: Tensor, best: Tensor
) -> None:
    """Write the most probable path to ``best`` ``(T, G, n)``."""
    delta = torch.empty_like(likelihood)
    delta[0] = initial + likelihood[0]
    for t in range(1, len(likelihood)):
        matrix = transition[t - 1 if len(transition) > 1 else 0]
        for g in range(likelihood.size(1)):
            for rows in range(0, likelihood.size(2), 32):  # bounds the memory to 32 K^2
                part = delta[t - 1, g, rows : rows + 32]
                delta[t, g, rows : rows + 32] = (part.unsqueeze(-1) + matrix[g]).amax(-2)
        delta[t] += likelihood[t]
        peak = delta[t].amax(-1, keepdim=True)
        delta[t] -= peak.masked_fill(peak.isneginf(), 0.0)
    lengths = lengths.to(best.device)
    for t in range(len(likelihood) - 1, -1, -1):
        score = delta[t]
        if t < len(likelihood) - 1:
            matrix = transition[t if len(transition) > 1 else 0].mT  # (G, to, from)
            follow = torch.stack([rows[state] for rows, state in zip(matrix, best[t + 1])])
            score = torch.where((t + 1 < lengths).unsqueeze(-1), score + follow, score)
        best[t] = score.argmax(-1).masked_fill(t >= lengths, 0)


def sample_by_steps(
    messages: Tensor, transposed: Tensor, lengths: Tensor, uniform: Tensor, states: Tensor
) -> None:
    """Sample paths to ``states`` ``(S, T, G, n)`` backward, from log filtered ``messages``."""
    lengths = lengths.to(states.device)
    for t in range(messages.size(0) - 1, -1, -1):
        score = messages[t].expand(*states.shape[:1], *messages[t].shape)  # (S, G, n, K)
        if t < messages.size(0) - 1:
            matrix = transposed[t if len(transposed) > 1 else 0]  # (G, to, from)
            after = states[:, t + 1].movedim(1, 0)  # (G, S, n)
            follow = torch.stack([rows[state] for rows, state in zip(matrix, after)], 1)
            score = torch.where((t + 1 < lengths).unsqueeze(-1), score + follow, score)
        peak = score.amax(-1, keepdim=True)
        mass = (score - peak.masked_fill(peak.isneginf(), 0.0)).exp().cumsum(-1)
        sampled = (mass <= uniform[:, t].unsqueeze(-1) * mass[..., -1:]).sum(-1)
        sampled.clamp_(max=messages.size(-1) - 1)
        states[:, t] = sampled.masked_fill(t >= lengths, 0)
