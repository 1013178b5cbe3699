"""``SampledFit``: chains of samples of a posterior, as a fit; and how chains are run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .._checks import check_size
from ..data.sequences import Sequences
from ..io.checkpoints import Checkpoint, Fields
from ..io.identity import describe
from .convergence import Agreement, agreement, summary_of, worst_rhat
from .options import FREE
from .results import Fit, Point, name_of, uses_labels


@dataclass(repr=False)
class SampledFit(Fit):
    r"""C chains of S samples of the posterior of the latent variables, after a warmup.

    All that takes a :class:`Fit` takes it. ``values`` is the sample of the largest log joint
    density, and ``losses`` are minus the mean of that over chains, after each sample.

    Attributes:
        chains: Latent variables by name, ``(C, S, ...)``; those of sequences ``(C, S, N, ...)``.
        stats: What else is known of each sample, ``(C, S)``, by name: ``lp``, the log joint density
            :math:`\log p(x, \theta)`, in nats; ``diverging``, whether a trajectory went astray.
        tuning: What the warmup has found, by name.
    """

    chains: dict[str, Tensor] = field(default_factory=dict, repr=False)
    stats: dict[str, Tensor] = field(default_factory=dict, repr=False)
    tuning: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        chains, samples = self.stats["lp"].shape
        module = getattr(self.model, "module", self.model)
        return (
            f"SampledFit({self.method} of {name_of(module)} to {self.num_observed:,} "
            f"{self.unit}s; {chains} chains of {samples} samples)"
        )

    def samples(
        self, num_samples: int | None = None, data: Sequences | None = None
    ) -> dict[str, Tensor]:
        """Samples of all chains in one dimension, ``(C S, ...)``, by name.

        Args:
            num_samples: How many of them, evenly spaced; all by default.
            data: Not read.
        """
        total = self.stats["lp"].numel()
        count = total if num_samples is None else num_samples
        check_size("num_samples", count)
        chosen = torch.linspace(0, total - 1, min(count, total)).round().long()
        return {name: value.flatten(0, 1)[chosen] for name, value in self.chains.items()}

    def agreement(self) -> dict[str, Agreement]:
        """R-hat, bulk and tail effective sample size of each variable, and of ``lp``.

        Of variables that belong to states they mean something if all chains number the states
        alike: ``PosteriorDraws.of(fit).aligned(data)`` numbers them so.
        """
        return {name: agreement(value) for name, value in self._judged().items()}

    def summary(self) -> str:
        """A few lines of text: first whether the chains agree."""
        lines = summary_of(self._judged())
        chains, samples = self.stats["lp"].shape
        tuned = ", ".join(f"{name} {value:.3g}" for name, value in self.tuning.items())
        lines += [f"{self.method}: {chains} chains of {samples} samples in {self.seconds:.1f} s"]
        lines += [f"tuned     {tuned}"] if tuned else []
        lines += [f"note      {note}" for note in self.notes]
        return "\n".join(lines)

    def _judged(self) -> dict[str, Tensor]:
        return {"lp": self.stats["lp"]} | self.chains


class Chains:
    """C chains: their steps, the values kept of each, progress and checkpoints.

    A subclass defines :meth:`step`, ``state`` and ``restore``.

    Args:
        num_samples: S, steps that are kept.
        warmup: Steps before them.

    Attributes:
        kept: Values by name, ``(C, S, ...)``.
        done: Steps so far.
    """

    def __init__(self, num_samples: int, warmup: int) -> None:
        check_size("num_samples", num_samples)
        check_size("warmup", warmup, 0)
        self.num_samples, self.warmup = num_samples, warmup
        self.kept: dict[str, Tensor] = {}
        self.done, self.start_time = 0, time.perf_counter()

    def step(self) -> None:
        """One step of all chains; calls :meth:`keep` for each that comes after the warmup."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """State of the chains, for checkpoints."""
        raise NotImplementedError

    def restore(self, state: Fields) -> None:
        """Go on from a checkpoint."""
        raise NotImplementedError

    def keep(self, index: int, values: dict[str, Tensor]) -> None:
        """Keep values ``(C, ...)`` as those of the sample ``index``."""
        for name, value in values.items():
            if name not in self.kept:
                shape = len(value), self.num_samples, *value.shape[1:]
                self.kept[name] = value.new_empty(shape)
            self.kept[name][:, index] = value

    def run(
        self,
        begin: Callable[[], None],
        path: str | Path | None,
        arguments: dict[str, Any],
        progress: bool | None,
    ) -> None:
        """All steps, after those of a checkpoint of the same ``arguments``, or after ``begin``."""
        checkpoint, total = None, self.warmup + self.num_samples
        if path is not None:
            compared = {name: value for name, value in arguments.items() if name not in FREE}
            identity = {name: describe(value) for name, value in compared.items()}
            checkpoint = Checkpoint(path, {"fit": type(self).__name__} | identity)
        with tqdm(total=total, disable=None if progress is None else not progress) as bar:
            if checkpoint is None or not checkpoint.resume(self._resume, ()):
                begin()
            bar.update(self.done)
            while self.done < total:
                self.step()
                self.done += 1
                bar.update()
                index = self.done - self.warmup
                if self.done % 50 == 0 and index > 8:
                    rhat = worst_rhat({"lp": self.kept["lp"][:, : index - 1]})
                    bar.set_postfix(rhat=f"{rhat:.3f}", refresh=False)
                if checkpoint is not None and (checkpoint.is_due() or self.done == total):
                    known = {"done": self.done, "kept": self.kept, "seconds": self.seconds}
                    checkpoint.save(known | {"chains": self.state()})

    def _resume(self, state: Fields) -> None:
        self.restore(Fields(state["chains"], state, "chains."))
        self.done, self.kept = state["done"], state["kept"]
        self.start_time -= state["seconds"]

    @property
    def seconds(self) -> float:
        """How long the steps have taken."""
        return time.perf_counter() - self.start_time

    def fit(self, model: Any, data: Sequences, supports: dict[str, Any], **fields: Any) -> Any:
        """The samples as a fit, whose point is the one of the largest log joint density."""
        chains = {name: self.kept[name] for name in supports}
        stats = {name: value for name, value in self.kept.items() if name not in supports}
        best = int(stats["lp"].argmax())
        values = {name: value.flatten(0, 1)[best] for name, value in chains.items()}
        notes = uses_labels(data)
        if "diverging" in stats and bool(stats["diverging"].any()):
            count, total = int(stats["diverging"].sum()), stats["lp"].numel()
            notes.append(
                f"{count:,} of {total:,} trajectories diverged: the samples may miss a part of the "
                "posterior. Raise target_accept, or give the parameters another form or prior"
            )
        return SampledFit(
            model, Point(values), -stats["lp"].mean(0), True, "it took all samples", self.seconds,
            data.num_observed, list(values), notes=notes, window=1, supports=supports,
            values=values, chains=chains, stats=stats, **fields,
        )  # fmt: skip
