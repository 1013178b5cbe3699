"""What the scripts of ``figures/`` compute beside the package, and what their results claim."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from pyrohmm import dense

FIGURES = Path(__file__).resolve().parent.parent / "figures"


@pytest.fixture
def matrix_fit(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("densehmm_matrix_fit")


@pytest.mark.parametrize("name", ["SOFTMAX", "NORM_ABS_LIN"])
def test_the_gradient_of_the_matrix_fit_is_that_of_the_package(matrix_fit, name):
    factorisation = getattr(matrix_fit, name)
    embeddings = torch.randn(2, 6, 4, 3, dtype=torch.float64, requires_grad=True)
    truth = torch.randn(6, 4, 4, dtype=torch.float64).softmax(-1)
    probs = dense.log_rows(factorisation.kernel, embeddings[0], embeddings[1]).exp()
    sizes = torch.linalg.matrix_norm(truth)
    expected = torch.linalg.matrix_norm(probs - truth) / sizes
    (slopes,) = torch.autograd.grad(expected.sum(), embeddings)
    found = torch.empty_like(embeddings)
    targets = truth.permute(1, 2, 0)
    losses = matrix_fit.gradient(factorisation, embeddings.detach(), targets, sizes, found)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(found, slopes)


def test_a_fit_as_in_the_code_ends_where_its_loss_does_not_change(matrix_fit, monkeypatch):
    """At the least loss that vectors of length one can have; Adam would move on all the same."""
    monkeypatch.setattr(matrix_fit, "NEVER_BEFORE", 20)
    targets = torch.eye(2).unsqueeze(-1)
    starts = torch.tensor([1.0, 1.2, 1.0, 1.5]).view(2, 1, 2, 1)
    schedules = [matrix_fit.AS_IN_CODE, matrix_fit.AS_IN_CODE._replace(stops=False)]
    short, long = (
        matrix_fit.fit(matrix_fit.NORM_ABS_LIN, targets, starts, schedules, num_steps)
        for num_steps in (300, 310)
    )
    assert short[0].equal(long[0])
    assert not short[1].equal(long[1])


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
