"""Marginal likelihood by Laplace's approximation: closed forms, quadrature, importance sampling."""

import math

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Gamma, Normal, Poisson
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch.distributions import constraints

from pyrohmm import HMM, Sequences, fit_laplace
from pyrohmm.infer.marginal import Marginal

ZERO = torch.zeros(1).double()
COUNT, EACH = 30, 4


def linear(data):
    """Observations around the level of their subject."""
    mean = pyro.param("mean", torch.tensor(0.0))
    spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("subjects", len(data)):
        own = pyro.sample("own", Normal(0.0, spread))
        loc = (mean + own).unsqueeze(-1)
        hmm = HMM(ZERO, ZERO.unsqueeze(0), Normal(loc, 1.0), data.lengths)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


class Linear(PyroModule):
    """The same, whose parameters are read inside the plate."""

    def __init__(self):
        super().__init__()
        self.mean = PyroParam(torch.tensor(0.0))
        self.spread = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
        self.own = PyroSample(lambda self: Normal(0.0, self.spread))

    def forward(self, data):
        with pyro.plate("subjects", len(data)):
            loc = (self.mean + self.own).unsqueeze(-1)
            hmm = HMM(ZERO, ZERO.unsqueeze(0), Normal(loc, 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm


def levels(seed=0):
    pyro.set_rng_seed(seed)
    values = 2 + 1.5 * torch.randn(COUNT, 1) + torch.randn(COUNT, EACH)
    return Sequences(values.double(), torch.full((COUNT,), EACH))


def counts(data):
    """Two states that emit counts, whose rates subjects share but for a factor."""
    level = pyro.param("level", torch.tensor([0.0, 1.5]))
    stay = pyro.param("stay", torch.tensor(0.9), constraint=constraints.unit_interval)
    spread = pyro.param("spread", torch.tensor(0.5), constraint=constraints.positive)
    stay = stay.reshape((*stay.shape, 1, 1) if stay.dim() else (1, 1))
    row = torch.cat([stay, 1 - stay], -1)
    matrix = torch.cat([row, row.flip(-1)], -2)
    start = torch.full((2,), 0.5, dtype=matrix.dtype).log()
    with pyro.plate("subjects", len(data)):
        own = pyro.sample("own", Normal(0.0, spread))
        rate = (level + own.unsqueeze(-1)).exp()
        hmm = HMM(start, matrix.log(), Poisson(rate), data.lengths)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def counted(count=12, steps=15, seed=1):
    pyro.set_rng_seed(seed)
    states = (torch.rand(count, steps) < 0.15).long().cumsum(-1) % 2
    own = 0.5 * torch.randn(count, 1)
    values = torch.poisson((torch.tensor([0.2, 1.6])[states] + own).exp()).double()
    return Sequences(values, torch.tensor([steps] * (count - 1) + [1]))


@pytest.mark.parametrize("make", [lambda: linear, Linear])
def test_a_linear_model_has_the_estimates_of_textbooks(make):
    data = levels()
    fit = fit_laplace(make(), data, ["own"], tolerance=1e-14)
    assert not pyro.get_param_store()
    means = data.values.mean(-1)
    total = means.var(correction=0)
    spread = (total - 1 / EACH).sqrt()
    assert fit.converged
    torch.testing.assert_close(fit.parameters["mean"].double(), means.mean())
    torch.testing.assert_close(fit.parameters["spread"].double(), spread)
    joint = torch.eye(EACH) + spread**2
    normal = torch.distributions.MultivariateNormal(means.mean() * torch.ones(EACH).double(), joint)
    assert fit.log_marginal == pytest.approx(float(normal.log_prob(data.values).sum()), abs=1e-8)
    assert fit.aic(data) == pytest.approx(4 - 2 * fit.log_marginal)

    errors = fit.std_errors(data)
    torch.testing.assert_close(errors["mean"], (total / COUNT).sqrt(), rtol=1e-4, atol=0)
    wanted = total * math.sqrt(2 / COUNT) / (2 * spread)
    torch.testing.assert_close(errors["spread"], wanted, rtol=1e-4, atol=0)
    low, high = fit.intervals(data)["spread"]
    assert 0 < low < spread < high

    effect = fit.effects(data)["own"]
    share = spread**2 / total
    torch.testing.assert_close(effect.mode, share * (means - means.mean()), rtol=1e-4, atol=1e-5)
    slope = 2 * spread / EACH / total**2  # of the share
    drift = (share**2 * total / COUNT) + (slope * (means - means.mean()) * wanted).square()
    torch.testing.assert_close(effect.std_error, (share / EACH + drift).sqrt(), rtol=1e-3, atol=0)
    torch.testing.assert_close(fit.hmm(data).emission.loc[:, 0].double(),
                               means.mean() + effect.mode, rtol=1e-4, atol=1e-4)  # fmt: skip


def values_at(leaf):
    """Parameters of :func:`counts` from coordinates ``(B, 4)``."""
    return {
        "level": leaf[:, :2].unsqueeze(1),
        "stay": leaf[:, 2].sigmoid().unsqueeze(1),
        "spread": leaf[:, 3].exp().unsqueeze(1),
    }


@pytest.mark.parametrize("by_nodes", [False, True])
def test_gradients_are_those_of_differences(by_nodes):
    """Through the second derivatives, and through the most probable effects."""
    marginal = Marginal(counts, counted(), ["own"])
    marginal.widths = marginal.widths if by_nodes else None
    place = torch.tensor([[0.1, 1.4, 2.0, -0.5], [0.4, 1.0, 1.0, 0.3]]).double()
    rows = torch.zeros(2).long()

    def value(place):
        leaf = place.clone().requires_grad_()
        return marginal(values_at(leaf), leaf, rows)[:2]

    _, slope = value(place)
    step = 1e-4 * torch.eye(4).double()
    for j in range(4):
        wanted = (value(place + step[j])[0] - value(place - step[j])[0]) / 2e-4
        torch.testing.assert_close(slope[:, j], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("level", "width"), [(0.0, 1.0), (0.0, 0.1), (170.0, 0.5)])
def test_effects_far_from_zero_and_modes_far_apart_are_integrated(level, width):
    """Against ten thousand nodes: of a subject that stays in one state its effect is not known."""
    pyro.set_rng_seed(0)
    count, steps, shift = 6, 5, torch.tensor([0.0, 3.0]).double()
    matrix = torch.tensor([[0.95, 0.05], [0.05, 0.95]]).double().log()
    first = torch.full((2,), 0.5).double().log()
    values = level + torch.randn(count, 1) + 3 * (torch.rand(count, 1) < 0.5)
    values = (values + width * torch.randn(count, steps)).double()
    data = Sequences(values, torch.full((count,), steps))

    def hmm_of(own):
        return HMM(first, matrix, Normal(own.unsqueeze(-1) + shift, width), data.lengths[:1])

    def model(data):
        mean = pyro.param("mean", torch.tensor(float(level)))
        with pyro.plate("subjects", len(data)):
            hmm = hmm_of(pyro.sample("own", Normal(mean, 2.0)))
            pyro.sample("x", hmm.with_lengths(data.lengths), obs=data.values)
        return hmm.with_lengths(data.lengths)

    fit = fit_laplace(model, data, ["own"], tolerance=1e-10)
    mean = fit.parameters["mean"].double()
    grid = torch.linspace(-12, 12, 10_001).double() + mean
    logs = hmm_of(grid).log_prob(values.unsqueeze(1)) + Normal(mean, 2.0).log_prob(grid)
    wanted = (logs.logsumexp(-1) + math.log(24 / 10_000)).sum()
    assert fit.log_marginal == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize("by_nodes", [False, True])
def test_the_marginal_likelihood_is_that_of_quadrature(by_nodes):
    """With nodes that are the same for all subjects, of their prior."""
    data = counted()
    marginal = Marginal(counts, data, ["own"])
    marginal.widths = marginal.widths if by_nodes else None
    leaf = torch.tensor([[0.1, 1.4, 2.0, -0.5]]).double().requires_grad_()
    marginal.settle(values_at(leaf), torch.zeros(1).long())
    found = marginal(values_at(leaf), leaf, torch.zeros(1).long())[0]
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    spread = math.exp(-0.5)
    stay = torch.tensor(2.0).double().sigmoid()
    matrix = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([1 - stay, stay])])
    rate = (leaf[0, :2].detach() + spread * torch.tensor(nodes)[:, None, None]).exp()
    half = torch.full((2,), 0.5).double().log()
    hmm = HMM(half, matrix.log(), Poisson(rate), data.lengths)
    logs = hmm.log_prob(data.values) + torch.tensor(weights / weights.sum()).log().unsqueeze(-1)
    wanted = logs.logsumexp(0).sum()
    # a second mode of one subject, with 0.3 % of its mass, lies beyond the nodes
    assert abs(float(found) - float(wanted)) < (0.005 if by_nodes else 0.01 * len(data))


def test_effects_of_groups_by_importance_sampling():
    """Two effects of each group, one of them positive; each group has several sequences."""
    pyro.set_rng_seed(3)
    group = torch.arange(12) % 4
    values = torch.randn(4)[group][:, None] + torch.tensor([0.5, 1, 2, 1])[group][:, None] * (
        torch.randn(12, 10)
    )
    data = Sequences(values.double(), torch.full((12,), 10))

    def model(data):
        mean = pyro.sample("mean", Normal(0.0, 2.0))
        with pyro.plate("groups", 4):
            own = pyro.sample("own", Normal(mean, 1.0))
            precision = pyro.sample("precision", Gamma(3.0, 3.0))
        loc = own[..., group].unsqueeze(-1)
        scale = precision[..., group].rsqrt().unsqueeze(-1)
        hmm = HMM(ZERO, ZERO.unsqueeze(0), Normal(loc, scale), data.lengths)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_laplace(model, data, ["own", "precision"], restarts=3)
    assert fit.parameters["precision"].shape == (4,)
    mean = fit.parameters["mean"].double()
    own = fit.effects(data)
    torch.manual_seed(0)
    proposals = Normal(own["own"].mode, 2 * own["own"].std_error)
    widths = own["precision"].std_error / own["precision"].mode
    logs = Normal(own["precision"].mode.log(), 2 * widths)
    b, log_p = proposals.sample((20000,)), logs.sample((20000,))
    terms = Normal(mean, 1.0).log_prob(b) + Gamma(3.0, 3.0).log_prob(log_p.exp()) + log_p
    terms = terms - proposals.log_prob(b) - logs.log_prob(log_p)
    for g in range(4):
        rows = data.values[group == g].flatten()
        terms[:, g] += Normal(b[:, g, None], (-log_p[:, g, None] / 2).exp()).log_prob(rows).sum(-1)
    wanted = terms.logsumexp(0) - math.log(20000)
    log_prior = Normal(0.0, 2.0).log_prob(mean)
    assert fit.log_marginal == pytest.approx(float(wanted.sum() + log_prior), abs=0.2)


def test_what_cannot_be_integrated_is_refused():
    data = levels()
    with pytest.raises(ValueError, match="In plates are own"):
        fit_laplace(linear, data, ["mean"])
    with pytest.raises(ValueError, match="must name variables in one plate"):
        fit_laplace(linear, data, [])
    with pytest.raises(ValueError, match="start has 'level'"):
        fit_laplace(linear, data, ["own"], start={"level": torch.zeros(1)})

    for size in ((1,), ()):  # meets the plate, of whose size it is not; lacks a dimension

        def shaped(data, size=size):
            loc = pyro.param("loc", torch.zeros(size))
            with pyro.plate("subjects", len(data)):
                own = pyro.sample("own", Normal(0.0, 1.0))
                loc = (loc + own).unsqueeze(-1) if size else loc + own.unsqueeze(-1)
                hmm = HMM(ZERO, ZERO.unsqueeze(0), Normal(loc, 1.0), data.lengths)
                pyro.sample("x", hmm, obs=data.values)
            return hmm

        with pytest.raises(
            ValueError, match=r"and \(7, 1.*, own .* and \(7, 30\).* must be scalars"
        ):
            fit_laplace(shaped, data, ["own"])
    fit = fit_laplace(linear, data, ["own"])
    with pytest.raises(ValueError, match="fit_laplace integrates it out"):
        fit.bootstrap(data)
    with pytest.raises(ValueError, match="integrated out"):
        fit.intervals(data, of="spread", method="profile")


def test_one_observation_of_each_subject():
    """T = 1, and restarts of a model with priors alone."""
    pyro.set_rng_seed(0)
    data = Sequences(2 + torch.randn(20, 1).double(), torch.ones(20).long())

    def model(data):
        mean = pyro.sample("mean", Normal(0.0, 10.0))
        with pyro.plate("subjects", len(data)):
            own = pyro.sample("own", Normal(0.0, 1.0))
            loc = (mean + own).unsqueeze(-1)
            hmm = HMM(ZERO, ZERO.unsqueeze(0), Normal(loc, 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_laplace(model, data, ["own"], restarts=2, tolerance=1e-10)
    wanted = data.values.sum() / 2 / (20 / 2 + 1 / 100)
    torch.testing.assert_close(fit.parameters["mean"].double(), wanted, rtol=1e-4, atol=0)


def test_effects_that_are_not_independent_are_refused():
    def neighbours(data):
        mean = pyro.sample("mean", Normal(0.0, 1.0))
        with pyro.plate("subjects", len(data)):
            own = pyro.sample("own", Normal(0.0, 1.0))
            loc = (mean + own + own.roll(1, -1)).unsqueeze(-1)
            hmm = HMM(ZERO, ZERO.unsqueeze(0), Normal(loc, 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    with pytest.raises(ValueError, match="must be independent"):
        fit_laplace(neighbours, levels(), ["own"])
    with pytest.raises(ValueError, match="In plates are own"):
        fit_laplace(linear, levels(), ["mean"])


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float64, 1.0), (torch.float64, 1e3)]
)
def test_a_variance_of_zero_has_limits_from_zero_by_the_profile(dtype, scale):
    """Means of subjects that are all alike: the likelihood of their spread in closed form."""
    values = torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=dtype) * scale
    values = values - values.mean(1, keepdim=True)
    data = Sequences(values, torch.full((30,), 6))

    def model(data):
        spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
        with pyro.plate("subjects", len(data)):
            own = pyro.sample("own", Normal(torch.zeros_like(spread), spread))
            zero = torch.zeros(1, dtype=own.dtype)
            hmm = HMM(zero, zero.unsqueeze(0), Normal(own.unsqueeze(-1), scale), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_laplace(model, data, ["own"], start={"spread": torch.tensor(scale)})
    assert fit.notes[0].startswith("spread is zero")
    assert 0 < fit.parameters["spread"] < 1e-2 * scale
    low, high = fit.intervals(data)["spread"]
    # twice the fall is 30 log(v / v_0), with v = 1/6 + spread^2 and all means at zero
    wanted = scale * math.sqrt((math.exp(1.959964**2 / 30) - 1) / 6)
    assert low == 0
    assert float(high) == pytest.approx(wanted, rel=1e-3)
    assert fit.std_errors(data)["spread"].isnan()
