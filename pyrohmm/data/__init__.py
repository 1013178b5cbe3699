"""Sequences, minibatches, vocabularies, readers and data sets.

Imports ``ops``.

Its modules; each imports only those above it:

``vocabulary``   ``Vocabulary``: symbols and their codes
``steps``        steps of arrays and lists: read, checked, cut into sequences
``tables``       rows of tables: grouped, sorted, their gaps found
``packed``       rows of sequences one after another; padded, selected, cut into buckets
``sequences``    ``Sequences``: made of arrays, lists and tables
``movement``     step lengths and turning angles of animals
``parts``        ``StoredSequences``, ``Parts``: sequences that do not fit into memory at once
``batches``      minibatches, and the shares of ranks
``readers``      files of text, with their vocabularies
``formulas``     design matrices of covariates from formulas
``datasets``     simulated data, English that comes with Python
"""

from . import datasets as datasets
from . import readers as readers
from .formulas import formulas as formulas
from .movement import movement as movement
from .parts import StoredSequences as StoredSequences
from .sequences import Sequences as Sequences
from .vocabulary import Vocabulary as Vocabulary
