"""The times of sequences: kept whichever way they are made and divided, and checked."""

import datetime
import pickle

import numpy as np
import pandas
import pytest
import torch

from pyrohmm import Sequences
from pyrohmm.data import StoredSequences

STEPS = [[0, 1, 1], [1], [0, 0]]
TIMES = [[1e6 + 0.1, 1e6 + 0.2, 1e6 + 0.3], [7.0], [-2.0, 0.5]]
PADDED = torch.tensor([TIMES[0], [7.0, 0.0, 0.0], [-2.0, 0.5, 0.0]], dtype=torch.float64)


@pytest.fixture
def data():
    return Sequences.from_list(STEPS, times=TIMES)


def test_all_ways_to_make_sequences_keep_them(data):
    flat = np.concatenate([np.array(part) for part in TIMES])
    joined = Sequences.from_concatenated([0, 1, 1, 1, 0, 0], [3, 1, 2], times=flat)
    who = ["a", "a", "a", "b", "c", "c"]
    order = np.array([2, 0, 1, 3, 5, 4])
    table = {
        "who": np.array(who)[order],
        "t": flat[order],
        "x": np.array([0, 1, 1, 1, 0, 0])[order],
    }
    frame = Sequences.from_dataframe(table, by="who", columns="x", time="t", gaps="ignore")
    direct = Sequences(data.values, data.lengths, times=PADDED)
    stored = next(iter(StoredSequences(np.array([0, 1, 1, 1, 0, 0]), [3, 1, 2], times=flat)))
    for each in (data, joined, frame, direct, stored, pickle.loads(pickle.dumps(data))):
        assert each.times.dtype == torch.float64
        assert torch.equal(each.times[each.exists], PADDED[each.exists])
    assert Sequences(data.values, data.lengths).times is None


def test_all_ways_to_divide_sequences_keep_them(data):
    assert torch.equal(data[1:].times, PADDED[1:, :2])
    assert torch.equal(data.batch(torch.tensor([2, 0])).times, PADDED[[2, 0]])
    assert torch.equal(data.truncate(2).times, PADDED[:, :2])
    assert torch.equal(data.with_total(9).times, PADDED)
    assert torch.equal(data.collate([data[:1], data[2:]]).times, PADDED[[0, 2]])
    assert data.collate([data[:1], Sequences.from_list([[1]])]).times is None
    assert torch.equal(torch.cat([part.times[:, 0] for part in data.split(0.67)]).sort().values,
                       PADDED[:, 0].sort().values)  # fmt: skip


def test_dates_count_in_days():
    days = ["2020-01-03", "2020-01-01", "2020-01-01T12"]
    wanted = torch.tensor([[18262.0, 18264.0], [18262.5, 0.0]], dtype=torch.float64)
    table = {"who": ["b", "b", "a"], "x": [0.5, 1.5, 2.5], "day": np.array(days, "datetime64[h]")}
    for frame in (table, pandas.DataFrame(table)):
        found = Sequences.from_dataframe(frame, by="who", columns="x", time="day")
        assert torch.equal(found.times, wanted)
    dates = [[datetime.date(2020, 1, 1), datetime.date(2020, 1, 3)]]
    assert Sequences.from_list([[0, 1]], times=dates).times.tolist() == [[18262.0, 18264.0]]


@pytest.mark.parametrize(
    "column",
    [
        pandas.to_datetime(["2020-01-01", "2020-04-01"]),
        pandas.to_datetime(["2020-01-01", "2020-04-01"]).tz_localize("UTC"),
        pandas.to_datetime(["2020-01-01T01", "2020-04-01T02"]).tz_localize("Europe/Berlin"),
        [datetime.date(2020, 1, 1), datetime.date(2020, 4, 1)],
        pandas.period_range("2020-01", periods=2, freq="Q"),
        pandas.to_timedelta([18262, 18353], unit="D"),
        [datetime.timedelta(18262), datetime.timedelta(18353)],
    ],
    ids=["plain", "utc", "berlin", "date", "period", "timedelta", "python-timedelta"],
)
def test_dates_of_every_kind_are_days(column):
    """On the clock of UTC, where summer time takes no hour from a gap."""
    frame = pandas.DataFrame({"day": pandas.Series(column)[::-1], "x": [1.5, 0.5]})
    found = Sequences.from_dataframe(frame, columns="x", time="day")
    assert found.times.tolist() == [[18262.0, 18353.0]]
    assert found.values.tolist() == [[0.5, 1.5]]
    listed = Sequences.from_list([[0, 1]], times=[list(column)])
    assert torch.equal(listed.times, found.times)
