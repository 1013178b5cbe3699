"""Where EM begins: restarts of several kinds, of which more are never worse than fewer."""

import numpy as np
import pyro
import pytest
import torch

from pyrohmm import (
    MarginalModel,
    RegressionHMM,
    Sequences,
    StationaryHMM,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    additive_normal,
    autoregressive_normal,
    categorical,
    fit_em,
    fit_gibbs,
    fit_map,
    free_durations,
    normal,
    normal_full,
    poisson,
    starts,
)
from pyrohmm.infer import em


def path(rng, num_steps, transition):
    """A path of a Markov chain, from state 0."""
    states = [0]
    while len(states) < num_steps:
        states.append(rng.choice(len(transition), p=transition[states[-1]]))
    return np.array(states)


def lasting(num_states, stay):
    return stay * np.eye(num_states) + (1 - stay) / num_states


# Kinds


def some_numbers(dim=0, num=4, num_steps=30, **further):
    rng = np.random.default_rng(0)
    shape = (num, num_steps, *[dim] * bool(dim))
    high = rng.random((num, num_steps)) > 0.5
    values = rng.normal(size=shape) + 3 * high.reshape(num, num_steps, *[1] * bool(dim))
    return Sequences(torch.tensor(values), torch.full((num,), num_steps), **further)


def with_covariates():
    covariates = np.random.default_rng(2).normal(size=(4, 30, 1))
    return some_numbers(covariates=torch.tensor(covariates))


def some_symbols():
    rng = np.random.default_rng(1)
    return Sequences(torch.tensor(rng.integers(3, size=(4, 30))), torch.full((4,), 30))


CHAINS = {
    "Markov": (lambda: TabularHMM(2, normal(0)), some_numbers),
    "vectors": (lambda: TabularHMM(2, normal_full(2)), lambda: some_numbers(2)),
    "autoregressive": (lambda: TabularHMM(2, autoregressive_normal(1)), lambda: some_numbers(1)),
    "symbols": (lambda: TabularHMM(2, categorical(3)), some_symbols),
    "semi-Markov": (lambda: TabularHSMM(2, normal(0), free_durations(5)), some_numbers),
    "second order": (lambda: TabularSecondOrderHMM(2, normal(0)), some_numbers),
    "product": (
        lambda: TabularFactorialHMM((2, 2), additive_normal((2, 2), 2)),
        lambda: some_numbers(2),
    ),
    "continuous time": (
        lambda: TabularContinuousTimeHMM(2, normal(0)),
        lambda: some_numbers(times=torch.arange(30.0).expand(4, -1)),
    ),
    "stationary": (lambda: StationaryHMM(2, normal(0)), some_numbers),
    "regression": (
        lambda: RegressionHMM(2, normal(0), [0], prior_scale=1.0),
        with_covariates,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_restarts_begin_apart_and_climb(name):
    make, data = CHAINS[name]
    losses = fit_em(make(), data(), restarts=6, num_iterations=2, tolerance=None).restarts.losses
    assert losses.isfinite().all()
    assert (losses[:, 1:] <= losses[:, :-1] + 1e-6).all()
    assert len(losses[:, 0].round(decimals=6).unique()) >= 4
    assert fit_em(make(), data(), num_iterations=3).losses.isfinite().all()


def test_blocks_last_and_leave_no_state_out():
    data = some_numbers()
    probs = starts.by_blocks(TabularHMM(2, normal(0)), data, 3)
    assert probs.shape == (3, 4, 30, 2)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 4, 30).double())
    assert probs.min() > 0
    blocks = probs.argmax(-1).reshape(3, 4, -1)
    assert (blocks.diff(dim=-1) != 0).sum(-1).max() <= 3  # of eight steps, the last of six


def test_windows_are_pieces_of_the_sequences():
    rng = np.random.default_rng(0)
    lengths = torch.tensor([500, 3, 120, 77])
    steps = torch.arange(500).expand(4, -1) + 1000 * torch.arange(4).unsqueeze(-1)
    data = Sequences(
        steps.double(), lengths, torch.tensor(rng.random((4, 500)) > 0.1), labels=steps % 3
    )
    assert starts.windows(data, 700) is data
    some = starts.windows(data, 200)
    assert 100 <= int(some.lengths.sum()) <= 250
    assert some.num_steps == 25
    for n, length in enumerate(some.lengths.tolist()):
        row = some.values[n, :length].long()
        assert (row.diff() == 1).all()
        first = int(row[0])
        sequence, step = divmod(first, 1000)
        assert int(some.indices[n]) == sequence
        assert step + length <= lengths[sequence]
        assert torch.equal(some.observed[n, :length], data.observed[sequence, step : step + length])
        assert torch.equal(some.labels[n, :length], data.labels[sequence, step : step + length])
    assert not some.observed[~some.exists].any()


def test_starts_look_at_some_rows_and_those_of_a_users_own_at_all(monkeypatch):
    data, make = small_problem(0)
    monkeypatch.setattr(starts, "MOST_ROWS", 40)
    sizes, counts = [], starts.uniform_counts

    def spied(hmm, some, found):
        sizes.append(int(some.lengths.sum()))
        return counts(hmm, some, found)

    monkeypatch.setattr(starts, "uniform_counts", spied)
    for start in (starts.by_kmeans, starts.by_blocks):
        assert fit_em(make(), data, start=start, restarts=3).losses.isfinite().all()
    fit_em(make(), data, start=lambda *given: starts.by_kmeans(*given), restarts=3)
    assert max(sizes[:2]) <= 50
    assert sizes[2] == 120
    fit = fit_gibbs(make(), data, num_samples=2, warmup=0, num_chains=4)
    assert len(fit.stats["lp"][:, 0].unique()) == 4


@pytest.mark.parametrize("options", [{"start": starts.by_blocks, "restarts": 3}, {"restarts": 5}])
def test_a_symbol_that_no_start_has_seen_stays_possible(options, monkeypatch):
    for name in ("MOST_ROWS", "MOST_STEPS"):
        monkeypatch.setattr(starts, name, 40)
    for seed in range(3):
        pyro.set_rng_seed(seed)
        symbols = torch.randint(3, (6, 30))
        symbols[3, 17] = 3
        module = TabularHMM(2, categorical(4))
        fit = fit_em(module, Sequences(symbols), num_iterations=2, **options)
        assert fit.restarts.losses.isfinite().all()


@pytest.mark.parametrize(("num_rows", "kinds"), [(400, 400), (400, 20)])
def test_clusters_of_many_states_begin_at_random_rows(num_rows, kinds):
    pyro.set_rng_seed(0)
    values = torch.randn(kinds, 2)[torch.randint(kinds, (num_rows,))]
    probs = starts.by_kmeans(TabularHMM(70, normal(2)), Sequences.from_concatenated(values), 2)
    states = probs.argmax(-1)
    assert len(states[0].unique()) > 60
    assert (states[0] != states[1]).any()


# What they find


def volatility(seed):
    """Regimes that differ in their variance alone, and the parameters they have."""
    rng = np.random.default_rng(seed)
    chain, scale = lasting(3, 0.97), np.array([0.5, 1.5, 4.0])
    values = rng.normal(size=1000) * scale[path(rng, 1000, chain)]
    found = {"emission.loc": np.zeros(3), "emission.variance": scale**2}
    return values, lambda: TabularHMM(3, normal(0)), chain, found


def switching(seed):
    """Regimes that differ in how a step depends on the one before it."""
    rng = np.random.default_rng(seed)
    slopes = np.array([-0.8, 0.2, 0.95])
    values, states = np.zeros((1000, 1)), path(rng, 1000, lasting(3, 0.97))
    for t in range(1, 1000):
        values[t] = slopes[states[t]] * values[t - 1] + 0.8 * rng.normal()
    return values, lambda: TabularHMM(3, autoregressive_normal(1))


def best_of_blocks(module, data):
    """From random blocks alone, of which each begins elsewhere."""
    pyro.set_rng_seed(100)
    return fit_em(module, data, start=starts.by_blocks, restarts=12).losses[-1]


@pytest.mark.parametrize("regimes", [volatility, switching])
def test_eight_restarts_find_regimes_of_equal_mean(regimes):
    values, make, *_ = regimes(0)
    data = Sequences(torch.tensor(values).unsqueeze(0), torch.tensor([1000]))
    best = best_of_blocks(make(), data)
    for options in ({"restarts": 8}, {}):
        pyro.set_rng_seed(0)
        assert fit_em(make(), data, **options).losses[-1] < best + 1.0


def small_problem(seed):
    rng = np.random.default_rng(seed)
    num_states = int(rng.integers(2, 4))
    chain = lasting(num_states, rng.choice([0.2, 0.9]))
    states = np.stack([path(rng, 40, chain) for _ in range(3)])
    if seed % 2:
        faces = rng.dirichlet(np.ones(5), size=num_states)
        values = np.array([[rng.choice(5, p=faces[z]) for z in row] for row in states])
        return Sequences(torch.tensor(values), torch.full((3,), 40)), lambda: TabularHMM(
            num_states, categorical(5)
        )
    values = rng.normal(size=num_states)[states] * 2 + rng.normal(size=states.shape)
    return Sequences(torch.tensor(values), torch.full((3,), 40)), lambda: TabularHMM(
        num_states, normal(0)
    )


@pytest.mark.parametrize("seed", range(10))
def test_more_restarts_are_never_worse_than_one(seed):
    data, make = small_problem(seed)
    ends = []
    for options in ({"restarts": 1}, {"restarts": 2}, {"restarts": 8}, {}):
        pyro.set_rng_seed(seed)
        ends.append(fit_em(make(), data, **options).losses[-1].item())
    one, two, eight, by_default = ends
    slack = 2e-6 * abs(one)  # of the tolerance
    assert two <= one + slack
    assert eight <= one + slack
    assert by_default <= one + slack


def test_the_first_of_several_restarts_is_the_only_one_of_one():
    """Step by step, accelerated or not, whatever the others do."""
    data, make = small_problem(1)
    pyro.set_rng_seed(4)
    one = fit_em(make(), data, restarts=1, tolerance=1e-8)
    for restarts in (2, 9):
        pyro.set_rng_seed(4)
        first = fit_em(make(), data, restarts=restarts, tolerance=1e-8).restarts.losses[0]
        count = min(len(first), len(one.losses))
        assert count > 18
        torch.testing.assert_close(first[:count], one.losses[:count], rtol=1e-7, atol=1e-7)


def test_large_data_are_ranked_by_some_of_them(monkeypatch):
    data, make = small_problem(0)
    sizes, fit_once = [], em.Loop.run

    def run(loop, *progress):
        sizes.append((int(loop.parameters.data.lengths.sum()), loop.parameters.restarts))
        fit_once(loop, *progress)

    monkeypatch.setattr(em.Loop, "run", run)
    monkeypatch.setattr(starts, "MOST_STEPS", 50)
    fit = fit_em(make(), data, restarts=8)
    assert all(steps <= 60 for steps, _ in sizes[:-1])
    assert sizes[-1] == (120, 8)
    later = fit.restarts.losses[:, 2] != fit.restarts.losses[:, 1]
    assert later.sum() <= 2  # the others were given up at once
    pyro.set_rng_seed(0)
    one = fit_em(make(), data, restarts=1).losses[-1]
    pyro.set_rng_seed(0)
    assert fit_em(make(), data, restarts=8).losses[-1] <= one * (1 + 2e-6)


@pytest.mark.parametrize("seed", range(4))
def test_by_default_large_data_end_no_higher_than_from_one_start(seed):
    """Of more steps than starts are ranked by: the first goes on beside the best of a sample."""
    data, make = small_problem(seed)
    data = Sequences(data.values.repeat(20, 1), data.lengths.repeat(20))
    assert int(data.lengths.sum()) > starts.MOST_STEPS
    ends = []
    for options in ({"restarts": 1}, {}, {"restarts": 2}):
        pyro.set_rng_seed(seed)
        ends.append(fit_em(make(), data, **options))
    one, *others = (fit.losses[-1].item() for fit in ends)
    assert all(end <= one + 2e-6 * abs(one) for end in others)
    first = ends[1].restarts.losses[0]  # which has been given up for no other but a better one
    count = min(len(first), len(ends[0].losses), 12)
    torch.testing.assert_close(first[:count], ends[0].losses[:count], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_start_that_fails_is_passed_over_but_no_mistake(error, monkeypatch):
    """Data may not suit a start; sizes that do not match are a mistake in a module."""

    def failing(module, data, restarts):
        raise error("no such start")

    monkeypatch.setattr(starts, "by_blocks", failing)
    data, make = small_problem(0)
    if error is ValueError:
        assert fit_em(make(), data, num_iterations=3).restarts is None
    else:
        with pytest.raises(error, match="no such start"):
            fit_em(make(), data, num_iterations=3)


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_whose_other_starts_fail_is_resumed_by_the_same_call(seed, monkeypatch, tmp_path):
    def failing(module, data, restarts):
        raise ValueError("no such start")

    monkeypatch.setattr(starts, "by_blocks", failing)
    data, make = small_problem(0)
    path = tmp_path / "x"
    fits = []
    for options in ({"num_iterations": 3, "checkpoint": path}, {"checkpoint": path}, {}):
        pyro.set_rng_seed(seed)
        fits.append(fit_em(make(), data, **{"num_iterations": 6} | options))
    _, again, whole = fits
    assert len(whole.losses) > len(fits[0].losses)
    torch.testing.assert_close(again.losses, whole.losses, rtol=1e-12, atol=0.0)


def test_a_large_model_has_one_start_and_says_so(monkeypatch):
    monkeypatch.setattr(starts, "MOST_NUMBERS", 10)
    data, make = small_problem(1)
    fit = fit_em(make(), data)
    assert fit.restarts is None
    assert any("one start was tried" in note for note in fit.notes)
    assert not any("one start" in note for note in fit_em(make(), data, restarts=1).notes)


@pytest.mark.parametrize(
    "options",
    [
        {"restarts": 1},
        {"start": starts.from_prior},
        {"tolerance": None, "num_iterations": 3},
        {"batch_size": 2, "num_iterations": 3},
    ],
)
def test_one_start_is_one_fit(options):
    data, make = small_problem(1)
    assert fit_em(make(), data, **options).restarts is None


def test_values_that_the_user_gave_are_where_it_starts():
    data = some_symbols()
    module = TabularHMM(2, categorical(3))
    hmm = module(torch.tensor([3]))
    fit = fit_em(hmm, data)
    assert fit.restarts is None
    begin = hmm.replace(lengths=data.lengths).log_prob(data.values).sum()
    torch.testing.assert_close(fit.losses[0], -begin)
    again = fit_em(module, data, start=fit_em(module, data))
    assert again.restarts is None


def test_fits_start_where_a_fit_ended():
    data = some_symbols()
    ended = fit_em(TabularHMM(2, categorical(3)), data, num_iterations=2)
    model = MarginalModel(TabularHMM(2, categorical(3)))
    again = [fit_map(model, data, num_iterations=1, start=start) for start in (ended, ended.start)]
    again.append(fit_em(TabularHMM(2, categorical(3)), data, num_iterations=1, start=ended))
    for fit in again:
        assert fit.losses[0] == pytest.approx(ended.losses[-1].item(), abs=1e-3)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_lone_winner_is_noted(stuck):
    """States that begin alike stay alike."""
    values, make, chain, found = volatility(0)
    data = Sequences(torch.tensor(values).unsqueeze(0), torch.tensor([1000]))
    begin = {name: torch.tensor(value).expand(2, 3).clone() for name, value in found.items()}
    begin |= {"initial": torch.full((3,), 1 / 3), "transition": torch.tensor(chain)}
    if stuck:
        begin["emission.variance"][1] = 5.0
    fit = fit_em(make(), data, restarts=2, start=begin)
    assert fit.converged
    assert (fit.restarts.final[1] > fit.restarts.final[0] + 1) == stuck
    assert any("of 2 restarts came within 1 nat" in note for note in fit.notes) == stuck


@pytest.mark.parametrize("family", [poisson(), normal(0)])
def test_parts_of_data_have_several_starts_too(family):
    data = some_numbers(0)
    counts = Sequences(data.values.abs().round(), data.lengths)
    parts = [counts[:2], counts[2:]]
    pyro.set_rng_seed(0)
    fit = fit_em(TabularHMM(2, family), parts)
    assert fit.restarts is not None
    assert fit.losses.isfinite().all()
