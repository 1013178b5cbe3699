"""Pictures of HMMs and fits; the only module that imports matplotlib, when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .._arguments import checked
from .._checks import check_probs
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM
from ..infer.results import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _axes(axes: Axes | None) -> Axes:
    if axes is not None:
        if not hasattr(axes, "stackplot"):
            raise TypeError(f"axes must be matplotlib's Axes; got {type(axes).__name__}.")
        return axes
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def _names(names: Sequence[str] | None, size: int, default: str = "") -> list[str]:
    """Names of the K states."""
    if names is None:
        return [f"{default}{k}" for k in range(size)]
    if len(names) != size:
        raise ValueError(f"names must have K = {size} names; got {len(names)}.")
    return list(names)


@checked()
def transition(hmm: HMM, names: Sequence[str] | None = None, axes: Axes | None = None) -> Axes:
    """Draw the transition matrix as a table of shades; row = from, column = to.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If the matrix has more than two dimensions, or there are not K names.
    """
    matrix = hmm.log_transition.detach().exp().cpu()
    if matrix.dim() != 2:
        raise ValueError(
            f"hmm must have one transition matrix (K, K); got shape {tuple(matrix.shape)}. "
            "Build it from one sample, for instance with fit.hmm(data)."
        )
    size = len(matrix)
    labels = _names(names, size)
    axes = _axes(axes)
    axes.imshow(matrix.numpy(), cmap="Blues", vmin=0.0, vmax=1.0)
    if size <= 12:
        for i in range(size):
            for j in range(size):
                value = matrix[i, j].item()
                axes.text(
                    j, i, f"{value:.2f}", ha="center", va="center",
                    color="white" if value > 0.5 else "black",
                )  # fmt: skip
    if size <= 30 or names is not None:
        axes.set_xticks(range(size), labels)
        axes.set_yticks(range(size), labels)
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    return axes


@checked()
def emission(
    hmm: HMM,
    symbols: Sequence[str],
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw what each state emits: one row of bars a state, for a categorical emission.

    Args:
        hmm: An HMM with a categorical emission, without batch dimensions in its parameters.
        symbols: Names of the V symbols.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If the emission is not categorical or has batch dimensions, or there are not
            V symbols or K names.
    """
    probs = getattr(hmm.emission, "probs", None)
    if not isinstance(probs, Tensor) or probs.dim() != 2:
        raise ValueError("hmm must have a categorical emission with probs of shape (K, V).")
    if len(symbols) != probs.size(-1):
        raise ValueError(f"symbols must have V = {probs.size(-1)} names; got {len(symbols)}.")
    probs = probs.detach().cpu()
    size, top = len(probs), probs.max().item()
    labels = _names(names, size, "state ")
    axes = _axes(axes)
    for k, row in enumerate(probs.numpy()):
        base = size - 1 - k
        axes.bar(range(len(row)), 0.85 * row / top, bottom=base, width=0.8, color=f"C{k % 10}")
        axes.axhline(base, color="0.7", linewidth=0.6)
    axes.set_xticks(range(len(symbols)), symbols)
    axes.set_yticks([size - 0.6 - k for k in range(size)], labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0, size)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return axes


@checked()
def states(probs: Tensor, names: Sequence[str] | None = None, axes: Axes | None = None) -> Axes:
    """Draw the distribution of the state at each step as stacked shares.

    Args:
        probs: ``(T, K)``, such as one sequence of ``hmm.posterior(values).states``.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If ``probs`` does not have two dimensions, or there are not K names.
    """
    if probs.dim() != 2 or not probs.numel():
        raise ValueError(f"probs must have shape (T, K), one sequence; got {tuple(probs.shape)}.")
    labels = _names(names, probs.size(1), "state ")
    axes = _axes(axes)
    shares = probs.detach().cpu().mT.numpy()
    axes.stackplot(range(len(probs)), shares, labels=labels, step="mid", alpha=0.85)
    axes.set_xlim(0, max(len(probs) - 1, 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("probability")
    axes.legend(loc="upper right")
    return axes


@checked()
def losses(fit: Fit, axes: Axes | None = None) -> Axes:
    """Draw the loss, in nats per observed step, against the gradient step."""
    axes = _axes(axes)
    axes.plot((fit.losses / max(fit.num_observed, 1)).numpy())
    axes.set_xlabel("gradient step")
    axes.set_ylabel("loss, nats per observation")
    return axes


@checked()
def forecast(
    predicted: Forecast,
    values: Tensor | None = None,
    levels: Sequence[float] = (0.5, 0.9),
    axes: Axes | None = None,
) -> Axes:
    """Draw a forecast as a fan: its median, and bands of central intervals, after the past.

    Args:
        predicted: Of one sequence of numbers, ``(H,)``: such as ``hmm.forecast(values, 10)`` of an
            HMM of one sequence.
        values: The past, ``(T,)``; the forecast follows it.
        levels: Probabilities of the bands.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If there are several sequences, or observations are vectors.
    """
    shape = tuple(predicted.batch_shape + predicted.event_shape)
    if len(shape) != 1 or (values is not None and values.dim() != 1):
        raise ValueError(
            "predicted must be of one sequence of numbers, (H,), and values its past, (T,); got "
            f"shapes {shape} and {None if values is None else tuple(values.shape)}."
        )
    axes = _axes(axes)
    start = 0 if values is None else len(values)
    if values is not None:
        axes.plot(range(start), values.detach().cpu().numpy(), color="0.3", label="observed")
    steps = range(start, start + shape[0])
    check_probs("levels", levels)
    for level in sorted(levels, reverse=True):
        low, high = (end.cpu().numpy() for end in predicted.interval(level))
        axes.fill_between(
            steps, low, high, color="C0", alpha=0.25, linewidth=0.0, label=f"{level:.0%}"
        )
    axes.plot(steps, predicted.quantiles([0.5])[0].cpu().numpy(), color="C0", label="median")
    axes.set_xlabel("step")
    axes.set_ylabel("observation")
    axes.legend(loc="upper left")
    return axes
