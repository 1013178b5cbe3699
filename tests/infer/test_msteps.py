"""M-steps of a transition matrix under a diversity prior: they rise to the same optimum."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from pyrohmm import (
    DiversityPrior,
    GradientStep,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    left_to_right,
    msteps,
)

KINDS = {
    "fixed point": lambda n: msteps.FixedPoint(n),
    "logits": lambda n: msteps.LogitGradient(GradientStep(n)),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def problems(count, size, seed=0, zeros=0.0):
    """Start matrices, and counts of transitions."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.dirichlet(np.ones(size), size) for _ in range(count)])
    counts = rng.gamma(0.5, 30.0, (count, size, size))
    counts *= rng.random(counts.shape) >= zeros
    counts[:, range(size), range(size)] += 1.0
    return torch.from_numpy(rows), torch.from_numpy(counts)


def slow_objective(rows, counts, alpha, anchor=None, weight=0.0):
    """Of one matrix, as it is written."""
    roots = np.sqrt(rows)
    kernel = roots @ roots.T / np.sqrt(np.outer(rows.sum(-1), rows.sum(-1)))
    total = alpha * math.log(max(np.linalg.det(kernel), 1e-300)) if alpha else 0.0
    total += sum(c * math.log(a) for c, a in zip(counts.ravel(), rows.ravel()) if c > 0)
    return total if anchor is None else total - weight * ((rows - anchor) ** 2).sum()


def test_objective():
    rows, counts = problems(5, 3, zeros=0.3)
    anchor = problems(1, 3, seed=1)[0][0]
    found = msteps.objective(rows, counts, DiversityPrior(2.0, anchor=anchor, anchor_weight=3.0))
    exact = [slow_objective(a, c, 2.0, anchor.numpy(), 3.0)
             for a, c in zip(rows.numpy(), counts.numpy())]  # fmt: skip
    torch.testing.assert_close(found, torch.tensor(exact))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 10.0, 300.0])
@pytest.mark.parametrize("weight", [0.0, 1.0, 1e5])
@pytest.mark.parametrize("num_steps", [1, 5])
def test_no_step_ends_below_a_point_it_was_given(kind, alpha, weight, num_steps):
    """The old matrix, the mode of the counts, and the anchor, none of which has a zero."""
    for size in (2, 4):
        rows, counts = problems(200, size, seed=size, zeros=0.4)
        options = {"anchor": problems(1, size, seed=7)[0][0], "anchor_weight": weight}
        prior = DiversityPrior(alpha, **(options if weight else {}))
        given = [rows, counts / counts.sum(-1, keepdim=True)]
        given += [options["anchor"].expand_as(rows)] if weight else []
        best = torch.stack([msteps.objective(each, counts, prior) for each in given]).amax(0)
        found = kind(num_steps)(rows, counts, prior)
        reached = msteps.objective(found, counts, prior)
        assert bool((reached >= best - 1e-11 * best.abs()).all())
        torch.testing.assert_close(found.sum(-1), torch.ones(200, size))
        assert bool((found >= 0).all())


@pytest.mark.parametrize("weight", [1.0, 100.0, 1e5])
def test_without_diversity_the_anchored_mode_is_found(kind, weight):
    """The objective is concave, and its optimum where all slopes of what is left are equal."""
    rows, counts = problems(20, 4, zeros=0.4)
    anchor = problems(1, 4, seed=1)[0][0]
    prior = DiversityPrior(0.0, anchor=anchor, anchor_weight=weight)
    found = kind(1000)(rows, counts, prior)
    slopes = counts / found.clamp(min=1e-300) - 2 * weight * (found - anchor)
    common = (slopes * found).sum(-1, keepdim=True)
    size = counts.sum(-1, keepdim=True) + weight
    assert bool((((slopes - common) * found).abs() < 1e-5 * size).all())
    assert bool((slopes - common < 1e-5 * size).all())


@pytest.mark.parametrize("size", [2, 3, 6])
def test_both_reach_the_same_optimum(size):
    """Where counts weigh more than the prior, so that there is one; elsewhere there are several."""
    _, counts = problems(40, size)
    counts = counts + 5.0
    start = counts / counts.sum(-1, keepdim=True)
    prior = DiversityPrior(3.0)
    heights = [msteps.objective(kind(4000)(start, counts, prior), counts, prior)
               for kind in KINDS.values()]  # fmt: skip
    for other in heights[1:]:
        torch.testing.assert_close(other, heights[0], rtol=1e-9, atol=0)
    found = KINDS["fixed point"](4000)(start, counts, prior)
    # L-BFGS ends where the objective does not change: half of the digits of the point
    other = KINDS["logits"](4000)(start, counts, prior)
    torch.testing.assert_close(other, found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("alpha", [0.5, 50.0, 500.0])
@pytest.mark.parametrize("size", [1, 2, 5, 12, 16])
def test_the_fixed_point_is_one_and_the_default_steps_come_near(alpha, size):
    rows, counts = problems(10, size, zeros=0.2)
    prior = DiversityPrior(alpha)
    near = msteps.FixedPoint()(rows, counts, prior)
    found = msteps.FixedPoint(20_000)(near, counts, prior)
    heights = [msteps.objective(each, counts, prior) for each in (near, found)]
    torch.testing.assert_close(*heights, rtol=1e-6, atol=0)
    roots = found.sqrt()
    gains = roots * torch.linalg.inv(roots).mT
    torch.testing.assert_close(gains.sum(-1), torch.ones(10, size))
    right = (counts + alpha * gains) / (counts.sum(-1, keepdim=True) + alpha)
    assert (found - right).abs().max() < 1e-10


ANCHORED = [
    ([[7, 0, 0], [0, 1, 0], [0, 0, 3]], 1.0, 5.0, 10.0),
    ([[3, 3, 1, 5], [0, 0, 0, 9], [0, 5, 0, 9], [0, 3, 0, 3]], 0.0, 5.0, 1000.0),
    ([[3, 3, 1, 5], [0, 0, 0, 9], [0, 5, 0, 9], [0, 3, 0, 3]], 1.0, 5.0, 1000.0),
    ([[0, 0, 4, 0], [1, 2, 0, 0], [5, 0, 0, 0], [0, 0, 3, 3]], 1.0, 50.0, 100.0),
]


def anchored_cases(count):
    """Small counts with zeros, and with some more as the anchor; weights over many orders."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        size = int(rng.integers(3, 7))
        counts = rng.poisson(rng.gamma(0.5, 6.0, (size, size))) * (rng.random((size, size)) > 0.3)
        yield counts, 10 ** rng.uniform(-2, 0), 10 ** rng.uniform(-0.3, 3), 10 ** rng.uniform(0, 5)


def best_of_softmax_starts(counts, anchor, alpha, weight, starts):
    """The highest of L-BFGS ascents in logits, by SciPy."""
    size, totals = len(counts), counts.sum(-1, keepdims=True)

    def loss(logits):
        logits = logits.reshape(size, size)
        logits = logits - logits.max(-1, keepdims=True)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        rows, roots = np.exp(logs), np.exp(logs / 2)
        volume = np.linalg.slogdet(roots)[1]
        if not volume > -30:  # the inverse has no digits left
            return 1e10, np.zeros(size * size)
        height = (counts * logs).sum() + 2 * alpha * volume
        height -= weight * ((rows - anchor) ** 2).sum()
        away = -2 * weight * (rows - anchor)
        slope = counts - totals * rows + alpha * (roots * np.linalg.inv(roots).T - rows)
        slope += rows * (away - (rows * away).sum(-1, keepdims=True))
        return -height, -slope.ravel()

    rng = np.random.default_rng(1)
    points = [anchor, *(rng.dirichlet(np.ones(size), size) for _ in range(starts - 1))]
    return max(
        -minimize(loss, np.log(p + 1e-6).ravel(), jac=True, options={"maxiter": 1000},
                  method="L-BFGS-B").fun
        for p in points
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_a_search_is_as_good_as_fifty_starts_of_a_general_optimiser(count):
    """Under an anchor; also where the counts alone have a determinant of zero."""
    cases = [*ANCHORED, *((c, more, *rest) for c, more, *rest in anchored_cases(count))]
    for counts, more, alpha, weight in cases:
        counts = np.asarray(counts, dtype=float)
        anchor = (counts + more) / (counts + more).sum(-1, keepdims=True)
        best = best_of_softmax_starts(counts, anchor, alpha, weight, 50)
        many = torch.from_numpy(counts)[None]
        prior = DiversityPrior(alpha, anchor=torch.from_numpy(anchor), anchor_weight=weight)
        start = many / many.sum(-1, keepdim=True).clamp(min=1.0)
        start = torch.where(many.sum(-1, keepdim=True) > 0, start, 1 / len(counts))
        found = msteps.FixedPoint(num_starts=100)(start, many, prior)
        assert msteps.objective(found, many, prior).item() > best - 1e-3


@pytest.mark.parametrize("weight", [0.0, 20.0])
def test_restarts_do_not_touch_each_other(weight):
    rows, counts = problems(7, 4, zeros=0.3)
    anchor = {"anchor": problems(1, 4, seed=3)[0][0], "anchor_weight": weight} if weight else {}
    prior, step = DiversityPrior(30.0, **anchor), msteps.FixedPoint(25)
    together = step(rows, counts, prior)
    alone = torch.cat([step(a, c, prior) for a, c in zip(rows.split(1), counts.split(1))])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)


def test_zeros_that_are_allowed_are_left_where_that_is_better(kind):
    """Beginning at counts, some of which are zero, as EM does."""
    _, counts = problems(10, 4, zeros=0.4)
    rows = counts / counts.sum(-1, keepdim=True)
    prior = DiversityPrior(10.0)
    found = kind(1000)(rows, counts, prior)
    left = ((rows == 0) & (found > 1e-3)).flatten(1).any(-1)
    assert left.sum() > 5
    for row, count, best in zip(rows[left], counts[left], found[left]):
        kept = kind(1000)(row[None], count[None], prior, count > 0)
        assert (kept[0] == 0).equal(count == 0)
        heights = [msteps.objective(each, count[None], prior) for each in (best[None], kept)]
        assert heights[0] > heights[1] + 0.1


def test_zeros_that_are_ruled_out_stay(kind):
    allowed = left_to_right(4)
    rows, counts = problems(20, 4)
    rows = rows.masked_fill(~allowed, 0.0)
    rows = rows / rows.sum(-1, keepdim=True)
    counts = counts.masked_fill(~allowed, 0.0)
    found = kind(50)(rows, counts, DiversityPrior(20.0), allowed)
    assert bool((found.masked_fill(allowed, 0.0) == 0).all())
    prior = DiversityPrior(20.0)
    assert bool((msteps.objective(found, counts, prior)
                 > msteps.objective(rows, counts, prior)).all())  # fmt: skip


def test_equal_rows_are_left_for_the_counts_and_others_do_not_mind(kind):
    rows, counts = problems(3, 3)
    rows[1] = 1 / 3
    prior = DiversityPrior(2.0)
    found = kind(5)(rows, counts, prior)
    assert bool(found.isfinite().all())
    heights = [msteps.objective(each, counts, prior) for each in
               (found, counts / counts.sum(-1, keepdim=True), rows)]  # fmt: skip
    assert heights[2][1] == -math.inf
    assert heights[0][1] > heights[1][1]
    assert (found[0] - rows[0]).abs().max() > 1e-3


def test_other_exponents_end_where_no_logit_has_a_slope():
    _, counts = problems(5, 3)
    counts = counts + 5.0
    start = counts / counts.sum(-1, keepdim=True)
    prior = DiversityPrior(3.0, rho=1.0)
    found = msteps.LogitGradient(GradientStep(3000))(start, counts, prior)
    logits = found.log().requires_grad_()
    height = msteps.objective(logits.softmax(-1), counts, prior)
    (slopes,) = torch.autograd.grad(height.sum(), logits)
    assert slopes.abs().max() < 1e-5 * counts.max()
    assert bool((height > msteps.objective(start, counts, prior)).all())


def test_counts_that_underflow_are_none(kind):
    """As where a state can hardly go to another: what is counted there is 1e-226."""
    rows, counts = problems(4, 3)
    counts[:, 0, 2] = 1e-226
    prior = DiversityPrior(0.5)
    start = counts / counts.sum(-1, keepdim=True)
    found = kind(200)(rows, counts, prior)
    none = torch.where(counts > 1e-200, counts, 0.0)
    heights = [msteps.objective(each, none, prior) for each in (rows, start, found)]
    assert bool((heights[2] > heights[0]).all())
    assert bool(msteps.objective(found, counts, prior).isfinite().all())
    if kind is KINDS["fixed point"]:
        roots = found.sqrt()
        gains = roots * torch.linalg.inv(roots).mT
        right = (none + 0.5 * gains) / (none.sum(-1, keepdim=True) + 0.5)
        assert (found - right).abs().max() < 1e-10


def test_a_search_ends_no_lower_than_one_ascent():
    """Its points include the one that the step alone climbs from."""
    rng = np.random.default_rng(5)
    for _ in range(8):
        counts = torch.tensor(rng.poisson(2.0, size=(1, 3, 3)).astype(float)) + 0.1
        rows = torch.tensor(rng.dirichlet(np.ones(3), size=(1, 3)))
        prior = DiversityPrior(float(rng.choice([5.0, 50.0])))
        alone = msteps.objective(msteps.FixedPoint()(rows, counts, prior), counts, prior)
        searched = msteps.FixedPoint(num_starts=100)(rows, counts, prior)
        assert msteps.objective(searched, counts, prior) >= alone - 1e-9


@pytest.mark.parametrize(("rho", "missing"), [(0.5, False), (0.5, True), (0.8, False)])
def test_a_fit_searches_where_nearly_all_states_are_known(rho, missing):
    """No label is missing, one is, or the exponent is another one: as good as from every point."""
    rng, words = np.random.default_rng(0), [[0, 2]] * 4 + [[1, 0], [1, 1], [1, 1]]
    words = words + [[2, 0]] * 5 + [[3, 2]] * 3 + [[3, 3]] * 3
    labels = [list(word) for word in words]
    if missing:
        labels[4][1] = -1
    counts = torch.tensor(ANCHORED[3][0]).double()
    anchor = (counts + 1) / (counts + 1).sum(-1, keepdim=True)
    prior = DiversityPrior(50.0, rho, anchor=anchor, anchor_weight=100.0)
    data = Sequences.from_list(words, labels=labels)
    fit = fit_em(TabularHMM(4, categorical(4)), data, log_prior=prior)
    found = fit.hmm(data).log_transition.exp()[None].double()
    step = msteps.LogitGradient() if rho != 0.5 else msteps.FixedPoint()
    points = torch.tensor(rng.dirichlet(np.ones(4), size=(30, 4)))
    best = max(
        msteps.objective(step(point[None], counts[None], prior), counts[None], prior).item()
        for point in [*points, anchor]
    )
    # what the missing label may be is worth less than a nat
    assert msteps.objective(found, counts[None], prior) > best - (1.0 if missing else 0.1)
