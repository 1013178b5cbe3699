"""Every fit of every kind of module works, or says in one sentence why it does not."""

import pyro
import pytest
import torch
from every_fit import FITS, MODULES, symbols

import pyrohmm
from pyrohmm import (
    HMM,
    DiversityPrior,
    MarginalModel,
    NeuralTagger,
    TabularHMM,
    categorical,
    fit_em,
    fit_map,
    fit_svi,
)
from pyrohmm.chains import MarkovChain


def test_every_public_module_is_here():
    apart = {NeuralTagger, pyrohmm.HMMModule}  # of other data, or of none
    kinds = {
        thing
        for thing in vars(pyrohmm).values()
        if isinstance(thing, type) and issubclass(thing, pyrohmm.HMMModule)
    }
    assert {kind.__name__ for kind in kinds - apart} == set(MODULES)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", MODULES)
def test_a_fit_works_or_says_why_not(name, fit):
    make, data = MODULES[name]
    try:
        found = FITS[fit](make(), data())
    except (TypeError, ValueError, NotImplementedError) as error:
        message = str(error).split("\n")[0]  # Pyro adds the shapes of a trace
        assert message.rstrip().endswith((".", ")")), message
        assert any(word in message for word in REFUSALS), message
        assert "'NoneType'" not in message
    else:
        assert all(value.isfinite().all() for value in found.parameters.values())


# What refusals name: the module, its parameters or the fit, and what to take instead.
REFUSALS = ("prior", "Use ", "Take ", "use ", "must ", "need", "Give ", "Build ")


class Ring(MarkovChain):
    """A chain of one's own."""


def test_a_chain_of_ones_own_is_not_taken_for_another():
    even = torch.full((2, 2), 0.5).log()
    emission = torch.distributions.Categorical(torch.full((2, 3), 1 / 3))
    hmm = HMM.of(Ring(even[0], even), emission, torch.tensor([3]))
    with pytest.raises(TypeError, match="no module has the parameters of a Ring"):
        fit_em(hmm, symbols())
    assert (
        fit_em(HMM(even[0], even, emission, torch.tensor([3])), symbols()).losses.isfinite().all()
    )


def test_a_guide_that_begins_where_a_diversity_prior_has_no_slope_is_told():
    model = MarginalModel(TabularHMM(2, categorical(3)), DiversityPrior(2.0))
    data = symbols()
    guide = pyro.infer.autoguide.AutoDelta(model)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), pyro.infer.Trace_ELBO())
    with pytest.raises(ValueError, match="init_to_sample"):
        svi.step(data)
    with pytest.raises(ValueError, match="init_to_sample"):
        fit_svi(model, pyro.infer.autoguide.AutoDelta(model), data, num_iterations=2)
    guide = pyro.infer.autoguide.AutoDelta(model, init_loc_fn=pyro.infer.autoguide.init_to_sample)
    assert fit_svi(model, guide, data, num_iterations=2).losses.isfinite().all()
    assert fit_map(model, data, num_iterations=2).losses.isfinite().all()


def test_a_sampler_that_steps_to_where_all_rows_are_one_corner_turns_back():
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    log_density = DiversityPrior(2.0)(rows)
    log_density.backward()
    assert log_density == -torch.inf
    assert not rows.grad.isnan().any()
