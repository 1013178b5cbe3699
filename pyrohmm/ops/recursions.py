r"""Exact inference in a chain of discrete states: forward-backward, Viterbi, path sampling.

Every function reads the same tensors, whose batch dimensions broadcast:

``log_initial``     ``(*B, K)``            log p(z_1)
``log_transition``  ``(*B, 1|T-1, K, K)``  log p(z_{t+1} | z_t), row = from, column = to
``log_likelihood``  ``(*B, T, K)``         log p(x_t | z_t); the first state emits
``lengths``         ``(*B)``               number of steps that exist; padding is on the right

They are float32 or float64 (if mixed, float64); half precision, such as autocast makes, becomes
float32. -inf is legal everywhere. Padded steps may hold anything: they enter no sum and no maximum.
(A padded log-likelihood of zero would give the same sums, because rows of the transition matrix sum
to one, but a different best path.)

Every function raises TypeError for other dtypes, and ValueError if shapes disagree or a length does
not lie between 1 and T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._arguments import Range, checked, explained
from .._checks import check_broadcast
from .._precision import at_least_single, differentiable_gradient, in_full_precision
from .._transforms import transforming
from . import evidence as compiled
from . import message_passing
from .backends import NUMBA, backend_for
from .chain import Arguments, Chain, arrange, check_arguments, group
from .log_space import finite_or_zero
from .lookup import look_up
from .masks import exists
from .torch_chain import log_space_by_steps
from .torch_chunks import chunk_length


class Posterior(NamedTuple):
    r"""Smoothed posterior of the states of each sequence.

    Attributes:
        log_evidence: ``(*B)``, :math:`\log p(x_{1:T})`, in nats.
        states: ``(*B, T, K)``, :math:`p(z_t \mid x_{1:T})`; zero at padded steps.
        transitions: ``(*B, K, K)``, expected number of transitions,
            :math:`\sum_t p(z_t, z_{t+1} \mid x_{1:T})`.
    """

    log_evidence: Tensor
    states: Tensor
    transitions: Tensor


class ExpectedCounts(NamedTuple):
    r"""Expected counts under the posterior: the result of the E-step of EM.

    Counts are summed over the sequences that share a parameter, so that they have its shape.

    Attributes:
        log_evidence: ``(*B)``, :math:`\log p(x_{1:T})`, in nats.
        initial: As ``log_initial``: expected number of sequences that start in each state.
        transitions: As ``log_transition``: expected number of transitions from row to column.
        states: ``(*B, T, K)``, :math:`p(z_t \mid x_{1:T})`; zero at padded steps.
    """

    log_evidence: Tensor
    initial: Tensor
    transitions: Tensor
    states: Tensor


def log_evidence(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, by the forward algorithm, shape ``(*B)``.

    Differentiable by the first three arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero. Within the transforms of ``torch.func`` it is computed
    in log space, by steps.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> likelihood = torch.tensor([[0.2, 0.4], [0.5, 0.1]]).log()  # T = 2, K = 2
        >>> log_evidence(half, half.expand(1, 2, 2), likelihood, torch.tensor(2)).exp()
        tensor(0.0900)
    """
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    if transforming():
        return log_space_by_steps(*arrange(arguments))[0].reshape(arguments.batch)
    if (chain := _uniform(arguments, arguments.likelihood)) is None:
        chains = arrange(arguments)
        return _evidence(chains, chains.likelihood.dtype).reshape(arguments.batch)
    batch = arguments.batch
    return _uniform_evidence(chain, arguments, lambda logs: logs.reshape(*batch, *logs.shape[-2:]))


def log_evidence_of_symbols(
    log_initial: Tensor,
    log_transition: Tensor,
    log_symbols: Tensor,
    symbols: Tensor,
    lengths: Tensor,
    known: Tensor | None = None,
) -> Tensor:
    r"""As :func:`log_evidence`, of observations that are symbols: no log-likelihoods are written.

    Args:
        log_initial: As there.
        log_transition: As there.
        log_symbols: ``(*B, K, V)``, :math:`\log p(x_t | z_t)` of each symbol.
        symbols: ``(*B, T)`` integers below V.
        lengths: As there.
        known: ``(*B, T)`` booleans, False where a symbol is missing; all known by default.

    Raises:
        IndexError: If a symbol is not one of 0 to V - 1, even one that is missing.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> coins = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
        >>> heads = torch.tensor([0, 0])
        >>> log_evidence_of_symbols(half, half.expand(1, 2, 2), coins, heads, torch.tensor(2)).exp()
        tensor(0.4225)
    """
    log_symbols = at_least_single(log_symbols)

    def likelihood(logs: Tensor) -> Tensor:
        scores = look_up(logs, symbols.movedim(-1, 0)).movedim(0, -2)
        return scores if known is None else scores.masked_fill(~known.unsqueeze(-1), 0.0)

    if transforming():
        return log_evidence(log_initial, log_transition, likelihood(log_symbols), lengths)
    outer = {"log_symbols": log_symbols.shape[:-2], "symbols": symbols.shape[:-1]}
    shape = *check_broadcast(outer), symbols.size(-1), log_symbols.size(-2)
    shown = log_symbols.detach().as_strided(shape, (0,) * len(shape))  # there are none
    arguments = check_arguments(log_initial, log_transition, shown, lengths)
    chain = _uniform(arguments, log_symbols, symbols, known)
    if chain is None:
        return log_evidence(log_initial, log_transition, likelihood(log_symbols), lengths)
    return _uniform_evidence(chain, arguments, likelihood)


def posterior(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Posterior:
    r"""Smoothed posterior :math:`p(z_t \mid x_{1:T})`, by the forward-backward algorithm.

    A sequence of probability zero has no posterior: its entries are zero.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        parts = _posterior(chain, chain.likelihood.dtype)
        return Posterior(
            *(part.to(chain.likelihood.dtype).reshape(batch + part.shape[1:]) for part in parts)
        )


@explained()
def expected_counts(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> ExpectedCounts:
    """Expected counts under the posterior, as gradients of the evidence (Fisher's identity).

    A sequence of probability zero counts nowhere. Source: Eisner, 2016.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> likelihood = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
        >>> expected_counts(half, half.expand(1, 2, 2), likelihood, torch.tensor(2)).transitions
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
    logs = log_initial, log_transition, log_likelihood
    with torch.inference_mode(False), torch.enable_grad():
        initial, transition, likelihood = (
            leaves
        ) = [  # tensors made in inference mode cannot ask for gradients
            (part.clone() if part.is_inference() else part.detach()).requires_grad_()
            for part in logs
        ]
        evidence = log_evidence(initial, transition, likelihood, lengths)
        counts = torch.autograd.grad(evidence.sum(), leaves, materialize_grads=True)
    return ExpectedCounts(evidence.detach(), *counts)


def filtered(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    -inf at padded steps, and from the step at which the observations become impossible.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        (messages,) = _filter(chain, chain.likelihood.dtype)
        return messages.to(chain.likelihood.dtype).reshape(*batch, *messages.shape[-2:])


def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Most probable path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, by Viterbi's algorithm.

    Returns:
        ``(*B, T)`` integers; among equal paths the first; 0 at padded steps.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        shape, device = chain.likelihood.shape[:3], chain.likelihood.device
        best = torch.zeros(shape, dtype=torch.long, device=device)
        backend_for(device).viterbi(chain, best)
        return best.permute(1, 2, 0).reshape(*batch, len(best))


@checked(num_samples=Range(0))
def sample_states(
    log_initial: Tensor,
    log_transition: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    num_samples: int = 1,
) -> Tensor:
    r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`: filter forward, sample backward.

    Returns:
        ``(num_samples, *B, T)`` integers; 0 at padded steps.
    """
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        steps, groups, size, num_states = chain.likelihood.shape
        (messages,) = _filter(chain, chain.likelihood.dtype)  # (G * n, T, K)
        messages = messages.movedim(1, 0).reshape(steps, groups, size, num_states).contiguous()
        uniform = torch.rand(
            num_samples, steps, groups, size, dtype=messages.dtype, device=messages.device
        )
        states = torch.zeros(uniform.shape, dtype=torch.long, device=messages.device)
        transposed = chain.transition.mT.to(messages.dtype).contiguous()
        backend_for(states.device).sample_states(
            messages, transposed, chain.lengths, uniform, states
        )
        return states.permute(0, 2, 3, 1).reshape(num_samples, *batch, steps)


# One matrix for many sequences -----------------------------------------------------------------


def _uniform(
    arguments: Arguments, logs: Tensor, symbols: Tensor | None = None, known: Tensor | None = None
) -> compiled.Uniform | None:
    """The arguments as compiled loops over whole sequences take them; None if they do not.

    Args:
        arguments: With log-likelihoods of any strides.
        logs: Log-likelihoods, or with ``symbols`` of each symbol.
        symbols: ``(*B, T)``.
        known: ``(*B, T)``.
    """
    initial, transition, likelihood, lengths, batch = arguments
    num_states = initial.size(-1)
    if (
        backend_for(likelihood.device) is not NUMBA
        or num_states > compiled.WIDEST
        or transition.size(-3) != 1
    ):
        return None
    split = arguments.split
    within = initial.shape[:-1][max(split - len(batch) + initial.dim() - 1, 0) :]
    if math.prod(within) != 1:  # first states of each sequence
        return None
    count, size = math.prod(batch[:split]), math.prod(batch[split:])
    if count > 1:
        lead = batch[:split] + (1,) * (len(batch) - split)
        initial = initial.expand(*lead, num_states)
        transition = transition.expand(*lead, 1, num_states, num_states)
    if symbols is None:
        logs = logs.expand(*batch, *logs.shape[-2:]).reshape(count, size, *logs.shape[-2:])
    else:
        if math.prod(logs.shape[:-2][max(split - len(batch) + logs.dim() - 2, 0) :]) != 1:
            return None  # probabilities of symbols for each sequence
        if count > 1:
            logs = logs.expand(*batch[:split], *(1,) * (len(batch) - split), *logs.shape[-2:])
        low, high = (int(end) for end in torch.aminmax(symbols))
        if low < 0 or high >= logs.size(-1):
            raise IndexError(
                f"symbols must lie between 0 and V - 1 = {logs.size(-1) - 1}; got {low} to {high}."
            )
        symbols = symbols.expand(*batch, symbols.size(-1)).long()
        if known is not None:
            symbols = symbols.masked_fill(~known, logs.size(-1))
    return compiled.Uniform(
        initial, transition, logs.to(likelihood.dtype), symbols,
        lengths.expand(batch).reshape(count, size),
    )  # fmt: skip


def _uniform_evidence(
    chain: compiled.Uniform, arguments: Arguments, likelihood: Callable[[Tensor], Tensor]
) -> Tensor:
    """Log evidence, ``(*B)``; ``likelihood`` makes log-likelihoods of ``chain.logs``."""

    def arranged(initial: Tensor, transition: Tensor, logs: Tensor) -> Chain:
        return arrange(arguments._replace(
            initial=initial, transition=transition, likelihood=likelihood(logs)
        ))  # fmt: skip

    def general(*logs: Tensor) -> Tensor:
        return log_space_by_steps(*arranged(*logs))[0]

    value, exact = compiled.log_evidence(chain, general)
    if not bool(exact.all()):
        chosen = (~exact).flatten().nonzero().squeeze(-1)
        chains = arranged(chain.initial, chain.transition, chain.logs).subset(chosen)
        redone = _evidence(chains, _wider(value.dtype)).flatten()
        value = value.flatten().index_put((chosen,), redone)
    return value.reshape(arguments.batch)


# Three ranges of numbers: the caller's, float64, and logarithms ---------------------------------


def _wider(dtype: torch.dtype) -> torch.dtype | None:
    """The range to try when ``dtype`` underflows; None stands for log space."""
    return None if dtype == torch.float64 else torch.float64


def _evidence(chain: Chain, dtype: torch.dtype | None) -> Tensor:
    """Log evidence, ``(G, n)``, differentiable."""
    run = _LogSpace if dtype is None else _BothWays if _goes_both_ways(chain) else _Scaled
    value, exact = run.apply(*chain, dtype)
    if exact is not None and not bool(exact.all()):
        assert dtype is not None
        chosen = (~exact).flatten().nonzero().squeeze(-1)
        redone = _evidence(chain.subset(chosen), _wider(dtype)).flatten()
        value = value.flatten().index_put((chosen,), redone).reshape(value.shape)
    return value


def _goes_both_ways(chain: Chain) -> bool:
    """Whether messages go both ways at once: on an accelerator, where there is no shorter way."""
    on_cpu = chain.likelihood.device.type == "cpu"
    return not on_cpu and not chunk_length(chain.transition, chain.likelihood, chain.lengths)


def _posterior(chain: Chain, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
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
        counts = ((alpha @ later) * matrices).masked_fill_(matrices == 0, 0.0)
        if isinstance(scaled, message_passing.Messages):  # those of both ways are finite
            assert exact is not None
            exact &= counts.isfinite().all(-1).all(-1).reshape(exact.shape)
    else:
        steps = scaled.transition.repeat_interleave(size, 1)  # (T-1, N, K, K)
        counts = torch.einsum("nit,tnij,ntj->nij", alpha, steps, later)
    parts = scaled.evidence.flatten(), gamma.flatten(1, 2).movedim(0, 1), counts
    return _redo(_posterior, chain, dtype, exact, parts)


def _filter(chain: Chain, dtype: torch.dtype | None) -> tuple[Tensor]:
    """Logarithms of filtered probabilities, ``(G * n, T, K)``."""
    num_steps, device = len(chain.likelihood), chain.likelihood.device
    padded = ~exists(chain.lengths, num_steps, device).movedim(-1, 0).unsqueeze(-1)
    if dtype is None:
        log_alpha = message_passing.in_log_space(chain)[3]
        log_alpha = log_alpha - finite_or_zero(log_alpha.logsumexp(-1, keepdim=True))
        return (log_alpha.masked_fill(padded, -torch.inf).flatten(1, 2).movedim(0, 1),)
    scaled = message_passing.forward(chain, dtype)
    messages = scaled.alpha.masked_fill(padded, 0.0).log().flatten(1, 2).movedim(0, 1)
    return _redo(_filter, chain, dtype, scaled.exact, (messages,))


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
    wide = solve(chain.subset(chosen), _wider(dtype))
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
        return (earlier.mT @ later).mul_(transition[0]).unsqueeze(0)
    return (alpha[:-1].mT @ message[1:]).mul_(transition)


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
