"""Laws of the measures of a fit."""

import itertools
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_map,
    fit_svi,
    freeze,
    left_to_right,
    metrics,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    parametric,
    poisson,
    tied,
)

patient = settings(deadline=None, max_examples=60, derandomize=True, database=None)


# Perplexity


def some_data():
    values = torch.tensor([[0, 3, 1, 2], [2, 0, 0, 0], [1, 1, 3, 0]])
    observed = torch.ones(3, 4, dtype=torch.bool)
    observed[0, 1] = observed[2, 2] = False
    return Sequences(values, torch.tensor([4, 1, 3]), observed)


def test_perplexity_is_the_inverse_geometric_mean_of_the_evidence():
    data = some_data()
    logits = [torch.randn(shape).log_softmax(-1) for shape in [(3,), (3, 3), (3, 4)]]
    hmm = HMM(*logits[:2], dist.Categorical(logits=logits[2]), data.lengths, data.observed)
    found = metrics.perplexity(hmm, data)
    total = hmm.log_prob(data.values).sum().item()
    assert found.num_tokens == 6  # four and one and three steps, two of them missing
    assert found.log_evidence == pytest.approx(total)
    assert found.value == pytest.approx(math.exp(-total / 6))


@pytest.mark.parametrize("num_symbols", [4, 10])
def test_perplexity_of_an_even_law_is_the_number_of_symbols(num_symbols):
    data = some_data()
    even = torch.zeros(num_symbols, num_symbols).log_softmax(-1)
    hmm = HMM(even[0], even, dist.Categorical(logits=even), data.lengths, data.observed)
    found = metrics.perplexity(hmm, data)
    assert found.value == pytest.approx(num_symbols)
    assert str(found) == f"perplexity {num_symbols:.2f} over 6 tokens"


def test_perplexity_of_a_fit_does_not_depend_on_the_batch_size():
    data = some_data()
    fit = fit_map(MarginalModel(TabularHMM(2, categorical(4))), data, num_steps=2, progress=False)
    whole = metrics.perplexity(fit, data)
    for batch_size in (1, 2):
        part = metrics.perplexity(fit, data, batch_size)
        assert part.num_tokens == whole.num_tokens == 6
        assert part.value == pytest.approx(whole.value)
    assert metrics.perplexity(fit.draw(data), data).value == pytest.approx(whole.value)


def test_perplexity_of_impossible_data_is_infinite():
    never = torch.tensor([[0.0, -torch.inf]])
    data = Sequences(torch.tensor([[1]]), torch.tensor([1]))
    one = torch.zeros(1, 1)
    found = metrics.perplexity(HMM(one[0], one, dist.Categorical(logits=never), data.lengths), data)
    assert found.log_evidence == -math.inf
    assert found.value == math.inf


def test_perplexity_of_nothing_is_refused():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    data = Sequences(torch.zeros(1, 2).long(), torch.tensor([2]), nothing)
    one = torch.zeros(1, 1)
    hmm = HMM(one[0], one, dist.Categorical(logits=torch.zeros(1, 2)), data.lengths, nothing)
    with pytest.raises(ValueError, match="data has no observed step"):
        metrics.perplexity(hmm, data)


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
@given(states, st.randoms())
def test_accuracy_is_blind_to_the_names_of_predicted_states(drawn, random):
    size, predicted, truth = drawn
    if (truth >= 0).any():
        renaming = torch.tensor(random.sample(range(size), size))
        before = metrics.one_to_one_accuracy(predicted, truth)
        assert metrics.one_to_one_accuracy(renaming[predicted], truth) == pytest.approx(before)


@patient
@given(st.permutations(range(5)))
def test_align_finds_the_renaming(renaming):
    truth = torch.arange(5).repeat(3).reshape(3, 5)
    found = metrics.align(torch.tensor(renaming)[truth], truth)
    assert found[torch.tensor(renaming)].tolist() == list(range(5))


def test_align_is_one_to_one_even_for_states_that_never_occur():
    found = metrics.align(torch.tensor([0, 0]), torch.tensor([3, 3]), num_states=6)
    assert found[0] == 3
    assert sorted(found.tolist()) == list(range(6))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_of_every_size_will_do(dtype):
    """Twenty states: a table of four hundred cells does not fit in eight bits."""
    truth = torch.arange(20, dtype=dtype)
    predicted = truth.flip(0)
    assert metrics.align(predicted, truth).tolist() == list(range(19, -1, -1))
    assert metrics.one_to_one_accuracy(predicted, truth) == 1.0


def test_unknown_states_do_not_count_whatever_was_predicted():
    predicted, truth = torch.tensor([[0, 1, 7], [1, 0, -1]]), torch.tensor([[2, 0, -1], [0, 2, -1]])
    assert metrics.one_to_one_accuracy(predicted, truth) == 1.0


@pytest.mark.parametrize(
    ("predicted", "truth", "size", "kind", "words"),
    [
        ([0.5], [0], None, TypeError, "predicted must hold integers; got dtype torch.float64"),
        ([0], [0.5], None, TypeError, "truth must hold integers; got dtype torch.float64"),
        ([0, 1], [0], None, ValueError, r"one shape; got \(2,\) and \(1,\)"),
        ([0, 1], [-1, -1], None, ValueError, "truth has no known state"),
        ([-1, 1], [0, 1], None, ValueError, "predicted must not be negative; got -1"),
        ([0, 3], [0, 1], 2, ValueError, "num_states = 2; got 3"),
    ],
)
def test_bad_states_are_named(predicted, truth, size, kind, words):
    with pytest.raises(kind, match=words):
        metrics.align(torch.tensor(predicted), torch.tensor(truth), size)


# Distances


def test_bhattacharyya_is_what_its_formula_says():
    probs = torch.randn(2, 4, 5).softmax(-1)
    found = metrics.bhattacharyya(probs)
    assert found.shape == (2, 4, 4)
    for b, i, j in itertools.product(range(2), range(4), range(4)):
        overlap = sum(math.sqrt(probs[b, i, v] * probs[b, j, v]) for v in range(5))
        assert found[b, i, j].item() == pytest.approx(-math.log(overlap), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_bhattacharyya_is_a_symmetric_distance(dtype):
    probs = torch.cat([torch.randn(5, 50), torch.eye(50)[:3].mul(1e3)]).to(dtype).softmax(-1)
    found = metrics.bhattacharyya(probs)
    assert torch.equal(found, found.mT)
    assert not found.diagonal().any()
    assert (found >= 0).all()
    assert not found.signbit().any()


def test_bhattacharyya_of_disjoint_rows_is_infinite_and_of_equal_rows_zero():
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    found = metrics.bhattacharyya(probs)
    assert found[0, 1] == torch.inf
    assert found[1, 2].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("wrap", [torch.tensor, np.array, lambda rows: rows])
def test_mean_absolute_deviation_is_a_mean(wrap):
    first, second = [[0.25, 0.75], [1.0, 0.0]], [[0.5, 0.5], [1.0, 1.0]]
    found = metrics.mean_absolute_deviation(wrap(first), wrap(second))
    assert found == pytest.approx((0.25 + 0.25 + 0.0 + 1.0) / 4)
    assert found == metrics.mean_absolute_deviation(wrap(second), wrap(first))
    assert metrics.mean_absolute_deviation(wrap(first), wrap(first)) == 0.0


def test_mean_absolute_deviation_of_counts_is_not_taken_in_a_ring():
    first, second = torch.tensor([0, 3]).byte(), torch.tensor([1, 1]).byte()
    assert metrics.mean_absolute_deviation(first, second) == 1.5


def test_tables_of_two_shapes_have_no_deviation():
    with pytest.raises(ValueError, match=r"one shape; got \(2,\) and \(3,\)"):
        metrics.mean_absolute_deviation(torch.zeros(2), torch.zeros(3))


# Choosing


def test_evidence_by_sequence_is_that_of_the_hmm_and_sums_to_the_perplexity():
    data = datasets.casino(num_sequences=7, num_steps=9).without_labels()
    fit = fit_em(TabularHMM(2, categorical(6)), data, num_steps=3)
    each = metrics.log_evidence(fit, data, batch_size=3)
    torch.testing.assert_close(each, fit.draw(data).log_prob(data.values))
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
        (TabularHMM(2, normal_mixture(4, 3)), 1 + 2 + 2 * (3 + 4 * 3 * 2)),
        (TabularHMM(2, poisson()), 1 + 2 + 2),
        (TabularHMM(3, tied(categorical(5), [0, 0, 1])), 2 + 3 * 2 + 2 * 4),
        (TabularHMM(3, categorical(5), transition_allowed=left_to_right(3, 1)), 2 + 2 + 3 * 4),
    ],
)
def test_free_parameters_are_counted_once(module, count):
    length = torch.tensor([1])
    event = module(length).emission.event_shape
    values = torch.zeros(1, 1, *event) if event else torch.zeros(1, 1).long()
    data = Sequences(values, length)
    assert metrics.num_parameters(module, data) == count
    assert metrics.num_parameters(MarginalModel(module), data) == count
    shared = module.transition_allowed is not None or count in (15, 11)
    if not shared:  # points cannot say what is forbidden, or one for all states
        assert metrics.num_parameters(module(data.lengths).to_module(), data) == count


def test_frozen_parameters_are_not_counted():
    module = TabularHMM(2, normal(3))
    freeze(module, "emission.loc", torch.zeros(2, 3))
    data = Sequences(torch.zeros(1, 1, 3), torch.tensor([1]))
    assert metrics.num_parameters(module, data) == 1 + 2 + 6


def test_criteria_by_their_formulas():
    data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
    fit = fit_em(TabularHMM(2, categorical(6)), data, num_steps=3)
    evidence = fit.draw(data).log_prob(data.values).sum().item()
    assert metrics.aic(fit, data) == pytest.approx(-2 * evidence + 2 * 13)
    assert metrics.bic(fit, data) == pytest.approx(-2 * evidence + 13 * math.log(100))


def test_cross_validation_evaluates_each_sequence_under_the_fit_to_the_others():
    data = datasets.casino(num_sequences=7, num_steps=6).without_labels()
    seen = []

    def fit(part):
        seen.append(part)
        return fit_em(TabularHMM(1, categorical(6, 2.0)), part, num_steps=2)

    found = metrics.cross_validate(fit, data, num_folds=3)
    assert sorted(found.fold.bincount().tolist()) == [2, 2, 3]
    assert found.num_observed == 42
    for n in range(7):
        others = data.values[found.fold != found.fold[n]]
        counts = others.flatten().bincount(minlength=6) + 1.0
        expected = (counts / counts.sum()).log()[data.values[n]].sum()
        torch.testing.assert_close(found.log_evidence[n], expected)
    assert found.per_step == pytest.approx(found.log_evidence.sum().item() / 42)


@pytest.mark.parametrize("num_folds", [0, 1, 8])
def test_numbers_of_folds_out_of_range_are_named(num_folds):
    data = datasets.casino(num_sequences=7, num_steps=2)
    with pytest.raises(ValueError, match=r"^num_folds must lie between 2 and .* 7; got"):
        metrics.cross_validate(lambda part: None, data, num_folds)


def test_zeros_of_points_and_frozen_points_are_not_free():
    hmm = HMM(
        torch.tensor([1.0, 0.0, 0.0]).log(),
        torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]).log(),
        dist.Normal(torch.zeros(3), 1.0),
        torch.tensor([1]),
    )
    data = Sequences(torch.zeros(1, 1), torch.tensor([1]))
    module = hmm.to_module()
    assert metrics.num_parameters(module, data) == 2 + 6
    module.emission.requires_grad_(False)
    assert metrics.num_parameters(module, data) == 2
    fit = fit_em(module, Sequences(torch.randn(4, 5), torch.full((4,), 5)), num_steps=3)
    assert torch.equal(fit.model.module.emission.loc, torch.zeros(3))


def test_points_with_a_triangle_or_a_matrix_are_counted():
    law = dist.MultivariateNormal(torch.zeros(2, 3), scale_tril=torch.eye(3).expand(2, 3, 3))
    data = Sequences(torch.zeros(1, 1, 3), torch.tensor([1]))
    assert metrics.num_parameters(TabularHMM(2, parametric(law)), data) == 1 + 2 + 2 * (3 + 6)


def test_criteria_ask_for_a_point():
    data = datasets.casino(num_sequences=3, num_steps=5).without_labels()
    model = MarginalModel(TabularHMM(2, categorical(6)))
    fit = fit_svi(model, AutoNormal(model), data, num_steps=2)
    with pytest.raises(ValueError, match="fit must be one of EM or MAP"):
        metrics.aic(fit, data)
    same = Sequences(data.values[:1].repeat(5, 1), torch.full((5,), 5))
    each = metrics.log_evidence(fit, same, batch_size=2)  # one draw for all the batches
    torch.testing.assert_close(each, each[:1].expand(5))
