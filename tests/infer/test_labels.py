"""Properties of labels: of ``HMM.restrict``, and of labelled ``Sequences`` in models and fits.

The oracle lists all paths in NumPy, and leaves out those that a label forbids.
"""

import itertools

import numpy as np
import oracle
import pyro.distributions as dist
import pytest
import torch

from pyrohmm import (
    HMM,
    Filter,
    MarginalModel,
    Sequences,
    TabularHMM,
    TabularHSMM,
    categorical,
    fit_em,
    fit_map,
    free_durations,
    normal,
    queries,
)

K, V, T = 3, 4, 4
LENGTHS = torch.tensor([4, 2, 1])
OBSERVED = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).bool()
VALUES = torch.tensor([[0, 9, 3, 1], [2, -5, 7, 7], [1, 7, 7, 7]])  # junk where nothing is seen
LABELS = torch.tensor([[0, -1, 2, -1], [-1, 1, 9, -9], [2, 5, -7, 5]])  # and in the padding
TRUTH = torch.tensor([[0, 1, 2, 2], [2, 1, 0, 0], [2, 0, 0, 0]])
METHODS = ["log_prob", "posterior", "expected_counts", "filtered", "viterbi", "sample_states"]


def model():
    rows = torch.randn(K + 1, K).log_softmax(-1)
    emission = dist.Categorical(logits=torch.randn(K, V))
    return HMM(rows[0], rows[1:], emission, LENGTHS, OBSERVED)


def sets_of(labels):
    """The same labels as booleans ``(*, T, K)``, entry by entry; nothing in the padding."""
    allowed = np.zeros((*labels.shape, K), bool)
    for place in np.ndindex(*labels.shape):
        label = int(labels[place])
        allowed[place] = [label in (-1, k) for k in range(K)]
    return torch.tensor(allowed)


def any_sets():
    allowed = torch.rand(3, T, K) < 0.5
    allowed.scatter_(-1, TRUTH.unsqueeze(-1), True)
    return allowed


def densities(hmm):
    """Arguments of the oracle, before labels are known."""
    values = np.where(exists_and_seen(), VALUES.numpy(), 0)
    logs = hmm.emission.logits.numpy().T[values]
    likelihood = np.where(exists_and_seen()[..., None], logs, 0.0)
    return hmm.log_initial.numpy(), hmm.log_transition[None].numpy(), likelihood, LENGTHS.numpy()


def exists_and_seen():
    return (OBSERVED & (torch.arange(T) < LENGTHS.unsqueeze(-1))).numpy()


def table(hmm, labels):
    """For each place of the batch: paths that keep to the labels, and their log p(x, z)."""
    allowed = labels if labels.dtype == torch.bool else sets_of(labels)
    batch, single = oracle.one_by_one(*densities(hmm))
    allowed = allowed.expand(*batch, T, K).numpy()
    found = {}
    for place, one in zip(np.ndindex(batch), single):
        length = int(one[-1])
        paths = np.array([
            path for path in itertools.product(range(K), repeat=length)
            if all(allowed[place][t, z] for t, z in enumerate(path))
        ])  # fmt: skip
        found[place] = (paths, oracle.joint(*one[:-1], paths))
    return found


# What labels do to answers -----------------------------------------------------------------------


def test_paths_are_sampled_as_often_as_labels_allow():
    """From the chain itself for ``sample``, given the values for ``sample_states``."""
    hmm = model()
    known = hmm.restrict(LABELS)
    initial, transition, likelihood, _ = densities(hmm)
    paths, _ = table(hmm, LABELS)[(0,)]
    for drawn, seen in [
        (known.sample_states(VALUES, (4000,)), likelihood[0]),
        (known.sample_with_states((4000,))[1], np.zeros((T, K))),
    ]:
        scores = oracle.joint(initial, transition, seen, paths)
        numbers = drawn[:, 0].numpy() @ K ** np.arange(T)
        counts = [(numbers == path @ K ** np.arange(T)).sum() for path in paths]
        assert sum(counts) == 4000
        assert oracle.looks_drawn_from(np.array(counts), np.exp(scores - oracle.log_sum(scores)))


def test_restricting_twice_keeps_what_both_allow():
    hmm = model()
    first, second = any_sets(), any_sets()
    both = hmm.restrict(first & second)
    for other in (hmm.restrict(first).restrict(second), hmm.restrict(second).restrict(first)):
        for method in METHODS[:-1]:
            torch.testing.assert_close(
                getattr(other, method)(VALUES), getattr(both, method)(VALUES), rtol=0, atol=0
            )
    again = hmm.restrict(LABELS).restrict(sets_of(LABELS) | True)
    assert again.log_prob(VALUES).equal(hmm.restrict(LABELS).log_prob(VALUES))


# A supervised fit: with flat priors and every state known, the mode is counting


@pytest.mark.parametrize(
    "fit",
    [
        lambda module, data: fit_map(MarginalModel(module), data, num_iterations=2),
        lambda module, data: fit_em(module, data),
    ],
    ids=["map", "em"],
)
def test_a_fit_names_labels_that_no_path_keeps_to(fit):
    allowed = torch.ones(2, 2).triu().bool()
    module = TabularHMM(2, categorical(V), transition_allowed=allowed)
    data = Sequences.from_list([[0, 1, 2], [3, 1]], labels=[[0, 0, 1], [1, 0]])
    with pytest.raises(ValueError, match=r"labels must leave a path .* sequence 1, step 1"):
        fit(module, data)


def test_one_step_ahead_counts_labels_of_missing_steps():
    hmm = HMM(
        torch.tensor([0.5, 0.5]).log(),
        torch.tensor([[0.5, 0.5], [0.3, 0.7]]).log(),
        dist.Categorical(torch.tensor([[0.5, 0.5], [1.0, 0.0]])),
        torch.tensor([2]),
        torch.tensor([[True, False]]),
    ).restrict(torch.tensor([[-1, 1]]))
    values = torch.tensor([[0, 0]])
    scores = queries.predictive_log_prob(hmm, values)
    torch.testing.assert_close(scores.sum(-1), hmm.log_prob(values))
    assert (scores < 0).all()


def test_what_cannot_keep_to_labels_says_so():
    start = torch.tensor([1.0, 0.0]).log()
    even = torch.full((2, 2), 0.5).log()
    hmm = HMM(start, even, dist.Categorical(logits=even), torch.tensor([2]))
    hmm = hmm.restrict(torch.tensor([[1, -1]]))
    values = torch.tensor([[0, 1]])
    for ask in (
        queries.path_entropy,
        queries.predictive_log_prob,
        lambda hmm, values: queries.k_best(hmm, values, 2),
    ):
        with pytest.raises(ValueError, match="sequence 0, step 0"):
            ask(hmm, values)
    with pytest.raises(ValueError, match="for samples to keep to"):
        hmm.sample()
    with pytest.raises(ValueError, match="hmm must have no labels"):
        Filter(hmm)


def test_errors_in_minibatches_name_the_sequences_they_hold():
    module = TabularHMM(2, categorical(2), initial_allowed=torch.tensor([True, False]))
    labels = torch.tensor([[-1, -1], [-1, -1], [1, -1]])
    data = Sequences(torch.zeros(3, 2).long(), torch.tensor([2, 2, 2]), labels=labels)
    for fit in (lambda: fit_map(MarginalModel(module), data, batch_size=1),
                lambda: fit_em(module, data, batch_size=1)):  # fmt: skip
        with pytest.raises(ValueError, match="sequence 0, step 0") as found:
            fit()
        assert found.value.__notes__ == ["The minibatch holds the sequences [2]."]


def test_the_fitted_hmm_is_that_of_the_values_and_can_be_restricted_to_labels():
    """So that best paths can be compared with labels that the data happen to have."""
    labelled = Sequences.from_list([[0, 1, 0, 1], [1, 1, 0]], labels=[[0, 1, 1, 0], [1, -1, 0]])
    fit = fit_em(TabularHMM(2, categorical(2)), labelled, num_iterations=3)
    assert "were known" in fit.notes[0]
    hmm, free = fit.hmm(labelled), fit.hmm(labelled.without_labels())
    torch.testing.assert_close(hmm.log_prob(labelled.values), free.log_prob(labelled.values))
    kept = hmm.restrict(labelled.labels).viterbi(labelled.values)
    known = labelled.labels >= 0
    assert (kept == labelled.labels)[known & labelled.exists].all()
    assert "Labels" in type(fit).hmm.__doc__


def test_a_label_that_lasts_longer_than_any_duration_is_told_by_both():
    labels = [torch.tensor([0] * 3 + [1] * 9 + [0] * 2)]
    data = Sequences.from_list([torch.randn(14)], labels=labels)
    with pytest.raises(ValueError, match="allow the transition, symbol or duration"):
        fit_em(TabularHSMM(2, normal(0), free_durations(4)), data, num_iterations=2)
    fit_em(TabularHSMM(2, normal(0), free_durations(9)), data, num_iterations=1)
