"""Files: saved models, checkpoints, conversion from and to other packages.

Imports the rooms above, down to :mod:`pyrohmm.nn`.
"""

from .hmmlearn import from_hmmlearn as from_hmmlearn
from .hmmlearn import to_hmmlearn as to_hmmlearn
from .persistence import load_hmm as load_hmm
from .persistence import load_into as load_into
from .persistence import save as save
