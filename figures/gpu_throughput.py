"""Speed on a GPU: evidence with gradient, EM, and epochs of large language models.

Every method of a comparison is timed in turn in one run, in float32, until the device has finished.
Beside the evidence stand Pyro's ``DiscreteHMM`` and a loop of logsumexp, plain and, where torch can
capture it, as a CUDA graph. Without a GPU only ``--quick`` runs, with small sizes on the CPU: it
shows that the script works, and nothing of a GPU. Writes ``gpu_throughput.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import pyro
import torch
from common import arguments, earlier, interleaved, write
from pyro.distributions import Categorical, DiscreteHMM, Normal

from pyrohmm import (
    HMM,
    MarginalModel,
    NeuralHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    fit_em,
    fit_map,
    normal,
)

SYMBOLS = [(256, 100, 16, 64), (64, 200, 128, 1000), (32, 64, 1024, 1000), (1, 10000, 8, 32)]
VECTORS = [(64, 200, 32, 40), (256, 100, 16, 2)]  # N, T, K, D
STATES = [4096, 32768]  # of language models, in 128 blocks
QUICK_SYMBOLS, QUICK_VECTORS, QUICK_STATES = [(4, 10, 4, 8)], [(4, 10, 4, 2)], [64]
PARTS = ["evidence", "em", "epochs"]
VOCABULARY, BLOCKS = 10_000, 128


class Problem:
    """Random parameters and observations of one shape on a device."""

    def __init__(self, shape: tuple[int, int, int, int], vectors: bool, device: torch.device):
        torch.manual_seed(0)
        size, steps, states, width = self.shape = shape
        self.vectors = vectors
        sizes = [(states,), (states, states), (states, width)]
        self.parameters = [torch.randn(*each, device=device).requires_grad_() for each in sizes]
        if vectors:
            self.values = torch.randn(size, steps, width, device=device)
        else:
            self.values = torch.randint(width, (size, steps), device=device)
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

    def data(self) -> Sequences:
        """The observations, for fits."""
        return Sequences(self.values, self.lengths)


def finished(method: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """``method`` until the device has done all of it."""

    def run() -> None:
        method()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def as_graph(method: Callable[[], Any]) -> Callable[[], Any]:
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


def evidence(problem: Problem, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Seconds of evidence and gradient, by method."""
    methods = {
        "pyrohmm": problem.ours,
        "log space": problem.log_space,
        "DiscreteHMM": problem.discrete_hmm,
    }
    skipped: dict[str, str] = {}
    ready: dict[str, Callable[[], Any]] = {}
    for name, method in methods.items():
        plans = {name: lambda method=method: method}
        if device.type == "cuda":
            plans[f"{name}, CUDA graph"] = partial(as_graph, method)
        for title, plan in plans.items():
            try:
                run = finished(plan(), device)
                run()
            except RuntimeError as error:  # out of memory, or not to be captured
                skipped[title] = str(error).splitlines()[0]
            else:
                ready[title] = run
    times = interleaved(ready, rounds)
    rows = [row("evidence", problem, name, each) for name, each in times.items()]
    return rows + [row("evidence", problem, name, [], why) for name, why in skipped.items()]


def em(problem: Problem, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Seconds of a further iteration of EM, start and end left out."""
    states, width = problem.shape[2:]
    family = normal(width) if problem.vectors else categorical(width)

    def fit(num_steps: int) -> None:
        pyro.set_rng_seed(0)
        module = TabularHMM(states, family).to(device)
        fit_em(
            module, problem.data(), num_iterations=num_steps, restarts=1, tolerance=None,
            progress=False,
        )  # fmt: skip

    short, long = 2, 12
    times = interleaved(
        {str(steps): finished(partial(fit, steps), device) for steps in (short, long)}, rounds
    )
    pairs = zip(times[str(long)], times[str(short)])
    return [row("em", problem, "pyrohmm", [(b - a) / (long - short) for b, a in pairs])]


def epochs(num_states: int, device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Seconds of a pass over sentences as many and as long as those of the Penn Treebank."""
    words, parts = (50, 4) if quick else (VOCABULARY, BLOCKS)
    sentences, steps, tokens = (8, 10, 40) if quick else (42_068, 22, 8_192)
    torch.manual_seed(0)
    clusters = blocks.from_clusters(torch.arange(words) % parts, num_states // parts)
    data = Sequences(torch.randint(words, (sentences, steps)), torch.full((sentences,), steps))
    data = data.to(device)
    model = MarginalModel(
        NeuralHMM(num_states, words, 16 if quick else 256, blocks=clusters, two_level=True)
    ).to(device)
    found = []
    batches = -(-sentences * steps // tokens)
    for title, precision in (("float32", None), ("bfloat16", torch.bfloat16)):
        fit = partial(fit_map, model, data, batch_tokens=tokens, progress=False, tolerance=None,
                      learning_rate=1e-3, precision=precision)  # fmt: skip
        finished(partial(fit, num_iterations=1), device)()  # the first call may compile
        start = time.perf_counter()
        finished(partial(fit, num_iterations=batches), device)()
        seconds = time.perf_counter() - start
        found.append({"part": "epochs", "states": num_states, "method": title,
                      "tokens": tokens, "seconds": seconds})  # fmt: skip
    return found


def row(
    part: str, problem: Problem, method: str, times: list[float], skipped: str | None = None
) -> dict[str, Any]:
    """One row of the results."""
    found = {"part": part, "emission": "normal" if problem.vectors else "categorical",
             "shape": list(problem.shape), "method": method}  # fmt: skip
    if skipped is not None:
        return found | {"skipped": skipped}
    return found | {"seconds": median(times), "lowest": min(times), "highest": max(times)}


def main() -> None:
    """Measure all parts; write the results unless they are of ``--quick``."""
    options = arguments(__doc__, PARTS, picture=False)
    if not torch.cuda.is_available() and not options.quick:
        raise SystemExit("gpu_throughput.py needs a GPU; --quick runs small sizes on the CPU.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rounds = 1 if options.quick else 9
    shapes = [(shape, False) for shape in (QUICK_SYMBOLS if options.quick else SYMBOLS)]
    shapes += [(shape, True) for shape in (QUICK_VECTORS if options.quick else VECTORS)]
    rows = []
    with pyro.validation_enabled(False):
        for shape, vectors in shapes:
            problem = Problem(shape, vectors, device)
            for part, measure in (("evidence", evidence), ("em", em)):
                if part in options.only:
                    rows += measure(problem, device, rounds)
        if "epochs" in options.only:
            for num_states in QUICK_STATES if options.quick else STATES:
                rows += epochs(num_states, device, options.quick)
    for each in rows:
        print(each)
    if not options.quick:
        kept = [each for each in earlier("gpu_throughput") if each["part"] not in options.only]
        write("gpu_throughput", kept + rows, device=torch.cuda.get_device_name(device))


if __name__ == "__main__":
    main()
