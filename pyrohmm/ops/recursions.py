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

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._choices import WIDEST_PATHS, flushing
from .._precision import recomputing, with_gradient
from .._transforms import evidence_and_gradient, refuse_transforms, transforming
from .dense import _torch as torch_engine
from .dense import scaling
from .dense.chain import Arguments, arrange, check_arguments, spread
from .log_space import finite_or_zero, logsumexp
from .masks import exists


class Posterior(NamedTuple):
    r"""Smoothed posterior of the states of each sequence.

    Attributes:
        log_evidence: ``(*B)``, :math:`\log p(x_{1:T})`, in nats.
        state_probs: ``(*B, T, K)``, :math:`p(z_t \mid x_{1:T})`; zero at padded steps.
        transitions: ``(*B, K, K)``, expected number of transitions,
            :math:`\sum_t p(z_t, z_{t+1} \mid x_{1:T})`.
    """

    log_evidence: Tensor
    state_probs: Tensor
    transitions: Tensor


class ExpectedCounts(NamedTuple):
    r"""Expected counts under the posterior: the result of the E-step of EM.

    Counts are summed over the sequences that share a parameter, so that they have its shape.

    Attributes:
        log_evidence: ``(*B)``, :math:`\log p(x_{1:T})`, in nats.
        initial: As ``log_initial``: expected number of sequences that start in each state.
        transitions: As ``log_transition``: expected number of transitions from row to column.
        state_probs: ``(*B, T, K)``, :math:`p(z_t \mid x_{1:T})`; zero at padded steps.
        durations: As ``log_duration``: expected number of segments of each duration; None of a
            chain without explicit durations.
    """

    log_evidence: Tensor
    initial: Tensor
    transitions: Tensor
    state_probs: Tensor
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
    return evidence(check_arguments(log_initial, log_transition, log_likelihood, lengths))


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
    return evidence(
        check_arguments(log_initial, log_transition, log_symbols, lengths, symbols, known)
    )


@recomputing
@flushing
def posterior(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Posterior:
    r"""Smoothed posterior :math:`p(z_t \mid x_{1:T})`, by the forward-backward algorithm.

    A sequence of probability zero has no posterior: its entries are zero. Differentiable; for the
    gradient it is computed again, by steps.
    """
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    batch, dtype = arguments.batch, arguments.dtype
    if transforming():
        wide = arguments.transition.expand(*batch, *arguments.transition.shape[-3:])
        counts = _counts(arguments._replace(transition=wide))
        return Posterior(counts.log_evidence, counts.state_probs, counts.transitions.sum(-3))
    with torch.no_grad():
        value, gradient = scaling.solve(arrange(arguments), dtype, each=True)
        found = gradient(torch.ones_like(value))
        assert found is not None
        parts = value, found[2], found[1].sum(0, dtype=torch.float64).unflatten(0, value.shape)
        return Posterior(*(part.to(dtype).reshape((*batch, *part.shape[2:])) for part in parts))


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
    return _counts(check_arguments(log_initial, log_transition, log_likelihood, lengths))


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
        >>> expected_counts_of_symbols(half, matrix, coins, flips, torch.tensor(3)).state_probs
        tensor([[2., 0.],
                [0., 1.]])
    """
    arguments = check_arguments(log_initial, log_transition, log_symbols, lengths, symbols, known)
    counts = _counts(arguments)
    return counts._replace(state_probs=counts.state_probs.mT)


@recomputing
@flushing
def filtered(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    -inf at padded steps, and from the step at which the observations become impossible.
    """
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    if transforming():
        scores = log_space_by_steps(arguments)[1]
        scores = scores - finite_or_zero(logsumexp(scores, -1).unsqueeze(-1))
    else:
        with torch.no_grad():
            scores = scaling.filtered(arrange(arguments), arguments.dtype)
    scores = scores.to(arguments.dtype).reshape(*arguments.batch, *scores.shape[-2:])
    if bool((arguments.lengths == scores.size(-2)).all()):
        return scores
    padded = ~exists(arguments.lengths, scores.size(-2), scores.device)
    return scores.masked_fill(padded.unsqueeze(-1), -torch.inf)


def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Most probable path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, by Viterbi's algorithm.

    Returns:
        ``(*B, T)`` integers; among equal paths the first; 0 at padded steps.
    """
    refuse_transforms("the most probable path")
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    with torch.no_grad():
        chain = arrange(arguments)
        best: Tensor = scaling.engine(chain, WIDEST_PATHS).viterbi(chain)
        return best.reshape(*arguments.batch, best.size(-1))


@flushing
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
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    with torch.no_grad():
        chain = arrange(arguments)
        if (loops := scaling.engine(chain)) is torch_engine:
            states: Tensor = torch_engine.sample_states(chain, num_samples)
        else:
            filters = scaling.filtered(chain, arguments.dtype)
            states = loops.sample_states(chain, filters, num_samples)
        return states.reshape(num_samples, *arguments.batch, states.size(-1))


def evidence(arguments: Arguments) -> Tensor:
    """Log evidence ``(*B)``, differentiable any number of times, of what has been checked."""
    tensors = arguments.tensors
    differentiable = torch.is_grad_enabled() and any(part.requires_grad for part in tensors)

    def solved(*_: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
        return _solved(arguments, differentiable)

    also = arguments.symbols, arguments.known, arguments.lengths
    return with_gradient(solved, _twin(arguments), *tensors, also=also)


def _solved(
    arguments: Arguments, differentiable: bool = True
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Log evidence ``(*B)``, and its gradient by weights ``(*B)``."""
    chain = arrange(arguments)
    evidence, gradient = scaling.solve(chain, arguments.dtype, differentiable)

    def by_arguments(weights: Tensor) -> list[Tensor]:
        found = gradient(weights.reshape(evidence.shape))
        assert found is not None
        return spread(arguments, found)

    return evidence.reshape(arguments.batch).to(arguments.dtype), by_arguments


def _twin(arguments: Arguments) -> Callable[..., Tensor]:
    """Log evidence ``(*B)`` of tensors in place of those of ``arguments``, by autograd."""

    def evidence(initial: Tensor, transition: Tensor, logs: Tensor) -> Tensor:
        parts = arguments._replace(initial=initial, transition=transition, logs=logs)
        return log_space_by_steps(parts)[0].to(arguments.dtype)

    return evidence


@recomputing
@flushing
def _counts(arguments: Arguments) -> ExpectedCounts:
    """The evidence, and its gradients by its arguments; log-likelihoods are of each sequence."""
    if arguments.symbols is None:
        logs = arguments.logs.expand(*arguments.batch, *arguments.logs.shape[-2:])
        arguments = arguments._replace(logs=logs)
    if transforming():
        value, counts = evidence_and_gradient(_twin(arguments), *arguments.tensors)
        return ExpectedCounts(value, *counts)
    with torch.no_grad():
        value, gradient = _solved(arguments)
        return ExpectedCounts(value, *gradient(torch.ones_like(value)))


def log_space_by_steps(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Evidence ``(*B)`` and messages log p(x_{1:t}, z_t) ``(*B, T, K)``, by plain autograd.

    In float64, in which the sums of gradients over steps are then too.
    """
    initial, transition, likelihood = (
        part.double() for part in (arguments.initial, arguments.transition, arguments.likelihood)
    )
    lengths = arguments.lengths.to(initial.device)
    alpha = (initial + likelihood[..., 0, :]).expand(*arguments.batch, initial.size(-1))
    alphas, varying = [alpha], transition.size(-3) > 1
    for t in range(1, likelihood.size(-2)):
        matrix = transition[..., t - 1 if varying else 0, :, :]
        arrived = logsumexp(alpha.unsqueeze(-1) + matrix, -2) + likelihood[..., t, :]
        alpha = torch.where((t < lengths).unsqueeze(-1), arrived, alpha)
        alphas.append(alpha)
    return logsumexp(alpha, -1), torch.stack(alphas, -2)
