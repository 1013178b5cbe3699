"""``Sequences``: many sequences in one padded tensor, and minibatches of them.

``N`` sequences of up to ``T`` steps are padded on the right. A mask is True where something
exists or is observed (the opposite of TensorFlow Probability's).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._arrays import from_numpy, regular, to_tensor
from .._checks import check_booleans, check_integers, check_lengths, check_shape, check_size
from ..ops.log_space import step_mask
from .steps import (
    CHECKS,
    FLAT,
    HOW,
    check_observed,
    check_order,
    check_total,
    check_values,
    checked_lengths,
    joined_part,
    joined_steps,
    padded,
    padded_parts,
    read_steps,
)
from .tables import Gaps, Table, read_table, rows_of
from .vocabulary import Vocabulary

PARTS = "labels", "covariates", "times", "rows", "locations"  # (N, T, *), beside the values


class Sequences(Dataset["Sequences"]):
    """Sequences of different lengths in one padded tensor, with missing steps.

    They are a torch ``Dataset`` of single sequences, of which
    ``DataLoader(data, batch_size=8, shuffle=True, collate_fn=data.collate)`` makes minibatches.

    Args:
        values: ``(N, T, *E)``, what was observed; padding and missing steps may hold anything.
            Steps that no sequence has are dropped. Half precision becomes float32.
        lengths: ``(N,)`` integers from 1 to T, the number of steps of each sequence; all have T by
            default. They are kept on the CPU, wherever the values are.
        observed: ``(N, T)`` booleans, False where a step is missing; all that exist by default.
            Vectors of which single components are NaN are known in part.
        labels: ``(N, T)`` integers, the known state of each step, -1 where it is not known; or
            ``(N, T, K)`` booleans, True for the states that may be. Fits use them.
        total: Number of sequences in the whole set these are a part of; N by default.
            Models scale the likelihood by ``total / N``, and priors not. It need not be whole.
        covariates: ``(N, T, C)`` finite floating point, handed to the module that builds the HMM;
            padding may hold anything, and becomes 0.
        indices: ``(N,)`` integers, the number of each sequence in the whole set, by which variables
            that each sequence has one of are found; 0, 1, ... by default.
        copy: False shares memory with ``values``, which must not change then.
        times: ``(N, T)``, increasing along each sequence; kept in float64. Models in continuous
            time read them, such as :class:`pyrohmm.TabularContinuousTimeHMM`; others do not.

    Example:
        >>> data = Sequences(torch.tensor([[3, 1, 4], [1, 5, 0]]), torch.tensor([3, 2]))
        >>> len(data), data.num_steps, data.num_observed
        (2, 3, 5)
        >>> data[1:].values
        tensor([[1, 5]])
    """

    def __init__(
        self,
        values: Tensor,
        lengths: Tensor | None = None,
        observed: Tensor | None = None,
        labels: Tensor | None = None,
        total: float | None = None,
        covariates: Tensor | None = None,
        indices: Tensor | None = None,
        copy: bool = True,
        times: Tensor | None = None,
    ) -> None:
        values, lengths = from_numpy("values", values), from_numpy("lengths", lengths)
        check_values(values)
        values = regular("values", values)
        lengths = torch.full(values.shape[:1], values.size(1)) if lengths is None else lengths
        check_integers("lengths", lengths)
        check_shape("lengths", lengths, tuple(values.shape[:1]), "(N,)", "N is that of values.")
        lengths = lengths.cpu().long()
        check_lengths(lengths, values.size(1))
        exists = step_mask(lengths, values.size(1), values.device)
        self.has_gaps = False  # whether steps that exist are missing
        if observed is None:
            observed = exists
        else:
            observed = from_numpy("observed", observed)
            check_booleans("observed", observed)
            check_shape("observed", observed, tuple(values.shape[:2]), "(N, T)", "That of values.")
            observed = observed.to(values.device) & exists
            self.has_gaps = not torch.equal(observed, exists)
        check_observed(values, observed)
        longest = int(lengths.max())  # later steps are dropped
        self.values = values[:, :longest].clone() if copy else values[:, :longest]
        self.lengths = lengths.clone()
        self.observed = observed[:, :longest]
        self.labels, self.covariates, self.times = (
            self._part(name, part, exists)
            for name, part in (("labels", labels), ("covariates", covariates), ("times", times))
        )
        self.rows: Tensor | None = None  # numbers of the rows of the table they come from
        self.table: Table | None = None
        self.locations: Tensor | None = None  # (N, T, 2), of tracks: see movement
        self.total = check_total(total, len(values))
        self.indices = torch.arange(len(values))
        self.numbered = indices is not None  # they say which sequences of the whole set these are
        if indices is not None:
            check_integers("indices", indices)
            check_shape("indices", indices, (len(values),), "(N,)", "N is that of values.")
            self.indices = indices.cpu().long().clone()

    def _part(self, name: str, part: Any, exists: Tensor) -> Tensor | None:
        """Check labels, covariates or times, and copy them up to step T."""
        if part is None:
            return None
        part = from_numpy(name, part)
        CHECKS[name](part, exists)
        part = part[:, : self.num_steps].to(exists.device).clone()
        if name == "covariates":  # padding may be NaN, which times zero is not zero
            part[~exists[:, : self.num_steps]] = 0.0
        return part.double() if name == "times" else part

    @classmethod
    def from_list(
        cls,
        sequences: Iterable[Any],
        labels: Iterable[Any] | None = None,
        device: torch.device | str | None = None,
        covariates: Iterable[Any] | None = None,
        vocabulary: Vocabulary | None = None,
        times: Iterable[Any] | None = None,
    ) -> Sequences:
        """Pad a list of sequences; steps that hold NaN or None become missing.

        A vector with some components NaN stays, known in part.

        Args:
            sequences: One item per sequence: a tensor or array ``(T_n, *E)``, or a list of steps
                where ``None`` stands for a missing one.
            labels: One item per sequence, ``(T_n,)`` integers, -1 where the state is not known.
            device: Where to put the result; by default where the first sequence is.
            covariates: One item per sequence, ``(T_n, C)`` floating point.
            vocabulary: Encodes the steps, which are symbols then.
            times: One item per sequence, ``(T_n,)`` increasing numbers or dates; those in days.

        Example:
            >>> data = Sequences.from_list([[1.0, None, 3.0], [2.0]])
            >>> data.observed
            tensor([[ True, False,  True],
                    [ True, False, False]])
        """
        if isinstance(sequences, np.ndarray | Tensor) and sequences.ndim == 2:
            count, steps = sequences.shape
            if steps * FLAT <= count and to_tensor("", sequences[:1]).dtype.is_floating_point:
                text = f"sequences {(count, steps)} are {count} of {steps} numbers. For one series"
                warnings.warn(f"{text} of vectors call Sequences.from_concatenated.", stacklevel=2)
        values, lengths, observed = joined_steps(sequences, vocabulary)
        parts = {"labels": labels, "covariates": covariates, "times": times}
        joined = {name: joined_part(name, part, lengths) for name, part in parts.items()}
        data = cls(
            padded(values, lengths), lengths, padded(observed, lengths),
            **padded_parts(joined, lengths), copy=False,
        )  # fmt: skip
        return data if device is None else data.to(device)

    @classmethod
    def from_concatenated(
        cls,
        values: Any,
        lengths: Any = None,
        *,
        observed: Any = None,
        labels: Any = None,
        covariates: Any = None,
        vocabulary: Vocabulary | None = None,
        dtype: torch.dtype | None = None,
        times: Any = None,
    ) -> Sequences:
        """Cut one array of steps into sequences, as hmmlearn takes them.

        Args:
            values: ``(M, *E)``, the steps of all sequences, one sequence after the other: an array,
                a tensor or a list. Rows that are None or NaN throughout are missing. Integers
                ``(M, 1)`` are taken as ``(M,)``. A ``numpy.memmap`` is not copied.
            lengths: ``(N,)`` integers of sum M; None if all is one sequence.
            observed: ``(M,)`` booleans, False where a step is missing.
            labels: ``(M,)`` integers; -1, None or NaN where the state is not known.
            covariates: ``(M, C)`` floating point.
            vocabulary: Encodes the values, which are symbols then, None or NaN where missing.
            dtype: Of the values: ``torch.long`` for symbols that are floats because some are NaN.
            times: ``(M,)`` numbers, or dates, increasing along each sequence.

        Example:
            >>> Sequences.from_concatenated([3, 1, 4, 1], [3, 1]).values
            tensor([[3, 1, 4],
                    [1, 0, 0]])
        """
        steps, known = read_steps("values", values, vocabulary)
        steps = torch.zeros(len(known)) if steps is None else steps
        if not steps.dtype.is_floating_point and steps.dim() == 2 and steps.size(1) == 1:
            steps = steps[:, 0]  # symbols, as hmmlearn has them
        if observed is not None:
            marks = to_tensor("observed", observed).to(known.device)
            check_booleans("observed", marks)
            check_shape("observed", marks, (len(steps),), "(M,)", "M is that of values.")
            known = known & marks
        if dtype is not None:
            steps = (steps if dtype.is_floating_point else steps.nan_to_num(0.0)).to(dtype)
        lengths = checked_lengths(lengths, len(steps))
        number = np.arange(len(lengths)).repeat(lengths)
        check_order(values, np.arange(len(number)), number)
        parts = padded_parts({"labels": labels, "covariates": covariates, "times": times}, lengths)
        whole = padded(steps, lengths)
        shared = whole.data_ptr() == steps.data_ptr() and not isinstance(values, np.memmap)
        return cls(whole, lengths, padded(known, lengths), **parts, copy=shared)

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        *,
        columns: str | Listed[str],
        by: str | Listed[str] | None = None,
        time: str | None = None,
        labels: str | None = None,
        covariates: Listed[str] | None = None,
        vocabulary: Vocabulary | None = None,
        dtype: torch.dtype | None = None,
        tags: Vocabulary | None = None,
        gaps: Gaps | None = None,
    ) -> Sequences:
        """Group the rows of a table into sequences.

        Args:
            frame: A DataFrame of pandas or polars, or what has columns ``frame[name]`` like these,
                such as a dict of arrays. Steps are missing where None, NaN or NA is.
            columns: Name of the column of the values; or a list of D names, for vectors ``(D,)``.
            by: Columns that tell sequences apart, which come in the order of their first rows.
            time: Column by which the rows of a sequence are sorted, kept as ``times``; dates,
                starts of periods and durations in days.
            labels: Column of the known states, integers; -1, None, NaN or NA where not known.
            covariates: Columns of the covariates.
            vocabulary: Encodes the values, which are symbols then.
            dtype: Of the values: see :meth:`from_concatenated`.
            tags: Encodes the labels, which are names then, None or NaN where not known.
            gaps: Where times are multiples of one step and some are skipped: "missing" puts missing
                steps there, "ignore" takes the rows as neighbours, "error" refuses. By default they
                are neighbours, with a warning. Steps of dates may be months or local days, and
                times may lie beside their places by a fifth of a step.

        Raises:
            ValueError: If names are not of columns, times occur twice, or, without ``time``, the
                dates of a ``DatetimeIndex`` are not in order.

        Example:
            >>> table = {"who": ["b", "b", "a"], "day": [2, 1, 1], "x": [0.5, 1.5, 2.5]}
            >>> Sequences.from_dataframe(table, by="who", columns="x", time="day").values
            tensor([[1.5000, 0.5000],
                    [2.5000, 0.0000]], dtype=torch.float64)
        """
        parts = columns, by, time, labels, covariates, vocabulary, tags, gaps
        steps, table = read_table(frame, *parts)
        data = cls.from_concatenated(**steps, dtype=dtype)
        data.rows, data.table = padded(table.order, table.lengths, -1), table
        return data

    def to_concatenated(self) -> tuple[Tensor, Tensor]:
        """Concatenate the steps of all sequences, ``(M, *E)``; returns also the lengths ``(N,)``.

        What :meth:`from_concatenated` takes, and hmmlearn. Missing steps are NaN; integers with
        missing steps become floats.

        Example:
            >>> Sequences.from_list([[3, 1, 4], [1]]).to_concatenated()
            (tensor([3, 1, 4, 1]), tensor([3, 1]))
        """
        if not self.has_gaps:
            return self.values[self.exists], self.lengths
        floats = self.values if self.values.is_floating_point() else self.values.double()
        missing = ~self.observed.reshape(*self.observed.shape, *(1,) * (floats.dim() - 2))
        return floats.masked_fill(missing, torch.nan)[self.exists], self.lengths

    def to_dataframe(self, states: Tensor | None = None, probs: Tensor | None = None) -> Any:
        """A ``pandas.DataFrame`` with a row for each step, and its state or probabilities.

        Args:
            states: ``(N, T)``, such as ``hmm.viterbi(data)``: the column "state".
            probs: ``(N, T, K)``, such as ``hmm.posterior(data).state_probs``: columns "p0",
                "p1", ...

        Returns:
            From :meth:`from_dataframe`, the rows of the table in their order, with its index and
            the columns ``by`` and ``time``; else the columns "sequence" and "step".

        Example:
            >>> table = {"who": ["b", "b", "a"], "day": [2, 1, 1], "x": [0.5, 1.5, 2.5]}
            >>> data = Sequences.from_dataframe(table, by="who", columns="x", time="day")
            >>> data.to_dataframe(states=torch.tensor([[0, 1], [1, 0]]))
              who  day  state
            0   b    2      1
            1   b    1      0
            2   a    1      1
        """
        return rows_of(self.table, self.rows, self.exists, states, probs)

    @property
    def num_steps(self) -> int:
        """Number of steps after padding, T."""
        return self.observed.size(1)  # values may have dimensions of samples to the left

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    @property
    def exists(self) -> Tensor:
        """Mask of the steps that are not padding, ``(N, T)`` booleans."""
        return step_mask(self.lengths, self.num_steps, self.values.device)

    @property
    def num_labelled(self) -> int:
        """Number of steps whose state is known, or restricted to some of the states."""
        if self.labels is None:
            return 0
        known = ~self.labels.all(-1) if self.labels.dtype == torch.bool else self.labels >= 0
        return int((known & self.exists).sum())

    @cached_property
    def num_observed(self) -> int:
        """Number of observed steps: the denominator of figures per token."""
        return int(self.observed.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return (
            f"Sequences({len(self)} sequences of up to {self.num_steps} steps, "
            f"{self.num_observed} observed, values {self.values.dtype} "
            f"{tuple(self.values.shape)} on {self.values.device})"
        )

    def __getitem__(self, index: Any) -> Sequences:
        """Select sequences by slice, boolean mask or integers, as a whole set.

        Their ``total`` is their number, and ``indices`` number them anew; see :meth:`batch`.
        """
        chosen = torch.arange(len(self))[index].reshape(-1)
        new = self._select(chosen, len(chosen), torch.arange(len(chosen)))
        new.numbered = False
        return new

    def __getitems__(self, indices: list[int]) -> Sequences:
        """Select a minibatch, as a DataLoader does; ``total`` stays."""
        return self.batch(torch.as_tensor(indices))

    def collate(self, parts: Sequences | Listed[Sequences]) -> Sequences:
        """Join single sequences into a minibatch of this set, whose ``total`` stays.

        Example:
            >>> data = Sequences.from_list([[3, 1, 4], [1], [5, 9]])
            >>> loader = torch.utils.data.DataLoader(data, batch_size=2, collate_fn=data.collate)
            >>> [(batch.values.tolist(), batch.total) for batch in loader]
            [([[3, 1, 4], [1, 0, 0]], 3), ([[5, 9]], 3)]
        """
        if isinstance(parts, Sequences):
            return parts

        steps: dict[str, Any] = {"lengths": torch.cat([part.lengths for part in parts])}
        for name in ("values", "observed", "labels", "covariates", "times"):
            if all(getattr(part, name) is not None for part in parts):
                steps[name] = torch.cat([getattr(part, name)[part.exists] for part in parts])
        return Sequences.from_concatenated(**steps).with_total(self.total)

    def _select(
        self, chosen: Tensor, total: float, indices: Tensor, longest: int | None = None
    ) -> Sequences:
        """Copy of the sequences ``chosen``, cut to their longest or to ``longest`` steps."""
        lengths = self.lengths[chosen].clamp(max=self.num_steps if longest is None else longest)
        steps = int(lengths.max()) if len(chosen) else 0
        chosen = chosen.to(self.values.device)
        return self._map(lambda part: part[chosen, :steps], lengths, total, indices)

    def _map(
        self, change: Callable[[Tensor], Tensor], lengths: Tensor, total: float, indices: Tensor
    ) -> Sequences:
        """Copy with ``change`` applied to every tensor ``(N, T, *)``."""
        if not len(lengths):
            raise ValueError("lengths is empty; wanted at least one sequence.")
        new = object.__new__(Sequences)  # what has been checked is not read again
        new.lengths, new.total, new.indices = lengths, check_total(total, len(lengths)), indices
        new.values, new.observed = change(self.values), change(self.observed)
        for name in PARTS:
            part = getattr(self, name)
            setattr(new, name, None if part is None else change(part))
        new.has_gaps, new.numbered, new.table = self.has_gaps, self.numbered, self.table
        if self.has_gaps:
            exists = step_mask(lengths, new.num_steps, new.values.device)
            new.has_gaps = not torch.equal(new.observed, exists)
        return new

    def truncate(self, num_steps: int) -> Sequences:
        """Copy cut to the first ``num_steps`` steps of each sequence; shorter ones stay."""
        check_size("num_steps", num_steps)
        return self._select(torch.arange(len(self)), self.total, self.indices, num_steps)

    def split(
        self, share: float = 0.5, generator: torch.Generator | None = None
    ) -> tuple[Sequences, Sequences]:
        """Divide the sequences at random in two, such as into a training and a test set.

        A ``share`` of them goes to the first part, at least one sequence to each.

        Example:
            >>> train, test = Sequences.from_list([[0], [1], [2], [3]]).split(0.75)
            >>> len(train), len(test)
            (3, 1)
        """
        first = round(share * len(self))
        order = torch.randperm(len(self), generator=generator)
        return self[order[:first].sort().values], self[order[first:].sort().values]

    def to(self, device: torch.device | str | torch.dtype) -> Sequences:
        """Copy the sequences to ``device`` where needed; lengths stay on the CPU.

        Or to a dtype of floating point, as ``torch.nn.Module.to``: values and covariates that are.
        """
        if isinstance(device, torch.dtype) and not device.is_floating_point:
            raise TypeError(f"device must be one, or a floating-point dtype; got {device}.")

        def change(part: Tensor) -> Tensor:
            stays = not part.is_floating_point() or part is self.times
            return part if stays and isinstance(device, torch.dtype) else part.to(device)

        return self._map(change, self.lengths, self.total, self.indices)

    def with_total(self, total: float) -> Sequences:
        """Copy with another ``total``, the number of sequences of the whole set."""
        return self._map(lambda part: part, self.lengths, total, self.indices)

    def without_labels(self) -> Sequences:
        """Copy without labels, for an unsupervised fit."""
        new = self.with_total(self.total)
        new.labels = None
        return new

    def batch(self, chosen: Tensor, total: float | None = None) -> Sequences:
        """Minibatch of the sequences ``chosen`` (integers), as a part of the whole set.

        By its ``indices`` a model finds what belongs to a sequence, such as a variable
        inside ``pyro.plate("subjects", data.total, subsample=data.indices)``. ``total`` is the
        number of sequences they are a sample of, if not of the whole set.

        Example:
            >>> part = Sequences.from_list([[0], [1], [2], [3]]).batch(torch.tensor([3, 1]))
            >>> part.total, part.indices
            (4, tensor([3, 1]))
        """
        return self._select(chosen, self.total if total is None else total, self.indices[chosen])


def check_sequences(name: str, data: object) -> None:
    """Raise unless ``data`` are ``Sequences``, and say how those are made."""
    if isinstance(data, Sequences):
        return
    cure = HOW
    if not isinstance(data, list | tuple | str) and hasattr(data, "__iter__"):
        if isinstance(next(iter(data), None), Sequences):  # such as StoredSequences
            cure = "Ask part by part: for part in data."
    raise TypeError(f"{name} must be Sequences; got {type(data).__name__}. {cure}")
