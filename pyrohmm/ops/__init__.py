"""Tensor algorithms that are independent of model classes.

Imports nothing of the package but its private helpers.

Its modules; each imports only those above it:

``tensor_cache``      values derived from a tensor, or from an object, and kept
``log_space``         logarithms and their sums with hard zeros; masks of padding
``newton``            many maxima as one batch: Newton's method, and L-BFGS
``_numba_math``       what all compiled loops use
``backends``          what computes: ``use``, ``TORCH``, ``NUMBA``, ``TRITON``
``markov``            samples of paths of Markov chains, their stationary distribution
``products``          products of matrices between observations and states, and look-ups
``forward``           the forward pass of any chain in logarithms, by torch
``_numba_segments``   its compiled loops, in which nothing leaves the range of numbers
``dense.chain``       Markov chains: the arguments, checked and in one form
``dense._triton``     scaled messages of all steps in two kernels, on CUDA devices
``dense._torch``      their recursions as torch operations
``dense._lanes``      what compiled passes read, and their arithmetic along sequences
``dense._forward``    compiled forward pass, scaled
``dense._backward``   compiled backward pass, scaled: expected counts
``dense._numba``      their recursions by those loops
``recursions``        forward-backward, Viterbi, path sampling of Markov chains
``blocks.states``     ``Blocks``: which states emit which symbols
``blocks.pairs``      transitions within the pairs of blocks that occur
``blocks.transitions``  sums over transitions between blocks, and from and to all states
``blocks.recursions``  evidence of block-sparse chains, by scaled messages
``blocks.inner_products``  transitions and emissions by inner products
``_numba_clusters``   compiled loops of Brown clustering
``brown_merges``      Brown clustering: its tables and its loop
``automata``          ``Automaton``: constraints of sentences
``pairs``             ``Pairs``: sparse counts of pairs of symbols; losses of predicted ones
``diversity``         kernels between rows, their log-determinant, and ascents under it
"""

from . import automata as automata
from . import backends as backends
from . import blocks as blocks
from . import recursions as recursions
from .recursions import ExpectedCounts as ExpectedCounts
from .recursions import Posterior as Posterior
