"""Numbers below the smallest normal one, slow on many processors, occur nowhere in the engine."""

import threading
from importlib import import_module

import numpy as np
import pytest
import torch
from pyro.distributions import Normal
from torch.utils._python_dispatch import TorchDispatchMode

from pyrohmm import (
    HMM,
    HSMM,
    ContinuousTimeHMM,
    FactorialHMM,
    SecondOrderHMM,
    Sequences,
    TabularHMM,
    fit_em,
    normal,
)
from pyrohmm.ops import backends

K, D, T, N = 8, 40, 25, 40
LENGTHS = torch.full((N,), T)
PLACES = torch.linspace(0, 12, K).unsqueeze(-1).expand(K, D)  # far from each other in D dimensions


@pytest.fixture(autouse=True, params=[torch.float32, torch.float64], ids=str)
def _dtype(request, _double):
    torch.set_default_dtype(request.param)


def logits(*shape):
    return torch.randn(shape).log_softmax(-1).requires_grad_()


def places():
    return PLACES.to(torch.get_default_dtype())


def far():
    return Normal(places(), 1.0).to_event(1)


def rates():
    leave = torch.rand(K, K).fill_diagonal_(0)
    return (leave - leave.sum(-1).diag()).requires_grad_()


HMMS = {
    "markov": lambda: HMM(logits(K), logits(K, K), far(), LENGTHS),
    "markov of one sequence": lambda: HMM(logits(K), logits(K, K), far(), LENGTHS[:1]),
    "markov per step": lambda: HMM(logits(K), logits(T - 1, K, K), far(), LENGTHS,
                                   transition_per_step=True),
    "durations": lambda: HSMM(logits(K), logits(K, K), logits(K, 4), far(), LENGTHS,
                              validate_args=False),
    "product": lambda: FactorialHMM([logits(2), logits(4)], [logits(2, 2), logits(4, 4)], far(),
                                    LENGTHS),
    "pairs": lambda: SecondOrderHMM(logits(K), logits(K, K), logits(K, K, K), far(), LENGTHS),
    "times": lambda: ContinuousTimeHMM(logits(K), rates(), far(), LENGTHS,
                                       torch.rand(N, T).cumsum(-1)),
}  # fmt: skip


def is_subnormal(numbers):
    """By their bits: to a thread that takes them as zero they are equal to it."""
    kind, digits = {4: (np.uint32, 23), 8: (np.uint64, 52)}[numbers.dtype.itemsize]
    bits = np.ascontiguousarray(numbers).view(kind) << kind(1) >> kind(1)
    return (bits > 0) & (bits < kind(1) << kind(digits))


class Watch(TorchDispatchMode):
    """Counts subnormal numbers in what operations write.

    Not in new memory, nor in exponentials, which torch does not flush: what reads them does.
    """

    def __init__(self):
        super().__init__()
        self.count, self.seen = 0, 0

    def read(self, value):
        if isinstance(value, tuple | list):
            for part in value:
                self.read(part)
            return
        value = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            self.count += int(is_subnormal(value).sum())
            self.seen += value.size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        other = any(word in str(function) for word in ("empty", "exp.", "exp_."))
        if not (other or function.is_view):
            self.read(found)
        return found

    def over(self, call):
        """``call`` of compiled loops, whose arrays are read when they are done."""

        def watched(loop, *arguments):
            found = call(loop, *arguments)
            self.read([found, *arguments])
            return found

        return watched


@pytest.fixture
def watch(monkeypatch):
    found = Watch()
    if backends.has_numba():
        for name in ("_numba_math", "dense._numba", "_numba_segments"):
            module = import_module(f"pyrohmm.ops.{name}")
            monkeypatch.setattr(module, "call", found.over(module.call))
    return found


def sample(count):
    return places()[torch.randint(K, (count, T))] + torch.randn(count, T, D)


def flushes():
    return bool(torch.tensor(torch.finfo(torch.get_default_dtype()).tiny) * 0.5 == 0)


@pytest.mark.parametrize("backend", backends.Backend, ids=lambda backend: backend.name)
@pytest.mark.parametrize("name", HMMS)
def test_evidence_gradient_and_counts_hold_no_subnormal_number(name, backend, watch):
    if backend is backends.NUMBA and not backends.has_numba():
        pytest.skip("Numba is not installed")
    hmm = HMMS[name]()
    values = sample(len(hmm.lengths))
    scores = hmm.log_likelihood(values).detach().requires_grad_()
    tables = [scores, *(part for part in hmm.chain.parameters.values() if part.requires_grad)]
    with backends.use(backend), watch:
        evidence = hmm.chain.log_evidence(scores, hmm.lengths)
        torch.autograd.grad(evidence.sum(), tables)
        hmm.chain.expected_counts(scores.detach(), hmm.lengths)
    assert watch.seen > 2_000
    assert watch.count == 0
    assert not flushes()


def test_an_iteration_of_em_makes_no_subnormal_number(watch):
    data = Sequences(sample(N), LENGTHS)
    with watch:
        fit_em(TabularHMM(K, normal(D)), data, num_iterations=2, restarts=1, progress=False)
    assert watch.seen > 2_000
    assert watch.count == 0
    assert not flushes()


@pytest.mark.skipif(not backends.has_numba(), reason="Numba is not installed")
def test_threads_flush_while_they_compute_and_an_error_changes_nothing():
    loops, found = import_module("pyrohmm.ops._numba_math"), {}

    def run(part):
        found[threading.get_ident()] = loops.call(flushes)

    loops.share(run, 2)
    assert set(found.values()) == {True}
    with pytest.raises(ZeroDivisionError):
        loops.share(lambda part: 1 // (part - 1), 2)
    assert not flushes()
    assert not loops._pool(1).submit(flushes).result()


def test_who_flushes_already_goes_on_to():
    hmm, values = HMMS["markov"](), sample(N)
    torch.set_flush_denormal(True)
    try:
        hmm.log_prob(values).sum().backward()
        assert flushes()
    finally:
        torch.set_flush_denormal(False)
