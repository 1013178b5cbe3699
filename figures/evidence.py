"""Evidence of K states: log marginal likelihood by tempered chains, and where it is known exactly.

``short``: ten rolls in three sequences, of one to six states with flat priors. The exact value is
the sum over all paths: states are exchangeable, so that a sum over the partitions of the ten steps
is enough, each with the number of ways to name its states. By Gibbs sampling and by HMC, at twelve
temperatures; in the column ``bridge`` by Bennett's acceptance ratio between neighbours, as
:meth:`SampledFit.marginal_likelihood` has it, with its standard error; in the column ``trapezoid``
by thermodynamic integration, the mean of the works of both neighbours, whose bias is that of the
trapezoidal rule.

``casino``: twenty sequences of fifty rolls of two dice, at sixteen temperatures by Gibbs sampling
and at twelve by HMC; the exact value of one state. Beside it minus half of BIC of the best of ten
fits.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pyro
import torch
from common import arguments, earlier, pyplot, save, write
from scipy.special import gammaln, logsumexp

from pyrohmm import (
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_gibbs,
    fit_mcmc,
    metrics,
)

SHORT = [[0, 0, 1, 1, 2], [1, 0, 0], [2, 2]]
STATES = range(1, 7)


def partitions(size: int, most: int) -> np.ndarray:
    """Blocks of ``size`` steps, numbered in the order of their first steps, ``(M, size)``."""
    rows = [[0]]
    for _ in range(size - 1):
        rows = [[*row, k] for row in rows for k in range(min(max(row) + 2, most))]
    return np.array(rows)


def table_score(counts: np.ndarray) -> np.ndarray:
    """Log marginal probability of counts ``(M, ..., V)`` of rows with flat priors, ``(M,)``."""
    total = gammaln(counts + 1).sum(-1) + gammaln(counts.shape[-1])
    rows = total - gammaln(counts.sum(-1) + counts.shape[-1])
    return rows.reshape(len(counts), -1).sum(-1)


def exact(sequences: list[list[int]], num_states: int, num_symbols: int) -> float:
    """Log marginal likelihood of an HMM with flat priors, by the sum over all paths."""
    lengths = [len(values) for values in sequences]
    paths = np.eye(num_states)[partitions(sum(lengths), num_states)]  # (M, T, K)
    ends = np.cumsum(lengths)
    symbols = np.eye(num_symbols)[np.concatenate(sequences)]  # (T, V)
    first = paths[:, ends - lengths].sum(1)
    inside = np.setdiff1d(np.arange(ends[-1] - 1), ends - 1)
    pairs = np.einsum("mtj,mtk->mjk", paths[:, inside], paths[:, inside + 1])
    emitted = np.einsum("mtk,tv->mkv", paths, symbols)
    used = (paths.sum(1) > 0).sum(-1)
    names = gammaln(num_states + 1) - gammaln(num_states - used + 1)
    return float(logsumexp(sum(map(table_score, (first, pairs, emitted))) + names))


def trapezoid(fit: Any) -> float:
    """Thermodynamic integration over the temperatures of a fit."""
    ahead, back = fit.works.double().unbind(-2)
    return float((ahead.nanmean((0, 1)) - back.nanmean((0, 1))).sum() / 2)


def measured(part: str, num_states: int, sampler: str, quick: bool) -> dict[str, Any]:
    """The estimate of one number of states."""
    pyro.set_rng_seed(0)
    if part == "short":
        data, num_symbols = Sequences.from_list(SHORT), 3
        sizes = {"num_temperatures": 12, "num_chains": 8, "warmup": 150, "num_samples": 200}
    else:
        data, num_symbols = datasets.casino(num_sequences=20, num_steps=50).without_labels(), 6
        sizes = {"num_temperatures": 16, "num_chains": 8, "warmup": 300, "num_samples": 400}
        if sampler == "hmc":
            sizes = {"num_temperatures": 12, "num_chains": 4, "warmup": 80, "num_samples": 100}
    if quick:
        sizes = {"num_temperatures": 3, "num_chains": 2, "warmup": 4, "num_samples": 4}
    pyro.set_rng_seed(num_states)
    module = TabularHMM(num_states, categorical(num_symbols))
    begin = time.process_time()
    if sampler == "gibbs":
        fit = fit_gibbs(module, data, **sizes)
    else:
        fit = fit_mcmc(MarginalModel(module), data, **sizes)
    value, error = fit.marginal_likelihood()
    row = {
        "part": part, "states": num_states, "sampler": sampler, "bridge": value, "error": error,
        "trapezoid": trapezoid(fit), "trips": fit.tuning["round trips"], "exact": None, "bic": None,
        "seconds": round(time.process_time() - begin, 1), **sizes,
    }  # fmt: skip
    if part == "short":
        row["exact"] = exact(SHORT, num_states, 3)
    else:
        best = fit_em(module, data, restarts=10)
        row["bic"] = -metrics.bic(best, data) / 2
        if num_states == 1:
            counts = torch.bincount(data.values.flatten(), minlength=6)
            row["exact"] = float(table_score(counts[None].double().numpy())[0])
    return row


def draw(rows: list[dict[str, Any]]) -> None:
    """Estimates and exact values by the number of states."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for axes, part, title in zip(panels, ("short", "casino"), ("ten rolls", "1,000 rolls")):
        for shift, sampler in ((-0.06, "gibbs"), (0.06, "hmc")):
            found = [row for row in rows if row["part"] == part and row["sampler"] == sampler]
            if not found:
                continue
            places = [row["states"] + shift for row in found]
            errors = [2 * row["error"] for row in found]
            values = [row["bridge"] for row in found]
            label = f"{'Gibbs' if sampler == 'gibbs' else 'HMC'}, ± two standard errors"
            axes.errorbar(places, values, errors, fmt="o", ms=4, capsize=3, label=label)
        known = {row["states"]: row["exact"] for row in rows if row["part"] == part}
        known = {k: value for k, value in known.items() if value is not None}
        axes.plot(list(known), list(known.values()), "kx", zorder=3, label="exact")
        bic = [
            (row["states"], row["bic"])
            for row in rows
            if (row["part"], row["sampler"]) == ("casino", "hmc") == (part, "hmc")
        ]
        if bic:
            axes.plot(*zip(*bic), color="grey", ls="--", label="−BIC / 2 of the fit by EM")
        axes.set(title=title, xlabel="number of states", xticks=list(STATES))
        axes.legend(frameon=False)
    panels[0].set_ylabel("log marginal likelihood, nats")
    save(figure, "evidence")


def main() -> None:
    """All numbers of states, or those of some parts."""
    options = arguments(__doc__, ["short", "casino"])
    rows = [row for row in earlier("evidence") if row["part"] not in options.only]
    if options.draw:
        draw(earlier("evidence"))
        return
    for part in options.only:
        for sampler in ("gibbs", "hmc"):
            for num_states in STATES:
                row = measured(part, num_states, sampler, options.quick)
                assert math.isfinite(row["bridge"])
                print(row, flush=True)
                rows.append(row)
        if not options.quick:
            write("evidence", rows)
            draw(rows)


if __name__ == "__main__":
    main()
