"""Computations of a fit as CUDA graphs, which the host launches at once and not kernel by kernel.

A small model is a few hundred kernels of a microsecond, each of which takes the host five to
launch. A fit whose batches have one shape launches the same ones at each step: they are captured at
the third, and replayed from then on. What the host does between, such as a learning-rate schedule,
clipping and the step of the optimizer, stays as it is.

A captured computation sees nothing of Python again. So only models, guides and objectives of this
package and of Pyro are captured, whose loss depends on nothing but tensors that stay in place and
on the random numbers of the device; and of these none that reads the device, or copies to it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.guides import AutoCallable
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._sync import guessing
from ..data.sequences import Sequences
from .models import MarginalModel

OWN = ("pyrohmm.", "pyro.", "torch.")  # of whose modules the code is known
GUIDES = "pyro.infer.autoguide.guides"
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
LARGEST = 8  # shapes of minibatches that are captured
WRONG = 3  # guesses in all, after which a computation is left to the host
# operations of torch whose results, or their shapes, the host must know
READS = set(
    "_local_scalar_dense item is_nonzero nonzero equal masked_select _unique2 unique_dim "
    "unique_consecutive bincount _linalg_check_errors _linalg_eigh".split()
)
_log = logging.getLogger("pyrohmm")


class CudaGraphs:
    """Captures on one stream and in one memory pool of a CUDA device, current or not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def first(self, compute: Callable[[], Any]) -> Any:
        """Call ``compute`` on the stream of captures, which libraries prepare there."""
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                found = compute()
            torch.cuda.current_stream().wait_stream(self.stream)
        return found

    def capture(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture ``compute``; return the function that replays it, and what it fills."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads, such as loaders of data, go on
        with torch.cuda.device(self.device):
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode=mode):
                found = compute()
        return graph.replay, found  # which finds its device itself


GRAPHS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaGraphs}  # by type of device


def is_known(*things: Any) -> bool:
    """Whether the code of modules and functions is of these packages."""
    modules = [thing.modules() if isinstance(thing, nn.Module) else [thing] for thing in things]
    parts = [part for part in chain(*modules) if part is not None]
    known = all(type(part).__module__.startswith(OWN) for part in parts)
    known &= not any(isinstance(part, AutoCallable) for part in parts)
    known &= not any(getattr(getattr(part, "dropout", None), "by_call", False) for part in parts)
    hooked = any(getattr(part, name, None) for part in parts for name in HOOKS)
    return known and not hooked and not torch.is_anomaly_enabled()


def is_replayable(model: Any, guide: Any, elbo: Any) -> bool:
    """Whether the loss of ``model`` and ``guide`` depends on nothing that a graph does not see."""
    alone = inspect.unwrap(model)
    plain = type(alone) is MarginalModel and type(guide).__module__ == GUIDES and elbo is None
    return plain and is_known(alone, guide, alone.log_prior)


class Replays:
    """A computation of batches, captured for each that stays, and for each shape of minibatches.

    Args:
        compute: Of a batch on the device and a weight, or how to compute, returns tensors, nested.
        device: Where it computes.
    """

    def __init__(self, compute: Callable[[Any, Any], Any], device: torch.device) -> None:
        self.compute, self.graphs = compute, GRAPHS[device.type](device)
        self.made: dict[Any, tuple[_Replay, Any]] = {}

    def __call__(self, batch: Any, weight: Any, stays: bool = True) -> Any:
        """The result, in tensors that the next call fills again; None if it is to be computed.

        Args:
            batch: The sequences.
            weight: Of their loss, the second argument of ``compute``.
            stays: Whether the same object comes again; else its values are copied.
        """
        shape = id(batch) if stays else _shape(batch)
        if shape is None:
            return None
        if (shape, weight) not in self.made:  # the first time is one with all checks
            if stays or len(self.made) < LARGEST:
                compute = partial(self.compute, batch, weight)
                self.made[shape, weight] = _Replay(compute, self.graphs), batch
            return None
        replay, first = self.made[shape, weight]
        if not stays:  # which also drops what has been derived from the values before
            first.values.copy_(batch.values)
        return replay()


def _shape(batch: Sequences) -> tuple[Any, ...] | None:
    """What minibatches of one graph have in common; None if that is not shape alone."""
    names = [name for name, _ in batch._all_rows()]
    plain = names == ["values"] and len(batch) * batch.num_steps == batch.num_rows
    return (*batch.shape, batch.values.dtype, batch.total) if plain else None


class _Replay:
    """A computation that is called by Python once, then captured and replayed."""

    def __init__(self, compute: Callable[[], Any], graphs: Any) -> None:
        self.compute, self.graphs = compute, graphs
        self.called, self.wrong = False, 0
        self.replay: Callable[[], None] | None = None

    def __call__(self) -> Any:
        """The result; None where a guess was wrong, or nothing can be captured."""
        if self.wrong >= WRONG:
            return None
        with pyro.validation_enabled(False):  # parameters and data have been checked before
            if not self.called:
                self.called = True
                with _Watch() as watch:
                    found, margin = self.graphs.first(self._guessed)
                if watch.refused:
                    self._give_up(logging.DEBUG, watch.refused)
            else:
                if self.replay is None:
                    try:
                        self.replay, self.found = self.graphs.capture(self._guessed)
                    except RuntimeError as error:
                        self._give_up(logging.WARNING, error)
                        return None
                self.replay()
                found, margin = self.found
        if margin is None or margin.item() > 0:  # which NaN is not
            return found
        self.wrong += 1
        return None

    def _guessed(self) -> tuple[Any, Tensor | None]:
        with guessing() as guesses:
            found = self.compute()
        return found, guesses.margin()

    def _give_up(self, level: int, cause: Any) -> None:
        self.wrong = WRONG
        _log.log(
            level, "Steps are not replayed as a CUDA graph, but launched one by one: %s", cause
        )


class _Watch(TorchDispatchMode):
    """Notes what makes a computation unfit for a capture; ``refused`` says what that was."""

    refused: str | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        name, leaves = function.overloadpacket.__name__, tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        # a number of the host is an argument of a kernel, unless it is copied
        some = [x for x in given if x.dim() or not x.is_cpu or "copy" in name]
        there = {not x.is_cpu for x in (*some, *tree_leaves(found)) if isinstance(x, Tensor)}
        random = torch.Tag.nondeterministic_seeded in function.tags
        masks = "index" in name and any(x.dtype == torch.bool for x in given[1:])
        reads = name in READS or masks or (name == "repeat_interleave" and len(given) > 1)
        own = any(isinstance(x, torch.Generator) for x in leaves)
        if True not in there:
            self.refused = f"{name} draws on the host" if random else self.refused
        elif len(there) > 1 or reads or own or name == "lift_fresh":
            self.refused = f"{name} reads the device, or copies to it"
        return found
