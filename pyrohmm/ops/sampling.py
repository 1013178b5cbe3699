"""Sampling: columns of tables, paths of Markov chains, and of posteriors by many parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._imports import imported
from .._transforms import transforming
from .backends import NUMBA, pick
from .log_space import finite_or_zero


def refuse_nan(*parts: Tensor) -> None:
    """Raise if log-probabilities hold NaN, which a state or a symbol could not show."""
    if not transforming() and bool(torch.stack([part.isnan().any() for part in parts]).any()):
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
        """A column for each of ``rows`` ``(*S, *b)``, integers below M; of the same shape."""
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


WIDEST = 64  # states; for more, matrix products of torch are faster


def sample_paths(
    log_initial: Tensor,
    log_transition: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor] | None:
    r"""Samples of :math:`p(z_{1:T} \mid x_{1:T}, \theta_g)` and :math:`\log p(x_{1:T} | \theta_g)`.

    Args:
        log_initial: ``(G, K)``.
        log_transition: ``(G, K, K)``.
        table: ``(G, V, K)``, log-likelihoods of V kinds of step.
        rows: ``(N, T)`` integers, the kind of each step; -1 where it is not observed.
        lengths: ``(N,)``.

    Returns:
        States ``(G, N, T)``, 0 at padded steps, and evidence ``(G, N)``; None where numbers leave
        their range, or are not on the CPU.
    """
    groups, num_states = log_initial.shape
    if pick(log_initial.device) is not NUMBA or num_states > WIDEST:
        return None
    with torch.no_grad():
        offsets = finite_or_zero(table.amax(-1)).double()
        likelihood = (table.double() - offsets.unsqueeze(-1)).exp()
        first, matrix = log_initial.double().exp(), log_transition.double().exp()
        uniform = torch.rand(groups, *rows.shape, dtype=torch.float64)
        states = torch.zeros(uniform.shape, dtype=torch.long)
        evidence = uniform.new_zeros(uniform.shape[:2])
        kernels = imported("._numba_math", __package__)
        kernels.run(
            kernels.sample_paths, groups, 8 * rows.numel() * num_states**2,
            first.contiguous(), matrix.contiguous(), matrix.mT.contiguous(),
            likelihood.contiguous(), offsets.contiguous(), rows, lengths, uniform, states, evidence,
        )  # fmt: skip
    if bool(evidence.isnan().any()):
        return None
    return states, evidence
