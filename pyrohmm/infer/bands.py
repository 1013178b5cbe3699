"""Predictions of a fitted HMM at other values of its covariates, with limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from ..data.sequences import Sequences
from ..distributions.hard_zeros import bounds
from ..distributions.hmm import HMM
from .coordinates import IDENTITY, LOG, LOGIT
from .uncertainty import Information, normal_quantile

PARTS: Mapping[str, tuple[str, Callable[[Any], Tensor]]] = {  # of an attribute of the HMM
    "transition": ("log_transition", lambda logs: logs[..., 0, :, :].exp()),
    "initial": ("log_initial", torch.exp),
    "mean": ("emission", lambda emission: emission.mean[..., 0, :]),
    "rates": ("rates", lambda q: q[..., 0, :, :].tril(-1) + q[..., 0, :, :].triu(1)),
    "duration": ("log_duration", lambda d: d.exp() @ torch.arange(1, d.size(-1) + 1).to(d)),
}


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


def _part(hmm: HMM, name: str) -> Tensor:
    attribute, function = PARTS[name]
    return function(getattr(hmm, attribute))


def predictions(
    information: Information, at: Any, of: Any, level: float, example: Sequences
) -> Bands:
    """Predictions at covariates ``at`` ``(M, C)``, with delta-method limits."""
    is_table = hasattr(at, "columns") or isinstance(at, dict)
    rows = torch.zeros(0) if is_table else torch.as_tensor(at, dtype=torch.float64)
    wanted = 0 if example.covariates is None else example.covariates.size(-1)
    if not wanted or rows.dim() != 2 or rows.size(1) != wanted:
        raise ValueError(
            f"at must be (M, C) = (M, {wanted}) covariates, such as design.matrix(frame); got "
            f"{'a table' if is_table else f'shape {tuple(rows.shape)}'}."
        )
    hmm = information.hmm
    if isinstance(of, str) and not (of in PARTS and hasattr(hmm, PARTS[of][0])):
        known = [name for name, (attribute, _) in PARTS.items() if hasattr(hmm, attribute)]
        raise ValueError(f"of must be a function of an HMM, or the name of a part it has: "
                         f"{' or '.join(known)}; got {of!r}.")  # fmt: skip
    function = partial(_part, name=of) if isinstance(of, str) else of
    some = example.known_values[:1].unsqueeze(0)
    values = some.expand(len(rows), 2, *some.shape[2:])
    there = torch.full((len(rows),), 2)
    times = None if example.times is None else torch.arange(2.0).expand(len(rows), 2)
    data = Sequences(values, there, covariates=rows.unsqueeze(1).expand(-1, 2, -1), times=times)
    value, error = information.of(function, data)
    scale: Any = LOGIT if of in ("transition", "initial") else IDENTITY
    never_below = bool((example.known_values >= 0).all())
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
