"""``HMM``: conventions, sampling, forecasts, supports and errors; exactness is in ``test_fuzz``."""

import numpy as np
import oracle
import pyro.distributions as dist
import pytest
import torch
from oracle import assert_close
from torch.autograd import gradcheck

from pyrohmm import HMM


def even(*shape):
    return torch.zeros(shape).log_softmax(-1)


def rows(*shape):
    return torch.randn(shape).log_softmax(-1)


def built(lead=(), lengths=(3, 1, 2), emission=None, **options):
    """An HMM of two states with random parameters ``(*lead, ...)``, of four symbols by default."""
    emission = dist.Categorical(logits=rows(*lead, 2, 4)) if emission is None else emission
    return HMM(rows(*lead, 2), rows(*lead, 2, 2), emission, torch.tensor(lengths), **options)


def arguments(**changed):
    given = {
        "log_initial": even(3),
        "log_transition": even(3, 3),
        "emission": dist.Categorical(logits=torch.zeros(3, 4)),
        "lengths": torch.tensor([4, 2]),
    }
    return given | changed


# Batches and types --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lead", "counted", "given"),
    [((2, 1), (3,), (2, 3)), ((2, 1), (2, 3), (3,)), ((), (3,), (2, 3)), ((3,), (3,), (3,))],
)
def test_all_that_broadcasts_is_asked_one_by_one(lead, counted, given, engine):
    """Restarts whose lengths or values differ; values of many replications."""
    hmm = built(lead, torch.randint(1, 4, counted).tolist())
    values = torch.randint(4, (*given, 3))
    batch = torch.broadcast_shapes(lead, counted, given)
    evidence, states = hmm.log_prob(values), hmm.posterior(values).state_probs
    path = hmm.viterbi(values)
    assert evidence.shape == batch
    for place in np.ndindex(batch):
        parts = [hmm.log_initial, hmm.log_transition, hmm.emission.logits]
        parts = [p.expand(*batch, *p.shape[len(lead) :])[place] for p in parts]
        length = hmm.lengths.expand(batch)[place]
        one = HMM(*parts[:2], dist.Categorical(logits=parts[2]), length)
        own = values.expand(*batch, 3)[place][:length]
        assert_close(evidence[place], one.log_prob(own))
        assert_close(states[place][:length], one.posterior(own).state_probs)
        assert path[place][:length].equal(one.viterbi(own))


def test_missing_steps_may_hold_what_no_default_could_replace():
    """Zero is not in the support of a Dirichlet, whichever distribution the filler is made for."""
    emission = dist.Dirichlet(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    hmm = HMM(even(2), even(2, 2), emission, torch.tensor([2]), nothing)
    assert hmm.log_prob(torch.full((1, 2, 2), torch.nan)).item() == pytest.approx(0.0)


def test_gradients_by_every_parameter_are_those_of_small_differences(engine):
    values, observed = torch.randn(2, 3, 2), torch.rand(2, 3) < 0.7

    def evidence(initial, transition, loc, scale):
        return HMM(
            initial.log_softmax(-1), transition.log_softmax(-1),
            dist.Normal(loc, scale.exp()).to_event(1), torch.tensor([3, 2]), observed,
            transition_per_step=True, emission_per_step=True,
        ).log_prob(values)  # fmt: skip

    shapes = (2,), (2, 2, 2), (3, 2, 2), (3, 2, 2)
    assert gradcheck(evidence, [torch.randn(shape).requires_grad_() for shape in shapes])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_of_every_size_will_do(dtype):
    hmm = built()
    values, states = torch.randint(4, (3, 3)), torch.zeros(3, 3).long()
    twin = hmm.replace(lengths=hmm.lengths.to(dtype))
    assert torch.equal(twin.log_prob(values.to(dtype)), hmm.log_prob(values))
    assert torch.equal(twin.log_joint(values, states.to(dtype)), hmm.log_joint(values, states))


# Conventions --------------------------------------------------------------------------------------


def test_the_first_state_emits(engine):
    """Rabiner's convention. pyro.distributions.DiscreteHMM makes a transition before it emits."""
    start, swap = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    hmm = HMM(start.log(), swap.log(), dist.Categorical(logits=torch.eye(2).log()), torch.tensor(1))
    assert hmm.log_prob(torch.tensor([0])).exp() == pytest.approx(1.0)
    assert hmm.log_prob(torch.tensor([1])).exp() == 0.0


# Sampling ---------------------------------------------------------------------------------------


def test_samples_of_a_batch_follow_their_own_parameters():
    """Of restarts with lengths each, and parameters per step, with zeros."""
    initial, matrix, logits = rows(2, 1, 3), rows(2, 1, 2, 3, 3), rows(2, 1, 3, 3, 4)
    matrix = matrix.masked_fill(torch.eye(3).bool(), -torch.inf).log_softmax(-1)
    hmm = HMM(
        initial, matrix, dist.Categorical(logits=logits), torch.full((2, 3), 3),
        transition_per_step=True, emission_per_step=True,
    )  # fmt: skip
    values, states = hmm.sample_with_states((3000,))
    assert values.shape == states.shape == (3000, 2, 3, 3)
    for copy, n in np.ndindex(2, 3):
        probs = initial[copy, 0].exp()
        for t in range(3):
            path, seen = states[:, copy, n, t], values[:, copy, n, t]
            emitted = probs[:, None] * logits[copy, 0, t].exp()
            assert oracle.looks_drawn_from(np.bincount(path * 4 + seen, minlength=12), emitted)
            if t < 2:
                pairs = probs[:, None] * matrix[copy, 0, t].exp()
                after = states[:, copy, n, t + 1]
                assert oracle.looks_drawn_from(np.bincount(path * 3 + after, minlength=9), pairs)
                probs = pairs.sum(0)


# Expanding, forecasting, the long run -----------------------------------------------------------


@pytest.mark.parametrize("per_step", [False, True])
def test_expanding_changes_shapes_and_no_answer(per_step, engine):
    lead, steps = (2, 1), (3,) if per_step else ()
    matrix = rows(*lead, *((2,) if per_step else ()), 2, 2)
    hmm = HMM(
        rows(*lead, 2), matrix, dist.Categorical(logits=rows(*lead, *steps, 2, 4)),
        torch.tensor([3, 1, 2]), torch.rand(3, 3) < 0.7,
        transition_per_step=per_step, emission_per_step=per_step,
    )  # fmt: skip
    wide, values = hmm.expand((4, 2, 3)), torch.randint(4, (2, 3, 3))
    assert (wide.batch_shape, wide.event_shape) == ((4, 2, 3), (3,))
    evidence, states = hmm.log_prob(values), hmm.viterbi(values)
    for given in (values, values.expand(4, 2, 3, 3)):
        torch.testing.assert_close(wide.log_prob(given), evidence.expand(4, 2, 3))
    assert wide.sample((2,)).shape == (2, 4, 2, 3, 3)
    joint = hmm.log_joint(values, states)
    torch.testing.assert_close(wide.log_joint(values, states), joint.expand(4, 2, 3))
    with pytest.raises(ValueError, match="values must lie between 0 and V - 1"):
        wide.log_prob(values + 4)


@pytest.mark.parametrize("event", [(), (2,)])
def test_moments_of_a_forecast_are_those_of_the_mixture(event, engine):
    loc, scale = torch.randn(2, 1, 2, *event), torch.rand(2, 1, 2, *event) + 0.5
    hmm = built((2, 1), emission=dist.Normal(loc, scale).to_event(len(event)))
    forecast = hmm.forecast(hmm.sample(), 2)
    weights = forecast.state_probs.reshape(2, 3, 2, 2, *(1,) * len(event))
    mean = (weights * loc.unsqueeze(-2 - len(event))).sum(3)
    square = (weights * (loc**2 + scale**2).unsqueeze(-2 - len(event))).sum(3)
    assert_close(forecast.mean, mean)
    assert_close(forecast.variance, square - mean**2)


def test_forecast_samples_from_its_distribution():
    hmm = built((2, 1))
    forecast = hmm.forecast(torch.randint(4, (3, 3)), 2)
    drawn = forecast.sample((4000,))
    assert drawn.shape == (4000, 2, 3, 2)
    for index in np.ndindex(2, 3, 2):
        counts = np.bincount(drawn[(slice(None), *index)], minlength=4)
        assert oracle.looks_drawn_from(counts, forecast.probs[index].numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_forecast_variance_does_not_cancel(dtype):
    """A spread of a tenth around a mean of ten thousand."""
    logs = even(2, 2).to(dtype)
    loc = torch.tensor([10_000.0, 10_000.5], dtype=dtype)
    emission = dist.Normal(loc, torch.full((2,), 0.1, dtype=dtype))
    hmm = HMM(logs[0], logs, emission, torch.tensor([1]))
    variance = hmm.forecast(loc[:1, None], 1).variance
    assert variance.item() == pytest.approx(0.01 + 0.0625, rel=1e-4)


def test_stationary_distribution_is_kept_by_the_chain():
    for shape in [(1, 1), (2, 2), (5, 5), (3, 1, 4, 4)]:
        transition = rows(*shape)
        emission = dist.Normal(torch.zeros(shape[-1]), 1.0)
        probs = HMM(transition[..., 0, :], transition, emission, torch.tensor([2])).stationary()
        assert probs.shape == shape[:-1]
        assert_close(probs.sum(-1), np.ones(shape[:-2]))
        assert_close((probs[..., None, :] @ transition.exp()).squeeze(-2), probs)


def test_stationary_distribution_of_a_chain_with_a_transient_state():
    transition = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.0, 0.6, 0.4]])
    hmm = HMM(
        transition[0].log(), transition.log(), dist.Normal(torch.zeros(3), 1.0), torch.tensor([2])
    )
    assert_close(hmm.stationary(), [0.0, 3 / 7, 4 / 7])


def test_stationary_distribution_of_a_chain_that_hardly_moves_keeps_its_digits():
    transition = torch.tensor([[1 - 3e-13, 3e-13], [1e-13, 1 - 1e-13]])
    hmm = HMM(
        transition[0].log(),
        transition.log(),
        dist.Normal(torch.zeros(2), 1.0),
        torch.ones(1).long(),
    )
    assert_close(hmm.stationary(), [0.25, 0.75])


def test_a_chain_with_two_ends_has_no_stationary_distribution():
    transition = torch.block_diag(rows(3, 3).exp(), rows(2, 2).exp()).log()
    hmm = HMM(transition[0], transition, dist.Normal(torch.zeros(5), 1.0), torch.tensor([2]))
    with pytest.raises(ValueError, match="one recurrent class"):
        hmm.stationary()


# Supports that differ by state --------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_answers_need_no_gradient_of_the_caller(mode, engine):
    emissions = {"symbols": rows(2, 1, 2, 4), "vectors": torch.randn(2, 1, 2, 2)}

    def answers():
        torch.manual_seed(0)
        for name, part in emissions.items():
            emission = dist.Categorical(logits=part)
            if name == "vectors":
                emission = dist.Normal(part, 1.0).to_event(1)
            hmm = built((2, 1), emission=emission, observed=torch.rand(3, 3) < 0.7)
            values = hmm.sample()
            path = hmm.sample_states(values)
            yield from [
                hmm.log_prob(values), *hmm.posterior(values),
                hmm.expected_counts(values).state_probs,
                hmm.filtered(values), hmm.viterbi(values), path, hmm.log_joint(values, path),
                hmm.forecast(values, 2).state_probs,
            ]  # fmt: skip

    expected = list(answers())
    with mode():
        for one, other in zip(answers(), expected, strict=True):
            torch.testing.assert_close(one, other)


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [torch.nan, 0.0])
def test_a_density_that_is_not_a_number_is_reported(scale):
    emission = dist.Normal(torch.zeros(3), torch.full((3,), scale), validate_args=False)
    hmm = HMM(**arguments(emission=emission), validate_args=True)
    with pytest.raises(ValueError, match=r"log-likelihood of values .*(nan|inf)"):
        hmm.log_prob(torch.zeros(2, 4))


@pytest.mark.parametrize("symbol", [-1, 4, -4, 10**6])
@pytest.mark.parametrize("per_step", [False, True])
def test_without_validation_a_wrong_symbol_reads_no_table_but_its_own(symbol, per_step, engine):
    """Tables for each sequence and step lie behind one another in memory."""
    shape = (2, 3, 3, 4) if per_step else (2, 3, 4)
    emission = dist.Categorical(logits=torch.randn(shape), validate_args=False)
    hmm = HMM(
        even(3), even(3, 3), emission, torch.tensor([3, 3]), validate_args=False,
        emission_per_step=per_step,
    )  # fmt: skip
    values = torch.zeros(2, 3).long()
    values[0, 1] = symbol
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        hmm.log_prob(values)


def test_nothing_is_forecast_after_an_impossible_sequence():
    coins = dist.Categorical(torch.eye(2))
    for flag in (True, False):
        hmm = HMM(even(2), torch.eye(2).log(), coins, torch.tensor([2, 2]), validate_args=flag)
        values = torch.tensor([[0, 1], [0, 0]])
        if flag:
            with pytest.raises(ValueError, match="values must be possible"):
                hmm.forecast(values, 2)
        else:
            forecast = hmm.forecast(values, 2)
            assert bool((forecast.probs[0] == 0).all())
            assert bool(forecast.log_prob(values)[0].isneginf().all())
            torch.testing.assert_close(forecast.probs[1, :, 0], torch.ones(2))
    levels = dist.Uniform(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    hmm = HMM(even(2), torch.eye(2).log(), levels, torch.tensor([2]), validate_args=False)
    forecast = hmm.forecast(torch.tensor([[0.5, 2.5]]), 2)
    assert bool(forecast.mean.isnan().all())
    assert bool(forecast.variance.isnan().all())
