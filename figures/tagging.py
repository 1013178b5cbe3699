"""Part-of-speech tagging: a neural HMM, the most frequent tag of each word, and a tabular HMM.

Section 5.2 of the first draft of *Scaling Hidden Markov Language Models* tags the Wall Street
Journal, which is not freely available. Here the data are UD English EWT, with the 49 tags of its
language and its published split, and the sample of the Penn Treebank that comes with NLTK, without
traces; its first 80 % of sentences are for training, the next 10 % held out, the last 10 % for
testing. The paper's accuracies on the whole Journal are listed beside, and are not comparable.

The vocabulary is that of the training text. Words that occur once there are replaced by a symbol
for their class (``readers.word_classes``), and so are words that do not occur; only the latter are
"unknown". All models but the last see the same symbols. The tabular HMM has one state per tag and
is fitted by counting. The neural HMM has 1,024 states in 64 Brown clusters, on two levels, with 128
dimensions; it is fitted to words and tags jointly by AdamW with a cosine schedule. The character
model of words has 32 filters of each of four widths and a highway layer, an eighth of the cost of
seven widths with as many filters as dimensions; class symbols are spelt like words.

A class symbol hides the letters of its words. The last model, "all words from letters", replaces
none: its vocabulary is all distinct words of the three parts, the emission distribution of a state
is normalised over all words of its block, and a word that is absent from training has a probability
through its letters. So the list of words, but not their tags or frequencies, is taken from the
held-out and the test text too. A word that other models replace is in the cluster of its class
symbol. Of words longer than 16 letters both models read the first and the last 8.

Settings are chosen on held-out data: the pseudo-counts of the tabular HMM by accuracy, and the
learning rate and state dropout of the neural HMMs, for each text, by the accuracy of the first of
them with seed 0 (parts ``choice``, whose rows contain no test results). The models from letters
have that dropout, and a learning rate of their own, chosen in the same way by the first half of the
held-out sentences (parts ``characters_choice`` and ``spelling_choice``). A fit keeps the epoch with
the least held-out nats of words and tags. ``STEPS`` is what time allowed, fewer for the
smaller text, whose best epoch comes earlier; other sizes were not tuned. Accuracies are shares of
words, decoded by the most probable tag at each step ("posterior") and by the most probable path of
states and tags ("path"); a word whose tag does not occur in training counts as wrong, and
``tags_not_in_train`` is their number. ``seconds_per_step`` is processor time, evaluation included.

Seeds determine initial values and batches. ``STEPS`` in the environment limits the gradient steps.
Writes ``tagging.json`` and ``tagging.png``.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any, NamedTuple

import pyro
import torch
from common import alone, arguments, earlier, public_files, pyplot, save, write
from common.neural_ablations import CharCNN
from pyro.distributions import Categorical
from torch import Tensor

from pyrohmm import (
    HMM,
    MarginalModel,
    NeuralTagger,
    Sequences,
    blocks,
    cooccurrence,
    fit_map,
    readers,
)
from pyrohmm.language.clusters import brown
from pyrohmm.nn.tagging import tagged

NAME = "tagging"
SOURCES = {"web": "UD English EWT", "penn": "Penn Treebank sample"}
MODELS = {
    "frequent": "most frequent tag of each word",
    "tabular": "tabular HMM",
    "words": "neural HMM",
    "characters": "neural HMM, words from letters",
    "spelling": "neural HMM, all words from letters",
}
NEURAL = ("words", "characters", "spelling")
PAPER = {"words": (0.9625, 0.9650), "spelling": (0.9673, 0.9695)}  # held out, test: whole Journal
SEEDS = (0, 1, 2)
ADDED = [(words, transitions) for words in (0.001, 0.01, 0.1) for transitions in (0.1, 1.0)]
STATES, CLUSTERS, DIM, TOKENS = 1024, 64, 128, 2048
CHOICES = [(rate, dropout) for rate in (3e-3, 1e-2, 3e-2) for dropout in (0.0, 0.25, 0.5)]
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # of the models from letters
STEPS = {"web": 1000, "penn": 500, "toy": 20}
LETTERS: dict[str, Any] = {"widths": (2, 3, 4, 5), "num_filters": 32}
HALF = 8  # of the letters of a long word that are read, from either end


class Task(NamedTuple):
    """Words with tags as labels, and masks of the words that do not occur in the training text."""

    train: Sequences
    parts: dict[str, Sequences]  # "dev" and "test"
    unknown: dict[str, Tensor]
    vocabulary: readers.Vocabulary
    kinds: Tensor  # index of the class symbol of each word, or of the word itself
    tags: readers.Vocabulary


@functools.cache
def read(source: str, replaced: bool = True) -> Task:
    """A source; ``toy`` needs no file. Rare and unknown words are replaced by symbols, or kept."""
    if source == "web":
        files = (public_files.find(f"ud-ewt-{part}") for part in ("train", "dev", "test"))
        corpora = [public_files.read_conllu(path, "xpos") for path in files]
    else:
        corpus = (
            public_files.read_tagged(public_files.find("treebank-sample"))
            if source == "penn"
            else toy()
        )
        count = len(corpus.data)
        ends = [0, int(0.8 * count), int(0.9 * count), count]
        corpora = [corpus._replace(data=corpus.data[a:b]) for a, b in itertools.pairwise(ends)]
    words = [corpus.vocabulary.decode(corpus.data.values[corpus.data.exists]) for corpus in corpora]
    vocabulary = readers.Vocabulary.from_counts(words[0], min_count=2, unknown=readers.word_classes)
    kinds = torch.arange(len(vocabulary))
    if not replaced:
        every = readers.Vocabulary(sorted({word for part in words for word in part}))
        vocabulary, kinds = every, vocabulary.encode(every)
    tags = corpora[0].tags
    assert tags is not None
    seen, sets, unknown = set(words[0]), [], []
    for corpus, part in zip(corpora, words):
        assert corpus.tags is not None
        assert corpus.data.labels is not None
        if not bool((corpus.data.labels >= 0)[corpus.data.exists].all()):
            raise ValueError(f"each word of {source} must have a tag; there are some without.")
        exists, values = corpus.data.exists, torch.zeros_like(corpus.data.values)
        values[exists] = vocabulary.encode(part)
        new = torch.tensor([tags.index(tag) if tag in tags else len(tags) for tag in corpus.tags])
        labels = torch.where(corpus.data.labels >= 0, new[corpus.data.labels], -1)
        sets.append(Sequences(values, corpus.data.lengths, labels=labels))
        strange = torch.zeros_like(exists)
        strange[exists] = torch.tensor([word not in seen for word in part])
        unknown.append(strange)
    names = ("dev", "test")
    parts = dict(zip(names, sets[1:]))
    return Task(sets[0], parts, dict(zip(names, unknown[1:])), vocabulary, kinds, tags)


def toy() -> readers.Corpus:
    """Words whose ending determines the tag, most of them rare, from a random Markov chain."""
    torch.manual_seed(0)
    transition = torch.distributions.Dirichlet(torch.full((4,), 0.3)).sample((4,))
    names = [f"{n}{ending}" for ending in ("ing", "ed", "s", "x") for n in "abcdefghijklmnopqrst"]
    states = torch.zeros(100, 8, dtype=torch.long)
    for t in range(1, 8):
        states[:, t] = torch.distributions.Categorical(transition[states[:, t - 1]]).sample()
    values = 20 * states + (20 * torch.rand(100, 8) ** 4).long()
    data = Sequences(values, torch.full((100,), 8), labels=states)
    return readers.Corpus(data, readers.Vocabulary(names), readers.Vocabulary("abcd"))


Tagging = Callable[[Sequences], dict[str, Tensor]]  # tags of words by decoding


def frequent(task: Task) -> tuple[Tagging, dict[str, Any]]:
    """The most frequent tag of each symbol; the overall one for symbols without tags."""
    assert task.train.labels is not None
    size, known = len(task.tags), task.train.labels >= 0
    pairs = task.train.values[known] * size + task.train.labels[known]
    counts = torch.bincount(pairs, minlength=len(task.vocabulary) * size).view(-1, size)
    best = (counts + counts.sum(0) / (counts.sum() + 1)).argmax(-1)
    return lambda data: {"posterior": best[data.values]}, {}


def tabular(task: Task) -> tuple[Tagging, dict[str, Any]]:
    """One state per tag; pseudo-counts are chosen on held-out data."""
    assert task.train.labels is not None
    labels, size = task.train.labels, len(task.tags)
    known = labels >= 0
    first = tally(labels[:, 0][known[:, 0]], size)
    both = known[:, 1:] & known[:, :-1]
    transitions = tally(labels[:, :-1][both] * size + labels[:, 1:][both], size**2).view(size, size)
    number = len(task.vocabulary)
    words = tally(labels[known] * number + task.train.values[known], size * number)

    def decoder(to_words: float, to_transitions: float) -> Tagging:
        """The result of ``fit_em`` with these concentrations, less one, and all states known."""
        probs = [
            (counts + added) / (counts + added).sum(-1, keepdim=True)
            for counts, added in (
                (first, to_transitions),
                (transitions, to_transitions),
                (words.view(size, number), to_words),
            )
        ]  # fmt: skip
        initial, transition, emission = (part.log().float() for part in probs)

        def decode(data: Sequences) -> dict[str, Tensor]:
            logits = Categorical(logits=emission)
            hmm = HMM(initial, transition, logits, data.lengths, validate_args=False)
            best = hmm.posterior(data.values).state_probs.argmax(-1)
            return {"posterior": best, "path": hmm.viterbi(data.values)}

        return decode

    scores = {added: accuracy(task, "dev", decoder(*added))["posterior"]["all"] for added in ADDED}
    best = max(scores, key=lambda added: scores[added])
    return decoder(*best), {"added_to_words": best[0], "added_to_moves": best[1]}


def tally(codes: Tensor, size: int) -> Tensor:
    """Counts of the codes, ``(size,)``."""
    return torch.bincount(codes, minlength=size).double()


def spelt(word: str) -> str:
    """The letters of a word that the models read."""
    return word if len(word) <= 2 * HALF else word[:HALF] + word[-HALF:]


def clusters_of(task: Task, count: int) -> Tensor:
    """The Brown cluster of each word, computed with rare words replaced, ``(V,)``."""
    symbols = Sequences(task.kinds[task.train.values], task.train.lengths)
    pairs = cooccurrence.count_pairs(symbols, int(task.kinds.max()) + 1)
    assignment = brown(pairs, count, progress=False).assignment
    return assignment[task.kinds].unique(return_inverse=True)[1]  # nonempty clusters only


def neural(
    task: Task, letters: bool, seed: int, steps: int, rate: float, dropout: float
) -> tuple[Tagging, dict[str, Any]]:
    """A neural HMM of words and tags."""
    small = len(task.vocabulary) < 100
    states, count, dim = (32, 4, 16) if small else (STATES, CLUSTERS, DIM)
    pyro.set_rng_seed(seed)
    partition = blocks.from_clusters(clusters_of(task, count), states // count)
    spellings = [spelt(word) for word in task.vocabulary]
    module = NeuralTagger(
        partition.num_states, len(task.vocabulary), len(task.tags), dim, blocks=partition,
        two_level=True, dropout=dropout,
        words=CharCNN(spellings, dim, **LETTERS) if letters else None,
    )  # fmt: skip
    held_out = task.parts["dev"]
    assert held_out.labels is not None
    known = Sequences(
        held_out.values, held_out.lengths,
        labels=held_out.labels.masked_fill(held_out.labels == len(task.tags), -1),
    )  # fmt: skip
    start_time = time.process_time()
    fit = fit_map(
        MarginalModel(module), tagged(task.train), num_iterations=steps, batch_tokens=TOKENS,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, rate, weight_decay=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        clip_norm=5.0, tolerance=None, validation=tagged(known), progress=False,
    )  # fmt: skip
    seconds = time.process_time() - start_time
    best = min(fit.validation, key=lambda report: report.nats)

    def decode(data: Sequences) -> dict[str, Tensor]:
        pairs = tagged(data.without_labels())
        hmm: Any = fit.hmm(pairs)
        return {
            "posterior": hmm.best_tags(pairs.values), "path": hmm.best_path(pairs.values).tags
        }  # fmt: skip

    return decode, {
        "states": partition.num_states, "clusters": partition.num_blocks, "dimensions": dim,
        "steps": steps, "rate": rate, "dropout": dropout,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "cpu_minutes": seconds / 60, "seconds_per_step": seconds / steps,
        "held_out_nats": best.nats, "best_step": best.step,
        "trail": [list(each) for each in fit.validation],
    }  # fmt: skip


def accuracy(
    task: Task, part: str, decode: Tagging, share: float = 1.0
) -> dict[str, dict[str, float]]:
    """Accuracy of all and of unknown words in the first share of the sentences, by decoding."""
    data = task.parts[part][: int(share * len(task.parts[part]))]
    right = dict[str, list[Tensor]]()
    strange = []
    for rows in data.lengths.argsort(stable=True).split(64):
        piece = data[rows]
        assert piece.labels is not None
        known = piece.labels >= 0
        strange.append(task.unknown[part][rows][:, : piece.num_steps][known])
        for name, tags in decode(piece).items():
            right.setdefault(name, []).append((tags == piece.labels)[known].double())
    new = torch.cat(strange)
    correct = {name: torch.cat(pieces) for name, pieces in right.items()}
    return {
        name: {"all": values.mean().item(), "unknown": values[new].mean().item()}
        for name, values in correct.items()
    }


def choice(source: str, model: str = "words") -> tuple[float, float]:
    """The learning rate and the dropout with the highest held-out accuracy."""
    rows = {row["part"]: row for row in earlier(NAME)}
    if model == "words":
        parts = {each: choosing(source, *each) for each in CHOICES}
    else:
        dropout = choice(source)[1]
        parts = {(rate, dropout): choosing_rate(source, model, rate) for rate in RATES}
    missing = [part for part in parts.values() if part not in rows]
    if missing:
        raise ValueError(f"the settings are not chosen yet; run --only {' '.join(missing)}.")
    which = "dev" if model == "words" else "dev_first_half"
    return max(parts, key=lambda each: rows[parts[each]][which]["posterior"]["all"])


def choosing(source: str, rate: float, dropout: float) -> str:
    """The part that tries a learning rate and a dropout."""
    return f"{source}-choice-{rate}-{dropout}"


def choosing_rate(source: str, model: str, rate: float) -> str:
    """The part that tries a learning rate of a model from letters."""
    return f"{source}-{model}_choice-{rate}"


def measure(part: str) -> dict[str, Any]:
    """The row of ``SOURCE-MODEL-SEED``, or, for held-out data alone, of a choice.

    That is ``SOURCE-choice-RATE-DROPOUT`` or ``SOURCE-MODEL_choice-RATE``.
    """
    source, name, *numbers = part.split("-")
    tried = name.endswith("choice")
    model = "words" if name == "choice" else name.removesuffix("_choice")
    seed = 0 if tried else int(numbers[0])
    task = read(source, model != "spelling")
    steps = min(STEPS[source], int(os.environ.get("STEPS", "1000000")))
    if model == "frequent":
        decode, more = frequent(task)
    elif model == "tabular":
        decode, more = tabular(task)
    else:
        letters = model in ("characters", "spelling")
        if source == "toy":
            rate, dropout = CHOICES[0]
        elif tried:
            rate = float(numbers[0])
            dropout = choice(source)[1] if letters else float(numbers[1])
        else:
            rate, dropout = choice(source, model)
        decode, more = neural(task, letters, seed, steps, rate, dropout)
        more["rate_chosen_for"] = None if tried else MODELS[model]
    evaluated = ("dev",) if tried else ("dev", "test")
    row = {
        "part": part, "data": SOURCES.get(source, source),
        "model": MODELS[model], "choosing": tried,
        "seed": seed, "words": len(task.vocabulary), "tags": len(task.tags),
        "tokens": {"train": task.train.num_observed}
        | {name: data.num_observed for name, data in task.parts.items()},
        "unknown": {name: each.sum().item() for name, each in task.unknown.items()},
        "tags_not_in_train": {
            name: int((data.labels == len(task.tags)).sum())
            for name, data in task.parts.items()
            if data.labels is not None
        },
        **{name: accuracy(task, name, decode) for name in evaluated}, **more,
        **({"dev_first_half": accuracy(task, "dev", decode, 0.5)} if tried else {}),
    }  # fmt: skip
    print({name: value for name, value in row.items() if name != "trail"}, flush=True)
    return row


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and deviation over seeds of the accuracies on test data."""
    lines = []
    for source in SOURCES.values():
        for key, model in MODELS.items():
            scores = [
                row["test"]
                for row in rows
                if (row["data"], row["model"]) == (source, model) and "test" in row
            ]
            for decoding in scores[0] if scores else ():
                line: dict[str, Any] = {
                    "data": source, "model": model, "decoding": decoding, "runs": len(scores)
                }  # fmt: skip
                for which in ("all", "unknown"):
                    values = [score[decoding][which] for score in scores]
                    line[which] = {
                        "ours": mean(values),
                        "deviation": stdev(values) if len(values) > 1 else None,
                    }
                line["paper_on_other_data"] = PAPER.get(key, (None, None))[1]
                lines.append(line)
    return lines


def draw(lines: list[dict[str, Any]]) -> None:
    """Accuracies of each model, for all words and for unknown ones."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.5), layout="constrained", sharey=True)
    panels = [(source, which) for source in SOURCES.values() for which in ("all", "unknown")]
    for panel, (source, which) in zip(axes.flat, panels):
        selected = [line for line in lines if line["data"] == source]
        for n, decoding in enumerate(("posterior", "path")):
            part = [line for line in selected if line["decoding"] == decoding]
            panel.errorbar(
                [100 * line[which]["ours"] for line in part],
                [list(MODELS.values()).index(line["model"]) + 0.24 * n - 0.12 for line in part],
                xerr=[100 * (line[which]["deviation"] or 0) for line in part],
                fmt="os"[n], markersize=5, capsize=3, color=f"C{n}", label=decoding,
            )  # fmt: skip
        panel.set_title(f"{source}, {which} words")
    figure.supxlabel("tagging accuracy in %: mean and standard deviation over seeds", fontsize=10)
    for panel in axes[:, 0]:
        panel.set_yticks(range(len(MODELS)), MODELS.values())
        panel.set_ylim(len(MODELS) - 0.5, -0.5)
    axes[0, 0].legend(loc="lower left", title="decoding")
    save(figure, NAME)


def main() -> None:
    """Run the fits; each is written as soon as it is finished."""
    parts = [choosing(source, *each) for source in SOURCES for each in CHOICES]
    parts += [
        choosing_rate(source, model, rate)
        for source in SOURCES
        for model in ("characters", "spelling")
        for rate in RATES
    ]
    parts += [
        f"{source}-{model}-{seed}"
        for source in SOURCES
        for seed in SEEDS
        for model in MODELS
        if seed == 0 or model in NEURAL
    ]
    options = arguments(__doc__, parts)
    if options.draw:
        draw(summary(earlier(NAME)))
        return
    if options.quick:
        for model in MODELS:
            measure(f"toy-{model}-0")
        return
    for part in options.only:
        row = measure(part)
        with alone(NAME):
            rows = {row["part"]: row for row in earlier(NAME)} | {part: row}
            kept = [rows[name] for name in parts if name in rows]
            lines = summary(kept)
            write(NAME, kept, summary=lines)
            draw(lines)


if __name__ == "__main__":
    main()
