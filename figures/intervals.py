"""Intervals of a fit: their coverage, their time, and the panel data of R's msm.

Parts, in ``intervals.json``; seconds are of processor time on one thread.

``coverage``: HMMs of two states that emit counts, fitted by EM without a prior to simulated data;
how many of the 95 % intervals hold the truth: rates, transitions, and the stationary share of a
state. A fit whose information is singular counts as a miss.

``replicates``: the same data sets and fits; intervals by the parametric bootstrap of 200
replicates, and by the profile of a transition.

``batch``: seconds for 200 replicates, simulated and resampled, beside those of one fit from four
starts.

``size``: seconds for all standard errors, by the number of parameters, after the fit.

``panel``: heart transplants (``cav``, 622 patients, from the R package msm): four states, death
entered at a known time, the others seen at visits through misclassification; estimates and 95 %
limits beside those of msm, which R computes in the same run where it is installed. msm prints wider
limits for a row of two misclassifications than its own covariance gives: that covariance is
compared as well.

``covariates``: the same patients, states as they were seen, and rates that follow the age of the
donor, or the sex and the years since the transplant; coefficients ``(7, P)`` and standard errors of
the slopes, by EM and by msm.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from common import arguments, earlier, write
from torch import Tensor
from torch.distributions import Poisson

from pyrohmm import (
    HMM,
    RegressionHMM,
    Sequences,
    TabularContinuousTimeHMM,
    TabularHMM,
    categorical,
    fit_em,
    formulas,
    freeze,
    normal,
    poisson,
)

RATES = torch.tensor([2.0, 6.0])
MATRIX = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
MSM = """
suppressMessages(library(msm))
cav <- read.csv("{path}")
Q <- rbind(c(0,.148,0,.0171), c(0,0,.202,.081), c(0,0,0,.126), c(0,0,0,0))
E <- rbind(c(0,.1,0,0), c(.1,0,.1,0), c(0,.1,0,0), c(0,0,0,0))
spent <- system.time(fit <- msm(state ~ years, subject=PTNUM, data=cav, qmatrix=Q, ematrix=E,
                                deathexact=4, obstrue=firstobs))
q <- qmatrix.msm(fit); e <- ematrix.msm(fit)
cat("seconds", spent[1] + spent[2], "\\n")
cat("loss", fit$minus2loglik, "\\n")
for (i in 1:4) for (j in 1:4) {{
    if (i != j && Q[i, j] > 0) cat("rate", i, j, q$estimates[i, j], q$L[i, j], q$U[i, j], "\\n")
    if (E[i, j] > 0) cat("seen", i, j, e$estimates[i, j], e$L[i, j], e$U[i, j], "\\n")
}}
errors <- sqrt(diag(solve(0.5 * fit$paramdata$opt$hessian)))
cat("log_odds_errors", errors[6:9], "\\n")
"""


RATES_MSM = """
suppressMessages(library(msm))
cav <- read.csv("{path}")
Q <- rbind(c(0,.148,0,.0171), c(.1,0,.202,.081), c(0,.1,0,.126), c(0,0,0,0))
spent <- system.time(fit <- msm(state ~ years, subject=PTNUM, data=cav, qmatrix=Q, deathexact=4,
                                covariates={formula},
                                control=list(fnscale=4000, reltol=1e-14, maxit=5000)))
cat("seconds", spent[1] + spent[2], "\\n")
cat("loss", sprintf("%.8f", fit$minus2loglik), "\\n")
found <- matrix(fit$estimates, nrow=7)  # the intercepts are those of the mean covariates
found[, 1] <- found[, 1] - found[, -1, drop=FALSE] %*% attr(fit$data$mf, "covmeans")[-1]
cat("coefficients", sprintf("%.8f", t(found)), "\\n")
cat("errors", sprintf("%.8f", t(matrix(sqrt(diag(fit$covmat)), nrow=7)[, -1])), "\\n")
"""


def simulated(count: int, num_steps: int, seed: int) -> Sequences:
    """Counts of a chain of two states that begins in its stationary distribution."""
    pyro.set_rng_seed(seed)
    start = torch.tensor([2 / 3, 1 / 3]).log()
    lengths = torch.full((count,), num_steps)
    return Sequences(HMM(start, MATRIX.log(), Poisson(RATES), lengths).sample(), lengths)


def coverage(num_fits: int, count: int = 10, num_steps: int = 100) -> dict[str, Any]:
    """How many of the intervals of ``num_fits`` simulated fits hold the truth."""
    module = TabularHMM(2, poisson(rate=1e-9))
    start = {"initial": torch.tensor([2 / 3, 1 / 3]), "transition": MATRIX, "emission.rate": RATES}
    held: dict[str, int] = {"rate": 0, "transition": 0, "stationary": 0}
    singular = 0
    start_time = time.process_time()
    for seed in range(num_fits):
        data = simulated(count, num_steps, seed)
        fit = fit_em(module, data, start=start, tolerance=1e-9)
        try:
            information = fit.information(data)
        except ValueError:
            singular += 1
            continue
        limits = information.intervals()
        low, high = information.intervals(of=lambda hmm: hmm.stationary())["of"]
        truths = [
            ("rate", limits["module.emission.rate"], RATES[0], (0,)),
            ("transition", limits["module.transition"], MATRIX[0, 1], (0, 1)),
            ("stationary", (low, high), torch.tensor(2 / 3), (0,)),
        ]
        for name, (below, above), truth, place in truths:
            held[name] += int(below[place] < truth < above[place])
    spent = time.process_time() - start_time
    return {
        "part": "coverage",
        "fits": num_fits,
        "sequences": count,
        "steps": num_steps,
        "level": 0.95,
        "coverage": {name: inside / num_fits for name, inside in held.items()},
        "singular": singular,
        "seconds_a_fit": spent / num_fits,
    }


def replicates(num_fits: int, count: int = 10, num_steps: int = 100) -> dict[str, Any]:
    """How many of the intervals of the bootstrap and of profiles hold the truth."""
    module = TabularHMM(2, poisson(rate=1e-9))
    start = {"initial": torch.tensor([2 / 3, 1 / 3]), "transition": MATRIX, "emission.rate": RATES}
    held = {"rate": 0, "transition": 0, "profile": 0}
    failed = without = 0
    entry = "module.transition[0, 1]"
    start_time = time.process_time()
    for seed in range(num_fits):
        data = simulated(count, num_steps, seed)
        fit = fit_em(module, data, start=start, tolerance=1e-9)
        try:
            found = fit.bootstrap(data)
            profile = fit.intervals(data, of=entry, method="profile")[entry]
        except ValueError:
            without += 1
            continue
        failed += found.failed + found.switched
        limits = found.intervals()
        cases = [
            ("rate", [limit[0] for limit in limits["module.emission.rate"]], RATES[0]),
            ("transition", [limit[0, 1] for limit in limits["module.transition"]], MATRIX[0, 1]),
            ("profile", profile, MATRIX[0, 1]),
        ]
        for name, (low, high), truth in cases:
            held[name] += int(low < truth < high)
    return {
        "part": "replicates",
        "fits": num_fits,
        "coverage": {name: inside / num_fits for name, inside in held.items()},
        "without": without,
        "failed_replicates": failed,
        "seconds_a_fit": (time.process_time() - start_time) / num_fits,
    }


def batch(count: int, num_steps: int) -> dict[str, Any]:
    """Seconds for 200 replicates beside those of a fit; the better of two runs."""
    data, module = simulated(count, num_steps, 0), TabularHMM(2, poisson(rate=1e-9))
    fit = fit_em(module, data, restarts=4, tolerance=1e-9)
    calls: dict[str, Callable[[], Any]] = {
        "fit": lambda: fit_em(module, data, restarts=4),
        "simulated": lambda: fit.bootstrap(data),
        "resampled": lambda: fit.bootstrap(data, parametric=False),
    }
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(2):  # the first run compiles
        for name, call in calls.items():
            start_time = time.process_time()
            call()
            seconds[name] = min(seconds[name], time.process_time() - start_time)
    return {"part": "batch", "sequences": count, "steps": num_steps, "seconds": seconds}


def size(num_states: int, dim: int) -> dict[str, Any]:
    """Seconds for all standard errors of a normal HMM."""
    pyro.set_rng_seed(0)
    states = torch.randint(num_states, (20, 100)).sort(-1).values
    values = states.unsqueeze(-1) * 3.0 + torch.randn(20, 100, dim)
    data = Sequences(values, torch.full((20,), 100), labels=states)
    fit = fit_em(TabularHMM(num_states, normal(dim)), data)
    fit = fit_em(TabularHMM(num_states, normal(dim)), data.without_labels(), start=fit.parameters,
                 tolerance=1e-10)  # fmt: skip
    start_time = time.process_time()
    information = fit.information(data.without_labels())
    information.std_errors()
    spent = time.process_time() - start_time
    return {"part": "size", "parameters": len(information.labels), "seconds": spent}


def patients(path: Path) -> Sequences:
    """Visits: the first state is true, deaths are known, all else is what was seen."""
    people: dict[str, list[tuple[float, int]]] = {}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            visits = people.setdefault(row["PTNUM"], [])
            visits.append((float(row["years"]), int(row["state"]) - 1))
    seen = [torch.tensor([state for _, state in visits]) for visits in people.values()]
    times = [torch.tensor([year for year, _ in visits]) for visits in people.values()]
    known = [torch.where(states == 3, 3, -1) for states in seen]
    for states, labels in zip(seen, known):
        labels[0] = states[0]
    data = Sequences.from_list(seen, times=times, labels=known)
    later = data.exists & (torch.arange(data.num_steps) > 0)
    return Sequences(data.values, data.lengths, later, labels=data.labels, times=data.times)


def panel(path: Path) -> list[dict[str, Any]]:
    """Rates and misclassification by EM with SQUAREM, and by msm."""
    data = patients(path)
    possible = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
    module = TabularContinuousTimeHMM(
        4,
        categorical(4),
        rate_time=1e-6,
        transition_allowed=possible,
        exact_entry=torch.tensor([False, False, False, True]),
        initial_allowed=torch.tensor([True, False, False, False]),
    )
    start = {
        "initial": torch.tensor([1.0, 0.0, 0.0, 0.0]),
        "rates": torch.tensor(
            [[0, 0.148, 0, 0.0171], [0, 0, 0.202, 0.081], [0, 0, 0, 0.126], [0, 0, 0, 0]]
        ),
        "emission.probs": torch.tensor(
            [[0.9, 0.1, 0, 0], [0.1, 0.8, 0.1, 0], [0, 0.1, 0.9, 0], [0, 0, 0, 1]]
        ),
    }
    rows = []
    for _ in range(2):  # the first run compiles
        start_time = time.process_time()
        fit = fit_em(module, data, start=start, tolerance=1e-9, acceleration=True)
        limits = fit.intervals(data)
        spent = time.process_time() - start_time
    evidence = fit.hmm(data).restrict(data.labels).log_prob(data.values).double().sum()
    rows.append({"part": "panel", "by": "pyrohmm", "seconds": spent, "loss": -2 * float(evidence),
                 "iterations": len(fit.losses), **named(fit.parameters, limits)})  # fmt: skip
    odds = fit.information(data).of(log_odds)[1]
    rows[-1]["log_odds_errors"] = odds.tolist()
    if shutil.which("Rscript"):
        rows.append({"part": "panel", "by": "msm", **by_msm(MSM.format(path=path))})
    return rows


def log_odds(hmm: HMM) -> Tensor:
    """Logarithms of odds of the four misclassifications against what is right."""
    logs = hmm.emission.logits
    cells = [(0, 1, 0), (1, 0, 1), (1, 2, 1), (2, 1, 2)]
    return torch.stack([logs[state, seen] - logs[state, right] for state, seen, right in cells])


def named(values: dict[str, Tensor], limits: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Estimate and limits of each number, by the name that msm's output has here."""
    found = {}
    for label, name in (("rate", "module.rates"), ("seen", "module.emission.probs")):
        low, high = limits[name]
        for i, j in ((low.isfinite()) & ~torch.eye(4, dtype=torch.bool)).nonzero().tolist():
            numbers = (values[name], low, high)
            found[f"{label} {i + 1} {j + 1}"] = [float(table[i, j]) for table in numbers]
    return found


def by_covariates(path: Path, formula: str) -> list[dict[str, Any]]:
    """Coefficients of log rates by EM with SQUAREM, and by msm."""
    with path.open() as lines:
        records = list(csv.DictReader(lines))
    names = ("PTNUM", "years", "dage", "sex", "state")
    frame = {name: [float(record[name]) for record in records] for name in names}
    frame["seen"] = [int(state) - 1 for state in frame["state"]]
    design = formulas(frame, rates=formula)
    read = Sequences.from_dataframe(design.table(frame), by="PTNUM", columns="seen", time="years",
                                    covariates=design.names)  # fmt: skip
    data = Sequences(read.values, read.lengths, covariates=read.covariates.double(),
                     times=read.times.double())  # fmt: skip
    possible = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]).bool()
    size = len(design["rates"].indices)
    module = RegressionHMM(
        4,
        categorical(4),
        rates=design["rates"],
        transition_allowed=possible,
        exact_entry=torch.tensor([False, False, False, True]),
    ).double()
    freeze(module, "emission.probs", torch.eye(4).double())
    freeze(module, "initial.coefficients", torch.full((3, 1), -40.0).double())
    start = torch.zeros(7, size).double()
    start[:, 0] = -2.0
    for _ in range(2):  # the first run compiles
        module.transition_predictors.coefficients = start.flatten().clone()
        start_time = time.process_time()
        fit: Any = fit_em(module, data, num_iterations=500, tolerance=1e-11, acceleration=True)
        errors = fit.std_errors(data)["module.rates.coefficients"]
        spent = time.process_time() - start_time
    rows = [{
        "part": "covariates", "formula": formula, "by": "pyrohmm", "seconds": spent,
        "loss": 2 * float(fit.losses[-1]), "iterations": len(fit.losses),
        "coefficients": fit.model.module.rates.coefficients.tolist(),
        "errors": errors.reshape(7, size)[:, 1:].flatten().tolist(),
    }]  # fmt: skip
    if shutil.which("Rscript"):
        script = RATES_MSM.format(path=path, formula=formula)
        rows.append({"part": "covariates", "formula": formula, "by": "msm", **by_msm(script)})
    return rows


def by_msm(script: str) -> dict[str, Any]:
    """What a script in R prints, by name."""
    text = subprocess.run(
        ["Rscript", "-e", script], capture_output=True, text=True, check=True
    ).stdout
    row: dict[str, Any] = {}
    for line in text.splitlines():
        name, *numbers = line.split()
        if name in ("rate", "seen"):
            row[f"{name} {numbers[0]} {numbers[1]}"] = [float(number) for number in numbers[2:]]
        elif name in ("log_odds_errors", "coefficients", "errors"):
            row[name] = [float(number) for number in numbers]
        else:
            row[name] = float(numbers[0])
    return row


def main() -> None:
    """Run all parts and write their results."""
    parts = ["coverage", "replicates", "batch", "size", "panel", "covariates"]
    options = arguments(__doc__, parts, picture=False)
    torch.set_num_threads(1)
    quick, path = options.quick, Path(os.environ.get("PYROHMM_DATA", ".")) / "cav.csv"
    terms = ["~ dage"] if quick else ["~ dage", "~ sex + years"]
    sizes = [(2, 2)] if quick else [(3, 2), (6, 10), (10, 10)]
    shapes = [(4, 20)] if quick else [(10, 100), (100, 100), (100, 1000)]
    run: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "coverage": lambda: [coverage(3 if quick else 1000)],
        "replicates": lambda: [replicates(2 if quick else 1000)],
        "batch": lambda: [batch(*shape) for shape in shapes],
        "size": lambda: [size(*case) for case in sizes],
        "panel": lambda: panel(path) if path.exists() else [],
        "covariates": lambda: [
            row for formula in terms if path.exists() for row in by_covariates(path, formula)
        ],
    }
    found = [row for part in options.only for row in run[part]()]
    if not quick:
        kept = [row for row in earlier("intervals") if row["part"] not in options.only]
        write("intervals", kept + found)


if __name__ == "__main__":
    main()
