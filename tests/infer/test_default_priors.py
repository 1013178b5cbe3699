"""Default priors of normal emissions: they move no estimate, and keep variances from collapsing.

Estimates of maximum likelihood are those by the smoothed posterior of the fit itself, in NumPy.
"""

import numpy as np
import pyro
import pytest
import torch
from scipy import integrate, stats

from pyrohmm import (
    Sequences,
    TabularHMM,
    autoregressive_normal,
    fit_em,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    scale_priors,
    streams,
    student_t,
)
from pyrohmm.analysis.metrics import bic
from pyrohmm.distributions.units import FlatCovariance, FlatVariance
from pyrohmm.nn.covariances import residuals_within
from pyrohmm.nn.normals import moments_of

N = 100  # observations of a state


def two_levels(gap, spreads=(1.0, 1.0), dim=2, size=N, seed=0):
    """Numbers ``(2 N, D)`` of two states, of correlated components, and the states."""
    rng = np.random.default_rng(seed)
    states = np.repeat([0, 1], size)
    noise = rng.normal(size=(2 * size, dim)) @ (np.eye(dim) + 0.5 * np.ones((dim, dim)))
    return gap * states[:, None] + np.array(spreads)[states, None] * noise, states


def fitted(family, values, states, unit=1.0):
    """EM from the true states; the posterior of the states too."""
    torch.set_default_dtype(torch.float64)
    data = Sequences(unit * torch.tensor(values)[None], torch.tensor([len(values)]))
    truth = torch.nn.functional.one_hot(torch.tensor(states)).double() * 0.98 + 0.01
    fit = fit_em(TabularHMM(2, family), data, start=lambda *_: truth[None, None])
    hmm = fit.hmm(data)
    return fit, hmm, hmm.posterior(data.values).state_probs[0].numpy()


def moments(values, weights):
    """Number, mean and covariance of each state."""
    count = weights.sum(0)
    mean = weights.T @ values / count[:, None]
    apart = values[:, None] - mean
    return count, mean, np.einsum("mk,mki,mkj->kij", weights, apart, apart) / count[:, None, None]


FAMILIES = {
    "numbers": normal(0),
    "vectors": normal(2),
    "spherical": normal_spherical(2),
    "full": normal_full(2),
    "tied": normal_tied(2),
    "mixture": normal_mixture(2, num_components=1),
    "streams": streams(normal(1), normal_full(1)),
}


@pytest.mark.parametrize(
    ("gap", "spreads", "unit"),
    [
        (5.0, (1, 1), 1.0), (20.0, (1, 1), 1e-12), (1e3, (1, 1), 1e12), (1e6, (1, 1), 1.0),
        (50.0, (1, 0.01), 1.0), (1e3, (100, 1), 1e-12),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", FAMILIES)
def test_a_default_prior_moves_no_estimate_by_a_tenth_of_its_standard_error(
    name, gap, spreads, unit
):
    values, states = two_levels(gap, spreads, 1 if name == "numbers" else 2)
    rows = values[:, 0] if name == "numbers" else values
    fit, hmm, weights = fitted(FAMILIES[name], rows, states, unit)
    count, mean, matrix = moments(values, weights)
    count = count[:, None]
    if name == "tied":
        matrix = np.broadcast_to((count[..., None] * matrix).sum(0) / count.sum(), matrix.shape)
        count = np.broadcast_to(count.sum(), count.shape)
    variance = np.diagonal(matrix, axis1=1, axis2=2)
    if name == "spherical":
        variance = np.broadcast_to(variance.mean(1, keepdims=True), variance.shape)
        count = 2 * count
    found = hmm.emission.mean.reshape(mean.shape).numpy() / unit
    assert (np.abs(found - mean) <= 0.1 * np.sqrt(variance / N)).all()
    found = hmm.emission.variance.reshape(mean.shape).numpy() / unit**2
    assert (np.abs(found - variance) <= 0.1 * variance * np.sqrt(2 / count)).all()
    if name in ("full", "tied"):
        error = np.sqrt((variance[:, 0] * variance[:, 1] + matrix[:, 0, 1] ** 2) / count[:, 0])
        found = hmm.emission.covariance_matrix.expand(2, 2, 2)[:, 0, 1].numpy() / unit**2
        assert (np.abs(found - matrix[:, 0, 1]) <= 0.1 * error).all()
    assert not [note for note in fit.notes if "prior" in note]


def regressions(gap, unit, separate, seed=0):
    """Sequences of autoregressive vectors of two states, levels a gap apart, and the states."""
    rng = np.random.default_rng(seed)
    slopes = np.array([[[0.6, 0.2], [0.0, 0.5]], [[-0.5, 0.0], [0.3, 0.4]]])
    rows = np.repeat([0, 1], 4)[:, None].repeat(N // 4 + 1, 1)  # N steps of each state have a past
    if not separate:
        rows = rng.permuted(np.repeat([0, 1], rows.size // 2)).reshape(rows.shape)
    found = []
    for states in rows:
        x = [rng.normal(size=2)]
        for k in states[1:]:
            away = 0.0 if separate else gap * k
            x.append(away + x[-1] @ slopes[k] + rng.normal(size=2) @ [[1.0, 0.5], [0.0, 1.0]])
        found.append((gap * states[0] if separate else 0.0) + np.array(x))
    return unit * torch.tensor(np.array(found)), torch.tensor(rows)


# a million deviations from the origin sums of squares are known to 1e-4 nats
@pytest.mark.filterwarnings("ignore:the loss rose by [0-9.]*e-05")
@pytest.mark.parametrize("priors", [True, False])
@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize(("gap", "unit"), [(5.0, 1e-12), (1e3, 1e12), (1e6, 1.0)])
def test_slopes_of_a_regression_are_those_of_least_squares(gap, unit, separate, priors):
    torch.set_default_dtype(torch.float64)
    values, states = regressions(gap, unit, separate)
    data = Sequences(values, torch.full((len(values),), values.size(1)))
    truth = torch.nn.functional.one_hot(states).double()  # of the other a step would have leverage
    fit = fit_em(
        TabularHMM(2, autoregressive_normal(2)), data, start=lambda *_: truth[None], priors=priors
    )
    hmm = fit.hmm(data)
    emission, weights = hmm.emission, hmm.posterior(values).state_probs[:, 1:].flatten(0, 1)
    origin = emission.origin.numpy() / unit
    past, now = (part.flatten(0, 1).numpy() / unit for part in (values[:, :-1], values[:, 1:]))
    design = np.concatenate([np.ones((len(past), 1)), past - origin], 1)
    for k, weight in enumerate(weights.T.numpy()):
        root = np.sqrt(weight)[:, None]
        best, *_ = np.linalg.lstsq(root * design, root * now, rcond=None)
        left = root * (now - design @ best)
        covariance = left.T @ left / weight.sum()
        upper = np.linalg.inv(np.linalg.qr(root * design, mode="r"))
        error = np.sqrt(np.outer((upper**2).sum(1), covariance.diagonal()))
        loc, slopes = emission.base.loc[k].numpy() / unit, emission.weights[k, 0].numpy()
        found = np.concatenate([loc[None], slopes])
        assert (np.abs(found - best) <= 0.1 * error).all()
        found = emission.base.covariance_matrix[k].numpy() / unit**2
        spread = np.outer(covariance.diagonal(), covariance.diagonal())
        error = np.sqrt((spread + covariance**2) / weight.sum())
        assert (np.abs(found - covariance) <= 0.1 * error).all()


@pytest.mark.parametrize("noise", [1.0, 1e-3])
@pytest.mark.parametrize("kind", ["separate", "in turn", "three lags"])
def test_the_deviation_of_residuals_is_at_most_that_of_the_narrowest_state(kind, noise):
    """Waves of three frequencies, and noise: values say nothing of how wide residuals are."""
    rng = np.random.default_rng(1)
    lags = 3 if kind == "three lags" else 2
    states = np.repeat(np.arange(3), 100) if kind != "in turn" else rng.integers(0, 3, 300)
    x, size = [1.0, 0.5, 0.2], 0.6 if kind == "in turn" else 0.99
    for k in states:
        x.append(2 * size * np.cos(0.5 + k) * x[-1] - size**2 * x[-2] + noise * rng.normal())
    data = torch.tensor(x[3 - lags :])[:, None].unfold(0, lags + 1, 1)
    within = residuals_within(data, 3).item()
    assert 0.1 * noise <= within <= 2.6 * noise


def test_the_scale_of_a_t_distribution_is_that_within_states():
    """Of states a thousand deviations apart a scale was once that of all data."""
    values, states = two_levels(1e3, dim=1)
    _, hmm, _ = fitted(student_t(), values[:, 0], states)
    assert (hmm.emission.scale / 1.5).log().abs().max() < 0.3


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("size", [20, 100, 5000])
@pytest.mark.parametrize("kind", ["separated", "unequal", "rounded", "repeated", "heavy tails"])
def test_the_deviation_within_states_is_at_most_that_of_the_narrowest(kind, size, count):
    """And not less than a hundredth of it, times the share of 100 observations in a state."""
    rng = np.random.default_rng(1)
    spreads = np.geomspace(1, 100 if kind == "unequal" else 1, count)
    states = np.repeat(np.arange(count), size)
    noise = (
        rng.standard_t(2.5, states.shape) if kind == "heavy tails" else rng.normal(size=len(states))
    )
    values = 30 * states * spreads.max() + spreads[states] * noise
    if kind == "rounded":
        values = values.round(1)
    if kind == "repeated":
        values = np.concatenate([values, np.full(size, values.mean() + 0.3)])
    within = moments_of(torch.tensor(values), count)[3].item()
    share = min(1.0, 100 / size)
    assert 0.02 * share <= within <= 1.6


def test_no_state_collapses():
    """In 100 problems with more states than there are, outliers, or equal numbers."""
    pyro.set_rng_seed(0)
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(2)
    for problem in range(100):
        levels, size = rng.integers(1, 4), rng.integers(15, 60)
        states = rng.permutation(np.repeat(np.arange(levels), size))
        spreads = rng.uniform(0.5, 2.0, levels)
        values = rng.uniform(1, 30) * states + spreads[states] * rng.normal(size=len(states))
        if problem % 3 == 0:
            values[rng.integers(len(values))] += 1e4
        if problem % 3 == 1:
            values = values.round(1)
        data = Sequences.from_list([torch.tensor(values)])
        fit = fit_em(TabularHMM(int(levels) + 1, normal(0)), data, num_iterations=40)
        deviation = fit.parameters["module.emission.variance"].sqrt()
        # a single number has half the deviation within states, which of few is known to a tenth
        assert deviation.min() > 0.05 * spreads.min(), problem


def test_no_component_of_a_mixture_collapses():
    """Where a component has five observations, and some one."""
    pyro.set_rng_seed(0)
    torch.set_default_dtype(torch.float64)
    rng = np.random.default_rng(2)
    for problem in range(12):
        values = rng.normal(size=(20, 2))
        if problem % 2:
            values[rng.integers(20)] += 1e4
        data = Sequences.from_list([torch.tensor(values)])
        fit = fit_em(TabularHMM(2, normal_mixture(2, num_components=2)), data, num_iterations=40)
        # those of one observation have a deviation of some tenths of that within states
        assert fit.parameters["module.emission.variance"].min().sqrt() > 0.02, problem


@pytest.mark.parametrize("gap", [10.0, 20.0])
def test_intervals_of_separated_levels_cover(gap):
    """Of 120 intervals of 95 % 114 cover, plus or minus 2.4: fewer than 104 hardly ever."""
    covered = []
    for seed in range(30):
        values, states = two_levels(gap, dim=1, seed=seed)
        data = Sequences(torch.tensor(values[:, 0])[None], torch.tensor([2 * N]))
        fit, _, _ = fitted(normal(0), values[:, 0], states)
        intervals = fit.intervals(data)
        for name, truth in (("loc", torch.tensor([0.0, gap])), ("variance", torch.tensor(2.25))):
            low, high = intervals[f"module.emission.{name}"]
            covered += ((low < truth) & (truth < high)).tolist()
    assert sum(covered) >= 104


def test_the_bayesian_criterion_finds_the_number_of_levels():
    pyro.set_rng_seed(0)
    rng = np.random.default_rng(3)
    values = rng.permutation(np.repeat([0.0, 10.0], N)) + 0.1 * rng.normal(size=2 * N)
    data = Sequences.from_list([torch.tensor(values)])
    fits = [fit_em(TabularHMM(k, normal(0)), data, restarts=4) for k in range(1, 5)]
    assert np.argmin([bic(fit, data) for fit in fits]) == 1


# A note ------------------------------------------------------------------------------------------


def test_a_prior_that_moves_an_estimate_is_noted():
    values, states = two_levels(20.0, dim=1)
    fit, _, _ = fitted(normal(0, loc=0.0, weight=0.01, rate=30.0), values[:, 0], states)
    (note,) = (note for note in fit.notes if "prior" in note)
    assert note.startswith("the prior of emission.variance moves estimates by up to 1.")
    strong = normal(0, loc=0.0, weight=20.0, concentration=1.0, rate=1.0)
    notes = fitted(strong, values[:, 0], states)[0].notes
    assert any(note.startswith("the prior of emission.loc moves") for note in notes)


# Densities and samples ---------------------------------------------------------------------------


def test_a_flat_prior_is_a_generalised_inverse_gaussian_of_index_one():
    torch.manual_seed(0)
    lower, upper = 0.3, 2.0
    prior = FlatVariance(torch.tensor(lower), torch.tensor(upper))
    known = stats.geninvgauss(1, 2 * np.sqrt(lower / upper), scale=np.sqrt(lower * upper))
    at = torch.tensor([0.01, 0.3, 1.0, 9.0])
    np.testing.assert_allclose(prior.log_prob(at), known.logpdf(at), rtol=1e-5)
    assert stats.kstest(prior.sample((2000,)).numpy(), known.cdf).pvalue > 1e-3
    matrix = FlatCovariance(torch.tensor([lower]), torch.tensor([upper]))
    torch.testing.assert_close(matrix.log_prob(at[:, None, None]), prior.log_prob(at))


@pytest.mark.parametrize("dim", [2, 5])
def test_the_constant_of_a_flat_prior_of_matrices_is_known_to_a_twentieth(dim):
    """Wishart samples are accepted as often as the constants of both differ."""
    rng = np.random.default_rng(0)
    ratio = 0.02 / dim
    samples = stats.wishart(dim + 1, np.eye(dim) / 2).rvs(20_000, random_state=rng)
    share = np.exp(-ratio * np.trace(np.linalg.inv(samples), axis1=1, axis2=2)).mean()
    flat = FlatCovariance(ratio * torch.ones(dim).double(), torch.ones(dim).double())
    at = np.eye(dim)
    wanted = stats.wishart(dim + 1, np.eye(dim) / 2).logpdf(at) - ratio * dim - np.log(share)
    assert flat.log_prob(torch.tensor(at)).item() == pytest.approx(wanted, abs=0.05)
    torch.manual_seed(0)
    mean = flat.sample((4000,)).diagonal(dim1=-2, dim2=-1).mean()
    assert mean.item() == pytest.approx((dim + 1) / 2, rel=0.1)


# Gibbs -------------------------------------------------------------------------------------------


def sweeps(family, values, chains, number):
    """Parameters of chains after a number of sweeps given the values of a single state."""
    torch.set_default_dtype(torch.float64)
    module = family(1)
    dim = values.shape[-1] if values.ndim > 1 else 0
    spread = torch.ones(dim) if dim else torch.tensor(1.0)
    module._set_spread(4 * spread, 0.5 * spread)
    shape = (chains, 1, dim) if dim else (chains, 1)
    name = next(iter(module.supports))
    eye = torch.eye(dim).expand(chains, 1, dim, dim) if dim else torch.ones(shape)
    current = {name: eye, "loc": torch.zeros(shape)}
    ones = torch.ones(1, len(values), 1)
    found = module.statistics(torch.tensor(values), ones, None)
    found = {key: sums.expand(chains, *sums.shape[1:]) for key, sums in found.items()}
    for _ in range(number):
        current = module.sample_parameters(found, current)
    return {key: value[:, 0].numpy() for key, value in current.items()}


@pytest.mark.parametrize("size", [0, 1, 2, 3, 6, 100])
def test_gibbs_samples_variances_of_their_posterior(size):
    """By quadrature, with the mean integrated out; sizes on both sides of the change of steps."""
    torch.manual_seed(size)
    values = np.random.default_rng(size).normal(1.0, 1.0, size)
    found = sweeps(normal(0), values, 500, 30)
    logs = np.linspace(-12.0, 8.0, 20_001)
    at = np.exp(logs)
    log_density = logs - 0.05 / at - at / 20.0
    if size:
        mean = values.mean()
        log_density -= (size - 1) / 2 * logs + ((values - mean) ** 2).sum() / 2 / at
        log_density += stats.norm.logpdf(mean, 0.0, np.sqrt(at / size + 400.0))
    cdf = integrate.cumulative_trapezoid(np.exp(log_density - log_density.max()), logs, initial=0)
    known = lambda value: np.interp(np.log(value), logs, cdf / cdf[-1])  # noqa: E731
    assert stats.kstest(found["variance"], known).pvalue > 1e-3
    if size == 100:
        assert (
            stats.kstest(found["loc"], stats.t(98, values.mean(), values.std() / 10).cdf)[1] > 1e-3
        )


@pytest.mark.parametrize("size", [0, 1, 3, 9])
def test_gibbs_samples_covariances_of_their_posterior(size):
    """Against samples of the prior, weighted by the likelihood with the mean integrated out."""
    torch.manual_seed(size)
    rng = np.random.default_rng(size)
    values = rng.normal(1.0, 1.0, (size, 2)) @ np.array([[1.0, 0.5], [0.0, 1.0]])
    found = sweeps(normal_full(2), values, 300, 30)
    prior = FlatCovariance(torch.full((2,), 0.05), torch.full((2,), 40.0)).sample((20_000,)).numpy()
    weights = np.ones(len(prior))
    if size:
        mean, apart = values.mean(0), values - values.mean(0)
        inverse, (_, logs) = np.linalg.inv(prior), np.linalg.slogdet(prior)
        log_weights = (
            -(size - 1) / 2 * logs - np.trace(inverse @ (apart.T @ apart), axis1=1, axis2=2) / 2
        )
        spread = prior / size + 400 * np.eye(2)
        log_weights -= np.linalg.slogdet(spread)[1] / 2 + (mean @ np.linalg.inv(spread) @ mean) / 2
        weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    effective = 1 / (weights**2).sum()
    for of in (lambda m: np.linalg.slogdet(m)[1], lambda m: np.log(m[:, 0, 0]),
               lambda m: m[:, 0, 1] / np.sqrt(m[:, 0, 0] * m[:, 1, 1])):  # fmt: skip
        sample, known = of(found["covariance"]), of(prior)
        mean = weights @ known
        spread = np.sqrt(weights @ (known - mean) ** 2)
        assert abs(sample.mean() - mean) < 4 * spread * np.sqrt(1 / 300 + 1 / effective)
        assert sample.std() / spread == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("size", [0, 1, 2, 5, 9, 100])
def test_gibbs_samples_regressions_of_their_posterior(size):
    """By quadrature over the variance; given it, numbers are jointly normal, slopes summed out."""
    torch.manual_seed(size)
    torch.set_default_dtype(torch.float64)
    rng, chains = np.random.default_rng(size), 1000
    x = [0.3]
    for _ in range(size):
        x.append(0.5 + 0.7 * x[-1] + 0.6 * rng.normal())
    windows = torch.tensor([x[:-1], x[1:]]).mT.unsqueeze(-1)
    module = autoregressive_normal(1)(1)
    module._set_spread(torch.tensor([4.0]), torch.tensor([0.5]), torch.tensor([4.0]))
    ones, zeros = torch.ones(chains, 1, 1, 1), torch.zeros(chains, 1, 1)
    current = {"covariance": ones, "loc": zeros, "weights": zeros[..., None, None]}
    current |= {"initial.covariance": ones, "initial.loc": zeros}
    sums = module.statistics(windows, torch.ones(1, size, 1), None)
    sums = {name: each.expand(chains, *each.shape[1:]) for name, each in sums.items()}
    for _ in range(30):
        current |= module.sample_parameters(sums, current)
    logs = np.linspace(-8.0, 7.0, 1501)
    design = np.stack([np.ones(size), np.array(x[:-1])], 1)
    slope_prior, log_density, means = np.diag([400.0, 1250.0]), [], []
    for v in np.exp(logs):
        joint = v * np.eye(size) + design @ slope_prior @ design.T
        gain = slope_prior @ design.T @ np.linalg.inv(joint)
        means.append(gain @ np.array(x[1:]))
        evidence = stats.multivariate_normal.logpdf(x[1:], cov=joint) if size else 0.0
        log_density.append(np.log(v) - 0.4 / v - v / 20.0 + evidence)
    weights = np.exp(np.array(log_density) - max(log_density))
    cdf = integrate.cumulative_trapezoid(weights, logs, initial=0)
    known = lambda value: np.interp(np.log(value), logs, cdf / cdf[-1])  # noqa: E731
    assert stats.kstest(current["covariance"].flatten().numpy(), known).pvalue > 1e-3
    mean = (weights / weights.sum()) @ np.array(means)
    for name, wanted in zip(("loc", "weights"), mean):
        sample = current[name].flatten().numpy()
        assert abs(sample.mean() - wanted) < 4 * sample.std() / np.sqrt(chains)


def test_units_of_data_scale_a_flat_prior():
    module = TabularHMM(2, normal(0))
    scale_priors(module, Sequences.from_list([1e6 * torch.randn(200).double()]))
    emission = module.emission
    assert 1e9 < emission.rate[0] < 1e11 < emission.upper[0] < 1e13
