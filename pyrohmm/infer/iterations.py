"""The iterations of EM: restarts that are given up, extrapolation, convergence, checkpoints."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.distributions import transform_to
from tqdm import tqdm

from .._choices import threads_for
from ..data.batches import Batches, Parts
from ..data.sequences import Sequences
from ..io.files import Checkpoint
from ..nn.closed_form import Statistics
from .expectation import Expectation
from .maximization import GradientSteps, Maximization
from .parameters import Parameters, Values
from .process_group import ProcessGroup

RANKED = 20  # iterations after which the worse half of the restarts is given up, and again
SPAN = 6  # iterations whose fall of the loss is compared with that of as many before
SLOW = 0.25  # ratio of these, from which extrapolation pays
GROWTH = 4.0  # of the longest extrapolation when one of that length has succeeded


class Extrapolation:
    r"""Steps of SQUAREM (Varadhan and Roland, 2008, Scandinavian Journal of Statistics 35).

    From two iterations of EM, :math:`\theta_0, \theta_1, \theta_2`, with
    :math:`r = \theta_1 - \theta_0` and :math:`v = \theta_2 - \theta_1 - r`, it proposes
    :math:`\theta_0 + 2 s r + s^2 v`, where :math:`s = |r| / |v|` in each restart. Coordinates are
    unconstrained, such as logarithms of probabilities; hard zeros stay.

    Args:
        parameters: Of the fit; they are set.
        gradient: Gradient steps, which may hold coordinates of their own.
        active: Whether it extrapolates; else it waits until EM is slow.

    Attributes:
        active: Whether each restart extrapolates, ``(R,)``; others take steps of EM.
        proposed: Whether the parameters are a proposal that is to be judged.
    """

    def __init__(self, parameters: Parameters, gradient: GradientSteps, active: bool) -> None:
        self.parameters, self.gradient = parameters, gradient
        self.active = torch.full((parameters.restarts,), active)
        self._transforms = {n: transform_to(site.support) for n, site in parameters.sites.items()}
        self.path: list[Tensor] = []  # coordinates (R, P) of iterations, then the proposal
        self.shapes: list[torch.Size] = []  # of the coordinates of each parameter
        self.proposed = False
        self.longest = torch.full((parameters.restarts, 1), GROWTH, dtype=torch.float64)
        self.length = torch.ones_like(self.longest)

    @torch.no_grad()
    def record(self) -> None:
        """Take the parameters of one more iteration, and propose others after two."""
        values, points = self.parameters.values, self.parameters.points
        latent = [to.inv(values[name].double()) for name, to in self._transforms.items()]
        pieces = latent + [point.double() for point in points]
        self.shapes = [piece.shape for piece in pieces]
        self.path.append(torch.cat([x.reshape(len(self.longest), -1) for x in pieces], 1))
        if len(self.path) < 3:
            return
        first, second, third = self.path
        ahead = second - first
        turn = third - second - ahead
        usable = turn.isfinite()
        ahead, turn = ahead.where(usable, 0.0), turn.where(usable, 0.0)
        length = ahead.norm(dim=-1, keepdim=True) / turn.norm(dim=-1, keepdim=True)
        self.length = length.nan_to_num(1.0).cpu().clamp(min=1.0).minimum(self.longest)
        self.length[~self.active] = 1.0
        s = self.length.to(ahead.device)
        self.path = [third]
        self.proposed = bool((self.length > 1).any())
        if self.proposed:  # at s = 1 it is the third
            self.path.append(third + 2 * (s - 1) * ahead + (s * s - 1) * turn)
            self._write(self.path[1])
        else:
            self._lengthen()

    @torch.no_grad()
    def undo(self, worse: Tensor) -> bool:
        """Take back the proposals that are ``worse``, ``(R,)``, and have longer steps after others.

        Args:
            worse: Whether a proposal has lowered the log joint density, or has none.

        Returns:
            Whether any was taken back.
        """
        third, proposal = self.path
        bad = worse.reshape(-1, 1) & (self.length > 1)
        kept = torch.where(bad.to(third.device), third, proposal)
        self.proposed, self.path = False, []
        self._lengthen()
        self.longest = torch.where(bad, (self.length / GROWTH).clamp(min=1.0), self.longest)
        undone = bool(bad.any())
        if undone:
            self._write(kept)
        return undone

    def keep(self, chosen: Tensor) -> None:
        """Go on with some of the restarts alone."""
        self.path = [flat[chosen.to(flat.device)] for flat in self.path]
        self.shapes = [torch.Size([len(chosen), *shape[1:]]) for shape in self.shapes]
        self.longest, self.length, self.active = (
            each[chosen] for each in (self.longest, self.length, self.active)
        )

    def _lengthen(self) -> None:
        """Allow longer steps where the last one was as long as allowed."""
        self.longest = torch.where(self.length < self.longest, 1.0, GROWTH) * self.longest

    def _write(self, flat: Tensor) -> None:
        """Set the parameters to coordinates ``(R, P)``."""
        values, leaves = self.parameters.values, self.gradient.leaves
        sizes = [shape.numel() // len(flat) for shape in self.shapes]
        pieces = [x.reshape(shape) for x, shape in zip(flat.split(sizes, 1), self.shapes)]
        for (name, to), piece in zip(self._transforms.items(), pieces):
            values[name] = to(piece).to(values[name].dtype)
            if name in leaves:
                leaves[name].copy_(piece)
        for point, piece in zip(self.parameters.points, pieces[len(self._transforms) :]):
            point.copy_(piece)

    STATE = "path", "shapes", "proposed", "longest", "length", "active"

    def state(self) -> dict[str, Any]:
        """State, for checkpoints."""
        return {name: getattr(self, name) for name in self.STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name in self.STATE:
            setattr(self, name, state[name])


class Loop:
    """The iterations of EM, and what a checkpoint saves of them.

    Arguments are those of :func:`pyrohmm.fit_em`.

    Attributes:
        decay: Of the step sizes with which statistics of minibatches are averaged; else None.
        average: The averaged statistics.
        squarem: Extrapolates, if the loss can be compared from one iteration to the next.
        ranked: Whether restarts that are behind are given up.
        losses: Minus the log joint density at each iteration, ``(R,)``; that of a restart that was
            given up stays as it was.
        log_priors: ``(R,)``, at each iteration.
        alive: The restarts that go on.
        settled: Which of these have converged.
        num_first: How many restarts at the front are given up only when they have converged.
        large: Whether the data are so large that few restarts go on.
        values: Latent variables of all restarts by name, ``(R, ...)``, as they are or were.
        reason: Why the fit has converged.
        last: Statistics of the last E-step.
    """

    def __init__(
        self,
        parameters: Parameters,
        maximize: Maximization,
        group: ProcessGroup,
        *,
        num_iterations: int,
        tolerance: float | None,
        batch_size: int | None = None,
        decay: float = 0.7,
        acceleration: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        data, self.group = parameters.data, group
        maximize.check_parts(group.size > 1, batch_size)
        if batch_size is not None and batch_size >= len(data):
            batch_size = None
        falls = batch_size is None and group.size == 1
        if acceleration and not falls:
            raise ValueError(
                "acceleration needs EM of all data in one process, whose loss never rises: leave "
                "out batch_size, or acceleration."
            )
        self.parameters, self.maximize, self.num_iterations = parameters, maximize, num_iterations
        self.expect = Expectation(parameters, maximize, group)
        self.batches = Batches(
            data, batch_size, generator, shard=group.share, agree=group.from_first
        )
        self.tolerance = None if batch_size is not None else tolerance
        self.decay = None if batch_size is None else decay
        self.average: Statistics = {}
        # an optimizer of the user's, and a fit of so many steps, go their own way
        self.ranked = falls and tolerance is not None and maximize.gradient.step.optimizer is None
        self.squarem: Extrapolation | None = None
        if acceleration or (acceleration is None and self.ranked):
            self.squarem = Extrapolation(parameters, maximize.gradient, bool(acceleration))
        self.checkpoint: Checkpoint | None = None
        self.losses: list[Tensor] = []
        self.log_priors: list[Tensor] = []
        self.alive = torch.arange(parameters.restarts)
        self.values: Values = {}
        self.num_first, self.large = 1, False
        self.settled = torch.zeros(parameters.restarts, dtype=torch.bool)
        self.reason: str | None = None
        self.ended = f"it took all {num_iterations} steps"  # if it has not converged
        self.last: Statistics = {}
        self.start_time = time.perf_counter()

    def run(self, progress: bool | None = False) -> None:
        """E-step, convergence, M-step, until it has converged or has taken all steps.

        Args:
            progress: Whether to show a bar; None if stderr is a terminal.
        """
        hidden = None if progress is None else not progress
        with (
            tqdm(total=self.num_iterations, disable=not self.group.is_first or hidden) as bar,
            threads_for(self.parameters.cost * self.batches.steps_at_once),
        ):
            if self.decay is not None and not self.average:
                _, self.average = self.whole_set()
            if self.group.size > 1:
                values = [*self.parameters.values.values(), *self.parameters.points]
                random = self.batches.generator
                self.group.check_alike(self.batches.data, random, values, len(self.losses))
            self._iterate(bar)
        self.group.wait()  # for the file, which another fit may ask for
        if self.decay is not None:  # the loss of one batch is too noisy to judge restarts by
            self.losses[-1], self.last = self.whole_set()

    def _iterate(self, bar: tqdm) -> None:
        data = self.batches.data
        known = self.reason is not None  # the checkpoint says so already
        while self.reason is None and len(self.losses) <= self.num_iterations:
            if self.checkpoint is not None and self.losses:
                if self.checkpoint.is_due() or len(self.losses) == self.num_iterations:
                    self._save(self.checkpoint)
            batch = self.batches.take()
            proposed = self.squarem is not None and self.squarem.proposed
            loss, statistics = self._judge(batch) if proposed else self._expect(batch)
            self._append(self.losses, loss)
            self._append(self.log_priors, self.expect.log_prior)
            if not bar.disable:
                nats = loss.min().item() / max(data.num_observed, 1)
                bar.set_postfix(nats_per_step=f"{nats:.4f}", refresh=False)
            self.reason = self._why_converged()
            if self.reason is not None or len(self.losses) > self.num_iterations:
                self.last = statistics
                break
            if len(self.alive) > 1 and len(chosen := self._promising()) < len(self.alive):
                self._keep(chosen)
                loss, statistics = self._expect(batch)
            if self.decay is not None:
                rate = (len(self.losses) + 1) ** -self.decay
                statistics = self.average = _mixed(self.average, statistics, rate)
            self.maximize(statistics, batch)
            if self.squarem is not None and bool(self.squarem.active.any()):
                self.squarem.record()
            bar.update()
        if self.checkpoint is not None and self.reason is not None and not known:
            self._save(self.checkpoint)
        if not self.last:  # the checkpoint is that of a fit which has ended
            _, self.last = self._expect(self.batches.take())

    def _append(self, past: list[Tensor], new: Tensor) -> None:
        """Note a number of each restart that goes on; those of others stay as they were."""
        row = past[-1].clone() if past else torch.zeros(len(self.alive), dtype=torch.float64)
        row[self.alive] = new.detach().double().cpu()
        past.append(row)

    def _why_converged(self) -> str | None:
        """The reason to end the fit, if no restart may still gain much.

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
            if self.squarem is not None:
                # extrapolation takes away the slowest for a while
                rate = torch.where(self.squarem.active, rate.clamp(min=0.9), rate)
                if len(self.losses) % 3 == 0:  # so that steps are those of each restart alone
                    self.squarem.active |= rate > SLOW
            gain = torch.where(rate < 1, fall * rate / (1 - rate), torch.inf)
            gain = torch.where(fall <= 0, 0.0, gain)
        limits = self.tolerance * (losses[-1] - self.parameters.units).abs()
        self.settled = gain <= limits
        if not bool(self.settled.all()):
            return None
        return f"the loss may fall by less than {self.tolerance:g} of itself"

    def _promising(self) -> Tensor:
        """Which of the restarts that are alive go on, integers.

        The worse half is given up after each ``RANKED`` iterations, all but the best at the first
        one of large data, but never the ``num_first`` with which a fit of fewer restarts begins;
        and any that has converged above another one.
        """
        loss = self.losses[-1][self.alive].nan_to_num(nan=torch.inf)
        going = torch.ones_like(loss, dtype=torch.bool)
        if self.ranked:
            at_once = self.large and len(self.losses) == 1
            if at_once or len(self.losses) % RANKED == 0:
                kept = 1 if at_once else (len(loss) + 1) // 2
                going[loss.argsort(stable=True)[kept:]] = False
                going[self.alive < self.num_first] = True
            going &= ~(self.settled & (loss > loss.min()))
        return going.nonzero().squeeze(-1)

    def _keep(self, chosen: Tensor) -> None:
        """Go on with some of the restarts that are alive."""
        self.keep_values()
        self.parameters.keep(chosen.to(self.parameters.data.device))
        self.alive, self.settled = self.alive[chosen], self.settled[chosen]
        if self.squarem is not None:
            self.squarem.keep(chosen)

    def keep_values(self) -> None:
        """Put the values of the restarts that go on beside those of the others."""
        now = {name: value.detach() for name, value in self.parameters.stacked().items()}
        if len(self.alive) == len(self.losses[-1]):
            self.values = now
            return
        for name, value in now.items():
            self.values[name] = self.values[name].index_copy(0, self.alive.to(value.device), value)

    def whole_set(self) -> tuple[Tensor, Statistics]:
        """The loss and the statistics of all the data, in minibatches."""
        data, seen, total = self.batches.data, 0, torch.zeros(())
        if isinstance(data, Parts):
            return self._expect(self.batches.shard(data))
        average: Statistics = {}
        for chosen in torch.arange(len(data)).split(self.batches.batch_size):
            self.batches.chosen = chosen
            seen += len(chosen)
            loss, statistics = self._expect(self.batches.shard(data.batch(chosen)))
            total = total + loss * len(chosen) / len(data)
            average = _mixed(average, statistics, len(chosen) / seen)
        return total, average

    def _judge(self, batch: Sequences) -> tuple[Tensor, Statistics]:
        """E-step at the parameters proposed, or where these are worse, at those before."""
        squarem: Any = self.squarem
        past = self.losses[-1][self.alive]
        try:
            loss, statistics = self.expect(batch)
            worse = ~(loss <= past)
        except (ArithmeticError, RuntimeError, ValueError):  # they are impossible
            worse = torch.ones_like(past, dtype=torch.bool)
        return self._expect(batch) if squarem.undo(worse) else (loss, statistics)

    def _expect(self, batch: Sequences) -> tuple[Tensor, Statistics]:
        try:
            return self.expect(batch)
        except ValueError as error:
            self.batches.explain(error)
            raise

    @property
    def seconds(self) -> float:
        """How long the fit has taken."""
        return time.perf_counter() - self.start_time

    def _save(self, checkpoint: Checkpoint) -> None:
        self.keep_values()
        checkpoint.save(
            {
                "losses": torch.stack(self.losses),
                "log_priors": torch.stack(self.log_priors),
                "alive": self.alive,
                "all_values": self.values,
                "statistics": self.average,
                "tolerance": self.tolerance,
                "reason": self.reason,
                "batches": self.batches.state(),
                "seconds": self.seconds,
                **self.parameters.state(),
                **self.maximize.state(),
                "squarem": None if self.squarem is None else self.squarem.state(),
            }
        )

    def resume(self) -> bool:
        """Go on from the checkpoint; returns whether there is one."""
        if self.checkpoint is None:
            return False
        return self.checkpoint.resume(self._restore, self.parameters.points)

    def _restore(self, state: dict[str, Any]) -> None:
        self.alive = state["alive"]
        self.parameters.restarts = len(self.alive)
        self.settled = torch.zeros(len(self.alive), dtype=torch.bool)
        self.parameters.restore(state)
        self.values = state["all_values"]
        self.maximize.restore(state)
        if self.squarem is not None and state["squarem"] is not None:
            self.squarem.restore(state["squarem"])
        self.batches.restore(state["batches"])
        device = self.parameters.data.device
        self.average = {name: value.to(device) for name, value in state["statistics"].items()}
        self.losses = list(state["losses"])
        self.log_priors = list(state["log_priors"])
        self.start_time -= state["seconds"]
        if state["reason"] is not None and state["tolerance"] == self.tolerance:
            self.reason = state["reason"]
        elif state["reason"] is not None:  # with another tolerance: the last E-step is done again
            self.losses.pop()
            self.log_priors.pop()
        if self.reason is None and len(self.losses) > self.num_iterations:
            self.num_iterations = taken = len(self.losses)
            self.ended = f"its checkpoint had taken {taken} steps already"


def _mixed(old: Statistics, new: Statistics, rate: float) -> Statistics:
    """Averaged statistics, moved towards ``new`` by the share ``rate``."""
    return {name: torch.lerp(old[name], new[name], rate) for name in new} if old else new
