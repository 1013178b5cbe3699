"""Log-densities in float32 keep their digits: they are those in float64, rounded.

The bound is that of the result, and of how much it would differ between two neighbouring numbers
of float32: nothing that is not in the arguments can be lost. Oracles are SciPy's in float64.
"""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyrohmm import HMM
from pyrohmm.distributions.observation import log_likelihood

EPS = 2.0**-23

CASES = {
    "gamma": (dist.Gamma, (1e5, 1e3), [99.0, 100.0, 101.0],
              lambda x, a, b: stats.gamma.logpdf(x, a, scale=1 / b)),
    "beta": (dist.Beta, (1e4, 1e4), [0.49, 0.5, 0.505], stats.beta.logpdf),
    "negative binomial": (dist.NegativeBinomial, (1000.0, 0.5), [900.0, 1000.0, 1100.0],
                          lambda x, r, p: stats.nbinom.logpmf(x, r, 1 - p)),
    "weibull": (dist.Weibull, (1.0, 40.0), [1e-7, 0.97, 1.05],
                lambda x, s, c: stats.weibull_min.logpdf(x, c, scale=s)),
    "poisson": (dist.Poisson, (1e6,), [999_000.0, 1e6, 1_001_000.0], stats.poisson.logpmf),
    "student t": (dist.StudentT, (1e5, 3.0, 2.0), [-3.0, 3.0, 9.0], stats.t.logpdf),
    "log-normal": (dist.LogNormal, (10.0, 1e-3), [22000.0, 22026.0, 22050.0],
                   lambda x, m, s: stats.norm.logpdf(np.log(x), m, s) - np.log(x)),
    "binomial": (dist.Binomial, (1e5, 0.5), [49_900.0, 50_000.0, 50_300.0], stats.binom.logpmf),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_log_densities_in_float32_are_those_of_float64(name):
    kind, numbers, points, oracle = CASES[name]
    parameters = [torch.tensor([number]) for number in np.float32(numbers)]
    values = torch.tensor(points, dtype=torch.float32)
    found = log_likelihood(kind(*parameters, validate_args=False), values).squeeze(-1)
    assert found.dtype == torch.float32
    wanted = oracle(values.double().numpy(), *(part.double().numpy() for part in parameters))
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=2 * EPS, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_gradients_in_float32_are_those_of_float64(name):
    """Sums of terms of either sign: relative to the largest of them."""
    kind, numbers, points, _ = CASES[name]
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [torch.tensor([x]).to(dtype).requires_grad_() for x in np.float32(numbers)]
        values = torch.tensor(points, dtype=torch.float32).to(dtype)
        counts = leaves[0].detach() if name == "binomial" else leaves[0]
        each = log_likelihood(kind(counts, *leaves[1:], validate_args=False), values)
        free = leaves[name == "binomial" :]
        rows = [torch.autograd.grad(x, free, retain_graph=True) for x in each[:, 0]]
        found.append(torch.tensor([[part.item() for part in row] for row in rows]).double())
    size = found[1].abs().amax(0)
    assert bool(((found[0] - found[1]).abs() <= 4 * EPS * size).all())


def test_the_gradient_at_a_rate_of_zero():
    """Zeros fall by one nat for each unit of the rate."""
    rate = torch.tensor([0.0, 5.0], requires_grad=True)
    even = torch.full((2, 2), 0.5).log()
    hmm = HMM(even[0], even, dist.Poisson(rate), torch.tensor([3]))
    hmm.log_prob(torch.tensor([[0.0, 0.0, 0.0]])).backward()
    assert rate.grad[0].item() == pytest.approx(
        -hmm.posterior(torch.tensor([[0.0, 0.0, 0.0]])).state_probs[..., 0].sum().item(), rel=1e-5
    )
    rate.grad = None
    hmm.log_prob(torch.tensor([[0.0, 3.0, 0.0]])).backward()
    assert bool(rate.grad.isfinite().all())
