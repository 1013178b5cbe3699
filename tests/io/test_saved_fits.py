"""Saved fits answer as they did before, and are refused where the code is another."""

from functools import partial

import numpy as np
import pyro
import pyro.contrib.autoname
import pytest
import torch
from pyro.distributions import Delta, Exponential, Normal, Poisson
from pyro.infer.autoguide import (
    AutoDelta,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam

from pyrohmm import (
    HMM,
    DenseHMM,
    MarginalModel,
    PosteriorDraws,
    RegressionHMM,
    Sequences,
    TabularHMM,
    dense,
    fit_em,
    fit_gibbs,
    fit_laplace,
    fit_map,
    fit_svi,
    load_draws,
    load_fit,
    load_hmm,
    normal,
    regression,
    save,
    sticky,
)
from pyrohmm.io import files

generator = torch.Generator().manual_seed(0)
LENGTHS = [6, 3, 5, 1]
ROWS = [torch.randn(n, generator=generator).double() for n in LENGTHS]
COLUMNS = [torch.randn(n, 1, generator=generator).double() for n in LENGTHS]
DATA = Sequences.from_list(ROWS)
WITH_COLUMN = Sequences.from_list(ROWS, covariates=COLUMNS)
NEW = Sequences.from_list([[2.0, 1.5], [-0.5]])
HALF = torch.full((2, 2), 0.5, dtype=torch.float64).log()


def herd(data, scale=1.0):
    """A level for each animal around a common one, and a spread without a prior."""
    centre = pyro.sample("centre", Normal(torch.zeros(2), 3.0).to_event(1))
    spread = pyro.param("spread", torch.tensor(1.5), torch.distributions.constraints.positive)
    with pyro.plate("animals", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(0.0, scale))
        emission = Normal(centre + level.unsqueeze(-1), spread.unsqueeze(-1))
        hmm = HMM(HALF[0], HALF, emission, data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def regressed(data):
    """No plate; a network of the covariates."""
    levels = pyro.sample("levels", Normal(torch.zeros(2), 3.0).to_event(1))
    slope = pyro.sample("slope", Normal(0.0, 1.0))
    loc = levels.unsqueeze(-2) + slope[..., None, None] * data.covariates
    hmm = HMM(HALF[0], HALF, Normal(loc, 1.0), data.lengths, data.observed, emission_per_step=True)
    with pyro.plate("sequences", len(data)):
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def by_hand(data):
    """A guide of pyro.param statements."""
    levels = pyro.param("mode", torch.zeros(2))
    pyro.sample("levels", Delta(levels, event_dim=1))
    width = pyro.param("width", torch.tensor(1.0), torch.distributions.constraints.positive)
    pyro.sample("slope", Normal(pyro.param("middle", torch.tensor(0.0)), width))


class Amortised(PyroModule):
    """A guide with a network, and parameters of both kinds."""

    def __init__(self):
        super().__init__()
        self.net = PyroModule[torch.nn.Linear](1, 1)
        self.width = PyroParam(torch.tensor(1.0), torch.distributions.constraints.positive)

    def forward(self, data):
        pyro.sample("levels", Delta(torch.tensor([-1.0, 1.0]), event_dim=1))
        mean = self.net(data.covariates.to(torch.get_default_dtype()).mean().reshape(1))[0]
        pyro.sample("slope", Normal(mean, self.width))


def tabular():
    return MarginalModel(TabularHMM(2, normal(0)))


class Shared(PyroModule):
    """A model with a learnt scale beside its variables."""

    def __init__(self):
        super().__init__()
        self.scale = PyroParam(torch.tensor(2.0), torch.distributions.constraints.positive)

    def forward(self, data):
        level = pyro.sample("level", Normal(torch.zeros(2), 3.0).to_event(1))
        emission = Normal(level, self.scale)
        hmm = HMM(HALF[0], HALF, emission, data.lengths, data.observed)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm


QUICK = {"num_iterations": 6, "progress": False}


def svi(model, data, guide=AutoNormal, **options):
    return fit_svi(model, guide(model), data, learning_rate=0.1, **options, **QUICK)


# the fit, what builds its code anew, and its data
FITS = {
    "MAP": (lambda: fit_map(tabular(), DATA, **QUICK), lambda: (tabular(),), DATA),
    "restarts": (lambda: fit_map(tabular(), DATA, restarts=3, **QUICK), lambda: (tabular(),), DATA),
    "MAP of each": (lambda: fit_map(herd, DATA, **QUICK), lambda: (herd,), DATA),
    "validated": (lambda: fit_map(herd, DATA, validation=NEW, **QUICK), lambda: (herd,), DATA),
    "SVI of each": (lambda: svi(herd, DATA), lambda: (herd,), DATA),
    "minibatches": (lambda: svi(herd, DATA, batch_size=2), lambda: (herd,), DATA),
    "full": (lambda: svi(herd, DATA, AutoMultivariateNormal), lambda: (herd,), DATA),
    "low rank": (
        lambda: svi(tabular(), DATA, AutoLowRankMultivariateNormal),
        lambda: (tabular(),),
        DATA,
    ),
    "learnt": (lambda: svi(Shared(), DATA), lambda: (Shared(),), DATA),
    "module": (lambda: svi(tabular(), DATA), lambda: (tabular(),), DATA),
    "by hand": (
        lambda: fit_svi(regressed, by_hand, WITH_COLUMN, **QUICK),
        lambda: (regressed, by_hand),
        WITH_COLUMN,
    ),
    "network": (
        lambda: fit_svi(regressed, Amortised(), WITH_COLUMN, **QUICK),
        lambda: (regressed, Amortised()),
        WITH_COLUMN,
    ),
    "EM": (
        lambda: fit_em(TabularHMM(2, normal(0)), DATA),
        lambda: (TabularHMM(2, normal(0)),),
        DATA,
    ),
    "GLM": (
        lambda: fit_em(RegressionHMM(2, normal(0), [0]), WITH_COLUMN, num_iterations=3),
        lambda: (RegressionHMM(2, normal(0), [0]),),
        WITH_COLUMN,
    ),
    "Gibbs": (
        lambda: fit_gibbs(TabularHMM(2, normal(0)), DATA, num_samples=5, warmup=2, num_chains=2),
        lambda: (tabular(),),
        DATA,
    ),
    "Laplace": (
        lambda: fit_laplace(herd, DATA, random="level", num_steps=3),
        lambda: (herd,),
        DATA,
    ),
}


def answers(fit, data):
    """All that a fit is asked for, the same random numbers each time."""
    pyro.set_rng_seed(3)
    found = {"score": fit.score(data), "states": fit.predict(data), "start": fit.start}
    if fit.method == "Laplace":
        return found | {
            "parameters": fit.parameters,
            "effects": len(fit.random),
            "value": fit.log_marginal,
        }
    found["parts"] = fit.parts(data)
    draws = PosteriorDraws.of(fit, num_draws=5, data=data)
    found["draws"] = draws.parameters | draws.stats
    found["map"] = draws.map(data, lambda hmm: hmm.log_prob(data.values))
    if fit.plates:
        found["new"] = draws.for_new(NEW).parameters
    if fit.method == "SVI":
        found["quantiles"] = fit.quantiles(num_samples=20, data=data)
    return found


@pytest.mark.parametrize("name", FITS)
def test_a_saved_fit_answers_as_before(tmp_path, name):
    make, rebuilt, data = FITS[name]
    pyro.set_rng_seed(0)
    fit = make()
    before = answers(fit, data)
    with pyro.get_param_store().scope(fit.params):  # as its documentation says
        fit.guide(data)
    save(fit, tmp_path / "fit")
    pyro.clear_param_store()
    loaded = load_fit(tmp_path / "fit", rebuilt()[0], data, *rebuilt()[1:])
    assert type(loaded) is type(fit)
    assert not len(pyro.get_param_store())
    torch.testing.assert_close(answers(loaded, data), before, rtol=0, atol=0)
    for field in ("losses", "history", "validation", "notes", "reason", "plates"):
        one, other = getattr(loaded, field), getattr(fit, field)
        assert str(one) == str(other), field
    spaces = {name: space for name, space in fit.supports.items() if name in loaded.supports}
    assert str(loaded.supports) == str(spaces)


def test_other_code_is_refused_by_name_and_unchanged(tmp_path):
    pyro.set_rng_seed(0)
    save(svi(herd, DATA), tmp_path / "herd")
    save(svi(Shared(), DATA), tmp_path / "shared")
    save(fit_svi(regressed, by_hand, WITH_COLUMN, **QUICK), tmp_path / "hand")

    def more_states(data):
        with pyro.contrib.autoname.scope(prefix="other"):
            return herd(data)

    def with_start(data):
        pyro.param("start", torch.zeros(2))
        by_hand(data)

    three = Shared()
    three.extra = torch.nn.Parameter(torch.zeros(1))
    before = {name: value.clone() for name, value in three.state_dict().items()}
    refusals = [
        (
            ("herd", more_states, DATA),
            r"centre is \(2,\) in the file, not in what",
        ),
        (("shared", three, DATA), r"model: extra is not in the file, \(1,\) torch"),
        (("shared", herd, DATA), "class of model is Shared in the file, function"),
        (("hand", regressed, WITH_COLUMN), "guide must be the function of the fit; got None"),
        (("hand", regressed, WITH_COLUMN, with_start), r"params: start is not in the file, \(2,\)"),
        (("herd", herd, DATA, AutoMultivariateNormal(herd)), "class of guide is AutoNormal in"),
    ]
    for (name, *given), message in refusals:
        with pytest.raises(ValueError, match=message):
            load_fit(tmp_path / name, *given)
    assert all(torch.equal(value, before[name]) for name, value in three.state_dict().items())
    with pytest.raises(ValueError, match="load_fit"):
        load_draws(tmp_path / "herd", herd)


def test_new_data_do_for_loading_where_priors_do_not_follow_them(tmp_path):
    pyro.set_rng_seed(0)
    fit = svi(herd, DATA)
    save(fit, tmp_path / "fit")
    loaded = load_fit(tmp_path / "fit", herd, NEW)
    torch.testing.assert_close(answers(loaded, DATA), answers(fit, DATA), rtol=0, atol=0)
    save(svi(tabular(), DATA), tmp_path / "flat")
    with pytest.raises(ValueError, match=r"unit of the data, .* Give the sequences"):
        load_fit(tmp_path / "flat", tabular(), Sequences.from_list([[100.0, 900.0, 40.0]]))


def test_a_guide_of_one_point_is_built_anew(tmp_path):
    pyro.set_rng_seed(0)
    fit = svi(tabular(), DATA, AutoDelta)
    save(fit, tmp_path / "fit")
    loaded = load_fit(tmp_path / "fit", tabular(), DATA)
    assert type(loaded.guide) is AutoDelta
    assert loaded.score(DATA) == fit.score(DATA)


def test_the_hmm_of_a_fit_is_in_its_file_if_there_is_one(tmp_path):
    fit = fit_em(TabularHMM(2, normal(0)), DATA, num_iterations=3)
    save(fit, tmp_path / "fit")
    evidence = load_hmm(tmp_path / "fit").with_lengths(NEW.lengths).log_prob(NEW.values)
    assert torch.equal(evidence, fit.hmm(NEW).log_prob(NEW.values))
    save(fit_map(herd, DATA, **QUICK), tmp_path / "herd")
    with pytest.raises(ValueError, match=r"without one HMM .* Call load_fit"):
        load_hmm(tmp_path / "herd")


def edited(directory, change):
    """Change the file of a fit, whose checksum is then that of the new content."""
    tensors, meta = files.read_directory(directory, "fit")
    change(tensors, meta)
    files.write_directory(directory, tensors, meta)


def renamed(tensors, meta):
    tensors["guide.another"] = tensors.pop(meta["order"][0])
    meta["order"][0] = "guide.another"


def without_guide(tensors, meta):
    for name in [name for name in meta["order"] if name.startswith("guide.")]:
        meta["order"].remove(name)
        del tensors[name]


def longer(part):
    def change(tensors, _):
        for name in [name for name in tensors if name.startswith(part)]:
            tensors[name] = torch.zeros(7)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda _, meta: meta.pop("order"),
        lambda _, meta: meta.update({"class": "Evil"}),
        lambda _, meta: meta.pop("losses", meta.pop("reason")),
        lambda _, meta: meta.update(plates=3),
        renamed,
        without_guide,
        longer("guide."),
        longer("parameters."),
    ],
)
def test_a_file_of_something_else_is_refused_and_nothing_changes(change, tmp_path):
    pyro.set_rng_seed(0)
    save(svi(Shared(), DATA), tmp_path / "fit")
    edited(tmp_path / "fit", change)
    model = Shared()
    with pytest.raises(ValueError, match=r"does not describe a fit|in the file"):
        load_fit(tmp_path / "fit", model, DATA)
    torch.testing.assert_close(model.scale, Shared().scale, rtol=0, atol=0)


def counted(kind=Poisson, columns=(0,), **options):
    return RegressionHMM(2, regression(kind, rate=list(columns)), **options)


COUNTS = Sequences.from_list(
    [torch.randint(5, (n,), generator=generator) for n in LENGTHS], covariates=COLUMNS
)
# what was fitted, another of the same shapes, its data, and what tells them apart
OTHERS = {
    "prior of rows": (
        lambda: TabularHMM(2, normal(0)),
        lambda: TabularHMM(2, normal(0), 1.0, sticky(2, 50.0)),
        DATA,
        r"transition_concentration is .* \[\[1.0, 1.0\].* the file, .* \[\[50.0, 1.0\]",
    ),
    "given in place of the data's": (
        lambda: TabularHMM(2, normal(0)),
        lambda: TabularHMM(2, normal(0, loc=torch.tensor(100.0), rate=torch.tensor(1.0))),
        DATA,
        "emission.of_data is True in the file, False",
    ),
    "given": (
        lambda: TabularHMM(2, normal(0, loc=1.0)),
        lambda: TabularHMM(2, normal(0, loc=2.0)),
        DATA,
        r"emission.prior_loc is .* \[1.0, 1.0\]' in the file, .* \[2.0, 2.0\]",
    ),
    "weight": (
        lambda: TabularHMM(2, normal(0, weight=1.0)),
        lambda: TabularHMM(2, normal(0, weight=2.0)),
        DATA,
        "emission.weight is 1.0 in the file, 2.0",
    ),
    "prior_scale": (
        lambda: counted(prior_scale=1.0),
        lambda: counted(prior_scale=2.0),
        COUNTS,
        "prior_scale is 1.0 in the file, 2.0",
    ),
    "kernel": (
        lambda: DenseHMM(2, 5, 2, kernel=dense.rbf(1.0)),
        lambda: DenseHMM(2, 5, 2, kernel=dense.rbf(2.0)),
        Sequences(COUNTS.values, COUNTS.lengths),
        "kernel.* is 1.0 in the file, 2.0",
    ),
    "distribution": (
        lambda: counted(),
        lambda: counted(Exponential),
        COUNTS,
        "kind is 'Poisson' in the file, 'Exponential'",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_hyperparameters_are_refused_by_name(name, tmp_path):
    make, other, data, message = OTHERS[name]
    pyro.set_rng_seed(0)
    fit = fit_em(make(), data, num_iterations=3, restarts=1)
    save(fit, tmp_path / "fit")
    given = other()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_fit(tmp_path / "fit", given, data)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert load_fit(tmp_path / "fit", make(), data).score(data) == fit.score(data)


def test_what_a_prior_is_for_a_model_is_compared(tmp_path):
    def prior(weight, hmm):
        return -weight * hmm.log_transition.exp().square().flatten(-2).sum(-1)

    one, other = (
        MarginalModel(TabularHMM(2, normal(0)), log_prior=partial(prior, weight))
        for weight in (1.0, 2.0)
    )
    save(fit_map(one, DATA, **QUICK), tmp_path / "fit")
    with pytest.raises(ValueError, match=r"log_prior.* is \[1.0\] in the file, \[2.0\]"):
        load_fit(tmp_path / "fit", other, DATA)


def test_a_file_that_does_not_say_what_it_was_made_with_is_loaded(tmp_path):
    fit = fit_em(TabularHMM(2, normal(0)), DATA, num_iterations=3)
    save(fit, tmp_path / "fit")
    edited(tmp_path / "fit", lambda _, meta: meta.pop("made"))
    assert load_fit(tmp_path / "fit", TabularHMM(2, normal(0)), DATA).score(DATA) == fit.score(DATA)


def test_arguments_in_another_order_are_told(tmp_path):
    with pytest.raises(TypeError, match="directory must be the name of a directory; got Marginal"):
        load_fit(tabular(), tmp_path / "fit", DATA)


class Named(PyroModule):
    """A model with names of its states."""

    def __init__(self):
        super().__init__()
        self.names = np.array(["rest", "run"])

    def forward(self, data):
        return herd(data)


def test_a_model_may_hold_words(tmp_path):
    save(fit_map(Named(), DATA, **QUICK), tmp_path / "fit")
    other = Named()
    load_fit(tmp_path / "fit", other, DATA)
    other.names = np.array(["rest", "fly"])
    with pytest.raises(ValueError, match=r"names is \['rest', 'run'\] in the file, \['rest', 'fly"):
        load_fit(tmp_path / "fit", other, DATA)
