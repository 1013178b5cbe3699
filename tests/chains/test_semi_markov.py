"""Recursions with durations, held by compiled kernels and by torch, against all segmentations."""

import numpy as np
import oracle
import pytest
import torch

from pyrohmm import semi_markov
from pyrohmm.chains import SemiMarkovChain
from pyrohmm.ops import backends, forward

NEVER = -torch.inf


def problem(num_states, longest, num_steps, zeros=False, seed=0):
    """Random log-probabilities: initial, transition, duration, likelihood; some of them zero."""
    source = torch.Generator().manual_seed(seed + 100 * num_states + 10 * longest + num_steps)

    def random(*shape):
        logs = 1.5 * torch.randn(shape, generator=source)
        if zeros:
            hidden = torch.rand(shape, generator=source) < 0.3
            hidden[..., 0] = False
            logs = logs.masked_fill(hidden, NEVER)
        return logs

    stay = torch.eye(num_states, dtype=torch.bool)
    transition = torch.randn(num_states, num_states, generator=source).masked_fill(stay, NEVER)
    return (
        random(num_states).log_softmax(-1),
        transition.log_softmax(-1),
        random(num_states, longest).log_softmax(-1),
        random(num_steps, num_states),
    )


CUTS = [(True, False), (False, False), (True, True), (False, True)]  # at the end, at the start


def test_one_segment_lasts_through_a_chain_of_one_state(engine):
    _, _, duration, likelihood = problem(1, 4, 3)
    chain = torch.zeros(1), torch.full((1, 1), NEVER), duration
    found = SemiMarkovChain(*chain).log_evidence(likelihood, torch.tensor(3))
    wanted = likelihood.sum() + duration[0, 2:].logsumexp(0)
    torch.testing.assert_close(found, wanted)
    long = torch.zeros(5, 1)
    assert SemiMarkovChain(*chain).log_evidence(long, torch.tensor(5)) == NEVER


def test_hard_zeros_have_no_gradient_and_make_no_nan(engine):
    *chain, likelihood = problem(3, 4, 5, zeros=True)
    leaves = [part.requires_grad_() for part in (*chain, likelihood)]
    value = SemiMarkovChain(*leaves[:3]).log_evidence(leaves[3], torch.tensor(5))
    first = torch.autograd.grad(value, leaves, create_graph=True)
    second = torch.autograd.grad(sum((part**2).sum() for part in first), leaves)
    for leaf, gradient, other in zip(leaves, first, second):
        assert torch.isfinite(gradient).all()
        assert torch.isfinite(other).all()
        assert not gradient[leaf.isneginf()].any()


@pytest.mark.parametrize("small", [forward.SMALL, 0], ids=["by pairs", "by products"])
def test_nothing_leaves_the_range_of_numbers(engine, small, monkeypatch):
    """A segment is worth e^-5000 against another, and matters where that one is impossible."""
    monkeypatch.setattr(forward, "SMALL", small)
    duration = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    initial, swap = torch.tensor([0.0, -5000.0]), torch.tensor([[NEVER, 0.0], [0.0, NEVER]])
    likelihood = torch.tensor([[-900.0, -8000.0], [-2000.0, 3.0], [NEVER, 1.0], [-1e4, 900.0]])
    wanted = oracle.by_segments(
        *(part.numpy() for part in (initial, swap, duration, likelihood)), 4, True
    )
    other = torch.randn(4, 2)  # of which nothing is lost
    chain = SemiMarkovChain(initial, swap, duration)
    logs, lengths = torch.stack([other, likelihood, other]), torch.tensor([4, 4, 3])
    found = chain.counts_of_each(logs, lengths)
    np.testing.assert_allclose(found.log_evidence[1], wanted.evidence, rtol=1e-14)
    np.testing.assert_allclose(found.counts["log_duration"][1], wanted.durations, atol=1e-12)
    for i, length in ((0, 4), (2, 3)):
        alone = chain.expected_counts(other, torch.tensor(length))
        torch.testing.assert_close(found.log_evidence[i], alone.log_evidence)


@pytest.mark.parametrize("censored", CUTS, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("size", [(2, 4, 2), (3, 2, 5)], ids=str)
def test_no_evidence_depends_on_an_entry_that_is_nan(engine, size, zeros, censored):
    """A number is left only where any other entry leaves the same."""
    parts, length = problem(*size, zeros), torch.tensor(size[2])
    for place, part in enumerate(parts):
        for entry in range(part.numel()):

            def evidence(number, place=place, entry=entry):
                changed = [each.clone() for each in parts]
                changed[place].view(-1)[entry] = number
                return SemiMarkovChain(*changed[:3], *censored).log_evidence(changed[3], length)

            found = evidence(torch.nan)
            if not found.isnan():
                torch.testing.assert_close(evidence(-0.5), found)
                torch.testing.assert_close(evidence(60.0), found)


def test_survival_of_durations():
    duration = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]).log().requires_grad_()
    survival = semi_markov.log_survival(duration)
    wanted = torch.tensor([[1.0, 0.8, 0.5], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(survival.exp(), wanted)
    (gradient,) = torch.autograd.grad(survival[:, 0].sum(), duration)
    torch.testing.assert_close(gradient, duration.exp().detach())
    survival = semi_markov.log_survival(torch.tensor([[0.0, -2000.0, -2001.0]]))
    torch.testing.assert_close(survival[0, 1], -2000 + torch.tensor(-1.0).exp().log1p())


@pytest.mark.skipif(not backends.has_numba(), reason="Numba is not installed")
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "zeros", "late", "sharp", "extreme"])
def test_scaled_sums_are_those_in_logarithms(kind, cuts):
    """Where numbers leave their range too: the sums of torch are all in logarithms."""
    initial, transition, duration, likelihood = problem(3, 40, 250, zeros=kind == "zeros")
    if kind == "late":  # only the longest durations are likely, by far more than floats can say
        duration = (30 * torch.arange(40.0) + duration).log_softmax(-1)
    if kind in ("sharp", "extreme"):
        likelihood = likelihood * (50 if kind == "sharp" else 2000)
    if kind == "extreme":
        likelihood[100:140, 1:] = NEVER
        duration = (40 * duration).log_softmax(-1)
    likelihood = torch.stack([likelihood, likelihood.flip(0)])
    lengths = torch.tensor([250, 173])
    answers = []
    for backend in (backends.NUMBA, backends.TORCH):
        with backends.use(backend):
            chain = SemiMarkovChain(initial, transition, duration, *cuts)
            filtered = chain.filtered(likelihood, lengths).exp()
            answers.append((*chain.expected_counts(likelihood, lengths), filtered))
    assert answers[0][0].isfinite().any()
    for found, wanted in zip(*answers):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
