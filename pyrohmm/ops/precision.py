"""The recursions in three ranges of numbers: the caller's, float64, and logarithms.

A sequence whose scaled messages leave a range is computed again in the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._precision import differentiable_gradient, in_full_precision
from . import message_passing
from .chain import Chain
from .log_space import finite_or_zero, logsumexp
from .masks import exists
from .products import accumulated
from .torch_chain import log_space_by_steps
from .torch_chunks import chunk_length

FEW = 64  # sequences, over which float32 may sum


def wider(dtype: torch.dtype) -> torch.dtype | None:
    """The range to try when ``dtype`` underflows; None stands for log space."""
    return None if dtype == torch.float64 else torch.float64


def evidence_of(chain: Chain, dtype: torch.dtype | None) -> Tensor:
    """Log evidence, ``(G, n)``, differentiable."""
    run = _LogSpace if dtype is None else _BothWays if _goes_both_ways(chain) else _Scaled
    value, exact = run.apply(*chain, dtype)
    if exact is not None and not bool(exact.all()):
        assert dtype is not None
        chosen = (~exact).flatten().nonzero().squeeze(-1)
        redone = evidence_of(chain.subset(chosen), wider(dtype)).flatten()
        value = value.flatten().index_put((chosen,), redone).reshape(value.shape)
    return value


def _goes_both_ways(chain: Chain) -> bool:
    """Whether messages go both ways at once: on an accelerator, where there is no shorter way."""
    on_cpu = chain.likelihood.device.type == "cpu"
    return not on_cpu and not chunk_length(chain.transition, chain.likelihood, chain.lengths)


def posterior_of(chain: Chain, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Evidence ``(N,)``, states ``(N, T, K)`` and transitions ``(N, K, K)``, with N = G * n."""
    if dtype is None:
        evidence, gamma, counts, _ = message_passing.in_log_space(chain)
        return evidence, gamma.flatten(1, 2).movedim(0, 1), counts.sum(0)
    scaled: message_passing.Smoothed | message_passing.Messages
    exact: Tensor | None
    if _goes_both_ways(chain):
        scaled = message_passing.both_ways(chain, dtype)
        gamma, message, exact = scaled.gamma, scaled.message, scaled.exact
    else:
        scaled = message_passing.forward(chain, dtype)
        gamma, message, exact = message_passing.backward(chain, scaled)
    # the joint distribution of two states, alpha_t(i) A_ij message_{t+1}(j), summed over t
    alpha = scaled.alpha[:-1].flatten(1, 2).permute(1, 2, 0)  # (N, K, T-1)
    later = message[1:].flatten(1, 2).movedim(1, 0)  # (N, T-1, K)
    size = chain.lengths.size(1)
    if len(scaled.transition) == 1:
        matrices = scaled.transition[0].repeat_interleave(size, 0)
        counts = accumulated(alpha.mT, later, cancels=False) * matrices
        counts = counts.masked_fill_(matrices == 0, 0.0).to(dtype)
        if isinstance(scaled, message_passing.Messages):  # those of both ways are finite
            assert exact is not None
            exact &= counts.isfinite().all(-1).all(-1).reshape(exact.shape)
    else:
        steps = scaled.transition.repeat_interleave(size, 1)  # (T-1, N, K, K)
        counts = torch.einsum("nit,tnij,ntj->nij", alpha, steps, later)
    parts = scaled.evidence.flatten(), gamma.flatten(1, 2).movedim(0, 1), counts
    return _redo(posterior_of, chain, dtype, exact, parts)


def filtered_of(chain: Chain, dtype: torch.dtype | None) -> tuple[Tensor]:
    """Logarithms of filtered probabilities, ``(G * n, T, K)``."""
    if dtype is None:
        return (scaled_messages(message_passing.in_log_space(chain)[3], chain),)
    scaled = message_passing.forward(chain, dtype)
    if bool((chain.lengths < len(scaled.alpha)).any()):
        scaled.alpha.masked_fill_(_padded(chain), 0.0)
    messages = scaled.alpha.log_().flatten(1, 2).movedim(0, 1)  # nothing else will read it
    return _redo(filtered_of, chain, dtype, scaled.exact, (messages,))


def scaled_messages(messages: Tensor, chain: Chain) -> Tensor:
    """Filtered log-probabilities ``(G * n, T, K)`` from log p(x_{1:t}, z_t) ``(T, G, n, K)``."""
    messages = messages - finite_or_zero(logsumexp(messages, -1).unsqueeze(-1))
    return messages.masked_fill(_padded(chain), -torch.inf).flatten(1, 2).movedim(0, 1)


def _padded(chain: Chain) -> Tensor:
    """Which steps do not exist, ``(T, G, n, 1)``."""
    num_steps, device = len(chain.likelihood), chain.likelihood.device
    return ~exists(chain.lengths, num_steps, device).movedim(-1, 0).unsqueeze(-1)


_Parts = TypeVar("_Parts", bound=tuple[Tensor, ...])


def _redo(
    solve: Callable[[Chain, torch.dtype | None], _Parts],
    chain: Chain,
    dtype: torch.dtype,
    exact: Tensor | None,
    parts: _Parts,
) -> _Parts:
    """Replace in ``parts`` the sequences that are not exact by what ``solve`` gives, wider."""
    if exact is None or bool(exact.all()):
        return parts
    chosen = (~exact).flatten().nonzero().squeeze(-1)
    wide = solve(chain.subset(chosen), wider(dtype))
    return tuple(  # type: ignore[return-value]
        part.index_put((chosen,), new.to(part.dtype)) for part, new in zip(parts, wide)
    )


class _Scaled(torch.autograd.Function):
    """Log evidence by scaled messages, and whether they were exact; the gradient is analytic."""

    @staticmethod
    def forward(
        ctx: Any,
        initial: Tensor,
        transition: Tensor,
        likelihood: Tensor,
        lengths: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        chain = Chain(initial, transition, likelihood, lengths)
        scaled = message_passing.forward(chain, dtype)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths, ctx.scaled = lengths, scaled
        ctx.mark_non_differentiable(scaled.exact)
        value = scaled.evidence.masked_fill(~scaled.exact, 0.0)
        return value.to(likelihood.dtype), scaled.exact

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        initial, transition, likelihood = ctx.saved_tensors
        chain = Chain(initial, transition, likelihood, ctx.lengths)
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            return (*_differentiable_gradient(chain, weight), None, None)
        scaled: message_passing.Messages = ctx.scaled
        gamma, message, exact = message_passing.backward(chain, scaled, weight)
        if not torch.equal(exact, scaled.exact):  # only the backward pass left the range
            return (*_log_space_gradient(chain, weight), None, None)
        counts = None
        if ctx.needs_input_grad[1]:
            counts = _transition_counts(scaled.alpha, message, scaled.transition)
            if scaled.watched:  # messages to a state that can hardly be reached may be huge
                counts.masked_fill_(scaled.transition == 0, 0.0)
                if not bool(counts.isfinite().all()):
                    return (*_log_space_gradient(chain, weight), None, None)
            counts = counts.to(transition.dtype)
        return gamma[0].to(initial.dtype), counts, gamma.to(likelihood.dtype), None, None


class _BothWays(torch.autograd.Function):
    """As :class:`_Scaled`, by messages of both ways at once; None in place of all that are exact.

    The host waits once, and not for the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        initial: Tensor,
        transition: Tensor,
        likelihood: Tensor,
        lengths: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        scaled = message_passing.both_ways(Chain(initial, transition, likelihood, lengths), dtype)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths, ctx.scaled = lengths, scaled
        if scaled.exact is not None:
            ctx.mark_non_differentiable(scaled.exact)
        return scaled.evidence.to(likelihood.dtype), scaled.exact

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        initial, transition, likelihood = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            chain = Chain(initial, transition, likelihood, ctx.lengths)
            return (*_differentiable_gradient(chain, weight), None, None)
        scaled: message_passing.Smoothed = ctx.scaled
        factor = weight.to(scaled.gamma.dtype).unsqueeze(-1)
        gamma, counts = scaled.gamma * factor, None
        if ctx.needs_input_grad[1]:
            alpha = scaled.alpha * factor
            counts = _transition_counts(alpha, scaled.message, scaled.transition)
            counts = counts.to(transition.dtype)
        return gamma[0].to(initial.dtype), counts, gamma.to(likelihood.dtype), None, None


def _transition_counts(alpha: Tensor, message: Tensor, transition: Tensor) -> Tensor:
    """Joint distributions of adjacent states, summed over what shares a matrix ``(S, G, K, K)``."""
    if len(alpha) == 1:
        return torch.zeros_like(transition)
    if len(transition) == 1:
        earlier = alpha[:-1].transpose(0, 1).flatten(1, 2)  # (G, (T-1) n, K)
        later = message[1:].transpose(0, 1).flatten(1, 2)
        return accumulated(earlier, later, cancels=False).mul_(transition[0]).unsqueeze(0)
    if alpha.size(2) <= FEW:
        return (alpha[:-1].mT @ message[1:]).mul_(transition)
    return accumulated(alpha[:-1], message[1:], cancels=False).mul_(transition)


class _LogSpace(torch.autograd.Function):
    """Log evidence in log space, always exact; the gradient is analytic."""

    @staticmethod
    def forward(
        ctx: Any,
        initial: Tensor,
        transition: Tensor,
        likelihood: Tensor,
        lengths: Tensor,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        chain = Chain(initial, transition, likelihood, lengths)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths = lengths
        value = message_passing.in_log_space(chain, with_posterior=False)[0].reshape(lengths.shape)
        exact = torch.ones_like(value, dtype=torch.bool)
        ctx.mark_non_differentiable(exact)
        return value.to(likelihood.dtype), exact

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        initial, transition, likelihood = ctx.saved_tensors
        chain = Chain(initial, transition, likelihood, ctx.lengths)
        if torch.is_grad_enabled():
            return (*_differentiable_gradient(chain, weight), None, None)
        return (*_log_space_gradient(chain, weight), None, None)


def _log_space_gradient(chain: Chain, weight: Tensor) -> list[Tensor]:
    """Derivative of the weighted evidences by the three tensors of the chain, in log space."""
    _, gamma, counts, _ = message_passing.in_log_space(chain)
    gamma = gamma * weight.unsqueeze(-1)
    counts = counts.reshape(len(counts), *weight.shape, *counts.shape[-2:])  # (S, G, n, K, K)
    counts = (counts * weight[..., None, None]).sum(2)
    return [part.to(like.dtype) for part, like in zip((gamma[0], counts, gamma), chain[:3])]


def _differentiable_gradient(chain: Chain, weight: Tensor) -> list[Tensor | None]:
    """Derivative of the weighted evidences, itself differentiable by chain and weights.

    This has a tape of T steps.
    """

    def evidence(initial: Tensor, transition: Tensor, likelihood: Tensor) -> Tensor:
        return log_space_by_steps(initial, transition, likelihood, chain.lengths)[0]

    return differentiable_gradient(evidence, chain[:3], weight)
