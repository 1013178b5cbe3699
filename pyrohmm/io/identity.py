"""Descriptions that a checkpoint compares: numbers, text, shapes, and a hash of the data.

Compared are the numbers, text, paths and tensors that arguments are or keep as attributes, the
shapes of parameters, the buffers of modules, and functions and classes by name. Not compared are
the code of functions and classes, what they read from elsewhere (closures, globals, class
attributes), and the values of parameters: for those a fit has a ``name``.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions.utils import lazy_property

from ..data.batches import Parts
from ..data.sequences import Sequences

LONGEST = 200  # characters of a value in an error
_SIMPLE = (bool, int, float, str, Path, Tensor, np.ndarray, np.generic, list, tuple)
_BOOKKEEPING = set(vars(PyroModule(""))) | {"training"}
_OF_MODULES = ("_buffers", "_parameters", "_modules", "_pyro_samples")


def describe(item: Any, depth: int = 3) -> Any:
    """Description of ``item`` to be compared, for JSON; of objects within others to a depth."""
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, float):
        return float(item) if math.isfinite(item) else str(item)
    if isinstance(item, Path | torch.dtype | torch.device):
        return str(item)
    if isinstance(item, np.ndarray | np.generic):
        item = torch.as_tensor(item)
    if isinstance(item, Tensor):
        kind = f"{tuple(item.shape)} {item.dtype}"
        return kind if item.requires_grad and item.is_leaf else f"{kind} {digits([item])}"
    if isinstance(item, torch.Generator):
        return item.initial_seed()
    if isinstance(item, Sequences | Parts):
        return fingerprint(item)
    if isinstance(item, dict):
        return {str(name): describe(value, depth) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [describe(part, depth) for part in item]
    if isinstance(item, partial):
        return {"function": describe(item.func), "arguments": describe(item.args)} | describe(
            item.keywords
        )
    name = getattr(item, "__qualname__", type(item).__qualname__)
    if not depth or hasattr(item, "__qualname__") or isinstance(item, Trace):
        return name
    below = depth - (not isinstance(item, nn.Module))
    inner = {key: describe(value, below) for key, value in _attributes(item).items()}
    return {"class": name} | inner if inner else name


def difference(saved: Any, here: Any, path: str = "") -> tuple[str, str, str] | None:
    """First difference of two descriptions: its path, and both values."""
    if isinstance(saved, dict) and isinstance(here, dict):
        for name in here | saved:
            place = f"{path}.{name}" if path else name
            if (found := difference(saved.get(name), here.get(name), place)) is not None:
                return found
        return None
    same = saved == here and type(saved) is type(here)
    return None if same else (path, _short(saved), _short(here))


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


def _attributes(item: Any) -> dict[str, Any]:
    """The attributes that an object keeps, without caches and private objects."""
    kept = dict(getattr(item, "__dict__", {}))
    if isinstance(item, nn.Module):
        inner = [kept.get(name, {}) for name in _OF_MODULES]
        kept = {name: value for name, value in kept.items() if name not in _BOOKKEEPING}
        kept |= {name: value for part in inner for name, value in part.items()}
    free = getattr(type(item), "may_differ", ())  # and the fit resumes all the same
    return {
        name: value
        for name, value in kept.items()
        if not (name.startswith("_lazy_") or name in free)
        and (isinstance(value, _SIMPLE) or not name.startswith("_"))
        and not isinstance(
            inspect.getattr_static(type(item), name, None), cached_property | lazy_property
        )
    }


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
