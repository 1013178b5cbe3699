"""``ProcessGroup``: those that fit one model side by side, each on its share of every batch.

The loss of a batch is the mean of those of the processes, and its gradient that of theirs. Each
scales the likelihood of its share such that this mean is what one process finds: the likelihood of
the whole batch, and the priors once. Nothing of it happens where ``torch.distributed`` has not been
initialised, as ``torchrun`` and ``torch.distributed.init_process_group`` do.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, distributed

from .sequences import Sequences


class ProcessGroup:
    """Several processes, or this one alone.

    Args:
        size: How many there are.
        rank: Which of them this is, from 0.

    Example:
        >>> data = Sequences.from_list([[0], [1], [2]])
        >>> [ProcessGroup(2, rank).shard(data).total for rank in (0, 1)]  # 3 * 2 of 3, 3 * 1 of 3
        [4, 2]
    """

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    @classmethod
    def all(cls) -> ProcessGroup:
        """Those of ``torch.distributed``, if it has been initialised."""
        if distributed.is_available() and distributed.is_initialized():
            return cls(distributed.get_world_size(), distributed.get_rank())
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    def shard(self, data: Sequences) -> Sequences:
        """What this process takes of ``data``; its ``total`` counts the others' shares as well.

        Of fewer sequences than processes, some are taken by several, each for a part of its weight.
        """
        if self.size == 1:
            return data
        count = len(data)
        chosen = torch.arange(self.rank % count, count, self.size)
        holders = len(range(self.rank % count, self.size, count)) if count < self.size else 1
        return data.batch(chosen, data.total * self.size * len(chosen) / (count * holders))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of ``tensor`` over the processes, in its place."""
        if self.size > 1:
            distributed.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def from_first(self, numbers: Tensor) -> Tensor:
        """The numbers of the first process, which has as many, on the CPU."""
        if self.size == 1:
            return numbers
        numbers = numbers.to(_device())
        distributed.broadcast(numbers, 0)
        return numbers.cpu()

    def check_same(self, **what: object) -> None:
        """Raise unless each of these is the same in all of several processes.

        Raises:
            ValueError: In all processes: it names the first that differs.
        """
        digits = [zlib.crc32(repr(each).encode()) for each in what.values()]
        least = torch.tensor(digits, device=_device())
        most = least.clone()
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        for name, equal in zip(what, (least == most).tolist()):
            if not equal:
                raise ValueError(
                    f"all processes must begin alike, and {name.replace('_', ' ')} differ between "
                    "them. Call pyro.set_rng_seed with one seed in all of them, before the model "
                    "is built, and give all of them the whole data."
                )

    def wait(self) -> None:
        """Until all processes have come here."""
        if self.size > 1:
            distributed.barrier()


def _device() -> torch.device:
    """Where the backend wants its tensors."""
    nccl = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
