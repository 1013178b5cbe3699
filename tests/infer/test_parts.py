"""The parts of a loss, each by itself, and their sum."""

import pyro
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyrohmm import (
    DiversityPrior,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
)

DATA = Sequences.from_list([[0, 1, 2, 1], [2, 2, 0], [1]])
PRIOR = DiversityPrior(2.0)


def module():
    return TabularHMM(2, categorical(3, 1.3), 1.2, 1.5)


@pytest.mark.parametrize("prior", [None, PRIOR])
@pytest.mark.parametrize("restarts", [1, 3])
def test_parts_of_em_sum_to_its_last_loss(prior, restarts):
    fit = fit_em(module(), DATA, log_prior=prior, restarts=restarts, num_iterations=5)
    parts = fit.parts(DATA)
    assert sum(parts.values()).item() == pytest.approx(fit.losses[-1].item())
    hmm = fit.hmm(DATA)
    assert parts["x"].item() == pytest.approx(-hmm.log_prob(DATA.values).sum().item())
    rows = pyro.distributions.Dirichlet(torch.full((2, 2), 1.5))
    wanted = -rows.log_prob(fit.parameters["module.transition"]).sum()
    assert parts["module.transition"].item() == pytest.approx(wanted.item())
    if prior is not None:
        assert parts["log_prior"].item() == pytest.approx(-prior(hmm).item())


def test_parts_of_map_sum_to_the_loss_of_the_next_step():
    pyro.set_rng_seed(0)
    first = fit_map(MarginalModel(module(), PRIOR), DATA, num_iterations=7, tolerance=None)
    pyro.set_rng_seed(0)
    longer = fit_map(MarginalModel(module(), PRIOR), DATA, num_iterations=8, tolerance=None)
    assert sum(first.parts(DATA).values()).item() == pytest.approx(longer.losses[-1].item())


def test_parts_of_svi_are_those_of_a_sample():
    model = MarginalModel(module())
    guide = AutoNormal(model)
    fit = fit_svi(model, guide, DATA, num_iterations=3)
    pyro.set_rng_seed(1)
    parts = fit.parts(DATA)
    assert {name.split(": ")[0] for name in parts if name not in fit.names} == {"guide", "x"}
    with fit.at_rest():
        pyro.set_rng_seed(1)
        loss = pyro.infer.Trace_ELBO().loss(model, guide, DATA)
    assert sum(parts.values()).item() == pytest.approx(loss)
