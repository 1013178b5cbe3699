"""Chains: distributions p(z) of the hidden states, one module each.

Imports ``ops``. An :class:`~pyrohmm.HMM` joins a chain with an emission and data. A new chain is a
module here: its named parameters, and its recursions.

Its modules; each imports only those above it:

``base``          ``Chain``: the protocol; expected counts by the names of the parameters
``markov``        ``MarkovChain``: each state depends on the one before it; ``MarkovRecursions``
``semi_markov``   ``SemiMarkovChain``: states with explicit durations
``blocks``        ``BlockChain``: each state in the block of its symbol; ``CarriedState``
``product``       ``ProductChain``: several independent chains
``second_order``  ``SecondOrderChain``: each state depends on the two before it
``rates``         ``RateChain``: a Markov chain in continuous time
``paths``         ``PathFactors``: best paths, entropy and messages of any chain
"""

from .base import Chain as Chain
from .base import ExpectedCounts as ExpectedCounts
from .blocks import BlockChain as BlockChain
from .blocks import BlockLikelihood as BlockLikelihood
from .blocks import CarriedState as CarriedState
from .markov import MarkovChain as MarkovChain
from .markov import MarkovRecursions as MarkovRecursions
from .product import ProductChain as ProductChain
from .rates import RateChain as RateChain
from .second_order import SecondOrderChain as SecondOrderChain
from .semi_markov import SemiMarkovChain as SemiMarkovChain
