"""Language models with tens of thousands of states, word clusters, and the command.

Imports all other rooms.
"""

from . import clusters as clusters
from .model import END as END
from .model import UNKNOWN as UNKNOWN
from .model import LanguageModel as LanguageModel
from .model import RiseAndFall as RiseAndFall
from .model import count_words as count_words
from .model import encode as encode
from .model import find_clusters as find_clusters
