"""Embeddings of a DenseHMM before and after a fit, and similarities of word embeddings.

The first part is a clock, as in Fig. 1 of the paper (whose example is not specified): six hours
that follow each other, each of which emits some of eight symbols around a dial. Two dimensions
suffice to represent the dial. The second part fits the 5,000 most frequent words of WikiText-2 and
lists nearest neighbours. Writes ``densehmm_embeddings.json``, ``densehmm_embeddings.png`` and
``densehmm_words.png``.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import pyro
import torch
from common import arguments, earlier, public_files, pyplot, save, write
from pyro import poutine
from pyro.distributions import Categorical
from torch import Tensor
from torch.nn.functional import normalize
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyrohmm import (
    HMM,
    DenseHMM,
    Sequences,
    cooccurrence,
    datasets,
    fit_cooccurrence,
    fit_em,
    metrics,
    readers,
)

HOURS, SYMBOLS = 6, 8
ASKED = "said Germany two September played king his large river Smith".split()
DRAWN = "said Germany two September Smith".split()


def clock(num_sequences: int) -> tuple[HMM, Sequences]:
    """Hours that mostly advance, sometimes stay, seldom jump; symbols emitted by each of them."""
    transition = torch.zeros(HOURS, HOURS)
    for hour in range(HOURS):
        transition[hour, hour], transition[hour, (hour + 1) % HOURS] = 0.15, 0.80
        transition[hour, (hour + 3) % HOURS] = 0.05
    angles = torch.arange(HOURS)[:, None] / HOURS - torch.arange(SYMBOLS) / SYMBOLS
    away = (angles - angles.round()).abs()
    views = (-((away / 0.06) ** 2) / 2).softmax(-1)
    lengths = torch.full((num_sequences,), 100)
    truth = HMM(
        torch.full((HOURS,), 1 / HOURS).log(), transition.log(), Categorical(views), lengths
    )
    return truth, Sequences(truth.sample(), lengths)


def clock_rows(quick: bool) -> list[dict[str, Any]]:
    """Fit the clock, and report nats per step and its embeddings."""
    pyro.set_rng_seed(1)
    truth, data = clock(10 if quick else 100)
    module = DenseHMM(HOURS, SYMBOLS, dim=2)
    trace = poutine.trace(module).get_trace(data.lengths)
    before = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    steps = 50 if quick else 1500
    pairs = fit_cooccurrence(module, data, SYMBOLS, num_iterations=steps, restarts=8)
    fit = fit_em(module, data, start=pairs.parameters, num_iterations=5 if quick else 60)
    after = {name.removeprefix("module."): value for name, value in fit.parameters.items()}
    untrained, trained = trace.nodes["_RETURN"]["value"], fit.hmm(data)
    order = (
        trained.log_transition.exp().fill_diagonal_(0.0).argmax(-1)
    )  # the successor of each hour
    hours = [0]
    while len(hours) < HOURS and int(order[hours[-1]]) not in hours:
        hours.append(int(order[hours[-1]]))
    hours += [hour for hour in range(HOURS) if hour not in hours]

    stages = [(before, untrained, list(range(HOURS)), "before"), (after, trained, hours, "after")]
    pictures = [
        {
            "part": "clock picture", "when": when,
            **{name: values[name][rank].tolist() for name in ("leave", "enter", "emit")},
            "symbol": values["symbol"].tolist(),
            "transition": hmm.log_transition.exp()[rank][:, rank].tolist(),
            "emission": hmm.emission.probs[rank].tolist(),
        }
        for values, hmm, rank, when in stages
    ]  # fmt: skip
    count = data.num_observed
    reached = {
        "truth": truth.log_prob(data.values).sum().item(),
        "before": untrained.log_prob(data.values).sum().item(),
        "co-occurrence": pairs.hmm(data).log_prob(data.values).sum().item(),
        "EM after it": trained.log_prob(data.values).sum().item(),
    }
    reports = [
        {"part": "clock", "fit": name, "nats_per_step": -value / count, "steps": count}
        for name, value in reached.items()
    ]
    return reports + pictures


def draw(rows: list[dict[str, Any]]) -> None:
    """Embeddings and matrices of the clock before and after; similarities of words."""
    plt = pyplot()
    plain = {"axes.grid": False, "axes.spines.top": True, "axes.spines.right": True}
    with plt.rc_context(plain):
        figure, grid = plt.subplots(2, 4, figsize=(10, 5.4), layout="constrained")
        stages = [row for row in rows if row["part"] == "clock picture"]
        for axes, row in zip(grid, stages):
            _vectors(axes[0], row, "leave", "enter")
            _matrix(axes[1], row["transition"], "to state", "from state")
            _vectors(axes[2], row, "emit", "symbol")
            image = _matrix(axes[3], row["emission"], "symbol", "state")
            axes[0].set_ylabel(f"{row['when']} the fit", fontsize=12)
        titles = (
            "embeddings of states",
            "transition matrix A",
            "embeddings of emissions",
            "emission matrix B",
        )
        for axes, title in zip(grid[0], titles):
            axes.set_title(title)
        figure.colorbar(image, ax=grid, label="probability", aspect=40)
        save(figure, "densehmm_embeddings")

        (row,) = (row for row in rows if row["part"] == "cosines")
        figure, axes = plt.subplots(figsize=(8, 7), layout="constrained")
        picture = axes.imshow(row["cosines"], vmin=-1.0, vmax=1.0, cmap="RdBu_r")
        axes.set_xticks(range(len(row["words"])), row["words"], rotation=90, fontsize=8)
        axes.set_yticks(range(len(row["words"])), row["words"], fontsize=8)
        axes.set_title("words and their nearest neighbours")
        figure.colorbar(picture, ax=axes, shrink=0.8, label="cosine of their profiles")
        save(figure, "densehmm_words")


def _vectors(axes: Any, row: dict[str, Any], name: str, other: str) -> None:
    """Two kinds of embeddings as numbered arrows."""
    for kind, label in (("C0", name), ("C3", other)):
        for index, (x, y) in enumerate(row[label]):
            axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": kind})
            size = math.hypot(x, y) or 1.0
            axes.annotate(
                str(index), (x, y), (7 * x / size, 7 * y / size), textcoords="offset points",
                color=kind, ha="center", va="center", fontsize=9,
            )  # fmt: skip
        axes.plot([], [], color=kind, label=label)
    reach = 1.25 * max(abs(x) for label in (name, other) for point in row[label] for x in point)
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": 2}
    axes.legend(fontsize=9, frameon=False, handlelength=1.0, **place)


def _matrix(axes: Any, matrix: list[list[float]], columns: str, rows: str) -> Any:
    image = axes.imshow(matrix, vmin=0.0, vmax=1.0, cmap="Blues", aspect="auto")
    axes.set_xticks(range(len(matrix[0])))
    axes.set_yticks(range(len(matrix)))
    axes.set(xlabel=columns, ylabel=rows)
    return image


def words(quick: bool) -> tuple[Sequences, readers.Vocabulary, str]:
    """Words of WikiText-2 if available; else those that come with the package."""
    if not quick:
        try:
            path = public_files.find("wikitext2-train")
        except (FileNotFoundError, ImportError):
            pass
        else:
            count = partial(readers.Vocabulary.from_counts, max_size=5000, unknown="<unk>")
            corpus = readers.read_sentences(path, count)
            return corpus.data, corpus.vocabulary, "WikiText-2, training part"
    corpus = datasets.english_words(500 if quick else 2000)
    return corpus.data, corpus.vocabulary, "the help of Python"


def profiles(emit: Tensor, symbol: Tensor, stationary: Tensor) -> Tensor:
    """Identifiable profiles of symbols, ``(V, K)``, of unit length.

    An invertible linear map of ``emit`` and its inverse transpose of ``symbol`` change no
    probability, but they change angles between symbols. Inner products with the embeddings of
    states are invariant; centred, they are the unnormalised logarithms of B.
    """
    emit = emit - (stationary.unsqueeze(-1) * emit).sum(0)
    return normalize((symbol - symbol.mean(0)) @ emit.mT * stationary.sqrt(), dim=-1)


def neighbours(points: Tensor, vocabulary: readers.Vocabulary, word: str, count: int) -> list[str]:
    """The words whose profiles have the highest cosine similarity with that of ``word``."""
    index = vocabulary.index(word)
    nearest = (points @ points[index]).argsort(descending=True)
    return [vocabulary[place] for place in nearest.tolist() if place != index][:count]


def word_rows(quick: bool) -> list[dict[str, Any]]:
    """Fit words, list neighbours of some, and their similarities."""
    pyro.set_rng_seed(0)
    data, vocabulary, source = words(quick)
    num_states, dim = (8, 4) if quick else (64, 24)
    module = DenseHMM(num_states, len(vocabulary), dim)
    steps = 20 if quick else 600
    start_time = time.perf_counter()
    fit = fit_cooccurrence(
        module, data, len(vocabulary), loss=cooccurrence.cross_entropy, num_iterations=steps,
        learning_rate=0.1, schedule=partial(CosineAnnealingLR, T_max=steps), tolerance=None,
    )  # fmt: skip
    seconds = time.perf_counter() - start_time
    hmm = fit.hmm(data[:1])
    stationary = hmm.stationary()
    points = profiles(fit.parameters["module.emit"], fit.parameters["module.symbol"], stationary)
    asked = [word for word in ASKED if word in vocabulary] or list(vocabulary[:3])
    nearest = {word: neighbours(points, vocabulary, word, 6) for word in asked}

    groups = {word: [word, *nearest[word]] for word in (DRAWN if not quick else asked)}
    shown = [vocabulary.index(word) for group in groups.values() for word in group]
    names = [vocabulary[index] for index in shown]
    cosines = points[shown] @ points[shown].mT
    perplexity = metrics.perplexity(fit, data[:: max(1, len(data) // 500)])
    about = {"part": "words", "source": source, "states": num_states, "dim": dim,
             "vocabulary": len(vocabulary), "tokens": data.num_observed,
             "seconds": seconds, "perplexity": perplexity.value,
             "perplexity_tokens": perplexity.num_tokens}  # fmt: skip
    picture = {"part": "cosines", "words": names, "cosines": cosines.tolist()}
    return [
        about,
        picture,
        *({"part": "neighbours", "word": k, "nearest": v} for k, v in nearest.items()),
    ]


def main() -> None:
    """Both parts."""
    options = arguments(__doc__)
    if options.draw:
        draw(earlier("densehmm_embeddings"))
        return
    rows = clock_rows(options.quick) + word_rows(options.quick)
    for row in rows:
        print({name: part for name, part in row.items() if not isinstance(part, list)})
    if not options.quick:
        write("densehmm_embeddings", rows)
        draw(rows)


if __name__ == "__main__":
    main()
