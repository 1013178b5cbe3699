"""Estimators of scikit-learn, with the methods and attributes of hmmlearn.

Imports scikit-learn, and is therefore not imported by ``import pyrohmm``; nothing else imports it.

Its modules; each imports only those above it:

``estimators``  ``HMMEstimator``: any module as an estimator; the queries of all estimators
``arrays``      ``GaussianHMM``, ``GMMHMM``, ``CategoricalHMM``, ``PoissonHMM``, as in hmmlearn
"""

from .arrays import GMMHMM as GMMHMM
from .arrays import CategoricalHMM as CategoricalHMM
from .arrays import GaussianHMM as GaussianHMM
from .arrays import PoissonHMM as PoissonHMM
from .estimators import ConvergenceMonitor as ConvergenceMonitor
from .estimators import HMMEstimator as HMMEstimator
