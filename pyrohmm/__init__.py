"""Hidden Markov models as Pyro components: exact, fast, fitted by MAP, SVI or EM."""

from . import block_hmm as block_hmm
from . import blocks as blocks
from . import clusters as clusters
from . import cooccurrence as cooccurrence
from . import datasets as datasets
from . import dense as dense
from . import distributions as distributions
from . import dpp as dpp
from . import draws as draws
from . import em as em
from . import emissions as emissions
from . import guides as guides
from . import inference_data as inference_data
from . import language as language
from . import metrics as metrics
from . import msteps as msteps
from . import plots as plots
from . import queries as queries
from . import readers as readers
from . import recursions as recursions
from . import starts as starts
from . import tagging as tagging
from .block_hmm import BlockHMM as BlockHMM
from .conversion import from_hmmlearn as from_hmmlearn
from .conversion import to_hmmlearn as to_hmmlearn
from .dense import DenseHMM as DenseHMM
from .dpp import DiversityPrior as DiversityPrior
from .draws import Draws as Draws
from .em import fit_em as fit_em
from .emissions import bernoulli as bernoulli
from .emissions import categorical as categorical
from .emissions import parametric as parametric
from .emissions import poisson as poisson
from .emissions import streams as streams
from .emissions import tied as tied
from .fit import fit_cooccurrence as fit_cooccurrence
from .fit import fit_map as fit_map
from .fit import fit_svi as fit_svi
from .guides import RotationGuide as RotationGuide
from .hmm import HMM as HMM
from .hmm import Forecast as Forecast
from .inference_data import to_arviz as to_arviz
from .language import LanguageModel as LanguageModel
from .models import CarriedModel as CarriedModel
from .models import CooccurrenceModel as CooccurrenceModel
from .models import EnumeratedModel as EnumeratedModel
from .models import MarginalModel as MarginalModel
from .models import markov_sample as markov_sample
from .modules import HMMModule as HMMModule
from .modules import freeze as freeze
from .msteps import GradientStep as GradientStep
from .neural import NeuralHMM as NeuralHMM
from .neural import ScalarHMM as ScalarHMM
from .normals import normal as normal
from .normals import normal_full as normal_full
from .normals import normal_mixture as normal_mixture
from .normals import normal_spherical as normal_spherical
from .normals import normal_tied as normal_tied
from .persistence import load_hmm as load_hmm
from .persistence import load_into as load_into
from .persistence import save as save
from .recursions import Expected as Expected
from .recursions import Posterior as Posterior
from .results import Fit as Fit
from .results import Restarts as Restarts
from .sequences import Sequences as Sequences
from .streaming import Filter as Filter
from .tabular import TabularHMM as TabularHMM
from .tabular import banded as banded
from .tabular import left_to_right as left_to_right
from .tabular import sticky as sticky
from .tagging import NeuralTagger as NeuralTagger
from .tagging import TaggedHMM as TaggedHMM

__all__ = [
    "HMM",
    "BlockHMM",
    "CarriedModel",
    "CooccurrenceModel",
    "DenseHMM",
    "DiversityPrior",
    "Draws",
    "EnumeratedModel",
    "Expected",
    "Filter",
    "Fit",
    "Forecast",
    "GradientStep",
    "HMMModule",
    "LanguageModel",
    "MarginalModel",
    "NeuralHMM",
    "NeuralTagger",
    "Posterior",
    "Restarts",
    "RotationGuide",
    "ScalarHMM",
    "Sequences",
    "TabularHMM",
    "TaggedHMM",
    "banded",
    "bernoulli",
    "block_hmm",
    "blocks",
    "categorical",
    "clusters",
    "cooccurrence",
    "datasets",
    "dense",
    "distributions",
    "dpp",
    "draws",
    "em",
    "emissions",
    "fit_cooccurrence",
    "fit_em",
    "fit_map",
    "fit_svi",
    "freeze",
    "from_hmmlearn",
    "guides",
    "inference_data",
    "language",
    "left_to_right",
    "load_hmm",
    "load_into",
    "markov_sample",
    "metrics",
    "msteps",
    "normal",
    "normal_full",
    "normal_mixture",
    "normal_spherical",
    "normal_tied",
    "parametric",
    "plots",
    "poisson",
    "queries",
    "readers",
    "recursions",
    "save",
    "starts",
    "sticky",
    "streams",
    "tagging",
    "tied",
    "to_arviz",
    "to_hmmlearn",
]
