"""Tensor algorithms that know no model.

Imports nothing of the package but its private helpers.

Its modules; each imports only those above it:

``masks``             which steps exist
``sampling``          ancestral sampling of paths
``log_space``         logarithms and their sums with hard zeros
``_numba_chain``      compiled loops over dense chains
``_numba_blocks``     compiled loops over chains in blocks of states
``_numba_clusters``   compiled loops of Brown clustering
``lookup``            rows of a table, and the sums that are their gradient
``chain``             the arguments of the recursions, checked and in one form
``torch_chain``       forward, backward, Viterbi and sampling as torch operations
``message_passing``   scaled and log-space messages, by Numba or torch
``recursions``        forward-backward, Viterbi, path sampling of dense chains
``block_plan``        which pairs of blocks occur in a batch, and where they lie in memory
``block_recursions``  the recursions of block-sparse chains
``blocks``            ``Blocks``: which states emit which symbols
``block_emission``    emission log-probabilities of states in blocks
``block_transition``  transitions as inner products, on one level or two
``stationary``        stationary distribution, joint probabilities of steps
``pairs``             ``Pairs``: sparse counts of pairs of symbols
``pair_losses``       losses between counted and predicted pairs
``diversity``         kernels between rows and their log-determinant
``brown_merges``      the merges and exchanges of Brown clustering
"""

from . import blocks as blocks
from . import recursions as recursions
