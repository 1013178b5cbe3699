"""Tensor algorithms that know no model.

Imports nothing of the package but its private helpers.

Its modules; each imports only those above it:

``log_space``         logarithms and their sums with hard zeros
``masks``             which steps of ragged sequences exist
``sampling``          ancestral sampling of paths
``chain``             the arguments of the recursions, checked and in one form
``tensor_cache``      values derived from a tensor, dropped when it is modified or freed
``blocks.plan``       which pairs of blocks occur in a batch, and where they lie in memory
``blocks.transitions``  sums over transitions between blocks, and from and to all states
``blocks.messages``   chains in blocks of states by torch, in logarithms, with missing steps
``blocks.queries``    posterior queries of those, best paths, paths sampled from the posterior
``blocks.scaled``     the same chains by compiled scaled messages
``torch_chain``       forward, backward, Viterbi and sampling as torch operations
``torch_chunks``      the same for long and narrow chains, by a prefix sum over chunks
``segment_chain``     the same arguments of chains with durations
``torch_segments``    chains with durations, in logarithms, as torch operations
``torch_factorial``   several chains, or pairs of states of one, as torch operations
``_numba_math``       what all compiled loops use
``_numba_lanes``      compiled arithmetic along sequences
``_numba_chain``      compiled loops over dense chains: scaled messages
``_numba_tables``     compiled probabilities of those, and counts from what they add up
``_numba_evidence``   compiled loops over whole sequences that share a matrix, with the gradient
``_numba_losses``     compiled bound of what scaled messages have lost
``_numba_pieces``     compiled joining of pieces of long sequences
``_numba_paths``      compiled loops over dense chains: log space, Viterbi, sampling
``blocks._numba``     compiled loops over chains in blocks of states
``_numba_segments``   compiled loops over chains with durations
``_numba_draws``      compiled filtering and sampling of paths by many parameters
``_numba_clusters``   compiled loops of Brown clustering
``operations``        ``Backend``: the operations on which recursions rest, by torch
``_numba_backend``    the operations by Numba
``backends``          which backend computes: ``use``, ``TORCH``, ``NUMBA``
``products``          products of matrices between observations and states
``lookup``            rows of a table, and the sums that are their gradient
``message_passing``   scaled and log-space messages
``precision``         the recursions in float32, float64 and logarithms
``evidence``          evidence and gradient of those as one differentiable operation
``recursions``        forward-backward, Viterbi, path sampling of dense chains
``path_samples``      paths and evidence by many parameters in one pass
``continuous_time``   transitions of chains in continuous time
``semi_markov``       the recursions of chains with explicit durations
``factorial``         the recursions of several chains behind one observation
``second_order``      the recursions of chains whose next state depends on two
``blocks.recursions``  evidence of block-sparse chains by whichever computes
``blocks.states``     ``Blocks``: which states emit which symbols
``blocks.emission``   emission log-probabilities of states in blocks
``blocks.inner_products``  transitions as inner products, on one level or two
``automata``          ``Automaton``: constraints of sentences
``stationary``        stationary distribution, joint probabilities of steps
``pairs``             ``Pairs``: sparse counts of pairs of symbols
``pair_losses``       losses between counted and predicted pairs
``diversity``         kernels between rows and their log-determinant
``brown_merges``      Brown clustering: its tables and its loop
"""

from . import automata as automata
from . import backends as backends
from . import blocks as blocks
from . import factorial as factorial
from . import recursions as recursions
from . import second_order as second_order
from . import semi_markov as semi_markov
from .recursions import ExpectedCounts as ExpectedCounts
from .recursions import Posterior as Posterior
