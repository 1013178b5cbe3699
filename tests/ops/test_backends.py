"""Both backends agree in every operation, and one is chosen as long and as far as was asked."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyrohmm.ops import message_passing, segment_chain
from pyrohmm.ops.backends import CPU, NUMBA, TORCH, Backend, backend_for, has_numba, use
from pyrohmm.ops.blocks import recursions as block_recursions
from pyrohmm.ops.blocks.plan import States, bounds
from pyrohmm.ops.chain import group
from pyrohmm.ops.masks import exists

compiled = pytest.mark.skipif(not has_numba(), reason="Numba is not installed")


# Choosing


def test_a_choice_is_undone_on_exit_and_by_an_error():
    default = backend_for(CPU)
    with use(TORCH):
        assert backend_for(CPU) is TORCH
        with pytest.raises(RuntimeError), use(TORCH):
            raise RuntimeError
        assert backend_for(CPU) is TORCH
    assert backend_for(CPU) is default


@compiled
def test_choices_nest():
    with use(TORCH):
        with use(NUMBA):
            assert backend_for(CPU) is NUMBA
        assert backend_for(CPU) is TORCH
    assert backend_for(CPU) is NUMBA


def test_other_threads_keep_their_choice():
    default = backend_for(CPU)
    with ThreadPoolExecutor(1) as pool, use(TORCH):
        assert pool.submit(backend_for, CPU).result() is default


@compiled
def test_other_devices_compute_by_torch_and_not_by_numba():
    assert backend_for(torch.device("cuda", 0)) is TORCH
    with use(NUMBA), pytest.raises(ValueError, match="CPU only; got tensors on cuda:0"):
        backend_for(torch.device("cuda", 0))


INTERRUPTED = """
import os, signal, sys
import torch
import pyrohmm
from pyrohmm.ops.backends import CPU, NUMBA, TORCH, backend_for, has_numba

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it

class Interrupt:
    def __init__(self, point):
        self.point = point
    def find_spec(self, name, path=None, target=None):
        if name == self.point:
            self.point = None
            signal.raise_signal(signal.SIGINT)

def run(point):
    finder = Interrupt(point)
    sys.meta_path.insert(0, finder)
    try:
        has_numba()
    except KeyboardInterrupt:
        assert finder.point is None
    else:
        return 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    table = torch.arange(6.0).view(3, 2)
    rows = torch.tensor([2, 0])
    assert backend_for(CPU) is NUMBA
    return int(not torch.equal(NUMBA.take_rows(table, rows), table[rows]))

assert "numba" not in sys.modules
for point in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        code = 3
        try:
            code = run(point)
        finally:
            os._exit(code)
    print(point, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_interrupted_import_of_numba_can_be_done_again():
    points = [
        "llvmlite.binding", "numba.core.types", "numba.core.typing", "numba.core.registry",
        "numba.np.ufunc", "numba.extending", "pyrohmm.ops._numba_lanes",
    ]  # fmt: skip
    command = [sys.executable, "-c", INTERRUPTED, *points]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.split("\n")[:-1] == [f"{point} 0" for point in points], result.stderr


def test_numba_is_refused_by_name_where_it_is_missing(monkeypatch):
    def missing():
        raise ImportError("No module named 'numba'")

    monkeypatch.setattr(NUMBA, "load", missing)
    has_numba.cache_clear()
    try:
        assert backend_for(CPU) is TORCH
        with pytest.raises(ImportError, match=r"pip install 'pyrohmm\[compiled\]'"), use(NUMBA):
            pass
    finally:
        has_numba.cache_clear()


def test_what_is_no_backend_is_refused():
    with pytest.raises(TypeError, match="backend must be TORCH or NUMBA"), use("torch"):
        pass


def test_the_backward_pass_is_by_the_backend_of_the_forward_pass():
    chain = random_chain(3, True)
    with use(TORCH):
        scaled = message_passing.forward(chain, torch.float64)
    gamma = message_passing.backward(chain, scaled)[0]
    torch.testing.assert_close(gamma.sum(-1)[0], torch.ones_like(gamma[0, ..., 0]))


# Agreement


def random_chain(count, ragged, num_states=5, steps=6, hard_zero=False):
    logits = torch.randn(num_states, num_states)
    if hard_zero:
        logits[0, 1:] = -torch.inf
    lengths = torch.randint(1, steps + 1, (count,)) if ragged else torch.full((count,), steps)
    return group(
        torch.randn(num_states).log_softmax(-1),
        logits.log_softmax(-1).unsqueeze(0),
        torch.randn(count, steps, num_states),
        lengths,
    )[0]


def rows(backend):
    table, places = torch.randn(7, 3), torch.tensor([6, 0, 0, 3])
    out = torch.ones(7, 3)
    backend.add_rows(table[:4], places, out)
    return backend.take_rows(table, places), out


def passes(backend, count, ragged, hard_zero):
    chain, factor = random_chain(count, ragged, hard_zero=hard_zero), torch.rand(1, count)
    with use(backend):
        scaled = message_passing.forward(chain, torch.float64)
    later = message_passing.backward(chain, scaled, factor)
    return scaled.evidence, scaled.alpha, scaled.total, scaled.exact, later[0], later[1][1:]


def log_space(backend):
    chain = random_chain(3, True)
    *answers, messages = backend.log_space(chain, True)
    padded = ~exists(chain.lengths, len(messages)).movedim(-1, 0).unsqueeze(-1)
    return *answers, messages.masked_fill(padded, 0.0)  # there they are undefined


def decoding(backend, count):
    chain = random_chain(count, True)
    best = torch.zeros(chain.likelihood.shape[:3], dtype=torch.long)
    backend.viterbi(chain, best)
    messages = chain.likelihood.log_softmax(-1)
    uniform = torch.rand(4, *best.shape)
    states = torch.zeros(uniform.shape, dtype=torch.long)
    transposed = chain.transition.mT.contiguous()
    backend.sample_states(messages, transposed, chain.lengths, uniform, states)
    return best, states


def blocks(backend):
    sizes = torch.tensor([2, 1, 3])
    states = States(bounds(sizes), torch.arange(6), sizes, 3)
    steps = torch.randint(3, (4, 5))
    beyond = torch.arange(3) >= sizes[steps].unsqueeze(-1)
    seen = torch.randn(4, 5, 3).masked_fill(beyond, -torch.inf)
    first = torch.randn(4, 3).masked_fill(beyond[:, 0], -torch.inf)
    vectors = [torch.randn(6, dim).requires_grad_() for dim in (4, 4, 3)]
    chain = block_recursions.plan_chain(
        steps, torch.tensor([5, 2, 1, 5]), states, *vectors, first, seen
    )
    with use(backend):
        evidence = block_recursions.log_evidence(chain)
        gradients = torch.autograd.grad((evidence * torch.rand(4)).sum(), vectors)
        final = block_recursions.final_state_log_probs(chain).exp()
    return evidence, *gradients, final


def segments(backend):
    """Two groups of three sequences whose states last for up to four steps."""
    lengths = torch.tensor([6, 2, 5, 1, 6, 4])
    chain = segment_chain.SegmentChain(
        torch.randn(6, 3), torch.randn(2, 3, 3), *torch.randn(4, 2, 4, 3), torch.randn(6, 6, 3),
        lengths,
    )  # fmt: skip
    there = exists(lengths, 6).unsqueeze(-1)
    weight, uniform = torch.randn(6), torch.rand(5, 6, 6, 2)
    best, states = torch.zeros(6, 6).long(), torch.zeros(5, 6, 6).long()
    *messages, filtered = backend.segment_forward(chain, True)
    arrive, ends, evidence = messages
    backend.segment_viterbi(chain, best)
    backend.segment_sample(chain, arrive, ends, uniform, states)
    gradients = backend.segment_backward(chain, arrive, ends, evidence, weight)
    seen = (part.masked_fill(~there, 0.0) for part in (arrive, ends, filtered))
    return [*seen, evidence, *gradients, best, states]


def products(backend):
    torch.manual_seed(0)
    weights, rows = torch.rand(2, 700, 3).float(), torch.randn(2, 700, 4).float()
    out = torch.zeros(2, 3, 4, dtype=torch.float64)
    backend.add_products(weights, rows, out)
    return [out]


OPERATIONS = {
    "rows": rows,
    "products": products,
    "passes of 1": lambda backend: passes(backend, 1, False, False),
    "passes of 3 with zeros": lambda backend: passes(backend, 3, True, True),
    "passes of 40": lambda backend: passes(backend, 40, True, False),
    "passes of 40 with zeros": lambda backend: passes(backend, 40, True, True),
    "log space": log_space,
    "decoding of 2": lambda backend: decoding(backend, 2),
    "decoding of 40": lambda backend: decoding(backend, 40),
    "blocks": blocks,
    "segments": segments,
}


@compiled
@pytest.mark.parametrize("name", OPERATIONS)
def test_both_backends_agree(name):
    answers = []
    for backend in (TORCH, NUMBA):
        torch.manual_seed(0)
        answers.append(OPERATIONS[name](backend))
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_every_operation_is_compared(monkeypatch):
    """Each is called by one of the comparisons, on both backends."""
    called = set()

    def recorded(name, operation):
        return lambda *arguments: called.add(name) or operation(*arguments)

    names = {name for name in vars(Backend) if not name.startswith("_")}
    for name in names:
        monkeypatch.setattr(TORCH, name, recorded(name, getattr(TORCH, name)))
    for operation in OPERATIONS.values():
        operation(TORCH)
    assert called == names
