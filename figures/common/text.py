"""Text that language models are trained on, and the blocks of states its words are given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyrohmm import Sequences, clusters, cooccurrence, datasets, readers
from pyrohmm.language import END, find_clusters


class Text(NamedTuple):
    """Sentences, each with ``<eos>`` at its end, and the words by number."""

    train: Sequences
    valid: Sequences
    test: Sequences
    words: readers.Vocabulary


def read(name: str) -> Text:
    """``ptb``, ``wikitext2``, or ``letters``, which needs no file: words of an embedded text."""
    if name == "letters":
        corpus = datasets.english_words(500)
        data = corpus.data
        return Text(data[: len(data) * 8 // 10], data[-200:-100], data[-100:], corpus.vocabulary)
    train = readers.read_sentences(datasets.find(f"{name}-train"))
    parts = [
        readers.read_sentences(datasets.find(f"{name}-{part}"), train.vocabulary).data
        for part in ("valid", "test")
    ]
    return Text(train.data, parts[0], parts[1], train.vocabulary)


def brown(text: Text, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Brown clusters in which ``<eos>`` is alone, where there is one; and how often words occur."""
    counts = torch.bincount(text.train.values[text.train.exists], minlength=len(text.words))
    if END in text.words:
        return find_clusters(text.train, text.words, num_clusters, progress=False), counts
    pairs = cooccurrence.count_pairs(text.train, len(text.words))
    return clusters.brown(pairs, num_clusters, progress=False).assignment, counts
