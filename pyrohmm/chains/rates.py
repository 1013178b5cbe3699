"""``RateChain``: a Markov chain in continuous time, observed at irregular times.

A matrix of rates ``(K, K)`` has at row i, column j the rate of transitions from i to j; a diagonal
entry is minus the sum of the others in its row.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from .._arrays import from_numpy
from .._checks import check_booleans, check_log_simplex, check_real, check_shape, check_times
from .._precision import recomputed, recomputing
from .._transforms import gradients, refuse_transforms
from ..ops import markov as markov_ops
from ..ops import recursions
from ..ops.log_space import finite_or_zero, largest, log, logsumexp, step_mask
from ..ops.products import take_rows
from ..ops.tensor_cache import cached, lazy
from .base import Chain, Core, ExpectedCounts
from .markov import MarkovRecursions

DEGREE = 20  # of the series; its remainder is below rounding where the argument is at most one
PART = 4  # terms between powers
HALVED = 1100  # times at most: beyond it no number of float64 is left
LEAST = 1e-280  # probability below which digits are lost


class Gaps(NamedTuple):
    """Lengths of time between steps.

    Attributes:
        distinct: ``(U,)``, each length once.
        place: ``(*B, T-1)`` integers, which of them lies before each step but the first; or
            ``(1,)``, if all are equal.
    """

    distinct: Tensor
    place: Tensor

    @classmethod
    def between(cls, times: Tensor, exists: Tensor) -> Gaps:
        """Time gaps between steps; gaps in the padding are filled from others."""
        lasts = times.diff(dim=-1)
        real = exists[..., 1:]
        if times.dim() == 1:
            real = real.reshape(real.shape[:-1].numel(), real.size(-1)).any(0)
        longest = torch.where(real, lasts, 0.0).amax() if lasts.numel() else lasts.new_zeros(())
        distinct, place = cls.of(torch.where(real, lasts, longest))
        return cls(distinct, place.new_zeros(1) if len(distinct) == 1 else place)

    @classmethod
    def of(cls, gaps: Tensor) -> Gaps:
        """Gaps from lengths ``(*B, T-1)``; equal ones are merged, unless they have gradients."""
        if gaps.requires_grad:
            return cls(gaps.flatten(), torch.arange(gaps.numel(), device=gaps.device).view_as(gaps))
        return cls(*gaps.unique(return_inverse=True))


class RateChain(MarkovRecursions):
    """A Markov chain in continuous time: transitions ``matrix_exp(rates * gap)`` per step.

    Args:
        log_initial: ``(*b, K)``.
        rates: ``(*b, K, K)``, rows sum to zero; ``(*b, T-1, K, K)`` with ``rates_per_step``.
        times: ``(*B, T)``, when the steps are; padding may be anything.
        lengths: ``(*B)`` integers, on the CPU.
        exact_entry: ``(K,)`` booleans, states whose entry is seen at its very time; or None.
        observed: ``(*B, T)`` booleans, which steps are observed; or None. Only read with
            ``exact_entry``.
        rates_per_step: Whether there are rates for each gap, constant until the next step.
    """

    per_step = True
    rates: Tensor
    times: Tensor
    exact_entry: Tensor | None

    def __init__(
        self,
        log_initial: Tensor,
        rates: Tensor,
        times: Tensor,
        lengths: Tensor,
        exact_entry: Tensor | None = None,
        observed: Tensor | None = None,
        rates_per_step: bool = False,
    ) -> None:
        super().__init__(
            times=times, lengths=lengths, exact_entry=exact_entry, observed=observed,
            rates_per_step=rates_per_step,
        )  # fmt: skip
        self.take(log_initial=log_initial, rates=rates, times=times, exact_entry=exact_entry)
        self.rates_per_step = rates_per_step

    @property
    def cores(self) -> dict[str, Core]:  # type: ignore[override]
        """Core dimensions of the first state's probabilities and of the rates."""
        return {"log_initial": ("K",), "rates": ("T-1",) * self.rates_per_step + ("K", "K")}

    @property
    def exists(self) -> Tensor:
        """Mask of the steps that are not padding, ``(*B, T)``."""
        lengths = from_numpy("lengths", self.options["lengths"]).cpu()
        return step_mask(lengths, self.times.size(-1), self.rates.device)

    @property
    def gaps(self) -> Gaps:
        """The lengths of time between the steps; made once of times that do not change."""
        times, device = self.times, self.rates.device

        def between() -> Gaps:
            return Gaps.between(times.to(device).double(), self.exists)

        if times.requires_grad:
            return between()
        return cached(times, between, self.options["lengths"], str(device).encode())

    @lazy
    def matrices(self) -> Tensor:
        """Log transition matrices between the steps, ``(*b, 1|T-1, K, K)``."""
        observed = from_numpy("observed", self.options["observed"])
        parts = self.rates, self.gaps, self.exact_entry, observed
        return transitions_between(*parts, self.rates_per_step)

    @property
    def possible(self) -> Tensor:
        """Mask of the transitions with a positive rate, ``(*b, K, K)``."""
        return (self.rates > 0) & ~diagonal(self.rates)

    @property
    def batches(self) -> dict[str, torch.Size]:
        """Batch dimensions of the parameters and of the times."""
        return super().batches | {"times": self.times.shape[:-1]}

    @property
    def steps(self) -> dict[str, int]:
        """T by the name of the times, and of rates for each gap."""
        of_rates = {"rates": self.rates.size(-3) + 1} if self.rates_per_step else {}
        return {"times": self.times.size(-1)} | of_rates

    def check_shapes(self) -> None:
        """Raise unless parameters and times have matching shapes."""
        super().check_shapes()
        check_real("times", self.times)
        if self.times.dim() == 0:
            raise ValueError("times must have shape (*B, T); got shape (). Give one for each step.")
        if self.exact_entry is not None:
            check_booleans("exact_entry", self.exact_entry)
            check_shape("exact_entry", self.exact_entry, self.rates.shape[-1:], "(K,)")
            self.exact_entry = self.exact_entry.to(self.rates.device)

    def check_values(self) -> None:
        """Raise unless the rates are those of a chain in continuous time."""
        check_log_simplex("log_initial", self.log_initial)
        check_times(self.times.to(self.rates.device).double(), self.exists)
        rates = self.rates.detach()
        others = rates.masked_fill(diagonal(rates), 0.0)
        leave = others.sum(-1)
        wrong = (rates.sum(-1).abs() > 1e-4 * leave).any()
        if bool(wrong) or not bool((others >= 0).all()) or not bool(leave.isfinite().all()):
            raise ValueError(
                "rates must be finite, not negative off the diagonal, and sum to zero in each row: "
                "rates = rates.fill_diagonal_(0); rates = rates - rates.sum(-1).diag_embed()."
            )
        if self.exact_entry is not None and bool(leave[..., self.exact_entry].any()):
            raise ValueError(
                "rates must be zero in the rows of the states of exact_entry, which are never "
                "left. Leave other states out of exact_entry."
            )

    def permuted(self, order: Tensor) -> Chain:
        """A copy with states permuted: new state k is old state ``order[k]``."""
        exact = None if self.exact_entry is None else self.exact_entry[order]
        return super().permuted(order).replace(exact_entry=exact)

    def factors(self) -> dict[str, Tensor]:
        """Factors of the expected counts: log rates, and on the diagonal minus the exit rates."""
        stays = diagonal(self.rates)
        logs = log(self.rates.masked_fill(stays, 1.0))
        return {"log_initial": self.log_initial, "rates": torch.where(stays, self.rates, logs)}

    def expected_counts(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        r"""Expected counts: sufficient statistics of a chain in continuous time.

        Under ``rates``, the expected number of transitions, those between observations too, and on
        the diagonal the expected time in each state: the gradient of the log evidence by
        :math:`\log q_{ij}` and :math:`q_{ii}` (Fisher's identity).
        """
        refuse_transforms("expected counts of a chain in continuous time")
        found = recursions.expected_counts(self.log_initial, self.matrices, log_likelihood, lengths)
        pulled = self._pulled(self.factors()["rates"], found.counts.pop("log_transition"))
        return found._replace(counts=found.counts | {"rates": pulled})

    @recomputing
    def _pulled(self, log_rates: Tensor, transitions: Tensor) -> Tensor:
        """Gradient of log transition probabilities by log rates, weighted by ``transitions``."""
        with torch.inference_mode(False):  # whose tensors cannot be kept for a gradient
            gaps = Gaps(*(part.clone() if part.is_inference() else part for part in self.gaps))
            seen = self.options["observed"]
            seen = None if seen is None else seen.clone()

        def weighted(logs: Tensor, weights: Tensor) -> Tensor:
            parts = torch.where(diagonal(logs), logs, logs.exp()), gaps, self.exact_entry, seen
            matrices = transitions_between(*parts, self.rates_per_step)
            return (finite_or_zero(matrices) * weights).sum()

        return gradients(weighted, log_rates, transitions)[1][0]

    def uniform(self) -> Chain:
        """A copy with equal rates of all possible transitions, at about one transition per gap."""
        gaps = self.gaps.distinct[self.gaps.place]
        possible = self.possible.to(self.rates)
        leave = possible.sum(-1, keepdim=True).clamp(min=1.0)
        rates = possible / (leave * (gaps.mean().to(self.rates) if gaps.numel() else 1.0))
        return super().uniform().replace(rates=rates - rates.sum(-1).diag_embed())

    def stationary(self) -> Tensor:
        r"""Stationary distribution :math:`\pi Q = 0` of the states, ``(*b, K)``."""
        self.check_rates("the stationary distribution")
        fastest = -self.rates.diagonal(dim1=-2, dim2=-1).amin(-1)[..., None, None]
        step = 0.5 / torch.where(fastest > 0, fastest, 1.0)  # so that each state may stay
        stays = torch.eye(self.num_states).to(self.rates)
        return markov_ops.stationary(log(stays + step * self.rates))

    def check_constant(self, purpose: str) -> NoReturn:
        """Raise: steps do not lie at equal distances."""
        raise ValueError(
            f"{purpose} needs an hmm that does not change with the step; this one has times. Call "
            "forecast(values, times), or mark times to come as steps that are not observed."
        )

    def check_rates(self, purpose: str) -> None:
        """Raise if rates change with the step, which ``purpose`` does not allow."""
        if self.rates_per_step:
            raise ValueError(
                f"{purpose} needs rates that do not change with the step. Take those of one gap t: "
                "hmm.replace(rates=hmm.rates[..., t, :, :], rates_per_step=False)."
            )

    def check_samples(self, purpose: str) -> None:
        """Raise if transitions have densities in place of probabilities (``exact_entry``)."""
        if self.exact_entry is not None:
            raise ValueError(
                f"{purpose} needs probabilities of the states at each step, not densities of "
                "entries at exact times. Take hmm.replace(exact_entry=None)."
            )


def diagonal(matrix: Tensor) -> Tensor:
    """Mask of the diagonal of matrices ``(*b, K, K)``, ``(K, K)``."""
    return torch.eye(matrix.size(-1), dtype=torch.bool, device=matrix.device)


def over_gaps(rates: Tensor, gaps: Gaps) -> Tensor:
    """Log transition matrices ``(*b, *p, K, K)`` of the gaps, with ``(*p)`` of ``gaps.place``."""
    inner = gaps.place.dim() - 1
    lead, matrix = rates.shape[:-2], rates.shape[-2:]
    outer = max(len(lead) - inner, 0)
    if any(size > 1 for size in lead[outer:]):  # sequences with rates of their own
        return log_transitions(rates.unsqueeze(-3), gaps.distinct[gaps.place])
    logs = log_transitions(rates.reshape(*lead[:outer], 1, *matrix), gaps.distinct)
    first = torch.arange(lead[:outer].numel(), device=rates.device) * len(gaps.distinct)
    rows = gaps.place + first.reshape(*lead[:outer], *(1,) * gaps.place.dim())
    return take_rows(logs.flatten(-2).flatten(0, -2), rows).unflatten(-1, matrix)


def transitions_between(
    rates: Tensor,
    gaps: Gaps,
    exact_entry: Tensor | None,
    observed: Tensor | None,
    per_step: bool = False,
) -> Tensor:
    """Log-probabilities of transitions, with densities of entering states of ``exact_entry``."""
    if per_step:
        matrices = log_transitions(rates, gaps.distinct[gaps.place])
    else:
        matrices, rates = over_gaps(rates, gaps), rates.unsqueeze(-3)
    if exact_entry is None:
        return matrices
    others = rates.masked_fill(diagonal(rates), 0.0).double()
    alive = matrices.double().masked_fill((others == 0).all(-1).unsqueeze(-2), -torch.inf)
    peak = largest(alive, (-1,))  # of the states that may be left
    enter = (log((alive - peak).exp() @ others) + peak).to(matrices)
    if observed is not None:
        enter = enter.masked_fill(~observed[..., 1:, None, None], -torch.inf)
    return torch.where(exact_entry & ~diagonal(rates), enter, matrices)


def log_transitions(rates: Tensor, gaps: Tensor) -> Tensor:
    r"""Log-probabilities of the state after each gap, :math:`\log e^{Q \Delta}`.

    By uniformisation: :math:`e^{-\lambda \Delta} e^{(Q + \lambda I) \Delta}`, with :math:`\lambda`
    the largest rate of leaving a state, has a series without negative terms, so that
    probabilities however small keep their digits. The gap is halved until :math:`\lambda \Delta`
    plus the K - 1 transitions to the farthest state are at most one for each part, and the result
    squared as often; in logarithms where a probability would leave the range of float64. Rows sum
    to one, and what no chain of transitions reaches has probability zero.

    The derivative is that of the exponential by all entries of Q, each of them on its own: by the
    diagonal too.

    Args:
        rates: ``(*b, K, K)``.
        gaps: ``(*g)``, lengths of time, not negative; they broadcast with ``(*b)``.

    Returns:
        ``(*B, K, K)``, of the dtype of ``rates``; row = from, column = to.

    Example:
        >>> decay = torch.tensor([[-0.1, 0.1], [0.0, 0.0]])
        >>> log_transitions(decay, torch.tensor([1.0, 10.0])).exp()
        tensor([[[0.9048, 0.0952],
                 [0.0000, 1.0000]],
        <BLANKLINE>
                [[0.3679, 0.6321],
                 [0.0000, 1.0000]]])
    """
    wide, gaps = rates.double(), gaps.to(rates.device).double()
    size = wide.size(-1)
    fastest = -wide.detach().diagonal(dim1=-2, dim2=-1).amin(-1)
    # paths of more terms than the series has are then made of parts which have few of them each
    halvings = (fastest * gaps.detach() + size - 1).log2().ceil().clamp(0, HALVED).nan_to_num(0.0)
    step = gaps * 0.5**halvings
    scale = fastest[..., None, None] * torch.eye(size).to(wide)
    step = step[..., None, None]  # rows sum to a constant, of which there is no derivative
    first = probs = _normalised(_exponential(wide * step + scale * step.detach()))
    for done in range(int(halvings.max()) if halvings.numel() else 0):
        again = (done < halvings)[..., None, None]
        probs = torch.where(again, _normalised(probs @ probs), probs)
    logs, small = log(probs), (probs < LEAST) & (first > 0)
    if not bool(small.any()):
        return logs.to(rates.dtype)
    lost = small.any(-1).any(-1)
    exact = recomputed(partial(_squared, halvings=halvings.expand(lost.shape)[lost]), first[lost])
    return logs.masked_scatter(lost[..., None, None], exact).to(rates.dtype)


def _squared(probs: Tensor, halvings: Tensor) -> Tensor:
    """Logarithms of matrices ``(M, K, K)`` squared ``(M,)`` times, with rows that sum to one."""
    logs = log(probs)
    for done in range(int(halvings.max())):
        square = logsumexp(logs.unsqueeze(-1) + logs.unsqueeze(-3), -2)
        square = square - square.detach().logsumexp(-1, keepdim=True)
        logs = torch.where((done < halvings)[..., None, None], square, logs)
    return logs


def _exponential(matrix: Tensor) -> Tensor:
    """Taylor series of the matrix exponential (Paterson and Stockmeyer)."""
    powers = [torch.eye(matrix.size(-1)).to(matrix), matrix]
    while len(powers) <= PART:
        powers.append(powers[-1] @ matrix)
    total = powers[0] / math.factorial(DEGREE)
    for first in range(DEGREE - PART, -1, -PART):
        part = sum(powers[j] / math.factorial(first + j) for j in range(PART))
        total = part + powers[PART] @ total
    return total


def _normalised(probs: Tensor) -> Tensor:
    """Normalise rows to sum to one, against rounding errors."""
    return probs / probs.detach().sum(-1, keepdim=True)
