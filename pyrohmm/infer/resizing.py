"""Merge and split of states: HMMs of one state fewer or more, from which a fit may go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    Poisson,
    transform_to,
)

from ..distributions.autoregressive import Autoregressive
from ..distributions.hard_zeros import arguments_of
from ..distributions.hmm import HMM
from ..distributions.observation import Streams, Tied
from ..ops.markov import stationary

Change = Callable[[Any, dict[str, Tensor]], dict[str, Tensor]]


def merge_states(hmm: HMM, first: int, second: int, usage: Tensor | None = None) -> HMM:
    r"""Merge two states: an HMM of K - 1 states and nearly the same density.

    The new state stands where ``first`` did; those after ``second`` move up by one. It is entered
    where either was, and left as both are on average, by usage. It emits with the probabilities or
    the mean of the mixture of both; a normal one with its covariance too.

    Args:
        hmm: The model, such as ``fit.hmm(data)``; labels are left out.
        first: A state.
        second: Another one.
        usage: ``(K,)``, how often each state is visited, such as the sum of
            ``hmm.posterior(values).state_probs``; by default the stationary distribution.

    Returns:
        An HMM for the same lengths. ``fit_em(TabularHMM(K - 1, ...), data,
        start=starts.from_hmm(merged))`` goes on from it.

    Raises:
        TypeError: If ``hmm`` is no plain ``HMM``, or its emission is not of categorical, Bernoulli,
            Poisson or normal distributions, or streams of them.
        ValueError: If the states are not two of those of ``hmm``, its parameters have dimensions
            of a batch or of steps, or usage is not that of K states.

    Example:
        >>> even = torch.full((3, 3), 1 / 3).log()
        >>> hmm = HMM(even[0], even, Poisson(torch.tensor([1.0, 3.0, 9.0])), torch.tensor(5))
        >>> merged = merge_states(hmm, 0, 1)
        >>> merged.emission.rate, merged.log_initial.exp()
        (tensor([2., 9.]), tensor([0.6667, 0.3333]))
    """
    _check_plain(hmm, first, second)
    if first == second:
        raise ValueError(f"second must be a state other than first; got {second} for both.")
    usage = stationary(hmm.log_transition) if usage is None else usage
    if usage.shape != (hmm.num_states,) or not bool((usage >= 0).all()):
        raise ValueError(f"usage must be a number of at least 0 for each state; got {usage}.")
    pair = torch.tensor([first, second])
    weights = usage[pair].to(hmm.log_initial) + torch.finfo(hmm.log_initial.dtype).tiny
    weights = weights / weights.sum()
    keep = torch.arange(hmm.num_states - 1)
    keep = keep + (keep >= second)

    def joined(rows: Tensor, merged: Tensor) -> Tensor:
        rows = rows.clone()
        rows[first] = merged
        return rows[keep]

    def merge(part: Any, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        both = {name: table[pair] for name, table in tables.items()}
        merged = _merged(part, both, weights)
        return {name: joined(tables[name], row) for name, row in merged.items()}

    start, matrix = hmm.log_initial.detach(), hmm.log_transition.detach()
    matrix = joined(matrix.mT, matrix.mT[pair].logsumexp(0)).mT
    matrix = joined(matrix, (matrix[pair] + weights.log().unsqueeze(-1)).logsumexp(0))
    start = joined(start, start[pair].logsumexp(0))
    emission = _resized(hmm.emission, hmm.num_states, merge)
    return hmm.replace(log_initial=start, log_transition=matrix, emission=emission, allowed=None)


def split_state(hmm: HMM, state: int, noise: float = 0.1) -> HMM:
    """Split a state in two: an HMM of K + 1 states and nearly the same density.

    Both are entered half as often and left in the same way; the new one is the last. Without noise
    the density is the same, and stays the same under EM: the copies must differ to part.

    Args:
        hmm: The model, such as ``fit.hmm(data)``; labels are left out.
        state: Which state.
        noise: Standard deviation of what is added to the transitions and parameters of both,
            in logarithms of probabilities and scales, and for locations of normal distributions
            relative to their scales.

    Returns:
        An HMM for the same lengths: see :func:`merge_states`.

    Raises:
        TypeError: If ``hmm`` is no plain ``HMM``, or its emission is of states that share
            parameters or of observations that depend on those before.
        ValueError: If the state is not one of ``hmm``, its parameters have dimensions of a batch
            or of steps, or noise is negative.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Poisson(torch.tensor([1.0, 9.0])), torch.tensor(3))
        >>> split = split_state(hmm, 1, noise=0.0)
        >>> split.emission.rate, split.log_initial.exp()
        (tensor([1., 9., 9.]), tensor([0.5000, 0.2500, 0.2500]))
    """
    _check_plain(hmm, state)
    if not noise >= 0:
        raise ValueError(f"noise must be at least 0; got {noise}.")
    index = torch.cat([torch.arange(hmm.num_states), torch.tensor([state])])
    copies = torch.tensor([state, hmm.num_states])
    half = torch.zeros(hmm.num_states + 1).to(hmm.log_initial)
    half[copies] = torch.tensor(0.5).log().to(half)
    matrix = hmm.log_transition.detach()[index][:, index] + half
    if noise > 0:
        matrix = matrix.clone()
        moved = matrix[copies] + noise * torch.randn(2, len(index)).to(half)
        matrix[copies] = moved.log_softmax(-1)

    def split(part: Any, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: old[index].clone() for name, old in tables.items()}
        for name, table in found.items() if noise > 0 else ():
            size = noise * _unit(tables)[index][copies] if name == "loc" else noise
            table[copies] = _moved(part, name, table[copies], size)
        return found

    emission = _resized(hmm.emission, hmm.num_states, split)
    start = hmm.log_initial.detach()[index] + half
    return hmm.replace(log_initial=start, log_transition=matrix, emission=emission, allowed=None)


def _check_plain(hmm: HMM, *states: int) -> None:
    """Raise unless an HMM has one set of parameters of a Markov chain, and these states."""
    if type(hmm) is not HMM:
        raise TypeError(f"hmm must be a plain HMM; got {type(hmm).__name__}.")
    hmm.check_constant("another number of states")
    dims = hmm.log_initial.dim(), hmm.log_transition.dim(), len(hmm.emission.batch_shape)
    if dims != (1, 2, 1):
        text = f"hmm must have one set of parameters, without batch dimensions; got {hmm}"
        raise ValueError(f"{text}. Choose one restart or sample.")
    for state in states:
        if not 0 <= state < hmm.num_states:
            raise ValueError(
                f"a state must be below K = {hmm.num_states}; got {state}. Count states from 0."
            )


def _resized(part: Any, num_states: int, change: Change) -> Any:
    """Rebuild a distribution for another number of states, with parameters from ``change``.

    ``rows`` are its tensors that have a row for each of the K states.
    """
    if isinstance(part, Tied | Autoregressive):
        text = "emission must have parameters for each state alone, and not depend on the past"
        raise TypeError(f"{text}; got {type(part).__name__}.")
    arguments = arguments_of(part)
    if not isinstance(part, Independent | Streams):
        tensors = {n: value.detach() for n, value in arguments.items() if isinstance(value, Tensor)}
        rows = {n: t for n, t in tensors.items() if t.shape[:1] == (num_states,)}
        arguments |= change(part, rows)
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = [_resized(inner, num_states, change) for inner in value]
        elif isinstance(value, Distribution):
            arguments[name] = _resized(value, num_states, change)
    return type(part)(**arguments, validate_args=vars(part).get("_validate_args"))


def _merged(part: Any, both: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Parameters, by name, of one distribution with the moments of a mixture of two.

    Args:
        part: A distribution.
        both: Its arguments in two states, each ``(2, ...)``.
        weights: ``(2,)``, which sum to one.
    """

    def mean(table: Tensor) -> Tensor:
        return torch.tensordot(weights.to(table), table, 1)

    if isinstance(part, Categorical | Bernoulli) and "logits" in both:
        if isinstance(part, Categorical):
            return {"logits": mean(both["logits"].softmax(-1)).log()}
        return {"logits": mean(both["logits"].sigmoid()).logit()}
    if isinstance(part, Categorical | Bernoulli | Poisson):
        return {name: mean(table) for name, table in both.items()}
    if not isinstance(part, Normal | MultivariateNormal):
        text = "emission must be of symbols, counts or normal numbers, to merge two states"
        raise TypeError(f"{text}; got {type(part).__name__}. Fit anew with one state fewer.")
    loc = mean(both["loc"])
    away = both["loc"] - loc
    if isinstance(part, MultivariateNormal):
        if "scale_tril" not in both:  # one for all states
            return {"loc": loc}
        root, outer = both["scale_tril"], away.unsqueeze(-1) * away.unsqueeze(-2)
        return {"loc": loc, "scale_tril": torch.linalg.cholesky(mean(root @ root.mT + outer))}
    spread, scale = mean(away.square()), both["scale"]
    if scale.shape != away.shape:  # one for all components
        spread = spread.mean(-1, keepdim=True)
    return {"loc": loc, "scale": (mean(scale.square()) + spread).sqrt()}


def _unit(tables: dict[str, Tensor]) -> Tensor:
    """Unit of the locations of each state: its scale, by which noise is measured."""
    if "scale_tril" in tables:
        return tables["scale_tril"].diagonal(dim1=-2, dim2=-1)
    return tables.get("scale", torch.ones_like(next(iter(tables.values()))))


def _moved(part: Any, name: str, rows: Tensor, size: Tensor | float) -> Tensor:
    """Parameters with noise, inside their support; counts and covariances stay."""
    constraint = part.arg_constraints.get(name)
    if constraint is None or constraint.is_discrete or name == "scale_tril":
        return rows
    transform = transform_to(constraint)
    raw = transform.inv(rows)
    moved: Tensor = transform(raw + size * torch.randn_like(raw))
    return moved.log_softmax(-1) if name == "logits" and constraint.event_dim else moved
