"""Posterior samples by name from a fit or from a sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.infer import MCMC
from torch import Tensor

from ..data.sequences import Sequences
from ..infer.guide_samples import samples_of
from ..infer.models import to_model_device
from ..infer.plates import marks_of, sequence_plates
from ..infer.results import Fit
from ..infer.sampled import SampledFit


def samples_of_fit(
    fit: Fit, num_draws: int, data: Sequences | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Samples ``(C, S, ...)`` and what is known of each: of a sampler its chains.

    Of SVI one chain of samples of the guide, with their log-density; of MAP and EM the point.
    """
    if isinstance(fit, SampledFit):
        return fit.chains, fit.stats
    if fit.method != "SVI":
        return {name: value[None, None] for name, value in fit.values.items()}, {}
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
