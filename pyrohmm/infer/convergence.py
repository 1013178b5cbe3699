r"""Whether chains of a sampler agree, and how many independent samples theirs are worth.

Rank-normalised split :math:`\hat R`, and bulk and tail effective sample sizes, for all components
at once: Rank-normalization, folding, and localization (Vehtari, Gelman, Simpson, Carpenter and
Bürkner, 2021). Samples are ``(C, S, ...)``: S of each of C chains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from pyro.ops.stats import gelman_rubin, quantile
from torch import Tensor

AGREE = 1.01  # R-hat above which chains are said to disagree
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
    chains = next(iter(samples.values())).size(0)
    lines = []
    apart = [name for name, value in worst.items() if not value <= AGREE]
    if apart:
        largest = max(apart, key=worst.__getitem__)
        lines.append(
            f"CHAINS DISAGREE: R-hat is {worst[largest]:.2f} for {largest}, above {AGREE} for "
            f"{len(apart)} of {len(worst)} variables. Do not use these means and intervals. Chains "
            "that number the states differently disagree as well: align them, with "
            "PosteriorDraws.of(fit).aligned(data); if they still do, take more warmup and samples, "
            "or other starts."
        )
    elif min(fewest.values()) < FEWEST * chains:
        least = min(fewest, key=fewest.__getitem__)
        lines.append(
            f"few effective samples: {fewest[least]:.0f} of {least}, where {FEWEST} for each of "
            f"{chains} chains are wanted. Take more samples."
        )
    else:
        lines.append(f"chains agree: R-hat is at most {max(worst.values()):.3f}")
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
    """Normal quantiles of the ranks among all samples."""
    flat = split.flatten(0, 1)
    ranks = flat.argsort(0).argsort(0) + 1.0
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
