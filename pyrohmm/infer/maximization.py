"""The M-step of EM: closed forms where components define them, gradient steps for all else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pyro
import torch
from torch import Tensor
from torch.distributions import transform_to

from .._imports import imported
from .._sync import with_one_wait
from ..chains.base import ExpectedCounts
from ..chains.markov import MarkovChain
from ..data.sequences import Sequences
from ..distributions.autoregressive import with_past
from ..distributions.hard_zeros import log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..nn.closed_form import (
    ChainMStep,
    Counted,
    EmissionMStep,
    Family,
    Maximum,
    Statistics,
    StepsMStep,
    TransitionCounts,
    has_foreign_priors,
    under,
    without_priors,
)
from ..ops.products import add_rows
from .models import check_gradients
from .msteps import GradientStep, TransitionPrior, TransitionStep, default_step
from .parameters import Parameters, Values

MOVED = 0.5  # standard errors by which a prior moves an estimate, above which it is reported
Sums = dict[str, Any]  # statistics of "chain", "emission", "visits" of states, "counts" or "parts"
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
    counts = expected.counts | {"states": expected.state_probs}
    held = {name: count.detach() for name, count in counts.items()}  # whatever they depend on
    return expectation_of_logs(hmm, values, held, 1).squeeze(0)


def expectation_of_logs(hmm: HMM, values: Tensor, counts: Statistics, restarts: int) -> Tensor:
    """Sum of log-probabilities times their expected counts, ``(R,)``; zero where a count is zero.

    Args:
        hmm: The log-probabilities.
        values: ``(*B, T, *E)``, the observations.
        counts: By name of the chain's factors; ``states`` of each step, ``symbols`` ``(K, V)``.
        restarts: R.
    """
    logs = hmm.chain.factors()
    if "states" in counts:
        logs = logs | {"states": hmm.log_likelihood(values)}
    if "symbols" in counts:
        logs = logs | {"symbols": log_probs(hmm.emission)}
    total = torch.zeros(restarts, device=values.device)
    for name, count in counts.items():
        weighted = torch.where(count > 0, logs[name].expand(count.shape) * count, 0.0)
        total = total + weighted.reshape(restarts, -1).sum(-1)
    return total


def combined(function: Callable[..., Tensor], *sums: Sums) -> Sums:
    """Apply ``function`` to entries of equal name of several sets of statistics."""
    return {
        kind: {name: function(*(each[kind][name] for each in sums)) for name in named}
        for kind, named in sums[0].items()
    }


def joined(one: Sums, other: Sums) -> Sums:
    """Add statistics of two parts of the data; observations and their weights are put together."""

    def join(name: str, a: Tensor, b: Tensor) -> Tensor:
        if not name.endswith(("each.values", "each.weights")):
            return a if "start." in name else a + b
        dim = int(name.endswith("weights"))
        if a.dim() != b.dim():  # one has weights of components
            a, b = (x if x.dim() == 3 + dim else x.unsqueeze(-1) for x in (a, b))
        shape = [max(sizes) for sizes in zip(a.shape, b.shape)]
        shape[dim] = -1
        return torch.cat([a.expand(shape), b.expand(shape)], dim)

    return {
        kind: {name: join(name, part, other[kind][name]) for name, part in named.items()}
        for kind, named in one.items()
    }


class GradientSteps:
    """M-step by gradient ascent of the expected log joint density, where there is no closed form.

    Args:
        parameters: All parameters.
        step: How steps are taken.
        rest: The parameters that have no closed form, by name; None for latent variables.
    """

    def __init__(
        self, parameters: Parameters, step: GradientStep, rest: dict[str, Tensor | None]
    ) -> None:
        self.parameters, self.step = parameters, copy.copy(step)
        self.step._stepper = None  # an optimizer of this fit's own parameters
        self.points = [point for point in rest.values() if point is not None]
        self.transforms: dict[str, Any] = {
            name: transform_to(parameters.supports[name])
            for name, point in rest.items() if point is None
        }  # fmt: skip
        self.leaves: Values = {}  # unconstrained

    def __call__(self, parts: list[Counted]) -> None:
        """Increase the expected log joint density, given expected counts of parts of the data."""
        parameters = self.parameters
        if not self.transforms and not self.points:
            return
        check_gradients()
        if self.step.optimizer is None or not self.leaves:
            self.leaves = {
                name: to.inv(parameters.values[name]).clone().requires_grad_()
                for name, to in self.transforms.items()
            }
        known, leaves = dict(parameters.values), self.leaves

        def loss() -> Tensor:
            moving = {name: self.transforms[name](leaf) for name, leaf in leaves.items()}
            parameters.values = known | moving
            total: Any = 0.0
            for batch, counts in parts:
                hmm, prior = parameters.build(batch)
                total = total + expectation_of_logs(hmm, batch.values, counts, parameters.restarts)
            return -prior - total

        with pyro.validation_enabled(False):  # the E-step checks what comes out
            self.step(loss, [*leaves.values(), *self.points])
            with torch.no_grad():
                loss()  # leaves the values where the step ended
        parameters.values = {name: value.detach() for name, value in parameters.values.items()}

    def state(self) -> dict[str, Any]:
        """Checkpoint state: unconstrained values and optimizer."""
        optimizer = self.step._stepper
        return {
            "leaves": self.leaves,
            "stepper": None if optimizer is None else optimizer.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore unconstrained values and optimizer from a checkpoint."""
        device = self.parameters.data.device
        self.leaves = {n: leaf.to(device).requires_grad_() for n, leaf in state["leaves"].items()}
        if state["stepper"] is not None and self.step.optimizer is not None:
            imported("torch._dynamo")  # an optimizer would, with signals
            self.step._stepper = self.step.optimizer([*self.leaves.values(), *self.points])
            self.step._stepper.load_state_dict(state["stepper"])


class Maximization:
    """The M-step: closed forms of the chain and of the emission, then gradient steps.

    What has a closed form, if the part defines an M-step (:mod:`pyrohmm.nn.closed_form`) that
    accounts for its priors, which one with a prior of a user's does not:

    ================================  ===========================  ============
    ``log_prior``                     chain                        emission
    ================================  ===========================  ============
    none                              its M-step                   its M-step
    a :class:`TransitionPrior`        its M-step, transitions by   its M-step
                                      the ``transition_step``
    another, of anything              none                         none
    ================================  ===========================  ============

    Attributes:
        chain: The module, if its chain has a closed form.
        chain_closed: Whether this maximises all the parameters but those of the emission.
        steps: The module, if it defines an M-step that reads every step.
        emission: Its emission module, if that has one.
        numbers: Whether its emission, not of symbols, has an M-step, whatever its priors.
        in_parts: Whether counts of parts of the data can be summed; else those of each are kept.
        whole: Whether all sequences must be one part.
        summed: Whether it needs sums over observations alone, not each step of them.
        by_symbol: Whether expected counts of symbols are such sums.
        allowed: Transitions that are possible, ``(K, K)``; None if all are.
        notes: Remarks, and in how many iterations each was made.
        idle: States that no observation supports, ``(R, K)`` booleans; None at the start.
    """

    def __init__(
        self,
        parameters: Parameters,
        transition_step: TransitionStep | None,
        gradient_step: GradientStep | None,
    ) -> None:
        module: Any = parameters.module
        log_prior, hmm, rest = parameters.log_prior, parameters.example, dict(parameters.fitted)
        of_transitions = isinstance(log_prior, TransitionPrior)
        if transition_step is None and isinstance(log_prior, TransitionPrior):
            transition_step = default_step(log_prior, parameters.data)
        self.parameters, self.transition_step = parameters, copy.copy(transition_step)
        emission = module.emission_module()
        paths = {part: f"{path}." for path, part in module.named_modules()}
        self.prefix = paths.get(emission, "")  # of the names of the emission's parameters
        of_emission = [name for name in rest if self.prefix and name.startswith(self.prefix)]
        closed = log_prior is None or of_transitions
        clusters = closed and isinstance(emission, EmissionMStep)
        own = clusters and not has_foreign_priors(emission)
        self.emission: Any = emission if own else None
        self.chain: Any = None
        found: set[str] = set()  # names of the parameters that closed forms maximise
        if closed and isinstance(module, TransitionCounts if of_transitions else ChainMStep):
            of_chain = _names_of_chain(module, hmm)  # raises if there is no mode
            if not has_foreign_priors(parameters.module, but=emission):
                self.chain, found = module, of_chain
        self.chain_closed = self.chain is not None and not rest.keys() - {*found, *of_emission}
        self.allowed = getattr(module, "transition_allowed", None)
        if "transition" in found and "transition" not in parameters.sites:
            # zeros of a transition matrix without a prior are those of the model
            possible = parameters.get("transition")[0] > 0
            self.allowed = possible if self.allowed is None else self.allowed & possible
        steps = log_prior is None and isinstance(module, StepsMStep) and module.by_steps
        self.steps: Any = module if steps else None
        for name in (*found, *(steps or ()), *(of_emission if own else ())):
            rest.pop(name, None)
        self.gradient = GradientSteps(parameters, gradient_step or GradientStep(), rest)
        self.symbols = is_categorical(hmm.emission)
        self.numbers = clusters and not self.symbols
        countable = self.symbols and hmm.emission.batch_shape == (hmm.num_states,)
        self.in_parts = hmm.chain.shared and (own or countable)
        self.whole = log_prior is not None and not self.in_parts  # it may sum over sequences
        self.summed = self.in_parts and (countable or getattr(emission, "summed", True))
        plain = type(hmm).expected_counts is HMM.expected_counts and type(hmm.chain) is MarkovChain
        self.by_symbol = self.summed and countable and plain
        self.notes: dict[str, int] = {}
        self.idle: Tensor | None = None
        self._seen: WeakKeyDictionary[Sequences, Any] = WeakKeyDictionary()

    def gather(
        self,
        expected: ExpectedCounts,
        batch: Sequences | None,
        hmm: HMM,
        scale: float,
        at_start: bool = False,
    ) -> Sums:
        """Sufficient statistics of the M-step from expected counts.

        Args:
            expected: Expected counts.
            batch: The sequences they are of; None if their ``states`` are counts of symbols.
            hmm: The HMM that the parameters build.
            scale: Of the counts.
            at_start: Whether the counts are those of a start, in which ``hmm`` had no part.
        """
        if scale != 1:
            counted = {name: count * scale for name, count in expected.counts.items()}
            expected = ExpectedCounts(expected.log_evidence, expected.state_probs * scale, counted)
        sums: Sums = {"counts": {} if self.chain_closed else dict(expected.counts)}
        if self.chain is not None:
            sums["chain"] = self.chain.statistics(self._of_restarts(expected, hmm))
        if self.summed or self.emission is not None:
            weights = expected.state_probs.reshape(self.parameters.restarts, -1, hmm.num_states)
            if batch is None:  # each symbol as often as it occurs
                values = torch.arange(weights.size(1), device=weights.device)
            else:
                if batch not in self._seen:  # to count steps makes a device wait
                    self._seen[batch] = observations(hmm, batch)
                values, where = self._seen[batch]
                weights = weights if where is None else weights.index_select(1, where)
        if self.summed:
            sums["visits"] = {"states": weights.sum(1).double()}
        if self.emission is not None:
            current = None if at_start else hmm.emission
            sums["emission"] = self.emission.statistics(values, weights, current)
        elif self.summed:
            table: Any = hmm.emission
            size = table.param_shape[-1]
            counts = torch.stack([add_rows(weight, values.long(), size).mT for weight in weights])
            sums["counts"]["symbols"] = counts.unsqueeze(1) if len(counts) > 1 else counts[0]
        else:
            sums["counts"]["states"] = expected.state_probs
        if not self.in_parts:
            sums["parts"] = {"counts": [(batch, sums.pop("counts"))]}
        return sums

    def _of_restarts(self, expected: ExpectedCounts, hmm: HMM) -> ExpectedCounts:
        """Expected counts of each restart in float64, summed over the N sequences."""
        restarts, cores = self.parameters.restarts, hmm.chain.cores
        counts = {}
        for name, count in expected.counts.items():
            core = count.shape[count.dim() - len(cores[name]) :]
            count = count.double().reshape(restarts, -1, *core)
            counts[name] = count.squeeze(1) if count.size(1) == 1 else count.sum(1)
        states = expected.state_probs.reshape(restarts, *expected.state_probs.shape[-3:])
        return ExpectedCounts(expected.log_evidence.reshape(restarts, -1), states, counts)

    def __call__(self, sums: Sums) -> None:
        """Maximise the parameters given the sums of :meth:`gather`."""
        parameters = self.parameters
        if self.summed:
            visits = sums["visits"]["states"]
            self.idle = visits < DEAD * visits.sum(-1, keepdim=True)
        parts: list[Counted] = [(parameters.probe, sums["counts"])] if self.in_parts else (
            sums["parts"]["counts"])  # fmt: skip
        with torch.no_grad():
            values, notes = with_one_wait(partial(self.modes, sums), parameters.data.device)
            parameters.update(values)
            if self.steps is not None:
                current = {name: parameters.get(name) for name in self.steps.by_steps}
                parameters.update(self.steps.maximize(parts, current))
        for note in notes:
            self.notes[note] = self.notes.get(note, 0) + 1
        self.gradient(parts)

    def modes(self, sums: Sums) -> Maximum:
        """The modes of the parameters that have a closed form and sums, and remarks."""
        values: Values = {}
        notes: list[str] = []
        if "chain" in sums:
            values, notes = _maximum(self.chain, sums["chain"])
            if self.transition_step is not None and "transition" in self.parameters.fitted:
                counts = self.chain.transition_counts(sums["chain"])
                if counts is not None:
                    old = self.parameters.get("transition").double().expand(counts.shape)
                    prior: Any = self.parameters.log_prior
                    values["transition"] = self.transition_step(old, counts, prior, self.allowed)
        if "emission" in sums:
            mode, remarks = _maximum(self.emission, sums["emission"])
            values, notes = values | under(self.prefix, mode), notes + remarks
        return values, notes

    def remarks(self, restart: int) -> list[str]:
        """Remarks of all M-steps, and on the states of a restart that no observation supports."""
        remarks = [f"{note} ({count} iterations)" if count > 1 else note
                   for note, count in self.notes.items()]  # fmt: skip
        idle = [] if self.idle is None else self.idle[restart].nonzero().flatten().tolist()
        if idle:
            names = ", ".join(map(str, idle))
            remarks.append(
                f"no observation supports state {names}: its parameters are those of its prior or "
                "its start. Fewer states or more restarts may help."
            )
        return remarks

    def moved(self, sums: Sums, restart: int) -> list[str]:
        """Remarks on estimates that a prior moves by more than half of a standard error.

        If I is the information of the complete data, a gradient g of the log prior shifts the mode
        by about g / I. So the shift, which an M-step without priors shows, times g is its square in
        standard errors.

        Args:
            sums: Of an E-step at the parameters.
            restart: Which of the restarts.
        """
        parameters = self.parameters
        dims = {  # of an event, by the names of the parameters
            f"{path}.{name}".lstrip("."): space.event_dim
            for path, part in parameters.module.named_modules() if isinstance(part, Family)
            for name, space in part.supports.items()
        }  # fmt: skip
        slopes = parameters.prior_slopes([name for name in parameters.sites if name in dims])
        if not slopes:
            return []
        if self.prefix and "emission" in sums and all(n.startswith(self.prefix) for n in slopes):
            sums = {"emission": sums["emission"]}  # priors of the chain are flat
        with torch.no_grad():
            modes, _ = self.modes(sums)
            with without_priors(parameters.module):
                others, _ = self.modes(sums)
        remarks = []
        for name in slopes:
            if name not in modes:
                continue
            shift = (modes[name] - others[name]) * slopes[name]
            square = shift[restart].nan_to_num(0.0, 0.0, 0.0)
            errors = square.sum((*range(square.dim() - dims[name], square.dim()),))
            errors = errors.clamp(min=0.0).sqrt()
            if bool((errors > MOVED).any()):
                remarks.append(
                    f"the prior of {name} moves estimates by up to {errors.max().item():.2g} "
                    "standard errors: more data, or a weaker prior, would leave them to the data"
                )
        return remarks

    def state(self) -> dict[str, Any]:
        """Checkpoint state: remarks, unvisited states, searched matrices, gradient steps."""
        searched = getattr(self.transition_step, "searched", [])
        own = {"notes": self.notes, "idle": self.idle, "searched": searched}
        return own | self.gradient.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore remarks, unvisited states, searches and gradient steps from a checkpoint."""
        self.notes, self.idle = state["notes"], state["idle"]
        if state["searched"]:
            self.transition_step.searched = state["searched"]  # type: ignore[union-attr]
        self.gradient.restore(state)


def observations(hmm: HMM, data: Sequences, dim: int = 0) -> tuple[Tensor, Tensor | None]:
    """Values ``(*, M, *E)`` of the observed steps, and their indices; None if all are observed.

    Args:
        hmm: Its emission is that of the values.
        data: The sequences.
        dim: The dimension of sequences in the values, which becomes that of steps.
    """
    values = with_past(hmm.emission, data.values).flatten(dim, dim + 1)
    if not (values.dtype.is_floating_point or is_categorical(hmm.emission)):
        values = values.to(hmm.log_initial.dtype)
    seen, where = data.observed.flatten(), None
    if not bool(seen.all()):
        where = seen.nonzero().squeeze(-1)
        values = values.index_select(dim, where)
    return values, where


def _maximum(part: Any, statistics: Statistics) -> Maximum:
    """Checked result of the M-step of a module, perhaps a user's."""
    found = part.m_step(statistics)
    pair = isinstance(found, tuple) and tuple(map(type, found)) == (dict, list)
    if not pair or not all(map(torch.is_tensor, found[0].values())):
        raise TypeError(
            f"m_step of {type(part).__name__} must return a pair: the parameters by name, tensors, "
            f"and a list of remarks, such as ({{'loc': loc}}, []); it returned {found!r:.200}."
        )
    return found


def _names_of_chain(module: Any, hmm: HMM) -> set[str]:
    """Names of the parameters that the M-step of the chain maximises."""
    counts, cores = {}, hmm.chain.cores
    for name, tensor in hmm.chain.parameters.items():
        counts[name] = tensor.new_ones(1, *tensor.shape[-len(cores[name]) :], dtype=torch.float64)
    ones = hmm.log_initial.new_ones(1, 1, 1, hmm.num_states, dtype=torch.float64)
    expected = ExpectedCounts(ones[:, 0, :, 0], ones, counts)
    return set(_maximum(module, module.statistics(expected))[0])
