"""Sequences, minibatches of them, vocabularies, readers and data sets.

Imports :mod:`pyrohmm.ops`.
"""

from . import datasets as datasets
from . import readers as readers
from .sequences import Sequences as Sequences
from .vocabulary import Vocabulary as Vocabulary
