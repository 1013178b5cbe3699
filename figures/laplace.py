"""Random effects by Laplace's approximation: coverage of intervals, and the integral itself.

Subjects have counts of two states whose rates they share but for a factor of their own; results go
to ``laplace.json``. Seconds are of processor time on one thread.

``coverage``: how many 95 % intervals of simulated data sets hold the truth: the log of a rate,
the probability of staying, and the standard deviation of the effects; and the share of the effects
of subjects within their predictions.

``integral``: log marginal likelihood of one data set at the estimates, by this approximation and
by Gauss-Hermite quadrature with 60 nodes for each subject.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pyro
import torch
from common import arguments, write
from pyro.distributions import Normal
from torch.distributions import Poisson, constraints

from pyrohmm import HMM, Sequences, fit_laplace

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
        "effects": inside / max(num_fits - failed, 1),
        "without": failed,
        "seconds_a_fit": (time.process_time() - start_time) / num_fits,
    }


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
    return {"part": "integral", "laplace": fit.log_marginal, "quadrature": exact}


def main() -> None:
    """Run both parts and write their results."""
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    found = [integral(), coverage(2 if options.quick else 200)]
    if options.quick:
        print(found)
    else:
        write("laplace", found)


if __name__ == "__main__":
    main()
