"""Seconds per epoch of training with thousands of states, compared with a straightforward program.

A neural HMM of 128 Brown clusters (unless stated otherwise) on the Penn Treebank (929,589 tokens),
state dropout 0.5, float32, two threads, AdamW, by ``fit_map``. *One level* is the paper's
parameterization; with *two levels* a transition chooses a block first. The straightforward program
computes the whole transition matrix of the kept states by a log-softmax for each batch of 512
tokens, log-potentials for each token, and the forward algorithm in logarithms with autograd.
Emission and networks are the same.

Seconds per epoch are those of a step times the number of steps in an epoch. All ways are measured
in turn, in five rounds, on the same batches in each run (seeded by the round); the first steps of
each round are excluded, and ``low`` and ``high`` are the fastest and the slowest round. ``steps``
is the total number of measured steps: 50, but 10 for slow ways, on one level with more than 8,192
states. ``times_faster`` is relative to the straightforward program with batches of 512 tokens, so
for our batches of 8,192 it includes the gain of larger batches; ``times_faster_alike`` compares
batches of equal size. With 4,096 states these are 512 and 8,192, with 32,768 they are 512.

``scaling`` measures each way alone, in a separate process, by the number of states and by the
number of tokens in a batch, with the median, the fastest and the slowest step; ``gigabytes`` (10^9
bytes) is the peak memory of that process, data and libraries included. ``blocks`` is the same by
the number of states per word: 8,192 states in fewer or more blocks. The speed of a shared machine
varies: compare rows of one part only.

Writes ``large_hmm_speed.json`` and ``large_hmm_speed.png``, after each row.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from common import alone, arguments, earlier, pyplot, save, write
from common.text import Text, brown, read
from torch import Tensor, nn

from pyrohmm import MarginalModel, NeuralHMM, Sequences, blocks, fit_map
from pyrohmm.data.batches import Batches, batches_in_round
from pyrohmm.nn.neural import sample_kept_states

NAME = "large_hmm_speed"
BLOCKS, ROUNDS, STEPS, BATCH, SMALL = 128, 5, 10, 8192, 512
TARGETS = {4096: (40.0, 10.0), 32768: (300.0, 15.0)}  # seconds an epoch, and times faster
TWO, ONE, PLAIN = "two levels", "one level", "plain"
SIZES = [1024, 2048, 4096, 8192, 16384, 32768]
NUMBERS = [512, 256, 128, 64, 32]  # of blocks, with 8,192 states


class Watch(torch.optim.AdamW):
    """AdamW that records the end times of its steps."""

    ends: list[float]

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=1e-3, weight_decay=0.0, fused=True)
        Watch.ends = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        result = super().step(*args, **kwargs)
        Watch.ends.append(time.perf_counter())
        return result


def ours(module: NeuralHMM, data: Sequences, tokens: int, steps: int, seed: int) -> list[float]:
    """Seconds of ``steps`` steps, on batches determined by the seed."""
    pyro.set_rng_seed(seed)
    fit_map(
        MarginalModel(module), data, num_iterations=steps + 3, batch_tokens=tokens, optimizer=Watch,
        clip_norm=5.0, tolerance=None, progress=False,
    )  # fmt: skip
    return [b - a for a, b in zip(Watch.ends[2:], Watch.ends[3:])]


def plain_loss(module: NeuralHMM, batch: Sequences) -> Tensor:
    """Negative log-evidence per token, by the straightforward program."""
    assert module.blocks is not None
    kept = module.blocks.keep(module.dropout)
    states = sample_kept_states(module.blocks, kept, module.bias.device)
    hmm = module._build(states, kept, batch.lengths, None)
    transition = (hmm.transition.leave @ hmm.transition.enter.mT).log_softmax(-1)
    allowed = kept.states[kept.symbol_block[batch.values]]  # (N, T, k)
    seen = hmm.log_emission[batch.values]
    alpha = hmm.log_initial[allowed[:, 0]] + seen[:, 0]
    potentials = transition[allowed[:, :-1].unsqueeze(-1), allowed[:, 1:].unsqueeze(-2)]
    potentials = potentials + seen[:, 1:].unsqueeze(-2)
    for t in range(1, batch.num_steps):
        predicted = (alpha.unsqueeze(-1) + potentials[:, t - 1]).logsumexp(-2)
        alpha = torch.where((t < batch.lengths).unsqueeze(-1), predicted, alpha)
    return -alpha.logsumexp(-1).sum() / batch.num_observed


def plain(module: NeuralHMM, data: Sequences, tokens: int, steps: int, seed: int) -> list[float]:
    """Seconds of the straightforward program, after one step that is not counted."""
    pyro.set_rng_seed(seed)
    batches = Batches(data, batch_tokens=tokens)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    taken = []
    for _ in range(steps + 1):
        start_time = time.perf_counter()
        loss = plain_loss(module, batches.take())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 5.0)
        optimizer.step()
        taken.append(time.perf_counter() - start_time)
    return taken[1:]


def model(clusters: Tensor, words: int, states: int, two_level: bool) -> NeuralHMM:
    """A neural HMM with ``states`` states."""
    pyro.set_rng_seed(0)
    partition = blocks.from_clusters(clusters, states // blocks_in(clusters))
    return NeuralHMM(states, words, 256, blocks=partition, two_level=two_level, dropout=0.5)


def compare(text: Text, states: int, quick: bool) -> Iterator[dict[str, Any]]:
    """Ours, on one and two levels, and the straightforward program, in turn."""
    data, words, (clusters, _) = text.train, len(text.words), brown(text, BLOCKS)
    modules = {way: model(clusters, words, states, way == TWO) for way in (TWO, ONE, PLAIN)}
    ways = [(way, tokens) for way in (TWO, ONE) for tokens in (BATCH, SMALL)] + [(PLAIN, SMALL)]
    if states <= 8192:
        ways.append((PLAIN, BATCH))
    counts = {tokens: batches_in_round(data.lengths, tokens) for tokens in (BATCH, SMALL)}
    epochs: dict[tuple[str, int], list[float]] = {each: [] for each in ways}
    steps = dict.fromkeys(ways, 0)
    for seed in range(1 if quick else ROUNDS):
        for way, tokens in ways:
            measure = plain if way == PLAIN else ours
            number = 1 if quick else 2 if slow(way, states) else STEPS
            taken = measure(modules[way], data, tokens, number, seed)
            epochs[way, tokens].append(sum(taken) / len(taken) * counts[tokens])
            steps[way, tokens] += len(taken)
    for (way, tokens), seconds in epochs.items():
        target, faster = TARGETS.get(states, (None, None))
        aimed = way == TWO and tokens == BATCH
        yield {
            "part": "compare", "states": states, "blocks": blocks_in(clusters), "way": way,
            "tokens": tokens, "steps": steps[way, tokens], "steps_per_epoch": counts[tokens],
            "seconds_per_epoch": median(seconds), "low": min(seconds), "high": max(seconds),
            "times_faster": times(epochs[PLAIN, SMALL], seconds),
            "times_faster_alike": times(epochs.get((PLAIN, tokens)), seconds),
            "target_seconds": target if aimed else None,
            "target_times_faster": faster if aimed else None,
        }  # fmt: skip


def blocks_in(clusters: Tensor) -> int:
    """Number of blocks, one for each cluster."""
    return int(clusters.max()) + 1


def slow(way: str, states: int) -> bool:
    """Whether a step is so slow that few are measured."""
    return way != TWO and states > 8192


def times(longer: list[float] | None, shorter: list[float]) -> float | None:
    """Ratio of two times, the median over rounds; None if it was not measured."""
    return None if longer is None else median(a / b for a, b in zip(longer, shorter))


def one(task: tuple[str, Tensor, int, int, int, str, Sequences, int]) -> dict[str, Any]:
    """One way alone, in a separate process."""
    part, clusters, words, states, tokens, way, data, steps = task
    torch.set_num_threads(2)
    module = model(clusters, words, states, way == TWO)
    taken = (plain if way == PLAIN else ours)(module, data, tokens, steps, 0)
    count = batches_in_round(data.lengths, tokens)
    return {
        "part": part, "states": states, "blocks": blocks_in(clusters), "tokens": tokens,
        "way": way, "steps": len(taken), "steps_per_epoch": count,
        "seconds_per_epoch": median(taken) * count, "low": min(taken) * count,
        "high": max(taken) * count, "gigabytes": gigabytes(),
    }  # fmt: skip


def gigabytes() -> float:
    """Peak memory of this process.

    Not ``ru_maxrss``, which a new process inherits from its parent.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def scaling(
    part: str, text: Text, tasks: list[tuple[int, int, int, str]], quick: bool
) -> Iterator[dict[str, Any]]:
    """By states, by blocks, and by tokens in a batch."""
    assignments = {number: brown(text, number)[0] for number in {task[1] for task in tasks}}
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for states, number, tokens, way in tasks:
            steps = 1 if quick else 10 if slow(way, states) else ROUNDS * STEPS
            data, words = text.train, len(text.words)
            task = (part, assignments[number], words, states, tokens, way, data, steps)
            yield pool.apply(one, (task,))


def draw(rows: list[dict[str, Any]]) -> None:
    """Time and memory by states; time by states of a block, and by tokens in a batch."""
    plt = pyplot()
    figure, ((times_axis, memory), (widths, batches)) = plt.subplots(
        2, 2, figsize=(10.5, 7.5), layout="constrained"
    )
    single = [row for row in rows if row["part"] == "scaling"]
    batch_sizes = {TWO: BATCH, ONE: BATCH, PLAIN: SMALL}
    by_states = [row for row in single if row["tokens"] == batch_sizes[row["way"]]]
    lines(times_axis, by_states, "states", "seconds_per_epoch", batch_sizes)
    lines(memory, by_states, "states", "gigabytes", batch_sizes)
    by_blocks = [row for row in rows if row["part"] == "blocks"]
    wide = [row | {"width": row["states"] // row["blocks"]} for row in by_blocks]
    lines(widths, wide, "width", "seconds_per_epoch", batch_sizes)
    few = [row for row in single if row["states"] == 4096]
    lines(batches, few, "tokens", "seconds_per_epoch", {})
    times_axis.set(xlabel="states", ylabel="seconds per epoch", title=f"{BLOCKS} blocks")
    memory.set(xlabel="states", ylabel="GB", title=f"{BLOCKS} blocks, peak memory of the process")
    widths.set(
        xlabel="states per block", ylabel="seconds per epoch",
        title="8,192 states, in blocks of different sizes",
    )  # fmt: skip
    batches.set(
        xlabel="tokens per batch", ylabel="seconds per epoch",
        title=f"4,096 states, {BLOCKS} blocks",
    )  # fmt: skip
    figure.supxlabel("lines: medians over steps; bands: fastest and slowest step", fontsize=9)
    save(figure, NAME)


def lines(axis: Any, rows: list[dict[str, Any]], x: str, y: str, tokens: dict[str, int]) -> None:
    """A line for each way, with the range over steps; both axes in logarithms."""
    styles = {
        TWO: ("o-", "two levels"), ONE: ("s-", "one level"), PLAIN: ("x--", "straightforward")
    }  # fmt: skip
    for way, (mark, label) in styles.items():
        selected = sorted((row for row in rows if row["way"] == way), key=lambda row: row[x])
        if not selected:
            continue
        places = [row[x] for row in selected]
        name = f"{label}, {tokens[way]:,} tokens per batch" if way in tokens else label
        (line,) = axis.plot(places, [row[y] for row in selected], mark, label=name)
        if y == "seconds_per_epoch":
            low, high = zip(*((row["low"], row["high"]) for row in selected))
            axis.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if axis.lines:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2 if y == "gigabytes" else 10)
        axis.legend()
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(axis="x", labelsize=8)
        axis.yaxis.set_major_formatter("{x:,g}")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies a row, and orders rows."""
    return row["part"], row["states"], row["blocks"], row["tokens"], row["way"]


def main() -> None:
    tasks = {
        "scaling-states": [(size, BLOCKS, BATCH, TWO) for size in (*SIZES, 65536)]
        + [(size, BLOCKS, BATCH, ONE) for size in SIZES]
        + [(size, BLOCKS, SMALL, PLAIN) for size in SIZES],
        "blocks": [
            (8192, number, tokens, way)
            for way, tokens in ((TWO, BATCH), (ONE, BATCH), (PLAIN, SMALL))
            for number in NUMBERS
        ],
        "scaling-batches": [
            (4096, BLOCKS, tokens, way)
            for way, standard in ((TWO, BATCH), (ONE, BATCH), (PLAIN, SMALL))
            for tokens in (512, 1024, 2048, 4096, 8192, 16384)
            if tokens != standard
        ],
    }
    sizes = {"compare-4096": 4096, "compare-32768": 32768}
    options = arguments(__doc__, [*sizes, *tasks])
    if options.draw:
        draw(earlier(NAME))
        return
    torch.set_num_threads(2)
    text = read("letters" if options.quick else "ptb")
    if options.quick:
        few = [(1024, BLOCKS, BATCH, TWO), (1024, 64, SMALL, PLAIN)]
        for row in (*compare(text, 256, True), *scaling("scaling", text, few, True)):
            print(row, flush=True)
        return
    for part in options.only:
        results = (
            compare(text, sizes[part], False)
            if part in sizes
            else scaling("blocks" if part == "blocks" else "scaling", text, tasks[part], False)
        )
        for row in results:
            print(row, flush=True)
            with alone(NAME):
                others = [other for other in earlier(NAME) if key(other) != key(row)]
                rows = sorted([*others, row], key=key)
                write(NAME, rows, threads=torch.get_num_threads())
                draw(rows)


if __name__ == "__main__":
    main()
