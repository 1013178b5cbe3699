"""Singular values of a transition matrix of which some rows exist at a time."""

import importlib
from pathlib import Path

import pyro
import pytest
import torch

from pyrohmm import NeuralHMM, Sequences, blocks

FIGURES = Path(__file__).parent.parent.parent / "figures"


@pytest.fixture
def spectrum(monkeypatch):
    """The module of the figures."""
    monkeypatch.syspath_prepend(str(FIGURES))
    return importlib.import_module("common.spectrum")


def large(two_level=True, num_states=12):
    """A block HMM with random parameters, and data for it."""
    pyro.set_rng_seed(0)
    three = blocks.from_clusters(torch.tensor([0, 1, 1, 2, 2, 0]), num_states // 3)
    module = NeuralHMM(num_states, 6, 8, blocks=three, two_level=two_level).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    data = Sequences.from_list([[0, 3, 1, 5, 2], [4], [2, 2, 3]])
    return module, data


@pytest.mark.parametrize("two_level", [False, True])
@pytest.mark.parametrize("chunk", [1, 50, 1 << 22])
def test_singular_values_are_those_of_the_whole_matrix(spectrum, monkeypatch, two_level, chunk):
    monkeypatch.setattr(spectrum, "CHUNK", chunk)
    module, data = large(two_level)
    hmm = module(data.lengths)
    matrix = hmm.log_transition.detach().double().exp()
    expected = torch.linalg.svdvals(matrix)
    for same in (hmm, hmm.dense()):
        found = spectrum.transition_spectrum(same, num_values=20)
        torch.testing.assert_close(found.singular_values, expected, rtol=1e-5, atol=1e-7)
        assert found.squares == pytest.approx(float(matrix.square().sum()), rel=1e-5)
        assert found.stable_rank == pytest.approx(
            float((expected.square().sum()) / expected[0] ** 2), rel=1e-5
        )


def test_the_largest_of_many_singular_values_are_found_without_the_matrix(spectrum, monkeypatch):
    """No matrix is asked for, and never are more rows computed at once than were allowed."""
    monkeypatch.setattr(spectrum, "CHUNK", 90 * 20)
    module, data = large(num_states=90)
    hmm = module(data.lengths)
    expected = torch.linalg.svdvals(hmm.log_transition.detach().double().exp())
    sizes, rows = [], spectrum.InnerProductTransition.rows

    def spy(self, states):
        sizes.append(len(states))
        return rows(self, states)

    monkeypatch.setattr(spectrum.InnerProductTransition, "rows", spy)
    monkeypatch.setattr(spectrum.InnerProductTransition, "matrix", None)
    found = spectrum.transition_spectrum(module(data.lengths), 6, 3)
    assert max(sizes) == 20
    assert sum(sizes) == 4 * 90
    torch.testing.assert_close(found.singular_values, expected[:6], rtol=1e-4, atol=0)
    shares = expected.square().cumsum(0) / expected.square().sum()
    for share in (0.5, 0.9, 1.0):
        rank = int((shares < share).sum()) + 1
        assert found.effective_rank(share) == (rank if rank <= 6 else None)
    assert found.effective_rank(1.0) is None
