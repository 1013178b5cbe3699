"""Tables of pandas, polars and others: rows grouped into sequences, sorted, their gaps found."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._arrays import is_missing, to_numpy, to_tensor
from .._checks import check_shape
from .._imports import imported
from .steps import NO_CODE, check_order, encoded, firsts, packed, read_part, read_steps, read_times
from .vocabulary import Vocabulary

Gaps = Literal["missing", "ignore", "error"]
JITTER = 0.2  # of a step, by which times may lie beside their places


def read_table(
    frame: Any, columns: Any, by: Any, time: str | None, labels: str | None, covariates: Any,
    vocabulary: Vocabulary | None, tags: Vocabulary | None, gaps: Gaps | None,
) -> tuple[dict[str, Any], Table]:  # fmt: skip
    """Read a table: arguments of ``Sequences.from_concatenated``, and its rows by sequence."""
    values, known = read_columns("columns", frame, columns, vocabulary)
    table = Table.of(frame, by, time, len(values), gaps)
    rows, filled = table.order.clamp(min=0), table.order < 0
    steps: dict[str, Any] = {"values": values[rows], "observed": known[rows] & ~filled}
    steps |= {"lengths": table.lengths, "times": table.times}
    if labels is not None:
        states = column("labels", frame, labels)
        name = f"labels {labels!r}"
        codes = read_part("labels", states, name) if tags is None else encoded(states, tags, name)
        steps["labels"] = codes[rows].masked_fill(filled, NO_CODE)
    if covariates is not None:
        if bool(filled.any()):
            cure = "Add these rows to frame, or give gaps='ignore'."
            raise ValueError(f"covariates have no values at steps without a row. {cure}")
        names = [covariates] if isinstance(covariates, str) else covariates
        numbers, _ = read_columns("covariates", frame, names)
        steps["covariates"] = numbers[rows].double()
    return steps, table


def column(argument: str, frame: Any, name: str) -> np.ndarray:
    """Read a column of a table, by ``frame[name]`` and its method ``to_numpy`` if it has one.

    Levels of the index of a pandas table that have a name are columns, too.

    Raises:
        ValueError: If there is none of that name.
    """
    levels = getattr(getattr(frame, "index", None), "names", ())
    names: Any = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None:
        text = f"frame must be a table; got the {type(frame).__name__} {frame!r:.40}"
        raise TypeError(f"{text}. Read a file by read_csv(path); give a whole DataFrame.")
    if name in levels and name not in list(names):
        return to_numpy(frame.index.get_level_values(name))
    if name not in list(names):
        text = f"{argument} must name columns of frame, {list(names)}; got {name!r}."
        cure = "Of a design give from_dataframe(design.table(frame), covariates=design.names)."
        raise ValueError(f"{text} {cure if argument == 'covariates' else ''}".rstrip())
    return to_numpy(frame[name])


def read_columns(
    argument: str, frame: Any, names: str | Sequence[str], vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """Columns of a table, ``(M,)`` for one name, ``(M, D)`` for D, and the mask of known rows."""
    if isinstance(names, str):
        values = column(argument, frame, names)
        steps, known = read_steps(f"{argument} {names!r}", values, vocabulary)
        return torch.zeros(len(known)) if steps is None else steps, known
    parts = [read_columns(argument, frame, name, vocabulary) for name in names]
    for name, (part, _) in zip(names, parts):
        check_shape(f"{argument} {name!r}", part, (len(parts[0][1]),), "(M,)")
    known = torch.stack([part for _, part in parts], -1)
    dtype = torch.float64 if bool((known.any(-1) & ~known.all(-1)).any()) else torch.bool
    for part, _ in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    steps = torch.stack([part.to(dtype) for part, _ in parts], -1)
    if dtype.is_floating_point:
        steps = steps.masked_fill(~known, torch.nan)
    return steps, known.any(-1)


class Table(NamedTuple):
    """The rows of a table, sequence by sequence.

    Attributes:
        keys: A ``pandas.DataFrame`` of the columns ``by`` and ``time``, with the table's index.
        by: Names of the columns that tell sequences apart.
        order: ``(M,)``, the number of the row of each step; -1 where a step has no row.
        lengths: ``(N,)``.
        times: ``(M,)``; None without a column of times.
    """

    keys: Any
    by: list[str]
    order: Tensor
    lengths: Tensor
    times: Tensor | None

    @classmethod
    def of(cls, frame: Any, by: Any, time: str | None, count: int, gaps: Gaps | None) -> Table:
        """Group ``count`` rows by the columns ``by``, in the order of their first rows, and sort.

        Raises:
            ValueError: If a name or a time is missing, or a time occurs twice in a sequence.
        """
        pandas = imported("pandas")
        names = [] if by is None else [by] if isinstance(by, str) else list(by)
        columns = {name: column("by", frame, name) for name in names}
        if time is not None:
            columns[time] = column("time", frame, time)
        for name, values in columns.items():
            if (missing := is_missing(values)).any():
                text = f"{'time' if name == time else 'by'} {name!r} is missing in row"
                raise ValueError(f"{text} {missing.argmax()}. Drop these rows, or fill them.")
        whole = isinstance(frame, pandas.DataFrame)
        own = [name for name in columns if whole and name in frame.columns]
        keys = frame[own] if whole else pandas.DataFrame(columns, range(count))
        for name in () if whole else columns:  # an array has lost the time zone of polars
            zone = getattr(getattr(frame[name], "dtype", None), "time_zone", None)
            if zone is not None:
                keys[name] = pandas.to_datetime(keys[name], utc=True).dt.tz_convert(zone)
        number = np.zeros(count, np.int64)
        if names:
            groups = pandas.DataFrame({name: columns[name] for name in names})
            number = groups.groupby(names, sort=False, observed=True).ngroup().to_numpy()
        if time is None:
            order = number.argsort(kind="stable")
            lengths = torch.from_numpy(np.bincount(number))
            check_order(frame, lengths, order)
            return cls(keys, names, torch.from_numpy(order), lengths, None)
        times = read_times(columns[time], f"time {time!r}").numpy()
        order = np.lexsort((times, number))
        number, times = number[order], times[order]
        inside = np.diff(number) == 0
        distance = np.diff(times)[inside]
        if not distance.all():
            place = int(((np.diff(times) == 0) & inside).argmax())
            text = f"time must differ within a sequence; rows {order[place]} and {order[place + 1]}"
            cure = "Name the sequences of the rows with by=."
            if names:
                cure = "Drop or average rows of one time, or name another column in by=."
            raise ValueError(f"{text} have the same. {cure}")
        absent = np.zeros(max(count - 1, 0), np.int64)  # steps between two rows
        dates = keys[time] if time in keys else keys.index.get_level_values(time).to_series()
        clocks = [distance, *(np.diff(clock[order])[inside] for clock in calendars(dates))]
        absent[inside] = absent_steps(clocks, gaps)
        place = np.arange(count) + np.pad(absent.cumsum(), (1, 0))
        steps = np.arange(place[-1] + 1)
        filled = np.full(len(steps), -1)
        filled[place] = order
        lengths = torch.from_numpy(np.bincount(number[np.searchsorted(place, steps)]))
        sorted_times = torch.from_numpy(np.interp(steps, place, times))
        return cls(keys, names, torch.from_numpy(filled), lengths, sorted_times)


def calendars(column: Any) -> list[np.ndarray]:
    """Day numbers of a ``pandas.Series`` of dates in local time; month numbers if all are monthly.

    Months are among them if all dates are of one day of the month and time, or the last of it.
    """
    import pandas

    if column.dtype == object and isinstance(column.iloc[0], date):
        column = pandas.to_datetime(column, utc=getattr(column.iloc[0], "tzinfo", None) is not None)
    if isinstance(column.dtype, pandas.PeriodDtype):
        column = column.dt.start_time
    if not hasattr(column, "dt") or column.dtype.kind != "M":
        return []
    local = column.dt.tz_localize(None)
    rest = local - local.dt.normalize()
    days, end = local.dt.day, local.dt.is_month_end.all()
    clocks = [(local - local.iloc[0]).to_numpy() / np.timedelta64(1, "D")]
    if rest.nunique() == 1 and (end or days.nunique() == 1):
        clocks.append((12.0 * local.dt.year + local.dt.month).to_numpy())
    return clocks


def absent_steps(clocks: list[np.ndarray], gaps: Gaps | None) -> np.ndarray:
    """Number of steps missing between neighbouring rows, from their distances in time.

    The smallest distance is one step, by the first clock of which the others are multiples; of
    times that jitter, the median. Else there are no gaps; where less than half of the distances are
    one step, only by ``gaps="missing"`` or ``"error"``.
    """
    if gaps not in (None, "missing", "ignore", "error"):
        raise ValueError(f"gaps must be 'missing', 'ignore' or 'error'; got {gaps!r}.")
    distance = clocks[0]
    none = np.zeros(len(distance), np.int64)
    if gaps == "ignore" or not len(distance):
        return none
    tries = [(each, each.min(), 1e-3) for each in clocks]
    for each, step, tolerance in (*tries, (distance, np.median(distance), JITTER)):
        ratio = each / step if step > 0 else distance / np.inf
        whole = ratio.round()
        regular = bool((np.abs(ratio - whole) < tolerance).all()) and whole.min() > 0
        if regular:
            break
    if gaps is not None and not regular:
        text = f"gaps={gaps!r} needs multiples of one step; times are no multiples of"
        raise ValueError(f"{text} {distance.min():g}, nor of months. Give gaps='ignore'.")
    if gaps == "missing":
        return (whole - 1).astype(np.int64)
    count = int((whole > 1).sum())
    if not count or (gaps is None and not (regular and np.median(whole) == 1)):
        return none
    size = f"{step:g}"
    if len(clocks) > 1 or each is not distance:  # of dates, of which months are the last clock
        unit = "months" if len(clocks) > 2 and each is clocks[2] else "days"
        size = f"{step:g} {unit}" if step >= 1 else str(timedelta(days=float(step)))
    said = (
        f"time has gaps: {count} rows are up to {whole.max():g} steps of {size} after the row "
        "before. Give gaps='missing' to fill them, or gaps='ignore' where nothing is missing."
    )
    if gaps == "error":
        raise ValueError(said)
    warnings.warn(f"{said} They are taken as neighbours.", stacklevel=4)
    return none


def rows_of(
    table: Table | None, rows: Tensor | None, lengths: Tensor, states: Any, probs: Any
) -> Any:
    """``pandas.DataFrame`` of the steps, with states or probabilities.

    Args:
        table: The table they come from, if they do: its rows in their order are returned.
        rows: ``(M,)``, the number of each step's row; -1 where there is none.
        lengths: ``(N,)``.
        states: ``(N, T)``, or packed ``(M,)``.
        probs: ``(N, T, K)``, or packed ``(M, K)``.
    """
    pandas = imported("pandas")
    count = int(lengths.sum())
    if table is None or rows is None:
        order = torch.arange(count)
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        step = order - firsts(lengths)[sequence]
        frame = pandas.DataFrame({"sequence": sequence.numpy(), "step": step.numpy()})
    else:
        numbers = rows.cpu()
        order = numbers.argsort(stable=True)[int((numbers < 0).sum()) :]
        frame = table.keys.iloc[numbers[order].numpy()].copy()
    if states is not None:
        frame["state"] = _of_steps("states", states, lengths, 1)[order].numpy()
    if probs is not None:
        found = _of_steps("probs", probs, lengths, 2)[order].numpy()
        frame[[f"p{k}" for k in range(found.shape[1])]] = found
    return frame


def _of_steps(name: str, part: Any, lengths: Tensor, num_dims: int) -> Tensor:
    """Packed rows on the CPU, of ``num_dims`` dimensions, of what is padded or packed."""
    part = to_tensor(name, part).detach().cpu()
    rest = tuple(part.shape[part.dim() - num_dims + 1 :])
    if part.dim() != num_dims:
        wanted = len(lengths), int(lengths.max()), *rest
        check_shape(name, part, wanted, "(N, T, K)" if rest else "(N, T)")
        return packed(part, lengths)
    check_shape(name, part, (int(lengths.sum()), *rest), "(M, K)" if rest else "(M,)")
    return part
