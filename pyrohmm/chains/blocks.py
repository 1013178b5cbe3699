"""``BlockChain``: a Markov chain whose state is in the block of its symbol."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import (
    broadcast_shapes,
    check_floats,
    check_log_simplex,
    check_same_device,
    check_shape,
)
from .._precision import at_least_single, full_precision
from ..ops.blocks import queries, recursions
from ..ops.blocks.inner_products import InnerProductTransition
from ..ops.blocks.messages import LogChain
from ..ops.blocks.plan import PlannedChain
from ..ops.blocks.states import Blocks
from ..ops.blocks.transitions import Transitions
from ..ops.log_space import logsumexp, step_mask
from ..ops.markov import refuse_nan, sample_path
from ..ops.products import take_rows
from ..ops.recursions import Posterior
from .base import Chain, ExpectedCounts, gradients
from .markov import MarkovChain

# Where blocks overlap, each symbol has its block, and hardly any pair of blocks occurs twice. Up to
# so many times the states of a block, all transitions at once take less time than those of pairs.
CROWDED = 14

# On one level each state's transitions to all others are summed anyway. Up to so many states it
# takes less time to keep their matrix; with more it would take too much memory.
MATRIX = 4096


class BlockLikelihood(NamedTuple):
    """Log-likelihoods of N sequences, in the states of the blocks of their symbols.

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
    """The distribution of the state before the first step of N sequences that go on from others.

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
        """N sequences that all go on from ``states`` ``(N, w)``, -1 where there are fewer."""
        rows = states.clamp(min=0)
        return cls(
            transition.leave[rows], transition.log_block_probs[rows],
            log_probs.masked_fill(states < 0, -torch.inf), torch.ones(len(states)).bool(),
        )  # fmt: skip

    def first(self, transition: InnerProductTransition, block: Tensor) -> Tensor:
        """Log-probabilities ``(N, w)`` of the first state, in the blocks ``(N,)``."""
        states = transition.blocks.states[block].to(self.leave.device)
        with full_precision(self.leave):
            scores = at_least_single(self.leave @ transition.enter[states.clamp(min=0)].mT)
        within = scores.masked_fill((states < 0).unsqueeze(-2), -torch.inf).log_softmax(-1)
        shares = self.log_block_probs[torch.arange(len(block)), :, block]
        return logsumexp((shares + self.log_probs).unsqueeze(-1) + within, -2)

    def initial(self, log_initial: Tensor, transition: InnerProductTransition) -> Tensor:
        """Log-probabilities ``(N, K)`` of the first state; ``log_initial`` of those that begin."""
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
        """``(K, K)``; of inner products it is made when it is first read."""
        return self.transition if isinstance(self.transition, Tensor) else self.transition.matrix

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The first state's probabilities, of each sequence if it goes on; and the matrix."""
        return {"log_initial": self.all_initial(), "log_transition": self.log_transition}

    def all_initial(self) -> Tensor:
        """Log-probabilities of the first state, ``(K,)``; ``(N, K)`` if sequences go on."""
        if self.carried is None or isinstance(self.transition, Tensor):
            return self.log_initial
        return self.carried.initial(self.log_initial, self.transition)

    def replace(self, **changes: Any) -> MarkovChain:
        """The Markov chain of the matrix, with some parameters or options changed."""
        return MarkovChain(**(self.parameters | self.options | changes))

    @property
    def batches(self) -> dict[str, torch.Size]:
        """The parameters have no batch dimensions."""
        return {"log_initial": torch.Size()}

    def check_values(self) -> None:
        """Raise unless log-probabilities sum to one; inner products do by construction."""
        check_log_simplex("log_initial", self.log_initial)
        if isinstance(self.transition, Tensor):
            check_log_simplex("transition", self.transition)

    def check_shapes(self) -> None:
        """Raise unless the parameters are of the states of the blocks, and on one device."""
        blocks, transition, size = self.blocks, self.transition, self.blocks.num_states
        check_floats("log_initial", self.log_initial)
        check_shape("log_initial", self.log_initial, (size,), "(K,)")
        if isinstance(transition, Tensor):
            check_floats("transition", transition)
            check_shape("transition", transition, (size, size), "(K, K)")
        elif not (blocks.disjoint and torch.equal(transition.blocks.sizes, blocks.sizes)):
            raise ValueError(
                f"the blocks of transition must be those of the HMM, {blocks!r}; got "
                f"{transition.blocks!r}."
            )
        leave = transition if isinstance(transition, Tensor) else transition.leave
        check_same_device({"log_initial": self.log_initial, "transition": leave})

    def refuse_nan(self, *logs: Any) -> None:
        """Raise if a parameter or log-likelihood is NaN, which a state could not show."""
        seen = [log for log in logs if isinstance(log, BlockLikelihood)]
        scores = self.scores(any(each.leaving is not None for each in seen))
        parts = (each.logs for each in seen)
        refuse_nan(self.log_initial, *parts, *filter(torch.is_tensor, scores))

    def going_on(self, carried: CarriedState) -> BlockChain:
        """The chain of sequences that go on from others."""
        return BlockChain(self.log_initial, self.transition, self.blocks, carried)

    # In blocks

    def scores(self, mixed: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Vectors and shares of the transition, or its matrix where that takes less time.

        With ``mixed``, shares that are all one: those of the :class:`BlockLikelihood` count.
        """
        transition = self.transition
        if isinstance(transition, Tensor):
            return transition, None, None
        leave, one_level = transition.leave, transition.block_logits is None
        if mixed:
            shares = self.log_initial.new_zeros(1, 1).expand(len(leave), self.blocks.num_blocks)
        elif one_level and leave.device.type == "cpu" and len(leave) <= MATRIX:
            return self.log_transition, None, None
        else:
            shares = transition.log_block_probs
        return leave, transition.enter, shares

    def transitions(self) -> Transitions:
        """Sums over transitions from and to blocks or all states, without their matrix."""
        return Transitions(self.blocks.layout, *self.scores())

    def in_blocks(self, logs: Any, lengths: Tensor) -> BlockLikelihood:
        """Log-likelihoods in blocks; ordinary ones ``(*B, T, K)`` as those of missing steps."""
        if isinstance(logs, BlockLikelihood):
            return logs
        batch = broadcast_shapes(logs.shape[:-2], lengths.shape)
        logs = logs.expand(*batch, *logs.shape[-2:]).reshape(-1, *logs.shape[-2:])
        anything = torch.full(logs.shape[:2], self.blocks.num_blocks)
        within = logs.new_zeros(1).expand(*logs.shape[:2], self.blocks.width)
        return BlockLikelihood(anything, within, lengths.expand(batch).reshape(-1), batch, logs)

    def plan(
        self, seen: BlockLikelihood, trim: bool = False, with_leaving: bool = True
    ) -> PlannedChain:
        """The chain as the recursions read it.

        Args:
            seen: The log-likelihoods.
            trim: Whether to leave out what is missing after the last observation, which changes no
                evidence.
            with_leaving: Whether ``seen.leaving``, a factor of the state, is part of its
                likelihood.
        """
        blocks, logs, lengths, _, missing, first, leaving = seen
        block = blocks[:, 0].clamp(max=self.blocks.num_blocks - 1)
        if first is None:
            states = self.blocks.states[block].to(logs.device)
            first = take_rows(self.log_initial.unsqueeze(-1), states.clamp(min=0)).squeeze(-1)
            first = first.masked_fill(states < 0, -torch.inf)
        if self.carried is not None and isinstance(self.transition, InnerProductTransition):
            goes_on = self.carried.continues.to(logs.device).unsqueeze(-1)
            first = torch.where(goes_on, self.carried.first(self.transition, block), first)
        matrix = isinstance(self.transition, Tensor) and self.transition.requires_grad
        if trim and missing is None and not matrix:  # by whose entries there is a gradient
            clock = torch.arange(1, blocks.size(1) + 1)
            known = (blocks < self.blocks.num_blocks) & step_mask(lengths, len(clock))
            lengths = (known * clock).amax(1).clamp(min=1)
        if leaving is not None and with_leaving:
            logs = logs + leaving
        scores = self.scores(leaving is not None)
        return recursions.plan_chain(blocks, lengths, self.blocks.layout, *scores, first, logs)

    def log_chain(
        self, seen: BlockLikelihood, dtype: torch.dtype | None = None, trim: bool = False
    ) -> LogChain:
        """The chain in logarithms, without gradients.

        Args:
            seen: The log-likelihoods.
            dtype: Of the messages; that of the parameters by default.
            trim: Whether to leave out what is missing after the last observation.
        """
        with torch.no_grad(), full_precision(self.log_initial):
            chain = self.plan(seen, trim, with_leaving=False).detached()
            logs = chain.log_first.to(dtype), chain.log_seen.to(dtype)
            chain = chain._replace(log_first=logs[0], log_seen=logs[1])
            initial, missing = self._of_all_states(chain, seen)
            leaving = seen.leaving
            if leaving is not None:
                where = chain.plan.where.to(leaving.device)
                leaving = leaving.flatten(0, 1)[where].to(chain.log_seen)
            return LogChain(chain, initial, leaving, missing)

    def _of_all_states(
        self, chain: PlannedChain, seen: BlockLikelihood
    ) -> tuple[Tensor | None, Tensor | None]:
        """Log-probabilities of the first state, and log-likelihoods where steps are missing."""
        initial: Tensor | None = self.log_initial
        if self.carried is not None:
            first = chain.plan.block[: len(chain.plan.lengths)]
            is_missing = bool((first == self.blocks.num_blocks).any())
            initial = self.all_initial()[chain.plan.order] if is_missing else None
        missing = seen.missing
        if missing is not None and missing.dim() > 1:
            missing = missing.flatten(0, 1)[chain.plan.where.to(missing.device)]
        return initial, missing

    def widened(self, seen: BlockLikelihood) -> Tensor:
        """Log-likelihoods of all states ``(N, T, K)``; -inf outside of blocks."""
        size, logs = self.blocks.num_states, seen.logs
        missing = seen.blocks == self.blocks.num_blocks
        states = self.blocks.states[seen.blocks.masked_fill(missing, 0)].to(logs.device)
        wide = logs.new_full((*states.shape[:2], size + 1), -torch.inf)
        wide = wide.scatter(2, states.masked_fill(states < 0, size), logs)[..., :-1]
        unseen = logs.new_zeros(size) if seen.missing is None else seen.missing
        return torch.where(missing.to(logs.device).unsqueeze(-1), unseen, wide)

    # The recursions of a chain

    def log_evidence(self, log_likelihood: Any, lengths: Tensor) -> Tensor:
        """Log evidence, ``(*B)``; differentiable."""
        seen, blocks = self.in_blocks(log_likelihood, lengths), self.blocks
        with full_precision(self.log_initial):
            if not blocks.disjoint and blocks.num_states <= CROWDED * blocks.width:
                found = self.replace().log_evidence(self.widened(seen), seen.lengths)
                return found.reshape(seen.batch)
            chain = self.plan(seen, trim=True)
            value = recursions.log_evidence(chain, *self._of_all_states(chain, seen))
            return queries.in_order(chain, value).reshape(seen.batch)

    def within_blocks(self, seen: BlockLikelihood) -> tuple[Tensor, Tensor]:
        """Log evidence ``(*B)``, and smoothed marginals ``(*B, T, w)`` of the states of blocks."""
        with torch.no_grad(), full_precision(self.log_initial):
            chain = self.plan(seen)

        def evidence(logs: Tensor) -> Tensor:
            return recursions.log_evidence(chain.detached()._replace(log_seen=logs))

        with full_precision(self.log_initial):
            value, (probs,) = gradients(evidence, chain.log_seen)
        where = chain.plan.where.to(probs.device)
        out = torch.zeros_like(seen.logs).flatten(0, 1).index_copy(0, where, probs)
        shape = *seen.batch, *seen.logs.shape[1:]
        return queries.in_order(chain, value).reshape(seen.batch), out.reshape(shape)

    def final_state(self, seen: BlockLikelihood) -> Tensor:
        """Log-probabilities ``(N, w)`` of the last state, in the block of its symbol."""
        with torch.no_grad(), full_precision(self.log_initial):
            chain = self.plan(seen)
            return queries.in_order(chain, recursions.final_state_log_probs(chain))

    def posterior(self, log_likelihood: Any, lengths: Tensor) -> Posterior:
        """Smoothed marginals, and expected transitions of each sequence, without gradients."""
        seen = self.in_blocks(log_likelihood, lengths)
        evidence = self.log_evidence(seen, lengths).detach()
        with torch.no_grad():
            chain = self.log_chain(seen)
            filtered = chain.filtered()
            smoothed = chain.smoothed(filtered)
            counts = queries.transition_counts(chain, filtered, smoothed)
            states = self._at_all_steps(chain, smoothed, seen).exp()
        return Posterior(evidence, states, counts.reshape(*evidence.shape, *counts.shape[1:]))

    def expected_counts(self, log_likelihood: Any, lengths: Tensor) -> ExpectedCounts:
        """Expected counts of the first state and of the entries of the matrix."""
        if isinstance(log_likelihood, BlockLikelihood):
            wide = self.widened(log_likelihood)
            log_likelihood = wide.reshape(*log_likelihood.batch, *wide.shape[1:])
        return self.replace().expected_counts(log_likelihood, lengths)

    def filtered(self, log_likelihood: Any, lengths: Tensor) -> Tensor:
        """Filtered states, ``(*B, T, K)``, without gradients; -inf at padded steps."""
        seen = self.in_blocks(log_likelihood, lengths)
        with torch.no_grad():
            chain = self.log_chain(seen)
            return self._at_all_steps(chain, chain.filtered(), seen)

    def _at_all_steps(self, chain: LogChain, logs: list[Tensor], seen: BlockLikelihood) -> Tensor:
        """Logarithms ``(*B, T, K)``, of messages."""
        shape = *seen.batch, seen.blocks.size(1), self.num_states
        return queries.all_states(chain, logs, seen.blocks.numel()).reshape(shape)

    def viterbi(self, log_likelihood: Any, lengths: Tensor) -> Tensor:
        """Most probable path, ``(*B, T)``; 0 at padded steps."""
        return self.k_best(self.in_blocks(log_likelihood, lengths), 1)[0].squeeze(0)

    def k_best(self, seen: BlockLikelihood, count: int) -> tuple[Tensor, Tensor]:
        """The C best paths ``(C, *B, T)``; and their log p(x, z), ``(*B, C)``."""
        with torch.no_grad():
            chain = self.log_chain(seen, torch.float64)
            paths, best = queries.k_best(chain, count)
        return self._paths(chain, paths, seen), best.reshape(*seen.batch, count)

    def sample_states(self, log_likelihood: Any, lengths: Tensor, num_samples: int) -> Tensor:
        """Paths of the posterior, ``(num_samples, *B, T)``; 0 at padded steps."""
        seen = self.in_blocks(log_likelihood, lengths)
        with torch.no_grad():
            chain = self.log_chain(seen)
            return self._paths(chain, queries.sample(chain, num_samples), seen)

    def _paths(self, chain: LogChain, paths: Tensor, seen: BlockLikelihood) -> Tensor:
        """Paths ``(*S, *B, T)``, of states of tokens; 0 at padded steps."""
        shape = torch.Size([*seen.batch, seen.blocks.size(1)])
        return queries.at_steps(chain, paths, shape).to(self.log_initial.device)

    def log_joint(self, log_likelihood: Any, lengths: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` of paths; in blocks the evidence, -inf with it."""
        if isinstance(log_likelihood, BlockLikelihood):
            return self.log_evidence(log_likelihood, lengths)
        return super().log_joint(log_likelihood, lengths, states)

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths ``(*B, T)``."""
        return self.replace().log_prob(states, exists)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Paths of the chain; only the rows of the states that occur are computed."""
        initial, transition = torch.atleast_2d(self.all_initial()), self.transition
        rows = transition.__getitem__ if isinstance(transition, Tensor) else transition.rows

        def after(_: int, states: Tensor) -> Tensor:
            return torch.multinomial(rows(states).exp(), 1).squeeze(-1)

        first = torch.multinomial(initial.exp(), shape.numel() // len(initial), True)
        return sample_path(first.mT.flatten(), num_steps, after).reshape(*shape, num_steps)
