"""``SecondOrderHMM`` against the sum over all paths, and the chain of pairs."""

import math

import pytest
import torch
from pyro.distributions import Normal

from pyrohmm import (
    SecondOrderHMM,
    Sequences,
    TabularHMM,
    TabularSecondOrderHMM,
    autoregressive_normal,
    categorical,
    fit_em,
)
from pyrohmm.chains import compound as chains


@pytest.fixture(autouse=True, params=["a chain of pairs", "steps of pairs"])
def _way(request, monkeypatch):
    """Both ways of computing, of which the number of states decides."""
    if request.param == "steps of pairs":
        monkeypatch.setattr(chains, "FEW", 0)


T = 5
LENGTHS = torch.tensor([5, 1, 2, 4])


def tables(k, *batch, zero=False, seed=1):
    source = torch.Generator().manual_seed(seed)
    parts = [torch.randn(*batch, *(k,) * core, generator=source) for core in (1, 2, 3)]
    if zero and k > 1:
        parts[1][..., 0, 1] = parts[2][..., 0, 1, 0] = -torch.inf
    return [part.log_softmax(-1) for part in parts]


def model(k=3, zero=False, observed=True, **options):
    seen = torch.rand(4, T, generator=torch.Generator().manual_seed(2)) < 0.8
    return SecondOrderHMM(
        *tables(k, zero=zero), Normal(torch.arange(float(k)), 1.5), LENGTHS,
        seen if observed else None, validate_args=True, **options,
    )  # fmt: skip


def score(hmm, scores, path):
    """Log p(x, z), term by term."""
    total = float(hmm.log_initial[path[0]])
    for t, z in enumerate(path):
        total += float(scores[t, z])
        if t == 1:
            total += float(hmm.log_second[path[0], z])
        elif t > 1:
            total += float(hmm.log_transition[path[t - 2], path[t - 1], z])
    return total


@pytest.fixture
def values():
    return torch.randn(4, T) + 1


@pytest.fixture(params=[(1, False), (2, True), (3, False), (3, True)], ids=str)
def hmm(request):
    return model(*request.param)


def test_the_joint_density_is_a_sum_of_terms(hmm, values):
    states = torch.randint(hmm.num_states, (4, T)).masked_fill(~hmm.exists, 0)
    found = hmm.log_joint(values, states)
    for i, length in enumerate(LENGTHS.tolist()):
        scores = hmm.emission.log_prob(values[i].unsqueeze(-1))
        scores = scores.masked_fill(~hmm.observed[i].unsqueeze(-1), 0.0)
        assert found[i].item() == pytest.approx(score(hmm, scores, states[i, :length].tolist()))


def test_nothing_leaves_the_range_of_numbers():
    """Evidence of 1e6 nats, and a pair of e^-3000 that becomes the only one possible."""
    even = torch.full((2, 2, 2), 0.5).log()
    stay = torch.eye(2).log()
    seen = torch.full((1, 4, 2), -1e6 / 4)
    seen[0, 0, 1] -= 3000.0
    seen[0, 3, 0] = -torch.inf
    found = chains.SecondOrderChain(even[0, 0], stay, stay.expand(2, 2, 2)).log_evidence(
        seen, LENGTHS[3:]
    )
    assert found.item() == pytest.approx(-1e6 - 3000 + math.log(0.5), abs=1e-6)


def test_observations_that_depend_on_those_before():
    data = Sequences(torch.randn(4, T, 2), LENGTHS)
    module = TabularSecondOrderHMM(2, autoregressive_normal(2, 1))
    hmm = module(data.lengths)
    large = hmm.expanded()
    torch.testing.assert_close(hmm.log_prob(data.values), large.log_prob(data.values))
    assert hmm.sample().shape == (4, T, 2)
    with pytest.raises(ValueError, match="expanded"):
        hmm.forecast(data.values, 2)
    assert large.forecast(data.values, 2).sample().shape == (4, 2, 2)


def test_it_finds_what_one_state_before_cannot_tell():
    """Of 0 0 1 1 0 0 1 1 the next symbol is known from two, and even from one."""
    data = Sequences.from_list([[0, 0, 1, 1] * 12, [1, 1, 0, 0] * 12])
    first, second = (
        fit_em(kind(2, categorical(2)), data, restarts=5)
        for kind in (TabularHMM, TabularSecondOrderHMM)
    )
    assert second.losses[-1] == pytest.approx(2 * math.log(2), abs=0.01)
    assert first.losses[-1] > 30
