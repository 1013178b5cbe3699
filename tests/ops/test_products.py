"""Products between observations and states, against sums written out by einsum."""

import pytest
import torch

from pyrohmm.ops import products
from pyrohmm.ops.products import (
    integers_of,
    product,
    second_moments,
    squared_norms,
    weighted_sums,
)

SHAPES = [  # batch of rows, batch of columns
    ((), ()),
    ((1,), ()),
    ((5,), ()),
    ((5,), (1,)),
    ((4, 5), (5,)),
    ((5,), (3, 1)),
    ((4, 1, 5), (3, 1)),
    ((4, 3, 5), (3, 5)),
    ((2, 1, 4, 1), (3, 1, 6)),
    ((0,), (3, 1)),
]


@pytest.fixture(params=[1, 50, products.CHUNK], autouse=True)
def _chunk(request, monkeypatch):
    """A row at a time, some, all."""
    monkeypatch.setattr(products, "CHUNK", request.param)


def operands(rows, columns, own):
    torch.manual_seed(0)
    return (
        torch.randn(*rows, 3, requires_grad=True),
        torch.randn(*columns, *own, 3, requires_grad=True),
    )


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_product_is_the_sum_over_features(rows, columns):
    x, c = operands(rows, columns, (2,))
    torch.testing.assert_close(product(x, c), torch.einsum("...f,...kf->...k", x, c))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_squared_norms_are_sums_of_squares_of_products(rows, columns):
    x, c = operands(rows, columns, (2, 4))
    expected = torch.einsum("...f,...kdf->...kd", x, c).square().sum(-1)
    torch.testing.assert_close(squared_norms(x, c), expected)


@pytest.mark.parametrize(("rows", "columns"), [((2,), ()), ((2, 2), (2,)), ((2,), (2, 1))])
@pytest.mark.parametrize(
    ("function", "own"),
    [(product, (2,)), (squared_norms, (2, 2))],
)
def test_gradients_of_products_are_those_of_differences(function, own, rows, columns):
    """Also of second order."""
    x, c = operands(rows, columns, own)
    assert torch.autograd.gradcheck(function, (x, c))
    assert torch.autograd.gradcheck(function, (x.detach(), c))
    assert torch.autograd.gradgradcheck(function, (x, c))


@pytest.mark.parametrize("function", [product, squared_norms])
def test_under_autocast_products_keep_their_precision(function):
    x, c = (torch.randn(size).requires_grad_() for size in ((7, 3), (2, 4, 3)))
    if function is product:
        c = c[:, 0]
    expected = function(x, c)
    slope = torch.autograd.grad(expected.sum(), (x, c))
    with torch.autocast("cpu", torch.bfloat16):
        found = function(x, c)
        found_slope = torch.autograd.grad(found.sum(), (x, c))
    torch.testing.assert_close((found, *found_slope), (expected, *slope), rtol=0, atol=0)


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("restarts", [1, 3])
def test_weighted_sums_are_sums_over_observations(restarts, count):
    torch.manual_seed(0)
    weights, values = torch.rand(restarts, count, 2), torch.randn(count, 3)
    found = weighted_sums(weights.float(), values, lambda x: torch.cat([x, x**2], -1), 6)
    features = torch.cat([values, values**2], -1)
    expected = torch.einsum("rmk,mf->rkf", weights.float().double(), features)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("restarts", [1, 3])
def test_second_moments_are_sums_of_outer_products_about_the_origin(
    restarts, count, certain, monkeypatch
):
    monkeypatch.setattr(products, "LONG", 3)
    torch.manual_seed(0)
    weights, values, about = torch.rand(restarts, count, 2), torch.randn(count, 3), torch.randn(3)
    if certain:  # all but some, and all of a state
        weights *= 1e-35 ** (torch.rand_like(weights) < 0.7) * torch.tensor([1.0, 1e-33])
    rows = torch.cat([torch.ones(count, 1), values.double() - about], -1)
    expected = torch.einsum("rmk,mf,mg->rkfg", weights.double(), rows, rows)
    torch.testing.assert_close(second_moments(weights, values, about), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_integers_in_a_small_range_are_numbered(dtype):
    torch.manual_seed(0)
    values = torch.randint(-3, 40, (40, 30)).to(dtype)
    floating = dtype.is_floating_point
    if floating:
        values[torch.rand(40, 30) < 0.1] = torch.nan
    numbers, index = integers_of(values)
    assert numbers.dtype == dtype
    assert len(numbers) == 43
    missing = values.isnan()
    torch.testing.assert_close(numbers[index[~missing]], values[~missing])
    assert bool((index[missing] == 43).all())
    wide, half = values.clone(), values.clone()
    wide[-1, -1] = 10**6
    half[-1, -1] = 7.5
    assert integers_of(values[:1]) is None
    assert integers_of(wide) is None
    assert (integers_of(half) is None) == floating
    if floating:
        assert integers_of(torch.full_like(values, torch.nan)) is None
        assert integers_of(values.masked_fill(missing, torch.inf)) is None
        assert integers_of(values.clone().requires_grad_()) is None


def test_a_missing_number_is_none_of_large_integers():
    """Above 2^24, where the next float32 is two further, the index of NaN is still that of none."""
    values = 2.0**24 - torch.arange(2000.0) % 5
    values[::3] = torch.nan
    numbers, index = products.integers_of(values)
    assert (index[::3] == len(numbers)).all()
    assert torch.equal(numbers[index[1::3]], values[1::3])
