"""The emission family of mixtures of normal vectors."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from pyro.distributions import Categorical, Dirichlet, MixtureSameFamily, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..distributions.hard_zeros import log_probs
from ..distributions.observation import log_prob_per_component
from ..ops.log_space import log
from .centred import IndependentNormals, centre
from .closed_form import Maximum, Statistics, row_mode
from .family import EmissionFamily, moments, positive
from .normals import normal_m_step


def normal_mixture(
    num_components: int,
    dim: int,
    loc: float | Tensor | None = None,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | Tensor | None = None,
    weights_concentration: float = 1.0,
) -> EmissionFamily:
    """Emission family of vectors that are a mixture of C normal distributions in each state.

    Components of a vector are independent given the component of the mixture; priors are those of
    :func:`normal`, and a Dirichlet one on the weights.

    Sites: ``emission.weights`` ``(K, C)``, ``emission.variance`` ``(K, C, D)`` and
    ``emission.loc`` ``(K, C, D)``.

    Args:
        num_components: C.
        dim: D, at least 1.
        loc: Prior mean, a number or ``(D,)``; of the data by default, with ``rate``.
        weight: How many observations the prior mean is worth.
        concentration: Of the inverse gamma prior of the variance.
        rate: Of the inverse gamma prior of the variance, a number or ``(D,)``; by default the
            variance of the data.
        weights_concentration: Of the Dirichlet prior of the weights.
    """
    check_size("num_components", num_components)
    check_size("dim", dim)
    return partial(
        MixtureEmission,
        num_components=num_components,
        dim=dim,
        loc=loc,
        weight=weight,
        concentration=concentration,
        rate=rate,
        weights_concentration=weights_concentration,
    )


class MixtureEmission(IndependentNormals):
    """Mixtures of normal vectors in each state: see :func:`normal_mixture`."""

    supports: ClassVar[dict[str, constraints.Constraint]] = {
        "weights": constraints.simplex,
        **IndependentNormals.supports,
    }

    def __init__(
        self,
        num_states: int,
        num_components: int,
        dim: int,
        loc: float | Tensor | None = None,
        weight: float = 0.01,
        concentration: float = 2.0,
        rate: float | Tensor | None = None,
        weights_concentration: float = 1.0,
        spherical: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.num_components = dim, num_components
        shape = (num_states, num_components, dim)
        self.register_buffer(
            "concentration", positive("weights_concentration", weights_concentration, shape[:2])
        )
        self.set_priors(weights=MixtureEmission._weights_prior)
        self._add_normals(shape, loc, weight, concentration, rate, spherical)

    def _weights_prior(self) -> TorchDistribution:
        return Dirichlet(self.concentration).to_event(1)

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over states."""
        weights, variance = self.weights, self._wide()
        return MixtureSameFamily(
            Categorical(logits=log(weights)), Normal(self.loc, variance.sqrt()).to_event(1)
        )

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Moments for each component, weighted by its probability given state and value."""
        if current is None or len(values) == 0:
            shares = _scatter(values, weights, self.num_components)
        else:
            parts = log_prob_per_component(current, values)
            logits = parts + log_probs(current.mixture_distribution)
            shares = logits.softmax(-1)  # ([R,] M, K, C)
        joint = weights.double().unsqueeze(-1) * shares  # (R, M, K, C)
        known, sums, squares = moments(values, joint.flatten(2), centre(self))
        shape = joint.sum(1).shape + values.shape[-1:]  # (R, K, C, D)
        return {
            "counts": joint.sum(1),
            "known": known.expand_as(sums).reshape(shape),
            "sums": sums.reshape(shape),
            "squares": squares.reshape(shape),
        }

    def m_step(self, statistics: Statistics) -> Maximum:
        """The mode for the moments of each component, and for the weights."""
        values, notes = normal_m_step(self, statistics, flat=False)
        if self.is_free("weights"):
            prior = self.concentration if self.has_prior("weights") else None
            values["weights"] = row_mode(statistics["counts"], prior)
        return values, notes


def _scatter(values: Tensor, weights: Tensor, num_components: int) -> Tensor:
    """First shares ``(R, M, K, C)``: each value goes to the nearest of C values of its state."""
    if len(values) == 0:
        return weights.new_zeros(*weights.shape, num_components)
    filled = torch.where(values.isnan(), values.nanmean(0).nan_to_num(0.0), values)
    shares = []
    for share in weights:
        columns = []
        for column in share.T:
            chance = column[: 2**24] + 1e-9  # more than that torch does not take
            centres = filled[torch.multinomial(chance, num_components, replacement=True)]
            nearest = torch.cdist(filled, centres).argmin(-1)
            columns.append(torch.nn.functional.one_hot(nearest, num_components))
        shares.append(torch.stack(columns, 1))
    return torch.stack(shares).double()
