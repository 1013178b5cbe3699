"""The cost of a co-occurrence fit for large vocabularies, and its quality compared with EM and MAP.

Times are processor times on one thread. The first parts time the loss and gradient of one step, in
float32, against the dense formula, which stores the joint distribution of all V x V pairs. Pairs
are random, with symbol frequencies following Zipf's law. The last part fits words by each method,
with the same data and priors, and reports nats per held-out word against seconds. (The squared
distance of a DenseHMM stays at log V and is not in the picture: at probabilities of 1 / V its
gradient nearly vanishes, and the priors shrink all embeddings to zero.) The part ``relative`` is of
the relative distance, which weighs the squared errors by the frequencies of the symbols: its time
beside the dense formula, and the same fits to words. The words are those of the Penn Treebank if
``PYROHMM_DATA`` has it, else those of ``datasets.english_words``. A row whose ``machine`` differs
from that of the file was measured there. Writes
``cooccurrence_scaling.json`` and ``cooccurrence_scaling.png``.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyro
import torch
from common import (
    arguments,
    earlier,
    interleaved,
    machine,
    public_files,
    pyplot,
    ratio,
    save,
    write,
)

from pyrohmm import (
    DenseHMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    cooccurrence,
    datasets,
    fit_cooccurrence,
    fit_em,
    fit_map,
    readers,
)
from pyrohmm.ops import pairs as pair_losses
from pyrohmm.ops.pairs import Pairs, relative_weights

# number of symbols V, and of distinct pairs M
SIZES = [(100, 5_000), (1_000, 50_000), (10_000, 400_000)]
LARGE = [(30_000, 2_000_000), (100_000, 2_000_000), (100_000, 10_000_000)]
TARGET = 50.0  # times faster than the dense formula at V = 10,000
LOSSES = {
    "squared distance": cooccurrence.squared_distance,
    "cross-entropy": cooccurrence.cross_entropy,
}
RELATIVE = {"relative distance": cooccurrence.relative_distance}


def zipf(num_symbols: int, num_pairs: int) -> Pairs:
    """Distinct pairs of symbols, sampled with probabilities proportional to one over their rank."""
    rng = np.random.default_rng(0)
    shares = np.cumsum(1 / np.arange(1, num_symbols + 1))
    keys = np.zeros(0, np.int64)
    while len(keys) < num_pairs:
        samples = np.searchsorted(shares, shares[-1] * rng.random((2, num_pairs)))
        keys = np.unique(np.concatenate([keys, samples[0] * num_symbols + samples[1]]))
    keys = np.sort(rng.choice(keys, num_pairs, replace=False))
    counts = rng.integers(1, 5, num_pairs)
    first, second, counts = (torch.from_numpy(x) for x in (*np.divmod(keys, num_symbols), counts))
    return Pairs(first, second, counts, num_symbols)


def parameters(num_states: int, num_symbols: int) -> list[torch.Tensor]:
    """A joint distribution of two states, and emission probabilities."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.rand(num_states, num_states, generator=generator)
    probs = torch.rand(num_states, num_symbols, generator=generator)
    parts = [joint / joint.sum(), probs / probs.sum(-1, keepdim=True)]
    return [part.requires_grad_() for part in parts]


def by_dense_formula(name: str, joint: torch.Tensor, probs: torch.Tensor, shares: torch.Tensor):
    """The losses over all V x V pairs, in as few passes as torch allows."""
    left = probs.mT @ joint
    if name == "squared distance":
        return torch.addmm(shares, left, probs, beta=-1).square().sum()
    if name == "relative distance":
        weights = relative_weights((shares.sum(0) + shares.sum(1)) / 2).to(probs.dtype)
        squares = torch.addmm(shares, left, probs, beta=-1).square()
        return weights @ squares @ weights / 2
    return -(shares * (left @ probs).log()).sum()


def step(loss: Callable[..., torch.Tensor], parts: list[torch.Tensor], target: Any) -> Any:
    """Loss and gradient."""
    value = loss(*parts, target)
    return value, torch.autograd.grad(value, parts)


def steps(quick: bool) -> list[dict[str, Any]]:
    """Loss and gradient, ours and by the dense formula."""
    return times_of(LOSSES, [(50, 300)] if quick else SIZES + LARGE, 3 if quick else 9)


def times_of(
    losses: dict[str, Any], sizes: list[tuple[int, int]], rounds: int
) -> list[dict[str, Any]]:
    """Times of some losses and their gradients, for so many symbols and distinct pairs."""
    rows = []
    for num_symbols, num_pairs in sizes:
        target, parts = zipf(num_symbols, num_pairs), parameters(32, num_symbols)
        fits = num_symbols <= 10_000
        shares = target.dense() if fits else None
        for name, loss in losses.items():
            methods: dict[str, Any] = {"ours": lambda f=loss, p=parts, t=target: step(f, p, t)}
            if fits:
                methods["dense formula"] = lambda n=name, p=parts, t=shares: step(
                    lambda *inputs: by_dense_formula(n, *inputs), p, t
                )
                (value, slopes), (dense, others) = (method() for method in methods.values())
                assert abs(value / dense - 1) < 1e-4, "the two disagree"
                for one, other in zip(slopes, others):
                    assert (one - other).norm() < 1e-3 * other.norm(), "their gradients disagree"
            times = interleaved(methods, rounds, 15.0, time.process_time)
            for method, seconds in times.items():
                row = {
                    "quantity": f"{name} and gradient",
                    "V": num_symbols, "pairs": num_pairs, "K": 32,
                    "method": method,
                    "milliseconds": 1e3 * median(seconds),
                    "low": 1e3 * min(seconds),
                    "high": 1e3 * max(seconds),
                    "runs": len(seconds),
                }  # fmt: skip
                if method != "ours":
                    row["times_slower_than_ours"] = ratio(times, method, "ours")
                    row["target"] = TARGET if num_symbols == 10_000 else None
                rows.append(row)
                print(row)
    return rows


def crossover(quick: bool) -> list[dict[str, Any]]:
    """The largest V for which storing all pairs is faster: see ``pair_losses.SMALL``."""
    rows = []
    small = pair_losses.SMALL
    for num_states in (8, 32):
        for num_symbols in (32, 64) if quick else (64, 128, 192, 256, 384, 512, 768, 1024):
            target = zipf(num_symbols, min(num_symbols**2 // 4, 50 * num_symbols))
            parts = parameters(num_states, num_symbols)
            for name, loss in LOSSES.items():

                def with_limit(limit: int, f=loss, p=parts, t=target) -> Any:
                    pair_losses.SMALL = limit
                    return step(f, p, t)

                times = interleaved(
                    {"all": lambda w=with_limit: w(1 << 20), "those that occur":
                     lambda w=with_limit: w(0)}, 3 if quick else 101, 2.0, time.process_time,
                )  # fmt: skip
                rows.append(
                    {
                        "quantity": f"{name} and gradient, all pairs or those that occur",
                        "V": num_symbols, "pairs": len(target), "K": num_states,
                        "milliseconds_all": 1e3 * median(times["all"]),
                        "milliseconds_those_that_occur": 1e3 * median(times["those that occur"]),
                        "times_slower_if_all": ratio(times, "all", "those that occur"),
                    }
                )  # fmt: skip
                print(rows[-1])
    pair_losses.SMALL = small
    return rows


def loop(quick: bool) -> list[dict[str, Any]]:
    """A step of a whole fit: priors, softmaxes, loss, gradient, Adam; one-off costs excluded."""
    rows = []
    for num_symbols, num_pairs in [(50, 300)] if quick else SIZES + LARGE[-1:]:
        target = zipf(num_symbols, num_pairs)
        count = 3 if quick else max(4, 200_000 // num_symbols)
        for module in (
            TabularHMM(32, categorical(num_symbols)),
            DenseHMM(32, num_symbols, 32),
        ):

            def fit(num_steps: int, m: HMMModule = module, t: Pairs = target) -> Any:
                return fit_cooccurrence(
                    m, t, num_iterations=num_steps, tolerance=None, progress=False
                )

            methods = {"one": lambda f=fit: f(1), "many": lambda f=fit, c=count: f(c + 1)}
            times = interleaved(methods, 2 if quick else 3, 60.0, time.process_time)
            per_step = [(b - a) / count for a, b in zip(times["one"], times["many"])]
            rows.append(
                {
                    "quantity": "a step of fit_cooccurrence, squared distance",
                    "module": type(module).__name__,
                    "V": num_symbols, "pairs": num_pairs, "K": 32,
                    "milliseconds": 1e3 * median(per_step),
                    "low": 1e3 * min(per_step),
                    "high": 1e3 * max(per_step),
                    "runs": len(per_step),
                }
            )  # fmt: skip
            print(rows[-1])
    return rows


def _peak_so_far() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _peak(name: str, dense: bool, num_symbols: int, num_pairs: int, result: Any) -> None:
    """Peak memory of a target and one step above what the process held before, in bytes."""
    torch.set_num_threads(1)
    loss = LOSSES[name]
    step(loss, parameters(32, 300), zipf(300, 1000))
    pairs = zipf(num_symbols, num_pairs)
    parts = parameters(32, num_symbols)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak_so_far()
    if dense:
        shares = torch.zeros(num_symbols, num_symbols)
        shares[pairs.first, pairs.second] = pairs.fractions.float()
        step(lambda *inputs: by_dense_formula(name, *inputs), parts, shares)
    else:
        copies = (tensor.clone() for tensor in (pairs.first, pairs.second, pairs.counts))
        target = Pairs(*copies, num_symbols)
        for _ in range(2):
            step(loss, parts, target)
    result.put(_peak_so_far() - before)


def memory(quick: bool) -> list[dict[str, Any]]:
    """Peak memory of a step and its target, each in a separate process (Linux only)."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    context = multiprocessing.get_context("spawn")
    ours = SIZES + LARGE + [(10_000, 1_000_000), (100_000, 1_000_000), (100_000, 5_000_000)]
    grid = [(False, *size) for size in ours] + [(True, *size) for size in SIZES]
    if quick:
        grid = [(False, 400, 5_000), (True, 400, 5_000)]
    rows = []
    for name in list(LOSSES)[: 1 if quick else None]:
        for dense, num_symbols, num_pairs in grid:
            queue = context.Queue()
            inputs = (name, dense, num_symbols, num_pairs, queue)
            process = context.Process(target=_peak, args=inputs)
            process.start()
            peak = queue.get()
            process.join()
            rows.append(
                {
                    "quantity": f"peak memory, {name}",
                    "V": num_symbols, "pairs": num_pairs, "K": 32,
                    "method": "dense formula" if dense else "ours",
                    "megabytes": peak / 1e6,
                    "bytes_per_pair_and_V_K": peak / (num_pairs + 32 * num_symbols),
                }
            )  # fmt: skip
            print(rows[-1])
    return rows


# Quality against speed ---------------------------------------------------------------------------


def words(quick: bool) -> tuple[str, Sequences, Sequences, int]:
    """Name, training and held-out words as running text, and the size of the vocabulary."""
    try:
        train = readers.read_sentences(public_files.find("ptb-train"))
        held_out = readers.read_sentences(public_files.find("ptb-valid"), train.vocabulary)
        name, parts = "Penn Treebank, words", (train.data, held_out.data)
    except (FileNotFoundError, ImportError, OSError):
        train = datasets.english_words()
        name, parts = "datasets.english_words", train.data.split(0.9)
    if quick:
        parts = (parts[0][:200], parts[1][:50])
    texts = [part.values[part.observed] for part in parts]  # sentences in order, each with its end
    running = [Sequences.from_list(text.split(250)) for text in texts]
    return name, *running, len(train.vocabulary)


def nats(fit: Any, data: Sequences) -> float:
    """Minus the mean log-probability of a held-out word."""
    with torch.no_grad():
        return -(fit.hmm(data).log_prob(data.values).double().sum() / data.num_observed).item()


def timed(fit: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, float]:
    """A fit, always with the same seed, and its processor seconds."""
    pyro.set_rng_seed(0)
    start_time = time.process_time()
    result = fit(*inputs, tolerance=None, progress=False, **options)
    return result, time.process_time() - start_time


class Words:
    """Words of a text, the models to fit to them, and the results so far.

    Args:
        quick: Whether to take few words and few states.
    """

    def __init__(self, quick: bool) -> None:
        self.source, self.train, self.held_out, self.num_symbols = words(quick)
        print(self.source, self.train, self.held_out)
        self.num_states = size = 4 if quick else 32
        self.step_counts = (2, 4) if quick else (25, 50, 100, 200, 400)
        table = TabularHMM(
            size, categorical(self.num_symbols, 1.1), transition_concentration=1.1
        )  # fmt: skip
        self.modules: dict[str, tuple[HMMModule, float]] = {  # and the rate of gradient steps
            "TabularHMM": (table, 0.2),
            "DenseHMM": (DenseHMM(size, self.num_symbols, size), 0.05),
        }
        self.rows: list[dict[str, Any]] = []

    def record(self, kind: str, method: str, count: int, fit: Any, seconds: float) -> None:
        """Evaluate a fit on held-out words."""
        self.rows.append(
            {
                "quantity": "nats per held-out word",
                "data": self.source,
                "held_out_words": self.held_out.num_observed,
                "training_words": self.train.num_observed,
                "V": self.num_symbols, "K": self.num_states,
                "module": kind,
                "method": method,
                "steps": count,
                "seconds": seconds,
                "nats_per_word": nats(fit, self.held_out),
            }
        )  # fmt: skip
        print(self.rows[-1], flush=True)

    def fit_pairs(self, kind: str, method: str, pairs: list[Pairs], loss: Any) -> Any:
        """Fits of increasing length, each from the start; the last but one is returned."""
        module, rate = self.modules[kind]
        for count in self.step_counts:
            fit, seconds = timed(
                fit_cooccurrence, module, pairs, loss=loss, num_iterations=count, learning_rate=rate
            )
            self.record(kind, method, count, fit, seconds)
            if count == self.step_counts[-2]:
                found = fit.parameters, seconds
        return found

    def pairs(self, lag: int) -> Pairs:
        """Counts of pairs of words."""
        return cooccurrence.count_pairs(self.train, self.num_symbols, lag)


def quality(quick: bool) -> list[dict[str, Any]]:
    """Nats per held-out word against seconds, by each method from the same priors."""
    text = Words(quick)
    pairs = [text.pairs(lag) for lag in (1, 2)]
    squared, entropy = LOSSES.values()
    targets = {
        "co-occurrence, squared distance": (pairs[:1], squared),
        "co-occurrence, cross-entropy": (pairs[:1], entropy),
        "co-occurrence, cross-entropy of lags 1 and 2": (pairs, entropy),
    }
    for kind, (module, rate) in text.modules.items():
        for method, (counts, loss) in targets.items():
            warm_start = text.fit_pairs(kind, method, counts, loss)  # finally of the last method
        for count in text.step_counts:
            fit, seconds = timed(
                fit_map, MarginalModel(module), text.train, num_iterations=count,
                learning_rate=rate,
                batch_size=min(256, len(text.train)),
            )  # fmt: skip
            text.record(kind, "MAP, minibatches of 256 sequences", count, fit, seconds)
        rounds = (2, 4) if quick else (5, 10, 20, 40) if kind == "TabularHMM" else (2, 5, 10, 20)
        starts = {"EM": (None, 0.0), "EM from co-occurrence of lags 1 and 2": warm_start}
        for method, (values, total) in starts.items():
            done = 0
            for count in rounds:  # EM continues from its parameters
                fit, seconds = timed(
                    fit_em, module, text.train, start=values, num_iterations=count - done
                )
                done, values, total = count, fit.parameters, total + seconds
                text.record(kind, method, count, fit, total)
    return text.rows


def relative(quick: bool) -> list[dict[str, Any]]:
    """The relative distance: time of a step, and nats per held-out word against seconds."""
    rows = times_of(RELATIVE, [(50, 300)] if quick else SIZES, 3)
    text = Words(quick)
    for kind in text.modules:
        for name, loss in RELATIVE.items():
            text.fit_pairs(kind, f"co-occurrence, {name}", [text.pairs(1)], loss)
    return rows + text.rows


# The picture -------------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]]) -> None:
    """Time and memory against V, and nats against seconds."""
    plt = pyplot()
    figure, ((times, peaks), bottom) = plt.subplots(2, 2, figsize=(10, 8.5), layout="constrained")
    for n, name in enumerate(LOSSES):
        for method, line in (("ours", "-"), ("dense formula", ":")):
            sizes = SIZES + ([LARGE[-1]] if method == "ours" else [])
            for panel, quantity, unit in (
                (times, f"{name} and gradient", "milliseconds"),
                (peaks, f"peak memory, {name}", "megabytes"),
            ):
                points = [
                    (row["V"], row[unit])
                    for row in rows
                    if row["quantity"] == quantity
                    and row["method"] == method
                    and (row["V"], row["pairs"]) in sizes
                ]
                if points:
                    panel.loglog(
                        *zip(*sorted(points)), line, marker="o", markersize=4, color=f"C{n}",
                        label=f"{name}, {method}",
                    )  # fmt: skip
    times.set(title="loss and gradient, K = 32", ylabel="milliseconds")
    peaks.set(title="peak memory, target included", ylabel="MB")
    numbers = [f"{pairs:,}" for _, pairs in (*SIZES, LARGE[-1])]
    for panel in (times, peaks):
        panel.set_xlabel(f"symbols V\n({', '.join(numbers)} distinct pairs)")
    times.legend(loc="lower right")
    quality_rows = [row for row in rows if row["part"] == "quality"]  # of one machine
    methods = list(dict.fromkeys(row["method"] for row in quality_rows))
    for panel, kind in zip(bottom, ("TabularHMM", "DenseHMM")):
        for n, method in enumerate(methods):
            chosen = [
                row for row in quality_rows if (row["method"], row["module"]) == (method, kind)
            ]
            seconds, longest = [row["seconds"] for row in chosen], chosen[-1]
            if not method.startswith("EM"):  # each fit anew: a step takes as long in all of them
                seconds = [longest["seconds"] * row["steps"] / longest["steps"] for row in chosen]
            nats = [row["nats_per_word"] for row in chosen]
            panel.plot(seconds, nats, marker="o", markersize=4, color=f"C{n}", label=method)
        panel.set_xscale("log")
        panel.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        panel.minorticks_off()
        panel.set_ylim(5.7, 7.4)
        panel.set(xlabel="processor seconds (one seed)", ylabel="nats per held-out word")
        if quality_rows:
            panel.set_title(f"{kind}, K = {quality_rows[0]['K']}")
    if quality_rows:
        handles = bottom[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2)
    save(figure, "cooccurrence_scaling")


def main() -> None:
    """Measure, then write."""
    parts = (steps, crossover, loop, memory, quality, relative)
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier("cooccurrence_scaling"))
        return
    torch.set_num_threads(1)
    old = earlier("cooccurrence_scaling")
    rows = []
    for part in parts:
        if part.__name__ in options.only:
            where = {"part": part.__name__, "machine": machine()}
            rows += [where | row for row in part(options.quick)]
        else:
            rows += [row for row in old if row["part"] == part.__name__]
        if not options.quick:  # a part may take long
            write("cooccurrence_scaling", rows, threads=1)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
