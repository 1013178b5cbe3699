"""``TabularContinuousTimeHMM``: its M-step, its fits, and the times that data carry."""

import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal

from pyrohmm import (
    ContinuousTimeHMM,
    HMMModule,
    MarginalModel,
    RegressionHMM,
    Sequences,
    TabularContinuousTimeHMM,
    categorical,
    em,
    fit_em,
    fit_map,
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
    """Its slope is that of the evidence where the counts were found."""
    module = Proportional()
    hmm = module(data.lengths, data.observed, data.times)
    counts = hmm.expected_counts(data.values)
    value = em.expected_log_joint(hmm, counts, data.values)
    evidence = hmm.log_prob(data.values).sum()
    found, wanted = (torch.autograd.grad(each, module.log_speed, retain_graph=True)[0]
                     for each in (value, evidence))  # fmt: skip
    torch.testing.assert_close(found, wanted)


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
    assert not hmm.rates[torch.tensor(STAGES) == 0].any()
    used = hmm.rates > 1e-6  # a rate may end at zero
    leaf = hmm.rates[used].log().clone().requires_grad_()
    rates = torch.zeros(4, 4).index_put(used.nonzero(as_tuple=True), leaf.exp())
    density = hmm.replace(rates=rates - rates.sum(-1).diag()).log_prob(data.values).sum()
    density = density - 2.0 * rates.sum()  # Gamma(1, 2)
    assert torch.autograd.grad(density, leaf)[0].abs().max() < 1e-2


@pytest.mark.parametrize("build", ["tabular", "regression"])
def test_a_fit_is_the_same_in_any_unit_of_time(build):
    """Years and seconds, from the starts that fits choose themselves."""
    pyro.set_rng_seed(0)
    rates = torch.tensor([[-0.5, 0.5, 0.0], [0.0, -0.3, 0.3], [0.0, 0.0, 0.0]])
    times, lengths = torch.empty(30, 8).uniform_(0.1, 2.1).cumsum(-1), torch.full((30,), 8)
    levels, allowed = Normal(torch.tensor([0.0, 3.0, 6.0]), 1.0), rates > 0
    first = torch.tensor([1.0, 0.0, 0.0]).log()
    values = ContinuousTimeHMM(first, rates, levels, lengths, times).sample()
    found = []
    for unit in (1.0, 3.15576e7):
        pyro.set_rng_seed(1)
        data = Sequences(values, lengths, times=times * unit, covariates=torch.ones(30, 8, 1))
        if build == "tabular":
            data = Sequences(values, lengths, times=times * unit)
            module = TabularContinuousTimeHMM(3, normal(0), transition_allowed=allowed)
        else:
            possible = allowed | torch.eye(3).bool()
            module = RegressionHMM(3, normal(0), rates=[0], transition_allowed=possible)
        for fit in (
            fit_em(module, data, num_iterations=5, tolerance=None),
            fit_map(MarginalModel(module), data, num_iterations=20),
        ):
            found.append(fit.hmm(data).rates * unit)
    for years, seconds in zip(found[:2], found[2:]):
        torch.testing.assert_close(years, seconds, rtol=1e-4, atol=1e-6)
