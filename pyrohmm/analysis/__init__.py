"""After a fit: metrics, posterior queries, filtering, posterior samples, plots.

Imports the rooms down to ``infer``.

Its modules; each imports only those above it:

``metrics``         perplexity, information criteria; usage of states, agreement with a truth
``dwell_times``     how long a chain stays in a state; visits of a path
``queries``         best paths, entropy, prediction, imputation, pseudo-residuals; all queries
``streaming``       ``Filter``: online filtering
``draws``           ``PosteriorDraws``: samples of a posterior as HMMs
``inference_data``  ``to_arviz``
``plot_axes``       axes, names and tables of pictures
``plot_emissions``  pictures of emissions
``plots``           pictures of chains, paths of states, predictions and fits
``model_check``     simulated data beside the data, residuals, calibration, a page about a fit
"""

from . import draws as draws
from . import inference_data as inference_data
from . import metrics as metrics
from . import plots as plots
from . import queries as queries
from .draws import PosteriorDraws as PosteriorDraws
from .draws import load_draws as load_draws
from .inference_data import to_arviz as to_arviz
from .model_check import calibrate as calibrate
from .model_check import check_model as check_model
from .model_check import report as report
from .streaming import Filter as Filter
