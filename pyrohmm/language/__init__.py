"""Language models with tens of thousands of states, word clusters, and the command.

Imports all other rooms.

Its modules; each imports only those above it:

``clusters``  Brown clusters of words
``model``     ``LanguageModel``
``command``   ``python -m pyrohmm.language``
"""

from . import clusters as clusters
from .model import END as END
from .model import UNKNOWN as UNKNOWN
from .model import LanguageModel as LanguageModel
from .model import WarmupCosine as WarmupCosine
from .model import count_words as count_words
from .model import encode as encode
from .model import find_clusters as find_clusters
