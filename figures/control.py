"""Control: milliseconds a token of a processor that steers a language model to three key words.

HMMs of 4,096 random states and 50,257 tokens, dense and in 128 blocks of states; byte-level tokens
as long as those of English, of which some begin or make the key words; 32 tokens ahead, a batch of
eight texts. A token is one call with random scores; the language model is not counted, and stands
beside it: GPT-2 of 12 layers with random weights, in float32, which keeps keys and values (left out
where ``transformers`` is not installed). One thread; wall and processor time by median, least and
largest. Writes ``control.json``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pyro
import torch
from common import arguments, write
from pyro.distributions import Categorical
from torch import Tensor

from pyrohmm import HMM, BlockHMM, automata, blocks
from pyrohmm.language import ConstraintProcessor

KEYS = ("winter", "river", "stone")
BATCH = 8


def tokens(count: int) -> list[str | None]:
    """The end, characters, pieces of the key words, and random words of small letters."""
    generator = torch.Generator().manual_seed(0)
    made = dict.fromkeys([*map(chr, range(32, 127))])
    for key in KEYS:
        pieces = [key[a:b] for a in range(len(key)) for b in range(a + 2, len(key) + 1)]
        made |= dict.fromkeys([*pieces, *(f" {piece}" for piece in pieces)])
    while len(made) < count - 1:
        length = int(torch.randint(2, 9, (), generator=generator))
        letters = torch.randint(97, 123, (length,), generator=generator).tolist()
        made["".join([" " * (length % 2), *map(chr, letters)])] = None
    return [None, *list(made)[: count - 1]]


def hmm_of(num_states: int, num_tokens: int, num_blocks: int) -> HMM:
    """Random parameters; one block is a dense HMM."""
    log_transition = torch.randn(num_states, num_states).log_softmax(-1)
    length = torch.tensor(1)
    if num_blocks == 1:
        logits = torch.randn(num_states, num_tokens)
        return HMM(log_transition[0], log_transition, Categorical(logits=logits), length)
    owner, width = torch.arange(num_tokens) % num_blocks, num_states // num_blocks
    scores = torch.rand(num_tokens, width)
    total = torch.zeros(num_blocks, width).index_add_(0, owner, scores)
    emission = (scores / total[owner]).log()
    own = blocks.from_clusters(owner, width)
    return BlockHMM(log_transition[0], log_transition, emission, own, length)


def clocked(call: Callable[[], Tensor], calls: list[tuple[float, float]]) -> Tensor:
    """The result of a call, whose wall and processor time is appended."""
    wall, used = time.perf_counter(), time.process_time()
    found = call()
    calls.append((time.perf_counter() - wall, time.process_time() - used))
    return found


def times(calls: list[tuple[float, float]]) -> dict[str, Any]:
    """Of all calls but the first."""
    wall, used = ([1000 * each for each in clock] for clock in zip(*calls[1:]))
    return {
        "milliseconds_a_token": [median(wall), min(wall), max(wall)],
        "processor_milliseconds_a_token": [median(used), min(used), max(used)],
    }


@torch.no_grad()
def neural(ahead: int, quick: bool) -> list[dict[str, Any]]:
    """GPT-2."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        return []
    config = GPT2Config(n_layer=1, n_embd=24, n_head=2) if quick else GPT2Config()
    model = GPT2LMHeadModel(config).eval()
    calls: list[tuple[float, float]] = []
    kept, ids = None, torch.full((BATCH, 1), 5)
    for _ in range(ahead):
        found = clocked(lambda k=kept, i=ids: model(i, past_key_values=k, use_cache=True), calls)
        kept, ids = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)
    return [{"model": f"GPT-2, {config.n_layer} layers", **times(calls)}]


def measure(sizes: tuple[int, int, int], ahead: int) -> dict[str, Any]:
    """One constraint, and a batch of texts."""
    hmm, texts = hmm_of(*sizes), tokens(sizes[1])
    wanted = automata.must_contain(*KEYS)
    start = time.perf_counter()
    processor = ConstraintProcessor(hmm, wanted, texts, ahead, end=0)
    once = time.perf_counter() - start
    return {
        "model": f"{sizes[2]} blocks" if sizes[2] > 1 else "dense",
        "states": sizes[0],
        "tokens": sizes[1],
        "blocks": sizes[2],
        "ahead": ahead,
        "batch": BATCH,
        "automaton_states": processor.lookahead.constraint.num_states,
        "seconds_once": once,
        **texts_of(processor, wanted, texts, ahead),
    }


def texts_of(
    processor: ConstraintProcessor, wanted: automata.Automaton, texts: list[str | None], ahead: int
) -> dict[str, Any]:
    """Times of a batch of texts, each of which must satisfy the constraint."""
    processor.reset()
    ids = torch.full((BATCH, 1), 5)
    calls: list[tuple[float, float]] = []
    for _ in range(ahead):
        scores = torch.randn(BATCH, len(texts))
        scores[:, 0] = -torch.inf  # no text ends early
        found = clocked(lambda i=ids, s=scores: processor(i, s), calls)
        ids = torch.cat([ids, torch.multinomial(found.softmax(-1), 1)], 1)
    for row in ids[:, 1:].tolist():
        text = "".join(texts[code] or "" for code in row)
        words = "".join(c if c.isalnum() or c in "_'" else " " for c in text).split()
        if not wanted.accepts(words):
            raise RuntimeError(f"a text lacks a key word: {text}")
    return times(calls)


def main() -> None:
    options = arguments(__doc__, picture=False)
    torch.set_num_threads(1)
    pyro.set_rng_seed(0)
    ahead = 24 if options.quick else 32
    shapes = (
        [(16, 600, 4), (16, 600, 1)] if options.quick else [(4096, 50257, 128), (4096, 50257, 1)]
    )
    load, rows = os.getloadavg()[0], neural(ahead, options.quick)
    for sizes in shapes:
        rows.append(measure(sizes, ahead))
    for row in rows:
        print(row, flush=True)
    if not options.quick:
        write("control", rows, load=[load, os.getloadavg()[0]])


if __name__ == "__main__":
    main()
