"""Scaled messages by Triton: run by its interpreter, and compiled for devices."""

import logging
import os
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
import torch
from oracle import assert_close
from pyro.distributions import Categorical, Normal
from test_recursions import (
    APART,
    EVEN,
    NEVER,
    ROUNDING,
    UNDERFLOW,
    Chain,
    assert_answers,
    normalized,
    random_chain,
    ranges,  # noqa: F401  # a fixture
)

from pyrohmm import HMM, recursions
from pyrohmm.ops import backends
from pyrohmm.ops.backends import TORCH, TRITON, use
from pyrohmm.ops.dense import _torch

# NumPy computes for the interpreter, and says what is no error
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
DEVICE = os.environ.get("PYROHMM_TEST_DEVICE", "twin")
_triton = pytest.importorskip("pyrohmm.ops.dense._triton", reason="Triton is not installed")


@pytest.fixture
def launched(monkeypatch):
    """The kernel in place of the steps of torch, for tensors on the CPU; shapes it was given."""
    if DEVICE != "twin":
        pytest.skip("kernels are not interpreted")
    shapes, messages = [], _triton.messages

    def noted(initial, transition, weight, *options):
        shapes.append(tuple(weight.shape))
        return messages(initial, transition, weight, *options)

    monkeypatch.setattr(_triton, "messages", noted)
    monkeypatch.setattr(_torch, "pick", lambda _, fits: TRITON if fits else TORCH)
    with use(TORCH):  # no loops of Numba
        yield shapes
    assert shapes


def zeros(num_states):
    """A ragged chain whose transitions have hard zeros; some states cannot begin or emit."""
    rng = np.random.default_rng(num_states)
    shapes = (num_states,), (1, num_states, num_states)
    tables = [normalized(rng.normal(size=shape), 0.4, rng) for shape in shapes]
    likelihood = rng.normal(size=(3, 5, num_states))
    likelihood[:, 2:][rng.random((3, 3, num_states)) < 0.3] = NEVER
    likelihood[0, 3] = NEVER  # impossible, unless it ends before
    return Chain.of(*tables, likelihood, [5, 4, 2])


def potentials(**kind):
    """A ragged chain whose rows do not sum to one: what follows its last steps would count."""
    chain = random_chain(3, 5, (4,), ragged=True, **kind)
    more = torch.linspace(-1.0, 2.0, 9, dtype=chain.log_transition.dtype).reshape(3, 3)
    return chain._replace(log_transition=chain.log_transition + more)


CHAINS = {
    "potentials": potentials,
    "one state": lambda **kind: random_chain(1, 4, (2,), ragged=True, **kind),
    "ragged": lambda **kind: random_chain(3, 5, (4,), ragged=True, **kind),
    "matrix per step": lambda **kind: random_chain(16, 4, (3,), per_step=True, ragged=True, **kind),
    "matrices": lambda **kind: random_chain(17, 3, (2, 2), groups=(2, 1), **kind),
    "matrices per step": lambda **kind: random_chain(
        3, 4, (3,), groups=(3,), per_step=True, ragged=True, **kind
    ),
    "one step": lambda **kind: random_chain(3, 1, (3,), **kind),
    "one step, no matrix": lambda **kind: random_chain(3, 1, (3,), per_step=True, **kind),
    "one sequence": lambda **kind: random_chain(64, 4, **kind),
    "most states": lambda **kind: random_chain(128, 3, (2,), ragged=True, **kind),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_answers_are_those_of_log_space(name, dtype, launched):
    chain = CHAINS[name](dtype=dtype)
    assert_answers(chain, chain.solved(), name, ROUNDING[dtype])


@pytest.mark.parametrize("num_states", [2, 5, 20])
def test_hard_zeros_and_impossible_sequences_are_those_of_log_space(num_states, launched):
    chain = zeros(num_states)
    assert recursions.log_evidence(*chain)[0].isneginf()
    assert_answers(chain, chain.solved(), num_states, ROUNDING[torch.float64])


@pytest.mark.parametrize("name", UNDERFLOW)
def test_what_underflows_goes_to_a_wider_range(name, launched):
    transition, likelihood = UNDERFLOW[name]
    likelihood = np.array(likelihood[:12], float)
    initial = EVEN if likelihood.shape[1] == 2 else np.log([0.3, 0.3, 0.4])
    chain = Chain.of(initial, transition, likelihood, dtype=torch.float32)
    loose = {"rtol": 1e-3, "atol": 1e-3}
    assert_answers(chain, chain.solved(), name, ROUNDING[torch.float32], loose)


def test_no_wider_range_is_tried_without_need(launched, ranges):  # noqa: F811
    recursions.log_evidence(*Chain.of(EVEN, APART, [[0, -20], [-15, 0]], dtype=torch.float32))
    assert ranges == [torch.float32]


def test_a_long_sequence_is_one_launch(launched):
    """It would go by chunks of steps."""
    chain = random_chain(3, 300, dtype=torch.float32, scale=1.0).with_gradients()
    found = recursions.log_evidence(*chain)
    gradients = torch.autograd.grad(found, chain[:3])
    assert launched == [(300, 1, 1, 3)]
    answer = chain.solved()
    assert_close(found, answer.evidence, rtol=1e-5)
    assert_close(gradients[2], answer.states, rtol=0, atol=1e-4)
    assert_close(gradients[1], answer.transitions.sum(0, keepdims=True), rtol=1e-4)


class Case(NamedTuple):
    emission: object
    values: torch.Tensor
    observed: torch.Tensor | None = None


def case(name):
    """Three ragged sequences of which steps or components are missing."""
    torch.manual_seed(0)
    if name == "symbols":
        observed = torch.rand(3, 6) < 0.7
        return Case(Categorical(logits=torch.randn(4, 5)), torch.randint(5, (3, 6)), observed)
    values = torch.randn(3, 6, 2)
    values[torch.rand(3, 6, 2) < 0.3] = torch.nan
    return Case(Normal(torch.randn(4, 2), 1.0).to_event(1), values)


@pytest.mark.parametrize("name", ["symbols", "normal"])
def test_an_hmm_answers_as_it_does_on_the_cpu(name, launched):
    emission, values, observed = case(name)
    logits = [torch.randn(4), torch.randn(4, 4)]

    def answers():
        tables = [part.clone().requires_grad_() for part in logits]
        lengths = torch.tensor([6, 4, 1])
        hmm = HMM(*(part.log_softmax(-1) for part in tables), emission, lengths, observed=observed)
        evidence = hmm.log_prob(values)
        found = [evidence, *torch.autograd.grad(evidence.sum(), tables), hmm.filtered(values)]
        counts = hmm.expected_counts(values)
        return [*found, *hmm.posterior(values), counts.state_probs, *counts.counts.values()]

    found, count = answers(), len(launched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_torch, "pick", lambda *_: TORCH)
        expected = answers()
    assert len(launched) == count >= 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# Choosing


def test_it_runs_where_it_works_and_is_not_switched_off(monkeypatch, caplog):
    def tried(error):
        def messages(*_):
            if error is not None:
                raise error

        monkeypatch.setattr(_triton, "messages", messages)
        backends.has_triton.cache_clear()
        return backends.pick(torch.device("cuda", 0))

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    with caplog.at_level(logging.WARNING, "pyrohmm"):
        assert tried(None) is TRITON
        with use(TORCH):
            assert tried(None) is TORCH
        assert backends.pick(torch.device("cuda", 0), fits=False) is TORCH
        assert tried(ImportError("triton")) is TORCH
        assert not caplog.messages
        assert tried(RuntimeError("Failed to find C compiler")) is TORCH
    assert "Failed to find C compiler" in caplog.text
    backends.has_triton.cache_clear()


COMPILED = """
import os, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pyrohmm.ops.dense._triton import _join, _pass, options

program = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
tensors = "initial", "matrices", "weight", "message", "norm", "alpha", "beta", "peak", "largest"
numbers = "by_group", "by_row", "by_state", "num_steps", "count", "size", "rows"

def compile(kernel, arch, name, chosen, **kinds):
    launch = {key: chosen.pop(key) for key in ("num_warps", "enable_fp_fusion") if key in chosen}
    kinds |= dict.fromkeys(tensors, "*" + name) | dict.fromkeys(numbers, "i32")
    kinds = {key: kinds.get(key, "constexpr") for key in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=chosen)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    assert made.metadata.shared <= 8192
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        call = [program, "--dump-resource-usage", file.name]
        used = subprocess.run(call, capture_output=True, text=True).stdout
    assert "STACK:0 " in used, (arch, name, chosen, used)

for arch, dtype, name, states, each in (
    (90, torch.float32, "fp32", 1, False), (90, torch.float32, "fp32", 128, False),
    (80, torch.float32, "fp32", 64, True), (90, torch.float64, "fp64", 128, False),
):
    compile(_pass, arch, name, options(dtype, states) | {"EACH": each, "RAGGED": True}, last="*i1")
for arch, name, wide, states in (
    (80, "fp32", "fp64", 16), (90, "fp32", "fp32", 128), (90, "fp64", "fp64", 128),
):
    chosen = {"K": states, "WIDTH": states, "ROWS": 2048 // states, "RAGGED": True}
    doubles = dict.fromkeys(("logs", "mass"), "*fp64")
    compile(_join, arch, name, chosen, padded="*i1", moved="*" + wide, **doubles)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
def test_it_compiles_for_devices_with_the_matrix_in_registers(tmp_path):
    """What the interpreter cannot show: types agree, and no register is spilled to memory."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED]
    subprocess.run(command, env=environment, check=True)


@pytest.mark.skipif(DEVICE == "twin", reason="needs a real device")
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_answers_of_a_real_device_are_those_of_the_cpu(name, dtype):
    def answers(chain):
        chain = chain.with_gradients()
        found = recursions.log_evidence(*chain)
        found.sum().backward()
        return [
            part.detach().cpu()
            for part in (found, *chain.gradients, *recursions.posterior(*chain),
                         recursions.filtered(*chain).exp())
        ]  # fmt: skip

    chain = CHAINS[name](dtype=dtype)
    there = chain._replace(
        **{key: getattr(chain, key).to(DEVICE) for key in chain._fields if key != "lengths"}
    )
    assert backends.pick(there.log_initial.device) is TRITON
    for one, other in zip(answers(there), answers(chain), strict=True):
        torch.testing.assert_close(one, other, **ROUNDING[dtype])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or DEVICE != "twin", reason="needs CUDA")
def test_on_a_real_device():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    subprocess.run(command, env=os.environ | {"PYROHMM_TEST_DEVICE": "cuda"}, check=True)
