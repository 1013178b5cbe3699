r"""Exact inference in chains of states with explicit durations: hidden semi-Markov models.

A sequence is cut into segments. Each has a state and a duration d of 1 to D steps; the next state
is drawn when it ends. The first segment begins with the sequence; the last one may be cut by its
end (``censored_end``), and then counts with the probability that it lasts at least as long as is
seen, or it ends there. Every function reads the tensors of :mod:`.recursions` and a further one;
batch dimensions broadcast:

``log_initial``     ``(*B, K)``     log p of the first segment's state
``log_transition``  ``(*B, K, K)``  log p of the next segment's state, row = from, column = to
``log_duration``    ``(*B, K, D)``  log p(d | k); entry d - 1 is that of d steps
``log_likelihood``  ``(*B, T, K)``  log p(x_t | z_t)
``lengths``         ``(*B)``        number of steps that exist; padding is on the right

Time is O(T K (K + D)) per sequence, memory O(T K); the chain over pairs of state and duration is
never made. Everything is summed in logarithms and float64, so that nothing leaves the range of
numbers, and comes back in the dtype of the arguments; -inf is legal everywhere.

Source: Yu, 2010, Hidden semi-Markov models; the gradient as in :mod:`.recursions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arguments import Range, checked, explained
from .._checks import check_broadcast, check_floats
from .._precision import differentiable_gradient, in_full_precision
from .._transforms import evidence_and_gradient, refuse_transforms, transforming
from . import torch_segments
from .backends import backend_for
from .log_space import finite_or_zero, logsumexp
from .masks import exists
from .recursions import ExpectedCounts
from .segment_chain import SegmentChain, arrange


@explained()
def log_survival(log_duration: Tensor) -> Tensor:
    r"""Log-probability :math:`\log \sum_{d' \ge d} p(d' \mid k)` to last at least d steps.

    Args:
        log_duration: ``(*B, K, D)``, log-probabilities.

    Returns:
        ``(*B, K, D)``: entry d - 1 is that of d steps.

    Example:
        >>> log_survival(torch.tensor([[0.5, 0.0, 0.5]]).log()).exp()
        tensor([[1.0000, 0.5000, 0.5000]])
    """
    check_floats("log_duration", log_duration)
    sums, width = log_duration.double(), 1
    while width < sums.size(-1):  # sums of this many entries, of twice as many, ...
        beyond = torch.nn.functional.pad(sums[..., width:], (0, width), value=-torch.inf)
        sums, width = logsumexp(torch.stack([sums, beyond]), 0), 2 * width
    return sums.to(log_duration.dtype)


def _final(log_duration: Tensor, censored_end: bool) -> Tensor:
    """Weight of the last segment, by how much of it is seen, ``(*B, K, D)`` in float64."""
    return log_survival(log_duration.double()) if censored_end else log_duration.double()


@checked()
def log_evidence(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    censored_end: bool = True,
) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, states and durations summed out, ``(*B)``.

    Differentiable by the first four arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero. Without ``censored_end``, the evidence is that of the
    observations *and* of a segment that ends with them.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> two = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).log()  # each segment lasts two steps
        >>> likelihood = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]).log()
        >>> first = torch.tensor([1.0, 0.0]).log()
        >>> log_evidence(first, swap, two, likelihood, torch.tensor(3)).exp()
        tensor(0.5040)
    """
    chain, batch, dtype = arrange(
        log_initial, log_transition, log_duration, _final(log_duration, censored_end),
        log_likelihood, lengths,
    )  # fmt: skip
    value: Tensor = (
        torch_segments.forward(chain, None)[2] if transforming() else _Evidence.apply(*chain)
    )
    return value.reshape(batch).to(dtype)


class _Evidence(torch.autograd.Function):
    """Log evidence ``(N,)``; the gradient is analytic."""

    @staticmethod
    def forward(
        ctx: Any, initial: Tensor, transition: Tensor, duration: Tensor, final: Tensor,
        likelihood: Tensor, lengths: Tensor,
    ) -> Tensor:  # fmt: skip
        chain = SegmentChain(initial, transition, duration, final, likelihood, lengths).detach()
        backend = backend_for(likelihood.device)
        arrive, ends, evidence, _ = backend.segment_forward(chain, None)
        ctx.save_for_backward(initial, transition, duration, final, likelihood)
        ctx.lengths, ctx.messages, ctx.backend = lengths, (arrive, ends, evidence), backend
        return evidence.clone()

    @staticmethod
    @in_full_precision
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        initial, transition, duration, final, seen = ctx.saved_tensors
        chain = SegmentChain(initial, transition, duration, final, seen, ctx.lengths)
        if torch.is_grad_enabled():  # the gradient will itself be differentiated

            def evidence(
                initial: Tensor, transition: Tensor, duration: Tensor, final: Tensor, seen: Tensor
            ) -> Tensor:
                parts = SegmentChain(initial, transition, duration, final, seen, ctx.lengths)
                return torch_segments.forward(parts, None)[2]

            return (*differentiable_gradient(evidence, chain[:5], weight), None)
        weight = weight.contiguous()
        return (*ctx.backend.segment_backward(chain.detach(), *ctx.messages, weight), None)


@explained()
def expected_counts(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    censored_end: bool = True,
) -> ExpectedCounts:
    """Expected counts under the posterior, as gradients of the evidence (Fisher's identity).

    Those of durations have the shape of ``log_duration``: a last segment that is cut counts with
    the whole durations that it may have. A sequence of probability zero counts nowhere.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> even = torch.full((2, 2), 0.5).log()
        >>> likelihood = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).log()
        >>> expected_counts(even[0], swap, even, likelihood, torch.tensor(3)).durations
        tensor([[0.0000, 1.0000],
                [0.5000, 0.5000]])
    """
    batch = check_broadcast(
        {
            "log_initial": log_initial.shape[:-1],
            "log_transition": log_transition.shape[:-2],
            "log_duration": log_duration.shape[:-2],
            "log_likelihood": log_likelihood.shape[:-2],
            "lengths": lengths.shape,
        }
    )
    log_likelihood = log_likelihood.expand(*batch, *log_likelihood.shape[-2:])
    logs = log_initial, log_transition, log_duration, log_likelihood
    if transforming():
        evidence, counts = evidence_and_gradient(
            lambda initial, transition, duration, likelihood: log_evidence(
                initial, transition, duration, likelihood, lengths, censored_end
            ),
            *logs,
        )
        starts, transitions, durations, states = counts
        return ExpectedCounts(evidence, starts, transitions.unsqueeze(-3), states, durations)
    with torch.inference_mode(False), torch.enable_grad():
        initial, transition, duration, likelihood = (
            leaves
        ) = [  # tensors made in inference mode cannot ask for gradients
            (part.clone() if part.is_inference() else part.detach()).requires_grad_()
            for part in logs
        ]
        evidence = log_evidence(initial, transition, duration, likelihood, lengths, censored_end)
        starts, transitions, durations, states = torch.autograd.grad(
            evidence.sum(), leaves, materialize_grads=True
        )
    return ExpectedCounts(evidence.detach(), starts, transitions.unsqueeze(-3), states, durations)


@explained()
def counts_of_each(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    censored_end: bool = True,
) -> ExpectedCounts:
    """As :func:`expected_counts`, of each sequence by itself: ``(*B, K, K)`` and ``(*B, K, D)``."""
    tensors = log_initial, log_transition, log_duration, log_likelihood
    cores = 1, 2, 2, 2
    batch = torch.broadcast_shapes(
        *(part.shape[: part.dim() - core] for part, core in zip(tensors, cores)), lengths.shape
    )
    initial, transition, duration, likelihood = (
        part.expand(*batch, *part.shape[part.dim() - core :]) for part, core in zip(tensors, cores)
    )
    return expected_counts(initial, transition, duration, likelihood, lengths, censored_end)


@checked()
def filtered(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
) -> Tensor:
    r"""Filtered log-probabilities :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``.

    Whether the sequence goes on after step t is not known to them. They are -inf at padded steps,
    and from the step at which the observations become impossible.
    """
    with torch.set_grad_enabled(transforming()):
        chain, batch, dtype = arrange(
            log_initial, log_transition, log_duration, _final(log_duration, False),
            log_likelihood, lengths,
        )  # fmt: skip
        survival = log_survival(chain.duration.mT).mT
        if transforming():
            scores = torch_segments.forward(chain, survival)[3]
        else:
            backend, chain = backend_for(chain.likelihood.device), chain.detach()
            scores = backend.segment_forward(chain, survival.contiguous())[3]
        scores = scores - finite_or_zero(logsumexp(scores, -1).unsqueeze(-1))
        padded = ~exists(chain.lengths, scores.size(1), scores.device)
        scores = scores.masked_fill(padded.unsqueeze(-1), -torch.inf)
        return scores.to(dtype).reshape(*batch, *scores.shape[-2:])


@checked()
def viterbi(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    censored_end: bool = True,
) -> Tensor:
    r"""Most probable states and durations :math:`\arg\max_{z, d} p(z, d \mid x_{1:T})`.

    Returns:
        ``(*B, T)`` integers, the states; 0 at padded steps. Where no state follows itself, the
        segments are the runs of equal states.
    """
    refuse_transforms("the most probable path")
    with torch.no_grad():
        chain, batch, _ = arrange(
            log_initial, log_transition, log_duration, _final(log_duration, censored_end),
            log_likelihood, lengths,
        )  # fmt: skip
        shape, device = chain.likelihood.shape[:2], chain.likelihood.device
        best = torch.zeros(shape, dtype=torch.long, device=device)
        backend_for(device).segment_viterbi(chain.detach(), best)
        return best.reshape(*batch, shape[1])


@checked(num_samples=Range(0))
def sample_states(
    log_initial: Tensor,
    log_transition: Tensor,
    log_duration: Tensor,
    log_likelihood: Tensor,
    lengths: Tensor,
    num_samples: int = 1,
    censored_end: bool = True,
) -> Tensor:
    r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`: filter forward, sample backward.

    Returns:
        ``(num_samples, *B, T)`` integers; 0 at padded steps.
    """
    refuse_transforms("samples of paths")
    with torch.no_grad():
        chain, batch, _ = arrange(
            log_initial, log_transition, log_duration, _final(log_duration, censored_end),
            log_likelihood, lengths,
        )  # fmt: skip
        chain, device = chain.detach(), chain.likelihood.device
        arrive, ends, *_ = backend_for(device).segment_forward(chain, None)
        count, steps, _ = chain.likelihood.shape
        shape = num_samples, count, steps
        uniform = torch.rand(*shape, 2, dtype=torch.float64, device=device)
        states = torch.zeros(shape, dtype=torch.long, device=device)
        backend_for(device).segment_sample(chain, arrive, ends, uniform, states)
        return states.reshape(num_samples, *batch, steps)


@explained()
def expanded_chain(
    log_initial: Tensor, log_transition: Tensor, log_duration: Tensor
) -> tuple[Tensor, Tensor]:
    """The Markov chain of K D states that is the same: the state, and how many steps remain of it.

    Returns:
        Log-probabilities of the first state ``(*B, K D)`` and of transitions ``(*B, K D, K D)``;
        entry k D + r - 1 is state k that lasts r more steps, this one included.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> even = torch.full((2, 2), 0.5).log()
        >>> expanded_chain(even[0], swap, even)[1].exp()
        tensor([[0.0000, 0.0000, 0.5000, 0.5000],
                [1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.0000]])
    """
    num_states, size = log_duration.shape[-2:]
    initial = (log_initial.unsqueeze(-1) + log_duration).flatten(-2)
    after = log_transition.unsqueeze(-1) + log_duration.unsqueeze(-3)
    matrix = after.new_full((*after.shape[:-3], num_states, size, num_states, size), -torch.inf)
    matrix[..., 0, :, :] = after
    place = torch.arange(1, size, device=after.device)
    for state in range(num_states):
        matrix[..., state, place, state, place - 1] = 0.0
    return initial, matrix.flatten(-4, -3).flatten(-2)


# Segments of paths ------------------------------------------------------------------------------


def boundaries(states: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where segments of paths ``(*B, T)`` open and close, and how long they have lasted so far.

    Args:
        states: Integers; a segment is a run of equal ones.
        present: Booleans, which steps exist.

    Returns:
        Booleans, booleans and integers, all ``(*B, T)``.
    """
    differ = states[..., 1:] != states[..., :-1]
    opens = torch.nn.functional.pad(differ, (1, 0), value=True) & present
    later = torch.nn.functional.pad(opens[..., 1:] | ~present[..., 1:], (0, 1), value=True)
    steps = torch.arange(states.size(-1), device=states.device).expand(states.shape)
    begun = steps.masked_fill(~opens, 0).cummax(-1).values
    return opens, later & present, steps - begun + 1
