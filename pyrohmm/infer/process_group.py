"""``ProcessGroup``: data-parallel ranks, each with a shard of every batch.

The loss of a batch is the mean of the losses of the ranks, and so is its gradient. Each rank scales
the likelihood of its shard such that this mean is what a single process computes: the likelihood
of the whole batch, and the priors once. Without ``torch.distributed`` initialised (``torchrun`` and
``torch.distributed.init_process_group`` do so) there is one rank, and nothing is communicated.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, distributed

from ..data.batches import Parts
from ..data.sequences import Sequences
from ..io.files import digits, fingerprint


class ProcessGroup:
    """The ranks that fit one model; by default this process alone.

    Args:
        size: Number of ranks.
        rank: Of this process, from 0.

    Example:
        >>> data = Sequences.from_list([[0], [1], [2]])
        >>> [ProcessGroup(2, rank).shard(data).total for rank in (0, 1)]  # 3 * 2 of 3, 3 * 1 of 3
        [4, 2]
    """

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    @classmethod
    def all(cls) -> ProcessGroup:
        """The ranks of ``torch.distributed``, if it has been initialised."""
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_world_size(), distributed.get_rank())
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.rank == 0

    def shard(self, data: Sequences) -> Sequences:
        """Shard of a minibatch for this rank; with fewer sequences than ranks, some share one."""
        if self.size == 1:
            return data
        count = len(data)
        chosen = torch.arange(self.rank % count, count, self.size)
        holders = len(range(self.rank % count, self.size, count)) if count < self.size else 1
        return data.batch(chosen, data.total * self.size * len(chosen) / (count * holders))

    def share(self, data: Sequences | Parts) -> Sequences | Parts:
        """Shard of the data for this rank, of each part if there are several."""
        if self.size == 1:
            return data
        return data.each(self.shard) if isinstance(data, Parts) else self.shard(data)

    def mean(self, tensor: Tensor) -> Tensor:
        """Average ``tensor`` over the ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def from_first(self, numbers: Tensor) -> Tensor:
        """Broadcast ``numbers`` of rank 0, on the CPU; other ranks have tensors of that shape."""
        if self.size == 1:
            return numbers
        numbers = numbers.to(_device())
        distributed.broadcast(numbers, 0)
        return numbers.cpu()

    def check_alike(
        self,
        data: Sequences | Parts,
        generator: torch.Generator | None,
        parameters: Iterable[Tensor],
        num_iterations: int,
    ) -> None:
        """Raise ValueError in all ranks unless a fit starts alike in all of them."""
        if self.size == 1:
            return
        random = [torch.get_rng_state(), None if generator is None else generator.get_state()]
        values = {
            "data": fingerprint(data), "random numbers": digits(random),
            "parameters": digits(parameters), "checkpoints": num_iterations,
        }  # fmt: skip
        hashes = [zlib.crc32(repr(value).encode()) for value in values.values()]
        least = torch.tensor(hashes, device=_device())
        most = least.clone()
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        for name, equal in zip(values, (least == most).tolist()):
            if not equal:
                raise ValueError(
                    f"all processes must start alike, and {name} differ: give "
                    "all of them one seed, before the model is built, and the whole data."
                )

    def wait(self) -> None:
        """Barrier: wait until all ranks have called this."""
        if self.size > 1:
            distributed.barrier()


def _device() -> torch.device:
    """The device on which the backend communicates."""
    nccl = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
