"""What the figure scripts share: options, interleaved timing, results and the style of pictures."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent


STYLE = {  # pictures are about 10 inches wide: no text is smaller than 8 points
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 5,
    "savefig.dpi": 150,
}
PUBLISHED = "0.45"  # grey, of what others have printed; ours has the colours of the cycle


def arguments(
    description: str | None, parts: list[str] | None = None, picture: bool = True
) -> argparse.Namespace:
    """The options of every script.

    Args:
        description: Of the script.
        parts: Names of its parts; with ``--only`` it runs some and keeps the results of the others.
        picture: Whether its picture can be drawn from its results alone; if so, ``--draw`` does it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    if picture:
        parser.add_argument("--draw", action="store_true", help="only redraw the written results")
    if parts:
        parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


def pyplot() -> Any:
    """Matplotlib's ``pyplot``, in the style of all pictures."""
    from matplotlib import pyplot as plt

    plt.rcParams.update(STYLE)
    return plt


def plain_ticks(axis: Any, subs: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Label a logarithmic axis with plain numbers at ``subs`` of each power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:,.4g}")


def save(figure: Any, name: str) -> None:
    """Write ``figures/NAME.png`` and close the picture."""
    from matplotlib import pyplot as plt

    figure.savefig(FOLDER / f"{name}.png")
    plt.close(figure)


def earlier(name: str) -> list[dict[str, Any]]:
    """The rows of ``figures/NAME.json``, if there is one."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Hold a lock on the results ``name``, to which several processes may add rows."""
    with Path(tempfile.gettempdir(), f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def interleaved(
    methods: dict[str, Callable[[], Any]],
    rounds: int,
    seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
    settle: float = 0.0,
) -> dict[str, list[float]]:
    """Time the methods in turn, round after round, under the same load of the machine.

    A method is timed in each round until it has used ``seconds``. Its first call is not counted,
    because it may compile. With one thread, ``time.process_time`` excludes other processes. A call
    shorter than ``settle`` seconds comes second in its round, after one that is not counted, as in
    a loop: the caches, and threads that wait for more work, are then its own.

    Returns:
        Seconds of each call, by method.
    """
    for method in methods.values():
        method()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            if sum(times[name]) < seconds:
                if times[name] and times[name][-1] < settle:
                    method()
                start_time = clock()
                method()
                times[name].append(clock() - start_time)
    return times


def launches(call: Callable[[], Any]) -> dict[str, float]:
    """What ``call`` launches on a GPU, by the profiler: kernels, launches, and seconds they take.

    A CUDA graph is one launch of many kernels. Copies and fills count as seconds alone. Without a
    GPU all are zero.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as found:
        call()
    events = found.events()
    host = {event.name for event in events if event.device_type == DeviceType.CPU}
    device = [e for e in events if e.device_type == DeviceType.CUDA and e.name not in host]
    started = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
    return {
        "kernels": float(sum(not e.name.startswith(("Memcpy", "Memset")) for e in device)),
        "launches": float(sum(event.name.startswith(started) for event in events)),
        "device_seconds": sum(e.time_range.elapsed_us() for e in device) / 1e6,
    }


def own_memory() -> float:
    """Memory of this process in MB, without pages of files."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


class Peak:
    """The largest memory of this process within the context, looked at fifty times a second."""

    def __enter__(self) -> Peak:
        self.largest, self.ended = own_memory(), threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        """Look until it has ended."""
        while not self.ended.wait(0.02):
            self.largest = max(self.largest, own_memory())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> tuple[float, float, float]:
    """Median, lowest and highest of the ratios of calls made in the same round."""
    ratios = sorted(a / b for a, b in zip(times[slow], times[fast]))
    return median(ratios), ratios[0], ratios[-1]


def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write ``figures/NAME.json``; numbers that are not finite are null, as JSON has none."""
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
        "machine": machine(),
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


def machine() -> str:
    """The machine that this runs on."""
    return f"{platform.machine()}, {_processor()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor()
