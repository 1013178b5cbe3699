"""Pictures of paths of states: shares, bars, a series of numbers, a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..distributions.hmm import HMM
from .dwell_times import segments
from .plot_axes import (
    MOST_TICKS,
    axes_or_new,
    colors_of,
    legend_above,
    names_or_numbers,
)
from .queries import observation_marginals

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def state_probs(
    probs: Tensor, names: Sequence[str] | None = None, *, axes: Axes | None = None
) -> Axes:
    """Draw the distribution of the state at each step as stacked shares.

    Args:
        probs: ``(T, K)``, such as one sequence of ``hmm.posterior(values).state_probs``.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        ValueError: If there are not K names.
    """
    if probs.dim() != 2:
        raise ValueError(
            "probs must have shape (T, K), the posterior of one sequence; got shape "
            f"{tuple(probs.shape)}. Paths are drawn by plots.timeline."
        )
    labels = names_or_numbers(names, probs.size(1), "state ")
    axes = axes_or_new(axes)
    shares = probs.detach().cpu().mT.numpy()
    axes.stackplot(range(len(probs)), shares, labels=labels, step="mid", alpha=0.85,
                   colors=colors_of(len(labels)))  # fmt: skip
    axes.set(xlim=(0, max(len(probs) - 1, 1)), ylim=(0, 1), xlabel="step", ylabel="probability")
    legend_above(axes, labels)
    return axes


def timeline(
    states: Tensor,
    names: Sequence[str] | None = None,
    *,
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
    size = 1 + max((row.state for row in rows), default=0)
    if names is not None and size > len(names):
        raise ValueError(f"names must have one for state {size - 1}; got {len(names)}.")
    labels = names_or_numbers(names, size if names is None else len(names), "state ")
    colors = colors_of(len(labels))
    axes = axes_or_new(axes)
    for state in sorted({row.state for row in rows}):
        own = [row for row in rows if row.state == state]
        axes.barh(
            [row.sequence for row in own], [row.length for row in own], height=0.9,
            left=[row.first - 0.5 for row in own], color=colors[state], label=labels[state],
        )  # fmt: skip
    count = 1 if states.dim() == 1 else len(states)
    axes.set(xlabel="step", ylabel="sequence" if count > 1 else "", ylim=(count - 0.5, -0.5))
    axes.set_xlim(-0.5, states.size(-1) - 0.5)
    axes.set_yticks(range(count) if 1 < count <= MOST_TICKS else [])
    legend_above(axes, labels)
    return axes


def series(
    hmm: HMM,
    values: Tensor,
    names: Sequence[str] | None = None,
    *,
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
    single = hmm.emission.event_shape.numel() == hmm.batch_shape.numel() == 1
    if not single or values.numel() != hmm.event_shape.numel():
        raise ValueError(
            "hmm and values must be of one sequence of numbers, such as fit.hmm(data[:1]) and "
            f"data.values[:1]; got {hmm} and values of shape {tuple(values.shape)}."
        )
    labels = names_or_numbers(names, hmm.num_states, "state ")
    with torch.no_grad():
        path = hmm.viterbi(values).reshape(-1).cpu()
        low, high = (
            end.reshape(-1).cpu() for end in observation_marginals(hmm, values).interval(level)
        )
    drawn = hmm.exists.reshape(-1).cpu()
    observed = drawn if hmm.observed is None else drawn & hmm.observed.reshape(-1).cpu()
    numbers = values.detach().reshape(-1).cpu().double().masked_fill(~observed, torch.nan)
    steps = torch.arange(len(path))
    axes = axes_or_new(axes)
    axes.fill_between(
        steps[drawn].numpy(), low[drawn].numpy(), high[drawn].numpy(), step="mid", color="0.85",
        linewidth=0.0, label=f"{level:.0%}",
    )  # fmt: skip
    axes.plot(steps.numpy(), numbers.numpy(), color="0.6", linewidth=0.8)
    for k, color in enumerate(colors_of(len(labels))):
        chosen = (path == k) & ~numbers.isnan()
        axes.plot(steps[chosen].numpy(), numbers[chosen].numpy(), "o", ms=4, color=color,
                  label=labels[k])  # fmt: skip
    axes.set(xlabel="step", ylabel="observation")
    legend_above(axes, labels)
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
        raise ValueError(
            "locations must have the shape of states, and 2 coordinates; got "
            f"{tuple(locations.shape)} for states {tuple(states.shape)}."
        )
    size = int(states.max()) + 1 if names is None else len(names)
    if int(states.max()) >= size:
        raise ValueError(f"names must have one for state {int(states.max())}; got {size}.")
    labels = names_or_numbers(names, size, "state ")
    places = locations.detach().cpu().double().reshape(-1, *locations.shape[-2:])
    gap = torch.full_like(places[:, 1:], torch.nan)
    steps = torch.stack([places[:, :-1], places[:, 1:], gap], 2)  # (N, T-1, 3, 2)
    begins = states.cpu().reshape(len(places), -1)[:, :-1]
    axes = axes_or_new(axes)
    for k, (label, color) in enumerate(zip(labels, colors_of(size))):
        x, y = steps[begins == k].reshape(-1, 2).mT.numpy()
        axes.plot(x, y, color=color, label=label, linewidth=1.0)
    if plane:
        axes.set(xlabel="x", ylabel="y", aspect="equal")
    else:
        middle = places[..., 1].nanmean().deg2rad().cos().item()
        axes.set(xlabel="longitude", ylabel="latitude", aspect=1 / max(middle, 0.01))
    axes.set_adjustable("datalim")
    legend_above(axes, labels)
    return axes
