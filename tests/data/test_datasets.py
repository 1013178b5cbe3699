"""Vocabularies, readers, downloads, and the data made here.

Counts of real files are checked where ``$PYROHMM_DATA`` holds them.
"""

import copy
import functools
import gzip
import hashlib
import http.server
import os
import pickle
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import savemat

from pyrohmm import TabularHMM, categorical, cooccurrence, datasets, fit_em, readers
from pyrohmm.data import simulated
from pyrohmm.data.datasets import PublicFile
from pyrohmm.data.vocabulary import Vocabulary
from pyrohmm.ops.stationary import stationary

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
    assert vocabulary.decode(codes) == symbols
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


@patient
@given(symbol_lists, st.randoms())
def test_order_of_occurrence_does_not_matter(symbols, random):
    shuffled = random.sample(symbols, len(symbols))
    assert Vocabulary.from_counts(shuffled) == Vocabulary.from_counts(symbols)


def test_a_mapping_gives_the_counts():
    assert Vocabulary.from_counts({"b": 2, "a": 1}) == Vocabulary.from_counts("abb")


def test_unknown_symbols_are_an_error_unless_one_stands_for_them():
    with pytest.raises(ValueError, match="symbol 'c' is none of the 2 symbols"):
        Vocabulary("ab").encode("abc")
    assert Vocabulary("ab", unknown="b").encode("abc").tolist() == [0, 1, 1]
    assert "c" not in Vocabulary("ab", unknown="b")


@pytest.mark.parametrize(
    ("symbols", "unknown", "message"),
    [("", None, "empty"), ("aba", None, "'a' occurs"), ("ab", "c", "unknown must be one")],
)
def test_a_vocabulary_that_names_nothing_or_twice_is_refused(symbols, unknown, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(symbols, unknown)


@pytest.mark.parametrize("unknown", [3, ["a"], b"a"])
def test_what_stands_for_the_unknown_is_a_symbol_or_a_function(unknown):
    with pytest.raises(TypeError, match="unknown must be"):
        Vocabulary("ab", unknown=unknown)


def test_the_first_symbol_listed_stands_for_an_unknown_one():
    words = Vocabulary(["<b>", "<a>", "x"], unknown=lambda word: [f"<{word[0]}>", "<b>"])
    assert words.encode(["x", "apple", "boat", "cat"]).tolist() == [2, 1, 0, 0]
    with pytest.raises(ValueError, match="symbol 'cat' is none of the 1 symbols"):
        Vocabulary(["x"], unknown=lambda word: ["<c>"]).encode(["cat"])
    with pytest.raises(ValueError, match="max_size cannot be given if unknown is a function"):
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


@pytest.mark.parametrize(
    ("word", "classes"),
    [
        ("walked", ["<unk-ed>", "<unk>"]),
        ("Oslo", ["<unk-Aa>", "<unk>"]),
        ("NATO", ["<unk-AA>", "<unk-Aa>", "<unk>"]),
        ("B2B", ["<unk-9a>", "<unk-9>", "<unk>"]),
        ("3,000", ["<unk-9>", "<unk>"]),
        ("half-baked", ["<unk-a-b-ed>", "<unk-a-b>", "<unk>"]),
        (":-)", ["<unk-.>", "<unk>"]),
        ("fjord", ["<unk>"]),
    ],
)
def test_kinds_of_words_are_what_can_be_seen_of_them(word, classes):
    assert readers.word_classes(word) == classes


@pytest.mark.parametrize("codes", [[-1], [0, 2], [[0, 1]]])
def test_codes_that_name_no_symbol_are_refused(codes):
    with pytest.raises(ValueError, match="codes must"):
        Vocabulary("ab").decode(torch.tensor(codes))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
def test_copies_of_a_vocabulary_are_as_good(again):
    vocabulary = Vocabulary("abc", unknown="b")
    twin = again(vocabulary)
    assert twin == vocabulary
    assert twin.encode("cx").tolist() == [2, 1]


# Readers

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

FASTA = ">1abc_A mol:protein  CASINO\nACD\nef\n\n>2xyz_B mol:na\nGG\n"

TABLE = """\
id\tsplit\tcv_fold\tsequence\tdssp3\tmask\tordered
one\ttrain\t3\tACX\tH-E\t110\t111
two\tblind\t0\tA\tC\t1\t0
"""


def letter(number, symbol, following, word, position, fold=0, pixel="1"):
    fields = [number, symbol, following, word, position, fold, *[0] * 127, pixel]
    return "\t".join(map(str, fields)) + "\t\n"


OCR = (
    letter(1, "o", 2, 1, 1, fold=4)
    + letter(2, "k", -1, 1, 2, fold=4, pixel="0")
    + letter(3, "a", -1, 2, 1, fold=7)
)


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


def test_a_mark_of_the_encoding_is_no_part_of_the_first_word(tmp_path):
    path = written(tmp_path, "\ufeffcat sat\n\ufeffcat\n".encode(), "file.txt")
    assert readers.read_lines(path) == ["cat sat", "\ufeffcat"]


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


@patient
@given(st.text(min_size=1), st.integers(1, 9))
def test_pieces_of_text_join_to_the_text(text, chunk):
    corpus = readers.read_characters(text, chunk=chunk)
    joined = "".join("".join(piece) for piece in sentences_of(corpus))
    assert (
        joined.split() == "".join(c if c in readers.LETTERS else " " for c in text.lower()).split()
    )
    assert corpus.data.lengths[:-1].tolist() == [chunk] * (len(corpus.data) - 1)
    assert readers.read_characters(joined, chunk=chunk).data.values.equal(corpus.data.values)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "text is empty"),
        ("a", {"chunk": 0}, "chunk must be at least 1"),
        ("a", {"alphabet": "ab"}, "alphabet must"),
        ("a", {"alphabet": "AB "}, "alphabet must"),
    ],
)
def test_characters_need_text_and_an_alphabet_with_a_space(text, options, message):
    with pytest.raises(ValueError, match=message):
        readers.read_characters(text, **options)


def test_conllu_passes_over_ranges_and_empty_nodes(tmp_path):
    path = written(tmp_path, CONLLU)
    corpus = readers.read_conllu(path)
    assert sentences_of(corpus) == [["They", "do", "n't"], ["#"]]
    assert corpus.tags is not None
    assert corpus.tags.decode(corpus.data.labels[0]) == ["PRON", "AUX", "PART"]
    fine = readers.read_conllu(path, "xpos", vocabulary=corpus.vocabulary)
    assert fine.tags == ("#", "PRP", "VBP")
    assert fine.data.labels.tolist() == [[1, 2, -1], [0, -1, -1]]  # "_" is not a tag
    with pytest.raises(ValueError, match=r"line 1: symbol 'PRP'"):
        readers.read_conllu(path, "xpos", tags=corpus.tags)
    with pytest.raises(ValueError, match="column must be"):
        readers.read_conllu(path, "lemma")


def test_dropped_tags_take_their_words_and_empty_sentences_along(tmp_path):
    path = written(tmp_path, TAGGED)
    corpus = readers.read_tagged(path)
    assert sentences_of(corpus) == [["The", "die"], ["#"]]
    whole = readers.read_tagged(path, drop=())
    assert sentences_of(whole) == [["The", "die", "*-1"], ["*-2"], ["#"]]
    assert whole.tags[0] == "-NONE-"


def test_letters_make_words(tmp_path):
    corpus = readers.read_ocr_letters(written(tmp_path, OCR))
    assert corpus.data.lengths.tolist() == [2, 1]
    assert corpus.folds.tolist() == [4, 7]
    assert corpus.tags.decode(corpus.data.labels[0]) == ["o", "k"]
    assert corpus.data.values.dtype == torch.float32
    assert corpus.data.values[:, :, -1].tolist() == [[1, 0], [1, 0]]
    assert corpus.data.values[:, :, :-1].sum() == 0


def test_fasta_joins_lines_and_keeps_what_is_wanted(tmp_path):
    path = written(tmp_path, FASTA)
    corpus = readers.read_fasta(path)
    assert sentences_of(corpus) == [list("ACDEF"), list("GG")]
    assert corpus.names == ("1abc_A", "2xyz_B")
    proteins = readers.read_fasta(path, keep=lambda header: "mol:protein" in header)
    assert proteins.names == ("1abc_A",)
    assert "G" not in proteins.vocabulary


def test_unknown_bases_are_missing(tmp_path):
    path = written(tmp_path, ">chr1 a\nacgtNNac\n>chr2\nNN\n")
    corpus = readers.read_fasta(path)
    assert sorted(corpus.vocabulary) == ["A", "C", "G", "T"]
    assert corpus.data.observed.tolist() == [
        [True, True, True, True, False, False, True, True], [False] * 8
    ]  # fmt: skip
    known = corpus.data.values[corpus.data.observed]
    assert corpus.vocabulary.decode(known) == list("ACGTAC")
    fit_em(TabularHMM(2, categorical(4)), corpus.data, num_steps=2)
    everything = readers.read_fasta(path, missing="")
    assert "N" in everything.vocabulary
    assert everything.data.observed[0].all()
    coded = readers.read_fasta(written(tmp_path, ">a\nACGRN\n"), missing="NR")
    assert coded.data.observed.tolist() == [[True, True, True, False, False]]
    protein = readers.read_fasta(written(tmp_path, ">a\nACNK\n"))  # N is asparagine
    assert protein.data.observed.all()


def test_masked_residues_are_seen_but_have_no_label(tmp_path):
    corpus = readers.read_protein_table(written(tmp_path, TABLE))
    assert sentences_of(corpus) == [list("ACX"), list("A")]
    assert corpus.data.observed.tolist() == [[True] * 3, [True, False, False]]
    assert corpus.data.labels.tolist() == [[0, 2, -1], [-1, -1, -1]]
    assert corpus.tags == ("H", "E", "C")
    assert corpus.splits == ("train", "blind")
    assert corpus.folds.tolist() == [3, 0]
    few = "id\tsequence\tdssp3\na\tZ\tH\n"
    other = readers.read_protein_table(written(tmp_path, few), corpus.vocabulary)
    assert sentences_of(other) == [["X"]]
    assert (other.splits, other.folds) == (None, None)


def test_tags_may_be_what_is_observed(tmp_path):
    corpus = readers.read_conllu(written(tmp_path, CONLLU), "xpos")
    tags = readers.tags_as_values(corpus)
    assert tags.vocabulary == corpus.tags
    assert tags.data.observed.tolist() == [[True, True, False], [True, False, False]]
    assert tags.data.values[tags.data.observed].equal(corpus.data.labels[tags.data.observed])
    assert tags.data.lengths.equal(corpus.data.lengths)
    assert (tags.data.labels, tags.tags) == (None, None)
    with pytest.raises(ValueError, match="corpus has no tags"):
        readers.tags_as_values(tags)


def corpus_with_gaps(symbols: str, kept: list[bool]) -> readers.Corpus:
    """One sequence of characters, some of them missing, in an alphabetical vocabulary."""
    vocabulary = Vocabulary("abcde")
    values, observed = vocabulary.encode(symbols).unsqueeze(0), torch.tensor([kept])
    data = readers.Sequences(values, torch.tensor([len(symbols)]), observed, total=9)
    return readers.Corpus(data, vocabulary)


@patient
@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_as_many_rare_symbols_are_merged_as_stay_below_the_share(steps, share):
    symbols, kept = "".join(symbol for symbol, _ in steps), [here for _, here in steps]
    seen = [symbol for symbol, here in steps if here]
    corpus = corpus_with_gaps(symbols, kept)
    merged = readers.merge_rare(corpus, share)
    if merged is corpus:  # then the rarest alone is not below the share
        assert min(seen.count(symbol) for symbol in "abcde") >= share * len(seen)
        return
    names = list(merged.vocabulary)
    assert names[0] == merged.vocabulary.unknown == "<rare>"
    ranks = [(-seen.count(symbol), symbol) for symbol in names[1:]]
    gone = set("abcde") - set(names)
    assert gone
    assert ranks == sorted(ranks)
    assert all(max(ranks) < (-seen.count(symbol), symbol) for symbol in gone)
    mass = sum(seen.count(symbol) for symbol in gone)
    assert mass < share * len(seen) <= mass + seen.count(names[-1])  # one more would be too many
    expected = [symbol if symbol in names else "<rare>" for symbol in seen]
    assert merged.vocabulary.decode(merged.data.values[merged.data.observed]) == expected
    assert merged.data.observed.equal(corpus.data.observed)
    assert merged.data.total == 9


def test_labels_stay_and_padding_may_hold_anything_when_symbols_are_merged():
    values = torch.tensor([[0, 0, 1], [0, 0, 77]])
    data = readers.Sequences(values, torch.tensor([3, 2]), labels=torch.tensor([[1, 0, 1]] * 2))
    corpus = readers.Corpus(data, Vocabulary("ab"), Vocabulary("xy"))
    merged = readers.merge_rare(corpus, 0.25, name="other")
    assert merged.vocabulary == ("other", "a")
    assert merged.data.values[merged.data.observed].tolist() == [1, 1, 0, 1, 1]
    assert merged.data.labels.equal(data.labels)
    assert merged.tags == corpus.tags


def test_a_merge_that_cannot_be_is_refused():
    corpus = readers.read_characters("a rose")
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="share must lie between 0 and 1"):
            readers.merge_rare(corpus, share)
    with pytest.raises(ValueError, match="'e' occurs more than once"):
        readers.merge_rare(corpus, 0.1, name="e")


@pytest.mark.parametrize(
    ("read", "content", "line"),
    [
        (readers.read_sentences, "", 1),
        (readers.read_sentences, b"a\nb\n\xff\n", 3),
        (readers.read_conllu, CONLLU.replace("do\tdo\t", "do\t"), 4),
        (readers.read_conllu, CONLLU.replace("2-3", "two"), 3),
        (readers.read_conllu, "# only a comment\n", 1),
        (readers.read_tagged, "a\tA\nb\n", 2),
        (readers.read_tagged, "a\tA\n\nb\t\n", 3),
        (readers.read_tagged, "a\tA\tB\n", 1),
        (readers.read_ocr_letters, "", 1),
        (readers.read_ocr_letters, OCR + letter(4, "A", -1, 3, 1), 4),
        (readers.read_ocr_letters, OCR + letter(4, "a", -1, 3, 1, pixel="2"), 4),
        (readers.read_ocr_letters, OCR + letter(4, "a", -1, 3, 1, pixel=""), 4),
        (readers.read_ocr_letters, OCR + letter(4, "a", -1, "x", 1), 4),
        (readers.read_ocr_letters, OCR + letter(4, "a", -1, 3, 2), 4),
        (readers.read_ocr_letters, letter(1, "a", -1, 1, 1, "9" * 30), 1),
        (readers.read_ocr_letters, OCR + letter(4, "a", 5, 3, 1), 5),
        (readers.read_ocr_letters, letter(1, "a", 3, 1, 1) + letter(2, "b", -1, 1, 2), 2),
        (readers.read_ocr_letters, letter(1, "a", 2, 1, 1) + letter(2, "b", -1, 1, 2, 1), 2),
        (readers.read_fasta, "ACD\n", 1),
        (readers.read_fasta, ">a\nAC-D\n", 2),
        (readers.read_fasta, ">a\nA\n>b\n", 3),
        (readers.read_protein_table, "", 1),
        (readers.read_protein_table, TABLE.replace("dssp3", "dssp8"), 1),
        (readers.read_protein_table, TABLE.replace("H-E", "H-"), 2),
        (readers.read_protein_table, TABLE.replace("H-E", "Q-E"), 2),
        (readers.read_protein_table, TABLE.replace("two\t", ""), 3),
        (readers.read_protein_table, TABLE.replace("110", "11?"), 2),
        (readers.read_protein_table, TABLE.replace("blind\t0", "blind\tnone"), 3),
        (readers.read_protein_table, TABLE.replace("blind\t0", "blind\t\u00b2"), 3),
        (readers.read_protein_table, TABLE.replace("blind\t0", "blind\t" + "9" * 30), 3),
        (readers.read_protein_table, "id\tsequence\tdssp3\none\tA\tH\ntwo\t\t\n", 3),
    ],
)
def test_malformed_files_are_errors_that_name_file_and_line(tmp_path, read, content, line):
    with pytest.raises(ValueError, match=rf"file\.txt, .*line {line}: "):
        read(written(tmp_path, content))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-12], lambda raw: b"not gzipped"])
def test_damaged_archives_are_errors_that_name_the_file(tmp_path, damage):
    raw = gzip.compress(b"some words\n" * 100)
    with pytest.raises(ValueError, match=r"file\.gz, line \d+: wanted UTF-8"):
        readers.read_sentences(written(tmp_path, damage(raw), "file.gz"))


# Streams


@pytest.mark.parametrize("part_size", [1, 2, 100])
@pytest.mark.parametrize("eos", ["<eos>", None])
def test_a_stream_yields_what_reading_at_once_does(part_size, eos, tmp_path):
    path = written(tmp_path, "a b a\n\nb\nc a\n")
    whole = readers.read_sentences(path, eos=eos)
    stream = readers.SentenceStream(path, eos=eos, part_size=part_size)
    assert stream.vocabulary == whole.vocabulary
    for _ in range(2):  # as often as one likes
        parts = list(stream)
        assert all(len(part) == part_size for part in parts[:-1])
        rows = [row[:n].tolist() for p in parts for row, n in zip(p.values, p.lengths)]
        wanted = zip(whole.data.values, whole.data.lengths)
        assert rows == [row[:length].tolist() for row, length in wanted]


def test_pairs_of_a_stream_are_those_of_the_whole(tmp_path):
    words = np.random.default_rng(0).choice(list("abcde"), (40, 7))
    path = written(tmp_path, "\n".join(map(" ".join, words)))
    whole = readers.read_sentences(path)
    stream = readers.SentenceStream(path, whole.vocabulary, part_size=7)
    for lag in (1, 3):
        found, wanted = (
            cooccurrence.count_pairs(each, len(whole.vocabulary), lag)
            for each in (stream, whole.data)
        )
        assert torch.equal(found.dense(), wanted.dense())
        assert found.total == wanted.total


def test_a_stream_names_what_it_cannot_read(tmp_path):
    with pytest.raises(ValueError, match="at least one sentence"):
        readers.SentenceStream(written(tmp_path, "\n"), eos=None)
    stream = readers.SentenceStream(written(tmp_path, "a\nb\n"), Vocabulary(["a", "<eos>"]))
    with pytest.raises(ValueError, match="line 2"):
        list(stream)


# Public files

CONTENT = b"a b\nc\n"


@pytest.fixture
def public(monkeypatch, tmp_path):
    """A made-up public file called "made-up", published nowhere, and an empty cache."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    file = PublicFile("some/words.txt", "http://127.0.0.1:9/words.txt", digest)
    monkeypatch.setattr(datasets, "PUBLIC_FILES", {"made-up": file})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYROHMM_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "some").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def served(public, monkeypatch):
    """The same, published by a server on this machine: set its ``content``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.content)))
            self.end_headers()
            self.wfile.write(server.content)
            server.requests += 1

        def log_message(self, *args):
            pass

    pytest.importorskip("pooch")
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.requests, server.status = CONTENT, 0, 200
    url = f"http://127.0.0.1:{server.server_port}/words.txt"
    file = datasets.PUBLIC_FILES["made-up"]._replace(url=url)
    monkeypatch.setattr(datasets, "PUBLIC_FILES", {"made-up": file})
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("place", ["data", "cache/pyrohmm"])
@pytest.mark.parametrize("zipped", [False, True])
def test_files_at_hand_are_found_zipped_or_not(public, place, zipped):
    (public / place / "some").mkdir(parents=True, exist_ok=True)
    path = written(
        public / place / "some",
        gzip.compress(CONTENT) if zipped else CONTENT,
        "words.txt.gz" if zipped else "words.txt",
    )
    assert datasets.find("made-up") == path
    assert len(readers.read_sentences(path).data) == 2


@pytest.mark.parametrize("name", ["words.txt", "words.txt.gz"])
@pytest.mark.parametrize(
    "content", [b"a b\nd\n", gzip.compress(b"a b\nd\n", mtime=0), b"", CONTENT[:3]]
)
def test_tampered_files_are_refused(public, name, content):
    path = written(public / "data" / "some", content, name)
    with pytest.raises(ValueError, match=r"words\.txt.* is not what was published"):
        datasets.find("made-up")
    path.unlink()
    mended = written(public / "data" / "some", CONTENT, "words.txt")
    assert datasets.find("made-up") == mended


def test_a_checksum_is_computed_once(public, monkeypatch):
    written(public / "data" / "some", CONTENT, "words.txt")
    datasets.find("made-up")
    monkeypatch.setattr(hashlib, "file_digest", None)
    datasets.find("made-up")


def test_what_is_nowhere_is_downloaded_once(served, public):
    path = datasets.find("made-up")
    assert path == public / "cache" / "pyrohmm" / "some" / "words.txt"
    assert path.read_bytes() == CONTENT
    assert datasets.find("made-up") == path
    assert served.requests == 1


def test_a_download_with_another_checksum_leaves_nothing_behind(served, public):
    served.content = CONTENT + b"!"
    with pytest.raises(ValueError, match=r"(?i)hash of downloaded file") as raised:
        datasets.find("made-up")
    assert "$PYROHMM_DATA" in raised.value.__notes__[0]
    assert not [path for path in (public / "cache").rglob("*") if path.is_file()]
    served.content = CONTENT
    assert datasets.find("made-up").read_bytes() == CONTENT


@pytest.mark.parametrize("fault", ["refused", "missing"])
def test_what_cannot_be_downloaded_is_a_file_that_is_not_there(served, public, monkeypatch, fault):
    """Whatever errors the library that fetches it has for that."""
    file = datasets.PUBLIC_FILES["made-up"]
    if fault == "refused":
        file = file._replace(url="http://127.0.0.1:9/words.txt")
    monkeypatch.setitem(datasets.PUBLIC_FILES, "made-up", file)
    served.status = 404
    with pytest.raises(FileNotFoundError, match="made-up cannot be downloaded"):
        datasets.find("made-up")


@pytest.mark.parametrize("name", [None, ["ptb-train"], 3])
def test_a_name_of_a_file_is_a_string(name):
    with pytest.raises(ValueError, match="name must be one of"):
        datasets.find(name)


def test_without_pooch_the_error_names_the_extra(public, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pip install 'pyrohmm\[data\]'"):
        datasets.find("made-up")


@pytest.mark.parametrize("name", [n for n, f in datasets.PUBLIC_FILES.items() if f.url is None])
def test_derived_files_say_how_they_were_derived(name):
    file = datasets.PUBLIC_FILES[name]
    with pytest.raises(FileNotFoundError) as caught:
        datasets.download(name)
    for fact in (file.path, file.sha256, file.derived, "http"):
        assert fact in str(caught.value)


@pytest.mark.parametrize("function", [datasets.find, datasets.download])
def test_names_that_are_not_known_are_answered_with_those_that_are(function):
    with pytest.raises(ValueError, match=r"name must be one of ptb-train, .*; got 'ptb'"):
        function("ptb")


def test_checksums_and_paths_are_well_formed_and_distinct():
    files = datasets.PUBLIC_FILES.values()
    assert all(len(bytes.fromhex(file.sha256)) == 32 for file in files)
    assert len({file.sha256 for file in files}) == len({file.path for file in files}) == len(files)


def test_piano_rolls_are_read(tmp_path):
    roll = np.eye(3, 88, dtype=np.uint8)
    notes = np.empty((1, 2), dtype=object)
    notes[0, 0], notes[0, 1] = roll, roll[:2]
    path = tmp_path / "rolls.mat"
    savemat(path, {f"{split}data": notes for split in ("train", "valid", "test")})
    data = readers.read_piano_rolls(path)["valid"]
    assert data.lengths.tolist() == [3, 2]
    assert data.values[0].tolist() == roll.tolist()
    notes[0, 0] = 2 * roll
    savemat(path, {f"{split}data": notes for split in ("train", "valid", "test")})
    with pytest.raises(ValueError, match="matrices of zeros and ones, steps by keys; got other"):
        readers.read_piano_rolls(path)
    for content in ({"traindata": notes}, None):
        path.write_bytes(b"no such thing" * 20) if content is None else savemat(path, content)
        with pytest.raises(ValueError, match=r"rolls.mat must be a MATLAB file of traindata"):
            readers.read_piano_rolls(path)


# Counts of the real files

real = pytest.mark.skipif(
    "PYROHMM_DATA" not in os.environ, reason="set PYROHMM_DATA to the directory of public files"
)


@real
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ptb", {"train": (42068, 929589), "valid": (3370, 73760), "test": (3761, 82430)}),
        ("wikitext2", {"valid": (3760, 217646), "test": (4358, 245569)}),
    ],
)
def test_language_model_sets_have_the_published_counts(name, counts):
    vocabulary = None
    for split, (num_sequences, num_tokens) in counts.items():
        path = datasets.find(f"{name}-{split}")
        corpus = readers.read_sentences(path, vocabulary if name == "ptb" else None)
        vocabulary = corpus.vocabulary  # valid and test of the Penn Treebank add no word to it
        assert (len(corpus.data), corpus.data.num_observed) == (num_sequences, num_tokens)
        assert name != "ptb" or len(vocabulary) == 10000


@real
def test_wikitext2_has_the_published_counts():
    corpus = readers.read_sentences(datasets.find("wikitext2-train"))
    assert (len(corpus.data), corpus.data.num_observed) == (36718, 2088628)
    assert len(corpus.vocabulary) == 33278


@real
def test_handwriting_has_the_published_counts():
    corpus = readers.read_ocr_letters(datasets.find("ocr-letters"))
    folds = [626, 704, 684, 698, 693, 651, 739, 717, 690, 675]
    letters = [4617, 5375, 5110, 5353, 5270, 5001, 5583, 5370, 5331, 5142]
    assert corpus.folds.bincount().tolist() == folds
    assert corpus.folds.bincount(corpus.data.lengths.double()).tolist() == letters
    assert (corpus.data.lengths.min(), corpus.data.lengths.max()) == (3, 14)
    words = {tuple(row) for row in corpus.data.labels.tolist()}
    assert (corpus.data.num_observed, len(words)) == (52152, 55)
    assert corpus.data.values[corpus.data.observed].unique().tolist() == [0, 1]


@real
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("jsb-chorales", [(229, 13807, 53824), (76, 4602, 17811), (77, 4725, 18367)]),
        ("piano-midi", [(87, 75911, 231089), (12, 8540, 27623), (25, 19036, 56067)]),
    ],
)
def test_music_has_the_published_counts(name, counts):
    splits = readers.read_piano_rolls(datasets.find(name))
    found = [
        (len(data), data.num_observed, int(data.values[data.observed].sum()))
        for data in splits.values()
    ]
    assert (list(splits), found) == (["train", "valid", "test"], counts)
    assert splits["train"].values.shape[-1] == 88


@real
def test_tagged_sets_have_the_published_counts():
    for drop, counts in ((("-NONE-",), (94084, 45, 11968)), ((), (100676, 46, 12408))):
        corpus = readers.read_tagged(datasets.find("treebank-sample"), drop=drop)
        assert len(corpus.data) == 3914
        assert (corpus.data.num_observed, len(corpus.tags), len(corpus.vocabulary)) == counts
    nouns = corpus.data.labels.eq(corpus.tags.encode(["NN"])).sum()
    assert nouns == 13166


@real
@pytest.mark.parametrize(
    ("split", "num_sequences", "num_words", "num_tags"),
    [("train", 12544, 204577, 49), ("dev", 2001, 25147, 49), ("test", 2077, 25094, 48)],
)
def test_english_web_treebank_has_the_published_counts(split, num_sequences, num_words, num_tags):
    path = datasets.find(f"ud-ewt-{split}")
    corpus = readers.read_conllu(path, "xpos")
    assert (len(corpus.data), corpus.data.num_observed) == (num_sequences, num_words)
    assert len(corpus.tags) == num_tags
    if split == "train":
        assert len(corpus.vocabulary) == 19674
    else:
        assert len(readers.read_conllu(path).tags) == 17


@real
def test_rare_tags_merge_to_as_many_symbols_as_in_the_code_of_the_densehmm():
    """Its authors cut sentences of the Penn sample at 45 and go from 46 tags to 20 symbols."""
    path = datasets.find("treebank-sample")
    tags = readers.tags_as_values(readers.read_tagged(path, drop=()))
    cut = tags._replace(data=tags.data.truncate(45))
    assert len(tags.vocabulary) == 46
    assert len(readers.merge_rare(cut, 0.1).vocabulary) == 20


@real
def test_proteins_have_the_published_counts():
    chains = readers.read_protein_table(datasets.find("jpred4"))
    assert chains.folds.bincount().tolist() == [149, 193, 193, 193, 193, 193, 193, 190]
    assert (chains.splits.count("train"), chains.splits.count("blind")) == (1348, 149)
    assert (chains.data.num_observed, len(chains.vocabulary)) == (241155, 21)
    structure = chains.data.labels[chains.data.observed].bincount()
    assert dict(zip(chains.tags, structure.tolist(), strict=True)) == {
        "H": 86023,
        "E": 53797,
        "C": 101335,
    }
    assert chains.data.values.eq(chains.vocabulary.encode("X"))[chains.data.observed].sum() == 3

    others = readers.read_protein_table(datasets.find("cb513"), chains.vocabulary)
    assert (len(others.data), others.data.num_observed) == (511, 144011)
    assert others.data.labels.ge(0).sum() == 83427  # of the mask's 83,991, those that are ordered


# Data made here


def test_the_casino_is_stationary_from_its_first_roll():
    initial, transition, emission = datasets.casino_parameters()
    torch.testing.assert_close(initial @ transition, initial)
    torch.testing.assert_close(emission.sum(-1), torch.ones(2))


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


def bhattacharyya(rows: np.ndarray) -> float:
    """Mean over pairs of rows of -log sum sqrt(p q), by definition."""
    distances = [-np.log(np.sqrt(p * q).sum()) for i, p in enumerate(rows) for q in rows[:i]]
    return float(np.mean(distances))


def test_rows_of_the_diverse_toy_are_as_far_apart_as_in_the_paper():
    transition = np.array(datasets.DIVERSE_TRANSITION)
    assert bhattacharyya(transition) == pytest.approx(0.531, abs=5e-4)  # as it is printed
    np.testing.assert_allclose(transition.sum(-1), 1)
    assert sum(datasets.DIVERSE_INITIAL) == pytest.approx(1)


def test_the_diverse_toy_has_the_moments_of_its_parameters():
    data = datasets.diverse_toy(3000, deviation=0.5, generator=seeded())
    assert data.values.shape == (3000, 6)
    noise = data.values - data.labels - 1
    assert noise.mean() == pytest.approx(0, abs=4 * 0.5 / 18000**0.5)
    assert noise.std() == pytest.approx(0.5, abs=4 * 0.5 / 36000**0.5)
    first = data.labels[:, 0].bincount(minlength=5) / 3000
    torch.testing.assert_close(first, first.new_tensor(datasets.DIVERSE_INITIAL), rtol=0, atol=0.04)
    assert datasets.diverse_toy(generator=seeded()).values.shape == (300, 6)


def test_states_of_the_diverse_toy_are_about_equally_frequent():
    marginal, expected = np.array(datasets.DIVERSE_INITIAL), np.zeros(5)
    for _ in range(6):
        expected += marginal / 6
        marginal = marginal @ np.array(datasets.DIVERSE_TRANSITION)
    np.testing.assert_allclose(expected, 0.2, atol=0.0125)


@pytest.mark.parametrize(("num_states", "num_symbols"), [(1, 1), (1, 3), (3, 1), (3, 3), (5, 8)])
def test_a_dirichlet_toy_is_stationary_and_shows_every_symbol(num_states, num_symbols):
    for seed in range(5):
        toy = datasets.dirichlet_toy(num_states, num_symbols, generator=seeded(seed))
        assert toy.emission.shape == (num_states, num_symbols)
        torch.testing.assert_close(toy.transition.sum(-1), torch.ones(num_states))
        torch.testing.assert_close(toy.emission.sum(-1), torch.ones(num_states))
        torch.testing.assert_close(toy.initial @ toy.transition, toy.initial)
        for data in (toy.train, toy.test):
            assert data.values.shape == (10, 200)
            assert data.values.unique().tolist() == list(range(num_symbols))
            assert data.labels.max() < num_states
        assert num_symbols == 1 or not toy.train.values.equal(toy.test.values)


def test_samples_that_miss_a_symbol_are_rejected(monkeypatch):
    seen = []
    sample = simulated._sample
    monkeypatch.setattr(simulated, "_sample", lambda *a: seen.append(sample(*a)) or seen[-1])
    toy = datasets.dirichlet_toy(3, 3, num_sequences=2, num_steps=5, generator=seeded())
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    full = [all(len(data.values.unique()) == 3 for data in pair) for pair in pairs]
    assert len(full) > 1
    assert full == [False] * (len(full) - 1) + [True]
    assert (toy.train, toy.test) == pairs[-1]


def test_a_dirichlet_toy_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="in 100 draws of 1 sequences of 2 steps"):
        datasets.dirichlet_toy(2, 5, num_sequences=1, num_steps=2, generator=seeded())
    for sizes in ((0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, float("nan"))):
        with pytest.raises(ValueError, match="must be positive"):
            datasets.dirichlet_toy(*sizes)
    with pytest.raises(ValueError, match="num_sequences and num_steps must be"):
        datasets.casino(1, 0)


def test_states_hardly_ever_left_do_not_spoil_the_stationary_distribution():
    """By detailed balance it is (3, 1) / 4, however slow; 1 - A would be mostly rounding."""
    slow = torch.tensor([[1 - 1e-15, 1e-15], [3e-15, 1 - 3e-15]], dtype=torch.float64)
    expected = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(stationary(slow.log()), expected)
    # a fast state beside them: by detailed balance with rates 1/2 and 1e-15
    mixed = torch.tensor([[0.5, 0.5], [1e-15, 1 - 1e-15]], dtype=torch.float64)
    expected = torch.tensor([2e-15, 1.0], dtype=torch.float64)
    torch.testing.assert_close(stationary(mixed.log()), expected, rtol=1e-12, atol=0)


GENERATED = [
    lambda generator: datasets.casino(3, 20, generator),
    lambda generator: datasets.diverse_toy(generator=generator),
    lambda generator: datasets.dirichlet_toy(3, 3, generator=generator).train,
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


@pytest.mark.parametrize("make", GENERATED)
def test_without_a_generator_the_global_one_determines_the_data(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        first = make(None)
        second = make(None)
        torch.manual_seed(3)
        assert make(None).values.equal(first.values)
        assert not second.values.equal(first.values)


def test_english_is_prose():
    text = datasets.english_text()
    assert 200_000 < len(text) < 1_000_000
    for mark in (">>>", "::=", '"', "*", "`", "====", "\n\n"):
        assert mark not in text
    assert all(line[0].isupper() and line[-1] in ".:!?" for line in text.split("\n"))


def test_english_letters_are_letters_and_single_spaces():
    corpus = datasets.english_letters(2050, chunk=100)
    text = "".join("".join(piece) for piece in sentences_of(corpus))
    assert corpus.data.lengths.tolist() == [100] * 20 + [50]
    assert set(text) <= set(corpus.vocabulary) == set(readers.LETTERS + " ")
    assert "  " not in text
    whole = datasets.english_letters().data
    assert whole.values[:20].equal(corpus.data.values[:20])
    frequencies = whole.values[whole.observed].bincount(minlength=27)
    assert readers.LETTERS[int(frequencies[:26].argmax())] == "e"
    for number in (0, whole.num_observed + 1):
        with pytest.raises(ValueError, match=f"between 1 and {whole.num_observed}; got {number}"):
            datasets.english_letters(number)


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
