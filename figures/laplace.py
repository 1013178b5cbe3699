"""Random effects integrated out: coverage of intervals, the integral itself, and sampling.

Subjects have counts of two states whose rates they share but for a factor of their own; results go
to ``laplace.json``. Seconds are of processor time on one thread.

``coverage``: how many 95 % intervals of simulated data sets hold the truth: the log of a rate,
the probability of staying, and the standard deviation of the effects; and the share of the effects
of subjects within their predictions. ``theory`` is what holds of a normal sample of as many
subjects whose effects are seen: of its mean with a normal quantile in place of that of Student's t,
and of its standard deviation, by the chi-squared distribution.

``integral``: log marginal likelihood of one data set at the estimates, by ``fit_laplace`` (nodes of
each subject at its posterior), by Laplace's approximation at its mode, and by Gauss-Hermite
quadrature with 60 nodes of the prior.

``sampled``: estimates and standard errors of one data set beside posterior means and standard
deviations of the same model by ``fit_mcmc``, with weak priors; the spread in its logarithm.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pyro
import torch
from common import arguments, write
from pyro.distributions import Beta, HalfNormal, Normal
from scipy.stats import chi2
from scipy.stats import t as student
from torch.distributions import Poisson, constraints

from pyrohmm import HMM, Sequences, fit_laplace, fit_mcmc
from pyrohmm.infer.marginal import Marginal

LEVEL, STAY, SPREAD = torch.tensor([0.0, 2.0]), 0.9, 0.3


def parts(level: Any, stay: Any, own: Any, lengths: Any) -> HMM:
    """The HMM of subjects at their effects ``(*, N)``."""
    stay = stay.reshape((*stay.shape, 1, 1) if stay.dim() else (1, 1))
    row = torch.cat([stay, 1 - stay], -1)
    matrix = torch.cat([row, row.flip(-1)], -2)
    start = torch.full((2,), 0.5, dtype=matrix.dtype).log()
    return HMM(start, matrix.log(), Poisson((level + own.unsqueeze(-1)).exp()), lengths)


def model(data: Sequences) -> HMM:
    """Counts of two states, with a factor of each subject."""
    level = pyro.param("level", LEVEL.clone())
    stay = pyro.param("stay", torch.tensor(STAY), constraint=constraints.unit_interval)
    spread = pyro.param("spread", torch.tensor(SPREAD), constraint=constraints.positive)
    return observed(level, stay, spread, data)


def with_priors(data: Sequences) -> HMM:
    """The same, with weak priors."""
    level = pyro.sample("level", Normal(0.0, 5.0).expand([2]).to_event(1))
    stay = pyro.sample("stay", Beta(1.0, 1.0))
    spread = pyro.sample("spread", HalfNormal(5.0))
    return observed(level, stay, spread, data)


def observed(level: Any, stay: Any, spread: Any, data: Sequences) -> HMM:
    """Effects and observations of the subjects."""
    with pyro.plate("subjects", len(data)):
        own = pyro.sample("own", Normal(0.0, spread))
        hmm = parts(level, stay, own, data.lengths)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def simulated(seed: int, count: int, num_steps: int) -> tuple[Sequences, torch.Tensor]:
    """Subjects, and their effects."""
    pyro.set_rng_seed(seed)
    own, lengths = SPREAD * torch.randn(count), torch.full((count,), num_steps)
    values = parts(LEVEL, torch.tensor(STAY), own, lengths).sample()
    return Sequences(values, lengths), own


def coverage(num_fits: int, count: int = 40, num_steps: int = 30) -> dict[str, Any]:
    """How many intervals hold the truth."""
    held = {"level": 0, "stay": 0, "spread": 0}
    inside, failed, start_time = 0.0, 0, time.process_time()
    for seed in range(num_fits):
        data, own = simulated(seed, count, num_steps)
        fit = fit_laplace(model, data, ["own"])
        try:
            limits = fit.intervals(data)
        except ValueError:
            failed += 1
            continue
        truths = {"level": LEVEL[0], "stay": torch.tensor(STAY), "spread": torch.tensor(SPREAD)}
        for name, truth in truths.items():
            low, high = (limit.flatten()[0] for limit in limits[name])
            held[name] += int(low < truth < high)
        effect = fit.effects(data)["own"]
        inside += float(((effect.mode - own).abs() < 1.96 * effect.std_error).double().mean())
    return {
        "part": "coverage",
        "fits": num_fits,
        "subjects": count,
        "steps": num_steps,
        "coverage": {name: number / num_fits for name, number in held.items()},
        "theory": theory(count),
        "theory_few": theory(20),
        "effects": inside / max(num_fits - failed, 1),
        "without": failed,
        "seconds_a_fit": (time.process_time() - start_time) / num_fits,
    }


def theory(count: int) -> dict[str, float]:
    """Coverage of such intervals of a normal sample."""
    z, width = student.ppf(0.975, 1e9), math.exp(2 * 1.959964 / math.sqrt(2 * count))
    mean = 2 * student.cdf(z * math.sqrt((count - 1) / count), count - 1) - 1
    spread = chi2.cdf(count * width, count - 1) - chi2.cdf(count / width, count - 1)
    return {"mean": float(mean), "spread": float(spread)}


def sampled(num_samples: int, count: int = 40, num_steps: int = 30) -> dict[str, Any]:
    """Estimates and standard errors by two methods."""
    data, _ = simulated(0, count, num_steps)
    start = {"level": LEVEL, "stay": torch.tensor(STAY), "spread": torch.tensor(SPREAD)}
    fit = fit_laplace(with_priors, data, ["own"], start=start)
    errors = fit.std_errors(data)
    begin = {**start, "own": torch.zeros(count)}
    posterior = fit_mcmc(
        with_priors, data, num_samples=num_samples, num_chains=16, warmup=num_samples, start=begin
    )
    found: dict[str, Any] = {"part": "sampled"}
    for name in start:
        own, draws = fit.parameters[name].double(), posterior.chains[name].double().flatten(0, 1)
        error, draws = errors[name], draws.reshape(len(draws), -1)
        if name == "spread":
            own, error, draws = own.log(), error / own, draws.log()
        found[name] = {
            "estimate": own.tolist(), "std_error": error.tolist(),
            "mean": draws.mean(0).tolist(), "deviation": draws.std(0).tolist(),
        }  # fmt: skip
    return found


def integral(count: int = 40, num_steps: int = 30) -> dict[str, Any]:
    """The marginal likelihood by two methods."""
    data, _ = simulated(0, count, num_steps)
    fit = fit_laplace(model, data, ["own"])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    level, stay, spread = (fit.parameters[name].double() for name in ("level", "stay", "spread"))
    own = spread * torch.tensor(nodes).unsqueeze(-1)
    logs = parts(level, stay, own, data.lengths).log_prob(data.values.double())
    logs = logs + torch.tensor(weights / math.sqrt(2 * math.pi)).log().unsqueeze(-1)
    exact = float(logs.logsumexp(0).sum())
    marginal = Marginal(model, Sequences(data.values.double(), data.lengths), ["own"])
    marginal.widths = None
    leaf = torch.zeros(1, 1, dtype=torch.double, requires_grad=True)
    values = {"level": level.reshape(1, 1, 2), "stay": stay.reshape(1, 1) + leaf,
              "spread": spread.reshape(1, 1)}  # fmt: skip
    approximate = float(marginal(values, leaf, torch.zeros(1).long())[0])
    return {"part": "integral", "nodes": fit.log_marginal, "laplace": approximate,
            "quadrature": exact}  # fmt: skip


def main() -> None:
    """Run all parts and write their results."""
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    found = [integral(), sampled(20 if options.quick else 500)]
    found += [coverage(2 if options.quick else 1000)]
    if options.quick:
        print(found)
    else:
        write("laplace", found)


if __name__ == "__main__":
    main()
