"""Files: saved models, checkpoints, conversion from and to other packages.

Imports the rooms down to ``nn``.

Its modules; each imports only those above it:

``files``        files of tensors and plain data, written whole or not at all
``persistence``  ``save``, ``load_hmm``, ``load_into``
``checkpoints``  the file from which a fit resumes, and what makes a fit the same
``hmmlearn``     models of hmmlearn as HMMs, and back
``ctrlg``        models of Ctrl-G, HMMs of tokens, and back
"""

from .ctrlg import from_ctrlg as from_ctrlg
from .ctrlg import to_ctrlg as to_ctrlg
from .hmmlearn import from_hmmlearn as from_hmmlearn
from .hmmlearn import to_hmmlearn as to_hmmlearn
from .persistence import load_hmm as load_hmm
from .persistence import load_into as load_into
from .persistence import save as save
