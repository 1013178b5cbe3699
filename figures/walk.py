"""How much of the package one step goes through: calls, functions and files, of the second call.

Counted by ``sys.setprofile``: an iteration of EM, a gradient step of MAP, each a whole fit of one
iteration, and the log evidence, of a small HMM of numbers. Writes ``walk.json``.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from common import arguments, write
from pyro.distributions import Normal

import pyrohmm
from pyrohmm import HMM, MarginalModel, Sequences, TabularHMM, fit_em, fit_map, normal

ROOT = str(Path(pyrohmm.__file__).parent)


def walk(run: Callable[[], object]) -> dict[str, int]:
    """Calls, functions and files of the second call of ``run``."""
    calls: Counter[tuple[str, str]] = Counter()

    def see(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            calls[code.co_filename, code.co_qualname] += 1

    run()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    files = {name for name, _ in calls}
    return {"calls": sum(calls.values()), "functions": len(calls), "files": len(files)}


def rows() -> list[dict[str, Any]]:
    """One row for each way."""
    pyro.set_rng_seed(0)
    lengths = torch.full((8,), 20)
    initial, transition = torch.randn(4).log_softmax(-1), torch.randn(4, 4).log_softmax(-1)
    hmm = HMM(initial, transition, Normal(torch.arange(4.0), 1.0), lengths)
    values = hmm.sample()
    data, options = Sequences(values, lengths), {"num_iterations": 1, "progress": False}
    ways = {
        "fit_em": lambda: fit_em(TabularHMM(3, normal(0)), data, **options),
        "fit_map": lambda: fit_map(MarginalModel(TabularHMM(3, normal(0))), data, **options),
        "HMM.log_prob": lambda: hmm.log_prob(values),
    }
    return [{"way": name, **walk(run)} for name, run in ways.items()]


def main() -> None:
    """Count all ways."""
    options = arguments(__doc__, picture=False)
    warnings.filterwarnings("ignore")
    found = rows()
    for row in found:
        print("{way}: {calls} calls of {functions} functions in {files} files".format(**row))
    if not options.quick:
        write("walk", found)


if __name__ == "__main__":
    main()
