"""Language models that are HMMs with thousands of states: Tables 1 to 4 and Figure 3 of the paper.

``best`` are the best models found for the Penn Treebank and WikiText-2, on two levels, and the best
of 8,192 states, given to clusters by the root of how often their words occur. The others are the
ablations of the paper at sizes that a laptop carries, with two seeds each, in three panels:
``large`` changes one thing of 4,096 states on two levels in 128 blocks, dropout 0.5; ``small`` one
thing of 1,024 states on one level in 8 blocks, without dropout, as the paper's of that size are;
``states`` is the first of these by number of states. They are trained for five epochs, the small
ones for three in batches of a quarter of the size: too few to see what a long training makes of
them. Dropout raises perplexity here, and lowers it in the paper's large models. Logits that are
parameters themselves ("scalar") have a learning rate of their own, the best for held-out data of
four that were tried with seed 0; the other rates were not varied. Perplexities are per token,
``<eos>`` included, sentences apart; their denominators stand beside them.

``paper_valid`` and ``paper_test`` are what *Scaling Hidden Markov Language Models* has for the same
thing, on one level, after 50 epochs; a pair where it prints several numbers. ``paper_states`` and
``paper_blocks`` are the size of its model, which is often another one; those larger than 1,024
states have dropout 0.5. The 200 of 8 blocks with dropout is from the logs of its authors, whose own
number without it is 187 there and 194 in print. ``summary`` has mean and range over seeds beside
these. Baselines in the picture are those of ``language_model_baselines.json``, where it has them.

Training is ``fit_map``: AdamW, a cosine schedule with a short warm-up, batches of sentences of
similar length, clipped gradients, and the parameters of the best validation. An interrupted run
goes on: checkpoints are in the folder ``CHECKPOINTS`` (by default that of temporary files), named
by what is trained. ``minutes`` are those of training, from the first start.

Writes ``language_models.json`` and ``language_models.png``.
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from common import FOLDER, alone, arguments, earlier, write
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
from pyrohmm.data.batches import batches_in_round
from pyrohmm.language import WarmupCosine

NAME = "language_models"


@dataclass(frozen=True)
class Paper:
    """What the paper has for the same thing; None for what it does not say."""

    paper_valid: float | tuple[float, float] | None = None  # from one number to another
    paper_test: float | None = None
    paper_states: int | None = None
    paper_blocks: int | None = None


@dataclass(frozen=True)
class Model:
    """One run."""

    panel: str
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
    epochs: float = 5.0
    tokens: int = 8192
    rate: float = 0.01
    scale: float | None = None
    decay: float = 0.0
    seed: int = 0


BEST = {
    "best-ptb": (
        Model("best", "best", states=32768, epochs=16),
        Paper(125.0, 115.8, 32768, 128),
    ),
    "best-wikitext2": (
        Model("best", "best", "wikitext2", states=16384, epochs=12),
        Paper(167.0, None, 32768, 128),
    ),
    "best-8192-ptb": (
        Model("best", "best of 8,192 states", states=8192, by_mass=True, epochs=20, decay=0.03),
        Paper(142.0, None, 8192, 64),
    ),
}
SEEDS = (0, 1)
LARGE = Model("large", "base")
SMALL = Model("small", "base", two_level=False, states=1024, clusters=8, dropout=0.0,
              epochs=3, tokens=2048, rate=0.004)  # fmt: skip
TABLES = [
    (LARGE, Paper((134.0, 136.0), None, 16384, 128)),
    (replace(LARGE, name="one level", two_level=False), Paper((134.0, 136.0), None, 16384, 128)),
    (replace(LARGE, name="32 blocks", clusters=32), Paper(137.0, None, 16384, 32)),
    (replace(LARGE, name="64 blocks", clusters=64), Paper(138.0, None, 16384, 64)),
    (replace(LARGE, name="256 blocks", clusters=256), Paper(136.0, None, 16384, 256)),
    (replace(LARGE, name="no dropout", dropout=0.0), Paper(145.0, None, 16384, 128)),
    (replace(LARGE, name="embeddings begin at 1", scale=1.0), Paper()),
    (replace(LARGE, name="factored", factored=True), Paper()),
    (replace(LARGE, name="by root of token mass", by_mass=True), Paper()),
    (SMALL, Paper(194.0, None, 1024, 8)),
    (replace(SMALL, name="dropout 0.5", dropout=0.5), Paper(200.0, None, 1024, 8)),
    (replace(SMALL, name="4 blocks", clusters=4), Paper(182.0, None, 1024, 4)),
    (replace(SMALL, name="no constraint", constraint="none"), Paper(180.0, None, 1024)),
    (replace(SMALL, name="uniform", constraint="uniform"), Paper(150.0, None, 8192)),
    (replace(SMALL, name="scalar", scalar=True, rate=0.3), Paper(169.0, None, 16384, 128)),
    *(
        (replace(LARGE, panel="states", name=f"{states:,} states", states=states), paper)
        for states, paper in (
            (1024, Paper()),
            (2048, Paper()),
            (8192, Paper(142.0, None, 8192, 64)),
        )
    ),
]
FIGURE_3 = {8192: (142.0, 142.0), 16384: (134.0, 136.0), 32768: (125.0, 125.0)}  # those in print
CORPORA = {"ptb": "Penn Treebank", "wikitext2": "WikiText-2"}
PANELS = {
    "large": "4,096 states, two levels, 128 blocks, dropout 0.5",
    "small": "1,024 states, one level, 8 blocks, no dropout",
}


def blocks_of(model: Model, text: Text, cache: dict[Any, Any]) -> blocks.Blocks | None:
    """Which states may emit which word."""
    if model.constraint == "none":
        return None
    if model.constraint == "uniform":
        return blocks.uniform(len(text.words), model.states, model.states // model.clusters)
    key = model.data, model.clusters
    if key not in cache:
        cache[key] = brown(text, model.clusters)
    assignment, counts = cache[key]
    power = 0.5 if model.by_mass else 0.0
    sizes = clusters.allocate(model.states, assignment, counts, power)
    return blocks.from_clusters(assignment, sizes)


def file_of(model: Model) -> Path:
    """The checkpoint of a run."""
    name = "-".join(str(value) for value in asdict(model).values()).replace(" ", "_")
    return Path(os.environ.get("CHECKPOINTS", tempfile.gettempdir()), f"{name}.fit")


def run(model: Model, paper: Paper, text: Text, cache: dict[Any, Any]) -> dict[str, Any]:
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
    steps = batches_in_round(text.train.lengths, model.tokens)
    total = max(1, round(steps * model.epochs))
    fit = fit_map(
        MarginalModel(module), text.train, num_steps=total, batch_tokens=model.tokens,
        optimizer=partial(
            torch.optim.AdamW, lr=model.rate, weight_decay=model.decay, fused=True
        ),
        schedule=partial(LambdaLR, lr_lambda=WarmupCosine(total)), clip_norm=5.0,
        tolerance=None, validation=text.valid,
        checkpoint=None if model.panel == "quick" else file_of(model),
    )  # fmt: skip
    row: dict[str, Any] = asdict(model) | {
        "parameters": sum(each.numel() for each in module.parameters()),
        "epochs_run": len(fit.losses) / steps,
        "minutes": fit.seconds / 60,
        "course": [[each.step / steps, math.exp(each.nats)] for each in fit.validation],
    }
    for part in ("valid", "test"):
        found = metrics.perplexity(fit, getattr(text, part), 64)
        row[f"{part}_perplexity"], row[f"{part}_tokens"] = found.value, found.num_tokens
    row |= asdict(paper)
    print({k: v for k, v in row.items() if k != "course"}, flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and range over seeds of each model, beside what the paper has."""
    lines = []
    for panel, name, data in dict.fromkeys(key(row)[:3] for row in rows):
        own = [row for row in rows if key(row)[:3] == (panel, name, data)]
        line = {"panel": panel, "name": name, "data": data, "seeds": [row["seed"] for row in own]}
        line |= {"states": own[0]["states"], "blocks": own[0]["clusters"]}
        if own[0]["constraint"] != "Brown":
            line["blocks"] = None
        for part in ("valid", "test"):
            values = [row[f"{part}_perplexity"] for row in own]
            line[part] = {"mean": mean(values), "range": [min(values), max(values)]}
        lines.append(line | {name: own[0][name] for name in asdict(Paper())})
    return lines


def draw(rows: list[dict[str, Any]], baselines: list[dict[str, Any]]) -> None:
    """Training, perplexity by number of states, and what each change of the bases does."""
    import matplotlib.pyplot as plt

    best = {
        data: [row for row in rows if (row["panel"], row["data"]) == ("best", data)]
        for data in CORPORA
    }
    above = [data for data in CORPORA if best[data]] + ["states"]
    width = 6 // len(above)
    figure, axes = plt.subplot_mosaic(
        [[name for name in above for _ in range(width)], ["large"] * 3 + ["small"] * 3],
        figsize=(13, 8.5), layout="constrained",
    )  # fmt: skip
    for data in above[:-1]:
        own, title = best[data], CORPORA[data]
        for number, row in enumerate(own):
            label = f"{row['states']:,} states"
            axes[data].plot(*zip(*row["course"]), ".-", color=f"C{number}", label=label)
            height = mean(ends(row["paper_valid"]))
            level(axes[data], height, f"paper, {row['paper_states']:,} states", ":", left=True)
        lines_of(baselines, title, axes[data])
        axes[data].set(xlabel="epochs", ylabel="perplexity, held out", title=title, yscale="log")
        axes[data].xaxis.get_major_locator().set_params(integer=True)
        ticks(axes[data])
    by_states(rows, baselines, axes["states"])
    for panel, title in PANELS.items():
        lines = [line for line in summary(rows) if line["panel"] == panel]
        for place, line in enumerate(lines):
            seeds = [row["valid_perplexity"] for row in rows if key(row)[:3] == key(line)[:3]]
            axes[panel].plot(seeds, [place] * len(seeds), "o", color="C0", label="each seed")
            if line["name"] == "base":
                axes[panel].axvline(line["valid"]["mean"], color="C0", linestyle="--", alpha=0.6)
            if line["paper_valid"] is not None:
                low, high = ends(line["paper_valid"])
                axes[panel].plot([low, high], [place, place], "D-", color="0.5", label="paper")
                axes[panel].annotate(
                    said(line), (low, place), (-4, 6), "data", "offset points", fontsize=7,
                    color="0.4",
                )  # fmt: skip
        names = [line["name"] for line in lines]
        axes[panel].set_yticks(range(len(names)), names)
        axes[panel].set(xlabel="perplexity, held out, Penn Treebank", title=f"base: {title}")
        axes[panel].invert_yaxis()
        axes[panel].grid(alpha=0.3, axis="x")
    for axis in axes.values():
        found = dict(zip(*axis.get_legend_handles_labels()[::-1]))
        if found:
            axis.legend(found.values(), found.keys(), fontsize=7)
    figure.savefig(FOLDER / f"{NAME}.png", dpi=150)
    plt.close(figure)


def by_states(rows: list[dict[str, Any]], baselines: list[dict[str, Any]], axis: Any) -> None:
    """Perplexity by number of states, as in Figure 3."""
    own = [row for row in rows if row["panel"] == "states" or key(row)[:2] == ("large", "base")]
    if own:
        sizes = sorted({row["states"] for row in own})
        means = [mean(r["valid_perplexity"] for r in own if r["states"] == s) for s in sizes]
        (line,) = axis.plot(sizes, means, label=f"two levels, {own[0]['epochs']:g} epochs")
        for row in own:
            axis.plot(row["states"], row["valid_perplexity"], "o", color=line.get_color())
    for row in rows:
        if (row["panel"], row["data"]) == ("best", "ptb"):
            axis.plot(row["states"], row["valid_perplexity"], "*", color="C3", markersize=9,
                      label="the best of ours")  # fmt: skip
    for states, spread in FIGURE_3.items():
        axis.plot([states, states], spread, "D-", color="0.5", label="paper, one level, 50 epochs")
    lines_of(baselines, CORPORA["ptb"], axis)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set(xlabel="states", ylabel="perplexity, held out", yscale="log", title=CORPORA["ptb"])
    ticks(axis)


def lines_of(baselines: list[dict[str, Any]], data: str, axis: Any) -> None:
    """Baselines of a text, as lines with their names; below a line that is close to another."""
    own = [row for row in baselines if row["data"] == data]
    above = math.inf
    for row in sorted(own, key=lambda row: -row["valid_perplexity"]):
        early = ", stopped early" if row.get("stopped", "rate") != "rate" else ""
        height = row["valid_perplexity"]
        level(axis, height, row["model"].split(",")[0] + early, "--", height > above / 1.03)
        above = height


def level(
    axis: Any, height: float, label: str, style: str, below: bool = False, left: bool = False
) -> None:
    """A line with its name, above or ``below`` it, at its right or ``left`` end."""
    axis.axhline(height, color="0.4", linestyle=style, linewidth=0.8)
    axis.annotate(
        label, (0.02 if left else 0.98, height), (0, -2 if below else 2),
        axis.get_yaxis_transform(), "offset points", ha="left" if left else "right",
        va="top" if below else "bottom", fontsize=7, color="0.3",
    )  # fmt: skip


def ticks(axis: Any) -> None:
    """Name perplexities on a logarithmic axis by themselves, not by powers."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axis.minorticks_off()


def ends(value: float | list[float] | tuple[float, float]) -> tuple[float, float]:
    """A number, or the first and the last of a range."""
    return (value, value) if isinstance(value, float) else (value[0], value[-1])


def said(line: dict[str, Any]) -> str:
    """Of which size the paper's model is, where it is another one."""
    parts = []
    if line["paper_states"] != line["states"]:
        parts.append(f"{line['paper_states']:,} states")
    if line["paper_blocks"] not in (line["blocks"], None):
        parts.append(f"{line['paper_blocks']} blocks")
    return ", ".join(parts)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return row["panel"], row["name"], row["data"], row.get("seed")


def main() -> None:
    panels = dict.fromkeys(each.panel for each, _ in TABLES)
    tables = {f"{panel}-{seed}": (panel, seed) for seed in SEEDS for panel in panels}
    options = arguments(__doc__, [*BEST, *tables])
    cache: dict[Any, Any] = {}
    if options.quick:
        text = read("letters")
        small = Model("quick", "", "letters", 64, 8, dim=16, epochs=0.2, tokens=512)
        for each in (small, replace(small, two_level=False), replace(small, scalar=True,
                     two_level=False)):  # fmt: skip
            run(each, Paper(), text, cache)
        return
    wanted = [BEST[part] for part in BEST if part in options.only]
    for part, (panel, seed) in tables.items():
        if part in options.only:
            wanted += [(replace(e, seed=seed), paper) for e, paper in TABLES if e.panel == panel]
    order = [key(asdict(each))[:2] for each, _ in (*BEST.values(), *TABLES)]
    texts: dict[str, Text] = {}

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return order.index(key(row)[:2]), row["data"], row["seed"]

    for each, paper in wanted:
        if each.data not in texts:
            texts[each.data] = read(each.data)
        row = run(each, paper, texts[each.data], cache)
        with alone(NAME):  # as soon as it is there
            rows = [other for other in earlier(NAME) if key(other) != key(row)]
            rows = sorted([*rows, row], key=place)
            write(NAME, rows, threads=torch.get_num_threads(), summary=summary(rows))
            draw(rows, earlier("language_model_baselines"))


if __name__ == "__main__":
    main()
