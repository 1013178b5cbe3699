"""Time of posterior queries of a chain in blocks, over that of its evidence.

A :class:`pyrohmm.BlockHMM` of 4,096 states on two levels in 128 blocks, 10,000 symbols, random
parameters with vectors of 256 dimensions, float32, and four sentences of 18 to 30 symbols; one
thread. ``missing`` is the number of steps in a row that are missing in each sentence. The HMM is
made anew for each call, so that nothing is kept from the one before. ``milliseconds`` are the
processor's, the median of the rounds, and ``times`` are over ``log_prob`` of the same sentences
in the same round: median, lowest and highest.

Writes ``block_queries.json``, after each number of missing steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from common import arguments, interleaved, ratio, write
from torch import Tensor

from pyrohmm import Filter, blocks, queries
from pyrohmm.distributions.block_hmm import BlockHMM, InnerProductTransition

NAME = "block_queries"
STATES, BLOCKS, SYMBOLS, DIM = 4096, 128, 10_000, 256
LENGTHS = torch.tensor([25, 21, 18, 30])
Query = Callable[[BlockHMM, Tensor], Any]


def stream(hmm: BlockHMM, values: Tensor) -> None:
    """Filter as many steps as the shortest sentence has, one at a time."""
    known, filtered = hmm.observed, Filter(hmm.with_lengths(hmm.lengths))
    for t in range(int(LENGTHS.min())):
        filtered.update(values[:, t], None if known is None else known[:, t])


QUERIES: dict[str, Query] = {
    "log_prob": lambda hmm, values: hmm.log_prob(values),
    "filtered": lambda hmm, values: hmm.filtered(values),
    "posterior": lambda hmm, values: hmm.posterior(values),
    "sample_states": lambda hmm, values: hmm.sample_states(values),
    "predictive_log_prob": queries.predictive_log_prob,
    "Filter": stream,
    "viterbi": lambda hmm, values: hmm.viterbi(values),
    "k_best of 4": lambda hmm, values: queries.k_best(hmm, values, 4),
    "path_entropy": queries.path_entropy,
}
OBSERVED: dict[str, Query] = {
    "continuation": lambda hmm, values: queries.continuation(hmm, values, 3),
}


def model(states: int, count: int, symbols: int) -> Callable[[Tensor | None], BlockHMM]:
    """Makes the HMM of sentences with some steps observed, or all."""
    torch.manual_seed(0)
    partition = blocks.from_clusters(torch.arange(symbols) % count, states // count)
    vectors = 0.1 * torch.randn(states, DIM), torch.randn(states, DIM)
    logits, initial = torch.randn(states, count), torch.zeros(states).log_softmax(-1)
    emission = torch.randn(symbols, states // count)
    for block in range(count):
        emission[block::count] = emission[block::count].log_softmax(0)

    def make(observed: Tensor | None) -> BlockHMM:
        transition = InnerProductTransition(*vectors, partition, logits)
        return BlockHMM(
            initial, transition, emission, partition, LENGTHS, observed, validate_args=False
        )

    return make


def measured(sizes: tuple[int, int, int], missing: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each query."""
    make = model(*sizes)
    values = torch.randint(sizes[-1], (len(LENGTHS), int(LENGTHS.max())))
    observed = torch.ones_like(values, dtype=torch.bool)
    for number, row in enumerate(observed):
        row[5 + number : 5 + number + missing] = False
    chosen = QUERIES | ({"impute": queries.impute} if missing else OBSERVED)
    seen = observed if missing else None

    def calls(query: Query) -> Callable[[], Any]:
        return lambda: query(make(seen), values)

    methods = {name: calls(query) for name, query in chosen.items()}
    times = interleaved(methods, rounds, 20.0, time.process_time)
    return [
        {"query": name, "missing": missing, "states": sizes[0], "blocks": sizes[1],
         "milliseconds": 1000 * median(times[name]), "times": ratio(times, name, "log_prob")}
        for name in methods
    ]  # fmt: skip


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    sizes = (64, 8, 100) if options.quick else (STATES, BLOCKS, SYMBOLS)
    rows = []
    for missing, rounds in ((0, 5), (1, 5), (3, 1)):
        rows += measured(sizes, missing, 1 if options.quick else rounds)
        if not options.quick:
            write(NAME, rows, threads=1)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
