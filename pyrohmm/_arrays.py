"""Conversion to tensors: arrays of NumPy and others, lists, columns of tables."""

from __future__ import annotations

import re
import warnings
from datetime import date
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._imports import imported

_WIDER = {  # dtypes that torch, or the recursions, hardly compute with
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
NUMBER = re.compile(r"\s*[-+]?[\d.,]+(e[-+]?\d+)?\s*", re.IGNORECASE)
CODES = (
    "Take codes: column.map({'rest': 0, 'walk': 1}), in which NaN is unknown; or give a Vocabulary "
    "where one may."
)
_NOT_NUMBERS = {
    "M": "dates", "m": "durations", "S": "bytes", "V": "records", "c": "complex ones"
}  # fmt: skip


def to_tensor(name: str, value: Any) -> Tensor:
    """Convert an array, a list or a tensor to a tensor, sharing memory where possible.

    Raises:
        TypeError: If they are no real numbers, or of a dtype or layout without arithmetic.
    """
    if isinstance(value, list | tuple):
        try:
            value = _stacked(value)
        except (TypeError, ValueError, RuntimeError):  # with None in it, or ragged
            try:
                value = np.asarray(value, dtype=object)
            except ValueError:
                text = f"{name} must be rows of equal length; got a ragged list. Pad it."
                raise TypeError(text) from None
    if not isinstance(value, Tensor):
        value = _from_numpy(name, to_numpy(value))
    return regular(name, value)


def from_numpy(name: str, value: Any) -> Any:
    """Convert a NumPy array or number to a tensor; other values are returned unchanged."""
    return to_tensor(name, value) if isinstance(value, np.ndarray | np.generic) else value


def regular(name: str, tensor: Tensor) -> Tensor:
    """Widen half precision and unsigned integers to dtypes with arithmetic.

    Raises:
        TypeError: If there is none, or its layout is not dense.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        text = f"{name} must be dense; got layout {tensor.layout}, {tensor.dtype}"
        raise TypeError(f"{text}. Call .to_dense() or .dequantize().")
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def to_numpy(values: Any) -> np.ndarray:
    """Convert a table column to an array, of objects if its integers have gaps."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    convert = getattr(values, "to_numpy", None)
    array = np.asanyarray(values if convert is None else convert())
    kind = str(getattr(values, "dtype", getattr(values, "type", ""))).lower()
    if array.dtype.kind == "f" and kind.startswith(("int", "uint")):  # not as floats with NaN
        ways = [n for n in ("to_pylist", "to_list", "tolist") if hasattr(values, n)]
        array = np.array(getattr(values, ways[0])(), object)
    return array


def to_series(column: Any) -> Any:
    """Convert a table column or a list to a ``pandas.Series``, with the time zone of its dates."""
    pandas = imported("pandas")
    if hasattr(column, "array"):  # of a Series or an Index
        return pandas.Series(column.array)
    values = getattr(column, "to_numpy", lambda: np.asarray(column))()
    zone = getattr(getattr(column, "dtype", None), "time_zone", None)
    if zone is not None:  # which an array of polars has lost
        return pandas.Series(pandas.to_datetime(values, utc=True).tz_convert(zone))
    return pandas.Series(values)


def as_dates(column: Any) -> Any:
    """A ``pandas.Series`` of dates, as these and not as objects or periods; others stay."""
    pandas = imported("pandas")
    if column.dtype == object and isinstance(column.iloc[0], date):
        return pandas.to_datetime(column, utc=getattr(column.iloc[0], "tzinfo", None) is not None)
    return column.dt.start_time if isinstance(column.dtype, pandas.PeriodDtype) else column


def is_missing(values: np.ndarray) -> np.ndarray:
    """Mask of a column's missing entries: None, NaN, and all else that differs from itself."""
    if values.dtype.kind != "O":
        return values != values if values.dtype.kind in "fcMm" else np.zeros(values.shape, bool)
    return np.array([_is_nothing(item) for item in values.reshape(-1)], bool).reshape(values.shape)


def _is_nothing(item: Any) -> bool:
    try:
        return item is None or bool(item != item)
    except (TypeError, ValueError):  # pandas.NA is neither equal nor different
        return np.ndim(item) == 0


def _stacked(value: list[Any] | tuple[Any, ...]) -> Any:
    """Stack a list of tensors, arrays or numbers."""
    if value and all(isinstance(item, np.ndarray | np.generic) for item in value):
        return np.stack(value)
    if value and all(isinstance(item, Tensor) for item in value):
        return torch.stack(value)
    return torch.as_tensor(value)


def _from_numpy(name: str, array: np.ndarray) -> Tensor:
    """Convert an array to a tensor, sharing memory if the dtype allows."""
    kind = array.dtype.kind
    if isinstance(array, np.ma.MaskedArray):
        if kind != "f" and array.mask.any():
            cure = "Give array.filled(0), and observed=~array.mask."
            raise TypeError(f"{name} has masked integers, which no tensor has. {cure}")
        array = array.filled(np.nan) if kind == "f" else array.data
    if kind == "O":
        array = _from_objects(name, array)
    elif kind in "UT":
        raise _text(name, array)
    elif kind in _NOT_NUMBERS:
        raise TypeError(f"{name} must be numbers; got {_NOT_NUMBERS[kind]}.")
    elif kind == "f" and array.itemsize > 8:
        array = array.astype(np.float64)  # long double
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return torch.from_numpy(array)  # read-only memory is not written to


def _text(name: str, array: np.ndarray) -> TypeError:
    """Error for text among numbers, which is numbers itself, or stands for codes."""
    numbers = any(NUMBER.fullmatch(str(item)) for item in array.flat)
    cure = "Convert it: pd.to_numeric(column)." if numbers else CODES
    return TypeError(f"{name} must be numbers; got text. {cure}")


def _from_objects(name: str, array: np.ndarray) -> np.ndarray:
    """Convert an array of Python numbers, with NaN for missing ones."""
    missing = is_missing(array)
    known = array[~missing]
    if any(isinstance(item, str | bytes) for item in known):
        raise _text(name, known)
    if len(known) == array.size and all(isinstance(item, int | np.integer) for item in known):
        return array.astype(np.int64)
    try:
        numbers = np.full(array.shape, np.nan)
        numbers[~missing] = known.astype(np.float64)
    except (TypeError, ValueError):
        came = ", ".join(sorted({type(item).__name__ for item in known}))
        raise TypeError(f"{name} must be numbers; got {came}.") from None
    return numbers
