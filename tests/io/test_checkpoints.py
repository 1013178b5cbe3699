"""Resumed fits end with the bits of a fit that was never killed, or raise and change nothing."""

import functools
import multiprocessing
import random
import signal
import time

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    GradientStep,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
    normal,
    parametric,
    starts,
)
from pyrohmm.io import checkpoints as checkpoints
from pyrohmm.io.files import read_tensors, write_tensors


def symbols(seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(3, (9, 12), generator=generator)
    return Sequences(values, torch.randint(1, 13, (9,), generator=generator))


def numbers():
    generator = torch.Generator().manual_seed(0)
    return Sequences(torch.randn(9, 12, 2, generator=generator).double(), torch.full((9,), 12))


def model():
    return MarginalModel(TabularHMM(2, categorical(3)))


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)


def by_svi(path, num_steps):
    both = model()
    guide = AutoNormal(both)
    options = {"batch_size": 4, "generator": torch.Generator().manual_seed(5)}
    fit = fit_svi(both, guide, symbols(), num_iterations=num_steps, checkpoint=path, **options)
    return [fit.losses, *guide.parameters()]


def by_map(path, num_steps):
    options = {"batch_size": 4, "schedule": cosine, "tolerance": None}
    fit = fit_map(model(), symbols(), num_iterations=num_steps, checkpoint=path, **options)
    return [fit.losses, *fit.parameters.values()]


def by_map_restarts(path, num_steps):
    fit = fit_map(
        model(), symbols(), num_iterations=num_steps, restarts=3, tolerance=None, checkpoint=path
    )
    return [fit.restarts.losses, *fit.restarts.parameters.values()]


def by_em(path, num_steps):
    module = TabularHMM(3, normal(2))
    options = {"restarts": 3, "tolerance": 1e-12}
    fit = fit_em(module, numbers(), num_iterations=num_steps, checkpoint=path, **options)
    return [fit.restarts.losses, *fit.restarts.parameters.values()]


def by_accelerated_em(path, num_steps):
    options = {"tolerance": None, "restarts": 2, "acceleration": True}
    fit = fit_em(
        TabularHMM(2, categorical(3)),
        symbols(),
        num_iterations=num_steps,
        checkpoint=path,
        **options,
    )
    return [fit.restarts.losses, *fit.restarts.parameters.values()]


def by_online_em(path, num_steps):
    module = TabularHMM(3, categorical(3, 1.1))
    options = {"batch_size": 2, "tolerance": None, "start": starts.from_prior}
    fit = fit_em(module, symbols(), num_iterations=num_steps, checkpoint=path, **options)
    return [fit.losses, *fit.parameters.values()]


def by_em_with_gradient_steps(path, num_steps):
    start = pyro.distributions.Laplace(torch.tensor([-1.0, 1.0]), torch.ones(2))
    data = Sequences(numbers().values[..., 0], numbers().lengths)
    adam = functools.partial(torch.optim.Adam, lr=0.01)
    fit = fit_em(
        TabularHMM(2, parametric(start)),
        data,
        num_iterations=num_steps,
        tolerance=None,
        gradient_step=GradientStep(3, adam),
        checkpoint=path,
    )
    return [fit.losses, *fit.parameters.values(), *fit.model.parameters()]


class Network(HMMModule):
    """Logits without priors, of which half are dropped at random."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.nn.Parameter(torch.randn(2, 3, generator=generator))
        self.transition = torch.nn.Parameter(torch.randn(2, 2, generator=generator))
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, lengths, observed=None):
        transition = self.drop(self.transition).log_softmax(-1)
        emission = pyro.distributions.Categorical(logits=self.drop(self.logits))
        return HMM(transition[0], transition, emission, lengths, observed)


def with_held_out_data(path, num_steps, **options):
    """All that a fit to minibatches of steps may have to remember."""
    common = {
        "batch_tokens": 20,
        "validation": symbols(1),
        "generator": torch.Generator().manual_seed(5),
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.1),
        "schedule": functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=1),
        "average": 0.7,
        "tolerance": None,
    }
    network = Network()
    return network, fit_map(
        MarginalModel(network),
        symbols(),
        num_iterations=num_steps,
        checkpoint=path,
        **common | options,
    )


def by_held_out(path, num_steps):
    network, fit = with_held_out_data(path, num_steps)
    return [fit.losses, torch.tensor(fit.validation), *network.parameters()]


FITS = [
    by_svi, by_map, by_map_restarts, by_held_out, by_em, by_accelerated_em, by_online_em,
    by_em_with_gradient_steps,
]  # fmt: skip


def prepare():
    """As the fixtures of the tests do, in a process of its own."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)


def same_bits(one, other):
    assert len(one) == len(other)
    return all(torch.equal(first, second) for first, second in zip(one, other))


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_in_two_parts_ends_as_one_that_was_not_divided(fit, tmp_path, often):
    pyro.set_rng_seed(0)
    whole = fit(None, 30)
    pyro.set_rng_seed(0)
    fit(tmp_path / "x", 11)
    pyro.set_rng_seed(99)  # what comes before the file is read does not matter
    torch.rand(7)
    assert same_bits(fit(tmp_path / "x", 30), whole)


@pytest.mark.parametrize("fit", [by_svi, by_map, by_em, by_held_out])
def test_a_fit_that_has_ended_is_read_back(fit, tmp_path):
    first = fit(tmp_path / "x", 5)
    before = (tmp_path / "x").stat().st_mtime_ns
    assert same_bits(fit(tmp_path / "x", 5), first)
    if fit in (by_svi, by_map, by_held_out):
        assert (tmp_path / "x").stat().st_mtime_ns == before


def test_a_fit_that_has_converged_is_not_gone_on_with(tmp_path):
    path = tmp_path / "x"
    fit = fit_em(TabularHMM(2, categorical(3)), symbols(), tolerance=1e-3, checkpoint=path)
    again = fit_em(TabularHMM(2, categorical(3)), symbols(), tolerance=1e-3, checkpoint=path)
    assert fit.converged
    assert again.converged
    assert again.reason == fit.reason
    assert torch.equal(again.losses, fit.losses)


def test_patience_that_has_ended_is_not_gone_on_with_unless_there_is_more_of_it(tmp_path):
    pyro.set_rng_seed(0)
    whole, _ = with_held_out_data(None, 200, patience=9)
    pyro.set_rng_seed(0)
    network, fit = with_held_out_data(tmp_path / "x", 200, patience=2)
    assert len(fit.losses) < 100
    again, same = with_held_out_data(tmp_path / "x", 200, patience=2)
    assert same.reason == fit.reason == "2 validations in a row were no better than the best"
    assert same.validation == fit.validation
    assert same_bits(list(again.parameters()), list(network.parameters()))
    longer, fit = with_held_out_data(tmp_path / "x", 200, patience=9)
    assert len(fit.losses) > len(same.losses)
    assert same_bits(list(longer.parameters()), list(whole.parameters()))


def kill_and_go_on(fit, path, num_steps, kills, longest):
    """Run ``fit`` in processes that are killed at random moments, until one of them ends it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    chance, killed = random.Random(0), 0
    while True:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(fit.__name__, path, num_steps, send))
        process.start()
        send.close()
        if killed < kills:
            while not path.exists() and process.is_alive():
                time.sleep(0.001)
            time.sleep(chance.uniform(0, longest))
            process.kill()  # which may have ended by itself
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            if process.exitcode == 0:
                return killed, receive.recv()
        else:
            answer = receive.recv()
            process.join()
            return killed, answer


def work(name, path, num_steps, send):
    prepare()
    checkpoints.SECONDS = 0.05  # a save takes some milliseconds
    result = globals()[name](path, num_steps)
    send.send([each.detach().numpy() for each in result])


def check_kills(fit, path, num_steps, kills, longest):
    prepare()
    whole = fit(None, num_steps)
    killed, answer = kill_and_go_on(fit, path, num_steps, kills, longest)
    assert same_bits([torch.as_tensor(each) for each in answer], whole)
    return killed


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("fit", FITS)
def test_a_fit_that_is_killed_twenty_times_ends_with_the_same_bits(fit, tmp_path):
    assert check_kills(fit, tmp_path / "x", 2000, 20, 0.4) == 20


def test_the_file_of_another_fit_or_a_damaged_one_is_refused_and_kept(tmp_path):
    path = tmp_path / "x"
    with_held_out_data(path, 2)
    whole = path.read_bytes()
    damaged = whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :]
    others = {
        "its average is": lambda: with_held_out_data(path, 2, average=None),
        "its seed of the generator": lambda: with_held_out_data(
            path, 2, generator=torch.Generator().manual_seed(6)
        ),
        "its fit is": lambda: fit_em(model().module, symbols(), num_iterations=2, checkpoint=path),
    }
    for words, other in others.items():
        with pytest.raises(ValueError, match=f"belongs to another fit: {words}"):
            other()
        assert path.read_bytes() == whole
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"damaged|not a whole file"):
        with_held_out_data(path, 2)
    assert path.read_bytes() == damaged


GONE = object()
FORGED = [  # a fit; the field; what a forger puts there
    (by_map, "losses", "much"),
    (by_map, "losses", torch.full((4, 1), torch.nan)),
    (by_map, "tensors", {}),
    (by_map, "optimizer", {"state": {}, "param_groups": []}),
    (by_map, "optimizer", GONE),
    (by_map, "batches", {"order": torch.tensor([10**9]), "sizes": torch.ones(1), "number": 1}),
    (by_map, "random", {"cpu": torch.zeros(3), "cuda": [], "own": []}),
    (by_svi, "random", {"cpu": torch.get_rng_state(), "cuda": [], "own": []}),
    (by_em, "values", ["initial"]),
    (by_em, "losses", torch.zeros(4, 9)),
    (by_em, "seconds", None),
    (by_em_with_gradient_steps, "points", [torch.zeros(7)]),
    (by_online_em, "statistics", {}),
    (by_held_out, "averages", [torch.zeros(3)]),
    (by_held_out, "held_out", {"trail": [[1, 2.0]], "best": [torch.zeros(3)]}),
]


def forge(path, change):
    """Change the state in a checkpoint, with a valid checksum."""
    tensors, meta = read_tensors(path)
    state = checkpoints._unpack(meta["state"], tensors)
    change(state)
    fresh = {}
    packed = checkpoints._pack(state, fresh, "state")
    write_tensors(path, fresh, meta | {"state": packed})


def check_refused(fit, path, field):
    before, numbers = path.read_bytes(), read_tensors(path)[0].get("state.random.cpu")
    with pytest.raises(ValueError, match=rf"checkpoint .*x holds a field {field}\b.*delete it"):
        fit(path, 4)
    assert path.read_bytes() == before
    assert numbers is None or not torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize(("fit", "field", "value"), FORGED)
def test_a_forged_field_is_named_and_nothing_is_changed(fit, field, value, tmp_path):
    fit(tmp_path / "x", 2)

    def change(state):
        if value is GONE:
            del state[field]
        else:
            state[field] = value

    forge(tmp_path / "x", change)
    check_refused(fit, tmp_path / "x", field)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("identity", ["fit"], "belongs to another fit"),
        ("state", None, "a field state"),
        ("state", {"tensor": "missing"}, "a field state"),
        ("state", GONE, "a field state"),
        ("version", "5", "another version"),
    ],
)
def test_forged_entries_of_a_checkpoint_are_named(entry, value, message, tmp_path):
    by_map(tmp_path / "x", 2)
    tensors, meta = read_tensors(tmp_path / "x")
    forged = {name: item for name, item in meta.items() if name != entry}
    write_tensors(tmp_path / "x", tensors, forged if value is GONE else forged | {entry: value})
    with pytest.raises(ValueError, match=f"checkpoint .*{message}"):
        by_map(tmp_path / "x", 4)


def test_a_fit_goes_on_under_another_tolerance(tmp_path):
    options = {"checkpoint": tmp_path / "x", "start": starts.from_prior, "num_iterations": 60}
    options["acceleration"] = False
    module = TabularHMM(2, categorical(3))
    pyro.set_rng_seed(0)
    rough = fit_em(module, symbols(), tolerance=1e-2, **options)
    assert rough.converged
    finer = fit_em(module, symbols(), tolerance=None, **options)
    assert len(finer.losses) == 61
    pyro.set_rng_seed(0)
    whole = fit_em(module, symbols(), tolerance=None, num_iterations=60, start=starts.from_prior)
    assert torch.equal(finer.losses, whole.losses)
