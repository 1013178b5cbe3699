r"""Hamiltonian Monte Carlo of many chains in one batch, tuned by all of them together.

Chains have one step size :math:`\epsilon`, one diagonal metric and one trajectory length, so that a
leapfrog step of all of them is one gradient of a batch: ChEES-HMC (Hoffman, Radul and Sountsov,
2021, An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian Monte Carlo).
Coordinates are ``(C, D)``, D of each of C chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

ASTRAY = 1000.0  # error of the energy, above which a trajectory has diverged
TARGET = 0.651  # acceptance that is best for trajectories whose length is tuned
LONGEST = 256  # leapfrog steps of a trajectory
WINDOWS = (0.05, 0.15, 0.35, 0.65)  # of the warmup, at whose ends the metric is renewed

LogDensity = Callable[[dict[str, Tensor]], Tensor]


class Coordinates:
    """Unconstrained coordinates ``(C, D)`` of latent variables.

    Args:
        supports: Space of each variable, by name.
        values: Of the variables, ``(C, ...)``.
    """

    def __init__(
        self, supports: Mapping[str, constraints.Constraint], values: Mapping[str, Tensor]
    ) -> None:
        self.transforms: Any = {name: biject_to(supports[name]) for name in values}
        free = {name: self.transforms[name].inv(value) for name, value in values.items()}
        self.shapes = {name: value.shape[1:] for name, value in free.items()}
        self.dtype = next(iter(free.values())).dtype

    def free(self, values: Mapping[str, Tensor]) -> Tensor:
        """Coordinates of values."""
        parts = [self.transforms[name].inv(values[name]).flatten(1) for name in self.shapes]
        return torch.cat(parts, -1)

    def constrain(self, free: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Values of coordinates, and the log-determinant ``(C,)`` of the slope of the map."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        values, total = {}, free.new_zeros(len(free))
        for (name, shape), part in zip(self.shapes.items(), free.split(sizes, -1)):
            part = part.reshape(len(free), *shape)
            transform = self.transforms[name]
            values[name] = value = transform(part)
            slope = transform.log_abs_det_jacobian(part, value)
            total = total + slope.reshape(len(free), -1).sum(-1)
        return values, total

    def density(self, log_density: LogDensity, free: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density ``(C,)`` of coordinates and its gradient ``(C, D)``."""
        with torch.enable_grad():
            free = free.detach().requires_grad_()
            values, slope = self.constrain(free)
            total = log_density(values) + slope
            (gradient,) = torch.autograd.grad(total.sum(), free)
        return total.detach(), gradient


@dataclass
class State:
    """Coordinates ``(C, D)`` of the chains, log-density ``(C,)``, gradient ``(C, D)``."""

    place: Tensor
    log_density: Tensor
    gradient: Tensor


@dataclass
class Tuning:
    """Step size, trajectory length and metric of all chains, and how the warmup finds them.

    Attributes:
        scale: ``(D,)``, square root of the diagonal of the inverse mass matrix.
        warmup: Number of trajectories that tune.
        target: Acceptance that the step size aims at.
        done: Trajectories so far.
        log_step: Logarithm of the step size, in units of the scale.
        log_length: That of the longest trajectory.
    """

    scale: Tensor
    warmup: int
    target: float = TARGET
    done: int = 0
    log_step: float = math.log(0.1)
    log_length: float = 0.0
    centre: float = 0.0
    error: float = 0.0
    since: int = 0
    averages: list[float] = field(default_factory=lambda: [math.log(0.1), 0.0])
    square: float = 0.0
    places: list[Tensor] = field(default_factory=list)

    def steps(self) -> tuple[float, int, float]:
        """Step size, number of leapfrog steps, and time of the next trajectory."""
        log_step, log_length = self.log_step, self.log_length
        if self.done >= self.warmup:
            log_step, log_length = self.averages
        step = math.exp(log_step)
        time = _halton(self.done + 1) * math.exp(log_length)
        return step, min(max(1, math.ceil(time / step)), LONGEST), time

    def learn(self, before: State, after: State, moved: Moved) -> None:
        """Adapt to the trajectory that has led from ``before``; ``after`` is where chains are."""
        self.done += 1
        if self.done > self.warmup:
            return
        self.since += 1
        self._learn_step(moved.accepted)
        self._learn_length(before, moved)
        share = (self.since + 1) ** -0.6
        now = (self.log_step, self.log_length)
        self.averages = [a + share * (b - a) for a, b in zip(self.averages, now)]
        self._learn_metric(after)

    def _learn_step(self, accepted: Tensor) -> None:
        """Dual averaging of the harmonic mean over chains (Nesterov, 2009)."""
        mean = 1 / (1 / accepted.double().clamp(min=1e-3)).mean().item()
        self.error += self.target - mean
        self.log_step = self.centre - math.sqrt(self.since) / 0.05 * self.error / (self.since + 10)

    def _learn_length(self, before: State, moved: Moved) -> None:
        """A step of Adam up the slope of the change in the estimator of the expected square."""
        weights = moved.accepted / moved.accepted.sum().clamp(min=1e-6)
        here = before.place / self.scale
        there = torch.where(moved.accepted.unsqueeze(-1) > 0, moved.place / self.scale, here)
        away = there - (weights.unsqueeze(-1) * there).sum(0)
        change = away.square().sum(-1) - (here - here.mean(0)).square().sum(-1)
        slope = moved.time * change * (away * moved.momentum).sum(-1)
        total = (weights * slope).double().nansum().item()
        if not math.isfinite(total):
            return
        self.square = 0.95 * self.square + 0.05 * total**2
        unbiased = self.square / (1 - 0.95**self.since)
        self.log_length += 0.025 * total / (math.sqrt(unbiased) + 1e-12)
        shortest = self.log_step
        self.log_length = min(max(self.log_length, shortest), shortest + math.log(LONGEST))

    def _learn_metric(self, state: State) -> None:
        r"""Renew the metric at the end of a window, from places and gradients within chains.

        :math:`\sqrt{\mathrm{var}(q) / \mathrm{var}(\nabla \log p)}`, which is the variance of a
        normal distribution, and near it long before the chains have spread.
        """
        bounds = [int(self.warmup * part) for part in WINDOWS]
        if self.done >= bounds[-1] or self.done == 1:
            self.places = []
        if not self.places:
            self.places = [torch.zeros_like(state.place, dtype=torch.float64) for _ in range(4)]
            self.places.append(torch.zeros((), dtype=torch.float64))
        for i, part in enumerate((state.place, state.gradient)):
            self.places[2 * i] += part
            self.places[2 * i + 1] += part.double().square()
        self.places[4] += 1
        if self.done not in bounds or self.places[4] < 10:
            return
        count = self.places[4]
        spread = [
            (square / count - (total / count).square()).mean(0).clamp(min=0)
            for total, square in (self.places[:2], self.places[2:4])
        ]
        new = (spread[0] / spread[1]).pow(0.25)
        new = torch.where(new.isfinite() & (new > 0), new, self.scale.double())
        self.scale = new.to(self.scale)
        self.places = []
        if self.done < bounds[2]:  # what has been learnt in other units is void
            self.log_length = self.averages[1] = math.log(1.5)
        self.centre, self.error, self.since, self.square = self.averages[0] + 1.0, 0.0, 0, 0.0


@dataclass
class Moved:
    """The ends of trajectories: place, momentum ``(C, D)``, acceptance ``(C,)``, and their time."""

    place: Tensor
    momentum: Tensor
    accepted: Tensor
    diverged: Tensor
    time: float


def trajectory(
    coordinates: Coordinates,
    log_density: LogDensity,
    state: State,
    scale: Tensor,
    step: float,
    num_steps: int,
) -> tuple[State, Moved]:
    """One trajectory of every chain, which ends where it began if it is not accepted."""
    momentum = torch.randn_like(state.place)
    begin = state.log_density - 0.5 * momentum.square().sum(-1)
    place, gradient, log_density_now = state.place, state.gradient, state.log_density
    lost = torch.zeros_like(begin, dtype=torch.bool)
    momentum = momentum + 0.5 * step * scale * gradient
    for i in range(num_steps):
        place = torch.where(lost.unsqueeze(-1), state.place, place + step * scale * momentum)
        log_density_now, gradient = coordinates.density(log_density, place)
        kick = step if i < num_steps - 1 else 0.5 * step
        momentum = momentum + kick * scale * gradient
        energy = log_density_now - 0.5 * momentum.square().sum(-1)
        lost = lost | ~(begin - energy < ASTRAY)
        momentum = momentum.masked_fill(lost.unsqueeze(-1), 0.0)
    ratio = (energy - begin).masked_fill(lost, -torch.inf)
    accepted = ratio.clamp(max=0.0).exp()
    taken = torch.rand_like(accepted) < accepted
    wide = taken.unsqueeze(-1)
    end = State(
        torch.where(wide, place, state.place),
        torch.where(taken, log_density_now, state.log_density),
        torch.where(wide, gradient, state.gradient),
    )
    return end, Moved(place, momentum, accepted, lost, step * num_steps)


def climb(coordinates: Coordinates, log_density: LogDensity, place: Tensor, count: int) -> State:
    """Steps of Adam up the log-density, from where each chain ends at the best place it has met."""
    leaf = place.clone()
    adam = torch.optim.Adam([leaf], lr=0.1)
    best = State(place, *coordinates.density(log_density, place))
    for _ in range(count):
        value, gradient = coordinates.density(log_density, leaf)
        better = (value > best.log_density) | ~best.log_density.isfinite()
        wide = better.unsqueeze(-1)
        best = State(
            torch.where(wide, leaf.detach(), best.place),
            torch.where(better, value, best.log_density),
            torch.where(wide, gradient, best.gradient),
        )
        leaf.grad = -gradient.nan_to_num(0.0)
        adam.step()
    return best


def _halton(index: int) -> float:
    """The number ``index`` of the Halton sequence of base 2, between 0 and 1."""
    value, share = 0.0, 0.5
    while index:
        value += share * (index % 2)
        index, share = index // 2, share / 2
    return value
