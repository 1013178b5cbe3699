"""EM of symbols, whose E-step counts states by symbol: as the E-step that counts by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch

from pyrohmm import HMM, Sequences, TabularHMM, categorical, fit_em, left_to_right, starts
from pyrohmm.infer.maximization import Maximization


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
        TabularHMM(emission=words, **options), data(), num_iterations=8, tolerance=None, **more
    )


@pytest.mark.parametrize("case", CASES)
def test_as_with_counts_of_steps(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    factors, prepare = HMM.symbol_factors, Maximization.__init__

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return factors(*arguments)

    def by_step(self: Maximization, *arguments: Any) -> None:
        prepare(self, *arguments)
        self.by_symbol = False

    monkeypatch.setattr(HMM, "symbol_factors", counted)
    quick = fitted(case)
    assert len(calls) >= 9
    monkeypatch.setattr(Maximization, "__init__", by_step)
    slow = fitted(case)
    torch.testing.assert_close(quick.losses, slow.losses, rtol=1e-5, atol=1e-5)
    for name, value in slow.parameters.items():
        torch.testing.assert_close(quick.parameters[name], value, rtol=1e-3, atol=1e-5)
    assert quick.notes == slow.notes


def test_restarts_that_go_on_after_others_were_given_up_are_single_fits() -> None:
    """Twice the worse half is left behind; the last is as if it had been alone all the time."""
    module, data = TabularHMM(3, categorical(3)), ragged()
    pyro.set_rng_seed(0)
    begin = starts.from_prior(module, data, 5)
    options = {"num_iterations": 45, "tolerance": 1e-12, "acceleration": False}
    fit = fit_em(module, data, restarts=5, start=lambda *_: begin, **options)
    steps = (fit.restarts.losses.diff() != 0).sum(-1).sort().values
    assert steps.tolist() == [19, 19, 39, 45, 45]
    for restart, losses in enumerate(fit.restarts.losses):
        own = {name: value[restart : restart + 1] for name, value in begin.items()}
        alone = fit_em(module, data, start=lambda *_, own=own: own, **options)
        count = 1 + int((losses.diff() != 0).sum())
        torch.testing.assert_close(losses[:count], alone.losses[:count], rtol=1e-6, atol=1e-6)
    values = {name: value[fit.restarts.best] for name, value in fit.restarts.parameters.items()}
    for name, value in fit.parameters.items():
        torch.testing.assert_close(value, values[name])
