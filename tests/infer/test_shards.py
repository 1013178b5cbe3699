"""Shares of the data: each rank gives its own, or reads its own of what is stored."""

import os

import numpy as np
import pyro
import pytest
import torch
from fits import outcome
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch import distributed

from pyrohmm import (
    LanguageModel,
    MarginalModel,
    NeuralHMM,
    RegressionHMM,
    Sequences,
    StatefulModel,
    TabularHMM,
    blocks,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    language,
    normal,
    starts,
)
from pyrohmm.data import StoredSequences
from pyrohmm.data.batches import Batches, dealt
from pyrohmm.data.parts import as_share
from pyrohmm.infer.process_group import ProcessGroup

RANDOM = np.random.default_rng(0)
LENGTHS = torch.tensor([1, 9, 2, 7, 3, 12, 1, 2, 5, 4, 30])
SYMBOLS = RANDOM.integers(0, 3, int(LENGTHS.sum())).astype(np.int32)
WHOLE = Sequences.from_concatenated(SYMBOLS.astype(np.int64), LENGTHS)
STORED = StoredSequences(SYMBOLS, LENGTHS, max_steps=20)


def own():
    """What a rank gives, of unlike sizes: all where there is one rank."""
    if not distributed.is_initialized():
        return WHOLE
    return WHOLE[:7] if distributed.get_rank() else WHOLE[7:]


def shares(whole):
    """What a rank gives; where there is one, all shares as parts."""
    if not distributed.is_initialized():
        return [whole[7:], whole[:7]]
    return whole[:7] if distributed.get_rank() else whole[7:]


def steps(size, seed):
    """Numbers ``(M, size)`` whose level and spread grow along the sequences."""
    generator, time = torch.Generator().manual_seed(seed), torch.arange(len(SYMBOLS))[:, None]
    return torch.randn(len(SYMBOLS), size, generator=generator).double() * (1 + time) + 5 * time


def of_normals():
    return shares(Sequences.from_concatenated(steps(2, 0), LENGTHS))


def of_covariates():
    return shares(Sequences.from_concatenated(SYMBOLS, LENGTHS, covariates=steps(2, 1)))


AT = {
    "module.initial": torch.tensor([0.4, 0.6]).double(),
    "module.transition": torch.tensor([[0.7, 0.3], [0.2, 0.8]]).double(),
    "module.emission.loc": torch.tensor([[50.0, 60.0], [300.0, 200.0]]).double(),
    "module.emission.variance": torch.full((2, 2), 900.0).double(),
}


def of_guide(model):
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=AT))
    return fit_svi(model, guide, of_normals(), num_iterations=6, sharded=True)


def tabular(**options):
    return TabularHMM(2, categorical(3, 2.0), **options)


def neural():
    each = blocks.from_clusters(torch.tensor([0, 1, 0]), 2)
    return NeuralHMM(4, 3, 8, blocks=each, two_level=True)


LINES = ["a b", "", "b a a c", "c", "a a b", "c a", "b b b b c c a"]


def corpus():
    """Sentences in a file, which the first rank writes."""
    words = language.count_words(LINES)
    if not distributed.is_initialized():
        return language.write_corpus("corpus.tokens", LINES, words)
    if distributed.get_rank() == 0:
        language.write_corpus("corpus.tokens", LINES, words)
    distributed.barrier()
    return language.open_corpus("corpus.tokens", words)


def text_model(**options):
    each = blocks.from_clusters(torch.tensor([0, 2, 1, 0, 1]), torch.tensor([2, 3, 2]))
    return LanguageModel(language.count_words(LINES), each, 4, dropout=0.0, **options)


# All as one process computes it
SAME = {
    "em": lambda: fit_em(
        tabular(), own(), num_iterations=5, restarts=1, start=starts.sticky(), sharded=True
    ),
    "map": lambda: fit_map(MarginalModel(tabular()), own(), num_iterations=6, sharded=True),
    "networks": lambda: fit_map(
        MarginalModel(neural()), own(), num_iterations=6, clip_norm=0.01, sharded=True
    ),
    "map of normals": lambda: fit_map(
        MarginalModel(TabularHMM(2, normal(2))), of_normals(), num_iterations=6, sharded=True,
        start=AT,
    ),
    "svi of normals": lambda: of_guide(MarginalModel(TabularHMM(2, normal(2)))),
    "em of normals": lambda: fit_em(
        TabularHMM(2, normal(2)), of_normals(), num_iterations=5, restarts=1, start=AT,
        sharded=True,
    ),
    "map of covariates": lambda: fit_map(
        MarginalModel(RegressionHMM(2, categorical(3), transition=[0, 1])), of_covariates(),
        num_iterations=6, sharded=True,
    ),
    "em of parts": lambda: fit_em(
        tabular(), [own()[:3], own()[3:]], num_iterations=5, restarts=1, start=starts.sticky(),
        sharded=True,
    ),
    "em of what is stored": lambda: fit_em(tabular(), STORED, num_iterations=5, restarts=1),
    "map of what is stored": lambda: fit_map(MarginalModel(tabular()), STORED, num_iterations=6),
    "minibatches of what is stored": lambda: fit_map(
        MarginalModel(tabular()), STORED, num_iterations=9, batch_tokens=20
    ),
    "sentences": lambda: text_model().fit(corpus(), num_epochs=2, batch_tokens=30),
    "a text": lambda: text_model(contiguous=True).fit(
        corpus(), num_epochs=2, batch_tokens=20, num_streams=4
    ),
    "windows": lambda: fit_map(
        StatefulModel(neural(), 3), STORED, num_iterations=12, windows=(3, 5), tolerance=None
    ),
}  # fmt: skip


def run(name):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return outcome(SAME[name]())


def own_minibatches():
    """Losses and parameters of fits to minibatches of each rank's own data."""
    pyro.set_rng_seed(0)
    fits = [
        fit_map(MarginalModel(neural()), own(), num_iterations=9, batch_tokens=20, sharded=True),
        fit_map(MarginalModel(tabular()), [own()], num_iterations=9, batch_size=3, sharded=True),
        text_model().fit(corpus(), num_epochs=2, batch_tokens=20, sharded=True),
        text_model(contiguous=True).fit(
            corpus(), num_epochs=2, batch_tokens=20, num_streams=2, sharded=True
        ),
        fit_em(tabular(), own(), num_iterations=9, batch_size=3, sharded=True),
    ]  # fmt: skip
    return [outcome(fit) for fit in fits] + [fit.num_observed for fit in fits]


def work(rank, directory):
    os.chdir(directory)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place = f"file://{directory / 'meeting'}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    found = {name: run(name) for name in SAME}
    found["own"] = own_minibatches()
    torch.save(found, directory / f"found_{rank}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shards")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    torch.multiprocessing.start_processes(work, (directory,), 2, start_method="forkserver")
    return [torch.load(directory / f"found_{rank}", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", SAME)
def test_shares_of_two_processes_are_fitted_as_the_whole(name, found, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = run(name)
    # Adam's steps along a gradient of zero
    least = 1e-7 if name in ("windows", "sentences", "a text") else 1e-9
    for results in found:
        torch.testing.assert_close(results[name], expected, rtol=1e-9, atol=least)


def test_minibatches_of_its_own_leave_every_rank_with_the_same_model(found):
    one, other = (results["own"] for results in found)
    for here, there in zip(one[:5], other[:5], strict=True):
        assert all(map(torch.equal, here, there))
        assert all(bool(part.isfinite().all()) for part in here)
    assert one[5:] == other[5:]
    assert one[5] == len(SYMBOLS)


# Without communication


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[10, 400] * 50, [1] * 7, [5, 1], [1000, *range(1, 30)]])
def test_ranks_take_equally_many_steps(lengths, size):
    lengths = torch.tensor(lengths)
    shares = [dealt(lengths, rank, size) for rank in range(size)]
    steps = [int(lengths[share].sum()) for share in shares]
    assert max(steps) - min(steps) <= int(lengths.max())
    assert min(map(len, shares)) >= 1
    if size <= len(lengths):
        assert torch.cat(shares).sort().values.equal(torch.arange(len(lengths)))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 12])
def test_ranks_read_neighbours_of_what_is_stored(size):
    rows = []
    for rank in range(size):
        share = list(ProcessGroup(size, rank).share(STORED))
        scales = {part.total / len(part) for part in share}
        assert size == 12 or scales == {size}
        rows += [part.packed("values") for part in share]
    if size <= len(LENGTHS):
        assert torch.cat(rows).equal(WHOLE.packed("values"))


class TwoRanks(ProcessGroup):
    """One of two ranks that have heard of each other."""

    def from_first(self, numbers):
        return numbers

    def most(self, numbers):
        return torch.tensor([6, -8]) if len(numbers) == 2 else torch.tensor([7])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stored", [False, True])
def test_a_round_has_as_many_batches_in_every_rank(rank, stored):
    share = as_share(STORED if stored else WHOLE)
    batches = Batches(share, batch_tokens=60, group=TwoRanks(2, rank))
    for _ in range(2):
        round_of = [batches.take() for _ in range(6)]
        assert batches.at_end_of_round
        assert sum(len(batch) for batch in round_of) == len(share)
        assert {batch.total / len(batch) for batch in round_of} == {2 * 6}
        taken = torch.cat([batch.packed("values") for batch in round_of])
        assert taken.bincount().equal(WHOLE.packed("values").bincount())


def test_a_rank_whose_streams_have_ended_waits_for_the_others():
    share = as_share(STORED)
    batches = Batches(share, windows=(4, 5), group=TwoRanks(2, 1))
    taken = [batches.take() for _ in range(7)]
    assert batches.at_end_of_round
    counted = sum(batch.num_rows * batch.total / len(batch) for batch in taken)
    assert counted == pytest.approx(2 * 7 * STORED.num_observed)
