"""``Parts``: sequences that do not fit into memory at once, read part by part in every pass.

``StoredSequences`` makes such parts of memory-mapped arrays; any iterable of ``Sequences`` that can
be passed over again will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._checks import check_size
from .sequences import Sequences, check_sequences
from .steps import check_num_rows, checked_lengths


class Parts:
    """Sequences in parts, of which fits hold one at a time.

    They are passed over once here, to be counted.

    Args:
        parts: Yields the parts, the same in every pass.
        change: Applied to each part: such as the shard of a rank.

    Attributes:
        first: The first sequence, which stands for all where an example is wanted.
        lengths: ``(N,)``, of all sequences.
        num_parts: Number of parts.
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
                f"data must be iterable more than once; got a {type(parts).__name__}, which is "
                "used up by the first pass. Give a list of Sequences, or an object whose __iter__ "
                "begins anew."
            )
        self.parts, self.change = parts, change
        self.first: Sequences
        self.num_parts = self.num_observed = self.num_labelled = 0
        lengths = []
        for part in self:
            if self.num_parts == 0:
                self.first = part[:1]
            self.num_parts += 1
            self.num_observed += part.num_observed
            self.num_labelled += part.num_labelled
            lengths.append(part.lengths)
        if not lengths:
            raise ValueError("data is empty; wanted at least one Sequences in it.")
        self.lengths = torch.cat(lengths)

    def __iter__(self) -> Iterator[Sequences]:
        for part in self.parts:
            check_sequences("each part of data", part)
            yield self.change(part)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: slice) -> Sequences:
        """A part of the first sequence, which stands for all."""
        return self.first[index]

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.first.device

    def scaled(self) -> Iterator[Sequences]:
        """The parts, with totals such that the mean of their losses is the loss of all."""
        for part in self:
            yield part.with_total(part.total * self.num_parts)

    def each(self, change: Callable[[Sequences], Sequences]) -> Parts:
        """The parts, each of them changed when it is read."""
        new = object.__new__(Parts)
        before = self.change
        vars(new).update(vars(self))
        new.change, new.first = lambda part: change(before(part)), change(self.first)
        return new

    def to(self, device: torch.device | str) -> Parts:
        """The parts, each of them copied to ``device`` when it is read."""
        return self.each(lambda part: part.to(device))


def in_parts(data: Any) -> Sequences | Parts:
    """The data of a fit: in memory, or an iterable as :class:`Parts`."""
    if isinstance(data, Sequences | Parts):
        return data
    if not isinstance(data, Iterable) or hasattr(data, "dtype") or hasattr(data, "columns"):
        check_sequences("data", data)
    return Parts(data)


def parts_of(data: Sequences | Parts) -> Iterable[Sequences]:
    """The parts, of which data in memory are one."""
    return data if isinstance(data, Parts) else (data,)


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
        max_steps: Largest number of steps that are read at a time, padding included.
        labels: ``(M,)`` integers, -1 where the state is not known: an array, also mapped.
        covariates: ``(M, C)`` floating point: an array, also mapped.
        times: ``(M,)``, increasing along each sequence: an array, also mapped.

    Raises:
        TypeError: If ``values`` have no shape.
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
        num_rows = _num_rows("values", values)
        self.values = values
        further = {"labels": labels, "covariates": covariates, "times": times}
        self.further = {name: part for name, part in further.items() if part is not None}
        self.lengths = checked_lengths(lengths, num_rows)
        for name, part in self.further.items():
            check_num_rows(name, (_num_rows(name, part),), num_rows)
        self.ends = self.lengths.cumsum(0)
        self.places = _places(self.lengths, max_steps)

    def __len__(self) -> int:
        return len(self.places) - 1

    def __iter__(self) -> Iterator[Sequences]:
        for first, last in zip(self.places[:-1], self.places[1:]):
            rows = slice(int(self.ends[first - 1]) if first else 0, int(self.ends[last - 1]))
            yield Sequences.from_concatenated(
                self.values[rows],
                self.lengths[first:last],
                **{name: part[rows] for name, part in self.further.items()},
            )


def _num_rows(name: str, values: Any) -> int:
    shape: Any = (
        values.get_shape() if hasattr(values, "get_shape") else getattr(values, "shape", ())
    )
    if len(shape) < 1:
        raise TypeError(
            f"{name} must be an array of shape (M, *E), perhaps mapped; got "
            f"{type(values).__name__}. Convert lists with numpy.asarray."
        )
    return int(shape[0])


def _places(lengths: Tensor, max_steps: int) -> list[int]:
    """First sequence of each part, and N: sequences times the longest stay below a size."""
    places, longest = [0], 0
    for place, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if place > places[-1] and (place + 1 - places[-1]) * longest > max_steps:
            places.append(place)
            longest = length
    return [*places, len(lengths)]


def first_sequence(data: Sequences | Parts) -> Sequences:
    """The first sequence, as a minibatch of the whole set."""
    return data.first if isinstance(data, Parts) else data.batch(torch.tensor([0]))
