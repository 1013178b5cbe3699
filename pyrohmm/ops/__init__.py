"""Tensor algorithms that know no model: recursions, pair statistics, diversity, clustering.

Imports nothing of the package but its private helpers.
"""

from . import blocks as blocks
from . import recursions as recursions
