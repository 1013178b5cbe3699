"""Properties of the emission families: M-steps are maxima of the densities in families.py.

Shapes: M observations, K states, R restarts.
"""

import math
from itertools import product

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from families import CASES, STATES, Mixture, call, put, random_covariance
from pyro import poutine
from scipy import stats

from pyrohmm import (
    Sequences,
    TabularHMM,
    bernoulli,
    categorical,
    emissions,
    fit_em,
    freeze,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    parametric,
    poisson,
    starts,
    streams,
    tied,
)
from pyrohmm.distributions.observation import Streams, Tied
from pyrohmm.nn import normals
from pyrohmm.nn.family import Emission

NAN = math.nan
PARAMETERS = [(name, one) for name, case in CASES.items() for one in case.supports]


# What tests do with a case


def draw_weights(rng, restarts, size):
    return rng.dirichlet(np.ones(STATES), size=(restarts, size))


def m_step(module, values, weights, current=None):
    statistics = module.statistics(torch.tensor(values), torch.tensor(weights), current)
    found, notes = module.m_step(statistics)
    return {name: value.detach().numpy() for name, value in found.items()}, notes


def current_of(case, rng):
    """A distribution the weights may have been computed with, and its parameters."""
    module, parameters = case.family()(STATES), case.sample(rng, STATES)
    put(module, parameters)
    return call(module), parameters


def objective(case, found, values, weights, priors, parameters=None):
    """Log prior of the parameters ``priors``, and the expected log-likelihood.

    For a mixture, of the component as well, by its posterior under ``parameters``.
    """
    if isinstance(case, Mixture):
        scores = case.each_component(parameters, values)
        shares = np.exp(scores - np.logaddexp.reduce(scores, -1, keepdims=True))
        total = (weights[..., None] * shares * case.each_component(found, values)).sum()
    else:
        total = (weights * case.each(found, values)).sum()
    return total + sum(case.prior(found, name) for name in priors)


def step_inside(space, value, direction, step):
    """``value`` after a step in its space."""
    if space == "real":
        return value + step * direction
    if space == "positive":
        return value * np.exp(step * direction)
    if space == "unit":
        odds = value / (1 - value) * np.exp(step * direction)
        return odds / (1 + odds)
    if space == "simplex":
        changed = value * np.exp(step * direction)
        return changed / changed.sum(-1, keepdims=True)
    root = np.linalg.cholesky(value)
    turn = np.eye(value.shape[-1]) + step * direction
    changed = root @ turn @ np.swapaxes(root @ turn, -1, -2)
    return (changed + np.swapaxes(changed, -1, -2)) / 2


def assert_maximum(case, found, free, score, rng):
    """No step of the parameters ``free`` raises ``score``, whose gradient there is zero."""
    top = score(found)
    assert np.isfinite(top)
    for _ in range(6):
        directions = {name: rng.normal(size=found[name].shape) for name in free}

        def at(step, directions=directions):
            changed = {
                n: step_inside(case.supports[n], found[n], d, step) for n, d in directions.items()
            }
            return score(found | changed)

        for step in (-0.5, -0.03, 0.03, 0.5):
            assert at(step) < top + 1e-9 * abs(top)
        slope = (at(1e-4) - at(-1e-4)) / 2e-4
        bend = (2 * top - at(1e-2) - at(-1e-2)) / 1e-4
        assert abs(slope) < 1e-5 * max(bend, 1.0)


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_has_the_density_of_its_family(name):
    case, rng = CASES[name], np.random.default_rng(1)
    emission, parameters = current_of(case, rng)
    values = case.values(rng, 7)
    event = (1,) * (np.ndim(values) - 1)
    wide = torch.tensor(values).reshape(7, 1, *values.shape[1:])
    assert len(emission.event_shape) == len(event)
    scores = emission.log_prob(wide).detach()
    np.testing.assert_allclose(scores, case.each(parameters, values), rtol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_the_prior_has_the_density_of_its_family(name):
    case, rng = CASES[name], np.random.default_rng(2)
    module, parameters = case.family()(STATES), case.sample(rng, STATES)
    values = {name: torch.tensor(value) for name, value in parameters.items()}
    trace = poutine.trace(poutine.condition(module, data=values)).get_trace()
    trace.compute_log_prob()
    sites = {n: site for n, site in trace.nodes.items() if site["type"] == "sample"}
    assert set(sites) == set(case.supports)
    for site, node in sites.items():
        assert node["value"].shape == parameters[site].shape
        assert node["log_prob"].shape == ()
        assert node["log_prob"].item() == pytest.approx(case.prior(parameters, site), rel=1e-9)


# The M-step


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
@pytest.mark.parametrize("kind", ["priors", "points"])
def test_a_frozen_parameter_stays_and_the_others_are_the_best_beside_it(name, parameter, kind):
    case, rng = CASES[name], np.random.default_rng(4)
    module = case.family()(STATES)
    emission, parameters = current_of(case, rng)
    if kind == "points":
        put(module, parameters)
        freeze(module, parameter)
    else:
        freeze(module, parameter, torch.tensor(parameters[parameter]))
    values, weights = case.values(rng, 30), draw_weights(rng, 2, 30)
    found, _ = m_step(module, values, weights, emission)
    free = [one for one in case.supports if one != parameter]
    assert set(found) >= set(free)
    *path, last = parameter.split(".")
    kept = getattr(module.get_submodule(".".join(path)), last)
    np.testing.assert_allclose(kept, parameters[parameter], rtol=1e-12)
    assert f"{parameter}" in module.state_dict()
    if not free:
        return
    for restart in range(2):
        one = {name: value[restart] for name, value in found.items()} | {
            parameter: parameters[parameter]
        }

        def score(point, weights=weights[restart]):
            return objective(
                case, point, values, weights, free if kind == "priors" else [], parameters
            )

        assert_maximum(case, one, free, score, rng)


@pytest.mark.parametrize("parameter", ["variance", "loc"])
def test_a_parameter_with_a_prior_beside_a_point(parameter):
    """Only what has a prior pays for it."""
    case, rng = CASES["plane"], np.random.default_rng(5)
    module, parameters = case.family()(STATES), case.sample(rng, STATES)
    put(module, {parameter: parameters[parameter]})
    values, weights = case.values(rng, 30), draw_weights(rng, 1, 30)
    found, _ = m_step(module, values, weights)
    one = {name: value[0] for name, value in found.items()}
    priors = [name for name in case.supports if name != parameter]

    def score(point):
        return objective(case, point, values, weights[0], priors)

    assert_maximum(case, one, list(case.supports), score, rng)


@pytest.mark.parametrize("name", [name for name in CASES if name != "sharing"])
def test_a_state_without_observations_stands_at_the_mode_of_its_prior(name):
    case, rng = CASES[name], np.random.default_rng(6)
    module = case.family()(STATES)
    emission, parameters = current_of(case, rng)
    values, weights = case.values(rng, 30), draw_weights(rng, 1, 30)
    weights[..., 0] += weights[..., 1]
    weights[..., 1] = 0.0
    found, notes = m_step(module, values, weights, emission)
    assert notes == []
    one = {name: value[0] for name, value in found.items()}
    assert all(np.isfinite(value).all() for value in one.values())

    def score(point):
        return objective(case, point, values, weights[0], list(case.supports), parameters)

    assert_maximum(case, one, list(case.supports), score, rng)


@pytest.mark.parametrize("name", [name for name in CASES if name != "sharing"])
def test_without_priors_only_a_state_without_observations_is_not_known(name):
    case, rng = CASES[name], np.random.default_rng(7)
    module = case.family()(STATES)
    emission, parameters = current_of(case, rng)
    put(module, parameters)
    values, weights = case.values(rng, 30), draw_weights(rng, 2, 30)
    weights[..., 1] = 0.0
    found, notes = m_step(module, values, weights, emission)
    assert notes == []
    for parameter, value in found.items():
        if name == "shared" and parameter == "covariance":
            assert np.isfinite(value).all()
            continue
        assert np.isnan(value[:, 1]).all()
        assert np.isfinite(value[:, [0, 2]]).all()


# Floors


def floored(name):
    """A module without priors, and data of which state 1 owns one value twice over."""
    case, rng = CASES[name], np.random.default_rng(8)
    module, parameters = case.family()(STATES), case.sample(rng, STATES)
    put(module, parameters)
    values, weights = case.values(rng, 20), np.zeros((1, 20, STATES))
    values[1] = values[0]
    weights[0, :2, 1], weights[0, 2:11, 0], weights[0, 11:, 2] = 1.0, 1.0, 1.0
    return module, values, weights


@pytest.mark.parametrize("name", ["number", "plane", "ball"])
def test_a_variance_is_held_at_a_small_share_of_that_of_the_data(name):
    module, values, weights = floored(name)
    found, notes = m_step(module, values, weights)
    total = np.var(values, axis=0)
    expected = normals.SMALLEST * (total.mean() if name == "ball" else total)
    np.testing.assert_allclose(found["variance"][0, 1], expected, rtol=1e-9)
    assert (found["variance"][0, [0, 2]] > 1e-3).all()
    assert len(notes) == 1
    assert "variance was held at its floor, 1e-12" in notes[0]


def test_a_covariance_is_held_at_a_small_share_of_that_of_the_data():
    module, values, weights = floored("full")
    found, notes = m_step(module, values, weights)
    floor = normals.SMALLEST * np.var(values, axis=0)
    np.testing.assert_allclose(found["covariance"][0, 1], np.diag(floor), rtol=1e-6, atol=1e-18)
    assert "covariance was held at its floor" in notes[0]
    for state, rows in ((0, values[2:11]), (2, values[11:])):
        np.testing.assert_allclose(found["covariance"][0, state], np.cov(rows.T, bias=True))


def test_values_on_a_line_lift_only_the_flat_direction():
    values = np.outer(np.linspace(-1, 1, 12), [1.0, 2.0])
    module = normal_tied(2)(1)
    put(module, {"loc": np.zeros((1, 2)), "covariance": np.eye(2)})
    found, notes = m_step(module, values, np.ones((1, 12, 1)))
    variances = np.var(values, axis=0)
    unit = np.sqrt(normals.SMALLEST * variances)
    low, high = np.linalg.eigvalsh(found["covariance"][0] / np.outer(unit, unit))
    assert low == pytest.approx(1, abs=1e-3)  # of 2e12, which rounding leaves twelve digits of
    assert high == pytest.approx(2 / normals.SMALLEST)
    assert len(notes) == 1


def test_a_component_of_a_mixture_is_held_at_its_floor():
    module = normal_mixture(1, num_components=2)(1)
    parameters = {
        "weights": np.full((1, 2), 0.5),
        "loc": np.array([[[0.0], [100.0]]]),
        "variance": np.ones((1, 2, 1)),
    }
    put(module, parameters)
    values = np.concatenate([np.linspace(-1, 1, 9), [100.0]])[:, None]
    found, notes = m_step(module, values, np.ones((1, 10, 1)), call(module))
    assert found["variance"][0, 0, 1, 0] == pytest.approx(normals.SMALLEST * np.var(values))
    assert found["variance"][0, 0, 0, 0] == pytest.approx(np.var(values[:9]))
    assert len(notes) == 1


# Missing components


@pytest.mark.parametrize("name", ["bits", "counts", "plane", "ball", "mixture", "several"])
@pytest.mark.parametrize("kind", ["priors", "points"])
def test_independent_components_that_are_missing_do_not_count(name, kind):
    case, rng = CASES[name], np.random.default_rng(9)
    module = case.family()(STATES)
    emission, parameters = current_of(case, rng)
    if kind == "points":
        put(module, parameters)
    values, weights = case.values(rng, 40), draw_weights(rng, 2, 40)
    gaps = rng.random(values.shape) < 0.3
    gaps[gaps.all(1)] = False
    values[gaps] = NAN
    found, _ = m_step(module, values, weights, emission)
    priors = list(case.supports) if kind == "priors" else []
    for restart in range(2):
        one = {name: value[restart] for name, value in found.items()}

        def score(point, weights=weights[restart]):
            return objective(case, point, values, weights, priors, parameters)

        assert_maximum(case, one, list(case.supports), score, rng)


def expectation(loc, matrix, value):
    """Mean of x and of its outer product given what of ``value`` is known: sums over a grid."""
    gaps = np.isnan(value)
    whole = np.array(value)
    if not gaps.any():
        return whole, np.outer(whole, whole)
    line = np.linspace(-16, 16, 241)
    points = np.array(list(product(line, repeat=int(gaps.sum()))))
    filled = np.broadcast_to(whole, (len(points), len(whole))).copy()
    filled[:, gaps] = points
    density = np.exp(stats.multivariate_normal.logpdf(filled, loc, matrix))
    density = density / density.sum()
    return density @ filled, np.einsum("p,pd,pe->de", density, filled, filled)


@pytest.mark.parametrize("kind", ["full", "tied"])
@pytest.mark.parametrize("restarts", [1, 2])
def test_missing_components_of_a_full_covariance_are_expected(kind, restarts):
    rng = np.random.default_rng(10)
    values = rng.normal(size=(6, 3))
    for row, gap in ((0, [1]), (1, [0, 2]), (2, [0]), (3, [1]), (4, [1, 2])):
        values[row, gap] = NAN
    weights = rng.dirichlet(np.ones(2), size=(restarts, 6))
    loc = rng.normal(size=(restarts, 1, 2, 3))
    states = 1 if kind == "tied" else 2
    matrix = random_covariance(rng, (restarts, 1, states), 3)
    if restarts == 1:
        loc, matrix = loc[0, 0], matrix[0, 0]
    current = dist.MultivariateNormal(torch.tensor(loc), torch.tensor(matrix))
    module = (normal_tied if kind == "tied" else normal_full)(3)(2)
    found = module.statistics(torch.tensor(values), torch.tensor(weights), current)
    loc = np.broadcast_to(loc.reshape(restarts, 2, 3), (restarts, 2, 3))
    matrix = np.broadcast_to(matrix.reshape(restarts, states, 3, 3), (restarts, 2, 3, 3))
    for r, k in product(range(restarts), range(2)):
        each = [expectation(loc[r, k], matrix[r, k], value) for value in values]
        sums = sum(w * mean for w, (mean, _) in zip(weights[r, :, k], each))
        squares = sum(w * square for w, (_, square) in zip(weights[r, :, k], each))
        # the grid's end is six standard deviations away
        total = found["squares"][r, k]
        np.testing.assert_allclose(total[0, 1:], sums, atol=1e-5)
        np.testing.assert_allclose(total[1:, 1:], squares, atol=1e-5)
        assert total[0, 0].item() == pytest.approx(weights[r, :, k].sum())


@pytest.mark.parametrize("name", ["full", "shared"])
def test_at_the_start_missing_components_are_the_means_of_what_is_known(name):
    case, rng = CASES[name], np.random.default_rng(11)
    values, weights = case.values(rng, 12), draw_weights(rng, 2, 12)
    values[::3, 0] = NAN
    filled = np.where(np.isnan(values), np.nanmean(values, 0), values)
    module = case.family()(STATES)
    found, expected = m_step(module, values, weights)[0], m_step(module, filled, weights)[0]
    for parameter, value in found.items():
        np.testing.assert_allclose(value, expected[parameter])


@pytest.mark.parametrize("part", ["full", "mixture", "plane", "bits", "counts"])
def test_a_stream_that_says_nothing_at_a_step_does_not_count_there(part):
    """As if that step were not there for that stream."""
    case, rng = CASES[part], np.random.default_rng(12)
    module = streams(categorical(4), case.family())(STATES)
    alone = case.family()(STATES)
    emission, _ = current_of(case, rng)
    joined = Streams([dist.Categorical(torch.ones(STATES, 4)), emission])
    symbols, vectors = rng.integers(4, size=15).astype(float), case.values(rng, 15)
    weights = draw_weights(rng, 2, 15)
    absent = np.arange(15) % 4 == 1
    values = np.column_stack([symbols, vectors])
    values[absent, 1:] = NAN
    found, _ = m_step(module, values, weights, joined)
    expected, _ = m_step(alone, vectors[~absent], weights[:, ~absent], emission)
    for name, value in expected.items():
        np.testing.assert_allclose(found[f"parts.1.{name}"], value)
    counted = m_step(categorical(4)(STATES), symbols.astype(int), weights)[0]["probs"]
    np.testing.assert_allclose(found["parts.0.probs"], counted)


def test_an_observation_of_a_mixture_is_shared_out_by_its_components():
    case, rng = CASES["mixture"], np.random.default_rng(16)
    module = case.family()(STATES)
    emission, parameters = current_of(case, rng)
    values, weights = case.values(rng, 9), draw_weights(rng, 1, 9)
    found = module.statistics(torch.tensor(values), torch.tensor(weights), emission)
    found = {name: value.detach().numpy() for name, value in found.items()}
    scores = case.each_component(parameters, values)
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        found["counts"][0], np.einsum("mk,mkc->kc", weights[0], shares), rtol=1e-9
    )
    np.testing.assert_allclose(
        found["sums"][0],
        np.einsum("mk,mkc,md->kcd", weights[0], shares, values - module.centre.numpy()),
        rtol=1e-9,
    )


# Distributions made modules


@pytest.mark.parametrize("name", CASES)
def test_a_distribution_makes_the_module_that_builds_it(name):
    case, rng = CASES[name], np.random.default_rng(18)
    emission, parameters = current_of(case, rng)
    module = emissions.from_distribution(emission)
    assert isinstance(module, Emission)
    values = torch.tensor(case.values(rng, 6))
    wide = values.reshape(6, 1, *values.shape[1:])
    torch.testing.assert_close(call(module).log_prob(wide), emission.log_prob(wide))
    assert not poutine.trace(module).get_trace().stochastic_nodes
    weights = torch.tensor(draw_weights(rng, 1, 6))
    found, _ = module.m_step(module.statistics(values, weights, emission))
    given = case.family()(STATES)
    put(given, parameters)
    expected, _ = given.m_step(given.statistics(values, weights, emission))
    shared = name in ("ball", "shared", "sharing")  # which a distribution does not tell
    for parameter in [p for p in expected if not shared or p.endswith("loc")]:
        torch.testing.assert_close(found[parameter], expected[parameter])


def test_emissions_that_no_state_uses_stay_as_they_are():
    emission = Tied(dist.Poisson(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([1, 0]))
    module = emissions.from_distribution(emission)
    values, weights = torch.tensor([4.0, 6.0]), torch.eye(2).unsqueeze(0)
    found, _ = module.m_step(module.statistics(values, weights, emission))
    assert found["part.rate"][0, :2].tolist() == [6.0, 4.0]
    assert found["part.rate"][0, 2].isnan()


# Arguments


@pytest.mark.parametrize("name", ["symbols", "bits", "count", "mixture"])
def test_a_prior_without_a_mode_is_refused(name):
    families = {
        "symbols": categorical(4, torch.tensor([0.5, 1.0, 1.0, 1.0])),
        "bits": bernoulli(2, 0.5),
        "count": poisson(concentration=0.5),
        "mixture": normal_mixture(2, num_components=2, weights_concentration=0.5),
    }
    case, rng = CASES[name], np.random.default_rng(19)
    with pytest.raises(ValueError, match=r"concentration below one .* got 0.5. Use fit_svi"):
        m_step(families[name](STATES), case.values(rng, 5), draw_weights(rng, 1, 5))


def test_what_is_frozen_is_a_constant_of_the_module():
    module = normal(2)(STATES)
    loc = torch.randn(STATES, 2)
    freeze(module, "loc", loc)
    assert sorted(poutine.trace(module).get_trace().stochastic_nodes) == ["variance"]
    assert list(module.parameters()) == []
    kept = loc.clone()
    loc.zero_()
    torch.testing.assert_close(module().mean, kept)
    assert (module.is_free("loc"), module.is_free("variance")) == (False, True)


# Frozen parameters


def test_parts_are_frozen_by_their_path():
    module = streams(categorical(3), tied(poisson(), [0, 1, 0]))(STATES)
    freeze(module, "parts.1.part.rate", torch.tensor([1.0, 2.0]))
    freeze(module, "parts.0.probs", torch.full((3, 3), 1 / 3))
    assert poutine.trace(module).get_trace().stochastic_nodes == []
    assert module().parts[1].mean.tolist() == [1.0, 2.0, 1.0]


# Numbers far from zero, and far apart


@pytest.mark.parametrize("offset", [5e6, 1.7e9])
@pytest.mark.parametrize("family", [normal, normal_full, normal_tied, normal_spherical])
@pytest.mark.parametrize("kind", ["prior", "points"])
def test_variances_do_not_cancel_far_from_zero(offset, family, kind):
    rng = np.random.default_rng(19)
    values, weights = rng.normal(size=(50, 2)), draw_weights(rng, 1, 50)[..., :2]
    values = np.round(values * 64) / 64  # exact, also beside the offset
    near, far = (family(2, loc=shift)(2) for shift in (0.0, offset))
    if kind == "points":
        space = near.covariance if hasattr(near, "degrees") else near.variance
        for module, shift in ((near, 0.0), (far, offset)):
            name = "covariance" if hasattr(module, "degrees") else "variance"
            module.set_points(**{name: space.abs(), "loc": torch.zeros(2, 2) + shift})
    one, _ = m_step(near, values, weights)
    other, notes = m_step(far, values + offset, weights)
    assert notes == []
    np.testing.assert_allclose(other["loc"] - offset, one["loc"], atol=1e-6)
    for name in {"variance", "covariance"} & set(one):
        np.testing.assert_allclose(other[name], one[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_states_far_apart_keep_their_small_variances(kind):
    rng = np.random.default_rng(20)
    values = np.concatenate([rng.normal(0, 0.1, (30, 1)), rng.normal(1000, 0.1, (30, 1))])
    weights = np.zeros((1, 60, 2))
    weights[0, :30, 0] = weights[0, 30:, 1] = 1.0
    module = normal(1)(2) if kind == "diagonal" else normal_full(1)(2)
    name = "variance" if kind == "diagonal" else "covariance"
    shape = (2, 1) if kind == "diagonal" else (2, 1, 1)
    module.set_points(**{name: torch.ones(shape), "loc": torch.tensor([[0.0], [1000.0]])})
    found, notes = m_step(module, values, weights)
    assert notes == []
    expected = [values[:30].var(), values[30:].var()]
    lost = 30 * np.finfo(float).eps * 500**2 / 0.1**2  # thirty squares about the centre are added
    np.testing.assert_allclose(found[name].flatten(), expected, rtol=lost)


def test_columns_in_other_units_keep_their_covariance():
    rng = np.random.default_rng(21)
    values = rng.normal(size=(60, 2)) @ np.array([[1.0, 0.3], [0.0, 1.0]]) * [1e4, 1e-2]
    module = normal_full(2)(1)
    module.set_points(covariance=torch.eye(2)[None], loc=torch.zeros(1, 2))
    found, notes = m_step(module, values, np.ones((1, 60, 1)))
    assert notes == []
    np.testing.assert_allclose(found["covariance"][0, 0], np.cov(values.T, bias=True), rtol=1e-9)


def test_columns_that_are_the_same_to_rounding_are_named():
    """In float32, with a prior that would let them be: there is no inverse to compute with."""
    rng = np.random.default_rng(22)
    column = rng.normal(size=(40, 1))
    values = np.concatenate([column, column + 1e-6 * rng.normal(size=(40, 1))], 1)
    module = normal_full(2, scale=1e-12)(1).float()
    found, notes = m_step(module, values, np.ones((1, 40, 1)))
    assert "numerically singular in torch.float32" in notes[0]
    torch.linalg.cholesky(torch.as_tensor(found["covariance"]).float())


@pytest.mark.parametrize(("name", "kind"), [("bits", torch.bool), ("plane", torch.int32)])
def test_whole_numbers_are_taken_as_numbers(name, kind):
    values = torch.randint(0, 2, (3, 5, 2))
    data = Sequences(values.to(kind), torch.full((3,), 5))
    fit = fit_em(
        TabularHMM(2, CASES[name].family()), data, num_iterations=2, start=starts.by_kmeans
    )
    assert fit.losses.isfinite().all()
    emission = fit.hmm(data)
    torch.testing.assert_close(emission.log_prob(data.values), emission.log_prob(values.double()))


def test_families_with_nothing_to_see_stay_where_they_are():
    nothing = Sequences(torch.zeros(2, 3, 2), torch.full((2,), 3), torch.zeros(2, 3).bool())
    for family in (normal_mixture(2, num_components=2), normal_full(2), normal(2), bernoulli(2)):
        assert fit_em(TabularHMM(2, family), nothing, num_iterations=3).losses.isfinite().all()


# Any distribution: fitted as what it is, or refused by name -------------------------------------


def test_any_distribution_with_priors_has_restarts():
    pyro.set_rng_seed(0)
    data = Sequences.from_list([torch.cat([torch.randn(30) - 4, torch.randn(30) + 4])])
    start = dist.Normal(torch.zeros(2), torch.ones(2))
    family = parametric(start, loc=dist.Normal(0.0, 5.0), scale=dist.Gamma(2.0, 1.0))
    fit = fit_em(TabularHMM(2, family), data, restarts=3)
    found = fit.parameters["module.emission.loc"].sort().values
    wanted = torch.stack([part.mean() for part in data.values[0].split(30)])
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=0.1)
    assert len(fit.restarts.final) == 3
