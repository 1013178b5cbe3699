"""Queries of chains that are not plain ones, against all paths and their expanded chains."""

import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson

from pyrohmm import (
    HSMM,
    ContinuousTimeHMM,
    FactorialHMM,
    Filter,
    SecondOrderHMM,
    Sequences,
    metrics,
    queries,
)

K, D, T = 3, 4, 5
LENGTHS = torch.tensor([5, 1, 4])
EMISSIONS = {
    "numbers": lambda: Normal(torch.tensor([0.0, 2.0, 4.0]), 1.0),
    "symbols": lambda: Categorical(
        torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    ),
    "counts": lambda: Poisson(torch.tensor([0.5, 2.0, 9.0])),
}


def lasting(censored_end=True, emission="numbers", censored_start=False):
    """An HSMM with a state that never lasts two steps, and one that never lasts three."""
    stay = torch.eye(K, dtype=torch.bool)
    transition = torch.randn(K, K).masked_fill(stay, -torch.inf).log_softmax(-1)
    duration = torch.randn(K, D)
    duration[0, 1], duration[1, 2:] = -torch.inf, -torch.inf
    observed = torch.ones(3, T, dtype=torch.bool)
    observed[0, 2] = False
    observed[2, 3] = False  # the last one of the third
    return HSMM(
        torch.randn(K).log_softmax(-1), transition, duration.log_softmax(-1), EMISSIONS[emission](),
        LENGTHS, observed, censored_end=censored_end, censored_start=censored_start,
    )  # fmt: skip


def several(emission=None):
    """Two chains, of two and three states."""
    logs = [torch.randn(size, size + 1).log_softmax(0).mT for size in (2, 3)]
    return FactorialHMM(
        [part[0].log_softmax(-1) for part in logs], [part[1:].log_softmax(-1) for part in logs],
        emission or Normal(torch.arange(6.0), 1.0), LENGTHS,
    )  # fmt: skip


CUTS = {"cut": (True, False), "ends": (False, False), "goes on": (True, True), "was": (False, True)}


def of_pairs(zero=False, emission="numbers"):
    """A chain of the second order, with or without a pair that nothing follows but itself."""
    tables = [torch.randn((K,) * core) for core in (1, 2, 3)]
    if zero:
        tables[1][0, 1] = tables[2][0, 1, :2] = -torch.inf
    observed = torch.ones(3, T, dtype=torch.bool)
    observed[0, 2] = False
    return SecondOrderHMM(
        *(table.log_softmax(-1) for table in tables), EMISSIONS[emission](), LENGTHS, observed
    )


@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize("emission", EMISSIONS)
@pytest.mark.parametrize("cuts", ["cut", "was"])
def test_residuals_of_durations_are_those_of_the_expanded_chain(cuts, emission, forecast):
    hsmm = lasting(CUTS[cuts][0], emission, CUTS[cuts][1])
    values = hsmm.sample()
    found = queries.pseudo_residuals(hsmm, values, forecast=forecast)
    wanted = queries.pseudo_residuals(hsmm.expanded(), values, forecast=forecast)
    torch.testing.assert_close(found, wanted)
    assert bool((found.upper[hsmm.exists & hsmm.observed] < 1).any())


@pytest.mark.parametrize("forecast", [True, False])
@pytest.mark.parametrize("emission", EMISSIONS)
def test_residuals_of_the_second_order_are_those_of_the_chain_of_pairs(emission, forecast):
    hmm = of_pairs(emission=emission)
    values = hmm.sample()
    found = queries.pseudo_residuals(hmm, values, forecast=forecast)
    wanted = queries.pseudo_residuals(hmm.expanded(), values, forecast=forecast)
    torch.testing.assert_close(found, wanted)


def test_residuals_are_shares_of_a_normaliser():
    """That of one value is a ratio of evidences, with the value replaced by all that are less."""
    hsmm = lasting(emission="symbols")
    values = hsmm.sample()
    values[0, 1] = 1
    others = [values.clone() for _ in range(3)]
    for symbol, each in enumerate(others):
        each[0, 1] = symbol
    evidence = torch.stack([hsmm.log_prob(each)[0].exp() for each in others])
    found = queries.pseudo_residuals(hsmm, values)
    assert found.lower[0, 1].item() == pytest.approx(
        (evidence[0] / evidence.sum()).item(), rel=1e-5
    )
    upto = (evidence[:2].sum() / evidence.sum()).item()
    assert found.upper[0, 1].item() == pytest.approx(upto, rel=1e-5)


@pytest.mark.parametrize("cuts", CUTS)
def test_what_follows_segments_completes_their_joint_density(cuts):
    """p(later | past) is the ratio of densities of the HSMM, whose last segment may go on."""
    end, start = CUTS[cuts]
    hmm = lasting(end, censored_start=start).replace(observed=None, lengths=torch.tensor([3, 3]))
    values, later = hmm.sample(), torch.randn(2, 2)
    ahead = queries.continuation(hmm, values, 2)
    whole = hmm.replace(lengths=torch.tensor([5, 5]), censored_end=True)
    if end:
        wanted = whole.log_prob(torch.cat([values, later], -1)) - hmm.log_prob(values)
    else:  # a segment ends with the data: the next one begins
        first = hmm.filtered(values).new_zeros(2, K)
        paths = torch.cartesian_prod(*[torch.arange(K)] * 5).unsqueeze(1).expand(-1, 2, -1)
        joint = whole.log_joint(torch.cat([values, later], -1), paths)
        moved = paths[..., 2] != paths[..., 3]
        joint = joint.masked_fill(~moved, -torch.inf).logsumexp(0)
        wanted = joint - hmm.log_prob(values) + first.sum(-1)
    torch.testing.assert_close(ahead.log_prob(later), wanted)


def test_what_follows_pairs_of_states_completes_their_joint_density():
    hmm = of_pairs().replace(observed=None, lengths=torch.tensor([3, 3]))
    values, later = hmm.sample(), torch.randn(2, 2)
    whole = hmm.replace(lengths=torch.tensor([5, 5]))
    torch.testing.assert_close(
        queries.continuation(hmm, values, 2).log_prob(later),
        whole.log_prob(torch.cat([values, later], -1)) - hmm.log_prob(values),
    )


def test_what_follows_in_time_completes_the_joint_density():
    rates = torch.tensor([[-1.0, 0.6, 0.4], [0.2, -0.5, 0.3], [0.0, 0.1, -0.1]])
    times = torch.rand(2, 5).cumsum(-1)
    emission, lengths = EMISSIONS["numbers"](), torch.tensor([3, 3])
    even = torch.zeros(3).log_softmax(-1)
    hmm = ContinuousTimeHMM(even, rates, emission, lengths, times[:, :3])
    values, later = hmm.sample(), torch.randn(2, 2)
    ahead = queries.continuation(hmm, values, times[:, 3:])
    whole = ContinuousTimeHMM(even, rates, emission, lengths + 2, times)
    wanted = whole.log_prob(torch.cat([values, later], -1)) - hmm.log_prob(values)
    torch.testing.assert_close(ahead.log_prob(later), wanted)
    assert torch.equal(ahead.times, times[:, 3:].double())


def test_filters_usage_and_spectrum_of_several_chains_are_those_of_the_product():
    hmm = several()
    values, chain = hmm.sample(), hmm.expanded()
    one, other = Filter(hmm), Filter(chain)
    torch.testing.assert_close(one.update(values), other.update(values))
    torch.testing.assert_close(one.predict(2).mean, other.predict(2).mean)
    data = Sequences(values, LENGTHS)
    usage = metrics.state_usage(hmm, data), metrics.state_usage(chain, data)
    torch.testing.assert_close(usage[0].counts, usage[1].counts)
    torch.testing.assert_close(
        metrics.transition_spectrum(hmm).singular_values,
        metrics.transition_spectrum(chain).singular_values,
    )
    torch.testing.assert_close(queries.dwell_time_mean(hmm), queries.dwell_time_mean(chain))
