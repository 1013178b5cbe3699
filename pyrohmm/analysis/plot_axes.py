"""Axes, tick labels, colours, legends and heat maps of plots; matplotlib is imported lazily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from .._arrays import to_numpy, to_series
from .._imports import imported
from ..infer.bands import Bands

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMES = 10  # states or curves, above which a legend hides more than it says
MOST_TICKS = 30  # names along an axis that can be read
LEAST_FONT = 6.0  # points


def axes_or_new(axes: Axes | None) -> Axes:
    """Return the axes given, or those of a new figure."""
    if axes is not None:
        return axes
    return imported("matplotlib.pyplot").subplots(layout="constrained")[1]


def places_of(x: Any, count: int, axes: Axes) -> Any:
    """Places of ``count`` steps on the horizontal axis: numbers or dates ``x``, else numbers.

    Dates with a time zone are drawn as local times; a column of a table names the axis.
    """
    axes.set_xlabel("step" if x is None else getattr(x, "name", None) or "time")
    if x is None:
        return np.arange(count)
    if isinstance(x, list) or hasattr(getattr(x, "dtype", None), "time_zone"):  # of polars
        x = to_series(x)
    clock = getattr(x, "dt", x)  # of a pandas.Series
    if getattr(clock, "tz", None) is not None:
        x = clock.tz_localize(None)
    places = to_numpy(getattr(clock, "start_time", x))  # of periods
    if places.shape != (count,):
        text = f"x must have a time for each of the {count} steps, (T,); got shape"
        raise ValueError(f"{text} {places.shape}. Give data[n : n + 1].time_index().")
    if places.dtype.kind == "M":  # dates, written once beside the axis and shortly along it
        dates = imported("matplotlib.dates")
        ticks = dates.AutoDateLocator(maxticks=8)
        axes.xaxis.set(major_locator=ticks, major_formatter=dates.ConciseDateFormatter(ticks))
    return places


def names_or_numbers(
    names: Sequence[str] | None, size: int, default: str = "", wanted: str = "names must have K"
) -> list[str]:
    """Names of the K states, by default their numbers."""
    if names is None:
        return [f"{default}{k}" for k in range(size)]
    if len(names) != size:
        raise ValueError(f"{wanted} = {size} names; got {len(names)}.")
    return [*map(str, names)]


def colors_of(size: int) -> list[Any]:
    """Distinct colours for K states: matplotlib's ten, or a rainbow."""
    if size <= MOST_NAMES:
        return [f"C{k}" for k in range(size)]
    colors = imported("matplotlib").colormaps["turbo"].resampled(size)
    return [colors(k) for k in range(size)]


def styles(labels: Sequence[str]) -> list[dict[str, Any]]:
    """Label and colour of each state, as keyword arguments of matplotlib."""
    return [{"label": name, "color": c} for name, c in zip(labels, colors_of(len(labels)))]


def table(axes: Axes, matrix: Tensor, texts: Sequence[Sequence[str]], top: float = 1.0) -> None:
    """Annotated heat map with colour limits 0 and ``top``; without texts where they do not fit."""
    axes.imshow(matrix.numpy(), cmap="Blues", vmin=0.0, vmax=top, aspect=axes.get_aspect())
    blocks = [text.split("\n") for row in texts for text in row]
    longest = max(len(line) for block in blocks for line in block)
    width, height = _room(axes)
    size = min(10.0, width / (0.6 * longest * matrix.size(1)),
               height / (1.4 * len(blocks[0]) * len(matrix)))  # fmt: skip
    if size < LEAST_FONT:
        return
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            color = "white" if matrix[i, j].item() > 0.5 * top else "black"
            axes.text(j, i, text, ha="center", va="center", color=color, fontsize=size)


def _room(axes: Axes) -> tuple[float, float]:
    """Approximate width and height of the axes in points; a character is 6 points wide."""
    points = 72 / axes.figure.dpi
    width, height = axes.bbox.width * points, axes.bbox.height * points
    return (width, height) if axes.get_aspect() == "auto" else (min(width, height),) * 2


def name_ticks(axis: Any, labels: Sequence[str], places: Sequence[float] | None = None) -> None:
    """Tick labels of an axis, evenly thinned where there are many."""
    every = -(-len(labels) // MOST_TICKS)
    places = range(len(labels)) if places is None else places
    axis.set_ticks(list(places)[::every], list(labels)[::every])
    if axis.axis_name == "x" and 6 * len(" ".join(labels[::every])) > _room(axis.axes)[0]:
        axis.set_tick_params(rotation=90)


def single(name: str, parameter: Tensor) -> Tensor:
    """Copy a matrix ``(K, *)`` of an HMM to the CPU; raise if it has batch dimensions."""
    if parameter.dim() != 2:
        text = f"hmm must have one set of parameters; its {name} have shape"
        raise ValueError(f"{text} {tuple(parameter.shape)}. Give one sample, as fit.hmm(data).")
    return parameter.detach().cpu()


def square(
    matrix: Tensor, names: Sequence[str] | None = None, axes: Axes | None = None, texts: Any = None
) -> Axes:
    """Heat map of a transition matrix, with a text in each cell where it fits."""
    labels = names_or_numbers(names, len(matrix))
    axes = axes_or_new(axes)
    axes.set_aspect("equal")
    table(axes, matrix, texts or [[f"{p:.2f}" for p in row] for row in matrix])
    name_ticks(axes.xaxis, labels)
    name_ticks(axes.yaxis, labels)
    axes.set(xlabel="to", ylabel="from")
    return axes


def legend_above(axes: Axes, labels: Sequence[str] = ()) -> None:
    """Draw a legend in rows above the axes; for more than ten states a colour bar beside them.

    Args:
        axes: With what is drawn.
        labels: Names of the K states that have :func:`colors_of` K.
    """
    if len(labels) > MOST_NAMES:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import BoundaryNorm, ListedColormap

        size = len(labels)
        edges = [k - 0.5 for k in range(size + 1)]
        scale = ScalarMappable(BoundaryNorm(edges, size), ListedColormap(colors_of(size)))
        bar = axes.figure.colorbar(scale, ax=axes, pad=0.02, aspect=40)
        name_ticks(bar.ax.yaxis, labels)
        bar.ax.minorticks_off()
        bar.ax.invert_yaxis()
        return
    texts = axes.get_legend_handles_labels()[1]
    # a letter is 1/12 inch wide, a line and a gap 0.4
    rows = 1 + int(sum(len(text) / 12 + 0.4 for text in texts) * axes.figure.dpi / axes.bbox.width)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=-(-len(texts) // rows) or 1,
                frameon=False, handlelength=1.0, columnspacing=1.0)  # fmt: skip


def bands(
    x: Any, predicted: Bands, names: Sequence[str] | None = None, axes: Axes | None = None
) -> Axes:
    """Draw predictions over a covariate as curves with bands: those of ``fit.bands``.

    Args:
        x: M numbers, the values of the covariate.
        predicted: ``(M, K)``, or ``(M, K, K)``, of which the transitions to other states are drawn,
            at most ten, those that change most.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.
    """
    states = names_or_numbers(names, predicted.value.size(-1))
    labels, parts = states, predicted
    if predicted.value.dim() > 2:
        change = (predicted.value.amax(0) - predicted.value.amin(0)).fill_diagonal_(-1.0)
        most = min(MOST_NAMES, change.numel() - len(change))
        order = change.flatten().argsort(descending=True, stable=True)[:most].sort().values
        labels = [f"{states[i // len(states)]} → {states[i % len(states)]}" for i in order.tolist()]
        parts = Bands(*(part.flatten(1)[:, order] for part in predicted))
    axes = axes_or_new(axes)
    for style, value, low, high in zip(styles(labels), *(part.mT.tolist() for part in parts)):
        axes.fill_between(x, low, high, color=style["color"], alpha=0.25, linewidth=0.0)
        axes.plot(x, value, **style)
    legend_above(axes, labels)
    return axes
