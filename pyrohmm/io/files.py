"""Files of tensors and plain data that cannot run anything when they are read.

A file is in safetensors format; its metadata hold one JSON document, with a checksum of everything.
It is written beside its place and then renamed: at any moment, also one of a power cut, there is
the old file or the new one, whole. A writer that is killed may leave ``.pyrohmm-*.tmp`` behind.

A directory holds such a file, ``tensors.safetensors``, which alone is read, and ``pyrohmm.json``,
which says for people what is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..data.readers import FilePath

FORMAT = "pyrohmm"
VERSION = 1  # what is written, and the newest that can be read
TENSORS = "tensors.safetensors"
READABLE = "pyrohmm.json"
KINDS = {
    "hmm": "load_hmm", "module": "load_into", "language model": "LanguageModel.load",
}  # fmt: skip
DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64,
)  # fmt: skip


# One file ------------------------------------------------------------------------------------


def write_tensors(path: FilePath, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and plain data to one file; an old file is there until the new one is whole.

    Args:
        path: The file. Its directory must exist.
        tensors: Tensors of any shape, on any device; views and shared memory are written out.
        meta: What JSON can say exactly: dictionaries with string keys, lists, strings, integers,
            finite floats, booleans, None.

    Raises:
        TypeError: If something is neither, or of a dtype that the format does not have.
        ValueError: If ``meta`` holds NaN or infinity, or a name is ``__metadata__``.
        OSError: If the file cannot be written; then nothing has changed.

    Example:
        >>> path = getfixture("tmp_path") / "step.safetensors"
        >>> write_tensors(path, {"weights": torch.ones(2)}, {"step": 3})
        >>> read_tensors(path)
        ({'weights': tensor([1., 1.])}, {'step': 3})
    """
    _replace(Path(path), _to_bytes(tensors, meta))


def read_tensors(path: FilePath) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote: the tensors, on the CPU, and the plain data.

    Every bit is as it was. Nothing but tensors and plain data can come from a file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, was not written by this package, or by a newer version.
    """
    data = Path(path).read_bytes()
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except Exception as error:  # the format's reader has many kinds
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}). Look for an earlier copy, or write "
            "it again."
        ) from error
    text = (header.get("__metadata__") or {}).get(FORMAT)
    if text is None:
        raise ValueError(
            f"{path} was not written by {FORMAT}: its metadata do not name it. Read it with "
            "safetensors.torch.load_file."
        )
    try:
        meta, checksum = _parse(path, text)
        whole = checksum == _checksum(tensors, meta)
    except RecursionError as error:
        raise ValueError(f"{path} holds metadata that are nested too deeply.") from error
    if not whole:
        raise ValueError(
            f"{path} is damaged: its content does not have the checksum it was written with. Look "
            "for an earlier copy."
        )
    return tensors, meta


def _to_bytes(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    """The content of a file."""
    ready = {name: _plain_tensor(name, tensor) for name, tensor in tensors.items()}
    _check_plain(meta)
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(ready, meta)}
    document = head | {"meta": meta}
    return safetensors.torch.save(ready, {FORMAT: json.dumps(document)})


def _plain_tensor(name: str, tensor: Tensor) -> Tensor:
    """The values of ``tensor`` in memory of their own."""
    if not isinstance(name, str):
        raise TypeError(f"names of tensors must be strings; got {name!r}.")
    if name == "__metadata__":
        raise ValueError(f"a tensor cannot have the name {name}: the format uses it. Rename it.")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(
            f"{name} must be a dense tensor; got {type(tensor).__name__}. Put plain data into meta."
        )
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}, which the format does not have. Convert it first."
        )
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _check_plain(meta: dict[str, Any]) -> None:
    """Raise unless ``meta`` is what it will be when it is read again."""
    if not isinstance(meta, dict):
        raise TypeError(f"meta must be a dict; got {type(meta).__name__}.")
    try:
        same = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except ValueError as error:
        raise ValueError(
            f"meta must be finite ({error}). Put numbers that may be NaN or infinite into a tensor."
        ) from error
    except (TypeError, RecursionError) as error:
        raise TypeError(f"meta must be plain data ({error}).") from error
    if not same:
        raise TypeError(
            "meta must be plain data that JSON gives back as they are; got something else, such as "
            "a tuple or a key that is not a string. Use lists and string keys."
        )


def _checksum(tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
    """A digest of names, dtypes, shapes, values and plain data."""
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parse(path: FilePath, text: str) -> tuple[dict[str, Any], str]:
    """The plain data and the checksum of a JSON document that anybody may have written."""
    try:
        document = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise ValueError(f"{path} holds metadata that are not JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} does not say that its format is {FORMAT}.")
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ValueError(f"{path} has no version: got {version!r}.")
    if version > VERSION:
        raise ValueError(
            f"{path} has version {version} of the format; this {FORMAT} reads versions up to "
            f"{VERSION}. Install a newer {FORMAT}."
        )
    meta, checksum = document.get("meta"), document.get("checksum")
    if not isinstance(meta, dict) or not isinstance(checksum, str):
        raise ValueError(f"{path} has metadata without the entries meta and checksum.")
    return meta, checksum


def _finite(literal: str) -> float:
    """The number written as ``literal``; JSON proper has no NaN, and no infinity."""
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal} is not a number")
    return number


def _replace(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, wait until it is on the disk, and rename it to ``path``."""
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _synchronise(path.parent)


def _temporary(path: Path) -> Path:
    """A new name in the same directory, thus on the same disk."""
    return path.with_name(f".{FORMAT}-{secrets.token_hex(8)}.tmp")


def _is_temporary(path: Path) -> bool:
    """Whether a writer that was killed, or one that is at work, left this file."""
    return path.name.startswith(f".{FORMAT}-") and path.suffix == ".tmp"


def _synchronise(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk."""
    if os.name == "nt":
        return  # a directory cannot be opened there
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A directory ---------------------------------------------------------------------------------


def write_directory(directory: FilePath, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write tensors and plain data to a directory, in place of what was saved there before.

    Args:
        directory: One that does not exist, is empty, or holds what was saved before. The one above
            it must exist.
        tensors: As for :func:`write_tensors`.
        meta: The same; its entry ``kind`` is one of ``KINDS``.

    Raises:
        TypeError, ValueError, OSError: As :func:`write_tensors`; or if the directory holds
            something else.
    """
    files = {TENSORS: _to_bytes(tensors, meta), READABLE: _readable(tensors, meta)}
    target = Path(os.path.realpath(directory))
    if not target.exists():
        _create(target, files)
        return
    _check_replaceable(target)
    for name, data in files.items():
        _replace(target / name, data)  # the first is all that is ever read


def check_directory(directory: FilePath) -> None:
    """Raise, before long work, unless :func:`write_directory` can write to ``directory``.

    Raises:
        FileNotFoundError: If the directory above it does not exist.
        ValueError, NotADirectoryError: If there is something else.
        OSError: If nothing can be written there.
    """
    target = Path(os.path.realpath(directory))
    if target.exists():
        _check_replaceable(target)
    elif not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {target.parent} to make {target.name} in.")
    with tempfile.TemporaryDirectory(prefix=".pyrohmm-", dir=target.parent):
        pass  # it can be made there


def read_directory(directory: FilePath, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_directory` wrote, of this ``kind``.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or come from a newer version.
    """
    path = Path(directory) / TENSORS
    tensors, meta = read_tensors(path)
    found = meta.get("kind")
    if not isinstance(found, str) or found not in KINDS:
        raise ValueError(
            f"{path} holds neither an HMM nor a module nor a language model. Read it with "
            "read_tensors."
        )
    if found != kind:
        raise ValueError(
            f"{path} must hold one of kind {kind}; it is of kind {found}. Load it with "
            f"{KINDS[found]}."
        )
    return tensors, meta


def _readable(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    """A description for people."""
    shapes = {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }
    about = f"A copy, to be read by people, of what {TENSORS} says of itself. Nothing reads it."
    document = {"about": about, "format": FORMAT, "version": VERSION, **meta, "tensors": shapes}
    return (json.dumps(document, indent=2) + "\n").encode()


def _create(target: Path, files: dict[str, bytes]) -> None:
    """Make a directory that is complete from its first moment."""
    temporary = _temporary(target)
    try:
        temporary.mkdir()
        for name, data in files.items():
            _replace(temporary / name, data)
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _synchronise(target.parent)


def _check_replaceable(target: Path) -> None:
    """Raise unless ``target`` is a directory that is empty or was saved before."""
    if not target.is_dir():
        raise NotADirectoryError(f"{target} must be a directory; it is a file.")
    if all(_is_temporary(path) for path in target.iterdir()):
        return
    try:
        _, meta = read_tensors(target / TENSORS)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{target} holds files that save did not write ({error}). Name another directory, or "
            "remove it."
        ) from error
    if meta.get("kind") not in KINDS:
        raise ValueError(f"{target} holds files that save did not write. Name another directory.")
