"""Pyro distributions: HMMs whose states are summed out, emissions, priors.

Imports ``ops`` and ``data``.

Its modules; each imports only those above it:

``sparse``                 Dirichlet rows, and Gamma variables, with exact zeros
``units``                  priors of data in any unit
``hard_zeros``             exact log- and cumulative probabilities; arguments of a distribution
``modified``               wrapped Cauchy, von Mises; zero-inflated, censored, truncated
``linear_emissions``       emissions whose log-probabilities are a product of matrices
``observation``            joined and tied emissions; log-probabilities per state
``values``                 observations and labels as the recursions read them
``autoregressive``         emissions that depend on those before: their base; symbols, vectors
``forecast``               quantiles; sampling given states; ``Forecast``: future observations
``base``                   ``ChainDistribution``: parameters, masks and data joined
``crf``                    ``LinearChainCRF``: labels given scores of a network
``hmm``                    ``HMM``: a distribution over whole sequences
``structured_hmm``         ``HSMM``, ``FactorialHMM``, ``SecondOrderHMM``: HMMs of other chains
``continuous_time_hmm``    ``ContinuousTimeHMM``: sequences observed at times of their own
``block_hmm``              ``BlockHMM``: states in blocks, tens of thousands of them
``tagged_hmm``             ``TaggedHMM``: states that emit a word and a tag
``dpp``                    the determinantal prior of the diversified HMM
"""

from . import block_hmm as block_hmm
from . import dpp as dpp
from .autoregressive import Autoregressive as Autoregressive
from .autoregressive import AutoregressiveCategorical as AutoregressiveCategorical
from .autoregressive import AutoregressiveNormal as AutoregressiveNormal
from .block_hmm import BlockHMM as BlockHMM
from .continuous_time_hmm import ContinuousTimeHMM as ContinuousTimeHMM
from .crf import LinearChainCRF as LinearChainCRF
from .dpp import DiversityPrior as DiversityPrior
from .forecast import AutoregressiveForecast as AutoregressiveForecast
from .forecast import Forecast as Forecast
from .hard_zeros import log_probs as log_probs
from .hmm import HMM as HMM
from .modified import Censored as Censored
from .modified import Truncated as Truncated
from .modified import WrappedCauchy as WrappedCauchy
from .modified import ZeroInflated as ZeroInflated
from .observation import Streams as Streams
from .observation import Tied as Tied
from .observation import is_categorical as is_categorical
from .observation import log_prob_per_state as log_prob_per_state
from .observation import marginal_log_prob as marginal_log_prob
from .sparse import SparseDirichlet as SparseDirichlet
from .sparse import SparseGamma as SparseGamma
from .sparse import interior as interior
from .structured_hmm import HSMM as HSMM
from .structured_hmm import FactorialHMM as FactorialHMM
from .structured_hmm import SecondOrderHMM as SecondOrderHMM
from .tagged_hmm import TaggedHMM as TaggedHMM
from .units import InverseWishart as InverseWishart
from .units import covariance_matrix as covariance_matrix
