"""The toy of the diversified HMM: section 4.1 of the paper, its Table 1 and Figures 2 to 5.

Five states with normal emissions of means 1, ..., 5; 300 sequences of six steps. The paper shows
its transition matrix as a picture; that of ``datasets.diverse_toy`` has the mean Bhattacharyya
distance of rows that it reports, 0.531. As in the paper, the initial values are Dirichlet rows of
concentration 3, means from a normal and variances from a gamma distribution. The paper leaves their
parameters open: here the normal distribution has the moments of the data, or (``standard normal``)
mean 0 and variance 1, and the gamma distribution has shape 2 and the variance of the data as its
mean. ``k-means`` is the initialisation a user would choose.

All weights are in the convention of the paper, twice those of ``DiversityPrior``; 0 is the plain
HMM. Runs with different weights have the same initial values and data, and run until convergence.

``table``: ten data sets, ten starts each. ``sweep``: the variance goes from 0.025 to 4.925 in fifty
steps; at each, one data set and ten starts. States are decoded by Viterbi's algorithm; accuracy is
that of the best one-to-one matching; a state is identified if at least 50 of 1,800 steps are in it.
Lines in the picture are medians over nine neighbours.

Writes ``diversified_toy.json`` and ``diversified_toy.png``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyro
import torch
from common import arguments, earlier, pyplot, save, write
from pyro import poutine
from pyro.distributions import Dirichlet, Gamma
from torch import Tensor

from pyrohmm import DiversityPrior, Sequences, TabularHMM, datasets, fit_em, metrics, normal, starts

PAPER = {0.0: 0.4117, 1.0: 0.4728}  # accuracy, Table 1
WEIGHTS = (0.0, 1.0, 10.0, 100.0, 1000.0)
STARTS = ("as the data", "standard normal", "k-means")
TRUE_DISTANCE = 0.531
SCALARS = ("accuracy", "distance", "identified", "histogram", "nats", "log_determinant")


def start(kind: str, data: Sequences, restarts: int) -> Any:
    """Initial values of EM by name, or k-means."""
    if kind == "k-means":
        return starts.by_kmeans
    spread = data.values.var()
    loc = torch.randn(restarts, 5)
    if kind == "as the data":
        loc = data.values.mean() + spread.sqrt() * loc
    return {
        "initial": Dirichlet(torch.full((restarts, 5), 3.0)).sample(),
        "transition": Dirichlet(torch.full((restarts, 5, 5), 3.0)).sample(),
        "emission.loc": loc,
        "emission.variance": Gamma(2.0, 2.0 / spread).sample((restarts, 5)),
    }


def runs(kind: str, variance: float, seed: int, weight: float, num: int) -> list[dict[str, float]]:
    """Fit from ``num`` starts, and measure each."""
    generator = torch.Generator().manual_seed(seed)
    data = datasets.diverse_toy(deviation=variance**0.5, generator=generator)
    truth = data.labels
    assert truth is not None
    data = data.without_labels()
    data = Sequences(data.values.double(), data.lengths)
    module = TabularHMM(5, normal(0, rate=0.01))  # essentially a lower bound of the variances
    pyro.set_rng_seed(seed)
    fit = fit_em(
        module,
        data,
        start=start(kind, data, num),
        restarts=num,
        num_iterations=1000 if num > 2 else 200,
        log_prior=DiversityPrior.as_in_paper(weight) if weight else None,
        progress=False,
    )
    assert fit.restarts is not None
    actual = truth.flatten().bincount(minlength=5).sort().values
    results = []
    for run in range(num):
        values = {n.removeprefix("module."): v[run] for n, v in fit.restarts.parameters.items()}
        with torch.no_grad(), poutine.block():
            hmm = poutine.condition(module, data=values)(data.lengths)
        states = hmm.viterbi(data.values)
        rows = hmm.log_transition.exp()
        counts = states.flatten().bincount(minlength=5)
        results.append(
            {
                "accuracy": metrics.one_to_one_accuracy(states, truth),
                "distance": metrics.diversity(rows).item(),
                "identified": int((counts >= 50).sum()),
                # total variation distance of the sorted histograms
                "histogram": (counts.sort().values - actual).abs().sum().item() / 3600,
                "nats": -hmm.log_prob(data.values).sum().item() / data.num_observed,
                "log_determinant": 2 * torch.linalg.slogdet(rows.sqrt()).logabsdet.item(),
            }
        )
    return results


def summary(runs: list[dict[str, float]], **row: Any) -> dict[str, Any]:
    """A row: median and quartiles of distances, mean and standard deviation of the others."""
    for name in SCALARS:
        values = np.array([run[name] for run in runs])
        if name in ("distance", "log_determinant"):  # infinite for a few runs
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="nearest").tolist()
            row[name] = {"ours": middle, "low": low, "high": high}
        else:
            row[name] = {"ours": values.mean().item(), "deviation": values.std().item()}
    return row | {"runs": len(runs)}


def over_data(values: Tensor) -> float | None:
    """Standard error of the mean: starts on the same data are not independent."""
    each = values.reshape(-1, 10).mean(-1) if len(values) == 100 else values
    return (each.std() / len(each) ** 0.5).item()


def table(quick: bool) -> list[dict[str, Any]]:
    """Table 1: accuracy by weight and start, paired with the plain HMM."""
    rows = []
    for kind in STARTS:
        plain: Tensor | None = None
        for weight in WEIGHTS[:2] if quick else WEIGHTS:
            fits = [
                run
                for seed in range(1 if quick else 10)
                for run in runs(kind, 0.025, seed, weight, 2 if quick else 10)
            ]
            row = summary(fits, start=kind, variance=0.025, weight=weight)
            row["accuracy"]["paper"] = PAPER.get(weight) if kind != "k-means" else None
            accuracies = torch.tensor([run["accuracy"] for run in fits])
            plain = accuracies if plain is None else plain
            gain = accuracies - plain
            row["accuracy"]["standard_error"] = over_data(accuracies)
            row["gain"] = {
                "mean": gain.mean().item(),
                "standard_error": over_data(gain),
                "better": (gain > 1e-9).float().mean().item(),
                "worse": (gain < -1e-9).float().mean().item(),
            }
            row["perfect"] = (accuracies > 0.99).float().mean().item()
            print(row, flush=True)
            rows.append(row)
    return rows


def sweep(quick: bool) -> list[dict[str, Any]]:
    """Figures 3 to 5: distance of rows and number of identified states, by the noise."""
    variances = 0.025 + 0.1 * np.arange(50)
    rows = []
    for place, variance in enumerate(variances[:: 25 if quick else 1].tolist()):
        for weight in (0.0, 1.0, 100.0):
            fits = runs("as the data", variance, 1000 + place, weight, 2 if quick else 10)
            rows.append(summary(fits, start="as the data", variance=variance, weight=weight))
        print(
            [(row["weight"], row["distance"], row["identified"]) for row in rows[-3:]], flush=True
        )
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Accuracy by weight and start; distance, identified states and accuracy by the noise."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    axes = axes.flatten()
    for n, kind in enumerate(STARTS):
        selected = [row for row in rows if row["part"] == "table" and row["start"] == kind]
        axes[0].errorbar(
            np.arange(len(selected)) + 0.08 * (n - 1),
            [row["accuracy"]["ours"] for row in selected],
            [row["accuracy"]["standard_error"] for row in selected],
            fmt="o-", markersize=4, color=f"C{n}", label=f"initial values: {kind}", linewidth=1,
        )  # fmt: skip
    axes[0].plot([0, 1], list(PAPER.values()), "k*", ms=9, label="paper, whose start is not known")
    axes[0].set_xticks(range(len(WEIGHTS)), [f"{weight:g}" for weight in WEIGHTS])
    axes[0].set_xlabel("α, in the convention of the paper")
    axes[0].set_title("one-to-one accuracy, variance 0.025 (mean, standard error)")
    axes[0].legend(loc="center left", bbox_to_anchor=(0, 0.4))
    titles = {
        "distance": "distance of rows, nats (median of runs)",
        "identified": "states identified, of 5 (mean)",
        "accuracy": "one-to-one accuracy (mean)",
    }
    for panel, (name, title) in zip(axes[1:], titles.items()):
        for n, weight in enumerate((0.0, 1.0, 100.0)):
            selected = [row for row in rows if row["part"] == "sweep" and row["weight"] == weight]
            noise = np.array([row["variance"] for row in selected])
            values = np.array([row[name]["ours"] for row in selected], float)
            values = np.nan_to_num(values, nan=np.inf)  # None in the file
            panel.plot(noise, values, "os^"[n], markersize=3, color=f"C{n}", alpha=0.4)
            for place in noise[np.isinf(values)]:
                panel.annotate("∞", (place, 0.95), xycoords=panel.get_xaxis_transform(),
                               color=f"C{n}", ha="center")  # fmt: skip
            panel.plot(
                noise,
                [np.median(values[abs(noise - place) < 0.45]) for place in noise],
                color=f"C{n}",
                label="HMM" if weight == 0 else f"dHMM, α = {weight:g}",
            )
        panel.set_title(title)
        panel.set_xlabel("variance of the emissions (lines: medians over nine neighbours)")
    axes[1].set_yscale("log")
    axes[1].set_yticks([0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200],
                       "0.2 0.5 1 2 5 10 20 50 100 200".split())  # fmt: skip
    axes[1].minorticks_off()
    axes[1].axhline(TRUE_DISTANCE, color="k", linewidth=0.8, linestyle=":", label="true matrix")
    axes[1].legend(loc="upper left")
    for panel in axes[2:]:
        panel.legend(loc="lower left" if panel is axes[2] else "upper right")
    save(figure, "diversified_toy")


def main() -> None:
    """Run the parts, then write."""
    parts = (table, sweep)
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier("diversified_toy"))
        return
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.enable_validation(False)
    rows, old = [], earlier("diversified_toy")
    for part in parts:
        if part.__name__ in options.only:
            rows += [{"part": part.__name__, **row} for row in part(options.quick)]
        else:
            rows += [row for row in old if row["part"] == part.__name__]
    if not options.quick:
        write("diversified_toy", rows, true_distance=TRUE_DISTANCE)
        draw(rows)


if __name__ == "__main__":
    main()
