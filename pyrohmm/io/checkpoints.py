"""``Checkpoint``: the state of a long fit in one file, from which the fit can resume.

A file is replaced atomically, holds numbers and text only, and can execute nothing. On a CPU a fit
that was killed and resumed ends with the same bits as one that never was.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import read_tensors, write_tensors
from .identity import difference

SECONDS = 10.0  # between two saves
VERSION = 5  # of what fits save


class Checkpoint:
    """Saves the state of a fit to a file, and loads it.

    Args:
        path: A file; its directory must exist.
        identity: What the fit is: see :mod:`.identity`. A file of another fit is refused.
        generators: Sources of randomness besides torch's global ones.
        writes: Whether to write: one of several processes does.

    Raises:
        FileNotFoundError: If the directory does not exist.
        ValueError: If ``path`` is a directory.
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
        self.generators = [generator for generator in generators if generator is not None]
        self.writes = writes
        self.saved = time.perf_counter()

    def load(self) -> dict[str, Any] | None:
        """The state saved last, if there is one; random number generators are restored.

        Raises:
            ValueError: If the file is damaged, or of another fit: it names the difference.
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
        for name in [*self.identity, *meta["identity"]]:
            differing = difference(meta["identity"].get(name), self.identity.get(name), name)
            if differing is not None:
                path, saved, wanted = differing
                raise ValueError(
                    f"checkpoint {self.path} belongs to another fit: its {path} is {saved}, and "
                    f"here it is {wanted}. Choose another file, or delete it to start afresh."
                )
        state = _unpack(meta["state"], tensors)
        random = state.pop("random")
        torch.set_rng_state(random["cpu"])
        for device, numbers in enumerate(random["cuda"]):
            torch.cuda.set_rng_state(numbers, device)
        for generator, numbers in zip(self.generators, random["own"]):
            generator.set_state(numbers)
        return state

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        return self.writes and time.perf_counter() - self.saved >= SECONDS

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file by one of ``state``: nested dicts and lists of tensors and numbers."""
        if not self.writes:
            return
        random = {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "own": [generator.get_state() for generator in self.generators],
        }
        tensors: dict[str, Tensor] = {}
        packed = _pack(state | {"random": random}, tensors, "state")
        meta = {"kind": "checkpoint", "version": VERSION, "identity": self.identity}
        write_tensors(self.path, tensors, meta | {"state": packed})
        self.saved = time.perf_counter()


def _pack(item: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """``item`` as JSON can hold it; tensors go to ``tensors`` under their names."""
    if isinstance(item, Tensor):
        tensors[name] = item.detach()
        return {"tensor": name}
    if isinstance(item, dict):
        pairs = [[key, _pack(value, tensors, f"{name}.{key}")] for key, value in item.items()]
        return {"pairs": pairs}
    if isinstance(item, list | tuple):
        parts = [_pack(part, tensors, f"{name}.{i}") for i, part in enumerate(item)]
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
    parts = [_unpack(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)
