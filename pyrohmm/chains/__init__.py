"""Chains: distributions p(z) of the hidden states, one module each.

Imports ``ops``. An :class:`~pyrohmm.HMM` joins a chain with an emission and data. A new chain is a
module here: its named parameters, and its recursions.

Its modules; each imports only those above it:

``base``          ``Chain``: the protocol; expected counts by the names of the parameters
``markov``        ``MarkovChain``, ``MarkovRecursions``; ``PathFactors``: queries of any chain
``semi_markov``   ``SemiMarkovChain``: states with explicit durations
``blocks``        ``BlockChain``: each state in the block of its symbol; ``CarriedState``
``compound``      ``ProductChain``, several independent chains; ``SecondOrderChain``
``rates``         ``RateChain``: a Markov chain in continuous time
"""

from .base import Chain as Chain
from .base import ExpectedCounts as ExpectedCounts
from .blocks import BlockChain as BlockChain
from .blocks import BlockLikelihood as BlockLikelihood
from .blocks import CarriedState as CarriedState
from .compound import ProductChain as ProductChain
from .compound import SecondOrderChain as SecondOrderChain
from .markov import MarkovChain as MarkovChain
from .markov import MarkovRecursions as MarkovRecursions
from .rates import RateChain as RateChain
from .semi_markov import SemiMarkovChain as SemiMarkovChain
