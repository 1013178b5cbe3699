"""HMMs of many shapes of batches, with what the oracle reads: log-likelihoods entry by entry."""

import itertools
import zlib
from typing import NamedTuple

import numpy as np
import oracle
import pyro.distributions as dist
import torch

from pyrohmm import HMM


class Symbols:
    """Categorical over four symbols."""

    event_shape = ()

    def draw(self, rng, batch, zeros):
        probs = rng.dirichlet(np.ones(4), size=batch)
        if zeros:
            probs[..., 1] = 0.0
            probs /= probs.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            return (np.log(probs),)

    def values(self, rng, shape):
        return rng.integers(4, size=shape)

    def log_density(self, parameters, value):
        return parameters[0][value]

    def build(self, logits):
        return dist.Categorical(logits=logits)


class Numbers:
    """Normal numbers."""

    event_shape = ()

    def draw(self, rng, batch, zeros):
        return rng.normal(size=batch), rng.uniform(0.5, 2.0, size=batch)

    def values(self, rng, shape):
        return rng.normal(size=shape)

    def log_density(self, parameters, value):
        loc, scale = parameters
        each = -((value - loc) ** 2) / (2 * scale**2) - np.log(scale) - np.log(2 * np.pi) / 2
        return each.sum()

    def build(self, loc, scale):
        return dist.Normal(loc, scale)


class Vectors(Numbers):
    """Vectors of two independent normal numbers."""

    event_shape = (2,)

    def draw(self, rng, batch, zeros):
        return super().draw(rng, (*batch, 2), zeros)

    def values(self, rng, shape):
        return rng.normal(size=(*shape, 2))

    def build(self, loc, scale):
        return dist.Normal(loc, scale).to_event(1)


EMISSIONS = {"symbols": Symbols(), "numbers": Numbers(), "vectors": Vectors()}

LAYOUTS = {  # batch shapes of parameters, lengths, values
    "one sequence": ((), (), ()),
    "one chain for all": ((), (3,), (3,)),
    "restarts": ((2, 1), (3,), (3,)),
    "restarts with values each": ((2, 1), (3,), (2, 3)),
    "restarts with lengths each": ((2, 1), (2, 3), (3,)),
    "parameters for each": ((3,), (3,), (3,)),
    "values many times": ((), (3,), (2, 3)),
}


class Case(NamedTuple):
    emission: str
    layout: str
    num_states: int = 2
    num_steps: int = 3
    transition_per_step: bool = False
    emission_per_step: bool = False
    ragged: bool = False
    missing: bool = False
    zeros: bool = False


class Built(NamedTuple):
    """An HMM, its values with junk where nothing is observed, and what the oracle reads."""

    hmm: HMM
    values: torch.Tensor
    arrays: tuple
    batch: tuple

    @property
    def answer(self):
        return oracle.for_each(oracle.by_paths, *self.arrays)


def log_probs(rng, shape, zeros=False):
    probs = rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])
    if zeros and shape[-1] > 1:
        probs[..., 0] = 0.0
        probs /= probs.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log(probs)


def build(case, junk=None):
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    family = EMISSIONS[case.emission]
    outer, counted, given = LAYOUTS[case.layout]
    size, steps = case.num_states, case.num_steps
    lengths = np.full(counted, steps)
    if case.ragged:
        lengths = rng.integers(1, steps + 1, size=counted)
        lengths.flat[0] = steps  # T is the longest
    observed = rng.random((*counted, steps)) < (0.6 if case.missing else 2.0)
    if case.missing and steps > 1:
        observed.flat[1] = False  # at least this one
    initial = log_probs(rng, (*outer, size), case.zeros)
    transitions = (
        (*outer, steps - 1, size, size) if case.transition_per_step else (*outer, size, size)
    )
    transition = log_probs(rng, transitions, case.zeros)
    batch = (*outer, steps, size) if case.emission_per_step else (*outer, size)
    parameters = family.draw(rng, batch, case.zeros)
    values = family.values(rng, (*given, steps))

    whole = np.broadcast_shapes(outer, counted, given)
    likelihood = np.zeros((*whole, steps, size))
    full = []
    for parameter in parameters:
        if not case.emission_per_step:
            parameter = np.expand_dims(parameter, len(outer))
        full.append(np.broadcast_to(parameter, (*whole, steps, *parameter.shape[len(outer) + 1 :])))
    seen = np.broadcast_to(observed, (*whole, steps))
    every = np.broadcast_to(values, (*whole, steps, *family.event_shape))
    for index in np.ndindex(*whole, steps):
        if seen[index]:
            for k in range(size):
                own = [p[(*index, k)] for p in full]
                likelihood[(*index, k)] = family.log_density(own, every[index])
    matrices = transition if case.transition_per_step else transition[..., None, :, :]

    if junk is not None:
        known = observed & (np.arange(steps) < lengths[..., None])
        values[~np.broadcast_to(known, (*whole, steps))] = junk
    values = torch.as_tensor(values)
    hmm = HMM(
        torch.as_tensor(initial),
        torch.as_tensor(transition),
        family.build(*map(torch.as_tensor, parameters)),
        torch.as_tensor(lengths),
        torch.as_tensor(observed) if case.missing else None,
        transition_per_step=case.transition_per_step,
        emission_per_step=case.emission_per_step,
    )
    return Built(hmm, values, (initial, matrices, likelihood, lengths), whole)


# per step transition, per step emission, ragged, missing, zeros: any two in all four combinations
SWITCHES = [
    (False, False, False, False, False),
    (False, False, True, True, True),
    (True, True, False, False, True),
    (True, True, True, True, False),
    (True, False, False, True, False),
    (False, True, True, False, False),
    (True, False, True, False, True),
    (False, True, False, True, True),
]
SIZES = [(1, 1), (2, 1), (2, 2), (3, 3)]


def cases(emission, layout):
    """T = 2 is also the number of restarts, T = 3 that of sequences: no size tells them apart."""
    for size, switches in itertools.product(SIZES, SWITCHES):
        yield Case(emission, layout, *size, *switches)


def assert_close(actual, expected, case=None, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(
        actual.detach(), torch.as_tensor(np.asarray(expected)).to(actual.dtype),
        rtol=rtol, atol=atol, msg=lambda text: f"{case}\n{text}",
    )  # fmt: skip
