"""Posterior queries: each is held against the table of all paths, or a count by hand."""

import itertools
import math

import numpy as np
import oracle
import pyro.distributions as dist
import pytest
import torch
from oracle import assert_close
from scipy import stats

from pyrohmm import (
    HMM,
    HSMM,
    NeuralHMM,
    SecondOrderHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    queries,
)
from pyrohmm.distributions import AutoregressiveNormal, Streams, Truncated, ZeroInflated
from pyrohmm.ops.backends import TORCH, use

NEVER = -np.inf


def casino(lengths, observed=None):
    return HMM(
        torch.tensor([0.6, 0.4]).log(),
        torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log(),
        dist.Categorical(probs=torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])),
        torch.as_tensor(lengths),
        observed,
    )


# Missing observations ----------------------------------------------------------------------------


def test_imputations_are_sampled_jointly():
    """Counts of pairs of missing symbols against Bayes' rule over all their values."""
    seen = torch.tensor([True, False, False, True])
    values = torch.tensor([2, 0, 0, 0])
    drawn = queries.impute(casino(4, seen), values, [20000])
    counts = np.bincount(3 * drawn[:, 1] + drawn[:, 2], minlength=9)
    every = torch.tensor([[2, a, b, 0] for a, b in itertools.product(range(3), repeat=2)])
    probs = casino([4] * 9).log_prob(every).softmax(0)
    assert oracle.looks_drawn_from(counts, probs.numpy())


def at_each_step(hmm, batch, moment):
    """A moment of the emission in each state, as an array ``(*B, T, K, ...)``."""
    place = len(hmm.emission.batch_shape) - 1  # of the states
    if not hmm.emission_per_step:
        moment, place = moment.unsqueeze(place), place + 1
    return moment.expand(*batch, hmm.num_steps, *moment.shape[place:]).numpy()


# Dwelling ----------------------------------------------------------------------------------------


def test_dwelling_is_geometric():
    matrices = torch.tensor([[[0.9, 0.1], [1.0, 0.0]], [[0.25, 0.75], [0.0, 1.0]]])
    blank = dist.Categorical(probs=torch.ones(2, 1))
    hmm = HMM(torch.tensor([0.5, 0.5]).log(), matrices.log(), blank, torch.tensor([2, 2]))
    assert_close(queries.dwell_time_mean(hmm), [[10.0, 1.0], [4 / 3, np.inf]])
    found = queries.dwell_time_log_prob(hmm, 400)
    assert found.shape == (2, 2, 400)
    for index in np.ndindex(2, 2):
        stay = float(matrices[(*index, index[1])])
        expected = [stay**d * (1 - stay) for d in range(400)]
        assert_close(found[index].exp(), expected)
    days = torch.arange(1, 401.0)
    means = (found.exp() * days).sum(-1)
    assert_close(means, [[10.0, 1.0], [4 / 3, 0.0]])


def test_long_visits_keep_their_digits_in_single_precision():
    """One minus the probability of staying would be wrong by percents."""
    leave = 1e-6
    matrix = torch.tensor([[1 - leave, leave], [0.5, 0.5]], dtype=torch.float64).log().float()
    blank = dist.Categorical(probs=torch.ones(2, 1))
    hmm = HMM(torch.tensor([0.5, 0.5]).log().float(), matrix, blank, torch.tensor(2))
    assert_close(queries.dwell_time_mean(hmm), [1e6, 2.0], rtol=1e-5)


def test_dwelling_in_explicit_durations_is_theirs():
    probs = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]])
    swap = torch.tensor([[NEVER, 0.0], [0.0, NEVER]])
    emission = dist.Normal(torch.arange(2.0), 1.0)
    hsmm = HSMM(torch.full((2,), 0.5).log(), swap, probs.log(), emission, torch.tensor([5]))
    assert_close(queries.dwell_time_mean(hsmm), [2.3, 2.0])
    assert_close(queries.dwell_time_log_prob(hsmm, 2).exp(), probs[:, :2])
    longer = torch.nn.functional.pad(probs, (0, 1))
    assert_close(queries.dwell_time_log_prob(hsmm, 4).exp(), longer)
    wanted = [[1.0, 0.8, 0.5, 0.0], [1.0, 1.0, 0.0, 0.0]]
    assert_close(queries.dwell_time_log_survival(hsmm, 4).exp(), wanted, atol=1e-12)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("shape", [(1,), (7,), (4, 1), (3, 9), (2, 3, 6)])
def test_runs_are_those_of_groupby(shape, complete):
    states = torch.randint(3, shape)
    lengths = torch.randint(1, shape[-1] + 1, shape[:-1])
    expected = np.zeros((3, shape[-1]), int)
    for path, length in zip(states.reshape(-1, shape[-1]), lengths.flatten()):
        groups = [(k, len(list(g))) for k, g in itertools.groupby(path[:length].tolist())]
        for k, duration in groups[: len(groups) - complete]:
            expected[k, duration - 1] += 1
    found = queries.dwell_counts(states, lengths, 3, complete=complete)
    assert found.tolist() == expected.tolist()


class OfTwoDegrees(dist.StudentT):
    def cdf(self, value):
        apart = value - self.loc
        return 0.5 + apart / (2 * (2 + apart.square()).sqrt())


def few_counts(p, x):
    seen = stats.poisson.pmf(x, 4 * p) / stats.poisson.cdf(5, 4 * p)
    return (x == 0) * p / 2 + (1 - p / 2) * seen


# Emissions of two states by a parameter each: in torch, and cumulative and density by scipy
FAMILIES = {
    "symbols": (
        lambda p: dist.Categorical(probs=torch.stack([1 - p, p * 0.4, p * 0.6], -1)),
        lambda p, x: [0, 1 - p, 1 - p + p * 0.4, 1][int(x) + 1],
        lambda p, x: [1 - p, p * 0.4, p * 0.6][int(x)],
    ),
    "coins": (
        lambda p: dist.Bernoulli(p),
        lambda p, x: stats.bernoulli.cdf(x, p),
        lambda p, x: stats.bernoulli.pmf(x, p),
    ),
    "binomials": (
        lambda p: dist.Binomial(5, p),
        lambda p, x: stats.binom.cdf(x, 5, p),
        lambda p, x: stats.binom.pmf(x, 5, p),
    ),
    "counts": (
        lambda p: dist.Poisson(4 * p),
        lambda p, x: stats.poisson.cdf(x, 4 * p),
        lambda p, x: stats.poisson.pmf(x, 4 * p),
    ),
    "failures": (
        lambda p: dist.Geometric(p),
        lambda p, x: stats.geom.cdf(x + 1, p),
        lambda p, x: stats.geom.pmf(x + 1, p),
    ),
    "numbers": (
        lambda p: dist.Normal(3 * p, p),
        lambda p, x: stats.norm.cdf(x, 3 * p, p),
        lambda p, x: stats.norm.pdf(x, 3 * p, p),
    ),
    "a user's own": (
        lambda p: OfTwoDegrees(2.0, p, torch.ones(())),
        lambda p, x: stats.t.cdf(x - p, 2),
        lambda p, x: stats.t.pdf(x - p, 2),
    ),
    "waits": (
        lambda p: dist.Gamma(2 * torch.ones(()), p),
        lambda p, x: stats.gamma.cdf(x, 2.0, scale=1 / p),
        lambda p, x: stats.gamma.pdf(x, 2.0, scale=1 / p),
    ),
    "few counts with further zeros": (
        lambda p: ZeroInflated(Truncated(dist.Poisson(4 * p), upper=5.0), gate=p / 2),
        lambda p, x: sum(few_counts(p, each) for each in range(int(x) + 1)),
        lambda p, x: few_counts(p, x),
    ),
}
DISCRETE = ("symbols", "coins", "binomials", "counts", "failures", "few counts with further zeros")


@pytest.mark.parametrize("forecast", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_residuals_are_the_sum_over_paths(kind, forecast):
    """Weighted by the observations of other steps, or of those before."""
    make, cdf, pdf = FAMILIES[kind]
    for num_steps, outer, per_step in itertools.product((1, 3), ((), (2, 1)), (False, True)):
        parameter = torch.rand(*outer, *([num_steps] if per_step else []), 2) * 0.8 + 0.1
        hmm = HMM(
            torch.tensor([0.3, 0.7]).log(),
            torch.rand(*outer, 2, 2).log_softmax(-1),
            make(parameter),
            torch.tensor([num_steps, max(num_steps - 1, 1)]),
            torch.rand(2, num_steps) < 0.7,
            emission_per_step=per_step,
        )
        values, batch = hmm.sample(), hmm.batch_shape
        lower, upper = queries.pseudo_residuals(hmm, values, forecast=forecast)
        assert lower.shape == upper.shape == (*batch, num_steps)
        parameter = at_each_step(hmm, batch, parameter)
        matrices = hmm.log_transition.expand(*batch, 2, 2).unsqueeze(-3).numpy()
        for *index, t in np.ndindex(*batch, num_steps):
            index = tuple(index)
            own, x, length = parameter[index], values[index].numpy(), int(hmm.lengths[index[-1]])
            seen = (hmm.observed[index[-1]] & (torch.arange(num_steps) < length)).numpy()
            if not seen[t]:
                assert (lower[index][t], upper[index][t]) == (0, 1)
                continue
            emitted = np.zeros((num_steps, 2))
            for s in range(t if forecast else length):
                if s != t and seen[s]:
                    emitted[s] = [math.log(pdf(own[s, k], x[s])) for k in range(2)]
            paths = oracle.all_paths(2, length)
            weights = np.exp(oracle.joint(hmm.log_initial.numpy(), matrices[index], emitted, paths))
            probs = np.bincount(paths[:, t], weights, minlength=2) / weights.sum()
            below = x[t] - 1 if kind in DISCRETE else x[t]
            at_most = sum(probs[k] * cdf(own[t, k], x[t]) for k in range(2))
            less = sum(probs[k] * cdf(own[t, k], below) for k in range(2))
            assert_close(upper[index][t], at_most, kind)
            assert_close(lower[index][t], less, kind)


def vectors(kind):
    """An emission of vectors, and each component's cumulative probability, given those before."""
    rates, means = torch.tensor([0.2, 0.9]), torch.tensor([[0.0, 1.0], [3.0, 2.0]])
    plane = dist.MultivariateNormal(means, torch.eye(2) + 1.0)
    if kind == "autoregression":
        weights = torch.full((2, 2, 2, 2), 0.25, dtype=torch.float32)  # two lags
        emission = AutoregressiveNormal(plane, plane, weights)
        return emission, lambda d, k, x, past: stats.norm.cdf(x, means[k, d] + past / 4, 2**0.5)
    pairs = [FAMILIES["symbols"], FAMILIES["counts"]]

    def cumulative(d, k, x, past):
        return stats.norm.cdf(x, means[k, d - 2], 2**0.5) if d > 1 else pairs[d][1](rates[k], x)

    return Streams([*(make(rates) for make, _, _ in pairs), plane]), cumulative


@pytest.mark.parametrize("kind", ["streams", "autoregression"])
def test_residuals_of_vectors_are_those_of_each_component(kind):
    emission, cumulative = vectors(kind)
    transition, lengths = torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([6, 4])
    hmm = HMM(torch.tensor([0.6, 0.4]).log(), transition.log(), emission, lengths)
    values = hmm.sample()
    if kind == "streams":
        values[0, 2, 1] = torch.nan
    lower, upper = queries.pseudo_residuals(hmm, values, forecast=True)
    first, ahead = torch.tensor([0.6, 0.4]), hmm.filtered(values) @ transition
    probs = torch.cat([first.expand(2, 1, 2), ahead[:, :-1]], 1)
    for n, t, d in np.ndindex(*values.shape):
        past = values[n, t - 2 : t].sum() if t > 1 else 0.0
        counts = kind == "streams" and d < 2
        for found, x in ((upper, values[n, t, d]), (lower, values[n, t, d] - int(counts))):
            wanted = sum(probs[n, t, k] * cumulative(d, k, x, past) for k in range(2))
            assert_close(found[n, t, d], wanted if t < lengths[n] and x == x else found is upper)


def test_residuals_where_states_differ_in_support():
    """Below the support of a state the cumulative probability is 0, above it 1."""
    even = torch.full((2, 2), 0.5).log()
    levels = dist.Uniform(torch.tensor([0.0, 3.0]), torch.tensor([4.0, 5.0]))
    hmm = HMM(even[0], even, levels, torch.tensor([3]))
    residuals = queries.pseudo_residuals(hmm, torch.tensor([[1.0, 3.5, 4.5]]))
    expected = torch.tensor([[0.125, (0.875 + 0.25) / 2, (1.0 + 0.75) / 2]])
    torch.testing.assert_close(residuals.upper, expected, check_dtype=False)


def test_limits_become_normal_quantiles():
    limits = queries.PseudoResiduals(torch.tensor([0.0, 0.2, 0.5]), torch.tensor([1.0, 0.6, 0.5]))
    low, high = limits.normal()
    assert_close(low, [NEVER, stats.norm.ppf(0.2), 0.0])
    assert_close(high, [np.inf, stats.norm.ppf(0.6), 0.0])
    assert_close(limits.middle(), [0.0, stats.norm.ppf(0.4), 0.0])
    drawn = limits.sample()
    assert low[1] <= drawn[1] <= high[1]
    assert drawn.isfinite().all()


# Float32: answers that need more digits are computed in float64


def single_hmm(num_steps):
    return HMM(
        torch.tensor([0.6, 0.4]).log().float(),
        torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log().float(),
        dist.Normal(torch.tensor([-1.0, 1.0]).float(), torch.ones(2).float()),
        torch.tensor(num_steps),
    )


def test_scores_of_the_best_paths_of_a_long_float32_sequence_are_those_of_the_paths():
    hmm = single_hmm(4000)
    values = hmm.sample()
    paths, scores = queries.k_best(hmm, values, 3)
    initial, transition, likelihood = (part.double() for part in hmm.log_factors(values))
    for path, score in zip(paths, scores):
        transitions = transition[0, path[:-1], path[1:]].sum()
        seen = likelihood.gather(-1, path.unsqueeze(-1)).sum()
        torch.testing.assert_close(score, initial[path[0]] + transitions + seen, rtol=0, atol=1e-8)


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("lengths", [[1], [400], [1, 9, 30] * 7])
@pytest.mark.parametrize("num_states", [1, 2, 6])
def test_the_best_paths_by_deviations_are_those_of_the_list_viterbi_algorithm(
    num_states, lengths, per_step
):
    """The algorithms of the two engines; with hard zeros and missing steps, of 1 and of 21."""
    torch.manual_seed(num_states)
    steps, lengths = max(lengths), torch.tensor(lengths)
    shape = (steps - 1, num_states, num_states) if per_step else (num_states, num_states)
    scores = torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, NEVER)
    scores.diagonal(dim1=-2, dim2=-1).zero_()
    emission = dist.Normal(torch.arange(num_states).double(), 1.0)
    hmm = HMM(
        torch.zeros(num_states).log_softmax(-1), scores.log_softmax(-1), emission, lengths,
        torch.rand(len(lengths), steps) < 0.8, transition_per_step=per_step,
    )  # fmt: skip
    values = hmm.sample()
    for count in (1, 5):
        paths, found = queries.k_best(hmm, values, count)
        with use(TORCH):
            others, wanted = queries.k_best(hmm, values, count)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-9)
        assert torch.equal(paths[:, 0], others[:, 0])
        for rows, real in zip(paths, found.isfinite()):
            assert len(rows[real].unique(dim=0)) == int(real.sum())
            assert not rows[~real].any()


@pytest.mark.parametrize("second", [False, True])
def test_one_long_series_is_sampled_as_many_short_ones_are(second):
    """Pairs of states, and observations given them, in 20,000 steps of one path."""
    matrix = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.8, 0.0], [0.3, 0.3, 0.4]])
    first, emission = torch.tensor([1.0, 0.0, 0.0]).log(), dist.Normal(10 * torch.arange(3.0), 1.0)
    hmm = HMM(first, matrix.log(), emission, torch.tensor(20_000))
    if second:  # the state before last does not matter
        third = matrix.log().expand(3, 3, 3)
        hmm = SecondOrderHMM(first, matrix.log(), third, emission, torch.tensor(20_000))
    values, states = hmm.sample_with_states()
    assert states[0] == 0
    for before in range(3):
        after = states[1:][states[:-1] == before]
        assert oracle.looks_drawn_from(np.bincount(after, minlength=3), matrix[before].numpy())
    noise = (values - 10 * states).double()
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-6


@pytest.mark.parametrize("shared", [False, True])
def test_the_entropy_of_many_sequences_is_that_of_each(monkeypatch, shared):
    """Of matrices for each step, in parts of three sequences."""
    monkeypatch.setattr("pyrohmm.chains.markov.ON_DEVICE", 3 * 4 * 2 * 2)
    matrix = torch.randn(4, 2, 2) if shared else torch.randn(7, 4, 2, 2)
    emission = dist.Normal(torch.arange(2.0), 1.0)
    first, matrix, lengths = torch.zeros(2), matrix.log_softmax(-1), [5, 1, 3, 5, 2, 4, 5]

    def made(matrix, lengths):
        return HMM(first - math.log(2), matrix, emission, lengths, transition_per_step=True)

    hmm = made(matrix, torch.tensor(lengths))
    values = hmm.sample()
    found = queries.path_entropy(hmm, values)
    for n, length in enumerate(lengths):
        one = made(matrix if shared else matrix[n], torch.tensor(length))
        torch.testing.assert_close(found[n], queries.path_entropy(one, values[n]))


@pytest.mark.parametrize("far", [-6.0, -5.0, 5.0, 6.0])
def test_outliers_have_finite_residuals_in_float32(far):
    normal = HMM(
        torch.zeros(1), torch.zeros(1, 1), dist.Normal(torch.zeros(1), 1.0), torch.tensor(1)
    )
    single = HMM(
        torch.zeros(1).float(),
        torch.zeros(1, 1).float(),
        dist.Normal(torch.zeros(1).float(), torch.ones(1).float()),
        torch.tensor(1),
    )
    for hmm, value in ((normal, torch.tensor([far])), (single, torch.tensor([far]).float())):
        residual = queries.pseudo_residuals(hmm, value).normal().lower
        torch.testing.assert_close(residual, torch.tensor([far]), rtol=1e-6, atol=0.0)


def test_queries_take_sequences_as_well_as_their_values():
    data = Sequences.from_list([[0, 1, 2], [2, None]])
    module = NeuralHMM(4, 3, 4, blocks=blocks.from_clusters(torch.tensor([0, 1, 1]), 2)).eval()
    of_blocks = module(data.lengths, data.observed)
    asks = [
        lambda hmm, x: hmm.log_prob(x),
        lambda hmm, x: hmm.viterbi(x),
        lambda hmm, x: hmm.posterior(x).state_probs,
        queries.predictive_log_prob,
        queries.impute,
    ]
    for hmm in (TabularHMM(2, categorical(3))(data.lengths, data.observed), of_blocks):
        for ask in asks:
            torch.manual_seed(0)
            wanted = ask(hmm, data.values)
            torch.manual_seed(0)
            assert torch.equal(ask(hmm, data), wanted)


def test_probabilities_of_yes_by_step_are_averages_over_states():
    torch.manual_seed(0)
    even, yes = torch.full((2, 2), 0.5).log(), torch.rand(3, 5, 2)
    hmm = HMM(even[0], even, dist.Bernoulli(yes), torch.full((3,), 5), emission_per_step=True)
    values = hmm.sample()
    weights = yes * values.unsqueeze(-1) + (1 - yes) * (1 - values).unsqueeze(-1)  # even chain
    wanted = (weights * yes).sum(-1) / weights.sum(-1)
    torch.testing.assert_close(queries.observation_marginals(hmm, values).probs, wanted)
