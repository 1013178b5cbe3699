"""Log-densities by products of matrices, against the distributions' own ``log_prob`` in float64."""

import math

import pyro.distributions as dist
import pytest
import torch
from largest import Largest
from torch.distributions import MultivariateNormal, Normal

from pyrohmm import HMM, Sequences, TabularHMM, fit_em, normal, normal_full
from pyrohmm.distributions import linear_emissions, log_prob_per_state, marginal_log_prob
from pyrohmm.distributions.linear_emissions import linear_log_prob

FAMILIES = {
    "normal": (lambda a, b, m: dist.Normal(a, b.exp()).to_event(1), "reals"),
    "normal of torch": (
        lambda a, b, m: torch.distributions.Independent(Normal(a, b.exp()), 1),
        "reals",
    ),
    "poisson": (lambda a, b, m: dist.Poisson(b.exp() * 2).to_event(1), "counts"),
    "bernoulli": (lambda a, b, m: dist.Bernoulli(logits=2 * a).to_event(1), "bits"),
    "full": (lambda a, b, m: dist.MultivariateNormal(a, covariance(m)), "reals"),
    "tied": (lambda a, b, m: dist.MultivariateNormal(a, covariance(m[..., :1, :, :])), "reals"),
    "one matrix": (
        lambda a, b, m: dist.MultivariateNormal(a, covariance(m.reshape(-1, *m.shape[-2:])[0])),
        "reals",
    ),
    "mixture": (
        lambda a, b, m: dist.MixtureSameFamily(
            dist.Categorical(logits=torch.stack([a.sum(-1), b.sum(-1)], -1)),
            dist.Normal(torch.stack([a, 2 * b], -2), torch.stack([b, a], -2).exp()).to_event(1),
        ),
        "reals",
    ),
    "mixture of vectors": (
        lambda a, b, m: dist.MixtureSameFamily(
            dist.Categorical(logits=torch.stack([a.sum(-1), b.sum(-1)], -1)),
            MultivariateNormal(torch.stack([a, b], -2), covariance(m).unsqueeze(-3)),
        ),
        "reals",
    ),
}
WITHOUT_MATRIX = [
    name for name, (build, _) in FAMILIES.items() if "covariance" not in build.__code__.co_names
]


def covariance(root):
    return root @ root.mT + 0.3 * torch.eye(root.size(-1), dtype=root.dtype)


def case(name, batch, states, dim, rows, dtype=torch.float64):
    """Parameters, what makes an emission of them, and values ``(*rows, D)``."""
    torch.manual_seed(1)
    shape = (*batch, states, dim)
    parameters = [torch.randn(shape), 0.5 * torch.randn(shape), torch.randn(*shape, dim)]
    build, kind = FAMILIES[name]
    values = 2 * torch.randn(*rows, dim)
    values = {"reals": values, "counts": values.abs().round(), "bits": (values > 0).double()}[kind]
    return [p.to(dtype).requires_grad_() for p in parameters], build, values.to(dtype)


@pytest.fixture(params=["products", "by size"])
def _forced(request, monkeypatch):
    """Products, however small the problem; and as it comes."""
    if request.param == "products":
        monkeypatch.setattr(linear_emissions, "SMALL", 0)


@pytest.fixture
def _always(monkeypatch):
    monkeypatch.setattr(linear_emissions, "SMALL", 0)


def check(scores, expected, parameters):
    """Values and gradients are alike; those of every score count."""
    torch.testing.assert_close(scores, expected)
    weights = torch.randn(expected.shape)
    found, known = (
        torch.autograd.grad((part * weights).sum(), parameters, materialize_grads=True)
        for part in (scores, expected)
    )
    torch.testing.assert_close(found, known)


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("batch", "states", "dim", "rows"),
    [
        ((), 1, 1, (1,)),
        ((), 1, 3, (4,)),
        ((), 4, 1, (5, 2)),
        ((), 3, 2, (6, 4)),
        ((2, 1), 3, 2, (6, 1, 4)),
        ((4,), 3, 2, (6, 4)),
        ((2, 4), 3, 2, (6, 1, 4)),
    ],
)
def test_log_densities_are_those_of_the_distribution(name, batch, states, dim, rows):
    """With parameters for all, for restarts, for each sequence, and for both."""
    parameters, build, values = case(name, batch, states, dim, rows)
    found = log_prob_per_state(build(*parameters), values)
    check(found, build(*parameters).log_prob(values.unsqueeze(-2)), parameters)


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize("name", WITHOUT_MATRIX)
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_missing_components_are_left_out(name, batch):
    rows = (5, *(1 for _ in batch[1:]), 4)
    parameters, build, values = case(name, batch, 3, 2, rows)
    gone = torch.rand(values.shape) < 0.4
    gone.flatten(0, -2)[0] = True
    found = log_prob_per_state(build(*parameters), values.masked_fill(gone, torch.nan))
    emission = build(*parameters)
    mixed = "mixture" in name
    base = (emission.component_distribution if mixed else emission).base_dist
    extra = (slice(None),) * len(rows) + (None,) * (2 if mixed else 1)
    expected = base.log_prob(values[extra]).masked_fill(gone[extra], 0.0).sum(-1)
    if mixed:
        expected = (expected + emission.mixture_distribution.logits).logsumexp(-1)
    check(found, expected, parameters)


class Flat(dist.Normal):
    """A normal distribution with another density."""

    def log_prob(self, value):
        return torch.zeros_like(value - self.loc)


@pytest.mark.parametrize(
    "emission",
    [
        Flat(torch.zeros(3, 2), 1.0).to_event(1),
        dist.Normal(torch.zeros(3, 2), 1.0).mask(torch.tensor(False)).to_event(1),
    ],
)
def test_what_inherits_from_a_known_distribution_has_its_own_density(emission):
    assert linear_log_prob(emission, torch.ones(4, 2)) is None
    assert not log_prob_per_state(emission, torch.ones(4, 2)).any()


# Rounding -----------------------------------------------------------------------------------------


def at_a_million(generator):
    return 1e6 + torch.randn(4, 3, generator=generator), torch.ones(4, 3)


def far_apart(generator):
    """A million standard deviations from each other."""
    return 1e6 * torch.randn(4, 3, generator=generator), torch.ones(4, 3)


def near_a_limit(generator):
    """Just precise enough in float32 for a product."""
    loc = torch.randn(4, 3, generator=generator)
    return 9 * loc / loc.square().mean(-1).amax().sqrt(), torch.ones(4, 3)


def of_all_scales(generator):
    """Variances from 1e-8 to 1e8, and the means as far apart as that."""
    scale = torch.logspace(-4, 4, 12).reshape(4, 3)
    return 1e4 * torch.randn(4, 3, generator=generator), scale


def unlike_units(generator):
    """Components in units that differ by ten orders of magnitude."""
    units = torch.tensor([1e-5, 1.0, 1e5])
    return units * torch.randn(4, 3, generator=generator), units.expand(4, 3)


def in_huge_units(generator):
    return 1e17 * torch.randn(4, 3, generator=generator), torch.full((4, 3), 1e17)


def almost_exact(generator):
    return torch.randn(4, 3, generator=generator), torch.full((4, 3), 1e-12)


EXTREMES = [
    at_a_million,
    far_apart,
    near_a_limit,
    of_all_scales,
    unlike_units,
    in_huge_units,
    almost_exact,
]


def extreme(build, dtype):
    generator = torch.Generator().manual_seed(0)
    loc, scale = (part.to(dtype).requires_grad_() for part in build(generator))
    states = torch.arange(400) % 4
    noise = torch.randn(400, 3, generator=generator)
    values = (loc[states] + scale[states] * noise).detach()  # as each state emits them
    return loc, scale, values.to(dtype), states


def likelihood_of_own(scores, states):
    return scores.gather(-1, states.unsqueeze(-1)).sum()


@pytest.mark.usefixtures("_forced")
@pytest.mark.parametrize("build", EXTREMES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)]
)  # linear_emissions.TOLERANCE; the oracle has the same rounded parameters
@pytest.mark.parametrize("matrix", [False, True])
def test_scales_and_means_of_any_size_cost_no_precision(build, dtype, tolerance, matrix):
    loc, scale, values, states = extreme(build, dtype)

    def emission(loc, scale):
        if matrix:
            return dist.MultivariateNormal(loc, scale_tril=scale.diag_embed())
        return dist.Normal(loc, scale).to_event(1)

    found = likelihood_of_own(log_prob_per_state(emission(loc, scale), values), states)
    exact = Normal(loc.double(), scale.double()).log_prob(values.double().unsqueeze(-2)).sum(-1)
    exact = likelihood_of_own(exact, states)
    assert found.dtype == dtype
    assert math.isclose(found.item(), exact.item(), rel_tol=tolerance)
    slopes, expected = (torch.autograd.grad(part, (loc, scale)) for part in (found, exact))
    for slope, known in zip(slopes, expected):  # of the size of N / 4 states / scale, terms added
        assert ((slope - known) * scale.double() / (len(values) / 4)).abs().max() < 10 * tolerance


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(("unit", "shift"), [(1e-4, 0.0), (1.0, 0.0), (1.0, 1e6)])
@pytest.mark.parametrize(
    ("correlation", "apart"), [(0.0, 1.0), (0.5, 8.0), (0.99, 1.0), (0.0, 1e3)]
)
def test_covariances_and_means_of_any_size_cost_no_precision(correlation, apart, unit, shift):
    """Whatever the units of a component, and however far all means are from zero."""
    torch.manual_seed(0)
    matrix = torch.full((3, 3), correlation, dtype=torch.float64).fill_diagonal_(1.0)
    units = torch.tensor([unit, 1.0, 1.0], dtype=torch.float64)
    root = (units.unsqueeze(-1) * torch.linalg.cholesky(matrix)).float().expand(4, 3, 3).clone()
    states = torch.arange(400) % 4
    loc = (apart * torch.randn(4, 3) * units).float() + (shift)
    values = loc[states] + (root[states] @ torch.randn(400, 3, 1).float()).squeeze(-1)
    loc.requires_grad_()
    scores = linear_log_prob(dist.MultivariateNormal(loc, scale_tril=root), values)
    known = loc.detach().double().requires_grad_()
    exact = MultivariateNormal(known, scale_tril=root.double())
    exact = exact.log_prob(values.double().unsqueeze(-2))
    assert ((scores - exact).abs() / (exact.abs() + 3)).max() < 1e-5
    evidence, wanted = scores.logsumexp(-1).sum(), exact.logsumexp(-1).sum()
    assert math.isclose(evidence.item(), wanted.item(), rel_tol=1e-5)
    (slope,) = torch.autograd.grad(evidence, loc)
    (expected,) = torch.autograd.grad(wanted, known)
    assert ((slope - expected) * units).abs().max() < 1e-4 * 100  # of the size of N / 4 states


@pytest.mark.usefixtures("_always")
def test_a_rate_of_zero_emits_zeros_alone():
    rate = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    scores = linear_log_prob(dist.Poisson(rate).to_event(1), torch.tensor([[0.0, 1.0], [2.0, 1.0]]))
    expected = torch.tensor([[math.log(2.0) - 2.0, -torch.inf], [-torch.inf, -torch.inf]])
    torch.testing.assert_close(scores, expected)


# In models ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_has_the_size_of_steps_times_states_times_components(name, monkeypatch):
    monkeypatch.setattr("pyrohmm.ops.products.CHUNK", 1 << 10)
    rows, states, dim = 400, 16, 12
    parameters, build, values = case(name, (), states, dim, (4, 100))
    uniform = torch.full((states, states), 1 / states).log()
    with Largest() as largest:
        hmm = HMM(uniform[0], uniform, build(*parameters), torch.full((4,), 100))
        torch.autograd.grad(hmm.log_prob(values).sum(), parameters, allow_unused=True)
    components = 2 if "mixture" in name else 1
    assert largest.size <= rows * max(2 * dim + 1, states * components) < rows * states * dim


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("family", [normal, normal_full])
def test_nor_has_anything_in_an_iteration_of_em(family, monkeypatch):
    monkeypatch.setattr("pyrohmm.ops.products.CHUNK", 1 << 10)
    rows, states, dim = 800, 16, 12
    data = Sequences(torch.randn(4, 200, dim), torch.full((4,), 200))
    with Largest() as largest:
        fit_em(TabularHMM(states, family(dim)), data, restarts=1, num_iterations=1)
    assert largest.size <= rows * (states + 2 * dim) < rows * states * dim


@pytest.mark.parametrize("batch", [(), (2, 1)])
@pytest.mark.parametrize("dim", [0, 2])
def test_densities_of_integers_are_those_of_each_value(batch, dim):
    """They are looked up; what is missing adds nothing, and gradients are those of all values."""
    torch.manual_seed(0)
    shape = (*batch, 3, dim) if dim else (*batch, 3)
    size, probs = (torch.rand(shape).double() + 0.5).requires_grad_(), torch.rand(shape).double()
    probs.requires_grad_()
    values = torch.randint(0, 9, (40, 2, 10, dim) if dim else (40, 2, 20)).double()
    values[torch.rand(values.shape) < 0.1] = torch.nan
    base, again = (dist.NegativeBinomial(size, probs=probs) for _ in range(2))
    found = log_prob_per_state(base.to_event(1) if dim else base, values)
    wide = values.unsqueeze(-2 if dim else -1)
    expected = again.log_prob(wide.nan_to_num(0.0)).masked_fill(wide.isnan(), 0.0)
    check(found, expected.sum(-1) if dim else expected, [size, probs])


@pytest.mark.parametrize(
    ("batch", "rows"),
    [((), ()), ((3,), (5, 1)), ((3,), (5, 3)), ((2, 1, 3), (4, 2, 5, 1)), ((2, 3), (4, 2, 3)),
     ((5, 3), (4, 5, 1)), ((3, 2), (4, 1, 1))],
)  # fmt: skip
def test_marginals_of_full_covariances_are_those_of_the_components_known(batch, rows):
    torch.manual_seed(0)
    root = (torch.randn(*batch, 3, 3).double() + 2 * torch.eye(3)).requires_grad_()
    loc = torch.randn(*batch, 3).double().requires_grad_()
    values = torch.randn(*rows, 3).double()
    values[torch.rand(values.shape) < 0.4] = torch.nan
    found = marginal_log_prob(dist.MultivariateNormal(loc, root @ root.mT), values)
    shape = torch.broadcast_shapes(rows, batch)
    wide, centre = values.expand(*shape, 3).reshape(-1, 3), loc.expand(*shape, 3).reshape(-1, 3)
    matrix = (root @ root.mT).expand(*shape, 3, 3).reshape(-1, 3, 3)
    scores = [0 * loc.sum() for _ in wide]
    for i, known in enumerate(~wide.isnan()):
        if bool(known.any()):
            part = dist.MultivariateNormal(centre[i, known], matrix[i][known][:, known])
            scores[i] = part.log_prob(wide[i, known])
    check(found, torch.stack(scores).reshape(shape), [loc, root])
