"""Inference: the Pyro models, the fits, guides, initial values, results.

Imports the rooms above, down to :mod:`pyrohmm.io`.
"""

from . import cooccurrence as cooccurrence
from . import em as em
from . import guides as guides
from . import msteps as msteps
from . import starts as starts
