r"""``SampledFit``: chains of samples as a fit, how they are run, and whether they agree.

Agreement is rank-normalised split :math:`\hat R`, and bulk and tail effective sample sizes, for all
components at once: Rank-normalization, folding, and localization (Vehtari, Gelman, Simpson,
Carpenter and Bürkner, 2021). Samples are ``(C, S, ...)``: S of each of C chains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pyro.ops.stats import gelman_rubin, quantile
from scipy.special import chdtri
from torch import Tensor
from tqdm import tqdm

from .._checks import check_size
from ..data.sequences import Sequences
from ..io.files import Checkpoint, identity_of
from .guides import Point
from .results import Fit, name_of, uses_labels
from .tempering import Ladder, MarginalLikelihood, marginal_likelihood

AGREE = 1.01  # R-hat above which chains are said to disagree
RARE = 0.05  # share of swaps, below which neighbouring temperatures are said to be far apart
NOTED = ("works", "diverging", "acceptance", "leapfrogs")  # kept of chains, but not judged
FEWEST = 100  # effective samples of each chain, below which estimates are said to be rough


class Agreement(NamedTuple):
    r"""Convergence of one variable: R-hat and effective sample sizes, each of its shape.

    Attributes:
        rhat: :math:`\hat R`, one where chains agree; NaN of what is constant.
        bulk: Effective sample size for means and medians.
        tail: That for the quantiles 0.05 and 0.95.
    """

    rhat: Tensor
    bulk: Tensor
    tail: Tensor


def agreement(samples: Tensor) -> Agreement:
    """R-hat and effective sample sizes of samples ``(C, S, ...)``, S at least 4.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> found = agreement(torch.randn(4, 500, 2))
        >>> bool((found.rhat < 1.01).all() & (found.bulk > 1500).all())
        True
    """
    split = _split(samples)
    bulk = _effective(_ranks(split))
    ends = quantile(split.flatten(0, 1), [0.05, 0.95])
    below, above = (_effective((split <= end).to(split)) for end in ends)
    shape = samples.shape[2:]
    parts = rhat_of(split), bulk, torch.fmin(below, above)
    return Agreement(*(part.reshape(shape) for part in parts))


def rhat_of(split: Tensor) -> Tensor:
    """The larger one of R-hat of ranks and of ranks of distances from the median, ``(P,)``."""
    centre = split.flatten(0, 1).median(0).values
    return torch.fmax(gelman_rubin(_ranks(split)), gelman_rubin(_ranks((split - centre).abs())))


def worst_rhat(samples: Mapping[str, Tensor]) -> float:
    """The largest R-hat of any component of variables ``(C, S, ...)``; one if all are constant."""
    found = [rhat_of(_split(value)) for value in samples.values() if value.numel()]
    whole = torch.cat(found)
    return whole[~whole.isnan()].max().item() if bool((~whole.isnan()).any()) else 1.0


def summary_of(samples: Mapping[str, Tensor]) -> list[str]:
    """Lines of text: first whether the chains agree, then the worst component of each variable."""
    found = {name: agreement(value) for name, value in samples.items()}
    worst = {name: part.rhat.nan_to_num(1.0).max().item() for name, part in found.items()}
    fewest = {
        name: torch.fmin(part.bulk, part.tail).nan_to_num(math.inf).min().item()
        for name, part in found.items()
    }
    chains, size = next(iter(samples.values())).shape[:2]
    lines = []
    # of halves that agree, the largest R-hat of all components is above it once in a thousand times
    degrees, count = 2 * chains - 1, 2 * sum(part.rhat.numel() for part in found.values())
    noise = 1 + float(chdtri(degrees, 1e-3 / count)) / degrees / (size // 2) / 2
    apart = [name for name, value in worst.items() if not value <= max(AGREE, noise)]
    who = "chains" if chains > 1 else "halves of the chain"
    if apart:
        largest = max(apart, key=worst.__getitem__)
        lines.append(
            f"{who.upper()} DISAGREE: R-hat is {worst[largest]:.2f} for {largest}, above "
            f"{max(AGREE, noise):.3g} for {len(apart)} of {len(worst)} variables. Do not use "
            "these means and intervals. Chains that number the states differently disagree as "
            "well: align them, with PosteriorDraws.of(fit).aligned(data); if they still do, take "
            "more warmup and samples, or other starts."
        )
    elif min(fewest.values()) < FEWEST * chains:
        least = min(fewest, key=fewest.__getitem__)
        lines.append(
            f"few effective samples: {fewest[least]:.0f} of {least}, where {FEWEST} for each of "
            f"{chains} chains are wanted. Take more samples."
        )
    else:
        few = ", which samples as few do by chance" if max(worst.values()) > AGREE else ""
        lines.append(f"{who} agree: R-hat is at most {max(worst.values()):.3f}{few}")
    width = max(map(len, found))
    lines.append(f"{'':{width}}   R-hat  bulk ESS  tail ESS, of the worst component")
    for name, part in found.items():
        sizes = (each.nan_to_num(math.inf).min().item() for each in (part.bulk, part.tail))
        numbers = "".join(f"{size:10.0f}" for size in sizes)
        lines.append(f"{name:{width}} {worst[name]:7.3f}{numbers}")
    return lines


def _split(samples: Tensor) -> Tensor:
    """Halves of chains as chains, ``(2C, S // 2, P)``, in float64."""
    half = samples.size(1) // 2
    if half < 2:
        raise ValueError(f"samples must be at least 4 of each chain; got {samples.size(1)}.")
    parts = samples[:, :half], samples[:, samples.size(1) - half :]
    return torch.cat(parts).double().cpu().reshape(2 * len(samples), half, -1)


def _ranks(split: Tensor) -> Tensor:
    """Normal quantiles of the ranks among all samples; equal ones have the mean of their ranks."""
    flat = split.flatten(0, 1)
    ordered, columns = flat.mT.sort().values.contiguous(), flat.mT.contiguous()
    below = torch.searchsorted(ordered, columns)
    ranks = ((below + torch.searchsorted(ordered, columns, right=True) + 1) / 2).mT
    ranks = torch.where(flat.amax(0) > flat.amin(0), ranks.double(), torch.nan)  # not if constant
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(split.shape)


def _effective(split: Tensor) -> Tensor:
    """Effective sample size ``(P,)`` by Geyer's initial monotone sequence."""
    chains, size, _ = split.shape
    centred = split - split.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * size, dim=1)
    covariance = torch.fft.irfft(spectrum.abs().square(), n=2 * size, dim=1)[:, :size] / size
    within = split.var(1).mean(0)
    whole = within * (size - 1) / size + split.mean(1).var(0)
    correlation = 1 - (within - covariance.mean(0)) / whole  # (S, P)
    correlation[0] = 1.0
    pairs = correlation[: size // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    positive = (pairs > 0).cummin(0).values
    falling = pairs.cummin(0).values * positive
    time = (2 * falling.sum(0) - 1).clamp(min=1 / math.log10(chains * size))
    return torch.where(whole > 0, chains * size / time, torch.nan)


@dataclass(repr=False)
class SampledFit(Fit):
    r"""C chains of S samples of the posterior of the latent variables, after a warmup.

    All that takes a :class:`Fit` takes it. ``values`` is the sample of the largest log joint
    density, and ``losses`` are minus the mean of that over chains, after each sample.

    Attributes:
        chains: Latent variables by name, ``(C, S, ...)``; those of sequences ``(C, S, N, ...)``.
        stats: What else is known of each sample, ``(C, S)``, by name: ``lp``, the log joint density
            :math:`\log p(x, \theta)`, in nats; ``diverging``, whether a trajectory went astray.
        tuning: What the warmup has found, by name. Of tempered chains: ``swaps``, how often the
            neighbours do that do least, and ``round trips`` of each ladder, since the warmup.
        works: Of tempered chains, ``(C, S, 2, R - 1)``: see :class:`.tempering.Ladder`.
        inverse_temperatures: Theirs, ``(R,)``, from zero, the prior, to one.
    """

    chains: dict[str, Tensor] = field(default_factory=dict, repr=False)
    stats: dict[str, Tensor] = field(default_factory=dict, repr=False)
    tuning: dict[str, float] = field(default_factory=dict)
    works: Tensor | None = field(default=None, repr=False)
    inverse_temperatures: Tensor | None = field(default=None, repr=False)

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

    def marginal_likelihood(self) -> MarginalLikelihood:
        r"""Log marginal likelihood :math:`\log \int p(\theta) p(x \mid \theta) d\theta`, in nats.

        Also called the evidence of the model: the parameters are integrated out. Estimated by
        Bennett's acceptance ratio between neighbouring temperatures, with the standard error among
        the chains, which know nothing of each other. Where hardly any has come from the prior to
        the posterior and back, which ``notes`` tell, all may miss a part of the posterior alike,
        and the value may be off by more than its error.

        Raises:
            ValueError: If the chains were not tempered.

        Example:
            >>> _ = pyro.set_rng_seed(0)
            >>> data = Sequences.from_list([[0, 0, 1]])  # of one state: 2! 1! / 4!
            >>> fit = fit_gibbs(TabularHMM(1, categorical(2)), data, num_temperatures=4)
            >>> value, error = fit.marginal_likelihood()
            >>> abs(value - math.log(1 / 12)) < 5 * error < 0.1
            True
        """
        if self.works is None:
            raise ValueError(
                "the marginal likelihood needs tempered chains: sample with num_temperatures=16."
            )
        return marginal_likelihood(self.works)

    def agreement(self) -> dict[str, Agreement]:
        """R-hat, bulk and tail effective sample size of each variable, and of ``lp``.

        Of variables that belong to states they mean something if all chains number the states
        alike: ``PosteriorDraws.of(fit).aligned(data)`` numbers them so.
        """
        return {name: agreement(value) for name, value in self._judged().items()}

    def summary(self, data: Sequences | None = None) -> str:
        """A few lines of text: first whether the chains agree."""
        if data is not None:
            self.information(data)  # raises
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
        num_chains: C.
        num_temperatures: R; there are C R chains, of which C are kept.

    Attributes:
        kept: Values by name, ``(C, S, ...)``.
        done: Steps so far.
        ladder: Temperatures of all chains.
        copies: C R.
    """

    def __init__(
        self, num_samples: int, warmup: int, num_chains: int, num_temperatures: int
    ) -> None:
        check_size("num_samples", num_samples)
        check_size("warmup", warmup, 0)
        check_size("num_chains", num_chains)
        check_size("num_temperatures", num_temperatures)
        self.ladder = Ladder(num_chains, num_temperatures, warmup)
        self.copies = num_chains * num_temperatures
        self.num_samples, self.warmup = num_samples, warmup
        self.kept: dict[str, Tensor] = {}
        self.done, self.start_time = 0, time.perf_counter()

    def step(self) -> None:
        """One step of all chains; calls :meth:`keep` for each that comes after the warmup."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """State of the chains, for checkpoints."""
        raise NotImplementedError

    def restore(self, state: dict[str, Any]) -> None:
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
            checkpoint = Checkpoint(path, identity_of(type(self).__name__, (), arguments))
        with tqdm(total=total, disable=None if progress is None else not progress) as bar:
            if checkpoint is None or not checkpoint.resume(self._resume, ()):
                begin()
            bar.update(self.done)
            while self.done < total:
                self.step()
                self.done += 1
                bar.update()
                index = self.done - self.warmup
                if not bar.disable and index > 8 and index % max(50, self.num_samples // 10) == 0:
                    judged = {n: v[:, : index - 1] for n, v in self.kept.items() if n not in NOTED}
                    bar.set_postfix(rhat=f"{worst_rhat(judged):.3f}", refresh=False)
                if checkpoint is not None and (checkpoint.is_due() or self.done == total):
                    known = {"done": self.done, "kept": self.kept, "seconds": self.seconds}
                    known |= {"ladder": vars(self.ladder), "chains": self.state()}
                    checkpoint.save(known)

    def _resume(self, state: dict[str, Any]) -> None:
        vars(self.ladder).update(state["ladder"])
        self.restore(state["chains"])
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
        works = stats.pop("works", None)
        best = int(stats["lp"].argmax())
        values = {name: value.flatten(0, 1)[best] for name, value in chains.items()}
        notes = uses_labels(data)
        if "diverging" in stats and bool(stats["diverging"].any()):
            count, total = int(stats["diverging"].sum()), stats["lp"].numel()
            notes.append(
                f"{count:,} of {total:,} trajectories diverged: the samples may miss a part of the "
                "posterior. Raise target_accept, or give the parameters another form or prior"
            )
        if works is not None:
            fields["inverse_temperatures"] = self.ladder.inverse
            trips = self.ladder.trips.mean().item()
            tuning = {"swaps": self.ladder.least_swaps(), "round trips": trips}
            fields["tuning"] = fields.get("tuning", {}) | tuning
            if tuning["swaps"] < RARE or trips < 1:
                notes.append(
                    "hardly any chain has come from the prior to the posterior and back: they do "
                    "not mix, and the marginal likelihood may be off by more than its error. Raise "
                    "num_temperatures, warmup or num_samples"
                )
        return SampledFit(
            model, Point(values), -stats["lp"].mean(0), True, "it took all samples", self.seconds,
            data.num_observed, list(values), notes=notes, window=1, supports=supports,
            parameters=values, chains=chains, stats=stats, works=works, **fields,
        )  # fmt: skip
