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
    assert zeros or all(found is not None for found in used)  # else steps may have to do it


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
    states = recursions.posterior(initial, matrix, likelihood, lengths).state_probs
    assert_close(states, alone.softmax(-1).unsqueeze(-2).expand_as(states))


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_what_a_chunk_cannot_reach_hides_nothing(dtype):
    """A state that likes the data and cannot be entered is what operators are scaled by."""
    rare = torch.tensor(-45.0, dtype=torch.float64).exp()
    matrix = torch.eye(4, dtype=torch.float64)
    matrix[0, 0], matrix[0, 3] = 1 - rare, rare
    matrix[3, 1] = matrix[3, 3] = 0.5
    likelihood = torch.zeros(264, 4, dtype=torch.float64)
    likelihood[:, 3] = -800
    likelihood[104:112, [0, 1, 3]] = -88.0
    likelihood[112:172, 0] = -4
    likelihood[112:124, 2] = -200
    chain = torch.tensor([1.0, 0, 0, 0]).log(), matrix.log().unsqueeze(0), likelihood
    chain = [part.to(dtype) for part in chain]
    for turned in (False, True):  # and time backwards, where what follows is what is rare
        if turned:
            chain = [torch.zeros_like(chain[0]), chain[1].mT, likelihood.flip(0).to(dtype)]
            chain[2][-1] += torch.tensor([1.0, 0, 0, 0]).log()
        value = recursions.log_evidence(*chain, torch.tensor(264))
        torch.testing.assert_close(value.double().item(), -747.0535319708745, rtol=1e-5, atol=0)


def test_a_scan_gives_every_prefix():
    torch.manual_seed(0)
    for count in (0, 1, 2, 5, 8):
        first, matrices = torch.rand(3, 4), torch.rand(count, 3, 4, 4)
        vectors = [first / first.sum(-1, keepdim=True)]
        for matrix in matrices:
            vector = (vectors[-1].unsqueeze(-2) @ matrix).squeeze(-2)
            vectors.append(vector / vector.sum(-1, keepdim=True))
        assert_close(_torch.prefixes(first, matrices), torch.stack(vectors))
