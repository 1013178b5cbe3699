"""Data-parallel ranks: they compute what one process computes, priors counted once."""

import os
from functools import partial

import pyro
import pytest
import torch
from fits import outcome
from pyro.distributions import Categorical, Normal
from pyro.infer.autoguide import AutoNormal, init_to_sample
from torch import distributed

from pyrohmm import (
    HMM,
    DenseHMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    normal,
)
from pyrohmm.infer.process_group import ProcessGroup


def symbols(num_sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(3, (num_sequences, 8), generator=generator)
    return Sequences(values, torch.randint(1, 9, (num_sequences,), generator=generator))


@pytest.mark.parametrize("total", [None, 12, 12.5])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_mean_over_shares_is_the_whole(size, count, total):
    """Of any function of single sequences, scaled as models do, however sizes divide."""
    lengths = torch.arange(count) + 1
    data = Sequences(torch.rand(count, count + 1), lengths, total=total)
    scores = []
    for rank in range(size):
        share = ProcessGroup(size, rank).shard(data)
        assert 1 <= len(share) <= -(-count // size)
        scores.append(share.values[:, 0].sum() * share.total / len(share))
    expected = data.values[:, 0].sum() * data.total / count
    torch.testing.assert_close(torch.stack(scores).mean(), expected)


class Network(HMMModule):
    """No priors, and states that are dropped at random, the same ones in all processes."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(4, 3))
        self.transition = torch.nn.Parameter(torch.randn(4, 4))

    def forward(self, lengths, observed=None):
        kept = torch.randperm(4)[:3] if self.training else torch.arange(4)
        transition = self.transition[kept][:, kept].log_softmax(-1)
        return HMM(
            transition[0], transition, Categorical(logits=self.logits[kept]), lengths, observed
        )


def informed():
    """Under priors of all kinds."""
    return TabularHMM(2, categorical(3, 2.0), transition_concentration=3.0)


def plain():
    return MarginalModel(TabularHMM(2, categorical(3)))


def with_guide():
    model = plain()
    return model, AutoNormal(model)


def vectors():
    values = torch.randn(7, 9, 2, generator=torch.Generator().manual_seed(0))
    return Sequences(values, torch.arange(7) + 3)


def in_parts():
    whole = symbols(11)
    return [whole[:1], whole[1:8], whole[8:]]


# Eleven sequences in fives: batches that two cannot share evenly, the last of a single one
FITS = {
    "sequences": lambda directory: fit_map(
        MarginalModel(informed(), lambda hmm: hmm.log_transition.exp().square().sum()),
        symbols(11), num_iterations=12, batch_size=5, start=init_to_sample,
    ),
    "steps": lambda directory: fit_map(
        MarginalModel(Network()), symbols(12), num_iterations=12, batch_tokens=16,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        schedule=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
        average=0.9, clip_norm=0.01, validation=symbols(9, seed=1),
    ),
    "svi": lambda directory: fit_svi(*with_guide(), symbols(7), num_iterations=6),
    "restarts": lambda directory: fit_map(plain(), symbols(7), num_iterations=6, restarts=3),
    "two runs": lambda directory: [
        fit_map(plain(), symbols(7), num_iterations=count, batch_size=3, checkpoint=directory / "x")
        for count in (5, 12)
    ][-1],
    "parts": lambda directory: fit_map(plain(), in_parts(), num_iterations=6),
    "em": lambda directory: fit_em(informed(), symbols(11), restarts=1, num_iterations=12),
    "em of normals": lambda directory: fit_em(
        TabularHMM(2, normal(2)), vectors(), num_iterations=9, restarts=2
    ),
    "em in minibatches": lambda directory: fit_em(
        informed(), symbols(11), num_iterations=12, batch_size=3,
        generator=torch.Generator().manual_seed(0),
    ),
    "em in parts": lambda directory: fit_em(informed(), in_parts(), restarts=1, num_iterations=12),
    "em in minibatches of parts": lambda directory: fit_em(
        informed(), in_parts(), num_iterations=12, batch_size=3
    ),
    "em of embeddings": lambda directory: fit_em(
        DenseHMM(3, 3, 2), symbols(7), restarts=1, num_iterations=2
    ),
    "em in two runs": lambda directory: [
        fit_em(plain().module, symbols(7), restarts=1, num_iterations=count,
               checkpoint=directory / "em")
        for count in (3, 12)
    ][-1],
}  # fmt: skip


def run(name, directory):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return outcome(FITS[name](directory))


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def other_seeds():
    pyro.set_rng_seed(distributed.get_rank())
    fit_map(MarginalModel(TabularHMM(2, categorical(3))), symbols(4), num_iterations=2)


def other_data():
    pyro.set_rng_seed(0)
    network = MarginalModel(Network())
    fit_map(network, symbols(4, seed=distributed.get_rank()), num_iterations=2)


def other_seeds_of_em():
    pyro.set_rng_seed(distributed.get_rank())
    fit_em(TabularHMM(2, categorical(3)), symbols(4), num_iterations=2)


def an_em_of_single_steps():
    class Scaled(TabularHMM):
        def forward(self, lengths, observed=None):
            hmm = super().forward(lengths, observed)
            return hmm.replace(log_initial=hmm.log_initial.expand(len(lengths), -1))

    pyro.set_rng_seed(0)
    fit_em(Scaled(2, categorical(3)), symbols(4), num_iterations=2)


def a_variable_for_each_sequence():
    def model(data):
        with pyro.plate("data", len(data)):
            loc = pyro.sample("loc", Normal(0.0, 1.0))
            one = torch.zeros(1)
            hmm = HMM(one, one.unsqueeze(0), Normal(loc.unsqueeze(-1), 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)

    pyro.set_rng_seed(0)
    fit_map(model, Sequences(torch.randn(4, 3), torch.full((4,), 3)), num_iterations=2)


WRONG = [
    other_seeds, other_data, a_variable_for_each_sequence, other_seeds_of_em, an_em_of_single_steps
]  # fmt: skip


def work(rank, directory):
    """What one of two processes does."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place = f"file://{directory / 'meeting'}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    found = {name: run(name, directory) for name in FITS}
    wrong = [message(call) for call in WRONG]
    torch.save((found, wrong), directory / f"found_{rank}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    directory = tmp_path_factory.mktemp("processes")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(work, (directory,), 2, start_method="forkserver")
    return [torch.load(directory / f"found_{rank}", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", FITS)
def test_two_processes_find_what_one_finds(name, found, tmp_path):
    expected = run(name, tmp_path)
    exact = {"rtol": 1e-12, "atol": 1e-12} if name.startswith("em") else {}
    for results, _ in found:
        torch.testing.assert_close(results[name], expected, **exact)
    assert all(map(torch.equal, found[0][0][name], found[1][0][name]))


def test_processes_that_begin_differently_are_refused_in_all_of_them(found):
    for _, (seeds, data, latent, seeds_of_em, single_steps) in found:
        assert "random numbers differ" in seeds
        assert "data differ" in data
        assert "random numbers differ" in seeds_of_em
        assert (
            "several processes needs a module whose M-step needs nothing but sums" in single_steps
        )
        assert "'loc' has one value for each sequence" in latent
