"""Properties of labels: of ``HMM.restrict``, and of labelled ``Sequences`` in models and fits.

The oracle lists all paths in NumPy, and leaves out those that a label forbids.
"""

import itertools

import numpy as np
import oracle
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

from pyrohmm import (
    HMM,
    EnumeratedModel,
    Filter,
    MarginalModel,
    Sequences,
    TabularHMM,
    TabularHSMM,
    categorical,
    fit_em,
    fit_map,
    free_durations,
    load_hmm,
    normal,
    queries,
    save,
)

K, V, T = 3, 4, 4
LENGTHS = torch.tensor([4, 2, 1])
OBSERVED = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).bool()
VALUES = torch.tensor([[0, 9, 3, 1], [2, -5, 7, 7], [1, 7, 7, 7]])  # junk where nothing is seen
LABELS = torch.tensor([[0, -1, 2, -1], [-1, 1, 9, -9], [2, 5, -7, 5]])  # and in the padding
TRUTH = torch.tensor([[0, 1, 2, 2], [2, 1, 0, 0], [2, 0, 0, 0]])
UNKNOWN = torch.full((3, T), -1)
METHODS = ["log_prob", "posterior", "expected_counts", "filtered", "viterbi", "sample_states"]

# Batch of the parameters, and whether transitions and emissions have a dimension of steps
LAYOUTS = {
    "plain": ((), False),
    "restarts": ((2, 1), False),
    "per sequence": ((3,), False),
    "per step": ((), True),
    "restarts per step": ((2, 1), True),
}


def model(layout="plain", **options):
    batch, per_step = LAYOUTS[layout]
    steps = {"transition_per_step": per_step, "emission_per_step": per_step}
    logits = torch.randn(*batch, *([T] if per_step else []), K, V)
    return HMM(
        torch.randn(*batch, K).log_softmax(-1),
        torch.randn(*batch, *([T - 1] if per_step else []), K, K).log_softmax(-1),
        dist.Categorical(logits=logits),
        LENGTHS,
        OBSERVED,
        **steps,
        **options,
    )


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


KINDS = {
    "some": lambda: LABELS,
    "all": lambda: TRUTH,
    "none": lambda: UNKNOWN,
    "sets": any_sets,
}


def densities(hmm):
    """Arguments of the oracle, before labels are known, ``(*b, T, K)`` in the likelihood."""
    logits = hmm.emission.logits.numpy()  # (*b, [T,] K, V)
    if not hmm.emission_per_step:
        logits = np.expand_dims(logits, -3)
    values = np.where(exists_and_seen(), VALUES.numpy(), 0)
    hit = values[..., None, None] == np.arange(V)
    likelihood = np.where(exists_and_seen()[..., None], (logits * hit).sum(-1), 0.0)
    transition = hmm.log_transition.numpy()
    if not hmm.transition_per_step:
        transition = np.expand_dims(transition, -3)
    return hmm.log_initial.numpy(), transition, likelihood, LENGTHS.numpy()


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


def is_allowed(states, labels):
    """Whether paths ``(*S, *B, T)`` keep to labels, step by step; always in the padding."""
    allowed = labels if labels.dtype == torch.bool else sets_of(labels)
    exists = torch.arange(T) < LENGTHS.unsqueeze(-1)
    allowed = allowed.expand(*states.shape, K)
    return allowed.gather(-1, states.unsqueeze(-1)).squeeze(-1) | ~exists


# What labels do to answers -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evidence_is_the_sum_over_allowed_paths(layout, kind):
    hmm, labels = model(layout), KINDS[kind]()
    found = hmm.restrict(labels).log_prob(VALUES)
    paths = table(hmm, labels)
    assert len(paths) == found.numel()
    for place, (_, scores) in paths.items():
        assert found[place].item() == pytest.approx(oracle.log_sum(scores), rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_posterior_and_best_path_are_those_among_allowed_paths(layout, kind):
    hmm, labels = model(layout), KINDS[kind]()
    known = hmm.restrict(labels)
    states, best = known.posterior(VALUES).state_probs, known.viterbi(VALUES)
    for place, (paths, scores) in table(hmm, labels).items():
        share = np.exp(scores - oracle.log_sum(scores))
        expected = np.zeros((T, K))
        for path, weight in zip(paths, share):
            expected[range(len(path)), path] += weight
        np.testing.assert_allclose(states[place], expected, atol=1e-10)
        assert best[place].tolist()[: paths.shape[1]] == paths[scores.argmax()].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_keep_to_the_labels(layout):
    hmm, labels = model(layout), any_sets()
    known = hmm.restrict(labels)
    assert is_allowed(known.sample_states(VALUES, (50,)), labels).all()
    values, states = known.sample_with_states((50,))
    assert is_allowed(states, labels).all()
    assert values.shape == known.sample((50,)).shape == (50, *hmm.batch_shape, T)


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


@pytest.mark.parametrize("method", METHODS)
def test_labels_of_the_padding_are_not_read(method):
    hmm = model()
    exists = torch.arange(T) < LENGTHS.unsqueeze(-1)
    others = [LABELS.where(exists, junk) for junk in (-1, 0, 99, -99)]
    sets = sets_of(LABELS)
    others += [sets & exists.unsqueeze(-1), sets | ~exists.unsqueeze(-1)]
    answers = []
    for labels in others:
        torch.manual_seed(0)
        answers.append(getattr(hmm.restrict(labels), method)(VALUES))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=0)


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


@pytest.mark.parametrize("labels", [LABELS, sets_of(LABELS)], ids=["integers", "sets"])
def test_a_saved_hmm_keeps_its_labels(tmp_path, labels):
    hmm = model().restrict(labels)
    save(hmm, tmp_path / "hmm")
    again = load_hmm(tmp_path / "hmm")
    assert again.log_prob(VALUES).equal(hmm.log_prob(VALUES))
    assert again.viterbi(VALUES).equal(hmm.viterbi(VALUES))


# Labels that cannot be ---------------------------------------------------------------------------


def one_way(**options):
    """A chain that begins in state 0 and never goes back; state 1 never emits symbol 1."""
    return HMM(
        torch.tensor([1.0, 0.0]).log(),
        torch.tensor([[0.5, 0.5], [0.0, 1.0]]).log(),
        dist.Categorical(logits=torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log()),  # probs are clamped
        torch.tensor([3, 2]),
        **options,
    )


IMPOSSIBLE = {
    "the first state": ([[-1, -1, -1], [1, -1, -1]], [[0, 0, 0], [0, 0, 0]], "sequence 1, step 0"),
    "a transition": ([[-1, 1, 0], [-1, -1, -1]], [[0, 0, 0], [0, 0, 0]], "sequence 0, step 2"),
    "a symbol": ([[-1, -1, -1], [-1, 1, -1]], [[0, 0, 0], [0, 1, 0]], "sequence 1, step 1"),
    "a symbol later": ([[-1, 1, -1], [-1, -1, 0]], [[0, 0, 1], [0, 0, 0]], "sequence 0, step 2"),
    "the first of two": ([[0, 1, 0], [1, -1, -1]], [[0, 0, 0], [0, 0, 0]], "sequence 0, step 2"),
}


@pytest.mark.parametrize(
    ("case", "method"),
    [(case, "log_prob") for case in IMPOSSIBLE] + [("a transition", name) for name in METHODS],
)
def test_labels_that_no_path_keeps_to_are_named(case, method):
    labels, values, place = IMPOSSIBLE[case]
    hmm = one_way(validate_args=True).restrict(torch.tensor(labels))
    with pytest.raises(ValueError, match=f"labels must leave a path .* in {place}\\. Correct"):
        getattr(hmm, method)(torch.tensor(values))


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_without_validation_impossible_labels_have_probability_zero(case):
    labels, values, place = IMPOSSIBLE[case]
    labels, values = torch.tensor(labels), torch.tensor(values)
    hmm = one_way(validate_args=False).restrict(labels)
    wrong = int(place[9])
    evidence = hmm.log_prob(values)
    assert evidence[wrong] == -torch.inf
    assert (hmm.posterior(values).state_probs[wrong] == 0).all()
    if case != "the first of two":
        assert evidence[1 - wrong].isfinite()


def test_impossible_labels_give_gradient_zero_without_validation():
    hmm = one_way(validate_args=False).restrict(torch.tensor([[-1, 1, 0], [1, -1, -1]]))
    matrix = hmm.log_transition.requires_grad_()
    (gradient,) = torch.autograd.grad(hmm.log_prob(torch.zeros(2, 3).long()).sum(), matrix)
    assert (gradient == 0).all()


def empty_set():
    allowed = sets_of(LABELS)
    allowed[1, 1] = False
    return allowed


WRONG = {
    "K": (lambda: LABELS.where(LABELS != 1, K), ValueError, r"K - 1 = 2.*got 3 at sequence 1, s"),
    "no state": (empty_set, ValueError, "allow no state at sequence 1, step 1; allow all"),
    "fractions": (lambda: LABELS.double(), TypeError, "integers; got dtype torch.float64"),
    "too few steps": (lambda: LABELS[:, :3], ValueError, r"\(T,\) = \(4,\); got shape \(3, 3\)"),
    "too few sequences": (lambda: LABELS[:2], ValueError, r"labels \(2,\), HMM \(3,\)"),
    "a mask of steps": (lambda: LABELS >= 0, ValueError, r"\(T, K\) = \(4, 3\)"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_bad_labels_are_named(wrong):
    labels, error, words = WRONG[wrong]
    with pytest.raises(error, match=words):
        model().restrict(labels())


# Labelled sequences, in models and fits ----------------------------------------------------------


def labelled(labels=LABELS):
    return Sequences(VALUES, LENGTHS, OBSERVED, labels)


PARAMETERS = {
    name: torch.tensor(probs, dtype=torch.float64)
    for name, probs in {
        "module.initial": [0.2, 0.3, 0.5],
        "module.transition": [[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.3, 0.3, 0.4]],
        "module.emission.probs": [[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]],
    }.items()
}


def built(data):
    """The HMM of these parameters, before labels are known."""
    return HMM(
        PARAMETERS["module.initial"].log(),
        PARAMETERS["module.transition"].log(),
        dist.Categorical(probs=PARAMETERS["module.emission.probs"]),
        data.lengths,
        data.observed,
    )


FORMS = {"marginal": (MarginalModel, Trace_ELBO), "enumerated": (EnumeratedModel, TraceEnum_ELBO)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_labels_add_to_the_loss_of_both_forms_what_they_take_from_the_evidence(form, kind):
    make, elbo = FORMS[form]
    conditioned = poutine.condition(make(TabularHMM(K, categorical(V))), PARAMETERS)
    labels = KINDS[kind]()
    losses = [
        elbo(max_plate_nesting=1).loss(conditioned, lambda _: None, data)
        for data in (labelled(labels), labelled(None))
    ]
    evidence = [
        sum(oracle.log_sum(scores) for _, scores in table(built(labelled()), each).values())
        for each in (labels, UNKNOWN)
    ]
    assert losses[0] - losses[1] == pytest.approx(evidence[1] - evidence[0], abs=1e-9)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_losses_of_labelled_minibatches_average_to_the_whole(form, size):
    make, elbo = FORMS[form]
    conditioned = poutine.condition(make(TabularHMM(K, categorical(V))), PARAMETERS)
    loss = lambda part: elbo(max_plate_nesting=1).loss(conditioned, lambda _: None, part)  # noqa: E731
    data = labelled()
    subsets = list(itertools.combinations(range(3), size))
    losses = [loss(data.batch(torch.tensor(subset))) for subset in subsets]
    assert np.mean(losses) == pytest.approx(loss(data), abs=1e-9)


# A supervised fit: with flat priors and every state known, the mode is counting


def sentences():
    """Symbols and their states, and the shares of starts, transitions and symbols; none is zero."""
    states = [[0, 0, 1, 1, 0], [1, 0, 1], [1, 1, 0, 1], [0, 1]]
    symbols = [[0, 1, 0, 1, 0], [1, 1, 0], [1, 1, 0, 1], [0, 1]]
    start, pair, symbol = np.zeros(2), np.zeros((2, 2)), np.zeros((2, 2))
    for path, row in zip(states, symbols):
        start[path[0]] += 1
        for t, (state, value) in enumerate(zip(path, row)):
            symbol[state, value] += 1
            if t:
                pair[path[t - 1], state] += 1
    data = Sequences.from_list(symbols, labels=states)
    return data, [counts / counts.sum(-1, keepdims=True) for counts in (start, pair, symbol)]


def parameters_of(hmm):
    return hmm.log_initial.exp(), hmm.log_transition.exp(), hmm.emission.probs


@pytest.mark.parametrize("as_sets", [False, True], ids=["integers", "sets"])
def test_supervised_em_counts(as_sets):
    data, frequencies = sentences()
    if as_sets:
        allowed = data.labels.unsqueeze(-1) == torch.arange(2)
        data = Sequences(data.values, data.lengths, data.observed, allowed)
    found = fit_em(TabularHMM(2, categorical(2)), data).hmm(data)
    for value, expected in zip(parameters_of(found), frequencies):
        np.testing.assert_allclose(value, expected, atol=1e-12)


def test_supervised_map_counts():
    """A hundred steps of Adam end within a few thousandths."""
    data, frequencies = sentences()
    model = MarginalModel(TabularHMM(2, categorical(2)))
    fit = fit_map(model, data, num_iterations=100, learning_rate=0.1, tolerance=None)
    for value, expected in zip(parameters_of(fit.hmm(data)), frequencies):
        np.testing.assert_allclose(value, expected, atol=3e-3)


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
    with pytest.raises(ValueError, match="hmm is restricted to labels"):
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
    with pytest.raises(ValueError, match="of up to 4 steps; the longest run has 9"):
        fit_em(TabularHSMM(2, normal(0), free_durations(4)), data, num_iterations=2)
    fit_em(TabularHSMM(2, normal(0), free_durations(9)), data, num_iterations=1)
