"""``Sequences`` from what users have: arrays, tables, symbols; and what they give back."""

import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from pyrohmm import Sequences
from pyrohmm.data import StoredSequences, Vocabulary

X = np.arange(12.0).reshape(6, 2)
LENGTHS = [1, 3, 2]


class Column:
    """A column with the one method that is asked for."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return np.asarray(self.values)


class Table:
    """What pandas and polars have in common."""

    def __init__(self, columns):
        self.data = columns
        self.columns = list(columns)

    def __iter__(self):
        return iter(self.columns)

    def __getitem__(self, name):
        return Column(self.data[name])


def pandas_frame(columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def polars_frame(columns):
    return pytest.importorskip("polars").DataFrame(columns)


def arrow_table(columns):
    return pytest.importorskip("pyarrow").table(columns)


FRAMES = [dict, Table, pandas_frame, polars_frame, arrow_table]


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor, list, np.asfortranarray])
def test_concatenated_steps_become_sequences_and_come_back(make):
    lengths = make(LENGTHS)
    data = Sequences.from_concatenated(make(X), lengths)
    assert data.lengths.tolist() == LENGTHS
    for n, rows in enumerate(np.split(X, [1, 4])):
        assert np.allclose(data.values[n, : len(rows)], rows)
    values, sizes = data.to_concatenated()
    assert np.allclose(values, X)
    assert sizes.tolist() == LENGTHS


def test_a_matrix_of_few_columns_is_not_taken_as_many_sequences_without_a_word():
    with pytest.warns(UserWarning, match=r"2000 of 2 numbers.*from_concatenated"):
        Sequences.from_list(np.zeros((2000, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sequences.from_list(list(np.zeros((2000, 2))))  # who says so means it
        Sequences.from_list(np.zeros((2000, 2), int))  # symbols are no vectors
        Sequences.from_list(np.zeros((20, 50)))


def test_missing_steps_go_and_come_as_nan():
    values = X.copy()
    values[2], values[4, 0] = np.nan, np.nan
    data = Sequences.from_concatenated(values, LENGTHS)
    assert data.observed.sum() == 5  # half of a vector is known
    assert np.array_equal(data.to_concatenated()[0], values, equal_nan=True)
    marked = Sequences.from_concatenated(np.arange(6), LENGTHS, observed=np.arange(6) != 3)
    assert marked.observed.tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, False],
    ]
    known = np.array([0, 1, 2, np.nan, 4, 5])
    assert np.array_equal(marked.to_concatenated()[0], known, equal_nan=True)


UNKNOWN = {
    "None": [0, None, 1, 1, None, 0],
    "NaN": [0.0, np.nan, 1.0, 1.0, np.nan, 0.0],
    "Int64": ("Int64", [0, None, 1, 1, None, 0]),
    "Float64": ("Float64", [0, None, 1, 1, None, 0]),
    "category": ("category", [0, None, 1, 1, None, 0]),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_labels_that_are_missing_in_a_table_are_not_known(kind):
    pandas = pytest.importorskip("pandas")
    column = UNKNOWN[kind]
    if isinstance(column, tuple):
        column = pandas.Series(column[1], dtype=column[0])
    frame = pandas.DataFrame({"who": [*"aaabbb"], "x": np.arange(6.0), "state": column})
    data = Sequences.from_dataframe(frame, by="who", columns="x", labels="state")
    assert data.labels.tolist() == [[0, -1, 1], [1, -1, 0]]
    assert data.num_labelled == 4
    if kind != "category":
        parts = Sequences.from_concatenated(np.arange(6), [3, 3], labels=column)
        assert torch.equal(parts.labels, data.labels)


@pytest.mark.parametrize("dtype", ["object", "string", "category", "str"])
def test_labels_that_are_names_are_encoded(dtype):
    pandas = pytest.importorskip("pandas")
    names = pandas.Series(["up", None, "down", "up"], dtype=dtype)
    frame = pandas.DataFrame({"x": np.arange(4.0), "state": names})
    tags = Vocabulary(["down", "up"])
    data = Sequences.from_dataframe(frame, columns="x", labels="state", tags=tags)
    assert data.labels.tolist() == [[1, -1, 0, 1]]
    with pytest.raises(TypeError, match="labels 'state' must be numbers; got text"):
        Sequences.from_dataframe(frame, columns="x", labels="state")


def test_labels_and_covariates_are_cut_as_the_values():
    data = Sequences.from_concatenated(
        np.arange(6), LENGTHS, labels=[0, 1, -1, 0, 1, 1], covariates=np.arange(6.0)[:, None]
    )
    assert data.labels.tolist() == [[0, -1, -1], [1, -1, 0], [1, 1, -1]]
    assert data.covariates[..., 0].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 0]]


@pytest.mark.parametrize("frame", FRAMES)
def test_a_table_is_grouped_and_sorted(frame):
    table = frame(
        {
            "who": ["b", "a", "b", "a", "b"],
            "run": [1, 1, 1, 1, 2],
            "day": [3, 2, 2, 1, 1],
            "x": [1.0, 2.0, float("nan"), 4.0, 5.0],
            "y": [1, 2, 3, 4, 5],
        }
    )
    by_person = Sequences.from_dataframe(table, by="who", columns="x", time="day")
    assert by_person.lengths.tolist() == [3, 2]  # b is met first
    assert by_person.observed.tolist() == [[True, False, True], [True, True, False]]
    assert by_person.values[0, [0, 2]].tolist() == [5, 1]
    vectors = Sequences.from_dataframe(table, by=["who", "run"], columns=["y", "x"])
    assert vectors.lengths.tolist() == [2, 2, 1]
    assert vectors.values[1].tolist() == [[2, 2], [4, 4]]
    labelled = Sequences.from_dataframe(
        table, by="who", columns="y", time="day", labels="run", covariates=["day"]
    )
    assert labelled.labels.tolist() == [[2, 1, 1], [1, 1, -1]]
    assert labelled.covariates[0, :, 0].tolist() == [1, 2, 3]


def test_a_table_is_sorted_by_dates_and_symbols_are_encoded():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {
            "when": pandas.to_datetime(["2024-01-03", "2024-01-01", "2024-01-02"]),
            "word": ["die", "the", None],
            "count": pandas.array([3, 1, None], dtype="Int64"),
        }
    )
    words = Vocabulary(["the", "die"])
    data = Sequences.from_dataframe(frame, columns="word", time="when", vocabulary=words)
    assert data.values[data.observed].tolist() == [0, 1]
    assert data.observed.tolist() == [[True, False, True]]
    counts = Sequences.from_dataframe(frame, columns="count", time="when", dtype=torch.long)
    assert counts.values.tolist() == [[1, 0, 3]]
    assert counts.observed.tolist() == [[True, False, True]]


def test_symbols_are_encoded_wherever_sequences_are_made():
    words = Vocabulary(["the", "die"])
    data = Sequences.from_list([["the", None], ["die"], [None]], vocabulary=words)
    assert data.values.tolist() == [[0, 0], [1, 0], [0, 0]]
    assert data.num_observed == 2
    assert Sequences.from_list(["acgt"], vocabulary=Vocabulary("acgt")).values.tolist() == [
        [0, 1, 2, 3]
    ]
    with pytest.raises(ValueError, match="'dog' is none of the 2 symbols"):
        Sequences.from_concatenated(["the", "dog"], vocabulary=words)


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        ("float16", torch.float32), (">f8", torch.float64), ("longdouble", torch.float64),
        ("uint16", torch.int64), ("uint32", torch.int64), (">i4", torch.int32),
        ("uint8", torch.uint8), (object, torch.int64),
    ],
)  # fmt: skip
def test_irregular_dtypes_are_converted(dtype, result):
    array = np.array([[1, 2], [3, 4]]).astype(dtype)
    for data in (
        Sequences.from_concatenated(array[:, 0]),
        Sequences(array[:1, ::-1], np.array([2], np.uint8)),
    ):
        assert data.values.dtype == result
    assert data.values.tolist() == [[2, 1]]
    half = Sequences(torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([2]))
    assert half.values.dtype == torch.float32


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_yields_minibatches(workers):
    data = Sequences.from_list(
        [[3.0, None, 4.0], [1.0], [5.0, 9.0]], labels=[[0, 1, -1], [1], [1, 0]],
        covariates=[[[0.0]] * 3, [[1.0]], [[2.0]] * 2],
    )  # fmt: skip
    assert isinstance(data, Dataset)
    loader = DataLoader(data, batch_size=2, collate_fn=data.collate, num_workers=workers)
    first, second = loader
    whole = data.batch(torch.tensor([0, 1]))
    for name in ("values", "lengths", "observed", "labels", "covariates"):
        mine, other = getattr(first, name), getattr(whole, name)
        assert torch.equal(mine[first.observed] if name == "values" else mine,
                           other[whole.observed] if name == "values" else other)  # fmt: skip
    assert (first.total, second.total) == (3, 3)
    assert len(second) == 1


# Memory


def test_what_is_done_to_the_arrays_later_does_not_change_the_data():
    values, lengths = torch.randn(2, 3), torch.tensor([3, 2])
    observed, labels = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.long)
    covariates, indices = torch.randn(2, 3, 1), torch.tensor([4, 1])
    given = [values, lengths, observed, labels, covariates, indices]
    ways = {
        "tensors": lambda: Sequences(values, lengths, observed, labels, 9, covariates, indices),
        "rows": lambda: Sequences.from_concatenated(
            values.view(-1), lengths * 0 + 3, labels=labels.view(-1),
            covariates=covariates.view(-1, 1), observed=observed.view(-1)),
        "arrays": lambda: Sequences.from_concatenated(values.view(-1).numpy(), [3, 3]),
        "one sequence": lambda: Sequences.from_concatenated(values.numpy()),
        "list": lambda: Sequences.from_list([values[0]], labels=[labels[0]]),
        "table": lambda: Sequences.from_dataframe({"x": values[0].numpy()}, columns="x"),
    }  # fmt: skip
    names = ("values", "lengths", "observed", "labels", "covariates", "indices")
    for way, make in ways.items():
        before = [part.clone() for part in given]
        data = make()
        kept = {n: getattr(data, n).clone() for n in names if getattr(data, n) is not None}
        for part in given:
            part.zero_()
        for name, part in kept.items():
            assert torch.equal(getattr(data, name), part), (way, name)
        assert data.num_observed == int(data.observed.sum())
        for part, old in zip(given, before):
            part.copy_(old)


def test_mapped_values_are_not_copied(tmp_path):
    """Neither as one array, nor as the parts of stored sequences, nor where one asks for it."""
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    start = mapped.ctypes.data
    assert Sequences.from_concatenated(mapped, [6, 6]).values.data_ptr() == start
    parts = list(StoredSequences(mapped, [4, 4, 4], max_steps=4))
    assert [part.values.data_ptr() - start for part in parts] == [0, 16, 32]
    values = torch.arange(6.0).view(2, 3)
    shared = Sequences(values, torch.tensor([3, 3]), copy=False)
    assert shared.values.data_ptr() == values.data_ptr()
