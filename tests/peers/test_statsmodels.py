"""The switching regressions of statsmodels, as the documentation writes them."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


@pytest.fixture(scope="module")
def page():
    """The names that the code of the section defines."""
    section = PAGE.read_text().split("## From statsmodels")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.S | re.M)
    names = {"__name__": "page"}
    exec("import torch\nfrom pyrohmm import Sequences, fit_em\n" + code, names)
    return names


def filled(page, order, num_regressors=0, seed=0):
    """The module with some parameters."""
    random = np.random.default_rng(seed)
    module = page["MarkovAutoregression"](2, order, num_regressors)
    module.transition = torch.tensor(random.dirichlet([2.0, 2.0], size=2))
    module.loc = torch.tensor([-1.0, 1.5])
    module.weights = torch.tensor(random.uniform(-0.4, 0.4, order))
    module.slopes = torch.tensor(random.normal(size=(2, num_regressors)))
    module.scale = torch.tensor(0.7)
    return module


def log_likelihood(page, module, series, regressors=None):
    order = module.weights.numel()
    data = page["with_past"](series, order, regressors)
    hmm = module(data.lengths, None, data.covariates)
    return float(hmm.log_prob(data.values).detach())


@pytest.mark.parametrize(("order", "num_regressors"), [(0, 2), (1, 0), (2, 0)])
def test_its_likelihood_is_the_sum_over_all_paths(page, order, num_regressors):
    series, regressors = torch.randn(5 + order), torch.randn(5 + order, num_regressors)
    module = filled(page, order, num_regressors)
    names = "transition", "loc", "weights", "slopes"
    rows, loc, weights, slopes = (getattr(module, name).detach().numpy() for name in names)
    stay = rows[1, 0] / (rows[0, 1] + rows[1, 0])  # share of the time in state 0
    total, x = 0.0, series.numpy()
    for states in itertools.product(range(2), repeat=5 + order):
        chance = [stay, 1 - stay][states[0]]
        for before, after in itertools.pairwise(states):
            chance *= rows[before, after]
        for t in range(order, 5 + order):
            mean = loc[states[t]] + slopes[states[t]] @ regressors[t].numpy()
            for lag in range(1, order + 1):
                mean += weights[lag - 1] * (x[t - lag] - loc[states[t - lag]])
            chance *= np.exp(-(((x[t] - mean) / 0.7) ** 2) / 2) / (0.7 * np.sqrt(2 * np.pi))
        total += chance
    assert log_likelihood(page, module, series, regressors) == pytest.approx(np.log(total))


@pytest.mark.parametrize(("order", "num_regressors"), [(0, 2), (1, 0), (4, 0)])
def test_its_likelihood_is_that_of_statsmodels(page, order, num_regressors):
    switching = pytest.importorskip("statsmodels.tsa.api", reason="statsmodels is not installed")
    series, regressors = torch.randn(60), torch.randn(60, num_regressors)
    module = filled(page, order, num_regressors)
    parts = [
        module.transition[:, 0],
        module.loc,
        module.slopes.T,
        module.scale.square(),
        module.weights,
    ]
    parts = np.concatenate([part.detach().numpy().reshape(-1) for part in parts])
    if order:
        theirs = switching.MarkovAutoregression(series.numpy(), 2, order, switching_ar=False)
    else:
        theirs = switching.MarkovRegression(series.numpy(), 2, exog=regressors.numpy())
    found = log_likelihood(page, module, series, regressors)
    assert found == pytest.approx(theirs.loglike(parts))
