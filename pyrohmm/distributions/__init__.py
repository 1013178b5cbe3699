"""Pyro distributions: HMMs whose states are summed out, emissions joined of others, priors.

Imports :mod:`pyrohmm.ops` and :mod:`pyrohmm.data`.
"""

from . import block_hmm as block_hmm
from . import dpp as dpp
from .block_hmm import BlockHMM as BlockHMM
from .dpp import DiverseDirichlet as DiverseDirichlet
from .dpp import DiversityPrior as DiversityPrior
from .forecast import Forecast as Forecast
from .hmm import HMM as HMM
from .inverse_wishart import InverseWishart as InverseWishart
from .inverse_wishart import covariance_matrix as covariance_matrix
from .observation import Streams as Streams
from .observation import Tied as Tied
from .observation import in_each_state as in_each_state
from .observation import is_categorical as is_categorical
from .observation import known_log_prob as known_log_prob
from .observation import log_probs as log_probs
from .sparse_dirichlet import SparseDirichlet as SparseDirichlet
from .sparse_dirichlet import interior as interior
from .tagged_hmm import TaggedHMM as TaggedHMM
