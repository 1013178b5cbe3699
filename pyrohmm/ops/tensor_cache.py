"""Caches of values derived from a tensor, until it is modified or freed, and of properties.

An accelerator is given the indices of a batch once, not at every step of a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._transforms import transforming

Made = TypeVar("Made")

_entries: Any = WeakTensorKeyDictionary()


def cached(source: Tensor, make: Callable[[], Made], *others: Any) -> Made:
    """Return ``make()``, cached by ``tensor`` and ``others`` while the tensor is unchanged.

    The others are the same objects, or equal bytes.
    """
    versions = None if transforming() else _versions((source, *others))
    if versions is None:
        return make()
    entries = _entries.setdefault(source, [])
    for known, parts, made in entries:
        if known == versions and _same(parts, others):
            return made
    made = make()
    entries[:] = [*entries[-3:], (versions, others, made)]  # a few; of older ones none is asked
    return made


def _versions(values: Iterable[Any]) -> dict[int, int] | None:
    """Version counters of all tensors in ``values``, the cache key.

    None if whether one of them is written to is not known, as in inference mode.
    """
    found: dict[int, int] = {}
    for value in values:
        if isinstance(value, Tensor):
            if value.is_inference():
                return None
            found[id(value)] = value._version
        elif isinstance(value, dict | tuple | list):
            inner = _versions(value.values() if isinstance(value, dict) else value)
            if inner is None:
                return None
            found |= inner
    return found


def _same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether cached and given arguments are identical, or equal bytes."""
    return len(parts) == len(others) and all(
        a is b or (isinstance(a, bytes) and a == b) for a, b in zip(parts, others)
    )


def cached_on(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy of ``tensor`` on ``device``, cached; the tensor itself if it is there."""
    if tensor.device == device:
        return tensor
    return cached(tensor, lambda: tensor.to(device, non_blocking=True), str(device).encode())


class lazy(Generic[Made]):  # a decorator, like functools.cached_property
    """Cached property, computed anew after a tensor of its object is written to.

    And unless it then had no gradient and now needs one: what is read first under ``torch.no_grad``
    has none, and would lose that of all later uses.
    """

    def __init__(self, compute: Callable[[Any], Made]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = f"_lazy_{name}"

    def __get__(self, owner: Any, kind: type | None = None) -> Made:
        if owner is None:
            return self  # type: ignore[return-value]  # of the class, with its docstring
        wanted, state = torch.is_grad_enabled(), owner.__dict__
        made, with_gradient, known = state.get(self.place, (None, False, None))
        versions = _versions(state[name] for name in state if not name.startswith("_lazy_"))
        if known is None or known != versions or (wanted and not with_gradient):
            made = self.compute(owner)
            state[self.place] = made, wanted, versions
        return made
