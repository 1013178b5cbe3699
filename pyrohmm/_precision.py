"""Full precision where ``torch.autocast`` would lower it; networks may do with less."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def full_precision(like: Tensor) -> torch.autocast:
    """A context in which ``torch.autocast`` lowers no precision, on the device of ``like``."""
    return torch.autocast(like.device.type, enabled=False)


def in_full_precision(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The ``backward`` of an autograd function, also where it is called under autocast."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        with full_precision(gradients[0]):
            return backward(ctx, *gradients)

    return run
