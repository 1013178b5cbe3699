"""``PackedSequences``: the rows of many sequences, one after another, and what is computed on them.

Rows are padded to ``(N, T, *)`` when that is asked for, and cut into buckets of similar length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from ..ops.log_space import step_mask
from .steps import PADDING, begins, check_total, firsts, packed, padded

if TYPE_CHECKING:
    from .tables import Table


SPREAD = 1.25  # longest over shortest sequence of a bucket
SHORT = 1 << 15  # steps, padding included, below which a bucket may spread wider
LITTLE = 1 << 16  # steps, padding included, below which all sequences are one bucket
RAGGED = 1.5  # of the steps, padding included, over the rows: below that they are, too
MOST, TIMES = 1 << 24, 20  # steps that padding may make, and how many times the rows


class _Padded:
    """An attribute ``(N, T, *)``: packed rows, padded when it is asked for, and kept."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, data: PackedSequences | None, owner: type | None = None) -> Any:
        if data is None:
            return self
        if self.name not in data._padded:
            rows = data._rows.get(self.name)
            if rows is None:
                return data.exists if self.name == "observed" else None
            data._check_padding(self.name)
            whole = padded(rows, data.lengths, PADDING.get(self.name, 0.0))
            data._padded[self.name] = whole
        return data._padded[self.name]

    def __set__(self, data: PackedSequences, value: Any) -> None:
        data._rows = {name: rows for name, rows in data._rows.items() if name != self.name}
        data._padded = data._padded | {self.name: value}
        data._forget()


class PackedSequences:
    """Sequences as rows ``(M, *)``, one after another."""

    lengths: Tensor
    total: float
    indices: Tensor
    numbered: bool  # indices say which sequences of the whole set these are
    _rows: dict[str, Tensor]  # (M, *) by name; those that are None or all observed are left out
    _padded: dict[str, Any]  # (N, T, *)
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
        if name not in self._rows and self._padded.get(name) is not None:  # it was set
            self._rows[name] = packed(self._padded[name], self.lengths)
        return self._rows.get(name)

    @property
    def has_gaps(self) -> bool:
        """Whether steps that exist are missing."""
        return self.packed("observed") is not None

    @property
    def known(self) -> Tensor:
        """Mask ``(M,)`` of the packed steps that are observed."""
        known = self.packed("observed")
        return known if known is not None else torch.ones(
            self.num_rows, dtype=torch.bool, device=self.device
        )  # fmt: skip

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
        """Forget what was computed from the rows."""
        for name in ("_several", "num_observed"):
            self.__dict__.pop(name, None)

    @property
    def is_ragged(self) -> bool:
        """Whether lengths differ so much that there are no padded tensors."""
        return len(self) * self.num_steps > max(MOST, TIMES * self.num_rows)

    def _check_padding(self, name: str) -> None:
        """Raise if padding would make far more steps than there are."""
        if self.is_ragged:
            steps, times = len(self) * self.num_steps, len(self) * self.num_steps / self.num_rows
            text = f"{name} of {len(self)} sequences, padded to the longest of {self.num_steps:,}"
            raise ValueError(
                f"{text} steps, would have {steps:,} steps, {times:.0f} times the {self.num_rows:,}"
                " there are. Compute on sequences of similar length, by data.map_steps(lambda part:"
                " fit.hmm(part).viterbi(part.values)), or on each of data.buckets."
            )

    @cached_property
    def num_steps(self) -> int:
        """Number of steps after padding, T."""
        return int(self.lengths.max())

    @cached_property
    def firsts(self) -> Tensor:
        """Number of the first packed row of each sequence, ``(N,)``."""
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
        """The values, packed or as they were set."""
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
        steps = self.num_steps * len(self)
        if steps < max(LITTLE, RAGGED * self.num_rows):
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
        return [self] if len(self.bucket_members) == 1 else self._several

    @cached_property
    def _several(self) -> list[Self]:
        return [self.batch(chosen) for chosen in self.bucket_members]

    def map_steps(self, function: Callable[[Self], Tensor]) -> Tensor:
        """What a function of sequences returns for each step, packed ``(M, *)``.

        It is computed on ``buckets`` of similar length: where lengths differ much, memory and time
        are those of the steps alone, not of padding.

        Args:
            function: Takes ``Sequences``, and returns ``(N, T, *)``, of their steps.

        Returns:
            Rows in the order of the steps, which :meth:`to_dataframe` takes.

        Example:
            >>> data = Sequences.from_list([[0, 0, 1], [1]])
            >>> fit = fit_em(TabularHMM(2, categorical(2)), data)
            >>> data.map_steps(lambda part: fit.hmm(part).viterbi(part.values)).shape
            torch.Size([4])
        """
        found: Any = None
        for chosen, part in zip(self.bucket_members, self.buckets):
            rows = packed(function(part), part.lengths)
            if part is self:
                return rows
            found = rows.new_empty(self.num_rows, *rows.shape[1:]) if found is None else found
            found[self._places(self.firsts[chosen], part.lengths).to(rows.device)] = rows
        return cast(Tensor, found)

    @property
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

    def __len__(self) -> int:
        return len(self.lengths)

    @staticmethod
    def _places(begins: Tensor, lengths: Tensor) -> Tensor:
        """Numbers of the rows of runs of ``lengths`` rows, from the rows ``begins`` on."""
        shift = begins - firsts(lengths)
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)

    def runs(
        self, begins: Tensor, lengths: Tensor, total: float, indices: Tensor, kind: Any = None
    ) -> Any:
        """Copy of runs of ``lengths`` rows, from the rows ``begins`` on, as sequences."""
        if not len(lengths):
            raise ValueError("lengths is empty; wanted at least one sequence.")
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
        new._rows, new._padded, new.table, new.numbered = rows, {}, self.table, self.numbered
        new.lengths, new.total, new.indices = lengths, check_total(total, len(lengths)), indices
        return new

    def _all_rows(self) -> list[tuple[str, Tensor]]:
        """Packed rows by name, of all that there are."""
        return [(n, cast(Tensor, self.packed(n))) for n in {**self._rows, **self._padded}
                if self.packed(n) is not None]  # fmt: skip

    def with_total(self, total: float) -> Self:
        """Copy with another ``total``, the number of sequences of the whole set."""
        new = copy.copy(self)
        new.total = check_total(total, len(self))
        new._forget()
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
