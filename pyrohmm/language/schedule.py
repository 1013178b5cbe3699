"""``WarmupCosine``: a learning rate that rises for the first steps and then falls as a cosine."""

from __future__ import annotations

import math

WARM = 0.05  # share of all steps in which the learning rate rises


class WarmupCosine:
    """Share of the largest learning rate at a step: a short rise, then half a cosine, to zero.

    The number of steps is not in ``LambdaLR.state_dict()``, and not in checkpoints: a fit that goes
    on with more steps follows the longer schedule.

    Args:
        num_steps: Of the whole fit.

    Example:
        >>> [round(WarmupCosine(100)(step), 2) for step in (0, 4, 50, 99)]
        [0.2, 1.0, 0.5, 0.0]
    """

    __slots__ = ("__dict__", "num_steps")  # LambdaLR keeps and restores what is in __dict__
    may_differ = ("num_steps",)  # from that of a checkpoint

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def __call__(self, step: int) -> float:
        """The share at a ``step``, from 0."""
        rise = (step + 1) / max(1.0, WARM * self.num_steps)
        return min(1.0, rise) * (1.0 + math.cos(math.pi * min(1.0, step / self.num_steps))) / 2.0
