"""Steps of arrays and lists: read, checked, and cut into the sequences of ``Sequences``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from datetime import date, timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._arrays import as_dates, from_numpy, is_missing, to_numpy, to_tensor
from .._checks import (
    check_booleans,
    check_floats,
    check_integers,
    check_kind,
    check_lengths,
    check_real,
    check_tensor,
    refuse_times,
)
from .._imports import imported
from ..ops.log_space import step_mask
from .vocabulary import Vocabulary

NO_CODE = -1  # of a symbol that is missing, and of a label that is not known
PADDING = {"labels": -1.0, "rows": -1.0, "locations": float("nan")}  # zero elsewhere
DATES = (  # of offsets that differ, as over the change to summer time, read_csv leaves text
    "Convert the column: frame['time'] = "
    "pd.to_datetime(frame['time'], utc=True).dt.tz_convert(zone), such as zone='Europe/Berlin'."
)
FLAT = 16  # rows per column of a matrix from which on it looks like one series of vectors
HOW = (
    "Sequences are made by Sequences.from_concatenated(array, lengths), "
    "Sequences.from_list(sequences) or Sequences.from_dataframe(frame, columns=, by=, time=)."
)


# One step after the other ------------------------------------------------------------------------


def read_steps(
    name: str, values: Any, vocabulary: Vocabulary | None = None
) -> tuple[Tensor | None, Tensor]:
    """Convert steps to a tensor ``(M, *E)``, None if all are missing, and a mask ``(M,)``.

    What is None, NA or NaN throughout is missing. Integers stay integers, zero where missing.

    Args:
        name: Of the steps, for errors.
        values: An array, a tensor, a list, or a column of a table.
        vocabulary: Encodes the steps, which are symbols then.
    """
    if vocabulary is not None:
        codes = encoded(values, vocabulary, name)
        return codes.clamp(min=0), codes != NO_CODE
    if not isinstance(values, Tensor | list | tuple):
        values = to_numpy(values)
    known = torch.from_numpy(~_absent(values))
    if known.all():
        steps = to_tensor(name, values)
    elif not known.any():
        return None, known
    else:
        rows = to_tensor(name, [item for item, here in zip(values, known.tolist()) if here])
        steps = rows.new_zeros(len(known), *rows.shape[1:])
        steps[known] = rows
    if steps.dim() == 0:
        text = f"{name} is a single number; it must have shape (M, *E), a row per step"
        raise ValueError(f"{text}. For one series call Sequences.from_concatenated(values).")
    if not len(steps):
        raise ValueError(f"{name} has no step; it must have shape (M, *E), a row per step.")
    return steps, known.to(steps.device) & ~_is_nan(steps)


def _absent(values: Any) -> np.ndarray:
    """Mask ``(M,)`` of the items of a list or of an array of objects that are None, NaN or NA."""
    if isinstance(values, list | tuple):
        return np.array([item is None for item in values], bool)
    if isinstance(values, np.ndarray) and values.dtype.kind == "O" and values.ndim == 1:
        return is_missing(values)
    return np.zeros(len(values) if np.ndim(values) else 0, bool)


def _is_nan(values: Tensor) -> Tensor:
    """Whether a step of ``(M, *E)`` is NaN throughout."""
    if not values.dtype.is_floating_point:
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    absent = values.isnan()
    return absent.flatten(1).all(-1) if values.dim() > 1 else absent


def encoded(symbols: Any, vocabulary: Vocabulary, name: str = "values") -> Tensor:
    """Codes ``(M,)`` of symbols; -1 where one is None or NaN.

    Raises:
        TypeError: If they are not in one dimension.
        ValueError: If a symbol is not listed.
    """
    cure = "Give Vocabulary(symbols), or Vocabulary.from_counts(words)."
    argument = "tags" if name.startswith("labels") else "vocabulary"
    check_kind(argument, vocabulary, Vocabulary, "a Vocabulary", cure)
    array = np.asarray(symbols, object) if isinstance(symbols, list) else to_numpy(symbols)
    if isinstance(symbols, str):
        array = np.array(list(symbols), object)
    if array.ndim != 1:
        text = f"{name} must be symbols of shape (T,), one for each step; got {array.shape}"
        raise TypeError(f"{text}. Pass one column.")
    missing = is_missing(array)
    codes = torch.full((len(array),), NO_CODE)
    codes[torch.from_numpy(~missing)] = vocabulary.encode(array[~missing].tolist())
    return codes


def read_part(name: str, part: Any, shown: str = "") -> Tensor:
    """Convert labels, covariates or times of concatenated steps to a tensor."""
    if name == "times":
        return read_times(part)
    tensor = to_tensor(shown or name, part)
    if name != "labels" or not tensor.dtype.is_floating_point:
        return tensor
    states = tensor.nan_to_num(nan=NO_CODE)  # floats because some are not known
    whole = not tensor.isinf().any() and torch.equal(states, states.round())
    return states.long() if whole else tensor


def read_times(values: Any, name: str = "times") -> Tensor:
    """Convert times to float64 ``(M,)``: dates to days since 1970 in UTC, durations to days."""
    if isinstance(values, Tensor):
        return to_tensor(name, values).double()
    clock = getattr(values, "dt", values)  # of a pandas.Series
    array = np.asarray(to_numpy(clock.tz_convert(None) if getattr(clock, "tz", None) else values))
    items = [getattr(item, "start_time", item) for item in array.flat if array.dtype.kind == "O"]
    if items and any(all(isinstance(x, kind) for x in items) for kind in (date, timedelta)):
        return read_times(as_dates(imported("pandas").Series(items)), name).reshape(array.shape)
    if array.dtype.kind == "M":
        array = array - np.datetime64(0, "D")
    if array.dtype.kind == "m":
        array = array / np.timedelta64(1, "D")
    kind = array.dtype.kind
    if kind in "UST" or (kind == "O" and any(isinstance(item, str) for item in array.flat)):
        raise TypeError(f"{name} must be numbers or dates; got text. {DATES}")
    return to_tensor(name, array).double()


def check_order(values: Any, lengths: Tensor, order: Any = slice(None)) -> None:
    """Raise unless the dates of a table's index increase along each sequence."""
    index = getattr(values, "index", None)
    if not hasattr(index, "to_period") and not hasattr(index, "start_time"):
        return
    falls = read_times(index, "index")[order].diff() < 0
    if bool((falls & ~begins(lengths)[1:]).any()):
        cure = "Give frame.sort_index(), or the column of dates by time=."
        raise ValueError(f"rows must be in the order of time; those of the index are not. {cure}")


# Cut into sequences ------------------------------------------------------------------------------


def checked_lengths(lengths: Any, num_rows: int) -> Tensor:
    """Lengths on the CPU, by default of one sequence; raise unless they sum to the rows."""
    lengths = to_tensor("lengths", [num_rows] if lengths is None else lengths)
    check_integers("lengths", lengths)
    lengths = lengths.cpu().long()
    check_lengths(lengths, num_rows)
    if (total := int(lengths.sum())) != num_rows:
        text = f"lengths must sum to the number of rows of values, {num_rows}"
        raise ValueError(f"{text}; they sum to {total}. Count the rows of each sequence.")
    return lengths


def check_num_rows(name: str, shape: tuple[int, ...], num_rows: int) -> None:
    """Raise unless ``shape`` has as many rows as the values."""
    if shape[:1] != (num_rows,):
        text = f"{name} must have {num_rows} rows, as values; got shape {shape}"
        raise ValueError(f"{text}. Give one for each step.")


def firsts(lengths: Tensor) -> Tensor:
    """Index of the first packed row of each sequence, ``(N,)``."""
    return lengths.cumsum(0) - lengths


def begins(lengths: Tensor) -> Tensor:
    """Mask ``(M,)`` of the rows with which a sequence begins."""
    mask = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    mask[firsts(lengths)] = True
    return mask


def padded(rows: Tensor, lengths: Tensor, padding: float = 0.0) -> Tensor:
    """Pad packed rows ``(M, *)`` of sequences of ``lengths`` to ``(N, T, *)``; a view if equal."""
    steps = int(lengths.max())
    if len(lengths) * steps == len(rows):
        return rows.unflatten(0, (len(lengths), steps))
    whole = rows.new_full((len(lengths), steps, *rows.shape[1:]), padding)
    whole[step_mask(lengths, steps, rows.device)] = rows
    return whole


def packed(whole: Tensor, lengths: Tensor) -> Tensor:
    """Rows ``(M, *)`` of padded ``(N, T, *)``; a view if lengths are equal."""
    steps = int(lengths.max())
    whole = whole[:, :steps]
    if len(lengths) * steps == int(lengths.sum()):
        return whole.flatten(0, 1)
    return whole[step_mask(lengths, steps, whole.device)]


def read_parts(parts: Mapping[str, Any], num_rows: int) -> dict[str, Tensor]:
    """Convert labels, covariates and times of concatenated steps; None is left out."""
    found = {name: read_part(name, part) for name, part in parts.items() if part is not None}
    for name, part in found.items():
        check_num_rows(name, tuple(part.shape), num_rows)
    return found


def joined_steps(
    sequences: Iterable[Any], vocabulary: Vocabulary | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate single sequences: steps ``(M, *E)``, lengths, and mask of those not missing."""
    parts = []
    for n, item in enumerate(sequences):
        if hasattr(item, "columns") and (table := to_numpy(item)).dtype.kind == "O":
            if any(isinstance(entry, str | date) for entry in table.flat):
                text = f"sequence {n} is a table whose columns {list(item.columns)} are not numbers"
                raise TypeError(f"{text}. Call Sequences.from_dataframe(frame, columns=, by=).")
        parts.append(read_steps(f"sequence {n}", item, vocabulary))
        check_order(item, torch.tensor([len(parts[-1][1])]))
    if not parts:
        raise ValueError("sequences is empty; wanted at least one. Look at how they were read.")
    shapes = {tuple(steps.shape[1:]) for steps, _ in parts if steps is not None}
    if len(shapes) > 1:
        text = f"sequences must share one event shape; got {sorted(shapes)}"
        raise ValueError(f"{text}. Give all steps as many components.")
    example = next((steps for steps, _ in parts if steps is not None), torch.zeros(1))
    rows = [
        example.new_zeros(len(known), *example.shape[1:]) if steps is None else steps
        for steps, known in parts
    ]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.cat(rows), lengths, torch.cat([known for _, known in parts])


def joined_part(name: str, items: Iterable[Any], lengths: Tensor) -> Tensor:
    """Concatenate labels, covariates or times of single sequences of ``lengths``."""
    rows = [read_part(name, item) for item in items]
    if [len(row) for row in rows] != lengths.tolist():
        text = f"{name} must have an item for each sequence, with a row for each of its steps"
        sizes = f"{lengths.tolist()!s:.60}; got {[*map(len, rows)]!s:.60}"
        raise ValueError(f"{text}, {sizes}. Nest it as the values.")
    return torch.cat(rows)


# The arguments of ``Sequences`` ------------------------------------------------------------------


def check_values(values: Tensor) -> None:
    """Raise unless there are values ``(N, T, *E)``."""
    check_kind("values", values, Tensor, "a torch.Tensor", HOW)
    check_real("values", values)
    if values.dim() < 2 or 0 in values.shape[:2]:
        text = "values must have shape (N, T, *E), with at least one sequence and step"
        raise ValueError(f"{text}; got {tuple(values.shape)}. Add the first by unsqueeze(0).")


def padded_part(name: str, part: Any, values: Tensor) -> Tensor:
    """A mask, labels, covariates or times ``(N, T, *)``, on the device of padded values."""
    part = from_numpy(name, part)
    check_tensor(name, part)
    shape = tuple(values.shape[:2])
    if tuple(part.shape[:2]) != shape:
        text = f"{name} must have shape (N, T, ...) = {shape}, as values"
        raise ValueError(f"{text}; got shape {tuple(part.shape)}. Pad it as the values.")
    return part.to(values.device)


def checked_rows(rows: Mapping[str, Tensor], lengths: Tensor) -> dict[str, Tensor]:
    """Check packed values, masks, labels, covariates and times; drop a mask that is all True."""
    found = {name: part.to(rows["values"].device) for name, part in rows.items()}
    for name, check in CHECKS.items():
        if name in found:
            check(found[name], lengths)
    if "observed" in found and bool(found["observed"].all()):
        del found["observed"]
    check_observed(found["values"], found.get("observed"), lengths)
    if "times" in found:
        found["times"] = found["times"].double()
    return found


def check_observed(values: Tensor, observed: Tensor | None, lengths: Tensor) -> None:
    """Raise if an observed step is NaN throughout, or holds an infinite number."""
    if not values.dtype.is_floating_point:
        return
    absent = _is_nan(values)
    if place := first(absent if observed is None else absent & observed, lengths):
        cure = "Set observed to False there, or build with Sequences.from_list."
        raise ValueError(f"values holds NaN at {place}, which is marked as observed. {cure}")
    infinite = values.isinf().flatten(1).any(-1) if values.dim() > 1 else values.isinf()
    if place := first(infinite if observed is None else infinite & observed, lengths):
        text = f"values holds an infinite number at {place}, which no distribution emits."
        raise ValueError(f"{text} Put NaN where nothing was measured, or look for log(0).")


def first(wrong: Tensor, lengths: Tensor) -> str:
    """Sequence and step of the first True of a mask ``(M,)``, as text; empty if none."""
    if not bool(wrong.any()):
        return ""
    return "sequence {}, step {}".format(*place_of(wrong, lengths))


def place_of(wrong: Tensor, lengths: Tensor) -> tuple[int, int]:
    """Sequence and step of the first True of a mask ``(M,)``."""
    row = int(wrong.byte().argmax())
    sequence = int(torch.searchsorted(lengths.cumsum(0), row, right=True))
    return sequence, row - int(firsts(lengths)[sequence])


def _check_mask(observed: Tensor, lengths: Tensor) -> None:
    check_booleans("observed", observed)
    _check_numbers("observed", observed)


def _check_numbers(name: str, part: Tensor, num_dims: int = 1) -> None:
    """Raise unless packed rows ``(M, *)`` have ``num_dims`` dimensions."""
    if part.dim() != num_dims:
        wanted = "(N, T)" if num_dims == 1 else "(N, T, C)"
        raise ValueError(
            f"{name} must have shape {wanted}; each step has shape {tuple(part.shape[1:])}."
        )


def check_labels(labels: Tensor, lengths: Tensor) -> None:
    """Raise unless labels are states ``(M,)``, or sets of them ``(M, K)``."""
    if labels.dtype == torch.bool:
        _check_numbers("labels[..., k]", labels[..., 0])
        return
    check_integers("labels", labels)
    _check_numbers("labels", labels)
    wrong = labels < NO_CODE
    if place := first(wrong, lengths):
        text = "labels must be states, or -1 where one is not known"
        raise ValueError(f"{text}; got {int(labels[wrong][0])} at {place}.")


def check_covariates(covariates: Tensor, lengths: Tensor) -> None:
    """Raise unless covariates ``(M, C)`` are finite numbers."""
    check_floats("covariates", covariates)
    _check_numbers("covariates", covariates, 2)
    if place := first(~covariates.isfinite().all(-1), lengths):
        raise ValueError(f"covariates must be finite; that of {place} is not. Fill it in.")


def check_step_times(times: Tensor, lengths: Tensor) -> None:
    """Raise unless times ``(M,)`` increase along each sequence."""
    check_real("times", times)
    _check_numbers("times", times)
    broken = ~times.isfinite()
    broken[1:] |= ~(times[1:] > times[:-1]) & ~begins(lengths)[1:].to(times.device)
    if bool(broken.any()):
        sequence, step = place_of(broken, lengths)
        refuse_times(times[int(firsts(lengths)[sequence]) :], f"sequence {sequence}", step)


CHECKS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "observed": _check_mask, "labels": check_labels, "covariates": check_covariates,
    "times": check_step_times,
}  # fmt: skip


def check_total(total: float | None, count: int) -> float:
    """Check ``total``, the size of the whole set; by default ``count``."""
    if total is None:
        return count
    if not count <= total < math.inf:
        text = f"total must be at least the number of sequences, {count}; got {total}"
        raise ValueError(f"{text}. Leave it out if they are all.")
    return int(total) if total == int(total) else float(total)
