"""Logarithms and sums with hard zeros, where gradients are zero, never NaN; masks of padding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._transforms import transforming
from .tensor_cache import cached


def logsumexp(scores: Tensor, dim: int) -> Tensor:
    """``torch.logsumexp`` with gradient zero, not NaN, where all scores are -inf.

    Such rows are ordinary in an HMM: a state that cannot be reached.
    """
    if not (scores.requires_grad or transforming()):
        return scores.logsumexp(dim)
    dead = scores.isneginf().all(dim, keepdim=True)
    return scores.masked_fill(dead, 0.0).logsumexp(dim).masked_fill(dead.squeeze(dim), -torch.inf)


def log(probs: Tensor) -> Tensor:
    """Logarithm with gradient zero at zero, so that a hard zero stays one and makes no NaN."""
    if not (probs.requires_grad or transforming()):
        return probs.log()
    zero = probs == 0
    return probs.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


def finite_or_zero(logs: Tensor) -> Tensor:
    """Logarithms with -inf replaced by zero, so that subtraction makes no NaN."""
    return logs.masked_fill(logs.isneginf(), 0.0)


def normalised(logs: Tensor) -> Tensor:
    """Normalise logs over the last dimension by log-sum-exp; where all are -inf they stay so."""
    return logs - finite_or_zero(logsumexp(logs, -1).unsqueeze(-1))


def largest(logs: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Maximum over some dimensions, kept and detached; zero if not finite."""
    peak = logs.detach().amax(dims, keepdim=True)
    return peak.masked_fill(~peak.isfinite(), 0.0)


def log_softmax_of_parts(scores: Tensor, sizes: Tensor, log_weights: Tensor) -> Tensor:
    """Softmax within each part of the last dimension, times the weight of the part, as logarithms.

    Args:
        scores: ``(n, C)``.
        sizes: ``(P,)`` integers on the CPU, how many of the C columns each part has.
        log_weights: ``(n, P)``.
    """
    widths = sizes.tolist()
    if len(set(widths)) == 1:
        cells = scores.unflatten(-1, (len(widths), -1)).log_softmax(-1)
        return (cells + log_weights.unsqueeze(-1)).flatten(-2)
    parts = zip(scores.split(widths, -1), log_weights.split(1, -1))
    return torch.cat([part.log_softmax(-1) + weight for part, weight in parts], -1)


def step_mask(lengths: Tensor, num_steps: int, device: torch.device | None = None) -> Tensor:
    """Mask ``(*B, T)`` of sequences padded on the right, True at the steps that exist.

    Args:
        lengths: ``(*B)`` integers, the number of steps of each sequence.
        num_steps: T.
        device: Of the mask; that of ``lengths`` by default.
    """

    def mask() -> Tensor:
        return torch.arange(num_steps, device=lengths.device) < lengths.unsqueeze(-1)

    return mask() if device is None else _moved(mask, lengths, device, "exists", num_steps)


def end_masks(lengths: Tensor, num_steps: int, device: torch.device) -> Tensor:
    """Masks ``(2, T, *B, 1)``: True from the last step of each sequence on, and after it.

    Args:
        lengths: ``(*B)`` integers on the CPU.
        num_steps: T.
        device: Of the masks.
    """

    def masks() -> Tensor:
        time = torch.arange(num_steps).reshape(-1, *(1,) * lengths.dim())
        return torch.stack([time >= lengths - 1, time >= lengths]).unsqueeze(-1)

    return _moved(masks, lengths, device, "ends", num_steps)


def _moved(
    make: Callable[[], Tensor], lengths: Tensor, device: torch.device, *of: object
) -> Tensor:
    """``make()`` of lengths on a device: copied to an accelerator once while they are unchanged."""
    if device.type == "cpu" or transforming():
        return make().to(device)
    source = lengths if lengths._base is None else lengths._base
    form = lengths.shape, lengths.stride(), lengths.storage_offset(), device, of
    return cached(source, lambda: make().to(device, non_blocking=True), repr(form).encode())
