"""Scripts written for hmmlearn, in which nothing but the import is changed.

Each is a function of the module that holds the estimators, and is run with hmmlearn's and with
ours. What is determined by the data and the seed must agree.
"""

import numpy as np
import pytest
from hmmlearn import hmm as hmmlearn

import pyrohmm.sklearn as ours

RING = np.array(
    [[0.7, 0.2, 0.0, 0.1], [0.3, 0.5, 0.2, 0.0], [0.0, 0.3, 0.5, 0.2], [0.2, 0.0, 0.2, 0.6]]
)
CORNERS = np.array([[0.0, 0.0], [0.0, 11.0], [9.0, 10.0], [11.0, -1.0]])


def walk(hmm, kind="full"):
    """A model whose parameters are set, as before samples are taken."""
    model = hmm.GaussianHMM(n_components=4, covariance_type=kind, random_state=10)
    model.startprob_ = [0.6, 0.3, 0.1, 0.0]
    model.transmat_ = RING
    model.means_ = CORNERS
    model.covars_ = 0.5 * np.tile(np.identity(2), (4, 1, 1)) if kind == "full" else np.ones((4, 2))
    return model


def samples():
    return walk(ours).sample(120, random_state=3)


def select_by_criterion(hmm):
    X, _ = samples()
    found = {"aic": [], "bic": [], "log_likelihood": []}
    for n_components in (2, 3, 4):
        best, best_score = None, None
        for seed in range(2):
            model = hmm.GaussianHMM(
                n_components=n_components,
                covariance_type="diag",
                random_state=seed,
            )
            if hmm is hmmlearn:  # whose fits have a prior
                model.covars_prior = 0.0
            model.fit(X)
            score = model.score(X)
            if not best_score or score > best_score:
                best, best_score = model, score
        found["aic"].append(best.aic(X))
        found["bic"].append(best.bic(X))
        found["log_likelihood"].append(best_score)
    assert np.argmin(found["bic"]) == 2
    return found


def earthquakes(hmm):
    rates = np.repeat([14.0, 26.0, 18.0, 14.0], 25)
    counts = np.random.default_rng(0).poisson(rates)
    scores, models = [], []
    for n_components in (1, 2, 3):
        for seed in range(2):
            model = hmm.PoissonHMM(n_components=n_components, random_state=seed, n_iter=10)
            model.fit(counts[:, None])
            models.append(model)
            scores.append(model.score(counts[:, None]))
    two = models[2 + int(np.argmax(scores[2:4]))]
    states = two.predict(counts[:, None])
    assert (two.lambdas_[states, 0] > 20)[25:50].mean() > 0.8
    assert two.lambdas_.shape == (2, 1)
    return {
        "rates": np.sort(two.lambdas_[:, 0]),
        "stationary": np.sort(two.get_stationary_distribution()),
        "aic": two.aic(counts[:, None]),
        "one state": scores[0],
    }


def known_parameters(hmm):
    """Nothing but a mean is fitted; the rest stays as it was set."""
    X, _ = samples()
    model = walk(hmm, "diag")
    model.params, model.init_params = "m", ""
    model.fit(X)
    np.testing.assert_array_equal(model.transmat_, RING)
    return {"means": model.means_}


SCRIPTS = {
    select_by_criterion: 1e-3,  # the last iteration but one ends where the prior is counted
    earthquakes: 1e-3,  # hmmlearn's prior of rates
    known_parameters: 1e-6,
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_for_hmmlearn_runs_as_it_is(script):
    found, expected = script(ours), script(hmmlearn)
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=SCRIPTS[script], atol=1e-8, err_msg=name
        )


def test_a_sample_goes_on_from_a_state():
    for model in (walk(ours), walk(ours, "diag")):
        X, states = model.sample(20, random_state=1, currstate=3)
        assert X.shape == (20, 2)
        assert states[0] == 3
        np.testing.assert_array_equal(
            model.sample(20, currstate=3)[1], model.sample(20, currstate=3)[1]
        )
