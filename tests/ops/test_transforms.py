"""``torch.func``: each transform of evidences is what autograd and finite differences say."""

import pyro
import pytest
import torch
from pyro.distributions import Categorical, MultivariateNormal, Normal, Poisson
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from pyrohmm import HMM, HSMM, LinearChainCRF, recursions

# torch loads its rules of forward differentiation by what it deprecates itself
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

K, T, N = 2, 4, 3
LENGTHS = torch.tensor([4, 1, 3])


def logs(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def start_and_transition():
    return logs(K).log_softmax(-1), logs(K, K, seed=1).log_softmax(-1)


def covariance(loc):
    return MultivariateNormal(loc, torch.eye(2) + 0.3, validate_args=False)


def rates(theta):
    return Poisson(theta.exp(), validate_args=False).to_event(1)


def normal(theta):
    return Normal(theta, 0.7, validate_args=False).to_event(1)


def symbols(theta):
    return Categorical(logits=theta, validate_args=False)


GAPS = logs(N, T, 2, seed=3)
GAPS[0, 1, 0] = GAPS[2, 2, 1] = torch.nan
FAMILIES = {
    "symbols": (symbols, torch.randint(3, (N, T), generator=torch.Generator().manual_seed(2)), 3),
    "normal": (normal, logs(N, T, 2, seed=3), 2),
    "normal with gaps": (normal, GAPS, 2),
    "covariance": (covariance, logs(N, T, 2, seed=3), 2),
    "poisson": (rates, logs(N, T, 2, seed=3).exp().floor(), 2),
}


@pytest.fixture(params=FAMILIES)
def problem(request):
    """A function of emission parameters and values, some parameters, and values."""
    family, values, width = FAMILIES[request.param]
    observed = torch.arange(T) < LENGTHS.unsqueeze(-1)
    chain = start_and_transition()

    def evidence(theta, values, observed=observed, lengths=LENGTHS):
        return HMM(*chain, family(theta), lengths, observed).log_prob(values)

    def of_one(theta, values, observed):  # its steps that do not exist are not observed
        return evidence(theta, values, observed, torch.tensor(T))

    return evidence, of_one, logs(K, width, seed=4), values, observed


def by_autograd(function, *inputs):
    return torch.autograd.functional.jacobian(function, inputs)


def test_gradients_of_each_sequence(problem):
    """As differentially private training and Fisher information need them."""
    evidence, of_one, theta, values, observed = problem
    (expected,) = by_autograd(lambda theta: evidence(theta, values), theta)
    each = vmap(grad(of_one), (None, 0, 0))(theta, values, observed)
    assert torch.allclose(each, expected)
    assert torch.allclose(jacrev(evidence)(theta, values), expected)
    assert torch.allclose(jacfwd(evidence)(theta, values), expected)


def test_second_derivatives_and_directions(problem):
    evidence, _, theta, values, _ = problem

    def loss(theta):
        return evidence(theta, values).sum()

    expected = torch.autograd.functional.hessian(loss, theta)
    assert torch.allclose(hessian(loss)(theta), expected)
    direction, step = logs(*theta.shape, seed=5), 1e-5
    value, slope = jvp(loss, (theta,), (direction,))
    assert torch.allclose(value, loss(theta))
    ends = [loss(theta + sign * step * direction) for sign in (1, -1)]
    assert slope.item() == pytest.approx((ends[0] - ends[1]).item() / (2 * step), rel=1e-6)


def arguments():
    initial, transition = start_and_transition()
    transition = transition.clone()
    transition[0, 1] = -torch.inf  # a hard zero
    return initial, transition.unsqueeze(0), logs(N, T, K, seed=6), LENGTHS


def test_recursions_by_all_arguments():
    *parts, lengths = arguments()
    expected = by_autograd(lambda *parts: recursions.log_evidence(*parts, lengths), *parts)
    for transform in (jacrev, jacfwd):
        found = transform(recursions.log_evidence, argnums=(0, 1, 2))(*parts, lengths)
        for one, other in zip(found, expected):
            assert torch.allclose(one, other)
    found = hessian(lambda scores: recursions.log_evidence(*parts[:2], scores, lengths).sum())(
        parts[2]
    )
    expected = torch.autograd.functional.hessian(
        lambda scores: recursions.log_evidence(*parts[:2], scores, lengths).sum(), parts[2]
    )
    assert torch.allclose(found, expected)


def differences(function, theta, step=1e-5):
    """The Jacobian by central differences, of what is computed without transforms."""
    columns = []
    for place in range(theta.numel()):
        shift = torch.zeros(theta.numel())
        shift[place] = step
        shift = shift.reshape(theta.shape)
        columns.append((function(theta + shift) - function(theta - shift)) / (2 * step))
    return torch.stack(columns, -1).unflatten(-1, theta.shape)


# made once: vmap refuses random numbers
START = logs(3).double().log_softmax(-1)
HALVES = [part.double().log_softmax(-1) for part in start_and_transition()]


def hmm_of(theta):
    return HMM(*HALVES, normal(theta), LENGTHS)


def hsmm_of(theta):
    """Of three states, the last of which no other leads to, with durations of 1 to 3 steps."""
    matrix = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]).log()
    durations = (theta[:, :1] * torch.arange(3.0)).log_softmax(-1)
    return HSMM(START, matrix, durations, normal(theta), LENGTHS)


CHAINS = {"hmm": (hmm_of, K), "hsmm": (hsmm_of, 3)}
QUERIES = {
    "log_prob": lambda chain, values: chain.log_prob(values),
    "states": lambda chain, values: chain.posterior(values).state_probs,
    "transitions": lambda chain, values: chain.posterior(values).transitions,
    "filtered": lambda chain, values: chain.filtered(values),
    "counts": lambda chain, values: chain.expected_counts(values).counts["log_transition"],
    "mean": lambda chain, values: chain.forecast(values, 2).mean,
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("query", QUERIES)
def test_queries_have_derivatives(name, query):
    make, size = CHAINS[name]
    theta, values = logs(size, 2, seed=4), logs(N, T, 2, seed=3)

    def asked(theta):
        return QUERIES[query](make(theta), values)

    expected = differences(asked, theta)
    for transform in (jacrev, jacfwd):
        torch.testing.assert_close(transform(asked)(theta), expected, atol=1e-7, rtol=1e-6)
    many = torch.stack([theta, -theta])
    torch.testing.assert_close(vmap(asked)(many), torch.stack([asked(each) for each in many]))


def test_marginals_of_a_crf_have_derivatives():
    emission, transition = logs(N, T, K), logs(K, K, seed=1)

    def marginals(transition):
        return LinearChainCRF(emission, transition, lengths=LENGTHS).marginals()

    torch.testing.assert_close(
        jacrev(marginals)(transition), differences(marginals, transition), atol=1e-8, rtol=1e-6
    )


def test_a_sequence_of_probability_zero_has_gradient_zero():
    initial, transition, scores, lengths = arguments()
    scores[1] = -torch.inf
    each = vmap(grad(recursions.log_evidence, argnums=2), (None, None, 0, 0))
    found = each(initial, transition, scores, lengths)
    assert found.isfinite().all()
    assert not found[1].any()
    posterior = vmap(recursions.posterior, (None, None, 0, 0))
    for part, other in zip(posterior(initial, transition, scores, lengths),
                           recursions.posterior(initial, transition, scores, lengths)):  # fmt: skip
        torch.testing.assert_close(part, other)


def test_values_are_checked_though_torch_has_compiled(monkeypatch):
    """It then switches its own default off for the whole process."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    coins = Categorical(logits=torch.zeros(K, 2), validate_args=False)
    with pyro.validation_enabled(True):
        torch.distributions.Distribution.set_default_validate_args(False)
        hmm = HMM(*start_and_transition(), coins, torch.tensor(T))
        with pytest.raises(ValueError, match="values must lie between"):
            hmm.log_prob(torch.full((T,), 2))
        with pytest.raises(ValueError, match="log_initial must hold"):
            HMM(torch.zeros(K), torch.zeros(K, K), coins, torch.tensor(T))
        with pytest.raises(ValueError, match="emission_scores holds nan"):
            LinearChainCRF(torch.full((T, K), torch.nan), torch.zeros(K, K))
    with pyro.validation_enabled(False):
        torch.distributions.Distribution.set_default_validate_args(True)
        HMM(torch.zeros(K), torch.zeros(K, K), coins, torch.tensor(T))


@pytest.mark.parametrize("symbolic", [False, True])
def test_half_precision_of_autocast_is_taken_up(symbolic):
    initial, transition, scores, lengths = arguments()
    initial, transition = initial.float(), transition.float()
    half = scores.bfloat16().requires_grad_()
    values = FAMILIES["symbols"][1]
    table = logs(K, 3).log_softmax(-1).bfloat16().requires_grad_()

    def evidence(table, scores):
        if symbolic:
            return recursions.log_evidence(initial, transition, table, lengths, values)
        return recursions.log_evidence(initial, transition, scores, lengths)

    with torch.autocast("cpu", torch.bfloat16):
        found = evidence(table, half)
        found.sum().backward()
    assert found.dtype == torch.float32
    assert torch.equal(found, evidence(table.float(), half.float()))
    assert (table if symbolic else half).grad.isfinite().all()


def compiled(function, *arguments):
    """What a compiled function gives, and into how many graphs it falls."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    try:
        return torch.compile(function, backend=backend)(*arguments), len(graphs)
    finally:
        torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself, as it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the same
@pytest.mark.parametrize("kind", ["hmm", "symbols", "crf"])
def test_torch_compile_breaks_once_and_keeps_the_checks(kind, monkeypatch):
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    theta, values = logs(K, 2, seed=4).requires_grad_(), logs(N, T, 2, seed=3)
    labels, nothing = (values[..., 0] > 0).long(), torch.full_like(values, torch.nan)

    def loss(theta, values):
        theta = theta * 2
        if kind == "crf":
            return -LinearChainCRF(values, theta, lengths=LENGTHS).log_prob(labels).sum() / 2
        emission = normal(theta) if kind == "hmm" else symbols(theta)
        return -HMM(*HALVES, emission, LENGTHS).log_prob(values).sum() / 2

    data, wrong = (labels, labels + 5) if kind == "symbols" else (values, nothing)
    found, graphs = compiled(loss, theta, data)
    assert graphs <= 4  # before, between and after the distribution and its log_prob
    torch.testing.assert_close(found, loss(theta, data))
    gradients = [torch.autograd.grad(each, theta)[0] for each in (found, loss(theta, data))]
    torch.testing.assert_close(*gradients)
    if kind == "hmm":
        return  # components that are NaN are missing
    with pytest.raises(ValueError, match=r"values must lie|emission_scores holds nan"):
        compiled(loss, theta, wrong)
