"""The iterations of EM: E-step, M-step, restarts that are given up, convergence, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, NoReturn

import torch
from pyro.distributions.util import is_validation_enabled, validation_enabled
from torch import Tensor

from .._choices import threads_for
from .._sync import guessing
from ..chains.base import ExpectedCounts
from ..data.batches import Batches
from ..data.parts import Parts, parts_of
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from .descent import copy_values
from .graphs import GRAPHS, Replays, is_known
from .loop import FitLoop
from .maximization import Maximization, Sums, combined, joined
from .parameters import Extrapolation, Parameters, Values
from .process_group import ProcessGroup

RANKED = 20  # iterations after which the worse half of the restarts is given up, and again
SPAN = 6  # iterations whose fall of the loss is compared with that of as many before
SLOW = 0.25  # ratio of these, from which extrapolation pays


def uniform_counts(hmm: HMM, data: Sequences, likelihood: Tensor) -> ExpectedCounts:
    """Expected counts if all transitions that ``hmm`` allows were equally probable.

    Args:
        hmm: Its zeros stay.
        data: The sequences.
        likelihood: ``(R, N, T, K)`` or ``(N, T, K)``, of each state at each step.
    """
    logs = likelihood.reshape(-1, *likelihood.shape[-3:]).log().to(hmm.log_initial)
    if len(hmm.batch_shape) == 1:
        logs = logs.squeeze(0)
    if hmm.allowed is not None:
        logs = logs.masked_fill(~hmm.allowed, -torch.inf)
    return hmm.chain.uniform().expected_counts(logs, hmm.lengths)


class Loop(FitLoop):
    """The iterations of EM: E-step, convergence, M-step; restarts that are given up.

    Args:
        parameters: Those of the module.
        maximize: The M-step.
        group: The data-parallel ranks.
        arguments: Those of :func:`pyrohmm.fit_em`, by name.
        large: Whether the data are so large that few restarts go on.

    Attributes:
        decay: Of the step sizes with which statistics of minibatches are averaged; None if there
            are no minibatches.
        average: The averaged statistics.
        squarem: Extrapolates, if the loss can be compared from one iteration to the next.
        ranked: Whether restarts that are behind are given up.
        losses: Minus the log joint density at each iteration, ``(R,)``; that of a restart that was
            given up stays as it was.
        log_prior: ``(R,)`` or a scalar, that of the last E-step.
        log_priors: ``(R,)``, at each iteration.
        alive: The restarts that go on.
        settled: Which of these have converged.
        values: Latent variables of all restarts by name, ``(R, ...)``, as they are or were.
        last: Sums of the last E-step.
    """

    further = 1  # losses besides one for each step: that at the end

    def __init__(
        self, parameters: Parameters, maximize: Maximization, group: ProcessGroup,
        arguments: Mapping[str, Any], large: bool = False,
    ) -> None:  # fmt: skip
        given, data = arguments.get, parameters.data
        batch_size, acceleration = given("batch_size"), given("acceleration")
        stored = "an iterable of Sequences" if isinstance(data, Parts) else None
        parts = "batch_size" if batch_size is not None else stored
        parts = "a fit in several ranks" if group.size > 1 else parts
        if parts is not None and not maximize.summed:
            raise ValueError(
                f"{parts} needs a module whose M-step needs nothing but sums over observations; "
                f"that of {type(parameters.module).__name__} needs all of them. Use fit_map."
            )
        if batch_size is not None and batch_size >= len(data):
            batch_size = None
        falls = batch_size is None
        if acceleration and not falls:
            raise ValueError(
                "acceleration needs EM of all data, whose loss never rises: leave out batch_size, "
                "or acceleration."
            )
        batches = Batches(data, batch_size, given("generator"), group=group)
        super().__init__(batches, group, arguments)
        self.parameters, self.maximize = parameters, maximize
        self.log_prior = torch.zeros(())
        self._seen: tuple[Any, int] = None, 0  # the last batch, and how often in succession
        self.tolerance = given("tolerance") if falls else None
        self.decay = None if falls else given("decay")
        self.average: Sums = {}
        # an optimizer of the user's, and a fit of so many steps, go their own way
        self.ranked = self.tolerance is not None and maximize.gradient.step.optimizer is None
        self.accelerates = self.ranked if acceleration is None else acceleration
        self.squarem = Extrapolation(parameters, maximize.gradient, bool(acceleration))
        self.log_priors: list[Tensor] = []
        self.alive = torch.arange(parameters.restarts)
        self.values: Values = {}
        self.large = large
        # the E-step as a graph, and the tensors in which it reads the parameters
        alone = group.size == 1 and falls and maximize.summed and data.device.type in GRAPHS
        alone &= not (parameters.points or isinstance(data, Parts))
        self.replayed = alone and is_known(parameters.module, parameters.log_prior)
        self.replays: Replays | None = None
        self.fixed: Values = {}
        self.settled = torch.zeros(parameters.restarts, dtype=torch.bool)
        self.last: Sums = {}

    def run(self) -> None:
        """Iterate until the fit has converged or has taken all steps."""
        parameters = self.parameters
        with threads_for(parameters.cost * self.batches.steps_at_once), self.batches.explained():
            if self.group.size > 1:  # processors may differ in rounding
                self._start_as_first()
            if self.decay is not None and not self.average:
                _, self.average = self._whole_set()
            self.take_steps()
            if self.decay is not None:  # the loss of one batch is too noisy to judge restarts by
                self.losses[-1], self.last = self._whole_set()
            elif not self.last:  # the checkpoint is that of a fit which has ended
                _, self.last = self.expect(self.batches.take())
        self.replays = None  # and its memory

    def _start_as_first(self) -> None:
        """Set all parameters to those of rank 0."""
        parameters, from_first = self.parameters, self.group.from_first
        shapes = {n: list(value.shape) for n, value in parameters.values.items()}
        self.group.check_alike({"parameters": [shapes, [list(p.shape) for p in parameters.points]]})
        parameters.values = {n: from_first(value) for n, value in parameters.values.items()}
        copy_values(map(from_first, parameters.points), parameters.points)

    def expect(self, batch: Sequences | Parts, counted: bool = True) -> tuple[Tensor, Sums]:
        """E-step: loss ``(R,)`` at the current parameters, and the statistics for the M-step.

        The loss is on the CPU. An accelerator is waited for once, unless numbers are unusual. If
        not ``counted`` there are no statistics: of restarts that are only compared.
        """
        last, times = self._seen
        self._seen = batch, times + 1 if batch is last else 1
        statistics: Sums = {}
        evidences: list[tuple[Tensor, Tensor]] = []
        if self.replayed and (found := self._replay(batch, counted)) is not None:
            return found
        if self.group.size == 1:  # ranks stay in step
            # by then data, start and what an M-step returns have been checked
            validate = is_validation_enabled() and self._seen[1] <= 2
            with suppress(ValueError), validation_enabled(validate):  # of what a wrong guess made
                with guessing() as guesses:
                    loss, log_prior, statistics, _ = self._compute(batch, counted)
                right, (read, log_prior) = guesses.read(loss, log_prior)
                if right and -math.inf < read.amin().item() < math.inf:  # NaN wins a minimum
                    self.log_prior = log_prior
                    return read, statistics

        def compute() -> Tensor:
            nonlocal statistics, evidences
            loss, self.log_prior, statistics, evidences = self._compute(batch, counted)
            return loss

        loss = self.group.mean_of(compute, len(self.alive))
        if not bool(loss.isfinite().any()):
            self._refuse(loss, evidences)
        if self.group.size > 1:
            statistics = combined(torch.Tensor.contiguous, statistics)
            self.group.mean_all(value for kind in statistics.values() for value in kind.values())
        return loss.cpu(), statistics

    def _replay(self, batch: Sequences | Parts, counted: bool) -> tuple[Tensor, Sums] | None:
        """The E-step by a graph; None where there is none, or numbers are unusual."""
        current, device = self.parameters.values, self.parameters.data.device
        shapes = {name: value.shape for name, value in current.items()}
        if self.replays is None or shapes != {n: x.shape for n, x in self.fixed.items()}:
            self.replays = Replays(self._compute, device)
            self.fixed = {name: value.clone() for name, value in current.items()}
        for name, value in current.items():
            self.fixed[name].copy_(value)
        self.parameters.values = self.fixed
        try:
            found = self.replays(batch, counted)
        finally:
            self.parameters.values = current
        if found is None:
            return None
        loss, log_prior = torch.stack(found[:2]).cpu()
        if not -math.inf < loss.amin().item() < math.inf:
            return None
        self.log_prior = log_prior
        return loss, combined(torch.clone, found[2]) if counted else {}

    def _compute(
        self, batch: Sequences | Parts, counted: bool
    ) -> tuple[Tensor, Tensor, Sums, list[tuple[Tensor, Tensor]]]:
        """Loss and log prior ``(R,)``, statistics; log evidences ``(R, N)`` with their numbers."""
        total: Any = 0.0
        sums: Sums = {}
        evidences = []
        for chosen, part, scale in self._pieces(batch):
            with torch.no_grad():
                hmm, prior = self.parameters.build(part)
                if counted:
                    by_symbol = self.maximize.by_symbol and hmm.allowed is None
                    options = {"by_symbol": True} if by_symbol else {}
                    expected = hmm.expected_counts(part.values, **options)
                    more = self.maximize.gather(expected, None if by_symbol else part, hmm, scale)
                    sums = joined(sums, more) if sums else more
                evidence = expected.log_evidence if counted else hmm.log_prob(part.values)
            evidences.append((chosen, evidence.double().reshape(-1, len(part))))
            total = total + scale * evidences[-1][1].sum(-1)
        log_prior = torch.zeros_like(total) + prior
        return -(total + log_prior), log_prior, sums, evidences

    def _refuse(self, loss: Tensor, evidences: list[tuple[Tensor, Tensor]]) -> NoReturn:
        """Raise if the loss is infinite in all restarts, with the cause."""
        error = None
        for chosen, evidence in evidences:
            if error is None and bool((impossible := evidence.isneginf().all(0)).any()):
                where = int(chosen[impossible.byte().argmax()])
                error = ValueError(
                    f"data: sequence {where} has probability zero; check for symbols or "
                    "transitions that no path allows, or give priors that rule none out."
                )
        self.group.together(error)
        text = f"the loss is {loss[0].item()}; the prior has density zero at the parameters"
        raise FloatingPointError(f"{text}. Give a start inside its support, or a wider prior.")

    def _pieces(self, batch: Sequences | Parts) -> Iterator[tuple[Tensor, Sequences, float]]:
        """Pieces of a batch: numbers of the sequences, the sequences, and their scale."""
        sizes = batch.sizes if isinstance(batch, Parts) else []
        for before, part in zip(accumulate([0, *sizes]), parts_of(batch)):
            for piece in [part] if self.maximize.whole else part.buckets:
                yield before + piece.indices, piece, part.total / len(part)

    def step(self) -> None:
        """One EM iteration: E-step, convergence check, M-step."""
        batch = self.batches.take()
        # where all but two are given up at once, the statistics of these are enough
        few = self.ranked and self.large and not self.losses and len(self.alive) > 2
        loss, sums = self._judge(batch) if self.squarem.proposed else self.expect(batch, not few)
        self._append(self.losses, loss)
        self._append(self.log_priors, self.log_prior)
        if not self.bar.disable:
            nats = loss.min().item() / max(self.batches.data.num_observed, 1)
            self.bar.set_postfix(nats_per_step=f"{nats:.4f}", refresh=False)
        self.reason = self._why_converged()
        if self.reason is not None or len(self.losses) > self.num_iterations:
            self.last = sums
            return
        if len(self.alive) > 1 and len(chosen := self._promising()) < len(self.alive):
            self._keep(chosen)
            loss, sums = self.expect(batch)
        if self.decay is not None:
            sums = self.average = _mixed(self.average, sums, (len(self.losses) + 1) ** -self.decay)
        self.maximize(sums)
        if bool(self.squarem.active.any()):
            self.squarem.record()

    def _append(self, past: list[Tensor], new: Tensor) -> None:
        """Append one number for each restart; those given up keep their last."""
        row = new.detach().double().cpu().expand(len(self.alive))
        past.append(past[-1].index_copy(0, self.alive, row) if past else row)

    def _why_converged(self) -> str | None:
        """The reason to end the fit, if no restart may still gain much.

        On the way ``settled`` is set, and extrapolation begins in restarts that have become slow.
        Falls of the loss that shrink by a rate r sum to r / (1 - r) times the last one (Aitken);
        they are those over ``SPAN`` iterations, for those over one may be lost in rounding, and the
        largest rate counts: at the start what is fast hides what is slow.
        """
        if self.tolerance is None or len(self.losses) < 3:
            return None
        losses = torch.stack(self.losses[-3 * SPAN :])[:, self.alive]
        if len(losses) < 3 * SPAN:  # too early, unless it does not move at all
            gain = torch.where(losses[-1] < losses[-2], torch.inf, 0.0)
        else:
            falls = losses[:-SPAN] - losses[SPAN:]
            fall, rate = falls[-1], (falls[SPAN:] / falls[:-SPAN]).nan_to_num(0.0).amax(0)
            # extrapolation takes away the slowest for a while
            rate = torch.where(self.squarem.active, rate.clamp(min=0.9), rate)
            if self.accelerates and len(self.losses) % 3 == 0:
                self.squarem.active |= rate > SLOW  # so that steps are those of each restart alone
            gain = torch.where(rate < 1, fall * rate / (1 - rate), torch.inf)
            gain = torch.where(fall <= 0, 0.0, gain)
        limits = self.tolerance * (losses[-1] - self.parameters.units).abs()
        self.settled = gain <= limits
        if not bool(self.settled.all()):
            return None
        return f"the loss may fall by less than {self.tolerance:g} of itself"

    def _promising(self) -> Tensor:
        """Indices of the running restarts that are continued.

        The worse half is given up after each ``RANKED`` iterations, all but the best at the first
        one of large data, but never the first, with which a fit of one begins; and any that has
        converged above another one.
        """
        loss = self.losses[-1][self.alive].nan_to_num(nan=torch.inf)
        going = torch.ones_like(loss, dtype=torch.bool)
        if self.ranked:
            at_once = self.large and len(self.losses) == 1
            if at_once or len(self.losses) % RANKED == 0:
                kept = 1 if at_once else (len(loss) + 1) // 2
                going[loss.argsort(stable=True)[kept:]] = False
                going[self.alive == 0] = True
            going &= ~(self.settled & (loss > loss.min()))
        return going.nonzero().squeeze(-1)

    def _keep(self, chosen: Tensor) -> None:
        """Keep only the running restarts ``chosen``."""
        self.keep_values()
        self.parameters.keep(chosen.to(self.parameters.data.device))
        self.alive, self.settled = self.alive[chosen], self.settled[chosen]
        self.squarem.keep(chosen)

    def keep_values(self) -> None:
        """Copy parameters of the running restarts into those of all restarts."""
        now = {name: value.detach() for name, value in self.parameters.values.items()}
        if len(self.alive) == len(self.losses[-1]):
            self.values = now
            return
        for name, value in now.items():
            self.values[name] = self.values[name].index_copy(0, self.alive.to(value.device), value)

    def _whole_set(self) -> tuple[Tensor, Sums]:
        """The loss and the statistics of all the data, in minibatches."""
        data, seen, total = self.batches.data, 0, torch.zeros(())
        if isinstance(data, Parts) or data.sharded:  # of which ranks have unlike numbers
            return self.expect(self.group.share(data))
        average: Sums = {}
        for chosen in torch.arange(len(data)).split(self.batches.batch_size):
            self.batches.chosen = chosen
            seen += len(chosen)
            loss, statistics = self.expect(self.group.share(data.batch(chosen)))
            total = total + loss * len(chosen) / len(data)
            average = _mixed(average, statistics, len(chosen) / seen)
        return total, average

    def _judge(self, batch: Sequences) -> tuple[Tensor, Sums]:
        """E-step at the extrapolated parameters, undone in restarts whose loss rises."""
        past = self.losses[-1][self.alive]
        try:
            loss, statistics = self.expect(batch)
            worse = ~(loss <= past)
        except (ArithmeticError, RuntimeError, ValueError):  # they are impossible
            worse = torch.ones_like(past, dtype=torch.bool)
        return self.expect(batch) if self.squarem.undo(worse) else (loss, statistics)

    def state(self) -> dict[str, Any]:
        """Checkpoint state: parameters, M-step, running restarts, statistics, extrapolation."""
        self.keep_values()
        own = {
            "log_priors": torch.stack(self.log_priors),
            "alive": self.alive,
            "all_values": self.values,
            "statistics": self.average,
            "squarem": self.squarem.state(),
        }
        return own | self.parameters.state() | self.maximize.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore parameters, M-step, restarts, statistics and extrapolation from a checkpoint."""
        self.alive, self.values = state["alive"], state["all_values"]
        self.parameters.restarts = len(self.alive)
        self.settled = torch.zeros(len(self.alive), dtype=torch.bool)
        self.parameters.restore(state)
        self.maximize.restore(state)
        self.squarem.restore(state["squarem"])
        device = self.parameters.data.device
        self.average = combined(lambda value: value.to(device), state["statistics"])
        self.log_priors = list(state["log_priors"])
        if state["reason"] is not None and self.reason is None:
            self.losses.pop()  # the last E-step is done again
            self.log_priors.pop()


def _mixed(old: Sums, new: Sums, rate: float) -> Sums:
    """Statistics ``(1 - rate) old + rate new``; ``new`` if there are no old ones."""
    return combined(lambda one, other: torch.lerp(one, other, rate), old, new) if old else new
