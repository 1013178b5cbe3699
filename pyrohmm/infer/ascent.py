r"""Ascent of transition matrices under a diversity prior: what the M-steps share.

It is on the roots :math:`S = \sqrt A`, whose rows have length one and in which the
log-determinant has finite slopes at zero; in float64, on the device of the tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ..distributions.dpp import DiversityPrior

TINY = 1e-150  # in place of a denominator of zero; its square is a number still
SMALL = 1e-6  # roots below it count as this much where a slope is infinite at zero
PATIENCE = 20  # iterations without a rise; the last digits converge after the last rise

Proposal = Callable[["Ascent", Tensor, Tensor, Tensor], Tensor]


class Ascent:
    r"""The objective of an M-step by the roots of the probabilities, and how to raise it.

    Args:
        rows: ``(R, K, K)``, the start of each of R restarts. Where the objective is not finite
            there is nothing to climb: these stay as they are.
        counts: ``(R, K, K)``.
        prior: The weights, the exponent and the anchor.
        allowed: ``(K, K)`` booleans, transitions that are possible; all by default.
    """

    def __init__(
        self, rows: Tensor, counts: Tensor, prior: DiversityPrior, allowed: Tensor | None
    ) -> None:
        self.rows = rows.detach().double()
        self.alpha, self.rho, self.weight = prior.alpha, prior.rho, prior.anchor_weight
        self.anchor = None if prior.anchor is None else prior.anchor.to(self.rows)
        self.forbidden = None if allowed is None else ~allowed.to(rows.device)
        self.counts = counts.detach().double()
        free = self.objective(self.rows.sqrt()).isfinite()
        self.free = free[:, None, None]
        eye = torch.eye(rows.size(-1), dtype=torch.float64, device=rows.device)
        self.counts = torch.where(self.free, self.counts, eye)
        self.start = torch.where(self.free, self.rows, eye).sqrt()
        self.totals = self.counts.sum(-1, keepdim=True) + self.alpha

    def objective(self, roots: Tensor) -> Tensor:
        """The objective ``(*, R)`` of roots ``(*, R, K, K)``; -inf where it is not defined."""
        total = 2 * torch.xlogy(self.counts, roots).sum((-2, -1))
        if self.alpha > 0:
            total = total + 2 * self.alpha * torch.linalg.slogdet(self._features(roots)).logabsdet
        if self.anchor is not None:
            total = total - self.weight * (roots.square() - self.anchor).square().sum((-2, -1))
        return total.masked_fill(total.isnan(), -torch.inf)

    def _features(self, roots: Tensor) -> Tensor:
        """Rows of length one, whose volume the prior favours."""
        if self.rho == 0.5:
            return roots
        powers = (roots / roots.amax(-1, keepdim=True)) ** (2 * self.rho)  # no row underflows
        return powers / powers.norm(dim=-1, keepdim=True)

    def slopes(self, roots: Tensor) -> Tensor:
        """Half the gradient of the prior by the roots, but for a part along each row."""
        slopes = torch.zeros_like(roots)
        if self.alpha > 0 and self.rho == 0.5:
            slopes = self.alpha * torch.linalg.inv_ex(roots).inverse.mT
        elif self.alpha > 0:
            largest = roots.amax(-1, keepdim=True)
            ratio = roots / largest
            powers = ratio ** (2 * self.rho)
            turned = torch.linalg.inv_ex(powers).inverse.mT
            turned = turned - powers / powers.square().sum(-1, keepdim=True)
            ratio = ratio.clamp(min=SMALL) if self.rho < 0.5 else ratio
            steep = 2 * self.rho / largest * ratio ** (2 * self.rho - 1)
            slopes = self.alpha * (steep * turned + roots)
        if self.anchor is not None:
            slopes = slopes - 2 * self.weight * (roots.square() - self.anchor) * roots
        return slopes if self.forbidden is None else slopes.masked_fill(self.forbidden, 0.0)

    def curvature(self, roots: Tensor, slopes: Tensor) -> Tensor:
        """Minus twice the second derivatives of counts and diversity by each probability, times it.

        Those of the diversity are for an exponent of one half, and about right for others.
        """
        bend = 2 * self.counts / roots.square().clamp(min=TINY**2)
        if self.alpha > 0:
            if self.anchor is not None:
                slopes = slopes + 2 * self.weight * (roots.square() - self.anchor) * roots
            bend = bend + slopes.square() / self.alpha + slopes.abs() / roots.clamp(min=SMALL)
        return bend

    def stationarity(self, roots: Tensor, slopes: Tensor) -> Tensor:
        """The largest slope along the sphere of a row, as a share of those across it; ``(R,)``."""
        pull = self.counts / roots.clamp(min=TINY) + slopes
        total = (pull * roots).sum(-1, keepdim=True)
        along = pull.clamp(min=0.0) - total * roots  # what pulls below zero has no effect there
        size = total.abs() + slopes.abs().amax((-2, -1), keepdim=True)
        return (along.abs() / size.clamp(min=TINY)).amax((-2, -1))

    def climb(self, propose: Proposal, num_steps: int, tolerance: float, memory: int) -> Tensor:
        """Matrices ``(R, K, K)`` with an objective at least as high as that of the start.

        An extrapolation of the last proposals is taken if it is at least as good as the proposal;
        a proposal that lowers the objective is damped.

        Args:
            propose: Called with the ascent, the roots, their slopes and the damping ``(R, 1, 1)``;
                returns roots whose rows have length one.
            num_steps: Largest number of iterations.
            tolerance: End when :meth:`stationarity` is below this.
            memory: Number of iterations that the extrapolation uses.
        """
        roots, height = self.start, self.objective(self.start)
        unit = self.totals.mean((-2, -1), keepdim=True)
        damping, extrapolate = torch.zeros_like(unit), _Anderson(memory)
        still, rose = 0, torch.ones((), dtype=torch.bool, device=roots.device)
        for _ in range(num_steps):
            slopes = self.slopes(roots)
            done = self.stationarity(roots, slopes).amax() <= tolerance
            ended, going = torch.stack([done, rose]).tolist()  # waits for the device once
            still = 0 if going else still + 1
            if ended or still == PATIENCE:
                break
            plain = propose(self, roots, slopes, damping)
            far = self._feasible(extrapolate(plain, plain - roots), plain)
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
        new = roots.square()
        return torch.where(self.free, new / new.sum(-1, keepdim=True), self.rows)

    def _feasible(self, roots: Tensor, plain: Tensor) -> Tensor:
        """``roots`` with rows of length one; those of ``plain`` where a counted entry is zero."""
        new = roots.clamp(min=0.0)
        new = torch.where((new == 0) & (self.counts > 0), plain, new)
        return new / new.norm(dim=-1, keepdim=True)


def _wide(vector: Tensor) -> Tensor:
    """``(R,)`` as ``(R, 1, 1)``."""
    return vector[:, None, None]


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
