"""The arguments of the recursions with durations, checked and in one form."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import check_broadcast, check_same_device
from ..._transforms import transforming
from ..dense.chain import check_arguments
from ..log_space import finite_or_zero
from ..masks import exists


class SegmentChain(NamedTuple):
    """N sequences in G groups that share a matrix and tables of durations, all in float64."""

    initial: Tensor  # (N, K), log
    transition: Tensor  # (G, K, K), log
    weights: (
        Tensor  # (2, 2, G, D, K), log, of segments by how much is seen: is it first, is it last
    )
    likelihood: Tensor  # (N, T, K), log, 0 at padded steps
    lengths: Tensor  # (N,), on the CPU

    def detach(self) -> SegmentChain:
        """Copy as constants, contiguous in memory."""
        return SegmentChain(*(part.detach().contiguous() for part in self))


class Segmented(NamedTuple):
    """A chain, the batch shape of its N sequences, and the dtype of what it was made of.

    The largest log-likelihood of each step is taken from all of it, so that sums of many steps lose
    fewer digits; ``shift`` ``(N,)`` is what the log evidence lacks.
    """

    chain: SegmentChain
    shift: Tensor
    batch: torch.Size
    dtype: torch.dtype


def arrange(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_weights: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
) -> Segmented:
    """Check the arguments, and bring them into one form by differentiable operations.

    ``log_weights`` ``(2, 2, *B, K, D)`` become ``weights``.
    """
    parts = check_arguments(log_initial, log_transition.unsqueeze(-3), log_likelihood, lengths)
    num_states = parts.initial.size(-1)
    shape = log_duration.shape
    if len(shape) < 2 or shape[-2] != num_states or shape[-1] < 1:
        raise ValueError(
            f"log_duration must have shape (*B, K, D) with K = {num_states} and D at least 1; got "
            f"{tuple(shape)}."
        )
    check_same_device({"log_likelihood": log_likelihood, "log_duration": log_duration})
    leads = {"log_duration": shape[:-2]}
    batch = check_broadcast({"the other arguments": parts.batch} | leads)
    leads["log_transition"] = log_transition.shape[:-2]
    split = max(
        len(batch) - len(lead) + place + 1 if size != 1 else 0
        for lead in leads.values()
        for place, size in enumerate((1, *lead), start=-1)
    )
    groups, count = math.prod(batch[:split]), math.prod(batch)

    def grouped(table: Tensor) -> Tensor:
        lead, core = table.shape[:-2], table.shape[-2:]
        lead = torch.Size((1,) * (len(batch) - len(lead))) + lead
        table = table.reshape(lead[:split] + core).double()
        return table.expand(batch[:split] + core).reshape(groups, *core)

    lengths = parts.lengths.expand(batch).reshape(count)
    likelihood = parts.logs.double()
    likelihood = likelihood.expand(*batch, *likelihood.shape[-2:])
    likelihood = likelihood.reshape(count, *likelihood.shape[-2:])
    if transforming() or bool((lengths < likelihood.size(1)).any()):
        padded = ~exists(lengths, likelihood.size(1), likelihood.device)
        likelihood = likelihood.masked_fill(padded.unsqueeze(-1), 0.0)
    largest = finite_or_zero(likelihood.detach().amax(-1, keepdim=True))
    likelihood, shift = likelihood - largest, largest.sum((-2, -1))
    initial = parts.initial.double().expand(*batch, num_states).reshape(count, num_states)
    tables = [grouped(table).mT for table in log_weights.flatten(0, 1)]
    weights = torch.stack(tables).unflatten(0, (2, 2))
    chain = SegmentChain(initial, grouped(log_transition), weights, likelihood, lengths)
    dtype = torch.promote_types(parts.dtype, log_duration.dtype)
    return Segmented(chain, shift, batch, dtype)
