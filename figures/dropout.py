"""State dropout by size of the text and number of epochs: what the default rests on.

Language models of 1,024 states in 64 blocks and 128 dimensions are trained on the first 3, 10 and
40 hundredths of the sentences of the Penn Treebank, for few and for many epochs: without dropout,
with a quarter or a half of the states left out, and with a share that falls from a half to a
quarter; on the largest part, for ten epochs alone, without and with a quarter. Batches, rates and
clipping are the defaults of ``LanguageModel.fit``. Words that do not occur in the part that is
learnt from are ``<unk>``, so that perplexities can be compared within a part only. The first half
of the held-out sentences chooses the epoch that is kept, and is what ``course`` is of;
``perplexity`` is that of the second half, ``<eos>`` included. Rows without a seed have
seed 0 and are of an earlier version; the picture says how many seeds there are. Times are those of
the processor.

Writes ``dropout.json``, a row after each run, and ``dropout.png``.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import pyro
from common import alone, arguments, earlier, public_files, pyplot, save, write

from pyrohmm import LanguageModel, language
from pyrohmm.data.readers import read_lines
from pyrohmm.language.training import FEW_EPOCHS
from pyrohmm.nn import LinearDropout

NAME = "dropout"
TOKENS = 2048  # of a minibatch
SHARES = {"none": (0.0, 0.0), "0.25": (0.25, 0.25), "0.5": (0.5, 0.5), "0.5 to 0.25": (0.5, 0.25)}


@dataclass(frozen=True)
class Run:
    """One run; ``dropout`` is one of ``SHARES``."""

    part: str
    hundredths: float
    epochs: int
    dropout: str
    seed: int = 0
    states: int = 1024
    clusters: int = 64
    dim: int = 128


PARTS = {
    "3%": [
        Run("3%", 3, epochs, each, seed)
        for seed in range(3)
        for epochs in (5, 10, 20, 40)
        for each in SHARES
    ],
    "10%": [
        Run("10%", 10, epochs, each, seed)
        for seed in range(3)
        for epochs in (2, 5, 10, 20)
        for each in SHARES
    ],
    "40%": [Run("40%", 40, 10, each) for each in ("none", "0.25")],
}


def train(run: Run, lines: list[str], held: list[str]) -> dict[str, Any]:
    """Train a model and evaluate it."""
    pyro.set_rng_seed(run.seed)
    lines = lines[: round(len(lines) * run.hundredths / 100)]
    vocabulary = language.count_words(lines)
    data, valid = language.encode(lines, vocabulary), language.encode(held, vocabulary)
    model = LanguageModel.from_data(
        vocabulary, data, run.states, run.clusters, run.dim, dropout=0.0
    )
    steps = model.num_iterations(data, run.epochs, TOKENS)
    begin, end = SHARES[run.dropout]
    dropout = begin if begin == end else LinearDropout(begin, end, steps)
    pyro.set_rng_seed(run.seed)
    model = LanguageModel(vocabulary, model.blocks, run.dim, dropout=dropout)
    half = len(valid) // 2
    start_time = time.process_time()
    fit = model.fit(data, valid[:half], num_epochs=run.epochs, batch_tokens=TOKENS)
    row = asdict(run) | {
        "words": len(vocabulary),
        "tokens": data.num_observed,
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "perplexity": model.perplexity(valid[half:]).value,
        "processor_seconds": time.process_time() - start_time,
        "course": [
            [each.step * run.epochs / steps, math.exp(each.nats)] for each in fit.validation
        ],
    }
    print({name: value for name, value in row.items() if name != "course"}, flush=True)
    return row


def draw(rows: list[dict[str, Any]]) -> None:
    """Perplexity by number of epochs, a panel for each part of the text, a line for each share."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axis, part in zip(axes, PARTS):  # of the largest part one number of epochs was run
        of_part = [row for row in rows if row["part"] == part]
        for number, share in enumerate(SHARES):
            found = [row for row in of_part if row["dropout"] == share]
            epochs = sorted({row["epochs"] for row in found})
            runs = [[r["perplexity"] for r in found if r["epochs"] == each] for each in epochs]
            means, marker = [mean(each) for each in runs], "osD^"[number]
            axis.plot(epochs, means, marker + "-", color=f"C{number}", label=share)
            for place, each in zip(epochs, runs):
                axis.plot([place] * len(each), each, marker, color=f"C{number}", ms=3, alpha=0.5)
        seeds = len({row.get("seed", 0) for row in of_part})
        ratio = of_part[0]["tokens"] / of_part[0]["parameters"]
        axis.axvline(FEW_EPOCHS * ratio ** (1 / 3), color="0.5", linestyle=":",
                     label="no dropout up to here by default")  # fmt: skip
        axis.set(
            xscale="log",
            xlabel="epochs",
            ylabel="held-out perplexity",
            title=f"{part} of the text: {ratio:.2f} tokens per parameter, seeds: {seeds}",
        )
        axis.set_xticks(epochs, [str(each) for each in epochs])
        axis.minorticks_off()
    handles, labels = axes[0].get_legend_handles_labels()
    labels = [name if "default" in name else f"dropout {name}" for name in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    save(figure, NAME)


def key(row: dict[str, Any]) -> tuple[str, int, str, int]:
    """Identifies a row."""
    return row["part"], row["epochs"], row["dropout"], row.get("seed", 0)


def main() -> None:
    options = arguments(__doc__, list(PARTS))
    if options.draw:
        draw(earlier(NAME))
        return
    if options.quick:
        lines = [" ".join("abc"[n % 3 : n % 4]) or "a" for n in range(60)]
        for share in SHARES:
            train(Run("quick", 100, 2, share, 0, 16, 4, 8), lines, lines[:10])
        return
    lines, held = (read_lines(public_files.find(f"ptb-{part}")) for part in ("train", "valid"))
    order = [key(asdict(run)) for part in PARTS.values() for run in part]
    for part in options.only:
        for run in PARTS[part]:
            if run.seed and key(asdict(run)) in map(key, earlier(NAME)):
                continue  # further seeds go on where they were stopped
            row = train(run, lines, held)
            with alone(NAME):  # after each run
                rows = [other for other in earlier(NAME) if key(other) != key(row)]
                write(NAME, sorted([*rows, row], key=lambda each: order.index(key(each))))
    draw(earlier(NAME))


if __name__ == "__main__":
    main()
