"""Stationary distribution of a chain, and the joint distribution of steps that it implies."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from .._checks import check_size


def joint_probs(state_probs: Tensor, log_transition: Tensor, lag: int = 1) -> Tensor:
    r"""Joint distribution of two states ``lag`` steps apart, :math:`\mathrm{diag}(\pi) A^d`.

    Args:
        state_probs: ``(*B, K)``, marginal of the first, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        lag: d, at least 1.

    Returns:
        ``(*B, K, K)``, sums to one.

    Raises:
        TypeError: If ``lag`` is not an int.
        ValueError: If ``lag`` is less than one.
    """
    check_size("lag", lag)
    matrix = log_transition.exp()
    power = matrix if lag == 1 else torch.linalg.matrix_power(matrix, lag)
    return state_probs.unsqueeze(-1) * power


def predicted(state_probs: Tensor, log_transition: Tensor, probs: Tensor, lag: int = 1) -> Tensor:
    r"""Joint distribution of two symbols, :math:`\Omega = B^\top \mathrm{diag}(\pi) A^d B`.

    Args:
        state_probs: ``(*B, K)``, marginal of the first state, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        probs: ``(*B, K, V)``, probabilities of symbols.
        lag: d, by how many steps the second symbol follows the first.

    Returns:
        ``(*B, V, V)``, sums to one.

    Example:
        >>> matrix = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> predicted(stationary(matrix.log()), matrix.log(), torch.eye(2))
        tensor([[0.6750, 0.0750],
                [0.0750, 0.1750]])
    """
    return probs.mT @ joint_probs(state_probs, log_transition, lag) @ probs


def stationary(log_transition: Tensor, check: bool = True) -> Tensor:
    r"""Stationary distribution of a chain, by one linear solve, differentiable.

    With P the chain seen only when its state changes, and d the probabilities of leaving each
    state, it solves :math:`x^\top (I - P + 1 1^\top) = 1^\top` and :math:`\pi \propto x / d`, so
    that states that are hardly ever left do no harm. There is one solution whenever the chain has
    one recurrent class.

    Args:
        log_transition: ``(*B, K, K)``, log-probabilities; row = from, column = to.
        check: Whether to raise where there are many solutions; if not, they are NaN there.

    Returns:
        ``(*B, K)`` probabilities; NaN where ``log_transition`` holds NaN.

    Raises:
        ValueError: If the chain has more than one recurrent class.

    Example:
        >>> stationary(torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log())
        tensor([0.7500, 0.2500])
    """
    matrix = log_transition.double().exp()
    size = matrix.size(-1)
    possible = (matrix.detach() > 0).cpu().reshape(-1, size, size)
    several = torch.zeros(len(possible), dtype=torch.bool)
    if not bool(possible.all()):
        several = torch.tensor([_num_recurrent(chain) > 1 for chain in possible.numpy()])
    away = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    leaving = away.sum(-1)  # not one less the diagonal, which may be mostly rounding
    rate = leaving.masked_fill(leaving == 0, 1.0)  # a state that is never left
    system = torch.diag_embed(leaving / rate) - away / rate.unsqueeze(-1) + 1.0
    visits, info = torch.linalg.solve_ex(system.mT, torch.ones_like(rate))
    weights = visits * (rate.detach().amin(-1, keepdim=True) / rate)
    probs = weights / weights.sum(-1, keepdim=True)
    residual = ((probs.unsqueeze(-2) @ matrix).squeeze(-2) - probs).detach().abs().amax(-1)
    failed = several.to(info.device).reshape(info.shape) | (info != 0) | ~(residual < 1e-3)
    if bool(failed.any()):
        if check and bool((failed & ~matrix.isnan().flatten(-2).any(-1)).any()):
            raise ValueError(
                "log_transition must have one recurrent class for its stationary distribution to "
                "be unique; this chain has several, or nearly so. Allow transitions between them."
            )
        probs = probs.masked_fill(failed.unsqueeze(-1), torch.nan)
    return probs.clamp(min=0.0).to(log_transition.dtype)


def stationary_detached(log_transition: Tensor) -> Tensor:
    """Stationary distribution, through which no gradient passes.

    Published code for fits to co-occurrences leaves this gradient out, so that its steps may even
    raise the loss. Use this to reproduce such results only.

    Args:
        log_transition: ``(*B, K, K)``.

    Returns:
        ``(*B, K)`` probabilities.
    """
    return stationary(log_transition.detach())


def _num_recurrent(possible: np.ndarray) -> int:
    """Number of recurrent classes: sets of states that lead to each other and nowhere else."""
    count, member = connected_components(csr_array(possible), directed=True, connection="strong")
    origin, target = possible.nonzero()
    left = member[origin] != member[target]
    return count - len(np.unique(member[origin[left]]))
