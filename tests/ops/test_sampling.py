"""Paths and evidence of many parameters in one pass, against the recursions of one at a time."""

import pytest
import torch

from pyrohmm.ops import recursions
from pyrohmm.ops.backends import has_numba
from pyrohmm.ops.markov import sample_paths

pytestmark = pytest.mark.skipif(not has_numba(), reason="the loop is compiled by Numba")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_states", [1, 2, 5])
def test_evidence_is_that_of_the_recursions_and_states_have_the_posterior(num_states, shared):
    """Ragged, with a step that is missing, a hard zero, and steps that share rows or do not."""
    torch.manual_seed(0)
    initial = torch.randn(2, num_states).log_softmax(-1)
    matrix = torch.randn(2, num_states, num_states)
    if num_states > 2:
        matrix[:, 0, 1] = -torch.inf
    matrix, table = matrix.log_softmax(-1), torch.randn(2, 4, num_states) - 300
    rows = torch.tensor([[0, 1, -1, 2, 3], [3, 3, 0, 0, 0], [2, 0, 0, 0, 0]])
    lengths = torch.tensor([5, 2, 1])
    if not shared:
        table = table[:, rows.clamp(min=0)].flatten(1, 2)
        table[:, 1, 1:] = -torch.inf
        rows = torch.arange(15).reshape(3, 5).masked_fill(rows < 0, -1)
    states, evidence = sample_paths(initial, matrix, table, rows, lengths)
    assert bool((states[:, 1, 2:] == 0).all())
    likelihood = table[:, rows.clamp(min=0)].masked_fill((rows < 0)[..., None], 0.0)
    wanted = recursions.log_evidence(initial[:, None], matrix[:, None, None], likelihood, lengths)
    torch.testing.assert_close(evidence, wanted.double(), rtol=1e-5, atol=1e-4)
    many = 4000
    parts = initial[:1].expand(many, -1), matrix[:1].expand(many, -1, -1), table[:1]
    states = sample_paths(*parts[:2], parts[2].expand(many, -1, -1), rows, lengths)[0]
    shares = torch.nn.functional.one_hot(states, num_states).double().mean(0)
    found = recursions.posterior(initial[0], matrix[0, None], likelihood[0], lengths)
    exists = torch.arange(5) < lengths[:, None]
    torch.testing.assert_close(
        shares[exists], found.state_probs.double()[exists], rtol=0, atol=0.04
    )


def test_what_leaves_the_range_is_left_to_others():
    initial, matrix = torch.full((1, 2), 0.5).log(), torch.eye(2).log()[None]
    table = torch.tensor([[[0.0, -400.0], [-400.0, 0.0]]])
    assert sample_paths(initial, matrix, table, torch.tensor([[0, 1]]), torch.tensor([2])) is None
