"""Minibatches of sequences, and sequences that do not fit into memory at once.

``Batches`` is an endless stream of minibatches, of so many sequences or of so many steps each.
Models scale the likelihood of n sequences by ``total / n``. A batch of sequences chosen at random
has the ``total`` of the whole set. Batches of similar lengths are no random sample, as longer
sequences have lower likelihoods: there the likelihood of each batch is scaled by the number of
batches in the round, so that the mean loss of a round is exactly that of the whole set.

``Parts`` are read part by part in every pass; any iterable of ``Sequences`` that can be passed over
again will do. ``StoredSequences`` are the parts of memory-mapped arrays, read in any order.
"""

from __future__ import annotations

import copy
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from .sequences import Sequences, check_sequences
from .steps import check_num_rows, checked_lengths, firsts

JITTER = 0.1  # share of itself by which a length may appear longer when sequences are sorted
NOTHING = 1e-300  # weight of a window that stands in where none is left


class Alone:
    """The only rank: nothing is divided or communicated. ``ProcessGroup`` is that of several."""

    size, rank = 1, 0

    def share(self, data: Any) -> Any:
        """The part of the data, or of a batch, that this rank takes."""
        return data

    def from_first(self, numbers: Tensor) -> Tensor:
        """``numbers`` of rank 0."""
        return numbers

    def most(self, numbers: Tensor) -> Tensor:
        """Largest of the ``numbers`` of all ranks, one by one."""
        return numbers


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


class Parts:
    """Sequences in parts, held in memory one at a time.

    They are passed over once here, to be counted.

    Args:
        parts: Yields the parts, the same in every pass.

    Attributes:
        first: The first sequence, which stands for all where an example is wanted.
        lengths: ``(N,)``, of all sequences.
        sizes: Number of sequences of each part.
        total: Of all parts.
        num_observed: Number of observed steps in all.
        num_labelled: Number of steps whose state is known.
        sharded: Whether they are the share of one rank: see :class:`pyrohmm.FitOptions`.

    Raises:
        TypeError: If ``parts`` can be passed over only once, or yields anything but ``Sequences``.
        ValueError: If it yields nothing.
    """

    sharded = False
    shuffled = False  # whether minibatches come from the parts in a random order
    first: Sequences
    lengths: Tensor
    total: float
    sizes: list[int]
    _held: tuple[int, Sequences] | None = None  # the part that was read last
    _change: Callable[[Sequences], Sequences] | None = None  # applied to each part

    def __init__(self, parts: Iterable[Sequences]) -> None:
        if isinstance(parts, Iterator):
            raise TypeError(
                f"data must be iterable more than once; a {type(parts).__name__} is used up by the "
                "first pass. Give a list of Sequences, or an object whose __iter__ begins anew."
            )
        self.parts, self.total = parts, 0.0
        observed = labelled = 0
        lengths: list[Tensor] = []
        for part in self:
            if not lengths:
                self.first = part[:1]
            self.total += part.total
            observed += part.num_observed
            labelled += part.num_labelled
            lengths.append(part.lengths)
        if not lengths:
            text = "data is empty; wanted at least one Sequences in it"
            raise ValueError(f"{text}. Give a list of Sequences.")
        self.lengths, self.sizes = torch.cat(lengths), [len(part) for part in lengths]
        vars(self).update(num_observed=observed, num_labelled=labelled)

    @cached_property
    def num_observed(self) -> int:
        """Number of observed steps in all."""
        return sum(part.num_observed for part in self)

    @cached_property
    def num_labelled(self) -> int:
        """Number of steps whose state is known."""
        return sum(part.num_labelled for part in self)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether steps that exist are missing."""
        return any(part.has_gaps for part in self)

    def __iter__(self) -> Iterator[Sequences]:
        self._held = None
        for part in self.parts:
            check_sequences("each part of data", part)
            yield self._changed(part)

    def _changed(self, part: Sequences) -> Sequences:
        part = as_share(part) if self.sharded else part
        return part if self._change is None else self._change(part)

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
        """Sequences ``chosen`` (integers) of one part, as :meth:`Sequences.batch`."""
        begins = [*accumulate([0, *self.sizes])]
        number = bisect_right(begins, int(chosen[0])) - 1
        part = self._part(number)
        return part.batch(chosen - begins[number], self.total if total is None else total)

    def _part(self, number: int) -> Sequences:
        """One part. They are read in their order, from the first again for an earlier one."""
        if self._held is None or number < self._held[0]:
            self._held, self._rest = None, enumerate(self)
        while self._held is None or self._held[0] < number:
            self._held = None  # one at a time
            self._held = next(self._rest)
        return self._held[1]

    def divided(self, group: Any) -> Parts:
        """The share of one of several ranks, of each part."""
        return self.each(group.shard)

    def each(self, change: Callable[[Sequences], Sequences]) -> Parts:
        """Copy that applies ``change`` to each part when it is read."""
        new, before = copy.copy(self), self._change
        new._change = change if before is None else lambda part: change(before(part))
        new.first, new._held = change(self.first), None
        return new

    def to(self, device: torch.device | str) -> Parts:
        """Copy that moves each part to ``device`` when it is read."""
        return self.each(lambda part: part.to(device))


def in_parts(data: Any, sharded: bool = False) -> Sequences | Parts:
    """Wrap an iterable of Sequences as :class:`Parts`; Sequences stay.

    ``sharded`` data are those of one rank alone.
    """
    if not isinstance(data, Sequences | Parts):
        if not isinstance(data, Iterable) or hasattr(data, "dtype") or hasattr(data, "columns"):
            check_sequences("data", data)
        data = Parts(data)
    return as_share(data) if sharded else data


def as_share(data: Any) -> Any:
    """Copy of data that are the share of one rank alone."""
    if data.sharded:
        return data
    new = copy.copy(data)
    new.sharded = True
    if isinstance(new, Sequences):
        new._several = None  # buckets are shares, too
    else:
        new.first, new._held = as_share(new.first), None
    return new


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


class StoredSequences(Parts):
    """Sequences in one array that need not fit into memory, such as a memory-mapped file.

    To iterate over them yields ``Sequences`` of at most so many steps each: only one of these is in
    memory at a time. A longer sequence comes alone. ``fit_em``, ``fit_map``, ``fit_svi`` and
    ``LanguageModel.fit`` take them. Minibatches come from one such part at a time, the parts in a
    random order, shuffled within; of several ranks each reads its share alone.

    Args:
        values: ``(M, *E)``, the steps of all sequences, one sequence after the other: anything with
            a shape and slices, such as ``numpy.load(path, mmap_mode="r")``, a tensor of
            ``safetensors.safe_open(path, "pt").get_slice(name)``, or a data set of h5py. Rows that
            are NaN throughout are missing. Integers of any size will do.
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

    shuffled = True

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
        self.values, self.max_steps = values, max_steps
        self.dtype: torch.dtype | None = None
        further = {"labels": labels, "covariates": covariates, "times": times}
        self.further = {name: part for name, part in further.items() if part is not None}
        lengths = checked_lengths(lengths, num_rows)
        for name, part in self.further.items():
            check_num_rows(name, (_num_rows(part),), num_rows)
        values_read = self._read(0, torch.tensor([1])).packed("values")
        if values_read is not None and not values_read.is_floating_point():  # none is missing
            self.dtype = torch.long
            vars(self).update(num_observed=num_rows, has_gaps=False)
        self._take(lengths, firsts(lengths))
        if labels is None:
            vars(self).update(num_labelled=0)

    def _take(self, lengths: Tensor, begins: Tensor) -> None:
        """Keep the sequences of ``lengths`` whose rows begin at ``begins``, one after the other."""
        self.lengths, self.firsts, self.total = lengths, begins, len(lengths)
        ends, cuts = begins + lengths, [0]
        while cuts[-1] < len(lengths):
            most = self.max_steps + int(begins[cuts[-1]])
            cuts.append(max(int(torch.searchsorted(ends, most, right=True)), cuts[-1] + 1))
        self.sizes = [end - start for start, end in pairwise(cuts)]
        self.first = self.runs(begins[:1], lengths[:1].clamp(max=self.max_steps), 1, begins[:1] * 0)

    def __iter__(self) -> Iterator[Sequences]:
        for number in range(len(self.sizes)):
            self._held = None  # one at a time
            yield self._part(number)

    def _part(self, number: int) -> Sequences:
        if self._held is None or self._held[0] != number:
            start, self._held = sum(self.sizes[:number]), None
            lengths = self.lengths[start : start + self.sizes[number]]
            self._held = number, self._changed(self._read(int(self.firsts[start]), lengths))
        return self._held[1]

    def _read(self, begin: int, lengths: Tensor) -> Sequences:
        rows = slice(begin, begin + int(lengths.sum()))
        further = {name: values[rows] for name, values in self.further.items()}
        return Sequences.from_concatenated(self.values[rows], lengths, dtype=self.dtype, **further)

    def runs(
        self, begins: Tensor, lengths: Tensor, total: float, indices: Tensor, kind: Any = None
    ) -> Any:
        """Sequences made of runs of rows, as :meth:`Sequences.runs`."""
        parts = [self._read(begin, size[None]) for begin, size in zip(begins.tolist(), lengths)]
        joined = self._changed(parts[0].with_total(len(parts)).collate(parts))
        return joined.runs(joined.firsts, lengths, total, indices, kind)

    def divided(self, group: Any) -> Parts:
        """The share of one of several ranks: neighbours, of as many steps as others have."""
        if len(self) < group.size:
            return super().divided(group)
        ends = self.lengths.cumsum(0)
        each = torch.arange(group.size + 1)  # at least one sequence
        cuts = torch.searchsorted(ends, ends[-1] * each // group.size, right=True)
        cuts = torch.minimum((cuts - each).cummax(0).values + each, len(self) - group.size + each)
        new, chosen = copy.copy(self), slice(*cuts[group.rank : group.rank + 2].tolist())
        new._take(self.lengths[chosen], self.firsts[chosen])
        return new.each(lambda part: part.with_total(part.total * group.size))


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
        group: Any = None,
    ) -> None:
        self.group: Any = Alone() if group is None else group
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
        if self.batch_tokens is not None:
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
        return _cut_finer(batches, most)

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


def _cut_finer(batches: list[Tensor], count: int) -> list[Tensor]:
    """Halve the largest batches until there are ``count``."""
    heap = [(-len(batch), number, batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    while len(heap) < count:
        _, number, batch = heapq.heappop(heap)
        for half, place in zip(batch.tensor_split(2), (number, len(heap) + 1)):
            heapq.heappush(heap, (-len(half), place, half))
    return [batch for _, _, batch in sorted(heap, key=lambda each: each[1])]
