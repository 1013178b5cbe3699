"""Logarithms and their sums with hard zeros: gradients are zero there, never NaN."""

from __future__ import annotations

import torch
from torch import Tensor

# Log space, decoding, sampling -------------------------------------------------------------------


def logsumexp(scores: Tensor, dim: int) -> Tensor:
    """Like :func:`torch.logsumexp`, but where every score is -inf the gradient is zero, not NaN.

    Such rows are ordinary in an HMM: a state that no state can move to.
    """
    dead = scores.isneginf().all(dim, keepdim=True)
    return scores.masked_fill(dead, 0.0).logsumexp(dim).masked_fill(dead.squeeze(dim), -torch.inf)


def log(probs: Tensor) -> Tensor:
    """Logarithm whose gradient at zero is zero: a hard zero stays what it is, and makes no NaN."""
    zero = probs == 0
    return probs.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)
