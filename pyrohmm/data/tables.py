"""Tables of pandas, polars and others: rows grouped into sequences, sorted, their gaps found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._arrays import as_dates, to_numpy, to_series, to_tensor
from .._checks import check_shape, warn_caller
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
        states = to_numpy(column("labels", frame, labels))
        name = f"labels {labels!r}"
        codes = read_part("labels", states, name) if tags is None else encoded(states, tags, name)
        steps["labels"] = codes[rows].masked_fill(filled, NO_CODE)
    if covariates is not None:
        if bool(filled.any()):
            cure = "Add these rows to frame, or give gaps='ignore'."
            raise ValueError(f"covariates have no values at steps without a row. {cure}")
        numbers, found = read_columns("covariates", frame, covariates)
        numbers = numbers.double().reshape(len(found), -1)
        steps["covariates"] = numbers.masked_fill(~found.unsqueeze(-1), torch.nan)[rows]
    return steps, table


def column(argument: str, frame: Any, name: str) -> Any:
    """A column of a table, ``frame[name]``.

    Levels of the index of a pandas table that have a name are columns, too.

    Raises:
        ValueError: If there is none of that name.
    """
    if hasattr(frame, "collect"):
        raise TypeError(f"frame must be a table; got {type(frame).__name__}. Call .collect().")
    levels = getattr(getattr(frame, "index", None), "names", ())
    names: Any = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None:
        text = f"frame must be a table; got the {type(frame).__name__} {frame!r:.40}"
        raise TypeError(f"{text}. Read a file by read_csv(path); give a whole DataFrame.")
    if name in levels and name not in list(names):
        return frame.index.get_level_values(name)
    if name not in list(names):
        text = f"{argument} must name columns of frame, {list(names)}; got {name!r}."
        cure = "Of a design give from_dataframe(design.table(frame), covariates=design.names)."
        raise ValueError(f"{text} {cure if argument == 'covariates' else ''}".rstrip())
    if list(names).count(name) > 1:
        text = f"{argument} must name one column of frame; {name!r} occurs twice in {list(names)}"
        raise ValueError(f"{text}. Rename one, or drop it.")
    return frame[name]


def read_columns(
    argument: str, frame: Any, names: str | Sequence[str], vocabulary: Vocabulary | None = None
) -> tuple[Tensor, Tensor]:
    """Columns of a table, ``(M,)`` for one name, ``(M, D)`` for D, and the mask of known rows."""
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        values = to_numpy(column(argument, frame, names))  # type: ignore[arg-type]
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
        keys: The columns ``by`` and ``time`` as they are in the table, of pandas with its index.
        columns: The same as a ``pandas.DataFrame`` without it, of periods their starts.
        by: Names of the columns that tell sequences apart.
        time: Name of the column of times.
        order: ``(M,)``, the number of the row of each step; -1 where a step has no row.
        lengths: ``(N,)``.
        times: ``(M,)``; None without a column of times.
        step: Number of a clock, and size of a step by it; None where steps differ.
    """

    keys: Any
    columns: Any
    by: list[str]
    time: str | None
    order: Tensor
    lengths: Tensor
    times: Tensor | None = None
    step: tuple[int, float] | None = None

    @classmethod
    def of(cls, frame: Any, by: Any, time: str | None, count: int, gaps: Gaps | None) -> Table:
        """Group ``count`` rows by the columns ``by``, in the order of their first rows, and sort.

        Raises:
            ValueError: If a name or a time is missing, or a time occurs twice in a sequence.
        """
        pandas = imported("pandas")
        names = [] if by is None else list(by) if pandas.api.types.is_list_like(by) else [by]
        columns = keys = pandas.DataFrame(index=range(count))
        roles = dict.fromkeys(names, "by") | ({} if time is None else {time: "time"})
        for name, argument in roles.items():
            columns[name] = to_series(column(argument, frame, name))
            if (missing := columns[name].isna()).any():
                text = f"{argument} {name!r} is missing in row {missing.argmax()}"
                raise ValueError(f"{text}. Drop these rows, or fill them.")
        if isinstance(frame, pandas.DataFrame):
            keys = frame[[name for name in columns if name in frame.columns]]
        elif type(frame).__module__.startswith("polars."):
            keys = frame.select(list(columns))
        number = np.zeros(count, np.int64)
        if names:
            number = columns.groupby(names, sort=False, observed=True).ngroup().to_numpy()
        if time is None:
            order = number.argsort(kind="stable")
            lengths = torch.from_numpy(np.bincount(number))
            check_order(frame, lengths, order)
            return cls(keys, columns, names, None, torch.from_numpy(order), lengths)
        dates = as_dates(columns[time])
        columns = pandas.DataFrame({**columns, time: dates})
        times = read_times(dates, f"time {time!r}").numpy()
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
        clocks = [distance, *(np.diff(days[order])[inside] for days in calendars(dates))]
        absent[inside], step = absent_steps(clocks, gaps)
        place = np.arange(count) + np.pad(absent.cumsum(), (1, 0))
        steps = np.arange(place[-1] + 1)
        filled = np.full(len(steps), -1)
        filled[place] = order
        lengths = torch.from_numpy(np.bincount(number[np.searchsorted(place, steps)]))
        clock = torch.from_numpy(np.interp(steps, place, times))
        return cls(keys, columns, names, time, torch.from_numpy(filled), lengths, clock, step)


def calendars(dates: Any) -> list[np.ndarray]:
    """Day numbers of a ``pandas.Series`` of dates in local time; month numbers if all are monthly.

    Months are among them if all dates are of one time and one day, or the last of shorter months.
    """
    if dates.dtype.kind != "M":
        return []
    local = dates.dt.tz_localize(None)
    rest = local - local.dt.normalize()
    days, most = local.dt.day, local.dt.days_in_month
    clocks = [(local - local.iloc[0]).to_numpy() / np.timedelta64(1, "D")]
    if rest.nunique() == 1 and (days == most.clip(upper=days.max())).all():
        clocks.append((12.0 * local.dt.year + local.dt.month).to_numpy())
    return clocks


def absent_steps(clocks: list[np.ndarray], gaps: Gaps | None) -> tuple[np.ndarray, Any]:
    """Number of steps missing between neighbouring rows, from their distances in time.

    The smallest distance is one step, by the first clock of which the others are multiples; of
    times that jitter, the median. Calendars come first where steps are days or longer. Else there
    are no gaps; where less than half of the distances are one step, only by ``gaps="missing"`` or
    ``"error"``. Returned are also the number of the clock, and the step.
    """
    if gaps not in (None, "missing", "ignore", "error"):
        raise ValueError(f"gaps must be 'missing', 'ignore' or 'error'; got {gaps!r}.")
    distance = clocks[0]
    none = np.zeros(len(distance), np.int64)
    if not len(distance):
        return none, None
    tries = [(clock, each.min(), 1e-3) for clock, each in enumerate(clocks)]
    if len(clocks) > 1 and clocks[1].min() >= 1:
        tries.reverse()
    for clock, step, tolerance in (*tries, (0, np.median(distance), JITTER)):
        ratio = clocks[clock] / step if step > 0 else distance / np.inf
        whole = ratio.round()
        regular = bool((np.abs(ratio - whole) < tolerance).all()) and whole.min() > 0
        if regular:
            break
    if gaps in ("missing", "error") and not regular:
        text = f"gaps={gaps!r} needs multiples of one step; times are no multiples of"
        raise ValueError(f"{text} {distance.min():g}, nor of months. Give gaps='ignore'.")
    count = int((whole > 1).sum())
    if regular and (gaps == "missing" or not count):
        return (whole - 1).astype(np.int64), (clock, float(step))
    if gaps == "ignore" or (gaps is None and not (regular and np.median(whole) == 1)):
        return none, None
    size = f"{step:g}"
    if len(clocks) > 1:  # of dates
        unit = "months" if clock == 2 else "days"
        size = f"{step:g} {unit}" if step >= 1 else str(timedelta(days=float(step)))
    said = (
        f"time has gaps: {count} rows are up to {whole.max():g} steps of {size} after the row "
        "before. Give gaps='missing' to fill them, or gaps='ignore' where nothing is missing."
    )
    if gaps == "error":
        raise ValueError(said)
    warn_caller(f"{said} They are taken as neighbours.")
    return none, None


def times_of(table: Table, rows: Tensor, lengths: Tensor, num_ahead: int) -> Any:
    """``pandas.Series`` of the times of all steps, and of ``num_ahead`` more of each sequence."""
    if num_ahead and table.step is None:
        text = f"num_ahead must be 0 where times {table.time!r} do not go on by one step"
        raise ValueError(f"{text}; got {num_ahead}. Write the times to come yourself.")
    parts = (np.append(own, [-1] * num_ahead) for own in rows.cpu().split(lengths.tolist()))
    numbers = np.concatenate([*parts]).astype(int)
    steps = np.arange(len(numbers))
    last = np.maximum.accumulate(np.where(numbers < 0, 0, steps))  # step that has a row
    dates, after = table.columns[table.time], numbers < 0
    times = dates.iloc[numbers[last]].reset_index(drop=True)
    (clock, size), pandas = table.step or (0, 0.0), imported("pandas")
    step, kind = int(size) if size.is_integer() else size, object  # by the numbers: int or float
    if dates.dtype.kind in "mM":
        step, kind = pandas.Timedelta(size, "D").round("us"), dates.dtype
    if clock == 2:  # the 30th of shorter months is their last day; 28 February stays
        day = 31 if size % 12 and dates.dt.is_month_end.all() else int(dates.dt.day.max())
        step = pandas.DateOffset(months=int(size), day=day)
    old = times[after].dt.tz_localize(None) if clock else times[after]
    moved = [time + n * step for time, n in zip(old, (steps - last)[after].tolist())]
    new = pandas.Series(moved, old.index, old.dtype if clock else kind)
    if clock:
        new = new.dt.tz_localize(times.dt.tz, np.full(len(new), True), nonexistent="shift_forward")
    return times.astype(kind).mask(after, new).infer_objects()


def rows_of(
    table: Table | None, rows: Tensor | None, lengths: Tensor, states: Any, probs: Any
) -> Any:
    """Table of the steps, with states or probabilities: see :meth:`Sequences.to_dataframe`."""
    found = {} if states is None else {"state": _of_steps("states", states, lengths, 1)}
    if probs is not None:
        columns = _of_steps("probs", probs, lengths, 2).mT
        found |= {f"p{k}": column for k, column in enumerate(columns)}
    if table is None or rows is None:
        order = torch.arange(int(lengths.sum()))
        sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
        steps = {"sequence": sequence.numpy(), "step": (order - firsts(lengths)[sequence]).numpy()}
        keys, own = imported("pandas").DataFrame(steps), order.numpy()
    else:
        numbers = rows.cpu()
        order = numbers.argsort(stable=True)[int((numbers < 0).sum()) :]
        keys, own = table.keys, numbers[order].numpy()
    return beside(keys, own, {name: column[order].numpy() for name, column in found.items()})


def rows_ahead(data: Any, columns: dict[str, Any], num_steps: int, times: Tensor | None) -> Any:
    """Table of ``columns`` of the steps to come, with keys and with ``times`` if they are given."""
    pandas, table = imported("pandas"), data.table
    sequence, number = np.indices((len(data), num_steps)).reshape(2, -1)
    name, when = "step", data.lengths.numpy()[sequence] + number
    if times is not None:
        name, when = "time", times.cpu().expand(len(data), num_steps).reshape(-1).numpy()
    if table is None:
        return pandas.DataFrame({"sequence": sequence, name: when} | columns)
    if times is not None and (dates := table.columns[table.time]).dtype.kind == "M":
        when = pandas.to_datetime(when, unit="D", utc=True).round("ms").tz_convert(dates.dt.tz)
    elif times is None and table.step is not None:
        ends = (data.lengths + num_steps).cumsum(0).numpy()[sequence] - num_steps + number
        when = data.time_index(num_steps).iloc[ends].array
    name = name if table.step is None and times is None else table.time
    rows = data.packed("rows").cpu()[data.firsts].numpy()[sequence]
    if hasattr(table.keys, "iloc"):
        return beside(table.columns[table.by], rows, {name: when} | columns).reset_index(drop=True)
    if name == table.time:
        when, kind = imported("polars").Series(when.tolist()), table.keys[name].dtype
        when = when.cast(kind) if kind.is_temporal() else when
    return beside(table.keys.select(table.by), rows, {name: when} | columns)


def beside(keys: Any, rows: np.ndarray, columns: dict[str, Any]) -> Any:
    """Some rows of a table of pandas or polars, with columns beside them."""
    if twice := [name for name in columns if name in keys]:
        text = f"by and time must not name a column {twice[0]!r}; the answer has {[*columns]!s:.60}"
        raise ValueError(f"{text}. Rename it in the table, before from_dataframe.")
    if hasattr(keys, "iloc"):
        pandas, keys = imported("pandas"), keys.iloc[rows]
        return pandas.concat([keys, pandas.DataFrame(columns, keys.index)], axis="columns")
    polars, keys = imported("polars"), keys[rows] if keys.width else keys
    return polars.concat([keys, polars.DataFrame(columns)], how="horizontal")


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
