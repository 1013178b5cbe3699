"""Optima that EM reaches from one start, by default, and from eight restarts.

Twenty problems each of symbols and of normal numbers, of a thousand steps, with two to five states
that overlap; the best is that of thirty restarts. Run ``python figures/starts.py``; ``--quick``
takes three problems of each.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import pyro
import torch

from pyrohmm import Sequences, TabularHMM, categorical, fit_em, normal

WAYS = {"one start": {"restarts": 1}, "default": {}, "eight restarts": {"restarts": 8}}
NEAR = 1.0  # nats


def paths(rng, num_states, stay):
    """A thousand steps in 1, 5 or 20 sequences."""
    num = int(rng.choice([1, 5, 20]))
    chain = stay * np.eye(num_states)
    chain += (1 - stay) * rng.dirichlet(np.ones(num_states), size=num_states)
    states = np.zeros((num, 1000 // num), int)
    states[:, 0] = rng.integers(num_states, size=num)
    for t in range(1, states.shape[1]):
        states[:, t] = [rng.choice(num_states, p=chain[z]) for z in states[:, t - 1]]
    return states


def of_symbols(seed):
    rng = np.random.default_rng(200 + seed)
    num_states, num_symbols = int(rng.integers(2, 5)), int(rng.integers(4, 11))
    faces = rng.dirichlet(np.full(num_symbols, 0.7), size=num_states)
    states = paths(rng, num_states, rng.choice([0.3, 0.7, 0.9]))
    values = [[rng.choice(num_symbols, p=faces[z]) for z in row] for row in states]
    return sequences(values), lambda: TabularHMM(num_states, categorical(num_symbols))


def of_numbers(seed):
    rng = np.random.default_rng(300 + seed)
    num_states, dim = int(rng.integers(2, 6)), int(rng.integers(1, 4))
    mean = 1.5 * rng.normal(size=(num_states, dim))
    scale = rng.uniform(0.5, 1.5, size=(num_states, dim))
    states = paths(rng, num_states, rng.choice([0.3, 0.7, 0.9]))
    values = mean[states] + scale[states] * rng.normal(size=(*states.shape, dim))
    return sequences(values), lambda: TabularHMM(num_states, normal(dim))


def sequences(values):
    values = torch.tensor(np.array(values))
    return Sequences(values, torch.full((len(values),), values.size(1)))


def fitted(make, data, seed, **options):
    """The final loss, and seconds of the processor."""
    pyro.set_rng_seed(seed)
    before = time.process_time()
    loss = fit_em(make(), data, progress=False, **options).losses[-1].item()
    return loss, time.process_time() - before


def compare(problem, count):
    found = {way: [] for way in WAYS}
    best = []
    for seed in range(count):
        data, make = problem(seed)
        if seed == 0:  # compiled functions are loaded
            fitted(make, data, seed)
        best.append(fitted(make, data, 1000 + seed, restarts=30)[0])
        for way, options in WAYS.items():
            found[way].append(fitted(make, data, seed, **options))
    losses = {way: np.array([loss for loss, _ in runs]) for way, runs in found.items()}
    lowest = np.minimum(best, np.min(list(losses.values()), 0))
    return {
        way: {
            "within 1 nat": int((losses[way] < lowest + NEAR).sum()),
            "largest gap": round(float((losses[way] - lowest).max()), 1),
            "seconds": round(sum(seconds for _, seconds in runs), 2),
        }
        for way, runs in found.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    count = 3 if parser.parse_args().quick else 20
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    result = {"problems": count, "nats": NEAR}
    for name, problem in {"symbols": of_symbols, "numbers": of_numbers}.items():
        result[name] = compare(problem, count)
        print(name, result[name], flush=True)
    if count == 20:
        Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
