"""Vocabularies, readers, downloads, and the data made here.

Counts of real files are checked where ``$PYROHMM_DATA`` holds them.
"""

import functools
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrohmm import datasets, metrics, readers
from pyrohmm.data.readers import Entry, corpus_of
from pyrohmm.data.vocabulary import Vocabulary

patient = settings(deadline=None, max_examples=50)  # the machine may be busy
symbol_lists = st.lists(st.text(max_size=3), min_size=1, max_size=20)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def written(tmp_path: Path, content: str | bytes, name: str = "file.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Vocabulary


@patient
@given(symbol_lists)
def test_decoding_undoes_encoding(symbols):
    vocabulary = Vocabulary.from_counts(symbols)
    codes = vocabulary.encode(symbols)
    assert codes.dtype == torch.long
    assert vocabulary.decode(codes) == vocabulary.decode(codes.tolist()) == symbols
    assert vocabulary.encode(vocabulary).tolist() == list(range(len(vocabulary)))


@patient
@given(symbol_lists, st.integers(1, 4), st.integers(1, 6))
def test_symbols_come_by_falling_count_then_alphabetically(symbols, min_count, max_size):
    vocabulary = Vocabulary.from_counts(symbols, min_count, max_size, unknown="other")
    listed = list(vocabulary)[1:]
    ranks = [(-symbols.count(symbol), symbol) for symbol in listed]
    assert vocabulary[0] == "other"
    assert len(vocabulary) <= max_size
    assert ranks == sorted(ranks)
    assert all(symbols.count(symbol) >= min_count for symbol in listed)
    if len(vocabulary) < max_size:  # nothing had to give way
        assert set(listed) == {s for s in symbols if symbols.count(s) >= min_count} - {"other"}


def test_unknown_symbols_are_an_error_unless_one_stands_for_them():
    with pytest.raises(ValueError, match="symbol 'c' is none of the 2 symbols"):
        Vocabulary("ab").encode("abc")
    assert Vocabulary("ab", unknown="b").encode("abc").tolist() == [0, 1, 1]
    assert "c" not in Vocabulary("ab", unknown="b")


def test_the_first_symbol_listed_stands_for_an_unknown_one():
    words = Vocabulary(["<b>", "<a>", "x"], unknown=lambda word: [f"<{word[0]}>", "<b>"])
    assert words.encode(["x", "apple", "boat", "cat"]).tolist() == [2, 1, 0, 0]
    with pytest.raises(ValueError, match="symbol 'cat' is none of the 1 symbols"):
        Vocabulary(["x"], unknown=lambda word: ["<c>"]).encode(["cat"])
    with pytest.raises(ValueError, match="max_size must be None where unknown is a function"):
        Vocabulary.from_counts(["x"], max_size=3, unknown=lambda word: ["<c>"])


@patient
@given(st.lists(st.text("aAsig9.-", min_size=1, max_size=5), max_size=80), st.integers(1, 4))
def test_every_symbol_of_a_training_text_occurs_and_kinds_of_rare_words_often(text, min_count):
    text = ["plain"] + [word for word in text for _ in range(3)]
    vocabulary = Vocabulary.from_counts(text, min_count, unknown=readers.word_classes)
    codes = vocabulary.encode(text).tolist()
    assert set(codes) == set(range(len(vocabulary)))
    for code, symbol in enumerate(vocabulary):
        if symbol.startswith("<unk-"):
            assert codes.count(code) >= readers.CLASS_COUNT
    assert all(
        vocabulary[code] == word for code, word in zip(codes, text) if text.count(word) >= min_count
    )


# Readers


def sentences_of(corpus: readers.Corpus) -> list[list[str]]:
    return [
        corpus.vocabulary.decode(values[:length])
        for values, length in zip(corpus.data.values, corpus.data.lengths.tolist(), strict=True)
    ]


def test_sentences_end_and_blank_lines_are_sentences(tmp_path):
    path = written(tmp_path, " a b \n\n b\u00e9 \n")
    corpus = readers.read_sentences(path)
    assert sentences_of(corpus) == [["a", "b", "<eos>"], ["<eos>"], ["b\u00e9", "<eos>"]]
    assert sentences_of(readers.read_sentences(path, eos=None)) == [["a", "b"], ["b\u00e9"]]


def test_gzipped_files_read_as_plain_ones(tmp_path):
    plain = written(tmp_path, "a b\r\nc\r\n")
    zipped = written(tmp_path, gzip.compress(plain.read_bytes()), "file.txt.gz")
    assert sentences_of(readers.read_sentences(zipped)) == [["a", "b", "<eos>"], ["c", "<eos>"]]
    assert sentences_of(readers.read_sentences(str(plain))) == sentences_of(
        readers.read_sentences(zipped)
    )


def test_a_test_set_is_coded_as_the_training_set(tmp_path):
    train = readers.read_sentences(written(tmp_path, "b b a\n"))
    path = written(tmp_path, "a b\na c\n")
    with pytest.raises(ValueError, match=r"file.txt, sequence starting at line 2: symbol 'c'"):
        readers.read_sentences(path, train.vocabulary)
    count = functools.partial(Vocabulary.from_counts, min_count=2, unknown="<unk>")
    corpus = readers.read_sentences(path, count)
    assert set(corpus.vocabulary) == {"<unk>", "a", "<eos>"}
    assert sentences_of(corpus)[1] == ["a", "<unk>", "<eos>"]


def test_characters_outside_the_alphabet_separate_words():
    corpus = readers.read_characters("It's 10\n\n o'Clock!", chunk=7)
    assert ["".join(piece) for piece in sentences_of(corpus)] == ["it s o ", "clock "]
    assert len(corpus.vocabulary) == 27
    digits = readers.read_characters("a-1", alphabet="]^-1 ")  # no character is special
    assert "".join(sentences_of(digits)[0]) == " -1"


@pytest.mark.parametrize(
    ("read", "content", "line"),
    [(readers.read_sentences, "", 1), (readers.read_sentences, b"a\nb\n\xff\n", 3)],
)
def test_malformed_files_are_errors_that_name_file_and_line(tmp_path, read, content, line):
    with pytest.raises(ValueError, match=rf"file\.txt, .*line {line}: "):
        read(written(tmp_path, content))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-12], lambda raw: b"not gzipped"])
def test_damaged_archives_are_errors_that_name_the_file(tmp_path, damage):
    raw = gzip.compress(b"some words\n" * 100)
    with pytest.raises(ValueError, match=r"file\.gz, line \d+: wanted UTF-8"):
        readers.read_sentences(written(tmp_path, damage(raw), "file.gz"))


# Data made here


def test_frequencies_at_the_casino_are_those_of_its_parameters():
    """Tolerances are four standard deviations of 100,000 rolls, dice lasting 7 times 1.85."""
    initial, transition, emission = datasets.casino_parameters()
    data = datasets.casino(200, 500, seeded())
    dice, rolls = data.labels, data.values
    assert dice.double().mean() == pytest.approx(initial[1].item(), abs=0.021)
    faces = rolls.flatten().bincount() / rolls.numel()
    torch.testing.assert_close(faces, (initial @ emission).to(faces), rtol=0, atol=0.01)
    for die in range(2):
        shown = rolls[dice == die].bincount() / (dice == die).sum()
        torch.testing.assert_close(shown, emission[die].to(shown), rtol=0, atol=0.012)
        changed = (dice[:, 1:] != die)[dice[:, :-1] == die].double().mean()
        assert changed == pytest.approx(transition[die, 1 - die].item(), abs=0.007)


def test_rows_of_the_diverse_toy_are_as_far_apart_as_in_the_paper():
    transition = np.array(datasets.DIVERSE_TRANSITION)
    diversity = metrics.diversity(torch.tensor(transition)).item()
    assert diversity == pytest.approx(0.531, abs=5e-4)  # as it is printed
    np.testing.assert_allclose(transition.sum(-1), 1)
    assert sum(datasets.DIVERSE_INITIAL) == pytest.approx(1)


GENERATED = [
    lambda generator: datasets.casino(3, 20, generator),
    lambda generator: datasets.diverse_toy(generator=generator),
]


@pytest.mark.parametrize("make", GENERATED)
def test_a_generator_determines_the_data_and_nothing_else_is_touched(make):
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second, third = make(seeded(1)), make(seeded(1)), make(seeded(2))
    assert torch.get_rng_state().equal(torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert first.values.equal(second.values)
    assert first.labels.equal(second.labels)
    assert not first.values.equal(third.values)


def test_english_words_are_sentences_with_rare_words_unknown():
    corpus = datasets.english_words(max_size=50)
    assert len(corpus.vocabulary) == 50
    sentences = sentences_of(corpus)
    assert all(len(s) > 1 and s[-1] == "<eos>" and "<eos>" not in s[:-1] for s in sentences)
    everything = datasets.english_words(max_size=None)
    assert len(everything.vocabulary) > 2000
    assert not everything.data.values.eq(0)[everything.data.observed].any()  # nothing is unknown
    for few, all_words in zip(sentences, sentences_of(everything), strict=True):
        expected = [w if w in corpus.vocabulary else "<unk>" for w in all_words]
        assert few == expected


def test_the_first_file_with_tags_makes_the_vocabularies():
    corpus = corpus_of("test", [Entry(1, ["a", "b", "a"], ["x", "y", "y"])], vocabulary=None)
    assert corpus.vocabulary.decode(corpus.data.values[0]) == ["a", "b", "a"]
    assert corpus.tags.decode(corpus.data.labels[0]) == ["x", "y", "y"]
