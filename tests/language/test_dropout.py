"""State dropout of a language model: chosen by the epochs of a fit, kept, and changed later."""

import pyro
import torch

from pyrohmm import LanguageModel, blocks, language
from pyrohmm.language import DefaultDropout, default_dropout

LINES = ["a b c", "b c", "c a b b", "a"] * 5
WORDS = language.count_words(LINES)
DATA = language.encode(LINES, WORDS)


FEW = 10  # epochs of this text and model, which has 4.1 parameters for a token


def untrained(**options):
    pyro.set_rng_seed(0)
    cluster = torch.tensor([0, 1, 0, 2, 2])
    return LanguageModel(WORDS, blocks.from_clusters(cluster, 8), 4, **options)


def fitted(num_epochs, **options):
    model = untrained()
    model.fit(DATA, num_epochs=num_epochs, batch_tokens=40, progress=False, **options)
    return model


def test_few_epochs_are_more_of_a_larger_text():
    model = untrained()
    size = sum(parameter.numel() for parameter in model.module.parameters())
    assert FEW <= 16 * (DATA.num_observed / size) ** (1 / 3) < FEW + 1
    assert default_dropout(16, 1, 1.0).begin == 0.0
    assert default_dropout(17, 1, 1.0).begin == 0.5
    assert default_dropout(32, 1, 8.0).begin == 0.0


def was_counted_from_the_start(model, num_epochs):
    """Whether steps were counted from 0; a fit asks the model some times before its first."""
    return 0 <= int(model.module.num_drawn) - model.num_iterations(DATA, num_epochs, 40) <= 5


def states_in_training(model):
    return model.module.train()(torch.tensor([1])).num_states


def test_a_fit_of_few_epochs_leaves_nothing_out():
    model = fitted(FEW)
    assert (model.module.dropout.begin, model.module.dropout.end) == (0.0, 0.0)
    assert states_in_training(model) == 24
    assert "dropout" not in repr(model)


def test_a_fit_of_many_epochs_begins_with_half_and_ends_with_three_quarters():
    model = fitted(FEW + 1)
    num_steps = model.num_iterations(DATA, FEW + 1, 40)
    assert model.module.dropout == DefaultDropout(0.5, 0.25, num_steps)
    assert was_counted_from_the_start(model, FEW + 1)
    assert states_in_training(model) == 18
    model.module.num_drawn.zero_()
    assert states_in_training(model) == 12
    assert repr(model).endswith("dropout 0.5 to 0.25)")
