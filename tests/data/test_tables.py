"""Tables: gaps in time, integers with NA, and the way back from states to rows."""

import warnings

import pandas
import polars
import pytest
import torch
from polars.testing import assert_frame_equal

from pyrohmm import Sequences, TabularContinuousTimeHMM, TabularHMM, categorical, fit_em, normal
from pyrohmm.data import Vocabulary

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


MISSING = {
    "numbers": [5, None, 7],
    "nullable": pandas.array([5, None, 7], "Int64"),
    "booleans": [True, None, False],
    "polars": polars.Series([5, None, 7]),
    "flags of polars": polars.Series([True, None, False]),
    "all": [None, None, None],
    "floats": [5.5, None, 7.0],
}


@pytest.mark.parametrize("kind", MISSING)
def test_a_covariate_that_is_missing_is_refused_whatever_its_type(kind):
    frame = {"x": [1.0, 2, 3], "c": MISSING[kind], "d": [1, 2, 3]}
    place = 0 if kind == "all" else 1
    for names in ("c", ["c"], ["c", "d"], ["c", "c"]):
        with pytest.raises(ValueError, match=f"covariates must be .* sequence 0, step {place} is"):
            Sequences.from_dataframe(frame, columns="x", covariates=names)
    data = Sequences.from_dataframe(frame, columns="x", covariates="d")
    assert data.covariates.tolist() == [[[1.0], [2.0], [3.0]]]


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ([0, 60, 119], [0, 60, 119, 178.5, 238.0]),
        ([1, 2, 3, 5], [1, 2, 3, 4, 5, 6, 7]),
        ([0.5, 1.0, 2.0], [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]),
        ([100, 200], [100, 200, 300, 400]),
    ],
)
def test_times_that_are_numbers_go_on_in_every_type(times, wanted):
    """Whole ones stay integers; of a forecast the same come back."""
    kinds = ["float64"] if 0.5 in times else ["Int64", "int64", "uint8", "float64"]
    columns = [pandas.Series(times, dtype=kind) for kind in kinds]
    tables = [{"t": column, "x": [1.0] * len(times)} for column in [times, *columns]]
    plain = [table for table in tables if "Int64" not in str(getattr(table["t"], "dtype", ""))]
    for table in [*tables, *map(pandas.DataFrame, tables), *map(polars.DataFrame, plain)]:
        data = Sequences.from_dataframe(table, columns="x", time="t", gaps="missing")
        found = data.time_index(2)
        assert found.tolist() == wanted
        broken = any(isinstance(number, float) for number in [*wanted, *table["t"]])
        assert found.dtype == ("float64" if broken else "int64")
        hmm = TabularHMM(1, normal(0))
        ahead = fit_em(hmm, data, num_iterations=1).forecast(data, 2).to_dataframe(data)
        assert list(ahead["t"]) == wanted[-2:]


def test_num_ahead_is_a_count():
    data = read(gaps="missing")
    for wrong, kind in ((-1, ValueError), (True, TypeError), (1.0, TypeError)):
        with pytest.raises(kind, match="num_ahead must be"):
            data.time_index(wrong)


def test_columns_may_have_numbers_for_names():
    frame = pandas.DataFrame([[*"b", 1, 5.0, 2], [*"b", 2, 6.0, 3], [*"a", 1, 7.0, 4]])
    data = Sequences.from_dataframe(frame, by=0, time=1, columns=2, covariates=3)
    assert data.keys == ["b", "a"]
    assert data.values.tolist() == [[5.0, 6.0], [7.0, 0.0]]
    assert data.covariates[0].tolist() == [[2.0], [3.0]]
    assert data.time_index(1).tolist() == [1, 2, 3, 1, 2]


def test_sequences_that_are_joined_have_their_keys():
    frame = pandas.DataFrame({"who": [*"bbac"], "day": [1, 2, 1, 4], "x": [5.0, 6, 7, 8]})
    data = read(frame)
    joined = data.collate([data[2], data[0]])
    assert joined.keys == ["c", "b"]
    assert joined.time_index(1).tolist() == [4, 5, 1, 2, 3]
    assert joined.to_dataframe(states=[9, 0, 1])["state"].tolist() == [0, 1, 9]
    assert data.collate([data[0], read(frame)[0]]).keys == [0, 1]  # rows of two tables


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


def readings():
    """Hours of two sites over the change of the clock in autumn, two of them lacking, shuffled."""
    hours = pandas.date_range("2026-10-25", periods=6, freq="h", tz="Europe/Berlin")
    parts = [pandas.DataFrame({"site": s, "time": hours[:n]}) for s, n in (("b", 6), ("a", 4))]
    frame = pandas.concat(parts).assign(x=range(10)).iloc[[9, 1, 0, 5, 7, 6, 3, 2]]
    return frame.astype({"site": "category"})


def in_polars(frame):
    when = [time.to_pydatetime() for time in frame["time"].dt.tz_convert("UTC")]
    zone = polars.col("time").dt.convert_time_zone("Europe/Berlin")
    kind = {"site": polars.Categorical, "time": polars.Datetime("ms", "Europe/Berlin")}
    columns = {"x": frame["x"].tolist(), "time": when, "site": frame["site"].tolist()}
    return polars.DataFrame(columns).with_columns(zone).cast(kind)


def test_rows_of_polars_come_back_in_polars():
    """With the types of their columns, and by the same sequences as those of pandas."""
    frame = in_polars(readings())
    options = {"columns": "x", "by": "site", "time": "time", "gaps": "missing"}
    data, same = (Sequences.from_dataframe(f, **options) for f in (frame, readings()))
    assert torch.equal(data.values, same.values)
    assert data.keys == same.keys == ["a", "b"]
    probs = torch.stack([data.values, -data.values], -1)
    found = data.to_dataframe(states=data.values, probs=probs)
    x = polars.col("x")
    named = {"state": x, "p0": x, "p1": -x}
    assert_frame_equal(found, frame.select("site", "time", **named))
    part = data[1:].to_dataframe(states=data.values[1:])
    assert_frame_equal(part, frame.filter(site="b").select("site", "time", state="x"))
    alone = Sequences.from_dataframe(frame, columns="x")
    assert_frame_equal(alone.to_dataframe(states=alone.values), frame.select(state="x"))


def test_integers_of_polars_with_null_stay_integers():
    data = Sequences.from_dataframe(polars.DataFrame({"x": [3, None, 1]}), columns="x")
    assert data.values.dtype == torch.long
    assert data.values[data.observed].tolist() == [3, 1]


def test_keys_are_those_of_the_groups_and_stay_with_their_sequences():
    frame = pandas.DataFrame({"who": [*"bbab"], "run": [2, 2, 1, 1], "x": range(4)})
    pairs = Sequences.from_dataframe(frame, columns="x", by=["who", "run"])
    assert pairs.keys == list(frame.groupby(["who", "run"], sort=False).groups)
    assert pairs[[2, 0]].keys == [("b", 1), ("b", 2)]
    assert pairs.batch(torch.tensor([1])).keys == [("a", 1)]
    assert pairs.to(torch.float64).truncate(1).keys == pairs.keys
    assert Sequences.from_dataframe(frame, columns="x").keys == [0]
    assert Sequences.from_list([[1], [2]]).keys == [0, 1]


def test_a_key_that_is_called_as_an_answer_is_not_overwritten():
    for make in (pandas.DataFrame, polars.DataFrame):
        frame = make({"state": ["Ohio", "Iowa"], "x": [1, 0]})
        data = Sequences.from_dataframe(frame, columns="x", by="state")
        with pytest.raises(ValueError, match="by and time must not name a column 'state'"):
            data.to_dataframe(states=[0, 1])
        frame = make({"mean": ["Ohio", "Iowa"], "x": [1.0, 0.0]})
        given = Sequences.from_dataframe(frame, columns="x", by="mean")
        ahead = fit_em(TabularHMM(1, normal(0)), given, num_iterations=1).forecast(given, 1)
        with pytest.raises(
            ValueError, match=r"column 'mean'; the answer has .'step', 'mean', 'lower'"
        ):
            ahead.to_dataframe(given)
        with pytest.raises(TypeError, match="data must be Sequences; got DataFrame"):
            ahead.to_dataframe(frame)
        assert data.to_dataframe(probs=[[1.0], [1.0]])["state"].to_list() == ["Ohio", "Iowa"]


@pytest.mark.parametrize("make", [lambda frame: frame, in_polars])
def test_a_forecast_is_a_table_of_the_times_to_come(make):
    frame = make(readings())
    options = {"by": "site", "time": "time", "gaps": "missing"}
    data = Sequences.from_dataframe(frame, columns="x", **options)
    ahead = fit_em(TabularHMM(2, normal(0)), data, num_iterations=2).forecast(data, 3)
    found = ahead.to_dataframe(data, level=0.5)
    assert list(found.columns) == ["site", "time", "mean", "lower", "upper"]
    assert type(found) is type(frame)
    assert found["site"].to_list() == [*"aaabbb"]
    ends = {site: part["time"].max() for site, part in readings().groupby("site", observed=True)}
    times = [ends[site] + pandas.Timedelta(h, "h") for site in "ab" for h in (1, 2, 3)]
    assert found["time"].to_list() == times
    assert found["time"].dtype == frame["time"].dtype
    low, high = ahead.interval(0.5)
    for name, part in {"mean": ahead.mean, "lower": low, "upper": high}.items():
        assert found[name].to_list() == part.flatten().tolist()
    with pytest.raises(ValueError, match="forecast must have shape"):
        ahead.to_dataframe(data[:1])
    both = Sequences.from_dataframe(frame, columns=["x", "x"], **options)
    ahead = fit_em(TabularHMM(1, normal(2)), both, num_iterations=2).forecast(both, 1)
    found = ahead.to_dataframe(both)
    assert found["mean1"].to_list() == ahead.mean[:, 0, 1].tolist()


def test_a_forecast_of_symbols_has_their_probabilities_and_steps_where_there_is_no_time():
    table = {"who": [*"bba"], "word": ["yes", "no", "no"]}
    words = Vocabulary(["no", "yes", "so"])
    data = Sequences.from_dataframe(table, columns="word", by="who", vocabulary=words)
    lists = Sequences.from_list([[1, 0], [0]])
    for given, key, keys in ((data, "who", [*"bbaa"]), (lists, "sequence", [0, 0, 1, 1])):
        ahead = fit_em(TabularHMM(2, categorical(3)), given, num_iterations=2).forecast(given, 2)
        found = ahead.to_dataframe(given)
        assert list(found) == [key, "step", "p0", "p1", "p2"]
        assert found[key].tolist() == keys
        assert found["step"].tolist() == [2, 3, 1, 2]
        probs = torch.as_tensor(found[["p0", "p1", "p2"]].to_numpy())
        assert torch.equal(probs, ahead.probs.flatten(0, 1))


@pytest.mark.parametrize("make", [pandas.DataFrame, polars.DataFrame])
@pytest.mark.parametrize("dates", [False, True])
def test_a_forecast_in_continuous_time_has_the_times_it_was_asked_for(make, dates):
    """Also where those of the data are regular, and other ones would follow."""
    years = [pandas.Timestamp(2020 + n, 1, 1) for n in (0, 1, 0, 1)] if dates else [0, 1, 0, 1]
    data = Sequences.from_dataframe(make({"who": [*"bbaa"], "at": years, "x": [0, 1, 0, 1]}),
                                    columns="x", by="who", time="at")  # fmt: skip
    fit = fit_em(TabularContinuousTimeHMM(2, categorical(2)), data, num_iterations=2)
    times = [pandas.Timestamp("2022-02-03 04:05"), pandas.Timestamp(2024, 1, 1)]
    times = times if dates else [1.5, 7.0]
    ahead = fit.forecast(data, times=times)
    assert ahead.to_dataframe(data)["at"].to_list() == times * 2
    lists = Sequences(data.values, times=data.times)
    found = fit.forecast(lists, times=data.times.amax() + torch.tensor([[1.0], [2.0]]))
    assert found.to_dataframe(lists)["time"].tolist() == [data.times.amax() + n for n in (1, 2)]


def test_labels_of_lists_may_be_names():
    tags = Vocabulary(["down", "up"])
    data = Sequences.from_list([[0, 1, 1], [1]], labels=[["up", None, "down"], ["up"]], tags=tags)
    assert data.labels.tolist() == [[1, -1, 0], [1, -1, -1]]


def test_warnings_name_the_line_of_the_user():
    for make in (
        read,
        lambda: Sequences.from_list(torch.zeros(99, 2)),
        lambda: Sequences(torch.zeros(3, 3), observed=torch.zeros(3, 3, dtype=torch.bool)),
    ):
        with warnings.catch_warnings(record=True, action="always") as found:
            make()
        assert [warning.filename for warning in found] == [__file__]
