"""``Filter``: it computes what the HMM computes of whole sequences, and can be resumed."""

import io

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from oracle import assert_close

from pyrohmm import HMM, HSMM, ContinuousTimeHMM, Filter, SecondOrderHMM
from pyrohmm.distributions import AutoregressiveNormal

NEVER = -np.inf


def casino(batch=(), dtype=torch.float64):
    """Two dice of three sides; ``lengths`` say only how many streams there are."""
    return HMM(
        torch.tensor([0.6, 0.4], dtype=dtype).log(),
        torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=dtype).log(),
        dist.Categorical(probs=torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], dtype=dtype)),
        torch.ones(batch, dtype=torch.long),
    )


def contradicted():
    """Three streams of a chain that never leaves its state and shows it; the second changes it."""
    shown = dist.Categorical(logits=torch.eye(2).log())
    hmm = HMM(torch.tensor([0.5, 0.5]).log(), torch.eye(2).log(), shown, torch.ones(3).long())
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


def log_rows(*shape):
    return torch.randn(*shape, dtype=torch.float64).log_softmax(-1)


def autoregressive():
    base = dist.MultivariateNormal(torch.randn(3, 1).double(), torch.eye(1).double())
    return AutoregressiveNormal(base, base, torch.randn(3, 2, 1, 1).double() / 2)


def without_loops():
    loops = torch.eye(3, dtype=torch.bool)
    return torch.randn(3, 3).double().masked_fill(loops, -torch.inf).log_softmax(-1)


LEVELS = dist.Normal(torch.tensor([-1.0, 0.0, 2.0]).double(), 1.0)
TIMES = torch.tensor([[0.0, 0.3, 2.0, 2.5, 7.0], [1.0, 1.1, 4.0, 4.5, 5.5]]).double()
FIVES = torch.tensor([5, 5])
OF_EVERY_KIND = {
    "plain": lambda: HMM(log_rows(3), log_rows(3, 3), LEVELS, FIVES),
    "durations": lambda: HSMM(
        log_rows(3), without_loops(), log_rows(3, 3), LEVELS, FIVES
    ),
    "durations seen from any moment": lambda: HSMM(
        log_rows(3), without_loops(), log_rows(3, 3), LEVELS, FIVES,
        censored_start=True,
    ),
    "second order": lambda: SecondOrderHMM(
        log_rows(3), log_rows(3, 3), log_rows(3, 3, 3), LEVELS, FIVES
    ),
    "matrices per step": lambda: HMM(
        log_rows(3), log_rows(4, 3, 3), LEVELS, FIVES, transition_per_step=True
    ),
    "emissions per step": lambda: HMM(
        log_rows(3), log_rows(3, 3), dist.Normal(torch.randn(5, 3).double(), 1.0), FIVES,
        emission_per_step=True,
    ),
    "continuous time": lambda: ContinuousTimeHMM(
        log_rows(3), torch.ones(3, 3).double() - 3 * torch.eye(3), LEVELS, FIVES, TIMES
    ),
    "autoregressive": lambda: HMM(log_rows(3), log_rows(3, 3), autoregressive(), FIVES),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_EVERY_KIND)
@pytest.mark.parametrize("chunks", [[1] * 5, [2, 3]])
def test_chains_and_emissions_of_every_kind_are_filtered(kind, chunks):
    torch.manual_seed(0)
    hmm = OF_EVERY_KIND[kind]()
    values = hmm.sample().double()
    observed = torch.ones(2, 5, dtype=torch.bool)
    observed[:, 3:] = torch.tensor([[kind == "autoregressive"], [False]])
    if kind == "autoregressive":
        observed[:] = True
    seen = hmm.replace(observed=observed)
    stream, found = Filter(hmm), []
    for chunk in torch.arange(5).split(chunks):
        times = {"times": TIMES[:, chunk]} if kind == "continuous time" else {}
        now, mask = values[:, chunk], observed[:, chunk]
        found.append(stream.update(now, mask, **times))
        other = Filter(hmm)  # and goes on where this one stopped
        other.load_state_dict(stream.state_dict())
        stream = other
    torch.testing.assert_close(torch.cat(found, 1), seen.filtered(values))
    torch.testing.assert_close(stream.log_evidence, seen.log_prob(values))


def test_predictions_of_every_kind_are_forecasts():
    torch.manual_seed(0)
    for kind in ("plain", "durations", "second order", "continuous time", "autoregressive"):
        hmm = OF_EVERY_KIND[kind]()
        values, stream = hmm.sample(), Filter(hmm)
        if kind == "continuous time":
            stream.update(values, times=TIMES)
            ahead = stream.predict(times=TIMES[:, -1:] + torch.tensor([0.5, 2.0]))
            wanted = hmm.forecast(values, TIMES[:, -1:] + torch.tensor([0.5, 2.0]))
        else:
            stream.update(values)
            ahead, wanted = stream.predict(2), hmm.forecast(values, 2)
        torch.testing.assert_close(ahead.state_probs, wanted.state_probs)
        torch.testing.assert_close(ahead.mean, wanted.mean)


def test_steps_beyond_the_parameters_and_times_that_go_back_are_refused():
    for kind in ("matrices per step", "emissions per step"):
        stream = Filter(OF_EVERY_KIND[kind]())
        stream.update(torch.zeros(2, 5).double())
        with pytest.raises(ValueError, match="has parameters for 5 steps; got 6"):
            stream.update(0.0)
        assert stream.num_steps == 5
    stream = Filter(OF_EVERY_KIND["continuous time"]())
    stream.update(torch.zeros(2, 1).double(), times=TIMES[:, 1:2])
    with pytest.raises(ValueError, match="times must be finite and increase"):
        stream.update(0.0, times=TIMES[:, :1])


def test_surprise_is_zero_where_nothing_is_observed_and_infinite_where_nothing_is_possible():
    stream, values = contradicted()
    assert stream.surprise.tolist() == [0, 0, 0]
    stream.update(values)
    assert stream.surprise[0, 2] == torch.inf
    assert stream.surprise[1].tolist()[1:] == [torch.inf, torch.inf]
    stream.update(None)
    assert stream.surprise.tolist() == [0, 0, 0]
