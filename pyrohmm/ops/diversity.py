r"""Diversity of distributions: kernels between rows of probabilities, and their determinant.

Rows :math:`A_i` have the features :math:`A_i^\rho`, entry by entry. The determinant of their
kernel, normalised to ones on the diagonal, is one where no two rows share an outcome and zero where
one row's features are a combination of the others'. As a prior of the rows of a transition matrix
it is that of the diversified HMM: a determinantal point process (DPP) over distributions, of which
only the distribution of exactly K points matters here.

For as many rows as columns the mode of that prior is *a permutation matrix*: what it favours is
that each state has one successor, and each another.

References:
    Diversified Hidden Markov Models for Sequential Labeling (Qiao, Bian, Xu and Tao, 2015),
    https://arxiv.org/abs/1904.03170
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .._checks import check_floats
from .._sync import exceeds
from .log_space import log

FAR = 0.5  # length of a step along which the slope grows


def log_diversity(probs: Tensor, rho: float = 0.5) -> Tensor:
    r"""Log-determinant of the product kernel of rows, normalised to ones on the diagonal.

    .. math:: \sum_v (p_{iv} p_{jv})^\rho

    It is computed in float64 from the features themselves, not from the kernel, whose condition
    is the square of theirs: rows that differ by a part in :math:`10^{12}` have a diversity with a
    few digits still. For :math:`\rho = 1/2` and a square matrix its gradient is
    :math:`(S^{-1})_{ji} / \sqrt{A_{ij}} - 1`, where :math:`S = \sqrt{A}`; equation 15 of the paper
    has half of that.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.
        rho: Exponent of the kernel.

    Returns:
        ``(*B)``, at most 0 up to rounding; 0 if and only if no two rows share an outcome, -inf if
        the determinant is zero, as it is for equal rows and for more rows than columns. Where it is
        -inf the gradient is zero, and so it is at probabilities of exactly zero.

    Raises:
        TypeError: If ``probs`` is not a floating-point tensor.
        ValueError: If it has a negative entry, or ``rho`` is not positive.

    Example:
        >>> dpp.log_diversity(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).exp()  # 1 - 0.7071 ** 2
        tensor(0.5000)
        >>> dpp.log_diversity(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
        tensor(-inf)
    """
    check_floats("probs", probs)
    if bool((probs.detach() < 0).any()):
        raise ValueError("probs must not be negative: give probabilities, not their logarithms.")
    _check_rho(rho)
    return _log_diversity(probs, rho)


class RootAscent:
    r"""Projected Newton ascent in the square roots U of probabilities, of R matrices at once.

    Rows of U have length one. The objective is
    :math:`2 \sum_{ij} c_{ij} \log U_{ij} + 2 \alpha \log|\det U| - w |U \circ U - A_0|^2`; its
    Hessian along the spheres of the rows is never built: conjugate gradients need its products.

    Args:
        counts: c, ``(R, K, K)`` float64, of transitions.
        allowed: ``(K, K)`` booleans, where roots may be positive; all by default.
        alpha: Weight of the diversity.
        anchor: :math:`A_0`, ``(K, K)``; none by default.
        weight: w, of the distance from the anchor.
    """

    def __init__(
        self,
        counts: Tensor,
        allowed: Tensor | None,
        alpha: float,
        anchor: Tensor | None,
        weight: float,
    ) -> None:
        self.allowed = torch.ones_like(counts[0], dtype=torch.bool) if allowed is None else allowed
        self.counts, self.alpha = counts.masked_fill(~self.allowed, 0.0), alpha
        self.anchor, self.weight = (
            (counts.new_zeros(()), 0.0) if anchor is None else (anchor, weight)
        )

    def of(self, chosen: Tensor) -> RootAscent:
        """Restrict the batched ascent to the matrices ``chosen``."""
        part = copy.copy(self)
        part.counts = self.counts[chosen]
        return part

    def start(self, rows: Tensor) -> Tensor:
        """Square roots of ``rows``, moved off stationary points at the boundary."""
        roots = rows.sqrt()
        if self.alpha > 0:  # a determinant of zero
            generator = torch.Generator().manual_seed(0)
            noise = torch.rand(rows.shape[1:], generator=generator, dtype=rows.dtype).to(rows)
            near = (rows + 0.1 * noise.masked_fill(~self.allowed, 0.0)).sqrt()
            flat = _usable_volume(roots).isneginf() & self.counts.any(-1).any(-1)
            roots = torch.where(flat[:, None, None], near, roots)
        least = 1e-6 * (self.counts / self.counts.sum(-1, keepdim=True)).nan_to_num(0.0).sqrt()
        if self.weight > 0:  # a root of zero
            least = least.clamp(min=1e-3).masked_fill(~self.allowed, 0.0)
        return normalize(roots.maximum(least), dim=-1)

    def height(self, roots: Tensor) -> Tensor:
        """The objective, ``(R,)``."""
        gap = roots.square() - self.anchor
        height = 2 * torch.xlogy(self.counts, roots).sum((-2, -1))
        height = height - self.weight * gap.square().sum((-2, -1))
        return height + 2 * self.alpha * _usable_volume(roots) if self.alpha > 0 else height

    def step(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Roots after one step, and the mask of ended ascents, ``(R,)``."""
        roots, slope, direction = self._newton(roots)
        height, rise = self.height(roots), _dot(slope, direction)
        rounding = 1e-12 * (1 + height.abs())
        ended = ~(rise > rounding)  # half of the digits are right: this step finds the others
        least = torch.where(self.counts > 0, 0.1 * roots, 0.0)  # no logarithm of zero
        length, new, waiting = torch.ones_like(height), roots.clone(), torch.ones_like(ended)
        for _ in range(40):
            ahead = roots + length[:, None, None] * direction
            ahead = normalize(ahead.maximum(least), dim=-1)
            bound = height + torch.where(ended, -rounding, 1e-4 * length * rise)
            risen = waiting & (self.height(ahead) >= bound)
            new[risen], waiting = ahead[risen], waiting & ~risen
            if not bool(waiting.any()):
                break
            length = torch.where(waiting, 0.4 * length, length)
        return new, ended | waiting

    def _newton(self, roots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Newton step for square roots of rows: roots without new zeros, gradient, direction."""
        counted = self.counts > 0
        inverse = torch.linalg.inv_ex(roots).inverse if self.alpha > 0 else torch.zeros_like(roots)
        ratio = torch.where(counted, self.counts / roots, 0.0)
        gap = roots.square() - self.anchor
        slope = 2 * ratio + 2 * self.alpha * inverse.mT - 4 * self.weight * gap * roots
        radial = (slope * roots).sum(-1, keepdim=True)
        slope = slope - radial * roots
        zero = ~self.allowed | (~counted & (roots < 1e-9) & (slope <= 0))
        roots = normalize(roots.masked_fill(zero, 0.0), dim=-1)
        bend = 2 * torch.where(counted, ratio / roots, 0.0) + radial
        bend = bend + 4 * self.weight * (2 * roots.square() + gap)
        scale = 1 / bend.clamp(min=1e-3 * (radial.abs() + 1e-12))
        scale = scale.masked_fill(zero, 0.0)
        across = (roots * scale * roots).sum(-1, keepdim=True)

        def along(rows: Tensor) -> Tensor:
            rows = rows.masked_fill(zero, 0.0)
            return rows - (rows * roots).sum(-1, keepdim=True) * roots

        def curved(rows: Tensor) -> Tensor:  # by minus the Hessian
            return along(bend * rows + 2 * self.alpha * (inverse @ rows @ inverse).mT)

        def scaled(rows: Tensor) -> Tensor:
            rows = rows * scale
            return rows - (rows * roots).sum(-1, keepdim=True) / across * (roots * scale)

        slope = along(slope)
        return roots, slope, _conjugate_gradients(curved, scaled, slope)


def _conjugate_gradients(
    curved: Callable[[Tensor], Tensor], scaled: Callable[[Tensor], Tensor], slope: Tensor
) -> Tensor:
    """Truncated conjugate gradients for ``curved(x) = slope``, ``(R, K, K)``.

    Args:
        curved: Product with minus the Hessian, which need not be positive definite.
        scaled: Product with a matrix near its inverse, which must be.
        slope: ``(R, K, K)``.
    """
    solution, rest = torch.zeros_like(slope), slope
    ahead = scaled(rest)
    size = first = _dot(rest, ahead)
    going = size > 0
    for _ in range(slope[0].numel()):
        product = curved(ahead)
        bend = _dot(ahead, product)
        length = torch.where(bend > 0, size / bend, FAR / _dot(ahead, ahead).sqrt())
        length = torch.where(going, length, 0.0)[:, None, None]
        solution, rest = solution + length * ahead, rest - length * product
        next_ahead = scaled(rest)
        next_size = _dot(rest, next_ahead)
        going = going & (bend > 0) & (next_size > 1e-2 * first * first.clamp(max=1.0))
        if not bool(going.any()):
            break
        ahead = next_ahead + torch.where(going, next_size / size, 0.0)[:, None, None] * ahead
        size = next_size
    return solution


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of matrices, ``(R,)``."""
    return (a * b).sum((-2, -1))


def _usable_volume(roots: Tensor) -> Tensor:
    """Log-determinants ``(R,)``, -inf where inversion would lose all precision."""
    volume = torch.linalg.slogdet(roots).logabsdet
    return volume.masked_fill(~(volume > -30 - 2 * roots.size(-1)), -torch.inf)


def _check_rho(rho: float) -> None:
    if not 0 < rho < float("inf"):
        raise ValueError(f"rho must be a positive number; got {rho!r}. 0.5 is usual.")


def _features(probs: Tensor, rho: float) -> Tensor:
    """``probs ** rho`` ``(*B, K, V)``, with rows of length one."""
    logs = rho * log(probs)  # the derivative of a power is infinite at zero
    # a large exponent of small probabilities must not underflow
    largest = logs.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logs.dtype).min)
    powers = (logs - largest).exp()
    return powers / powers.norm(dim=-1, keepdim=True)


def _log_diversity(probs: Tensor, rho: float) -> Tensor:
    features = _features(probs.double(), rho)
    count, size = features.shape[-2:]
    if count > size:
        total = probs.sum((-2, -1))  # so that there is a gradient, of zero
        return total.masked_fill(torch.ones_like(total, dtype=torch.bool), -torch.inf)
    log_volume = _log_volume(features)
    if log_volume.numel() and not exceeds(log_volume.detach().amin(), -torch.inf):
        flat = ~log_volume.isfinite() & ~probs.isnan().flatten(-2).any(-1)
        eye = torch.eye(count, size, device=features.device, dtype=features.dtype)
        features = torch.where(flat[..., None, None], eye, features)
        log_volume = _log_volume(features).masked_fill(flat, -torch.inf)
    return 2 * log_volume.to(probs.dtype)


def _log_volume(features: Tensor) -> Tensor:
    """Logarithm of the volume that rows ``(*B, K, V)`` span."""
    if features.size(-2) < features.size(-1):
        features = torch.linalg.qr(features.mT).R
    return torch.linalg.slogdet(features).logabsdet
