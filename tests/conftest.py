"""Tests run in float64; those of float32 and CUDA are separate, and state their tolerance."""

import os

import pytest
import torch

from pyrohmm.ops import backends

if os.environ.get("PYROHMM_TEST_DEVICE", "twin") == "twin":
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads at its import: kernels need no GPU
    import twin_device  # noqa: F401  # before the first gradient, when torch counts the devices


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)


@pytest.fixture(params=["compiled", "torch"])
def engine(request):
    """Both implementations of recursions: Numba's kernels, and torch operations."""
    if request.param == "compiled" and not backends.has_numba():
        pytest.skip("Numba is not installed")
    with backends.use(backends.NUMBA if request.param == "compiled" else backends.TORCH):
        yield request.param
