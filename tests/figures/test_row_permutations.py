"""NUTS on both sides of a determinant of zero, against importance sampling."""

import importlib
import itertools
from pathlib import Path

import pyro
import pytest
import torch
from pyro.distributions import Dirichlet
from pyro.infer import MCMC, NUTS

from pyrohmm import (
    DiversityPrior,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    dpp,
)

FIGURES = Path(__file__).resolve().parents[2] / "figures"


@pytest.fixture
def nuts(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("common.row_permutations")


COUNTS = {
    2: torch.tensor([[2.0, 1.0], [1.0, 1.0]], dtype=torch.float64),
    3: torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64),
}
ALPHAS = {2: 4.0, 3: 2.0}


def diverse_rows(size, alpha):
    rows = pyro.sample("rows", Dirichlet(torch.ones(size, size)).to_event(1))
    pyro.factor("diversity", alpha * dpp.log_diversity(rows))
    return rows


def observed(size):
    """A chain whose transitions are counted, so that its posterior is Dirichlet times diversity."""

    def model():
        rows = diverse_rows(size, ALPHAS[size])
        pyro.factor("counts", (COUNTS[size] * rows.log()).sum())

    return model


def sampled(kernel, num_samples):
    sampler = MCMC(kernel, num_samples, 40, disable_progbar=True)
    sampler.run()
    return sampler.get_samples()["rows"]


@pytest.mark.parametrize(("size", "summed"), [(3, True), (2, False)])
def test_samples_are_those_of_importance_sampling(size, summed, monkeypatch, nuts):
    """Of the sum over all orders of the rows, and of swaps, which larger matrices take."""
    if not summed:
        monkeypatch.setattr(nuts, "MOST_ROWS", 1)
    proposals = Dirichlet(COUNTS[size] + 1).sample((200_000,))
    weights = (ALPHAS[size] * dpp.log_diversity(proposals)).softmax(0)
    mean = (weights[:, None, None] * proposals).sum(0)
    share = weights[torch.linalg.det(proposals) > 0].sum()
    assert 0.1 < share < 0.9
    kernel = nuts.RowPermutationNUTS(observed(size), "rows", max_tree_depth=2)
    found = sampled(kernel, 200 if size == 2 else 100)
    half = len(found) / 2  # of the samples independent, and three standard errors
    positive = (torch.linalg.det(found) > 0).double().mean()
    assert (positive - share).abs() < 3 * (share * (1 - share) / half).sqrt()
    assert bool(((found.mean(0) - mean).abs() < 3 * found.std(0) / half**0.5).all())


def test_trajectories_follow_the_density_of_all_orders(nuts):
    kernel, plain = nuts.RowPermutationNUTS(observed(3), "rows"), NUTS(observed(3))
    for each in (kernel, plain):
        each._initialize_model_properties((), {})
    rows = torch.randn(3, 2)
    orders = [{"rows": rows[list(order)]} for order in itertools.permutations(range(3))]
    exact = -torch.stack([-plain.potential_fn(each) for each in orders]).exp().sum().log()
    for each in orders:
        torch.testing.assert_close(kernel.potential_fn(each), exact)


def test_an_hmm_is_sampled(nuts):
    data = Sequences.from_list([[0, 1, 1, 0]])
    model = MarginalModel(TabularHMM(2, categorical(2)), DiversityPrior(4.0))
    kernel = nuts.RowPermutationNUTS(model, "module.transition", max_tree_depth=2)
    sampler = MCMC(kernel, 20, 5, disable_progbar=True)
    sampler.run(data)
    signs = torch.linalg.det(sampler.get_samples()["module.transition"]).sign()
    assert set(signs.tolist()) == {-1.0, 1.0}


def test_six_states_are_sampled_on_both_sides(nuts):
    """Without data, where every swap is accepted: an even number of them would keep the sign."""
    pyro.set_rng_seed(0)

    def model():
        diverse_rows(6, 2.0)

    found = sampled(nuts.RowPermutationNUTS(model, "rows", max_tree_depth=2), 20)
    assert set(torch.linalg.det(found).sign().tolist()) == {-1.0, 1.0}
