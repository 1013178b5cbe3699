"""``HMM``: conventions, sampling, forecasts, supports and errors; exactness is in ``test_fuzz``."""

import itertools

import numpy as np
import oracle
import pyro
import pyro.distributions as dist
import pytest
import torch
from hmm_cases import assert_close
from torch.autograd import gradcheck

from pyrohmm import HMM
from pyrohmm.distributions.observation import Streams, Tied
from pyrohmm.ops import backends


@pytest.fixture(params=["compiled", "steps"])
def engine(request):
    """Both implementations: Numba's kernels, and torch operations."""
    if request.param == "compiled" and not backends.has_numba():
        pytest.skip("Numba is not installed")
    with backends.use(backends.NUMBA if request.param == "compiled" else backends.TORCH):
        yield request.param


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


def test_float32_stays_float32():
    small = torch.full((2, 2), 0.5, dtype=torch.float32).log()
    hmm = HMM(small[0], small, dist.Categorical(logits=small), torch.tensor([3]))
    values = hmm.sample()
    answers = (hmm.log_prob(values), *hmm.posterior(values), hmm.filtered(values))
    assert {answer.dtype for answer in answers} == {torch.float32}


# Conventions --------------------------------------------------------------------------------------


def test_the_first_state_emits(engine):
    """Rabiner's convention. pyro.distributions.DiscreteHMM makes a transition before it emits."""
    start, swap = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    hmm = HMM(start.log(), swap.log(), dist.Categorical(logits=torch.eye(2).log()), torch.tensor(1))
    assert hmm.log_prob(torch.tensor([0])).exp() == pytest.approx(1.0)
    assert hmm.log_prob(torch.tensor([1])).exp() == 0.0


def test_rows_are_where_a_chain_comes_from(engine):
    """From state 0 to 1 always; back from 1 never."""
    one_way = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    start = torch.tensor([1.0, 0.0])
    hmm = HMM(
        start.log(), one_way.log(), dist.Categorical(logits=torch.eye(2).log()), torch.tensor(3)
    )
    assert hmm.log_prob(torch.tensor([0, 1, 1])).exp() == pytest.approx(1.0)
    assert hmm.posterior(torch.tensor([0, 1, 1])).transitions.tolist() == [[0, 1], [0, 1]]


def test_padding_does_not_favour_states_that_stay(engine):
    """State 0 is likelier, and state 1 would win if the padding took part in the maximum."""
    stay = torch.tensor([[0.50, 0.50], [0.01, 0.99]]).log()
    blank = dist.Categorical(probs=torch.ones(2, 1))
    hmm = HMM(torch.tensor([0.6, 0.4]).log(), stay, blank, torch.tensor([1, 3]))
    path = hmm.viterbi(torch.zeros(2, 3, dtype=torch.long))
    assert path.tolist() == [[0, 0, 0], [1, 1, 1]]


# Other people's numbers --------------------------------------------------------------------------


def test_wikipedia_forward_backward_umbrella(engine):
    """https://en.wikipedia.org/wiki/Forward-backward_algorithm; state 0 is rain.

    From an even start it is the same to make a transition before the first emission.
    """
    matrix = torch.tensor([[0.7, 0.3], [0.3, 0.7]]).log()
    emission = dist.Categorical(probs=torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    hmm, values = HMM(even(2), matrix, emission, torch.tensor(5)), torch.tensor([0, 0, 1, 0, 0])
    filtered = [0.8182, 0.8834, 0.1907, 0.7308, 0.8673]
    smoothed = [0.8673, 0.8204, 0.3075, 0.8204, 0.8673]
    assert_close(hmm.filtered(values)[:, 0], filtered, atol=5e-5)
    assert_close(hmm.posterior(values).state_probs[:, 0], smoothed, atol=5e-5)
    assert hmm.viterbi(values).tolist() == [0, 0, 1, 0, 0]


def test_wikipedia_viterbi_doctor(engine):
    """https://en.wikipedia.org/wiki/Viterbi_algorithm: healthy, healthy, fever, with 0.01512."""
    hmm = HMM(
        torch.tensor([0.6, 0.4]).log(),
        torch.tensor([[0.7, 0.3], [0.4, 0.6]]).log(),
        dist.Categorical(probs=torch.tensor([[0.5, 0.4, 0.1], [0.1, 0.3, 0.6]])),
        torch.tensor(3),
    )
    values = torch.tensor([0, 1, 2])  # normal, cold, dizzy
    path = hmm.viterbi(values)
    assert path.tolist() == [0, 0, 1]
    assert hmm.log_joint(values, path).exp().item() == pytest.approx(0.01512)


# Sampling ---------------------------------------------------------------------------------------


def test_sequences_are_sampled_as_often_as_their_probability(engine):
    hmm = built(lengths=3, emission=dist.Categorical(logits=rows(2, 3)))
    values, states = hmm.sample_with_states((5_000,))
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))
    paths = torch.tensor(list(itertools.product(range(2), repeat=3)))
    together = (values @ torch.tensor([9, 3, 1])) * 8 + states @ torch.tensor([4, 2, 1])
    joint = hmm.log_joint(every[:, None], paths).exp().numpy()
    assert oracle.looks_drawn_from(np.bincount(together, minlength=27 * 8), joint)


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


@pytest.mark.parametrize("emission_per_step", [False, True])
def test_samples_of_vectors_come_from_their_state(emission_per_step):
    """Locations a hundred standard deviations apart tell which state, step and batch emitted."""
    steps = 4 if emission_per_step else 1
    loc = 100.0 * torch.arange(2 * steps * 3 * 2).reshape(2, steps, 3, 2)
    even = torch.full((3, 3), 1 / 3).log()
    emission = dist.Normal(loc, torch.ones(())).to_event(1)
    if not emission_per_step:
        emission = dist.Normal(loc.squeeze(1)[:, None], torch.ones(())).to_event(1)
    else:
        emission = dist.Normal(loc[:, None], torch.ones(())).to_event(1)
    lengths = torch.full((5,), 4)
    hmm = HMM(even[0], even, emission, lengths, emission_per_step=emission_per_step)
    values, states = hmm.sample_with_states((50,))
    assert hmm.batch_shape == (2, 5)
    assert values.shape == (50, 2, 5, 4, 2)
    for r, t in itertools.product(range(2), range(4)):
        wanted = loc[r, t if emission_per_step else 0][states[:, r, :, t]]
        assert (values[:, r, :, t] - wanted).abs().max() < 6


@pytest.mark.parametrize("form", ["logits", "probs"])
def test_what_is_impossible_is_never_sampled(form):
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float32)
    emission = dist.Categorical(**{form: probs.log() if form == "logits" else probs})
    start, swap = probs.new_tensor([0.0, 1.0]), probs.new_tensor([[0.0, 1.0], [1.0, 0.0]])
    hmm = HMM(start.log(), swap.log(), emission, torch.tensor([4]))
    values, states = hmm.sample_with_states((2000,))
    assert torch.equal(states, torch.tensor([[1, 0, 1, 0]]).expand(2000, 1, 4))
    assert torch.equal(values, 1 + states)


def test_sample_shape_comes_first():
    hmm = built((2, 1), emission=dist.Normal(torch.randn(2, 1, 2, 2), 1.0).to_event(1))
    assert hmm.batch_shape == (2, 3)
    assert hmm.event_shape == (3, 2)
    values = hmm.sample()
    for shape in [(), (4,), (4, 5), (1,)]:
        assert hmm.sample(shape).shape == (*shape, 2, 3, 3, 2)
        assert hmm.sample_states(values, shape).shape == (*shape, 2, 3, 3)
        drawn, states = hmm.sample_with_states(torch.Size(shape))
        assert hmm.log_prob(drawn).shape == (*shape, 2, 3)
        assert hmm.log_joint(drawn, states).shape == (*shape, 2, 3)
    assert hmm.has_enumerate_support is False
    assert hmm.has_rsample is False


def test_samples_follow_the_seed():
    hmm, drawn = built(), []
    for _ in range(2):
        pyro.set_rng_seed(3)
        drawn.append((hmm.sample(), hmm.sample_states(torch.zeros(3, 3).long(), (3,))))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


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


def test_pyro_plates_take_an_hmm(engine):
    """Also a vectorized one to the left of the sequences, as particles of an ELBO make."""
    hmm, values = built(observed=torch.rand(3, 3) < 0.7), torch.randint(4, (3, 3))

    def model():
        with pyro.plate("particles", 4, dim=-2), pyro.plate("sequences", 3, dim=-1):
            pyro.sample("x", hmm, obs=values)

    trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["x"]["log_prob"], hmm.log_prob(values).expand(4, 3))


def test_forecast_equals_the_evidence_with_the_steps_appended(engine):
    hmm, values = built(), torch.randint(4, (3, 3))
    forecast = hmm.forecast(values, 2)
    for n, length in enumerate(hmm.lengths.tolist()):
        before = hmm.with_lengths(torch.tensor(length)).log_prob(values[n, :length])
        seen = torch.arange(length + 2) != length  # the step between is missing
        after = hmm.with_lengths(torch.tensor(length + 2), seen)
        for symbol in range(4):
            whole = torch.cat([values[n, :length], torch.tensor([0, symbol])])
            torch.testing.assert_close(
                forecast.probs[n, 1, symbol], (after.log_prob(whole) - before).exp()
            )
        next_one = torch.full((3, 2), 1)
        assert_close(forecast.log_prob(next_one).exp(), forecast.probs[..., 1])


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


def several_restarts():
    """For each kind, emissions of three restarts ``(3, 1, 2)``, and those of each by itself."""
    kinds = {
        "symbols": lambda x: dist.Categorical(logits=x[..., 0, :]),
        "numbers": lambda x: dist.Normal(x[..., 0, 0], 1.0),
        "vectors": lambda x: dist.Normal(x[..., 0, :], 1.0).to_event(1),
        "covariances": lambda x: dist.MultivariateNormal(x[..., 0, :], torch.eye(4)),
        "bits": lambda x: dist.Bernoulli(logits=x[..., 0, :]).to_event(1),
        "mixtures": lambda x: dist.MixtureSameFamily(
            dist.Categorical(logits=x[..., 0, :]), dist.Normal(x[..., 1, :], 1.0)
        ),
    }
    kinds["tied"] = lambda x: Tied(kinds["vectors"](x), torch.tensor([1, 0]))
    kinds["streams"] = lambda x: Streams([kinds["symbols"](x), kinds["bits"](x)])
    torch.manual_seed(0)
    scores = 3 * torch.randn(3, 1, 2, 2, 4)
    return {
        name: (build(scores), [build(scores[r, 0]) for r in range(3)])
        for name, build in kinds.items()
    }


@pytest.mark.parametrize("kind", several_restarts())
def test_values_of_a_forecast_broadcast_over_restarts(kind):
    """The numbers of restarts, sequences and steps are equal: no shape tells them apart."""
    together, apart = several_restarts()[kind]
    past = HMM(even(2), even(2, 2), apart[0], torch.tensor([3, 3, 3])).sample()
    torch.manual_seed(1)
    ahead = HMM(even(2), even(2, 2), apart[1], torch.tensor([3, 3, 3])).sample()
    forecast = HMM(even(2), even(2, 2), together, torch.tensor([3, 2, 3])).forecast(past, 3)
    expected = torch.stack(
        [
            HMM(even(2), even(2, 2), one, torch.tensor([3, 2, 3])).forecast(past, 3).log_prob(ahead)
            for one in apart
        ]
    )
    assert forecast.batch_shape == (3, 3, 3)
    torch.testing.assert_close(forecast.log_prob(ahead), expected)
    same = ahead[1]  # (H, *E): for all sequences
    torch.testing.assert_close(
        forecast.log_prob(same), forecast.log_prob(same.expand(3, 3, *same.shape))
    )
    samples = forecast.sample((2,))
    torch.testing.assert_close(
        forecast.log_prob(samples), torch.stack([forecast.log_prob(each) for each in samples])
    )


def test_values_of_a_forecast_must_broadcast():
    hmm = HMM(even(2), even(2, 2), dist.Normal(torch.zeros(2), 1.0), torch.tensor([3, 3]))
    forecast = hmm.forecast(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="values"):
        forecast.log_prob(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="values"):
        forecast.log_prob([[0.0, 1.0]])


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


def test_a_chain_with_two_ends_has_no_stationary_distribution():
    transition = torch.block_diag(rows(3, 3).exp(), rows(2, 2).exp()).log()
    hmm = HMM(transition[0], transition, dist.Normal(torch.zeros(5), 1.0), torch.tensor([2]))
    with pytest.raises(ValueError, match="one recurrent class"):
        hmm.stationary()


# Supports that differ by state --------------------------------------------------------------------


def test_emissions_whose_support_differs_by_state(engine):
    """The number of trials is a tensor over states; T is and is not the number of states."""
    trials, chance = torch.tensor([3.0, 5.0, 9.0]), torch.tensor([0.2, 0.5, 0.7])
    for values in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0, 2.0]])):
        lengths = torch.tensor([values.size(1)])
        hmm = HMM(even(3), even(3, 3), dist.Binomial(trials, chance), lengths)
        each = dist.Binomial(trials, chance, validate_args=False).log_prob(values[..., None])
        expected = each.exp().mean(-1).log().sum(-1)
        torch.testing.assert_close(hmm.log_prob(values), expected)


def test_gradients_are_finite_where_a_state_cannot_emit():
    low = torch.tensor([0.0, 4.0, 6.0]).requires_grad_()
    hmm = HMM(even(3), even(3, 3), dist.Uniform(low, low + 5.0), torch.tensor([3]))
    hmm.log_prob(torch.tensor([[4.5, 1.0, 10.5]])).backward()
    assert bool(low.grad.isfinite().all())


@pytest.mark.parametrize("missing", ["values", "steps"])
def test_supports_of_single_steps_need_not_hold_the_others(missing):
    """A filler comes from another step, in whose support it is."""
    low = torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]])
    observed = torch.tensor([[True, False, True]])
    hmm = HMM(
        even(2), even(2, 2), dist.Uniform(low, low + 2.0), torch.tensor([3]), observed,
        emission_per_step=True,
    )  # fmt: skip
    expected = torch.tensor(0.25 * 0.5).log()  # one state in the first step, two in the last
    values = torch.tensor([[0.5, np.nan if missing == "values" else 7.0, 21.5]])
    torch.testing.assert_close(hmm.log_prob(values)[0], expected)


@pytest.mark.parametrize("place", [(0, 0), (1, 0)])
def test_values_outside_of_the_support_are_counted_once(place):
    """What fills padding in is not counted."""
    emission, values = dist.Poisson(torch.ones(2)), torch.zeros(2, 2)
    hmm = HMM(even(2), even(2, 2), emission, torch.tensor([2, 1]), validate_args=True)
    values[place] = -1.0
    with pytest.raises(ValueError, match="; 1 do not"):
        hmm.log_prob(values)
    longer = hmm.replace(lengths=torch.tensor([9, 1]))
    values = torch.zeros(2, 9)
    values[place] = -1.0
    with pytest.raises(ValueError, match="; 1 do not"):
        longer.log_prob(values)


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_is_named(bad):
    """NaN, and a value so far out that a density is not a number."""
    emission = dist.Normal(torch.zeros(3), torch.ones(3), validate_args=False)
    hmm = HMM(**arguments(emission=emission), validate_args=True)
    values = torch.zeros(2, 4)
    values[0, 1] = bad
    if bad == torch.inf:  # a density of zero: such a sequence is impossible, not wrong
        assert hmm.log_prob(values)[0].isneginf()
        return
    with pytest.raises(ValueError, match=r"values .*support .* 1 do not"):
        hmm.log_prob(values)


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


def test_states_in_the_padding_may_be_anything():
    hmm = HMM(**arguments(), validate_args=True)
    values, states = torch.zeros(2, 4).long(), torch.zeros(2, 4).long()
    marked = states.clone()
    marked[1, 2:] = -1
    assert torch.equal(hmm.log_joint(values, marked), hmm.log_joint(values, states))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"log_transition": even(2, 3, 3)}, r"steps, 3 of log_transition; got .* to 4"),
        ({"emission": dist.Categorical(logits=torch.zeros(3, 3, 4))}, "steps, 3 of emission"),
        ({"emission": dist.Categorical(logits=torch.zeros(3, 4))}, r"emission .*\(\*B, T, K\)"),
        (
            {
                "log_transition": even(6, 3, 3),
                "emission": dist.Categorical(logits=torch.zeros(5, 3, 4)),
            },
            "one number of steps",
        ),
    ],
)
def test_parameters_per_step_cover_the_steps(changed, words):
    per_step = {f"{name.removeprefix('log_')}_per_step": True for name in changed}
    with pytest.raises(ValueError, match=words):
        HMM(**arguments(**changed), **per_step)


def test_a_model_that_changes_with_the_step_has_no_forecast():
    hmm = HMM(**arguments(log_transition=even(3, 3, 3)), transition_per_step=True)
    with pytest.raises(ValueError, match="does not change with the step"):
        hmm.forecast(torch.zeros(2, 4).long(), 1)


def test_checks_leave_no_trace_on_the_arguments():
    """Lengths, values and parameters are neither changed nor marked."""
    given = arguments()
    values = torch.full((2, 4), 1)
    values[1, 2:] = -7
    before = {n: p.clone() for n, p in given.items() if isinstance(p, torch.Tensor)}
    hmm = HMM(**given)
    hmm.posterior(values), hmm.viterbi(values), hmm.sample_states(values), hmm.log_prob(values)
    assert values[1, 3] == -7
    for name, tensor in before.items():
        assert torch.equal(given[name], tensor)
        assert not given[name].requires_grad


def test_reordered_states_are_the_same_distribution():
    for emission in (
        dist.Categorical(torch.rand(3, 4)),
        dist.Normal(torch.randn(3, 2), 1.0).to_event(1),
        dist.Poisson(torch.rand(3)),
    ):
        logits = torch.randn(3).log_softmax(-1), torch.randn(3, 3).log_softmax(-1)
        hmm = HMM(*logits, emission, torch.tensor([4, 2]))
        values, order = hmm.sample(), torch.tensor([2, 0, 1])
        other = hmm.permute_states(order)
        torch.testing.assert_close(other.log_prob(values), hmm.log_prob(values))
        states = hmm.posterior(values).state_probs
        torch.testing.assert_close(other.posterior(values).state_probs, states[..., order])
        path = hmm.viterbi(values)
        here = torch.arange(4) < hmm.lengths.unsqueeze(-1)
        assert torch.equal(order[other.viterbi(values)][here], path[here])
        assert other.sample().shape == values.shape
    with pytest.raises(ValueError, match=r"^order must hold each state from 0 to K - 1 = 2 once"):
        hmm.permute_states(torch.tensor([0, 0, 1]))


def test_probabilities_of_zero_are_zeros_however_they_are_given():
    """``Categorical(probs=...).logits`` would have the logarithm of a small number instead."""
    probs = torch.eye(2).requires_grad_()
    hmm = HMM(even(2), torch.eye(2).log(), dist.Categorical(probs), torch.tensor(2))
    evidence = hmm.log_prob(torch.tensor([[0, 1], [1, 1]]))
    torch.testing.assert_close(evidence.exp(), torch.tensor([0.0, 0.5]))
    evidence[1].backward()
    assert probs.grad.isfinite().all()
    assert (hmm.sample([50]).diff(dim=-1) == 0).all()
