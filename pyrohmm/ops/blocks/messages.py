r"""Messages of chains in blocks of states, in logarithms, by torch: any device, and always exact.

The state of a step is in the block of its symbol. A missing step says nothing: its state may be
any of all K, its block is B, the number of blocks, and its log-likelihood is zero. A message is a
vector of the w states of a block, or of all K. From one observed step to the next there are the
transitions of pairs of blocks; from, to and between missing ones the sums of
:class:`.transitions.Transitions`. Queries are written once
over these, in ``queries`` and ``paths``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..log_space import finite_or_zero, log_softmax_of_parts, logsumexp
from ..tensor_cache import cached_on
from .plan import BlockChain, Scores, bounds
from .transitions import Transitions

KEPT = 1 << 22  # numbers of matrices that are made for all tokens at once, and kept
OFTEN = 64  # tokens for each pair of blocks


class Messages(NamedTuple):
    """Vectors of states of the tokens of a step, or of all steps.

    Attributes:
        within: ``(n, w)``, of the states of their blocks; those of missing tokens mean nothing.
        wide: ``(g, K)``, of all states, of the missing tokens among them.
    """

    within: Tensor
    wide: Tensor


class LogChain:
    """A chain in blocks, of which some steps may be missing.

    Args:
        chain: The chain; its plan has block B where a step is missing.
        log_initial: ``(K,)``, log-probabilities of the first state, if some step is missing.
        leaving: ``(M, w)``, log-factor of each state in the transition to the next token; none by
            default, and none if some step is missing.
    """

    def __init__(
        self, chain: BlockChain, log_initial: Tensor | None = None, leaving: Tensor | None = None
    ) -> None:
        self.plan, self.first, self.seen = chain.plan, chain.log_first, chain.log_seen
        self.initial, self.leaving, self.device = log_initial, leaving, chain.log_seen.device
        self.transitions = Transitions(
            chain.states, chain.leave, chain.enter, chain.log_block_probs
        )
        self.steps = [slice(*ends) for ends in pairwise([*self.plan.begins.tolist(), self.size])]
        self.missing = self.plan.block == self.transitions.all
        self.gaps = bounds(self.missing.long())  # how many tokens before are missing
        counts = self.missing.split([step.stop - step.start for step in self.steps])
        gappy = [bool(each.any()) for each in counts] if bool(self.missing.any()) else []
        self.has_gaps = bool(gappy)
        # whether something is missing at a step, or the one before
        self.gappy = [now or before for now, before in zip(gappy, [False, *gappy])]
        self.gappy = self.gappy or [False] * len(self.steps)
        self.log_probs = self._log_probs(chain)

    @property
    def size(self) -> int:
        """M, the number of tokens."""
        return len(self.plan.where)

    @property
    def later(self) -> slice:
        """The tokens that have one before."""
        return slice(len(self.plan.lengths), self.size)

    @property
    def last(self) -> Tensor:
        """The last tokens of the sequences, ``(N,)``."""
        lengths = self.plan.lengths
        return self.plan.begins[lengths - 1] + torch.arange(len(lengths))

    # Transitions between observed steps

    def _log_probs(self, chain: BlockChain) -> Tensor:
        """Log transition probabilities of all pairs.

        In float64 where they recur often, so that their gradients are added up in that.
        """
        dtype = torch.float64 if self.size > OFTEN * len(chain.plan.source) else self.seen.dtype
        plan, sizes, scores = self.plan, chain.states.sizes, Scores(chain)
        of_pairs = sizes[plan.source], sizes[plan.target]
        layout = torch.stack([plan.base, plan.stride, *of_pairs], -1)
        # (P, 4): from these few numbers a step computes its indices on the device
        self.layout = cached_on(self.device, layout)
        self.pair = cached_on(self.device, plan.pair)
        log_block_probs = chain.log_block_probs
        if log_block_probs is None:
            return scores().to(dtype)
        parts = [self.seen.new_zeros(0)]
        for rows, targets, _ in scores.sources():
            logits = (chain.leave[rows] @ scores.entered(targets).mT).to(self.seen.dtype)
            weights = log_block_probs[rows][:, targets.to(self.device)]
            parts.append(log_softmax_of_parts(logits, sizes[targets], weights).flatten())
        return torch.cat(parts).to(dtype)

    def matrices(self, tokens: slice | Tensor) -> Tensor:
        """Log transition probabilities to some tokens from those before, ``(n, w, w)``."""
        if self._matrices is not None:
            return self._matrices[tokens if isinstance(tokens, slice) else tokens.to(self.device)]
        return self._matrices_of(tokens)

    @cached_property
    def _matrices(self) -> Tensor | None:
        """Transition matrices of all tokens, if they are few."""
        few = self.size * self.seen.size(-1) ** 2 <= KEPT
        return self._matrices_of(slice(None)) if few and len(self.layout) else None

    def _matrices_of(self, tokens: slice | Tensor) -> Tensor:
        places = torch.arange(self.seen.size(-1), device=self.device)
        pair = self.pair[tokens if isinstance(tokens, slice) else tokens.to(self.device)]
        layout = self.layout.index_select(0, pair)
        base, stride, height, breadth = layout.unsqueeze(-1).unsqueeze(-1).unbind(1)
        rows = places.unsqueeze(-1)
        beyond = (rows >= height) | (places >= breadth)
        cells = (base + rows * stride + places).masked_fill(beyond, 0)
        log_probs = self.log_probs.index_select(0, cells.flatten()).view_as(cells)
        log_probs = log_probs.to(self.seen.dtype).masked_fill(beyond, -torch.inf)
        if self.leaving is None:
            return log_probs
        return log_probs + self.leaving[self.plan.before[tokens].to(self.device)].unsqueeze(-1)

    # Vectors of tokens

    def kinds(self, tokens: slice) -> list[Tensor]:
        """Tokens that have one before, in parts: both observed, or one of them missing, or both."""
        numbers = torch.arange(*tokens.indices(self.size))
        if not self.has_gaps:
            return [numbers] if len(numbers) else []
        kind = 2 * self.missing[self.plan.before[numbers]].long() + self.missing[numbers]
        return [part for each in range(4) if len(part := numbers[kind == each])]

    def are_known(self, tokens: Tensor) -> bool:
        """Whether tokens of one of :meth:`kinds` are observed, and those before."""
        return not (self.kind(tokens) or self.kind(self.plan.before[tokens]))

    def kind(self, tokens: Tensor) -> int:
        """Which of the messages are those of some tokens, all missing or none: the wide ones?"""
        return int(self.missing[tokens[0]]) if self.has_gaps else 0

    def at(self, messages: Messages, tokens: Tensor, step: int | None = None) -> Tensor:
        """Vectors of some tokens, all missing or none, of the messages of a step, or of all."""
        return messages[self.kind(tokens)][self.rows(tokens, step)]

    def _put(self, messages: Messages, tokens: Tensor, values: Tensor, step: int) -> Messages:
        """The messages of a step with some of their vectors replaced."""
        parts, number = list(messages), self.kind(tokens)
        parts[number] = parts[number].index_copy(0, self.rows(tokens, step), values)
        return Messages(*parts)

    def rows(self, tokens: Tensor, step: int | None) -> Tensor:
        """Rows of tokens in the messages of a step, or of all."""
        first = self.steps[step or 0].start
        if self.kind(tokens):
            return (self.gaps[tokens] - self.gaps[first]).to(self.device)
        return (tokens - first).to(self.device)

    def full(self, tokens: slice, value: float) -> Messages:
        """Vectors of some tokens that hold one number."""
        size = self.transitions.num_states
        count = int(self.gaps[tokens.stop] - self.gaps[tokens.start])
        within = self.seen.new_full((tokens.stop - tokens.start, self.seen.size(-1)), value)
        return Messages(within, within.new_full((count, size), value))

    def of_tokens(
        self, messages: Messages, function: Callable[[Tensor], Tensor], tokens: slice | None = None
    ) -> Tensor:
        """A number for each token ``(n,)``, of its vector; ``tokens`` are those of the messages."""
        within = function(messages.within)
        if not len(messages.wide):
            return within
        missing = self.missing[tokens or slice(None)].nonzero().squeeze(-1).to(self.device)
        return within.index_copy(0, missing, function(messages.wide))

    def _less(self, messages: Messages, number: Tensor, tokens: slice | None = None) -> Messages:
        """With a number ``(n,)`` subtracted from the vector of each token."""
        wide = messages.wide
        if len(wide):
            missing = self.missing[tokens or slice(None)].to(self.device)
            wide = wide - number[missing].unsqueeze(-1)
        return Messages(messages.within - number.unsqueeze(-1), wide)

    def _normalised(self, messages: Messages) -> Messages:
        norm = self.of_tokens(messages, lambda part: finite_or_zero(part.logsumexp(-1)))
        return self._less(messages, norm)

    # Passes

    def _sums(self, t: int, logs: Messages, back: bool = False) -> Messages:
        """Sums over the states before those of step ``t``; ``back``, after those of ``t - 1``."""
        step, before = self.steps[t], self.steps[t - 1]
        if not self.gappy[t]:
            values = logs.within[: step.stop - step.start]
            joint = values.unsqueeze(-2 if back else -1) + self.matrices(step)
            found = logsumexp(joint, -1 if back else -2)
            if not back:
                return Messages(found, logs.wide)
            ended = before.stop - before.start - len(found)
            return Messages(torch.nn.functional.pad(found, (0, 0, 0, ended)), logs.wide)
        out = self.full(before, 0.0) if back else self.full(step, -torch.inf)
        for tokens in self.kinds(step):
            earlier = self.plan.before[tokens]
            ends = [(earlier, t - 1), (tokens, t)]
            here, there = ends[::-1] if back else ends
            values = self.at(logs, *here)
            if self.are_known(tokens):
                joint = values.unsqueeze(-2 if back else -1) + self.matrices(tokens)
                found = logsumexp(joint, -1 if back else -2)
            else:
                blocks = self.plan.block[earlier], self.plan.block[tokens]
                found = self.transitions.sums(values, *blocks, back).to(values.dtype)
            out = self._put(out, there[0], found, there[1])
        return out

    def at_first_step(self) -> Messages:
        """Log p(z_1) of the first tokens."""
        first = self.steps[0]
        if self.initial is None or not self.has_gaps:
            return Messages(self.first, self.full(slice(0, 0), 0.0).wide)
        missing = self.missing[first].to(self.device).unsqueeze(-1)
        wide = self.initial.to(self.first).expand(int(missing.sum()), -1)
        return Messages(self.first.masked_fill(missing, -torch.inf), wide)

    def forward(self) -> tuple[list[Messages], list[Tensor]]:
        """Log p(x_{1:t}, z_t) less the largest, of the tokens of each step.

        And what was subtracted, ``(n_t,)`` float64: logarithms of thousands of steps have no digits
        left for the probability of a state.
        """
        messages: list[Messages] = []
        subtracted: list[Tensor] = []
        for t, step in enumerate(self.steps):
            arrived = self._sums(t, messages[-1]) if t else self.at_first_step()
            joint = arrived._replace(within=arrived.within + self.seen[step])
            with torch.no_grad():
                peak = finite_or_zero(self.of_tokens(joint, lambda part: part.amax(-1), step))
            messages.append(self._less(joint, peak, step))
            before = subtracted[-1][: len(peak)] if t else 0.0
            subtracted.append(before + peak.double())
        return messages, subtracted

    def filtered(self) -> Messages:
        r"""Log :math:`p(z_t \mid x_{1:t})` of all tokens; -inf from where it is impossible."""
        return self._normalised(Messages(*map(torch.cat, zip(*self.forward()[0]))))

    def backward(self) -> Messages:
        r"""Log :math:`p(x_{t+1:T} \mid z_t)` plus a constant, of all tokens."""
        messages = [self.full(self.steps[-1], 0.0)]
        for t in range(len(self.steps) - 1, 0, -1):
            after, step = messages[-1], self.steps[t - 1]
            joint = after._replace(within=after.within + self.seen[self.steps[t]])
            found = self._sums(t, joint, back=True)
            peak = finite_or_zero(self.of_tokens(found, lambda part: part.amax(-1), step))
            messages.append(self._less(found, peak, step))
        return Messages(*map(torch.cat, zip(*messages[::-1])))

    def smoothed(self, filtered: Messages) -> Messages:
        r"""Log :math:`p(z_t \mid x_{1:T})` of all tokens, given :meth:`filtered`."""
        both = zip(filtered, self.backward())
        return self._normalised(Messages(*(one + other for one, other in both)))

    # Evidence, differentiable

    def ends(self, steps: list[Tensor]) -> Tensor:
        """Of the results of each step, those of the sequences that end there, ``(N, ...)``."""
        pairs = zip(steps, [*steps[1:], steps[0][:0]])
        return torch.cat([now[len(then) :] for now, then in pairs][::-1])

    def totals(self, messages: list[Messages]) -> list[Tensor]:
        """Logarithms of the sums of the vectors of each step."""
        return [
            self.of_tokens(each, lambda part: logsumexp(part, -1), step)
            for each, step in zip(messages, self.steps)
        ]

    def log_evidence(self) -> Tensor:
        """Log evidence ``(N,)`` in the order of the plan."""
        messages, subtracted = self.forward()
        if self.has_gaps:
            value = self.ends(self.totals(messages))
        else:
            value = logsumexp(self.ends([each.within for each in messages]), -1)
        return (value.double() + self.ends(subtracted)).to(value.dtype)

    def final_state(self) -> Tensor:
        """Log p(z_T | x_{1:T}) in the last block, ``(N, w)``; -inf where that is impossible."""
        logs = self.ends([each.within for each in self.forward()[0]])
        total = logs.logsumexp(-1, keepdim=True)
        return torch.where(total.isneginf(), -torch.inf, logs - total)
