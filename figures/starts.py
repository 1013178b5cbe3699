"""Where EM ends from one start, by default, and from eight restarts.

Problems of four kinds: a thousand steps of symbols, or of normal vectors, of two to five states
that overlap; a thousand numbers of three regimes that differ in their variance alone; 48,000
letters of a genome-like chain, four of them and three states that last. The best of a problem is
that of all its fits, among them thirty restarts of three kinds, ten of each, without a ranking
on part of the data. Seeds are none of those with which the default was chosen. Seconds are those of
the processor, on one thread; their ratio to those of one start is the median over the problems.
Writes ``starts.json`` and ``starts.png``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pyro
import torch
from common import alone, arguments, earlier, pyplot, save, write

from pyrohmm import Sequences, TabularHMM, categorical, fit_em, normal, starts

WAYS: dict[str, dict[str, Any]] = {
    "one start": {"restarts": 1}, "default": {}, "eight restarts": {"restarts": 8},
}  # fmt: skip
EACH = 10  # restarts of each of the kinds of start of the reference
NEAR = 1.0  # nats

Problem = tuple[Sequences, Callable[[], TabularHMM], list[Any]]


def paths(rng: np.random.Generator, chain: np.ndarray, num: int, num_steps: int) -> np.ndarray:
    """Paths ``(num, num_steps)`` of a Markov chain."""
    states = np.zeros((num, num_steps), int)
    states[:, 0] = rng.integers(len(chain), size=num)
    bounds, uniform = chain.cumsum(-1)[:, :-1], rng.random(states.shape)
    for t in range(1, num_steps):
        states[:, t] = (bounds[states[:, t - 1]] < uniform[:, t, None]).sum(-1)
    return states


def lasting(rng: np.random.Generator, num_states: int, stay: float) -> np.ndarray:
    """A transition matrix whose states last."""
    rows = rng.dirichlet(np.ones(num_states), size=num_states)
    return stay * np.eye(num_states) + (1 - stay) * rows


def some_paths(rng: np.random.Generator, num_states: int) -> np.ndarray:
    """A thousand steps in 1, 5 or 20 sequences."""
    num = int(rng.choice([1, 5, 20]))
    chain = lasting(rng, num_states, rng.choice([0.3, 0.7, 0.9]))
    return paths(rng, chain, num, 1000 // num)


def symbols_of(rng: np.random.Generator, states: np.ndarray, faces: np.ndarray) -> Problem:
    uniform = rng.random((*states.shape, 1))
    values = (faces.cumsum(-1)[states][..., :-1] < uniform).sum(-1)
    kinds = [starts.from_prior, starts.by_blocks, starts.sticky()]
    return sequences(values), lambda: TabularHMM(len(faces), categorical(faces.shape[1])), kinds


def symbols(rng: np.random.Generator) -> Problem:
    num_states, num_symbols = int(rng.integers(2, 5)), int(rng.integers(4, 11))
    faces = rng.dirichlet(np.full(num_symbols, 0.7), size=num_states)
    return symbols_of(rng, some_paths(rng, num_states), faces)


def vectors(rng: np.random.Generator) -> Problem:
    num_states, dim = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    mean = 1.5 * rng.normal(size=(num_states, dim))
    scale = rng.uniform(0.5, 1.5, size=(num_states, dim))
    states = some_paths(rng, num_states)
    return numbers(mean[states] + scale[states] * rng.normal(size=(*states.shape, dim)), num_states)


def volatility(rng: np.random.Generator) -> Problem:
    scale = np.array([0.5, 1.5, 4.0])[paths(rng, lasting(rng, 3, 0.97), 1, 1000)]
    return numbers((scale * rng.normal(size=scale.shape))[..., None], 3)


def genome(rng: np.random.Generator) -> Problem:
    states = paths(rng, lasting(rng, 3, rng.choice([0.95, 0.99, 0.997])), 1, 48_000)
    return symbols_of(rng, states, rng.dirichlet(np.full(4, 5.0), size=3))


def numbers(values: np.ndarray, num_states: int) -> Problem:
    kinds = [starts.by_kmeans, starts.by_blocks, starts.sticky()]
    return sequences(values), lambda: TabularHMM(num_states, normal(values.shape[-1])), kinds


def sequences(values: np.ndarray) -> Sequences:
    return Sequences(torch.tensor(values), torch.full((len(values),), values.shape[1]))


# seeds of their own, and numbers of problems
PROBLEMS = {
    "symbols": (symbols, 71_000, 12), "vectors": (vectors, 72_000, 12),
    "volatility": (volatility, 73_000, 8), "genome": (genome, 74_000, 4),
}  # fmt: skip


def fitted(
    make: Callable[[], TabularHMM], data: Sequences, seed: int, **options: Any
) -> tuple[float, float]:
    """The final loss, and seconds of the processor."""
    pyro.set_rng_seed(seed)
    before = time.process_time()
    loss = fit_em(make(), data, progress=False, **options).losses[-1].item()
    return loss, time.process_time() - before


def measure(kind: str, count: int, each: int) -> list[dict[str, Any]]:
    """A row for each way, over problems of a kind; ``each`` is as :data:`EACH`."""
    problem, first, _ = PROBLEMS[kind]
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    best = []
    for seed in range(first, first + count):
        data, make, kinds = problem(np.random.default_rng(seed))
        if seed == first:  # compiled functions are loaded
            for options in WAYS.values():
                fitted(make, data, seed, num_iterations=30, **options)
        for way, options in WAYS.items():
            found[way].append(fitted(make, data, seed, **options))
        many = [fitted(make, data, seed + 500, start=start, restarts=each)[0] for start in kinds]
        best.append(min(many + [runs[-1][0] for runs in found.values()]))
    rows = []
    one = [seconds for _, seconds in found["one start"]]
    for way, runs in found.items():
        gaps = [loss - lowest for (loss, _), lowest in zip(runs, best)]
        taken = [seconds for _, seconds in runs]
        rows.append({
            "problems": kind, "way": way, "number": count,
            "share_near": sum(gap < NEAR for gap in gaps) / count, "gaps": gaps,
            "seconds": taken, "over_one_start": median(a / b for a, b in zip(taken, one)),
        })  # fmt: skip
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Shares of problems near the best, and time over that of one start."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for place, (way, color) in enumerate(zip(WAYS, ("0.7", "C0", "C1"))):
        own = [row for row in rows if row["way"] == way]
        at = [x + 0.27 * (place - 1) for x in range(len(own))]
        for axis, key, scale in zip(axes, ("share_near", "over_one_start"), (100, 1)):
            heights = [scale * row[key] for row in own]
            bars = axis.bar(at, heights, 0.25, color=color, label=way)
            axis.bar_label(bars, [f"{height:.3g}" for height in heights], fontsize=8)
    names = [f"{row['problems']} ({row['number']})" for row in rows if row["way"] == "default"]
    for axis in axes:
        axis.set_xticks(range(len(names)), names)
        axis.set_xlabel("kind of problem (how many)")
        axis.grid(axis="x", visible=False)
    axes[0].set(ylabel="problems within 1 nat of the best, %", ylim=(0, 115))
    axes[1].set_ylabel("median time over that of one start")
    axes[1].legend(loc="upper left")
    save(figure, "starts")


def main() -> None:
    options = arguments(__doc__, list(PROBLEMS))
    if options.draw:
        return draw(earlier("starts"))
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    if options.quick:
        for kind in ("symbols", "vectors", "volatility"):
            measure(kind, 1, 2)
        return None
    for kind in options.only:
        measured = measure(kind, PROBLEMS[kind][2], EACH)
        with alone("starts"):
            old = earlier("starts")
            rows = {k: [row for row in old if row["problems"] == k] for k in PROBLEMS}
            every = [row for own in (rows | {kind: measured}).values() for row in own]
            write("starts", every, nats=NEAR)
            draw(every)


if __name__ == "__main__":
    main()
