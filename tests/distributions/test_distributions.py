"""Distributions that Pyro lacks, and log-densities of what is known in part."""

import math

import numpy as np
import oracle
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch.distributions import biject_to

from pyrohmm import HMM, Sequences, fit_em, load_hmm, queries, save
from pyrohmm.distributions.observation import Streams, Tied, log_prob_per_state, marginal_log_prob
from pyrohmm.distributions.sparse import SparseDirichlet
from pyrohmm.distributions.units import FlatCovariance, InverseWishart

NAN = math.nan
ALLOWED = torch.tensor(
    [
        [True, True, False, True],
        [False, True, False, False],
        [True, True, True, True],
        [False, False, True, True],
    ]
)
TABLES = {
    "row": torch.tensor([True, False, True, True]),
    "certain row": torch.tensor([False, True]),
    "one state": torch.ones(1, 1).bool(),
    "certain rows": torch.eye(3).bool(),
    "whole": torch.ones(2, 3).bool(),
    "mixed": ALLOWED,
    "two tables": torch.stack([ALLOWED, ALLOWED.flip(0)]),
}


def rows_of(allowed, seed=0):
    """Random tables with the zeros of ``allowed``, and concentrations for them."""
    rng = np.random.default_rng(seed)
    table = rng.uniform(0.1, 1.0, size=allowed.shape) * allowed.numpy()
    strength = rng.uniform(0.5, 4.0, size=allowed.shape)
    return torch.tensor(table / table.sum(-1, keepdims=True)), torch.tensor(strength)


# Sparse rows


@pytest.mark.parametrize("name", TABLES)
def test_sparse_density_is_that_of_dirichlet_row_by_row(name):
    allowed = TABLES[name]
    table, strength = rows_of(allowed)
    expected = 0.0
    for row, weight, mask in zip(
        table.reshape(-1, allowed.size(-1)).numpy(),
        strength.reshape(-1, allowed.size(-1)).numpy(),
        allowed.reshape(-1, allowed.size(-1)).numpy(),
    ):
        if mask.sum() > 1:  # a row that may use one entry is certain
            expected += stats.dirichlet.logpdf(row[mask] / row[mask].sum(), weight[mask])
    found = SparseDirichlet(strength, allowed).log_prob(table)
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-10)


def test_sparse_density_is_zero_where_a_forbidden_entry_is_positive():
    table = torch.full((4, 4), 0.25)
    distribution = SparseDirichlet(torch.ones(4, 4), ALLOWED, validate_args=False)
    assert distribution.log_prob(table) == -torch.inf
    checked = SparseDirichlet(torch.ones(4, 4), ALLOWED, validate_args=True)
    with pytest.raises(ValueError, match="support"):
        checked.log_prob(table)


@pytest.mark.parametrize("name", TABLES)
def test_sparse_support_holds_samples_and_nothing_forbidden(name):
    allowed = TABLES[name]
    _, strength = rows_of(allowed)
    distribution = SparseDirichlet(strength, allowed)
    drawn = distribution.sample((50,))
    assert distribution.support.check(drawn).tolist() == [True] * 50
    assert (drawn[:, ~allowed] == 0).all()
    assert (drawn[:, allowed] > 0).all()
    torch.testing.assert_close(drawn.sum(-1), torch.ones(drawn.shape[:-1]))
    assert not distribution.support.check(drawn * 1.01).any()
    if not bool(allowed.all()):
        assert not distribution.support.check(drawn + ~allowed * 1e-9).any()


@pytest.mark.parametrize("strength", [1e-3, 0.05, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_draws_have_the_moments_of_dirichlet(strength, dtype):
    """Also where gamma variables underflow: the row is then a corner, and not even."""
    concentration = strength * torch.tensor([[1.0, 9.0, 2.0, 3.0]], dtype=dtype)
    allowed = torch.tensor([[True, False, True, True]])
    distribution = SparseDirichlet(concentration, allowed)
    drawn = distribution.sample((20000,))[:, 0, allowed[0]].double().numpy()
    weight = concentration[0, allowed[0]].double().numpy()
    total = weight.sum()
    mean = weight / total
    variance = mean * (1 - mean) / (total + 1)
    tolerance = 5 * np.sqrt(variance / len(drawn))
    assert (abs(drawn.mean(0) - mean) < tolerance).all()
    assert drawn.var(0) == pytest.approx(variance, rel=0.1)
    torch.testing.assert_close(distribution.mean[0, allowed[0]].double(), torch.tensor(mean))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_sparse_bijection_has_an_inverse(name, batch):
    allowed = TABLES[name]
    support = SparseDirichlet(torch.ones(allowed.shape), allowed).support
    transform = biject_to(support)
    free = int((allowed.sum(-1) - 1).sum())
    x = torch.randn(*batch, free)
    y = transform(x)
    assert y.shape == (*batch, *allowed.shape)
    assert support.check(y).all()
    assert (y[..., ~allowed] == 0).all()
    torch.testing.assert_close(transform.inv(y), x)
    assert transform.forward_shape(x.shape) == y.shape
    assert transform.inverse_shape(y.shape) == x.shape
    even = transform(torch.zeros(free))
    torch.testing.assert_close(even, allowed / allowed.sum(-1, keepdim=True))


@pytest.mark.parametrize("name", TABLES)
def test_sparse_jacobian_is_that_of_autograd(name):
    """Coordinates of the simplex: all allowed entries but the last of each row."""
    allowed = TABLES[name]
    transform = biject_to(SparseDirichlet(torch.ones(allowed.shape), allowed).support)
    x = torch.randn(int((allowed.sum(-1) - 1).sum()))
    last = allowed.flip(-1).byte().argmax(-1, keepdim=True)
    own = allowed.clone().scatter_(-1, allowed.size(-1) - 1 - last, False)
    expected = torch.zeros(())
    if len(x):
        jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[own], x)
        expected = torch.linalg.slogdet(jacobian).logabsdet
    torch.testing.assert_close(transform.log_abs_det_jacobian(x, transform(x)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_jacobian_is_finite_far_out(dtype):
    """A share that rounds to one leaves too little to see, not nothing."""
    transform = biject_to(SparseDirichlet(torch.ones(3), torch.ones(3).bool()).support)
    for place in ([40.0, -3.0], [40.0, 40.0], [-60.0, 60.0]):
        x = torch.tensor(place, dtype=dtype, requires_grad=True)
        found = transform.log_abs_det_jacobian(x, transform(x))
        found.backward()
        # shares are 1 / (1 + exp(-logit)), the remainders 1 / (1 + exp(logit))
        first, second = place[0] - math.log(2), place[1]
        softplus = np.logaddexp(0, [first, -first, second, -second])
        expected = -softplus.sum() - softplus[0]
        assert found.item() == pytest.approx(expected, rel=1e-6)
        assert x.grad.isfinite().all()


# Covariances


def covariance(dim, seed=0):
    """A random positive definite matrix."""
    root = np.random.default_rng(seed).normal(size=(dim, dim))
    return root @ root.T + np.eye(dim)


@pytest.mark.parametrize("dim", [1, 2, 4])
@pytest.mark.parametrize("spare", [-0.5, 0.0, 3.3])
def test_inverse_wishart_density_is_that_of_scipy(dim, spare):
    degrees, scale, value = dim + spare, covariance(dim), covariance(dim, seed=1)
    found = InverseWishart(degrees, torch.tensor(scale)).log_prob(torch.tensor(value))
    if spare < 0:  # which scipy refuses
        degrees = float(degrees)
        log_norm = degrees / 2 * np.linalg.slogdet(scale)[1] - degrees * dim / 2 * math.log(2)
        log_norm -= math.log(math.pi) * dim * (dim - 1) / 4
        log_norm -= sum(math.lgamma((degrees - i) / 2) for i in range(dim))
        expected = log_norm - (degrees + dim + 1) / 2 * np.linalg.slogdet(value)[1]
        expected -= np.trace(scale @ np.linalg.inv(value)) / 2
    else:
        expected = stats.invwishart.logpdf(value, degrees, scale)
    assert found.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("prior", [
    InverseWishart(12.0, torch.eye(10, dtype=torch.float32)),
    FlatCovariance(torch.full((10,), 1e-4), torch.full((10,), 100.0)),
])  # fmt: skip
def test_samples_of_covariances_are_symmetric_to_the_last_bit(prior):
    """A normal distribution of torch refuses others, of large variances."""
    torch.manual_seed(0)
    samples = prior.sample((200,))
    assert torch.equal(samples, samples.mT)


def test_inverse_wishart_draws_have_its_mean_and_spread():
    """Var of entry (i, j), von Rosen (1988), from the mean of the square of each entry."""
    dim, degrees, scale = 3, 12.0, covariance(3)
    distribution = InverseWishart(degrees, torch.tensor(scale))
    drawn = distribution.sample((20000,)).numpy()
    mean = scale / (degrees - dim - 1)
    p = degrees - dim
    diagonal = np.diag(scale)
    variance = (p + 1) * scale**2 + (p - 1) * np.outer(diagonal, diagonal)
    variance = variance / (p * (p - 1) ** 2 * (p - 3))
    assert distribution.mean.numpy() == pytest.approx(mean)
    assert (abs(drawn.mean(0) - mean) < 5 * np.sqrt(variance / len(drawn))).all()
    assert drawn.var(0) == pytest.approx(variance, rel=0.15)
    assert distribution.support.check(torch.tensor(drawn)).all()
    assert InverseWishart(dim + 1.0, torch.tensor(scale)).mean.isinf().all()


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_the_bijection_to_covariances_has_an_inverse_and_its_jacobian(dim):
    unit = torch.tensor([3.0, 0.2, 50.0, 1.0])[:dim]
    distribution = InverseWishart(dim + 2.0, (unit**2).diag())
    transform = biject_to(distribution.support)
    x = torch.randn(3, dim * (dim + 1) // 2)
    y = transform(x)
    standard = biject_to(InverseWishart(dim + 2.0, torch.eye(dim)).support)
    torch.testing.assert_close(standard(x), y / unit / unit.unsqueeze(-1))
    assert distribution.support.check(y).all()
    torch.testing.assert_close(transform.inv(y), x)
    assert transform.forward_shape(x.shape) == y.shape
    assert transform.inverse_shape(y.shape) == x.shape
    rows, columns = torch.tril_indices(dim, dim)  # a symmetric matrix has these coordinates
    found = transform.log_abs_det_jacobian(x, y)
    for one, value in zip(x, found):
        jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[rows, columns], one)
        torch.testing.assert_close(value, torch.linalg.slogdet(jacobian).logabsdet)
    far = transform(8 * torch.randn(200, x.size(-1)).float())  # singular but for rounding
    assert torch.linalg.cholesky(far).isfinite().all()


# Several observations at once


def three_streams(batch=(2,)):
    """Symbols, a count and a plane."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(*batch, 3, generator=generator)
    rate = torch.rand(*batch, generator=generator) + 0.5
    loc = torch.randn(*batch, 2, generator=generator)
    return dist.Categorical(probs), dist.Poisson(rate), dist.Normal(loc, 1.5).to_event(1)


def test_streams_sample_each_part_from_its_distribution():
    symbols, counts, plane = three_streams()
    drawn = Streams([symbols, counts, plane]).sample((4000,))
    assert drawn.shape == (4000, 2, 4)
    for state in range(2):
        seen = np.bincount(drawn[:, state, 0].long(), minlength=3)
        assert oracle.looks_drawn_from(seen, symbols.probs[state].numpy())
        seen = np.bincount(drawn[:, state, 1].long(), minlength=30)
        distribution = stats.poisson(counts.rate[state].item()).pmf(np.arange(len(seen)))
        assert oracle.looks_drawn_from(seen, distribution)
        for place in range(2):
            distribution = stats.norm(plane.mean[state, place].item(), 1.5)
            assert stats.kstest(drawn[:, state, 2 + place].numpy(), distribution.cdf).pvalue > 1e-6
    found = np.corrcoef(drawn[:, 0].numpy().T)
    assert abs(found - np.eye(4)).max() < 0.1


def test_streams_draw_apart_for_each_entry_of_the_batch():
    """Also where a part has a smaller batch than the whole."""
    wide, narrow = dist.Normal(torch.zeros(500, 1, 2), 1.0), dist.Normal(torch.zeros(2), 1.0)
    drawn = Streams([wide, narrow]).sample()
    assert drawn.shape == (500, 1, 2, 2)
    assert len(drawn[..., 1].unique()) == 1000


# States that share emissions


def test_tied_states_sample_independently_from_the_distribution_they_share():
    probs = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])
    index = torch.tensor([1, 0, 1])
    drawn = Tied(dist.Categorical(probs), index).sample((4000,))
    for state, own in enumerate(index.tolist()):
        counts = np.bincount(drawn[:, state], minlength=3)
        assert oracle.looks_drawn_from(counts, probs[own].numpy())
    same = (drawn[:, 0] == drawn[:, 2]).double().mean().item()
    assert same == pytest.approx(0.5, abs=0.05)


# What is known in part


def test_whole_numbers_and_symbols_among_floats_are_scored_as_themselves():
    symbols = dist.Categorical(torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
    numbers = torch.tensor([1, 0])
    torch.testing.assert_close(marginal_log_prob(symbols, numbers), symbols.log_prob(numbers))
    torch.testing.assert_close(
        marginal_log_prob(symbols, numbers.double()), symbols.log_prob(numbers)
    )
    missing = torch.tensor([1.0, NAN])
    expected = torch.tensor([[0.8, 0.5], [1.0, 1.0]]).log()
    torch.testing.assert_close(log_prob_per_state(symbols, missing), expected)


def test_a_vector_without_marginals_is_refused_when_a_component_is_missing():
    distribution = dist.Dirichlet(torch.ones(2, 3))
    assert marginal_log_prob(distribution, torch.tensor([0.2, 0.3, 0.5])).isfinite().all()
    with pytest.raises(ValueError, match="Dirichlet cannot integrate out"):
        marginal_log_prob(distribution, torch.tensor([0.2, NAN, 0.5]))


# Hard zeros --------------------------------------------------------------------------------------

CERTAIN = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
BITS = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
FAR = dist.Normal(torch.tensor([[0.0, 50.0, -50.0]] * 2), 0.1)
ZEROS = {  # an emission in two states; values that the first cannot emit; values that it can
    "symbols in a row": (
        dist.Categorical(CERTAIN.unsqueeze(1).expand(2, 2, 3)).to_event(1), [[0, 1]], [[0, 0]],
    ),
    "one hot": (dist.OneHotCategorical(CERTAIN), [[0, 1, 0]], [[1, 0, 0]]),
    "multinomial": (dist.Multinomial(2, CERTAIN), [[1, 1, 0]], [[2, 0, 0]]),
    "bits": (dist.Bernoulli(BITS).to_event(1), [[0, 0], [1, 1], [1, 0]], [[0, 1]]),
    "bits by logits": (dist.Bernoulli(logits=BITS.logit()).to_event(1), [[0, 0], [1, 1]], [[0, 1]]),
    "bits of which some are missing": (
        dist.Bernoulli(BITS).to_event(1), [[NAN, 0], [1, NAN]], [[0, NAN], [NAN, 1]],
    ),
    "one bit": (dist.Bernoulli(BITS[:, 0]), [1], [0]),
    "a bit": (dist.Bernoulli(BITS[:, 1]), [0], [1]),
    "binomial": (dist.Binomial(3, BITS).to_event(1), [[1, 3], [0, 2]], [[0, 3]]),
    "negative binomial": (dist.NegativeBinomial(2, BITS[:, 0]), [1], [0]),
    "mixture": (dist.MixtureSameFamily(dist.Categorical(CERTAIN), FAR), [50.0, -50.0], [0.0]),
    "vectors of a mixture": (
        dist.MixtureSameFamily(
            dist.Categorical(CERTAIN), dist.Normal(FAR.loc.unsqueeze(-1), 0.1).to_event(1)
        ),
        [[50.0]], [[0.0]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("name", ZEROS)
def test_a_probability_of_zero_is_zero_in_every_query(name, expand, tmp_path):
    """Torch clamps it at 1e-7: the first state was possible at -15.9 nats a symbol."""
    emission, never, possible = ZEROS[name]
    if expand:
        emission = emission.expand((2,))
    even = torch.full((2, 2), 0.5).log()
    save(HMM(even[0], even, emission, torch.tensor(1)), tmp_path / "hmm")
    for hmm in (HMM(even[0], even, emission, torch.tensor(1)), load_hmm(tmp_path / "hmm")):
        for value in torch.tensor(never).to(torch.get_default_dtype()).unbind(0):
            values = value.unsqueeze(0)
            likelihood = marginal_log_prob(hmm.emission, value)
            assert likelihood[0] <= (-1e4 if "mixture" in name else -torch.inf)
            only = likelihood[1] - math.log(2)
            close = {"rtol": 1e-6, "atol": 1e-6, "check_dtype": False}  # parameters are of float32
            torch.testing.assert_close(hmm.log_prob(values), only, **close)
            if only > -torch.inf:
                assert hmm.posterior(values).state_probs[0, 0] < 1e-300
                assert queries.predictive_log_prob(hmm, values) > -torch.inf
                assert (hmm.sample_states(values, (20,)) == 1).all()
        for value in torch.tensor(possible).to(torch.get_default_dtype()).unbind(0):
            states = hmm.posterior(value.unsqueeze(0)).state_probs
            assert states[0, 0] > 0
            assert torch.isfinite(states).all()


@pytest.mark.parametrize("name", ["bits", "symbols in a row", "mixture"])
def test_hard_zeros_have_finite_gradients(name):
    _, never, possible = ZEROS[name]
    probs = (BITS if name == "bits" else CERTAIN).clone().requires_grad_()
    built = {
        "bits": lambda: dist.Bernoulli(probs).to_event(1),
        "symbols in a row": lambda: dist.Categorical(probs[:, None].expand(2, 2, 3)).to_event(1),
        "mixture": lambda: dist.MixtureSameFamily(dist.Categorical(probs), FAR),
    }[name]()  # fmt: skip
    even = torch.full((2, 2), 0.5).log()
    values = torch.tensor([never[0], possible[0]]).to(torch.get_default_dtype())
    hmm = HMM(even[0], even, built, torch.tensor([1, 1]), validate_args=False)
    (gradient,) = torch.autograd.grad(hmm.log_prob(values.unsqueeze(1)).sum(), probs)
    assert gradient.isfinite().all()


def test_em_of_a_mixture_keeps_a_component_of_weight_zero():
    even = torch.full((2, 2), 0.5).log()
    emission = dist.MixtureSameFamily(
        dist.Categorical(CERTAIN), dist.Normal(FAR.loc.unsqueeze(-1), 20.0).to_event(1)
    )
    data = Sequences(
        torch.linspace(-60, 60, 12, dtype=torch.get_default_dtype()).reshape(1, 12, 1),
        torch.tensor([12]),
    )
    fit = fit_em(HMM(even[0], even, emission, torch.tensor([1])), data, num_iterations=2)
    weights = fit.hmm(data).emission.mixture_distribution.probs
    assert ((weights == 0) == (CERTAIN == 0)).all()
