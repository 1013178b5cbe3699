r"""``SampledFit``: chains of samples as a fit, whether they agree, and parallel tempering.

Agreement is rank-normalised split :math:`\hat R`, and bulk and tail effective sample sizes:
Rank-normalization, folding, and localization (Vehtari, Gelman, Simpson, Carpenter and Bürkner,
2021). Samples are ``(C, S, ...)``: S of each of C chains.

A :class:`Ladder` has one chain at each of R inverse temperatures
:math:`0 = b_1 < \dots < b_R = 1`, whose target is :math:`p(\theta) L(\theta, b_r)`:
:math:`L(\theta, 0) = 1`, so that the first samples the prior, and
:math:`L(\theta, 1) = p(x \mid \theta)`, so that the last samples the posterior.
Neighbours swap places by a Metropolis step, even and odd pairs in turn, and warmup spaces the
temperatures so that all pairs swap equally often (Syed, Bouchard-Côté, Deligiannidis and Doucet,
2022, Non-reversible parallel tempering). The works of two neighbours (see :class:`Ladder`) say the
ratio of the normalisers, by Bennett's acceptance ratio (1976), and the product of all ratios is the
marginal likelihood :math:`p(x) = \int p(\theta) \, p(x \mid \theta) \, d\theta`.

C ladders are one batch of C R chains; those of a ladder are neighbours in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from scipy.special import chdtri
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .._checks import check_size
from .._choices import first_values
from .._imports import imported
from ..data.batches import Batches
from ..data.sequences import Sequences
from ..io.files import identity_of
from .loop import FitLoop
from .models import remarks
from .plates import Point
from .process_group import ProcessGroup
from .results import Fit, model_name

AGREE = 1.01  # R-hat above which chains are said to disagree
RARE = 0.05  # share of swaps, below which neighbouring temperatures are said to be far apart
NOTED = ("works", "diverging", "acceptance", "leapfrogs")  # kept of chains, but not judged
FEWEST = 100  # effective samples of each chain, below which estimates are said to be rough
SPACED = (0.1, 0.2, 0.35, 0.5, 0.75)  # of the warmup, at whose ends temperatures are spaced anew
POWER = 5  # of even numbers, which are inverse temperatures at first (Friel and Pettitt, 2008)


class Agreement(NamedTuple):
    r"""Convergence of one variable: R-hat and effective sample sizes, each of its shape.

    Attributes:
        rhat: :math:`\hat R`, one where chains agree; NaN of what is constant.
        bulk: Effective sample size for means and medians; NaN of what is constant.
        tail: That for the quantiles 0.05 and 0.95.
    """

    rhat: Tensor
    bulk: Tensor
    tail: Tensor


def agreement(samples: Tensor) -> Agreement:
    """Rank-normalised R-hat and effective sample sizes, by ArviZ, of samples ``(C, S, ...)``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> found = agreement(torch.randn(4, 500, 2))
        >>> bool((found.rhat < 1.01).all() & (found.bulk > 1500).all())
        True
    """
    arviz = imported("arviz")
    rhat = rhat_of(samples)
    sizes = (arviz.ess(_dataset(samples), method=method) for method in ("bulk", "tail"))
    bulk, tail = (torch.as_tensor(each["x"].values).reshape(rhat.shape) for each in sizes)
    return Agreement(rhat, *(each.masked_fill(rhat.isnan(), torch.nan) for each in (bulk, tail)))


def rhat_of(samples: Tensor) -> Tensor:
    """Rank-normalised split R-hat of each component, NaN of those that are constant."""
    if samples.size(1) < 4:
        text = f"samples must be at least 4 of each chain; got {samples.size(1)}"
        raise ValueError(f"{text}. Draw more by num_samples.")
    shape, half = samples.shape[2:], samples.size(1) // 2
    if len(samples) == 1:  # ArviZ compares chains, and splits each of them
        samples = torch.cat([samples[:, :half], samples[:, -half:]])
    with numpy.errstate(invalid="ignore", divide="ignore"):  # of what is constant
        found = imported("arviz").rhat(_dataset(samples))["x"].values
    return torch.as_tensor(found).reshape(shape)


def _dataset(samples: Tensor) -> Any:
    flat = samples.double().cpu().reshape(*samples.shape[:2], -1)
    return imported("xarray").Dataset({"x": (("chain", "draw", "entry"), flat.numpy())})


def summary_of(samples: Mapping[str, Tensor]) -> list[str]:
    """Summary as lines of text: whether chains agree, and the worst component of each variable."""
    found = {name: agreement(value) for name, value in samples.items()}
    worst = {name: part.rhat.nan_to_num(1.0).max().item() for name, part in found.items()}
    sizes = {
        name: [each.nan_to_num(math.inf).min().item() for each in (part.bulk, part.tail)]
        for name, part in found.items()
    }
    chains, count = next(iter(samples.values())).shape[:2]
    # of halves that agree, the largest R-hat of all components is above it once in a thousand times
    degrees, number = 2 * chains - 1, 2 * sum(part.rhat.numel() for part in found.values())
    noise = 1 + float(chdtri(degrees, 1e-3 / number)) / degrees / (count // 2) / 2
    apart = [name for name, value in worst.items() if not value <= max(AGREE, noise)]
    least = min(sizes, key=lambda name: min(sizes[name]))
    who = "chains" if chains > 1 else "halves of the chain"
    if apart:
        largest = max(apart, key=worst.__getitem__)
        first = (
            f"{who.upper()} DISAGREE: R-hat is {worst[largest]:.2f} for {largest}, above "
            f"{max(AGREE, noise):.3g} for {len(apart)} of {len(worst)} variables. Align states, by "
            "PosteriorDraws.of(fit).aligned(data), if their priors are alike; else the chains are "
            "in different modes, or too short: give start=, a longer warmup, or more samples."
        )
    elif min(sizes[least]) < FEWEST * chains:
        first = (
            f"few effective samples: {min(sizes[least]):.0f} of {least}, where {FEWEST} for each "
            f"of {chains} chains are wanted. Take more samples."
        )
    else:
        few = ", which samples as few do by chance" if max(worst.values()) > AGREE else ""
        first = f"{who} agree: R-hat is at most {max(worst.values()):.3f}{few}"
    width = max(map(len, found))
    lines = [first, f"{'':{width}}   R-hat  bulk ESS  tail ESS, of the worst component"]
    for name, own in sizes.items():
        numbers = "".join(f"{size:10.0f}" for size in own)
        lines.append(f"{name:{width}} {worst[name]:7.3f}{numbers}")
    return lines


class MarginalLikelihood(NamedTuple):
    r"""Log marginal likelihood :math:`\log p(x)`, in nats.

    Attributes:
        value: The estimate.
        error: Its standard error, from how ladders differ; NaN of one ladder.
    """

    value: float
    error: float


class Ladder:
    r"""Inverse temperatures of C ladders of R chains, and their assignment to chains.

    The work of a chain is the log ratio of its densities at the temperature of its neighbour and at
    its own, :math:`\log L(\theta, b_{r \pm 1}) - \log L(\theta, b_r)`.

    Args:
        num_chains: C.
        num_temperatures: R; with one, all chains sample the posterior, and nothing is swapped.
        warmup: Number of sweeps that space the temperatures.

    Attributes:
        inverse: Inverse temperatures ``(R,)``, rising from zero to one.
        rungs: ``(C, R)`` integers, at which temperature each chain is.
        trips: ``(C,)``, how often a chain of each ladder has come from the prior to the posterior
            and back to the prior, since the warmup.
    """

    def __init__(self, num_chains: int, num_temperatures: int, warmup: int) -> None:
        size = num_temperatures
        self.inverse = torch.linspace(0, 1, size, dtype=torch.float64) ** POWER if size > 1 else (
            torch.ones(1, dtype=torch.float64))  # fmt: skip
        self.rungs = torch.arange(size).repeat(num_chains, 1)
        self.warmup, self.done = warmup, 0
        self.swaps = torch.zeros(2, size - 1, dtype=torch.float64)  # accepted, tried
        self.trips = torch.zeros(num_chains)
        self.outward = torch.zeros(num_chains, size)  # 1 from the prior on, 2 from the posterior on

    @property
    def size(self) -> int:
        """R, the number of temperatures."""
        return len(self.inverse)

    @property
    def chains(self) -> Tensor:
        """Index of the chain at each temperature of each ladder, ``(C, R)``."""
        return self.rungs.argsort(-1) + self.size * torch.arange(len(self.rungs)).unsqueeze(-1)

    @property
    def coldest(self) -> Tensor:
        """Indices ``(C,)`` of the chains that sample the posterior."""
        return self.chains[:, -1]

    @property
    def own(self) -> Tensor:
        """Inverse temperature of each chain, ``(C R,)``."""
        return self.inverse[self.rungs].flatten()

    @property
    def others(self) -> Tensor:
        """Inverse temperature of each chain's swap partner; its own without one."""
        up = (self.rungs - self.done) % 2 == 0
        other = self.rungs + torch.where(up, 1, -1)
        inside = (other >= 0) & (other < self.size)
        return self.inverse[torch.where(inside, other, self.rungs)].flatten()

    def swap(self, work: Tensor) -> tuple[Tensor, Tensor]:
        """Metropolis swaps of neighbouring temperatures, given the work of each chain, ``(C R,)``.

        Returns:
            Which chains have a new temperature, ``(C R,)``; works of each lower and upper
            neighbour, ``(C, 2, R - 1)``, NaN of pairs that had no turn.
        """
        chains, before = self.chains, self.rungs
        work = work.double().cpu()[chains]  # (C, R)
        pairs = torch.arange(self.done % 2, self.size - 1, 2)
        both = torch.stack([work[:, pairs], work[:, pairs + 1]], 1)
        shares = both.sum(1).clamp(max=0.0).exp()
        chosen = torch.rand(shares.shape, dtype=torch.float64) < shares
        order = torch.arange(self.size).repeat(len(chains), 1)
        order[:, pairs] += chosen.long()
        order[:, pairs + 1] -= chosen.long()
        self.rungs = before.argsort(-1).gather(1, order).argsort(-1)
        works = torch.full((len(chains), 2, self.size - 1), torch.nan, dtype=torch.float64)
        works[:, :, pairs] = both
        self.swaps[0, pairs] += shares.mean(0)
        self.swaps[1, pairs] += 1
        self.done += 1
        if self.done > self.warmup:  # trips between prior and posterior temperature
            hot, cold = self.rungs == 0, self.rungs == self.size - 1
            self.trips += (hot & (self.outward == 2)).sum(-1)
            self.outward[hot] = 1
            self.outward[cold & (self.outward == 1)] = 2
        if self.done in [int(self.warmup * part) for part in SPACED] + [self.warmup]:
            self._space()
        return (self.rungs != before).flatten(), works

    def _space(self) -> None:
        """Respace temperatures to equalise swap acceptance, but at the last time."""
        accepted, tried = self.swaps
        if self.done < self.warmup and bool((tried > 0).all()):
            rejected = 1 - accepted / tried + 1e-3
            barrier = torch.cat([rejected.new_zeros(1), rejected.cumsum(0)])
            wanted = torch.linspace(0, 1, self.size, dtype=torch.float64) * barrier[-1]
            above = torch.searchsorted(barrier, wanted[1:-1]).clamp(1, self.size - 1)
            share = (wanted[1:-1] - barrier[above - 1]) / rejected[above - 1]
            even = self.inverse ** (1 / POWER)
            even[1:-1] = even[above - 1] + share * (even[above] - even[above - 1])
            self.inverse = even**POWER
        self.swaps = torch.zeros_like(self.swaps)


def marginal_likelihood(works: Tensor) -> MarginalLikelihood:
    """Log marginal likelihood by Bennett's acceptance ratio, from works ``(C, S, 2, R - 1)``."""
    ahead, back = works.double().unbind(-2)  # (C, S, R - 1)
    low = torch.full_like(ahead[0, 0], -1e9)
    high = -low
    for _ in range(100):  # the slope of the likelihood of the ratio falls
        ratio = (low + high) / 2
        rises = ((ahead - ratio).sigmoid() - (back + ratio).sigmoid()).nansum((0, 1)) > 0
        low, high = torch.where(rises, ratio, low), torch.where(rises, high, ratio)
    first, second = (ahead - ratio).sigmoid(), (back + ratio).sigmoid()
    slope = (first * (1 - first) + second * (1 - second)).nansum((0, 1))
    apart = ((first - second).nansum(1) / slope).sum(-1)  # what each ladder changes, (C,)
    count = len(works)
    variance = count / (count - 1) * apart.square().sum() if count > 1 else torch.tensor(math.nan)
    return MarginalLikelihood(ratio.sum().item(), variance.sqrt().item())


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
        works: Of tempered chains, ``(C, S, 2, R - 1)``: see :class:`Ladder`.
        inverse_temperatures: Theirs, ``(R,)``, from zero, the prior, to one.
    """

    chains: dict[str, Tensor] = field(default_factory=dict, repr=False)
    stats: dict[str, Tensor] = field(default_factory=dict, repr=False)
    tuning: dict[str, float] = field(default_factory=dict)
    works: Tensor | None = field(default=None, repr=False)
    inverse_temperatures: Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        chains, samples = self.stats["lp"].shape
        return (
            f"SampledFit({self.method} of {model_name(self.model)} to {self.num_observed:,} "
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
            raise ValueError("a marginal likelihood needs tempered chains: num_temperatures=16.")
        return marginal_likelihood(self.works)

    def agreement(self) -> dict[str, Agreement]:
        """R-hat, bulk and tail effective sample size of each variable, and of ``lp``.

        Of variables that belong to states they mean something if all chains number the states
        alike: ``PosteriorDraws.of(fit).aligned(data)`` numbers them so.
        """
        return {name: agreement(value) for name, value in self._judged().items()}

    def summary(self, data: Sequences | None = None) -> str:
        """Summary as text: first whether the chains agree."""
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


class Chains(FitLoop):
    """C chains of samples: their steps, and the values kept of each.

    Args:
        data: The sequences.
        arguments: Of the fit, by name: ``num_samples``, S, steps that are kept; ``warmup``, steps
            before them; ``num_chains``, C; ``num_temperatures``, R: there are C R chains, of which
            C are kept.

    Attributes:
        kept: Values by name, ``(C, S, ...)``.
        ladder: Temperatures of all chains.
        copies: C R.
    """

    begin: Any  # (start) -> set the first state of the chains

    def __init__(self, data: Sequences, arguments: Mapping[str, Any]) -> None:
        for name in ("num_samples", "warmup", "num_chains", "num_temperatures"):
            check_size(name, arguments[name], int(name != "warmup"))
        self.num_samples, self.warmup = arguments["num_samples"], arguments["warmup"]
        steps = {"num_iterations": self.warmup + self.num_samples}
        super().__init__(Batches(data), ProcessGroup(), {**arguments, **steps})
        sizes = arguments["num_chains"], arguments["num_temperatures"]
        self.ladder, self.copies = Ladder(*sizes, self.warmup), math.prod(sizes)
        self.kept: dict[str, Tensor] = {}

    @property
    def index(self) -> int:
        """Number of the sample that the next step takes; negative in the warmup."""
        return len(self.losses) - self.warmup

    def keep(self, index: int, values: dict[str, Tensor]) -> None:
        """Store values ``(C, ...)`` as sample ``index``."""
        for name, value in values.items():
            if name not in self.kept:
                self.kept[name] = value.new_empty(len(value), self.num_samples, *value.shape[1:])
            self.kept[name][:, index] = value
        if not self.bar.disable and index > 8 and index % max(50, self.num_samples // 10) == 0:
            judged = [value[:, :index] for n, value in self.kept.items() if n not in NOTED]
            worst = torch.cat([rhat_of(x).flatten().nan_to_num(1.0) for x in judged]).max()
            self.bar.set_postfix(rhat=f"{worst:.3f}", refresh=False)

    def run(self, arguments: dict[str, Any]) -> None:
        """Run all steps, from a checkpoint of the same ``arguments``, or from their ``start``.

        Each rank runs all chains: they may differ, and so do their files.
        """
        path, rank = arguments["checkpoint"], ProcessGroup.of().rank
        if path is not None and rank:
            self.arguments = {**arguments, "checkpoint": f"{path}.rank{rank}"}
        if not self.resume(partial(identity_of, type(self).__name__, (), arguments), ()):
            with first_values(self.batches.data.device):
                self.begin(arguments["start"])
        self.take_steps()

    def state(self) -> dict[str, Any]:
        """Checkpoint state: kept samples and temperatures."""
        return {"kept": self.kept, "ladder": vars(self.ladder)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore kept samples and temperatures from a checkpoint."""
        device = self.batches.data.device
        for name in state.keys() - {"ladder", "batches", "random"}:
            state[name] = tree_map_only(Tensor, lambda part: part.to(device), state[name])
        self.kept, self.losses = state["kept"], list(state["losses"])
        vars(self.ladder).update(state["ladder"])

    def fit(self, model: Any, data: Sequences, supports: dict[str, Any], **fields: Any) -> Any:
        """The samples as a fit, whose point is the one of the largest log joint density."""
        chains = {name: self.kept[name] for name in supports}
        stats = {name: value for name, value in self.kept.items() if name not in supports}
        works = stats.pop("works", None)
        best = int(stats["lp"].argmax())
        values = {name: value.flatten(0, 1)[best] for name, value in chains.items()}
        notes = remarks(data, getattr(model, "module", None))
        if "diverging" in stats and bool(stats["diverging"].any()):
            count, total = int(stats["diverging"].sum()), stats["lp"].numel()
            notes.append(
                f"{count:,} of {total:,} trajectories diverged: the samples may miss a part of the "
                "posterior. Raise target_accept, or give the parameters another form or prior"
            )
        if works is not None:
            fields["inverse_temperatures"] = self.ladder.inverse
            trips = self.ladder.trips.mean().item()
            taken, tried = self.ladder.swaps  # since the warmup
            tuning = {"swaps": (taken / tried.clamp(min=1)).min().item(), "round trips": trips}
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
