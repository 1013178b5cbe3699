"""Covariates of rates and of durations: sums over all paths, written in NumPy and SciPy."""

import itertools

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from pyro.infer.autoguide import AutoNormal
from scipy.linalg import expm
from scipy.optimize import minimize
from scipy.stats import norm, poisson

from pyrohmm import (
    MarginalModel,
    RegressionHMM,
    Sequences,
    TabularContinuousTimeHMM,
    TabularHSMM,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    freeze,
    normal,
    poisson_durations,
    regression,
    starts,
)

EXACT = torch.tensor([False, False, True])


def visits(count=40, seed=0, num_steps=6):
    """Visits of subjects; the covariate changes from visit to visit, death is seen at its time."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, num_steps))
    times = generator.exponential(1.0, size=(count, num_steps)).cumsum(1)
    lengths = generator.integers(1, num_steps + 1, size=count)
    states = np.zeros((count, num_steps), dtype=int)
    for n, t in itertools.product(range(count), range(1, num_steps)):
        move = expm(numpy_rates(np.array([-1.5, 0.8, -1.0, 0.0, -2.0, 0.5]), x[n, t - 1])
                    * (times[n, t] - times[n, t - 1]))  # fmt: skip
        states[n, t] = generator.choice(3, p=move[states[n, t - 1]] / move[states[n, t - 1]].sum())
        if states[n, t] == 2:
            lengths[n] = min(lengths[n], t + 1)
    covariates = torch.as_tensor(np.stack([np.ones_like(x), x], -1))
    return Sequences(torch.as_tensor(states), torch.as_tensor(lengths), covariates=covariates,
                     times=torch.as_tensor(times))  # fmt: skip


def numpy_rates(beta, x):
    """0 to 1, 1 to 0 and 1 to 2, log-linear in x."""
    a, b, c = np.exp(beta[::2] + beta[1::2] * x)
    return np.array([[-a, a, 0.0], [b, -b - c, c], [0.0, 0.0, 0.0]])


def numpy_loss(beta, data):
    """Minus log-likelihood of states that are seen as they are; the last at its very time."""
    total = 0.0
    for n, length in enumerate(data.lengths.tolist()):
        for t in range(1, length):
            rates = numpy_rates(beta, data.covariates[n, t - 1, 1].item())
            move = expm(rates * float(data.times[n, t] - data.times[n, t - 1]))
            i, j = data.values[n, t - 1 : t + 1].tolist()
            total += np.log(move[i, j] if j < 2 else move[i, 1] * rates[1, 2])
    return -total


def of_rates(**options):
    allowed = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 1]]).bool()
    module = RegressionHMM(3, categorical(3), rates=[0, 1], transition_allowed=allowed,
                           exact_entry=EXACT, **options).double()  # fmt: skip
    freeze(module, "emission.probs", torch.eye(3).double())
    freeze(module, "initial.coefficients", torch.full((2, 1), -40.0).double())
    return module


def test_rates_have_the_maximum_of_a_likelihood_of_matrix_exponentials():
    pyro.set_rng_seed(0)
    data, module = visits(), of_rates()
    place = np.array([-1.2, 0.3, -0.9, 0.1, -1.8, 0.2])
    module.rates.coefficients = torch.as_tensor(place)
    hmm = module(data.lengths, None, data.covariates, data.times)
    assert -hmm.log_prob(data.values).sum().item() == pytest.approx(numpy_loss(place, data))
    found = minimize(numpy_loss, place, (data,), method="BFGS")
    fit = fit_em(module, data, tolerance=1e-12)
    module = fit.model.module
    assert fit.losses[-1].item() == pytest.approx(found.fun, abs=1e-4)
    np.testing.assert_allclose(module.rates.coefficients.detach(), found.x, atol=2e-3)
    assert not any("rose" in note for note in fit.notes)
    rows = fit.table(data)
    assert "rates 1 → 2: column 1" in rows["parameter"]
    bands = fit.bands(data, [[1.0, -1.0], [1.0, 1.0]], of="rates")
    np.testing.assert_allclose(
        bands.value[1, 1, 2], numpy_rates(module.rates.coefficients.detach().numpy(), 1.0)[1, 2]
    )
    assert bool((bands.lower[:, 0, 1] < bands.value[:, 0, 1]).all())
    moves = fit.bands(data, [[1.0, -1.0]], of=lambda hmm: hmm.transition_at(torch.ones(1)))
    assert moves.value.shape == (1, 1, 1, 3, 3)
    hmm = fit.hmm(data)
    with pytest.raises(ValueError, match="needs rates that do not change with the step"):
        hmm.stationary()


def test_constant_rates_are_those_of_a_tabular_chain():
    """T = 1 included; and an intercept begins at a fit without covariates."""
    data = visits(count=30, seed=1)
    allowed = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 0, 0]]).bool()
    plain = TabularContinuousTimeHMM(3, categorical(3), rate_time=1e-9, transition_allowed=allowed,
                                     exact_entry=EXACT)  # fmt: skip
    freeze(plain, "emission.probs", torch.eye(3))
    bare = Sequences(data.values, data.lengths, times=data.times)
    rates = torch.tensor([[0.0, 0.2, 0.0], [0.4, 0.0, 0.1], [0.0, 0.0, 0.0]])
    start = {"initial": torch.tensor([1.0, 0.0, 0.0]), "rates": rates}
    first = fit_em(plain, bare, tolerance=1e-9, start=start).hmm(bare)
    module = of_rates().begin_at(first)
    hmm = module(data.lengths, None, data.covariates, data.times)
    torch.testing.assert_close(hmm.rates[0, 0], first.rates.double(), atol=1e-6, rtol=1e-4)
    counts, wanted = (each.expected_counts(data.values).counts["rates"] for each in (hmm, first))
    assert counts.shape == (30, 5, 3, 3)
    torch.testing.assert_close(counts.sum((0, 1)).float(), wanted.float(), rtol=1e-3, atol=1e-3)


def seasons(num_sequences=60, seed=0):
    """Segments whose mean duration depends on a covariate of the sequence."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=num_sequences)
    lengths = generator.integers(5, 30, size=num_sequences)
    values = np.zeros((num_sequences, 30))
    for n in range(num_sequences):
        steps, state = [], int(generator.random() < 0.5)
        while len(steps) < 30:
            mean = np.exp(0.5 + 0.6 * x[n]) if state == 0 else np.exp(1.2)
            steps += [state] * (1 + min(generator.poisson(mean), 9))
            state = 1 - state
        values[n] = 4.0 * np.array(steps[:30]) + generator.normal(size=30)
    covariates = np.stack([np.ones((num_sequences, 30)), np.broadcast_to(x[:, None], (60, 30))], -1)
    return Sequences(torch.as_tensor(values), torch.as_tensor(lengths),
                     covariates=torch.as_tensor(covariates))  # fmt: skip


def of_durations(size=2, **options):
    emission = regression(Normal, loc=None, scale=None)
    return RegressionHMM(size, emission, durations=regression(Poisson, rate=[0, 1]),
                         max_duration=10, **options).double()  # fmt: skip


def test_durations_sum_over_all_segmentations():
    """Short sequences, the last segment cut; three states, whose transitions have a covariate."""
    pyro.set_rng_seed(1)
    x = torch.tensor([0.3, -1.0]).double().reshape(2, 1, 1).expand(2, 5, 1)
    covariates = torch.cat([torch.ones_like(x), x], -1)
    data = Sequences(torch.randn(2, 5).double(), torch.tensor([5, 1]), covariates=covariates)
    family = regression(Poisson, rate=[0, 1])
    module = RegressionHMM(3, normal(0), [0, 1], [0, 1], durations=family, max_duration=4).double()
    for name, value in (("loc", [0.0, 1.0, 2.0]), ("variance", [1.0, 1.0, 1.0])):
        freeze(module.emission, name, torch.tensor(value).double())
    hmm = module(data.lengths, None, data.covariates)
    moves = module.transition.table(module.transition.coefficients).detach().numpy()
    assert module.transition.coefficients.shape == (6,)
    for n, length in enumerate([5, 1]):
        z = covariates[n, 0].numpy()
        start = np.exp(np.append(0.0, module.initial.coefficients.detach().numpy() @ z))
        logits = moves @ z
        matrix = np.zeros((3, 3))
        for i in range(3):
            others = [j for j in range(3) if j != i]
            matrix[i, others] = np.exp(logits[i]) / np.exp(logits[i]).sum()
        rate = np.exp(module.duration.rate.coefficients.detach().numpy() @ z)
        lasts = poisson.pmf(np.arange(4), rate[:, None])
        lasts = lasts / lasts.sum(1, keepdims=True)
        like = norm.pdf(data.values[n, :, None].numpy(), np.arange(3.0))
        total = 0.0
        for path in itertools.product(range(3), repeat=length):
            runs = [(k, len(list(group))) for k, group in itertools.groupby(path)]
            p = (start / start.sum())[path[0]]
            for place, (k, run) in enumerate(runs):
                final = place == len(runs) - 1
                p *= lasts[k, run - 1 :].sum() if final else (lasts[k, run - 1] if run < 5 else 0)
                p *= 1.0 if final else matrix[k, runs[place + 1][0]]
            total += p * np.prod([like[t, k] for t, k in enumerate(path)])
        assert hmm.log_prob(data.values)[n].item() == pytest.approx(np.log(total))


def test_durations_are_fitted_by_em_and_by_gradients():
    pyro.set_rng_seed(0)
    data = seasons()
    bare = Sequences(data.values, data.lengths)
    plain = fit_em(TabularHSMM(2, normal(0), poisson_durations(10)), bare, restarts=2)
    hmm = plain.hmm(bare)
    module = of_durations().begin_at(hmm.permute_states(hmm.emission.mean.argsort()))
    start = module.duration.rate.coefficients.detach()
    lasts = hmm.permute_states(hmm.emission.mean.argsort()).log_duration.exp()
    rate = torch.arange(10).double() @ lasts.double().mT  # cut at D: the mean is below the rate
    assert bool((start[:, 0].exp() >= rate - 1e-3).all())
    fit = fit_em(module, data, tolerance=1e-10)
    assert bool((fit.losses.diff() <= 1e-8).all())
    found = fit.model.module.duration.rate.coefficients.detach()
    assert fit.losses[-1] < plain.losses[-1] - 10
    information = fit.information(data)
    assert information.decrement < 1e-4
    errors = information.std_errors()["module.duration.rate.coefficients"]
    truth = torch.tensor([[0.5, 0.6], [1.2, 0.0]]).double()
    assert bool(((found - truth).abs() < 3 * errors).all())
    bands = fit.bands(data, [[1.0, 0.0], [1.0, 1.0]], of="duration")
    assert bool((bands.lower < bands.value).all())
    assert bands.value[0, 0] == pytest.approx(1 + found[0, 0].exp().item(), rel=0.02)
    other = of_durations()
    other.load_state_dict({n: v + 0.1 * n.startswith("duration")
                           for n, v in fit.model.module.state_dict().items()})  # fmt: skip
    by_steps = fit_map(MarginalModel(other), data, num_iterations=300, learning_rate=0.02)
    np.testing.assert_allclose(other.duration.rate.coefficients.detach(), found, atol=0.02)
    assert by_steps.losses[-1].item() == pytest.approx(fit.losses[-1].item(), abs=0.1)


def test_priors_restarts_and_both_chains() -> None:
    pyro.set_rng_seed(0)
    data, lasting = visits(count=8), seasons()[:4]
    timed = RegressionHMM(2, categorical(3), rates=[0, 1], prior_scale=1.0).double()
    family = regression(Poisson, rate=[0, 1], prior_scale=1.0)
    slow = RegressionHMM(2, normal(0), durations=family, max_duration=6, prior_scale=1.0).double()
    for module, some, chain in ((timed, data, "rates"), (slow, lasting, "log_duration")):
        model = MarginalModel(module)
        fit = fit_map(model, some, restarts=3, num_iterations=3)
        assert fit.restarts.hmm(some).chain.parameters[chain].shape[:2] == (3, len(some))
        em = fit_em(module, some, restarts=3, num_iterations=10)
        assert bool((em.losses.diff() <= 1e-4).all())
        fit_svi(model, AutoNormal(model), some, num_iterations=2)


COUNTS = regression(Poisson, rate=[0, 2], prior_scale=1.0)
LASTING = {"durations": regression(Poisson, rate=[0, 1], prior_scale=1.0), "max_duration": 6}
LEFT = torch.tensor([[0, 1, 1], [1, 0, 1], [0, 1, 0]]).bool()  # transitions that are possible

# arguments of a module of three states, and its parts with coefficients
KINDS = {
    "transitions": ((normal(0), [0, 2], [0, 1]), {}, ["transition"]),
    "some transitions": (
        (normal(0), [0, 2]), {"transition_allowed": LEFT | torch.eye(3).bool()}, ["transition"],
    ),
    "rates": ((normal(0), None, [0, 1]), {"rates": [0, 2]}, ["rates"]),
    "some rates": (
        (COUNTS,), {"rates": [0, 2], "transition_allowed": LEFT | torch.eye(3).bool()},
        ["rates", "emission.rate"],
    ),
    "durations": ((normal(0), [0, 1]), LASTING, ["transition", "duration.rate"]),
    "some durations": (
        (COUNTS, [0, 1], [0, 1]), LASTING | {"transition_allowed": LEFT},
        ["transition", "duration.rate", "emission.rate"],
    ),
    "two parameters": (
        (regression(Normal, loc=[0, 2], scale=[0, 2], prior_scale=1.0), [0, 2]), {},
        ["transition", "emission.loc", "emission.scale"],
    ),
    "symbols": (
        (regression(Categorical, num_symbols=4, logits=[0, 2], prior_scale=1.0), [0, 2]), {},
        ["transition", "emission.logits"],
    ),
}  # fmt: skip


def of_all_kinds(dtype):
    """Numbers that are counts and symbols too, with times, missing steps and T = 1."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 12, 2, generator=generator).double()
    x[..., 0] = x[:, :1, 0]
    states = (torch.rand(4, 12, generator=generator) < 0.3).cumsum(-1) % 3
    values = torch.poisson(1.0 + 3.0 * states, generator=generator).clamp(max=3)
    return Sequences(
        values.to(dtype), torch.tensor([12, 1, 7, 12]),
        torch.rand(4, 12, generator=generator) < 0.9,
        covariates=torch.cat([torch.ones(4, 12, 1).double(), x], -1),
        times=torch.rand(4, 12, generator=generator).double().cumsum(-1),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_starts_are_ranked_whatever_is_frozen(kind, monkeypatch):
    """Restarts are what they are one by one, and the default has several."""
    # one of each kind, for few iterations
    monkeypatch.setitem(starts.ROUNDS, False, ((6, 2), (4, 2)))
    given, options, parts = KINDS[kind]
    data = of_all_kinds(torch.long if kind == "symbols" else torch.double)
    for frozen in ([], ["initial"], parts):
        module = RegressionHMM(3, *given, prior_scale=1.0, **options).double()
        for part in frozen:
            shape = module.get_submodule(part).coefficients.shape
            freeze(module, f"{part}.coefficients", 0.3 * torch.randn(shape).double())
        by_default = fit_em(module, data, num_iterations=2)
        assert len(by_default.restarts.final) == 4
        begin = starts.from_prior(module, data, 2)
        once = {"num_iterations": 2, "tolerance": None}
        fit = fit_em(module, data, restarts=2, start=begin, **once)
        for r in range(2):
            own = {name: value[r, 0] for name, value in begin.items()}
            alone = fit_em(module, data, restarts=1, start=own, **once)
            torch.testing.assert_close(fit.restarts.losses[r], alone.losses)
