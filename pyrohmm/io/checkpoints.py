"""``Checkpoint``: where a long fit stands, in one file, so that it can go on from there.

A file is replaced as a whole or not at all, holds numbers and text only, and can execute nothing.
On a CPU a fit that was killed and goes on ends with the same bits as one that never was.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.sequences import Sequences
from .files import read_tensors, write_tensors

SECONDS = 10.0  # between two saves
VERSION = 3  # of what fits save


class Checkpoint:
    """Saves the state of a fit to ``path``, and finds it again.

    Args:
        path: A file; its directory must exist.
        identity: What the fit is: names, shapes, options. A file of another fit is refused.
        generators: Sources of randomness besides torch's global ones.
        writes: Whether to write at all: one of several processes does.

    Raises:
        FileNotFoundError: If the directory does not exist.
    """

    def __init__(
        self,
        path: str | Path,
        identity: dict[str, Any],
        generators: tuple[torch.Generator | None, ...] = (),
        writes: bool = True,
    ) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"checkpoint: there is no directory {self.path.parent}.")
        if self.path.is_dir():
            raise ValueError(f"checkpoint must be a file; {self.path} is a directory.")
        self.identity = identity
        self.generators = [each for each in generators if each is not None]
        self.writes = writes
        self.saved = time.perf_counter()

    def load(self) -> dict[str, Any] | None:
        """The state saved last, if there is one; sources of randomness are set to where they were.

        Raises:
            ValueError: If the file is damaged, or of another fit: it names what differs.
        """
        if not self.path.exists():
            return None
        tensors, meta = read_tensors(self.path)
        if meta.get("kind") != "checkpoint":
            raise ValueError(f"checkpoint {self.path} holds something else; choose another file.")
        if meta.get("version") != VERSION:
            raise ValueError(
                f"checkpoint {self.path} was written by another version of this package. Choose "
                "another file, or delete it to start afresh."
            )
        for name, wanted in self.identity.items():
            found = meta["identity"].get(name)
            if found != wanted:
                raise ValueError(
                    f"checkpoint {self.path} belongs to another fit: its {name} is {found!r}, and "
                    f"here it is {wanted!r}. Choose another file, or delete it to start afresh."
                )
        state = _unpack(meta["state"], tensors)
        random = state.pop("random")
        torch.set_rng_state(random["cpu"])
        for index, each in enumerate(random["cuda"]):
            torch.cuda.set_rng_state(each, index)
        for generator, each in zip(self.generators, random["own"]):
            generator.set_state(each)
        return state

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        return self.writes and time.perf_counter() - self.saved >= SECONDS

    def save(self, state: dict[str, Any]) -> None:
        """Replace what was saved by ``state``: nested dicts and lists of tensors and numbers."""
        if not self.writes:
            return
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        random = {
            "cpu": torch.get_rng_state(),
            "cuda": cuda,
            "own": [each.get_state() for each in self.generators],
        }
        tensors: dict[str, Tensor] = {}
        packed = _pack(state | {"random": random}, tensors, "state")
        meta = {"kind": "checkpoint", "version": VERSION, "identity": self.identity}
        meta["state"] = packed
        write_tensors(self.path, tensors, meta)
        self.saved = time.perf_counter()


def fingerprint(data: Sequences) -> str:
    """A few digits that differ between sets of data."""
    parts = (data.values, data.lengths, data.observed, data.labels, data.covariates)
    return f"{tuple(data.values.shape)} {digits(parts)}"


def constants(*parts: Any) -> str:
    """A few digits that differ between models: what of their modules no fit changes."""
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    return digits(
        tensor
        for module in modules
        for tensor in (
            *module.buffers(),
            *(each for each in module.parameters() if not each.requires_grad),
        )
    )


def settings(item: Any) -> Any:
    """What ``item`` was made with, as far as numbers and text say it, as what JSON can say."""
    if isinstance(item, Tensor):
        return digits([item])
    if isinstance(item, partial):
        return [settings(each) for each in (item.func, item.args, item.keywords)]
    if isinstance(item, dict):
        return {str(key): settings(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [settings(each) for each in item]
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else str(item)
    return getattr(item, "__qualname__", type(item).__name__)


def digits(tensors: Iterable[Tensor | None]) -> str:
    """A few digits that differ between tensors, some of which may be None."""
    total = 0
    for each in tensors:
        if each is not None:
            total = zlib.crc32(each.detach().cpu().contiguous().numpy().tobytes(), total)
    return f"{total:08x}"


def _pack(item: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """``item`` as what JSON can say; tensors go to ``tensors`` under their names."""
    if isinstance(item, Tensor):
        tensors[name] = item.detach()
        return {"tensor": name}
    if isinstance(item, dict):
        return {
            "pairs": [[key, _pack(value, tensors, f"{name}.{key}")] for key, value in item.items()]
        }
    if isinstance(item, list | tuple):
        parts = [_pack(each, tensors, f"{name}.{i}") for i, each in enumerate(item)]
        return {"list" if isinstance(item, list) else "tuple": parts}
    if isinstance(item, float) and not math.isfinite(item):
        return {"float": str(item)}
    if item is None or isinstance(item, bool | int | float | str):
        return item
    raise TypeError(
        f"a checkpoint can hold tensors, numbers and text; {name} is {type(item).__name__}. Choose "
        "an optimizer and a schedule whose state_dict() holds nothing else."
    )


def _unpack(item: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(item, dict):
        return item
    ((kind, content),) = item.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "pairs":
        return {key: _unpack(value, tensors) for key, value in content}
    if kind == "float":
        return float(content)
    parts = [_unpack(each, tensors) for each in content]
    return parts if kind == "list" else tuple(parts)
