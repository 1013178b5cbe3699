"""Hidden Markov models as Pyro components: exact, fast, fitted by MAP, SVI or EM."""

from . import cooccurrence as cooccurrence
from . import datasets as datasets
from . import metrics as metrics
from . import plots as plots
from . import readers as readers
from . import recursions as recursions
from .fit import Fit as Fit
from .fit import fit_map as fit_map
from .fit import fit_svi as fit_svi
from .hmm import HMM as HMM
from .hmm import Forecast as Forecast
from .models import EnumeratedModel as EnumeratedModel
from .models import MarginalModel as MarginalModel
from .models import markov_sample as markov_sample
from .modules import HMMModule as HMMModule
from .recursions import Posterior as Posterior
from .sequences import Sequences as Sequences
from .tabular import TabularHMM as TabularHMM
from .tabular import categorical as categorical
from .tabular import normal as normal

__all__ = [
    "HMM",
    "EnumeratedModel",
    "Fit",
    "Forecast",
    "HMMModule",
    "MarginalModel",
    "Posterior",
    "Sequences",
    "TabularHMM",
    "categorical",
    "cooccurrence",
    "datasets",
    "fit_map",
    "fit_svi",
    "markov_sample",
    "metrics",
    "normal",
    "plots",
    "readers",
    "recursions",
]
