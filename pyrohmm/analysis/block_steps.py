"""Steps of filters of chains in blocks of states, that visit only the blocks of the symbols."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..distributions.block_hmm import BlockHMM


class BlockSteps:
    """One step of the forward filter, for n streams of a :class:`pyrohmm.BlockHMM`.

    States are logarithms ``(n, K)``; mostly those within one block are all that are possible.

    Args:
        hmm: The model.
    """

    def __init__(self, hmm: BlockHMM) -> None:
        with torch.no_grad():
            self._transitions = hmm.chain.transitions()
        self.read = hmm.symbols.likelihood
        self._states = self._transitions.places(torch.arange(hmm.blocks.num_blocks))

    def onward(self, log_states: Tensor) -> Tensor:
        """Logs of the states one step later."""
        anything = torch.full((len(log_states),), self._transitions.all)
        return self._after(log_states, anything)

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
        arrived = log_states if is_first else self._after(log_states, target)
        return arrived + self._transitions.widened(likelihood, target)[:, :-1]

    def _after(self, log_states: Tensor, target: Tensor) -> Tensor:
        """Logs of the states of ``target`` one step later; -inf elsewhere."""
        wide = pad(log_states, (0, 1), value=-torch.inf)
        possible = ~wide.isneginf().cpu()
        inside = possible[:, self._states].sum(-1).max(-1)  # of the block that has most
        within = inside.values == possible.sum(-1)
        source = inside.indices.masked_fill(~within, self._transitions.all)
        return self._transitions.sums(wide, source, target)[:, :-1].to(log_states.dtype)
