r"""Exact inference in factorial hidden Markov models: M independent chains, one emission.

The states of the chains at a step are one of K = K_1 ⋯ K_M product states, numbered with the last
chain fastest. Messages over them pass through the transition matrix of one chain after the other,
along its own axis: O(T K (K_1 + ⋯ + K_M)) per sequence, O(T M K^(M+1)) for chains of K states; the
K x K matrix is never made. Every function reads

``log_initial``      ``(*B, K)``              log p of the product states at the first step
``log_transitions``  M of ``(*B, K_m, K_m)``  log p of each chain's next state, row = from
``log_likelihood``   ``(*B, T, K)``           log p(x_t | z_t)
``lengths``          ``(*B)``                 number of steps that exist; padding is on the right

Batch dimensions broadcast.

Source: Ghahramani and Jordan, 1997, Factorial hidden Markov models, appendix B.

Example:
    >>> coin, swap = torch.full((2, 2), 0.5).log(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
    >>> first = torch.tensor([1.0, 0.0, 0.0, 0.0]).log()  # both in their state 0
    >>> seen = torch.tensor([[1.0, 0.5, 0.5, 0.1], [1.0, 0.5, 0.25, 0.1]]).log()
    >>> log_evidence(first, [coin, swap], seen, torch.tensor(2)).exp()  # 1/2 of 0.5 and 0.1
    tensor(0.3000)
    >>> sample_states(first, [swap, swap], torch.zeros(3, 4), torch.tensor(3))
    tensor([[0, 3, 0]])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .._checks import check_trailing
from .product import _torch as engine


def _arrange(
    log_initial: Tensor, log_transitions: Sequence[Tensor], log_likelihood: Tensor, lengths: Tensor
) -> engine.Arranged:
    """The arguments in one form, by differentiable operations."""
    size = math.prod(table.size(-1) for table in log_transitions)
    cure = "K is that of all chains together."
    check_trailing("log_initial", log_initial, (size,), "(K,)", cure)
    check_trailing("log_likelihood", log_likelihood, (size,), "(K,)", cure)
    matrices = [table[..., None, None, :, :] for table in log_transitions]
    return engine.checked(log_initial, matrices, log_likelihood, lengths)


log_evidence, filtered, viterbi, sample_states = engine.recursions(_arrange)
