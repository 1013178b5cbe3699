"""Hidden Markov models as Pyro components: exact, fast, fitted by MAP, SVI or EM.

A table becomes sequences, a module is fitted to them, and the fit is asked for states::

    data = Sequences.from_dataframe(frame, columns="x", by="who", time="day")
    fit = fit_em(TabularHMM(2, normal(0)), data, restarts=8)
    frame = data.to_dataframe(states=fit.predict(data), probs=fit.predict_proba(data))

Data:

``Sequences``     sequences of different lengths: from_list, from_concatenated, from_dataframe
``formulas``      columns of covariates by formulas, such as "~ bs(hour, df=4)"
``movement``      steps and turns of tracks
``datasets``      simulated data and English text; ``readers`` of lines, sentences, letters

Modules, whose parameters are fitted; ``freeze`` holds one at a value:

``TabularHMM``    first-order Markov chain; ``StationaryHMM``, ``StickyHDPHMM`` are kinds of it
``RegressionHMM``  transitions, rates and emissions that depend on covariates
``TabularHSMM``   explicit durations: ``free_durations``, ``poisson_durations``,
                  ``negative_binomial_durations``, ``geometric_durations``, ``parametric_durations``
``TabularContinuousTimeHMM``  irregular times; ``TabularSecondOrderHMM``, ``TabularFactorialHMM``
``DenseHMM``, ``NeuralHMM``, ``NeuralTagger``  embeddings, and networks for thousands of states
``HMMModule``     base of your own; ``left_to_right``, ``banded``, ``sticky`` transitions

Emissions, the second argument of a module:

``categorical``, ``autoregressive_categorical``, ``bernoulli``, ``poisson``, ``negative_binomial``
``normal``, ``normal_full``, ``normal_tied``, ``normal_spherical``, ``autoregressive_normal``,
``normal_mixture``, ``student_t``, ``log_normal``, ``gamma``, ``weibull``, ``beta``
``von_mises``, ``wrapped_cauchy``  angles in radians
``regression``    of covariates; ``parametric`` of any distribution of Pyro
``additive_normal``, ``additive_bernoulli``  of several chains
``streams``, ``zero_inflated``, ``censored``, ``truncated``, ``tied``  of other emissions

Fits, each of which returns a ``Fit``:

``fit_em``        EM with restarts; ``GradientStep`` where a parameter has no closed form
``fit_map``, ``fit_svi``  gradients, of modules or any Pyro model; ``FitOptions`` of both
``fit_gibbs``, ``fit_mcmc``  samples of the posterior, a ``SampledFit``
``fit_laplace``   random effects, a ``LaplaceFit``
``fit_cooccurrence``  counts of neighbours: ``CooccurrenceModel``
``MarginalModel``, ``EnumeratedModel``, ``StatefulModel``, ``markov_sample``, ``scale_priors``
                  a module as a Pyro model; ``DiversityPrior`` and others of its HMM
``merge_states``, ``split_state``  another number of states; ``Restarts`` of a fit; ``starts``

Afterwards:

``fit.predict``, ``predict_proba``, ``score``, ``forecast``, ``intervals``, ``summary``
``HMM``           the distribution: log_prob, posterior, viterbi, ``Forecast``; ``HSMM``,
                  ``ContinuousTimeHMM``, ``FactorialHMM``, ``SecondOrderHMM``, ``BlockHMM``,
                  ``TaggedHMM``, ``LinearChainCRF``; ``Posterior`` and ``ExpectedCounts`` of them
``report``, ``check_model``, ``calibrate``  whether model and data agree, and inference is right
``metrics``, ``queries``, ``plots``  perplexity, BIC, cross-validation; imputation, k best; pictures
``Filter``        online, step by step
``PosteriorDraws``, ``to_arviz``  samples with aligned states, for ArviZ
``save``, ``load_fit``, ``load_hmm``, ``load_into``, ``load_draws``, ``load_formulas``  files that
                  cannot run code
``from_hmmlearn``, ``to_hmmlearn``, ``from_ctrlg``, ``to_ctrlg``
``LanguageModel``  of text; ``python -m pyrohmm.language``
"""

from . import distributions as distributions
from . import language as language
from ._imports import __version__ as __version__
from .analysis import draws as draws
from .analysis import inference_data as inference_data
from .analysis import metrics as metrics
from .analysis import plots as plots
from .analysis import queries as queries
from .analysis.draws import PosteriorDraws as PosteriorDraws
from .analysis.draws import load_draws as load_draws
from .analysis.inference_data import to_arviz as to_arviz
from .analysis.model_check import calibrate as calibrate
from .analysis.model_check import check_model as check_model
from .analysis.model_check import report as report
from .analysis.streaming import Filter as Filter
from .chains import semi_markov as semi_markov
from .chains.base import ExpectedCounts as ExpectedCounts
from .data import datasets as datasets
from .data import readers as readers
from .data.formulas import formulas as formulas
from .data.movement import movement as movement
from .data.sequences import Sequences as Sequences
from .distributions import block_hmm as block_hmm
from .distributions import dpp as dpp
from .distributions.block_hmm import BlockHMM as BlockHMM
from .distributions.continuous_time_hmm import ContinuousTimeHMM as ContinuousTimeHMM
from .distributions.crf import LinearChainCRF as LinearChainCRF
from .distributions.dpp import DiversityPrior as DiversityPrior
from .distributions.forecast import Forecast as Forecast
from .distributions.hmm import HMM as HMM
from .distributions.structured_hmm import HSMM as HSMM
from .distributions.structured_hmm import FactorialHMM as FactorialHMM
from .distributions.structured_hmm import SecondOrderHMM as SecondOrderHMM
from .distributions.tagged_hmm import TaggedHMM as TaggedHMM
from .infer import cooccurrence as cooccurrence
from .infer import em as em
from .infer import msteps as msteps
from .infer import starts as starts
from .infer.cooccurrence import CooccurrenceModel as CooccurrenceModel
from .infer.cooccurrence import fit_cooccurrence as fit_cooccurrence
from .infer.descent import FitOptions as FitOptions
from .infer.em import fit_em as fit_em
from .infer.gibbs import fit_gibbs as fit_gibbs
from .infer.gradient import fit_map as fit_map
from .infer.gradient import fit_svi as fit_svi
from .infer.laplace import LaplaceFit as LaplaceFit
from .infer.laplace import fit_laplace as fit_laplace
from .infer.mcmc import fit_mcmc as fit_mcmc
from .infer.models import EnumeratedModel as EnumeratedModel
from .infer.models import MarginalModel as MarginalModel
from .infer.models import StatefulModel as StatefulModel
from .infer.models import markov_sample as markov_sample
from .infer.models import scale_priors as scale_priors
from .infer.msteps import GradientStep as GradientStep
from .infer.resizing import merge_states as merge_states
from .infer.resizing import split_state as split_state
from .infer.results import Fit as Fit
from .infer.results import Restarts as Restarts
from .infer.sampled import SampledFit as SampledFit
from .infer.saved import load_fit as load_fit
from .io.conversion import from_ctrlg as from_ctrlg
from .io.conversion import from_hmmlearn as from_hmmlearn
from .io.conversion import to_ctrlg as to_ctrlg
from .io.conversion import to_hmmlearn as to_hmmlearn
from .io.persistence import load_formulas as load_formulas
from .io.persistence import load_hmm as load_hmm
from .io.persistence import load_into as load_into
from .io.persistence import save as save
from .language import clusters as clusters
from .language.model import LanguageModel as LanguageModel
from .nn import dense as dense
from .nn import durations as durations
from .nn import emissions as emissions
from .nn import tagging as tagging
from .nn.base import HMMModule as HMMModule
from .nn.base import freeze as freeze
from .nn.composed import censored as censored
from .nn.composed import streams as streams
from .nn.composed import tied as tied
from .nn.composed import truncated as truncated
from .nn.composed import zero_inflated as zero_inflated
from .nn.covariances import autoregressive_normal as autoregressive_normal
from .nn.covariances import normal_full as normal_full
from .nn.covariances import normal_tied as normal_tied
from .nn.dense import DenseHMM as DenseHMM
from .nn.discrete import autoregressive_categorical as autoregressive_categorical
from .nn.discrete import bernoulli as bernoulli
from .nn.discrete import categorical as categorical
from .nn.discrete import poisson as poisson
from .nn.durations import free_durations as free_durations
from .nn.durations import geometric_durations as geometric_durations
from .nn.durations import negative_binomial_durations as negative_binomial_durations
from .nn.durations import parametric_durations as parametric_durations
from .nn.durations import poisson_durations as poisson_durations
from .nn.emissions import parametric as parametric
from .nn.factorial import TabularFactorialHMM as TabularFactorialHMM
from .nn.factorial import additive_bernoulli as additive_bernoulli
from .nn.factorial import additive_normal as additive_normal
from .nn.neural import NeuralHMM as NeuralHMM
from .nn.newton import beta as beta
from .nn.newton import gamma as gamma
from .nn.newton import log_normal as log_normal
from .nn.newton import negative_binomial as negative_binomial
from .nn.newton import student_t as student_t
from .nn.newton import von_mises as von_mises
from .nn.newton import weibull as weibull
from .nn.newton import wrapped_cauchy as wrapped_cauchy
from .nn.normals import normal as normal
from .nn.normals import normal_mixture as normal_mixture
from .nn.normals import normal_spherical as normal_spherical
from .nn.regression import regression as regression
from .nn.regression_hmm import RegressionHMM as RegressionHMM
from .nn.tabular import StationaryHMM as StationaryHMM
from .nn.tabular import StickyHDPHMM as StickyHDPHMM
from .nn.tabular import TabularHMM as TabularHMM
from .nn.tabular import TabularSecondOrderHMM as TabularSecondOrderHMM
from .nn.tabular import banded as banded
from .nn.tabular import left_to_right as left_to_right
from .nn.tabular import sticky as sticky
from .nn.tabular_times import TabularContinuousTimeHMM as TabularContinuousTimeHMM
from .nn.tabular_times import TabularHSMM as TabularHSMM
from .nn.tagging import NeuralTagger as NeuralTagger
from .ops import automata as automata
from .ops import blocks as blocks
from .ops import recursions as recursions
from .ops.recursions import Posterior as Posterior

__all__ = [n for n, x in vars().items() if n[0] != "_" and callable(x)]
__all__ += ["metrics", "plots", "queries", "starts"]  # no other module
