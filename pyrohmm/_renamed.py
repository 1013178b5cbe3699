"""Old names of arguments and attributes: they work on, with a warning that names the new one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now called {new}", DeprecationWarning, stacklevel=3)


def arguments(**names: str) -> Callable[[Function], Function]:
    """A decorator of a function or class whose keyword arguments have new names: ``old="new"``."""

    def decorate(function: Function) -> Function:
        if isinstance(function, type):  # a class, of the arguments that make one
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{old} is the old name of {names[old]}: give {names[old]}.")
                _warn(old, names[old])
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def function(old: str, new: Function) -> Function:
    """The function ``new`` under its old name."""

    @wraps(new)
    def call(*args: Any, **kwargs: Any) -> Any:
        _warn(old, new.__name__)
        return new(*args, **kwargs)

    return call  # type: ignore[return-value]


def by_name(function: Function) -> Function:
    """A decorator of a function whose keyword-only arguments used to be given by place, as well."""
    kinds = inspect.signature(function).parameters
    count = sum(kind.kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds.values())

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        late = dict(zip([*kinds][count:], args[count:]))
        if late:
            _warn(f"an argument of {function.__name__} by place", f"{', '.join(late)}, by name")
        return function(*args[:count], **late, **kwargs)

    return call  # type: ignore[return-value]


def attribute(new: str) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes of a method's name an old name of the attribute ``new``."""

    def decorate(method: Callable[..., Any]) -> Any:
        old = method.__name__

        def read(owner: Any) -> Any:
            _warn(old, new)
            return getattr(owner, new)

        return property(read, doc=f"Old name of ``{new}``.")

    return decorate
