"""Markov chains without observations: samples of paths, and the stationary distribution."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from .._checks import check_size
from .._imports import imported
from .._transforms import transforming
from .backends import NUMBA, pick


def refuse_nan(*parts: Tensor) -> None:
    """Raise if log-probabilities hold NaN."""
    if transforming():
        return
    peaks = [part.detach().amax().isnan() for part in parts if part.numel()]  # NaN if any is
    if peaks and bool(torch.stack(peaks).any()):
        raise ValueError(
            "log-probabilities hold NaN, so that there is no path and no sample. Look for NaN in "
            "the parameters or values."
        )


class CategoricalTable:
    """Categorical distributions sampled by inverting their cumulative sums, all in one search.

    Args:
        logits: ``(*b, M, V)``, log-probabilities: M rows, and a batch of such tables.
    """

    def __init__(self, logits: Tensor) -> None:
        refuse_nan(logits)
        sums = logits.double().exp().cumsum(-1)
        sums = sums / sums[..., -1:]
        self.batch, self.width = logits.shape[:-2], logits.size(-1)
        self.num_rows = logits.size(-2)
        count = torch.arange(sums[..., 0].numel(), device=logits.device)
        self.sums = (sums.reshape(-1, self.width) + count.unsqueeze(-1)).flatten()

    def sample(self, rows: Tensor) -> Tensor:
        """Sample a column for each of ``rows`` ``(*S, *b)``, integers below M."""
        rows = rows.to(self.sums.device)
        if self.batch:
            tables = torch.arange(self.batch.numel(), device=rows.device).reshape(self.batch)
            rows = rows + tables * self.num_rows
        uniform = torch.rand(rows.shape, dtype=torch.float64, device=rows.device) * (1 - 1e-9)
        place = torch.searchsorted(self.sums, (rows + uniform).contiguous(), right=True)
        return (place - rows * self.width).clamp_(max=self.width - 1)


def sample_path(
    first: Tensor, num_steps: int, sample_next: Callable[[int, Tensor], Tensor]
) -> Tensor:
    r"""Sample :math:`z_{1:T}` from a Markov chain, ``(*S, T)`` integers.

    Args:
        first: ``(*S)``, samples of :math:`z_1`.
        num_steps: T.
        sample_next: Given t and samples ``(*S)`` of :math:`z_t`, samples :math:`z_{t+1}`; the
            first step has t = 0.
    """
    states = [first]
    for t in range(num_steps - 1):
        states.append(sample_next(t, states[-1]))
    return torch.stack(states, -1)


def sample_chain(
    log_initial: Tensor, log_transition: Tensor, shape: torch.Size, num_steps: int
) -> Tensor:
    r"""Samples ``(*shape, T)`` of the paths of chains of the first or second order.

    Args:
        log_initial: ``(*b, K)``.
        log_transition: ``(*b, 1|T-1, K, K)``; or ``(*b, 1, (K + 1) K, K)``: rows of each first
            state, then of each pair of states, the later one fastest.
        shape: Ends in dimensions to which b broadcasts.
        num_steps: T.
    """
    refuse_nan(log_transition)
    start = CategoricalTable(log_initial.unsqueeze(-2)).sample(torch.zeros(shape, dtype=torch.long))
    rows, size = log_transition.shape[-2:]
    if pick(log_initial.device) is NUMBA:
        lead, core = log_transition.shape[:-3], log_transition.shape[-3:]
        sums = log_transition.detach().double().exp().cumsum(-1).reshape(lead.numel(), *core)
        groups = torch.arange(len(sums)).reshape(lead).expand(shape).reshape(-1)
        states = torch.zeros(shape.numel(), num_steps, dtype=torch.long)
        states[:, 0] = start.flatten()
        uniform = torch.rand(states.shape, dtype=torch.float64)
        kernels, work = imported("._numba_math", __package__), 8 * num_steps * size.bit_length()
        kernels.run(kernels.follow, len(states), work, sums, groups, uniform, states)
        return states.reshape(*shape, num_steps)
    tables = [CategoricalTable(matrix) for matrix in log_transition.unbind(-3)]

    def after(t: int, row: Tensor) -> Tensor:
        found = tables[min(t, len(tables) - 1)].sample(row)
        return found if rows == size else (row % size + 1) * size + found

    return sample_path(start, num_steps, after) % size


# In the long run ---------------------------------------------------------------------------------


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
