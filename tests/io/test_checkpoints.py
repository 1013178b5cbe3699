"""Resumed fits end with the bits of a fit that was never killed, or raise and change nothing."""

import functools
import itertools
import json
import multiprocessing
import random
import signal
import time

import pyro
import pytest
import torch
from fits import outcome
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    HMM,
    GradientStep,
    HMMModule,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_cooccurrence,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_mcmc,
    fit_svi,
    normal,
    parametric,
    starts,
)
from pyrohmm.infer import gibbs, loop, mcmc, sampled
from pyrohmm.io import files as checkpoints
from pyrohmm.io.files import Checkpoint, read_tensors, write_tensors


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


def with_guide():
    both = model()
    return both, AutoNormal(both)


def seeded():
    return torch.Generator().manual_seed(5)


def in_parts():
    whole = symbols()
    return [whole[:1], whole[1:6], whole[6:]]


def with_held_out_data(**options):
    """All that a fit to minibatches of steps may have to remember."""
    common = {
        "batch_tokens": 20,
        "validation": symbols(1),
        "generator": seeded(),
        "optimizer": functools.partial(torch.optim.AdamW, lr=0.1),
        "schedule": functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=1),
        "average": 0.7,
        "tolerance": None,
    }
    return fit_map(MarginalModel(Network()), symbols(), **common | options)


def with_gradient_steps(**options):
    start = pyro.distributions.Laplace(torch.tensor([-1.0, 1.0]), torch.ones(2))
    data = Sequences(numbers().values[..., 0], numbers().lengths)
    step = GradientStep(3, functools.partial(torch.optim.Adam, lr=0.01))
    return fit_em(TabularHMM(2, parametric(start)), data, gradient_step=step, **options)


BATCHES = {"batch_size": 4, "tolerance": None}
FITS = {
    "svi": lambda **more: fit_svi(*with_guide(), symbols(), **BATCHES | more, generator=seeded()),
    "map": lambda **more: fit_map(model(), symbols(), schedule=cosine, **BATCHES | more),
    "map restarts": lambda **more: fit_map(model(), symbols(), restarts=3, **more),
    "map in parts": lambda **more: fit_map(model(), in_parts(), **more),
    "held out": with_held_out_data,
    "em": lambda **more: fit_em(TabularHMM(3, normal(2)), numbers(), restarts=3, **more),
    "accelerated em": lambda **more: fit_em(
        model().module, symbols(), restarts=2, acceleration=True, **more
    ),
    "online em": lambda **more: fit_em(
        TabularHMM(3, categorical(3, 1.1)), symbols(), start=starts.from_prior, **BATCHES | more
    ),
    "em in parts": lambda **more: fit_em(model().module, in_parts(), **more),
    "online em in parts": lambda **more: fit_em(
        TabularHMM(3, categorical(3, 1.1)), in_parts(), **BATCHES | more
    ),
    "em by gradient": with_gradient_steps,
    "pairs": lambda **more: fit_cooccurrence(model().module, symbols(), restarts=2, **more),
}


def run(name, path, num_steps):
    return outcome(FITS[name](num_iterations=num_steps, checkpoint=path, tolerance=None))


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


@pytest.mark.parametrize("name", FITS)
def test_a_fit_in_two_parts_ends_as_one_that_was_not_divided(name, tmp_path, often):
    pyro.set_rng_seed(0)
    whole = run(name, None, 30)
    pyro.set_rng_seed(0)
    run(name, tmp_path / "x", 11)
    pyro.set_rng_seed(0)  # what is drawn before the file is read does not matter
    torch.rand(7)
    assert same_bits(run(name, tmp_path / "x", 30), whole)


@pytest.mark.parametrize("name", ["svi", "map", "em", "held out"])
def test_a_fit_that_has_ended_is_read_back(name, tmp_path):
    first = run(name, tmp_path / "x", 5)
    before = (tmp_path / "x").stat().st_mtime_ns
    assert same_bits(run(name, tmp_path / "x", 5), first)
    if name != "em":
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
    def fit(path, patience):
        found = with_held_out_data(checkpoint=path, num_iterations=200, patience=patience)
        return found, [*found.model.parameters()]

    pyro.set_rng_seed(0)
    _, whole = fit(None, 9)
    pyro.set_rng_seed(0)
    first, points = fit(tmp_path / "x", 2)
    assert len(first.losses) < 100
    same, again = fit(tmp_path / "x", 2)
    assert same.reason == first.reason == "2 validations in a row were no better than the best"
    assert same.validation == first.validation
    assert same_bits(again, points)
    longer, points = fit(tmp_path / "x", 9)
    assert len(longer.losses) > len(same.losses)
    assert same_bits(points, whole)


def kill_and_go_on(name, path, num_steps, kills, longest):
    """Run ``fit`` in processes that are killed at random moments, until one of them ends it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    chance, killed = random.Random(0), 0
    while True:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(name, path, num_steps, send))
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
    send.send([each.numpy() for each in run(name, path, num_steps)])


def check_kills(name, path, num_steps, kills, longest):
    prepare()
    whole = run(name, None, num_steps)
    killed, answer = kill_and_go_on(name, path, num_steps, kills, longest)
    assert same_bits([torch.as_tensor(each) for each in answer], whole)
    return killed


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("name", FITS)
def test_a_fit_that_is_killed_twenty_times_ends_with_the_same_bits(name, tmp_path):
    assert check_kills(name, tmp_path / "x", 2000, 20, 0.4) == 20


def test_the_file_of_another_fit_or_a_damaged_one_is_refused_and_kept(tmp_path):
    path = tmp_path / "x"
    options = {"checkpoint": path, "num_iterations": 2}
    with_held_out_data(**options)
    whole = path.read_bytes()
    damaged = whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :]
    others = {
        "its average is": lambda: with_held_out_data(**options, average=None),
        "its seed of the generator": lambda: with_held_out_data(
            **options, generator=torch.Generator().manual_seed(6)
        ),
        "its fit is": lambda: fit_em(model().module, symbols(), **options),
    }
    for words, other in others.items():
        with pytest.raises(ValueError, match=f"belongs to another fit: {words}"):
            other()
        assert path.read_bytes() == whole
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"damaged|not a whole file"):
        with_held_out_data(**options)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("fit", [lambda *x, **o: fit_map(model(), *x, **o),
                                 lambda *x, **o: fit_em(model().module, *x, **o)])  # fmt: skip
def test_other_parts_of_data_are_another_fit(fit, tmp_path):
    options = {"num_iterations": 2, "checkpoint": tmp_path / "x"}
    fit(in_parts(), **options)
    with pytest.raises(ValueError, match=r"belongs to another fit: .*data"):
        fit(in_parts()[::-1], **options)


GONE = object()
FORGED = [  # a fit; the field; what a forger puts there
    ("map", "losses", "much"),
    ("map", "tensors", {}),
    ("map", "optimizer", {"state": {}, "param_groups": []}),
    ("map", "optimizer", GONE),
    ("map", "batches", {"order": torch.tensor([10**9])}),
    ("map", "random", {"cpu": torch.zeros(3), "cuda": [], "own": []}),
    ("svi", "random", {"cpu": torch.get_rng_state(), "cuda": [], "own": []}),
    ("em", "values", ["initial"]),
    ("em", "seconds", None),
    ("em by gradient", "points", [torch.zeros(7)]),
]


def forge(path, change):
    """Change the state in a checkpoint, with a valid checksum."""
    tensors, meta = read_tensors(path)
    state = checkpoints.unpack(json.loads(meta["state"]), tensors)
    change(state)
    fresh = {}
    packed = json.dumps(checkpoints.pack(state, fresh))
    write_tensors(path, fresh, meta | {"state": packed})


@pytest.mark.parametrize(("name", "field", "value"), FORGED)
def test_a_forged_field_is_refused_and_nothing_is_changed(name, field, value, tmp_path):
    path = tmp_path / "x"
    run(name, path, 2)

    def change(state):
        if value is GONE:
            del state[field]
        else:
            state[field] = value

    forge(path, change)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint .*x does not fit this fit .*delete it"):
        run(name, path, 4)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("identity", ["fit"], "belongs to another fit"),
        ("state", "null", "does not fit"),
        ("state", '{"tensor": "missing"}', "does not fit"),
        ("state", GONE, "does not fit"),
        ("version", "5", "another version"),
    ],
)
def test_forged_entries_of_a_checkpoint_are_named(entry, value, message, tmp_path):
    run("map", tmp_path / "x", 2)
    tensors, meta = read_tensors(tmp_path / "x")
    forged = {name: item for name, item in meta.items() if name != entry}
    write_tensors(tmp_path / "x", tensors, forged if value is GONE else forged | {entry: value})
    with pytest.raises(ValueError, match=f"checkpoint .*{message}"):
        run("map", tmp_path / "x", 4)


@pytest.mark.parametrize("name", ["svi", "map", "em"])
def test_another_seed_is_another_fit(name, tmp_path):
    run(name, tmp_path / "x", 3)
    pyro.set_rng_seed(1)
    with pytest.raises(ValueError, match="belongs to another fit: its seed is 0, and here it is 1"):
        run(name, tmp_path / "x", 3)


def test_fewer_steps_than_a_checkpoint_has_taken_are_not_said_to_be_all(tmp_path):
    options = {"checkpoint": tmp_path / "x", "restarts": 1, "acceleration": False}
    whole = fit_em(model().module, symbols(), num_iterations=20, tolerance=1e-14, **options)
    assert whole.reason == "it took all 20 steps"
    assert "20 steps," in repr(whole)
    assert "after 20 steps" in whole.summary()
    fewer = fit_em(model().module, symbols(), num_iterations=10, tolerance=1e-14, **options)
    assert fewer.reason == "its checkpoint had taken 20 steps already"
    assert same_bits(outcome(fewer), outcome(whole))


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


def tempered():
    """A module, of which a prior of the user's own is moved by trajectories."""
    module = TabularHMM(2, categorical(2))
    prior = pyro.distributions.Dirichlet(torch.ones(2, 2)).to_event(1)
    module.emission.probs = pyro.nn.PyroSample(prior)
    return module


COINS = Sequences.from_list([[0, 1, 1, 0]])
SIZES = {"num_samples": 8, "warmup": 6, "num_chains": 2}
SAMPLERS = {  # a fit, and what it calls in each of its steps
    "gibbs": (
        lambda **more: fit_gibbs(TabularHMM(2, categorical(2)), COINS, **SIZES, **more),
        (gibbs.Gibbs, "step"),
    ),
    "mcmc": (
        lambda **more: fit_mcmc(
            MarginalModel(TabularHMM(2, categorical(2))), COINS, **SIZES, **more
        ),
        (mcmc.Tuning, "learn"),
    ),
    "tempered": (
        lambda **more: fit_gibbs(tempered(), COINS, num_temperatures=3, **SIZES, **more),
        (sampled.Ladder, "swap"),
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_of_a_sampler_that_was_resumed_has_the_same_bits(name, tmp_path, monkeypatch):
    fit, (owner, method) = SAMPLERS[name]
    pyro.set_rng_seed(3)
    whole = fit()
    step, count = getattr(owner, method), itertools.count()

    def broken(*arguments):
        if next(count) == 10:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(loop.Checkpoint, "is_due", lambda self: True)
    monkeypatch.setattr(owner, method, broken)
    pyro.set_rng_seed(3)
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoint=tmp_path / "x")
    resumed = fit(checkpoint=tmp_path / "x")
    for name, value in whole.chains.items():
        assert torch.equal(value, resumed.chains[name]), name
    if whole.inverse_temperatures is not None:
        assert whole.marginal_likelihood() == resumed.marginal_likelihood()


def test_saves_take_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    saves = []

    def slow(*arguments):
        time.sleep(0.05)
        saves.append(time.perf_counter())

    monkeypatch.setattr(checkpoints, "write_tensors", slow)
    checkpoint, begin = Checkpoint(tmp_path / "x", {}), time.perf_counter()
    while time.perf_counter() - begin < 2.2:
        if checkpoint.is_due():
            checkpoint.save({})
        time.sleep(0.001)
    assert len(saves) in (2, 3)  # at once, and a second later


def test_a_disk_that_is_full_on_the_way_does_not_end_the_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "REST", 0.0)
    count, write = itertools.count(), checkpoints.write_tensors

    def full(*arguments):
        if next(count) in fails:
            raise OSError(28, "No space left on device", "x")
        write(*arguments)

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    fails = {1, 2}
    with pytest.warns(RuntimeWarning, match="fit goes on: .*No space left on device"):
        fit = fit_map(model(), symbols(), num_iterations=6, checkpoint=tmp_path / "x")
    assert len(fit.losses) == 6
    count, fails = itertools.count(), {5}  # the last of them
    with pytest.raises(OSError, match="No space left"):
        fit_map(model(), symbols(), num_iterations=6, checkpoint=tmp_path / "y")
