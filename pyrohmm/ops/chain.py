"""The arguments of the recursions, checked and in one form."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import (
    check_broadcast,
    check_integers,
    check_lengths,
    check_same_device,
    check_tensor,
    check_trailing,
)
from .._precision import at_least_single
from .._transforms import transforming
from .masks import exists


class Chain(NamedTuple):
    """The arguments, time-major: T steps of G groups of n sequences; a group shares a matrix."""

    initial: Tensor  # (G, n, K), log
    transition: Tensor  # (S, G, K, K), log, S = 1 or T - 1
    likelihood: Tensor  # (T, G, n, K), log, 0 at padded steps
    lengths: Tensor  # (G, n), on the CPU

    def subset(self, chosen: Tensor) -> Chain:
        """The sequences ``chosen``, indices into the ``G * n``."""
        groups, size = self.lengths.shape
        initial = self.initial.flatten(0, 1)[chosen]
        likelihood = self.likelihood.flatten(1, 2)[:, chosen]
        lengths = self.lengths.flatten()[chosen.cpu()]
        if groups == 1:
            return Chain(initial[None], self.transition, likelihood[:, None], lengths[None])
        matrices = self.transition[:, chosen // size]
        return Chain(initial[:, None], matrices, likelihood[:, :, None], lengths[:, None])


class Arguments(NamedTuple):
    """The arguments of a recursion, checked and of one dtype; dimensions as they came."""

    initial: Tensor  # (*b, K), log
    transition: Tensor  # (*b, 1|T-1, K, K), log
    likelihood: Tensor  # (*b, T, K), log
    lengths: Tensor  # (*b), on the CPU
    batch: torch.Size  # what the (*b) broadcast to

    @property
    def split(self) -> int:
        """How many dimensions of the batch have matrices of their own."""
        leading = self.transition.shape[:-3]
        first = len(self.batch) - len(leading)
        return max((first + d + 1 for d, size in enumerate(leading) if size != 1), default=0)


def check_arguments(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Arguments:
    """Raise unless dtypes, devices and shapes agree."""
    logs = {
        "log_initial": log_initial,
        "log_transition": log_transition,
        "log_likelihood": log_likelihood,
    }
    for (name, tensor), shape in zip(logs.items(), ("(*B, K)", "(*B, 1|T-1, K, K)", "(*B, T, K)")):
        check_tensor(name, tensor)
        if not tensor.dtype.is_floating_point:
            raise TypeError(
                f"{name} must be floating point; got {tensor.dtype}. Call .float() on it."
            )
        if tensor.dim() < shape.count(","):
            raise ValueError(
                f"{name} must have shape {shape}; got shape {tuple(tensor.shape)}. Insert "
                "dimensions of size 1 with unsqueeze."
            )
    check_integers("lengths", lengths)
    check_same_device(logs)
    log_initial, log_transition, log_likelihood = map(at_least_single, logs.values())
    dtype = torch.promote_types(log_initial.dtype, log_transition.dtype)
    dtype = torch.promote_types(dtype, log_likelihood.dtype)
    log_initial, log_transition = log_initial.to(dtype), log_transition.to(dtype)
    log_likelihood = log_likelihood.to(dtype)
    steps, num_states = log_likelihood.shape[-2:]
    if steps == 0:
        dims = tuple(log_likelihood.shape)
        raise ValueError(f"log_likelihood must have at least one step; got shape {dims}.")
    check_trailing(
        "log_initial", log_initial, (num_states,), "(K,)", "K is that of log_likelihood."
    )
    check_trailing("log_transition", log_transition, (num_states, num_states), "(K, K)")
    lengths = lengths.cpu().long()
    check_lengths(lengths, steps)
    varying = log_transition.size(-3)
    if varying != 1 and varying != steps - 1:
        raise ValueError(
            f"log_transition must have 1 or T - 1 = {steps - 1} matrices in dimension -3; got "
            f"{varying}."
        )
    batch = check_broadcast(
        {
            "log_initial": log_initial.shape[:-1],
            "log_transition": log_transition.shape[:-3],
            "log_likelihood": log_likelihood.shape[:-2],
            "lengths": lengths.shape,
        }
    )
    return Arguments(log_initial, log_transition, log_likelihood, lengths, batch)


def group(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> tuple[Chain, torch.Size]:
    """Check the arguments, and bring them into one form; also the batch shape."""
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    return arrange(arguments), arguments.batch


def arrange(arguments: Arguments) -> Chain:
    """The arguments time-major, in groups that share a matrix."""
    log_initial, log_transition, log_likelihood, lengths, batch = arguments
    split, varying = arguments.split, log_transition.size(-3)
    steps, num_states = log_likelihood.shape[-2:]
    leading = (1,) * (len(batch) + 3 - log_transition.dim()) + tuple(log_transition.shape[:-3])
    groups, size = math.prod(batch[:split]), math.prod(batch[split:])
    transition = log_transition.reshape(leading[:split] + log_transition.shape[-3:])
    transition = transition.expand(batch[:split] + transition.shape[-3:])
    transition = transition.reshape(groups, varying, num_states, num_states).movedim(1, 0)
    likelihood = log_likelihood.expand(*batch, steps, num_states).movedim(-2, 0)
    likelihood = likelihood.reshape(steps, groups, size, num_states)
    lengths = lengths.expand(batch).reshape(groups, size)
    if transforming() or bool((lengths < steps).any()):
        padded = ~exists(lengths, steps, likelihood.device).movedim(-1, 0).unsqueeze(-1)
        likelihood = likelihood.masked_fill(padded, 0.0)
    initial = log_initial.expand(*batch, num_states).reshape(groups, size, num_states)
    return Chain(initial.contiguous(), transition, likelihood.contiguous(), lengths.contiguous())
