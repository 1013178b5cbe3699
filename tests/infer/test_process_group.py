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


def by_sequences(directory):
    """Eleven sequences in fives: batches that two cannot share evenly, the last of a single one."""
    model = MarginalModel(
        TabularHMM(2, categorical(3, 2.0), transition_concentration=3.0),
        lambda hmm: hmm.log_transition.exp().square().sum(),
    )
    fit = fit_map(model, symbols(11), num_iterations=12, batch_size=5, start=init_to_sample)
    return [fit.losses, *fit.parameters.values()]


def by_steps(directory):
    network = Network()
    fit = fit_map(
        MarginalModel(network),
        symbols(12),
        num_iterations=12,
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
    fit = fit_svi(model, guide, symbols(7), num_iterations=6)
    return [fit.losses, *guide.parameters()]


def by_restarts(directory):
    model = MarginalModel(TabularHMM(2, categorical(3)))
    fit = fit_map(model, symbols(7), num_iterations=6, restarts=3)
    return [fit.restarts.losses, *fit.parameters.values()]


def in_two_parts(directory):
    for num_steps in (5, 12):
        model = MarginalModel(TabularHMM(2, categorical(3)))
        options = {"batch_size": 3, "checkpoint": directory / "x"}
        fit = fit_map(model, symbols(7), num_iterations=num_steps, **options)
    return [fit.losses, *fit.parameters.values()]


def by_em(directory, data=None, **options):
    """Eleven sequences, which two processes cannot share evenly, under priors of all kinds."""
    module = TabularHMM(2, categorical(3, 2.0), transition_concentration=3.0)
    fit = fit_em(module, symbols(11) if data is None else data, num_iterations=12, **options)
    return [fit.losses, *fit.parameters.values()]


def by_em_of_normals(directory):
    vectors = torch.randn(7, 9, 2, generator=torch.Generator().manual_seed(0))
    data = Sequences(vectors, torch.arange(7) + 3)
    fit = fit_em(TabularHMM(2, normal(2)), data, num_iterations=9, restarts=2)
    return [fit.restarts.losses, *fit.parameters.values()]


def by_em_in_minibatches(directory):
    return by_em(directory, batch_size=3, generator=torch.Generator().manual_seed(0))


def by_em_in_parts(directory):
    whole = symbols(11)
    return by_em(directory, [whole[:1], whole[1:8], whole[8:]])


def by_em_of_embeddings(directory):
    fit = fit_em(DenseHMM(3, 3, 2), symbols(7), num_iterations=2)
    return [fit.losses, *fit.model.parameters()]


def by_em_in_two_runs(directory):
    for num_steps in (3, 12):
        module = TabularHMM(2, categorical(3))
        fit = fit_em(module, symbols(7), num_iterations=num_steps, checkpoint=directory / "em")
    return [fit.losses, *fit.parameters.values()]


def by_map_in_parts(directory):
    whole = symbols(11)
    parts = [whole[:1], whole[1:8], whole[8:]]
    fit = fit_map(MarginalModel(TabularHMM(2, categorical(3))), parts, num_iterations=6)
    return [fit.losses, *fit.parameters.values()]


EM = [
    by_em, by_em_of_normals, by_em_in_minibatches, by_em_in_parts, by_em_of_embeddings,
    by_em_in_two_runs,
]  # fmt: skip
FITS = [by_sequences, by_steps, by_svi, by_restarts, in_two_parts, by_map_in_parts, *EM]


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
    found = {fit.__name__: run(fit, directory) for fit in FITS}
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


@pytest.mark.parametrize("fit", FITS)
def test_two_processes_find_what_one_finds(fit, found, tmp_path):
    expected = run(fit, tmp_path)
    for results, _ in found:
        assert len(results[fit.__name__]) == len(expected)
        for one, other in zip(results[fit.__name__], expected):
            exact = {"rtol": 1e-12, "atol": 1e-12} if fit in EM else {}
            torch.testing.assert_close(one, other, **exact)
    for one, other in zip(found[0][0][fit.__name__], found[1][0][fit.__name__]):
        assert one.equal(other)


def test_processes_that_begin_differently_are_refused_in_all_of_them(found):
    for _, (seeds, data, latent, seeds_of_em, single_steps) in found:
        assert "random numbers differ" in seeds
        assert "data differ" in data
        assert "random numbers differ" in seeds_of_em
        assert (
            "several processes needs a module whose M-step needs nothing but sums" in single_steps
        )
        assert "'loc' has one value for each sequence" in latent
