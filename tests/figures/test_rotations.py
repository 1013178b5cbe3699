"""A guide over rotated embeddings: its density is a density."""

import importlib
import itertools
import math
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import stats

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    Sequences,
    fit_map,
    fit_svi,
    normal,
)

LENGTHS = torch.tensor([6, 4, 1])
DATA = Sequences(torch.randint(3, (3, 6), generator=torch.Generator().manual_seed(0)), LENGTHS)
FIGURES = Path(__file__).resolve().parents[2] / "figures"
SIZES = [(1, 1), (5, 2), (2, 3), (1, 4)]  # n, D


@pytest.fixture
def rotations(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("common.rotations")


@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_the_volume_of_an_orbit_makes_normal_embeddings_of_bartletts_triangles(
    rotations, size, dim
):
    """For M of standard normal entries L is known: chi on the diagonal, normal below it.

    Then the density of M that L gives must be normal, at every L.
    """
    rank = min(size, dim)
    for _ in range(5):
        lower = torch.randn(size, rank).tril()
        lower.diagonal().abs_()
        score = sum(
            stats.chi(dim - i).logpdf(lower[i, i]) if i == j else stats.norm.logpdf(lower[i, j])
            for i, j in itertools.product(range(size), range(rank))
            if j <= i
        )
        found = score - rotations.log_orbit(lower.diagonal(), dim)
        padded = torch.nn.functional.pad(lower, (0, dim - rank))
        wanted = Normal(0.0, 1.0).log_prob(padded).sum()
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("rank", "dim"), [(1, 1), (2, 3), (3, 3)])
def test_rotations_are_orthogonal_and_uniform(rotations, rank, dim):
    """Uniform means that one more rotation changes nothing: moments of all orders are alike."""
    found = rotations.uniform_rotation(torch.zeros(20000, 5, rank), dim)
    torch.testing.assert_close(found @ found.mT, torch.eye(rank).expand(20000, rank, rank))
    error = 5 / 20000**0.5
    assert found.mean(0).abs().max() < error
    assert (found.square().mean(0) - 1 / dim).abs().max() < error
    quartic = 3 / (dim * (dim + 2))  # of a coordinate of a uniform unit vector
    assert (found.pow(4).mean(0) - quartic).abs().max() < error
    if rank == dim:
        assert torch.linalg.det(found).mean().abs() < error


def anything(shapes):
    """A model whose variables are all that there is."""

    def model(data):
        for name, shape in shapes.items():
            pyro.sample(name, Normal(torch.zeros(shape), 1.0).to_event(len(shape)))

    return model


def guide_of(rotations, shapes, autoguide=AutoNormal):
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    return rotations.RotationGuide(anything(shapes), start, [list(shapes)], autoguide)


def density(guide, arrays):
    """Log-density of M, from M alone: L by a Cholesky root, areas of spheres by a table.

    ``arrays`` are ``(P, n, D)``, P arrays of embeddings.
    """
    part, dim = guide._parts[0], arrays.shape[-1]
    order, rank = part.rows.argsort().numpy(), min(arrays.shape[-2:])
    rows = arrays[:, order]
    gram = rows @ rows.swapaxes(-1, -2)
    root = np.linalg.cholesky(gram[:, :rank, :rank])
    lower = np.linalg.solve(root, gram[:, :rank]).swapaxes(-1, -2)
    diagonal = np.diagonal(lower, axis1=-2, axis2=-1)
    below = lower[:, *np.tril_indices(rows.shape[1], -1, rank)]
    values = torch.as_tensor(np.concatenate([np.log(diagonal), below], -1))
    if isinstance(guide.inner, AutoNormal):
        loc, scale = guide.inner._get_loc_and_scale(part.name)
        score = Normal(loc, scale).log_prob(values).sum(-1)
    else:
        score = guide.inner.get_posterior().log_prob(values)
    score = score.detach().numpy() - np.log(diagonal).sum(-1)  # of diagonals, not of their logs
    spheres = {0: 2.0, 1: 2 * math.pi, 2: 4 * math.pi, 3: 2 * math.pi**2}
    for i in range(rank):
        score -= (dim - 1 - i) * np.log(diagonal[:, i]) + math.log(spheres[dim - 1 - i])
    return score


@pytest.mark.parametrize("autoguide", [AutoNormal, AutoMultivariateNormal])
@pytest.mark.parametrize(("size", "dim"), SIZES)
def test_the_density_is_that_of_a_triangle_among_all_its_rotations(rotations, size, dim, autoguide):
    shapes = {"a": (dim,), "b": (size, dim)}
    guide = guide_of(rotations, shapes, autoguide)
    guide()  # makes its parameters
    with torch.no_grad(), pyro.plate("draws", 10, dim=-2):
        trace = poutine.trace(guide).get_trace()
    trace.compute_log_prob()
    found = sum(site["log_prob"][:, 0] for site in trace.nodes.values() if site["type"] == "sample")
    rows = [trace.nodes[name]["value"].reshape(10, -1, dim) for name in shapes]
    np.testing.assert_allclose(found.detach(), density(guide, torch.cat(rows, 1).numpy()))


@pytest.mark.parametrize(("size", "dim"), [(1, 2), (2, 2)])
def test_the_density_integrates_to_one(rotations, size, dim):
    """Averages of q/p over draws of p are one; p has heavier tails than any q."""
    guide = guide_of(rotations, {"a": (size, dim)}, partial(AutoNormal, init_scale=0.5))
    guide()
    student = stats.t(2)
    arrays = student.rvs((200000, size, dim), random_state=0)
    weights = np.exp(density(guide, arrays) - student.logpdf(arrays).sum((-1, -2)))
    error = weights.std() / len(weights) ** 0.5
    assert abs(weights.mean() - 1) < 4 * error
    assert error < 0.03  # so that this says something


# In models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "groups"),
    [
        (DenseHMM(2, 3, 2), [["leave", "enter", "start"], ["emit", "symbol"]]),
        (DenseHMM(2, 3, 2, symbol_dim=1), [["leave", "enter", "start"], ["emit", "symbol"]]),
        (DenseHMM(2, 3, 2, tied=True, stationary=True), [["leave", "symbol"]]),
        (DenseHMM(2, None, 2, emission=normal(1)), [["leave", "enter", "start"]]),
    ],
)
def test_embeddings_whose_products_matter_are_rotated_together(rotations, module, groups):
    data = DATA
    if module.num_symbols is None:
        data = Sequences(torch.randn(3, 6, 1), LENGTHS)
    model = MarginalModel(module)
    point = fit_map(model, data, num_iterations=3, progress=False)
    guide = rotations.RotationGuide(model, point.start)
    found = [[name.removeprefix("module.") for name in part.shapes] for part in guide._parts]
    assert found == groups
    fit = fit_svi(model, guide, data, num_iterations=3, progress=False)
    assert sorted(fit.names) == sorted(point.names)
    # at the start L is that of the start: the distribution is unchanged
    fresh = rotations.RotationGuide(
        model, point.start, autoguide=partial(AutoNormal, init_scale=1e-6)
    )
    fresh(data)
    for name, value in point.start.items():
        again = fresh(data)[name]
        if value.dim() == 2 and name.split(".")[1] != "emission":
            torch.testing.assert_close(again @ again.mT, value @ value.mT, rtol=1e-3, atol=0.02)
    hmm = poutine.replay(model, trace=poutine.trace(fresh).get_trace(data))(data)
    wanted = point.hmm(data).log_prob(data.values)
    torch.testing.assert_close(hmm.log_prob(data.values), wanted, rtol=1e-2, atol=1e-2)


def test_a_saved_guide_knows_the_order_of_its_rows(rotations):
    """Parameters are of rows in an order chosen at the start, which is saved with them."""
    data = Sequences.from_list([[0, 1, 2, 1], [2, 0, 1]])
    model = MarginalModel(DenseHMM(3, 3, 2))
    guides = []
    for seed in (0, 1):
        pyro.set_rng_seed(seed)
        start = fit_map(model, data, num_iterations=2).start
        guides.append(rotations.RotationGuide(model, start))
        guides[-1](data)
    assert any(
        not torch.equal(getattr(guides[0], name), getattr(guides[1], name))
        for name in ("rows_0", "rows_1")
    )
    guides[1].load_state_dict(guides[0].state_dict())
    drawn = []
    for guide in guides:
        pyro.set_rng_seed(2)
        drawn.append(guide(data))
    for name, value in drawn[0].items():
        torch.testing.assert_close(drawn[1][name], value)
