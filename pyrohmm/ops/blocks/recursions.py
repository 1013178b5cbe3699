r"""Exact recursions for chains in which a symbol says to which block of states the state belongs.

Between two symbols only the transitions from the one's block to the other's matter, so that a step
costs the product of the sizes of the two blocks, whatever the number of states. The probabilities
of these transitions are computed once for each pair of blocks that occurs in the data. They are
products, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b, whose second factor is
a softmax of scores within the block (any chain can be written like that); where states are in
several blocks, they are given as they are.

The functions read:

``blocks``           ``(N, T)``     block of each step, on the CPU; B where it is missing
``lengths``          ``(N,)``       number of steps that exist, on the CPU
``states``                          of each block
``leave``            ``(K, D)``     vectors of states; without ``enter``, log p(j | i), ``(K, K)``
``enter``            ``(K, D)``     vectors of states: scores are inner products; or None
``log_block_probs``  ``(K, B)``     log p(b | i); with ``enter`` only
``log_first``        ``(N, w)``     log-probability of the first state, in the first block
``log_seen``         ``(N, T, w)``  log p(x_t | z_t) in the states of the block; -inf beyond them
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import NUMBA, compiled, pick
from ..tensor_cache import cached, cached_on
from . import scaled
from .messages import LogChain
from .plan import BlockChain, States, make_plan


def plan_chain(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_block_probs: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
) -> BlockChain:
    """Chain in the order of its plan."""
    device, steps = log_seen.device, lengths.numpy().tobytes()
    plan = cached(blocks, lambda: make_plan(blocks, lengths, states), states, steps)
    order, where = cached_on(device, plan.order), cached_on(device, plan.where)
    first, seen = log_first.index_select(0, order), log_seen.flatten(0, 1).index_select(0, where)
    return BlockChain(plan, states, leave, enter, log_block_probs, first, seen)


def log_evidence(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_block_probs: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
    log_initial: Tensor | None = None,
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(N,)``; differentiable.

    Where steps are missing ``log_initial`` ``(K,)`` is needed, of the first state.
    """
    scores = leave, enter, log_block_probs
    chain = plan_chain(blocks, lengths, states, *scores, log_first, log_seen)
    order = chain.plan.order
    if bool((chain.plan.block == len(states.sizes)).any()):
        value = LogChain(chain, log_initial).log_evidence()
        return value[order.argsort().to(value.device)]
    value, exact = _evidence(chain)
    if not bool(exact.all()):
        lost = (~exact).nonzero().squeeze(-1)
        rows = order[lost]
        part = plan_chain(
            blocks[rows], lengths[rows], states, *scores, log_first[rows], log_seen[rows]
        )
        value = value.index_put((lost[part.plan.order],), LogChain(part).log_evidence())
    return value[order.argsort().to(value.device)]


def final_state_log_probs(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_block_probs: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
) -> Tensor:
    r"""Log-probabilities of the final states, :math:`\log p(z_T \mid x_{1:T})`, ``(N, w)``.

    Of the states of each sequence's last block; -inf where that is impossible. No gradients.
    """
    with torch.no_grad():
        chain = plan_chain(
            blocks, lengths, states, leave, enter, log_block_probs, log_first, log_seen
        )
        log_probs = _final_state(chain)
        return log_probs[chain.plan.order.argsort().to(log_probs.device)]


def _evidence(chain: BlockChain) -> tuple[Tensor, Tensor]:
    """Log evidence ``(N,)`` in the order of the plan, and where it is exact; differentiable."""
    if pick(chain.log_seen.device) is NUMBA:
        return scaled.log_evidence(compiled("blocks"), chain)
    evidence = LogChain(chain).log_evidence()
    return evidence, torch.ones(len(evidence), dtype=torch.bool)


def _final_state(chain: BlockChain) -> Tensor:
    """Log p(z_T | x_{1:T}) in the last block, ``(N, w)``, in the order of the plan."""
    found = None
    if pick(chain.log_seen.device) is NUMBA:
        found = scaled.final_state(compiled("blocks"), chain)
    return LogChain(chain).final_state() if found is None else found
