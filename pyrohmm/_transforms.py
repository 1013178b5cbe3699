"""Transforms of ``torch.func``, which take nothing but operations of torch."""

from __future__ import annotations

import torch


def transforming() -> bool:
    """Whether ``torch.func.grad``, ``vmap``, ``jvp`` or what is made of them is at work.

    They take neither functions of autograd with a backward of their own nor compiled loops, and
    within ``vmap`` values cannot be read: not to check them, and not to choose the way.
    """
    return bool(torch._C._are_functorch_transforms_active())
