r"""Exact inference in second-order hidden Markov models: z_t depends on z_{t-1} and z_{t-2}.

Messages are of pairs of states. The pair (i, j) is followed by (j, k) alone: a product of K x K
matrices for each j, so that a step costs K^3, and the K^2 x K^2 matrix of all pairs is never made.
Every function reads

``log_initial``     ``(*B, K)``        log p(z_1)
``log_second``      ``(*B, K, K)``     log p(z_2 | z_1), row = from
``log_transition``  ``(*B, K, K, K)``  log p(z_t | z_{t-2}, z_{t-1}), in this order: [i, j, k]
``log_likelihood``  ``(*B, T, K)``     log p(x_t | z_t)
``lengths``         ``(*B)``           number of steps that exist; padding is on the right

Batch dimensions broadcast.

Source: He, 1988, Extended Viterbi algorithm for second order hidden Markov process.

Example:
    >>> table = torch.zeros(2, 2, 2)
    >>> table[0, 0, 1] = table[0, 1, 1] = table[1, 1, 0] = table[1, 0, 0] = 1.0  # 0 0 1 1 0 0
    >>> first = torch.tensor([1.0, 0.0]).log()
    >>> second = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    >>> viterbi(first, second, table.log(), torch.zeros(6, 2), torch.tensor(6))
    tensor([0, 0, 1, 1, 0, 0])
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_trailing
from . import log_messages as engine


def _arrange(
    log_initial: Tensor, log_second: Tensor, log_transition: Tensor, log_likelihood: Tensor,
    lengths: Tensor,
) -> engine.Arranged:  # fmt: skip
    """The chain of pairs, by differentiable operations; the first state comes after a state 0."""
    size, cure = log_likelihood.size(-1), "K is that of log_likelihood."
    check_trailing("log_initial", log_initial, (size,), "(K,)", cure)
    check_trailing("log_second", log_second, (size,) * 2, "(K, K)", cure)
    check_trailing("log_transition", log_transition, (size,) * 3, "(K, K, K)", cure)
    pairs = pad(log_initial, (0, size * (size - 1)), value=-torch.inf)
    by_middle = log_second.unsqueeze(-2), log_transition.transpose(-3, -2)  # [j, i, k]
    table = torch.stack(torch.broadcast_tensors(*by_middle), -4)
    return engine.checked(pairs, table, log_likelihood, lengths)


log_evidence, filtered, viterbi, sample_states = engine.recursions(_arrange)
