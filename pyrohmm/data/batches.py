"""``Batches``: an endless stream of minibatches, of so many sequences or of so many steps each.

Models scale the likelihood of n sequences by ``total / n``. A batch of sequences chosen at random
has the ``total`` of the whole set. Batches of similar lengths are no random sample, as longer
sequences have lower likelihoods: there the likelihood of each batch is scaled by the number of
batches in the round, so that the mean loss of a round is exactly that of the whole set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks import check_integers, check_range, check_shape
from .parts import Parts
from .sequences import Sequences

JITTER = 0.1  # share of itself by which a length may appear longer when sequences are sorted


class Window(Sequences):
    """Pieces of sequences, which some streams hold one after the other.

    Args:
        values: ``(N, T, *E)``.
        lengths: ``(N,)`` integers.
        streams: ``(N,)`` integers, the stream of each piece; those of one stream in their order.
        begins: ``(N,)`` booleans: whether the piece starts its sequence, or continues from where
            the stream ended in the window before.
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
    """Endless minibatches, each sequence once per round; or the whole set every time.

    Args:
        data: The sequences; or :class:`Parts`, of which each batch is the whole set.
        batch_size: Number of sequences in a batch.
        generator: Source of randomness on the CPU; torch's global one by default.
        batch_tokens: Largest number of steps in a batch, padding included. Sequences of similar
            length share a batch, others in each round; a longer sequence is a batch alone.
        windows: ``(streams, steps)``: the sequences of a round, concatenated, are split into
            streams of equal length, and each batch is the next so many steps of every stream.
            See :class:`Window`.
        shard: Returns the part of a batch that this process takes; all of it by default.
        agree: Called with a random order, returns the one that all processes use.

    Example:
        >>> data = Sequences.from_list([[0] * 5, [1] * 2, [2] * 2, [3] * 2])
        >>> batches = Batches(data, batch_tokens=6)
        >>> sorted(tuple(batches.take().values.shape) for _ in range(2))
        [(1, 5), (3, 2)]
    """

    def __init__(
        self,
        data: Any,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        *,
        batch_tokens: int | None = None,
        windows: tuple[int, int] | None = None,
        shard: Callable[[Any], Any] = lambda batch: batch,
        agree: Callable[[Tensor], Tensor] = lambda order: order,
    ) -> None:
        sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens, "windows": windows}
        for name, size in sizes.items():
            if size is not None and isinstance(data, Parts):
                raise ValueError(
                    f"{name} is of Sequences; of an iterable of them each step takes all."
                )
        if windows is not None and (data.has_gaps or data.labels is not None):
            raise ValueError("windows are of sequences without gaps or labels; give batch_size.")
        self.data, self.batch_size, self.batch_tokens = data, batch_size, batch_tokens
        self.windows, self.generator, self.shard, self.agree = windows, generator, shard, agree
        self.whole = None
        if batch_size is None and batch_tokens is None and windows is None:
            self.whole = shard(data)
        self.order = torch.empty(0, dtype=torch.long)  # of the sequences left in this round
        self.sizes = self.order  # of the batches left in it
        self.number = 0  # of batches in this round
        self.ends = self.order  # of its sequences, concatenated, for windows
        self.chosen = self.order  # the batch taken last

    @property
    def steps_at_once(self) -> int:
        """Largest number of steps of all sequences of a batch, about."""
        if self.windows is not None:
            return self.windows[0] * self.windows[1]
        if self.batch_tokens is not None:
            return self.batch_tokens
        lengths = self.data.lengths
        size = len(lengths) if self.batch_size is None else min(self.batch_size, len(lengths))
        return size * int(lengths.max())

    @property
    def at_end_of_round(self) -> bool:
        """Whether every sequence has been taken equally often."""
        return len(self.sizes) == 0

    def take(self) -> Any:
        """The next batch, or the shard of it that this process takes."""
        if self.whole is not None:
            return self.whole
        if self.at_end_of_round:
            self._start_round()
        size, self.sizes = int(self.sizes[0]), self.sizes[1:]
        if self.windows is not None:
            return self._window(self.number - len(self.sizes) - 1)
        self.chosen, self.order = self.order[:size], self.order[size:]
        total = self.data.total
        if self.batch_tokens is not None:
            total = total * self.number * size / len(self.data)
        return self.shard(self.data.batch(self.chosen, total))

    def _start_round(self) -> None:
        lengths = self.data.lengths
        if self.windows is not None:
            self.order = torch.randperm(len(lengths), generator=self.generator)
            streams, steps = self.windows
            length = -(-int(lengths.sum()) // streams)
            self.sizes = torch.full((-(-length // steps),), streams)
            self.ends = lengths[self.order].cumsum(0)
        elif self.batch_tokens is None:
            self.order = self.agree(torch.randperm(len(lengths), generator=self.generator))
            self.sizes = torch.tensor([len(part) for part in self.order.split(self.batch_size)])
        else:
            order = self.agree(_similar(lengths, self.generator))
            parts = cut_by_steps(lengths, order, self.batch_tokens)
            shuffled = self.agree(torch.randperm(len(parts), generator=self.generator))
            parts = [parts[i] for i in shuffled.tolist()]
            self.order = torch.cat(parts)
            self.sizes = torch.tensor([len(part) for part in parts])
        self.number = len(self.sizes)

    def _pieces(self, number: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """Pieces of window ``number``: stream, sequence, first step, steps, whether it begins."""
        assert self.windows is not None
        streams, steps = self.windows
        total = int(self.ends[-1])
        length = -(-total // streams)
        for stream in range(streams):
            first = low = stream * length + number * steps
            high = min(low + steps, (stream + 1) * length, total)
            place = int(torch.searchsorted(self.ends, low, right=True))
            while low < high:
                end = min(high, int(self.ends[place]))
                start = int(self.ends[place - 1]) if place else 0  # of the sequence
                begins = low > first or number == 0 or low == start
                yield stream, int(self.order[place]), low - start, end - low, begins
                low, place = end, place + 1

    def _window(self, number: int) -> Window:
        """The next steps of each stream."""
        columns = zip(*self._pieces(number))
        streams, rows, firsts, sizes, begins = (torch.tensor(column) for column in columns)
        clock = torch.arange(int(sizes.max()))
        places = (firsts.unsqueeze(-1) + clock).clamp(max=self.data.num_steps - 1)
        device = self.data.values.device
        values = self.data.values[rows.to(device).unsqueeze(-1), places.to(device)]
        total = self.data.total * self.number * len(rows) / len(self.data)
        return Window(values, sizes, streams, begins, total)

    def state(self) -> dict[str, Any]:
        """The minibatches left of this round, for checkpoints."""
        return {"order": self.order, "sizes": self.sizes, "number": self.number}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the :meth:`state` of another one."""
        order, sizes, number = state["order"], state["sizes"], state["number"]
        for name, numbers in (("order", order), ("sizes", sizes)):
            check_integers(name, numbers)
            check_shape(name, numbers, (numbers.numel(),), "(n,)")
        check_range("order", order, len(self.data), "N - 1")
        if len(order.unique()) < len(order) or not isinstance(number, int):
            raise ValueError("wanted each sequence once, and a number of batches")
        if int(sizes.sum()) != len(order) and self.windows is None:
            raise ValueError("wanted sizes whose sum is the number of sequences that are left")
        self.order, self.sizes, self.number = order, sizes, number
        if self.windows is not None:
            self.ends = self.data.lengths[self.order].cumsum(0)

    def explain(self, error: Exception) -> None:
        """Note which sequences a minibatch holds: errors number them within it."""
        if self.whole is None:
            error.add_note(f"The minibatch holds the sequences {self.chosen.tolist()}.")


def batches_in_round(lengths: Tensor, batch_tokens: int) -> int:
    """Number of batches of so many steps that :class:`Batches` makes of sequences in a round.

    It varies a little between rounds, as each has another order: this is the number for one fixed
    order. Random number generators are left as they are.

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
    """A random order of sequences in which those of similar length are neighbours."""
    noise = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    return (lengths * (1 + JITTER * noise)).argsort()


def cut_by_steps(lengths: Tensor, order: Tensor, num_steps: int) -> list[Tensor]:
    """Cut ``order`` into pieces of at most ``num_steps`` steps when padded, or of one sequence.

    Args:
        lengths: ``(N,)``, of all sequences.
        order: Integers, the sequences in the order wanted.
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
