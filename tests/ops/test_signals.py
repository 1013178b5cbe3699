"""Ctrl-C: it ends a fit, and nothing else; late imports and compiled loops are whole afterwards."""

import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from pyro.distributions import Normal

import pyrohmm
from pyrohmm.ops import backends

needs_numba = pytest.mark.skipif(not backends.has_numba(), reason="Numba is not installed")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def dispatchers():
    """Compiled functions, by module and name, that Python calls."""
    from numba.core.dispatcher import Dispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("pyrohmm.")]
    found = {
        f"{value.__module__}.{name}": value
        for module in modules for name, value in vars(module).items()
        if isinstance(value, Dispatcher) and not value.targetoptions.get("no_cpython_wrapper")
    }  # fmt: skip
    return {name: value for name, value in found.items() if name.startswith("pyrohmm.")}


def parts(kind):
    """A type and those of which it is made."""
    inner = getattr(kind, "types", ())
    return [kind, *(part for item in inner for part in parts(item))]


def logits(*shape):
    return torch.randn(shape).log_softmax(-1)


@needs_numba
@pytest.mark.parametrize("count", [1, 40], ids=["by rows", "by tiles"])
@pytest.mark.parametrize("threads", [1, 2])
def test_no_compiled_function_takes_or_returns_a_named_tuple(count, threads):
    """Numba makes one by calling Python, which may raise what a signal asks for, unseen."""
    from numba import types

    before, lengths = torch.get_num_threads(), torch.full((count,), 400)
    torch.set_num_threads(threads)
    try:
        hmm = pyrohmm.HMM(
            logits(3).requires_grad_(), logits(3, 3), Normal(torch.arange(3.0), 1.0), lengths
        )
        values = torch.randn(count, 400)
        hmm.log_prob(values).sum().backward()
        hmm.posterior(values), hmm.viterbi(values), hmm.sample_states(values)
    finally:
        torch.set_num_threads(before)
    named = (types.NamedTuple, types.NamedUniTuple)
    compiled = {
        name: [(*signature, result.signature.return_type)
               for signature, result in function.overloads.items()]
        for name, function in dispatchers().items()
    }  # fmt: skip
    assert sum(map(bool, compiled.values())) > 5
    wrong = [
        name for name, signatures in compiled.items() for kinds in signatures
        if any(isinstance(part, named) for kind in kinds for part in parts(kind))
    ]  # fmt: skip
    assert not wrong


@needs_numba
def test_what_a_signal_raises_is_raised_by_a_compiled_loop():
    loops = import_module("pyrohmm.ops._numba_math")

    def hidden(cause):
        raise SystemError("a result with an exception set") from cause

    for cause in (KeyboardInterrupt(), TimeoutError("of an alarm")):
        with pytest.raises(type(cause)):
            loops.call(hidden, cause)
    with pytest.raises(SystemError):
        loops.call(hidden, None)


IMPORTED = """
import signal, sys
import pyrohmm
from pyrohmm import MarginalModel, Sequences, TabularHMM, categorical, fit_map

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
call, point, name = sys.argv[1:]

class Interrupt:
    done = False
    def find_spec(self, name, path=None, target=None):
        if name == point and not self.done:
            self.done = True
            signal.raise_signal(signal.SIGINT)

finder = Interrupt()
sys.meta_path.insert(0, finder)
import torch
data = Sequences(torch.randint(3, (2, 5)), torch.tensor([5, 4]))
module = TabularHMM(2, categorical(3))
hmm = MarginalModel(module)(data)

def run():
    if call == "fit_map":
        return len(fit_map(MarginalModel(module), data, num_iterations=2, progress=False).losses)
    return len(getattr(hmm, call)(data.values))

try:
    run()
except KeyboardInterrupt:
    print("interrupted", name in sys.modules)
print(finder.done, run())
"""


@pytest.mark.parametrize(
    ("call", "point", "name"),
    [("fit_map", "torch._dynamo.guards", "torch._dynamo"),
     ("fit_map", "torch.utils._sympy.functions", "torch.fx.experimental.symbolic_shapes"),
     pytest.param("viterbi", "numba.cpython.slicing", "numba.cpython.unicode", marks=needs_numba)],
)  # fmt: skip
def test_a_call_can_be_done_again_after_it_was_interrupted_as_a_compiler_is_imported(
    call, point, name
):
    command = [sys.executable, "-c", IMPORTED, call, point, name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout == "interrupted True\nTrue 2\n", result.stderr[-2000:]


ASKED = """
import sys
import torch
from pyrohmm import MarginalModel, Sequences, TabularHMM, categorical

data = Sequences(torch.randint(3, (2, 5)), torch.tensor([5, 4]))
hmm = MarginalModel(TabularHMM(2, categorical(3)))(data)
hmm.log_joint(data.values, hmm.viterbi(data.values)), hmm.posterior(data.values)
print("torch.fx.experimental.symbolic_shapes" in sys.modules)
"""


def test_queries_of_plain_sequences_need_no_compiler_of_torch():
    """It takes seconds, in which Ctrl-C would leave half of it behind."""
    result = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr[-2000:]


CAMPAIGN = """
import os, random, signal, sys, time
import torch
from pyrohmm import MarginalModel, Sequences, TabularHMM, TabularHSMM, categorical
from pyrohmm import fit_em, fit_map, free_durations

data = Sequences(torch.randint(6, (20, 40)), torch.full((20,), 40))
fits = {
    "restarts": lambda: fit_em(TabularHMM(8, categorical(6)), data, restarts=8, progress=False),
    "gradient": lambda: fit_map(MarginalModel(TabularHMM(8, categorical(6))), data, progress=False),
    "durations": lambda: fit_em(TabularHSMM(3, categorical(6), free_durations(5)), data,
                                progress=False),
}
fit = fits[sys.argv[1]]
fit()
random.seed(0)
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            while True:
                fit()
        except KeyboardInterrupt:
            os._exit(7)
        except BaseException:
            os._exit(8)
    time.sleep(0.05 + random.random() / 2)
    os.kill(child, signal.SIGINT)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("kind", ["restarts", "gradient", "durations"])
def test_a_fit_that_is_interrupted_at_any_time_raises_keyboard_interrupt(kind):
    command = [sys.executable, "-c", CAMPAIGN, kind, "60"]
    alone = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=True, env=os.environ | alone
    )
    assert result.stdout.split() == ["7"] * 60
