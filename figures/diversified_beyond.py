"""The diversity prior beyond the paper: other priors, embeddings and networks, many states.

``cost``: log-determinant and gradient for K up to 1,000, compared with evidence and gradient of 64
sequences of 100 steps with as many states, in turn, on one thread. ``iterations``: ten iterations
of EM with and without the prior, on 200 such sequences.

``priors``: small data sets; the strength of each prior is chosen by the evidence of validation
data, and the gain in evidence of test data over no prior is reported, in nats per observation.
``toy`` is the data of the paper (40 sequences of six numbers), ``ring`` a chain of six states that
mostly advance to the next (40 sequences of ten symbols), ``sticky`` one that mostly stays,
``letters`` English (4,000 letters, eight states). EM, ten seeds; all priors use the same initial
values. A Dirichlet prior with a concentration below one (sparse) has no mode: negative counts are
set to zero, as usual.

``embeddings``: a DenseHMM with twelve states of four dimensions on 100,000 letters of English, by
EM with gradient M-steps, under the prior: nats per held-out letter, and diversity. ``networks``: a
NeuralHMM with as many states by MAP, 600 gradient steps, on the same letters.

Writes ``diversified_beyond.json`` and ``diversified_beyond.png``.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import mean, median, stdev
from typing import Any

import pyro
import torch
from common import arguments, earlier, interleaved, pyplot, ratio, save, write
from pyro.distributions import Categorical
from torch import Tensor

from pyrohmm import (
    HMM,
    DenseHMM,
    DiversityPrior,
    Fit,
    HMMModule,
    MarginalModel,
    NeuralHMM,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    dpp,
    fit_em,
    fit_map,
    metrics,
    normal,
    starts,
    sticky,
)

Data = tuple[Sequences, Sequences, Sequences]  # for training, validation and test


def cost(quick: bool) -> list[dict[str, Any]]:
    """Cost of the determinant relative to the evidence."""
    rows = []
    for size in (5, 20) if quick else (10, 30, 100, 300, 1000):
        torch.manual_seed(0)
        logits = torch.randn(size, size, requires_grad=True)
        emission = torch.randn(size, 100, requires_grad=True)
        values = torch.randint(100, (64, 100))
        lengths = torch.full((64,), 100)

        def prior(logits: Tensor = logits) -> Any:
            return torch.autograd.grad(dpp.log_diversity(logits.softmax(-1)), logits)

        def evidence(
            logits: Tensor = logits,
            emission: Tensor = emission,
            values: Tensor = values,
            lengths: Tensor = lengths,
        ) -> Any:
            log_transition = logits.log_softmax(-1)
            hmm = HMM(log_transition[0], log_transition, Categorical(logits=emission), lengths)
            return torch.autograd.grad(hmm.log_prob(values).sum(), (logits, emission))

        methods: dict[str, Callable[[], Any]] = {"determinant": prior, "evidence": evidence}
        times = interleaved(methods, 3 if quick else 15, 10.0, time.process_time)
        rows.append(
            {
                "K": size,
                "determinant_milliseconds": 1e3 * median(times["determinant"]),
                "evidence_milliseconds": 1e3 * median(times["evidence"]),
                "determinant_over_evidence": ratio(times, "determinant", "evidence"),
            }
        )
        print(rows[-1], flush=True)
    return rows


def iterations(quick: bool) -> list[dict[str, Any]]:
    """Cost of EM with the M-step under the prior, relative to plain EM."""
    rows = []
    for size in (5, 10) if quick else (10, 30, 100, 200):
        torch.manual_seed(0)
        log_transition = (2 * torch.randn(size, size)).log_softmax(-1)
        emission = Categorical(logits=3 * torch.randn(size, 100))
        truth = HMM(log_transition[0], log_transition, emission, torch.full((200,), 100))
        data = Sequences.from_list(list(truth.sample()))
        module = TabularHMM(size, categorical(100))

        def fit(
            prior: DiversityPrior | None, module: HMMModule = module, data: Sequences = data
        ) -> Fit:
            pyro.set_rng_seed(1)
            return fit_em(module, data, num_iterations=10, tolerance=None, log_prior=prior)

        methods: dict[str, Callable[[], Any]] = {
            "plain": partial(fit, None),
            "diversity": partial(fit, DiversityPrior(10.0)),
        }
        times = interleaved(methods, 1 if quick else 7, 60.0, time.process_time)
        rows.append(
            {
                "K": size,
                "plain_milliseconds": 1e2 * median(times["plain"]),
                "diversity_milliseconds": 1e2 * median(times["diversity"]),
                "diversity_over_plain": ratio(times, "diversity", "plain"),
            }
        )
        print(rows[-1], flush=True)
    return rows


class _Sparse(TabularHMM):
    """A tabular HMM whose M-step sets negative transition counts to zero: sparse rows.

    Args:
        num_states: K.
        emission: An emission family.
        concentration: Of the rows, below one.
    """

    def __init__(self, num_states: int, emission: Any, concentration: float) -> None:
        super().__init__(num_states, emission)
        self.less = 1 - concentration

    def m_step(self, statistics: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Counts of transitions, less what the prior takes away."""
        counts = (statistics["transition"] - self.less).clamp(min=0.0)
        best = statistics["transition"].argmax(-1, keepdim=True)
        counts = torch.where(counts.sum(-1, keepdim=True) > 0, counts,
                             torch.zeros_like(counts).scatter(-1, best, 1.0))  # fmt: skip
        return super().m_step({**statistics, "transition": counts})


def chain(matrix: Tensor, seed: int, num: int) -> Sequences:
    """Sequences of length ten over nine symbols; each state mostly emits one of them."""
    pyro.set_rng_seed(seed)
    size = len(matrix)
    emission = (0.3 / 9 + 0.7 * torch.eye(size, 9)).double()
    hmm = HMM(
        torch.full((size,), 1.0 / size).log(),
        matrix.log(),
        Categorical(emission / emission.sum(-1, keepdim=True)),
        torch.full((num,), 10),
    )
    return Sequences(hmm.sample(), torch.full((num,), 10))


def toy(seed: int) -> Data:
    """The data of the paper."""
    generator = torch.Generator().manual_seed(seed)
    data = datasets.diverse_toy(1040, generator=generator).without_labels()
    data = Sequences(data.values.double(), data.lengths)
    return data[:40], data[40:540], data[540:]


def ring(seed: int) -> Data:
    """A chain that mostly advances to the next state."""
    data = chain(0.1 / 6 + 0.9 * torch.eye(6).roll(1, -1), seed, 1040)
    return data[:40], data[40:540], data[540:]


def staying(seed: int) -> Data:
    """A chain that mostly stays."""
    data = chain(0.1 / 6 + 0.9 * torch.eye(6), seed, 1040)
    return data[:40], data[40:540], data[540:]


def letters(seed: int) -> Data:
    """English letters."""
    data = datasets.english_letters(60_000, chunk=100).data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    data = data[order]
    return data[:40], data[40:240], data[240:]


SOURCES: dict[str, tuple[Callable[[int], Data], int, Callable[[], Any]]] = {
    "toy": (toy, 5, lambda: normal(0, rate=0.01)),
    "ring": (ring, 6, lambda: categorical(9, 1.1)),
    "sticky": (staying, 6, lambda: categorical(9, 1.1)),
    "letters": (letters, 8, lambda: categorical(27, 1.1)),
}
STRENGTHS: dict[str, list[float]] = {
    "diverse": [0.3, 1.0, 3.0, 10.0, 30.0],
    "Dirichlet": [1.1, 1.3, 2.0, 4.0, 11.0],
    "sticky": [2.0, 4.0, 11.0, 31.0, 101.0],
    "sparse": [0.9, 0.7, 0.5, 0.2, 0.0],
}


def under(kind: str, strength: float, size: int, emission: Any) -> tuple[HMMModule, Any]:
    """A module and a further log-prior."""
    if kind == "diverse":
        return TabularHMM(size, emission), DiversityPrior(strength)
    if kind == "Dirichlet":
        return TabularHMM(size, emission, 1.0, strength), None
    if kind == "sticky":
        return TabularHMM(size, emission, 1.0, sticky(size, strength)), None
    return _Sparse(size, emission, strength), None


def priors(quick: bool) -> list[dict[str, Any]]:
    """Evidence of test data by prior, its strength chosen on validation data."""
    rows = []
    for source, (make, size, family) in SOURCES.items():
        gains: dict[str, list[float]] = {kind: [] for kind in STRENGTHS}
        chosen: dict[str, list[float]] = {kind: [] for kind in STRENGTHS}
        for seed in range(2 if quick else 10):
            train, valid, test = make(seed)
            pyro.set_rng_seed(seed)
            plain = TabularHMM(size, family())
            start = starts.by_kmeans if source == "toy" else None
            if start is None:
                first = starts.from_prior(plain, train, 1)
                start = {name: value[0, 0] for name, value in first.items()}

            def scores(module: HMMModule, prior: Any, *data: Any) -> tuple[float, float]:
                train, valid, test, start, seed = data
                pyro.set_rng_seed(seed)
                with warnings.catch_warnings():
                    if isinstance(module, _Sparse):  # without a mode EM is not monotone
                        warnings.filterwarnings("ignore", "the loss rose")
                    fit = fit_em(
                        module, train, log_prior=prior, start=start, progress=False,
                        num_iterations=5 if quick else 200,
                    )  # fmt: skip
                nats = [
                    (metrics.log_evidence(fit, part).sum() / part.num_observed).item()
                    for part in (valid, test)
                ]
                return nats[0], nats[1]

            inputs = (train, valid, test, start, seed)
            _, base = scores(plain, None, *inputs)
            for kind, strengths in STRENGTHS.items():
                by_strength = {
                    strength: scores(*under(kind, strength, size, family()), *inputs)
                    for strength in (strengths[:2] if quick else strengths)
                }
                best = max(by_strength, key=lambda strength: by_strength[strength][0])
                gains[kind].append(by_strength[best][1] - base)
                chosen[kind].append(best)
        for kind in STRENGTHS:
            rows.append(
                {
                    "data": source, "prior": kind, "runs": len(gains[kind]),
                    "gain": mean(gains[kind]),
                    "standard_error": stdev(gains[kind]) / len(gains[kind]) ** 0.5,
                    "median_strength": median(chosen[kind]),
                    "strengths": STRENGTHS[kind],
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def embeddings(quick: bool) -> list[dict[str, Any]]:
    """A DenseHMM under the prior."""

    def fit(alpha: float, train: Sequences) -> Fit:
        return fit_em(
            DenseHMM(12, 27, 4), train, log_prior=DiversityPrior(alpha), progress=False,
            num_iterations=3 if quick else 60,
        )  # fmt: skip

    return by_alpha(fit, quick)


def networks(quick: bool) -> list[dict[str, Any]]:
    """A NeuralHMM under the prior."""

    def fit(alpha: float, train: Sequences) -> Fit:
        model = MarginalModel(NeuralHMM(12, 27, 32), DiversityPrior(alpha))
        steps = 5 if quick else 600
        return fit_map(
            model, train, num_iterations=steps, learning_rate=0.005, tolerance=None, progress=False
        )

    return by_alpha(fit, quick)


def by_alpha(make: Callable[[float, Sequences], Fit], quick: bool) -> list[dict[str, Any]]:
    """Held-out evidence and diversity by the weight of the prior."""
    data = datasets.english_letters(4_000 if quick else 100_000, chunk=200).data
    train, test = data[: len(data) * 4 // 5], data[len(data) * 4 // 5 :]
    rows = []
    for alpha in (0.0, 10.0) if quick else (0.0, 10.0, 100.0, 1000.0):
        for seed in range(1 if quick else 3):
            pyro.set_rng_seed(seed)
            fit = make(alpha, train)
            rows_of_matrix = fit.hmm(test).log_transition.exp().double()
            rows.append(
                {
                    "alpha": alpha, "seed": seed,
                    "nats": -(metrics.log_evidence(fit, test).sum() / test.num_observed).item(),
                    "log_diversity": dpp.log_diversity(rows_of_matrix).item(),
                    "distance": metrics.diversity(rows_of_matrix).item(),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Costs, gains, and a DenseHMM and a NeuralHMM under the prior."""
    plt = pyplot()
    figure, ((costs, gains), by_weight) = plt.subplots(
        2, 2, figsize=(10, 7.5), layout="constrained"
    )
    for n, (name, what) in enumerate(
        {"determinant_over_evidence": "log-determinant / evidence, value and gradient",
         "diversity_over_plain": "iteration of EM, with the prior / without"}.items()
    ):  # fmt: skip
        of_name = [row for row in rows if name in row]
        middle, low, high = zip(*(row[name] for row in of_name))
        sizes = [row["K"] for row in of_name]
        costs.fill_between(sizes, low, high, color=f"C{n}", alpha=0.2, linewidth=0)
        costs.plot(sizes, middle, "os"[n] + "-", color=f"C{n}", label=what)
    costs.set(
        xscale="log", xlabel="states K", ylabel="ratio of times", ylim=(0, 3.4),
        title="cost of the prior (median; band: fastest and slowest round)",
    )  # fmt: skip
    costs.legend(loc="upper left")
    selected = [row for row in rows if row["part"] == "priors"]
    for n, kind in enumerate(STRENGTHS):
        of_kind = [row for row in selected if row["prior"] == kind]
        gains.errorbar(
            [place + 0.12 * (n - 1.5) for place in range(len(of_kind))],
            [row["gain"] for row in of_kind],
            [row["standard_error"] for row in of_kind],
            fmt="os^D"[n], markersize=5, label=f"{kind} prior",
        )  # fmt: skip
    gains.axhline(0, color="k", linewidth=0.8)
    gains.set_xticks(range(len(SOURCES)), list(SOURCES))
    gains.set(xlabel="data", ylabel="nats per test observation",
              title="gain over no prior (mean of ten seeds, standard error)")  # fmt: skip
    gains.grid(visible=False, axis="x")
    gains.legend()
    titles = {"nats": "nats per held-out letter", "log_diversity": "log-determinant"}
    for panel, (name, title) in zip(by_weight, titles.items()):
        for n, (part, label) in enumerate(
            {"embeddings": "DenseHMM", "networks": "NeuralHMM"}.items()
        ):
            selected = [row for row in rows if row["part"] == part]
            alphas = list(dict.fromkeys(row["alpha"] for row in selected))
            values = [[row[name] for row in selected if row["alpha"] == each] for each in alphas]
            places = [place + 0.1 * (n - 0.5) for place in range(len(alphas))]
            seeds = panel.plot(places, values, "os"[n], color=f"C{n}", alpha=0.5)
            seeds[0].set_label(f"{label}, each seed")
            panel.plot(places, [median(each) for each in values], color=f"C{n}", linewidth=1,
                       linestyle=("-", "--")[n], label=f"{label}, median")  # fmt: skip
        panel.set_xticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
        panel.set(xlabel="α, weight of the prior", ylabel=title, title="12 states, English letters")
        panel.legend()
    save(figure, "diversified_beyond")


def main() -> None:
    """Run the parts, then write."""
    parts = (cost, iterations, priors, embeddings, networks)
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier("diversified_beyond"))
        return
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    rows, old = [], earlier("diversified_beyond")
    for part in parts:
        torch.set_default_dtype(torch.float32 if part is cost else torch.float64)
        if part.__name__ in options.only:
            rows += [{"part": part.__name__, **row} for row in part(options.quick)]
        else:
            rows += [row for row in old if row["part"] == part.__name__]
    if not options.quick:
        write("diversified_beyond", rows)
        draw(rows)


if __name__ == "__main__":
    main()
