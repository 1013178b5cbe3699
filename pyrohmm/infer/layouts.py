"""Layouts of a model's variables: whether samples of a posterior may lie side by side in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor

from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.base import PYRO, in_mode
from .models import check_returns_hmm
from .objective import is_close, latent_sites, num_copies
from .plates import AtValues, SequencePlate, hmm_at, sequence_plates, values_for, wide

Model = Callable[..., Any]
Values = Mapping[str, Tensor]
SIDE_BY_SIDE = "model must accept samples on the left"
WRONG = (ValueError, RuntimeError, IndexError, AssertionError)


class Layout(NamedTuple):
    """Layout of a model's latent variables: dimensions of samples, states and sequences.

    Attributes:
        plates: Of the variables of which each sequence has one, by name.
        inside: Names of the plates around each variable that is inside some, left to right.
        batched: The variables whose plates are batch dimensions of the HMM.
    """

    plates: dict[str, SequencePlate]
    inside: dict[str, tuple[str, ...]]
    batched: frozenset[str]


def layout_of(model: Model, one: Values, data: Sequences) -> Layout:
    """Layout of the latent variables of a model, of which ``one`` is a sample.

    Raises:
        ValueError: If ``one`` does not hold the latent variables of the model, all of them.
    """
    with PYRO, torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
        try:
            with AtValues(one):
                trace = poutine.trace(model).get_trace(data)
        except WRONG:  # they are of other sequences, or none are of the model
            trace = poutine.trace(model).get_trace(data)
    check_returns_hmm(trace.nodes["_RETURN"]["value"])
    if one.keys() != (names := latent_sites(trace)[0].keys()):
        wrong = ", ".join(one.keys() ^ names)
        text = f"samples must be of the latent variables, {', '.join(names)}"
        raise ValueError(f"{text}; {wrong} are lacking or unknown. Give them all.")
    plates = sequence_plates(model, data, trace)
    for name in one.keys() - plates.keys():
        found, wanted = tuple(one[name].shape), tuple(trace.nodes[name]["fn"].shape())
        if found != wanted:
            raise ValueError(
                f"samples of {name!r} must have shape (C, S, *) with * = {wanted}, chains first; "
                f"got * = {found}. Give the MCMC itself, or get_samples(group_by_chain=True)."
            )
    inside = {}
    for name in one:
        frames = trace.nodes[name]["cond_indep_stack"]
        if by_dim := {frame.dim: frame.name for frame in frames if frame.vectorized}:
            depth = -min(by_dim)
            inside[name] = tuple(by_dim.get(d, f"{name}_dim_{d + depth}") for d in range(-depth, 0))
    return Layout(plates, inside, frozenset(inside))


def arranged(model: Model, values: Values, count: int, data: Sequences) -> tuple[Layout, HMM]:
    """Layout for which batched samples have the densities of single ones; HMM of the first sample.

    Args:
        model: The Pyro model.
        values: Some samples ``(S, ...)``.
        count: S.
        data: The sequences.

    Raises:
        ValueError: If there is none, or names are wrong.
    """
    rows = [{name: value[i] for name, value in values.items()} for i in range(count)]
    reason: Exception | None = None
    layout = layout_of(model, rows[0], data)
    singles = [run(model, row, data, layout) for row in rows]
    wanted = torch.stack([single.log_prob(data.values) for single in singles])
    priors = torch.stack([log_prior(model, row, data, layout, 1)[0] for row in rows])
    copies = num_copies(data, singles[0].num_states, rows[0].values()) if count > 1 else 1
    chosen = torch.arange(copies) % count
    values = {name: value[chosen] for name, value in values.items()}
    for batched in dict.fromkeys([layout.batched, frozenset(layout.plates)]):
        tried = layout._replace(batched=batched)
        try:
            several = wide(values, batched)
            hmm = run(model, several, data, tried).expand(torch.Size([copies, len(data)]))
            close = is_close(wanted[chosen], hmm.log_prob(data.values), values, data.num_steps)
            together = log_prior(model, several, data, tried, copies)
            if close and is_close(priors[chosen], together, values, 1):
                return tried, singles[0]
        except WRONG as error:
            reason = error
    several = wide(values, layout.batched)
    raise ValueError(_refused(model, rows[0], several, data, layout)) from reason


def _refused(model: Model, row: Values, several: Values, data: Sequences, layout: Layout) -> str:
    """Text that names the variables to which dimensions of samples cannot be added."""
    named = []
    for name, value in several.items():
        wide = "".join(f", {size}" for size in value.shape[1:])
        shapes = f"{name!r}, {tuple(row[name].shape)}, as (S{wide})"
        try:
            hmm = run(model, {**row, name: value}, data, layout)
            hmm.expand(torch.Size([len(value), len(data)])).log_prob(data.values)
        except WRONG:
            named.append(shapes)
    return (
        f"{SIDE_BY_SIDE}, a dimension for them and one for sequences"
        + f"; it does not take {' nor '.join(named)}" * bool(named)
        + ". Write matrix[..., 0, :], not matrix[0]; beside data of each step level.unsqueeze(-2)."
    )


def run(model: Model, values: Values, data: Sequences, layout: Layout) -> HMM:
    """HMM that the model returns when its latent variables have these values."""
    with in_mode(False, model):
        return hmm_at(model, values, data, layout.plates)


def log_prior(model: Model, values: Values, data: Sequences, layout: Layout, count: int) -> Tensor:
    """Log prior density ``(S,)`` of S samples, ``pyro.factor`` terms included."""
    total = torch.zeros(count, dtype=torch.float64, device=data.values.device)
    with PYRO, torch.no_grad(), poutine.block(), in_mode(False, model):
        with AtValues(values_for(values, data, layout.plates)):
            trace = poutine.trace(model).get_trace(data)
        for name, site in trace.nodes.items():
            factor = isinstance(site.get("fn"), Unit) and not site["cond_indep_stack"]
            if name in values or factor:
                scores = site["fn"].log_prob(site["value"]).double()
                total += scores.reshape(count, -1).sum(-1) if scores.dim() else scores
    return total
