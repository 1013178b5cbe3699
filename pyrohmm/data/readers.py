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
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.io import loadmat

from .._checks import check_size
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
    """A sequence as it was read: the line it starts at, its symbols, its tags (None: not known)."""

    line: int
    symbols: Sequence[str | None]
    tags: Sequence[str | None] = ()


NUCLEOTIDES = frozenset("ACGTUN")


class Proteins(NamedTuple):
    """Chains of residues.

    Attributes:
        data: Values ``(N, T)``, codes of residues.
        vocabulary: Names the values.
        names: N identifiers.
    """

    data: Sequences
    vocabulary: Vocabulary
    names: tuple[str, ...]


def read_lines(path: FilePath) -> list[str]:
    """The lines of a text file, blank ones too.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has no line that is not blank, or is not UTF-8.
    """
    lines = [line for _, line in _lines(path)]
    if not any(line.strip() for line in lines):
        raise malformed(path, 1, "at least one sentence", "a file without any")
    return lines


def read_sentences(
    path: FilePath,
    vocabulary: Vocabulary | Counting | None = None,
    eos: str | None = "<eos>",
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
    entries = (Entry(number, line.split() + end) for number, line in _lines(path))
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
    vocabulary = Vocabulary(alphabet)
    codes = vocabulary.encode(plain(text, alphabet))
    return Corpus(Sequences.from_list(codes.split(chunk)), vocabulary)


def read_conllu(
    path: FilePath,
    column: Literal["upos", "xpos"] = "upos",
    vocabulary: Vocabulary | Counting | None = None,
    tags: Vocabulary | None = None,
) -> Corpus:
    """Read the words and tags of a CoNLL-U file, the format of Universal Dependencies.

    Multiword ranges (``3-4``) and empty nodes (``5.1``) are passed over: their words come by
    themselves. A tag that is not given (``_``) makes a label of -1.

    Args:
        path: The file.
        column: Which tags: universal or those of the language.
        vocabulary: Of the words, or what makes it.
        tags: Those of the training set; by default those that occur.

    Raises:
        ValueError: If a line is malformed, or a word or tag is not known.
    """
    place = {"upos": 3, "xpos": 4}[column]

    def read(number: int, line: str) -> tuple[str, str | None] | None:
        if line.startswith("#"):
            return None
        fields = line.split("\t")
        if len(fields) != 10 or "" in fields or not re.fullmatch(r"\d+([-.]\d+)?", fields[0]):
            raise malformed(path, number, "10 tab-separated fields, the first a number", line)
        tag = None if fields[place] == "_" else fields[place]
        return (fields[1], tag) if fields[0].isdigit() else None

    return corpus_of(path, _entries(path, read), vocabulary, tags)


def read_tagged(
    path: FilePath,
    vocabulary: Vocabulary | Counting | None = None,
    tags: Vocabulary | None = None,
    drop: Sequence[str] = ("-NONE-",),
) -> Corpus:
    """Read one word, a tab and its tag per line, with a blank line after each sentence.

    Args:
        path: The file.
        vocabulary: Of the words, or what makes it.
        tags: Those of the training set; by default those that occur.
        drop: Words with these tags are left out. The default are the traces of the Penn Treebank,
            which nobody wrote or said.

    Raises:
        ValueError: If a line is malformed, or a word or tag is not known.
    """

    def read(number: int, line: str) -> tuple[str, str | None] | None:
        word, _, tag = line.partition("\t")
        if not (word and tag) or "\t" in tag:
            raise malformed(path, number, "a word, a tab and a tag", line)
        return None if tag in drop else (word, tag)

    return corpus_of(path, _entries(path, read), vocabulary, tags)


def read_fasta(
    path: FilePath,
    vocabulary: Vocabulary | Counting | None = None,
    keep: Callable[[str], bool] | None = None,
    missing: str | None = None,
) -> Proteins:
    """Read a FASTA file of proteins or nucleic acids; residues are upper-cased letters.

    Args:
        path: The file.
        vocabulary: Of the residues, or what makes it.
        keep: Whether to keep the sequence under a header, given without its ``>``; by default
            all are kept. ``pdb_seqres.txt`` of RCSB wants
            ``lambda header: "mol:protein" in header``.
        missing: Letters of residues that are not known, whose steps are missing. By default N if
            the file has no letters but A, C, G, T, U and N, as DNA and RNA have, and none if it has
            others; give "NRYKMSWBDHV" where ambiguity codes occur.

    Raises:
        ValueError: If a line is malformed, or a residue is not in ``vocabulary``.
    """
    chains: list[tuple[int, str, list[str]]] = []  # line, header, residues
    for number, line in _lines(path):
        if line.startswith(">"):
            chains.append((number, line[1:].strip(), []))
        elif line.strip():
            if not chains or not re.fullmatch("[A-Za-z]+", line.strip()):
                raise malformed(path, number, "a header (>), or letters under one", line)
            chains[-1][2].extend(line.strip().upper())
    for number, header, residues in chains:
        if not residues:
            raise malformed(path, number, "a sequence under the header", f">{header}")
    kept = [chain for chain in chains if keep is None or keep(chain[1])]
    if missing is None:
        missing = "N" if all(NUCLEOTIDES.issuperset(residues) for *_, residues in kept) else ""
    rows = [Entry(n, [None if s in missing else s for s in residues]) for n, _, residues in kept]
    corpus = corpus_of(path, rows, vocabulary)
    names = tuple(header.split()[0] if header else "" for _, header, _ in kept)
    return Proteins(corpus.data, corpus.vocabulary, names)


def read_piano_rolls(path: FilePath) -> dict[str, Sequences]:
    """Read polyphonic music: the keys of a piano that are held down at each step.

    The files are those of Boulanger-Lewandowski et al., 2012, Modeling temporal dependencies in
    high-dimensional sequences, in MATLAB's format: ``datasets.find("jsb-chorales")``,
    ``"nottingham"``, ``"piano-midi"`` and ``"muse-data"``.

    Args:
        path: The file, with arrays ``traindata``, ``validdata`` and ``testdata`` of matrices of
            zeros and ones, steps by keys.

    Returns:
        Training, validation and test set by the names "train", "valid" and "test": values
        ``(N, T, 88)``, 1 where a key is down, as float32.
    """
    tables = loadmat(path)
    rolls = {split: list(tables[f"{split}data"].ravel()) for split in _SPLITS}
    return {
        split: Sequences.from_list([torch.from_numpy(roll.astype(np.float32)) for roll in part])
        for split, part in rolls.items()
    }


_SPLITS = "train", "valid", "test"


def _lines(path: FilePath) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line; only a newline ends a line."""
    number = 0
    try:
        with gzip.open(path) if Path(path).suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8" if number > 1 else "utf-8-sig")  # a mark may begin it
                yield number, text.rstrip("\r\n")
    except (UnicodeDecodeError, *BROKEN) as error:
        raise malformed(path, max(number, 1), "UTF-8, whole if gzipped", str(error)) from error


def _entries(
    path: FilePath, read: Callable[[int, str], tuple[str, str | None] | None]
) -> list[Entry]:
    """A sequence for each block of lines between blank ones, of what ``read`` makes of a line."""
    entries = []
    for filled, block in itertools.groupby(_lines(path), lambda line: bool(line[1].strip())):
        lines = list(block)
        pairs = [pair for number, line in lines if filled and (pair := read(number, line))]
        if pairs:
            entries.append(Entry(lines[0][0], *zip(*pairs)))
    return entries


def plain(text: str, alphabet: str) -> str:
    """``text`` lower-cased, one space for each run of characters that are not in ``alphabet``."""
    if " " not in alphabet or alphabet != alphabet.lower():
        raise ValueError(f"alphabet must be lower-case and hold a space; got {alphabet!r}.")
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
    """Encode what was read, with vocabularies made here where they are not given."""
    if not rows:
        raise malformed(path, 1, "at least one sequence", "a file without any")
    if not isinstance(vocabulary, Vocabulary):
        symbols = (s for row in rows for s in row.symbols if s is not None)
        vocabulary = (vocabulary or Vocabulary.from_counts)(symbols)
    marks = [tag for row in rows for tag in row.tags if tag is not None]
    if tags is None and marks:
        tags = Vocabulary.from_counts(marks)
    values, labels = [], []
    for row in rows:
        try:
            values.append(encoded(list(row.symbols), vocabulary))
            if tags is not None:
                labels.append(encoded(list(row.tags), tags))
        except ValueError as error:
            raise ValueError(f"{path}, sequence starting at line {row.line}: {error}") from None
    codes = torch.cat(values)
    data = Sequences.from_concatenated(
        codes.clamp(min=0), [len(row) for row in values], observed=codes != NO_CODE,
        labels=torch.cat(labels) if labels else None,
    )  # fmt: skip
    return Corpus(data, vocabulary, tags)
