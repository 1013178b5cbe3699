"""Pictures of HMMs, of answers about sequences, and of fits.

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
from .plot_axes import axes_or_new, from_and_to, legend_above, names_or_numbers, table
from .plot_durations import durations as durations
from .plot_durations import hazard as hazard
from .plot_durations import survival as survival
from .plot_emissions import emission as emission
from .prediction import observation_marginals
from .segmentation import segments

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _matrix(hmm: HMM) -> Tensor:
    """The transition matrix of an HMM, ``(K, K)``."""
    matrix = hmm.log_transition.detach().exp().cpu()
    if matrix.dim() != 2:
        raise ValueError(
            f"hmm must have one transition matrix (K, K); got shape {tuple(matrix.shape)}. "
            "Build it from one sample, for instance with fit.hmm(data)."
        )
    return matrix


def transition(hmm: HMM, names: Sequence[str] | None = None, axes: Axes | None = None) -> Axes:
    """Draw the transition matrix as a table of shades; row = from, column = to.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If the matrix has more than two dimensions, or there are not K names.
    """
    matrix = _matrix(hmm)
    size = len(matrix)
    names_or_numbers(names, size)
    axes = axes_or_new(axes)
    table(axes, matrix, [[f"{p:.2f}" for p in row] for row in matrix] if size <= 12 else [])
    from_and_to(axes, names, size)
    return axes


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
    labels = names_or_numbers(names, probs.size(1), "state ")
    axes = axes_or_new(axes)
    shares = probs.detach().cpu().mT.numpy()
    axes.stackplot(range(len(probs)), shares, labels=labels, step="mid", alpha=0.85)
    axes.set_xlim(0, max(len(probs) - 1, 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_ylabel("probability")
    legend_above(axes)
    return axes


def timeline(
    states: Tensor,
    names: Sequence[str] | None = None,
    lengths: Tensor | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw paths as coloured bars, one row for each sequence.

    Args:
        states: ``(T,)`` or ``(N, T)`` integers, such as ``hmm.viterbi(values)``.
        names: Of the K states; numbers of those that occur by default.
        lengths: ``(N,)``, steps of each sequence; T by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: As :func:`pyrohmm.queries.segments`; or if a state has no name.

    Example:
        >>> axes = timeline(torch.tensor([0, 0, 1, 1, 0]), ["rest", "run"])
        >>> len(axes.patches)
        3
    """
    rows = segments(states, lengths)
    largest = max((row.state for row in rows), default=0)
    if names is not None and not largest < len(names):
        raise ValueError(f"names must have one for state {largest}; got {len(names)}.")
    labels = list(names) if names is not None else [f"state {k}" for k in range(largest + 1)]
    axes = axes_or_new(axes)
    for state in sorted({row.state for row in rows}):
        own = [row for row in rows if row.state == state]
        axes.barh(
            [row.sequence for row in own], [row.length for row in own], height=0.9,
            left=[row.first - 0.5 for row in own], color=f"C{state % 10}", label=labels[state],
        )  # fmt: skip
    count = 1 if states.dim() == 1 else len(states)
    axes.set(xlabel="step", ylabel="sequence" if count > 1 else "", ylim=(count - 0.5, -0.5))
    axes.set_xlim(-0.5, states.size(-1) - 0.5)
    axes.set_yticks(range(count) if 1 < count <= 30 else [])
    legend_above(axes)
    return axes


def series(
    hmm: HMM,
    values: Tensor,
    names: Sequence[str] | None = None,
    level: float = 0.9,
    axes: Axes | None = None,
) -> Axes:
    """Draw one sequence of numbers, each coloured by its most probable state, over a band.

    The state is that of the Viterbi path. The band has this probability at each step, if the state
    is drawn from the smoothed posterior and emits anew: observations outside are surprising.

    Args:
        hmm: Of one sequence: ``fit.hmm(data[:1])``.
        values: ``(T,)``, ``(1, T)`` or ``(1, T, 1)``, the sequence. Steps that are not
            observed are not drawn.
        names: Of the K states; numbers by default.
        level: Probability of the band.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If there are several sequences, observations are vectors, or there are not K
            names.
    """
    if hmm.emission.event_shape.numel() != 1 or hmm.batch_shape.numel() != 1:
        raise ValueError(
            "hmm must be of one sequence of numbers; got batch shape "
            f"{tuple(hmm.batch_shape)} and observations of shape "
            f"{tuple(hmm.emission.event_shape)}. Give fit.hmm(data[:1])."
        )
    if values.numel() != hmm.event_shape.numel():
        raise ValueError(
            f"values must be one sequence of T = {hmm.event_shape[0]} numbers; got shape "
            f"{tuple(values.shape)}."
        )
    labels = names_or_numbers(names, hmm.num_states, "state ")
    with torch.no_grad():
        path = hmm.viterbi(values).reshape(-1).cpu()
        low, high = (
            end.reshape(-1).cpu() for end in observation_marginals(hmm, values).interval(level)
        )
    drawn = hmm.exists.reshape(-1).cpu()
    observed = drawn if hmm.observed is None else drawn & hmm.observed.reshape(-1).cpu()
    observed = observed & ~values.reshape(-1).cpu().isnan()
    steps, numbers = torch.arange(len(path)), values.detach().reshape(-1).cpu()
    axes = axes_or_new(axes)
    axes.fill_between(
        steps[drawn].numpy(), low[drawn].numpy(), high[drawn].numpy(), step="mid", color="0.85",
        linewidth=0.0, label=f"{level:.0%}",
    )  # fmt: skip
    blank = numbers.double().masked_fill(~observed, torch.nan)
    axes.plot(steps.numpy(), blank.numpy(), color="0.6", linewidth=0.8)
    for k, label in enumerate(labels):
        chosen = observed & (path == k)
        axes.plot(steps[chosen].numpy(), numbers[chosen].numpy(), "o", ms=4, color=f"C{k % 10}",
                  label=label)  # fmt: skip
    axes.set(xlabel="step", ylabel="observation")
    legend_above(axes)
    return axes


def graph(
    hmm: HMM, names: Sequence[str] | None = None, least: float = 0.01, axes: Axes | None = None
) -> Axes:
    """Draw the chain as a graph: states on a circle, an arrow for each probable transition.

    The wider an arrow, the more probable the transition; how probable stands beside it. Staying is
    written below the name of a state.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
        least: Transitions of less probability are left out.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If the matrix has more than two dimensions, or there are not K names.
    """
    matrix = _matrix(hmm)
    size = len(matrix)
    labels = names_or_numbers(names, size)
    axes = axes_or_new(axes)
    places = [
        (math.sin(2 * math.pi * k / size), math.cos(2 * math.pi * k / size)) for k in range(size)
    ]
    if size == 1:
        places = [(0.0, 0.0)]
    for i, j in (matrix >= max(least, 1e-12)).nonzero().tolist():
        if i != j:
            _arrow(axes, places[i], places[j], matrix[i, j].item())
    for k, (x, y) in enumerate(places):
        frame = {"boxstyle": "circle,pad=0.5", "facecolor": f"C{k % 10}", "edgecolor": "none"}
        axes.text(x, y, f"{labels[k]}\n{matrix[k, k].item():.2f}", ha="center", va="center",
                  color="white", fontsize=9, bbox=frame)  # fmt: skip
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.4, 1.4), aspect="equal")
    axes.set_axis_off()
    return axes


def _arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], probability: float
) -> None:
    """A curved arrow, with its probability beside the middle."""
    style = {"arrowstyle": "-|>", "connectionstyle": "arc3,rad=0.18", "color": "0.45",
             "linewidth": 0.6 + 4.0 * probability, "shrinkA": 24, "shrinkB": 24}  # fmt: skip
    axes.annotate("", end, start, arrowprops=style)
    across, up = end[0] - start[0], end[1] - start[1]
    x, y = start[0] + 0.45 * across + 0.13 * up, start[1] + 0.45 * up - 0.13 * across
    axes.text(x, y, f"{probability:.2f}", fontsize=8, ha="center", va="center", color="0.25",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


def criterion(
    scores: Mapping[int, float] | Mapping[str, Mapping[int, float]],
    name: str = "criterion",
    axes: Axes | None = None,
) -> Axes:
    """Draw a criterion against the number of states, and mark where it is least.

    Args:
        scores: Criterion by K, such as ``{K: metrics.bic(fit, data)}``; or several such, by name.
        name: Of the criterion.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If there is no score.

    Example:
        >>> axes = criterion({1: 520.0, 2: 430.0, 3: 445.0}, "BIC")
        >>> axes.lines[1].get_xdata().tolist()
        [2]
    """
    several = {str(key): each for key, each in scores.items() if isinstance(each, Mapping)}
    curves: dict[str, Any] = several or {name: scores}
    if not all(curves.values()):
        raise ValueError("scores must have a number for each K; got none.")
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
    level: float = 0.9,
    axes: Axes | None = None,
) -> Axes:
    """Draw the posterior of the transition matrix: means as shades, with central intervals.

    Args:
        samples: ``(*S, K, K)``, such as ``fit.samples()["module.transition"]`` or, of chains,
            ``draws.aligned(data).values["module.transition"]``.
        names: Of the K states; numbers by default.
        level: Probability of the intervals.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If ``samples`` are not of square matrices, or there are not K names.

    Example:
        >>> samples = Dirichlet(torch.tensor([[9.0, 1.0], [1.0, 9.0]])).sample((1000,))
        >>> axes = transition_posterior(samples, ["rain", "sun"])
        >>> len(axes.texts)
        4
    """
    if samples.dim() < 3 or samples.size(-1) != samples.size(-2) or not samples.numel():
        raise ValueError(f"samples must have shape (*S, K, K); got {tuple(samples.shape)}.")
    flat = samples.detach().cpu().double().flatten(0, -3)
    mean, size = flat.mean(0), samples.size(-1)
    names_or_numbers(names, size)
    wanted = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=flat.dtype)
    low, high = flat.quantile(wanted, 0)
    texts = [
        [f"{mean[i, j]:.2f}\n{low[i, j]:.2f} to {high[i, j]:.2f}" for j in range(size)]
        for i in range(size)
    ]
    axes = axes_or_new(axes)
    table(axes, mean, texts if size <= 8 else [])
    from_and_to(axes, names, size)
    return axes


def losses(fit: Fit, axes: Axes | None = None) -> Axes:
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
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per observation")
    axes.locator_params(axis="x", integer=True)
    return axes


def forecast(
    predicted: Forecast,
    values: Tensor | None = None,
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

    Raises:
        ValueError: If there are several sequences, or observations are vectors.
    """
    shape, ahead = tuple(predicted.shape()), predicted.states.size(-2)
    past = () if values is None else tuple(values.shape)
    single = values is None or 0 < math.prod(past) == max(past, default=0)
    if math.prod(shape) != ahead or not single:
        raise ValueError(
            "predicted must be of one sequence of numbers, (H,), and values its past, (T,); got "
            f"shapes {shape} and {None if values is None else past}. Give hmm.forecast of one "
            "sequence, such as fit.hmm(data[:1])."
        )
    check_probs("levels", list(levels))
    axes = axes_or_new(axes)
    start = math.prod(past) if past else 0
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
    axes.set_xlabel("step")
    axes.set_ylabel("observation")
    legend_above(axes)
    return axes
