"""``BlockFactors``: parameters and symbols of a chain in blocks, as the recursions read them."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._checks import check_same_device, check_tensor, check_trailing
from .._precision import full_precision
from .._transforms import refuse_transforms
from ..ops import masks
from ..ops.blocks import recursions
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.blocks.messages import LogChain
from ..ops.blocks.states import Blocks
from ..ops.blocks.transitions import Transitions
from ..ops.sampling import refuse_nan
from .block_symbols import BlockSymbols
from .carried_state import CarriedState
from .hmm import HMM

# Where blocks overlap, each symbol has its block, and hardly any pair of blocks occurs twice. Up to
# so many times the states of a block, all transitions at once take less time than those of pairs.
CROWDED = 14

# On one level each state's transitions to all others are summed anyway. Up to so many states it
# takes less time to keep their matrix; with more it would take too much memory.
MATRIX = 4096


class _Factors(NamedTuple):
    """Parameters and symbols of N sequences, within the blocks of the symbols.

    Attributes:
        blocks: ``(N, T)``, the block of each step, on the CPU; anything at padded steps.
        lengths: ``(N,)``.
        first: ``(N, w)``, log-probability of the first state, in its block.
        likelihood: ``(N, T, w)``, log-likelihood of each step in the states of its block.
        batch: The batch shape, of N elements.
        known: ``(N, T)``, which steps exist and are observed.
        leaving: ``(N, T, w)``, log-factor of each state that is left for the next step, if that
            step's symbol changes the transition to it; 0 at the last step.
    """

    blocks: Tensor
    lengths: Tensor
    first: Tensor
    likelihood: Tensor
    batch: torch.Size
    known: Tensor
    leaving: Tensor | None = None


class BlockFactors(HMM):
    """The part of a :class:`pyrohmm.BlockHMM` that joins parameters and data, in blocks.

    Its arguments are those of the ``BlockHMM``; what is computed from them is there.
    """

    transition: InnerProductTransition | Tensor
    symbols: BlockSymbols
    blocks: Blocks
    carried: CarriedState | None

    @property
    def _inner_products(self) -> InnerProductTransition:
        """The transition where it must be one, of blocks that are disjoint."""
        return cast(InnerProductTransition, self.transition)

    def all_transitions(self) -> Transitions:
        """Sums over transitions from and to all states, without their matrix."""
        return Transitions(self.blocks.layout, *self._scores())

    @property
    def _is_crowded(self) -> bool:
        """Whether all transitions at once take less time than those of pairs of blocks."""
        blocks = self.blocks
        return not blocks.disjoint and blocks.num_states <= CROWDED * blocks.width

    def _factors(self, values: Tensor) -> _Factors:
        """Join parameters and symbols, within the blocks of the symbols."""
        refuse_transforms(
            "a model with states in blocks", "hmm.dense() can be transformed, if it is not large."
        )
        check_tensor("values", values)
        check_same_device({"values": values, "log_initial": self.log_initial})
        check_trailing("values", values, tuple(self.event_shape), "(T, *E)")
        outer = values.shape[: values.dim() - len(self.event_shape)]
        batch = torch.broadcast_shapes(outer, self.batch_shape)
        lengths = self.lengths.expand(batch).reshape(-1)
        if values.shape != (len(lengths), *self.event_shape):
            values = values.expand(*batch, *self.event_shape).reshape(-1, *self.event_shape)
        known, observed = masks.exists(lengths, self.num_steps, values.device), None
        if self.observed is not None:
            observed = self.observed.expand(*batch, -1).reshape(known.shape).to(known.device)
            known = known & observed
        blocks, likelihood = self.symbols.likelihood(values, lengths, observed, self._validate_args)
        states, device = self.blocks.states[blocks[:, 0]], self.log_initial.device
        first = self.log_initial[states.clamp(min=0).to(device)]
        first = first.masked_fill((states < 0).to(device), -torch.inf)
        return _Factors(blocks, lengths, first, likelihood, batch, known)

    def _refuse_nan(self) -> None:
        """Raise if a parameter is NaN: states, which are whole numbers, could not show it."""
        refuse_nan(self.log_initial, self.log_emission, *filter(torch.is_tensor, self._scores()))

    def _scores(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Vectors and shares of the transition, or its matrix where that takes less time."""
        transition = self.transition
        if isinstance(transition, Tensor):
            return transition, None, None
        leave, one_level = transition.leave, transition.block_logits is None
        if one_level and leave.device.type == "cpu" and len(leave) <= MATRIX:
            return self.log_transition, None, None
        return transition.leave, transition.enter, transition.log_block_probs

    def _block_chain(self, factors: _Factors, trim: bool = False) -> tuple[Any, ...]:
        """The arguments of :func:`pyrohmm.ops.blocks.recursions.log_evidence`.

        With ``trim`` without what is missing after the last observation, which changes no evidence.
        """
        blocks, lengths, first, likelihood, _, known, leaving = factors
        if leaving is not None:  # a factor of the state, and as such part of its likelihood
            likelihood = likelihood + leaving
        if self.carried is not None:
            return self.carried.prepend(self.blocks, self._inner_products, factors[:4])
        if self.observed is not None:
            known = known.cpu()
            blocks = blocks.masked_fill(~known, self.blocks.num_blocks)
            if trim:
                lengths = (known * torch.arange(1, known.size(1) + 1)).amax(1).clamp(min=1)
        return blocks, lengths, self.blocks.layout, *self._scores(), first, likelihood

    def _dense_chain(self, factors: _Factors) -> tuple[Tensor, ...]:
        """The arguments of :func:`pyrohmm.ops.recursions.log_evidence`, of all K states."""
        likelihood = factors.likelihood
        states = self.blocks.states[factors.blocks].to(likelihood.device)
        wide = likelihood.new_full((*states.shape[:2], self.blocks.num_states + 1), -torch.inf)
        wide = wide.scatter(2, states.masked_fill(states < 0, self.blocks.num_states), likelihood)
        return self.log_initial, self.log_transition.unsqueeze(0), wide[..., :-1], factors.lengths


def log_chain(
    hmm: BlockFactors, values: Tensor, dtype: torch.dtype | None = None, trim: bool = False
) -> tuple[LogChain, torch.Size]:
    """The chain in logarithms, without gradients; and the shape ``(*B, T)``.

    Args:
        hmm: The model.
        values: ``(*B, T, *E)``, observations.
        dtype: Of the messages; that of the parameters by default.
        trim: Whether to leave out what is missing after the last observation.
    """
    with torch.no_grad(), full_precision(hmm.log_initial):
        factors = hmm._factors(values)
        parts: list[Any] = list(hmm._block_chain(factors._replace(leaving=None), trim))
        parts[-2:] = (part.to(dtype) for part in parts[-2:])
        parts = [part.detach() if isinstance(part, Tensor) else part for part in parts]
        chain = recursions.plan_chain(*parts)
        leaving = factors.leaving
        if leaving is not None:
            leaving = leaving.flatten(0, 1)[chain.plan.where.to(leaving.device)].to(chain.log_seen)
        logs = LogChain(chain, hmm.log_initial.detach(), leaving)
    return logs, torch.Size([*factors.batch, hmm.num_steps])


def at_steps(chain: LogChain, tokens: Tensor, shape: torch.Size) -> Tensor:
    """Entries of tokens ``(*S, M)`` placed at their steps ``(*S, *B, T)``; 0 elsewhere."""
    out = tokens.new_zeros(*tokens.shape[:-1], shape.numel())
    out[..., chain.plan.where.to(out.device)] = tokens
    return out.reshape(*tokens.shape[:-1], *shape)
