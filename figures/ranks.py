"""Processor time and communication of an iteration on 1, 2 and 4 ranks, and a corpus on two.

``fits``: each fit takes the same data, or the same minibatches, on 1, 2 and 4 ranks (gloo, one
thread each), which divide them. ``seconds`` are the processor time of an iteration, summed over the
ranks: what a division costs, whatever else the machine does. ``times`` is this over that of one
rank; a perfect division has 1. The neural model has minibatches of 8,192 tokens a rank, and its
``times`` are a token's. ``calls`` and ``megabytes`` are what a rank communicates in an
iteration. Figures are medians over iterations, without the first.

``tokens``: the same for the neural model by the number of tokens in a minibatch, which ranks
divide: from which on more of them pay.

``corpus``: a made-up corpus in a mapped file, of which each of two ranks opens its half. Memory is
the largest private memory of a rank in training, without pages of the file, which the system lends
and takes back.

Writes ``ranks.json``, after each part, and ``ranks.png``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyro
import torch
from common import Peak, arguments, earlier, own_memory, pyplot, save, write
from pyro.infer.autoguide import AutoNormal
from torch import distributed

from pyrohmm import (
    LanguageModel,
    MarginalModel,
    NeuralHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    normal,
)
from pyrohmm.data import Vocabulary
from pyrohmm.data.batches import Batches
from pyrohmm.language import open_corpus

NAME, PARTS = "ranks", ["fits", "tokens", "corpus"]
RANKS = [1, 2, 4]
ITERATIONS = 7
STATES, WORDS, BLOCKS = 2048, 10_000, 64  # of the neural model
NEURAL, PER_RANK = "neural, 8,192 tokens a rank", 8192
TOKENS = [2048, 8192, 32768, 131072]  # in a minibatch
CORPUS, LENGTH, STEPS = 10**8, 25, 200
COUNTED = ("all_reduce", "broadcast", "broadcast_object_list", "barrier")


def symbols(lengths: list[int], num_symbols: int = 64) -> Sequences:
    """Random symbols."""
    values = np.random.default_rng(0).integers(num_symbols, size=sum(lengths))
    return Sequences.from_concatenated(values, lengths)


def neural(tokens: int) -> None:
    """Steps of a neural model of two levels."""
    each = blocks.from_clusters(torch.arange(WORDS) % BLOCKS, STATES // BLOCKS)
    module = NeuralHMM(STATES, WORDS, 128, blocks=each, two_level=True)
    fit_map(
        MarginalModel(module), symbols([32] * 8192, WORDS), num_iterations=ITERATIONS,
        batch_tokens=tokens, tolerance=None, progress=False,
    )  # fmt: skip


def fits(quick: bool) -> dict[str, Callable[[], Any]]:
    """The fits, by name."""
    count = 200 if quick else 20_000
    alike, unlike = symbols([100] * count), symbols([10, 400] * (count // 4))
    options: Any = {"num_iterations": ITERATIONS, "tolerance": None, "progress": False}
    rows = torch.randn(count // 4, 100, 4, generator=torch.Generator().manual_seed(0))
    model = MarginalModel(TabularHMM(16, categorical(64)))
    return {
        "EM, symbols": lambda: fit_em(TabularHMM(16, categorical(64)), alike, **options),
        "EM, lengths 10 and 400": lambda: fit_em(
            TabularHMM(16, categorical(64)), unlike, **options
        ),
        "EM, vectors": lambda: fit_em(TabularHMM(16, normal(4)), Sequences(rows), **options),
        "MAP, symbols": lambda: fit_map(model, alike, **options),
        "SVI, symbols": lambda: fit_svi(model, AutoNormal(model), alike, **options),
        NEURAL: lambda: neural(PER_RANK * distributed.get_world_size()),
    }


def tokens(quick: bool) -> dict[str, Callable[[], Any]]:
    """A neural model by the number of tokens in a minibatch."""
    return {str(number): partial(neural, number) for number in (TOKENS[:1] if quick else TOKENS)}


CASES = {"fits": fits, "tokens": tokens}
TABLES = "networks and tables of pairs of blocks are computed in every rank"
FIXED = "what an iteration takes whatever the number of sequences"


class Counter:
    """Calls, bytes and processor time, noted whenever a fit takes a batch."""

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        self.notes: list[tuple[float, int, int]] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is communicated."""
        kept = {name: getattr(distributed, name) for name in COUNTED}
        take = Batches.take

        def counted(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                sent = args[:1] if args and isinstance(args[0], torch.Tensor) else ()
                self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in sent)
                return kept[name](*args, **kwargs)

            return call

        def noted(batches: Batches) -> Any:
            self.notes.append((time.process_time(), self.calls, self.bytes))
            return take(batches)

        for name in COUNTED:
            setattr(distributed, name, counted(name))
        Batches.take = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Batches.take = take  # type: ignore[method-assign]
            for name, function in kept.items():
                setattr(distributed, name, function)


def work(rank: int, size: int, part: str, quick: bool, place: str) -> None:
    """All fits, in one rank of several."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=size
    )
    found = {}
    for name, fit in CASES[part](quick).items():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        counter = Counter()
        with counter.counting():
            fit()
        steps = counter.notes[-(ITERATIONS - 1) :]  # what ranks starts comes before
        found[name] = [median(b[n] - a[n] for a, b in pairwise(steps)) for n in range(3)]
    torch.save(found, f"{place}/{rank}")
    distributed.destroy_process_group()


def measure(part: str, quick: bool) -> list[dict[str, Any]]:
    """Rows of a part."""
    rows: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    for size in RANKS[:2] if quick else RANKS:
        with tempfile.TemporaryDirectory() as place:
            torch.multiprocessing.start_processes(
                work, (size, part, quick, place), size, start_method="spawn"
            )
            found = [torch.load(f"{place}/{rank}") for rank in range(size)]
        for name in found[0]:
            seconds = sum(each[name][0] for each in found)
            alone.setdefault(name, seconds)
            work_done = size if name == NEURAL else 1  # in units of that of one rank
            row = {
                "part": part, "fit": name, "ranks": size, "seconds": seconds,
                "times": seconds / alone[name] / work_done, "calls": found[0][name][1],
                "megabytes": found[0][name][2] / 1e6,
            }  # fmt: skip
            if row["times"] > 1.3:
                row["why"] = TABLES if part == "tokens" else FIXED
            rows.append(row)
            print(row, flush=True)
    return rows


# The corpus


def simulate(path: str, size: int, seed: int) -> None:
    """Write made-up sentences: words of a class follow those of the class before."""
    random = np.random.default_rng(seed)
    with open(path, "wb") as file:
        for _ in range(size // 10**6):
            classes = random.integers(BLOCKS - 1, size=(10**6 // LENGTH, 1))
            steps = random.integers(0, 3, size=(10**6 // LENGTH, LENGTH)).cumsum(1)
            words = (classes + steps) % (BLOCKS - 1) + (BLOCKS - 1) * random.integers(
                WORDS // BLOCKS, size=steps.shape
            )
            words += 1
            words[:, -1] = 0  # <eos>
            file.write(words.astype(np.int32).tobytes())


def train(rank: int, place: str, size: int, steps: int) -> None:
    """Train on the half of the corpus of one of two ranks."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2
    )
    simulate(f"{place}/{rank}.tokens", size // 2, rank)
    distributed.barrier()
    words = Vocabulary(["<eos>", *map(str, range(1, WORDS))], None)
    pyro.set_rng_seed(0)
    clusters = torch.where(torch.arange(WORDS) == 0, BLOCKS - 1, (torch.arange(WORDS) - 1) % 63)
    each = blocks.from_clusters(clusters, 16)
    model = LanguageModel(words, each, 64, dropout=0.0)
    before = own_memory()
    with Peak() as peak:
        start_time = time.perf_counter()
        data = open_corpus(f"{place}/{rank}.tokens", words)
        opened = time.perf_counter() - start_time
        ends: list[float] = []
        take = Batches.take

        def noted(batches: Batches) -> Any:
            ends.append(time.perf_counter())
            if len(ends) > steps:
                raise KeyboardInterrupt  # a round has many more
            return take(batches)

        Batches.take = noted  # type: ignore[method-assign]
        try:
            model.fit(data, num_epochs=1, batch_tokens=2048, sharded=True, progress=False)
        except KeyboardInterrupt:
            Batches.take = take  # type: ignore[method-assign]
    row = {
        "part": "corpus", "rank": rank, "tokens": size, "share": data.num_observed,
        "steps": steps, "opened_seconds": opened, "ready_seconds": ends[0] - start_time,
        "first_round_seconds": ends[1] - ends[0],
        "step_seconds": median(b - a for a, b in pairwise(ends[1:])),
        "memory_before_mb": before, "memory_mb": peak.largest,
        "file_mb": Path(f"{place}/{rank}.tokens").stat().st_size / 2**20,
    }  # fmt: skip
    torch.save(row, f"{place}/row{rank}")
    distributed.destroy_process_group()


def corpus(quick: bool) -> list[dict[str, Any]]:
    """Rows of two ranks that train on a mapped corpus."""
    with tempfile.TemporaryDirectory() as place:
        size, steps = (2 * 10**6, 20) if quick else (CORPUS, STEPS)
        torch.multiprocessing.start_processes(train, (place, size, steps), 2, start_method="spawn")
        rows = [torch.load(f"{place}/row{rank}") for rank in range(2)]
    print(*rows, sep="\n", flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw processor time by the number of ranks."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for axis, part in zip(axes, PARTS):
        some = [row for row in rows if row["part"] == part]
        if not some:
            continue
        for name in dict.fromkeys(row["fit"] for row in some):
            line = [(row["ranks"], row["times"]) for row in some if row["fit"] == name]
            label = name if part == "fits" else f"{int(name):,} tokens in a minibatch"
            axis.plot(*zip(*line), marker="o", label=label)
        axis.axhline(1.0, color="0.3", linewidth=0.8, linestyle=":", label="perfect division")
        axis.set(xlabel="ranks (processes)", xticks=RANKS)
        axis.set_title("fits" if part == "fits" else f"neural model of {STATES:,} states")
        axis.legend(loc="upper left")
    axes[0].set_ylabel("processor time of all ranks\n/ that of one")
    save(figure, NAME)


def main() -> None:
    options = arguments(__doc__, PARTS)
    rows = earlier(NAME)
    if not options.draw:
        for part in options.only:
            new = corpus(options.quick) if part == "corpus" else measure(part, options.quick)
            rows = [row for row in rows if row["part"] != part] + new
            if not options.quick:
                write(NAME, rows)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
