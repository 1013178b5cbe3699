"""``TabularHMM``: the probabilities themselves are the parameters; emission families for it.

An emission family is anything that, called with the number of states K, returns a ``PyroModule``
whose own call returns a distribution batched over the K states. :func:`categorical` and
:func:`normal` are two; a user's own class is as good.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pyro.distributions import Categorical, Dirichlet, InverseGamma, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from ._checks import check_size
from .hmm import HMM
from .modules import HMMModule

EmissionFamily = Callable[[int], PyroModule]


class TabularHMM(HMMModule):
    r"""HMM whose parameters are its probabilities, with Dirichlet priors on every row.

    .. math:: \pi \sim \mathrm{Dir}(c_0), \quad A_i \sim \mathrm{Dir}(c_i)

    With the default concentrations of one the priors are flat, and the most probable parameters
    are those of maximum likelihood. A concentration above one keeps every probability away from
    zero; below one the density has no maximum, and MAP runs away (use SVI or sampling there).

    Sites: ``initial`` ``(K,)``, ``transition`` ``(K, K)``, and those of ``emission``.

    Args:
        num_states: K.
        emission: An emission family, such as :func:`categorical` or :func:`normal`: called with K,
            it returns a ``PyroModule`` that returns a distribution batched over K states.
        initial_concentration: Of the prior of the first state; a number or ``(K,)``.
        transition_concentration: Of the priors of the rows; a number, ``(K,)`` or ``(K, K)``. A
            large diagonal makes a sticky chain.

    Raises:
        ValueError: If ``num_states`` is less than one, or a concentration is not positive or has
            the wrong shape.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = TabularHMM(2, categorical(6))
        >>> hmm = module(torch.tensor([3, 1]))  # one draw from the prior
        >>> hmm.log_transition.shape, hmm.emission.probs.shape
        (torch.Size([2, 2]), torch.Size([2, 6]))
    """

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        initial_concentration: float | Tensor = 1.0,
        transition_concentration: float | Tensor = 1.0,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        if not callable(emission) or isinstance(emission, torch.distributions.Distribution):
            raise TypeError(
                "emission must be an emission family, such as categorical(num_symbols); got "
                f"{type(emission).__name__}."
            )
        self.num_states = num_states
        self.register_buffer(
            "initial_concentration",
            _concentration("initial_concentration", initial_concentration, (num_states,)),
        )
        self.register_buffer(
            "transition_concentration",
            _concentration(
                "transition_concentration", transition_concentration, (num_states, num_states)
            ),
        )
        self.initial = PyroSample(lambda self: Dirichlet(self.initial_concentration))
        self.transition = PyroSample(
            lambda self: Dirichlet(self.transition_concentration).to_event(1)
        )
        part = emission(num_states)
        if not isinstance(part, PyroModule):
            raise TypeError(
                "emission must return a PyroModule when it is called with K; got "
                f"{type(part).__name__}. Put the parameters into one, as PyroParam or PyroSample."
            )
        self.emission = part

    @classmethod
    def from_hmm(cls, hmm: HMM) -> TabularHMM:
        """A module with the values of ``hmm`` as parameters: points, without priors.

        The parameters are copies; zeros stay zero under gradient steps.

        Raises:
            ValueError: If parameters of ``hmm`` have a dimension of steps.
        """
        if hmm.transition_per_step or hmm.emission_per_step:
            raise ValueError(
                "hmm has parameters per step; a TabularHMM has one matrix for all steps."
            )
        module = cls(hmm.num_states, lambda _: PointEmission(hmm.emission))
        for name, logs in (("initial", hmm.log_initial), ("transition", hmm.log_transition)):
            delattr(module, name)
            setattr(module, name, PyroParam(logs.detach().exp(), constraints.simplex))
        return module.to(hmm.log_initial.device)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        return HMM(_log(self.initial), _log(self.transition), self.emission(), lengths, observed)


def categorical(num_symbols: int, concentration: float | Tensor = 1.0) -> EmissionFamily:
    """Emission family of symbols 0 to V - 1, each row with a Dirichlet prior.

    Site: ``emission.probs`` ``(K, V)``.

    Args:
        num_symbols: V.
        concentration: Of the prior; a number, ``(V,)`` or ``(K, V)``. One is flat.
    """
    check_size("num_symbols", num_symbols)
    return partial(CategoricalEmission, num_symbols=num_symbols, concentration=concentration)


def normal(
    dim: int = 1,
    loc: float | Tensor = 0.0,
    weight: float = 0.01,
    concentration: float = 2.0,
    rate: float | Tensor = 1.0,
) -> EmissionFamily:
    r"""Emission family of vectors whose components are independent and normal in each state.

    The prior is conjugate; the defaults are weak for data of zero mean and unit variance, and
    keep the variance of a state that owns a single point from shrinking to zero:

    .. math:: \sigma^2_{kd} \sim \mathrm{InvGamma}(a, b_d), \quad
              \mu_{kd} \sim \mathrm{Normal}(m_d, \sigma^2_{kd} / w)

    Sites: ``emission.variance`` ``(K, D)``, then ``emission.loc`` ``(K, D)``.

    Args:
        dim: D, the number of components of an observation; the event shape is ``(D,)``. Zero
            stands for scalar observations, with an empty event shape.
        loc: m, a number or ``(D,)``.
        weight: w, how many observations the prior mean is worth.
        concentration: a.
        rate: b, a number or ``(D,)``.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int; got {type(dim).__name__}.")
    if dim < 0:
        raise ValueError(f"dim must be at least 0 (scalars); got {dim}.")
    return partial(
        NormalEmission, dim=dim, loc=loc, weight=weight, concentration=concentration, rate=rate
    )


class CategoricalEmission(PyroModule):
    """Symbols with Dirichlet priors: see :func:`categorical`."""

    def __init__(
        self, num_states: int, num_symbols: int, concentration: float | Tensor = 1.0
    ) -> None:
        super().__init__()
        shape = (num_states, num_symbols)
        self.register_buffer("concentration", _concentration("concentration", concentration, shape))
        self.probs = PyroSample(lambda self: Dirichlet(self.concentration).to_event(1))

    def forward(self) -> TorchDistribution:
        """The distribution of a symbol, batched over states."""
        return Categorical(logits=_log(self.probs))


class NormalEmission(PyroModule):
    """Independent normal components with a conjugate prior: see :func:`normal`."""

    def __init__(
        self,
        num_states: int,
        dim: int,
        loc: float | Tensor,
        weight: float,
        concentration: float,
        rate: float | Tensor,
    ) -> None:
        super().__init__()
        if not min(weight, concentration) > 0:
            raise ValueError(
                f"weight and concentration must be positive; got {weight} and {concentration}."
            )
        shape = (num_states, dim) if dim else (num_states,)
        self.dim, self.weight = dim, weight
        self.register_buffer("prior_loc", _spread("loc", loc, shape))
        self.register_buffer("rate", _concentration("rate", rate, shape))
        self.register_buffer("shape", torch.full_like(self.rate, concentration))
        events = len(shape)
        self.variance = PyroSample(
            lambda self: InverseGamma(self.shape, self.rate).to_event(events)
        )
        self.loc = PyroSample(
            lambda self: Normal(self.prior_loc, (self.variance / self.weight).sqrt()).to_event(
                events
            )
        )

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        variance = self.variance
        each = Normal(self.loc, variance.sqrt())
        return each.to_event(1) if self.dim else each


class PointEmission(PyroModule):
    """The emission of a given distribution, its arguments as parameters without priors.

    Arguments that are counts, such as ``total_count`` of a binomial, stay as they are.

    Raises:
        TypeError: If the distribution is not determined by tensors that its class names in
            ``arg_constraints``, as mixtures of others are not.

    Example:
        >>> emission = PointEmission(Normal(torch.zeros(3), torch.ones(3)))
        >>> sorted(name for name, _ in emission.named_parameters())
        ['loc_unconstrained', 'scale_unconstrained']
    """

    def __init__(self, distribution: Any) -> None:
        super().__init__()
        self.events = 0
        while isinstance(distribution, torch.distributions.Independent):
            self.events += distribution.reinterpreted_batch_ndims
            distribution = distribution.base_dist
        self.family = type(distribution)
        self.names = tuple(
            name
            for name in self.family.arg_constraints
            if not any(name in same[1:] and same[0] in self.family.arg_constraints
                       for same in _SAME)
        )  # fmt: skip
        for name in self.names:
            value = getattr(distribution, name)
            constraint: Any = self.family.arg_constraints[name]
            if constraint.is_discrete:
                self.register_buffer(name, torch.as_tensor(value).detach().clone())
            else:
                setattr(self, name, PyroParam(value.detach().clone(), constraint))
        try:
            again = self.forward()
        except Exception as error:
            raise TypeError(
                f"emission {self.family.__name__} cannot be built from its arguments "
                f"{self.names}. Write a PyroModule that returns it."
            ) from error
        shape = again.batch_shape + again.event_shape
        if shape[: len(distribution.batch_shape)] != distribution.batch_shape:
            raise TypeError(f"emission {self.family.__name__} has arguments that are not tensors.")

    def forward(self) -> TorchDistribution:
        """The distribution with the parameters as they are now."""
        given = {name: getattr(self, name) for name in self.names}
        if issubclass(self.family, torch.distributions.Categorical):
            given = {"logits": _log(given["probs"])}
        built = self.family(**given)
        return built.to_event(self.events) if self.events else built


_SAME = (  # arguments that say the same: the first is kept
    ("probs", "logits"),
    ("scale_tril", "covariance_matrix", "precision_matrix"),
)


def _log(probs: Tensor) -> Tensor:
    """Logarithm whose gradient at zero is zero: a hard zero stays what it is, and makes no NaN."""
    zero = probs == 0
    return probs.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


def _spread(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a floating-point tensor of ``shape``."""
    own = isinstance(value, Tensor) and value.dtype.is_floating_point
    tensor = torch.as_tensor(value, dtype=None if own else torch.get_default_dtype())
    try:
        return tensor.expand(shape).clone()
    except RuntimeError:
        raise ValueError(
            f"{name} must be a number or have a shape that broadcasts to {shape}; got "
            f"{tuple(tensor.shape)}."
        ) from None


def _concentration(name: str, value: float | Tensor, shape: tuple[int, ...]) -> Tensor:
    """``value`` as a positive tensor of ``shape``."""
    tensor = _spread(name, value, shape)
    if not bool((tensor > 0).all()):
        raise ValueError(f"{name} must be positive; got a smallest value of {tensor.min().item()}.")
    return tensor
