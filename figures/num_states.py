"""How many states: what four ways choose where the number is known.

Data are of persistent states that emit normal vectors of two dimensions, their means on a circle,
neighbours three standard deviations apart. BIC, AIC and three-fold cross-validation choose among
one to five states, fitted by EM from five k-means clusterings. The sticky HDP-HMM has a truncation
of eight, is fitted by SVI from two starts of which the better bound counts, and its number is that
of the states which are expected to take more than a twentieth of the steps, the median over
samples; that share was settled on data of a further seed, 0. Numbers of starts and steps were
settled after a first run on the first set of two states: there two starts of EM missed the best
fit, and the sticky HDP-HMM, with 250 steps, chose four. New data of the same process say what a
choice costs: nats per step below the truth, of the chosen fit, and of the mixture of the samples.
Writes ``num_states.json`` and ``num_states.png``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import arguments, earlier, pyplot, save, write
from pyro.distributions import Normal
from pyro.infer.autoguide import AutoNormal
from torch import Tensor

from pyrohmm import (
    HMM,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    StickyHDPHMM,
    TabularHMM,
    fit_em,
    fit_svi,
    metrics,
    normal,
    starts,
)

TRUE, SEEDS, APART = (2, 3, 4), (1, 2), 3.0
SIZE, NEW, STAY = (10, 100), (30, 100), 0.85  # sequences and steps
MOST, TRUNCATION, SHARE, DRAWS, FOLDS = 5, 8, 0.05, 20, 3
STARTS, HDP_STARTS, STEPS = 5, 2, 200  # of EM, of SVI, and steps of that
WINDOW = 50  # losses of the end, whose mean is that of a fit by SVI
METHODS = {"BIC": "C0", "AIC": "C1", "cross-validation": "C2", "sticky HDP-HMM": "C3"}


def truth(num_states: int, size: tuple[int, int]) -> HMM:
    """The process that makes the data."""
    angle = 2 * math.pi * torch.arange(num_states) / num_states
    radius = APART / (2 * math.sin(math.pi / num_states))
    means = radius * torch.stack([angle.cos(), angle.sin()], -1)
    even = torch.full((num_states, num_states), (1 - STAY) / (num_states - 1))
    rows = even.fill_diagonal_(STAY).log()
    initial = torch.full((num_states,), 1 / num_states).log()
    lengths = torch.full(size[:1], size[1])
    return HMM(initial, rows, Normal(means, 1.0).to_event(1), lengths)


def by_em(data: Sequences, num_states: int, restarts: int) -> Any:
    """The best of several fits; concentrations keep all evidence finite."""
    module = TabularHMM(num_states, normal(2), 1.1, 1.1)
    options = {"start": starts.by_kmeans, "tolerance": 1e-5, "progress": False}
    return fit_em(module, data, restarts=restarts, **options)


def by_hdp(data: Sequences, steps: int, restarts: int) -> Any:
    """The fit of a sticky HDP-HMM with the best bound of some starts."""
    fits = []
    for _ in range(restarts):
        model = MarginalModel(StickyHDPHMM(TRUNCATION, normal(2), 1.0, 1.0, 10.0))
        guide = AutoNormal(model, init_scale=0.05)
        fits.append(
            fit_svi(model, guide, data, num_iterations=steps, learning_rate=0.1, tolerance=None,
                    progress=False)
        )  # fmt: skip
    return min(fits, key=lambda fit: fit.losses[-WINDOW:].mean())


def nats(evidence: Tensor, data: Sequences) -> float:
    """Per step."""
    return evidence.double().sum().item() / data.num_observed


def measure(num_states: int, seed: int, quick: bool) -> list[dict[str, Any]]:
    """What each way chooses on one set of data."""
    torch.manual_seed(seed)
    process = truth(num_states, SIZE)
    data = Sequences(process.sample(), process.lengths)
    later = truth(num_states, NEW)
    new = Sequences(later.sample(), later.lengths)
    best = nats(later.log_prob(new.values), new)
    sizes = range(1, 4 if quick else MOST + 1)
    restarts = 1 if quick else STARTS
    start_time = time.process_time()
    fits = {size: by_em(data, size, restarts) for size in sizes}
    seconds = time.process_time() - start_time
    scores: dict[str, Callable[[int], float]] = {
        "BIC": lambda size: metrics.bic(fits[size], data),
        "AIC": lambda size: metrics.aic(fits[size], data),
        "cross-validation": lambda size: -metrics.cross_validate(
            lambda part: by_em(part, size, restarts), data, FOLDS,
            torch.Generator().manual_seed(seed),
        ).per_step,
    }  # fmt: skip
    rows = []
    for name, score in scores.items():
        start_time = time.process_time()
        chosen = min(sizes, key=score)
        lost = best - nats(fits[chosen].hmm(new).log_prob(new.values), new)
        taken = seconds + time.process_time() - start_time
        rows.append({"method": name, "chosen": chosen, "lost": lost, "seconds": taken})
    start_time = time.process_time()
    fit = by_hdp(data, 60 if quick else STEPS, 1 if quick else HDP_STARTS)
    draws = PosteriorDraws.of(fit, num_draws=DRAWS)
    with torch.no_grad():
        usage = draws.hmm(data).posterior(data.values).state_probs.sum((-3, -2))  # (1, S, K)
        used = (usage > SHARE * data.num_observed).sum(-1).flatten().tolist()
        taken = time.process_time() - start_time
        each = draws.hmm(new).log_prob(new.values).double()  # (1, S, N)
    mixture = each.logsumexp(-2) - math.log(DRAWS)
    rows.append(
        {"method": "sticky HDP-HMM", "chosen": int(median(used)), "of_samples": used,
         "lost": best - nats(mixture, new), "seconds": taken}
    )  # fmt: skip
    where = {"true": num_states, "seed": seed}
    return [where | row for row in rows]


def draw(rows: list[dict[str, Any]]) -> None:
    """Numbers chosen against true ones, and what they cost."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for place, (method, color) in enumerate(METHODS.items()):
        own = [row for row in rows if row["method"] == method]
        at = [row["true"] + 0.17 * (place - 1.5) + 0.06 * (row["seed"] - 1.5) for row in own]
        for axis, value in zip(axes, ("chosen", "lost")):
            points = [row[value] for row in own]
            axis.plot(at, points, "o", color=color, markersize=5, label=method)
    for true in TRUE:
        axes[0].hlines(true, true - 0.4, true + 0.4, color="black", linewidth=0.8)
    axes[0].set_ylabel("number of states chosen (line: truth)")
    axes[1].set_ylabel("loss on new data, nats per step")
    axes[0].set_yticks(range(1, TRUNCATION + 1))
    axes[0].set_ylim(0.5, max(row["chosen"] for row in rows) + 0.5)
    for axis in axes:
        axis.set_xlabel("true number of states")
        axis.set_xticks(TRUE)
    axes[0].legend(loc="upper left")
    save(figure, "num_states")


def main() -> None:
    """Measure, then write."""
    options = arguments(__doc__)
    torch.set_num_threads(1)
    cases = [] if options.draw else [(number, seed) for seed in SEEDS for number in TRUE]
    rows = earlier("num_states") if options.draw else []
    for case in cases[: 1 if options.quick else None]:
        rows += measure(*case, options.quick)
        for row in rows[-len(METHODS) :]:
            print(row, flush=True)
        if not options.quick:
            write("num_states", rows)
    if not options.quick:
        draw(rows)


if __name__ == "__main__":
    main()
