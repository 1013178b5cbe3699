"""Scaled messages of Markov chains in two kernels for all steps, by Triton, on CUDA devices."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # numbers that a program joins
HELD = 64  # registers of each thread that hold a matrix of up to 128 states: nothing is spilled


@triton.jit(do_not_specialize=["by_group", "by_row", "by_state", "num_steps", "count", "size"])
def _pass(
    initial, by_group, by_row, by_state, matrices, weight, last, message, norm,
    num_steps, count, size, K: tl.constexpr, WIDTH: tl.constexpr,
    FLOOR: tl.constexpr, EACH: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Messages of one sequence in one direction; the matrix stays in registers.

    Offsets are 64-bit. Likelihoods are read two steps ahead, and memory that is written is not.
    ``count`` is G n, the number of sequences, ``size`` is n.
    """
    place, steps = tl.program_id(0).to(tl.int64), num_steps.to(tl.int64)
    back, row = place // count, place % count
    first, way = back * (steps - 1), 1 - 2 * back
    group, groups = row // size, count.to(tl.int64) // size
    column = tl.arange(0, WIDTH)
    here = column < K
    both = here[:, None] & here[None, :]
    entry = column[:, None] * tl.where(back == 1, 1, K) + column * tl.where(back == 1, K, 1)
    floor = tl.where(back == 1, FLOOR, 0.0)  # where there is no state nothing comes of it
    if not EACH:
        matrix = tl.load(matrices + group * K * K + entry, mask=both, other=0.0) + floor
    first_state = initial + group * by_group + row % size * by_row + column * by_state
    arrived = tl.exp(tl.load(first_state, mask=column < K * (1 - back), other=0.0))
    seen = tl.load(weight + (first * count + row) * K + column, mask=here, other=0.0)
    ahead = seen
    if num_steps > 1:
        ahead = tl.load(weight + ((first + way) * count + row) * K + column, mask=here, other=0.0)
    for done in range(num_steps):
        t = first + way * done
        if EACH:
            given = matrices + ((t - back) * groups + group) * K * K + entry
            last_step = column[:, None] < tl.where(done < num_steps - 1, K, 0)
            matrix = tl.load(given, mask=both & last_step, other=0.0) + floor
        more = column < tl.where(done < num_steps - 2, K, 0)
        entries = ((t + 2 * way) * count + row) * K + column
        after = tl.load(weight + entries, mask=more, other=0.0)
        if RAGGED:
            arrived = tl.where((back == 1) & tl.load(last + t * count + row), 1.0, arrived)
        product = arrived * seen
        total = tl.sum(product, 0)
        state = product * (1.0 / total)
        kept = message + ((back * steps + t) * count + row) * K + column
        tl.store(kept, tl.where(back == 1, arrived, state), mask=here)
        tl.store(norm + t * count + row, total, mask=back == 0)
        arrived = tl.sum(state[:, None] * matrix, 0)
        seen, ahead = ahead, after


@triton.jit(do_not_specialize=["rows"])
def _join(
    alpha, norm, beta, weight, peak, padded, largest, moved, logs, mass, rows,
    K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """What :func:`._torch._joined` returns, of ``ROWS`` steps of sequences; ``beta`` is changed."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there, at = row < rows, row[:, None] * K + column
    here = there[:, None] & (column < K)
    onward, total = tl.load(beta + at, mask=here, other=0.0), tl.load(norm + row, mask=there)
    agreement = tl.sum(onward * tl.load(alpha + at, mask=here, other=0.0), 1)
    if RAGGED:
        over = tl.load(padded + row, mask=there)
        total, agreement = tl.where(over, 1.0, total), tl.where(over, float("inf"), agreement)
    onward = onward / agreement[:, None]
    seen = tl.load(weight + at, mask=here, other=0.0)
    tl.store(beta + at, onward, mask=here)
    tl.store(moved + at, onward * seen / total[:, None], mask=here)
    tl.store(logs + row, tl.log(total.to(tl.float64)) + tl.load(peak + row, mask=there), mask=there)
    tl.store(mass + row, total * agreement / tl.maximum(tl.load(largest), 1.0), mask=there)


def options(dtype: torch.dtype, num_states: int) -> dict[str, Any]:
    """Constants of the kernel, and as many threads as it takes to hold the matrix."""
    width, limits = triton.next_power_of_2(num_states), torch.finfo(dtype)
    warps = max(1, width**2 * limits.bits // (32 * 32 * HELD))
    return {
        "K": num_states, "WIDTH": width, "FLOOR": (num_states + 2) * limits.tiny,
        "num_warps": warps, "enable_fp_fusion": True,
    }  # fmt: skip


def messages(
    log_initial: Tensor, log_transition: Tensor, weight: Tensor, last: Tensor | None, back: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scaled forward and backward messages: see :func:`._torch._by_steps`.

    Both ways of each sequence are programs of one launch.
    """
    steps, groups, size, num_states = weight.shape
    transition = log_transition.exp().contiguous()
    message = weight.new_empty(1 + back, *weight.shape)
    norm = weight.new_empty(*weight.shape[:-1], 1)
    with torch.cuda.device_of(weight):
        _pass[((1 + back) * groups * size,)](
            log_initial, *log_initial.stride(), transition, weight, last, message, norm,
            steps, groups * size, size,
            EACH=len(transition) != 1, RAGGED=back and last is not None,
            **options(weight.dtype, num_states),
        )  # fmt: skip
    return message[0], norm, message[-1][:, : groups * back], transition


def joined(
    alpha: Tensor, total: Tensor, beta: Tensor, weight: Tensor, peak: Tensor,
    padded: Tensor | None, largest: Tensor, wide: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Join forward and backward messages: see :func:`._torch._joined`."""
    width = triton.next_power_of_2(weight.size(-1))
    rows, tile = total.numel(), max(1, TILE // width)
    moved = torch.empty_like(weight, dtype=wide)
    logs, mass = (torch.empty_like(total, dtype=torch.float64) for _ in range(2))
    with torch.cuda.device_of(weight):
        _join[(triton.cdiv(rows, tile),)](
            alpha, total, beta, weight, peak, padded, largest, moved, logs, mass, rows,
            K=weight.size(-1), WIDTH=width, ROWS=tile, RAGGED=padded is not None,
        )  # fmt: skip
    return logs, mass, beta, moved
