"""Dates of tables: steps of months and local days, stamps that jitter, rows out of order, zones."""

import warnings

import numpy as np
import pandas
import pytest

from pyrohmm import Sequences


def read(days, gaps=None, **options):
    frame = pandas.DataFrame({"day": days, "x": np.arange(float(len(days)))})
    return Sequences.from_dataframe(frame, columns="x", time="day", gaps=gaps, **options)


def jittered():
    hours = pandas.date_range("2021-01-01", periods=40, freq="h")
    return hours + pandas.to_timedelta(np.random.default_rng(0).uniform(-4, 4, 40), "min")


def dates(start, freq, **options):
    return lambda: pandas.date_range(start, periods=40, freq=freq, **options)


def periods(start, freq):
    return lambda: pandas.period_range(start, periods=40, freq=freq)


def clipped(start, months):
    """Dates some months apart, each counted from the first: of shorter months the last day."""
    first = pandas.Timestamp(start)
    return pandas.DatetimeIndex([first + pandas.DateOffset(months=months * n) for n in range(40)])


CLOCKS = {
    "days": dates("2021-01-29", "D"),
    "weeks": dates("2021-01-29", "W"),
    "starts of months": dates("2021-01-01", "MS"),
    "ends of months": dates("2021-01-31", "ME"),
    "fifteenths": lambda: dates("2021-01-01", "MS")() + pandas.Timedelta("14D9h"),
    "thirtieths": lambda: clipped("2021-01-30", 1),
    "29ths of the months": lambda: clipped("2021-01-29", 1),
    "last of February": lambda: clipped("1980-02-29", 12),
    "28 February": lambda: clipped("1980-02-28", 12),
    "quarters": dates("2015-03-31", "QE"),
    "years": dates("1980-01-01", "YS"),
    "periods of months": periods("2021-01", "M"),
    "periods of quarters": periods("2015-01", "Q"),
    "periods of years": periods("1980", "Y"),
    "local midnights": dates("2021-03-10", "D", tz="Europe/Berlin"),
    "local hours": dates("2021-03-27 12:00", "h", tz="Europe/Berlin"),
    "local months": dates("2021-01-01", "MS", tz="America/New_York"),
    "dates": lambda: [day.date() for day in dates("2021-01-31", "ME")()],
    "jittered hours": jittered,
    "numbers": lambda: np.arange(40) * 0.1 + 3,
}  # fmt: skip


@pytest.mark.parametrize("clock", CLOCKS)
def test_steps_that_are_skipped_are_found_on_every_clock(clock):
    """Four rows of forty are missing; nothing is where none are."""
    days = list(CLOCKS[clock]())
    with warnings.catch_warnings(action="error"):
        assert read(days).num_steps == 40
    for gaps in ("missing", "error"):
        assert read(days, gaps).num_steps == read(days, gaps).num_observed == 40
    lost = [5, 17, 18, 30]
    kept = [day for i, day in enumerate(days) if i not in lost]
    with pytest.warns(UserWarning, match="time has gaps: 3 rows are up to 3 steps"):
        assert read(kept).num_steps == 36
    with pytest.raises(ValueError, match="time has gaps"):
        read(kept, "error")
    filled = read(kept, "missing")
    assert filled.num_steps == 40
    assert (~filled.observed[0]).nonzero().flatten().tolist() == lost


@pytest.mark.parametrize("clock", CLOCKS)
def test_times_are_filled_in_and_go_on_as_the_calendar_does(clock):
    """Of 40 dates four are missing and three are to come; a second sequence is shorter."""
    days = CLOCKS[clock]()
    days = days.start_time if isinstance(days, pandas.PeriodIndex) else days
    days, lost = pandas.Series(days), [5, 17, 18, 30]
    days = pandas.to_datetime(days) if days.dtype == object else days
    given = [CLOCKS[clock]()[i] for i in range(37) if i not in lost]
    frame = pandas.DataFrame({"day": given + given[:9], "who": [0] * 33 + [1] * 9})
    frame["x"] = np.arange(42.0)
    data = Sequences.from_dataframe(frame, columns="x", by="who", time="day", gaps="missing")
    whole = pandas.concat([days, days[:13]], ignore_index=True)
    for part, wanted in ((data, whole), (data[1:], days[:13]), (data[:1], days)):
        found = part.time_index(3)
        assert found.name == "day"
        assert found.dtype.kind == wanted.dtype.kind
        if clock in ("jittered hours", "numbers"):
            apart = (found - wanted).abs()
            assert (apart < (pandas.Timedelta("13min") if clock != "numbers" else 1e-9)).all()
        else:
            assert found.tolist() == wanted.tolist()
            assert getattr(found.dt, "tz", None) == getattr(wanted.dt, "tz", None)
    assert data.time_index().tolist() == [
        day for day, stays in zip(data.time_index(3), [*[True] * 37, *[False] * 3] + [True] * 10)
        if stays
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["2025-12-30", "2026-01-30", "2026-02-28", "2026-03-30"], ["2026-04-30", "2026-05-30"]),
        (["2025-12-29", "2026-01-29", "2026-02-28", "2026-03-29"], ["2026-04-29", "2026-05-29"]),
        (["2025-04-30", "2025-06-30"], ["2025-08-31", "2025-10-31"]),
        (["2022-02-28", "2023-02-28"], ["2024-02-28", "2025-02-28"]),
        (["2023-02-28", "2024-02-29"], ["2025-02-28", "2026-02-28"]),
        (["2024-02-29", "2025-02-28", "2026-02-28", "2027-02-28"], ["2028-02-29", "2029-02-28"]),
    ],
)
def test_a_day_that_some_months_lack_is_their_last(given, wanted):
    found = read([pandas.Timestamp(day) for day in given]).time_index(2)
    assert found.tolist() == [pandas.Timestamp(day) for day in given + wanted]


def test_times_that_do_not_go_on_by_one_step_are_not_made_up():
    days = pandas.bdate_range("2021-03-01", periods=9)
    data = read(days, "ignore")
    assert data.time_index().tolist() == list(days)
    with pytest.raises(ValueError, match=r"num_ahead must be 0 where times 'day' do not go on"):
        data.time_index(1)
    assert Sequences.from_list([[1.0]]).time_index() is None


def test_irregular_dates_have_no_gaps():
    seconds = np.random.default_rng(0).exponential(1e5, 40).cumsum()
    days = pandas.Timestamp("2021-01-01") + pandas.to_timedelta(seconds, "s")
    with warnings.catch_warnings(action="error"):
        assert read(days).num_steps == 40
    with pytest.raises(ValueError, match=r"no multiples of .* nor of months"):
        read(days, "missing")


@pytest.mark.parametrize("make", [pandas.date_range, pandas.period_range])
def test_rows_that_an_index_of_dates_puts_in_another_order_are_refused(make):
    """Within a sequence: another one may begin at an earlier date."""
    index = make("2021-01-01", periods=4, freq="D")
    frame = pandas.DataFrame({"x": [0.0, 1, 2, 3], "who": [0, 0, 1, 1]}, index)
    shuffled = frame.iloc[[1, 0, 2, 3]]
    for by in (None, "who"):
        assert Sequences.from_dataframe(frame, columns="x", by=by).num_observed == 4
        with pytest.raises(ValueError, match=r"in the order of time.*frame.sort_index\(\)"):
            Sequences.from_dataframe(shuffled, columns="x", by=by)
    for item in (shuffled, shuffled["x"]):
        assert len(Sequences.from_list([item.sort_index(), item.sort_index()])) == 2
        with pytest.raises(ValueError, match=r"in the order of time.*frame.sort_index\(\)"):
            Sequences.from_list([item.sort_index(), item])
        with pytest.raises(ValueError, match=r"in the order of time.*frame.sort_index\(\)"):
            Sequences.from_concatenated(item)
    crossed = frame.iloc[[2, 3, 0, 1]]
    assert Sequences.from_dataframe(crossed, columns="x", by="who").num_steps == 2


class Column:
    """A column of dates as polars has it: an array in UTC, and a dtype that knows the zone."""

    class dtype:  # as it is called there
        time_zone = "Europe/Berlin"

    def __init__(self, days):
        self.days = days

    def to_numpy(self):
        return self.days.tz_convert("UTC").tz_localize(None).to_numpy()


def test_a_time_zone_comes_back():
    days = pandas.date_range("2021-03-27", periods=4, freq="D", tz="Europe/Berlin")
    data = Sequences.from_dataframe({"day": Column(days), "x": np.arange(4.0)}, columns="x",
                                    time="day", gaps="error")  # fmt: skip
    assert list(data.to_dataframe()["day"]) == list(days)
