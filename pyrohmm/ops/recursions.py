r"""Exact recursions for a chain of discrete states, on tensors; they know no model.

Every public function reads the same tensors, whose batch dimensions broadcast:

``log_initial``     ``(*B, K)``            log p(z_1)
``log_transition``  ``(*B, 1|T-1, K, K)``  log p(z_{t+1} | z_t), row = from, column = to
``log_likelihood``  ``(*B, T, K)``         log p(x_t | z_t); the first state emits
``lengths``         ``(*B)``               number of steps that exist; padding is on the right

They are float32 or float64 (if mixed, float64). Minus infinity is legal everywhere. Padded steps
may hold anything: they enter no sum and no maximum. (A padded log-likelihood of zero would give
the same sums, because rows of the transition matrix sum to one, but a different best path.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import check_broadcast
from .._precision import differentiable_gradient, in_full_precision
from . import message_passing
from .chain import Chain, exists, group
from .torch_chain import log_space_by_steps, sample_by_steps, viterbi_by_steps


class Posterior(NamedTuple):
    """What the data say about the states.

    Attributes:
        log_evidence: ``(*B)``, log p(x_{1:T}), in nats.
        states: ``(*B, T, K)``, p(z_t | x_{1:T}); zero at padded steps.
        transitions: ``(*B, K, K)``, expected number of moves from row to column.
    """

    log_evidence: Tensor
    states: Tensor
    transitions: Tensor


class ExpectedCounts(NamedTuple):
    """Expected counts given the observations: what the E-step of EM finds.

    Counts are summed over the sequences that share a parameter, so that they have its shape.

    Attributes:
        log_evidence: ``(*B)``, log p(x_{1:T}), in nats.
        initial: As ``log_initial``: expected number of sequences that begin in each state.
        transitions: As ``log_transition``: expected number of moves from row to column.
        states: ``(*B, T, K)``, p(z_t | x_{1:T}); zero at padded steps.
    """

    log_evidence: Tensor
    initial: Tensor
    transitions: Tensor
    states: Tensor


def log_evidence(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    """Log-probability of the observations, in nats, shape ``(*B)``.

    Differentiable by the first three arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> likelihood = torch.tensor([[0.2, 0.4], [0.5, 0.1]]).log()  # T = 2, K = 2
        >>> log_evidence(half, half.expand(1, 2, 2), likelihood, torch.tensor(2)).exp()
        tensor(0.0900)
    """
    chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
    return _evidence(chain, chain.likelihood.dtype).reshape(batch)


def posterior(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Posterior:
    """Smooth: the law of each state given all observations, and the moves expected.

    A sequence of probability zero has no posterior: its entries are zero.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        answer = _smooth(chain, chain.likelihood.dtype)
        evidence, states, moves = (part.to(chain.likelihood.dtype) for part in answer)
        return Posterior(
            evidence.reshape(batch),
            states.reshape(*batch, *states.shape[-2:]),
            moves.reshape(*batch, *moves.shape[-2:]),
        )


def expected_counts(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> ExpectedCounts:
    """Expected counts: the gradient of the evidence by the logarithms (Fisher's identity).

    A sequence of probability zero counts nowhere.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> likelihood = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
        >>> expected(half, half.expand(1, 2, 2), likelihood, torch.tensor(2)).transitions
        tensor([[[0.5000, 0.5000],
                 [0.0000, 0.0000]]])
    """
    batch = check_broadcast(
        {
            "log_initial": log_initial.shape[:-1],
            "log_transition": log_transition.shape[:-3],
            "log_likelihood": log_likelihood.shape[:-2],
            "lengths": lengths.shape,
        }
    )
    log_likelihood = log_likelihood.expand(*batch, *log_likelihood.shape[-2:])
    with torch.enable_grad():
        initial = log_initial.detach().requires_grad_()
        transition = log_transition.detach().requires_grad_()
        likelihood = log_likelihood.detach().requires_grad_()
        evidence = log_evidence(initial, transition, likelihood, lengths)
        counts = torch.autograd.grad(
            evidence.sum(), (initial, transition, likelihood), materialize_grads=True
        )
    return ExpectedCounts(evidence.detach(), *counts)


def filtered(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    """Law of each state given the observations up to it, log p(z_t | x_{1:t}), ``(*B, T, K)``.

    Minus infinity at padded steps, and from where the observations have become impossible.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        messages = _filter(chain, chain.likelihood.dtype)
        return messages.to(chain.likelihood.dtype).reshape(*batch, *messages.shape[-2:])


def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    """Most probable path, ``(*B, T)`` integers; among equals the first; 0 at padded steps."""
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        steps, groups, size, num_states = chain.likelihood.shape
        best = torch.zeros(steps, groups, size, dtype=torch.long, device=chain.likelihood.device)
        kernels = message_passing.compiled(chain.likelihood)
        if kernels is not None:
            work, transition = steps * num_states**2, chain.transition.contiguous()
            delta = torch.empty_like(chain.likelihood)
            scored = kernels.in_blocks(size)
            if scored:
                kernels.run(
                    kernels.score_blocks,
                    groups * size,
                    work,
                    chain.initial.view(-1),
                    transition,
                    chain.likelihood.view(-1),
                    chain.lengths.view(-1),
                    delta.view(-1),
                )
            kernels.run(
                kernels.viterbi,
                groups * size,
                steps * num_states if scored else work,
                chain.initial,
                transition,
                transition.mT.contiguous(),
                chain.likelihood,
                chain.lengths,
                scored,
                delta,
                best,
            )
        else:
            viterbi_by_steps(*chain, best)
        return best.permute(1, 2, 0).reshape(*batch, steps)


def sample_states(
    log_initial: Tensor,
    log_transition: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    num_samples: int = 1,
) -> Tensor:
    """Draw paths from p(z_{1:T} | x_{1:T}): filter forwards, sample backwards.

    Returns:
        ``(num_samples, *B, T)`` integers; 0 at padded steps.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        steps, groups, size, num_states = chain.likelihood.shape
        messages = _filter(chain, chain.likelihood.dtype)  # (G * n, T, K)
        messages = messages.movedim(1, 0).reshape(steps, groups, size, num_states).contiguous()
        uniform = torch.rand(
            num_samples, steps, groups, size, dtype=messages.dtype, device=messages.device
        )
        states = torch.zeros(uniform.shape, dtype=torch.long, device=messages.device)
        transposed = chain.transition.mT.to(messages.dtype).contiguous()
        kernels = message_passing.compiled(messages)
        if kernels is not None:
            kernels.run(
                kernels.sample_states,
                groups * size,
                10 * num_samples * steps * num_states,
                messages,
                transposed,
                chain.lengths,
                uniform,
                states,
            )
        else:
            sample_by_steps(messages, transposed, chain.lengths, uniform, states)
        return states.permute(0, 2, 3, 1).reshape(num_samples, *batch, steps)


# Three ranges of numbers: the caller's, float64, and logarithms ---------------------------------


def _wider(dtype: torch.dtype) -> torch.dtype | None:
    """The range to try when ``dtype`` underflows; None stands for log space."""
    return None if dtype == torch.float64 else torch.float64


def _evidence(chain: Chain, dtype: torch.dtype | None) -> Tensor:
    """Log evidence, ``(G, n)``, differentiable."""
    run = _LogSpace if dtype is None else _Scaled
    value, exact = run.apply(*chain, dtype)
    if not bool(exact.all()):
        assert dtype is not None
        chosen = (~exact).flatten().nonzero().squeeze(-1)
        redone = _evidence(chain.subset(chosen), _wider(dtype)).flatten()
        value = value.flatten().index_put((chosen,), redone).reshape(value.shape)
    return value


def _smooth(chain: Chain, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """Evidence ``(G * n)``, states ``(G * n, T, K)`` and moves ``(G * n, K, K)``."""
    if dtype is None:
        evidence, gamma, moves, _ = message_passing.in_log_space(chain)
        return evidence, gamma.flatten(1, 2).movedim(0, 1), moves.sum(0)
    scaled = message_passing.forward(chain, dtype)
    gamma, message, exact = message_passing.backward(chain, scaled)
    # one pair law per sequence: alpha_t(i) A_ij message_{t+1}(j), summed over t
    alpha = scaled.alpha[:-1].flatten(1, 2).permute(1, 2, 0)  # (N, K, T-1)
    later = message[1:].flatten(1, 2).movedim(1, 0)  # (N, T-1, K)
    size = chain.lengths.size(1)
    if len(scaled.transition) == 1:
        matrices = scaled.transition[0].repeat_interleave(size, 0)
        moves = ((alpha @ later) * matrices).masked_fill_(matrices == 0, 0.0)
        exact &= moves.isfinite().all(-1).all(-1).reshape(exact.shape)
    else:
        steps = scaled.transition.repeat_interleave(size, 1)  # (T-1, N, K, K)
        moves = torch.einsum("nit,tnij,ntj->nij", alpha, steps, later)
    answer = [scaled.evidence.flatten(), gamma.flatten(1, 2).movedim(0, 1), moves]
    return tuple(_redo(_smooth, chain, dtype, exact, answer))  # type: ignore[return-value]


def _filter(chain: Chain, dtype: torch.dtype | None) -> Tensor:
    """Logarithms of filtered probabilities, ``(G * n, T, K)``."""
    past = ~exists(chain.lengths, chain.likelihood)
    if dtype is None:
        log_alpha = message_passing.in_log_space(chain)[3]
        norm = log_alpha.logsumexp(-1, keepdim=True)
        log_alpha = log_alpha - norm.masked_fill(norm.isneginf(), 0.0)
        log_alpha = log_alpha.masked_fill(past, -torch.inf)
        return log_alpha.flatten(1, 2).movedim(0, 1)
    scaled = message_passing.forward(chain, dtype)
    messages = scaled.alpha.masked_fill(past, 0.0).log().flatten(1, 2).movedim(0, 1)
    wider = lambda *task: (_filter(*task),)  # noqa: E731
    return _redo(wider, chain, dtype, scaled.exact, [messages])[0]


def _redo(
    solve: Callable[..., Any],
    chain: Chain,
    dtype: torch.dtype,
    exact: Tensor,
    answer: list[Tensor],
) -> list[Tensor]:
    """Replace what is not exact in ``answer`` by what ``solve`` finds in a wider range."""
    if bool(exact.all()):
        return answer
    chosen = (~exact).flatten().nonzero().squeeze(-1)
    wide = solve(chain.subset(chosen), _wider(dtype))
    return [part.index_put((chosen,), new.to(part.dtype)) for part, new in zip(answer, wide)]


class _Scaled(torch.autograd.Function):
    """Log evidence by scaled messages, and whether they were exact; the gradient is analytic."""

    @staticmethod
    def forward(ctx, initial, transition, likelihood, lengths, dtype):
        chain = Chain(initial, transition, likelihood, lengths)
        scaled = message_passing.forward(chain, dtype)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths, ctx.scaled = lengths, scaled
        ctx.mark_non_differentiable(scaled.exact)
        value = scaled.evidence.masked_fill(~scaled.exact, 0.0)
        return value.to(likelihood.dtype), scaled.exact

    @staticmethod
    @in_full_precision
    def backward(ctx, weight, _):
        initial, transition, likelihood = ctx.saved_tensors
        chain = Chain(initial, transition, likelihood, ctx.lengths)
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            return (*_differentiable_gradient(chain, weight), None, None)
        scaled: message_passing.Scales = ctx.scaled
        gamma, message, exact = message_passing.backward(chain, scaled, weight)
        if not torch.equal(exact, scaled.exact):  # only the way back left the range
            return (*_log_space_gradient(chain, weight), None, None)
        moves = None
        if ctx.needs_input_grad[1]:
            moves = torch.zeros_like(scaled.transition)
            if len(gamma) > 1 and len(moves) == 1:
                alpha = scaled.alpha[:-1].transpose(0, 1).flatten(1, 2)  # (G, (T-1) n, K)
                later = message[1:].transpose(0, 1).flatten(1, 2)
                torch.matmul(alpha.mT, later, out=moves[0])
            elif len(gamma) > 1:
                torch.matmul(scaled.alpha[:-1].mT, message[1:], out=moves)
            moves.mul_(scaled.transition)
            if scaled.watched:  # messages to a state that can hardly be reached may be huge
                moves.masked_fill_(scaled.transition == 0, 0.0)
                if not bool(moves.isfinite().all()):
                    return (*_log_space_gradient(chain, weight), None, None)
            moves = moves.to(transition.dtype)
        return gamma[0].to(initial.dtype), moves, gamma.to(likelihood.dtype), None, None


class _LogSpace(torch.autograd.Function):
    """Log evidence in log space, always exact; the gradient is analytic."""

    @staticmethod
    def forward(ctx, initial, transition, likelihood, lengths, dtype):
        chain = Chain(initial, transition, likelihood, lengths)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths = lengths
        value = message_passing.in_log_space(chain, smooth=False)[0].reshape(lengths.shape)
        exact = torch.ones_like(value, dtype=torch.bool)
        ctx.mark_non_differentiable(exact)
        return value.to(likelihood.dtype), exact

    @staticmethod
    @in_full_precision
    def backward(ctx, weight, _):
        initial, transition, likelihood = ctx.saved_tensors
        chain = Chain(initial, transition, likelihood, ctx.lengths)
        if torch.is_grad_enabled():
            return (*_differentiable_gradient(chain, weight), None, None)
        return (*_log_space_gradient(chain, weight), None, None)


def _log_space_gradient(chain: Chain, weight: Tensor) -> list[Tensor]:
    """Derivative of the weighted evidences by the three tensors of the chain, in log space."""
    _, gamma, moves, _ = message_passing.in_log_space(chain)
    gamma = gamma * weight.unsqueeze(-1)
    moves = moves.reshape(len(moves), *weight.shape, *moves.shape[-2:])  # (S, G, n, K, K)
    moves = (moves * weight[..., None, None]).sum(2)
    return [part.to(like.dtype) for part, like in zip((gamma[0], moves, gamma), chain[:3])]


def _differentiable_gradient(chain: Chain, weight: Tensor) -> list[Tensor | None]:
    """Derivative of the weighted evidences, itself differentiable by chain and weights.

    This has a tape of T steps.
    """

    def evidence(initial: Tensor, transition: Tensor, likelihood: Tensor) -> Tensor:
        return log_space_by_steps(initial, transition, likelihood, chain.lengths)[0]

    return differentiable_gradient(evidence, chain[:3], weight)
