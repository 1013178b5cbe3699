"""``ContinuousTimeHMM`` against sums over all paths with SciPy's exponential of a matrix."""

import math
import re
from functools import partial

import mpmath
import numpy as np
import oracle
import pytest
import torch
from pyro.distributions import Categorical, Gamma, Normal
from scipy import integrate, stats
from scipy.linalg import expm

from pyrohmm import (
    ContinuousTimeHMM,
    TabularContinuousTimeHMM,
    load_hmm,
    queries,
    save,
)
from pyrohmm.chains.rates import log_transitions
from pyrohmm.distributions import SparseGamma

K, T = 3, 5
LENGTHS = torch.tensor([5, 1, 3, 4])
double = partial(torch.tensor, dtype=torch.float64)
FULL = double([[-1.0, 0.6, 0.4], [0.2, -0.5, 0.3], [0.0, 0.1, -0.1]])
PROGRESSIVE = double([[-1.0, 0.6, 0.4], [0.0, -0.3, 0.3], [0.0, 0.0, 0.0]])
INITIAL = double([0.5, 0.3, 0.2]).log()
EMISSION = Normal(double([0.0, 1.0, 2.0]), double(1.5))


def irregular(*batch, start=0.0):
    source = torch.Generator().manual_seed(3)
    return start + torch.rand(*batch, T, generator=source, dtype=torch.float64).cumsum(-1) * 2


def model(rates=FULL, times=None, **options):
    seen = torch.rand(4, T, generator=torch.Generator().manual_seed(2)) < 0.8
    times = irregular(4) if times is None else times
    return ContinuousTimeHMM(
        INITIAL, rates, EMISSION, LENGTHS, times, seen, validate_args=True, **options
    )


@pytest.fixture
def values():
    return torch.randn(4, T, generator=torch.Generator().manual_seed(1)) + 1


@pytest.fixture(params=[FULL, PROGRESSIVE], ids=["full", "progressive"])
def rates(request):
    return request.param


def test_steps_that_are_equally_far_apart_have_a_posterior_of_paths(values):
    hmm = model(times=torch.arange(float(T)))
    states = hmm.posterior_states(values)
    torch.testing.assert_close(states.log_partition(), hmm.log_prob(values))
    torch.testing.assert_close(states.marginals(), hmm.posterior(values).state_probs)


def test_gradients_are_those_of_differences(values):
    """By each rate, the first state and the times' gaps as they are."""
    free = torch.tensor([0.6, 0.4, 0.2, 0.3, 0.5, 0.1], requires_grad=True)
    initial = torch.randn(K, requires_grad=True)
    others = ~torch.eye(K).bool()

    def evidence(free, initial):
        rates = torch.zeros(K, K).masked_scatter(others, free)
        rates = rates - rates.sum(-1).diag()
        return model().replace(log_initial=initial.log_softmax(-1), rates=rates).log_prob(values)

    assert torch.autograd.gradcheck(evidence, (free, initial))


@pytest.mark.parametrize("unit", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("kind", ["rates", "rates per step", "exact entries"])
def test_gradients_by_times_are_those_of_differences(kind, unit, values):
    """Of evidence and queries; each of equal gaps has its own."""
    times = unit * double([0.0, 1.0, 2.0, 2.5, 3.5]).expand(4, T)
    options = {}
    if kind == "exact entries":
        options = {"rates": PROGRESSIVE, "exact_entry": torch.tensor([False, False, True])}
    if kind == "rates per step":
        steps = torch.linspace(0.5, 2.0, T - 1, dtype=torch.float64)[:, None, None]
        options = {"rates": FULL * steps, "rates_per_step": True}

    def asked(times):
        hmm = model(times=times, **options)
        return (
            hmm.log_prob(values),
            hmm.posterior(values).state_probs,
            queries.path_entropy(hmm, values),
        )

    leaf = times.clone().requires_grad_()
    assert torch.autograd.gradcheck(asked, leaf, eps=1e-5 * unit, atol=1e-6 / unit, rtol=1e-4)
    if kind == "rates":
        later = (times[:, -1:] + unit * double([1.0, 2.0])).requires_grad_()
        hmm = model(times=times)
        assert torch.autograd.gradcheck(
            lambda later: hmm.forecast(values, later).state_probs, later, eps=1e-5 * unit
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("gap", [1e-8, 1.0, 1e12])
def test_any_gap_has_rows_that_sum_to_one(gap, size, dtype):
    rates = torch.rand(size, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    rates = rates.fill_diagonal_(0.0)
    rates = (rates - rates.sum(-1).diag()).requires_grad_()
    logs = log_transitions(rates, torch.tensor(gap))
    assert logs.dtype == dtype
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(size, dtype=dtype))
    assert not logs.isnan().any()
    (slope,) = torch.autograd.grad(logs.exp()[..., 0].sum(), rates)
    assert slope.isfinite().all()
    if gap <= 1e4:
        wanted = expm(rates.detach().double().numpy() * gap)
        tolerance = 1e-9 if dtype == torch.float64 else 1e-3
        np.testing.assert_allclose(logs.exp().detach(), wanted, atol=tolerance)


def test_probabilities_of_many_transitions_in_a_tiny_gap_keep_their_digits():
    """Those of a Poisson process, to e^-400: beyond what a difference of numbers can hold."""
    size = 40
    rates = torch.zeros(size, size)
    rates.diagonal()[:-1], rates.diagonal(1)[:] = -1.0, 1.0
    for gap in (1e-4, 1.0, 30.0):
        found = log_transitions(rates, torch.tensor(gap))
        wanted = stats.poisson.logpmf(np.arange(size - 1), gap)
        np.testing.assert_allclose(found[0, :-1], wanted, rtol=1e-13, atol=1e-12)
        assert (found.tril(-1)[1:, 0] == -torch.inf).all()


def exponential(rates, gap):
    """Logarithms of the exponential of a matrix by mpmath, with as many digits as it takes."""
    digits = 60 + int(2 * gap * float(-rates.diagonal().min()) / math.log(10))
    with mpmath.workdps(digits):
        found = mpmath.expm(mpmath.matrix(rates.tolist()) * mpmath.mpf(gap), method="taylor")
        size = len(rates)
        return np.array([[float(mpmath.log(found[i, j])) if found[i, j] > 0 else -math.inf
                          for j in range(size)] for i in range(size)])  # fmt: skip


STAGED = double([[-1.2, 1.2, 0.0], [0.0, -0.9, 0.9], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("rates", [FULL, PROGRESSIVE, STAGED], ids=["full", "stages", "chain"])
@pytest.mark.parametrize("gap", [1e-12, 1e-3, 1.0, 30.0, 700.0])
def test_logarithms_are_exact_for_short_and_for_long_times(rates, gap):
    """Of m transitions in a short time, of order gap^m; and of staying, far below 1e-308."""
    leaf = rates.clone().requires_grad_()
    found = log_transitions(leaf, double(gap))
    wanted = exponential(rates, gap)
    np.testing.assert_allclose(found.detach(), wanted, rtol=1e-13, atol=1e-14 * max(gap, 1))
    if gap > 100 and rates is STAGED:  # by differences along what the rates allow
        (slope,) = torch.autograd.grad(found[0, 1], leaf)
        for i, j in ((0, 0), (0, 1), (1, 1), (1, 2)):
            step = torch.zeros_like(rates)
            step[i, j] = 1e-5
            apart = [exponential(rates + sign * step, gap)[0, 1] for sign in (1, -1)]
            assert slope[i, j].item() == pytest.approx(
                (apart[0] - apart[1]) / 2e-5, rel=1e-6, abs=1e-6
            )


def test_a_sequence_that_stays_for_long_has_its_evidence():
    """Also where entries are seen at exact times; in float32, too."""
    for dtype in (torch.float32, torch.float64):
        decay = torch.tensor([[-1.2, 1.2], [0.0, 0.0]], dtype=dtype)
        sure = torch.tensor([1.0, 0.0], dtype=dtype).log()
        seen = Categorical(torch.eye(2, dtype=dtype))
        hmm = ContinuousTimeHMM(sure, decay, seen, torch.tensor(2), double([0.0, 700.0]))
        assert hmm.log_prob(torch.tensor([0, 0])).item() == pytest.approx(-840, rel=1e-6)
        dies = hmm.replace(exact_entry=torch.tensor([False, True]))
        wanted = -840 + math.log(1.2)
        assert dies.log_prob(torch.tensor([0, 1])).item() == pytest.approx(wanted, rel=1e-6)
        counts = hmm.expected_counts(torch.tensor([0, 0])).counts["rates"]
        torch.testing.assert_close(counts, torch.tensor([[700.0, 0.0], [0.0, 0.0]], dtype=dtype))


def test_times_may_lie_far_from_zero(rates, values):
    """Whatever the clock says, gaps are gaps: in float32 they would be lost."""
    near = model(rates, torch.tensor([0.0, 0.25, 0.5, 2.0, 2.5]))
    far = model(rates, 1e6 + torch.tensor([0.0, 0.25, 0.5, 2.0, 2.5]))
    assert torch.equal(near.log_prob(values), far.log_prob(values))


def test_padding_may_hold_any_time(values):
    times = irregular(4)
    wanted = model().log_prob(values)
    times[~model().exists] = torch.nan
    hmm = model(times=times)
    assert torch.equal(hmm.log_prob(values), wanted)
    assert hmm.expected_counts(values).counts["rates"].isfinite().all()


def test_forecast_is_the_chain_let_go(rates, values):
    hmm = model(rates)
    filtered = hmm.filtered(values)
    ends = hmm.times.gather(-1, (LENGTHS - 1).unsqueeze(-1))
    ahead = ends + torch.tensor([0.0, 0.7, 40.0])
    forecast = hmm.forecast(values, ahead)
    assert forecast.batch_shape == (4, 3)
    for i in range(4):
        now = filtered[i, LENGTHS[i] - 1].numpy()
        for h, gap in enumerate([0.0, 0.7, 40.0]):
            wanted = now @ expm(rates.numpy() * gap)
            np.testing.assert_allclose(forecast.state_probs[i, h], wanted, atol=1e-12)
    one = hmm.forecast(values, torch.tensor([200.0]))
    torch.testing.assert_close(
        one.state_probs[:, 0], hmm.stationary().expand(4, K), atol=1e-6, rtol=0
    )
    with pytest.raises(
        ValueError, match=r"must not precede the last step of a sequence; got \S+, and that is at"
    ):
        hmm.forecast(values, ends - 0.5)
    for wrong in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match=f"times must be finite; got {wrong}"):
            hmm.forecast(values, torch.full_like(ends, wrong))


def test_sojourns_next_states_and_the_stationary_distribution():
    hmm = model(PROGRESSIVE)
    torch.testing.assert_close(hmm.sojourn_times, torch.tensor([1.0, 1 / 0.3, math.inf]))
    wanted = torch.tensor([[0.0, 0.6, 0.4], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(hmm.next_state_probs, wanted)
    torch.testing.assert_close(hmm.stationary(), torch.tensor([0.0, 0.0, 1.0]))
    pi = model(FULL).stationary()
    torch.testing.assert_close(pi @ FULL, torch.zeros(K), atol=1e-12, rtol=0)
    gaps = torch.tensor([0.5, 3.0])
    found = hmm.transition_at(gaps)
    for i, gap in enumerate(gaps.tolist()):
        np.testing.assert_allclose(found[i], expm(PROGRESSIVE.numpy() * gap), atol=1e-12)


def test_parameters_may_be_batched(values):
    """R matrices for N sequences, N for N, and neither: each as if alone."""
    rates = torch.stack([FULL, PROGRESSIVE, FULL * 3])[:, None]
    many = model(rates)
    assert many.batch_shape == (3, 4)
    alone = torch.stack([model(each[0]).log_prob(values) for each in rates])
    torch.testing.assert_close(many.log_prob(values), alone)
    own = torch.stack([FULL, PROGRESSIVE, FULL * 3, FULL])
    each = model(own)
    wanted = [model(own[i]).log_prob(values)[i] for i in range(4)]
    torch.testing.assert_close(each.log_prob(values), torch.stack(wanted))
    counts = each.expected_counts(values).counts["rates"]
    one = ContinuousTimeHMM(INITIAL, own[3], EMISSION, LENGTHS[3:], irregular(4)[3:],
                            model().observed[3:])  # fmt: skip
    torch.testing.assert_close(counts[3], one.expected_counts(values[3:]).counts["rates"])
    assert many.forecast(values, torch.full((4, 2), 20.0)).state_probs.shape == (3, 4, 2, K)
    assert many.transition_at(torch.ones(2)).shape == (3, 1, 2, K, K)
    assert many.sample().shape == (3, 4, T)
    torch.testing.assert_close(many.expand((2, 3, 4)).log_prob(values)[1], alone)


def test_sparse_gamma_is_a_product_of_gammas():
    allowed = torch.tensor([[False, True], [True, False]])
    prior = SparseGamma(torch.full((2, 2), 2.0), torch.tensor([[1.0, 3.0], [0.5, 1.0]]), allowed)
    table = torch.tensor([[0.0, 0.7], [1.2, 0.0]])
    wanted = Gamma(2.0, torch.tensor([3.0, 0.5])).log_prob(torch.tensor([0.7, 1.2])).sum()
    torch.testing.assert_close(prior.log_prob(table), wanted)
    assert prior.support.check(table)
    assert not prior.support.check(table + 1)
    samples = prior.sample((4000,))
    assert (samples[:, ~allowed] == 0).all()
    torch.testing.assert_close(samples.mean(0), prior.mean, rtol=0.1, atol=0.01)
    transform = torch.distributions.biject_to(prior.support)
    free = transform.inv(table)
    assert free.shape == (2,)
    torch.testing.assert_close(transform(free), table)
    jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[allowed], free)
    torch.testing.assert_close(transform.log_abs_det_jacobian(free, table), jacobian.logdet())
    flat = SparseGamma(torch.ones(2, 2), torch.ones(2, 2), allowed)
    zero = torch.zeros(2, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(flat.log_prob(zero), zero)
    torch.testing.assert_close(slope, -allowed.to(slope))


# Deaths, whose times are known exactly

DEAD = torch.tensor([False, False, True])
SIGNS = Categorical(double([[0.8, 0.2, 0.0], [0.3, 0.7, 0.0], [0.0, 0.0, 1.0]]))
PATIENTS = torch.tensor([[0, 1, 0, 1, 2], [0, 0, 0, 0, 0], [1, 0, 2, 0, 0], [1, 1, 2, 2, 0]])


def deaths(**options):
    """The first dies at the fifth step, the third and fourth at the third; one visit is missed."""
    seen = torch.ones(4, T, dtype=torch.bool)
    seen[0, 2] = False
    arguments = {"observed": seen, "validate_args": True, "exact_entry": DEAD} | options
    return ContinuousTimeHMM(INITIAL, PROGRESSIVE, SIGNS, LENGTHS, irregular(4), **arguments)


@pytest.mark.parametrize("missed", [2, 4])
def test_evidence_and_posterior_of_exact_deaths_are_those_of_all_paths(missed):
    """At a missed visit nobody has died, also if it is the last."""
    seen = torch.ones(4, T, dtype=torch.bool)
    seen[0, missed] = False
    hmm = deaths(observed=seen)
    posterior, best = hmm.posterior(PATIENTS), hmm.viterbi(PATIENTS)
    joint, enter = hmm.log_joint(PATIENTS, best), PROGRESSIVE.numpy() * ~np.eye(K, dtype=bool)
    scores = SIGNS.log_prob(PATIENTS.unsqueeze(-1)).numpy()
    scores = np.where(hmm.observed.unsqueeze(-1), scores, 0.0)
    for i in range(4):
        matrices = np.zeros((T - 1, K, K))
        for t in range(int(LENGTHS[i]) - 1):
            matrices[t] = expm(PROGRESSIVE.numpy() * float(hmm.times[i].diff()[t]))
            enters = matrices[t] @ enter
            matrices[t, :2, 2] = enters[:2, 2] if hmm.observed[i, t + 1] else 0.0
        with np.errstate(divide="ignore"):
            answer = oracle.by_paths(INITIAL.numpy(), np.log(matrices), scores[i], int(LENGTHS[i]))
        np.testing.assert_allclose(posterior.log_evidence[i], answer.evidence, rtol=1e-12)
        np.testing.assert_allclose(posterior.state_probs[i], answer.states, atol=1e-12)
        np.testing.assert_allclose(joint[i], answer.best, rtol=1e-12)


def test_counts_of_exact_deaths_are_the_gradient_by_rates():
    hmm = deaths()
    counts = hmm.expected_counts(PATIENTS).counts["rates"]
    logs = hmm.chain.factors()["rates"].clone().requires_grad_()
    rates = torch.where(torch.eye(K, dtype=torch.bool), logs, logs.exp())
    evidence = hmm.replace(rates=rates).log_prob(PATIENTS).sum()
    (slope,) = torch.autograd.grad(evidence, logs)
    torch.testing.assert_close(counts, slope)
    assert counts[:2, 2].sum().item() == pytest.approx(3.0)  # deaths
    alive = [hmm.times[i, end] - hmm.times[i, 0] for i, end in enumerate([4, 0, 2, 2])]
    assert counts.diagonal()[:2].sum().item() == pytest.approx(float(sum(alive)))


def test_what_else_is_known_of_exact_deaths(tmp_path):
    hmm = deaths()
    same = hmm.permute_states(torch.tensor([2, 0, 1]))
    torch.testing.assert_close(same.log_prob(PATIENTS), hmm.log_prob(PATIENTS))
    assert same.exact_entry.tolist() == [True, False, False]
    save(hmm, tmp_path / "deaths")
    loaded = load_hmm(tmp_path / "deaths")
    assert torch.equal(loaded.log_prob(PATIENTS), hmm.log_prob(PATIENTS))
    again = TabularContinuousTimeHMM.from_hmm(hmm)(LENGTHS, hmm.observed, hmm.times)
    torch.testing.assert_close(again.log_prob(PATIENTS), hmm.log_prob(PATIENTS))
    ahead = hmm.forecast(PATIENTS, hmm.times.amax() + double([1.0, 9.0])).state_probs
    torch.testing.assert_close(ahead.sum(-1), torch.ones_like(ahead[..., 0]))  # probabilities
    assert ahead[0, :, 2].tolist() == [1.0, 1.0]
    each = queries.predictive_log_prob(hmm, PATIENTS)
    torch.testing.assert_close(each.sum(-1), hmm.log_prob(PATIENTS))
    assert each[0, 2] < -0.01  # at the missed visit the patient was alive


def survival(rates, targets, times):
    """Probability of no entry of ``targets`` until each time, by states, with SciPy."""
    stopped = rates.clone()
    stopped[targets] = 0.0
    return 1 - expm(times[:, None, None] * stopped.numpy())[:, :, targets].sum(-1)


def unseen(rates):
    """The chain alone."""
    emission = Categorical(torch.eye(rates.size(-1)).to(rates))
    even = torch.zeros(rates.size(-1)).to(rates).log_softmax(-1)
    return ContinuousTimeHMM(even, rates, emission, torch.tensor(1), torch.zeros(1))


@pytest.mark.parametrize("targets", [[2], [0, 1], [1]])
def test_passage_times_are_the_integral_of_the_survival_function(targets):
    hmm = unseen(FULL)
    times = np.linspace(0, 400, 4001)
    wanted = integrate.simpson(survival(FULL, targets, times), x=times, axis=0)
    torch.testing.assert_close(hmm.passage_times(targets), torch.from_numpy(wanted), rtol=1e-4,
                               atol=1e-4)  # fmt: skip


def test_passage_times_are_infinite_where_the_states_may_never_be_entered():
    """From 0 the chain may be caught by 3, so that the mean time to 2 is infinite; from 1 not."""
    rates = torch.tensor([[-3.0, 1, 1, 1], [0.0, -0.5, 0.5, 0], [0.0, 2, -2, 0], [0.0] * 4])
    hmm = unseen(torch.stack([rates, rates.roll((1, 1), (0, 1))]))
    first, second = hmm.passage_times([2])
    assert first.tolist() == [torch.inf, 2.0, 0.0, torch.inf]
    assert second.tolist() == [torch.inf, torch.inf, 0.0, pytest.approx(0.5)]
    for same in (2, torch.tensor([2]), np.array([2])):
        assert torch.equal(hmm.passage_times(same)[0], first)
    for wrong in ([4], [-1], [], [0.5], [True]):
        said = f"states must be some of 0 to K - 1 = 3; got {wrong}."
        with pytest.raises(ValueError, match=re.escape(said)):
            hmm.passage_times(wrong)


def test_occupancy_times_are_the_integral_of_the_transition_matrices():
    hmm, gaps = unseen(FULL), double([0.0, 0.3, 7.0])
    found = hmm.occupancy_times(gaps)
    for gap, matrix in zip(gaps.tolist(), found):
        times = np.linspace(0, gap, 401)
        wanted = integrate.simpson(expm(times[:, None, None] * FULL.numpy()), x=times, axis=0)
        torch.testing.assert_close(matrix, torch.from_numpy(wanted), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.sum(-1), gaps.unsqueeze(-1).expand(3, FULL.size(0)))
    with pytest.raises(ValueError, match="gaps must be finite and not negative; got -1"):
        hmm.occupancy_times(torch.tensor(-1.0))


def test_times_of_heart_transplants_are_those_of_msm():
    """What efpt.msm, totlos.msm print at the rates that msm fits to its data ``cav``."""
    rates = torch.tensor(
        [
            [-0.17035956, 0.12787434, 0.0, 0.042485225],
            [0.22510140, -0.60796351, 0.34259394, 0.040268172],
            [0.0, 0.13062402, -0.43708179, 0.306457767],
            [0.0, 0.0, 0.0, 0.0],
        ]
    ).double()
    rates = rates.fill_diagonal_(0)
    hmm = unseen(rates - rates.sum(-1).diag_embed())
    passed = {
        (3,): [12.7941204, 9.2246871, 5.0447440, 0.0],
        (2,): [torch.inf, torch.inf, 0.0, torch.inf],
        (2, 3): [9.8390217, 5.2877805, 0.0, 0.0],
    }
    for targets, printed in passed.items():
        wanted = torch.tensor(printed).double()
        torch.testing.assert_close(hmm.passage_times(targets), wanted, rtol=1e-6, atol=0)
    spent = [[5.60254747, 1.17223882, 0.71777991, 2.50743379],
             [2.0635306, 2.3241958, 1.6434420, 3.9688316]]  # fmt: skip
    found = hmm.occupancy_times(torch.tensor(10.0))[:2]
    torch.testing.assert_close(found, torch.tensor(spent).double(), rtol=1e-6, atol=0)
