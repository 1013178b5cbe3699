"""Paths and evidence of the same sequences under many parameters, in one pass: for sampling."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from .backends import NUMBA, backend_for
from .log_space import finite_or_zero

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
    if backend_for(log_initial.device) is not NUMBA or num_states > WIDEST:
        return None
    with torch.no_grad():
        offsets = finite_or_zero(table.amax(-1)).double()
        likelihood = (table.double() - offsets.unsqueeze(-1)).exp()
        first, matrix = log_initial.double().exp(), log_transition.double().exp()
        uniform = torch.rand(groups, *rows.shape, dtype=torch.float64)
        states = torch.zeros(uniform.shape, dtype=torch.long)
        evidence = uniform.new_zeros(uniform.shape[:2])
        kernels = import_module("._numba_draws", __package__)
        kernels.run(
            kernels.sample_paths, groups, 8 * rows.numel() * num_states**2,
            first.contiguous(), matrix.contiguous(), matrix.mT.contiguous(),
            likelihood.contiguous(), offsets.contiguous(), rows, lengths, uniform, states, evidence,
        )  # fmt: skip
    if bool(evidence.isnan().any()):
        return None
    return states, evidence
