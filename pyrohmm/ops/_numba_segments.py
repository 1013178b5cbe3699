"""Compiled recursions of chains with durations, in float64 and in logarithms.

Arrays are those of :class:`.forward.Arranged`, but for weights ``(G, 2, 2, K, D)``, longest
durations first; of a Markov chain, whose segments have one step, there may be a matrix for each
step. For each state a window has the segments that may cover a step, each the logarithm of what
leads to its beginning and of its observations so far: a step adds its log-likelihood to all, and a
new segment stands beside the others. A sum over durations is relative to the largest of them, one
over states a product, made anew in logarithms where something may have been lost. So each is exact,
whatever vanishes, and no difference of cumulated sums meets -inf minus -inf.

Backward in time it is the same, from the end: a segment is entered where it ends.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ._numba_math import call, copy, exp, inner, kernel, logsumexp, run, share, threads_of
from .forward import Arranged, Gradient

TINY = 1e-270  # a sum of products below may have lost something, of numbers to 1
LOW = -700.0  # the exponential of a smaller logarithm may not be a normal number


@kernel
def _matrix(logs):
    """Exponentiate log-probabilities; subnormal results become zero."""
    return np.where(logs <= LOW, 0.0, np.exp(logs))


@inner
def _step(t, span, new, seen, window):
    """Put the segment that begins at step t into a window, and add the step to all segments."""
    window[t] = new
    covering = window[t + 1 - span : t + 1]
    for i in range(covering.shape[0]):
        covering[i] += seen


@inner
def _sum(t, span, window, others, first, shares):
    """Log of the sum over the segments that cover step t.

    Those of ``others`` are the weights, but that of entry 0 in ``first``. ``shares`` are set to
    the terms, relative to the largest; their sum is returned too.
    """
    begin, place, total = t + 1 - span, others.shape[0] - span, 0.0
    covering, weights, terms = window[begin : t + 1], others[place:], shares[:span]
    for i in range(terms.shape[0]):
        terms[i] = covering[i] + weights[i]
    if begin == 0:
        terms[0] = window[0] + first[place]
    a, b, c, d = terms[0], -np.inf, -np.inf, -np.inf  # side by side, as vectors
    for i in range(1, terms.shape[0] - 3, 4):
        w, x, y, z = terms[i], terms[i + 1], terms[i + 2], terms[i + 3]
        a, b, c, d = w if w > a else a, x if x > b else b, y if y > c else c, z if z > d else d
    for i in range(max(1, terms.shape[0] - 3), terms.shape[0]):
        a = terms[i] if terms[i] > a else a
    a, c = b if b > a else a, d if d > c else c
    peak = c if c > a else a
    base = peak if peak > -np.inf else 0.0
    for i in range(terms.shape[0]):
        low = terms[i] - base
        value = exp(LOW if low < LOW else low)
        terms[i] = 0.0 if low < LOW else value
        total += terms[i]
    return base + np.log(total), total


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
    num_states, num_durations = weights.shape[3:]
    shares, column = np.empty(num_durations), np.empty(num_states)
    window, several = np.empty((num_states, likelihood.shape[1])), transition.shape[0] > 1
    for i in range(first, last):
        end, tables = lengths[i] - 1, weights[owner[i]]
        copy(arrive[i, 0], initial[i])
        for t in range(end + 1):
            span, ending = min(t + 1, num_durations), int(t == end)
            for k in range(num_states):
                _step(t, span, arrive[i, t, k], likelihood[i, t, k], window[k])
                for is_last in range(ending, 2 if filtering else ending + 1):
                    others, own = tables[0, is_last, k], tables[1, is_last, k]
                    value, _ = _sum(t, span, window[k], others, own, shares)
                    if is_last == ending:
                        ends[i, t, k] = value
                    if is_last and filtering:
                        filtered[i, t, k] = value
            if t < end:
                logs = transition[t if several else 0, owner[i]]
                if several or t == 0:
                    matrix = _matrix(logs)
                _products(ends[i, t], matrix, logs, column, arrive[i, t + 1])
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
    num_states, num_durations = weights.shape[3:]
    steps, several = likelihood.shape[1], transition.shape[0] > 1
    shares, inside, spare = np.empty(num_durations), np.empty(num_states), np.empty(num_states)
    window, cover = np.empty((num_states, steps)), np.empty((num_states, steps))
    onward = np.empty((steps, num_states))
    for i in range(first, last):
        g, whole, end = owner[i], evidence[i], lengths[i] - 1
        if whole == -np.inf:
            continue
        onward[0], cover[:] = 0.0, 0.0
        for r in range(end + 1):  # steps, counted from the end
            t, span = end - r, min(r + 1, num_durations)
            is_first, begin, place = int(t == 0), r + 1 - span, num_durations - span
            for k in range(num_states):
                _step(r, span, onward[r, k], likelihood[i, t, k], window[k])
                others, of_last = weights[g, is_first, 0, k], weights[g, is_first, 1, k]
                inside[k], total = _sum(r, span, window[k], others, of_last, shares)
                flow = arrive[i, t, k] - whole + inside[k]
                if flow <= LOW:
                    continue
                flow = weight[i] * np.exp(flow) / total
                counts, within = sums[g, is_first, 0, k], 0.0
                for s in range(span):
                    shares[s] *= flow
                    within += shares[s]
                    cover[k, begin + s] += within
                if t == 0:
                    starts[i, k] = within
                if begin == 0:
                    sums[g, is_first, 1, k, place] += shares[0]
                    shares[0] = 0.0
                for s in range(span):
                    counts[place + s] += shares[s]
            if t > 0:
                here = t - 1 if several else 0
                logs = transition[here, g]
                if several or t == end:
                    matrix = _matrix(logs)
                _products(inside, matrix.T, logs.T, spare, onward[r + 1])
                _count_transitions(
                    ends[i, t - 1], inside, logs, whole, weight[i], transitions[here, g]
                )
        for r in range(end + 1):
            for k in range(num_states):
                gamma[i, end - r, k] = cover[k, r]


@kernel
def _largest(first, last, initial, transition, weights, likelihood, lengths, owner, arrive, ends):
    """Max-product forward messages, for Viterbi; ``weights`` are transposed."""
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
                lasted = weights[g, int(d == t), int(t == end), num_durations - 1 - d]
                for k in range(num_states):
                    within[k] += seen[t - d, k]
                    score = enter[t - d, k] + lasted[k] + within[k]
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
    num_states, num_durations = weights.shape[3:]
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
                    weight = weights[g, int(d == t), int(t == end), state, num_durations - 1 - d]
                    spans[d] = arrive[i, t - d, state] + weight + within
                begin = t - _choose(spans, span, uniform[s, i, t, 1])
                states[s, i, begin : t + 1] = state
                t = begin - 1


# Of tensors --------------------------------------------------------------------------------------


def _parts(chain: Arranged) -> tuple[Tensor, ...]:
    """Contiguous arguments of the loops; segments of a Markov chain have one step."""
    initial, likelihood, logs, weights, owner, last, *_ = chain
    weights = logs.new_zeros(logs.size(1), 2, 2, 1, logs.size(-1)) if weights is None else weights
    weights = weights.flip(-2).mT
    owner = last.new_zeros(len(last)) if owner is None else owner
    parts = initial[:, 0], logs.squeeze(2), weights, likelihood, 1 + last.squeeze(-1), owner
    return tuple(part.detach().contiguous() for part in parts)


def _work(parts: tuple[Tensor, ...]) -> int:
    """Multiplications per sequence."""
    num_states, num_durations = parts[2].shape[3:]
    return parts[3].size(1) * num_states * (num_states + 10 * num_durations)


def _passed(parts: tuple[Tensor, ...], filtering: bool = False) -> tuple[Tensor, ...]:
    """Forward messages, log evidence and filtered states."""
    likelihood = parts[3]
    arrive, ends = torch.zeros_like(likelihood), torch.zeros_like(likelihood)
    evidence = likelihood.new_zeros(len(likelihood))
    filtered = likelihood.new_zeros(likelihood.shape if filtering else (0, 0, 0))
    results = arrive, ends, evidence, filtered
    run(_forward, len(likelihood), _work(parts), *parts, filtering, *results)
    return results


def filtered(chain: Arranged) -> Tensor:
    """Filtered states ``(N, T, K)``, not normalised; padded steps hold anything."""
    return _passed(_parts(chain), filtering=True)[3]


def solve(chain: Arranged) -> tuple[Tensor, Gradient]:
    """Log evidence ``(N,)``, and the function from weights ``(N,)`` to its gradient."""
    parts = _parts(chain)
    arrive, ends, evidence, _ = _passed(parts)

    def gradient(weight: Tensor) -> tuple[Tensor, ...]:
        initial, transition, weights, likelihood, *_ = parts
        count, work = len(evidence), _work(parts)
        threads = threads_of(count, count * work)
        gamma, starts = torch.zeros_like(likelihood), torch.zeros_like(initial)
        sums = [[torch.zeros_like(x) for x in (transition, weights)] for _ in range(threads)]
        messages = arrive, ends, evidence, weight.contiguous()
        constant = [part.numpy() for part in (*parts[1:], *messages)]

        def run_part(part: int) -> None:
            first, last = (count * end // threads for end in (part, part + 1))
            results = (table.numpy() for table in (starts, gamma, *sums[part]))
            call(_backward, first, last, *constant, *results)

        share(run_part, threads)
        tables = [torch.stack(part).sum(0) for part in zip(*sums)]
        tables = [tables[0].unsqueeze(2), tables[1].mT.flip(-2)]
        starts = pad(starts.unsqueeze(1), (0, 0, 0, chain.initial.size(1) - 1))
        return starts, gamma, *tables[: len(chain.tensors) - 2]

    return evidence.clone(), gradient


def viterbi(chain: Arranged) -> Tensor:
    """Most probable paths ``(N, T)``; zeros at padded steps."""
    initial, transition, weights, *rest = parts = _parts(chain)
    arrive, ends = torch.zeros_like(chain.likelihood), torch.zeros_like(chain.likelihood)
    turned = initial, transition, weights.mT.contiguous(), *rest
    run(_largest, len(ends), _work(parts), *turned, arrive, ends)
    return _paths(parts, arrive, ends, ends.new_full((), -1.0).expand(1, *ends.shape[:2], 2))[0]


def sample_paths(chain: Arranged, num_samples: int) -> tuple[Tensor, Tensor]:
    """Paths ``(S, N, T)`` of the posterior, sampled backwards; and log evidence ``(N,)``."""
    parts = _parts(chain)
    arrive, ends, evidence, _ = _passed(parts)
    uniform = torch.rand(num_samples, *ends.shape[:2], 2, dtype=torch.float64)
    return _paths(parts, arrive, ends, uniform), evidence


def _paths(parts: tuple[Tensor, ...], arrive: Tensor, ends: Tensor, uniform: Tensor) -> Tensor:
    states = torch.zeros(uniform.shape[:-1], dtype=torch.long)
    work = 10 * len(states) * ends[0].numel()
    run(_walk_back, len(ends), work, *parts[1:], arrive, ends, uniform, states)
    return states
