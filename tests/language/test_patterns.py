"""Regular expressions over tokens, against ``re`` on the texts of random tokens."""

import itertools
import random
import re

import pytest
import torch
from pyro.distributions import Categorical

from pyrohmm import HMM, automata
from pyrohmm.language import ConstraintProcessor, matching, over_tokens

TOKENS = ["a", "b", "ab", "1", "2", "12", " ", " a", ":", "é", "ba1", "\n", "_", "Ω", None]
PATTERNS = [
    "", "(a|b)*1{2,3}", r"\d+ ?[ab]{0,2}", "[^a]b*", ".*1", "a.b|é+", r"(?:ab)?\w\W", "[é1]a?",
    r"\s*a+?", r"\D\S", r"[^\W]+", r"[\D1]", "(a|ab)(b|)", "(a*)*b", "[a-b:]{3}", "[^:]?Ω",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_accepts_what_re_matches(pattern):
    """However tokens divide the text, and characters of several bytes included."""
    found, choose = matching(pattern, TOKENS), random.Random(pattern)
    accepted = 0
    for _ in range(1500):
        codes = choose.choices(range(len(TOKENS) - 1), k=choose.randrange(6))
        text = "".join(TOKENS[code] for code in codes)
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert found.accepts(codes) == expected, (pattern, text)
        accepted += expected
    assert 0 < accepted < 1500
    assert not found.accepts([len(TOKENS) - 1])  # the special one


def test_classes_are_those_of_re():
    """Of random parts, negated or not; those that exclude a wide character in part are refused."""
    choose, parts = random.Random(0), [*"aZ_5 é:Ω€😀", "a-f", "0-9", *r"\w \W \d \D \s \S".split()]
    characters = [*map(chr, range(1, 128)), *"éèΩω€😀\u2003٣\U0010ffff"]
    codes, refused = range(len(characters)), []
    classes = [r"[^é\W]", r"[^\Wé]", r"[^éa\W]", r"[é\W]", "[^é]", "[^aé]", "[\U0010ffffa]"]
    classes += [
        f"[{choose.choice(['', '^'])}{''.join(choose.sample(parts, choose.randint(1, 4)))}]"
        for _ in range(80)
    ]
    for pattern in classes:
        expected = [re.fullmatch(pattern, each, re.ASCII) is not None for each in characters]
        try:
            found = matching(pattern, characters)
        except ValueError as error:
            refused.append(str(error))
            wide = {each for each, e in zip(characters, expected) if e and each > "\x7f"}
            assert wide, pattern
            assert {*pattern} - {*map(chr, range(128))} - wide, pattern
        else:
            assert [found.accepts([code]) for code in codes] == expected, pattern
    assert 2 < len(refused) < 25
    assert all("must exclude ASCII characters only" in each for each in refused)


def test_every_text_of_a_processor_matches():
    """Together with a constraint on words, whatever the model would say."""
    hmm = HMM(
        torch.zeros(1), torch.zeros(1, 1), Categorical(torch.ones(1, len(TOKENS))), torch.tensor(1)
    )
    wanted = matching(r"[ab ]+: \d{2,4}", TOKENS) & over_tokens(automata.must_contain("ab"), TOKENS)
    end = len(TOKENS) - 1
    processor = ConstraintProcessor(hmm, wanted, TOKENS, max_tokens=9, end=end)
    generator, ids = torch.Generator().manual_seed(0), torch.zeros(40, 1, dtype=torch.long)
    for _ in range(9):
        scores = processor(ids, torch.zeros(len(ids), len(TOKENS)))
        ids = torch.cat([ids, torch.multinomial(scores.softmax(-1), 1, generator=generator)], 1)
    for row in ids[:, 1:].tolist():
        text = "".join(TOKENS[code] for code in itertools.takewhile(end.__ne__, row))
        assert re.fullmatch(r"[ab ]+: \d{2,4}", text), text
        assert "ab" in re.findall(r"\w+", text)


@pytest.mark.parametrize(
    "pattern", ["^a", r"(a)\1", "a(?=b)", "[à-é]", "[^é]", "a++", "(?i:a)", "(?i)a", "(?s)."]
)
def test_what_cannot_be_an_automaton_is_refused(pattern):
    with pytest.raises(ValueError, match="pattern must"):
        matching(pattern, TOKENS)
