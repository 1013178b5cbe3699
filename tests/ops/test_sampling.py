"""Paths and evidence of many parameters in one pass, against the recursions of one at a time."""

import pytest
import torch

from pyrohmm.ops import recursions
from pyrohmm.ops.backends import NUMBA, TORCH, has_numba, use
from pyrohmm.ops.recursions import sample_paths

ENGINES = [TORCH, NUMBA] if has_numba() else [TORCH]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("by_symbols", [True, False])
@pytest.mark.parametrize("num_states", [1, 2, 5])
def test_evidence_is_that_of_the_recursions_and_states_have_the_posterior(
    num_states, by_symbols, engine
):
    """Ragged, with a step that is missing and a hard zero; of some parameters numbers are lost."""
    torch.manual_seed(0)
    initial = torch.randn(2, 1, num_states).log_softmax(-1)
    matrix = torch.randn(2, 1, 1, num_states, num_states)
    if num_states > 2:
        matrix[..., 0, 1] = -torch.inf
    matrix, table = matrix.log_softmax(-1), torch.randn(2, 1, num_states, 4) - 300
    table[1] *= 30.0
    symbols = torch.tensor([[0, 1, 0, 2, 3], [3, 3, 0, 0, 0], [2, 0, 0, 0, 0]])
    known = torch.ones_like(symbols, dtype=torch.bool)
    known[0, 2], lengths = False, torch.tensor([5, 2, 1])
    likelihood = table.squeeze(1).mT[:, symbols].masked_fill(~known.unsqueeze(-1), 0.0)
    steps = initial, matrix, likelihood, lengths
    parts = (initial, matrix, table, lengths, symbols, known) if by_symbols else steps
    with use(engine):
        states, evidence = sample_paths(*parts, num_samples=4000)
    assert bool((states[:, :, 1, 2:] == 0).all())
    wanted = recursions.log_evidence(*steps)
    torch.testing.assert_close(evidence, wanted.double(), rtol=1e-5, atol=1e-4)
    shares = torch.nn.functional.one_hot(states, num_states).double().mean(0)
    found = recursions.posterior(*steps).state_probs.double()
    exists = torch.arange(5) < lengths[:, None]
    torch.testing.assert_close(shares[:, exists], found[:, exists], rtol=0, atol=0.04)


@pytest.mark.parametrize("engine", ENGINES)
def test_paths_of_sequences_that_leave_the_range_are_sampled_in_logarithms(engine):
    """The other ones are not, and a sequence of probability zero has evidence -inf."""
    initial, matrix = torch.full((2,), 0.5).log(), torch.tensor([[[0.0, -900.0], [-900.0, 0.0]]])
    steps = torch.tensor([[0.0, -400.0], [-2000.0, 0.0]]).expand(3, 2, 2).clone()
    steps[1], steps[2] = 0.0, -torch.inf
    with use(engine):
        states, evidence = sample_paths(initial, matrix, steps, torch.tensor([2, 2, 2]))
    assert states[0, 0].tolist() == [1, 1]
    assert states[0, 1, 0] == states[0, 1, 1]
    wanted = torch.tensor([-400.0, 0.0, -torch.inf]) + initial[0] * torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(evidence, wanted.double())
