"""What each special way of computing chains in blocks of states gains over the general one.

A :class:`pyrohmm.BlockHMM` of random parameters with vectors of 256 dimensions, float32 and one
thread, by a way of its own and by the general one, in turn. ``lines`` are those of the source of
the special way, docstrings included; ``milliseconds`` are the processor's, the median of the
rounds; ``times`` is the general way over the special one in the same round: median, lowest and
highest. A way is worth its lines from 1.5 on, at a shape that is used.

Writes ``block_ways.json``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
from common import arguments, interleaved, ratio, write
from torch import Tensor

from pyrohmm import blocks
from pyrohmm.chains import blocks as block_chains
from pyrohmm.distributions.block_hmm import BlockHMM, InnerProductTransition
from pyrohmm.ops.blocks import recursions
from pyrohmm.ops.blocks import transitions as module_of_transitions
from pyrohmm.ops.blocks.transitions import Transitions

NAME = "block_ways"
SYMBOLS, DIM, STEPS = 10_000, 256, 32
Call = Callable[[], Any]


def model(
    states: int, count: int, tokens: int, two_levels: bool
) -> tuple[Call, list[Tensor], Tensor]:
    """Makes the HMM anew; its parameters, and symbols."""
    torch.manual_seed(0)
    partition = blocks.from_clusters(torch.arange(SYMBOLS) % count, states // count)
    vectors = [0.1 * torch.randn(states, DIM), torch.randn(states, DIM)]
    vectors += [torch.randn(states, count)] if two_levels else []
    emission = torch.randn(SYMBOLS, partition.width).log_softmax(-1)
    initial = torch.zeros(states).log_softmax(-1)
    values = torch.randint(SYMBOLS, (tokens // STEPS, STEPS))
    lengths = torch.full((len(values),), STEPS)
    for each in vectors:
        each.requires_grad_()

    def make() -> BlockHMM:
        transition = InnerProductTransition(*vectors[:2], partition, *vectors[2:])
        return BlockHMM(initial, transition, emission, partition, lengths, validate_args=False)

    return make, vectors, values


def gradient(make: Call, parameters: list[Tensor], values: Tensor) -> Call:
    """Computes evidence and gradient."""
    return lambda: torch.autograd.grad(make().log_prob(values).sum(), parameters)


def patched(call: Call, *patches: tuple[Any, str, Any]) -> Call:
    """The same with some attributes replaced."""

    def run() -> None:
        with mock.patch.multiple(patches[0][0], **{name: new for _, name, new in patches}):
            call()

    return run


def ways(quick: bool) -> dict[str, tuple[str, list[Any], Call, Call]]:
    """For each way its shape, its source, and how it and the general way are called."""
    states, count, tokens = (64, 8, 64) if quick else (4096, 128, 512)
    two = model(states, count, tokens, True)
    small = model(states // 4, count, 16 * tokens, False)
    make, parameters, values = two
    last = lambda: make().final_state(values)  # noqa: E731
    matrix = gradient(*small)
    transition, later = make().transition, torch.randn(5, states)
    vectors = [each.detach() for each in parameters]
    transition = InnerProductTransition(*vectors[:2], transition.blocks, vectors[2])
    some = Transitions(transition.blocks, *vectors[:2], transition.log_block_probs)
    shape, single = f"{states:,} states, {count} blocks, ", f"{tokens:,} tokens"
    return {
        "last state by scaled messages":
            (shape + single, [recursions.final_state], last,
             patched(last, (recursions, "final_state", lambda *_: None))),
        "matrix of one level":
            (f"{states // 4:,} states, {count} blocks, {16 * tokens:,} tokens, one level",
             [block_chains.BlockChain.scores], matrix,
             patched(matrix, (block_chains, "MATRIX", 0))),
        "matrix kept for steering":
            (shape + "5 vectors", [Transitions.back_from_all, Transitions._probs],
             lambda: some.back_from_all(later),
             patched(lambda: some.back_from_all(later), (module_of_transitions, "KEPT", 0))),
    }  # fmt: skip


def lines(source: Any) -> int:
    """Number of lines of a module or function."""
    source = getattr(source, "py_func", source)
    return len(inspect.getsource(source).splitlines())


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    rows = []
    for name, (shape, sources, special, general) in ways(options.quick).items():
        rounds = 1 if options.quick else 5
        calls = {"special": special, "general": general}
        times = interleaved(calls, rounds, 20.0, time.process_time)
        rows.append(
            {"way": name, "shape": shape, "lines": sum(map(lines, sources)),
             "milliseconds": {each: 1000 * median(times[each]) for each in calls},
             "times": ratio(times, "general", "special")}
        )  # fmt: skip
        print(rows[-1], flush=True)
    if not options.quick:
        write(NAME, rows, threads=1)


if __name__ == "__main__":
    main()
