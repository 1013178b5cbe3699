"""Data-parallel ranks: they compute what one process computes, priors counted once."""

import os
from functools import partial

import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal
from pyro.infer.autoguide import AutoNormal, init_to_sample
from torch import distributed

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_map,
    fit_svi,
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


def by_sequences(directory):
    """Eleven sequences in fives: batches that two cannot share evenly, the last of a single one."""
    model = MarginalModel(
        TabularHMM(2, categorical(3, 2.0), transition_concentration=3.0),
        lambda hmm: hmm.log_transition.exp().square().sum(),
    )
    fit = fit_map(model, symbols(11), num_steps=12, batch_size=5, init=init_to_sample)
    return [fit.losses, *fit.values.values()]


def by_steps(directory):
    network = Network()
    fit = fit_map(
        MarginalModel(network),
        symbols(12),
        num_steps=12,
        batch_tokens=16,
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        schedule=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
        average=0.9,
        clip_norm=0.01,
        validation=symbols(9, seed=1),
    )
    return [fit.losses, torch.tensor(fit.validation), *network.parameters()]


def by_svi(directory):
    model = MarginalModel(TabularHMM(2, categorical(3)))
    guide = AutoNormal(model)
    fit = fit_svi(model, guide, symbols(7), num_steps=6)
    return [fit.losses, *guide.parameters()]


def by_restarts(directory):
    model = MarginalModel(TabularHMM(2, categorical(3)))
    fit = fit_map(model, symbols(7), num_steps=6, restarts=3)
    return [fit.restarts.losses, *fit.values.values()]


def in_two_parts(directory):
    for num_steps in (5, 12):
        model = MarginalModel(TabularHMM(2, categorical(3)))
        options = {"batch_size": 3, "checkpoint": directory / "x"}
        fit = fit_map(model, symbols(7), num_steps=num_steps, **options)
    return [fit.losses, *fit.values.values()]


FITS = [by_sequences, by_steps, by_svi, by_restarts, in_two_parts]


def run(fit, directory):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return [each.detach() for each in fit(directory)]


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def other_seeds():
    pyro.set_rng_seed(distributed.get_rank())
    fit_map(MarginalModel(TabularHMM(2, categorical(3))), symbols(4), num_steps=2)


def other_data():
    pyro.set_rng_seed(0)
    network = MarginalModel(Network())
    fit_map(network, symbols(4, seed=distributed.get_rank()), num_steps=2)


def a_variable_for_each_sequence():
    def model(data):
        with pyro.plate("data", len(data)):
            loc = pyro.sample("loc", Normal(0.0, 1.0))
            one = torch.zeros(1)
            hmm = HMM(one, one.unsqueeze(0), Normal(loc.unsqueeze(-1), 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)

    pyro.set_rng_seed(0)
    fit_map(model, Sequences(torch.randn(4, 3), torch.full((4,), 3)), num_steps=2)


def work(rank, directory):
    """What one of two processes does."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place = f"file://{directory / 'meeting'}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    found = {fit.__name__: run(fit, directory) for fit in FITS}
    wrong = [message(call) for call in (other_seeds, other_data, a_variable_for_each_sequence)]
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


@pytest.mark.parametrize("fit", FITS)
def test_two_processes_find_what_one_finds(fit, found, tmp_path):
    expected = run(fit, tmp_path)
    for results, _ in found:
        assert len(results[fit.__name__]) == len(expected)
        for one, other in zip(results[fit.__name__], expected):
            torch.testing.assert_close(one, other)
    for one, other in zip(found[0][0][fit.__name__], found[1][0][fit.__name__]):
        assert one.equal(other)


def test_processes_that_begin_differently_are_refused_in_all_of_them(found):
    for _, (seeds, data, latent) in found:
        assert "random numbers differ" in seeds
        assert "data differ" in data
        assert "'loc' grows with the number of sequences" in latent
