"""What special ways of the compiled recursions gain over the general ones.

Evidence and gradient on one thread, by the special way and without it, in turn: ``milliseconds``
are the processor's, the median of the rounds; ``times`` is the general way over the special one
in the same round: median, lowest and highest. ``lines`` are those of the source of the special
way, docstrings included. A way is worth its lines from 1.5 on, at a shape that is used.

Writes ``engine_ways.json``.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any
from unittest import mock

import torch
from block_ways import Call, lines
from common import arguments, interleaved, ratio, write

from pyrohmm.ops import backends, recursions
from pyrohmm.ops.dense import _torch

NAME = "engine_ways"


def gradient(num_states: int, steps: int, count: int, cycle: bool) -> Call:
    """Evidence and gradient of sequences of noisy levels, of a full matrix or of a cycle."""
    torch.manual_seed(0)
    levels = 3.0 * torch.arange(num_states)
    states = torch.arange(steps) // 10 % num_states
    values = levels[states] + torch.randn(count, steps)
    logs = (-0.5 * (values[..., None] - levels) ** 2).requires_grad_()
    stay = torch.eye(num_states)
    matrix = 0.9 * stay + (0.1 * stay.roll(1, 1) if cycle else 0.1 / num_states)
    initial = torch.full((num_states,), 1 / num_states).log()
    transition = (matrix / matrix.sum(-1, keepdim=True)).log()[None].requires_grad_()
    lengths = torch.full((count,), steps)

    def run() -> Any:
        found = recursions.log_evidence(initial, transition, logs, lengths)
        return torch.autograd.grad(found.sum(), (transition, logs))

    return run


loops = backends.compiled("dense._numba")


def unsure_again(call: Call) -> Call:
    """The same with every sequence of which steps may have lost anything done in a wider range."""

    def drop(self: Any, found: Any) -> Any:
        return found.exact & found.sure

    def run() -> None:
        with mock.patch.object(loops._Passes, "bound_losses", drop):
            call()

    return run


def by_torch(call: Call, chunked: bool = True) -> Call:
    """The same by operations of torch, with long sequences in chunks or step by step."""
    taken = _torch._by_chunks if chunked else lambda *_: None

    def run() -> None:
        with backends.use(backends.TORCH), mock.patch.object(_torch, "_by_chunks", taken):
            call()

    return run


def best_path(num_states: int, steps: int) -> Call:
    """Most probable paths of 64 sequences."""
    torch.manual_seed(0)
    initial, matrix = (
        torch.randn(*lead, num_states).log_softmax(-1) for lead in ((), (1, num_states))
    )
    likelihood, lengths = torch.randn(64, steps, num_states), torch.full((64,), steps)
    return lambda: recursions.viterbi(initial, matrix, likelihood, lengths)


def ways(quick: bool) -> list[tuple[str, str, list[Any], Call, Call]]:
    """For each way its shape, its source, and how it and the general way are called."""
    found = []
    steps = 50 if quick else 500
    call = gradient(10, steps, 64, cycle=True)
    shape = f"64 sequences of {steps} steps, cycle of 10 states, float32"
    sources = [loops._Passes.bound_losses]
    found.append(("bound of what was lost", shape, sources, call, unsure_again(call)))
    for count, num_states in ((1, 4), (1, 16), (8, 8)):
        call = gradient(num_states, 300 if quick else 2000, count, cycle=False)
        shape = f"{count} x 2,000 steps, {num_states} states, by torch"
        sources = [_torch._by_chunks, _torch._operators, _torch._scaled, _torch.prefixes]
        special, general = by_torch(call), by_torch(call, chunked=False)
        found.append(("chunks joined by a prefix sum", shape, sources, special, general))
    for num_states in (16, 256, 1000):
        call = best_path(num_states, 5 if quick else 50)
        shape = f"64 x 50 steps, {num_states} states"
        sources = [loops.viterbi_lanes.py_func, loops.best_rows.py_func]
        found.append(("best paths by compiled loops", shape, sources, call, by_torch(call)))
    return found


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    rows = []
    for name, shape, sources, special, general in ways(options.quick):
        rounds = 1 if options.quick else 9
        calls = {"special": special, "general": general}
        times = interleaved(calls, rounds, 20.0, time.process_time)
        rows.append(
            {"kernel": name, "shape": shape, "lines": sum(map(lines, sources)),
             "milliseconds": {each: 1000 * median(times[each]) for each in calls},
             "times": ratio(times, "general", "special")}
        )  # fmt: skip
        print(rows[-1], flush=True)
    if not options.quick:
        write(NAME, rows, threads=1)


if __name__ == "__main__":
    main()
