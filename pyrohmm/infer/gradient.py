"""Fits by gradient steps: ``fit_svi``, and ``fit_map``, from several initial values if wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Unpack, cast

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, init_to_sample, init_to_value
from torch import nn

from .._checks import check_kind, names_checked
from .._choices import first_values
from ..data.parts import Parts, first_sequence, parts_of
from ..data.sequences import Sequences
from ..distributions.autoregressive import with_past
from ..distributions.sparse import interior
from ..nn.base import PYRO, HMMModule
from ..nn.closed_form import under, with_priors
from ..nn.tabular import SharedRows
from .coordinates import POINT
from .descent import MINIBATCHES, FitOptions, Settings
from .models import EnumeratedModel, MarginalModel, exclusive, to_model_device
from .objective import is_enumerated, latent_sites, trace_of_batchable
from .parameters import Values, check_start, fitted_in, set_point
from .plates import Point, check_events, narrow
from .results import WINDOW, Fit, Restarts
from .starts import by_kmeans, seen_by
from .training import train


@names_checked
@exclusive()
def fit_svi(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Sequences | Iterable[Sequences],
    *,
    num_iterations: int = 1000,
    learning_rate: float = 0.01,
    tolerance: float | None = None,
    batch_size: int | None = None,
    validation: Sequences | None = None,
    **options: Unpack[FitOptions],
) -> Fit:
    r"""Maximise the evidence lower bound (ELBO) :math:`E_q[\log p(x, \theta) - \log q(\theta)]`.

    The fit runs on the device of the parameters; with minibatches the data may stay on the host.
    Two runs after the same ``pyro.set_rng_seed`` are equal. Modules are in ``train()`` mode during
    steps, in ``eval()`` mode for held-out data and where a :class:`Fit` is used.

    With ``checkpoint`` the fit saves its state at its end and every ten seconds, less often where
    that would take more than 5 % of the time. The same call
    resumes from there: after the process was killed, or with more ``num_iterations``. On a CPU it
    ends with the same bits as one that was never killed. The file of another fit is refused:
    compared are the data, the numbers, text and tensors that arguments are or keep, shapes of
    parameters, and functions and classes by name; not the code of functions and classes, what they
    read from elsewhere, nor the values of parameters, for which there is ``name``. Free to change
    are ``num_iterations``, ``tolerance``, ``patience``, ``progress`` and ``report``.

    Threads that fit wait for each other, as Pyro keeps its state in the process; queries of an
    :class:`HMM` run in parallel. A fit inside another, such as in its ``log_prior``, is one by
    itself.

    Where ``torch.distributed`` has been initialised, all ranks of ``group`` make the same call,
    with the same seed and the whole data, and each takes its shard of every batch. The result is
    that of one process, to rounding, and the same bits in all ranks.

    Args:
        model: A Pyro model that takes :class:`Sequences`.
        guide: A Pyro guide that takes the same, such as ``AutoNormal(model)``. If the model
            enumerates states, build it over ``poutine.block`` of the model, as Pyro asks for. An
            autoguide gets a unique name, so that parameters of two guides never mix.
        data: The sequences; or an iterable of such, as for :func:`fit_map`.
        num_iterations: Largest number of gradient steps.
        learning_rate: Of Adam, if there is no ``optimizer``.
        tolerance: End when the mean loss of 25 steps is below that of the 25 before by less than
            this share of itself. None takes all steps, which noisy losses may need.
        batch_size: Number of sequences in a minibatch; all of them by default. The likelihood is
            scaled to the whole set, priors are not.
        validation: Held-out sequences. The fit ends with the parameters of the largest held-out
            evidence: at the medians of latent variables if the guide has them, else at a sample.
        **options: Further arguments: :class:`FitOptions` explains them.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        FileNotFoundError: If the directory of ``checkpoint`` does not exist.
        TypeError: If an argument is of the wrong type, ``model`` is a module that builds an HMM, or
            the model returns no HMM for ``validation``.
        ValueError: If a number is out of range, arguments exclude or need each other, there is
            nothing to fit, processes start differently, or ``checkpoint`` is that of another fit.
        RuntimeError: Under ``torch.inference_mode``.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> model = MarginalModel(TabularHMM(1, categorical(2)))
        >>> data = Sequences.from_list([[1, 1, 0]])
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> fit = fit_svi(model, guide, data, num_iterations=500, learning_rate=0.05)
        >>> abs(fit.losses[-100:].mean() - math.log(12)) < 0.1  # the evidence is 1/12
        tensor(True)
    """
    return train(locals(), model, lambda *_: guide, "SVI")


@names_checked
@exclusive()
def fit_map(
    model: Callable[..., Any],
    data: Sequences | Iterable[Sequences],
    *,
    num_iterations: int = 1000,
    learning_rate: float = 0.05,
    tolerance: float | None = 1e-5,
    start: Callable[..., Any] | Values | Fit = init_to_sample,
    restarts: int = 1,
    batch_size: int | None = None,
    validation: Sequences | None = None,
    priors: bool = True,
    **options: Unpack[FitOptions],
) -> Fit:
    r"""Maximise the posterior density :math:`\log p(\theta \mid x)` by gradient steps.

    The maximum is that of the density of the probabilities themselves, not of their logits.
    Parameters without a prior are fitted by maximum likelihood at the same time, in place.

    Args:
        model: A Pyro model that takes ``data``, such as :class:`MarginalModel`.
        data: The sequences; or an iterable of such, whose gradients are added at each step.
        num_iterations: Largest number of gradient steps.
        learning_rate: Of Adam, if there is no ``optimizer``.
        tolerance: Least relative fall of the loss over 25 steps; None takes all steps.
        start: Initial values: an ``init_to_*`` function of Pyro's autoguides, values by name, or
            another fit. By default samples of the prior; modes given clusters where it is flat.
        restarts: R, the number of initial values, fitted as one batch: the model must accept
            ``(R, 1)`` on the left of every latent variable. The best is returned.
        batch_size: Number of sequences in a minibatch; all of them by default.
        validation: Held-out sequences: see :func:`fit_svi`.
        priors: False for maximum likelihood (see :func:`fit_em`) of a copy of the model, a module.
        **options: Further arguments: :class:`FitOptions` explains them.

    Raises:
        FloatingPointError: If the loss becomes infinite or NaN.
        TypeError, ValueError: As :func:`fit_svi`; for a :class:`StickyHDPHMM`; or if restarts
            would share a parameter, have enumerated states, ``validation`` or ``elbo``.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> model = MarginalModel(TabularHMM(2, categorical(2)))
        >>> fit = fit_map(model, data, num_iterations=200, learning_rate=0.2)
        >>> fit.hmm(data).log_prob(data.values).sum().round(decimals=1)  # 2 log 1/2
        tensor(-1.4000)
    """
    arguments = dict(locals())
    start = start.start if isinstance(start, Fit) else start
    model = model if priors else with_priors(copy.deepcopy(model), priors)
    supports: dict[str, Any] = {}  # of one of several restarts

    @wraps(model, assigned=(), updated=())  # so that inspect.unwrap finds the model
    def batched(batch: Sequences) -> Any:
        with pyro.plate("restarts", restarts, dim=-2):
            return model(batch)

    def guide_of(data: Sequences | Parts, settings: Settings) -> AutoDelta:
        init = partial(_interior_value, _init_function(start, model, data, restarts))
        if restarts == 1:
            _begin_points(model, start, data)
            return AutoDelta(poutine.block(model, hide_fn=is_enumerated), init_loc_fn=init)
        supports.update(_check_restarts(model, data, settings, restarts))
        return AutoDelta(batched, init_loc_fn=init)

    fit = train(arguments, model if restarts == 1 else batched, guide_of, "MAP", restarts)
    return fit if restarts == 1 else _best(fit, model, supports)


def _check_restarts(
    model: Callable[..., Any], data: Sequences | Parts, settings: Settings, restarts: int
) -> dict[str, Any]:
    """Supports of one restart; raise unless several can be fitted as one batch."""
    for name in ("validation", "elbo"):
        if settings[name] is not None:
            raise ValueError(
                f"{name} needs restarts=1: fit the restarts without it, and give start=fit."
            )
    whole = all(settings[name] is None for name in MINIBATCHES)  # type: ignore[literal-required]
    example = data.buckets[0] if whole and isinstance(data, Sequences) else first_sequence(data)
    with pyro.get_param_store().scope():
        trace = trace_of_batchable(model, to_model_device(model, None, example), restarts)
    supports = latent_sites(trace)[0]
    latent = [trace.nodes[name] for name in supports]
    check_events({site["name"]: site["fn"] for site in latent if not site["cond_indep_stack"]})
    return supports


def near_data(module: HMMModule, data: Sequences | Parts, count: int) -> Values:
    """K-means starting values ``(count, ...)`` of emission parameters with flat priors, by name.

    They are the modes given clusters of the observations, under the priors as they are scaled;
    none of other emissions.
    """
    emission: Any = module.emission_module()
    parts = emission.modules() if hasattr(emission, "m_step") else ()
    if not any(getattr(part, "flat", False) for part in parts):
        return {}
    data = seen_by(by_kmeans, next(iter(parts_of(data))))
    numbers = (*module.parameters(), *module.buffers())
    like = next(part for part in numbers if part.is_floating_point())
    with PYRO, torch.no_grad(), poutine.block(), first_values(like.device):
        weights = by_kmeans(module, data, count)[:, data.observed].to(like.device)
        values = with_past(emission(), data.values)[data.observed].to(like)
        mode, _ = emission.m_step(emission.statistics(values, weights, None))
    known = {n: x.to(like) for n, x in mode.items() if not bool(x.isnan().any())}
    return under("module.emission.", known)


def _begin_points(
    model: Callable[..., Any], values: Callable[..., Any] | Values, data: Sequences | Parts
) -> None:
    """Start parameters without a prior at ``values``: of a module, or in the parameter store."""
    if not isinstance(values, Mapping):
        return
    if isinstance(model, nn.Module):
        for name in (name.removesuffix(POINT) for name, _ in fitted_in(model)):
            if name in values:
                set_point(model, name, values[name])
        return
    store = pyro.get_param_store()
    with poutine.block(), torch.no_grad():
        model(data if isinstance(data, Sequences) else first_sequence(data))
        for name in list(store):
            if name in values:
                store[name] = values[name].clone()
            else:
                del store[name]


def _init_function(
    start: Callable[..., Any] | Values, model: Any, data: Sequences | Parts, restarts: int
) -> Callable[..., Any]:
    """Initialisation function of autoguides at ``start``."""
    if start is init_to_sample and isinstance(model, MarginalModel | EnumeratedModel):
        found = near_data(model.module, data, restarts)
        wide = {n: x.unsqueeze(1) if restarts > 1 else x[0] for n, x in found.items()}
        return init_to_value(values=wide, fallback=init_to_sample)
    if callable(start):
        return start
    wanted = "a function such as init_to_sample, values by name, or a fit"
    check_kind("start", start, Mapping, wanted)
    values = dict(start)

    def init(site: dict[str, Any]) -> Any:
        check_start(values, [site["name"]])
        return init_to_value(site, values)

    return init


def _interior_value(init: Callable[..., Any], site: dict[str, Any]) -> Any:
    """An initial value off the boundary of its space, where gradient steps can start."""
    if isinstance(site["fn"], SharedRows):
        raise ValueError(
            f"fit_map looks for the most probable value, and {site['name']} of a StickyHDPHMM has "
            "none: its density is infinite where a state is never entered. Use fit_svi, or NUTS, "
            "of the same model; or fit_map of a TabularHMM with concentrations of at least one."
        )
    return interior(site["fn"].support, init(site)).clone()  # the optimizer changes it in place


def _best(fit: Fit, model: Callable[..., Any], supports: dict[str, Any]) -> Fit:
    """Fit of the best of batched restarts, with all restarts in ``Fit.restarts``."""
    losses = fit.losses.T  # (R, steps)
    losses = losses.masked_fill(~losses.isfinite(), torch.inf)
    final = losses[:, -1] if losses.size(1) < WINDOW else losses[:, -WINDOW:].mean(-1)
    nodes = cast(AutoDelta, fit.guide).prototype_trace.nodes
    plated = frozenset(name for name in fit.names if len(nodes[name]["cond_indep_stack"]) > 1)
    values = narrow(fit.parameters, plated)
    best = int(final.argmin())
    failed = int((~final.isfinite()).sum())
    notes = [f"{failed} of {len(final)} restarts ended at infinity"] if failed else []
    return replace(
        fit,
        model=model,
        supports=supports,
        guide=Point({name: value[best] for name, value in values.items()}),
        losses=losses[best],
        restarts=Restarts(model, losses, final, values, best, plated, fit.plates, fit.marks),
        parameters={name: value[best] for name, value in values.items()},
        notes=fit.notes + notes,
        history={name: part[:, best] for name, part in fit.history.items()},
    )
