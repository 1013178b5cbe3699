r"""M-steps without a closed form: gradient steps, and transition matrices under a diversity prior.

Under a diversity prior the M-step of a transition matrix raises

.. math:: \sum_{ij} c_{ij} \log A_{ij} + \alpha \log\det \tilde K_A - \alpha_A |A - A_0|^2

for expected counts c of transitions. This is not concave, although the paper says so: an M-step
raises it at every iteration and ends at a stationary point. There are three: :class:`FixedPoint`,
the default; :class:`ProjectedGradient`, that of the paper; and :class:`LogitGradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .._arguments import explained
from .._checks import check_size
from ..distributions.dpp import DiversityPrior
from ..distributions.hmm import HMM
from ..ops.diversity import simplex_projection
from ..ops.log_space import log

Matrix = np.ndarray  # (R, K, K), of R batched restarts
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
        size = before.masked_fill(~before.isfinite(), 0.0).abs().sum().item()
        kept = [leaf.detach().clone() for leaf in parameters]
        if self.optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.LBFGS(
                parameters,
                max_iter=self.num_steps,
                tolerance_grad=1e-9,
                tolerance_change=1e-11 * max(100.0, size),
                line_search_fn="strong_wolfe",
            )
        else:
            self._stepper = self._stepper or self.optimizer(parameters)
            optimizer = self._stepper

        def closure() -> Tensor:
            optimizer.zero_grad()
            values = loss()
            failed = ~values.isfinite()
            value = values.masked_fill(failed, 0.0).sum()
            value.backward()
            for leaf in parameters:  # a restart that has failed must not change the others
                if leaf.grad is not None:
                    leaf.grad.nan_to_num_(0.0, 0.0, 0.0)
            return value + failed.sum() * (1e3 + 10 * size)  # nor look good

        for _ in range(1 if self.optimizer is None else self.num_steps):
            optimizer.step(closure)  # type: ignore[arg-type]  # torch's stub wants a float
        if not self.guard:
            return
        with torch.no_grad():
            worse = ~(loss() <= before)  # also if it is NaN
            for leaf, old in zip(parameters, kept):
                if len(worse) > 1:
                    leaf.copy_(torch.where(worse.reshape(-1, *(1,) * (leaf.dim() - 1)), old, leaf))
                elif bool(worse):
                    leaf.copy_(old)


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
            Matrices ``(R, K, K)`` with an objective at least as high.
        """


def default_step(prior: TransitionPrior) -> TransitionStep:
    """:class:`FixedPoint` where it applies, :class:`LogitGradient` elsewhere."""
    if isinstance(prior, DiversityPrior) and prior.rho == 0.5:
        return FixedPoint()
    return LogitGradient()


@explained()
class FixedPoint:
    r"""M-step by fixed-point iteration, accelerated and damped.

    For :math:`\rho = 1/2` the prior adds :math:`\alpha` pseudo-counts to each row, divided as
    :math:`M = S \circ S^{-\mathsf T}` with :math:`S = \sqrt A`, whose rows sum to one but whose
    entries may be negative. Where the objective is stationary

    .. math:: A_{ij} = \frac{c_{ij} + \alpha M_{ij}}{n_i + \alpha}, \quad n_i = \sum_j c_{ij}

    It is iterated on S, which has finite slopes at zero: with the slope of the log-determinant
    fixed at :math:`V = S^{-\mathsf T}`, the best S is the positive root of
    :math:`\lambda_i S_{ij}^2 - \alpha V_{ij} S_{ij} - c_{ij} = 0` with :math:`\lambda_i` such
    that its rows have length one. Entries may become zero, and leave it again. An extrapolation of
    the last iterations (Anderson acceleration) is taken if it is at least as good; a plain
    proposal that lowers the objective is damped.

    Args:
        num_steps: Largest number of iterations in one M-step; EM needs few.
        tolerance: End when the relative residual of every entry of :math:`S` is below this.
        memory: Number of iterations that the extrapolation uses.

    Example:
        >>> counts = torch.tensor([[[8.0, 2.0], [5.0, 5.0]]])
        >>> rows = counts / counts.sum(-1, keepdim=True)
        >>> msteps.FixedPoint()(rows, counts, DiversityPrior(5.0)).round(decimals=3)
        tensor([[[0.9320, 0.0680],
                 [0.2680, 0.7320]]], dtype=torch.float64)
    """

    def __init__(self, num_steps: int = 200, tolerance: float = 1e-10, memory: int = 6) -> None:
        check_size("num_steps", num_steps)
        check_size("memory", memory)
        self.num_steps, self.tolerance, self.memory = num_steps, tolerance, memory

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
                "LogitGradient, or ProjectedGradient."
            )
        climb = _Climb(rows, counts, prior, allowed)
        if not climb.free.any():
            return climb.result(climb.start)
        with np.errstate(all="ignore"):
            return climb.result(self._climb(climb, np.sqrt(climb.start)) ** 2)

    def _climb(self, climb: _Climb, roots: Matrix) -> Matrix:
        height = climb.objective(roots**2)
        unit = climb.counts.sum(-1).mean(-1)[:, None, None] + climb.alpha
        damping = np.zeros_like(unit)
        anderson = _Anderson(self.memory)
        still = 0  # iterations without a rise; the last digits converge after the last rise
        for _ in range(self.num_steps):
            slopes = climb.slopes(roots)
            if still == 20 or climb.stationarity(roots, slopes) <= self.tolerance:
                break
            plain = climb.proposal(roots, slopes, damping)
            ahead = anderson(roots, plain - roots)
            slack = 1e-13 * np.abs(height)  # of rounding
            reached = climb.objective(plain**2)
            risen = reached >= height - slack
            roots, top = np.where(_wide(risen), plain, roots), np.where(risen, reached, height)
            if ahead is not None:
                far = climb.normalised(ahead, plain)
                reached = climb.objective(far**2)
                further = reached >= top - slack
                roots, top = np.where(_wide(further), far, roots), np.where(further, reached, top)
            still = 0 if (top > height + slack).any() else still + 1
            height = np.maximum(top, height - slack)
            less = np.where(damping > 1e-3 * unit, damping / 4, 0.0)
            damping = np.where(_wide(risen), less, np.maximum(4 * damping, unit / 2))
        return roots


@explained()
class ProjectedGradient:
    """M-step by the gradient, projected on the simplex: algorithm 1 of the paper.

    The gradient is the correct one, twice that of equation 15. The step size is that of Barzilai
    and Borwein, halved until the objective rises. It is slow near zeros, where the gradient is
    infinite; entries are clamped at :math:`10^{-12}` in it.

    Args:
        num_steps: Largest number of steps in one M-step.
        tolerance: End when ten steps in a row raise the objective by less than this share of it.
    """

    def __init__(self, num_steps: int = 200, tolerance: float = 1e-10) -> None:
        check_size("num_steps", num_steps)
        self.num_steps, self.tolerance = num_steps, tolerance

    def __call__(
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None = None
    ) -> Tensor:
        """Raise the objective: see :class:`TransitionStep`."""
        climb = _Climb(rows, counts, prior, allowed)
        if not climb.free.any():
            return climb.result(climb.start)
        with np.errstate(all="ignore"):
            return climb.result(self._climb(climb))

    def _climb(self, climb: _Climb) -> Matrix:
        here, going, slow = climb.start, climb.free.copy(), np.zeros(len(climb.start))
        height, slope = climb.objective(here), climb.gradient(here)
        size = 1 / np.maximum(np.abs(slope).max((-2, -1)), 1e-300)
        for _ in range(self.num_steps):
            ahead = climb.projected(here + _wide(size) * slope) - here
            share, taken = np.ones_like(size), np.zeros_like(going)
            there, reached = here, height
            for _ in range(60):
                trial = np.maximum(here + _wide(share) * ahead, 0.0)
                score = climb.objective(trial)
                better = going & ~taken & (score > height)
                there = np.where(_wide(better), trial, there)
                reached = np.where(better, score, reached)
                taken |= better
                if (taken | ~going).all():
                    break
                share = np.where(taken, share, share / 2)
            slow = np.where(reached - height > self.tolerance * np.abs(reached), 0, slow + 1)
            going &= taken & (slow < 10)  # a short step may come before a long one
            change, steeper = there - here, climb.gradient(there) - slope
            bend = -(change * steeper).sum((-2, -1))
            size = np.where(bend > 0, (change**2).sum((-2, -1)) / bend, 2 * size).clip(1e-20, 1e20)
            here, height, slope = there, reached, slope + steeper
            if not going.any():
                break
        return here


@explained()
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
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None = None
    ) -> Tensor:
        """Raise the objective: see :class:`TransitionStep`."""
        counts = _significant(counts.detach().double())
        old = rows.detach().double()
        kept = torch.zeros_like(old, dtype=torch.bool) if allowed is None else ~allowed
        start = old.clamp(min=0.01 / old.size(-1)).masked_fill(kept, 0.0)
        leaf = log(start).masked_fill(kept, 0.0).requires_grad_()

        def matrix() -> Tensor:
            return leaf.masked_fill(kept, -torch.inf).softmax(-1)

        def loss() -> Tensor:
            return -objective(matrix(), counts, prior)

        self.step(loss, [leaf])
        new = matrix().detach()
        risen = objective(new, counts, prior) > objective(old, counts, prior)
        return torch.where(risen[:, None, None], new, old)


@explained()
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


class _Climb:
    """The objective of one M-step and its derivatives, in float64 arrays."""

    def __init__(
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None
    ) -> None:
        self.like = rows
        self.start: Matrix = rows.detach().double().cpu().numpy()
        self.counts: Matrix = _significant(counts.detach().double()).cpu().numpy()
        self.alpha, self.rho, self.weight = prior.alpha, prior.rho, prior.anchor_weight
        self.anchor: Matrix = (
            np.zeros(()) if prior.anchor is None else prior.anchor.double().cpu().numpy()
        )
        self.forbidden = np.zeros(()) > 0 if allowed is None else ~allowed.cpu().numpy()
        # without a finite objective there is nothing to climb
        self.free = np.isfinite(self.objective(self.start))
        eye = np.broadcast_to(np.eye(self.start.shape[-1]), self.start.shape)
        self.start = np.where(_wide(self.free), self.start, eye)
        self.counts = np.where(_wide(self.free), self.counts, eye)

    def result(self, rows: Matrix) -> Tensor:
        """The matrices as a tensor; where the objective is not finite, those of the start."""
        new = torch.from_numpy(rows / rows.sum(-1, keepdims=True)).to(self.like.device)
        free = torch.from_numpy(self.free).to(new.device)
        return torch.where(free[:, None, None], new, self.like.double())

    def objective(self, rows: Matrix) -> np.ndarray:
        """The objective ``(R,)``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.where(self.counts > 0, self.counts * np.log(rows), 0.0).sum((-2, -1))
            if self.alpha > 0:
                powers = self.powers(rows)
                powers = powers / np.sqrt((powers**2).sum(-1, keepdims=True))
                total = total + 2 * self.alpha * np.linalg.slogdet(powers)[1]
        if self.weight > 0:
            total = total - self.weight * ((rows - self.anchor) ** 2).sum((-2, -1))
        return np.where(np.isnan(total), -np.inf, total)

    def powers(self, rows: Matrix) -> Matrix:
        """Powers of the entries, each row divided by its largest: no row underflows."""
        return (rows / rows.max(-1, keepdims=True)) ** self.rho

    def gradient(self, rows: Matrix) -> Matrix:
        """Gradient by the rows, with entries clamped near zero."""
        floor = np.maximum(rows, 1e-12)
        slope = np.where(self.counts > 0, self.counts / floor, 0.0)
        if self.alpha > 0:
            powers = self.powers(floor)
            shares = powers**2 / (powers**2).sum(-1, keepdims=True)
            turned = powers * np.linalg.inv(powers).swapaxes(-1, -2)
            slope = slope + 2 * self.rho * self.alpha * (turned - shares) / floor
        if self.weight > 0:
            slope = slope - 2 * self.weight * (rows - self.anchor)
        return np.where(self.forbidden, 0.0, slope)

    def projected(self, rows: Matrix) -> Matrix:
        """The closest transition matrices."""
        away = np.where(self.forbidden, -np.inf, rows)
        lowest = rows.min(-1, keepdims=True) - 2  # as far away as makes no difference
        return simplex_projection(torch.from_numpy(np.maximum(away, lowest))).numpy()

    def slopes(self, roots: Matrix) -> Matrix:
        """Half the gradient of the prior by the roots S."""
        slopes = np.zeros_like(roots)
        if self.alpha > 0:
            slopes += self.alpha * np.linalg.inv(roots).swapaxes(-1, -2)
        if self.weight > 0:
            slopes -= 2 * self.weight * (roots**2 - self.anchor) * roots
        return np.where(self.forbidden, 0.0, slopes)

    def stationarity(self, roots: Matrix, slopes: Matrix) -> float:
        """The largest relative slope along the sphere of each row."""
        pull = np.where(self.counts > 0, self.counts / roots, 0.0) + slopes
        total = (pull * roots).sum(-1, keepdims=True)
        total = np.where(total > 0, total, np.inf)
        away = pull / total - roots
        away = np.where((roots == 0) & (pull <= 0), 0.0, away)
        scale = 1 + np.abs(slopes / total).max((-2, -1), keepdims=True)
        return float(np.nan_to_num(np.abs(away) / scale, nan=np.inf).max())

    def proposal(self, roots: Matrix, slopes: Matrix, damping: Matrix) -> Matrix:
        """The best roots for fixed slopes, less damping times their squared distance.

        The penalty of the anchor, of fourth power in the roots, enters by its slope and an
        approximate curvature.
        """
        bend = damping + self.weight * (4 * roots**2 + 2 * self.anchor) + np.zeros_like(roots)
        pull = np.where(self.forbidden, 0.0, slopes + bend * roots)
        counts = self.counts
        weight = counts.sum(-1, keepdims=True) + self.alpha
        low = -bend.min(-1, keepdims=True)
        high = np.maximum(weight, 1.0) + 2 * np.abs(pull).sum(-1, keepdims=True)
        new = roots
        for _ in range(60):  # Newton's method for the length of rows, kept between bounds
            heavy = weight + bend
            root = np.sqrt(pull**2 + 4 * heavy * counts)
            new = np.where(pull > 0, (pull + root) / (2 * heavy), 2 * counts / (root - pull))
            new = np.where((counts > 0) | (pull > 0), new, 0.0)
            square = (new**2).sum(-1, keepdims=True)
            length = np.sqrt(square)
            if np.abs(length - 1).max() < 1e-13:
                break
            low, high = np.where(length > 1, weight, low), np.where(length > 1, high, weight)
            slope = np.where(root > 0, new**3 / root, 0.0).sum(-1, keepdims=True)
            weight = weight + (length - 1) * square / slope
            inside = (weight >= low) & (weight <= high)
            weight = np.where(inside, weight, (low + high) / 2)
        return new / length

    def normalised(self, roots: Matrix, plain: Matrix) -> Matrix:
        """``roots`` with rows of length one; those of ``plain`` where a counted entry is zero."""
        new = np.maximum(roots, 0.0)
        new = np.where((new == 0) & (self.counts > 0), plain, new)
        return new / np.sqrt((new**2).sum(-1, keepdims=True))


def _wide(vector: np.ndarray) -> np.ndarray:
    """``(R,)`` as ``(R, 1, 1)``."""
    return vector[:, None, None]


class _Anderson:
    """Anderson acceleration: the fixed point of a linear map through the last iterations."""

    def __init__(self, memory: int) -> None:
        self.memory, self.count = memory, -1
        self.last: tuple[Matrix, Matrix]

    def __call__(self, place: Matrix, step: Matrix) -> Matrix | None:
        """An extrapolation beyond ``place + step``; None at the first call."""
        flat = place.reshape(len(place), -1), step.reshape(len(step), -1)
        if self.count < 0:
            self.steps, self.turns = np.zeros((2, len(place), self.memory, flat[0].shape[-1]))
        else:
            oldest = self.count % self.memory
            self.steps[:, oldest] = flat[0] - self.last[0]
            self.turns[:, oldest] = flat[1] - self.last[1]
        self.last, self.count = flat, self.count + 1
        if self.count == 0:
            return None
        steps, turns = self.steps[:, : self.count], self.turns[:, : self.count]
        gram = turns @ turns.swapaxes(-1, -2)
        size = np.trace(gram, axis1=-2, axis2=-1)[:, None, None]
        gram = gram + (1e-10 * size + 1e-300) * np.eye(gram.shape[-1])
        shares = np.linalg.solve(gram, turns @ flat[1][..., None])[..., 0]
        back = (shares[:, None] @ steps + shares[:, None] @ turns).reshape(place.shape)
        return place + step - back
