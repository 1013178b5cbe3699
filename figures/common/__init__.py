"""What the figure scripts share: timing side by side, and the form of their results."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent


def arguments(description: str | None, parts: list[str] | None = None) -> argparse.Namespace:
    """The options every script has; ``--quick`` runs it small and leaves its results alone.

    With ``parts``, ``--only`` runs some of them, and keeps the results of the others.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


def earlier(name: str) -> list[dict[str, Any]]:
    """The rows of ``figures/NAME.json``, if there is one."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Wait until no other process holds the results of that name: their rows are added to."""
    with Path(tempfile.gettempdir(), f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def side_by_side(
    methods: dict[str, Callable[[], Any]],
    rounds: int,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time the methods in turn, round after round, so that all see the same machine.

    A method is timed in each round until it has used up ``seconds``. The first call of each is
    not counted: it compiles what is compiled. With one thread, ``time.process_time`` as the clock
    leaves out what else the machine does.

    Returns:
        Seconds of each call, by method.
    """
    for method in methods.values():
        method()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            if sum(times[name]) < seconds:
                start_time = clock()
                method()
                times[name].append(clock() - start_time)
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> tuple[float, float, float]:
    """Median, lowest and highest of the ratios of calls made in the same round."""
    ratios = sorted(a / b for a, b in zip(times[slow], times[fast]))
    return median(ratios), ratios[0], ratios[-1]


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write ``figures/NAME.json``; numbers that are not finite, which JSON has not, are null."""
    packages = "pyrohmm torch pyro-ppl numpy numba jax dynamax hmmlearn".split()
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    result = {
        "figure": name,
        "command": f"python figures/{name}.py",
        "versions": versions,
        "machine": f"{platform.machine()}, {_processor()}",
        **more,
        "rows": rows,
    }
    text = json.dumps(_finite(result), indent=1, allow_nan=False)
    (FOLDER / f"{name}.json").write_text(text + "\n")


def _finite(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor()
