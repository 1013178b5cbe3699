r"""Posterior queries of chains in blocks of states with missing steps, whose state may be any.

A message is a vector of the w states of a block at an observed step, and of all K at a missing one.
From an observed step to the next there are the transitions of pairs of blocks; from, to and within
gaps the sums of :class:`.block_gaps.AllTransitions`, which make no K x K matrix. No gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import block_recursions
from .block_gaps import AllTransitions, segments_of
from .block_logs import BlockLogs, sample_places
from .block_plan import States
from .log_space import finite_or_zero, lazy_zeros, logsumexp
from .masks import exists


class Messages(NamedTuple):
    """Logarithms of vectors of states.

    Attributes:
        within: ``(M, w)`` of observed steps, in the states of their blocks.
        wide: ``(G, K)`` of missing steps.
    """

    within: Tensor
    wide: Tensor


class Arrivals(NamedTuple):
    """Which sequences arrive at a step from the one before, by whether these are observed."""

    known: Tensor
    out_of_gap: Tensor
    into_gap: Tensor
    in_gap: Tensor


class GappedLogs:
    """A chain in blocks of which some steps are missing, in logarithms.

    Args:
        observed: ``(N, T)`` booleans, which steps exist and are observed; on the CPU.
        lengths: ``(N,)``.
        path: ``(N, T)``, block of each step that is observed.
        states: Of each block.
        scores: ``leave``, ``enter`` and ``log_block_probs`` of :mod:`.block_recursions`.
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_seen: ``(N, T, w)``, log-likelihoods.
    """

    def __init__(
        self,
        observed: Tensor,
        lengths: Tensor,
        path: Tensor,
        states: States,
        scores: tuple[Tensor, Tensor | None, Tensor | None],
        log_initial: Tensor,
        log_seen: Tensor,
    ) -> None:
        self.observed, self.path, self.log_initial = observed, path, log_initial
        self.missing = exists(lengths, observed.size(1)) & ~observed
        self.transitions = AllTransitions(states, *scores)
        self.seen = log_seen.flatten(0, 1)[observed.flatten().to(log_seen.device)]
        numbers = (mask.flatten().cumsum(0).view_as(mask) - 1 for mask in (observed, self.missing))
        self.token, self.gap = numbers  # of each step among the observed, and the missing ones
        self.logs: BlockLogs | None = None
        segments = segments_of(observed)
        if len(segments.rank):
            seen = segments.cut(log_seen)
            chain: Any = segments.cut(path), segments.length, states, *scores, seen[:, 0], seen
            self.logs = BlockLogs(block_recursions.plan_chain(*chain))
            where = segments.cut(self.token).flatten()[self.logs.plan.where]
            self.place = where.argsort()  # of each token in the plan of the segments

    def arrivals(self, t: int) -> Arrivals:
        """Which sequences arrive at step ``t``, from 1 on."""
        was, now, none = self.observed[:, t - 1], self.observed[:, t], self.missing[:, t]
        parts = was & now, ~was & now, was & none, ~was & none
        return Arrivals(*(part.nonzero().squeeze(-1) for part in parts))

    def matrices(self, rows: Tensor, t: int | Tensor) -> Tensor:
        """Log transition probabilities ``(n, w, w)`` to observed steps from observed ones."""
        assert self.logs is not None
        return self.logs.matrices(self.place[self.token[rows, t]].to(self.seen.device))

    def forward(self) -> Messages:
        r"""Log :math:`p(z_t \mid x_{1:t})`; -inf from where it is impossible."""
        step, path, token, gap = self.transitions, self.path, self.token, self.gap
        within = self.seen.clone()
        wide = within.new_empty(int(self.missing.sum()), len(self.log_initial))
        for t in range(self.observed.size(1)):
            if t == 0:
                rows = self.observed[:, 0].nonzero().squeeze(-1)
                initial = self.log_initial.to(within).expand(len(rows), -1)
                within[token[rows, 0]] += step.narrowed(initial, path[rows, 0])
                wide[gap[self.missing[:, 0], 0]] = self.log_initial.to(within)
            else:
                known, out, into, inside = self.arrivals(t)
                if len(known):
                    before = within[token[known, t - 1]].unsqueeze(-1)
                    within[token[known, t]] += logsumexp(before + self.matrices(known, t), -2)
                if len(out):
                    arrived = step.gather(wide[gap[out, t - 1]], path[out, t])
                    within[token[out, t]] += arrived
                if len(into):
                    before = within[token[into, t - 1]]
                    wide[gap[into, t]] = step.spread(before, path[into, t - 1])
                if len(inside):
                    wide[gap[inside, t]] = step.onward(wide[gap[inside, t - 1]])
            self._normalise(within, token[self.observed[:, t], t])
            self._normalise(wide, gap[self.missing[:, t], t])
        return Messages(within, wide)

    def backward(self) -> Messages:
        r"""Log :math:`p(x_{t+1:T} \mid z_t)` plus a constant."""
        step, path, token, gap = self.transitions, self.path, self.token, self.gap
        within = torch.zeros_like(self.seen)
        wide = within.new_zeros(int(self.missing.sum()), len(self.log_initial))
        for t in range(self.observed.size(1) - 1, 0, -1):
            known, out, into, inside = self.arrivals(t)
            if len(known):
                now = token[known, t]
                after = (self.seen[now] + within[now]).unsqueeze(-2)
                within[token[known, t - 1]] = logsumexp(after + self.matrices(known, t), -1)
            if len(out):
                now = token[out, t]
                after = self.seen[now] + within[now]
                wide[gap[out, t - 1]] = step.before_block(after, path[out, t])
            if len(into):
                before = step.before_all(wide[gap[into, t]], path[into, t - 1])
                within[token[into, t - 1]] = before
            if len(inside):
                wide[gap[inside, t - 1]] = step.before_all(wide[gap[inside, t]])
            self._normalise(within, torch.cat([token[rows, t - 1] for rows in (known, into)]))
            self._normalise(wide, torch.cat([gap[rows, t - 1] for rows in (out, inside)]))
        return Messages(within, wide)

    def posterior(self) -> tuple[Messages, Messages]:
        r"""Smoothed posterior :math:`p(z_t \mid x_{1:T})`; and the logs of :meth:`forward`."""
        forward, backward = self.forward(), self.backward()
        logs = (one + other for one, other in zip(forward, backward))
        norms = ((part, finite_or_zero(part.logsumexp(-1, keepdim=True))) for part in logs)
        return Messages(*((part - norm).exp() for part, norm in norms)), forward

    def left_out(self, past_alone: bool) -> Tensor:
        r"""Log :math:`p(z_t \mid x_{1:t-1}, x_{t+1:T})` of observed steps, ``(M, K)``.

        Not normalised. With ``past_alone`` given :math:`x_{1:t-1}`.
        """
        step, path, token, gap = self.transitions, self.path, self.token, self.gap
        both = self.observed[:, :-1] & self.observed[:, 1:]
        leaves = self.missing[:, :-1] & self.observed[:, 1:]
        enters = self.observed[:, :-1] & self.missing[:, 1:]
        before, after = token[:, :-1][both], token[:, 1:][both]
        forward = self.forward()
        logs = self.log_initial.to(self.seen).repeat(len(self.seen), 1)
        if len(after):
            logs[after] = step.spread(forward.within[before], path[:, :-1][both])
        if bool(leaves.any()):
            logs[token[:, 1:][leaves]] = step.onward(forward.wide[gap[:, :-1][leaves]])
        if past_alone:
            return logs
        backward = self.backward()
        if len(before):
            values = self.seen[after] + backward.within[after]
            logs[before] += step.before_block(values, path[:, 1:][both])
        if bool(enters.any()):
            logs[token[:, :-1][enters]] += step.before_all(backward.wide[gap[:, 1:][enters]])
        return logs

    def all_states(self, probs: Messages) -> Tensor:
        """Probabilities of all states ``(N, T, K)``; 0 where padded."""
        size, shape = self.transitions.num_states, self.observed.shape
        out = lazy_zeros(shape.numel() * size, self.seen).view(-1, size)
        states = self.transitions.places(self.path[self.observed])
        rows = self.observed.flatten().nonzero().expand_as(states)
        real = states < size
        out[rows[real].to(out.device), states[real].to(out.device)] = probs.within[real]
        out[self.missing.flatten().to(out.device)] = probs.wide
        return out.view(*shape, size)

    def transition_counts(self, probs: Messages, forward: Messages) -> Tensor:
        r"""Expected counts of transitions ``(N, K, K)``, given the results of :meth:`posterior`."""
        step, path, device = self.transitions, self.path, self.seen.device
        size = step.num_states
        counts = lazy_zeros(len(path) * size * size, self.seen)
        sequence, time = (self.observed[:, 1:] & self.observed[:, :-1]).nonzero().unbind(-1)
        if len(sequence):
            before, after = self.token[sequence, time], self.token[sequence, time + 1]
            joint = forward.within[before].unsqueeze(-1) + self.matrices(sequence, time + 1)
            share = (joint - finite_or_zero(joint.logsumexp(-2, keepdim=True))).exp()
            source, target = (step.places(path[sequence, time + n]) for n in (0, 1))
            cells = (sequence.view(-1, 1, 1) * size + source.unsqueeze(-1)) * size
            cells = (cells + target.unsqueeze(-2)).to(device)
            real = ((source < size).unsqueeze(-1) & (target < size).unsqueeze(-2)).to(device)
            share = share * probs.within[after].unsqueeze(-2)
            counts.index_add_(0, cells[real], share[real])
        counts = counts.view(-1, size, size)
        self._count_gaps(counts, Messages(*(part.log() for part in probs)), forward)
        return counts

    def _count_gaps(self, counts: Tensor, log_probs: Messages, forward: Messages) -> None:
        """Add the transitions into, out of and within gaps to the counts ``(N, K, K)``."""
        step, token, gap, inner = self.transitions, self.token, self.gap, []
        for t in range(1, self.observed.size(1)):
            _, out, into, inside = (rows.tolist() for rows in self.arrivals(t))
            inner += [(n, gap[n, t - 1], gap[n, t]) for n in inside]
            for n in into:
                rows, logs = step.rows_of(int(self.path[n, t - 1]))
                left = forward.within[token[n, t - 1], : len(rows), None]
                entered = log_probs.wide[gap[n, t]] - finite_or_zero(forward.wide[gap[n, t]])
                counts[n, rows] += (logs + left + entered).exp()
            for n in out:
                columns, logs = step.columns_of(int(self.path[n, t]))
                joint = logs + forward.wide[gap[n, t - 1], :, None]
                share = joint - finite_or_zero(joint.logsumexp(0))
                entered = log_probs.within[token[n, t], : len(columns)]
                counts[n, :, columns] += (share + entered).exp()
        for part, logs in step.all_rows() if inner else ():
            for n, before, now in inner:
                entered = log_probs.wide[now] - finite_or_zero(forward.wide[now])
                counts[n, part] += (logs + forward.wide[before, part, None] + entered).exp()

    def sample(self, count: int) -> Tensor:
        r"""Sample paths from the posterior, states ``(count, N, T)``; 0 where padded."""
        forward, num_steps = self.forward(), self.observed.size(1)
        states = torch.zeros(count, *self.observed.shape, dtype=torch.long)
        for t in range(num_steps - 1, -1, -1):
            for known, mask in ((True, self.observed[:, t]), (False, self.missing[:, t])):
                rows = mask.nonzero().squeeze(-1)
                if not len(rows):
                    continue
                number = (self.token if known else self.gap)[rows, t]
                score = (forward.within if known else forward.wide)[number].expand(count, -1, -1)
                if t + 1 < num_steps:
                    score = score + self._onward(rows, t, known, states[:, rows, t + 1])
                places = sample_places(score).cpu()
                if known:
                    block = self.path[rows, t]
                    places = places.minimum(self.transitions.states.sizes[block] - 1)
                    start = self.transitions.places(block).expand(count, -1, -1)
                    places = start.gather(-1, places.unsqueeze(-1)).squeeze(-1)
                states[:, rows, t] = places.clamp(max=self.transitions.num_states - 1)
        return states

    def _onward(self, rows: Tensor, t: int, known: bool, after: Tensor) -> Tensor:
        """Log-probabilities ``(count, n, w or K)`` of the states ``after`` that follow step ``t``.

        From the states of ``rows``, observed ones or missing ones; 0 where the sequence has ended.
        """
        step, device = self.transitions, self.seen.device
        size = step.states.width if known else step.num_states
        out = self.seen.new_zeros(*after.shape, size)
        both = self.observed[rows, t] & self.observed[rows, t + 1]
        rest = (self.missing[rows, t + 1] | self.observed[rows, t + 1]) & ~both
        if bool(both.any()):
            block = self.path[rows[both], t + 1]
            place = (step.places(block) == after[:, both].unsqueeze(-1)).byte().argmax(-1)
            index = place.mT.unsqueeze(-2).expand(-1, size, -1).to(device)
            log_probs = self.matrices(rows[both], t + 1).gather(-1, index)
            out[:, both.to(device)] = log_probs.permute(2, 0, 1)
        if bool(rest.any()):
            log_probs = step.from_all(after[:, rest].flatten()).to(out.dtype)
            if known:
                log_probs = step.narrowed(log_probs, self.path[rows[rest], t].repeat(len(after)))
            out[:, rest.to(device)] = log_probs.view(len(after), -1, size)
        return out

    def _normalise(self, messages: Tensor, rows: Tensor) -> None:
        if len(rows):
            part = messages[rows]
            messages[rows] = part - finite_or_zero(part.logsumexp(-1, keepdim=True))
