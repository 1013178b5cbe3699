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
import os
import secrets
import tempfile
from collections.abc import Mapping
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
    """Read what :func:`write_tensors` wrote: the tensors, on the CPU, and the plain data.

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
        raise ValueError(
            f"{path} has version {version} of the format; this {FORMAT} reads version {VERSION}. "
            f"Install a newer {FORMAT}."
        )
    if not whole:
        raise ValueError(
            f"{path} is damaged: its content does not have the checksum it was written with. Look "
            "for an earlier copy."
        )
    return tensors, meta


def check_regular(path: FilePath) -> None:
    """Raise where there is something other than a file that ends, such as a pipe."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} must be a regular file; it is a pipe, a device or a directory.")


def kinds(tensors: Mapping[Any, Tensor]) -> dict[Any, str]:
    """Shape and dtype of each tensor, by name."""
    return {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}


def _to_bytes(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    """The content of a file."""
    ready = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}.")
        ready[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if json.loads(json.dumps(meta, allow_nan=False)) != meta:
        raise TypeError(
            "meta must be plain data that JSON gives back as they are; got something else, such as "
            "a tuple or a key that is not a string. Use lists and string keys."
        )
    head = {"format": FORMAT, "version": VERSION, "checksum": _checksum(ready, meta)}
    return safetensors.torch.save(ready, {FORMAT: json.dumps(head | {"meta": meta})})


def _checksum(tensors: dict[str, Tensor], meta: dict[str, Any]) -> str:
    """A digest of names, dtypes, shapes, values and plain data."""
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
    if os.name == "nt":
        return  # a directory cannot be opened there
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
    files = {TENSORS: _to_bytes(tensors, meta), READABLE: _readable(tensors, meta)}
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
        raise FileNotFoundError(f"there is no directory {target.parent} to make {target.name} in.")
    if target.exists():
        _check_replaceable(target)
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
    found = str(meta.get("kind"))
    if found != kind:
        raise ValueError(
            f"{path} must hold one of kind {kind}; it is of kind {found}. Load it with "
            f"{KINDS.get(found, 'read_tensors')}."
        )
    return tensors, meta


def _readable(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    """A description for people."""
    about = f"A copy, to be read by people, of what {TENSORS} says of itself. Nothing reads it."
    head = {"about": about, "format": FORMAT, "version": VERSION}
    document = {**head, **meta, "tensors": kinds(tensors)}
    return (json.dumps(document, indent=2) + "\n").encode()


def _check_replaceable(target: Path) -> None:
    """Raise unless a directory is empty, but for what killed writers left, or was saved before."""
    if all(path.match(f".{FORMAT}-*.tmp") for path in target.iterdir()):
        return
    try:
        KINDS[read_tensors(target / TENSORS)[1]["kind"]]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{target} holds files that save did not write ({error}). Name another directory, or "
            "remove it."
        ) from error
