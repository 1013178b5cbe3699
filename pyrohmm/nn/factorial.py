"""``TabularFactorialHMM``: several chains, and emissions to which each chain adds its part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pyro.distributions import Bernoulli, InverseGamma, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..chains.compound import check_product
from ..distributions.structured_hmm import FactorialHMM
from ..ops.log_space import log
from .closed_form import Maximum, Statistics
from .family import Emission, EmissionFamily, component_sums, family, filled, positive
from .tabular import ChainTables

SINGULAR = 1e-12  # relative size of what the observations do not determine
ROUNDS = 20  # in which an M-step maximises by contributions and variances in turn


class TabularFactorialHMM(ChainTables, builds=FactorialHMM):
    r"""Factorial HMM whose parameters are the probabilities of its chains, with Dirichlet priors.

    Sites: ``initial_m`` ``(K_m,)`` and ``transition_m`` ``(K_m, K_m)`` of each chain m = 0, ...,
    M - 1, and those of ``emission``.

    Args:
        num_states: K_1, ..., K_M, the number of states of each chain.
        emission: An emission family, called with the number K = K_1 ⋯ K_M of product states: any
            one, which gives each product state parameters of its own, or
            :func:`additive_normal` or :func:`additive_bernoulli`.
        initial_concentration: Of the priors of the first states.
        transition_concentration: Of the priors of the rows of all matrices.

    Raises:
        ValueError: If there is no chain, one has no state, or a concentration is not positive.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = TabularFactorialHMM((2, 3), additive_normal((2, 3), dim=1))
        >>> hmm = module(torch.tensor([4, 1]))  # a sample from the prior
        >>> hmm.sizes, hmm.emission.batch_shape
        ((2, 3), torch.Size([6]))
        >>> fit = fit_em(module, Sequences.from_list([torch.randn(50, 1)]), num_iterations=3)
        >>> fit.parameters["module.transition_1"].shape
        torch.Size([3, 3])
    """

    def __init__(
        self,
        num_states: Sequence[int],
        emission: EmissionFamily,
        initial_concentration: float = 1.0,
        transition_concentration: float = 1.0,
    ) -> None:
        super().__init__(math.prod(_sizes(num_states)), emission)
        self.num_states = _sizes(num_states)
        for m, size in enumerate(self.num_states):
            self.add_rows(f"initial_{m}", initial_concentration, (size,))
            self.add_rows(f"transition_{m}", transition_concentration, (size, size))

    @classmethod
    def _like(cls, hmm: FactorialHMM, emission: Any) -> TabularFactorialHMM:
        return cls(hmm.sizes, emission)

    def tables(self) -> dict[str, Any]:
        """Logarithms of the tables of all chains: ``log_initials`` and ``log_transitions``."""
        kinds, chains = ("initial", "transition"), range(len(self.num_states))
        return {f"log_{k}s": [log(getattr(self, f"{k}_{m}")) for m in chains] for k in kinds}


def _sizes(num_states: Sequence[int]) -> tuple[int, ...]:
    """Check the numbers of states of the chains, and return them as a tuple."""
    sizes = () if isinstance(num_states, int) else tuple(num_states)
    if not sizes:
        text = "num_states must hold the number of states of at least one chain"
        raise ValueError(f"{text}. Give them as [2, 3].")
    for size in sizes:
        check_size("each of num_states", size)
    check_product(sizes)
    return sizes


# Emissions to which each chain adds its part ------------------------------------------------------


class _Additive(Emission):
    """Base of the additive families, with ``effects`` ``(S, D)`` of the states of all chains.

    S = K_1 + ⋯ + K_M; a product state has the sum of those of its states.
    """

    supports: ClassVar = {"effects": constraints.real}
    overcomplete = ("effects",)

    def __init__(
        self,
        num_products: int,
        num_states: Sequence[int],
        dim: int,
        loc: float = 0.0,
        scale: float = 2.5,
    ) -> None:
        super().__init__()
        self.sizes = _sizes(num_states)
        if math.prod(self.sizes) != num_products:
            text = f"num_states must multiply to the {num_products} product states"
            raise ValueError(
                f"{text}; got {list(self.sizes)}, whose product is {math.prod(self.sizes)}. Give "
                "those of the chains."
            )
        shape = (sum(self.sizes), dim)
        self.register_buffer("effects_loc", filled("loc", loc, shape) / len(self.sizes))
        self.register_buffer("effects_scale", positive("scale", scale, shape))
        self.add_parameters(effects=shape)

    def effects_prior(self) -> TorchDistribution:
        """Normal prior of the effects."""
        return Normal(self.effects_loc, self.effects_scale)

    def sums(self) -> Tensor:
        """The sum of effects of each product state, ``(K, D)``."""
        first, *others = self.effects.split(self.sizes, -2)
        for part in others:
            first = (first.unsqueeze(-2) + part.unsqueeze(-3)).flatten(-3, -2)
        return first

    def design(self) -> Tensor:
        """Design matrix ``(K, S)``, in float64: ones for the effects of each product state."""
        states = torch.arange(math.prod(self.sizes), device=self.effects_loc.device)
        columns = []
        for size in reversed(self.sizes):
            columns.append(torch.nn.functional.one_hot(states % size, size))
            states = states // size
        return torch.cat(columns[::-1], -1).double()


class AdditiveNormalEmission(_Additive):
    r"""Emission family of normal vectors whose mean is a sum of one part for each chain.

    .. math:: x_t \sim \mathcal N\Bigl(\sum_m \mu^m_{z_t^m}, \operatorname{diag} v\Bigr)

    Variances are shared by all states. The M-step of EM is a linear regression. A constant may go
    from one chain to another, so that only sums, and differences within a chain, mean something.
    The default priors are weak for data of the order of one.

    Sites: ``emission.effects`` ``(S, D)``, S = K_1 + ⋯ + K_M, the parts of the states of all
    chains one after another; and ``emission.variance`` ``(D,)``.

    Args:
        num_states: K_1, ..., K_M.
        dim: D.
        loc: Prior mean of the sums.
        scale: Prior standard deviation of each part.
        concentration: Of the inverse gamma priors of the variances.
        rate: Of the same.

    Example:
        >>> emission = additive_normal((2, 2), dim=1)(4)
        >>> freeze(emission, "effects", torch.tensor([[0.0], [5.0], [0.0], [1.0]]))
        >>> freeze(emission, "variance", torch.ones(1))
        >>> emission().mean.squeeze(-1)
        tensor([0., 1., 5., 6.])
    """

    supports: ClassVar = {"effects": constraints.real, "variance": constraints.positive}

    def __init__(
        self,
        num_products: int,
        num_states: Sequence[int],
        dim: int,
        loc: float = 0.0,
        scale: float = 10.0,
        concentration: float = 1.0,
        rate: float = 0.01,
    ) -> None:
        super().__init__(num_products, num_states, dim, loc, scale)
        self.register_buffer("concentration", positive("concentration", concentration, (dim,)))
        self.register_buffer("rate", positive("rate", rate, (dim,)))
        self.add_parameters(variance=(dim,))

    def variance_prior(self) -> TorchDistribution:
        """Inverse gamma prior of the variances."""
        return InverseGamma(self.concentration, self.rate)

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over product states."""
        loc = self.sums()
        return Normal(loc, self.variance.sqrt().unsqueeze(-2).expand_as(loc)).to_event(1)

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Counts, sums and sums of squares of each product state, about the prior mean."""
        origin = self.effects_loc[0] * len(self.sizes)

        def features(values: Tensor) -> dict[str, Tensor]:
            return {"sums": values - origin, "squares": (values - origin).square()}

        sums = component_sums(values, weights, features)
        return sums | {"squares": sums["squares"].sum(-2)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: regression of the observations on the states, and residual variances."""
        restarts, dim = statistics["squares"].shape
        design, precision = self.design(), self.effects_scale[0].double().square().reciprocal()
        precision = precision if self.has_prior("effects") else torch.zeros_like(precision)
        known, sums = statistics["known"].double().mT, statistics["sums"].double().mT  # (R, D, K)
        gram = design.mT @ (known.unsqueeze(-1) * design)  # (R, D, S, S)
        moment = sums @ design  # (R, D, S)
        sizes, axes = torch.linalg.eigh(gram)
        along = (axes.mT @ moment.unsqueeze(-1)).squeeze(-1)
        fixed = None if self.is_free("effects") else self.effects.detach() - self.effects_loc
        effects: Any = None if fixed is None else fixed.double().mT.expand_as(moment)
        variance = statistics["squares"].double() / known.sum(-1)
        if not self.is_free("variance"):
            variance = self.variance.detach().double().expand(restarts, dim)
        for _ in range(ROUNDS):
            if fixed is None:
                ridged = sizes + (variance * precision).unsqueeze(-1)
                free = ridged > SINGULAR * sizes[..., -1:]  # a constant common to a chain is not
                shares = torch.where(free, along / ridged, 0.0)
                effects = (axes @ shares.unsqueeze(-1)).squeeze(-1)
            if self.is_free("variance"):
                variance = self._variance(statistics, gram, moment, effects)
        return {"effects": effects.mT + self.effects_loc, "variance": variance}, []

    def _variance(
        self, statistics: Statistics, gram: Tensor, moment: Tensor, effects: Any
    ) -> Tensor:
        """Residual variances ``(R, D)`` about the means by ``effects``, the prior included."""
        fitted = (gram @ effects.unsqueeze(-1)).squeeze(-1)
        residual = statistics["squares"].double() + ((fitted - 2 * moment) * effects).sum(-1)
        residual, count = residual.clamp(min=0.0), statistics["known"].double().sum(-2)
        if not self.has_prior("variance"):
            return residual / count
        return (residual / 2 + self.rate) / (count / 2 + self.concentration + 1)


class AdditiveBernoulliEmission(_Additive):
    r"""Emission family of vectors of zeros and ones whose logits are sums over the chains.

    EM takes gradient steps for them.

    Site: ``emission.effects`` ``(S, D)``, S = K_1 + ⋯ + K_M.

    Args:
        num_states: K_1, ..., K_M.
        dim: D.
        loc: Prior mean of the logits.
        scale: Prior standard deviation of each part of a logit.

    Example:
        >>> emission = additive_bernoulli((2, 2), dim=1)(4)
        >>> freeze(emission, "effects", torch.tensor([[0.0], [5.0], [0.0], [1.0]]))
        >>> emission().base_dist.logits.squeeze(-1)
        tensor([0., 1., 5., 6.])
    """

    def forward(self) -> TorchDistribution:
        """The distribution of a vector, batched over product states."""
        return Bernoulli(logits=self.sums()).to_event(1)


additive_normal = family("additive_normal", AdditiveNormalEmission, dim=1)
additive_bernoulli = family("additive_bernoulli", AdditiveBernoulliEmission, dim=1)
