"""``Emission``: base of the emission families, from which all that a family needs follows.

In shapes, M is the number of observations and R that of batched restarts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Concatenate, ParamSpec

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import check_positive, check_positive_number, check_size, names_checked
from .._sync import exceeds
from ..ops.products import weighted_sums
from .closed_form import Family, Statistics

EmissionFamily = Callable[[int], PyroModule]
Number = float | Tensor
Arguments = ParamSpec("Arguments")

FAMILIES: dict[type, type[Emission]] = {}  # by the distribution that they emit


class Emission(Family):
    """Base of the emission modules of this package.

    Subclasses define ``forward()``, for each parameter named in ``supports`` a method
    ``<name>_prior``, and, for an M-step in closed form, ``statistics`` and ``m_step`` of
    :class:`pyrohmm.nn.closed_form.EmissionMStep`; without them EM takes gradient steps. A parameter
    that is neither a ``PyroSample`` nor a ``PyroParam`` is frozen: see :func:`pyrohmm.freeze`.

    One that names a class of distributions, ``class MyEmission(Emission, emits=MyDistribution)``,
    is the module that an HMM with this emission becomes, for ``fit_em(hmm, data)``; such an HMM can
    be saved.

    Attributes:
        in_time: Whether an observation depends on those before it.
        imputes: Whether ``statistics`` are those of samples of what else is hidden, such as
            components of a mixture and missing ones of a vector, not expected ones.
        summed: Whether ``statistics`` are sums over observations, so that those of parts of the
            data can be added; else they are the observations themselves, with their weights.
        of_data: Whether default priors take their unit, or location and scale, from the data.
        flat: Whether they are all but constant, so that samples of them are far from any data.
    """

    in_time: ClassVar[bool] = False
    summed = True
    imputes = of_data = flat = False

    def __init_subclass__(cls, emits: type | tuple[type, ...] = ()) -> None:
        super().__init_subclass__()
        FAMILIES.update(dict.fromkeys(emits if isinstance(emits, tuple) else (emits,), cls))

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """Module initialised at a distribution, without priors; None if the class cannot hold it.

        Args:
            distribution: Of batch shape ``(K,)``.
            base: The same, without the ``Independent`` around it.
        """
        return None

    def augments(self, values: Tensor) -> bool:
        """Whether ``statistics``, with ``imputes``, sample latent variables beside the states."""
        return False


class Components(Emission):
    """Base of families of independent components; without any, observations are scalars.

    Subclasses define ``kind``, ``features`` and ``m_step``; parameters are ``(K, [D])``.

    Args:
        num_states: K.
        dim: D; zero for scalars.

    Attributes:
        kind: The distribution of a component, of parameters with the names in ``supports``.
        of_moments: Buffers of such priors, by name, as functions of the mean of the data, its
            absolute value and their standard deviation, ``([D])``; the last two are positive.
        power: Of the unit in the product of the parameters of a state; None where there is no unit.
    """

    kind: ClassVar[Any]
    of_moments: ClassVar[dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {}
    power: ClassVar[int | None] = None

    def __init__(self, num_states: int, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self.shape = (num_states, dim) if dim else (num_states,)
        self.add_parameters(**dict.fromkeys(self.supports, self.shape))

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module with the parameters of ``base``, which have the same names."""
        module = cls(distribution.batch_shape[0], sum(distribution.event_shape))
        values = module.values_of(base)
        module.set_points(**{name: value.expand(module.shape) for name, value in values.items()})
        return module

    def values_of(self, distribution: Any) -> Statistics:
        """The parameters of a distribution that the family emits, by name."""
        return {name: getattr(distribution, name) for name in self.supports}

    def components(self) -> TorchDistribution:
        """The distribution of the components, of batch shape ``(K, [D])``."""
        return self.kind(**{name: getattr(self, name) for name in self.supports})

    def forward(self) -> TorchDistribution:
        """The distribution of an observation, batched over states."""
        return self.components().to_event(1) if self.dim else self.components()

    def features(self, values: Tensor) -> dict[str, Tensor]:
        """Functions of the values whose weighted sums are sufficient statistics."""
        return {"sums": values}

    def take_moments(self, moments: Tensor) -> float:
        """Rescale default priors to the data's moments; returns the loss offset, in nats."""
        if not self.of_data or moments.shape[1:] != self.shape[1:]:
            return 0.0
        known, mean, deviation = moments[0], moments[1].nan_to_num(1.0), moments[2].sqrt()
        deviation = torch.where(deviation > 1e-14 * mean.abs(), deviation, 1.0)  # not rounding
        size = torch.where(mean == 0, 1.0, mean.abs())
        for name, function in self.of_moments.items():
            buffer = getattr(self, name)
            found = function(mean, size, deviation).to(buffer)
            setattr(self, name, found.expand(buffer.shape).clone())
        if self.power is None:
            return 0.0
        return float(((known + self.power * self.shape[0]) * deviation.log()).sum())

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Expected number of known values, and sums of their features, each ``(R, K, [D])``."""
        if self.dim:
            return component_sums(values, weights, self.features)
        sums = component_sums(values.unsqueeze(-1), weights, self.features)
        return {name: each.squeeze(-1) for name, each in sums.items()}


def family(
    name: str, build: Callable[Concatenate[int, Arguments], PyroModule], **least: int
) -> Callable[Arguments, EmissionFamily]:
    """Emission family constructor: takes the arguments of a module except the number of states.

    Args:
        name: Of the function.
        build: The class of the module, whose docstring is that of the function.
        **least: The arguments that are sizes, and how large they must be.

    Example:
        >>> from pyrohmm.nn.discrete import CategoricalEmission
        >>> categorical = family("categorical", CategoricalEmission, num_symbols=1)
        >>> categorical(num_symbols=4)(2)().batch_shape
        torch.Size([2])
    """
    signature = inspect.signature(build)
    _, *rest = (part for part in signature.parameters.values() if part.name[0] != "_")
    wanted = signature.replace(parameters=rest, return_annotation=EmissionFamily)

    def function(*args: Arguments.args, **kwargs: Arguments.kwargs) -> EmissionFamily:
        bound = wanted.bind(*args, **kwargs).arguments
        bound |= bound.pop("priors", {})  # those of any name
        for size in least.keys() & bound.keys():
            check_size(size, bound[size], least[size])
        return partial(build, **bound)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = build.__module__, build.__doc__
    function.__signature__ = wanted  # type: ignore[attr-defined]
    return names_checked(function)


def build_emission(emission: EmissionFamily | None, num_states: int) -> PyroModule:
    """Build the emission module of K states: see :func:`build_part`."""
    return build_part("emission", "an emission family", "normal(2)", emission, num_states)


def build_part(name: str, kind: str, example: str, family: Any, num_states: int) -> PyroModule:
    """Build the module that a family makes for K states, and check its type.

    Args:
        name: Of the argument.
        kind: Of family.
        example: Of such a family.
        family: Called with K, returns a ``PyroModule``.
        num_states: K.

    Raises:
        TypeError: If ``family`` is not a family, or what it makes is not a ``PyroModule``.
    """
    kind_of = family if isinstance(family, type) else type(family)
    if not callable(family) or issubclass(kind_of, torch.distributions.Distribution):
        raise TypeError(f"{name} must be {kind}, such as {example}; got {kind_of.__name__}.")
    part = family(num_states)
    if isinstance(part, partial):
        got = getattr(family, "__name__", family)
        raise TypeError(f"{name} must be {kind}, by a call, such as {example}; got {got} itself.")
    if not isinstance(part, PyroModule):
        raise TypeError(f"{name} must return a PyroModule when called with K; got {type(part)}.")
    return part


def component_sums(
    values: Tensor, weights: Tensor, features: Callable[[Tensor], dict[str, Tensor]]
) -> Statistics:
    """Weighted counts of the components that are known, and sums of their features, in float64.

    Args:
        values: ``(M, D)``; NaN is missing.
        weights: ``(R, M, K)``.
        features: Functions of the values, each ``(M, D)``, by name.

    Returns:
        ``known`` and the features, each ``(R, K, D)``.
    """
    dim, names = values.size(-1), list(features(values[:0]))
    # in a tenth of the time of isnan().any()
    complete = exceeds((~values.sum().isnan()).byte(), 0)

    def columns(values: Tensor) -> Tensor:
        if complete:
            return torch.cat([torch.ones_like(values[:, :1]), *features(values).values()], -1)
        missing = values.isnan()
        found = features(values.masked_fill(missing, 0.0)).values()
        known = [feature.masked_fill(missing, 0.0) for feature in found]
        return torch.cat([(~missing).to(values), *known], -1)

    sizes = [1 if complete else dim, *[dim] * len(names)]
    known, *sums = weighted_sums(weights, values, columns, sum(sizes)).split(sizes, -1)
    return {"known": known.expand(*known.shape[:-1], dim), **dict(zip(names, sums))}


def filled(name: str, value: Number, shape: tuple[int, ...]) -> Tensor:
    """Broadcast ``value`` to a floating-point tensor of ``shape``."""
    floating = isinstance(value, Tensor) and value.dtype.is_floating_point
    tensor = torch.as_tensor(value, dtype=None if floating else torch.get_default_dtype())
    if not bool(tensor.isfinite().all()):
        text = f"{name} must be finite; got {tensor[~tensor.isfinite()][0].item()}"
        raise ValueError(f"{text}. Look for NaN in what it is made of.")
    try:
        return tensor.expand(shape).clone()
    except RuntimeError:
        got = tuple(tensor.shape)
        raise ValueError(f"{name} must be a number or broadcast to {shape}; got {got}.") from None


def positive(name: str, value: Number, shape: tuple[int, ...]) -> Tensor:
    """Broadcast ``value`` to a tensor of ``shape``, and raise unless it is positive."""
    tensor = filled(name, value, shape)
    check_positive(name, tensor)
    return tensor


def check_strengths(weight: float, concentration: float) -> None:
    """Raise unless ``weight`` and ``concentration`` are positive and finite."""
    for name, value in (("weight", weight), ("concentration", concentration)):
        check_positive_number(name, value, "A small one, such as 0.01, is a weak prior.")
