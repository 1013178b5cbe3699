"""Estimators of scikit-learn, with the methods and attributes of hmmlearn.

Imports scikit-learn, and is therefore not imported by ``import pyrohmm``; nothing else imports it.

Its modules; each imports only those above it:

``monitor``     ``ConvergenceMonitor``: how a fit went
``base``        ``SequenceEstimator``: tables of data in, answers for each row out
``tabular``     EM for the estimators whose parameters are arrays
``estimators``  ``GaussianHMM``, ``GMMHMM``, ``CategoricalHMM``, ``PoissonHMM``
``modules``     ``HMMEstimator``: any module as an estimator
"""

from .estimators import CategoricalHMM as CategoricalHMM
from .estimators import GaussianHMM as GaussianHMM
from .estimators import GMMHMM as GMMHMM
from .estimators import PoissonHMM as PoissonHMM
from .modules import HMMEstimator as HMMEstimator
from .monitor import ConvergenceMonitor as ConvergenceMonitor
