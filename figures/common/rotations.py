r"""A guide over embeddings that have no preferred direction.

The probabilities of a :class:`DenseHMM` depend on inner products of embeddings, so that its
posterior is the same for an array of embeddings M ``(n, D)``, one in each row, and for M Q, with Q
any orthogonal matrix. A normal guide covers one point of that orbit, which costs it nats.

Here only what rotation leaves invariant is fitted. Every M of full rank is

.. math:: M = L Q, \quad L \text{ lower trapezoidal with a positive diagonal}, \quad
          dM = \prod_{i=1}^{r} L_{ii}^{D - i} \, dL \, dQ, \quad r = \min(n, D)

in exactly one way. If L has density q(L), and Q is uniform, then M has the density

.. math:: q(M) = q(L) \Big/ \prod_{i=1}^{r} L_{ii}^{D - i} |S^{D - i}|, \quad
          |S^{d - 1}| = 2 \pi^{d / 2} / \Gamma(d / 2)

where the areas of spheres multiply to the volume of all Q. This holds for every n and D, and the
evidence lower bound is as exact as with any other guide. Where data determine the embeddings it is
larger than that of the same autoguide on the embeddings themselves, by log 2 for each array with
D = 1, by more with larger D. Renaming states is another symmetry, of which the guide covers one
order only, as every autoguide does.

References:
    Aspects of Multivariate Statistical Theory (Muirhead, 1982), section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyro
import scipy.linalg
import torch
from pyro import poutine
from pyro.distributions import Delta, Normal
from pyro.infer.autoguide import AutoGuide, AutoNormal, init_to_value
from torch import Tensor

from pyrohmm import DenseHMM, Sequences
from pyrohmm.nn.base import OwnParameters

_SMALLEST = 0.1  # of the diagonal at the start: embeddings may lie in a plane there


class RotationGuide(OwnParameters):
    """A guide with uniformly rotated embeddings; the invariant rest has an autoguide.

    Args:
        model: The Pyro model.
        start: Initial values of all its latent variables by name: ``fit.start`` of a fit by MAP or
            EM.
        groups: Names of the embeddings that are rotated together, ``(D,)`` or ``(n, D)`` each. By
            default those of every :class:`DenseHMM` in the model. (Where one of a group is held
            constant, no rotation is left, and the group is treated as any other variables.)
        autoguide: Called with a model and ``init_loc_fn``, returns an autoguide:
            ``partial(AutoNormal, init_scale=0.1)``.

    Raises:
        ValueError: If there is nothing to rotate, or embeddings of a group differ in D.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        start: Mapping[str, Tensor],
        groups: Sequence[Sequence[str]] | None = None,
        autoguide: Callable[..., AutoGuide] = AutoNormal,
    ) -> None:
        super().__init__()
        groups = _groups(model) if groups is None else groups
        if not groups:
            raise ValueError(
                "model has no embeddings that can be rotated: no DenseHMM all of whose embeddings "
                "have priors. Use an autoguide, or name embeddings: groups=[['leave', 'enter']]."
            )
        for name in (name for names in groups for name in names):
            if name not in start:
                raise ValueError(f"start must hold {name!r} of groups; got {sorted(start)}.")
        self._parts = [
            _Group(f"rotated_{i}", {name: start[name] for name in names})
            for i, names in enumerate(groups)
        ]
        for i, part in enumerate(self._parts):  # saved with the guide: its parameters need them
            self.register_buffer(f"rows_{i}", part.rows)
        values = {name: value.detach() for name, value in start.items()}
        for part in self._parts:
            values = {name: value for name, value in values.items() if name not in part.shapes}
            values[part.name] = part.start
        reduced = partial(_reduced, model=model, parts=self._parts)
        self.inner = autoguide(reduced, init_loc_fn=init_to_value(values=values))

    def forward(self, data: Sequences | None = None) -> dict[str, Tensor]:
        """Sample all latent variables."""
        auxiliary = {part.name for part in self._parts}
        inner = poutine.infer_config(
            self.inner, lambda site: {"is_auxiliary": True} if site["name"] in auxiliary else {}
        )
        values = inner(data)
        for part in self._parts:
            lower = part.triangular(values.pop(part.name))
            diagonal = lower.diagonal(dim1=-2, dim2=-1)
            density = -log_orbit(diagonal, part.dim) - diagonal.log().sum(-1)  # from its logarithm
            for name, value in part.split(lower @ uniform_rotation(lower, part.dim)).items():
                event = len(part.shapes[name])
                values[name] = pyro.sample(name, Delta(value, density, event))
                density = torch.zeros_like(density)
        return values


def log_orbit(diagonal: Tensor, dim: int) -> Tensor:
    r"""Log-volume ``(*B)`` of the orbit of L: of all M = L Q, with Q orthogonal.

    .. math:: \sum_{i=1}^{r} \left( (D - i) \log L_{ii} + \log |S^{D - i}| \right)

    Args:
        diagonal: ``(*B, r)``, of L, positive.
        dim: D.
    """
    free = dim - torch.arange(diagonal.size(-1)).to(diagonal)  # dimension of each sphere's space
    area = math.log(2) + free / 2 * math.log(math.pi) - torch.lgamma(free / 2)
    return ((free - 1) * diagonal.log() + area).sum(-1)


def uniform_rotation(like: Tensor, dim: int) -> Tensor:
    """Orthogonal rows ``(*B, r, D)``, uniform among all, for ``like`` ``(*B, n, r)``."""
    noise = torch.randn(*like.shape[:-2], dim, like.size(-1), dtype=like.dtype, device=like.device)
    columns, triangle = torch.linalg.qr(noise)
    return (columns * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT


class _Group:
    """Embeddings that are rotated together, as one array M ``(n, D)``, and their L ``(n, r)``.

    The rows in which L is triangular are chosen to be large and far from parallel at the start:
    where one of them vanishes, L determines the others badly.
    """

    def __init__(self, name: str, values: dict[str, Tensor]) -> None:
        dims = {site: value.size(-1) for site, value in values.items()}
        if len(set(dims.values())) != 1:
            raise ValueError(
                f"embeddings that are rotated together must have one dimension D; got {dims}."
            )
        self.dim = next(iter(dims.values()))
        self.shapes = {site: value.shape for site, value in values.items()}
        rows = torch.cat([value.detach().reshape(-1, self.dim) for value in values.values()])
        size, rank = len(rows), min(rows.shape)
        order = scipy.linalg.qr(rows.mT.cpu().double().numpy(), mode="r", pivoting=True)[1]
        self.rows = torch.as_tensor(order).argsort()  # the row of L for each row of M
        triangle = torch.linalg.qr(rows[torch.as_tensor(order)].mT, mode="r").R.mT  # (n, r)
        lower = triangle * triangle.diagonal().sign()
        self.below = torch.tril_indices(size, rank, -1)
        diagonal = lower.diagonal().clamp(min=_SMALLEST)
        self.name = name
        self.start = torch.cat([diagonal.log(), lower[self.below[0], self.below[1]]])

    def sample(self) -> Tensor:
        """Logarithms of the diagonal of L, and what is below: a site for an autoguide."""
        return pyro.sample(self.name, Normal(torch.zeros_like(self.start), 1.0).to_event(1))

    def triangular(self, values: Tensor) -> Tensor:
        """L ``(*B, n, r)``."""
        rank = min(len(self.rows), self.dim)
        lower = values.new_zeros(*values.shape[:-1], len(self.rows), rank)
        lower[..., :rank, :] = values[..., :rank].exp().diag_embed()
        lower[..., self.below[0], self.below[1]] = values[..., rank:]
        return lower

    def split(self, lower: Tensor) -> dict[str, Tensor]:
        """Rows ``(*B, n, d)`` of a product with L as embeddings; missing columns are zero."""
        wide = torch.nn.functional.pad(lower, (0, self.dim - lower.size(-1)))
        pieces = wide[..., self.rows, :].split(
            [shape[:-1].numel() for shape in self.shapes.values()], -2
        )
        return {
            site: piece.reshape(*piece.shape[:-2], *shape)
            for piece, (site, shape) in zip(pieces, self.shapes.items())
        }


def _reduced(data: Sequences, model: Callable[..., Any], parts: list[_Group]) -> Any:
    """The model whose embeddings are triangular: what no rotation changes."""
    embeddings: dict[str, Tensor] = {}
    for part in parts:
        embeddings |= part.split(part.triangular(part.sample()))
    return poutine.condition(model, data=embeddings)(data)


def _groups(model: Any) -> list[list[str]]:
    """Embeddings of which the likelihood depends on inner products only."""
    groups = []
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for path, module in modules:
        if isinstance(module, DenseHMM):
            chain = ["leave"] + ["enter"] * (not module.tied) + ["start"] * (not module.stationary)
            symbols = ["symbol"] if module.num_symbols is not None else []
            if module.tied:
                parts = [chain + symbols]
            else:
                parts = [chain] + [["emit", *symbols]] * bool(symbols)
            groups += [
                [f"{path}.{name}" if path else name for name in part]
                for part in parts
                if all(name in module._pyro_samples for name in part)
            ]
    return groups
