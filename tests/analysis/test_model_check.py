"""Checks of a fitted model, and the page about it."""

import math

import matplotlib.pyplot as plt
import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    categorical,
    check_model,
    fit_em,
    fit_svi,
    normal,
    report,
)
from pyrohmm.analysis.model_check import autocorrelation, quantiles, residual_plots


def levels(num_sequences=4, num_steps=80):
    """Two persistent levels in noise, of which one sequence has gaps."""
    pyro.set_rng_seed(3)
    states = (torch.rand(num_sequences, num_steps) < 0.05).long().cumsum(-1) % 2
    values = 4.0 * states + torch.randn(num_sequences, num_steps)
    observed = torch.ones(num_sequences, num_steps, dtype=torch.bool)
    observed[0, 10:14] = False
    lengths = torch.tensor([num_steps] * (num_sequences - 1) + [1])
    return Sequences(values, lengths, observed & (torch.arange(num_steps) < lengths.unsqueeze(-1)))


def test_statistics_read_what_is_observed_and_nothing_else():
    values = torch.tensor([[1.0, 2.0, 3.0, 99.0], [4.0, 99.0, 99.0, 99.0]])
    observed = values < 99
    data = Sequences(values, torch.tensor([4, 1]), observed)
    assert quantiles(data)[2] == 2.5
    pairs = torch.tensor([[1.0, 2.0], [2.0, 3.0]])
    torch.testing.assert_close(autocorrelation(data), torch.corrcoef(pairs.T)[0, 1])
    assert autocorrelation(data[1:]).isnan()


def test_a_true_model_passes_and_a_wrong_one_does_not():
    data = levels()
    good = check_model(fit_em(TabularHMM(2, normal(0)), data, restarts=3), data)
    assert all(bool((p > 0.01).all()) for p in good.p_values.values())
    bad = check_model(fit_em(TabularHMM(1, normal(0)), data), data)
    assert bad.p_values["autocorrelation"] < 0.01
    assert "autocorrelation" in str(bad)
    assert bad.simulated["quantiles"].shape == (200, 5)


def test_samples_of_a_posterior_and_statistics_of_ones_own():
    data = Sequences.from_list([[0, 1, 1, 2], [1]])
    model = MarginalModel(TabularHMM(1, categorical(3)))
    fit = fit_svi(model, AutoNormal(model), data, num_iterations=5)
    draws = PosteriorDraws.of(fit, num_draws=50)
    check = check_model(draws, data, {"ones": lambda data: (data.values == 1).sum()})
    assert check.simulated["ones"].shape == (50,)
    assert check.observed["ones"] == 3
    axes = check.plot("ones")
    assert axes.get_xlabel() == "ones"
    plt.close("all")


def test_residuals_of_a_true_model_are_normal_and_independent():
    data = levels(6, 200)
    hmm = fit_em(TabularHMM(2, normal(0)), data, restarts=3).hmm(data)
    left, _, right = residual_plots(hmm, data.values)
    expected, found = left.lines[0].get_data()
    assert abs(expected - found)[20:-20].max() < 0.3
    heights = right.containers[0].markerline.get_ydata()
    assert max(abs(heights)) < 4 / math.sqrt(len(found))
    plt.close("all")


@pytest.mark.parametrize("emission", [normal(0), normal(2), categorical(3)])
def test_a_page_about_a_fit(tmp_path, emission):
    pyro.set_rng_seed(0)
    shapes = {0: torch.randn(3, 40), 2: torch.randn(3, 40, 2)}
    size = emission.keywords.get("dim", None)
    values = torch.randint(3, (3, 40)) if size is None else shapes[size]
    data = Sequences(values, torch.tensor([40, 30, 1]))
    fit = fit_em(TabularHMM(1, emission), data)
    page = report(fit, data, tmp_path / "fit.html").read_text()
    assert page.count("<h2>") == 9
    assert page.count("data:image/png") >= 4
    assert "emission" in page
    assert ("Not shown" in page) == (size == 2)
    assert not plt.get_fignums()


def test_a_statistic_that_the_data_lack_has_no_p_value() -> None:
    data = Sequences.from_list([[0.1], [0.5], [-0.3]])
    fit = fit_em(TabularHMM(1, normal(0)), data)
    assert check_model(fit, data, num_samples=3).p_values["autocorrelation"].isnan()
