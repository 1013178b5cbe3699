"""``Checkpoint``: the state of a long fit in one file, from which the fit can resume.

Descriptions of numbers, text, shapes and a hash of the data tell whether it is the same fit. A
file is replaced atomically, holds numbers and text only, and can execute nothing. On a CPU a fit
that was killed and resumed ends with the same bits as one that never was.
"""

from __future__ import annotations

import inspect
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions.utils import lazy_property
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from ..data.batches import Parts
from ..data.sequences import Sequences
from .files import read_tensors, write_tensors

SECONDS = 10.0  # between two saves
VERSION = 9  # of what fits save
CURE = "Choose another file, or delete it to start afresh."


class Checkpoint:
    """Saves the state of a fit to a file, and loads it.

    Args:
        path: A file; its directory must exist.
        identity: Description of the fit; a file of another fit is refused.
        generators: Sources of randomness besides torch's global ones.
        writes: Whether to write: one of several processes does.

    Raises:
        ValueError: If ``path`` is a directory, or the one above it does not exist.
    """

    def __init__(
        self,
        path: str | Path,
        identity: dict[str, Any],
        generators: tuple[torch.Generator | None, ...] = (),
        writes: bool = True,
    ) -> None:
        self.path = Path(path)
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(
                f"checkpoint: there is no directory {self.path.parent}, or {path} is a directory."
            )
        self.identity = identity | {"seed": torch.initial_seed()}
        self.generators = [generator for generator in generators if generator is not None]
        self.writes = writes
        self.saved = time.perf_counter()

    def resume(self, restore: Callable[[dict[str, Any]], None], tensors: Iterable[Tensor]) -> bool:
        """Continue from the state saved last; returns whether there is one.

        Random number generators are restored as well: all of it, or nothing.

        Args:
            restore: Takes the state. It changes ``tensors``, and what nobody else will use.
            tensors: What has to be as it was after an error.

        Raises:
            ValueError: If the file is damaged, or of another fit: it names the difference.
        """
        if not self.path.exists():
            return False
        saved, meta = read_tensors(self.path)
        if (meta.get("kind"), meta.get("version")) != ("checkpoint", VERSION):
            raise ValueError(
                f"checkpoint {self.path} holds something else, or is of another version of this "
                f"package. {CURE}"
            )
        if (differing := difference(meta.get("identity"), self.identity)) is not None:
            path, there, here = differing
            raise ValueError(
                f"checkpoint {self.path} belongs to another fit: its {path} is {there}, and "
                f"here it is {here}. {CURE}"
            )
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
        numbers = self._random()
        try:
            state = _unpack(saved, meta)
            restore(state)
            self._set_random(state["random"])
        except Exception as error:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            self._set_random(numbers)
            raise ValueError(
                f"checkpoint {self.path} does not fit this fit ({type(error).__name__}: {error}). "
                f"{CURE}"
            ) from error
        return True

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        return self.writes and time.perf_counter() - self.saved >= SECONDS

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file by one of ``state``: nested dicts and lists of tensors and numbers."""
        if not self.writes:
            return
        tensors, packed = _pack(state | {"random": self._random()})
        meta = {"kind": "checkpoint", "version": VERSION, "identity": self.identity}
        write_tensors(self.path, tensors, meta | packed)
        self.saved = time.perf_counter()

    def _random(self) -> dict[str, Any]:
        """The states of random number generators."""
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "own": [generator.get_state() for generator in self.generators],
        }

    def _set_random(self, random: dict[str, Any]) -> None:
        torch.set_rng_state(random["cpu"])
        for device, numbers in enumerate(random["cuda"]):
            torch.cuda.set_rng_state(numbers, device)
        for generator, numbers in zip(self.generators, random["own"], strict=True):
            generator.set_state(numbers)


def _pack(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state by number, and all else as JSON can hold it."""
    leaves, form = tree_flatten(state)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | str | None):
            raise TypeError(
                f"a checkpoint can hold tensors, numbers and text; got {type(leaf).__name__}. "
                "Choose an optimizer and a schedule whose state_dict() holds nothing else."
            )
    tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tensors, {"form": treespec_dumps(form), "leaves": json.dumps(others)}


def _unpack(tensors: dict[str, Tensor], meta: dict[str, Any]) -> dict[str, Any]:
    """The state that :func:`_pack` packed."""
    leaves = [tensors.get(str(i), leaf) for i, leaf in enumerate(json.loads(meta["leaves"]))]
    state: dict[str, Any] = tree_unflatten(leaves, treespec_loads(meta["form"]))
    return state


LONGEST = 200  # characters of a value in an error
_SIMPLE = (bool, int, float, str, Path, Tensor, np.ndarray, np.generic, list, tuple)
_BOOKKEEPING = set(vars(PyroModule(""))) | {"training"}
_OF_MODULES = ("_buffers", "_parameters", "_modules", "_pyro_samples")


def describe(item: Any, depth: int = 3) -> Any:
    """Description of ``item`` to be compared, for JSON; of objects within others to a depth."""
    if isinstance(item, float) and math.isfinite(item):
        return float(item)
    if isinstance(item, float | Path | torch.dtype | torch.device):
        return str(item)
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(item)
        kind = f"{tuple(tensor.shape)} {tensor.dtype}"
        point = tensor.requires_grad and tensor.is_leaf  # its value is the fit's to change
        return kind if point else f"{kind} {digits([tensor])}"
    if isinstance(item, torch.Generator):
        return item.initial_seed()
    if isinstance(item, Sequences | Parts):
        return fingerprint(item)
    if isinstance(item, dict):
        return {str(name): describe(value, depth) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [describe(part, depth) for part in item]
    if isinstance(item, partial):
        return describe({"function": item.func, "arguments": item.args} | item.keywords)
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
