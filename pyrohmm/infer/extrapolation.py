"""SQUAREM: EM accelerated by extrapolation, which never lowers the log joint density."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import transform_to

from .maximization import GradientSteps
from .parameters import Parameters

GROWTH = 4.0  # of the longest step when one of that length has succeeded
STATE = "path", "shapes", "proposed", "longest", "length"


class Extrapolation:
    r"""Steps of SQUAREM (Varadhan and Roland, 2008, Scandinavian Journal of Statistics 35).

    From two iterations of EM, :math:`\theta_0, \theta_1, \theta_2`, with
    :math:`r = \theta_1 - \theta_0` and :math:`v = \theta_2 - \theta_1 - r`, it proposes
    :math:`\theta_0 + 2 s r + s^2 v`, where :math:`s = |r| / |v|` in each restart. Coordinates are
    unconstrained, such as logarithms of probabilities; hard zeros stay.

    Args:
        parameters: Of the fit; they are set.
        gradient: Gradient steps, which may hold coordinates of their own.

    Attributes:
        proposed: Whether the parameters are a proposal that is to be judged.
    """

    def __init__(self, parameters: Parameters, gradient: GradientSteps) -> None:
        self.parameters, self.gradient = parameters, gradient
        self._transforms = {n: transform_to(site.support) for n, site in parameters.sites.items()}
        self.path: list[Tensor] = []  # coordinates (R, P) of iterations, then the proposal
        self.shapes: list[torch.Size] = []  # of the coordinates of each parameter
        self.proposed = False
        self.longest = torch.full((parameters.restarts, 1), GROWTH, dtype=torch.float64)
        self.length = torch.ones_like(self.longest)

    @torch.no_grad()
    def record(self) -> None:
        """Take the parameters of one more iteration, and propose others after two."""
        values, points = self.parameters.values, self.parameters.points
        latent = [to.inv(values[name].double()) for name, to in self._transforms.items()]
        pieces = latent + [point.double() for point in points]
        self.shapes = [piece.shape for piece in pieces]
        self.path.append(torch.cat([x.reshape(len(self.longest), -1) for x in pieces], 1))
        if len(self.path) < 3:
            return
        first, second, third = self.path
        step = second - first
        turn = third - second - step
        usable = turn.isfinite()
        step, turn = step.where(usable, 0.0), turn.where(usable, 0.0)
        length = step.norm(dim=-1, keepdim=True) / turn.norm(dim=-1, keepdim=True)
        self.length = length.nan_to_num(1.0).cpu().clamp(min=1.0).minimum(self.longest)
        s = self.length.to(step.device)
        self.path = [third]
        self.proposed = bool((self.length > 1).any())
        if self.proposed:  # at s = 1 it is the third
            self.path.append(third + 2 * (s - 1) * step + (s * s - 1) * turn)
            self._write(self.path[1])
        else:
            self._lengthen()

    @torch.no_grad()
    def undo(self, worse: Tensor) -> None:
        """Take back the proposals that are ``worse``, ``(R,)``, and have longer steps after others.

        Args:
            worse: Whether a proposal has lowered the log joint density, or has none.
        """
        third, proposal = self.path
        bad = worse.reshape(-1, 1)
        kept = torch.where(bad.to(third.device), third, proposal)
        self.proposed, self.path = False, []
        self._lengthen()
        self.longest = torch.where(bad, (self.length / GROWTH).clamp(min=1.0), self.longest)
        if bool(bad.any()):
            self._write(kept)

    def _lengthen(self) -> None:
        """Allow longer steps where the last one was as long as allowed."""
        self.longest = torch.where(self.length < self.longest, 1.0, GROWTH) * self.longest

    def _write(self, flat: Tensor) -> None:
        """Set the parameters to coordinates ``(R, P)``."""
        values, leaves = self.parameters.values, self.gradient.leaves
        sizes = [shape.numel() // len(flat) for shape in self.shapes]
        pieces = [x.reshape(shape) for x, shape in zip(flat.split(sizes, 1), self.shapes)]
        for (name, to), piece in zip(self._transforms.items(), pieces):
            values[name] = to(piece).to(values[name].dtype)
            if name in leaves:
                leaves[name].copy_(piece)
        for point, piece in zip(self.parameters.points, pieces[len(self._transforms) :]):
            point.copy_(piece)

    def state(self) -> dict[str, Any]:
        """State, for checkpoints."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for name in STATE:
            setattr(self, name, state[name])
