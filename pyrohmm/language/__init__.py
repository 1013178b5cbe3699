"""Language models with tens of thousands of states, word clusters, and the command.

Imports all other rooms.

Its modules; each imports only those above it:

``text``          sentences as lines of words and as codes
``clusters``      Brown clusters of words
``training``      the fit, its learning rate and state dropout
``scoring``       log-probabilities of sentences and of their words
``generation``    samples of sentences
``files``         a model in a directory
``lookahead``     probability that a constraint will hold, by state
``steering``      ``Steering``: sentences that satisfy a constraint
``control``       ``ConstraintProcessor``: another model's texts that satisfy a constraint
``patterns``      regular expressions as constraints on tokens
``distillation``  ``distil``: an HMM that imitates another model
``model``         ``LanguageModel``
``command``       ``python -m pyrohmm.language``
"""

from . import clusters as clusters
from .clusters import find_clusters as find_clusters
from .control import ConstraintProcessor as ConstraintProcessor
from .control import over_tokens as over_tokens
from .distillation import Distilled as Distilled
from .distillation import distil as distil
from .model import LanguageModel as LanguageModel
from .patterns import matching as matching
from .steering import Steering as Steering
from .text import END as END
from .text import UNKNOWN as UNKNOWN
from .text import count_words as count_words
from .text import encode as encode
from .training import DefaultDropout as DefaultDropout
from .training import WarmupCosine as WarmupCosine
from .training import default_dropout as default_dropout
