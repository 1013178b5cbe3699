r"""Variables of new sequences given their data: adaptive importance sampling.

Each sequence has C candidates for its own variables, in unconstrained coordinates u. Their weights,
given the shared variables :math:`\theta`, are

.. math:: w_c = p(x \mid u_c, \theta) \, p(u_c \mid \theta) / q(u_c)

and one candidate is taken in proportion to them. At first q is the prior. Where the weights are too
uneven, q becomes half the prior and half a Student t distribution about the weighted candidates,
and the candidates are made anew (population Monte Carlo: Cappé et al., 2004, Journal of
Computational and Graphical Statistics 13). It is fitted by weights to a power below one, so that
they are never those of a few candidates (Koblents and Míguez, 2015, Statistics and Computing 25).
"""

from __future__ import annotations

import math
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import MultivariateStudentT
from torch import Tensor

from .._checks import warn_caller
from ..data.sequences import Sequences
from ..distributions.sparse import interior
from ..nn.base import PYRO, in_mode
from .coordinates import coordinates
from .layouts import Model, Values
from .plates import AtValues, Plates

STEPS = 2**20  # of all candidates that are computed at once
TAILS = 5.0  # degrees of freedom of the proposal
SHARE = 1 / 8  # of the candidates, as many as are effective, for which a proposal is kept
ROUNDS = 40  # proposals for one sequence
FEWEST = 10  # effective candidates, below which a sample is not one of the posterior


class _Candidates(AtValues):
    """Messenger that sets shared variables, and in some rows those of the sequences.

    Args:
        values: Of the shared variables.
        plates: Of the variables of sequences; discrete ones are sampled from the prior.
        proposed: Coordinates of these variables, ``(R, D)``, NaN in rows that keep samples of the
            prior; ``(R, 0)`` if all rows do.

    Attributes:
        free: Their coordinates ``(R, D)``.
        log_prior: Log prior density of the coordinates, ``(R,)``.
    """

    def __init__(self, values: Values, plates: Plates, proposed: Tensor) -> None:
        super().__init__(values)
        self.plates, self.proposed = plates, proposed
        self.free = proposed.new_zeros(len(proposed), 0)
        self.log_prior = proposed.new_zeros(len(proposed))

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["name"] not in self.plates or msg["fn"].support.is_discrete:
            return
        prior, dim = msg["fn"], self.plates[msg["name"]].dim
        to = coordinates(prior.support)
        place = to.inv(interior(to.codomain, msg["value"])).movedim(dim - to.domain.event_dim, 0)
        flat = place.reshape(len(place), -1)
        given = self.proposed[:, self.free.size(1) :][:, : flat.size(1)].to(flat)
        flat = torch.where(given.isnan(), flat, given) if given.size(1) else flat
        place = flat.reshape(place.shape).movedim(0, dim - to.domain.event_dim)
        msg["value"] = to(place)
        score = prior.log_prob(msg["value"]) + to.log_abs_det_jacobian(place, msg["value"])
        self.log_prior += score.movedim(dim, 0).reshape(len(flat), -1).sum(1).to(self.log_prior)
        self.free = torch.cat([self.free, flat.to(self.free)], 1)


def sample_new(
    model: Model, known: Values, shape: torch.Size, data: Sequences, plates: Plates, count: int
) -> dict[str, Tensor]:
    """Variables of new sequences by name, ``(*S, ...)``, given their data and shared ones.

    Warns if fewer than ten of ``count`` candidates are effective, in a tenth of the samples.

    Args:
        model: The Pyro model.
        known: Samples of the variables that sequences share, ``(*S, ...)``, by name.
        shape: ``(*S)``.
        data: The new sequences.
        plates: Of the variables of sequences.
        count: C, candidates of each sequence; one is a sample of the prior.
    """
    rows, sizes, near = [], torch.zeros(shape.numel(), len(data)).double(), count // 2
    proposal: Any = None  # of the last sample, which may do for the next one
    unchecked = pyro.validation_enabled(False)  # candidates far out, whose weight is zero
    with PYRO, torch.no_grad(), poutine.block(), in_mode(False, model), unchecked:
        for number, size in enumerate(sizes):
            values = {name: x.flatten(0, len(shape) - 1)[number] for name, x in known.items()}
            found: list[Tensor] = []
            left = torch.arange(len(data))
            for _ in range(ROUNDS):
                proposed = torch.zeros(count, len(left), 0).double()
                if proposal:
                    student = MultivariateStudentT(TAILS, *(part[left] for part in proposal))
                    proposed = student.sample((count,))
                    proposed[near:] = torch.nan
                logs, prior, free, *own = _scored(model, values, data, plates, left, proposed)
                if proposal:
                    close = student.log_prob(free) + math.log(near / count)
                    logs = logs + prior - close.logaddexp(prior + math.log1p(-near / count))
                logs = logs.masked_fill(logs.isnan(), -torch.inf)
                # the largest is a sample in proportion to the weights
                place = (logs - torch.empty_like(logs).exponential_().log()).argmax(0)
                found = found or [value[0].clone() for value in own]
                for every, value in zip(found, own):
                    every[left] = value[place, torch.arange(len(left))]
                size[left] = _effective(logs)
                low = ~(size[left] >= SHARE * count)
                if free.size(-1) == 0 or not bool(low.any()):
                    break
                fitted = _fitted(free, logs)
                proposal, left = proposal or fitted, left[low]
                for part, new in zip(proposal, fitted):
                    part[left] = new[low]
            rows.append(found)
    few = sizes.nan_to_num(0.0).quantile(0.1, 0)
    if count > 1 and bool((few < FEWEST).any()):
        warn_caller(
            f"fewer than {FEWEST} effective candidates in a tenth of the samples, of "
            f"{int((few < FEWEST).sum())} of {len(data)} new sequences; of sequence "
            f"{int(few.argmin())} {few.min():.1f} of {count}. Its variables are not samples of the "
            f"posterior: set num_candidates={10 * max(count, FEWEST)}."
        )
    stacked = zip(plates.items(), map(torch.stack, zip(*rows)))
    return {n: x.movedim(1, plate.value_dim).unflatten(0, shape) for (n, plate), x in stacked}


def _scored(
    model: Model, values: Values, data: Sequences, plates: Plates, left: Tensor, proposed: Tensor
) -> list[Tensor]:
    """Log-likelihoods and log priors ``(C, n)`` of candidates, their coordinates, and values.

    ``left`` are the numbers of the n sequences.
    """
    parts = []
    for some in proposed.split(max(1, STEPS // data[left].num_rows)):
        more = data[numbers := left.repeat(len(some))]  # all at once
        more.indices = data.indices[numbers.to(data.indices.device)]
        with _Candidates(values, plates if len(proposed) > 1 else {}, some.flatten(0, 1)) as own:
            nodes = poutine.trace(model).get_trace(more).nodes
        likelihood = nodes["_RETURN"]["value"].log_prob(more.values).to(own.log_prior)
        each = (nodes[name]["value"].movedim(p.value_dim, 0) for name, p in plates.items())
        parts.append([likelihood, own.log_prior, own.free, *each])
    return [torch.cat(part).unflatten(0, proposed.shape[:2]) for part in zip(*parts)]


def _effective(logs: Tensor) -> Tensor:
    """Effective numbers ``(N,)`` of candidates with log weights ``(C, N)``."""
    return 1 / logs.softmax(0).square().sum(0)


def _fitted(free: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """Centres ``(N, D)`` and roots of covariances of weighted candidates ``(C, N, D)``."""
    enough, dim = SHARE * len(free), free.size(-1)
    power = torch.ones_like(logs[0])
    while bool((low := ~(_effective(power * logs) >= enough) & (power > 1e-6)).any()):
        power = torch.where(low, power / 2, power)
    share = (power * logs).softmax(0).nan_to_num(1 / len(free)).unsqueeze(-1)
    centre = (share * free).sum(0)
    apart = share.sqrt() * (free - centre)
    matrix = torch.einsum("cni,cnj->nij", apart, apart)
    # correlations are uncertain where candidates are few
    alone = (matrix.diagonal(dim1=-2, dim2=-1) + 1e-12).diag_embed()
    return centre, torch.linalg.cholesky((enough * matrix + dim * alone) / (enough + dim))
