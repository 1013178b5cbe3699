"""The law of adjacent symbols of a stationary chain, beginning with the stationary law itself."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor


def stationary(log_transition: Tensor) -> Tensor:
    r"""Stationary distribution of a chain, by one linear solve, differentiable.

    It solves :math:`\pi^\top (I - A + 1 1^\top) = 1^\top`, which has one solution whenever the
    chain has one recurrent class.

    Args:
        log_transition: ``(*B, K, K)``, log-probabilities; row = from, column = to.

    Returns:
        ``(*B, K)`` probabilities.

    Raises:
        ValueError: If the chain has more than one recurrent class, so that there are many.

    Example:
        >>> stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log())
        tensor([0.7500, 0.2500])
    """
    matrix = log_transition.exp()
    size = matrix.size(-1)
    moves = (matrix.detach() > 0).cpu().reshape(-1, size, size)
    ends = 1 if bool(moves.all()) else max(_count_ends(each) for each in moves.numpy())
    system = torch.eye(size, dtype=matrix.dtype, device=matrix.device) - matrix + 1.0
    law, info = torch.linalg.solve_ex(system.mT, torch.ones_like(matrix[..., 0]))
    residual = ((law.unsqueeze(-2) @ matrix).squeeze(-2) - law).detach().abs().amax()
    if ends > 1 or bool((info != 0).any()) or not bool(residual < 1e-3):
        raise ValueError(
            "log_transition must have one recurrent class for its stationary distribution to be "
            "unique; this chain has several, or nearly so. Allow moves between them."
        )
    return law.clamp(min=0.0)


def _count_ends(moves: np.ndarray) -> int:
    """Number of recurrent classes: sets of states that lead to each other and nowhere else."""
    count, member = connected_components(csr_array(moves), directed=True, connection="strong")
    origin, target = moves.nonzero()
    left = member[origin] != member[target]
    return count - len(np.unique(member[origin[left]]))
