"""What is computed on buckets of similar length is what all sequences give, padded together."""

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Categorical, Dirichlet, Normal, Poisson
from pyro.nn import PyroSample

from pyrohmm import (
    HMM,
    MarginalModel,
    RegressionHMM,
    Sequences,
    TabularHMM,
    fit_em,
    fit_gibbs,
    fit_mcmc,
    normal,
    parametric,
    regression,
    student_t,
)
from pyrohmm.data import packed
from pyrohmm.infer.mcmc import HMC
from pyrohmm.nn.base import HMMModule

LENGTHS = [30, 1, 1, 7, 2, 12]


@pytest.fixture
def both(monkeypatch):
    """Calls a function with data as one bucket, and in several."""

    def run(function, data):
        found = []
        for least in (1 << 16, 0):
            monkeypatch.setattr(packed, "LITTLE", least)
            monkeypatch.setattr(packed, "SHORT", least)
            some = data.with_total(data.total)
            some.__dict__.pop("bucket_members", None)
            assert (len(some.buckets) > 1) == (least == 0)
            pyro.set_rng_seed(0)
            found.append(function(some))
        return found

    return run


def data_of(constant=False, lengths=LENGTHS, counts=True, **further):
    """Counts or numbers with two covariates, some missing and some of known state."""
    random = torch.Generator().manual_seed(0)
    parts = {"covariates": [], "labels": [], "times": []}
    values = []
    for number, size in enumerate(lengths):
        level = torch.arange(size) // 5 % 2
        x = torch.randn(size, 2, generator=random).double()
        x = torch.full_like(x, number / 3) if constant else x
        x[:, 0] = 1.0
        rate = (level + 0.3 * x[:, 1]).exp()
        value = torch.poisson(rate, generator=random) if counts else rate
        value[3:4] = torch.nan
        values.append(value)
        parts["covariates"].append(x)
        known = torch.rand(size, generator=random) < 0.2
        parts["labels"].append(torch.where(known, level, -1))
        parts["times"].append(torch.rand(size, generator=random).double().cumsum(0))
    chosen = {name: part for name, part in parts.items() if further.get(name)}
    return Sequences.from_list(values, **chosen)


CASES = {
    "transitions": (
        lambda: RegressionHMM(2, regression(Poisson, rate=[0, 1]), transition=[0, 1], initial=[0]),
        {"covariates": True, "labels": True},
    ),
    "with priors": (
        lambda: RegressionHMM(3, regression(Poisson, rate=[0, 1], prior_scale=2.0), prior_scale=2),
        {"covariates": True},
    ),
    "one state": (
        lambda: RegressionHMM(1, regression(Poisson, rate=[0, 1])),
        {"covariates": True},
    ),
    "plain emission": (
        lambda: RegressionHMM(2, student_t(), transition=[0, 1], prior_scale=2.0),
        {"covariates": True, "counts": False},
    ),
    "rates": (
        lambda: RegressionHMM(2, normal(0), rates=[0, 1]),
        {"covariates": True, "times": True, "counts": False},
    ),
    "durations": (
        lambda: RegressionHMM(
            2,
            regression(Poisson, rate=[0, 1]),
            durations=regression(Poisson, rate=[0, 1]),
            max_duration=6,
        ),
        {"covariates": True, "constant": True},
    ),
    "gradient steps": (
        lambda: TabularHMM(2, parametric(Normal(torch.tensor([0.0, 2.0]), torch.ones(2)))),
        {"labels": True, "counts": False},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_em(case, both):
    make, further = CASES[case]
    options = {"num_iterations": 3, "tolerance": None}
    one, many = both(lambda data: fit_em(make().double(), data, **options), data_of(**further))
    torch.testing.assert_close(many.losses, one.losses, rtol=1e-8, atol=0)
    for name, value in one.parameters.items():
        torch.testing.assert_close(many.parameters[name], value, rtol=1e-4, atol=1e-6)


def test_sequences_of_one_step_have_no_transitions():
    data = data_of(lengths=[1] * 9, covariates=True)
    make = CASES["transitions"][0]
    fit = fit_em(make().double(), data, num_iterations=3, tolerance=None)
    assert bool((fit.losses.diff() <= 1e-9).all())


def test_parts_of_a_loss_and_bootstrap(both):
    data = data_of(counts=False, lengths=[30, 2, 9, 9, 30, 30])

    def asked(data):
        fit = fit_em(TabularHMM(2, normal(0)).double(), data, restarts=1, tolerance=1e-10)
        pyro.set_rng_seed(1)
        return fit.parts(data), fit.bootstrap(data, 6, parametric=False).std_errors()

    for one, many in zip(*both(asked, data)):
        assert one.keys() == many.keys()
        for name, value in one.items():
            torch.testing.assert_close(many[name], value, rtol=1e-4, atol=1e-6, equal_nan=True)


def chains(num_samples, warmup, num_chains):
    """Arguments of a sampler."""
    sizes = {"num_samples": num_samples, "warmup": warmup, "num_chains": num_chains}
    return sizes | {"num_temperatures": 1, "target_accept": 0.8, "progress": False}


def test_log_densities_of_chains(both):
    data = data_of(counts=False)
    model = MarginalModel(TabularHMM(2, normal(0)).double())

    def density(data):
        sampler = HMC(model, data, chains(5, 5, 3))
        return sampler.log_density(sampler.prior)

    torch.testing.assert_close(*both(density, data), rtol=1e-9, atol=0)


@pytest.mark.parametrize("temperatures", [1, 3])
def test_log_densities_of_gibbs_samples_are_those_of_the_data(temperatures, both):
    """Also with a scale that is not conjugate, which follows Hamiltonian steps."""

    def sampled(data):
        module = TabularHMM(2, normal(0))
        more = {"num_samples": 6, "warmup": 3, "num_chains": 2, "num_temperatures": temperatures}
        fit = fit_gibbs(module.double(), data, **more)
        return fit, fit_mcmc(MarginalModel(module.double()), data, start=fit, **more)

    data = data_of(counts=False)
    for fit in both(sampled, data)[1]:
        wanted = -sum(fit.parts(data).values())
        torch.testing.assert_close(fit.stats["lp"].max(), wanted, rtol=1e-6, atol=0)


def test_answers_of_estimators(monkeypatch):
    monkeypatch.setattr(packed, "LITTLE", 0)
    monkeypatch.setattr(packed, "SHORT", 0)
    sklearn = pytest.importorskip("pyrohmm.sklearn")
    X = np.concatenate(
        [np.sin(np.arange(size)) + 3 * (np.arange(size) // 5 % 2) for size in LENGTHS]
    )
    model = sklearn.GaussianHMM(2, n_iter=5, random_state=0).fit(X[:, None], lengths=LENGTHS)
    answers = [model.score(X[:, None], lengths=LENGTHS)]
    answers += [*model.score_samples(X[:, None], LENGTHS), *model.decode(X[:, None], LENGTHS)]
    answers += [*model.decode(X[:, None], LENGTHS, algorithm="map")]
    ends = np.cumsum(LENGTHS)
    single = [model.decode(X[b - n : b, None]) for n, b in zip(LENGTHS, ends)]
    probs = np.concatenate([model.predict_proba(X[b - n : b, None]) for n, b in zip(LENGTHS, ends)])
    total = sum(model.score(X[b - n : b, None]) for n, b in zip(LENGTHS, ends))
    wanted = [
        total,
        total,
        probs,
        sum(s for s, _ in single),
        np.concatenate([p for _, p in single]),
    ]
    wanted += [probs.max(1).sum(), probs.argmax(1)]
    for answer, right in zip(answers, wanted, strict=True):
        np.testing.assert_allclose(answer, right, rtol=1e-9)


class PerStep(HMMModule):
    """Matrices of so many steps, which all sequences share; ``cut`` to those that there are."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.faces = cut, torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])
        self.transition = PyroSample(Dirichlet(torch.full((29, 2, 2), 2.0)).to_event(2))

    def emission_module(self):
        return None

    def forward(self, lengths, observed=None):
        size = int(lengths.max()) if self.cut else 30
        even, steps = torch.full((2,), 0.5).log(), self.transition[..., : size - 1, :, :].log()
        return HMM(
            even, steps, Categorical(self.faces), lengths, observed, num_steps=size,
            transition_per_step=True,
        )  # fmt: skip


def of_faces(lengths):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(3, (len(lengths), max(lengths)), generator=generator)
    return Sequences(values, torch.tensor(lengths))


@pytest.mark.parametrize("lengths", [[30, 2, 30, 2, 2], [2, 2, 30, 2], [30, 7]], ids=str)
def test_em_of_matrices_of_each_step_that_sequences_share(both, lengths):
    start = {"transition": torch.full((1, 1, 29, 2, 2), 0.5)}

    def fit(data):
        return fit_em(
            PerStep(True), data, restarts=1, start=start, num_iterations=12, tolerance=None
        ).losses

    one, several = both(fit, of_faces(lengths))
    torch.testing.assert_close(one, several)
    assert (one.diff() < 1e-9).all()


def test_hamiltonian_chains_of_a_module_for_so_many_steps(both):
    def density(data):
        sampler = HMC(MarginalModel(PerStep(False)), data, chains(3, 2, 2))
        return sampler.log_density({name: 0 * x + 0.5 for name, x in sampler.prior.items()})

    one, several = both(density, of_faces([30, 2, 2, 7]))
    torch.testing.assert_close(one, several)


def test_hamiltonian_chains_with_a_prior_of_all_sequences(both):
    parts = [torch.randn(size, 2) for size in [80, 35, 3, 2, 2, 5]]
    data = Sequences.from_list([part[:, 0] for part in parts], covariates=parts)

    def density(data):
        module = RegressionHMM(2, normal(0), transition=[0, 1], prior_scale=1.0)
        model = MarginalModel(
            module, lambda hmm: -hmm.log_transition[..., 0, 1].exp().mean(-1).mean(-1, True)
        )
        sampler = HMC(model, data, chains(3, 2, 2))
        return sampler.log_density({name: 0 * x + 1.0 for name, x in sampler.prior.items()})

    one, several = both(density, data)
    torch.testing.assert_close(one, several)
