"""The figure scripts: what their results say and how far a step goes."""

import importlib
import json
from pathlib import Path

FIGURES = Path(__file__).resolve().parent.parent / "figures"


def test_the_matrix_fits_are_at_or_below_those_of_the_paper_in_every_row():
    rows = json.loads((FIGURES / "densehmm_matrix_fit.json").read_text())["rows"]
    ours = [
        row
        for row in rows
        if row["quantity"] == "relative error"
        and (row["factorisation"], row["schedule"]) == ("softmax", "decaying")
    ]
    assert len(ours) == 12
    assert all(row["ours"] <= row["paper"] for row in ours)


def test_published_log_likelihoods_are_ours_to_the_digits_printed():
    rows = json.loads((FIGURES / "published.json").read_text())["rows"]
    same = [row for row in rows if row.get("doubled", True)]
    assert len(same) == 5
    for row in same:
        rounding = max(0.5 * 10.0 ** -len(str(row["published"]).split(".")[1]), 2e-6)
        assert abs(row["log_likelihood"] - row["published"]) < rounding
        assert row.get("gap", 0.0) < 1e-3  # coefficients that they print


def test_every_number_of_a_gpu_says_when_and_on_what_it_was_measured():
    for row in json.loads((FIGURES / "gpu_throughput.json").read_text())["rows"]:
        assert {"date", "card", "pyrohmm", "torch"} <= row.keys()
        assert ({"seconds", "tokens_a_second"} & row.keys()) or row["skipped"]


def test_a_step_goes_through_no_more_of_the_package_than_before(monkeypatch):
    """Bounds are what was reached; of calls and functions, which vary, a tenth more."""
    monkeypatch.syspath_prepend(FIGURES)
    most = {"fit_em": (1055, 330, 44), "fit_map": (636, 290, 46), "HMM.log_prob": (87, 67, 19)}
    for row in importlib.import_module("walk").rows():
        calls, functions, files = most[row["way"]]
        assert row["calls"] <= 1.1 * calls
        assert row["functions"] <= 1.1 * functions
        assert row["files"] <= files


def test_the_kneser_ney_5_gram_of_the_penn_treebank_is_that_of_mikolov():
    rows = json.loads((FIGURES / "language_model_baselines.json").read_text())["rows"]
    tokens = {"Penn Treebank": (73_760, 82_430), "WikiText-2": (217_646, 245_569)}
    assert all((row["valid_tokens"], row["test_tokens"]) == tokens[row["data"]] for row in rows)
    (row,) = (row for row in rows if row["part"] == "kneser-ney-ptb")
    assert round(row["test_perplexity"], 1) == row["paper_test"]
