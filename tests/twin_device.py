"""A second device without an accelerator: ``twin``, whose tensors compute on the CPU and count.

Tensors on it have real numbers, and refuse to mix with tensors of the CPU. Within :func:`watched`,
everything that would make the host wait for an accelerator is counted, with the place in the
package that asked for it, as are copies from the host and operations that would be kernels there::

    with watched() as seen:
        HMM(initial.to("twin"), ...).log_prob(values.to("twin"))
    print(seen)

It shows tensors left on the CPU, results on the wrong device, waits of the host and the number of
kernels. It says nothing of an accelerator's numerics, speed or memory. As on CUDA:

- One tensor of no dimensions may come from the CPU where the kernel takes it as an argument
  (``BY_ELEMENT``), or the operation reads its number (``FILLING``), and nowhere else.
- Indices may come from the CPU; their copy is counted, and so are those of ``where``.
- Random numbers are the device's own, seeded as the CPU's, and no generator of the CPU is taken.
- Integers have no matrix products.

:class:`FakeGraphs` stands for CUDA graphs: it repeats operations, and nothing that Python does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import pyrohmm

PACKAGE = str(Path(pyrohmm.__file__).parent)
aten = torch.ops.aten

# what only looks at the same numbers in another way, and is no kernel
VIEWS = set(
    "view _unsafe_view unsqueeze squeeze select slice transpose expand permute detach alias "
    "as_strided t unbind split split_with_sizes _reshape_alias unfold lift_fresh diagonal "
    "empty_like new_empty new_empty_strided empty_strided".split()
)
# whose results, or their shapes, the host must know
READS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten._unique2,
         aten.is_nonzero, aten.item, aten.unique_dim, aten.bincount}  # fmt: skip
# which take indices
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
# whose kernels take one number of the CPU (TensorIterator's allow_cpu_scalars, and
# gpu_kernel_with_scalars); clamp of tensors, lerp, addcmul and logaddexp do not
BY_ELEMENT = set(
    "add sub rsub mul div true_divide floor_divide pow remainder fmod atan2 hypot maximum minimum "
    "fmax fmin clamp_min clamp_max eq ne lt le gt ge logical_and logical_or logical_xor xlogy "
    "bitwise_and bitwise_or bitwise_xor copysign igamma igammac nextafter heaviside special_zeta "
    "special_xlog1py where".split()
)
# which read a number of the CPU
FILLING = set("fill masked_fill index_fill index_put _index_put_impl".split())
# which have no kernel for integers
PRODUCTS = set("mm bmm mv dot vdot addmm baddbmm addbmm addmv addr linear cdist".split())


class Seen:
    """What the host waited for, by place, and the kernels launched, by name."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    @property
    def host_reads(self) -> int:
        """How many times the host waited."""
        return self.reads.total()

    @property
    def launches(self) -> int:
        """How many kernels there were."""
        return self.kernels.total()

    def read(self, operation: str) -> None:
        """Count one wait."""
        _refuse_in_graph(operation)
        self.reads[f"{operation} at {_place()}"] += 1

    def copy(self, operation: str) -> None:
        """Count one copy from the host."""
        _refuse_in_graph(operation)
        self.copies[f"{operation} at {_place()}"] += 1

    def __repr__(self) -> str:
        every = self.reads + self.copies
        lines = [f"{count:5} {place}" for place, count in every.most_common()]
        copies = f"{self.copies.total()} copies from the host"
        first = f"{self.host_reads} host reads, {copies}, {self.launches} kernels"
        return "\n".join([first, *lines])


def _place() -> str:
    """The innermost line on the stack but for torch's own, and the lines of the package above."""
    frame: Any = sys._getframe(2)
    lines: list[str] = []
    while frame is not None and len(lines) < 4:
        name = frame.f_code.co_filename
        inner = not lines and "/torch/" not in name and name != __file__
        if inner or name.startswith(PACKAGE):
            lines.append(f"{Path(name).name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


_seen = Seen()
_graph: list[Any] | None = None  # the operations of a graph that is being captured


def _refuse_in_graph(operation: str) -> None:
    if _graph is not None:
        raise RuntimeError(f"{operation} is not permitted when a graph is captured: {_place()}")


class FakeGraphs:
    """Stands for ``infer.graphs.CudaGraphs``: a graph is a list of operations on raw tensors.

    What a capture leaves is NaN until it is replayed, as it computes nothing; numbers of Python,
    and of tensors on the CPU, are those of the capture.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def first(self, compute: Any) -> Any:
        return compute()

    def capture(self, compute: Any) -> Any:
        global _graph
        random = _backend.random.get_state()
        _graph = calls = []
        try:
            found = compute()
        finally:
            _graph = None
        _backend.random.set_state(random)
        for _, _, _, results in calls:
            for made in results:
                if made.is_floating_point():
                    made.fill_(torch.nan)
        return lambda: self._replay(calls), found

    def _replay(self, calls: list[Any]) -> None:
        for function, args, kwargs, results in calls:
            with _backend.drawing() if _is_random(function) else nullcontext():
                new = function(*args, **kwargs)
            for old, part in zip(results, tree_leaves(new) if results else ()):
                old.copy_(part)


def _record(function: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Keep an operation on the twin for a graph, and the tensors that it makes."""
    aliases = [each.alias_info for each in function._schema.returns]
    if any(alias is not None and not alias.is_write for alias in aliases):
        return  # a view of what is filled anyway
    made = [] if any(aliases) else [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    assert _graph is not None
    _graph.append((function, args, kwargs, made))


def _is_random(function: Any) -> bool:
    random = any(argument.name == "generator" for argument in function._schema.arguments)
    return random or torch.Tag.nondeterministic_seeded in function.tags


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def __init__(self) -> None:
        self.random = torch.Generator()

    def manual_seed_all(self, seed: int) -> None:
        self.random.manual_seed(seed + 1)

    def get_rng_state(self, device: int = 0) -> torch.Tensor:
        return self.random.get_state()

    def set_rng_state(self, state: torch.Tensor, device: int = 0) -> None:
        self.random.set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The device's random numbers in place of the CPU's."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.random.get_state())
        try:
            yield
        finally:
            self.random.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


_backend = _Backend()
backend_registration._setup_privateuseone_for_python_backend("twin", backend_module=_backend)


class TwinTensor(torch.Tensor):
    """A tensor on the twin; its numbers are in ``raw``."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> TwinTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device=torch.device("twin", 0),
        )  # fmt: skip

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, args, kwargs or {})

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"TwinTensor(shape={tuple(self.shape)})"

    def tolist(self) -> Any:
        _seen.read("tolist")
        return self.raw.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor on the twin has no NumPy array; call .cpu() first")

    __array__ = numpy

    def __deepcopy__(self, memo: Any) -> TwinTensor:
        return TwinTensor(self.raw.clone()).requires_grad_(self.requires_grad)


class _Mode(TorchDispatchMode):
    """Makes ``device="twin"`` known to operations that take no tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return _run(function, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """``torch.tensor(..., device="twin")`` and ``new_tensor``, which ask no dispatch mode."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.new_tensor and isinstance(args[0], TwinTensor):
            return torch.tensor(*args[1:], **({"dtype": args[0].dtype} | kwargs)).to("twin")
        if function is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "twin":
            del kwargs["device"]
            return torch.tensor(*args, **kwargs).to("twin")
        if function in INDEXED and isinstance(args[1], list):  # which would be copied
            args = args[0], torch.tensor(args[1]), *args[2:]
        return function(*args, **kwargs)


@contextmanager
def watched() -> Iterator[Seen]:
    """A context in which the twin exists, and counts."""
    global _seen
    outer, _seen = _seen, Seen()
    try:
        with _Factories(), _Mode():
            yield _seen
    finally:
        _seen = outer


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call ``function`` with the raw tensors, and wrap what it returns."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    twins = [tensor for tensor in tensors if isinstance(tensor, TwinTensor)]
    if twins and len(twins) < len(tensors):
        _refuse_mixed(function, args, tensors)
    kwargs, on_twin = dict(kwargs), bool(twins)
    if kwargs.get("device") is not None:
        on_twin = torch.device(kwargs["device"]).type == "twin"
        kwargs["device"] = torch.device("cpu")
        if twins and not on_twin:
            _seen.read("copy to the CPU")
        if tensors and on_twin and not twins:
            _seen.copy("copy of a tensor")
    if twins:
        _count(function, args)
    elif on_twin and not tensors and function.overloadpacket.__name__ not in VIEWS | {"empty"}:
        _seen.kernels[function.overloadpacket.__name__] += 1
    if on_twin:
        _refuse(function, tensors, kwargs)
    known = {id(twin.raw): twin for twin in twins}
    raw_args, raw_kwargs = tree_map(_raw, (args, kwargs))
    with _backend.drawing() if on_twin and _is_random(function) else nullcontext():
        result = function(*raw_args, **raw_kwargs)
    if _graph is not None and on_twin:
        _record(function, raw_args, raw_kwargs, result)
    if function is aten.copy_.default:
        return args[0]
    if function.overloadpacket is aten.to and on_twin != bool(twins):
        result = result.clone()
    return tree_map(lambda leaf: _wrapped(leaf, known, on_twin), result)


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, TwinTensor) else leaf


def _wrapped(leaf: Any, known: dict[int, TwinTensor], on_twin: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) in known:
        return known[id(leaf)]
    return TwinTensor(leaf) if on_twin else leaf


def _count(function: Any, args: Any) -> None:
    """Count what ``function`` would cost an accelerator."""
    packet = function.overloadpacket
    name = packet.__name__
    if packet in INDEXING:
        masks = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, torch.Tensor)]
        if any(mask.dtype == torch.bool for mask in masks):
            _seen.read("boolean mask")
    if packet is aten.repeat_interleave and function is not aten.repeat_interleave.self_int:
        _seen.read(name)
    if packet is aten.copy_ and not isinstance(args[0], TwinTensor):
        _seen.read("copy to the CPU")
    if packet in READS:
        _seen.read(name)
    if name not in VIEWS and packet is not aten._local_scalar_dense:
        _seen.kernels[name] += 1


def _refuse(function: Any, tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> None:
    """Raise where an operation on the twin has no kernel, or has another's generator."""
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{function}: expected a 'twin' generator, but found 'cpu'")
    name = function.overloadpacket.__name__.rstrip("_")
    if name in PRODUCTS and not all(x.is_floating_point() or x.is_complex() for x in tensors):
        raise NotImplementedError(f"{name} is not implemented for integers on twin")


def _refuse_mixed(function: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """Raise where an operation reads tensors of both devices."""
    packet = function.overloadpacket
    name, in_place = packet.__name__.rstrip("_"), packet.__name__.endswith("_")
    others = [tensor for tensor in tensors if not isinstance(tensor, TwinTensor)]
    first = isinstance(args[0], TwinTensor)
    moved: list[torch.Tensor] = []
    if name == "copy":
        moved = others if first else []
    elif packet in INDEXING and first:
        moved = [tensor for tensor in others if any(tensor is index for index in args[1])]
    elif name == "where":
        moved = [tensor for tensor in others if tensor.dim() == 0]
    for _ in moved:
        _seen.copy(name)
    left = [tensor for tensor in others if all(tensor is not other for other in moved)]
    one_number = len(left) == 1 and left[0].dim() == 0
    taken = first if in_place or name in FILLING else name in BY_ELEMENT
    if name == "copy" or not left or (one_number and taken and name in BY_ELEMENT | FILLING):
        return
    shapes = [tuple(tensor.shape) for tensor in others]
    raise RuntimeError(f"{function}: tensors of shapes {shapes} are on the CPU, others on twin")
