"""Files: saved models, checkpoints, conversion from and to other packages.

Imports the rooms down to ``nn``.

Its modules; each imports only those above it:

``files``        files of tensors and plain data, written whole or not at all; checkpoints
``persistence``  ``save``, ``load_hmm``, ``load_into``, ``load_formulas``
``conversion``   models of hmmlearn and of Ctrl-G as HMMs, and back
"""

from .conversion import from_ctrlg as from_ctrlg
from .conversion import from_hmmlearn as from_hmmlearn
from .conversion import to_ctrlg as to_ctrlg
from .conversion import to_hmmlearn as to_hmmlearn
from .persistence import load_formulas as load_formulas
from .persistence import load_hmm as load_hmm
from .persistence import load_into as load_into
from .persistence import save as save
