"""Variables of new sequences given their data, against conjugate posteriors in closed form."""

import math

import pyro
import pytest
import torch
from pyro.distributions import Bernoulli, Categorical, Dirichlet, Gamma, Normal

from pyrohmm import HMM, PosteriorDraws, Sequences
from pyrohmm.infer import importance

DRAWS = 300  # of which a mean is off by 0.06 standard deviations, these by 4 %
ONE = torch.zeros(1)


def draws_of(model, values, new, count=200):
    """Variables of new sequences ``(S, N, ...)`` given shared values of each draw, ``(S, ...)``."""
    pyro.set_rng_seed(0)
    one = new[:1]
    names = pyro.poutine.trace(model).get_trace(one).stochastic_nodes
    shaped = pyro.poutine.trace(model).get_trace(one).nodes
    size = len(next(iter(values.values()), torch.empty(DRAWS)))
    filled = {n: shaped[n]["value"].expand(size, *shaped[n]["value"].shape)
              for n in names if n != "subjects"}  # fmt: skip
    draws = PosteriorDraws.of({n: x[None] for n, x in (filled | values).items()}, model)
    return {n: x[0] for n, x in draws.for_new(new, num_candidates=count).parameters.items()}


def own_level(data):
    centre = pyro.sample("centre", Normal(0.0, 1.0))
    with pyro.plate("subjects", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(centre, 1.0))
        hmm = HMM(ONE, ONE[None], Normal(level[..., None], 1.0), data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def check(samples, mean, sd):
    """Of ``(S, ...)``: five standard errors."""
    count = len(samples)
    mean, sd = torch.as_tensor(mean).double(), torch.as_tensor(sd).double()
    off = (samples.double().mean(0) - mean) / sd
    assert off.abs().max().item() < 5 / math.sqrt(count)
    assert (samples.double().std(0) / sd).log().abs().max().item() < 5 / math.sqrt(2 * count)


@pytest.mark.parametrize("lengths", [[1], [200], [1, 200, 30]])
@pytest.mark.parametrize("at", [0.0, -6.0])
def test_normal_levels_of_single_sequences(lengths, at, monkeypatch):
    """Also of a subject six standard deviations out, and if candidates are computed in parts."""
    monkeypatch.setattr(importance, "STEPS", 9000)
    torch.manual_seed(1)
    new = Sequences.from_list([torch.randn(n) + at for n in lengths])
    count = new.lengths.double()
    found = draws_of(own_level, {"centre": torch.zeros(DRAWS)}, new)["level"]
    check(found, new.values.double().sum(-1) / (count + 1), (count + 1).rsqrt())


def test_each_draw_has_weights_of_its_own():
    """Shared variables that differ by far more than the width of each posterior."""
    centre = torch.linspace(-20.0, 20.0, DRAWS)[torch.randperm(DRAWS)]
    new = Sequences.from_list([[1.0] * 3])
    found = draws_of(own_level, {"centre": centre}, new)["level"][:, 0]
    check((found - (centre + 3) / 4) * 2, 0.0, 1.0)


def two_faces(data):
    """States alternate, so that the counts of each face are known."""
    start, turn = torch.tensor([1.0, 0.0]).log(), torch.eye(2).flip(0).log()
    with pyro.plate("subjects", data.total, subsample=data.indices):
        face = pyro.sample("face", Dirichlet(torch.full((2, 4), 0.5)).to_event(1))
        hmm = HMM(start, turn, Categorical(face), data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


@pytest.mark.parametrize("num_steps", [1, 200])
def test_rows_of_probabilities(num_steps):
    torch.manual_seed(2)
    values = torch.stack([torch.randint(4, (num_steps,)), torch.randint(2, (num_steps,))])
    found = draws_of(two_faces, {}, Sequences(values), 1000)["face"]
    every = torch.nn.functional.one_hot(values, 4).double()
    counts = torch.stack([every[:, 0::2].sum(1), every[:, 1::2].sum(1)], 1) + 0.5
    posterior = Dirichlet(counts)
    assert found.shape == (DRAWS, 2, 2, 4)
    torch.testing.assert_close(found.double().mean(0), posterior.mean, rtol=0, atol=0.07)
    if num_steps > 1:
        likely = counts > 1
        check(found[:, likely], posterior.mean[likely], posterior.variance.sqrt()[likely])


def two_variables(data):
    """Normal-gamma: the prior of the level has the sequence's own precision."""
    with pyro.plate("subjects", data.total, subsample=data.indices):
        precision = pyro.sample("precision", Gamma(3.0, 3.0))
        level = pyro.sample("level", Normal(0.0, precision.rsqrt()))
        normal = Normal(level[..., None], precision[..., None].rsqrt())
        hmm = HMM(ONE, ONE[None], normal, data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


@pytest.mark.parametrize("num_steps", [1, 50])
def test_variables_that_depend_on_each_other(num_steps):
    torch.manual_seed(3)
    new = Sequences(0.3 * torch.randn(2, num_steps) + torch.tensor([[3.0], [-0.2]]))
    found, x = draws_of(two_variables, {}, new), new.values.double()
    mean, shape = x.sum(-1) / (num_steps + 1), 3 + num_steps / 2
    rate = 3 + (x.square().sum(-1) - mean.square() * (num_steps + 1)) / 2
    check(found["precision"], shape / rate, math.sqrt(shape) / rate)
    check(found["level"], mean, (rate / (shape - 1) / (num_steps + 1)).sqrt())


def own_class(data):
    with pyro.plate("subjects", data.total, subsample=data.indices):
        high = pyro.sample("high", Bernoulli(0.2))
        level = pyro.sample("level", Normal(6 * high, 1.0))
        hmm = HMM(ONE, ONE[None], Normal(level[..., None], 1.0), data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def test_a_discrete_variable_beside_a_continuous_one():
    x = torch.tensor([3.0, 3.3, 2.5, 3.7]).double()
    joint = torch.distributions.MultivariateNormal(
        torch.zeros(4).double(), torch.eye(4).double() + 1
    )
    odds = (joint.log_prob(x - 6) - joint.log_prob(x)).exp() * 0.2 / 0.8
    found = draws_of(own_class, {}, Sequences(x[None].float()))
    share = (odds / (1 + odds)).item()
    assert found["high"].mean().item() == pytest.approx(share, abs=0.08)
    for high in (0, 1):
        level = found["level"][found["high"] == high]
        check(level, (6 * high + x.sum()) / 5, math.sqrt(1 / 5))


def many_levels(data):
    pyro.sample("centre", Normal(0.0, 1.0))
    with pyro.plate("subjects", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(torch.zeros(60), 1.0).to_event(1))
        noise = Normal(level[..., None, :], 0.01).to_event(1)
        hmm = HMM(ONE, ONE[None], noise, data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def test_too_few_candidates_are_said():
    new = Sequences.from_list([torch.full((1, 60), torch.nan), torch.randn(5, 60)])
    with pytest.warns(UserWarning, match=r"1 of 2 new .* sequence 1 1\.\d of 20.*set num_can"):
        draws_of(many_levels, {"centre": torch.zeros(9)}, new, 20)


def test_a_prior_is_said_to_be_enough_where_it_is():
    """No warning, and one run of the model for each draw."""
    calls = []

    def model(data):
        calls.append(len(data))
        return own_level(data)

    new = Sequences.from_list([[0.3], [1.0]])
    values = {"centre": torch.zeros(7)}
    draws_of(model, values, new)
    assert calls.count(400) == 7
