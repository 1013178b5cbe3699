"""The boundary of the package: arguments that are not what their annotations say are refused.

:func:`checked` reads the annotations of a function once, when it is first called. Of tensors it
asks neither shape nor values, which the function knows more of. NumPy's arrays become tensors where
these are asked for, and its numbers Python's.

``torch.compile`` stops here too: functions that read values would break its graph at each of them,
so that all of a checked one runs as it is, at the price of one break.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, update_wrapper
from numbers import Integral, Real
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution

from ._arrays import to_tensor

Thing = TypeVar("Thing", bound=Callable[..., Any])
Test = Callable[[Any], bool]
Shape = Annotated[Sequence[int], "sizes"]
_CURE = " Convert it with torch.as_tensor."
_WORDS: dict[Any, str] = {
    Tensor: "a torch.Tensor",
    NoneType: "None",
    float: "a number",
    Shape: "a shape, integers of at least 0",
}


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``; the ends belong to it unless it is ``open``."""

    low: float
    high: float = math.inf
    open: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a number, or each of a sequence, lies inside; other things may be anything."""
        if isinstance(value, list | tuple):
            return all(map(self.holds, value))
        if not isinstance(value, Real):
            return True
        value = float(value)
        return self.low < value < self.high if self.open else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"lie between {self.low:g} and {self.high:g}{', both excluded' * self.open}"
        return "be positive" if self == POSITIVE else f"be at least {self.low:g}"


POSITIVE, SHARE = Range(0, open=True), Range(0, 1)


def explained(**ranges: Range | None) -> Callable[[Thing], Thing]:
    """As :func:`checked`, for what computes with tensors, which may not fit together.

    Other inner errors, such as of a file or of a factorisation, pass with these as a note.

    Raises:
        ValueError: Also where shapes or dtypes do not fit: with those of all tensors.
    """
    return _decorator(ranges, of_tensors=True)


def checked(**ranges: Range | None) -> Callable[[Thing], Thing]:
    """Decorate a function, or all methods that a class defines, to refuse wrong arguments.

    Args:
        **ranges: By the name of an argument, where its numbers must lie; None for one of which
            the function itself asks more. All numbers must be finite.

    Raises:
        TypeError: (The decorated function.) If an argument is not of the type annotated.
        ValueError: If a number is not finite, or out of its range.
    """
    return _decorator(ranges, of_tensors=False)


def _decorator(ranges: Mapping[str, Range | None], of_tensors: bool) -> Callable[[Thing], Thing]:
    def decorate(thing: Any) -> Any:
        if not isinstance(thing, type):
            return _guarded(thing, ranges, of_tensors)
        for name, member in list(vars(thing).items()):
            function = getattr(member, "__func__", member)
            if isinstance(function, FunctionType) and (name[0] != "_" or name in _CALLED):
                guarded = _guarded(function, ranges, of_tensors)
                setattr(thing, name, guarded if member is function else type(member)(guarded))
        return thing

    return decorate


_CALLED = {"__init__", "__new__", "__call__"}
_OF_FIT = re.compile(  # words of errors about shapes, dtypes, devices and sizes
    r"\b(sizes?|shapes?|dim|dimension\w*|numel|elements?|equal|rank|broadcast\w*|ind(ex|ices)|"
    r"out of (range|bounds)|dtypes?|types?|cast|not implemented for|more than one value|"
    r"devices?|allocate|memory|matri(x|ces)|vectors?|[0-9]-?d|square|subscripts?|overflow|"
    r"tensor(s|list)?)\b",
    re.IGNORECASE,
)
_OF_ARGUMENTS = (TypeError, ValueError, ArithmeticError, MemoryError)
_INNER = (RuntimeError, LookupError, ArithmeticError, MemoryError, TypeError, ValueError)


def _guarded(function: Any, ranges: Mapping[str, Range | None], of_tensors: bool = False) -> Any:
    """``function``, which asks its arguments first."""
    names = tuple(inspect.signature(function).parameters)
    tests: dict[str, Test] = {}
    in_order: list[Test | None] = []
    prepare = partial(_prepare, function, ranges, tests, in_order)
    accept, explain, inner = partial(_accept, function, ranges), _explain, _INNER
    signature = inspect.signature
    compiling, as_it_is = torch.compiler.is_compiling, torch.compiler.disable

    def call(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return as_it_is(same)(*args, **kwargs)
        if not in_order:
            prepare()
        for place, (test, value) in enumerate(zip(in_order, args)):
            if test is not None and not test(value):
                args = (*args[:place], accept(names[place], test, value), *args[place + 1 :])
        for name, value in kwargs.items():
            if name in tests and not tests[name](value):
                kwargs[name] = accept(name, tests[name], value)
        return function(*args, **kwargs)

    def explained(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return as_it_is(same)(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except inner as error:
            if isinstance(error, NotImplementedError) and "not implemented for" not in str(error):
                raise  # of a subclass that lacks a method; torch's are of a dtype
            try:
                signature(function).bind(*args, **kwargs)
            except TypeError:  # what is missing has Python's error
                raise error from None
            explain(error, [*zip(names, args), *kwargs.items()])
            raise

    chosen: Any = explained if of_tensors else call
    # with the globals of the function: that is where doctest sees to which module it belongs; and
    # with code of its own, for which torch.compile finds what it compiled
    code = chosen.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
    same = FunctionType(code, inspect.unwrap(function).__globals__, closure=chosen.__closure__)
    return update_wrapper(same, function)


def _hints(function: Any) -> dict[str, Any]:
    """Annotations by name; Any where they name what only a type checker imports."""
    known = vars(sys.modules[__package__]) | inspect.unwrap(function).__globals__
    hints = {}
    for name, hint in function.__annotations__.items():
        try:
            hints[name] = eval(hint, known) if isinstance(hint, str) else hint
        except NameError:
            hints[name] = Any
    return hints


def _prepare(
    function: Any,
    ranges: Mapping[str, Range | None],
    tests: dict[str, Test],
    in_order: list[Test | None],
) -> None:
    """Make the tests of all arguments, by name and in their order."""
    hints, ordered = _hints(function), []
    for name, parameter in inspect.signature(function).parameters.items():
        test = _test(hints.get(name, Any))
        if test is None or parameter.kind in _VARIADIC:
            test = None
        elif name in ranges:
            inside = ranges[name]
            test = None if inside is None else _both(test, inside.holds)
        if test is not None:
            tests[name] = test
        ordered.append(test)
    in_order[:] = ordered  # at once: another thread may be here too


def _accept(
    function: Any, ranges: Mapping[str, Range | None], name: str, test: Test, value: Any
) -> Any:
    """What NumPy's array or number stands for; everything else that fails its test is refused."""
    if isinstance(value, np.generic) and test(value.item()):
        return value.item()
    if isinstance(value, np.ndarray | np.generic) and test(torch.zeros(1)):
        return to_tensor(name, value)
    return _refuse(function, ranges, name, value)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _both(first: Test, second: Test) -> Test:
    return lambda value: first(value) and second(value)


def _is_number(value: Any) -> bool:
    kind = type(value)
    known = kind is float or (isinstance(value, Real) and kind is not bool)
    return known and math.isfinite(value) and not isinstance(value, np.generic)


def _is_int(value: Any) -> bool:
    return type(value) is int or (
        isinstance(value, Integral) and not isinstance(value, bool | np.generic)
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_complex()


def _never(value: Any) -> bool:
    return False


def _is_device(value: Any) -> bool:
    try:
        return value is None or bool(torch.device(value))
    except (RuntimeError, TypeError):
        return False


def _is_shape(value: Any) -> bool:
    sizes = isinstance(value, Sequence) and all(isinstance(size, Integral) for size in value)
    return sizes and all(size >= 0 for size in value)


_TESTS: dict[Any, Test] = {
    Shape: _is_shape,
    torch.device | str: lambda value: value is not None and _is_device(value),
    torch.device | str | None: _is_device,
    int: _is_int,
    float: _is_number,
    bool: lambda value: isinstance(value, bool),
    Tensor: _is_tensor,
    Categorical: lambda value: isinstance(value, torch.distributions.Categorical),
    TorchDistribution: lambda value: isinstance(value, Distribution),  # Pyro's are of both kinds
}


def _test(hint: Any) -> Test | None:
    """Whether a value is of the type ``hint``; None if nothing can be said."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint in _TESTS:
        return _TESTS[hint]
    if origin in (typing.Union, UnionType):
        plain = tuple(filter(_is_plain, parts))
        tests = [_test(part) for part in parts if part not in plain]
        known = [test for test in tests if test is not None]
        if len(known) < len(tests):
            return None
        if len(known) > 1:
            return lambda value: isinstance(value, plain) or any(test(value) for test in known)
        (test,) = known or [_never]
        return lambda value: isinstance(value, plain) or test(value)
    if origin is Literal:
        return lambda value: any(value is part or value == part for part in parts)
    if origin is Callable:
        return callable
    kind = origin or hint
    if not _is_plain(kind):
        return callable if "__call__" in getattr(hint, "__dict__", {}) else None
    if parts and issubclass(kind, Iterable):
        inner = [test for test in map(_test, parts) if test is not None]
        return lambda value: isinstance(value, kind) and _parts_fit(value, inner)
    return lambda value: isinstance(value, kind)


def _is_plain(hint: Any) -> bool:
    """Whether a type is one that ``isinstance`` takes, and all that there is to ask."""
    known = hint not in _TESTS and hint is not Any
    return known and isinstance(hint, type) and getattr(hint, "_is_runtime_protocol", True)


def _parts_fit(value: Any, tests: list[Test]) -> bool:
    """Whether keys and values of a dict, or the elements of a list or tuple, pass their tests."""
    if isinstance(value, Mapping):
        return all(all(map(test, part)) for test, part in zip(tests, (value, value.values())))
    if isinstance(value, Tensor):
        return value.dim() > 0
    known = isinstance(value, list | tuple | str | bytes)
    return not known or all(all(map(test, value)) for test in tests)


def _refuse(function: Any, ranges: Mapping[str, Range | None], name: str, value: Any) -> NoReturn:
    """Raise: what was wanted, what came, and the cure."""
    hint = _hints(function)[name]
    number = isinstance(value, Real) and not isinstance(value, bool)
    test: Any = _test(hint)
    if name in ranges and test is not None and (number or test(value)):
        raise ValueError(f"{name} must {ranges[name]}{_kind(hint, value)}; got {value}.")
    if number and not math.isfinite(value) and test(0.0):
        raise ValueError(f"{name} must be finite; got {value}.")
    cure = _CURE if Tensor in (hint, *typing.get_args(hint)) else ""
    if typing.get_origin(hint) is Literal and isinstance(value, str):
        raise ValueError(f"{name} must be {_words(hint)}; got {value!r}.")
    if isinstance(value, Tensor) and value.dtype.is_complex:
        raise TypeError(f"{name} must be real; got complex numbers. Take .real, or .abs().")
    raise TypeError(f"{name} must be {_words(hint)}; got {_came(value)}.{cure}")


def _kind(hint: Any, value: Any) -> str:
    """Of what kind a number must be, if it is not of that."""
    wrong = int in (hint, *typing.get_args(hint)) and not isinstance(value, Integral)
    return " and an integer" if wrong and float not in typing.get_args(hint) else ""


def _explain(error: Exception, arguments: list[tuple[str, Any]]) -> None:
    """Raise an error with the shapes and dtypes of all tensors, if this one is about how they fit.

    One that names an argument says enough; and any other has another cause, which it tells.
    """
    names = [name for name, _ in arguments] + [
        re.escape(value) for name, value in arguments if name == "name" and isinstance(value, str)
    ]
    named = any(re.search(rf"\b{name}\b", str(error)) for name in names)
    if named or isinstance(error, torch.OutOfMemoryError):
        return
    came = [
        f"{name} of shape {tuple(value.shape)} and {value.dtype}"
        if isinstance(value, Tensor)
        else f"{name}: {_came(value)}"
        for name, value in arguments
        if name != "self"
    ]
    got = ", ".join(came)
    if not (isinstance(error, _OF_ARGUMENTS) or _OF_FIT.search(str(error))):
        error.add_note(f"The arguments were {got}.")
        return
    kind = TypeError if isinstance(error, TypeError) else ValueError
    raise kind(f"arguments must fit together, and into memory: {error}; got {got}.") from error


def _words(hint: Any) -> str:
    """A type in words: ``a torch.Tensor``, ``an int or None``, ``a list of str``."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, parts)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if hint in _WORDS:
        return _WORDS[hint]
    if origin is Callable:
        return "callable"
    name = (origin or hint).__name__
    if name == "Sequences":
        return name
    article = "an" if name[0] in "aeiouAEIO" or name[:2] == "HM" else "a"
    named = parts and issubclass(origin, Iterable) and getattr(parts[-1], "__name__", None)
    return f"{article} {name}{f' of {named}' if named else ''}"


def _came(value: Any) -> str:
    """What an argument is instead."""
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict) and value:
        inner = value.values() if isinstance(value, dict) else value
        return f"{kind} of {', '.join(sorted({type(part).__name__ for part in inner}))}"
    return f"{kind} {value!r}" if isinstance(value, str | Real) and kind != "bool" else kind
