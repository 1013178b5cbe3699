r"""M-steps without a closed form: gradient steps, and transition matrices under a diversity prior.

Under a diversity prior the M-step of a transition matrix raises

.. math:: \sum_{ij} c_{ij} \log A_{ij} + \alpha \log\det \tilde K_A - \alpha_A |A - A_0|^2

for expected counts c of transitions. This is not concave, although the paper says so: an M-step
raises it at every iteration and ends at a stationary point. There are two: :class:`FixedPoint`, the
default, and :class:`LogitGradient`, for other exponents of the kernel and other priors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .._checks import check_size
from .._imports import imported
from .._sync import read_with_one_wait
from ..data.parts import Parts, parts_of
from ..data.sequences import Sequences
from ..distributions.dpp import DiversityPrior
from ..distributions.hmm import HMM
from ..ops.diversity import RootAscent
from ..ops.log_space import log

MOST_WORK = 3_000_000  # cubed states of all starts of a search
MOSTLY = 0.9  # share of steps with a label from which M-steps search
CLOSE = 0.1  # share of the counts by which those differ that need no other search
NEGLIGIBLE = 1e-30  # share of the counts of a row, below which a count is none


class GradientStep:
    """An M-step by gradient steps, for what has no closed form.

    Args:
        num_iterations: Largest number of gradient steps in one M-step.
        optimizer: Called with the parameters, returns a torch optimizer, which keeps its state from
            one M-step to the next. By default each M-step is L-BFGS, until it converges or for
            ``num_iterations``; restarts share its line search. It stays on a plateau without a
            gradient, as where every softmax is saturated: start EM at narrow priors, or give Adam.
        guard: Whether an M-step that would raise the loss is undone. Without it EM may go down.
    """

    def __init__(
        self,
        num_iterations: int = 20,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        guard: bool = True,
    ) -> None:
        check_size("num_iterations", num_iterations)
        self.num_iterations, self.optimizer, self.guard = num_iterations, optimizer, guard
        self._stepper: torch.optim.Optimizer | None = None

    def __call__(self, loss: Callable[[], Tensor], parameters: list[Tensor]) -> None:
        """Decrease ``loss`` ``(R,)`` in every restart.

        Args:
            loss: Reads ``parameters``.
            parameters: Unconstrained; with several restarts, their first dimension is R.
        """
        with torch.no_grad():
            before = loss()
        kept = [leaf.detach().clone() for leaf in parameters]
        sizes = before.masked_fill(~before.isfinite(), 0.0).abs().sum()

        @torch.enable_grad()
        def evaluate() -> list[Tensor]:
            values = loss()
            failed = ~values.isfinite()
            value = values.masked_fill(failed, 0.0).sum()
            gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
            # a restart that has failed must not change the others, nor look good
            value = value.detach() + failed.sum() * (1e3 + 10 * sizes)
            return [value, *(gradient.nan_to_num(0.0, 0.0, 0.0) for gradient in gradients)]

        def closure() -> Tensor:
            value, *gradients = evaluate()
            for leaf, gradient in zip(parameters, gradients):
                leaf.grad = gradient.contiguous()  # optimizers may take views
            return value

        imported("torch._dynamo")  # an optimizer would, with signals
        if self.optimizer is None:
            _minimize(evaluate, parameters, sizes, self.num_iterations)
        else:
            self._stepper = self._stepper or self.optimizer(parameters)
            for _ in range(self.num_iterations):
                self._stepper.step(closure)  # type: ignore[arg-type]
        if not self.guard:
            return
        with torch.no_grad():
            worse = ~(loss() <= before)  # also if it is NaN
            for leaf, old in zip(parameters, kept):
                shape = (-1, *(1,) * (leaf.dim() - 1)) if len(worse) > 1 else ()
                leaf.copy_(torch.where(worse.reshape(shape), old, leaf))


def _minimize(
    evaluate: Callable[[], list[Tensor]],
    parameters: list[Tensor],
    size: Tensor,
    num_iterations: int,
) -> None:
    """L-BFGS on copies on the CPU, so that it waits for an accelerator once at each point.

    Args:
        evaluate: Value and gradients at the parameters as they are.
        parameters: They are set to where it ends.
        size: Of the value, below whose rounding it ends.
        num_iterations: Largest number of iterations.
    """
    scale, *points = read_with_one_wait(lambda: [size, *parameters])
    leaves = [point.to(like.dtype).requires_grad_() for point, like in zip(points, parameters)]

    @torch.no_grad()
    def copy() -> None:
        for leaf, parameter in zip(leaves, parameters):
            parameter.copy_(leaf)

    def closure() -> Tensor:
        copy()
        value, *gradients = read_with_one_wait(evaluate)
        for leaf, gradient in zip(leaves, gradients):
            leaf.grad = gradient.to(leaf).contiguous()  # L-BFGS takes views
        return value

    optimizer = torch.optim.LBFGS(
        leaves, max_iter=num_iterations, tolerance_grad=1e-9, line_search_fn="strong_wolfe",
        tolerance_change=1e-11 * max(100.0, scale.item()),
    )  # fmt: skip
    optimizer.step(closure)
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
        """M-step of transition matrices, which never lowers the objective.

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


def share_labelled(data: Sequences | Parts) -> float:
    """Fraction of the steps whose state is known, in the first part of the data."""
    part = next(iter(parts_of(data)))
    labels = part.packed("labels")
    known = labels is not None and labels.dtype != torch.bool
    return part.num_labelled / part.num_rows if known else 0.0


def default_step(prior: TransitionPrior, data: Sequences | Parts) -> TransitionStep:
    """Default transition M-step: FixedPoint if rho = 1/2, else LogitGradient.

    Args:
        prior: The prior of the transitions.
        data: The sequences: if nearly all of their states are known, one M-step is nearly the whole
            fit.
    """
    num_starts = 100 if isinstance(prior, DiversityPrior) and share_labelled(data) >= MOSTLY else 0
    if isinstance(prior, DiversityPrior) and prior.rho == 0.5:
        return FixedPoint(num_starts=num_starts)
    return LogitGradient(num_starts=num_starts)


class _Searching:
    """Transition M-step that may ascend from many starts.

    Attributes:
        searched: What each search was for, its counts, and the best matrix: counts that are close
            need no other one.
    """

    _climb: Any  # (start, counts, prior, allowed) -> the local maximum that one ascent reaches

    def __init__(self, num_starts: int) -> None:
        self.num_starts = num_starts
        self.searched: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def __call__(
        self, rows: Tensor, counts: Tensor, prior: Any, allowed: Tensor | None = None
    ) -> Tensor:
        """M-step of transition matrices: the best end of one or many ascents."""
        counts = _significant(counts.detach().double())
        climb = partial(self._climb, counts=counts, prior=prior, allowed=allowed)
        end = climb(rows.detach().double())
        start = best_start(end, counts, prior, allowed)
        moved = (start != end).any(-1).any(-1)[:, None, None]
        if bool(moved.any()):
            end = torch.where(moved, climb(start), end)
        if self.num_starts and isinstance(prior, DiversityPrior):
            found = torch.stack([self._searched(count, prior, allowed) for count in counts])
            end = _higher(climb(found), end, counts, prior)
        return end

    def _searched(self, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None) -> Tensor:
        """Best matrix after short ascents from many starts, as if rho = 1/2."""
        possible = torch.ones_like(counts) if allowed is None else allowed
        anchor = counts[:0] if prior.anchor is None else prior.anchor
        parts: list[Any] = [prior.numbers, possible, anchor]
        key = torch.cat([part.flatten().to(counts) for part in parts])
        for under, known, best in self.searched:
            near = (counts - known).abs().sum() <= CLOSE * counts.sum()
            if torch.equal(under, key) and bool(near):
                return best
        points = self._points(counts, prior)
        if allowed is not None:
            points = _shares(points.masked_fill(~allowed, 0.0), points)
        many = counts.expand_as(points)
        ends = _ascended(points, many, prior, allowed, 60)
        heights = objective(ends, many, prior).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        best = ends[heights.argmax()]
        self.searched = [*self.searched, (key, counts, best)]
        return best

    def _points(self, counts: Tensor, prior: DiversityPrior) -> Tensor:
        """Starting matrices ``(P, K, K)`` between the counts, or the anchor, and random rows."""
        size = len(counts)
        ends = [_shares(counts + 0.1, counts)]
        if prior.anchor is not None:
            ends.append(prior.anchor.to(counts) + 1e-3 / size)
        count = min(self.num_starts, max(8, MOST_WORK // size**3))
        near = torch.stack(ends).repeat(-(-count // len(ends)), 1, 1)[:count]
        generator = torch.Generator().manual_seed(0)
        random = torch.empty(near.shape, dtype=torch.float64).exponential_(generator=generator)
        random = random / random.sum(-1, keepdim=True) + 1e-3
        share = torch.linspace(0, 1, count, dtype=torch.float64)[:, None, None]
        points = torch.lerp(near, random.to(near), share.to(near))
        return points / points.sum(-1, keepdim=True)


class FixedPoint(_Searching):
    r"""M-step by Newton steps in the roots of the probabilities, for :math:`\rho = 1/2`.

    The prior then adds :math:`\alpha` pseudo-counts to each row, divided as
    :math:`M = S \circ S^{-\mathsf T}` with :math:`S = \sqrt A`, whose rows sum to one but whose
    entries may be negative. Without an anchor the objective is stationary at the fixed points

    .. math:: A_{ij} = \frac{c_{ij} + \alpha M_{ij}}{n_i + \alpha}, \quad n_i = \sum_j c_{ij}

    By S it has finite slopes at zero, so that entries may become zero, and leave it. Under an
    anchor, where a zero has no slope, entries start at no less than 1e-6.

    There are many optima, and one ascent finds one of them. With ``num_starts`` it climbs from
    matrices between the counts, or the anchor, and random ones, and returns the highest optimum,
    which need not be the global one.

    Args:
        num_iterations: Largest number of iterations in one M-step; EM needs few.
        num_starts: Number of points to climb from, besides the start; fewer above 30 states. The
            random ones are the same at each call. By default :func:`fit_em` asks for 100 where
            nine in ten steps or more are labelled, since restarts are much the same there, and for
            none elsewhere.

    Example:
        >>> counts = torch.tensor([[[8.0, 2.0], [5.0, 5.0]]])
        >>> rows = counts / counts.sum(-1, keepdim=True)
        >>> msteps.FixedPoint()(rows, counts, DiversityPrior(5.0)).round(decimals=3)
        tensor([[[0.9320, 0.0680],
                 [0.2680, 0.7320]]], dtype=torch.float64)
    """

    def __init__(self, num_iterations: int = 1000, num_starts: int = 0) -> None:
        check_size("num_iterations", num_iterations)
        super().__init__(num_starts)
        self.num_iterations = num_iterations

    def _climb(self, start: Tensor, counts: Tensor, prior: Any, allowed: Tensor | None) -> Tensor:
        if prior.rho != 0.5:
            raise ValueError(
                f"FixedPoint is for rho = 0.5; the prior has rho = {prior.rho:g}. Use "
                "LogitGradient."
            )
        return _ascended(start, counts, prior, allowed, self.num_iterations)


def _ascended(
    rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None, num_iterations: int
) -> Tensor:
    """Matrices ``(R, K, K)`` after an ascent of each; the start where that is higher."""
    anchor = None if prior.anchor is None else prior.anchor.detach().to(counts)
    ascent = RootAscent(counts, allowed, prior.alpha, anchor, prior.anchor_weight)
    roots, going = ascent.start(rows), torch.arange(len(rows), device=rows.device)
    for _ in range(num_iterations):
        roots[going], ended = ascent.of(going).step(roots[going])
        going = going[~ended]
        if not len(going):
            break
    return _higher(roots.square(), rows, counts, prior)


class LogitGradient(_Searching):
    """M-step by gradient steps in logits, for any exponent of the kernel.

    The logit of a zero is infinite, and that of a small entry hardly changes: entries that are
    allowed start at no less than 1 / 100 K. A matrix that does not improve stays as it was.

    Args:
        step: How steps are taken; by default L-BFGS.
        num_starts: As of :class:`FixedPoint`, whose ascents find the points to climb from under a
            :class:`DiversityPrior`.
    """

    def __init__(self, step: GradientStep | None = None, num_starts: int = 0) -> None:
        super().__init__(num_starts)
        self.step = step or GradientStep(num_iterations=100)

    def _climb(self, start: Tensor, counts: Tensor, prior: Any, allowed: Tensor | None) -> Tensor:
        kept = torch.zeros_like(counts[0], dtype=torch.bool) if allowed is None else ~allowed
        inside = start.clamp(min=0.01 / start.size(-1)).masked_fill(kept, 0.0)
        leaf = log(inside).masked_fill(kept, 0.0).requires_grad_()

        def matrix() -> Tensor:
            return leaf.masked_fill(kept, -torch.inf).softmax(-1)

        self.step(lambda: -objective(matrix(), counts, prior), [leaf])
        return _higher(matrix().detach(), start, counts, prior)


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


def _shares(counts: Tensor, otherwise: Tensor) -> Tensor:
    """Row-normalised counts; rows without counts become ``otherwise``."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total, otherwise)


def _anchored_mode(counts: Tensor, anchor: Tensor, weight: float) -> Tensor:
    r"""Row-wise maximum of :math:`\sum_j c_j \log a_j - w (a_j - a_{0j})^2` on the simplex.

    With a multiplier :math:`\mu` of the sum, :math:`a_j` is the positive root of a quadratic
    equation, and convex in it, so that Newton's method from the left is monotone.
    """
    multiplier = torch.zeros_like(counts[..., :1])
    for _ in range(50):
        middle = anchor - multiplier / (2 * weight)
        root = (middle.square() + 2 * counts / weight).sqrt()
        high = torch.where(middle > 0, (middle + root) / 2, counts / weight / (root - middle))
        high = high.nan_to_num(0.0)
        slope = (high / root.clamp(min=1e-150)).sum(-1, keepdim=True) / (2 * weight)
        multiplier = multiplier + (high.sum(-1, keepdim=True) - 1) / slope.clamp(min=1e-150)
    return high / high.sum(-1, keepdim=True)


def _higher(new: Tensor, old: Tensor, counts: Tensor, prior: TransitionPrior) -> Tensor:
    """Per restart the matrix with the higher objective."""
    risen = objective(new, counts, prior) > objective(old, counts, prior)
    return torch.where(risen[:, None, None], new, old)


def objective(rows: Tensor, counts: Tensor, prior: TransitionPrior) -> Tensor:
    """Expected transition log-likelihood plus log prior, ``(R,)``.

    Example:
        >>> rows = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
        >>> msteps.objective(rows, torch.tensor([[[1.0, 1.0], [1.0, 0.0]]]), DiversityPrior(1.0))
        tensor([-2.0794])
    """
    counts = _significant(counts)
    weighted = torch.where(counts > 0, counts * log(rows), 0.0)
    return weighted.sum((-2, -1)) + prior.log_density_of_transition(rows)


def _significant(counts: Tensor) -> Tensor:
    """Counts ``(R, K, K)``, zero where so small that probabilities would underflow."""
    return torch.where(counts > NEGLIGIBLE * counts.sum(-1, keepdim=True), counts, 0.0)
