"""Model checks: simulated data, pseudo-residuals, calibration of samplers, and a report."""

from __future__ import annotations

import base64
import copy
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro import poutine
from scipy.special import chdtrc
from torch import Tensor

from .._checks import all_names_checked, check_size
from .._imports import __version__, imported
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.coordinates import columns_of, names_of
from ..infer.laplace import LaplaceFit
from ..infer.models import MarginalModel, exclusive
from ..infer.objective import latent_sites
from ..infer.results import Fit, model_name
from ..infer.sampled import SampledFit
from ..nn.base import HMMModule
from . import metrics, plots
from .draws import PosteriorDraws, table_of
from .plot_axes import axes_or_new, square
from .queries import pseudo_residuals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Statistic = Callable[[Sequences], Tensor]
MOST_COMPONENTS = 8  # of vectors, whose residuals are drawn


def quantiles(data: Sequences) -> Tensor:
    """Quantiles 0.05, 0.25, 0.5, 0.75 and 0.95 of each component, ``(5,)`` or ``(5, D)``."""
    # in a fifth of the time of torch's nanquantile; NaN last
    values = torch.from_numpy(np.sort(data.known_values.cpu().numpy(), 0))
    last = (~values.isnan()).sum(0).sub(1).clamp(min=0)
    probs = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.double)
    place = probs.reshape(5, *last.dim() * [1]) * last
    low, high = (values.gather(0, end.long()).double() for end in (place.floor(), place.ceil()))
    return low.lerp(high, place.frac())


def autocorrelation(data: Sequences, lag: int = 1) -> Tensor:
    """Correlation of observations ``lag`` steps apart, a scalar, or ``(D,)`` of vectors."""
    values = data.values.double()
    if data.num_steps <= lag:
        return values.new_full(values.shape[2:], torch.nan)
    known = data.observed[:, lag:] & data.observed[:, :-lag]
    known = known.reshape(known.shape + (1,) * (values.dim() - 2))
    pairs = torch.stack([values[:, :-lag], values[:, lag:]]).where(known, torch.nan).flatten(1, 2)
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
        """Two-sided predictive p-values, by name; small where the model is wrong.

        They are conservative: parameters that were fitted to the data make its statistics nearer to
        what the model expects than those of other data, so that a true model has values below .05
        in less than 5 % of data sets, in hardly any where a statistic is all but fitted.
        NaN for a statistic that the data do not have; simulated data without it do not count.
        """
        found = {}
        for name, observed in self.observed.items():
            simulated = self.simulated[name]
            known = (~simulated.isnan()).sum(0)
            below = ((simulated <= observed).sum(0) + 1) / (known.double() + 1)
            above = ((simulated >= observed).sum(0) + 1) / (known.double() + 1)
            both = (2 * torch.minimum(below, above)).clamp(max=1.0)
            found[name] = both.masked_fill(observed.isnan(), torch.nan)
        return found

    def __str__(self) -> str:
        lines = [f"{'':<24}{'data':>12}{'simulated, 5 % to 95 %':>24}{'p':>8}"]
        tails = torch.tensor([0.05, 0.95], dtype=torch.double)
        for name, observed in self.observed.items():
            low, high = self.simulated[name].nanquantile(tails, 0)
            table = torch.stack([observed, low, high, self.p_values[name]]).reshape(4, -1)
            for label, (value, least, most, p) in zip(names_of(name, observed), table.T.tolist()):
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
    a posterior predictive check (Gelman, Meng and Stern, 1996). A small p-value counts; one that is
    not small says little, for the model was fitted to the same data (Robins, van der Vaart and
    Ventura, 2000, Asymptotic distribution of p values in composite null models).

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
    several = isinstance(fitted, PosteriorDraws)
    with torch.no_grad():
        values = hmm.sample().flatten(0, 1) if several else hmm.sample(torch.Size([num_samples]))
    further: Any = {"covariates": data.covariates, "times": data.times}
    copies = [Sequences(value, data.lengths, data.observed, **further) for value in values]
    found = {
        name: [torch.as_tensor(statistic(one)).detach().double().cpu() for one in (data, *copies)]
        for name, statistic in statistics.items()
    }
    simulated = {name: torch.stack(each[1:]) for name, each in found.items()}
    return ModelCheck({name: each[0] for name, each in found.items()}, simulated)


def residual_plots(hmm: HMM, values: Tensor, max_lag: int = 20) -> list[Axes]:
    """Draw forecast pseudo-residuals: normal quantiles, histogram and autocorrelation.

    If the model is true they are independent and standard normal. Discrete observations have
    randomised residuals. Vectors and streams have a row of pictures for each component.

    Args:
        hmm: The model: see :func:`pyrohmm.queries.pseudo_residuals`.
        values: ``(*B, T, *E)``, observations.
        max_lag: The largest lag of the autocorrelation.

    Returns:
        The three axes of each row, of at most eight components.
    """
    pyplot = imported("matplotlib.pyplot")
    limits = pseudo_residuals(hmm, values, forecast=True)
    known = (limits.upper - limits.lower) < 1
    residuals = limits.sample().masked_fill(~known, torch.nan)
    rows = residuals.reshape(-1, hmm.num_steps, hmm.event_shape[1:].numel()).cpu()
    lengths = hmm.lengths.expand(hmm.batch_shape).reshape(-1).cpu()
    whole = Sequences(rows, lengths, ~rows.isnan().all(-1))
    lags = range(1, min(max_lag, hmm.num_steps - 1) + 1)
    correlations = [autocorrelation(whole, lag) for lag in lags]
    count = min(rows.size(-1), MOST_COMPONENTS)
    size = {"figsize": (10, 3 * count), "layout": "constrained", "squeeze": False}
    axes = pyplot.subplots(count, 3, **size)[1]
    grid = torch.linspace(-4, 4, 100)
    density = (-grid.square() / 2).exp() / (2 * torch.pi) ** 0.5
    for d, (left, middle, right) in enumerate(axes):
        flat = rows[..., d][~rows[..., d].isnan()].clamp(-8, 8).sort().values
        expected = torch.special.ndtri((torch.arange(len(flat)).double() + 0.5) / len(flat))
        left.plot(expected.numpy(), flat.numpy(), ".", markersize=3)
        left.axline((0, 0), slope=1, color="gray", linewidth=1)
        label = f"residual of component {d}" if rows.size(-1) > 1 else "residual"
        left.set(xlabel="standard normal quantile", ylabel=label)
        middle.hist(flat.numpy(), bins="auto", density=True, color="lightsteelblue")
        middle.plot(grid.numpy(), density.numpy(), "k-")
        middle.set(xlabel=label, ylabel="density")
        heights = [each[d].item() for each in correlations]
        right.vlines(lags, 0.0, heights)
        right.plot(lags, heights, "o", markersize=4)
        right.axhline(0.0, color="k", linewidth=0.8)
        band = 1.96 / max(len(flat), 1) ** 0.5
        right.axhspan(-band, band, color="lightgray", zorder=0)
        right.set(xlabel="lag, steps", ylabel="autocorrelation")
        right.locator_params(axis="x", integer=True)
    return [*axes.flat]


# Simulation-based calibration ---------------------------------------------------------------------


class Calibration(NamedTuple):
    """Ranks of the truth among samples of its posterior, by the name of each variable.

    Attributes:
        ranks: ``(R,)`` integers from 0 to S of each, for R data sets.
        num_samples: S.
    """

    ranks: dict[str, Tensor]
    num_samples: int

    def p_values(self, num_bins: int = 8) -> dict[str, float]:
        """P-values of chi-square tests that ranks are uniform; small where samples are wrong.

        Args:
            num_bins: Of equal width; a divisor of S + 1, with five or more data sets a bin.

        Raises:
            ValueError: If it is no divisor.
        """
        check_size("num_bins", num_bins, 2)
        if (self.num_samples + 1) % num_bins:
            text = f"num_bins must divide S + 1 = {self.num_samples + 1}; got {num_bins}"
            raise ValueError(f"{text}. With num_samples=99 take 10.")
        found = {}
        for name, ranks in self.ranks.items():
            bins = ranks * num_bins // (self.num_samples + 1)
            counts, expected = bins.bincount(minlength=num_bins).double(), len(ranks) / num_bins
            square = ((counts - expected).square() / expected).sum()
            found[name] = float(chdtrc(num_bins - 1, square.item()))
        return found


@exclusive(gradients=False)
def calibrate(
    model: Any,
    sample: Callable[..., Mapping[str, Tensor]],
    like: Tensor | Sequences,
    num_data_sets: int = 100,
    together: int = 1,
) -> Calibration:
    """Simulation-based calibration: ranks of parameters of the prior among posterior samples.

    For each data set, parameters are sampled from the prior and data from them. If what samples
    the posterior is right, the rank of the truth among S independent samples is uniform on 0 to S.
    The statistic of a variable is a weighted sum of its entries. If all variables are sampled, "lp"
    is a further one: the log joint density, which sees the data as well (Modrák et al., 2023).
    Ranks of samples that lie too close together are piled up at both ends. Priors must be those of
    the model, not of the data. Variables that their prior fixes, such as the probability of one
    outcome, have no ranks.

    Args:
        model: A Pyro model that returns an HMM, or a module, whose :class:`MarginalModel` is meant.
        sample: Called with a copy of the model or module and data, returns S independent samples
            ``(S, ...)`` of some variables by their names: ``fit.samples()`` of a guide, or of
            chains of one sample each.
        like: ``(N,)`` integers, the steps of the simulated sequences; or sequences, whose lengths,
            missing steps, covariates and times they have.
        num_data_sets: R.
        together: D, how many data sets ``sample`` is called for at once. If not for one, its third
            argument are the observations of all, ``(D, N, T, *E)``, and it returns ``(D S, ...)``,
            first those of the first, as ``fit_gibbs(values=)`` does.

    Raises:
        ValueError: If numbers of samples or variables differ between data sets, samples are not
            finite or of another shape than their variable, or a variable is none of the model.

    References:
        Talts, Betancourt, Simpson, Vehtari and Gelman (2018), Validating Bayesian inference
        algorithms with simulation-based calibration.

    Example:
        >>> def exact(module, data):  # of one state, in closed form
        ...     counts = data.values[data.observed].bincount(minlength=2)
        ...     return {"emission.probs": Dirichlet(1.0 + counts).sample((15,))}
        >>> _ = pyro.set_rng_seed(0)
        >>> found = calibrate(TabularHMM(1, categorical(2)), exact, torch.tensor([4, 2]), 40)
        >>> found.p_values()["emission.probs"] > 0.01
        True
    """
    check_size("num_data_sets", num_data_sets)
    check_size("together", together)
    if isinstance(like, Tensor):
        like = Sequences(torch.zeros(len(like), int(like.max())), like)
    rows: dict[str, list[Tensor]] = {}
    for first in range(0, num_data_sets, together):
        own = copy.deepcopy(model)
        joint, prefix = (MarginalModel(own), "module.") if isinstance(own, HMMModule) else (own, "")
        sets = [_simulated(joint, like) for _ in range(min(together, num_data_sets - first))]
        several = () if together == 1 else (torch.stack([data.values for _, data in sets]),)
        samples = sample(own, sets[0][1], *several)
        parts = {prefix + n.removeprefix(prefix): v.chunk(len(sets)) for n, v in samples.items()}
        for number, (truth, data) in enumerate(sets):
            some = {name: part[number] for name, part in parts.items()}
            for name, row in _statistics(joint, truth, some, data).items():
                rows.setdefault(name.removeprefix(prefix), []).append(row)
    tables = {name: torch.stack(each) for name, each in rows.items()}  # (R, 1 + S)
    fixed = {n for n, x in tables.items() if len(x) > 1 and bool((x[:, 0] == x[0, 0]).all())}
    ranks = {n: (x[:, 1:] < x[:, :1]).sum(1) for n, x in tables.items() if n not in fixed}
    return Calibration(ranks, next(iter(tables.values())).size(1) - 1)


def _simulated(model: Any, like: Sequences) -> tuple[dict[str, Tensor], Sequences]:
    """Sample latent variables from the prior, by name, and data given them."""
    data = like.with_total(like.total)
    with torch.no_grad():
        trace = poutine.trace(model).get_trace(data)
        data.values = trace.nodes["_RETURN"]["value"].sample()
    return {name: trace.nodes[name]["value"] for name in latent_sites(trace)[0]}, data


def _statistics(
    model: Any, truth: dict[str, Tensor], samples: dict[str, Tensor], data: Sequences
) -> dict[str, Tensor]:
    """Test statistics ``(1 + S,)`` of the true value and of samples, by name of the variable."""
    found = {}
    for name, value in samples.items():
        if name not in truth:
            raise ValueError(f"sample must return variables, {list(truth)}; got {name!r}.")
        true, size = truth[name], truth[name].numel()
        if not bool(value.isfinite().all()):
            raise ValueError(f"samples of {name!r} must be finite; there are NaN or infinite ones.")
        shaped = value.detach().to(true.dtype).reshape(len(value), *true.shape)
        samples[name] = both = torch.cat([true.unsqueeze(0), shaped])
        weights = torch.arange(1.0, 1 + size, dtype=torch.double).cos()
        found[name] = both.double().reshape(-1, size) @ weights
    if samples.keys() == truth.keys() and len(set(map(len, found.values()))) == 1:
        scores = []
        for values in zip(*samples.values()):
            known = poutine.condition(model, dict(zip(samples, values)))
            with torch.no_grad(), pyro.validation_enabled(False):
                scores.append(poutine.trace(known).get_trace(data).log_prob_sum())
        found["lp"] = torch.stack(scores)
    return found


# A page about a fit -------------------------------------------------------------------------------

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }}
td, th {{ padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }}
img {{ max-width: 100%; }}
</style></head><body>
<h1>{title}</h1>
<p>{date}, pyrohmm {version}</p>
{body}
</body></html>
"""
SIMULATIONS = (
    "<p>Quantiles and the correlation of neighbouring steps: of the data, and the range of nine of "
    "ten simulated data sets. Where p is small, the model does not produce such data.</p>"
)
RESIDUALS = (
    "<p>Each observation given those before it, as a normal quantile. If the model is true, points "
    "lie on the line, and nineteen of twenty autocorrelations in the grey band.</p>"
)
MOST_ROWS = 200  # of the table of parameters
MOST_DRAWS = 4000  # samples of a posterior whose states are put in one order
SIMULATED = 200  # of these, from each of which a data set is simulated
MOST_STEPS = 10_000  # of the data, that are simulated and drawn


def report(fit: Fit, data: Sequences, path: str | Path) -> Path:
    """Write an HTML page about a fit: summary, parameters with intervals, checks and pictures.

    Of samples of a posterior the table has their means and quantiles, states in one order; each
    simulated data set is of another sample, and pictures are at ``fit.parameters``. What does not
    exist for a model (intervals that the data do not determine, a ``cdf`` for residuals) is named
    with the reason in its place. Of more than 10,000 steps a random part of the sequences is
    simulated and drawn, and the first steps of longer ones.

    Args:
        fit: A fit of any method.
        data: The sequences that were fitted.
        path: Of the file.

    Returns:
        The path.
    """
    some, draws = _some(data), None
    hmm = fit.hmm(some)
    sampled = isinstance(fit, SampledFit)
    source: Fit | PosteriorDraws = fit
    if sampled or fit.method == "SVI":
        draws = PosteriorDraws.of(fit, data=data)
        draws = draws.thin(-(-MOST_DRAWS // draws.shape[0]))
        source = draws.thin(-(-SIMULATED // draws.shape[0]))
    # of a sampler without the agreement of its chains
    summary = "\n".join([repr(fit), *fit.notes]) if sampled else fit.summary()
    parts = {
        "Fit": lambda: _preformatted(summary),
        "Data and criteria": lambda: _criteria(fit, data, some),
        "Parameters": lambda: _parameters(fit, some if draws else data, draws),
        "Loss": lambda: _picture(plots.losses(fit)),
        "Transitions": lambda: _transitions(hmm, some),
        "Emissions": lambda: _picture(plots.emission(hmm, values=some.values)),
        "States of the longest sequence": lambda: _states(fit, data),
        "Simulated data beside the data": lambda: (
            SIMULATIONS + _preformatted(str(check_model(source, some)))
        ),
        "Residuals": lambda: RESIDUALS + _picture(residual_plots(hmm, some.values)[0]),
    }
    body = "\n".join(f"<h2>{title}</h2>\n{_or_reason(make)}" for title, make in parts.items())
    title = escape(f"{model_name(fit.model)}, fitted by {fit.method}")
    page = PAGE.format(title=title, body=body, date=date.today().isoformat(), version=__version__)
    Path(path).write_text(page)
    return Path(path)


def _some(data: Sequences) -> Sequences:
    """A random part of the sequences, of some ``MOST_STEPS`` steps; the first ones of each."""
    if int(data.lengths.sum()) <= MOST_STEPS:
        return data
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    steps = data.lengths.clamp(max=MOST_STEPS)[order].cumsum(0)
    count = max(1, int((steps <= MOST_STEPS).sum()))
    part = data.batch(order[:count].sort().values).truncate(MOST_STEPS)
    part.numbered = True  # other steps of the same sequences
    return part


def _or_reason(make: Callable[[], str]) -> str:
    """HTML of a part of the page, or the reason of its absence."""
    try:
        return make()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"<p>Not shown: {escape(str(error))}</p>"


def _criteria(fit: Fit, data: Sequences, some: Sequences) -> str:
    """HTML table of data size, log-likelihood, and AIC and BIC where they are defined."""
    steps = int(data.lengths.sum())
    counts = {"sequences": len(data), "steps": steps}
    counts["steps without an observation"] = steps - data.num_observed
    if some is not data:
        counts["steps that are simulated and drawn below"] = int(some.lengths.sum())
    nats = {"log-likelihood, nats": metrics.log_evidence(fit, data).double().sum().item()}
    if isinstance(fit, LaplaceFit):
        nats["log marginal likelihood, nats"] = fit.log_marginal
    elif fit.method in ("EM", "MAP"):
        nats |= {"AIC": metrics.aic(fit, data), "BIC": metrics.bic(fit, data)}
    rows = [[name, f"{count:,}"] for name, count in counts.items()]
    return _table(["", ""], rows + [[name, f"{value:.2f}"] for name, value in nats.items()])


def _parameters(fit: Fit, data: Sequences, draws: PosteriorDraws | None) -> str:
    """HTML table of estimates with standard errors or intervals where there are any."""
    text = ""
    try:
        columns, text = (fit.table(data), "") if draws is None else _posterior(draws, data)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = f"<p>Without intervals: {escape(str(error))}</p>"
        columns = columns_of({name: {"estimate": v} for name, v in fit.parameters.items()})
    heads = {"std_error": "standard error", "sd": "standard deviation"}
    heads |= {"lower": "2.5%", "upper": "97.5%"}
    rows = [
        [name.removeprefix("module."), *(f"{x:.4g}".replace("nan", "fixed") for x in numbers)]
        for name, *numbers in zip(*columns.values())
        if math.isfinite(numbers[0])
    ]
    more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return text + _table([heads.get(name, name) for name in columns], rows[:MOST_ROWS]) + more


def _posterior(draws: PosteriorDraws, data: Sequences) -> tuple[dict[str, list[Any]], str]:
    """Posterior summary as table columns, and as HTML whether chains agree on aligned states."""
    try:
        draws, text = draws.aligned(data), ""
    except (ValueError, TypeError) as error:
        text = f"<p>States as each sample numbers them: {escape(str(error))}</p>"
    if draws.shape[0] > 1 and draws.shape[1] > 3:
        text += _preformatted(draws.summary())
    return table_of(draws.parameters, (0.025, 0.975)), text


def _transitions(hmm: HMM, data: Sequences) -> str:
    """Heat map of transitions, or of averages over the data where there is more than one matrix."""
    matrix, text = hmm.log_transition.exp(), ""
    if matrix.dim() != 2:
        counts = hmm.posterior(data.values).transitions.flatten(0, -3).sum(0)
        matrix = counts / counts.sum(-1, keepdim=True).clamp(min=1e-30)
        text = "<p>Expected shares in the data, for no one matrix holds at every step.</p>"
    return text + _picture(square(matrix.detach().cpu()))


def _states(fit: Fit, data: Sequences) -> str:
    """HTML picture of the smoothed state probabilities of the longest sequence."""
    longest = int(data.lengths.argmax())
    part = _some(data.batch(torch.tensor([longest])))
    probs, of = fit.hmm(part).posterior(part.values).state_probs[0], int(data.lengths.max())
    first = f", the first {len(probs):,} of {of:,} steps" if len(probs) < of else ""
    name, axes = escape(str(part.keys[0])), plots.state_probs(probs, x=part.time_index())
    return f"<p>Sequence {name}{first}.</p>" + _picture(axes)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) for tag, line in lines]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in cells) + "</table>"


def _preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _picture(axes: Any) -> str:
    """HTML image of the figure of ``axes``."""
    stream, figure = io.BytesIO(), axes.figure
    figure.get_layout_engine().execute(figure)  # else all is drawn twice
    figure.set_layout_engine("none")
    figure.savefig(stream, format="png", dpi=120)
    imported("matplotlib.pyplot").close(figure)
    image = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="" src="data:image/png;base64,{image}">'


all_names_checked(globals())
