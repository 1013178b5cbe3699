"""Training of dense HMMs of tokens: tokens a second, as a share of the rate of matrix products.

V = 33,279 tokens, T = 32 steps, in batches: the shape at which PyJuice's authors time their HMMs
(Liu et al., 2024, Scaling Tractable Probabilistic Circuits: A Systems Perspective). One thread,
float32, random tokens and parameters. *Gradient* is the log evidence and its derivative by all
parameters as logarithms; *counts* is the E-step of EM. A step of a sequence takes three products
of a vector with the K x K transition, 6 K^2 operations; what remains is reading and adding rows of
the emission, and normalising. ``share`` is these operations a second over those of a product of
2,048 x 2,048 matrices in the same run. Processor time, the least of the rounds of each, in turn.

Writes ``dense_training.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, write
from pyro.distributions import Categorical

from pyrohmm import HMM

V, T = 33_279, 32
SHAPES = [(512, 512), (512, 128), (2048, 64)]  # states, sequences


def seconds(call: Callable[[], object]) -> float:
    """Processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(num_states: int, batch: int, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Both ways, and the product of matrices, in turn."""
    torch.manual_seed(0)
    logs = [torch.randn(num_states, n).log_softmax(-1) for n in (num_states, num_tokens)]
    tables = [logs[0][0].clone(), *logs]
    values = torch.randint(num_tokens, (batch, T))
    lengths = torch.full((batch,), T)

    def hmm() -> HMM:
        return HMM(tables[0], tables[1], Categorical(logits=tables[2]), lengths)

    def gradient() -> None:
        for table in tables:
            table.requires_grad_().grad = None
        hmm().log_prob(values).sum().backward()

    def counts() -> None:
        with torch.no_grad():
            hmm().expected_counts(values)

    square = torch.randn(2048, 2048) if num_tokens == V else torch.randn(256, 256)
    ways = {"gradient": gradient, "counts": counts, "product": lambda: square @ square}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(seconds(way))
    rate = 2 * len(square) ** 3 / min(taken["product"])
    rows = []
    for name in ("gradient", "counts"):
        tokens = batch * T / min(taken[name][1:])
        rows.append({
            "way": name, "states": num_states, "sequences": batch, "tokens_a_second": tokens,
            "gigaflops_of_products": rate / 1e9, "share": tokens * 6 * num_states**2 / rate,
        })  # fmt: skip
    return rows


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for num_states, batch in [(16, 8)] if options.quick else SHAPES:
        rows += measure(num_states, batch, 500 if options.quick else V, 3 if options.quick else 5)
        print(*rows[-2:], sep="\n", flush=True)
    if not options.quick:
        write("dense_training", rows)


if __name__ == "__main__":
    main()
