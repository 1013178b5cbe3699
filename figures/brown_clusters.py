"""Brown clusters of words: processor time, mutual information, and perplexity of a bigram model.

For the Penn Treebank and WikiText-2, for 32 to 1024 clusters, with and without sweeps, and for some
sizes without compiled code: one run each on one thread, compilation excluded. The perplexity is
that of held-out words given the previous word, by the cluster bigram model p(cluster | previous
cluster) p(word | cluster) with counts of the training data; the first factor is smoothed with one
count in proportion to the cluster frequencies, the second with 0.01 counts per word. Writes
``brown_clusters.json`` and ``brown_clusters.png``.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from common import arguments, earlier, public_files, pyplot, save, write

from pyrohmm import datasets, readers
from pyrohmm.infer.cooccurrence import count_pairs
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
        train = readers.read_sentences(public_files.find(f"{source}-train"))
        held_out = readers.read_sentences(public_files.find(f"{source}-valid"), train.vocabulary)
        parts = (train.data, held_out.data)
    pairs = (count_pairs(part, len(train.vocabulary)) for part in parts)
    return *pairs, train.vocabulary


def perplexity(train: Pairs, held_out: Pairs, clusters: Clusters) -> float:
    """Perplexity of the second words of held-out pairs given the clusters of the first."""
    labels, size = clusters.assignment.numpy(), clusters.num_clusters
    transition = np.zeros((size, size))
    np.add.at(transition, (labels[train.first], labels[train.second]), train.counts.numpy())
    marginal = transition.sum(0) / transition.sum()
    transition = (transition + marginal) / (transition.sum(1, keepdims=True) + 1)
    words = np.bincount(train.second, train.counts, train.num_symbols)
    words = (words + 0.01) / np.bincount(labels, words + 0.01)[labels]
    logs = np.log(transition[labels[held_out.first], labels[held_out.second]])
    logs += np.log(words[held_out.second])
    return math.exp(-(logs * held_out.fractions.numpy()).sum())


def measure(
    source: str, train: Pairs, held_out: Pairs, size: int, sweeps: int, compiled: bool
) -> tuple[dict[str, Any], Clusters]:
    """One run."""
    with backends.use(backends.NUMBA if compiled else backends.TORCH):
        start_time = time.process_time()
        clusters = brown(train, size, sweeps, progress=False)
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
        "average_mutual_information": average_mutual_information(train, clusters.assignment),
        "held_out_perplexity": perplexity(train, held_out, clusters),
        "runs": 1,
    }
    print(row, flush=True)
    return row, clusters


def some_words(clusters: Clusters, vocabulary: readers.Vocabulary) -> dict[str, list[str]]:
    """The most frequent words of a few clusters, by path."""
    count, most = SHOWN
    chosen = np.linspace(0, clusters.num_clusters - 1, count).round().astype(int)
    shown = {}
    for cluster in chosen.tolist():
        words = (clusters.assignment == cluster).nonzero().squeeze(-1)
        order = clusters.counts[words].argsort(descending=True, stable=True)[:most]
        shown[clusters.paths[cluster]] = vocabulary.decode(words[order])
    return shown


def draw(rows: list[dict[str, Any]]) -> None:
    """Seconds, information and perplexity against the number of clusters."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.4), layout="constrained")
    lines = {
        (SWEEPS, True): ("-", f"up to {SWEEPS} sweeps"),
        (0, True): ("--", "no sweep"),
        (SWEEPS, False): (":", f"up to {SWEEPS} sweeps, not compiled"),
    }
    for n, source in enumerate(dict.fromkeys(row["data"] for row in rows)):
        for (sweeps, compiled), (style, label) in lines.items():
            selected = [
                row
                for row in rows
                if (row["data"], row["most_sweeps"], row["compiled"]) == (source, sweeps, compiled)
            ]
            for panel, quantity in zip(
                axes, ("seconds", "average_mutual_information", "held_out_perplexity")
            ):
                if selected and (compiled or quantity == "seconds"):
                    panel.plot(
                        [row["clusters"] for row in selected],
                        [row[quantity] for row in selected],
                        style, marker="o", markersize=4, color=f"C{n}", label=f"{source}, {label}",
                    )  # fmt: skip
    titles = ("processor seconds", "average mutual information, nats",
              "held-out perplexity")  # fmt: skip
    for panel, title in zip(axes, titles):
        panel.set_title(title)
        panel.set_xscale("log", base=2)
        panel.set_xticks(SIZES, [str(size) for size in SIZES])
        panel.set_xlabel("clusters")
    axes[0].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save(figure, "brown_clusters")


def main() -> None:
    """Measure, then write."""
    options = arguments(__doc__, list(TARGETS))
    if options.draw:
        draw(earlier("brown_clusters"))
        return
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
            row, clusters = measure(source, train, held_out, size, SWEEPS, False)
            rows.append(row)
            if same:
                assert clusters.assignment.equal(same[size].assignment), "the two disagree"
    if not options.quick:
        write("brown_clusters", rows, threads=1)
        draw(rows)


if __name__ == "__main__":
    main()
