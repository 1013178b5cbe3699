"""Minibatches of sequences, and sequences that do not fit into memory at once.

``Batches`` is an endless stream of minibatches, of so many sequences or of so many steps each.
Models scale the likelihood of n sequences by ``total / n``. A batch of sequences chosen at random
has the ``total`` of the whole set. Batches of similar lengths, or of one of several parts, are no
random sample: there the likelihood of each sequence is scaled by the number of batches in the
round, so that the mean loss of a round is exactly that of the whole set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .parts import Parts
from .sequences import Sequences

JITTER = 0.1  # share of itself by which a length may appear longer when sequences are sorted
NOTHING = 1e-300  # weight of a window that stands in where none is left


# the only rank, by which nothing is divided or communicated
ALONE = SimpleNamespace(
    size=1, rank=0, **dict.fromkeys(("share", "from_first", "most"), lambda whole: whole)
)


def dealt(lengths: Tensor, rank: int, size: int) -> Tensor:
    """Sequences of a rank, in their order: as many steps as others have, up to the longest's.

    Sequences are dealt by falling length, to and fro. With fewer of them than ranks, some share
    one.

    Example:
        >>> [dealt(torch.tensor([9, 1, 8, 2]), rank, 2) for rank in (0, 1)]
        [tensor([0, 1]), tensor([2, 3])]
    """
    if len(lengths) < size:
        return torch.tensor([rank % len(lengths)])
    place = torch.arange(len(lengths)) % (2 * size)
    holder = torch.where(place < size, place, 2 * size - 1 - place)
    return lengths.argsort(descending=True, stable=True)[holder == rank].sort().values


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


class Window(Sequences):
    """A window of consecutive steps of several streams of sequences.

    Attributes:
        streams: ``(N,)`` integers, the stream of each piece; those of one stream in their order.
        begins: ``(N,)`` booleans: whether the piece starts its sequence, or continues from where
            the stream ended in the window before.
    """

    streams: Tensor
    begins: Tensor


class Batches:
    """Endless minibatches, each sequence once per round; or the whole set every time.

    Args:
        data: The sequences; or :class:`Parts`, of which each batch is the whole set.
        batch_size: Number of sequences in a batch; of :class:`Parts`, of each in turn.
        generator: Source of randomness on the CPU; torch's global one by default.
        batch_tokens: Largest number of steps in a batch, padding included. Sequences of similar
            length share a batch, others in each round; a longer sequence is a batch alone.
        windows: ``(streams, steps)``: the sequences of a round, concatenated, are split into
            streams of equal length, and each batch is the next so many steps of every stream.
            See :class:`Window`.
        group: The ranks, of which each takes a share of every batch, or streams of each window. Of
            data that are a share themselves a batch is of one rank, and all have equally many.

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
        group: Any = ALONE,
    ) -> None:
        self.group = group
        self.streams = None if windows is None else range(windows[0])
        if windows is not None:
            self._check_windows(data, windows[0])
        if self.streams is not None and not data.sharded:
            self.streams = self.streams[self.group.rank :: self.group.size]
        self.data, self.batch_size, self.batch_tokens = data, batch_size, batch_tokens
        self.windows, self.generator = windows, generator
        some = batch_size or batch_tokens or windows
        self.whole = None if some else self.group.share(data)
        self.number = 0  # of batches in this round
        self.random: Tensor | None = None  # state of the generator before this round
        # Of this round the order of the sequences left, the sizes of the batches left, and for
        # windows the ends of its sequences, concatenated; and the batch taken last.
        self.order = self.sizes = self.ends = self.chosen = torch.empty(0, dtype=torch.long)

    def _check_windows(self, data: Any, streams: int) -> None:
        """Raise unless windows can be made of the data."""
        if not hasattr(data, "runs"):
            text = "windows are for Sequences or StoredSequences, not for an iterable of them"
            raise ValueError(f"{text}. Give batch_tokens.")
        if data.has_gaps or data.num_labelled:
            text = "windows need data without missing steps and labels, and some are there"
            raise ValueError(f"{text}. Give batch_size in their place.")
        if streams < self.group.size and not data.sharded:
            text = f"windows must have a stream for each of {self.group.size} processes"
            raise ValueError(f"{text}; got {streams}. Give more, or start fewer processes.")

    @property
    def steps_at_once(self) -> int:
        """Largest number of steps of all sequences of a batch, about."""
        if self.windows is not None:
            return self.windows[0] * self.windows[1]
        if self.batch_tokens is not None:
            return self.batch_tokens
        lengths = self.data.lengths
        size = len(lengths) if self.batch_size is None else min(self.batch_size, len(lengths))
        return size * int(lengths.sum()) // len(lengths)

    @property
    def at_end_of_round(self) -> bool:
        """Whether a round is complete: every sequence has been taken equally often."""
        return len(self.sizes) == 0

    def take(self) -> Any:
        """Take the next batch, or the share of it for this rank."""
        if self.whole is not None:
            return self.whole
        if self.at_end_of_round:
            source = self.generator or torch.default_generator
            self.random = self.group.from_first(source.get_state())
            source.set_state(self._start_round(self.random))
        size, self.sizes = int(self.sizes[0]), self.sizes[1:]
        if self.windows is not None:
            return self._window(self.number - len(self.sizes) - 1)
        self.chosen, self.order = self.order[:size], self.order[size:]
        total = self.data.total
        if self.batch_tokens or (isinstance(self.data, Parts) and len(self.data.sizes) > 1):
            total = total * self.number * size / len(self.data)
        return self.group.share(self.data.batch(self.chosen, total))

    def _start_round(self, random: Tensor) -> Tensor:
        """Order a round by a generator of state ``random``; returns its state afterwards."""
        common = generator = torch.Generator()
        generator.set_state(random)
        if self.data.sharded:  # an order of its own, from what all ranks draw alike
            seed = int(torch.randint(2**62, (), generator=common)) + self.group.rank
            generator = torch.Generator().manual_seed(seed)
        lengths = self.data.lengths
        if self.windows is not None:
            self.order = torch.randperm(len(lengths), generator=generator)
            self.ends = lengths[self.order].cumsum(0)
            streams, steps = self.windows
            count = torch.tensor([math.ceil(math.ceil(int(self.ends[-1]) / streams) / steps)])
            count = self.group.most(count) if self.data.sharded else count
            self.sizes = torch.full((int(count),), streams)
        else:
            batches = self._cut_round(generator)
            self.order = torch.cat(batches)
            self.sizes = torch.tensor([len(batch) for batch in batches])
        self.number = len(self.sizes)
        return common.get_state()

    def _cut_round(self, generator: torch.Generator) -> list[Tensor]:
        """Batches of a round, as numbers of sequences."""
        data, batches = self.data, list[Tensor]()
        sizes = data.sizes if isinstance(data, Parts) else [len(data)]
        begins, numbers = [*accumulate([0, *sizes])], list(range(len(sizes)))
        if getattr(data, "shuffled", False):
            numbers = torch.randperm(len(sizes), generator=generator).tolist()
        for number in numbers:
            begin, end = begins[number : number + 2]
            if self.batch_tokens is None:
                order = torch.randperm(end - begin, generator=generator)
                cut = list(order.split(self.batch_size))
            else:
                lengths = data.lengths[begin:end]
                parts = cut_by_steps(lengths, _similar(lengths, generator), self.batch_tokens)
                shuffled = torch.randperm(len(parts), generator=generator)
                cut = [parts[n] for n in shuffled.tolist()]
            batches += [batch + begin for batch in cut]
        if not data.sharded:
            return batches
        most, least = self.group.most(torch.tensor([len(batches), -len(data)])).tolist()
        if -least < most:
            raise ValueError(
                f"data must be shares of like size: one rank has {-least} sequences, and another "
                f"{most} minibatches. Divide them evenly, or make minibatches larger."
            )
        while len(batches) < most:  # the largest are halved
            largest = sorted(range(len(batches)), key=lambda n: len(batches[n]), reverse=True)
            halved = {n for n in largest[: most - len(batches)] if len(batches[n]) > 1}
            pieces = [b.tensor_split(1 + (n in halved)) for n, b in enumerate(batches)]
            batches = [piece for each in pieces for piece in each]
        return batches

    def _pieces(self, number: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """Pieces of window ``number``: stream, sequence, first step, length, whether it is new."""
        assert self.windows is not None
        assert self.streams is not None
        streams, steps = self.windows
        total = int(self.ends[-1])
        length = -(-total // streams)
        for stream in self.streams:
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
        """Window ``number`` of consecutive steps of each stream."""
        assert self.streams is not None
        pieces = [*self._pieces(number)]
        columns = zip(*(pieces or [(self.streams[0], 0, 0, 1, True)]))  # others go on
        streams, rows, steps, sizes, begins = (torch.tensor(column) for column in columns)
        total = self.data.total * self.number * len(rows) * self.group.size / len(self.data)
        starts = self.data.firsts[rows] + steps
        window: Window = self.data.runs(starts, sizes, total, torch.arange(len(rows)), Window)
        window.total = window.total if pieces else NOTHING
        window.streams, window.begins = streams, begins
        return window

    def state(self) -> dict[str, Any]:
        """Checkpoint state: of the generator before the round, and minibatches left of it."""
        return {"random": self.random, "left": len(self.sizes)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the minibatches left of a round from a checkpoint."""
        if "order" in state:  # up to version 0.6
            self.order, self.sizes, self.number = state["order"], state["sizes"], state["number"]
            if self.windows is not None:
                self.ends = self.data.lengths[self.order].cumsum(0)
        elif state["random"] is not None:
            self.random = state["random"]
            self._start_round(self.random)
            done = self.number - state["left"]
            if self.windows is None:
                self.order = self.order[int(self.sizes[:done].sum()) :]
            self.sizes = self.sizes[done:]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context: errors name the sequences of the minibatch by their numbers in the whole set."""
        try:
            yield
        except ValueError as error:
            if self.whole is None:
                error.add_note(f"The minibatch holds the sequences {self.chosen.tolist()}.")
            raise


def batches_in_round(lengths: Tensor, batch_tokens: int) -> int:
    """Number of minibatches of at most ``batch_tokens`` steps in a round over all sequences.

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
    """Random order of sequences in which those of similar length are neighbours."""
    noise = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    return (lengths * (1 + JITTER * noise)).argsort()
