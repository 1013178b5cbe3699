"""The M-step of EM: closed forms where components define them, gradient steps for all else."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import pyro
import torch
from torch import Tensor
from torch.distributions import transform_to

from .._sync import guessing
from ..chains.base import ExpectedCounts
from ..chains.markov import MarkovChain
from ..data.sequences import Sequences
from ..distributions.autoregressive import Autoregressive
from ..distributions.dpp import DiversityPrior
from ..distributions.hard_zeros import log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..nn.closed_form import (
    ChainMStep,
    EmissionMStep,
    Statistics,
    TransitionCounts,
    has_foreign_priors,
    inside,
    under,
)
from ..ops.products import add_rows
from . import msteps
from .exclusive import check_gradients
from .msteps import GradientStep, TransitionPrior, TransitionStep
from .parameters import Parameters
from .starts import Values

UNCONVERGED = 1e-3  # relative slope at the end of an M-step, above which it is reported
DEAD = 1e-8  # expected visits, as a share of the steps, below which a state is reported


def expected_log_joint(hmm: HMM, expected: ExpectedCounts, values: Tensor) -> Tensor:
    r"""The expectation of :math:`\log p(x, z)` over the posterior of paths; a scalar.

    What an M-step raises. With the expected counts of ``hmm`` itself, its gradient by the
    parameters is that of the log evidence (Fisher's identity).

    Args:
        hmm: With the parameters to be judged.
        expected: The E-step of an HMM of the same shape: :meth:`HMM.expected_counts`.
        values: ``(*B, T, *E)``, the observations of the E-step.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Categorical(logits=even), torch.tensor([3]))
        >>> values = torch.tensor([[0, 1, 1]])
        >>> em.expected_log_joint(hmm, hmm.expected_counts(values), values)  # 6 log 1/2
        tensor(-4.1589)
    """
    factors, counts = hmm.chain.factors(), expected.counts
    total = _weighted(hmm.log_likelihood(values), expected.states).sum()
    return total + torch.stack([_weighted(factors[n], counts[n]).sum() for n in counts]).sum()


def _weighted(logs: Tensor, counts: Tensor) -> Tensor:
    """Products of the shape of ``counts``; zero where a count is zero."""
    return torch.where(counts > 0, logs.expand(counts.shape) * counts, 0.0)


class ClosedForms:
    """The components of a module whose M-step has a closed form.

    A prior of the transition matrix leaves all other closed forms; any other ``log_prior`` takes
    them away, for it may depend on anything. Where a user has replaced the prior of a parameter,
    its part has none either.

    Attributes:
        chain: The module, if it defines an M-step of its chain.
        emission: Its emission module, if that defines one.
        prefix: Of the names of the parameters of its emission module; None without one.
        clusters: Whether its emission module has an M-step, whatever its priors.
    """

    def __init__(self, parameters: Parameters, transition_step: TransitionStep | None) -> None:
        module, log_prior = parameters.module, parameters.log_prior
        self.parameters, self.transition_step = parameters, transition_step
        self.chain: Any = None
        self.emission: Any = None
        self.prefix: str | None = None
        self.names: set[str] = set()  # of the parameters of the chain
        self.clusters = False
        self.last_step: tuple[Tensor, Tensor, Tensor | None] | None = None  # its end and counts
        emission = module.emission_module()
        for name, part in module.named_modules():
            if part is emission:
                self.prefix = f"{name}."
        of_transitions = isinstance(log_prior, TransitionPrior)
        if log_prior is not None and not of_transitions:
            return
        self.clusters = isinstance(emission, EmissionMStep)
        if self.clusters and not has_foreign_priors(emission):
            self.emission = emission
        if isinstance(module, TransitionCounts if of_transitions else ChainMStep):
            chain = parameters.example.chain
            counts = {}
            for name, core in chain.cores.items():
                shape = chain.parameters[name].shape[-len(core) :]
                counts[name] = chain.log_initial.new_ones(1, *shape, dtype=torch.float64)
            ones = chain.log_initial.new_ones(1, 1, 1, chain.num_states, dtype=torch.float64)
            expected = ExpectedCounts(ones[:, 0, :, 0], ones, counts)
            names = set(module.m_step(module.statistics(expected))[0])
            if not has_foreign_priors(parameters.module, but=emission):
                self.chain, self.names = module, names
            elif transition_step is not None:
                raise ValueError(
                    "a transition_step, or a diversity prior, goes with the priors that "
                    f"{type(module).__name__} has itself; one of them has been replaced. Leave it "
                    "out, or use fit_map."
                )
        # zeros of a transition matrix without a prior are those of the model
        point = "transition" in self.names and "transition" not in parameters.sites
        self.possible = parameters.get("transition")[0] > 0 if point else None

    def is_of_emission(self, name: str) -> bool:
        """Whether the parameter ``name`` is one of the emission module."""
        return self.prefix is not None and name.startswith(self.prefix)

    def has(self, name: str) -> bool:
        """Whether the parameter ``name`` has a closed form."""
        closed = self.emission is not None and self.is_of_emission(name)
        return closed or name.removesuffix("_unconstrained") in self.names

    def chain_statistics(self, expected: ExpectedCounts) -> Statistics:
        """Sufficient statistics of the chain."""
        if self.chain is None:
            return {}
        restarts, cores = self.parameters.restarts, self.parameters.example.chain.cores
        counts = {}
        for name, count in expected.counts.items():
            core = count.shape[count.dim() - len(cores[name]) :]
            counts[name] = count.double().reshape(restarts, -1, *core).sum(1)
        evidence = expected.log_evidence.reshape(restarts, -1)
        states = expected.states.reshape(restarts, *expected.states.shape[-3:])
        return under("chain.", self.chain.statistics(ExpectedCounts(evidence, states, counts)))

    def emission_statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Sufficient statistics of the emission: see :class:`EmissionMStep`."""
        if self.emission is None:
            return {}
        return under("emission.", self.emission.statistics(values, weights, current))

    def m_step(self, statistics: Statistics) -> list[str]:
        """Set the parameters that are not frozen to their mode; returns remarks."""
        values: Values = {}
        notes: list[str] = []
        if self.chain is not None:
            counts = inside(statistics, "chain.")
            values, notes = self.chain.m_step(counts)
            if self.transition_step is not None and "transition" in self.parameters.fitted:
                pairs = self.chain.transition_counts(counts)
                if pairs is not None:
                    values["transition"] = self._transition(pairs)
        if self.emission is not None:
            mode, remarks = self.emission.m_step(inside(statistics, "emission."))
            values, notes = values | under(self.prefix or "", mode), notes + remarks
        self.parameters.update(values)
        return notes

    def _transition(self, counts: Tensor) -> Tensor:
        """Transition matrices ``(R, K, K)`` by the M-step under a prior."""
        prior: Any = self.parameters.log_prior
        step: Any = self.transition_step
        old = self.parameters.get("transition").double().expand(counts.shape)
        allowed = getattr(self.chain, "transition_allowed", None)
        if self.possible is not None:
            allowed = self.possible if allowed is None else allowed & self.possible
        start = msteps.best_start(old, counts, prior, allowed)
        end = step(start, counts, prior, allowed)
        self.last_step = end, counts, allowed
        return end

    def remark(self, restart: int) -> list[str]:
        """A remark if the last M-step of the transitions has not converged in a restart."""
        prior = self.parameters.log_prior
        if self.last_step is None or not isinstance(prior, DiversityPrior):
            return []
        end, counts, allowed = self.last_step
        slope = msteps.relative_slope(end, counts, prior, allowed)[restart].item()
        if slope <= UNCONVERGED:
            return []
        of_fixed_point = isinstance(self.transition_step, msteps.FixedPoint)
        return [
            f"the last M-step of the transition matrix has not converged (relative slope "
            f"{slope:.2g}): give transition_step more num_steps"
            + ("" if of_fixed_point else ", or take msteps.FixedPoint()")
        ]


class GradientSteps:
    """Gradient steps on the expected log joint density, in what has no closed form.

    Args:
        parameters: All parameters.
        step: How steps are taken.
        names: The latent variables that have no closed form.
        points: The parameters without priors that have none.
    """

    def __init__(
        self, parameters: Parameters, step: GradientStep, names: list[str], points: list[Tensor]
    ) -> None:
        self.parameters, self.step = parameters, copy.copy(step)
        self.step._stepper = None  # an optimizer of this fit's own parameters
        self.names, self.points = names, points
        self.leaves: Values = {}  # unconstrained

    def _constrain(self, name: str) -> Any:
        return transform_to(self.parameters.sites[name].support)

    def __call__(self, batch: Sequences, counts: Statistics) -> None:
        """Raise the expected log joint density.

        Args:
            batch: What the HMM is built for.
            counts: Expected counts, by what they are of: see :func:`_logs`.
        """
        parameters, restarts = self.parameters, self.parameters.restarts
        if not self.names and not self.points:
            return
        check_gradients()
        if self.step.optimizer is None or not self.leaves:
            self.leaves = {
                name: self._constrain(name).inv(parameters.values[name]).clone().requires_grad_()
                for name in self.names
            }
        known, leaves = dict(parameters.values), self.leaves

        def loss() -> Tensor:
            moving = {name: self._constrain(name)(leaf) for name, leaf in leaves.items()}
            parameters.values = known | moving
            hmm, prior = parameters.build(batch)
            total = prior.reshape(-1).expand(restarts)
            for logs, count in zip(_logs(hmm, batch, counts), counts.values()):
                total = total + _weighted(logs, count).reshape(restarts, -1).sum(-1)
            return -total

        with pyro.validation_enabled(False):  # the E-step checks what comes out
            self.step(loss, [*leaves.values(), *self.points])
            with torch.no_grad():
                loss()  # leaves the values where the step ended
        parameters.values = {name: value.detach() for name, value in parameters.values.items()}

    def state(self) -> dict[str, Any]:
        """State, for checkpoints."""
        optimizer = self.step._stepper
        return {
            "leaves": self.leaves,
            "stepper": None if optimizer is None else optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        device = self.parameters.data.device
        self.leaves = {
            name: leaf.to(device).requires_grad_() for name, leaf in state["leaves"].items()
        }
        if state["stepper"] is not None and self.step.optimizer is not None:
            self.step._stepper = self.step.optimizer([*self.leaves.values(), *self.points])
            self.step._stepper.load_state_dict(state["stepper"])


class Maximization:
    """The M-step: closed forms first, then gradient steps.

    Attributes:
        summed: Whether it needs sums over observations alone, not each step of them.
        by_symbol: Whether expected counts of symbols are such sums.
        notes: Remarks, and in how many iterations each was made.
        idle: States that no observation supports, ``(R, K)`` booleans; None at the start.
    """

    def __init__(
        self,
        parameters: Parameters,
        transition_step: TransitionStep | None,
        gradient_step: GradientStep,
    ) -> None:
        self.parameters = parameters
        self.closed = closed = ClosedForms(parameters, transition_step)
        names = [name for name in parameters.sites if not closed.has(name)]
        points = {
            name: point
            for name, point in parameters.module.named_parameters()
            if point.requires_grad and not closed.has(name)
        }
        self.gradient = GradientSteps(parameters, gradient_step, names, list(points.values()))
        hmm = parameters.example
        self.symbols = is_categorical(hmm.emission)
        others = [name for name in (*names, *points) if not closed.is_of_emission(name)]
        self.chain_closed = closed.chain is not None and not others
        self.emission_closed = closed.emission is not None
        cores, tables = hmm.chain.cores, hmm.chain.parameters
        single = all(tables[n].dim() == len(c) and "T" not in c for n, c in cores.items())
        countable = self.symbols and hmm.emission.batch_shape == (hmm.num_states,)
        self.summed = single and (self.emission_closed or countable)
        plain = type(hmm).expected_counts is HMM.expected_counts and type(hmm.chain) is MarkovChain
        self.by_symbol = self.summed and countable and plain
        self.notes: dict[str, int] = {}
        self.idle: Tensor | None = None
        self._guesses = True  # until a guess was wrong
        self._any_batch = parameters.data[:1]
        self._steps: WeakKeyDictionary[Sequences, Tensor | None] = WeakKeyDictionary()

    def gather(
        self,
        expected: ExpectedCounts,
        batch: Sequences | None,
        current: HMM | None,
        hmm: HMM,
        scale: float,
    ) -> Statistics:
        """Statistics that the M-step needs: sums over observations, where they suffice.

        Args:
            expected: Expected counts.
            batch: The sequences they are of; None if their ``states`` are counts of symbols.
            current: The HMM of the E-step, if its emission had a part in it.
            hmm: The HMM that the parameters build.
            scale: Of the counts.
        """
        statistics = self.closed.chain_statistics(expected)
        if self.summed or self.emission_closed:
            weights = expected.states.reshape(self.parameters.restarts, -1, hmm.num_states)
            if batch is None:  # each symbol as often as it occurs
                values = torch.arange(weights.size(1), device=weights.device)
            else:
                values, weights = self._observations(batch, hmm, weights)
            emission: Any = None if current is None else current.emission
            statistics |= self.closed.emission_statistics(values, weights, emission)
        if self.summed:
            statistics["visits"] = weights.sum(1).double()
        if not self.chain_closed:
            statistics |= under("counts.", expected.counts)
        if not self.emission_closed and not self.summed:
            statistics["counts.states"] = expected.states
        elif not self.emission_closed:
            table: Any = hmm.emission
            size = table.param_shape[-1]
            counts = torch.stack([add_rows(weight, values.long(), size).mT for weight in weights])
            statistics["counts.symbols"] = counts.unsqueeze(1) if len(counts) > 1 else counts[0]
        if scale == 1:
            return statistics
        return {name: value * scale for name, value in statistics.items()}

    def _observations(self, batch: Sequences, hmm: HMM, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``(M, *E)`` and weights ``(R, M, K)`` of the steps that are observed."""
        values, whole = batch.values, hmm.emission
        if isinstance(whole, Autoregressive):
            values = whole.windows(values)
        values = values.flatten(0, 1)
        if not (values.dtype.is_floating_point or self.symbols):
            values = values.to(hmm.log_initial.dtype)
        where = self._observed_steps(batch)
        if where is None:
            return values, weights
        return values.index_select(0, where), weights.index_select(1, where)

    def _observed_steps(self, batch: Sequences) -> Tensor | None:
        """Which of all the steps are observed, ``(M,)`` integers; None if all are."""
        if batch not in self._steps:  # asked once of a batch: a device makes the host wait
            seen = batch.observed.flatten()
            self._steps[batch] = None if bool(seen.all()) else seen.nonzero().squeeze(-1)
        return self._steps[batch]

    def __call__(self, statistics: Statistics, batch: Sequences) -> None:
        """Maximise the parameters.

        Args:
            statistics: From :meth:`gather`.
            batch: The sequences they are of.
        """
        if self.summed:
            visits = statistics["visits"]
            self.idle = visits < DEAD * visits.sum(-1, keepdim=True)
            batch = self._any_batch
        with torch.no_grad():
            for note in self._m_step(statistics):
                self.notes[note] = self.notes.get(note, 0) + 1
        self.gradient(batch, inside(statistics, "counts."))

    def _m_step(self, statistics: Statistics) -> list[str]:
        """The closed forms; an accelerator is waited for once, unless there is something to say."""
        if self._guesses:
            with guessing() as guesses:
                notes = self.closed.m_step(statistics)
            self._guesses, _ = guesses.read()
            if self._guesses:
                return notes
        return self.closed.m_step(statistics)

    def state(self) -> dict[str, Any]:
        """State, for checkpoints."""
        idle = [] if self.idle is None else self.idle.tolist()
        return {"notes": self.notes, "idle": idle} | self.gradient.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.notes = state["notes"]
        self.idle = torch.tensor(state["idle"]) if state["idle"] else None
        self.gradient.restore(state)


def _logs(hmm: HMM, batch: Sequences, names: Iterable[str]) -> list[Tensor]:
    """Log-probabilities that have expected counts, by the names of the counts."""
    names = list(names)
    logs = hmm.chain.factors()
    if "states" in names:
        logs = logs | {"states": hmm.log_likelihood(batch.values)}
    if "symbols" in names:
        logs = logs | {"symbols": log_probs(hmm.emission)}
    return [logs[name] for name in names]
