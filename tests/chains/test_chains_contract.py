"""Every chain keeps one contract: the sum over all paths, and what follows from it."""

import re
from typing import ClassVar

import pytest
import torch
from pyro.distributions import Normal

from pyrohmm import HMM, blocks
from pyrohmm.chains import (
    BlockChain,
    MarkovChain,
    MarkovRecursions,
    ProductChain,
    RateChain,
    SecondOrderChain,
    SemiMarkovChain,
)
from pyrohmm.ops import backends, forward
from pyrohmm.ops.blocks.inner_products import InnerProductTransition
from pyrohmm.ops.log_space import log
from pyrohmm.testing import check_chain


def rows(*shape, zeros=False):
    logs = torch.randn(shape)
    if zeros:
        logs = logs.masked_fill(torch.rand(shape) < 0.25, -torch.inf)
        logs[..., 0] = logs[..., 0].nan_to_num(0.0, neginf=0.0)
    return logs.log_softmax(-1)


def semi_markov(num_states, longest, **censored):
    logs = torch.randn(num_states, num_states).fill_diagonal_(-torch.inf)
    return SemiMarkovChain(rows(num_states), logs.log_softmax(-1), rows(num_states, longest),
                           **censored)  # fmt: skip


def rates():
    leave = torch.rand(3, 3).fill_diagonal_(0.0)
    times = torch.tensor([0.0, 0.5, 2.0, 2.1])
    return RateChain(rows(3), leave - leave.sum(-1).diag(), times, torch.tensor([4]))


class Ring(MarkovRecursions):
    """A chain of a user's: each state is followed by itself or by the next one of a ring."""

    cores: ClassVar = {"log_initial": ("K",), "log_moves": ("K", "M")}

    def __init__(self, log_initial, log_moves):
        super().__init__()
        self.take(log_initial=log_initial, log_moves=log_moves)

    @property
    def matrices(self):
        eye = torch.eye(self.num_states)
        stay, go = self.log_moves.exp().unsqueeze(-2).unbind(-1)
        return log(stay * eye + go * eye.roll(1, -1)).unsqueeze(-3)


def in_blocks(*logits):
    three = blocks.from_clusters(torch.tensor([0, 1, 1]), torch.tensor([2, 1]))
    transition = InnerProductTransition(torch.randn(3, 2), torch.randn(3, 2), three, *logits)
    return BlockChain(rows(3), transition, three)


def in_blocks_of_a_matrix():
    one = blocks.from_clusters(torch.tensor([0, 0]), 3)
    return BlockChain(rows(3), rows(3, 3, zeros=True), one)


CHAINS = {
    "blocks of a matrix with zeros": in_blocks_of_a_matrix,
    "blocks on two levels": lambda: in_blocks(torch.randn(3, 2)),
    "blocks on one level": in_blocks,
    "a ring of a user's": lambda: Ring(rows(3), rows(3, 2)),
    "rates per step": rates,
    "markov": lambda: MarkovChain(rows(3), rows(3, 3)),
    "one state": lambda: MarkovChain(rows(1), rows(1, 1)),
    "markov with zeros": lambda: MarkovChain(rows(3, zeros=True), rows(3, 3, zeros=True)),
    "markov per step": lambda: MarkovChain(rows(2), rows(3, 2, 2), per_step=True),
    "durations": lambda: semi_markov(3, 3),
    "durations that end": lambda: semi_markov(2, 4, censored_end=False),
    "durations before the data": lambda: semi_markov(2, 3, censored_start=True),
    "whole durations, the first before the data": lambda: semi_markov(
        2, 3, censored_start=True, censored_end=False
    ),
    "product": lambda: ProductChain([rows(2), rows(2)], [rows(2, 2), rows(2, 2)]),
    "product with zeros": lambda: ProductChain(
        [rows(2, zeros=True), rows(3)], [rows(2, 2, zeros=True), rows(3, 3, zeros=True)]
    ),
    "one chain of a product": lambda: ProductChain([rows(3)], [rows(3, 3)]),
    "second order": lambda: SecondOrderChain(rows(2), rows(2, 2), rows(2, 2, 2)),
    "second order with zeros": lambda: SecondOrderChain(
        rows(3), rows(3, 3, zeros=True), rows(3, 3, 3, zeros=True)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_keeps_the_contract(name):
    check_chain(CHAINS[name](), lengths=(1, 2, 4))


@pytest.mark.parametrize("name", [name for name in CHAINS if "step" not in name])
def test_a_chain_keeps_the_contract_at_a_single_step(name):
    check_chain(CHAINS[name](), lengths=(1,))


@pytest.mark.parametrize("name", [n for n in CHAINS if re.search("durations|blocks|markov", n)])
@pytest.mark.parametrize("small", [forward.SMALL, 0], ids=["by pairs", "by products"])
def test_a_chain_keeps_the_contract_by_torch(name, small, monkeypatch):
    monkeypatch.setattr(forward, "SMALL", small)
    with backends.use(backends.TORCH):
        check_chain(CHAINS[name](), lengths=(1, 2, 4))


class Late(MarkovChain):
    """A chain with a fault: its evidence forgets the first transition."""

    def log_evidence(self, log_likelihood, lengths):
        return super().log_evidence(log_likelihood, lengths) + 0.01 * (lengths > 1)


def test_the_contract_sees_a_fault():
    with pytest.raises(AssertionError, match="log_evidence differs from the sum over all paths"):
        check_chain(Late(rows(2), rows(2, 2)))


def test_a_chain_whose_zeros_have_no_gradient_is_named():
    class Careless(Ring):
        @property
        def matrices(self):
            stay, go = self.log_moves.exp().unsqueeze(-2).unbind(-1)
            eye = torch.eye(self.num_states)
            return (stay * eye + go * eye.roll(1, -1)).log().unsqueeze(-3)  # 0 / 0 at zero

    chain = Careless(rows(3), rows(3, 2))
    with pytest.raises(ValueError, match="the gradient of the evidence by log_moves is NaN"):
        chain.expected_counts(torch.randn(4, 3), torch.tensor(4))


def test_matrices_whose_rows_do_not_sum_to_one_are_refused():
    class Leaking(Ring):
        @property
        def matrices(self):
            return super().matrices - 0.1

    levels = Normal(torch.zeros(3), 1.0)
    HMM.of(Ring(rows(3), rows(3, 2)), levels, torch.tensor(4), validate_args=True)
    with pytest.raises(ValueError, match="matrices must hold log-probabilities that sum to one"):
        HMM.of(Leaking(rows(3), rows(3, 2)), levels, torch.tensor(4), validate_args=True)
