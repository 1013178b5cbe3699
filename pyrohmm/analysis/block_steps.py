"""Steps of filters of chains in blocks of states, that visit only the blocks of the symbols."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributions.block_hmm import BlockHMM


class BlockSteps:
    """One step of the forward filter, for n streams of a :class:`pyrohmm.BlockHMM`.

    States are logarithms ``(n, K)``; mostly those within one block are all that are possible.

    Args:
        hmm: The model.
    """

    def __init__(self, hmm: BlockHMM) -> None:
        with torch.no_grad():
            self._transitions = hmm.all_transitions()
        self._symbols = hmm.symbols
        self._states = hmm.symbols.padded_states

    def onward(self, log_states: Tensor) -> Tensor:
        """Logs of the states one step later."""
        anything = torch.full((len(log_states),), self._transitions.all)
        return self._after(log_states, anything, torch.empty_like(log_states))

    def read(self, values: Tensor, observed: Tensor | None, check: bool) -> tuple[Tensor, Tensor]:
        """The blocks ``(n, L)`` of observations ``(n, L)``, and log-likelihoods ``(n, L, w)``."""
        lengths = torch.full((len(values),), values.size(1))
        return self._symbols.likelihood(values, lengths, observed, check)

    def joint(
        self, log_states: Tensor, target: Tensor, likelihood: Tensor, is_first: bool
    ) -> Tensor:
        """Logs of the next state and its observation, ``(n, K)``.

        Args:
            log_states: Of the states before; of the first ones, if there are none before.
            target: ``(n,)``, the blocks of the observations.
            likelihood: ``(n, w)``, their log-likelihoods.
            is_first: Whether this is the first step.
        """
        step = self._transitions
        if is_first:
            arrived = step.narrowed(log_states, target)
        else:
            arrived = self._after(log_states, target, torch.empty_like(likelihood))
        return step.widened(arrived + likelihood, target)

    def _after(self, log_states: Tensor, target: Tensor, out: Tensor) -> Tensor:
        """Write to ``out`` logs of the states of ``target`` one step later, and return it."""
        step, (block, within) = self._transitions, self._blocks_of(log_states)
        source = block.masked_fill(~within, step.all)
        for rows in (within, ~within):
            if bool(rows.any()):
                before = step.narrowed(log_states[rows], source[rows])
                out[rows] = step.sums(before, source[rows], target[rows]).to(out.dtype)
        return out

    def _blocks_of(self, log_states: Tensor) -> tuple[Tensor, Tensor]:
        """A block of each stream ``(n,)``, and whether no state outside of it is possible."""
        possible = torch.nn.functional.pad(~log_states.isneginf(), (0, 1)).cpu()
        inside = possible[:, self._states].sum(-1)  # (n, B)
        most = inside.max(-1)
        return most.indices, most.values == possible.sum(-1)
