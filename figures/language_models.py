"""Language models that are HMMs with thousands of states: Tables 1 to 4 and Figure 3 of the paper.

``best`` are the best models for the Penn Treebank and WikiText-2, on two levels, and the best with
8,192 states, allocated to clusters by the root of their token counts. The others are the ablations
of the paper at sizes for a laptop, with two seeds each, in three panels: ``large`` changes one
setting of a model with 4,096 states on two levels in 128 blocks, dropout 0.5; ``small`` one setting
of a model with 1,024 states on one level in 8 blocks, without dropout, like the paper's of that
size; ``states`` varies the number of states of the first. They are trained for five epochs, the
small ones for three with batches of a quarter of the size: too few to show the effect of long
training. Dropout raises the perplexity here, and lowers it in the paper's large models. Logits that
are parameters themselves ("scalar") have a separate learning rate, the best for held-out data of
four tried with seed 0; the other rates were not tuned. Perplexities are per token, ``<eos>``
included, with sentences independent; the numbers of tokens are reported beside them. The first half
of the held-out sentences chooses the epoch and is what ``course`` is of; ``unseen_perplexity`` is
that of the second half. In rows that have none, all held-out sentences chose the epoch.

"two chains side by side" is one chain with the states of two trained ones, which begins in either
and stays: a mixture of sentences, all with equal weights.

``usage`` says how many states the held-out tokens use, and of what rank the transitions are.

``paper_valid`` and ``paper_test`` are the numbers of *Scaling Hidden Markov Language Models* for
the same setting, on one level, after 50 epochs; a pair where it prints several numbers.
``paper_states`` and ``paper_blocks`` are the size of its model, which often differs; its models
with more than 1,024 states have dropout 0.5. The 200 of 8 blocks with dropout is from the logs of
its authors, where the number without it is 187, against 194 in print; the 122.7 of 65,536 states is
from the name of a checkpoint that they released, and not in print. ``summary`` has mean and range
over seeds. Baselines in the picture are those of ``language_model_baselines.json``.

Training is ``fit_map``: AdamW, a cosine schedule with a short warm-up, batches of sentences of
similar length, clipped gradients, and the parameters of the best validation. An interrupted run is
resumed from its checkpoint in the folder ``CHECKPOINTS`` (by default that of temporary files),
named after the settings. ``minutes`` is the training time, interruptions included.

Writes ``language_models.json``, ``language_models.png`` and ``language_models_ablations.png``.
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
from common import PUBLISHED, alone, arguments, earlier, plain_ticks, pyplot, save, write
from common.neural_ablations import RandomStatesHMM, ScalarHMM, allocate
from common.spectrum import transition_spectrum
from common.text import Text, brown, read
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from pyrohmm import (
    Fit,
    MarginalModel,
    NeuralHMM,
    Sequences,
    blocks,
    fit_map,
    metrics,
)
from pyrohmm.data.batches import batches_in_round
from pyrohmm.language import WarmupCosine
from pyrohmm.nn import LinearDropout

NAME = "language_models"
PERPLEXITIES = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0)  # of the ticks


@dataclass(frozen=True)
class Paper:
    """The paper's numbers for the same setting; None where there are none."""

    paper_valid: float | tuple[float, float] | None = None  # a range where it prints several
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
    last_dropout: float | None = None  # it falls linearly to this; None is as at first
    bfloat16: bool = False  # networks and inner products in training
    dim: int = 256
    epochs: float = 5.0
    tokens: int = 8192
    rate: float = 0.01
    scale: float | None = None
    decay: float = 0.0
    seed: int = 0
    first: float | None = None  # a fit of so many epochs to its end, which then goes on to all
    average: float | None = None  # decay of a moving average of the parameters, by step


BEST = {
    "best-ptb": (
        Model("best", "best", states=32768, epochs=16),
        Paper(125.0, 115.8, 32768, 128),
    ),
    "best-wikitext2": (
        Model("best", "best", "wikitext2", states=16384, epochs=12),
        Paper(167.0, None, 32768, 128),
    ),
    "annealed-ptb": (
        Model(
            "best",
            "dropout annealed",
            states=32768,
            by_mass=True,
            epochs=10,
            last_dropout=0.3,
            bfloat16=True,
            decay=0.05,
        ),
        Paper(125.0, 115.8, 32768, 128),
    ),
    "averaged-ptb": (
        Model(
            "best",
            "dropout annealed, parameters averaged",
            states=32768,
            by_mass=True,
            epochs=8,
            last_dropout=0.4,
            bfloat16=True,
            decay=0.05,
            seed=1,
            average=0.98,
        ),
        Paper(125.0, 115.8, 32768, 128),
    ),
    "annealed-wikitext2": (
        Model(
            "best",
            "dropout annealed",
            "wikitext2",
            states=32768,
            by_mass=True,
            epochs=5,
            last_dropout=0.25,
            bfloat16=True,
            decay=0.03,
        ),
        Paper(167.0, None, 32768, 128),
    ),
    "resumed-wikitext2": (
        Model(
            "best",
            "dropout annealed, then resumed",
            "wikitext2",
            states=32768,
            by_mass=True,
            epochs=10,
            last_dropout=0.25,
            bfloat16=True,
            decay=0.03,
            first=5,
        ),
        Paper(167.0, None, 32768, 128),
    ),
    "one-level-ptb": (
        Model(
            "best",
            "one level, factored",
            states=16384,
            two_level=False,
            factored=True,
            epochs=18,
            bfloat16=True,
        ),
        Paper((134.0, 136.0), None, 16384, 128),
    ),
    "best-8192-ptb": (
        Model("best", "best of 8,192 states", states=8192, by_mass=True, epochs=20, decay=0.03),
        Paper(142.0, None, 8192, 64),
    ),
}
ANNEALED, AVERAGED = BEST["annealed-ptb"][0], BEST["averaged-ptb"][0]
SIDE_BY_SIDE = {  # chains of which a sentence has one: a chain with the states of all
    "two-chains-ptb": (
        "two chains side by side",
        (ANNEALED, AVERAGED),
        Paper(122.7, None, 65536, 128),
    ),
    "three-chains-ptb": (
        "three chains side by side",
        (ANNEALED, AVERAGED, replace(AVERAGED, seed=2)),
        Paper(122.7, None, 65536, 128),
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
FIGURE_3 = {
    8192: (142.0, 142.0),
    16384: (134.0, 136.0),
    32768: (125.0, 125.0),
}  # the numbers in print
PAPER_WIKITEXT = 167.0
CORPORA = {"ptb": "Penn Treebank", "wikitext2": "WikiText-2"}
PLAIN = {  # names of ablations in the picture
    "no constraint": "no blocks",
    "uniform": "random states\nof each word",
    "scalar": "logits,\nno networks",
    "factored": "embedding: block and state",
    "embeddings begin at 1": "embeddings of scale 1",
    "by root of token mass": "states by √tokens of a block",
}
PANELS = {
    "large": "4,096 states, two levels, 128 blocks, dropout 0.5",
    "small": "1,024 states, one level, 8 blocks, no dropout",
}


def blocks_of(model: Model, text: Text, cache: dict[Any, Any]) -> blocks.Blocks | None:
    """The states that may emit each word."""
    if model.constraint in ("none", "uniform"):
        return None
    key = model.data, model.clusters
    if key not in cache:
        cache[key] = brown(text, model.clusters)
    assignment, counts = cache[key]
    power = 0.5 if model.by_mass else 0.0
    sizes = allocate(model.states, assignment, counts, power)
    return blocks.from_clusters(assignment, sizes)


def file_of(model: Model) -> Path:
    """Path of the checkpoint of a run."""
    name = "-".join(str(value) for value in asdict(model).values()).replace(" ", "_")
    return Path(os.environ.get("CHECKPOINTS", tempfile.gettempdir()), f"{name}.fit")


def trained(
    model: Model, epochs: float, text: Text, partition: blocks.Blocks | None
) -> tuple[Fit, NeuralHMM | ScalarHMM, int]:
    """A fit of so many epochs, its module, and the steps of an epoch.

    It goes on from the checkpoint of the run, if there is one.
    """
    pyro.set_rng_seed(model.seed)
    steps = batches_in_round(text.train.lengths, model.tokens)
    total = max(1, round(steps * epochs))
    dropout: float | LinearDropout = model.dropout
    if model.last_dropout is not None:
        dropout = LinearDropout(model.dropout, model.last_dropout, total)
    module: NeuralHMM | ScalarHMM
    if model.scalar:
        module = ScalarHMM(model.states, len(text.words), blocks=partition, dropout=dropout)
    elif model.constraint == "uniform":
        module = RandomStatesHMM(
            model.states, len(text.words), model.dim, scale=model.scale,
            states_per_symbol=model.states // model.clusters,
        )  # fmt: skip
    else:
        module = NeuralHMM(
            model.states, len(text.words), model.dim, blocks=partition, dropout=dropout,
            two_level=model.two_level, factored=model.factored, scale=model.scale,
        )  # fmt: skip
    fit = fit_map(
        MarginalModel(module), text.train, num_iterations=total, batch_tokens=model.tokens,
        optimizer=partial(
            torch.optim.AdamW, lr=model.rate, weight_decay=model.decay, fused=True
        ),
        schedule=partial(LambdaLR, lr_lambda=WarmupCosine(total)), clip_norm=5.0,
        average=model.average, tolerance=None, validation=text.valid[: len(text.valid) // 2],
        checkpoint=None if model.panel == "quick" else file_of(model),
        precision=torch.bfloat16 if model.bfloat16 else None,
    )  # fmt: skip
    return fit, module, steps


def run(model: Model, paper: Paper, text: Text, cache: dict[Any, Any]) -> dict[str, Any]:
    """Train a model and evaluate it."""
    partition = blocks_of(model, text, cache)
    if model.first is not None and not file_of(model).exists():
        trained(model, model.first, text, partition)
    fit, module, steps = trained(model, model.epochs, text, partition)
    half = len(text.valid) // 2
    row: dict[str, Any] = asdict(model) | {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "epochs_run": len(fit.losses) / steps,
        "minutes": fit.seconds / 60,
        "course": [[report.step / steps, math.exp(report.nats)] for report in fit.validation],
    }
    for part, data in (("valid", text.valid), ("unseen", text.valid[half:]), ("test", text.test)):
        result = metrics.perplexity(fit, data, 64)
        row[f"{part}_perplexity"], row[f"{part}_tokens"] = result.value, result.num_tokens
    row["usage"] = used(fit, text.valid)
    row |= asdict(paper)
    print({k: v for k, v in row.items() if k != "course"}, flush=True)
    return row


def run_side_by_side(
    name: str, models: tuple[Model, ...], paper: Paper, text: Text, cache: dict[Any, Any]
) -> dict[str, Any]:
    """Evaluate trained models as one chain, which begins in the states of any of them and stays.

    The probability of a sentence is the mean of those that it has in the chains, where each begins
    with the same probability.
    """
    found = [trained(each, each.epochs, text, blocks_of(each, text, cache)) for each in models]
    fits = [fit for fit, _, _ in found]
    row = asdict(models[0]) | {
        "name": name,
        "states": sum(each.states for each in models),
        "last_dropout": None,
        "epochs": sum(each.epochs for each in models),
        "parameters": sum(p.numel() for _, module, _ in found for p in module.parameters()),
        "minutes": sum(fit.seconds for fit in fits) / 60,
        "course": [],
        "parts": [[each.name, each.seed] for each in models],
    }
    half = len(text.valid) // 2
    for part, data in (("valid", text.valid), ("unseen", text.valid[half:]), ("test", text.test)):
        each = torch.stack([sentence_log_probs(fit, data) for fit in fits])
        total = (each.logsumexp(0) - math.log(len(fits))).sum().item()
        tokens = int(data.lengths.sum())
        row[f"{part}_perplexity"] = math.exp(-total / tokens)
        row[f"{part}_tokens"] = tokens
    row |= asdict(paper)
    print(row, flush=True)
    return row


def sentence_log_probs(fit: Fit, data: Sequences) -> Tensor:
    """The log-probability of each sentence, in nats."""
    found = torch.zeros(len(data), dtype=torch.float64)
    with torch.no_grad():
        for part in data.lengths.argsort().split(64):
            batch = data[part]
            found[part] = fit.hmm(batch).log_prob(batch.values).double()
    return found


def used(fit: Fit, data: Sequences) -> dict[str, Any]:
    """Expected tokens in each state, and the singular values of the transitions, in numbers."""
    states = metrics.state_usage(fit, data, 64)
    transitions = transition_spectrum(fit.hmm(data[:1]), 256)
    return {
        "effective_states": states.effective,
        "states_with_a_token": int((states.counts >= 1).sum()),
        "stable_rank": transitions.stable_rank,
        "rank_of_99_percent": transitions.effective_rank(0.99),  # null: more than there are values
        "largest_singular_values": transitions.singular_values[:10].tolist(),
        "num_singular_values": len(transitions.singular_values),
    }


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and range over seeds of each model, with the paper's numbers."""
    lines = []
    for panel, name, data in dict.fromkeys(key(row)[:3] for row in rows):
        runs = [row for row in rows if key(row)[:3] == (panel, name, data)]
        line = {"panel": panel, "name": name, "data": data, "seeds": [row["seed"] for row in runs]}
        line |= {"states": runs[0]["states"], "blocks": runs[0]["clusters"]}
        if runs[0]["constraint"] != "Brown":
            line["blocks"] = None
        for part in ("valid", "test"):
            values = [row[f"{part}_perplexity"] for row in runs]
            line[part] = {"mean": mean(values), "range": [min(values), max(values)]}
        lines.append(line | {name: runs[0][name] for name in asdict(Paper())})
    return lines


def draw(rows: list[dict[str, Any]], baselines: list[dict[str, Any]]) -> None:
    """Perplexity of the best models and their training; and what each change of the bases does."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 10), layout="constrained")
    for (upper, lower), (data, title) in zip(axes.T, CORPORA.items()):
        by_states(rows, baselines, upper, data)
        legend(upper)
        courses(lower, [row for row in rows if (row["panel"], row["data"]) == ("best", data)])
        lower.set(xlabel="epochs", ylabel="held-out perplexity", yscale="log",
                  title=f"{title}, during training")  # fmt: skip
        lower.xaxis.get_major_locator().set_params(integer=True)
        plain_ticks(lower.yaxis, PERPLEXITIES)
        legend(lower, "solid: the whole text; dashed: the half that chose the epoch")
    save(figure, NAME)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for axis, (panel, title) in zip(axes, PANELS.items()):
        lines = [line for line in summary(rows) if line["panel"] == panel]
        ablations(axis, lines, rows, title)
        legend(axis)
    save(figure, f"{NAME}_ablations")


def legend(axis: Any, title: str | None = None) -> None:
    """Each name once."""
    handles = dict(zip(*axis.get_legend_handles_labels()[::-1]))
    axis.legend(handles.values(), handles.keys(), labelspacing=0.3, loc="upper right",
                title=title, title_fontsize=8.5)  # fmt: skip


def courses(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Perplexity by epoch of the best models of a text, a colour each, and the epoch kept."""
    best = [row for row in rows if row["course"]]
    for row in best:
        size = len(row["course"])
        if any(other["course"][:size] == row["course"] for other in best if other is not row):
            continue  # the beginning of another
        label = f"{row['states']:,} states"
        if row.get("factored"):
            label += ", one level, factored"
        if row.get("last_dropout") is not None:
            label += ", dropout falls"
        if row.get("average") is not None:
            label += ", averaged"
        if row.get("first") is not None:
            label += ", resumed"
        half = "unseen_perplexity" in row  # the other half of the text did not choose the epoch
        (line,) = axis.plot(*zip(*row["course"]), ".--" if half else ".-", label=label)
        kept = min(row["course"], key=lambda point: point[1])
        axis.plot(*kept, "o", color=line.get_color(), ms=9, markerfacecolor="none")
    axis.plot(
        [], [], "o", color="0.3", ms=9, markerfacecolor="none", label="the epoch that is kept"
    )


def ablations(
    axis: Any, lines: list[dict[str, Any]], rows: list[dict[str, Any]], title: str
) -> None:
    """Perplexities of each seed over those of the base; and of the paper over its base."""
    base = next(line for line in lines if line["name"] == "base")
    paper = mean(ends(base["paper_valid"]))
    label = f"paper, {base['paper_states']:,} states"
    for place, line in enumerate(lines):
        seeds = [row["valid_perplexity"] for row in rows if key(row)[:3] == key(line)[:3]]
        changes = [100 * (each / base["valid"]["mean"] - 1) for each in seeds]
        name = f"ours, {base['states']:,} states, each seed"
        axis.plot(changes, [place] * len(seeds), "o", color="C0", label=name)
        if line["paper_valid"] is not None and line["paper_states"] == base["paper_states"]:
            changes = [100 * (each / paper - 1) for each in ends(line["paper_valid"])]
            axis.plot(changes, [place + 0.25] * 2, "D-", color=PUBLISHED, label=label)
    names = [PLAIN.get(line["name"], line["name"]) for line in lines]
    axis.axvline(0, color="0.3", linewidth=0.8, zorder=0)
    axis.set_yticks(range(len(names)), names)
    axis.set(
        xlabel="held-out perplexity, change from the base, %",
        title=f"base: {title}".replace("blocks, ", "blocks,\n"),
    )
    axis.set_ylim(len(names) - 0.4, -1.8)  # the base on top, below the legend
    axis.grid(visible=False, axis="y")


def by_states(
    rows: list[dict[str, Any]], baselines: list[dict[str, Any]], axis: Any, data: str
) -> None:
    """Perplexity of the whole held-out text by number of states, as in Figure 3."""
    swept = [row for row in rows if row["panel"] == "states" or key(row)[:2] == ("large", "base")]
    if data == "ptb" and swept:
        sizes = sorted({row["states"] for row in swept})
        means = [mean(r["valid_perplexity"] for r in swept if r["states"] == s) for s in sizes]
        axis.plot(sizes, means, color="C0")
        for row in swept:
            axis.plot(row["states"], row["valid_perplexity"], "o", color="C0",
                      label=f"two levels, {swept[0]['epochs']:g} epochs, each seed")  # fmt: skip
    for row in rows:
        if (row["panel"], row["data"]) == ("best", data):
            several = "parts" in row
            axis.plot(row["states"], row["valid_perplexity"], "P" if several else "*", color="C3",
                      ms=8 if several else 9, zorder=3, alpha=0.8,
                      label="chains side by side" if several else "trained for longer")  # fmt: skip
            if data == "wikitext2":
                axis.annotate(f"{row['epochs']:g} epochs", (row["states"], row["valid_perplexity"]),
                              (-8, 0), "data", "offset points", ha="right", va="center",
                              fontsize=8)  # fmt: skip
    papers = FIGURE_3 if data == "ptb" else {32768: (PAPER_WIKITEXT, PAPER_WIKITEXT)}
    for states, spread in papers.items():
        axis.plot([states, states], spread, "D-", color=PUBLISHED, label="paper, one level")
    axis.set_xscale("log", base=2)
    powers = range(10, 17) if data == "ptb" else (14, 15)
    axis.set_xticks([2**power for power in powers], [f"{2**power:,}" for power in powers])
    axis.set_xlim(*(600, 130_000) if data == "ptb" else (10_000, 50_000))
    axis.set(xlabel="states", ylabel="held-out perplexity, the whole text", yscale="log",
             title=CORPORA[data])  # fmt: skip
    axis.set_ylim((102, 270) if data == "ptb" else (155, 275))
    plain_ticks(axis.yaxis, PERPLEXITIES)
    lines_of(baselines, CORPORA[data], axis, "left")


def lines_of(baselines: list[dict[str, Any]], data: str, axis: Any, side: str | None) -> None:
    """Baselines of a text as lines, named at one side of the panel, if at any."""
    levels = sorted((row for row in baselines if row["data"] == data),
                    key=lambda row: -row["valid_perplexity"])  # fmt: skip
    groups: list[list[dict[str, Any]]] = []  # of lines too close to be named one by one
    for row in levels:
        height = row["valid_perplexity"]
        axis.axhline(height, color="0.4", linestyle="--", linewidth=0.8)
        if groups and height > groups[-1][0]["valid_perplexity"] / 1.03:
            groups[-1].append(row)
        else:
            groups.append([row])
    for group in groups if side is not None else ():
        early = [
            ",\nstopped early" if row.get("stopped", "rate") != "rate" else "" for row in group
        ]
        above = side == "right" or group is groups[-1]
        names = [row["model"].split(",")[0] + text for row, text in zip(group, early)]
        axis.annotate(
            "\n".join(names), (0.99 if side == "right" else 0.02, group[-1]["valid_perplexity"]),
            (0, 3 if above else -3), axis.get_yaxis_transform(), "offset points", ha=side,
            va="bottom" if above else "top", fontsize=8, color="0.3",
        )  # fmt: skip


def ends(value: float | list[float] | tuple[float, float]) -> tuple[float, float]:
    """A number, or the first and the last of a range."""
    return (value, value) if isinstance(value, float) else (value[0], value[-1])


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies a row."""
    return row["panel"], row["name"], row["data"], row.get("seed")


def main() -> None:
    panels = dict.fromkeys(each.panel for each, _ in TABLES)
    tables = {f"{panel}-{seed}": (panel, seed) for seed in SEEDS for panel in panels}
    options = arguments(__doc__, [*BEST, *SIDE_BY_SIDE, *tables])
    if options.draw:
        draw(earlier(NAME), earlier("language_model_baselines"))
        return
    cache: dict[Any, Any] = {}
    if options.quick:
        text = read("letters")
        small = Model("quick", "", "letters", 64, 8, dim=16, epochs=0.2, tokens=512)
        for each in (small, replace(small, two_level=False), replace(small, scalar=True,
                     two_level=False)):  # fmt: skip
            run(each, Paper(), text, cache)
        run_side_by_side("", (small, replace(small, seed=1)), Paper(), text, cache)
        return
    wanted = [BEST[part] for part in BEST if part in options.only]
    for part, (panel, seed) in tables.items():
        if part in options.only:
            wanted += [(replace(e, seed=seed), paper) for e, paper in TABLES if e.panel == panel]
    tasks = [(each.data, partial(run, each, paper)) for each, paper in wanted]
    tasks += [
        (models[0].data, partial(run_side_by_side, name, models, paper))
        for part, (name, models, paper) in SIDE_BY_SIDE.items()
        if part in options.only
    ]
    order = [key(asdict(each))[:2] for each, _ in (*BEST.values(), *TABLES)]
    order[len(BEST) : len(BEST)] = [("best", name) for name, _, _ in SIDE_BY_SIDE.values()]
    texts: dict[str, Text] = {}

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return order.index(key(row)[:2]), row["data"], row["seed"]

    for data, task in tasks:
        if data not in texts:
            texts[data] = read(data)
        row = task(texts[data], cache)
        with alone(NAME):  # after each run
            rows = [other for other in earlier(NAME) if key(other) != key(row)]
            rows = sorted([*rows, row], key=place)
            write(NAME, rows, threads=torch.get_num_threads(), summary=summary(rows))
            draw(rows, earlier("language_model_baselines"))


if __name__ == "__main__":
    main()
