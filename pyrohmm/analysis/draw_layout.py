"""Samples of latent variables: where they come from, and how they lie in tensors.

Dimensions of samples stand to the left of those of the HMM's batch. A variable inside a plate of
sequences or of groups has that batch dimension already; one inside a plate over states, or inside
none, gets one of size 1. Which of the two a plate is, is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.infer import MCMC
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.guides import samples_of
from ..infer.models import check_returns_hmm, to_model_device
from ..infer.plates import (
    AtValues,
    Plates,
    SequencePlate,
    hmm_at,
    marks_of,
    sequence_plates,
    values_for,
)
from ..infer.results import Fit
from ..infer.sampled import SampledFit
from ..nn.base import PYRO, in_mode

Model = Callable[..., Any]
Values = Mapping[str, Tensor]
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

    def wide(self, values: Values, num_leading: int = 1) -> dict[str, Tensor]:
        """Samples with as many dimensions on the left, and then that of the HMM's batch."""
        return {
            name: value if name in self.batched else value.unsqueeze(num_leading)
            for name, value in values.items()
        }


def layout_of(model: Model, one: Values, data: Sequences) -> Layout:
    """The layout of the variables, of which ``one`` is a sample.

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
    _check_names(one, trace)
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
        frames = [frame for frame in trace.nodes[name]["cond_indep_stack"] if frame.vectorized]
        by_dim = {frame.dim: frame.name for frame in frames}
        depth = -min(by_dim, default=0)
        if depth:
            inside[name] = tuple(by_dim.get(d, f"{name}_dim_{d + depth}") for d in range(-depth, 0))
    return Layout(plates, inside, frozenset(inside))


def arranged(model: Model, values: Values, count: int, data: Sequences) -> tuple[Layout, HMM]:
    """The layout in which samples in a batch are what they are one by one; the first sample's HMM.

    Args:
        model: The Pyro model.
        values: Some samples ``(S, ...)``.
        count: S.
        data: The sequences.

    Raises:
        ValueError: If there is none, or names are wrong.
    """
    rows = [{name: value[i] for name, value in values.items()} for i in range(count)]
    layout = layout_of(model, rows[0], data)
    singles = [run(model, row, data, layout) for row in rows]
    wanted = torch.stack([single.log_prob(data.values) for single in singles])
    priors = torch.stack([log_prior(model, row, data, layout, 1)[0] for row in rows])
    for batched in dict.fromkeys([layout.batched, frozenset(layout.plates)]):
        tried = layout._replace(batched=batched)
        try:
            wide = tried.wide(values)
            hmm = run(model, wide, data, tried).expand(torch.Size([count, len(data)]))
            torch.testing.assert_close(hmm.log_prob(data.values), wanted, rtol=1e-3, atol=1e-3)
            together = log_prior(model, wide, data, tried, count)
            torch.testing.assert_close(together, priors, rtol=1e-3, atol=1e-3)
        except WRONG as error:
            reason = error
        else:
            return tried, singles[0]
    raise ValueError(
        "model must accept dimensions of samples to the left of its variables, and give each "
        "sample what it gives to it alone; this one does not. Count dimensions from the right: "
        "write matrix[..., 0, :], not matrix[0]."
    ) from reason


def run(model: Model, values: Values, data: Sequences, layout: Layout) -> HMM:
    """The HMM of the model with these values of its variables."""
    with in_mode(False, model):
        return hmm_at(model, values, data, layout.plates)


def log_prior(model: Model, values: Values, data: Sequences, layout: Layout, count: int) -> Tensor:
    """Log-density ``(S,)`` of S samples under the priors and the factors beside them."""
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


def own_from_prior(
    model: Model, known: Values, plates: Plates, shape: torch.Size, data: Sequences
) -> dict[str, Tensor]:
    """Samples ``(C, S, N, ...)`` of variables of each sequence from their prior, given ``known``.

    Args:
        model: The Pyro model.
        known: The other variables, ``(C, S, ...)``.
        plates: Of the variables to sample.
        shape: ``(C, S)``.
        data: N sequences.
    """
    flat = {name: value.flatten(0, 1) for name, value in known.items()}
    rows = []
    with PYRO, torch.no_grad(), poutine.block(), in_mode(False, model):
        for i in range(shape.numel()):
            with AtValues({name: value[i] for name, value in flat.items()}):
                nodes = poutine.trace(model).get_trace(data).nodes
            rows.append({name: nodes[name]["value"] for name in plates})
    new = {name: torch.stack([row[name] for row in rows]) for name in plates}
    return {name: value.unflatten(0, shape) for name, value in new.items()}


def _check_names(values: Values, trace: poutine.Trace) -> None:
    """Raise unless the values are those of the model's latent variables, all of them."""
    unknown = [name for name in values if name not in trace.nodes]
    missing = [
        name
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site["is_observed"] and name not in values
        and not site_is_subsample(site) and site["infer"].get("enumerate") != "parallel"
    ]  # fmt: skip
    if unknown or missing:
        raise ValueError(
            "values must be of the latent variables of the model, all of them; it has no "
            f"{', '.join(map(repr, unknown)) or 'other'}, and samples of "
            f"{', '.join(map(repr, missing)) or 'none'} are missing. Names in a model begin "
            "with 'module.'."
        )


# Where they come from ----------------------------------------------------------------------------


def samples_of_fit(
    fit: Fit, num_draws: int, data: Sequences | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Samples ``(C, S, ...)`` and what is known of each: of a sampler its chains.

    Of SVI one chain of samples of the guide, with their log-density; of MAP and EM the point.
    """
    if isinstance(fit, SampledFit):
        return fit.chains, fit.stats
    if fit.method != "SVI":
        return {name: fit.parameters[name][None, None] for name in fit.names}, {}
    with torch.no_grad(), fit.at_rest():
        values, scores = samples_of(fit.guide, fit.names, num_draws, data)
    stats = {"log_guide": scores.double()[None]}
    return {name: value[None] for name, value in values.items()}, stats


def marks_of_fitted(posterior: Any, model: Callable[..., Any]) -> Tensor | None:
    """Marks of the sequences of a fit, or of a sampler, if each has variables of its own."""
    if not isinstance(posterior, MCMC):
        return getattr(posterior, "fitted", None)
    # Pyro keeps the arguments of run
    arguments = (*getattr(posterior, "_args", ()), *getattr(posterior, "_kwargs", {}).values())
    data = next((part for part in arguments if isinstance(part, Sequences)), None)
    if data is None or not sequence_plates(model, to_model_device(model, None, data)):
        return None
    return marks_of(data)


def samples_by_name(samples: Any) -> dict[str, Tensor]:
    """Samples in a dict; raise if they are something else."""
    if isinstance(samples, Mapping):
        return dict(samples)
    raise TypeError(
        "posterior must be a fit, Pyro's MCMC after its run, or a dict of samples; got "
        f"{type(samples).__name__}. The data come after it."
    )


def samples_of_sampler(mcmc: MCMC) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Chains of a sampler, ``(C, S, ...)``, and which samples end a trajectory that diverged."""
    values = mcmc.get_samples(group_by_chain=True)
    shape = next(iter(values.values())).shape[:2]
    reports = mcmc.diagnostics() if shape[1] >= 4 else {}  # fewer have no diagnostics
    if "divergences" not in reports:
        return values, {}
    diverging = torch.zeros(shape, dtype=torch.bool)
    for chain in range(shape[0]):
        diverging[chain, reports["divergences"][f"chain {chain}"]] = True
    return values, {"diverging": diverging}


# Which dimensions run over states ----------------------------------------------------------------

# Names of the dimensions of the variables of TabularHMM, DenseHMM and others.
KNOWN_DIMS = {
    "initial": ("state",),
    "transition": ("state", "next_state"),
    "rates": ("state", "next_state"),
    "start": ("embedding",),
    "leave": ("state", "embedding"),
    "enter": ("state", "embedding"),
    "emit": ("state", "symbol_embedding"),
    "symbol": ("symbol", "symbol_embedding"),
}
STATE_DIMS = ("state", "next_state")  # what is permuted when states are renamed


def name_dims(
    shapes: Mapping[str, tuple[int, ...]],
    dims: Mapping[str, Sequence[str]],
    num_states: int,
    num_symbols: int,
    leading: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, tuple[str, ...]]:
    """Names of the dimensions of each variable: ``state``, ``next_state``, ``symbol``, ...

    Args:
        shapes: Of the variables, by name.
        dims: Names of the dimensions of some of them, which are kept.
        num_states: K; a first dimension of that size is taken for states.
        num_symbols: V, or 0 if observations are not symbols.
        leading: Names of the first dimensions of some of them, which are those of plates.
    """
    named: dict[str, tuple[str, ...]] = {}
    for variable, whole in shapes.items():
        plates = (leading or {}).get(variable, ())
        shape = whole[len(plates) :]
        path = variable.split(".")
        known = KNOWN_DIMS.get(path[-1], ())
        names = [f"{variable}_dim_{i}" for i in range(len(shape))]
        if variable in dims:
            names = list(dims[variable])
        elif len(known) == len(shape) > 0:
            names = list(known)
        elif shape[:1] == (num_states,):
            names[0] = "state"
            if shape == (num_states,) * 2 and "emission" not in path:
                names[1] = "next_state"
            elif len(shape) == 2 and shape[1] == num_symbols:
                names[1] = "symbol"
        named[variable] = tuple(names) if variable in dims else (*plates, *names)
    return named


def permute_dims(value: Tensor, dims: Sequence[str], order: Tensor) -> Tensor:
    """Permute the dimensions of states of ``value`` ``(C, S, ...)`` by ``order`` ``(C, S, K)``."""
    order = order.to(value.device)
    for place, name in enumerate(dims, start=2):
        if name in STATE_DIMS:
            shape = [1] * value.dim()
            shape[:2], shape[place] = order.shape[:2], order.size(-1)
            value = value.gather(place, order.reshape(shape).expand(value.shape))
    return value
