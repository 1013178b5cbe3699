"""``HSMM`` against all segmentations, all paths, and its chain of K D states."""

import oracle
import pytest
import torch
from pyro.distributions import Normal

from pyrohmm import (
    HSMM,
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


def answers(hsmm, values):
    """The oracle's, of each sequence."""
    scores = Normal(torch.arange(3.0), 1.5).log_prob(values.unsqueeze(-1))
    scores = scores.masked_fill(~hsmm.observed.unsqueeze(-1), 0.0)
    parts = [part.numpy() for part in (hsmm.log_initial, hsmm.log_transition, hsmm.log_duration)]
    return [
        oracle.by_segments(
            *parts, scores[i].numpy(), int(LENGTHS[i]), hsmm.censored_end, hsmm.censored_start
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("start", [True, False])
def test_the_joint_density_of_each_path(end, start, values):
    hsmm = model(end, start)
    for i, answer in enumerate(answers(hsmm, values)):
        paths = torch.zeros(3**T, 4, T, dtype=torch.long)
        length = int(LENGTHS[i])
        known = torch.tensor(oracle.all_paths(K, length))
        paths[: len(known), i, :length] = known
        found = hsmm.log_joint(values, paths[: len(known)])[:, i]
        wanted = [answer.paths.get(tuple(path), NEVER) for path in known.tolist()]
        torch.testing.assert_close(found, torch.tensor(wanted))


def of_states(chain, probs):
    """Probabilities ``(*, S)`` of states and steps, summed over the steps: ``(*, K)``."""
    index = chain.emission.index
    return probs.new_zeros(*probs.shape[:-1], K).index_add(-1, index, probs)


def test_a_process_seen_from_any_moment_on_is_stationary():
    """Begun before the data, with the shares of states at any moment, it stays as it is."""
    shares = model().stationary().log()
    chain = model(censored_start=True).replace(log_initial=shares).expanded()
    probs = chain.log_initial.exp()
    for _ in range(2 * D):
        torch.testing.assert_close(of_states(chain, probs), shares.exp())
        probs = probs @ chain.log_transition.exp()


def test_parameters_of_each_step(values):
    emission = Normal(torch.arange(3.0) + torch.arange(T).unsqueeze(-1), 1.5)
    hsmm = HSMM(*parameters(), emission, LENGTHS, emission_per_step=True)
    torch.testing.assert_close(hsmm.expanded().log_prob(values), hsmm.log_prob(values))
    with pytest.raises(ValueError, match="forecast"):
        hsmm.forecast(values, 2)
