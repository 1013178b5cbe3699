"""Fits in several threads, inside other fits, and where gradients are switched off."""

import copy
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Categorical, Dirichlet, Normal
from pyro.infer.autoguide import AutoNormal, init_to_median
from pyro.poutine import runtime
from pyro.poutine.messenger import Messenger
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    DenseHMM,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    calibrate,
    categorical,
    check_model,
    fit_cooccurrence,
    fit_em,
    fit_gibbs,
    fit_laplace,
    fit_map,
    fit_mcmc,
    fit_svi,
    freeze,
    metrics,
    normal,
    report,
    starts,
)
from pyrohmm.nn.base import PYRO
from pyrohmm.sklearn import HMMEstimator

QUICK = {"num_iterations": 15, "tolerance": None, "progress": False}


def symbols(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Sequences(torch.randint(3, (6, 12), generator=generator), torch.full((6,), 12))


def module():
    return TabularHMM(2, categorical(3, 2.0), transition_concentration=torch.tensor([2.0, 3.0]))


def model(**options):
    return MarginalModel(module(), **options)


def by_map(data):
    return fit_map(model(), data, start=init_to_median, **QUICK)


def by_restarts(data):
    return fit_map(model(), data, restarts=3, **QUICK)


def by_svi(data):
    both = model()
    return fit_svi(both, AutoNormal(both), data, **QUICK)


def by_em(data):
    return fit_em(module(), data, **QUICK)


def by_gradient_em(data):
    return fit_em(DenseHMM(2, 3, dim=2), data, **QUICK)


def by_pairs(data):
    return fit_cooccurrence(module(), data, **QUICK)


FITS = [by_map, by_restarts, by_svi, by_em, by_pairs]


def is_clean():
    store = pyro.get_param_store()
    return not runtime._PYRO_STACK and not runtime._DIM_ALLOCATOR._stack and not len(store)


def in_threads(tasks):
    """Run functions at the same time, each in a thread."""
    barrier = Barrier(len(tasks))

    def run(task):
        torch.set_default_dtype(torch.float64)
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(run, task) for task in tasks]]


@pytest.mark.parametrize("fit", [by_map, by_svi, by_em])
def test_fits_in_eight_threads_all_end_and_leave_nothing_behind(fit):
    fits = in_threads([lambda seed=seed: fit(symbols(seed)) for seed in range(8)])
    assert all(bool(fit.losses.isfinite().all()) for fit in fits)
    assert is_clean()


def test_fits_in_threads_are_those_of_one_after_the_other():
    alone = [by_map(symbols(seed)) for seed in range(8)]
    together = in_threads([lambda seed=seed: by_map(symbols(seed)) for seed in range(8)])
    for one, other in zip(alone, together):
        assert torch.equal(one.losses, other.losses)


def test_modules_and_fits_are_read_in_threads_while_others_fit():
    data = symbols()
    fit = by_map(data)
    expected = fit.hmm(data).log_prob(data.values)

    def read():
        for _ in range(20):
            assert torch.equal(fit.hmm(data).log_prob(data.values), expected)
            module()(data.lengths).log_prob(data.values)

    in_threads([read, read, lambda: by_map(data), lambda: by_em(data), read, read])
    assert is_clean()


def test_queries_in_eight_threads_give_the_same():
    data = Sequences(torch.randint(3, (64, 60)), torch.full((64,), 60))
    hmm = by_em(data).hmm(data)

    def ask(_):
        states = hmm.posterior(data.values).state_probs
        return hmm.log_prob(data.values), states, hmm.viterbi(data.values)

    expected = ask(0)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(ask, range(32)):
            assert all(map(torch.equal, found, expected))


class Anchor:
    """A log-prior that stays close to the transitions of an inner fit."""

    def __init__(self, fit, nested):
        self.fit, self.nested = fit, nested
        self.matrix = None if nested else self.find()

    def find(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            data = symbols(5)
            return self.fit(data).hmm(data).log_transition.exp()

    def __call__(self, hmm):
        matrix = self.find() if self.nested else self.matrix
        return -(hmm.log_transition.exp() - matrix).square().flatten(-2).sum(-1)


OUTER = {
    "map": lambda prior: fit_map(
        model(log_prior=prior), symbols(), num_iterations=3, start=init_to_median
    ),
    "map restarts": lambda prior: fit_map(
        model(log_prior=prior), symbols(), num_iterations=3, restarts=2
    ),
    "em": lambda prior: fit_em(
        module(), symbols(), num_iterations=2, log_prior=prior, start=starts.from_prior
    ),
    "em restarts": lambda prior: fit_em(
        module(), symbols(), num_iterations=2, log_prior=prior, restarts=2, start=starts.from_prior
    ),
    "pairs": lambda prior: fit_cooccurrence(
        module(), symbols(), num_iterations=3, log_prior=prior, start=init_to_median
    ),
}


@pytest.mark.parametrize(
    ("outer", "inner"), list(zip(OUTER, [by_em, by_map, by_restarts, by_map, by_em]))
)
def test_a_fit_inside_the_log_prior_of_another_changes_nothing_else(outer, inner):
    losses = []
    for nested in (False, True):
        pyro.set_rng_seed(0)
        fit = OUTER[outer](Anchor(inner, nested))
        losses.append(fit.losses)
        assert is_clean()
    assert torch.equal(*losses)


def test_a_model_cannot_be_fitted_inside_its_own_fit_but_a_copy_can():
    seen = []

    def prior(hmm):
        with pytest.raises(ValueError, match="model must not be the one that the fit around"):
            fit_map(both, symbols(), num_iterations=1)
        seen.append(fit_map(free, symbols(), num_iterations=1, progress=False))
        return torch.zeros(())

    both = model(log_prior=prior)
    free = copy.deepcopy(model())
    fit_map(both, symbols(), num_iterations=1, progress=False)
    assert seen
    assert is_clean()


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_under_no_grad_is_the_same_fit(fit):
    pyro.set_rng_seed(0)
    expected = fit(symbols()).losses
    pyro.set_rng_seed(0)
    with torch.no_grad():
        assert torch.equal(fit(symbols()).losses, expected)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("fit", [*(fit for fit in FITS if fit is not by_em), by_gradient_em])
def test_a_fit_under_inference_mode_names_the_cure(fit):
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference_mode\(False\)"):
        fit(symbols())
    with torch.inference_mode(), torch.inference_mode(False):
        assert bool(fit(symbols()).losses.isfinite().all())


def interrupted_svi(log_prior):
    both = model(log_prior=log_prior)
    return fit_svi(both, AutoNormal(both), symbols(), **QUICK)


@pytest.mark.parametrize(
    "fit",
    [
        interrupted_svi,
        lambda prior: fit_map(model(log_prior=prior), symbols(), start=init_to_median, **QUICK),
        lambda prior: fit_map(model(log_prior=prior), symbols(), restarts=2, **QUICK),
        lambda prior: fit_em(module(), symbols(), log_prior=prior, **QUICK),
    ],
    ids=["svi", "map", "restarts", "em"],
)
def test_an_interrupt_leaves_nothing_of_a_fit_behind(fit):
    calls = []

    def interrupt(hmm):
        calls.append(hmm)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return hmm.log_prob(symbols().values).sum(-1) * 0

    with pytest.raises(KeyboardInterrupt):
        fit(interrupt)
    assert is_clean()
    with ThreadPoolExecutor(1) as other:  # the lock is free
        assert len(other.submit(by_em, symbols()).result(timeout=600).losses)


def subjects(data):
    """A level of each sequence."""
    spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("subjects", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(torch.zeros((), dtype=spread.dtype), spread))
        zero = torch.zeros(1, dtype=level.dtype)
        emission = Normal(level.unsqueeze(-1), 1.0)
        hmm = HMM(zero, zero.unsqueeze(0), emission, data.lengths, data.observed)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def levels():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 1, generator=generator) + torch.randn(6, 12, generator=generator)
    return Sequences(values, torch.full((6,), 12))


def exact(module, data):
    counts = data.values[data.observed].bincount(minlength=2)
    return {"emission.probs": Dirichlet(1.0 + counts).sample((15,))}


def numbers():
    return np.random.default_rng(0).normal(size=(60, 2))


def estimator(**options):
    return HMMEstimator(partial(TabularHMM, emission=normal(2)), 2, random_state=0, **options)


def public_calls(tmp_path):
    """Public calls that run a model, by name, each a function without arguments."""
    pyro.set_rng_seed(3)  # with which a short fit ends near a maximum
    data, own = symbols(), levels()
    even = MarginalModel(TabularHMM(2, categorical(3, 2.0)))
    fit, by_guide = by_em(data), fit_svi(even, AutoNormal(even), data, **QUICK)
    mixed = fit_laplace(subjects, own, ["level"])
    information, effects = fit.information(data), mixed.information(own)
    replicates = fit.bootstrap(data, 8)
    draws = PosteriorDraws.of(by_guide, num_draws=8)
    each = PosteriorDraws.of({"face": torch.full((1, 4, 6, 2, 3), 1 / 3)}, faces)
    done = estimator(n_iter=3).fit(numbers())
    share = lambda hmm: hmm.log_transition.exp()  # noqa: E731
    quick = {"num_samples": 6, "warmup": 4, "num_chains": 2, "progress": False}
    return {
        "fit_em": lambda: by_em(data),
        "fit_map": lambda: by_map(data),
        "fit_svi": lambda: by_svi(data),
        "fit_cooccurrence": lambda: by_pairs(data),
        "fit_laplace": lambda: fit_laplace(subjects, own, ["level"]),
        "fit_gibbs": lambda: fit_gibbs(module(), data, **quick),
        "fit_mcmc": lambda: fit_mcmc(model(), data, **quick),
        "information": lambda: fit.information(data),
        "of": lambda: information.of(share),
        "intervals of a function": lambda: information.intervals(of=share),
        "intervals": lambda: fit.intervals(data, of=share),
        "profile": lambda: fit.intervals(data, of="module.transition[0, 1]", method="profile"),
        "replicates": lambda: replicates.intervals(of=share),
        "effects": lambda: mixed.effects(own),
        "of effects": lambda: effects.of(lambda hmm: hmm.emission.mean),
        "check_model": lambda: check_model(fit, data, num_samples=4),
        "check_model of samples": lambda: check_model(draws, data),
        "report": lambda: report(fit, data, tmp_path / f"{threading.get_ident()}.html"),
        "num_parameters": lambda: metrics.num_parameters(module(), data),
        "bic": lambda: metrics.bic(fit, data),
        "held out": lambda: metrics.held_out_log_evidence(fit, data),
        "calibrate": lambda: calibrate(TabularHMM(1, categorical(2)), exact, torch.tensor([3]), 4),
        "aligned": lambda: draws.aligned(data),
        "log_prior": lambda: draws.log_prior(data),
        "for_new": lambda: each.for_new(symbols(1)),
        "guide": lambda: PosteriorDraws.of(by_guide, num_draws=4),
        "freeze": lambda: freeze(module(), "transition", torch.eye(2)),
        "from_prior": lambda: starts.from_prior(module(), data, 2),
        "estimator": lambda: estimator(n_iter=3).fit(numbers()),
        "estimator, asked": lambda: (done.predict(numbers()), done.aic(numbers()), done.sample(4)),
    }


def faces(data):
    """Probabilities of symbols of each sequence."""
    even = torch.full((2, 2), 0.5).log()
    with pyro.plate("subjects", data.total, subsample=data.indices):
        face = pyro.sample("face", Dirichlet(torch.ones(2, 3)).to_event(1))
        hmm = HMM(even[0], even, Categorical(face), data.lengths)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def test_every_public_call_holds_the_lock_where_it_enters_a_handler(tmp_path, monkeypatch):
    outside, enter = set(), Messenger.__enter__

    def watched(self):
        if not PYRO._is_owned():
            outside.add(name)
        return enter(self)

    name = "the fits that are asked"
    monkeypatch.setattr(Messenger, "__enter__", watched)
    for name, call in public_calls(tmp_path).items():  # noqa: B007  # read by watched
        call()
    assert not outside


def test_public_calls_in_four_threads_all_end_and_leave_nothing_behind(tmp_path):
    calls = list(public_calls(tmp_path).values())
    parts = [calls[first::4] for first in range(4)]
    in_threads([lambda part=part: [call() for call in part] for part in parts])
    assert is_clean()


def test_what_pyro_has_once_is_changed_under_a_lock(tmp_path, monkeypatch):
    """Two threads that switch validation off and on again could leave it off."""
    change, unlocked = pyro.primitives.enable_validation, []

    def watched(*arguments):
        unlocked.extend([] if PYRO._is_owned() else traceback.format_stack()[-4:-3])
        change(*arguments)

    monkeypatch.setattr(pyro.primitives, "enable_validation", watched)
    for call in public_calls(tmp_path).values():
        call()
    assert not unlocked


def test_estimators_in_threads_are_those_of_one_after_the_other():
    scores = [lambda n=n: estimator(n_iter=n).fit(numbers()).score(numbers()) for n in (2, 3, 4, 5)]
    alone = [score() for score in scores]
    assert in_threads(scores) == alone
    assert is_clean()
