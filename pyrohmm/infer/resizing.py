"""Merge and split of states: HMMs of one state fewer or more, from which a fit may go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import transform_to

from .._checks import check_floats, check_shape
from ..distributions.hmm import HMM
from ..distributions.observation import Streams
from ..io.persistence import BUILT_FROM, describe, restored
from ..ops.stationary import stationary

_SIMPLEX = (dist.Categorical, dist.OneHotCategorical)
_NORMAL = (dist.Normal, dist.NanMaskedNormal)
_JOINT = (dist.MultivariateNormal, dist.NanMaskedMultivariateNormal)


def merge_states(hmm: HMM, first: int, second: int, usage: Tensor | None = None) -> HMM:
    r"""The HMM in which two states are one: of K - 1 states, and a density that is close.

    The new state stands where ``first`` did; those after ``second`` move up by one. It is entered
    where either was, and left as both are on average, by usage. It emits with the probabilities or
    the mean of the mixture of both; a normal one with its covariance too.

    Args:
        hmm: The model, such as ``fit.hmm(data)``; labels are left out.
        first: A state.
        second: Another one.
        usage: ``(K,)``, how often each state is visited, such as the sum of
            ``hmm.posterior(values).states``; by default the stationary distribution.

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
    tensors, meta = _parts_of(hmm)
    for name, state in (("first", first), ("second", second)):
        _check_state(name, state, hmm)
    if first == second:
        raise ValueError(f"second must be a state other than first; got {second} for both.")
    if usage is None:
        usage = stationary(hmm.log_transition)
    check_floats("usage", usage)
    check_shape("usage", usage, (hmm.num_states,), "(K,)")
    if not bool((usage >= 0).all()):
        raise ValueError(f"usage must not be negative; got {usage.min().item():g}.")
    pair = torch.tensor([first, second])
    weights = usage[pair].to(hmm.log_initial) + torch.finfo(hmm.log_initial.dtype).tiny
    weights = weights / weights.sum()
    keep = torch.arange(hmm.num_states - 1)
    keep = keep + (keep >= second)

    def joined(rows: Tensor, merged: Tensor) -> Tensor:
        rows = rows.clone()
        rows[first] = merged
        return rows[keep]

    matrix = joined(tensors["log_transition"].mT, tensors["log_transition"].mT[pair].logsumexp(0))
    matrix = matrix.mT
    tensors["log_transition"] = joined(
        matrix, (matrix[pair] + weights.log().unsqueeze(-1)).logsumexp(0)
    )
    tensors["log_initial"] = joined(
        tensors["log_initial"], tensors["log_initial"][pair].logsumexp(0)
    )
    for path, kind, tables in _emissions(hmm, tensors, meta):
        both = {name: table[pair] for name, table in tables.items()}
        for name, merged in _mixed(kind, both, weights, path).items():
            tensors[f"{path}.{name}"] = joined(tables[name], merged)
    return restored(tensors, meta)


def split_state(hmm: HMM, state: int, noise: float = 0.1) -> HMM:
    """The HMM in which a state is two: of K + 1 states, and a density that is close.

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
    tensors, meta = _parts_of(hmm)
    _check_state("state", state, hmm)
    if not noise >= 0:
        raise ValueError(f"noise must be at least 0; got {noise}.")
    index = torch.cat([torch.arange(hmm.num_states), torch.tensor([state])])
    copies = torch.tensor([state, hmm.num_states])
    half = torch.zeros(hmm.num_states + 1).to(hmm.log_initial)
    half[copies] = torch.tensor(0.5).log().to(half)
    tensors["log_initial"] = tensors["log_initial"][index] + half
    matrix = tensors["log_transition"][index][:, index] + half
    if noise > 0:
        matrix = matrix.clone()
        matrix[copies] = (matrix[copies] + noise * torch.randn(2, len(index)).to(half)).log_softmax(
            -1
        )
    tensors["log_transition"] = matrix
    for path, kind, tables in _emissions(hmm, tensors, meta):
        unit = _unit(tables)
        for name, old in tables.items():
            table = old[index].clone()
            if noise > 0:
                size = noise * unit[index][copies] if name == "loc" else noise
                table[copies] = _moved(kind, name, table[copies], size)
            tensors[f"{path}.{name}"] = table
    return restored(tensors, meta)


def _parts_of(hmm: HMM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Description and tensors of an HMM, without labels."""
    if type(hmm) is not HMM:
        raise TypeError(f"hmm must be a plain HMM; got {type(hmm).__name__}.")
    hmm.check_constant("another number of states")
    if (
        hmm.log_initial.dim() > 1
        or hmm.log_transition.dim() > 2
        or len(hmm.emission.batch_shape) > 1
    ):
        raise ValueError("hmm must have one set of parameters, without batch dimensions.")
    tensors, meta = describe(hmm)
    return {name: tensor.detach() for name, tensor in tensors.items() if name != "allowed"}, meta


def _check_state(name: str, state: int, hmm: HMM) -> None:
    if not 0 <= state < hmm.num_states:
        raise ValueError(
            f"{name} must lie between 0 and K - 1 = {hmm.num_states - 1}; got {state}."
        )


Table = tuple[str, type, dict[str, Tensor]]


def _emissions(hmm: HMM, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Iterator[Table]:
    """The distributions of an emission: path, class and those tensors that have a row per state.

    What they keep as functions of these is taken out of ``tensors``.
    """
    nodes = [("emission", meta["emission"])]
    while nodes:
        path, node = nodes.pop()
        if isinstance(node, list):
            nodes += [(f"{path}.{i}", part) for i, part in enumerate(node)]
            continue
        kind = Streams if node["class"] == "Streams" else getattr(dist, node["class"], None)
        if kind is None:
            raise TypeError(
                "emission must be of distributions with parameters of each state; got "
                f"{node['class']}."
            )
        names = BUILT_FROM[kind].parts
        for name in BUILT_FROM[kind].cached:
            tensors.pop(f"{path}.{name}", None)
        nodes += [(f"{path}.{name}", part) for name, part in zip(names, node["parts"])]
        if not names:
            leaves = {key.removeprefix(f"{path}."): value for key, value in tensors.items()
                      if key.rpartition(".")[0] == path}  # fmt: skip
            rows = {n: t for n, t in leaves.items() if t.dim() and t.size(0) == hmm.num_states}
            yield path, kind, rows


def _mixed(kind: type, both: dict[str, Tensor], weights: Tensor, path: str) -> dict[str, Tensor]:
    """Parameters of the mixture of two states, or of the normal of its moments."""

    def mean(table: Tensor) -> Tensor:
        return torch.tensordot(weights.to(table), table, 1)

    if "component_distribution" not in path and kind in (*_SIMPLEX, dist.Bernoulli, dist.Poisson):
        if "logits" not in both:
            return {name: mean(table) for name, table in both.items()}
        if kind is dist.Bernoulli:
            return {"logits": torch.logit(mean(both["logits"].sigmoid()))}
        return {"logits": mean(both["logits"].softmax(-1)).log()}
    if "component_distribution" in path or kind not in (*_NORMAL, *_JOINT):
        raise TypeError(
            "emission must be of categorical, Bernoulli, Poisson or normal distributions, for two "
            f"states to be merged; got {kind.__name__} at {path}."
        )
    loc = mean(both["loc"])
    away = both["loc"] - loc
    new = {"loc": loc}
    if "scale" in both:
        spread = mean(away.square())
        if both["scale"].size(-1) < away.size(-1):  # one for all components
            spread = spread.mean(-1, keepdim=True)
        new["scale"] = (mean(both["scale"].square()) + spread).sqrt()
    if "scale_tril" in both:
        roots = both["scale_tril"]
        covariance = mean(roots @ roots.mT) + mean(away.unsqueeze(-1) * away.unsqueeze(-2))
        new["scale_tril"] = torch.linalg.cholesky(covariance)
    return new


def _unit(tables: dict[str, Tensor]) -> Tensor:
    """By what locations are measured, of each state."""
    if "scale_tril" in tables:
        return tables["scale_tril"].diagonal(dim1=-2, dim2=-1)
    return tables.get("scale", torch.ones_like(next(iter(tables.values()))))


def _moved(kind: Any, name: str, rows: Tensor, size: Tensor | float) -> Tensor:
    """Parameters with noise, inside their support; counts and covariances stay."""
    constraint = kind.arg_constraints.get(name)
    if constraint is None or constraint.is_discrete or name == "scale_tril":
        return rows
    transform = transform_to(constraint)
    raw = transform.inv(rows)
    moved: Tensor = transform(raw + size * torch.randn_like(raw))
    return moved.log_softmax(-1) if name == "logits" and kind in _SIMPLEX else moved
