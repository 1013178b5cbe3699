"""Tests run in float64; those of float32 and CUDA are separate, and state their tolerance."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _double(_fresh):
    torch.set_default_dtype(torch.float64)
