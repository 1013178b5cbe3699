"""Chains in blocks of states: which states may emit which symbol, and all recursions over that.

``Blocks``, ``from_clusters`` and ``uniform`` say which blocks there are. The modules, each of which
imports only those above it:

``plan``            which pairs of blocks occur in a batch, and where they lie in memory
``transitions``     sums over transitions between blocks, and from and to all states
``messages``        torch: messages and evidence in logarithms; steps may be missing
``queries``         torch: posterior queries, best paths and sampled paths, by those
``_numba``          compiled loops over scaled messages
``recursions``      evidence, gradient and last state, by these or by torch
``states``          ``Blocks``
``inner_products``  transitions and emissions by inner products
"""

from .states import Blocks as Blocks
from .states import from_clusters as from_clusters
from .states import uniform as uniform
