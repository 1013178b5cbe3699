"""Chains over blocks of states: the same distribution as an HMM with zeros, in every query."""

import math

import hypothesis.strategies as st
import oracle
import pytest
import torch
from hypothesis import given, settings
from largest import Largest
from pyro.distributions import Categorical
from torch.nn.functional import one_hot

from pyrohmm import HMM, Filter, queries
from pyrohmm.chains import blocks as block_chains
from pyrohmm.distributions.block_hmm import BlockHMM
from pyrohmm.ops.blocks import from_clusters, recursions, transitions
from pyrohmm.ops.blocks.inner_products import InnerProductTransition, log_emission

patient = settings(deadline=None, max_examples=40, derandomize=True, database=None)
KINDS = ["two levels", "one level", "matrix"]
WAYS = [(kind, False) for kind in KINDS] + [("one level", True)]  # whether all at once


def compute(monkeypatch, all_transitions):
    """Have all transitions computed, or only those that occur, whatever takes less time."""
    monkeypatch.setattr(block_chains, "MATRIX", math.inf if all_transitions else 0)


class Case:
    """A random BlockHMM, the parameters it was made of, and values for it."""

    def __init__(self, kind, sizes, lengths, num_symbols=9, dim=3, scale=1.0, dtype=torch.float64):
        count = len(sizes)
        spare = torch.randint(count, (num_symbols - count,))
        assignment = torch.cat([torch.arange(count), spare])
        self.blocks = from_clusters(assignment, torch.tensor(sizes))
        size = self.blocks.num_states
        draw = lambda *shape: (torch.randn(shape, dtype=dtype) * scale).requires_grad_()  # noqa: E731
        self.parameters = [draw(size), draw(size, dim), draw(num_symbols, dim), draw(num_symbols)]
        start, emit, words, bias = self.parameters
        emission = log_emission(emit, words, bias, self.blocks)
        if kind == "matrix":
            self.parameters.append(draw(size, size))
            transitions = self.parameters[-1].log_softmax(-1)
        else:
            vectors = [draw(size, dim), draw(size, dim)]
            if kind == "two levels":
                vectors.append(draw(size, count))
            self.parameters += vectors
            transitions = InnerProductTransition(vectors[0], vectors[1], self.blocks, *vectors[2:])
        self.lengths = torch.tensor(lengths)
        self.values = torch.randint(num_symbols, (len(lengths), max(lengths)))
        self.hmm = BlockHMM(start.log_softmax(-1), transitions, emission, self.blocks, self.lengths)


def zeros(blocks, logits):
    """The emission, slowly: a softmax over the symbols of each state that it may emit."""
    rows = []
    for state in range(blocks.num_states):
        may = [v for v in range(blocks.num_symbols) if blocks.allowed[state, v]]
        row = torch.full((blocks.num_symbols,), -math.inf, dtype=logits.dtype)
        row[may] = logits[state, may].log_softmax(0)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", [[1], [4, 1, 6, 6, 2]], ids=str)
@pytest.mark.parametrize("sizes", [[1], [2, 2, 2], [3, 1, 2, 4]], ids=str)
@pytest.mark.parametrize(("kind", "all_transitions"), WAYS)
def test_everything_is_as_in_the_hmm_with_zeros(all_transitions, kind, sizes, lengths, monkeypatch):
    compute(monkeypatch, all_transitions)
    torch.manual_seed(len(sizes) + len(lengths))
    case = Case(kind, sizes, lengths)
    hmm, values = case.hmm, case.values
    _, emit, words, bias = case.parameters[:4]
    emission = torch.distributions.Categorical(logits=zeros(case.blocks, emit @ words.T + bias))
    transition = hmm.transition
    if not isinstance(transition, torch.Tensor):
        scores = transition.leave @ transition.enter.T
        if transition.block_logits is None:
            transition = scores.log_softmax(-1)
        else:
            shares, begin, parts = transition.block_logits.log_softmax(-1), 0, []
            for number, size in enumerate(sizes):
                part = scores[:, begin : begin + size].log_softmax(-1)
                parts.append(part + shares[:, number : number + 1])
                begin += size
            transition = torch.cat(parts, -1)
    plain = HMM(hmm.log_initial, transition, emission, case.lengths)
    weights = torch.randn(len(lengths), dtype=torch.float64)
    found, wanted = hmm.log_prob(values), plain.log_prob(values)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(
        (found * weights).sum(), case.parameters, retain_graph=True, materialize_grads=True
    )
    again = torch.autograd.grad(
        (found * weights).sum(), case.parameters, retain_graph=True, materialize_grads=True
    )
    want = torch.autograd.grad((wanted * weights).sum(), case.parameters, materialize_grads=True)
    for one, two, three in zip(got, again, want):
        torch.testing.assert_close(one, three, rtol=1e-9, atol=1e-11)
        assert torch.equal(one, two)
    posterior, within = plain.posterior(values), hmm.block_posterior(values)
    places = within.states.masked_fill(within.states < 0, plain.num_states)
    wide = torch.zeros(*places.shape[:-1], plain.num_states + 1, dtype=torch.float64)
    wide = wide.scatter(-1, places, within.probs)[..., :-1]
    torch.testing.assert_close(wide, posterior.state_probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(within.log_evidence, posterior.log_evidence)
    torch.testing.assert_close(hmm.posterior(values).transitions, posterior.transitions)
    torch.testing.assert_close(hmm.filtered(values), plain.filtered(values))
    torch.testing.assert_close(hmm.log_transition, plain.log_transition)
    torch.testing.assert_close(hmm.emission.probs, plain.emission.probs)
    best = hmm.viterbi(values)
    torch.testing.assert_close(
        plain.log_joint(values, best), plain.log_joint(values, plain.viterbi(values))
    )
    torch.testing.assert_close(hmm.log_joint(values, best), plain.log_joint(values, best))


QUERIES = {
    "viterbi": lambda hmm, values: hmm.viterbi(values),
    "filtered": lambda hmm, values: hmm.filtered(values),
    "sample_states": lambda hmm, values: hmm.sample_states(values),
    "posterior": lambda hmm, values: hmm.posterior(values),
    "block_posterior": lambda hmm, values: hmm.block_posterior(values),
    "final_state": lambda hmm, values: hmm.final_state(values),
}


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("kind", ["two levels", "matrix"])
def test_a_query_before_takes_no_gradient_away(kind, query):
    gradients = []
    for asked in (False, True):
        torch.manual_seed(5)
        case = Case(kind, [3, 1, 4], [4, 1, 6])
        if asked:
            with torch.inference_mode():
                QUERIES[query](case.hmm, case.values)
        evidence = case.hmm.log_prob(case.values) + case.hmm.dense().log_prob(case.values)
        gradients.append(torch.autograd.grad(evidence.sum(), case.parameters))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_are_sampled_from_the_distribution(kind):
    torch.manual_seed(2)
    case = Case(kind, [2, 2], [3], num_symbols=4)
    values, states = case.hmm.sample_with_states((30_000,))
    assert bool(case.blocks.allowed[states, values].all())
    codes = (values.squeeze(1) * torch.tensor([16, 4, 1])).sum(-1)
    every = torch.cartesian_prod(*[torch.arange(4)] * 3)
    wide = case.hmm.with_lengths(torch.full((64,), 3))
    probs = wide.log_prob(every).exp()
    torch.testing.assert_close(probs.sum().item(), 1.0)
    assert oracle.looks_drawn_from(torch.bincount(codes, minlength=64), probs.detach().numpy())


def in_single_precision(case):
    """The same HMM, a function of the same parameters."""
    hmm, parts = case.hmm, []
    for each in (hmm.transition, hmm.log_initial, hmm.log_emission):
        if isinstance(each, InnerProductTransition):
            logits = None if each.block_logits is None else each.block_logits.float()
            parts.append(
                InnerProductTransition(each.leave.float(), each.enter.float(), case.blocks, logits)
            )
        else:
            parts.append(each.float())
    transition, initial, emission = parts
    return BlockHMM(initial, transition, emission, case.blocks, case.lengths)


@pytest.mark.parametrize("kind", ["matrix", "two levels"])
def test_long_sequences_have_probabilities_and_gradients_in_single_precision(kind):
    """Their evidence is thousands of nats, of which single precision has few decimals."""
    torch.manual_seed(0)
    case = Case(kind, [3, 4, 4], [500, 7], num_symbols=40, scale=3.0)
    single = in_single_precision(case)
    evidence = [hmm.log_prob(case.values) for hmm in (single, case.hmm)]
    assert evidence[1].min() < -1000
    torch.testing.assert_close(evidence[0].double(), evidence[1], rtol=1e-6, atol=1e-6)
    gradients = [
        torch.cat(
            [
                part.flatten()
                for part in torch.autograd.grad(each.sum(), case.parameters, retain_graph=True)
            ]
        )
        for each in evidence
    ]
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()
    with torch.no_grad():
        for probs_of in (lambda hmm: hmm.block_posterior(case.values).probs,
                     lambda hmm: hmm.filtered(case.values)):  # fmt: skip
            found, wanted = probs_of(single).double(), probs_of(case.hmm)
            torch.testing.assert_close(found.sum(-1), wanted.sum(-1), rtol=0, atol=1e-4)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)


@patient
@given(st.data())
def test_single_precision_is_as_good_as_its_numbers(data):
    """Also where some sequences leave the range of single precision, and are redone."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    kind, scale = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from([0.1, 3.0, 30.0]))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    case = Case(kind, sizes, lengths, scale=scale)
    hmm, single = case.hmm, in_single_precision(case)
    found = single.log_prob(case.values)
    assert found.dtype == torch.float32
    size = max(1.0, hmm.log_prob(case.values).abs().max().item(), 30 * scale**2)
    torch.testing.assert_close(
        found.double(), hmm.log_prob(case.values), rtol=1e-4, atol=1e-6 * size * max(lengths)
    )
    inputs = case.parameters
    got = torch.autograd.grad(found.sum(), inputs, allow_unused=True)
    assert all(each is None or bool(each.isfinite().all()) for each in got)


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 2, 4]], ids=str)
@pytest.mark.parametrize(("kind", "all_transitions"), [WAYS[0], WAYS[1], WAYS[-1]])
def test_inner_products_may_be_in_lower_precision(kind, sizes, all_transitions, monkeypatch):
    compute(monkeypatch, all_transitions)
    torch.manual_seed(1)
    case, found = Case(kind, sizes, [4, 1, 6, 6, 2], dim=16, scale=0.5, dtype=torch.float32), []
    leave, enter = (part.detach().bfloat16() for part in case.parameters[4:6])
    for dtype in (torch.bfloat16, torch.float32):
        vectors = [part.to(dtype).requires_grad_() for part in (leave, enter)]
        transition = InnerProductTransition(*vectors, case.blocks, *case.parameters[6:])
        hmm = BlockHMM(
            case.hmm.log_initial, transition, case.hmm.log_emission, case.blocks, case.lengths
        )
        evidence = hmm.log_prob(case.values)
        gradients = torch.autograd.grad(evidence.sum(), vectors, retain_graph=True)
        assert [each.dtype for each in gradients] == [dtype, dtype]
        assert transition.matrix.dtype == evidence.dtype == torch.float32
        assert transition.matrix.exp().sum(-1).tolist() == pytest.approx(
            [1.0] * case.blocks.num_states
        )
        found.append((evidence, *(each.float() for each in gradients)))
    assert not torch.equal(found[0][0], found[1][0])
    for low, full in zip(*found):  # products and gradients are rounded to 8 bits
        assert (low - full).norm() < 0.01 * full.norm()


@pytest.mark.parametrize("kind", ["matrix", "one level", "two levels"])
@pytest.mark.parametrize(
    ("dtype", "noise", "lengths"),
    [(torch.float32, 0.05, (30, 60)), (torch.float64, 1e-10, (40, 80))],
    ids=["single", "double"],
)
def test_paths_that_were_lost_long_before_they_matter_are_found(kind, dtype, noise, lengths):
    """Two states that hardly change places: the first symbols speak for one, more for the other."""
    blocks = from_clusters(torch.tensor([0, 0]), 2)
    values = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    emission = torch.tensor([[1 - noise, noise], [noise, 1 - noise]], dtype=dtype).log()
    vectors = 40 * torch.eye(2, dtype=dtype)
    transitions = {
        "matrix": torch.eye(2, dtype=dtype).log(),
        "one level": InnerProductTransition(vectors, vectors, blocks),
        "two levels": InnerProductTransition(
            vectors, vectors, blocks, torch.zeros(2, 1, dtype=dtype)
        ),
    }[kind]
    start = torch.tensor([0.5, 0.5], dtype=dtype).log()
    hmm = BlockHMM(start, transitions, emission, blocks, torch.tensor([sum(lengths)]))
    wide = HMM(start.double(), hmm.log_transition.double(),
               Categorical(logits=emission.double()), hmm.lengths)  # fmt: skip
    found, wanted = hmm.log_prob(values), wide.log_prob(values)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    states = wide.posterior(values).state_probs
    within = hmm.block_posterior(values).probs
    torch.testing.assert_close(within.double(), states, rtol=0, atol=1e-3)
    odds = (lengths[0] - lengths[1]) * math.log((1 - noise) / noise)  # it never changed places
    last = hmm.final_state(values).log_probs.double()
    torch.testing.assert_close(last, torch.tensor([[odds, 0.0]]).double(), rtol=1e-4, atol=1e-4)
    seen = hmm.with_lengths(hmm.lengths, torch.ones(1, sum(lengths)).bool())
    assert torch.equal(seen.final_state(values).log_probs, hmm.final_state(values).log_probs)


def test_moves_of_a_pair_are_added_in_any_number_of_parts(monkeypatch):
    gradients = []
    for fewest, most in ((1, 1), (2, 3), (8, 512)):
        monkeypatch.setattr(recursions, "FEWEST", fewest)
        monkeypatch.setattr(recursions, "BLOCK", most)
        torch.manual_seed(7)
        case = Case("two levels", [3, 1, 4], [1, 30, 2, 17])
        evidence = case.hmm.log_prob(case.values)
        gradients.append(torch.autograd.grad(evidence.sum(), case.parameters))
    for one, two, three in zip(*gradients):
        torch.testing.assert_close(one, three, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(two, three, rtol=1e-12, atol=1e-13)


def test_all_sums_over_states_are_made_in_parts(monkeypatch):
    torch.manual_seed(5)
    results = []
    for chunk in (1, 20, 1 << 20):
        monkeypatch.setattr(transitions, "AT_ONCE", chunk)
        torch.manual_seed(5)
        case = Case("one level", [3, 1, 4], [6, 2])
        found = case.hmm.log_prob(case.values)
        results.append((found, *torch.autograd.grad(found.sum(), case.parameters)))
    for each in zip(*results):
        torch.testing.assert_close(each[0], each[1], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(each[0], each[2], rtol=1e-12, atol=1e-13)


# Missing steps


def with_gaps(case):
    """The same HMM with missing steps: a sequence without any, one with nothing else.

    Some are at the start, at the end, several in a row. Nothing may be read where they are.
    """
    num_sequences, num_steps = case.values.shape
    seen = torch.rand(num_sequences, num_steps) < 0.5
    seen[0], seen[-1] = False, True
    seen[1] = torch.arange(num_steps) == 3
    hmm = case.hmm.replace(observed=seen)
    return hmm, hmm.dense(), case.values.masked_fill(~seen, -7)


def many_states(kind, monkeypatch):
    """1,024 states in 64 blocks, computed in small chunks, and a mask with gaps."""
    compute(monkeypatch, False)
    monkeypatch.setattr(transitions, "AT_ONCE", 1 << 14)
    monkeypatch.setattr(transitions, "CHUNK", 1 << 14)
    torch.manual_seed(0)
    seen = torch.ones(2, 9, dtype=torch.bool)
    seen[0, 1], seen[1, 3:6] = False, False
    return Case(kind, [16] * 64, [4, 9], num_symbols=64, dtype=torch.float32), seen


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("kind", ["one level", "two levels"])
def test_no_matrix_of_all_transitions_is_made(kind, missing, monkeypatch):
    case, seen = many_states(kind, monkeypatch)
    hmm = case.hmm.replace(observed=seen) if missing else case.hmm
    with Largest() as largest:
        evidence = hmm.log_prob(case.values)
        gradients = torch.autograd.grad(evidence.sum(), case.parameters)
    assert all(bool(each.isfinite().all()) for each in gradients)
    assert largest.size <= 1024 * 64


@pytest.mark.parametrize("query", ["viterbi", "sample_states", "filtered"])
@pytest.mark.parametrize("kind", ["one level", "two levels"])
def test_paths_through_gaps_need_no_matrix_of_all_transitions(kind, query, monkeypatch):
    case, seen = many_states(kind, monkeypatch)
    hmm = case.hmm.replace(observed=seen)
    with Largest() as largest, torch.no_grad():
        found = getattr(hmm, query)(case.values)
    assert found.shape[:2] == (2, 9)
    assert largest.size <= 1024 * 64


def test_matrices_of_steps_exist_for_few_sequences_at_a_time(monkeypatch):
    monkeypatch.setattr(transitions, "AT_ONCE", 1 << 12)
    torch.manual_seed(0)
    case = Case("two levels", [4] * 16, [20] * 64, num_symbols=16)
    with Largest() as largest, torch.no_grad():
        case.hmm.viterbi(case.values)
    assert largest.size <= 64 * 20 * 4


# Posterior queries, by blocks


@pytest.fixture
def by_blocks(monkeypatch):
    """Whoever asks for the dense HMM after this fails."""

    def refuse():
        monkeypatch.setattr(BlockHMM, "dense", None)
        monkeypatch.setattr(BlockHMM, "log_factors", None)

    return refuse


@pytest.mark.parametrize("kind", KINDS)
def test_filters_in_blocks_know_which_streams_are_observed(kind, by_blocks):
    torch.manual_seed(10)
    case = Case(kind, [3, 1, 2, 4], [5, 5, 5, 5])
    wanted, found = Filter(case.hmm.dense()), Filter(case.hmm)
    observed = torch.tensor(
        [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 1, 1], [1, 0, 1, 0, 1]]
    ).bool()
    values = case.values.masked_fill(~observed, -7)
    states, ahead = wanted.update(case.values, observed), wanted.predict(2).state_probs
    by_blocks()
    torch.testing.assert_close(found.update(values, observed), states)
    torch.testing.assert_close(found.predict(2).state_probs, ahead)
    torch.testing.assert_close(found.log_evidence, wanted.log_evidence)
    torch.testing.assert_close(found.surprise, wanted.surprise)
    before = found.state_probs
    with pytest.raises(ValueError, match="values must lie between 0 and V - 1 = 8"):
        found.update(torch.tensor([[0, 9]] * 4))
    assert torch.equal(found.state_probs, before)


@pytest.mark.parametrize("kind", ["one level", "two levels"])
def test_continuations_are_sampled_and_scored_in_blocks(kind, by_blocks):
    torch.manual_seed(10)
    case = Case(kind, [2, 1, 2], [4, 2, 5], num_symbols=4)
    hmm, wide, values = case.hmm, case.hmm.dense(), case.values
    further = torch.randint(4, (3, 2))
    wanted = queries.continuation(wide, values, 2)
    shares = wide.forecast(values, 2).probs
    by_blocks()
    ahead = queries.continuation(hmm, values, 2)
    torch.testing.assert_close(ahead.log_prob(further), wanted.log_prob(further))
    drawn = one_hot(ahead.sample((4000,)), 4).double().mean(0)
    assert bool(((drawn - shares).abs() < 5 * (shares / 4000).sqrt() + 1e-3).all())


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_with_missing_steps_are_those_of_the_dense_hmm(kind, scale, by_blocks, monkeypatch):
    """Transitions within gaps come three rows at a time; those of all steps missing as well."""
    monkeypatch.setattr(transitions, "CHUNK", 30)
    torch.manual_seed(11)
    case = Case(kind, [3, 1, 2, 4], [3, 5, 6, 1, 5], scale=scale)
    hmm, wide, values = with_gaps(case)
    nothing = case.hmm.replace(observed=torch.zeros(5, 6, dtype=torch.bool))
    wanted = [wide.posterior(case.values), nothing.dense().posterior(case.values)]
    filtered = wide.filtered(case.values)
    marginals = queries.observation_marginals(wide, case.values).probs
    best = [
        (
            queries.k_best(each.dense(), case.values, 5),
            queries.path_entropy(each.dense(), case.values),
        )
        for each in (hmm, nothing)
    ]
    predictive = queries.predictive_log_prob(wide, case.values)
    by_blocks()
    torch.testing.assert_close(queries.predictive_log_prob(hmm, values), predictive)
    for one, other in zip((hmm, nothing), wanted):
        for found, expected in zip(one.posterior(values), other):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)
    for each, ((paths, scores), entropy) in zip((hmm, nothing), best):
        found, log_joint = queries.k_best(each, values, 5)
        torch.testing.assert_close(log_joint, scores)
        assert torch.equal(found, paths)
        assert torch.equal(each.viterbi(values), paths[:, 0])
        torch.testing.assert_close(queries.path_entropy(each, values), entropy)
    torch.testing.assert_close(hmm.filtered(values), filtered, rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(queries.observation_marginals(hmm, values).probs, marginals)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_through_gaps_are_sampled_from_the_posterior(kind):
    torch.manual_seed(12)
    hmm, wide, values = with_gaps(Case(kind, [3, 1, 2], [3, 5, 4]))
    shares = one_hot(hmm.sample_states(values, (4000,)), 6).double().mean(0)
    wanted = wide.posterior(values.clamp(min=0)).state_probs
    wanted = wanted + one_hot(torch.zeros(3, 5).long(), 6) * ~hmm.exists.unsqueeze(-1)
    assert bool(((shares - wanted).abs() < 5 * (wanted / 4000).sqrt() + 1e-3).all())


# One step backward from all states, by a matrix that is kept


@pytest.mark.parametrize("limit", [transitions.KEPT, 0])
@pytest.mark.parametrize("kind", ["one level", "two levels"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_steps_back_from_all_states_are_those_of_the_matrix(kind, scale, limit, monkeypatch):
    """Also of transitions of probability e^-1000 to the only states with a value."""
    monkeypatch.setattr(transitions, "KEPT", limit)
    monkeypatch.setattr(transitions, "CHUNK", 20)  # two rows at a time
    torch.manual_seed(0)
    hmm = in_single_precision(Case(kind, [2, 4, 3], [1], scale=scale))
    log_values = torch.randn(4, 9).double() * 3
    log_values[1, 2:] = -math.inf
    log_values[2] = -math.inf
    log_values[3] -= 1e5
    steps = hmm.chain.transitions()
    wanted = (hmm.log_transition.double() + log_values.unsqueeze(1)).logsumexp(-1)
    torch.testing.assert_close(steps.back_from_all(log_values), wanted, rtol=1e-5, atol=1e-5)
    assert steps.back_from_all(log_values[:0]).shape == (0, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_long_sequence_among_short_ones_changes_nothing(kind):
    """They are computed apart, so that padding takes neither memory nor time."""
    case = Case(kind, [2, 3, 2], [3, 64, 2, 1, 9, 30, 3])
    found = case.hmm.log_prob(case.values)
    alone = []
    for row, length in enumerate(case.lengths.tolist()):
        hmm = case.hmm.with_lengths(torch.tensor([length]))
        alone.append(hmm.log_prob(case.values[row : row + 1, :length]))
    torch.testing.assert_close(found, torch.cat(alone))
    wanted = torch.autograd.grad(torch.cat(alone).sum(), case.parameters, retain_graph=True)
    gradients = torch.autograd.grad(found.sum(), case.parameters)
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "all_transitions"), WAYS)
def test_a_gradient_leaves_nothing_to_the_collector(monkeypatch, kind, all_transitions, dtype):
    """One that held the value that it is of would keep the memory of a step until then."""
    compute(monkeypatch, all_transitions)

    def step():
        case = Case(kind, [3, 1, 2], [4, 1, 6], dtype=dtype)
        case.hmm.log_prob(case.values).sum().backward()

    assert oracle.cyclic(step) == 0
