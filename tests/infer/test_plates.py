"""Variables of which each sequence has one: mixed-effects models, as users write them."""

import math

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Delta, Dirichlet, Gamma, Normal, Poisson
from pyro.infer.autoguide import AutoNormal

from pyrohmm import HMM, PosteriorDraws, Sequences, fit_map, fit_svi, metrics, to_arviz

QUIET = {"progress": False}
HALF = torch.full((2,), 0.5, dtype=torch.float64).log()
LENGTHS = torch.tensor([9, 4, 6, 9, 1, 7, 8, 3, 9, 5, 2, 6])
N = len(LENGTHS)


def counts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rates = 0.5 + 9.5 * torch.arange(N).double() / N  # other subjects, other rates
    values = torch.poisson(rates[:, None].expand(N, 9), generator)
    return Sequences(values, LENGTHS)


DATA = counts()
SHAPE, RATE = 2.0, 0.5  # of the prior of a subject's rate


def plate(data, follows):
    if follows:
        return pyro.plate("subjects", data.total, subsample=data.indices)
    return pyro.plate("subjects", len(data))


def one_state(follows=True):
    """Gamma-Poisson: posterior and evidence of each subject are known."""

    def model(data):
        with plate(data, follows):
            rate = pyro.sample("rate", Gamma(SHAPE, RATE).expand([1]).to_event(1))
            hmm = HMM(torch.zeros(1), torch.zeros(1, 1), Poisson(rate), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    return model


def hierarchical(follows=True):
    """One matrix for each sequence; the rates of the states are shared."""

    def model(data):
        rate = pyro.sample("rate", Gamma(2.0, 0.5).expand([2]).to_event(1))
        with plate(data, follows):
            rows = Dirichlet(torch.tensor([[8.0, 2.0], [2.0, 8.0]])).to_event(1)
            move = pyro.sample("move", rows)
            hmm = HMM(HALF, move.log(), Poisson(rate), data.lengths, data.observed)
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    return model


GROUP = torch.arange(N) % 3


def grouped(data):
    """Random effects by group, the group found by the number of the sequence."""
    with pyro.plate("groups", 3):
        rate = pyro.sample("rate", Gamma(2.0, 0.5).expand([2]).to_event(1))
    sticky = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log()
    hmm = HMM(HALF, sticky, Poisson(rate[..., GROUP[data.indices], :]), data.lengths)
    with plate(data, True):
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def with_covariates(data):
    """A random intercept of each sequence beside the common effect of a covariate."""
    slope = pyro.sample("slope", Normal(0.0, 1.0))
    levels = pyro.sample("levels", Normal(0.0, 1.0).expand([2]).to_event(1))
    sticky = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log()
    with plate(data, True):
        own = pyro.sample("own", Normal(0.0, 1.0))
        # (*B, N, T, K)
        log_rate = levels[..., None, :] + (
            slope[..., None] * data.covariates[..., 0] + own[..., None]
        ).unsqueeze(-1)
        hmm = HMM(HALF, sticky, Poisson(log_rate.clamp(max=5).exp()), data.lengths, data.observed,
                  emission_per_step=True)  # fmt: skip
        pyro.sample("x", hmm, obs=data.values)
    return hmm


COVARIATES = torch.randn(N, 9, 1, generator=torch.Generator().manual_seed(1)).double()
WITH_COVARIATES = Sequences(DATA.values, LENGTHS, covariates=COVARIATES)
MODELS = {
    "all at once": (hierarchical(follows=False), DATA),
    "by number": (hierarchical(), DATA),
    "groups": (grouped, DATA),
    "covariates": (with_covariates, WITH_COVARIATES),
}
every_model = pytest.mark.parametrize(("model", "data"), MODELS.values(), ids=MODELS)


# Conjugate models, in closed form


def sums(data):
    return (data.values * data.exists).sum(-1), data.lengths.double()


@pytest.mark.parametrize("options", [{}, {"batch_size": 5}], ids=["all", "minibatches"])
def test_each_subject_gets_the_mode_of_its_own_posterior(options):
    """Minibatches that mixed subjects up would end elsewhere: their rates differ twentyfold."""
    pyro.set_rng_seed(0)
    fit = fit_map(one_state(), DATA, num_iterations=250, tolerance=None, learning_rate=0.2,
                  schedule=lambda adam: torch.optim.lr_scheduler.ExponentialLR(adam, 0.985),
                  **options, **QUIET)  # fmt: skip
    total, length = sums(DATA)
    mode = (SHAPE + total - 1) / (RATE + length)
    torch.testing.assert_close(fit.parameters["rate"][:, 0], mode, rtol=0.05, atol=0.05)
    chosen = torch.tensor([7, 0, 3])
    some = fit.hmm(DATA.batch(chosen))
    assert torch.equal(some.emission.rate, fit.parameters["rate"][chosen])
    expected = fit.hmm(DATA).log_prob(DATA.values)[chosen]
    torch.testing.assert_close(some.log_prob(DATA.batch(chosen).values), expected)


def test_a_guide_follows_minibatches():
    pyro.set_rng_seed(0)
    model = one_state()
    fit = fit_svi(model, AutoNormal(model, init_scale=0.3), DATA, num_iterations=300, batch_size=4,
                  learning_rate=0.15,
                  schedule=lambda adam: torch.optim.lr_scheduler.ExponentialLR(adam, 0.985),
                  **QUIET)  # fmt: skip
    total, length = sums(DATA)
    mean = (SHAPE + total) / (RATE + length)
    torch.testing.assert_close(fit.mean(4000)["rate"][:, 0], mean, rtol=0.15, atol=0.1)


def closed_form(data):
    """Gamma-Poisson evidence of each sequence."""
    total, length = sums(data)
    factorials = (torch.lgamma(data.values + 1) * data.exists).sum(-1)
    return (
        SHAPE * math.log(RATE) - math.lgamma(SHAPE) + torch.lgamma(SHAPE + total)
        - (SHAPE + total) * (RATE + length).log() - factorials
    )  # fmt: skip


def test_the_evidence_of_new_sequences_averages_over_the_prior_of_their_variables():
    pyro.set_rng_seed(0)
    fit = fit_map(one_state(), DATA, num_iterations=3, **QUIET)
    new = counts(1)[torch.tensor([4, 1, 7])]
    found = metrics.held_out_log_evidence(fit, new, num_samples=400)
    torch.testing.assert_close(found, closed_form(new), rtol=0.0, atol=0.5)
    again = metrics.held_out_log_evidence(fit, new, num_samples=400)
    assert torch.equal(found, again)  # so that two models are compared on the same samples
    draws = PosteriorDraws.of({"rate": torch.rand(1, 400, N, 1)}, one_state()).for_new(new)
    scores = draws.map(new, lambda hmm: hmm.log_prob(new.values))[0]
    found = scores.logsumexp(0) - math.log(400)
    torch.testing.assert_close(found, closed_form(new), rtol=0.0, atol=0.5)


def test_validation_is_of_new_sequences():
    """In nats per step: the evidence over the prior, whatever the fit has found of its subjects."""
    new = counts(2)[:5]
    fit = fit_map(one_state(), DATA, num_iterations=50, validation=new, validate_every=25, **QUIET)
    expected = -closed_form(new).sum().item() / new.num_observed
    assert len(fit.validation) == 2
    for found in fit.validation:
        assert found.nats == pytest.approx(expected, abs=0.3)


# All that can be done with a fit


@every_model
def test_a_fit_answers(model, data):
    pyro.set_rng_seed(0)
    fit = fit_map(model, data, num_iterations=5, **QUIET)
    hmm = fit.hmm(data)
    assert hmm.batch_shape == (N,)
    evidence = metrics.log_evidence(fit, data)
    torch.testing.assert_close(evidence, hmm.log_prob(data.values))
    count = sum(value.numel() for value in fit.parameters.values())
    count -= 2 * N if "move" in fit.parameters else 0  # a row of two has one free entry
    deviance = -2 * evidence.double().sum().item()
    assert metrics.aic(fit, data) == pytest.approx(deviance + 2 * count)
    assert metrics.bic(fit, data) == pytest.approx(deviance + math.log(data.num_observed) * count)
    parts = fit.parts(data)
    assert set(parts) == {*fit.names, "x"}


@every_model
def test_draws_are_what_they_are_one_by_one(model, data):
    pyro.set_rng_seed(0)
    fit = fit_svi(model, AutoNormal(model), data, num_iterations=5, **QUIET)
    draws = PosteriorDraws.of(fit, num_draws=6)
    assert draws.hmm(data).batch_shape == (1, 6, N)
    found = draws.map(data, lambda hmm: hmm.log_prob(data.values), batch_size=4)
    prior = draws.log_prior(data)
    for s in range(6):
        own = {name: value[0, s] for name, value in draws.parameters.items()}
        trace = poutine.trace(poutine.condition(model, own)).get_trace(data)
        torch.testing.assert_close(
            found[0, s], trace.nodes["_RETURN"]["value"].log_prob(data.values)
        )
        joint = prior[0, s] + found[0, s].sum()
        torch.testing.assert_close(joint, trace.log_prob_sum(), check_dtype=False)
    converted = to_arviz(draws, data, per_step=True, num_predictive=2)
    assert converted.log_likelihood["x"].shape == (1, 6, N)
    dims = {name: each.dims[2:] for name, each in converted.posterior.data_vars.items()}
    if "move" in dims:
        assert dims["move"] == ("sequence", "state", "next_state")
        assert draws.aligned(data).parameters["move"].shape == (1, 6, N, 2, 2)
    if model is grouped:
        assert dims["rate"] == ("groups", "state")


def test_a_guide_written_by_hand():
    """It reads the data, so that it cannot be called without them."""

    def guide(data):
        level = pyro.param("level", torch.ones(N, 1), event_dim=1)
        with plate(data, True):
            pyro.sample("rate", Delta(level, event_dim=1))

    fit = fit_svi(one_state(), guide, DATA, num_iterations=5, **QUIET)
    assert fit.parameters["rate"].shape == (N, 1)
    assert fit.hmm(DATA).batch_shape == (N,)
    assert fit.samples(3, DATA)["rate"].shape == (3, N, 1)
    assert to_arviz(fit, DATA, num_draws=4).log_likelihood["x"].shape == (1, 4, N)


def test_other_sequences_are_refused_by_the_name_of_the_site():
    fit = fit_map(hierarchical(), DATA, num_iterations=2, **QUIET)
    with pytest.raises(ValueError, match=r"site 'move' has .* 12 sequences .*; got data of 3\. .*"
                       r"data\.batch.*held_out_log_evidence.*for_new"):  # fmt: skip
        fit.hmm(DATA[:3])
    with pytest.raises(ValueError, match="site 'move'"):
        metrics.perplexity(fit, DATA[:3])
    with pytest.raises(ValueError, match="variables inside the plate of sequences"):
        PosteriorDraws.of({"rate": torch.ones(1, 2, 3, 2)}, grouped).for_new(DATA)


# What cannot be done is said


@pytest.mark.parametrize("options", [{}, {"restarts": 2}], ids=str)
def test_new_sequences_never_take_the_variables_of_fitted_ones(options):
    """Not even as many of them, or of the same lengths."""
    fit = fit_map(hierarchical(), DATA, num_iterations=2, **options, **QUIET)
    new, shuffled = counts(1), DATA.batch(torch.arange(N).flip(0))[:]
    longer = Sequences(torch.cat([DATA.values, DATA.values], 1), LENGTHS + 1)
    draws = PosteriorDraws.of(fit)
    asks = [fit.hmm, fit.parts, draws.hmm, lambda data: metrics.log_evidence(fit, data)]
    asks += [fit.restarts.hmm] if fit.restarts else []
    for data in (new, new.batch(torch.tensor([4, 2])), shuffled, longer):
        for ask in asks:
            with pytest.raises(ValueError, match=r"others.*held_out_log_evidence.*indices="):
                ask(data)
    mixed = Sequences(torch.cat([DATA.values[:9], new.values[9:]]), LENGTHS)
    with pytest.raises(ValueError, match="of 12 are others, the first is sequence 9"):
        fit.hmm(mixed)


def test_fitted_sequences_are_recognised_and_others_by_their_numbers():
    labels = torch.full((N, 9), -1)
    train = Sequences(DATA.values, LENGTHS, DATA.observed, labels, covariates=COVARIATES)
    fit = fit_map(hierarchical(), train, num_iterations=2, **QUIET)
    whole = fit.hmm(train).log_transition
    rows = [x[:n] for x, n in zip(DATA.values.numpy(), LENGTHS)]
    copies = [Sequences(DATA.values.clone().float(), LENGTHS), train.without_labels(),
              Sequences.from_list(rows)]  # fmt: skip
    close = torch.testing.assert_close  # a row in another place may be rounded otherwise
    for copy in copies:
        close(fit.hmm(copy).log_transition, whole)
        part = copy.batch(torch.tensor([7, 3]))
        close(fit.hmm(part).log_transition, whole[[7, 3]])
    later = Sequences(counts(1).values, LENGTHS, indices=torch.arange(N).flip(0))
    close(fit.hmm(later).log_transition, whole.flip(0))
    close(fit.hmm(later.without_labels()).log_transition, whole.flip(0))
    with pytest.raises(ValueError, match="indices="):
        fit.hmm(later[:])
