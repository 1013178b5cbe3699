"""Long and narrow chains by torch: chunks of steps, joined by a prefix sum (associative scan)."""

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
    return best_length(weight.shape)


def best_length(shape: torch.Size) -> int:
    """How many steps ``(T, G, n, K)`` to take as one chunk.

    Short ones call for fewest operations; where operators are large, fewer and longer chunks read
    and write less memory.
    """
    steps, groups, size, num_states = shape
    return round(min(steps**0.5, max(8, num_states * (groups * size) ** 0.5 / 2)))


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


def _scaled(operators: Tensor) -> Tensor:
    """Matrices ``(*, K, K)`` up to a factor each; their largest entry is one."""
    return operators / operators.amax((-2, -1), keepdim=True)


def _operators(transition: Tensor, inside: Tensor) -> Tensor:
    """What each chunk does to the mass that arrives at its first step, up to a factor each.

    Args:
        transition: ``(G, K, K)``.
        inside: ``(L, G, C * n, K)``.

    Returns:
        ``(G, C * n, K, K)``, from each state at the first step to each at the last.
    """
    rows = torch.diag_embed(inside[0])
    for weight in inside[1:]:
        arrived = (rows.flatten(1, 2) @ transition).reshape(rows.shape)
        rows = _scaled(arrived * weight.unsqueeze(2))
    return rows


def prefixes(first: Tensor, operators: Tensor) -> Tensor:
    """Vectors v_0 to v_C, up to a factor each, with v_c = v_{c-1} M_c, in 2 log C products.

    Pairs of operators are multiplied to half as many, which give every other vector (Blelloch,
    1990).

    Args:
        first: ``(*, K)``, v_0.
        operators: ``(C, *, K, K)``, M.
    """
    count = len(operators)
    if count == 0:
        return first.unsqueeze(0)
    pairs = _scaled(operators[: count - 1 : 2] @ operators[1::2])
    even, odd = prefixes(first, pairs), operators[::2]
    out = first.new_empty(count + 1, *first.shape)
    out[::2] = even
    out[1::2] = (even[: len(odd)].unsqueeze(-2) @ odd).squeeze(-2)
    out[1::2] /= out[1::2].sum(-1, keepdim=True)
    return out


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
    """Forward messages by chunks, for sequences of one length without hard zeros."""
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
    matrix = transition[0].unsqueeze(1)
    operators = _operators(transition[0], inside) @ matrix
    operators = operators.reshape(groups, chunks, size, num_states, num_states).movedim(1, 0)
    start = prefixes(arrived, operators[:-1]).movedim(0, 1).flatten(1, 2)  # (G, C * n, K)
    full = torch.full(start.shape[:2], length)
    parts = torch.zeros_like(inside), torch.ones_like(inside[..., 0])
    good = torch.ones_like(start[..., 0], dtype=torch.bool)
    forward_by_steps(start, transition, inside, full, limits, *parts, good)
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
    """Backward messages by chunks, for sequences of one length without hard zeros."""
    length = chunk_length(transition, weight, lengths)
    steps, groups, size, num_states = weight.shape
    head = steps % length
    chunks = steps // length
    inside, forward = _split(weight[head:], length), _split(alpha[head:], length)
    matrix = transition[0].unsqueeze(1)
    operators = matrix @ _operators(transition[0], inside)
    operators = operators.reshape(groups, chunks, size, num_states, num_states).movedim(1, 0)
    ends = prefixes(torch.ones_like(alpha[0]), operators.flip(0).mT).flip(0)  # (C + 1, G, n, K)
    known = torch.cat([alpha[max(head - 1, 0)][None], alpha[head + length - 1 :: length]])
    ends = ends / (known * ends).sum(-1, keepdim=True)
    last = ends[1:].movedim(0, 1).flatten(1, 2)  # (G, C * n, K)
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
            exact, gamma[:head], message[:head], ends[0],
        )  # fmt: skip
