"""Texts for language models, and the Brown clusters of their words."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyrohmm import Sequences, clusters, cooccurrence, datasets, readers
from pyrohmm.language import END, find_clusters

from . import public_files


class Text(NamedTuple):
    """Sentences, each ended by ``<eos>``, and the vocabulary."""

    train: Sequences
    valid: Sequences
    test: Sequences
    words: readers.Vocabulary


def read(name: str) -> Text:
    """Read ``ptb``, ``wikitext2``, or ``letters``: words of an embedded text, without a file."""
    if name == "letters":
        corpus = datasets.english_words(500)
        data = corpus.data
        return Text(data[: len(data) * 8 // 10], data[-200:-100], data[-100:], corpus.vocabulary)
    train = readers.read_sentences(public_files.find(f"{name}-train"))
    parts = [
        readers.read_sentences(public_files.find(f"{name}-{part}"), train.vocabulary).data
        for part in ("valid", "test")
    ]
    return Text(train.data, parts[0], parts[1], train.vocabulary)


def brown(text: Text, num_clusters: int) -> tuple[Tensor, Tensor]:
    """Brown clusters, with ``<eos>`` in a cluster of its own if there is one; and word counts."""
    counts = torch.bincount(text.train.values[text.train.exists], minlength=len(text.words))
    if END in text.words:
        return find_clusters(text.train, text.words, num_clusters, progress=False), counts
    pairs = cooccurrence.count_pairs(text.train, len(text.words))
    return clusters.brown(pairs, num_clusters, progress=False).assignment, counts
