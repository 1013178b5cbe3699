r"""Exact recursions for a chain of discrete states, on tensors; they know no model.

Every public function reads the same tensors, whose batch dimensions broadcast:

``log_initial``     ``(*B, K)``            log p(z_1)
``log_transition``  ``(*B, 1|T-1, K, K)``  log p(z_{t+1} | z_t), row = from, column = to
``log_likelihood``  ``(*B, T, K)``         log p(x_t | z_t); the first state emits
``lengths``         ``(*B)``               number of steps that exist; padding is on the right

They are float32 or float64 (if mixed, float64). Minus infinity is legal everywhere. Padded steps
may hold anything: they enter no sum and no maximum. (A padded log-likelihood of zero would give
the same sums, because rows of the transition matrix sum to one, but a different best path.)

How sums over paths are computed
--------------------------------
Messages are probabilities scaled to sum to one at every step, so a step is one matrix product:
:math:`\alpha_t \propto (\alpha_{t-1} A) \circ e_t`, and the evidence is the sum of the logarithms
of the norms (Rabiner, 1989, section V.A). The gradient is the forward-backward algorithm itself:
the derivative by ``log_likelihood`` is p(z_t | x), that by ``log_transition`` the expected number
of moves (Eisner, 2016). No tape of T steps is kept; memory is O(T K) a sequence.

Scaled numbers can underflow, and then sums lose paths that later turn out to matter. Each
sequence is watched for that. Write q for the smallest positive product of a step, of arriving
mass :math:`\alpha_{t-1} A` and likelihood, s for the norm of the step, and a for the smallest
positive transition probability. What a step loses is below ``tiny * K / s`` in every state, and
it loses nothing if q > ``tiny`` and a q / s >= ``tiny``. So every mass p that arrives at the next
step is right to rounding unless one of these fails and p < ``tiny * K / (s * eps)``. A sequence
where that happens is computed again in float64, and where it happens there, in log space. If
a^2 >= ``tiny * K / eps``, which holds for most matrices without zeros, it cannot happen and
nothing needs to be watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._checks import (
    check_broadcast,
    check_integers,
    check_lengths,
    check_same_device,
    check_tensor,
    check_trailing,
)
from ._lookup import kernels as _kernels
from ._steps import (
    backward_by_chunks,
    backward_by_steps,
    chunk_length,
    forward_by_chunks,
    forward_by_steps,
    log_space_by_steps,
    sample_by_steps,
    viterbi_by_steps,
)


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
    chain, batch = _group(log_initial, log_transition, log_likelihood, lengths)
    return _evidence(chain, chain.likelihood.dtype).reshape(batch)


def posterior(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Posterior:
    """Smooth: the law of each state given all observations, and the moves expected.

    A sequence of probability zero has no posterior: its entries are zero.
    """
    with torch.no_grad():
        chain, batch = _group(log_initial, log_transition, log_likelihood, lengths)
        answer = _smooth(chain, chain.likelihood.dtype)
        evidence, states, moves = (part.to(chain.likelihood.dtype) for part in answer)
        return Posterior(
            evidence.reshape(batch),
            states.reshape(*batch, *states.shape[-2:]),
            moves.reshape(*batch, *moves.shape[-2:]),
        )


def filtered(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    """Law of each state given the observations up to it, log p(z_t | x_{1:t}), ``(*B, T, K)``.

    Minus infinity at padded steps, and from where the observations have become impossible.
    """
    with torch.no_grad():
        chain, batch = _group(log_initial, log_transition, log_likelihood, lengths)
        messages = _filter(chain, chain.likelihood.dtype)
        return messages.to(chain.likelihood.dtype).reshape(*batch, *messages.shape[-2:])


def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    """Most probable path, ``(*B, T)`` integers; among equals the first; 0 at padded steps."""
    with torch.no_grad():
        chain, batch = _group(log_initial, log_transition, log_likelihood, lengths)
        steps, groups, size, num_states = chain.likelihood.shape
        best = torch.zeros(steps, groups, size, dtype=torch.long, device=chain.likelihood.device)
        kernels = _compiled(chain.likelihood)
        if kernels is not None:
            kernels.run(
                kernels.viterbi,
                groups * size,
                steps * num_states**2,
                chain.initial,
                chain.transition.contiguous(),
                chain.transition.mT.contiguous(),
                chain.likelihood,
                chain.lengths,
                torch.empty_like(chain.likelihood),
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
        chain, batch = _group(log_initial, log_transition, log_likelihood, lengths)
        steps, groups, size, num_states = chain.likelihood.shape
        messages = _filter(chain, chain.likelihood.dtype)  # (G * n, T, K)
        messages = messages.movedim(1, 0).reshape(steps, groups, size, num_states).contiguous()
        uniform = torch.rand(
            num_samples, steps, groups, size, dtype=messages.dtype, device=messages.device
        )
        states = torch.zeros(uniform.shape, dtype=torch.long, device=messages.device)
        transposed = chain.transition.mT.to(messages.dtype).contiguous()
        kernels = _compiled(messages)
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


# Arguments in one form -------------------------------------------------------------------------


class _Chain(NamedTuple):
    """The arguments, time-major: T steps of G groups of n sequences; a group shares a matrix."""

    initial: Tensor  # (G, n, K), log
    transition: Tensor  # (S, G, K, K), log, S = 1 or T - 1
    likelihood: Tensor  # (T, G, n, K), log, 0 at padded steps
    lengths: Tensor  # (G, n), on the CPU

    def subset(self, chosen: Tensor) -> _Chain:
        """The sequences ``chosen``, indices into the ``G * n``."""
        groups, size = self.lengths.shape
        initial = self.initial.flatten(0, 1)[chosen]
        likelihood = self.likelihood.flatten(1, 2)[:, chosen]
        lengths = self.lengths.flatten()[chosen.cpu()]
        if groups == 1:
            return _Chain(initial[None], self.transition, likelihood[:, None], lengths[None])
        matrices = self.transition[:, chosen // size]
        return _Chain(initial[:, None], matrices, likelihood[:, :, None], lengths[:, None])


def _group(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> tuple[_Chain, torch.Size]:
    """Check the arguments, and bring them into one form; also the batch shape."""
    logs = {
        "log_initial": log_initial,
        "log_transition": log_transition,
        "log_likelihood": log_likelihood,
    }
    for (name, tensor), shape in zip(logs.items(), ("(*B, K)", "(*B, 1|T-1, K, K)", "(*B, T, K)")):
        check_tensor(name, tensor)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name} must be float32 or float64; got {tensor.dtype}. Call .float() on it."
            )
        if tensor.dim() < shape.count(","):
            raise ValueError(
                f"{name} must have shape {shape}; got shape {tuple(tensor.shape)}. Insert "
                "dimensions of size 1 with unsqueeze."
            )
    check_integers("lengths", lengths)
    check_same_device(logs)
    dtype = torch.promote_types(log_initial.dtype, log_transition.dtype)
    dtype = torch.promote_types(dtype, log_likelihood.dtype)
    log_initial, log_transition, log_likelihood = (each.to(dtype) for each in logs.values())
    steps, num_states = log_likelihood.shape[-2:]
    if steps == 0:
        raise ValueError("log_likelihood must have at least one step; got shape "
                         f"{tuple(log_likelihood.shape)}.")  # fmt: skip
    check_trailing("log_initial", log_initial, (num_states,), "(K,)")
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
    own = log_transition.shape[:-3]
    padded = (1,) * (len(batch) - len(own)) + tuple(own)
    split = max((d + 1 for d, size in enumerate(padded) if size != 1), default=0)
    groups, size = math.prod(batch[:split]), math.prod(batch[split:])
    transition = log_transition.reshape(padded[:split] + log_transition.shape[-3:])
    transition = transition.expand(batch[:split] + transition.shape[-3:])
    transition = transition.reshape(groups, varying, num_states, num_states).movedim(1, 0)
    likelihood = log_likelihood.expand(*batch, steps, num_states).movedim(-2, 0)
    likelihood = likelihood.reshape(steps, groups, size, num_states)
    lengths = lengths.expand(batch).reshape(groups, size)
    if bool((lengths < steps).any()):
        likelihood = likelihood.masked_fill(~_exists(lengths, likelihood), 0.0)
    return (
        _Chain(
            log_initial.expand(*batch, num_states).reshape(groups, size, num_states).contiguous(),
            transition,
            likelihood.contiguous(),
            lengths.contiguous(),
        ),
        batch,
    )


def _exists(lengths: Tensor, likelihood: Tensor) -> Tensor:
    """Which steps exist, ``(T, G, n, 1)``, on the device of ``likelihood``."""
    clock = torch.arange(len(likelihood)).reshape(-1, 1, 1)
    return (clock < lengths).unsqueeze(-1).to(likelihood.device, non_blocking=True)


# Three ranges of numbers: the caller's, float64, and logarithms ---------------------------------


def _wider(dtype: torch.dtype) -> torch.dtype | None:
    """The range to try when ``dtype`` underflows; None stands for log space."""
    return None if dtype == torch.float64 else torch.float64


def _evidence(chain: _Chain, dtype: torch.dtype | None) -> Tensor:
    """Log evidence, ``(G, n)``, differentiable."""
    run = _LogSpace if dtype is None else _Scaled
    value, exact = run.apply(*chain, dtype)
    if not bool(exact.all()):
        assert dtype is not None
        chosen = (~exact).flatten().nonzero().squeeze(-1)
        redone = _evidence(chain.subset(chosen), _wider(dtype)).flatten()
        value = value.flatten().index_put((chosen,), redone).reshape(value.shape)
    return value


def _smooth(chain: _Chain, dtype: torch.dtype | None) -> tuple[Tensor, Tensor, Tensor]:
    """Evidence ``(G * n)``, states ``(G * n, T, K)`` and moves ``(G * n, K, K)``."""
    if dtype is None:
        evidence, gamma, moves, _ = _log_space(chain)
        return evidence, gamma.flatten(1, 2).movedim(0, 1), moves.sum(0)
    scaled = _forward(chain, dtype)
    gamma, message, exact = _backward(chain, scaled)
    exists = _exists(chain.lengths, gamma)
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
    evidence = scaled.evidence(exists).flatten()
    answer = [evidence, gamma.flatten(1, 2).movedim(0, 1), moves]
    return tuple(_redo(_smooth, chain, dtype, exact, answer))  # type: ignore[return-value]


def _filter(chain: _Chain, dtype: torch.dtype | None) -> Tensor:
    """Logarithms of filtered probabilities, ``(G * n, T, K)``."""
    exists = _exists(chain.lengths, chain.likelihood)
    if dtype is None:
        log_alpha = _log_space(chain)[3]
        norm = log_alpha.logsumexp(-1, keepdim=True)
        log_alpha = (log_alpha - norm.masked_fill(norm.isneginf(), 0.0)).masked_fill(
            ~exists, -torch.inf
        )
        return log_alpha.flatten(1, 2).movedim(0, 1)
    scaled = _forward(chain, dtype)
    messages = scaled.alpha.masked_fill(~exists, 0.0).log().flatten(1, 2).movedim(0, 1)
    wider = lambda *task: (_filter(*task),)  # noqa: E731
    return _redo(wider, chain, dtype, scaled.exact, [messages])[0]


def _redo(
    solve: Callable[..., Any],
    chain: _Chain,
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
        chain = _Chain(initial, transition, likelihood, lengths)
        scaled = _forward(chain, dtype)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths, ctx.scaled = lengths, scaled
        ctx.mark_non_differentiable(scaled.exact)
        value = scaled.evidence(_exists(lengths, likelihood))
        return value.masked_fill(~scaled.exact, 0.0).to(likelihood.dtype), scaled.exact

    @staticmethod
    def backward(ctx, weight, _):
        initial, transition, likelihood = ctx.saved_tensors
        chain = _Chain(initial, transition, likelihood, ctx.lengths)
        if torch.is_grad_enabled():  # the gradient will itself be differentiated
            return (*_differentiable_gradient(chain, weight), None, None)
        scaled: _Scales = ctx.scaled
        gamma, message, exact = _backward(chain, scaled)
        if not torch.equal(exact, scaled.exact):  # only the way back left the range
            return (*_log_space_gradient(chain, weight), None, None)
        weight = weight.to(gamma.dtype)
        moves = None
        if ctx.needs_input_grad[1]:
            message.mul_(weight.unsqueeze(-1))
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
        gamma.mul_(weight.unsqueeze(-1))
        return gamma[0].to(initial.dtype), moves, gamma.to(likelihood.dtype), None, None


class _LogSpace(torch.autograd.Function):
    """Log evidence in log space, always exact; the gradient is analytic."""

    @staticmethod
    def forward(ctx, initial, transition, likelihood, lengths, dtype):
        chain = _Chain(initial, transition, likelihood, lengths)
        ctx.save_for_backward(initial, transition, likelihood)
        ctx.lengths = lengths
        value = _log_space(chain, smooth=False)[0].reshape(lengths.shape)
        exact = torch.ones_like(value, dtype=torch.bool)
        ctx.mark_non_differentiable(exact)
        return value.to(likelihood.dtype), exact

    @staticmethod
    def backward(ctx, weight, _):
        initial, transition, likelihood = ctx.saved_tensors
        chain = _Chain(initial, transition, likelihood, ctx.lengths)
        if torch.is_grad_enabled():
            return (*_differentiable_gradient(chain, weight), None, None)
        return (*_log_space_gradient(chain, weight), None, None)


def _log_space_gradient(chain: _Chain, weight: Tensor) -> list[Tensor]:
    """Derivative of the weighted evidences by the three tensors of the chain, in log space."""
    _, gamma, moves, _ = _log_space(chain)
    gamma = gamma * weight.unsqueeze(-1)
    moves = moves.reshape(len(moves), *weight.shape, *moves.shape[-2:])  # (S, G, n, K, K)
    moves = (moves * weight[..., None, None]).sum(2)
    return [part.to(like.dtype) for part, like in zip((gamma[0], moves, gamma), chain[:3])]


# Scaled messages --------------------------------------------------------------------------------


class _Scales(NamedTuple):
    """Forward messages, and what is needed to go back."""

    alpha: Tensor  # (T, G, n, K), sums to one; zero at padded steps and where not exact
    total: Tensor  # (T, G, n), norm of the step
    exact: Tensor  # (G, n), False where the numbers left their range
    weight: Tensor  # (T, G, n, K), likelihood over its peak
    peak: Tensor  # (T, G, n)
    transition: Tensor  # (S, G, K, K), probabilities
    watched: bool  # whether zeros or tiny probabilities made it necessary to watch each step

    def evidence(self, exists: Tensor) -> Tensor:
        """Log evidence ``(G, n)``, summed in float64."""
        steps = self.total.double().log() + self.peak
        return steps.masked_fill(~exists.squeeze(-1), 0.0).sum(0)


def _forward(chain: _Chain, dtype: torch.dtype) -> _Scales:
    """Forward messages in numbers of ``dtype``."""
    likelihood = chain.likelihood.detach().to(dtype)
    log_transition = chain.transition.detach().to(dtype)
    log_initial = chain.initial.detach().to(dtype)
    num_states = likelihood.size(-1)
    tiny, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    slack = tiny * num_states / eps
    least = min(_least(log_transition), _least(log_initial))  # a hard zero counts as 0 here
    watched = least**2 < slack
    peak = likelihood.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weight = likelihood - peak
    if watched:  # below tiny, but not zero: only hard zeros may be zero
        hard = likelihood.isneginf()
        weight = weight.clamp_(min=math.log(tiny)).exp_().masked_fill_(hard, 0.0)
        least = min(_least(log_transition, positive=True), _least(log_initial, positive=True))
    else:
        weight = weight.exp_()
    transition = log_transition.exp().contiguous()
    initial = log_initial.exp()
    alpha = torch.zeros_like(weight)
    total = torch.ones_like(peak).squeeze(-1)
    exact = torch.ones(chain.lengths.shape, dtype=torch.bool, device=weight.device)
    limits = (least if watched else -1.0, tiny, slack)
    steps, groups, size, _ = weight.shape
    kernels = _compiled(weight)
    if kernels is not None:
        kernels.run(
            kernels.forward,
            groups * size,
            steps * num_states**2,
            initial,
            transition,
            weight,
            chain.lengths,
            *limits,
            alpha,
            total,
            exact,
        )
    else:
        forward = forward_by_steps
        if not watched and chunk_length(transition, weight, chain.lengths):
            forward = forward_by_chunks
        forward(initial, transition, weight, chain.lengths, limits, alpha, total, exact)
    if not bool(exact.all()):
        alpha.masked_fill_(~exact.unsqueeze(-1), 0.0)
        total.masked_fill_(~exact, 1.0)
    return _Scales(alpha, total, exact, weight, peak.squeeze(-1), transition, watched)


def _backward(chain: _Chain, scaled: _Scales) -> tuple[Tensor, Tensor, Tensor]:
    r"""Backward messages.

    Returns:
        p(z_t | x) ``(T, G, n, K)``; the message ``(T, G, n, K)`` whose entry t, times
        :math:`\alpha_{t-1} A`, is the law of the pair of states t-1 and t; whether both are
        exact ``(G, n)``. Zero where they are not.
    """
    gamma = torch.zeros_like(scaled.alpha)
    message = torch.zeros_like(scaled.alpha)
    exact = scaled.exact.clone()
    transposed = scaled.transition.mT.contiguous()
    steps, groups, size, num_states = gamma.shape
    kernels = _compiled(gamma)
    inputs = (transposed, scaled.weight, chain.lengths, scaled.alpha, scaled.total)
    if kernels is not None:
        kernels.run(
            kernels.backward,
            groups * size,
            steps * num_states**2,
            *inputs,
            exact,
            gamma,
            message,
        )
    else:
        backward: Callable[..., None] = backward_by_steps
        if not scaled.watched and chunk_length(transposed, scaled.weight, chain.lengths):
            backward = backward_by_chunks
        backward(*inputs, exact, gamma, message)
    if not bool(exact.all()):
        gamma.masked_fill_(~exact.unsqueeze(-1), 0.0)
        message.masked_fill_(~exact.unsqueeze(-1), 0.0)
    return gamma, message, exact


def _least(logs: Tensor, positive: bool = False) -> float:
    """Smallest probability; with ``positive``, hard zeros do not count."""
    if positive:
        logs = logs.masked_fill(logs.isneginf(), 0.0)
    return math.exp(min(logs.amin().item(), 0.0)) if logs.numel() else 1.0


def _compiled(messages: Tensor) -> ModuleType | None:
    """The compiled recursions where they are faster than matrix products of torch."""
    small = messages.size(-1) <= 128 or messages.shape[1:-1].numel() <= 4
    return _kernels() if small and messages.device.type == "cpu" else None


# Log space ---------------------------------------------------------------------------------------


def _log_space(chain: _Chain, smooth: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Everything in logarithms and float64, for the sequences that need it.

    Returns:
        Evidence ``(G * n)``; states ``(T, G, n, K)`` and moves ``(S, G * n, K, K)``, which mean
        nothing unless ``smooth``; log p(x_{1:t}, z_t) ``(T, G, n, K)``.
    """
    initial, transition, likelihood = (part.detach().double().contiguous() for part in chain[:3])
    lengths = chain.lengths
    num_states = likelihood.size(-1)
    kernels = _kernels() if likelihood.device.type == "cpu" else None
    if kernels is not None:
        messages, gamma = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
        evidence = likelihood.new_zeros(lengths.shape)
        moves = likelihood.new_zeros(len(transition), lengths.numel(), num_states, num_states)
        kernels.run(
            kernels.log_space,
            lengths.numel(),
            10 * len(likelihood) * num_states**2,
            initial,
            transition,
            transition.mT.contiguous(),
            likelihood,
            lengths,
            smooth,
            messages,
            evidence,
            gamma,
            moves,
        )
        return evidence.flatten(), gamma, moves, messages
    own = transition.repeat_interleave(lengths.size(1), 1)  # one matrix a sequence
    with torch.enable_grad():
        given = own.requires_grad_(), likelihood.requires_grad_()
        single = _Chain(
            initial.reshape(-1, 1, num_states),
            own,
            likelihood.reshape(len(likelihood), -1, 1, num_states),
            lengths.reshape(-1, 1),
        )
        evidence, messages = log_space_by_steps(*single)
        evidence = evidence.flatten()
        moves, gamma = torch.autograd.grad(evidence.sum(), given, materialize_grads=True)
    return evidence.detach(), gamma, moves, messages.detach().reshape(likelihood.shape)


def _differentiable_gradient(chain: _Chain, weight: Tensor) -> list[Tensor | None]:
    """Derivative of the weighted evidences, itself differentiable by chain and weights.

    This is the only place with a tape of T steps: second derivatives are for small problems, such
    as the Laplace approximation of a posterior.
    """
    wanted = [part for part in chain[:3] if part.requires_grad]
    evidence, _ = log_space_by_steps(*chain)
    found = iter(
        torch.autograd.grad(evidence, wanted, weight, create_graph=True, materialize_grads=True)
    )
    return [next(found) if part.requires_grad else None for part in chain[:3]]
