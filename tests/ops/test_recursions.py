"""The recursions, each property held by the compiled kernels and by the loops of torch operations.

Answers come from ``oracle.py``: the table of all paths where that is small enough, plain
forward-backward in log space elsewhere. Tolerances in float64 are those of rounding; in float32
they are a few roundings of the largest log-likelihood, which is what an exponential amplifies.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracle import assert_close
from torch.autograd import gradcheck, gradgradcheck

from pyrohmm import recursions
from pyrohmm.ops import backends

NEVER = -np.inf


@pytest.fixture
def ranges(monkeypatch):
    """Record the ranges of numbers that are tried, in their order."""
    tried = []
    solve = recursions.solve

    def noted(chain, dtype, *arguments, **keywords):
        tried.append(dtype or "log")
        return solve(chain, dtype, *arguments, **keywords)

    monkeypatch.setattr(recursions, "solve", noted)
    return tried


class Chain(NamedTuple):
    log_initial: torch.Tensor
    log_transition: torch.Tensor
    log_likelihood: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, initial, transition, likelihood, lengths=None, dtype=torch.float64):
        """Tensors from arrays; every step exists unless lengths are given."""
        parts = [torch.tensor(np.asarray(a, float)).to(dtype) for a in (initial, transition)]
        likelihood = torch.tensor(np.asarray(likelihood, float)).to(dtype)
        if lengths is None:
            lengths = np.full(likelihood.shape[:-2], likelihood.shape[-2])
        return cls(*parts, likelihood, torch.tensor(lengths))

    def arrays(self):
        """What was rounded to the chain's dtype, in float64."""
        return [part.detach().numpy() for part in (p.double() for p in self[:3])] + [
            self.lengths.numpy()
        ]

    def solved(self, solve=oracle.by_logs):
        return oracle.for_each(solve, *self.arrays())

    def with_gradients(self):
        return self._replace(
            **{name: getattr(self, name).clone().requires_grad_() for name in self._fields[:3]}
        )

    @property
    def gradients(self):
        return [part.grad for part in self[:3]]


def normalized(scores, zero=None, rng=None):
    """Logarithms of probabilities; if wanted, a share ``zero`` of them are hard zeros."""
    if zero:
        dead = rng.random(scores.shape) < zero
        alive = rng.integers(scores.shape[-1], size=scores.shape[:-1])
        np.put_along_axis(dead, alive[..., None], False, -1)
        scores = np.where(dead, NEVER, scores)
    peak = scores.max(-1, keepdims=True)
    return scores - peak - np.log(np.exp(scores - peak).sum(-1, keepdims=True))


ROUNDING = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
}


def spread(gradient, shape):
    """Sum a gradient ``(*B, ...)`` over the dimensions that ``shape`` was broadcast in."""
    return torch.as_tensor(gradient).sum_to_size(shape)


def assert_gradients(chain, answer, case, tolerance):
    """Of a weighted sum of evidences: expected starts, transitions and visits (Eisner, 2016)."""
    chain = chain.with_gradients()
    evidence = recursions.log_evidence(*chain)
    weight = torch.linspace(-1.5, 2.0, evidence.numel()).to(evidence).reshape(evidence.shape)
    evidence.backward(weight)
    scale = weight.double().numpy()[..., None]
    starts = np.where(np.isneginf(answer.evidence)[..., None], 0.0, answer.states[..., 0, :])
    expected = [
        scale * starts,
        scale[..., None, None] * answer.transitions,
        scale[..., None] * answer.states,
    ]
    for part, gradient, wanted in zip(chain[:3], chain.gradients, expected):
        assert_close(gradient, spread(wanted, part.shape), case, **tolerance)


def assert_answers(chain, answer, case, tolerance, loose=None):
    """Evidence, posterior, filtered states, gradients and the best path."""
    loose = loose or tolerance
    evidence, states, transitions = recursions.posterior(*chain)
    assert evidence.dtype == states.dtype == transitions.dtype == chain.log_likelihood.dtype
    assert_close(recursions.log_evidence(*chain), answer.evidence, case, **tolerance)
    assert_close(evidence, answer.evidence, case, **tolerance)
    assert_close(states, answer.states, case, **loose)
    assert_close(transitions, answer.transitions.sum(-3), case, **loose)
    assert_close(recursions.filtered(*chain).exp(), answer.filtered, case, **loose)
    assert_gradients(chain, answer, case, loose)
    reached = torch.as_tensor(scores_of(chain, recursions.viterbi(*chain)))
    assert_close(reached, answer.best, case, **tolerance)


def scores_of(chain, paths):
    """Score log p(x, z) of paths ``(*S, *B, T)``, by the oracle."""
    batch, singles = oracle.one_by_one(*chain.arrays())
    samples = paths.reshape(-1, *batch, paths.size(-1)).numpy()
    scores = np.empty(samples.shape[:-1])
    for index, (*logs, length) in zip(np.ndindex(batch), singles):
        assert not samples[(slice(None), *index, slice(length, None))].any()  # 0 where padded
        chosen = samples[(slice(None), *index, slice(0, length))]
        scores[(slice(None), *index)] = oracle.joint(*logs, chosen)
    return scores.reshape(paths.shape[:-1])


# Large and long -----------------------------------------------------------------------------------


def random_chain(num_states, steps, batch=(), seed=0, scale=3.0, **kind):
    """A chain without zeros; ``kind``: per_step, groups, ragged, dtype."""
    rng = np.random.default_rng(seed)
    matrices = steps - 1 if kind.get("per_step") else 1
    groups = kind.get("groups", ())
    lengths = None
    if kind.get("ragged"):
        lengths = rng.integers(1, steps + 1, size=batch)
    return Chain.of(
        normalized(rng.normal(size=(num_states,))),
        normalized(rng.normal(size=(*groups, matrices, num_states, num_states))),
        scale * rng.normal(size=(*batch, steps, num_states)),
        lengths,
        kind.get("dtype", torch.float64),
    )


@pytest.mark.parametrize(
    ("num_states", "batch", "kind"),
    [
        (129, (6,), {"ragged": True}),
        (129, (6,), {"per_step": True, "ragged": True}),
        (130, (2, 3), {"groups": (2, 1), "ragged": True}),
        (130, (5,), {"groups": (5,), "per_step": True}),
        (140, (3,), {}),  # few sequences: compiled all the same
        (256, (6,), {"dtype": torch.float32}),  # the matrix that MKL packs
        (256, (6,), {"dtype": torch.float32, "ragged": True}),
        (257, (5,), {"dtype": torch.float32, "per_step": True}),
    ],
    ids=str,
)
def test_many_states_agree_with_log_space(num_states, batch, kind):
    chain = random_chain(num_states, 5, batch, **kind)
    assert_answers(chain, chain.solved(), kind, ROUNDING[chain.log_likelihood.dtype])
    assert (scores_of(chain, recursions.sample_paths(*chain, num_samples=2)[0]) > NEVER).all()


def test_float32_keeps_the_evidence_of_many_steps(engine):
    chain = random_chain(3, 20_000, dtype=torch.float32, scale=1.0)
    initial, transition, likelihood, _ = chain.arrays()
    arrived, matrix, expected = np.exp(initial), np.exp(transition[0]), 0.0
    for weight in np.exp(likelihood):
        mass = arrived * weight
        expected += np.log(mass.sum())
        arrived = mass / mass.sum() @ matrix
    evidence, states, transitions = recursions.posterior(*chain)
    assert evidence.item() == pytest.approx(expected, rel=1e-5)
    assert recursions.log_evidence(*chain).item() == pytest.approx(expected, rel=1e-5)
    assert_close(states.sum(-1), np.ones(20_000), rtol=0, atol=1e-5)
    assert transitions.sum().item() == pytest.approx(19_999, rel=1e-5)


# Derivatives of both orders -----------------------------------------------------------------------


def free(chain):
    """The finite logs of a chain as one vector, and what makes the evidence of it."""
    masks = [part.isfinite() for part in chain[:3]]
    counts = [int(mask.sum()) for mask in masks]
    vector = torch.cat([part[mask] for part, mask in zip(chain[:3], masks)]).requires_grad_()

    def evidence(vector):
        parts = [
            part.detach().masked_scatter(mask, piece)
            for part, mask, piece in zip(chain[:3], masks, vector.split(counts))
        ]
        return recursions.log_evidence(*parts, chain.lengths)

    return evidence, vector


def with_zeros():
    """A chain from left to right, and a state that cannot emit what is seen."""
    logs = normalized(np.where(np.tri(3).T > 0, 0.5 * np.eye(3), NEVER))
    seen = np.array([[0.3, -1.0, 0.2], [NEVER, 0.1, -0.5], [0.0, 0.0, 0.0]])
    return Chain.of(np.log([0.5, 0.3, 0.2]), logs[None], seen)


def scores():
    """Potentials, as of a conditional random field: their rows do not sum to one."""
    chain = random_chain(2, 3, (3,), ragged=True)
    return chain._replace(log_transition=chain.log_transition + torch.arange(4.0).reshape(2, 2))


DERIVED = {
    "scores": scores,
    "shared": lambda: random_chain(2, 3, (3,), ragged=True),
    "per step": lambda: random_chain(2, 3, (3,), per_step=True),
    "restarts": lambda: random_chain(2, 2, (2, 3), groups=(2, 1), ragged=True),
    "matrix for each": lambda: random_chain(2, 2, (3,), groups=(3,)),
    "zeros": with_zeros,
    "one step": lambda: random_chain(3, 1, (3,)),
}


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_are_those_of_small_differences(name, check, engine):
    assert check(*free(DERIVED[name]()))


OPPOSED = np.array([[0.0, -800.0], [-1000.0, 0.0], [-1.0, 0.0]])  # state 1 lags, then leads


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_in_log_space_are_those_of_small_differences(check, engine, ranges):
    apart = np.where(np.eye(2), 0.0, NEVER)[None]
    chain = Chain.of(np.log([0.4, 0.6]), apart, OPPOSED)
    assert check(*free(chain))
    assert "log" in ranges


def test_second_derivatives_are_finite_beside_impossible_sequences(engine):
    apart = np.where(np.eye(2), 0.0, NEVER)[None]
    likelihood = np.stack([OPPOSED, np.full((3, 2), NEVER), np.zeros((3, 2))])
    chain = Chain.of(np.log([0.4, 0.6]), apart, likelihood).with_gradients()
    evidence = recursions.log_evidence(*chain)
    assert evidence.isneginf().tolist() == [False, True, False]
    gradients = torch.autograd.grad(evidence.sum(), chain[:3], create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    for first, part in zip(gradients, chain[:3]):
        assert first.isfinite().all()
        assert part.grad.isfinite().all()
    assert not gradients[2][1].any()


def test_second_derivatives_of_parts_that_are_made_of_each_other(engine):
    """Both probabilities and the likelihoods are one tensor: what passes through it counts once."""
    logits = torch.tensor([0.3, -1.2], dtype=torch.float64)

    def evidence(logits):
        probs = logits.log_softmax(-1)
        return recursions.log_evidence(
            probs, probs.expand(1, 2, 2), probs.expand(1, 3, 2), torch.tensor([3])
        )[0]

    def slow(logits):  # each step: the sum of the squares of the probabilities
        return 3 * (2 * logits.log_softmax(-1)).logsumexp(-1)

    hessian = torch.autograd.functional.hessian
    torch.testing.assert_close(hessian(evidence, logits), hessian(slow, logits))


def test_a_gradient_can_be_asked_for_twice(engine):
    chain = random_chain(3, 4, (2, 3), groups=(2, 1), ragged=True).with_gradients()
    loss = recursions.log_evidence(*chain).sum()
    first = torch.autograd.grad(loss, chain[:3], retain_graph=True)
    second = torch.autograd.grad(loss, chain[:3])
    for one, other in zip(first, second):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# Numbers out of range -----------------------------------------------------------------------------

APART = np.where(np.eye(2), 0.0, NEVER)[None]
APART_3 = np.where(np.eye(3), 0.0, NEVER)[None]
EVEN = np.log([0.5, 0.5])
with np.errstate(divide="ignore"):
    ALTERNATE = np.log([[[0.0, 1.0], [0.1, 0.9]]])
    DENSITIES = np.log([[[0.0, 30.0], [3.0, 27.0]]])

# Each makes messages underflow on a path that is the likeliest in the end, or changes its weight.
UNDERFLOW = {
    "beyond float32, within float64": (APART, [[0, -200], [-150, 0], [-40, 0]]),
    "beyond float32 and float64": (APART, [[0, -800], [-1000, 0]]),
    "little by little": (APART, [[0, -60]] * 20 + [[-90, 0]] * 20),
    "a weight beyond float64 after a small norm": (APART, [[-10, 0], [0, -1000]] + [[-400, 0]] * 2),
    "a product that is subnormal in float64": (
        APART_3,
        [[-100, -43, 0], [0, -700, NEVER], [-330, 0, 0], [-330, 0, 0]],
    ),
    "a transition that is tiny": (
        np.log([[[1.0, 1e-300], [1e-300, 1.0]]]),
        [[0, NEVER], [-800, 0]],
    ),
    "a start that is tiny": (np.log([[[0.5, 0.5], [0.3, 0.7]]]), [[-900, 0], [0, -800]]),
    "a tiny start and a zero": (np.log([[[1.0, 1e-200], [0.3, 0.7]]]), [[0, -1], [-800, 0]]),
    "behind, ahead and behind again, beyond float32": (
        APART, [[0, -110]] + [[-44, 0]] * 5 + [[0, -110]],
    ),
    "a factor beyond float32 after a small norm": (ALTERNATE, [[0, -50], [0, -400], [0, -300]]),
    "a density above one, beyond float32": (DENSITIES, [[0, -50], [0, -400], [0, -300]]),
    "all in one state, then the other": (
        np.log([[[0.9, 0.1], [0.1, 0.9]]]),
        [[0, -2000], [-2000, 0]] * 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", UNDERFLOW)
def test_no_path_that_matters_is_lost(name, dtype, engine):
    """By one sequence, and in expected counts by many side by side."""
    transition, likelihood = UNDERFLOW[name]
    likelihood = np.array(likelihood, float)
    initial = np.log([0.5, 0.5] if likelihood.shape[1] == 2 else [0.3, 0.3, 0.4])
    with np.errstate(divide="ignore"):
        if "start" in name:
            initial = np.log([1.0, 0.0]) if "zero" in name else np.log([1.0, 1e-280])
    chain = Chain.of(initial, transition, likelihood, dtype=dtype)
    loose = None if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    assert_answers(chain, chain.solved(), name, ROUNDING[dtype], loose)
    many = Chain.of(initial, transition, np.stack([likelihood] * 40), dtype=dtype)
    answer, counts = many.solved(), recursions.expected_counts(*many)
    assert_close(counts.log_evidence, answer.evidence, name, **ROUNDING[dtype])
    assert_close(counts.state_probs, answer.states, name, **loose or ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", UNDERFLOW)
@pytest.mark.parametrize("count", [40])  # sequences side by side
def test_expected_counts_lose_no_path_that_matters(count, name, dtype, engine):
    transition, likelihood = UNDERFLOW[name]
    likelihood = np.array(likelihood, float)
    initial = np.log([0.5, 0.5] if likelihood.shape[1] == 2 else [0.3, 0.3, 0.4])
    chain = Chain.of(initial, transition, np.stack([likelihood] * count), dtype=dtype)
    answer, counts = chain.solved(), recursions.expected_counts(*chain)
    assert_close(counts.log_evidence, answer.evidence, name, **ROUNDING[dtype])
    loose = ROUNDING[dtype] if dtype == torch.float64 else {"rtol": 1e-3, "atol": 1e-3}
    assert_close(counts.state_probs, answer.states, name, **loose)


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("beyond float32, within float64", [torch.float32, torch.float64]),
        ("beyond float32 and float64", [torch.float32, torch.float64, "log"]),
    ],
)
def test_a_wider_range_is_tried_only_where_it_is_needed(name, tried, engine, ranges):
    transition, likelihood = UNDERFLOW[name]
    batch = np.stack([np.zeros_like(likelihood), likelihood])
    recursions.log_evidence(*Chain.of(EVEN, transition, batch, dtype=torch.float32))
    assert ranges == tried


@pytest.mark.parametrize("num_steps", [50, 300])
@pytest.mark.parametrize("rare", [0.0, 1e-30])
def test_transitions_to_a_state_that_lags_for_long_do_not_overflow(num_steps, rare, engine):
    """The messages back are then huge, and so are their sums over steps, before A makes them small.

    The numbers stay in the range of float32 at every step.
    """
    with np.errstate(divide="ignore"):
        apart = np.log([[[1.0 - rare, rare], [rare, 1.0 - rare]]])
    likelihood = np.zeros((3, num_steps, 2))
    likelihood[:, 0, 1] = -84.0
    likelihood[:, -2:, 0] = -60.0
    chain = Chain.of(EVEN, apart, likelihood, dtype=torch.float32)
    answer, tolerance = chain.solved(), {"rtol": 1e-3, "atol": 1e-3}
    assert_close(recursions.posterior(*chain).transitions, answer.transitions.sum(-3), **tolerance)
    assert_gradients(chain, answer, None, tolerance)


@st.composite
def wild_chains(draw):
    """Chains whose numbers are as far apart as a thousand nats, with hard zeros, for one sequence.

    Drawn from few values, most of them at the limits of a range, so that they conspire.
    """
    num_states, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    near = st.sampled_from([0.0, -1.0, -10.0, -20.0, -40.0, -86.0, -88.0, -104.0])
    far = st.sampled_from([0.0, -100.0, -300.0, -400.0, -700.0, -708.0, -745.0, -1000.0])
    anything = st.floats(-1000, 1000, width=32)
    numbers = draw(st.sampled_from([near, far, near | far, anything, near | st.just(NEVER)]))
    likelihood = draw(hnp.arrays(float, (num_steps, num_states), elements=numbers))
    kind = draw(st.sampled_from(["apart", "forwards", "cycle", "any", "per step"]))
    matrices = num_steps - 1 if kind == "per step" and num_steps > 1 else 1
    square = (matrices, num_states, num_states)
    if kind == "apart":
        transition = np.where(np.eye(num_states), 0.0, NEVER)[None]
    elif kind == "cycle":
        transition = np.where(np.roll(np.eye(num_states), 1, 1), 0.0, NEVER)[None]
    else:
        transition = draw(hnp.arrays(float, square, elements=numbers | st.just(NEVER)))
        diagonal = np.eye(num_states, dtype=bool)
        transition = np.where(diagonal & np.isneginf(transition), 0.0, transition)
        if kind == "forwards":
            transition = np.where(np.tri(num_states, k=-1), NEVER, transition)
        transition = normalized(transition)
    initial = draw(hnp.arrays(float, num_states, elements=numbers))
    initial[0] = 0.0 if np.isneginf(initial).all() else initial[0]
    return normalized(initial), transition, likelihood


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(parts=wild_chains())
def test_numbers_far_apart_break_nothing(parts, dtype, engine):
    chain = Chain.of(*parts, dtype=dtype)
    wide = dtype == torch.float64
    tolerance = {"rtol": 1e-11, "atol": 1e-9} if wide else {"rtol": 1e-6, "atol": 2e-3}
    loose = {"rtol": 1e-7, "atol": 1e-7} if wide else {"rtol": 5e-3, "atol": 5e-3}
    assert_answers(chain, chain.solved(), parts, tolerance, loose)


@pytest.mark.parametrize("num_sequences", [1, 40])
@pytest.mark.parametrize("apart", [1.0, 100.0, 300.0, 400.0, 460.0, 600.0, 5000.0])
def test_steps_that_are_unlikely_one_after_the_other_add_up(apart, num_sequences, engine):
    """Norms of single steps may be 1e-200, and the product of two of them no number at all."""
    never = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    turns = torch.tensor([[0.0, -apart], [-apart, 0.0]]).repeat(4, 1)
    chain = torch.full((2,), 0.5).log(), never[None], turns.expand(num_sequences, 8, 2)
    lengths = torch.full((num_sequences,), 8)
    evidence = recursions.log_evidence(*chain, lengths)
    torch.testing.assert_close(evidence, torch.full((num_sequences,), -4 * apart))
    torch.testing.assert_close(recursions.posterior(*chain, lengths).log_evidence, evidence)


# Chains that are special ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_impossible_sequences_have_no_gradient_and_spoil_no_other(dtype, engine):
    rng = np.random.default_rng(0)
    likelihood = rng.normal(size=(5, 4, 3))
    likelihood[1, 0] = NEVER  # at the first step
    likelihood[3, 2] = NEVER  # in the middle
    likelihood[4] = [[0, NEVER, NEVER]] + [[NEVER, 0, NEVER]] * 3  # by the zeros of the chain
    apart = normalized(rng.normal(size=(3, 3)))
    apart[0] = [0.0, NEVER, NEVER]
    chain = Chain.of(normalized(rng.normal(size=3)), apart[None], likelihood, dtype=dtype)
    answer = chain.solved()
    assert np.isneginf(answer.evidence).tolist() == [False, True, False, True, True]
    assert_answers(chain, answer, None, ROUNDING[dtype])
    posterior = recursions.posterior(*chain)
    assert not posterior.state_probs[[1, 3, 4]].any()
    assert not posterior.transitions[[1, 3, 4]].any()
    alone = chain._replace(log_likelihood=chain.log_likelihood[3], lengths=torch.tensor(4))
    alone = alone.with_gradients()
    recursions.log_evidence(*alone).backward()
    for gradient in alone.gradients:
        assert not gradient.any()


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float64, 1000), (torch.float32, 700)])
def test_a_long_chain_from_left_to_right(dtype, steps, engine, ranges):
    """The states that are left behind become negligible; nothing that matters is lost."""
    forwards = np.full((4, 4), NEVER)
    forwards[range(4), range(4)] = np.log([0.7, 0.7, 0.7, 1.0])
    forwards[range(3), range(1, 4)] = np.log(0.3)
    likelihood = np.random.default_rng(0).normal(size=(2, steps, 4))
    lengths = np.array([steps, steps // 2])
    chain = Chain.of([0, NEVER, NEVER, NEVER], forwards[None], likelihood, lengths, dtype)
    answer = chain.solved()
    wide = dtype == torch.float64
    tolerance = {"rtol": 1e-9, "atol": 1e-7} if wide else {"rtol": 1e-5, "atol": 1e-3}
    assert_close(recursions.log_evidence(*chain), answer.evidence, **tolerance)
    assert set(ranges) == {dtype}
    assert_gradients(chain, answer, None, tolerance)
    reached = torch.as_tensor(scores_of(chain, recursions.viterbi(*chain)))
    assert_close(reached, answer.best, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_what_stands_in_the_padding_changes_nothing(junk, dtype, engine):
    chain = random_chain(3, 5, (4,), ragged=True, dtype=dtype)
    ended = torch.arange(5) >= chain.lengths[:, None]
    assert ended.any()
    spoilt = chain._replace(log_likelihood=chain.log_likelihood.masked_fill(ended[..., None], junk))
    for solve in (recursions.posterior, recursions.filtered, recursions.viterbi):
        for one, other in zip(solve(*chain), solve(*spoilt)):
            assert torch.equal(one, other)
    both = chain.with_gradients(), spoilt.with_gradients()
    for each in both:
        recursions.log_evidence(*each).sum().backward()
    for one, other in zip(both[0].gradients, both[1].gradients):
        assert torch.equal(one, other)
    assert not both[1].log_likelihood.grad[ended].any()


@pytest.mark.parametrize("count", [1, 40])  # by states, and by sequences side by side
def test_among_equal_paths_viterbi_takes_the_first(count, engine):
    initial, even = np.array([NEVER, NEVER, 0.0, 0.0, 0.0]), np.zeros((1, 5, 5))
    chain = Chain.of(initial, even, np.zeros((count, 3, 5)), np.arange(count) % 3 + 1)
    expected = torch.tensor([[2, 0, 0], [2, 0, 0], [2, 0, 0]])[chain.lengths - 1]
    expected = expected.masked_fill(torch.arange(3) >= chain.lengths[:, None], 0)
    assert torch.equal(recursions.viterbi(*chain), expected)


def test_threads_share_the_work_and_change_nothing():
    if not backends.has_numba():
        pytest.skip("Numba is not installed")
    chain = random_chain(8, 300, (7,), ragged=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = recursions.posterior(*chain)
        torch.set_num_threads(3)
        together = recursions.posterior(*chain)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(alone, together):
        assert torch.equal(one, other)


def test_python_threads_can_share_the_kernels():
    chain = random_chain(8, 200, (6,), ragged=True)
    alone = recursions.posterior(*chain)
    with ThreadPoolExecutor(4) as pool:
        for each in pool.map(lambda _: recursions.posterior(*chain), range(20)):
            for one, other in zip(alone, each):
                assert torch.equal(one, other)


# Bad arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-15)], ids=str)
def test_the_exponential_of_the_kernels(dtype, tolerance):
    """From the smallest normal number to one; at the ends, and where the series begins anew."""
    compiled = pytest.importorskip("pyrohmm.ops._numba_math", exc_type=ImportError)
    evaluate = compiled._exp_single if dtype is np.float32 else compiled._exp_double
    floor = math.log(np.finfo(dtype).tiny)
    points = np.concatenate([np.linspace(floor, 0, 999), -np.log(2) * (np.arange(60) + 0.5)])
    points = points.astype(dtype)
    found = np.array([evaluate(x) for x in points[points >= floor]])
    expected = np.exp(points[points >= floor].astype(np.float64))
    assert np.abs(found / expected - 1).max() <= tolerance
    assert np.isnan(evaluate(dtype(np.nan)))
