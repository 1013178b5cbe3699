"""Random small models, whatever they are made of, against the sum over all paths.

A case is drawn from its seed: states, lengths, emission, zeros, parameters per step or per
sequence, missing steps and components, labels. Parameters are NumPy arrays ``(*b, 1|T, K, ...)``,
where b is empty or broadcasts with the sequences; log-densities are SciPy's. What fails says its
seed: ``check(seed, directory)`` is that case alone.
"""

import contextlib
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import oracle
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyrohmm import (
    HMM,
    HSMM,
    BlockHMM,
    ContinuousTimeHMM,
    FactorialHMM,
    Filter,
    SecondOrderHMM,
    load_hmm,
    queries,
    recursions,
    save,
)
from pyrohmm.chains import ProductChain
from pyrohmm.distributions import AutoregressiveCategorical, AutoregressiveNormal
from pyrohmm.distributions.observation import Streams, Tied
from pyrohmm.ops import backends, blocks
from pyrohmm.ops.dense import chain as chains

NAN = np.nan

# Emissions ---------------------------------------------------------------------------------------


class Symbols:
    """Categorical, often with symbols that a state never emits."""

    event = ()

    def __init__(self, rng, shape):
        self.logs = log_rows(rng, (*shape, int(rng.integers(1, 5))), zeros=rng.random() < 0.5)

    def density(self, values):
        hit = values[..., None, None] == np.arange(self.logs.shape[-1])  # nowhere if it is NaN
        return np.where(hit, self.logs, 0.0).sum(-1)

    def sample_emission(self, rng, place):
        return draw(rng, at(self.logs, place, 1))

    def any_value(self, rng):
        return rng.integers(self.logs.shape[-1])

    def build(self, convert):
        return dist.Categorical(logits=convert(self.logs))


class Components:
    """Components that are independent; one of them alone may be a scalar."""

    def __init__(self, rng, shape, dim):
        self.event = (dim,) if dim else ()
        self.arrays = self.parameters(rng, (*shape, max(dim, 1)))

    def density(self, values):
        each = values[..., None, :] if self.event else values[..., None, None]
        known = ~np.isnan(each)
        scores = self.scores(np.where(known, each, 0.0), *self.arrays)
        return np.where(known, scores, 0.0).sum(-1)

    def sample_emission(self, rng, place):
        drawn = self.drawn(rng, *(at(array, place, 1) for array in self.arrays))
        return drawn if self.event else drawn[0]

    def build(self, convert):
        if self.event:
            return self.family(*(convert(array) for array in self.arrays)).to_event(1)
        return self.family(*(convert(array[..., 0]) for array in self.arrays))


class Normals(Components):
    """Normal components."""

    family = dist.Normal

    def parameters(self, rng, shape):
        return rng.normal(size=shape) * 2, rng.uniform(0.3, 2.0, size=shape)

    def scores(self, values, loc, scale):
        return stats.norm.logpdf(values, loc, scale)

    def drawn(self, rng, loc, scale):
        return rng.normal(loc, np.broadcast_to(scale, loc.shape))

    def any_value(self, rng):
        return rng.normal(size=self.event) * 20


class Spherical(Normals):
    """Normal components of one variance."""

    def parameters(self, rng, shape):
        return rng.normal(size=shape) * 2, rng.uniform(0.3, 2.0, size=(*shape[:-1], 1))


class Intervals(Components):
    """Uniform components, in each state over its own interval; the first state's has them all."""

    family = dist.Uniform

    def parameters(self, rng, shape):
        low = rng.uniform(-3.0, 2.0, size=shape)
        high = low + rng.uniform(0.5, 4.0, size=shape)
        low[..., 0, :], high[..., 0, :] = -10.0, 10.0
        return low, high

    def scores(self, values, low, high):
        inside = (low <= values) & (values < high)
        return np.where(inside, -np.log(high - low), -np.inf)

    def drawn(self, rng, low, high):
        return rng.uniform(low, high)

    def any_value(self, rng):
        return rng.uniform(-9.0, 9.0, size=self.event)


class Flags(Components):
    """Zeros and ones."""

    family = dist.Bernoulli

    def parameters(self, rng, shape):
        probs = rng.uniform(0.05, 0.95, size=shape)
        sure = rng.random(shape) < rng.choice([0.0, 0.3])
        return (np.where(sure, probs.round(), probs),)

    def scores(self, values, probs):
        return stats.bernoulli.logpmf(values, probs)

    def drawn(self, rng, probs):
        return (rng.random(probs.shape) < probs).astype(float)

    def any_value(self, rng):
        return rng.integers(2, size=self.event).astype(float)


class Counts(Components):
    """Poisson counts."""

    family = dist.Poisson

    def parameters(self, rng, shape):
        return (rng.uniform(0.1, 8.0, size=shape),)

    def scores(self, values, rate):
        return stats.poisson.logpmf(values, rate)

    def drawn(self, rng, rate):
        return rng.poisson(rate).astype(float)

    def any_value(self, rng):
        return rng.integers(60, size=self.event).astype(float)


class Covariances:
    """Normal vectors with a covariance for each state, or with one for all."""

    def __init__(self, rng, shape, dim, tied):
        self.event = (dim,)
        self.loc = rng.normal(size=(*shape, dim)) * 2
        root = rng.normal(size=(*shape[:-1], 1 if tied else shape[-1], dim, dim))
        self.covariance = root @ root.swapaxes(-1, -2) + 0.3 * np.eye(dim)

    def density(self, values):
        values = values[..., None, :]
        batch = np.broadcast_shapes(values.shape, self.loc.shape)[:-1]
        scores = np.zeros(batch)
        for place in np.ndindex(batch):
            value = at(values, place, 1)
            known = ~np.isnan(value)
            if known.any():
                scores[place] = stats.multivariate_normal.logpdf(
                    value[known],
                    at(self.loc, place, 1)[known],
                    at(self.covariance, place, 2)[np.ix_(known, known)],
                )
        return scores

    def sample_emission(self, rng, place):
        return rng.multivariate_normal(at(self.loc, place, 1), at(self.covariance, place, 2))

    def any_value(self, rng):
        return rng.normal(size=self.event) * 20

    def build(self, convert):
        # not the covariance: its gradient need not be symmetric, but must be finite all the same
        return dist.MultivariateNormal(convert(self.loc), convert(self.covariance))


class Mixtures:
    """Mixtures of normal vectors; a weight may be zero."""

    def __init__(self, rng, shape, dim):
        count = int(rng.integers(1, 4))
        self.event = (dim,)
        self.weights = log_rows(rng, (*shape, count), zeros=rng.random() < 0.3)
        self.loc = rng.normal(size=(*shape, count, dim)) * 2
        self.scale = rng.uniform(0.3, 2.0, size=(*shape, count, dim))

    def density(self, values):
        each = values[..., None, None, :]
        known = ~np.isnan(each)
        scores = stats.norm.logpdf(np.where(known, each, 0.0), self.loc, self.scale)
        parts = np.where(known, scores, 0.0).sum(-1) + self.weights
        return np.logaddexp.reduce(parts, -1)

    def sample_emission(self, rng, place):
        part = draw(rng, at(self.weights, place, 1))
        return rng.normal(at(self.loc, place, 2)[part], at(self.scale, place, 2)[part])

    def any_value(self, rng):
        return rng.normal(size=self.event) * 20

    def build(self, convert):
        return dist.MixtureSameFamily(
            dist.Categorical(logits=convert(self.weights)),
            dist.Normal(convert(self.loc), convert(self.scale)).to_event(1),
        )


class Beside:
    """Several emissions side by side."""

    def __init__(self, parts):
        self.parts = parts
        self.widths = [part.event[0] if part.event else 1 for part in parts]
        self.event = (sum(self.widths),)

    def density(self, values):
        pieces = np.split(values, np.cumsum(self.widths)[:-1], -1)
        return sum(
            part.density(piece if part.event else piece[..., 0])
            for part, piece in zip(self.parts, pieces)
        )

    def sample_emission(self, rng, place):
        return np.hstack([part.sample_emission(rng, place) for part in self.parts]).astype(float)

    def any_value(self, rng):
        return np.hstack([part.any_value(rng) for part in self.parts]).astype(float)

    def build(self, convert):
        return Streams([part.build(convert) for part in self.parts])


class Shared:
    """States that share emissions."""

    def __init__(self, base, index):
        self.base, self.index, self.event = base, index, base.event

    def density(self, values):
        return self.base.density(values)[..., self.index]

    def sample_emission(self, rng, place):
        return self.base.sample_emission(rng, (*place[:-1], self.index[place[-1]]))

    def any_value(self, rng):
        return self.base.any_value(rng)

    def build(self, convert):
        return Tied(self.base.build(convert), torch.as_tensor(self.index))


def simple(rng, shape):
    """An emission that is not made of others."""
    dim = int(rng.integers(1, 4))
    return [
        lambda: Symbols(rng, shape),
        lambda: Flags(rng, shape, dim),
        lambda: Normals(rng, shape, 0),
        lambda: Normals(rng, shape, dim),
        lambda: Spherical(rng, shape, dim),
        lambda: Covariances(rng, shape, dim, tied=False),
        lambda: Covariances(rng, shape, dim, tied=True),
        lambda: Mixtures(rng, shape, dim),
        lambda: Counts(rng, shape, 0),
        lambda: Counts(rng, shape, dim),
        lambda: Intervals(rng, shape, 0),
        lambda: Intervals(rng, shape, dim),
    ][rng.integers(12)]()


def shared(rng, shape, make):
    distinct = int(rng.integers(1, shape[-1] + 1))
    more = rng.integers(distinct, size=shape[-1] - distinct)
    index = rng.permutation(np.append(np.arange(distinct), more).astype(int))
    return Shared(make(rng, (*shape[:-1], distinct)), index)


def beside(rng, shape, make):
    return Beside([make(rng, shape) for _ in range(rng.integers(1, 4))])


def any_emission(rng, shape):
    """Symbols and other plain ones mostly; what is made of others, also of what is so itself."""
    return [
        lambda: Symbols(rng, shape),
        *[lambda: simple(rng, shape)] * 6,
        lambda: shared(rng, shape, simple),
        lambda: beside(rng, shape, simple),
        lambda: shared(rng, shape, lambda *inner: beside(*inner, simple)),
        lambda: beside(rng, shape, lambda *inner: shared(*inner, simple)),
    ][rng.integers(11)]()


# Chances -----------------------------------------------------------------------------------------


def log_rows(rng, shape, zeros=False, allowed=None):
    """Logarithms of rows that sum to one; with ``zeros`` a part of them never happens."""
    if allowed is None:
        allowed = rng.random(shape) < 0.6 if zeros else np.ones(shape, bool)
        np.put_along_axis(allowed, rng.integers(shape[-1], size=(*shape[:-1], 1)), True, -1)
    rows = rng.gamma(1.0, size=shape) + 1e-3
    rows = np.where(allowed, rows, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(rows / rows.sum(-1, keepdims=True))


def transition_matrix(rng, shape):
    """Transitions: dense, left to right, banded, or with holes."""
    square = np.ones(shape[-2:], bool)
    kind = rng.integers(5)
    if kind == 0:
        return log_rows(rng, shape, zeros=True)
    if kind == 1:
        return log_rows(rng, shape, allowed=np.broadcast_to(np.triu(square), shape))
    if kind == 2:
        return log_rows(rng, shape, allowed=np.broadcast_to(np.tril(np.triu(square, -1), 1), shape))
    return log_rows(rng, shape)


def draw(rng, logs):
    return int(rng.choice(len(logs), p=np.exp(logs)))


def at(array, place, dims):
    """Entry ``place`` of an array with ``dims`` more dimensions, whose batch broadcasts."""
    sizes = array.shape[: array.ndim - dims]
    return array[tuple(0 if size == 1 else i for i, size in zip(place[-len(sizes) :], sizes))]


# Cases -------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What the package is given, and what the oracle is."""

    parameters: dict[str, Any]  # of HMM, tensors; they ask for gradients
    leaves: list[torch.Tensor]  # the parameters of the emission
    labels: torch.Tensor | None
    values: torch.Tensor
    emission: Any
    symbols: np.ndarray  # clean values
    initial: np.ndarray
    transition: np.ndarray
    free: np.ndarray  # log-likelihood before labels are known
    likelihood: np.ndarray  # and after
    lengths: np.ndarray
    known: np.ndarray  # (*B, T), steps that exist and are observed


def make_case(seed) -> Case:
    rng = np.random.default_rng(seed)
    num_states, number = int(rng.choice([1, 2, 2, 3, 3, 4, 4])), int(rng.integers(1, 5))
    lengths = rng.integers(1, rng.choice([2, 6, 6, 6]), size=number)
    gaps = rng.random() < 0.4  # some steps are not observed
    moving, changing = rng.random(2) < 0.2  # parameters per step
    steps = int(lengths.max()) + int((gaps or moving or changing) and rng.random() < 0.3)
    alone = number == 1 and rng.random() < 0.4  # without a dimension of sequences
    leads = [()] * 3
    if not alone and rng.random() < 0.3:
        copies = int(rng.integers(1, 4))
        kinds = [(), (copies, 1), (copies, 1), (number,), (copies, number)]
        leads = [kinds[i] for i in rng.integers(len(kinds), size=3)]

    initial = log_rows(rng, (*leads[0], num_states), zeros=rng.random() < 0.4)
    size = (*leads[1], steps - 1 if moving else 1, num_states, num_states)
    transition = transition_matrix(rng, size)
    emission = any_emission(rng, (*leads[2], steps if changing else 1, num_states))

    states = paths(rng, initial, transition, number, steps)
    foreign = rng.random() < 0.3  # values that the model need not be able to emit
    values = np.array(
        [
            [
                emission.any_value(rng) if foreign and rng.random() < 0.5
                else emission.sample_emission(rng, (0, n, t, states[n, t]))
                for t in range(steps)
            ]
            for n in range(number)
        ]
    )  # fmt: skip
    exists = np.arange(steps) < lengths[:, None]
    share = rng.choice([0.0, 0.6, 0.6, 0.6]) if gaps else 1.0
    observed = rng.random((number, steps)) < share
    if emission.event and rng.random() < 0.4:
        values = np.where(rng.random(values.shape) < rng.choice([0.3, 0.3, 1.0]), NAN, values)
    known = exists & observed
    junk = [-7, 99, 3] if values.dtype.kind == "i" else [NAN, -7.5, 1e300, np.inf, 0.0]
    hidden = ~known.reshape(known.shape + (1,) * len(emission.event))
    given = np.where(hidden, rng.choice(junk, size=values.shape), values)

    labels, allowed = make_labels(rng, states, exists, num_states)
    free = np.where(known[..., None], emission.density(values), 0.0)
    likelihood = np.where(allowed, free, -np.inf)
    if alone:
        lengths, observed, given, known = lengths[0], observed[0], given[0], known[0]
        free, likelihood = free[0], likelihood[0]
        labels = None if labels is None else labels[0]

    leaves = []

    def convert(array):
        """A tensor that asks for gradients, without the dimension of steps if that is one."""
        array = array if changing else array.squeeze(len(leads[2]))
        leaves.append(torch.tensor(array, requires_grad=True))
        return leaves[-1]

    matrix = transition if moving else transition.squeeze(len(leads[1]))
    parameters = {
        "log_initial": torch.tensor(initial, requires_grad=True),
        "log_transition": torch.tensor(matrix, requires_grad=True),
        "emission": emission.build(convert),
        "lengths": torch.tensor(lengths),
        "observed": torch.tensor(observed) if gaps else None,
        "transition_per_step": bool(moving),
        "emission_per_step": bool(changing),
    }
    labels = None if labels is None else torch.tensor(labels)
    return Case(
        parameters, leaves, labels, torch.tensor(given), emission, values,
        initial, transition, free, likelihood, lengths, known,
    )  # fmt: skip


def paths(rng, initial, transition, number, steps):
    """States ``(N, T)`` drawn from the chain; from its first copy, if there are several."""
    states = np.zeros((number, steps), int)
    for n in range(number):
        states[n, 0] = draw(rng, at(initial, (0, n), 1))
        for t in range(1, steps):
            states[n, t] = draw(rng, at(transition, (0, n, t - 1), 2)[states[n, t - 1]])
    return states


def make_labels(rng, states, exists, num_states):
    """Labels as integers or as sets, anything in the padding; and which states they allow."""
    kind = rng.integers(12)
    allowed = np.ones((*states.shape, num_states), bool)
    if kind < 4:
        return None, allowed
    right = kind < 10  # the others may be impossible
    states = states if right else rng.integers(num_states, size=states.shape)
    if kind % 2:  # integers, some of them unknown
        unknown = rng.random(states.shape) < rng.choice([0.0, 0.5, 1.0])
        labels = np.where(unknown, -1, states)
        allowed = (labels[..., None] == np.arange(num_states)) | unknown[..., None]
        labels = np.where(exists, labels, rng.integers(-9, 9, size=states.shape))
    else:
        labels = rng.random(allowed.shape) < rng.choice([0.0, 0.5])
        np.put_along_axis(labels, states[..., None], True, -1)
        allowed = labels
        labels = np.where(exists[..., None], labels, rng.random(allowed.shape) < 0.3)
    return labels, allowed | ~exists[..., None]


def build(case, validate_args=True):
    hmm = HMM(**case.parameters, validate_args=validate_args)
    return hmm if case.labels is None else hmm.restrict(case.labels)


# Properties ---------------------------------------------------------------------------------------


def assert_close(actual, expected, tolerance=1e-8):
    """Equal in shape and value, without NaN; the densities themselves are exact to 1e-9."""
    actual = actual.detach().numpy()
    assert actual.shape == np.shape(expected)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=False)


def check(seed, directory):
    """Hold one case against the table of its paths."""
    case = make_case(seed)
    pyro.set_rng_seed(seed)
    chain = (case.initial, case.transition, case.likelihood, case.lengths)
    batch, single = oracle.one_by_one(*chain)
    so_far = np.array([oracle.evidence_so_far(*one) for one in single]).reshape(*batch, -1)
    hmm = build(case)
    where = first_conflict(case, so_far[..., -1])
    if where is not None:
        step = int(np.isneginf(so_far[where]).argmax())
        check_conflict(hmm, case.values, [*where, step])
        hmm = build(case, validate_args=False)
    if is_outside(hmm, case) or np.isneginf(so_far[..., -1]).any():
        hmm = build(case, validate_args=False)
    answer = oracle.for_each(oracle.by_paths, *chain)
    check_methods(hmm, case, answer)
    check_gradients(hmm, case, answer)
    check_paths(hmm, case, batch, single, answer)
    check_queries(hmm, case, batch, single, so_far)
    check_observations(hmm, case, answer)
    check_saved(hmm, case.values, directory)
    if case.labels is None:
        check_stream(hmm, case, answer)
        check_forecast(hmm, case, answer)


def is_outside(hmm, case):
    """Whether it refuses a value as outside of all supports: then no state gives it at a step."""
    try:
        hmm.log_prob(case.values)
        return False
    except ValueError as error:
        message = str(error)
    never = np.isneginf(np.asarray(case.likelihood)).all(-1)
    exists = np.arange(never.shape[-1]) < np.asarray(case.lengths)[..., None]
    assert "must lie in the support" in message
    assert (never & exists).any()
    return True


def first_conflict(case, evidence):
    """The first sequence that labels make impossible, if there is one."""
    _, free = oracle.one_by_one(case.initial, case.transition, case.free, case.lengths)
    possible = np.array([oracle.evidence_so_far(*one)[-1] for one in free]) > -np.inf
    wrong = np.argwhere(np.isneginf(evidence) & possible.reshape(evidence.shape))
    return tuple(wrong[0].tolist()) if len(wrong) else None


def check_conflict(hmm, values, where):
    *sequence, step = where
    words = f"step {step}. "
    if sequence:
        words = f"sequence {sequence[0] if len(sequence) == 1 else tuple(sequence)}, {words}"
    methods = ["log_prob", "posterior", "expected_counts", "filtered", "viterbi", "sample_states"]
    for method in [*methods, "posterior_states"]:
        with pytest.raises(ValueError, match="labels must leave a path") as caught:
            getattr(hmm, method)(values)
        assert words in str(caught.value)


def check_methods(hmm, case, answer):
    assert hmm.batch_shape == answer.evidence.shape
    assert_close(hmm.log_prob(case.values), answer.evidence)
    found = hmm.posterior(case.values)
    assert_close(found.log_evidence, answer.evidence)
    assert_close(found.state_probs, answer.states)
    assert_close(found.transitions, answer.transitions.sum(-3))
    assert_close(hmm.filtered(case.values), answer.filtered)
    counts = hmm.expected_counts(case.values)
    assert_close(counts.log_evidence, answer.evidence)
    assert_close(counts.state_probs, answer.states)
    assert_close(
        counts.counts["log_initial"], sum_over_sequences(answer.states[..., 0, :], case.initial, 1)
    )
    wanted = sum_over_sequences(answer.transitions, case.transition, 3)
    pairs = counts.counts["log_transition"]
    assert_close(pairs if pairs.dim() == wanted.ndim else pairs.unsqueeze(-3), wanted)


def sum_over_sequences(counts, parameter, dims):
    """Sum over the sequences that share a parameter, whose last ``dims`` dimensions are its own."""
    lead = parameter.shape[: parameter.ndim - dims]
    counts = counts.sum(tuple(range(counts.ndim - dims - len(lead))))
    return counts.sum(tuple(i for i, size in enumerate(lead) if size == 1), keepdims=True)


def check_gradients(hmm, case, answer):
    """Those by the logarithms are expected counts; all are finite."""
    leaves = [hmm.log_initial, hmm.log_transition, *case.leaves]
    total = hmm.log_prob(case.values).sum()
    initial, transition, *others = torch.autograd.grad(
        total, leaves, allow_unused=True, materialize_grads=True
    )
    assert_close(initial, sum_over_sequences(answer.states[..., 0, :], case.initial, 1))
    expected = sum_over_sequences(answer.transitions, case.transition, 3)
    assert_close(transition, expected.reshape(transition.shape))
    assert all(bool(gradient.isfinite().all()) for gradient in others)
    if isinstance(case.emission, Symbols):
        logs = case.emission.logs  # (*b, 1|T, K, V)
        emitted = case.symbols[..., None, None] == np.arange(logs.shape[-1])
        known = case.known[..., None, None]
        counts = answer.states[..., None] * (emitted & known)  # (*B, T, K, V)
        if logs.shape[-3] == 1:
            counts = counts.sum(-3, keepdims=True)
        counts = sum_over_sequences(counts, logs, 3)
        counts -= np.exp(logs) * counts.sum(-1, keepdims=True)  # logits are normalised
        assert_close(others[0], counts.reshape(others[0].shape))


def check_paths(hmm, case, batch, single, answer):
    """Paths that are found or drawn are allowed, and those of Viterbi are the best."""
    possible = np.isfinite(answer.evidence)
    best = hmm.viterbi(case.values).numpy()
    assert best.shape == (*batch, hmm.num_steps)
    drawn = hmm.sample_states(case.values, (3,)).numpy()
    assert drawn.shape == (3, *batch, hmm.num_steps)
    for place, one in zip(np.ndindex(batch), single):
        length = int(one[-1])
        for path in (best[place], *drawn[:, *place]):
            assert (path[length:] == 0).all()
        if possible[place]:
            found = np.stack([best[place], *drawn[:, *place]])[:, :length]
            scores = oracle.joint(*one[:-1], found)
            assert (scores > -np.inf).all()
            np.testing.assert_allclose(scores[0], answer.best[place], rtol=1e-8)
    states = torch.randint(hmm.num_states, (*batch, hmm.num_steps))
    scores = [
        oracle.joint(*one[:-1], states[place].numpy()[None, : int(one[-1])])[0]
        for place, one in zip(np.ndindex(batch), single)
    ]
    assert_close(hmm.log_joint(case.values, states), np.reshape(scores, batch))


def check_best_and_entropy(hmm, case, batch, single, count):
    found, scores = (part.detach() for part in queries.k_best(hmm, case.values, count))
    expected = [oracle.best_scores(*one, count) for one in single]
    assert_close(scores, np.reshape(expected, (*batch, count)))
    for place, one in zip(np.ndindex(batch), single):
        real = scores[place].isfinite().numpy()
        rows = found[place].numpy()[real][:, : int(one[-1])]
        assert len(np.unique(rows, axis=0)) == len(rows)
        again = oracle.joint(*one[:-1], rows)
        np.testing.assert_allclose(again, scores[place].numpy()[real], rtol=1e-8, atol=1e-8)
    entropies = np.reshape([oracle.entropy(*one) for one in single], batch)
    assert_close(queries.path_entropy(hmm, case.values), entropies)


def check_queries(hmm, case, batch, single, so_far):
    """Of what is possible; of what is not nothing follows, and only the prediction is known."""
    count = 1 + len(so_far) % 6
    if np.isneginf(so_far[..., -1]).any():
        for query in (partial(queries.k_best, count=count), queries.path_entropy):
            with pytest.raises(ValueError, match="probability zero"):
                query(hmm, case.values)
    else:
        check_best_and_entropy(hmm, case, batch, single, count)
    before = np.concatenate([np.zeros_like(so_far[..., :1]), so_far[..., :-1]], -1)
    lost = np.isneginf(so_far)
    with np.errstate(invalid="ignore"):
        steps = np.where(lost, -np.inf, so_far - before)
    predicted = queries.predictive_log_prob(hmm, case.values)
    known = np.broadcast_to(case.known, steps.shape)
    assert_close(predicted[torch.tensor(known)], steps[known])
    if case.labels is None:
        assert (predicted.detach().numpy()[~known] == 0).all()


def check_observations(hmm, case, answer):
    """What is missing is filled in, and only that; states are mixed by their probabilities."""
    if not np.isfinite(answer.evidence).all():
        return
    batch, event = hmm.batch_shape, case.emission.event
    filled = queries.impute(hmm, case.values, (2,))
    assert filled.shape == (2, *batch, hmm.num_steps, *event)
    exists = torch.arange(hmm.num_steps) < hmm.lengths.unsqueeze(-1)
    missing = exists & ~torch.tensor(case.known)
    wanted = case.values.expand_as(filled)
    kept = ~missing.expand(filled.shape[: filled.dim() - len(event)])
    torch.testing.assert_close(filled[kept], wanted[kept], rtol=0, atol=0, equal_nan=True)
    if case.labels is None:
        complete = HMM(**case.parameters | {"observed": None}, validate_args=False)
        whole = filled.narrow(filled.dim() - 1 - len(event), 0, complete.num_steps)
        assert complete.log_prob(whole).isfinite().all()
    marginals = queries.observation_marginals(hmm, case.values)
    assert marginals.batch_shape == (*batch, hmm.num_steps)
    if case.known.all() and not case.values.isnan().any():
        with np.errstate(divide="ignore"):
            each = np.log(answer.states) + case.free
        assert_close(marginals.log_prob(case.values), np.logaddexp.reduce(each, -1))


def check_stream(hmm, case, answer):
    """Step by step, the padding as steps without observation."""
    stream, event, surprise = Filter(hmm), case.emission.event, []
    values, known = case.values.expand(*hmm.batch_shape, hmm.num_steps, *event), case.known
    for t, value in enumerate(values.movedim(-1 - len(event), 0)):
        states = stream.update(value, torch.tensor(known[..., t]))
        exists = np.broadcast_to(t < case.lengths, hmm.batch_shape)
        assert_close(states[torch.tensor(exists)], answer.filtered[..., t, :][exists])
        surprise.append(stream.surprise)
    assert_close(stream.log_evidence, answer.evidence)
    chunk = Filter(hmm)
    torch.testing.assert_close(chunk.update(values, torch.tensor(known))[..., -1, :], states)
    torch.testing.assert_close(chunk.surprise, torch.stack(surprise, -1))
    assert chunk.num_steps == stream.num_steps == hmm.num_steps


def check_forecast(hmm, case, answer):
    """Two steps on from the filtered states; samples have the shapes of their batch."""
    batch, steps, event = hmm.batch_shape, hmm.num_steps, case.emission.event
    values, states = hmm.sample_with_states((2,))
    assert values.shape == (2, *batch, steps, *event)
    assert states.shape == (2, *batch, steps)
    if hmm.transition_per_step or hmm.emission_per_step or not np.isfinite(answer.evidence).all():
        return
    last = np.broadcast_to(case.lengths - 1, batch)[..., None, None]
    now = np.take_along_axis(answer.filtered, last, -2)
    matrix = np.exp(case.transition).squeeze(-3)
    ahead = np.concatenate([now @ matrix, now @ matrix @ matrix], -2)
    with np.errstate(divide="ignore"):
        wanted = np.logaddexp.reduce(np.log(ahead) + case.emission.density(case.symbols[:, :1]), -1)
    if not np.isnan(case.symbols[:, :1]).any():
        value = torch.tensor(case.symbols[0 if not batch else slice(None), :1])
        value = value.expand(*value.shape[: len(batch) and 1], 2, *event)
        assert_close(hmm.forecast(case.values, 2).log_prob(value), wanted.reshape(*batch, 2))


def check_saved(hmm, values, directory):
    """An HMM that was saved and loaded answers the same, but for the order of sums."""
    save(hmm, directory)
    found, wanted = load_hmm(directory).posterior(values), hmm.posterior(values)
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-12, atol=1e-14)


# All of them -------------------------------------------------------------------------------------


def check_all(seeds, directory):
    """Check every seed, the odd ones without compiled kernels; then name those that failed."""
    failed = {}
    for seed in seeds:
        with backends.use(backends.TORCH) if seed % 2 else contextlib.nullcontext():
            try:
                check(seed, directory / str(seed % 40))
            except (Exception, pytest.fail.Exception) as error:  # the latter is no Exception
                failed[seed] = error
    if failed:
        first = next(iter(failed))
        raise AssertionError(f"seeds {list(failed)} failed; here is {first}") from failed[first]


@pytest.mark.parametrize("seeds", [(0, 130), pytest.param((130, 10_000), marks=pytest.mark.slow)])
def test_random_models_are_right(seeds, tmp_path):
    check_all(range(*seeds), tmp_path)


# Long sums in single precision -------------------------------------------------------------------


def long_states(count, steps, seed=0):
    """Paths of four states that stay with 0.94."""
    rng = np.random.default_rng(seed)
    new = rng.integers(4, size=(count, steps))
    changed = np.where(rng.random((count, steps)) < 0.06, np.arange(steps), 0)
    return torch.tensor(np.take_along_axis(new, np.maximum.accumulate(changed, 1), 1))


def rows(*shape, seed=1):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


STAY = (torch.eye(4) * 0.92 + 0.02).double().log()
EVEN = torch.full((4,), 0.25).double().log()
MEANS = torch.tensor([-6.0, -2.0, 2.0, 6.0]).double().unsqueeze(-1)
ROOT = torch.tensor([[1.2, 0.0], [0.3, 1.1]]).double()
TABLE = rows(4, 6).log_softmax(-1)
LEVELS = torch.arange(4).unsqueeze(-1)
# data of states and mean; parameters of the emission; the emission of them
LONG_EMISSIONS = {
    "diagonal": (
        lambda z, m: m + MEANS[z] + 1.2 * rows(*z.shape, 1),
        lambda m: (MEANS + m, torch.full((4, 1), 1.2)),
        lambda loc, scale: dist.Normal(loc, scale).to_event(1),
    ),
    "full": (
        lambda z, m: m + MEANS[z] + rows(*z.shape, 2) @ ROOT.mT,
        lambda m: (MEANS.repeat(1, 2) + m, ROOT.repeat(4, 1, 1)),
        lambda loc, root: dist.MultivariateNormal(loc, scale_tril=root),
    ),
    "tied": (
        lambda z, m: m + MEANS[z] + rows(*z.shape, 2) @ ROOT.mT,
        lambda m: (MEANS.repeat(1, 2) + m, ROOT),
        lambda loc, root: dist.MultivariateNormal(loc, scale_tril=root),
    ),
    "mixture": (
        lambda z, m: m + MEANS[z] + rows(*z.shape, 2),
        lambda m: (rows(4, 3), MEANS.unsqueeze(1) + m + rows(4, 3, 2), torch.ones(4, 3, 2)),
        lambda w, loc, scale: dist.MixtureSameFamily(
            dist.Categorical(logits=w), dist.Normal(loc, scale).to_event(1)
        ),
    ),
    "autoregressive": (
        lambda z, m: m + MEANS[z] + rows(*z.shape, 2) @ ROOT.mT,
        lambda m: (MEANS.repeat(1, 2) + m, ROOT.repeat(4, 1, 1), 0.01 * rows(4, 1, 2, 2)),
        lambda loc, root, weights: AutoregressiveNormal(
            dist.MultivariateNormal(loc, scale_tril=root),
            dist.MultivariateNormal(loc, scale_tril=root), weights,
        ),
    ),
    "poisson": (
        lambda z, m: torch.poisson(2.0 + 3 * z).unsqueeze(-1),
        lambda m: (2.0 + 3 * LEVELS + 0.1,),
        lambda rate: dist.Poisson(rate).to_event(1),
    ),
    "bits": (
        lambda z, m: (rows(*z.shape, 3) < (z.unsqueeze(-1) - 1.5)).double(),
        lambda m: (rows(4, 3) / 3 + LEVELS - 1.5,),
        lambda logits: dist.Bernoulli(logits=logits).to_event(1),
    ),
    "gamma": (
        lambda z, m: (1 + z.unsqueeze(-1)) * rows(*z.shape, 1).square() + 0.1,
        lambda m: (1.0 + LEVELS, torch.full((4, 1), 1.1)),
        lambda shape, rate: dist.Gamma(shape, rate).to_event(1),
    ),
    "symbols": (
        lambda z, m: (z + (rows(*z.shape) > 0)) % 6,
        lambda m: (TABLE,),
        lambda logits: dist.Categorical(logits=logits),
    ),
    "symbols in context": (
        lambda z, m: (z + (rows(*z.shape) > 0)) % 6,
        lambda m: (TABLE, rows(4, 6, 6)),
        lambda first, tables: AutoregressiveCategorical(
            dist.Categorical(logits=first), dist.Categorical(logits=tables)
        ),
    ),
}  # fmt: skip
PAIR = (torch.eye(2) * 0.9 + 0.05).double().log()
GAPS = torch.tensor([0.5, 1.0, 2.0, 1.0]).double()
# parameters of the chain, by the number of steps; the HMM of them, an emission and lengths
LONG_CHAINS = {
    "dense": (lambda steps: (EVEN, STAY), HMM),
    "by step": (
        lambda steps: (EVEN, STAY.repeat(steps - 1, 1, 1)), partial(HMM, transition_per_step=True)
    ),
    "segments": (
        lambda steps: (EVEN, STAY.clone().fill_diagonal_(-torch.inf).log_softmax(-1), rows(4, 5)),
        lambda initial, matrix, logs, emission, lengths: HSMM(
            initial, matrix, logs.log_softmax(-1), emission, lengths
        ),
    ),
    "second order": (
        lambda steps: (EVEN, STAY, (STAY + rows(4, 4, 4) / 9).log_softmax(-1)), SecondOrderHMM
    ),
    "product": (
        lambda steps: (EVEN[:2], EVEN[2:], PAIR, PAIR),
        lambda a, b, first, second, emission, lengths: FactorialHMM(
            [a.log_softmax(-1), b.log_softmax(-1)], [first, second], emission, lengths
        ),
    ),
    "rates": (
        lambda steps: (EVEN, STAY.exp() / 2),
        lambda initial, rates, emission, lengths: ContinuousTimeHMM(
            initial, rates - rates.sum(-1).diag_embed(), emission, lengths,
            GAPS[torch.arange(int(lengths.max())) % 4].cumsum(0),
        ),
    ),
    "blocks": (
        lambda steps: (EVEN, STAY),
        lambda initial, matrix, emission, lengths: BlockHMM(
            initial, matrix,
            emission.logits.mT[:, :2].unflatten(0, (2, 3)).log_softmax(1).flatten(0, 1),
            blocks.from_clusters(torch.arange(6) // 3, 2), lengths,
        ),
    ),
}  # fmt: skip


def check_long(chain, family, count, steps, weight, mean=5.0):
    """Evidence, expected transitions and gradients in float32 against float64."""
    torch.manual_seed(0)
    values_of, emission_of, emission = LONG_EMISSIONS[family]
    chain_of, build = LONG_CHAINS[chain]
    values = values_of(long_states(count, steps), mean)
    weights = rows(count).exp() if weight is None else torch.full((count,), weight)
    single, double = [], []
    for found, dtype in ((single, torch.float32), (double, torch.float64)):

        def arranged(tensor, dtype=dtype):
            return tensor.float().to(dtype) if tensor.dtype.is_floating_point else tensor

        leaves = [
            [arranged(part.detach()).clone().requires_grad_() for part in parts]
            for parts in (chain_of(steps), emission_of(mean))
        ]
        lengths = torch.full((count,), steps)
        hmm = build(*leaves[0], emission(*leaves[1]), lengths)
        evidence = hmm.log_prob(arranged(values))
        loss = (evidence * arranged(weights)).sum()
        found += [loss, *torch.autograd.grad(loss, [*leaves[0], *leaves[1]], allow_unused=True)]
        if chain == "dense":
            found.append(hmm.expected_counts(arranged(values)).counts["log_transition"])
    for place, (one, other) in enumerate(zip(single, double)):
        if other is not None:
            error = (one.double() - other).abs().max() / other.abs().max()
            assert error < 2e-5, (chain, family, count, steps, weight, place, error.item())


@pytest.mark.parametrize("family", LONG_EMISSIONS)
def test_gradients_of_emissions_are_right_over_many_steps_in_single_precision(family):
    check_long("dense", family, 10, 10_000, 1.1)


@pytest.mark.parametrize("chain", [name for name in LONG_CHAINS if name != "dense"])
def test_gradients_of_chains_are_right_over_many_steps_in_single_precision(chain):
    check_long(chain, "symbols", 300, 40, 1.1)


def test_gradients_are_right_over_many_steps_without_compiled_loops():
    with backends.use(backends.TORCH):
        check_long("dense", "diagonal", 2000, 50, 1.1)
        check_long("dense", "symbols", 2000, 50, 1.1)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 1.1, 1e-3, None])
@pytest.mark.parametrize("family", LONG_EMISSIONS)
def test_single_precision_is_right_over_up_to_ten_million_steps(family, weight):
    for mean in (0.0, 5.0, 1e3):
        for count, steps in ((1, 100), (1, 10_000), (10, 10_000), (1, 1_000_000), (100, 10_000)):
            check_long("dense", family, count, steps, weight, mean)
    check_long("dense", family, 1000, 10_000, weight)


def test_offsets_of_log_likelihoods_cost_no_digits_in_log_space():
    scores, offsets = 3 * rows(2000, 4), 1e4 * rows(2000, 1, seed=2).abs()
    rare = STAY.clone()
    rare[0, 1] = -800.0  # no number that is not a logarithm holds it

    def dense(matrix, seen):
        arguments = EVEN, matrix.unsqueeze(0), seen, torch.tensor([2000])
        chain = chains.grouped(chains.check_arguments(*arguments))
        value, gradient = recursions.solve(chain, None)
        return value.sum(), gradient(torch.ones_like(value))[1]

    def product(matrix, seen):
        table = matrix.clone().requires_grad_()
        half = torch.full((2,), 0.5).double().log()
        chain = ProductChain([half, half], [table, table])
        value = chain.log_evidence(seen, torch.tensor(2000))
        return value.detach(), torch.autograd.grad(value, table)[0]

    for evidence, logs in ((dense, rare), (product, PAIR)):
        found = [evidence(logs, seen) for seen in (scores, scores + offsets)]
        values, (plain, moved) = zip(*found)
        assert (moved - plain).abs().max() < 1e-11 * plain.abs().max()
        assert abs(values[1] - values[0] - offsets.sum()) < 1e-14 * values[1]
