"""Tensor algorithms that know no model.

Imports nothing of the package but its private helpers.

Its modules; each imports only those above it:

``log_space``         logarithms and their sums with hard zeros
``masks``             which steps of ragged sequences exist
``newton``            Newton's method for many small problems at once
``tensor_cache``      values derived from a tensor, or from an object, and kept
``_numba_math``       what all compiled loops use
``backends``          what computes: ``use``, ``TORCH``, ``NUMBA``
``sampling``          paths of Markov chains, and of posteriors by many parameters
``products``          products of matrices between observations and states, and look-ups
``log_messages``      chains of one state, or of pairs of states, in logarithms
``dense.chain``       Markov chains: the arguments, checked and in one form
``dense._torch``      their recursions as torch operations
``dense._lanes``      compiled arithmetic along sequences
``dense._steps``      what compiled passes read at a step
``dense._forward``    compiled forward pass, scaled
``dense._backward``   compiled backward pass, scaled: expected counts
``dense._paths``      compiled loops in logarithms: log space, Viterbi, sampling
``dense._numba``      their recursions by those loops
``dense.scaling``     evidence and gradient in the range of numbers that each sequence needs
``recursions``        forward-backward, Viterbi, path sampling of Markov chains
``segments._torch``   chains with durations: the arguments in one form, recursions by torch
``segments._numba``   their recursions by compiled loops
``semi_markov``       the recursions of chains with durations
``second_order``      the recursions of chains whose next state depends on two
``blocks.plan``       which pairs of blocks occur in a batch, and where they lie in memory
``blocks.transitions``  sums over transitions between blocks, and from and to all states
``blocks.messages``   chains in blocks of states by torch, in logarithms, with missing steps
``blocks.queries``    posterior queries of those, best paths, paths sampled from the posterior
``blocks._numba``     compiled loops over chains in blocks of states
``blocks.recursions``  evidence of block-sparse chains by whichever computes
``blocks.states``     ``Blocks``: which states emit which symbols
``blocks.inner_products``  transitions and emissions by inner products
``_numba_clusters``   compiled loops of Brown clustering
``brown_merges``      Brown clustering: its tables and its loop
``automata``          ``Automaton``: constraints of sentences
``stationary``        stationary distribution, joint probabilities of steps
``pairs``             ``Pairs``: sparse counts of pairs of symbols; losses of predicted ones
``diversity``         kernels between rows, their log-determinant, and ascents under it
"""

from . import automata as automata
from . import backends as backends
from . import blocks as blocks
from . import recursions as recursions
from . import second_order as second_order
from . import semi_markov as semi_markov
from .recursions import ExpectedCounts as ExpectedCounts
from .recursions import Posterior as Posterior
