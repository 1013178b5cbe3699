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

Every function raises ValueError if shapes disagree or a length does not lie between 1 and T.

**In the range of numbers that each sequence needs.**
Messages are probabilities scaled to sum to one at every step, so a step is one matrix product:
:math:`\alpha_t \propto (\alpha_{t-1} A) \circ e_t`, and the evidence is the sum of the logarithms
of the norms (Rabiner, 1989, section V.A). The gradient is the forward-backward algorithm itself:
the derivative by ``log_likelihood`` is p(z_t | x), that by ``log_transition`` the expected number
of transitions (Eisner, 2016). No tape of T steps is kept; memory is O(T K) per sequence.

Scaled numbers can underflow, and then sums lose paths that later turn out to matter. A sequence to
which that may have happened is computed again in float64, and where that is not enough, in log
space. What is known of the losses:

**No step can lose anything** if a^2 >= ``tiny * K / eps``, with a the smallest transition
probability: for every mass p that arrives at a step is then right to rounding. That holds for most
matrices without zeros. Transitions may have densities above one: ``tiny`` stands for the smallest
number times the largest of them, by which an error is multiplied.

**A step loses nothing** if q > ``2 tiny`` and a q / s >= ``2 tiny``, with q the smallest positive
product of a step, of arriving mass :math:`\alpha_{t-1} A` and likelihood, a the smallest positive
transition probability, and s the norm of the step; or if all masses that arrive at the next one are
above ``tiny * K / (s * eps)``. Compiled loops watch for that. Factors below ``tiny`` are raised to
it, so that only hard zeros are zero.

**What was lost may not matter**: well separated observations leave mass only in one state. Let
:math:`\beta_t` be the backward message, so that
:math:`L_t = \prod_{u \le t} s_u \; \alpha_t \cdot \beta_t` is the evidence of messages that are
computed up to t and exact from there on. Then :math:`L_t` and :math:`L_{t - 1}` differ by no more
than ``(K + 4) tiny`` :math:`/ s_t \sum_k \beta_t(k)`, and the evidence, relatively, by no more than
the sum over the steps of ``(K + 4) tiny / (s_t P_t)`` with
:math:`P_t = \alpha_t \cdot \beta_t / \sum_k \beta_t(k)`. Backward messages lose something too:
below ``(K + 2) tiny`` if :math:`e \circ \beta` sums to one. That is added to every transition on
the way back, so that they are never too small. If the bound is rounding, the sequence is exact.
Torch goes both ways at once, in one product a step, and needs no other bound: as
:math:`s_t P_t \ge a^2`, it holds wherever nothing can be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .._choices import FEW, WIDEST, WIDEST_PATHS, flushing
from .._precision import recomputing, with_gradient
from .._transforms import by_operations, evidence_and_gradient, refuse_transforms, transforming
from . import forward
from .backends import NUMBA, compiled, pick
from .dense import _torch
from .dense import chain as chains
from .dense.chain import Arguments, Gradient, Groups, check_arguments, grouped, ungrouped
from .log_space import step_mask


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
    r"""Expected counts under the posterior: gradients of the log evidence (Eisner, 2016).

    Attributes:
        log_evidence: ``(*B)``, :math:`\log p(x_{1:T})`, in nats.
        state_probs: ``(*B, T, K)``, :math:`p(z_t \mid x_{1:T})`; zero at padded steps.
        counts: By the names of the chain's parameters and in their shapes, the expected number of
            uses of each entry. Batch dimensions that a parameter lacks are summed.
    """

    log_evidence: Tensor
    state_probs: Tensor
    counts: dict[str, Tensor]

    def of_one_matrix(self) -> ExpectedCounts:
        """Copy with transition counts of shape ``(*b, K, K)`` in place of ``(*b, 1, K, K)``."""
        pairs = self.counts["log_transition"].squeeze(-3)
        return self._replace(counts=self.counts | {"log_transition": pairs})


def log_evidence(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor,
    symbols: Tensor | None = None, known: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Log evidence :math:`\log p(x_{1:T})` in nats, by the forward algorithm, shape ``(*B)``.

    Differentiable by the first three arguments, any number of times. A sequence of probability
    zero has evidence -inf and gradient zero. Within the transforms of ``torch.func`` it is computed
    in log space, by steps.

    Of observations that are symbols no log-likelihoods are written: ``log_likelihood`` is then that
    of each symbol, ``(*B, K, V)``.

    Args:
        log_initial: As above.
        log_transition: As above.
        log_likelihood: As above; with ``symbols`` ``(*B, K, V)``.
        lengths: As above.
        symbols: ``(*B, T)`` integers below V.
        known: ``(*B, T)`` booleans, False where a symbol is missing; all known by default.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> likelihood = torch.tensor([[0.2, 0.4], [0.5, 0.1]]).log()  # T = 2, K = 2
        >>> log_evidence(half, half.expand(1, 2, 2), likelihood, torch.tensor(2)).exp()
        tensor(0.0900)
        >>> coins, heads = torch.tensor([[0.9, 0.1], [0.4, 0.6]]).log(), torch.tensor([0, 0])
        >>> log_evidence(half, half.expand(1, 2, 2), coins, torch.tensor(2), heads).exp()
        tensor(0.4225)
    """
    parts = log_initial, log_transition, log_likelihood, lengths, symbols, known
    arguments = check_arguments(*parts)
    inputs = arguments.tensors
    differentiable = torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), inputs))
    return with_gradient(
        lambda *_: _solved(arguments, differentiable), _twin(arguments), *inputs,
        also=(symbols, known, arguments.lengths),
    )  # fmt: skip


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
        evidence, states, counts = _counts(arguments._replace(transition=wide))
        return Posterior(evidence, states, counts["log_transition"].sum(-3))
    with torch.no_grad():
        value, gradient = solve(grouped(arguments), dtype, each=True)
        found = gradient(torch.ones_like(value))
        assert found is not None
        parts = value, found[2], found[1].sum(0, dtype=torch.float64).unflatten(0, value.shape)
        return Posterior(*(part.to(dtype).reshape((*batch, *part.shape[2:])) for part in parts))


def expected_counts(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor,
    symbols: Tensor | None = None, known: Tensor | None = None,
) -> ExpectedCounts:  # fmt: skip
    """Expected counts under the posterior, as gradients of the evidence (Fisher's identity).

    A sequence of probability zero counts nowhere. Source: Eisner, 2016.

    The arguments are those of :func:`log_evidence`. With ``symbols``, ``state_probs`` are
    ``(*, V, K)``: the expected number of steps at which each symbol is observed in each state,
    summed over the sequences that share a table.

    Example:
        >>> half = torch.full((2,), 0.5).log()
        >>> likelihood = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).log()
        >>> found = expected_counts(half, half.expand(1, 2, 2), likelihood, torch.tensor(2))
        >>> found.counts["log_transition"]
        tensor([[[0.5000, 0.5000],
                 [0.0000, 0.0000]]])
    """
    parts = log_initial, log_transition, log_likelihood, lengths, symbols, known
    counts = _counts(check_arguments(*parts))
    return counts if symbols is None else counts._replace(state_probs=counts.state_probs.mT)


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
        return forward.filtered(_by_steps(arguments)).to(arguments.dtype)
    with torch.no_grad():
        scores = filtered_scaled(grouped(arguments), arguments.dtype)
    scores = scores.to(arguments.dtype).reshape(*arguments.batch, *scores.shape[-2:])
    padded = ~step_mask(arguments.lengths, scores.size(-2), scores.device)
    return scores.masked_fill(padded.unsqueeze(-1), -torch.inf)


def viterbi(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor
) -> Tensor:
    r"""Most probable path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, by Viterbi's algorithm.

    Returns:
        ``(*B, T)`` integers; among equal paths the first; 0 at padded steps.
    """
    return best_paths(log_initial, log_transition, log_likelihood, lengths, 1)[0].squeeze(-2)


def best_paths(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The C most probable paths ``(*B, C, T)``, best first; which of the others there are."""
    refuse_transforms("the most probable path")
    arguments = check_arguments(log_initial, log_transition, log_likelihood, lengths)
    batch = (*arguments.batch, count)
    with torch.no_grad():
        chain = grouped(arguments)
        if (loops := engine(chain, WIDEST_PATHS)) is _torch and count == 1:
            path = forward.viterbi(_by_steps(arguments)).unsqueeze(-2)
            return path, torch.ones_like(path[..., 0], dtype=torch.bool)
        paths, possible = loops.best_paths(chain, count)
        return paths.reshape(*batch, chain.num_steps), possible.reshape(batch)


@flushing
def sample_paths(
    log_initial: Tensor, log_transition: Tensor, log_likelihood: Tensor, lengths: Tensor,
    symbols: Tensor | None = None, known: Tensor | None = None, num_samples: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Samples of paths from :math:`p(z_{1:T} \mid x_{1:T})`: filter forward, sample backward.

    The arguments are those of :func:`log_evidence`.

    Returns:
        ``(num_samples, *B, T)`` integers, 0 at padded steps; and the log evidence ``(*B)`` in
        float64.
    """
    refuse_transforms("samples of paths")
    parts = log_initial, log_transition, log_likelihood, lengths, symbols, known
    arguments = check_arguments(*parts)
    batch = arguments.batch
    with torch.no_grad():
        states, evidence = _sampled(grouped(arguments), arguments.dtype, num_samples)
    return states.reshape(num_samples, *batch, states.size(-1)), evidence.reshape(batch)


def _solved(
    arguments: Arguments, differentiable: bool = True
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """Log evidence ``(*B)``, and its gradient by weights ``(*B)``."""
    evidence, gradient = solve(grouped(arguments), arguments.dtype, differentiable)

    def by_arguments(weights: Tensor) -> list[Tensor]:
        found = gradient(weights.reshape(evidence.shape))
        assert found is not None
        return ungrouped(arguments, found)

    return evidence.reshape(arguments.batch).to(arguments.dtype), by_arguments


def _twin(arguments: Arguments) -> Callable[..., Tensor]:
    """Log evidence ``(*B)`` as a differentiable function of the tensors of ``arguments``."""

    def evidence(initial: Tensor, transition: Tensor, logs: Tensor) -> Tensor:
        parts = arguments._replace(initial=initial, transition=transition, logs=logs)
        return by_operations(forward.log_evidence, _by_steps(parts)).to(arguments.dtype)

    return evidence


@recomputing
@flushing
def _counts(arguments: Arguments) -> ExpectedCounts:
    """Log evidence, and its gradients by the arguments; those by log-likelihoods per sequence."""
    if arguments.symbols is None:
        logs = arguments.logs.expand(*arguments.batch, *arguments.logs.shape[-2:])
        arguments = arguments._replace(logs=logs)
    if transforming():
        value, counts = evidence_and_gradient(_twin(arguments), *arguments.tensors)
    else:
        with torch.no_grad():
            value, gradient = _solved(arguments)
            counts = tuple(gradient(torch.ones_like(value)))
    initial, transitions, states = counts
    return ExpectedCounts(value, states, {"log_initial": initial, "log_transition": transitions})


def _by_steps(arguments: Arguments) -> forward.Arranged:
    """Convert the arguments to the form that :mod:`.forward` takes, for torch."""
    initial, transition = arguments.initial.unsqueeze(-2), arguments.transition.unsqueeze(-3)
    _, _, likelihood, symbols, known, lengths, *_ = arguments
    if symbols is not None:
        likelihood = chains.symbol_scores(likelihood, symbols, known)
    parts = initial, transition, likelihood, lengths
    return forward.arrange(*parts, narrow=False)


# In the range of numbers that each sequence needs -----------------------------------------------


def engine(chain: Groups, widest: int = WIDEST) -> ModuleType:
    """Choose the engine: compiled loops, up to ``widest`` states, or torch."""
    narrow = chain.initial.size(-1) <= widest or chain.lengths.numel() <= FEW
    return compiled("dense._numba") if pick(chain.initial.device, narrow) is NUMBA else _torch


def wider(dtype: torch.dtype) -> torch.dtype | None:
    """Next wider dtype when ``dtype`` underflows; None stands for log space."""
    return None if dtype == torch.float64 else torch.float64


def solve(
    chain: Groups, dtype: torch.dtype | None, differentiable: bool = True, each: bool = False
) -> tuple[Tensor, Gradient]:
    """Log evidence ``(G, n)`` in float64, and its gradient.

    Args:
        chain: The arguments, constants.
        dtype: The range of numbers to begin with; None stands for log space.
        differentiable: Whether the gradient is wanted.
        each: Whether expected transitions are wanted of each sequence, ``(S, G n, K, K)``.
    """
    if dtype is None:
        return log_space(chain, each)
    evidence, exact, gradient = engine(chain).scaled(chain, dtype, differentiable, each)
    rows = None
    if exact is not None and not bool(exact.all()):
        rows = (~exact).flatten().nonzero().squeeze(-1)
        if len(rows) == exact.numel():
            return solve(chain, wider(dtype), differentiable, each)
        lost, again = solve(chain.subset(rows), wider(dtype), differentiable, each)
        evidence = evidence.flatten().index_put((rows,), lost.flatten()).reshape(evidence.shape)

    def complete(weight: Tensor) -> tuple[Tensor, ...] | None:
        parts = gradient(weight if rows is None else weight.masked_fill(~exact, 0.0))
        if parts is None:  # only the way back has left the range
            return solve(chain, wider(dtype), True, each)[1](weight)
        if rows is None:
            return parts
        more = again(weight.flatten()[rows].reshape(lost.shape))
        assert more is not None
        return _merged(chain, parts, rows, more, each)

    return evidence, complete


def _merged(
    chain: Groups, parts: tuple[Tensor, ...], rows: Tensor, more: tuple[Tensor, ...], each: bool
) -> tuple[Tensor, ...]:
    """Merge gradients of all sequences with those of sequences computed again."""
    (initial, transition, logs), size = parts, chain.lengths.size(1)
    more = tuple(part.to(like.dtype) for part, like in zip(more, parts))
    shared = rows // size if len(chain.lengths) > 1 else rows[:1] * 0

    def put(part: Tensor, new: Tensor) -> Tensor:
        return part.flatten(0, 1).index_put((rows,), new.flatten(0, 1)).reshape(part.shape)

    return (
        put(initial, more[0]),
        transition.index_add(1, rows if each else shared, more[1]),
        put(logs, more[2]) if chain.symbols is None else logs.index_add(0, shared, more[2]),
    )


def filtered_scaled(chain: Groups, dtype: torch.dtype | None) -> Tensor:
    """Filtered log-probabilities ``(G, n, T, K)``; arbitrary at padded steps."""
    if dtype is None:
        return forward.filtered(_in_log_space(chain))
    found, exact = engine(chain).filtered(chain, dtype)
    if bool(exact.all()):
        return found
    rows = (~exact).flatten().nonzero().squeeze(-1)
    again = filtered_scaled(chain.subset(rows), wider(dtype)).flatten(0, 1).to(found.dtype)
    return found.flatten(0, 1).index_put((rows,), again).reshape(found.shape)


def _sampled(chain: Groups, dtype: torch.dtype | None, num_samples: int) -> tuple[Tensor, Tensor]:
    """Posterior samples of paths ``(S, G, n, T)``, and log evidence ``(G, n)``."""
    loops = engine(chain)
    if dtype is None or loops is _torch:
        return forward.sample_paths(_in_log_space(chain), num_samples)
    states, evidence, exact = loops.sample_paths(chain, dtype, num_samples)
    if not bool(exact.all()):
        rows = (~exact).flatten().nonzero().squeeze(-1)
        again = _sampled(chain.subset(rows), wider(dtype), num_samples)
        states.flatten(1, 2)[:, rows] = again[0].flatten(1, 2)
        evidence.flatten()[rows] = again[1].flatten()
    return states, evidence


# In logarithms ----------------------------------------------------------------------------------


def _in_log_space(chain: Groups, each: bool = False) -> forward.Arranged:
    """Convert to the form of :mod:`.forward`, with a matrix per sequence if need be."""
    matrices = chain.transition.movedim(0, 1)[:, None, :, None]  # (G, 1, S, 1, K, K)
    if each:
        matrices = matrices.expand(*chain.lengths.shape, *matrices.shape[2:])
    parts = chain.initial.unsqueeze(-2), matrices, chain.likelihood, chain.lengths
    return forward.arrange(*parts, narrow=engine(chain) is not _torch)


def log_space(chain: Groups, each: bool) -> tuple[Tensor, Gradient]:
    """Log evidence ``(G, n)`` and its gradient, by the forward pass in log space, in float64."""
    arranged = _in_log_space(chain, each)
    value, gradient = forward.solve(arranged)

    def restored(weight: Tensor) -> tuple[Tensor, ...]:
        initial, states, table = gradient(weight.double().reshape(-1))
        initial, states = (arranged.restored(part) for part in (initial.squeeze(1), states))
        return initial, table.squeeze(2), chain.by_logs(states)

    return arranged.restored(value + arranged.shift), restored
