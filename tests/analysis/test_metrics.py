"""Measures of a fit: evidence, criteria, agreement up to renaming, distances."""

import copy
import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_map,
    left_to_right,
    metrics,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    poisson,
    tied,
)
from pyrohmm.data import StoredSequences
from pyrohmm.nn import (
    DenseHMM,
    StationaryHMM,
    StickyHDPHMM,
    TabularFactorialHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    additive_bernoulli,
    additive_normal,
    autoregressive_categorical,
    autoregressive_normal,
    bernoulli,
    beta,
    censored,
    free_durations,
    gamma,
    geometric_durations,
    log_normal,
    negative_binomial,
    negative_binomial_durations,
    student_t,
    truncated,
    von_mises,
    weibull,
    wrapped_cauchy,
    zero_inflated,
)
from pyrohmm.nn.composed import _Modified
from pyrohmm.sklearn import GaussianHMM, HMMEstimator


def some_data():
    values = torch.tensor([[0, 3, 1, 2], [2, 0, 0, 0], [1, 1, 3, 0]])
    observed = torch.ones(3, 4, dtype=torch.bool)
    observed[0, 1] = observed[2, 2] = False
    return Sequences(values, torch.tensor([4, 1, 3]), observed)


patient = settings(deadline=None, max_examples=60, derandomize=True, database=None)


# Agreement up to renaming

states = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.tuples(st.integers(0, size - 1), st.integers(-1, size - 1)), min_size=1, max_size=12
    ).map(lambda pairs: (size, *map(torch.tensor, zip(*pairs))))
)


def best_by_hand(predicted, truth, size):
    """Largest share of known steps that agree, over all renamings."""
    known = [(p, t) for p, t in zip(predicted.tolist(), truth.tolist()) if t >= 0]
    return max(
        sum(renaming[p] == t for p, t in known) / len(known)
        for renaming in itertools.permutations(range(size))
    )


@patient
@given(states)
def test_accuracy_is_the_best_over_all_renamings(drawn):
    size, predicted, truth = drawn
    if (truth >= 0).any():
        expected = best_by_hand(predicted, truth, size)
        assert metrics.one_to_one_accuracy(predicted, truth) == pytest.approx(expected)
        renamed = metrics.align(predicted, truth, size)[predicted]
        known = truth >= 0
        share = (renamed[known] == truth[known]).double().mean().item()
        assert share == pytest.approx(expected)


@patient
@given(states)
def test_many_to_one_accuracy_is_the_best_over_all_ways_to_name(drawn):
    size, predicted, truth = drawn
    known = [(p, t) for p, t in zip(predicted.tolist(), truth.tolist()) if t >= 0]
    if known:
        expected = max(
            sum(names[p] == t for p, t in known) / len(known)
            for names in itertools.product(range(size), repeat=size)
        )
        found = metrics.many_to_one_accuracy(predicted, truth)
        assert found == pytest.approx(expected)
        assert found >= metrics.one_to_one_accuracy(predicted, truth) - 1e-12


def entropy(labels):
    """Of the shares of labels, in nats."""
    shares = [labels.count(each) / len(labels) for each in set(labels)]
    return -sum(share * math.log(share) for share in shares)


@patient
@given(states)
def test_variation_of_information_is_what_either_does_not_say_of_the_other(drawn):
    size, predicted, truth = drawn
    known = [(p, t) for p, t in zip(predicted.tolist(), truth.tolist()) if t >= 0]
    if known:
        found = metrics.variation_of_information(predicted, truth)
        rest = 0.0
        for side in (0, 1):
            for state in range(size):
                part = [pair[1 - side] for pair in known if pair[side] == state]
                rest += len(part) / len(known) * entropy(part) if part else 0.0
        assert found == pytest.approx(rest, abs=1e-12)
        assert found <= math.log(len(known)) + 1e-12


@pytest.mark.parametrize("size", [1, 2, 4])
def test_transitions_are_aligned_by_the_best_of_all_permutations(size):
    found, truth = torch.randn(2, size, size).softmax(-1)
    renaming = metrics.align_transitions(found, truth).tolist()

    def distance(names):
        return sum(
            (found[i, j] - truth[names[i], names[j]]).item() ** 2
            for i, j in itertools.product(range(size), repeat=2)
        )

    best = min(itertools.permutations(range(size)), key=distance)
    assert distance(renaming) == pytest.approx(distance(best))


# Distances


def test_bhattacharyya_of_disjoint_rows_is_infinite_and_of_equal_rows_zero():
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    found = metrics.bhattacharyya(probs)
    assert found[0, 1] == torch.inf
    assert found[1, 2].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_diversity_is_the_mean_over_pairs_and_over_states(size):
    probs = torch.randn(2, size, 4).softmax(-1)
    whole = metrics.diversity(probs)
    assert whole.shape == (2,)
    for b in range(2):
        distance = {
            (i, j): -math.log(sum(math.sqrt(probs[b, i, v] * probs[b, j, v]) for v in range(4)))
            for i, j in itertools.permutations(range(size), 2)
        }
        pairs = [distance[pair] for pair in itertools.combinations(range(size), 2)]
        assert whole[b].item() == pytest.approx(np.mean(pairs))


# Choosing


def test_evidence_by_sequence_is_that_of_the_hmm_and_sums_to_the_perplexity():
    data = datasets.casino(num_sequences=7, num_steps=9).without_labels()
    fit = fit_em(TabularHMM(2, categorical(6)), data, num_iterations=3)
    each = metrics.log_evidence(fit, data, batch_size=3)
    torch.testing.assert_close(each, fit.hmm(data).log_prob(data.values))
    assert metrics.perplexity(fit, data).log_evidence == pytest.approx(each.sum().item())


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (TabularHMM(3, categorical(5)), 2 + 3 * 2 + 3 * 4),
        (TabularHMM(1, categorical(5)), 4),
        (TabularHMM(2, normal(3)), 1 + 2 + 2 * 3 * 2),
        (TabularHMM(2, normal_full(3)), 1 + 2 + 2 * (3 + 6)),
        (TabularHMM(2, normal_tied(3)), 1 + 2 + 2 * 3 + 6),
        (TabularHMM(2, normal_spherical(3)), 1 + 2 + 2 * (3 + 1)),
        (TabularHMM(2, normal_mixture(3, num_components=4)), 1 + 2 + 2 * (3 + 4 * 3 * 2)),
        (TabularHMM(2, poisson()), 1 + 2 + 2),
        (TabularHMM(3, tied(categorical(5), [0, 0, 1])), 2 + 3 * 2 + 2 * 4),
        (TabularHMM(3, categorical(5), transition_allowed=left_to_right(3, 1)), 2 + 2 + 3 * 4),
        (TabularHMM(2, bernoulli(3)), 3 + 2 * 3),
        (TabularHMM(2, gamma()), 3 + 2 * 2),
        (TabularHMM(2, von_mises(0)), 3 + 2 * 2),
        (TabularHMM(2, wrapped_cauchy(0)), 3 + 2 * 2),
        (TabularHMM(2, log_normal()), 3 + 2 * 2),
        (TabularHMM(2, weibull()), 3 + 2 * 2),
        (TabularHMM(2, beta()), 3 + 2 * 2),
        (TabularHMM(2, student_t()), 3 + 2 * 3),
        (TabularHMM(2, negative_binomial()), 3 + 2 * 2),
        (TabularHMM(2, zero_inflated(poisson())), 3 + 2 * 2),
        (TabularHMM(2, censored(weibull(), upper=5.0)), 3 + 2 * 2),
        (TabularHMM(2, truncated(poisson(), lower=1)), 3 + 2),
        (TabularHMM(2, autoregressive_categorical(3, 1)), 3 + 2 * (2 + 3 * 2)),
        (TabularHMM(2, autoregressive_normal(2, 1)), 3 + 2 * (5 + 2 * 3 + 3)),
        (TabularHSMM(3, categorical(3), free_durations(4)), 2 + 3 + 3 * 2 + 3 * 3),
        (TabularHSMM(3, categorical(3), geometric_durations(4)), 2 + 3 + 3 * 2 + 3),
        (TabularHSMM(3, categorical(3), negative_binomial_durations(4)), 2 + 3 + 3 * 2 + 3 * 2),
        (TabularSecondOrderHMM(2, categorical(3)), 1 + 2 + 4 + 2 * 2),
        (StationaryHMM(3, categorical(3)), 3 * 2 + 3 * 2),
        (StickyHDPHMM(4, categorical(3)), 3 + 4 * 3 + 4 * 2),
        (TabularFactorialHMM((2, 3), categorical(3)), (1 + 2) + (2 + 6) + 6 * 2),
        # a constant may go from one chain to the other, in each component
        (TabularFactorialHMM((2, 3), additive_normal((2, 3), 2)), 11 + (2 + 3 - 1) * 2 + 2),
        (TabularFactorialHMM((2, 3), additive_bernoulli((2, 3), 2)), 11 + (2 + 3 - 1) * 2),
        (DenseHMM(2, 3, dim=2), 1 + 2 + 2 * 2),  # what embeddings of 20 numbers can express
    ],
)
def test_free_parameters_are_counted_once(module, count):
    length = torch.tensor([1])
    event = module(length).emission.event_shape
    values = torch.zeros(1, 1, *event) if event else torch.zeros(1, 1).long()
    data = Sequences(values, length)
    assert metrics.num_parameters(module, data) == count
    assert metrics.num_parameters(MarginalModel(module), data) == count
    # a fit copies its model, and its constraints with it
    assert metrics.num_parameters(MarginalModel(copy.deepcopy(module)), data) == count
    own = type(module) is TabularHMM and not isinstance(module.emission, _Modified)
    shared = own and (module.transition_allowed is not None or count in (15, 11, 31))
    if own and not shared:  # points cannot say what is forbidden, or one for all states
        assert metrics.num_parameters(TabularHMM.from_hmm(module(data.lengths)), data) == count


def test_zeros_of_a_fitted_hmm_are_not_free():
    """Fits copy their module, and with it the constraints of its points."""
    matrix = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    initial, means = torch.tensor([1.0, 0.0, 0.0]), torch.arange(3.0)
    data = Sequences.from_list([torch.arange(60.0) // 20 + torch.randn(60)])
    hmm = HMM(initial.log(), matrix.log(), dist.Normal(means, 1.0), torch.tensor([1]))
    fit = fit_em(TabularHMM.from_hmm(hmm), data, num_iterations=3)
    evidence = metrics.log_evidence(fit, data).double().sum().item()
    assert metrics.aic(fit, data) == pytest.approx(-2 * evidence + 2 * (2 + 6))
    X = data.values[0, :, None].numpy()
    model = GaussianHMM(3, params="stmc", init_params="c", n_iter=3)
    model.startprob_, model.transmat_ = initial.numpy(), matrix.numpy()
    model.means_ = means[:, None].numpy()
    assert model.fit(X).aic(X) == pytest.approx(-2 * model.score(X) + 2 * (2 + 6))
    same = HMMEstimator(lambda _: TabularHMM.from_hmm(hmm), 3, n_iter=3).fit(X)
    assert same.bic(X) == pytest.approx(-2 * same.score(X) + 8 * math.log(60))


def test_a_parameter_that_parts_share_is_counted_once():
    module = TabularHMM.from_hmm(TabularHMM(2, poisson())(torch.tensor([1])))
    data = Sequences(torch.zeros(1, 1), torch.tensor([1]))
    count = metrics.num_parameters(module, data)
    other = TabularHMM.from_hmm(module(torch.tensor([1])))
    for name in ("initial_unconstrained", "transition_unconstrained"):
        other._parameters[name] = module._parameters[name]
    module.other = other
    rates = 2
    assert metrics.num_parameters(module, data) == count + rates


def test_a_covariance_in_a_function_counts_the_entries_of_its_lower_half():
    def model(data):
        roots = torch.eye(3).expand(2, 3, 3).clone()
        pyro.param("roots", roots, constraint=torch.distributions.constraints.lower_cholesky)

    assert metrics.num_parameters(model, Sequences.from_list([[0]])) == 2 * 6


class Softmax(HMMModule):
    """Logits of everything, as one writes them first."""

    def __init__(self, num_states, num_symbols):
        super().__init__()
        shapes = {"start": (1, num_states), "rows": (num_states, num_states)}
        for name, shape in (shapes | {"emit": (num_states, num_symbols)}).items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape)))

    def forward(self, lengths, observed=None):
        start, rows, emit = (x.log_softmax(-1) for x in (self.start[0], self.rows, self.emit))
        return HMM(start, rows, dist.Categorical(logits=emit), lengths, observed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("module", "count"),
    [
        (Softmax(3, 5), 2 + 3 * 2 + 3 * 4),
        (Softmax(1, 2), 1),
    ],
)
def test_logits_count_by_what_they_can_change(module, count, dtype):
    """A row of a softmax has one logit too many."""
    data = Sequences.from_list([[0, 1]])
    assert metrics.num_parameters(module.to(dtype), data) == count


def test_criteria_of_logits_are_those_of_probabilities():
    data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
    fit = fit_map(MarginalModel(Softmax(2, 6)), data, num_iterations=2, progress=False)
    evidence = metrics.log_evidence(fit, data).sum().item()
    assert metrics.bic(fit, data) == pytest.approx(-2 * evidence + 13 * math.log(100))
    assert metrics.aic(fit, data, num_parameters=9) == pytest.approx(-2 * evidence + 2 * 9)


def test_criteria_of_data_larger_than_memory():
    data = datasets.casino(num_sequences=6, num_steps=20).without_labels()
    fit = fit_em(TabularHMM(2, categorical(6)), data, num_iterations=3)
    stored = StoredSequences(data.values.flatten(), [20] * 6, max_steps=40)
    assert metrics.bic(fit, stored) == pytest.approx(metrics.bic(fit, data))
    assert metrics.perplexity(fit, stored) == pytest.approx(metrics.perplexity(fit, data))


def test_cross_validation_evaluates_each_sequence_under_the_fit_to_the_others():
    data = datasets.casino(num_sequences=7, num_steps=6).without_labels()
    seen = []

    def fit(part):
        seen.append(part)
        return fit_em(TabularHMM(1, categorical(6, 2.0)), part, num_iterations=2)

    found = metrics.cross_validate(fit, data, num_folds=3)
    assert sorted(found.fold.bincount().tolist()) == [2, 2, 3]
    assert found.num_observed == 42
    for n in range(7):
        others = data.values[found.fold != found.fold[n]]
        counts = others.flatten().bincount(minlength=6) + 1.0
        expected = (counts / counts.sum()).log()[data.values[n]].sum()
        torch.testing.assert_close(found.log_evidence[n], expected)
    assert found.per_step == pytest.approx(found.log_evidence.sum().item() / 42)


def test_zeros_of_points_and_frozen_points_are_not_free():
    hmm = HMM(
        torch.tensor([1.0, 0.0, 0.0]).log(),
        torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]).log(),
        dist.Normal(torch.zeros(3), 1.0),
        torch.tensor([1]),
    )
    data = Sequences(torch.zeros(1, 1), torch.tensor([1]))
    module = TabularHMM.from_hmm(hmm)
    assert metrics.num_parameters(module, data) == 2 + 6
    module.emission.requires_grad_(False)
    assert metrics.num_parameters(module, data) == 2
    fit = fit_em(module, Sequences(torch.randn(4, 5), torch.full((4,), 5)), num_iterations=3)
    assert torch.equal(fit.model.module.emission.loc, torch.zeros(3))


def test_likelihood_ratio_is_that_of_two_states_with_one_covariance_or_two():
    pyro.set_rng_seed(0)
    states = (torch.rand(4, 60) < 0.1).long().cumsum(-1) % 2
    scale = torch.tensor([0.5, 1.5])[states]
    values = 4.0 * states + scale * torch.randn(4, 60)
    data = Sequences(values.unsqueeze(-1), torch.tensor([60, 60, 60, 41]))
    smaller, larger = (
        fit_em(TabularHMM(2, family(1)), data, restarts=3) for family in (normal_tied, normal_full)
    )
    found = metrics.likelihood_ratio_test(smaller, larger, data)
    evidence = [fit.hmm(data).log_prob(data.values).sum().item() for fit in (smaller, larger)]
    assert found.degrees == 1
    assert found.statistic == pytest.approx(2 * (evidence[1] - evidence[0]), rel=1e-4)
    assert found.statistic > 20  # the variances differ
    assert found.p_value == pytest.approx(math.erfc(math.sqrt(found.statistic / 2)), rel=1e-6)
    with pytest.raises(ValueError, match="more free parameters than smaller; got 6 and 7"):
        metrics.likelihood_ratio_test(larger, smaller, data)
    more = fit_em(TabularHMM(3, normal_tied(1)), data, num_iterations=5)
    with pytest.raises(ValueError, match="one number of states; got 2 and 3"):
        metrics.likelihood_ratio_test(smaller, more, data)


def test_perplexity_is_the_inverse_geometric_mean_of_the_evidence():
    data = some_data()
    logits = [torch.randn(shape).log_softmax(-1) for shape in [(3,), (3, 3), (3, 4)]]
    hmm = HMM(*logits[:2], dist.Categorical(logits=logits[2]), data.lengths, data.observed)
    found = metrics.perplexity(hmm, data)
    total = hmm.log_prob(data.values).sum().item()
    assert found.num_tokens == 6  # four and one and three steps, two of them missing
    assert found.log_evidence == pytest.approx(total)
    assert found.value == pytest.approx(math.exp(-total / 6))


def test_bic_is_of_the_likelihood_that_labels_restrict():
    data = datasets.casino(num_sequences=3, num_steps=20)
    fit = fit_em(TabularHMM(2, categorical(6)), data, restarts=1)
    known = fit.hmm(data).restrict(data.labels).log_prob(data.values).sum().item()
    difference = metrics.bic(fit, data) - metrics.bic(fit, data.without_labels())
    assert difference == pytest.approx(2 * (fit.score(data) - known), rel=1e-4)
    assert difference > 1
