"""Speed on a GPU: evidence with gradient, fits, dense HMMs of tokens, and large neural HMMs.

Every method of a comparison is timed in turn in one run, in float32, until the device has finished;
the profiler counts what a call launches. Parts: ``evidence`` of this package, with and without
Triton, of dynamax if it is installed, of Pyro's ``DiscreteHMM``, and of a loop of logsumexp, as
they are and, where torch can capture them, as a CUDA graph; ``messages``, the recursion and its
gradient alone, given log-likelihoods; ``fits``, an iteration of EM, MAP, SVI and co-occurrences;
``tokens``, tokens a second of dense HMMs of 33,279 tokens, beside PyJuice if it is installed;
``neural``, a step of training of an HMM of thousands of states, with and without dropout.

Each number has its date, card and versions beside it, and stays until its part is measured again on
the same day: the file is a history. A part that fails is written as such, and the others go on.
After seven minutes no more is begun. Without a GPU only ``--quick`` runs, with small sizes on the
CPU: it shows that the script works, and nothing of a GPU. Writes ``gpu_throughput.json`` and
``gpu_throughput.png``.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # jax would take all the memory

import pyro
import torch
from common import PUBLISHED, arguments, earlier, interleaved, launches, pyplot, save, write
from common.problems import Problem as Peer
from common.problems import jax
from pyro.distributions import Categorical, DiscreteHMM, Normal
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    MarginalModel,
    NeuralHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_svi,
)
from pyrohmm.ops import backends, recursions

try:
    import pyjuice
except ImportError:
    pyjuice = None

NAME = "gpu_throughput"
SYMBOLS = [(256, 100, 16, 64), (64, 200, 128, 1000), (32, 64, 1024, 1000), (1, 10000, 8, 32),
           (8, 64, 16, 16), (1024, 200, 32, 100)]  # fmt: skip
VECTORS = [(64, 200, 32, 40), (256, 100, 16, 2)]  # N, T, K, D
PEERS = ("DiscreteHMM", "log space", "dynamax", "PyJuice")
PARTS = ["evidence", "messages", "fits", "tokens", "neural"]
LIMIT = 420.0  # seconds
Row = dict[str, Any]
Call = Callable[[], Any]


class Problem:
    """Random parameters and observations of one shape on a device."""

    def __init__(self, shape: tuple[int, ...], vectors: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        size, steps, states, width = self.shape = shape
        self.vectors = vectors
        sizes = [(states,), (states, states), (states, width)]
        self.parameters = [torch.randn(*each, device=device).requires_grad_() for each in sizes]
        values = torch.randn(size, steps, width) if vectors else torch.randint(width, (size, steps))
        self.values = values.to(device)
        self.lengths = torch.full((size,), steps)

    def emission(self) -> Any:
        """Batched over the states."""
        last = self.parameters[2]
        if self.vectors:
            return Normal(last, 1.0, validate_args=False).to_event(1)
        return Categorical(logits=last, validate_args=False)

    def ours(self) -> None:
        """The evidence of this package, and its gradient."""
        initial, transition, _ = self.parameters
        hmm = HMM(
            initial.log_softmax(-1), transition.log_softmax(-1), self.emission(), self.lengths,
            validate_args=False,
        )  # fmt: skip
        torch.autograd.grad(hmm.log_prob(self.values).sum(), self.parameters)

    def messages(self) -> Call:
        """The recursion and its gradient, given log-likelihoods."""
        with torch.no_grad():
            seen = self.emission().log_prob(self.values.unsqueeze(2))
            logs = [part.log_softmax(-1) for part in self.parameters[:2]]
        leaves = [part.requires_grad_() for part in (logs[0], logs[1].unsqueeze(0), seen)]

        def run() -> None:
            torch.autograd.grad(recursions.log_evidence(*leaves, self.lengths).sum(), leaves)

        return run

    def log_space(self) -> None:
        """A loop of logsumexp with torch's autograd."""
        initial, transition, _ = self.parameters
        initial, transition = initial.log_softmax(-1), transition.log_softmax(-1)
        seen = self.emission().log_prob(self.values.unsqueeze(2))
        alpha = initial + seen[:, 0]
        for t in range(1, self.shape[1]):
            alpha = (alpha.unsqueeze(-1) + transition).logsumexp(-2) + seen[:, t]
        torch.autograd.grad(alpha.logsumexp(-1).sum(), self.parameters)

    def discrete_hmm(self) -> None:
        """Pyro's distribution (with a transition before the first emission: the same work)."""
        initial, transition, _ = self.parameters
        hmm = DiscreteHMM(
            initial, transition, self.emission(), duration=self.shape[1], validate_args=False
        )
        torch.autograd.grad(hmm.log_prob(self.values).sum(), self.parameters)


def finished(method: Call, device: torch.device) -> Call:
    """``method`` until the device has done all of it."""

    def run() -> None:
        method()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def as_graph(method: Call) -> Call:
    """``method`` captured as a CUDA graph, which must not wait for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            method()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method()
    return graph.replay


def by_torch(method: Call) -> Call:
    """``method`` by operations of torch alone."""

    def run() -> None:
        with backends.use(backends.TORCH):
            method()

    return run


@contextmanager
def matmuls(precision: str) -> Iterator[None]:
    """Products of float32 in torch's ``precision``: "highest" is IEEE, "high" is tf32."""
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def timed(plans: dict[str, Callable[[], Call]], device: torch.device, quick: bool) -> list[Row]:
    """Rows of methods that are made by ``plans``; one that cannot be made or run says why."""
    ready: dict[str, Call] = {}
    rows: list[Row] = []
    for name, plan in plans.items():
        try:
            run = finished(plan(), device)
            run()
        except Exception as error:  # out of memory, not to be captured, or of another package
            rows.append({"method": name, "skipped": str(error).split("\n")[0][:200]})
        else:
            ready[name] = run
    for name, times in interleaved(ready, 1 if quick else 9, seconds=2.0).items():
        found = {"seconds": median(times), "lowest": min(times), "highest": max(times)}
        counted = {} if name.startswith(PEERS) else launches(ready[name])
        rows.append({"method": name, **found, **counted})
    return rows


def evidence(shape: tuple[int, ...], vectors: bool, device: Any, quick: bool) -> list[Row]:
    """Seconds of evidence and gradient, by method."""
    problem, here = Problem(shape, vectors, device), Problem(shape, vectors, torch.device("cpu"))
    plans: dict[str, Callable[[], Call]] = {"pyrohmm": lambda: problem.ours}
    plans |= {"DiscreteHMM": lambda: problem.discrete_hmm, "log space": lambda: problem.log_space}
    if device.type == "cuda":
        plans["pyrohmm, no Triton"] = lambda: by_torch(problem.ours)
        plans |= {f"{n}, CUDA graph": lambda p=p: as_graph(p()) for n, p in plans.items()}
        plans[f"pyrohmm, CPU, {torch.get_num_threads()} threads"] = lambda: here.ours
    if jax is not None and not vectors:
        plans[f"dynamax, {jax.default_backend()}"] = lambda: Peer(*shape).dynamax()
    kind = {"emission": "normal" if vectors else "categorical", "shape": list(shape)}
    return [kind | row for row in timed(plans, device, quick)]


def messages(shape: tuple[int, ...], device: Any, quick: bool) -> list[Row]:
    """Seconds of the recursion and its gradient."""
    rows = timed({"pyrohmm": Problem(shape, False, device).messages}, device, quick)
    return [{"shape": list(shape)} | row for row in rows]


def iteration(fit: Callable[..., Any], device: torch.device, few: int, more: int) -> Row:
    """Seconds and launches of a further iteration of a fit, start and end left out."""
    options: Any = {"tolerance": None, "progress": False}
    short, long = (
        finished(partial(fit, num_iterations=n, **options), device) for n in (few, few + more)
    )
    times = interleaved({"short": short, "long": long}, 3, seconds=5.0)
    counted = [launches(run) for run in (short, long)]
    each = [(b - a) / more for a, b in zip(times["short"], times["long"])]
    found = {"seconds": median(each), "lowest": min(each), "highest": max(each)}
    return found | {name: (counted[1][name] - counted[0][name]) / more for name in counted[0]}


def fit_step(name: str, width: int, device: torch.device, quick: bool) -> list[Row]:
    """Seconds of a further iteration of a fit of ``width`` symbols."""
    size, steps, states = (4, 10, 4) if quick else (256, 100, 16)
    torch.manual_seed(0)
    values, lengths = torch.randint(width, (size, steps)), torch.full((size,), steps)
    module = TabularHMM(states, categorical(width)).to(device)
    model, data = MarginalModel(module), Sequences(values, lengths).to(device)
    ways: dict[str, Callable[..., Any]] = {
        "EM": partial(fit_em, module, data, restarts=1),
        "MAP": partial(fit_map, model, data),
        "SVI": lambda **options: fit_svi(model, AutoNormal(model), data, **options),
        "co-occurrences": partial(fit_cooccurrence, module, data),
    }
    title = f"{name}, V = {width:,}" if name == "co-occurrences" else name
    row = {"shape": [size, steps, states], "fit": title}
    return [row | iteration(ways[name], device, *((1, 1) if quick else (10, 40)))]


def tokens(num_states: int, device: torch.device, quick: bool) -> list[Row]:
    """Tokens a second of log evidence and gradient, or of PyJuice's flows."""
    size, steps, width = (4, 8, 50) if quick else (512, 32, 33_279)
    problem = Problem((size, steps, num_states, width), False, device)

    def ours(precision: str) -> Call:
        def run() -> None:
            with matmuls(precision):
                problem.ours()

        return run

    def peer() -> Call:
        nodes = pyjuice.structures.HMM(
            seq_length=steps, num_latents=num_states, num_emits=width, homogeneous=True
        )
        circuit = pyjuice.compile(nodes).to(device)
        options = {"flows_memory": 1.0, "allow_modify_flows": False, "propagation_alg": "LL",
                   "logspace_flows": True}  # fmt: skip
        return lambda: (circuit(problem.values), circuit.backward(problem.values, **options))

    plans: dict[str, Callable[[], Call]] = {"float32": lambda: ours("highest")}
    plans["tf32"] = lambda: ours("high")
    if pyjuice is not None and device.type == "cuda":
        plans[f"PyJuice {version('pyjuice')}"] = peer
    rows = timed(plans, device, quick)
    rates = [
        {"tokens_a_second": size * steps / r["seconds"]} if "seconds" in r else {} for r in rows
    ]
    return [{"states": num_states} | row | rate for row, rate in zip(rows, rates)]


def neural(
    num_states: int, dropout: float, precision: str, device: torch.device, quick: bool
) -> list[Row]:
    """Seconds, launches and memory of a step of training on sentences of 22 words."""
    words, parts, size, steps, batch = (
        (50, 4, 8, 10, 40) if quick else (10_000, 128, 2_976, 22, 8_192)
    )
    torch.manual_seed(0)
    clusters = blocks.from_clusters(torch.arange(words) % parts, num_states // parts)
    data = Sequences(torch.randint(words, (size, steps)), torch.full((size,), steps)).to(device)
    module = NeuralHMM(
        num_states, words, 16 if quick else 256, blocks=clusters, two_level=True, dropout=dropout
    ).to(device)
    fit = partial(
        fit_map, MarginalModel(module), data, batch_tokens=batch, learning_rate=1e-3,
        precision=torch.bfloat16 if precision == "bfloat16" else None,
    )  # fmt: skip
    row = {"states": num_states, "dropout": dropout, "method": precision, "tokens": batch}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with matmuls("high" if precision == "tf32" else "highest"):
        row |= iteration(fit, device, *((1, 1) if quick else (4, 12)))
    if device.type == "cuda":
        row["gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9
    return [row]


def jobs(device: torch.device, quick: bool) -> list[tuple[str, Callable[..., list[Row]]]]:
    """What is measured, the most wanted first."""
    symbols, vectors = ([(4, 10, 4, 8)], [(4, 10, 4, 2)]) if quick else (SYMBOLS, VECTORS)
    sizes = [(8, 0.0), (8, 0.5)] if quick else [(4096, 0.0), (32768, 0.0), (32768, 0.5)]
    few, many = ([8], [20, 30]) if quick else ([64], [1000, 10_000])
    todo: list[tuple[str, Callable[..., list[Row]]]] = [
        ("fits", partial(fit_step, name, width))
        for name in ("EM", "MAP", "SVI", "co-occurrences")
        for width in (many if name == "co-occurrences" else few)
    ]
    for precision in ("float32", "tf32", "bfloat16"):
        todo += [("neural", partial(neural, *each, precision)) for each in sizes]
    todo += [("tokens", partial(tokens, each)) for each in ([8] if quick else [512, 2048])]
    todo += [("messages", partial(messages, each)) for each in symbols]
    todo += [("evidence", partial(evidence, each, False)) for each in symbols]
    todo += [("evidence", partial(evidence, each, True)) for each in vectors]
    largest = [] if quick else [65_536, 131_072]
    return todo + [("neural", partial(neural, each, 0.5, "float32")) for each in largest]


def draw(rows: list[Row]) -> None:
    """The latest of each: evidence by shape and method, iterations of fits, tokens a second."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.4), layout="constrained")
    found = {
        (*r["shape"], r["method"]): r
        for r in rows
        if r["part"] == "evidence" and r.get("emission") == "categorical" and "seconds" in r
    }
    shown = [method for method in dict.fromkeys(key[-1] for key in found) if "log" not in method]
    places = list(dict.fromkeys(key[:-1] for key in found))
    for number, method in enumerate(shown):
        points = [(1e3 * found[*p, method]["seconds"], y) for y, p in enumerate(places)
                  if (*p, method) in found]  # fmt: skip
        axes[0].plot(*zip(*points), "osD^vPX*h"[number % 9], label=method, ms=6,
                     zorder=3 if method == "pyrohmm" else 2)  # fmt: skip
    axes[0].set_yticks(
        range(len(places)), ["{:,} × {:,}\nK = {:,}, V = {:,}".format(*place) for place in places]
    )
    axes[0].set(xscale="log", xlabel="milliseconds", title="evidence and gradient, N × T symbols")
    axes[0].invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    panels = [
        ("fits", "milliseconds an iteration",
         lambda r: (r["fit"].replace(", ", "\n"), 1e3 * r["seconds"])),
        ("tokens", "million tokens a second",
         lambda r: (f"K = {r['states']:,}\n{r['method']}", r["tokens_a_second"] / 1e6)),
    ]  # fmt: skip
    for axis, (part, label, of) in zip(axes[1:], panels):
        bars = dict(of(row) for row in rows if row["part"] == part and "skipped" not in row)
        colors = [PUBLISHED if "PyJuice" in name else "C0" for name in bars]  # another package
        axis.barh(list(bars), list(bars.values()), color=colors)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set(xlabel=label, title={"fits": "fits", "tokens": "dense chains"}[part])
    marks = sorted({f"{row['date']}: {row['card']}, version {row['pyrohmm']}" for row in rows})
    figure.suptitle("\n".join(marks), fontsize=9)
    save(figure, NAME)


def main() -> None:
    """Measure all parts, and write what there is after each."""
    options = arguments(__doc__, PARTS)
    if options.draw:
        draw(earlier(NAME))
        return
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        raise SystemExit("gpu_throughput.py needs a GPU; --quick runs small sizes on the CPU.")
    device = torch.device("cuda" if cuda else "cpu")
    card = torch.cuda.get_device_name(device) if cuda else "CPU"
    marks = {"date": datetime.date.today().isoformat(), "card": card,
             "pyrohmm": version("pyrohmm"), "torch": torch.__version__}  # fmt: skip
    kept = [row for row in earlier(NAME)
            if row["date"] != marks["date"] or row["part"] not in options.only]  # fmt: skip
    rows: list[Row] = []
    start_time = time.perf_counter()
    for part, job in jobs(device, options.quick):
        if part not in options.only:
            continue
        try:
            if time.perf_counter() - start_time > LIMIT:
                raise TimeoutError(f"{LIMIT:.0f} seconds were over")
            with pyro.validation_enabled(False):
                found = job(device=device, quick=options.quick)
        except Exception as error:  # the other parts go on
            found = [{"job": repr(job), "skipped": f"{type(error).__name__}: {error}"[:300]}]
        if cuda:
            torch.cuda.empty_cache()
        rows += [{"part": part} | row | marks for row in found]
        print(*rows[-len(found) :], sep="\n", flush=True)
        if not options.quick:
            write(NAME, kept + rows, device=card)
    if options.quick:
        failed = [row for row in rows if "skipped" in row]
        if failed and not cuda:
            raise SystemExit(f"{len(failed)} of {len(rows)} rows failed")
    else:
        draw(kept + rows)


if __name__ == "__main__":
    main()
