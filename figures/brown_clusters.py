"""Brown clusters of words: seconds of the processor, the information that is kept, and its use.

For the Penn Treebank and WikiText-2, for 32 to 1024 clusters, with sweeps and without, and for some
sizes without what is compiled: one run of each on one thread, in which nothing is compiled. Beside
the average mutual information there is the perplexity of held-out words given the word before, by
the model that needs nothing but clusters: p(cluster | cluster before) p(word | cluster), counted in
the training data, the first with one further count that is divided as clusters occur, the second
with 0.01 more of each word. Writes ``brown_clusters.json`` and ``brown_clusters.png``.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from common import FOLDER, arguments, earlier, write

from pyrohmm import datasets, readers
from pyrohmm.data.pair_counts import count_pairs
from pyrohmm.language.clusters import Clusters, average_mutual_information, brown
from pyrohmm.ops import backends
from pyrohmm.ops.pairs import Pairs

SIZES = [32, 64, 128, 256, 512, 1024]
SOURCES = {"ptb": "Penn Treebank", "wikitext2": "WikiText-2", "quick": "words of English"}
SWEEPS = 20
TARGETS = {"ptb": 120.0, "wikitext2": 600.0}  # seconds, for 128 clusters
NOT_COMPILED = {"ptb": [32, 128, 512], "wikitext2": [128], "quick": [4]}
SHOWN = (5, 6)  # clusters, and words of each


def read(source: str) -> tuple[Pairs, Pairs, readers.Vocabulary]:
    """Pairs of training and held-out words, and the words."""
    if source == "quick":
        train = datasets.english_words(300)
        parts = train.data.split(0.9)
    else:
        train = readers.read_sentences(datasets.find(f"{source}-train"))
        held_out = readers.read_sentences(datasets.find(f"{source}-valid"), train.vocabulary)
        parts = (train.data, held_out.data)
    pairs = (count_pairs(part, len(train.vocabulary)) for part in parts)
    return *pairs, train.vocabulary


def perplexity(train: Pairs, held_out: Pairs, found: Clusters) -> float:
    """Of the second words of held-out pairs, given the cluster of the first."""
    labels, size = found.assignment.numpy(), found.num_clusters
    moves = np.zeros((size, size))
    np.add.at(moves, (labels[train.first], labels[train.second]), train.counts.numpy())
    arrived = moves.sum(0) / moves.sum()
    moves = (moves + arrived) / (moves.sum(1, keepdims=True) + 1)
    words = np.bincount(train.second, train.counts, train.num_symbols)
    words = (words + 0.01) / np.bincount(labels, words + 0.01)[labels]
    logs = np.log(moves[labels[held_out.first], labels[held_out.second]])
    logs += np.log(words[held_out.second])
    return math.exp(-(logs * held_out.fractions.numpy()).sum())


def measure(
    source: str, train: Pairs, held_out: Pairs, size: int, sweeps: int, compiled: bool
) -> tuple[dict[str, Any], Clusters]:
    """One run."""
    with backends.use(backends.NUMBA if compiled else backends.TORCH):
        start_time = time.process_time()
        found = brown(train, size, sweeps, progress=False)
        seconds = time.process_time() - start_time
    row = {
        "data": SOURCES[source],
        "words": train.num_symbols,
        "pairs": train.total,
        "clusters": size,
        "most_sweeps": sweeps,
        "compiled": compiled,
        "seconds": seconds,
        "target_seconds": TARGETS.get(source) if size == 128 else None,
        "average_mutual_information": average_mutual_information(train, found.assignment),
        "held_out_perplexity": perplexity(train, held_out, found),
        "runs": 1,
    }
    print(row, flush=True)
    return row, found


def some_words(found: Clusters, vocabulary: readers.Vocabulary) -> dict[str, list[str]]:
    """The most frequent words of a few clusters, by path."""
    count, most = SHOWN
    chosen = np.linspace(0, found.num_clusters - 1, count).round().astype(int)
    shown = {}
    for cluster in chosen.tolist():
        words = (found.assignment == cluster).nonzero().squeeze(-1)
        order = found.counts[words].argsort(descending=True, stable=True)[:most]
        shown[found.paths[cluster]] = vocabulary.decode(words[order])
    return shown


def draw(rows: list[dict[str, Any]]) -> None:
    """Seconds, information and perplexity against the number of clusters."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4.3), layout="constrained")
    lines = {
        (SWEEPS, True): ("-", f"up to {SWEEPS} sweeps"),
        (0, True): ("--", "no sweep"),
        (SWEEPS, False): (":", f"up to {SWEEPS} sweeps, not compiled"),
    }
    for n, source in enumerate(dict.fromkeys(row["data"] for row in rows)):
        for (sweeps, compiled), (style, label) in lines.items():
            own = [
                row
                for row in rows
                if (row["data"], row["most_sweeps"], row["compiled"]) == (source, sweeps, compiled)
            ]
            for panel, quantity in zip(
                axes, ("seconds", "average_mutual_information", "held_out_perplexity")
            ):
                if own and (compiled or quantity == "seconds"):
                    panel.plot(
                        [row["clusters"] for row in own], [row[quantity] for row in own], style,
                        marker="o", markersize=4, color=f"C{n}", label=f"{source}, {label}",
                    )  # fmt: skip
    titles = ("seconds of the processor", "average mutual information, nats",
              "held-out perplexity, cluster bigrams")  # fmt: skip
    for panel, title in zip(axes, titles):
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(SIZES, [str(size) for size in SIZES])
        panel.set_xlabel("clusters")
        panel.grid(alpha=0.3)
    axes[0].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(FOLDER / "brown_clusters.png", dpi=150)
    plt.close(figure)


def main() -> None:
    """Measure, then write."""
    options = arguments(__doc__, list(TARGETS))
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for source in ["quick"] if options.quick else TARGETS:
        if not options.quick and source not in options.only:
            rows += [row for row in earlier("brown_clusters") if row["data"] == SOURCES[source]]
            continue
        train, held_out, vocabulary = read(source)
        brown(Pairs(*torch.tensor([[0, 1], [1, 0], [1, 1]]), 2), 2)  # compiles what is not yet
        same = {}
        for size in [4, 8] if options.quick else SIZES:
            for sweeps in (0, SWEEPS) if backends.has_numba() else ():
                row, same[size] = measure(source, train, held_out, size, sweeps, True)
                rows.append(row)
            if size == 128 and same:
                rows[-1]["some_words"] = some_words(same[size], vocabulary)
        for size in NOT_COMPILED[source]:
            row, found = measure(source, train, held_out, size, SWEEPS, False)
            rows.append(row)
            if same:
                assert found.assignment.equal(same[size].assignment), "the two disagree"
    if not options.quick:
        write("brown_clusters", rows, threads=1)
        draw(rows)


if __name__ == "__main__":
    main()
