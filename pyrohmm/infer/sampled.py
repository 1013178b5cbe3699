"""``SampledFit``: chains of samples of a posterior, as a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from ..data.sequences import Sequences
from .convergence import Agreement, agreement, summary_of
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


def sampled_fit(
    model: Callable[..., Any],
    data: Sequences,
    chains: dict[str, Tensor],
    stats: dict[str, Tensor],
    **fields: Any,
) -> SampledFit:
    """Chains as a fit, whose point is the sample of the largest log joint density."""
    best = int(stats["lp"].argmax())
    values = {name: value.flatten(0, 1)[best] for name, value in chains.items()}
    notes = uses_labels(data) + fields.pop("notes", [])
    if "diverging" in stats and bool(stats["diverging"].any()):
        count, total = int(stats["diverging"].sum()), stats["lp"].numel()
        notes.append(
            f"{count:,} of {total:,} trajectories diverged: the samples may miss a part of the "
            "posterior. Raise target_accept, or give the parameters another form or prior"
        )
    return SampledFit(
        model, Point(values), -stats["lp"].mean(0), True, "it took all samples",
        num_observed=data.num_observed, names=list(values), notes=notes, window=1, values=values,
        chains=chains, stats=stats, **fields,
    )  # fmt: skip
