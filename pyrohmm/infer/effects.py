"""Tables of estimates, and predictions at values of the covariates, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from ..data.sequences import Sequences
from ..distributions.hard_zeros import bounds
from ..distributions.hmm import HMM
from .uncertainty import IDENTITY, LOG, LOGIT, Information, names_of, normal_quantile

Function = Callable[[HMM], Tensor]
NONE = 1e-6  # limits this near to zero and one say nothing
FLAT = 8.0  # a logit beyond it is of a probability below 0.0004


class Bands(NamedTuple):
    """Predictions at M rows of covariates, with limits; :func:`pyrohmm.plots.bands` draws them.

    Attributes:
        value: ``(M, *)``.
        lower: The same shape; not below 0 for probabilities.
        upper: The same shape; not above 1 for probabilities.
    """

    value: Tensor
    lower: Tensor
    upper: Tensor


PARTS: Mapping[str, tuple[str, Callable[[Any], Tensor]]] = {  # of an attribute of the HMM
    "transition": ("log_transition", lambda logs: logs[..., 0, :, :].exp()),
    "initial": ("log_initial", torch.exp),
    "mean": ("emission", lambda emission: emission.mean[..., 0, :]),
    "rates": ("rates", lambda q: q[..., 0, :, :].tril(-1) + q[..., 0, :, :].triu(1)),
    "duration": ("log_duration", lambda d: d.exp() @ torch.arange(1, d.size(-1) + 1).to(d)),
}


def _part(hmm: HMM, name: str) -> Tensor:
    attribute, function = PARTS[name]
    return function(getattr(hmm, attribute))


def predicted(
    information: Information, at: Any, of: str | Function, level: float, example: Sequences
) -> Bands:
    """Predictions at covariates ``at`` ``(M, C)``: see :meth:`Fit.predict`."""
    is_table = hasattr(at, "columns") or isinstance(at, dict)
    rows = torch.zeros(0) if is_table else torch.as_tensor(at, dtype=torch.float64)
    wanted = 0 if example.covariates is None else example.covariates.size(-1)
    if not wanted or rows.dim() != 2 or rows.size(1) != wanted:
        raise ValueError(
            f"at must be (M, C) = (M, {wanted}) covariates, such as design.matrix(frame), and data "
            "those that were fitted; got "
            f"{'a table' if is_table else f'shape {tuple(rows.shape)}'}."
        )
    hmm = information.hmm
    if isinstance(of, str) and not (of in PARTS and hasattr(hmm, PARTS[of][0])):
        known = [name for name, (attribute, _) in PARTS.items() if hasattr(hmm, attribute)]
        raise ValueError(f"of must be a function of an HMM, or what this model has, "
                         f"{' or '.join(known)}; got {of!r}.")  # fmt: skip
    function = partial(_part, name=of) if isinstance(of, str) else of
    some = example.values[example.observed][:1].unsqueeze(0)
    values = some.expand(len(rows), 2, *some.shape[2:])
    there = torch.full((len(rows),), 2)
    times = None if example.times is None else torch.arange(2.0).expand(len(rows), 2)
    data = Sequences(values, there, covariates=rows.unsqueeze(1).expand(-1, 2, -1), times=times)
    value, error = information.of(function, data)
    scale: Any = LOGIT if of in ("transition", "initial") else IDENTITY
    never_below = bool((example.values[example.observed] >= 0).all())
    if of in ("rates", "duration") or (of == "mean" and never_below and bool((value > 0).all())):
        scale = LOG
    low, high = (end.to(value) for end in bounds(hmm.emission))
    if of == "mean" and bool(high.isfinite().all()):
        scale = biject_to(constraints.interval(low, high)).inv
    point = scale(value)
    width = normal_quantile(level) * error * scale.log_abs_det_jacobian(value, point).exp()
    held = (error == 0) | ~point.isfinite()
    lower, upper = (
        torch.where(held, value, scale.inv(end)) for end in (point - width, point + width)
    )
    return Bands(value, lower, upper)


def table(information: Information, level: float) -> dict[str, list]:
    """Columns of a table of the estimates: see :meth:`Fit.table`."""
    errors, limits = information.std_errors(), information.intervals(level)
    found: dict[str, list] = {
        "parameter": [], "estimate": [], "std_error": [], "lower": [], "upper": []
    }  # fmt: skip
    for part in information.coordinates:
        own = information.names.get(part.name, names_of(part.name, part.estimate))
        found["parameter"] += own
        numbers = part.estimate, errors[part.name], *limits[part.name]
        for column, value in zip(list(found)[1:], numbers):
            found[column] += value.flatten().tolist()
    return found


def lines(columns: Mapping[str, list]) -> list[str]:
    """The rows of a table as text."""
    wide = max(len(name) for name in columns["parameter"])
    head = f"{'':{wide}}" + "".join(f"{name:>11}" for name in list(columns)[1:])
    rows = zip(*columns.values())
    text = [head]
    text += [f"{name:{wide}}" + "".join(f"{x:11.4g}" for x in rest) for name, *rest in rows]
    ends = zip(columns["parameter"], columns["estimate"], columns["std_error"])
    held = [name for name, x, error in ends if abs(x) > FLAT and not error <= abs(x)]
    if held:
        text.append(
            f"at the boundary, where limits say nothing: {', '.join(held)} (a logit or a logarithm "
            "that has run away: a probability or a rate of zero)"
        )
    loose = [
        name
        for name, x, error, low, high in zip(*columns.values())
        if (0 <= low < NONE and high > 1 - NONE)
        or (math.isnan(error) and NONE < abs(x) <= FLAT and abs(x - 1) > NONE)
    ]
    if loose:
        text.append(
            f"not determined by the data, with limits of all of the range or none: "
            f"{', '.join(loose)} (fewer states or columns, or a prior)"
        )
    return text


def described(fit: Any) -> list[str]:
    """Lines of text: the model, its loss, and why the fit ended."""
    count, tokens = min(fit.window, len(fit.losses)), fit.num_observed
    first, last = fit.losses[0].item(), fit.losses[-count:].mean().item()
    over = f", mean of the last {count} steps" if fit.window > 1 else ""
    guide = f" with {name_of(fit.guide)}" if fit.method == "SVI" else ""
    module = getattr(fit.model, "module", None)
    model = name_of(fit.model) + (f" of {name_of(module)}" if module is not None else "")
    text = [
        f"{fit.method} of {model}{guide}: {', '.join(fit.names) or 'parameters'}",
        f"loss      {first:.2f} -> {last:.2f} nats{over}",
        f"per {fit.unit.split()[-1]:<6}{last / max(tokens, 1):.4f} nats; {tokens:,} {fit.unit}s",
        f"ended     after {fit.num_steps} steps and {fit.seconds:.1f} s: {fit.reason}",
    ]
    if fit.validation:
        best = min(fit.validation, key=lambda past: past.nats)
        text.append(
            f"held out  {best.nats:.4f} nats per step, the best of {len(fit.validation)} "
            f"validations, at step {best.step}"
        )
    if fit.restarts is not None:
        ends = fit.restarts.final.sort().values
        text.append(
            f"restarts  {len(ends)}, losses {ends[0].item():.2f} (best), "
            f"{ends.median().item():.2f} (median), {ends[-1].item():.2f} (worst)"
        )
    text += [f"note      {note}" for note in fit.notes]
    return text


def name_of(part: Any) -> str:
    """The name of a function or of the class of an object."""
    return getattr(part, "__name__", type(part).__name__)
