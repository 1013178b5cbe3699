"""EM of tables, whose E-step builds no HMM: as the E-step that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch

from pyrohmm import Sequences, TabularHMM, categorical, fit_em, left_to_right, normal
from pyrohmm.infer.tables import Tables
from pyrohmm.ops import evidence


def ragged() -> Sequences:
    """Sequences of 1 to 9 steps, some of which are missing."""
    lengths = torch.tensor([9, 1, 5, 9, 2])
    values = torch.randint(3, (5, 9), generator=torch.Generator().manual_seed(0))
    observed = torch.ones(5, 9, dtype=torch.bool)
    observed[0, 3] = observed[3, 0] = observed[4, 1] = False
    values[0, 3] = 77  # what is missing may be anything
    return Sequences(values, lengths, observed=observed)


def scattered() -> Sequences:
    """A few long sequences among many short ones: they go in parts."""
    generator = torch.Generator().manual_seed(1)
    lengths = [1500] * 3 + [2] * 60
    return Sequences.from_list(
        [torch.randint(3, (length,), generator=generator).tolist() for length in lengths]
    )


CASES: dict[str, tuple[Callable[[], Sequences], dict[str, Any], dict[str, Any]]] = {
    "ragged": (ragged, {}, {}),
    "in parts": (scattered, {}, {}),
    "restarts": (ragged, {}, {"restarts": 3}),
    "priors": (
        ragged, {"initial_concentration": 2.0, "transition_concentration": 1.5, "words": 1.2}, {},
    ),
    "hard zeros": (ragged, {"transition_allowed": left_to_right(3)}, {}),
    "of more": (lambda: Sequences(ragged().values % 3, ragged().lengths, total=40), {}, {}),
    "one state": (ragged, {"num_states": 1}, {}),
}  # fmt: skip


def fitted(case: str) -> Any:
    data, options, more = CASES[case]
    words = categorical(3, options.get("words", 1.0))
    options = {"num_states": 3} | {k: v for k, v in options.items() if k != "words"}
    pyro.set_rng_seed(0)
    return fit_em(
        TabularHMM(emission=words, **options), data(), num_steps=8, tolerance=None, **more
    )


@pytest.mark.parametrize("case", CASES)
def test_as_with_an_hmm(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    counts = Tables.__call__

    def counted(self: Tables, batch: Sequences) -> Any:
        calls.append(len(batch))
        return counts(self, batch)

    monkeypatch.setattr(Tables, "__call__", counted)
    quick = fitted(case)
    assert len(calls) >= 9
    monkeypatch.setattr(Tables, "suit", staticmethod(lambda parameters: False))
    slow = fitted(case)
    torch.testing.assert_close(quick.losses, slow.losses, rtol=1e-5, atol=1e-5)
    for name, value in slow.values.items():
        torch.testing.assert_close(quick.values[name], value, rtol=1e-3, atol=1e-5)
    assert quick.notes == slow.notes


def test_numbers_out_of_range_go_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fitted("ragged")
    monkeypatch.setattr(Tables, "__call__", lambda self, batch: None)
    torch.testing.assert_close(fitted("ragged").losses, wanted.losses, rtol=1e-5, atol=1e-5)


def test_underflow_goes_the_other_way() -> None:
    """A sequence that float32 and float64 lose: its second step has probability 1e-400."""
    table = torch.tensor([[1.0, 0.0], [1e-200, 1.0]], dtype=torch.float64).log()
    chain = evidence.Uniform(
        torch.tensor([[1.0, 0.0]]).double().log(),
        torch.tensor([[[1.0, 1e-200], [1e-200, 1.0]]]).double().log(),
        table.unsqueeze(0), torch.tensor([[[0, 1, 0]]]), torch.tensor([[3]]),
    )  # fmt: skip
    assert evidence.expected_counts(chain) is None


def test_only_tables_suit() -> None:
    data = Sequences(torch.randn(4, 5, 2), torch.full((4,), 5))
    pyro.set_rng_seed(0)
    assert (
        fit_em(TabularHMM(2, normal(2)), data, num_steps=4, tolerance=None).losses.isfinite().all()
    )


def test_labels_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with labels restrict paths, which the tables know nothing of."""
    labels = [[0, 1, 0, 1]] * 3
    data = Sequences.from_list([[0, 1, 1, 2]] * 3, labels=labels)
    pyro.set_rng_seed(0)
    fit = fit_em(TabularHMM(2, categorical(3)), data, num_steps=6, tolerance=None)
    assert fit.values["module.transition"].tolist() == [[0.0, 1.0], [1.0, 0.0]]
