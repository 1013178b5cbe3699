"""Initial parameters of EM: samples of the prior, clusters of the observations, or a fitted HMM.

A start is any function of ``(module, data, restarts)`` that returns parameters, or what a first
M-step reads: see :class:`Start`.
"""

from __future__ import annotations

from typing import Any, Protocol

import pyro
import torch
from pyro import poutine
from scipy.cluster.vq import ClusterError, kmeans2
from torch import Tensor, nn

from ..chains.base import ExpectedCounts
from ..data.sequences import Sequences
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.hmm import HMM
from ..nn.base import PYRO, HMMModule
from .models import build

Values = dict[str, Tensor]


class Start(Protocol):
    """Initial parameters of EM."""

    def __call__(
        self, module: HMMModule, data: Sequences, restarts: int
    ) -> Values | Tensor | ExpectedCounts:
        """Parameters, or what a first M-step reads.

        Returns:
            Values of the latent variables by name, ``(R, 1, ...)``; or probabilities of the states
            at each step, ``(R, N, T, K)``; or expected counts, whose ``state_probs`` have that
            shape.
        """


def from_prior(module: HMMModule, data: Sequences, restarts: int) -> Values:
    """Start from samples of the prior, one for each restart."""
    with PYRO, torch.no_grad(), poutine.block(), pyro.plate("restarts", restarts, dim=-2):
        trace = poutine.trace(lambda: build(module, data)).get_trace()
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


def sticky(stay: float = 0.95) -> Start:
    """Start from the prior, with transitions that are rare, as in genomes and speech.

    Rows of the transition matrix are ``stay`` on the diagonal, and a sample of the prior for the
    rest. A start whose states change at each step may take hundreds of iterations to find states
    that last, or end at a worse optimum.

    Args:
        stay: Probability of a state to follow itself; states last 1 / (1 - stay) steps on average.

    Example:
        >>> data = Sequences.from_list([[0] * 20 + [1] * 20])
        >>> module = TabularHMM(2, categorical(2))
        >>> fit = fit_em(module, data, start=starts.sticky(0.9), restarts=4)
    """

    def start(module: HMMModule, data: Sequences, restarts: int) -> Values:
        values = from_prior(module, data, restarts)
        if "transition" not in values:
            raise ValueError(
                "starts.sticky needs a module with a prior of its transition matrix, such as "
                f"TabularHMM; {type(module).__name__} has none."
            )
        rows = values["transition"]
        mixed = stay * torch.eye(rows.size(-1)).to(rows) + (1 - stay) * rows
        return values | {
            "transition": torch.where(
                rows.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) > 0, mixed, rows
            )
        }

    return start


def by_kmeans(module: HMMModule, data: Sequences, restarts: int) -> Tensor:
    """Start from k-means clusters of the observations, which are scaled to unit variance.

    Missing steps belong to all clusters alike; missing components are filled by their means.
    """
    num_states = build_once(module, data[:1]).num_states
    values = data.values.double().reshape(len(data), data.num_steps, -1)
    seen = data.observed.cpu()
    rows = values.cpu()[seen]
    weights = torch.full((restarts, *seen.shape, num_states), 1.0 / num_states, dtype=torch.float64)
    if len(rows) == 0:
        return weights.to(data.values.device)
    rows = torch.where(rows.isnan(), rows.nanmean(0).nan_to_num(0.0), rows)
    spread = rows.std(0, correction=0)
    rows = (rows - rows.mean(0)) / torch.where(spread > 0, spread, 1.0)
    for restart in range(restarts):
        # not quite certain, so that no state and no transition is ruled out
        clusters = nn.functional.one_hot(_cluster(rows, num_states), num_states).double()
        weights[restart, seen] = 0.99 * clusters + 0.01 / num_states
    return weights.to(data.values.device)


def _cluster(rows: Tensor, num_states: int) -> Tensor:
    """Cluster of each row; at random if there are too few rows that differ."""
    enough = len(rows.unique(dim=0)) >= max(num_states, 2)
    for _ in range(5 if enough else 0):
        seed = int(torch.randint(2**31, ()))
        try:
            labels = kmeans2(rows.numpy(), num_states, minit="++", seed=seed, missing="raise")[1]
        except (ClusterError, ValueError):  # a cluster has lost its points
            continue
        return torch.as_tensor(labels).long()
    return torch.randint(num_states, (len(rows),))


def from_hmm(hmm: HMM) -> Start:
    """Start from the posterior of the states under a fitted HMM, of any emission family.

    Args:
        hmm: Its parameters are used, not its lengths. All restarts start alike.
    """

    def start(module: HMMModule, data: Sequences, restarts: int) -> ExpectedCounts:
        times = {"times": data.times} if isinstance(hmm, ContinuousTimeHMM) else {}
        model = hmm.replace(lengths=data.lengths, observed=data.observed, allowed=None, **times)
        if data.labels is not None:
            model = model.restrict(data.labels)
        counts = model.expected_counts(data.values)
        return ExpectedCounts(
            counts.log_evidence,
            counts.state_probs.expand(restarts, *counts.state_probs.shape),
            {name: n.expand(restarts, 1, *n.shape) for name, n in counts.counts.items()},
        )

    return start


def fitted_in(model: Any) -> list[tuple[str, Tensor]]:
    """The parameters without a prior of a module, by name; none of a function."""
    named = model.named_parameters() if isinstance(model, nn.Module) else ()
    return [(name, point) for name, point in named if point.requires_grad]


def set_point(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter of a module that has no prior, in place."""
    path, _, last = name.rpartition(".")
    part = module.get_submodule(path)
    if last in part._parameters:
        part._parameters[last].data.copy_(value)  # type: ignore[union-attr]
    else:
        setattr(part, last, value.clone())  # which is trained in place


def build_once(module: HMMModule, data: Sequences) -> HMM:
    """One HMM from the module, with samples of its priors."""
    with PYRO, torch.no_grad(), poutine.block():
        return build(module, data)
