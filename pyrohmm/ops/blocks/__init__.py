"""Chains in blocks of states: which states may emit which symbol, and all recursions over that.

``from_clusters`` says which blocks there are. The modules, each of which
imports only those above it:

``states``          ``Blocks``
``pairs``           transitions within the pairs of blocks that occur
``transitions``     transitions between blocks, and sums over those from and to all states
``recursions``      evidence and gradient, where no step is missing
``inner_products``  transitions and emissions by inner products
"""

from .states import Blocks as Blocks
from .states import from_clusters as from_clusters
