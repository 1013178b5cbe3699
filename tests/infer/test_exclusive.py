"""Fits in several threads, inside other fits, and where gradients are switched off."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal, init_to_median
from pyro.poutine import runtime

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_svi,
    starts,
)

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
        with pytest.raises(ValueError, match="model is in use by the fit around this one"):
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
        assert len(other.submit(by_em, symbols()).result(timeout=60).losses)
