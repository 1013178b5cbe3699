"""Properties of DenseHMM: its formulas written out, what it can express, and how it is fitted."""

import math

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine

from pyrohmm import (
    DenseHMM,
    GradientStep,
    MarginalModel,
    Sequences,
    dense,
    em,
    fit_em,
    fit_map,
    freeze,
    normal,
)

RADIAL = dense.rbf(1.0)
KERNELS = {
    "exponential": (dense.exponential, lambda u, v: math.exp(u @ v)),
    "sigmoid": (dense.sigmoid, lambda u, v: 1 / (1 + math.exp(-(u @ v)))),
    "relu": (dense.relu, lambda u, v: max(u @ v, 0.0) + 1e-6),
    "absolute": (dense.absolute, lambda u, v: abs(u @ v)),
    "rbf": (dense.rbf(0.6), lambda u, v: math.exp(-((u - v) @ (u - v)) / (2 * 0.36))),
}


def shares(kernel, rows, columns):
    """Kernel values over the sums of their rows, one number at a time."""
    table = [[kernel(row, column) for column in columns] for row in rows]
    return np.array([[each / sum(row) for each in row] for row in table])


def stationary_by_powers(matrix):
    return np.linalg.matrix_power(matrix, 4096)[0]


def embeddings_of(module):
    """A sample of the embeddings, by name, and their HMM."""
    trace = poutine.trace(module).get_trace(torch.tensor([3, 1]))
    values = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    return values, trace.nodes["_RETURN"]["value"]


def some_symbols(num_symbols=4, num_sequences=6, num_steps=9):
    values = torch.randint(num_symbols, (num_sequences, num_steps))
    values[:, 0] = torch.arange(num_sequences) % num_symbols  # each occurs
    lengths = torch.randint(1, num_steps + 1, (num_sequences,))
    observed = torch.rand(num_sequences, num_steps) < 0.9
    return Sequences(values, lengths, observed)


def assert_falls(losses, slack=1e-8):
    assert (losses.diff() <= slack * losses.abs().max()).all(), losses


# What it is


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 5, 2, 2), (4, 2, 3, 1), (2, 7, 1, 3)])
def test_probabilities_are_those_of_the_paper(name, sizes):
    """Eq. 2, one number at a time: rows of A leave, its columns are entered."""
    num_states, num_symbols, dim, symbol_dim = sizes
    kernel, plain = KERNELS[name]
    module = DenseHMM(num_states, num_symbols, dim, symbol_dim=symbol_dim, kernel=kernel)
    values, hmm = embeddings_of(module)
    z, u, z0, w, v = (
        values[one].double().numpy() for one in ("leave", "enter", "start", "emit", "symbol")
    )
    close = {"rtol": 1e-6, "atol": 1e-7}
    np.testing.assert_allclose(hmm.log_transition.exp(), shares(plain, z, u), **close)
    np.testing.assert_allclose(hmm.emission.probs, shares(plain, w, v), **close)
    np.testing.assert_allclose(hmm.log_initial.exp(), shares(plain, z0[None], u)[0], **close)


@pytest.mark.parametrize("name", KERNELS)
def test_one_embedding_for_each_state(name):
    """Learning Z and V only: A is a symmetric matrix, its rows normalised, so it is reversible."""
    kernel, plain = KERNELS[name]
    values, hmm = embeddings_of(DenseHMM(4, 5, 2, kernel=kernel, tied=True))
    assert set(values) == {"leave", "start", "symbol"}
    z, v, z0 = (values[one].numpy() for one in ("leave", "symbol", "start"))
    np.testing.assert_allclose(hmm.log_transition.exp(), shares(plain, z, z))
    np.testing.assert_allclose(hmm.emission.probs, shares(plain, z, v))
    np.testing.assert_allclose(hmm.log_initial.exp(), shares(plain, z0[None], z)[0])
    flow = hmm.stationary().unsqueeze(-1) * hmm.log_transition.exp()
    torch.testing.assert_close(flow, flow.mT)


def test_it_may_start_in_the_stationary_distribution():
    values, hmm = embeddings_of(DenseHMM(4, 3, 2, stationary=True))
    assert set(values) == {"leave", "enter", "emit", "symbol"}
    expected = stationary_by_powers(hmm.log_transition.exp().numpy())
    np.testing.assert_allclose(hmm.log_initial.exp(), expected, rtol=1e-9)


@pytest.mark.parametrize("flat", [True, False])
def test_priors_are_normal_or_flat(flat):
    module = DenseHMM(3, 4, 2, symbol_dim=1, scale=0.3, flat=flat)
    trace = poutine.trace(module).get_trace(torch.tensor([2]))
    trace.compute_log_prob()
    for name in ("leave", "enter", "start", "emit", "symbol"):
        site = trace.nodes[name]
        value = site["value"].numpy()
        expected = -0.5 * (value / 0.3) ** 2 - math.log(0.3) - 0.5 * math.log(2 * math.pi)
        np.testing.assert_allclose(site["log_prob"], 0.0 if flat else expected.sum())


# EM


@pytest.mark.parametrize(
    "options",
    [{"scale": 1.0}, {"flat": True}, {"tied": True}, {"stationary": True}, {"kernel": RADIAL}],
    ids=lambda options: next(iter(options)),
)
def test_em_never_lowers_the_log_joint_density(options):
    data = some_symbols()
    fit = fit_em(DenseHMM(3, 4, 2, **options), data, num_iterations=4, tolerance=None)
    assert_falls(fit.losses)
    assert fit.losses[0] - fit.losses[-1] > 1.0
    loss = -fit.hmm(data).log_prob(data.values).sum()
    if "flat" in options:
        torch.testing.assert_close(fit.losses[-1], loss)
    elif "scale" in options:
        prior = sum(
            torch.distributions.Normal(0, 1).log_prob(v).sum() for v in fit.parameters.values()
        )
        torch.testing.assert_close(fit.losses[-1], loss - prior)


@pytest.mark.parametrize("tied", [True, False])
def test_fishers_identity(tied):
    """The M-step's objective has the gradient of the evidence where the counts were found."""
    data = some_symbols()
    module = DenseHMM(3, 4, 2, tied=tied)
    values = {name: value.requires_grad_() for name, value in embeddings_of(module)[0].items()}
    hmm = poutine.condition(module, values)(data.lengths, data.observed)
    counts = hmm.expected_counts(data.values)
    leaves = list(values.values())
    evidence = hmm.log_prob(data.values).sum()
    expected = torch.autograd.grad(evidence, leaves, retain_graph=True)
    joint = em.expected_log_joint(hmm, counts, data.values)
    for one, two in zip(torch.autograd.grad(joint, leaves), expected):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_batched_restarts_of_em_are_single_fits():
    data = some_symbols()
    module = DenseHMM(3, 4, 2)
    samples = [embeddings_of(module)[0] for _ in range(3)]
    wide = {name: torch.stack([d[name] for d in samples]).unsqueeze(1) for name in samples[0]}
    options = {"num_iterations": 3, "tolerance": None}
    step = GradientStep(5, lambda leaves: torch.optim.Adam(leaves, lr=0.05))
    every = fit_em(module, data, start=wide, restarts=3, gradient_step=step, **options)
    for restart, sample in enumerate(samples):
        alone = fit_em(module, data, start=sample, gradient_step=step, **options)
        torch.testing.assert_close(every.restarts.losses[restart], alone.losses)


def test_a_stationary_distribution_that_rounding_takes_away_does_not_end_a_fit():
    """Runs of a hundred equal symbols: steps are tried at which no state is ever left."""
    runs = [[0] * 50 + [1] * 50, [1] * 60 + [0] * 40, [2] * 100]
    for seed in range(2):
        pyro.set_rng_seed(seed)
        module = DenseHMM(3, 3, 3, stationary=True, flat=True, scale=3.0)
        fit = fit_em(module, Sequences.from_list(runs), num_iterations=30)
        assert fit.losses.isfinite().all()
        assert_falls(fit.losses, slack=1e-5)


# Other fits


def test_a_dense_chain_under_numbers_is_fitted_by_em_and_map():
    """Both find two levels that alternate."""
    states = (torch.arange(40) // 2) % 2
    values = 3.0 * states + 0.5 * torch.randn(6, 40)
    data = Sequences(values, torch.full((6,), 40))
    module = DenseHMM(2, None, 1, emission=normal(0))
    fits = [
        fit_em(module, data),
        fit_map(MarginalModel(module), data, num_iterations=200, learning_rate=0.1, restarts=4),
    ]
    for fit in fits:
        means = fit.hmm(data).emission.mean.sort().values
        torch.testing.assert_close(means, torch.tensor([0.0, 3.0]), rtol=0.0, atol=0.3)


def test_any_embedding_may_be_held_constant():
    """As the paper's section 6 has it: learn Z and V, leave the others where they were drawn."""
    data = some_symbols()
    module = DenseHMM(3, 4, 2)
    held = {name: torch.randn(3, 2) for name in ("enter", "emit")}
    for name, value in held.items():
        freeze(module, name, value)
    fit = fit_em(module, data, num_iterations=3)
    assert set(fit.names) == {"module.leave", "module.start", "module.symbol"}
    assert_falls(fit.losses)
    hmm = fit.hmm(data)
    torch.testing.assert_close(
        hmm.log_transition, (fit.parameters["module.leave"] @ held["enter"].mT).log_softmax(-1)
    )


# What cannot be meant


def test_autocast_lowers_no_probability():
    """Products in bfloat16 would make rows that do not sum to one."""
    torch.set_default_dtype(torch.float32)  # of float64 autocast lowers nothing
    torch.manual_seed(0)
    module = DenseHMM(3, 5, 2)
    lengths, values = torch.tensor([4, 2]), torch.randint(5, (2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        hmm = module(lengths)
        evidence = hmm.log_prob(values)
    assert hmm.log_transition.dtype == evidence.dtype == module(lengths).log_transition.dtype
    assert hmm.log_transition.exp().sum(-1).sub(1).abs().max() < 1e-5
