"""Data in parts: fits to an iterable of ``Sequences`` are those to all of it at once."""

import weakref

import numpy as np
import pyro
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from pyrohmm import (
    DenseHMM,
    DiversityPrior,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    normal,
    scale_priors,
    starts,
)
from pyrohmm.data import StoredSequences
from pyrohmm.data.batches import Batches

LENGTHS = torch.randint(1, 20, (30,), generator=torch.Generator().manual_seed(0))
M = int(LENGTHS.sum())
RANDOM = np.random.default_rng(0)
SYMBOLS = RANDOM.integers(0, 4, M)
VECTORS = 5 + 3 * RANDOM.normal(size=(M, 2))
VECTORS[::7] = np.nan
VECTORS[1::9, 0] = np.nan

MODULES = {
    "symbols": (lambda: TabularHMM(3, categorical(4)), SYMBOLS),
    # conjugate: the small scale of a flat prior is the least of those of parts, not that of all
    "vectors": (lambda: TabularHMM(3, normal(2, weight=0.01)), VECTORS),
    "embeddings": (lambda: DenseHMM(3, 4, 2), SYMBOLS),
}


def both_ways(values, **options):
    """The data in memory, and stored: read in parts of at most 60 steps."""
    whole = Sequences.from_concatenated(values, LENGTHS, **options)
    stored = StoredSequences(values, LENGTHS, max_steps=60, **options)
    assert len(stored) > 4
    return whole, stored


def results(fit, *arguments, **options):
    pyro.set_rng_seed(0)
    fit = fit(*arguments, **options)
    return fit, [fit.losses, *fit.parameters.values(), *fit.model.parameters()]


@pytest.mark.parametrize("name", MODULES)
def test_em_over_parts_is_em_over_all(name):
    make, values = MODULES[name]
    options = {"num_iterations": 5, "start": starts.from_prior, "tolerance": None}
    if name == "embeddings":
        del options["start"]
    whole, stored = (results(fit_em, make(), data, **options) for data in both_ways(values))
    assert whole[0].num_observed == stored[0].num_observed
    near = 1e-9 if name == "embeddings" else 1e-12  # gradient steps spread what rounding does
    for one, other in zip(whole[1], stored[1], strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["symbols", "vectors"])
def test_minibatches_of_one_part_are_those_of_all(name):
    make, values = MODULES[name]
    options = {"num_iterations": 9, "start": starts.from_prior, "batch_size": 3}
    whole, _ = both_ways(values)
    one, other = (results(fit_em, make(), data, **options)[1] for data in (whole, [whole]))
    for here, there in zip(one, other, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [{"batch_size": 2}, {"batch_tokens": 25}])
def test_minibatches_of_parts_have_each_sequence_once_a_round(size):
    """In another order of the parts each time; their losses, averaged, are that of the whole."""
    whole, stored = both_ways(np.arange(M))
    batches, firsts = Batches(stored, **size), set()
    for _ in range(3):
        taken = []
        while not taken or not batches.at_end_of_round:
            taken.append(batches.take())
        assert (
            torch.cat([batch.packed("values") for batch in taken])
            .sort()
            .values.equal(torch.arange(M))
        )
        assert sum(len(batch) for batch in taken) == len(whole)
        assert all(part.lengths.sum() <= 60 for part in taken)
        firsts.add(int(taken[0].packed("values")[0]))
        weights = {batch.total / len(batch) for batch in taken}
        assert weights == {len(taken)}
    assert len(firsts) > 1


UNLIKE = [torch.zeros(10), torch.ones(10)]
PARTS = [Sequences.from_list([x.long()] * n) for x, n in zip(UNLIKE, (100, 1))]
STORED = StoredSequences(
    torch.cat([UNLIKE[0].repeat(100), UNLIKE[1]]).long(), [10] * 101, max_steps=1000
)


@pytest.mark.parametrize(
    ("data", "batch_size"), [(PARTS, 10), (STORED, 100)], ids=["parts", "stored"]
)
@pytest.mark.parametrize("fit", [fit_map, fit_em], ids=lambda fit: fit.__name__)
def test_minibatches_of_unlike_parts_fit_all_of_them(fit, data, batch_size):
    """One of 101 sequences is of ones: p(1) = 1 / 101, in the short batch of its part as well."""
    module, options = TabularHMM(1, categorical(2)), {"num_iterations": 2000}
    if fit is fit_em:
        options |= {"priors": False, "decay": 1.0}
    else:
        module = MarginalModel(module)
        options |= {"tolerance": None, "learning_rate": 0.02, "average": 0.99}
    torch.manual_seed(0)
    found = fit(module, data, batch_size=batch_size, **options)
    probs = next(v for n, v in found.parameters.items() if n.endswith("emission.probs"))
    assert probs.squeeze()[1].item() == pytest.approx(1 / 101, rel=0.1)


def test_windows_of_what_is_stored_are_those_in_memory():
    whole, stored = both_ways(np.arange(M).astype(np.int32))
    assert stored.first.packed("values").dtype == torch.long
    torch.manual_seed(0)
    here, there = (Batches(data, windows=(3, 7)) for data in (whole, stored))
    for batches in (here, there):
        batches.generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        one, other = here.take(), there.take()
        assert one.total == other.total
        for name in ("values", "lengths", "streams", "begins"):
            assert getattr(one, name).equal(getattr(other, name))


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_tokens": 25}, {"windows": (3, 7)}])
def test_what_is_left_of_a_round_is_restored(options):
    whole, stored = both_ways(SYMBOLS)
    for data in (whole, stored):
        first, later = (Batches(data, **options) for _ in range(2))
        torch.manual_seed(0)
        for _ in range(5):
            first.take()
        state, random = first.state(), torch.get_rng_state()
        expected = [first.take().packed("values") for _ in range(40)]
        later.restore(state)
        torch.set_rng_state(random)
        assert all(later.take().packed("values").equal(values) for values in expected)


def test_em_over_parts_with_labels_restarts_and_a_prior_of_transitions():
    labels = np.where(RANDOM.random(M) < 0.2, SYMBOLS % 2, -1)
    fits = [
        results(
            fit_em, TabularHMM(2, categorical(4)), data, num_iterations=4, restarts=3,
            start=starts.from_prior, log_prior=DiversityPrior(1.0),
        )
        for data in both_ways(SYMBOLS, labels=labels)
    ]  # fmt: skip
    for one, other in zip(fits[0][1], fits[1][1], strict=True):  # ascents end near the maximum
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    assert fits[0][0].notes == fits[1][0].notes
    assert "were known" in fits[1][0].notes[0]


@pytest.mark.parametrize(("name", "restarts"), [("symbols", 2), ("vectors", 1)])
def test_gradients_of_parts_add_up(name, restarts):
    make, values = MODULES[name]
    options = {"num_iterations": 5, "restarts": restarts}
    whole, stored = (
        results(fit_map, MarginalModel(make()), data, **options) for data in both_ways(values)
    )
    for one, other in zip(whole[1], stored[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_priors_take_the_scale_of_all_parts():
    whole, stored = both_ways(VECTORS)
    one, other = TabularHMM(2, normal(2)), TabularHMM(2, normal(2))
    units = scale_priors(one, whole)
    parts = list(stored)
    fit_em(other, parts, num_iterations=1)  # a copy: the module itself stays as it is
    fitted = fit_em(TabularHMM(2, normal(2)), parts, num_iterations=1).model.module
    torch.testing.assert_close(fitted.emission.prior_loc, one.emission.prior_loc)
    torch.testing.assert_close(fitted.emission.upper, one.emission.upper)
    assert units != 0.0


def mapped(directory):
    np.save(directory / "x.npy", VECTORS)
    return np.load(directory / "x.npy", mmap_mode="r")


def in_safetensors(directory):
    save_file({"x": VECTORS}, directory / "x.safetensors")
    return safe_open(directory / "x.safetensors", "pt").get_slice("x")


@pytest.mark.parametrize("store", [mapped, in_safetensors, lambda directory: torch.tensor(VECTORS)])
def test_stored_sequences_are_those_in_memory(store, tmp_path):
    stored = StoredSequences(store(tmp_path), LENGTHS, max_steps=60)
    whole = Sequences.from_concatenated(VECTORS, LENGTHS)
    steps = [part.to_concatenated() for part in stored]
    torch.testing.assert_close(
        torch.cat([values for values, _ in steps]), torch.as_tensor(VECTORS), equal_nan=True
    )
    assert torch.cat([lengths for _, lengths in steps]).equal(whole.lengths)
    assert all(part.num_rows <= 60 for part in stored)


class Counted:
    """Yields parts that are made anew, and counts how many of them are alive."""

    def __init__(self):
        self.alive = self.most = 0

    def __iter__(self):
        for _ in range(20):
            part = Sequences.from_concatenated(SYMBOLS, LENGTHS)
            self.alive += 1
            self.most = max(self.most, self.alive)
            weak = weakref.finalize(part, self.end)
            weak.atexit = False
            yield part
            del part

    def end(self):
        self.alive -= 1


@pytest.mark.parametrize("fit", ["em", "map"])
def test_few_parts_are_held_at_a_time(fit):
    counted, module = Counted(), TabularHMM(2, categorical(4))
    if fit == "em":
        fit_em(module, counted, num_iterations=2)
    else:
        fit_map(MarginalModel(module), counted, num_iterations=2)
    assert counted.most <= 3
