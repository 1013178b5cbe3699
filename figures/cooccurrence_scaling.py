"""What a fit to co-occurrences costs for any vocabulary, and what it reaches beside EM and MAP.

Times are those of the processor, on one thread. The first parts time loss and gradient of one step,
in float32, against the dense formula, which writes down the law of all V x V pairs. Pairs are drawn
at random, symbols as often as words are (Zipf). The last part fits words, to the same data and with
the same priors by each method, and reports nats per held-out word against seconds. (Squared
distance to a DenseHMM stays at log V, out of the picture: at probabilities of 1 / V it has next to
no slope, and the priors pull all embeddings to zero.) Words are those of the Penn Treebank if
``PYROHMM_DATA`` has it, else those of ``datasets.english_words``. Writes
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
from common import FOLDER, arguments, earlier, ratio, side_by_side, write

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
from pyrohmm.ops import pair_losses
from pyrohmm.ops.pairs import Pairs

# number of symbols V, and of distinct pairs M
SIZES = [(100, 5_000), (1_000, 50_000), (10_000, 400_000)]
LARGE = [(30_000, 2_000_000), (100_000, 2_000_000), (100_000, 10_000_000)]
TARGET = 50.0  # times faster than the dense formula at V = 10,000
LOSSES = {
    "squared distance": cooccurrence.squared_distance,
    "cross-entropy": cooccurrence.cross_entropy,
}


def zipf(num_symbols: int, num_pairs: int) -> Pairs:
    """Distinct pairs of symbols that are drawn in proportion to one over their rank."""
    rng = np.random.default_rng(0)
    shares = np.cumsum(1 / np.arange(1, num_symbols + 1))
    keys = np.zeros(0, np.int64)
    while len(keys) < num_pairs:
        draws = np.searchsorted(shares, shares[-1] * rng.random((2, num_pairs)))
        keys = np.unique(np.concatenate([keys, draws[0] * num_symbols + draws[1]]))
    keys = np.sort(rng.choice(keys, num_pairs, replace=False))
    counts = rng.integers(1, 5, num_pairs)
    first, second, counts = (torch.from_numpy(x) for x in (*np.divmod(keys, num_symbols), counts))
    return Pairs(first, second, counts, num_symbols)


def parameters(num_states: int, num_symbols: int) -> list[torch.Tensor]:
    """A joint law of two states, and probabilities of symbols."""
    generator = torch.Generator().manual_seed(0)
    joint = torch.rand(num_states, num_states, generator=generator)
    probs = torch.rand(num_states, num_symbols, generator=generator)
    parts = [joint / joint.sum(), probs / probs.sum(-1, keepdim=True)]
    return [part.requires_grad_() for part in parts]


def by_dense_formula(name: str, joint: torch.Tensor, probs: torch.Tensor, shares: torch.Tensor):
    """The losses with all V x V pairs written down, in as few passes over them as torch can."""
    left = probs.mT @ joint
    if name == "squared distance":
        return torch.addmm(shares, left, probs, beta=-1).square().sum()
    return -(shares * (left @ probs).log()).sum()


def step(loss: Callable[..., torch.Tensor], parts: list[torch.Tensor], target: Any) -> Any:
    """Loss and gradient."""
    value = loss(*parts, target)
    return value, torch.autograd.grad(value, parts)


def steps(quick: bool) -> list[dict[str, Any]]:
    """Loss and gradient, ours and by the dense formula."""
    rows = []
    for num_symbols, num_pairs in [(50, 300)] if quick else SIZES + LARGE:
        target, parts = zipf(num_symbols, num_pairs), parameters(32, num_symbols)
        fits = num_symbols <= 10_000
        shares = target.dense() if fits else None
        for name, loss in LOSSES.items():
            methods: dict[str, Any] = {"ours": lambda f=loss, p=parts, t=target: step(f, p, t)}
            if fits:
                methods["dense formula"] = lambda n=name, p=parts, t=shares: step(
                    lambda *given: by_dense_formula(n, *given), p, t
                )
                (value, slopes), (dense, others) = (each() for each in methods.values())
                assert abs(value / dense - 1) < 1e-4, "the two disagree"
                for one, other in zip(slopes, others):
                    assert (one - other).norm() < 1e-3 * other.norm(), "their gradients disagree"
            times = side_by_side(methods, 3 if quick else 9, 15.0, time.process_time)
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
    """Up to which V our own losses had better write down all pairs: see ``pair_losses.SMALL``."""
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

                times = side_by_side(
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
    """A step of a whole fit: priors, softmaxes, loss, gradient, Adam; without what is done once."""
    rows = []
    for num_symbols, num_pairs in [(50, 300)] if quick else SIZES + LARGE[-1:]:
        target = zipf(num_symbols, num_pairs)
        count = 3 if quick else max(4, 200_000 // num_symbols)
        for module in (
            TabularHMM(32, categorical(num_symbols)),
            DenseHMM(32, num_symbols, 32),
        ):

            def fit(num_steps: int, m: HMMModule = module, t: Pairs = target) -> Any:
                return fit_cooccurrence(m, t, num_steps=num_steps, tolerance=None, progress=False)

            methods = {"one": lambda f=fit: f(1), "many": lambda f=fit, c=count: f(c + 1)}
            times = side_by_side(methods, 2 if quick else 3, 60.0, time.process_time)
            each = [(b - a) / count for a, b in zip(times["one"], times["many"])]
            rows.append(
                {
                    "quantity": "a step of fit_cooccurrence, squared distance",
                    "module": type(module).__name__,
                    "V": num_symbols, "pairs": num_pairs, "K": 32,
                    "milliseconds": 1e3 * median(each),
                    "low": 1e3 * min(each),
                    "high": 1e3 * max(each),
                    "runs": len(each),
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
    drawn = zipf(num_symbols, num_pairs)
    parts = parameters(32, num_symbols)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak_so_far()
    if dense:
        shares = torch.zeros(num_symbols, num_symbols)
        shares[drawn.first, drawn.second] = drawn.fractions.float()
        step(lambda *given: by_dense_formula(name, *given), parts, shares)
    else:
        copies = (each.clone() for each in (drawn.first, drawn.second, drawn.counts))
        target = Pairs(*copies, num_symbols)
        for _ in range(2):
            step(loss, parts, target)
    result.put(_peak_so_far() - before)


def memory(quick: bool) -> list[dict[str, Any]]:
    """Peak of a step and its target, each in a process of its own (on Linux, which can tell)."""
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
            given = (name, dense, num_symbols, num_pairs, queue)
            process = context.Process(target=_peak, args=given)
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
        train = readers.read_sentences(datasets.find("ptb-train"))
        held_out = readers.read_sentences(datasets.find("ptb-valid"), train.vocabulary)
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


def timed(fit: Callable[..., Any], *given: Any, **options: Any) -> tuple[Any, float]:
    """A fit, always from the same seed, and the seconds of the processor that it took."""
    pyro.set_rng_seed(0)
    start_time = time.process_time()
    found = fit(*given, tolerance=None, progress=False, **options)
    return found, time.process_time() - start_time


def quality(quick: bool) -> list[dict[str, Any]]:
    """Nats per held-out word against seconds, by each method from the same priors."""
    source, train, held_out, num_symbols = words(quick)
    print(source, train, held_out)
    num_states = 4 if quick else 32
    few = (2, 4) if quick else (25, 50, 100, 200, 400)
    table = TabularHMM(num_states, categorical(num_symbols, 1.1), transition_concentration=1.1)
    modules: dict[str, tuple[HMMModule, float]] = {  # and the learning rate of gradient steps
        "TabularHMM": (table, 0.2),
        "DenseHMM": (DenseHMM(num_states, num_symbols, num_states), 0.05),
    }
    pairs = [cooccurrence.count_pairs(train, num_symbols, lag) for lag in (1, 2)]
    squared, entropy = LOSSES.values()
    targets = {
        "co-occurrence, squared distance": (pairs[:1], squared),
        "co-occurrence, cross-entropy": (pairs[:1], entropy),
        "co-occurrence, cross-entropy of lags 1 and 2": (pairs, entropy),
    }
    rows: list[dict[str, Any]] = []
    for kind, (module, rate) in modules.items():

        def record(method: str, count: int, fit: Any, seconds: float, k: str = kind) -> None:
            rows.append(
                {
                    "quantity": "nats per held-out word",
                    "data": source,
                    "held_out_words": held_out.num_observed,
                    "training_words": train.num_observed,
                    "V": num_symbols, "K": num_states,
                    "module": k,
                    "method": method,
                    "steps": count,
                    "seconds": seconds,
                    "nats_per_word": nats(fit, held_out),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)

        for method, (counts, loss) in targets.items():
            for count in few:  # each from the start, so that a line is one fit, longer and longer
                fit, seconds = timed(
                    fit_cooccurrence, module, counts, loss=loss, num_steps=count, learning_rate=rate
                )
                record(method, count, fit, seconds)
                if count == few[-2]:
                    begin = (fit.values, seconds)  # in the end those of the last method
        for count in few:
            fit, seconds = timed(
                fit_map, MarginalModel(module), train, num_steps=count, learning_rate=rate,
                batch_size=min(256, len(train)),
            )  # fmt: skip
            record("MAP, minibatches of 256 sequences", count, fit, seconds)
        rounds = (2, 4) if quick else (5, 10, 20, 40) if kind == "TabularHMM" else (2, 5, 10, 20)
        starts = {"EM": (None, 0.0), "EM from co-occurrence of lags 1 and 2": begin}
        for method, (values, total) in starts.items():
            done = 0
            for count in rounds:  # EM has no memory but its parameters
                fit, seconds = timed(fit_em, module, train, start=values, num_steps=count - done)
                done, values, total = count, fit.values, total + seconds
                record(method, count, fit, total)
    return rows


# The picture -------------------------------------------------------------------------------------


def draw(rows: list[dict[str, Any]]) -> None:
    """Time and memory against V, and nats against seconds."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 4.3), layout="constrained")
    for n, name in enumerate(LOSSES):
        for method, line in (("ours", "-"), ("dense formula", ":")):
            sizes = SIZES + ([LARGE[-1]] if method == "ours" else [])
            for panel, quantity, unit in (
                (axes[0], f"{name} and gradient", "milliseconds"),
                (axes[1], f"peak memory, {name}", "megabytes"),
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
    axes[0].set_title("loss and gradient, milliseconds", fontsize=10)
    axes[1].set_title("peak memory with the target, MB", fontsize=10)
    for panel in axes[:2]:
        panel.set_xlabel("V, with 5,000, 50,000, 400,000, 10 million pairs")
        panel.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    found = [row for row in rows if row["quantity"] == "nats per held-out word"]
    methods = list(dict.fromkeys(row["method"] for row in found))
    for panel, kind in zip(axes[2:], ("TabularHMM", "DenseHMM")):
        for n, method in enumerate(methods):
            points = [
                (row["seconds"], row["nats_per_word"])
                for row in found
                if row["method"] == method and row["module"] == kind
            ]
            panel.plot(*zip(*points), marker="o", markersize=3, color=f"C{n}", label=method)
        panel.set_xscale("log")
        panel.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
        panel.minorticks_off()
        panel.set_ylim(5.7, 7.4)
        panel.set_xlabel("seconds")
        panel.grid(alpha=0.3)
        if found:
            panel.set_title(f"{kind}, K = {found[0]['K']}: nats per held-out word", fontsize=10)
    if found:
        handles = axes[2].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower right", ncols=3, fontsize=8)
    figure.savefig(FOLDER / "cooccurrence_scaling.png", dpi=150)


def main() -> None:
    """Measure, then write."""
    parts = (steps, crossover, loop, memory, quality)
    options = arguments(__doc__, [part.__name__ for part in parts])
    torch.set_num_threads(1)
    old = earlier("cooccurrence_scaling")
    rows = []
    for part in parts:
        if part.__name__ in options.only:
            rows += [{"part": part.__name__, **row} for row in part(options.quick)]
        else:
            rows += [row for row in old if row["part"] == part.__name__]
        if not options.quick:  # a part may take long
            write("cooccurrence_scaling", rows, threads=1)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
