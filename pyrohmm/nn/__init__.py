"""``PyroModule``s whose call returns an ``HMM``, and families of emissions.

Imports ``ops``, ``data`` and ``distributions``.

Its modules; each imports only those above it:

``base``         ``HMMModule``: what every module of this room is
``closed_form``  the M-step of EM: what a module or an emission defines
``family``       ``Emission``: base of the emission families
``normals``      normal families: diagonal, spherical, full, tied
``mixtures``     mixtures of normals
``composed``     joined streams; states that share an emission
``emissions``    categorical, Bernoulli, Poisson, parametric
``tabular``      ``TabularHMM``: probabilities are the parameters
``dense``        ``DenseHMM``: softmax of inner products of embeddings
``networks``     networks and tables that make embeddings
``neural``       ``NeuralHMM``, ``ScalarHMM``: tens of thousands of states
``tagging``      ``NeuralTagger``: a neural HMM of words and tags
"""

from . import dense as dense
from . import emissions as emissions
from . import tagging as tagging
