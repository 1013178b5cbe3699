"""Axes, names, colours and tables of pictures; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _renamed as renamed
from ..infer.effects import Bands
from ..infer.results import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMES = 10  # states or curves, above which a legend hides more than it says
MOST_TICKS = 30  # names along an axis that can be read


def axes_or_new(axes: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if axes is not None:
        return axes
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def names_or_numbers(
    names: Sequence[str] | None, size: int, default: str = "", wanted: str = "names must have K"
) -> list[str]:
    """Names of the K states."""
    if names is None:
        return [f"{default}{k}" for k in range(size)]
    if len(names) != size:
        raise ValueError(f"{wanted} = {size} names; got {len(names)}.")
    return list(names)


def colors_of(size: int) -> list[Any]:
    """A colour for each of K states, no two alike: matplotlib's ten, twenty, or a rainbow."""
    if size <= 10:
        return [f"C{k}" for k in range(size)]
    import matplotlib

    colors = matplotlib.colormaps["tab20" if size <= 20 else "turbo"].resampled(max(size, 20))
    return [colors(k) for k in range(size)]


def table(axes: Axes, matrix: Tensor, texts: Sequence[Sequence[str]], top: float = 1.0) -> None:
    """Draw a matrix as shades from 0 to ``top``, with a text in each cell, if there are any."""
    axes.imshow(matrix.numpy(), cmap="Blues", vmin=0.0, vmax=top)
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            color = "white" if matrix[i, j].item() > 0.5 * top else "black"
            axes.text(j, i, text, ha="center", va="center", color=color)


def single(name: str, parameter: Tensor) -> Tensor:
    """A parameter ``(K, *)`` of an HMM on the CPU; raise if it has batch dimensions."""
    if parameter.dim() != 2:
        raise ValueError(
            f"hmm must have one set of parameters; its {name} have shape {tuple(parameter.shape)}. "
            "Build it from one sample, for instance with fit.hmm(data)."
        )
    return parameter.detach().cpu()


def square(
    axes: Axes | None,
    matrix: Tensor,
    texts: Sequence[Sequence[str]],
    names: Sequence[str] | None,
    most: int,
) -> Axes:
    """Draw a transition matrix as shades, with texts if there are at most ``most`` states."""
    size = len(matrix)
    labels = names_or_numbers(names, size)
    axes = axes_or_new(axes)
    table(axes, matrix, texts if size <= most else [])
    if size <= MOST_TICKS or names is not None:
        axes.set_xticks(range(size), labels, rotation="vertical" if size > MOST_TICKS else None)
        axes.set_yticks(range(size), labels)
    axes.set(xlabel="to", ylabel="from")
    return axes


def legend_above(axes: Axes, inside: bool = False) -> None:
    """A legend in a row above the axes, or inside; none of more than ten entries."""
    count = len(axes.get_legend_handles_labels()[0])
    if count <= MOST_NAMES and inside:
        axes.legend()
    elif count <= MOST_NAMES:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=6, frameon=False)


@renamed.by_name
def history(fit: Fit, *, axes: Axes | None = None) -> Axes:
    """Draw the parts of the loss at each step: ``Fit.history``, in nats."""
    axes = axes_or_new(axes)
    for name, values in fit.history.items():
        axes.plot(values.cpu().numpy(), label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="nats")
    axes.legend()
    return axes


def bands(
    x: Any,
    predicted: Bands,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw predictions over a covariate as curves with bands: those of ``fit.predict``.

    Args:
        x: M numbers, the values of the covariate.
        predicted: ``(M, K)``, or ``(M, K, K)``, of which the transitions to other states are drawn.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.
    """
    states = names_or_numbers(names, predicted.value.size(-1))
    labels, parts = states, predicted
    if predicted.value.dim() > 2:
        others = ~torch.eye(len(states), dtype=torch.bool)
        labels = [f"{states[i]} → {states[j]}" for i, j in others.nonzero().tolist()]
        parts = Bands(*(part[:, others] for part in predicted))
    axes = axes_or_new(axes)
    curves = zip(labels, colors_of(len(labels)), *(part.mT.tolist() for part in parts))
    for label, color, value, low, high in curves:
        axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0.0)
        axes.plot(x, value, color=color, label=label)
    legend_above(axes)
    return axes
