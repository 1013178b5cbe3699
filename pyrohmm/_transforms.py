"""Support for ``torch.func``, ``torch.compile`` and Pyro's provenance tracking."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from pyro.ops.provenance import ProvenanceTensor, track_provenance
from torch import Tensor

from ._choices import flushed

Function = TypeVar("Function", bound=Callable[..., Any])
exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)  # of torch 2.7
NOTHING: frozenset[Any] = frozenset()
_PLAIN = {type(None), bool, int, float, str, torch.Size}  # what holds no tensor


def uncompiled(function: Function) -> Function:
    """Decorator: ``torch.compile`` leaves a function as it is, for it reads values.

    As ``torch.compiler.disable``, which loads the compiler, but only where something is compiled.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not exporting():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(Function, call)


def opaque(function: Function) -> Function:
    """Decorator of a query: :func:`uncompiled`, and one operation for Pyro's provenance.

    Its result has the provenance of the distribution and of all arguments: see
    :class:`pyro.ops.provenance.ProvenanceTensor`, by which Pyro finds what a site depends on, and
    which neither functions of autograd nor compiled loops pass on.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner, *given = args
        if "provenance" not in owner.__dict__:
            owner.provenance = provenance_of(tensors_of(owner.__dict__))
        tracked = owner.provenance
        for part in given:
            if type(part) is ProvenanceTensor:
                tracked |= part._provenance
        if not tracked:
            return function(*args, **kwargs)
        return with_provenance(tracked, function, *args, **kwargs)

    return cast(Function, uncompiled(call))


def with_provenance(
    tracked: frozenset[Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``function`` on plain tensors, and attach this provenance to the result."""
    if not tracked:
        return function(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        found = function(*args, **kwargs)
    return track_provenance(found, tracked)


def provenance_of(tensors: Iterable[Any]) -> frozenset[Any]:
    """Union of the provenance of tensors."""
    tracked = NOTHING
    for x in tensors:
        if type(x) is ProvenanceTensor:
            tracked |= x._provenance
    return tracked


def tensors_of(part: Any) -> list[Tensor]:
    """All tensors that ``part`` holds, those of objects within it included."""
    found, seen, rest = [], set(), [part]
    while rest:
        part = rest.pop()
        if type(part) in _PLAIN or id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple):
            rest.extend(part)
        else:
            named = part if isinstance(part, dict) else getattr(part, "__dict__", {})
            rest.extend(named.values())
    return found


_by_operations: ContextVar[bool] = ContextVar("pyrohmm_by_operations", default=False)


def by_operations(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` with custom gradients and compiled loops replaced by torch operations."""
    token = _by_operations.set(True)
    try:
        return function(*args)
    finally:
        _by_operations.reset(token)


def detached(owner: Any) -> Any:
    """Copy of what holds tensors, without their gradients; itself if none has one."""
    held = tensors_of(owner)
    if not any(part.requires_grad for part in held):
        return owner
    return copy.deepcopy(owner, {id(part): part.detach() for part in held})


def beside(found: Tensor, owner: Any) -> Any:
    """Detach the tensors of ``owner`` where ``found`` needs no gradient.

    A product of a constant with what has a gradient would have a part of its gradient.
    """
    return owner if found.requires_grad or not torch.is_grad_enabled() else detached(owner)


def transforming() -> bool:
    """Whether a transform of ``torch.func`` or a tracer is active.

    Or :func:`by_operations`.

    They take neither functions of autograd with a backward of their own nor compiled loops, and
    within ``vmap`` values cannot be read: not to check them, and not to choose the way. Nor can
    they by ``torch.jit.trace``, ``make_fx`` and ``torch.export``, whose graph is for other values.
    """
    return bool(
        _by_operations.get()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        or exporting()
    )


BROADCAST = "In place of vmap, give parameters or lengths batch dimensions, which broadcast."


def refuse_transforms(what: str, cure: str = BROADCAST) -> None:
    """Raise within ``torch.func`` transforms and tracers: ``what`` depends on tensor values."""
    if transforming():
        text = f"{what} cannot be computed within vmap, grad and other transforms of torch.func"
        raise NotImplementedError(f"{text}, for it reads values. Call it outside of them. {cure}")


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

        def solved() -> tuple[Tensor, tuple[Tensor, ...]]:
            value = function(*leaves)
            found = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
            return value.detach(), found

        return flushed(solved)
