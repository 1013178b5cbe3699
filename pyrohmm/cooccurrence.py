"""The law of adjacent symbols of a stationary chain: counted, and predicted by a model."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from ._checks import check_integers, check_size
from .sequences import Sequences


def counted(data: Sequences, num_symbols: int) -> Tensor:
    """How often each symbol follows each, as shares of all pairs of adjacent steps, ``(V, V)``.

    Pairs lie within one sequence, and both their steps are observed.

    Args:
        data: Sequences of symbols.
        num_symbols: V.

    Raises:
        TypeError: If the values are not integers.
        ValueError: If a symbol is not below V, or there is no pair.

    Example:
        >>> counted(Sequences.from_list([[0, 1, 1], [1, 0]]), 2)
        tensor([[0.0000, 0.3333],
                [0.3333, 0.3333]])
    """
    check_integers("values of data", data.values)
    check_size("num_symbols", num_symbols)
    pairs = data.observed[:, :-1] & data.observed[:, 1:]
    first, second = data.values[:, :-1][pairs].long(), data.values[:, 1:][pairs].long()
    if len(first) == 0:
        raise ValueError("data has no two adjacent observed steps; there is nothing to count.")
    low, high = int(min(first.min(), second.min())), int(max(first.max(), second.max()))
    if low < 0 or high >= num_symbols:
        raise ValueError(
            f"values of data must be symbols from 0 to V - 1 = {num_symbols - 1}; got values from "
            f"{low} to {high}."
        )
    counts = torch.bincount(first * num_symbols + second, minlength=num_symbols**2)
    shares = counts.to(torch.get_default_dtype()) / len(first)
    return shares.reshape(num_symbols, num_symbols)


def predicted(law: Tensor, log_transition: Tensor, probs: Tensor) -> Tensor:
    r"""The law of two adjacent symbols, :math:`B^\top \mathrm{diag}(\pi) A B`.

    Args:
        law: ``(*B, K)``, probabilities of the first state, such as :func:`stationary` gives.
        log_transition: ``(*B, K, K)``.
        probs: ``(*B, K, V)``, probabilities of symbols.

    Returns:
        ``(*B, V, V)``, sums to one.

    Example:
        >>> matrix = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
        >>> predicted(stationary(matrix.log()), matrix.log(), torch.eye(2))
        tensor([[0.6750, 0.0750],
                [0.0750, 0.1750]])
    """
    pairs = law.unsqueeze(-1) * log_transition.exp()
    return probs.mT @ pairs @ probs


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
    matrix = log_transition.double().exp()
    size = matrix.size(-1)
    moves = (matrix.detach() > 0).cpu().reshape(-1, size, size)
    ends = 1 if bool(moves.all()) else max(_count_ends(each) for each in moves.numpy())
    # of I - A, the diagonal is what leaves a state: exact also where A is nearly the identity
    away = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))
    system = torch.diag_embed(away.sum(-1)) - away + 1.0
    law, info = torch.linalg.solve_ex(system.mT, torch.ones_like(matrix[..., 0]))
    residual = ((law.unsqueeze(-2) @ matrix).squeeze(-2) - law).detach().abs().amax()
    if ends > 1 or bool((info != 0).any()) or not bool(residual < 1e-3):
        raise ValueError(
            "log_transition must have one recurrent class for its stationary distribution to be "
            "unique; this chain has several, or nearly so. Allow moves between them."
        )
    return law.clamp(min=0.0).to(log_transition.dtype)


def _count_ends(moves: np.ndarray) -> int:
    """Number of recurrent classes: sets of states that lead to each other and nowhere else."""
    count, member = connected_components(csr_array(moves), directed=True, connection="strong")
    origin, target = moves.nonzero()
    left = member[origin] != member[target]
    return count - len(np.unique(member[origin[left]]))
