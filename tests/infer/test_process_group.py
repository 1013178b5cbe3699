"""Data-parallel ranks: they compute what one process computes, priors counted once."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from itertools import chain

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
    DiversityPrior,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_svi,
    normal,
    poisson,
)
from pyrohmm.data import StoredSequences
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


class Partly(torch.nn.Module):
    """Transitions that depend on parameters which only some sequences read."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(2, 3))
        self.first = torch.nn.Parameter(torch.randn(2, 2))  # read with the sequence 0
        self.second = torch.nn.Parameter(torch.randn(2))  # with the sequence 1, of the other rank
        self.unread = torch.nn.Parameter(torch.randn(5))

    def forward(self, data):
        logits = torch.zeros(len(data), 2, 2)
        for number, parameter in enumerate([self.first, self.second]):
            if bool((mine := data.indices == number).any()):
                logits = logits + mine.reshape(-1, 1, 1) * parameter
        start, emission = torch.full((2,), 0.5).log(), Categorical(logits=self.table)
        hmm = HMM(start, logits.log_softmax(-1), emission, data.lengths)
        with pyro.plate("data", len(data)), pyro.poutine.scale(scale=data.total / len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm


def partly():
    module = Partly()
    optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3)  # which moves what has zeros
    data = Sequences(torch.randint(3, (6, 8)))
    fit = fit_svi(module, lambda data: None, data, num_iterations=6, optimizer=optimizer)
    return [fit.losses, *(parameter.detach() for parameter in module.parameters())]


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


def own_disk(directory):
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    (disk := directory / f"disk_{rank}").mkdir(exist_ok=True)
    return disk


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
    "two runs on disks of their own": lambda directory: [
        fit_map(plain(), symbols(7), num_iterations=count, batch_size=3,
                checkpoint=own_disk(directory) / "y")
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
    "parameters of some sequences": lambda directory: partly(),
    "accelerated em": lambda directory: fit_em(
        informed(), symbols(40), num_iterations=40, acceleration=True, tolerance=1e-9
    ),
    "em of several starts": lambda directory: fit_em(TabularHMM(3, categorical(3)), symbols(60)),
    "em under diversity": lambda directory: fit_em(
        informed(), symbols(11), log_prior=DiversityPrior(1.0), num_iterations=6
    ),
    "em in two runs": lambda directory: [
        fit_em(plain().module, symbols(7), restarts=1, num_iterations=count,
               checkpoint=directory / "em")
        for count in (3, 12)
    ][-1],
}  # fmt: skip


def some(values, seed=0, **parts):
    lengths = torch.randint(1, 9, (len(values),), generator=torch.Generator().manual_seed(seed))
    return Sequences(values, lengths, **parts)


def unseen():
    return some(symbols(7).values, observed=torch.rand(7, symbols(7).num_steps) < 0.7)


def labelled():
    return some(torch.randint(3, (7, 8)), labels=torch.randint(-1, 2, (7, 8)))


def in_part():
    values = torch.randn(5, 8, 2)
    values[..., 1][torch.rand(5, 8) < 0.3] = torch.nan
    return some(values)


def stored():
    return StoredSequences(torch.randn(40, 2).numpy(), [3, 9, 1, 7, 12, 8], max_steps=15)


DATA = {
    "symbols": (lambda: categorical(3), lambda: symbols(7)),
    "one sequence": (lambda: categorical(3), lambda: symbols(1)),
    "missing steps": (lambda: categorical(3), unseen),
    "labels": (lambda: categorical(3), labelled),
    "vectors": (lambda: normal(2), vectors),
    "vectors known in part": (lambda: normal(2), in_part),
    "counts": (poisson, lambda: some(torch.poisson(torch.full((7, 8), 3.0)))),
    "stored vectors": (lambda: normal(2), stored),
}
MODELS = {
    "EM": lambda model, data: fit_em(model.module, data, num_iterations=5),
    "EM in minibatches": lambda model, data: fit_em(
        model.module, data, num_iterations=5, batch_size=2
    ),
    "MAP": lambda model, data: fit_map(model, data, num_iterations=5),
    "restarts of MAP": lambda model, data: fit_map(model, data, num_iterations=3, restarts=2),
    "MAP in minibatches": lambda model, data: fit_map(model, data, num_iterations=5, batch_size=2),
    "MAP in steps": lambda model, data: fit_map(model, data, num_iterations=5, batch_tokens=12),
    "SVI": lambda model, data: fit_svi(model, AutoNormal(model), data, num_iterations=3),
}


def fit_of(fit, kind):
    emission, data = DATA[kind]
    return MODELS[fit](MarginalModel(TabularHMM(2, emission())), data())


FITS |= {
    f"{fit} of {kind}": lambda directory, both=(fit, kind): fit_of(*both)
    for fit in MODELS
    for kind in DATA
    if kind != "stored vectors" or fit in ("EM", "EM in minibatches", "MAP", "restarts of MAP")
}


def run(name, directory):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    fit = FITS[name](directory)
    return fit if isinstance(fit, list) else [*outcome(fit), *fit.history.values()]


def message(call):
    try:
        call()
    except (ValueError, RuntimeError, FloatingPointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
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


def unlike(fit, **settings):
    """A fit whose settings, or whose model, are those of a rank."""
    pyro.set_rng_seed(0)
    own = {name: values[distributed.get_rank()] for name, values in settings.items()}
    model = own.pop("model", plain)()
    fit(model.module if fit is fit_em else model, symbols(6), **{"num_iterations": 3} | own)


def of_prior(concentration):
    return MarginalModel(TabularHMM(2, categorical(3, concentration)))


UNLIKE = {
    "learning_rate": partial(unlike, fit_map, learning_rate=(0.1, 0.2)),
    "clip_norm": partial(unlike, fit_map, clip_norm=(None, 0.2)),
    "average": partial(unlike, fit_map, average=(0.9, 0.99)),
    "precision": partial(unlike, fit_map, precision=(None, torch.bfloat16)),
    "num_iterations": partial(unlike, fit_map, num_iterations=(2, 3)),
    "tolerance": partial(unlike, fit_map, tolerance=(1e-3, None)),
    "batch_size": partial(unlike, fit_map, batch_size=(2, 3)),
    "validation": partial(unlike, fit_map, validation=(symbols(3), symbols(4))),
    "optimizer": partial(unlike, fit_map, optimizer=(torch.optim.SGD, torch.optim.Adam)),
    "model": partial(unlike, fit_map, model=(partial(of_prior, 2.0), partial(of_prior, 3.0))),
    "module": partial(unlike, fit_em, model=(partial(of_prior, 2.0), partial(of_prior, 3.0))),
    "decay": partial(unlike, fit_em, decay=(0.6, 0.7), batch_size=(2, 2)),
    "restarts": partial(unlike, fit_em, restarts=(1, 2)),
    "checkpoint": partial(unlike, fit_em, checkpoint=(None, "x")),
    "sharded": partial(unlike, fit_map, sharded=(True, None)),
}


class Refusing(MarginalModel):
    """Cannot read the sequence 3, which is of the second rank."""

    def forward(self, data):
        if 3 in data.indices and data.total == 6:
            raise RuntimeError("no memory is left")
        return super().forward(data)


def impossible():
    """EM of a symbol that no state emits, in the sequence 5, the third one of the second rank."""
    start = {"initial": torch.ones(2) / 2, "transition": torch.ones(2, 2) / 2,
             "emission.probs": torch.tensor([[0.5, 0.5, 0.0]] * 2)}  # fmt: skip
    data = Sequences(torch.tensor([[0, 1]] * 5 + [[1, 2]] + [[0, 0]] * 2))
    fit_em(TabularHMM(2, categorical(3)), data, start=start, num_iterations=3)


def refused(fit, place):
    pyro.set_rng_seed(0)
    model = plain()
    if fit is fit_map:
        model.__class__ = Refusing
    fit(model, symbols(6), num_iterations=30, **place)


def held_out():
    """A held-out symbol that is none of three, in the evidence of the second rank."""
    pyro.set_rng_seed(0)
    validation = Sequences(torch.tensor([[0]] * 4 + [[7]]))
    fit_map(plain(), symbols(6), num_iterations=9, validation=validation, batch_size=1)


def mine(fit, **settings):
    """A fit in which the second rank has settings of its own."""
    pyro.set_rng_seed(0)
    here = settings if distributed.get_rank() else {}
    fit(plain() if fit is not fit_em else informed(), symbols(6), **{"num_iterations": 6} | here)


def stop(past):
    raise ValueError("the report has stopped")


def reported():
    pyro.set_rng_seed(0)
    fit_map(plain(), symbols(6), num_iterations=6, validation=symbols(3), report=stop)


def scheduled(last):
    """A schedule that raises in the second rank alone, at a step."""
    pyro.set_rng_seed(0)

    def factor(step):
        if step == last and distributed.get_rank():
            raise RuntimeError(f"no rate at step {last}")
        return 1.0

    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=factor)
    fit_map(plain(), symbols(6), num_iterations=6, schedule=schedule, tolerance=None)


def nothing():
    pyro.set_rng_seed(0)
    data = [] if distributed.get_rank() else symbols(6)
    fit_map(plain(), data, num_iterations=3, sharded=True)


FAILING = {
    "batch_size must be": partial(mine, fit_map, batch_size=0),
    "decay must lie": partial(mine, fit_em, decay=0.3),
    "the report has stopped": reported,
    "no rate at step 3": partial(scheduled, 3),
    "no rate at step 6": partial(scheduled, 6),
    "data is empty": nothing,
    "sequence 5 has probability zero": impossible,
    "no memory is left": partial(refused, fit_map, {}),
    "got values from 7 to 7": held_out,
}  # fmt: skip


def sampled(directory):
    """Chains of either rank, with seeds of their own and one checkpoint path; and once more."""
    found = []
    for _ in range(2):
        pyro.set_rng_seed(distributed.get_rank())
        fit = fit_gibbs(informed(), symbols(4), num_samples=6, num_chains=2, warmup=2,
                        checkpoint=directory / "chains")  # fmt: skip
        found.append(fit.chains["module.transition"])
    return found


def alone():
    """Fits of groups: both ranks, each with a model of its own; the second one alone."""
    rank = distributed.get_rank()
    groups = [distributed.new_group([number]) for number in (0, 1)]
    pyro.set_rng_seed(rank)
    own = fit_map(plain(), symbols(5 + rank), num_iterations=4 + rank, group=groups[rank])
    found = [outcome(own)]
    if rank == 1:
        pyro.set_rng_seed(rank)
        single = distributed.new_group([1], use_local_synchronization=True)
        again = fit_em(informed(), symbols(6), num_iterations=4, group=single)
        found.append(outcome(again))
    pyro.set_rng_seed(0)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    fit = fit_em(informed(), symbols(6), num_iterations=4, group=mesh["ranks"])
    outsider = message(lambda: fit_map(plain(), symbols(5), group=groups[1 - rank]))
    return found, outcome(fit), outsider


def join(rank, directory, size=2):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    place = f"file://{directory / 'meeting'}"
    distributed.init_process_group(
        "gloo", init_method=place, rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )


def work(rank, directory):
    """What one of two processes does."""
    join(rank, directory)
    found = {name: run(name, directory) for name in FITS}
    wrong = [message(call) for call in WRONG]
    unlike = {name: message(call) for name, call in UNLIKE.items()}
    failing = {name: message(call) for name, call in FAILING.items()}
    groups = alone()
    chains = sampled(directory)
    torch.save((found, wrong, unlike, failing, groups, chains), directory / f"found_{rank}")
    distributed.destroy_process_group()


def started(task, directory, size, join=True):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    return torch.multiprocessing.start_processes(
        task, (directory,), size, join=join, start_method="forkserver"
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes found."""
    directory = tmp_path_factory.mktemp("processes")
    started(work, directory, 2)
    return [torch.load(directory / f"found_{rank}", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", FITS)
def test_two_processes_find_what_one_finds(name, found, tmp_path):
    expected = run(name, tmp_path)
    close = 1e-12 if name.startswith("em") else 1e-8
    for results, *_ in found:
        torch.testing.assert_close(results[name], expected, rtol=close, atol=close)
    assert all(map(torch.equal, found[0][0][name], found[1][0][name]))


def test_processes_that_begin_differently_are_refused_in_all_of_them(found):
    for _, (seeds, data, latent, seeds_of_em, single_steps), *_ in found:
        assert "random numbers differ" in seeds
        assert "data differ" in data
        assert "random numbers differ" in seeds_of_em
        assert (
            "a fit in several ranks needs a module whose M-step needs nothing but sums"
            in single_steps
        )
        assert "'loc' has one value for each sequence" in latent


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_settings_are_refused_by_name_in_all_ranks(name, found):
    for _, _, unlike, *_ in found:
        assert f"must start alike, and {name}" in unlike[name], unlike[name]


@pytest.mark.parametrize("name", FAILING)
def test_the_error_of_a_rank_is_raised_in_all_with_the_number_in_the_data(name, found):
    kinds = set()
    for _, _, _, failing, *_ in found:
        kind, _, text = failing[name].partition(": ")
        assert name in text, failing[name]
        kinds.add(kind)
    assert len(kinds) == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyError("boom"), "RuntimeError: rank 1: KeyError: 'boom'"),
        (RuntimeError("boom"), "RuntimeError: rank 1: boom"),
        (OSError("boom"), "OSError: rank 1: boom"),
    ],
)
def test_an_error_of_another_kind_is_told_with_its_kind(error, told):
    sent = []

    class Line(ProcessGroup):
        """Two ranks in one process: the second one speaks first."""

        def most(self, numbers):
            return torch.tensor(1)

        def _objects_from(self, rank, found):
            sent.extend([found] * (self.rank == rank))
            return sent[0]

    with pytest.raises(type(error)):
        Line(2, 1).together(error)
    assert message(Line(2, 0).together) == told


def test_each_group_fits_a_model_of_its_own(found, tmp_path):
    for rank, (*_, (own, shared, outsider), _) in enumerate(found):
        pyro.set_rng_seed(rank)
        expected = [outcome(fit_map(plain(), symbols(5 + rank), num_iterations=4 + rank))]
        if rank == 1:
            pyro.set_rng_seed(rank)
            expected.append(outcome(fit_em(informed(), symbols(6), num_iterations=4)))
        assert all(map(torch.equal, chain(*own), chain(*expected)))
        pyro.set_rng_seed(0)
        expected = outcome(fit_em(informed(), symbols(6), num_iterations=4))
        torch.testing.assert_close(shared, expected, rtol=1e-12, atol=1e-12)
        assert f"hold this process, rank {rank} of all" in outsider


def test_chains_of_each_rank_are_its_own_under_one_checkpoint_path(found):
    (*_, (first, again)), (*_, (second, _)) = found
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_ranks_without_a_group_are_told_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for fit, model in ((fit_map, plain()), (fit_em, informed())):
        with pytest.warns(RuntimeWarning, match="WORLD_SIZE is 2, and .*init_process_group"):
            fit(model, symbols(3), num_iterations=1)
    with pytest.raises(ValueError, match="group must be None before"):
        fit_em(informed(), symbols(3), group=object())


def one_of_four(rank, directory):
    join(rank, directory, 4)
    torch.save({name: run(name, directory) for name in FITS}, directory / f"found_{rank}")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_four_processes_find_what_one_finds(tmp_path):
    started(one_of_four, tmp_path, 4)
    found = [torch.load(tmp_path / f"found_{rank}", weights_only=False) for rank in range(4)]
    for name in FITS:
        (alone := tmp_path / f"alone_{name}").mkdir()
        torch.testing.assert_close(found[0][name], run(name, alone), rtol=1e-8, atol=1e-8)
        assert all(all(map(torch.equal, found[0][name], other[name])) for other in found[1:])


def killed(rank, directory):
    """The rank 1 is killed after some steps; the others note how long they wait for it."""
    join(rank, directory, 4)
    pyro.set_rng_seed(0)

    def die(step):
        if rank == 1 and step > 20:
            os.kill(os.getpid(), signal.SIGKILL)
        (directory / "step").touch()

    class Dying(MarginalModel):
        steps = 0

        def forward(self, data):
            self.steps += 1
            die(self.steps)
            return super().forward(data)

    try:
        fit_map(Dying(TabularHMM(2, categorical(3))), symbols(9), num_iterations=10**6)
    except RuntimeError as error:
        (directory / f"error_{rank}").write_text(f"{time.time()} {error}")


@pytest.mark.slow
def test_the_others_end_when_a_rank_is_killed(tmp_path):
    context = started(killed, tmp_path, 4, join=False)
    begin = time.time()
    while not (tmp_path / "step").exists():
        time.sleep(0.1)
    for process in context.processes:
        process.join(60)
    last = (tmp_path / "step").stat().st_mtime
    for rank in (0, 2, 3):
        at, _, text = (tmp_path / f"error_{rank}").read_text().partition(" ")
        assert float(at) - last < 10, (begin, text)
