r"""Emissions from distributions: :func:`parametric`, and the module that a distribution becomes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor

from ..distributions.hard_zeros import arguments_of, without_events
from ..ops.log_space import log
from .family import FAMILIES, Emission, EmissionFamily


def parametric(distribution: Any, **priors: TorchDistribution) -> EmissionFamily:
    """Emission family of any distribution batched over K states, with its arguments as parameters.

    Those without a prior start at their values, and are fitted by maximum likelihood; EM takes
    gradient steps. Restarts, and samplers, need a prior of each.

    Args:
        distribution: Of batch shape ``(K,)``.
        **priors: Of an entry of each argument, by name: ``loc=Normal(0.0, 10.0)``.

    Raises:
        TypeError: If ``distribution`` is a class.

    Example:
        >>> from pyro.distributions import VonMises
        >>> family = parametric(VonMises(torch.tensor([0.0, 1.0]), torch.ones(2)))
        >>> family(2)().batch_shape
        torch.Size([2])
    """
    if isinstance(distribution, type) or not hasattr(distribution, "batch_shape"):
        text = f"distribution must be one of batch shape (K,); got {distribution}"
        raise TypeError(f"{text}. Call the class with its parameters.")
    return partial(_of_points, distribution=distribution, priors=priors)


def _of_points(
    num_states: int, distribution: Any, priors: dict[str, TorchDistribution]
) -> PyroModule:
    if (got := tuple(distribution.batch_shape)) != (num_states,):
        raise ValueError(
            f"distribution must have batch shape (K,) = ({num_states},); got {got}. Give each "
            "parameter an entry for each state."
        )
    module = PointEmission(distribution)
    for name, prior in priors.items():
        if name not in module._pyro_params or not hasattr(prior, "expand"):
            known = ", ".join(module._pyro_params)
            text = f"keywords must be priors of the parameters, {known}"
            raise TypeError(f"{text}, such as Gamma(2.0, 1.0); got {name}={prior!r}.")
        shape = getattr(module, name).shape
        delattr(module, name)
        setattr(module, name, PyroSample(prior.expand(shape).to_event(len(shape))))
    return module


class PointEmission(PyroModule):
    """The emission of any distribution, its arguments as parameters without priors.

    Arguments that are counts, such as ``total_count`` of a binomial, and those that are no
    parameters, such as a temperature, stay as they are.

    Raises:
        TypeError: If the distribution is not determined by its arguments, as mixtures of others are
            not, or if its support depends on its parameters, as that of a uniform distribution,
            which gradient steps cannot fit.

    Example:
        >>> emission = PointEmission(Normal(torch.zeros(3), torch.ones(3)))
        >>> sorted(name for name, _ in emission.named_parameters())
        ['loc_unconstrained', 'scale_unconstrained']
    """

    def __init__(self, distribution: Any) -> None:
        super().__init__()
        base = without_events(distribution)
        self.events = len(distribution.event_shape) - len(base.event_shape)
        distribution, self.family = base, type(base)
        cause, same = None, False
        try:
            support = distribution.support  # its ends would be fitted, if they are parameters
            ends = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
            if support.is_discrete or not any(isinstance(end, Tensor) for end in ends):
                self._take(distribution)
                same = bool(self._pyro_params) and _agree(distribution, self._build())
        except Exception as error:
            cause = error
        if not same:
            raise TypeError(
                f"emission {self.family.__name__} is not determined by its parameters, or has a "
                "support that depends on them. Write a PyroModule that returns it."
            ) from cause

    def _take(self, distribution: Any) -> None:
        """Register the arguments of a distribution as parameters, buffers or constants."""
        arguments, known = arguments_of(distribution), distribution.arg_constraints
        if "logits" in arguments and "probs" in known:
            arguments = {"probs": distribution.probs} | arguments
            del arguments["logits"]
        self.names = tuple(arguments)
        for name, value in arguments.items():
            if name in known and not known[name].is_discrete:
                setattr(self, name, PyroParam(value.detach().clone(), known[name]))
            elif name in known or isinstance(value, Tensor):
                self.register_buffer(name, torch.as_tensor(value).detach().clone())
            else:
                setattr(self, name, value)

    def forward(self) -> TorchDistribution:
        """The distribution with the parameters as they are now."""
        built = self._build()
        return built.to_event(self.events) if self.events else built

    def _build(self) -> Any:
        arguments = {name: getattr(self, name) for name in self.names}
        if self.family in _CATEGORICAL:
            arguments = {"logits": log(arguments["probs"])}
        return self.family(**arguments)


_CATEGORICAL = (Categorical, torch.distributions.Categorical)


def _agree(one: Any, other: Any) -> bool:
    """Whether two distributions give equal log-densities to a sample of the first."""
    if (one.batch_shape, one.event_shape) != (other.batch_shape, other.event_shape):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        values = one.sample()
        scores = one.log_prob(values), other.log_prob(values)
    return torch.allclose(*scores, rtol=1e-3, atol=1e-3, equal_nan=True)


def from_distribution(distribution: Any) -> PyroModule:
    """Emission module with the values of ``distribution`` as parameters without priors.

    One with a closed M-step where there is one for the distribution, else a
    :class:`PointEmission`.

    What stands for several is one parameter: the scale ``(K, 1)`` of a normal vector is one
    variance for each state, as of :func:`pyrohmm.normal_spherical`, and one covariance ``(D, D)``
    for all states stays one, as of :func:`pyrohmm.normal_tied`.

    Raises:
        ValueError: If the distribution has a history or, depending on those before, a batch.

    Example:
        >>> type(from_distribution(Poisson(torch.tensor([1.0, 5.0])))).__name__
        'PoissonEmission'
    """
    base = without_events(distribution)
    family = family_of(base)
    if family.in_time and (len(base.batch_shape) > 1 or not base.num_first):
        text = f"emission must have batch shape (K,); got {tuple(base.batch_shape)}"
        raise ValueError(f"{text}. To be fitted it must have no history, either.")
    simple = len(distribution.batch_shape) == 1 and len(distribution.event_shape) <= 1
    module = family.of(distribution, base) if simple else None
    if module is None:
        return PointEmission(distribution)
    return module.to(next(iter(module.parameters())).device)


def family_of(distribution: Any) -> type[Emission]:
    """The family that emits a distribution; the base of all families if there is none."""
    kinds: Any = (kind for kind in type(distribution).__mro__ if kind in FAMILIES)
    # one that inherits from it, with parameters of its own, is another distribution
    same = (kind for kind in kinds if kind.arg_constraints == distribution.arg_constraints)
    return FAMILIES.get(next(same, object), Emission)
