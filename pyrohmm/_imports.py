"""Lazy imports of heavy or optional packages; the version."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import resolve_name
from typing import Any

__version__ = version("pyrohmm")  # which ``pyproject.toml`` alone states

EXTRAS = {  # what brings an optional package
    "formulaic": "'pyrohmm[formulas]'", "sklearn": "'pyrohmm[sklearn]'",
    "numba": "'pyrohmm[compiled]'", "transformers": "'pyrohmm[transformers]'",
    "mido": "'pyrohmm[music]'", "hmmlearn": "hmmlearn", "pandas": "pandas", "pooch": "pooch",
}  # fmt: skip


def imported(name: str, package: str | None = None) -> Any:
    """Import the module ``name`` with signals delayed.

    An import that is broken off, as by Ctrl-C, leaves some of its modules behind, on which every
    later one fails.

    Raises:
        ImportError: If there is no such module.

    Example:
        >>> imported("math").floor(2.5)
        2
    """
    if resolve_name(name, package) in sys.modules:
        return import_module(name, package)
    try:
        with signals_delayed():
            return import_module(name, package)
    except ModuleNotFoundError as error:
        root = name.split(".")[0]
        if error.name == root and root in EXTRAS:
            cure = f"pip install {EXTRAS[root]}"
            raise ModuleNotFoundError(f"{root} is not installed: {cure}", name=root) from None
        raise


@contextmanager
def signals_delayed() -> Iterator[None]:
    """Context that delays signals until its end; only the main thread handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    try:
        with ExitStack() as after:  # which gives all handlers back, also if one raises meanwhile
            for number in signal.valid_signals():
                if callable(handler := signal.getsignal(number)):
                    after.callback(signal.signal, number, handler)
                    signal.signal(number, lambda *event, own=handler: arrived.append((own, event)))
            yield
    finally:
        for handler, event in arrived:
            handler(*event)
