"""Hand-written gradients: in full precision, and differentiable where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import hardshrink
from torch.utils._pytree import tree_flatten, tree_unflatten

from ._choices import flushed
from ._transforms import by_operations, provenance_of, transforming, with_provenance

_AS_IT_IS = nullcontext()
BATCHED = torch._C._dispatch_key_parse("Batched")  # weights in jacobian(vectorize=True)


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Context with ``torch.autocast`` disabled on the device of ``like``."""
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return _AS_IT_IS
    return torch.autocast(kind, enabled=False)


def at_least_single(tensor: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def differentiable_gradient(
    value: Callable[..., Tensor], inputs: Sequence[Tensor | None], weights: Tensor
) -> list[Tensor | None]:
    """Differentiable gradient of ``value(*inputs)``, weighted by ``weights``.

    ``value`` is made of operations of torch; second derivatives are for small problems, such as
    the Laplace approximation of a posterior. None for inputs that need no gradient.
    """
    with torch.enable_grad():  # one input may be made of another: so a separate view of each
        views = [None if x is None else x.view_as(x) for x in inputs]
        differentiable = [x for x in views if x is not None and x.requires_grad]
        gradients = iter(
            torch.autograd.grad(
                value(*views), differentiable, weights, create_graph=True, materialize_grads=True
            )
        )
    return [None if x is None or not x.requires_grad else next(gradients) for x in views]


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Checkpointed ``function(*arguments)``: recomputed in the backward pass, not stored.

    The values are computed as without gradients; on the way back the function is called again, by
    operations of torch, as within transforms. Arguments and result are tensors, or tuples, lists
    and dictionaries of them. The graph has one node, of all that is returned.
    (As ``torch.utils.checkpoint``, whose first call takes seconds, in which it loads a compiler.)
    """
    if not torch.is_grad_enabled() or transforming():
        return function(*arguments)
    given, form = tree_flatten(arguments)
    places = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad]
    if not places:
        return function(*arguments)
    found: list[Any] = []

    def parts(*inputs: Tensor) -> tuple[list[Any], Any]:
        leaves = list(given)
        for place, x in zip(places, inputs):
            leaves[place] = x
        return tree_flatten(function(*tree_unflatten(leaves, form)))

    def joined(leaves: list[Any]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in leaves if _is_float(part)])

    def twin(*inputs: Tensor) -> Tensor:
        return joined(by_operations(parts, *inputs)[0])

    def forward(*inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor | None]]]:
        def gradient(weights: Tensor) -> list[Tensor | None]:
            slopes = differentiable_gradient(twin, inputs, weights)
            return [None if x is None else x.detach() for x in slopes]

        found.extend(parts(*inputs))
        return joined(found[0]), gradient

    others = [x for i, x in enumerate(given) if isinstance(x, Tensor) and i not in places]
    flat = with_gradient(forward, twin, *(given[place] for place in places), also=others)
    leaves, shape = found
    pieces = iter(flat.split([part.numel() for part in leaves if _is_float(part)]))
    leaves = [
        next(pieces).reshape(part.shape).to(part.dtype) if _is_float(part) else part
        for part in leaves
    ]
    return tree_unflatten(leaves, shape)


def recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: gradient checkpointing, which recomputes ``function`` in the backward pass."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments, **options)
        return recomputed(partial(function, **options), *arguments)

    return call


def _is_float(part: Any) -> bool:
    return isinstance(part, Tensor) and part.is_floating_point()


Forward = Callable[..., tuple[Tensor, Callable[[Tensor], Sequence[Tensor | None]]]]


def with_gradient(
    forward: Forward,
    twin: Callable[..., Tensor],
    *inputs: Tensor,
    also: Sequence[Tensor | None] = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Evaluate ``forward(*inputs)`` with the hand-written gradient that it returns.

    Args:
        forward: Returns the value, and a function of weights of the value's shape that returns the
            derivatives of the weighted sum by each of the inputs; called with constants.
        twin: The same value by differentiable operations of torch: for derivatives of the gradient,
            and within the transforms of ``torch.func``.
        *inputs: Tensors.
        also: Other tensors that the gradient reads, such as indices.
        dtype: What the gradients of inputs in a wider dtype are going to be converted to; what
            would be subnormal then is zero.

    Raises:
        RuntimeError: On the way back, if one of them has been changed in place since.
    """
    if transforming():
        return twin(*inputs)
    tracked = provenance_of(inputs)
    if not torch.is_grad_enabled():
        return cast(Tensor, with_provenance(tracked, flushed, forward, *inputs)[0])
    arguments = forward, twin, also, dtype, *inputs
    return cast(Tensor, with_provenance(tracked, _WithGradient.apply, *arguments))


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Forward, twin: Callable[..., Tensor], also: Sequence[Tensor],
        dtype: torch.dtype | None, *inputs: Tensor,
    ) -> Tensor:  # fmt: skip
        value, ctx.gradient = flushed(forward, *inputs)
        ctx.save_for_backward(*inputs, *also)
        ctx.twin, ctx.dtype = twin, dtype
        return value.detach()  # not one that the gradient may hold: they would hold each other

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors[: len(ctx.needs_input_grad) - 4]  # raises if one was changed
        again = torch.is_grad_enabled()  # the gradient will itself be differentiated
        with full_precision(weights):
            if again or transforming() or torch._C._dispatch_keys(weights).has(BATCHED):
                gradients = differentiable_gradient(ctx.twin, inputs, weights)
            else:
                gradients = flushed(ctx.gradient, weights)
        if ctx.dtype is not None:
            least = torch.finfo(ctx.dtype).tiny
            gradients = [x if x is None else hardshrink(x, least) for x in gradients]
        return None, None, None, None, *gradients
