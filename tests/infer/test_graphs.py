"""Steps of fits replayed as graphs: the numbers of those that Python takes.

The graph is a fake one (:mod:`twin_device`). ``PYROHMM_TEST_DEVICE=cuda`` takes real ones.
"""

import logging
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import MagicMock

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal

from pyrohmm import (
    DenseHMM,
    DiversityPrior,
    MarginalModel,
    NeuralHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    normal,
    poisson,
)
from pyrohmm._sync import Guesses
from pyrohmm.infer import graphs
from pyrohmm.infer.descent import Descent
from pyrohmm.infer.graphs import CudaGraphs
from pyrohmm.infer.process_group import ProcessGroup
from pyrohmm.infer.training import Training
from pyrohmm.nn.neural import LinearDropout

DEVICE = os.environ.get("PYROHMM_TEST_DEVICE", "twin")
if DEVICE == "twin":  # torch has one accelerator at a time
    from twin_device import FakeGraphs, watched
else:
    FakeGraphs, watched = graphs.CudaGraphs, nullcontext


class Counted(FakeGraphs):
    """Graphs, and how many there were."""

    captures = replays = 0

    def capture(self, compute):
        replay, found = super().capture(compute)
        Counted.captures += 1

        def counted():
            Counted.replays += 1
            replay()

        return counted, found


def data(ragged=False, vectors=False):
    torch.manual_seed(0)
    values = torch.randn(12, 6, 2) if vectors else torch.randint(4, (12, 6))
    return Sequences(values, torch.arange(12) % 4 + 3 if ragged else None)


MODULES = {
    "symbols": lambda: TabularHMM(2, categorical(4)),
    "normal": lambda: TabularHMM(2, normal(2)),
    "dense": lambda: DenseHMM(2, 4, dim=2),
    "neural": lambda: NeuralHMM(4, 4, 3),
}


def by_map(module, given, **options):
    return fit_map(MarginalModel(module), given, progress=False, **options)


def by_svi(module, given, **options):
    model = MarginalModel(module)
    return fit_svi(model, AutoNormal(model), given, progress=False, **options)


def by_em(module, given, **options):
    return fit_em(module, given, **{"progress": False, "restarts": 1} | options)


def run(fit, make, given, graph, monkeypatch, **options):
    """A fit on the device, with graphs or without; how many were captured, and replays."""
    monkeypatch.delitem(graphs.GRAPHS, DEVICE, raising=False)
    if graph:
        monkeypatch.setitem(graphs.GRAPHS, DEVICE, Counted)
    Counted.captures = Counted.replays = 0
    torch.manual_seed(1)
    module = make()
    pyro.set_rng_seed(2)
    with watched():
        fitted = fit(module.to(DEVICE), given.to(DEVICE), **options)
        parameters = {name: value.cpu() for name, value in fitted.parameters.items()}
        state = [x.detach().cpu() for x in fitted.model.parameters()]
    return fitted, parameters, state, Counted.captures, Counted.replays


def alike(fit, make, given, monkeypatch, **options):
    """A fit with graphs, whose numbers are those of the fit without; captures and replays."""
    torch.set_default_dtype(torch.float64)
    (one, first, left, _, none), (other, second, right, captures, replays) = (
        run(fit, make, given, graph, monkeypatch, **options) for graph in (False, True)
    )
    assert none == 0
    torch.testing.assert_close(other.losses, one.losses)
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(right, left)
    torch.testing.assert_close(other.history, one.history)
    assert [x.nats for x in other.validation] == pytest.approx([x.nats for x in one.validation])
    return captures, replays


@pytest.mark.parametrize(
    ("name", "fit", "ragged"),
    [
        ("symbols", by_map, True), ("symbols", by_svi, False), ("normal", by_map, False),
        ("normal", by_svi, True), ("dense", by_svi, True), ("neural", by_map, False),
    ],
)  # fmt: skip
def test_a_fit_that_replays_has_the_numbers_of_one_that_does_not(name, fit, ragged, monkeypatch):
    given = data(ragged, name == "normal")
    assert alike(fit, MODULES[name], given, monkeypatch, num_iterations=6) == (1, 4)


OPTIONS = {
    "schedule": {"schedule": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)},
    "clip_norm": {"clip_norm": 1e-3},
    "average": {"average": 0.5},
    "optimizer": {"optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9)},
    "validation": {"validation": data()[:4], "validate_every": 2},
    "tolerance": {"tolerance": 0.5, "num_iterations": 60},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_host_does_between_replays_counts(name, monkeypatch):
    options = {"num_iterations": 8} | OPTIONS[name]
    captures, replays = alike(by_map, MODULES["symbols"], data(), monkeypatch, **options)
    assert captures == 1
    assert replays >= 6


def test_a_determinantal_prior_is_replayed(monkeypatch):
    """It asks whether all rows of the matrix are equal; where they are, it raises."""

    def diverse(module, given, equal=False, **options):
        model = MarginalModel(module, DiversityPrior(2.0))
        half = torch.full((2, 4), 0.5).to(given.values.device)
        start = {"initial": half[0, :2], "transition": half[:, :2], "emission.probs": half / 2}
        options |= {"start": {f"module.{name}": start[name] for name in start}} if equal else {}
        return fit_map(model, given, progress=False, num_iterations=6, **options)

    assert alike(diverse, MODULES["symbols"], data(), monkeypatch) == (1, 4)
    with pytest.raises(ValueError, match="rows of the transition matrix are equal"):
        run(diverse, MODULES["symbols"], data(), True, monkeypatch, equal=True)


def test_restarts_are_replayed(monkeypatch):
    assert alike(
        by_map, MODULES["symbols"], data(True), monkeypatch, restarts=3, num_iterations=8
    ) == (1, 6)


def test_minibatches_of_one_shape_are_copied_into_the_first(monkeypatch):
    """Of 12 sequences in batches of 5, the last of a round has 2: each shape has a graph."""
    options = {"num_iterations": 18, "batch_size": 5}
    for name in ("symbols", "normal"):
        given = data(vectors=name == "normal")
        found = alike(by_svi, MODULES[name], given, monkeypatch, **options)
        assert found == (2, 10 + 4)
    given = Sequences(torch.randint(4, (12, 6)).int())  # which are converted, once a batch
    assert alike(by_map, MODULES["symbols"], given, monkeypatch, **options) == (2, 14)
    assert alike(by_map, MODULES["symbols"], data(True), monkeypatch, **options) == (0, 0)


@pytest.mark.parametrize(
    ("name", "ragged", "options"),
    [
        ("symbols", False, {"tolerance": None}), ("symbols", True, {"restarts": 3}),
        ("normal", True, {"restarts": 2, "tolerance": None}),
        ("symbols", False, {"acceleration": True, "tolerance": 1e-9}),
        ("symbols", True, {"priors": False, "tolerance": None}),
        ("dense", False, {"num_iterations": 5, "tolerance": None}),
    ],
)  # fmt: skip
def test_an_e_step_that_is_replayed_has_the_same_numbers(name, ragged, options, monkeypatch):
    given, options = data(ragged, name == "normal"), {"num_iterations": 24} | options
    captures, replays = alike(by_em, MODULES[name], given, monkeypatch, **options)
    assert captures >= 1
    assert replays >= options["num_iterations"] - 4


def test_several_pieces_of_a_step_have_a_graph_each(monkeypatch):
    """And one sample of the guide."""
    monkeypatch.setattr("pyrohmm.data.packed.LITTLE", 1)
    monkeypatch.setattr("pyrohmm.data.packed.RAGGED", 1)
    monkeypatch.setattr("pyrohmm.data.packed.SHORT", 1)
    given = data(True)
    pieces = len(given.buckets)
    assert pieces > 1
    for fit in (by_map, by_svi):
        found = alike(fit, MODULES["symbols"], given, monkeypatch, num_iterations=8)
        assert found == (pieces, 6 * pieces)


def test_a_fit_goes_on_from_a_checkpoint(monkeypatch, tmp_path):
    torch.set_default_dtype(torch.float64)
    losses = []
    for graph, cut in [(False, False), (True, True)]:
        options = {"checkpoint": tmp_path / str(graph), "tolerance": None}
        for count in (5, 12) if cut else (12,):
            found = run(by_map, MODULES["symbols"], data(), graph, monkeypatch,
                        num_iterations=count, **options)  # fmt: skip
        losses.append(found[0].losses)
    assert found[-1] == 5
    torch.testing.assert_close(*losses)


def test_what_leaves_the_range_is_computed_again(monkeypatch):
    """By a flag of the graph: the state that the data favour can hardly be reached."""
    given = Sequences(torch.ones(3, 30).long())
    eye, far = torch.eye(2).double(), -1000.0
    start = {
        "module.start": far * eye[1], "module.leave": far * eye.flip(0), "module.enter": eye,
        "module.emit": eye, "module.symbol": -40.0 * eye.flip(0),
    }  # fmt: skip

    def extreme(module, given, **options):
        there = {name: value.to(DEVICE) for name, value in start.items()}
        return by_map(module, given, start=there, learning_rate=1e-4, **options)

    found = alike(extreme, lambda: DenseHMM(2, 2, dim=2), given, monkeypatch, num_iterations=6)
    assert found == (1, graphs.WRONG - 1)
    monkeypatch.setattr(Guesses, "margin", lambda _: None)
    with pytest.raises((AssertionError, FloatingPointError)):
        alike(extreme, lambda: DenseHMM(2, 2, dim=2), given, monkeypatch, num_iterations=6)


class Tempered(MarginalModel):
    """A model that changes by itself: a graph would not see it."""

    calls = 0.0

    def forward(self, given):
        self.calls += 1.0
        pyro.factor("heat", torch.tensor(-self.calls))
        return super().forward(given)


class Remembers(torch.optim.SGD):
    """Keeps the last gradient itself, and replaces the data of parameters."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            before = self.state[parameter].get("before", torch.zeros_like(parameter))
            parameter.data = parameter.data - 0.01 * (parameter.grad - 0.5 * before)
            self.state[parameter]["before"] = parameter.grad


def test_what_may_depend_on_python_is_not_captured(monkeypatch):
    def tempered(module, given, **options):
        return fit_map(Tempered(module), given, progress=False, **options)

    def hooked(module, given, **options):
        module.register_forward_pre_hook(lambda *_: None)
        return by_map(module, given, **options)

    def lambda_prior(module, given, **options):
        model = MarginalModel(module, lambda hmm: hmm.log_transition.sum())
        return fit_map(model, given, progress=False, **options)

    def own_guide(module, given, **options):
        class Mine(AutoDelta):
            pass

        model = MarginalModel(module)
        return fit_svi(model, Mine(model), given, progress=False, **options)

    def own_optimizer(module, given, **options):
        return by_map(module, given, optimizer=partial(Remembers, lr=0.01), **options)

    for fit in (tempered, hooked, lambda_prior, own_guide, own_optimizer):
        found = alike(fit, MODULES["symbols"], data(), monkeypatch, num_iterations=5)
        assert found == (0, 0), fit


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.nonzero(),
        lambda x: x[x > 0], lambda x: x.cpu(), lambda x: x + torch.ones(2).to(x.device),
        lambda x: x.sum() + torch.rand(()), lambda x: x.sum() + torch.tensor(1.0).to(x.device),
        lambda x: x.unique(), lambda x: x[torch.tensor([1, 0])],
        lambda x: torch.linalg.cholesky(x.diag()), lambda x: torch.linalg.eigvalsh(x.diag()),
    ],
)  # fmt: skip
def test_reads_of_the_device_are_seen_before_a_capture(reads, monkeypatch, caplog):
    Counted.captures = 0
    with watched(), caplog.at_level(logging.DEBUG, "pyrohmm"):
        there = torch.ones(2).to(DEVICE)
        replay = graphs._Replay(lambda: [reads(there), there * 2][1], Counted(there.device))
        assert replay() is not None
        assert replay() is None
        assert replay() is None
    assert Counted.captures == 0
    assert [record.levelname for record in caplog.records] == ["DEBUG"]  # no capture has failed


def test_a_rank_among_several_replays_nothing(monkeypatch):
    """As a graph holds no messages: the numbers of the ranks would part."""

    class Two(ProcessGroup):
        def mean_all(self, tensors):
            sent.append(list(tensors))

    def quiet(self, first=None, *_):
        return first

    sent = []
    for name in ("mean", "most", "from_first", "check_alike", "together", "shard"):
        monkeypatch.setattr(Two, name, quiet)
    monkeypatch.setattr(Two, "device", torch.device("cpu"))
    monkeypatch.setattr(Two, "of_first", lambda self, compute: compute())
    monkeypatch.setattr(ProcessGroup, "of", classmethod(lambda cls, _=None: Two(2, 0)))
    found = run(by_em, MODULES["symbols"], data(), True, monkeypatch, num_iterations=6)
    assert found[-2:] == (0, 0)
    assert len(sent) >= 6


def test_adam_is_fused_on_a_cuda_device(monkeypatch):
    made = []

    def adam(_, **options):
        made.append(options["fused"])
        return MagicMock(torch.optim.Optimizer)

    monkeypatch.setattr(torch.optim, "Adam", adam)
    for on_cuda in (True, False):
        Descent([MagicMock(is_cuda=on_cuda)], defaultdict(lambda: None), 1)
    assert made == [True, None]


def test_graphs_are_of_the_device_of_the_parameters(monkeypatch):
    """Not of the current one, where a capture would record nothing."""
    current, seen = ["cuda:0"], []

    @contextmanager
    def entered(device):
        before, current[0] = current[0], str(device)
        yield
        current[0] = before

    def note(*_, **__):
        seen.append(current[0])
        return MagicMock()

    for name in ("graph_pool_handle", "Stream", "current_stream", "graph", "stream"):
        monkeypatch.setattr(torch.cuda, name, note)
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    made = CudaGraphs(torch.device("cuda:1"))
    made.first(note)
    made.capture(note)  # whose replay goes to the device of its stream by itself
    assert len(seen) == 8
    assert set(seen) == {"cuda:1"}
    assert current == ["cuda:0"]


def test_shapes_that_are_known_are_replayed_when_all_places_are_taken(monkeypatch):
    """And one shape more than there are places is computed by Python each time."""
    lengths = torch.arange(2, 5).repeat_interleave(2)
    given = Sequences.from_concatenated(torch.randint(4, (int(lengths.sum()),)), lengths)
    for places in (2, 3):
        monkeypatch.setattr(graphs, "LARGEST", places)
        options = {"num_iterations": 24, "batch_size": 1}  # in four rounds, twice each shape
        found = alike(by_map, MODULES["symbols"], given, monkeypatch, **options)
        assert found == (places, 6 * places)


def test_dropout_that_changes_by_the_call_is_not_captured(monkeypatch):
    each = blocks.from_clusters(torch.tensor([0, 1, 0, 1]), 4)
    for dropout, count in [(LinearDropout(0.5, 0.0, 6), 0), (0.5, 1)]:
        make = partial(NeuralHMM, 8, 4, 3, blocks=each, dropout=dropout)
        found = alike(by_map, make, data(), monkeypatch, num_iterations=10)
        assert found == (count, 8 * count)


@pytest.mark.parametrize("fit", [by_map, by_svi])
def test_values_of_all_minibatches_are_in_the_support(fit, monkeypatch):
    """Whenever they are drawn; the numbers of the other batches are as without graphs."""
    counts = data().values.double()
    make = partial(TabularHMM, 2, poisson())
    options = {"num_iterations": 8, "batch_size": 2}
    captures, replays = alike(fit, make, Sequences(counts), monkeypatch, **options)
    assert (captures, replays) == (1, 6)
    for row in range(12):
        counts[row, 3] = 1.5
        with pytest.raises(ValueError, match=r"1\.5"):
            run(fit, make, Sequences(counts), True, monkeypatch, **options)
        counts[row, 3] = 1.0


@pytest.mark.parametrize("fit", [by_map, by_em])
def test_vectors_that_are_missing_in_part_are_fitted(fit, monkeypatch):
    given = data(vectors=True)
    given.values[3, 2, 0] = torch.nan
    torch.set_default_dtype(torch.float64)
    given = Sequences(given.values.double())
    found = run(fit, MODULES["normal"], given, True, monkeypatch, num_iterations=6, tolerance=None)
    torch.manual_seed(1)
    module = MODULES["normal"]()
    pyro.set_rng_seed(2)
    expected = fit(module, given, num_iterations=6, tolerance=None)
    torch.testing.assert_close(found[0].losses.cpu(), expected.losses)


def test_a_capture_that_fails_is_said_once(monkeypatch, caplog):
    def fails(self, compute):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Counted, "capture", fails)
    found = alike(by_map, MODULES["symbols"], data(), monkeypatch, num_iterations=8)
    assert found == (0, 0)
    assert caplog.text.count("out of luck") == 1


def test_a_fit_keeps_no_graph(monkeypatch):
    kept = []
    original = Training.run
    monkeypatch.setattr(Training, "run", lambda self: [kept.append(self), original(self)][1])
    run(by_map, MODULES["symbols"], data(), True, monkeypatch, num_iterations=5)
    assert kept[0].replays is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or DEVICE != "twin", reason="needs CUDA")
def test_all_of_this_with_real_graphs():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    subprocess.run(command, env=os.environ | {"PYROHMM_TEST_DEVICE": "cuda"}, check=True)
