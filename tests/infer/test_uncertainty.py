"""Standard errors and intervals: against closed forms and differences of the sum over all paths."""

import math
from functools import cache

import numpy as np
import oracle
import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from pyro.nn import PyroModule
from scipy import stats
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    ContinuousTimeHMM,
    EnumeratedModel,
    HMMModule,
    MarginalModel,
    RegressionHMM,
    Sequences,
    TabularContinuousTimeHMM,
    TabularHMM,
    TabularHSMM,
    bernoulli,
    categorical,
    fit_em,
    fit_map,
    free_durations,
    left_to_right,
    normal,
    normal_full,
    poisson,
    queries,
    regression,
)

pyro.set_rng_seed(0)
COUNTS = [torch.randint(0, 4, (length,)) for length in (30, 1, 17)]


def two_coins(num_sequences=1000, num_steps=6, seed=1):
    """Sequences of two states that tell themselves apart, short enough for the sum over paths."""
    generator = torch.Generator().manual_seed(seed)
    flip = lambda p, n: (torch.rand(n, generator=generator) < p).long()  # noqa: E731
    states = [flip(0.4, num_sequences)]
    for _ in range(num_steps - 1):
        states.append(torch.where(flip(0.25, num_sequences).bool(), 1 - states[-1], states[-1]))
    states = torch.stack(states, 1)
    values = torch.where(states == 0, flip(0.1, states.shape), flip(0.8, states.shape))
    return Sequences(values, torch.full((num_sequences,), num_steps))


def test_one_state_has_the_errors_of_textbooks():
    values = torch.cat(COUNTS)
    data = Sequences.from_list(COUNTS)
    fit = fit_em(TabularHMM(1, poisson(rate=1e-9)), data)
    mean = values.double().mean()
    error = fit.std_errors(data)["module.emission.rate"]
    torch.testing.assert_close(error, (mean / len(values)).sqrt().reshape(1))
    low, high = fit.intervals(data, level=0.9)["module.emission.rate"]
    width = 1.6448536 * error / mean
    torch.testing.assert_close(low, mean * (-width).exp())
    torch.testing.assert_close(high, mean * width.exp())

    fit = fit_em(TabularHMM(1, categorical(4)), data)
    probs = fit.parameters["module.emission.probs"].double()
    torch.testing.assert_close(
        fit.std_errors(data)["module.emission.probs"], (probs * (1 - probs) / len(values)).sqrt()
    )
    covariance = fit.information(data).covariance
    assert covariance.shape == (3, 3)  # four probabilities have three free coordinates


def test_the_hessian_is_that_of_the_sum_over_all_paths():
    """By differences in the logits of all rows, the largest entry of each held."""
    data = two_coins()
    fit = fit_em(TabularHMM(2, categorical(2)), data, restarts=3, tolerance=1e-10)
    info = fit.information(data)
    logs = [
        fit.parameters[f"module.{name}"].double().log()
        for name in ("initial", "transition", "emission.probs")
    ]
    rows, count = data.values.unique(dim=0, return_counts=True)

    def log_evidence(u):
        place, moved = 0, []
        for table in logs:
            shift = torch.zeros_like(table).flatten()
            for entry in (table.flatten() != _largest(table).flatten()).nonzero().flatten():
                shift[entry] = u[place]
                place += 1
            moved.append((table + shift.reshape(table.shape)).log_softmax(-1))
        initial, transition, emission = moved
        paths = oracle.all_paths(2, 6)
        evidence = []
        for row in rows:
            parts = initial.numpy(), transition[None].numpy(), emission[:, row].mT.numpy()
            evidence.append(oracle.log_sum(oracle.joint(*parts, paths)))
        return (torch.tensor(evidence) * count).sum()

    size, step = len(info.labels), 1e-3
    assert size == 5
    eye = torch.eye(size).double() * step
    wanted = torch.zeros(size, size).double()
    for i in range(size):
        for j in range(size):
            corners = [
                a * b * log_evidence(a * eye[i] + b * eye[j]) for a in (1, -1) for b in (1, -1)
            ]
            wanted[i, j] = -sum(corners) / (4 * step**2)
    torch.testing.assert_close(info.matrix, wanted, rtol=1e-4, atol=1e-3)


def _largest(table):
    return table.max(-1, keepdim=True).values.expand_as(table)


def test_both_forms_of_a_model_and_points_without_priors_agree():
    data = two_coins()
    fit = fit_em(TabularHMM(2, categorical(2)), data, restarts=3, tolerance=1e-10)
    errors = fit.std_errors(data)
    points = fit_em(TabularHMM.from_hmm(fit.hmm(data)), data, tolerance=1e-10)
    torch.testing.assert_close(points.std_errors(data), errors, rtol=1e-2, atol=1e-3)
    fit.model = EnumeratedModel(fit.model.module)
    torch.testing.assert_close(fit.std_errors(data), errors)


class Seasonal(HMMModule):
    """Counts of one state, whose rate follows a covariate."""

    def __init__(self, linear):
        super().__init__()
        self.linear = PyroModule[torch.nn.Linear](1, 1) if linear else None
        if linear:
            torch.nn.init.zeros_(self.linear.weight)
        else:
            self.level = torch.nn.Parameter(torch.zeros(1))
            self.slope = torch.nn.Parameter(torch.zeros(1))

    def forward(self, lengths, observed=None, covariates=None):
        one, linear = torch.zeros(1), self.linear
        rate = linear(covariates) if linear else self.level + self.slope * covariates
        return HMM(one, one[None], Poisson(rate.exp()), lengths, observed, emission_per_step=True)


@pytest.mark.parametrize("linear", [True, False])
def test_plain_parameters_have_the_errors_of_a_regression(linear):
    """Inverse Fisher information of a Poisson regression, by hand."""
    season = torch.arange(60.0).sin().unsqueeze(-1)
    counts = np.random.default_rng(0).poisson((1 + season[:, 0]).exp().numpy())
    data = Sequences.from_list([torch.as_tensor(counts).float()], covariates=[season])
    fit = fit_map(MarginalModel(Seasonal(linear)), data, num_iterations=500, tolerance=1e-9)
    part = fit.model.module.linear if linear else fit.model.module
    names = ("bias", "weight") if linear else ("level", "slope")
    level, slope = (getattr(part, name).detach().double() for name in names)
    columns = torch.cat([torch.ones(60, 1), season], 1).double()
    rate = (level + columns[:, 1:] @ slope.view(1, 1)).exp()
    errors = torch.linalg.inv(columns.mT @ (rate * columns)).diagonal().sqrt()
    found = fit.std_errors(data)
    found = [found[f"module.{'linear.' if linear else ''}{name}"].item() for name in names]
    torch.testing.assert_close(torch.tensor(found).double(), errors, rtol=1e-6, atol=0)
    assert f"{names[0]}" in str(fit.summary(data))


def test_a_model_written_in_pyro():
    data = Sequences.from_list([torch.randn(50), torch.randn(3)])

    def model(data):
        loc = pyro.param("loc", torch.zeros(1))
        scale = pyro.param("scale", torch.ones(1), constraint=constraints.positive)
        one = torch.zeros(1)
        hmm = HMM(one, one.unsqueeze(0), Normal(loc, scale), data.lengths, data.observed)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_map(model, data, num_iterations=600, learning_rate=0.02)
    errors = fit.std_errors(data)
    deviation = torch.cat([data.values[0], data.values[1, :3]]).double().std(correction=0)
    torch.testing.assert_close(errors["loc"], (deviation / math.sqrt(53)).reshape(1), rtol=1e-2,
                               atol=0)  # fmt: skip
    torch.testing.assert_close(errors["scale"], (deviation / math.sqrt(106)).reshape(1),
                               rtol=1e-2, atol=0)  # fmt: skip


def test_limits_of_a_function_of_the_hmm():
    data = two_coins()
    fit = fit_em(TabularHMM(2, categorical(2)), data, restarts=3, tolerance=1e-10)
    low, high = fit.intervals(data, of=lambda hmm: hmm.stationary())["of"]
    matrix = fit.parameters["module.transition"]
    share = matrix[1, 0] / (matrix[0, 1] + matrix[1, 0])
    torch.testing.assert_close((low + high)[0] / 2, share, rtol=1e-4, atol=0)
    torch.testing.assert_close((high - low)[0], (high - low)[1])  # they sum to one


X = two_coins().values[:1, :5]
QUERIES = {
    "mean dwell times": queries.dwell_time_mean,
    "log-probabilities of dwell times": lambda hmm: queries.dwell_time_log_prob(hmm, 3),
    "posterior": lambda hmm: hmm.posterior(X).state_probs,
    "filtered": lambda hmm: hmm.filtered(X),
    "predictive log-probabilities": lambda hmm: queries.predictive_log_prob(hmm, X),
    "visits": lambda hmm: queries.expected_visits(hmm, X),
    "entropy of the path": lambda hmm: queries.path_entropy(hmm, X),
    "forecast": lambda hmm: hmm.forecast(X, 2).emission.probs,
}


@pytest.fixture(scope="module", params=["markov", "durations"])
def informed(request):
    """The information of a fit to known states, where estimates are nearly normal."""
    chains = {
        "markov": lambda: TabularHMM(2, categorical(2)),
        "durations": lambda: TabularHSMM(2, categorical(2), free_durations(2)),
    }
    generator = torch.Generator().manual_seed(0)
    turn = torch.tensor([0, 0, 1, 0, 1, 1, 0, 1, 1, 0]).repeat(100, 1)
    flips = torch.rand(turn.shape, generator=generator) < torch.tensor([0.2, 0.7])[turn]
    data = Sequences(flips.long(), torch.full((100,), 10), labels=turn)
    if request.param == "markov":
        states = (torch.rand(turn.shape, generator=generator) < 0.3).long().cumsum(1) % 2
        flips = torch.rand(turn.shape, generator=generator) < torch.tensor([0.2, 0.7])[states]
        data = Sequences(flips.long(), data.lengths, labels=states)
    return fit_em(chains[request.param](), data).information(data)


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_has_the_interval_of_samples_and_of_differences(query, informed):
    """Also queries that autograd does not differentiate, or not in all of their parts.

    Limits of 200 samples have standard errors of 12 % of the width; what is not linear adds less.
    """

    def of(hmm):
        return QUERIES[query](hmm.replace(lengths=torch.tensor([5])))

    _, error = informed.of(of)
    slopes = []
    for u in 1e-5 * torch.eye(len(informed.labels)).double():
        ends = [of(informed.run(sign * u)[1]).detach().double() for sign in (1, -1)]
        slopes.append((ends[0] - ends[1]) / 2e-5)
    slopes = torch.stack(slopes, -1).nan_to_num()
    wanted = torch.einsum("...p,pq,...q->...", slopes, informed.covariance, slopes).sqrt()
    torch.testing.assert_close(error, wanted, rtol=1e-3, atol=1e-6)
    assert bool((error > 1e-2).any())


def test_what_must_be_zero_is_held():
    walks = [torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 1, 2]), torch.tensor([0])]
    data = Sequences.from_list(walks, labels=walks)
    module = TabularHMM(3, categorical(3), transition_allowed=left_to_right(3),
                        initial_allowed=torch.tensor([True, False, False]))  # fmt: skip
    info = fit_em(module, data).information(data)
    error = info.std_errors()["module.transition"]
    assert error.isnan().tolist() == [[False, False, True], [True, False, False], [True] * 3]
    assert "module.transition[1, 0]" in info.held
    counts = torch.tensor([[1.0, 2.0], [3.0, 2.0]]).double()  # to stay and to go, in both rows
    probs = counts[:, 0] / counts.sum(-1)
    wanted = (probs * (1 - probs) / counts.sum(-1)).sqrt()
    torch.testing.assert_close(error.diagonal()[:2], wanted)


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_what_falls_to_zero_is_held(family):
    """One state has seen no event, in two ways of counting them."""
    states = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1]])
    events = torch.tensor([[0.0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0]])
    values = events.unsqueeze(-1) if family == "bernoulli" else events
    data = Sequences(values, torch.tensor([12]), labels=states)
    emission = {"bernoulli": bernoulli(1), "poisson": poisson(rate=1e-9)}[family]
    information = fit_em(TabularHMM(2, emission), data).information(data)
    name = {"bernoulli": "module.emission.probs", "poisson": "module.emission.rate"}[family]
    error = information.std_errors()[name].flatten()
    share = torch.tensor(4 / 6, dtype=torch.float64)
    wanted = share * (1 - share) / 6 if family == "bernoulli" else share / 6
    assert error[0].isnan()
    assert any(label.startswith(name) for label in information.held)
    torch.testing.assert_close(error[1], wanted.sqrt())
    nothing = Sequences(0 * values[:, :4], torch.tensor([4]))
    with pytest.raises(ValueError, match=f"at the boundary .* exist: {name}.* A prior keeps"):
        fit_em(TabularHMM(1, emission), nothing).std_errors(nothing)


def test_a_rate_on_its_way_to_zero_is_held():
    """Errors of the others are those of a model without this transition."""
    pyro.set_rng_seed(2)
    rates = torch.tensor([[-0.5, 0.5, 0.0], [0.0, -0.3, 0.3], [0.2, 0.0, -0.2]])
    lengths, times = torch.full((60,), 8), torch.rand(60, 8).cumsum(-1) * 2
    names = Categorical(torch.eye(3))
    hmm = ContinuousTimeHMM(torch.full((3,), 1 / 3).log(), rates, names, lengths, times)
    data = Sequences(hmm.sample(), lengths, times=times)
    errors = []
    for allowed in (rates > 0, (rates > 0) | (torch.arange(9).reshape(3, 3) == 7)):
        module = TabularContinuousTimeHMM(
            3, categorical(3), rate_time=1e-9, transition_allowed=allowed
        )
        start = {"initial": torch.ones(3) / 3, "emission.probs": torch.eye(3)}
        fit = fit_em(module, data, start=start | {"rates": 0.1 * allowed}, tolerance=1e-9)
        errors.append(fit.std_errors(data)["module.rates"])
        assert "module.rates[2, 1]" in fit.information(data).held
    torch.testing.assert_close(errors[1], errors[0], rtol=1e-3, atol=0, equal_nan=True)
    assert errors[0].isfinite().sum() == 3


@pytest.mark.parametrize("group", [0, 1])
def test_coefficients_at_infinity_leave_the_others_their_errors(group):
    """A group that never leaves state 0; errors of the others are those of tables of counts.

    Group 1 has the second coefficient at minus infinity; group 0 has the first one there, and the
    second one against it, such that their sum is determined.
    """
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(60, 30, 1, generator=generator) < 0.5).double()
    states = torch.zeros(60, 30).long()
    for t in range(1, 30):
        before = states[:, t - 1]
        leaves = torch.where(before == 0, 0.3 * (x[:, t - 1, 0] != group), 0.4)
        states[:, t] = before ^ (torch.rand(60, generator=generator) < leaves).long()
    values = 3.0 * states + torch.randn(60, 30, generator=generator)
    covariates = torch.cat([torch.ones_like(x), x], -1)
    data = Sequences(values, torch.full((60,), 30), covariates=covariates, labels=states)
    fit = fit_em(RegressionHMM(2, normal(0), transition=[0, 1]), data)
    counts = torch.zeros(2, 2, 2).double()  # of pairs, by group
    place = x[:, :-1, 0].long(), states[:, :-1], states[:, 1:]
    counts.index_put_(place, torch.ones(()).double(), accumulate=True)
    odds = (1 / counts).sum(-1)  # variances of the log odds to move, by group and state
    information = fit.information(data)
    error = information.std_errors()["module.transition.coefficients"]
    wanted = torch.stack([odds[0, 1], odds[:, 1].sum()]).sqrt()
    torch.testing.assert_close(error[1, 0], wanted, rtol=1e-4, atol=0)
    if group:
        torch.testing.assert_close(error[0, 0, 0], odds[0, 0].sqrt(), rtol=1e-4, atol=0)
    assert error[0, 0].isnan().tolist() == [not group, True]
    known = [f"transition 0 → 1: column {i}" for i in range(2)]
    assert all(name in fit.summary(data).split("at the boundary")[1] for name in known[group:])

    own = information.labels.index("module.transition.coefficients[1, 0, 1]")
    assert information._listed(torch.tensor([own])) == "transition 1 → 0: column 1"  # in messages

    def at_the_other(hmm):
        logs = hmm.log_transition[x[:, :-1, 0] != group][0]
        return logs[0, 1] - logs[0, 0]

    _, error = information.of(at_the_other)
    torch.testing.assert_close(error, odds[1 - group, 0].sqrt(), rtol=1e-4, atol=0)


@cache
def regressed(of_x, of_y):
    """A regression of two states in units of the covariate and of the observations."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 30, 1, generator=generator).double()
    states = (torch.rand(6, 30, generator=generator) < 0.2).cumsum(-1) % 2
    noise = torch.randn(6, 30, generator=generator).double()
    values = of_y * (4.0 * states + 0.5 * x[..., 0] * states + noise)
    covariates = torch.cat([torch.ones_like(x), of_x * x], -1)
    data = Sequences(values, torch.full((6,), 30), covariates=covariates)
    module = RegressionHMM(2, regression(Normal, loc=[0, 1], scale=[0, 1]), [0, 1]).double()
    if (of_x, of_y) == (1.0, 1.0):
        pyro.set_rng_seed(0)
        return fit_em(module, data, tolerance=1e-12), data
    start = {}
    for name, value in regressed(1.0, 1.0)[0].parameters.items():
        start[name] = value * in_units(name, value, of_x, of_y)
        if "scale" in name:  # a logarithm
            start[name][:, 0] += math.log(of_y)
    return fit_em(module, data, start=start, num_iterations=1, tolerance=None), data


def in_units(name, value, of_x, of_y):
    """What coefficients of an intercept and of a covariate are multiplied by."""
    unit = torch.tensor([1.0, 1 / of_x]).double()[: value.size(-1)]
    return unit * of_y if "loc" in name else unit


@pytest.mark.parametrize("of_x", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("of_y", [1e-6, 1.0, 1e6])
def test_errors_of_coefficients_have_their_units(of_x, of_y):
    """Neither covariates nor observations in other units change what is held."""
    information, plain = (fit.information(data) for fit, data in (
        regressed(of_x, of_y), regressed(1.0, 1.0)
    ))  # fmt: skip
    assert information.held == plain.held
    wanted = plain.std_errors()
    for name, error in information.std_errors().items():
        expected = wanted[name] * in_units(name, error, of_x, of_y)
        torch.testing.assert_close(error, expected, rtol=1e-3, atol=0.0, equal_nan=True)


def test_what_the_data_do_not_determine_is_named():
    """Two states whose labels nobody can tell: they emit alike."""
    data = Sequences.from_list([torch.tensor([0, 1, 1, 0, 1])])
    even = torch.full((2, 2), 0.5)
    module = TabularHMM.from_hmm(HMM(even[0].log(), even.log(), Categorical(even), data.lengths))
    fit = fit_em(module, data, num_iterations=2)
    with pytest.raises(ValueError, match=r"not positive definite.*module\.(transition|initial)"):
        fit.std_errors(data)


def numeric_errors(density, point, steps):
    """Standard errors of entries of ``point``, by second differences of densities ``(B, P)``."""
    size = len(point)
    ways = [
        (i, j, a, b) for i in range(size) for j in range(size) for a in (1, -1) for b in (1, -1)
    ]
    eye = np.diag(steps)
    values = density(np.stack([point + a * eye[i] + b * eye[j] for i, j, a, b in ways]))
    signs = np.array([a * b for *_, a, b in ways])
    hessian = (signs * values).reshape(size, size, 4).sum(-1) / (4 * np.outer(steps, steps))
    return np.sqrt(np.linalg.inv(-hessian).diagonal())


def forward(initial, leave, logs):
    """Log evidence ``(B,)`` of two states that are left with probabilities ``(B, 2)``."""
    matrix = np.stack([1 - leave, leave], -1)
    matrix[:, 1] = matrix[:, 1, ::-1]
    peak = logs.max(-1, keepdims=True)
    probs = np.exp(logs - peak)
    message, total = initial * probs[:, 0], peak.sum((1, 2))
    for t in range(logs.shape[1]):
        if t:
            message = np.einsum("bi,bij->bj", message, matrix) * probs[:, t]
        norm = message.sum(-1, keepdims=True)
        message, total = message / norm, total + np.log(norm[:, 0])
    return total


def test_one_long_series():
    """20,000 steps, whose second derivatives by autograd would take a graph of all of them."""
    generator = torch.Generator().manual_seed(0)
    states = (torch.rand(20_000, generator=generator) < 0.1).long().cumsum(0) % 2
    values = torch.poisson(torch.tensor([1.0, 4.0])[states], generator=generator)
    data = Sequences.from_list([values])
    fit = fit_em(TabularHMM(2, poisson(rate=1e-9)).double(), data, tolerance=1e-11)
    rate, matrix, initial = (fit.parameters[f"module.{name}"].numpy() for name in
                             ("emission.rate", "transition", "initial"))  # fmt: skip

    def density(points):
        logs = stats.poisson.logpmf(values.numpy()[:, None], points[:, None, :2])
        return forward(initial, points[:, 2:], logs)

    point = np.array([*rate, matrix[0, 1], matrix[1, 0]])
    wanted = numeric_errors(density, point, 1e-3 * point)
    errors = fit.std_errors(data)
    assert errors["module.initial"].isnan().all()
    matrix = errors["module.transition"]
    found = np.array([*errors["module.emission.rate"], matrix[0, 1], matrix[1, 0]])
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_groups_of_any_size_are_computed_in_buckets():
    """Their log joint densities, with the prior once, add up to that of all as one padded batch."""
    pyro.set_rng_seed(0)
    values = [torch.poisson(torch.tensor([1.0, 6.0])[torch.arange(n) // 9 % 2])
              for n in [5_000, *[5] * 60, 1]]  # fmt: skip
    data = Sequences.from_list(values)
    fit = fit_em(TabularHMM(2, poisson(concentration=3.0)), data, tolerance=1e-9)
    information = fit.information(data)
    assert len(information.pieces) > 1
    u = 0.1 * torch.randn(len(information.labels))
    found = sum(weight * information.run(u, part)[0] for part, weight in information.pieces)
    torch.testing.assert_close(found, information.run(u)[0])
    found = information.gradients(u.unsqueeze(0))[0]
    information.pieces = [(information.data, 1.0)]
    torch.testing.assert_close(found, information.gradients(u.unsqueeze(0))[0])


def test_components_of_a_covariance_are_missing():
    """Also with parameters in single precision, whose gradients are those in double."""
    generator = torch.Generator().manual_seed(0)
    states = (torch.rand(300, generator=generator) < 0.1).long().cumsum(0) % 2
    values = torch.randn(300, 2, generator=generator).double() @ torch.tensor(
        [[1.0, 0.7], [0.0, 1.0]]
    ).double() + 3 * states.unsqueeze(-1)
    values[torch.rand(300, 2, generator=generator) < 0.2] = math.nan
    data = Sequences.from_list([values])
    family = normal_full(2, torch.tensor([1.0, 1.5]), 0.7, 4.5, torch.eye(2))
    fit = fit_em(TabularHMM(2, family).double(), data, tolerance=1e-12, num_iterations=2000)
    loc, covariance, matrix, initial = (
        fit.parameters[f"module.{name}"].double().numpy()
        for name in ("emission.loc", "emission.covariance", "transition", "initial")
    )
    x = data.values[0].double().numpy()

    def density(points):
        logs, total = np.zeros((len(points), len(x), 2)), np.zeros(len(points))
        for b, point in enumerate(points):
            for k, own in enumerate(point[:10].reshape(2, 5)):
                mean, matrix = own[:2], own[[2, 3, 3, 4]].reshape(2, 2)
                prior = stats.invwishart.logpdf(matrix, 4.5, np.eye(2))
                prior += stats.multivariate_normal.logpdf(mean, [1.0, 1.5], matrix / 0.7)
                total[b] += prior
                for known in ([0], [1], [0, 1]):
                    rows = (~np.isnan(x) == np.isin([0, 1], known)).all(-1)
                    part = matrix[np.ix_(known, known)]
                    logs[b, rows, k] = stats.multivariate_normal.logpdf(
                        x[rows][:, known], mean[known], part
                    )
        return total + forward(initial, points[:, 10:], logs)

    entries = np.array([0, 1, 3])
    states = np.column_stack([loc, covariance.reshape(2, 4)[:, entries]])
    point = np.array([*states.flat, matrix[0, 1], matrix[1, 0]])
    wanted = numeric_errors(density, point, 1e-3 * np.maximum(np.abs(point), 0.05))
    errors = fit.std_errors(data)
    states = [
        errors["module.emission.loc"],
        errors["module.emission.covariance"].flatten(1)[:, entries],
    ]
    matrix = errors["module.transition"]
    found = [*torch.cat(states, 1).flatten(), matrix[0, 1], matrix[1, 0]]
    np.testing.assert_allclose(np.array(found), wanted, rtol=1e-4)
    start = {name.removeprefix("module."): x.float() for name, x in fit.parameters.items()}
    single = fit_em(TabularHMM(2, family), data, start=start, num_iterations=1)
    for name, error in single.std_errors(data).items():
        torch.testing.assert_close(error, errors[name], rtol=1e-3, atol=0, equal_nan=True)


def test_a_fit_that_has_not_ended_is_refused():
    data = two_coins()
    start = {"initial": torch.tensor([0.5, 0.5]), "transition": torch.full((2, 2), 0.5),
             "emission.probs": torch.tensor([[0.55, 0.45], [0.45, 0.55]])}  # fmt: skip
    fit = fit_em(TabularHMM(2, categorical(2)), data, start=start, num_iterations=2)
    with pytest.raises(ValueError, match=r"^More iterations: .*(nats below the max|no maximum)"):
        fit.std_errors(data)
    rows = fit.summary(data).splitlines()
    value = fit.parameters["module.transition"][0, 1].item()
    assert f"module.transition[0, 1] {value:11.4g}{'-':>11}{'-':>11}{'-':>11}".split() in [
        row.split() for row in rows
    ]
    assert rows[-1].startswith("no standard errors: More iterations: ")


def test_functions_of_the_hmm_have_limits_where_lengths_differ_too_much_to_pad(monkeypatch):
    pyro.set_rng_seed(0)
    states = (torch.arange(900) // 9 % 2).double()
    rows = [states[:n] * 4 + torch.randn(n) for n in [900, *[30] * 20]]
    data = Sequences.from_list(rows)
    fit = fit_em(TabularHMM(2, normal(0)), data, tolerance=1e-9)
    of = lambda hmm: hmm.log_transition.exp()  # noqa: E731
    wanted = fit.intervals(data, of=of)["of"]
    monkeypatch.setattr("pyrohmm.data.packed.MOST", 1000)
    monkeypatch.setattr("pyrohmm.data.packed.TIMES", 5)
    monkeypatch.setattr("pyrohmm.data.packed.LITTLE", 1000)
    monkeypatch.setattr("pyrohmm.data.packed.SHORT", 1000)
    ragged = Sequences.from_list(rows)
    assert ragged.is_ragged
    torch.testing.assert_close(fit.intervals(ragged, of=of)["of"], wanted, rtol=1e-3, atol=1e-3)
