"""A design comes back from its file with the numbers and levels of the first table."""

import json

import numpy as np
import pyro
import pytest
import torch
from pandas import Categorical, DataFrame
from pyro.distributions import Poisson

from pyrohmm import (
    RegressionHMM,
    Sequences,
    fit_em,
    formulas,
    load_fit,
    load_formulas,
    load_into,
    regression,
    save,
)
from pyrohmm.io.files import write_directory

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
    with pytest.raises(ValueError, match="loc is ~x in the file, ~n in the call"):
        load_formulas(tmp_path / "design", loc="~ n")
    with pytest.raises(ValueError, match="loc is ~x in the file, not in the call"):
        load_formulas(tmp_path / "design")
    times = FIRST.assign(day=Categorical(np.array(["2024-01-01", "2024-01-02"] * 25, "M8[D]")))
    with pytest.raises(TypeError, match="got Timestamp"):
        save(formulas(times, loc="~ C(day)"), tmp_path / "other")


def test_what_another_version_would_compute_anew_is_refused():
    design = formulas(FIRST, loc="~ center(x)")
    design.parts["loc"]["state"] = {}
    with pytest.raises(ValueError, match="as in the first table"):
        design.matrix(NEXT)


def regressed(design, table):
    covariates = design.table(table)
    data = Sequences.from_dataframe(covariates, columns="n", covariates=design.names)
    return RegressionHMM(2, regression(Poisson, rate=design["rate"])), data


@pytest.mark.parametrize(
    ("formula", "told"),
    [
        ("~ scale(x)", r"state\.scale\(x\)\.\w+ is"),
        ("~ bs(age, df=4)", r"state\.bs\(age, df=4\)"),
        ("~ smooth(age, 5)", r"state\.smooth\(age, 5\)"),
        ("~ C(sex)", r"columns\.names is"),
    ],
)
def test_a_fit_is_refused_in_a_design_of_another_table(formula, told, tmp_path):
    """Whose coefficients are of other columns of the same names and number."""
    pyro.set_rng_seed(0)
    design = formulas(FIRST, rate=formula)
    module, data = regressed(design, FIRST)
    fit = fit_em(module, data, num_iterations=3, restarts=1)
    save(fit, tmp_path / "fit")
    save(design, tmp_path / "design")
    save(module, tmp_path / "module")
    later = FIRST[FIRST["x"] > 0].replace({"sex": {"m": "x"}})
    other, there = regressed(formulas(later, rate=formula), later)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=rf"{told}.* a design by load_formulas"):
        load_fit(tmp_path / "fit", other, there)
    with pytest.raises(ValueError, match=rf"{told}.* a design by load_formulas"):
        load_into(other, tmp_path / "module")
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    again, later = regressed(load_formulas(tmp_path / "design", rate=formula), FIRST[:20])
    assert load_fit(tmp_path / "fit", again, later).score(later) == fit.score(later)
    near = FIRST.assign(x=FIRST["x"] * (1 + 1e-12))  # as another machine sums
    load_into(regressed(formulas(near, rate=formula), near)[0], tmp_path / "module")


def test_a_fit_is_refused_in_a_design_of_another_formula(tmp_path):
    module, data = regressed(formulas(FIRST, rate="~ x + age"), FIRST)
    save(fit_em(module, data, num_iterations=2, restarts=1), tmp_path / "fit")
    other, there = regressed(formulas(FIRST, rate="~ x + hour"), FIRST)
    with pytest.raises(ValueError, match=r"names is \['Intercept', 'x', 'age'\] in the file, \["):
        load_fit(tmp_path / "fit", other, there)


def test_a_state_of_arrays_comes_back(tmp_path):
    texts = {f: f"~ {f}(age, df=4, constraints='center') - 1" for f in ("cr", "cs", "cc")}
    design = formulas(FIRST, **texts)
    save(design, tmp_path / "design")
    loaded = load_formulas(tmp_path / "design", **texts)
    rows = design.matrix(FIRST)
    np.testing.assert_allclose(rows.mean(0), 0, atol=1e-12)  # centred there, and not in NEXT
    for each in (design, loaded):
        np.testing.assert_allclose(each.matrix(NEXT), rows[NEXT.index], rtol=1e-9, atol=1e-12)


def test_white_space_of_formulas_may_differ(tmp_path):
    save(formulas(FIRST, loc="~ center(x)+n"), tmp_path / "design")
    loaded = load_formulas(tmp_path / "design", loc="~center( x )\n  + n")
    np.testing.assert_allclose(
        loaded.matrix(NEXT), formulas(FIRST, loc="~ center(x) + n").matrix(NEXT)
    )


def test_a_design_names_no_code(tmp_path, monkeypatch):
    """Formats that can name a class or a function would import a module and call it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_module_of_the_file.py").write_text("raise SystemExit('imported')")
    leaf = {"type": None, "context": None, "children_spec": []}
    context = {
        "default_factory_module": "a_module_of_the_file", "default_factory_name": "f",
        "dict_context": ["columns"],
    }  # fmt: skip
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}
    spec = {"type": "builtins.dict", "context": json.dumps(["loc"]), "children_spec": [tree]}
    state = {"dict": []}
    pairs = ("formula", "~ x"), ("columns", {"list": ["x"]}), ("state", state), ("levels", state)
    right = {"dict": [{"tuple": list(pair)} for pair in pairs]}
    for parts in (
        [["x"], json.dumps([1, spec])], {"collections.defaultdict": [["loc", right]]}, None, 3,
        {}, {"dict": [["loc", 3]]}, {"dict": [["loc", {"dict": []}]]}, {"tensor": "none"},
        {"dict": [[{"list": []}, right]]}, {"dict": [["loc"]]}, {"list": [right]},
    ):  # fmt: skip
        write_directory(tmp_path / "design", {}, {"kind": "formulas", "parts": parts})
        with pytest.raises(ValueError, match="does not describe a design"):
            load_formulas(tmp_path / "design", loc="~ x")
    write_directory(
        tmp_path / "design",
        {},
        {"kind": "formulas", "parts": {"dict": [{"tuple": ["loc", right]}]}},
    )
    assert load_formulas(tmp_path / "design", loc="~ x").names == ["x"]
