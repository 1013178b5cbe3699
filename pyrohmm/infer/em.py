r"""EM: a map from HMM to HMM that never lowers the log joint density.

The E-step is exact (:meth:`HMM.expected_counts`). The M-step is a closed form wherever there is one (the
chain of a :class:`TabularHMM`, and the emissions of this package), priors included; transitions
under a diversity prior have steps of their own (:mod:`pyrohmm.msteps`); for the rest it is
:class:`GradientStep`, on the expected counts alone if they are all that is needed, as for
symbols. With minibatches, sufficient statistics are averaged with steps that decay (Cappé and
Moulines, 2009, On-line EM for latent data models).
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.nn.module import _Context
from torch import Tensor
from torch.distributions import transform_to
from tqdm import tqdm

from .._checks import check_size
from ..data.batches import Batches
from ..data.sequences import Sequences
from ..distributions.dpp import DiversityPrior
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical, log_probs
from ..io.checkpoints import Checkpoint, constants, fingerprint, settings
from ..nn.base import HMMModule
from ..nn.dense import DenseHMM
from ..nn.family import Emission, Statistics
from ..nn.tabular import TabularHMM
from ..ops import recursions
from ..ops.lookup import add_rows
from ..ops.recursions import ExpectedCounts
from . import msteps
from .fit import check_events
from .models import LogPrior, MarginalModel, build, to_model_device
from .msteps import FixedPoint, GradientStep, LogitGradient, TransitionStep
from .results import Fit, Point, Restarts, uses_labels
from .starts import Start, Values, build_once, by_kmeans, from_prior

PADDED = 1 << 16  # steps, padding included, below which sequences of all lengths go together
DEAD = 1e-8  # expected visits, as a share of the steps, below which a state is reported


# sums of counts that gradient steps need, and the logarithms they weigh
COUNTED: dict[str, Callable[[HMM], Tensor]] = {
    "chain.initial": lambda hmm: hmm.log_initial,
    "chain.transition": lambda hmm: hmm.log_transition,
    "symbols": lambda hmm: log_probs(hmm.emission),
}


def densehmm_schedule() -> dict[str, Any]:
    """Options of :func:`fit_em` with which the authors of the DenseHMM fit it by EM.

    Forty iterations of 25 steps of Adam with a learning rate of 0.01, whose moments are kept from
    one to the next. The paper does not say so, and it is not much: a coordinate moves by at most
    a quarter in an iteration. It is there for comparison.

    Example:
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_em(DenseHMM(2, 2, dim=1), data, **em.densehmm_schedule())
        >>> len(fit.losses)
        41
    """
    adam = partial(torch.optim.Adam, lr=0.01)
    return {"num_steps": 40, "tolerance": None, "gradient_step": GradientStep(25, adam, False)}


def expected_log_joint(hmm: HMM, expected: ExpectedCounts, values: Tensor) -> Tensor:
    r"""The expectation of :math:`\log p(x, z)` over paths, given their expected counts; a scalar.

    What an M-step raises. Where the counts are those of ``hmm`` itself, its gradient by the
    parameters is that of the log evidence (Fisher's identity).

    Args:
        hmm: With the parameters to be judged.
        expected: The E-step of an HMM of the same shape: :meth:`HMM.expected_counts`.
        values: ``(*B, T, *E)``, what the counts were found for.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Categorical(logits=even), torch.tensor([3]))
        >>> values = torch.tensor([[0, 1, 1]])
        >>> em.expected_log_joint(hmm, hmm.expected_counts(values), values)  # 6 log 1/2
        tensor(-4.1589)
    """
    parts = [_weigh(*each).sum() for each in zip(hmm.log_factors(values), expected[1:])]
    return torch.stack(parts).sum()


def _weigh(logs: Tensor, counts: Tensor) -> Tensor:
    """Their products, of the shape of ``counts``; zero where nothing is counted."""
    return torch.where(counts > 0, logs.expand(counts.shape) * counts, 0.0)


def fit_em(
    module: HMMModule | HMM,
    data: Sequences,
    *,
    num_steps: int = 200,
    tolerance: float | None = 1e-6,
    start: Start | Values | None = None,
    restarts: int = 1,
    batch_size: int | None = None,
    decay: float = 0.7,
    log_prior: LogPrior | None = None,
    transition_step: TransitionStep | None = None,
    gradient_step: GradientStep | None = None,
    reseed: bool = False,
    generator: torch.Generator | None = None,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
) -> Fit:
    r"""Find the most probable parameters by EM.

    The module is copied; nothing is written back into it. As :func:`fit_map`, EM maximises
    :math:`\log p(x, \theta)` in the space of the probabilities, means and covariances themselves.

    Args:
        module: What builds the HMM, such as a :class:`TabularHMM`, and holds the priors. An
            :class:`HMM` is a start without priors: the fit is one of maximum likelihood.
        data: The sequences. Labels restrict the states.
        num_steps: Largest number of iterations.
        tolerance: End when an iteration lowers the loss by less than this share of itself, in
            every restart. None runs all steps.
        start: Where to begin: ``starts.from_prior``, ``starts.by_kmeans``,
            ``starts.from_hmm(hmm)``, a function like these, or values by name, such as
            ``fit.values``. By default the prior for symbols and for emissions without a closed
            form, k-means for other observations; parameters without a prior begin where they are.
        restarts: R, from how many starts, side by side; every parameter must have a prior. The
            best is kept, all are in ``Fit.restarts``.
        batch_size: Number of sequences in a minibatch; all by default. The M-step must need nothing
            but sums over observations, as for symbols and in closed forms. Losses are then those
            of the batches, scaled to the whole set, but for the last, which is that of all data.
        decay: With minibatches, iteration t averages the statistics with a step of
            :math:`(t + 1)^{-d}`; between 0.5 and 1.
        log_prior: A further log-density of the HMM built. A :class:`DiversityPrior` concerns the
            transitions, and leaves the closed forms of all else; any other function takes them
            away, for it may be of anything: all is then maximised by gradient steps.
        transition_step: How transitions of a :class:`TabularHMM` are maximised under a
            :class:`DiversityPrior`: ``msteps.FixedPoint()``, the default for its usual exponent,
            ``msteps.LogitGradient()``, that for others, or ``msteps.ProjectedGradient()``.
        gradient_step: How parameters without a closed form are maximised.
        reseed: Whether a state that no observation supports becomes a half of the state that is
            visited most, which may raise the loss once. If not, it stays as it was.
        generator: Source of randomness for minibatches; torch's global one by default.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to, and to go on from: see :func:`fit_svi`.

    Returns:
        The fit. ``losses`` are minus log joint densities, one before each iteration and one at the
        end; ``notes`` report states that are not visited, variances at their floor, and a loss
        that has risen by more than rounding, which would be an error of ours.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range; a sequence has probability zero; a prior has no
            mode; or the module cannot be fitted in the way that was asked for.

    Example:
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_em(TabularHMM(2, categorical(2)), data)
        >>> fit.hmm(data).log_prob(data.values).sum().round(decimals=1)  # 2 log 1/2
        tensor(-1.4000)
    """
    start_time = time.perf_counter()
    check_size("num_steps", num_steps)
    check_size("restarts", restarts)
    if not isinstance(data, Sequences):
        raise TypeError(f"data must be Sequences; got {type(data).__name__}.")
    if not 0.5 <= decay <= 1.0:
        raise ValueError(f"decay must lie between 0.5 and 1, so that EM converges; got {decay}.")
    if isinstance(module, HMM):
        module = TabularHMM.from_hmm(module)
    if not isinstance(module, HMMModule):
        raise TypeError(f"module must be an HMMModule or an HMM; got {type(module).__name__}.")
    for name, given in (("log_prior", log_prior), ("transition_step", transition_step)):
        if given is not None and not callable(given):
            raise TypeError(f"{name} must be callable; got {type(given).__name__}.")
    if transition_step is not None and not (
        isinstance(module, TabularHMM) and isinstance(log_prior, DiversityPrior)
    ):
        raise ValueError(
            "transition_step is for a TabularHMM with log_prior=DiversityPrior(...); other "
            "transitions have a closed form, or follow gradient_step."
        )
    if transition_step is None and isinstance(log_prior, DiversityPrior):
        transition_step = FixedPoint() if log_prior.rho == 0.5 else LogitGradient()
    problem = _Problem(
        copy.deepcopy(module),
        data,
        restarts,
        gradient_step or GradientStep(),
        log_prior,
        transition_step,
    )
    if batch_size is not None:
        check_size("batch_size", batch_size)
        if not problem.summed:
            raise ValueError(
                "batch_size needs a module whose M-step needs nothing but sums over observations; "
                f"that of {type(module).__name__} needs all of them. Use fit_map for minibatches."
            )
    batches = Batches(problem.data, batch_size, generator)
    losses: list[Tensor] = []
    converged, reason = False, f"it took all {num_steps} steps"
    statistics: Statistics | None = None
    keeper = None
    if checkpoint is not None:
        step = gradient_step and [
            gradient_step.num_steps, gradient_step.optimizer, gradient_step.guard
        ]  # fmt: skip
        identity = {
            "fit": f"EM on {type(module).__name__}",
            "latent variables": problem.names,
            "shapes": [list(each.shape) for each in problem.module.state_dict().values()],
            "priors and frozen parameters": constants(problem.module, log_prior),
            "restarts": restarts,
            "batch_size": batch_size,
            "decay": decay,
            "reseed": reseed,
            "gradient_step": settings(step),
            "seed of the generator": None if generator is None else generator.initial_seed(),
            "data": fingerprint(data),
        }
        keeper = Checkpoint(checkpoint, identity, (generator,))
    found = keeper.load() if keeper is not None else None
    if found is None:
        problem.begin(start)
    else:
        problem.restore(found)
        losses, statistics = list(found["losses"]), found["statistics"]
        if statistics is not None:
            device = problem.data.values.device
            statistics = {name: value.to(device) for name, value in statistics.items()}
        batches.restore(found["batches"])
        if found["converged"] and found["tolerance"] == tolerance:
            converged, reason = True, found["reason"]
        elif found["converged"]:  # by another test: the last E-step is to be done again
            losses.pop()
        start_time -= found["seconds"]

    known = converged  # the file says so already

    def save() -> None:
        if keeper is not None:
            progressed = {
                "losses": torch.stack(losses),
                "statistics": statistics,
                "converged": converged,
                "tolerance": tolerance,
                "reason": reason,
                "batches": batches.state(),
                "seconds": time.perf_counter() - start_time,
            }
            keeper.save(progressed | problem.state())

    with tqdm(total=num_steps, disable=None if progress is None else not progress) as bar:
        while not converged and len(losses) <= num_steps:
            if keeper is not None and losses:
                if keeper.is_due() or len(losses) == num_steps:
                    save()
            batch = batches.take()
            revived = problem.reseeded  # in the iteration before
            try:
                loss, fresh = problem.expect(batch, reseed)
            except ValueError as error:
                batches.explain(error)
                raise
            losses.append(loss.cpu())
            bar.set_postfix(
                nats_per_step=f"{loss.min().item() / max(data.num_observed, 1):.4f}", refresh=False
            )
            if tolerance is not None and batch_size is None and len(losses) > 1:
                fall = losses[-2] - losses[-1]
                ended = not bool((fall >= tolerance * losses[-1].abs()).any())
                if ended and not revived and not problem.reseeded:
                    converged = True
                    reason = f"the loss fell by less than {tolerance:g} of itself"
                    break
            if len(losses) > num_steps:
                break
            if batch_size is not None:
                rate = len(losses) ** -decay
                if statistics is not None:
                    fresh = {
                        name: (1 - rate) * statistics[name] + rate * value
                        for name, value in fresh.items()
                    }
                statistics = fresh
            problem.maximise(fresh)
            bar.update()
    if converged and not known:
        save()
    if batch_size is not None:  # what a batch says of the whole set is not enough to judge by
        losses[-1] = problem.evaluate(batch_size)
    history = torch.stack(losses, 1)  # (R, steps)
    if batch_size is None and not reseed:
        problem.watch(history)
    return problem.finish(history, converged, reason, time.perf_counter() - start_time)


class _Problem:
    """The parameters of one EM fit: latent variables as ``values``, the others in the module."""

    def __init__(
        self,
        module: HMMModule,
        data: Sequences,
        restarts: int,
        step: GradientStep,
        log_prior: LogPrior | None,
        transition_step: TransitionStep | None,
    ) -> None:
        module._pyro_set_supermodule("", _Context())  # its names are its own, whatever holds it
        self.module: Any = module
        self.restarts, self.step = restarts, copy.copy(step)
        self.step._stepper = None  # an optimizer of this fit's own parameters
        self.log_prior, self.transition_step = log_prior, transition_step
        self.data = to_model_device(module, None, data)
        with torch.no_grad(), poutine.block():
            trace = poutine.trace(lambda: build(module, self.data[:1])).get_trace()
        self.sites = {name: trace.nodes[name]["fn"] for name in trace.stochastic_nodes}
        check_events(self.sites)
        self.names = list(self.sites)
        self.points = [each for each in module.parameters() if each.requires_grad]
        if restarts > 1 and self.points:
            raise ValueError(
                "restarts need every parameter to have a prior, so that each restart has its own; "
                f"{type(module).__name__} has parameters without one."
            )
        if not self.names and not self.points:
            raise ValueError("module has no parameters to fit: all of them are frozen.")
        # what has a closed form; and whether sums over observations are all that an M-step needs
        far = log_prior is not None and not isinstance(log_prior, DiversityPrior)
        self.chain_closed = isinstance(module, TabularHMM) and not far
        known = isinstance(module, TabularHMM | DenseHMM) and not far
        self.emission_closed = known and isinstance(getattr(module, "emission", None), Emission)
        hmm = trace.nodes["_RETURN"]["value"]
        self.symbols = is_categorical(hmm.emission)
        sizes = [hmm.log_initial.dim(), hmm.log_transition.dim()]
        plain = hmm.emission.batch_shape == (hmm.num_states,)
        self.summed = (self.emission_closed or (self.symbols and plain)) and sizes == [1, 2]
        self.moving = [
            name
            for name in self.names
            if not (self.emission_closed if name.startswith("emission.") else self.chain_closed)
        ]
        self.values: Values = {}
        self.leaves: Values = {}  # unconstrained, for gradient steps
        self.notes: dict[str, int] = {}  # and in how many iterations
        self.idle: list[list[bool]] = []  # states that nothing supports, of each restart
        self.parts: tuple[Sequences, list[tuple[Tensor, Sequences]]] | None = None
        self.reseeded = False  # in the last iteration, which may have raised the loss
        # moves that a matrix without a prior leaves possible: its zeros are those of the model
        point = self.chain_closed and "transition" not in self.names
        self.possible = self._current("transition")[0] > 0 if point else None

    # Where the fit stands

    def begin(self, start: Start | Values | None) -> None:
        """Find the first parameters."""
        if start is None:
            if not self.names:
                return  # parameters without priors have values
            start = by_kmeans if self.emission_closed and not self.symbols else from_prior
        build_once(self.module, self.data).prepare_values(
            self.data.values
        )  # are they what is emitted?
        given: Values | Tensor | ExpectedCounts
        if isinstance(start, dict):
            given = start
        else:
            given = start(self.module, self.data, self.restarts)
        if isinstance(given, dict):
            # those of a fit have the name of the module before their own
            own = {name.removeprefix("module."): value for name, value in given.items()}
            absent = [name for name in self.names if name not in own]
            if absent:
                raise ValueError(f"start has no value for {', '.join(absent)}; it has "
                                 f"{', '.join(own) or 'none'}.")  # fmt: skip
            self._adopt(own)
            return
        if self.names:  # gradient steps, and what the counts say nothing of, begin in the prior
            self._adopt(from_prior(self.module, self.data, self.restarts))
        with torch.no_grad():
            hmm, _ = self.build(self.data)
        expected = given if isinstance(given, ExpectedCounts) else _counts(hmm, self.data, given)
        self.maximise(self._gather(expected, self.data, None, hmm))

    def _adopt(self, wide: Values) -> None:
        shape = (self.restarts, 1)
        for name, site in self.sites.items():
            value, event = wide[name].detach(), site.event_shape
            if value.shape == (self.restarts, *event) and self.restarts > 1:
                value = value.unsqueeze(1)
            try:
                value = value.expand(*shape, *event)
            except RuntimeError:
                raise ValueError(
                    f"start must hold {name!r} of shape {tuple(event)}, or one value for each "
                    f"restart, {(self.restarts, *event)}; got {tuple(value.shape)}."
                ) from None
            self.values[name] = value if self.restarts > 1 else value[0, 0]

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        optimizer = self.step._stepper
        return {
            "values": self.values,
            "points": list(self.points),
            "notes": self.notes,
            "leaves": self.leaves,
            "idle": self.idle,
            "reseeded": self.reseeded,
            "stepper": None if optimizer is None else optimizer.state_dict(),
        }

    def restore(self, found: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        device = self.data.values.device
        self.values = {name: value.to(device) for name, value in found["values"].items()}
        self.notes, self.idle = found["notes"], found["idle"]
        self.reseeded = found["reseeded"]
        with torch.no_grad():
            for own, saved in zip(self.points, found["points"]):
                own.copy_(saved)
        self.leaves = {
            name: leaf.to(device).requires_grad_() for name, leaf in found["leaves"].items()
        }
        if found["stepper"] is not None and self.step.optimizer is not None:
            self.step._stepper = self.step.optimizer([*self.leaves.values(), *self._moved()])
            self.step._stepper.load_state_dict(found["stepper"])

    # The two steps

    def build(self, batch: Sequences) -> tuple[HMM, Tensor]:
        """The HMM with the parameters as they are, and their log-prior, ``(R,)`` or a scalar."""
        with poutine.block():
            with poutine.condition(data=self.values):
                trace = poutine.trace(lambda: build(self.module, batch)).get_trace()
            trace.compute_log_prob(site_filter=lambda name, site: name in self.sites)
        prior = sum(
            (trace.nodes[name]["log_prob"].sum(-1) if self.restarts > 1
             else trace.nodes[name]["log_prob"] for name in self.names),
            torch.zeros(()),
        )  # fmt: skip
        hmm: HMM = trace.nodes["_RETURN"]["value"]
        if self.log_prior is not None:
            further = self.log_prior(hmm)
            prior = prior + (further.squeeze(-1) if further.dim() > 1 else further)
        if self.restarts > 1:  # also what is the same in all of them is counted for each
            core = 3 if hmm.transition_per_step else 2
            hmm = hmm.replace(
                log_initial=_wide(hmm.log_initial, 1, self.restarts),
                log_transition=_wide(hmm.log_transition, core, self.restarts),
            )
        if batch.labels is not None:
            hmm = hmm.restrict(batch.labels)
        return hmm, torch.as_tensor(prior)

    def expect(self, batch: Sequences, reseed: bool) -> tuple[Tensor, Any]:
        """The loss ``(R,)`` where the parameters are, and what the M-step needs."""
        if self.summed and self.chain_closed and not reseed:
            parts = self._parted(batch)
        else:
            parts = [(torch.arange(len(batch)), batch)]
        scale = batch.total / len(batch)
        total: Any = 0.0
        found: Any = {}
        for chosen, part in parts:
            with torch.no_grad():
                hmm, prior = self.build(part)
                expected = hmm.expected_counts(part.values)
            evidence = expected.log_evidence.double().reshape(-1, len(part))
            impossible = evidence.isneginf().all(0)
            if bool(impossible.any()):
                where = int(chosen[impossible.byte().argmax()])
                raise ValueError(
                    f"data: sequence {where} of this batch has probability zero; check for symbols "
                    "or moves that no path allows, or give the parameters a prior that rules none "
                    "out."
                )
            total = total + evidence.sum(-1)
            if reseed:
                expected = self._revive(expected)
            own: Any = self._gather(expected, part, hmm, hmm)
            if len(parts) == 1:
                found = own
            else:  # of sums, those of the parts add up
                for name, value in own.items():
                    found[name] = found.get(name, 0.0) + scale * value
        loss = -(scale * total + prior.double())
        if not bool(loss.isfinite().any()):
            raise FloatingPointError(f"the loss is {loss[0].item()}; the prior has density zero at "
                                     "the parameters found.")  # fmt: skip
        return loss, found

    def _parted(self, batch: Sequences) -> list[tuple[Tensor, Sequences]]:
        """Sequences of similar length, and which these are: else most of the work is padding."""
        if self.parts is None or self.parts[0] is not batch:
            order = batch.lengths.argsort(descending=True, stable=True)
            lengths = batch.lengths[order]
            if batch.num_steps * len(batch) < max(PADDED, 1.5 * int(lengths.sum())):
                self.parts = batch, [(order.sort().values, batch)]
                return self.parts[1]
            ends = [0]
            while ends[-1] < len(batch):
                ends.append(int((1.5 * lengths > lengths[ends[-1]]).sum()))
            chosen = [order[a:b].sort().values for a, b in pairwise(ends)]
            self.parts = batch, [(each, batch[each]) for each in chosen]
        return self.parts[1]

    def evaluate(self, batch_size: int) -> Tensor:
        """The loss ``(R,)`` on all the data."""
        total: Any = 0.0
        with torch.no_grad():
            for first in range(0, len(self.data), batch_size):
                batch = self.data[first : first + batch_size]
                hmm, prior = self.build(batch)
                total = total + hmm.log_prob(batch.values).double().reshape(self.restarts, -1).sum(
                    -1
                )
        return -(total * self.data.total / len(self.data) + prior.double()).cpu()

    def _revive(self, expected: ExpectedCounts) -> ExpectedCounts:
        """Give half of what supports the busiest state to each that nothing supports, but might."""
        weights = expected.states.reshape(self.restarts, *expected.states.shape[-3:])
        visits = weights.sum((1, 2))  # (R, K)
        dead = visits < DEAD * visits.sum(-1, keepdim=True)
        self.reseeded = False
        if bool(dead.any()):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                hmm = build_once(self.module, self.data)  # its zeros are those that stay
                hmm = hmm if self.data.labels is None else hmm.restrict(self.data.labels)
                alike = torch.ones(len(self.data), self.data.num_steps, hmm.num_states)
                may = _counts(hmm, self.data, alike.to(visits)).states.sum((0, 1)) > 0
            dead = dead & may
            self.reseeded = bool(dead.any())
        return _split_busiest(expected, weights, dead) if self.reseeded else expected

    def _gather(
        self, expected: ExpectedCounts, batch: Sequences, current: HMM | None, hmm: HMM
    ) -> Statistics | tuple[Sequences, ExpectedCounts]:
        """What the M-step needs: sums over observations if they suffice, else all of them.

        Args:
            expected: Counts.
            batch: The sequences they are of.
            current: What they were computed with, if the emission had a part in it.
            hmm: What the parameters build.
        """
        scale = batch.total / len(batch)
        if not self.summed:
            return batch, ExpectedCounts(*(part.detach() * scale for part in expected))
        weights = expected.states.reshape(self.restarts, *expected.states.shape[-3:])
        seen = batch.observed.flatten()
        flat = weights.flatten(1, 2)
        values = batch.values.flatten(0, 1)
        if not (values.dtype.is_floating_point or self.symbols):
            values = values.to(hmm.log_initial.dtype)
        if not bool(seen.all()):
            flat, values = flat[:, seen], values[seen]
        found: Statistics = {"visits": flat.sum(1).double()}
        if self.chain_closed:
            found |= self.module.statistics(expected, self.restarts)
        else:
            moves = expected.transitions.squeeze(-3)  # the same at all steps
            found |= {"chain.initial": expected.initial, "chain.transition": moves}
        if self.emission_closed:
            law = None if current is None else current.emission
            own = self.module.emission.statistics(values, flat, law)
            found |= {f"emission.{name}": value for name, value in own.items()}
        else:
            emission: Any = hmm.emission
            size = emission.param_shape[-1]
            counts = torch.stack([add_rows(each, values.long(), size).mT for each in flat])
            found["symbols"] = counts.unsqueeze(1) if self.restarts > 1 else counts[0]
        return {name: value * scale for name, value in found.items()} if scale != 1 else found

    def maximise(self, found: Any) -> None:
        """The M-step."""
        if isinstance(found, dict):
            visits = found["visits"]
            self.idle = (visits < DEAD * visits.sum(-1, keepdim=True)).tolist()
            if self.chain_closed or self.emission_closed:
                self._maximise_closed(found)
            names = [name for name in COUNTED if name in found]
            if names:
                read = [COUNTED[name] for name in names]
                self._maximise_by_gradient(
                    self.data[:1],
                    lambda hmm: [each(hmm) for each in read],
                    [found[name] for name in names],
                )
            return
        batch, expected = found
        kept = slice(None)
        if self.chain_closed:  # its terms are as they are, or underflow
            kept = slice(2, None)
            with torch.no_grad():
                self._maximise_closed(self.module.statistics(expected, self.restarts))
        self._maximise_by_gradient(
            batch, lambda hmm: list(hmm.log_factors(batch.values))[kept], expected[1:][kept]
        )

    def _maximise_closed(self, statistics: Statistics) -> None:
        values: Values = {}
        notes: list[str] = []
        if self.chain_closed:
            of_moves = None if self.log_prior is None else self._diversified
            values |= self.module.maximise(statistics, of_moves)
        if self.emission_closed:
            begin = "emission."
            own = {
                name.removeprefix(begin): value
                for name, value in statistics.items()
                if name.startswith(begin)
            }
            found, notes = self.module.emission.maximise(own)
            values |= {begin + name: value for name, value in found.items()}
        for name, value in values.items():
            old = self._current(name)
            new = torch.where(value.isnan(), old.double(), value).to(old.dtype)
            self._put(name, new)
        for note in notes:
            self.notes[note] = self.notes.get(note, 0) + 1

    def _diversified(self, counts: Tensor) -> Tensor:
        """Transition matrices ``(R, K, K)`` by the M-step under a diversity prior."""
        prior: Any = self.log_prior
        step: Any = self.transition_step
        old = self._current("transition").double().expand(counts.shape)
        rows = counts / counts.sum(-1, keepdim=True)
        with torch.no_grad():  # what counts alone say may be a better start than what was there
            heights = [msteps.objective(each, counts, prior) for each in (rows, old)]
        begin = torch.where((heights[0] > heights[1])[:, None, None], rows, old)
        allowed = self.module.transition_allowed
        if self.possible is not None:
            allowed = self.possible if allowed is None else allowed & self.possible
        return step(begin, counts, prior, allowed)

    def _current(self, name: str) -> Tensor:
        """The value ``(R, ...)`` of a parameter."""
        if name in self.values:
            value = self.values[name]
            return value.squeeze(1) if self.restarts > 1 else value.unsqueeze(0)
        *path, last = name.split(".")
        return getattr(self.module.get_submodule(".".join(path)), last).detach().unsqueeze(0)

    def _put(self, name: str, value: Tensor) -> None:
        """Set a parameter to ``value`` ``(R, ...)``."""
        if name in self.values:
            self.values[name] = value.unsqueeze(1) if self.restarts > 1 else value[0]
        else:
            *path, last = name.split(".")
            setattr(self.module.get_submodule(".".join(path)), last, value[0])

    def _moved(self) -> list[Tensor]:
        """The parameters without a prior that gradient steps move."""
        return [
            each
            for name, each in self.module.named_parameters()
            if each.requires_grad
            and not (self.emission_closed if name.startswith("emission.") else self.chain_closed)
        ]

    def _maximise_by_gradient(
        self,
        batch: Sequences,
        terms: Callable[[HMM], Sequence[Tensor]],
        counts: Sequence[Tensor],
    ) -> None:
        """Raise the expected log joint density in what has no closed form.

        Args:
            batch: What the HMM is built for.
            terms: The logarithms that an HMM has for each of the counts.
            counts: Expected numbers of times.
        """
        if self.step.optimizer is None or not self.leaves:
            self.leaves = {
                name: transform_to(self.sites[name].support)
                .inv(self.values[name])
                .clone()
                .requires_grad_()
                for name in self.moving
            }
        known, leaves = dict(self.values), self.leaves
        if not leaves and not self._moved():
            return  # without parameters

        def loss() -> Tensor:
            self.values = known | {
                name: transform_to(self.sites[name].support)(leaf) for name, leaf in leaves.items()
            }
            hmm, prior = self.build(batch)
            total = prior.reshape(-1).expand(self.restarts)
            for logs, count in zip(terms(hmm), counts):
                total = total + _weigh(logs, count).reshape(self.restarts, -1).sum(-1)
            return -total

        with pyro.validation_enabled(False):  # the E-step checks what comes out
            self.step(loss, [*leaves.values(), *self._moved()])
            with torch.no_grad():
                loss()  # leaves the values where the step ended
        self.values = {name: value.detach() for name, value in self.values.items()}

    # The end

    def watch(self, history: Tensor) -> None:
        """Report a loss that has risen by more than rounding."""
        single = any(each.dtype == torch.float32 for each in [*self.values.values(), *self.points])
        slack = (1e-6 if single else 1e-10) * (1 + history.abs().amax().item())
        rise = (history[:, 1:] - history[:, :-1]).max().item() if history.size(1) > 1 else 0.0
        if (
            rise > slack and not self.notes and self.step.guard
        ):  # a floor may raise the loss, and has been noted
            note = (
                f"the loss rose by {rise:.3g} nats in one iteration, which EM must not do: please "
                "report it as an error of this package"
            )
            self.notes[note] = 1
            warnings.warn(note, RuntimeWarning, stacklevel=3)

    def finish(self, history: Tensor, converged: bool, reason: str, seconds: float) -> Fit:
        """The best restart as a fit, all of them beside it."""
        best = int(history[:, -1].argmin())
        notes = uses_labels(self.data) + [
            f"{note} ({count} iterations)" if count > 1 else note
            for note, count in self.notes.items()
        ]
        if self.idle and any(self.idle[best]):
            names = ", ".join(str(k) for k, dead in enumerate(self.idle[best]) if dead)
            notes.append(
                f"no observation supports state {names}: it stands where its prior or its start "
                "put it. Fewer states, restarts or reseed=True may help."
            )
        model = MarginalModel(self.module, self.log_prior)
        values = {f"module.{name}": value.detach() for name, value in self.values.items()}
        every = None
        if self.restarts > 1:
            stacked = {name: value.squeeze(1) for name, value in values.items()}
            every = Restarts(model, history, history[:, -1], stacked, best)
            values = {name: value[best] for name, value in stacked.items()}
        return Fit(
            model,
            Point(values),
            history[best],
            converged,
            reason,
            seconds,
            self.data.num_observed,
            list(values),
            notes=notes,
            restarts=every,
            method="EM",
            window=1,
            supports={f"module.{name}": site.support for name, site in self.sites.items()},
        )


def _wide(tensor: Tensor, core: int, restarts: int) -> Tensor:
    """``tensor`` with dimensions ``(R, 1)`` or ``(R, N)`` before its ``core`` last ones."""
    lead = tensor.shape[: tensor.dim() - core]
    if len(lead) > 1:
        return tensor
    inner = (lead or torch.Size([1])) + tensor.shape[tensor.dim() - core :]
    return tensor.reshape(inner).expand(restarts, *inner)


def _counts(hmm: HMM, data: Sequences, weights: Tensor) -> ExpectedCounts:
    """Expected counts if all moves ``hmm`` allows were alike, and ``weights`` the likelihoods."""
    initial, transition, likelihood = hmm.log_factors(data.values, check=False)
    likelihood = weights.reshape(likelihood.shape).log().to(likelihood)
    if hmm.allowed is not None:
        likelihood = likelihood.masked_fill(~hmm.allowed, -torch.inf)
    alike = [
        torch.zeros_like(part).masked_fill(part.isneginf(), -torch.inf)
        for part in (initial, transition)
    ]
    return recursions.expected_counts(
        alike[0].log_softmax(-1), alike[1].log_softmax(-1), likelihood, hmm.lengths
    )


def _split_busiest(expected: ExpectedCounts, weights: Tensor, dead: Tensor) -> ExpectedCounts:
    """Give half of what supports the busiest state to each of the ``dead`` ones.

    Args:
        expected: Counts.
        weights: Their ``states``, ``(R, N, T, K)``.
        dead: ``(R, K)``.
    """
    size = dead.shape
    weights = weights.clone()
    initial = expected.initial.reshape(size).clone()
    moves = expected.transitions.reshape(size[0], -1, size[1], size[1]).clone()
    for r, k in dead.nonzero().tolist():
        busy = int(weights[r].sum((0, 1)).argmax())
        part = torch.rand_like(weights[r, ..., 0]) < 0.5  # of the steps: so that the halves differ
        weights[r, ..., k] = weights[r, ..., busy] * part
        weights[r, ..., busy] *= ~part
        initial[r, [busy, k]] = initial[r, busy] / 2
        moves[r, :, [busy, k]] = moves[r, :, [busy, busy]] / 2
        moves[r, :, :, [busy, k]] = moves[r, :, :, [busy, busy]] / 2
    return ExpectedCounts(
        expected.log_evidence,
        initial.reshape(expected.initial.shape),
        moves.reshape(expected.transitions.shape),
        weights.reshape(expected.states.shape),
    )
