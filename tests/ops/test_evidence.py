"""Evidence by loops over whole sequences: that of the recursions in torch, and its gradient."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pyrohmm import recursions
from pyrohmm.ops import backends

pytestmark = pytest.mark.skipif(not backends.has_numba(), reason="Numba is not installed")

CLOSE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
}


def loops():
    """The module of the compiled recursions."""
    return backends.compiled("dense._numba")


def logits(*shape, dtype=torch.float64, zeros=False, seed=0):
    """Log-probabilities; some of them are exactly zero if that is asked for."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    raw = torch.randn(*shape, generator=generator, dtype=torch.float64) * 2
    if zeros and shape[-1] > 1:
        banned = torch.rand(shape, generator=generator) < 0.3
        banned[..., 0] = False
        raw = raw.masked_fill(banned, -torch.inf)
    return raw.log_softmax(-1).to(dtype)


def case(count, steps, states, symbols, dtype, zeros=False, ragged=True):
    torch.manual_seed(count + steps)
    lengths = torch.randint(1, steps + 1, (count,)) if ragged else torch.full((count,), steps)
    lengths[0] = steps
    known = torch.rand(count, steps) < 0.8
    parts = [logits(states, dtype=dtype), logits(states, states, dtype=dtype, zeros=zeros)]
    table = logits(states, symbols, dtype=dtype, zeros=zeros, seed=1)
    return *parts, table, torch.randint(symbols, (count, steps)), lengths, known


def solved(initial, transition, table, symbols, lengths, known, weights, backend=None):
    """Evidence by symbols, and the gradient of its weighted sum."""
    inputs = [part.clone().requires_grad_() for part in (initial, transition, table)]
    with backends.use(backend or backends.NUMBA):
        value = recursions.log_evidence(
            inputs[0], inputs[1].unsqueeze(-3), inputs[2], lengths, symbols, known
        )
        return value.detach(), torch.autograd.grad(value, inputs, weights.to(value.dtype))


def check_solved(arguments, weights, **tolerance):
    """Evidence and gradients of the loops are those of torch."""
    found, expected = solved(*arguments, weights), solved(*arguments, weights, backends.TORCH)
    for ours, theirs in zip((found[0], *found[1]), (expected[0], *expected[1])):
        assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["positive", "hard zeros"])
@pytest.mark.parametrize(
    ("count", "steps", "states", "symbols"),
    [(1, 1, 1, 1), (1, 9, 3, 2), (3, 8, 5, 4), (15, 2, 2, 3), (16, 17, 4, 7), (33, 10, 9, 3),
     (70, 25, 16, 5), (40, 3, 33, 2)],
)  # fmt: skip
def test_evidence_of_symbols_is_that_of_torch(count, steps, states, symbols, zeros, dtype):
    """Few and many sequences, ragged and with gaps, in tiles and blocks that are not full."""
    arguments = case(count, steps, states, symbols, dtype, zeros)
    weights = torch.linspace(-1, 2, count, dtype=dtype)
    check_solved(arguments, weights, **CLOSE[dtype])


def test_symbols_that_all_but_exclude_states():
    """A chain that seldom leaves its state, and symbols that all but exclude the other states."""
    for stay in (1 - 1e-12, 1e-12):
        rest = (1 - stay) / 2
        transition = torch.full((3, 3), rest, dtype=torch.float64).fill_diagonal_(stay).log()
        table = torch.full((3, 3), 1e-40, dtype=torch.float64).fill_diagonal_(1 - 2e-40).log()
        symbols = torch.arange(3).repeat_interleave(30)[None]
        arguments = transition[0], transition, table, symbols, torch.tensor([90]), None
        check_solved(arguments, torch.ones(1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("nats", [1.0, 30.0, 740.0, 744.0, 800.0, 5000.0])
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_a_state_that_cannot_be_explains_more(dtype, nats):
    """The other state would do better, by so many nats in two steps; nothing leads to it."""
    never = torch.tensor(0.0, dtype=dtype).log()
    transition = torch.zeros(2, 2, dtype=dtype).fill_diagonal_(1.0).log()
    likelihood = torch.zeros(1, 64, 2, dtype=dtype)
    likelihood[..., 0] = -nats / 2
    initial = torch.stack([torch.zeros((), dtype=dtype), never])
    for requires in (False, True):
        likelihood = likelihood.detach().requires_grad_(requires)
        value = recursions.log_evidence(initial, transition[None], likelihood, torch.tensor([64]))
        assert_close(value.detach(), torch.tensor([-32.0 * nats], dtype=dtype))
    (gradient,) = torch.autograd.grad(value.sum(), likelihood)
    assert_close(gradient, torch.tensor([1.0, 0.0], dtype=dtype).expand(1, 64, 2))


@pytest.mark.parametrize("count", [1, 20])
def test_products_of_norms_do_not_underflow(count):
    """Symbols that are all but impossible where the chain is, step after step."""
    transition = torch.tensor([[1.0, 1e-300], [1e-300, 1.0]], dtype=torch.float64).log()
    table = torch.tensor([[1e-280, 1.0], [1.0, 1e-280]], dtype=torch.float64).log()
    symbols = torch.zeros(count, 9).long()
    symbols[:, ::2] = 1
    lengths = torch.full((count,), 9)
    arguments = torch.tensor([1.0, 0.0]).double().log(), transition, table, symbols, lengths, None
    check_solved(arguments, torch.ones(count), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["positive", "hard zeros"])
@pytest.mark.parametrize(
    ("count", "steps", "states"),
    [(1, 1, 2), (1, 40, 1), (1, 64, 3), (1, 333, 4), (5, 97, 3), (37, 11, 6)],
)
def test_few_and_many_sequences_in_each_layout(count, steps, states, zeros, dtype):
    """Symbols and log-likelihoods in both layouts, ragged and with gaps, with a weight each."""
    initial, transition, table, symbols, lengths, known = case(
        count, steps, states, 5, dtype, zeros
    )
    weights = torch.linspace(-1, 2, count, dtype=dtype)
    arguments = initial, transition, table, symbols, lengths, known
    check_solved(arguments, weights, **CLOSE[dtype])
    scores = table.T[symbols].masked_fill(~known.unsqueeze(-1), 0.0)
    for layout in (scores, scores.transpose(0, 1).contiguous().transpose(0, 1)):
        inputs = [part.clone().requires_grad_() for part in (initial, transition[None])]
        inputs.append(layout.requires_grad_())
        results = []
        for backend in (backends.NUMBA, backends.TORCH):
            with backends.use(backend):
                value = recursions.log_evidence(*inputs, lengths)
                results.append((value.detach(), *torch.autograd.grad(value, inputs, weights)))
        for ours, theirs in zip(*results):
            assert_close(ours, theirs, **CLOSE[dtype])


def test_sequences_that_underflow_are_computed_again_and_the_others_are_not(monkeypatch):
    """Hard zeros make one sequence impossible: -inf, with gradient zero; NaN stays its own."""
    again = []
    solve = recursions.solve

    def counted(chain, *arguments):
        again.append(chain.lengths.numel())
        return solve(chain, *arguments)

    monkeypatch.setattr(recursions, "solve", counted)
    transition = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    symbols = torch.tensor([[0, 0], [0, 1], [1, 1]] * 8)
    initial = torch.tensor([0.5, 0.5]).log()
    arguments = initial, transition, table, symbols, torch.full((24,), 2), None
    value, gradients = solved(*arguments, torch.ones(24))
    assert_close(value[:3], torch.tensor([0.5, 0.0, 0.5]).log())
    assert all(bool(part.isfinite().all()) for part in gradients)
    assert again == [24, 8]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("count", [3, 40])  # by states, and by sequences side by side
def test_separated_observations_stay_in_the_loops(monkeypatch, count, dtype):
    """States far apart, and transitions that never occur: nothing that matters is lost."""
    torch.manual_seed(count)
    matrix = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.1, 1e-300, 0.9]]).double()
    path = torch.zeros(count, 30).long()
    for t in range(1, 30):
        path[:, t] = torch.multinomial(matrix[path[:, t - 1]], 1).squeeze(-1)
    apart = -1000.0 * (path.unsqueeze(-1) != torch.arange(3))
    logs = (apart + torch.randn(count, 30, 3)).to(dtype)
    parts = torch.full((3,), 1 / 3).log().to(dtype), matrix.log().to(dtype).expand(1, 3, 3)
    lengths = torch.randint(1, 31, (count,))
    with backends.use(backends.TORCH):
        expected = recursions.expected_counts(*(part.double() for part in (*parts, logs)), lengths)
    monkeypatch.setattr(recursions, "wider", None)  # what takes other ways
    found = recursions.expected_counts(*parts, logs, lengths)
    ours, theirs = ((*each[:2], *each.counts.values()) for each in (found, expected))
    for one, other in zip(ours, theirs):
        assert_close(one.double(), other, **CLOSE[dtype])
    logs.requires_grad_()
    (slope,) = torch.autograd.grad(recursions.log_evidence(*parts, logs, lengths).sum(), logs)
    assert_close(slope.double(), expected.state_probs, **CLOSE[dtype])


def test_nothing_is_read_of_memory_that_was_not_written(monkeypatch):
    """What a look again has left of a tile, after its longest sequence, may be NaN."""
    made = np.empty
    monkeypatch.setattr(np, "empty", lambda *args: np.full_like(made(*args), np.nan))
    lengths = torch.arange(64) // 2 + 1
    states = torch.arange(32) % 2
    logs = -1000.0 * (states.unsqueeze(-1) != torch.arange(2)).expand(64, 32, 2)
    parts = torch.full((2,), 0.5).log(), torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]).log()
    found = recursions.expected_counts(*parts, logs, lengths)
    assert found.counts["log_transition"].sum() == (lengths - 1).sum()


def test_counts_that_needed_float64_have_the_dtype_of_the_chain():
    """State 1 is e^-110 behind, leads and is behind again: float32 would lose it."""
    apart = torch.tensor([[[0.0, -math.inf], [-math.inf, 0.0]]])
    logs = torch.tensor([[0.0, -110.0], *[[-44.0, 0.0]] * 5, [0.0, -110.0]])
    parts = (part.float() for part in (torch.full((2,), 0.5).log(), apart, logs))
    found = recursions.expected_counts(*parts, torch.tensor(7))
    parts = *found[:2], *found.counts.values()
    assert [part.dtype for part in parts] == [torch.float32] * 4
    assert_close(found.log_evidence, torch.tensor(-220.0, dtype=torch.float32))  # of either path


def test_second_derivatives():
    """The gradient can itself be differentiated."""
    initial, transition, table, symbols, lengths, known = case(3, 4, 2, 3, torch.float64)

    def evidence_of(table):
        tables = initial, transition[None], table
        return recursions.log_evidence(*tables, lengths, symbols, known).sum()

    assert torch.autograd.gradcheck(evidence_of, table.requires_grad_())
    assert torch.autograd.gradgradcheck(evidence_of, table)


def test_threads_share_sequences_and_repeat_every_bit(monkeypatch):
    """Sums over threads are added in a fixed order."""
    arguments = case(130, 12, 5, 6, torch.float32)
    weights, threads = torch.ones(130), torch.get_num_threads()
    alone = solved(*arguments, weights)
    monkeypatch.setattr(loops(), "MILLISECOND", 1)
    try:
        torch.set_num_threads(3)
        first, second = (solved(*arguments, weights) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first[0], alone[0])
    for a, b, c in zip(first[1], second[1], alone[1]):
        assert torch.equal(a, b)
        assert_close(a, c, rtol=1e-5, atol=1e-5)


STRIDED = {
    "every other": lambda count: logits(count, 10, 8)[..., ::2],
    "one number": lambda count: torch.tensor(-1.0).double().expand(count, 10, 4),
    "one of all states": lambda count: logits(count, 10, 3)[..., :1].expand(count, 10, 4),
    "by time, every other": lambda count: logits(10, count, 8)[..., ::2].transpose(0, 1),
    "by states": lambda count: logits(4, count, 10).permute(1, 2, 0),
}


@pytest.mark.parametrize("count", [3, 20, 40])
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_strides_change_nothing(make, count):
    scores, lengths = make(count), torch.full((count,), 10)
    parts = logits(4), logits(4, 4).unsqueeze(0)
    for query in (recursions.log_evidence, recursions.expected_counts, recursions.posterior):
        assert_close(
            query(*parts, scores, lengths), query(*parts, scores.clone(
                memory_format=torch.contiguous_format), lengths),
            rtol=1e-12, atol=1e-12,
        )  # fmt: skip


@pytest.mark.parametrize("engine", [backends.NUMBA, backends.TORCH], ids=str)
@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("shift", [3.0, 60.0])
def test_potentials_above_one_do_not_overflow(shift, count, engine):
    """Neither products of norms, nor those of norms and agreements, in single precision."""
    torch.manual_seed(0)
    matrix = (torch.randn(1, 3, 3, dtype=torch.float32) + shift).requires_grad_()
    likelihood = torch.randn(count, 300, 3, dtype=torch.float32)
    lengths, initial = torch.full((count,), 300), torch.zeros(3, dtype=torch.float32)
    with backends.use(engine):
        value = recursions.log_evidence(initial, matrix, likelihood, lengths)
        (flows,) = torch.autograd.grad(value.sum(), matrix)
    shifted = recursions.log_evidence(initial, matrix.detach() - shift, likelihood, lengths)
    assert_close(value.detach(), shifted + 299 * shift, rtol=1e-5, atol=0)
    assert_close(flows.sum().item(), 299.0 * count, rtol=1e-5, atol=0)
