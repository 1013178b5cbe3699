"""``ProcessGroup``: data-parallel ranks, each with a shard of every batch.

The loss of a batch is the mean of the losses of the ranks, and so is its gradient. Each rank scales
the likelihood of its shard such that this mean is what a single process computes: the likelihood
of the whole batch, and the priors once. Without ``torch.distributed`` initialised (by
``torch.distributed.init_process_group``, which ``torchrun`` does not call) there is one rank, and
nothing is communicated. Gradients are averaged in one message, where ``DistributedDataParallel``
would need a module of one forward and one backward pass: a step here has one of each bucket.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from ..data.batches import dealt
from ..data.parts import Parts, first_sequence, in_parts
from ..data.sequences import Sequences
from ..io.files import comparable, difference, digits, fingerprint

ALONE = (
    "WORLD_SIZE is {}, and torch.distributed has not been initialised: each process fits alone. "
    "Call torch.distributed.init_process_group() before the fit, or unset WORLD_SIZE."
)
ALIKE = (
    "all ranks must start alike, and {} differ: {} in rank 0, {} in rank {}. Give all of them one "
    "seed, before the model is built, the same arguments, and the whole data; or sharded=True."
)
OWN = ("start", "generator", "group", "guide", "progress", "report", "checkpoint", "data")
# of errors that are raised in all
KINDS = (FloatingPointError, ValueError, OSError, TypeError, RuntimeError)


class ProcessGroup:
    """The ranks that fit one model; by default this process alone.

    It is a context in which the error of one rank is raised in all: the ranks wait for each other
    at its end, and before they communicate inside.

    Args:
        size: Number of ranks.
        rank: Of this process, from 0.
        group: Of torch, with these ranks; None for all.

    Example:
        >>> data = Sequences.from_list([[0], [1], [2]])
        >>> [ProcessGroup(2, rank).shard(data).total for rank in (0, 1)]  # 2 * 1 and 2 * 2
        [2, 4]
    """

    def __init__(self, size: int = 1, rank: int = 0, group: Any = None) -> None:
        self.size, self.rank, self.group = size, rank, group

    @classmethod
    def of(cls, group: Any = None) -> ProcessGroup:
        """The ranks of a group.

        Args:
            group: Of torch, or a dimension of a ``DeviceMesh``; by default all ranks of
                ``torch.distributed``, if it has been initialised.

        Raises:
            ValueError: If this process is not in the group.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            if group is not None:
                text = "group must be None before torch.distributed has been initialised"
                raise ValueError(f"{text}. Call torch.distributed.init_process_group().")
            if (size := os.environ.get("WORLD_SIZE", "")) not in ("", "0", "1"):
                warnings.warn(ALONE.format(size), RuntimeWarning, stacklevel=2)
            return cls()
        group = group.get_group() if hasattr(group, "get_group") else group
        if (rank := distributed.get_rank(group)) < 0:
            raise ValueError(
                f"group must hold this process, rank {distributed.get_rank()} of all, and does "
                "not. Call the fit in the ranks of its group alone."
            )
        return cls(distributed.get_world_size(group), rank, group)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        told = hasattr(error, "raised_in_all")
        if self.size > 1 and isinstance(error, Exception | None) and not told:
            self.together(error)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device on which the backend communicates."""
        if distributed.get_backend(self.group) != "nccl":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def shard(self, data: Sequences) -> Sequences:
        """Shard of a minibatch for this rank, all of it if it is the rank's own.

        Shards have about equally many steps; with fewer sequences than ranks, some share one.
        """
        if self.size == 1:
            return data
        if data.sharded:
            return data.with_total(data.total * self.size)
        count, chosen = len(data), dealt(data.lengths, self.rank, self.size)
        holders = len(range(self.rank % count, self.size, count)) if count < self.size else 1
        return data.batch(chosen, data.total * self.size * len(chosen) / (count * holders))

    def share(self, data: Sequences | Parts) -> Sequences | Parts:
        """Shard of the data for this rank, of each part if there are several."""
        if self.size == 1:
            return data
        return data.divided(self) if isinstance(data, Parts) else self.shard(data)

    def own(self, data: Any, sharded: bool | None) -> Sequences | Parts:
        """The data of a fit, of each rank its own if they are ``sharded``; counts are of all."""
        self.check_alike({"sharded": bool(sharded)})
        found = in_parts(data, bool(sharded))
        again = getattr(data, "sharded", False)
        if sharded and not again and self.size > 1:
            self.together()
            names = "num_observed", "num_labelled"
            counts = torch.tensor([getattr(found, name) for name in names]).double()
            counts = self.mean(counts.to(self.device)) * self.size
            vars(found).update(zip(names, counts.long().tolist()))
        return found

    def mean(self, tensor: Tensor) -> Tensor:
        """Average ``tensor`` over the ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor, group=self.group)
            tensor /= self.size
        return tensor

    def most(self, numbers: Tensor) -> Tensor:
        """Largest of the ``numbers`` of all ranks, one by one, on the CPU."""
        if self.size == 1:
            return numbers
        numbers = numbers.to(self.device)
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, self.group)
        return numbers.cpu()

    def mean_all(self, tensors: Iterable[Tensor]) -> None:
        """Average tensors over the ranks, in place, those of one dtype in one message."""
        tensors = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            some = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = self.mean(torch.cat([tensor.reshape(-1) for tensor in some]))
            for tensor, part in zip(some, flat.split([tensor.numel() for tensor in some])):
                tensor.copy_(part.view_as(tensor))

    def mean_gradients(self, parameters: list[nn.Parameter], numbers: Tensor) -> Tensor:
        """Average the gradients of ``parameters`` over the ranks; returns the mean of ``numbers``.

        A parameter that other ranks alone have used has gradient zero here; one that none has used
        keeps none.
        """
        absent = [parameter for parameter in parameters if parameter.grad is None]
        used = torch.tensor([parameter.grad is not None for parameter in parameters])
        message = torch.cat([numbers.flatten(), used.to(numbers)])
        self.mean(message)
        for parameter in absent:
            parameter.grad = torch.zeros_like(parameter)
        self.mean_all(cast(Tensor, parameter.grad) for parameter in parameters)
        if absent:  # else nobody waits for the device
            for parameter, share in zip(parameters, message[numbers.numel() :].tolist()):
                parameter.grad = parameter.grad if share else None
        return message[: numbers.numel()].view_as(numbers)

    def mean_of(self, compute: Callable[[], Tensor], size: int) -> Tensor:
        """Mean over the ranks of what ``compute`` returns, ``(size,)``; if one fails, all fail."""
        if self.size == 1:
            return compute()
        error, message = None, torch.zeros(1 + size, dtype=torch.float64, device=self.device)
        try:
            message[1:] = compute()
        except Exception as raised:  # of whatever kind: the others wait
            error, message[0] = raised, 1.0
        if self.mean(message)[0] > 0:
            self.together(error)
        return message[1:]

    def together(self, error: Exception | None = None) -> None:
        """Wait until all ranks have called this; the ``error`` of one is raised in all."""
        mark = torch.tensor(0 if error is None else self.size - self.rank)
        if self.size > 1 and (first := int(self.most(mark))):
            rank = self.size - first
            text = "\n".join([str(error), *getattr(error, "__notes__", [])])
            if not isinstance(error, KINDS):
                text = f"{type(error).__name__}: {text}"
            kind = next((kind for kind in KINDS if isinstance(error, kind)), RuntimeError)
            kind, text = self._objects_from(rank, (kind, text))
            error = error or kind(f"rank {rank}: {text}")
            vars(error)["raised_in_all"] = True
        if error is not None:
            raise error

    def of_first(self, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns in rank 0, where alone it is called; if it fails, all fail."""
        with self:
            found = compute() if self.is_first else None
        return found if self.size == 1 else self._objects_from(0, found)

    def of_all(self, tensor: Tensor) -> list[Tensor]:
        """The ``tensor`` of each rank, all of one shape."""
        if self.size == 1:
            return [tensor]
        self.together()
        here = tensor.to(self.device)
        found = [torch.empty_like(here) for _ in range(self.size)]
        distributed.all_gather(found, here, group=self.group)
        return [each.to(tensor.device) for each in found]

    def from_first(self, tensor: Tensor) -> Tensor:
        """The values that ``tensor`` has in rank 0; in others it has the same shape."""
        if self.size == 1 or not tensor.numel():
            return tensor
        self.together()
        numbers = tensor.detach().reshape(-1).view(torch.uint8).to(self.device)
        distributed.broadcast(numbers, self._source(0), self.group)
        return numbers.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def check_alike(self, arguments: Mapping[str, Any], data: Any = None) -> None:
        """Raise ValueError in all ranks unless a fit starts alike in all of them.

        Args:
            arguments: Of the fit, by name.
            data: The sequences; each rank may have its own.
        """
        if self.size == 1:
            return
        self.together()
        here = {name: comparable(each) for name, each in arguments.items() if name not in OWN}
        if data is not None:
            generator = arguments.get("generator")
            states = [torch.get_rng_state(), None if generator is None else generator.get_state()]
            here["data"] = _kind(data) if data.sharded else fingerprint(data)
            here["random numbers"] = digits(states)
            here["checkpoint"] = arguments.get("checkpoint") is not None
        found = difference(self._objects_from(0, here), here)
        differing = None if found is None else ALIKE.format(*found, self.rank)
        self.together(None if differing is None else ValueError(differing))

    def _objects_from(self, rank: int, found: Any) -> Any:
        """What another rank has ``found``, any object."""
        held = [found]
        distributed.broadcast_object_list(held, self._source(rank), self.group)
        return held[0]

    def _source(self, rank: int) -> int:
        """The number of a rank of this group among all ranks."""
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)


def _kind(data: Sequences | Parts) -> str:
    """What shares of several ranks have in common."""
    first = first_sequence(data)
    covariates = first.packed("covariates")
    columns = 0 if covariates is None else covariates.size(-1)
    shape = tuple(cast(Tensor, first.packed("values")).shape[1:])
    return f"of each rank, of steps of shape {shape} and {columns} covariates"
