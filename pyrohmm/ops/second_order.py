r"""Exact inference in second-order hidden Markov models: z_t depends on z_{t-1} and z_{t-2}.

Messages are of pairs of states. The pair (i, j) is followed by (j, k) alone: a product of K x K
matrices for each j, so that a step costs K^3, and the K^2 x K^2 matrix of all pairs is never made.
Every function reads

``log_initial``     ``(*B, K)``        log p(z_1)
``log_second``      ``(*B, K, K)``     log p(z_2 | z_1), row = from
``log_transition``  ``(*B, K, K, K)``  log p(z_t | z_{t-2}, z_{t-1}), in this order: [i, j, k]
``log_likelihood``  ``(*B, T, K)``     log p(x_t | z_t)
``lengths``         ``(*B)``           number of steps that exist; padding is on the right

Batch dimensions broadcast. Everything is summed in logarithms and float64, so that nothing leaves
the range of numbers, and comes back in the dtype of the arguments; -inf is legal everywhere.

Source: He, 1988, Extended Viterbi algorithm for second order hidden Markov process.
"""

from __future__ import annotations

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
from .masks import exists
from .product import _torch as engine


def _arrange(
    log_initial: Tensor, log_second: Tensor, log_transition: Tensor, log_likelihood: Tensor,
    lengths: Tensor,
) -> engine.Arranged:  # fmt: skip
    """Check the arguments; the chain of pairs, which begins with the second step.

    Sequences of one step have a second one, of state 0 and probability one.
    """
    logs = {"log_initial": log_initial, "log_second": log_second,
            "log_transition": log_transition, "log_likelihood": log_likelihood}  # fmt: skip
    for name, tensor in logs.items():
        check_floats(name, tensor)
    check_integers("lengths", lengths)
    check_same_device(logs)
    if log_likelihood.dim() < 2 or log_likelihood.size(-2) < 1:
        shape = tuple(log_likelihood.shape)
        raise ValueError(f"log_likelihood must have shape (*B, T, K) with T > 0; got {shape}.")
    size, num_steps = log_likelihood.size(-1), log_likelihood.size(-2)
    cure = "K is that of log_likelihood."
    check_trailing("log_initial", log_initial, (size,), "(K,)", cure)
    check_trailing("log_second", log_second, (size,) * 2, "(K, K)", cure)
    check_trailing("log_transition", log_transition, (size,) * 3, "(K, K, K)", cure)
    lengths = lengths.cpu().long()
    check_lengths(lengths, num_steps)
    cores = {"log_initial": 1, "log_second": 2, "log_transition": 3, "log_likelihood": 2}
    outer = {name: logs[name].shape[: logs[name].dim() - core] for name, core in cores.items()}
    batch = check_broadcast(outer | {"lengths": lengths.shape})

    later = log_likelihood[..., 1:, :]
    if num_steps == 1:
        later = torch.zeros_like(log_likelihood)
    alone = (lengths == 1).to(log_likelihood.device)[..., None, None]
    only = torch.full_like(log_second, -torch.inf)
    only[..., 0] = 0.0
    pairs = (log_initial + log_likelihood[..., 0, :]).unsqueeze(-1)
    pairs = pairs + torch.where(alone, only, log_second)
    later = later.masked_fill(alone, 0.0)
    by_middle = log_transition.transpose(-3, -2).unsqueeze(-4)  # [j, i, k]
    return engine.arrange(pairs.flatten(-2), [by_middle], later, (lengths - 1).clamp(min=1), batch)


def log_evidence(
    log_initial: Tensor, log_second: Tensor, log_transition: Tensor, log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:  # fmt: skip
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(*B)``.

    Differentiable by the first four arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero.

    Example:
        >>> even = torch.full((2, 2, 2), 0.5).log()
        >>> seen = torch.full((3, 2), 0.5).log()
        >>> log_evidence(even[0, 0], even[0], even, seen, torch.tensor(3)).exp()
        tensor(0.1250)
    """
    parts = log_initial, log_second, log_transition, log_likelihood, lengths
    return engine.log_evidence(_arrange(*parts))


def filtered(
    log_initial: Tensor, log_second: Tensor, log_transition: Tensor, log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:  # fmt: skip
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    They are -inf at padded steps, and from the step at which the observations become impossible.

    Example:
        >>> even = torch.full((2, 2, 2), 0.5).log()
        >>> filtered(even[0, 0], even[0], even, torch.zeros(2, 2), torch.tensor(2)).exp()
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    with torch.no_grad():
        parts = log_initial, log_second, log_transition, log_likelihood
        arranged = _arrange(*parts, lengths)
        first = log_initial + log_likelihood[..., 0, :]
        total = first.logsumexp(-1, keepdim=True)
        first = first - torch.where(total.isneginf(), 0.0, total)
        first = first.to(arranged.dtype).expand(*arranged.batch, -1).unsqueeze(-2)
        states = torch.cat([first, engine.filtered(arranged)], -2)
        states = states[..., : log_likelihood.size(-2), :]
        padded = ~exists(lengths.expand(arranged.batch), states.size(-2), states.device)
        return states.masked_fill(padded.unsqueeze(-1), -torch.inf)


def viterbi(
    log_initial: Tensor, log_second: Tensor, log_transition: Tensor, log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:  # fmt: skip
    r"""Most probable path, ``(*B, T)`` integers; 0 at padded steps.

    Example:
        >>> table = torch.zeros(2, 2, 2)
        >>> table[0, 0, 1] = table[0, 1, 1] = table[1, 1, 0] = table[1, 0, 0] = 1.0  # 0 0 1 1 0 0
        >>> first = torch.tensor([1.0, 0.0]).log()
        >>> second = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
        >>> viterbi(first, second, table.log(), torch.zeros(6, 2), torch.tensor(6))
        tensor([0, 0, 1, 1, 0, 0])
    """
    with torch.no_grad():
        parts = log_initial, log_second, log_transition, log_likelihood
        return _path(engine.viterbi(_arrange(*parts, lengths)), log_likelihood)


def sample_states(
    log_initial: Tensor, log_second: Tensor, log_transition: Tensor, log_likelihood: Tensor,
    lengths: Tensor, num_samples: int = 1,
) -> Tensor:  # fmt: skip
    r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`: filter forward, sample backward.

    Returns:
        ``(num_samples, *B, T)`` integers; 0 at padded steps.

    Example:
        >>> even = torch.full((2, 2, 2), 0.5).log()
        >>> seen = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> sample_states(even[0, 0], even[0], even, seen, torch.tensor(2))
        tensor([[1, 0]])
    """
    with torch.no_grad():
        parts = log_initial, log_second, log_transition, log_likelihood
        pairs = engine.sample_states(_arrange(*parts, lengths), num_samples)
        return _path(pairs, log_likelihood)


def _path(pairs: Tensor, log_likelihood: Tensor) -> Tensor:
    """States ``(*S, T)`` of the pairs that end at the second step and those after it."""
    num_steps, size = log_likelihood.shape[-2:]
    states = torch.cat([pairs[..., :1] // size, pairs % size], -1)
    return states[..., :num_steps]
