"""Runs of equal states, against a loop over steps."""

import numpy as np
import pytest
import torch
from pyro.distributions import Categorical
from scipy.linalg import expm

from pyrohmm import HSMM, ContinuousTimeHMM, queries


def slow(path):
    """Segments of one path, step by step."""
    found = []
    for step, state in enumerate(path):
        if step and path[step - 1] == state:
            found[-1][2] = step
        else:
            found.append([state, step, step])
    return [(state, first, last, last - first + 1) for state, first, last in found]


@pytest.mark.parametrize("num_steps", [1, 2, 30])
def test_segments_are_those_of_a_loop(num_steps):
    states = torch.randint(3, (4, num_steps))
    lengths = torch.randint(1, num_steps + 1, (4,))
    found = queries.segments(states, lengths)
    for number in range(4):
        rows = [row[1:] for row in found if row.sequence == number]
        assert rows == slow(states[number, : lengths[number]].tolist())
    assert queries.segments(states[0]) == [row for row in queries.segments(states[:1])]
    assert sum(row.length for row in found) == int(lengths.sum())


def test_segments_of_a_semi_markov_path_are_those_that_its_density_counts():
    initial, transition = torch.tensor([0.2, 0.3, 0.5]).log(), torch.tensor(
        [[0.0, 0.4, 0.6], [0.9, 0.0, 0.1], [0.5, 0.5, 0.0]]
    ).log()  # fmt: skip
    duration, lengths = torch.rand(3, 4).log_softmax(-1), torch.tensor([9, 6])
    hsmm = HSMM(initial, transition, duration, Categorical(torch.ones(3, 1)), lengths,
                censored_end=False)  # fmt: skip
    values, states = hsmm.sample_with_states()
    expected, before = initial[states[:, 0]], None
    for row in queries.segments(states, hsmm.lengths):
        expected[row.sequence] += duration[row.state, row.length - 1]
        if row.first:
            expected[row.sequence] += transition[before.state, row.state]
        before = row
    torch.testing.assert_close(hsmm.log_joint(values, states), expected)


def test_prevalence_counts_as_a_loop_over_sequences_does():
    """The dead are counted on; others until their last step; expected are as many, by the rates."""
    torch.manual_seed(1)
    rates = torch.tensor([[-0.7, 0.5, 0.2], [0.3, -0.6, 0.3], [0.0, 0.0, 0.0]]).double()
    lengths = torch.tensor([5, 1, 3, 4, 2])
    times = 10 + torch.rand(5, 5).double().cumsum(-1)
    states = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 0, 0], [0, 1, 2, 0, 0], [1, 1, 0, 0, 1],
                           [0, 2, 0, 0, 0]])  # fmt: skip
    emission = Categorical(torch.eye(3).double())
    hmm = ContinuousTimeHMM(
        torch.zeros(3).double().log_softmax(-1), rates, emission, lengths, times
    )
    wanted = torch.tensor([0.0, 0.6, 1.5, 4.0])
    table = queries.prevalence(hmm, states, wanted)
    for tau, observed, expected in zip(wanted.tolist(), table.observed, table.expected):
        counts = [0, 0, 0]
        for n in range(5):
            elapsed = [time - times[n, 0] for time in times[n, : lengths[n]]]
            path = states[n, : lengths[n]].tolist()
            if tau <= elapsed[-1] or path[-1] == 2:
                counts[[k for k, time in zip(path, elapsed) if time <= tau][-1]] += 1
        assert observed.tolist() == counts
        share = np.array([0.6, 0.4, 0.0]) @ expm(tau * rates.numpy())
        assert expected.tolist() == pytest.approx((sum(counts) * share).tolist())
    padded = torch.where(hmm.exists, states, -1)
    assert torch.equal(queries.prevalence(hmm, padded, wanted).observed, table.observed)
