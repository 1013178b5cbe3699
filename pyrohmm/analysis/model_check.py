"""Model checks: data simulated from a fit, pseudo-residuals, and a report."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_size
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.results import Fit
from . import metrics, plots
from .draws import PosteriorDraws
from .plot_axes import axes_or_new
from .queries import pseudo_residuals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Statistic = Callable[[Sequences], Tensor]


def quantiles(data: Sequences) -> Tensor:
    """Quantiles 0.05, 0.25, 0.5, 0.75 and 0.95 of each component, ``(5,)`` or ``(5, D)``."""
    probs = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.double)
    return data.values[data.observed].double().nanquantile(probs, 0)


def autocorrelation(data: Sequences, lag: int = 1) -> Tensor:
    """Correlation of observations ``lag`` steps apart, a scalar, or ``(D,)`` of vectors."""
    values = data.values.double()
    if data.num_steps <= lag:
        return torch.full(values.shape[2:], torch.nan, dtype=torch.double)
    known = data.observed[:, lag:] & data.observed[:, :-lag]
    pairs = torch.stack([values[:, :-lag][known], values[:, lag:][known]])
    pairs = pairs - pairs.nanmean(1, keepdim=True)
    product = (pairs[0] * pairs[1]).nanmean(0)
    return product / pairs.square().nanmean(1).prod(0).sqrt()


DEFAULT: dict[str, Statistic] = {"quantiles": quantiles, "autocorrelation": autocorrelation}


@dataclass(frozen=True)
class ModelCheck:
    """Statistics of the data, and of data simulated from a fitted model.

    Attributes:
        observed: Each statistic of the data, by name.
        simulated: Of the S simulated data sets, ``(S, ...)``, by name.
    """

    observed: dict[str, Tensor]
    simulated: dict[str, Tensor]

    @property
    def p_values(self) -> dict[str, Tensor]:
        """Two-sided posterior predictive p-values, by name; small where the model is wrong.

        NaN for a statistic that the data do not have; simulated data without it do not count.
        """
        found = {}
        for name, observed in self.observed.items():
            simulated = self.simulated[name]
            known = (~simulated.isnan()).sum(0)
            below = (simulated <= observed).sum(0) / known.double()
            above = (simulated >= observed).sum(0) / known.double()
            found[name] = (2 * torch.minimum(below, above)).clamp(max=1.0)
            found[name] = found[name].masked_fill(observed.isnan(), torch.nan)
        return found

    def __str__(self) -> str:
        lines = [f"{'statistic':<24}{'data':>12}{'5 %':>12}{'95 %':>12}{'p':>8}"]
        tails = torch.tensor([0.05, 0.95], dtype=torch.double)
        for name, observed in self.observed.items():
            low, high = self.simulated[name].nanquantile(tails, 0)
            columns = (observed, low, high, self.p_values[name])
            rows = zip(*(column.flatten().tolist() for column in columns))
            for number, (value, least, most, p) in enumerate(rows):
                label = f"{name}[{number}]" if observed.dim() else name
                lines.append(f"{label:<24}{value:>12.4g}{least:>12.4g}{most:>12.4g}{p:>8.3f}")
        return "\n".join(lines)

    def plot(self, name: str, axes: Axes | None = None) -> Axes:
        """Draw the histogram of a simulated statistic, and a line where that of the data is.

        Args:
            name: Of a statistic that is a single number.
            axes: Where to draw; new ones by default.
        """
        axes = axes_or_new(axes)
        axes.hist(self.simulated[name].numpy(), bins=30, color="lightsteelblue")
        axes.axvline(self.observed[name].item(), color="black", label="data")
        axes.set_xlabel(name)
        axes.legend(frameon=False)
        return axes


def check_model(
    fitted: Fit | PosteriorDraws,
    data: Sequences,
    statistics: Mapping[str, Statistic] | None = None,
    num_samples: int = 200,
) -> ModelCheck:
    """Compare statistics of the data with those of data simulated from the fitted model.

    Simulated data have the lengths and the missing steps of the data. With samples of a posterior
    each data set is simulated from another sample, so that uncertainty of the parameters counts:
    a posterior predictive check (Gelman, Meng and Stern, 1996).

    Args:
        fitted: A fit, or samples of a posterior.
        data: The sequences that were fitted.
        statistics: By name, functions of a :class:`Sequences` that return a tensor; quantiles and
            the autocorrelation of neighbours by default.
        num_samples: S, the number of simulated data sets of a fit.

    Raises:
        TypeError: If a statistic does not return a tensor.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([torch.randn(200).cumsum(0)])
        >>> fit = fit_em(TabularHMM(2, normal(0)), data)
        >>> check = check_model(fit, data, {"lag 1": autocorrelation})
        >>> bool(check.p_values["lag 1"] < 0.05)  # two states are not a random walk
        True
    """
    check_size("num_samples", num_samples)
    statistics = DEFAULT if statistics is None else statistics
    hmm = fitted.hmm(data)
    with torch.no_grad():
        if isinstance(fitted, PosteriorDraws):
            values = hmm.sample().flatten(0, 1)
        else:
            values = hmm.sample(torch.Size([num_samples]))
    copies = [
        Sequences(value, data.lengths, data.observed, covariates=data.covariates, times=data.times)
        for value in values
    ]
    observed, simulated = {}, {}
    for name, statistic in statistics.items():
        observed[name] = _applied(statistic, data)
        simulated[name] = torch.stack([_applied(statistic, copy) for copy in copies])
    return ModelCheck(observed, simulated)


def _applied(statistic: Statistic, data: Sequences) -> Tensor:
    return torch.as_tensor(statistic(data)).detach().double()


def residual_plots(hmm: HMM, values: Tensor, max_lag: int = 20) -> list[Axes]:
    """Draw forecast pseudo-residuals: normal quantiles, histogram and autocorrelation.

    If the model is true they are independent and standard normal. Discrete observations have
    randomised residuals.

    Args:
        hmm: The model, of scalar observations: see :func:`pyrohmm.queries.pseudo_residuals`.
        values: ``(*B, T)``, observations.
        max_lag: The largest lag of the autocorrelation.

    Returns:
        The three axes.
    """
    from matplotlib import pyplot

    limits = pseudo_residuals(hmm, values, forecast=True)
    known = (limits.upper - limits.lower) < 1
    residuals = limits.sample().masked_fill(~known, torch.nan)
    flat = residuals[known].clamp(-8, 8).sort().values
    expected = torch.special.ndtri((torch.arange(len(flat)).double() + 0.5) / len(flat))
    _, (left, middle, right) = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    left.plot(expected.numpy(), flat.numpy(), ".", markersize=3)
    left.axline((0, 0), slope=1, color="gray", linewidth=1)
    left.set(xlabel="normal quantile", ylabel="residual")
    middle.hist(flat.numpy(), bins=40, density=True, color="lightsteelblue")
    grid = torch.linspace(-4, 4, 100)
    middle.plot(grid.numpy(), (-grid.square() / 2).exp().numpy() / (2 * torch.pi) ** 0.5, "k-")
    middle.set(xlabel="residual", ylabel="density")
    rows = residuals.reshape(-1, residuals.size(-1))
    whole = Sequences(rows.nan_to_num(), hmm.lengths.expand(hmm.batch_shape).reshape(-1),
                      ~rows.isnan())  # fmt: skip
    lags = range(1, min(max_lag, hmm.num_steps - 1) + 1)
    right.stem(list(lags), [autocorrelation(whole, lag).item() for lag in lags], basefmt="k-")
    band = 1.96 / max(len(flat), 1) ** 0.5
    right.axhspan(-band, band, color="lightgray", zorder=0)
    right.set(xlabel="lag", ylabel="autocorrelation")
    return [left, middle, right]


# A page about a fit -------------------------------------------------------------------------------

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
        ("Emissions", lambda: _picture(plots.emission(hmm, values=data.values))),
        (
            "States of the first sequence",
            lambda: _picture(plots.state_probs(first.posterior(data.values[:1]).state_probs[0])),
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
    except (ValueError, TypeError, NotImplementedError) as error:
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
            numbers = [f"{column[tuple(place)].item():.4g}" for column in columns]
            numbers = [number.replace("nan", "held") for number in numbers]
            rows.append([f"{part.name}{place or ''}", *numbers])
    more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    header = ["parameter", "estimate", "standard error", "2.5 %", "97.5 %"]
    return _table(header, rows[:MOST_ROWS]) + more


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
