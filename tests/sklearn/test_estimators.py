"""Estimators: the same answers as hmmlearn, and what scikit-learn asks of its own."""

import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hmmlearn import hmm as hmmlearn
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    TabularHMM,
    categorical,
    fit_map,
    load_hmm,
    normal,
    save,
)
from pyrohmm.sklearn import GMMHMM, CategoricalHMM, GaussianHMM, HMMEstimator, PoissonHMM

LENGTHS = [50, 1, 29]
KINDS = ["spherical", "diag", "full", "tied"]


def chain(*models):
    for model in models:
        model.startprob_ = np.array([0.6, 0.3, 0.1])
        model.transmat_ = np.array([[0.7, 0.2, 0.1], [0.0, 0.6, 0.4], [0.3, 0.3, 0.4]])
    return models


def vectors():
    random = np.random.default_rng(0)
    return random.normal(size=(80, 2)) * [1.0, 2.0] + 3 * (np.arange(80) // 20 % 3)[:, None]


def covariances(kind, lead=(3,)):
    random = np.random.default_rng(1)
    root = random.normal(size=(*(() if kind == "tied" else lead), 2, 2))
    matrix = root @ np.swapaxes(root, -1, -2) + np.eye(2)
    if kind == "diag":
        return np.diagonal(matrix, axis1=-2, axis2=-1).copy()
    return matrix[..., 0, 0] if kind == "spherical" else matrix


def gaussians(kind, **options):
    theirs = hmmlearn.GaussianHMM(3, kind, covars_prior=0.0, **options)
    pair = chain(GaussianHMM(3, kind, **options), theirs)
    for model in pair:
        model.means_ = np.array([[0.0, 0.0], [3.0, 2.0], [5.0, 7.0]])
        model.covars_ = covariances(kind)
    pair[1].n_features = 2
    return *pair, vectors()


def mixtures(kind, **options):
    pair = chain(
        GMMHMM(3, 2, covariance_type=kind, **options),
        hmmlearn.GMMHMM(3, 2, covariance_type=kind, **options),
    )
    for model in pair:
        model.means_ = np.arange(12.0).reshape(3, 2, 2)
        model.weights_ = np.array([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]])
        tied = kind == "tied"  # a matrix for each state
        model.covars_ = covariances("full" if tied else kind, (3,) if tied else (3, 2))
    pair[1].n_features = 2
    return *pair, vectors()


def of_symbols(**options):
    pair = chain(CategoricalHMM(3, **options), hmmlearn.CategoricalHMM(3, **options))
    for model in pair:
        model.emissionprob_ = np.array([[0.1, 0.2, 0.3, 0.4], [0.4, 0, 0.3, 0.3], [0.25] * 4])
    pair[1].n_features = 4
    return *pair, np.random.default_rng(0).integers(4, size=(80, 1))


def of_counts(**options):
    pair = chain(PoissonHMM(3, **options), hmmlearn.PoissonHMM(3, **options))
    for model in pair:
        model.lambdas_ = np.array([[1.0, 2.0], [4.0, 3.0], [8.0, 1.0]])
    pair[1].n_features = 2
    return *pair, np.random.default_rng(0).poisson(3.0, size=(80, 2))


PAIRS = {
    **{kind: partial(gaussians, kind) for kind in KINDS},
    **{f"mixture {kind}": partial(mixtures, kind) for kind in KINDS},
    "symbols": of_symbols,
    "counts": of_counts,
}


NAMES = "startprob_", "transmat_", "means_", "covars_", "weights_", "emissionprob_", "lambdas_"


def arrays_of(model):
    found = {name: getattr(model, name) for name in NAMES if hasattr(model, name)}
    if isinstance(model, hmmlearn.GaussianHMM) and model.covariance_type == "spherical":
        # in hmmlearn no matrices any more after a fit
        found["covars_"] = np.reshape(model._covars_, (3, -1))[:, 0, None, None] * np.eye(2)
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_answers_are_those_of_hmmlearn(name):
    ours, theirs, X = PAIRS[name]()
    close = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-12)
    close(ours.score(X, LENGTHS), theirs.score(X, LENGTHS))
    for one, other in zip(ours.score_samples(X, LENGTHS), theirs.score_samples(X, LENGTHS)):
        close(one, other)
    for algorithm in ("viterbi", "map"):
        found, expected = (model.decode(X, LENGTHS, algorithm) for model in (ours, theirs))
        close(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(ours.predict(X, LENGTHS), theirs.predict(X, LENGTHS))
    close(ours.predict_proba(X), theirs.predict_proba(X))
    close(ours.get_stationary_distribution(), theirs.get_stationary_distribution(), atol=1e-6)
    close(ours.covars_, theirs.covars_) if hasattr(theirs, "covars_") else None
    if "mixture" not in name:  # which hmmlearn gives the weights of one state
        close(ours.aic(X, LENGTHS), theirs.aic(X, LENGTHS))
        close(ours.bic(X, LENGTHS), theirs.bic(X, LENGTHS))


@pytest.mark.parametrize("name", [name for name in PAIRS if "mixture" not in name])
def test_a_fit_from_the_same_start_ends_where_that_of_hmmlearn_does(name):
    ours, theirs, X = PAIRS[name](init_params="", n_iter=12, tol=-1.0)
    if name == "counts":
        theirs.set_params(lambdas_prior=0.0, lambdas_weight=0.0)
    ours.fit(X, LENGTHS)
    theirs.fit(X, LENGTHS)
    assert ours.monitor_.iter == 12
    np.testing.assert_allclose(ours.monitor_.history, theirs.monitor_.history, rtol=1e-6)
    for attribute, value in arrays_of(theirs).items():
        np.testing.assert_allclose(getattr(ours, attribute), value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_column_has_the_variance_of_the_floor(kind):
    X = np.c_[vectors(), np.ones(80)]
    model = GaussianHMM(2, kind, random_state=0, n_iter=20)
    if kind == "spherical":  # whose variance is that of the other columns
        assert model.fit(X).monitor_.notes == []
    else:
        with pytest.warns(ConvergenceWarning, match="variance was held at its floor"):
            model.fit(X)
    assert np.linalg.eigvalsh(model.covars_).min() > 0
    assert np.isfinite(model.score(X))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_state_without_rows_stays_finite():
    for kind in KINDS:
        model = GaussianHMM(3, kind, init_params="", n_iter=3, tol=-1.0)
        model.startprob_, model.transmat_ = np.array([0.5, 0.5, 0.0]), np.eye(3)
        model.means_, model.covars_ = np.zeros((3, 2)), covariances(kind)
        model.fit(vectors())
        assert np.isfinite(model.covars_).all()
        assert np.isfinite(model.score(vectors()))


@pytest.mark.parametrize("name", [name for name in PAIRS if "mixture" in name])
def test_a_fit_of_mixtures_has_the_optimum_of_hmmlearn(name):
    """Its covariances are about the means of the step before, so that its steps are others."""
    ours, theirs, _ = PAIRS[name](init_params="", n_iter=300, tol=1e-6)
    X = ours.sample(600, random_state=0)[0]  # enough for every part of every mixture
    ours.fit(X)
    theirs.fit(X)
    assert min(np.diff(ours.monitor_.history)) > -1e-9
    np.testing.assert_allclose(ours.score(X), theirs.score(X), rtol=1e-6)


@pytest.mark.parametrize("make", [GaussianHMM, CategoricalHMM, PoissonHMM])
def test_the_best_of_several_starts_is_kept(make):
    """Those of the seeds that follow from that of the estimator."""
    X = np.random.default_rng(0).integers(4, size=(60, 1))
    if make is GaussianHMM:
        X = np.random.default_rng(0).normal(size=(60, 1))
    options = {"n_components": 3, "n_iter": 8, "tol": -1.0}
    best = make(random_state=3, n_init=4, **options).fit(X)
    later = np.random.RandomState(3).randint(2**31 - 1, size=3)
    scores = [make(random_state=int(seed), **options).fit(X).score(X) for seed in (3, *later)]
    assert len(set(np.round(scores, 6))) > 1
    assert best.score(X) == pytest.approx(max(scores))


@pytest.mark.filterwarnings("ignore:.* had values")
@pytest.mark.parametrize("name", ["diag", "full", "tied", "symbols", "counts"])
def test_a_seed_starts_where_it_does_in_hmmlearn(name):
    ours, theirs, X = PAIRS[name](random_state=3, n_iter=1, params="")
    ours.fit(X, LENGTHS)
    theirs.fit(X, LENGTHS)
    for attribute, value in arrays_of(theirs).items():
        np.testing.assert_allclose(getattr(ours, attribute), value, rtol=1e-9)


@pytest.mark.parametrize("name", PAIRS)
def test_what_params_leaves_out_stays(name):
    ours, _, X = PAIRS[name](n_iter=3, init_params="")
    kept = arrays_of(ours)
    ours.set_params(params="t").fit(X, LENGTHS)
    for attribute, value in arrays_of(ours).items():
        assert np.array_equal(value, kept[attribute]) == (attribute != "transmat_")


def test_a_fit_ends_when_a_gain_is_below_tol():
    X = vectors()
    slow = GaussianHMM(3, n_iter=60, tol=-1.0, random_state=0).fit(X).monitor_.history
    for tol in (1.0, 1e-2):
        monitor = GaussianHMM(3, n_iter=60, tol=tol, random_state=0).fit(X).monitor_
        first = int(np.argmax(np.diff(slow) < tol)) + 1
        assert monitor.converged
        assert monitor.iter == first
        np.testing.assert_allclose(monitor.history, slow[: monitor.iter], rtol=1e-9)


# As scikit-learn uses them ------------------------------------------------------------------------


def short():
    return GaussianHMM(2, n_iter=3, random_state=0)


def test_estimators_are_cloned_and_pickled():
    X = vectors()
    model = short().fit(X)
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "means_")
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))
    module = HMMEstimator(partial(TabularHMM, emission=normal(2)), 2, random_state=0)
    again = pickle.loads(pickle.dumps(module.fit(X)))
    assert again.score(X) == module.score(X)
    assert clone(module).fit(X).score(X) == module.score(X)


def test_pipelines_and_searches():
    X = vectors()
    pipeline = make_pipeline(StandardScaler(), short())
    scaled = StandardScaler().fit_transform(X)
    assert pipeline.fit(X).score(X) == short().fit(scaled).score(scaled)
    lengths = {"gaussianhmm__lengths": LENGTHS}
    expected = short().fit(scaled, LENGTHS).predict(scaled)
    assert pipeline.fit(X, np.ones(80), **lengths).score(X) == pipeline.fit(X, **lengths).score(X)
    np.testing.assert_array_equal(pipeline.fit(X, **lengths).predict(X), expected)
    search = GridSearchCV(short(), {"n_components": [1, 2], "covariance_type": KINDS[:2]}, cv=2)
    search.fit(X)
    assert search.best_score_ == search.cv_results_["mean_test_score"].max()


def test_folds_of_a_list_are_of_sequences():
    parts = np.split(vectors(), 4)
    scores = cross_val_score(short(), parts, cv=KFold(2))
    expected = [
        short().fit(np.concatenate(parts[2:]), [20, 20]).score(np.concatenate(parts[:2]), [20, 20]),
        short().fit(np.concatenate(parts[:2]), [20, 20]).score(np.concatenate(parts[2:]), [20, 20]),
    ]
    np.testing.assert_allclose(scores, expected, rtol=1e-12)
    np.testing.assert_array_equal(
        cross_val_score(short(), parts, [1, 1, 0, 0], cv=KFold(2)), scores
    )
    assert short().fit(parts, lengths=[20] * 4).score(parts) == short().fit(parts).score(parts)
    with pytest.raises(ValueError, match="lengths must be left out"):
        short().fit(parts, lengths=[40, 40])


@pytest.mark.parametrize("sizes", [[20, 20, 40], [40, 40]])
def test_a_list_is_answered_by_an_array_for_each_sequence(sizes):
    rows = vectors()
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    model = short().fit(parts)
    for ask in (model.predict, model.predict_proba):
        found, whole = ask(parts), ask(rows, sizes)
        assert found.shape == (len(sizes),)
        np.testing.assert_array_equal(np.concatenate(list(found)), whole)
    assert [len(states) for states in cross_val_predict(model, parts, cv=KFold(2))] == sizes


def test_an_estimator_is_saved_as_its_hmm(tmp_path):
    rows = vectors()
    model = short().fit(rows)
    save(model, tmp_path)
    hmm = load_hmm(tmp_path).with_lengths(torch.tensor([len(rows)]))
    assert float(hmm.log_prob(torch.as_tensor(rows)[None])) == pytest.approx(model.score(rows))


NOT_OF_SEQUENCES = {
    "check_methods_sample_order_invariance": "an answer depends on the rows around it",
    "check_methods_subset_invariance": "an answer depends on the rows around it",
}
CHECKED = {
    "normal": GaussianHMM(2, n_iter=1),
    "mixture": GMMHMM(2, 1, n_iter=1),
    "symbols": CategoricalHMM(2, n_iter=1),
    "counts": PoissonHMM(2, n_iter=1),
}
SLOW = [name for name in CHECKED if name != "normal"]


@pytest.mark.parametrize(
    "name", ["normal", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
@pytest.mark.filterwarnings("ignore")  # checks provoke them
def test_the_checks_of_scikit_learn(name):
    """Of symbols, checks that hand over several columns cannot be passed."""
    torch.set_default_dtype(torch.float32)
    found = check_estimator(
        CHECKED[name], expected_failed_checks=NOT_OF_SEQUENCES, on_skip=None, on_fail=None
    )
    columns = {"check_fit2d_1sample"} if name == "symbols" else set()  # of ten columns
    failed = [
        result["check_name"]
        for result in found
        if result["status"] == "failed"
        and (name != "symbols" or "one column" not in str(result["exception"]))
    ]
    assert set(failed) == columns
    assert sum(result["status"] == "passed" for result in found) >= 18


# Any module ---------------------------------------------------------------------------------------


def by_map(module, data):
    return fit_map(MarginalModel(module), data, num_iterations=5, progress=False)


@pytest.mark.parametrize("method", [None, by_map])
@pytest.mark.parametrize(
    ("module", "X"),
    [
        (partial(TabularHMM, emission=normal(2)), vectors()),
        (partial(TabularHMM, emission=normal(0)), vectors()[:, :1]),
        (partial(TabularHMM, emission=categorical(4)), of_symbols()[2]),
        (partial(DenseHMM, num_symbols=4, dim=2), of_symbols()[2]),
    ],
)
def test_any_module_is_an_estimator(module, X, method):
    model = HMMEstimator(module, 2, method=method, n_iter=5, random_state=0)
    model.fit(X, LENGTHS)
    evidence, states = model.score_samples(X, LENGTHS)
    assert states.shape == (80, 2)
    np.testing.assert_allclose(states.sum(1), 1.0)
    assert model.score(X, LENGTHS) == evidence
    values, path = model.sample(7, random_state=0)
    assert values.shape == (7, X.shape[1])
    np.testing.assert_array_equal(values, model.sample(7, random_state=0)[0])
    assert model.predict(values).shape == path.shape
    assert model.bic(X, LENGTHS) > model.aic(X, LENGTHS)
    np.testing.assert_allclose(model.transmat_.sum(1), 1.0)
    again = clone(model).fit(X, LENGTHS)
    assert again.score(X, LENGTHS) == evidence


def test_starts_of_mixtures_do_not_depend_on_the_other_states():
    """Each state has the clusters of its own rows, as by a seed of its own."""
    rng = np.random.default_rng(1)
    X = np.r_[rng.normal(size=(60, 2)), 30 + rng.normal(size=(80, 2))]
    model = GMMHMM(2, 3, n_iter=0, random_state=4).fit(X)
    for rows in (X[:60], X[60:]):
        own = KMeans(3, n_init=10, random_state=4).fit(rows).cluster_centers_
        assert np.isclose(model.means_, own).all((1, 2)).sum() == 1


@pytest.mark.parametrize("make", [GaussianHMM, GMMHMM, PoissonHMM, CategoricalHMM])
def test_priors_of_hmmlearn_are_refused_by_name(make):
    with pytest.raises(TypeError, match="transmat_prior"):
        make(2, transmat_prior=3.0)
    model = make(2)
    model.transmat_prior = 3.0
    with pytest.raises(TypeError, match=r"transmat_prior cannot be set.*HMMEstimator"):
        model.fit(np.ones((4, 1), int))


def test_values_that_a_fit_overwrites_and_few_numbers_are_warned_of():
    X = np.random.default_rng(0).normal(size=(60, 1))
    model = GaussianHMM(2, n_iter=2, random_state=0)
    model.means_ = np.array([[0.0], [1.0]])
    with pytest.warns(UserWarning, match=r"^means_ had values, which init_params='stmc' over"):
        model.fit(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X)  # what an earlier fit has found is no one's wish
        kept = GaussianHMM(2, n_iter=2, init_params="stc", random_state=0)
        kept.means_ = np.array([[0.0], [1.0]])
        kept.fit(X)
    with pytest.warns(UserWarning, match="7 free parameters and 6 numbers in X"):
        GaussianHMM(2, n_iter=2, random_state=0).fit(X[:6])
