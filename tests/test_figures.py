"""The figure scripts: what their results say and how far a step goes."""

import importlib
import json
from pathlib import Path

import pytest
import torch

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
    most = {"fit_em": (1043, 330, 45), "fit_map": (631, 290, 47), "HMM.log_prob": (87, 67, 19)}
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


@pytest.mark.parametrize("two_level", [True, False])
def test_a_step_holds_the_transitions_of_pairs_of_blocks_less_than_twice(two_level, monkeypatch):
    """Once, and their gradient by a quarter; those of one step; sums over all states apart."""
    monkeypatch.syspath_prepend(FIGURES)
    torch.set_default_dtype(torch.float32)
    memory = importlib.import_module("block_memory")
    sizes = {"number": 16, "dim": 8, "words": 64, "sequences": 64, "steps": 8}
    for states in (8192, 16384):
        row = memory.count(states, two_level, 0.5, **sizes)
        assert (row["kept"], row["pairs"]) == (states // 2, 210)
        step = 4e-9 * 64 * (row["kept"] // 16) ** 2
        sums = 0 if two_level else 4.1 * 4e-9 * row["kept"] ** 2
        assert row["gigabytes"] <= 1.85 * row["table"] + step + sums
        assert row["operations"] <= 330


def test_the_largest_models_fit_into_the_memory_of_a_card():
    rows = json.loads((FIGURES / "block_memory.json").read_text())["rows"]
    held = {(row["states"], row["levels"]): row for row in rows if row["dropout"] == 0.5}
    whole = {(row["states"], row["levels"]): row for row in rows if row["dropout"] == 0.0}
    for levels in (1, 2):
        assert whole[32768, levels]["gigabytes"] < 16
        assert held[65536, levels]["gigabytes"] < 40
        assert held[131072, levels]["gigabytes"] < 80
