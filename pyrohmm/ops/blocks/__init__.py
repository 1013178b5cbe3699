"""Chains in blocks of states: which states may emit which symbol, and all recursions over that.

``from_clusters`` says which blocks there are. The modules, each of which
imports only those above it:

``states``          ``Blocks``
``transitions``     transitions between blocks, and sums over those from and to all states
``_numba``          compiled loops over scaled messages
``recursions``      evidence and gradient, by these or by torch; steps may be missing
``inner_products``  transitions and emissions by inner products
"""

from .states import Blocks as Blocks
from .states import from_clusters as from_clusters
