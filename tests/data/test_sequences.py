"""``Sequences``: what goes in comes out, batches cover everything once, errors name arguments."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrohmm import Sequences, TabularHMM, categorical

patient = settings(deadline=None, max_examples=60, derandomize=True, database=None)


def steps_of(data, n):
    """Sequence ``n`` as a list of steps, None where it is missing."""
    return [
        data.values[n, t].tolist() if data.observed[n, t] else None
        for t in range(int(data.lengths[n]))
    ]


step = st.none() | st.integers(-3, 9)
lists = st.lists(st.lists(step, min_size=1, max_size=5), min_size=1, max_size=6)


@patient
@given(lists)
def test_a_list_of_lists_comes_back(sequences):
    data = Sequences.from_list(sequences)
    assert [steps_of(data, n) for n in range(len(data))] == sequences
    assert data.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert data.num_observed == sum(s is not None for s in itertools.chain(*sequences))
    assert data.num_steps == max(map(len, sequences))
    assert data.total == len(data) == len(sequences)


@pytest.mark.parametrize("event", [(), (2,), (2, 3)])
@pytest.mark.parametrize("make", [torch.as_tensor, np.asarray, np.ndarray.tolist])
def test_steps_with_nan_become_missing(event, make):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(length, *event)) for length in (3, 1, 4)]
    arrays[0][1] = np.nan
    arrays[2][3] = np.nan
    data = Sequences.from_list([make(array) for array in arrays])
    assert data.values.shape == (3, 4, *event)
    assert data.observed.tolist() == [
        [True, False, True, False],
        [True, False, False, False],
        [True, True, True, False],
    ]
    for n, array in enumerate(arrays):
        seen = data.observed[n, : len(array)]
        assert torch.equal(data.values[n, : len(array)][seen], torch.as_tensor(array)[seen])


def test_vectors_may_be_missing_as_none():
    data = Sequences.from_list([[[1.0, 2.0], None], [None, [3.0, 4.0]]])
    assert data.observed.tolist() == [[True, False], [False, True]]
    assert data.values[1, 1].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("first", [True, False])
def test_a_sequence_may_be_missing_altogether(first):
    whole, nothing = torch.ones(3, 2), [None, None]
    data = Sequences.from_list([nothing, whole] if first else [whole, nothing])
    assert data.values.shape == (2, 3, 2)
    assert data.num_observed == 3
    assert sorted(data.lengths.tolist()) == [2, 3]


def make(num_sequences=7, total=None, event=()):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 6, (num_sequences,), generator=generator)
    values = torch.arange(num_sequences * 5.0).reshape(num_sequences, 5)
    values = values.reshape(num_sequences, 5, *(1 for _ in event)).expand(-1, -1, *event)
    observed = torch.rand(num_sequences, 5, generator=generator) < 0.7
    labels = torch.randint(-1, 3, (num_sequences, 5), generator=generator)
    return Sequences(values, lengths, observed, labels, total)


def same(one, other):
    """Whether two sets hold the same sequences, up to what stands in the padding."""
    trimmed = []
    for data in (one, other):
        steps = range(len(data))
        trimmed.append(
            [
                [part[n, : data.lengths[n]].tolist() for n in steps]
                for part in (data.values, data.observed, data.labels)
            ]
        )
    return trimmed[0] == trimmed[1]


@pytest.mark.parametrize("event", [(), (2,)])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_batches_cover_everything_once_and_keep_the_total(batch_size, event):
    data = make(7, total=50, event=event)
    batches = [data.batch(chosen) for chosen in torch.randperm(7).split(batch_size)]
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert sum(map(len, batches)) == 7
    found = {}
    for batch in batches:
        assert batch.total == 50
        assert batch.num_steps == int(batch.lengths.max())  # trimmed
        for n in range(len(batch)):
            key = batch.values[n, 0].flatten()[0].item()
            assert key not in found
            found[key] = batch[n]
    for n in range(7):
        assert same(found[data.values[n, 0].flatten()[0].item()], data[n])


@pytest.mark.parametrize(
    ("index", "chosen"),
    [
        (slice(2, 5), [2, 3, 4]),
        (slice(None, None, 3), [0, 3, 6]),
        (3, [3]),
        (-1, [6]),
        ([4, 0, 4], [4, 0, 4]),
        (torch.tensor([5, 1]), [5, 1]),
        (torch.arange(7) % 2 == 1, [1, 3, 5]),
        (np.arange(7) > 4, [5, 6]),
    ],
    ids=str,
)
def test_indexing_selects_sequences(index, chosen):
    data = make(7, total=50)
    part = data[index]
    assert part.total == len(part) == len(chosen)
    assert part.num_steps == max(data.lengths[n] for n in chosen)
    for n, original in enumerate(chosen):
        assert same(part[n], data[original])


@pytest.mark.parametrize("num_steps", [1, 3, 5, 9])
def test_a_cut_leaves_the_first_steps_of_each_sequence(num_steps):
    data = make(7, total=50, event=(2,))
    cut = data.truncate(num_steps)
    assert (len(cut), cut.total) == (7, 50)
    assert cut.num_steps == int(cut.lengths.max())
    for n, sequence in enumerate(data):
        length = min(num_steps, int(data.lengths[n]))
        assert cut.lengths[n] == length
        assert cut.values[n, :length].equal(sequence.values[0, :length])
        assert cut.observed[n, :length].equal(sequence.observed[0, :length])
        assert cut.labels[n, :length].equal(sequence.labels[0, :length])


@pytest.mark.parametrize(
    ("share", "sizes"),
    [(0.5, (4, 4)), (0.3, (2, 6)), (0.9, (7, 1)), (0.99, (7, 1)), (0.01, (1, 7))],
)
def test_a_split_puts_each_sequence_into_one_of_two_parts(share, sizes):
    data = make(8, total=50)
    found = []
    for seed in (1, 1, 2, 3, 4, 5, 6, 7):  # any two may agree
        parts = data.split(share, torch.Generator().manual_seed(seed))
        assert tuple(map(len, parts)) == tuple(part.total for part in parts) == sizes
        found.append([part.values[:, 0].tolist() for part in parts])
        first, second = found[-1]
        assert sorted(first + second) == data.values[:, 0].tolist()
        assert (first, second) == (sorted(first), sorted(second))  # in the order they had
        both = [each for part in parts for each in part]
        for sequence, original in zip(sorted(both, key=lambda one: one.values[0, 0]), data):
            assert same(sequence, original)
    assert found[0] == found[1]
    assert any(other != found[0] for other in found)


def test_padding_and_missing_steps_are_not_observed():
    observed = torch.tensor([[True, False, True], [True, True, True]])
    data = Sequences(torch.zeros(2, 3), torch.tensor([2, 3]), observed)
    assert data.observed.tolist() == [[True, False, False], [True, True, True]]
    assert data.num_observed == 4
    assert observed[0, 2]  # the caller's own is left as it was
    covariates = torch.ones(2, 3, 1)
    covariates[0, 2] = torch.nan
    data = Sequences(torch.zeros(2, 3), torch.tensor([2, 3]), covariates=covariates)
    assert data.covariates[..., 0].tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    assert covariates[0, 2].isnan()


def test_steps_that_no_sequence_has_are_dropped():
    values = torch.arange(12).reshape(2, 6)
    data = Sequences(
        values, torch.tensor([4, 2]), torch.ones(2, 6, dtype=torch.bool), torch.zeros(2, 6).long(),
        covariates=torch.ones(2, 6, 1),
    )  # fmt: skip
    shapes = [each.shape[1] for each in (data.values, data.observed, data.labels, data.covariates)]
    assert shapes == [4, 4, 4, 4]
    assert data.num_steps == 4
    assert not data.has_gaps
    hmm = TabularHMM(2, categorical(12))(data.lengths)
    assert hmm.log_prob(data.values).shape == (2,)


def test_a_dtype_is_that_of_what_is_floating_point():
    """As of ``torch.nn.Module.to``: masks, labels and integers stay, and so do times."""
    data = Sequences(
        torch.rand(2, 3).float(), torch.tensor([3, 2]), labels=torch.ones(2, 3, dtype=torch.long),
        covariates=torch.rand(2, 3, 1).float(), times=torch.arange(3.0).expand(2, 3),
    )  # fmt: skip
    wide = data.to(torch.float64)
    assert wide.values.dtype == wide.covariates.dtype == torch.float64
    assert wide.observed.dtype == torch.bool
    assert wide.labels.dtype == torch.int64
    assert wide.to(torch.float32).times.dtype == torch.float64
    assert Sequences(data.labels, data.lengths).to(torch.float64).values.dtype == torch.int64
    with pytest.raises(TypeError, match=r"a floating-point dtype; got torch.int64"):
        data.to(torch.int64)
