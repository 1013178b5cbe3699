"""State dropout by size of the text and number of epochs: what the default rests on.

Language models of 1,024 states in 64 blocks and 128 dimensions are trained on the first 3, 10 and
40 hundredths of the sentences of the Penn Treebank, for few and for many epochs: without dropout,
with a quarter or a half of the states left out, and with a share that falls from a half to a
quarter; on the largest part, for ten epochs alone, without and with a quarter. Batches, rates and
clipping are the defaults of ``LanguageModel.fit``. Words that do not occur in the part that is
learnt from are ``<unk>``, so that perplexities can be compared within a part only. The first half
of the held-out sentences chooses the epoch that is kept, and is what ``course`` is of;
``perplexity`` is that of the second half, ``<eos>`` included. One seed; times are those of the
processor.

Writes ``dropout.json``, a row after each run, and ``dropout.png``.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import pyro
from common import FOLDER, alone, arguments, earlier, public_files, pyplot, write

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
    states: int = 1024
    clusters: int = 64
    dim: int = 128


PARTS = {
    "3%": [Run("3%", 3, epochs, each) for epochs in (5, 10, 20, 40) for each in SHARES],
    "10%": [Run("10%", 10, epochs, each) for epochs in (2, 5, 10, 20) for each in SHARES],
    "40%": [Run("40%", 40, 10, each) for each in ("none", "0.25")],
}


def train(run: Run, lines: list[str], held: list[str]) -> dict[str, Any]:
    """Train a model and evaluate it."""
    pyro.set_rng_seed(0)
    lines = lines[: round(len(lines) * run.hundredths / 100)]
    vocabulary = language.count_words(lines)
    data, valid = language.encode(lines, vocabulary), language.encode(held, vocabulary)
    model = LanguageModel.from_data(
        vocabulary, data, run.states, run.clusters, run.dim, dropout=0.0
    )
    steps = model.num_iterations(data, run.epochs, TOKENS)
    begin, end = SHARES[run.dropout]
    dropout = begin if begin == end else LinearDropout(begin, end, steps)
    pyro.set_rng_seed(0)
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
    widths = {"width_ratios": [2, 2, 1.4]}  # of the largest part one number of epochs was run
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained", gridspec_kw=widths)
    for axis, part in zip(axes, PARTS):
        of_part = [row for row in rows if row["part"] == part]
        for number, share in enumerate(SHARES):
            found = [row for row in of_part if row["dropout"] == share]
            points = sorted((row["epochs"], row["perplexity"]) for row in found)
            if points:
                axis.plot(*zip(*points), "o-", color=f"C{number}", label=share)
        ratio = of_part[0]["tokens"] / of_part[0]["parameters"]
        axis.axvline(FEW_EPOCHS * ratio ** (1 / 3), color="0.5", linestyle=":",
                     label="default: no dropout up to here")  # fmt: skip
        axis.set(xscale="log", xlabel="epochs", ylabel="held-out perplexity",
                 title=f"{part} of the text:\n{ratio:.2f} tokens per parameter")  # fmt: skip
        epochs = sorted({row["epochs"] for row in of_part})
        axis.set_xticks(epochs, [str(each) for each in epochs])
        axis.minorticks_off()
    axes[2].set_xlim(5, 20)
    handles, labels = axes[0].get_legend_handles_labels()
    labels = [name if "default" in name else f"dropout: {name}" for name in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figure.savefig(FOLDER / f"{NAME}.png", dpi=150)
    plt.close(figure)


def key(row: dict[str, Any]) -> tuple[str, int, str]:
    """Identifies a row."""
    return row["part"], row["epochs"], row["dropout"]


def main() -> None:
    options = arguments(__doc__, list(PARTS))
    if options.draw:
        draw(earlier(NAME))
        return
    if options.quick:
        lines = [" ".join("abc"[n % 3 : n % 4]) or "a" for n in range(60)]
        for share in SHARES:
            train(Run("quick", 100, 2, share, 16, 4, 8), lines, lines[:10])
        return
    lines, held = (read_lines(public_files.find(f"ptb-{part}")) for part in ("train", "valid"))
    order = [key(asdict(run)) for part in PARTS.values() for run in part]
    for part in options.only:
        for run in PARTS[part]:
            row = train(run, lines, held)
            with alone(NAME):  # after each run
                rows = [other for other in earlier(NAME) if key(other) != key(row)]
                write(NAME, sorted([*rows, row], key=lambda each: order.index(key(each))))
    draw(earlier(NAME))


if __name__ == "__main__":
    main()
