"""``PackedSequences``: the rows of many sequences, one after another, and what is computed on them.

Rows are padded to ``(N, T, *)`` when that is asked for, and cut into buckets of similar length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import torch
from torch import Tensor

from .._checks import check_shape, check_tensor
from ..ops.log_space import step_mask
from .steps import PADDING, begins, check_total, firsts, packed, padded

if TYPE_CHECKING:
    from .tables import Table


SPREAD = 1.25  # longest over shortest sequence of a bucket
SHORT = 1 << 15  # steps, padding included, below which a bucket may spread wider
LITTLE = 1 << 16  # steps, padding included, below which all sequences are one bucket
RAGGED = 1.5  # of the steps, padding included, over the rows: below that they are, too
MOST, TIMES = 1 << 24, 20  # steps that padding may make, and how many times the rows


def _version(part: Tensor) -> int | None:
    """Number of changes in place; None in inference mode, which does not count them."""
    return None if part.is_inference() else part._version


class _Padded:
    """Descriptor of an attribute ``(N, T, *)``: stored packed, padded on access, then cached."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, data: PackedSequences | None, owner: type | None = None) -> Any:
        if data is None:
            return self
        if self.name not in data._padded:
            rows = data._rows.get(self.name)
            if rows is None and self.name != "observed":
                return None
            data._check_padding(self.name)
            whole = data.exists.clone() if rows is None else padded(
                rows, data.lengths, PADDING.get(self.name, 0.0)
            )  # fmt: skip
            data._padded[self.name], data._read[self.name] = whole, _version(whole)
        return data._padded[self.name]

    def __set__(self, data: PackedSequences, value: Any) -> None:
        data._rows = {name: rows for name, rows in data._rows.items() if name != self.name}
        data._padded = data._padded | {self.name: value}
        data._read = {name: number for name, number in data._read.items() if name != self.name}
        data._forget()


class PackedSequences:
    """Sequences as rows ``(M, *)``, one after another."""

    lengths: Tensor
    total: float
    indices: Tensor
    numbered: bool  # indices say which sequences of the whole set these are
    sharded = False  # whether they are the share of one rank
    _rows: dict[str, Tensor]  # (M, *) by name; those that are None or all observed are left out
    _padded: dict[str, Any]  # (N, T, *)
    _several: Any = None  # buckets, and of which state
    _read: dict[str, int | None]  # versions of these when they were packed
    table: Table | None

    values = cast(Tensor, _Padded())
    observed = cast(Tensor, _Padded())
    labels = cast("Tensor | None", _Padded())
    covariates = cast("Tensor | None", _Padded())
    times = cast("Tensor | None", _Padded())
    rows = cast("Tensor | None", _Padded())  # numbers of the rows of the table they come from
    locations = cast("Tensor | None", _Padded())  # (N, T, 2), of tracks: see movement

    def packed(self, name: str) -> Tensor | None:
        """An attribute ``(N, T, *)``, such as ``"values"``, as rows ``(M, *)`` without padding.

        Of ``"observed"`` it is None if no step is missing.

        Example:
            >>> Sequences.from_list([[3, 1, 4], [1]]).packed("values")
            tensor([3, 1, 4, 1])
        """
        whole = self._padded.get(name)
        if whole is not None and self._read.get(name, -1) != _version(whole):
            self._rows[name] = packed(whole, self.lengths)
            self._read[name] = _version(whole)
        return self._rows.get(name)

    @property
    def has_gaps(self) -> bool:
        """Whether steps that exist are missing."""
        return self.packed("observed") is not None

    @property
    def known(self) -> Tensor:
        """Mask ``(M,)`` of the packed steps that are observed."""
        known, size = self.packed("observed"), self.num_rows
        return torch.full((size,), True, device=self.device) if known is None else known

    @property
    def known_values(self) -> Tensor:
        """Values of the steps that are observed, one after another, ``(*, *E)``."""
        values = cast(Tensor, self.packed("values"))
        return values[self.known] if self.has_gaps else values

    @property
    def gaps(self) -> Tensor | None:
        """Time from each step to the next of its sequence, ``(M - N,)``; None without times."""
        times = self.packed("times")
        return None if times is None else times.diff()[~begins(self.lengths)[1:].to(self.device)]

    def _forget(self) -> None:
        """Drop cached values that were computed from the rows."""
        for name in ("num_observed", "num_labelled"):
            self.__dict__.pop(name, None)
        self._several = None

    @property
    def is_ragged(self) -> bool:
        """Whether lengths differ so much that there are no padded tensors."""
        return len(self) * self.num_steps > max(MOST, TIMES * self.num_rows)

    def _check_padding(self, name: str) -> None:
        """Raise if padding would make far more steps than there are."""
        if self.is_ragged:
            steps, text = len(self) * self.num_steps, f"{name} of {len(self)} sequences, padded to"
            raise ValueError(
                f"{text} the longest of {self.num_steps:,} steps, would have {steps:,} steps, "
                f"{steps / self.num_rows:.0f} times the {self.num_rows:,}"
                " there are. Compute on sequences of similar length, by data.map_steps(lambda part:"
                " fit.hmm(part).viterbi(part.values)), or on each of data.buckets."
            )

    @cached_property
    def num_steps(self) -> int:
        """Number of steps after padding, T."""
        return int(self.lengths.max())

    @cached_property
    def firsts(self) -> Tensor:
        """Index of the first packed row of each sequence, ``(N,)``."""
        return firsts(self.lengths)

    @cached_property
    def num_rows(self) -> int:
        """Number of steps in all, M, without padding."""
        return int(self.lengths.sum())

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self._held.device

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values, ``(N, T, *E)``."""
        return tuple(self.values.shape) if "values" not in self._rows else (
            len(self), self.num_steps, *self._held.shape[1:]
        )  # fmt: skip

    @property
    def _held(self) -> Tensor:
        """Values in packed form, or padded if they were set so."""
        return cast(Tensor, self._rows.get("values", self._padded.get("values")))

    @cached_property
    def exists(self) -> Tensor:
        """Mask of the steps that are not padding, ``(N, T)`` booleans."""
        self._check_padding("the mask")
        return step_mask(self.lengths, self.num_steps, self.device)

    @cached_property
    def bucket_members(self) -> list[Tensor]:
        """Numbers of the sequences of each of ``buckets``."""
        count = torch.arange(len(self))
        if self.num_steps * len(self) < max(LITTLE, RAGGED * self.num_rows):
            return [count]
        order = self.lengths.argsort(stable=True)
        lengths, begin, parts = self.lengths[order], 0, []
        while begin < len(order):
            rest = lengths[begin:]
            alike = (rest <= SPREAD * rest[0]) | (rest * (1 + count[: len(rest)]) < SHORT)
            end = begin + int(alike.sum())
            parts.append(order[begin:end].sort().values)
            begin = end
        return parts

    @property
    def buckets(self) -> list[Self]:
        """Sequences of similar length, which fits compute on; all as one where padding is little.

        Padding is at most a quarter of a bucket's steps but in small ones, and a long series is
        alone. Each is a minibatch, as of :meth:`batch`.
        """
        if len(self.bucket_members) == 1:
            return [self]
        self._all_rows()  # are read again where they were changed
        state = self.total, id(self.indices), {**self._read}
        if self._several is None or self._several[0] != state:
            parts = [self.batch(chosen) for chosen in self.bucket_members]
            self._several = state, parts
        return self._several[1]

    def map_steps(self, function: Callable[[Self], Tensor]) -> Tensor:
        """Apply a function of sequences bucket by bucket; its results per step, packed ``(M, *)``.

        It is computed on ``buckets`` of similar length: where lengths differ much, memory and time
        are those of the steps alone, not of padding. ``data.to_dataframe`` takes the result.

        Args:
            function: Takes ``Sequences``, and returns ``(N, T, *)``, of their steps.

        Example:
            >>> data = Sequences.from_list([[0, 0, 1], [1]])
            >>> fit = fit_em(TabularHMM(2, categorical(2)), data)
            >>> data.map_steps(lambda part: fit.hmm(part).viterbi(part.values)).shape
            torch.Size([4])
        """
        found: Any = None
        for chosen, part in zip(self.bucket_members, self.buckets):
            result = function(part)
            check_tensor("function(part)", result)
            check_shape("function(part)", result, (*part.shape[:2], *result.shape[2:]), "(N, T, *)")
            rows = packed(result, part.lengths)
            if part is self:
                return rows
            found = rows.new_empty(self.num_rows, *rows.shape[1:]) if found is None else found
            found[self._places(self.firsts[chosen], part.lengths).to(rows.device)] = rows
        return cast(Tensor, found)

    @cached_property
    def num_labelled(self) -> int:
        """Number of steps whose state is known, or restricted to some of the states."""
        labels = self.packed("labels")
        if labels is None:
            return 0
        return int((~labels.all(-1) if labels.dtype == torch.bool else labels >= 0).sum())

    @cached_property
    def num_observed(self) -> int:
        """Number of observed steps: the denominator of figures per token."""
        return int(self.known.sum()) if self.has_gaps else self.num_rows

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: what differs in length is no array."""
        raise TypeError("Sequences are no array. Give data.values, or data.to_concatenated().")

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def _places(begins: Tensor, lengths: Tensor) -> Tensor:
        """Indices of the packed rows of runs of ``lengths`` rows that start at ``begins``."""
        shift = begins - firsts(lengths)
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)

    def runs(
        self, begins: Tensor, lengths: Tensor, total: float, indices: Tensor, kind: Any = None
    ) -> Any:
        """Sequences made of runs of ``lengths`` packed rows that start at ``begins``."""
        if not len(lengths):
            raise ValueError("lengths is empty; wanted at least one. Give one for each sequence.")
        size = int(lengths[0])
        if len(lengths) == 1:
            first = int(begins[0])
            rows = {n: part[first : first + size].clone() for n, part in self._all_rows()}
        elif self.num_rows == size * len(self) and bool((lengths == size).all()):
            number = (begins // size).to(self.device)
            rows = {
                name: part.unflatten(0, (-1, size)).index_select(0, number).flatten(0, 1)
                for name, part in self._all_rows()
            }
        else:
            places = self._places(begins, lengths).to(self.device)
            rows = {name: part.index_select(0, places) for name, part in self._all_rows()}
        if "observed" in rows and bool(rows["observed"].all()):
            del rows["observed"]
        new = object.__new__(kind or type(self))  # what has been checked is not read again
        new._rows, new._padded, new._read, new.table = rows, {}, {}, self.table
        new.numbered, new.sharded = self.numbered, self.sharded
        new.lengths, new.total, new.indices = lengths, check_total(total, len(lengths)), indices
        return new

    def _all_rows(self) -> list[tuple[str, Tensor]]:
        """Packed values, labels, covariates and times that are set, by name."""
        return [(n, cast(Tensor, self.packed(n))) for n in {**self._rows, **self._padded}
                if self.packed(n) is not None]  # fmt: skip

    def with_total(self, total: float) -> Self:
        """Copy with another ``total``, the number of sequences of the whole set."""
        new = copy.copy(self)
        new.total, new._several = check_total(total, len(self)), None
        return new

    def batch(self, chosen: Tensor, total: float | None = None) -> Self:
        """Minibatch of the sequences ``chosen`` (integers), as a part of the whole set.

        By its ``indices`` a model finds what belongs to a sequence, such as a variable
        inside ``pyro.plate("subjects", data.total, subsample=data.indices)``. ``total`` is the
        number of sequences they are a sample of, if not of the whole set.

        Example:
            >>> part = Sequences.from_list([[0], [1], [2], [3]]).batch(torch.tensor([3, 1]))
            >>> part.total, part.indices
            (4, tensor([3, 1]))
        """
        total, indices = self.total if total is None else total, self.indices[chosen]
        return self.runs(self.firsts[chosen], self.lengths[chosen], total, indices)
