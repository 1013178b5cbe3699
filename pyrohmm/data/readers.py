"""Readers of public formats: from a file to :class:`Sequences` and a :class:`Vocabulary`.

Files may be gzipped. A malformed one is a ``ValueError`` that names it and the line. The argument
``vocabulary`` of every reader is that of a training set, or a function that makes one of the
symbols read; by default it lists them all. For rare words there is, for instance,
``functools.partial(Vocabulary.from_counts, min_count=2, unknown="<unk>")``, or, with a symbol for
each kind of rare word, ``unknown=word_classes``.

N sequences have up to T steps and V symbols.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.io import loadmat
from scipy.io.matlab import MatReadError
from torch import Tensor

from .._checks import check_size
from .corpus import Corpus as Corpus
from .corpus import Entry, FilePath, corpus_of, malformed, vocabulary_of
from .corpus import merge_rare as merge_rare
from .corpus import tags_as_values as tags_as_values
from .sequences import Sequences
from .vocabulary import CLASS_COUNT as CLASS_COUNT
from .vocabulary import LETTERS as LETTERS
from .vocabulary import Counting as Counting
from .vocabulary import Vocabulary as Vocabulary
from .vocabulary import word_classes as word_classes

FOLD = "[0-9]{1,9}"  # str.isdigit is true of superscripts as well
BROKEN = (EOFError, gzip.BadGzipFile, zlib.error)  # what reading a damaged .gz raises


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


NUCLEOTIDES = frozenset("ACGTUN")


class Proteins(NamedTuple):
    """Chains of residues.

    Attributes:
        data: Values ``(N, T)``, codes of residues; labels ``(N, T)``, codes of their structure.
        vocabulary: Names the values.
        names: N identifiers.
        tags: Names the labels; None if there are none.
        splits: N names of splits, such as "train"; None if the file has none.
        folds: ``(N,)``, fold of each chain for cross-validation; None if the file has none.
    """

    data: Sequences
    vocabulary: Vocabulary
    names: tuple[str, ...]
    tags: Vocabulary | None = None
    splits: tuple[str, ...] | None = None
    folds: Tensor | None = None


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
    return corpus_of(path, list(_sentences(path, eos)), vocabulary)


class SentenceStream:
    """The sentences of a file that need not fit into memory, some thousands at a time.

    Iterating reads the file from its beginning, and yields :class:`Sequences`; it may be done any
    number of times. :func:`pyrohmm.cooccurrence.count_pairs` takes it as it is.

    Args:
        path: The file, one sentence per line, as for :func:`read_sentences`.
        vocabulary: Of the tokens, or what makes it, which reads the file once.
        eos: Appended to each sentence; with None nothing is, and blank lines are passed over.
        part_size: Number of sentences in a part.

    Attributes:
        vocabulary: Of the tokens.

    Raises:
        ValueError: If there is no sentence, or (on iterating) a token is not in ``vocabulary``.

    Example:
        >>> path = getfixture("tmp_path") / "two.txt"
        >>> _ = path.write_text("a rose is a rose" + chr(10) + "is a rose")
        >>> stream = SentenceStream(path, part_size=1)
        >>> [part.values.tolist() for part in stream]
        [[[0, 1, 3, 0, 1, 2]], [[3, 0, 1, 2]]]
        >>> cooccurrence.count_pairs(stream, len(stream.vocabulary))
        Pairs(4 distinct pairs of 4 symbols, 8 in all, lag 1)
    """

    def __init__(
        self,
        path: FilePath,
        vocabulary: Vocabulary | Counting | None = None,
        eos: str | None = "<eos>",
        part_size: int = 10_000,
    ) -> None:
        check_size("part_size", part_size)
        self.path, self.part_size, self.eos = path, part_size, eos
        if next(_sentences(path, eos), None) is None:
            raise malformed(path, 1, "at least one sentence", "a file without any")
        self.vocabulary = vocabulary_of(vocabulary, _sentences(path, eos))

    def __iter__(self) -> Iterator[Sequences]:
        entries = _sentences(self.path, self.eos)
        while rows := list(itertools.islice(entries, self.part_size)):
            yield corpus_of(self.path, rows, self.vocabulary).data


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
    if not len(codes):
        raise ValueError("text is empty; wanted at least one character.")
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
    if column not in ("upos", "xpos"):
        raise ValueError(f"column must be 'upos' or 'xpos'; got {column!r}.")
    place = 3 if column == "upos" else 4
    rows = []
    for block in _blocks(path):
        words: list[str] = []
        marks: list[str | None] = []
        for number, line in block:
            if line.startswith("#"):
                continue
            fields = line.split("\t")
            if len(fields) != 10 or "" in fields or not re.fullmatch(r"\d+([-.]\d+)?", fields[0]):
                raise malformed(path, number, "10 tab-separated fields, the first a number", line)
            if fields[0].isdigit():
                words.append(fields[1])
                marks.append(None if fields[place] == "_" else fields[place])
        if words:
            rows.append(Entry(block[0][0], words, marks))
    return corpus_of(path, rows, vocabulary, tags)


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
    rows = []
    for block in _blocks(path):
        pairs = []
        for number, line in block:
            pair = line.split("\t")
            if len(pair) != 2 or not all(pair):
                raise malformed(path, number, "a word, a tab and a tag", line)
            if pair[1] not in drop:
                pairs.append(pair)
        if pairs:
            words, marks = zip(*pairs, strict=True)
            rows.append(Entry(block[0][0], words, marks))
    return corpus_of(path, rows, vocabulary, tags)


def read_ocr_letters(path: FilePath) -> Letters:
    """Read Kassel's handwritten words, as ``letter.data`` of Taskar et al. (2003) has them.

    Each line is a letter: its id, the letter, the id of the next or -1, the word's id, its
    position, its fold, and 16 rows of 8 pixels.

    Raises:
        ValueError: If a line is malformed, or a word is not in one piece.

    References:
        Max-Margin Markov Networks (Taskar et al., 2003), http://ai.stanford.edu/~btaskar/ocr/
    """
    tags = Vocabulary(LETTERS)
    pixels: list[bytes] = []
    letters: list[str] = []
    lengths: list[int] = []
    folds: list[int] = []
    expected: tuple[int, ...] | None = None  # inside a word: the next id, word, position, fold
    for number, line in _lines(path):
        fields = line.rstrip("\t").split("\t")
        image = "".join(fields[6:])
        if len(fields) != 134 or not re.fullmatch("[01]{128}", image) or fields[1] not in tags:
            raise malformed(path, number, "6 fields, the second a letter, and 128 pixels", line)
        if not all(re.fullmatch(r"-1|\d+", field) for field in (fields[0], *fields[2:6])):
            raise malformed(path, number, "integers in the fields 1 and 3 to 6", line)
        if not re.fullmatch(FOLD, fields[5]):
            raise malformed(path, number, "a fold of at most nine digits in field 6", line)
        own, following, word, position, fold = map(int, (fields[0], *fields[2:6]))
        if (own, word, position, fold) != (expected or (own, word, 1, fold)):
            raise malformed(path, number, "the letters of a word in their order", line)
        expected = (following, word, position + 1, fold) if following != -1 else None
        pixels.append(image.encode())
        letters.append(fields[1])
        if expected is None:
            lengths.append(position)
            folds.append(fold)
    if expected is not None or not lengths:
        raise malformed(path, len(letters) + 1, "the end of a word", "the end of the file")
    images = np.frombuffer(b"".join(pixels), np.uint8).reshape(-1, 128) - ord("0")
    data = Sequences.from_list(
        torch.from_numpy(images.astype(np.float32)).split(lengths),
        labels=tags.encode(letters).split(lengths),
    )
    return Letters(data, tags, torch.tensor(folds))


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
    headers: list[tuple[int, str]] = []
    residues: list[list[str]] = []
    for number, line in _lines(path):
        if line.startswith(">"):
            headers.append((number, line[1:].strip()))
            residues.append([])
        elif line.strip():
            if not headers or not re.fullmatch("[A-Za-z]+", line.strip()):
                raise malformed(path, number, "a header (>), or letters under one", line)
            residues[-1].extend(line.strip().upper())
    chains, names = [], []
    for (number, header), chain in zip(headers, residues, strict=True):
        if not chain:
            raise malformed(path, number, "a sequence under the header", f">{header}")
        if keep is None or keep(header):
            chains.append((number, chain))
            names.append(header.split()[0] if header else "")
    if headers and not chains:
        raise ValueError(f"keep must keep some sequence of {path}; it kept none.")
    if missing is None:
        missing = "N" if all(NUCLEOTIDES.issuperset(chain) for _, chain in chains) else ""
    rows = [Entry(n, [None if s in missing else s for s in chain]) for n, chain in chains]
    corpus = corpus_of(path, rows, vocabulary)
    return Proteins(corpus.data, corpus.vocabulary, tuple(names))


def read_protein_table(path: FilePath, vocabulary: Vocabulary | Counting | None = None) -> Proteins:
    """Read a table of chains: a header line, then tab-separated fields.

    The columns ``id``, ``sequence`` and ``dssp3`` must be there. Secondary structure becomes the
    labels H (helix), E (strand) and C (coil, also written ``-``). Where a column ``mask`` or
    ``ordered`` holds 0 the residue is not to be scored, and its label is -1. The columns
    ``split`` and ``cv_fold`` are returned; others are not read.

    Args:
        path: The file.
        vocabulary: Of the residues, or what makes it; by default X, which is how biology writes
            an unknown residue, stands for residues that do not occur.

    Raises:
        ValueError: If a line is malformed, or a residue is not in ``vocabulary``.
    """
    lines = _lines(path)
    header = next(lines, (1, ""))[1].split("\t")
    if not {"id", "sequence", "dssp3"} <= set(header):
        raise malformed(path, 1, "columns named id, sequence and dssp3", "\t".join(header))
    tags = Vocabulary("HEC")
    rows, table = [], []
    for number, line in lines:
        fields = line.split("\t")
        if len(fields) != len(header):
            raise malformed(path, number, f"{len(header)} tab-separated fields", line)
        row = dict(zip(header, fields, strict=True))
        if not row["sequence"]:
            raise malformed(path, number, "a sequence of at least one residue", line)
        structure = row["dssp3"].replace("-", "C")
        flags = [row[name] for name in ("mask", "ordered") if name in row]
        if any(len(strand) != len(row["sequence"]) for strand in (structure, *flags)):
            raise malformed(path, number, "one character per residue in each column", line)
        if not set("".join(flags)) <= {"0", "1"} or not re.fullmatch(FOLD, row.get("cv_fold", "0")):
            raise malformed(path, number, "mask and ordered of 0 and 1, an integer fold", line)
        scored = zip(structure, *flags, strict=True)
        marks = [None if "0" in given else mark for mark, *given in scored]
        rows.append(Entry(number, row["sequence"], marks))
        table.append(row)
    default = functools.partial(Vocabulary.from_counts, unknown="X")
    corpus = corpus_of(path, rows, default if vocabulary is None else vocabulary, tags)
    return Proteins(
        corpus.data,
        corpus.vocabulary,
        tuple(row["id"] for row in table),
        tags,
        tuple(row["split"] for row in table) if "split" in header else None,
        torch.tensor([int(row["cv_fold"]) for row in table]) if "cv_fold" in header else None,
    )


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

    Raises:
        ValueError: If the file is not one of these.
    """
    try:
        tables = loadmat(path)
        rolls = {split: list(tables[f"{split}data"].ravel()) for split in _SPLITS}
        whole = all(roll.ndim == 2 and roll.max() <= 1 for part in rolls.values() for roll in part)
    except (KeyError, ValueError, AttributeError, MatReadError, NotImplementedError) as error:
        whole, rolls = False, {}
        reason = str(error) or type(error).__name__
    else:
        reason = "other arrays"
    if not whole:
        raise ValueError(
            f"{path} must be a MATLAB file of traindata, validdata and testdata, each a list of "
            f"matrices of zeros and ones, steps by keys; got {reason}."
        )
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


def _sentences(path: FilePath, eos: str | None) -> Iterator[Entry]:
    """The tokens of each line, with ``eos`` if there is one; if not, without blank lines."""
    end = [] if eos is None else [eos]
    entries = (Entry(number, line.split() + end) for number, line in _lines(path))
    return (entry for entry in entries if entry.symbols)


def _blocks(path: FilePath) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines between blank ones, block by block."""
    for filled, block in itertools.groupby(_lines(path), lambda line: bool(line[1].strip())):
        if filled:
            yield list(block)


def plain(text: str, alphabet: str) -> str:
    """``text`` lower-cased, one space for each run of characters that are not in ``alphabet``."""
    if " " not in alphabet or alphabet != alphabet.lower():
        raise ValueError(f"alphabet must be lower-case and hold a space; got {alphabet!r}.")
    kept = re.escape(alphabet.replace(" ", ""))
    return re.sub(f"[^{kept}]+", " ", text.lower())
