"""``HSMM`` against all segmentations, all paths, and its chain of K D states."""

import numpy as np
import oracle
import pytest
import torch
from pyro.distributions import Categorical, Normal

from pyrohmm import (
    HMM,
    HSMM,
    Sequences,
    TabularHMM,
    TabularHSMM,
    categorical,
    cooccurrence,
    free_durations,
    load_hmm,
    queries,
    save,
    to_hmmlearn,
)

NEVER = -torch.inf
K, D, T = 3, 4, 6
LENGTHS = torch.tensor([6, 1, 4, 5])


def parameters(*batch, seed=1):
    source = torch.Generator().manual_seed(seed)
    stay = torch.eye(K, dtype=torch.bool)
    initial = torch.randn(*batch, K, generator=source)
    transition = torch.randn(*batch, K, K, generator=source).masked_fill(stay, NEVER)
    duration = torch.randn(*batch, K, D, generator=source)
    return [part.log_softmax(-1) for part in (initial, transition, duration)]


def model(censored_end=True, censored_start=False, observed=True, **options):
    seen = torch.rand(4, T, generator=torch.Generator().manual_seed(2)) < 0.8
    emission = Normal(torch.arange(3.0), 1.5)
    return HSMM(
        *parameters(), emission, LENGTHS, seen if observed else None, validate_args=True,
        censored_end=censored_end, censored_start=censored_start, **options,
    )  # fmt: skip


@pytest.fixture
def values():
    return torch.randn(4, T) + 1


CUTS = {
    "cut": (True, False),
    "ends": (False, False),
    "was there": (False, True),
    "both": (True, True),
}


@pytest.fixture(params=CUTS)
def hsmm(request):
    return model(*CUTS[request.param])


@pytest.fixture(params=[False, True], ids=["begins", "was there"])
def ongoing(request):
    """A model whose last segment goes on."""
    return model(censored_start=request.param)


def answers(hsmm, values):
    """The oracle's, of each sequence."""
    scores = Normal(torch.arange(3.0), 1.5).log_prob(values.unsqueeze(-1))
    scores = scores.masked_fill(~hsmm.observed.unsqueeze(-1), 0.0)
    parts = [part.numpy() for part in (hsmm.log_initial, hsmm.log_transition, hsmm.log_duration)]
    return [
        oracle.by_segments(
            *parts, scores[i].numpy(), int(LENGTHS[i]), *hsmm.chain.censored.values()
        )
        for i in range(4)
    ]


def test_the_joint_density_of_each_path(hsmm, values):
    for i, answer in enumerate(answers(hsmm, values)):
        paths = torch.zeros(3**T, 4, T, dtype=torch.long)
        length = int(LENGTHS[i])
        known = torch.tensor(oracle.all_paths(K, length))
        paths[: len(known), i, :length] = known
        found = hsmm.log_joint(values, paths[: len(known)])[:, i]
        wanted = [answer.paths.get(tuple(path), NEVER) for path in known.tolist()]
        torch.testing.assert_close(found, torch.tensor(wanted))


def of_states(chain, probs):
    """Probabilities of the K states, of those of an expanded chain."""
    index = chain.emission.index
    return probs.new_zeros(*probs.shape[:-1], K).index_add(-1, index, probs)


def test_filtered_states_and_forecasts_are_those_of_the_expanded_chain(ongoing, values):
    hsmm = ongoing
    chain = hsmm.expanded()
    filtered = of_states(chain, chain.filtered(values))
    torch.testing.assert_close(hsmm.filtered(values), filtered)
    found, wanted = hsmm.forecast(values, 7), chain.forecast(values, 7)
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.variance, wanted.variance)


def test_the_share_of_time_is_that_of_the_expanded_chain():
    hsmm = model()
    chain = hsmm.expanded()
    torch.testing.assert_close(hsmm.stationary(), of_states(chain, chain.stationary()))


def test_a_process_seen_from_any_moment_on_is_stationary():
    """Begun before the data, with the shares of states at any moment, it stays as it is."""
    shares = model().stationary().log()
    chain = model(censored_start=True).replace(log_initial=shares).expanded()
    probs = chain.log_initial.exp()
    for _ in range(2 * D):
        torch.testing.assert_close(of_states(chain, probs), shares.exp())
        probs = probs @ chain.log_transition.exp()


def test_labels_restrict_the_states(hsmm, values):
    labels = torch.full((4, T), -1)
    labels[0, 1], labels[2, 3] = 2, 0
    restricted = hsmm.restrict(labels)
    allowed = [
        {path: p for path, p in answer.paths.items()
         if all(wish in (-1, state) for wish, state in zip(labels[i].tolist(), path))}
        for i, answer in enumerate(answers(hsmm, values))
    ]  # fmt: skip
    wanted = [np.logaddexp.reduce(list(paths.values())) for paths in allowed]
    np.testing.assert_allclose(restricted.log_prob(values), wanted)
    for i, paths in enumerate(allowed):
        assert tuple(restricted.viterbi(values)[i, : LENGTHS[i]].tolist()) in paths
    samples, states = restricted.sample_with_states((5,))
    assert samples.shape == (5, 4, T)
    assert (states[:, 0, 1] == 2).all()
    torch.testing.assert_close(restricted.expanded().log_prob(values), restricted.log_prob(values))


def test_labels_that_leave_no_path_are_named(values):
    hsmm = HSMM(*parameters()[:2], torch.tensor([[NEVER, 0.0]]).expand(K, 2),
                Normal(torch.arange(3.0), 1.5), LENGTHS, validate_args=True)  # fmt: skip
    labels = torch.full((4, T), -1)
    labels[3, 0], labels[3, 1] = 0, 1
    with pytest.raises(ValueError, match="sequence 3, step 1"):
        hsmm.restrict(labels).log_prob(values)


@pytest.mark.parametrize("censored", [True, False])
def test_samples_have_the_durations_asked_for(censored):
    exact = torch.tensor([[NEVER, 0.0], [0.0, NEVER], [NEVER, 0.0]])
    lengths = torch.tensor([7, 6])
    initial, transition, _ = parameters()
    hsmm = HSMM(initial, transition, exact, Categorical(torch.eye(3)), lengths,
                censored_end=censored)  # fmt: skip
    values, states = hsmm.sample_with_states((50,))
    assert torch.equal(values, states)
    wanted, cut = [2, 1, 2], False
    for row in queries.segments(states.flatten(0, 1), lengths.repeat(50)):
        if row.last + 1 == lengths[row.sequence % 2]:
            cut |= row.length < wanted[row.state]
        else:
            assert row.length == wanted[row.state]
    assert cut is censored


def test_batched_parameters_broadcast_with_sequences(values):
    initial, transition, duration = parameters(2, 1)
    emission = Normal(torch.arange(3.0), 1.5)
    hsmm = HSMM(initial, transition, duration, emission, LENGTHS)
    assert hsmm.batch_shape == (2, 4)
    found = hsmm.log_prob(values)
    assert hsmm.sample_states(values, (3,)).shape == (3, 2, 4, T)
    assert hsmm.sample().shape == (2, 4, T)
    assert hsmm.forecast(values, 2).mean.shape == (2, 4, 2)
    for r in range(2):
        parts = initial[r, 0], transition[r, 0], duration[r, 0]
        torch.testing.assert_close(found[r], HSMM(*parts, emission, LENGTHS).log_prob(values))


def test_parameters_of_each_step(values):
    emission = Normal(torch.arange(3.0) + torch.arange(T).unsqueeze(-1), 1.5)
    hsmm = HSMM(*parameters(), emission, LENGTHS, emission_per_step=True)
    torch.testing.assert_close(hsmm.expanded().log_prob(values), hsmm.log_prob(values))
    with pytest.raises(ValueError, match="forecast"):
        hsmm.forecast(values, 2)


def test_expected_durations_are_those_of_the_sequences_together(hsmm, values):
    found = hsmm.expected_counts(values).counts["log_duration"]
    torch.testing.assert_close(found, hsmm.duration_counts(values).sum(0))


def test_what_needs_a_markov_chain_refuses_and_names_the_cure(values):
    hsmm = model()
    calls = [
        TabularHMM.from_hmm,
        lambda chain: chain.log_factors(values),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^\w+ needs .* hmm\.expanded\(\)"):
            call(hsmm)
        call(hsmm.expanded())
    with pytest.raises(ValueError, match="durations or an order"):
        to_hmmlearn(hsmm)
    symbols = TabularHSMM(2, categorical(3), free_durations(3))
    data = Sequences.from_list([[0, 1, 2]])
    with pytest.raises(ValueError, match="fit_cooccurrence needs"):
        cooccurrence.fit_cooccurrence(symbols, data, num_iterations=1)


def test_saved_and_loaded(hsmm, values, tmp_path):
    save(hsmm, tmp_path / "hsmm")
    loaded = load_hmm(tmp_path / "hsmm")
    assert type(loaded) is HSMM
    assert torch.equal(loaded.log_prob(values), hsmm.log_prob(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_initial": torch.zeros(1)}, "log_initial must be of at least two states"),
        ({"log_duration": torch.zeros(2, 4)}, r"log_duration must end in shape \(K, D\)"),
        ({"log_duration": torch.zeros(3)}, r"log_duration must have shape \(\*B, K, D\)"),
        ({"log_duration": torch.zeros(3, 4)}, "log_duration must hold log-probabilities"),
        ({"log_transition": torch.zeros(3, 3).log_softmax(-1)}, "-inf on the diagonal"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    initial, transition, duration = parameters()
    arguments = {
        "log_initial": initial, "log_transition": transition, "log_duration": duration,
        "emission": Normal(torch.arange(3.0), 1.5), "lengths": LENGTHS, "validate_args": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        HSMM(**(arguments | change))


def test_forecasts_need_data_that_may_go_on(values):
    with pytest.raises(ValueError, match=r"replace\(censored_end=True\)"):
        model(censored_end=False).forecast(values, 1)


def test_an_hmm_and_an_hsmm_with_the_same_chain_agree(values):
    """Durations of one step: a chain that never stays."""
    initial, transition, _ = parameters()
    emission = Normal(torch.arange(3.0), 1.5)
    one = torch.zeros(K, 1)
    hsmm = HSMM(initial, transition, one, emission, LENGTHS)
    hmm = HMM(initial, transition, emission, LENGTHS)
    torch.testing.assert_close(hsmm.log_prob(values), hmm.log_prob(values))
    assert torch.equal(hsmm.viterbi(values), hmm.viterbi(values))
