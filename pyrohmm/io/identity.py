"""What a fit is: everything that enters its objective and its steps, in numbers and text.

Objects are described by the attributes they keep, functions by their names, their code and the
values they refer to, tensors by hashes. No list says which: an argument that a class or a fit gets
one day is compared as well. Left out are the values of parameters that are fitted, which change;
caches; and the code of the libraries, which say themselves when they change.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable
from enum import Enum
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions.utils import lazy_property

from ..data.parts import Parts
from ..data.sequences import Sequences

LIBRARIES = {"builtins", "numpy", "pyro", "pyrohmm", "scipy", "torch"}  # compared by name only
LONGEST = 200  # characters of a value in an error
_BOOKKEEPING = set(vars(PyroModule(""))) | {"training"}
_SIMPLE = (bool, int, float, str, Tensor, np.ndarray, np.generic)


def describe(item: Any) -> Any:
    """All that ``item`` consists of, as JSON can hold it."""
    return _Description().of(item)


def difference(saved: Any, here: Any, path: str) -> tuple[str, str, str] | None:
    """Where two descriptions differ first: its path, and what each of them has there."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(saved, dict) and isinstance(here, dict):
        names = [*here, *(name for name in saved if name not in here)]
        pairs = [(f"{path}.{name}", saved.get(name), here.get(name)) for name in names]
    elif isinstance(saved, list) and isinstance(here, list) and len(saved) == len(here):
        if _has_names(here):
            pairs = [(f"{path}[{i}]", *parts) for i, parts in enumerate(zip(saved, here))]
    if not pairs:
        same = saved == here and type(saved) is type(here)
        return None if same else (path, _short(saved), _short(here))
    inner = (difference(one, other, name) for name, one, other in pairs)
    return next((differing for differing in inner if differing is not None), None)


def fingerprint(data: Sequences | Parts) -> str:
    """A short hash of sequences."""
    if isinstance(data, Parts):
        return f"{len(data)} in {data.num_parts} parts, " + "; ".join(map(fingerprint, data))
    parts = data.values, data.lengths, data.observed, data.labels, data.covariates, data.times
    return f"{tuple(data.values.shape)} of {data.total}, {digits(parts)}"


def digits(tensors: Iterable[Tensor | None]) -> str:
    """A short hash of tensors, some of which may be None."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            total = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), total)
    return f"{total:08x}"


class _Description:
    """Describes objects, each once: those that are met again are named by where they were first."""

    def __init__(self) -> None:
        self.met: dict[int, Any] = {}  # keeps them, so that no other gets their number

    def of(self, item: Any) -> Any:
        """The description of ``item``."""
        simple, value = _simple(item)
        if simple:
            return value
        if isinstance(item, dict):
            return {str(name): self.of(value) for name, value in item.items()}
        if isinstance(item, list | tuple):
            return [self.of(part) for part in item]
        if isinstance(item, set | frozenset):
            return sorted(repr(self.of(part)) for part in item)
        if id(item) in self.met:
            return "as above"
        self.met[id(item)] = item
        if isinstance(item, partial):
            return {"function": self.of(item.func), "arguments": self.of(item.args),
                    **self.of(item.keywords)}  # fmt: skip
        if isinstance(item, MethodType):
            return {"function": self.of(item.__func__), "of": self.of(item.__self__)}
        if isinstance(item, FunctionType):
            return self._function(item)
        return self._object(item)

    def _function(self, function: FunctionType) -> dict[str, Any]:
        """Its name, its code, and the values that it refers to."""
        values = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        refers = {name: cell.cell_contents for name, cell in values.items() if _is_filled(cell)}
        defaults = function.__defaults__, function.__kwdefaults__
        described = {"function": function.__qualname__}
        if not _is_of_library(function):
            described["code"] = _code(function.__code__)
            known = function.__globals__
            for name in sorted(_names(function.__code__) & known.keys()):
                value, same = known[name], known.get("__name__")
                helper = isinstance(value, FunctionType) and value.__module__ == same
                if isinstance(value, _SIMPLE) or helper:
                    refers.setdefault(name, value)
        described |= {name: self.of(value) for name, value in refers.items()}
        if any(defaults):
            described["defaults"] = self.of(defaults)
        return described

    def _object(self, item: Any) -> Any:
        """Its class, and the attributes it keeps."""
        kind = type(item)
        described: dict[str, Any] = {"class": kind.__qualname__}
        if isinstance(item, Trace):  # what a guide was made by: random values
            return described
        if not _is_of_library(kind):
            described["code"] = _class_code(kind)
        for name, value in _attributes(item).items():
            described[name] = self.of(value)
        return described if len(described) > 1 else kind.__qualname__


def _simple(item: Any) -> tuple[bool, Any]:
    """Whether ``item`` is a single value, and that value."""
    if item is None or isinstance(item, bool | int | str):
        return True, item.value if isinstance(item, Enum) else item
    if isinstance(item, float):
        return True, float(item) if math.isfinite(item) else str(item)
    if isinstance(item, Tensor):
        kind = f"{tuple(item.shape)} {item.dtype}"
        return True, kind if item.requires_grad and item.is_leaf else f"{kind} {digits([item])}"
    if isinstance(item, np.generic):
        return _simple(item.item())
    if isinstance(item, np.ndarray):
        return True, f"{item.shape} {item.dtype} {zlib.crc32(item.tobytes()):08x}"
    if isinstance(item, bytes):
        return True, f"{zlib.crc32(item):08x}"
    if isinstance(item, torch.Generator):
        return True, f"seed {item.initial_seed()}"
    if isinstance(item, Sequences):
        return True, fingerprint(item)
    if isinstance(item, type | ModuleType) or inspect.isbuiltin(item):
        return True, getattr(item, "__qualname__", item.__name__)
    if isinstance(item, complex | range | Enum | torch.dtype | torch.device):
        return True, str(item)
    return False, None


def _attributes(item: Any) -> dict[str, Any]:
    """The attributes that an object keeps, without caches and what a fit makes of it."""
    kept = dict(getattr(item, "__dict__", {}))
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name) and not name.startswith("__"):
                kept[name] = getattr(item, name)
    if isinstance(item, nn.Module):
        inner = [kept.get(name, {}) for name in ("_buffers", "_parameters", "_modules")]
        inner += [kept.get(name, {}) for name in ("_pyro_samples", "_pyro_params")]
        plain = {name: value for name, value in kept.items() if name not in _BOOKKEEPING}
        kept = {name: value for part in (plain, *inner) for name, value in part.items()}
    return {
        name: value
        for name, value in kept.items()
        if not _is_cache(type(item), name)
        and name not in getattr(type(item), "may_differ", ())  # and the fit resumes all the same
        and not (
            name.startswith("_") and (value is None or isinstance(value, torch.optim.Optimizer))
        )
    }


def _is_cache(kind: type, name: str) -> bool:
    """Whether an attribute is computed from others when it is first read."""
    if name.startswith("_lazy_"):  # by this package
        return True
    static = inspect.getattr_static(kind, name, None)
    return isinstance(static, cached_property | lazy_property)


def _is_filled(cell: Any) -> bool:
    """Whether a variable of an outer function has a value yet."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_of_library(item: Any) -> bool:
    return (item.__module__ or "builtins").partition(".")[0] in LIBRARIES


def _class_code(kind: type) -> str:
    """A short hash of the methods of a class and its bases, but those of libraries."""
    total = 0
    for base in kind.__mro__:
        if not _is_of_library(base):
            for name, member in sorted(vars(base).items()):
                function = inspect.unwrap(getattr(member, "__func__", member))
                if isinstance(function, FunctionType):
                    total = zlib.crc32(f"{name} {_code(function.__code__)}".encode(), total)
    return f"{total:08x}"


def _code(code: CodeType) -> str:
    """A short hash of compiled code: that of the source, but for its comments and layout."""
    constants = [
        _code(constant) if isinstance(constant, CodeType)
        else repr(sorted(constant, key=repr)) if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]  # fmt: skip
    text = repr((code.co_names, code.co_varnames, code.co_freevars, constants))
    return f"{zlib.crc32(text.encode(), zlib.crc32(code.co_code)):08x}"


def _names(code: CodeType) -> set[str]:
    """The names that code reads, that of inner functions included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*(_names(part) for part in inner))


def _has_names(item: Any) -> bool:
    """Whether a description has parts with names, by which to say what differs."""
    return isinstance(item, dict) or (isinstance(item, list) and any(map(_has_names, item)))


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
