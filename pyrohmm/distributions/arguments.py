"""The arguments of an ``HMM``: what they may be, and the checks of their shapes and devices."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import (
    check_booleans,
    check_broadcast,
    check_lengths,
    check_same_device,
)
from ..chains.base import Chain


class StructuredEmission(Protocol):
    """An emission in a form smaller than a distribution batched over the K states."""

    @property
    def batch_shape(self) -> torch.Size:
        """``(K,)``."""

    @property
    def event_shape(self) -> torch.Size:
        """``(*E)``, of one observation."""

    @property
    def support(self) -> constraints.Constraint:
        """Of one observation."""

    @property
    def distribution(self) -> TorchDistribution:
        """Batched over the K states; computed when it is read."""

    def sample(self, states: Tensor) -> Tensor:
        """Sample an observation ``(*A, *E)`` from each of ``states`` ``(*A)``."""


def check_emission(chain: Chain, emission: TorchDistribution | StructuredEmission) -> None:
    """Raise unless the emission is of the states of ``chain``, and on its device."""
    num_states = chain.num_states
    tensors = {"log_initial": chain.log_initial}
    if isinstance(emission, torch.distributions.Distribution):
        tensors |= _first_tensor(emission)
    elif not hasattr(type(emission), "distribution"):
        raise TypeError(
            "emission must be a distribution batched over the K states; got "
            f"{type(emission).__name__}."
        )
    if emission.batch_shape[-1:] != (num_states,):
        raise ValueError(
            f"emission must have a batch shape that ends in K = {num_states} states; got batch "
            f"shape {tuple(emission.batch_shape)}. Batch it over states, or call .to_event(1) "
            "on a distribution whose last dimension is one observation."
        )
    check_same_device(tensors)


def check_steps(
    chain: Chain,
    emission: TorchDistribution | StructuredEmission,
    lengths: Tensor,
    observed: Tensor | None,
    allowed: Tensor | None,
    emission_per_step: bool,
) -> tuple[torch.Size, int]:
    """Raise unless batch dimensions broadcast and all arguments are for one number of steps.

    Their last dimensions have been checked, and ``lengths`` are on the CPU.

    Returns:
        The batch shape ``(*B)``, and T.
    """
    longest = int(lengths.max()) if lengths.numel() else 0
    num_steps, shapes = chain.steps_and_batches(longest)  # by the argument that says so
    log_initial: Tensor = chain.log_initial
    shapes["emission"] = emission.batch_shape[: -2 if emission_per_step else -1]
    shapes["lengths"] = lengths.shape
    if emission_per_step:
        if len(emission.batch_shape) < 2 or emission.batch_shape[-2] < longest:
            raise ValueError(
                "with emission_per_step, emission must have batch shape (*B, T, K) with T at "
                f"least {longest}, the longest sequence; got {tuple(emission.batch_shape)}."
            )
        num_steps["emission"] = emission.batch_shape[-2]
    if observed is not None:
        check_booleans("observed", observed)
        check_same_device({"log_initial": log_initial, "observed": observed})
        if observed.dim() == 0:
            raise ValueError("observed must have shape (*B, T); got shape ().")
        num_steps["observed"], shapes["observed"] = observed.size(-1), observed.shape[:-1]
    if allowed is not None:
        num_states = log_initial.size(-1)
        check_booleans("allowed", allowed)
        check_same_device({"log_initial": log_initial, "allowed": allowed})
        if allowed.dim() < 2 or allowed.size(-1) != num_states:
            raise ValueError(
                f"allowed must have shape (*B, T, K) with K = {num_states}; got "
                f"{tuple(allowed.shape)}."
            )
        num_steps["allowed"], shapes["allowed"] = allowed.size(-2), allowed.shape[:-2]
    if len(set(num_steps.values())) > 1:
        listing = ", ".join(f"{name} {count}" for name, count in num_steps.items())
        raise ValueError(f"all arguments must be for one number of steps T; got {listing}.")
    steps = next(iter(num_steps.values()), longest)
    check_lengths(lengths, steps)
    return check_broadcast(shapes), steps


def _first_tensor(emission: Any) -> dict[str, Tensor]:
    """One tensor of the emission, to see its device by."""
    while hasattr(emission, "base_dist"):
        emission = emission.base_dist
    tensors = (item for item in vars(emission).values() if isinstance(item, Tensor))
    tensor = next(tensors, None)
    return {} if tensor is None else {"emission": tensor}
