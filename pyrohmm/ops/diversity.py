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

import torch
from torch import Tensor

from .._checks import check_floats
from .log_space import log


def product_kernel(probs: Tensor, rho: float = 0.5, normalized: bool = True) -> Tensor:
    r"""Probability product kernel of rows: :math:`\sum_v (p_{iv} p_{jv})^\rho`.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.
        rho: Exponent; with 0.5 it is the Bhattacharyya coefficient.
        normalized: Whether to divide by the roots of both diagonal entries, so that these are one.

    Returns:
        ``(*B, K, K)``. The gradient at a probability of exactly zero is zero, so that a hard zero
        stays one.

    Raises:
        TypeError: If ``probs`` is not a floating-point tensor.
        ValueError: If it has no rows or a negative entry, or ``rho`` is not positive.

    References:
        Equations 2 and 5 of the paper; Probability Product Kernels (Jebara, Kondor and Howard,
        2004).

    Example:
        >>> dpp.product_kernel(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]])
    """
    _check(probs, rho)
    features = _features(probs, rho, normalized)
    return features @ features.mT


def log_diversity(probs: Tensor, rho: float = 0.5) -> Tensor:
    r"""Log-determinant of the normalised product kernel of rows.

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
        ValueError: If it has no rows or a negative entry, or ``rho`` is not positive.

    Example:
        >>> dpp.log_diversity(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).exp()  # 1 - 0.7071 ** 2
        tensor(0.5000)
        >>> dpp.log_diversity(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
        tensor(-inf)
    """
    _check(probs, rho)
    return _log_diversity(probs, rho)


def simplex_projection(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """The distributions closest to rows of numbers, in Euclidean distance.

    Args:
        values: ``(*, V)``.
        weights: ``(*, V)``, positive, of the squared differences; equal by default.

    Returns:
        ``(*, V)``; entries may be exactly zero.

    References:
        Projection onto the probability simplex (Wang and Carreira-Perpiñán, 2013), algorithm 1.

    Example:
        >>> dpp.simplex_projection(torch.tensor([0.2, 0.4, 2.0]))
        tensor([0., 0., 1.])
        >>> dpp.simplex_projection(torch.tensor([0.2, 0.4, 0.7]))
        tensor([0.1000, 0.3000, 0.6000])
        >>> dpp.simplex_projection(torch.tensor([0.2, 0.4, 0.7]), torch.tensor([1.0, 1.0, 9.0]))
        tensor([0.0579, 0.2579, 0.6842])
    """
    check_floats("values", values)
    weights = torch.ones_like(values) if weights is None else weights
    scaled = values * weights
    scaled = scaled - scaled.amax(-1, keepdim=True)  # a shift does not matter
    falling, order = scaled.sort(-1, descending=True)
    shares = 1 / weights.gather(-1, order)
    excess = ((falling * shares).cumsum(-1) - 1) / shares.cumsum(-1)
    last = (falling > excess).sum(-1, keepdim=True) - 1  # the largest number of positive entries
    return ((scaled - excess.gather(-1, last)) / weights).clamp(min=0.0)


def _check(probs: Tensor, rho: float) -> None:
    check_floats("probs", probs)
    if probs.dim() < 2 or 0 in probs.shape[-2:]:
        raise ValueError(
            f"probs must have at least one row and one column, (*B, K, V); got "
            f"{tuple(probs.shape)}."
        )
    if bool((probs.detach() < 0).any()):
        raise ValueError(
            f"probs must not be negative; got {probs.min().item():g}. Give probabilities, not "
            "their logarithms."
        )
    if not bool((probs.detach() > 0).any(-1).all()):
        raise ValueError("probs must have a positive entry in every row; a row is all zero.")
    _check_rho(rho)


def _check_rho(rho: float) -> None:
    if not 0 < rho < float("inf"):
        raise ValueError(f"rho must be a positive number; got {rho!r}.")


def _features(probs: Tensor, rho: float, normalized: bool) -> Tensor:
    """``probs ** rho`` ``(*B, K, V)``, its rows of length one if ``normalized``."""
    logs = rho * log(probs)  # the derivative of a power is infinite at zero
    if not normalized:
        return logs.exp()
    # a large exponent of small probabilities must not underflow
    largest = logs.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logs.dtype).min)
    powers = (logs - largest).exp()
    return powers / powers.norm(dim=-1, keepdim=True)


def _log_diversity(probs: Tensor, rho: float) -> Tensor:
    features = _features(probs.double(), rho, normalized=True)
    count, size = features.shape[-2:]
    if count > size:
        total = probs.sum((-2, -1))  # so that there is a gradient, of zero
        return total.masked_fill(torch.ones_like(total, dtype=torch.bool), -torch.inf)
    log_volume = _log_volume(features)
    flat = ~log_volume.isfinite()
    if bool(flat.any()):
        flat = flat & ~probs.isnan().flatten(-2).any(-1)
        eye = torch.eye(count, size, device=features.device, dtype=features.dtype)
        features = torch.where(flat[..., None, None], eye, features)
        log_volume = _log_volume(features).masked_fill(flat, -torch.inf)
    return 2 * log_volume.to(probs.dtype)


def _log_volume(features: Tensor) -> Tensor:
    """Logarithm of the volume that rows ``(*B, K, V)`` span."""
    if features.size(-2) < features.size(-1):
        features = torch.linalg.qr(features.mT).R
    return torch.linalg.slogdet(features).logabsdet
