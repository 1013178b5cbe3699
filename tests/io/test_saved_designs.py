"""A design comes back from its file with the numbers and levels of the first table."""

import numpy as np
import pytest
from pandas import Categorical, DataFrame

from pyrohmm import formulas, load_formulas, save

random = np.random.default_rng(0)
FIRST = DataFrame({
    "x": random.normal(size=50), "age": random.uniform(0, 90, 50), "n": random.integers(0, 3, 50),
    "sex": random.choice(["m", "f"], 50), "hour": random.uniform(0, 24, 50),
    "dose": Categorical(random.choice(["lo", "mid"], 50), ["lo", "mid"]),
})  # fmt: skip
NEXT = FIRST[(FIRST["sex"] == "m") & (FIRST["n"] == 0) & (FIRST["dose"] == "mid")]  # one level each
FORMULAS = {
    "a": "~ center(x) + bs(age, df=5) + C(sex) * n + poly(hour, 2)",
    "b": "~ scale(x) + smooth(age, 6) + cyclic(hour, 24) + C(n, contr.sum) + dose",
    "c": "~ 0 + cr(age, df=4) + offset(x)",
    "d": "~ C(dose, contr.treatment('mid')) + log(age) + center(poly(x, 2))",
    "e": "~ center(smooth(x, 4)) + C(sex):x",
}


def test_a_loaded_design_has_the_columns_of_the_first_table(tmp_path):
    design = formulas(FIRST, **FORMULAS)
    save(design, tmp_path / "design")
    loaded = load_formulas(tmp_path / "design", **FORMULAS)
    rows = design.matrix(FIRST)[NEXT.index]
    assert len(NEXT) > 2
    for table in (NEXT, NEXT[:2]):
        np.testing.assert_allclose(loaded.matrix(table), rows[: len(table)], rtol=1e-12, atol=1e-14)
    assert loaded.names == design.names
    assert [loaded[part] for part in loaded] == [design[part] for part in FORMULAS]
    assert repr(loaded).startswith("Design(a='~ center(x) + ")
    for other in ({"sex": "q"}, {"n": 7}, {"dose": "high"}, {"n": "one"}, {"age": "old"}):
        with pytest.raises(ValueError, match=r"the table does not fit|must be"):
            loaded.matrix(NEXT.assign(**other))


def test_formulas_are_code_that_no_file_gives(tmp_path):
    save(formulas(FIRST, loc="~ x"), tmp_path / "design")
    with pytest.raises(ValueError, match=r"loc is '~ x' in the file, '~ n' in the call"):
        load_formulas(tmp_path / "design", loc="~ n")
    with pytest.raises(ValueError, match=r"loc is '~ x' in the file, not in the call"):
        load_formulas(tmp_path / "design")
    times = FIRST.assign(day=Categorical(np.array(["2024-01-01", "2024-01-02"] * 25, "M8[D]")))
    with pytest.raises(TypeError, match="got Timestamp"):
        save(formulas(times, loc="~ C(day)"), tmp_path / "other")


def test_what_another_version_would_compute_anew_is_refused():
    design = formulas(FIRST, loc="~ center(x)")
    design.parts["loc"]["state"] = {}
    with pytest.raises(ValueError, match="as in the first table"):
        design.matrix(NEXT)
