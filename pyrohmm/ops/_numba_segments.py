"""Compiled recursions of chains with durations, in logarithms and float64.

Arrays are those of :class:`.segment_chain.SegmentChain`. The inner loops run along the states, so
that they are contiguous in every table. A sum over durations adds the log-likelihoods of a segment
one by one: no difference of cumulated sums loses digits or meets -inf minus -inf.
"""

from __future__ import annotations

import numpy as np

from ._numba_math import exp, kernel, logsumexp
from ._numba_math import run as run
from ._numba_math import share as share
from ._numba_math import threads_of as threads_of

LOW = -708.0  # the smallest logarithm whose exponential is a normal number


@kernel
def _scores_ending(t, arrive, seen, others, first, scores, within, peak):
    """Scores ``(D, K)`` of the segments that end at t, and their largest; how many durations.

    Their weights are ``first`` for the one that began the sequence, else ``others``.
    """
    num_durations, num_states = others.shape
    span = min(t + 1, num_durations)
    within[:] = 0.0
    peak[:] = -np.inf
    for d in range(span):
        table = first if d == t else others
        for k in range(num_states):
            within[k] += seen[t - d, k]
            score = arrive[t - d, k] + table[d, k] + within[k]
            scores[d, k] = score
            peak[k] = score if score > peak[k] else peak[k]
    return span


@kernel
def _sum_scores(span, scores, peak, out):
    """Log of the sums over durations; ``scores`` become their shares of ``exp(peak)``."""
    num_states = out.shape[0]
    out[:] = 0.0
    for k in range(num_states):
        peak[k] = peak[k] if peak[k] > -np.inf else 0.0
    for d in range(span):
        for k in range(num_states):
            low = scores[d, k] - peak[k]
            share = 0.0 if low < LOW else exp(low)
            scores[d, k] = share
            out[k] += share
    for k in range(num_states):
        out[k] = peak[k] + np.log(out[k])


@kernel
def forward(
    first, last, initial, transition, duration, final, opening, entire, likelihood, lengths,
    filtering, arrive, ends, evidence, filtered,
):  # fmt: skip
    """Forward messages: see :meth:`.operations.Backend.segment_forward`."""
    num_durations, num_states = duration.shape[1:]
    per = lengths.shape[0] // transition.shape[0]
    scores = np.empty((num_durations, num_states))
    within, peak, column = np.empty(num_states), np.empty(num_states), np.empty(num_states)
    for i in range(first, last):
        g = i // per
        end = lengths[i] - 1
        seen, starts = likelihood[i], arrive[i]
        starts[0] = initial[i]
        for t in range(end + 1):
            if filtering:
                span = _scores_ending(t, starts, seen, final[g], entire[g], scores, within, peak)
                _sum_scores(span, scores, peak, filtered[i, t])
            table, whole = (final[g], entire[g]) if t == end else (duration[g], opening[g])
            span = _scores_ending(t, starts, seen, table, whole, scores, within, peak)
            _sum_scores(span, scores, peak, ends[i, t])
            if t < end:
                for k in range(num_states):
                    for j in range(num_states):
                        column[j] = ends[i, t, j] + transition[g, j, k]
                    starts[t + 1, k] = logsumexp(column)
        evidence[i] = logsumexp(ends[i, end])


@kernel
def backward(
    first, last, transition, duration, final, opening, entire, likelihood, lengths, arrive, ends,
    evidence, weight, starts, gamma, transitions, durations, finals, openings, entires,
):  # fmt: skip
    """Posterior counts times ``weight``: see :meth:`.operations.Backend.segment_backward`."""
    num_durations, num_states = duration.shape[1:]
    per = lengths.shape[0] // transition.shape[0]
    scores = np.empty((num_durations, num_states))
    peak, within, inside = np.empty(num_states), np.empty(num_states), np.empty(num_states)
    row = np.empty(num_states)
    for i in range(first, last):
        whole = evidence[i]
        if whole == -np.inf:
            continue
        g = i // per
        end = lengths[i] - 1
        seen = likelihood[i]
        onward = np.zeros((end + 1, num_states))
        for t in range(end, -1, -1):
            span = min(end + 1 - t, num_durations)
            within[:] = 0.0
            peak[:] = -np.inf
            for d in range(span):
                if t > 0:
                    table = final[g] if t + d == end else duration[g]
                else:
                    table = entire[g] if t + d == end else opening[g]
                for k in range(num_states):
                    within[k] += seen[t + d, k]
                    score = table[d, k] + within[k] + onward[t + d, k]
                    scores[d, k] = score
                    peak[k] = score if score > peak[k] else peak[k]
            _sum_scores(span, scores, peak, inside)
            for k in range(num_states):
                flow = arrive[i, t, k] + peak[k] - whole
                dead = inside[k] == -np.inf or flow == -np.inf  # the peak is no bound of the first
                peak[k] = 0.0 if dead else weight[i] * np.exp(flow)
                within[k] = 0.0
            for d in range(span - 1, -1, -1):
                if t > 0:
                    counts = finals[g] if t + d == end else durations[g]
                else:
                    counts = entires[g] if t + d == end else openings[g]
                for k in range(num_states):
                    share = scores[d, k] * peak[k]
                    counts[d, k] += share
                    within[k] += share
                    gamma[i, t + d, k] += within[k]
            if t == 0:
                starts[i] = within
                continue
            for j in range(num_states):
                for k in range(num_states):
                    row[k] = transition[g, j, k] + inside[k]
                    flow = ends[i, t - 1, j] + row[k] - whole
                    if not flow < -745.0:
                        transitions[g, j, k] += weight[i] * np.exp(flow)
                onward[t - 1, j] = logsumexp(row)


@kernel
def viterbi(
    first, last, initial, transition, duration, final, opening, entire, likelihood, lengths, best
):  # fmt: skip
    """Most probable paths: see :meth:`.operations.Backend.segment_viterbi`."""
    num_durations, num_states = duration.shape[1:]
    per = lengths.shape[0] // transition.shape[0]
    scores = np.empty((num_durations, num_states))
    within, peak = np.empty(num_states), np.empty(num_states)
    steps = likelihood.shape[1]
    starts = np.empty((steps, num_states))
    origin = np.zeros((steps, num_states), np.int64)
    lasted = np.ones((steps, num_states), np.int64)
    for i in range(first, last):
        g = i // per
        end = lengths[i] - 1
        starts[0] = initial[i]
        for t in range(end + 1):
            table, whole = (final[g], entire[g]) if t == end else (duration[g], opening[g])
            seen = likelihood[i]
            span = _scores_ending(t, starts, seen, table, whole, scores, within, peak)
            for k in range(num_states):
                lasted[t, k] = 1
                for d in range(span):
                    if scores[d, k] == peak[k]:
                        lasted[t, k] = d + 1
                        break
            if t < end:
                for k in range(num_states):
                    top, choice = -np.inf, 0
                    for j in range(num_states):
                        score = peak[j] + transition[g, j, k]
                        if score > top:
                            top, choice = score, j
                    starts[t + 1, k], origin[t + 1, k] = top, choice
        state = 0
        for k in range(1, num_states):
            state = k if peak[k] > peak[state] else state
        t = end
        while t >= 0:
            begin = t + 1 - lasted[t, state]
            best[i, begin : t + 1] = state
            state = origin[begin, state]
            t = begin - 1


@kernel
def _choose(logs, count, uniform):
    """An index below ``count`` with probabilities in proportion to exp(``logs``)."""
    peak = -np.inf
    for i in range(count):
        peak = logs[i] if logs[i] > peak else peak
    if peak == -np.inf:  # an impossible sequence has no posterior: any path will do
        return 0
    total = 0.0
    for i in range(count):
        total += np.exp(logs[i] - peak)
    rest = uniform * total
    choice = 0
    for i in range(count):
        share = np.exp(logs[i] - peak)
        if share > 0.0:
            choice = i
            rest -= share
            if rest < 0.0:
                break
    return choice


@kernel
def sample_states(
    first, last, transition, duration, final, opening, entire, likelihood, lengths, arrive, ends,
    uniform, states,
):  # fmt: skip
    """Paths sampled backwards: see :meth:`.operations.Backend.segment_sample`."""
    num_durations, num_states = duration.shape[1:]
    per = lengths.shape[0] // transition.shape[0]
    logs, spans = np.empty(num_states), np.empty(num_durations)
    for i in range(first, last):
        g = i // per
        end = lengths[i] - 1
        for s in range(states.shape[0]):
            t, state = end, 0
            while t >= 0:
                for k in range(num_states):
                    logs[k] = ends[i, t, k]
                    if t < end:
                        logs[k] += transition[g, k, state]
                state = _choose(logs, num_states, uniform[s, i, t, 0])
                table, whole = (final[g], entire[g]) if t == end else (duration[g], opening[g])
                span = min(t + 1, num_durations)
                within = 0.0
                for d in range(span):
                    table = whole if d == t else table
                    within += likelihood[i, t - d, state]
                    spans[d] = arrive[i, t - d, state] + table[d, state] + within
                begin = t - _choose(spans, span, uniform[s, i, t, 1])
                states[s, i, begin : t + 1] = state
                t = begin - 1
