"""Compiled recursions of chains with durations, in float64.

Arrays are those of :class:`.forward.Chain`; of a Markov chain, whose segments have one
step, there may be a matrix for each step. For each state, the segments that may
cover a step are kept as numbers relative to a logarithm of their own, its *frame*; a step adds its
log-likelihood to the frame, a new segment stands beside the others, and the sum over durations is a
product of two vectors. What falls out of the range of numbers is so small that such a sum does not
feel it, unless the sum itself is small: then the frame is set anew, and if that does not help, the
sum is made in logarithms. So each is exact, whatever vanishes. Comparisons let NaN through.

Backward in time it is the same, from the end: a segment is entered where it ends. A sum over
durations adds the log-likelihoods of a segment one by one, or passes them on in the frame: no
difference of cumulated sums meets -inf minus -inf.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ._numba_math import call, copy, exp, inner, kernel, logsumexp, run, share, threads_of
from .forward import Chain, Gradient

ABOVE = 40.0  # how far an entry may lie above its frame
FLOOR = 1e-150  # a smaller number is zero, so that products are normal numbers
LOG_FLOOR = math.log(FLOOR)
LEAST = 1e-110  # a sum below may have lost something, for it holds e^40 FLOOR times D
TINY = 1e-270  # the same of sums over states, of numbers to 1 and without a floor
LOW = -700.0  # the exponential of a smaller logarithm may not be a normal number


@kernel
def _matrix(logs):
    """Exponentiate log-probabilities; subnormal results become zero."""
    matrix = np.zeros(logs.shape)
    for j in range(logs.shape[0]):
        for k in range(logs.shape[1]):
            if not logs[j, k] <= LOW:
                matrix[j, k] = np.exp(logs[j, k])
    return matrix


@kernel
def _reframe(t, k, span, enter, seen, window):
    """Rescale the window of state k at step t by its largest entry; returns the log scale."""
    within, best, first = 0.0, -np.inf, t + 1 - span
    for s in range(t, t - span, -1):
        within += seen[s, k]
        if within == -np.inf:
            first = s + 1
            window[t + 1 - span : s + 1] = 0.0
            break
        window[s] = enter[s, k] + within
        best = window[s] if window[s] > best else best
    for s in range(first, t + 1):
        low = window[s] - best if best > -np.inf else -np.inf
        window[s] = 0.0 if low <= LOG_FLOOR else exp(low)
    return best


@kernel
def _advance(t, k, span, enter, seen, window, frame):
    """Add the segments that begin at step t to the window; returns the new log scale."""
    new = enter[t, k]
    window[t] = 0.0
    if new == -np.inf:
        pass
    elif new - frame > ABOVE:
        scale = np.exp(frame - new) if frame - new > LOW else 0.0
        for s in range(t + 1 - span, t):
            value = window[s] * scale
            window[s] = 0.0 if value <= FLOOR else value
        window[t], frame = 1.0, new
    elif not new - frame <= LOG_FLOOR:
        window[t] = np.exp(new - frame)
    if seen[t, k] == -np.inf:
        window[t + 1 - span : t + 1] = 0.0
        return -np.inf
    return frame + seen[t, k]


@kernel
def _dot(t, k, span, window, others, first):
    """Weighted sum of the window entries that cover step t; the weight of entry 0 is ``first``."""
    size = others.shape[1]
    begin = t + 1 - span
    total = 0.0
    if begin == 0:
        total = window[0] * first[k, size - span]
        begin = 1
    row = others[k, size - (t + 1 - begin) :]
    part = window[begin : t + 1]
    for i in range(part.shape[0]):
        total += part[i] * row[i]
    return total


@kernel
def _log_sum(t, k, span, enter, seen, others, first, scores):
    """Log-sum-exp over durations, with ``scores`` by duration; and the number of durations."""
    within, peak, count = 0.0, -np.inf, 0
    for d in range(span):
        within += seen[t - d, k]
        if within == -np.inf:
            break
        weight = first[d, k] if d == t else others[d, k]
        scores[d] = enter[t - d, k] + within + weight
        if scores[d] > peak or scores[d] != scores[d]:  # NaN stays
            peak = scores[d]
        count += 1
    total = 0.0
    if peak == -np.inf:
        return peak, 0
    for d in range(count):
        total += np.exp(scores[d] - peak)
    return peak + np.log(total), count


@kernel
def _sum(t, k, span, enter, seen, window, frame, others, first, logs, first_logs, scores):
    """Log of a sum over durations: by the scaled window, or by log-sum-exp if it underflows.

    Returned after the log scale; then the number of ``scores`` that log-sum-exp has used, or -1.
    """
    total = _dot(t, k, span, window, others, first)
    if not total > LEAST and frame > -np.inf:
        frame = _reframe(t, k, span, enter, seen, window)
        total = _dot(t, k, span, window, others, first)
    if total > LEAST:
        return frame, frame + np.log(total), -1
    value, count = _log_sum(t, k, span, enter, seen, logs, first_logs, scores)
    return frame, value, count


@kernel
def _shares(t, k, span, count, flow, frame, weight, window, others, first, scores, shares):
    """Posterior probability of each segment times ``weight``, longest to shortest.

    ``flow`` is the log of what the sum over them is to be multiplied by, and ``count`` that of
    :func:`_sum`.
    """
    begin, place = t + 1 - span, others.shape[1] - span
    if count < 0:
        flow += frame
        flow = 0.0 if flow <= LOW else weight * np.exp(flow)
        for s in range(span):
            shares[s] = flow * window[begin + s] * others[k, place + s]
        if begin == 0:
            shares[0] = flow * window[0] * first[k, place]
        return
    shares[:span] = 0.0
    for d in range(count):
        low = flow + scores[d]
        shares[span - 1 - d] = 0.0 if low <= LOW else weight * np.exp(low)


@kernel
def _products(vector, matrix, logs, logarithms, out):
    """Log of ``exp(vector) @ matrix``, given also ``logs`` of the matrix."""
    size = vector.shape[0]
    peak = -np.inf
    for j in range(size):
        if vector[j] > peak or vector[j] != vector[j]:  # NaN stays
            peak = vector[j]
    out[:] = 0.0
    if peak == -np.inf:
        out[:] = peak
        return
    for j in range(size):
        if not vector[j] - peak <= LOW:
            value = np.exp(vector[j] - peak)
            for k in range(size):
                out[k] += value * matrix[j, k]
    for k in range(size):
        if out[k] > TINY:
            out[k] = peak + np.log(out[k])
        else:
            for j in range(size):
                logarithms[j] = vector[j] + logs[j, k]
            out[k] = logsumexp(logarithms)


@inner
def _tables(weights, g):
    """Probabilities ``(2, 2, K, D)`` of weights ``(G, 2, 2, D, K)``, longest durations first."""
    num_durations, num_states = weights.shape[3:]
    tables = np.zeros((2, 2, num_states, num_durations))
    for is_first in range(2):
        for is_last in range(2):
            table, logs = tables[is_first, is_last], weights[g, is_first, is_last]
            for d in range(num_durations):
                for k in range(num_states):
                    if not logs[d, k] <= LOG_FLOOR:
                        table[k, num_durations - 1 - d] = np.exp(logs[d, k])
    return tables


@kernel
def _forward(
    first, last, initial, transition, weights, likelihood, lengths, owner, filtering, arrive, ends,
    evidence, filtered,
):  # fmt: skip
    """Semi-Markov forward pass: messages, log evidences, and filtered states if asked for.

    Of segments that begin at each step (``arrive``) and of those that end there (``ends``), both
    together with the observations before and in them, ``(N, T, K)``; the log evidence ``(N,)``; and
    if ``filtering``, log p(x_{1:t}, z_t) as if each step were the last. Padded steps hold anything.
    """
    num_durations, num_states = weights.shape[3:]
    scores, column = np.empty(num_durations), np.empty(num_states)
    window = np.empty((num_states, likelihood.shape[1]))
    frame = np.empty(num_states)
    group, several = -1, transition.shape[0] > 1
    for i in range(first, last):
        g = owner[i]
        if g != group:
            group, tables = g, _tables(weights, g)
        end = lengths[i] - 1
        seen, enter = likelihood[i], arrive[i]
        copy(enter[0], initial[i])
        frame[:] = -np.inf
        for t in range(end + 1):
            span, ending = min(t + 1, num_durations), int(t == end)
            for k in range(num_states):
                row = window[k]
                frame[k] = _advance(t, k, span, enter, seen, row, frame[k])
                for is_last in range(ending, 2 if filtering else ending + 1):
                    frame[k], value, _ = _sum(
                        t, k, span, enter, seen, row, frame[k], tables[0, is_last],
                        tables[1, is_last], weights[g, 0, is_last], weights[g, 1, is_last], scores,
                    )  # fmt: skip
                    if is_last == ending:
                        ends[i, t, k] = value
                    if is_last and filtering:
                        filtered[i, t, k] = value
            if t < end:
                logs = transition[t if several else 0, g]
                if several or t == 0:
                    matrix = _matrix(logs)
                _products(ends[i, t], matrix, logs, column, enter[t + 1])
        evidence[i] = logsumexp(ends[i, end])


@kernel
def _count_transitions(before, inside, logs, whole, weight, counts):
    """Add expected transitions times ``weight``."""
    for j in range(logs.shape[0]):
        flow = before[j] - whole
        for k in range(logs.shape[1]):
            low = flow + logs[j, k] + inside[k]
            counts[j, k] += 0.0 if low <= LOW else weight * exp(low)


@kernel
def _backward(
    first, last, transition, weights, likelihood, lengths, owner, arrive, ends, evidence, weight,
    starts, gamma, transitions, sums,
):  # fmt: skip
    """Posterior counts times ``weight``: the derivatives of the evidences."""
    num_durations, num_states = weights.shape[3:]
    steps = likelihood.shape[1]
    scores, inside = np.empty(num_durations), np.empty(num_states)
    frame, spare, shares = np.empty(num_states), np.empty(num_states), np.empty(steps)
    window, cover = np.empty((num_states, steps)), np.empty((num_states, steps))
    onward, seen = np.empty((steps, num_states)), np.empty((steps, num_states))
    counts = np.empty((num_states, num_durations))
    group, several = -1, transition.shape[0] > 1
    for i in range(first, last):
        whole = evidence[i]
        if whole == -np.inf:
            continue
        g = owner[i]
        if g != group:
            group, tables = g, _tables(weights, g)
        end = lengths[i] - 1
        for r in range(end + 1):  # steps, counted from the end
            copy(seen[r], likelihood[i, end - r])
        frame[:], onward[0], counts[:], cover[:] = -np.inf, 0.0, 0.0, 0.0
        for r in range(end + 1):
            t, span = end - r, min(r + 1, num_durations)
            is_first = int(t == 0)
            others, of_last = tables[is_first, 0], tables[is_first, 1]
            logs, last_logs = weights[g, is_first, 0], weights[g, is_first, 1]
            for k in range(num_states):
                row = window[k]
                frame[k] = _advance(r, k, span, onward, seen, row, frame[k])
                frame[k], inside[k], count = _sum(
                    r, k, span, onward, seen, row, frame[k], others, of_last, logs, last_logs,
                    scores,
                )  # fmt: skip
                flow, begin = arrive[i, t, k] - whole, r + 1 - span
                _shares(
                    r, k, span, count, flow, frame[k], weight[i], row, others, of_last, scores,
                    shares,
                )  # fmt: skip
                within = 0.0
                for s in range(span):
                    within += shares[s]
                    cover[k, begin + s] += within
                if t == 0:
                    starts[i, k] = within
                if begin == 0:
                    sums[g, is_first, 1, span - 1, k] += shares[0]
                    shares[0] = 0.0
                if t == 0:
                    for s in range(span):
                        sums[g, 1, 0, span - 1 - s, k] += shares[s]
                    continue
                for s in range(span):
                    counts[k, num_durations - span + s] += shares[s]
            if t > 0:
                here = t - 1 if several else 0
                if several or t == end:
                    matrix = _matrix(transition[here, g])
                _products(inside, matrix.T, transition[here, g].T, spare, onward[r + 1])
                _count_transitions(
                    ends[i, t - 1], inside, transition[here, g], whole, weight[i],
                    transitions[here, g],
                )  # fmt: skip
        for r in range(end + 1):
            for k in range(num_states):
                gamma[i, end - r, k] = cover[k, r]
        for d in range(num_durations):
            for k in range(num_states):
                sums[g, 0, 0, d, k] += counts[k, num_durations - 1 - d]


@kernel
def _largest(first, last, initial, transition, weights, likelihood, lengths, owner, arrive, ends):
    """Max-product forward messages, for Viterbi."""
    num_durations, num_states = weights.shape[3:]
    within, several = np.empty(num_states), transition.shape[0] > 1
    for i in range(first, last):
        g, end = owner[i], lengths[i] - 1
        seen, enter, peaks = likelihood[i], arrive[i], ends[i]
        copy(enter[0], initial[i])
        peaks[:] = -np.inf
        for t in range(end + 1):
            within[:] = 0.0
            for d in range(min(t + 1, num_durations)):
                table = weights[g, int(d == t), int(t == end)]
                for k in range(num_states):
                    within[k] += seen[t - d, k]
                    score = enter[t - d, k] + table[d, k] + within[k]
                    peaks[t, k] = score if score > peaks[t, k] else peaks[t, k]
            if t < end:
                place = t if several else 0
                for k in range(num_states):
                    enter[t + 1, k] = -np.inf
                for j in range(num_states):
                    for k in range(num_states):
                        score = peaks[t, j] + transition[place, g, j, k]
                        enter[t + 1, k] = score if score > enter[t + 1, k] else enter[t + 1, k]


@kernel
def _choose(logs, count, uniform):
    """Sample an index below ``count`` with probabilities proportional to exp(``logs``).

    That of the first largest, if ``uniform`` is negative.
    """
    peak, choice = -np.inf, 0  # an impossible sequence has no posterior: any path will do
    for i in range(count):
        if logs[i] > peak:
            peak, choice = logs[i], i
    if peak == -np.inf or uniform < 0.0:
        return choice
    total = 0.0
    for i in range(count):
        total += np.exp(logs[i] - peak)
    rest = uniform * total
    for i in range(count):
        share = np.exp(logs[i] - peak)
        if share > 0.0:
            choice = i
            rest -= share
            if rest < 0.0:
                break
    return choice


@kernel
def _walk_back(
    first, last, transition, weights, likelihood, lengths, owner, arrive, ends, uniform, states
):
    """Backtrack paths by sampling; the most probable where ``uniform`` is negative."""
    num_durations, num_states = weights.shape[3:]
    logs, spans = np.empty(num_states), np.empty(num_durations)
    several = transition.shape[0] > 1
    for i in range(first, last):
        g, end = owner[i], lengths[i] - 1
        for s in range(states.shape[0]):
            t, state = end, 0
            while t >= 0:
                for k in range(num_states):
                    logs[k] = ends[i, t, k]
                    if t < end:
                        logs[k] += transition[t if several else 0, g, k, state]
                state = _choose(logs, num_states, uniform[s, i, t, 0])
                span, within = min(t + 1, num_durations), 0.0
                for d in range(span):
                    within += likelihood[i, t - d, state]
                    weight = weights[g, int(d == t), int(t == end), d, state]
                    spans[d] = arrive[i, t - d, state] + weight + within
                begin = t - _choose(spans, span, uniform[s, i, t, 1])
                states[s, i, begin : t + 1] = state
                t = begin - 1


# Of tensors --------------------------------------------------------------------------------------


def _parts(chain: Chain) -> tuple[Tensor, ...]:
    """What the loops read, contiguous; segments of a Markov chain have one step."""
    initial, likelihood, logs, weights, owner, _, last, _ = chain
    assert last is not None
    weights = logs.new_zeros(logs.size(1), 2, 2, 1, logs.size(-1)) if weights is None else weights
    owner = last.new_zeros(len(last)) if owner is None else owner
    parts = initial[:, 0], logs.squeeze(2), weights, likelihood, 1 + last.squeeze(-1), owner
    return tuple(part.detach().contiguous() for part in parts)


def _work(chain: Chain) -> int:
    """Multiplications per sequence."""
    num_durations, num_states = chain.initial.shape[1:]
    return chain.likelihood.size(1) * num_states * (num_states + 10 * num_durations)


def _passed(chain: Chain, filtering: bool) -> tuple[Tensor, ...]:
    """Forward messages, log evidence and filtered states."""
    likelihood = chain.likelihood
    arrive, ends = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
    evidence = likelihood.new_zeros(len(likelihood))
    filtered = likelihood.new_zeros(likelihood.shape if filtering else (0, 0, 0))
    results = arrive, ends, evidence, filtered
    run(_forward, len(likelihood), _work(chain), *_parts(chain), filtering, *results)
    return results


def filtered(chain: Chain) -> Tensor:
    """Filtered states ``(N, T, K)``, not normalised; padded steps hold anything."""
    return _passed(chain, True)[3]


def solve(chain: Chain) -> tuple[Tensor, Gradient]:
    """Log evidence ``(N,)``, and the function from weights ``(N,)`` to its gradient."""
    arrive, ends, evidence, _ = _passed(chain, False)

    def gradient(weight: Tensor) -> tuple[Tensor, ...]:
        _, transition, weights, likelihood, *_ = parts = _parts(chain)
        count, work = len(evidence), _work(chain)
        threads = threads_of(count, count * work)
        gamma, starts = torch.zeros_like(likelihood), torch.zeros_like(parts[0])
        sums = [[torch.zeros_like(x) for x in (transition, weights)] for _ in range(threads)]
        messages = arrive, ends, evidence, weight.contiguous()
        constant = [part.numpy() for part in (*parts[1:], *messages)]

        def run_part(part: int) -> None:
            first, last = (count * end // threads for end in (part, part + 1))
            results = (table.numpy() for table in (starts, gamma, *sums[part]))
            call(_backward, first, last, *constant, *results)

        share(run_part, threads)
        tables = [torch.stack(part).sum(0) for part in zip(*sums)]
        tables[0] = tables[0].unsqueeze(2)
        starts = pad(starts.unsqueeze(1), (0, 0, 0, chain.initial.size(1) - 1))
        return starts, gamma, *tables[: len(chain.tensors) - 2]

    return evidence.clone(), gradient


def viterbi(chain: Chain) -> Tensor:
    """Most probable paths ``(N, T)``; zeros at padded steps."""
    arrive, ends = torch.zeros_like(chain.likelihood), torch.zeros_like(chain.likelihood)
    run(_largest, len(ends), _work(chain), *_parts(chain), arrive, ends)
    return _paths(chain, arrive, ends, ends.new_full((), -1.0).expand(1, *ends.shape[:2], 2))[0]


def sample_states(chain: Chain, num_samples: int) -> Tensor:
    """Paths ``(S, N, T)`` of the posterior, sampled backwards."""
    arrive, ends, *_ = _passed(chain, False)
    uniform = torch.rand(num_samples, *ends.shape[:2], 2, dtype=torch.float64)
    return _paths(chain, arrive, ends, uniform)


def _paths(chain: Chain, arrive: Tensor, ends: Tensor, uniform: Tensor) -> Tensor:
    states = torch.zeros(uniform.shape[:-1], dtype=torch.long)
    work = 10 * len(states) * chain.likelihood[0].numel()
    run(_walk_back, len(ends), work, *_parts(chain)[1:], arrive, ends, uniform, states)
    return states
