"""Conversion to ArviZ: every number in it is one that a loop over samples gives."""

import itertools

import arviz
import numpy as np
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_svi,
    inference_data,
    normal,
    to_arviz,
)

LENGTHS = torch.tensor([6, 4, 1])
OBSERVED = torch.ones(3, 6, dtype=torch.bool)
OBSERVED[0, 2] = OBSERVED[1, 0] = False
SYMBOLS = torch.randint(4, (3, 6), generator=torch.Generator().manual_seed(0))


def from_prior(model, data, chains=2, count=3):
    rows = []
    for _ in range(chains * count):
        trace = poutine.trace(model).get_trace(data)
        rows.append({n: trace.nodes[n]["value"] for n in trace.stochastic_nodes if "." in n})
    return {
        name: torch.stack([row[name] for row in rows]).detach().unflatten(0, (chains, count))
        for name in rows[0]
    }


def cases(kind):
    if kind == "symbols":
        model = MarginalModel(TabularHMM(3, categorical(4, 2.0)))
        return model, Sequences(SYMBOLS, LENGTHS, OBSERVED)
    values = torch.randn(3, 6, 2)
    values[0, 1, 0] = torch.nan  # one component of a vector
    return MarginalModel(TabularHMM(3, normal(2))), Sequences(values, LENGTHS, OBSERVED)


@pytest.mark.parametrize("kind", ["symbols", "vectors"])
def test_likelihoods_are_those_of_a_loop_over_draws(kind):
    model, data = cases(kind)
    values = from_prior(model, data)
    found = to_arviz(values, data, model, per_step=True, batch_size=2)
    whole = found["log_likelihood"]["x"].transpose("chain", "draw", "sequence").values
    steps = found["log_likelihood"]["x_step"].transpose("chain", "draw", "sequence", "step").values
    joint = found["sample_stats"]["lp"].values
    for c, s in itertools.product(range(2), range(3)):
        one = poutine.condition(model, {name: each[c, s] for name, each in values.items()})
        hmm = one(data)
        np.testing.assert_allclose(whole[c, s], hmm.log_prob(data.values).numpy())
        trace = poutine.trace(one).get_trace(data)
        np.testing.assert_allclose(joint[c, s], trace.log_prob_sum().item())
        # one step ahead: the evidence of the first t steps less that of the first t - 1
        for n, length in enumerate(LENGTHS.tolist()):
            before = 0.0
            for t in range(6):
                if t >= length or not OBSERVED[n, t]:
                    assert np.isnan(steps[c, s, n, t])
                    continue
                start = Sequences(
                    data.values[n : n + 1, : t + 1],
                    torch.tensor([t + 1]),
                    OBSERVED[n : n + 1, : t + 1],
                )
                upto = one(start).log_prob(start.values).item()
                np.testing.assert_allclose(steps[c, s, n, t], upto - before)
                before = upto
    np.testing.assert_allclose(np.nansum(steps, -1), whole)


def test_groups_and_their_dimensions():
    model, data = cases("vectors")
    values = from_prior(model, data)
    found = to_arviz(values, data, model, per_step=True, num_predictive=2)
    draw = ("chain", "draw")
    dims = {
        "posterior": {
            "module.initial": (*draw, "state"),
            "module.transition": (*draw, "state", "next_state"),
            "module.emission.loc": (*draw, "state", "module.emission.loc_dim_1"),
            "module.emission.variance": (*draw, "state", "module.emission.variance_dim_1"),
            "log_evidence": draw, "effective_states": draw, "transition_entropy": draw,
            "occupancy": (*draw, "rank"),
        },
        "log_likelihood": {"x": (*draw, "sequence"), "x_step": (*draw, "sequence", "step")},
        "sample_stats": {"lp": draw},
        "posterior_predictive": {"x": (*draw, "sequence", "step", "x_dim_0")},
        "observed_data": {"x": ("sequence", "step", "x_dim_0")},
    }  # fmt: skip
    for group, names in dims.items():
        assert {name: part.dims for name, part in found[group].data_vars.items()} == names
    assert found["posterior_predictive"]["x"].shape == (2, 2, 3, 6, 2)
    for name, value in values.items():
        np.testing.assert_array_equal(found["posterior"][name].values, value.numpy())
    seen = found["observed_data"]["x"].values
    np.testing.assert_array_equal(seen[OBSERVED & data.exists], data.values[data.observed].numpy())
    gaps = np.isnan(found["posterior_predictive"]["x"].values).any(-1)
    np.testing.assert_array_equal(gaps, np.broadcast_to(~data.observed.numpy(), gaps.shape))


def test_replicated_data_follow_the_model():
    """With one state they are independent symbols, of the probabilities of their draw."""
    model = MarginalModel(TabularHMM(1, categorical(3)))
    data = Sequences(torch.zeros(20, 50).long(), torch.full((20,), 50))
    values = from_prior(model, data, 1, 4)
    found = to_arviz(values, data, model, num_predictive=4)["posterior_predictive"]["x"].values
    for s in range(4):
        shares = np.bincount(found[0, s].ravel(), minlength=3) / 1000
        probs = values["module.emission.probs"][0, s, 0].numpy()
        np.testing.assert_allclose(shares, probs, atol=0.06)  # four standard errors


@pytest.mark.filterwarnings("ignore:Estimated shape parameter")  # of five samples
def test_a_variational_fit_needs_no_model():
    model, data = cases("symbols")
    fit = fit_svi(model, AutoNormal(model), data, num_iterations=3, progress=False)
    found = to_arviz(fit, data, num_draws=5)
    assert dict(found["posterior"].sizes) == {
        "chain": 1, "draw": 5, "state": 3, "next_state": 3, "symbol": 4, "rank": 3,
    }  # fmt: skip
    assert arviz.loo(found).n_data_points == len(data)
    assert "log_evidence" in inference_data.summary(found).index
