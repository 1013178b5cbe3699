"""Factors of the paths of an HMM, as posterior queries read them, and refusals."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor

from ..chains.paths import PathFactors
from ..distributions.autoregressive import Autoregressive
from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..ops.log_space import finite_or_zero as finite_or_zero
from ..ops.log_space import normalised as normalised


def chain_factors(hmm: HMM, values: Tensor) -> PathFactors:
    """Join the parameters of ``hmm`` and observations ``(*B, T, *E)``."""
    if isinstance(hmm, BlockHMM):
        return PathFactors.joined(*hmm.log_factors(values), hmm.lengths)
    return PathFactors.of(hmm.chain, hmm.log_likelihood(values), hmm.lengths)


def in_blocks(hmm: HMM) -> TypeGuard[BlockHMM]:
    """Whether queries are computed from block to block, not by the matrix of all transitions."""
    return isinstance(hmm, BlockHMM) and hmm.carried is None


def refuse_autoregressive(hmm: HMM, purpose: str) -> None:
    """Raise if the emission depends on the observations before, which ``purpose`` does not know."""
    if not isinstance(hmm, BlockHMM) and isinstance(hmm.emission, Autoregressive):
        raise ValueError(
            f"{purpose} needs observations that depend on the state alone; the emission of hmm is "
            f"{type(hmm.emission).__name__}. hmm.posterior, hmm.forecast and continuation know of "
            "earlier observations."
        )


def check_possible(log_evidence: Tensor) -> None:
    """Raise if a sequence has probability zero."""
    count = int(log_evidence.isneginf().sum())
    if count:
        raise ValueError(
            f"values must be possible under the model; {count} of {log_evidence.numel()} sequences "
            "have probability zero, so that nothing follows from them. Leave them out: their "
            "hmm.log_prob(values) is -inf."
        )
