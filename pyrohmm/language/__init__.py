"""Language models with tens of thousands of states, word clusters, and the command.

Imports all other rooms.

Its modules; each imports only those above it:

``text``        sentences as lines of words and as codes
``clusters``    Brown clusters of words
``schedule``    ``WarmupCosine``, of the learning rate
``dropout``     ``default_dropout``, of states, by tokens and epochs
``contiguous``  sentences read as one text
``generation``  sentences sampled from an HMM in blocks
``steering``    ``Steering``: sentences that satisfy a constraint
``storage``     files of a language model
``model``       ``LanguageModel``
``command``     ``python -m pyrohmm.language``
"""

from . import clusters as clusters
from .clusters import find_clusters as find_clusters
from .dropout import DefaultDropout as DefaultDropout
from .dropout import default_dropout as default_dropout
from .model import LanguageModel as LanguageModel
from .schedule import WarmupCosine as WarmupCosine
from .steering import Steering as Steering
from .text import END as END
from .text import UNKNOWN as UNKNOWN
from .text import count_words as count_words
from .text import encode as encode
