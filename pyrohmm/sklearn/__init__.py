"""Estimators of scikit-learn, with the methods and attributes of hmmlearn.

Imports scikit-learn, and is therefore not imported by ``import pyrohmm``; nothing else imports it.

Its modules; each imports only those above it:

``base``     ``SequenceEstimator``: tables of data in, answers for each row out
``tabular``  EM for the estimators whose parameters are arrays
``normals``  ``GaussianHMM``, ``GMMHMM``: normal vectors, and mixtures of them
``counts``   ``CategoricalHMM``, ``PoissonHMM``: symbols, and vectors of counts
``modules``  ``HMMEstimator``: any module as an estimator
"""

from .base import ConvergenceMonitor as ConvergenceMonitor
from .counts import CategoricalHMM as CategoricalHMM
from .counts import PoissonHMM as PoissonHMM
from .modules import HMMEstimator as HMMEstimator
from .normals import GMMHMM as GMMHMM
from .normals import GaussianHMM as GaussianHMM
