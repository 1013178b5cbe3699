r"""Exact recursions for chains in which a symbol says to which block of states the state belongs.

Between two symbols only the transitions from the one's block to the other's matter, so that a step
costs the product of the sizes of the two blocks, whatever the number of states. The probabilities
of these transitions are computed once for each pair of blocks that occurs in the data. They are
products, :math:`p(j | i) = p(b | i) \, p(j | i, b)` for state j in block b, whose second factor is
a softmax of scores within the block (any chain can be written like that); where states are in
several blocks, they are given as they are.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..backends import NUMBA, backend_for
from ..tensor_cache import cached, cached_on
from . import scaled
from .messages import LogChain
from .plan import PlannedChain, States, make_plan


def plan_chain(
    blocks: Tensor,
    lengths: Tensor,
    states: States,
    leave: Tensor,
    enter: Tensor | None,
    log_block_probs: Tensor | None,
    log_first: Tensor,
    log_seen: Tensor,
) -> PlannedChain:
    """Chain in the order of its plan.

    Args:
        blocks: ``(N, T)``, block of each step, on the CPU; B where it is missing.
        lengths: ``(N,)``, number of steps that exist, on the CPU.
        states: Of each block.
        leave: ``(K, D)``, vectors of states; without ``enter``, log p(j | i), ``(K, K)``.
        enter: ``(K, D)``, vectors of states: scores are inner products; or None.
        log_block_probs: ``(K, B)``, log p(b | i); with ``enter`` only.
        log_first: ``(N, w)``, log-probability of the first state, in the first block.
        log_seen: ``(N, T, w)``, log p(x_t | z_t) in the states of the block; -inf beyond them.
    """
    device, steps = log_seen.device, lengths.numpy().tobytes()
    plan = cached(blocks, lambda: make_plan(blocks, lengths, states), states, steps)
    order, where = cached_on(device, plan.order), cached_on(device, plan.where)
    first, seen = log_first.index_select(0, order), log_seen.flatten(0, 1).index_select(0, where)
    return PlannedChain(plan, states, leave, enter, log_block_probs, first, seen)


def log_evidence(
    chain: PlannedChain, log_initial: Tensor | None = None, log_missing: Tensor | None = None
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, ``(N,)`` in the order of the plan.

    Differentiable. The other arguments are those of :class:`.messages.LogChain`, where steps are
    missing.
    """
    kernels = _kernels(chain)
    if kernels is None:
        return LogChain(chain, log_initial, None, log_missing).log_evidence()
    value, exact = scaled.log_evidence(kernels, chain)
    if bool(exact.all()):
        return value
    return torch.where(exact, value, LogChain(chain).log_evidence())


def final_state_log_probs(chain: PlannedChain) -> Tensor:
    r"""Log-probabilities of the final states, :math:`\log p(z_T \mid x_{1:T})`, ``(N, w)``.

    Of the states of each sequence's last block, in the order of the plan; -inf where that is
    impossible. No gradients.
    """
    with torch.no_grad():
        kernels = _kernels(chain)
        found = None if kernels is None else scaled.final_state(kernels, chain)
        return LogChain(chain).final_state() if found is None else found


def _kernels(chain: PlannedChain) -> ModuleType | None:
    """The compiled loops, if they compute this chain."""
    if backend_for(chain.log_seen.device) is not NUMBA:
        return None
    if bool((chain.plan.block == len(chain.states.sizes)).any()):
        return None
    return import_module("._numba", __package__)
