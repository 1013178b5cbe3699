"""Posterior samples by name from a fit or from a sampler."""

from __future__ import annotations

import pyro
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoContinuous, AutoNormal
from torch import Tensor

from ..infer.guides import RotationGuide
from ..infer.results import Fit


def samples_of_fit(fit: Fit, num_draws: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One chain of S samples of the guide, ``(1, S, ...)``; of SVI also its log-density at each."""
    inner = fit.guide.inner if isinstance(fit.guide, RotationGuide) else fit.guide
    with torch.no_grad(), fit.at_rest():
        first = poutine.trace(fit.guide).get_trace(None)
        plain = not any(site.get("cond_indep_stack") for site in first.nodes.values())
        if plain and isinstance(inner, AutoNormal | AutoContinuous):  # these can sample as a batch
            with pyro.plate("draws", num_draws, dim=-2):
                trace = poutine.trace(fit.guide).get_trace(None)
            trace.compute_log_prob()
            values = {name: trace.nodes[name]["value"].squeeze(1) for name in fit.names}
            scores = torch.stack(
                [site["log_prob"] for site in trace.nodes.values() if site["type"] == "sample"]
            ).sum((0, 2))
        else:
            traces = [poutine.trace(fit.guide).get_trace(None) for _ in range(num_draws)]
            values = {
                name: torch.stack([trace.nodes[name]["value"] for trace in traces])
                for name in fit.names
            }
            scores = torch.stack([torch.as_tensor(trace.log_prob_sum()) for trace in traces])
    stats = {"log_guide": scores.double()[None]} if fit.method == "SVI" else {}
    return {name: value.detach()[None] for name, value in values.items()}, stats


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
