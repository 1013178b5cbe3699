"""Quantiles of forecasts, against what lies below them in exact sums and in many samples."""

import pytest
import torch
from pyro.distributions import (
    Bernoulli,
    Categorical,
    Gamma,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
    StudentT,
    Uniform,
    Weibull,
)
from scipy import stats

from pyrohmm import HMM, Forecast, queries
from pyrohmm.distributions import AutoregressiveCategorical, AutoregressiveNormal, Tied
from pyrohmm.distributions.modified import Angle, Truncated, WrappedCauchy, ZeroInflated

PROBS = [0.1, 0.5, 0.9]
STATES = (
    torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)).double().softmax(-1)
)  # (B, H, K)
LOC = torch.tensor([-3.0, 0.0, 5.0], dtype=torch.float64)
EMISSIONS = {
    "normal": lambda: Normal(LOC, 0.5 + LOC.abs()),
    "of each sequence": lambda: Normal(torch.stack([LOC, LOC.flip(0)]), 1.0),
    "vectors": lambda: Normal(torch.stack([LOC, LOC.flip(0)], -1), 1.0).to_event(1),
    "correlated": lambda: MultivariateNormal(LOC[:, None].expand(3, 2), torch.eye(2) + 0.5),
    "positive": lambda: Gamma(LOC.abs() + 1.0, 2.0),
    "mixtures": lambda: MixtureSameFamily(
        Categorical(torch.ones(3, 2)), Normal(torch.stack([LOC, -LOC], -1), 1.0)
    ),
    "angles": lambda: Angle(LOC.clamp(max=3.1), torch.tensor([0.1, 2.0, 50.0]).double()),
    "long-tailed angles": lambda: WrappedCauchy(LOC.clamp(max=3.1), torch.tensor(0.6).double()),
    "sampled": lambda: StudentT(torch.tensor([5.0, 6.0, 9.0]), LOC),  # has no cdf
}


@pytest.mark.parametrize("name", EMISSIONS)
def test_that_share_of_samples_lies_below(name):
    torch.manual_seed(0)
    forecast = Forecast(STATES, EMISSIONS[name]())
    found = forecast.quantiles(PROBS)
    assert found.shape == (3, 2, 4, *forecast.event_shape)
    samples = forecast.sample((20_000,))
    for value, prob in zip(found, PROBS):
        share = (samples <= value).double().mean(0)
        error = 5 * (prob * (1 - prob) * (1 / 20_000 + (name == "sampled") / 10_000)) ** 0.5
        assert (share - prob).abs().max() < error
    low, high = forecast.interval(0.8)
    torch.testing.assert_close(torch.stack([low, high]), found[[0, 2]], rtol=1e-4, atol=0.2)


@pytest.mark.parametrize(
    "emission",
    [
        lambda: Categorical(torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 1.0], [1.0, 1.0, 9.0]])),
        lambda: Poisson(torch.tensor([0.1, 3.0, 40.0])),
        lambda: Poisson(torch.tensor([[0.1, 3.0, 9.0], [7.0, 3.0, 0.4]])),
        lambda: Bernoulli(torch.tensor([0.05, 0.5, 0.99])),
    ],
)
def test_a_quantile_of_counts_is_the_first_that_reaches_the_probability(emission):
    forecast = Forecast(STATES, emission())
    probs = [0.0, 0.05, 0.3, 0.5, 0.999]
    found = forecast.quantiles(probs)
    size = forecast.emission.probs.size(-1) if isinstance(forecast.emission, Categorical) else 100
    top = 2 if isinstance(forecast.emission, Bernoulli) else size
    outcomes = torch.arange(top)[:, None, None].expand(top, 2, 4)
    outcomes = outcomes if size < 100 else outcomes.to(torch.get_default_dtype())
    below = torch.stack([forecast.log_prob(value).exp() for value in outcomes]).cumsum(0)
    for value, prob in zip(found, probs):
        expected = (below < prob - 1e-12).sum(0)
        assert torch.equal(value.long(), expected)


def test_emissions_per_step_have_quantiles_too():
    emission = Normal(torch.arange(6.0).reshape(3, 2), 0.1)  # (T, K)
    half = torch.full((2,), 0.5).log()
    hmm = HMM(half, half.expand(2, 2), emission, torch.tensor(3), emission_per_step=True)
    values = torch.tensor([0.0, 3.0, 4.0])
    found = queries.observation_marginals(hmm, values).quantiles([0.5])
    torch.testing.assert_close(found[0], values, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize(
    ("emission", "low", "high"),
    [
        (lambda: Normal(LOC, 1.0), -torch.inf, torch.inf),
        (lambda: Gamma(LOC.abs() + 1.0, 2.0), 0.0, torch.inf),
        (lambda: Poisson(LOC.abs() + 1.0), 0.0, torch.inf),
        (lambda: Bernoulli(torch.tensor([1.0, 1.0, 1.0])), 1.0, 1.0),
        (lambda: Uniform(LOC, LOC + 1.0), -3.0, 6.0),
        (lambda: Categorical(torch.tensor([0.0, 1.0, 1.0, 0.0]).expand(3, 4)), 1, 2),
        (lambda: MultivariateNormal(LOC[:, None].expand(3, 2), torch.eye(2)),
         -torch.inf, torch.inf),
        (lambda: MixtureSameFamily(Categorical(torch.ones(3, 2)), Gamma(torch.ones(3, 2), 1.0)),
         0.0, torch.inf),
    ],
)  # fmt: skip
def test_at_zero_and_one_they_are_the_ends_of_the_support(emission, low, high):
    forecast = Forecast(STATES, emission())
    first, last = forecast.quantiles([0.0, 1.0])
    assert (first == low).all()
    assert (last == high).all()
    assert forecast.quantiles([0.5])[0].double().isfinite().all()


def test_a_state_without_weight_does_not_widen_the_support():
    forecast = Forecast(torch.tensor([[0.0, 1.0]]), Uniform(torch.tensor([0.0, 2.0]), 3.0))
    assert forecast.quantiles([0.0, 0.5, 1.0]).flatten().tolist() == [2.0, 2.5, 3.0]


def test_an_end_of_the_support_that_has_the_probability_is_the_quantile():
    rain = ZeroInflated(Gamma(torch.ones(3), 1.0), gate=torch.tensor([0.3, 0.4, 0.5]))
    low, high = Forecast(STATES, rain).quantiles([0.2, 0.6])
    assert (low == 0).all()
    assert (high > 0).all()


def test_limits_that_are_far_away_cost_no_digits():
    narrow = Truncated(Normal(torch.tensor([0.0, 5.0]).double(), 1.0), -1e30, 1e30)
    half = Forecast(torch.tensor([[1.0, 0.0]]).double(), narrow)
    wanted = torch.tensor(stats.norm.ppf(PROBS))
    torch.testing.assert_close(half.quantiles(PROBS).flatten(), wanted)


def test_a_quantile_may_be_any_number_of_deviations_from_the_mean():
    tail = Weibull(torch.ones(1).double(), torch.tensor([0.2]).double())
    (found,) = Forecast(torch.ones(1, 1).double(), tail).quantiles([0.999999])
    assert found.item() == pytest.approx(stats.weibull_min.ppf(0.999999, 0.2), rel=1e-6)


def test_states_that_share_emissions_have_exact_quantiles():
    index = torch.tensor([1, 0, 1])
    for base in (
        Categorical(torch.tensor([[1.0, 2.0, 3.0], [5.0, 1.0, 1.0]])),
        Normal(LOC[:2], 1.0),
    ):
        wide = base.expand([2])
        apart = (
            Categorical(wide.probs[index])
            if isinstance(base, Categorical)
            else Normal(wide.loc[index], 1.0)
        )
        found = Forecast(STATES, Tied(base, index)).quantiles(PROBS)
        assert torch.allclose(found, Forecast(STATES, apart).quantiles(PROBS))


def after_a_past(emission, values, num_steps):
    half = torch.full((2,), 0.5).log()
    sticky = torch.tensor([[0.9, 0.1], [0.3, 0.7]]).log()
    return HMM(half, sticky, emission, torch.tensor(len(values))).forecast(values, num_steps)


def test_symbols_that_depend_on_those_before_have_exact_quantiles():
    torch.manual_seed(0)
    tables = Categorical(torch.rand(2, 5, 5))
    emission = AutoregressiveCategorical(Categorical(torch.ones(2, 5)), tables)
    predicted = after_a_past(emission, torch.tensor([3, 1, 4, 1]), 3)
    below = predicted.probs.cumsum(-1)
    steps = below[1, :-1]
    probs = torch.cat([steps - 1e-5, steps + 1e-5])  # which samples do not tell apart
    for value, prob in zip(predicted.quantiles(probs), probs):
        assert torch.equal(value, (below < prob).sum(-1))


def test_vectors_that_depend_on_those_before_have_an_exact_first_quantile():
    torch.manual_seed(0)
    noise = MultivariateNormal(torch.tensor([[0.0], [1.0]]), 0.1 * torch.eye(1))
    start = MultivariateNormal(torch.zeros(2, 1), torch.eye(1))
    weights = torch.tensor([0.9, -0.5]).reshape(2, 1, 1, 1)
    emission = AutoregressiveNormal(start, noise, weights)
    past = torch.tensor([[0.0], [0.4]])
    several, one = (after_a_past(emission, past, count) for count in (3, 1))
    given = Normal(noise.loc + 0.4 * weights.flatten(1), 0.1**0.5)
    expected = Forecast(one.state_probs, given.to_event(1)).quantiles(PROBS)
    assert torch.equal(one.quantiles(PROBS), expected)
    found = several.quantiles(PROBS)
    assert torch.equal(found[:, :1], expected)
    share = (several.sample((20_000,)) <= found[:, None]).double().mean(1)
    assert (share.squeeze(-1) - torch.tensor(PROBS)[:, None]).abs().max() < 0.02
