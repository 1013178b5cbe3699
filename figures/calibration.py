"""Simulation-based calibration: ranks of the truth among samples of its posterior are uniform.

Talts, Betancourt, Simpson, Vehtari and Gelman (2018). For each model, parameters are sampled from
the prior, data from the parameters, and from the posterior of these data one sample of each of
fifteen independent chains that begin at samples of the prior. If the sampler is right, the rank of
the truth among them is uniform on 0 to 15. The p-value is that of a chi-square test in eight bins,
the smallest one over the statistics times their number (Bonferroni). The statistic of each
parameter is a weighted sum of its entries, and the log joint density is a further one. Normal
approximations, of which fifteen samples are taken, are shown beside the samplers.

Chains of several data sets, ``together``, are one batch; those of HMC, and of what is not conjugate
under Gibbs sampling, are tuned together. ``--sampler`` and ``--model`` run some and add to
``calibration.json``.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import pyro
import torch
from common import earlier, pyplot, save, write
from pyro.distributions import Dirichlet, Gamma, Normal, Poisson
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.poutine.messenger import Messenger
from scipy import stats
from torch import Tensor

from pyrohmm import (
    HMM,
    DenseHMM,
    MarginalModel,
    RegressionHMM,
    Sequences,
    StickyHDPHMM,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    autoregressive_normal,
    bernoulli,
    calibrate,
    categorical,
    fit_em,
    fit_gibbs,
    fit_mcmc,
    fit_svi,
    free_durations,
    gamma,
    normal,
    normal_full,
    normal_mixture,
    poisson,
    regression,
    sticky,
    streams,
)
from pyrohmm.infer.starts import from_prior
from pyrohmm.nn.base import HMMModule

CHAINS, BINS = 15, 8
LENGTHS = torch.tensor([12, 7, 1])
LEVELS = torch.tensor([2.0, 8.0])
STRENGTH = torch.tensor([[4.0, 1.0, 1.0], [1.0, 1.0, 3.0]])
STEPS = torch.arange(12.0).expand(3, 12)
TIMES = Sequences(STEPS, LENGTHS, times=STEPS.square() / 10)
REGRESSORS = Sequences(STEPS, LENGTHS, covariates=torch.stack([STEPS.sin(), STEPS.cos()], -1))


def tabular(family: Any) -> Any:
    """Two sticky states with emissions of a family."""
    return TabularHMM(2, family, 1.5, sticky(2, 3.0))


def subjects(data: Sequences) -> HMM:
    """Two states whose levels differ between sequences, about those of the population."""
    rows = pyro.sample("transition", Dirichlet(torch.tensor([[3.0, 1.0], [1.0, 2.0]])).to_event(1))
    mean = pyro.sample("mean", Normal(torch.tensor([-1.0, 1.0]), 0.5).to_event(1))
    between = pyro.sample("between", Gamma(torch.tensor(3.0), 3.0))
    with pyro.plate("subjects", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(mean, between.unsqueeze(-1)).to_event(1))
        hmm = HMM(torch.full((2,), 0.5).log(), rows.log(), Normal(level, 0.7), data.lengths)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


MODELS: dict[str, Any] = {
    "categorical": tabular(categorical(3, STRENGTH)),
    "bernoulli": tabular(bernoulli(2, 1.5, 2.0)),
    "poisson": tabular(poisson(0, LEVELS, 1.0)),
    "normal": tabular(normal(0, torch.tensor([-1.0, 1.0]), 0.5, 3.0, 1.0)),
    "full covariance": tabular(normal_full(2, 0.5, 1.0, 6.0, 2.0)),
    "mixture": tabular(normal_mixture(1, 0.0, 0.5, 3.0, 1.0, 2.0, num_components=2)),
    "autoregressive": tabular(autoregressive_normal(1, 1, 0.0, 0.5, 4.0, 4.0, 2.0)),
    "streams": tabular(streams(poisson(0, LEVELS, 1.0), normal(0, 0.0, 0.5, 3.0, 1.0))),
    "durations": TabularHSMM(
        2, categorical(3, STRENGTH), free_durations(3, torch.tensor([1.0, 2.0, 3.0]))
    ),
    "second order": TabularSecondOrderHMM(2, categorical(3, STRENGTH)),
    "factorial": TabularFactorialHMM((2, 2), categorical(3, 1.5)),
    "continuous time": TabularContinuousTimeHMM(2, categorical(3, STRENGTH), 1.5, 2.0, 2.0),
    "gamma": tabular(gamma(0)),
    "sticky HDP": StickyHDPHMM(3, categorical(3, 1.5), 3.0, 3.0, 3.0),
    "dense": DenseHMM(2, 3, 2),
    "regression": RegressionHMM(
        2, regression(Poisson, prior_scale=1.0, rate=[0, 1]), [0, 1], prior_scale=1.0
    ),
    "hierarchical": subjects,
}

# One sample of each chain, all of which begin at samples of the prior
ONE: dict[str, Any] = {
    "num_chains": CHAINS, "num_samples": 1, "start": from_prior, "progress": False
}  # fmt: skip


def by_gibbs(module: Any, data: Sequences, values: Tensor, **options: Any) -> dict[str, Tensor]:
    """Gibbs sampling."""
    options |= ONE | {"num_chains": CHAINS * len(values), "values": values}
    return fit_gibbs(module, data, warmup=150, **options).samples()


class OfChains(Messenger):
    """Observations ``(C, N, T, *E)`` for C chains, which differ between these."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, message: Any) -> None:
        if message["name"] == "x" and message["fn"].batch_shape[0] == len(self.values):
            message["value"] = self.values


def by_hmc(model: Any, data: Sequences, values: Tensor) -> dict[str, Tensor]:
    """Hamiltonian Monte Carlo, whose tuning is common to all data sets of a batch."""
    joint = MarginalModel(model) if isinstance(model, HMMModule) else model
    joint = OfChains(values.repeat_interleave(CHAINS, 0))(joint)
    options = ONE | {"num_chains": CHAINS * len(values)}
    return fit_mcmc(joint, data, warmup=80, **options).samples()


def by_svi(module: Any, data: Sequences, guide: Any) -> dict[str, Tensor]:
    """A normal guide in unconstrained coordinates."""
    model = MarginalModel(module)
    options: dict[str, Any] = {"num_iterations": 300, "learning_rate": 0.05, "progress": False}
    return fit_svi(model, guide(model), data, **options).samples(CHAINS)


def by_laplace(module: Any, data: Sequences) -> dict[str, Tensor]:
    """The normal approximation at the maximum of the joint density of parameters and data."""
    information = fit_em(module, data, restarts=4, progress=False).information(data)
    root = torch.linalg.cholesky(information.matrix)
    u = torch.linalg.solve_triangular(root.mT, torch.randn(len(root), CHAINS).double(), upper=True)
    return {name: value.detach() for name, value in information.values_at(u.mT).items()}


TOP = 2.8  # of the panels of the picture
APPROXIMATED = ["poisson", "categorical"]
SAMPLERS: dict[str, tuple[Any, list[str]]] = {
    "gibbs": (by_gibbs, [name for name in MODELS if MODELS[name] is not subjects]),
    "hmc": (by_hmc, list(MODELS)),
    "tempered gibbs": (
        partial(by_gibbs, num_temperatures=3), ["poisson", "mixture", "categorical"]
    ),
    "svi, independent": (partial(by_svi, guide=AutoNormal), APPROXIMATED),
    "svi, full": (partial(by_svi, guide=AutoMultivariateNormal), APPROXIMATED),
    "laplace": (by_laplace, APPROXIMATED),
}  # fmt: skip


def measure(sampler: str, model: str, count: int, seed: int = 0) -> dict[str, Any]:
    """One sampler of one model."""
    pyro.set_rng_seed(seed)
    begin = time.process_time()
    like = REGRESSORS if model == "regression" else TIMES
    together = 1 if SAMPLERS[sampler][1] is APPROXIMATED else 25
    found = calibrate(MODELS[model], SAMPLERS[sampler][0], like, count, together)
    values = found.p_values(BINS)
    return {
        "sampler": sampler, "model": model, "data_sets": count, "seed": seed,
        "together": together,
        "p": round(min(1.0, min(values.values()) * len(values)), 4),
        "histograms": {
            name: (ranks * BINS // (CHAINS + 1)).bincount(minlength=BINS).tolist()
            for name, ranks in found.ranks.items()
        },
        "seconds": round(time.process_time() - begin, 1),
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> None:
    """Ranks of the worst statistic of each sampler of each model, and where 99 % of bars are."""
    plt, columns = pyplot(), 7
    order = list(SAMPLERS)
    rows = sorted(rows, key=lambda row: order.index(row["sampler"]))
    lines = -(-len(rows) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(10, 1.9 * lines + 0.8), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for panel in axes.flat[len(rows) :]:
        panel.set_axis_off()
    for row, panel in zip(rows, axes.flat):
        name, counts = min(
            row["histograms"].items(), key=lambda item: stats.chisquare(item[1]).pvalue
        )
        expected = row["data_sets"] / BINS
        low, high = stats.binom.interval(0.99, row["data_sets"], 1 / BINS)
        panel.axhspan(low / expected, high / expected, color="lightgray", zorder=0)
        colour = "tab:red" if row["p"] < 0.01 else "tab:blue"
        heights = [count / expected for count in counts]
        panel.bar(range(BINS), heights, 0.9, color=colour)
        for place, height in enumerate(heights):
            if height > TOP:
                panel.text(place + 0.6, TOP, f"{height:.1f}", va="top", fontsize=8)
        title = row["sampler"].replace("gibbs", "Gibbs").replace("hmc", "HMC")
        title = title.replace("svi", "SVI").replace("laplace", "Laplace")
        what = "log density" if name == "lp" else name.split(".")[-1]
        panel.set_title(f"{title}\n{row['model']}\n{what}", fontsize=8)
        panel.set(xticks=[0, BINS - 1], xticklabels=["low", "high"], ylim=(0, TOP))
    figure.supxlabel("rank of the true value among the samples, in eight bins", fontsize=10)
    figure.supylabel("data sets in the bin / expected number", fontsize=10)
    plain = plt.Rectangle((0, 0), 1, 1, color="tab:blue"), "p at least 0.01"
    wrong = plt.Rectangle((0, 0), 1, 1, color="tab:red"), "p below 0.01: not calibrated"
    bounds = plt.Rectangle((0, 0), 1, 1, color="lightgray"), "99 % of bars, if calibrated"
    figure.legend(*zip(plain, wrong, bounds), loc="outside upper center", ncols=3)
    save(figure, "calibration")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", choices=list(SAMPLERS), action="append")
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two data sets; nothing is written")
    parser.add_argument("--draw", action="store_true", help="only redraw the written results")
    options = parser.parse_args()
    if options.quick:
        measure("gibbs", "categorical", 2)
        measure("hmc", "hierarchical", 2)
        return
    for sampler in [] if options.draw else options.sampler or SAMPLERS:
        for model in options.model or SAMPLERS[sampler][1]:
            found = measure(sampler, model, options.count, options.seed)
            print({name: part for name, part in found.items() if name != "histograms"}, flush=True)
            key = sampler, model
            kept = [row for row in earlier("calibration") if (row["sampler"], row["model"]) != key]
            write("calibration", [*kept, found])
    draw(earlier("calibration"))


if __name__ == "__main__":
    main()
