"""Emissions that depend on earlier observations, against loops over steps and sums over paths."""

import itertools

import numpy as np
import oracle
import pytest
import torch
from pyro.distributions import Categorical, MultivariateNormal, Poisson
from scipy import stats

from pyrohmm import HMM, Filter
from pyrohmm.analysis.queries import (
    continuation,
    impute,
    predictive_log_prob,
)
from pyrohmm.distributions import (
    Autoregressive,
    AutoregressiveCategorical,
    AutoregressiveNormal,
)

STATES, SYMBOLS = 3, 3


def log_rows(*shape):
    return torch.randn(shape).log_softmax(-1)


def covariances(*shape):
    root = torch.randn(*shape, shape[-1])
    return root @ root.mT + torch.eye(shape[-1]) / 2


def vectors(dim, lags, *batch):
    """A random :class:`AutoregressiveNormal` of three states, not at all stationary."""
    shape = (*batch, STATES, dim)
    return AutoregressiveNormal(
        MultivariateNormal(torch.randn(shape), covariances(*shape)),
        MultivariateNormal(torch.randn(shape), covariances(*shape)),
        0.7 * torch.randn(*batch, STATES, lags, dim, dim),
        torch.randn(dim),
    )


def symbols(lags, *batch):
    return AutoregressiveCategorical(
        Categorical(logits=log_rows(*batch, STATES, SYMBOLS)),
        Categorical(logits=log_rows(*batch, STATES, SYMBOLS**lags, SYMBOLS)),
    )


class Counts(Autoregressive):
    """Counts whose rate is a share of the sum of the last two, and something more."""

    def __init__(self, base, share):
        super().__init__(Poisson(base), 2, base.shape)
        self.rate, self.share = base, share

    def given(self, context):
        return Poisson(self.rate + self.share * context.sum(-1, keepdim=True))


def counts(*batch):
    return Counts(1 + torch.rand(*batch, STATES), torch.rand(*batch, STATES))


def slowly(emission, values):
    """Log-densities ``(T, K)`` of one sequence, one number at a time, in scipy's words."""
    x, lags = values.numpy(), emission.lags
    table = np.empty((len(x), STATES))
    for t, k in np.ndindex(*table.shape):
        if isinstance(emission, AutoregressiveNormal):
            part = emission.initial if t < lags else emission.base
            loc, matrix = part.loc[k].numpy().copy(), part.covariance_matrix[k].numpy()
            for lag in range(1, lags + 1) if t >= lags else ():
                for i, j in np.ndindex(matrix.shape):
                    weight = emission.weights[k, lag - 1, i, j].item()
                    loc[j] += weight * (x[t - lag, i] - emission.origin[i].item())
            table[t, k] = stats.multivariate_normal.logpdf(x[t], loc, matrix)
        elif isinstance(emission, AutoregressiveCategorical):
            probs = emission.initial.probs[k]
            if t >= lags:
                shape = (STATES, *(SYMBOLS,) * lags, SYMBOLS)
                probs = emission.tables.probs.reshape(shape)[(k, *x[t - lags : t])]
            table[t, k] = np.log(probs[x[t]].item())
        else:
            rate = emission.rate[k].item()
            if t >= lags:
                rate += emission.share[k].item() * (x[t - 1] + x[t - 2])
            table[t, k] = stats.poisson.logpmf(x[t], rate)
    return table


EMISSIONS = {
    "vector, one lag": (lambda *batch: vectors(2, 1, *batch), lambda *s: torch.randn(*s, 2)),
    "number, two lags": (lambda *batch: vectors(1, 2, *batch), lambda *s: torch.randn(*s, 1)),
    "vector, three lags": (lambda *batch: vectors(2, 3, *batch), lambda *s: torch.randn(*s, 2)),
    "symbol, one lag": (lambda *batch: symbols(1, *batch), lambda *s: torch.randint(SYMBOLS, s)),
    "symbol, two lags": (lambda *batch: symbols(2, *batch), lambda *s: torch.randint(SYMBOLS, s)),
    "count, two lags": (counts, lambda *s: torch.randint(6, s).double()),
}
every_emission = pytest.mark.parametrize(("make", "some"), EMISSIONS.values(), ids=EMISSIONS)


def chain(emission, lengths, observed=None, **options):
    return HMM(log_rows(STATES), log_rows(STATES, STATES), emission, lengths, observed, **options)


def answer(hmm, values, n, likelihood=None):
    """The oracle's answer for sequence n."""
    length = int(hmm.lengths[n])
    table = slowly(hmm.emission, values[n]) if likelihood is None else likelihood
    factors = hmm.log_initial.numpy(), hmm.log_transition.numpy()[None], table
    return oracle.by_paths(*factors, length)


# Queries ----------------------------------------------------------------------------------------


@every_emission
@pytest.mark.parametrize("lengths", [(1, 1), (2, 1), (5, 3), (6, 1)])
def test_queries_are_sums_over_all_paths(make, some, lengths):
    steps = max(lengths)
    hmm, values = chain(make(), torch.tensor(lengths)), some(2, steps)
    evidence, posterior = hmm.log_prob(values), hmm.posterior(values)
    filtered, best = hmm.filtered(values), hmm.viterbi(values)
    counts = hmm.expected_counts(values)
    ahead = predictive_log_prob(hmm, values).sum(-1)
    for n, length in enumerate(lengths):
        expected = answer(hmm, values, n)
        assert evidence[n].item() == pytest.approx(expected.evidence, abs=1e-9)
        assert ahead[n].item() == pytest.approx(expected.evidence, abs=1e-9)
        assert posterior.state_probs[n, :length].numpy() == pytest.approx(expected.states[:length])
        assert counts.state_probs[n, :length].numpy() == pytest.approx(expected.states[:length])
        assert filtered[n, :length].numpy() == pytest.approx(expected.filtered[:length])
        joint = hmm.log_joint(values, best)[n].item()
        assert joint == pytest.approx(expected.best, abs=1e-9)
    assert posterior.transitions.sum().item() == pytest.approx(sum(lengths) - 2)


@every_emission
def test_transitions_may_change_with_the_step(make, some):
    emission, values = make(), some(1, 4)
    initial, transition = log_rows(STATES), log_rows(3, STATES, STATES)
    hmm = HMM(initial, transition, emission, torch.tensor([4]), transition_per_step=True)
    factors = initial.numpy(), transition.numpy(), slowly(emission, values[0]), 4
    expected = oracle.by_paths(*factors)
    assert hmm.log_prob(values).item() == pytest.approx(expected.evidence)
    assert hmm.posterior(values).state_probs[0].numpy() == pytest.approx(expected.states)
    assert hmm.sample().shape == values.shape
    stream = Filter(hmm)
    found = torch.cat([stream.update(values[:, chunk]) for chunk in ([0], [1], [2, 3])], 1)
    torch.testing.assert_close(found, hmm.filtered(values))
    torch.testing.assert_close(stream.log_evidence, hmm.log_prob(values))


@pytest.mark.parametrize("lags", [1, 2])
def test_gradients_are_those_of_finite_differences(lags):
    emission, values = vectors(2, lags), torch.randn(2, 4, 2)
    initial, transition = log_rows(STATES), log_rows(STATES, STATES)
    lengths = torch.tensor([4, 3])

    def evidence(loc, root, first, weights):
        return HMM(
            initial, transition,
            AutoregressiveNormal(
                MultivariateNormal(first, emission.initial.covariance_matrix),
                MultivariateNormal(loc, scale_tril=root.tril()), weights, emission.origin,
            ),
            lengths,
        ).log_prob(values)  # fmt: skip

    leaves = (emission.base.loc, emission.base.scale_tril, emission.initial.loc, emission.weights)
    assert torch.autograd.gradcheck(evidence, [leaf.clone().requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("restricted", [False, True])
def test_gradients_of_tables_are_those_of_finite_differences(restricted):
    """With labels symbols go another way."""
    initial, transition = log_rows(STATES), log_rows(STATES, STATES)
    lengths, values = torch.tensor([4, 3]), torch.randint(SYMBOLS, (2, 4))
    labels = torch.tensor([[-1, 1, -1, -1], [0, -1, -1, -1]])

    def evidence(first, tables):
        emission = AutoregressiveCategorical(
            Categorical(logits=first.log_softmax(-1)), Categorical(logits=tables.log_softmax(-1))
        )
        hmm = HMM(initial, transition, emission, lengths)
        return (hmm.restrict(labels) if restricted else hmm).log_prob(values)

    leaves = torch.randn(STATES, SYMBOLS), torch.randn(STATES, SYMBOLS, SYMBOLS)
    assert torch.autograd.gradcheck(evidence, [leaf.requires_grad_() for leaf in leaves])


# Missing steps ----------------------------------------------------------------------------------


@every_emission
def test_what_is_missing_at_the_end_is_summed_out(make, some):
    hmm, values = chain(make(), torch.tensor([3])), some(1, 3)
    seen = torch.tensor([[True, True, True, False, False]])
    longer = hmm.with_lengths(torch.tensor([5]), seen)
    padded = torch.cat([values, some(1, 2)], 1)
    assert longer.log_prob(padded).item() == pytest.approx(hmm.log_prob(values).item())
    filled = impute(longer, padded, (5,))
    assert filled.shape == (5, *padded.shape)
    assert (filled[:, :, :3] == values).all()
    assert len(filled[:, :, 3:].flatten().unique()) > 1


def test_imputed_values_go_on_from_those_observed():
    steady = AutoregressiveNormal(
        MultivariateNormal(torch.zeros(1, 1), torch.eye(1)),
        MultivariateNormal(torch.zeros(1, 1), 1e-12 * torch.eye(1)),
        torch.full((1, 1, 1, 1), 2.0),
    )
    seen = torch.tensor([True, True, False, False])
    hmm = HMM(torch.zeros(1), torch.zeros(1, 1), steady, torch.tensor(4), seen)
    values = impute(hmm, torch.tensor([[1.5], [3.0], [0.0], [0.0]]))
    assert values.flatten().tolist() == pytest.approx([1.5, 3.0, 6.0, 12.0], abs=1e-4)


@every_emission
@pytest.mark.parametrize("seen", [[True, False, True, True], [False, True, True, True]])
@pytest.mark.parametrize("validate_args", [True, False])
def test_a_gap_before_what_is_observed_is_refused(make, some, seen, validate_args):
    observed = torch.tensor([[True] * 4, seen])
    hmm = chain(make(), torch.tensor([4, 4]), observed, validate_args=validate_args)
    with pytest.raises(ValueError, match=r"observed leaves out .* of sequence \[1\] .* split"):
        hmm.log_prob(some(2, 4))


# Sampling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lags", [1, 2])
def test_sampled_symbols_and_states_have_their_joint_distribution(lags):
    """With two symbols after each other more often than chance has them."""
    hmm = chain(symbols(lags), torch.tensor(3))
    values, states = hmm.sample_with_states((20_000,))
    places = torch.tensor([9, 3, 1])
    found = np.bincount((values * places).sum(-1) * 27 + (states * places).sum(-1), minlength=729)
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))
    wide = hmm.expand([27])
    probs = [wide.log_joint(value.expand(27, 3), every).exp() for value in every]
    probs = torch.stack(probs).flatten().numpy()
    assert probs.sum() == pytest.approx(1.0)
    assert oracle.looks_drawn_from(found, probs)


def test_sampled_vectors_feed_what_they_generate():
    emission = vectors(2, 2)
    small = MultivariateNormal(emission.base.loc, 1e-10 * torch.eye(2).expand(STATES, 2, 2))
    emission = AutoregressiveNormal(emission.initial, small, emission.weights, emission.origin)
    hmm = chain(emission, torch.tensor([6, 6]))
    values, states = hmm.sample_with_states((3,))
    assert values.shape == (3, 2, 6, 2)
    for s, n, t in itertools.product(range(3), range(2), range(2, 6)):
        k, x = states[s, n, t], values[s, n]
        loc = small.loc[k] + sum(
            (x[t - lag] - emission.origin) @ emission.weights[k, lag - 1] for lag in (1, 2)
        )
        assert x[t].tolist() == pytest.approx(loc.tolist(), abs=1e-3)


# What comes next --------------------------------------------------------------------------------


@every_emission
def test_a_continuation_has_the_density_of_what_follows(make, some):
    hmm, whole = chain(make(), torch.tensor([4, 3])), some(2, 7)
    ahead = continuation(hmm, whole[:, :4], 3)
    for n, length in enumerate([4, 3]):
        x = whole[n, : length + 3].unsqueeze(0)
        longer = hmm.with_lengths(torch.tensor([length + 3])).log_prob(x)
        shorter = hmm.with_lengths(torch.tensor([length])).log_prob(x[:, :length])
        values = x[:, length:].expand(2, *x.shape[1:][:0], 3, *x.shape[2:])
        assert ahead.log_prob(values)[n].item() == pytest.approx((longer - shorter).item())
    assert ahead.sample((2,)).shape == (2, 2, 3, *whole.shape[2:])
    again = continuation(ahead, whole[:, 4:], 2)  # of a continuation
    assert again.event_shape[0] == 2


def test_probabilities_ahead_are_sums_over_what_comes_between():
    hmm, past = chain(symbols(2), torch.tensor([3, 2])), torch.randint(SYMBOLS, (2, 3))
    forecast = hmm.forecast(past, 3)
    every = torch.tensor(list(itertools.product(range(SYMBOLS), repeat=3)))
    ahead = continuation(hmm.expand([27, 2]), past, 3)
    joint = ahead.log_prob(every.unsqueeze(1).expand(27, 2, 3)).exp()
    for h, v in itertools.product(range(3), range(SYMBOLS)):
        expected = joint[every[:, h] == v].sum(0)
        assert forecast.probs[:, h, v].tolist() == pytest.approx(expected.tolist())
        scores = forecast.log_prob(torch.full((2, 3), v))[:, h].exp()
        assert scores.tolist() == pytest.approx(expected.tolist())
    samples = forecast.sample((20_000,))
    found = (samples[:, 0] * torch.tensor([9, 3, 1])).sum(-1)
    assert oracle.looks_drawn_from(np.bincount(found, minlength=27), joint[:, 0].numpy())


@pytest.mark.parametrize(("dim", "lags"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_moments_ahead_are_those_of_all_paths(dim, lags):
    """Given the states, vectors are normal: a mixture with a component for each path."""
    steps = 3
    hmm, past = chain(vectors(dim, lags), torch.tensor([4])), torch.randn(1, 4, dim)
    forecast, emission = hmm.forecast(past, steps), hmm.emission
    filtered, stream = hmm.filtered(past)[0, -1], Filter(hmm)
    stream.update(past)
    torch.testing.assert_close(stream.predict(steps).mean, forecast.mean)
    mean, square = torch.zeros(steps, dim), torch.zeros(steps, dim)
    for path in itertools.product(range(STATES), repeat=steps):
        matrix = hmm.log_transition.exp()
        weight = filtered @ matrix[:, path[0]]
        means = [*past[0]]
        roots = [torch.zeros(dim, dim * steps) for _ in means]  # of what noise has added so far
        for h, k in enumerate(path):
            weight = weight * (matrix[path[h - 1], k] if h else 1.0)
            loc, root = emission.base.loc[k], torch.zeros(dim, dim * steps)
            root[:, h * dim : (h + 1) * dim] = emission.base.scale_tril[k]
            for lag in range(1, lags + 1):
                slope = emission.weights[k, lag - 1]
                loc = loc + (means[-lag] - emission.origin) @ slope
                root = root + slope.mT @ roots[-lag]
            means.append(loc)
            roots.append(root)
        for h in range(steps):
            mean[h] += weight * means[4 + h]
            square[h] += weight * (means[4 + h] ** 2 + (roots[4 + h] ** 2).sum(-1))
    assert forecast.mean[0].flatten().tolist() == pytest.approx(mean.flatten().tolist())
    variance = (square - mean**2).flatten().tolist()
    assert forecast.variance[0].flatten().tolist() == pytest.approx(variance)
    samples = forecast.sample((4000,))[:, 0]
    error = (samples.mean(0) - mean) / (torch.tensor(variance).reshape(steps, dim) / 4000).sqrt()
    assert error.abs().max() < 5


def test_moments_ahead_in_float32_are_those_in_float64():
    """Of vectors whose noise is far smaller than they are; to what float32 keeps of a variance."""
    emission = vectors(2, 1)
    base = MultivariateNormal(emission.base.loc[:1], 1e-4 * torch.eye(2).expand(1, 2, 2))
    parts = emission.initial.loc[:1], emission.initial.covariance_matrix[:1], emission.weights[:1]
    forecasts = []
    for dtype in (torch.float64, torch.float32):
        first = MultivariateNormal(parts[0].to(dtype), parts[1].to(dtype))
        noise = MultivariateNormal(base.loc.to(dtype), base.covariance_matrix.to(dtype))
        lagged = AutoregressiveNormal(first, noise, 0.9 * torch.eye(2, dtype=dtype)[None, None])
        zero = torch.zeros(1, dtype=dtype)
        hmm = HMM(zero, zero[None], lagged, torch.tensor([3]))
        forecasts.append(hmm.forecast(torch.full((1, 3, 2), 30.0, dtype=dtype), 2))
    one, other = (forecast.variance.flatten().tolist() for forecast in forecasts)
    assert other == pytest.approx(one, rel=1e-4)


def test_one_step_ahead_has_a_density_and_more_have_none_of_vectors():
    hmm, values = chain(vectors(2, 2), torch.tensor([4])), torch.randn(1, 5, 2)
    one = hmm.forecast(values[:, :4], 1).log_prob(values[:, 4:])
    expected = predictive_log_prob(hmm.with_lengths(torch.tensor([5])), values)[:, 4:]
    assert one.tolist()[0] == pytest.approx(expected.tolist()[0])
    with pytest.raises(ValueError, match=r"in closed form.*continuation"):
        hmm.forecast(values[:, :4], 2).log_prob(torch.randn(1, 2, 2))
    with pytest.raises(ValueError, match="probabilities"):
        _ = hmm.forecast(values[:, :4], 2).probs
    with pytest.raises(ValueError, match="moments"):
        _ = chain(counts(), torch.tensor([2])).forecast(torch.ones(1, 2), 2).mean


def test_zeros_of_a_table_are_exact():
    tables = torch.eye(2).flip(0).expand(1, 2, 2)
    emission = AutoregressiveCategorical(Categorical(torch.ones(1, 2)), Categorical(tables))
    hmm = HMM(torch.zeros(1), torch.zeros(1, 1), emission, torch.tensor(3))
    assert hmm.log_prob(torch.tensor([0, 1, 0])).exp().item() == pytest.approx(0.5)
    assert hmm.log_prob(torch.tensor([0, 1, 1])).item() == -np.inf
