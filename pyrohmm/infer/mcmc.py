r"""``fit_mcmc``: samples of the posterior by Hamiltonian Monte Carlo, all chains as one batch.

Chains have one step size :math:`\epsilon`, one metric and one trajectory length, tuned by all of
them together, so that a leapfrog step of all is one gradient of a batch, as in ChEES-HMC (Hoffman,
Radul and Sountsov, 2021, An adaptive-MCMC scheme for setting trajectory lengths in Hamiltonian
Monte Carlo). The length is that of the largest squared jump for its time (Pasarica and Gelman,
2010): ChEES follows the longest tail. Coordinates are ``(C, D)``, D of each of C chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_kind, names_checked
from .._choices import first_values
from .._imports import imported
from ..data.sequences import Sequences
from ..distributions.sparse import interior
from ..nn.base import HMMModule, in_mode
from .coordinates import Packing, coordinates
from .gradient import near_data
from .models import MarginalModel, exclusive, scale_priors, to_model_device
from .objective import latent_sites, trace_of_batchable
from .parameters import Values, check_start
from .plates import LogJoint, is_log_prior, marks_of, narrow, pieces_of, sequence_plates, wide
from .results import Fit
from .sampled import Chains, Ladder, SampledFit
from .starts import Start, from_prior
from .training import check_model_and_data

ASTRAY = 1000.0  # error of the energy, above which a trajectory has diverged
TARGET = 0.8  # acceptance that the step size aims at
WIDEST = 128  # coordinates, for more of which the metric is diagonal
LONGEST = 256  # leapfrog steps of a trajectory
WINDOWS = (0.05, 0.15, 0.35)  # of the warmup, at whose ends the metric is renewed

LogDensity = Callable[[dict[str, Tensor]], Tensor]
JITTER = 0.05  # standard deviation of starts, in unconstrained coordinates
CLIMB = 200  # steps of gradient ascent before the first trajectory


@dataclass
class State:
    """State of the chains: position ``(C, D)``, log-density ``(C,)``, gradient ``(C, D)``."""

    place: Tensor
    log_density: Tensor
    gradient: Tensor

    def replaced(self, by: State, where: Tensor) -> State:
        """Replace the state of the chains ``where`` ``(C,)`` by that of ``by``."""
        pairs = zip(vars(by).values(), vars(self).values())
        return State(*(torch.where(where if x.dim() == 1 else where[:, None], x, y)
                       for x, y in pairs))  # fmt: skip


@dataclass
class Tuning:
    """Step size, trajectory length and metric of all chains, and how the warmup finds them.

    Attributes:
        root: ``(R, D, D)``, square root of the inverse mass matrix at each temperature; or of its
            diagonal, ``(R, D)``.
        warmup: Number of trajectories that tune.
        target: Acceptance that the step size aims at.
        done: Trajectories so far.
        log_step: Logarithm of the step size, in units of the root.
        log_length: That of the longest trajectory.
    """

    root: Tensor
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
    sums: Any = 0.0
    products: Any = 0.0
    count: int = 0

    def steps(self) -> tuple[float, int]:
        """Step size, and number of leapfrog steps, of the next trajectory."""
        log_step, log_length = self.log_step, self.log_length
        if self.done >= self.warmup:
            log_step, log_length = self.averages
        step = math.exp(log_step)
        time = _halton(self.done + 1) * math.exp(log_length)
        return step, min(max(1, math.ceil(time / step)), LONGEST)

    def learn(self, before: State, after: State, moved: Moved, chains: Tensor) -> None:
        """Adapt to the trajectory that started at ``before``; ``after`` is the state after it.

        Of all chains, ``chains`` ``(C, R)`` are those at each temperature.
        """
        self.done += 1
        if self.done > self.warmup:
            return
        self.since += 1
        # dual averaging of the mean acceptance over chains (Nesterov, 2009)
        self.error += self.target - moved.accepted.double().mean().item()
        self.log_step = self.centre - math.sqrt(self.since) / 0.05 * self.error / (self.since + 10)
        self._learn_length(before, moved, chains[:, -1])
        share = (self.since + 1) ** -0.6
        now = (self.log_step, self.log_length)
        self.averages = [a + share * (b - a) for a, b in zip(self.averages, now)]
        self._learn_metric(after, chains)

    def _learn_length(self, before: State, moved: Moved, cold: Tensor) -> None:
        """Adam step on the log trajectory length, to increase squared jump distance per time."""
        away, root = moved.place[cold] - before.place[cold], self.root[-1]
        away = away / root if root.dim() == 1 else torch.linalg.solve(root, away.mT).mT
        slope = moved.time * (away * moved.momentum[cold]).sum(-1)
        slope = slope - 0.5 * away.square().sum(-1)
        total = (moved.accepted[cold] * slope).double().nansum().item()
        if not math.isfinite(total):
            return
        self.square = 0.95 * self.square + 0.05 * total**2
        unbiased = self.square / (1 - 0.95**self.since)
        self.log_length += 0.025 * total / (math.sqrt(unbiased) + 1e-12)
        beyond = min(max(self.log_length - self.log_step, 0.0), math.log(LONGEST))
        self.log_length = self.log_step + beyond

    def _learn_metric(self, state: State, chains: Tensor) -> None:
        """Update the metric at the end of a window, from positions and gradients within chains."""
        bounds = [int(self.warmup * part) for part in WINDOWS]
        if self.done > bounds[-1]:
            return
        now = torch.stack([state.place[chains], state.gradient[chains]]).double()  # (2, C, R, D)
        self.sums, self.count = self.sums + now, self.count + 1
        self.products = self.products + summed_products(now, self.root)
        if self.done not in bounds or self.count < 10:
            return
        freedom = len(chains) * (self.count - 1)
        within = self.products - summed_products(self.sums, self.root) / self.count
        places, gradients = within / freedom
        new = metric_root(places, gradients, freedom)
        self.root = torch.where(new.isfinite() & (new != 0), new, self.root.double()).to(self.root)
        self.sums, self.products, self.count = 0.0, 0.0, 0
        if self.done < bounds[-1]:  # what has been learnt in other units is void
            self.log_length = self.averages[1] = math.log(1.5)
        self.centre, self.error, self.since, self.square = self.averages[0] + 1.0, 0.0, 0, 0.0


@dataclass
class Moved:
    """Trajectory ends: position, momentum ``(C, D)``, acceptance ``(C,)``, integration time."""

    place: Tensor
    momentum: Tensor
    accepted: Tensor
    diverged: Tensor
    time: float


class Hamiltonian:
    """Hamiltonian Monte Carlo chains on latent variables, in unconstrained coordinates.

    Args:
        supports: Space of each variable, by name.
        values: Of the variables, ``(C, ...)``.
        log_density: From values by name to their log-density ``(C,)``.
        ladder: Temperatures of the chains.
        target: Acceptance that the step size aims at.

    Attributes:
        state: Where the chains are.
        tuning: What the warmup finds.
    """

    def __init__(
        self,
        supports: Mapping[str, constraints.Constraint],
        values: Mapping[str, Tensor],
        log_density: LogDensity,
        ladder: Ladder,
        target: float = TARGET,
    ) -> None:
        self.ladder, self.log_density = ladder, log_density
        self.packing = Packing.of({name: coordinates(supports[name]) for name in values}, values)
        place = self.free(values)
        self.state = State(place, place.new_empty(0), place)
        root = torch.ones_like(place[: ladder.size])
        root = root.diag_embed() if place.size(1) <= WIDEST else root
        self.tuning = Tuning(root, ladder.warmup, target)

    def free(self, values: Mapping[str, Tensor]) -> Tensor:
        """Unconstrained coordinates ``(C, D)`` of values, off the boundary of their supports."""
        spaces = self.packing.transforms.items()
        return self.packing.flat({n: interior(to.codomain, values[n]) for n, to in spaces})

    def at(self, place: Tensor) -> State:
        """Log-density and gradient at coordinates ``(C, D)``; -inf where a matrix has no root."""
        with torch.enable_grad():
            free = place.detach().requires_grad_()
            values = self.packing.values(free)
            try:  # else the trajectories of all are given up
                total = self.log_density(values) + self.packing.log_volume(free, values)
            except torch.linalg.LinAlgError:
                total = 0 * free.sum(-1) - torch.inf
            (gradient,) = torch.autograd.grad(total.sum(), free)
        return State(place.detach(), total.detach(), gradient)

    def step(self) -> tuple[Moved, int]:
        """A trajectory of every chain, from which warmup learns; and its leapfrog steps."""
        step, leapfrogs = self.tuning.steps()
        before = self.state
        self.state, moved = self.trajectory(step, leapfrogs)
        self.tuning.learn(before, self.state, moved, self.ladder.chains)
        return moved, leapfrogs

    def trajectory(self, step: float, leapfrogs: int) -> tuple[State, Moved]:
        """One Hamiltonian trajectory of every chain, with a Metropolis test at its end."""
        begin, root = self.state, self.tuning.root[self.ladder.rungs.flatten()]
        momentum = torch.randn_like(begin.place)
        energy = start = begin.log_density - 0.5 * momentum.square().sum(-1)
        now, lost = begin, torch.zeros_like(start, dtype=torch.bool)
        momentum = momentum + 0.5 * step * times(root, now.gradient)
        for i in range(leapfrogs):
            place = now.place + step * times(root, momentum)
            now = self.at(torch.where(lost.unsqueeze(-1), begin.place, place))
            kick = step if i < leapfrogs - 1 else 0.5 * step
            momentum = momentum + kick * times(root, now.gradient)
            energy = now.log_density - 0.5 * momentum.square().sum(-1)
            lost = lost | ~(start - energy < ASTRAY)
            momentum = momentum.masked_fill(lost.unsqueeze(-1), 0.0)
        accepted = (energy - start).masked_fill(lost, -torch.inf).clamp(max=0.0).exp()
        end = begin.replaced(now, torch.rand_like(accepted) < accepted)
        return end, Moved(now.place, momentum, accepted, lost, step * leapfrogs)

    def climb(self, place: Tensor, count: int) -> State:
        """Maximise the log-density by Adam; the best position of each chain."""
        leaf = place.clone()
        imported("torch._dynamo")  # an optimizer would, with signals
        adam = torch.optim.Adam([leaf], lr=0.1)
        best = self.at(place)
        for _ in range(count):
            now = self.at(leaf.clone())
            better = (now.log_density > best.log_density) | ~best.log_density.isfinite()
            best = best.replaced(now, better)
            leaf.grad = -now.gradient.nan_to_num(0.0)
            adam.step()
        return best


def times(root: Tensor, vectors: Tensor) -> Tensor:
    """Multiply matrices ``(*, D, D)``, or diagonals ``(*, D)``, by vectors ``(*, D)``."""
    if root.dim() == vectors.dim():
        return root * vectors
    return (root @ vectors.unsqueeze(-1)).squeeze(-1)


def summed_products(vectors: Tensor, like: Tensor) -> Tensor:
    """Outer products of vectors ``(2, C, R, D)`` summed over C; squares if ``like`` is diagonal."""
    form = "pcri,pcri->pri" if like.dim() == 2 else "pcri,pcrj->prij"
    return torch.einsum(form, vectors, vectors)


def metric_root(places: Tensor, gradients: Tensor, freedom: int) -> Tensor:
    r"""Symmetric square root of the inverse mass matrix M for which M cov(gradients) M = cov(q).

    For a normal distribution that is its covariance matrix, of any places at all. Correlations are
    shrunk, the more the fewer degrees of freedom there are.

    Args:
        places: Covariance matrices ``(R, D, D)``, or variances ``(R, D)``, of coordinates.
        gradients: Those of the gradients of the log-density.
        freedom: Degrees of freedom of both.
    """
    if places.dim() == 2:
        return (places / gradients).pow(0.25)
    first, second = (part.diagonal(dim1=-2, dim2=-1) for part in (places, gradients))
    unit = (first / second).pow(0.25).unsqueeze(-1)
    units, eye = unit * unit.mT, torch.eye(unit.size(-2)).to(unit)
    share = eye + (1 - eye) * freedom / (freedom + len(eye))
    inner, outer = places / units * share, gradients * units * share
    root, inverse = _power(outer, 0.5), _power(outer, -0.5)
    return _power(inverse @ _power(root @ inner @ root, 0.5) @ inverse * units, 0.5)


def _power(matrix: Tensor, power: float) -> Tensor:
    """Powers of positive definite matrices; NaN if one is not finite."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(power).unsqueeze(-2)) @ vectors.mT


def _halton(index: int) -> float:
    """The number ``index`` of the Halton sequence of base 2, between 0 and 1."""
    digits = f"{index:b}"  # read from the right
    return int(digits[::-1], 2) / 2 ** len(digits)


@names_checked
@exclusive()
def fit_mcmc(
    model: Callable[..., Any],
    data: Sequences,
    *,
    num_samples: int = 500,
    num_chains: int = 32,
    warmup: int = 500,
    start: Fit | Values | Start | None = None,
    target_accept: float = TARGET,
    num_temperatures: int = 1,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
    name: str | None = None,
) -> SampledFit:
    r"""Sample the posterior :math:`p(\theta \mid x)` by Hamiltonian Monte Carlo of many chains.

    All chains are one batch, in a plate around the model, and tune one step size, trajectory length
    and metric: see :class:`Tuning`. Torch's global source of randomness is used.

    Args:
        model: A Pyro model whose states are summed out, such as :class:`MarginalModel`, and all of
            whose parameters have priors. It must accept dimensions ``(C, 1)`` on the left of every
            latent variable, as for the restarts of :func:`fit_map`.
        data: The sequences.
        num_samples: S, kept of each chain.
        num_chains: C.
        warmup: Trajectories before the first sample, which tune.
        start: A :class:`Fit`, near whose ``values`` all chains begin; or values by name, of that
            shape, or one for each chain, ``(C, ...)``; or ``starts.from_prior``. By default
            gradient ascent from samples of the prior, and all begin near the best of their ends.
            Where modes matter begin chains at several.
        target_accept: The acceptance that the step size aims at; raise it where trajectories
            diverge.
        num_temperatures: R: see :func:`fit_gibbs`. Here the likelihood has the power b.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to resume from: see :func:`fit_svi`.
        name: Of the fit, which its checkpoint must have.

    Raises:
        TypeError, ValueError: If the model enumerates states, has parameters without a prior, or
            does not keep chains apart.
        FloatingPointError: If the log-density is not finite where chains begin.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> model = MarginalModel(TabularHMM(2, categorical(2)))
        >>> fit = fit_mcmc(model, data, num_samples=20, warmup=20, num_chains=8)
        >>> fit.chains["module.transition"].shape
        torch.Size([8, 20, 2, 2])
    """
    arguments = dict(locals())
    if not 0.3 <= target_accept < 1:
        raise ValueError(f"target_accept must lie between 0.3 and 1; got {target_accept}.")
    check_model_and_data(model, data)
    data = to_model_device(model, None, data)
    if isinstance(module := getattr(model, "module", None), HMMModule):
        scale_priors(module, data)
    with in_mode(False, model), pyro.get_param_store().scope(), pyro.validation_enabled(False):
        with first_values(data.device):
            sampler = HMC(model, data, arguments)
        sampler.run(arguments)
    return sampler.fit(
        model, data, sampler.supports, method="HMC", plates=sampler.plates, tuning=sampler.tuned(),
        marks=marks_of(data) if sampler.plates else None,
    )  # fmt: skip


class HMC(Chains):
    """Hamiltonian Monte Carlo with parallel tempering of batched chains, and the draws kept.

    Args:
        model: The Pyro model.
        data: The sequences.
        arguments: Of the fit, by name.
    """

    def __init__(self, model: Any, data: Sequences, arguments: dict[str, Any]) -> None:
        super().__init__(data, arguments)
        self.model, self.data, self.pieces = model, data, pieces_of(model, data)
        self.probe = self.pieces[0][0]
        trace = trace_of_batchable(model, self.probe, self.copies)
        self.plates = sequence_plates(model, self.probe, trace)
        self.supports, _ = latent_sites(trace)
        if not self.supports:
            raise ValueError("model has no latent variables to sample: give a parameter a prior.")
        self.prior = self._simulated()
        self.deep = {name for name in self.supports if trace.nodes[name]["fn"].batch_shape}
        # else samples are not those of the prior
        self.refreshes = not any(is_log_prior(name) for name in trace.nodes)
        self.inverse: Any = 1.0
        target, log_density = arguments["target_accept"], self.log_density
        self.hamiltonian = Hamiltonian(self.supports, self.prior, log_density, self.ladder, target)

    def _simulated(self) -> Values:
        """Sample starting values from the prior, one for each chain."""
        with torch.no_grad(), poutine.block(), pyro.plate("chains", self.copies, dim=-2):
            nodes = poutine.trace(self.model).get_trace(self.probe).nodes
        return {name: nodes[name]["value"] for name in self.supports}

    def _joint(self, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-likelihood and log-prior of each chain, ``(C R,)``."""
        total: Any = 0.0
        for data, weight in self.pieces:
            with LogJoint(values, self.copies) as joint, pyro.plate("chains", self.copies, dim=-2):
                self.model(data)
            total = total + weight * joint.likelihood
        return total, joint.prior

    def log_density(self, values: dict[str, Tensor]) -> Tensor:
        """Tempered log joint density, ``beta log p(x | theta) + log p(theta)``, ``(C R,)``."""
        likelihood, prior = self._joint(values)
        return self.inverse * likelihood + prior

    def begin(self, start: Fit | Values | Start | None) -> None:
        """Set the first positions of the chains: ascents from the prior, or ``start``."""
        hamiltonian = self.hamiltonian
        if start is None:
            found = {}
            if isinstance(self.model, MarginalModel):
                found = near_data(self.model.module, self.data, self.copies)
            known = {n: x.to(self.prior[n]) for n, x in found.items() if n in self.prior}
            ends = hamiltonian.climb(hamiltonian.free(self.prior | wide(known, ())), CLIMB)
            ladders = self.ladder.rungs.shape if self.ladder.size > 1 else (1, -1)
            scores = ends.log_density.nan_to_num(-torch.inf).reshape(ladders)
            first = torch.arange(0, scores.numel(), scores.size(1), device=scores.device)
            best = first + scores.argmax(1)
            place = ends.place[best].repeat_interleave(scores.size(1), 0)
        else:
            values: Any = start.parameters if isinstance(start, Fit) else start
            values = self.prior if start is from_prior else values
            check_kind("start", values, Mapping, "a Fit, or a dict of values by name")
            place = hamiltonian.free(self._widened(values))
        hamiltonian.state = hamiltonian.at(place + JITTER * torch.randn_like(place))
        if not bool(hamiltonian.state.log_density.isfinite().all()):
            text = "start must be where the density is finite, and a chain begins elsewhere"
            raise FloatingPointError(f"{text}. Give start=fit, of fit_map or fit_em.")

    def _widened(self, values: Values) -> Values:
        """Expand starting values to all chains."""
        check_start(values, self.prior)
        found = {}
        for name, like in self.prior.items():
            value = values[name].detach().to(like)
            single = like[0] if name in self.deep else like[0, 0]
            if value.shape == (len(self.ladder.rungs), *single.shape):
                value = value.repeat_interleave(self.ladder.size, 0)
                value = value if name in self.deep else value.unsqueeze(1)
            found[name] = value.expand(like.shape)
        return found

    def step(self) -> None:
        """A trajectory of every chain; its end is kept after the warmup."""
        works = self._swap() if self.ladder.size > 1 else {}
        moved, leapfrogs = self.hamiltonian.step()
        state, index = self.hamiltonian.state, self.index
        self.losses.append(-state.log_density.mean())
        if index < 0:
            return
        packing = self.hamiltonian.packing
        values = packing.values(state.place)
        slope = packing.log_volume(state.place, values)
        now = narrow(values, self.deep) | {
            "lp": (state.log_density - slope).double(), "diverging": moved.diverged,
            "acceptance": moved.accepted, "leapfrogs": torch.full_like(moved.accepted, leapfrogs),
        }  # fmt: skip
        now = {name: value[self.ladder.coldest] for name, value in now.items()} | works
        self.keep(index, now)

    def _swap(self) -> Values:
        """Swap temperatures; chains at the prior restart from fresh prior samples."""
        hamiltonian, ladder = self.hamiltonian, self.ladder
        place = hamiltonian.state.place
        with torch.no_grad():
            likelihood, _ = self._joint(hamiltonian.packing.values(place))
        _, works = ladder.swap((ladder.others.to(place) - ladder.own.to(place)) * likelihood)
        self.inverse = ladder.own.to(place)
        if self.refreshes:
            fresh = hamiltonian.free(self._simulated())
            place = torch.where((self.inverse == 0).unsqueeze(-1), fresh, place)
        hamiltonian.state = hamiltonian.at(place)
        return {"works": works}

    def tuned(self) -> dict[str, float]:
        """Step size, trajectory length, mean leapfrog steps and acceptance, after the warmup."""
        step, length = map(math.exp, self.hamiltonian.tuning.averages)
        leaps, accepted = (self.kept[n].double().mean().item() for n in ("leapfrogs", "acceptance"))
        return {"step size": step, "trajectory length": length, "leapfrog steps": leaps,
                "acceptance": accepted}  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Checkpoint state: samples, temperatures, chains, tuning."""
        own = {"state": vars(self.hamiltonian.state), "tuning": vars(self.hamiltonian.tuning)}
        return super().state() | own

    def restore(self, state: dict[str, Any]) -> None:
        """Restore samples, temperatures, chains and tuning from a checkpoint."""
        super().restore(state)
        self.hamiltonian.state = State(**state["state"])
        self.hamiltonian.tuning = Tuning(**state["tuning"])
        if self.ladder.size > 1:
            self.inverse = self.ladder.own.to(self.hamiltonian.state.place)
