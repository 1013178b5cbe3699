"""Held-out perplexity by seconds of training, for batches of different sizes.

A neural HMM of 4,096 states on two levels in 128 Brown clusters on the Penn Treebank, state dropout
0.5, float32, one thread, trained by ``fit_map`` (AdamW, a cosine schedule with a short warm-up,
clipped gradients) with batches of 512, 2,048 and 8,192 tokens, each for the same time. Learning
rates are in proportion to the square root of the tokens in a batch, from that of the language
models, 0.01 with 8,192 tokens; none was tuned here. How many steps fit into the time is measured
first, on steps that are not counted, so that the schedule ends with it.

``course`` holds seconds and the perplexity of all held-out sentences, ``<eos>`` included, without
dropout. Seconds are the processor's, which other work on the machine does not change; validations
are not counted.

Writes ``batch_size.json`` and ``batch_size.png``, after each size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import pyro
import torch
from common import arguments, earlier, plain_ticks, pyplot, save, write
from common.text import Text, brown, read
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pyrohmm import Fit, MarginalModel, NeuralHMM, blocks, fit_map
from pyrohmm.data.batches import batches_in_round
from pyrohmm.language import WarmupCosine

NAME = "batch_size"
STATES, BLOCKS, SECONDS, POINTS, PROBED = 4096, 128, 420.0, 12, 20
SIZES = (8192, 2048, 512)
RATE = 0.01  # with the largest batch


class Watch(torch.optim.AdamW):
    """AdamW that adds up the time of the steps, without what is between :meth:`stop` and them."""

    taken: list[float]
    since: float

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, lr=lr, weight_decay=0.0, fused=True)
        Watch.taken = []
        Watch.skip()

    @classmethod
    def skip(cls, *_: Any) -> None:
        """Leave out what was done since the last step."""
        cls.since = time.process_time()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        result = super().step(*args, **kwargs)
        Watch.taken.append(time.process_time() - Watch.since)
        Watch.skip()
        return result


def trained(module: NeuralHMM, text: Text, tokens: int, steps: int, validate: bool) -> Fit:
    """A fit of so many steps."""
    return fit_map(
        MarginalModel(module), text.train, num_iterations=steps, batch_tokens=tokens,
        optimizer=partial(Watch, lr=rate(tokens)),
        schedule=partial(LambdaLR, lr_lambda=WarmupCosine(steps)), clip_norm=5.0, tolerance=None,
        validation=text.valid if validate else None,
        validate_every=math.ceil(steps / POINTS) if validate else None,
        report=Watch.skip if validate else None, progress=False,
    )  # fmt: skip


def rate(tokens: int) -> float:
    """The learning rate with so many tokens in a batch."""
    return RATE * math.sqrt(tokens / max(SIZES))


def run(text: Text, partition: blocks.Blocks, tokens: int, seconds: float) -> dict[str, Any]:
    """Train with one size of the batches for some time."""
    steps = PROBED
    for validate in (False, True):
        pyro.set_rng_seed(0)
        module = NeuralHMM(
            partition.num_states, len(text.words), 256, blocks=partition, two_level=True,
            dropout=0.5,
        )  # fmt: skip
        fit = trained(module, text, tokens, steps, validate)
        steps = max(POINTS, round(seconds / (sum(Watch.taken[3:]) / len(Watch.taken[3:]))))
    course = [[sum(Watch.taken[: report.step]), math.exp(report.nats)] for report in fit.validation]
    in_epoch = batches_in_round(text.train.lengths, tokens)
    return {
        "states": partition.num_states, "blocks": partition.num_blocks, "tokens": tokens,
        "rate": rate(tokens), "steps": len(Watch.taken), "seconds": sum(Watch.taken),
        "milliseconds_per_step": 1000 * sum(Watch.taken) / len(Watch.taken),
        "epochs": len(Watch.taken) / in_epoch, "perplexity": course[-1][1], "course": course,
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> None:
    """A curve for each size of the batches."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for row in sorted(rows, key=lambda row: row["tokens"]):
        label = (
            f"{row['tokens']:,} tokens, rate {row['rate']:g}: {row['steps']:,} steps, "
            f"{row['epochs']:.1f} epochs"
        )
        axis.plot(*zip(*row["course"]), ".-", label=label)
    axis.set(
        xlabel="seconds of training, one thread", ylabel="held-out perplexity", yscale="log",
        title="Penn Treebank, 4,096 states on two levels in 128 blocks",
    )  # fmt: skip
    plain_ticks(axis.yaxis, (1.6, 1.8, 2.0, 2.2, 2.4, 2.6))
    axis.legend(title="each batch has")
    save(figure, NAME)


def main() -> None:
    options = arguments(__doc__)
    if options.draw:
        draw(earlier(NAME))
        return
    torch.set_num_threads(1)
    text = read("letters" if options.quick else "ptb")
    clusters = brown(text, 8 if options.quick else BLOCKS)[0]
    states = 64 if options.quick else STATES
    partition = blocks.from_clusters(clusters, states // (int(clusters.max()) + 1))
    rows = []
    for tokens in SIZES:
        rows.append(run(text, partition, tokens, 1.0 if options.quick else SECONDS))
        print(rows[-1], flush=True)
        if not options.quick:
            write(NAME, rows, threads=1)
            draw(rows)


if __name__ == "__main__":
    main()
