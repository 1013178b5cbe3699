r"""M-steps without a closed form: gradient steps, and transition matrices under a diversity prior.

Under a diversity prior the M-step of a transition matrix raises

.. math:: \sum_{ij} c_{ij} \log A_{ij} + \alpha \log\det \tilde K_A - \alpha_A |A - A_0|^2

for expected counts c of transitions. This is not concave, although the paper says so: an M-step
raises it at every iteration and ends at a stationary point. There are two: :class:`FixedPoint`, the
default, and :class:`LogitGradient`, for other exponents of the kernel and other priors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .._checks import check_size
from .._sync import read_with_one_wait
from ..distributions.dpp import DiversityPrior
from ..distributions.hmm import HMM
from ..ops.log_space import log
from .ascent import TINY, Ascent

MOST_WORK = 3_000_000  # cubed states of all starts of a search
UNCONVERGED = 1e-3  # relative slope at the end of an M-step, above which it is reported
NEGLIGIBLE = 1e-30  # share of the counts of a row, below which a count is none


class GradientStep:
    """An M-step by gradient steps, for what has no closed form.

    Args:
        num_steps: Largest number of gradient steps in one M-step.
        optimizer: Called with the parameters, returns a torch optimizer, which keeps its state from
            one M-step to the next. By default each M-step is L-BFGS, until it converges or for
            ``num_steps``; restarts share its line search. It stays on a plateau without a gradient,
            as where every softmax is saturated: start EM at narrow priors, or give Adam.
        guard: Whether an M-step that would raise the loss is undone. Without it EM may go down.
    """

    def __init__(
        self,
        num_steps: int = 20,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        guard: bool = True,
    ) -> None:
        check_size("num_steps", num_steps)
        self.num_steps, self.optimizer, self.guard = num_steps, optimizer, guard
        self._stepper: torch.optim.Optimizer | None = None

    def __call__(self, loss: Callable[[], Tensor], parameters: list[Tensor]) -> None:
        """Lower ``loss`` ``(R,)`` in every restart.

        Args:
            loss: Reads ``parameters``.
            parameters: Unconstrained; with several restarts, their first dimension is R.
        """
        with torch.no_grad():
            before = loss()
        kept = [leaf.detach().clone() for leaf in parameters]
        sizes = before.masked_fill(~before.isfinite(), 0.0).abs().sum()
        leaves = parameters
        if self.optimizer is None and before.device.type != "cpu":
            sizes, *host = read_with_one_wait(lambda: [sizes, *parameters])
            leaves = [leaf.to(like.dtype).requires_grad_() for leaf, like in zip(host, parameters)]
        size = sizes.item()

        def evaluate() -> list[Tensor]:
            values = loss()
            failed = ~values.isfinite()
            value = values.masked_fill(failed, 0.0).sum()
            gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
            # a restart that has failed must not change the others, nor look good
            value = value.detach() + failed.sum() * (1e3 + 10 * size)
            return [value, *(gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients)]

        if self.optimizer is None:
            limits = self.num_steps, 1e-11 * max(100.0, size)
            _minimize(evaluate, parameters, leaves, *limits)
        else:
            self._stepper = self._stepper or self.optimizer(parameters)
            for _ in range(self.num_steps):
                self._stepper.step(_closure(evaluate, parameters))  # type: ignore[arg-type]
        if not self.guard:
            return
        with torch.no_grad():
            worse = ~(loss() <= before)  # also if it is NaN
            for leaf, old in zip(parameters, kept):
                shape = (-1, *(1,) * (leaf.dim() - 1)) if len(worse) > 1 else ()
                leaf.copy_(torch.where(worse.reshape(shape), old, leaf))


def _closure(evaluate: Callable[[], list[Tensor]], leaves: list[Tensor]) -> Callable[[], Tensor]:
    """Closure for a torch optimizer of ``leaves``; ``evaluate`` gives loss and gradients."""

    def closure() -> Tensor:
        value, *gradients = evaluate()
        for leaf, gradient in zip(leaves, gradients):
            leaf.grad = gradient
        return value

    return closure


def _minimize(
    evaluate: Callable[[], list[Tensor]],
    parameters: list[Tensor],
    leaves: list[Tensor],
    num_steps: int,
    tolerance: float,
) -> None:
    """L-BFGS on ``leaves``: the parameters, or copies of them on the CPU.

    It asks for values all the time; copies make it wait for an accelerator once at each point.
    """

    @torch.no_grad()
    def copy() -> None:
        for leaf, there in zip(leaves, parameters):
            there.copy_(leaf)

    def read() -> list[Tensor]:
        if leaves is parameters:
            return evaluate()
        copy()
        value, *gradients = read_with_one_wait(evaluate)
        return [value, *(gradient.to(leaf) for gradient, leaf in zip(gradients, leaves))]

    optimizer = torch.optim.LBFGS(
        leaves, max_iter=num_steps, tolerance_grad=1e-9, tolerance_change=tolerance,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    optimizer.step(_closure(read, leaves))
    if leaves is not parameters:
        copy()


@runtime_checkable
class TransitionPrior(Protocol):
    """A log-prior of the transition matrix alone, such as a :class:`DiversityPrior`.

    As the ``log_prior`` of :func:`fit_em` it leaves the closed forms of all other parameters.
    """

    def __call__(self, hmm: HMM) -> Tensor:
        """Log-density ``(*B)`` of the transition matrix of ``hmm``."""

    def log_density_of_transition(self, transition: Tensor) -> Tensor:
        """Log-density ``(*B)`` of transition matrices ``(*B, K, K)``."""


class TransitionStep(Protocol):
    """An M-step of transition matrices under a prior."""

    def __call__(
        self, rows: Tensor, counts: Tensor, prior: Any, allowed: Tensor | None = None
    ) -> Tensor:
        """Raise the objective.

        Args:
            rows: ``(R, K, K)`` float64, the start of each of R restarts.
            counts: ``(R, K, K)``, expected counts of transitions, pseudo-counts of a Dirichlet
                prior included; not negative.
            prior: A :class:`TransitionPrior`.
            allowed: ``(K, K)`` booleans, transitions that are possible; all by default.

        Returns:
            Matrices ``(R, K, K)`` with an objective at least as high as that of ``rows`` and, of
            the steps here, as that of :func:`best_start`.
        """


def default_step(prior: TransitionPrior, labelled: bool = False) -> TransitionStep:
    """:class:`FixedPoint` where it applies, :class:`LogitGradient` elsewhere.

    Args:
        prior: The prior of the transitions.
        labelled: Whether all states are known: one M-step is then the whole fit.
    """
    if isinstance(prior, DiversityPrior) and prior.rho == 0.5:
        return FixedPoint(num_starts=100 if labelled else 0)
    return LogitGradient()


class FixedPoint:
    r"""M-step by fixed-point iteration, accelerated and damped; with an anchor by L-BFGS.

    For :math:`\rho = 1/2` the prior adds :math:`\alpha` pseudo-counts to each row, divided as
    :math:`M = S \circ S^{-\mathsf T}` with :math:`S = \sqrt A`, whose rows sum to one but whose
    entries may be negative. Without an anchor the objective is stationary where

    .. math:: A_{ij} = \frac{c_{ij} + \alpha M_{ij}}{n_i + \alpha}, \quad n_i = \sum_j c_{ij}

    It is iterated on S, which has finite slopes at zero: with the slope of the log-determinant
    fixed at :math:`V = S^{-\mathsf T}`, the best S is the positive root of
    :math:`\lambda_i S_{ij}^2 - \alpha V_{ij} S_{ij} - c_{ij} = 0` for a multiplier of the length
    of the row; rows are scaled to length one. An extrapolation of the last iterations (Anderson
    acceleration) is taken if it is at least as good; a proposal that lowers the objective is
    damped. Under an anchor, whose slope by S vanishes at zero, steps are those of L-BFGS on S, and
    entries leave zero where the objective rises with the probability itself.

    There are many optima, and one ascent finds one of them. With ``num_starts`` it climbs from the
    anchor, the counts, both smoothed, and random matrices near them and elsewhere, then from random
    changes of the best, and returns the highest optimum, which need not be the global one.

    Args:
        num_steps: Largest number of iterations in one M-step; EM needs few.
        tolerance: End when the relative residual of every entry of :math:`S` is below this.
        memory: Number of iterations that the extrapolation or the metric of L-BFGS uses.
        num_starts: Number of points to climb from, besides the start; fewer above 30 states. The
            random ones are the same at each call. By default :func:`fit_em` asks for 100 where all
            states are labelled, since restarts are all the same there, and for none elsewhere.

    Example:
        >>> counts = torch.tensor([[[8.0, 2.0], [5.0, 5.0]]])
        >>> rows = counts / counts.sum(-1, keepdim=True)
        >>> msteps.FixedPoint()(rows, counts, DiversityPrior(5.0)).round(decimals=3)
        tensor([[[0.9320, 0.0680],
                 [0.2680, 0.7320]]], dtype=torch.float64)
    """

    def __init__(
        self,
        num_steps: int = 200,
        tolerance: float = 1e-10,
        memory: int = 6,
        num_starts: int = 0,
    ) -> None:
        check_size("num_steps", num_steps)
        check_size("memory", memory)
        self.num_steps, self.tolerance, self.memory = num_steps, tolerance, memory
        self.num_starts = num_starts

    @torch.no_grad()
    def __call__(
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None = None
    ) -> Tensor:
        """Raise the objective: see :class:`TransitionStep`.

        Raises:
            ValueError: If the exponent of the prior is not one half.
        """
        if prior.rho != 0.5:
            raise ValueError(
                f"FixedPoint is for rho = 0.5; the prior has rho = {prior.rho:g}. Use "
                "LogitGradient."
            )
        counts = _significant(counts.detach().double())
        if self.num_starts > 0:
            rows = self._searched(rows, counts, prior, allowed)

        def climb(start: Tensor) -> Tensor:
            ascent = Ascent(start, counts, prior, allowed)
            return ascent.climb(self.num_steps, self.tolerance, self.memory)

        return _from_the_best(climb, rows, counts, prior, allowed)

    def _searched(
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None
    ) -> Tensor:
        """In each restart the matrix with the highest objective after short ascents from many."""
        found = torch.empty_like(rows, dtype=torch.float64)
        for r, (row, count) in enumerate(zip(rows, counts)):
            if r > 0 and torch.equal(count, counts[0]):  # as where all states are labelled
                found[r] = found[0]
                continue
            points = self._points(row.detach().double(), count, prior)
            tops, highest = points[:0], points.new_zeros(0)
            for last in (False, True):
                if allowed is not None:
                    points = _shares(points.masked_fill(~allowed, 0.0), points)
                many = count.expand_as(points)
                ends = Ascent(points, many, prior, allowed).ascend(60, 1e-6, self.memory)
                heights = torch.cat([highest, objective(ends, many, prior)])
                heights = heights.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
                highest, order = heights.sort(descending=True)
                distinct = highest[:-1] - highest[1:] > 1e-6 * highest[1:].abs()
                distinct = torch.cat([distinct.new_ones(1), distinct])
                tops, highest = torch.cat([tops, ends])[order[distinct]][:6], highest[distinct][:6]
                if not last:
                    points = _changed(tops.repeat(len(points) // len(tops), 1, 1))
            found[r] = tops[0]
        return found

    def _points(self, row: Tensor, counts: Tensor, prior: DiversityPrior) -> Tensor:
        """Matrices ``(P, K, K)`` without zeros, but for the first, to climb from."""
        size = len(row)
        points = [row, *(_shares(counts + more, row) for more in (1.0, 0.1, 0.01))]
        if prior.anchor is not None:
            anchor = prior.anchor.to(row)
            points += [_shares(anchor + more / size, row) for more in (1e-3, 0.1, 1.0)]
        count = min(self.num_starts, max(8, MOST_WORK // size**3)) - len(points)
        known = torch.stack(points)
        if count <= 0:
            return known
        near = known[1:].repeat(-(-count // (len(known) - 1)), 1, 1)[:count]
        random = _dirichlet(near, seed=0) + 1e-3
        share = random.new_tensor([0.1, 0.3, 1.0, 1.0]).repeat_interleave(len(known) - 1)
        share = share.repeat(-(-count // len(share)))[:count, None, None]
        return torch.cat([known, _shares(torch.lerp(near, random, share), near)])


def _dirichlet(like: Tensor, seed: int) -> Tensor:
    """Rows of uniformly distributed probabilities, the same at each call."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.empty(like.shape, dtype=torch.float64).exponential_(generator=generator)
    return (random / random.sum(-1, keepdim=True)).to(like.device)


def _changed(points: Tensor) -> Tensor:
    """Matrices some rows of which are mixed with random ones."""
    generator = torch.Generator().manual_seed(1)
    size = points.size(-1)
    count, shares = len(points), torch.tensor([0.1, 0.3, 0.7], dtype=torch.float64)
    share = shares[torch.randint(3, (count, 1, 1), generator=generator)]
    often = torch.tensor([1.5, 3.0])[torch.randint(2, (count, 1, 1), generator=generator)] / size
    chosen = torch.rand(count, size, 1, generator=generator) < often
    mixed = torch.lerp(points, _dirichlet(points, seed=2), (share * chosen).to(points)) + 1e-5
    return mixed / mixed.sum(-1, keepdim=True)


class LogitGradient:
    """M-step by gradient steps in logits, for any exponent of the kernel.

    The logit of a zero is infinite, and that of a small entry hardly changes: entries that are
    allowed start at no less than 1 / 100 K. A matrix that does not improve stays as it was.

    Args:
        step: How steps are taken; by default L-BFGS.
    """

    def __init__(self, step: GradientStep | None = None) -> None:
        self.step = step or GradientStep(num_steps=100)

    def __call__(
        self, rows: Tensor, counts: Tensor, prior: TransitionPrior, allowed: Tensor | None = None
    ) -> Tensor:
        """Raise the objective: see :class:`TransitionStep`."""
        counts = _significant(counts.detach().double())
        kept = torch.zeros_like(counts[0], dtype=torch.bool) if allowed is None else ~allowed

        def climb(old: Tensor) -> Tensor:
            start = old.clamp(min=0.01 / old.size(-1)).masked_fill(kept, 0.0)
            leaf = log(start).masked_fill(kept, 0.0).requires_grad_()

            def matrix() -> Tensor:
                return leaf.masked_fill(kept, -torch.inf).softmax(-1)

            self.step(lambda: -objective(matrix(), counts, prior), [leaf])
            new = matrix().detach()
            risen = objective(new, counts, prior) > objective(old, counts, prior)
            return torch.where(risen[:, None, None], new, old)

        return _from_the_best(climb, rows, counts, prior, allowed)


@torch.no_grad()
def best_start(
    rows: Tensor, counts: Tensor, prior: TransitionPrior, allowed: Tensor | None = None
) -> Tensor:
    """The best of the points at which an M-step may start: it ends no lower than any of them.

    They are the matrix so far; the mode of the counts; and, under a :class:`DiversityPrior` with an
    anchor, the anchor, where the paper starts, and the mode of counts and anchor without diversity.
    From the counts alone an ascent may not reach the anchor: where a count is zero the
    log-determinant may have a barrier, the slope of a square root at zero.

    Args:
        rows: ``(R, K, K)``.
        counts: ``(R, K, K)``.
        prior: As in :class:`TransitionStep`.
        allowed: ``(K, K)`` booleans, transitions that are possible; all by default.

    Returns:
        ``(R, K, K)`` float64.

    Example:
        >>> counts = torch.tensor([[[8.0, 2.0], [5.0, 0.0]]])
        >>> anchor = torch.tensor([[0.7, 0.3], [0.6, 0.4]])
        >>> prior = DiversityPrior(5.0, anchor=anchor, anchor_weight=1e4)
        >>> msteps.best_start(torch.full((1, 2, 2), 0.5), counts, prior).round(decimals=3)
        tensor([[[0.7000, 0.3000],
                 [0.6000, 0.4000]]], dtype=torch.float64)
    """
    rows, counts = rows.detach().double(), counts.detach().double()
    points = [rows, _shares(counts, rows)]
    if isinstance(prior, DiversityPrior) and prior.anchor is not None:
        anchor = prior.anchor.to(rows).expand_as(rows)
        if allowed is not None:
            anchor = _shares(anchor.masked_fill(~allowed, 0.0), rows)
        points += [anchor, _anchored_mode(counts, anchor, prior.anchor_weight)]
        even = torch.ones_like(anchor) if allowed is None else allowed.to(rows).expand_as(rows)
        # without the zeros under which the determinant may be zero
        points += [_shares(each + 0.1 * _shares(even, rows), rows) for each in points[1:]]
    candidates = torch.stack(points)
    heights = objective(candidates, counts, prior)
    best = heights.nan_to_num(nan=-torch.inf, neginf=-torch.inf).argmax(0)
    return candidates[best, torch.arange(len(rows), device=rows.device)]


@torch.no_grad()
def relative_slope(
    rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None = None
) -> Tensor:
    """How far the objective is from stationary, ``(R,)``: zero at an optimum, at most about one.

    The largest slope by the root of a probability, along the distributions and as a share of those
    across; what slopes to below zero has none. The exponent of the prior is one half. Arguments are
    those of :class:`TransitionStep`.

    Example:
        >>> counts = torch.tensor([[[8.0, 2.0], [5.0, 5.0]]])
        >>> msteps.relative_slope(counts / 10, counts, DiversityPrior(5.0)).round(decimals=2)
        tensor([0.4500], dtype=torch.float64)
    """
    ascent = Ascent(rows, _significant(counts.detach().double()), prior, allowed)
    return ascent.stationarity(ascent.start, ascent.slopes(ascent.start))


def _shares(counts: Tensor, otherwise: Tensor) -> Tensor:
    """Counts as shares of their rows; ``otherwise`` in rows without any."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total, otherwise)


def _anchored_mode(counts: Tensor, anchor: Tensor, weight: float) -> Tensor:
    r"""The maximum of :math:`\sum_j c_j \log a_j - w (a_j - a_{0j})^2` on the simplex, by rows.

    With a multiplier :math:`\mu` of the sum, :math:`a_j` is the positive root of a quadratic
    equation, and convex in it, so that Newton's method from the left is monotone.
    """
    multiplier = torch.zeros_like(counts[..., :1])
    for _ in range(50):
        middle = anchor - multiplier / (2 * weight)
        root = (middle.square() + 2 * counts / weight).sqrt()
        high = torch.where(middle > 0, (middle + root) / 2, counts / weight / (root - middle))
        high = high.nan_to_num(0.0)
        slope = (high / root.clamp(min=TINY)).sum(-1, keepdim=True) / (2 * weight)
        multiplier = multiplier + (high.sum(-1, keepdim=True) - 1) / slope.clamp(min=TINY)
    return high / high.sum(-1, keepdim=True)


def _from_the_best(
    climb: Callable[[Tensor], Tensor],
    rows: Tensor,
    counts: Tensor,
    prior: TransitionPrior,
    allowed: Tensor | None,
) -> Tensor:
    """Rows that ``climb`` reaches from ``rows``, or from a better start if there is one."""
    end = climb(rows.detach().double())
    start = best_start(end, counts, prior, allowed)
    moved = (start != end).any(-1).any(-1)
    if not bool(moved.any()):
        return end
    return torch.where(moved[:, None, None], climb(start), end)


def unconverged(
    rows: Tensor, counts: Tensor, prior: Any, allowed: Tensor | None = None
) -> list[str]:
    """A remark if the last M-step of transitions ``(K, K)`` has not converged."""
    if not isinstance(prior, DiversityPrior) or prior.rho != 0.5:
        return []
    slope = relative_slope(rows.unsqueeze(0), counts.unsqueeze(0), prior, allowed).item()
    if slope <= UNCONVERGED:
        return []
    return [
        f"the last M-step of the transition matrix has not converged (relative slope {slope:.2g}): "
        "give transition_step more num_steps"
    ]


def objective(rows: Tensor, counts: Tensor, prior: TransitionPrior) -> Tensor:
    """Objective of the M-step of transition matrices, ``(R,)``: see the head of this module.

    Example:
        >>> rows = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
        >>> msteps.objective(rows, torch.tensor([[[1.0, 1.0], [1.0, 0.0]]]), DiversityPrior(1.0))
        tensor([-2.0794])
    """
    counts = _significant(counts)
    weighted = torch.where(counts > 0, counts * log(rows), 0.0)
    return weighted.sum((-2, -1)) + prior.log_density_of_transition(rows)


def _significant(counts: Tensor) -> Tensor:
    """Counts ``(R, K, K)``, zero where they are so small that probabilities underflow."""
    return torch.where(counts > NEGLIGIBLE * counts.sum(-1, keepdim=True), counts, 0.0)
