"""Tables: gaps in time, integers with NA, and the way back from states to rows."""

import pandas
import pytest
import torch

from pyrohmm import Sequences, TabularHMM, categorical, fit_em

SKIPS = {"who": [*"bbbbaa"], "day": [5, 1, 2, 6, 1, 2], "x": [50, 10, 20, 60, 1, 2]}


def read(frame=SKIPS, **options):
    return Sequences.from_dataframe(frame, **{"by": "who", "time": "day", "columns": "x"} | options)


def test_levels_of_the_index_are_columns():
    """Of dates in a time zone, over a change of the clock; they come back with the rows."""
    when = pandas.date_range("2026-03-28", periods=3, freq="D", tz="Europe/Berlin", name="when")
    index = pandas.MultiIndex.from_product([["b", "a"], when], names=["who", "when"])
    frame = pandas.DataFrame({"x": torch.arange(6.0).numpy()}, index)[::-1]
    data = Sequences.from_dataframe(frame, columns="x", by="who", time="when", gaps="error")
    assert data.values.tolist() == [[3.0, 4.0, 5.0], [0.0, 1.0, 2.0]]
    rows = data.to_dataframe(states=torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert rows.index.equals(frame.index)
    assert rows["state"].tolist() == [2, 1, 0, 5, 4, 3]
    named = frame.loc["a"]
    assert Sequences.from_dataframe(named, columns="x", time="when").values.tolist() == [[3, 4, 5]]


def test_gaps_of_dates_are_told_with_their_unit():
    for step, size in (("10min", "0:10:00"), ("2D", "2 days"), ("MS", "1 months")):
        when = pandas.date_range("2026-01-01", periods=9, freq=step).delete(5)
        frame = {"x": list(range(8)), "when": when}
        with pytest.warns(UserWarning, match=f"up to 2 steps of {size} after"):
            Sequences.from_dataframe(frame, columns="x", time="when")


def test_gaps_in_time_become_missing_steps():
    data = read(gaps="missing")
    assert data.lengths.tolist() == [6, 2]
    assert data.observed[0].tolist() == [True, True, False, False, True, True]
    assert data.values[data.observed].tolist() == [10, 20, 50, 60, 1, 2]
    assert data.times[0].tolist() == [1, 2, 3, 4, 5, 6]
    labelled = read(SKIPS | {"state": [0, 1, 2, 0, 1, 2]}, gaps="missing", labels="state")
    assert labelled.labels[0].tolist() == [1, 2, -1, -1, 0, 0]
    with pytest.raises(ValueError, match="covariates have no values at steps without a row"):
        read(gaps="missing", covariates=["x"])


def test_gaps_in_time_are_told_unless_they_mean_nothing():
    with pytest.warns(UserWarning, match=r"1 rows are up to 3 steps .* Give gaps='missing'"):
        data = read()
    assert data.values[0].tolist() == read(gaps="ignore").values[0].tolist() == [10, 20, 50, 60]
    with pytest.raises(ValueError, match="time has gaps"):
        read(gaps="error")
    whole = SKIPS | {"day": [3, 1, 2, 4, 1, 2]}
    assert read(whole, gaps="error").lengths.tolist() == [4, 2]
    with pytest.raises(ValueError, match="gaps must be"):
        read(gaps="fill")


def test_irregular_times_have_no_gaps():
    """Neither a visit now and then, nor dates of months."""
    visits = SKIPS | {"day": [31, 0, 7, 95, 0, 12]}
    assert read(visits).lengths.tolist() == [4, 2]
    uneven = SKIPS | {"day": [3.5, 0.1, 2.0, 7.3, 0.0, 1.1]}
    assert read(uneven).lengths.tolist() == [4, 2]
    for gaps in ("missing", "error"):
        with pytest.raises(ValueError, match="no multiples of"):
            read(uneven, gaps=gaps)


@pytest.mark.parametrize("columns", ["x", ["x", "y"]])
def test_integers_with_na_stay_integers(columns):
    frame = pandas.DataFrame(
        {"x": pandas.array([3, None, 1], "Int64"), "y": pandas.array([2, None, 0], "Int64")}
    )
    data = Sequences.from_dataframe(frame, columns=columns)
    assert data.values.dtype == torch.long
    assert data.observed.tolist() == [[True, False, True]]
    series = Sequences.from_concatenated(frame["x"])
    assert series.values.dtype == torch.long
    assert series.observed.tolist() == data.observed.tolist()
    fit_em(TabularHMM(2, categorical(4)), series, num_iterations=2)


def test_vectors_of_integers_known_in_part_have_nan():
    frame = pandas.DataFrame({"x": pandas.array([3, None], "Int64"), "y": [1, 2]})
    data = Sequences.from_dataframe(frame, columns=["x", "y"])
    assert data.values.isnan().tolist() == [[[False, False], [True, False]]]
    assert data.num_observed == 2


def test_states_go_back_to_the_rows_of_the_table():
    """Whatever the order of the table, its index, the gaps, and what was selected."""
    frame = pandas.DataFrame(SKIPS, index=[*"uvwxyz"])
    data = read(frame, gaps="missing")
    states = data.values // 10
    found = data.to_dataframe(states=states, probs=torch.stack([states, -states], -1))
    assert found.index.tolist() == [*"uvwxyz"]
    assert found["who"].tolist() == SKIPS["who"]
    assert found["day"].tolist() == SKIPS["day"]
    assert found["state"].tolist() == [x // 10 for x in SKIPS["x"]]
    assert found["p1"].tolist() == [-(x // 10) for x in SKIPS["x"]]
    frame["state"] = found["state"]  # aligned by the index
    assert frame.loc["x", "state"] == 6
    packed = data.packed("values") // 10
    for same in (packed.numpy(), packed.tolist(), pandas.Series(packed.numpy())):
        assert data.to_dataframe(states=same).equals(data.to_dataframe(states=packed))
    part = data[1:].to_dataframe(states=states[1:, :2])
    assert part.index.tolist() == ["y", "z"]
    assert part["state"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="states must have shape"):
        data.to_dataframe(states=states[:1])


def test_states_of_other_sequences_have_their_numbers():
    data = Sequences.from_list([[0.5], [1.5, 2.5]])
    found = data.to_dataframe(states=torch.tensor([[1, 0], [0, 2]]))
    assert found.to_numpy().tolist() == [[0, 0, 1], [1, 0, 0], [1, 1, 2]]
    assert list(found) == ["sequence", "step", "state"]
