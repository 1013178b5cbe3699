"""Simulation-based calibration: ranks of the truth among samples of its posterior are uniform.

Talts, Betancourt, Simpson, Vehtari and Gelman (2018). For each model, parameters are sampled from
the prior, data from the parameters, and from the posterior of these data one sample of each of
fifteen independent chains that begin at samples of the prior. If the sampler is right, the rank of
the truth among them is uniform on 0 to 15. The p-value is that of a chi-square test in eight bins,
the smallest one over the statistics times their number (Bonferroni). The statistic of each
parameter is a weighted sum of its entries, and the log joint density is a further one.
``--sampler`` and ``--model`` run one of them and add to ``calibration.json``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import pyro
import torch
from common import earlier, write
from pyro.distributions import Dirichlet, Gamma, Normal
from scipy import stats
from torch import Tensor

from pyrohmm import (
    HMM,
    DenseHMM,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    StickyHDPHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    autoregressive_normal,
    bernoulli,
    categorical,
    fit_gibbs,
    fit_mcmc,
    free_durations,
    gamma,
    normal,
    normal_full,
    normal_mixture,
    poisson,
    sticky,
)
from pyrohmm.infer.starts import from_prior

CHAINS, BINS = 15, 8
LENGTHS = torch.tensor([12, 7, 1])
STRENGTH = torch.tensor([[4.0, 1.0, 1.0], [1.0, 1.0, 3.0]])


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


MODELS: dict[str, Callable[[], Any]] = {
    "categorical": lambda: tabular(categorical(3, STRENGTH)),
    "bernoulli": lambda: tabular(bernoulli(2, 1.5, 2.0)),
    "poisson": lambda: tabular(poisson(0, torch.tensor([2.0, 8.0]), 1.0)),
    "normal": lambda: tabular(normal(0, torch.tensor([-1.0, 1.0]), 0.5, 3.0, 1.0)),
    "full covariance": lambda: tabular(normal_full(2, 0.5, 1.0, 6.0, 2.0)),
    "mixture": lambda: tabular(normal_mixture(1, 0.0, 0.5, 3.0, 1.0, 2.0, num_components=2)),
    "autoregressive": lambda: tabular(autoregressive_normal(1, 1, 0.0, 0.5, 4.0, 4.0, 2.0)),
    "durations": lambda: TabularHSMM(
        2, categorical(3, STRENGTH), free_durations(3, torch.tensor([1.0, 2.0, 3.0]))
    ),
    "second order": lambda: TabularSecondOrderHMM(2, categorical(3, STRENGTH)),
    "gamma": lambda: tabular(gamma(0)),
    "sticky HDP": lambda: StickyHDPHMM(3, categorical(3, 1.5), 3.0, 3.0, 3.0),
    "dense": lambda: DenseHMM(2, 3, 2),
    "hierarchical": lambda: subjects,  # by HMC
}
SAMPLERS = ("gibbs", "hmc", "tempered gibbs")


def model_of(module: Any) -> Any:
    """The Pyro model of a module; a model as it is."""
    return module if module is subjects else MarginalModel(module)


def simulated(module: Any) -> tuple[dict[str, Tensor], Sequences]:
    """Parameters of the prior by name, and data of them."""
    placeholder = Sequences(torch.zeros(len(LENGTHS), int(LENGTHS.max())), LENGTHS)
    given, prefix = (placeholder, "") if module is subjects else (LENGTHS, "module.")
    with torch.no_grad():
        trace = pyro.poutine.trace(module).get_trace(given)
        values = trace.nodes["_RETURN"]["value"].sample()
    truth = {f"{prefix}{name}": trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    truth = {name: value for name, value in truth.items() if name != "subjects"}
    return truth, Sequences(values, LENGTHS)


def sampled(sampler: str, module: Any, data: Sequences) -> Any:
    """One sample of each chain, and its log joint density."""
    options: dict[str, Any] = {"num_chains": CHAINS, "num_samples": 1, "progress": False}
    if sampler == "hmc":
        if module is subjects:
            with torch.no_grad(), pyro.plate("chains", CHAINS, dim=-2):
                nodes = pyro.poutine.trace(subjects).get_trace(data).nodes
            start = {
                name: nodes[name]["value"] for name in ("transition", "mean", "between", "level")
            }
            start = {n: v if n == "level" else v.squeeze(1) for n, v in start.items()}
        else:
            first = from_prior(module, data, CHAINS)
            start = {f"module.{name}": value.squeeze(1) for name, value in first.items()}
        return fit_mcmc(model_of(module), data, warmup=80, start=start, **options)
    if sampler == "tempered gibbs":
        options["num_temperatures"] = 3
    return fit_gibbs(module, data, warmup=150, start=from_prior, **options)


def ranks_of(sampler: str, model: str, count: int) -> tuple[list[str], Tensor]:
    """Names of statistics, and ranks ``(count, statistics)`` of the truth among samples."""
    rows = []
    with torch.random.fork_rng():  # what the prior fixes has no rank; a sampler that is stuck has
        first, second = (simulated(MODELS[model]())[0] for _ in range(2))
    free = [site for site in first if not torch.equal(first[site], second[site])]
    for _ in range(count):
        module = MODELS[model]()
        truth, data = simulated(module)
        fit = sampled(sampler, module, data)
        row = {}
        for site in free:
            weights = torch.arange(1.0, 1 + truth[site].numel()).cos()
            samples = fit.chains[site].reshape(CHAINS, -1) @ weights
            row[site] = int((samples < truth[site].flatten() @ weights).sum())
        draws = PosteriorDraws(
            model_of(module), {n: v[None, None].detach() for n, v in truth.items()}
        )
        evidence = draws.map(data, lambda hmm, x=data.values: hmm.log_prob(x).sum(-1).double())
        lp = evidence + draws.log_prior(data)
        row["lp"] = int((fit.stats["lp"].flatten() < lp.flatten()).sum())
        rows.append(row)
    names = list(rows[0])
    return names, torch.tensor([[row[name] for name in names] for row in rows])


def measure(sampler: str, model: str, count: int) -> dict[str, Any]:
    """One sampler of one model."""
    pyro.set_rng_seed(0)
    begin = time.process_time()
    names, ranks = ranks_of(sampler, model, count)
    histograms = {
        name: torch.bincount(column * BINS // (CHAINS + 1), minlength=BINS).tolist()
        for name, column in zip(names, ranks.T)
    }
    least = min(stats.chisquare(each).pvalue for each in histograms.values())
    return {
        "sampler": sampler, "model": model, "data_sets": count,
        "p": round(min(1.0, float(least) * len(names)), 4), "histograms": histograms,
        "seconds": round(time.process_time() - begin, 1),
    }  # fmt: skip


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", choices=SAMPLERS, action="append")
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="two data sets; nothing is written")
    options = parser.parse_args()
    if options.quick:
        measure("gibbs", "categorical", 2)
        measure("hmc", "hierarchical", 2)
        return
    for sampler in options.sampler or SAMPLERS:
        for model in options.model or MODELS:
            if model == "hierarchical" and sampler != "hmc":
                continue
            found = measure(sampler, model, options.count)
            print(
                {name: value for name, value in found.items() if name != "histograms"}, flush=True
            )
            kept = [
                row
                for row in earlier("calibration")
                if (row["sampler"], row["model"]) != (sampler, model)
            ]
            write("calibration", [*kept, found])


if __name__ == "__main__":
    main()
