"""Plots of HMMs, of posterior queries, and of fits.

Each is drawn on matplotlib's axes, which are returned: ``axes.figure.savefig(path)`` keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._checks import all_names_checked, check_kind
from .._imports import imported
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM
from ..infer.results import Fit, check_fit
from .dwell_times import (
    dwell_time_hazard,
    dwell_time_log_prob,
    dwell_time_log_survival,
    paths_of,
    segments,
)
from .plot_axes import (
    MOST_TICKS,
    axes_or_new,
    colors_of,
    legend_above,
    name_ticks,
    names_or_numbers,
    places_of,
    single,
    square,
    styles,
)
from .plot_axes import bands as bands
from .plot_emissions import emission as emission
from .queries import observation_marginals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_AT_RISK = 5  # visits, below which a share says little
MOST_ARROWS = 40
MOST_SEQUENCES = 500  # rows of bars that can be told apart
LONGEST = 200  # steps of a duration that are drawn unless they are asked for


def transition(hmm: HMM, names: Sequence[str] | None = None, *, axes: Axes | None = None) -> Axes:
    """Heat map of the transition matrix; row = from, column = to.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.
    """
    check_kind("hmm", hmm, HMM, "an HMM", "Of a fit give fit.hmm(data).")
    return square(single("transitions", hmm.log_transition).exp(), names, axes)


def graph(hmm: HMM, names: Sequence[str] | None = None, *, axes: Axes | None = None) -> Axes:
    """Graph of the chain: states on a circle, an arrow for each probable transition.

    The wider an arrow, the more probable the transition; up to twelve states how probable stands
    beside it. Up to thirty, staying is written below the name of a state. Left out are transitions
    of a probability below 0.01, and all but the forty most probable.

    Args:
        hmm: An HMM without batch dimensions in its parameters.
        names: Of the K states; numbers by default.
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
    for place in order[:MOST_ARROWS].tolist():
        i, j = divmod(place, size)
        if away[i, j] >= 0.01:
            _arrow(axes, places[i], places[j], away[i, j].item(), size)
    few = size <= MOST_TICKS
    font = 9 if size <= 10 else 6 if few else 5
    for k, ((x, y), color) in enumerate(zip(places, colors_of(size))):
        style = f"circle,pad={0.5 if few else 0.2}"
        frame = {"boxstyle": style, "facecolor": "white", "edgecolor": color, "linewidth": 2.0}
        text = f"{labels[k]}\n{matrix[k, k].item():.2f}" if few else labels[k]
        axes.text(x, y, text, ha="center", va="center", fontsize=font, bbox=frame)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.4, 1.4), aspect="equal")
    axes.set_axis_off()
    return axes


def _arrow(axes: Axes, start: Any, end: Any, probability: float, num_states: int) -> None:
    """Draw a curved arrow, with its probability beside the middle where states are few."""
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
    """Heat map of the posterior mean of the transition matrix, with central intervals.

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
    low, high = flat.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2]).to(flat), 0)
    rows = zip(flat.mean(0), low, high)
    texts = [[f"{m:.2f}\n{a:.2f}–{b:.2f}" for m, a, b in zip(*row)] for row in rows]
    return square(flat.mean(0), names, axes, texts)


def losses(fit: Fit, *, axes: Axes | None = None) -> Axes:
    """Draw the loss, in nats per observed step, against the step; of restarts, the best in colour.

    Args:
        fit: The fit. The losses of other restarts are grey.
        axes: Where to draw; new ones by default.
    """
    check_fit(fit)
    axes = axes_or_new(axes)
    count = max(fit.num_observed, 1)
    axes.plot((fit.losses.cpu() / count).numpy(), color="C0", zorder=3, label="best restart")
    if fit.restarts is not None:
        others = np.delete(fit.restarts.losses.cpu().numpy() / count, fit.restarts.best, 0)
        axes.plot(others.T, color="0.75", lw=0.8, label=["the others", *"_" * (len(others) - 1)])
        legend_above(axes)
    axes.set(xlabel="step", ylabel="loss, nats per observation")
    axes.locator_params(axis="x", integer=True)
    return axes


def forecast(
    predicted: Forecast,
    values: Tensor | None = None,
    *,
    x: Any = None,
    levels: Sequence[float] = (0.5, 0.9),
    axes: Axes | None = None,
) -> Axes:
    """Draw a forecast as a fan: its median, and bands of central intervals, after the past.

    Args:
        predicted: Of one sequence of numbers, ``(H,)`` or ``(1, H)``: such as
            ``hmm.forecast(values, 10)`` of an HMM of one sequence.
        values: The past, ``(T,)``, ``(1, T)`` or ``(1, T, 1)``; the forecast follows it.
        x: ``(T + H,)`` numbers or dates, such as ``data[:1].time_index(H)``; numbers by default.
        levels: Probabilities of the bands.
        axes: Where to draw; new ones by default.
    """
    check_kind("predicted", predicted, Forecast, "a Forecast", "Call hmm.forecast(values, H).")
    ahead, start = predicted.state_probs.size(-2), 0 if values is None else values.numel()
    past = () if values is None else tuple(values.shape)
    if predicted.shape().numel() != ahead or start != max(past, default=0):
        text = "predicted must be (H,) or (1, H), and values (T,), (1, T) or (1, T, 1), its past"
        raise ValueError(
            f"{text}; got {tuple(predicted.shape())} and {past}. Index one sequence n: "
            "fit.hmm(data[n : n + 1]).forecast(data[n : n + 1].values, H)."
        )
    axes = axes_or_new(axes)
    places = places_of(x, start + ahead, axes)
    if values is not None:
        observed = values.detach().reshape(-1).cpu().numpy()
        axes.plot(places[:start], observed, color="0.3", label="observed")
    steps = places[start:]
    for n, level in enumerate(sorted(levels, reverse=True)):
        low, high = (end.reshape(-1).cpu().numpy() for end in predicted.interval(level))
        axes.fill_between(steps, low, high, color="C0", alpha=0.25 + 0.5 * n / len(levels), lw=0.0,
                          label=f"{level:.0%}")  # fmt: skip
    median = predicted.quantiles([0.5]).reshape(-1).cpu().numpy()
    axes.plot(steps, median, color="C0", label="median")
    axes.set_ylabel("observation")
    legend_above(axes)
    return axes


def durations(
    hmm: HMM,
    *,
    quantity: Literal["probability", "survival", "hazard"] = "probability",
    num_steps: int | None = None,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the duration distribution of each state as a curve, and that of decoded visits as dots.

    Args:
        hmm: An HMM or an HSMM without batch dimensions in its parameters.
        quantity: The probability of each duration; or that to last at least so many steps; or the
            hazard, the probability to end after d steps given so many, which of an HMM is constant.
        num_steps: The longest duration to draw; by default that which at most one visit in a
            hundred exceeds in any state, up to 200.
        states: ``(N, T)`` integers, decoded paths, whose durations are the dots: see
            :func:`.dwell_times.dwell_time_hazard`. Not drawn are those that fewer than five visits
            have reached.
        lengths: ``(N,)``, steps of each path: see :func:`pyrohmm.queries.segments`.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.
    """
    if num_steps is None:
        exceeds = dwell_time_log_survival(hmm, LONGEST).exp() > 0.01
        num_steps = max(1, int(exceeds.reshape(-1, LONGEST).any(0).sum()))
    ends = dwell_time_log_prob(hmm, num_steps)
    lasts = dwell_time_log_survival(hmm, num_steps)
    hazards, lasted = _decoded(states, lengths, hmm.num_states)
    logs, dots, label = {
        "probability": (ends, hazards * lasted, "probability"),
        "survival": (lasts, lasted, "probability to last as long"),
        "hazard": (ends - lasts, hazards, "probability to end now"),
    }[quantity]
    curves = single("durations", logs.exp())
    labels = names_or_numbers(names, len(curves), "state ")
    axes = axes_or_new(axes)
    steps, shown = range(1, curves.size(1) + 1), min(curves.size(1), dots.size(1))
    for style, curve, points in zip(styles(labels), curves, dots[:, :shown].cpu()):
        axes.plot(steps, curve.numpy(), **style)
        axes.plot(steps[:shown], points.numpy(), "o", color=style["color"], ms=3.5, alpha=0.6)
    axes.set(xlim=(0.5, curves.size(1) + 0.5), xlabel="steps in the state", ylabel=label)
    axes.set_ylim(bottom=0)
    legend_above(axes, labels)
    return axes


def survival(hmm: HMM, **options: Any) -> Axes:
    """Draw the survival function of durations, with the options of :func:`durations`."""
    return durations(hmm, quantity="survival", **options)


def hazard(hmm: HMM, **options: Any) -> Axes:
    """Draw the hazard of durations, with the options of :func:`durations`."""
    return durations(hmm, quantity="hazard", **options)


def _decoded(
    states: Tensor | None, lengths: Tensor | None, num_states: int
) -> tuple[Tensor, Tensor]:
    """Hazard and survival of decoded visits, ``(K, T)``; NaN where few are at risk."""
    if states is None:
        return (torch.full((num_states, 1), torch.nan),) * 2
    states, lengths = paths_of(states, lengths)
    shares, at_risk = dwell_time_hazard(states, lengths, num_states)
    lasted = torch.nn.functional.pad((1 - shares).cumprod(-1)[:, :-1], (1, 0), value=1.0)
    few = at_risk < LEAST_AT_RISK
    return shares.masked_fill(few, torch.nan), lasted.masked_fill(few, torch.nan)


def state_probs(
    probs: Tensor,
    names: Sequence[str] | None = None,
    *,
    x: Any = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the distribution of the state at each step as stacked shares.

    Args:
        probs: ``(T, K)``, such as ``fit.predict_proba(data[n])`` of one sequence.
        names: Of the K states; numbers by default.
        x: ``(T,)`` numbers or dates, such as ``data[:1].time_index()``; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If there are not K names.
    """
    if probs.dim() != 2:
        text = f"probs must be (T, K), of one sequence; got shape {tuple(probs.shape)}"
        raise ValueError(f"{text}. Give fit.predict_proba(data[:1]).")
    labels = names_or_numbers(names, probs.size(1), "state ")
    axes = axes_or_new(axes)
    axes.stackplot(places_of(x, len(probs), axes), probs.detach().cpu().mT.numpy(), labels=labels,
                   step="mid", alpha=0.85, colors=colors_of(len(labels)))  # fmt: skip
    axes.margins(x=0)
    axes.set(ylim=(0, 1), ylabel="probability")
    legend_above(axes, labels)
    return axes


def timeline(
    states: Tensor,
    names: Sequence[str] | None = None,
    *,
    lengths: Tensor | None = None,
    keys: Sequence[Any] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw paths as coloured bars, one row for each sequence.

    Of more than 500 sequences every so many are drawn, evenly, which the label of the axis says.

    Args:
        states: ``(T,)`` or ``(N, T)`` integers, such as ``hmm.viterbi(values)``, with -1 where no
            step is; or packed, with lengths: ``fit.predict(data), lengths=data.lengths``.
        names: Of the K states; numbers of those that occur by default.
        lengths: ``(N,)``, steps of each sequence: see :func:`pyrohmm.queries.segments`.
        keys: Of the N sequences, such as ``data.keys``; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: As :func:`pyrohmm.queries.segments`; or if a state has no name.

    Example:
        >>> axes = timeline(torch.tensor([0, 0, 1, 1, 0]), ["rest", "run"])
        >>> len(axes.collections[0].get_paths())  # visits of the first state
        2
    """
    states, lengths = paths_of(states, lengths)
    sequence, state, first, last, _ = torch.tensor(segments(states, lengths)).mT
    count = 1 if states.dim() == 1 else len(states)
    every = -(-count // MOST_SEQUENCES)
    x, y = (first - 0.5, last + 0.5), (sequence - 0.45, sequence - 0.45 + 0.9 * every)
    corners = (x[0], y[0]), (x[0], y[1]), (x[1], y[1]), (x[1], y[0])
    bars = torch.stack([torch.stack(corner, -1) for corner in corners], 1)
    labels = _names_of(states, names)
    axes = axes_or_new(axes)
    for k, style in enumerate(styles(labels)):
        own = bars[(state == k) & (sequence % every == 0)].numpy()
        if len(own):
            patches = imported("matplotlib.collections").PolyCollection
            axes.add_collection(patches(own, linewidth=0, **style))
    label = "sequence" if every == 1 else f"sequence, one in {every} drawn"
    axes.set(xlabel="step", ylabel=label if count > 1 else "", ylim=(count - 0.5, -0.5))
    axes.set_xlim(-0.5, states.size(-1) - 0.5)
    axes.set_yticks(range(count) if 1 < count <= MOST_TICKS else [])
    if keys is not None:
        name_ticks(axes.yaxis, names_or_numbers(keys, count, wanted="keys must have N"))
    legend_above(axes, labels)
    return axes


def series(
    hmm: HMM,
    values: Tensor,
    names: Sequence[str] | None = None,
    *,
    x: Any = None,
    level: float = 0.9,
    axes: Any = None,
) -> Any:
    """Draw one sequence, each number coloured by its most probable state, over a band.

    The state is that of the Viterbi path. The band has this probability at each step, if the state
    is drawn from the smoothed posterior and emits anew: observations outside are surprising.

    Args:
        hmm: Of one sequence: ``fit.hmm(data[:1])``.
        values: ``(T,)``, ``(1, T)`` or ``(1, T, D)``, the sequence; each component of vectors
            has a panel. Steps that are not observed are not drawn.
        names: Of the K states; numbers by default.
        x: ``(T,)`` numbers or dates, such as ``data[:1].time_index()``; numbers by default.
        level: Probability of the band.
        axes: Where to draw, D of them for vectors; new ones by default.

    Returns:
        The axes; of vectors an array of D.

    Raises:
        ValueError: If there are several sequences, or there are not D axes or K names.
    """
    size = hmm.emission.event_shape.numel()
    if hmm.batch_shape.numel() != 1 or values.numel() != hmm.event_shape.numel():
        text = "hmm and values must be of one sequence, such as fit.hmm(data[:1])"
        raise ValueError(f"{text}; got {hmm} and values of shape {tuple(values.shape)}.")
    if axes is None:
        axes = imported("matplotlib.pyplot").subplots(size, sharex=True, layout="constrained")[1]
    panels = np.ravel(axes)
    if len(panels) != size:
        raise ValueError(f"axes must be D = {size}, such as of subplots(D); got {len(panels)}.")
    labels = names_or_numbers(names, hmm.num_states, "state ")
    with torch.no_grad():
        path = hmm.viterbi(values).reshape(-1).cpu()
        band = observation_marginals(hmm, values).interval(level)
    drawn, observed = hmm.exists.reshape(-1).cpu(), hmm.known.reshape(-1).cpu()
    numbers = values.detach().reshape(-1, size).cpu().double()
    numbers = numbers.masked_fill(~observed.unsqueeze(-1), torch.nan)
    steps = places_of(x, len(path), panels[-1])
    ends = (end.reshape(-1, size).cpu().mT for end in band)
    for d, (panel, own, low, high) in enumerate(zip(panels, numbers.mT, *ends)):
        panel.fill_between(steps[drawn.numpy()], low[drawn].numpy(), high[drawn].numpy(),
                           step="mid", color="0.85", lw=0.0, label=f"{level:.0%}")  # fmt: skip
        panel.plot(steps, own.numpy(), color="0.6", linewidth=0.8)
        for k, style in enumerate(styles(labels)):
            chosen = (path == k) & ~own.isnan()
            panel.plot(steps[chosen.numpy()], own[chosen].numpy(), "o", ms=4, **style)
        panel.set_ylabel("observation" if size == 1 else f"component {d}")
    legend_above(panels[0], labels)
    return axes


def track(
    locations: Tensor,
    states: Tensor,
    names: Sequence[str] | None = None,
    *,
    plane: bool = False,
    axes: Axes | None = None,
) -> Axes:
    """Draw tracks on a map; each step has the colour of the state at its beginning.

    Args:
        locations: ``(N, T, 2)`` or ``(T, 2)``: ``data.locations`` of :func:`pyrohmm.movement`.
            Nothing is drawn beside missing ones, NaN.
        states: ``(N, T)`` or ``(T,)`` integers, such as ``hmm.viterbi(data.values)``.
        names: Of the K states; numbers of those that occur by default.
        plane: Locations are x and y in a plane, and not degrees of longitude and latitude.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If shapes disagree, or a state has no name.

    Example:
        >>> places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.1, 1.0]])
        >>> axes = track(places, torch.tensor([1, 1, 0, 0]), ["rest", "run"], plane=True)
        >>> [line.get_label() for line in axes.lines]
        ['rest', 'run']
    """
    if locations.shape != (*states.shape, 2):
        text = "locations must have the shape of states, and 2 coordinates"
        raise ValueError(
            f"{text}; got {tuple(locations.shape)} for {tuple(states.shape)}. Give (N, T, 2)."
        )
    labels = _names_of(states, names)
    places = locations.detach().cpu().double().reshape(-1, *locations.shape[-2:])
    gap = torch.full_like(places[:, 1:], torch.nan)
    steps = torch.stack([places[:, :-1], places[:, 1:], gap], 2)  # (N, T-1, 3, 2)
    begins = states.cpu().reshape(len(places), -1)[:, :-1]
    axes = axes_or_new(axes)
    for k, style in enumerate(styles(labels)):
        axes.plot(*steps[begins == k].reshape(-1, 2).mT.numpy(), linewidth=1.0, **style)
    if plane:
        axes.set(xlabel="x", ylabel="y", aspect="equal")
    else:
        middle = places[..., 1].nanmean().deg2rad().cos().item()
        axes.set(xlabel="longitude", ylabel="latitude", aspect=1 / max(middle, 0.01))
    legend_above(axes, labels)
    return axes


def _names_of(states: Tensor, names: Sequence[str] | None) -> list[str]:
    """Names of the states of paths, at least one for each that occurs."""
    most = int(states.max())
    if names is not None and most >= len(names):
        text = f"names must have one for each state, 0 to {most}"
        raise ValueError(f"{text}; got {len(names)}: {list(names)}.")
    return names_or_numbers(names, most + 1 if names is None else len(names), "state ")


all_names_checked(globals(), bands, emission)
