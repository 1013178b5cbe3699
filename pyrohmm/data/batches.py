"""Minibatches of sequences, and sequences that do not fit into memory at once.

``Batches`` is an endless stream of minibatches, of so many sequences or of so many steps each.
Models scale the likelihood of n sequences by ``total / n``. A batch of sequences chosen at random
has the ``total`` of the whole set. Batches of similar lengths are no random sample, as longer
sequences have lower likelihoods: there the likelihood of each batch is scaled by the number of
batches in the round, so that the mean loss of a round is exactly that of the whole set.

``Parts`` are read part by part in every pass. ``StoredSequences`` makes such parts of memory-mapped
arrays; any iterable of ``Sequences`` that can be passed over again will do.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from .sequences import Sequences, check_sequences
from .steps import check_num_rows, checked_lengths

JITTER = 0.1  # share of itself by which a length may appear longer when sequences are sorted


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


class Parts:
    """Sequences in parts, held in memory one at a time.

    They are passed over once here, to be counted.

    Args:
        parts: Yields the parts, the same in every pass.
        change: Applied to each part: such as the shard of a rank.

    Attributes:
        first: The first sequence, which stands for all where an example is wanted.
        lengths: ``(N,)``, of all sequences.
        sizes: Number of sequences of each part.
        total: Of all parts.
        num_observed: Number of observed steps in all.
        num_labelled: Number of steps whose state is known.

    Raises:
        TypeError: If ``parts`` can be passed over only once, or yields anything but ``Sequences``.
        ValueError: If it yields nothing.
    """

    def __init__(
        self,
        parts: Iterable[Sequences],
        change: Callable[[Sequences], Sequences] = lambda part: part,
    ) -> None:
        if isinstance(parts, Iterator):
            raise TypeError(
                f"data must be iterable more than once; a {type(parts).__name__} is used up by the "
                "first pass. Give a list of Sequences, or an object whose __iter__ begins anew."
            )
        self.parts, self.change = parts, change
        self._held: tuple[int, Sequences] | None = None  # the part that was read last
        self.first: Sequences
        self.total, self.num_observed, self.num_labelled = 0.0, 0, 0
        lengths: list[Tensor] = []
        for part in self:
            if not lengths:
                self.first = part[:1]
            self.total += part.total
            self.num_observed += part.num_observed
            self.num_labelled += part.num_labelled
            lengths.append(part.lengths)
        if not lengths:
            text = "data is empty; wanted at least one Sequences in it"
            raise ValueError(f"{text}. Give a list of Sequences.")
        self.lengths, self.sizes = torch.cat(lengths), [len(part) for part in lengths]

    def __iter__(self) -> Iterator[Sequences]:
        self._held = None
        for part in self.parts:
            check_sequences("each part of data", part)
            yield self.change(part)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: slice) -> Sequences:
        """Slice of the first sequence, which stands for all of them."""
        return self.first[index]

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.first.device

    def batch(self, chosen: Tensor, total: float | None = None) -> Sequences:
        """Sequences ``chosen`` (integers) of one part, as :meth:`Sequences.batch`.

        Parts are read in their order, from the first again where an earlier one is wanted.
        """
        begins = [*accumulate([0, *self.sizes])]
        number = bisect_right(begins, int(chosen[0])) - 1
        if self._held is None or number < self._held[0]:
            self._held, self._rest = None, enumerate(self)
        while self._held is None or self._held[0] < number:
            self._held = None  # one at a time
            self._held = next(self._rest)
        return self._held[1].batch(chosen - begins[number], self.total if total is None else total)

    def each(self, change: Callable[[Sequences], Sequences]) -> Parts:
        """Copy that applies ``change`` to each part when it is read."""
        new, before = copy.copy(self), self.change
        new.change, new.first = lambda part: change(before(part)), change(self.first)
        new._held = None
        return new

    def to(self, device: torch.device | str) -> Parts:
        """Copy that moves each part to ``device`` when it is read."""
        return self.each(lambda part: part.to(device))


def in_parts(data: Any) -> Sequences | Parts:
    """Wrap an iterable of Sequences as :class:`Parts`; Sequences stay."""
    if isinstance(data, Sequences | Parts):
        return data
    if not isinstance(data, Iterable) or hasattr(data, "dtype") or hasattr(data, "columns"):
        check_sequences("data", data)
    return Parts(data)


def parts_of(data: Sequences | Parts) -> Iterable[Sequences]:
    """Iterable of the parts of the data; Sequences are one part."""
    return data if isinstance(data, Parts) else (data,)


def weighted(data: Sequences | Parts) -> Iterator[tuple[Sequences, float]]:
    """Minibatches of sequences of similar length, and weights that sum to one.

    The weighted sum of their losses is the loss of all data.
    """
    count = len(data.sizes) if isinstance(data, Parts) else 1
    for part in parts_of(data):
        for bucket in part.buckets:
            whole = bucket if count == 1 else bucket.with_total(part.total * count)
            yield whole, len(bucket) / (len(part) * count)


class StoredSequences:
    """Sequences in one array that need not fit into memory, such as a memory-mapped file.

    To iterate over them yields ``Sequences`` of at most so many steps each, which ``fit_em`` and
    ``fit_map`` take: only one of these is in memory at a time. A longer sequence comes alone.

    Args:
        values: ``(M, *E)``, the steps of all sequences, one sequence after the other: anything with
            a shape and slices, such as ``numpy.load(path, mmap_mode="r")``, a tensor of
            ``safetensors.safe_open(path, "pt").get_slice(name)``, or a data set of h5py. Rows that
            are NaN throughout are missing.
        lengths: ``(N,)`` integers of sum M.
        max_steps: Largest number of steps that are read at a time.
        labels: ``(M,)`` integers, -1 where the state is not known: an array, also mapped.
        covariates: ``(M, C)`` floating point: an array, also mapped.
        times: ``(M,)``, increasing along each sequence: an array, also mapped.

    Raises:
        ValueError: If ``lengths`` do not sum to M.

    Example:
        >>> import numpy
        >>> stored = StoredSequences(numpy.arange(7.0), [3, 2, 2], max_steps=4)
        >>> [part.values.shape[0] for part in stored]
        [1, 2]
        >>> fit_em(TabularHMM(1, normal(0)), stored).num_observed
        7
    """

    def __init__(
        self,
        values: Any,
        lengths: Any,
        *,
        max_steps: int = 1 << 20,
        labels: Any = None,
        covariates: Any = None,
        times: Any = None,
    ) -> None:
        check_size("max_steps", max_steps)
        num_rows = _num_rows(values)
        self.values = values
        further = {"labels": labels, "covariates": covariates, "times": times}
        self.further = {name: part for name, part in further.items() if part is not None}
        self.lengths = checked_lengths(lengths, num_rows)
        for name, part in self.further.items():
            check_num_rows(name, (_num_rows(part),), num_rows)
        ends, self.cuts = self.lengths.cumsum(0), [0]
        while self.cuts[-1] < len(self.lengths):
            start = self.cuts[-1]
            most = max_steps + int(ends[start] - self.lengths[start])
            self.cuts.append(max(int(torch.searchsorted(ends, most, right=True)), start + 1))

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def __iter__(self) -> Iterator[Sequences]:
        first = 0
        for start, end in pairwise(self.cuts):
            lengths = self.lengths[start:end]
            rows = slice(first, first + int(lengths.sum()))
            first = rows.stop
            further = {name: values[rows] for name, values in self.further.items()}
            yield Sequences.from_concatenated(self.values[rows], lengths, **further)


def _num_rows(values: Any) -> int:
    return int((values.get_shape() if hasattr(values, "get_shape") else values.shape)[0])


def first_sequence(data: Sequences | Parts) -> Sequences:
    """First sequence, as a minibatch of the whole set."""
    return data.first if isinstance(data, Parts) else data.batch(torch.tensor([0]))


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
        batch_size: Number of sequences in a batch; of :class:`Parts`, which come in their order,
            of each in turn.
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
        if isinstance(data, Parts) and (batch_tokens or windows):
            text = "batch_tokens and windows are for one Sequences, not for an iterable of them"
            raise ValueError(f"{text}. Give batch_size.")
        if windows is not None and (data.has_gaps or data.labels is not None):
            text = "windows need data without missing steps and labels, and some are there"
            raise ValueError(f"{text}. Give batch_size in their place.")
        self.data, self.batch_size, self.batch_tokens = data, batch_size, batch_tokens
        self.windows, self.generator, self.shard, self.agree = windows, generator, shard, agree
        some = batch_size or batch_tokens or windows
        self.whole = None if some else shard(data)
        self.number = 0  # of batches in this round
        # Of this round the order of the sequences left, the sizes of the batches left, and for
        # windows the ends of its sequences, concatenated; and the batch taken last.
        self.order = self.sizes = self.ends = self.chosen = torch.empty(0, dtype=torch.long)

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
        """Take the next batch, or the shard of it for this process."""
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
            each = self.data.sizes if isinstance(self.data, Parts) else [len(lengths)]
            orders = [torch.randperm(size, generator=self.generator) for size in each]
            begins = accumulate([0, *each])
            self.order = self.agree(torch.cat([b + order for b, order in zip(begins, orders)]))
            batches = [batch for order in orders for batch in order.split(self.batch_size)]
            self.sizes = torch.tensor([len(batch) for batch in batches])
        else:
            order = self.agree(_similar(lengths, self.generator))
            parts = cut_by_steps(lengths, order, self.batch_tokens)
            shuffled = self.agree(torch.randperm(len(parts), generator=self.generator))
            parts = [parts[i] for i in shuffled.tolist()]
            self.order = torch.cat(parts)
            self.sizes = torch.tensor([len(part) for part in parts])
        self.number = len(self.sizes)

    def _pieces(self, number: int) -> Iterator[tuple[int, int, int, int, bool]]:
        """Pieces of window ``number``: stream, sequence, first step, length, whether it is new."""
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
        """Window ``number`` of consecutive steps of each stream."""
        columns = zip(*self._pieces(number))
        streams, rows, steps, sizes, begins = (torch.tensor(column) for column in columns)
        total = self.data.total * self.number * len(rows) / len(self.data)
        starts = self.data.firsts[rows] + steps
        window: Window = self.data.runs(starts, sizes, total, torch.arange(len(rows)), Window)
        window.streams, window.begins = streams, begins
        return window

    def state(self) -> dict[str, Any]:
        """Checkpoint state: sequences and sizes of the minibatches left, and number in a round."""
        return {"order": self.order, "sizes": self.sizes, "number": self.number}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the minibatches left of a round from a checkpoint."""
        self.order, self.sizes, self.number = state["order"], state["sizes"], state["number"]
        if self.windows is not None:
            self.ends = self.data.lengths[self.order].cumsum(0)

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
