"""The iterations of EM: when they end, what minibatches average, and what a checkpoint saves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data.batches import Batches
from ..data.sequences import Sequences
from ..io.checkpoints import Checkpoint, Fields
from ..nn.closed_form import Statistics
from .expectation import Expectation
from .extrapolation import Extrapolation
from .maximization import Maximization


class Convergence:
    """Ends a fit when no restart improves by more than a share of its loss.

    Args:
        num_steps: Largest number of iterations.
        tolerance: The share; None never ends it.
        units: What the unit of the data adds to the loss, which is no part of what is shared.
    """

    def __init__(self, num_steps: int, tolerance: float | None, units: float) -> None:
        self.tolerance, self.units, self.converged = tolerance, units, False
        self.reason = f"it took all {num_steps} steps"

    def test(self, losses: list[Tensor]) -> None:
        """Compare the last loss with the one before."""
        if self.tolerance is not None and len(losses) > 1:
            fall = losses[-2] - losses[-1]
            if not bool((fall >= self.tolerance * (losses[-1] - self.units).abs()).any()):
                self.converged = True
                self.reason = f"the loss fell by less than {self.tolerance:g} of itself"


class Average:
    """Sufficient statistics of minibatches, averaged with decaying step sizes."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.statistics: Statistics = {}

    def add(self, new: Statistics, rate: float) -> Statistics:
        """Move the average towards ``new`` by the share ``rate``; one replaces it."""
        if self.statistics:
            new = {name: torch.lerp(self.statistics[name], new[name], rate) for name in new}
        self.statistics = new
        return new


@dataclass
class Loop:
    """The iterations of EM, and what a checkpoint saves of them."""

    expect: Expectation
    maximize: Maximization
    batches: Batches
    convergence: Convergence
    average: Average | None
    squarem: Extrapolation | None = None
    checkpoint: Checkpoint | None = None
    losses: list[Tensor] = field(default_factory=list)
    start_time: float = field(default_factory=time.perf_counter)

    def run(self, num_steps: int, bar: tqdm) -> None:
        """E-step, convergence, M-step, until it has converged or has taken all steps."""
        data = self.batches.data
        known = self.convergence.converged  # the checkpoint says so already
        while not self.convergence.converged and len(self.losses) <= num_steps:
            if self.checkpoint is not None and self.losses:
                if self.checkpoint.is_due() or len(self.losses) == num_steps:
                    self._save(self.checkpoint)
            batch = self.batches.take()
            disturbed = self.expect.reseeded  # in the iteration before
            proposed = self.squarem is not None and self.squarem.proposed
            loss, statistics = self._judge(batch) if proposed else self._expect(batch)
            self.losses.append(loss)
            nats = loss.min().item() / max(data.num_observed, 1)
            bar.set_postfix(nats_per_step=f"{nats:.4f}", refresh=False)
            if not disturbed and not self.expect.reseeded and not proposed:
                self.convergence.test(self.losses)
            if self.convergence.converged or len(self.losses) > num_steps:
                break
            if self.average is not None:
                rate = (len(self.losses) + 1) ** -self.average.decay
                statistics = self.average.add(statistics, rate)
            self.maximize(statistics, batch)
            if self.squarem is not None:
                self.squarem.record()
            bar.update()
        if self.checkpoint is not None and self.convergence.converged and not known:
            self._save(self.checkpoint)

    def prepare(self) -> None:
        """Start the average of minibatches at the statistics of all the data."""
        if self.average is None:
            return
        data, seen = self.batches.data, 0
        for chosen in torch.arange(len(data)).split(self.batches.batch_size):
            self.batches.chosen = chosen
            seen += len(chosen)
            _, statistics = self._expect(self.batches.shard(data.batch(chosen)))
            self.average.add(statistics, len(chosen) / seen)

    def _judge(self, batch: Sequences) -> tuple[Tensor, Statistics]:
        """E-step at the parameters proposed, or where these are worse, at those before."""
        squarem: Any = self.squarem
        try:
            loss, statistics = self.expect(batch)
            worse = ~(loss <= self.losses[-1])
        except (ArithmeticError, RuntimeError, ValueError):  # they are impossible
            worse = torch.ones_like(self.losses[-1], dtype=torch.bool)
        squarem.undo(worse)
        return self._expect(batch) if bool(worse.any()) else (loss, statistics)

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
        checkpoint.save(
            {
                "losses": torch.stack(self.losses),
                "statistics": None if self.average is None else self.average.statistics,
                "converged": self.convergence.converged,
                "tolerance": self.convergence.tolerance,
                "reason": self.convergence.reason,
                "batches": self.batches.state(),
                "seconds": self.seconds,
                "reseeded": self.expect.reseeded,
                **self.expect.parameters.state(),
                **self.maximize.state(),
                "squarem": None if self.squarem is None else self.squarem.state(),
            }
        )

    def resume(self) -> bool:
        """Go on from the checkpoint; returns whether there is one."""
        if self.checkpoint is None:
            return False
        return self.checkpoint.resume(self._restore, self.expect.parameters.points)

    def _restore(self, state: Fields) -> None:
        self.expect.parameters.restore(state)
        self.maximize.restore(state)
        if self.squarem is not None:
            self.squarem.restore(state["squarem"])
        self.batches.restore(state["batches"])
        if self.average is not None:
            data = self.batches.data
            _, wanted = self._expect(data.batch(torch.arange(1)))
            saved = state.tensors_like("statistics", wanted)
            self.average.statistics = {name: saved[name].to(data.device) for name in wanted}
        self.expect.reseeded = state["reseeded"]
        self.losses = list(state.losses(self.expect.parameters.restarts))
        self.start_time -= state["seconds"]
        if state["converged"] and state["tolerance"] == self.convergence.tolerance:
            self.convergence.converged, self.convergence.reason = True, state["reason"]
        elif state["converged"]:  # with another tolerance: the last E-step is to be done again
            self.losses.pop()
