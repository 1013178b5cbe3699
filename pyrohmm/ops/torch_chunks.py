"""Long and narrow chains by torch, on two levels: 3 sqrt(T) dependent steps instead of T."""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_chain import backward_by_steps, forward_by_steps


def chunk_length(transition: Tensor, weight: Tensor, lengths: Tensor) -> int:
    """How many steps to take as one chunk; 0 if the chain is not long and narrow.

    Chunks multiply K x K operators, K times the work, together: worth it while that costs less
    than calling the operations of a step.
    """
    steps, groups, size, num_states = weight.shape
    narrow = groups * size * num_states**3 <= 1_000_000
    if len(transition) > 1 or steps < 256 or not narrow or bool((lengths < steps).any()):
        return 0
    return round(steps**0.5)


def _split(tensor: Tensor, length: int) -> Tensor:
    """Cut ``(C * L, G, n, ...)`` into chunks that are one batch, ``(L, G, C * n, ...)``."""
    steps, groups, size = tensor.shape[:3]
    cut = tensor.reshape(steps // length, length, groups, size, *tensor.shape[3:])
    cut = cut.movedim(0, 2)
    return cut.reshape(length, groups, -1, *tensor.shape[3:])


def _join(target: Tensor, tensor: Tensor) -> None:
    """Undo :func:`_split`, into ``target``."""
    length, groups = tensor.shape[:2]
    size = target.size(2)
    cut = tensor.reshape(length, groups, -1, size, *tensor.shape[3:]).movedim(2, 0)
    target.copy_(cut.reshape(target.shape))


def _operators(transition: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """What each chunk does to the mass that arrives at its first step.

    Returns:
        Matrices ``(G, C, n..., K, K)`` flattened to ``(G, C * n, K, K)`` whose rows sum to one,
        and the logarithms of the norms of the rows ``(G, C * n, K)``.
    """
    length, groups, size, num_states = inside.shape
    rows = torch.diag_embed(inside[0])  # unit mass in each state, seen once
    logs = torch.zeros(groups, size, num_states, dtype=torch.float64, device=inside.device)
    for t in range(length):
        if t > 0:
            rows = (rows.flatten(1, 2) @ transition[0]).reshape(rows.shape)
            rows *= inside[t].unsqueeze(2)
        norm = rows.sum(-1)
        logs += norm.double().log()
        rows /= norm.masked_fill(norm == 0, 1.0).unsqueeze(-1)
    return rows, logs


def _balanced(rows: Tensor, logs: Tensor) -> Tensor:
    """The operators up to a factor each."""
    peak = logs.amax(-1, keepdim=True)
    return rows * (logs - peak.masked_fill(peak.isneginf(), 0.0)).exp().to(rows.dtype).unsqueeze(-1)


def forward_by_chunks(
    initial: Tensor,
    transition: Tensor,
    weight: Tensor,
    lengths: Tensor,
    limits: tuple[float, float, float],
    alpha: Tensor,
    total: Tensor,
    exact: Tensor,
) -> None:
    """As :func:`forward_by_steps`, for sequences of one length without hard zeros."""
    length = chunk_length(transition, weight, lengths)
    steps, groups, size, num_states = weight.shape
    head = steps % length
    sound = torch.ones_like(exact)
    arrived = initial
    if head:
        forward_by_steps(
            initial, transition, weight[:head], lengths.clamp(max=head), limits,
            alpha[:head], total[:head], sound,
        )  # fmt: skip
        arrived = alpha[head - 1] @ transition[0]
    inside = _split(weight[head:], length)
    chunks = steps // length
    operators = _balanced(*_operators(transition, inside))
    operators = operators.reshape(groups, chunks, size, num_states, num_states)
    starts = [arrived]
    for c in range(chunks - 1):
        left = (starts[-1].unsqueeze(-2) @ operators[:, c]).squeeze(-2)
        starts.append((left / left.sum(-1, keepdim=True)) @ transition[0])
    start = torch.stack(starts, 1).flatten(1, 2)  # (G, C * n, K)
    full = torch.full(start.shape[:2], length)
    parts = (
        torch.zeros_like(inside),
        torch.ones_like(inside[..., 0]),
        torch.ones_like(start[..., 0]),
    )
    good = parts[2].bool()
    forward_by_steps(start, transition, inside, full, limits, parts[0], parts[1], good)
    _join(alpha[head:], parts[0])
    _join(total[head:], parts[1])
    exact.copy_(sound & good.reshape(groups, chunks, size).all(1))


def backward_by_chunks(
    transition: Tensor,
    weight: Tensor,
    lengths: Tensor,
    alpha: Tensor,
    total: Tensor,
    exact: Tensor,
    gamma: Tensor,
    message: Tensor,
) -> None:
    """As :func:`backward_by_steps`, for sequences of one length without hard zeros."""
    length = chunk_length(transition, weight, lengths)
    steps, groups, size, num_states = weight.shape
    head = steps % length
    chunks = steps // length
    inside, forward = _split(weight[head:], length), _split(alpha[head:], length)
    operators = _balanced(*_operators(transition, inside))
    operators = operators.reshape(groups, chunks, size, num_states, num_states)
    ends = [torch.ones_like(alpha[0])]  # the message to the last step of each chunk, last first
    for c in range(chunks - 1, -1, -1):
        back = (operators[:, c] @ ends[-1].unsqueeze(-1)).squeeze(-1) @ transition[0].mT
        end = head + c * length - 1
        known = alpha[end] if end >= 0 else torch.ones_like(back)
        ends.append(back / (known * back).sum(-1, keepdim=True))
    last = torch.stack(ends[-2::-1], 1).flatten(1, 2)  # (G, C * n, K)
    full = torch.full(last.shape[:2], length)
    good = torch.ones_like(last[..., 0], dtype=torch.bool)
    smoothed, sent = torch.zeros_like(inside), torch.zeros_like(inside)
    norms = _split(total[head:], length)
    backward_by_steps(transition, inside, full, forward, norms, good, smoothed, sent, last)
    _join(gamma[head:], smoothed)
    _join(message[head:], sent)
    exact &= good.reshape(groups, chunks, size).all(1)
    if head:
        backward_by_steps(
            transition, weight[:head], lengths.clamp(max=head), alpha[:head], total[:head],
            exact, gamma[:head], message[:head], ends[-1],
        )  # fmt: skip
