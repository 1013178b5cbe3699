"""A page about a fit that a colleague can read: tables, pictures and notes in one HTML file."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.sequences import Sequences
from ..infer.results import Fit
from . import metrics, plots
from .model_check import check_model, residual_plots

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
MOST_ROWS = 200  # of the table of parameters


def report(fit: Fit, data: Sequences, path: str | Path) -> Path:
    """Write an HTML page about a fit: summary, parameters with intervals, checks and pictures.

    What does not exist for a model (intervals that the data do not determine, residuals of vectors,
    one transition matrix) is named with the reason in its place.

    Args:
        fit: A fit by EM or MAP.
        data: The sequences that were fitted.
        path: Of the file.

    Returns:
        The path.
    """
    hmm = fit.hmm(data)
    first = fit.hmm(data[:1]) if not fit.plates else hmm
    parts = [
        ("Fit", lambda: f"<pre>{escape(fit.summary())}</pre>"),
        ("Criteria", lambda: _criteria(fit, data)),
        ("Parameters, with 95 % intervals", lambda: _parameters(fit, data)),
        ("Loss", lambda: _picture(plots.losses(fit))),
        ("Transitions", lambda: _picture(plots.transition(hmm))),
        ("Emissions", lambda: _picture(plots.emission(hmm))),
        (
            "States of the first sequence",
            lambda: _picture(plots.states(first.posterior(data.values[:1]).states[0])),
        ),
        (
            "Simulated data beside the data",
            lambda: f"<pre>{escape(str(check_model(fit, data)))}</pre>",
        ),
        ("Residuals", lambda: _picture(residual_plots(hmm, data.values)[0])),
    ]
    body = "\n".join(f"<h2>{escape(title)}</h2>\n{_or_reason(make)}" for title, make in parts)
    path = Path(path)
    path.write_text(PAGE.format(title=escape(repr(fit).partition(";")[0] + ")"), body=body))
    return path


def _or_reason(make: Callable[[], str]) -> str:
    """A part of the page, or why there is none."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        return f"<p>Not shown: {escape(str(error))}</p>"


def _criteria(fit: Fit, data: Sequences) -> str:
    evidence = metrics.log_evidence(fit, data).double().sum().item()
    rows = [
        ["log evidence, nats", f"{evidence:.2f}"],
        ["AIC", f"{metrics.aic(fit, data):.2f}"],
        ["BIC", f"{metrics.bic(fit, data):.2f}"],
    ]
    return _table(["", ""], rows)


def _parameters(fit: Fit, data: Sequences) -> str:
    information = fit.information(data)
    limits, errors = information.intervals(), information.std_errors()
    rows = []
    for part in information.coordinates:
        columns = (part.estimate, errors[part.name], *limits[part.name])
        for place in part.estimate.isfinite().nonzero().tolist():
            numbers = [f"{_entry(column, place):.4g}" for column in columns]
            rows.append([f"{part.name}{place or ''}", *numbers])
    more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    header = ["parameter", "estimate", "standard error", "2.5 %", "97.5 %"]
    return _table(header, rows[:MOST_ROWS]) + more


def _entry(tensor: Tensor, place: list[int]) -> float:
    return tensor[tuple(place)].item()


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>"]
    lines += [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return "<table>" + "\n".join(lines) + "</table>"


def _picture(axes: Any) -> str:
    """The figure of ``axes`` as an image within the page."""
    from matplotlib import pyplot

    stream = io.BytesIO()
    axes.figure.savefig(stream, format="png", dpi=120)
    pyplot.close(axes.figure)
    return (
        f'<img alt="" src="data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}">'
    )
