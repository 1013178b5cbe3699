"""Files of tensors and plain data that cannot run anything when they are read.

A file is in safetensors format; its metadata hold one JSON document, with a checksum of everything.
It is written beside its place and then renamed: at any moment, also one of a power cut, there is
the old file or the new one, whole. A writer that is killed may leave ``.pyrohmm-*.tmp`` behind.

A directory holds such a file, ``tensors.safetensors``, which alone is read, and ``pyrohmm.json``,
which says for people what is in it.

A ``Checkpoint`` is such a file with the state of a long fit, from which the fit can resume.
Descriptions of numbers, text, shapes and a hash of the data tell whether it is the same fit. On a
CPU a fit that was killed and resumed ends with the same bits as one that never was.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from pyro.nn import PyroModule
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions.utils import lazy_property

from .._checks import check_kind
from ..data.parts import Parts
from ..data.readers import FilePath
from ..data.sequences import Sequences

FORMAT = "pyrohmm"
VERSION = 1  # what is written, and the newest that can be read
TENSORS = "tensors.safetensors"
READABLE = "pyrohmm.json"
KINDS = {
    "hmm": "load_hmm", "module": "load_into", "draws": "load_draws", "fit": "load_fit",
    "formulas": "load_formulas", "language model": "LanguageModel.load",
}  # fmt: skip


# One file ------------------------------------------------------------------------------------


def write_tensors(path: FilePath, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and plain data to one file; an old file is there until the new one is whole.

    Args:
        path: The file. Its directory must exist. A link stays a link, to the new file.
        tensors: Tensors of any shape, on any device; views and shared memory are written out.
        meta: What JSON can say exactly: dictionaries with string keys, lists, strings, integers,
            finite floats, booleans, None.

    Raises:
        TypeError: If something is neither.
        ValueError: If ``meta`` holds NaN or infinity, or a tensor is sparse.
        OSError: If the file cannot be written; then nothing has changed.

    Example:
        >>> path = getfixture("tmp_path") / "step.safetensors"
        >>> write_tensors(path, {"weights": torch.ones(2)}, {"step": 3})
        >>> read_tensors(path)
        ({'weights': tensor([1., 1.])}, {'step': 3})
    """
    replace_file(Path(os.path.realpath(path)), _to_bytes(tensors, meta))


def read_tensors(path: FilePath) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors, on the CPU, and plain data from a file.

    Every bit is as it was. Nothing but tensors and plain data can come from a file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, was not written by this package, or by a newer version;
            or if it is a pipe, a device or a directory.
    """
    check_regular(path)
    data = Path(path).read_bytes()
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        document = json.loads(header["__metadata__"][FORMAT])
        version, meta, checksum = (document[name] for name in ("version", "meta", "checksum"))
        whole = isinstance(meta, dict) and checksum == _checksum(tensors, meta)
    except Exception as error:  # the format's reader has many kinds
        raise ValueError(
            f"{path} is not a whole file of {FORMAT} ({type(error).__name__}: {error}). Look for "
            "an earlier copy; read what others wrote with safetensors.torch.load_file."
        ) from error
    if version != VERSION:
        raise ValueError(f"{path} has version {version} of the format: install a newer {FORMAT}.")
    if not whole:
        raise ValueError(f"{path} is damaged: its checksum differs. Look for an earlier copy.")
    return tensors, meta


def check_regular(path: FilePath) -> None:
    """Raise if ``path`` exists and is no regular file, such as a pipe or a directory."""
    if os.path.exists(path) and not os.path.isfile(path):
        text = f"{path} must be a regular file; it is a pipe, a device or a directory"
        raise ValueError(f"{text}. Copy it to one.")


def kinds(tensors: Mapping[Any, Tensor]) -> dict[Any, str]:
    """Shape and dtype of each tensor, by name."""
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}


def _to_bytes(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    """Serialise tensors and plain data to safetensors, with a checksum."""
    ready = {}
    for name, tensor in tensors.items():
        check_kind(name, tensor, Tensor, "a tensor", "Call torch.as_tensor.")
        ready[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if json.loads(json.dumps(meta, allow_nan=False)) != meta:
        text = "meta must be plain data of JSON: lists and string keys, no tuples"
        raise TypeError(f"{text}. Convert tuples by list().")
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(ready, meta)}
    return safetensors.torch.save(ready, {FORMAT: json.dumps(head | {"meta": meta})})


def _checksum(tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
    """Checksum of names, dtypes, shapes, values and plain data."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def replace_file(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, wait until it is on the disk, and rename it to ``path``."""
    temporary = path.with_name(f".{FORMAT}-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as of a full disk
            error.filename = str(path)
        raise
    if os.name != "nt":  # where a directory cannot be opened
        descriptor = os.open(path.parent, os.O_RDONLY)  # wait until the name is on the disk, too
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# A directory ---------------------------------------------------------------------------------


def write_directory(directory: FilePath, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and plain data to a directory, in place of what was saved there before.

    Links in it are replaced, and what they point to stays as it is.

    Args:
        directory: One that does not exist, is empty, or holds what was saved before. The one above
            it must exist. A link to one stays a link.
        tensors: As for :func:`write_tensors`.
        meta: The same; its entry ``kind`` is one of ``KINDS``.

    Raises:
        TypeError, ValueError, OSError: As :func:`write_tensors`; or if the directory holds
            something else.
    """
    about = f"A copy, to be read by people, of what {TENSORS} says of itself. Nothing reads it."
    head = {"about": about, "format": FORMAT, "version": VERSION}
    text = json.dumps({**head, **meta, "tensors": kinds(tensors)}, indent=2) + "\n"
    files = {TENSORS: _to_bytes(tensors, meta), READABLE: text.encode()}
    target = Path(os.path.realpath(directory))
    target.mkdir(exist_ok=True)
    _check_replaceable(target)
    for name, data in files.items():
        replace_file(target / name, data)  # the first is all that is ever read


def check_directory(directory: FilePath) -> None:
    """Raise, before long work, unless :func:`write_directory` can write to ``directory``.

    Raises:
        FileNotFoundError: If the directory above it does not exist.
        ValueError, NotADirectoryError: If there is something else.
        OSError: If nothing can be written there.
    """
    target = Path(os.path.realpath(directory))
    if not target.parent.is_dir():
        text = f"there is no directory {target.parent} to make {target.name} in"
        raise FileNotFoundError(f"{text}. Make it first.")
    if target.exists():
        _check_replaceable(target)
    with tempfile.TemporaryDirectory(prefix=".pyrohmm-", dir=target.parent):
        pass  # it can be made there


def read_directory(directory: FilePath, *wanted: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and plain data of one of the kinds ``wanted``.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or come from a newer version.
    """
    check_kind("directory", directory, str | os.PathLike, "the name of a directory")
    path = Path(directory) / TENSORS
    tensors, meta = read_tensors(path)
    found = str(meta.get("kind"))
    if found not in wanted:
        cure = f"Load it with {KINDS.get(found, 'read_tensors')}."
        raise ValueError(f"{path} must hold one of kind {wanted[0]}; it is of kind {found}. {cure}")
    return tensors, meta


def grouped(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by what stands before the first dot of their names, and by the rest."""
    parts: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        part, _, name = path.partition(".")
        parts.setdefault(part, {})[name] = tensor
    return parts


def _check_replaceable(target: Path) -> None:
    """Raise unless a directory is empty, but for what killed writers left, or was saved before."""
    if all(path.match(f".{FORMAT}-*.tmp") for path in target.iterdir()):
        return
    try:
        KINDS[read_tensors(target / TENSORS)[1]["kind"]]
    except (OSError, ValueError, KeyError) as error:
        text = f"{target} holds files that save did not write ({error})"
        raise ValueError(f"{text}. Name another directory, or remove it.") from error


# A checkpoint ---------------------------------------------------------------------------------

SECONDS = 10.0  # between two saves, or
REST = 19.0  # times what the last one took, if that is more: saves take 5 % of the time at most
FIT_VERSION = 11  # of what fits save
CURE = "Choose another file, or delete it to start afresh."


def random_states() -> dict[str, Any]:
    """States of torch's generators of random numbers, of the CPU and of accelerators in use."""
    device = torch.get_device_module()
    used = hasattr(device, "get_rng_state_all") and device.is_initialized()
    return {"cpu": torch.get_rng_state(), "cuda": device.get_rng_state_all() if used else []}


def set_random_states(states: dict[str, Any]) -> None:
    """Restore states of :func:`random_states`, of the devices that are here."""
    torch.set_rng_state(states["cpu"])
    for number, state in zip(range(torch.accelerator.device_count()), states["cuda"]):
        torch.get_device_module().set_rng_state(state, number)


class Checkpoint:
    """Saves the state of a fit to a file, and loads it.

    Args:
        path: A file; its directory must exist.
        identity: Description of the fit; a file of another fit is refused.
        generators: Sources of randomness besides torch's global ones.
        writes: Whether to write: one of several processes does.
        of_first: Calls a function in that process, and returns what it did in all.

    Raises:
        ValueError: If ``path`` is a directory, or the one above it does not exist.
    """

    def __init__(
        self,
        path: str | Path,
        identity: dict[str, Any],
        generators: Any = (),
        writes: bool = True,
        of_first: Callable[[Callable[[], Any]], Any] = lambda read: read(),
    ) -> None:
        check_kind("checkpoint", path, str | os.PathLike, "the name of a file")
        self.path, self.of_first = Path(path), of_first
        of_first(self._check_place)
        self.identity = identity | {"seed": torch.initial_seed()}
        self.generators = [generator for generator in generators if generator is not None]
        self.writes = writes
        self.saved, self.took = time.perf_counter(), 0.0

    def resume(self, restore: Callable[[dict[str, Any]], None], tensors: Iterable[Tensor]) -> bool:
        """Continue from the state saved last; returns whether there is one.

        Random number generators are restored as well: all of it, or nothing.

        Args:
            restore: Takes the state. It changes ``tensors``, and what nobody else will use.
            tensors: What has to be as it was after an error.

        Raises:
            ValueError: If the file is damaged, or of another fit: it names the difference.
        """
        found = self.of_first(self._read)
        if found is None:
            return False
        saved, text = found
        before = [(tensor, tensor.detach().clone()) for tensor in tensors]
        numbers = self._random()
        try:
            state = unpack(json.loads(text), saved)
            restore(state)
            self._set_random(state["random"])
        except Exception as error:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            self._set_random(numbers)
            text = f"does not fit this fit ({type(error).__name__}: {error})"
            raise self._refusal(text) from error
        return True

    def _read(self) -> tuple[dict[str, Tensor], Any] | None:
        """Tensors of the file and the rest of its state as text; None if there is no file."""
        if not self.path.exists():
            return None
        saved, meta = read_tensors(self.path)
        if (meta.get("kind"), meta.get("version")) != ("checkpoint", FIT_VERSION):
            raise self._refusal("holds something else, or is of another version of this package")
        if (differing := difference(meta.get("identity"), self.identity)) is not None:
            path, there, here = differing
            text = f"belongs to another fit: its {path} is {there}, and here it is {here}"
            raise self._refusal(text)
        return saved, meta.get("state")

    def _check_place(self) -> None:
        """Raise unless a file can be there."""
        if self.path.is_dir() or not self.path.parent.is_dir():
            text = f"checkpoint must be a file in a directory that exists; got {self.path}"
            raise ValueError(f"{text}. Make it first.")

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"checkpoint {self.path} {reason}. {CURE}")

    def is_due(self) -> bool:
        """Whether it is time to save again."""
        rest = time.perf_counter() - self.saved
        return self.writes and rest >= max(SECONDS, REST * self.took)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file by one of ``state``: nested dicts and lists of tensors and numbers."""
        start_time, tensors = time.perf_counter(), dict[str, Tensor]()
        packed = json.dumps(pack(state | {"random": self._random()}, tensors))  # infinity as well
        meta = {"kind": "checkpoint", "version": FIT_VERSION, "identity": self.identity}
        try:
            write_tensors(self.path, tensors, meta | {"state": packed})
        finally:
            self.saved = time.perf_counter()
            self.took = self.saved - start_time

    def _random(self) -> dict[str, Any]:
        """States of the random number generators of torch and of the fit."""
        return random_states() | {"own": [each.get_state() for each in self.generators]}

    def _set_random(self, random: dict[str, Any]) -> None:
        set_random_states(random)
        for generator, numbers in zip(self.generators, random["own"], strict=True):
            generator.set_state(numbers)


NESTED: dict[str, Any] = {"dict": dict, "OrderedDict": dict, "list": list, "tuple": tuple}


def pack(state: Any, tensors: dict[str, Tensor]) -> Any:
    """Nested dicts, lists and tuples as plain data for JSON; arrays are put into ``tensors``."""
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, Tensor | np.ndarray):
        name = str(len(tensors))
        tensors[name] = torch.as_tensor(state)
        return {"tensor" if isinstance(state, Tensor) else "array": name}
    if (kind := type(state).__name__) not in NESTED:
        raise TypeError(
            f"a file can hold tensors, numbers and text; got {kind}. Choose an optimizer whose "
            "state_dict() holds no more; of levels of a factor make text by .astype(str)."
        )
    parts = state.items() if isinstance(state, dict) else state
    return {kind: [pack(part, tensors) for part in parts]}


def unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Restore what :func:`pack` has made plain."""
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind in NESTED:
        return NESTED[kind](unpack(part, tensors) for part in held)
    return tensors[held].numpy() if kind == "array" else tensors[held]


LONGEST = 200  # characters of a value in an error
_SIMPLE = (bool, int, float, str, Path, Tensor, np.ndarray, np.generic, list, tuple)
_BOOKKEEPING = set(vars(PyroModule(""))) | {"training"}
_OF_MODULES = ("_buffers", "_parameters", "_modules", "_pyro_samples")


# What another call may change and still resume from a checkpoint: it changes no step, only how many
# there are (``tolerance`` and ``patience`` are tested anew), or what is shown and kept on the way.
FREE = "num_iterations", "tolerance", "patience", "progress", "report", "checkpoint", "group"


def identity_of(
    fit: str, tensors: Iterable[Tensor], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Fingerprint of a fit: its name, shapes of its parameters, all arguments not in ``FREE``."""
    compared = {name: comparable(each) for name, each in arguments.items() if name not in FREE}
    seed = compared.pop("generator", None)
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"fit": fit, "shapes": shapes, "seed of the generator": seed} | compared


def comparable(item: Any, depth: int = 3) -> Any:
    """Describe ``item`` in JSON for comparison; nested objects to a limited depth."""
    if isinstance(item, float) and math.isfinite(item):
        return float(item)
    if isinstance(item, float | Path | torch.dtype | torch.device):
        return str(item)
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, np.ndarray | np.generic) and item.dtype.kind not in "biufc":
        return comparable(item.tolist())
    if isinstance(item, Tensor | np.ndarray | np.generic):
        tensor = torch.as_tensor(item)
        kind = f"{tuple(tensor.shape)} {tensor.dtype}"
        point = tensor.requires_grad and tensor.is_leaf  # its value is the fit's to change
        value = tensor.tolist() if tensor.numel() < LONGEST / 10 else digits([tensor])
        return kind if point else f"{kind} {value}"
    if isinstance(item, torch.Generator):
        return item.initial_seed()
    if isinstance(item, Sequences | Parts):
        return fingerprint(item)
    item = item._asdict() if hasattr(item, "_asdict") else item
    if isinstance(item, dict):
        return {str(name): comparable(value, depth) for name, value in item.items()}
    if isinstance(item, list | tuple):
        return [comparable(part, depth) for part in item]
    if isinstance(item, partial):
        return comparable({"function": item.func, "arguments": item.args} | item.keywords)
    name = getattr(item, "__qualname__", type(item).__qualname__)
    if not depth or hasattr(item, "__qualname__") or isinstance(item, Trace):
        return name
    below = depth - (not isinstance(item, nn.Module))
    inner = {key: comparable(value, below) for key, value in _attributes(item).items()}
    return {"class": name} | inner if inner else name


def made_with(module: Any) -> dict[str, Any]:
    """Attributes of all parts of a module, and hyperparameters that no fit sets, to compare.

    Later versions compare with them what they have under the same names.
    """
    found = {}
    for path, part in getattr(module, "named_modules", dict)():
        priors = getattr(part, "_pyro_samples", {})
        apart = {name for name, prior in priors.items() if isinstance(prior, partial)}  # of these
        if not priors or getattr(part, "of_data", False):
            apart |= part._buffers.keys()
        for name, value in _attributes(part).items():
            if name not in apart and not isinstance(value, nn.Module | nn.Parameter):
                found[f"{path}.{name}".lstrip(".")] = comparable(value)
    return found


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
    """Short hash of sequences, with shape and total."""
    if isinstance(data, Parts):
        return f"{len(data)} in {len(data.sizes)} parts, " + "; ".join(map(fingerprint, data))
    names = "values", "lengths", "observed", "labels", "covariates", "times"
    rows = data.packed if data.is_ragged else partial(getattr, data)
    parts = (data.lengths if name == "lengths" else rows(name) for name in names)
    return f"{data.shape} of {data.total}, {digits(parts)}"


def digits(tensors: Iterable[Tensor | None]) -> str:
    """CRC-32 hash of tensors, as text; None is left out."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            total = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), total)
    return f"{total:08x}"


def _attributes(item: Any) -> dict[str, Any]:
    """Public attributes of an object by name, without caches."""
    kept = dict(getattr(item, "__dict__", {}))
    if isinstance(item, nn.Module):
        inner = [kept.get(name, {}) for name in _OF_MODULES]
        kept = {name: value for name, value in kept.items() if name not in _BOOKKEEPING}
        kept |= {name: value for part in inner for name, value in part.items()}
    free = getattr(type(item), "may_differ", ())  # and the fit resumes all the same
    found = {}
    for name, value in kept.items():
        static = inspect.getattr_static(type(item), name, None)
        cache = name.startswith("_lazy_") or isinstance(static, cached_property | lazy_property)
        public = isinstance(value, _SIMPLE) or not name.startswith("_")
        if public and not cache and name not in free:
            found[name] = value
    return found


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
