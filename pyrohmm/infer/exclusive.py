"""One fit at a time: Pyro's handler stack and parameter store are those of the whole process.

Fits in several threads wait for each other, and so do calls of modules; what is asked of an
:class:`HMM` needs no Pyro, and runs in parallel. Which of the waiting fits is next, and so which
random numbers it takes, is up to the threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine import runtime

from ..nn.base import PYRO


def check_gradients() -> None:
    """Raise where no gradient can be taken.

    Raises:
        RuntimeError: Under ``torch.inference_mode``.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "a fit takes gradients, which torch.inference_mode rules out: call it outside, or "
            "inside `with torch.inference_mode(False):`, with data that were made there."
        )


@contextmanager
def exclusive(gradients: bool = True) -> Iterator[None]:
    """A context, or decorator, in which a fit has Pyro for itself, and gradients.

    A fit inside another one, such as in its ``log_prior``, sees none of the effect handlers of
    that one, which are there again when it ends.

    Args:
        gradients: Whether the fit needs them; EM in closed form does not.

    Raises:
        RuntimeError: As :func:`check_gradients`, if it needs them.
    """
    if gradients:
        check_gradients()
    with PYRO, torch.enable_grad():
        stack: list[Any] = runtime._PYRO_STACK
        dims: Any = runtime._DIM_ALLOCATOR
        enumerated: Any = runtime._ENUM_ALLOCATOR
        handlers, plates, numbers = stack[:], dims._stack[:], dict(vars(enumerated))
        stack.clear()
        dims._stack.clear()
        try:
            yield
        finally:
            stack[:], dims._stack[:] = handlers, plates
            vars(enumerated).clear()
            vars(enumerated).update(numbers)
