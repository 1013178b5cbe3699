"""The emission families in scipy's words; they share no code with the package but its builders.

A case has a name and a space for each parameter, ``values(rng, M)`` and ``sample(rng, K)``, and two
densities: ``each(parameters, values)`` ``(M, K)``, and ``prior(parameters, name)``, of one
parameter given the others. NaN components are missing. Everything is NumPy in float64.
"""

from typing import ClassVar

import numpy as np
import pyro
import torch
from scipy import stats

from pyrohmm import (
    bernoulli,
    categorical,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    poisson,
    streams,
    tied,
    von_mises,
)

STATES = 3


def sum_known(scores, values):
    """Sum over the components ``(M, K, D)`` that are known."""
    return np.where(np.isnan(values)[:, None], 0.0, scores).sum(-1)


def random_simplex(rng, shape):
    return rng.dirichlet(np.ones(shape[-1]) * 2, size=shape[:-1])


def random_covariance(rng, batch, dim):
    root = rng.normal(size=(*batch, dim, dim))
    return root @ np.swapaxes(root, -1, -2) + np.eye(dim) / 2


class Symbols:
    """Categorical, four symbols."""

    supports: ClassVar = {"probs": "simplex"}
    strength = np.array([1.5, 2.0, 1.1, 3.0])

    def family(self):
        return categorical(4, torch.tensor(self.strength))

    def values(self, rng, size):
        return rng.integers(4, size=size)

    def sample(self, rng, states):
        return {"probs": random_simplex(rng, (states, 4))}

    def each(self, found, values):
        known = ~np.isnan(values.astype(float))
        picked = np.log(found["probs"]).T[np.where(known, values, 0).astype(int)]
        return np.where(known[:, None], picked, 0.0)

    def prior(self, found, name):
        return sum(stats.dirichlet.logpdf(row, self.strength) for row in found["probs"])


class Bits:
    """Two zeros or ones."""

    supports: ClassVar = {"probs": "unit"}

    def family(self):
        return bernoulli(2, torch.tensor([1.5, 2.0]), 3.0)

    def values(self, rng, size):
        return rng.integers(2, size=(size, 2)).astype(float)

    def sample(self, rng, states):
        return {"probs": rng.uniform(0.1, 0.9, size=(states, 2))}

    def each(self, found, values):
        filled = np.nan_to_num(values)[:, None]
        return sum_known(stats.bernoulli.logpmf(filled, found["probs"]), values)

    def prior(self, found, name):
        return stats.beta.logpdf(found["probs"], [1.5, 2.0], 3.0).sum()


class Count:
    """Poisson numbers."""

    supports: ClassVar = {"rate": "positive"}
    shape = ()

    def family(self):
        return poisson(concentration=2.5, rate=0.3)

    def values(self, rng, size):
        return rng.poisson(3.0, size=(size, *self.shape)).astype(float)

    def sample(self, rng, states):
        return {"rate": rng.uniform(0.5, 6.0, size=(states, *self.shape))}

    def each(self, found, values):
        wide = values.reshape(len(values), -1)
        scores = stats.poisson.logpmf(
            np.nan_to_num(wide)[:, None], found["rate"].reshape(len(found["rate"]), -1)
        )
        return sum_known(scores, wide)

    def prior(self, found, name):
        return stats.gamma.logpdf(found["rate"], 2.5, scale=1 / 0.3).sum()


class Counts(Count):
    """Pairs of Poisson numbers."""

    shape = (2,)

    def family(self):
        return poisson(2, concentration=torch.tensor([2.5, 2.5]), rate=0.3)


class Number:
    """Normal numbers."""

    supports: ClassVar = {"variance": "positive", "loc": "real"}
    shape = ()
    centre, weight, strength, rate = 0.5, 0.7, 1.8, 1.3

    def family(self):
        return normal(0, self.centre, self.weight, self.strength, self.rate)

    def values(self, rng, size):
        return rng.normal(1.0, 1.5, size=(size, *self.shape))

    def sample(self, rng, states):
        shape = (states, *self.shape)
        return {"variance": rng.uniform(0.5, 2.0, size=shape), "loc": rng.normal(size=shape)}

    def wide(self, found):
        return np.broadcast_to(found["variance"], found["loc"].shape)

    def each(self, found, values):
        values = values.reshape(len(values), -1)
        states = len(found["loc"])
        scores = stats.norm.logpdf(
            np.nan_to_num(values)[:, None],
            found["loc"].reshape(states, -1),
            np.sqrt(self.wide(found)).reshape(states, -1),
        )
        return sum_known(scores, values)

    def prior(self, found, name):
        if name == "variance":
            density = stats.invgamma(self.strength, scale=self.rate)
            return density.logpdf(found["variance"]).sum()
        spread = np.sqrt(self.wide(found) / self.weight)
        return stats.norm.logpdf(found["loc"], self.centre, spread).sum()


class Plane(Number):
    """Normal vectors of independent components."""

    shape = (2,)
    centre, rate = np.array([0.5, -0.5]), np.array([1.3, 0.4])

    def family(self):
        return normal(
            2, torch.tensor(self.centre), self.weight, self.strength, torch.tensor(self.rate)
        )


class Ball(Number):
    """Normal vectors with one variance."""

    shape = (2,)

    def family(self):
        return normal_spherical(2, self.centre, self.weight, self.strength, self.rate)

    def sample(self, rng, states):
        return {
            "variance": rng.uniform(0.5, 2.0, size=states),
            "loc": rng.normal(size=(states, 2)),
        }

    def wide(self, found):
        return np.broadcast_to(found["variance"][:, None], found["loc"].shape)


class Angles:
    """Pairs of angles."""

    supports: ClassVar = {"concentration": "positive", "loc": "real"}
    centre, weight, strength, rate = np.array([0.5, 3.0]), 0.7, 1.8, 1.3

    def family(self):
        return von_mises(2, torch.tensor(self.centre), self.weight, self.strength, self.rate)

    def values(self, rng, size):
        return rng.normal(1.0, 2.5, size=(size, 2))

    def sample(self, rng, states):
        shape = (states, 2)
        return {
            "concentration": rng.uniform(0.5, 4.0, size=shape),
            "loc": rng.uniform(-3.0, 3.0, size=shape),
        }

    def each(self, found, values):
        filled = np.nan_to_num(values)[:, None]
        scores = stats.vonmises.logpdf(filled, found["concentration"], found["loc"])
        return sum_known(scores, values)

    def prior(self, found, name):
        if name == "concentration":
            return stats.gamma.logpdf(found[name], self.strength, scale=1 / self.rate).sum()
        kappa = self.weight * found["concentration"]
        return stats.vonmises.logpdf(found["loc"], kappa, self.centre).sum()


class Full:
    """Normal vectors with a covariance in each state."""

    supports: ClassVar = {"covariance": "covariance", "loc": "real"}
    centre, weight, degrees = np.array([0.5, -0.5]), 0.7, 4.5
    scale = np.array([[1.0, 0.3], [0.3, 2.0]])

    def family(self, build=normal_full):
        return build(
            2, torch.tensor(self.centre), self.weight, self.degrees, torch.tensor(self.scale)
        )

    def values(self, rng, size):
        return rng.normal(size=(size, 2)) @ np.array([[1.0, 0.7], [0.0, 1.0]])

    def sample(self, rng, states):
        return {
            "covariance": random_covariance(rng, (states,), 2),
            "loc": rng.normal(size=(states, 2)),
        }

    def wide(self, found):
        return np.broadcast_to(found["covariance"], (len(found["loc"]), 2, 2))

    def each(self, found, values):
        columns = [
            stats.multivariate_normal.logpdf(values, loc, matrix).reshape(len(values))
            for loc, matrix in zip(found["loc"], self.wide(found))
        ]
        return np.stack(columns, 1)

    def prior(self, found, name):
        if name == "covariance":
            matrices = found["covariance"].reshape(-1, 2, 2)
            return sum(stats.invwishart.logpdf(m, self.degrees, self.scale) for m in matrices)
        return sum(
            stats.multivariate_normal.logpdf(loc, self.centre, matrix / self.weight)
            for loc, matrix in zip(found["loc"], self.wide(found))
        )


class Shared(Full):
    """Normal vectors with one covariance for all states."""

    def family(self):
        return super().family(normal_tied)

    def sample(self, rng, states):
        return {"covariance": random_covariance(rng, (), 2), "loc": rng.normal(size=(states, 2))}


class Mixture(Number):
    """Mixtures of two normal vectors; ``each`` is of the components, as the M-step sees it."""

    supports: ClassVar = {"weights": "simplex", "variance": "positive", "loc": "real"}

    def family(self):
        return normal_mixture(
            2, self.centre, self.weight, self.strength, self.rate, 1.4, num_components=2
        )

    def values(self, rng, size):
        return rng.normal(1.0, 1.5, size=(size, 2))

    def sample(self, rng, states):
        return {
            "weights": random_simplex(rng, (states, 2)),
            "variance": rng.uniform(0.5, 2.0, size=(states, 2, 2)),
            "loc": rng.normal(size=(states, 2, 2)),
        }

    def each_component(self, found, values):
        """Log-density ``(M, K, C)`` of value and component."""
        scores = stats.norm.logpdf(
            np.nan_to_num(values)[:, None, None], found["loc"], np.sqrt(found["variance"])
        )
        known = ~np.isnan(values)[:, None, None]
        return np.where(known, scores, 0.0).sum(-1) + np.log(found["weights"])

    def each(self, found, values):
        return np.logaddexp.reduce(self.each_component(found, values), -1)

    def prior(self, found, name):
        if name == "weights":
            return sum(stats.dirichlet.logpdf(row, [1.4, 1.4]) for row in found["weights"])
        return super().prior(found, name)


def inside(found, begin):
    return {n.removeprefix(begin): v for n, v in found.items() if n.startswith(begin)}


class Several:
    """A symbol, a count and a plane, joined."""

    parts = (Symbols(), Count(), Plane())

    def __init__(self):
        self.supports = {
            f"parts.{i}.{name}": space
            for i, part in enumerate(self.parts)
            for name, space in part.supports.items()
        }

    def family(self):
        return streams(*(part.family() for part in self.parts))

    def values(self, rng, size):
        return np.column_stack([part.values(rng, size) for part in self.parts]).astype(float)

    def sample(self, rng, states):
        return {
            f"parts.{i}.{name}": value
            for i, part in enumerate(self.parts)
            for name, value in part.sample(rng, states).items()
        }

    def each(self, found, values):
        pieces = values[:, 0], values[:, 1], values[:, 2:]
        return sum(
            part.each(inside(found, f"parts.{i}."), piece)
            for i, (part, piece) in enumerate(zip(self.parts, pieces))
        )

    def prior(self, found, name):
        _, i, last = name.split(".")
        return self.parts[int(i)].prior(inside(found, f"parts.{i}."), last)


class Sharing(Ball):
    """States 0 and 2 share an emission."""

    index = np.array([0, 1, 0])
    supports: ClassVar = {"part.variance": "positive", "part.loc": "real"}

    def family(self):
        return tied(super().family(), self.index.tolist())

    def sample(self, rng, states):
        return {f"part.{name}": value for name, value in super().sample(rng, 2).items()}

    def each(self, found, values):
        return super().each(inside(found, "part."), values)[:, self.index]

    def prior(self, found, name):
        return super().prior(inside(found, "part."), name.removeprefix("part."))


CASES = {
    "symbols": Symbols(),
    "bits": Bits(),
    "count": Count(),
    "counts": Counts(),
    "number": Number(),
    "plane": Plane(),
    "angles": Angles(),
    "ball": Ball(),
    "full": Full(),
    "shared": Shared(),
    "mixture": Mixture(),
    "several": Several(),
    "sharing": Sharing(),
}


def put(module, found):
    """Make parameters points, with the values ``found``."""
    for name, value in found.items():
        *path, last = name.split(".")
        module.get_submodule(".".join(path)).set_points(**{last: torch.tensor(value)})


def call(module):
    """Its distribution; Pyro's global store, which knows parameters by name, is set aside."""
    with torch.no_grad(), pyro.get_param_store().scope():
        return module()
