"""``StickyHDPHMM`` against direct simulation, a sum by hand, and data whose states are known."""

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Categorical, Dirichlet, Gamma, Normal
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    StickyHDPHMM,
    categorical,
    fit_gibbs,
    fit_map,
    fit_svi,
    normal,
)

LENGTHS = torch.tensor([4, 2])


def prior(module):
    return poutine.trace(module).get_trace(LENGTHS)


def test_moments_of_the_prior_are_those_of_direct_simulation():
    """Weights, rows and first states from Gamma variables, as the definition has them."""
    size, count = 4, 5_000
    module = StickyHDPHMM(size, categorical(2), gamma=3.0, alpha=(4.0, 2.0), kappa=1.5)
    with pyro.plate("samples", count, dim=-2):
        nodes = prior(module).nodes
    weights, rows = (nodes[name]["value"].squeeze(1) for name in ("weights", "transition"))
    beta = torch.distributions.Gamma(torch.full((count, size), 3.0 / size), 1.0).sample()
    beta = beta / beta.sum(-1, keepdim=True)
    alpha = torch.distributions.Gamma(4.0, 2.0).sample((count, 1, 1))
    strength = alpha * beta.unsqueeze(-2) + 1.5 * torch.eye(size)
    table = torch.distributions.Gamma(strength.clamp(min=1e-300), 1.0).sample()
    table = table / table.sum(-1, keepdim=True)
    for found, wanted in ((weights, beta), (rows, table)):
        for power in (1, 2):  # standard errors are below 0.004
            gap = (found**power).mean(0) - (wanted**power).mean(0)
            assert gap.abs().max() < 0.03
    shared = [(t[:, 0, 2] * t[:, 1, 2]).mean() for t in (rows, table)]  # by the weights
    assert abs(shared[0] - shared[1]) < 0.01


@pytest.mark.parametrize("size", [1, 3])
def test_the_joint_density_is_the_sum_by_hand(size):
    module = StickyHDPHMM(size, categorical(2), gamma=(2.0, 1.0), alpha=2.0, kappa=(3.0, 0.5))
    data = Sequences(torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]), LENGTHS)
    model = MarginalModel(module)
    trace = poutine.trace(model).get_trace(data)
    site = {name.removeprefix("module."): trace.nodes[name]["value"]
            for name in trace.stochastic_nodes if name != "sequences"}  # fmt: skip
    assert site.keys() == {"weights", "initial", "transition", "gamma", "kappa", "emission.probs"}
    hand = Gamma(2.0, 1.0).log_prob(site["gamma"]) + Gamma(3.0, 0.5).log_prob(site["kappa"])
    if size > 1:
        hand += Dirichlet((site["gamma"] / size).expand(size)).log_prob(site["weights"])
        hand += Dirichlet(2.0 * site["weights"]).log_prob(site["initial"])
        for i, row in enumerate(site["transition"]):
            strength = 2.0 * site["weights"] + site["kappa"] * torch.eye(size)[i]
            hand += Dirichlet(strength).log_prob(row)
    hand += Dirichlet(torch.ones(size, 2)).log_prob(site["emission.probs"]).sum()
    hmm = trace.nodes["_RETURN"]["value"]
    hand += hmm.log_prob(data.values).sum()
    torch.testing.assert_close(trace.log_prob_sum(), hand)


@pytest.mark.parametrize("gamma", [1e-4, 1.0])
def test_nothing_near_zero_is_nan_in_single_precision(gamma):
    module = StickyHDPHMM(8, categorical(2), gamma=gamma, alpha=0.01, kappa=0.0)
    data = Sequences(torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]), LENGTHS)
    for _ in range(10):
        nodes = prior(module).nodes
        for name in ("weights", "initial", "transition"):
            value = nodes[name]["value"]
            assert value.isfinite().all()
            torch.testing.assert_close(value.sum(-1), torch.ones(value.shape[:-1]))
            assert nodes[name]["fn"].log_prob(value).isfinite()
    model = MarginalModel(module)
    guide = AutoNormal(model, init_scale=1.0)
    with poutine.block():
        guide(data)
    for name in ("weights", "initial", "transition"):  # far outside of what numbers can say
        node = poutine.trace(model).get_trace(data).nodes[f"module.{name}"]
        transform = torch.distributions.biject_to(node["fn"].support)
        free = torch.zeros(transform.inv(node["value"]).shape)
        free[0], free[-1] = 300.0, -300.0
        free.requires_grad_()
        value = transform(free)
        density = node["fn"].log_prob(value) + transform.log_abs_det_jacobian(free, value)
        assert density.isfinite()
        (slope,) = torch.autograd.grad(density, free)
        assert slope.isfinite().all()
    fit = fit_svi(model, guide, data, num_iterations=20, learning_rate=0.05)
    assert fit.losses.isfinite().all()


def known(emission, steps=100):
    stay = (torch.eye(3) * 0.85 + 0.05).log()
    truth = HMM(torch.full((3,), 1 / 3).log(), stay, emission, torch.tensor([steps] * 2))
    return Sequences(truth.sample(), truth.lengths)


def test_svi_uses_as_many_states_as_there_are():
    """Of a truncation of 8, on data of 3; a state is used that has 2 % of the steps."""
    data = known(Normal(torch.tensor([-5.0, 0.0, 5.0]), 1.0))
    model = MarginalModel(StickyHDPHMM(8, normal(0, weight=0.01), gamma=1.0, alpha=1.0, kappa=5.0))
    guide = AutoNormal(model, init_scale=0.05)
    fit = fit_svi(model, guide, data, num_iterations=120, learning_rate=0.1)
    used = []
    for _ in range(10):
        with torch.no_grad(), poutine.block():
            hmm = poutine.replay(model, trace=poutine.trace(guide).get_trace(data))(data)
            usage = hmm.posterior(data.values).state_probs.sum((0, 1))
        used.append(int((usage > 0.02 * usage.sum()).sum()))
    assert fit.losses[-1] < fit.losses[0]
    assert all(2 <= count <= 4 for count in used)


@pytest.mark.parametrize("restarts", [1, 2])
def test_fit_map_says_that_there_is_no_maximum(restarts):
    data = Sequences(torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]]), LENGTHS)
    inner = MarginalModel(StickyHDPHMM(3, categorical(2)))
    for model in (inner, lambda data: inner(data)):
        with pytest.raises(ValueError, match=r"fit_map .* of a StickyHDPHMM has none.* fit_svi"):
            fit_map(model, data, num_iterations=2, restarts=restarts)


def test_rows_given_paths_of_the_prior_have_the_distribution_of_the_prior():
    """Geweke's joint test of the sampler that seats tables."""
    pyro.set_rng_seed(0)
    count, size, num_steps = 4000, 4, 30
    module = StickyHDPHMM(size, categorical(2), gamma=2.0, alpha=3.0, kappa=2.0).double()
    gamma, alpha, kappa = torch.tensor([2.0, 3.0, 2.0], dtype=torch.float64)
    weights = Dirichlet((gamma / size).expand(count, size)).sample()
    initial = Dirichlet(alpha * weights + 1e-12).sample()
    eye = torch.eye(size, dtype=torch.float64)
    rows = Dirichlet(alpha * weights.unsqueeze(1) + kappa * eye + 1e-12).sample()
    state = Categorical(initial).sample()
    first, pairs = eye[state], torch.zeros_like(rows)
    for _ in range(num_steps):
        after = Categorical(rows[torch.arange(count), state]).sample()
        pairs[torch.arange(count), state, after] += 1
        state = after
    found = module.sample_parameters({"initial": first, "transition": pairs}, {"weights": weights})
    for name, theta in (("weights", weights), ("initial", initial), ("transition", rows)):
        for change in (
            lambda x: x,
            torch.square,
            lambda x: x * pairs.sum(1)[:, :1].view(count, *(1,) * (x.dim() - 1)),
        ):
            apart = (change(found[name]) - change(theta)).flatten(1)
            assert bool((apart.mean(0).abs() < 4.8 * apart.std(0) / count**0.5 + 1e-9).all()), name


def test_gibbs_samples_concentrations_with_priors():
    """Numbers without a dimension are moved by trajectories, all else by conjugate draws."""
    pyro.set_rng_seed(0)
    data = Sequences(torch.randint(2, (3, 10)), torch.tensor([10, 4, 1]))
    module = StickyHDPHMM(3, categorical(2), gamma=(2.0, 1.0), alpha=(2.0, 0.5), kappa=5.0)
    fit = fit_gibbs(module, data, num_samples=3, num_chains=2, warmup=2)
    assert fit.chains["module.gamma"].shape == (2, 3)
    assert bool((fit.chains["module.alpha"] > 0).all())
