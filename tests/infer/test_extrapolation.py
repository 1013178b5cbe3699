"""Acceleration of EM: fewer iterations, and a log joint density that never falls."""

from types import SimpleNamespace

import numpy as np
import pyro
import pytest
import torch
from pyro.distributions import Categorical

from pyrohmm import (
    HMM,
    ContinuousTimeHMM,
    DenseHMM,
    Sequences,
    TabularContinuousTimeHMM,
    TabularHMM,
    categorical,
    fit_em,
    left_to_right,
    normal,
    normal_full,
    starts,
)
from pyrohmm.infer import parameters as of_em
from pyrohmm.infer.msteps import GradientStep


def symbols():
    """Two states that are hard to tell apart."""
    pyro.set_rng_seed(1)
    transition = torch.tensor([[0.95, 0.05], [0.1, 0.9]])
    faces = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.15, 0.3, 0.3, 0.25]])
    lengths = torch.full((4,), 150)
    hmm = HMM(torch.full((2,), 0.5).log(), transition.log(), Categorical(faces), lengths)
    return Sequences(hmm.sample(), lengths)


def numbers():
    pyro.set_rng_seed(2)
    values = torch.randn(3, 40) + 1.5 * (torch.arange(40) // 7 % 2)
    return Sequences(values.double(), torch.tensor([40, 23, 1]))


def vectors():
    data = numbers()
    values = torch.stack([data.values, data.values.roll(1, -1)], -1)
    return Sequences(values, data.lengths)


def panel():
    pyro.set_rng_seed(0)
    times = torch.empty(60, 8).uniform_(0.2, 2.8).cumsum(-1)
    rates = torch.tensor([[-0.2, 0.15, 0.05], [0.1, -0.4, 0.3], [0.0, 0.0, 0.0]])
    seen = Categorical(torch.tensor([[0.8, 0.2, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]))
    first = torch.tensor([1.0, 0.0, 0.0]).log()
    lengths = torch.full((60,), 8)
    values = ContinuousTimeHMM(first, rates, seen, lengths, times).sample()
    return Sequences(values, lengths, times=times)


def dense(step=None):
    return DenseHMM(2, 4, dim=2).double()


def begun(data):
    """An HMM after one iteration."""
    return fit_em(TabularHMM(2, normal(0)), data, num_iterations=1, restarts=1).hmm(data)


FITS = {
    "symbols": (lambda: TabularHMM(2, categorical(4)), symbols, {}),
    "restarts": (lambda: TabularHMM(2, categorical(4)), symbols, {"restarts": 3}),
    "hard zeros": (
        lambda: TabularHMM(3, normal(0), transition_allowed=left_to_right(3)), numbers, {}
    ),
    "covariances": (lambda: TabularHMM(2, normal_full(2)), vectors, {"restarts": 2}),
    "points": (lambda: begun(numbers()), numbers, {}),
    "rates": (lambda: TabularContinuousTimeHMM(3, categorical(3)), panel, {}),
    "gradients": (dense, symbols, {}),
    "Adam": (dense, symbols,
             {"gradient_step": GradientStep(5, lambda p: torch.optim.Adam(p, lr=0.1))}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "growth"),  # the latter proposes what is far from any good
    [*((name, 4.0) for name in FITS), ("restarts", 1e9), ("rates", 1e9)],
)
def test_the_log_joint_never_falls(name, growth, monkeypatch):
    monkeypatch.setattr(of_em, "GROWTH", growth)
    make, data, options = FITS[name]
    data, found = data(), []
    for acceleration in (True, False):
        pyro.set_rng_seed(0)
        module, options = make(), {"num_iterations": 20, "tolerance": None, **options}
        fit = fit_em(module, data, acceleration=acceleration, **options)
        losses = fit.losses[None] if fit.restarts is None else fit.restarts.losses
        assert losses.isfinite().all()
        assert (losses.diff() <= 1e-9 * losses.abs().max()).all()
        assert fit.notes == []
        found.append(losses)
    fast, slow = found
    torch.testing.assert_close(fast[:, :3], slow[:, :3])
    if growth == 4.0:
        assert not fast[:, 3:].allclose(slow[:, 3:], rtol=1e-12)  # it has taken another way
        assert fast[:, -1].min() <= slow[:, -1].min() + 1e-3


def test_it_takes_a_fraction_of_the_iterations():
    """Of states that are hard to tell apart; both end at the same maximum."""
    losses = []
    for acceleration in (True, False):
        pyro.set_rng_seed(3)
        module = TabularContinuousTimeHMM(3, categorical(3))
        options = {
            "num_iterations": 1500,
            "tolerance": 1e-7,
            "acceleration": acceleration,
            "restarts": 1,
        }
        losses.append(fit_em(module, panel(), **options).losses)
    fast, slow = losses
    assert fast[-1] <= slow[-1] + 1e-3
    assert 2 * len(fast) < len(slow)


def test_a_loss_of_zero_has_not_been_falling():
    """Where the data are certain no share of the loss is small, and a fit takes all steps."""
    data = Sequences(torch.tensor([0, 1] * 20).unsqueeze(0), torch.tensor([40]))
    fit = fit_em(TabularHMM(2, categorical(2)), data, num_iterations=200)
    assert fit.losses[-1] == 0
    assert not fit.notes


def test_a_sticky_start_has_states_that_last():
    start = starts.sticky(0.9)
    values = start(TabularHMM(3, categorical(4)), symbols(), 2)
    rows = values["transition"].squeeze(1)
    assert (rows.diagonal(dim1=-2, dim2=-1) >= 0.9).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 3))
    with pytest.raises(ValueError, match="prior of its transition matrix"):
        start(DenseHMM(2, 4, dim=2), symbols(), 1)


def test_its_steps_are_those_of_squarem_in_numpy():
    """On a slow linear iteration: theta' = theta + 2 s r + s^2 v, with s = |r| / |v|, bounded."""
    matrix, shift = np.array([[0.97, 0.02], [0.1, 0.6]]), np.array([0.3, -1.0])
    real = torch.distributions.constraints.real_vector
    sites, supports = {"x": SimpleNamespace(event_shape=torch.Size([2]))}, {"x": real}
    values = {"x": torch.tensor([[4.0, -2.0]])}
    parameters = SimpleNamespace(
        values=values, points=[], restarts=1, sites=sites, supports=supports
    )
    parameters.stacked = lambda: dict(parameters.values)
    steps = of_em.Extrapolation(parameters, SimpleNamespace(leaves={}), True)
    steps.record()
    theta, longest = np.array([4.0, -2.0]), of_em.GROWTH
    for _ in range(8):
        for _ in range(2):
            moved = parameters.values["x"].numpy() @ matrix.T + shift
            parameters.values["x"] = torch.tensor(moved)
            steps.record()
        first = matrix @ theta + shift
        second = matrix @ first + shift
        r, v = first - theta, second - 2 * first + theta
        s = np.clip(np.linalg.norm(r) / np.linalg.norm(v), 1.0, longest)
        longest *= of_em.GROWTH if s == longest else 1.0
        theta = theta + 2 * s * r + s**2 * v
        np.testing.assert_allclose(parameters.values["x"][0], theta, rtol=1e-9)
        if steps.proposed:
            steps.undo(torch.tensor([False]))
            steps.record()
