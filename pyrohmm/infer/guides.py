"""Samples, and one value, of any guide; and a guide that is a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta
from pyro.infer.autoguide import AutoContinuous, AutoGuide, AutoNormal
from pyro.nn import PyroModule
from torch import Tensor

from ..data.sequences import Sequences


def for_guide(guide: Callable[..., Any], data: Sequences | None) -> Sequences | None:
    """Arguments with which ``guide`` gives the variables of all sequences."""
    return None if isinstance(guide, AutoGuide) else data


def point_of(guide: Callable[..., Any], data: Sequences | None) -> dict[str, Tensor]:
    """One value of each latent variable: the median of ``guide`` if it has one, else a sample."""
    data = for_guide(guide, data)
    if hasattr(guide, "median"):
        try:
            return guide.median(data)
        except NotImplementedError:
            pass
    trace = poutine.trace(guide).get_trace(data)
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


def samples_of(
    guide: Callable[..., Any], names: Sequence[str], count: int, data: Sequences | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """S samples of the latent variables by name, ``(S, ...)``; log-density of each, ``(S,)``."""
    data = for_guide(guide, data)
    first = poutine.trace(guide).get_trace(data)
    plated = {name for name in names if first.nodes[name]["cond_indep_stack"]}
    deep = (frame.dim for name in plated for frame in first.nodes[name]["cond_indep_stack"])
    if isinstance(guide, AutoNormal | AutoContinuous) and min(deep, default=-1) == -1:
        with pyro.plate("draws", count, dim=-2):  # these can sample as a batch
            trace = poutine.trace(guide).get_trace(data)
        trace.compute_log_prob()
        values = {name: trace.nodes[name]["value"] for name in names}
        values = {name: v if name in plated else v.squeeze(1) for name, v in values.items()}
        sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
        scores = [site["log_prob"] for site in sites if site["log_prob"].dim()]
        return _detached(values), torch.stack([score.sum(1) for score in scores]).sum(0)
    traces = [poutine.trace(guide).get_trace(data) for _ in range(count)]
    values = {name: torch.stack([trace.nodes[name]["value"] for trace in traces]) for name in names}
    totals = [torch.as_tensor(trace.log_prob_sum()) for trace in traces]
    return _detached(values), torch.stack(totals)


@contextmanager
def repeatable() -> Iterator[None]:
    """A context with random numbers that are the same every time; those outside of it go on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _detached(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in values.items()}


class Point(PyroModule):
    """A guide that is a single point: a Delta distribution for each latent variable.

    Args:
        values: By name; buffers of the module.
    """

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = list(values)
        for index, value in enumerate(values.values()):
            self.register_buffer(f"value_{index}", value.detach().clone())

    def forward(self, *_: Any) -> dict[str, Tensor]:
        """Sample each site from its Delta distribution."""
        values = {name: getattr(self, f"value_{index}") for index, name in enumerate(self.names)}
        return {
            name: pyro.sample(name, Delta(value, event_dim=value.dim()))
            for name, value in values.items()
        }
