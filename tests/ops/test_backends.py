"""Both backends agree in every operation, and one is chosen as long and as far as was asked."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyrohmm.ops import backends, products
from pyrohmm.ops.backends import CPU, NUMBA, TORCH, compiled, has_numba, pick, use
from pyrohmm.ops.masks import exists
from pyrohmm.ops.segments import _torch as torch_segments
from pyrohmm.ops.segments._torch import SegmentChain

needs_numba = pytest.mark.skipif(not has_numba(), reason="Numba is not installed")


# Choosing


def test_a_choice_is_undone_on_exit_and_by_an_error():
    default = pick(CPU)
    with use(TORCH):
        assert pick(CPU) is TORCH
        with pytest.raises(RuntimeError), use(TORCH):
            raise RuntimeError
        assert pick(CPU) is TORCH
    assert pick(CPU) is default


def test_other_threads_keep_their_choice():
    default = pick(CPU)
    with ThreadPoolExecutor(1) as pool, use(TORCH):
        assert pool.submit(pick, CPU).result() is default


@needs_numba
def test_other_devices_compute_by_torch_and_not_by_numba():
    with use(NUMBA):
        assert pick(torch.device("cuda", 0)) is TORCH
    assert pick(CPU, fits=False) is TORCH


INTERRUPTED = """
import os, signal, sys
import torch
import pyrohmm
from pyrohmm.ops.backends import CPU, NUMBA, TORCH, pick, has_numba

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
    assert pick(CPU) is NUMBA
    logs = torch.zeros(2), torch.zeros(1, 2, 2), torch.zeros(2, 2)
    return int(pyrohmm.recursions.viterbi(*logs, torch.tensor(2)).sum())

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


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_an_interrupted_import_of_numba_can_be_done_again():
    points = ["numba.core.typing", "pyrohmm.ops._numba_math"]
    command = [sys.executable, "-c", INTERRUPTED, *points]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.split("\n")[:-1] == [f"{point} 0" for point in points], result.stderr


def test_numba_is_refused_by_name_where_it_is_missing(monkeypatch):
    def missing(*_):
        raise ImportError("No module named 'numba'")

    monkeypatch.setattr(backends, "import_module", missing)
    has_numba.cache_clear()
    try:
        assert pick(CPU) is TORCH
        with pytest.raises(ImportError, match=r"pip install 'pyrohmm\[compiled\]'"), use(NUMBA):
            pass
    finally:
        has_numba.cache_clear()


# Agreement of the modules that have the same functions


@needs_numba
def test_both_engines_agree_on_segments():
    """Two groups of three sequences whose states last for up to four steps."""
    torch.manual_seed(0)
    lengths = torch.tensor([6, 2, 5, 1, 6, 4])
    chain = SegmentChain(
        torch.randn(6, 3), torch.randn(2, 3, 3), torch.randn(2, 2, 2, 4, 3), torch.randn(6, 6, 3),
        lengths,
    )  # fmt: skip
    there, weight, uniform = (
        exists(lengths, 6).unsqueeze(-1),
        torch.randn(6),
        torch.rand(5, 6, 6, 2),
    )
    answers = []
    for engine in (torch_segments, compiled("segments")):
        *messages, filtered = engine.forward(chain, True)
        seen = [part.masked_fill(~there, 0.0) for part in (*messages[:2], filtered)]
        gradients = engine.backward(chain, *messages, weight)
        paths = engine.viterbi(chain), engine.sample_states(chain, *messages[:2], uniform)
        answers.append([*seen, messages[2], *gradients, *paths])
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@needs_numba
@pytest.mark.parametrize("count", [1, 700])
def test_sums_by_index_agree(count):
    values, rows = torch.rand(count, 3), torch.randint(7, (count,))
    found = products.add_rows(values, rows, 7)
    with use(TORCH):
        torch.testing.assert_close(products.add_rows(values, rows, 7), found)
