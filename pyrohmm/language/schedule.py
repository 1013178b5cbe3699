"""``WarmupCosine``: a learning rate that rises for the first steps and then falls as a cosine."""

from __future__ import annotations

import math

from .._arguments import checked

WARM = 0.05  # share of all steps in which the learning rate rises


@checked()
class WarmupCosine:
    """Share of the largest learning rate at a step: a short rise, then half a cosine, to zero.

    An object, so that ``LambdaLR.state_dict()`` and with it checkpoints tell the number of steps.

    Args:
        num_steps: Of the whole fit.

    Example:
        >>> [round(WarmupCosine(100)(step), 2) for step in (0, 4, 50, 99)]
        [0.2, 1.0, 0.5, 0.0]
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps

    def __call__(self, step: int) -> float:
        """The share at a ``step``, from 0."""
        rise = (step + 1) / max(1.0, WARM * self.num_steps)
        return min(1.0, rise) * (1.0 + math.cos(math.pi * min(1.0, step / self.num_steps))) / 2.0
