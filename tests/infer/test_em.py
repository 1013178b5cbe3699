"""Properties of EM: the log joint never falls, and ends at a maximum; its reports are exact.

Log joint densities are computed from their definition: scipy's densities, sums over all paths.
"""

import math
from contextlib import nullcontext

import numpy as np
import oracle
import pyro
import pyro.distributions as dist
import pytest
import torch
from families import CASES, STATES
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from scipy import stats
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    GradientStep,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_mcmc,
    fit_svi,
    freeze,
    gamma,
    left_to_right,
    load_hmm,
    negative_binomial,
    normal,
    normal_spherical,
    normal_tied,
    poisson,
    save,
    starts,
    to_hmmlearn,
    von_mises,
)
from pyrohmm.data import packed

NAN = math.nan
INITIAL, TRANSITION = np.array([1.5, 2.0, 1.2]), 1.3 + 2 * np.eye(3)  # concentrations
LENGTHS = [5, 1, 4, 2, 5, 3]


def module_of(case):
    return TabularHMM(STATES, case.family(), torch.tensor(INITIAL), torch.tensor(TRANSITION))


def data_of(case, seed=0, lengths=LENGTHS, gaps=True):
    """Ragged sequences, some steps and components missing."""
    rng = np.random.default_rng(seed)
    values = case.values(rng, len(lengths) * max(lengths))
    if gaps and values.ndim > 1:
        values[1::8, 0], values[4::8, -1] = NAN, NAN
    values = torch.tensor(values.reshape(len(lengths), max(lengths), *values.shape[1:]))
    observed = torch.tensor(rng.random(values.shape[:2]) > 0.2) if gaps else None
    return Sequences(values, torch.tensor(lengths), observed)


def with_logs(probs):
    with np.errstate(divide="ignore"):
        return np.log(probs)


def log_joint(case, found, data, solve=oracle.by_paths, allowed=None):
    """Log joint density of the data and of the parameters ``found``, by definition."""
    emission = {n.removeprefix("emission."): v for n, v in found.items() if "emission." in n}
    initial, transition = found["initial"], found["transition"]
    total = stats.dirichlet.logpdf(initial, INITIAL)
    total += sum(stats.dirichlet.logpdf(*rows) for rows in zip(transition, TRANSITION))
    total += sum(case.prior(emission, name) for name in case.supports)
    values, observed = data.values.numpy(), data.observed.numpy()
    for n, length in enumerate(data.lengths.tolist()):
        likelihood = np.zeros((length, STATES))
        for t in range(length):
            if observed[n, t]:
                likelihood[t] = known_density(case, emission, values[n, t])
            if allowed is not None:
                likelihood[t][~allowed[n][t]] = -np.inf
        logs = with_logs(initial), with_logs(transition)[None], likelihood
        total += solve(*logs, length).evidence
    return total


def known_density(case, emission, value):
    """The density of what is known of one observation, ``(K,)``."""
    if "covariance" not in case.supports or not np.isnan(value).any():
        return case.each(emission, value[None])[0]
    known = ~np.isnan(value)
    if not known.any():
        return np.zeros(STATES)
    return np.array(
        [
            stats.norm.logpdf(value[known], loc[known], np.sqrt(np.diag(matrix)[known])).item()
            for loc, matrix in zip(emission["loc"], case.wide(emission))
        ]
    )


def numbers_of(fit, restart=None):
    """Latent variables as NumPy arrays, by their names in the module."""
    values = fit.parameters if restart is None else fit.restarts.parameters
    return {
        name.removeprefix("module."): (value if restart is None else value[restart]).numpy()
        for name, value in values.items()
    }


def start_at(values):
    """A start at given values ``(R, ...)`` or, for one restart, ``(...)``."""

    def start(module, data, restarts):
        return {
            name: torch.as_tensor(value).reshape(restarts, 1, *np.shape(value)[restarts > 1 :])
            for name, value in values.items()
        }

    return start


def sample_start(module, data, restarts=1):
    """A sample of the prior, to start from more than once."""
    found = starts.from_prior(module, data, restarts)
    return {n: v.squeeze(1) if restarts > 1 else v.reshape(v.shape[2:]) for n, v in found.items()}


def assert_climbs(losses):
    assert losses.isfinite().all()
    assert (losses[..., 1:] <= losses[..., :-1] + 1e-9 * losses.abs().max()).all()


# What EM is


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_log_joint_never_falls_and_is_what_its_definition_says(name, restarts):
    case = CASES[name]
    data = data_of(case)
    fit = fit_em(module_of(case), data, num_iterations=5, tolerance=None, restarts=restarts)
    assert not [note for note in fit.notes if "prior" not in note]  # those of the case are strong
    if restarts == 1:
        assert fit.losses.shape == (6,)
        assert fit.restarts is None
        trails, found = fit.losses[None], [numbers_of(fit)]
    else:
        assert fit.restarts.losses.shape == (3, 6)
        trails, found = fit.restarts.losses, [numbers_of(fit, r) for r in range(3)]
        assert fit.restarts.best == int(trails[:, -1].argmin())
        torch.testing.assert_close(fit.losses[-1], trails[:, -1].min())
        torch.testing.assert_close(fit.restarts.final, trails[:, -1])
    assert_climbs(trails)
    for history, point in zip(trails, found):
        assert history[-1].item() == pytest.approx(-log_joint(case, point, data), rel=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name != "angles"])
def test_it_ends_at_a_local_maximum(name):
    """By Newton's decrement; covariances of components that are missing have no Hessian."""
    data = data_of(CASES[name], gaps=name not in ("full", "shared"))
    fit = fit_em(module_of(CASES[name]), data, num_iterations=1500, tolerance=1e-14)
    assert fit.information(data).decrement < 1e-9


# Parts and minibatches


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("name", ["symbols", "plane", "full"])
def test_batching_by_length_changes_nothing(name, restarts, monkeypatch):
    case = CASES[name]
    module, data = module_of(case), data_of(case, lengths=[9, 1, 2, 8, 3, 1, 1, 2])
    begin, fits = start_at(sample_start(module, data, restarts)), []
    for least in (1 << 16, 0):
        monkeypatch.setattr(packed, "LITTLE", least)
        monkeypatch.setattr(packed, "SHORT", least)
        data = Sequences(data.values, data.lengths, data.observed, total=10)
        assert (len(data.buckets) > 1) == (least == 0)
        pyro.set_rng_seed(0)
        fits.append(
            fit_em(module, data, num_iterations=3, tolerance=None, start=begin, restarts=restarts)
        )
    together, parted = fits
    torch.testing.assert_close(parted.losses, together.losses, rtol=1e-7, atol=1e-7)
    for each, value in together.parameters.items():
        torch.testing.assert_close(parted.parameters[each], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("family", [gamma, negative_binomial])
def test_observations_of_several_buckets_are_put_together(family, dim, monkeypatch):
    """Of families without sufficient statistics: as they are, and counted by value; with gaps."""
    pyro.set_rng_seed(0)
    lengths = torch.tensor([1500, 30, 2, 31, 1, 2])
    means = 2 + 4.0 * (torch.arange(1566) // 7 % 2)
    values = dist.Gamma(4.0, 4.0 / means).sample((dim or 1,)).mT.double()
    values = values if family is gamma else torch.poisson(values)
    values = values if dim else values[:, 0]
    fits = []
    for least in (1 << 16, 0):
        monkeypatch.setattr(packed, "LITTLE", least)
        monkeypatch.setattr(packed, "SHORT", least)
        data = Sequences.from_concatenated(values, lengths, observed=torch.arange(1566) % 9 > 0)
        assert (len(data.buckets) > 1) == (least == 0)
        pyro.set_rng_seed(1)
        fits.append(fit_em(TabularHMM(2, family(dim)).double(), data, num_iterations=5,
                           tolerance=None, start=starts.by_blocks))  # fmt: skip
    together, parted = fits
    torch.testing.assert_close(parted.losses, together.losses, rtol=1e-7, atol=0)


def test_a_sequence_that_is_impossible_is_named_in_every_batch(monkeypatch):
    monkeypatch.setattr(packed, "LITTLE", 0)
    monkeypatch.setattr(packed, "SHORT", 0)
    sequences = [[0] * 9, [0], [0], [0, 1], [0, 0], [0]]
    module = TabularHMM(2, categorical(2))
    begin = {
        "initial": [0.5, 0.5],
        "transition": [[0.5, 0.5]] * 2,
        "emission.probs": [[1.0, 0]] * 2,
    }
    with pytest.raises(ValueError, match="sequence 3 has probability zero"):
        fit_em(module, Sequences.from_list(sequences), start=start_at(begin))


def test_a_minibatch_counts_for_the_whole_set():
    """Of copies of one sequence, any two stand for all six."""
    case = CASES["symbols"]
    one = data_of(case, lengths=[5], gaps=False).values
    data, module = Sequences(one.expand(6, 5), torch.full((6,), 5)), module_of(case)
    begin = start_at(sample_start(module, data))
    whole = fit_em(module, data, num_iterations=1, tolerance=None, start=begin)
    parts = fit_em(module, data, num_iterations=1, batch_size=2, start=begin)
    torch.testing.assert_close(parts.losses, whole.losses)


CHAIN = {"initial": [0.6, 0.4], "transition": [[0.7, 0.3], [0.4, 0.6]]}
ONLINE = {
    "symbols that batches lack": (
        lambda: Sequences.from_list([[0, 1, 0, 1]] * 5 + [[2, 1, 2, 1]] * 5),
        categorical(3),
        {"emission.probs": [[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]},
    ),
    "counts": (
        lambda: Sequences.from_list([[0.0, 1, 0, 9, 8, 9]] * 4 + [[9.0, 11, 8, 1, 0, 0]] * 4),
        poisson(),
        {"emission.rate": [2.0, 7.0]},
    ),
}


@pytest.mark.parametrize("name", ONLINE)
def test_online_em_reaches_the_optimum_of_batch_em(name):
    """Though the first batch lacks symbols that others have.

    Many small steps: after 40 it is still a third of the way above.
    """
    build, family, first = ONLINE[name]
    data, module, begin = build(), TabularHMM(2, family), start_at(CHAIN | first)
    whole = fit_em(module, data, start=begin, tolerance=1e-9).losses
    for size in (1, 3):
        fit = fit_em(
            module, data, start=begin, num_iterations=150, batch_size=size,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert fit.losses[-1] < whole[-1] + 0.1 * (whole[0] - whole[-1])
        assert fit.losses[-1] > whole[-1] - 1e-6


# Labels


def test_full_labels_are_counted_in_one_step():
    rng = np.random.default_rng(4)
    values, labels = rng.integers(4, size=(5, 6)), rng.integers(3, size=(5, 6))
    lengths = [6, 3, 1, 5, 6]
    data = Sequences(torch.tensor(values), torch.tensor(lengths), labels=torch.tensor(labels))
    fit = fit_em(
        TabularHMM(3, categorical(4, 1.5), 2.0, 3.0), data, num_iterations=1, tolerance=None
    )
    initial, pairs, counts = np.full(3, 1.0), np.full((3, 3), 2.0), np.full((3, 4), 0.5)
    for row, states, length in zip(values, labels, lengths):
        initial[states[0]] += 1
        np.add.at(pairs, (states[: length - 1], states[1:length]), 1)
        np.add.at(counts, (states[:length], row[:length]), 1)
    found = numbers_of(fit)
    for own, expected in (("initial", initial), ("transition", pairs), ("emission.probs", counts)):
        np.testing.assert_allclose(found[own], expected / expected.sum(-1, keepdims=True))


# States, transitions and parameters that are special


def away_from(state):
    """A start from which no sequence ever comes to ``state``; ``(K, 2)`` symbols."""
    initial, transition = np.full(3, 0.5), np.full((3, 3), 0.5)
    initial[state], transition[:, state] = 0.0, 0.0
    probs = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    return {"initial": initial, "transition": transition, "emission.probs": probs}


def coins():
    return Sequences(torch.tensor(np.random.default_rng(6).integers(2, size=(8, 6))),
                     torch.full((8,), 6))  # fmt: skip


def test_a_state_that_nothing_supports_stays_where_it_was_and_is_reported():
    begin = away_from(2)
    fit = fit_em(
        TabularHMM(3, categorical(2)),
        coins(),
        num_iterations=20,
        start=start_at(begin),
        tolerance=None,
    )
    assert_climbs(fit.losses)
    found = numbers_of(fit)
    assert all(np.isfinite(value).all() for value in found.values())
    np.testing.assert_allclose(found["emission.probs"][2], begin["emission.probs"][2])
    np.testing.assert_allclose(found["transition"][2], begin["transition"][2])
    assert found["initial"][2] == 0
    assert (found["transition"][:2, 2] == 0).all()
    assert len(fit.notes) == 1
    assert "no observation supports state 2:" in fit.notes[0]
    assert "note      no observation supports state 2" in fit.summary()


STARTS = {
    "prior": starts.from_prior,
    "k-means": starts.by_kmeans,
    "hmm": lambda module, data, restarts: starts.from_hmm(module(data.lengths))(
        module, data, restarts
    ),
}


@pytest.mark.parametrize("begin", STARTS)
@pytest.mark.parametrize("restarts", [1, 2])
def test_forbidden_transitions_stay_exactly_zero(begin, restarts):
    data = data_of(CASES["plane"])
    module = TabularHMM(
        3,
        normal(2),
        initial_allowed=torch.tensor([True, True, False]),
        transition_allowed=left_to_right(3, jump=1),
    )
    with torch.no_grad():
        fit = fit_em(module, data, num_iterations=5, start=STARTS[begin], restarts=restarts)
    found = numbers_of(fit)
    assert found["initial"][2] == 0
    assert (found["transition"][~left_to_right(3, jump=1).numpy()] == 0).all()
    np.testing.assert_allclose(found["transition"].sum(-1), 1.0)
    assert_climbs(fit.losses)


def test_zeros_of_a_given_hmm_stay_exactly_zero():
    forbidden = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    symbols = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    hmm = HMM(forbidden[0].log(), forbidden.log(), dist.Categorical(symbols), torch.tensor([1]))
    data = Sequences(torch.randint(3, (6, 5)), torch.full((6,), 5))
    found = fit_em(hmm, data, num_iterations=5).hmm(data)
    assert (found.log_transition.exp()[forbidden == 0] == 0).all()
    assert (found.log_initial.exp()[forbidden[0] == 0] == 0).all()
    assert (found.emission.probs[symbols == 0] == 0).all()


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("name", ["initial", "transition", "emission.variance", "emission.loc"])
def test_frozen_parameters_stay_and_the_loss_is_of_the_others(name, restarts):
    case = CASES["plane"]
    data, module = data_of(case), module_of(case)
    value = torch.as_tensor(sample_start(module, data)[name])
    freeze(module, name, value)
    fit = fit_em(module, data, num_iterations=5, restarts=restarts, tolerance=None)
    assert_climbs(fit.losses)
    found = numbers_of(fit)
    assert name not in found
    hmm = fit.hmm(data)
    places = {
        "initial": hmm.log_initial.exp(),
        "transition": hmm.log_transition.exp(),
        "emission.variance": hmm.emission.variance,
        "emission.loc": hmm.emission.mean,
    }
    torch.testing.assert_close(places[name], value)
    constant = {
        "initial": lambda: stats.dirichlet.logpdf(value.numpy(), INITIAL),
        "transition": lambda: sum(
            stats.dirichlet.logpdf(*rows) for rows in zip(value.numpy(), TRANSITION)
        ),
    }
    last = name.removeprefix("emission.")
    emission = {last: value.numpy()} | {n.removeprefix("emission."): v for n, v in found.items()}
    prior = constant.get(name, lambda: case.prior(emission, last))()  # which is not counted
    expected = prior - log_joint(case, found | {name: value.numpy()}, data)
    assert fit.losses[-1].item() == pytest.approx(expected, rel=1e-9)


def test_a_variance_at_its_floor_is_reported():
    values = torch.cat([torch.zeros(1, 10), torch.randn(3, 10) + 9.0]).unsqueeze(-1)
    hmm = HMM(
        torch.tensor([0.5, 0.5]).log(),
        torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log(),
        dist.Normal(torch.tensor([[0.0], [9.0]]), 1.0).to_event(1),
        torch.tensor([1]),
    )
    data = Sequences(values, torch.full((4,), 10))
    fit = fit_em(hmm, data, num_iterations=10)
    variance = fit.hmm(data).emission.variance.detach()
    assert variance[0].item() == pytest.approx(1e-12 * values.var(correction=0).item())
    assert any("variance was held at its floor" in note for note in fit.notes)


# Sizes


@pytest.mark.parametrize(("num_states", "num_steps"), [(1, 1), (1, 4), (3, 1)])
def test_one_state_and_one_step(num_states, num_steps):
    """One state: the mode of its prior and of all observations, at once."""
    values = torch.randn(5, num_steps, 2)
    data = Sequences(values, torch.full((5,), num_steps))
    fit = fit_em(TabularHMM(num_states, normal(2)), data, num_iterations=4, tolerance=None)
    assert_climbs(fit.losses)
    if num_states == 1:
        expected = values.reshape(-1, 2).mean(0)  # which is the mean of the prior, too
        torch.testing.assert_close(fit.parameters["module.emission.loc"][0], expected)
        torch.testing.assert_close(fit.losses[1:], fit.losses[1:2].expand(4))


def test_it_ends_by_its_tolerance_and_reports_it():
    case = CASES["counts"]
    data, module = data_of(case), module_of(case)
    ended = fit_em(module, data, num_iterations=600, tolerance=None).losses[-1]
    for acceleration in (None, False, True):
        pyro.set_rng_seed(0)
        fit = fit_em(module, data, tolerance=1e-6, acceleration=acceleration)
        assert fit.converged
        assert fit.reason == "the loss may fall by less than 1e-06 of itself"
        assert fit.losses[-1] - ended < 3e-6 * ended
    short = fit_em(module, data, num_iterations=2, tolerance=None)
    assert (len(short.losses), short.converged) == (3, False)
    assert short.reason == "it took all 2 steps"
    assert short.num_observed == data.num_observed


# L-BFGS ends where its loss changes by less than 1e-9, and so parameters are exact to the root of
# that, 3e-5; the loss of the next iteration has a slope of up to one for each of some 30 numbers.
BY_STEPS = {"rtol": 0.0, "atol": 1e-3}


def wrapped(family):
    """The same emission as ``family``, of a class that EM knows nothing of."""

    class Wrapped(PyroModule):
        def __init__(self, num_states):
            super().__init__()
            self.inner = family(num_states)

        def forward(self):
            return self.inner()

    return Wrapped


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("name", ["symbols", "full"])
def test_gradient_steps_do_what_the_closed_form_does(name, restarts):
    case = CASES[name]
    # where components of a full covariance are missing, the closed form is EM within EM
    data, module = data_of(case, gaps=name != "full"), module_of(case)
    begin = sample_start(module, data, restarts)
    options = {"num_iterations": 5, "tolerance": None, "restarts": restarts}
    closed = fit_em(module, data, start=start_at(begin), **options)
    other = TabularHMM(
        STATES, wrapped(case.family()), torch.tensor(INITIAL), torch.tensor(TRANSITION)
    )
    renamed = {one.replace("emission.", "emission.inner."): v for one, v in begin.items()}
    step = GradientStep(num_iterations=200)
    fit = fit_em(other, data, start=start_at(renamed), gradient_step=step, **options)
    torch.testing.assert_close(fit.losses, closed.losses, **BY_STEPS)
    for one, value in numbers_of(closed).items():
        found = numbers_of(fit)[one.replace("emission.", "emission.inner.")]
        np.testing.assert_allclose(found, value, rtol=2e-3, atol=1e-4)


class Failures(PyroModule):
    """A user's family: numbers of failures before a success, with a Beta prior."""

    def __init__(self, num_states):
        super().__init__()
        self.probs = PyroSample(dist.Beta(torch.full((num_states,), 2.0), 3.0).to_event(1))

    def forward(self):
        return dist.Geometric(self.probs)

    def statistics(self, values, weights, current):
        weights = weights.double()
        return {
            "successes": weights.sum(1),
            "failures": torch.einsum("rmk,m->rk", weights, values.double()),
        }

    def m_step(self, statistics):
        successes, failures = statistics["successes"] + 1.0, statistics["failures"] + 2.0
        return {"probs": successes / (successes + failures)}, []


def failures(**options):
    rng = np.random.default_rng(8)
    values = torch.tensor(rng.geometric(0.3 + 0.4 * (rng.random((6, 7)) < 0.5)) - 1.0)
    return Sequences(values, torch.tensor([7, 3, 7, 1, 5, 7]), **options)


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_family_of_the_users_joins_the_closed_form_by_its_two_methods(restarts):
    data, module = failures(), TabularHMM(2, Failures, 1.5, 1.5)
    begin = sample_start(module, data, restarts)
    options = {"num_iterations": 5, "tolerance": None, "restarts": restarts}

    class NoStep(GradientStep):
        def __call__(self, loss, parameters):
            raise AssertionError("nothing is left to gradient steps")

    closed = fit_em(module, data, start=start_at(begin), gradient_step=NoStep(), **options)
    other = TabularHMM(2, wrapped(Failures), 1.5, 1.5)
    renamed = {one.replace("emission.", "emission.inner."): v for one, v in begin.items()}
    step = GradientStep(num_iterations=200)
    fit = fit_em(other, data, start=start_at(renamed), gradient_step=step, **options)
    torch.testing.assert_close(fit.losses, closed.losses, **BY_STEPS)
    found = numbers_of(fit)["emission.inner.probs"]
    np.testing.assert_allclose(found, numbers_of(closed)["emission.probs"], rtol=2e-3, atol=1e-4)


class Cycle(HMMModule):
    """A user's module: a chain that stays, or goes to the next state of a ring."""

    def __init__(self, emission):
        super().__init__()
        self.stay = PyroSample(dist.Beta(torch.full((3,), 2.0), 3.0).to_event(1))
        self.emission = emission(3)

    def forward(self, lengths, observed=None):
        stay, eye = self.stay.unsqueeze(-1), torch.eye(3)
        never = (eye + eye.roll(1, -1)) == 0
        logs = torch.where(eye > 0, stay.log(), (1 - stay).log()).masked_fill(never, -torch.inf)
        return HMM(torch.full((3,), 1 / 3).log(), logs, self.emission(), lengths, observed)


class ClosedCycle(Cycle):
    """The same, with its M-step."""

    def emission_module(self):
        return self.emission

    def statistics(self, expected):
        pairs = expected.counts["log_transition"]  # (R, K, K)
        return {"stay": pairs.diagonal(dim1=-2, dim2=-1), "all": pairs.sum(-1)}

    def m_step(self, statistics):
        return {"stay": (statistics["stay"] + 1.0) / (statistics["all"] + 3.0)}, []


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("closed", [True, False], ids=["closed emission", "other emission"])
def test_a_module_of_the_users_joins_the_closed_form_by_its_two_methods(closed, restarts):
    data = failures()
    module = ClosedCycle(Failures if closed else wrapped(Failures))
    begin = sample_start(module, data, restarts)
    options = {"num_iterations": 5, "tolerance": None, "restarts": restarts}
    options["gradient_step"] = GradientStep(num_iterations=200)
    fit = fit_em(module, data, start=start_at(begin), **options)
    assert_climbs(fit.losses)
    other = Cycle(Failures if closed else wrapped(Failures))  # all by gradient
    expected = fit_em(other, data, start=start_at(begin), **options)
    torch.testing.assert_close(fit.losses, expected.losses, **BY_STEPS)
    for one, value in numbers_of(expected).items():
        np.testing.assert_allclose(numbers_of(fit)[one], value, rtol=2e-3, atol=1e-4)


def test_the_m_step_of_a_users_chain_is_its_counts_and_prior():
    states = torch.tensor([[0, 0, 1, 1, 2, 0], [2, 2, 0, 1, 1, 2]])
    data = Sequences(torch.zeros(2, 6), torch.tensor([6, 6]), labels=states)
    fit = fit_em(ClosedCycle(Failures), data, num_iterations=1, tolerance=None)
    stayed, left = torch.tensor([1.0, 2.0, 1.0]), torch.tensor([2.0, 2.0, 2.0])
    torch.testing.assert_close(fit.parameters["module.stay"], (stayed + 1) / (stayed + left + 3))


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("constrained", "without gradient"),
        ("constrained", "fitted"),
        ("plain", "frozen"),
        ("plain", "fitted"),
    ],
)
def test_an_m_step_sets_points_unless_they_are_frozen(kind, point):
    class Points(ClosedCycle):
        def __init__(self):
            super().__init__(Failures)
            del self.stay
            value = torch.tensor([0.3, 0.5, 0.8])
            if kind == "plain":
                self.stay = torch.nn.Parameter(value)
            else:
                self.stay = PyroParam(value, constraints.unit_interval)

        def m_step(self, statistics):
            return {"stay": statistics["stay"] / statistics["all"]}, []

    module, data = Points(), failures()
    before = module.stay.detach().clone()
    if point == "frozen":
        freeze(module, "stay")
    elif point == "without gradient":
        module.stay_unconstrained.requires_grad_(False)
    fit = fit_em(module, data, num_iterations=3, tolerance=None)
    after = fit.hmm(data).log_transition.diagonal().exp()
    if point == "fitted":
        fit = fit_em(module, data, num_iterations=200, tolerance=1e-12)
        counts = fit.hmm(data).expected_counts(data.values).counts["log_transition"]
        stay = fit.hmm(data).log_transition.diagonal().exp()
        close = {"rtol": 0.0, "atol": 1e-3}
        torch.testing.assert_close(stay, counts.diagonal() / counts.sum(-1), **close)
    else:
        torch.testing.assert_close(after, before)


# Starts


def test_where_a_fitted_hmm_begins_is_one_step_of_it():
    case = CASES["plane"]
    data, module = data_of(case), module_of(case)
    begin = sample_start(module, data)
    first = fit_em(module, data, num_iterations=3, tolerance=None, start=start_at(begin))
    point = fit_em(module, data, num_iterations=1, tolerance=None, start=start_at(begin))
    hmm = HMM(
        torch.tensor(begin["initial"].numpy()).log(),
        begin["transition"].log(),
        dist.Normal(begin["emission.loc"], begin["emission.variance"].sqrt()).to_event(1),
        torch.tensor([1]),
    )
    from_it = fit_em(module, data, num_iterations=2, tolerance=None, start=starts.from_hmm(hmm))
    torch.testing.assert_close(from_it.losses, first.losses[1:])
    torch.testing.assert_close(from_it.losses[0], point.losses[1])
    wide = fit_em(
        module, data, num_iterations=2, tolerance=None, restarts=2, start=starts.from_hmm(hmm)
    )
    torch.testing.assert_close(wide.restarts.losses, first.losses[1:].expand(2, 3))


# What it leaves alone


def test_the_module_is_not_changed_by_the_fit():
    case = CASES["plane"]
    data, module = data_of(case), module_of(case)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first = fit_em(module, data, num_iterations=2)
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    kept = first.hmm(data).log_transition.clone()
    fit_em(module, data, num_iterations=2)
    torch.testing.assert_close(first.hmm(data).log_transition, kept, rtol=0.0, atol=0.0)
    assert list(pyro.get_param_store().keys()) == []


# Errors


def plain(values, **options):
    return Sequences(values, torch.full((len(values),), values.shape[1]), **options)


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_fitted_in_float32(name):
    torch.set_default_dtype(torch.float32)
    data = data_of(CASES[name])
    values = data.values.float() if data.values.is_floating_point() else data.values
    data = Sequences(values, data.lengths, data.observed)
    module = module_of(CASES[name]).float()
    fit = fit_em(module, data, num_iterations=5, restarts=2)
    assert fit.losses.isfinite().all()
    assert all(value.dtype == torch.float32 for value in fit.parameters.values())


def test_a_part_of_a_larger_set_counts_for_all_of_it():
    data = plain(torch.randint(0, 3, (4, 6)), total=400)
    module = TabularHMM(2, categorical(3, 5.0))
    fit = fit_em(module, data, num_iterations=10, tolerance=None)
    assert_climbs(fit.losses)
    hundredfold = plain(data.values.repeat(100, 1))
    start = starts.from_hmm(fit.hmm(data))
    one = fit_em(module, data, num_iterations=3, tolerance=None, start=start)
    other = fit_em(module, hundredfold, num_iterations=3, tolerance=None, start=start)
    torch.testing.assert_close(one.losses, other.losses)


@pytest.mark.parametrize("name", ["initial", "transition", "emission.probs"])
def test_a_prior_of_ones_own_is_obeyed(name):
    """The closed forms know the priors of this package; others go by gradient."""
    pyro.set_rng_seed(0)
    data = Sequences.from_list([[0, 1, 2, 1, 0], [2, 2, 1], [0, 0, 1, 2]])
    module = TabularHMM(2, categorical(3))
    part = module.emission if "." in name else module
    rows = getattr(part, name.rpartition(".")[2]).shape
    prior = dist.Dirichlet(torch.full(rows, 4.0)).to_event(len(rows) - 1)
    setattr(part, name.rpartition(".")[2], PyroSample(prior))
    fit = fit_em(module, data, num_iterations=300, tolerance=1e-9)
    assert (fit.losses[1:] - fit.losses[:-1]).max() < 1e-3
    counts = fit.hmm(data).expected_counts(data.values)
    each = torch.nn.functional.one_hot(data.values, 3).to(fit.parameters["module.initial"])
    expected = {
        "initial": counts.counts["log_initial"],
        "transition": counts.counts["log_transition"],
        "emission.probs": torch.einsum("ntk,ntv->kv", counts.state_probs, each),
    }[name] + 3.0  # the mode: counts and those of the prior
    mode = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(fit.parameters[f"module.{name}"], mode, rtol=0, atol=2e-3)


SHARING = {
    "spherical": (
        normal_spherical(2),
        dist.Normal(torch.randn(2, 2), torch.ones(2, 1)).to_event(1),
    ),
    "tied": (normal_tied(2), dist.MultivariateNormal(torch.randn(2, 2), torch.eye(2))),
}


@pytest.mark.parametrize("kind", SHARING)
def test_what_stands_for_several_states_or_components_stays_one(kind, tmp_path):
    """Of an HMM that was fitted, and of one that was saved: EM goes on with one parameter."""
    family, emission = SHARING[kind]
    even = torch.full((2, 2), 0.5).log()
    data = Sequences(
        torch.randn(3, 6, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([6, 6, 2])
    )
    save(HMM(even[0], even, emission, torch.tensor([1])), tmp_path / "built")
    fitted = fit_em(TabularHMM(2, family), data, num_iterations=2).hmm(data)
    for hmm in (load_hmm(tmp_path / "built"), fitted):
        found = fit_em(hmm, data, num_iterations=2).hmm(data)
        assert to_hmmlearn(found.with_lengths(torch.tensor([1]))).covariance_type == kind
        spread = found.emission.variance
        across = {"spherical": spread.mT, "tied": spread}[kind]
        torch.testing.assert_close(across, across[:1].expand_as(across), rtol=1e-6, atol=0)


def test_sites_that_are_no_latent_variables_are_no_part_of_the_loss():
    class Noted(TabularHMM):
        def forward(self, lengths, observed=None):
            hmm = super().forward(lengths, observed)
            pyro.deterministic("stay", hmm.log_transition.diagonal(dim1=-2, dim2=-1), event_dim=1)
            return hmm

    data = Sequences.from_list([[0, 1, 1, 0, 2, 2], [2, 2, 1]])
    losses = []
    for module in (TabularHMM(2, categorical(3)), Noted(2, categorical(3))):
        pyro.set_rng_seed(0)
        losses.append(fit_em(module, data, num_iterations=5, restarts=3).losses)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        (categorical(6), torch.tensor([1, 2, 5, 3]), "symbol 0 never occurs, and 5 does"),
        (categorical(6), torch.tensor([1, 2, 4, 3]), None),
        (von_mises(0), torch.tensor([1.0, 359.0, 90.0]), "angles reach 359: are they degrees"),
        (von_mises(0), torch.tensor([-3.0, 6.2]), None),
        (normal(0), torch.tensor([torch.nan, torch.nan]), "no step is observed"),
    ],
)
def test_what_the_data_hardly_mean_is_noted(family, values, words):
    data = Sequences.from_list([values])
    model = MarginalModel(TabularHMM(1, family))
    few = {"num_samples": 2, "warmup": 2}
    for run in (
        lambda: fit_em(TabularHMM(1, family), data, num_iterations=1),
        lambda: fit_map(model, data, num_iterations=2),
        lambda: fit_svi(model, AutoNormal(model), data, num_iterations=2),
        lambda: fit_mcmc(model, data, **few),
        lambda: fit_gibbs(TabularHMM(1, family), data, **few),
    ):
        with pytest.warns(match=words) if "degrees" in str(words) else nullcontext():
            fit = run()
        doubts = [n for n in fit.notes if "never" in n or "degrees" in n or "no step" in n]
        assert len(doubts) == (words is not None)
        assert words is None or words in doubts[0]
