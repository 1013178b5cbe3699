"""Sequences, minibatches, vocabularies, readers and data sets.

Imports ``ops``.

Its modules; each imports only those above it:

``vocabulary``     ``Vocabulary``: symbols and their codes
``arguments``      what the arguments of ``Sequences`` may be
``tables``         rows of arrays and tables, cut into sequences
``sequences``      ``Sequences``: ragged data in one padded tensor
``parts``          ``Parts``: sequences that do not fit into memory at once
``batches``        minibatches by number of sequences or of steps
``pair_counts``    pairs of symbols counted; numbers put into bins
``tags``           words and tags joined as one observation
``corpus``         ``Corpus``: sequences with the names of their symbols and tags
``readers``        files of text, treebanks, proteins, letters
``simulated``      data simulated from known parameters
``datasets``       public files with checksums, and embedded text
"""

from . import datasets as datasets
from . import readers as readers
from .parts import StoredSequences as StoredSequences
from .sequences import Sequences as Sequences
from .vocabulary import Vocabulary as Vocabulary
