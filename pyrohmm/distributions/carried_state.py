"""``CarriedState``: the state in which sequences continue that began in another batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.blocks.plan import States, bounds
from ..ops.blocks.states import Blocks


class CarriedState(NamedTuple):
    """The state before the first step of some sequences, within further blocks of states.

    These states are left, and never entered.

    Attributes:
        leave: ``(G, D)``, vectors of these states, block after block.
        log_block_probs: ``(G, B)``, log-probability of the next block.
        sizes: ``(b,)``, number of states of each of these blocks.
        block: ``(N,)``, which of them each sequence continues from; -1 if from none.
        log_probs: ``(N, w)``, of the states of that block.
    """

    leave: Tensor
    log_block_probs: Tensor
    sizes: Tensor
    block: Tensor
    log_probs: Tensor

    @property
    def continues(self) -> Tensor:
        """Which sequences continue, ``(N,)`` booleans."""
        return self.block >= 0

    def log_initial(self, log_initial: Tensor, transition: InnerProductTransition) -> Tensor:
        """Log-probabilities ``(N, K)`` of the first state of each sequence.

        Args:
            log_initial: ``(K,)``, of those that do not continue.
            transition: Into the K states.
        """
        rows = transition.log_probs_from(self.leave, self.log_block_probs).split(
            self.sizes.tolist()
        )
        firsts = [
            log_initial if block < 0
            else (rows[block] + log_probs[: len(rows[block])].unsqueeze(-1)).logsumexp(0)
            for block, log_probs in zip(self.block.tolist(), self.log_probs)
        ]  # fmt: skip
        return torch.stack(firsts)

    def prepend(
        self,
        blocks: Blocks,
        transition: InnerProductTransition,
        chain: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> tuple[Any, ...]:
        """A chain with one more step where a sequence continues, whose state is known by its block.

        Args:
            blocks: Those of the chain.
            transition: Between them.
            chain: Blocks ``(N, T)``, lengths ``(N,)``, log-probabilities of the first state
                ``(N, w)`` and log-likelihoods ``(N, T, w)``.

        Returns:
            The arguments of :func:`pyrohmm.ops.blocks.recursions.log_evidence`, of T + 1 steps.
        """
        path, lengths, first, likelihood = chain
        sizes = torch.cat([blocks.sizes, self.sizes])
        width = max(blocks.width, self.log_probs.size(-1))
        states = States(bounds(sizes), torch.arange(int(sizes.sum())), sizes, width)
        leave = torch.cat([transition.leave, self.leave])
        enter = torch.cat([transition.enter, torch.zeros_like(self.leave)])  # never entered
        log_block_probs = torch.cat([transition.log_block_probs, self.log_block_probs])
        carried = (self.block + blocks.num_blocks).unsqueeze(-1)
        later = self.continues.unsqueeze(-1)
        path = torch.where(later, torch.cat([carried, path], 1), torch.cat([path, carried], 1))
        later = later.to(likelihood.device)
        first, likelihood = (_widened(part, width) for part in (first, likelihood))
        known = _widened(self.log_probs, width).unsqueeze(1)
        likelihood = torch.where(
            later.unsqueeze(-1),
            torch.cat([known, likelihood], 1),
            torch.cat([likelihood, known], 1),
        )
        first = torch.where(later, torch.zeros_like(first), first)
        lengths = lengths + self.continues
        return path, lengths, states, leave, enter, log_block_probs, first, likelihood


def _widened(logs: Tensor, width: int) -> Tensor:
    """Logarithms ``(*, w)`` with zero probabilities beyond."""
    return torch.nn.functional.pad(logs, (0, width - logs.size(-1)), value=-torch.inf)
