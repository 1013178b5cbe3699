"""``SecondOrderHMM`` against the sum over all paths, and the chain of pairs."""

import math

import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    DiversityPrior,
    Filter,
    MarginalModel,
    SecondOrderHMM,
    Sequences,
    TabularHMM,
    TabularSecondOrderHMM,
    autoregressive_normal,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    load_hmm,
    markov_sample,
    normal,
    poisson,
    queries,
    save,
    second_order,
    starts,
)

T = 5
LENGTHS = torch.tensor([5, 1, 2, 4])


def tables(k, *batch, zero=False, seed=1):
    source = torch.Generator().manual_seed(seed)
    parts = [torch.randn(*batch, *(k,) * core, generator=source) for core in (1, 2, 3)]
    if zero and k > 1:
        parts[1][..., 0, 1] = parts[2][..., 0, 1, 0] = -torch.inf
    return [part.log_softmax(-1) for part in parts]


def model(k=3, zero=False, observed=True, **options):
    seen = torch.rand(4, T, generator=torch.Generator().manual_seed(2)) < 0.8
    return SecondOrderHMM(
        *tables(k, zero=zero), Normal(torch.arange(float(k)), 1.5), LENGTHS,
        seen if observed else None, validate_args=True, **options,
    )  # fmt: skip


def score(hmm, scores, path):
    """Log p(x, z), term by term."""
    total = float(hmm.log_initial[path[0]])
    for t, z in enumerate(path):
        total += float(scores[t, z])
        if t == 1:
            total += float(hmm.log_second[path[0], z])
        elif t > 1:
            total += float(hmm.log_transition[path[t - 2], path[t - 1], z])
    return total


@pytest.fixture
def values():
    return torch.randn(4, T) + 1


@pytest.fixture(params=[(1, False), (2, True), (3, False), (3, True)], ids=str)
def hmm(request):
    return model(*request.param)


def test_the_joint_density_is_a_sum_of_terms(hmm, values):
    states = torch.randint(hmm.num_states, (4, T)).masked_fill(~hmm.exists, 0)
    found = hmm.log_joint(values, states)
    for i, length in enumerate(LENGTHS.tolist()):
        scores = hmm.emission.log_prob(values[i].unsqueeze(-1))
        scores = scores.masked_fill(~hmm.observed[i].unsqueeze(-1), 0.0)
        assert found[i].item() == pytest.approx(score(hmm, scores, states[i, :length].tolist()))


def test_it_is_the_chain_of_pairs(hmm, values):
    large = hmm.expanded()
    size = hmm.num_states
    assert large.num_states == size * (size + 1)
    torch.testing.assert_close(hmm.log_prob(values), large.log_prob(values))
    torch.testing.assert_close(hmm.forecast(values, 3).mean, large.forecast(values, 3).mean)
    order = torch.randperm(size)
    renamed = hmm.permute_states(order)
    torch.testing.assert_close(renamed.log_prob(values), hmm.log_prob(values))
    assert torch.equal(order[renamed.viterbi(values)][hmm.exists], hmm.viterbi(values)[hmm.exists])
    share = hmm.stationary()
    ahead = hmm.forecast(values, 300).state_probs[:, -1]
    torch.testing.assert_close(ahead, share.expand_as(ahead), atol=1e-6, rtol=1e-6)


def test_where_the_earlier_state_does_not_matter_it_is_a_plain_hmm(values):
    initial, second, _ = tables(3)
    emission = Normal(torch.arange(3.0), 1.5)
    plain = HMM(initial, second, emission, LENGTHS)
    alike = SecondOrderHMM(initial, second, second.expand(3, 3, 3), emission, LENGTHS)
    torch.testing.assert_close(alike.log_prob(values), plain.log_prob(values))
    torch.testing.assert_close(alike.posterior(values)[:3], tuple(plain.posterior(values)))
    assert torch.equal(alike.viterbi(values), plain.viterbi(values))
    torch.testing.assert_close(alike.stationary(), plain.stationary())


def test_nothing_leaves_the_range_of_numbers():
    """Evidence of 1e6 nats, and a pair of e^-3000 that becomes the only one possible."""
    even = torch.full((2, 2, 2), 0.5).log()
    stay = torch.eye(2).log()
    seen = torch.full((1, 4, 2), -1e6 / 4)
    seen[0, 0, 1] -= 3000.0
    seen[0, 3, 0] = -torch.inf
    found = second_order.log_evidence(even[0, 0], stay, stay.expand(2, 2, 2), seen, LENGTHS[3:])
    assert found.item() == pytest.approx(-1e6 - 3000 + math.log(0.5), abs=1e-6)


def test_labels(values):
    labels = torch.full((4, T), -1)
    labels[:, 0], labels[0, 2] = 1, 2
    known = model().restrict(labels)
    torch.testing.assert_close(known.expanded().log_prob(values), known.log_prob(values))
    for states in (known.sample_states(values), known.sample_with_states()[1]):
        assert (states[:, 0] == 1).all()
        assert states[0, 2] == 2
    impossible = model(zero=True).restrict(torch.tensor([[0, 1, -1, -1, -1]]))
    with pytest.raises(ValueError, match="labels"):
        impossible.log_prob(values)
    with pytest.raises(ValueError, match="labels must leave a path"):
        impossible.sample()


def test_observations_that_depend_on_those_before():
    data = Sequences(torch.randn(4, T, 2), LENGTHS)
    module = TabularSecondOrderHMM(2, autoregressive_normal(2, 1))
    hmm = module(data.lengths)
    large = hmm.expanded()
    torch.testing.assert_close(hmm.log_prob(data.values), large.log_prob(data.values))
    assert hmm.sample().shape == (4, T, 2)
    with pytest.raises(ValueError, match="expanded"):
        hmm.forecast(data.values, 2)
    assert large.forecast(data.values, 2).sample().shape == (4, 2, 2)


def test_the_enumerated_form_has_the_same_density_and_gradient():
    leaves = [part.requires_grad_() for part in (*tables(2), torch.randn(2))]
    rows = [part.log_softmax(-1) for part in leaves[:3]]  # as those of Categorical(logits=)
    lengths, values = torch.tensor([3, 1]), torch.randn(2, 3)
    hmm = SecondOrderHMM(*rows, Normal(leaves[3], 1.0), lengths)

    def enumerated():
        with pyro.plate("sequences", 2):
            markov_sample("x", hmm, obs=values)

    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    losses = -hmm.log_prob(values).sum(), elbo.differentiable_loss(enumerated, lambda: None)
    torch.testing.assert_close(*losses)
    slopes = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses)
    for one, two in zip(*slopes):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize(("k", "family"), [(1, categorical(3)), (3, poisson())])
def test_em_never_loses_and_its_restarts_are_fits_of_their_own(k, family):
    data = Sequences(torch.randint(3, (4, T)), LENGTHS)
    module = TabularSecondOrderHMM(k, family, 1.5, 1.2, torch.full((k, k), 1.1))
    fit = fit_em(module, data, num_iterations=15, restarts=2, tolerance=None)
    assert fit.restarts.losses.diff().max() < 1e-9 * fit.losses.abs().max()
    alone = fit_em(
        module, data, num_iterations=1, tolerance=None,
        start={name: value[0] for name, value in fit.restarts.parameters.items()},
    )  # fmt: skip
    torch.testing.assert_close(alone.losses[0], fit.restarts.losses[0, -1])


def test_em_ends_where_the_density_is_stationary():
    data = Sequences(torch.randint(3, (4, T)), LENGTHS)
    module = TabularSecondOrderHMM(2, categorical(3, concentration=2.0), 2.0, 2.0, 2.0)
    fit = fit_em(module, data, num_iterations=3000, tolerance=1e-15)
    hmm = fit.hmm(data)
    logits = [part.detach().requires_grad_() for part in
              (hmm.log_initial, hmm.log_second, hmm.log_transition)]  # fmt: skip
    rows = [logit.log_softmax(-1) for logit in logits]
    density = SecondOrderHMM(*rows, hmm.emission, LENGTHS).log_prob(data.values).sum()
    density = density + sum(row.sum() for row in rows)  # of Dirichlet(2, ..., 2)
    for slope in torch.autograd.grad(density, logits):
        assert slope.abs().max() < 1e-4


def test_it_finds_what_one_state_before_cannot_tell():
    """Of 0 0 1 1 0 0 1 1 the next symbol is known from two, and even from one."""
    data = Sequences.from_list([[0, 0, 1, 1] * 12, [1, 1, 0, 0] * 12])
    first, second = (
        fit_em(kind(2, categorical(2)), data, restarts=5)
        for kind in (TabularHMM, TabularSecondOrderHMM)
    )
    assert second.losses[-1] == pytest.approx(2 * math.log(2), abs=0.01)
    assert first.losses[-1] > 30


def test_every_other_fit():
    data = Sequences(torch.randint(3, (4, T)), LENGTHS)
    model = MarginalModel(TabularSecondOrderHMM(2, categorical(3)))
    best = fit_map(model, data, num_iterations=20)
    assert best.losses[-1] < best.losses[0]
    guide = AutoNormal(model)
    assert fit_svi(model, guide, data, num_iterations=3).losses.isfinite().all()


def test_a_fit_goes_on_from_an_hmm(values):
    data = Sequences(values, LENGTHS)
    fit = fit_em(model(observed=False), data, num_iterations=3)
    assert fit.losses[-1] < fit.losses[0]
    assert isinstance(fit.hmm(data), SecondOrderHMM)
    again = fit_em(TabularSecondOrderHMM(3, normal(0)), data, num_iterations=2,
                   start=starts.from_hmm(fit.hmm(data)))  # fmt: skip
    assert again.losses.isfinite().all()
    with pytest.raises(ValueError, match="one matrix"):
        fit_em(TabularSecondOrderHMM(2, normal(0)), data, log_prior=DiversityPrior(1.0))


def test_it_is_saved_and_loaded(hmm, values, tmp_path):
    save(hmm, tmp_path / "chain")
    loaded = load_hmm(tmp_path / "chain")
    assert type(loaded) is SecondOrderHMM
    assert torch.equal(loaded.log_prob(values), hmm.log_prob(values))


def test_what_needs_a_markov_chain_says_so():
    hmm = model(observed=False)
    with pytest.raises(ValueError, match=r"expanded\(\)"):
        TabularHMM.from_hmm(hmm)
    for query in (queries.dwell_time_mean, lambda hmm: queries.dwell_time_log_prob(hmm, 3)):
        with pytest.raises(ValueError, match=r"dwell time .*expanded\(\)"):
            query(hmm)
    assert Filter(hmm.expanded().with_lengths(torch.tensor(T))).state_probs.shape == (12,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"log_second": torch.zeros(2, 3)}, r"log_second must end in \(3, 3\)|log_second"),
        ({"log_transition": torch.zeros(3, 3, 3)}, "log_transition.*sum"),
        ({"emission": Categorical(torch.ones(5, 2))}, "K = 3"),
    ],
)
def test_wrong_parameters_are_refused(changes, words):
    names = "log_initial", "log_second", "log_transition"
    arguments = dict(zip(names, tables(3))) | {"emission": Normal(torch.arange(3.0), 1.0)}
    with pytest.raises(ValueError, match=words):
        SecondOrderHMM(**(arguments | changes), lengths=LENGTHS, validate_args=True)
