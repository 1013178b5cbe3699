"""The figure scripts: what they compute themselves, their results and their pictures."""

import importlib
import json
import sys
from pathlib import Path

import pytest

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


def test_a_step_goes_through_no_more_of_the_package_than_before(monkeypatch):
    """Bounds are what was reached; of calls and functions, which vary, a tenth more."""
    monkeypatch.syspath_prepend(FIGURES)
    most = {"fit_em": (1807, 349, 47), "fit_map": (882, 302, 45), "HMM.log_prob": (138, 86, 20)}
    for row in importlib.import_module("walk").rows():
        calls, functions, files = most[row["way"]]
        assert row["calls"] <= 1.1 * calls
        assert row["functions"] <= 1.1 * functions
        assert row["files"] <= files


# Pictures of large models -------------------------------------------------------------------------


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """Import a script and redirect its pictures to ``tmp_path``."""
    monkeypatch.syspath_prepend(FIGURES)

    def load(name):
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "FOLDER", tmp_path)
        return script

    return load


@pytest.mark.parametrize(
    "name",
    [
        "block_switches", "brown_clusters", "cooccurrence_scaling", "densehmm_matrix_fit",
        "diversified_beyond", "diversified_ocr", "diversified_tagging", "diversified_toy",
        "language_models", "large_hmm_speed", "music", "num_states", "starts", "tagging",
        "throughput",
    ],
)  # fmt: skip
def test_a_picture_is_redrawn_from_the_results_alone(figure, monkeypatch, tmp_path, name):
    script = figure(name)
    monkeypatch.setattr(sys, "argv", [name, "--draw"])
    script.main()
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]


# Baseline language models -------------------------------------------------------------------------


def test_the_kneser_ney_5_gram_of_the_penn_treebank_is_that_of_mikolov():
    rows = json.loads((FIGURES / "language_model_baselines.json").read_text())["rows"]
    tokens = {"Penn Treebank": (73_760, 82_430), "WikiText-2": (217_646, 245_569)}
    assert all((row["valid_tokens"], row["test_tokens"]) == tokens[row["data"]] for row in rows)
    (row,) = (row for row in rows if row["part"] == "kneser-ney-ptb")
    assert round(row["test_perplexity"], 1) == row["paper_test"]
