"""What an HMM of any chain answers, and how its module is fitted, held against all paths."""

import itertools
import pickle

import oracle
import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.utils._python_dispatch import TorchDispatchMode

from pyrohmm import (
    HMM,
    HSMM,
    BlockHMM,
    ContinuousTimeHMM,
    FactorialHMM,
    Filter,
    MarginalModel,
    SecondOrderHMM,
    Sequences,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    additive_normal,
    blocks,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    free_durations,
    load_hmm,
    markov_sample,
    normal,
    poisson,
    queries,
    save,
    starts,
)

T = 5
LENGTHS = torch.tensor([5, 1, 4])


def rows(*shape, zeros=()):
    logs = torch.randn(shape)
    for place in zeros:
        logs[place] = -torch.inf
    return logs.log_softmax(-1)


def seen():
    """A step in the middle of the first sequence is missing, and the last one of the third."""
    observed = torch.ones(3, T, dtype=torch.bool)
    observed[0, 2] = observed[2, 3] = False
    return observed


def numbers(size):
    return Normal(torch.arange(float(size)), 1.5)


def lasting(censored_end, censored_start):
    transition = torch.randn(3, 3).fill_diagonal_(-torch.inf).log_softmax(-1)
    durations = rows(3, 4, zeros=[(0, 1), (1, 2), (1, 3)])
    return HSMM(rows(3), transition, durations, numbers(3), LENGTHS, seen(),
                censored_end=censored_end, censored_start=censored_start)  # fmt: skip


def several(zeros=()):
    matrices = [rows(2, 2), rows(3, 3, zeros=zeros)]
    return FactorialHMM([rows(2), rows(3)], matrices, numbers(6), LENGTHS, seen())


def of_pairs(size, first=(), later=()):
    tables = rows(size), rows(size, size, zeros=first), rows(size, size, size, zeros=later)
    return SecondOrderHMM(*tables, numbers(size), LENGTHS, seen())


def in_time():
    rates = torch.tensor([[-1.0, 0.6, 0.4], [0.0, -0.3, 0.3], [0.0, 0.0, 0.0]])
    times = torch.rand(3, T).cumsum(-1)
    return ContinuousTimeHMM(rows(3), rates, numbers(3), LENGTHS, times, seen())


def in_time_per_step():
    rates = torch.rand(T - 1, 3, 3).tril(-1) + torch.rand(T - 1, 3, 3).triu(1)
    rates, times = rates - rates.sum(-1).diag_embed(), torch.rand(3, T).cumsum(-1)
    return ContinuousTimeHMM(rows(3), rates, numbers(3), LENGTHS, times, seen(),
                             rates_per_step=True)  # fmt: skip


HMMS = {
    "markov": lambda: HMM(rows(3), rows(3, 3), numbers(3), LENGTHS, seen()),
    "markov per step": lambda: HMM(rows(2), rows(T - 1, 2, 2), numbers(2), LENGTHS, seen(),
                                   transition_per_step=True),
    "durations": lambda: lasting(True, False),
    "durations that end": lambda: lasting(False, False),
    "durations before the data": lambda: lasting(True, True),
    "whole durations before the data": lambda: lasting(False, True),
    "product": several,
    "product with zeros": lambda: several([(0, 2)]),
    "pairs": lambda: of_pairs(3),
    "pairs with zeros": lambda: of_pairs(3, [(0, 1)], [(0, 1, 0), (0, 1, 1)]),
    "pairs of one state": lambda: of_pairs(1),
    "times": in_time,
    "times with rates per step": in_time_per_step,
}  # fmt: skip


@pytest.fixture(params=HMMS)
def hmm(request):
    return HMMS[request.param]()


def all_paths(hmm, values, sequence):
    """Every path of a sequence, and its log joint density."""
    length = int(LENGTHS[sequence])
    paths = torch.tensor(list(itertools.product(range(hmm.num_states), repeat=length)))
    wide = torch.zeros(len(paths), 3, T, dtype=torch.long)
    wide[:, sequence, :length] = paths
    return paths, hmm.log_joint(values, wide)[:, sequence]


def test_labels_leave_the_paths_that_keep_to_them(hmm):
    values = hmm.sample()
    labels = hmm.sample_states(values).masked_fill(torch.rand(3, T) < 0.5, -1)
    known = hmm.restrict(labels)
    evidence, states, best = known.log_prob(values), known.posterior(values).state_probs, []
    for n, length in enumerate(LENGTHS.tolist()):
        paths, joint = all_paths(hmm, values, n)
        wanted = labels[n, :length]
        joint = joint.masked_fill(~((wanted < 0) | (paths == wanted)).all(-1), -torch.inf)
        torch.testing.assert_close(evidence[n], joint.logsumexp(0))
        hits = torch.nn.functional.one_hot(paths, hmm.num_states).double()
        shares = torch.einsum("p,ptk->tk", joint.softmax(0), hits)
        torch.testing.assert_close(states[n, :length], shares)
        best.append(joint.max())
    found = hmm.log_joint(values, known.viterbi(values))
    torch.testing.assert_close(found, torch.stack(best))
    for drawn in (known.sample_states(values, (20,)), known.sample_with_states((20,))[1]):
        assert bool(((labels < 0) | (drawn == labels) | ~hmm.exists).all())
    torch.testing.assert_close(known.expanded().log_prob(values), evidence)


def test_labels_that_leave_no_path_are_named():
    known = HMMS["pairs with zeros"]().restrict(
        torch.tensor([[-1] * T, [-1] * T, [0, 1, 1, -1, -1]])
    )
    with pytest.raises(ValueError, match=r"labels must leave a path .* sequence 2, step 1"):
        known.log_prob(torch.zeros(3, T))
    with pytest.raises(ValueError, match="labels must leave a path"):
        known.sample()


@pytest.mark.parametrize("name", [name for name in HMMS if "product" not in name])
def test_states_may_be_put_in_another_order(name):
    hmm = HMMS[name]()
    values, order = hmm.sample(), torch.randperm(hmm.num_states)
    other = hmm.permute_states(order)
    torch.testing.assert_close(other.log_prob(values), hmm.log_prob(values))
    states = hmm.posterior(values).state_probs[..., order]
    torch.testing.assert_close(other.posterior(values).state_probs, states)
    assert torch.equal(order[other.viterbi(values)][hmm.exists], hmm.viterbi(values)[hmm.exists])


def test_what_was_saved_or_pickled_gives_the_same_bits(hmm, tmp_path):
    values = hmm.sample()
    known = hmm.restrict(hmm.sample_states(values).masked_fill(torch.rand(3, T) < 0.5, -1))
    save(known, tmp_path / "hmm")
    for other in (load_hmm(tmp_path / "hmm"), pickle.loads(pickle.dumps(known))):
        assert type(other) is type(hmm)
        assert torch.equal(other.log_prob(values), known.log_prob(values))
        counts = known.expected_counts(values).counts
        for name, count in other.expected_counts(values).counts.items():
            assert torch.equal(count, counts[name]), name


@pytest.mark.parametrize("name", ["markov", "product", "pairs", "times"])
def test_the_enumerated_form_has_the_same_density_and_gradient(name):
    hmm = HMMS[name]()
    values = hmm.sample()
    leaves = {name: part.clone().requires_grad_() for name, part in hmm.chain.parameters.items()}
    means = torch.randn(hmm.num_states, requires_grad=True)
    parts = {name: leaf.log_softmax(-1) for name, leaf in leaves.items()}  # as Categorical's logits
    if name == "times":
        rates = leaves["rates"].exp().triu(1)
        parts["rates"] = rates - rates.sum(-1).diag()
    chain = hmm.chain.replace(**parts)
    hmm = HMM.of(chain, Normal(means, 1.0), hmm.lengths, hmm.observed)

    def enumerated():
        with pyro.plate("sequences", 3):
            markov_sample("x", hmm, obs=values)

    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    losses = -hmm.log_prob(values).sum(), elbo.differentiable_loss(enumerated, lambda: None)
    torch.testing.assert_close(*losses)
    slopes = (
        torch.autograd.grad(loss, [*leaves.values(), means], retain_graph=True) for loss in losses
    )
    for one, two in zip(*slopes):
        torch.testing.assert_close(one, two)


def test_the_best_paths_and_the_entropy_are_those_of_all_paths(hmm):
    values = hmm.sample()
    found, scores = queries.k_best(hmm, values, 4)
    entropy = queries.path_entropy(hmm, values)
    for n in range(3):
        paths, joint = all_paths(hmm, values, n)
        ranked, order = joint.sort(descending=True)
        count = min(4, int((joint > -torch.inf).sum()))
        torch.testing.assert_close(scores[n, :count], ranked[:count])
        assert torch.equal(found[n, :count, : LENGTHS[n]], paths[order[:count]])
        assert bool((scores[n, count:] == -torch.inf).all())
        expected = torch.special.entr(joint.softmax(0)).sum()
        torch.testing.assert_close(entropy[n], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[:, 0], hmm.viterbi(values))


def test_the_posterior_of_the_states_is_a_distribution(hmm):
    values = hmm.sample()
    if not hmm.chain.is_markov:
        with pytest.raises(ValueError, match=r"posterior_states needs .* hmm\.expanded\(\)"):
            hmm.posterior_states(values)
        hmm = hmm.expanded()
    hmm = hmm.restrict(
        torch.tensor([[-1] * T, [-1] * T, [*hmm.viterbi(values)[2, :2], -1, -1, -1]])
    )
    states, found = hmm.posterior_states(values), hmm.posterior(values)
    torch.testing.assert_close(states.log_partition(), hmm.log_prob(values))
    torch.testing.assert_close(states.marginals(), found.state_probs)
    assert hmm.log_joint(values, states.viterbi()).allclose(
        hmm.log_joint(values, hmm.viterbi(values))
    )
    torch.testing.assert_close(states.path_entropy(), queries.path_entropy(hmm, values))
    samples = states.sample((500,))
    hits = torch.nn.functional.one_hot(samples, hmm.num_states) * hmm.exists.unsqueeze(-1)
    spread = (found.state_probs * (1 - found.state_probs) / 500).clamp(min=0).sqrt()
    assert bool(((hits.double().mean(0) - found.state_probs).abs() <= 5 * spread + 0.01).all())
    ratio = hmm.log_joint(values, samples) - hmm.log_prob(values)
    torch.testing.assert_close(states.log_prob(samples), ratio)
    for n in range(3) if hmm.num_states <= 6 else [1]:
        paths, joint = all_paths(hmm, values, n)
        wide = torch.zeros(len(paths), 3, T, dtype=torch.long)
        wide[:, n, : paths.size(-1)] = paths
        torch.testing.assert_close(states.log_prob(wide)[:, n], joint.log_softmax(0))


@pytest.mark.parametrize("name", ["markov", "markov per step", "product"])
def test_the_posterior_of_the_states_has_the_gradient_of_the_joint_density(name):
    hmm = HMMS[name]()
    values = hmm.sample().requires_grad_()
    parts = {key: part.clone().requires_grad_() for key, part in hmm.chain.parameters.items()}
    hmm = (
        hmm.replace(**parts)
        if "product" not in name
        else hmm.with_chain(hmm.chain.replace(**parts))
    )
    path, leaves = hmm.sample_states(values), [values, *parts.values()]
    wanted = hmm.log_joint(values, path) - hmm.log_prob(values)
    found = hmm.posterior_states(values).log_prob(path)
    slopes = (torch.autograd.grad(each.sum(), leaves) for each in (found, wanted))
    for one, other in zip(*slopes):
        torch.testing.assert_close(one, other)


def test_expected_visits_are_those_of_all_paths(hmm):
    values = hmm.sample()
    found = queries.expected_visits(hmm, values)
    for n in range(3):
        paths, joint = all_paths(hmm, values, n)
        begins = torch.cat([torch.ones_like(paths[:, :1]), paths.diff(dim=-1)], -1) != 0
        visits = torch.stack([(begins & (paths == k)).sum(-1) for k in range(hmm.num_states)], -1)
        torch.testing.assert_close(found[n], joint.softmax(0) @ visits.double())


def of_states(chain, probs, size):
    """Probabilities of the states of an expanded chain, summed by the state each stands for."""
    index = getattr(chain.emission, "index", torch.arange(size))
    return probs.new_zeros(*probs.shape[:-1], size).index_add(-1, index, probs)


def test_predictions_are_those_of_the_expanded_chain(hmm):
    values, chain, size = hmm.sample(), hmm.expanded(), hmm.num_states
    predicted = queries.predictive_log_prob(hmm, values)
    torch.testing.assert_close(predicted, queries.predictive_log_prob(chain, values))
    torch.testing.assert_close(predicted.sum(-1), hmm.log_prob(values))
    marginals = [queries.observation_marginals(each, values).mean for each in (hmm, chain)]
    torch.testing.assert_close(marginals[0][hmm.exists], marginals[1][hmm.exists])
    if chain.transition_per_step or not hmm.chain.options.get("censored_end", True):
        return
    filtered = of_states(chain, chain.filtered(values), size)
    torch.testing.assert_close(hmm.filtered(values), filtered)
    found, wanted = hmm.forecast(values, 7), chain.forecast(values, 7)
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.variance, wanted.variance)
    torch.testing.assert_close(hmm.stationary(), of_states(chain, chain.stationary(), size))


EMISSIONS = {
    "numbers": numbers,
    "symbols": lambda size: Categorical(logits=rows(size, 3)),
    "counts": lambda size: Poisson(0.5 + 2 * torch.arange(float(size))),
}


@pytest.mark.parametrize("emission", EMISSIONS)
def test_residuals_are_those_of_the_expanded_chain(hmm, emission):
    hmm = HMM.of(hmm.chain, EMISSIONS[emission](hmm.num_states), LENGTHS, seen())
    values = hmm.sample()
    for forecast in (True, False):
        found, wanted = (
            queries.pseudo_residuals(each, values, forecast=forecast)
            for each in (hmm, hmm.expanded())
        )
        torch.testing.assert_close(found, wanted)
        assert bool((found.upper[hmm.exists & hmm.observed] < 1).any())


def of_five_steps(name):
    """All sequences of T steps, of which some are not observed, and values."""
    hmm = HMMS[name]().replace(lengths=torch.full((3,), T))
    return hmm, hmm.sample()


@pytest.mark.parametrize("name", [name for name in HMMS if "step" not in name])
def test_what_follows_completes_the_joint_density(name):
    """A ratio of evidences; where segments end with the data, of the paths that go on."""
    hmm, values = of_five_steps(name)
    hmm = hmm.replace(observed=None)
    times = {"times": hmm.times[:, :3]} if name == "times" else {}
    past = hmm.replace(lengths=torch.full((3,), 3), **times)
    ahead = queries.continuation(past, values[:, :3], hmm.times[:, 3:] if times else 2)
    if hmm.chain.options.get("censored_end", True):
        joint = hmm.log_prob(values)
    else:
        paths = torch.cartesian_prod(*[torch.arange(3)] * T).unsqueeze(1).expand(-1, 3, -1)
        joint = hmm.replace(censored_end=True).log_joint(values, paths)
        goes_on = paths[..., 2] != paths[..., 3]
        joint = joint.masked_fill(~goes_on, -torch.inf).logsumexp(0)
    wanted = joint - past.log_prob(values[:, :3])
    torch.testing.assert_close(ahead.log_prob(values[:, 3:]), wanted)


@pytest.mark.parametrize("name", [n for n in HMMS if not {"end", "whole", "rates"} & {*n.split()}])
@pytest.mark.parametrize("chunks", [[1] * T, [2, 3]])
def test_a_stream_is_filtered_and_forecast(name, chunks):
    """In chunks, each by a filter that goes on where another one stopped."""
    hmm, values = of_five_steps(name)
    stream, found = Filter(hmm), []
    for chunk in torch.arange(T).split(chunks):
        times = {"times": hmm.times[:, chunk]} if name == "times" else {}
        found.append(stream.update(values[:, chunk], hmm.observed[:, chunk], **times))
        other = Filter(hmm)
        other.load_state_dict(stream.state_dict())
        stream = other
    torch.testing.assert_close(torch.cat(found, 1), hmm.filtered(values))
    torch.testing.assert_close(stream.log_evidence, hmm.log_prob(values))
    if "step" in name:
        return
    when = hmm.times[:, -1:] + torch.tensor([0.5, 2.0]) if name == "times" else None
    ahead = stream.predict(2) if when is None else stream.predict(times=when)
    wanted = hmm.forecast(values, 2 if when is None else when)
    torch.testing.assert_close(ahead.state_probs, wanted.state_probs)
    torch.testing.assert_close(ahead.mean, wanted.mean)


# Data of another dtype, and data that are impossible ---------------------------------------------


def ask(hmm, values):
    """Every query by name, as a function without arguments."""
    timed = isinstance(hmm, ContinuousTimeHMM)
    times = {"times": hmm.times} if timed else {}
    ahead = hmm.times[:, -1:] + torch.tensor([1.0, 2.0]) if timed else 2

    def filtered():
        full = hmm.replace(lengths=torch.full((3,), T))
        stream = Filter(full)
        return stream.update(values, full.observed, **times), stream

    def predicted():
        return filtered()[1].predict(**({"times": ahead} if timed else {"num_steps": 2})).mean

    found = {
        "posterior": lambda: hmm.posterior(values).state_probs,
        "filtered": lambda: hmm.filtered(values),
        "viterbi": lambda: hmm.viterbi(values),
        "sample_states": lambda: hmm.sample_states(values, (2,)),
        "state_probs_ahead": lambda: hmm.state_probs_ahead(values, 0),
        "k_best": lambda: queries.k_best(hmm, values, 2)[1],
        "path_entropy": lambda: queries.path_entropy(hmm, values),
        "expected_visits": lambda: queries.expected_visits(hmm, values),
        "impute": lambda: queries.impute(hmm, values),
        "observation_marginals": lambda: queries.observation_marginals(hmm, values).mean,
        "pseudo_residuals": lambda: queries.pseudo_residuals(hmm, values)[1],
        "forecast residuals": lambda: queries.pseudo_residuals(hmm, values, forecast=True)[1],
    }
    if hmm.chain.is_markov:
        found["posterior_states"] = lambda: hmm.posterior_states(values).marginals()
    if isinstance(hmm, HSMM):
        found["duration_counts"] = lambda: hmm.duration_counts(values)
    if (hmm.chain.per_step and not timed) or getattr(hmm, "rates_per_step", False):
        return found
    if hmm.chain.options.get("censored_end", True):
        found["Filter"], found["predict"] = lambda: filtered()[0], predicted
        for part in ("state_probs", "mean", "variance"):
            found[part] = lambda part=part: getattr(hmm.forecast(values, ahead), part)
        found["quantiles"] = lambda: hmm.forecast(values, ahead).quantiles()
        found["density"] = lambda: hmm.forecast(values, ahead).log_prob(values[:, :1])
    found["continuation"] = lambda: queries.continuation(hmm, values, ahead).log_initial.exp()
    return found


def evidences(hmm, values):
    """What has an answer for impossible data, too."""
    return {
        "log_prob": lambda: hmm.log_prob(values),
        "expected_counts": lambda: hmm.expected_counts(values).state_probs,
        "log_joint": lambda: hmm.log_joint(values, torch.zeros(3, T, dtype=torch.long)),
    }


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_the_dtype_of_results_is_that_of_the_parameters(hmm, dtypes):
    """Whatever that of the data is; integers are numbers."""
    own, other = dtypes
    values = hmm.sample().round()
    chain = hmm.chain.map(lambda name, part, core: part.to(own))
    emission = Normal(hmm.emission.loc.to(own), hmm.emission.scale.to(own))
    hmm = HMM.of(chain, emission, hmm.lengths, hmm.observed) if type(hmm) is HMM else (
        type(hmm).of(chain, emission, hmm.lengths, hmm.observed))  # fmt: skip
    alike = ask(hmm, values.to(own)) | evidences(hmm, values.to(own))
    for kind in (other, torch.int64):
        for name, query in (ask(hmm, values.to(kind)) | evidences(hmm, values.to(kind))).items():
            wanted = alike[name]()
            found = query()
            if name == "impute":  # of the dtype of the values
                assert found.dtype == kind
                continue
            assert found.dtype == wanted.dtype, name
            if found.is_floating_point():
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_whole_numbers_that_float32_does_not_hold_are_told_apart():
    """Of parameters in float32, whose density may be as wide as it will."""
    wide = Normal(torch.tensor([1.7e9, 1.7e9 + 4096]).float(), torch.tensor(100.0).float())
    even = torch.full((2, 2), 0.5).log().float()
    hmm = HMM(even[0], even, wide, torch.tensor(3))
    values = 1_700_000_000 + torch.tensor([0, 40, 80])
    exact = HMM(even[0].double(), even.double(), Normal(wide.loc.double(), wide.scale.double()),
                torch.tensor(3))  # fmt: skip
    assert hmm.log_prob(values).dtype == torch.float32
    torch.testing.assert_close(hmm.log_prob(values).double(), exact.log_prob(values.double()))


def test_every_query_refuses_what_is_impossible(hmm):
    """By name, with the number of sequences; the evidence is -inf."""
    size = hmm.num_states
    shown = Categorical(logits=torch.eye(size + 1)[:size].log())
    hmm = type(hmm).of(hmm.chain, shown, hmm.lengths, hmm.observed, True)
    values = hmm.sample()
    values[2, 0] = size  # which no state emits
    assert hmm.log_prob(values).isneginf().tolist() == [False, False, True]
    assert hmm.expected_counts(values).log_evidence.isneginf().tolist() == [False, False, True]
    names = ask(hmm, values)
    for name in names.keys() - {"mean", "variance"}:
        with pytest.raises(
            ValueError, match=r"values must be.*1 of 3 sequences .*, the first at \d"
        ):
            names[name]()


class Own(Normal):
    """An emission whose moments nobody has written."""

    mean = variance = property(torch.distributions.Distribution.mean.fget)


class Silent(Normal):
    """An emission that does not say what it emits."""

    support = torch.distributions.Distribution.support


def test_what_an_emission_of_ones_own_lacks_is_named():
    even = torch.full((2, 2), 0.5).log()
    levels = torch.tensor([0.0, 1.0])
    hmm, values = HMM(even[0], even, Own(levels, 1.0), torch.tensor(3)), torch.zeros(3)
    for wanted in ("mean", "variance"):
        for forecast in (hmm.forecast(values, 2), queries.observation_marginals(hmm, values)):
            with pytest.raises(NotImplementedError, match=rf"Own has no {wanted}\. Define it"):
                getattr(forecast, wanted)
    assert hmm.forecast(values, 2).quantiles([0.5]).shape == (1, 2)
    for function in ("cdf", "icdf", "entropy"):
        with pytest.raises(NotImplementedError, match=r"Forecast has no cdf.*take quantiles"):
            getattr(hmm.forecast(values, 2), function)(*[values[:2]] * (function != "entropy"))
    for silent in (Silent(levels, 1.0), Silent(torch.zeros(2, 1), 1.0).to_event(1)):
        with pytest.raises(TypeError, match=r"Silent has no support. Define it in the class"):
            HMM(even[0], even, silent, torch.tensor(3))


# Modules, fitted ---------------------------------------------------------------------------------

MODULES = {
    "markov": lambda: TabularHMM(2, normal(0), 1.5, 1.5),
    "durations": lambda: TabularHSMM(3, normal(0), free_durations(3, 1.5), 1.5, 1.5),
    "times": lambda: TabularContinuousTimeHMM(3, poisson(), 1.5, 1.5, 0.7),
    "additive product": lambda: TabularFactorialHMM((2, 3), additive_normal((2, 3), 2)),
    "product": lambda: TabularFactorialHMM((2, 3), normal(2), 1.5, 1.5),
    "pairs of one state": lambda: TabularSecondOrderHMM(1, categorical(3)),
    "pairs": lambda: TabularSecondOrderHMM(3, poisson(), 1.5, 1.2, torch.full((3, 3), 1.1)),
}


@pytest.fixture(params=MODULES)
def module(request):
    return MODULES[request.param]()


def data_of(module):
    times = torch.rand(3, T).cumsum(-1) if isinstance(module, TabularContinuousTimeHMM) else None
    emission = (module(LENGTHS) if times is None else module(LENGTHS, None, times)).emission
    if emission.support.is_discrete:
        return Sequences(torch.randint(3, (3, T)), LENGTHS, times=times)
    return Sequences(torch.randn(3, T, *emission.event_shape).cumsum(1), LENGTHS, times=times)


def test_em_never_loses_and_its_restarts_are_fits_of_their_own(module):
    data = data_of(module)
    begin, options = starts.from_prior(module, data, 2), {"num_iterations": 15, "tolerance": None}
    fit = fit_em(module, data, restarts=2, start=lambda *_: begin, **options)
    assert fit.restarts.losses.diff().max() < 1e-9 * fit.losses.abs().max()
    for restart, losses in enumerate(fit.restarts.losses):
        own = {name: value[restart : restart + 1] for name, value in begin.items()}
        alone = fit_em(module, data, start=lambda *_, own=own: own, **options)
        torch.testing.assert_close(alone.losses, losses)
        for name, value in alone.parameters.items():
            torch.testing.assert_close(fit.restarts.parameters[name][restart], value)


def test_em_ends_at_a_maximum_and_goes_on_from_an_hmm(module):
    data = data_of(module)
    fit = fit_em(module, data, num_iterations=3000, tolerance=1e-14)
    assert fit.information(data).decrement < 1e-6
    again = fit_em(fit.hmm(data), data, num_iterations=3, tolerance=None)
    assert again.losses[-1] <= again.losses[0] + 1e-9
    assert type(again.hmm(data)) is type(fit.hmm(data))


def test_every_gradient_method_fits_it(module):
    data, model = data_of(module), MarginalModel(module)
    best = fit_map(model, data, num_iterations=20)
    assert best.losses[-1] < best.losses[0]
    assert fit_svi(model, AutoNormal(model), data, num_iterations=3).losses.isfinite().all()


def in_blocks(*logits):
    three = blocks.from_clusters(torch.tensor([0, 1, 1, 0]), torch.tensor([2, 1]))
    transition = blocks.inner_products.InnerProductTransition(
        torch.randn(3, 2), torch.randn(3, 2), three, *logits
    )
    table = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0], [0.5, 0.5]]).log()
    return BlockHMM(rows(3), transition, table, three, LENGTHS, seen(), validate_args=False)


def blocks_of_a_matrix():
    one = in_blocks()
    table = one.emission.logits.T.gather(1, torch.tensor([[0, 1], [2, 2], [2, 2], [0, 1]]))
    return BlockHMM(rows(3), rows(3, 3), table, one.blocks, LENGTHS, seen(), validate_args=False)


def changed(name, table):
    """Other values of a parameter, with the same zeros."""
    if name == "rates":
        return table * 3
    return torch.randn_like(table).masked_fill(table.isneginf(), -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("name", [name for name in HMMS if name != "pairs of one state"])
def test_a_parameter_that_is_changed_in_place_is_used_as_it_is(name):
    hmm = HMMS[name]()
    values = hmm.sample()
    for part, table in hmm.chain.parameters.items():
        before = hmm.log_prob(values)
        table.copy_(changed(part, table))
        fresh = hmm.with_chain(hmm.chain.map(lambda _, p, core: p.clone()))
        assert not torch.equal(hmm.log_prob(values), before)
        torch.testing.assert_close(hmm.log_prob(values), fresh.log_prob(values), rtol=0, atol=0)


def test_no_gradient_is_of_inputs_that_were_changed_since(hmm):
    """Torch raises where it reads such an input on the way back; and so does this."""
    values = hmm.sample()
    scores = hmm.log_likelihood(values)
    names = [*hmm.chain.parameters, "log_likelihood"]
    for name in names:
        leaf = (hmm.chain.parameters | {"log_likelihood": scores})[name].clone().requires_grad_()

        def evidence(part, name=name):
            chain = hmm.chain if name == "log_likelihood" else hmm.chain.replace(**{name: part})
            return chain.log_evidence(part if name == "log_likelihood" else scores, LENGTHS).sum()

        (right,) = torch.autograd.grad(evidence(leaf * 1.0), leaf)
        moving = leaf * 1.0
        value = evidence(moving)
        with torch.no_grad():
            moving.mul_(0.5)
        try:
            (found,) = torch.autograd.grad(value, leaf)
        except RuntimeError:  # "modified by an inplace operation"
            continue
        torch.testing.assert_close(found, right)


class Sizes(TorchDispatchMode):
    """The largest tensor that is made in this context."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for part in found if isinstance(found, tuple | list) else [found]:
            if isinstance(part, torch.Tensor):
                self.largest = max(self.largest, part.numel())
        return found


def test_a_product_of_too_many_chains_is_refused_before_it_is_made():
    pairs = [[rows(2)] * 28, [rows(2, 2)] * 28]
    with Sizes() as made:
        with pytest.raises(ValueError, match=r"28 chains of 2 .*have 268,435,456 product states"):
            FactorialHMM(*pairs, numbers(4), torch.tensor([3]))
        with pytest.raises(ValueError, match="268,435,456 product states"):
            TabularFactorialHMM([2] * 28, additive_normal([2], dim=1))
    assert made.largest < 100


def test_sequences_that_broadcast_to_too_many_are_refused_before_they_are_made():
    lengths, times = torch.ones(40_000, 1, dtype=torch.long), torch.zeros(1, 40_000, 1)
    rates = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    with Sizes() as made:
        with pytest.raises(ValueError, match=r"which make 1,600,000,000: .* 6,400,000,000 bytes"):
            ContinuousTimeHMM(rows(2), rates, numbers(2), lengths, times)
        with pytest.raises(ValueError, match="which make 1,600,000,000"):
            HMM(rows(2), rows(2, 2), numbers(2), lengths, torch.ones(1, 40_000, 1).bool())
    assert made.largest < 100_000


@pytest.mark.parametrize("sizes", [2, 5])
def test_gradients_by_the_matrix_of_blocks_count_transitions_to_missing_steps(sizes):
    """As those of the HMM with zeros do, whichever steps are missing: the last ones, or all."""
    hmm = blocks_of_a_matrix()
    observed = torch.ones(3, T, dtype=torch.bool)
    observed[0, sizes - 1 :] = observed[1] = observed[2] = False
    values, found = torch.tensor([[0, 1, 2, 3, 0]] * 3), []
    for kind in (BlockHMM, HMM):
        tables = [table.clone().requires_grad_() for table in (hmm.log_initial, hmm.log_transition)]
        if kind is HMM:
            other = HMM(*tables, hmm.emission, LENGTHS, observed, validate_args=False)
        else:
            parts = hmm._emission.log_probs, hmm.blocks
            other = BlockHMM(*tables, *parts, LENGTHS, observed, validate_args=False)
        value = other.log_prob(values).sum()
        found.append((value, *torch.autograd.grad(value, tables)))
    torch.testing.assert_close(*found)


def test_a_gradient_leaves_nothing_to_the_collector(hmm):
    """One that held the value that it is of would keep memory of every step until then."""
    values, parts = hmm.sample(), {}
    for name, parameter in hmm.chain.parameters.items():
        parts[name] = parameter.detach().requires_grad_()

    def step():
        chain = hmm.chain.replace(**parts)
        HMM.of(chain, hmm.emission, LENGTHS, hmm.observed).log_prob(values).sum().backward()

    assert oracle.cyclic(step) == 0
