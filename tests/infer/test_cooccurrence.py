"""Co-occurrences: counts against loops, losses against the dense formula, fits of pairs."""

import itertools
import math

import numpy as np
import pyro
import pytest
import torch
from largest import Largest
from pyro import poutine
from pyro.infer.autoguide import init_to_value

from pyrohmm import (
    HMM,
    CooccurrenceModel,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_cooccurrence,
    fit_em,
    fit_map,
)
from pyrohmm.infer import cooccurrence as pair_counts
from pyrohmm.infer.cooccurrence import count_pairs
from pyrohmm.ops import pairs as pair_losses
from pyrohmm.ops.markov import joint_probs, predicted, stationary, stationary_detached
from pyrohmm.ops.pairs import Pairs, cross_entropy, relative_distance, squared_distance

LOSSES = [squared_distance, relative_distance, cross_entropy]


@pytest.fixture
def sparse(monkeypatch):
    """Small vocabularies take the way of large ones."""
    monkeypatch.setattr(pair_losses, "SMALL", 0)


def random_data(seed, num_sequences=7, num_steps=9, num_symbols=4):
    """Sequences with padding and gaps, in which there is anything, as ``9`` is."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, num_steps + 1, (num_sequences,), generator=generator)
    lengths[0] = num_steps
    observed = torch.rand(num_sequences, num_steps, generator=generator) < 0.8
    values = torch.randint(num_symbols, (num_sequences, num_steps), generator=generator)
    exists = torch.arange(num_steps) < lengths.unsqueeze(-1)
    return Sequences(values.masked_fill(~(observed & exists), 9), lengths, observed)


def by_loop(data, num_symbols, lag):
    """Pairs counted one by one."""
    counts = torch.zeros(num_symbols, num_symbols, dtype=torch.long)
    for n in range(len(data)):
        for t in range(int(data.lengths[n]) - lag):
            if data.observed[n, t] and data.observed[n, t + lag]:
                counts[data.values[n, t], data.values[n, t + lag]] += 1
    return counts


def random_pairs(num_symbols, seed=0, share=0.5):
    """Some of all pairs, with small counts."""
    rng = np.random.default_rng(seed)
    size = max(1, round(share * num_symbols**2))
    keys = torch.from_numpy(rng.choice(num_symbols**2, size, replace=False))
    counts = torch.from_numpy(rng.integers(1, 6, size))
    return Pairs(keys // num_symbols, keys % num_symbols, counts, num_symbols)


def random_joint(*batch, num_states=3, num_symbols=4, seed=0):
    """Joint probabilities of two states, and probabilities of symbols."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.rand(*batch, num_states, num_states, generator=generator, dtype=torch.double)
    probs = torch.rand(*batch, num_states, num_symbols, generator=generator, dtype=torch.double)
    return both / both.sum((-2, -1), keepdim=True), probs / probs.sum(-1, keepdim=True)


def by_formula(loss, joint, probs, shares):
    """The losses as they are written on paper."""
    pair_probs = probs.mT @ joint @ probs
    if loss is squared_distance:
        return (pair_probs - shares).square().sum((-2, -1))
    if loss is relative_distance:
        shares_of_one = (shares.sum(-1) + shares.sum(-2)) / 2
        m = (shares_of_one + 1 / shares.size(-1)) / 2
        return ((pair_probs - shares).square() / (m[..., None] * m[..., None, :])).sum((-2, -1)) / 2
    return -torch.where(shares > 0, shares * pair_probs.log(), 0.0).sum((-2, -1))


# Counting


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_counts_are_those_of_a_loop(lag):
    data = random_data(0)
    pairs, expected = count_pairs(data, 4, lag), by_loop(data, 4, lag)
    table = torch.zeros(4, 4, dtype=torch.long)
    table[pairs.first, pairs.second] = pairs.counts
    assert torch.equal(table, expected)
    assert pairs.total == expected.sum()
    assert len(pairs) == (expected > 0).sum()
    keys = 4 * pairs.first + pairs.second
    assert (keys.diff() > 0).all()
    torch.testing.assert_close(pairs.dense(), expected / expected.sum())


@pytest.mark.parametrize(("chunk", "size"), [(1, 3), (5, 1), (1 << 20, 3)])
def test_a_stream_is_counted_as_the_whole(monkeypatch, chunk, size):
    data = random_data(0, num_sequences=11)
    whole = count_pairs(data, 4)
    monkeypatch.setattr(pair_counts, "CHUNK", chunk)
    parts = [data[n : n + size] for n in range(0, len(data), size)]
    for source in (data, parts, iter(parts)):
        found = count_pairs(source, 4)
        for name in ("first", "second", "counts"):
            assert torch.equal(getattr(found, name), getattr(whole, name))


# Losses


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batch", [(), (3, 1)])
@pytest.mark.parametrize(("num_states", "num_symbols"), [(1, 1), (2, 3), (5, 17)])
@pytest.mark.parametrize("small", [0, 256])
def test_losses_of_pairs_are_those_of_the_dense_law(
    monkeypatch, loss, batch, num_states, num_symbols, small
):
    monkeypatch.setattr(pair_losses, "SMALL", small)
    parts = random_joint(*batch, num_states=num_states, num_symbols=num_symbols)
    pairs = random_pairs(num_symbols)
    found, expected = [], []
    for target, kept in ((pairs, found), (pairs.dense(), expected)):
        joint, probs = (part.clone().requires_grad_() for part in parts)
        value = (
            loss(joint, probs, target) if kept is found
            else by_formula(loss, joint, probs, target)
        )  # fmt: skip
        assert value.shape == batch
        weights = torch.arange(1.0, 1 + value.numel()).reshape(batch)
        kept += [value, *torch.autograd.grad((weights * value).sum(), (joint, probs))]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(loss(*parts, pairs.dense()), expected[0], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("sparse")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_losses_can_be_differentiated_twice(loss, batch):
    joint, probs = (part.requires_grad_() for part in random_joint(*batch))
    pairs = random_pairs(4)
    assert torch.autograd.gradcheck(lambda *parts: loss(*parts, pairs), (joint, probs))
    assert torch.autograd.gradgradcheck(lambda *parts: loss(*parts, pairs), (joint, probs))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_symbols", [12, 300])
def test_single_precision_loses_nothing_near_a_fit(loss, num_symbols):
    """The terms of the squared distance cancel: they are added up in double precision.

    The counts are the probabilities themselves, rounded to a millionth, so that the distance is
    some 1e-12, and its terms are up to 1e-2. Rounding the arguments changes it by 1e-7 of their
    size.
    """
    joint, probs = (part.float() for part in random_joint(num_symbols=num_symbols))
    pair_probs = (probs.double().mT @ joint.double() @ probs.double()).flatten()
    counts = (1e9 * pair_probs).round().long() + 1
    keys = torch.arange(num_symbols**2)
    pairs = Pairs(keys // num_symbols, keys % num_symbols, counts, num_symbols)
    single = loss(joint.requires_grad_(), probs.requires_grad_(), pairs)
    assert single.dtype == torch.float32
    exact = by_formula(loss, joint.double(), probs.double(), pairs.dense())
    torch.testing.assert_close(single.double(), exact, rtol=1e-6, atol=1e-15)
    pairs = random_pairs(num_symbols)  # far from the model, where the gradient does not cancel
    slopes = torch.autograd.grad(loss(joint, probs, pairs), (joint, probs))
    value = by_formula(loss, joint.double(), probs.double(), pairs.dense())
    for slope, other in zip(slopes, torch.autograd.grad(value, (joint, probs))):
        assert (slope - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("small", [0, 256])
def test_an_impossible_pair_makes_the_cross_entropy_infinite_and_no_gradient_nan(
    monkeypatch, small
):
    monkeypatch.setattr(pair_losses, "SMALL", small)
    joint = torch.tensor([[0.5, 0.5], [0.0, 0.0]], requires_grad=True)
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]], requires_grad=True)
    pairs = Pairs(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([3, 1]), 3)
    for target in (pairs, pairs.dense()):
        value = cross_entropy(joint, probs, target)
        assert value == math.inf
        for slope in torch.autograd.grad(value, (joint, probs)):
            assert slope.isfinite().all()
            assert slope.abs().max() > 0  # of the pair that is possible
    possible = Pairs(torch.tensor([0]), torch.tensor([1]), torch.tensor([1]), 3)
    expected = -torch.tensor(0.25).log()  # zeros elsewhere do not matter
    torch.testing.assert_close(cross_entropy(joint, probs, possible), expected)
    value = squared_distance(joint, probs, pairs)
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(value, (joint, probs)))


def test_no_table_of_all_pairs_is_made():
    """A fit with V = 20,000, where such a table would hold 400 million numbers."""
    torch.set_default_dtype(torch.float32)
    num_symbols, num_states = 20_000, 2
    data = Sequences(torch.randint(num_symbols, (5, 20_000)), torch.full((5,), 20_000))
    with Largest() as seen:
        fit = fit_cooccurrence(
            TabularHMM(num_states, categorical(num_symbols)),
            data,
            loss=cross_entropy,
            num_iterations=2,
        )
    assert fit.losses.isfinite().all()
    assert 0 < seen.size < 1.5e6  # 2 * 100,000 pairs with both neighbours, in 64 bits, at most


# Properties


def test_the_predicted_law_is_that_of_every_pair_and_has_stationary_margins():
    hmm = TabularHMM(2, categorical(6, 1.5), transition_concentration=1.5)(torch.tensor([2]))
    marginal = hmm.stationary()
    for lag in (1, 3):
        pairs = predicted(marginal, hmm.log_transition, hmm.emission.probs, lag)
        ends = torch.tensor([True] + [False] * (lag - 1) + [True])
        chain = HMM(
            marginal.log(), hmm.log_transition, hmm.emission, torch.tensor(lag + 1), observed=ends
        )
        by_evidence = [
            chain.log_prob(torch.tensor([a] + [0] * (lag - 1) + [b])).exp()
            for a, b in itertools.product(range(6), repeat=2)
        ]
        torch.testing.assert_close(pairs.flatten(), torch.stack(by_evidence))
        torch.testing.assert_close(pairs.sum(0), pairs.sum(1))


def test_no_gradient_passes_through_a_detached_law():
    matrix = torch.rand(3, 3).softmax(-1).log().requires_grad_()
    pairs, (_, probs) = random_pairs(4), random_joint()

    def slope(function):
        joint = joint_probs(function(matrix), matrix)
        return torch.autograd.grad(squared_distance(joint, probs, pairs), matrix)[0]

    constant = stationary(matrix).detach()
    torch.testing.assert_close(slope(stationary_detached), slope(lambda _: constant))
    assert (slope(stationary) - slope(stationary_detached)).abs().max() > 1e-3


# The model


def small_model():
    matrix = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    return matrix, probs


ONE_STEP = Sequences(torch.zeros(1, 1).long(), torch.tensor([1]))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_fit_to_co_occurrences_finds_a_law_that_can_be_met(loss):
    matrix, probs = small_model()
    target = predicted(stationary(matrix), matrix, probs)
    model = CooccurrenceModel(TabularHMM(2, categorical(3)), target, weight=1e4, loss=loss)
    fit = fit_map(model, ONE_STEP, restarts=3, num_iterations=300, tolerance=None)
    hmm = fit.hmm(ONE_STEP)
    pair_probs = predicted(hmm.stationary(), hmm.log_transition, hmm.emission.probs)
    torch.testing.assert_close(pair_probs, target, rtol=0.0, atol=1e-3)


def test_the_factor_is_the_weighted_sum_over_lags():
    data = random_data(0)
    targets = [count_pairs(data, 4, lag) for lag in (1, 3)]
    module = TabularHMM(2, categorical(4))
    model = CooccurrenceModel(module, targets, [2.0, 5.0], loss=cross_entropy)
    trace = poutine.trace(model).get_trace(ONE_STEP)
    hmm = trace.nodes["_RETURN"]["value"]
    expected = 0.0
    for weight, target in zip([2.0, 5.0], targets):
        pair_probs = predicted(hmm.stationary(), hmm.log_transition, hmm.emission.probs, target.lag)
        expected -= weight * -(target.dense() * pair_probs.log()).sum()
    torch.testing.assert_close(trace.nodes["pairs"]["fn"].log_factor, expected)


# Fits


OPTIONS = {"num_iterations": 60, "tolerance": None}


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_fit_of_pairs_is_that_of_the_sequences_they_come_from(restarts):
    data, module = random_data(1), TabularHMM(2, categorical(4))
    sources = [
        (data, {"lags": (1, 2), "num_symbols": 4}),
        (data, {"lags": (1, 2)}),  # of as many symbols as the module has
        ([count_pairs(data, 4, lag) for lag in (1, 2)], {}),
    ]
    fits = []
    for source, options in sources:
        pyro.set_rng_seed(0)
        fits.append(fit_cooccurrence(module, source, restarts=restarts, **options, **OPTIONS))
    for fit in fits:
        assert torch.equal(fit.losses, fits[0].losses)
        assert fit.num_observed == count_pairs(data, 4).total
        assert fit.hmm(data).log_prob(data.values).shape == (7,)  # any data, later
        assert fit.hmm(data[:2]).batch_shape == (2,)
    assert fits[0].losses[-1] < fits[0].losses[0]


def test_each_restart_may_have_a_target_of_its_own():
    one, other = (count_pairs(random_data(seed), 4).dense() for seed in (1, 2))
    runs = []
    for targets in (torch.stack([one, other]).unsqueeze(1), one, other):
        pyro.set_rng_seed(0)
        module = TabularHMM(2, categorical(4))
        runs.append(fit_cooccurrence(module, targets, weight=9.0, restarts=2, **OPTIONS))
    both, *alone = (run.restarts.losses for run in runs)
    for place in (0, 1):
        torch.testing.assert_close(both[place], alone[place][place])


def test_the_default_weight_makes_the_losses_agree_where_pairs_are_equally_frequent():
    r"""To second order, :math:`n \, KL(W | \Omega) = \frac{n}{2 ||W||^2} ||W - \Omega||^2`."""
    pairs = Pairs(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]), torch.full((3,), 20), 3)
    off = 1e-4 * torch.tensor([1.0, -3.0, 2.0])
    pair_probs = torch.zeros(3, 3)
    pair_probs[pairs.first, pairs.second] = 1 / 3 + off
    module = TabularHMM(2, categorical(3))
    weights = [
        fit_cooccurrence(module, pairs, loss=loss, num_iterations=1).model.weights[0]
        for loss in (squared_distance, cross_entropy)
    ]
    assert weights[1] == 60.0
    divergence = 60 * (cross_entropy(pair_probs, torch.eye(3), pairs) - math.log(3))
    distance = weights[0] * squared_distance(pair_probs, torch.eye(3), pairs)
    torch.testing.assert_close(distance, divergence, rtol=1e-3, atol=0.0)


def test_maximum_a_posteriori_and_em_may_begin_at_a_fit_of_pairs():
    data, module = random_data(2, 20, 30), TabularHMM(3, categorical(4, 1.1))
    fit = fit_cooccurrence(module, data, restarts=3, num_iterations=100)
    model = MarginalModel(module)
    reached = []
    for values in (fit.parameters, fit.start):
        with torch.no_grad():
            trace = poutine.trace(poutine.condition(model, values)).get_trace(data)
        reached.append(-trace.log_prob_sum())
        by_map = fit_map(model, data, start=init_to_value(values=values), num_iterations=40)
        assert by_map.losses[-1] < by_map.losses[0]
    # gradient steps begin a little away from probabilities of nearly zero, as fit.start is
    torch.testing.assert_close(by_map.losses[0], reached[1], rtol=0.0, atol=1e-3)
    by_em = fit_em(module, data, start=fit.parameters, num_iterations=3)
    torch.testing.assert_close(by_em.losses[0], reached[0])
    assert by_em.losses[-1] < reached[0]
