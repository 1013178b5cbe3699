"""Saving and loading: tensors and plain data in files that cannot run anything when they are read.

A file is in safetensors format; its metadata hold one JSON document, with a checksum of everything.
It is written beside its place and then renamed: at any moment, also one of a power cut, there is
the old file or the new one, whole. A writer that is killed may leave ``.pyrohmm-*.tmp`` behind.

A saved HMM, module or language model is a directory with such a file, ``tensors.safetensors``,
which alone is read, and ``pyrohmm.json``, which says for people what is in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pyro.distributions as dist
import safetensors.torch
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn

from ..distributions.block_hmm import BlockHMM
from ..distributions.hmm import HMM
from ..distributions.observation import Streams, Tied
from ..ops.block_transition import InnerProductTransition
from ..ops.blocks import Blocks

FORMAT = "pyrohmm"
VERSION = 1  # what is written, and the newest that can be read
TENSORS = "tensors.safetensors"
READABLE = "pyrohmm.json"
KINDS = {"hmm": "load_hmm", "module": "load_into", "language model": "LanguageModel.load"}
DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64,
)  # fmt: skip


class Arguments(NamedTuple):
    """What a distribution is built from: ``cls(*parts, **tensors, **options)``.

    All are names of attributes; those of tensors and options are names of arguments as well.

    Attributes:
        tensors: Tensors of any shape.
        probs_or_logits: Whether it holds tensors ``probs`` or ``logits`` besides, or both.
        options: Integers and booleans.
        parts: Distributions, or lists of them; passed by position.
    """

    tensors: tuple[str, ...] = ()
    probs_or_logits: bool = False
    options: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


# Every class that is ever built from a file. An entry here is all that a further one needs, if it
# takes validate_args; programs may add their own.
BUILT_FROM: dict[type, Arguments] = {
    dist.AsymmetricLaplace: Arguments(("loc", "scale", "asymmetry")),
    dist.Bernoulli: Arguments(probs_or_logits=True),
    dist.Beta: Arguments(("concentration1", "concentration0")),
    dist.BetaBinomial: Arguments(("concentration1", "concentration0", "total_count")),
    dist.Binomial: Arguments(("total_count",), probs_or_logits=True),
    dist.Categorical: Arguments(probs_or_logits=True),
    dist.Cauchy: Arguments(("loc", "scale")),
    dist.Delta: Arguments(("v", "log_density"), options=("event_dim",)),
    dist.Dirichlet: Arguments(("concentration",)),
    dist.DirichletMultinomial: Arguments(("concentration", "total_count"), options=("is_sparse",)),
    dist.Exponential: Arguments(("rate",)),
    dist.Gamma: Arguments(("concentration", "rate")),
    dist.GammaPoisson: Arguments(("concentration", "rate")),
    dist.Geometric: Arguments(probs_or_logits=True),
    dist.Gumbel: Arguments(("loc", "scale")),
    dist.HalfCauchy: Arguments(("scale",)),
    dist.HalfNormal: Arguments(("scale",)),
    dist.Independent: Arguments(options=("reinterpreted_batch_ndims",), parts=("base_dist",)),
    dist.InverseGamma: Arguments(("concentration", "rate")),
    dist.Laplace: Arguments(("loc", "scale")),
    dist.LogNormal: Arguments(("loc", "scale")),
    dist.Logistic: Arguments(("loc", "scale")),
    dist.LowRankMultivariateNormal: Arguments(("loc", "cov_factor", "cov_diag")),
    dist.MixtureSameFamily: Arguments(parts=("mixture_distribution", "component_distribution")),
    dist.Multinomial: Arguments(probs_or_logits=True, options=("total_count",)),
    dist.MultivariateNormal: Arguments(("loc", "scale_tril")),
    dist.MultivariateStudentT: Arguments(("df", "loc", "scale_tril")),
    dist.NanMaskedMultivariateNormal: Arguments(("loc", "scale_tril")),
    dist.NanMaskedNormal: Arguments(("loc", "scale")),
    dist.NegativeBinomial: Arguments(("total_count",), probs_or_logits=True),
    dist.Normal: Arguments(("loc", "scale")),
    dist.OneHotCategorical: Arguments(probs_or_logits=True),
    dist.Pareto: Arguments(("scale", "alpha")),
    dist.Poisson: Arguments(("rate",), options=("is_sparse",)),
    dist.ProjectedNormal: Arguments(("concentration",)),
    dist.SoftLaplace: Arguments(("loc", "scale")),
    dist.StudentT: Arguments(("df", "loc", "scale")),
    dist.Uniform: Arguments(("low", "high")),
    dist.VonMises: Arguments(("loc", "concentration")),
    dist.Weibull: Arguments(("scale", "concentration")),
    Streams: Arguments(parts=("parts",)),
    Tied: Arguments(("index",), parts=("base",)),
}


# One file ------------------------------------------------------------------------------------


def write_tensors(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], meta: dict[str, Any]
) -> None:
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


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
    document = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": _checksum(ready, meta),
        "meta": meta,
    }
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


def _parse(path: str | os.PathLike[str], text: str) -> tuple[dict[str, Any], str]:
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
    """The number that ``literal`` stands for; JSON proper has no NaN, and no infinity."""
    number = float(literal)
    if not abs(number) < float("inf"):
        raise ValueError(f"{literal} is not a number")
    return number


def _replace(path: Path, data: bytes) -> None:
    """Write ``data`` beside ``path``, wait until it is on the disk, and rename it to ``path``."""
    path = Path(os.path.realpath(path))  # a link stays a link
    temporary = _sibling(path)
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


def _sibling(path: Path) -> Path:
    """A name in the same directory, thus on the same disk, that nobody else has."""
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


def save(thing: HMM | nn.Module, directory: str | os.PathLike[str]) -> None:
    """Save an HMM or a module to a directory, in place of what was saved there before.

    Of a module its ``state_dict()`` is saved, not its code: :func:`load_into` puts it into a module
    that was built in the same way. Variables that have a prior are no part of it: save the HMM that
    a fit has found, ``fit.hmm(data)``, for other data ``load_hmm(directory).with_lengths(...)``.
    An HMM is saved whole: see :func:`load_hmm`. No gradient information is saved.

    At any moment there is the old content or the new one, whole. Two files are written:
    ``tensors.safetensors``, and ``pyrohmm.json``, a copy of its description to be read by people.

    Args:
        thing: An :class:`HMM`, a :class:`BlockHMM`, or a ``torch.nn.Module`` such as an
            :class:`HMMModule`.
        directory: A directory that does not exist, is empty, or holds what was saved before. The
            one above it must exist.

    Raises:
        TypeError: If it is neither, or the emission of the HMM is of a class that is not in
            ``BUILT_FROM``; nothing is written then.
        ValueError: If the directory holds something else.
        OSError: If the files cannot be written.

    Example:
        >>> hmm = HMM(torch.zeros(1), torch.zeros(1, 1), Poisson(torch.ones(1)), torch.tensor([2]))
        >>> directory = getfixture("tmp_path") / "counts"
        >>> save(hmm, directory)
        >>> load_hmm(directory).emission.rate
        tensor([1.])
    """
    write_directory(directory, *_describe(thing))


def write_directory(
    directory: str | os.PathLike[str], tensors: dict[str, Tensor], meta: dict[str, Any]
) -> None:
    """Write tensors and plain data to a directory, as :func:`save` does with what it describes.

    Args:
        directory: As for :func:`save`.
        tensors: As for :func:`write_tensors`.
        meta: The same; its entry ``kind`` is one of ``KINDS``.

    Raises:
        TypeError, ValueError, OSError: As :func:`write_tensors` and :func:`save`.
    """
    files = {TENSORS: _to_bytes(tensors, meta), READABLE: _readable(tensors, meta)}
    target = Path(os.path.realpath(directory))
    if not target.exists():
        _create(target, files)
        return
    _check_replaceable(target)
    for name, data in files.items():
        _replace(target / name, data)  # the first is all that is ever read


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise, before long work, what :func:`save` would find wrong with ``directory`` after it.

    Raises:
        FileNotFoundError: If the directory above it does not exist.
        ValueError, NotADirectoryError: If there is something else.
    """
    target = Path(os.path.realpath(directory))
    if target.exists():
        _check_replaceable(target)
    elif not target.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {target.parent} to make {target.name} in.")


def read_directory(
    directory: str | os.PathLike[str], kind: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_directory` wrote, of this ``kind``.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or come from a newer version.
    """
    path = Path(directory) / TENSORS
    tensors, meta = read_tensors(path)
    found = meta.get("kind")
    if found not in KINDS:
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


def load_hmm(directory: str | os.PathLike[str]) -> HMM:
    """The HMM that was saved to ``directory``, on the CPU, every bit as it was.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, hold something else, or come from a newer version.
    """
    tensors, meta = read_directory(directory, "hmm")
    try:
        build = _build_block_hmm if meta.get("class") == "BlockHMM" else _build_hmm
        return build(tensors, meta)
    except Exception as error:
        path = Path(directory) / TENSORS
        raise ValueError(f"{path} does not describe an HMM: {error}") from error


def load_into(module: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Put what was saved of a module into ``module``, all of it or nothing.

    Parameters stay the objects they are, on their devices, so that optimisers keep them.

    Args:
        module: Of the class that was saved, with parameters and buffers of the same names, shapes
            and dtypes.
        directory: Where a module was saved.

    Raises:
        TypeError: If ``module`` is not a module, or has state that is not tensors.
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, or differ from ``module``, which is then unchanged.

    Example:
        >>> first, second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> directory = getfixture("tmp_path") / "linear"
        >>> save(first, directory)
        >>> load_into(second, directory)
        >>> bool((first.weight == second.weight).all())
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}.")
    tensors, meta = read_directory(directory, "module")
    own = module.state_dict()
    _check_state(module, own)
    differences = _differences(module, own, tensors, meta)
    if differences:
        path = Path(directory) / TENSORS
        raise ValueError(f"{path} differs from module: {'; '.join(differences)}.")
    before = {name: tensor.clone() for name, tensor in own.items()}
    try:
        module.load_state_dict(tensors)
    except BaseException:
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(before[name])
        raise


def _describe(thing: HMM | nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of ``thing``, and what else there is to say of it."""
    if type(thing) is HMM:
        return _describe_hmm(thing)
    if type(thing) is BlockHMM:
        return _describe_block_hmm(thing)
    if isinstance(thing, nn.Module):
        state = thing.state_dict()
        _check_state(thing, state)
        return dict(state), {"kind": "module", "class": type(thing).__qualname__}
    raise TypeError(
        f"thing must be an HMM, a BlockHMM or a torch.nn.Module; got {type(thing).__name__}. Of a "
        "fit, save fit.hmm(data); of an HMM of another class, the module that builds it."
    )


def _check_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Raise unless the state of ``module`` is tensors that exist."""
    for name, value in state.items():
        if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
            raise TypeError(
                f"{name} of {type(module).__name__} must be a tensor; got {type(value).__name__}. "
                "Call a lazy module once; keep extra state elsewhere."
            )


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
    temporary = _sibling(target)
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
    """Raise unless ``target`` is a directory that is empty or was written by :func:`save`."""
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


def _differences(
    module: nn.Module, own: dict[str, Tensor], saved: dict[str, Tensor], meta: dict[str, Any]
) -> list[str]:
    """What keeps ``saved`` from being the state of ``module``, in words."""
    found, wanted = meta.get("class"), type(module).__qualname__
    differences = [] if found == wanted else [f"class {found} in the file, {wanted} in module"]
    for name in sorted(own.keys() | saved.keys()):
        if name not in saved:
            differences.append(f"{name} is not in the file")
        elif name not in own:
            differences.append(f"{name} is not in module")
        elif own[name].shape != saved[name].shape or own[name].dtype != saved[name].dtype:
            differences.append(
                f"{name} is {tuple(saved[name].shape)} {saved[name].dtype} in the file, "
                f"{tuple(own[name].shape)} {own[name].dtype} in module"
            )
    return differences


# An HMM --------------------------------------------------------------------------------------

_EITHER = ("probs", "logits")


def _describe_hmm(hmm: HMM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {
        "log_initial": hmm.log_initial,
        "log_transition": hmm.log_transition,
        "lengths": hmm.lengths,
    }
    for name in ("observed", "allowed"):
        if getattr(hmm, name) is not None:
            tensors[name] = getattr(hmm, name)
    meta = {
        "kind": "hmm",
        "class": "HMM",
        "transition_per_step": hmm.transition_per_step,
        "emission_per_step": hmm.emission_per_step,
        "validate_args": vars(hmm).get("_validate_args"),
        "emission": _describe_part(hmm.emission, "emission", tensors),
    }
    return tensors, meta


def _build_hmm(tensors: dict[str, Tensor], meta: dict[str, Any]) -> HMM:
    left = dict(tensors)
    hmm = HMM(
        log_initial=left.pop("log_initial"),
        log_transition=left.pop("log_transition"),
        emission=_build_part(meta.get("emission"), "emission", left),
        lengths=left.pop("lengths"),
        observed=left.pop("observed", None),
        validate_args=_validation(meta),
        transition_per_step=_flag(meta, "transition_per_step"),
        emission_per_step=_flag(meta, "emission_per_step"),
        allowed=left.pop("allowed", None),
    )
    if left:
        raise ValueError(f"nothing needs the tensors {sorted(left)}")
    return hmm


def _describe_block_hmm(hmm: BlockHMM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if hmm.carried is not None:
        raise TypeError("an HMM of sequences that go on from others cannot be saved; save dense().")
    tensors = {
        "log_initial": hmm.log_initial,
        "log_emission": hmm.log_emission,
        "lengths": hmm.lengths,
        "symbol_block": hmm.blocks.symbol_block,
        "states": hmm.blocks.states,
    }
    if isinstance(hmm.transition, Tensor):
        tensors["transition"] = hmm.transition
    else:
        tensors |= {"leave": hmm.transition.leave, "enter": hmm.transition.enter}
        if hmm.transition.block_logits is not None:
            tensors["block_logits"] = hmm.transition.block_logits
    if hmm.observed is not None:
        tensors["observed"] = hmm.observed
    validation = vars(hmm).get("_validate_args")
    return tensors, {"kind": "hmm", "class": "BlockHMM", "validate_args": validation}


def _build_block_hmm(tensors: dict[str, Tensor], meta: dict[str, Any]) -> BlockHMM:
    left = dict(tensors)
    initial, emission = left.pop("log_initial"), left.pop("log_emission")
    states = [each[each >= 0] for each in left.pop("states")]
    blocks = Blocks(left.pop("symbol_block"), states, len(initial))
    transition = (
        left.pop("transition") if "transition" in left
        else InnerProductTransition(
            left.pop("leave"), left.pop("enter"), blocks, left.pop("block_logits", None)
        )
    )  # fmt: skip
    hmm = BlockHMM(
        initial, transition, emission, blocks, left.pop("lengths"), left.pop("observed", None),
        validate_args=_validation(meta),
    )  # fmt: skip
    if left:
        raise ValueError(f"nothing needs the tensors {sorted(left)}")
    return hmm


def _describe_part(part: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """What a distribution is built from; its tensors are put into ``tensors`` under ``path``."""
    if isinstance(part, list | tuple):
        return [_describe_part(each, f"{path}.{i}", tensors) for i, each in enumerate(part)]
    family = type(part)
    arguments = BUILT_FROM.get(family)
    if arguments is None:
        raise TypeError(
            f"{path} is a {family.__module__}.{family.__qualname__}, which cannot be saved; these "
            f"classes of pyro.distributions can: {', '.join(sorted(_classes()))}. Enter yours into "
            "pyrohmm.persistence.BUILT_FROM, or save the module that builds the HMM."
        )
    for name in arguments.tensors:
        tensors[f"{path}.{name}"] = getattr(part, name)
    if arguments.probs_or_logits:
        held = vars(_holder(part))  # reading the other one as an attribute would compute it
        tensors.update({f"{path}.{name}": held[name] for name in _EITHER if name in held})
    return {
        "class": family.__name__,
        "validate_args": vars(part).get("_validate_args"),
        "options": {name: getattr(part, name) for name in arguments.options},
        "parts": [
            _describe_part(getattr(part, name), f"{path}.{name}", tensors)
            for name in arguments.parts
        ],
    }


def _build_part(
    node: Any, path: str, tensors: dict[str, Tensor]
) -> TorchDistribution | list[TorchDistribution]:
    """What :func:`_describe_part` described; its tensors are taken out of ``tensors``."""
    if isinstance(node, list):
        return [_build_part(each, f"{path}.{i}", tensors) for i, each in enumerate(node)]
    if not isinstance(node, dict) or not isinstance(node.get("class"), str):
        raise ValueError(f"{path} must be described by an object with a class")
    family = _classes().get(node["class"])
    if family is None:
        raise ValueError(f"{path} is of class {node['class']}, which is not one that can be built")
    arguments = BUILT_FROM[family]
    options, parts = node.get("options"), node.get("parts")
    if not isinstance(options, dict) or options.keys() != set(arguments.options):
        raise ValueError(f"{path} must have the options {arguments.options}; got {options}")
    if not all(isinstance(option, int) for option in options.values()):
        raise ValueError(f"{path} must have integers or booleans as options; got {options}")
    if not isinstance(parts, list) or len(parts) != len(arguments.parts):
        raise ValueError(f"{path} must have the parts {arguments.parts}")
    given = {name: tensors.pop(f"{path}.{name}") for name in arguments.tensors}
    held = {}
    if arguments.probs_or_logits:
        keys = {name: f"{path}.{name}" for name in _EITHER}
        held = {name: tensors.pop(key) for name, key in keys.items() if key in tensors}
    built = family(
        *(
            _build_part(part, f"{path}.{name}", tensors)
            for part, name in zip(parts, arguments.parts)
        ),
        **given,
        **dict(list(held.items())[:1]),
        **options,
        validate_args=_validation(node),
    )
    vars(_holder(built)).update(held)  # the constructor normalised them once more
    return built


def _classes() -> dict[str, type]:
    return {family.__name__: family for family in BUILT_FROM}


def _holder(distribution: Any) -> Any:
    """What has the probabilities as attributes: the distribution, or a categorical one within."""
    return getattr(distribution, "_categorical", distribution)


def _flag(node: dict[str, Any], name: str) -> bool:
    value = node.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false; got {value!r}")
    return value


def _validation(node: dict[str, Any]) -> bool | None:
    """Whether values are to be checked; None leaves it to Pyro's setting."""
    return None if node.get("validate_args") is None else _flag(node, "validate_args")
