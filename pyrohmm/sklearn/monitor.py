"""``ConvergenceMonitor``: how a fit went."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ConvergenceMonitor:
    """The log-probabilities of a fit, and whether it has converged.

    Attributes:
        tol: Gain of an iteration, in nats, below which a fit has converged.
        n_iter: Largest number of iterations.
        history: Log-probability of the data before each iteration, in nats; with pseudo-counts,
            the log joint density.
        converged: Whether the last gain was below ``tol``, or all iterations were taken.

    Example:
        >>> ConvergenceMonitor(0.1, 10, [-5.0, -4.0]).iter
        2
    """

    tol: float
    n_iter: int
    history: list[float] = field(default_factory=list)
    converged: bool = False

    @property
    def iter(self) -> int:
        """Number of iterations taken."""
        return len(self.history)
