"""What users see at the prompt: one line that says what a thing is, and how large."""

import torch
from pyro import distributions as dist

from pyrohmm import HMM, Filter, Sequences, TabularHMM, categorical, fit_em, normal


def test_an_hmm_says_its_sizes():
    hmm = TabularHMM(3, normal(2))(torch.tensor([4, 7]))
    assert repr(hmm) == (
        "HMM(3 states; Independent of event shape (2,); batch shape (2,), up to 7 steps)"
    )


def test_a_forecast_and_a_filter_say_their_sizes():
    half = torch.full((2, 2), 0.5).log()
    hmm = HMM(half[0], half, dist.Poisson(torch.tensor([1.0, 4.0])), torch.tensor([3, 2, 1]))
    assert repr(hmm.forecast(torch.ones(3, 3), 5)) == (
        "Forecast(5 steps; mixture over 2 states of Poisson; batch shape (3,), event shape ())"
    )
    stream = Filter(hmm)
    stream.update(torch.ones(3))
    assert repr(stream) == f"Filter(1 steps so far of streams (3,); {hmm!r})"


def test_a_fit_is_a_line():
    data = Sequences.from_list([[0, 1, 1, 0], [1, 0]])
    fit = fit_em(TabularHMM(2, categorical(2)), data, num_iterations=3, tolerance=None)
    shown = repr(fit)
    assert "\n" not in shown
    assert shown.startswith("Fit(EM of TabularHMM to 6 observed steps; 4 steps, ")
    assert f"{fit.losses[-1].item():.2f} nats" in shown
    assert shown.endswith(f"{fit.reason})")
    assert repr(data).startswith("Sequences(2 sequences of up to 4 steps, 6 observed")
