"""The bootstrap and profiles: against fits of EM, one by one, and closed forms."""

import math

import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal
from scipy.optimize import brentq
from torch.distributions import constraints

from pyrohmm import (
    HMM,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    poisson,
)
from pyrohmm.infer.replicates import Copies
from pyrohmm.ops.newton import climb

COINS = HMM(
    torch.tensor([0.6, 0.4]).log(),
    torch.tensor([[0.85, 0.15], [0.3, 0.7]]).log(),
    Categorical(torch.tensor([[0.9, 0.1], [0.2, 0.8]])),
    torch.tensor([40] * 19 + [1]),
)
TIGHT = {"tolerance": 1e-11, "num_iterations": 3000}


def coins(seed=0):
    pyro.set_rng_seed(seed)
    observed = torch.ones(20, 40, dtype=torch.bool)
    observed[3, 5:9] = False
    data = Sequences(COINS.sample(), COINS.lengths, observed)
    return data, fit_em(TabularHMM(2, categorical(2, 1.1)), data, start=COINS_START, **TIGHT)


def test_rows_climb_to_their_own_maxima():
    """Of functions that need few steps, many, none, and that have no value at the start."""
    centre = torch.tensor([[1.0, 2.0], [-30.0, 1.5], [0.0, 0.0], [3.0, 3.0]]).double()
    scale = torch.tensor([[1.0, 1.0], [1.0, 50.0], [2.0, 2.0], [1.0, 1.0]]).double()
    seen = []

    def function(place, rows):
        seen.append(len(rows))
        away = (place - centre[rows]) * scale[rows]
        value = -(away.square() / 2 + away**4 / 40).sum(-1)
        slope = -(away + away**3 / 10) * scale[rows]
        lost = rows == 3
        return value.masked_fill(lost, -torch.inf), slope.masked_fill(lost.unsqueeze(-1), torch.nan)

    peak = climb(function, torch.zeros(4, 2).double())
    torch.testing.assert_close(peak.place[:3], centre[:3], rtol=0, atol=1e-3)
    assert peak.converged.tolist() == [True, True, True, False]
    assert seen[0] == 4
    assert seen[1] == 2
    assert seen[-1] == 1


COINS_START = {
    "initial": torch.tensor([0.6, 0.4]),
    "transition": torch.tensor([[0.85, 0.15], [0.3, 0.7]]),
    "emission.probs": torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
}


@pytest.mark.parametrize("by", ["values", "weights", "labels"])
def test_each_copy_ends_where_em_does(by):
    data, fit = coins()
    if by == "labels":
        labels = torch.full((20, 40), -1)
        labels[:, ::3] = fit.hmm(data).sample_states(data.values)[:, ::3]
        data = Sequences(data.values, data.lengths, data.observed, labels=labels)
        fit = fit_em(fit.model.module, data, start=COINS_START, **TIGHT)
    information = fit.information(data)
    pyro.set_rng_seed(1)
    if by == "weights":
        weights = torch.randint(3, (3, 20)).double()
        copies = Copies(information, [{"weights": weights}])
        sets = [data[torch.arange(20).repeat_interleave(row.long())] for row in weights]
    else:
        values, states = COINS.sample_with_states(torch.Size([3]))
        labels = None if by == "values" else torch.where(data.labels >= 0, states, -1)
        each = {"values": values} | ({} if labels is None else {"labels": labels})
        copies = Copies(information, [each])
        sets = [
            Sequences(x, data.lengths, data.observed, None if labels is None else labels[i])
            for i, x in enumerate(values)
        ]
    peak = copies.peaks(3, tolerance=1e-10)
    assert peak.converged.all()
    found = information.values_at(copies.at(peak.place))
    for i, part in enumerate(sets):
        single = fit_em(fit.model.module, part, start=COINS_START, **TIGHT)
        for name, value in single.parameters.items():
            torch.testing.assert_close(found[name][i, 0].float(), value, rtol=0, atol=3e-3)
        torch.testing.assert_close(peak.value[i].float(), -single.losses[-1].float(), rtol=1e-6,
                                   atol=1e-3)  # fmt: skip


@pytest.mark.parametrize("parametric", [True, False])
def test_the_spread_of_replicates_is_that_of_the_textbook(parametric):
    pyro.set_rng_seed(1)
    data = Sequences.from_list([torch.poisson(torch.full((n,), 3.0)) for n in [20] * 40 + [1]])
    fit = fit_em(TabularHMM(1, poisson(rate=1e-9)), data)
    replicates = fit.bootstrap(data, 800, parametric=parametric)
    rate = fit.parameters["module.emission.rate"].double()
    sums = [(data.values[i, :n].sum() - rate * n).square() for i, n in enumerate(data.lengths)]
    wanted = (rate / 801).sqrt() if parametric else sum(sums).sqrt().double() / 801
    error = replicates.std_errors()["module.emission.rate"]
    torch.testing.assert_close(error, wanted.reshape(1), rtol=0.1, atol=0)
    low, high = replicates.intervals(0.9)["module.emission.rate"]
    torch.testing.assert_close((high - low) / 2, 1.645 * wanted.reshape(1), rtol=0.15, atol=0)
    assert low < rate < high
    assert replicates.failed == replicates.switched == 0
    assert replicates.parameters["module.initial"].shape == (800, 1)


def test_functions_and_parameters_without_priors():
    data, fit = coins(1)
    pyro.set_rng_seed(0)
    point = fit_em(TabularHMM.from_hmm(fit.hmm(data)), data, **TIGHT)
    limits = point.intervals(data, method="bootstrap")
    curved = point.intervals(data)
    for name, (low, high) in limits.items():
        widths = (high - low) / (curved[name][1] - curved[name][0])
        assert ((widths > 0.7) & (widths < 2)).all(), name
    low, high = point.intervals(data, of=lambda hmm: hmm.stationary(), method="bootstrap")["of"]
    assert low.shape == (2,)
    assert (low < fit.hmm(data).stationary()).all()
    assert (high > fit.hmm(data).stationary()).all()


def test_a_model_of_groups_in_pyro():
    """Parameters in a plate, and one of ``pyro.param``."""
    pyro.set_rng_seed(2)
    group = torch.arange(12) % 3
    values = torch.tensor([-2.0, 0.0, 3.0])[group].unsqueeze(-1) + torch.randn(12, 30)
    data = Sequences(values, torch.full((12,), 30))

    def model(data):
        scale = pyro.param("scale", torch.ones(1), constraint=constraints.positive)
        with pyro.plate("groups", 3):
            level = pyro.sample("level", Normal(0.0, 10.0))
        loc = level[..., group].unsqueeze(-1)  # (N, K) of one state
        zero = torch.zeros(1, dtype=loc.dtype)
        hmm = HMM(zero, zero.unsqueeze(0), Normal(loc, scale), data.lengths)
        with pyro.plate("sequences", len(data)):
            pyro.sample("x", hmm, obs=data.values)
        return hmm

    fit = fit_map(model, data, num_iterations=800, learning_rate=0.03)
    replicates = fit.bootstrap(data, 400)
    assert replicates.parameters["level"].shape == (400, 3)
    wanted = fit.std_errors(data)
    for name, error in replicates.std_errors().items():
        torch.testing.assert_close(error, wanted[name], rtol=0.2, atol=0)


def test_profiles_of_one_state_are_those_of_textbooks():
    def ends(rise, estimate, low, high):
        """Where twice the fall of a log-likelihood is the quantile of chi-square."""
        fall = lambda x: 2 * (rise(estimate) - rise(x)) - 3.841458820694124  # noqa: E731
        return brentq(fall, low, estimate), brentq(fall, estimate, high)

    data = Sequences.from_list([[0, 1, 1, 1, 0], [1], [1, 1, 2, 2, 1, 1]])
    fit = fit_em(TabularHMM(1, categorical(3)), data)
    name = "module.emission.probs[0, 2]"
    low, high = fit.intervals(data, of=name, method="profile")[name]
    wanted = ends(lambda p: 2 * math.log(p) + 10 * math.log(1 - p), 2 / 12, 1e-9, 1 - 1e-9)
    assert (float(low), float(high)) == pytest.approx(wanted, rel=2e-3)

    fit = fit_em(TabularHMM(1, poisson(rate=1e-9)), data)
    name = "module.emission.rate[0]"
    low, high = fit.intervals(data, of=name, method="profile")[name]
    wanted = ends(lambda r: 12 * math.log(r) - 12 * r, 1.0, 1e-9, 50.0)
    assert (float(low), float(high)) == pytest.approx(wanted, rel=2e-3)


def test_a_profile_that_does_not_fall_ends_at_the_boundary():
    """Three sequences, of which two start in one state: any share is possible at 99.9 %."""
    data = Sequences.from_list([[0, 0], [1, 1], [0, 1]])
    fit = fit_em(TabularHMM(2, categorical(2)), data.without_labels(), start=COINS_START)
    known = Sequences(data.values, data.lengths, labels=data.values)
    fit = fit_em(TabularHMM(2, categorical(2, 1.5), 1.01, 1.5), known)
    name = "module.initial[0]"
    low, high = fit.intervals(known, level=0.999, of=name, method="profile")[name]
    inner = fit.intervals(known, of=name, method="profile")[name]
    assert 0 <= low < inner[0] < inner[1] < high <= 1


def test_a_copy_whose_states_have_changed_places_is_known():
    data, fit = coins()
    information = fit.information(data)
    moved = []
    for part in information.coordinates:  # logits against the largest of a row
        other = part.estimate.flip(0) if part.estimate.dim() == 1 else part.estimate.flip((0,))
        other = other.flip(-1) if "transition" in part.name else other
        largest = part.estimate.argmax(-1, keepdim=True)
        logits = [p.log() - p.log().gather(-1, largest) for p in (part.estimate, other)]
        free = torch.ones_like(other, dtype=torch.bool).scatter(-1, largest, False)
        moved.append((logits[1] - logits[0])[free])
    u = torch.stack([torch.zeros(len(information.labels)).double(), torch.cat(moved)])
    values = information.values_at(u)["module.transition"][1, 0]
    torch.testing.assert_close(values, fit.parameters["module.transition"].flip(0, 1).double())
    assert Copies(information).matched(u).tolist() == [True, False]


def test_proportions_have_their_covariance_and_intervals_that_are_complements():
    data = Sequences.from_list([[0, 1, 1, 2, 0, 1]])
    names, matrix = fit_em(TabularHMM(1, categorical(4)), data).covariance(data)
    p = torch.tensor([2.0, 3.0, 1.0]).double() / 6
    wanted = (p.diag() - p.outer(p)) / 6
    chosen = [names.index(f"module.emission.probs[0, {k}]") for k in range(3)]
    torch.testing.assert_close(matrix[chosen][:, chosen], wanted)
    assert matrix[names.index("module.emission.probs[0, 3]")].isnan().all()
    coin = Sequences.from_list([[1] + [0] * 19])  # of 200 replicates, some 80 are as the estimate
    fit = fit_em(TabularHMM(1, categorical(2)), coin)
    low, high = fit.bootstrap(coin).intervals()["module.emission.probs"]
    torch.testing.assert_close(low, 1 - high.flip(-1))
    assert bool((low < (probs := fit.parameters["module.emission.probs"])).all())
    assert bool((probs < high - 1e-3).all())
