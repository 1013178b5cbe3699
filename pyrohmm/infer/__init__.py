"""Inference: the Pyro models, the fits, guides, initial values, results.

Imports the rooms down to ``io``.

Its modules; each imports only those above it:

``exclusive``     one fit at a time, in several threads
``models``        ``MarginalModel``, ``EnumeratedModel``, ``StatefulModel``
``guides``        ``RotationGuide``: variational families for embeddings
``starts``        where EM begins
``msteps``        ``GradientStep``, and M-steps under a diversity prior
``process_group``  ``ProcessGroup``: data-parallel ranks
``validation``    held-out evidence during a fit
``results``       ``Fit``, ``Restarts``: what a fit returns
``objective``     the loss of a gradient fit
``training``      settings and state of a gradient fit, its steps
``loop``          the training loop
``svi``           ``fit_svi``
``map``           ``fit_map``
``cooccurrence``  ``fit_cooccurrence``, ``CooccurrenceModel``
``parameters``    the parameters of an EM fit
``maximization``  the M-step: closed forms and gradient steps
``expectation``   the E-step, batched by length
``em``            ``fit_em``
"""

from . import cooccurrence as cooccurrence
from . import em as em
from . import guides as guides
from . import msteps as msteps
from . import starts as starts
