"""``PyroModule``s whose call returns an ``HMM``: tabular, dense, neural; and families of emissions.

Imports the rooms above: :mod:`pyrohmm.ops`, :mod:`pyrohmm.data`, :mod:`pyrohmm.distributions`.
"""

from . import dense as dense
from . import emissions as emissions
from . import tagging as tagging
