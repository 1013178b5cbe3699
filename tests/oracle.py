"""Slow and obvious answers that tests hold the package against; they share no code with it.

Everything is NumPy in float64, for one sequence of one chain. All are logarithms; -inf is legal.

``initial``     ``(K,)``            log p(z_1)
``transition``  ``(1|T-1, K, K)``   log p(z_{t+1} | z_t), one matrix for all steps or one for each
``likelihood``  ``(T, K)``          log p(x_t | z_t), a row of zeros where the step is missing
``length``      how many of the T steps exist
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats
from scipy.special import gammaln


class Answer(NamedTuple):
    """What an oracle says about one sequence, or about a batch of them."""

    evidence: np.ndarray  # (), log p(x)
    states: np.ndarray  # (T, K), p(z_t | x); zero at padded steps and if x is impossible
    transitions: np.ndarray  # (1|T-1, K, K), expected number of transitions under each matrix
    filtered: np.ndarray  # (T, K), p(z_t | x_1..t)
    best: np.ndarray  # (), the largest log p(x, z)


@functools.cache
def all_paths(num_states: int, length: int) -> np.ndarray:
    """Every path, ``(K^L, L)``."""
    return np.array(list(itertools.product(range(num_states), repeat=length)))


def joint(initial, transition, likelihood, paths) -> np.ndarray:
    """Score log p(x, z) of each of ``paths`` ``(P, L)``, term by term."""
    total = initial[paths[:, 0]] + likelihood[0, paths[:, 0]]
    for t in range(1, paths.shape[1]):
        matrix = transition[0] if len(transition) == 1 else transition[t - 1]
        total = total + matrix[paths[:, t - 1], paths[:, t]] + likelihood[t, paths[:, t]]
    return total


def by_paths(initial, transition, likelihood, length) -> Answer:
    """Sums and maxima over the table of all K^L paths."""
    num_states = len(initial)
    paths = all_paths(num_states, length)
    scores = joint(initial, transition, likelihood, paths)
    evidence = log_sum(scores)
    share = np.zeros(len(paths)) if np.isneginf(evidence) else np.exp(scores - evidence)
    states, transitions = np.zeros(likelihood.shape), np.zeros(transition.shape)
    filtered = np.zeros(likelihood.shape)
    for t in range(length):
        np.add.at(states[t], paths[:, t], share)
        prefixes = all_paths(num_states, t + 1)
        weights = joint(initial, transition, likelihood, prefixes)
        if weights.max() > -np.inf:
            np.add.at(filtered[t], prefixes[:, t], np.exp(weights - log_sum(weights)))
    for t in range(1, length):
        matrix = transitions[0] if len(transitions) == 1 else transitions[t - 1]
        np.add.at(matrix, (paths[:, t - 1], paths[:, t]), share)
    return Answer(evidence, states, transitions, filtered, scores.max())


def by_logs(initial, transition, likelihood, length) -> Answer:
    """The forward-backward and Viterbi algorithms with logarithms, for chains of any length."""
    num_states = len(initial)
    alpha, beta = np.zeros((length, num_states)), np.zeros((length, num_states))
    best = initial + likelihood[0]
    alpha[0] = initial + likelihood[0]
    for t in range(1, length):
        matrix = transition[0] if len(transition) == 1 else transition[t - 1]
        alpha[t] = np.logaddexp.reduce(alpha[t - 1][:, None] + matrix, 0) + likelihood[t]
        best = (best[:, None] + matrix).max(0) + likelihood[t]
    evidence = log_sum(alpha[-1])
    states, transitions = np.zeros(likelihood.shape), np.zeros(transition.shape)
    filtered = np.zeros(likelihood.shape)
    for t in range(length):
        if alpha[t].max() > -np.inf:
            filtered[t] = np.exp(alpha[t] - log_sum(alpha[t]))
    if not np.isneginf(evidence):
        states[length - 1] = filtered[length - 1]
        for t in range(length - 2, -1, -1):
            matrix = transition[0] if len(transition) == 1 else transition[t]
            onward = matrix + likelihood[t + 1] + beta[t + 1]
            beta[t] = np.logaddexp.reduce(onward, 1)
            pairs = np.exp(alpha[t][:, None] + onward - evidence)
            transitions[0 if len(transitions) == 1 else t] += pairs
            states[t] = pairs.sum(1)
    return Answer(evidence, states, transitions, filtered, best.max())


def log_sum(scores: np.ndarray) -> np.ndarray:
    """Logarithm of the sum of the exponentials."""
    peak = scores.max()
    return peak if np.isneginf(peak) else peak + np.log(np.exp(scores - peak).sum())


def for_each(solve: Callable[..., Answer], initial, transition, likelihood, lengths) -> Answer:
    """The answers for a batch: arguments are broadcast, then ``solve`` is asked one at a time."""
    batch, singles = one_by_one(initial, transition, likelihood, lengths)
    answers = [solve(*one) for one in singles]
    return Answer(*(np.reshape(part, batch + np.shape(part[0])) for part in zip(*answers)))


def assert_close(actual, expected, case=None, rtol=1e-9, atol=1e-9):
    """Equality of a tensor and an array; the message names the case."""
    torch.testing.assert_close(
        actual.detach(), torch.as_tensor(np.asarray(expected)).to(actual.dtype),
        rtol=rtol, atol=atol, msg=lambda text: f"{case}\n{text}",
    )  # fmt: skip


def looks_drawn_from(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Whether Pearson's statistic is what chance gives, but for one case in a million.

    Outcomes that are expected fewer than five times are taken together; impossible ones must not
    occur at all.
    """
    counts, probs = np.ravel(counts).astype(float), np.ravel(probs).astype(float)
    if counts[probs == 0].any():
        return False
    expected = probs * counts.sum()
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(statistic < stats.chi2.isf(1e-6, max(len(counts) - 1, 1)))


def one_by_one(initial, transition, likelihood, lengths):
    """The batch shape, and the four arguments of each of its sequences, in its order."""
    arrays = [np.asarray(a) for a in (initial, transition, likelihood, lengths)]
    leads = [a.ndim - dims for a, dims in zip(arrays, (1, 3, 2, 0))]
    batch = np.broadcast_shapes(*(a.shape[:lead] for a, lead in zip(arrays, leads)))
    full = [np.broadcast_to(a, batch + a.shape[lead:]) for a, lead in zip(arrays, leads)]
    return batch, [tuple(a[index] for a in full) for index in np.ndindex(batch)]


def scores_of_paths(initial, transition, likelihood, length) -> np.ndarray:
    """Score log p(x, z) of every path, ``(K^L,)``."""
    return joint(initial, transition, likelihood, all_paths(len(initial), length))


def evidence_so_far(initial, transition, likelihood, length) -> np.ndarray:
    """Score log p(x_1..t) for each t, ``(T,)``; that of the last step again where padded."""
    steps = [min(t + 1, length) for t in range(len(likelihood))]
    return np.array(
        [log_sum(scores_of_paths(initial, transition, likelihood, step)) for step in steps]
    )


def best_scores(initial, transition, likelihood, length, count) -> np.ndarray:
    """The ``count`` largest log p(x, z), best first; -inf where there are fewer paths."""
    scores = np.sort(scores_of_paths(initial, transition, likelihood, length))[::-1]
    return np.append(scores, np.full(count, -np.inf))[:count]


def entropy(initial, transition, likelihood, length) -> np.ndarray:
    """Entropy of the paths given x, in nats; zero if x is impossible."""
    scores = scores_of_paths(initial, transition, likelihood, length)
    scores = scores[scores > -np.inf]
    share = np.exp(scores - log_sum(scores)) if len(scores) else scores
    return stats.entropy(share) if len(share) else np.zeros(())


class SegmentAnswer(NamedTuple):
    """What an oracle says about one sequence of segments with durations."""

    evidence: np.ndarray  # (), log p(x)
    initial: np.ndarray  # (K,), p(z_1 | x)
    transitions: np.ndarray  # (K, K), expected number of transitions between segments
    durations: np.ndarray  # (K, D), expected number of segments by their whole durations
    states: np.ndarray  # (T, K), p(z_t | x); zero at padded steps
    best: np.ndarray  # (), the largest log p(x, z)
    paths: dict  # log p(x, z) of each path z of states, summed over its segmentations


def all_segmentations(num_states: int, longest: int, length: int):
    """Every list of segments (state, start, duration) that fills ``length`` steps."""
    if length == 0:
        yield []
        return
    for duration in range(1, min(longest, length) + 1):
        for rest in all_segmentations(num_states, longest, length - duration):
            for state in range(num_states):
                yield [*rest, (state, length - duration, duration)]


def by_segments(
    initial, transition, duration, likelihood, length, censored_end, censored_start=False
) -> SegmentAnswer:
    """Sums and maxima over all segmentations and, of segments that are cut, their whole lengths.

    ``duration`` is ``(K, D)``, log p(d | k); ``transition`` ``(K, K)``, between segments. A first
    segment that is cut has a whole length and an age, each of them with probability p(d) / mean.
    """
    num_states, longest = duration.shape
    log_mean = np.log(np.exp(duration) @ np.arange(1, longest + 1))
    scores, wholes, lists = [], [], []
    for segments in all_segmentations(num_states, longest, length):
        score = initial[segments[0][0]]
        for (state, start, size), after in zip(segments, [*segments[1:], None]):
            score = score + sum(likelihood[t, state] for t in range(start, start + size))
            if after is not None:
                score = score + transition[state, after[0]]
        score = score - (log_mean[segments[0][0]] if censored_start else 0.0)
        cut = [[censored_start and i == 0, censored_end and i == len(segments) - 1]
               for i in range(len(segments))]  # fmt: skip
        lasted = [size for *_, size in segments]
        ages = range(longest - lasted[0] + 1 if censored_start else 1)
        for age in ages:
            goes_on = range(longest - lasted[-1] - (age if len(segments) == 1 else 0) + 1)
            for more in goes_on if censored_end else [0]:
                whole = [size + start * age + end * more
                         for size, (start, end) in zip(lasted, cut)]  # fmt: skip
                of = [duration[state, size - 1] for (state, *_), size in zip(segments, whole)]
                scores.append(score + sum(of))
                wholes.append(whole)
                lists.append(segments)
    scores = np.array(scores) if scores else np.array([-np.inf])
    evidence = log_sum(scores)
    first, moves = np.zeros(num_states), np.zeros(transition.shape)
    lasted, states, paths = np.zeros(duration.shape), np.zeros(likelihood.shape), {}
    shares = np.zeros(len(scores)) if np.isneginf(evidence) else np.exp(scores - evidence)
    for score, share, whole, segments in zip(scores, shares, wholes, lists):
        first[segments[0][0]] += share
        for (state, start, size), after, of in zip(segments, [*segments[1:], None], whole):
            states[start : start + size, state] += share
            lasted[state, of - 1] += share
            if after is not None:
                moves[state, after[0]] += share
        path = tuple(state for state, _, size in segments for _ in range(size))
        paths[path] = np.logaddexp(paths.get(path, -np.inf), score)
    best = np.array(max(paths.values(), default=-np.inf))
    return SegmentAnswer(evidence, first, moves, lasted, states, best, paths)


def log_table(counts, strength):
    """Log marginal probability of counts of rows with Dirichlet priors, and the mean of each."""
    total = counts + strength
    norms = [(gammaln(part).sum(-1) - gammaln(part.sum(-1))).sum() for part in (total, strength)]
    return norms[0] - norms[1], total / total.sum(-1, keepdims=True)


def by_tables(data, priors):
    """Log marginal likelihood, and posterior means of the tables of a two-state HMM of symbols.

    By the sum over all paths of all sequences; ``priors`` are concentrations of the first state
    ``(1, 2)``, of transitions ``(2, 2)``, and of symbols ``(2, V)``.
    """
    options = []
    for i, length in enumerate(data.lengths.tolist()):
        paths = itertools.product(range(2), repeat=length)
        known = [-1] * length if data.labels is None else data.labels[i, :length].tolist()
        options.append([p for p in paths if all(k in (-1, s) for s, k in zip(p, known))])
    logs, means = [], []
    for paths in itertools.product(*options):
        first, pairs, symbols = (np.zeros(np.shape(part)) for part in priors)
        for i, path in enumerate(paths):
            first[0, path[0]] += 1
            for a, b in itertools.pairwise(path):
                pairs[a, b] += 1
            for t, state in enumerate(path):
                if data.observed[i, t]:
                    symbols[state, data.values[i, t]] += 1
        found = [log_table(c, p) for c, p in zip((first, pairs, symbols), priors)]
        logs.append(sum(log for log, _ in found))
        means.append([mean for _, mean in found])
    evidence = log_sum(np.array(logs))
    weights = np.exp(np.array(logs) - evidence)
    return evidence, [sum(w * m[i] for w, m in zip(weights, means)) for i in range(3)]


def cyclic(step: Callable[[], object]) -> int:
    """Number of tensors that a further ``step`` leaves to Python's collector of cycles."""
    step()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step()
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
