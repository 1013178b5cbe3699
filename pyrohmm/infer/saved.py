"""Fits in files: what a file holds of a fit, and how it is read back, for code that is given."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import autoguide
from torch import Tensor, nn
from torch.distributions import biject_to
from torch.func import functional_call

from ..data.sequences import Sequences, check_sequences
from ..distributions.hmm import HMM
from ..io.files import TENSORS, FilePath, grouped, kinds, made_with, read_directory
from ..io.persistence import check_made, check_same, describe
from ..nn.base import PYRO, HMMModule, in_mode
from .descent import Validation
from .laplace import LaplaceFit
from .models import MarginalModel, to_model_device
from .objective import is_enumerated, latent_sites
from .plates import Point, SequencePlate, outside_modules, repeatable
from .process_group import ProcessGroup
from .results import Fit
from .sampled import SampledFit
from .training import scaled_priors

CODE = "model", "guide", "params", "supports", "restarts"  # of a fit, that no file holds
GUIDES = (  # that a file may name, built for the model alone
    "AutoNormal AutoDiagonalNormal AutoMultivariateNormal AutoLowRankMultivariateNormal AutoDelta"
).split()


@describe.register
def _(fit: Fit) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of a fit: its fields, parameters that its code holds, and its HMM if there is one."""
    code, classes = _code(fit)
    parts: dict[str, Any] = code | {"coordinates": _coordinates(fit)}
    meta: dict[str, Any] = {"kind": "fit", "class": type(fit).__name__, "code": classes}
    meta["made"] = made_with(fit.model)
    for name in [each.name for each in fields(fit) if each.name not in CODE]:
        value = getattr(fit, name)
        if isinstance(value, Tensor):
            parts[name] = {"": value}
        elif isinstance(value, dict) and all(isinstance(x, Tensor) for x in value.values()):
            parts[name] = value
        else:
            meta[name] = value
    try:
        parts["hmm"], meta["hmm"] = describe(_one_hmm(fit))
    except TypeError as error:
        meta["hmm"] = str(error)
    tensors = {f"{part}.{name}": x for part, held in parts.items() for name, x in held.items()}
    return tensors, json.loads(json.dumps(meta | {"order": list(tensors)}))


def _code(fit: Fit) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Parameters that the code of a fit holds, by part and name; its classes, or of the module."""
    code = {"model": fit.model} | ({"guide": fit.guide} if fit.method == "SVI" else {})
    state = {n: part.state_dict() for n, part in code.items() if isinstance(part, nn.Module)}
    if fit.method != "Laplace":  # whose points are all in its parameters
        state["params"] = outside_modules(fit.params, fit.model, fit.guide)["params"]
    held = code | {"model": getattr(fit.model, "module", None) or fit.model}
    return state, {f"class of {name}": type(part).__qualname__ for name, part in held.items()}


def _coordinates(fit: Fit) -> dict[str, Tensor]:
    """Unconstrained coordinates in which an autoguide of SVI is, at the parameters."""
    if fit.method != "SVI" or not isinstance(fit.guide, autoguide.AutoGuide):
        return {}
    return {name: biject_to(fit.supports[name]).inv(fit.parameters[name]) for name in fit.names}


def _one_hmm(fit: Fit) -> HMM:
    """The fitted HMM, of one step; raises TypeError if there is none for all data."""
    if getattr(fit.model, "module", None) is not None and not fit.plates:
        with suppress(ValueError):  # such as that there are no covariates
            hmm = fit.hmm(Sequences(torch.zeros(1, 1), torch.tensor([1])))
            if not (hmm.transition_per_step or hmm.emission_per_step):
                return hmm
    raise TypeError("its model is a function of the data.")


def load_fit(
    directory: FilePath,
    model: Callable[..., Any],
    data: Sequences,
    guide: Callable[..., Any] | None = None,
) -> Fit:
    """Load a fit that :func:`pyrohmm.save` has written, for its model; it answers as it did.

    The code of model and guide is not saved. Their parameters without priors are set in place, as
    :func:`load_into` does. ``restarts`` are not kept.

    Args:
        directory: Where ``save(fit, directory)`` has put it.
        model: The Pyro model; or a module, for ``MarginalModel(module)``.
        data: Sequences that the model takes, fitted or new: it is run on them once, to compare.
        guide: That of :func:`fit_svi`, built anew. By default one of the class that was saved, if
            that is one of Pyro's which need the model alone, such as ``AutoNormal``.

    Raises:
        FileNotFoundError: If nothing was saved there.
        TypeError: If ``directory`` is not the name of one.
        ValueError: If the files are damaged, hold something else, or differ from model or guide in
            names, shapes or classes, or in hyperparameters or the design of a module, which are
            told; then nothing has changed.

    Example:
        >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
        >>> model = MarginalModel(TabularHMM(2, categorical(6)))
        >>> fit = fit_svi(model, pyro.infer.autoguide.AutoNormal(model), data, num_iterations=10)
        >>> directory = getfixture("tmp_path") / "fit"
        >>> save(fit, directory)
        >>> again = load_fit(directory, MarginalModel(TabularHMM(2, categorical(6))), data)
        >>> again.score(data) == fit.score(data)
        True
    """
    tensors, meta = read_directory(directory, "fit")
    check_sequences("data", data)
    try:
        return _loaded(directory, tensors, meta, model, data, guide)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        text = f"{Path(directory) / TENSORS} does not describe a fit of what is given"
        raise ValueError(f"{text}: {error!r}") from error


def _loaded(
    directory: FilePath, tensors: dict[str, Any], meta: Any, model: Any, data: Sequences, guide: Any
) -> Fit:
    """The fit that a file describes; what the file says of its tensors is read from them."""
    tensors = {name: tensors[name] for name in meta["order"]}
    model = MarginalModel(model) if isinstance(model, HMMModule) else model
    check_made(directory, meta.get("made", {}), model, "what is given")
    data = to_model_device(model, guide, data)
    kind = {each.__name__: each for each in (Fit, LaplaceFit, SampledFit)}[meta["class"]]
    parts = grouped(tensors)
    own = [each.name for each in fields(kind) if each.name not in CODE]
    given: dict[str, Any] = {"parameters": {}} | {name: meta[name] for name in own if name in meta}
    given |= {name: parts[name].get("", parts[name]) for name in own if name in parts}
    for name in {"parameters", "chains"} & given.keys():
        given[name] = {n: value.to(data.device) for n, value in given[name].items()}
    plates = given.get("plates", {}).items()
    given["plates"] = {name: SequencePlate(*plate) for name, plate in plates}
    given["validation"] = [Validation(*past) for past in meta["validation"]]
    values = given["parameters"]
    if given["method"] != "SVI":
        guide = Point({name: values[name] for name in given["names"]})
    elif guide is None:
        if (known := meta["code"]["class of guide"]) not in GUIDES:
            raise ValueError(f"guide must be the {known} of the fit; got None. Build it anew.")
        guide = getattr(autoguide, known)(poutine.block(model, hide_fn=is_enumerated))
    if given["plates"] and len(data) != len(given["marks"]):
        data = data[[0] * len(given["marks"])]  # as many as were fitted
    unknown = [n for n, x in getattr(model, "named_buffers", dict)() if bool(x.isnan().any())]
    fitted = {name: parts["model"][name].to(data.device) for name in unknown}
    run = partial(functional_call, model, fitted) if fitted else model
    with (
        PYRO, repeatable(), pyro.get_param_store().scope() as params, poutine.block(),
        torch.no_grad(), in_mode(False, model, guide),
        scaled_priors(getattr(model, "module", None), data, ProcessGroup()),
    ):  # fmt: skip
        trace = poutine.trace(run).get_trace(data)
        guide(data)
    supports, params = latent_sites(trace)[0], outside_modules(params, model, guide)
    fit = kind(model=model, guide=guide, params=params, supports=supports, **given)
    state, here = _code(fit)
    there, known = dict(meta["code"]), trace.nodes.keys() & {*supports, *fit.names}
    here |= {name: str(tuple(trace.nodes[name]["value"].shape)) for name in known}
    there |= {name: str(tuple(values[name].shape)) for name in fit.names}
    for part in ("model", "guide", "params"):
        for names, all_of in ((here, state), (there, parts)):
            names |= {f"{part}: {name}": kind for name, kind in kinds(all_of.get(part, {})).items()}
    check_same(directory, there, here, "what is given")
    found = _coordinates(fit)
    for name, value in parts.get("coordinates", {}).items():
        if not torch.allclose(found[name].cpu(), value, 1e-4, 1e-6):
            text = f"the prior of {name!r} has the unit of the data, and these are in another"
            raise ValueError(f"{text}. Give the sequences that were fitted.")
    with torch.no_grad():
        for part, held in state.items():
            for name, value in held.items():
                value.copy_(parts[part][name])
    return fit
