"""The arguments that a distribution is built from: to save it, and to make them parameters."""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributions import MultivariateNormal, Normal

from .hard_zeros import built_from

# alternative arguments of one distribution, of which the first is taken
ALTERNATIVES = (
    ("scale_tril", "covariance_matrix", "precision_matrix"),
    ("gate", "gate_logits"),
)
ATTRIBUTES = {"base_distribution": "base_dist"}  # where they differ from arguments


def argument_names(kind: type) -> list[str]:
    """The names of the arguments of a class of distributions, in order."""
    names = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return [name for name in names if name not in ("self", "validate_args")]


def arguments_of(distribution: Any) -> dict[str, Any]:
    """The arguments that build a distribution, by name.

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
        given = built_from(holder_of(distribution))
        left_out |= {"probs", "logits"} - {given}
    pairs = ((name, ATTRIBUTES.get(name, name)) for name in names if name not in left_out)
    found = {name: getattr(distribution, at) for name, at in pairs if hasattr(distribution, at)}
    if isinstance(distribution, Normal) and is_spherical(distribution):
        found["scale"] = distribution.scale[..., :1]
    if isinstance(distribution, MultivariateNormal) and is_tied(distribution):
        found["scale_tril"] = distribution.scale_tril[..., :1, :, :]
    return found


def holder_of(distribution: Any) -> Any:
    """The distribution that has the probabilities as attributes: itself, or one within."""
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
