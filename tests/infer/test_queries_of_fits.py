"""A fit is asked by the words of scikit-learn, step by step in the order of the rows."""

import pyro
import pytest
import torch
from pyro.distributions import Normal

from pyrohmm import (
    HMM,
    MarginalModel,
    PosteriorDraws,
    RegressionHMM,
    Sequences,
    TabularHMM,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_mcmc,
    fit_svi,
    formulas,
    load_hmm,
    metrics,
    normal,
    regression,
    save,
)
from pyrohmm.infer.loop import FitLoop

torch.manual_seed(0)
LENGTHS = [12_000, 1, 3, 250, 90, 2]  # of several buckets
DATA = Sequences.from_list([torch.randn(n).cumsum(0) for n in LENGTHS])
SMALL = Sequences.from_list([torch.tensor([0.1, 5.0, 5.2]), torch.tensor([0.2])])
WITH_COLUMN = Sequences(
    SMALL.values, SMALL.lengths, covariates=torch.zeros(*SMALL.observed.shape, 1)
)


def module(num_states=3):
    return TabularHMM(num_states, normal(0))


def own_levels(data):
    """A level for each sequence: its HMMs are of the sequences that were fitted."""
    even = torch.full((2, 2), 0.5).log()
    with pyro.plate("sequences", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(0.0, 5.0))
        emission = Normal(level.unsqueeze(-1) + torch.tensor([-2.0, 2.0]), 1.0)
        hmm = HMM(even[0], even, emission, data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


FITS = {
    "EM": lambda: fit_em(module(), DATA, num_iterations=3),
    "of each sequence": lambda: fit_map(own_levels, DATA, num_iterations=5),
    "SVI": lambda: fit_svi(
        (model := MarginalModel(module())),
        pyro.infer.autoguide.AutoNormal(model),
        DATA,
        num_iterations=3,
    ),
    "Gibbs": lambda: fit_gibbs(module(), DATA, num_samples=4, warmup=1, num_chains=1),
}


@pytest.mark.parametrize("name", FITS)
def test_answers_are_those_of_the_hmm_row_by_row(name):
    fit = FITS[name]()
    assert len(DATA.buckets) > 1
    hmm, exists = fit.hmm(DATA), DATA.exists
    probs = hmm.posterior(DATA.values).state_probs[exists]
    torch.testing.assert_close(fit.predict_proba(DATA), probs)
    assert torch.equal(fit.predict(DATA), hmm.viterbi(DATA.values)[exists])
    assert torch.equal(fit.predict(DATA, "map"), probs.argmax(-1))
    assert fit.score(DATA) == pytest.approx(hmm.log_prob(DATA.values).sum().item(), rel=1e-5)
    ahead, wanted = fit.forecast(DATA, 2), hmm.forecast(DATA.values, 2)
    torch.testing.assert_close(ahead.mean, wanted.mean)


def test_answers_go_back_to_the_rows_of_a_table():
    table = {"who": ["b", "a", "b", "a"], "day": [2, 1, 1, 2], "x": [9.0, 0.0, 0.1, 9.1]}
    data = Sequences.from_dataframe(table, by="who", time="day", columns="x")
    fit = fit_em(module(2), data, num_iterations=20)
    rows = data.to_dataframe(states=fit.predict(data), probs=fit.predict_proba(data))
    high = int(fit.hmm(data).emission.mean.argmax())
    assert [state == high for state in rows["state"]] == [x > 5 for x in table["x"]]
    assert rows[f"p{high}"].round().tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("ask", "cure"),
    {
        lambda fit: fit.states: "Did you mean fit.predict(data)",
        lambda fit: fit.viterbi: "Did you mean fit.predict(data)",
        lambda fit: fit.log_prob: "Did you mean fit.score(data)",
        lambda fit: fit.emission: "fit.hmm(data).emission",
        lambda fit: fit.sumary: "Did you mean summary",
        lambda fit: fit.plot: "Did you mean plots.transition(fit.hmm(data))",
        lambda fit: fit.save: "Did you mean save(fit, directory)",
        lambda fit: fit.bic: "Did you mean metrics.bic(fit, data)",
        lambda fit: fit.with_lengths: "Queries take an HMM: fit.hmm(data).with_lengths",
        lambda fit: metrics.held_out_log_evidence(PosteriorDraws.of(fit), SMALL): "fit must be a",
        lambda fit: fit_em(module(1), SMALL, priors=None): "priors must be True or False; got None",
        lambda fit: fit_gibbs(module(1), SMALL, burn_in=3): "Did you mean warmup",
        lambda fit: fit_mcmc(module(1), SMALL, tune=3): "Did you mean warmup",
        lambda fit: fit_mcmc(module(1), SMALL, draws=3): "Did you mean num_samples",
        lambda fit: TabularHMM(2, Normal): "such as normal(2); got Normal",
        lambda fit: TabularHMM(2, torch.distributions.Normal): "such as normal(2); got Normal",
        lambda fit: fit.predict(WITH_COLUMN, torch.zeros(2, 1)): "fit.bands",
        lambda fit: fit.predict(SMALL.values): "must be Sequences",
        lambda fit: fit.score([1.0, 2.0]): "must be Sequences",
        lambda fit: fit.forecast(SMALL, 0): "num_steps",
    }.items(),
)
def test_other_words_are_told_which_one_is_meant(ask, cure):
    fit = fit_em(module(1), SMALL, num_iterations=1)
    with pytest.raises((AttributeError, TypeError, ValueError)) as error:
        ask(fit)
    assert cure in str(error.value)


def test_what_is_no_query_is_not_said_to_be_one():
    fit = fit_em(module(1), SMALL, num_iterations=1)
    with pytest.raises(AttributeError) as error:
        fit.to_csv  # noqa: B018
    assert str(error.value) == "'Fit' object has no attribute 'to_csv'."


def test_errors_of_a_model_with_covariates_say_what_helps_it(tmp_path):
    fit = fit_em(RegressionHMM(2, normal(0), [0]), WITH_COLUMN, num_iterations=2, restarts=1)
    with pytest.raises(ValueError, match=r"append the steps to come.*observed=, covariates="):
        fit.forecast(WITH_COLUMN, 2)
    with pytest.raises(ValueError, match=r"steps and covariates .* fit\.hmm\(data\)\. Build"):
        fit.hmm(WITH_COLUMN).log_prob(torch.zeros(2, 7))
    save(fit, tmp_path / "fit")
    with pytest.raises(ValueError, match=r"all data: its model is a function of the data\. Call"):
        load_hmm(tmp_path / "fit")


def test_the_time_of_a_fit_is_that_of_all_its_restarts(monkeypatch):
    seconds = iter([5.0, 7.0, 11.0])
    monkeypatch.setattr(FitLoop, "seconds", property(lambda loop: next(seconds)))
    module = RegressionHMM(2, regression(Normal, loc=[0], scale=None), [0])
    fit = fit_em(module, WITH_COLUMN, num_iterations=1, restarts=3)
    assert fit.seconds == 23.0


def test_what_follows_does_not_need_the_columns_of_the_emission():
    columns = {"x": [0.1, 5.0, 5.2, 0.2], "hour": [0, 6, 12, 18], "dose": [0.0, 1.0, 0.5, 2.0]}
    design = formulas(columns, transition="~ hour", loc="~ dose")
    every = design.matrix({"hour": [3.0], "dose": [0.0]})
    assert design.names == ["Intercept", "hour", "dose"]
    assert (design.matrix({"hour": [3.0]}, "transition") == every).all()
    with pytest.raises(ValueError, match="does not fit the formula of loc"):
        design.matrix({"hour": [3.0]})
