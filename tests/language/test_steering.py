"""Steered sentences against all sentences of a small model, one by one."""

import itertools
import math

import oracle
import pyro
import pytest
import torch

from pyrohmm import LanguageModel, blocks
from pyrohmm.data.vocabulary import Vocabulary
from pyrohmm.ops.automata import (
    Automaton,
    ends_with,
    must_contain,
    must_not_contain,
    of_length,
    starts_with,
    template,
)

WORDS = ["<eos>", "a", "b", "c", "d", "<unk>"]
LONGEST = 4


def built(clusters=(0, 1, 1, 2, 2, 1), sizes=(2, 3, 2), **options):
    """A model of few words whose probabilities differ much."""
    pyro.set_rng_seed(0)
    each = blocks.from_clusters(torch.tensor(clusters), torch.tensor(sizes))
    model = LanguageModel(Vocabulary(WORDS, "<unk>"), each, 8, dropout=0.0, **options)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def model():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = built()
    torch.set_default_dtype(default)
    return made


@pytest.fixture(scope="module")
def every(model):
    """All sentences of at most four words, with their log-probabilities."""
    lines = [
        " ".join(words)
        for count in range(LONGEST + 1)
        for words in itertools.product(WORDS[1:], repeat=count)
    ]
    return dict(zip(lines, model.score(lines).tolist()))


def log_total(logs):
    return torch.tensor(list(logs), dtype=torch.float64).logsumexp(0).item()


CONSTRAINTS = [
    template(...),
    must_contain("a"),
    must_contain("a", "c"),
    must_contain("a b") & must_not_contain("d"),
    must_not_contain("a", "b", "c"),
    of_length(2),
    of_length(1, 3) & ~must_contain("d d"),
    starts_with("b c"),
    ends_with("d"),
    template("a", None, "c"),
    template("a", ..., "b"),
    must_contain("c") | must_contain("<unk>"),
    must_contain(2, [3]),
    Automaton([0, 1], [{"a": 1}, {"a": 0}], [0], "an even number of a"),
    # every word has a class of its own, and none is left for the others
    must_contain("a", "b") & template(..., "c") & must_not_contain("d <unk>"),
]


def holds(constraint, line):
    """Whether a sentence satisfies a constraint that may name words by code."""
    words = line.split()
    codes = [WORDS.index(word) for word in words]
    return constraint.accepts(codes if 2 in constraint.classes else words)


PROMPTS = ["", "a", "b c", "d d a", "a c b c"]


@pytest.fixture(scope="module")
def plain(model):
    """By prompt, its log-probability, and that of each next word."""
    found = {}
    for prompt in PROMPTS:
        longer = [f"{prompt} {word}".strip() for word in WORDS[1:]]
        nats = model.surprisal([prompt, *longer])
        count = len(prompt.split())
        found[prompt] = -nats[0][:count].sum(), -torch.stack([each[count] for each in nats])
    return found


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda each: each.name)
def test_probabilities_are_sums_over_all_sentences(model, every, plain, constraint):
    """Of the constraint given a prompt, and of each next word."""
    steering = model.steer(constraint, LONGEST)
    satisfied = [
        ([*line.split(), "<eos>"], log) for line, log in every.items() if holds(constraint, line)
    ]
    for prompt, (log_prompt, free) in plain.items():
        begins = [[*prompt.split(), word] for word in WORDS]
        joint = torch.tensor(
            [log_total(log for x, log in satisfied if x[: len(b)] == b) for b in begins]
        ).double()  # of the prompt, each next word and the constraint
        total = joint.logsumexp(0)
        assert steering.log_prob(prompt) == pytest.approx((total - log_prompt).item(), abs=1e-9)
        ahead = joint - log_prompt - free
        assert torch.allclose(steering.lookahead(prompt), ahead, atol=1e-9)
        if total > -math.inf:
            assert torch.allclose(steering.next_word(prompt), joint - total, atol=1e-9)
        else:
            for answer in (steering.next_word, lambda p: steering.sample(1, prompt=p)):
                with pytest.raises(ValueError, match=f"cannot hold after '{prompt}'"):
                    answer(prompt)


def test_a_contiguous_model_steers_its_first_sentence():
    model = built(contiguous=True)
    steering, lines = model.steer(must_contain("a"), 3), []
    for count in range(1, 4):
        lines += [" ".join(words) for words in itertools.product(WORDS[1:], repeat=count)]
    scores = [model.score([line]).item() for line in lines if "a" in line.split()]
    assert steering.log_prob() == pytest.approx(log_total(scores), abs=1e-9)
    with pytest.raises(ValueError, match="constraint must be None for a contiguous text"):
        model.generate(2, constraint=must_contain("a"))


# Samples ------------------------------------------------------------------------------------------


def are_sampled_from(lines, logs):
    """Whether sentences occur as often as the normalised exponentials of ``logs`` say."""
    assert {*lines} <= {*logs}
    counts = [lines.count(line) for line in logs]
    return oracle.looks_drawn_from(counts, torch.tensor([*logs.values()]).softmax(0).numpy())


@pytest.mark.parametrize(
    ("constraint", "prompt"),
    [
        (must_contain("a", "c"), ""),
        (must_not_contain("b") & of_length(2, 4), "d"),
        (must_contain("a b") | ends_with("d"), "c"),
        (template("a", None, ..., "c"), ""),
    ],
    ids=lambda each: str(each),
)
def test_samples_have_the_conditional_distribution(model, every, constraint, prompt):
    steering = model.steer(constraint, LONGEST)
    generator = torch.Generator().manual_seed(1)
    lines = steering.sample(3000, generator, prompt)
    wanted = {
        line: log
        for line, log in every.items()
        if constraint.accepts(line) and line.split()[: len(prompt.split())] == prompt.split()
    }
    assert are_sampled_from(lines, wanted)


def test_generate_with_a_constraint_is_steering(model):
    constraint = must_contain("c")
    found = model.generate(5, torch.Generator().manual_seed(3), 3, "a b", constraint)
    steering = model.steer(constraint, 5)
    assert found == steering.sample(5, torch.Generator().manual_seed(3), "a b")
    assert all(constraint.accepts(line) and line.startswith("a b ") for line in found)


def test_missing_words_are_filled(model, every):
    """In proportion to the probability of the whole sentence."""
    lines = model.fill(["a", None, "c d", None], 3000, torch.Generator().manual_seed(4))
    # five words are more than those that are listed
    scores = {f"a {x} c d {y}": 0.0 for x in WORDS[1:] for y in WORDS[1:]}
    scores = dict(zip(scores, model.score(list(scores)).tolist()))
    assert are_sampled_from(lines, scores)
    assert model.fill(["a", "b"]) == ["a b"]
    steering = model.steer(template("a", None, "d"), 3)
    single = torch.tensor([every[f"a {word} d"] for word in WORDS[1:]])
    assert torch.allclose(steering.next_word("a")[1:], single.log_softmax(0), atol=1e-9)


# Numerics -----------------------------------------------------------------------------------------


def test_single_precision_and_one_level_agree():
    torch.set_default_dtype(torch.float32)
    for two_level in (True, False):
        model = built(two_level=two_level)
        lines = [f"{a} {b} {c}" for a in WORDS[1:] for b in WORDS[1:] for c in WORDS[1:]]
        scores = model.score([line for line in lines if "a" in line.split()])
        steering = model.steer(must_contain("a") & of_length(3), 3)
        assert steering.log_prob() == pytest.approx(scores.logsumexp(0).item(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_very_improbable_constraints_are_exact(dtype):
    """A word of probability e^-75 in each state, six times: far below the range of numbers."""
    torch.set_default_dtype(dtype)
    model = built()
    with torch.no_grad():
        model.module.bias[WORDS.index("b")] = -75.0
    wanted = must_contain("b b b b b b")
    steering = model.steer(wanted, 6)
    expected = model.score(["b b b b b b"]).item()
    assert -1000 < expected < -300
    assert steering.log_prob() == pytest.approx(expected, rel=1e-5)
    assert steering.sample(2) == ["b b b b b b"] * 2
    sooner = model.steer(must_contain("b"), 3).log_prob()
    pieces = [
        " ".join(words)
        for count in (1, 2, 3)
        for words in itertools.product(WORDS[1:], repeat=count)
        if "b" in words
    ]
    assert sooner == pytest.approx(model.score(pieces).logsumexp(0).item(), rel=1e-5)
