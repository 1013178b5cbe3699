"""Plots of HMMs, of posterior queries, and of fits.

Each is drawn on matplotlib's axes, which are returned: ``axes.figure.savefig(path)`` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._checks import check_probs
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM
from ..infer.results import Fit
from .dwell_times import (
    dwell_time_hazard,
    dwell_time_log_prob,
    dwell_time_log_survival,
)
from .plot_axes import (
    MOST_TICKS,
    axes_or_new,
    colors_of,
    ink_on,
    legend_above,
    names_or_numbers,
    single,
    square,
)
from .plot_axes import bands as bands
from .plot_axes import history as history
from .plot_emissions import emission as emission
from .plot_paths import series as series
from .plot_paths import state_probs as state_probs
from .plot_paths import timeline as timeline
from .plot_paths import track as track

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_AT_RISK = 5  # visits, below which a share says little
MOST_ARROWS = 40
LONGEST = 200  # steps of a duration that are drawn unless they are asked for


def transition(hmm: HMM, names: Sequence[str] | None = None, *, axes: Axes | None = None) -> Axes:
    """Draw the transition matrix as a table of shades; row = from, column = to.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.
    """
    matrix = single("transitions", hmm.log_transition).exp()
    return square(axes, matrix, [[f"{p:.2f}" for p in row] for row in matrix], names)


def graph(
    hmm: HMM,
    names: Sequence[str] | None = None,
    *,
    least: float | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the chain as a graph: states on a circle, an arrow for each probable transition.

    The wider an arrow, the more probable the transition; up to twelve states how probable stands
    beside it. Up to thirty, staying is written below the name of a state.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
        least: Transitions of less probability are left out; by default those below 0.01, and all
            but the forty most probable.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If the matrix has more than two dimensions, or there are not K names.
    """
    matrix = single("transitions", hmm.log_transition).exp()
    size = len(matrix)
    labels = names_or_numbers(names, size)
    axes = axes_or_new(axes)
    radius = min(1.0, size - 1.0)
    angles = [2 * math.pi * k / size for k in range(size)]
    places = [(radius * math.sin(angle), radius * math.cos(angle)) for angle in angles]
    away = matrix.masked_fill(torch.eye(size, dtype=torch.bool), 0.0)
    order = away.flatten().argsort(descending=True, stable=True)
    for place in order[: MOST_ARROWS if least is None else None].tolist():
        i, j = divmod(place, size)
        if away[i, j] >= (0.01 if least is None else max(least, 1e-12)):
            _arrow(axes, places[i], places[j], away[i, j].item(), size)
    few = size <= MOST_TICKS
    font = 9 if size <= 10 else 6 if few else 5
    for k, ((x, y), color) in enumerate(zip(places, colors_of(size))):
        style = f"circle,pad={0.5 if few else 0.2}"
        frame = {"boxstyle": style, "facecolor": color, "edgecolor": "none"}
        stays = f"\n{matrix[k, k].item():.2f}" if few else ""
        axes.text(x, y, f"{labels[k]}{stays}", ha="center", va="center", fontsize=font, bbox=frame,
                  color=ink_on(color))  # fmt: skip
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.4, 1.4), aspect="equal")
    axes.set_axis_off()
    return axes


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    probability: float,
    num_states: int,
) -> None:
    """A curved arrow, with its probability beside the middle where states are few."""
    gap = 24 if num_states <= MOST_TICKS else 8
    style = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.18", "color": "0.45",
             "linewidth": 0.6 + 4.0 * probability, "shrinkA": gap, "shrinkB": gap}  # fmt: skip
    axes.annotate("", end, start, arrowprops=style)
    if num_states > 12:
        return
    across, up = end[0] - start[0], end[1] - start[1]
    x, y = start[0] + 0.45 * across + 0.13 * up, start[1] + 0.45 * up - 0.13 * across
    axes.text(x, y, f"{probability:.2f}", fontsize=8, ha="center", va="center", color="0.25",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def criterion(
    scores: Mapping[int, float] | Mapping[str, Mapping[int, float]],
    name: str = "criterion",
    *,
    axes: Axes | None = None,
) -> Axes:
    """Draw a criterion against the number of states, and mark its minimum.

    Args:
        scores: Criterion by K, such as ``{K: metrics.bic(fit, data)}``; or several such, by name.
        name: Of the criterion.
        axes: Where to draw; new ones by default.

    Example:
        >>> axes = criterion({1: 520.0, 2: 430.0, 3: 445.0}, "BIC")
        >>> axes.lines[1].get_xdata().tolist()
        [2]
    """
    several = {str(key): each for key, each in scores.items() if isinstance(each, Mapping)}
    curves: dict[str, Any] = several or {name: scores}
    axes = axes_or_new(axes)
    for label, curve in curves.items():
        sizes = sorted(curve)
        (line,) = axes.plot(sizes, [curve[size] for size in sizes], "o-", ms=4, label=label)
        best = min(sizes, key=lambda size: curve[size])
        axes.plot([best], [curve[best]], "o", ms=10, mfc="none", color=line.get_color())
    axes.set(xlabel="number of states", ylabel=name)
    axes.locator_params(axis="x", integer=True)
    if several:
        axes.legend()
    return axes


def transition_posterior(
    samples: Tensor,
    names: Sequence[str] | None = None,
    *,
    level: float = 0.9,
    axes: Axes | None = None,
) -> Axes:
    """Draw the posterior of the transition matrix: means as shades, with central intervals.

    Args:
        samples: ``(*S, K, K)``, such as ``fit.samples()["module.transition"]`` or, of chains,
            ``draws.aligned(data).parameters["module.transition"]``.
        names: Of the K states; numbers by default.
        level: Probability of the intervals.
        axes: Where to draw; new ones by default.

    Example:
        >>> samples = Dirichlet(torch.tensor([[9.0, 1.0], [1.0, 9.0]])).sample((1000,))
        >>> axes = transition_posterior(samples, ["rain", "sun"])
        >>> len(axes.texts)
        4
    """
    flat = samples.detach().cpu().double().flatten(0, -3)
    mean = flat.mean(0)
    low, high = flat.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]).to(flat), 0)
    texts = [
        [f"{m:.2f}\n{a:.2f}–{b:.2f}" for m, a, b in zip(*rows)] for rows in zip(mean, low, high)
    ]
    return square(axes, mean, texts, names)


def losses(fit: Fit, *, axes: Axes | None = None) -> Axes:
    """Draw the loss, in nats per observed step, against the step; of restarts, the best in colour.

    Args:
        fit: The fit. The losses of other restarts are grey.
        axes: Where to draw; new ones by default.
    """
    axes = axes_or_new(axes)
    count = max(fit.num_observed, 1)
    if fit.restarts is not None:
        for number, curve in enumerate(fit.restarts.losses.cpu()):
            if number != fit.restarts.best:
                axes.plot((curve / count).numpy(), color="0.75", linewidth=0.8)
    axes.plot((fit.losses.cpu() / count).numpy(), color="C0")
    axes.set(xlabel="step", ylabel="loss, nats per observation")
    axes.locator_params(axis="x", integer=True)
    return axes


def forecast(
    predicted: Forecast,
    values: Tensor | None = None,
    *,
    levels: Sequence[float] = (0.5, 0.9),
    axes: Axes | None = None,
) -> Axes:
    """Draw a forecast as a fan: its median, and bands of central intervals, after the past.

    Args:
        predicted: Of one sequence of numbers, ``(H,)`` or ``(1, H)``: such as
            ``hmm.forecast(values, 10)`` of an HMM of one sequence.
        values: The past, ``(T,)``, ``(1, T)`` or ``(1, T, 1)``; the forecast follows it.
        levels: Probabilities of the bands.
        axes: Where to draw; new ones by default.
    """
    ahead, start = predicted.state_probs.size(-2), 0 if values is None else values.numel()
    past = () if values is None else tuple(values.shape)
    if predicted.shape().numel() != ahead or start != max(past, default=0):
        raise ValueError(
            "predicted must be of one sequence of numbers, (H,), and values its past, (T,); got "
            f"shapes {tuple(predicted.shape())} and {past}. Give fit.hmm(data[:1]).forecast."
        )
    check_probs("levels", list(levels))
    axes = axes_or_new(axes)
    if values is not None:
        observed = values.detach().reshape(-1).cpu().numpy()
        axes.plot(range(start), observed, color="0.3", label="observed")
    steps = range(start, start + ahead)
    for level in sorted(levels, reverse=True):
        low, high = (end.reshape(-1).cpu().numpy() for end in predicted.interval(level))
        axes.fill_between(
            steps, low, high, color="C0", alpha=0.25, linewidth=0.0, label=f"{level:.0%}"
        )
    median = predicted.quantiles([0.5]).reshape(-1).cpu().numpy()
    axes.plot(steps, median, color="C0", label="median")
    axes.set(xlabel="step", ylabel="observation")
    legend_above(axes)
    return axes


def durations(
    hmm: HMM,
    *,
    num_steps: int | None = None,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probability of each duration as a curve for each state, and decoded ones as dots.

    Args:
        hmm: An HMM or an HSMM without batch dimensions in its parameters.
        num_steps: The longest duration to draw; by default that which at most one visit in a
            hundred exceeds in any state, up to 200.
        states: ``(N, T)`` integers, decoded paths, whose durations are the dots: see
            :func:`.dwell_times.dwell_time_hazard`. Not drawn are those that fewer than five visits
            have reached.
        lengths: ``(N,)``, steps of each path; T by default.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.
    """
    curves = dwell_time_log_prob(hmm, num_steps or _longest(hmm)).exp()
    ended, lasted = _decoded(states, lengths, hmm.num_states)
    return _lasting(curves, ended * lasted, "probability", names, axes)


def survival(
    hmm: HMM,
    *,
    num_steps: int | None = None,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probability to last at least so many steps; arguments as :func:`durations`."""
    curves = dwell_time_log_survival(hmm, num_steps or _longest(hmm)).exp()
    _, lasted = _decoded(states, lengths, hmm.num_states)
    return _lasting(curves, lasted, "probability to last as long", names=names, axes=axes)


def hazard(
    hmm: HMM,
    *,
    num_steps: int | None = None,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probability to end after d steps, given so many; arguments as :func:`durations`.

    That of an HMM is constant.
    """
    num_steps = num_steps or _longest(hmm)
    lasting = dwell_time_log_survival(hmm, num_steps)
    curves = (dwell_time_log_prob(hmm, num_steps) - lasting).exp()
    ended, _ = _decoded(states, lengths, hmm.num_states)
    curves = curves.masked_fill(lasting.isneginf(), torch.nan)
    return _lasting(curves, ended, "probability to end now", names=names, axes=axes)


def _longest(hmm: HMM) -> int:
    """The duration that at most one visit in a hundred exceeds."""
    exceeds = dwell_time_log_survival(hmm, LONGEST).exp() > 0.01
    return max(1, int(exceeds.reshape(-1, LONGEST).any(0).sum()))


def _decoded(
    states: Tensor | None, lengths: Tensor | None, num_states: int
) -> tuple[Tensor, Tensor]:
    """Hazard and survival of decoded visits, ``(K, T)``; NaN where few are at risk."""
    if states is None:
        none = torch.full((num_states, 1), torch.nan)
        return none, none
    if lengths is None:
        lengths = torch.full(states.shape[:-1], states.shape[-1] if states.dim() else 1)
    shares, at_risk = dwell_time_hazard(states, lengths, num_states)
    lasted = torch.nn.functional.pad((1 - shares).cumprod(-1)[:, :-1], (1, 0), value=1.0)
    few = at_risk < LEAST_AT_RISK
    return shares.masked_fill(few, torch.nan), lasted.masked_fill(few, torch.nan)


def _lasting(
    curves: Tensor,
    dots: Tensor,
    label: str,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Curves ``(K, D)``, and dots ``(K, T)``, against the number of steps."""
    curves = single("durations", curves)
    labels = names_or_numbers(names, len(curves), "state ")
    axes = axes_or_new(axes)
    steps, shown = range(1, curves.size(1) + 1), min(curves.size(1), dots.size(1))
    for k, color in enumerate(colors_of(len(curves))):
        axes.plot(steps, curves[k].numpy(), color=color, label=labels[k])
        points = dots[k, :shown].cpu().numpy()
        axes.plot(steps[:shown], points, "o", color=color, markersize=3.5, alpha=0.6)
    axes.set(xlim=(0.5, curves.size(1) + 0.5), xlabel="steps in the state", ylabel=label)
    axes.set_ylim(bottom=0)
    legend_above(axes, labels)
    return axes
