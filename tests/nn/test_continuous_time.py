"""``TabularContinuousTimeHMM``: its M-step, its fits, and the times that data carry."""

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Categorical, Gamma, Normal
from scipy.optimize import minimize

from pyrohmm import (
    ContinuousTimeHMM,
    HMMModule,
    Sequences,
    TabularContinuousTimeHMM,
    TabularHMM,
    categorical,
    em,
    fit_em,
    freeze,
    normal,
)

# A disease of three stages and death, seen with errors but for death, in years
STAGES = [[-0.2, 0.15, 0.0, 0.05], [0.1, -0.45, 0.25, 0.1], [0.0, 0.1, -0.4, 0.3], [0.0] * 4]
SEEN = [[0.9, 0.1, 0.0, 0.0], [0.1, 0.8, 0.1, 0.0], [0.0, 0.15, 0.85, 0.0], [0.0, 0.0, 0.0, 1.0]]


def panel(count, visits=8, seed=0):
    """Patients seen at irregular times, about once in one and a half years."""
    pyro.set_rng_seed(seed)
    times = torch.empty(count, visits).uniform_(0.2, 2.8).cumsum(-1)
    lengths = torch.randint(2, visits + 1, (count,))
    hmm = ContinuousTimeHMM(
        torch.tensor([1.0, 0.0, 0.0, 0.0]).log(), torch.tensor(STAGES),
        Categorical(torch.tensor(SEEN)), lengths, times,
    )  # fmt: skip
    return Sequences(hmm.sample(), lengths, times=times)


def disease(**options):
    """The model of those patients, with what is known of them."""
    allowed = torch.tensor(STAGES) > 0
    starting = torch.tensor([True, False, False, False])
    module = TabularContinuousTimeHMM(
        4, categorical(4), initial_allowed=starting, transition_allowed=allowed, **options
    )
    return module


@pytest.fixture
def data():
    pyro.set_rng_seed(3)
    times = torch.empty(12, 10).exponential_(1.0).cumsum(-1)
    lengths = torch.randint(1, 11, (12,))
    rates = torch.tensor([[-0.6, 0.6], [0.3, -0.3]])
    means = Normal(torch.tensor([0.0, 2.0]), 1.0)
    hmm = ContinuousTimeHMM(torch.full((2,), 0.5).log(), rates, means, lengths, times)
    values = hmm.sample()
    values[0, 1] = torch.nan
    return Sequences(values, lengths, ~values.isnan(), times=times)


def test_em_is_monotone_and_ends_at_the_maximum_of_a_gradient(data):
    """The mode that a quasi-Newton method of SciPy finds for the same density."""
    module = TabularContinuousTimeHMM(2, normal(0), 1.0, 1.5, 0.7)
    fit = fit_em(module, data, tolerance=None, num_iterations=150)
    assert (fit.losses.diff() <= 1e-9).all()
    assert not fit.notes
    found = fit.hmm(data)
    freeze(module, "initial", fit.parameters["module.initial"])
    for name in ("loc", "variance"):
        freeze(module, f"emission.{name}", fit.parameters[f"module.emission.{name}"])

    def loss(free):
        leaf = torch.tensor(free, requires_grad=True)
        rates = torch.zeros(2, 2)
        rates[0, 1], rates[1, 0] = leaf.exp()
        hmm = found.replace(rates=rates - rates.sum(-1).diag())
        prior = Gamma(1.5, 0.7).log_prob(leaf.exp()).sum()  # of the rates, not of their logarithms
        total = -(hmm.log_prob(data.values).sum() + prior)
        return total.item(), torch.autograd.grad(total, leaf)[0].numpy()

    best = minimize(loss, np.zeros(2), jac=True, tol=1e-12)
    rates = fit.parameters["module.rates"]
    np.testing.assert_allclose(np.exp(best.x), [rates[0, 1], rates[1, 0]], rtol=1e-5)


def test_a_step_is_numbers_over_times(data):
    """From the start given, priors included; what is frozen stays."""
    module = TabularContinuousTimeHMM(2, normal(0), 1.0, 1.5, 0.7)
    begin = {"initial": torch.tensor([0.5, 0.5]), "rates": torch.tensor([[0.0, 1.0], [2.0, 0.0]]),
             "emission.loc": torch.tensor([0.0, 1.0]),
             "emission.variance": torch.ones(2)}  # fmt: skip
    fit = fit_em(module, data, num_iterations=1, tolerance=None, start=begin)
    hmm = ContinuousTimeHMM(
        begin["initial"].log(), torch.tensor([[-1.0, 1.0], [2.0, -2.0]]),
        Normal(begin["emission.loc"], 1.0), data.lengths, data.times, data.observed,
    )  # fmt: skip
    counts = hmm.expected_counts(data.values).counts["rates"]
    rates = fit.parameters["module.rates"]
    torch.testing.assert_close(rates[0, 1], (counts[0, 1] + 0.5) / (counts[0, 0] + 0.7))
    torch.testing.assert_close(rates[1, 0], (counts[1, 0] + 0.5) / (counts[1, 1] + 0.7))
    freeze(module, "rates", begin["rates"])
    del begin["rates"]
    kept = fit_em(module, data, num_iterations=3, start=begin)
    torch.testing.assert_close(kept.hmm(data).rates, hmm.rates)


def test_rates_of_a_progressive_panel_are_recovered():
    """Within three standard errors, those of the curvature at the maximum; zeros stay zero."""
    data = panel(600)
    module = disease(rate_time=1e-6)
    fit = fit_em(module, data, start=begin_of_disease())
    hmm, allowed = fit.hmm(data), torch.tensor(STAGES) > 0
    assert torch.equal(hmm.rates - hmm.rates.diagonal().diag() > 0, allowed)
    assert torch.equal(hmm.emission.probs > 0, torch.tensor(SEEN) > 0)

    def evidence(logs):
        rates = torch.zeros(4, 4).masked_scatter(allowed, logs.exp())
        rates = rates - rates.sum(-1).diag()
        return hmm.replace(rates=rates).log_prob(data.values).sum()

    found, truth = hmm.rates[allowed].log(), torch.tensor(STAGES)[allowed].log()
    curvature = -torch.autograd.functional.hessian(evidence, found)
    errors = curvature.inverse().diagonal().sqrt()
    assert (errors < 0.6).all()
    assert ((found - truth).abs() < 3 * errors).all()
    torch.testing.assert_close(hmm.sojourn_times[3], torch.tensor(torch.inf))


def begin_of_disease():
    rates = torch.where(torch.tensor(STAGES) > 0, 0.2, 0.0)
    seen = torch.where(torch.tensor(SEEN) > 0, torch.tensor(SEEN) + 0.2, 0.0)
    return {"initial": torch.tensor([1.0, 0.0, 0.0, 0.0]), "rates": rates,
            "emission.probs": seen / seen.sum(-1, keepdim=True)}  # fmt: skip


class Proportional(HMMModule):
    """Rates that have one parameter: no closed form."""

    def __init__(self):
        super().__init__()
        self.log_speed = torch.nn.Parameter(torch.tensor(-3.0))
        self.register_buffer("shape", torch.tensor([[-1.0, 1.0], [0.5, -0.5]]))

    def forward(self, lengths, observed=None, times=None):
        means = Normal(torch.tensor([0.0, 2.0]), 1.0)
        even = torch.full((2,), 0.5).log()
        rates = self.shape * self.log_speed.exp()
        return ContinuousTimeHMM(even, rates, means, lengths, times, observed)


def test_rates_of_a_module_of_ones_own_follow_gradient_steps(data):
    """EM raises the expected log joint density of the chain in continuous time."""
    fit = fit_em(Proportional(), data, tolerance=None, num_iterations=6)
    assert (fit.losses.diff() <= 1e-8).all()
    assert fit.losses[-1] < fit.losses[0] - 0.1


def test_expected_log_joint_is_that_of_a_chain_in_continuous_time(data):
    """Numbers times log-rates, minus times times rates; its slope is that of the evidence."""
    module = Proportional()
    hmm = module(data.lengths, data.observed, data.times)
    counts = hmm.expected_counts(data.values)
    value = em.expected_log_joint(hmm, counts, data.values)
    number, time = counts.counts["rates"], counts.counts["rates"].diagonal()
    speed = torch.tensor([1.0, 0.5]) * module.log_speed.detach().exp()
    chain = number[0, 1] * speed[0].log() + number[1, 0] * speed[1].log() - (time * speed).sum()
    first = (counts.counts["log_initial"] * hmm.log_initial).sum()
    emitted = (hmm.log_factors(data.values)[2] * counts.state_probs).sum()
    torch.testing.assert_close(value, chain + first + emitted)
    evidence = hmm.log_prob(data.values).sum()
    found, wanted = (torch.autograd.grad(each, module.log_speed, retain_graph=True)[0]
                     for each in (value, evidence))  # fmt: skip
    torch.testing.assert_close(found, wanted)


def test_one_state_has_nothing_to_leave_for(data):
    module = TabularContinuousTimeHMM(1, normal(0))
    fit = fit_em(module, data)
    single = fit_em(TabularHMM(1, normal(0)), data)
    torch.testing.assert_close(fit.losses[-1], single.losses[-1])
    again = fit_em(fit.hmm(data), data, num_iterations=2)
    assert again.hmm(data).rates.shape == (1, 1)


def test_the_rate_of_exact_deaths_is_their_number_over_the_time_lived():
    """Of one living state, by EM with a flat prior, in one step from anywhere."""
    data = Sequences.from_list(
        [[0, 0, 1], [0, 1], [0, 0, 0]], times=[[0.0, 1.0, 2.5], [1.0, 1.25], [0.0, 2.0, 3.0]]
    )
    certain = {"initial": torch.tensor([1.0, 0.0]), "emission.probs": torch.eye(2),
               "rates": torch.tensor([[0.0, 5.0], [0.0, 0.0]])}  # fmt: skip
    dies = torch.tensor([[False, True], [False, False]])
    module = TabularContinuousTimeHMM(
        2, categorical(2), rate_time=1e-12, transition_allowed=dies,
        exact_entry=torch.tensor([False, True]),
    )  # fmt: skip
    fit = fit_em(module, data, num_iterations=1, tolerance=None, start=certain)
    assert fit.parameters["module.rates"][0, 1].item() == pytest.approx(2 / (2.5 + 0.25 + 3.0))
    hidden = TabularContinuousTimeHMM(2, categorical(2), rate_time=1e-12, transition_allowed=dies)
    other = fit_em(hidden, data, num_iterations=50, start=certain).parameters["module.rates"][0, 1]
    assert abs(other - 2 / 5.75) > 0.01  # when one dies between visits that is not known


def test_em_with_exact_deaths_ends_where_the_density_is_stationary():
    data, exact = panel(40), torch.tensor([False, False, False, True])
    alive = (data.values != 3).sum(-1)
    data = Sequences(data.values, torch.minimum(data.lengths, alive + 1), times=data.times)
    fit = fit_em(
        disease(rate_time=2.0, exact_entry=exact), data, tolerance=1e-12, num_iterations=300
    )
    assert fit.losses.diff().max() < 1e-9 * fit.losses[-1]
    hmm = fit.hmm(data)
    assert hmm.exact_entry.equal(exact)
    used = hmm.rates > 1e-6  # a rate may end at zero
    leaf = hmm.rates[used].log().clone().requires_grad_()
    rates = torch.zeros(4, 4).index_put(used.nonzero(as_tuple=True), leaf.exp())
    density = hmm.replace(rates=rates - rates.sum(-1).diag()).log_prob(data.values).sum()
    density = density - 2.0 * rates.sum()  # Gamma(1, 2)
    assert torch.autograd.grad(density, leaf)[0].abs().max() < 1e-2
