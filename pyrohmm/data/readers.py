"""Readers of public formats: from a file to :class:`Sequences` and a :class:`Vocabulary`.

Files may be gzipped. A malformed one is a ``ValueError`` that names it and the line. The argument
``vocabulary`` of every reader is that of a training set, or a function that makes one of the
symbols read; by default it lists them all. For rare words there is, for instance,
``functools.partial(Vocabulary.from_counts, min_count=2, unknown="<unk>")``, or, with a symbol for
each kind of rare word, ``unknown=word_classes``.

N sequences have up to T steps and V symbols.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._checks import check_kind, check_size, warn_caller
from .sequences import Sequences
from .steps import NO_CODE, encoded
from .vocabulary import CLASS_COUNT as CLASS_COUNT
from .vocabulary import LETTERS as LETTERS
from .vocabulary import Counting as Counting
from .vocabulary import Vocabulary as Vocabulary
from .vocabulary import word_classes as word_classes

FilePath = str | os.PathLike[str]
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)  # what reading a damaged .gz raises


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
    """Sequence read from a file: first line number, symbols, and tags (None if not known)."""

    line: int
    symbols: Sequence[str | None]
    tags: Sequence[str | None] = ()


def read_lines(path: FilePath) -> list[str]:
    """Read the lines of a text file, blank ones included.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has no line that is not blank, or is not UTF-8.
    """
    lines = [line for _, line in numbered_lines(path)]
    if not any(line.strip() for line in lines):
        raise malformed(path, 1, "at least one sentence", "a file without any")
    return lines


def read_sentences(
    path: FilePath, vocabulary: Vocabulary | Counting | None = None, eos: str | None = "<eos>"
) -> Corpus:
    """Read one sentence per line, its tokens separated by white space.

    Args:
        path: The file.
        vocabulary: Of the tokens, or what makes it.
        eos: Appended to each sentence, so that a blank line is a lone ``eos``; with None nothing
            is appended and blank lines are passed over.

    Raises:
        ValueError: If there is no sentence, or a token is not in ``vocabulary``.
    """
    end = [] if eos is None else [eos]
    lines = [*numbered_lines(path)]
    if any("\t" in line for _, line in lines[:9]):
        warn_caller(f"{path} has tabs, as tables of tagged words: each line is a sentence here")
    entries = (Entry(number, line.split() + end) for number, line in lines)
    return corpus_of(path, [entry for entry in entries if entry.symbols], vocabulary)


def read_characters(text: str, alphabet: str = LETTERS + " ", chunk: int = 100) -> Corpus:
    """Read the characters of a text, not of a file, in pieces of equal length.

    The text is lower-cased, and whatever is not in the alphabet separates words.

    Args:
        text: The text.
        alphabet: The characters kept, lower-case, a space among them: one space replaces each run
            of other characters.
        chunk: Length T of each piece; the last may be shorter.

    Example:
        >>> corpus = read_characters("Two  dice: 3.", chunk=5)
        >>> corpus.vocabulary.decode(corpus.data.values[0]), corpus.data.lengths
        (['t', 'w', 'o', ' ', 'd'], tensor([5, 4]))
    """
    check_size("chunk", chunk)
    if "." in text and os.path.isfile(text):
        raise ValueError(f"text must be a text; got the file {text!r}. Call read_text() of it.")
    vocabulary = Vocabulary(alphabet)
    codes = vocabulary.encode(plain(text, alphabet))
    return Corpus(Sequences.from_list(codes.split(chunk)), vocabulary)


def numbered_lines(path: FilePath) -> Iterator[tuple[int, str]]:
    """Read the number, from 1, and text of each line; only a newline ends a line."""
    check_kind("path", path, str | os.PathLike, "a file", "Of lines, give .split() to from_list.")
    number = 0
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8" if number > 1 else "utf-8-sig")  # a mark may begin it
                yield number, text.rstrip("\r\n")
    except (UnicodeDecodeError, *BROKEN) as error:
        raise malformed(path, max(number, 1), "UTF-8, whole if gzipped", str(error)) from error


def plain(text: str, alphabet: str) -> str:
    """Lower-case ``text``, with one space for each run of characters outside ``alphabet``."""
    kept = re.escape(alphabet.replace(" ", ""))
    return re.sub(f"[^{kept}]+", " ", text.lower())


def malformed(path: FilePath, number: int, wanted: str, got: str) -> ValueError:
    """The error of a malformed line of a file."""
    shown = got if len(got) <= 60 else got[:57] + "..."
    return ValueError(f"{path}, line {number}: wanted {wanted}; got {shown!r}.")


def corpus_of(
    path: FilePath,
    rows: Sequence[Entry],
    vocabulary: Vocabulary | Counting | None,
    tags: Vocabulary | None = None,
) -> Corpus:
    """Encode sequences read from a file, with new vocabularies where none are given."""
    if not rows:
        raise malformed(path, 1, "at least one sequence", "a file without any")
    marks = [tag for row in rows for tag in row.tags if tag is not None]
    if tags is None and marks:
        if isinstance(vocabulary, Vocabulary):
            text = f"{path} has tags, whose codes must be those of the file that vocabulary is of"
            raise ValueError(f"{text}; got tags=None. Give its corpus.tags, too.")
        tags = Vocabulary.from_counts(marks)
    if not isinstance(vocabulary, Vocabulary):
        symbols = (s for row in rows for s in row.symbols if s is not None)
        vocabulary = (vocabulary or Vocabulary.from_counts)(symbols)
    values, labels = [], []
    for row in rows:
        try:
            values.append(encoded(list(row.symbols), vocabulary))
            if tags is not None:
                labels.append(encoded(list(row.tags), tags))
        except ValueError as error:
            raise ValueError(f"{path}, sequence starting at line {row.line}: {error}") from None
    codes, lengths = torch.cat(values), [len(row) for row in values]
    steps: Any = {"observed": codes != NO_CODE, "labels": torch.cat(labels) if labels else None}
    data = Sequences.from_concatenated(codes.clamp(min=0), lengths, **steps)
    return Corpus(data, vocabulary, tags)
