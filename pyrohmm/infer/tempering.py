r"""``Ladder``: parallel tempering between chains, and the evidence that it gives.

A ladder has one chain at each of R inverse temperatures :math:`0 = b_1 < \dots < b_R = 1`, whose
target is :math:`p(\theta) L(\theta, b_r)`: :math:`L(\theta, 0) = 1`, so that the first samples the
prior, and :math:`L(\theta, 1) = p(x \mid \theta)`, so that the last samples the posterior.
Neighbours swap places by a Metropolis step, even and odd pairs in turn, and warmup spaces the
temperatures so that all pairs swap equally often (Syed, Bouchard-Côté, Deligiannidis and Doucet,
2022, Non-reversible parallel tempering). What a chain would gain at the place of its neighbour,
:math:`\log L(\theta, b_{r \pm 1}) - \log L(\theta, b_r)`, is its work; the works of both say the
ratio of the normalisers, by Bennett's acceptance ratio (1976), and the product of all ratios is the
marginal likelihood :math:`p(x) = \int p(\theta) \, p(x \mid \theta) \, d\theta`.

C ladders are one batch of C R chains; those of a ladder are neighbours in it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SPACED = (0.1, 0.2, 0.35, 0.5, 0.75)  # of the warmup, at whose ends temperatures are spaced anew
POWER = 5  # of even numbers, which are inverse temperatures at first (Friel and Pettitt, 2008)


class MarginalLikelihood(NamedTuple):
    r"""Log marginal likelihood :math:`\log p(x)`, in nats.

    Attributes:
        value: The estimate.
        error: Its standard error, from how ladders differ; NaN of one ladder.
    """

    value: float
    error: float


class Ladder:
    """Temperatures of C ladders of R chains, and who is at which.

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
        """``(C, R)`` integers, which of all chains is at each temperature of each ladder."""
        return self.rungs.argsort(-1) + self.size * torch.arange(len(self.rungs)).unsqueeze(-1)

    @property
    def coldest(self) -> Tensor:
        """``(C,)`` integers, the chains that sample the posterior."""
        return self.chains[:, -1]

    @property
    def own(self) -> Tensor:
        """Inverse temperature of each chain, ``(C R,)``."""
        return self.inverse[self.rungs].flatten()

    @property
    def others(self) -> Tensor:
        """That of the neighbour with which each chain may swap now; its own if there is none."""
        up = (self.rungs - self.done) % 2 == 0
        other = self.rungs + torch.where(up, 1, -1)
        inside = (other >= 0) & (other < self.size)
        return self.inverse[torch.where(inside, other, self.rungs)].flatten()

    def swap(self, work: Tensor) -> tuple[Tensor, Tensor]:
        """Swap neighbours, by the work ``(C R,)`` of each chain at the place of the other one.

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
        self._count_trips()
        if self.done in [int(self.warmup * part) for part in SPACED] + [self.warmup]:
            self._space()
        return (self.rungs != before).flatten(), works

    def _count_trips(self) -> None:
        """Of each chain: whether it has been at the prior, and at the posterior since then."""
        if self.done <= self.warmup:
            return
        hot, cold = self.rungs == 0, self.rungs == self.size - 1
        self.trips += (hot & (self.outward == 2)).sum(-1)
        self.outward[hot] = 1
        self.outward[cold & (self.outward == 1)] = 2

    def _space(self) -> None:
        """Put temperatures where neighbours are rejected equally often, but at the last time."""
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

    def least_swaps(self) -> float:
        """How often the neighbours that swap least do so, since the warmup."""
        return (self.swaps[0] / self.swaps[1].clamp(min=1)).min().item()


def marginal_likelihood(works: Tensor) -> MarginalLikelihood:
    """Log marginal likelihood, of works ``(C, S, 2, R - 1)`` as of :meth:`Ladder.swap`."""
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
