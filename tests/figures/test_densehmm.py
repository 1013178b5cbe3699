"""Sizes that the experiments of DenseHMM compare, by the paper and by its code."""

import importlib
from pathlib import Path

import pytest

FIGURES = Path(__file__).resolve().parents[2] / "figures"


@pytest.fixture
def densehmm(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("common.densehmm")


# (V, {(K, D): (as in the code, by the paper's formula)}), computed by hand from either formula
FAIR = [
    (None, {(3, 1): (3, 3), (3, 2): (4, 4), (3, 3): (5, 5), (5, 2): (5, 5), (5, 3): (6, 6),
            (5, 5): (8, 8), (10, 2): (6, 6), (10, 3): (7, 8), (10, 5): (11, 11),
            (10, 10): (16, 16)}),
    (19, {(3, 1): (1, 2), (3, 2): (3, 3), (3, 3): (4, 4), (5, 2): (3, 3), (5, 3): (5, 5),
          (5, 5): (7, 7), (10, 2): (4, 4), (10, 3): (6, 6), (10, 5): (9, 9), (10, 10): (15, 15)}),
    (42, {(3, 1): (1, 1), (3, 2): (2, 2), (3, 3): (4, 4), (5, 2): (3, 3), (5, 3): (4, 4),
          (5, 5): (6, 6), (10, 2): (3, 3), (10, 3): (5, 5), (10, 5): (8, 8), (10, 10): (13, 13)}),
]  # fmt: skip


@pytest.mark.parametrize(("symbols", "table"), FAIR)
def test_fair_numbers_of_states(densehmm, symbols, table):
    for (states, dim), (code, paper) in table.items():
        size = (states, symbols or states, dim)
        assert densehmm.fair_num_states(*size, as_in_code=True) == code
        assert densehmm.fair_num_states(*size) == paper
