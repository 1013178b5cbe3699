r"""Log marginal likelihoods of copies of a model, by quadrature or by Laplace's approximation.

A single number of each sequence is integrated by the trapezoidal rule, with nodes around its
posterior mean, as far apart as its posterior standard deviation asks for. That is exact to rounding
for normal densities, and stays finite where two modes of a density merge and Laplace's
approximation, which all other effects have, is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to

from ..data.sequences import Sequences
from .coordinates import Packing
from .models import to_model_device
from .objective import log_joint
from .parameters import Values
from .plates import is_likelihood
from .uncertainty import CELLS, doubled

NEWTON = 60  # steps to the most probable effects
NODES = 31  # of quadrature, the fewest
FIRST_NODES = 241  # where nothing is known, so that narrow modes are seen
MOST_NODES = 961
CLOSE = 1e-6  # nats of a member by which twice the nodes may differ
REACH = 6.5  # standard deviations from the mean to the last node
EDGE = 1e-8  # share of the posterior at a node, above which nodes reach beyond it
MOVES = 40  # of the nodes, at most


class Marginal:
    """Log marginal likelihoods of B copies of a model, random effects integrated out.

    Args:
        model: Of any precision; it is copied in double precision.
        data: The sequences, on any device.
        random: Names of the random effects, in one plate of G members.

    Attributes:
        modes: ``(B, G, d)``, where the search for the most probable effects starts, or where the
            nodes are, in unconstrained coordinates.
        widths: ``(B, G, 1)``, posterior standard deviations, or more where tails are heavy or modes
            are apart; None without quadrature.
        nodes: Number of nodes, of quadrature.
        resolved: Whether nodes were as many and as wide as the last :meth:`settle` asked for.
    """

    def __init__(self, model: Callable[..., Any], data: Sequences, random: Sequence[str]) -> None:
        self.model, self.data = doubled(model), to_model_device(model, None, data).to(torch.float64)
        with poutine.block(), torch.no_grad(), pyro.get_param_store().scope():
            nodes = poutine.trace(self.model).get_trace(self.data).nodes
        self.random = {name: _plated_site(nodes, name) for name in random}
        stacks = [site["cond_indep_stack"] for site in self.random.values()]
        plates = {stack[0].name if stack else "(outside)" for stack in stacks}
        if len(plates) != 1:
            text = f"random must name variables in one plate; got {sorted(plates)}"
            raise ValueError(f"{text}. Leave out those of others.")
        self.plated = bool(stacks[0])
        self.members = stacks[0][0].size if self.plated else 1
        priors = {name: site["fn"] for name, site in self.random.items()}
        to: Any = {name: biject_to(prior.support) for name, prior in priors.items()}
        shapes = {name: to[name].inverse_shape(prior.event_shape) for name, prior in priors.items()}
        self.packing = Packing(to, shapes)
        self.size = sum(self.packing.sizes)
        self.modes = torch.zeros(1, self.members, self.size, dtype=torch.double)
        (self.plate,) = plates
        inside = [
            self.plate in {frame.name for frame in site["cond_indep_stack"]}
            for site in nodes.values()
            if site["type"] == "sample" and is_likelihood(site)
        ]
        self.widths: Any = torch.ones_like(self.modes) if self.size == 1 and all(inside) else None
        self.nodes, self.resolved = FIRST_NODES, True
        self.num_states = nodes["_RETURN"]["value"].num_states
        self.cells = len(data) * data.num_steps * self.num_states

    @property
    def room(self) -> int:
        """Number of copies of the model evaluated in one batch, as memory allows."""
        passes = 1 + self.size if self.widths is None else self.nodes
        return max(1, CELLS // (self.cells * passes))

    def single(self, b: Tensor) -> Values:
        """Random effects of one copy at coordinates ``(G, d)``, by name."""
        effects = {name: x.to(self.data.device) for name, x in self.packing.values(b).items()}
        return effects if self.plated else {name: x.squeeze(0) for name, x in effects.items()}

    def joint(self, values: Values, b: Tensor) -> Tensor:
        """Log joint densities ``(B',)``, of the effects in their coordinates ``(B', G, d)``."""
        own, rest = self.terms(values, b)
        return own.sum(-1) + rest

    def terms(self, values: Values, b: Tensor) -> tuple[Tensor, Tensor]:
        """Log joint densities of the members ``(B', G)``, and of sites outside their plate."""
        effects = self.packing.values(b)
        every = {name: value.to(self.data.device) for name, value in (values | effects).items()}
        joint, _ = log_joint(self.model, self.data, every, len(b))
        own, rest = torch.zeros(()), torch.zeros(())
        for scores, site in joint.sites.values():
            scores = scores.to(b.device)
            if self.plate in {frame.name for frame in site["cond_indep_stack"]}:
                own = own + scores.reshape(-1, *scores.shape[-2:]).sum(0)
            else:
                rest = rest + scores.sum(-1).reshape(-1, len(b)).sum(0)
        return own + self.packing.log_volume(b, effects), rest.expand(len(b))

    def derivatives(self, values: Values, b: Tensor, graph: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Log joints ``(B',)``, gradients ``(B', G, d)`` and blocks of the negative Hessian."""
        with torch.enable_grad():
            total = self.joint(values, b)
            (slope,) = torch.autograd.grad(total.sum(), b, create_graph=True)
            keep: Any = {"create_graph": graph, "retain_graph": True}
            parts = [torch.autograd.grad(each.sum(), b, **keep) for each in slope.unbind(-1)]
        blocks = -torch.stack([part for (part,) in parts], -1)
        return total, slope, (blocks + blocks.mT) / 2

    def check_independent(self, values: Values) -> None:
        """Raise unless random effects of different members are independent given all else."""
        b = self.modes[:1].clone().requires_grad_()
        one = {name: value[:1].detach() for name, value in values.items()}
        with torch.enable_grad():
            total = self.joint(one, b)
            (slope,) = torch.autograd.grad(total.sum(), b, create_graph=True)
            across = torch.autograd.grad(slope[:, 0].sum(), b)[0][:, 1:]
        if bool((across.abs() > 1e-8).any()):
            raise ValueError("effects must be independent given all else; if not, use fit_mcmc.")

    @torch.no_grad()
    def climb_inside(self, values: Values, b: Tensor) -> Tensor:
        """Posterior modes of the effects, by Newton steps of all members and copies at once."""
        known = {name: value.detach() for name, value in values.items()}
        share, step = torch.ones(len(b), dtype=b.dtype), torch.zeros_like(b)
        best, going = torch.full_like(share, -torch.inf), torch.ones(len(b), dtype=torch.bool)
        for _ in range(NEWTON):
            tried = b + share.reshape(-1, 1, 1) * step
            at = tried.clone().requires_grad_()
            total, slope, blocks = self.derivatives(known, at, graph=False)
            better = (total >= best - 1e-11 * best.abs()) & blocks.isfinite().flatten(1).all(-1)
            wide = better.reshape(-1, 1, 1)
            b, best = torch.where(wide, tried, b), torch.where(better, total, best)
            new = _uphill(blocks.nan_to_num(0.0), slope.detach().nan_to_num(0.0))
            step = torch.where(wide, new, step)
            share = torch.where(better, 1.0, share / 4)
            gap = (new * slope).sum((1, 2)).abs()
            going = going & ~(better & (gap < 1e-18)) & (share > 1e-6)
            share = share * going
            if not bool(going.any()):
                break
        return b.detach()

    def __call__(
        self, values: Values, leaf: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log marginals ``(B',)``, gradients by ``leaf``; centres and precisions of the effects.

        The centres ``(B', G, d)`` are posterior means of quadrature, or else modes; the inverse
        spreads ``(B', G, d, d)`` those of posterior variances, or minus second derivatives.

        Args:
            values: The parameters of the copies by name, which depend on ``leaf``.
            leaf: ``(B', P)``.
            rows: ``(B',)``, which copies these are.
        """
        if self.widths is not None:
            with torch.enable_grad():
                each, rest, mean, variance, _ = self._by_nodes(values, rows, self.nodes)
                total = each.sum(-1) + rest
                (gradient,) = torch.autograd.grad(total.sum(), leaf)
            return total.detach(), gradient, mean, 1 / variance.unsqueeze(-1)
        b = self.climb_inside(values, self.modes[rows]).requires_grad_()
        total, slope, blocks = self.derivatives(values, b, graph=True)
        with torch.enable_grad():
            root, wrong = torch.linalg.cholesky_ex(blocks)
            eye = torch.eye(b.size(-1), dtype=b.dtype)
            root = torch.where((wrong > 0)[..., None, None], eye, root)
            logdet = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum((-1, -2))
            total = total + b[0].numel() / 2 * math.log(2 * math.pi) - logdet / 2
            (pull,) = torch.autograd.grad(total.sum(), b, retain_graph=True)
            # d b / d theta = H^-1 d slope / d theta
            weights = torch.cholesky_solve(pull.unsqueeze(-1), root.detach()).squeeze(-1)
            moved = total.sum() + (slope * weights).sum()
            (gradient,) = torch.autograd.grad(moved, leaf)
        total = total.detach().masked_fill((wrong > 0).any(-1), -torch.inf)
        return total, gradient, b.detach(), blocks.detach()

    def at(
        self, values_of: Callable[[Tensor], Values], places: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """Log marginals, gradients, centres and precisions at points ``(B', P)``, in chunks."""
        found = []
        for some, chosen in zip(places.split(self.room), rows.split(self.room)):
            with torch.enable_grad():
                leaf = some.detach().clone().requires_grad_()
                found.append(self(values_of(leaf), leaf, chosen))
        return tuple(torch.cat(parts) for parts in zip(*found))

    def _by_nodes(self, values: Values, rows: Tensor, count: int) -> tuple[Tensor, ...]:
        """Log marginals of members by quadrature ``(B', G)``, terms outside the plate, posteriors.

        Returns:
            These two; and of the posterior of each member the mean, the variance, and how far from
            the mean it extends, infinite if beyond the last nodes, ``(B', G, 1)``.
        """
        z = torch.linspace(-REACH, REACH, count, dtype=torch.double)[:, None, None]
        parts = []
        for some in z.split(max(1, CELLS // (self.cells * len(rows)))):
            b = self.modes[rows].unsqueeze(1) + self.widths[rows].unsqueeze(1) * some
            wide = {name: value.repeat_interleave(len(some), 0) for name, value in values.items()}
            own, rest = self.terms(wide, b.flatten(0, 1))
            parts.append((b, own.unflatten(0, (-1, len(some))), rest[:: len(some)]))
        b, logs = (torch.cat([part[i] for part in parts], 1) for i in range(2))
        share = logs.detach().softmax(1).unsqueeze(-1)
        mean = (share * b).sum(1)
        apart = (b - mean.unsqueeze(1)).abs()
        extent = torch.where(share > EDGE, apart, 0.0).amax(1)
        extent = torch.where(share[:, [0, -1]].amax(1) > EDGE, torch.inf, extent)
        step = 2 * REACH / (count - 1) * self.widths[rows].squeeze(-1)
        variance = (share * apart.square()).sum(1)
        return logs.logsumexp(1) + step.log(), parts[0][2], mean, variance, extent

    @torch.no_grad()
    def settle(self, values: Values, rows: Tensor) -> Tensor:
        """Centre quadrature nodes, or modes, on the posterior of the effects; returns the centres.

        Nodes are as many as leave the integral as it is if there are twice as many.
        """
        if self.widths is None:
            self.modes[rows] = self.climb_inside(values, self.modes[rows])
            return self.modes[rows]
        edge = self._move(values, rows)
        self.nodes = NODES
        here = self._by_nodes(values, rows, NODES)[0]
        while True:
            finer = self._by_nodes(values, rows, 2 * self.nodes - 1)[0]
            self.resolved = edge and bool(((finer - here).abs() < CLOSE).all())
            if self.resolved or not edge or self.nodes >= MOST_NODES:
                return self.modes[rows]
            self.nodes, here = 2 * self.nodes - 1, finer

    def _move(self, values: Values, rows: Tensor) -> bool:
        """Adapt quadrature nodes to the posteriors; whether these lie within the nodes."""
        for _ in range(MOVES):
            _, _, mean, variance, extent = self._by_nodes(values, rows, self.nodes)
            old, centre, outside = self.widths[rows], self.modes[rows], extent.isinf()
            # few nodes see nothing of a narrow posterior; all that there is must stay inside
            inner = variance.sqrt().maximum(old / 2).maximum(1.2 * extent / REACH)
            width = torch.where(outside, 2 * old, inner)
            self.modes[rows], self.widths[rows] = mean, width
            if bool(((mean - centre).abs() / width + (width / old).log().abs() < 0.1).all()):
                break
        return not bool(outside.any())

    def widen(self, copies: int) -> None:
        """Repeat the centres and widths of the first copy for ``copies`` copies."""
        self.modes = self.modes[:1].repeat(copies, 1, 1)
        if self.widths is not None:
            self.widths = self.widths[:1].repeat(copies, 1, 1)


def _uphill(blocks: Tensor, slope: Tensor) -> Tensor:
    """Newton ascent steps, with the absolute eigenvalues of the negative Hessian blocks."""
    values, vectors = torch.linalg.eigh(blocks)
    values = values.abs().clamp(min=1e-6)
    along = vectors.mT @ slope.unsqueeze(-1)
    step = (vectors @ (along / values.unsqueeze(-1))).squeeze(-1)
    return step / step.norm(dim=-1, keepdim=True).clamp(min=1.0)  # of one unit at most


def _plated_site(nodes: Any, name: str) -> Any:
    """The site of a random effect, which must be in at most one plate."""
    site = nodes.get(name)
    latent = site is not None and site["type"] == "sample" and not site["is_observed"]
    plates = len(site["cond_indep_stack"]) if latent else 0
    if not latent or plates > 1 or len(site["fn"].batch_shape) != plates:
        hidden = [s for s in nodes.values() if s["type"] == "sample" and not s["is_observed"]]
        known = ", ".join(s["name"] for s in hidden if s["cond_indep_stack"]) or "none"
        raise ValueError(
            f"random must name variables in the last plate, or events outside; got {name!r}. In "
            f"plates are {known}."
        )
    return site
