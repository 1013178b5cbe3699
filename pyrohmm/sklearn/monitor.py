"""``ConvergenceMonitor``: how a fit went."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from sklearn.exceptions import ConvergenceWarning


@dataclass
class ConvergenceMonitor:
    """The log-probabilities of a fit, and whether it has converged.

    Attributes:
        tol: Gain of an iteration, in nats, below which a fit has converged.
        n_iter: Largest number of iterations.
        history: Log-probability of the data before each iteration, in nats; where there are
            priors, with the logarithm of their density.
        converged: Whether the last gain was below ``tol``, or all iterations were taken.
        notes: Remarks on the fit, such as that a variance was held at its floor, of which ``fit``
            warns.

    Example:
        >>> ConvergenceMonitor(0.1, 10, [-5.0, -4.0]).iter
        2
    """

    tol: float
    n_iter: int
    history: list[float] = field(default_factory=list)
    converged: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def iter(self) -> int:
        """Number of iterations taken."""
        return len(self.history)

    def warn(self) -> None:
        """Warn of each of the ``notes``, from within ``fit``."""
        for note in self.notes:
            warnings.warn(note, ConvergenceWarning, stacklevel=3)
