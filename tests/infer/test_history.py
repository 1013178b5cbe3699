"""What a fit keeps of each step, and which restarts of EM go on."""

import pyro
import pytest
import torch

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_map,
    fit_svi,
    normal,
    plots,
    starts,
)

DATA = datasets.casino(num_sequences=6, num_steps=15).without_labels()


def numbers():
    return Sequences(
        torch.randn(4, 10, generator=torch.Generator().manual_seed(0)), torch.full((4,), 10)
    )


def module():
    return TabularHMM(2, categorical(6, 1.5), transition_concentration=1.5)


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
    assert plots.history(fit).get_xlabel() == "step"


def test_the_entropy_of_a_guide_is_the_rest():
    model = MarginalModel(module())
    fit = fit_svi(model, pyro.infer.autoguide.AutoNormal(model), DATA, num_iterations=8)
    torch.testing.assert_close(sum(fit.history.values()), -fit.losses)


@pytest.mark.parametrize("restarts", [1, 2])
@pytest.mark.parametrize("make", [lambda: TabularHMM(2, normal(0)), lambda: module()])
def test_the_bound_lies_between_two_log_densities(make, restarts):
    data = numbers() if "Normal" in type(make().emission).__name__ else DATA
    options = {"num_iterations": 6, "tolerance": None, "bounds": True, "restarts": restarts}
    fit = fit_em(make().double(), data, **options)
    bound, log_joint = fit.history["bound"], -fit.losses
    assert bound.shape == (6,)
    assert (bound >= log_joint[:-1] - 1e-6).all()
    assert (bound <= log_joint[1:] + 1e-6).all()


def test_restarts_that_are_behind_are_given_up():
    options = {"restarts": 8, "start": starts.from_prior}
    pyro.set_rng_seed(0)
    every = fit_em(module(), DATA, num_iterations=300, tolerance=None, **options)
    pyro.set_rng_seed(0)
    fit = fit_em(module(), DATA, num_iterations=300, **options)
    losses = fit.restarts.losses
    going = (losses.diff() != 0).sum(-1)
    assert (going == 19).sum() >= 3
    assert fit.restarts.best == losses[:, -1].argmin()
    assert going[fit.restarts.best] == going.max()
    torch.testing.assert_close(losses[:, :20], every.restarts.losses[:, :20])
    assert fit.losses[-1] < every.restarts.final.min() + 1e-2


class Wrong(TabularHMM):
    """Its M-step returns what EM cannot take."""

    returned = None

    def m_step(self, statistics):
        values, notes = super().m_step(statistics)
        return self.returned(values, notes)


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
