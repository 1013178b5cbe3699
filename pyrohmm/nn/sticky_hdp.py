"""``StickyHDPHMM``: as many states as the data ask for, whose rows share their weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyro.distributions import Gamma
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import check_size
from ..chains.base import ExpectedCounts
from ..distributions.hmm import HMM
from ..distributions.sparse import SparseDirichlet
from ..ops.log_space import log
from .base import HMMModule
from .closed_form import Family, Maximum, Statistics, sample_rows
from .family import EmissionFamily, build_emission

LEAST = 1e-8  # concentration, below which nothing changes but what numbers can say


class StickyHDPHMM(HMMModule, Family):
    r"""HMM of at most K states, with weights of the states that all rows share.

    .. math:: \beta \sim \mathrm{Dir}(\gamma / K, \dots, \gamma / K), \quad
              \pi \sim \mathrm{Dir}(\alpha \beta), \quad
              A_i \sim \mathrm{Dir}(\alpha \beta + \kappa e_i)

    The sticky hierarchical Dirichlet process in its weak-limit truncation (Fox, Sudderth, Jordan
    and Willsky, 2011, A sticky HDP-HMM with application to speaker diarization). States with a
    small :math:`\beta_k` are entered from nowhere: take K well above the number of states that
    are expected, and count those that the posterior visits.

    For :func:`fit_gibbs`; for :func:`fit_svi` and NUTS, by :class:`MarginalModel`. The density is
    infinite where a state has a small weight and is never entered, so that ``fit_em`` and
    ``fit_map``, which look for a maximum, refuse it.

    Sites: ``weights`` ``(K,)``, ``initial`` ``(K,)``, ``transition`` ``(K, K)``, those of
    ``emission``, and ``gamma``, ``alpha`` and ``kappa`` where they have priors.

    Args:
        num_states: K, the truncation.
        emission: An emission family: see :class:`TabularHMM`.
        gamma: Concentration of the weights; about as many states are used as it is large, times
            the logarithm of the data. A number, or two: shape and rate of a Gamma prior.
        alpha: How alike the rows are to the weights; a number, or two as of ``gamma``.
        kappa: What a state has beside to stay; a number, or two as of ``gamma``. Zero is the HDP
            that is not sticky.

    Raises:
        ValueError: If ``num_states`` is less than one, or a concentration is not positive.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = StickyHDPHMM(8, normal(0), gamma=2.0, alpha=(2.0, 0.5), kappa=10.0)
        >>> hmm = module(torch.tensor([100]))  # a sample from the prior
        >>> bool((hmm.log_transition.exp().diagonal() > 0.3).all())
        True
    """

    overcomplete = "weights", "gamma", "alpha", "kappa"  # of the prior: the HMM has its rows

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        gamma: float | tuple[float, float] = 1.0,
        alpha: float | tuple[float, float] = 1.0,
        kappa: float | tuple[float, float] = 10.0,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states, dtype = num_states, torch.get_default_dtype()
        for name, value in (("gamma", gamma), ("alpha", alpha), ("kappa", kappa)):
            if isinstance(value, tuple):
                if len(value) != 2 or min(value) <= 0:
                    raise ValueError(f"{name} must be a number, or a positive shape and rate of a "
                                     f"Gamma prior; got {value}.")  # fmt: skip
                self.register_buffer(f"{name}_prior", torch.tensor(value).to(dtype))
                self.set_priors(**{name: partial(_strength, name=name)})
            else:
                if not 0 <= value < torch.inf or (value == 0 and name != "kappa"):
                    raise ValueError(f"{name} must be positive and finite; got {value}.")
                self.register_buffer(name, torch.tensor(value).to(dtype))
        self.add_parameters(
            weights=(num_states,), initial=(num_states,), transition=(num_states, num_states)
        )
        self.emission = build_emission(emission, num_states)

    def weights_prior(self) -> TorchDistribution:
        """Weights of the states that all rows share."""
        gamma = self.gamma.unsqueeze(-1)
        return _table((gamma / self.num_states).expand(*gamma.shape[:-1], self.num_states), 1)

    def initial_prior(self) -> TorchDistribution:
        """Probabilities of the first state, given the weights."""
        return _table(self.alpha.unsqueeze(-1) * self.weights, 1)

    def transition_prior(self) -> TorchDistribution:
        """Rows of the transition matrix, given the weights."""
        weights = self.alpha.unsqueeze(-1) * self.weights
        stay = torch.eye(self.num_states).to(weights)
        return _table(weights.unsqueeze(-2) + self.kappa[..., None, None] * stay, 2)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        return HMM(log(self.initial), log(self.transition), self.emission(), lengths, observed)

    def emission_module(self) -> PyroModule:
        """The module of the emission."""
        return self.emission

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Expected counts of the rows that have priors: see :class:`ChainMStep`."""
        counts = {name.removeprefix("log_"): value for name, value in expected.counts.items()}
        return {name: value for name, value in counts.items() if self.has_prior(name)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """None: raises ValueError, for the density has no maximum."""
        raise ValueError(
            "a StickyHDPHMM has no most probable value, which EM looks for: its density is "
            "infinite where a state is never entered. Use fit_gibbs, fit_svi, or NUTS of "
            "MarginalModel(module)."
        )

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Weights given numbers of tables, then rows given weights (Fox et al., 2011)."""
        known: Any = self._buffers | current
        gamma, alpha, kappa, weights = (
            known[name].double() for name in ("gamma", "alpha", "kappa", "weights")
        )
        least = torch.finfo(known["weights"].dtype).tiny  # what is smaller counts as that
        stay = kappa[..., None, None] * torch.eye(self.num_states).to(kappa)

        def strengths(weights: Tensor) -> Statistics:
            shared = (alpha.unsqueeze(-1) * weights).clamp(min=LEAST)
            return {"initial": shared, "transition": shared.unsqueeze(-2) + stay}

        samples = {}
        if self.has_prior("weights"):
            prior = strengths(weights)
            tables = {n: _tables(count, prior[n]) for n, count in statistics.items()}
            counts = tables.get("initial", torch.zeros_like(prior["initial"]))
            if "transition" in tables:
                share = kappa.unsqueeze(-1) / (kappa.unsqueeze(-1) + prior["initial"])
                own = tables["transition"].diagonal(dim1=-2, dim2=-1)
                counts = (
                    counts + tables["transition"].sum(-2) - torch.binomial(own, share + 0 * own)
                )
            weights = sample_rows((gamma / self.num_states).unsqueeze(-1) + counts)
            samples["weights"] = weights
        prior = strengths(weights)
        for name, count in statistics.items():
            samples[name] = sample_rows(prior[name] + count).clamp(min=least)
        return samples


def _tables(counts: Tensor, strength: Tensor) -> Tensor:
    """Numbers of tables that seat ``counts`` customers of a Chinese restaurant process each."""
    found, strength = torch.zeros_like(counts), strength.expand_as(counts).unsqueeze(-1)
    for start in range(0, int(counts.max()), 256):
        seated = torch.arange(start, start + 256).to(counts)
        opens = torch.rand_like(strength + seated) * (strength + seated) < strength
        found += (opens & (seated < counts.unsqueeze(-1))).sum(-1)
    return found


class SharedRows(SparseDirichlet):
    """Rows of probabilities of a :class:`StickyHDPHMM`, of which no value is the most probable."""


def _strength(module: StickyHDPHMM, name: str) -> TorchDistribution:
    """Gamma prior of a concentration."""
    shape, rate = getattr(module, f"{name}_prior")
    return Gamma(shape, rate)


def _table(concentration: Tensor, dims: int) -> SharedRows:
    """Rows of probabilities with concentrations that may come near zero."""
    concentration = concentration.clamp(min=LEAST)
    allowed = torch.ones(concentration.shape[-dims:], dtype=torch.bool, device=concentration.device)
    return SharedRows(concentration, allowed)
