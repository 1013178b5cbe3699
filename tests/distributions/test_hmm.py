"""``HMM``: exactness for every emission and every batch, conventions, sampling, errors.

The log-likelihoods that the oracle reads are computed here, entry by entry, from the parameters.
"""

import itertools
import re
import zlib
from typing import NamedTuple

import numpy as np
import oracle
import pyro
import pyro.distributions as dist
import pytest
import torch
from hmmlearn import hmm as hmmlearn_models
from scipy import stats
from torch.autograd import gradcheck

from pyrohmm import HMM
from pyrohmm.distributions.observation import Streams, Tied, marginal_log_prob
from pyrohmm.ops import backends

NEVER = -np.inf


@pytest.fixture(params=["compiled", "steps"])
def engine(request):
    """Both implementations: Numba's kernels, and torch operations."""
    if request.param == "compiled" and not backends.has_numba():
        pytest.skip("Numba is not installed")
    with backends.use(backends.NUMBA if request.param == "compiled" else backends.TORCH):
        yield request.param


# Emissions, each with its density in words anybody can check -------------------------------------


class Symbols:
    """Categorical over four symbols."""

    event_shape = ()

    def draw(self, rng, batch, zeros):
        probs = rng.dirichlet(np.ones(4), size=batch)
        if zeros:
            probs[..., 1] = 0.0
            probs /= probs.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            return (np.log(probs),)

    def values(self, rng, shape):
        return rng.integers(4, size=shape)

    def log_density(self, parameters, value):
        return parameters[0][value]

    def build(self, logits):
        return dist.Categorical(logits=logits)


class Numbers:
    """Normal numbers."""

    event_shape = ()

    def draw(self, rng, batch, zeros):
        return rng.normal(size=batch), rng.uniform(0.5, 2.0, size=batch)

    def values(self, rng, shape):
        return rng.normal(size=shape)

    def log_density(self, parameters, value):
        loc, scale = parameters
        each = -((value - loc) ** 2) / (2 * scale**2) - np.log(scale) - np.log(2 * np.pi) / 2
        return each.sum()

    def build(self, loc, scale):
        return dist.Normal(loc, scale)


class Vectors(Numbers):
    """Vectors of two independent normal numbers."""

    event_shape = (2,)

    def draw(self, rng, batch, zeros):
        return super().draw(rng, (*batch, 2), zeros)

    def values(self, rng, shape):
        return rng.normal(size=(*shape, 2))

    def build(self, loc, scale):
        return dist.Normal(loc, scale).to_event(1)


class Counts(Numbers):
    """Pairs of Poisson counts: zero is likely, negative and fractional ones are not legal."""

    event_shape = (2,)

    def draw(self, rng, batch, zeros):
        return (rng.uniform(0.5, 5.0, size=(*batch, 2)),)

    def values(self, rng, shape):
        return rng.integers(6, size=(*shape, 2)).astype(float)

    def log_density(self, parameters, value):
        factorial = np.array([1, 1, 2, 6, 24, 120])[value.astype(int)]
        return (value * np.log(parameters[0]) - parameters[0] - np.log(factorial)).sum()

    def build(self, rate):
        return dist.Poisson(rate).to_event(1)


class Shares(Numbers):
    """Beta: a value of zero has no density."""

    event_shape = ()

    def draw(self, rng, batch, zeros):
        return (rng.uniform(1.5, 5.0, size=batch),)

    def values(self, rng, shape):
        return rng.uniform(0.1, 0.9, size=shape)

    def log_density(self, parameters, value):
        (a,) = parameters
        return np.log(a) + (a - 1) * np.log(value)  # Beta(a, 1)

    def build(self, concentration):
        return dist.Beta(concentration, torch.ones(()))


EMISSIONS = {
    "symbols": Symbols(),
    "numbers": Numbers(),
    "vectors": Vectors(),
    "counts": Counts(),
    "shares": Shares(),
}

LAYOUTS = {  # batch shapes of parameters, lengths, values
    "one sequence": ((), (), ()),
    "one chain for all": ((), (3,), (3,)),
    "restarts": ((2, 1), (3,), (3,)),
    "restarts with values each": ((2, 1), (3,), (2, 3)),
    "restarts with lengths each": ((2, 1), (2, 3), (3,)),
    "parameters for each": ((3,), (3,), (3,)),
    "values many times": ((), (3,), (2, 3)),
}


class Case(NamedTuple):
    emission: str
    layout: str
    num_states: int = 2
    num_steps: int = 3
    transition_per_step: bool = False
    emission_per_step: bool = False
    ragged: bool = False
    missing: bool = False
    zeros: bool = False


class Built(NamedTuple):
    """An HMM, its values with junk where nothing is observed, and what the oracle reads."""

    hmm: HMM
    values: torch.Tensor
    arrays: tuple
    batch: tuple

    @property
    def answer(self):
        return oracle.for_each(oracle.by_paths, *self.arrays)


def log_probs(rng, shape, zeros=False):
    probs = rng.dirichlet(np.ones(shape[-1]), size=shape[:-1])
    if zeros and shape[-1] > 1:
        probs[..., 0] = 0.0
        probs /= probs.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log(probs)


def build(case, junk=None):
    rng = np.random.default_rng(zlib.crc32(repr(case).encode()))
    family = EMISSIONS[case.emission]
    outer, counted, given = LAYOUTS[case.layout]
    size, steps = case.num_states, case.num_steps
    lengths = np.full(counted, steps)
    if case.ragged:
        lengths = rng.integers(1, steps + 1, size=counted)
        lengths.flat[0] = steps  # T is the longest
    observed = rng.random((*counted, steps)) < (0.6 if case.missing else 2.0)
    if case.missing and steps > 1:
        observed.flat[1] = False  # at least this one
    initial = log_probs(rng, (*outer, size), case.zeros)
    transitions = (
        (*outer, steps - 1, size, size) if case.transition_per_step else (*outer, size, size)
    )
    transition = log_probs(rng, transitions, case.zeros)
    batch = (*outer, steps, size) if case.emission_per_step else (*outer, size)
    parameters = family.draw(rng, batch, case.zeros)
    values = family.values(rng, (*given, steps))

    whole = np.broadcast_shapes(outer, counted, given)
    likelihood = np.zeros((*whole, steps, size))
    full = []
    for parameter in parameters:
        if not case.emission_per_step:
            parameter = np.expand_dims(parameter, len(outer))
        full.append(np.broadcast_to(parameter, (*whole, steps, *parameter.shape[len(outer) + 1 :])))
    seen = np.broadcast_to(observed, (*whole, steps))
    every = np.broadcast_to(values, (*whole, steps, *family.event_shape))
    for index in np.ndindex(*whole, steps):
        if seen[index]:
            for k in range(size):
                own = [p[(*index, k)] for p in full]
                likelihood[(*index, k)] = family.log_density(own, every[index])
    matrices = transition if case.transition_per_step else transition[..., None, :, :]

    if junk is not None:
        known = observed & (np.arange(steps) < lengths[..., None])
        values[~np.broadcast_to(known, (*whole, steps))] = junk
    values = torch.as_tensor(values)
    hmm = HMM(
        torch.as_tensor(initial),
        torch.as_tensor(transition),
        family.build(*map(torch.as_tensor, parameters)),
        torch.as_tensor(lengths),
        torch.as_tensor(observed) if case.missing else None,
        transition_per_step=case.transition_per_step,
        emission_per_step=case.emission_per_step,
    )
    return Built(hmm, values, (initial, matrices, likelihood, lengths), whole)


# per step transition, per step emission, ragged, missing, zeros: any two in all four combinations
SWITCHES = [
    (False, False, False, False, False),
    (False, False, True, True, True),
    (True, True, False, False, True),
    (True, True, True, True, False),
    (True, False, False, True, False),
    (False, True, True, False, False),
    (True, False, True, False, True),
    (False, True, False, True, True),
]
SIZES = [(1, 1), (2, 1), (2, 2), (3, 3)]


def cases(emission, layout):
    """T = 2 is also the number of restarts, T = 3 that of sequences: no size tells them apart."""
    for size, switches in itertools.product(SIZES, SWITCHES):
        yield Case(emission, layout, *size, *switches)


def assert_close(actual, expected, case=None, rtol=1e-9, atol=1e-9):
    torch.testing.assert_close(
        actual.detach(), torch.as_tensor(np.asarray(expected)).to(actual.dtype),
        rtol=rtol, atol=atol, msg=lambda text: f"{case}\n{text}",
    )  # fmt: skip


every_kind = pytest.mark.parametrize(
    ("emission", "layout"),
    [("symbols", layout) for layout in LAYOUTS]
    + [("vectors", layout) for layout in LAYOUTS]
    + [(name, "restarts") for name in ("numbers", "counts", "shares")],
)


@every_kind
def test_every_answer_is_that_of_the_table_of_paths(emission, layout, engine):
    for case in cases(emission, layout):
        hmm, values, _, _ = built = build(case)
        answer = built.answer
        evidence, states, transitions = hmm.posterior(values)
        assert_close(hmm.log_prob(values), answer.evidence, case)
        assert_close(evidence, answer.evidence, case)
        assert_close(states, answer.states, case)
        assert_close(transitions, answer.transitions.sum(-3), case)
        assert_close(hmm.filtered(values), answer.filtered, case)
        path = hmm.viterbi(values)
        assert_close(hmm.log_joint(values, path), answer.best, case)


@every_kind
def test_log_joint_adds_the_terms_of_one_path(emission, layout):
    for case in cases(emission, layout):
        hmm, values, arrays, batch = build(case)
        states = torch.randint(case.num_states, (4, *batch, case.num_steps))
        joint = hmm.log_joint(values, states)
        full = [
            np.broadcast_to(a, batch + a.shape[a.ndim - dims :])
            for a, dims in zip(arrays, (1, 3, 2, 0))
        ]
        for index in np.ndindex(batch):
            *logs, length = (a[index] for a in full)
            paths = states[(slice(None), *index, slice(0, int(length)))].numpy()
            assert_close(joint[(slice(None), *index)], oracle.joint(*logs, paths), case)


@pytest.mark.parametrize("emission", EMISSIONS)
@pytest.mark.parametrize(
    "layout", ["one sequence", "one chain for all", "restarts with values each"]
)
def test_what_is_not_observed_may_be_anything(emission, layout, engine):
    """In the padding and at missing steps, for values and for gradients."""
    junks = [97, -5] if emission == "symbols" else [np.nan, np.inf, -1e30]
    for junk, *switches in itertools.product(junks, [False, True], [False, True]):
        case = Case(emission, layout, 2, 4, *switches, ragged=True, missing=True)
        clean, spoilt = build(case), build(case, junk)
        assert not torch.equal(clean.values, spoilt.values)
        answers = []
        for hmm, values, _, _ in (clean, spoilt):
            rate = torch.ones(()).requires_grad_()
            if emission == "symbols":
                emitted = dist.Categorical(logits=(hmm.emission.logits * rate).log_softmax(-1))
            elif emission == "shares":
                emitted = dist.Beta(hmm.emission.concentration1 * rate, torch.ones(()))
            else:
                base = getattr(hmm.emission, "base_dist", hmm.emission)
                name = "rate" if emission == "counts" else "loc"
                arguments = {n: getattr(base, n) for n in base.arg_constraints}
                arguments[name] = arguments[name] * rate
                emitted = type(base)(**arguments).to_event(len(hmm.emission.event_shape))
            twin = HMM(
                hmm.log_initial, hmm.log_transition, emitted, hmm.lengths, hmm.observed,
                transition_per_step=hmm.transition_per_step,
                emission_per_step=hmm.emission_per_step,
            )  # fmt: skip
            evidence = twin.log_prob(values)
            (gradient,) = torch.autograd.grad(evidence.sum(), rate)
            answers.append(
                (evidence, gradient, twin.posterior(values).states, twin.viterbi(values))
            )
        for one, other in zip(*answers):
            assert torch.equal(one, other), (case, junk)
            assert one.isfinite().all()


@pytest.mark.parametrize("emission", EMISSIONS)
def test_if_no_step_is_observed_the_evidence_is_one(emission, engine):
    family = EMISSIONS[emission]
    parameters = map(torch.as_tensor, family.draw(np.random.default_rng(0), (3,), False))
    rng = np.random.default_rng(1)
    initial, transition = (torch.as_tensor(log_probs(rng, s)) for s in ((3,), (3, 3)))
    junk = torch.zeros(2, 4, *family.event_shape) + (7 if emission == "symbols" else torch.nan)
    hmm = HMM(
        initial.requires_grad_(), transition, family.build(*parameters), torch.tensor([4, 2]),
        torch.zeros(2, 4, dtype=torch.bool),
    )  # fmt: skip
    junk = junk.long() if emission == "symbols" else junk
    evidence = hmm.log_prob(junk)
    assert_close(evidence, np.zeros(2))
    evidence.sum().backward()
    assert hmm.log_initial.grad.isfinite().all()
    assert_close(
        hmm.posterior(junk).states[:, 0], np.exp(initial.detach().numpy())[None].repeat(2, 0)
    )


def test_missing_steps_may_hold_what_no_default_could_replace():
    """Zero is not in the support of a Dirichlet, whichever distribution the filler is made for."""
    emission = dist.Dirichlet(torch.tensor([[1.0, 2.0], [3.0, 1.0]]))
    even = torch.full((2, 2), 0.5).log()
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    hmm = HMM(even[0], even, emission, torch.tensor([2]), nothing)
    assert hmm.log_prob(torch.full((1, 2, 2), torch.nan)).item() == pytest.approx(0.0)


@pytest.mark.parametrize("emission", EMISSIONS)
@pytest.mark.parametrize("per_step", [False, True])
def test_gradients_by_every_parameter_are_those_of_small_differences(emission, per_step, engine):
    case = Case(emission, "one chain for all", 2, 3, per_step, per_step, True, True)
    hmm, values, _, _ = build(case)
    family = EMISSIONS[emission]
    rng = np.random.default_rng(0)
    batch = (3, 2) if per_step else (2,)
    parameters = [torch.tensor(p).requires_grad_() for p in family.draw(rng, batch, False)]
    logits = [torch.randn_like(p).requires_grad_() for p in (hmm.log_initial, hmm.log_transition)]

    def evidence(initial, transition, *parameters):
        if emission == "symbols":
            parameters = [parameters[0].log_softmax(-1)]
        return HMM(
            initial.log_softmax(-1), transition.log_softmax(-1), family.build(*parameters),
            hmm.lengths, hmm.observed,
            transition_per_step=per_step, emission_per_step=per_step,
        ).log_prob(values)  # fmt: skip

    assert gradcheck(evidence, (*logits, *parameters))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_integers_of_every_size_will_do(dtype):
    hmm, values, _, _ = build(Case("symbols", "one chain for all", ragged=True))
    states = torch.zeros_like(values)
    twin = HMM(hmm.log_initial, hmm.log_transition, hmm.emission, hmm.lengths.to(dtype))
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


@pytest.mark.parametrize("length", [1, 2, 5])
def test_probabilities_of_all_sequences_sum_to_one(length, engine):
    rng = np.random.default_rng(0)
    initial, transition, logits = (
        torch.as_tensor(log_probs(rng, shape)) for shape in ((3,), (3, 3), (3, 4))
    )
    hmm = HMM(initial, transition, dist.Categorical(logits=logits), torch.tensor(length))
    every = torch.tensor(list(itertools.product(range(4), repeat=length)))
    total = hmm.expand([len(every)]).log_prob(every).exp().sum()
    torch.testing.assert_close(total, torch.tensor(1.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_marginals_are_consistent(layout, engine):
    for case in cases("symbols", layout):
        hmm, values, (_, _, _, lengths), batch = build(case._replace(zeros=False))
        posterior, filtered = hmm.posterior(values), hmm.filtered(values)
        lengths = torch.as_tensor(np.broadcast_to(lengths, batch).copy())
        exists = (torch.arange(case.num_steps) < lengths[..., None]).double()
        transitions, states = posterior.transitions, posterior.states
        assert_close(states.sum(-1), exists, case)
        assert_close(filtered.sum(-1), exists, case)
        assert_close(transitions.sum((-1, -2)), lengths - 1.0, case)
        last = (lengths - 1)[..., None, None].expand(*batch, 1, case.num_states)
        ending, starting = states.gather(-2, last).squeeze(-2), states[..., 0, :]
        assert_close(transitions.sum(-1), states.sum(-2) - ending, case)  # left
        assert_close(transitions.sum(-2), states.sum(-2) - starting, case)  # entered
        assert_close(filtered.gather(-2, last).squeeze(-2), ending, case)


def test_renaming_states_changes_nothing(engine):
    case = Case("vectors", "restarts", 3, 4, True, True, True, True)
    hmm, values, _, _ = build(case)
    renaming = torch.tensor([2, 0, 1])
    base = hmm.emission.base_dist
    renamed = HMM(
        hmm.log_initial[..., renaming],
        hmm.log_transition[..., renaming, :][..., renaming],
        dist.Normal(base.loc[..., renaming, :], base.scale[..., renaming, :]).to_event(1),
        hmm.lengths,
        hmm.observed,
        transition_per_step=True,
        emission_per_step=True,
    )
    torch.testing.assert_close(renamed.log_prob(values), hmm.log_prob(values))
    states = hmm.posterior(values).states
    torch.testing.assert_close(renamed.posterior(values).states, states[..., renaming])
    assert_close(hmm.log_joint(values, renaming[renamed.viterbi(values)]),
                 hmm.log_joint(values, hmm.viterbi(values)))  # fmt: skip


def test_a_missing_step_sums_over_what_it_could_have_been(engine):
    hmm, values, _, _ = build(Case("symbols", "one chain for all", 3, 4))
    observed = torch.ones(3, 4, dtype=torch.bool)
    observed[:, 1] = False
    blind = HMM(hmm.log_initial, hmm.log_transition, hmm.emission, hmm.lengths, observed)
    filled = values.repeat(4, 1, 1)
    filled[..., 1] = torch.arange(4)[:, None]
    torch.testing.assert_close(blind.log_prob(values), hmm.log_prob(filled).logsumexp(0))


def test_mean_of_the_gradient_is_zero(engine):
    """The score's expectation, summed over all sequences: a property of any normalised density."""
    rng = np.random.default_rng(0)
    logits = torch.as_tensor(log_probs(rng, (2, 3))).requires_grad_()
    initial, transition = (torch.as_tensor(log_probs(rng, s)) for s in ((2,), (2, 2)))
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))
    emission = dist.Categorical(logits=logits.log_softmax(-1))
    log_prob = HMM(initial, transition, emission, torch.full((len(every),), 3)).log_prob(every)
    log_prob.backward(log_prob.exp().detach())
    assert_close(logits.grad, np.zeros((2, 3)))


# Other people's numbers --------------------------------------------------------------------------


def umbrella(length):
    """Russell and Norvig, Artificial Intelligence: A Modern Approach, section 15.2.

    State 0 is rain; symbol 0 is an umbrella. The book makes a transition before it emits;
    from an even start that is the same.
    """
    return HMM(
        torch.tensor([0.5, 0.5]).log(),
        torch.tensor([[0.7, 0.3], [0.3, 0.7]]).log(),
        dist.Categorical(probs=torch.tensor([[0.9, 0.1], [0.2, 0.8]])),
        torch.tensor(length),
    )


def test_russell_and_norvig_umbrella(engine):
    """The book's figures: 0.818, then 0.883 filtered; 0.883 for the first day in hindsight."""
    hmm, values = umbrella(2), torch.tensor([0, 0])
    assert_close(hmm.filtered(values)[:, 0], [0.818, 0.883], atol=5e-4)
    assert_close(hmm.posterior(values).states[0, 0], 0.883, atol=5e-4)


def test_wikipedia_forward_backward_umbrella(engine):
    """https://en.wikipedia.org/wiki/Forward-backward_algorithm; hmmlearn tests the same numbers."""
    hmm, values = umbrella(5), torch.tensor([0, 0, 1, 0, 0])
    filtered = [0.8182, 0.8834, 0.1907, 0.7308, 0.8673]
    smoothed = [0.8673, 0.8204, 0.3075, 0.8204, 0.8673]
    assert_close(hmm.filtered(values)[:, 0], filtered, atol=5e-5)
    assert_close(hmm.posterior(values).states[:, 0], smoothed, atol=5e-5)
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


@pytest.mark.parametrize("kind", ["CategoricalHMM", "GaussianHMM"])
def test_hmmlearn_agrees(kind, engine):
    rng = np.random.default_rng(0)
    initial, transition = np.exp(log_probs(rng, (4,))), np.exp(log_probs(rng, (4, 4)))
    lengths = torch.tensor([7, 1, 12, 3])
    theirs = getattr(hmmlearn_models, kind)(n_components=4)
    theirs.startprob_, theirs.transmat_ = initial, transition
    if kind == "CategoricalHMM":
        theirs.emissionprob_ = np.exp(log_probs(rng, (4, 6)))
        theirs.n_features = 6
        emission = dist.Categorical(probs=torch.as_tensor(theirs.emissionprob_))
        values = torch.as_tensor(rng.integers(6, size=(4, 12)))
        flat = values[..., None].numpy()
    else:
        theirs.means_, theirs.covars_ = 3 * rng.normal(size=(4, 2)), rng.uniform(0.5, 2, (4, 2))
        theirs.n_features = 2
        scale = torch.tensor(np.sqrt(theirs._covars_))
        emission = dist.Normal(torch.as_tensor(theirs.means_), scale).to_event(1)
        values = torch.as_tensor(3 * rng.normal(size=(4, 12, 2)))
        flat = values.numpy()
    hmm = HMM(torch.tensor(initial).log(), torch.tensor(transition).log(), emission, lengths)
    joined = np.concatenate([flat[n, :length] for n, length in enumerate(lengths)])
    exists = torch.arange(12) < lengths[:, None]
    score, states = theirs.score_samples(joined, lengths.tolist())
    assert hmm.log_prob(values).sum().item() == pytest.approx(score, rel=1e-9)
    assert_close(hmm.posterior(values).states[exists], states)
    best, path = theirs.decode(joined, lengths.tolist())
    assert hmm.log_joint(values, hmm.viterbi(values)).sum().item() == pytest.approx(best)
    assert hmm.viterbi(values)[exists].tolist() == path.tolist()


# Sampling ---------------------------------------------------------------------------------------


def test_sequences_are_sampled_as_often_as_their_probability(engine):
    rng = np.random.default_rng(0)
    hmm = HMM(
        torch.as_tensor(log_probs(rng, (2,))),
        torch.as_tensor(log_probs(rng, (2, 2))),
        dist.Categorical(logits=torch.as_tensor(log_probs(rng, (2, 3)))),
        torch.tensor(3),
    )
    values, states = hmm.sample_with_states((20_000,))
    every = torch.tensor(list(itertools.product(range(3), repeat=3)))
    codes = values @ torch.tensor([9, 3, 1])
    probs = hmm.log_prob(every).exp().numpy()
    assert oracle.looks_drawn_from(np.bincount(codes, minlength=27), probs)
    paths = torch.tensor(list(itertools.product(range(2), repeat=3)))
    together = (codes * 8 + states @ torch.tensor([4, 2, 1])).numpy()
    joint = hmm.log_joint(every[:, None], paths).exp().numpy()
    assert oracle.looks_drawn_from(np.bincount(together, minlength=27 * 8), joint)


@pytest.mark.parametrize(
    "layout", ["restarts", "parameters for each", "restarts with lengths each"]
)
@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_samples_of_a_batch_follow_their_own_parameters(layout, per_step, zeros):
    case = Case("symbols", layout, 3, 3, per_step, per_step, zeros=zeros)
    hmm, _, (initial, transition, _, _), batch = build(case)
    batch = tuple(hmm.batch_shape)
    values, states = hmm.sample_with_states((3000,))
    assert values.shape == states.shape == (3000, *batch, 3)
    logits = hmm.emission.logits if per_step else hmm.emission.logits[..., None, :, :]
    table = np.broadcast_to(np.exp(logits.numpy()), (*batch, 3, 3, 4))
    starts = np.broadcast_to(np.exp(initial), (*batch, 3))
    transitions = np.broadcast_to(np.exp(transition), (*batch, 2, 3, 3))
    for index in np.ndindex(batch):
        probs = starts[index]
        for t in range(3):
            path, seen = states[(slice(None), *index, t)], values[(slice(None), *index, t)]
            counts = np.bincount(path * 4 + seen, minlength=12)
            assert oracle.looks_drawn_from(counts, probs[:, None] * table[index][t]), (
                case,
                index,
                t,
            )
            if t < 2:
                after = states[(slice(None), *index, t + 1)]
                pairs = probs[:, None] * transitions[index][t]
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["logits", "probs"])
def test_what_is_impossible_is_never_sampled(form, dtype):
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=dtype)
    emission = dist.Categorical(**{form: probs.log() if form == "logits" else probs})
    start, swap = (
        torch.tensor([0.0, 1.0], dtype=dtype),
        torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=dtype),
    )
    hmm = HMM(start.log(), swap.log(), emission, torch.tensor([4]))
    values, states = hmm.sample_with_states((2000,))
    assert torch.equal(states, torch.tensor([[1, 0, 1, 0]]).expand(2000, 1, 4))
    assert torch.equal(values, 1 + states)
    if form == "logits":
        assert (hmm.log_prob(values) == 0).all()


def test_states_resampled_given_the_values_have_the_prior_of_the_states(engine):
    """By Bayes: the posterior, averaged over the evidence, is the prior."""
    hmm, _, _, _ = build(Case("symbols", "one sequence", 2, 3))
    values, states = hmm.sample_with_states((20_000,))
    redrawn = hmm.expand([20_000]).sample_states(values)
    code = torch.tensor([4, 2, 1])
    before = np.bincount(states @ code, minlength=8)
    paths = torch.tensor(list(itertools.product(range(2), repeat=3)))
    transitions = hmm.log_transition[paths[:, :-1], paths[:, 1:]].sum(-1)
    prior = (hmm.log_initial[paths[:, 0]] + transitions).exp().numpy()
    assert oracle.looks_drawn_from(before, prior)
    assert oracle.looks_drawn_from(np.bincount(redrawn @ code, minlength=8), prior)


def test_sample_shape_comes_first():
    hmm, values, _, _ = build(Case("vectors", "restarts", 2, 3))
    assert hmm.batch_shape == (2, 3)
    assert hmm.event_shape == (3, 2)
    for shape in [(), (4,), (4, 5), (1,)]:
        assert hmm.sample(shape).shape == (*shape, 2, 3, 3, 2)
        assert hmm.sample_states(values, shape).shape == (*shape, 2, 3, 3)
        drawn, states = hmm.sample_with_states(torch.Size(shape))
        assert hmm.log_prob(drawn).shape == (*shape, 2, 3)
        assert hmm.log_joint(drawn, states).shape == (*shape, 2, 3)
    assert hmm.has_enumerate_support is False
    assert hmm.has_rsample is False


def test_samples_follow_the_seed():
    hmm, values, _, _ = build(Case("numbers", "one chain for all", ragged=True))
    draws = []
    for _ in range(2):
        pyro.set_rng_seed(3)
        draws.append((hmm.sample(), hmm.sample_states(values, (3,))))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


# Expanding, forecasting, the long run -----------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expanding_changes_shapes_and_no_answer(layout, engine):
    for switches in SWITCHES:
        hmm, values, _, batch = build(Case("symbols", layout, 2, 3, *switches))
        wide = hmm.expand((4, *hmm.batch_shape))
        assert wide.batch_shape == (4, *hmm.batch_shape)
        assert wide.event_shape == hmm.event_shape
        if batch != tuple(hmm.batch_shape):
            continue
        evidence = hmm.log_prob(values)
        torch.testing.assert_close(wide.log_prob(values), evidence.expand(4, *batch))
        many = values.expand(4, *hmm.batch_shape, *hmm.event_shape)
        torch.testing.assert_close(wide.log_prob(many), evidence.expand(4, *batch))
        assert wide.sample((2,)).shape == (2, 4, *hmm.sample().shape)
        states = hmm.viterbi(values)
        torch.testing.assert_close(
            wide.log_joint(values, states), hmm.log_joint(values, states).expand(4, *batch)
        )


def test_an_expanded_hmm_still_checks_its_values():
    hmm = build(Case("symbols", "one chain for all")).hmm
    checked = HMM(
        hmm.log_initial, hmm.log_transition, hmm.emission, hmm.lengths, validate_args=True
    )
    with pytest.raises(ValueError, match="values must lie between 0 and V - 1"):
        checked.expand([2, 3]).log_prob(torch.full((2, 3, 3), 9))


def test_pyro_plates_take_an_hmm(engine):
    """Also a vectorized one to the left of the sequences, as particles of an ELBO make."""
    hmm, values, _, _ = build(Case("symbols", "one chain for all", ragged=True, missing=True))

    def model():
        with pyro.plate("particles", 4, dim=-2), pyro.plate("sequences", 3, dim=-1):
            pyro.sample("x", hmm, obs=values)

    trace = pyro.poutine.trace(model).get_trace()
    trace.compute_log_prob()
    torch.testing.assert_close(trace.nodes["x"]["log_prob"], hmm.log_prob(values).expand(4, 3))


@pytest.mark.parametrize("emission", ["symbols", "numbers", "vectors"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forecast_is_the_predictive_distribution(emission, layout, engine):
    """By definition: steps to come are appended, all missing but the one asked for."""
    horizon = 3
    for ragged, num_steps in itertools.product([False, True], [1, 2, 3]):
        case = Case(emission, layout, 2, num_steps, ragged=ragged, missing=ragged)
        hmm, values, (initial, transition, likelihood, lengths), batch = build(case)
        forecast = hmm.forecast(values, horizon)
        assert forecast.batch_shape == (*batch, horizon)
        answer = oracle.for_each(oracle.by_paths, initial, transition, likelihood, lengths)
        filtered = answer.filtered.reshape(-1, num_steps, 2)
        ends = np.broadcast_to(lengths, batch).reshape(-1)
        matrix = np.broadcast_to(np.exp(transition), (*batch, 1, 2, 2)).reshape(-1, 2, 2)
        predicted = []
        for row, end, step in zip(filtered, ends, matrix):
            steps = [row[end - 1]]
            for _ in range(horizon):
                steps.append(steps[-1] @ step)
            predicted.append(steps[1:])
        probs = np.reshape(predicted, (*batch, horizon, 2))
        assert_close(forecast.states, probs, case)
        if emission == "symbols":
            table = np.broadcast_to(np.exp(hmm.emission.logits.numpy()), (*batch, 2, 4))
            assert_close(forecast.probs, probs @ table, case)
            for symbol in range(4):
                next_one = torch.full((*batch, horizon), symbol)
                assert_close(forecast.log_prob(next_one).exp(), forecast.probs[..., symbol], case)
            continue
        event = EMISSIONS[emission].event_shape
        mean, variance = (
            np.broadcast_to(m.numpy(), (*batch, 2, *event)).reshape(*batch, 1, 2, -1)
            for m in (hmm.emission.mean, hmm.emission.variance)
        )
        weight = probs[..., None]
        average = (weight * mean).sum(-2)
        within = (weight * (variance + (mean - average[..., None, :]) ** 2)).sum(-2)
        assert_close(forecast.mean, average.reshape(*batch, horizon, *event), case)
        assert_close(forecast.variance, within.reshape(*batch, horizon, *event), case)


def test_forecast_equals_the_evidence_with_the_steps_appended(engine):
    hmm, values, _, _ = build(Case("symbols", "one chain for all", 3, 3, ragged=True))
    forecast = hmm.forecast(values, 2)
    for n, length in enumerate(hmm.lengths.tolist()):
        seen = values[n, :length]
        before = HMM(hmm.log_initial, hmm.log_transition, hmm.emission, torch.tensor(length))
        longer = torch.arange(length + 2) != length  # the step between is missing
        after = HMM(
            hmm.log_initial, hmm.log_transition, hmm.emission, torch.tensor(length + 2), longer
        )
        for symbol in range(4):
            whole = torch.cat([seen, torch.tensor([0, symbol])])
            ratio = (after.log_prob(whole) - before.log_prob(seen)).exp()
            torch.testing.assert_close(forecast.probs[n, 1, symbol], ratio)


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
    even = torch.full((2, 2), 0.5).log()
    past = HMM(even[0], even, apart[0], torch.tensor([3, 3, 3])).sample()
    torch.manual_seed(1)
    ahead = HMM(even[0], even, apart[1], torch.tensor([3, 3, 3])).sample()
    forecast = HMM(even[0], even, together, torch.tensor([3, 2, 3])).forecast(past, 3)
    expected = torch.stack(
        [
            HMM(even[0], even, one, torch.tensor([3, 2, 3])).forecast(past, 3).log_prob(ahead)
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
    even = torch.full((2, 2), 0.5).log()
    hmm = HMM(even[0], even, dist.Normal(torch.zeros(2), 1.0), torch.tensor([3, 3]))
    forecast = hmm.forecast(torch.zeros(2, 3), 2)
    with pytest.raises(ValueError, match="values"):
        forecast.log_prob(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="values"):
        forecast.log_prob([[0.0, 1.0]])


def test_forecast_samples_from_its_distribution():
    hmm, values, _, _ = build(Case("symbols", "restarts with values each", 3, 3, ragged=True))
    forecast = hmm.forecast(values, 2)
    drawn = forecast.sample((4000,))
    assert drawn.shape == (4000, 2, 3, 2)
    for index in np.ndindex(2, 3, 2):
        counts = np.bincount(drawn[(slice(None), *index)], minlength=4)
        assert oracle.looks_drawn_from(counts, forecast.probs[index].numpy())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_forecast_variance_does_not_cancel(dtype):
    """A spread of a tenth around a mean of ten thousand."""
    even = torch.full((2, 2), 0.5, dtype=dtype).log()
    loc = torch.tensor([10_000.0, 10_000.5], dtype=dtype)
    emission = dist.Normal(loc, torch.full((2,), 0.1, dtype=dtype))
    hmm = HMM(even[0], even, emission, torch.tensor([1]))
    variance = hmm.forecast(loc[:1, None], 1).variance
    assert variance.item() == pytest.approx(0.01 + 0.0625, rel=1e-4)


def test_stationary_distribution_is_kept_by_the_chain():
    rng = np.random.default_rng(0)
    for shape in [(1, 1), (2, 2), (5, 5), (3, 1, 4, 4)]:
        transition = torch.as_tensor(log_probs(rng, shape))
        hmm = HMM(
            transition[..., 0, :], transition, dist.Normal(torch.zeros(shape[-1]), 1.0),
            torch.tensor([2]),
        )  # fmt: skip
        probs = hmm.stationary()
        assert probs.shape == shape[:-1]
        assert_close(probs.sum(-1), np.ones(shape[:-2]))
        assert_close((probs[..., None, :] @ transition.exp()).squeeze(-2), probs)


def test_stationary_distribution_of_a_chain_with_a_transient_state():
    transition = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8], [0.0, 0.6, 0.4]])
    hmm = HMM(
        transition[0].log(), transition.log(), dist.Normal(torch.zeros(3), 1.0), torch.tensor([2])
    )
    assert_close(hmm.stationary(), [0.0, 3 / 7, 4 / 7])


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_with_two_ends_has_no_stationary_distribution(seed):
    rng = np.random.default_rng(seed)
    blocks = np.zeros((5, 5))
    blocks[:3, :3], blocks[3:, 3:] = np.exp(log_probs(rng, (3, 3))), np.exp(log_probs(rng, (2, 2)))
    transition = torch.as_tensor(blocks).log()
    hmm = HMM(transition[0], transition, dist.Normal(torch.zeros(5), 1.0), torch.tensor([2]))
    with pytest.raises(ValueError, match="one recurrent class"):
        hmm.stationary()


def test_stationary_distribution_is_differentiable():
    logits = torch.randn(3, 3).requires_grad_()

    def probs(logits):
        transition = logits.log_softmax(-1)
        emission = dist.Normal(torch.zeros(3), 1.0)
        return HMM(transition[0], transition, emission, torch.tensor([2])).stationary()

    assert gradcheck(probs, (logits,))


def test_emissions_whose_support_differs_by_state(engine):
    """The number of trials is a tensor over states; T is and is not the number of states."""
    trials, chance = torch.tensor([3.0, 5.0, 9.0]), torch.tensor([0.2, 0.5, 0.7])
    even = torch.full((3, 3), 1 / 3).log()
    for values in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0, 2.0]])):
        lengths = torch.tensor([values.size(1)])
        hmm = HMM(even[0], even, dist.Binomial(trials, chance), lengths)
        each = dist.Binomial(trials, chance, validate_args=False).log_prob(values[..., None])
        expected = each.exp().mean(-1).log().sum(-1)
        torch.testing.assert_close(hmm.log_prob(values), expected)


def uniform(low, high):
    return dist.Uniform(torch.as_tensor(low), torch.as_tensor(high))


def supports_of_states():
    """Emissions of three states, values that some states cannot emit, and their densities."""
    low, high = torch.tensor([0.0, 4.0, 6.0]), torch.tensor([5.0, 7.0, 9.0])
    x = torch.tensor([4.5, 1.0, 6.5, 8.0])[:, None]
    within = ((x >= low) & (x <= high)) / (high - low)
    trials, counts = torch.tensor([3.0, 5.0, 9.0]), torch.tensor([4.0, 2.0, 9.0, 5.0])[:, None]
    binomial = torch.as_tensor(stats.binom(trials.numpy(), 0.3).pmf(counts.numpy()))
    pareto = torch.as_tensor(stats.pareto(2.0, scale=(low + 1).numpy()).pdf(x.numpy()))
    swapped = [1, 0, 3, 2]
    pairs = torch.cat([x, x[swapped]], -1)  # (4, 2)
    product = (within * within[swapped]).double()
    wide = (low[:, None].expand(3, 2), high[:, None].expand(3, 2))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(3, 2)), uniform(torch.stack([low, low + 10], -1),
                                                    torch.stack([high, high + 10], -1))
    )  # fmt: skip
    index = torch.tensor([2, 0, 2])
    zero = dist.Normal(torch.zeros(3), 1.0)
    both = torch.cat([x, torch.zeros(4, 1)], -1)
    return {
        "uniform": (uniform(low, high), x[:, 0], within),
        "binomial": (dist.Binomial(trials, torch.tensor(0.3)), counts[:, 0], binomial),
        "pareto": (dist.Pareto(low + 1, torch.tensor(2.0).expand(3)), x[:, 0], pareto),
        "vectors": (uniform(*wide).to_event(1), pairs, product),
        "mixture": (mixture, x[:, 0], within / 2),
        "tied": (Tied(uniform(low, high), index), x[2:3, 0].expand(4), None),
        "streams": (Streams([uniform(low, high), zero]), both, within / (2 * np.pi) ** 0.5),
        "streams of tied": (
            Streams([Tied(uniform(low[1:], high[1:]), torch.tensor([1, 0, 1])), zero]), both[2:],
            None,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("validate_args", [True, False])
@pytest.mark.parametrize("kind", supports_of_states())
def test_a_value_outside_the_support_of_a_state_is_impossible_there(kind, validate_args, engine):
    emission, values, density = supports_of_states()[kind]
    if density is None:  # that of each state by itself
        density = torch.stack(
            [emission.log_prob(value.unsqueeze(-1 - len(emission.event_shape))).exp()
             for value in values]
        ).reshape(len(values), 3)  # fmt: skip
        assert bool((density == 0).any())
        assert bool((density > 0).any())
    probs = torch.tensor([0.5, 0.2, 0.3])
    matrix = probs.expand(3, 3).log()
    lengths = torch.tensor([len(values)])
    hmm = HMM(probs.log(), matrix, emission, lengths, validate_args=validate_args)
    expected = (density * probs).sum(-1).log().sum()
    assert bool(expected.isfinite())
    torch.testing.assert_close(hmm.log_prob(values[None])[0], expected.to(hmm.log_initial))
    weights = density * probs / (density * probs).sum(-1, keepdim=True)
    torch.testing.assert_close(hmm.posterior(values[None]).states[0], weights.to(probs))


@pytest.mark.parametrize("kind", supports_of_states())
def test_what_is_missing_may_be_filled_in_any_state(kind, engine):
    """No filler is in the support of all states; what is missing is as if it were not there."""
    emission, values, _ = supports_of_states()[kind]
    probs = torch.tensor([0.5, 0.2, 0.3])
    matrix = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1], [0.4, 0.3, 0.3]]).log()
    steps = len(values)
    for known in itertools.product([False, True], repeat=steps):
        observed = torch.tensor([known])
        hmm = HMM(probs.log(), matrix, emission, torch.tensor([steps]), observed)
        junk = values.clone()
        junk[~observed[0]] = np.nan
        factors = hmm.log_factors(junk[None])[2][0]
        for t, is_known in enumerate(known):
            value = values[t].unsqueeze(-1 - len(emission.event_shape))
            direct = marginal_log_prob(emission, value)
            torch.testing.assert_close(factors[t], direct if is_known else torch.zeros(3))
        assert bool(hmm.posterior(junk[None]).states.isfinite().all())
    if emission.event_shape and not isinstance(emission, Tied):
        hmm = HMM(probs.log(), matrix, emission, torch.tensor([steps]))
        for component in range(2):
            partly = values.clone()
            partly[:, component] = np.nan
            assert bool(hmm.log_prob(partly[None]).isfinite())
        assert hmm.log_prob(torch.full_like(values, np.nan)[None]).item() == pytest.approx(0.0)


def test_gradients_are_finite_where_a_state_cannot_emit():
    low = torch.tensor([0.0, 4.0, 6.0]).requires_grad_()
    even = torch.full((3, 3), 1 / 3).log()
    hmm = HMM(even[0], even, dist.Uniform(low, low + 5.0), torch.tensor([3]))
    hmm.log_prob(torch.tensor([[4.5, 1.0, 10.5]])).backward()
    assert bool(low.grad.isfinite().all())


@pytest.mark.parametrize("missing", ["values", "steps"])
def test_supports_of_single_steps_need_not_hold_the_others(missing):
    """A filler comes from another step, in whose support it is."""
    low = torch.tensor([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]])
    even = torch.full((2, 2), 0.5).log()
    observed = torch.tensor([[True, False, True]])
    hmm = HMM(
        even[0], even, dist.Uniform(low, low + 2.0), torch.tensor([3]), observed,
        emission_per_step=True,
    )  # fmt: skip
    expected = torch.tensor(0.25 * 0.5).log()  # one state in the first step, two in the last
    values = torch.tensor([[0.5, np.nan if missing == "values" else 7.0, 21.5]])
    torch.testing.assert_close(hmm.log_prob(values)[0], expected)


def test_a_value_that_no_state_can_emit_is_named():
    emission, _, _ = supports_of_states()["uniform"]
    even = torch.full((3, 3), 1 / 3).log()
    hmm = HMM(even[0], even, emission, torch.tensor([2]))
    with pytest.raises(ValueError, match="values must lie in the support"):
        hmm.log_prob(torch.tensor([[4.5, 9.5]]))


@pytest.mark.parametrize("built_inside", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("emission", ["symbols", "numbers", "vectors"])
def test_answers_need_no_gradient_of_the_caller(emission, mode, built_inside, engine):
    case = Case(emission, "restarts", 2, 3, ragged=True, missing=True)

    def answers(hmm, values):
        torch.manual_seed(0)
        path = hmm.sample_states(values)
        return [
            hmm.log_prob(values), *hmm.posterior(values), *hmm.expected_counts(values),
            hmm.filtered(values), hmm.viterbi(values), path, hmm.log_joint(values, path),
            hmm.forecast(values, 2).states, hmm.sample(),
        ]  # fmt: skip

    hmm, values, _, _ = build(case)
    expected = answers(hmm, values)
    with mode():
        if built_inside:
            hmm, values, _, _ = build(case)
        for one, other in zip(answers(hmm, values), expected):
            torch.testing.assert_close(one, other)


# Bad input ----------------------------------------------------------------------------------------


def arguments(**changed):
    even = torch.full((3, 3), 1 / 3).log()
    given = {
        "log_initial": even[0],
        "log_transition": even,
        "emission": dist.Categorical(logits=torch.zeros(3, 4)),
        "lengths": torch.tensor([4, 2]),
    }
    return given | {name: make() for name, make in changed.items()}


def even(*shape):
    return torch.zeros(shape).log_softmax(-1)


BAD = {  # what is wrong: the argument, how to make it, the error, what it must say
    "initial is a list": ("log_initial", lambda: [0.0], TypeError, "torch.Tensor; got list"),
    "initial of integers": (
        "log_initial",
        lambda: torch.zeros(3).long(),
        TypeError,
        "floating point; got dtype torch.int64",
    ),
    "initial is a scalar": (
        "log_initial",
        lambda: torch.zeros(()),
        ValueError,
        r"\(\*B, K\); got shape \(\)",
    ),
    "initial of another size": ("log_initial", lambda: even(2), ValueError, r"\(2, 2\)|K = 2"),
    "initial does not sum to one": (
        "log_initial",
        lambda: torch.zeros(3),
        ValueError,
        "sum to one .* from 3 to 3",
    ),
    "initial holds NaN": (
        "log_initial",
        lambda: torch.full((3,), torch.nan),
        ValueError,
        "sum to one .* nan",
    ),
    "initial is all zeros": (
        "log_initial",
        lambda: torch.full((3,), -torch.inf),
        ValueError,
        "sum to one .* from 0 to 0",
    ),
    "initial on another device": (
        "log_initial",
        lambda: even(3).to("meta"),
        ValueError,
        "log_initial on meta, log_transition on cpu",
    ),
    "transition is an array of probabilities": (
        "log_transition",
        lambda: np.eye(3, dtype=np.float32),
        ValueError,
        "probabilities themselves.* Call .log",
    ),
    "transition of integers": (
        "log_transition",
        lambda: torch.eye(3).long(),
        TypeError,
        "floating point; got dtype torch.int64",
    ),
    "transition is not square": (
        "log_transition",
        lambda: even(3, 2),
        ValueError,
        r"\(K, K\) = \(3, 3\); got shape \(3, 2\)",
    ),
    "transition is a vector": (
        "log_transition",
        lambda: even(3),
        ValueError,
        r"\(\*B, K, K\); got shape \(3,\)",
    ),
    "transition has probabilities": (
        "log_transition",
        lambda: even(3, 3).exp(),
        ValueError,
        "probabilities themselves.* Call .log",
    ),
    "transition holds NaN": (
        "log_transition",
        lambda: torch.full((3, 3), torch.nan),
        ValueError,
        "sum to one .* nan",
    ),
    "transition's columns sum to one": (
        "log_transition",
        lambda: torch.tensor([[0.9, 0.5, 0.5], [0.05, 0.3, 0.2], [0.05, 0.2, 0.3]]).log(),
        ValueError,
        "sum to one",
    ),
    "transition of another batch": (
        "log_transition",
        lambda: even(5, 3, 3),
        ValueError,
        r"log_transition \(5,\), .* lengths \(2,\)",
    ),
    "transition on another device": (
        "log_transition",
        lambda: even(3, 3).to("meta"),
        ValueError,
        "log_transition on meta",
    ),
    "emission is a tensor": (
        "emission",
        lambda: torch.zeros(3, 4),
        TypeError,
        "K states; got Tensor",
    ),
    "emission of one state": (
        "emission",
        lambda: dist.Normal(0.0, 1.0),
        ValueError,
        r"K = 3 states; got batch shape \(\)",
    ),
    "emission of too few states": (
        "emission",
        lambda: dist.Normal(torch.zeros(2), 1.0),
        ValueError,
        r"K = 3 states; got batch shape \(2,\)",
    ),
    "emission of vectors not declared": (
        "emission",
        lambda: dist.Normal(torch.zeros(3, 2), 1.0),
        ValueError,
        r"K = 3 .* got batch shape \(3, 2\).*to_event",
    ),
    "emission of another batch": (
        "emission",
        lambda: dist.Normal(torch.zeros(5, 3), 1.0),
        ValueError,
        r"emission \(5,\), lengths \(2,\)",
    ),
    "emission on another device": (
        "emission",
        lambda: dist.Normal(
            torch.zeros(3, device="meta"), torch.ones(3, device="meta"), validate_args=False
        ),
        ValueError,
        "emission on meta",
    ),
    "lengths are a list": ("lengths", lambda: [4, 2], TypeError, "torch.Tensor; got list"),
    "lengths are a number": ("lengths", lambda: 4, TypeError, "torch.Tensor; got int"),
    "lengths are fractions": (
        "lengths",
        lambda: torch.tensor([4.0]),
        TypeError,
        "integers; got dtype torch.float64",
    ),
    "lengths are booleans": (
        "lengths",
        lambda: torch.tensor([True]),
        TypeError,
        "integers; got dtype torch.bool",
    ),
    "no lengths": (
        "lengths",
        lambda: torch.zeros(0).long(),
        ValueError,
        "empty; wanted at least one",
    ),
    "a length of zero": (
        "lengths",
        lambda: torch.tensor([4, 0]),
        ValueError,
        "between 1 and .* 4; got values from 0 to 4",
    ),
    "a negative length": (
        "lengths",
        lambda: torch.tensor([4, -1]),
        ValueError,
        "between 1 and .* 4; got values from -1 to 4",
    ),
    "all lengths zero": ("lengths", lambda: torch.tensor([0, 0]), ValueError, "between 1 and"),
    "observed is a list": (
        "observed",
        lambda: [[True] * 4] * 2,
        TypeError,
        "torch.Tensor; got list",
    ),
    "observed is a scalar": (
        "observed",
        lambda: torch.tensor(True),
        ValueError,
        r"\(\*B, T\); got \(\)",
    ),
    "observed of numbers": (
        "observed",
        lambda: torch.ones(2, 4),
        TypeError,
        "boolean.*got dtype torch.float64",
    ),
    "observed is too short": ("observed", lambda: torch.ones(2, 3).bool(), ValueError, "3.*4|4.*3"),
    "observed of another batch": (
        "observed",
        lambda: torch.ones(5, 4).bool(),
        ValueError,
        r"observed \(5,\)",
    ),
    "observed on another device": (
        "observed",
        lambda: torch.ones(2, 4, device="meta").bool(),
        ValueError,
        "observed on meta",
    ),
}


@pytest.mark.parametrize("wrong", BAD)
def test_a_bad_parameter_is_named(wrong):
    name, make, kind, words = BAD[wrong]
    with pytest.raises(kind, match=words) as caught:
        HMM(**arguments(**{name: make}), validate_args=True)
    other = {"initial of another size": "log_transition", "observed is too short": "lengths"}
    assert other.get(wrong, name) in str(caught.value)  # of two that disagree, either may be named


PER_STEP = {
    "too few matrices": (
        {"log_transition": lambda: even(2, 3, 3)},
        r"number of steps, 3 of log_transition; got .* to 4",
    ),
    "one matrix": (
        {"log_transition": lambda: even(3, 3)},
        r"log_transition .*\(\*B, T-1, K, K\).*got shape \(3, 3\)",
    ),
    "too few emissions": (
        {"emission": lambda: dist.Categorical(logits=torch.zeros(3, 3, 4))},
        r"number of steps, 3 of emission; got .* to 4",
    ),
    "one emission": (
        {"emission": lambda: dist.Categorical(logits=torch.zeros(3, 4))},
        r"emission .*\(\*B, T, K\).*shape \(3,\)",
    ),
    "fewer emissions than matrices": (
        {
            "log_transition": lambda: even(6, 3, 3),
            "emission": lambda: dist.Categorical(logits=torch.zeros(5, 3, 4)),
        },
        "emission",
    ),
    "fewer matrices than emissions": (
        {
            "log_transition": lambda: even(4, 3, 3),
            "emission": lambda: dist.Categorical(logits=torch.zeros(6, 3, 4)),
        },
        "log_transition",
    ),
    "fewer matrices than observed": (
        {"log_transition": lambda: even(3, 3, 3), "observed": lambda: torch.ones(2, 6).bool()},
        "log_transition|observed",
    ),
    "fewer emissions than observed": (
        {
            "emission": lambda: dist.Categorical(logits=torch.zeros(4, 3, 4)),
            "observed": lambda: torch.ones(2, 6).bool(),
        },
        "emission|observed",
    ),
}


@pytest.mark.parametrize("wrong", PER_STEP)
def test_parameters_per_step_cover_the_steps(wrong):
    changed, words = PER_STEP[wrong]
    with pytest.raises(ValueError, match=words):
        HMM(
            **arguments(**changed),
            transition_per_step="log_transition" in changed,
            emission_per_step="emission" in changed,
        )


BAD_VALUES = {
    "a list": (lambda: [[0] * 4] * 2, TypeError, "torch.Tensor; got list"),
    "fractions for symbols": (
        lambda: torch.zeros(2, 4),
        TypeError,
        "integers; got dtype torch.float64",
    ),
    "too few steps": (
        lambda: torch.zeros(2, 3).long(),
        ValueError,
        r"\(T, \*E\) = \(4,\); got shape \(2, 3\)",
    ),
    "too many steps": (
        lambda: torch.zeros(2, 5).long(),
        ValueError,
        r"\(T, \*E\) = \(4,\); got shape \(2, 5\)",
    ),
    "too many sequences": (
        lambda: torch.zeros(3, 4).long(),
        ValueError,
        r"values \(3,\), HMM \(2,\)",
    ),
    "a negative symbol": (
        lambda: torch.full((2, 4), -1),
        ValueError,
        "between 0 and V - 1 = 3; got values from -1",
    ),
    "a symbol too large": (
        lambda: torch.full((2, 4), 4),
        ValueError,
        "between 0 and V - 1 = 3; got values from [04] to 4",
    ),
    "another device": (
        lambda: torch.zeros(2, 4, device="meta").long(),
        ValueError,
        "values on meta, log_initial on cpu",
    ),
}


@pytest.mark.parametrize("wrong", BAD_VALUES)
@pytest.mark.parametrize(
    "method", ["log_prob", "posterior", "filtered", "viterbi", "sample_states"]
)
def test_bad_values_are_named(method, wrong):
    make, kind, words = BAD_VALUES[wrong]
    hmm = HMM(**arguments(), validate_args=True)
    with pytest.raises(kind, match=f"values.*{words}|{words}"):
        getattr(hmm, method)(make())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_number_is_named(bad):
    """NaN, and a value so far out that a density is not a number."""
    emission = dist.Normal(torch.zeros(3), torch.ones(3), validate_args=False)
    hmm = HMM(**arguments(emission=lambda: emission), validate_args=True)
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
    hmm = HMM(**arguments(emission=lambda: emission), validate_args=True)
    with pytest.raises(ValueError, match=r"log-likelihood of values .*(nan|inf)"):
        hmm.log_prob(torch.zeros(2, 4))


def test_without_validation_a_wrong_symbol_cannot_read_other_memory(engine):
    """Pyro's checks may be off; what is out of bounds must still be an error."""
    for symbol in (4, -1, 10**6):
        hmm = HMM(**arguments(), validate_args=False)
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            hmm.log_prob(torch.full((2, 4), symbol))


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


def test_complex_values_are_refused():
    hmm = HMM(even(3), even(3, 3), dist.Normal(torch.zeros(3), 1.0), torch.tensor([2]))
    values = torch.ones(1, 2, dtype=torch.complex64)
    for query in (hmm.log_prob, hmm.viterbi, hmm.forecast(torch.ones(1, 2), 2).log_prob):
        with pytest.raises(TypeError, match="values must be real"):
            query(values)


def test_nothing_is_forecast_after_an_impossible_sequence():
    coins = dist.Categorical(torch.eye(2))
    for flag in (True, False):
        hmm = HMM(even(2), torch.eye(2).log(), coins, torch.tensor([2, 2]), validate_args=flag)
        values = torch.tensor([[0, 1], [0, 0]])
        if flag:
            with pytest.raises(ValueError, match=r"values must be possible.* 1 of 2"):
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


BAD_STATES = {
    "a list": (lambda: [[0] * 4] * 2, TypeError, "torch.Tensor; got list"),
    "fractions": (lambda: torch.zeros(2, 4), TypeError, "integers; got dtype torch.float64"),
    "too few steps": (
        lambda: torch.zeros(2, 3).long(),
        ValueError,
        r"\(T,\) = \(4,\); got shape \(2, 3\)",
    ),
    "too large": (
        lambda: torch.full((2, 4), 3),
        ValueError,
        "between 0 and K - 1 = 2; got values from 0 to 3",
    ),
    "negative": (
        lambda: torch.full((2, 4), -1),
        ValueError,
        "between 0 and K - 1 = 2; got values from -1",
    ),
    "another batch": (lambda: torch.zeros(5, 4).long(), ValueError, r"\(5,\)"),
    "another device": (
        lambda: torch.zeros(2, 4, device="meta").long(),
        ValueError,
        "states on meta",
    ),
}


@pytest.mark.parametrize("wrong", BAD_STATES)
def test_bad_states_are_named(wrong):
    make, kind, words = BAD_STATES[wrong]
    with pytest.raises(kind, match=words) as caught:
        HMM(**arguments(), validate_args=True).log_joint(torch.zeros(2, 4).long(), make())
    assert "states" in str(caught.value)


def test_states_in_the_padding_may_be_anything():
    hmm = HMM(**arguments(), validate_args=True)
    values, states = torch.zeros(2, 4).long(), torch.zeros(2, 4).long()
    marked = states.clone()
    marked[1, 2:] = -1
    assert torch.equal(hmm.log_joint(values, marked), hmm.log_joint(values, states))


@pytest.mark.parametrize(
    ("num_steps", "kind"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), ("2", TypeError)]
)
def test_a_horizon_is_a_number_of_steps(num_steps, kind):
    with pytest.raises(
        kind, match=rf"num_steps.*{num_steps}|num_steps.*{type(num_steps).__name__}"
    ):
        HMM(**arguments()).forecast(torch.zeros(2, 4).long(), num_steps)


def test_a_model_that_changes_with_the_step_has_no_forecast():
    hmm = HMM(**arguments(log_transition=lambda: even(3, 3, 3)), transition_per_step=True)
    with pytest.raises(ValueError, match="does not change with the step"):
        hmm.forecast(torch.zeros(2, 4).long(), 1)


def test_an_hmm_refuses_a_batch_it_cannot_fill():
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)|\(3,\).*\(2,\)"):
        HMM(**arguments()).expand([3])


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


def test_words_of_errors_end_in_a_cure():
    """A sentence with what was wanted and one that says what to do."""
    with pytest.raises(TypeError) as caught:
        HMM(**arguments(lengths=lambda: torch.ones(2)))
    assert re.search(r"Call \.long\(\) on it\.$", str(caught.value))


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
        states = hmm.posterior(values).states
        torch.testing.assert_close(other.posterior(values).states, states[..., order])
        path = hmm.viterbi(values)
        here = torch.arange(4) < hmm.lengths.unsqueeze(-1)
        assert torch.equal(order[other.viterbi(values)][here], path[here])
        assert other.sample().shape == values.shape
    with pytest.raises(ValueError, match=r"^order must hold each state from 0 to K - 1 = 2 once"):
        hmm.permute_states(torch.tensor([0, 0, 1]))


def test_probabilities_of_zero_are_zeros_however_they_are_given():
    """``Categorical(probs=...).logits`` would have the logarithm of a small number instead."""
    even = torch.full((2, 2), 0.5).log()
    probs = torch.eye(2).requires_grad_()
    hmm = HMM(even[0], torch.eye(2).log(), dist.Categorical(probs), torch.tensor(2))
    evidence = hmm.log_prob(torch.tensor([[0, 1], [1, 1]]))
    torch.testing.assert_close(evidence.exp(), torch.tensor([0.0, 0.5]))
    evidence[1].backward()
    assert probs.grad.isfinite().all()
    assert (hmm.sample([50]).diff(dim=-1) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_refused(dtype):
    probs = torch.full((2,), 0.5).log().to(dtype)
    emission = dist.Categorical(logits=torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"log_initial must be float32 or float64; .*16\. Call"):
        HMM(probs, probs.expand(2, 2), emission, torch.tensor([3]))


def test_an_object_with_a_matrix_is_no_transition():
    """Its rows would not be checked."""

    class Loose:
        matrix = torch.zeros(2, 2)

    with pytest.raises(TypeError, match=r"log_transition must be a torch\.Tensor"):
        HMM(torch.full((2,), 0.5).log(), Loose(), dist.Poisson(torch.ones(2)), torch.tensor(2))


@pytest.mark.parametrize("place", [(0, 0), (1, 0)])
def test_values_outside_of_the_support_are_counted_once(place):
    """What fills padding in is not counted."""
    even, values = torch.full((2, 2), 0.5).log(), torch.zeros(2, 9)
    hmm = HMM(even[0], even, dist.Poisson(torch.ones(2)), torch.tensor([2, 1]), validate_args=True)
    values = values[:, :2]
    values[place] = -1.0
    with pytest.raises(ValueError, match="; 1 do not"):
        hmm.log_prob(values)
    longer = hmm.replace(lengths=torch.tensor([9, 1]))
    values = torch.zeros(2, 9)
    values[place] = -1.0
    with pytest.raises(ValueError, match="; 1 do not"):
        longer.log_prob(values)
