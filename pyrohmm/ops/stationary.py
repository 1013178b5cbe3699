"""Stationary distribution of a chain, and the joint distribution of steps that it implies."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

# What a model predicts ---------------------------------------------------------------------------


def joint_probs(law: Tensor, log_transition: Tensor, lag: int = 1) -> Tensor:
    r"""The law of two states ``lag`` steps apart, :math:`\mathrm{diag}(\pi) A^d`.

    Args:
        law: ``(*B, K)``, probabilities of the first of them, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        lag: d.

    Returns:
        ``(*B, K, K)``, sums to one.
    """
    moves = log_transition.exp()
    return law.unsqueeze(-1) * (moves if lag == 1 else torch.linalg.matrix_power(moves, lag))


def predicted(law: Tensor, log_transition: Tensor, probs: Tensor, lag: int = 1) -> Tensor:
    r"""The law of two symbols ``lag`` steps apart, :math:`B^\top \mathrm{diag}(\pi) A^d B`.

    Args:
        law: ``(*B, K)``, probabilities of the first state, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        probs: ``(*B, K, V)``, probabilities of symbols.
        lag: d.

    Returns:
        ``(*B, V, V)``, sums to one.

    Example:
        >>> matrix = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> predicted(stationary(matrix.log()), matrix.log(), torch.eye(2))
        tensor([[0.6750, 0.0750],
                [0.0750, 0.1750]])
    """
    return probs.mT @ joint_probs(law, log_transition, lag) @ probs


def stationary(log_transition: Tensor, check: bool = True) -> Tensor:
    r"""Stationary distribution of a chain, by one linear solve, differentiable.

    It solves :math:`\pi^\top (I - A + 1 1^\top) = 1^\top`, which has one solution whenever the
    chain has one recurrent class.

    Args:
        log_transition: ``(*B, K, K)``, log-probabilities; row = from, column = to.
        check: Whether to raise where there are many; if not, they are NaN there.

    Returns:
        ``(*B, K)`` probabilities.

    Raises:
        ValueError: If the chain has more than one recurrent class, so that there are many.

    Example:
        >>> stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log())
        tensor([0.7500, 0.2500])
    """
    matrix = log_transition.double().exp()
    size = matrix.size(-1)
    moves = (matrix.detach() > 0).cpu().reshape(-1, size, size)
    several = torch.zeros(len(moves), dtype=torch.bool)
    if not bool(moves.all()):
        several = torch.tensor([_count_ends(each) > 1 for each in moves.numpy()])
    # of I - A, the diagonal is what leaves a state: exact also where A is nearly the identity
    away = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    system = torch.diag_embed(away.sum(-1)) - away + 1.0
    law, info = torch.linalg.solve_ex(system.mT, torch.ones_like(matrix[..., 0]))
    residual = ((law.unsqueeze(-2) @ matrix).squeeze(-2) - law).detach().abs().amax(-1)
    failed = several.to(info.device).reshape(info.shape) | (info != 0) | ~(residual < 1e-3)
    if bool(failed.any()):
        if check:
            raise ValueError(
                "log_transition must have one recurrent class for its stationary distribution to "
                "be unique; this chain has several, or nearly so. Allow moves between them."
            )
        law = law.masked_fill(failed.unsqueeze(-1), torch.nan)
    return law.clamp(min=0.0).to(log_transition.dtype)


def stationary_detached(log_transition: Tensor) -> Tensor:
    """As :func:`stationary`, but a constant: no gradient passes through it.

    Published code for fits to co-occurrences leaves this gradient out, so that its steps are not
    those of the loss, and may even raise it. Use this to reproduce such results, and
    :func:`stationary` otherwise.

    Args:
        log_transition: ``(*B, K, K)``.

    Returns:
        ``(*B, K)`` probabilities.
    """
    return stationary(log_transition.detach())


def _count_ends(moves: np.ndarray) -> int:
    """Number of recurrent classes: sets of states that lead to each other and nowhere else."""
    count, member = connected_components(csr_array(moves), directed=True, connection="strong")
    origin, target = moves.nonzero()
    left = member[origin] != member[target]
    return count - len(np.unique(member[origin[left]]))
