r"""Exact inference in factorial hidden Markov models: M independent chains, one emission.

The states of the chains at a step are one of K = K_1 ⋯ K_M product states, numbered with the last
chain fastest. Messages over them pass through the transition matrix of one chain after the other,
along its own axis: O(T K (K_1 + ⋯ + K_M)) per sequence, O(T M K^(M+1)) for chains of K states; the
K x K matrix is never made. Every function reads

``log_initial``      ``(*B, K)``              log p of the product states at the first step
``log_transitions``  M of ``(*B, K_m, K_m)``  log p of each chain's next state, row = from
``log_likelihood``   ``(*B, T, K)``           log p(x_t | z_t)
``lengths``          ``(*B)``                 number of steps that exist; padding is on the right

Batch dimensions broadcast. Everything is summed in logarithms and float64, so that nothing leaves
the range of numbers, and comes back in the dtype of the arguments; -inf is legal everywhere.

Source: Ghahramani and Jordan, 1997, Factorial hidden Markov models, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import (
    check_broadcast,
    check_floats,
    check_integers,
    check_lengths,
    check_same_device,
    check_trailing,
)
from .product import _torch as engine


class ProductTransition:
    """The transition matrix of the product states of M independent chains.

    Args:
        parts: M of ``(*B, K_m, K_m)``, log-probabilities.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = tuple(parts)

    @property
    def matrix(self) -> Tensor:
        """``(*B, K, K)``, log-probabilities; made anew at each reading."""
        product = self.parts[0]
        for part in self.parts[1:]:
            product = product[..., :, None, :, None] + part[..., None, :, None, :]
            product = product.flatten(-4, -3).flatten(-2)
        return product


def _arrange(
    log_initial: Tensor,
    log_transitions: Sequence[Tensor],
    log_likelihood: Tensor,
    lengths: Tensor,
) -> engine.Arranged:
    """Check the arguments, and bring them into one form by differentiable operations."""
    if not log_transitions:
        raise ValueError("log_transitions must hold the matrix of at least one chain; got none.")
    tables = {f"log_transitions[{m}]": table for m, table in enumerate(log_transitions)}
    logs = {"log_initial": log_initial, "log_likelihood": log_likelihood} | tables
    for name, tensor in logs.items():
        check_floats(name, tensor)
    check_integers("lengths", lengths)
    check_same_device(logs)
    for name, table in tables.items():
        if table.dim() < 2 or table.size(-1) != table.size(-2):
            raise ValueError(f"{name} must have shape (*B, K_m, K_m); got {tuple(table.shape)}.")
    size = math.prod(table.size(-1) for table in log_transitions)
    check_trailing("log_initial", log_initial, (size,), "(K,)", "K is that of all chains together.")
    if log_likelihood.dim() < 2 or log_likelihood.size(-1) != size:
        raise ValueError(
            f"log_likelihood must have shape (*B, T, K) with K = {size}; got "
            f"{tuple(log_likelihood.shape)}."
        )
    num_steps, lengths = log_likelihood.size(-2), lengths.cpu().long()
    check_lengths(lengths, num_steps)
    batch = check_broadcast(
        {
            "log_initial": log_initial.shape[:-1],
            "log_likelihood": log_likelihood.shape[:-2],
            "lengths": lengths.shape,
        }
        | {name: table.shape[:-2] for name, table in tables.items()}
    )
    matrices = [table[..., None, None, :, :] for table in log_transitions]
    return engine.arrange(log_initial, matrices, log_likelihood, lengths, batch)


def log_evidence(
    log_initial: Tensor,
    log_transitions: Sequence[Tensor],
    log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, all chains summed out, ``(*B)``.

    Differentiable by the first three arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero.

    Example:
        >>> coin, swap = torch.full((2, 2), 0.5).log(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> first = torch.tensor([1.0, 0.0, 0.0, 0.0]).log()  # both in their state 0
        >>> seen = torch.tensor([[1.0, 0.5, 0.5, 0.1], [1.0, 0.5, 0.25, 0.1]]).log()
        >>> log_evidence(first, [coin, swap], seen, torch.tensor(2)).exp()  # 1/2 of 0.5 and 0.1
        tensor(0.3000)
    """
    arranged = _arrange(log_initial, log_transitions, log_likelihood, lengths)
    return engine.log_evidence(arranged)


def filtered(
    log_initial: Tensor,
    log_transitions: Sequence[Tensor],
    log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    They are -inf at padded steps, and from the step at which the observations become impossible.

    Example:
        >>> coin = torch.full((2, 2), 0.5).log()
        >>> seen = torch.tensor([[1.0, 0.0, 0.5, 0.5]]).log()
        >>> filtered(torch.full((4,), 0.25).log(), [coin, coin], seen, torch.tensor(1)).exp()
        tensor([[0.5000, 0.0000, 0.2500, 0.2500]])
    """
    with torch.no_grad():
        arranged = _arrange(log_initial, log_transitions, log_likelihood, lengths)
        return engine.filtered(arranged)


def viterbi(
    log_initial: Tensor,
    log_transitions: Sequence[Tensor],
    log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:
    r"""Most probable path of the product states, ``(*B, T)`` integers; 0 at padded steps.

    Example:
        >>> stay = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> seen = torch.tensor([[0.9, 0.1, 0.1, 0.1], [0.2, 0.1, 0.1, 0.6]]).log()
        >>> viterbi(torch.full((4,), 0.25).log(), [stay, stay], seen, torch.tensor(2))
        tensor([0, 0])
    """
    with torch.no_grad():
        arranged = _arrange(log_initial, log_transitions, log_likelihood, lengths)
        return engine.viterbi(arranged)


def sample_states(
    log_initial: Tensor,
    log_transitions: Sequence[Tensor],
    log_likelihood: Tensor,
    lengths: Tensor,
    num_samples: int = 1,
) -> Tensor:
    r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`: filter forward, sample backward.

    Returns:
        ``(num_samples, *B, T)`` integers, product states; 0 at padded steps.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> first = torch.tensor([1.0, 0.0, 0.0, 0.0]).log()
        >>> sample_states(first, [swap, swap], torch.zeros(3, 4), torch.tensor(3))
        tensor([[0, 3, 0]])
    """
    with torch.no_grad():
        arranged = _arrange(log_initial, log_transitions, log_likelihood, lengths)
        return engine.sample_states(arranged, num_samples)
