"""``Batches``: minibatches without end, of so many sequences or of so many steps each.

Models scale the likelihood of n sequences by ``total / n``. Batches of sequences chosen at random
stand for the whole set, which is their ``total``. Batches of similar lengths do not stand for it,
long sequences having lower likelihoods; there the likelihood of each batch is scaled by the number
of batches of the round, whose mean loss is then exactly that of the whole set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .process_group import ProcessGroup
from .sequences import Sequences

JITTER = 0.1  # by how much of itself a length may seem larger when sequences are sorted


class Window(Sequences):
    """Pieces of sequences, which some streams hold one after the other.

    Args:
        values: ``(N, T, *E)``.
        lengths: ``(N,)`` integers.
        streams: ``(N,)`` integers, which stream holds each piece; those of one in their order.
        begins: ``(N,)`` booleans, whether a piece begins; or goes on from where the stream ended in
            the window before.
        total: As in :class:`Sequences`.
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Tensor,
        streams: Tensor,
        begins: Tensor,
        total: float | None = None,
    ) -> None:
        super().__init__(values, lengths, total=total)
        self.streams, self.begins = streams, begins

    def to(self, device: torch.device | str) -> Window:
        """Copy to ``device`` what is not there yet."""
        values = self.values.to(device)
        return Window(values, self.lengths, self.streams, self.begins, self.total)


class Batches:
    """Minibatches without end, each sequence once in every round; or always the whole set.

    Args:
        data: The sequences.
        batch_size: Number of sequences in a batch.
        generator: Source of randomness on the CPU; torch's global one by default.
        batch_tokens: Largest number of steps in a batch, padding included. Sequences of similar
            length come together, other ones in each round; a longer sequence is a batch alone.
        windows: ``(streams, steps)``: the sequences of a round, one after the other, are parted
            into streams of equal length, and each batch is the next so many steps of every stream.
            See :class:`Window`.
        processes: Those that share every batch; this one alone by default.

    Example:
        >>> data = Sequences.from_list([[0] * 5, [1] * 2, [2] * 2, [3] * 2])
        >>> batches = Batches(data, batch_tokens=6)
        >>> sorted(tuple(batches.take().values.shape) for _ in range(2))
        [(1, 5), (3, 2)]
    """

    def __init__(
        self,
        data: Sequences,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        *,
        batch_tokens: int | None = None,
        windows: tuple[int, int] | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        self.data, self.batch_size, self.batch_tokens = data, batch_size, batch_tokens
        self.generator, self.processes = generator, processes or ProcessGroup()
        self.windows = windows
        if windows is not None and (data.has_gaps or data.labels is not None):
            raise ValueError("windows are of sequences without gaps or labels; give batch_size.")
        if windows is not None and self.processes.size > 1:
            raise ValueError("windows go on from each other, and cannot be shared by processes.")
        self.whole = None
        if batch_size is None and batch_tokens is None and windows is None:
            self.whole = self.processes.shard(data)
        self.order = torch.empty(0, dtype=torch.long)  # what is left of this round
        self.sizes = self.order  # of the batches that are left of it
        self.number = 0  # of batches of this round
        self.ends = self.order  # where its sequences end, one after the other, for windows
        self.chosen = self.order  # what was taken last

    @property
    def at_end_of_round(self) -> bool:
        """Whether each sequence was taken as often as the others."""
        return len(self.sizes) == 0

    def take(self) -> Sequences:
        """The next batch, or the share of it that falls to this process."""
        if self.whole is not None:
            return self.whole
        if self.at_end_of_round:
            self._begin_round()
        if self.windows is not None:
            self.sizes = self.sizes[1:]
            return self._window(self.number - len(self.sizes) - 1)
        size = int(self.sizes[0])
        self.chosen, self.order = self.order[:size], self.order[size:]
        self.sizes = self.sizes[1:]
        total = self.data.total
        if self.batch_tokens is not None:
            total = total * self.number * size / len(self.data)
        return self.processes.shard(self.data.batch(self.chosen, total))

    def _begin_round(self) -> None:
        if self.windows is not None:
            self.order = torch.randperm(len(self.data), generator=self.generator)
            streams, steps = self.windows
            length = -(-int(self.data.lengths.sum()) // streams)
            self.sizes = torch.full((-(-length // steps),), streams)
            self.ends = self.data.lengths[self.order].cumsum(0)
        elif self.batch_tokens is None:
            order = torch.randperm(len(self.data), generator=self.generator)
            self.order = self.processes.from_first(order)
            self.sizes = torch.tensor([len(each) for each in self.order.split(self.batch_size)])
        else:
            order = self.processes.from_first(_similar(self.data.lengths, self.generator))
            parts = cut_by_steps(self.data.lengths, order, self.batch_tokens)
            shuffled = torch.randperm(len(parts), generator=self.generator)
            parts = [parts[i] for i in self.processes.from_first(shuffled).tolist()]
            self.order = torch.cat(parts)
            self.sizes = torch.tensor([len(each) for each in parts])
        self.number = len(self.sizes)

    def _pieces(self, number: int) -> list[list[tuple[int, int, int]]]:
        """For each stream, its pieces in a window: of which sequence, from where and how long."""
        assert self.windows is not None
        streams, steps = self.windows
        ends = self.ends
        total = int(ends[-1])
        length = -(-total // streams)
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(streams)]
        for stream, pieces in enumerate(found):
            low = stream * length + number * steps
            high = min(low + steps, (stream + 1) * length, total)
            place = int(torch.searchsorted(ends, low, right=True))
            while low < high:
                end = min(high, int(ends[place]))
                begin = int(ends[place - 1]) if place else 0  # of the sequence
                pieces.append((int(self.order[place]), low - begin, end - low))
                low, place = end, place + 1
        return found

    def _window(self, number: int) -> Window:
        """The next steps of each stream."""
        found = [
            (stream, *piece, place > 0 or number == 0 or piece[1] == 0)
            for stream, pieces in enumerate(self._pieces(number))
            for place, piece in enumerate(pieces)
        ]
        streams, rows, firsts, sizes, begins = (torch.tensor(each) for each in zip(*found))
        clock = torch.arange(int(sizes.max()))
        places = (firsts.unsqueeze(-1) + clock).clamp(max=self.data.num_steps - 1)
        device = self.data.values.device
        values = self.data.values[rows.to(device).unsqueeze(-1), places.to(device)]
        total = self.data.total * self.number * len(rows) / len(self.data)
        return Window(values, sizes, streams, begins, total)

    def state(self) -> dict[str, Any]:
        """What is left of this round, for checkpoints."""
        return {"order": self.order, "sizes": self.sizes, "number": self.number}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        self.order, self.sizes, self.number = state["order"], state["sizes"], state["number"]
        if self.windows is not None:
            self.ends = self.data.lengths[self.order].cumsum(0)

    def explain(self, error: Exception) -> None:
        """Say which sequences a minibatch holds, for errors number them within it."""
        if self.whole is None:
            error.add_note(f"The minibatch holds the sequences {self.chosen.tolist()}.")


def batches_in_round(lengths: Tensor, batch_tokens: int) -> int:
    """How many batches of so many steps :class:`Batches` makes of sequences in a round.

    Their number varies a little, as each round has another order: this is that of one order, always
    the same, and no source of randomness moves.

    Args:
        lengths: ``(N,)``, of the sequences.
        batch_tokens: Largest number of steps in a batch, padding included.

    Example:
        >>> batches_in_round(torch.tensor([5, 2, 2, 2]), 6)
        2
    """
    order = _similar(lengths, torch.Generator().manual_seed(0))
    return len(cut_by_steps(lengths, order, batch_tokens))


def _similar(lengths: Tensor, generator: torch.Generator | None) -> Tensor:
    """An order of sequences in which those of similar length are together."""
    noise = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    return (lengths * (1 + JITTER * noise)).argsort()


def cut_by_steps(lengths: Tensor, order: Tensor, num_steps: int) -> list[Tensor]:
    """Cut ``order`` into pieces of at most ``num_steps`` steps when padded, or of one sequence.

    Args:
        lengths: ``(N,)``, of all sequences.
        order: Integers, which sequences, in the order wanted.
        num_steps: Of a piece: its longest sequence times their number.

    Example:
        >>> cut_by_steps(torch.tensor([1, 2, 3, 9]), torch.arange(4), 6)
        [tensor([0, 1]), tensor([2]), tensor([3])]
    """
    sizes, longest = [0], 0
    for length in lengths[order].tolist():
        longest = max(longest, length)
        if sizes[-1] and longest * (sizes[-1] + 1) > num_steps:
            sizes.append(0)
            longest = length
        sizes[-1] += 1
    return list(order.split(sizes))
