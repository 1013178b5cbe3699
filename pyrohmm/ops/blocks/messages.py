r"""Messages of chains in blocks of states, in logarithms, by torch: any device, and always exact.

The state of a step is in the block of its symbol. A missing step says nothing: its state may be
any of all K, and its block is B, the number of blocks. The messages of a step are vectors of the w
states of blocks, ``(n, w)``; of a step at which something is missing, of all states,
``(n, K + 1)``, as :mod:`.transitions` reads them. From one observed step to the next there are the
transitions of pairs of blocks; from, to and between missing ones the sums of
:class:`.transitions.Transitions`. Row i of a step is the sequence i of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..log_space import finite_or_zero, log_softmax_of_parts, logsumexp, normalised
from ..tensor_cache import cached_on
from .plan import PlannedChain, sources
from .transitions import Transitions

KEPT = 1 << 22  # numbers of matrices that are made for all tokens at once, and kept
OFTEN = 64  # tokens of a pair of blocks, over which float32 may sum


class Joint(NamedTuple):
    """Transitions to some rows of a step.

    Attributes:
        rows: ``(r,)``, which rows.
        before: ``(r, f)``, places of the states before in the messages of the step before.
        after: ``(r, c)``, places of the states in the messages of the step.
        log_probs: ``(r, f, c)``, or ``(1, f, c)``, of the transitions.
    """

    rows: Tensor
    before: Tensor
    after: Tensor
    log_probs: Tensor


class LogChain:
    """A chain in blocks, of which some steps may be missing.

    Args:
        chain: The chain; its plan has block B where a step is missing.
        log_initial: ``(K,)``, or ``(N, K)`` of the sequences in the order of the plan:
            log-probabilities of the first state, if some first step is missing.
        leaving: ``(M, w)``, log-factor of each state in the transition to the next token; none by
            default, and none if some step is missing.
        missing: ``(K,)``, or ``(M, K)``, log-likelihoods of all states at missing steps; zeros by
            default.
    """

    def __init__(
        self,
        chain: PlannedChain,
        log_initial: Tensor | None = None,
        leaving: Tensor | None = None,
        missing: Tensor | None = None,
    ) -> None:
        self.plan, self.device = chain.plan, chain.log_seen.device
        self.seen, self.first, self.width = chain.log_seen, chain.log_first, chain.states.width
        self.initial, self.leaving, self._log_missing = log_initial, leaving, missing
        self.transitions = Transitions(chain.states, *chain[2:5])
        self.steps = [slice(*ends) for ends in pairwise([*self.plan.begins.tolist(), self.size])]
        self.counts = [step.stop - step.start for step in self.steps]
        self.missing = self.plan.block == self.transitions.all
        gaps = bool(self.missing.any())
        self.wide = [gaps and bool(part.any()) for part in self.missing.split(self.counts)]
        self._log_probs = self._log_probs_of_pairs(chain)

    @property
    def size(self) -> int:
        """M, the number of tokens."""
        return len(self.plan.where)

    # Transitions between observed steps

    def _log_probs_of_pairs(self, chain: PlannedChain) -> Tensor:
        """Log transition probabilities of all pairs.

        In float64 where one recurs often, so that its gradients are added up in that.
        """
        plan, states = self.plan, chain.states
        often = len(plan.source) and int(plan.tokens_of.diff().max()) > OFTEN
        dtype = torch.float64 if often else self.seen.dtype
        of_pairs = states.sizes[plan.source], states.sizes[plan.target]
        # (P, 4): from these few numbers a step computes its indices on the device
        layout = torch.stack([plan.base, plan.stride, *of_pairs], -1)
        self._layout, self._pair = (cached_on(self.device, x) for x in (layout, plan.pair))
        parts = [self.seen.new_zeros(0, dtype=dtype)]
        for rows, columns, targets, _ in sources(plan, states, self.device):
            if chain.enter is None or chain.log_block_probs is None:
                members = states.members[rows].unsqueeze(-1).to(self.device)
                parts.append(chain.leave[members, columns].flatten().to(dtype))
                continue
            logits = (chain.leave[rows] @ chain.enter.index_select(0, columns).mT).to(dtype)
            shares = chain.log_block_probs[rows][:, targets.to(self.device)]
            parts.append(log_softmax_of_parts(logits, states.sizes[targets], shares).flatten())
        return torch.cat(parts)

    def _matrices(self, tokens: slice | Tensor) -> Tensor:
        """Log transition probabilities to some tokens from those before, ``(n, w, w)``."""
        if self._all_matrices is not None:
            tokens = tokens if isinstance(tokens, slice) else tokens.to(self.device)
            return self._all_matrices[tokens]
        return self._matrices_of(tokens)

    @cached_property
    def _all_matrices(self) -> Tensor | None:
        """Transition matrices of all tokens, if they are few."""
        few = self.size * self.width**2 <= KEPT
        return self._matrices_of(slice(None)) if few and len(self._layout) else None

    def _matrices_of(self, tokens: slice | Tensor) -> Tensor:
        places = torch.arange(self.width, device=self.device)
        pair = self._pair[tokens if isinstance(tokens, slice) else tokens.to(self.device)]
        layout = self._layout.index_select(0, pair)
        base, stride, height, breadth = layout.unsqueeze(-1).unsqueeze(-1).unbind(1)
        rows = places.unsqueeze(-1)
        beyond = (rows >= height) | (places >= breadth)
        cells = (base + rows * stride + places).masked_fill(beyond, 0)
        log_probs = self._log_probs.index_select(0, cells.flatten()).view_as(cells)
        log_probs = log_probs.to(self.seen.dtype).masked_fill(beyond, -torch.inf)
        if self.leaving is None:
            return log_probs
        return log_probs + self.leaving[self.plan.before[tokens].to(self.device)].unsqueeze(-1)

    # Rows of a step

    def _kinds(self, t: int) -> list[tuple[Tensor, bool]]:
        """Rows of step t that are observed as those before, and the others; and which they are."""
        rows = torch.arange(self.counts[t])
        if not (self.wide[t] or self.wide[t - 1]):
            return [(rows, True)]
        missing = self.missing[self.steps[t]] | self.missing[self.steps[t - 1]][: len(rows)]
        kinds = (rows[~missing], True), (rows[missing], False)
        return [(part, known) for part, known in kinds if len(part)]

    def _blocks(self, t: int, rows: Tensor) -> Tensor:
        """Blocks of rows of step t, ``(r,)``."""
        return self.plan.block[self.steps[t].start + rows]

    def places(self, t: int, rows: Tensor) -> Tensor:
        """Indices ``(r, w)`` of the states of blocks in the messages of step t."""
        if self.wide[t]:
            return self.transitions.places(self._blocks(t, rows)).to(self.device)
        return torch.arange(self.width, device=self.device).expand(len(rows), -1)

    def _places_of(self, t: int, block: int) -> Tensor:
        """Indices ``(1, c)`` of the states of a block, or all, in the messages of step t."""
        states = self.transitions.states_of(block)
        states = states if self.wide[t] else torch.arange(len(states))
        return states.unsqueeze(0).to(self.device)

    def widened(self, t: int, logs: Tensor) -> Tensor:
        """Vectors of all states, of the messages of the first rows of step t."""
        if self.wide[t]:
            return logs
        return self.transitions.widened(logs, self._blocks(t, torch.arange(len(logs))))

    def joints(self, t: int) -> Iterator[Joint]:
        """The transitions to step t from the one before, in parts."""
        for rows, known in self._kinds(t):
            if known:
                tokens = self.steps[t].start + rows
                yield Joint(rows.to(self.device), self.places(t - 1, rows), self.places(t, rows),
                            self._matrices(tokens))  # fmt: skip
                continue
            pairs = torch.stack([self._blocks(t - 1, rows), self._blocks(t, rows)], -1)
            for pair in pairs.unique(dim=0):
                source, target = pair.tolist()
                ends = self._places_of(t - 1, source), self._places_of(t, target)
                log_probs = self.transitions.log_probs(source, target).unsqueeze(0)
                for row in rows[(pairs == pair).all(-1)].split(1):
                    yield Joint(row.to(self.device), ends[0], ends[1], log_probs)

    # Passes

    def _sums(self, t: int, logs: Tensor, back: bool = False) -> Tensor:
        """Sums over the states before those of step t; ``back``, after those of ``t - 1``."""
        here, there = (t, t - 1) if back else (t - 1, t)
        logs, found, order = logs[: self.counts[t]], [], []
        for rows, known in self._kinds(t):
            own = rows.to(self.device)
            if known:
                values = logs if len(rows) == len(logs) else logs.index_select(0, own)
                if self.wide[here]:
                    values = values.gather(1, self.places(here, rows))
                tokens = slice(self.steps[t].start, self.steps[t].stop)
                matrices = self._matrices(tokens if len(rows) == len(logs) else tokens.start + rows)
                joint = values.unsqueeze(-2 if back else -1) + matrices
                part = logsumexp(joint, -1 if back else -2)
                if self.wide[there]:
                    part = self.transitions.widened(part, self._blocks(there, rows))
            else:
                wide = self.widened(here, logs).index_select(0, own)
                blocks = self._blocks(t - 1, rows), self._blocks(t, rows)
                part = self.transitions.sums(wide, *blocks, back).to(logs.dtype)
                if not self.wide[there]:
                    places = self.transitions.places(self._blocks(there, rows))
                    part = part.gather(1, places.to(self.device))
            found.append(part)
            order.append(rows)
        sums = found[0]
        if len(found) > 1:
            sums = torch.cat(found)[torch.cat(order).argsort().to(self.device)]
        return pad(sums, (0, 0, 0, self.counts[t - 1] - len(sums))) if back else sums

    def seen_at(self, t: int) -> Tensor:
        """Log-likelihoods of the states of step t."""
        within = self.seen[self.steps[t]]
        if not self.wide[t]:
            return within
        missing = self.missing[self.steps[t]].to(self.device).unsqueeze(-1)
        logs = within.new_zeros(1, self.transitions.num_states)
        if self._log_missing is not None:
            logs = self._log_missing.to(within)
            logs = logs[self.steps[t]] if logs.dim() > 1 else logs.unsqueeze(0)
        return torch.where(missing, pad(logs, (0, 1), value=-torch.inf), self.widened_seen(t))

    def widened_seen(self, t: int) -> Tensor:
        """Log-likelihoods of all states at step t, of the block of each symbol."""
        return self.transitions.widened(self.seen[self.steps[t]], self.plan.block[self.steps[t]])

    def at_first_step(self) -> Tensor:
        """Log p(z_1)."""
        if not self.wide[0]:
            return self.first
        assert self.initial is not None
        missing = self.missing[self.steps[0]]
        wide = self.transitions.widened(self.first, self.plan.block[self.steps[0]])
        initial = pad(self.initial.to(self.first), (0, 1), value=-torch.inf)
        return torch.where(missing.to(self.device).unsqueeze(-1), initial, wide)

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Log p(x_{1:t}, z_t) less the largest, of the rows of each step.

        And what was subtracted, ``(n_t,)`` float64: logarithms of thousands of steps have no digits
        left for the probability of a state.
        """
        messages: list[Tensor] = []
        subtracted: list[Tensor] = []
        for t, count in enumerate(self.counts):
            joint = self._sums(t, messages[-1]) if t else self.at_first_step()
            joint = joint + self.seen_at(t)
            peak = finite_or_zero(joint.detach().amax(-1))
            messages.append(joint - peak.unsqueeze(-1))
            before = subtracted[-1][:count] if t else 0.0
            subtracted.append(before + peak.double())
        return messages, subtracted

    def filtered(self) -> list[Tensor]:
        r"""Log :math:`p(z_t \mid x_{1:t})` of each step; -inf from where it is impossible."""
        return [normalised(logs) for logs in self.forward()[0]]

    def backward(self) -> list[Tensor]:
        r"""Log :math:`p(x_{t+1:T} \mid z_t)` plus a constant, of each step."""
        last = len(self.steps) - 1
        messages = [torch.zeros_like(self.seen_at(last))]
        for t in range(last, 0, -1):
            found = self._sums(t, messages[-1] + self.seen_at(t), back=True)
            messages.append(found - finite_or_zero(found.amax(-1, keepdim=True)))
        return messages[::-1]

    def smoothed(self, filtered: list[Tensor]) -> list[Tensor]:
        r"""Log :math:`p(z_t \mid x_{1:T})` of each step, given :meth:`filtered`."""
        return [normalised(one + other) for one, other in zip(filtered, self.backward())]

    # Evidence, differentiable

    def ends(self, steps: list[Tensor]) -> Tensor:
        """Of the results of each step, those of the sequences that end there, ``(N, ...)``."""
        pairs = zip(steps, [*steps[1:], steps[0][:0]])
        return torch.cat([now[len(then) :] for now, then in pairs][::-1])

    def log_evidence(self) -> Tensor:
        """Log evidence ``(N,)`` in the order of the plan."""
        messages, subtracted = self.forward()
        if any(self.wide):
            value = self.ends([logsumexp(logs, -1) for logs in messages])
        else:
            value = logsumexp(self.ends(messages), -1)
        return (value.double() + self.ends(subtracted)).to(value.dtype)

    def final_state(self) -> Tensor:
        """Log p(z_T | x_{1:T}) in the last block, ``(N, w)``; -inf where that is impossible."""
        return normalised(self.ends(self.forward()[0]))
