"""Gibbs sampling against exact posteriors, and what a user can do wrong."""

from functools import partial

import numpy as np
import oracle
import pyro
import pytest
import torch
from pyro.distributions import Dirichlet
from pyro.nn import PyroSample

from pyrohmm import (
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    TabularHSMM,
    categorical,
    fit_gibbs,
    fit_mcmc,
    free_durations,
    normal,
    normal_full,
    normal_mixture,
    poisson,
    streams,
    tied,
)
from pyrohmm.infer.sampled import agreement
from pyrohmm.nn.family import build_emission


def close_to(samples, wanted, standard_errors=5.0):
    """Whether the mean of chains ``(C, S, ...)`` is the one that is wanted."""
    found = agreement(samples)
    error = samples.double().flatten(0, 1).std(0) / found.bulk.nan_to_num(1.0).sqrt()
    apart = (samples.double().mean((0, 1)) - torch.as_tensor(wanted)).abs()
    assert bool((apart <= standard_errors * error + 1e-6).all()), (apart, error)


def test_posterior_means_are_those_of_the_sum_over_all_paths():
    """Ragged, with a gap and a label, priors that tell the states apart."""
    pyro.set_rng_seed(0)
    values = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    observed = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 0, 0]]).bool()
    labels = torch.tensor([[-1, -1, 1, -1], [-1, -1, -1, 0], [-1, 0, 0, 0]])
    lengths = torch.tensor([4, 3, 1])
    data = Sequences(values, lengths, observed=observed, labels=labels)
    initial, transition, emission = [1.0, 2.0], [[0.5, 1.5], [1.0, 3.0]], [[2.0, 1.0], [0.7, 4.0]]
    module = TabularHMM(
        2,
        categorical(2, torch.tensor(emission)),
        torch.tensor(initial),
        torch.tensor(transition),
    )
    fit = fit_gibbs(module, data, num_samples=600, warmup=50)
    _, wanted = oracle.by_tables(
        data, [np.array([initial]), np.array(transition), np.array(emission)]
    )
    wanted[0] = wanted[0][0]
    for name, mean in zip(("initial", "transition", "emission.probs"), wanted):
        close_to(fit.chains[f"module.{name}"], mean)
    assert any("known" in note for note in fit.notes)


def test_lp_is_the_log_joint_density_of_the_samples():
    pyro.set_rng_seed(1)
    data = Sequences.from_list([[0, 1, 1], [1]])
    fit = fit_gibbs(TabularHMM(2, categorical(2)), data, num_samples=6, warmup=2, num_chains=3)
    draws = PosteriorDraws.of(fit)
    evidence = draws.map(data, lambda hmm: hmm.log_prob(data.values).sum(-1).double())
    wanted = evidence + draws.log_prior(data)
    torch.testing.assert_close(fit.stats["lp"], wanted, rtol=1e-5, atol=1e-5)
    best = fit.stats["lp"].argmax()
    for name, value in fit.parameters.items():
        assert torch.equal(value, fit.chains[name].flatten(0, 1)[best])


def test_one_chain_and_hard_zeros():
    """Zeros of the prior stay, and the shapes are those of several chains."""
    pyro.set_rng_seed(2)
    allowed = torch.tensor([[True, True], [False, True]])
    module = TabularHMM(2, categorical(3), 0.5, 0.5, transition_allowed=allowed)
    data = Sequences.from_list([[0, 0, 1, 2, 2]])
    fit = fit_gibbs(module, data, num_samples=5, warmup=0, num_chains=1)
    rows = fit.chains["module.transition"]
    assert rows.shape == (1, 5, 2, 2)
    assert bool((rows[..., 1, 0] == 0).all())
    torch.testing.assert_close(rows.sum(-1), torch.ones(1, 5, 2))


def test_progress_and_summary_tell_of_chains_in_different_orders_of_the_states(capsys):
    """Which have the same log joint density; the worst R-hat is what the bar shows."""
    pyro.set_rng_seed(0)
    levels = torch.tensor([-2.0, 2.0])[torch.arange(24) // 3 % 2]
    data = Sequences.from_list([levels + 0.3 * torch.randn(24)])
    module = TabularHMM(2, normal(0, 0.0, 0.2, 3.0, 1.0))
    fit = fit_gibbs(module, data, num_samples=100, warmup=50, num_chains=6, progress=True)
    shown = float(capsys.readouterr().err.rpartition("rhat=")[2].partition("]")[0])
    assert fit.agreement()["lp"].rhat < 1.1 < 1.2 < shown
    assert fit.summary().startswith("CHAINS DISAGREE")
    assert "if their priors are alike; else the chains are in different modes" in fit.summary()
    aligned = PosteriorDraws.of(fit).aligned(data)
    assert max(float(agreement(v).rhat.max()) for v in aligned.parameters.values()) < 1.1


def test_agreement_is_that_of_arviz():
    import arviz

    torch.manual_seed(0)
    noise, chains = torch.randn(4, 400), torch.zeros(4, 400)
    for t in range(1, 400):
        chains[:, t] = 0.8 * chains[:, t - 1] + noise[:, t]
    chains[0] += 0.5
    found, values = agreement(chains), chains.double().numpy()
    assert found.rhat.item() == pytest.approx(float(arviz.rhat(values)), rel=1e-3)
    assert found.bulk.item() == pytest.approx(float(arviz.ess(values, method="bulk")), rel=0.02)
    assert found.tail.item() == pytest.approx(float(arviz.ess(values, method="tail")), rel=0.02)


def test_what_is_not_conjugate_is_moved_by_trajectories():
    """A prior of the user's own, which is the same: as in the sum over all paths."""
    pyro.set_rng_seed(0)
    lengths = torch.tensor([3, 2])
    values = torch.tensor([[0, 1, 1], [1, 0, 0]])
    data = Sequences(values, lengths)
    initial, transition, emission = [1.0, 2.0], [[1.5, 1.5], [1.0, 3.0]], [[2.0, 1.0], [1.7, 4.0]]
    module = TabularHMM(2, categorical(2), torch.tensor(initial), torch.tensor(transition))
    module.emission.probs = PyroSample(Dirichlet(torch.tensor(emission)).to_event(1))
    fit = fit_gibbs(module, data, num_samples=200, warmup=100)
    free = Sequences(values, lengths, labels=torch.full((2, 3), -1))
    _, wanted = oracle.by_tables(
        free, [np.array([initial]), np.array(transition), np.array(emission)]
    )
    close_to(fit.chains["module.emission.probs"], wanted[2])
    close_to(fit.chains["module.transition"], wanted[1])


def test_durations_agree_with_a_sampler_that_sums_paths_out():
    pyro.set_rng_seed(0)
    data = Sequences.from_list([[0, 0, 1, 1, 0], [1, 1, 0]])
    strength = torch.tensor([[5.0, 1.0], [1.0, 5.0]])
    durations = free_durations(3, torch.tensor([1.0, 2.0, 3.0]))
    module = TabularHSMM(2, categorical(2, strength), durations)
    gibbs = fit_gibbs(module, data, num_samples=400, warmup=50)
    assert gibbs.stats.keys() == {"lp"}
    other = fit_mcmc(MarginalModel(module), data, num_samples=50, warmup=60)
    for name in ("module.duration.probs", "module.initial", "module.emission.probs"):
        found, wanted = gibbs.chains[name], other.chains[name]
        torch.testing.assert_close(found.mean((0, 1)), wanted.mean((0, 1)), rtol=0, atol=0.03)


FAMILIES = {  # others are held to their posterior by the contract of families
    "full, in part": (normal_full(2, 0.5, 1.0, 6.0, 2.0), 1),
    "mixture": (normal_mixture(1, 0.5, 1.0, 3.0, 2.0, 2.0, num_components=2), None),
    "streams": (streams(poisson(0, 2.0, 0.5), normal(1, 0.5, 1.0, 3.0, 2.0)), None),
    "shared": (tied(poisson(0, 2.0, 0.5), [0, 0, 1]), None),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_given_data_of_the_prior_have_the_distribution_of_the_prior(name):
    """Geweke's joint test: theta ~ p, x ~ p(x | theta), theta' ~ p(theta | x) is another theta.

    Also jointly with x; each of many replications has observations of its own.
    """
    family, missing = FAMILIES[name]
    pyro.set_rng_seed(0)
    count, size, num_states = 500, 12, 3
    module = build_emission(family, num_states).double()
    module.imputes = True
    with torch.no_grad():
        with pyro.plate("replications", count, dim=-2):
            trace = pyro.poutine.trace(module).get_trace()
        current = trace.nodes["_RETURN"]["value"]
        states = torch.arange(size) % num_states
        event = (1,) * len(current.event_shape)
        values = torch.stack(
            [current.sample().expand(count, 1, num_states, *current.event_shape)[:, 0, k]
             for k in states.tolist()], 1,
        )  # fmt: skip
        seen = values.double().reshape(count, size, -1).clone()
        if missing is not None:
            values = values.clone()
            values[:, ::2, missing] = torch.nan
        sites = {n: trace.nodes[n]["value"].squeeze(1) for n in trace.stochastic_nodes}
        found = {}
        for i in range(count):  # a replication at a time: observations are shared by chains
            one = pyro.poutine.condition(module, data={n: v[i] for n, v in sites.items()})
            weights = torch.nn.functional.one_hot(states, num_states).double()[None]
            statistics = module.statistics(values[i], weights, one())
            for part, sample in module.sample_parameters(statistics, {}).items():
                found.setdefault(part, []).append(sample[0])
    assert len(found) == len(sites)
    for site, theta in sites.items():
        again = torch.stack(found[site.removeprefix(module._pyro_name + ".")])
        assert again.shape == theta.shape
        mean = seen.mean((1, 2))
        product = partial(times, expand_right(mean, theta))
        for change in (lambda x: x, torch.square, product):
            apart = (change(again) - change(theta)).double().flatten(1)
            scale = change(theta).double().flatten(1).std(0) + 1e-12
            error = apart.std(0) / count**0.5
            assert bool((apart.mean(0).abs() < 4.8 * error + 1e-9 * scale).all()), (site, event)


def times(factor, theta):
    return factor * theta


def expand_right(vector, like):
    return vector.reshape(-1, *(1,) * (like.dim() - 1))


@pytest.mark.parametrize("temperatures", [1, 2])
def test_chains_of_several_data_sets_have_posteriors_of_their_own(temperatures):
    """Counts of one state, in closed form, with a gap; and their log joint densities."""
    pyro.set_rng_seed(0)
    lengths, observed = torch.tensor([3, 2]), torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()
    values = torch.tensor([[[0.0, 9, 0], [1, 0, 9]], [[30, 9, 40], [20, 30, 9]]])
    data = Sequences(values[0], lengths, observed)
    options = {"num_samples": 400, "num_chains": 6, "num_temperatures": temperatures}
    module = TabularHMM(1, poisson(0, 2.0, 1.0))
    fit = fit_gibbs(module, data, values=values, warmup=50, **options)
    rates = fit.chains["module.emission.rate"]
    for chains, total, each in ((slice(3), 1, values[0]), (slice(3, 6), 120, values[1])):
        close_to(rates[chains], (2.0 + total) / 5)
        known = Sequences(each, lengths, observed)
        draws = PosteriorDraws(fit.model, {n: v[chains] for n, v in fit.chains.items()})
        evidence = draws.map(known, lambda hmm, x=each: hmm.log_prob(x).sum(-1))
        wanted = evidence + draws.log_prior(known)
        torch.testing.assert_close(fit.stats["lp"][chains], wanted, check_dtype=False)


def test_an_error_of_a_conjugate_posterior_is_not_passed_over(monkeypatch):
    """As counts are that are not whole, whose parameters then have Hamiltonian steps."""

    def failing(*arguments):
        raise ValueError("no such posterior")

    monkeypatch.setattr(TabularHMM, "sample_parameters", failing)
    data = Sequences.from_list([[0, 1, 0]])
    with pytest.raises(ValueError, match="no such posterior"):
        fit_gibbs(TabularHMM(2, categorical(2)), data, num_samples=1, num_chains=2, warmup=1)
