"""Steering sentences: seconds for sentences that must contain one, two or four words.

A language model of 8,192 states in 128 blocks and 10,000 words, with the random parameters it
begins with, samples sentences of exactly twenty words in each of which all required words occur. A
run is the backward pass of a constraint and a batch of sixteen sentences, on one thread in float32;
the K x K probabilities of the transitions, which depend on the model alone, are computed before,
and timed by themselves. Wall time and the processor's time, of some runs with other words each:
median, least and largest. Every sentence is checked. Writes ``steering.json``.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

import pyro
import torch
from common import arguments, write

from pyrohmm import LanguageModel, automata, blocks
from pyrohmm.data.vocabulary import Vocabulary
from pyrohmm.language import END

REQUIRED = (1, 2, 4)
NUM_WORDS = 20  # of each sentence


def untrained(num_states: int, num_blocks: int, num_words: int) -> LanguageModel:
    """Words in blocks of almost equally many, ``<eos>`` in one of its own."""
    cluster = torch.arange(num_words) % (num_blocks - 1)
    cluster[0] = num_blocks - 1
    words = [END, *(f"w{number}" for number in range(1, num_words))]
    of_words = blocks.from_clusters(cluster, num_states // num_blocks)
    return LanguageModel(Vocabulary(words), of_words, 256)


class Clock:
    """Wall time and the processor's time, since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds of both."""
        return time.perf_counter() - self.start[0], time.process_time() - self.start[1]


def spread(times: list[tuple[float, float]], count: int) -> dict[str, list[float]]:
    """Median, least and largest per sentence, by clock."""
    names = "seconds_a_sentence", "processor_seconds_a_sentence"
    parts = ([each / count for each in clock] for clock in zip(*times))
    return {name: [median(part), min(part), max(part)] for name, part in zip(names, parts)}


def measure(model: LanguageModel, required: int, count: int, runs: int) -> dict[str, Any]:
    """Batches of sentences with so many required words."""
    generator = torch.Generator().manual_seed(required)
    batches, singles = [], []
    for _ in range(runs):
        codes = torch.randperm(len(model.vocabulary) - 1, generator=generator)[:required] + 1
        words = model.vocabulary.decode(codes)
        wanted = automata.must_contain(*words) & automata.of_length(NUM_WORDS)
        clock = Clock()
        steering = model.steer(wanted, NUM_WORDS)
        steering.sample(1, generator)
        singles.append(clock.read())
        clock = Clock()
        lines = model.steer(wanted, NUM_WORDS).sample(count, generator)
        batches.append(clock.read())
        if not all(wanted.accepts(line) for line in lines):
            raise RuntimeError(f"a sentence does not satisfy {wanted.name}")
    return {
        "states": model.blocks.num_states,
        "words": len(model.vocabulary),
        "required_words": required,
        "words_a_sentence": NUM_WORDS,
        "automaton_states": wanted.num_states,
        "sentences": count,
        "runs": runs,
        **spread(batches, count),
        "single": spread(singles, 1),
        "log_prob_of_last": steering.log_prob(),
    }


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    sizes, count, runs = ((64, 8, 200), 4, 2) if options.quick else ((8192, 128, 10000), 16, 5)
    load = os.getloadavg()[0]
    model = untrained(*sizes)
    clock = Clock()
    model.steer(automata.of_length(1), 1)
    once = clock.read()
    rows = []
    for required in REQUIRED:
        rows.append(measure(model, required, count, runs))
        print(rows[-1], flush=True)
    if not options.quick:
        write("steering", rows, transition_seconds=once, load=[load, os.getloadavg()[0]])


if __name__ == "__main__":
    main()
