"""HMMs of symbols whose states emit only the symbols of their blocks: :class:`BlockHMM`."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import (
    check_booleans,
    check_floats,
    check_integers,
    check_lengths,
    check_log_simplex,
    check_no_nan,
    check_same_device,
    check_shape,
    check_tensor,
    check_trailing,
)
from .._lazy import lazy
from .._precision import full_precision
from ..ops import block_recursions, lookup, recursions
from ..ops.block_logs import BlockLogs
from ..ops.block_plan import Plan, States, bounds, is_dense
from ..ops.block_transition import InnerProductTransition as InnerProductTransition
from ..ops.blocks import Blocks
from ..ops.recursions import Posterior
from .hmm import HMM

# Where blocks overlap, each symbol has one of its own, and hardly any pair of them occurs twice. Up
# to so many times the states of a block, all moves at once take less time than those of each pair.
CROWDED = 8


class BlockPosterior(NamedTuple):
    """What the data say about the states, each step within the block of its symbol.

    Attributes:
        log_evidence: ``(*B)``, in nats.
        probs: ``(*B, T, w)``, of the states of the block; zero at padded steps.
        states: ``(*B, T, w)`` integers, which states these are; -1 where the block has fewer than
            w, and at padded steps.
    """

    log_evidence: Tensor
    probs: Tensor
    states: Tensor


class FinalState(NamedTuple):
    """The law of the last state of each sequence, given all its observations.

    Attributes:
        states: ``(N, w)`` integers, the states of the block of its last symbol; -1 beyond them.
        log_probs: ``(N, w)``.
    """

    states: Tensor
    log_probs: Tensor


class CarriedState(NamedTuple):
    """What came before some sequences: blocks of states that are left, and never entered.

    Attributes:
        leave: ``(G, D)``, vectors of these states, those of a block side by side.
        log_shares: ``(G, B)``, log-probability of the next block.
        sizes: ``(b,)``, number of states of each of these blocks.
        block: ``(N,)``, which of them each sequence comes from; -1 if it begins anew.
        log_probs: ``(N, w)``, of the states of that block.
    """

    leave: Tensor
    log_shares: Tensor
    sizes: Tensor
    block: Tensor
    log_probs: Tensor


class _Read(NamedTuple):
    """What is read of values, for N sequences.

    Attributes:
        blocks: ``(N, T)``, the block of each step, on the CPU; anything at padded steps.
        lengths: ``(N,)``.
        batch: The batch shape, of N elements.
        first: ``(N, w)``, log-probability of the first state, in its block.
        seen: ``(N, T, w)``, log-likelihood of each step in the states of its block.
    """

    blocks: Tensor
    lengths: Tensor
    batch: torch.Size
    first: Tensor
    seen: Tensor


class BlockHMM(HMM):
    """An HMM of symbols whose states emit only the symbols of their blocks.

    It is the same law as an :class:`HMM` with zeros elsewhere, and answers the same questions. What
    reads symbols visits only states that can emit them: ``log_prob`` and its gradient,
    ``viterbi``, ``sample_states``, ``filtered``, ``block_posterior``; with labels, or
    where steps are missing, and for everything else, it is :meth:`dense` that answers, whose cost
    is that of K x K matrices; for ``log_prob`` also where blocks overlap and are large. Parameters
    have no batch dimensions.

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        transition: Moves: :class:`InnerProductTransition`, or ``(K, K)`` log-probabilities.
        log_emission: ``(V, w)``, log-probability of each symbol in each state of its block, in the
            order of the block; what is beyond the block is not read.
        blocks: Which states may emit which symbol.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) probabilities do not
            sum to one.

    Example:
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> half = torch.full((4, 2), 0.5).log()
        >>> even = torch.full((4, 4), 0.25).log()
        >>> emission = torch.tensor([[0.9, 0.2], [0.1, 0.8], [1.0, 1.0]]).log()
        >>> hmm = BlockHMM(even[0], even, emission, two, torch.tensor(3))
        >>> hmm.log_prob(torch.tensor([0, 2, 1])).exp()  # 1/8 of 0.55 times 0.45
        tensor(0.0309)
        >>> hmm.dense().log_prob(torch.tensor([0, 2, 1])).exp()
        tensor(0.0309)
    """

    def __init__(
        self,
        log_initial: Tensor,
        transition: InnerProductTransition | Tensor,
        log_emission: Tensor,
        blocks: Blocks,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        check_floats("log_initial", log_initial)
        check_floats("log_emission", log_emission)
        size = blocks.num_states
        check_shape("log_initial", log_initial, (size,), "(K,)")
        check_shape("log_emission", log_emission, (blocks.num_symbols, blocks.width), "(V, w)")
        if isinstance(transition, Tensor):
            check_floats("transition", transition)
            check_shape("transition", transition, (size, size), "(K, K)")
        elif not isinstance(transition, InnerProductTransition):
            raise TypeError(
                "transition must be InnerProductTransition or a matrix of log-probabilities; got "
                f"{type(transition).__name__}."
            )
        elif not (blocks.disjoint and torch.equal(transition.blocks.sizes, blocks.sizes)):
            raise ValueError(
                f"the blocks of transition must be those of the HMM, {blocks!r}; got "
                f"{transition.blocks!r}."
            )
        check_integers("lengths", lengths)
        parts = {"log_initial": log_initial, "log_emission": log_emission}
        parts["transition"] = transition if isinstance(transition, Tensor) else transition.leave
        lengths = lengths.cpu().long()
        if observed is not None:
            check_booleans("observed", observed)
            parts["observed"] = observed
            if observed.dim() == 0 or observed.shape[:-1] != lengths.shape:
                raise ValueError(
                    f"observed must have shape (*B, T) with the shape {tuple(lengths.shape)} of "
                    f"lengths as *B; got shape {tuple(observed.shape)}."
                )
        check_same_device(parts)
        longest = int(lengths.max()) if lengths.numel() else 0
        num_steps = longest if observed is None else observed.size(-1)
        check_lengths(lengths, num_steps)
        self.log_initial, self.transition, self.blocks = log_initial, transition, blocks
        exists = (blocks.states[blocks.symbol_block] >= 0).to(log_emission.device)
        self.log_emission = log_emission.masked_fill(~exists, -torch.inf)
        self.lengths, self.observed, self.allowed = lengths, observed, None
        self.transition_per_step = self.emission_per_step = False
        self.before: CarriedState | None = None  # of sequences that go on from others
        TorchDistribution.__init__(
            self, lengths.shape, torch.Size((num_steps,)), validate_args=validate_args
        )
        if self._validate_args:
            check_log_simplex("log_initial", log_initial)
            self._check_emission()
            if isinstance(transition, Tensor):
                check_log_simplex("transition", transition)

    def _check_emission(self) -> None:
        """Raise unless what each state may emit has probabilities that sum to one."""
        states = self.blocks.states[self.blocks.symbol_block].to(self.log_emission.device)
        sums = self.log_emission.new_zeros(self.blocks.num_states + 1)
        sums.index_add_(
            0, states.masked_fill(states < 0, self.blocks.num_states).flatten(),
            self.log_emission.detach().exp().flatten(),
        )  # fmt: skip
        low, high = (end.item() for end in torch.aminmax(sums[:-1]))
        if not 1 - 1e-4 <= low <= high <= 1 + 1e-4:
            raise ValueError(
                "log_emission must hold log-probabilities that sum to one over the symbols of each "
                f"state; got sums from {low:.6g} to {high:.6g}."
            )

    # Dense, where it is asked for

    @property
    def log_transition(self) -> Tensor:  # type: ignore[override]
        """``(K, K)``, log-probabilities of the next state; computed when it is read."""
        return self.transition if isinstance(self.transition, Tensor) else self.transition.matrix

    @lazy
    def emission(self) -> TorchDistribution:
        """Of all K states, -inf where a state cannot emit a symbol; computed when it is read."""
        return self._symbols()

    def _symbols(self) -> Categorical:
        rows = self.blocks.states[self.blocks.symbol_block].to(self.log_emission.device)
        wide = self.log_emission.new_full(
            (self.blocks.num_symbols, self.blocks.num_states + 1), -torch.inf
        )
        wide = wide.scatter(
            1, rows.masked_fill(rows < 0, self.blocks.num_states), self.log_emission
        )
        return Categorical(logits=wide[:, :-1].mT)

    def dense(self) -> HMM:
        """The same law as an HMM that knows nothing of blocks."""
        initial = self.log_initial
        if self.before is not None:
            initial = self._continued(initial)
        hmm = HMM(
            initial, self.log_transition, self.emission, self.lengths, self.observed,
            validate_args=False, allowed=self.allowed,
        )  # fmt: skip
        hmm._validate_args = self._validate_args
        return hmm

    def _continued(self, initial: Tensor) -> Tensor:
        """The law of the first state of each sequence ``(N, K)``, where some go on from others."""
        before = self.before
        assert before is not None
        moves = cast(InnerProductTransition, self.transition).log_probs_from(
            before.leave, before.log_shares
        )
        moves = moves.split(before.sizes.tolist())
        rows = [
            initial if block < 0
            else (moves[block] + law[: len(moves[block])].unsqueeze(-1)).logsumexp(0)
            for block, law in zip(before.block.tolist(), before.log_probs)
        ]  # fmt: skip
        return torch.stack(rows)

    def replace(self, **changes: Any) -> HMM:
        """A copy with some arguments changed; dense where blocks cannot say it."""
        other = set(changes) - {"lengths", "observed", "allowed"}
        if other or changes.get("allowed") is not None:
            return self.dense().replace(**changes)
        if self.before is not None:  # it belongs to these sequences
            lengths = changes.get("lengths", self.lengths)
            if changes.get("observed") is not None or not torch.equal(lengths, self.lengths):
                return self.dense().replace(**changes)
        new = BlockHMM(
            self.log_initial, self.transition, self.log_emission, self.blocks,
            changes.get("lengths", self.lengths), changes.get("observed", self.observed),
            validate_args=False,
        )  # fmt: skip
        new._validate_args, new.before = self._validate_args, self.before
        return new

    @property
    def _is_open(self) -> bool:
        """Whether some state is not within the block of a symbol of these sequences."""
        return self.observed is not None or self.before is not None

    @property
    def _is_crowded(self) -> bool:
        """Whether all moves at once take less time than those of pairs of blocks."""
        blocks = self.blocks
        return not blocks.disjoint and blocks.num_states <= CROWDED * blocks.width

    # What the data say

    def log_prob(self, values: Tensor) -> Tensor:
        """Log evidence ``(*B)``, in nats; the states are summed out exactly."""
        if self.observed is not None:
            return self.dense().log_prob(values)
        read = self._read(values)
        with full_precision(self.log_initial):
            if self._is_crowded:
                found = recursions.log_evidence(*self._chain_of_all(read))
            else:
                found = block_recursions.log_evidence(*self._chain_in_blocks(read))
        batch = read.batch
        if self._validate_args:
            check_no_nan("the log-likelihood of values", found, "Look for NaN in the parameters.")
        return found.reshape(batch)

    def block_posterior(self, values: Tensor) -> BlockPosterior:
        """The law of each state given all observations, within the block of its symbol.

        Raises:
            ValueError: If steps are missing, where the state may be in any block.
        """
        if self.observed is not None:
            raise ValueError(
                "posterior_in_blocks needs every step to be observed; some are not, and their "
                "states may be in any block. Call posterior."
            )
        with torch.no_grad(), full_precision(self.log_initial):
            read = self._read(values)
            blocks, lengths, batch = read.blocks, read.lengths, read.batch
            *chain, seen = self._chain_in_blocks(read)
            chain = [each.detach() if isinstance(each, Tensor) else each for each in chain]
            seen = seen.detach()
        with torch.inference_mode(False), torch.enable_grad(), full_precision(seen):
            *chain, seen = (
                each.clone() if isinstance(each, Tensor) and each.is_inference() else each
                for each in (*chain, seen)
            )
            seen.requires_grad_()
            found = block_recursions.log_evidence(*chain, seen)  # type: ignore[call-arg]
            (probs,) = torch.autograd.grad(found.sum(), seen)
        if self.before is not None:  # what came before is no step of these
            later = (self.before.block >= 0).long().unsqueeze(-1) + torch.arange(self.num_steps)
            later = later.to(probs.device).unsqueeze(-1).expand(-1, -1, self.blocks.width)
            probs = probs.gather(1, later)
        exists = torch.arange(self.num_steps) < lengths.unsqueeze(-1)
        states = self.blocks.states[blocks].masked_fill(~exists.unsqueeze(-1), -1)
        shape = (*batch, self.num_steps, self.blocks.width)
        return BlockPosterior(
            found.detach().reshape(batch), probs.reshape(shape),
            states.to(probs.device).reshape(shape),
        )  # fmt: skip

    def final_state(self, values: Tensor) -> FinalState:
        """The law of the last state of each sequence ``(N, T)``, given its symbols."""
        if self.observed is not None:
            raise ValueError("ending needs every step to be observed; some are not.")
        with torch.no_grad(), full_precision(self.log_initial):
            read = self._read(values)
            found = block_recursions.final_state_log_probs(*self._chain_in_blocks(read))
        last = read.blocks.gather(1, read.lengths.unsqueeze(-1) - 1).squeeze(-1)
        states = self.blocks.states[last].to(found.device)
        return FinalState(states, found[:, : self.blocks.width])

    def posterior(self, values: Tensor) -> Posterior:
        """Smooth: evidence ``(*B)``, states ``(*B, T, K)``, expected moves ``(*B, K, K)``.

        With many states, :meth:`block_posterior` takes a fraction of the memory.
        """
        return self.dense().posterior(values)

    def filtered(self, values: Tensor) -> Tensor:
        """Law of each state given the observations up to it, ``(*B, T, K)``; 0 where padded."""
        if self._is_open:
            return self.dense().filtered(values)
        chain, plan, shape = self._logs(values)
        messages = torch.cat(chain.messages()[0])
        norm = messages.logsumexp(-1, keepdim=True)
        laws = (messages - norm.masked_fill(norm.isneginf(), 0.0)).exp()
        return self._scattered(laws, plan, shape)

    def viterbi(self, values: Tensor) -> Tensor:
        """Most probable path of states, ``(*B, T)`` integers; padded steps hold 0."""
        if self._is_open:
            return self.dense().viterbi(values)
        chain, plan, shape = self._logs(values)
        return self._named(chain.viterbi().unsqueeze(0), plan, shape).squeeze(0)

    def sample_states(self, values: Tensor, sample_shape: Any = ()) -> Tensor:
        """Draw paths given the values, ``(*S, *B, T)`` integers; padded steps hold 0."""
        if self._is_open:
            return self.dense().sample_states(values, sample_shape)
        outer = torch.Size(sample_shape)
        chain, plan, shape = self._logs(values)
        drawn = self._named(chain.sample(outer.numel()), plan, shape)
        return drawn.reshape(outer + drawn.shape[1:])

    # Sampling

    def _draw_path(self, shape: torch.Size) -> Tensor:
        """Draw paths ``(*shape, T)`` before anything is observed."""
        if self.before is not None:
            return self.dense()._draw_path(shape)
        state = Categorical(logits=self.log_initial).sample(torch.Size([shape.numel()]))
        states = [state]
        for _ in range(1, self.num_steps):
            if isinstance(self.transition, Tensor):
                rows = self.transition[state]
            else:
                rows = self.transition.rows(state)
            state = Categorical(logits=rows).sample()
            states.append(state)
        return torch.stack(states, -1).reshape(*shape, self.num_steps)

    # Joining parameters and data

    def _read(self, values: Tensor) -> _Read:
        """What the recursions read of the values."""
        check_tensor("values", values)
        check_integers("values", values)
        check_same_device({"values": values, "log_initial": self.log_initial})
        check_trailing("values", values, (self.num_steps,), "(T,)")
        batch = torch.broadcast_shapes(values.shape[:-1], self.batch_shape)
        lengths = self.lengths.expand(batch).reshape(-1)
        values = values.expand(*batch, self.num_steps).reshape(-1, self.num_steps)
        exists = (torch.arange(self.num_steps) < lengths.unsqueeze(-1)).to(values.device)
        symbols = values.long().masked_fill(~exists, 0)
        low, high = int(symbols.min()), int(symbols.max())
        if low < 0 or high >= self.blocks.num_symbols:
            raise ValueError(
                f"values must hold symbols from 0 to V - 1 = {self.blocks.num_symbols - 1}; got "
                f"values from {low} to {high}. Steps without a symbol are said by observed=."
            )
        blocks = self.blocks.symbol_block[symbols.cpu()]
        states, device = self.blocks.states[blocks[:, 0]], self.log_initial.device
        first = self.log_initial[states.clamp(min=0).to(device)]
        first = first.masked_fill((states < 0).to(device), -torch.inf)
        return _Read(blocks, lengths, batch, first, lookup.take_rows(self.log_emission, symbols))

    def _scores(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        moves = self.transition
        if isinstance(moves, Tensor):
            return moves, None, None
        if moves.block_logits is None and self.before is None and is_dense(moves.leave):
            return self.log_transition, None, None
        return moves.leave, moves.enter, moves.log_block_probs

    def _chain_in_blocks(self, read: _Read) -> tuple[Any, ...]:
        """What :func:`_blockwise.log_evidence` reads."""
        blocks, lengths, _, first, seen = read
        scores, states = self._scores(), self.blocks._states
        if self.before is None:
            return blocks, lengths, states, *scores, first, seen
        # a sequence that goes on from another has one more step, whose law is known
        before, (leave, enter, shares) = self.before, scores
        assert enter is not None
        assert shares is not None
        sizes = torch.cat([states.sizes, before.sizes])
        width = max(states.width, before.log_probs.size(-1))
        states = States(bounds(sizes), torch.arange(int(sizes.sum())), sizes, width)
        leave = torch.cat([leave, before.leave])
        enter = torch.cat([enter, torch.zeros_like(before.leave)])  # they are never entered
        shares = torch.cat([shares, before.log_shares])
        goes_on = before.block >= 0
        earlier = (before.block + self.blocks.num_blocks).unsqueeze(-1)
        blocks = torch.where(
            goes_on.unsqueeze(-1), torch.cat([earlier, blocks], 1), torch.cat([blocks, earlier], 1)
        )
        there = goes_on.to(seen.device).reshape(-1, 1)
        first, seen = (_widened(each, width) for each in (first, seen))
        law = _widened(before.log_probs, width).unsqueeze(1)
        seen = torch.where(
            there.unsqueeze(-1), torch.cat([law, seen], 1), torch.cat([seen, law], 1)
        )
        first = torch.where(there, torch.zeros_like(first), first)
        return blocks, lengths + goes_on, states, leave, enter, shares, first, seen

    def _chain_of_all(self, read: _Read) -> tuple[Tensor, ...]:
        """What :func:`recursions.log_evidence` reads: likelihoods in all K states."""
        states = self.blocks.states[read.blocks].to(read.seen.device)
        seen = read.seen.new_full((*states.shape[:2], self.blocks.num_states + 1), -torch.inf)
        seen = seen.scatter(2, states.masked_fill(states < 0, self.blocks.num_states), read.seen)
        transition = self.log_transition.unsqueeze(0)
        return self.log_initial, transition, seen[..., :-1], read.lengths

    def _logs(self, values: Tensor) -> tuple[BlockLogs, Plan, torch.Size]:
        """The chain in logarithms, without gradients."""
        with torch.no_grad(), full_precision(self.log_initial):
            blocks, lengths, batch, first, seen = self._read(values)
            states = self.blocks._states
            chain = BlockLogs(
                block_recursions.plan_chain(blocks, lengths, states, *self._scores(), first, seen)
            )
        return chain, chain.plan, torch.Size([*batch, self.num_steps])

    def _named(self, places: Tensor, plan: Plan, shape: torch.Size) -> Tensor:
        """The states at ``places`` ``(S, M)`` in the blocks of tokens, as ``(S, *B, T)``."""
        states = self.blocks.states[plan.block].expand(len(places), -1, -1)
        found = states.gather(-1, places.cpu().unsqueeze(-1)).squeeze(-1)
        out = torch.zeros(len(places), shape.numel(), dtype=torch.long)
        out[:, plan.where] = found
        return out.reshape(len(places), *shape).to(self.log_initial.device)

    def _scattered(self, laws: Tensor, plan: Plan, shape: torch.Size) -> Tensor:
        """Laws ``(M, w)`` within blocks as laws of all states, ``(*B, T, K)``."""
        states = self.blocks.states[plan.block].to(laws.device)
        size = self.blocks.num_states
        out = laws.new_zeros(shape.numel(), size + 1)
        rows = laws.new_zeros(len(laws), size + 1)
        rows.scatter_(1, states.masked_fill(states < 0, size), laws)
        out[plan.where.to(laws.device)] = rows
        return out[:, :-1].reshape(*shape, size)


def _widened(logs: Tensor, width: int) -> Tensor:
    """Logarithms ``(*, w)`` with zero probabilities beyond."""
    return torch.nn.functional.pad(logs, (0, width - logs.size(-1)), value=-torch.inf)
