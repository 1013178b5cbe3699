"""Plots of the emission distributions: symbols, numbers, counts, vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._imports import imported
from ..distributions.autoregressive import (
    Autoregressive,
    AutoregressiveCategorical,
    AutoregressiveNormal,
)
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from .plot_axes import (
    MOST_TICKS,
    axes_or_new,
    colors_of,
    legend_above,
    name_ticks,
    names_or_numbers,
    styles,
    table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 400  # where a density is computed
WIDTH = 4.0  # standard deviations of a state to both sides, over which it is drawn
SMALL = 1e-4  # probability of a count that is not drawn


def emission(
    hmm: HMM,
    *,
    symbols: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    values: Tensor | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the emission distribution of each state.

    - Symbols: a row of bars for each state.
    - Numbers: the density of each state; counts: their probabilities. With ``values`` weighted by
      the smoothed shares of the states, over the histogram. Several streams: a panel for each.
    - Vectors of two numbers: means, with ellipses of one and of two standard deviations.
    - Vectors of more numbers: means of the components, with bands of one standard deviation.
    - Vectors of counts or of zeros and ones: a table of the mean of each component.
    - Symbols that depend on those before: a table with a row for each state and context.
    - Vectors that depend linearly on those before: as vectors or numbers, where those before are at
      the origin of the regression: intercepts, and the noise about them.

    Args:
        hmm: An HMM whose parameters have no batch dimensions.
        symbols: Names of the V symbols, or of the D components of a vector; numbers by default.
        names: Of the K states; numbers by default.
        values: ``(*B, T, [D])``, the data.
        axes: Where to draw; new ones by default. Several streams are drawn there as a vector.

    Raises:
        ValueError: If the emission has batch dimensions, observations of two dimensions, or (of
            vectors) no mean and variance; depends on earlier observations in another way; or there
            are not V symbols or K names.

    Example:
        >>> axes = emission(TabularHMM(2, poisson())(torch.tensor([5])), names=["low", "high"])
        >>> axes.get_xlabel()
        'count'
    """
    distribution: Any = hmm.emission
    shape = tuple(distribution.batch_shape)
    if shape != (hmm.num_states,) or len(distribution.event_shape) > 1:
        came = f"batch shape {shape} and event shape {tuple(distribution.event_shape)}"
        raise ValueError(
            "hmm must have an emission of batch shape (K,) for symbols, numbers or vectors; got "
            f"{came}. Build it from one sample, for instance with fit.hmm(data)."
        )
    labels = names_or_numbers(names, hmm.num_states, "state ")
    with torch.no_grad():
        parts = getattr(distribution, "parts", ())
        shares = seen = None
        if values is not None and (len(distribution.event_shape) == 0 or parts):
            shares = hmm.posterior(values).state_probs[hmm.known].mean(0).cpu()
            seen = values[hmm.known].cpu()
        if not parts or axes is not None:
            return _single(distribution, symbols, labels, axes_or_new(axes), shares, seen)
        size = {"figsize": (5 * len(parts), 4), "layout": "constrained", "squeeze": False}
        titles = names_or_numbers(symbols, len(parts), "stream ", "symbols must have D")
        panels = imported("matplotlib.pyplot").subplots(1, len(parts), **size)[1][0]
        pieces = [None] * len(parts) if seen is None else distribution.split(seen)
        for part, title, panel, piece in zip(parts, titles, panels, pieces):
            _single(part, None, labels, panel, shares, piece)
            panel.set_title(title, pad=24)  # above the legend
        first: Axes = panels[0]
        return first


def _single(
    distribution: Any, symbols: Any, labels: list[str], axes: Axes, shares: Any, values: Any
) -> Axes:
    """Draw a distribution of symbols, numbers or vectors; an autoregressive normal after zeros."""
    if isinstance(distribution, AutoregressiveCategorical):
        return _contexts(distribution, symbols, labels, axes)
    if isinstance(distribution, AutoregressiveNormal):
        axes.set_title("earlier observations at the origin", fontsize="medium")
        distribution = distribution.base.expand(distribution.batch_shape)
    elif isinstance(distribution, Autoregressive):
        cure = "plots.emission(hmm.replace(emission=hmm.emission.given(context)))"
        raise ValueError(f"hmm has emissions that depend on earlier observations: draw {cure}.")
    if is_categorical(distribution):
        probs = distribution.probs.cpu()
        names = names_or_numbers(symbols, probs.size(-1), "", "symbols must have V")
        return _bars(probs, names, labels, axes)
    if distribution.event_shape.numel() == 1:
        _curves(distribution, labels, axes, shares, values)
        return axes
    mean, deviation = _moments(distribution)
    columns = names_or_numbers(symbols, mean.size(-1), "", "symbols must have D")
    if distribution.support.is_discrete:
        texts = [[f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in row] for row in mean]
        table(axes, mean, texts, max(mean.max().item(), 1e-30))
        name_ticks(axes.xaxis, columns)
        name_ticks(axes.yaxis, labels)
        axes.set_xlabel("mean of each component")
    elif mean.size(1) == 2:
        columns = columns if symbols is not None else [f"component {name}" for name in columns]
        axes.set(xlabel=columns[0], ylabel=columns[1])
        _ellipses(distribution, mean, labels, axes)
    else:
        _bands(mean, deviation, columns, labels, axes)
    return axes


def _contexts(distribution: Any, symbols: Any, labels: list[str], axes: Axes) -> Axes:
    """Heat map of symbol probabilities by state and context."""
    probs = distribution.tables.probs.cpu()  # (K, V ** L, V)
    names = names_or_numbers(symbols, probs.size(-1), "", "symbols must have V")
    size = probs.size(1)
    rows = probs.flatten(0, 1)
    table(axes, rows, [[f"{p:.2f}" for p in row] for row in rows])
    for edge in range(size, len(rows), size):
        axes.axhline(edge - 0.5, color="0.3", linewidth=0.8)
    name_ticks(axes.xaxis, names)
    axes.set(xlabel="symbol", ylabel="state and symbols before")
    if len(rows) <= MOST_TICKS:
        contexts = [" ".join(context) for context in product(names, repeat=distribution.lags)]
        name_ticks(axes.yaxis, [f"{k}: {c}" for k, c in product(labels, contexts)])
    else:
        name_ticks(axes.yaxis, labels, [size * k + (size - 1) / 2 for k in range(len(labels))])
    return axes


def _moments(distribution: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each state, ``(K, *E)``; raise where there is none."""
    mean, deviation = distribution.mean.cpu(), distribution.variance.sqrt().cpu()
    if not bool((mean.isfinite() & deviation.isfinite()).all()):
        text = "hmm must have an emission with mean and variance in each state"
        raise ValueError(f"{text}; {type(distribution).__name__} has none.")
    return mean, deviation


def _bars(probs: Tensor, symbols: list[str], labels: list[str], axes: Axes) -> Axes:
    size, top = len(probs), probs.max().item()
    for base, row, color in zip(reversed(range(size)), probs.numpy(), colors_of(size)):
        axes.bar(range(len(row)), 0.85 * row / top, bottom=base, width=0.8, color=color)
        axes.axhline(base, color="0.7", linewidth=0.6)
    name_ticks(axes.xaxis, symbols)
    name_ticks(axes.yaxis, labels, [size - 0.6 - k for k in range(size)])
    axes.tick_params(axis="y", length=0)
    axes.set(ylim=(0, size), xlabel=f"symbol (the highest bar is a probability of {top:.2f})")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes


def _ends(distribution: Any) -> tuple[float, float]:
    """Plot range of the observations: means and four deviations, or sample quantiles."""
    try:
        width = WIDTH * distribution.variance.sqrt()
        low, high = (distribution.mean - width).min(), (distribution.mean + width).max()
    except NotImplementedError:
        low = high = torch.tensor(torch.nan)
    if not bool(low.isfinite() & high.isfinite()):
        with torch.random.fork_rng(devices=[]):
            samples = distribution.sample((1000,)).double().flatten(1)
        low, high = samples.quantile(0.005, 0).min(), samples.quantile(0.995, 0).max()
    return low.item(), high.item()


def _curves(distribution: Any, labels: list[str], axes: Axes, shares: Any, values: Any) -> None:
    """Densities of numbers, or probabilities of counts, where they can be observed."""
    discrete = distribution.support.is_discrete
    if values is None:
        low, high = _ends(distribution)
    else:
        values = values[~values.isnan()].double()
        low, high = values.min().item(), values.max().item()
        bins = torch.arange(low - 0.5, high + 1).tolist() if discrete else 40
        axes.hist(values.numpy(), bins=bins, density=True, color="0.85")
    if discrete:
        points = torch.arange(math.floor(low), math.ceil(high) + 1.0)
    else:
        points = torch.linspace(low, high, POINTS + 2)
    points = points.to(distribution.sample().device)
    events = [1] * len(distribution.event_shape)  # none, or one of size 1
    points = points[distribution.support.check(points.reshape(-1, *events))]
    below = getattr(distribution, "cdf_below", None)
    if below is not None and not discrete:
        single = distribution.cdf(points.unsqueeze(-1)) > below(points.unsqueeze(-1))
        points = points[~single.any(-1)]
    probs = distribution.log_prob(points.reshape(-1, 1, *events)).exp().cpu()
    if shares is not None:
        probs = probs * shares.to(probs)
    places = points.cpu().numpy()
    for k, style in enumerate(styles(labels)):
        if discrete:
            drawn = (probs[:, k] > SMALL).numpy()
            axes.plot(places[drawn], probs[drawn, k], "o-", ms=4, **style)
        else:
            axes.plot(places, probs[:, k], **style)
            axes.fill_between(places, probs[:, k], color=style["color"], alpha=0.15)
    if shares is not None:
        axes.plot(places, probs.sum(-1), "k--", linewidth=1.0, label="all")
    names = ("count", "probability") if discrete else ("observation", "density")
    axes.set(xlabel=names[0], ylabel=names[1], ylim=(0, None))
    axes.locator_params(axis="x", integer=discrete)
    legend_above(axes, labels)


def _ellipses(distribution: Any, mean: Tensor, labels: list[str], axes: Axes) -> None:
    from matplotlib.patches import Ellipse

    for style, centre, matrix in zip(styles(labels), mean.tolist(), _covariance(distribution)):
        values, vectors = torch.linalg.eigh(matrix.cpu())
        angle = math.degrees(math.atan2(vectors[1, 1].item(), vectors[0, 1].item()))
        axes.plot(*centre, "o", **style)
        for scale in (1, 2):
            short, long = (2 * scale * values.clamp(min=0).sqrt()).tolist()
            shade = {"angle": angle, "color": style["color"], "alpha": 0.3 / scale}
            axes.add_patch(Ellipse(centre, long, short, **shade))
    axes.autoscale_view()
    legend_above(axes, labels)


def _covariance(distribution: Any) -> Tensor:
    """Covariances of the components, ``(K, D, D)``."""
    base = getattr(distribution, "base_dist", distribution)
    if hasattr(distribution, "mixture_distribution"):
        weights = distribution.mixture_distribution.probs.unsqueeze(-1)  # (K, C, 1)
        parts = distribution.component_distribution
        apart = parts.mean - distribution.mean.unsqueeze(-2)
        within = (weights.unsqueeze(-1) * _covariance(parts)).sum(-3)
        return within + (weights * apart).mT @ apart
    if hasattr(base, "covariance_matrix"):
        return base.covariance_matrix
    return distribution.variance.diag_embed()


def _bands(mean: Tensor, deviation: Tensor, columns: Any, labels: list[str], axes: Axes) -> None:
    steps = range(mean.size(1))
    for style, middle, spread in zip(styles(labels), mean.numpy(), deviation.numpy()):
        axes.plot(steps, middle, "o-", ms=4, **style)
        shade = {"color": style["color"], "alpha": 0.15, "linewidth": 0.0}
        axes.fill_between(steps, middle - spread, middle + spread, **shade)
    name_ticks(axes.xaxis, columns)
    axes.set(xlabel="component", ylabel="mean and one standard deviation")
    legend_above(axes, labels)
