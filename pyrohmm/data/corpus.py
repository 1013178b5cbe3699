"""``Corpus``: sequences of symbols with the names of symbols and tags, and changes to it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import check_returned
from .sequences import Sequences
from .tables import NO_CODE, encoded
from .vocabulary import Counting, Vocabulary

FilePath = str | os.PathLike[str]


class Corpus(NamedTuple):
    """Sequences of symbols and their names.

    Attributes:
        data: Values ``(N, T)``, codes of symbols; labels ``(N, T)``, codes of tags, if tagged.
        vocabulary: Names the values.
        tags: Names the labels; None if there are none.
    """

    data: Sequences
    vocabulary: Vocabulary
    tags: Vocabulary | None = None


class Entry(NamedTuple):
    """A sequence as it was read: the line it starts at, its symbols, its tags (None: not known)."""

    line: int
    symbols: Sequence[str | None]
    tags: Sequence[str | None] = ()


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


def malformed(path: FilePath, number: int, wanted: str, got: str) -> ValueError:
    """The error of a malformed line of a file."""
    shown = got if len(got) <= 60 else got[:57] + "..."
    return ValueError(f"{path}, line {number}: wanted {wanted}; got {shown!r}.")


def vocabulary_of(vocabulary: Vocabulary | Counting | None, rows: Iterable[Entry]) -> Vocabulary:
    """The vocabulary, or that which is made of the symbols of ``rows``."""
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    symbols = (s for row in rows for s in row.symbols if s is not None)
    made = (vocabulary or Vocabulary.from_counts)(symbols)
    check_returned("vocabulary", made, Vocabulary, "a Vocabulary")
    return made


def corpus_of(
    path: FilePath,
    rows: Sequence[Entry],
    vocabulary: Vocabulary | Counting | None,
    tags: Vocabulary | None = None,
) -> Corpus:
    """Encode what was read, with vocabularies made here where they are not given."""
    if not rows:
        raise malformed(path, 1, "at least one sequence", "a file without any")
    vocabulary = vocabulary_of(vocabulary, rows)
    marks = [tag for row in rows for tag in row.tags if tag is not None]
    if tags is None and marks:
        tags = Vocabulary.from_counts(marks)
    values, labels = [], []
    for row in rows:
        try:
            values.append(_codes(row.symbols, vocabulary))
            if tags is not None:
                label = values[-1].new_full((len(row.tags),), -1)
                known = torch.tensor([tag is not None for tag in row.tags])
                label[known] = tags.encode(tag for tag in row.tags if tag is not None)
                labels.append(label)
        except ValueError as error:
            raise ValueError(f"{path}, sequence starting at line {row.line}: {error}") from None
    data = Sequences.from_list([codes.clamp(min=0) for codes in values], labels or None)
    if any(bool((codes == NO_CODE).any()) for codes in values):
        codes = Sequences.from_list(values).values
        data = Sequences(data.values, data.lengths, codes != NO_CODE, data.labels)
    return Corpus(data, vocabulary, tags)


def _codes(symbols: Sequence[str | None], vocabulary: Vocabulary) -> Tensor:
    """Codes of symbols; -1 for those that are missing."""
    known = [symbol for symbol in symbols if symbol is not None]
    if len(known) == len(symbols):
        return vocabulary.encode(known)
    return encoded(list(symbols), vocabulary)
