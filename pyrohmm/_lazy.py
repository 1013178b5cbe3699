"""Properties that are computed when they are read, with their gradient where one is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

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
