"""Long sequences by torch, in chunks joined by a prefix sum: equal to single steps."""

import pytest
import torch
from torch.testing import assert_close

from pyrohmm import recursions
from pyrohmm.ops import backends
from pyrohmm.ops.dense import _torch

CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.float64: {"rtol": 1e-9, "atol": 1e-9}}


@pytest.fixture(autouse=True)
def _by_torch():
    with backends.use(backends.TORCH):
        yield


def chain(shape, groups, dtype=torch.float64, zeros=False):
    """Potentials, whose rows do not sum to one, and log-likelihoods of whole sequences."""
    torch.manual_seed(sum(shape))
    count, steps, states = shape
    initial, matrix = torch.randn(groups, 1, states), torch.randn(groups, 1, 1, states, states)
    if zeros and states > 1:
        matrix.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    likelihood = 3 * torch.randn(groups, count, steps, states)
    parts = (part.to(dtype).requires_grad_() for part in (initial, matrix, likelihood))
    return *parts, torch.full((groups, count), steps)


def evidence(arguments):
    """Evidence, the gradient of a weighted sum, and filters."""
    value = recursions.log_evidence(*arguments)
    weights = torch.linspace(0.5, 1.1, value.numel()).reshape(value.shape).to(value.dtype)
    gradient = torch.autograd.grad(value, arguments[:3], weights)
    return value.detach(), *gradient, recursions.filtered(*arguments).detach().exp()


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("zeros", [False, True], ids=["positive", "hard zeros"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [((1, 256, 4), 1), ((1, 1001, 1), 1), ((2, 467, 3), 1), ((3, 300, 2), 3), ((1, 258, 16), 2)],
)
def test_chunks_are_steps(monkeypatch, shape, groups, zeros, dtype):
    arguments = chain(shape, groups, dtype, zeros)
    chunked, used = evidence(arguments), []
    by_chunks = _torch._by_chunks
    monkeypatch.setattr(_torch, "_by_chunks", lambda *x: used.append(by_chunks(*x)))
    for got, want in zip(chunked, evidence(arguments)):  # by steps, as None says
        assert_close(got, want, **CLOSE[dtype])
    assert used
    assert all(found is not None for found in used)


@pytest.mark.parametrize("nats", [30.0, 300.0, 744.0, 5000.0])
def test_a_state_that_was_all_but_excluded_comes_back(nats):
    """Each state is as good as impossible for a while: messages in chunks may not forget it."""
    initial, matrix, _, lengths = chain((1, 400, 2), 1)
    matrix = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log().reshape(matrix.shape).requires_grad_()
    likelihood = torch.zeros(1, 1, 400, 2)
    likelihood[..., 10:30, 0] = -nats
    likelihood[..., 350:370, 1] = -nats - 0.1
    value = recursions.log_evidence(initial, matrix, likelihood, lengths)
    alone = initial.detach() + likelihood.sum(-2)
    assert_close(value.detach(), alone.logsumexp(-1))
    states = recursions.posterior(initial, matrix, likelihood, lengths).states
    assert_close(states, alone.softmax(-1).unsqueeze(-2).expand_as(states))


def test_a_scan_gives_every_prefix():
    torch.manual_seed(0)
    for count in (0, 1, 2, 5, 8):
        first, matrices = torch.rand(3, 4), torch.rand(count, 3, 4, 4)
        vectors = [first / first.sum(-1, keepdim=True)]
        for matrix in matrices:
            vector = (vectors[-1].unsqueeze(-2) @ matrix).squeeze(-2)
            vectors.append(vector / vector.sum(-1, keepdim=True))
        assert_close(_torch.prefixes(first, matrices), torch.stack(vectors))
