"""Sequences that are rows of one array or table: cut into sequences, sorted, encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._arrays import is_missing, to_numpy, to_tensor
from .._checks import check_booleans, check_integers, check_lengths, check_shape
from .vocabulary import Vocabulary

NO_CODE = -1  # of a symbol that is missing


class Rows(NamedTuple):
    """Steps of N sequences: one sequence after the other, or padded.

    Attributes:
        values: ``(M, *E)``, or ``(N, T, *E)``.
        lengths: ``(N,)`` integers.
        observed: ``(M,)`` or ``(N, T)`` booleans, False where the step is missing.
    """

    values: Tensor
    lengths: Tensor
    observed: Tensor


def rows_of(
    values: Any,
    lengths: Any,
    observed: Any = None,
    vocabulary: Vocabulary | None = None,
    dtype: torch.dtype | None = None,
) -> Rows:
    """Steps and lengths as tensors, checked.

    Args:
        values: ``(M, *E)``, numbers; or ``(M,)`` symbols of ``vocabulary``.
        lengths: ``(N,)`` integers; None if all is one sequence.
        observed: ``(M,)`` booleans; by default what is neither NaN throughout nor None.
        vocabulary: Encodes the symbols.
        dtype: Of the result.
    """
    seen = None
    if vocabulary is not None:
        codes = encoded(values, vocabulary)
        values, seen = codes.clamp(min=0), codes != NO_CODE
    steps = to_tensor("values", values)
    if steps.dim() == 0 or len(steps) == 0:
        raise ValueError(f"values must have shape (M, *E), a row per step; got {_shape(steps)}.")
    if not steps.dtype.is_floating_point and steps.dim() == 2 and steps.size(1) == 1:
        steps = steps[:, 0]  # symbols, as hmmlearn has them
    if seen is None:
        seen = _is_known(steps)
    if observed is not None:
        marks = to_tensor("observed", observed).to(steps.device)
        check_booleans("observed", marks)
        check_shape("observed", marks, (len(steps),), "(M,)", "M is the number of rows of values.")
        seen = seen & marks
    if dtype is not None:
        steps = (steps if dtype.is_floating_point else steps.nan_to_num(0.0)).to(dtype)
    sizes = torch.tensor([len(steps)]) if lengths is None else to_tensor("lengths", lengths)
    return Rows(steps, checked_lengths(sizes, len(steps)), seen)


def checked_lengths(lengths: Tensor, num_rows: int) -> Tensor:
    """The ``lengths`` on the CPU; raise unless they are those of ``num_rows`` steps."""
    check_integers("lengths", lengths)
    check_shape("lengths", lengths, (lengths.numel(),), "(N,)")
    lengths = lengths.cpu().long()
    check_lengths(lengths, num_rows)
    if int(lengths.sum()) != num_rows:
        raise ValueError(
            f"lengths must sum to the number of rows of values, {num_rows}; they sum to "
            f"{int(lengths.sum())}."
        )
    return lengths


def rows_like(name: str, part: Any, num_rows: int) -> Tensor:
    """A tensor of as many rows as the values have."""
    tensor = _read(name, part)
    check_num_rows(name, tuple(tensor.shape), num_rows)
    return tensor


def check_num_rows(name: str, shape: tuple[int, ...], num_rows: int) -> None:
    """Raise unless what has ``shape`` has as many rows as the values."""
    if shape[:1] != (num_rows,):
        raise ValueError(
            f"{name} must have a row for each of the {num_rows} rows of values; got shape {shape}."
        )


def _read(name: str, part: Any) -> Tensor:
    if name == "times":
        return as_times(part)
    return as_labels(name, part) if name == "labels" else to_tensor(name, part)


def as_times(values: Any, name: str = "times") -> Tensor:
    """Times ``(M,)`` in float64; dates are days since that of Unix, and durations days."""
    array = np.asarray(to_numpy(values))
    if array.dtype.kind == "O":
        array = _of_dates(array)
    if array.dtype.kind == "M":
        array = array - np.datetime64(0, "D")
    if array.dtype.kind == "m":
        array = array / np.timedelta64(1, "D")
    elif array.dtype.kind in "iu":  # their float32 would lose seconds
        array = array.astype(np.float64)
    elif array.dtype.kind in "OUST" and any(isinstance(item, str | bytes) for item in array.flat):
        raise TypeError(
            f"{name} must be numbers or dates; got text. Convert it, such as by pandas.to_datetime."
        )
    return to_tensor(name, array).double()


def _of_dates(array: np.ndarray) -> np.ndarray:
    """Python's dates or durations as those of NumPy: in UTC, a period at its start."""
    items = [getattr(item, "start_time", item) for item in array.flat]
    if all(isinstance(item, timedelta) for item in items):
        return np.array(items, "timedelta64[us]").reshape(array.shape)
    if not all(isinstance(item, date) for item in items):
        return array
    plain = [
        item.astimezone(UTC).replace(tzinfo=None) if getattr(item, "tzinfo", None) else item
        for item in items
    ]
    return np.array(plain, "datetime64[us]").reshape(array.shape)


def as_labels(name: str, values: Any) -> Tensor:
    """Known states; -1 where they are None, NaN or NA. What are no states stay as they are."""
    states = to_tensor(name, values)
    if not states.dtype.is_floating_point:
        return states
    found = states.nan_to_num(nan=NO_CODE)
    whole = not states.isinf().any() and torch.equal(found, found.round())
    return found.long() if whole else states


def padded(rows: Tensor, lengths: Tensor, padding: float = 0.0) -> Tensor:
    """Rows ``(M, *)`` of sequences of ``lengths`` in one tensor ``(N, T, *)``."""
    steps = int(lengths.max())
    if len(lengths) * steps == len(rows):
        return rows.reshape(len(lengths), steps, *rows.shape[1:])
    whole = rows.new_full((len(lengths), steps, *rows.shape[1:]), padding)
    exists = torch.arange(steps) < lengths.unsqueeze(-1)
    whole[exists.to(rows.device)] = rows
    return whole


def encoded(symbols: Any, vocabulary: Vocabulary, name: str = "values") -> Tensor:
    """Codes ``(M,)`` of symbols; -1 where one is None or NaN.

    Raises:
        TypeError: If they are not in one dimension.
        ValueError: If a symbol is not listed.
    """
    array = np.asarray(symbols, object) if isinstance(symbols, list) else to_numpy(symbols)
    if isinstance(symbols, str):
        array = np.array(list(symbols), object)
    if array.ndim != 1:
        raise TypeError(
            f"{name} must have shape (M,), a symbol of the vocabulary per step; got {array.shape}."
        )
    missing = is_missing(array)
    codes = torch.full((len(array),), NO_CODE)
    codes[torch.from_numpy(~missing)] = vocabulary.encode(array[~missing].tolist())
    return codes


def ordered(
    frame: Any, by: str | Sequence[str] | None, time: str | None, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a table, sequence by sequence, and the number of rows in each.

    Args:
        frame: The table, of ``count`` rows.
        by: Column, or columns, whose values name the sequence of a row; None if all are of one.
            Sequences come in the order in which they first occur.
        time: Column by which the rows of a sequence are sorted; None leaves them in their order.
        count: Number of rows.

    Raises:
        ValueError: If a name or a time is missing, or a time occurs twice in a sequence.
    """
    names = [] if by is None else [by] if isinstance(by, str) else list(by)
    sequence = np.zeros(count, np.int64)
    for name in names:
        codes = _ranks("by", frame, name)
        _, sequence = np.unique(sequence * (codes.max() + 1) + codes, return_inverse=True)
    _, first, sequence = np.unique(sequence, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[first.argsort()] = np.arange(len(first))
    sequence = place[sequence]
    ranks = np.arange(count) if time is None else _ranks("time", frame, time)
    order = np.lexsort((ranks, sequence))
    both = np.stack([sequence, ranks])[:, order]
    twice = (both[:, 1:] == both[:, :-1]).all(0)
    if twice.any():
        raise ValueError(
            f"time must differ within a sequence; rows {order[:-1][twice][0]} and "
            f"{order[1:][twice][0]} have the same. Name the sequences of the rows with by=."
        )
    return order, np.bincount(sequence)


def numbers(argument: str, frame: Any, names: str | Sequence[str]) -> Tensor:
    """Columns of a table: ``(M,)`` for one name, ``(M, D)`` for a list of D."""
    if isinstance(names, str):
        return to_tensor(f"{argument} {names!r}", column(argument, frame, names))
    columns = [numbers(argument, frame, name) for name in names]
    if not columns:
        raise ValueError(f"{argument} is empty; wanted the name of a column, or several.")
    dtype = columns[0].dtype
    for other in columns[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    return torch.stack([each.to(dtype) for each in columns], -1)


def further_of(
    frame: Any,
    labels: str | None,
    covariates: Sequence[str] | None,
    tags: Vocabulary | None,
    time: str | None,
) -> dict[str, Tensor]:
    """The columns of labels, which ``tags`` may encode, of covariates, and of times as numbers."""
    found = {}
    if labels is not None:
        states = column("labels", frame, labels)
        name = f"labels {labels!r}"
        found["labels"] = as_labels(name, states) if tags is None else encoded(states, tags, name)
    if covariates is not None:
        found["covariates"] = numbers("covariates", frame, covariates).to(torch.get_default_dtype())
    if time is not None:
        try:
            found["times"] = as_times(column("time", frame, time), f"time {time!r}")
        except TypeError as error:
            raise ValueError(f"{error} Or sort the rows by it first, and leave time out.") from None
    return found


def column(argument: str, frame: Any, name: str) -> np.ndarray:
    """A column of a table, by ``frame[name]`` and its method ``to_numpy``, if it has one.

    Raises:
        ValueError: If there is none of that name.
    """
    known = _names(frame)
    if name not in known:
        shown = ", ".join(map(repr, known[:8])) + (", ..." if len(known) > 8 else "")
        raise ValueError(f"{argument} must name columns of frame, {shown}; got {name!r}.")
    return to_numpy(frame[name])


def _names(frame: Any) -> list[Any]:
    """Names of the columns of a table: of pandas, polars, pyarrow, or a dict of arrays."""
    if isinstance(frame, Mapping):
        return list(frame)
    names = getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None:
        raise TypeError(
            "frame must be a table, such as a DataFrame of pandas or polars, or a dict of columns; "
            f"got {type(frame).__name__}."
        )
    return list(names)


def _ranks(argument: str, frame: Any, name: str) -> np.ndarray:
    """Places of the values of a column among its distinct ones."""
    values = column(argument, frame, name)
    missing = is_missing(values)
    if missing.any():
        raise ValueError(
            f"{argument} {name!r} is missing in row {missing.argmax()}. Drop these rows, or fill "
            "them."
        )
    try:
        return np.unique(values, return_inverse=True)[1].reshape(-1)
    except TypeError:
        raise TypeError(f"{argument} {name!r} holds values that do not compare.") from None


def padded_steps(sequences: Iterable[Any], vocabulary: Vocabulary | None) -> Rows:
    """Single sequences in one tensor ``(N, T, *E)``, with their lengths and masks ``(N, T)``."""
    parts = [steps_of(each, index, vocabulary) for index, each in enumerate(sequences)]
    if not parts:
        raise ValueError("sequences is empty; wanted at least one sequence.")
    known = [(index, row) for index, (row, _) in enumerate(parts) if row is not None]
    index, first = known[0] if known else (0, torch.zeros(1))
    dtype = first.dtype
    for other, row in known:
        if row.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"sequences must share one event shape; sequence {index} has "
                f"{tuple(first.shape[1:])} and sequence {other} has {tuple(row.shape[1:])}."
            )
        dtype = torch.promote_types(dtype, row.dtype)
    rows = [
        first.new_zeros(len(mask), *first.shape[1:], dtype=dtype) if row is None else row.to(dtype)
        for row, mask in parts
    ]
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    masks = torch.nn.utils.rnn.pad_sequence([mask for _, mask in parts], batch_first=True)
    return Rows(padded, lengths, masks)


def steps_of(
    sequence: Any, index: int, vocabulary: Vocabulary | None = None
) -> tuple[Tensor | None, Tensor]:
    """One sequence as a tensor ``(T, *E)``, None if all is missing, and its mask ``(T,)``."""
    if vocabulary is not None:
        codes = encoded(sequence, vocabulary)
        sequence, symbols = codes.clamp(min=0), codes != NO_CODE
    if not hasattr(sequence, "__len__"):
        raise TypeError(
            f"sequence {index} must be a list, an array or a tensor of steps; got "
            f"{type(sequence).__name__}. Wrap a single sequence in a list."
        )
    if not isinstance(sequence, Tensor) and any(step is None for step in sequence):
        present = torch.tensor([step is not None for step in sequence])
        known = [torch.as_tensor(step) for step in sequence if step is not None]
        if not known:
            return None, present
        steps = iter(known)
        row = torch.stack([next(steps) if here else known[0] for here in present.tolist()])
    else:
        row = to_tensor(f"sequence {index}", sequence)
        present = torch.ones(row.shape[:1], dtype=torch.bool, device=row.device)
        if vocabulary is not None:
            present = symbols
    if row.dim() == 0 or len(row) == 0:
        raise ValueError(f"sequence {index} has no step; wanted shape (T, *E) with T at least 1.")
    present = present & _is_known(row)
    return row, present


def padded_list(
    name: str, items: Iterable[Any] | None, lengths: Tensor, padding: float
) -> Tensor | None:
    """Labels or covariates of sequences of ``lengths`` in one tensor, ``(N, T, *)``."""
    if items is None:
        return None
    rows = [_read(name, item) for item in items]
    if [len(row) for row in rows] != lengths.tolist():
        raise ValueError(
            f"{name} must have one item per sequence, one row per step; got lengths "
            f"{[len(row) for row in rows][:5]}, sequences have {lengths.tolist()[:5]} (first five)."
        )
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)


def _is_known(steps: Tensor) -> Tensor:
    """Which rows are not NaN throughout."""
    if not steps.dtype.is_floating_point:
        return torch.ones(len(steps), dtype=torch.bool, device=steps.device)
    absent = steps.isnan()
    return ~(absent.flatten(1).all(-1) if steps.dim() > 1 else absent)


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
