"""How a language model is made of text: its clusters, its schedule, and what it refuses."""

import pyro
import pytest
import torch

from pyrohmm import LanguageModel, clusters, cooccurrence
from pyrohmm.data.batches import Batches
from pyrohmm.data.vocabulary import Vocabulary, word_classes
from pyrohmm.io.files import read_directory, write_directory
from pyrohmm.language.clusters import find_clusters
from pyrohmm.language.text import count_words, encode


def plain(vocabulary, data, num_clusters):
    """Brown clusters where ``<eos>`` is a word like others, and whether it is alone."""
    found = clusters.brown(cooccurrence.count_pairs(data, len(vocabulary)), num_clusters)
    end = vocabulary.index("<eos>")
    return found.assignment, int((found.assignment == found.assignment[end]).sum()) == 1


GRAMMAR = [["the", "a", "this"], ["cat", "dog", "owl"], ["sees", "hears", "likes"],
           ["my", "your", "our"], ["house", "tree", "boat"]]  # fmt: skip


def text(count, seed=0, longest=10):
    """Lines of a grammar that goes round five places, each with three words, and ends anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def line():
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        words = torch.randint(3, (length,), generator=generator).tolist()
        return " ".join(GRAMMAR[place % 5][word] for place, word in enumerate(words))

    return [line() for _ in range(count)]


def prepared(lines):
    vocabulary = count_words(lines)
    return vocabulary, encode(lines, vocabulary)


# Clusters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_clusters", [2, 3, 8, 16])
def test_there_are_as_many_clusters_as_were_asked_for(num_clusters):
    vocabulary, data = prepared(text(80))
    model = LanguageModel.from_data(vocabulary, data, 32, num_clusters, 4)
    found = find_clusters(data, vocabulary, num_clusters)
    assert model.blocks.num_blocks == num_clusters
    assert found.unique().tolist() == list(range(num_clusters))
    assert torch.equal(model.blocks.symbol_block, found)
    assert (found == num_clusters - 1).nonzero().tolist() == [[vocabulary.index("<eos>")]]


def test_the_end_is_taken_out_of_clusters_that_keep_other_words():
    """Where it is alone among C - 1, the others are those of C."""
    vocabulary, data = prepared(text(80))
    cases = set()
    for num_clusters in range(2, 12):
        found = find_clusters(data, vocabulary, num_clusters)
        expected, alone = plain(vocabulary, data, num_clusters - 1)
        if alone:
            expected, again = plain(vocabulary, data, num_clusters)
            assert again
        cases.add(alone)
        assert torch.equal(found, clusters.isolate(expected, [vocabulary.index("<eos>")]))
    assert cases == {False, True}


# What it is given ---------------------------------------------------------------------------------


def model_of(lines, **options):
    vocabulary, data = prepared(lines)
    pyro.set_rng_seed(0)
    return LanguageModel.from_data(vocabulary, data, 12, 4, 8, **options), data


def test_a_loaded_model_takes_turns_with_the_fitted_one(tmp_path):
    """States share their vectors, which have several names in Pyro's store."""
    model, data = model_of(text(40))
    model.score(data)
    model.fit(data, num_epochs=1, progress=False)
    model.save(tmp_path / "model")
    loaded = LanguageModel.load(tmp_path / "model")
    assert torch.equal(model.score(data), loaded.score(data))


def test_a_vocabulary_with_classes_of_rare_words_is_saved(tmp_path):
    words = " ".join(text(60)).split() + ["walking", "talking", "Oslo", "rises"] * 6
    vocabulary = Vocabulary.from_counts([*words, *["<eos>"] * 99], 7, unknown=word_classes)
    assert "<unk-ing>" in vocabulary
    data = encode([*text(60), "walking a cat", "Oslo"], vocabulary)
    model = LanguageModel.from_data(vocabulary, data, 12, 4, 8)
    model.save(tmp_path / "m")
    found = LanguageModel.load(tmp_path / "m")
    lines = ["my cat", "barking Bergen"]
    assert found.encode(lines).values.equal(model.encode(lines).values)
    assert found.score(lines).equal(model.score(lines))


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (10**9, {}, "blocks are claimed"),
        ([10**6, 1, 1, 1], {}, "blocks are claimed"),
        (None, {"hidden_dim": 10**6}, "size mismatch"),
    ],
)
def test_a_file_that_claims_more_than_it_has_takes_no_memory(tmp_path, sizes, changes, message):
    model = LanguageModel.from_data(*prepared(text(30)), 12, 4, 8)
    model.save(tmp_path / "m")
    tensors, meta = read_directory(tmp_path / "m", "language model")
    if sizes is not None:
        tensors["block_sizes"] = torch.tensor(sizes).expand(4).clone()
    if isinstance(sizes, list):  # which take no room
        tensors["module.start_vectors.state"] = torch.zeros(sum(sizes), 0)
    write_directory(tmp_path / "m", tensors, meta | changes)
    with pytest.raises(ValueError, match=f"(?s)does not describe a language model: .*{message}"):
        LanguageModel.load(tmp_path / "m")


# Fitting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [False, True])
def test_a_fit_that_fails_gives_back_the_parameters(held_out):
    vocabulary, data = prepared(text(30))
    model = LanguageModel.from_data(vocabulary, data, 12, 4, 8, dropout=0.0)
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    with pytest.raises(FloatingPointError, match="a parameter has left its range"):
        model.fit(data, data if held_out else None, num_epochs=3, learning_rate=torch.inf)
    assert all(map(torch.equal, before, model.module.parameters()))


def test_a_fit_that_fails_gives_back_the_best_that_was_validated():
    vocabulary, data = prepared(text(30))
    model = LanguageModel.from_data(vocabulary, data, 12, 4, 8, dropout=0.0)
    seen = []

    def spoil(validation):
        if len(seen) == 2:  # as one step too long would
            model.module.bias.data.fill_(torch.nan)
        seen.append(validation.nats)

    with pytest.raises(FloatingPointError, match="a parameter has left its range"):
        model.fit(data, data, num_epochs=5, report=spoil)
    assert -model.score(data).sum().item() / data.num_observed == pytest.approx(min(seen))


def test_a_round_ends_where_each_sentence_was_taken_once():
    """Held-out data are evaluated there, and steps are as many as rounds have, within 1 %."""
    model, data = model_of(text(400, longest=60))
    generator = torch.Generator().manual_seed(0)
    batches = Batches(data, batch_tokens=150, generator=torch.Generator().manual_seed(0))
    fit = model.fit(
        data, data[:5], num_epochs=2, batch_tokens=150, generator=generator, progress=False
    )
    ends, step = [], 0
    while len(ends) < 2:
        batches.take()
        step += 1
        if batches.at_end_of_round:
            ends.append(step)
    validated = [found.step for found in fit.validation]
    assert validated[0] == ends[0]
    assert validated[-1] == len(fit.losses)
    assert abs(len(fit.losses) - ends[1]) <= 0.01 * ends[1]


@pytest.mark.parametrize("learning_rate", [1e3, 1e9])
def test_a_fit_whose_end_is_finite_but_useless_gives_back_the_parameters(learning_rate):
    """In float64 nothing overflows: 1e6 to 1e18 nats a word, where uniform guessing takes 2."""
    vocabulary, data = prepared(text(30))
    model = LanguageModel.from_data(vocabulary, data, 12, 4, 8, dropout=0.0)
    model.module.double()
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    with pytest.raises(FloatingPointError, match="a parameter has left its range"):
        model.fit(data, num_epochs=3, learning_rate=learning_rate)
    assert all(map(torch.equal, before, model.module.parameters()))
