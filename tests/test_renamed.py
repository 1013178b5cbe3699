"""Names of arguments: old ones work on with a warning, unknown ones are told their like."""

import pytest
import torch
from matplotlib import pyplot
from pyro.infer.autoguide import AutoDelta

from pyrohmm import (
    Forecast,
    GradientStep,
    MarginalModel,
    PosteriorDraws,
    TabularHMM,
    categorical,
    datasets,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_svi,
    normal_mixture,
    plots,
)

DATA = datasets.casino(num_sequences=2, num_steps=6).without_labels()
FIT = fit_em(TabularHMM(2, categorical(6)), DATA, num_iterations=2)
MODEL = MarginalModel(TabularHMM(2, categorical(6)))


def old(name, new):
    return pytest.warns(DeprecationWarning, match=f"{name} is now called {new}")


def test_arguments():
    with old("num_steps", "num_iterations"):
        assert (
            len(fit_em(TabularHMM(2, categorical(6)), DATA, num_steps=3, tolerance=None).losses)
            == 4
        )
    with old("num_steps", "num_iterations"):
        assert GradientStep(num_steps=3).num_iterations == 3
    with old("init", "start"):
        fit = fit_map(MODEL, DATA, num_iterations=1, init=lambda site: FIT.start[site["name"]])
    assert fit.losses[0] == pytest.approx(FIT.losses[-1].item(), abs=1e-3)
    with pytest.raises(TypeError, match="num_steps is the old name of num_iterations"):
        fit_em(TabularHMM(2, categorical(6)), DATA, num_steps=3, num_iterations=3)


def test_attributes():
    draws, hmm = PosteriorDraws.of(FIT), FIT.hmm(DATA)
    for found in (FIT, draws):
        with old("values", "parameters"):
            assert found.values is found.parameters
    counts, posterior = hmm.expected_counts(DATA.values), hmm.posterior(DATA.values)
    for found in (posterior, counts, hmm.forecast(DATA.values, 2)):
        with old("states", "state_probs"):
            assert torch.equal(found.states, found.state_probs)


def test_arguments_and_functions_that_are_old_names():
    hmm, probs = FIT.hmm(DATA), torch.full((3, 2), 0.5)
    with old("values", "parameters"):
        assert PosteriorDraws(MODEL, values={"a": torch.ones(1, 2)}).parameters["a"].shape == (1, 2)
    with old("states", "state_probs"):
        assert Forecast(states=probs, emission=hmm.emission).state_probs is probs
    with old("states", "state_probs"):
        plots.states(probs)
    pyplot.close("all")


def test_places():
    hmm = FIT.hmm(DATA)
    with old("an argument of durations by place", "num_steps, states, lengths, by name"):
        axes = plots.durations(hmm, 7, hmm.viterbi(DATA.values), DATA.lengths)
    assert len(axes.lines[0].get_xdata()) == 7
    with old("an argument of emission by place", "symbols, names, by name"):
        plots.emission(hmm, list("123456"), ["fair", "loaded"])
    pyplot.close("all")
    with pytest.raises(TypeError, match="Give num_components by name; the dimension comes first"):
        normal_mixture(3, 2)


def test_map_starts_where_a_fit_ended():
    for start in (FIT, FIT.start):
        fit = fit_map(MODEL, DATA, num_iterations=1, start=start)
        assert fit.losses[0] == pytest.approx(FIT.losses[-1].item(), abs=1e-3)
    again = fit_em(TabularHMM(2, categorical(6)), DATA, num_iterations=1, start=FIT)
    assert again.losses[0] == pytest.approx(FIT.losses[-1].item(), abs=1e-3)
    with pytest.raises(ValueError, match=r"start has no value for module\.\S+; it has initial"):
        fit_map(MODEL, DATA, start={"initial": torch.ones(2) / 2})
    with pytest.raises(TypeError, match="start must be a function"):
        fit_map(MODEL, DATA, start=3)


@pytest.mark.parametrize(("wrong", "meant"), [("n_iter", "num_iterations"), ("n_init", "restarts")])
def test_an_unknown_argument_is_told_what_it_may_be(wrong, meant):
    with pytest.raises(TypeError, match=f"{wrong}'. Did you mean {meant}"):
        fit_em(TabularHMM(2, categorical(6)), DATA, **{wrong: 3})


@pytest.mark.parametrize("wrong", ["loss", "num_particles"])
def test_what_pyro_calls_the_objective_is_told_too(wrong):
    with pytest.raises(TypeError, match=f"{wrong}'. Did you mean elbo"):
        fit_svi(MODEL, AutoDelta(MODEL), DATA, **{wrong: 3})


def test_pairs_refuse_sizes_of_minibatches():
    with pytest.raises(ValueError, match=r"batch_size is of sequences.*pairs_per_step"):
        fit_cooccurrence(TabularHMM(2, categorical(6)), DATA, batch_size=2)


def test_samples_are_printed_as_a_summary():
    one = PosteriorDraws.of(FIT)
    assert str(one).startswith("PosteriorDraws(1 chains of 1 samples of module.initial, ")
    many = PosteriorDraws.of({name: value.tile(2, 8, 1) for name, value in one.parameters.items()
                              if value.dim() == 3}, MODEL)  # fmt: skip
    assert many.summary() in str(many)
