"""Cost of each step of the way, a row of data, by their number and by the lengths of the sequences.

Three shapes: one long series, sequences of a hundred steps, and groups whose sizes have a heavy
tail, as sessions, documents and animals have. Each shape and size is measured in a process of its
own, with one thread, by processor time; memory is the growth of that process. What would take
longer than ``MOST`` seconds, judged by fewer rows, is left out, and so is what needs all sequences
padded together where that is refused. A step that costs far more a row of one long series than of
many short ones runs a loop of Python over time. Writes ``growth.json`` and ``growth.png``.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from common import Peak, arguments, earlier, own_memory, pyplot, save, write
from pyro.distributions import Poisson

import pyrohmm
from pyrohmm import Sequences, TabularHMM, fit_em, fit_gibbs, metrics, queries

SIZES, QUICK = (10_000, 100_000, 1_000_000), (1_000,)
SHAPES = "one series", "hundreds", "heavy tail"
LABELS = dict(
    zip(SHAPES, ("one long series", "sequences of 100 steps", "lengths with a heavy tail"))
)
MOST = 60.0
ITERATIONS = 4
FEW = 5_000  # rows with which all loops are compiled
FAMILIES: dict[str, tuple[Any, Callable[[], Any]]] = {
    "normal": (["x", "y"], lambda: TabularHMM(3, pyrohmm.normal(2))),
    "categorical": ("symbol", lambda: TabularHMM(3, pyrohmm.categorical(20))),
    "full covariance": (["x", "y"], lambda: TabularHMM(3, pyrohmm.normal_full(2))),
    "full covariance, a tenth missing": (
        ["x", "y_in_part"], lambda: TabularHMM(3, pyrohmm.normal_full(2))
    ),
    "Poisson": ("count", lambda: TabularHMM(3, pyrohmm.poisson())),
    "negative binomial": ("count", lambda: TabularHMM(3, pyrohmm.negative_binomial())),
    "zero-inflated Poisson": (
        "count", lambda: TabularHMM(3, pyrohmm.zero_inflated(pyrohmm.poisson()))
    ),
    "covariates": (
        "count",
        lambda: pyrohmm.RegressionHMM(
            3, pyrohmm.regression(Poisson, rate=[0, 1]), transition=[0, 1]
        ),
    ),
    "explicit durations": (
        "symbol",
        lambda: pyrohmm.TabularHSMM(3, pyrohmm.categorical(20), pyrohmm.free_durations(20)),
    ),
    "second order": ("symbol", lambda: pyrohmm.TabularSecondOrderHMM(3, pyrohmm.categorical(20))),
    "factorial": (
        "symbol", lambda: pyrohmm.TabularFactorialHMM([2, 3], pyrohmm.categorical(20))
    ),
}  # fmt: skip


def lengths_of(shape: str, rows: int) -> np.ndarray:
    """Lengths of sequences of about so many rows in all."""
    if shape == "one series":
        return np.array([rows])
    if shape == "hundreds":
        return np.full(rows // 100, 100)
    lengths = np.minimum(np.random.default_rng(1).zipf(1.5, rows) * 5, rows // 2)
    return lengths[: max(np.searchsorted(lengths.cumsum(), rows), 1)]


def table_of(lengths: np.ndarray) -> Any:
    """A DataFrame of three states that last seven rows each."""
    import pandas

    random, rows = np.random.default_rng(0), int(lengths.sum())
    level = np.arange(rows) // 7 % 3
    y = random.normal(size=rows).astype(np.float32)
    columns = {
        "who": np.repeat(np.arange(len(lengths)), lengths), "time": np.arange(rows),
        "x": (random.normal(size=rows) + 3 * level).astype(np.float32), "y": y,
        "y_in_part": np.where(random.random(rows) < 0.1, np.nan, y).astype(np.float32),
        "count": random.poisson(1 + 5 * level), "one": 1.0, "covariate": random.normal(size=rows),
        "symbol": (random.integers(0, 8, rows) + 5 * level) % 20,
    }  # fmt: skip
    return pandas.DataFrame(columns)


def measured(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Processor time in seconds, growth of memory in GB, and the result."""
    before = own_memory()
    with Peak() as peak:
        start = time.process_time()
        result = function()
        seconds = time.process_time() - start
    return seconds, (peak.largest - before) * 2**20 / 1e9, result


def read(frame: Any, family: str) -> Sequences:
    """The sequences of a family's columns."""
    covariates = ["one", "covariate"] if family == "covariates" else None
    return Sequences.from_dataframe(
        frame, columns=FAMILIES[family][0], by="who", time="time", gaps="ignore",
        covariates=covariates,
    )  # fmt: skip


def fit_of(family: str, data: Sequences, iterations: int, start: Any = None) -> Any:
    """A fit of so many iterations."""
    options: dict[str, Any] = {"tolerance": 0.0, "progress": False, "start": start}
    return fit_em(FAMILIES[family][1](), data, num_iterations=iterations, **options)


def after_a_fit(fit: Any, data: Sequences) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is asked of a fitted model, by name."""

    def by_part(query: Callable[[Any, Any], Any]) -> Callable[[], Any]:
        return lambda: data.map_steps(lambda part: query(fit.hmm(part), part.values))

    yield "Viterbi", by_part(lambda hmm, values: hmm.viterbi(values))
    yield "posterior", by_part(lambda hmm, values: hmm.posterior(values).state_probs)
    yield "filter", by_part(lambda hmm, values: hmm.filtered(values))
    yield "sample of states", by_part(lambda hmm, values: hmm.sample_states(values))
    yield "sample of data", by_part(lambda hmm, _: hmm.sample())
    yield (
        "pseudo-residuals",
        by_part(lambda hmm, values: queries.pseudo_residuals(hmm, values).middle()),
    )
    yield "3 best paths", by_part(lambda hmm, values: queries.k_best(hmm, values, 3)[0].mT)
    yield (
        "entropy of paths",
        lambda: [queries.path_entropy(fit.hmm(part), part.values) for part in data.buckets],
    )
    yield "BIC", lambda: metrics.bic(fit, data)
    yield "standard errors", lambda: fit.std_errors(data)
    yield (
        "Gibbs, 4 chains of 3 sweeps",
        lambda: fit_gibbs(fit.model.module, data, num_samples=2, warmup=1, progress=False),
    )


def measure(shape: str, rows: int, left_out: set[tuple[str, str]]) -> list[dict[str, Any]]:
    """One row for each step of the way with data of a shape and size."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    small = table_of(lengths_of(shape, min(rows, FEW)))
    frame = table_of(lengths_of(shape, rows))
    found: list[dict[str, Any]] = []

    def note(family: str, step: str, seconds: float, memory: float, **more: Any) -> None:
        of_data = {"shape": shape, "rows": len(frame), "sequences": int(frame.who.nunique())}
        row = (
            of_data
            | {"family": family, "step": step, "seconds": seconds, "memory_gb": memory}
            | more
        )
        found.append(row | {"nanoseconds_a_row": 1e9 * seconds / len(frame)})
        print(found[-1], flush=True)

    for family in FAMILIES:
        few = read(small, family)
        pyro.set_rng_seed(0)
        fit_of(family, few, 1, fit_of(family, few, 4))  # compiles
        if (family, "an iteration of EM") in left_out:
            continue
        seconds, memory, data = measured(partial(read, frame, family))
        note(family, "table", seconds, memory)
        if family == "covariates" and data.is_ragged:
            continue
        whole, memory_of_start, fit = measured(partial(fit_of, family, data, 2))
        one, _, _ = measured(partial(fit_of, family, data, 1, fit))
        more, memory, fit = measured(partial(fit_of, family, data, 1 + ITERATIONS, fit))
        each = (more - one) / ITERATIONS
        note(family, "an iteration of EM", each, memory)
        note(family, "start of EM", max(whole - 3 * each, 0.0), memory_of_start)
        if family != "normal":
            continue
        seconds, memory, fit = measured(partial(fit_em, FAMILIES["normal"][1](), data))
        note(family, "a fit", seconds, memory, iterations=fit.num_steps)
        of_few = after_a_fit(fit_em(FAMILIES["normal"][1](), few), few)
        for (_, warm), (step, run) in zip(of_few, after_a_fit(fit, data)):
            warm()
            if (family, step) not in left_out and not (data.is_ragged and "Gibbs" in step):
                seconds, memory, _ = measured(run)
                note(family, step, seconds, memory)
    return found


def too_slow(rows: list[dict[str, Any]], size: int) -> set[tuple[str, str]]:
    """Families and steps that would take longer than ``MOST`` seconds with ``size`` rows."""
    return {
        (row["family"], row["step"])
        for row in rows
        if row["seconds"] * size / row["rows"] > MOST / (5 if "EM" in row["step"] else 1)
    }


def draw(rows: list[dict[str, Any]]) -> None:
    """Nanoseconds a row against rows, a panel for each step of the way."""
    plt = pyplot()
    panels = [("normal", row["step"]) for row in rows if row["family"] == "normal"]
    panels += [(row["family"], row["step"]) for row in rows if row["step"] == "an iteration of EM"]
    panels = list(dict.fromkeys(panels))
    figure, axes = plt.subplots(-(-len(panels) // 5), 5, figsize=(10, 11), sharex=True, sharey=True,
                                layout="constrained")  # fmt: skip
    for place, (family, step) in zip(axes.flat, panels):
        for shape, marker in zip(SHAPES, "osD"):
            of_shape = [
                r for r in rows if (r["shape"], r["family"], r["step"]) == (shape, family, step)
            ]
            place.plot(
                [row["rows"] for row in of_shape],
                [max(row["nanoseconds_a_row"], 1.0) for row in of_shape],
                marker=marker, markersize=4, label=LABELS[shape],
            )  # fmt: skip
        title = step if family == "normal" and "EM" not in step else f"{step},\n{family}"
        place.set(xscale="log", yscale="log", ylim=(5, 2e5))
        place.set_title(title.replace(", a tenth", ",\na tenth"), fontsize=9)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    figure.supxlabel(
        "rows of data (where a curve is level, time is proportional to them)", fontsize=10
    )
    figure.supylabel("nanoseconds of processor time per row, one thread", fontsize=10)
    handles = axes.flat[0].get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside upper center", ncols=len(SHAPES),
        title="no point: more than a minute, or refused for the memory of padded sequences",
    )  # fmt: skip
    save(figure, "growth")


def main() -> None:
    options = arguments(__doc__)
    rows: list[dict[str, Any]] = [] if not options.draw else earlier("growth")
    if not options.draw:
        for shape in SHAPES[-1:] if options.quick else SHAPES:
            of_shape: list[dict[str, Any]] = []
            for size in QUICK if options.quick else SIZES:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    of_shape += pool.apply(measure, (shape, size, too_slow(of_shape, size)))
            rows += of_shape
            if not options.quick:
                write("growth", rows)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
