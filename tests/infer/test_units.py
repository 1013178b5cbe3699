"""The unit and the origin of real data do not matter: fits to x and to a x + b are the same."""

import math
from functools import cache

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from scipy import stats
from torch.distributions import MixtureSameFamily

from pyrohmm import (
    MarginalModel,
    Sequences,
    TabularHMM,
    fit_em,
    fit_map,
    fit_svi,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    scale_priors,
    streams,
    tied,
)
from pyrohmm.distributions.units import InverseGamma

STEPS = 40
FAMILIES = {
    "scalar": lambda: normal(0),
    "diagonal": lambda: normal(2),
    "spherical": lambda: normal_spherical(2),
    "full": lambda: normal_full(2),
    "tied covariance": lambda: normal_tied(2),
    "mixture": lambda: normal_mixture(2, num_components=2),
    "streams": lambda: streams(normal(0), normal_full(1)),
    "tied states": lambda: tied(normal(2), [0, 1]),
}
UNITS = [(1e-10, 1e-8), (1e10, 1e10), (1.0, 1e6)]


@cache
def numbers(dim):
    """Paths of two states, about 0 and about 3, ``(6, 40, D)``."""
    random = torch.Generator().manual_seed(3)
    jumps = torch.rand(6, STEPS, generator=random) < 0.2
    states = jumps.cumsum(-1) % 2
    noise = torch.randn(6, STEPS, dim, generator=random, dtype=torch.float64)
    return noise * torch.tensor([1.0, 1.4])[:dim] + 3 * states.unsqueeze(-1)


def in_units(name, a, b, dtype=torch.float64):
    values = a * numbers(1 if name == "scalar" else 2) + b
    values = values.squeeze(-1) if name == "scalar" else values
    return Sequences(values.to(dtype), torch.full((6,), STEPS))


def em(name, data, tolerance=1e-6):
    """One start: of several that end alike, rounding says which is first and numbers the states."""
    module = TabularHMM(2, FAMILIES[name]())
    return fit_em(module, data, num_iterations=12, restarts=1, tolerance=tolerance)


def em_without_test(name, data):
    return em(name, data, None)


def by_map(name, data):
    model = MarginalModel(TabularHMM(2, FAMILIES[name]()))
    return fit_map(model, data, num_iterations=8, learning_rate=0.2, tolerance=None)


def svi(name, data):
    model = MarginalModel(TabularHMM(2, FAMILIES[name]()))
    return fit_svi(model, AutoNormal(model), data, num_iterations=10, learning_rate=0.1)


@cache
def fitted(fit, name, a, b, dtype):
    pyro.set_rng_seed(1)
    torch.set_default_dtype(dtype)
    data = in_units(name, a, b, dtype)
    found = fit(name, data)
    pyro.set_rng_seed(2)  # SVI samples its guide
    hmm = found.hmm(data)
    evidence = hmm.log_prob(data.values).sum().item() + data.values.numel() * math.log(a)
    return evidence, hmm.viterbi(data.values), mean_of(hmm.emission), len(found.losses)


def mean_of(emission):
    """Of a mixture with weights that sum to one in float64: at 1e6 those of float32 add 0.1."""
    if not isinstance(emission, MixtureSameFamily):
        return emission.mean
    weights = emission.mixture_distribution.probs.double()
    means = emission.component_distribution.mean.double()
    return (means * (weights / weights.sum(-1, keepdim=True)).unsqueeze(-1)).sum(-2)


def check_alike(fit, name, a, b, dtype, rtol):
    """Evidence, paths and means are those of the data in their first unit."""
    evidence, paths, means, steps = fitted(fit, name, a, b, dtype)
    wanted = fitted(fit, name, 1.0, 0.0, dtype)
    assert evidence == pytest.approx(wanted[0], rel=rtol)
    torch.testing.assert_close(paths, wanted[1])
    torch.testing.assert_close((means.double() - b) / a, wanted[2].double(), rtol=rtol, atol=rtol)
    return steps, wanted[3]


@pytest.mark.parametrize(("a", "b"), UNITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_em_does_not_depend_on_the_unit(name, a, b):
    """Nor when it ends: data at 1e6 have lost six of sixteen digits."""
    steps, wanted = check_alike(em, name, a, b, torch.float64, 1e-8)
    assert steps == wanted


@pytest.mark.parametrize(("a", "b"), [(1e-10, 1e-8), (1e10, 1e10)])
@pytest.mark.parametrize("name", ["full", "streams"])
def test_map_does_not_depend_on_the_unit(name, a, b):
    """Adam divides by roots of gradients near zero, and so enlarges rounding."""
    check_alike(by_map, name, a, b, torch.float64, 1e-6)


@pytest.mark.parametrize(("a", "b"), [(1e-10, 1e-8), (1e10, 1e10)])
@pytest.mark.parametrize("name", ["tied covariance"])
def test_svi_does_not_depend_on_the_unit(name, a, b):
    check_alike(svi, name, a, b, torch.float64, 1e-6)


@pytest.mark.parametrize("a", [1e-10, 1e10])
@pytest.mark.parametrize("name", ["diagonal", "full", "mixture"])
def test_em_in_single_precision_does_not_depend_on_the_unit(name, a):
    """Of 500 terms of up to 25 nats each is rounded at 1e-7, and so are responsibilities.

    Where the loss falls by less than that, a test of convergence may end a step sooner or later.
    """
    check_alike(em_without_test, name, a, 0.0, torch.float32, 1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["scalar", "full", "tied states"])
def test_single_precision_far_from_zero(name):
    """At 1e6 a number of 24 bits is a multiple of 1/16, and means are exact to half of that.

    The loss is exact to (1/32)^2 / 2 for each number, beside what the data themselves have lost.
    States are far apart, and so EM has one maximum to find, whatever is rounded on its way. What an
    iteration leaves of an error is at most 0.72, by the losses in float64: where each adds 1/32, no
    more than 1/32 / (1 - 0.72) = 0.11 is left.
    """
    evidence, paths, means, _ = fitted(em, name, 1.0, 1e6, torch.float32)
    wanted = fitted(em, name, 1.0, 0.0, torch.float32)
    if bool((paths != wanted[1]).double().mean() > 0.5):  # k-means numbers them by what is rounded
        paths, means = 1 - paths, means.flip(0)
    assert evidence == pytest.approx(wanted[0], abs=5.0)
    assert (paths != wanted[1]).double().mean() <= 0.02
    torch.testing.assert_close(means.double() - 1e6, wanted[2].double(), rtol=0.0, atol=0.12)


@pytest.mark.parametrize(("offset", "seen"), [(1e5, False), (1e6, True)])
def test_means_whose_rounding_is_seen_are_told(offset, seen):
    """Where the evidence is a twentieth of a nat or more below that of a fit in float64."""
    torch.manual_seed(0)
    values = torch.randn(2400) + 4.0 * (torch.arange(2400) // 50 % 2) + offset
    data = Sequences.from_concatenated(values)
    modules = TabularHMM(2, normal(0)).float(), TabularHMM(2, normal(0))
    single, double = (fit_em(module, data, num_iterations=200) for module in modules)
    assert (double.score(data) - single.score(data) > 0.05) == seen
    notes = [note for note in single.notes if "is rounded in torch.float32" in note]
    assert len(notes) == seen
    assert not any("is rounded" in note for note in double.notes)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FAMILIES)
def test_an_iteration_in_single_precision_far_from_zero(name):
    """From one start it is that in float64 about zero, but for means, which are multiples of 1/16.

    Two components of one state are so alike that rounding decides which maximum many iterations
    reach; one iteration is determined. The start is exact in both, and so are differences of data
    and means: what is left is the rounding of single terms.
    """

    def shifted(values, by):
        return {name: x + by if name.endswith("loc") else x for name, x in values.items()}

    far = in_units(name, 1.0, 1e6, torch.float32)
    near = Sequences(far.values.double() - 1e6, far.lengths)
    module = TabularHMM(2, FAMILIES[name]())
    options = {"tolerance": None, "num_iterations": 1}
    start = fit_em(module, near, **options | {"num_iterations": 3}).parameters
    start = {
        name: (16 * x).round() / 16 if name.endswith("loc") else x.float().double()
        for name, x in start.items()
    }
    wanted = fit_em(module, near, start=start, **options)
    torch.set_default_dtype(torch.float32)
    start = {name: x.float() for name, x in shifted(start, 1e6).items()}
    found = fit_em(TabularHMM(2, FAMILIES[name]()), far, start=start, **options)
    assert found.losses[0].item() == pytest.approx(wanted.losses[0].item(), rel=1e-5)
    values = {name: x.double() for name, x in found.parameters.items()}
    for site, value in shifted(values, -1e6).items():
        bounds = (
            {"rtol": 0.0, "atol": 0.04} if site.endswith("loc") else {"rtol": 1e-3, "atol": 1e-3}
        )
        torch.testing.assert_close(value, wanted.parameters[site], **bounds)


# What the priors are


def test_the_default_prior_is_that_of_data_in_units_of_their_own():
    values = torch.tensor([[[1.0, 40.0], [3.0, torch.nan], [torch.nan, 80.0]]])
    data = Sequences(values, torch.tensor([3]))
    module = TabularHMM(2, normal(2))
    units = scale_priors(module, data)
    emission = module.emission
    torch.testing.assert_close(emission.prior_loc, torch.tensor([[2.0, 60.0]] * 2))
    torch.testing.assert_close(emission.upper, torch.tensor([[5.0, 2000.0]] * 2))
    # two numbers are further apart, in units of those of one state, than they deviate
    torch.testing.assert_close(emission.rate, emission.upper / 50)
    # two numbers and, in each of two states, a mean and a variance, which is a square
    assert units == pytest.approx((2 + 2 * (1 + 2)) * math.log(20.0))
    full = TabularHMM(2, normal_full(2))
    scale_priors(full, data)
    torch.testing.assert_close(full.emission.upper, torch.tensor([10.0, 4000.0]))
    ball = TabularHMM(2, normal_spherical(2))
    scale_priors(ball, data)
    torch.testing.assert_close(ball.emission.upper, torch.full((2,), 5 * 200.5))


# What does not fit into the numbers


def given(module, data):
    return fit_em(TabularHMM(2, normal(1, rate=1.0)), data)


@pytest.mark.parametrize("a", [1e20, 1e-20])
@pytest.mark.parametrize(
    "fit", [fit_em, given, lambda module, data: fit_map(MarginalModel(module), data)]
)
def test_a_unit_that_overflows_is_refused_with_the_cure(fit, a):
    torch.set_default_dtype(torch.float32)
    data = Sequences(a * torch.randn(2, 9, 1), torch.tensor([9, 9]))
    with pytest.raises(ValueError, match=r"standard deviation .* torch.float32 .* float64"):
        fit(TabularHMM(2, normal(1)), data)


# Coordinates


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_inverse_gamma_density_does_not_overflow(scale):
    prior = InverseGamma(torch.tensor(2.5).float(), torch.tensor(scale).float())
    value = torch.tensor(0.7 * scale).float()
    wanted = stats.invgamma(2.5, scale=scale).logpdf(0.7 * scale)
    assert prior.log_prob(value).item() == pytest.approx(wanted, rel=1e-6)
    assert bool(prior.expand([3]).sample().isfinite().all())


@pytest.mark.parametrize("guide", [None, AutoNormal], ids=["MAP", "SVI"])
@pytest.mark.parametrize("name", ["diagonal", "streams"])
def test_a_fit_to_other_data_leaves_an_earlier_fit_as_it_was(name, guide):
    """Both are of one module, whose prior takes the scale of the data of each."""
    one, other = in_units(name, 1.0, 0.0), in_units(name, 1e3, 1e6)
    model = MarginalModel(TabularHMM(2, FAMILIES[name]()))

    def fit(data):
        if guide is None:
            return fit_map(model, data, num_iterations=2)
        return fit_svi(model, guide(model), data, num_iterations=2)

    first = fit(one)
    before = first.guide.median(one)
    fit(other)
    after = first.guide.median(one)
    assert before.keys() == after.keys()
    for site, value in before.items():
        torch.testing.assert_close(after[site], value)
