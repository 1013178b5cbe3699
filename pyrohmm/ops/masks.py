"""Masks of ragged sequences, which are padded on the right."""

from __future__ import annotations

import torch
from torch import Tensor


def exists(lengths: Tensor, num_steps: int, device: torch.device | None = None) -> Tensor:
    """Mask ``(*B, T)``, True at the steps that exist.

    Args:
        lengths: ``(*B)`` integers, the number of steps of each sequence.
        num_steps: T.
        device: Of the mask; that of ``lengths`` by default.
    """
    mask = torch.arange(num_steps, device=lengths.device) < lengths.unsqueeze(-1)
    return mask if device is None else mask.to(device, non_blocking=True)
