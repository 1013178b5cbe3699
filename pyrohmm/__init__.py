"""Hidden Markov models as Pyro components: exact, fast, fitted by MAP, SVI or EM."""

from . import distributions as distributions
from . import language as language
from ._version import __version__ as __version__
from .analysis import draws as draws
from .analysis import inference_data as inference_data
from .analysis import metrics as metrics
from .analysis import plots as plots
from .analysis import queries as queries
from .analysis.draws import PosteriorDraws as PosteriorDraws
from .analysis.inference_data import to_arviz as to_arviz
from .analysis.model_check import check_model as check_model
from .analysis.model_check import report as report
from .analysis.streaming import Filter as Filter
from .chains.base import ExpectedCounts as ExpectedCounts
from .data import datasets as datasets
from .data import readers as readers
from .data.formulas import formulas as formulas
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
from .infer import guides as guides
from .infer import msteps as msteps
from .infer import starts as starts
from .infer.cooccurrence import CooccurrenceModel as CooccurrenceModel
from .infer.cooccurrence import fit_cooccurrence as fit_cooccurrence
from .infer.em import fit_em as fit_em
from .infer.gibbs import fit_gibbs as fit_gibbs
from .infer.gradient import fit_map as fit_map
from .infer.gradient import fit_svi as fit_svi
from .infer.guides import RotationGuide as RotationGuide
from .infer.mcmc import fit_mcmc as fit_mcmc
from .infer.models import EnumeratedModel as EnumeratedModel
from .infer.models import MarginalModel as MarginalModel
from .infer.models import StatefulModel as StatefulModel
from .infer.models import markov_sample as markov_sample
from .infer.models import scale_priors as scale_priors
from .infer.msteps import GradientStep as GradientStep
from .infer.nuts import RowPermutationNUTS as RowPermutationNUTS
from .infer.options import FitOptions as FitOptions
from .infer.resizing import merge_states as merge_states
from .infer.resizing import split_state as split_state
from .infer.results import Fit as Fit
from .infer.results import Restarts as Restarts
from .infer.sampled import SampledFit as SampledFit
from .io.hmmlearn import from_hmmlearn as from_hmmlearn
from .io.hmmlearn import to_hmmlearn as to_hmmlearn
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
from .nn.circular import von_mises as von_mises
from .nn.composed import streams as streams
from .nn.composed import tied as tied
from .nn.continuous_time import TabularContinuousTimeHMM as TabularContinuousTimeHMM
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
from .nn.neural import ScalarHMM as ScalarHMM
from .nn.ngram import NGramMixture as NGramMixture
from .nn.normals import normal as normal
from .nn.normals import normal_mixture as normal_mixture
from .nn.normals import normal_spherical as normal_spherical
from .nn.regression import RegressionHMM as RegressionHMM
from .nn.regression import regression as regression
from .nn.tabular import StationaryHMM as StationaryHMM
from .nn.tabular import StickyHDPHMM as StickyHDPHMM
from .nn.tabular import TabularHMM as TabularHMM
from .nn.tabular import TabularSecondOrderHMM as TabularSecondOrderHMM
from .nn.tabular import banded as banded
from .nn.tabular import left_to_right as left_to_right
from .nn.tabular import sticky as sticky
from .nn.tabular_hsmm import TabularHSMM as TabularHSMM
from .nn.tagging import NeuralTagger as NeuralTagger
from .nn.waiting import gamma as gamma
from .ops import automata as automata
from .ops import blocks as blocks
from .ops import factorial as factorial
from .ops import recursions as recursions
from .ops import second_order as second_order
from .ops import semi_markov as semi_markov
from .ops.recursions import Posterior as Posterior

__all__ = [
    "HMM",
    "HSMM",
    "BlockHMM",
    "ContinuousTimeHMM",
    "CooccurrenceModel",
    "DenseHMM",
    "DiversityPrior",
    "EnumeratedModel",
    "ExpectedCounts",
    "FactorialHMM",
    "Filter",
    "Fit",
    "FitOptions",
    "Forecast",
    "GradientStep",
    "HMMModule",
    "LanguageModel",
    "LinearChainCRF",
    "MarginalModel",
    "NGramMixture",
    "NeuralHMM",
    "NeuralTagger",
    "Posterior",
    "PosteriorDraws",
    "RegressionHMM",
    "Restarts",
    "RotationGuide",
    "RowPermutationNUTS",
    "SampledFit",
    "ScalarHMM",
    "SecondOrderHMM",
    "Sequences",
    "StatefulModel",
    "StationaryHMM",
    "StickyHDPHMM",
    "TabularContinuousTimeHMM",
    "TabularFactorialHMM",
    "TabularHMM",
    "TabularHSMM",
    "TabularSecondOrderHMM",
    "TaggedHMM",
    "__version__",
    "additive_bernoulli",
    "additive_normal",
    "automata",
    "autoregressive_categorical",
    "autoregressive_normal",
    "banded",
    "bernoulli",
    "block_hmm",
    "blocks",
    "categorical",
    "check_model",
    "clusters",
    "cooccurrence",
    "datasets",
    "dense",
    "distributions",
    "dpp",
    "draws",
    "durations",
    "em",
    "emissions",
    "factorial",
    "fit_cooccurrence",
    "fit_em",
    "fit_gibbs",
    "fit_map",
    "fit_mcmc",
    "fit_svi",
    "formulas",
    "free_durations",
    "freeze",
    "from_hmmlearn",
    "gamma",
    "geometric_durations",
    "guides",
    "inference_data",
    "language",
    "left_to_right",
    "load_hmm",
    "load_into",
    "markov_sample",
    "merge_states",
    "metrics",
    "msteps",
    "negative_binomial_durations",
    "normal",
    "normal_full",
    "normal_mixture",
    "normal_spherical",
    "normal_tied",
    "parametric",
    "parametric_durations",
    "plots",
    "poisson",
    "poisson_durations",
    "queries",
    "readers",
    "recursions",
    "regression",
    "report",
    "save",
    "scale_priors",
    "second_order",
    "semi_markov",
    "split_state",
    "starts",
    "sticky",
    "streams",
    "tagging",
    "tied",
    "to_arviz",
    "to_hmmlearn",
    "von_mises",
]
