"""``PyroModule``s whose call returns an ``HMM``, and families of emissions.

Imports ``ops``, ``data`` and ``distributions``.

Its modules; each imports only those above it:

``base``             ``HMMModule``: what every module of this room is
``closed_form``      the M-step of EM: what a module or an emission defines
``family``           ``Emission``: base of the emission families
``emissions``        emissions from any distribution
``discrete``         symbols, zeros and ones, counts
``normals``          normal components, mixtures of them
``covariances``      normal vectors with covariances, alone or autoregressive
``newton``           log-normal, Weibull, beta, Student t, negative binomial, gamma; angles
``composed``           joined streams; shared, zero-inflated, censored, truncated emissions
``regression``       linear predictors of covariates; ``regression`` of emissions
``tabular``            ``TabularHMM``, second order, stationary; ``StickyHDPHMM``
``durations``        families of durations: free, geometric, Poisson, negative binomial, any
``tabular_times``    ``TabularHSMM``: explicit durations; ``TabularContinuousTimeHMM``: rates
``regression_hmm``   ``RegressionHMM``: covariates of chains of all kinds
``factorial``        ``TabularFactorialHMM``: several chains; additive emissions
``dense``            ``DenseHMM``: softmax of inner products of embeddings
``neural``           ``NeuralHMM``: tens of thousands of states
``tagging``          ``NeuralTagger``: a neural HMM of words and tags
"""

from . import dense as dense
from . import durations as durations
from . import emissions as emissions
from . import tagging as tagging
from .base import HMMModule as HMMModule
from .base import freeze as freeze
from .composed import censored as censored
from .composed import streams as streams
from .composed import tied as tied
from .composed import truncated as truncated
from .composed import zero_inflated as zero_inflated
from .covariances import autoregressive_normal as autoregressive_normal
from .covariances import normal_full as normal_full
from .covariances import normal_tied as normal_tied
from .dense import DenseHMM as DenseHMM
from .discrete import autoregressive_categorical as autoregressive_categorical
from .discrete import bernoulli as bernoulli
from .discrete import categorical as categorical
from .discrete import poisson as poisson
from .durations import free_durations as free_durations
from .durations import geometric_durations as geometric_durations
from .durations import negative_binomial_durations as negative_binomial_durations
from .durations import parametric_durations as parametric_durations
from .durations import poisson_durations as poisson_durations
from .emissions import parametric as parametric
from .factorial import TabularFactorialHMM as TabularFactorialHMM
from .factorial import additive_bernoulli as additive_bernoulli
from .factorial import additive_normal as additive_normal
from .neural import LinearDropout as LinearDropout
from .neural import NeuralHMM as NeuralHMM
from .newton import beta as beta
from .newton import gamma as gamma
from .newton import log_normal as log_normal
from .newton import negative_binomial as negative_binomial
from .newton import student_t as student_t
from .newton import von_mises as von_mises
from .newton import weibull as weibull
from .newton import wrapped_cauchy as wrapped_cauchy
from .normals import normal as normal
from .normals import normal_mixture as normal_mixture
from .normals import normal_spherical as normal_spherical
from .regression import regression as regression
from .regression_hmm import RegressionHMM as RegressionHMM
from .tabular import StationaryHMM as StationaryHMM
from .tabular import StickyHDPHMM as StickyHDPHMM
from .tabular import TabularHMM as TabularHMM
from .tabular import TabularSecondOrderHMM as TabularSecondOrderHMM
from .tabular import banded as banded
from .tabular import left_to_right as left_to_right
from .tabular import sticky as sticky
from .tabular_times import TabularContinuousTimeHMM as TabularContinuousTimeHMM
from .tabular_times import TabularHSMM as TabularHSMM
from .tagging import NeuralTagger as NeuralTagger
