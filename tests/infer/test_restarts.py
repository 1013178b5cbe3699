"""Batched restarts: they are what they would be one by one."""

import copy

import pyro
import pytest
import torch
from pyro.distributions import Beta, Categorical, Normal
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    DenseHMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_map,
    fit_mcmc,
    fit_svi,
    normal,
)


class Wrong(TabularHMM):
    """Its M-step returns what EM cannot take."""

    returned = None

    def m_step(self, statistics):
        values, notes = super().m_step(statistics)
        return self.returned(values, notes)


DATA = datasets.casino(num_sequences=6, num_steps=15).without_labels()


def module():
    return TabularHMM(2, categorical(6, 1.5), transition_concentration=1.5)


def tables(*shape):
    starts = torch.distributions.Dirichlet(torch.ones(2)).sample((*shape, 2))
    faces = torch.distributions.Dirichlet(torch.ones(6)).sample((*shape, 2))
    first = torch.distributions.Dirichlet(torch.ones(2)).sample(shape)
    return {"module.initial": first, "module.transition": starts, "module.emission.probs": faces}


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize(
    "log_prior", [None, lambda hmm: hmm.log_transition.exp().pow(2).sum((-1, -2))]
)
def test_map_from_several_starts_is_map_from_each(clip_norm, log_prior):
    starts = tables(3)
    options = {"num_iterations": 30, "tolerance": None, "clip_norm": clip_norm}
    model = MarginalModel(module(), log_prior)
    wide = {name: value.unsqueeze(1) for name, value in starts.items()}
    fit = fit_map(model, DATA, restarts=3, start=init_to_value(values=wide), **options)
    singles = []
    for r in range(3):
        own = {name: value[r] for name, value in starts.items()}
        singles.append(fit_map(model, DATA, start=init_to_value(values=own), **options))
        torch.testing.assert_close(fit.restarts.losses[r], singles[r].losses)
        for name, value in singles[r].parameters.items():
            torch.testing.assert_close(fit.restarts.parameters[name][r], value)
    best = int(torch.stack([single.losses[-25:].mean() for single in singles]).argmin())
    assert fit.restarts.best == best
    torch.testing.assert_close(fit.losses, singles[best].losses)
    torch.testing.assert_close(
        fit.hmm(DATA).log_prob(DATA.values), singles[best].hmm(DATA).log_prob(DATA.values)
    )


def map_of(part, *given, **options):
    return fit_map(MarginalModel(part), *given, **options)


@pytest.mark.parametrize("fit", [fit_em, map_of])
def test_the_best_is_kept_and_all_are_reported(fit):
    found = fit(module(), DATA, num_iterations=30, restarts=4)
    assert found.restarts.final.shape == (4,)
    assert found.restarts.best == int(found.restarts.final.argmin())
    assert "4, losses" in found.summary()
    every = found.restarts.hmm(DATA)
    assert every.batch_shape == (4, 6)
    torch.testing.assert_close(
        every.log_prob(DATA.values)[found.restarts.best], found.hmm(DATA).log_prob(DATA.values)
    )
    assert f"the least is that of {found.restarts.best})" in repr(found.restarts)


@pytest.mark.parametrize("own", [lambda level: level[..., :1], lambda level: level[0]])
@pytest.mark.parametrize("fit", [fit_map, fit_mcmc])
def test_models_that_mix_copies_are_refused(fit, own):
    """A vector of size one beside a plate; dimensions that are counted from the left."""

    def model(data):
        level = own(pyro.sample("level", Normal(0.0, 9.0).expand([2]).to_event(1)))
        loc = (level + torch.zeros(len(data))).unsqueeze(-1)
        hmm = HMM(torch.zeros(1), torch.zeros(1, 1), Normal(loc, 1.0), data.lengths)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    several = {"num_samples": 2, "warmup": 2} if fit is fit_mcmc else {"restarts": 2}
    with pytest.raises(ValueError, match=r": level \(2,\) and \(\d+, 1, 2\). Those .* be scalars"):
        fit(model, numbers(), **several)


def test_states_that_are_only_renamed_are_matched():
    data = Sequences(
        torch.randn(5, 20, 1) + 4.0 * torch.randint(3, (5, 20, 1)), torch.full((5,), 20)
    )
    fit = fit_em(TabularHMM(3, normal(1)), data, restarts=6, num_iterations=50)
    renaming = fit.restarts.align(data)
    assert renaming[fit.restarts.best].tolist() == [0, 1, 2]
    best = fit.parameters["module.emission.loc"][:, 0]
    for r in range(6):
        if fit.restarts.final[r] < fit.restarts.final.min() + 1e-3:  # the same optimum
            own = fit.restarts.parameters["module.emission.loc"][r, :, 0]
            torch.testing.assert_close(own, best[renaming[r]], rtol=0.0, atol=1e-2)
            assert sorted(renaming[r].tolist()) == [0, 1, 2]


def test_a_restart_that_fails_does_not_stop_the_others():
    def barred(hmm):
        return torch.where(hmm.log_initial.diff()[..., 0] < 0, 0.0, -torch.inf)

    flat = MarginalModel(TabularHMM(2, categorical(6)), barred)
    start = tables(2)
    start["module.initial"] = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    start = {name: value.unsqueeze(1) for name, value in start.items()}
    fit = fit_map(flat, DATA, start=start, restarts=2, num_iterations=20)
    assert fit.restarts.best == 0
    assert fit.losses.isfinite().all()
    assert "1 of 2 restarts ended at infinity" in fit.notes


@pytest.mark.parametrize("restarts", [1, 3])
def test_gradient_fits_may_begin_where_em_ended_at_zeros(restarts):
    """With one sequence EM is certain of its first state."""
    data = datasets.casino(num_sequences=1, num_steps=300).without_labels()
    part = TabularHMM(2, categorical(6))
    end = fit_em(part, data, restarts=8)
    assert (end.parameters["module.initial"] == 0).any() or end.parameters[
        "module.initial"
    ].min() < 1e-8
    model = MarginalModel(part)
    begin = init_to_value(values=end.parameters)
    fit = fit_map(
        model, data, start=begin, restarts=restarts, num_iterations=30, learning_rate=1e-3
    )
    assert fit.losses.isfinite().all()
    assert fit.losses[-1] <= end.losses[-1] + 1e-2
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=end.start))
    assert fit_svi(model, guide, data, num_iterations=20).losses.isfinite().all()
    chain = TabularHMM(2, categorical(6), transition_allowed=torch.ones(2, 2).triu().bool())
    end = fit_em(chain, data, restarts=4)
    fit = fit_map(
        MarginalModel(chain), data, start=init_to_value(values=end.parameters), num_iterations=30
    )
    assert fit.losses.isfinite().all()
    assert fit.parameters["module.transition"][1, 0] == 0


class Weights(HMMModule):
    """Logits that are weights, without a prior."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(2, 6))

    def forward(self, lengths, observed=None):
        even = torch.full((2, 2), 0.5).log()
        return HMM(even[0], even, Categorical(logits=self.logits), lengths, observed)


def statements(data):
    stay = pyro.sample("stay", Beta(2.0, 2.0))
    probs = pyro.param("probs", torch.rand(2, 6).softmax(-1), constraint=constraints.simplex)
    matrix = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([1 - stay, stay])]).log()
    hmm = HMM(torch.full((2,), 0.5).log(), matrix, Categorical(probs), data.lengths)
    with pyro.plate("sequences", len(data)):
        pyro.sample("x", hmm, obs=data.values)
    return hmm


STARTS = {
    "priors": lambda: MarginalModel(module()),
    "points": lambda: MarginalModel(TabularHMM.from_hmm(module()(torch.tensor([1])))),
    "weights": lambda: MarginalModel(Weights()),
    "statements": lambda: statements,
}


@pytest.mark.parametrize("make", STARTS.values(), ids=STARTS)
def test_a_fit_begins_where_another_has_ended(make):
    fit = fit_map(make(), DATA, num_iterations=30)
    end, before = sum(fit.parts(DATA).values()), copy.deepcopy(fit.parameters)
    again = fit_map(make(), DATA, num_iterations=2, start=fit)
    torch.testing.assert_close(again.losses[0], end)
    assert again.parameters.keys() == before.keys()
    assert all(torch.equal(fit.parameters[name], value) for name, value in before.items())
    if make() is not statements:
        by_em = fit_em(make().module, DATA, num_iterations=1, start=fit)
        torch.testing.assert_close(by_em.losses[0], end)


def test_values_of_a_fit_may_be_where_em_begins():
    with pytest.raises(ValueError, match=r"start has no value for transition, emission.probs"):
        fit_em(module(), DATA, start={"initial": torch.ones(2) / 2})


# What is kept of each step


def numbers():
    return Sequences(
        torch.randn(4, 10, generator=torch.Generator().manual_seed(0)), torch.full((4,), 10)
    )


FITS = {
    "EM": lambda: fit_em(module(), DATA, num_iterations=8),
    "restarts of EM": lambda: fit_em(module(), DATA, restarts=3, num_iterations=50),
    "MAP": lambda: fit_map(MarginalModel(module()), DATA, num_iterations=8),
    "restarts of MAP": lambda: fit_map(MarginalModel(module()), DATA, restarts=3, num_iterations=8),
}


@pytest.mark.parametrize("name", FITS)
def test_log_likelihood_and_log_prior_sum_to_minus_the_loss(name):
    fit = FITS[name]()
    total = fit.history["log_likelihood"] + fit.history["log_prior"]
    torch.testing.assert_close(total, -fit.losses.to(total), rtol=1e-5, atol=1e-3)
    if name.endswith("EM"):  # the last parameters are those of the last loss
        log_prob = fit.hmm(DATA).log_prob(DATA.values).sum().double()
        torch.testing.assert_close(
            fit.history["log_likelihood"][-1], log_prob, rtol=1e-5, atol=1e-3
        )


def test_the_entropy_of_a_guide_is_the_rest():
    model = MarginalModel(module())
    fit = fit_svi(model, pyro.infer.autoguide.AutoNormal(model), DATA, num_iterations=8)
    torch.testing.assert_close(sum(fit.history.values()), -fit.losses)


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (lambda values, notes: values, TypeError, "m_step of Wrong must return a pair"),
        (
            lambda values, notes: ({n: v[..., :1] for n, v in values.items()}, notes),
            ValueError,
            "m_step must return 'initial' .* shape",
        ),
    ],
)
def test_a_wrong_m_step_is_named(returned, error, words, monkeypatch):
    monkeypatch.setattr(Wrong, "returned", staticmethod(returned))
    with pytest.raises(error, match=words):
        fit_em(Wrong(2, categorical(6)), DATA, num_iterations=2)


def test_gradient_steps_keep_the_parts_too():
    fit = fit_em(DenseHMM(2, 6, dim=2), DATA, num_iterations=3)
    assert {*fit.history} == {"log_likelihood", "log_prior"}


def test_standard_errors_of_the_best_restart_are_those_of_a_fit_from_there():
    pyro.set_rng_seed(1)
    states = torch.tensor([0, 0, 0, 1, 1, 1]).repeat(15)
    data = Sequences(Normal(8.0 * states, 1.0).sample(torch.Size([3])))
    options = {"learning_rate": 0.1, "num_iterations": 800, "tolerance": None}
    part = TabularHMM(2, normal(0), 2.0, 2.0)
    best = map_of(part, data, restarts=2, **options)
    single = map_of(part, data, start=best, **options)
    assert [str(x) for x in best.supports.values()] == [str(x) for x in single.supports.values()]
    tables = [torch.tensor(fit.table(data)["std_error"]) for fit in (best, single)]
    assert bool(tables[0].isfinite().all())
    torch.testing.assert_close(*tables, rtol=1e-2, atol=0)
    assert "module.emission.variance[1]" in best.summary(data)
