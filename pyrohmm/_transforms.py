"""Transforms of ``torch.func``, and ``torch.compile``: they take only operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Decorator: ``torch.compile`` leaves ``function``, which reads values, as it is.

    As ``torch.compiler.disable``, which loads the compiler, but only where something is compiled.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


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


def gradients(
    function: Callable[..., Tensor], *arguments: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Values ``(*B)`` of ``function`` and the gradients of their sum by all arguments."""
    if transforming():
        return evidence_and_gradient(function, *arguments)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [  # tensors made in inference mode cannot ask for gradients
            (part.clone() if part.is_inference() else part.detach()).requires_grad_()
            for part in arguments
        ]
        value = function(*leaves)
        found = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    return value.detach(), found
