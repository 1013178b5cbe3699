"""Both backends agree in every operation, and one is chosen as long and as far as was asked."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pyrohmm.ops import products, recursions
from pyrohmm.ops.backends import CPU, NUMBA, TORCH, has_numba, pick, use

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
from pyrohmm._imports import imported
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
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert result.stdout.split("\n")[:-1] == [f"{point} 0" for point in points], result.stderr


@needs_numba
@pytest.mark.parametrize("count", [1, 40])
def test_no_loop_that_is_cached_takes_a_class_of_the_package(count):
    """After an upgrade in place an index that names a class that has moved cannot be read."""
    from numba.core import types
    from numba.core.dispatcher import Dispatcher

    from pyrohmm.ops.dense import _backward, _forward, _lanes

    logs = torch.zeros(count, 3, 2, requires_grad=True)
    initial, transition = torch.full((2,), 0.5).log(), torch.full((1, 2, 2), 0.5).log()
    with use(NUMBA):
        recursions.log_evidence(initial, transition, logs, torch.full((count,), 3)).sum().backward()
    loops = [x for m in (_lanes, _forward, _backward) for x in vars(m).values()]
    loops = [loop for loop in loops if isinstance(loop, Dispatcher)]
    inner = [loop for loop in loops if "no_cpython_wrapper" in loop.targetoptions]
    assert inner
    assert not any(loop.stats.cache_path for loop in inner)
    cached = [loop for loop in loops if loop.stats.cache_path and loop.signatures]
    assert cached
    arguments = [each for loop in cached for signature in loop.signatures for each in signature]
    assert not any(isinstance(each, types.BaseNamedTuple) for each in arguments)


# Agreement of the modules that have the same functions


@needs_numba
@pytest.mark.parametrize("count", [1, 700])
def test_sums_by_index_agree(count):
    values, rows = torch.rand(count, 3), torch.randint(7, (count,))
    found = products.add_rows(values, rows, 7)
    with use(TORCH):
        torch.testing.assert_close(products.add_rows(values, rows, 7), found)
