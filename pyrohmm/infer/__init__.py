"""Inference: the Pyro models, the fits, guides, initial values, results.

Imports the rooms down to ``io``.

Its modules; each imports only those above it:

``process_group``  ``ProcessGroup``: data-parallel ranks
``models``        ``MarginalModel``, ``EnumeratedModel``, ``StatefulModel``; one fit at a time
``coordinates``   unconstrained coordinates of variables, as one vector
``plates``        values of latent variables: of each sequence, of guides, at a point
``msteps``        ``GradientStep``, and M-steps under a diversity prior
``graphs``        steps captured as CUDA graphs, and replayed
``loop``          ``FitLoop``: steps, why they end, a progress bar, checkpoints
``descent``       ``FitOptions``: arguments of gradient fits; optimizer, averages, held-out evidence
``objective``     the loss of a gradient fit
``layouts``       whether samples of a posterior may lie side by side in a model
``importance``    variables of new sequences given their data, by importance sampling
``parameters``    the parameters of an EM fit, and their extrapolation by SQUAREM
``maximization``  the M-step: closed forms and gradient steps
``iterations``    the iterations of EM, and the E-step, batched by length
``starts``        where EM begins
``resizing``      merge and split of states
``uncertainty``   ``Information``: standard errors and intervals
``replicates``    ``Bootstrap``, and profiles of the likelihood: many fits of one model
``bands``         predictions at other covariates, with limits
``results``       ``Fit``, ``Restarts``: what a fit returns; tables
``training``      the training loop
``gradient``      ``fit_svi``, ``fit_map``
``marginal``      log marginal likelihoods with random effects, by Laplace's approximation
``laplace``       ``fit_laplace``: random effects by marginal likelihood; weights of smooth terms
``cooccurrence``  ``fit_cooccurrence``, ``CooccurrenceModel``
``em``            ``fit_em``
``sampled``       ``SampledFit``: chains of samples, whether they agree, tempering
``mcmc``          ``fit_mcmc``: Hamiltonian Monte Carlo of many chains in one batch
``gibbs``         ``fit_gibbs``
``saved``         ``load_fit``
"""

from . import cooccurrence as cooccurrence
from . import em as em
from . import msteps as msteps
from . import starts as starts
from .cooccurrence import CooccurrenceModel as CooccurrenceModel
from .cooccurrence import fit_cooccurrence as fit_cooccurrence
from .descent import FitOptions as FitOptions
from .em import fit_em as fit_em
from .gibbs import fit_gibbs as fit_gibbs
from .gradient import fit_map as fit_map
from .gradient import fit_svi as fit_svi
from .laplace import LaplaceFit as LaplaceFit
from .laplace import fit_laplace as fit_laplace
from .mcmc import fit_mcmc as fit_mcmc
from .models import EnumeratedModel as EnumeratedModel
from .models import MarginalModel as MarginalModel
from .models import StatefulModel as StatefulModel
from .models import markov_sample as markov_sample
from .models import scale_priors as scale_priors
from .msteps import GradientStep as GradientStep
from .resizing import merge_states as merge_states
from .resizing import split_state as split_state
from .results import Fit as Fit
from .results import Restarts as Restarts
from .sampled import SampledFit as SampledFit
from .saved import load_fit as load_fit
from .uncertainty import Information as Information
