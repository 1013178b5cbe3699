"""``Sequences``: many sequences, packed one after another, and minibatches of them.

``N`` sequences of ``M`` steps in all are kept as rows ``(M, *)``. Asked for, they are padded on the
right to ``(N, T, *)``, with T the longest. A mask is True where something exists or is observed
(the opposite of TensorFlow Probability's).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._arrays import from_numpy, regular, to_tensor
from .._checks import (
    check_booleans,
    check_integers,
    check_lengths,
    check_shape,
    check_share,
    check_size,
    names_checked,
    warn_caller,
)
from .packed import PackedSequences
from .steps import (
    FLAT,
    HOW,
    check_order,
    check_total,
    check_values,
    checked_lengths,
    checked_rows,
    encoded,
    joined_part,
    joined_steps,
    packed,
    padded_part,
    read_parts,
    read_steps,
)
from .tables import Gaps, read_table, rows_of, times_of
from .vocabulary import Vocabulary


class Sequences(PackedSequences, Dataset["Sequences"]):
    """Sequences of different lengths, with missing steps.

    They are kept one after another, in the memory of their steps alone. ``values`` and the other
    attributes ``(N, T, *)`` are padded when they are asked for, and kept; where that would make
    more than 20 times the steps, and many, it is refused, and :meth:`map_steps` computes on
    ``buckets`` of similar length, as EM, MAP and SVI do.

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

    @names_checked
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
        check_integers("lengths", lengths, "Call .long() on it, or .sum(-1) on a mask.")
        check_shape("lengths", lengths, tuple(values.shape[:1]), "(N,)", "N is that of values.")
        lengths = lengths.cpu().long()
        check_lengths(lengths, values.size(1))
        parts = {"observed": observed, "labels": labels, "covariates": covariates, "times": times}
        found = {"values": values} | {
            n: padded_part(n, x, values) for n, x in parts.items() if x is not None
        }
        many = values.size(0) * values.size(1) > 8  # of which not all are missing by chance
        if observed is not None and many and not found["observed"].any():
            text = "observed is False at every step; it must be True where there is a value"
            warn_caller(f"{text}. Give ~observed for the masks of other packages.")
        rows = {name: packed(part, lengths) for name, part in found.items()}
        for name, part in found.items():
            if (copy or name != "values") and rows[name].data_ptr() == part.data_ptr():
                rows[name] = rows[name].clone()
        self._fill(rows, lengths.clone(), total, indices)

    def _fill(
        self, rows: dict[str, Tensor], lengths: Tensor, total: Any = None, indices: Any = None
    ) -> None:
        """Set all attributes from packed rows ``(M, *)``, which are checked."""
        self._rows, self._padded, self._read = checked_rows(rows, lengths), {}, {}
        self.lengths, self.total, self.table = lengths, check_total(total, len(lengths)), None
        self.indices = torch.arange(len(lengths))
        self.numbered = indices is not None  # they say which sequences of the whole set these are
        if indices is not None:
            check_integers("indices", indices)
            check_shape("indices", indices, (len(lengths),), "(N,)", "N is that of values.")
            self.indices = indices.cpu().long().clone()

    @classmethod
    @names_checked
    def from_list(
        cls,
        sequences: Iterable[Any],
        labels: Iterable[Any] | None = None,
        covariates: Iterable[Any] | None = None,
        vocabulary: Vocabulary | None = None,
        times: Iterable[Any] | None = None,
        tags: Vocabulary | None = None,
    ) -> Sequences:
        """Pad a list of sequences; steps that hold NaN or None become missing.

        A vector with some components NaN stays, known in part.

        Args:
            sequences: One item per sequence: a tensor or array ``(T_n, *E)``, or a list of steps
                where ``None`` stands for a missing one.
            labels: One item per sequence, ``(T_n,)`` integers, -1 where the state is not known.
            covariates: One item per sequence, ``(T_n, C)`` floating point.
            vocabulary: Encodes the steps, which are symbols then.
            times: One item per sequence, ``(T_n,)`` increasing numbers or dates; those in days.
            tags: Encodes the labels, which are names then, None or NaN where not known.

        Example:
            >>> data = Sequences.from_list([[1.0, None, 3.0], [2.0]])
            >>> data.observed
            tensor([[ True, False,  True],
                    [ True, False, False]])
        """
        if hasattr(sequences, "columns") or isinstance(sequences, Mapping):
            text = f"sequences must be a list, an item for each; got {type(sequences).__name__}"
            raise TypeError(f"{text}. Give list(d.values()) of a dict, a table to from_dataframe.")
        if isinstance(sequences, np.ndarray | Tensor) and sequences.ndim == 2:
            count, steps = sequences.shape
            if steps * FLAT <= count and to_tensor("", sequences[:1]).dtype.is_floating_point:
                text = f"sequences {(count, steps)} are {count} of {steps} numbers. For one series"
                warn_caller(f"{text} of vectors call Sequences.from_concatenated.")
        values, lengths, observed = joined_steps(sequences, vocabulary)
        if tags is not None and labels is not None:
            labels = [encoded(names, tags, "labels") for names in labels]
        parts = {"labels": labels, "covariates": covariates, "times": times}
        found = {n: joined_part(n, part, lengths) for n, part in parts.items() if part is not None}
        return cls._of({"values": values, "observed": observed} | found, lengths)

    @classmethod
    def _of(cls, rows: dict[str, Tensor], lengths: Tensor) -> Sequences:
        """Sequences of packed rows, which are checked and not copied."""
        data = object.__new__(cls)
        data._fill(rows, lengths)
        return data

    @classmethod
    @names_checked
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
        check_order(values, lengths)
        parts = {"labels": labels, "covariates": covariates, "times": times}
        rows = {"values": steps, "observed": known} | read_parts(parts, len(steps))
        for name, part in {"values": values, **parts}.items():
            if name in rows and not isinstance(part, np.memmap):  # whose owner may change it
                rows[name] = rows[name].clone()
        return cls._of(rows, lengths)

    @classmethod
    @names_checked
    def from_dataframe(
        cls,
        frame: Any,
        *,
        columns: str | Listed[str],
        by: str | Listed[str] | None = None,
        time: str | None = None,
        labels: str | None = None,
        covariates: str | Listed[str] | None = None,
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
            covariates: Columns of the covariates, or the name of one.
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
        data._rows["rows"], data.table = table.order, table
        return data

    def to_concatenated(self) -> tuple[Tensor, Tensor]:
        """Concatenate the steps of all sequences, ``(M, *E)``; returns also the lengths ``(N,)``.

        What :meth:`from_concatenated` takes, and hmmlearn. Missing steps are NaN; integers with
        missing steps become floats.

        Example:
            >>> Sequences.from_list([[3, 1, 4], [1]]).to_concatenated()
            (tensor([3, 1, 4, 1]), tensor([3, 1]))
        """
        values = cast(Tensor, self.packed("values"))
        if not self.has_gaps:
            return values.clone(), self.lengths
        floats = values if values.is_floating_point() else values.double()
        missing = ~self.known.reshape(-1, *(1,) * (floats.dim() - 1))
        return floats.masked_fill(missing, torch.nan), self.lengths

    def to_dataframe(self, states: Any = None, probs: Any = None) -> Any:
        """A table with a row for each step, and its state or probabilities.

        Args:
            states: ``(N, T)``, such as ``hmm.viterbi(data)``, or packed ``(M,)``, such as
                ``fit.predict(data)``: the column "state".
            probs: ``(N, T, K)``, such as ``hmm.posterior(data).state_probs``, or packed ``(M, K)``:
                columns "p0", "p1", ... Both are tensors, arrays or lists.

        Returns:
            From :meth:`from_dataframe`, the rows of the table in their order, of pandas with its
            index or of polars, with the columns ``by`` and ``time`` and no others; else a
            ``pandas.DataFrame`` with the columns "sequence" and "step".

        Example:
            >>> table = {"who": ["b", "b", "a"], "day": [2, 1, 1], "x": [0.5, 1.5, 2.5]}
            >>> data = Sequences.from_dataframe(table, by="who", columns="x", time="day")
            >>> data.to_dataframe(states=torch.tensor([[0, 1], [1, 0]]))
              who  day  state
            0   b    2      1
            1   b    1      0
            2   a    1      1
        """
        return rows_of(self.table, self.packed("rows"), self.lengths, states, probs)

    @property
    def keys(self) -> list[Any]:
        """Value of ``by`` of each sequence of a table, a tuple of several; else the ``indices``.

        Example:
            >>> table = {"who": ["b", "b", "a"], "x": [0.5, 1.5, 2.5]}
            >>> data = Sequences.from_dataframe(table, by="who", columns="x")
            >>> data.keys, data[1:].keys
            (['b', 'a'], ['a'])
        """
        if self.table is None or not self.table.by:
            return self.indices.tolist()
        first = cast(Tensor, self.packed("rows")).cpu()[self.firsts]
        keys = self.table.columns[self.table.by].iloc[first.numpy()]
        return [k if len(k) > 1 else k[0] for k in keys.itertuples(index=False, name=None)]

    def time_index(self, num_ahead: int = 0) -> Any:
        """``pandas.Series`` of the times of all steps, those without a row filled in.

        For ``x=`` of plots. They go on in their time zone, by months or local days where steps are.
        None without a column of times.

        Args:
            num_ahead: Number of steps to come that are added to each sequence.

        Raises:
            ValueError: If there is no step by which they go on.

        Example:
            >>> table = {"day": [1, 2, 5], "x": [0.5, 1.5, 2.5]}
            >>> data = Sequences.from_dataframe(table, columns="x", time="day", gaps="missing")
            >>> data.time_index(num_ahead=2).tolist()
            [1, 2, 3, 4, 5, 6, 7]
        """
        check_size("num_ahead", num_ahead, 0)
        if self.table is None or self.table.time is None:
            return None
        return times_of(self.table, cast(Tensor, self.packed("rows")), self.lengths, num_ahead)

    def __repr__(self) -> str:
        dtype = self._held.dtype
        return (
            f"Sequences({len(self)} sequences of up to {self.num_steps} steps, "
            f"{self.num_observed} observed, values {dtype} {self.shape} on {self.device})"
        )

    def __getitem__(self, index: Any) -> Sequences:
        """Select sequences by slice, boolean mask or integers, as a whole set.

        Their ``total`` is their number, and ``indices`` number them anew; see :meth:`batch`.
        """
        if isinstance(index, str):
            raise TypeError(f"index must be a slice, a mask or integers; got {index!r}. {HOW}")
        chosen = torch.arange(len(self))[index].reshape(-1)
        own = self.firsts[chosen], self.lengths[chosen]
        new: Sequences = self.runs(*own, len(chosen), torch.arange(len(chosen)))
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
        rows = {"observed": torch.cat([part.known for part in parts])}
        for name in ("values", "labels", "covariates", "times", "rows", "locations"):
            columns = [column for part in parts if (column := part.packed(name)) is not None]
            if len(columns) == len(parts):
                rows[name] = torch.cat(columns)
        joined = Sequences._of(rows, torch.cat([part.lengths for part in parts]))
        joined.table = self.table if all(part.table is self.table for part in parts) else None
        return joined.with_total(self.total)

    def truncate(self, num_steps: int) -> Sequences:
        """Copy cut to the first ``num_steps`` steps of each sequence; shorter ones stay."""
        check_size("num_steps", num_steps)
        return self.runs(self.firsts, self.lengths.clamp(max=num_steps), self.total, self.indices)

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
        check_share("share", share)
        first = min(max(round(share * len(self)), 1), len(self) - 1)
        order = torch.randperm(len(self), generator=generator)
        return self[order[:first].sort().values], self[order[first:].sort().values]

    def to(self, device: torch.device | str | torch.dtype) -> Sequences:
        """Copy the sequences to ``device`` where needed; lengths stay on the CPU.

        Or to a dtype of floating point, as ``torch.nn.Module.to``: values and covariates that are.
        """
        if isinstance(device, torch.dtype) and not device.is_floating_point:
            text = f"device must be a device, or a floating-point dtype; got {device}"
            raise TypeError(f"{text}. Convert integers before: Sequences(values.to(dtype), ...).")
        new = self.with_total(self.total)
        new._rows, new._padded, new._read = {}, {}, {}
        for name, part in self._all_rows():
            stays = not part.is_floating_point() or name == "times"
            new._rows[name] = part if stays and isinstance(device, torch.dtype) else part.to(device)
        new.__dict__.pop("exists", None)
        return new

    def without_labels(self) -> Sequences:
        """Copy without labels, for an unsupervised fit."""
        new = self.with_total(self.total)
        new.labels = None
        return new


def check_sequences(name: str, data: object) -> None:
    """Raise unless ``data`` are ``Sequences``, and say how those are made."""
    if isinstance(data, Sequences):
        return
    cure = HOW
    if not isinstance(data, list | tuple | str) and hasattr(data, "__iter__"):
        if isinstance(next(iter(data), None), Sequences):  # such as StoredSequences
            cure = "Ask part by part: for part in data."
    raise TypeError(f"{name} must be Sequences; got {type(data).__name__}. {cure}")
