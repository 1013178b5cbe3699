"""Unsupervised tagging under a diversity prior: section 4.2.1 of the diversified HMM paper.

The paper uses 94,000 words of the Wall Street Journal. Its table of tags identifies them as the
sample of the Penn Treebank that comes with NLTK, with 46 tags merged to 15; here it is the same
sample, without traces and in lower case. ``web`` is UD English EWT with its 17 universal tags.
There are as many states as tags; EM takes 100 steps. Weights are in the convention of the paper,
twice those of ``DiversityPrior``; 0 is the plain HMM, and all fits of one seed have the same
initial values. States are decoded by Viterbi's algorithm.

The paper does not say how its fits start. In ``penn`` and ``web`` all parameters are initialised
from flat Dirichlet distributions. ``search`` compares starts of the plain HMM on every other
sentence of the sample, and what is best there is judged on the others (``judged``, beside the flat
start): "peaked" gives each word one or two states, by a Dirichlet distribution of concentration
0.1, and "clusters" one of as many Brown clusters as there are tags (with exchange in the second row
of that name), but for a tenth, which is noise of the seed. ``penn from clusters`` has ten pairs of
fits on the whole sample from the best. ``alone`` decodes the whole sample by those Brown clusters
themselves, with no HMM: the state of a word is its cluster. ``dense`` decodes it by a DenseHMM with
embeddings of 10 dimensions, fitted by 40 iterations of EM (three seeds, nothing tuned).

``figure 8`` and ``figure 9`` are of the first seed: Bhattacharyya distances of the state for nouns
from those of the other tags, and numbers of words of each tag, decoded and true, most frequent
first. Fits are stored in the folder ``CHECKPOINTS`` (by default that of temporary files), so that
an interrupted run can be resumed; the whole takes three hours of one core. Writes
``diversified_tagging.json`` and ``diversified_tagging.png``.
"""

from __future__ import annotations

import json
import os
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from common import arguments, earlier, public_files, pyplot, save, write
from common.dirichlet_toy import dirichlet_toy

from pyrohmm import (
    DenseHMM,
    DiversityPrior,
    Sequences,
    TabularHMM,
    categorical,
    clusters,
    fit_em,
    metrics,
    readers,
    starts,
)
from pyrohmm.infer.cooccurrence import count_pairs

PAPER = {0.0: 0.4475, 100.0: 0.4688}
WEIGHTS = (0.0, 1.0, 10.0, 100.0, 1000.0)
PAPER_WEIGHT = 100.0  # its best
NUM_SEEDS, NUM_STEPS = 10, 100
NOISE = 0.1  # share of each word's states that a start from clusters leaves to chance
STARTS = ("flat", "peaked", "clusters", "clusters, exchanged")
MERGED = [  # Table 2; the groups are 1 to 15 in the paper
    "NNP NNPS NNS NN SYM",
    ", `` '' : . $ ( ) -LRB- -RRB- -LCB- -RCB- LS #",
    "CD",
    "JJS JJ JJR",
    "MD",
    "VBZ VB VBG VBD VBN VBP VBG|NN",
    "DT PDT WDT",
    "IN CC TO",
    "FW",
    "WRB RB RBS RBR",
    "UH",
    "WP WP$ PRP PRP$",
    "POS",
    "EX",
    "RP",
]
SCALARS = ("one_to_one", "many_to_one", "variation", "nats", "distance", "log_diversity", "used")


class Task(NamedTuple):
    """Words with tags; the values are indices of words in lower case."""

    data: Sequences
    num_words: int
    tags: list[str]


def lowered(corpus: readers.Corpus) -> tuple[torch.Tensor, int]:
    """Values ``(N, T)`` of words in lower case, and the number of words."""
    words = [word.lower() for word in corpus.vocabulary]
    places = {word: n for n, word in enumerate(dict.fromkeys(words))}
    renamed = torch.tensor([places[word] for word in words])
    return renamed[corpus.data.values], len(places)


def penn() -> Task:
    """The sample of the Penn Treebank, its tags merged."""
    corpus = public_files.read_tagged(public_files.find("treebank-sample"))
    groups = {tag: n for n, group in enumerate(MERGED) for tag in group.split()}
    assert corpus.tags is not None
    assert corpus.data.labels is not None
    renamed = torch.tensor([groups[tag] for tag in corpus.tags])
    labels = torch.where(corpus.data.exists, renamed[corpus.data.labels.clamp(min=0)], -1)
    values, num_words = lowered(corpus)
    data = Sequences(values, corpus.data.lengths, labels=labels).truncate(80)
    return Task(data, num_words, [group.split()[0] for group in MERGED])


def web() -> Task:
    """UD English EWT, training part, universal tags."""
    corpus = public_files.read_conllu(public_files.find("ud-ewt-train"), "upos")
    assert corpus.tags is not None
    values, num_words = lowered(corpus)
    data = Sequences(values, corpus.data.lengths, labels=corpus.data.labels).truncate(80)
    return Task(data, num_words, list(corpus.tags))


def toy() -> Task:
    """Samples of a random HMM, where there are no data."""
    toy = dirichlet_toy(4, 8, 1.0)
    return Task(toy.train, 8, list("abcd"))


SOURCES = {"penn": penn, "web": web, "penn from clusters": penn, "toy": toy}


def half(task: Task, first: int) -> Task:
    """Every other sentence, and the words that occur there."""
    data = task.data[list(range(first, len(task.data), 2))]
    words, values = data.values.masked_fill(~data.exists, 0).unique(return_inverse=True)
    return Task(Sequences(values, data.lengths, labels=data.labels), len(words), task.tags)


def initial_values(start: str, task: Task, seed: int) -> dict[str, torch.Tensor]:
    """Probabilities of the start, of :class:`TabularHMM`."""
    data, size, num_words = task.data.without_labels(), len(task.tags), task.num_words
    module = TabularHMM(size, categorical(num_words))
    pyro.set_rng_seed(seed)
    values = {n: v[0, 0] for n, v in starts.from_prior(module, data[:1], 1).items()}
    if start == "flat":
        return values
    words = data.values[data.exists]
    if start == "peaked":
        shares = torch.distributions.Dirichlet(torch.full((size,), 0.1)).sample((num_words,))
    else:
        sweeps = 20 if "exchanged" in start else 0
        pairs = count_pairs(data, num_words)
        found = clusters.brown(pairs, size, num_sweeps=sweeps, progress=False).assignment
        shares = torch.distributions.Dirichlet(torch.ones(size)).sample((num_words,))
        shares = (1 - NOISE) * torch.eye(size)[found] + NOISE * shares
        paths, inside = found[data.values], data.exists[:, 1:]
        steps = torch.stack([paths[:, :-1][inside], paths[:, 1:][inside]])
        counts = torch.ones(size, size).index_put_(tuple(steps), torch.tensor(1.0), True)
        first = torch.bincount(paths[:, 0], minlength=size) + 1.0
        values |= {"initial": first / first.sum(), "transition": counts / counts.sum(-1, True)}
    joint = torch.bincount(words, minlength=num_words) * (shares.T + 1e-6)
    return values | {"emission.probs": joint / joint.sum(-1, True)}


def clusters_alone() -> list[dict[str, Any]]:
    """Accuracy of Brown clusters as states of the whole sample: no HMM, and no chance."""
    task = penn()
    data, size, rows = task.data, len(task.tags), []
    for start, sweeps in (("clusters", 0), ("clusters, exchanged", 20)):
        pairs = count_pairs(data.without_labels(), task.num_words)
        found = clusters.brown(pairs, size, num_sweeps=sweeps, progress=False).assignment
        states = found[data.values].masked_fill(~data.exists, 0)
        one = metrics.one_to_one_accuracy(states, data.labels)
        many = metrics.many_to_one_accuracy(states, data.labels)
        rows.append({"part": "alone", "start": start, "runs": 1, "words": data.num_observed,
                     "one_to_one": {"ours": one}, "many_to_one": {"ours": many}})  # fmt: skip
    return rows


def dense() -> list[dict[str, Any]]:
    """Accuracy of the decoded states of a DenseHMM."""
    task, found = penn(), []
    for seed in range(3):
        pyro.set_rng_seed(seed)
        module = DenseHMM(len(task.tags), task.num_words, dim=10)
        fit = fit_em(module, task.data.without_labels(), num_iterations=40, tolerance=None)
        found.append(scores(fit, task)[0])
    row: dict[str, Any] = {"part": "dense", "runs": len(found), "words": task.data.num_observed}
    for name in ("one_to_one", "many_to_one", "nats"):
        values = [each[name] for each in found]
        row[name] = {"ours": np.mean(values).item(), "deviation": np.std(values).item()}
    return [row]


def compare_starts(seed: int) -> list[dict[str, Any]]:
    """Plain HMMs of one seed: all starts on one half, and two of them on the other."""
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    rows = []
    for part, first, tried in (("search", 0, STARTS), ("judged", 1, ("flat", "clusters"))):
        task = half(penn(), first)
        for start in tried:
            fit = fit_em(
                TabularHMM(len(task.tags), categorical(task.num_words)),
                task.data.without_labels(), start=initial_values(start, task, seed),
                tolerance=None, progress=False, num_iterations=NUM_STEPS,
            )  # fmt: skip
            rows.append({"part": part, "start": start} | scores(fit, task)[0])
            print(seed, rows[-1], flush=True)
    return rows


def starts_compared() -> list[dict[str, Any]]:
    """Accuracy of each start on both halves, over seeds."""
    with get_context("spawn").Pool(int(os.environ.get("PROCESSES", "2"))) as pool:
        runs = [row for rows in pool.map(compare_starts, range(NUM_SEEDS)) for row in rows]
    found = []
    for part, start in dict.fromkeys((run["part"], run["start"]) for run in runs):
        line: dict[str, Any] = {"part": part, "start": start, "runs": NUM_SEEDS}
        for name in ("one_to_one", "many_to_one", "nats"):
            values = [run[name] for run in runs if (run["part"], run["start"]) == (part, start)]
            line[name] = {"ours": np.mean(values).item(), "deviation": np.std(values).item()}
        found.append(line)
    return found


def scores(fit: Any, task: Task) -> tuple[dict[str, float], torch.Tensor, Any]:
    """Accuracies and nats a word; the decoded states, and the HMM."""
    data, truth = task.data.without_labels(), task.data.labels
    hmm = fit.hmm(data)
    states = hmm.viterbi(data.values).masked_fill(~data.exists, 0)
    found = {
        "one_to_one": metrics.one_to_one_accuracy(states, truth),
        "many_to_one": metrics.many_to_one_accuracy(states, truth),
        "variation": metrics.variation_of_information(states, truth),
        "nats": -hmm.log_prob(data.values).double().sum().item() / data.num_observed,
    }
    return found, states, hmm


def kept(source: str, seed: int) -> list[dict[str, Any]]:
    """Fits of one seed with all weights, stored in a file."""
    folder = Path(os.environ.get("CHECKPOINTS", tempfile.gettempdir()))
    path = folder / f"diversified-tagging-{source}-{seed}.json"
    if not path.exists():
        path.write_text(json.dumps(fit_one(source, seed, False)))
    return json.loads(path.read_text())


def fit_one(source: str, seed: int, quick: bool) -> list[dict[str, Any]]:
    """Fits of one seed with all weights."""
    torch.set_num_threads(1)
    pyro.enable_validation(False)
    task = SOURCES[source]()
    task = task._replace(data=task.data[:100]) if quick else task
    data, size, truth = task.data.without_labels(), len(task.tags), task.data.labels
    assert truth is not None
    module = TabularHMM(size, categorical(task.num_words))
    start = initial_values("clusters" if source.endswith("clusters") else "flat", task, seed)
    fits = []
    weights = (0.0, 10.0, PAPER_WEIGHT) if source.endswith("clusters") else WEIGHTS
    for weight in weights[::2] if quick else weights:
        prior = DiversityPrior.as_in_paper(weight) if weight else None
        fit = fit_em(
            module, data, start=start, log_prior=prior, tolerance=None, progress=False,
            num_iterations=3 if quick else NUM_STEPS,
        )  # fmt: skip
        found, states, hmm = scores(fit, task)
        rows = hmm.log_transition.exp().double()
        known = truth >= 0
        order = metrics.align(states, truth, size).argsort()  # the state of each tag
        fits.append(
            {
                "weight": weight,
                **found,
                "distance": metrics.diversity(rows).item(),
                "log_diversity": 2 * torch.linalg.slogdet(rows.sqrt()).logabsdet.item(),
                "used": int((states[known].bincount(minlength=size) >= 50).sum()),
                "distances": metrics.bhattacharyya(rows[order])[0].tolist(),
                "histogram": states[known]
                .bincount(minlength=size)
                .sort(descending=True)
                .values.tolist(),
            }
        )
        print(source, seed, {k: fits[-1][k] for k in ("weight", *SCALARS)}, flush=True)
    return fits


def summary(source: str, runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For each weight, means and deviations over seeds, and gains over the plain HMM."""
    task = SOURCES[source]()
    labels = task.data.labels
    assert labels is not None
    counts = labels[labels >= 0].bincount(minlength=len(task.tags))
    rows = []
    for place, first in enumerate(runs[0]):
        weight = first["weight"]
        row: dict[str, Any] = {
            "data": source, "weight": weight, "runs": len(runs), "K": len(task.tags),
            "V": task.num_words, "words": task.data.num_observed,
        }  # fmt: skip
        for name in SCALARS:
            values = np.array([run[place][name] for run in runs])
            finite = bool(np.isfinite(values).all())  # the log-determinant of equal rows is -inf
            row[name] = {
                "ours": values.mean().item() if finite else None,
                "deviation": values.std().item() if finite else None,
                "median": np.median(values).item(),
            }
        row["one_to_one"]["paper"] = PAPER.get(weight) if source.startswith("penn") else None
        gain = np.array([run[place]["one_to_one"] - run[0]["one_to_one"] for run in runs])
        row["gain"] = {
            "mean": gain.mean().item(),
            "standard_error": gain.std(ddof=1).item() / len(gain) ** 0.5 if len(gain) > 1 else None,
            "better": int((gain > 0).sum()),
        }
        row["figure 8"] = dict(zip(task.tags, first["distances"]))
        row["figure 9"] = {
            "found": first["histogram"],
            "true": counts.sort(descending=True).values.tolist(),
        }
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Accuracy by weight; histograms; distances of the state for nouns."""
    plt = pyplot()
    figure, (upper, (histogram, distances)) = plt.subplots(
        2, 2, figsize=(10, 7.5), layout="constrained"
    )
    titles = {"penn": "Penn Treebank sample", "web": "UD English EWT"}
    names: list[str] = []
    labels = {"one_to_one": "one-to-one", "many_to_one": "many-to-one"}
    for panel, (source, title) in zip(upper, titles.items()):
        selected = [row for row in rows if row.get("data") == source]
        for n, (name, label) in enumerate(labels.items()):
            panel.errorbar(
                range(len(selected)),
                [row[name]["ours"] for row in selected],
                [row[name]["deviation"] for row in selected],
                fmt="os"[n] + "-", markersize=4, color=f"C{n}", linewidth=1,
                label=f"{label}, random starts",
            )  # fmt: skip
        if source == "penn":
            better = [row for row in rows if row.get("data") == "penn from clusters"]
            for n, (name, label) in enumerate(labels.items()):
                panel.errorbar(
                    [WEIGHTS.index(row["weight"]) for row in better],
                    [row[name]["ours"] for row in better],
                    [row[name]["deviation"] for row in better],
                    fmt="os"[n] + "--", markersize=4, color=f"C{n}", linewidth=1,
                    markerfacecolor="white", label=f"{label}, from clusters",
                )  # fmt: skip
            paper = [WEIGHTS.index(weight) - 0.15 for weight in PAPER]  # beside ours
            panel.plot(paper, list(PAPER.values()), "k*", ms=9, label="paper, one-to-one", zorder=4)
        panel.set_xticks(range(len(selected)), [f"{row['weight']:g}" for row in selected])
        panel.set(xlabel="α, in the convention of the paper", ylabel="accuracy",
                  title=f"{title} (mean and deviation of {selected[0]['runs']} runs)")  # fmt: skip
        if source == "penn":
            panel.set_ylim(bottom=0.05)
            panel.legend(loc="lower left", ncols=2, fontsize=8)
    selected = [row for row in rows if row.get("data") == "penn"]
    true = selected[0]["figure 9"]["true"]
    histogram.plot(range(1, len(true) + 1), true, "k.-", label="true")
    for n, row in enumerate(row for row in selected if row["weight"] in (0.0, 100.0)):
        label, counts = f"α = {row['weight']:g}", row["figure 9"]["found"]
        histogram.plot(range(1, len(counts) + 1), counts, ".-", color=f"C{n}", label=label)
        if n == 0:  # tags in the order of the distances without the prior
            names = sorted(row["figure 8"], key=row["figure 8"].__getitem__)
            names.remove("NNP")
        values = [row["figure 8"][name] for name in names]
        distances.plot(values, range(len(names)), "os"[n], color=f"C{n}", label=label)
    distances.set_yticks(range(len(names)), names, fontsize=8)
    histogram.set_yscale("symlog", linthresh=10)
    histogram.set(xlabel="rank of the tag or state", ylabel="words",
                  title="words of each tag or state, most frequent first (one run)")  # fmt: skip
    distances.set(xlabel="Bhattacharyya distance, nats",
                  title="from the row of nouns (NNP) to those of other tags (one run)")  # fmt: skip
    for panel in (histogram, distances):
        panel.legend()
    save(figure, "diversified_tagging")


def main() -> None:
    """Fit all seeds, in several processes, then write."""
    options = arguments(__doc__, ["penn", "web", "penn from clusters", "starts", "alone", "dense"])
    if options.draw:
        draw(earlier("diversified_tagging"))
        return
    if options.quick:
        print(summary("toy", [fit_one("toy", seed, True) for seed in range(2)])[0]["gain"])
        return
    rows = earlier("diversified_tagging")
    for part in options.only:
        if part == "starts":
            kept_rows = [row for row in rows if row.get("part") not in ("search", "judged")]
            rows = kept_rows + starts_compared()
        elif part in ("alone", "dense"):
            made = clusters_alone() if part == "alone" else dense()
            rows = [row for row in rows if row.get("part") != part] + made
        else:
            with get_context("spawn").Pool(int(os.environ.get("PROCESSES", "2"))) as pool:
                runs = pool.starmap(kept, [(part, seed) for seed in range(NUM_SEEDS)], chunksize=1)
            rows = [row for row in rows if row.get("data") != part] + summary(part, runs)
        write("diversified_tagging", rows)
    draw(rows)


if __name__ == "__main__":
    main()
