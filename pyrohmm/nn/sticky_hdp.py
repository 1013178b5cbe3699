"""``StickyHDPHMM``: how many states are used is a matter of the posterior."""

from __future__ import annotations

from functools import partial

import torch
from pyro.distributions import Gamma
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroSample
from torch import Tensor

from .._checks import check_size
from ..chains.base import ExpectedCounts
from ..distributions.hmm import HMM
from ..distributions.sparse_dirichlet import SparseDirichlet
from ..ops.log_space import log
from .base import HMMModule
from .closed_form import Maximum, Statistics
from .family import EmissionFamily, build_emission

LEAST = 1e-8  # concentration, below which nothing changes but what numbers can say


class StickyHDPHMM(HMMModule):
    r"""HMM of at most K states, with weights of the states that all rows share.

    .. math:: \beta \sim \mathrm{Dir}(\gamma / K, \dots, \gamma / K), \quad
              \pi \sim \mathrm{Dir}(\alpha \beta), \quad
              A_i \sim \mathrm{Dir}(\alpha \beta + \kappa e_i)

    The sticky hierarchical Dirichlet process in its weak-limit truncation (Fox, Sudderth, Jordan
    and Willsky, 2011, A sticky HDP-HMM with application to speaker diarization). States with a
    small :math:`\beta_k` are entered from nowhere: take K well above the number of states that
    are expected, and count those that the posterior visits.

    For :func:`fit_svi` and NUTS, by :class:`MarginalModel`. The density is infinite where a state
    has a small weight and is never entered, so that ``fit_em`` and ``fit_map``, which look for a
    maximum, refuse it.

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
                setattr(self, name, PyroSample(partial(_strength, name=name)))
            else:
                if not 0 <= value < torch.inf or (value == 0 and name != "kappa"):
                    raise ValueError(f"{name} must be positive and finite; got {value}.")
                self.register_buffer(name, torch.tensor(value).to(dtype))
        for name, prior in (("weights", _weights), ("initial", _initial), ("transition", _rows)):
            setattr(self, name, PyroSample(partial(prior)))
        self.emission = build_emission(emission, num_states)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        return HMM(log(self.initial), log(self.transition), self.emission(), lengths, observed)

    def emission_module(self) -> PyroModule:
        """The module of the emission."""
        return self.emission

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """None: raises ValueError, for the density has no maximum."""
        raise ValueError(
            "a StickyHDPHMM has no most probable value, which EM looks for: its density is "
            "infinite where a state is never entered. Use fit_svi, or NUTS of "
            "MarginalModel(module)."
        )

    def m_step(self, statistics: Statistics) -> Maximum:
        """None: see :meth:`statistics`."""
        return {}, []


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


def _weights(module: StickyHDPHMM) -> TorchDistribution:
    """Prior of the weights that all rows share."""
    gamma = module.gamma.unsqueeze(-1)
    return _table((gamma / module.num_states).expand(*gamma.shape[:-1], module.num_states), 1)


def _initial(module: StickyHDPHMM) -> TorchDistribution:
    """Prior of the first state."""
    return _table(module.alpha.unsqueeze(-1) * module.weights, 1)


def _rows(module: StickyHDPHMM) -> TorchDistribution:
    """Prior of the rows of the transition matrix."""
    weights = module.alpha.unsqueeze(-1) * module.weights
    stay = torch.eye(module.num_states).to(weights)
    return _table(weights.unsqueeze(-2) + module.kappa[..., None, None] * stay, 2)
