"""``BlockChain``: a Markov chain whose state is in the block of its symbol."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import (
    broadcast_shapes,
    check_floats,
    check_log_simplex,
    check_same_device,
    check_shape,
)
from .._precision import at_least_single, full_precision
from ..ops import recursions as ops
from ..ops.blocks import recursions
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.blocks.states import Blocks
from ..ops.blocks.transitions import Transitions
from ..ops.log_space import finite_or_zero, logsumexp, normalised, step_mask
from ..ops.markov import refuse_nan, sample_path
from ..ops.products import take_rows
from ..ops.recursions import Posterior
from ..ops.tensor_cache import cached, cached_on
from .base import Chain, ExpectedCounts, gradients
from .markov import MarkovChain, PathFactors

# On one level each state's transitions to all others are summed anyway. Up to so many states it
# takes less time to keep their matrix; with more it would take too much memory.
MATRIX = 4096


class BlockLikelihood(NamedTuple):
    """Log-likelihoods of N sequences, for the states in the block of each symbol.

    Attributes:
        blocks: ``(N, T)``, the block of each step, on the CPU; B, the number of blocks, where it is
            missing, anything where it is padded.
        logs: ``(N, T, w)``, of each step in the states of its block.
        lengths: ``(N,)``.
        batch: The batch shape, of N elements.
        missing: ``(K,)`` or ``(N, T, K)``, of all states at missing steps; zeros by default.
        first: ``(N, w)``, log-probability of the first state in its block; that of the chain by
            default.
        leaving: ``(N, T, w)``, log-probability of the block of the next step given the state; that
            of the chain by default. The last step has zeros.
    """

    blocks: Tensor
    logs: Tensor
    lengths: Tensor
    batch: torch.Size
    missing: Tensor | None = None
    first: Tensor | None = None
    leaving: Tensor | None = None


class CarriedState(NamedTuple):
    """State distribution carried over from the step before N sequences begin.

    Attributes:
        leave: ``(N, w, D)``, vectors of the states that it may be.
        log_block_probs: ``(N, w, B)``, log-probability of the next block.
        log_probs: ``(N, w)``, of these states; -inf where there are fewer.
        continues: ``(N,)`` booleans, which sequences do go on.
    """

    leave: Tensor
    log_block_probs: Tensor
    log_probs: Tensor
    continues: Tensor

    @classmethod
    def of(
        cls, transition: InnerProductTransition, states: Tensor, log_probs: Tensor
    ) -> CarriedState:
        """Carried state of N sequences over ``states`` ``(N, w)``, -1 where there are fewer."""
        rows = states.clamp(min=0)
        return cls(
            transition.leave[rows], transition.log_block_probs[rows],
            log_probs.masked_fill(states < 0, -torch.inf), torch.ones(len(states)).bool(),
        )  # fmt: skip

    def first(self, transition: InnerProductTransition, block: Tensor) -> Tensor:
        """Log-probabilities ``(N, w)`` of the first state, within the blocks ``(N,)``."""
        states = transition.blocks.states[block].to(self.leave.device)
        with full_precision(self.leave):
            scores = at_least_single(self.leave @ transition.enter[states.clamp(min=0)].mT)
        within = scores.masked_fill((states < 0).unsqueeze(-2), -torch.inf).log_softmax(-1)
        shares = self.log_block_probs[torch.arange(len(block)), :, block]
        return logsumexp((shares + self.log_probs).unsqueeze(-1) + within, -2)

    def initial(self, log_initial: Tensor, transition: InnerProductTransition) -> Tensor:
        """Log-probabilities ``(N, K)`` of the first state; ``log_initial`` if none is carried."""
        rows = [
            logsumexp(transition.log_probs_from(*parts) + logs.unsqueeze(-1), 0)
            for *parts, logs in zip(*self[:3])
        ]
        goes_on = self.continues.to(log_initial.device).unsqueeze(-1)
        return torch.where(goes_on, torch.stack(rows), log_initial)


class BlockChain(MarkovChain):
    """A Markov chain whose state is, at each step, in the block of the symbol that it emits.

    Log-likelihoods are a :class:`BlockLikelihood`, and only states that can emit a symbol are
    visited; ordinary ones, ``(*B, T, K)``, are those of steps that may be in any block. Each copy
    with other parameters is the Markov chain of the matrix.

    Args:
        log_initial: ``(K,)``.
        transition: :class:`InnerProductTransition`, or ``(K, K)`` log-probabilities.
        blocks: Which states may emit which symbol.
        carried: The state before the first step, where sequences go on from others.
    """

    def __init__(
        self,
        log_initial: Tensor,
        transition: InnerProductTransition | Tensor,
        blocks: Blocks,
        carried: CarriedState | None = None,
    ) -> None:
        Chain.__init__(self)
        self.log_initial, self.transition = log_initial, transition
        self.blocks, self.carried = blocks, carried

    @property
    def log_transition(self) -> Tensor:
        """Log transition matrix ``(K, K)``; of inner products it is computed when first read."""
        return self.transition if isinstance(self.transition, Tensor) else self.transition.matrix

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Initial probabilities, per sequence with a carried state, and the transition matrix."""
        return {"log_initial": self.all_initial(), "log_transition": self.log_transition}

    def all_initial(self) -> Tensor:
        """Log-probabilities of the first state, ``(K,)``; ``(N, K)`` with a carried state."""
        if self.carried is None or isinstance(self.transition, Tensor):
            return self.log_initial
        return self.carried.initial(self.log_initial, self.transition)

    def replace(self, **changes: Any) -> MarkovChain:
        """The Markov chain of the matrix, with some parameters or options changed."""
        return MarkovChain(**(self.parameters | self.options | changes))

    @property
    def batches(self) -> dict[str, torch.Size]:
        """Batch dimensions by parameter, none of which has any."""
        return {"log_initial": torch.Size()}

    def check_values(self) -> None:
        """Raise unless log-probabilities sum to one; inner products do by construction."""
        check_log_simplex("log_initial", self.log_initial)
        if isinstance(self.transition, Tensor):
            check_log_simplex("transition", self.transition)

    def check_shapes(self) -> None:
        """Raise unless parameters have the shapes that the blocks prescribe."""
        blocks, transition, size = self.blocks, self.transition, self.blocks.num_states
        check_floats("log_initial", self.log_initial)
        check_shape("log_initial", self.log_initial, (size,), "(K,)")
        if isinstance(transition, Tensor):
            check_floats("transition", transition)
            check_shape("transition", transition, (size, size), "(K, K)")
            check_same_device({"log_initial": self.log_initial, "transition": transition})
        elif not torch.equal(transition.blocks.sizes, blocks.sizes):
            text = f"transition must be of the HMM's blocks, {blocks!r}; got {transition.blocks!r}"
            raise ValueError(f"{text}. Build it with those.")

    def refuse_nan(self, *logs: Any) -> None:
        """Raise if a parameter or log-likelihood is NaN."""
        seen = [log for log in logs if isinstance(log, BlockLikelihood)]
        scores = self.scores(any(each.leaving is not None for each in seen))
        parts = (each.logs for each in seen)
        refuse_nan(self.log_initial, *parts, *filter(torch.is_tensor, scores))

    # In blocks

    def scores(self, mixed: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """State vectors and block probabilities of transitions, or the matrix where it is faster.

        With ``mixed`` no block probabilities: those of the :class:`BlockLikelihood` count.
        """
        transition = self.transition
        if isinstance(transition, Tensor):
            return transition, None, None
        leave, one_level = transition.leave, transition.block_logits is None
        if one_level and not mixed and leave.device.type == "cpu" and len(leave) <= MATRIX:
            return self.log_transition, None, None
        return leave, transition.enter, None if mixed else transition.log_block_probs

    def transitions(self) -> Transitions:
        """The transitions as sums over states that need no matrix: :class:`Transitions`."""
        return Transitions(self.blocks, *self.scores())

    def in_blocks(self, logs: Any, lengths: Tensor) -> BlockLikelihood:
        """Convert dense log-likelihoods ``(*B, T, K)`` to block form, any block being possible."""
        if isinstance(logs, BlockLikelihood):
            return logs
        batch = broadcast_shapes(logs.shape[:-2], lengths.shape)
        logs = logs.expand(*batch, *logs.shape[-2:]).reshape(-1, *logs.shape[-2:])
        anything = torch.full(logs.shape[:2], self.blocks.num_blocks)
        within = logs.new_zeros(1).expand(*logs.shape[:2], self.blocks.width)
        return BlockLikelihood(anything, within, lengths.expand(batch).reshape(-1), batch, logs)

    def log_first(self, seen: BlockLikelihood) -> Tensor:
        """Log-probabilities ``(N, w)`` of the first state, in the block of the first symbol."""
        block, device = seen.blocks[:, 0].clamp(max=self.blocks.num_blocks - 1), seen.logs.device
        first = seen.first
        if first is None:
            states = cached(seen.blocks, lambda: self.blocks.states[block], self.blocks.states)
            states = cached_on(device, states)
            first = take_rows(self.log_initial.unsqueeze(-1), states.clamp(min=0)).squeeze(-1)
            first = first.masked_fill(states < 0, -torch.inf)
        if self.carried is None or isinstance(self.transition, Tensor):
            return first
        goes_on = self.carried.continues.to(device).unsqueeze(-1)
        return torch.where(goes_on, self.carried.first(self.transition, block), first)

    def trimmed(self, seen: BlockLikelihood) -> BlockLikelihood:
        """Drop missing steps after the last observation, which do not change the evidence."""
        matrix = isinstance(self.transition, Tensor) and self.transition.requires_grad
        if seen.missing is not None or matrix:  # by whose entries there is a gradient
            return seen
        clock = torch.arange(1, seen.blocks.size(1) + 1)
        known = (seen.blocks < self.blocks.num_blocks) & step_mask(seen.lengths, len(clock))
        return seen._replace(lengths=(known * clock).amax(1).clamp(min=1))

    def has_gaps(self, seen: BlockLikelihood) -> bool:
        """Whether some step is missing."""
        here = step_mask(seen.lengths, seen.blocks.size(1))
        return bool(((seen.blocks == self.blocks.num_blocks) & here).any())

    def messages(
        self, seen: BlockLikelihood, best: bool = False, before: Any = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Log forward messages ``(N, K + 1)`` of each step less their maximum; and these maxima.

        Of the best path to each state with ``best``; after the message of the step ``before`` and
        its blocks ``(N,)``, if it is given.
        """
        transitions, device, blocks = self.transitions(), seen.logs.device, seen.blocks
        unseen = seen.logs.new_zeros(1, self.num_states) if seen.missing is None else seen.missing
        clock = seen.lengths.to(device).unsqueeze(-1)

        def at(logs: Tensor, others: Tensor, t: int) -> Tensor:
            """Scatter step t from blocks to all states; ``others`` where the step is missing."""
            missing = (blocks[:, t] == transitions.all).to(device).unsqueeze(-1)
            others = pad(others.to(logs), (0, 1), value=-torch.inf)
            return torch.where(missing, others, transitions.widened(logs, blocks[:, t]))

        message, source = before or (at(self.log_first(seen), self.all_initial(), 0), None)
        total = message.new_zeros(len(blocks)).double()
        for t, block in enumerate(blocks.unbind(1)):
            logs, arrived = (
                at(seen.logs[:, t], unseen[:, t] if unseen.dim() > 2 else unseen, t),
                message,
            )
            if source is not None:
                arrived = transitions.sums(message, source, block, best).to(message.dtype)
            message, source = torch.where(t < clock, arrived + logs, message), block
            peak = finite_or_zero(message.detach().amax(-1))
            message, total = message - peak.unsqueeze(-1), total + peak
            yield message, total

    def in_places(
        self, seen: BlockLikelihood, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Markov chain over positions within blocks, in chunks of sequences, without gradients.

        Which these are, ``(n,)``, and what :mod:`pyrohmm.ops.recursions` take: log-probabilities
        ``(n, w)`` of the first place and ``(n, T-1, w, w)`` of transitions, log-likelihoods
        ``(n, T, w)``, and lengths.
        """
        with torch.no_grad(), full_precision(self.log_initial):
            mixed, first = seen.leaving, self.log_first(seen)
            transitions = Transitions(self.blocks, *self.scores(mixed is not None))
            for rows in recursions.chunks_of(transitions, seen.blocks):
                lengths = seen.lengths[rows]
                matrices = recursions.gathered(transitions, seen.blocks[rows], lengths)
                if mixed is not None:
                    matrices = matrices + mixed[rows, :-1].unsqueeze(-1)
                parts = first[rows], matrices, seen.logs[rows]
                yield rows, (*(part.to(dtype or part.dtype) for part in parts), lengths)

    def states(self, seen: BlockLikelihood) -> Tensor:
        """States in the block of each step, ``(N, T, w)``; K as padding, and where missing."""
        return self.blocks.places[seen.blocks].to(seen.logs.device)

    def widened(self, seen: BlockLikelihood) -> tuple[Tensor, Tensor]:
        """Dense log-likelihoods ``(*B, T, K)``, -inf outside of blocks; and lengths."""
        size, logs = self.num_states, seen.logs
        wide = self._of_all(logs, self.states(seen), -torch.inf)
        missing = (seen.blocks == self.blocks.num_blocks).to(logs.device)
        unseen = logs.new_zeros(size) if seen.missing is None else seen.missing
        wide = torch.where(missing.unsqueeze(-1), unseen, wide)
        return wide.reshape(*seen.batch, *wide.shape[1:]), seen.lengths.reshape(seen.batch)

    # The recursions of a chain

    def log_evidence(self, log_likelihood: Any, lengths: Tensor) -> Tensor:
        """Log evidence, ``(*B)``; differentiable."""
        seen = self.in_blocks(log_likelihood, lengths)
        with full_precision(self.log_initial):
            seen = self.trimmed(seen)
            if self.has_gaps(seen):
                *_, (message, total) = self.messages(seen)
                found = (total + logsumexp(message, -1)).to(message.dtype)
            else:
                found = recursions.log_evidence(*self.arguments(seen))
            return found.reshape(seen.batch)

    def arguments(
        self, seen: BlockLikelihood
    ) -> tuple[Transitions, Tensor, Tensor, Tensor, Tensor]:
        """Arguments of block ``log_evidence``: transitions within blocks or by the matrix."""
        leaving, scores = seen.leaving, self.scores(seen.leaving is not None)
        within, data = Transitions(self.blocks, *scores[:2], None), (seen.blocks, seen.lengths)
        if scores[2] is not None:
            keys = recursions.moves_of(within, *data).leaving
            leaving = Transitions(self.blocks, *scores).leaving(keys).to(seen.logs)
        logs = seen.logs if leaving is None else seen.logs + leaving
        return within, *data, self.log_first(seen), logs

    def within_blocks(self, seen: BlockLikelihood) -> tuple[Tensor, Tensor]:
        """Log evidence ``(*B)``, and smoothed marginals ``(*B, T, w)`` of the states of blocks."""
        with torch.no_grad(), full_precision(self.log_initial):
            transitions, blocks, lengths, first, logs = self.arguments(seen)

            def evidence(logs: Tensor) -> Tensor:  # copies may be saved for its gradient
                scores: Any = (
                    part if part is None else part.detach().clone() for part in transitions.scores
                )
                copy = Transitions(self.blocks, *scores)
                return recursions.log_evidence(copy, blocks, lengths, first.detach().clone(), logs)

            value, (probs,) = gradients(evidence, logs)
        return value.reshape(seen.batch), probs.reshape(*seen.batch, *probs.shape[1:])

    def final_state(self, seen: BlockLikelihood) -> Tensor:
        """Log-probabilities ``(N, w)`` of the last state, in the block of its symbol."""
        with full_precision(self.log_initial):
            if (found := recursions.final_state(*self.arguments(seen))) is not None:
                return found
        logs = torch.cat([ops.filtered(*parts) for _, parts in self.in_places(seen)])
        return logs[torch.arange(len(logs)), seen.lengths - 1]

    def posterior(self, log_likelihood: Any, lengths: Tensor) -> Posterior:
        """Smoothed marginals, and expected transitions of each sequence, without gradients."""
        seen, size = self.in_blocks(log_likelihood, lengths), self.num_states + 1
        if self.has_gaps(seen):
            with torch.no_grad():
                return self.replace().posterior(*self.widened(seen))
        states, probs = self.states(seen), list[Tensor]()
        evidence, counts = [], seen.logs.new_zeros(len(states), size**2, dtype=torch.float64)
        for rows, parts in self.in_places(seen):
            found = ops.expected_counts(*parts)
            at = states[rows]
            cells = (at[:, :-1].unsqueeze(-1) * size + at[:, 1:].unsqueeze(-2)).flatten(1)
            moved = found.counts["log_transition"].double().flatten(1)
            counts[rows] = counts[rows].scatter_add_(1, cells, moved)
            evidence.append(found.log_evidence)
            probs.append(self._of_all(found.state_probs, at, 0.0))
        pairs = counts.unflatten(1, (size, size))[:, :-1, :-1].to(seen.logs)
        parts = torch.cat(evidence), torch.cat(probs), pairs
        return Posterior(*(part.reshape(*seen.batch, *part.shape[1:]) for part in parts))

    def _of_all(self, values: Tensor, states: Tensor, fill: float) -> Tensor:
        """Scatter values at places ``(n, T, w)`` to all states, ``(n, T, K)``."""
        wide = values.new_full((*values.shape[:-1], self.num_states + 1), fill)
        return wide.scatter(-1, states, values)[..., :-1]

    def expected_counts(self, log_likelihood: Any, lengths: Tensor) -> ExpectedCounts:
        """Expected counts of the first state and of the entries of the matrix."""
        wide = self.widened(self.in_blocks(log_likelihood, lengths))
        return self.replace().expected_counts(*wide)

    def filtered(self, log_likelihood: Any, lengths: Tensor) -> Tensor:
        """Filtered log-probabilities, ``(*B, T, K)``, without gradients; -inf at padded steps."""
        seen = self.in_blocks(log_likelihood, lengths)
        with torch.no_grad():
            if self.has_gaps(seen):
                steps = [normalised(message)[:, :-1] for message, _ in self.messages(seen)]
                padded = ~step_mask(seen.lengths, len(steps), seen.logs.device)
                found = torch.stack(steps, 1).masked_fill(padded.unsqueeze(-1), -torch.inf)
            else:
                parts = [ops.filtered(*parts) for _, parts in self.in_places(seen)]
                found = self._of_all(torch.cat(parts), self.states(seen), -torch.inf)
        return found.reshape(*seen.batch, *found.shape[1:])

    @torch.no_grad()
    def predictive(self, seen: BlockLikelihood) -> Tensor:
        r"""Predictive :math:`\log p(x_t \mid x_{1:t-1})`, ``(*B, T)``; arbitrary where padded."""
        if self.has_gaps(seen):
            steps = [total + logsumexp(message, -1) for message, total in self.messages(seen)]
            totals = torch.stack(steps, 1)
            found = totals - finite_or_zero(pad(totals[:, :-1], (1, 0)))
        else:
            factors = (PathFactors.joined(*parts) for _, parts in self.in_places(seen))
            found = torch.cat([logsumexp(f.predicted() + f.likelihood, -1) for f in factors])
        return found.reshape(*seen.batch, found.size(-1))

    def viterbi(self, log_likelihood: Any, lengths: Tensor) -> Tensor:
        """Most probable path, ``(*B, T)``; 0 at padded steps."""
        return self._paths(self.in_blocks(log_likelihood, lengths), None)

    def sample_states(self, log_likelihood: Any, lengths: Tensor, num_samples: int) -> Tensor:
        """Sample paths from the posterior, ``(num_samples, *B, T)``; 0 at padded steps."""
        return self._paths(self.in_blocks(log_likelihood, lengths), num_samples)

    def _paths(self, seen: BlockLikelihood, count: int | None) -> Tensor:
        """Samples of paths ``(count, *B, T)``, or the best one ``(*B, T)``."""
        if self.has_gaps(seen):
            return paths_through_gaps(self, seen, count)
        found = []
        for _, (first, matrices, *parts) in self.in_places(seen, torch.float64):
            chain, (logs, lengths) = MarkovChain(first, matrices, True), parts
            if count is None:
                found.append(chain.viterbi(logs, lengths))
            else:
                found.append(chain.sample_states(logs, lengths, count))
        return self.at_places(torch.cat(found, -2), seen)

    def at_places(self, places: Tensor, seen: BlockLikelihood) -> Tensor:
        """Convert positions in blocks ``(*S, N, T)`` to states ``(*S, *B, T)``; 0 where padded."""
        states = self.states(seen).expand(*places.shape, -1)
        found = states.gather(-1, places.unsqueeze(-1)).squeeze(-1)
        found = found.masked_fill(~step_mask(seen.lengths, found.size(-1), found.device), 0)
        return found.reshape(*places.shape[:-2], *seen.batch, places.size(-1))

    def log_joint(self, log_likelihood: Any, lengths: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` of paths; in block form, the log evidence."""
        if isinstance(log_likelihood, BlockLikelihood):
            return self.log_evidence(log_likelihood, lengths)
        return super().log_joint(log_likelihood, lengths, states)

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths ``(*B, T)``."""
        return self.replace().log_prob(states, exists)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Sample paths of the chain; only the rows of the states that occur are computed."""
        initial, transition = torch.atleast_2d(self.all_initial()), self.transition
        rows = transition.__getitem__ if isinstance(transition, Tensor) else transition.rows

        def after(_: int, states: Tensor) -> Tensor:
            return torch.multinomial(rows(states).exp(), 1).squeeze(-1)

        first = torch.multinomial(initial.exp(), shape.numel() // len(initial), True)
        return sample_path(first.mT.flatten(), num_steps, after).reshape(*shape, num_steps)


@torch.no_grad()
def paths_through_gaps(chain: BlockChain, seen: BlockLikelihood, count: int | None) -> Tensor:
    """Sampled or most probable paths with missing steps: forward pass, then backtracking.

    The state before is chosen by its share in the sum, or largest, over the states before: the
    derivative by its message.
    """
    best, transitions, rows = count is None, chain.transitions(), count or 1
    seen = seen._replace(logs=seen.logs.double())
    blocks, clock = seen.blocks.repeat(rows, 1), seen.lengths.to(seen.logs.device).repeat(rows)
    messages = []
    for (message, _), block in zip(chain.messages(seen, best), seen.blocks.T):
        wide = bool((block == transitions.all).any())  # else kept in places
        messages.append(message if wide else message.gather(1, transitions.places(block)))

    def choose(shares: Tensor) -> Tensor:
        return (shares if best else shares / torch.empty_like(shares).exponential_()).argmax(-1)

    def arrived(step: slice, state: Tensor, message: Tensor) -> Tensor:
        source, target = blocks[:, step].unbind(-1)
        return transitions.sums(message, source, target, best).gather(1, state.unsqueeze(-1))

    state = choose(message.repeat(rows, 1).softmax(-1))
    path = [state]
    for t in range(len(messages) - 1, 0, -1):
        message = messages[t - 1].repeat(rows, 1)
        if message.size(1) <= chain.num_states:
            message = transitions.widened(message, blocks[:, t - 1])
        _, (share,) = gradients(partial(arrived, slice(t - 1, t + 1), state), message)
        state = torch.where(t < clock, choose(share), state)
        path.append(state)
    found = torch.stack(path[::-1], -1).masked_fill(~step_mask(clock, len(path)), 0)
    return found.reshape(*(() if best else (rows,)), *seen.batch, len(path))
