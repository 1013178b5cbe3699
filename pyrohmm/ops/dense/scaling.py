r"""Evidence of Markov chains and its gradient, in the range of numbers that each sequence needs.

Messages are probabilities scaled to sum to one at every step, so a step is one matrix product:
:math:`\alpha_t \propto (\alpha_{t-1} A) \circ e_t`, and the evidence is the sum of the logarithms
of the norms (Rabiner, 1989, section V.A). The gradient is the forward-backward algorithm itself:
the derivative by ``log_likelihood`` is p(z_t | x), that by ``log_transition`` the expected number
of transitions (Eisner, 2016). No tape of T steps is kept; memory is O(T K) per sequence.

Scaled numbers can underflow, and then sums lose paths that later turn out to matter. A sequence to
which that may have happened is computed again in float64, and where that is not enough, in log
space. What is known of the losses:

**No step can lose anything** if a^2 >= ``tiny * K / eps``, with a the smallest transition
probability: for every mass p that arrives at a step is then right to rounding. That holds for most
matrices without zeros. Transitions may have densities above one: ``tiny`` stands for the smallest
number times the largest of them, by which an error is multiplied.

**A step loses nothing** if q > ``2 tiny`` and a q / s >= ``2 tiny``, with q the smallest positive
product of a step, of arriving mass :math:`\alpha_{t-1} A` and likelihood, a the smallest positive
transition probability, and s the norm of the step; or if all masses that arrive at the next one are
above ``tiny * K / (s * eps)``. Compiled loops watch for that. Factors below ``tiny`` are raised to
it, so that only hard zeros are zero.

**What was lost may not matter**: well separated observations leave mass only in one state. Let
:math:`\beta_t` be the backward message, so that
:math:`L_t = \prod_{u \le t} s_u \; \alpha_t \cdot \beta_t` is the evidence of messages that are
computed up to t and exact from there on. Then :math:`L_t` and :math:`L_{t - 1}` differ by no more
than ``(K + 4) tiny`` :math:`/ s_t \sum_k \beta_t(k)`, and the evidence, relatively, by no more than
the sum over the steps of ``(K + 4) tiny / (s_t P_t)`` with
:math:`P_t = \alpha_t \cdot \beta_t / \sum_k \beta_t(k)`. Backward messages lose something too:
below ``(K + 2) tiny`` if :math:`e \circ \beta` sums to one. That is added to every transition on
the way back, so that they are never too small. If the bound is rounding, the sequence is exact.
Torch goes both ways at once, in one product a step, and needs no other bound: as
:math:`s_t P_t \ge a^2`, it holds wherever nothing can be lost.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..._choices import FEW, WIDEST
from ..backends import NUMBA, compiled, pick
from ..log_space import finite_or_zero, logsumexp
from . import _torch
from .chain import Chain, Gradient


def engine(chain: Chain, widest: int = WIDEST) -> ModuleType:
    """The module that computes: compiled loops, up to ``widest`` states, or torch."""
    narrow = chain.initial.size(-1) <= widest or chain.lengths.numel() <= FEW
    return compiled("dense") if pick(chain.initial.device, narrow) is NUMBA else _torch


def wider(dtype: torch.dtype) -> torch.dtype | None:
    """The range to try when ``dtype`` underflows; None stands for log space."""
    return None if dtype == torch.float64 else torch.float64


def solve(
    chain: Chain, dtype: torch.dtype | None, differentiable: bool = True, each: bool = False
) -> tuple[Tensor, Gradient]:
    """Log evidence ``(G, n)`` in float64, and its gradient.

    Args:
        chain: The arguments, constants.
        dtype: The range of numbers to begin with; None stands for log space.
        differentiable: Whether the gradient is wanted.
        each: Whether expected transitions are wanted of each sequence, ``(S, G n, K, K)``.
    """
    if dtype is None:
        return engine(chain).log_space(chain, each)
    evidence, exact, gradient = engine(chain).scaled(chain, dtype, differentiable, each)
    rows = None
    if exact is not None and not bool(exact.all()):
        rows = (~exact).flatten().nonzero().squeeze(-1)
        if len(rows) == exact.numel():
            return solve(chain, wider(dtype), differentiable, each)
        lost, again = solve(chain.subset(rows), wider(dtype), differentiable, each)
        evidence = evidence.flatten().index_put((rows,), lost.flatten()).reshape(evidence.shape)

    def complete(weight: Tensor) -> tuple[Tensor, ...] | None:
        parts = gradient(weight if rows is None else weight.masked_fill(~exact, 0.0))
        if parts is None:  # only the way back has left the range
            return solve(chain, wider(dtype), True, each)[1](weight)
        if rows is None:
            return parts
        more = again(weight.flatten()[rows].reshape(lost.shape))
        assert more is not None
        return _merged(chain, parts, rows, more, each)

    return evidence, complete


def _merged(
    chain: Chain, parts: tuple[Tensor, ...], rows: Tensor, more: tuple[Tensor, ...], each: bool
) -> tuple[Tensor, ...]:
    """Gradients of all sequences and of some that were done again, in which the former are zero."""
    (initial, transition, logs), size = parts, chain.lengths.size(1)
    more = tuple(part.to(like.dtype) for part, like in zip(more, parts))
    shared = rows // size if len(chain.lengths) > 1 else rows[:1] * 0

    def put(part: Tensor, new: Tensor) -> Tensor:
        whole = part.flatten(0, 1).index_put((rows,), new.flatten(0, 1))
        return whole.reshape(part.shape)

    return (
        put(initial, more[0]),
        transition.index_add(1, rows if each else shared, more[1]),
        put(logs, more[2]) if chain.symbols is None else logs.index_add(0, shared, more[2]),
    )


def filtered(chain: Chain, dtype: torch.dtype | None) -> Tensor:
    """Filtered log-probabilities ``(G, n, T, K)``; padded steps hold anything."""
    if dtype is None:
        messages: Tensor = engine(chain).filtered_in_log_space(chain)
        return messages - finite_or_zero(logsumexp(messages, -1).unsqueeze(-1))
    found, exact = engine(chain).filtered(chain, dtype)
    if bool(exact.all()):
        return found
    rows = (~exact).flatten().nonzero().squeeze(-1)
    again = filtered(chain.subset(rows), wider(dtype)).flatten(0, 1).to(found.dtype)
    return found.flatten(0, 1).index_put((rows,), again).reshape(found.shape)
