"""Language models that are HMMs with thousands of states: Tables 1 to 4 and Figure 3 of the paper.

``best`` are the best models found for the Penn Treebank and WikiText-2, on two levels; ``tables``
the ablations of the paper at sizes that a laptop carries, with two seeds each: number of blocks,
uniform blocks, no dropout, wider embeddings at the start, scalar parameters, factored embeddings,
one level or two, and number of states. They are trained for eight epochs, too few to see what a
long training makes of them. Perplexities are per token, ``<eos>`` included, sentences
apart; their denominators stand beside them. Baselines are those of
``language_model_baselines.json``.

Training is ``fit_map``: AdamW, a cosine schedule with a short warm-up, batches of sentences of
similar length, clipped gradients, and the parameters of the best validation. An interrupted run
goes on: checkpoints are in the folder ``CHECKPOINTS`` (by default that of temporary files).

Writes ``language_models.json`` and ``language_models.png``.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import torch
from common import FOLDER, arguments, earlier, write
from common.text import Text, brown, read
from torch.optim.lr_scheduler import LambdaLR

from pyrohmm import (
    MarginalModel,
    NeuralHMM,
    ScalarHMM,
    blocks,
    clusters,
    fit_map,
    metrics,
)
from pyrohmm.batches import cut_by_steps
from pyrohmm.language import rise_and_fall


@dataclass(frozen=True)
class Model:
    """One run."""

    name: str
    data: str = "ptb"
    states: int = 4096
    clusters: int = 128
    constraint: str = "Brown"
    two_level: bool = True
    factored: bool = False
    scalar: bool = False
    by_mass: bool = False
    dropout: float = 0.5
    dim: int = 256
    epochs: float = 8.0
    tokens: int = 8192
    rate: float = 0.01
    scale: float | None = None
    average: float | None = None
    seed: int = 0
    paper: float | None = None


BEST = [
    Model("best", states=32768, epochs=30, paper=125.0),
    Model("best", "wikitext2", states=16384, epochs=12, paper=167.0),
]
BASE = Model("base", epochs=8)
SEEDS = (0, 1)
TABLES = [
    BASE,
    replace(BASE, name="one level", two_level=False),
    *(replace(BASE, name=f"{count} blocks", clusters=count) for count in (32, 64, 256)),
    replace(BASE, name="no dropout", dropout=0.0),
    replace(BASE, name="embeddings begin at 1", scale=1.0),
    replace(BASE, name="factored", factored=True),
    replace(BASE, name="by token mass", by_mass=True),
    *(replace(BASE, name=f"{states} states", states=states) for states in (1024, 2048, 8192)),
    replace(BASE, name="uniform", constraint="uniform", two_level=False, states=1024, clusters=8),
    replace(BASE, name="Brown", two_level=False, states=1024, clusters=8),
    replace(BASE, name="no constraint", constraint="none", two_level=False, states=1024),
    replace(BASE, name="scalar", scalar=True, two_level=False, states=1024, clusters=8),
]


def blocks_of(model: Model, text: Text, cache: dict[Any, Any]) -> blocks.Blocks | None:
    """Which states may emit which word."""
    each = model.states // model.clusters
    if model.constraint == "none":
        return None
    if model.constraint == "uniform":
        return blocks.uniform(len(text.words), model.states, each)
    key = model.data, model.clusters
    if key not in cache:
        cache[key] = brown(text, model.clusters)
    assignment, counts = cache[key]
    if model.by_mass:
        return blocks.from_clusters(
            assignment, clusters.allocate(model.states, assignment, counts.double().sqrt().long())
        )
    return blocks.from_clusters(assignment, each)


def run(model: Model, text: Text, cache: dict[Any, Any]) -> dict[str, Any]:
    """Train one, and say how good it is."""
    pyro.set_rng_seed(model.seed)
    given = blocks_of(model, text, cache)
    module: NeuralHMM | ScalarHMM
    if model.scalar:
        module = ScalarHMM(model.states, len(text.words), blocks=given, dropout=model.dropout)
    else:
        module = NeuralHMM(
            model.states, len(text.words), model.dim, blocks=given, dropout=model.dropout,
            two_level=model.two_level, factored=model.factored, scale=model.scale,
        )  # fmt: skip
    lengths = text.train.lengths
    steps = len(cut_by_steps(lengths, lengths.argsort(), model.tokens))
    total = max(1, round(steps * model.epochs))
    folder = Path(os.environ.get("CHECKPOINTS", tempfile.gettempdir()))
    file = "-".join(str(value) for value in asdict(model).values()).replace(" ", "_")
    begun = time.perf_counter()
    fit = fit_map(
        MarginalModel(module), text.train, num_steps=total, batch_tokens=model.tokens,
        optimizer=lambda p: torch.optim.AdamW(p, lr=model.rate, weight_decay=0.0, fused=True),
        schedule=partial(LambdaLR, lr_lambda=partial(rise_and_fall, total)), clip_norm=5.0,
        average=model.average, tolerance=None,
        validation=text.valid, validate_every=max(1, min(steps, total)),
        checkpoint=None if model.name == "quick" else folder / f"{file}.fit",
    )  # fmt: skip
    row: dict[str, Any] = asdict(model) | {
        "parameters": sum(each.numel() for each in module.parameters()),
        "epochs_run": len(fit.losses) / steps,
        "minutes": fit.seconds / 60,
        "course": [math.exp(each.nats) for each in fit.validation],
        "wall_minutes": (time.perf_counter() - begun) / 60,
    }
    for part, data in (("valid", text.valid), ("test", text.test)):
        found = metrics.perplexity(fit, data, 64)
        row[f"{part}_perplexity"], row[f"{part}_tokens"] = found.value, found.num_tokens
    print({k: v for k, v in row.items() if k != "course"}, flush=True)
    return row


def draw(rows: list[dict[str, Any]]) -> None:
    """How validation perplexity falls, and what the ablations change."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for row in rows:
        if row["name"] == "best":
            epochs = range(1, len(row["course"]) + 1)
            left.plot(epochs, row["course"], "o-", label=f"{row['data']}, {row['states']:,} states")
            left.axhline(row["paper"], color="k", linestyle=":", linewidth=0.8)
    left.set(xlabel="epochs", ylabel="validation perplexity", title="training (dotted: paper)")
    left.legend()
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] != "best"))
    for place, name in enumerate(names):
        values = [row["valid_perplexity"] for row in rows if row["name"] == name]
        right.plot(values, [place] * len(values), "o", color="C0")
    right.set_yticks(range(len(names)), names)
    right.set(xlabel="validation perplexity, Penn Treebank", title="each change of the base")
    right.invert_yaxis()
    figure.savefig(FOLDER / "language_models.png", dpi=150)


def main() -> None:
    tables = {f"tables-{seed}": seed for seed in SEEDS}
    options = arguments(__doc__, ["best-ptb", "best-wikitext2", *tables])
    if options.quick:
        text, cache = read("letters"), {}
        small = Model("quick", "letters", states=64, clusters=8, dim=16, epochs=0.2, tokens=512)
        for each in (small, replace(small, two_level=False), replace(small, scalar=True,
                     two_level=False)):  # fmt: skip
            run(each, text, cache)
        return
    wanted = [each for each in BEST if f"best-{each.data}" in options.only]
    for part, seed in tables.items():
        if part in options.only:
            wanted += [replace(each, seed=seed) for each in TABLES]
    order = [(each.name, each.data) for each in (*BEST, *TABLES)]
    texts: dict[str, Text] = {}
    cache: dict[Any, Any] = {}
    for each in wanted:
        if each.data not in texts:
            texts[each.data] = read(each.data)
        row = run(each, texts[each.data], cache)
        others = [other for other in earlier("language_models") if key(other) != key(row)]
        rows = sorted([*others, row], key=lambda row: (order.index(key(row)[:2]), row["seed"]))
        write("language_models", rows)  # as soon as it is there
        draw(rows)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return row["name"], row["data"], row["seed"]


if __name__ == "__main__":
    main()
