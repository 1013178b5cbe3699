"""Texts steered by an HMM of tokens: against all texts of a tiny vocabulary, and by tokenizers."""

import itertools
import math
import re

import pytest
import torch
from pyro.distributions import Categorical

from pyrohmm import HMM, BlockHMM, automata, blocks
from pyrohmm.language import ConstraintProcessor, matching, over_tokens
from pyrohmm.language.tokens import token_texts

TOKENS = ["a", "b", " a", ".", None]  # the last ends a text
END, LONGEST = 4, 6
WORD = re.compile(r"[\w']+")


def dense(num_states=3, num_tokens=5, seed=0):
    """An HMM of random parameters."""
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape):
        return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).log_softmax(-1)

    emission = Categorical(logits=rows(num_states, num_tokens))
    return HMM(rows(num_states), rows(num_states, num_states), emission, torch.tensor(1))


def in_blocks():
    """An HMM in blocks of 2, 1 and 2 states."""
    hmm = dense(5)
    three = blocks.from_clusters(torch.tensor([0, 1, 0, 2, 2]), torch.tensor([2, 1, 2]))
    emission = [[0.3, 0.9], [1, 1], [0.7, 0.1], [0.2, 0.6], [0.8, 0.4]]
    log_emission = torch.tensor(emission, dtype=torch.float64).log()
    return BlockHMM(hmm.log_initial, hmm.log_transition, log_emission, three, torch.tensor(1))


def text_of(codes):
    return "".join(TOKENS[code] for code in codes if code != END)


def texts(longest):
    """All texts: those that have ended, and those of as many tokens as there may be."""
    for count in range(longest):
        yield from ((*codes, END) for codes in itertools.product(range(4), repeat=count))
    yield from itertools.product(range(4), repeat=longest)


def log_probs(hmm, prompt, longest):
    """Log-probability of every text after the prompt, ends included."""
    rows = list(texts(longest))
    found = {}
    for _, group in itertools.groupby(sorted(rows, key=len), len):
        group = list(group)
        values = torch.tensor([[*prompt, *row] for row in group])
        logs = hmm.replace(lengths=torch.full((len(group),), values.size(1))).log_prob(values)
        found |= dict(zip(group, logs.tolist()))
    return found


def steered(processor, model, prompt, longest):
    """Probability of every text under a model that is steered: products of next tokens."""
    found, front = {}, {(): 0.0}
    for _ in range(longest + 1):
        rows = list(front)
        if not rows:
            break
        ids = torch.tensor([[*prompt, *row] for row in rows])
        logs = processor(ids, model(ids)).log_softmax(-1)
        following = {}
        for row, log in zip(rows, logs.tolist()):
            for token, value in enumerate(log):
                if value == -math.inf:
                    continue
                new, total = (*row, token), front[row] + value
                if token == END or (len(new) == longest and len(row) < longest):
                    found[new] = total
                else:
                    following[new] = total
        front = following
    return found


def by_hmm(hmm):
    """The HMM itself as a language model: log-probabilities of the next token, by enumeration."""

    def model(ids):
        count, length = ids.shape
        longer = torch.cat([ids.repeat_interleave(5, 0), torch.arange(5).repeat(count)[:, None]], 1)
        logs = hmm.replace(lengths=torch.full((len(longer),), length + 1)).log_prob(longer)
        return logs.view(count, 5).log_softmax(-1)

    return model


CONSTRAINTS = {
    "word": (automata.must_contain("a"), lambda w: "a" in w),
    "two words": (automata.must_contain("a", "ba"), lambda w: "a" in w and "ba" in w),
    "not": (automata.must_not_contain("a", "ab"), lambda w: not {"a", "ab"} & {*w}),
    "phrase": (automata.must_contain("b a"), lambda w: " b a " in f" {' '.join(w)} "),
    "order": (automata.template(..., "a", ..., "b", ...), 
              lambda w: re.search("(^|-)a-(.*-)?b-", "-".join([*w, ""]))),
    "inflected": (automata.must_contain("ab") | automata.must_contain("ba"), 
                  lambda w: {"ab", "ba"} & {*w}),
    "count": (automata.of_length(2, 3), lambda w: 2 <= len(w) <= 3),
    "all": (automata.must_contain("a") & automata.of_length(2) & automata.must_not_contain("b"),
            lambda w: len(w) == 2 and "a" in w and "b" not in w),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("hmm", [dense(), in_blocks()], ids=["dense", "blocks"])
@pytest.mark.parametrize("prompt", [(0,), (3, 1, 2)])
def test_the_hmm_steered_by_itself_has_its_conditional_distribution(name, hmm, prompt):
    """Of every text of at most four tokens; others have probability zero."""
    constraint, holds = CONSTRAINTS[name]
    longest = 4
    wanted = {
        row: log
        for row, log in log_probs(hmm, prompt, longest).items()
        if holds(WORD.findall(text_of(row))) and log > -math.inf
    }
    total = torch.tensor(list(wanted.values())).logsumexp(0).item()
    processor = ConstraintProcessor(hmm, constraint, TOKENS, longest, end=END)
    found = steered(processor, by_hmm(hmm), prompt, longest)
    assert found.keys() == wanted.keys()
    for row, log in wanted.items():
        assert found[row] == pytest.approx(log - total, abs=1e-9)


@pytest.mark.parametrize("must_end", [False, True])
def test_another_model_is_multiplied_by_the_probability_of_the_constraint(must_end):
    """All texts of six of five tokens: the distribution is that of the product, token by token."""
    hmm, other = dense(), torch.randn(5, 5, dtype=torch.float64)
    constraint = automata.must_contain("a", "b")
    kwargs = {"end": END, "must_end": must_end}
    processor = ConstraintProcessor(hmm, constraint, TOKENS, LONGEST, **kwargs)
    found = steered(processor, lambda ids: other[ids[:, -1]], (3,), LONGEST + must_end)
    assert math.fsum(map(math.exp, found.values())) == pytest.approx(1.0, abs=1e-9)
    rows = log_probs(hmm, (3,), LONGEST + must_end)
    good = {
        row: log for row, log in rows.items()
        if {"a", "b"} <= {*WORD.findall(text_of(row))} and (row[-1] == END or not must_end)
    }  # fmt: skip
    assert found.keys() == good.keys()
    begins = {}  # log-probability of a beginning with the constraint, and without
    for row in rows:
        for count in range(len(row) + 1):
            joint, free = begins.setdefault(row[:count], ([], []))
            free.append(rows[row])
            if row in good:
                joint.append(rows[row])
    ahead = {
        row: torch.tensor(joint).logsumexp(0).item() - torch.tensor(free).logsumexp(0).item()
        for row, (joint, free) in begins.items()
        if joint
    }
    generator = torch.Generator().manual_seed(0)
    some = [list(good)[n] for n in torch.randperm(len(good), generator=generator)[:60]]
    for row in some:
        total, before = 0.0, 3
        for count in range(len(row)):
            nexts = other[before].log_softmax(-1) + torch.tensor(
                [ahead.get((*row[:count], token), -math.inf) for token in range(5)]
            )
            total += nexts.log_softmax(-1)[row[count]].item()
            before = row[count]
        assert found[row] == pytest.approx(total, abs=1e-9)


def test_texts_in_any_order_have_their_own_states():
    """As beams leave them: rows that were copied, dropped and exchanged."""
    hmm, constraint = dense(), automata.must_contain("ab")
    processor = ConstraintProcessor(hmm, constraint, TOKENS, LONGEST, end=END)
    scores = torch.zeros(3, 5, dtype=torch.float64)
    processor(torch.tensor([[0], [1], [3]]), scores)
    processor(torch.tensor([[3, 2], [3, 3], [0, 2]]), scores)
    rows = torch.tensor([[3, 2, 1], [0, 2, 3], [3, 2, END]])
    found = processor(rows, scores)
    for row, expected in zip(rows[:2], found):
        alone = ConstraintProcessor(hmm, constraint, TOKENS, LONGEST, end=END)
        for length in (1, 2, 3):
            answer = alone(row[None, :length], scores[:1])
        torch.testing.assert_close(answer[0], expected)
    assert found[2].equal(scores[2])  # it has ended


def test_padding_to_the_left_is_not_read():
    hmm, constraint = dense(), automata.must_contain("ab")
    options = {"end": END, "padding": END}
    scores = torch.zeros(2, 5, dtype=torch.float64)
    processor = ConstraintProcessor(hmm, constraint, TOKENS, 3, **options)
    found = processor(torch.tensor([[END, END, 1], [0, 1, 1]]), scores)
    torch.testing.assert_close(found[:1], processor(torch.tensor([[1]]), scores[:1]))
    blind = ConstraintProcessor(hmm, constraint, TOKENS, 3, read_prompt=False, **options)
    both = blind(torch.tensor([[END, END, 1], [0, 1, 1]]), scores)
    assert both[0].equal(both[1])


def test_what_the_hmm_thinks_impossible_may_still_be_written():
    """Its states never emit the word; then any token leads on after which it may occur."""
    logits = torch.zeros(2, 5)
    logits[:, 1] = -math.inf
    even = torch.full((2, 2), 0.5).log()
    hmm = HMM(even[0], even, Categorical(logits=logits), torch.tensor(1))
    processor = ConstraintProcessor(hmm, automata.must_contain("b"), TOKENS, 2, end=END)
    found = processor(torch.tensor([[0]]), torch.zeros(1, 5))
    assert found.isfinite().tolist() == [[False, True, False, True, False]]
    found = processor(torch.tensor([[0, 3]]), torch.zeros(1, 5))
    assert found.isfinite().tolist() == [[False, True, False, False, False]]


CORPUS = ["the cat sat on the mat , and the dog's bone was there", "a dog is not a cat; cats purr",
          "no man's land: naïve façade", "the cat's cradle"] * 20  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    """Byte pairs, trained on few lines."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(CORPUS, trainer)
    return made


def words_of(tokenizer, codes):
    """Runs of word characters; bytes that are no character of a random text divide nothing."""
    text = b"".join(token_texts(tokenizer)[code] for code in codes)
    return [word.decode("latin-1") for word in re.findall(rb"[\w'\x80-\xff]+", text)]


def test_the_constraint_holds_for_what_is_written_however_it_is_divided(tokenizer):
    """Random tokens of a random model: whole words, with either case of tokenization."""
    end = tokenizer.token_to_id("<end>")
    count = tokenizer.get_vocab_size()
    hmm = dense(8, count)
    wanted = (
        automata.template(..., "cat", ..., "dog's", ...)
        & automata.must_not_contain("the", "a")
        & automata.of_length(4, 6)
    )
    processor = ConstraintProcessor(hmm, wanted, tokenizer, 24, end=end)
    generator = torch.Generator().manual_seed(0)
    model = torch.randn(count, count, generator=generator)
    model[:, end] += 3
    ids = torch.tensor([tokenizer.encode("the dog").ids] * 40)
    length = ids.size(1)
    for _ in range(24):
        probs = processor(ids, model[ids[:, -1]]).softmax(-1)
        after = torch.multinomial(probs, 1, generator=generator)
        done = (ids[:, length:] == end).any(1, keepdim=True)
        ids = torch.cat([ids, after.where(~done, torch.tensor(end))], 1)
    pieces = set()
    for row in ids[:, length:].tolist():
        row = row[: row.index(end)] if end in row else row
        assert wanted.accepts(words_of(tokenizer, row))
        pieces.add(tuple(row))
    assert len(pieces) == 40


def small_gpt2(tokenizer, seed=0):
    """A GPT-2 of random parameters."""
    transformers = pytest.importorskip("transformers")
    end = tokenizer.token_to_id("<end>")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=64, n_embd=16, n_layer=1, n_head=2,
        bos_token_id=end, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("options", [
    {"do_sample": True, "num_return_sequences": 4}, {"num_beams": 4}, {},
    {"num_beams": 4, "num_return_sequences": 4, "do_sample": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("wanted", [
    automata.must_contain("mat") & automata.of_length(3, 7), automata.template("the", "cat"),
], ids=["any of many", "one text"])  # fmt: skip
def test_generate_of_transformers_keeps_the_constraint(tokenizer, wanted, options):
    """Samples and beams of a random GPT-2, prompts padded on the left."""
    model = small_gpt2(tokenizer)
    end, count = tokenizer.token_to_id("<end>"), tokenizer.get_vocab_size()
    processor = ConstraintProcessor(
        dense(4, count), wanted, tokenizer, 12, end=end, padding=end, must_end=True
    )
    short, long = tokenizer.encode("the").ids, tokenizer.encode("the cat sat").ids
    ids = torch.tensor([[end] * (len(long) - len(short)) + short, long])
    mask = (torch.arange(len(long)) >= torch.tensor([[len(long) - len(short)], [0]])).long()
    written = model.generate(
        ids, attention_mask=mask, max_new_tokens=13, logits_processor=[processor], **options
    )
    for row in written[:, len(long) :].tolist():
        assert wanted.accepts(words_of(tokenizer, row[: row.index(end)]))


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["another model", "the prompt"])
def test_assisted_generation_keeps_the_constraint_or_is_refused(tokenizer, kind, do_sample):
    """Where no token of the assistant is rejected, or with an error that says what to leave out."""
    model, end = small_gpt2(tokenizer), tokenizer.token_to_id("<end>")
    ids = torch.tensor([tokenizer.encode("the cat sat on the").ids])
    options = {
        "another model": {"assistant_model": small_gpt2(tokenizer, 1)},
        "the prompt": {"prompt_lookup_num_tokens": 3},
    }[kind]
    wanted = automata.must_contain("mat") & automata.of_length(3, 7)
    processor = ConstraintProcessor(
        dense(4, tokenizer.get_vocab_size()), wanted, tokenizer, 12, end=end, must_end=True
    )
    refused = 0
    for seed in range(4):
        torch.manual_seed(seed)
        processor.reset()
        try:
            written = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, max_new_tokens=13,
                logits_processor=[processor], **options,
            )  # fmt: skip
        except ValueError as error:
            assert "without assistant_model, prompt_lookup_num_tokens" in str(error)  # noqa: PT017
            refused += 1
        else:
            row = written[0, ids.size(1) :].tolist()
            assert wanted.accepts(words_of(tokenizer, row[: row.index(end)]))
    assert refused > 0


def test_no_token_left_by_another_processor_is_an_error(tokenizer):
    model, end = small_gpt2(tokenizer), tokenizer.token_to_id("<end>")
    processor = ConstraintProcessor(
        dense(4, tokenizer.get_vocab_size()), automata.template("a"), tokenizer, 1, end=end
    )
    ids = torch.tensor([tokenizer.encode("the").ids])
    options = {"max_new_tokens": 2, "logits_processor": [processor]}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    forbidden = written[0, ids.size(1)].item()
    only = ConstraintProcessor(
        dense(4, tokenizer.get_vocab_size()), automata.must_contain(forbidden), tokenizer, 1,
        end=end,
    )  # fmt: skip
    with pytest.raises(ValueError, match="scores must leave a token after which must_contain"):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, logits_processor=[only],
            suppress_tokens=[forbidden],
        )  # fmt: skip


EXTRA = ["a", "b", " a", ".", None, None, None]  # the end, and two more special tokens
OVER = over_tokens(automata.must_contain("a"), EXTRA)


@pytest.mark.parametrize("wanted", [
    OVER, ~OVER, OVER | ~OVER, OVER & ~automata.must_contain(3), OVER | automata.must_contain(3),
    automata.must_not_contain(3), automata.must_contain("a") | automata.of_length(2),
    ~matching("a+", EXTRA), ~~OVER & ~matching("a+", EXTRA),
], ids=lambda wanted: wanted.name)  # fmt: skip
def test_special_tokens_are_never_written(wanted):
    """Unless the constraint names them: after what has been complemented or joined, too."""
    hmm = dense(3, 7)
    scores = torch.zeros(1, 7, dtype=torch.float64)
    for longest in (1, 4):
        processor = ConstraintProcessor(hmm, wanted, EXTRA, longest, end=END)
        found = processor(torch.tensor([[0]]), scores)
        assert found[0, 5:].tolist() == [-math.inf] * 2
        assert found[0, :4].isfinite().any()
    named = ConstraintProcessor(hmm, automata.must_contain(5) & ~OVER, EXTRA, 1, end=END)
    assert named(torch.tensor([[0]]), scores).isfinite().nonzero()[:, 1].tolist() == [5]
