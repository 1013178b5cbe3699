"""Where chains in blocks of states go from one way of computing to another.

Each panel times evidence and gradient of a :class:`pyrohmm.BlockHMM` both ways, in turn, on one
thread, with random parameters and symbols, vectors of 256 dimensions and float32. Ways are forced
by the constants at which the package chooses:

``one level``  the matrix of transitions, or sums over all states without it, by the number of
               states; ``chains.blocks.MATRIX``

``seconds`` are the processor's, the median of the rounds, by way; ``ratio`` is that of both in the
same round. Writes ``block_switches.json`` and ``block_switches.png``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import arguments, earlier, interleaved, pyplot, ratio, save, write

from pyrohmm import blocks
from pyrohmm.chains import blocks as block_chains
from pyrohmm.distributions.block_hmm import BlockHMM, InnerProductTransition

NAME = "block_switches"
SYMBOLS, DIM, STEPS = 2000, 256, 32
PARTS = {  # the switch, and its extremes: above it always, never
    "one level": (block_chains, "MATRIX", (math.inf, 0)),
}
WAYS = ("all at once", "in blocks")


def evidence(states: int, count: int, tokens: int) -> Callable[[], Any]:
    """Computes evidence and gradient of some tokens."""
    torch.manual_seed(0)
    lengths = torch.full((max(1, tokens // STEPS),), STEPS)
    values = torch.randint(SYMBOLS, (len(lengths), STEPS))
    size = states // count
    partition = blocks.from_clusters(torch.arange(SYMBOLS) % count, size)
    parameters = [0.1 * torch.randn(states, DIM), torch.randn(states, DIM)]
    for each in parameters:
        each.requires_grad_()
    emission = torch.randn(SYMBOLS, partition.width).log_softmax(-1)
    initial = torch.zeros(states).log_softmax(-1)

    def compute() -> None:
        matrix = InnerProductTransition(*parameters, partition)
        hmm = BlockHMM(initial, matrix, emission, partition, lengths, validate_args=False)
        torch.autograd.grad(hmm.log_prob(values).sum(), parameters)

    return compute


def measured(part: str, states: int, count: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways."""
    compute = evidence(states, count, tokens)
    module, name, extremes = PARTS[part]

    def forced(value: float) -> Callable[[], None]:
        def call() -> None:
            usual = getattr(module, name)
            setattr(module, name, value)
            compute()
            setattr(module, name, usual)

        return call

    times = interleaved(
        {way: forced(value) for way, value in zip(WAYS, extremes)}, rounds, 2.0, time.process_time
    )
    return {
        "part": part, "states": states, "blocks": count, "tokens": tokens, "place": states,
        "switch": getattr(module, name), "seconds": {way: median(times[way]) for way in WAYS},
        "ratio": ratio(times, *WAYS),
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> None:
    """For each switch the ratio of both ways, where 1 should be at the switch."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for part in PARTS:
        chosen = [row for row in rows if row["part"] == part]
        for number in sorted({row["tokens"] for row in chosen}):
            line = sorted((r["place"], r["ratio"]) for r in chosen if r["tokens"] == number)
            places, ratios = zip(*line)
            middle, low, high = zip(*ratios)
            (drawn,) = axis.plot(places, middle, ".-", label=f"{number:,} tokens")
            axis.fill_between(places, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
        if chosen:
            axis.axvline(
                chosen[0]["switch"], color="0.3", linestyle="--", label="the package switches here"
            )
        axis.axhline(1.0, color="0.3", linewidth=0.8)
        axis.set_xticks(sorted({row["place"] for row in chosen}))
        axis.xaxis.set_major_formatter("{x:,g}")
    axis.set_title("transitions on one level: medians, lowest and highest of five rounds")
    axis.set(xlabel="number of states", ylabel="time, whole matrix / pairs of blocks")
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, NAME)


def main() -> None:
    options = arguments(__doc__, list(PARTS))
    if options.draw:
        draw(earlier(NAME))
        return
    torch.set_num_threads(1)
    sizes = {
        "one level": [(states, 64, tokens) for tokens in (512, 8192)
                      for states in (512, 1024, 2048, 3072, 4096)],
    }  # fmt: skip
    rows = [row for row in earlier(NAME) if row["part"] not in options.only]
    for part in options.only:
        for size in [(256, 4, 64)] if options.quick else sizes[part]:
            rows.append(measured(part, *size, rounds=1 if options.quick else 5))
            print(rows[-1], flush=True)
    if not options.quick:
        write(NAME, rows, threads=torch.get_num_threads())
        draw(rows)


if __name__ == "__main__":
    main()
