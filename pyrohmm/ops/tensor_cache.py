"""Caches: of values derived from a tensor, until it is modified or freed, and of properties.

An accelerator is given the indices of a batch once, not at every step of a fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._transforms import transforming

Made = TypeVar("Made")

_entries: Any = WeakTensorKeyDictionary()


def cached(source: Tensor, make: Callable[[], Made], *others: Any) -> Made:
    """``make()``, or what it returned before for the same tensor, and the same ``others``.

    The others are the same objects, or equal bytes.
    """
    if source.is_inference() or transforming():  # whether it is written to is not known
        return make()
    version, entries = source._version, _entries.setdefault(source, [])
    for known, parts, made in entries:
        if known == version and _same(parts, others):
            return made
    made = make()
    entries[:] = [*entries[-3:], (version, others, made)]  # a few; of older ones none is asked
    return made


def _same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether they are the same objects, or equal bytes."""
    return len(parts) == len(others) and all(
        a is b or (isinstance(a, bytes) and a == b) for a, b in zip(parts, others)
    )


def cached_on(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` on ``device``; itself, if it is there."""
    if tensor.device == device:
        return tensor
    return cached(tensor, lambda: tensor.to(device, non_blocking=True), str(device).encode())


Value = TypeVar("Value")


class lazy(Generic[Value]):  # a decorator, like functools.cached_property
    """A property kept once it is computed, unless it then had no gradient and now needs one.

    What is read first under ``torch.no_grad`` has none, and would lose that of all later uses.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = f"_lazy_{name}"

    def __get__(self, owner: Any, kind: type | None = None) -> Value:
        if owner is None:
            return self  # type: ignore[return-value]  # of the class, with its docstring
        wanted = torch.is_grad_enabled()
        kept = owner.__dict__.get(self.place)
        if kept is None or (wanted and not kept[1]):
            kept = owner.__dict__[self.place] = self.compute(owner), wanted
        value: Value = kept[0]
        return value
