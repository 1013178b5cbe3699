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
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import check_booleans, check_broadcast, check_integers, check_real, check_tensor
from .._precision import at_least_single
from .._transforms import evidence_and_gradient, refuse_transforms, transforming
from . import evidence as compiled
from .backends import NUMBA, backend_for
from .chain import Arguments, Chain, arrange, check_arguments, group
from .lookup import look_up
from .precision import evidence_of, filtered_of, posterior_of, scaled_messages, wider
from .torch_chain import log_space_by_steps


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
        durations: As ``log_duration``: expected number of segments of each duration; None of a
            chain without explicit durations.
    """

    log_evidence: Tensor
    initial: Tensor
    transitions: Tensor
    states: Tensor
    durations: Tensor | None = None


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
        return evidence_of(chains, chains.likelihood.dtype).reshape(arguments.batch)
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
    r"""Log evidence of observations that are symbols: no log-likelihoods are written.

    Args:
        log_initial: As there.
        log_transition: As there.
        log_symbols: ``(*B, K, V)``, :math:`\log p(x_t | z_t)` of each symbol.
        symbols: ``(*B, T)`` integers below V.
        lengths: As there.
        known: ``(*B, T)`` booleans, False where a symbol is missing; all known by default.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes disagree, or a symbol is not one of 0 to V - 1, missing or not.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> coins = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log()
        >>> heads = torch.tensor([0, 0])
        >>> log_evidence_of_symbols(half, half.expand(1, 2, 2), coins, heads, torch.tensor(2)).exp()
        tensor(0.4225)
    """
    parts = log_initial, log_transition, log_symbols
    likelihood, arguments, chain = _of_symbols(*parts, symbols, lengths, known)
    if arguments is None or chain is None:
        return log_evidence(log_initial, log_transition, likelihood(log_symbols), lengths)
    return _uniform_evidence(chain, arguments, likelihood)


def posterior(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Posterior:
    r"""Smoothed posterior :math:`p(z_t \mid x_{1:T})`, by the forward-backward algorithm.

    A sequence of probability zero has no posterior: its entries are zero. They carry no gradient,
    but within the transforms of ``torch.func`` have derivatives.
    """
    if transforming():
        arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
        rows = log_transition.expand(*arguments.batch, *log_transition.shape[-3:])
        counts = expected_counts(log_initial, rows, log_likelihood, lengths)
        return Posterior(counts.log_evidence, counts.states, counts.transitions.sum(-3))
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        parts = posterior_of(chain, chain.likelihood.dtype)
        return Posterior(
            *(part.to(chain.likelihood.dtype).reshape(batch + part.shape[1:]) for part in parts)
        )


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
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    shape = *arguments.batch, *log_likelihood.shape[-2:]
    log_likelihood = log_likelihood.expand(shape)
    chain = None if transforming() else _uniform(arguments, log_likelihood)

    def evidence(initial: Tensor, transition: Tensor, likelihood: Tensor) -> Tensor:
        return log_evidence(initial, transition, likelihood, lengths)

    return _counts(evidence, arguments, chain, log_initial, log_transition, log_likelihood)


def expected_counts_of_symbols(
    log_initial: Tensor,
    log_transition: Tensor,
    log_symbols: Tensor,
    symbols: Tensor,
    lengths: Tensor,
    known: Tensor | None = None,
) -> ExpectedCounts:
    """Expected counts of observations that are symbols: nothing is written per step.

    The arguments are those of :func:`log_evidence_of_symbols`.

    Returns:
        The counts, with ``states`` ``(*, V, K)``: the expected number of steps at which each symbol
        is observed in each state, summed over the sequences that share ``log_symbols``.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> coins = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
        >>> flips = torch.tensor([0, 0, 1])
        >>> matrix = half.expand(1, 2, 2)
        >>> expected_counts_of_symbols(half, matrix, coins, flips, torch.tensor(3)).states
        tensor([[2., 0.],
                [0., 1.]])
    """

    def evidence(initial: Tensor, transition: Tensor, table: Tensor) -> Tensor:
        return log_evidence_of_symbols(initial, transition, table, symbols, lengths, known)

    parts = log_initial, log_transition, log_symbols
    _, arguments, chain = _of_symbols(*parts, symbols, lengths, known)
    counts = _counts(evidence, arguments, chain, *parts)
    return counts._replace(states=counts.states.mT)


def _counts(
    evidence: Callable[[Tensor, Tensor, Tensor], Tensor],
    arguments: Arguments | None,
    chain: compiled.Uniform | None,
    *logs: Tensor,
) -> ExpectedCounts:
    """The evidence, and its gradients by its arguments; those of a ``chain`` need no autograd."""
    if transforming():
        value, counts = evidence_and_gradient(evidence, *logs)
        return ExpectedCounts(value, *counts)
    with torch.inference_mode(False), torch.enable_grad():
        found = None if chain is None else compiled.expected_counts(chain)
        if arguments is not None and found is not None:
            shaped = (_like(part, like) for part, like in zip(found[1:], logs))
            return ExpectedCounts(found[0].reshape(arguments.batch), *shaped)
        # tensors made in inference mode cannot ask for gradients
        leaves = [
            (part.clone() if part.is_inference() else part.detach()).requires_grad_()
            for part in logs
        ]
        value = evidence(*leaves)
        counts = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    return ExpectedCounts(value.detach(), *counts)


def _like(counts: Tensor, logs: Tensor) -> Tensor:
    """Counts of the shape and dtype of ``logs``, summed over what shares them."""
    alike = counts.numel() == logs.numel()
    shaped = counts.reshape(logs.shape) if alike else counts.sum_to_size(logs.shape)
    return shaped.to(logs.dtype)


def filtered(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    -inf at padded steps, and from the step at which the observations become impossible.
    """
    if transforming():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        messages = scaled_messages(log_space_by_steps(*chain)[1], chain)
        return messages.reshape(*batch, *messages.shape[-2:])
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        (messages,) = filtered_of(chain, chain.likelihood.dtype)
        return messages.to(chain.likelihood.dtype).reshape(*batch, *messages.shape[-2:])


def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Most probable path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, by Viterbi's algorithm.

    Returns:
        ``(*B, T)`` integers; among equal paths the first; 0 at padded steps.
    """
    refuse_transforms("the most probable path")
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        shape, device = chain.likelihood.shape[:3], chain.likelihood.device
        best = torch.zeros(shape, dtype=torch.long, device=device)
        backend_for(device).viterbi(chain, best)
        return best.permute(1, 2, 0).reshape(*batch, len(best))


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
    refuse_transforms("samples of paths")
    with torch.no_grad():
        chain, batch = group(log_initial, log_transition, log_likelihood, lengths)
        steps, groups, size, num_states = chain.likelihood.shape
        (messages,) = filtered_of(chain, chain.likelihood.dtype)  # (G * n, T, K)
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


def _of_symbols(
    log_initial: Tensor,
    log_transition: Tensor,
    log_symbols: Tensor,
    symbols: Tensor,
    lengths: Tensor,
    known: Tensor | None,
) -> tuple[Callable[[Tensor], Tensor], Arguments | None, compiled.Uniform | None]:
    """Lookup of log-likelihoods, the arguments, and the kernel's input or None, of symbols.

    There are no log-likelihoods among the arguments, but for their shape.
    """
    _check_symbols(log_initial, log_symbols, symbols, known)
    log_symbols = at_least_single(log_symbols)
    outer = {"log_symbols": log_symbols.shape[:-2], "symbols": symbols.shape[:-1]}
    if known is not None:
        outer["known"] = known.shape[:-1]
    shape = *check_broadcast(outer), symbols.size(-1), log_symbols.size(-2)
    symbols = symbols.expand(shape[:-1])  # so that its dimensions are those of log_symbols

    def likelihood(logs: Tensor) -> Tensor:
        scores = look_up(logs, symbols.movedim(-1, 0)).movedim(0, -2)
        return scores if known is None else scores.masked_fill(~known.unsqueeze(-1), 0.0)

    if transforming():
        return likelihood, None, None
    shown = log_symbols.detach().as_strided(shape, (0,) * len(shape))
    arguments = check_arguments(log_initial, log_transition, shown, lengths)
    return likelihood, arguments, _uniform(arguments, log_symbols, symbols, known)


def _check_symbols(
    log_initial: Tensor, log_symbols: Tensor, symbols: Tensor, known: Tensor | None
) -> None:
    """Raise unless types and shapes are those of :func:`log_evidence_of_symbols`."""
    check_tensor("log_initial", log_initial)
    check_real("log_symbols", log_symbols)
    if not log_symbols.dtype.is_floating_point:
        raise TypeError(
            f"log_symbols must be floating point; got {log_symbols.dtype}. Call .float() on it."
        )
    check_integers("symbols", symbols)
    num_states = log_initial.size(-1) if log_initial.dim() else 1
    if log_symbols.dim() < 2 or log_symbols.size(-2) != num_states:
        raise ValueError(
            f"log_symbols must have shape (*B, K, V) with K = {num_states}, that of log_initial; "
            f"got {tuple(log_symbols.shape)}."
        )
    if symbols.dim() == 0:
        raise ValueError("symbols must have shape (*B, T); got shape ().")
    if known is not None:
        check_booleans("known", known)
        if known.shape[-1:] != symbols.shape[-1:]:
            raise ValueError(
                f"known must have shape (*B, T) with T = {symbols.size(-1)}, that of symbols; got "
                f"{tuple(known.shape)}."
            )
        check_broadcast({"known": known.shape[:-1], "symbols": symbols.shape[:-1]})


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
            raise ValueError(
                f"symbols must lie between 0 and V - 1 = {logs.size(-1) - 1}, with V that of "
                f"log_symbols; got {low} to {high}."
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
        redone = evidence_of(chains, wider(value.dtype)).flatten()
        value = value.flatten().index_put((chosen,), redone)
    return value.reshape(arguments.batch)
