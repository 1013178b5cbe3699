"""``FitLoop``: the steps of a fit, until it has converged or has taken all of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data.batches import Batches
from ..io.files import Checkpoint
from .process_group import ProcessGroup

UNSAVED = "the checkpoint could not be saved, and the fit goes on: {}. Make room on the disk."


class FitLoop:
    """The loop of EM, gradient fits and chains: losses, why it ended, a progress bar, checkpoints.

    A subclass defines ``step``, which appends to ``losses`` and may set ``reason``, and ``state``
    and ``restore`` of all else that a step changes.

    Args:
        batches: The data, of which each step takes a batch.
        group: The data-parallel ranks.
        arguments: Of the fit, by name. A resumed fit with another tolerance or patience goes on.

    Attributes:
        losses: Of each step, ``()`` or ``(R,)``.
        reason: Why the fit has converged.
        ended: Why it has ended, if it has not converged.
    """

    further = 0  # losses besides one for each step
    step: Any  # () -> take one step and append its loss; may set ``reason``, which ends the fit
    state: Any  # () -> the checkpoint state of the fit, by name
    restore: Any  # (state) -> restore the fit from a checkpoint state

    def __init__(self, batches: Batches, group: ProcessGroup, arguments: Mapping[str, Any]) -> None:
        self.start_time = time.perf_counter()
        self.batches, self.group, self.arguments = batches, group, arguments
        self.num_iterations, progress = arguments["num_iterations"], arguments.get("progress")
        self.tests = [arguments.get("tolerance"), arguments.get("patience")]
        self.hidden = not group.is_first or (None if progress is None else not progress)
        self.checkpoint: Checkpoint | None = None
        self.losses: list[Tensor] = []
        self.reason: str | None = None
        self.ended = f"it took all {self.num_iterations} steps"

    @property
    def seconds(self) -> float:
        """Elapsed seconds of the fit, those before a resumed checkpoint included."""
        return time.perf_counter() - self.start_time

    def take_steps(self) -> None:
        """Take steps until one ends the fit, or all are taken."""
        count, failed = len(self.losses), None
        with tqdm(total=self.num_iterations, initial=count, disable=self.hidden) as self.bar:
            while self.reason is None and len(self.losses) < self.num_iterations + self.further:
                self.step()
                self.bar.update(len(self.losses) <= self.num_iterations)
                left = self.num_iterations - len(self.losses)
                last = self.reason is not None or left == 0
                due = self.checkpoint is not None and left > 0 and self.checkpoint.is_due()
                failed = self._save() if last or due else failed
                if failed is not None and due and not last:
                    warnings.warn(UNSAVED.format(failed), RuntimeWarning, stacklevel=2)
        self.group.together(failed)  # after the file is there, which another fit may ask for

    def resume(self, identity: Callable[[], dict[str, Any]], tensors: Iterable[Tensor]) -> bool:
        """Restore the fit from its checkpoint, if there is one; return whether there was.

        Args:
            identity: Returns a fingerprint of the fit.
            tensors: What has to be as it was after an error.
        """
        path, generator = self.arguments.get("checkpoint"), self.arguments.get("generator")
        if path is None:
            return False
        is_first, of_first = self.group.is_first, self.group.of_first
        self.checkpoint = Checkpoint(path, identity(), (generator,), is_first, of_first)
        return self.checkpoint.resume(self._restore, tensors)

    def _save(self) -> OSError | None:
        """Save to the checkpoint, if there is one; returns why that was impossible, if it was."""
        if self.checkpoint is None or not self.checkpoint.writes:
            return None
        own = {
            "losses": torch.stack(self.losses),
            "reason": self.reason,
            "tests": self.tests,
            "seconds": self.seconds,
            "batches": self.batches.state(),
        }
        try:
            self.checkpoint.save(own | self.state())
        except OSError as error:  # such as of a full disk
            return error
        return None

    def _restore(self, saved: dict[str, Any]) -> None:
        self.batches.restore(saved["batches"])
        self.losses = list(saved["losses"])
        self.start_time -= saved["seconds"]
        self.reason = saved["reason"] if saved["tests"] == self.tests else None
        self.restore(saved)
        if self.reason is None and len(self.losses) > self.num_iterations:
            self.num_iterations = taken = len(self.losses)
            self.ended = f"its checkpoint had taken {taken} steps already"
