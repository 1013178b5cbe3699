"""Language models with tens of thousands of states, word clusters, and the command.

Imports all other rooms.

Its modules; each imports only those above it:

``ngram_mixture``  ``NGramMixture``: a neural HMM mixed with an n-gram
``kneser_ney``     ``ngram``: Kneser-Ney n-grams, alone or for an ``NGramMixture``
``text``           sentences as lines of words, as codes, and as samples
``clusters``       Brown clusters of words
``training``       the fit, its learning rate and state dropout
``steering``       ``Steering``: sentences that satisfy a constraint, and how probable it is
``tokens``         constraints on tokens, from those on words and from regular expressions
``control``        ``ConstraintProcessor``: another model's texts that satisfy a constraint
``distillation``   ``distil``: an HMM that imitates another model
``model``          ``LanguageModel``
``command``        ``python -m pyrohmm.language``
"""

from . import clusters as clusters
from .clusters import find_clusters as find_clusters
from .control import ConstraintProcessor as ConstraintProcessor
from .distillation import Distilled as Distilled
from .distillation import distil as distil
from .kneser_ney import NGram as NGram
from .kneser_ney import ngram as ngram
from .model import LanguageModel as LanguageModel
from .ngram_mixture import NGramBlockHMM as NGramBlockHMM
from .ngram_mixture import NGramMixture as NGramMixture
from .ngram_mixture import NGramProbs as NGramProbs
from .ngram_mixture import NGramWeights as NGramWeights
from .steering import Steering as Steering
from .text import END as END
from .text import UNKNOWN as UNKNOWN
from .text import count_words as count_words
from .text import encode as encode
from .text import open_corpus as open_corpus
from .text import write_corpus as write_corpus
from .tokens import matching as matching
from .tokens import over_tokens as over_tokens
from .training import DefaultDropout as DefaultDropout
from .training import WarmupCosine as WarmupCosine
from .training import default_dropout as default_dropout
