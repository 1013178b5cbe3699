"""Four models on one kind of data, under two protocols: figures 4 to 6 of the DenseHMM paper.

The models are a standard HMM fitted by EM (Baum-Welch); a "fair" one, with the number of states
that gives it about as many parameters as the DenseHMM; a DenseHMM fitted by EM with gradient
M-steps; and a DenseHMM fitted directly to the joint distribution of adjacent symbols. They are
compared by the mean absolute deviation (MAD) of that distribution from its counts in test data, and
by the negative log-likelihood (NLL) of test data, over ten runs for each number of states n and
length l of embeddings.

*As in the code* reproduces the authors' code. EM: 40 iterations, those of the DenseHMM with 25
steps of Adam each; the standard HMM starts from uniform initial and transition probabilities.
Direct: 10,000 steps of Adam at 0.001, without the gradient through the stationary distribution, and
on synthetic data towards the true distribution of pairs instead of the training counts. The MAD is
that of a sample from the model, with as many sequences as the test data, all of the maximal length;
for the direct model it is analytic. The reference is the counts of the test data, also where the
true distribution is known (the paper says it is the true one). The NLL is divided by the number of
sequences times the maximal length.

*Done right*, every model sees the training data only and starts at random. EM runs until
convergence or for 100 iterations, with L-BFGS as the M-step of the DenseHMM, which cannot decrease
the objective; the direct fit follows the exact gradient until convergence. The MAD is analytic for
every model, with the state marginals averaged over the positions of the test data, because
sequences need not start in the stationary distribution. The NLL is per step. On synthetic data the
reference of the MAD is the true distribution.

Unlike in the code, the ten splits of real data are the same for all n and l, so a standard HMM of n
states is fitted once for all l.

References:
    DenseHMM: Learning Hidden Markov Models by Learning Dense Representations
    (Sicking, Pintz, Akila and Wirtz, 2020), https://arxiv.org/abs/2012.09783
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyrohmm import (
    HMM,
    DenseHMM,
    GradientStep,
    Sequences,
    TabularHMM,
    categorical,
    cooccurrence,
    datasets,
    dense,
    fit_cooccurrence,
    fit_em,
    readers,
)

from . import FOLDER, earlier, papers, pyplot, save, write

GRID = {3: [1, 2, 3], 5: [2, 3, 5], 10: [2, 3, 5, 10]}
RUNS = 10
STANDARD, FAIR, DENSE_EM, DIRECT = MODELS = ("standard", "fair", "dense, EM", "dense, direct")
CODE, RIGHT = PROTOCOLS = ("as in the code", "done right")
TITLES = {CODE: "protocol of the authors' code", RIGHT: "corrected protocol"}

Cell = tuple[int, int]  # n, l


class Halves(NamedTuple):
    """Data of one run; ``pair_probs`` is the true distribution of pairs, if it is known."""

    train: Sequences
    test: Sequences
    pair_probs: Tensor | None = None


class Source(NamedTuple):
    """One kind of data.

    Attributes:
        name: In the results.
        title: In the picture.
        num_symbols: Called with n, returns V.
        draw: Called with n and a generator, returns the data of one run.
        claims: What the paper says of the results.
        anew: Whether data are sampled anew for each n and l; if not, all n and l share them.
    """

    name: str
    title: str
    num_symbols: Callable[[int], int]
    draw: Callable[[int, torch.Generator], Halves]
    claims: list[Claim]
    anew: bool = False


class Budget(NamedTuple):
    """How much is run: cells, runs, iterations of EM and steps of direct fits in each protocol."""

    grid: dict[int, list[int]]
    runs: int
    iterations: dict[str, int]
    steps: dict[str, int]

    @property
    def cells(self) -> list[Cell]:
        """All pairs of n and l."""
        return [(n, dim) for n, dims in self.grid.items() for dim in dims]


FULL = Budget(GRID, 10, {CODE: 40, RIGHT: 100}, {CODE: 10_000, RIGHT: 3_000})
QUICK = Budget({2: [1], 3: [1]}, 2, {CODE: 2, RIGHT: 2}, {CODE: 20, RIGHT: 20})


def of_corpus(
    read: Callable[[], readers.Corpus], longest: int, share: float, quick: bool
) -> tuple[Callable[[int], int], Callable[[int, torch.Generator], Halves]]:
    """Arguments of a :class:`Source`: a corpus, cut, with rare symbols merged, split at random.

    Args:
        read: Returns the corpus; without data, a quick run uses English letters instead.
        longest: Maximal length; longer sequences are cut.
        share: Of all steps; the rarest symbols are merged as long as their sum is below it.
        quick: Whether to keep only a hundred sequences.
    """

    @cache
    def corpus() -> readers.Corpus:
        missing = quick and "PYROHMM_DATA" not in os.environ
        whole = datasets.english_letters(6000, chunk=60) if missing else read()
        data = whole.data.without_labels().truncate(longest)
        data = data[:100] if quick else data
        data = data[data.lengths.argsort(stable=True)]  # batches of equal lengths are faster
        return papers.merge_rare(whole._replace(data=data, tags=None), share)

    def halves(_: int, generator: torch.Generator) -> Halves:
        data, num_symbols = corpus().data, len(corpus().vocabulary)
        for _ in range(100):  # until both show every symbol
            train, test = data.split(0.5, generator)
            seen = [len(half.values[half.observed].unique()) for half in (train, test)]
            if min(seen) == num_symbols:
                return Halves(train, test)
        raise ValueError(f"in 100 splits none shows every symbol twice; raise share = {share}.")

    return lambda _: len(corpus().vocabulary), halves


def fair_num_states(
    num_states: int, num_symbols: int, dim: int, *, as_in_code: bool = False
) -> int:
    r"""Number of states of a standard HMM with as many parameters as a DenseHMM (section 5).

    The positive root of :math:`x^2 + x (V - 1) - 1 = D (3 K + V + 1)`, rounded. The right side
    counts embeddings; what they can express is less.

    Args:
        num_states: K of the DenseHMM.
        num_symbols: V.
        dim: D.
        as_in_code: Whether to leave out the -1, as the authors' code does.
    """
    parameters = dim * (3 * num_states + num_symbols + 1) + (0 if as_in_code else 1)
    half = (num_symbols - 1) / 2
    return max(1, round(math.sqrt(half**2 + parameters) - half))


def mean_absolute_deviation(first: Tensor, second: Tensor) -> float:
    """Mean absolute difference of two joint distributions of adjacent symbols."""
    return (first.double() - second.double()).abs().mean().item()


# Fits --------------------------------------------------------------------------------------------


def start_of_hmmlearn(num_states: int, num_symbols: int) -> dict[str, Tensor]:
    """Initial values of hmmlearn 0.2.2: uniform, except rows of B: U(0, 1), normalised."""
    weights = torch.rand(num_states, num_symbols)
    return {
        "initial": torch.full((num_states,), 1 / num_states),
        "transition": torch.full((num_states, num_states), 1 / num_states),
        "emission.probs": weights / weights.sum(-1, keepdim=True),
    }


def densehmm(protocol: str, num_states: int, size: int, dim: int, **options: Any) -> DenseHMM:
    """A DenseHMM for maximum likelihood; the paper's initial values are N(0, 1)."""
    scale = 1.0 if protocol == CODE else None
    return DenseHMM(num_states, size, dim, scale=scale, flat=True, **options)


def fit_standard(
    protocol: str, iterations: int, data: Sequences, num_states: int, size: int
) -> Any:
    """A standard HMM by EM."""
    module = TabularHMM(num_states, categorical(size))
    if protocol == RIGHT:
        return fit_em(module, data, num_iterations=iterations)
    start = start_of_hmmlearn(num_states, size)
    return fit_em(module, data, num_iterations=iterations, tolerance=None, start=start)


def fit_dense(
    protocol: str, iterations: int, data: Sequences, num_states: int, size: int, dim: int
) -> Any:
    """A DenseHMM by EM."""
    module = densehmm(protocol, num_states, size, dim)
    # that of the authors: forty iterations of 25 steps of Adam, whose moments are kept
    adam = partial(torch.optim.Adam, lr=0.01)
    authors = {"tolerance": None, "gradient_step": GradientStep(25, adam, False)}
    options: dict[str, Any] = authors if protocol == CODE else {}
    return fit_em(module, data, **options | {"num_iterations": iterations})


def counted(data: Sequences, size: int) -> torch.Tensor:
    """Joint relative frequencies of neighbouring symbols, ``(V, V)``."""
    return cooccurrence.count_pairs(data, size).dense()


def fit_direct(job: Job, halves: list[Halves], size: int, steps: int) -> list[HMM]:
    """Stationary DenseHMMs fitted to distributions of pairs, all runs as one batch."""
    n, dim = job.num_states, job.dim or 1
    if job.protocol == CODE:
        targets = [
            counted(part.train, size) if part.pair_probs is None else part.pair_probs
            for part in halves
        ]
        values = descend_as_in_code(torch.stack(targets), n, dim, steps)
    else:
        targets = [counted(part.train, size) for part in halves]
        fit = fit_cooccurrence(
            densehmm(job.protocol, n, size, dim),
            torch.stack(targets).unsqueeze(1),  # (R, 1, V, V), one for each restart
            weight=1e6,  # makes Adam's epsilon negligible
            restarts=len(targets),
            num_iterations=steps,
            learning_rate=0.05,
            schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
            tolerance=None,
        )
        values = {
            name.removeprefix("module."): each for name, each in fit.restarts.parameters.items()
        }
    module = densehmm(job.protocol, n, size, dim, stationary=True)
    hmms = []
    for run, part in enumerate(halves):
        of_run = {name: value[run] for name, value in values.items()}
        with torch.no_grad(), poutine.block():
            hmms.append(poutine.condition(module, data=of_run)(part.test.lengths))
    return hmms


def descend_as_in_code(targets: Tensor, num_states: int, dim: int, steps: int) -> dict[str, Tensor]:
    """Embeddings ``(R, ...)`` fitted to ``targets`` ``(R, V, V)`` as the authors' code does.

    It is written out to follow theirs exactly, and for speed.
    """
    sizes = {
        "leave": num_states,
        "enter": num_states,
        "emit": num_states,
        "symbol": targets.size(-1),
    }
    embeddings = torch.randn(len(targets), sum(sizes.values()), dim).requires_grad_()
    optimizer = torch.optim.Adam([embeddings], lr=0.001)
    for _ in range(steps):
        leave, enter, emit, symbol = embeddings.split([*sizes.values()], -2)
        transition = dense.log_rows(dense.exponential, leave, enter)
        probs = dense.log_rows(dense.exponential, emit, symbol).exp()
        stationary = cooccurrence.stationary_detached(transition)
        joint = cooccurrence.joint_probs(stationary, transition)
        optimizer.zero_grad()
        cooccurrence.squared_distance(joint, probs, targets).sum().backward()
        optimizer.step()
    return dict(zip(sizes, embeddings.detach().split([*sizes.values()], -2)))


# Measures ----------------------------------------------------------------------------------------


def pair_distribution(hmm: HMM, data: Sequences) -> Tensor:
    """Joint distribution of adjacent symbols, averaged over the positions of ``data``."""
    marginal, transition = hmm.log_initial.double().exp(), hmm.log_transition.double().exp()
    total = torch.zeros_like(marginal)
    for step in range(1, data.num_steps):
        total += (data.lengths > step).sum() * marginal
        marginal = marginal @ transition
    emission: Any = hmm.emission
    return cooccurrence.predicted(
        total / total.sum(), hmm.log_transition.double(), emission.probs.double()
    )


def measures(hmm: HMM, halves: Halves, size: int) -> dict[str, float]:
    """MAD and NLL of an HMM that was built for the test data."""
    test, true_probs = halves.test, halves.pair_probs
    longest = torch.full((len(test),), test.num_steps)
    sample = Sequences(hmm.with_lengths(longest).sample(), longest)
    evidence = hmm.log_prob(test.values).double().sum().item()
    results = {
        "nll": -evidence / (len(test) * test.num_steps),
        "nll_per_step": -evidence / test.num_observed,
    }
    pair_probs = {
        "mad": pair_distribution(hmm, test),
        "mad_sampled": counted(sample, size),
    }
    counts = counted(test, size)
    for name, probs in pair_probs.items():
        results[name] = mean_absolute_deviation(probs, counts)
        if true_probs is not None:
            results[f"{name}_to_truth"] = mean_absolute_deviation(probs, true_probs)
    return results


# Runs --------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """Ten runs of one model: the unit of work that is stored when the script is interrupted."""

    protocol: str
    model: str  # STANDARD also for the fair one: what differs is the number of states
    num_states: int
    dim: int | None  # of a DenseHMM
    cell: Cell | None  # the cell that its data are sampled for; None if all share them


def job_of(source: Source, size: int, protocol: str, model: str, cell: Cell) -> Job:
    """The job that has the results of a model for n and l."""
    n, dim = cell
    sampled_for = cell if source.anew else None
    if model == FAIR:
        n = fair_num_states(n, size, dim, as_in_code=protocol == CODE)
    if model in (STANDARD, FAIR):
        return Job(protocol, STANDARD, n, None, sampled_for)
    return Job(protocol, model, n, dim, sampled_for)


def data_of(source: Source, job: Job, n: int, run: int) -> Halves:
    """The data of one run: the same for all models and both protocols."""
    seed = zlib.crc32(repr((source.name, job.cell, run)).encode())
    return source.draw(n, torch.Generator().manual_seed(seed))


def do(source: Source, job: Job, n: int, size: int, budget: Budget) -> list[dict[str, float]]:
    """Fit and measure all runs of a job."""
    halves = [data_of(source, job, n, run) for run in range(budget.runs)]
    iterations = budget.iterations[job.protocol]
    results = []
    if job.model == DIRECT:
        pyro.set_rng_seed(zlib.crc32(repr((source.name, job)).encode()))
        start_time = time.process_time()
        hmms = fit_direct(job, halves, size, budget.steps[job.protocol])
        seconds = (time.process_time() - start_time) / budget.runs
        for hmm, part in zip(hmms, halves):
            results.append(measures(hmm, part, size) | {"cpu_seconds": seconds})
        return results
    for run, part in enumerate(halves):
        pyro.set_rng_seed(zlib.crc32(repr((source.name, job, run)).encode()))
        start_time = time.process_time()
        if job.dim is None:
            fit = fit_standard(job.protocol, iterations, part.train, job.num_states, size)
        else:
            fit = fit_dense(job.protocol, iterations, part.train, job.num_states, size, job.dim)
        seconds = time.process_time() - start_time
        cost = {"cpu_seconds": seconds, "iterations": len(fit.losses) - 1}
        results.append(measures(fit.hmm(part.test), part, size) | cost)
    return results


class Store:
    """Results of jobs, one line of a file each, so that an interrupted script can be resumed.

    Args:
        path: None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.results = {key: runs for key, runs in map(json.loads, lines)}
        if self.results:
            print(f"{len(self.results)} jobs are in {path}; delete it to start again")

    def get(self, key: str, make: Callable[[], list[dict[str, float]]]) -> list[dict[str, float]]:
        """The results under ``key``; computed if they are missing."""
        if key not in self.results:
            start_time = time.perf_counter()
            self.results[key] = make()
            print(f"{time.perf_counter() - start_time:7.1f} s  {key}", flush=True)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([key, self.results[key]]) + "\n")
        return self.results[key]


def rows_of(source: Source, budget: Budget, store: Store) -> list[dict[str, Any]]:
    """Median and quartiles over runs, for every protocol, cell and model."""
    rows = []
    for protocol, cell, model in itertools.product(PROTOCOLS, budget.cells, MODELS):
        size = source.num_symbols(cell[0])
        job = job_of(source, size, protocol, model, cell)
        runs = store.get(repr((source.name, *job)), partial(do, source, job, cell[0], size, budget))
        row: dict[str, Any] = {
            "data": source.name,
            "protocol": protocol,
            "model": model,
            "n": cell[0],
            "l": cell[1],
            "num_symbols": size,
            "num_states": job.num_states,
            "runs": len(runs),
            "impossible": sum(math.isinf(run["nll"]) for run in runs),  # left out of quartiles
        }
        for name in runs[0]:
            values = [run[name] for run in runs if math.isfinite(run[name])]
            low, middle, high = np.percentile(values, [25, 50, 75]).tolist()
            row[name] = {"ours": middle, "low": low, "high": high}
        rows.append(row)
    return rows


def shown(row: dict[str, Any], synthetic: bool) -> dict[str, dict[str, float]]:
    """The MAD and the NLL of a row, as its protocol defines them."""
    code = row["protocol"] == CODE
    mad = "mad_sampled" if code and row["model"] != DIRECT else "mad"
    values = {"MAD": row[mad], "NLL": row["nll" if code else "nll_per_step"]}
    if synthetic:  # the code measures from the test counts, the paper says from the truth
        values["MAD from the true distribution"] = row[f"{mad}_to_truth"]
        if not code:
            values["MAD"] = values["MAD from the true distribution"]
    return values


# Claims ------------------------------------------------------------------------------------------


class Medians:
    """Medians over runs in one protocol, against which claims are checked.

    Args:
        rows: Of one kind of data and one protocol.
        synthetic: Whether the true distribution is known.
    """

    def __init__(self, rows: list[dict[str, Any]], synthetic: bool) -> None:
        self.cells: list[Cell] = list(dict.fromkeys((row["n"], row["l"]) for row in rows))
        self.sizes = sorted({n for n, _ in self.cells})
        self._medians = {
            (measure, row["model"], row["n"], row["l"]): value["ours"]
            for row in rows
            for measure, value in shown(row, synthetic).items()
        }
        self._states = {(row["n"], row["l"]): row["num_states"] for row in rows
                        if row["model"] == FAIR}  # fmt: skip

    def of(self, measure: str, model: str, cell: Cell) -> float:
        """The median of a measure."""
        return self._medians[measure, model, *cell]

    def others(self, measure: str, model: str, cell: Cell) -> list[float]:
        """The medians of the three other models."""
        return [self.of(measure, other, cell) for other in MODELS if other != model]

    def by_size(self, measure: str, model: str) -> list[float]:
        """For each n, the median over l."""
        return [
            median(self.of(measure, model, cell) for cell in self.cells if cell[0] == n)
            for n in self.sizes
        ]

    def wide(self) -> list[Cell]:
        """Cells where the fair standard HMM has more states than the DenseHMM."""
        return [cell for cell in self.cells if self._states[cell] > cell[0]]

    def narrow(self) -> list[Cell]:
        """Cells where embeddings have fewer dimensions than there are states."""
        return [cell for cell in self.cells if cell[1] < cell[0]]


class Claim(NamedTuple):
    """What the paper says of a figure, and how it is checked.

    Attributes:
        text: The claim, and in brackets our reading where the paper is vague.
        check: Maps medians to a number and to whether the claim holds.
    """

    text: str
    check: Callable[[Medians], tuple[float, bool]]


MOST = 0.75  # of the cells, for a claim about all of them


def mostly(holds: Callable[[Medians, Cell], bool], cells: Callable[[Medians], list[Cell]]) -> Any:
    """Check that something holds in at least three of four cells; the number is their share."""

    def check(medians: Medians) -> tuple[float, bool]:
        chosen = cells(medians)
        share = sum(holds(medians, cell) for cell in chosen) / max(len(chosen), 1)
        return share, share >= MOST

    return check


def everywhere(medians: Medians) -> list[Cell]:
    """All cells."""
    return medians.cells


def spread(values: Iterable[float]) -> float:
    """Relative excess of the largest value over the smallest."""
    values = list(values)
    return max(values) / min(values) - 1


def least(measure: str, model: str) -> Any:
    """Whether a model has the least median."""
    return lambda m, cell: m.of(measure, model, cell) < min(m.others(measure, model, cell))


def greatest(measure: str, model: str) -> Any:
    """Whether a model has the largest median."""
    return lambda m, cell: m.of(measure, model, cell) > max(m.others(measure, model, cell))


def within(measure: str, models: Iterable[str], share: float) -> Any:
    """Whether the medians of some models are that close to each other."""
    return lambda m, cell: spread(m.of(measure, model, cell) for model in models) <= share


def standard_leads(medians: Medians, cell: Cell) -> bool:
    """Whether the standard HMM is likelier than both DenseHMMs of as many states."""
    rest = [medians.of("NLL", model, cell) for model in (DENSE_EM, DIRECT)]
    return medians.of("NLL", STANDARD, cell) < min(rest)


def falls(measure: str, models: Iterable[str]) -> Any:
    """Check that the medians fall with n; the number is the last one's share of the first's."""

    def check(medians: Medians) -> tuple[float, bool]:
        rows = [medians.by_size(measure, model) for model in models]
        holds = all(a > b for row in rows for a, b in itertools.pairwise(row))
        return max(row[-1] / row[0] for row in rows), holds

    return check


def flat(measure: str, models: Iterable[str], share: float) -> Any:
    """Check that no median over l varies with n by more than that share; the number is the most."""

    def check(medians: Medians) -> tuple[float, bool]:
        most = max(spread(medians.by_size(measure, model)) for model in models)
        return most, most <= share

    return check


def verdict(code: bool, right: bool) -> str:
    """The verdict of the two protocols together."""
    if code:
        return "holds" if right else "holds only as in the code"
    return "holds only done right" if right else "fails"


def judge(source: Source, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check the claims of the paper against the results."""
    medians = [
        Medians(
            [row for row in rows if row["data"] == source.name and row["protocol"] == protocol],
            source.anew,
        )
        for protocol in PROTOCOLS
    ]
    verdicts = []
    for text, check in source.claims:
        (code, in_code), (right, in_right) = map(check, medians)
        verdicts.append(
            {
                "data": source.name,
                "claim": text,
                CODE: {"number": code, "holds": in_code},
                RIGHT: {"number": right, "holds": in_right},
                "verdict": verdict(in_code, in_right),
            }
        )
    return verdicts


# Picture -----------------------------------------------------------------------------------------


def draw(name: str, sources: list[Source], rows: list[dict[str, Any]]) -> None:
    """MAD above NLL for each kind of data, a column for each protocol: medians and quartiles."""
    plt = pyplot()
    figure, axes = plt.subplots(
        2 * len(sources), len(PROTOCOLS), figsize=(10, 6.6 * len(sources)), layout="constrained",
        squeeze=False,
    )  # fmt: skip
    columns = itertools.product(enumerate(sources), enumerate(PROTOCOLS))
    for (place, source), (column, protocol) in columns:
        shown_rows = [
            row for row in rows if (row["data"], row["protocol"]) == (source.name, protocol)
        ]
        upper, lower = axes[2 * place : 2 * place + 2, column]
        for panel, (measure, unit) in ((upper, ("MAD", 1000)), (lower, ("NLL", 1))):
            _points(panel, shown_rows, source, measure, unit)
        upper.set_title(f"{source.title}: {TITLES[protocol]}")
        upper.set_ylabel("MAD × 1000")
        upper.set_ylim(bottom=0)
        lower.set_ylabel("NLL, normalised" if protocol == CODE else "NLL per step, nats")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside upper center", ncols=len(MODELS), frameon=False,
        title="medians and quartiles",
    )  # fmt: skip
    save(figure, name)


def _points(
    panel: Any, rows: list[dict[str, Any]], source: Source, measure: str, unit: float
) -> None:
    """Medians and quartiles of all models at each n and l."""
    cells = list(dict.fromkeys((row["n"], row["l"]) for row in rows))
    for place, model in enumerate(MODELS):
        values = [shown(row, source.anew)[measure] for row in rows if row["model"] == model]
        low, middle, high = (
            unit * np.array([value[key] for value in values]) for key in ("low", "ours", "high")
        )
        panel.errorbar(
            np.arange(len(cells)) + 0.17 * (place - 1.5), middle, [middle - low, high - middle],
            fmt="os^D"[place], markersize=4.5, color=f"C{place}", label=model, linewidth=1.2,
        )  # fmt: skip
    panel.set_xticks(range(len(cells)), [f"{dim}" for _, dim in cells])
    for n in dict.fromkeys(n for n, _ in cells):
        places = [place for place, cell in enumerate(cells) if cell[0] == n]
        panel.text(
            mean(places), -0.1, f"n = {n}", transform=panel.get_xaxis_transform(), ha="center",
            va="top",
        )  # fmt: skip
        if places[0] > 0:
            panel.axvline(places[0] - 0.5, color="0.7", linewidth=0.8)
    panel.set_xlabel("length l of embeddings", labelpad=16)
    panel.grid(visible=False, axis="x")


def reproduce(name: str, sources: list[Source], options: argparse.Namespace) -> None:
    """Fit, measure, judge and draw; results of single jobs are stored until all are done."""
    if options.draw:
        draw(name, sources, earlier(name))
        return
    pyro.enable_validation(False)
    torch.set_default_dtype(torch.float64)
    path = None if options.quick else FOLDER / f"{name}.cells.jsonl"
    store, budget = Store(path), QUICK if options.quick else FULL
    rows = [row for source in sources for row in rows_of(source, budget, store)]
    claims = [claim for source in sources for claim in judge(source, rows)]
    for claim in claims:
        numbers = ", ".join(f"{claim[protocol]['number']:.3f}" for protocol in PROTOCOLS)
        print(f"{claim['data']}: {claim['claim']}: {claim['verdict']} ({numbers})")
    if path is not None:
        write(name, rows, claims=claims)
        draw(name, sources, rows)
        path.unlink()
