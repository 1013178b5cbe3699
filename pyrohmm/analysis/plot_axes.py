"""Axes and names, as all pictures have them; matplotlib is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_or_new(axes: Axes | None) -> Axes:
    """The axes given, or those of a new figure."""
    if axes is not None:
        if not hasattr(axes, "stackplot"):
            raise TypeError(f"axes must be matplotlib's Axes; got {type(axes).__name__}.")
        return axes
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def names_or_numbers(names: Sequence[str] | None, size: int, default: str = "") -> list[str]:
    """Names of the K states."""
    if names is None:
        return [f"{default}{k}" for k in range(size)]
    if len(names) != size:
        raise ValueError(f"names must have K = {size} names; got {len(names)}.")
    return list(names)


def table(axes: Axes, matrix: Tensor, texts: Sequence[Sequence[str]], top: float = 1.0) -> None:
    """Draw a matrix as shades from 0 to ``top``, with a text in each cell, if there are any."""
    axes.imshow(matrix.numpy(), cmap="Blues", vmin=0.0, vmax=top)
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            color = "white" if matrix[i, j].item() > 0.5 * top else "black"
            axes.text(j, i, text, ha="center", va="center", color=color)


def from_and_to(axes: Axes, names: Sequence[str] | None, size: int) -> None:
    """Label the axes of a transition matrix."""
    if size <= 30 or names is not None:
        labels = names_or_numbers(names, size)
        axes.set_xticks(range(size), labels)
        axes.set_yticks(range(size), labels)
    axes.set_xlabel("to")
    axes.set_ylabel("from")


def legend_above(axes: Axes) -> None:
    """A legend in a row above the axes, where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=6, frameon=False)


def only_base(axes: Axes) -> None:
    """Take the frame away, but for its base."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
