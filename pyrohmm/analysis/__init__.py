"""After a fit: metrics, posterior queries, online filtering, posterior samples, ArviZ, plots.

Imports the rooms above, down to :mod:`pyrohmm.infer`.
"""

from . import draws as draws
from . import inference_data as inference_data
from . import metrics as metrics
from . import plots as plots
from . import queries as queries
