"""HMMs that begin in their stationary distribution: numbers printed in a book."""

import pyro
import pytest
import torch
from torch.testing import assert_close

from pyrohmm import Sequences, StationaryHMM, categorical, fit_em, metrics, poisson

# Major earthquakes in the world, 1900 to 2006: Zucchini, MacDonald and Langrock, Hidden Markov
# Models for Time Series, 2nd edition (2016), table 1.1.
EARTHQUAKES = """
13 14 8 10 16 26 32 27 18 32 36 24 22 23 22 18 25 21 21 14 8 11 14 23 18 17 19 20 22 19 13 26 13 14
22 24 21 22 26 21 23 24 27 41 31 27 35 26 28 36 39 21 17 22 17 19 15 34 10 15 22 18 15 20 15 22 19
16 30 27 29 23 20 16 21 21 25 16 18 15 18 14 10 15 8 15 6 11 8 7 18 16 13 12 13 20 15 16 12 18 15
16 13 15 16 11 11
"""


@pytest.mark.parametrize(
    ("num_states", "minus_log_likelihood", "aic", "bic"),
    [(1, 391.9189, 785.8, 788.5), (2, 342.3183, 692.6, 703.3), (3, 329.4603, 676.9, 701.0)],
)
def test_earthquakes_as_printed_in_the_book(num_states, minus_log_likelihood, aic, bic):
    """Table 3.1 of the second edition, with Poisson states."""
    pyro.set_rng_seed(0)
    counts = torch.tensor([float(count) for count in EARTHQUAKES.split()])
    assert len(counts) == 107
    data = Sequences.from_list([counts])
    rates = torch.linspace(14.0, 29.0, num_states) if num_states > 1 else torch.tensor([19.0])
    stay = torch.full((num_states, num_states), 0.1).fill_diagonal_(0.8)
    start = {"transition": stay / stay.sum(-1, keepdim=True), "emission.rate": rates}
    module = StationaryHMM(num_states, poisson(rate=1e-9))
    fit = fit_em(module, data, start=start, tolerance=1e-9)
    evidence = fit.hmm(data).log_prob(data.values).item()
    assert -evidence == pytest.approx(minus_log_likelihood, abs=2e-3)
    assert metrics.aic(fit, data) == pytest.approx(aic, abs=0.06)
    assert metrics.bic(fit, data) == pytest.approx(bic, abs=0.06)


@pytest.mark.parametrize("length", [1, 4])
def test_restarts_gaps_and_a_first_state_that_is_stationary(length):
    pyro.set_rng_seed(length)
    data = Sequences.from_list([torch.randint(3, (length,)), torch.randint(3, (1,))])
    fit = fit_em(StationaryHMM(2, categorical(3, 2.0), 2.0), data, restarts=3, num_iterations=5)
    hmm = fit.hmm(data)
    assert_close(hmm.log_initial.exp(), hmm.stationary())
    assert bool((fit.losses.diff() < 1e-6).all())
