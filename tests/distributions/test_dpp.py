"""The determinantal prior: kernels, their determinant, and the density of diverse rows."""

import itertools
import math

import pyro
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.distributions import Dirichlet
from torch.autograd import gradcheck, gradgradcheck

from pyrohmm import (
    DenseHMM,
    DiversityPrior,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    dpp,
    left_to_right,
)


def drawn(num_rows, size=None, batch=(), concentration=1.0):
    size = size or num_rows
    return Dirichlet(torch.full((*batch, num_rows, size), concentration)).sample()


def slow_kernel(rows, rho, normalized):
    """Entry by entry, as equations 2 and 5 are written."""
    found = torch.zeros(len(rows), len(rows))
    for i, j in itertools.product(range(len(rows)), repeat=2):
        found[i, j] = sum((float(a) * float(b)) ** rho for a, b in zip(rows[i], rows[j]))
    if normalized:
        own = found.diagonal().clone()
        for i, j in itertools.product(range(len(rows)), repeat=2):
            found[i, j] /= math.sqrt(own[i] * own[j])
    return found


def slow_determinant(matrix):
    """Sum over all permutations."""
    total = 0.0
    for order in itertools.permutations(range(len(matrix))):
        swaps = sum(a > b for a, b in itertools.combinations(order, 2))
        total += (-1) ** swaps * math.prod(float(matrix[i, j]) for i, j in enumerate(order))
    return total


sizes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda pair: (pair[0], sum(pair)))
exponents = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@settings(deadline=None)
@given(sizes, exponents, st.integers(0, 10**6))
def test_log_diversity_is_the_log_determinant(size, rho, seed):
    torch.manual_seed(seed)
    rows = drawn(*size)
    exact = slow_determinant(slow_kernel(rows, rho, True))
    assert dpp.log_diversity(rows, rho).exp().item() == pytest.approx(exact, rel=1e-6, abs=1e-12)


def test_a_large_exponent_does_not_underflow():
    """All that is left of each row is its largest entry, and that is another in each."""
    rows = (0.04 + 0.2 * torch.eye(20))[:3]
    assert not bool((rows**600).any(-1).all())  # what the length of a row is the root of
    rows.requires_grad_()
    value = dpp.log_diversity(rows, 300.0)
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    (slope,) = torch.autograd.grad(value, rows)
    assert bool(slope.isfinite().all())


def test_it_is_at_most_zero_and_zero_for_a_permutation():
    assert bool((dpp.log_diversity(drawn(4, batch=(1000,))) < 0).all())
    order = torch.randperm(5)
    assert dpp.log_diversity(torch.eye(5)[order]).item() == 0.0
    assert dpp.log_diversity(torch.ones(1, 1)).item() == 0.0
    rounding = 7 * torch.finfo(torch.float64).eps  # of the sum of a row
    assert dpp.log_diversity(drawn(1, 7)).item() == pytest.approx(0.0, abs=rounding)


def right_gradient(rows, rho):
    """Protocol of the derivation: 2 rho A^(rho-1) [(S^-1)_ji - S_ij / n_i^2]."""
    powers = rows**rho
    lengths = (powers**2).sum(-1, keepdim=True)
    return 2 * rho * rows ** (rho - 1) * (torch.linalg.inv(powers).mT - powers / lengths)


@pytest.mark.parametrize("rho", [0.3, 0.5, 1.0])
def test_gradient_is_the_right_formula(rho):
    rows = drawn(5).requires_grad_()
    (slope,) = torch.autograd.grad(dpp.log_diversity(rows, rho), rows)
    torch.testing.assert_close(slope, right_gradient(rows.detach(), rho))


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (1, 1), (1, 3)])
def test_gradient_to_second_order(shape):
    logits = torch.randn(2, *shape, requires_grad=True)

    def of_logits(free):
        return dpp.log_diversity(free.softmax(-1))

    assert gradcheck(of_logits, logits)
    assert gradgradcheck(of_logits, logits)


def test_hard_zeros_have_a_value_and_a_gradient_of_zero():
    rows = torch.tensor([[0.0, 0.3, 0.7], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]], requires_grad=True)
    value = dpp.log_diversity(rows)
    (slope,) = torch.autograd.grad(value, rows)
    assert value.item() == pytest.approx(
        math.log(slow_determinant(slow_kernel(rows.detach(), 0.5, True)))
    )
    assert bool(slope.isfinite().all())
    assert slope[0, 0] == 0
    assert slope[1, 2] == 0
    exact = right_gradient(rows.detach(), 0.5)
    torch.testing.assert_close(slope[rows > 0], exact[rows > 0])


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12])
def test_nearly_equal_rows_keep_their_digits(gap):
    """The determinant of two roots of rows can be written without a difference that cancels."""
    rows = torch.tensor([[0.5, 0.5], [0.5 + gap, 0.5 - gap]], requires_grad=True)
    value = dpp.log_diversity(rows)
    exact = 2 * math.log(abs(math.sqrt(0.5 - gap) - math.sqrt(0.5 + gap)) * math.sqrt(0.5))
    assert value.item() == pytest.approx(exact, rel=1e-16 / gap + 1e-9)
    (slope,) = torch.autograd.grad(value, rows)
    assert bool(slope.isfinite().all())
    # moving along the gap g changes log det by 2 / g
    assert (slope[1, 0] - slope[1, 1]).item() == pytest.approx(2 / gap, rel=1e-3 + 1e-15 / gap)


def test_a_determinant_of_zero():
    equal = torch.full((2, 3, 3), 1 / 3)
    equal[1] = drawn(3)
    equal.requires_grad_()
    value = dpp.log_diversity(equal)
    assert value[0] == -math.inf
    assert value[1].isfinite()
    (slope,) = torch.autograd.grad(value[1], equal)
    assert bool(slope.isfinite().all())
    assert bool((slope[0] == 0).all())
    (slope,) = torch.autograd.grad(dpp.log_diversity(equal)[0], equal)
    assert bool((slope == 0).all())
    assert dpp.log_diversity(drawn(3, 2)) == -math.inf


# The prior of a model -----------------------------------------------------------------------------

DATA = Sequences.from_list([[0, 1, 2, 0], [2, 1], [1]])


MODULES = {
    "tabular": lambda: TabularHMM(3, categorical(3)),
    "left to right": lambda: TabularHMM(3, categorical(3), transition_allowed=left_to_right(3)),
    "dense": lambda: DenseHMM(3, 3, 2),
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


def test_one_factor_outside_the_plate(module):
    prior = DiversityPrior(3.0)
    trace = pyro.poutine.trace(MarginalModel(module, prior)).get_trace(DATA)
    site = trace.nodes["log_prior"]
    assert [frame.name for frame in site["cond_indep_stack"]] == []
    matrix = trace.nodes["_RETURN"]["value"].log_transition.exp()
    expected = 3.0 * torch.tensor(
        math.log(slow_determinant(slow_kernel(matrix.detach(), 0.5, True)))
    )
    torch.testing.assert_close(site["fn"].log_prob(site["value"]), expected)


def test_weights():
    matrix, anchor = drawn(3), drawn(3)
    prior = DiversityPrior(2.0, 1.0, anchor=anchor, anchor_weight=7.0)
    expected = 2 * dpp.log_diversity(matrix, 1.0) - 7 * (matrix - anchor).pow(2).sum()
    torch.testing.assert_close(prior.log_density_of_transition(matrix), expected)
    assert DiversityPrior.as_in_paper(10.0).alpha == 5.0
    assert DiversityPrior(0.0).log_density_of_transition(torch.full((3, 3), 1 / 3)).item() == 0.0
    assert "alpha=2" in repr(prior)
