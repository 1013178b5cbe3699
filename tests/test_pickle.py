"""What can be pickled and copied, in this process and for others, and then gives the same."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pyro
import pytest
import torch
from families import CASES, STATES
from pyro.distributions import VonMises
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from pyrohmm import (
    HMM,
    DenseHMM,
    DiversityPrior,
    EnumeratedModel,
    Filter,
    MarginalModel,
    NeuralHMM,
    Sequences,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    additive_bernoulli,
    additive_normal,
    autoregressive_categorical,
    autoregressive_normal,
    blocks,
    categorical,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_svi,
    free_durations,
    geometric_durations,
    left_to_right,
    negative_binomial_durations,
    nn,
    normal,
    parametric,
    poisson_durations,
)

QUICK = {"num_iterations": 3, "progress": False}


def symbols():
    generator = torch.Generator().manual_seed(0)
    return Sequences(torch.randint(3, (6, 12), generator=generator), torch.arange(7, 13))


def two_blocks():
    return blocks.from_clusters(torch.tensor([0, 0, 1]), 2)


MODULES = {
    **{name: lambda case=case: TabularHMM(STATES, case.family()) for name, case in CASES.items()},
    "parametric": lambda: TabularHMM(2, parametric(VonMises(torch.zeros(2), torch.ones(2)))),
    "left to right": lambda: TabularHMM(
        3, categorical(3), transition_allowed=left_to_right(3, jump=1)
    ),
    **{
        family.__name__: lambda family=family: TabularHSMM(2, normal(0), family(4))
        for family in (
            free_durations,
            geometric_durations,
            poisson_durations,
            negative_binomial_durations,
        )
    },
    "several chains": lambda: TabularFactorialHMM((2, 2), additive_normal((2, 2), 2)),
    "weights that rows share": lambda: nn.StickyHDPHMM(2, categorical(2), kappa=(1.0, 1.0)),
    "two states before": lambda: TabularSecondOrderHMM(2, categorical(2)),
    "logits that add": lambda: TabularFactorialHMM((2, 2), additive_bernoulli((2, 2), 2)),
    "autoregressive vectors": lambda: TabularHMM(2, autoregressive_normal(2)),
    "autoregressive symbols": lambda: TabularHMM(2, autoregressive_categorical(3)),
    "dense": lambda: DenseHMM(3, 3, dim=2),
    "dense rbf": lambda: DenseHMM(3, 3, dim=2, kernel=nn.dense.rbf(2.0)),
    "dense normal": lambda: DenseHMM(2, None, dim=2, emission=normal(1)),
    "neural": lambda: NeuralHMM(4, 3, 8),
    "neural blocks": lambda: NeuralHMM(4, 3, 8, blocks=two_blocks()),
}


def through_pickle(thing):
    return pickle.loads(pickle.dumps(thing))


WAYS = {"pickle": through_pickle, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_went_through_samples_and_builds_the_same(name, way):
    module = MODULES[name]()
    other = WAYS[way](module)
    hmms = []
    for part in (module, other):
        pyro.set_rng_seed(1)
        with torch.no_grad():
            hmms.append(part(torch.tensor([3, 2])))
    again = WAYS[way](hmms[0])
    pyro.set_rng_seed(2)
    values = hmms[0].sample()
    for hmm in (hmms[1], again):
        assert torch.equal(hmm.log_prob(values), hmms[0].log_prob(values))


def by_svi(autoguide):
    model = MarginalModel(TabularHMM(2, categorical(3)), log_prior=DiversityPrior(2.0))
    return fit_svi(model, autoguide(model), symbols(), **QUICK)


FITS = {
    "em": lambda: fit_em(TabularHMM(2, categorical(3)), symbols(), **QUICK),
    "em restarts": lambda: fit_em(TabularHMM(2, categorical(3)), symbols(), restarts=2, **QUICK),
    "map": lambda: fit_map(EnumeratedModel(TabularHMM(2, categorical(3, 2.0))), symbols(), **QUICK),
    "pairs": lambda: fit_cooccurrence(DenseHMM(2, 3, dim=2), symbols(), **QUICK),
    "svi": lambda: by_svi(AutoNormal),
    "svi full": lambda: by_svi(AutoMultivariateNormal),
    "neural": lambda: fit_map(MarginalModel(NeuralHMM(4, 3, 8)), symbols(), **QUICK),
}


def evidence(fit):
    pyro.set_rng_seed(3)
    return fit.hmm(symbols()).log_prob(symbols().values)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FITS)
def test_a_fit_gives_the_same_after(name, way):
    fit = FITS[name]()
    other = WAYS[way](fit)
    assert torch.equal(evidence(other), evidence(fit))
    assert other.summary() == fit.summary()
    if fit.restarts is not None:
        assert torch.equal(other.restarts.align(symbols()), fit.restarts.align(symbols()))


def test_a_copy_of_a_fit_shares_nothing_with_it():
    """Its guide reads the model of the copy, which can be trained on while the first stays."""
    fit = by_svi(AutoNormal)
    before = evidence(fit)
    other = copy.deepcopy(fit)
    with torch.no_grad():
        for parameter in (*other.model.parameters(), *other.guide.parameters()):
            parameter.add_(1.0)
    assert torch.equal(evidence(fit), before)
    samples = []
    for each in (fit, other):
        pyro.set_rng_seed(0)
        samples.append(each.samples(2)["module.transition"])
    assert not torch.equal(*samples)


@pytest.mark.parametrize("way", WAYS)
def test_a_filter_goes_on_after(way):
    fit = FITS["em"]()
    filtered = Filter(fit.hmm(symbols()[:1]))
    filtered.update(torch.tensor([1]))
    other = WAYS[way](filtered)
    assert torch.equal(other.update(torch.tensor([2])), filtered.update(torch.tensor([2])))


# Other processes -------------------------------------------------------------------------------


def evidence_elsewhere(fit):
    torch.set_default_dtype(torch.float64)
    return evidence(fit), multiprocessing.current_process().pid


def fit_elsewhere(module, seed):
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(seed)
    return fit_em(module, symbols(), **QUICK)


def test_fits_go_to_a_process_that_is_spawned_and_come_back():
    fits = [FITS[name]() for name in ("em restarts", "map", "svi")]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for fit, (found, pid) in zip(fits, pool.map(evidence_elsewhere, fits)):
            assert pid != multiprocessing.current_process().pid
            torch.testing.assert_close(found, evidence(fit), rtol=1e-12, atol=0)
        module = TabularHMM(2, categorical(3))
        there = pool.submit(fit_elsewhere, module, 5).result()
    torch.testing.assert_close(there.losses, fit_elsewhere(module, 5).losses, rtol=1e-12, atol=0)


def test_an_hmm_whose_parameters_carry_a_graph_can_be_copied():
    logits = torch.zeros(2, 3, requires_grad=True)
    scale = torch.ones(1, requires_grad=True)
    even = torch.full((2, 2), 0.5).log()
    normal = pyro.distributions.Normal(logits * 2, (scale * 3).expand(2, 3)).to_event(1)
    hmm = HMM(even[0], even, normal, torch.tensor([4]))
    other = copy.deepcopy(hmm)
    values = torch.randn(1, 4, 3)
    assert torch.equal(other.log_prob(values), hmm.log_prob(values))
    assert other.emission.base_dist.loc.is_leaf
    assert other.emission.base_dist.scale.stride() == hmm.emission.base_dist.scale.stride()
    with torch.no_grad():
        other.emission.base_dist.loc.add_(1.0)
    assert not hmm.emission.base_dist.loc.any()
