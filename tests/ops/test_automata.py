"""Automata accept the sentences that a plain search through the words accepts."""

import itertools
import re

import pytest

from pyrohmm.ops.automata import (
    Automaton,
    ends_with,
    must_contain,
    must_not_contain,
    of_length,
    starts_with,
    template,
)

SENTENCES = [words for count in range(6) for words in itertools.product("abc", repeat=count)]

# Each with a search in " a b c ", and the least number of states (by hand).
CASES = {
    "phrase": (must_contain("a b"), lambda s: " a b " in s, 3),
    "phrase that overlaps itself": (must_contain("a a b"), lambda s: " a a b " in s, 4),
    "two words": (must_contain("a", "b"), lambda s: " a " in s and " b " in s, 4),
    "list": (must_contain(["a", "b"]), lambda s: " a b " in s, 3),
    "none": (must_not_contain("a", "b b"), lambda s: " a " not in s and " b b " not in s, 3),
    "template": (template("a", None, ..., "b"), lambda s: re.fullmatch(r" a \w (\w )*b ", s), 5),
    "exact template": (template("a b", None), lambda s: re.fullmatch(r" a b \w ", s), 5),
    "empty": (template(), lambda s: not s.split(), 2),
    "anything": (template(...), lambda s: True, 1),
    "nothing": (~template(...), lambda s: False, 1),
    "lengths": (of_length(2, 3), lambda s: 2 <= len(s.split()) <= 3, 5),
    "one length": (of_length(0), lambda s: not s.split(), 2),
    "prefix": (starts_with("a b"), lambda s: s.startswith(" a b "), 4),
    "suffix": (ends_with("a b"), lambda s: s.endswith(" a b "), 3),
    "either": (must_contain("a") | must_contain("b"), lambda s: " a " in s or " b " in s, 2),
    "not both": (
        ~(must_contain("a") & of_length(2)),
        lambda s: not (" a " in s and len(s.split()) == 2),
        5,
    ),
    "both": (must_contain("a b") & ends_with("c"), lambda s: re.search(" a b .*c $", s), 4),
    "parity": (
        Automaton([0, 1], [{"a": 1}, {"a": 0}], [0]) & must_not_contain("c"),
        lambda s: s.count("a") % 2 == 0 and "c" not in s,
        3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sentences_are_accepted_as_by_search(name):
    automaton, search, num_states = CASES[name]
    for words in SENTENCES:
        assert automaton.accepts(words) == bool(search(f" {' '.join(words)} ")), words
    assert automaton.num_states == num_states
    assert automaton.accepts("a b c") == automaton.accepts(["a", "b", "c"])


def test_states_that_are_the_same_and_those_out_of_reach_are_left_out():
    many = Automaton([1, 2, 1, 3], [{"a": 1}, {}, {"b": 2}, {}], [1, 2, 3])
    assert (many.num_states, many.classes) == (2, {})
    assert many.table.tolist() == [[1], [1]]
    banned = must_not_contain(*map(str, range(300)))
    assert banned.table.shape == (2, 2)
    assert set(banned.classes.values()) == {1}


def test_codes_stand_for_words():
    automaton = must_contain(3, [1, 2])
    assert automaton.accepts([0, 3, 1, 2])
    assert not automaton.accepts([3, 1, 0, 2])


def test_a_name_says_what_is_meant():
    both = must_contain("a b", 3) & ~(of_length(1, 2) & starts_with("a"))
    assert both.name == "must_contain('a b', 3) & ~(of_length(1, 2) & starts_with('a'))"
    assert repr(template("a", None, ...)) == "Automaton(template('a', None, ...); 4 states)"
    assert len(must_contain(*map(str, range(9)), "x" * 99).name) < 100


def test_a_phrase_in_a_list_has_as_many_words_as_it_says():
    assert not must_not_contain(["a b"]).accepts("x a b")
    assert must_contain(["a b", "c"]).accepts("a b c")


def test_constraints_are_not_joined_by_words():
    with pytest.raises(TypeError, match="join constraints by &"):
        _ = must_contain("a") and must_contain("b")
