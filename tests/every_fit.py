"""Every kind of module with data for it, and every fit, a few steps of it."""

import pyro
import torch

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    NeuralHMM,
    RegressionHMM,
    Sequences,
    StationaryHMM,
    StickyHDPHMM,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    categorical,
    fit_cooccurrence,
    fit_em,
    fit_gibbs,
    fit_laplace,
    fit_map,
    fit_mcmc,
    fit_svi,
    free_durations,
)


def symbols(**further):
    generator = torch.Generator().manual_seed(0)
    return Sequences(
        torch.randint(3, (3, 8), generator=generator), torch.tensor([8, 5, 8]), **further
    )


def bare():
    return symbols()


MODULES = {
    "TabularHMM": (lambda: TabularHMM(2, categorical(3)), bare),
    "TabularHSMM": (lambda: TabularHSMM(2, categorical(3), free_durations(3)), bare),
    "TabularSecondOrderHMM": (lambda: TabularSecondOrderHMM(2, categorical(3)), bare),
    "TabularFactorialHMM": (lambda: TabularFactorialHMM((2, 2), categorical(3)), bare),
    "TabularContinuousTimeHMM": (
        lambda: TabularContinuousTimeHMM(2, categorical(3)),
        lambda: symbols(times=torch.arange(8.0).expand(3, -1)),
    ),
    "StationaryHMM": (lambda: StationaryHMM(2, categorical(3)), bare),
    "StickyHDPHMM": (lambda: StickyHDPHMM(2, categorical(3), kappa=(1.0, 1.0)), bare),
    "DenseHMM": (lambda: DenseHMM(2, 3, dim=2), bare),
    "NeuralHMM": (lambda: NeuralHMM(4, 3, 8), bare),
    "RegressionHMM": (
        lambda: RegressionHMM(2, categorical(3), [0], prior_scale=1.0),
        lambda: symbols(covariates=torch.ones(3, 8, 1)),
    ),
}
FITS = {
    "fit_em": lambda module, data: fit_em(module, data, num_iterations=2),
    "fit_map": lambda module, data: fit_map(MarginalModel(module), data, num_iterations=2),
    "fit_svi": lambda module, data: svi(MarginalModel(module), data),
    "fit_gibbs": lambda module, data: fit_gibbs(
        module, data, num_samples=2, warmup=2, num_chains=2, progress=False
    ),
    "fit_mcmc": lambda module, data: fit_mcmc(
        MarginalModel(module), data, num_samples=2, warmup=2, num_chains=2, progress=False
    ),
    "fit_laplace": lambda module, data: fit_laplace(
        MarginalModel(module), data, random=["initial"], num_steps=2
    ),
    "fit_cooccurrence": lambda module, data: fit_cooccurrence(module, data, num_iterations=2),
}


def svi(model, data):
    guide = pyro.infer.autoguide.AutoNormal(model, init_loc_fn=pyro.infer.autoguide.init_to_sample)
    return fit_svi(model, guide, data, num_iterations=2)
