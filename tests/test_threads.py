"""Small work has one thread of torch, whatever it is set to, and leaves the setting as it was."""

import pytest
import torch

import pyrohmm._choices as threads
from pyrohmm import (
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    normal,
)
from pyrohmm.nn import NeuralHMM


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch):
    """The numbers of threads of all products of matrices since the start of the test."""
    found = []
    multiply = torch.Tensor.__matmul__

    def watched(self, other):
        found.append(torch.get_num_threads())
        return multiply(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    return found


def test_the_setting_returns_after_an_error():
    with pytest.raises(ZeroDivisionError), threads.threads_for(1):
        _ = torch.get_num_threads() // (torch.get_num_threads() - 1)


def test_large_work_keeps_all_threads():
    with threads.threads_for(threads.MILLISECOND + 1):
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("size", [2, 400])
def test_features_of_few_observations_are_multiplied_by_one_thread(seen, size):
    module = TabularHMM(3, normal(8))
    values = torch.randn(size, 60, 8)
    data = Sequences(values, torch.full((size,), 60))
    fit = fit_em(module, data, num_iterations=1, tolerance=None)
    seen.clear()
    hmm = fit.hmm(data)
    hmm.log_prob(data.values)
    work = size * 60 * 3 * 16
    assert set(seen) <= ({1} if work <= threads.MILLISECOND else {3})


@pytest.mark.parametrize("fit", [fit_em, lambda module, data, **options: fit_map(
    MarginalModel(module), data, **options)])  # fmt: skip
@pytest.mark.parametrize(("num_states", "wanted"), [(2, 1), (600, 3)])
def test_a_step_of_a_small_fit_has_one_thread(monkeypatch, fit, num_states, wanted):
    data = Sequences.from_list([[0, 1, 2, 1]] * 20)
    module = TabularHMM(num_states, categorical(3))
    found, build = [], TabularHMM.forward

    def watched(self, *arguments):
        found.append(torch.get_num_threads())
        return build(self, *arguments)

    monkeypatch.setattr(TabularHMM, "forward", watched)
    fit(module, data, num_iterations=3, tolerance=None)
    assert found.count(wanted) >= 2  # EM builds no HMM of tables but to check the first two times


def test_large_networks_keep_all_threads(monkeypatch):
    """Their products are worth it, however few the data."""
    found, build = [], NeuralHMM.forward

    def watched(self, *arguments):
        found.append(torch.get_num_threads())
        return build(self, *arguments)

    monkeypatch.setattr(NeuralHMM, "forward", watched)
    data = Sequences.from_list([[0, 1, 2, 1]])
    fit_map(MarginalModel(NeuralHMM(4, 3, 128)), data, num_iterations=2, tolerance=None)
    assert set(found) == {3}
