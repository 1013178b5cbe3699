r"""Messages of chains in blocks of states, in logarithms, by torch: any device, and always exact.

The state of a step is in the block of its symbol. A missing step says nothing: its state may be
any of all K, its block is B, the number of blocks, and its log-likelihood is zero. A message is a
vector of the w states of a block, or of all K. From one observed step to the next there are the
transitions of pairs of blocks; from, to and between missing ones the sums of
:class:`.transitions.Transitions`. Queries are written once over these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..kept import kept_on
from ..log_space import finite_or_zero, lazy_zeros, log_softmax_of_parts, logsumexp
from .plan import BlockChain, Scores, bounds
from .transitions import CHUNK, Transitions

KEPT = 1 << 22  # numbers of matrices that are made for all tokens at once, and kept
OFTEN = 64  # tokens for each pair of blocks
SMALL = -1000.0  # a logarithm whose exponential is zero


class Messages(NamedTuple):
    """Vectors of states of the tokens of a step, or of all steps.

    Attributes:
        within: ``(n, w)``, of the states of their blocks; those of missing tokens mean nothing.
        wide: ``(g, K)``, of all states, of the missing tokens among them.
    """

    within: Tensor
    wide: Tensor


class Pairs(NamedTuple):
    r"""Some tokens, and the states before and at them.

    Attributes:
        tokens: ``(n,)``, not of the first step.
        before, after: ``(n, f)`` and ``(n, c)`` states; K beyond a block.
        log_share: ``(n, f, c)``, :math:`\log p(z_{t-1} \mid z_t, x_{1:t-1})`.
    """

    tokens: Tensor
    before: Tensor
    after: Tensor
    log_share: Tensor


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
        self.layout = kept_on(self.device, layout)
        self.pair = kept_on(self.device, plan.pair)
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
        """Those of all tokens, if they are few."""
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
        """Where the vectors of tokens are in the messages of a step, or of all."""
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

    def begun(self) -> Messages:
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
            arrived = self._sums(t, messages[-1]) if t else self.begun()
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

    def _totals(self, messages: list[Messages]) -> list[Tensor]:
        """Logarithms of the sums of the vectors of each step."""
        return [
            self.of_tokens(each, lambda part: logsumexp(part, -1), step)
            for each, step in zip(messages, self.steps)
        ]

    def log_evidence(self) -> Tensor:
        """Log evidence ``(N,)`` in the order of the plan."""
        messages, subtracted = self.forward()
        if self.has_gaps:
            value = self.ends(self._totals(messages))
        else:
            value = logsumexp(self.ends([each.within for each in messages]), -1)
        return (value.double() + self.ends(subtracted)).to(value.dtype)

    # Queries, without gradients

    def final_state(self) -> Tensor:
        """Log p(z_T | x_{1:T}) in the last block, ``(N, w)``; -inf where that is impossible."""
        logs = self.ends([each.within for each in self.forward()[0]])
        total = logs.logsumexp(-1, keepdim=True)
        return torch.where(total.isneginf(), -torch.inf, logs - total)

    def predictive(self) -> Tensor:
        """Log p(x_t | x_{1:t-1}) of each token, ``(M,)``; -inf from where it is impossible."""
        messages, subtracted = self.forward()
        total = torch.cat(self._totals(messages)).double() + torch.cat(subtracted)
        before = total[self.plan.before.to(total.device)]
        before[: len(self.plan.lengths)] = 0.0
        found = torch.where(total.isneginf(), -torch.inf, total - finite_or_zero(before))
        return found.masked_fill(self.missing.to(found.device), 0.0)

    def pairs(self, filtered: Messages) -> Iterator[Pairs]:
        """The states before and at all later tokens, in parts, given :meth:`filtered`."""
        step, plan = self.transitions, self.plan
        for tokens in self.kinds(self.later):
            if self.are_known(tokens):
                for some in tokens.split(max(1, CHUNK // self.seen.size(-1) ** 2)):
                    before = plan.before[some]
                    joint = self.at(filtered, before).unsqueeze(-1) + self.matrices(some)
                    share = joint - finite_or_zero(joint.logsumexp(-2, keepdim=True))
                    states, after = (step.places(plan.block[each]) for each in (before, some))
                    yield Pairs(some, states, after, share)
                continue
            logs = self.at(filtered, plan.before[tokens])
            blocks = plan.block[plan.before[tokens]], plan.block[tokens]
            arrived = finite_or_zero(step.sums(logs, *blocks)).unsqueeze(-2)
            for group, source, target in step.groups(*blocks):
                after = step.states_of(target).unsqueeze(0)
                for rows, log_probs in step.parts(source, target):
                    before = step.states_of(source)[rows].unsqueeze(0)
                    for row in group.split(1):
                        joint = logs[row][:, rows].unsqueeze(-1) + log_probs
                        share = joint - arrived[row][..., : len(after[0])]
                        yield Pairs(tokens[row], before, after, share)

    def entropy(self) -> Tensor:
        """Entropy of the posterior over paths in nats, ``(N,)``; 0 where none is possible."""
        filtered, rank = self.filtered(), self.plan.rank.to(self.device)
        smoothed = self.smoothed(filtered)
        found = self.of_tokens(smoothed, lambda logs: torch.special.entr(logs.exp()).sum(-1))
        found = found[self.last.to(self.device)]
        for tokens, _, after, share in self.pairs(filtered):
            probs = share + self.at(smoothed, tokens)[:, None, : after.size(1)]
            surprise = -(probs.exp() * share.clamp(min=SMALL)).sum((-1, -2))
            found.index_add_(0, rank[tokens.to(self.device)], surprise)
        return found[self.plan.order.argsort().to(self.device)].clamp(min=0.0)

    def transition_counts(self, filtered: Messages, smoothed: Messages) -> Tensor:
        """Expected counts of transitions ``(N, K, K)``."""
        plan, size = self.plan, self.transitions.num_states
        sequence, counts = plan.order[plan.rank], lazy_zeros(len(plan.order) * size**2, self.seen)
        for tokens, before, after, share in self.pairs(filtered):
            probs = (share + self.at(smoothed, tokens)[:, None, : after.size(1)]).exp()
            if len(tokens) > 1:  # each pair of blocks once for a sequence, added up in float64
                keys = sequence[tokens] * len(plan.source) + plan.pair[tokens]
                _, kind = keys.unique(return_inverse=True)
                first = kind.argsort(stable=True)[bounds(kind.bincount())[:-1]]
                sums = probs.new_zeros(len(first), *probs.shape[1:], dtype=torch.float64)
                probs = sums.index_add_(0, kind.to(self.device), probs.double()).to(probs.dtype)
                tokens, before, after = tokens[first], before[first], after[first]
            cells = (sequence[tokens].view(-1, 1, 1) * size + before.unsqueeze(-1)) * size
            cells = (cells + after.unsqueeze(-2)).to(self.device)
            real = ((before < size).unsqueeze(-1) & (after < size).unsqueeze(-2)).to(self.device)
            counts.index_add_(0, cells[real], probs[real])
        return counts.view(-1, size, size)

    def left_out(self, past_alone: bool) -> Tensor:
        r"""Log :math:`p(z_t \mid x_{1:t-1}, x_{t+1:T})` of observed tokens, ``(M - G, K)``.

        Not normalised. With ``past_alone`` given :math:`x_{1:t-1}`.
        """
        assert self.initial is not None
        step, plan, filtered = self.transitions, self.plan, self.filtered()
        number = ((~self.missing).cumsum(0) - 1).to(self.device)
        logs = self.initial.to(self.seen).repeat(int((~self.missing).sum()), 1)
        after = self.kinds(self.later)
        anything = torch.full_like(plan.block, step.all)
        for tokens in after:
            if not self.kind(tokens):
                before = plan.before[tokens]
                found = step.sums(self.at(filtered, before), plan.block[before], anything[before])
                logs[number[tokens.to(self.device)]] = found.to(logs.dtype)
        if past_alone:
            return logs
        values = self.backward()
        values = values._replace(within=values.within + self.seen)
        for tokens in after:
            before = plan.before[tokens]
            if not self.kind(before):
                here = self.at(values, tokens)
                found = step.sums(here, anything[before], plan.block[tokens], back=True)
                logs[number[before.to(self.device)]] += found
        return logs

    def all_states(self, logs: Messages, count: int) -> Tensor:
        """Probabilities of all states at ``count`` steps, ``(count, K)``; 0 where padded."""
        size = self.transitions.num_states
        out = lazy_zeros(count * size, self.seen).view(-1, size)
        known = (~self.missing).nonzero().squeeze(-1)
        states = self.transitions.places(self.plan.block[known])
        rows, real = self.plan.where[known].unsqueeze(-1).expand_as(states), states < size
        probs = logs.within[known.to(self.device)].exp()[real.to(self.device)]
        out[rows[real].to(self.device), states[real].to(self.device)] = probs
        out[self.plan.where[self.missing].to(self.device)] = logs.wide.exp()
        return out
