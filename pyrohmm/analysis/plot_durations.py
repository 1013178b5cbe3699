"""Pictures of how long states last: probabilities, survival and hazard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..distributions.hmm import HMM
from .dwell_times import dwell_time_hazard, dwell_time_log_prob, dwell_time_log_survival
from .plot_axes import axes_or_new, legend_above, names_or_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_AT_RISK = 5  # visits, below which a share says little


def durations(
    hmm: HMM,
    num_steps: int,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probability of each duration as a curve for each state, and decoded ones as dots.

    Args:
        hmm: An HMM or an HSMM without batch dimensions in its parameters.
        num_steps: The longest duration to draw.
        states: ``(N, T)`` integers, decoded paths, whose durations are the dots: see
            :func:`.dwell_times.dwell_time_hazard`. Not drawn are those that fewer than five visits
            have reached.
        lengths: ``(N,)``, steps of each path; T by default.
        names: Of the K states; numbers by default.
        axes: Where to draw; new ones by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If ``num_steps`` is less than one, ``hmm`` has batch dimensions or matrices for
            each step, states or lengths are out of range, or there are not K names.
    """
    curves = dwell_time_log_prob(hmm, num_steps).exp()
    hazard, survival = _decoded(states, lengths, hmm.num_states)
    return _draw(axes, curves, hazard * survival, names, "probability")


def survival(
    hmm: HMM,
    num_steps: int,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probability to last at least so many steps; arguments as :func:`durations`."""
    curves = dwell_time_log_survival(hmm, num_steps).exp()
    _, lasted = _decoded(states, lengths, hmm.num_states)
    return _draw(axes, curves, lasted, names, "probability to last as long")


def hazard(
    hmm: HMM,
    num_steps: int,
    states: Tensor | None = None,
    lengths: Tensor | None = None,
    names: Sequence[str] | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the probability to end after d steps, given so many; arguments as :func:`durations`.

    That of an HMM is constant.
    """
    log_survival = dwell_time_log_survival(hmm, num_steps)
    curves = (dwell_time_log_prob(hmm, num_steps) - log_survival).exp()
    curves = curves.masked_fill(log_survival.isneginf(), torch.nan)
    shares, _ = _decoded(states, lengths, hmm.num_states)
    return _draw(axes, curves, shares, names, "probability to end now")


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


def _draw(
    axes: Axes | None, curves: Tensor, dots: Tensor, names: Sequence[str] | None, label: str
) -> Axes:
    """Curves ``(K, D)``, and dots ``(K, T)``, against the number of steps."""
    if curves.dim() != 2:
        raise ValueError(
            f"hmm must have one set of parameters; its durations have shape {tuple(curves.shape)}. "
            "Build it from one sample, for instance with fit.hmm(data)."
        )
    labels = names_or_numbers(names, len(curves), "state ")
    axes = axes_or_new(axes)
    steps, shown = range(1, curves.size(1) + 1), min(curves.size(1), dots.size(1))
    for k, (curve, points) in enumerate(zip(curves.cpu(), dots[:, :shown].cpu())):
        color = f"C{k % 10}"
        axes.plot(steps, curve.numpy(), color=color, label=labels[k])
        axes.plot(steps[:shown], points.numpy(), "o", color=color, markersize=3.5, alpha=0.6)
    axes.set_xlim(0.5, curves.size(1) + 0.5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("steps in the state")
    axes.set_ylabel(label)
    legend_above(axes)
    return axes
