"""An HMM as a site of a Pyro model: what Pyro's own distributions do there, of every module."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from families import CASES, STATES
from pyro.infer import TraceGraph_ELBO
from pyro.infer.inspect import get_dependencies
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance

from pyrohmm import (
    HMM,
    HSMM,
    ContinuousTimeHMM,
    DenseHMM,
    FactorialHMM,
    LinearChainCRF,
    MarginalModel,
    NeuralHMM,
    RegressionHMM,
    SecondOrderHMM,
    Sequences,
    StationaryHMM,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    additive_normal,
    autoregressive_categorical,
    autoregressive_normal,
    blocks,
    categorical,
    free_durations,
    gamma,
    negative_binomial,
    nn,
    normal,
    poisson_durations,
    regression,
)
from pyrohmm.infer.models import build

LENGTHS = torch.tensor([5, 1, 4])
COVARIATES = torch.ones(3, 5, 2, dtype=torch.float64)
TIMES = torch.tensor([0.0, 0.5, 2.0, 2.5, 4.0]).expand(3, 5)


def two_blocks():
    return blocks.from_clusters(torch.tensor([0, 0, 1]), 2)


MODULES = {
    **{name: lambda case=case: TabularHMM(STATES, case.family()) for name, case in CASES.items()},
    "gamma": lambda: TabularHMM(2, gamma()),
    "negative binomial": lambda: TabularHMM(2, negative_binomial()),
    "vectors before": lambda: TabularHMM(2, autoregressive_normal(2)),
    "symbols before": lambda: TabularHMM(2, autoregressive_categorical(3)),
    "stationary": lambda: StationaryHMM(2, normal(0)),
    "shared weights": lambda: nn.StickyHDPHMM(2, categorical(2), kappa=(1.0, 1.0)),
    "durations": lambda: TabularHSMM(2, normal(0), free_durations(4)),
    "poisson durations": lambda: TabularHSMM(2, categorical(3), poisson_durations(4)),
    "two before": lambda: TabularSecondOrderHMM(2, categorical(2)),
    "two chains": lambda: TabularFactorialHMM((2, 2), additive_normal((2, 2), 2)),
    "continuous time": lambda: TabularContinuousTimeHMM(2, normal(0)),
    "dense": lambda: DenseHMM(3, 3, dim=2),
    "neural": lambda: NeuralHMM(4, 3, 8),
    "neural blocks": lambda: NeuralHMM(4, 3, 8, blocks=two_blocks()),
    "regression": lambda: RegressionHMM(
        2,
        regression(dist.Poisson, rate=[0, 1], prior_scale=1.0),
        transition=[0, 1],
        prior_scale=1.0,
    ),
}


def sample_of(module):
    """Data that the module has sampled: ragged, with times and covariates."""
    further = {}
    if isinstance(module, TabularContinuousTimeHMM):
        further["times"] = TIMES
    if isinstance(module, RegressionHMM):
        further["covariates"] = COVARIATES
    values = build(module, Sequences(torch.zeros(3, 5), LENGTHS, **further)).sample()
    return Sequences(values, LENGTHS, **further)


@pytest.mark.parametrize("name", MODULES)
def test_pyro_sees_all_that_the_sequences_depend_on(name):
    """But hyperparameters of the prior of other sites."""
    module = MODULES[name]()
    dependencies = get_dependencies(MarginalModel(module), (sample_of(module),))
    sites = {*dependencies["posterior_dependencies"]} - {"module.weights", "module.kappa"}
    assert {*dependencies["prior_dependencies"]["x"]} == {"x", *sites}


# Chains with a parameter that depends on a latent variable upstream


def numbers(loc):
    return dist.Normal(torch.stack([loc, loc + 1, loc - 2]), 1.0)


def rows(*shape):
    return torch.randn(shape).log_softmax(-1)


def lasting(loc):
    swap = torch.full((3, 3), 0.5).fill_diagonal_(0.0).log()
    return HSMM(rows(3), swap, rows(3, 2), numbers(loc), LENGTHS)


def in_time(loc):
    rates = torch.full((3, 3), 0.5).fill_diagonal_(-1.0)
    return ContinuousTimeHMM(rows(3), rates, numbers(loc), LENGTHS, TIMES)


CHAINS = {
    "markov": lambda loc: HMM(rows(3), rows(3, 3), numbers(loc), LENGTHS),
    "markov per step": lambda loc: HMM(
        rows(3), rows(4, 3, 3), numbers(loc), LENGTHS, transition_per_step=True
    ),
    "transitions": lambda loc: HMM(
        rows(3), (loc * torch.arange(9.0).reshape(3, 3)).log_softmax(-1), numbers(loc), LENGTHS
    ),
    "durations": lasting,
    "two before": lambda loc: SecondOrderHMM(
        rows(3), rows(3, 3), rows(3, 3, 3), numbers(loc), LENGTHS
    ),
    "one chain of several": lambda loc: FactorialHMM(
        [rows(3)], [rows(3, 3)], numbers(loc), LENGTHS
    ),
    "continuous time": in_time,
}


def leaves(found):
    """The tensors of an answer."""
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found
    return [tensor for part in parts if part is not None for tensor in leaves(part)]


QUERIES = ["log_prob", "posterior", "expected_counts", "filtered", "viterbi"]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("name", CHAINS)
def test_answers_have_the_provenance_of_parameters_and_values(name, query):
    """And are the numbers of tensors without one."""
    loc, values = torch.tensor(0.5), torch.randn(3, 5)
    torch.manual_seed(1)
    plain = getattr(CHAINS[name](loc), query)(values)
    torch.manual_seed(1)
    tracked = CHAINS[name](ProvenanceTensor(loc, frozenset({"z"})))
    found = getattr(tracked, query)(ProvenanceTensor(values, frozenset({"x"})))
    for one, other in zip(leaves(found), leaves(plain), strict=True):
        assert get_provenance(one) == {"z", "x"}
        assert torch.equal(detach_provenance(one), other)


def test_the_scores_of_labels_have_provenance():
    scores = ProvenanceTensor(torch.randn(2, 4, 3), frozenset({"scores"}))
    crf = LinearChainCRF(scores, torch.randn(3, 3))
    assert get_provenance(crf.log_prob(torch.zeros(2, 4, dtype=torch.long))) == {"scores"}


def test_a_latent_variable_upstream_learns_from_the_sequences():
    """The score-function gradient of TraceGraph_ELBO, against the exact bound by enumeration."""
    values, hmm = torch.randn(3, 5) + 4, CHAINS["markov"](torch.tensor(0.0))
    prior, z = dist.Bernoulli(0.4), torch.tensor([0.0, 1.0])

    def shifted(upstream):
        return hmm.replace(emission=dist.Normal(hmm.emission.loc + upstream, 1.0))

    def model():
        emitted = shifted(pyro.sample("z", prior))
        with pyro.plate("sequences", 3):
            pyro.sample("x", emitted, obs=values)

    joint = prior.log_prob(z) + torch.stack([shifted(each).log_prob(values).sum() for each in z])
    baseline = {"baseline": {"baseline_value": joint.mean()}}

    def guide():
        chance = dist.Bernoulli(logits=pyro.param("logit", torch.tensor(-1.0)))
        pyro.sample("z", chance, infer=baseline)

    slopes = []
    for _ in range(8):
        TraceGraph_ELBO(num_particles=25).loss_and_grads(model, guide)
        slopes.append(pyro.param("logit").grad.clone())
        pyro.param("logit").grad = None
    logit = torch.tensor(-1.0, requires_grad=True)
    chances = dist.Bernoulli(logits=logit).log_prob(z)
    (wanted,) = torch.autograd.grad((chances.exp() * (chances - joint)).sum(), logit)
    slopes = torch.stack(slopes)
    error = slopes.std() / math.sqrt(len(slopes))
    assert abs(slopes.mean() - wanted) < 4 * error
    assert error < abs(wanted) / 4  # else the test could not tell
