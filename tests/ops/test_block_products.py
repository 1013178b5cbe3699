"""Backward products against sums of the whole matrix in logarithms."""

import pytest
import torch

from pyrohmm.ops import blocks
from pyrohmm.ops.blocks import products as block_products
from pyrohmm.ops.blocks.inner_products import InnerProductTransition
from pyrohmm.ops.blocks.products import BackwardProducts


def transition(two_level, scale=1.0, dtype=torch.float64):
    torch.manual_seed(0)
    each = blocks.from_clusters(torch.tensor([0, 1, 2]), torch.tensor([2, 4, 3]))
    leave, enter = torch.randn(2, 9, 5, dtype=dtype) * scale
    logits = torch.randn(9, 3, dtype=dtype) * scale if two_level else None
    return InnerProductTransition(leave, enter, each, logits)


def expected(each, log_values):
    return (each.matrix.double() + log_values.double().unsqueeze(1)).logsumexp(-1)


@pytest.mark.parametrize("limit", [block_products.KEPT, 0])
@pytest.mark.parametrize("two_level", [True, False])
def test_products_are_those_of_the_matrix(two_level, limit, monkeypatch):
    monkeypatch.setattr(block_products, "KEPT", limit)
    monkeypatch.setattr(block_products, "CHUNK", 20)  # two rows at a time
    each = transition(two_level)
    log_values = torch.randn(4, 9) * 3
    log_values[1, 2:] = -torch.inf
    log_values[2] = -torch.inf
    log_values[3] -= 1e5
    found = BackwardProducts(each)(log_values)
    assert torch.allclose(found, expected(each, log_values), atol=1e-12)
    assert found[2].isneginf().all()
    assert BackwardProducts(each)(log_values[:0]).shape == (0, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_below_the_range_of_numbers_is_exact(dtype):
    """Transitions of probability e^-1000 to the only states with a value."""
    each = transition(True, 30.0, dtype)
    log_values = torch.full((2, 9), -torch.inf, dtype=torch.float64)
    log_values[0, 6:], log_values[1, 0], log_values[1, 5] = -3.0, -900.0, 0.0
    wanted = expected(each, log_values)
    assert wanted.min() < -150
    found = BackwardProducts(each)(log_values)
    assert torch.allclose(found, wanted, rtol=1e-6 if dtype == torch.float32 else 1e-12)


def test_the_matrix_is_computed_once_and_kept_while_the_vectors_live():
    each = transition(True)
    first, second = BackwardProducts(each), BackwardProducts(each)
    assert first._matrix is second._matrix
    assert BackwardProducts(transition(True))._matrix is not first._matrix
