"""``Filter``: it computes what the HMM computes of whole sequences, and can be resumed."""

import io
from functools import partial

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from oracle import assert_close

from pyrohmm import HMM, HSMM, ContinuousTimeHMM, Filter, NeuralHMM, blocks, queries

NEVER = -np.inf


def casino(batch=(), dtype=torch.float64):
    """Two dice of three sides; ``lengths`` say only how many streams there are."""
    return HMM(
        torch.tensor([0.6, 0.4], dtype=dtype).log(),
        torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=dtype).log(),
        dist.Categorical(probs=torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=dtype)),
        torch.ones(batch, dtype=torch.long),
    )


def contradicted(validate_args=False):
    """Three streams of a chain that never leaves its state and shows it; the second changes it."""
    shown, even = dist.Categorical(logits=torch.eye(2).log()), torch.tensor([0.5, 0.5]).log()
    hmm = HMM(even, torch.eye(2).log(), shown, torch.ones(3).long(), None, validate_args)
    return Filter(hmm), torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 0]])


def test_before_the_first_step_the_state_has_the_distribution_of_the_first_state():
    stream = Filter(casino((2,)))
    assert_close(stream.state_probs, [[0.6, 0.4], [0.6, 0.4]])
    assert stream.log_evidence.tolist() == [0.0, 0.0]
    assert stream.num_steps == 0
    assert_close(stream.predict().probs[:, 0], [[0.34, 0.26, 0.4], [0.34, 0.26, 0.4]])


@pytest.mark.parametrize("arguments", [(None,), (torch.tensor(0), torch.tensor(False))])
def test_a_long_silence_is_no_evidence(arguments):
    """Rows that sum to one only nearly must not add up."""
    stream = Filter(casino((), torch.float32))
    for _ in range(300):
        stream.update(*arguments)
    assert stream.log_evidence == 0.0
    assert_close(stream.state_probs, [0.75, 0.25], rtol=1e-5)
    stream.update(torch.tensor(2))
    assert_close(stream.log_evidence.exp(), 0.75 * 0.2 + 0.25 * 0.7, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_streams_keep_their_digits(dtype):
    """Evidence is summed in double precision, whatever the model's."""
    hmm = casino((2,), dtype)
    values = torch.randint(3, (2, 600))
    stream = Filter(hmm)
    for t in range(600):
        stream.update(values[:, t])
    exact = casino((2,))
    exact = HMM(exact.log_initial, exact.log_transition, exact.emission, torch.tensor([600, 600]))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert_close(stream.log_evidence, exact.log_prob(values), rtol=tolerance)
    assert_close(stream.state_probs, exact.filtered(values)[:, -1], atol=tolerance, rtol=tolerance)
    assert stream.state_probs.dtype == dtype
    assert stream.log_evidence.dtype == torch.float64


def test_an_impossible_observation_is_refused_and_changes_no_stream():
    stream, values = contradicted(True)
    stream.update(values[:, 0])
    before = stream.state_dict()
    with pytest.raises(ValueError, match="1 of 3 sequences have probability zero"):
        stream.update(values[:, 1])
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(before[n]))
               for n, x in stream.state_dict().items())  # fmt: skip
    stream.update(values[:, 1], torch.tensor([True, False, True]))
    assert stream.state_probs.tolist() == [[0.0, 1.0]] * 3


def test_an_impossible_stream_stays_so_and_harms_no_other():
    stream, values = contradicted()
    for t in range(3):
        stream.update(values[:, t])
        stream.update(None)
    first = np.log(0.5)
    assert_close(stream.log_evidence, [NEVER, NEVER, NEVER])
    assert stream.state_probs.tolist() == [[0.0, 0.0]] * 3
    stream, values = contradicted()
    for t in range(2):
        stream.update(values[:, t])
    assert_close(stream.log_evidence, [first, NEVER, first])
    assert_close(stream.state_probs, [[0, 1], [0, 0], [0, 1]])
    ahead = stream.predict(2)
    assert_close(ahead.probs, [[[0, 1], [0, 1]], [[0, 0], [0, 0]], [[0, 1], [0, 1]]])
    assert (ahead.log_prob(torch.zeros(3, 2, dtype=torch.long))[1] == NEVER).all()
    stream.update(torch.tensor([1, 1, 1]), torch.tensor([True, False, True]))
    assert_close(stream.log_evidence, [first, NEVER, first])


def test_many_streams_are_each_as_if_alone():
    """Also where a transition is impossible, or so rare that no probability can express it."""
    seed = torch.Generator().manual_seed(0)
    logs = torch.randn(12, 12, generator=seed)
    logs[0], logs[1], logs[2:, 3] = -torch.inf, -900.0, -torch.inf
    logs = logs.fill_diagonal_(0.0).log_softmax(-1)
    emission = dist.Normal(40.0 * torch.arange(12.0), 1.0)
    hmm = HMM(logs.new_zeros(12).log_softmax(-1), logs, emission, torch.tensor(1))
    values = 40.0 * torch.randint(2, (6, 100), generator=seed)
    together, alone = Filter(hmm.expand((100,))), [Filter(hmm) for _ in range(100)]
    for now in values:
        assert_close(
            together.update(now), torch.stack([one.update(x) for one, x in zip(alone, now)])
        )
    evidence = torch.stack([one.log_evidence for one in alone])
    assert evidence.amin() < -800
    assert_close(together.log_evidence, evidence)


@pytest.mark.parametrize("per_step", [False, True])
def test_lengths_of_the_hmm_play_no_part(per_step):
    """Also where a chunk has as many steps as its longest sequence."""
    base, values = casino((2,)), torch.tensor([[0, 1, 0], [2, 2, 2]])
    faces = base.emission.expand((3, 2)) if per_step else base.emission
    found = []
    for lengths in (torch.tensor([3, 1]), torch.tensor([3, 3])):
        hmm = HMM(base.log_initial, base.log_transition, faces, lengths, emission_per_step=per_step)
        stream = Filter(hmm)
        found.append([stream.update(values), stream.log_evidence, stream.surprise])
    whole = HMM(base.log_initial, base.log_transition, base.emission, torch.tensor([3, 3]))
    for shown in found:
        assert_close(shown[0], whole.filtered(values))
        assert_close(shown[1], whole.log_prob(values))
        assert_close(shown[2], -queries.predictive_log_prob(whole, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_far_from_all_states_leave_the_states_their_digits(dtype):
    """One by one and at once, also where the nearest state is not the one that is possible."""
    start, move = torch.tensor([0.0, 0.6, 0.4]), torch.eye(3) * 0.8
    move[0], move[1:, 1:] = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    loc = torch.stack([torch.full((50,), 9.0), torch.zeros(50), torch.eye(50)[0]])
    emission = dist.Normal(loc.to(dtype), 0.05).to_event(1)
    parts = start.to(dtype).log(), move.to(dtype).log(), emission, torch.tensor(1)
    far = torch.zeros(20, 50, dtype=dtype)
    far[::3], far[:, 0] = 7.0, 0.5
    far[7] = 1e17 if dtype == torch.float32 else 1e25
    probs, wanted = start.double()[1:], []
    for t in range(20):  # values say nothing, for they are equally far from both
        probs = probs @ move.double()[1:, 1:] if t else probs
        wanted.append([0.0, *probs.tolist()])
    chunk, steps = Filter(HMM(*parts)), Filter(HMM(*parts))
    found = chunk.update(far), torch.stack([steps.update(value) for value in far])
    tolerance = 0.05 if dtype == torch.float32 else 1e-9  # likelihoods have as many digits
    for states in found:
        assert_close(states, wanted, atol=tolerance, rtol=tolerance)
        assert_close(states.sum(-1), np.ones(20), atol=1e-6, rtol=0)
    assert chunk.log_evidence.isfinite()
    assert_close(chunk.log_evidence, steps.log_evidence, rtol=1e-6)


def test_nothing_entered_at_a_missing_step_is_evidence_where_entries_are_seen():
    rates = torch.tensor([[-1.0, 0.5, 0.5], [0.3, -0.6, 0.3], [0.0, 0.0, 0.0]]).double()
    levels, start = dist.Normal(torch.arange(3.0).double(), 1.0), torch.eye(3).double()[0].log()
    times, entered = torch.tensor([0.0, 0.4, 1.0, 1.7]).double(), torch.tensor([False, False, True])
    values, known = torch.tensor([0.3, 0.1, 1.2, 1.0]).double(), torch.tensor([1, 1, 0, 1]).bool()
    hmm = ContinuousTimeHMM(
        start, rates, levels, torch.tensor(4), times, known, exact_entry=entered
    )
    at_once, steps = Filter(hmm), Filter(hmm)
    at_once.update(values, known, times)
    for t in range(4):
        steps.update(values[t] if known[t] else None, times=times[t : t + 1])
    assert_close(at_once.log_evidence, hmm.log_prob(values))
    assert_close(steps.log_evidence, hmm.log_prob(values))
    assert at_once.surprise[2] > 0


@pytest.mark.parametrize("two_level", [False, True])
def test_a_stream_that_continues_others_starts_from_their_states(two_level):
    torch.manual_seed(1)
    of_words = blocks.from_clusters(torch.arange(12) % 3, 4)
    module = NeuralHMM(12, 12, 8, blocks=of_words, two_level=two_level).eval()
    words, length = torch.randint(12, (3, 10)), partial(torch.full, (3,))
    with torch.no_grad():
        final = module(length(4)).final_state(words[:, :4])
        rest, _ = module.continue_from(length(6), final, torch.tensor([0, -1, 2]))
        whole, fresh = module(length(10)), module(length(6)).filtered(words[:, 4:])
        wanted, evidence = whole.filtered(words)[:, 4:], rest.log_prob(words[:, 4:])
        wanted[1] = fresh[1]
        assert_close(Filter(rest).update(words[:, 4:]), wanted, rtol=1e-5, atol=1e-6)
        assert_close(rest.expanded().log_prob(words[:, 4:]), evidence, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_restored_filter_continues_to_the_last_bit(dtype):
    hmm = casino((3,), dtype)
    values = torch.randint(3, (40, 3))
    first = Filter(hmm)
    for observation in values[:17]:
        first.update(observation)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = Filter(hmm)
    second.load_state_dict(torch.load(file, weights_only=True))
    for observation in values[17:]:
        assert torch.equal(first.update(observation), second.update(observation))
    assert torch.equal(first.log_evidence, second.log_evidence)
    assert first.num_steps == second.num_steps == 40


def test_surprise_is_zero_where_nothing_is_observed_and_infinite_where_nothing_is_possible():
    stream, values = contradicted()
    assert stream.surprise.tolist() == [0, 0, 0]
    stream.update(values)
    assert stream.surprise[0, 2] == torch.inf
    assert stream.surprise[1].tolist()[1:] == [torch.inf, torch.inf]
    stream.update(None)
    assert stream.surprise.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "wrong",
    [[1, 3], [-1, 0], [0.5, 1.0], [1, 2, 0], [[0, 1], [1, 3]]],
    ids=str,
)
def test_a_wrong_observation_changes_nothing(wrong):
    stream = Filter(casino((2,)))
    stream.update(torch.tensor([1, 2]))
    before = stream.state_dict()
    with pytest.raises((TypeError, ValueError)):
        stream.update(torch.tensor(wrong))
    for name, value in stream.state_dict().items():
        assert value is before[name] or bool(torch.as_tensor(value == before[name]).all()), name


@pytest.mark.parametrize("kind", ["markov", "segments", "left to right", "vectors in single"])
def test_a_long_chunk_is_its_steps_one_by_one(kind):
    """Of several streams, with missing steps, from the middle, and after what is impossible."""
    states = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5], [0.3, 0.0, 0.7]]).double()
    if kind == "left to right":
        states = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]]).double()
    first = torch.tensor([1.0, 0.0, 0.0]).double()
    die = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.1, 0.1, 0.8]]).double()
    seed = torch.Generator().manual_seed(0)
    emission, values = dist.Categorical(die), torch.randint(3, (2, 70), generator=seed)
    if kind == "vectors in single":
        states, first = states.float(), first.float()
        emission = dist.Normal(torch.eye(3), 0.3).to_event(1)
        values = torch.randn(2, 70, 3, generator=seed)
    hmm = HMM(first.log(), states.log(), emission, torch.ones(2).long(), validate_args=False)
    if kind == "segments":
        away = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]).double().log()
        durations = torch.tensor([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]]).double().log()
        hmm = HSMM(first.log(), away, durations, emission, hmm.lengths, validate_args=False)
    known = torch.rand(2, 70, generator=seed) > 0.3
    known[0] |= torch.arange(70) < 20  # where a stream becomes impossible
    chunks, steps = Filter(hmm), Filter(hmm)
    close = partial(assert_close, **({"rtol": 1e-5, "atol": 1e-5} if "single" in kind else {}))
    for begin, end in ((0, 3), (3, 40), (40, 41), (41, 70)):
        rows = [steps.update(values[:, t], known[:, t]) for t in range(begin, end)]
        probs = chunks.update(values[:, begin:end], known[:, begin:end])
        close(probs, torch.stack(rows, 1))
        close(chunks.log_evidence, steps.log_evidence)
        close(chunks.surprise[:, -1], steps.surprise)
        close(chunks.predict(2).state_probs, steps.predict(2).state_probs)
