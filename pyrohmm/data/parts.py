"""Sequences in parts, which need not fit into memory at once.

``Parts`` are read part by part in every pass; any iterable of ``Sequences`` that can be passed over
again will do. ``StoredSequences`` are the parts of memory-mapped arrays, read in any order.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from .sequences import Sequences, check_sequences
from .steps import check_num_rows, checked_lengths, firsts


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
    new.sharded, new._several = True, None  # buckets are shares, too
    if isinstance(new, Parts):
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
        kind = self._read(0, torch.tensor([1])).values.dtype
        if not kind.is_floating_point:  # none is missing
            self.dtype = kind if kind == torch.bool else torch.long
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
