"""Public files, their readers, and the random models of the scripts of figures.

Counts of real files are checked where ``$PYROHMM_DATA`` holds them.
"""

import gzip
import hashlib
import importlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from pyrohmm import readers

FIGURES = Path(__file__).resolve().parents[2] / "figures"


@pytest.fixture
def files(monkeypatch):
    monkeypatch.syspath_prepend(FIGURES)
    return importlib.import_module("common.public_files")


def written(tmp_path: Path, content: str | bytes, name: str = "file.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def sentences_of(corpus: readers.Corpus) -> list[list[str]]:
    return [
        corpus.vocabulary.decode(values[:length])
        for values, length in zip(corpus.data.values, corpus.data.lengths.tolist(), strict=True)
    ]


CONLLU = """\
# text = They don't.
1\tThey\tthey\tPRON\tPRP\t_\t2\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t_\t_
3\tn't\tnot\tPART\t_\t_\t2\tadvmod\t_\t_
3.1\tgo\tgo\tVERB\tVB\t_\t_\t_\t_\t_

# text = #
1\t#\t#\tSYM\t#\t_\t0\troot\t_\t_
"""

TAGGED = "The\tDT\ndie\tNN\n*-1\t-NONE-\n\n*-2\t-NONE-\n\n\n#\t#\n"


def test_conllu_passes_over_ranges_and_empty_nodes(files, tmp_path):
    path = written(tmp_path, CONLLU)
    corpus = files.read_conllu(path)
    assert sentences_of(corpus) == [["They", "do", "n't"], ["#"]]
    assert corpus.tags is not None
    assert corpus.tags.decode(corpus.data.labels[0]) == ["PRON", "AUX", "PART"]
    fine = files.read_conllu(path, "xpos", vocabulary=corpus.vocabulary)
    assert fine.tags == ("#", "PRP", "VBP")
    assert fine.data.labels.tolist() == [[1, 2, -1], [0, -1, -1]]  # "_" is not a tag
    with pytest.raises(ValueError, match=r"line 1: symbol 'PRP'"):
        files.read_conllu(path, "xpos", tags=corpus.tags)


def test_dropped_tags_take_their_words_and_empty_sentences_along(files, tmp_path):
    path = written(tmp_path, TAGGED)
    corpus = files.read_tagged(path)
    assert sentences_of(corpus) == [["The", "die"], ["#"]]
    whole = files.read_tagged(path, drop=())
    assert sentences_of(whole) == [["The", "die", "*-1"], ["*-2"], ["#"]]
    assert whole.tags[0] == "-NONE-"


@pytest.mark.parametrize(
    ("read", "content", "line"),
    [
        ("read_conllu", CONLLU.replace("do\tdo\t", "do\t"), 4),
        ("read_conllu", CONLLU.replace("2-3", "two"), 3),
        ("read_conllu", "# only a comment\n", 1),
        ("read_tagged", "a\tA\nb\n", 2),
        ("read_tagged", "a\tA\n\nb\t\n", 3),
        ("read_tagged", "a\tA\tB\n", 1),
    ],
)
def test_malformed_files_are_errors_that_name_file_and_line(files, tmp_path, read, content, line):
    with pytest.raises(ValueError, match=rf"file\.txt, .*line {line}: "):
        getattr(files, read)(written(tmp_path, content))


# Public files

CONTENT = b"a b\nc\n"


@pytest.fixture
def public(files, monkeypatch, tmp_path):
    """A made-up public file called "made-up", published nowhere, and an empty cache."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    file = files.PublicFile("some/words.txt", "http://127.0.0.1:9/words.txt", digest)
    monkeypatch.setattr(files, "PUBLIC_FILES", {"made-up": file})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYROHMM_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "some").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("place", ["data", "cache/pyrohmm"])
@pytest.mark.parametrize("zipped", [False, True])
def test_files_at_hand_are_found_zipped_or_not(files, public, place, zipped):
    (public / place / "some").mkdir(parents=True, exist_ok=True)
    path = written(
        public / place / "some",
        gzip.compress(CONTENT) if zipped else CONTENT,
        "words.txt.gz" if zipped else "words.txt",
    )
    assert files.find("made-up") == path
    assert len(readers.read_sentences(path).data) == 2


@pytest.mark.parametrize("name", ["words.txt", "words.txt.gz"])
@pytest.mark.parametrize("content", [b"a b\nd\n", gzip.compress(b"a b\nd\n", mtime=0), CONTENT[:3]])
def test_tampered_files_are_refused(files, public, name, content):
    path = written(public / "data" / "some", content, name)
    with pytest.raises(ValueError, match=r"words\.txt.* is not what was published"):
        files.find("made-up")
    path.unlink()
    mended = written(public / "data" / "some", CONTENT, "words.txt")
    assert files.find("made-up") == mended


def test_what_is_nowhere_is_downloaded_with_its_checksum(files, public, monkeypatch):
    pooch, asked = pytest.importorskip("pooch"), []
    monkeypatch.setattr(pooch, "retrieve", lambda *arguments, **_: asked.append(arguments))
    path, file = files.find("made-up"), files.PUBLIC_FILES["made-up"]
    assert path == public / "cache" / "pyrohmm" / "some" / "words.txt"
    assert asked == [(file.url, f"sha256:{file.sha256}", "words.txt", path.parent)]


def test_piano_rolls_are_read(files, tmp_path):
    roll = np.eye(3, 88, dtype=np.uint8)
    notes = np.empty((1, 2), dtype=object)
    notes[0, 0], notes[0, 1] = roll, roll[:2]
    path = tmp_path / "rolls.mat"
    savemat(path, {f"{split}data": notes for split in ("train", "valid", "test")})
    data = files.read_piano_rolls(path)["valid"]
    assert data.lengths.tolist() == [3, 2]
    assert data.values[0].tolist() == roll.tolist()


# Counts of the real files

real = pytest.mark.skipif(
    "PYROHMM_DATA" not in os.environ, reason="set PYROHMM_DATA to the directory of public files"
)


@real
def test_the_penn_treebank_has_the_published_counts(files):
    for split, counts in {"valid": (3370, 73760), "test": (3761, 82430)}.items():
        data = readers.read_sentences(files.find(f"ptb-{split}")).data
        assert (len(data), data.num_observed) == counts


@real
def test_tagged_sets_have_the_published_counts(files):
    for drop, counts in ((("-NONE-",), (94084, 45, 11968)), ((), (100676, 46, 12408))):
        corpus = files.read_tagged(files.find("treebank-sample"), drop=drop)
        assert len(corpus.data) == 3914
        assert (corpus.data.num_observed, len(corpus.tags), len(corpus.vocabulary)) == counts
    nouns = corpus.data.labels.eq(corpus.tags.encode(["NN"])).sum()
    assert nouns == 13166


@pytest.mark.parametrize(("num_states", "num_symbols"), [(1, 1), (1, 3), (3, 1), (3, 3), (5, 8)])
def test_a_dirichlet_toy_is_stationary_and_shows_every_symbol(monkeypatch, num_states, num_symbols):
    monkeypatch.syspath_prepend(FIGURES)
    toys = importlib.import_module("common.dirichlet_toy")
    for seed in range(2):
        toy = toys.dirichlet_toy(
            num_states, num_symbols, generator=torch.Generator().manual_seed(seed)
        )
        assert toy.emission.shape == (num_states, num_symbols)
        torch.testing.assert_close(toy.transition.sum(-1), torch.ones(num_states))
        torch.testing.assert_close(toy.emission.sum(-1), torch.ones(num_states))
        torch.testing.assert_close(toy.initial @ toy.transition, toy.initial)
        for data in (toy.train, toy.test):
            assert data.values.shape == (10, 200)
            assert data.values.unique().tolist() == list(range(num_symbols))
            assert data.labels.max() < num_states
        assert num_symbols == 1 or not toy.train.values.equal(toy.test.values)
