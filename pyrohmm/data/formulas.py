"""Design matrices of covariates from formulas, by the package formulaic (extra ``formulas``)."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from scipy.interpolate import BSpline
from torch.utils._pytree import tree_map

from .._arrays import to_series
from .._checks import check_positive_number, check_size, names_checked
from .._imports import imported

Frame = Any  # a DataFrame of pandas or polars, or a dict of columns


class Columns(NamedTuple):
    """Names and numbers of the covariate columns that one part of a model reads.

    Attributes:
        names: Of the terms, such as ``temperature``.
        indices: Of the columns, among those of ``data.covariates``.
        design: Formula, centres, knots and levels that they are made by, to six digits, which tell
            designs apart; None for numbers of columns.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    design: dict[str, Any] | None = None

    @property
    def smooths(self) -> list[str]:
        """The smooth term of each column, empty for the others."""
        terms = [re.sub(r"(\bsmooth\([^\[]*\))\[\d+\]", r"\1", name) for name in self.names]
        return [term if term != name else "" for term, name in zip(terms, self.names)]


class Design:
    """Design matrices of several parts of a model, made by :func:`formulas`.

    Attributes:
        names: Of all columns, in the order of the covariates; a column that several parts read is
            there once.
        parts: Of each part the ``formula``, its ``columns``, and numbers and levels of factors from
            the table: plain data, which :func:`pyrohmm.save` keeps for :func:`load_formulas`.
    """

    def __init__(self, parts: Mapping[str, dict[str, Any]]) -> None:
        self.parts = dict(parts)
        every = [name for part in parts.values() for name in part["columns"]]
        self.names = list(dict.fromkeys(every))

    def __repr__(self) -> str:
        texts = [f"{name}={part['formula']!r}" for name, part in self.parts.items()]
        return f"Design({', '.join(texts)}; columns {', '.join(self.names)})"

    def __getitem__(self, part: str) -> Columns:
        """Covariate columns of a part of the model, by its name in :func:`formulas`."""
        about = self.parts[part]
        design = tree_map(lambda x: float(f"{x:.6g}") if isinstance(x, float) else x, _plain(about))
        names = tuple(design["columns"])
        return Columns(names, tuple(map(self.names.index, names)), design)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def matrix(self, frame: Frame, *parts: str) -> np.ndarray:
        """Design matrix ``(M, C)`` of a table of M rows, such as one to predict at.

        Centres, knots and levels of factors are those of the table that the design was made from.

        Args:
            frame: A DataFrame, or a dict of columns.
            *parts: Of the model, that are to be predicted: columns that none of them reads are
                zero, and ``frame`` need not have what they are made of. By default all.

        Raises:
            ValueError: If a column is missing, has missing values, or a level that was not there.
        """
        frame = _pandas(frame)
        found = dict.fromkeys(self.names, np.zeros(len(frame))) | self._read(frame, *parts)
        return np.stack(list(found.values()), -1)

    def table(self, frame: Frame) -> Frame:
        """The table with the columns of its design matrix: a DataFrame as it was, or a dict.

        For ``Sequences.from_dataframe(design.table(frame), covariates=design.names, ...)``.
        """
        table = _pandas(frame)
        found = self._read(table)
        if table is frame:
            return frame.assign(**found)
        if hasattr(frame, "with_columns"):  # of polars
            return frame.with_columns(type(frame)(found).get_columns())
        return {name: table[name] for name in table.columns} | found

    def _read(self, frame: Any, *parts: str) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name in parts or self.parts:
            found |= _columns_of(name, self.parts[name], frame)
        return found


@names_checked
def formulas(frame: Frame, **parts: str) -> Design:
    """Design matrices from formulas, one for each part of a model.

    Formulas are those of `formulaic <https://matthewwardrop.github.io/formulaic>`_, much as in R:
    ``"~ temperature"``, ``"~ C(sex) * age"``, ``"~ bs(age, df=5)"``, ``"~ poly(x, 2)"``. Besides,
    ``cyclic(hour, 24, 2)`` are sines and cosines of period 24, of the first two orders, and
    ``smooth(age, 10)``, or ``smooth(hour, 10, period=24)``, a spline: see :func:`smooth`. The
    coefficient of ``offset(log(hours))`` is one. The intercept is there unless ``- 1`` takes it
    away.

    Args:
        frame: A DataFrame, or a dict of columns.
        **parts: A formula by the name of each part, of your choice.

    Raises:
        ImportError: If formulaic is not installed.
        ValueError: If a column is missing or has missing values, or columns of a part are
            collinear.

    Example:
        >>> table = {"hour": [0, 6, 12, 18], "dose": [0.0, 1.0, 0.0, 2.0]}
        >>> design = formulas(table, transition="~ cyclic(hour, 24)", loc="~ dose")
        >>> design.names
        ['Intercept', 'cyclic(hour, 24)[sin 1]', 'cyclic(hour, 24)[cos 1]', 'dose']
        >>> design["loc"].indices
        (0, 3)
    """
    formulaic = imported("formulaic")  # pip install 'pyrohmm[formulas]'
    table = _pandas(frame)
    found: dict[str, dict[str, Any]] = {}
    for part, text in parts.items():
        try:
            _check_read(text, table)
            matrix = formulaic.model_matrix(text, table, context=_terms(), na_action="ignore")
        except Exception as error:
            raise ValueError(f"formula of {part}, {text!r}: {error}") from error
        if not hasattr(matrix, "columns"):
            raise ValueError(
                f"formula of {part} must be as '~ dose', one-sided; got {text!r}. Leave out what "
                "is before ~."
            )
        spec = matrix.model_spec
        about = {"formula": text, "columns": [*matrix.columns], "state": spec.transform_state}
        coded = spec.encoder_state.items()
        about["levels"] = {n: list(x["categories"]) for n, (_, x) in coded if "categories" in x}
        found[part] = tree_map(lambda x: x.item() if isinstance(x, np.number) else x, about)
        _check_rank(part, _columns_of(part, found[part], table))
    return Design(found)


def _check_read(text: str, table: Any) -> None:
    """Raise if a formula reads a column of dates or durations as it is, or of missing values."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "", text)  # what is inside a string names nothing
    for name in table.columns:
        if not re.search(rf"\b{re.escape(str(name))}\b(?!\.)", text):
            continue
        if table[name].dtype.kind in "mM":
            raise ValueError(f"column {name!r} holds times: make a number of it, as .dt.hour does.")
        if table[name].dtype != float and table[name].isna().any():  # numbers are seen afterwards
            raise ValueError(f"column {name!r} has missing values. Drop these rows, or fill them.")


def cyclic(values: Any, period: float, order: int = 1) -> Any:
    """Sines and cosines of ``values`` over ``period``, for each order from 1 to ``order``."""
    check_size("order", order)
    check_positive_number("period", period)
    angle = 2 * np.pi * np.asarray(values, dtype=float) / period
    waves = {}
    for n in range(1, order + 1):
        waves[f"sin {n}"], waves[f"cos {n}"] = np.sin(n * angle), np.cos(n * angle)
    return waves


def smooth(
    values: Any, size: int, period: float | None = None, _state: dict[str, Any] | None = None
) -> Any:
    r"""Columns of a cubic spline whose coefficients are independent under a random walk.

    Of B-splines at even knots (Eilers and Marx, 1996) with coefficients :math:`a`, in coordinates
    :math:`b` with :math:`|b|^2 = \sum_j (a_{j+1} - a_j)^2`: under a normal prior of b with standard
    deviation :math:`\sigma` a is a random walk with steps of this size. Constants are left out.

    Args:
        values: ``(M,)``.
        size: Number of B-splines, at least 4; there are ``size - 1`` columns.
        period: Of a cyclic spline.
    """
    check_size("size", size, 4)
    if period is not None:
        check_positive_number("period", period)
    x = np.asarray(values, dtype=float)
    if not np.isfinite(x).all():
        text = f"smooth needs finite values; {int((~np.isfinite(x)).sum())} are missing or infinite"
        raise ValueError(f"{text}. Drop these rows, or fill them.")
    state = {} if _state is None else _state
    low, high = (0.0, period) if period else state.setdefault("bounds", (x.min(), x.max()))
    if period:
        x = x % period
    elif (x < low).any() or (x > high).any():
        first = f"{low:g} to {high:g}, those of the first table"
        raise ValueError(
            f"smooth is of values from {first}; got {x.min():g} to {x.max():g}. Give values "
            "between, or fit anew."
        )
    intervals = size if period else size - 3
    knots = low + (high - low) / intervals * np.arange(-3, intervals + 4)
    basis = BSpline.design_matrix(x.clip(knots[3], knots[-4]), knots, 3).toarray()
    basis[:, : basis.shape[1] - size] += basis[:, size:]
    steps = np.roll(np.eye(size), 1, 1) - np.eye(size)
    _, scale, axes = np.linalg.svd(steps if period else steps[:-1], full_matrices=False)
    columns = basis[:, :size] @ (axes[: size - 1].T / scale[: size - 1])
    return {f"{n + 1}": columns[:, n] for n in range(size - 1)}


def _terms() -> dict[str, Any]:
    """Functions that formulas may call besides those of formulaic, by name."""
    smooths = imported("formulaic.transforms").stateful_transform(smooth)
    return {"cyclic": cyclic, "smooth": smooths, "offset": partial(np.asarray, dtype=float)}


def _pandas(frame: Frame) -> Any:
    pandas = imported("pandas")
    if isinstance(frame, pandas.DataFrame):
        return frame
    names = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", frame.columns)
    columns = {name: to_series(frame[name]) for name in names}
    for name in names:
        if type(getattr(frame[name], "dtype", None)).__name__ == "Enum":  # its levels have an order
            columns[name] = pandas.Categorical(columns[name], list(frame[name].dtype.categories))
    return pandas.DataFrame(columns)


def _columns_of(part: str, known: dict[str, Any], frame: Any) -> dict[str, np.ndarray]:
    """Design columns of one part for a table, by the centres, knots and levels of the first one."""
    factor = imported("formulaic.parser.types").Factor.Kind.CATEGORICAL
    levels = {name: (factor, {"categories": each}) for name, each in known["levels"].items()}
    state = {"transform_state": copy.deepcopy(known["state"]), "encoder_state": levels}
    spec = imported("formulaic").ModelSpec(known["formula"], na_action="ignore", **state)
    with warnings.catch_warnings(action="error"):  # of a level that was not there
        try:
            _check_read(known["formula"], frame)
            matrix = spec.get_model_matrix(frame, context=_terms())
        except Exception as error:
            raise ValueError(f"the table does not fit the formula of {part}: {error}") from error
    here, there = map(_plain, (matrix.model_spec.transform_state, known["state"]))
    if [*matrix.columns] != known["columns"] or here != there:
        text = f"columns of {part} must be {', '.join(known['columns'])}, as in the first table"
        raise ValueError(f"{text}; got {', '.join(matrix.columns)}. Give columns of the same kind.")
    values = {name: np.asarray(matrix[name], dtype=float) for name in matrix.columns}
    lost = [name for name, column in values.items() if not np.isfinite(column).all()]
    if lost or len(matrix) != len(frame):
        text = f"covariates of {part} have missing values: {', '.join(lost) or 'rows'}"
        raise ValueError(f"{text}. Drop these rows, or fill them.")
    return values


def _plain(state: Any) -> Any:
    """A nested state with lists for its arrays, to compare it."""
    return tree_map(lambda x: x.tolist() if hasattr(x, "tolist") else x, state)


def _check_rank(part: str, columns: dict[str, np.ndarray]) -> None:
    """Raise if a column is a combination of those before it, unless of a smooth term or offset."""
    if not columns:
        raise ValueError(f"the formula of {part} has no columns: ask for an intercept by '~ 1'.")
    smooths = Columns(tuple(columns), ()).smooths
    plain = [n for n, term in zip(columns, smooths) if not (term or n.startswith("offset("))]
    columns = {name: columns[name] for name in plain}
    for name, column in columns.items():
        if not column.any():
            raise ValueError(
                f"column {name!r} of {part} is zero in all rows. Leave it out; drop a level that "
                "does not occur with frame[name].cat.remove_unused_categories()."
            )
    values = np.stack(list(columns.values()) or [np.ones(1)], -1)
    scaled = values / np.maximum(np.abs(values).max(0), 1e-300)
    for last, name in enumerate(columns, 1):
        if np.linalg.matrix_rank(scaled[:, :last], tol=1e-9 * len(scaled) ** 0.5) < last:
            text = f"columns of {part} are collinear: {name!r} is a combination of those before it"
            raise ValueError(f"{text}. Leave it out.")


def as_columns(name: str, columns: Columns | Sequence[int] | None) -> Columns:
    """Convert an argument to Columns: numbers of columns, or None for an intercept alone."""
    if columns is None:
        return Columns(("Intercept",), ())
    if isinstance(columns, Columns):
        return columns
    given: Any = columns.tolist() if hasattr(columns, "tolist") else columns
    if not isinstance(given, Iterable) or not all(isinstance(index, Integral) for index in given):
        raise TypeError(
            f"{name} must be numbers of columns of the covariates, such as [0, 2], or of a design, "
            f"formulas(frame, {name}='~ dose')[{name!r}]; got {columns!r}."
        )
    indices = tuple(int(index) for index in given)
    return Columns(tuple(f"column {index}" for index in indices), indices)
