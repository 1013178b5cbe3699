"""Time and memory of EM on symbols in a mapped file, from a million to a hundred million steps.

Each size is fitted in a process of its own, which maps the file and reads it part by part. Memory
is that of the process alone, without pages of the file, which the system lends and takes back.
Writes ``large_data.json``, after each size.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Peak, arguments, own_memory, write

from pyrohmm import TabularHMM, categorical, fit_em, starts
from pyrohmm.data import StoredSequences

SIZES, QUICK = [10**6, 10**7, 10**8], [10**4, 10**5]
LENGTH, NUM_STATES, NUM_SYMBOLS, NUM_STEPS = 1000, 4, 16, 1


def simulate(path: Path, size: int) -> None:
    """Write symbols of a chain that stays in its state with probability 0.9, a byte each."""
    random = np.random.default_rng(0)
    emission = random.dirichlet(np.full(NUM_SYMBOLS, 0.3), NUM_STATES).cumsum(-1)
    count = size // LENGTH
    values = np.lib.format.open_memmap(path, "w+", np.uint8, (count, LENGTH))
    states = random.integers(NUM_STATES, size=count)
    for t in range(LENGTH):
        moved = random.random(count) < 0.1
        states[moved] = random.integers(NUM_STATES, size=int(moved.sum()))
        symbols = (random.random((count, 1)) > emission[states]).sum(-1)
        values[:, t] = np.minimum(symbols, NUM_SYMBOLS - 1)
    values.flush()


def measure(path: Path, size: int) -> dict[str, Any]:
    """Fit the symbols in the file."""
    torch.set_num_threads(1)
    values = np.load(path, mmap_mode="r").reshape(-1)
    torch.manual_seed(0)
    small = StoredSequences(values[: 2 * LENGTH], np.full(2, LENGTH))
    options = {"num_iterations": NUM_STEPS, "tolerance": None, "start": starts.from_prior}
    fit_em(TabularHMM(NUM_STATES, categorical(NUM_SYMBOLS)), small, **options)  # compiles
    before = own_memory()
    with Peak() as peak:
        start_time = time.perf_counter()
        data = StoredSequences(values, np.full(size // LENGTH, LENGTH))
        fit = fit_em(TabularHMM(NUM_STATES, categorical(NUM_SYMBOLS)), data, **options)
        seconds = time.perf_counter() - start_time
    return {
        "steps": size, "states": NUM_STATES, "symbols": NUM_SYMBOLS, "parts": len(data.sizes),
        "e_steps": NUM_STEPS + 1, "seconds": seconds,
        "steps_per_second": size * (NUM_STEPS + 1) / seconds,
        "file_mb": path.stat().st_size / 2**20, "memory_before_mb": before,
        "memory_added_mb": peak.largest - before,
        "nats_per_step": fit.losses[-1].item() / size,
    }  # fmt: skip


def main() -> None:
    options = arguments(__doc__, picture=False)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size in QUICK if options.quick else SIZES:
            path = Path(folder, f"{size}.npy")
            simulate(path, size)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (path, size)))
            path.unlink()
            print({name: round(x, 3) for name, x in rows[-1].items()}, flush=True)
            if not options.quick:
                write("large_data", rows)


if __name__ == "__main__":
    main()
