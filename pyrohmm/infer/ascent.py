r"""Ascent of transition matrices under a diversity prior with exponent one half.

It is on the roots :math:`S = \sqrt A`, whose rows have length one and in which the
log-determinant has finite slopes at zero; in float64, on the device of the tensors.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ..distributions.dpp import DiversityPrior

TINY = 1e-150  # in place of a denominator of zero; its square is a number still
PATIENCE = 20  # iterations without a rise; the last digits converge after the last rise
LONGEST = 0.5  # change of a row of roots, of length one, in one step


class Ascent:
    r"""The objective of an M-step by the roots of the probabilities, and how to raise it.

    Args:
        rows: ``(R, K, K)``, the start of each of R restarts. Where the objective is not finite
            there is nothing to climb: these stay as they are.
        counts: ``(R, K, K)``.
        prior: The weights and the anchor; its exponent is one half.
        allowed: ``(K, K)`` booleans, transitions that are possible; all by default.
    """

    def __init__(
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None
    ) -> None:
        self.rows = rows.detach().double()
        self.alpha, self.weight = prior.alpha, prior.anchor_weight
        self.anchor = None if prior.anchor is None else prior.anchor.to(self.rows)
        self.forbidden = torch.zeros(rows.shape[-2:], dtype=torch.bool, device=rows.device)
        if allowed is not None:
            self.forbidden = ~allowed.to(rows.device)
        self.counts = counts.detach().double()
        free = self.objective(self.rows.sqrt()).isfinite()
        self.free = free[:, None, None]
        eye = torch.eye(rows.size(-1), dtype=torch.float64, device=rows.device)
        self.counts = torch.where(self.free, self.counts, eye)
        self.start = torch.where(self.free, self.rows, eye).sqrt()
        self.totals = self.counts.sum(-1, keepdim=True) + self.alpha
        self._still = 0  # iterations without a rise

    def objective(self, roots: Tensor) -> Tensor:
        """The objective ``(*, R)`` of roots ``(*, R, K, K)``; -inf where it is not defined."""
        total = 2 * torch.xlogy(self.counts, roots).sum((-2, -1))
        if self.alpha > 0:
            total = total + 2 * self.alpha * torch.linalg.slogdet(roots).logabsdet
        if self.anchor is not None:
            total = total - self.weight * (roots.square() - self.anchor).square().sum((-2, -1))
        return total.masked_fill(total.isnan(), -torch.inf)

    def slopes(self, roots: Tensor) -> Tensor:
        """Half the gradient of the prior by the roots, but for a part along each row."""
        slopes = torch.zeros_like(roots)
        if self.alpha > 0:
            turned = torch.linalg.inv_ex(roots).inverse.mT
            slopes = self.alpha * turned.nan_to_num(0.0, 0.0, 0.0)  # of a singular matrix
        if self.anchor is not None:
            slopes = slopes - 2 * self.weight * (roots.square() - self.anchor) * roots
        return slopes.masked_fill(self.forbidden, 0.0)

    def stationarity(self, roots: Tensor, slopes: Tensor) -> Tensor:
        """The largest slope along the sphere of a row, as a share of those across it; ``(R,)``."""
        pull = self.counts / roots.clamp(min=TINY) + slopes
        total = (pull * roots).sum(-1, keepdim=True)
        size = total.abs() + slopes.abs().amax((-2, -1), keepdim=True)
        # a root falls to zero at most
        along = torch.maximum(pull - total * roots, -roots * size).abs()
        along = torch.maximum(along.masked_fill(self.forbidden, 0.0), self._lifts(roots, slopes))
        return (along / size.clamp(min=TINY)).amax((-2, -1))

    def climb(self, num_steps: int, tolerance: float, memory: int) -> Tensor:
        """Matrices ``(R, K, K)`` with an objective at least as high as that of the start.

        Args:
            num_steps: Largest number of iterations.
            tolerance: End when :meth:`stationarity` is below this.
            memory: Number of iterations that an extrapolation, or the metric of L-BFGS, uses.
        """
        climb = self._iterate if self.anchor is None else self.ascend
        return climb(num_steps, tolerance, memory)

    def _ended(self, roots: Tensor, slopes: Tensor, tolerance: float, rose: Tensor) -> bool:
        """Whether it is stationary, or has not risen for long; waits for the device once."""
        done = self.stationarity(roots, slopes).amax() <= tolerance
        ended, going = torch.stack([done, rose]).tolist()
        self._still = 0 if going else self._still + 1
        return ended or self._still == PATIENCE

    def _matrices(self, roots: Tensor) -> Tensor:
        """The squares of ``roots``; the start where nothing could be climbed."""
        rows = roots.square()
        return torch.where(self.free, rows / rows.sum(-1, keepdim=True), self.rows)

    def _iterate(self, num_steps: int, tolerance: float, memory: int) -> Tensor:
        """Fixed-point iteration, for a prior without an anchor: three to ten times as fast.

        An extrapolation of the last proposals is taken if it is at least as good as the proposal;
        a proposal that lowers the objective is damped.
        """
        roots, height = self.start, self.objective(self.start)
        unit = self.totals.mean((-2, -1), keepdim=True)
        damping, extrapolate = torch.zeros_like(unit), _Anderson(memory)
        rose = torch.ones((), dtype=torch.bool, device=roots.device)
        for _ in range(num_steps):
            slopes = self.slopes(roots)
            if self._ended(roots, slopes, tolerance, rose):
                break
            plain = self._fixed_point(roots, slopes, damping)
            far = extrapolate(plain, plain - roots).clamp(min=0.0)
            far = torch.where((far == 0) & (self.counts > 0), plain, far)
            far = far / far.norm(dim=-1, keepdim=True)
            near, reached = self.objective(torch.stack([plain, far]))
            slack = 1e-13 * height.abs()  # of rounding
            least = height - slack
            risen = near >= least
            top = torch.where(risen, near, height)
            further = reached >= top - slack
            roots = torch.where(_wide(risen), plain, roots)
            roots = torch.where(_wide(further), far, roots)
            top = torch.where(further, reached, top)
            rose = (top > height + slack).any()
            height = torch.maximum(top, least)
            less = torch.where(damping > 1e-3 * unit, damping / 4, 0.0)
            more = torch.maximum(4 * damping, unit / 2)
            damping = torch.where(_wide(risen), less, more)
        return self._matrices(roots)

    def _fixed_point(self, roots: Tensor, slopes: Tensor, damping: Tensor) -> Tensor:
        """The best roots for fixed slopes, less damping times their squared distance."""
        bend = damping.expand_as(roots)
        pull = (slopes + bend * roots).masked_fill(self.forbidden, 0.0)
        weight = self.counts.sum(-1, keepdim=True) + (slopes * roots).sum(-1, keepdim=True)
        heavy = bend + torch.maximum(weight, TINY - bend.amin(-1, keepdim=True))
        size = pull.abs() + TINY
        total = size + torch.addcmul(size.square(), heavy, self.counts, value=4).sqrt()
        new = torch.where(pull > 0, total / (2 * heavy), 2 * self.counts / total)
        length = new.norm(dim=-1, keepdim=True)
        return torch.where(length > 0, new / length, roots)

    def ascend(self, num_steps: int, tolerance: float, memory: int) -> Tensor:
        """L-BFGS on the roots, of which those stay out that are zero and have a slope below it.

        The first metric is the Fisher information of the counts, the pseudo-counts and the anchor.
        Each iteration is one step of every restart; the next of a restart that would fall is
        shorter. Under an anchor, whose slope by a root vanishes at zero, entries leave zero where
        the objective rises with the probability itself. Arguments are those of :meth:`climb`.
        """
        roots, height = self.start, self.objective(self.start)
        metric = self.totals if self.anchor is None else self.totals + 4 * self.weight * self.anchor
        inverse = (0.5 / metric.clamp(min=TINY)).expand_as(roots)
        slopes, gradient = self._gradient(roots)
        lengths, quasi = torch.ones_like(height), _Quasi(memory, inverse)
        rose = torch.ones((), dtype=torch.bool, device=roots.device)
        for _ in range(num_steps):
            if self._ended(roots, slopes, tolerance, rose):
                break
            held = (roots == 0) & (gradient <= 0)
            uphill = gradient.masked_fill(held, 0.0)
            step = quasi(uphill, held)
            longest = step.norm(dim=-1).amax(-1)
            step = step * _wide(lengths * (LONGEST / longest.clamp(min=TINY)).clamp(max=1.0))
            new = roots + step
            new = torch.where(self.counts > 0, torch.maximum(new, 0.1 * roots), new.clamp(min=0.0))
            new = new / new.norm(dim=-1, keepdim=True)
            if self.anchor is not None:
                zeros = (uphill == 0).flatten(1).all(-1)
                new = torch.where(_wide(zeros), self._lifted(roots, slopes), new)
            reached = self.objective(new)
            slack = 1e-13 * height.abs()  # of rounding
            least = 1e-4 * _dot(uphill, new - roots).clamp(min=0.0) - slack
            risen = reached >= height + least
            new = torch.where(_wide(risen), new, roots)
            slopes, ahead = self._gradient(new)
            quasi.learn(new - roots, gradient - ahead)
            rose = (risen & (reached > height + slack)).any()
            height = torch.where(risen, torch.maximum(height, reached), height)
            roots, gradient = new, ahead
            lengths = torch.where(risen, (4 * lengths).clamp(max=1.0), lengths / 4)
        return self._matrices(roots)

    def _gradient(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`slopes`, and the gradient of the objective along the spheres of the rows."""
        slopes = self.slopes(roots)
        pull = slopes + self.counts / roots.clamp(min=TINY)
        gradient = 2 * (pull - (pull * roots).sum(-1, keepdim=True) * roots)
        return slopes, gradient.masked_fill(self.forbidden, 0.0)

    def _lifts(self, roots: Tensor, slopes: Tensor) -> Tensor:
        """Positive where an entry is zero and the objective rises with the probability itself.

        There a root has no slope: the log-determinant has none, and the anchor pulls by the square.
        """
        if self.anchor is None:
            return torch.zeros_like(roots)
        flat = (roots == 0) & (slopes.abs() <= 1e-12 * slopes.abs().amax(-1, keepdim=True))
        pull = slopes + self.counts / roots.clamp(min=TINY)
        lifts = 2 * self.weight * self.anchor - (pull * roots).sum(-1, keepdim=True)
        return torch.where(flat & ~self.forbidden, lifts.clamp(min=0.0), 0.0)

    def _lifted(self, roots: Tensor, slopes: Tensor) -> Tensor:
        """The zero that rises most leaves zero; two at once may lower the determinant."""
        lifts = self._lifts(roots, slopes).flatten(1)
        most, where = lifts.max(-1, keepdim=True)
        step = (most / (4 * self.weight)).clamp(max=1e-4).sqrt()
        new = roots.flatten(1).scatter_add(1, where, step).view_as(roots)
        return new / new.norm(dim=-1, keepdim=True)


def _wide(vector: Tensor) -> Tensor:
    """``(R,)`` as ``(R, 1, 1)``."""
    return vector[:, None, None]


def _dot(left: Tensor, right: Tensor) -> Tensor:
    """Inner products of matrices, ``(R,)``."""
    return (left * right).sum((-2, -1))


class _Quasi:
    """Directions of L-BFGS for a batch: in each restart only of steps along which it is concave.

    Args:
        memory: Number of steps.
        inverse: ``(R, K, K)``, the diagonal of the first inverse metric.
    """

    def __init__(self, memory: int, inverse: Tensor) -> None:
        self.first = self.inverse = inverse
        self.past: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=memory)

    def learn(self, step: Tensor, fall: Tensor) -> None:
        """Remember a step, and by how much the gradient fell along it."""
        bend = _dot(step, fall)
        size = (_dot(step, step) * _dot(fall, fall)).sqrt()
        concave = bend > 1e-8 * size
        self.past.append((step, fall, torch.where(concave, 1 / bend, 0.0)))
        scale = bend / _dot(fall, fall * self.first).clamp(min=TINY)
        self.inverse = torch.where(_wide(concave), self.first * _wide(scale), self.inverse)

    def __call__(self, gradient: Tensor, held: Tensor) -> Tensor:
        """A direction in which the objective rises; zero where ``held``."""
        ahead, shares = gradient, []
        for step, fall, weight in reversed(self.past):
            shares.append(_wide(weight * _dot(step, ahead)))
            ahead = ahead - shares[-1] * fall
        ahead = self.inverse * ahead.masked_fill(held, 0.0)
        for step, fall, weight in self.past:
            ahead = ahead + (shares.pop() - _wide(weight * _dot(fall, ahead))) * step
        ahead = ahead.masked_fill(held, 0.0)
        size = (_dot(ahead, ahead) * _dot(gradient, gradient)).sqrt()
        rises = _dot(ahead, gradient) > 1e-10 * size
        return torch.where(_wide(rises), ahead, self.first * gradient)


class _Anderson:
    """Anderson acceleration: the fixed point of a linear map through the last iterations."""

    def __init__(self, memory: int) -> None:
        self.last: list[Tensor] = []
        self.changes = [deque[Tensor](maxlen=memory) for _ in range(2)]  # of results, of steps

    def __call__(self, result: Tensor, step: Tensor) -> Tensor:
        """An extrapolation beyond ``result``, to which ``step`` led; that itself at the first."""
        flat = [result.flatten(1), step.flatten(1)]
        for past, new, old in zip(self.changes, flat, self.last):
            past.append(new - old)
        self.last = flat
        if not self.changes[0]:
            return result
        results, steps = (torch.stack(list(past), 1) for past in self.changes)
        gram = steps @ steps.mT
        gram.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-10).add_(TINY)
        shares = torch.linalg.solve_ex(gram, steps @ flat[1].unsqueeze(-1)).result
        return result - (shares.mT @ results).view_as(result)
