"""Files that only the papers' experiments read, and what they do to symbols."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
import torch
from torch import Tensor

from pyrohmm import Sequences
from pyrohmm.data.readers import Corpus
from pyrohmm.data.vocabulary import LETTERS, Vocabulary


class Letters(NamedTuple):
    """Handwritten words.

    Attributes:
        data: Values ``(N, T, 128)``, pixels 0 or 1 as float32; labels ``(N, T)``, the letters.
        tags: Names the labels: a to z.
        folds: ``(N,)``, fold of each word for cross-validation, 0 to 9.
    """

    data: Sequences
    tags: Vocabulary
    folds: Tensor


def read_ocr_letters(path: Path) -> Letters:
    """Read Kassel's handwritten words, as ``letter.data`` of Taskar et al. (2003) has them.

    Each line is a letter: its id, the letter, the id of the next or -1, the word's id, its
    position, its fold, and 16 rows of 8 pixels.

    References:
        Max-Margin Markov Networks (Taskar et al., 2003), http://ai.stanford.edu/~btaskar/ocr/
    """
    table = pandas.read_csv(path, sep="\t", header=None, usecols=range(134))
    ends = np.flatnonzero(table[2] == -1)
    lengths = np.diff(ends, prepend=-1)
    if not np.array_equal(table[4][ends], lengths) or ends[-1] != len(table) - 1:
        raise ValueError(f"{path} must hold the letters of each word in their order.")
    tags = Vocabulary(LETTERS)
    data = Sequences.from_concatenated(
        table.iloc[:, 6:].to_numpy(np.float32), lengths, labels=tags.encode(table[1])
    )
    return Letters(data, tags, torch.from_numpy(table[5].to_numpy()[ends]))


def read_proteins(path: Path) -> Corpus:
    """Read the sequences of a table of chains, tab-separated, with a column ``sequence``."""
    chains = pandas.read_csv(path, sep="\t")["sequence"]
    vocabulary = Vocabulary.from_counts("".join(chains), unknown="X")
    return Corpus(Sequences.from_list(map(vocabulary.encode, chains)), vocabulary)


def tags_as_values(corpus: Corpus) -> Corpus:
    """The tags of a corpus as what is observed; a step whose tag is not known is missing.

    Raises:
        ValueError: If the corpus has no tags.

    Example:
        >>> data = Sequences.from_list([[0, 1]], labels=[[1, 0]])
        >>> tags = tags_as_values(Corpus(data, Vocabulary(["the", "die"]), Vocabulary("ND")))
        >>> tags.data.values, tags.vocabulary.decode(tags.data.values[0])
        (tensor([[1, 0]]), ['D', 'N'])
    """
    data, tags = corpus.data, corpus.tags
    if data.labels is None or tags is None:
        raise ValueError("corpus has no tags; wanted one whose data have labels.")
    values = data.labels.clamp(min=0)
    return Corpus(Sequences(values, data.lengths, data.labels >= 0, total=data.total), tags)


def merge_rare(corpus: Corpus, share: float, name: str = "<rare>") -> Corpus:
    """Put one symbol in place of the rarest, which together make less than ``share`` of all steps.

    The others are numbered anew after it, by falling count. It stands for symbols that are not
    listed, too, so that further data can be read with the vocabulary returned.

    Args:
        corpus: Sequences of symbols.
        share: Of the observed steps, from 0 to 1. As many symbols are merged as stay below it
            together, the rarest first, of equally frequent ones the alphabetically last.
        name: Of the symbol put in their place. If there is nothing to merge it is not added, and
            the corpus is returned as it is.

    Raises:
        ValueError: If ``share`` is out of range, or a symbol that is kept has that name already.

    Example:
        >>> corpus = merge_rare(readers.read_characters("a rose is a rose"), share=0.2)
        >>> list(corpus.vocabulary), corpus.data.values[0, :6]
        (['<rare>', ' ', 's', 'a', 'e', 'o'], tensor([3, 1, 0, 5, 2, 4]))
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie between 0 and 1; got {share}.")
    data, symbols = corpus.data, corpus.vocabulary
    counts = data.values[data.observed].bincount(minlength=len(symbols)).tolist()
    rising = sorted(range(len(symbols)), key=lambda code: (-counts[code], symbols[code]))[::-1]
    mass = itertools.accumulate(counts[code] for code in rising)
    merged = sum(1 for sum_so_far in mass if sum_so_far < share * data.num_observed)
    if merged == 0:
        return corpus
    kept = [symbols[code] for code in rising[: merged - 1 : -1]]
    vocabulary = Vocabulary([name, *kept], unknown=name)
    codes = vocabulary.encode(symbols).to(data.values.device)
    values = codes[data.values.masked_fill(~data.observed, 0)]  # padding may hold anything
    merged_data = Sequences(
        values, data.lengths, data.observed, data.labels, data.total, data.covariates,
        times=data.times,
    )  # fmt: skip
    return Corpus(merged_data, vocabulary, corpus.tags)
