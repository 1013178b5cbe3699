"""Transforms of ``torch.func``, which take nothing but operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def transforming() -> bool:
    """Whether ``torch.func.grad``, ``vmap``, ``jvp`` or what is made of them is at work.

    They take neither functions of autograd with a backward of their own nor compiled loops, and
    within ``vmap`` values cannot be read: not to check them, and not to choose the way.
    """
    return bool(torch._C._are_functorch_transforms_active())


BROADCAST = "In place of vmap, give parameters or lengths batch dimensions, which broadcast."


def refuse_transforms(what: str, cure: str = BROADCAST) -> None:
    """Raise within those transforms, in which ``what`` cannot be computed: it reads values."""
    if transforming():
        raise NotImplementedError(
            f"{what} cannot be computed within vmap, grad and the other transforms of torch.func, "
            f"for it reads values. Call it outside of them. {cure}"
        )


def evidence_and_gradient(
    evidence: Callable[..., Tensor], *logs: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``evidence(*logs)`` and the gradient of its sum, itself differentiable by transforms."""
    transformed: Any = torch.func.vjp(evidence, *logs)
    value, pull = transformed
    return value, pull(torch.ones_like(value))
