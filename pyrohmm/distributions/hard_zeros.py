"""Log- and cumulative probabilities with exact zeros; arguments of distributions.

torch computes logarithms of probabilities that it clamps: ``Categorical(probs=...).log_prob`` of
what never happens is -15.9 in float32, and not -inf. Its terms of the density of Gamma(1e5, 1e3)
are of the size of 1e6, and leave two digits of their sum: here such terms are in float64.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from pyro import distributions as pyro_dist
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    Distribution,
    Gamma,
    Independent,
    LogNormal,
    Multinomial,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    OneHotCategorical,
    Poisson,
    StudentT,
    VonMises,
    Weibull,
    constraints,
)
from torch.distributions.utils import probs_to_logits
from torch.nn.functional import logsigmoid

from .._checks import broadcast_shapes
from .._sync import exceeds
from .._transforms import transforming
from ..ops.log_space import finite_or_zero, log
from ..ops.products import product

WIDE = (
    Beta, Binomial, Gamma, LogNormal, NegativeBinomial, Poisson, StudentT, VonMises, Weibull,
    pyro_dist.BetaBinomial, pyro_dist.GammaPoisson,
)  # fmt: skip  # whose terms may be much larger than their sum


def built_from(distribution: Any) -> str:
    """Which of ``probs`` and ``logits`` a distribution was built from; it may have computed both.

    Logarithms that torch computes from probabilities are clamped, and would lose the zeros.
    """
    held = vars(distribution)
    probs, logits = held.get("probs"), held.get("logits")
    if probs is None or logits is None:
        return "logits" if probs is None else "probs"
    if held.get("_param") is probs:  # torch keeps there what it was built from
        return "probs"
    # expanded: what it was built from is not marked
    computed = probs_to_logits(probs, is_binary=not isinstance(distribution, Categorical))
    clamped = bool(((probs == 0) | (probs == 1)).any())
    alike = torch.equal(computed, logits) or (clamped and torch.allclose(computed, logits))
    return "probs" if alike else "logits"


def log_probs(emission: Categorical) -> Tensor:
    """Logarithms of the probabilities of symbols; probabilities of zero are exact.

    (``Categorical(probs=...).logits`` has the logarithm of the smallest number in their place.)
    """
    return log(emission.probs) if built_from(emission) == "probs" else emission.logits


def log_probs_of_bits(bits: Any) -> tuple[Tensor, Tensor]:
    """Logarithms of the probabilities of one and of zero, exact where one of them is zero.

    Args:
        bits: Built from ``probs`` or ``logits``, such as a Bernoulli distribution.
    """
    if built_from(bits) == "logits":
        return logsigmoid(bits.logits), logsigmoid(-bits.logits)
    sure = bits.probs == 1
    rest = torch.log1p(-bits.probs.masked_fill(sure, 0.0)).masked_fill(sure, -torch.inf)
    return log(bits.probs), rest


def _weighted(counts: Tensor, logs: Tensor) -> Tensor:
    """Products of ``counts`` and ``logs``; zero, in value and gradient, where a count is zero."""
    return torch.where(counts == 0, 0.0, logs) * counts


def _in_double(part: Any, dtypes: set[torch.dtype]) -> Any:
    """Copy of a distribution with tensors in float64; their dtypes are added to ``dtypes``."""
    if isinstance(part, Tensor) and part.dtype.is_floating_point:
        dtypes.add(part.dtype)
        return part.double()
    if not isinstance(part, Distribution):
        return part
    wide, fields = copy.copy(part), dict(vars(part))
    if {"probs", "logits"} <= fields.keys():  # one was computed from the other
        del fields["logits" if built_from(part) == "probs" else "probs"]
    wide.__dict__ = {name: _in_double(value, dtypes) for name, value in fields.items()}
    return wide


def exact_log_prob(distribution: Any, values: Tensor) -> Tensor:
    """Log-density of ``values``, -inf where a probability is exactly zero.

    Terms that may cancel are in float64; the result is of the dtype of the numbers.

    Example:
        >>> from pyro.distributions import Categorical
        >>> never = Categorical(probs=torch.tensor([0.0, 1.0]))
        >>> exact_log_prob(never, torch.tensor([0, 1]))
        tensor([-inf, 0.])
    """
    own = isinstance(distribution, Categorical | Bernoulli | Poisson | Weibull)
    if own and distribution._validate_args:
        distribution._validate_sample(values)
    if isinstance(distribution, Categorical):
        logs = log_probs(distribution)
        index, logs = torch.broadcast_tensors(values.long().unsqueeze(-1), logs)
        return logs.gather(-1, index[..., :1]).squeeze(-1)
    if isinstance(distribution, Bernoulli):
        ones, zeros = log_probs_of_bits(distribution)
        values = values.to(torch.promote_types(values.dtype, ones.dtype))
        return _weighted(values, ones) + _weighted(1 - values, zeros)
    if isinstance(distribution, WIDE):
        dtypes = {values.dtype}
        wide = _in_double(distribution, dtypes)
        if dtypes != {torch.float64}:
            wide._validate_args = distribution._validate_args and not own
            scores = exact_log_prob(wide, values.double())
            return scores.to(reduce(torch.promote_types, dtypes))
    if isinstance(distribution, Weibull):  # without powers that leave the range of numbers
        shape, logs = distribution.concentration, values.log()
        power = shape * (logs - distribution.scale.log())
        return shape.log() + power - logs - power.exp()
    if isinstance(distribution, Poisson):
        rate = distribution.rate  # with gradients also where it is zero
        return _weighted(values, log(rate)) - rate - (values + 1).lgamma()
    scores = distribution.log_prob(values)
    if isinstance(distribution, OneHotCategorical | Multinomial):
        never = (log_probs(distribution._categorical).isneginf() & (values > 0)).any(-1)
    elif isinstance(distribution, Binomial | NegativeBinomial):
        ones, zeros = log_probs_of_bits(distribution)
        never = ones.isneginf() & (values > 0)
        if isinstance(distribution, Binomial):
            never = never | (zeros.isneginf() & (values < distribution.total_count))
    else:
        return scores
    return scores.masked_fill(never, -torch.inf)


def log_prob_of_bits(logs: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
    """Log-density ``(*A, K)`` of independent Bernoulli vectors, by products of matrices.

    Args:
        logs: Of the probabilities of one and of zero, each ``(*b, K, D)`` with ``b[-1] = 1``, if
            there is one: see :func:`log_probs_of_bits`.
        values: ``(*A, D)``; NaN is missing.
    """
    known = ~values.isnan()
    ones = torch.where(known, values, 0.0).to(logs[0].dtype)
    bits, table = torch.cat([ones, known.to(ones.dtype) - ones], -1), torch.cat(logs, -1)
    scores, never = product(bits, finite_or_zero(table)), table.isneginf()
    if transforming() or not exceeds((~never).all().byte(), 0):
        scores = scores.masked_fill(product(bits, never.to(bits.dtype)) > 0, -torch.inf)
    return scores


# Cumulative probabilities -------------------------------------------------------------------------

BISECTIONS = 60  # of an interval: what is left is below the rounding of its ends
OPEN = {"lower_bound": -torch.inf, "upper_bound": torch.inf}
REACH = 40.0  # standard deviations about the mean, within which values are sought


def bounds(distribution: Any) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of a univariate support, which broadcast with the batch."""
    ends: Any = (0.0, 1.0)
    if distribution.support is not constraints.boolean:
        ends = [getattr(distribution.support, name, end) for name, end in OPEN.items()]
    low, high = (
        end if isinstance(end, Tensor) else torch.tensor(end, dtype=torch.double) for end in ends
    )
    return low, high


def cdf_of_counts(distribution: Any, values: Tensor) -> Tensor:
    """CDF of a distribution of counts, by cumulative sums of probabilities.

    Args:
        distribution: Of batch shape B.
        values: What broadcasts with B.
    """
    most = values.max().minimum(bounds(distribution)[1].max().to(values.device))
    counts = torch.arange(max(int(most), 0) + 1).to(values)
    counts = counts.reshape(-1, *(1,) * len(distribution.batch_shape))
    upto = exact_log_prob(distribution, counts).double().exp().cumsum(0)
    upto = torch.cat([torch.zeros_like(upto[:1]), upto])  # (V + 1, *B)
    shape = broadcast_shapes(values.shape, upto.shape[1:])
    upto = upto.reshape(len(upto), *(1,) * (len(shape) + 1 - upto.dim()), *upto.shape[1:])
    index = values.clamp(-1, len(counts) - 1).long() + 1
    return upto.expand(-1, *shape).gather(0, index.expand(1, *shape)).squeeze(0)


def first_reaching(reached: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Least value between ``low`` and ``high`` where ``reached`` holds, by bisection."""
    first = low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = reached(middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return torch.where(reached(first), first, high)


# Arguments ----------------------------------------------------------------------------------------

# alternative arguments of one distribution, of which the first is taken
ALTERNATIVES = (("scale_tril", "covariance_matrix", "precision_matrix"), ("gate", "gate_logits"))
ATTRIBUTES = {"base_distribution": "base_dist"}  # where they differ from arguments


def argument_names(kind: type) -> list[str]:
    """Names of the constructor arguments of a class of distributions, in order."""
    names = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return [name for name in names if name not in ("self", "validate_args")]


def without_events(distribution: Any) -> Any:
    """Base of a distribution within ``Independent``; any other as it is."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def arguments_of(distribution: Any) -> dict[str, Any]:
    """Constructor arguments that rebuild a distribution, by name.

    Of ``probs`` and ``logits`` it is the one that it was built from; one scale or covariance
    that stands for several is one.

    Example:
        >>> arguments_of(Normal(torch.zeros(2, 2), torch.ones(2, 1)))
        {'loc': tensor([[0., 0.],
                [0., 0.]]), 'scale': tensor([[1.],
                [1.]])}
    """
    names = argument_names(type(distribution))
    left_out = {name for same in ALTERNATIVES if same[0] in names for name in same[1:]}
    if "probs" in names and "logits" in names:
        left_out |= {"probs", "logits"} - {built_from(holder_of(distribution))}
    pairs = ((name, ATTRIBUTES.get(name, name)) for name in names if name not in left_out)
    found = {name: getattr(distribution, at) for name, at in pairs if hasattr(distribution, at)}
    if isinstance(distribution, Normal) and is_spherical(distribution):
        found["scale"] = distribution.scale[..., :1]
    if isinstance(distribution, MultivariateNormal) and is_tied(distribution):
        found["scale_tril"] = distribution.scale_tril[..., :1, :, :]
    return found


def holder_of(distribution: Any) -> Any:
    """Distribution with attributes ``probs`` and ``logits``: itself, or its inner categorical."""
    return getattr(distribution, "_categorical", distribution)


def is_spherical(normal: Any) -> bool:
    """Whether a ``Normal`` ``(*, K, D)`` was built with one scale ``(*, K, 1)`` for each state.

    No value is read. One scale for all the states as well is none of each.
    """
    steps = normal.scale.stride()
    return len(steps) > 1 and normal.scale.size(-1) > 1 and steps[-1] == 0 and steps[-2] != 0


def is_tied(normal: Any) -> bool:
    """Whether a ``MultivariateNormal`` ``(*, K)`` was built with one covariance for all states."""
    root = normal.scale_tril
    return root.dim() > 2 and root.size(-3) > 1 and root.stride(-3) == 0
