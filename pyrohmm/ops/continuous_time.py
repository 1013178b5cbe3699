"""Markov chains in continuous time: transitions over gaps of any length.

A matrix of rates ``(K, K)`` has at row i, column j the rate of transitions from i to j; a diagonal
entry is minus the sum of the others in its row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .log_space import log

DEGREE = 20  # of the series; its remainder is below rounding where the argument is at most one
PART = 4  # terms between powers
CACHED = 1 << 17  # numbers of matrices that are computed at once, and stay in the cache
HALVED = 1100  # times at most: beyond it no number of float64 is left


def log_transitions(rates: Tensor, gaps: Tensor) -> Tensor:
    r"""Log-probabilities of the state after each gap, :math:`\log e^{Q \Delta}`.

    By uniformisation: :math:`e^{-\lambda \Delta} e^{(Q + \lambda I) \Delta}`, with :math:`\lambda`
    the largest rate of leaving a state, has a series without negative terms, so that
    probabilities however small keep their digits. The gap is halved until :math:`\lambda \Delta`
    plus the K - 1 transitions to the farthest state are at most one for each part, and the result
    squared as often. It is computed in float64; rows sum to one, and what no chain of transitions
    reaches has probability zero.

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
    many = max(1, CACHED // rates.size(-1) ** 2)
    if gaps.dim() != 1 or len(gaps) <= many or (rates.dim() > 2 and rates.size(-3) > 1):
        return _log_transitions(wide, gaps).to(rates.dtype)
    return torch.cat([_log_transitions(wide, part) for part in gaps.split(many)], -3).to(
        rates.dtype
    )


def _log_transitions(wide: Tensor, gaps: Tensor) -> Tensor:
    """Log transition matrices of all gaps at once, in float64."""
    size = wide.size(-1)
    fastest = -wide.detach().diagonal(dim1=-2, dim2=-1).amin(-1)
    # paths of more terms than the series has are then made of parts which have few of them each
    halvings = (fastest * gaps + size - 1).log2().ceil().clamp(0, HALVED).nan_to_num(0.0)
    step = gaps * 0.5**halvings
    scale = fastest[..., None, None] * torch.eye(size).to(wide)
    probs = _exponential((wide + scale) * step[..., None, None])
    probs = _normalised(probs)
    for done in range(int(halvings.max()) if halvings.numel() else 0):
        again = (done < halvings)[..., None, None]
        probs = torch.where(again, _normalised(probs @ probs), probs)
    return log(probs)


def _exponential(matrix: Tensor) -> Tensor:
    """The series of the exponential, in powers of the fourth power (Paterson and Stockmeyer)."""
    powers = [torch.eye(matrix.size(-1)).to(matrix), matrix]
    while len(powers) <= PART:
        powers.append(powers[-1] @ matrix)
    total = powers[0] / math.factorial(DEGREE)
    for first in range(DEGREE - PART, -1, -PART):
        part = sum(powers[j] / math.factorial(first + j) for j in range(PART))
        total = part + powers[PART] @ total
    return total


def _normalised(probs: Tensor) -> Tensor:
    """Rows that sum to one: a constant factor, and what rounding has left of it."""
    return probs / probs.detach().sum(-1, keepdim=True)
