"""What version 0.4.0 has saved can be loaded, and has the log-probabilities that it had there."""

import importlib
from pathlib import Path

import pytest
import torch
from pyro import distributions as dist
from safetensors.torch import load_file

from pyrohmm import (
    HMM,
    BlockHMM,
    DenseHMM,
    LanguageModel,
    NeuralHMM,
    NeuralTagger,
    TabularHMM,
    blocks,
    categorical,
    load_hmm,
    load_into,
)
from pyrohmm.io.files import read_tensors

SAVED = Path(__file__).parent / "saved_0_4_0"
EXPECTED, META = read_tensors(SAVED / "expected.safetensors")
K, LENGTHS = 3, torch.tensor([4, 1, 2])
HMMS = sorted(
    path.name
    for path in SAVED.iterdir()
    if path.is_dir() and not path.name.startswith(("module_", "language_"))
)
EVEN = blocks.from_clusters(torch.tensor([0, 0, 1, 1, 1]), 3)


def check_log_prob(name, found):
    """Equal but for rounding: another CPU, or another BLAS, adds in another order."""
    expected = EXPECTED[f"{name}.log_prob"]
    tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.detach(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", HMMS)
def test_an_hmm_saved_by_version_0_4_0_has_the_same_log_prob(name):
    hmm = load_hmm(SAVED / name)
    assert type(hmm) is (BlockHMM if name.startswith("block_") else HMM)
    check_log_prob(name, hmm.log_prob(EXPECTED[f"{name}.values"]))


def of_hmm(emission):
    """A module of the kind that was saved, with other parameters."""
    even = torch.full((K, K), 1 / K).log()
    return TabularHMM.from_hmm(HMM(even[0], even, emission, LENGTHS))


def dense():
    module = DenseHMM(4, 5, 3, symbol_dim=2)
    for name in ("leave", "enter", "start", "emit", "symbol"):
        setattr(module, name, torch.nn.Parameter(torch.zeros_like(getattr(module, name))))
    return module


def characters():
    words = ["the", "a", "cat", "cats", "s"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2] / "figures")
        ablations = importlib.import_module("common.neural_ablations")
    return ablations.CharCNN(words, 4, char_dim=3, widths=(1, 2), num_filters=2)


MODULES = {
    "module_tabular": lambda: of_hmm(dist.Categorical(torch.ones(K, 5))),
    "module_tabular_normal": lambda: of_hmm(dist.Normal(torch.zeros(K, 2), 1.0).to_event(1)),
    "module_dense": dense,
    "module_neural": lambda: NeuralHMM(4, 5, 4),
    "module_neural_characters": lambda: NeuralHMM(
        6, 5, 4, blocks=EVEN, two_level=True, factored=True, dropout=0.5, words=characters()
    ),
    "module_neural_apart": lambda: NeuralHMM(6, 5, 4, blocks=EVEN, tied=False),
    "module_tagger": lambda: NeuralTagger(6, 5, 3, 4, blocks=EVEN),
}


@pytest.fixture
def single():
    """The default dtype of those who saved the modules."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(previous)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.usefixtures("single")
def test_a_module_saved_by_version_0_4_0_has_the_same_log_prob(name, plainly):
    module = MODULES[name]()
    if plainly:
        module.load_state_dict(load_file(SAVED / name / "tensors.safetensors"))
    else:
        load_into(module, SAVED / name)
    hmm = module.eval()(LENGTHS)
    check_log_prob(name, hmm.log_prob(EXPECTED[f"{name}.values"]))


@pytest.mark.usefixtures("single")
def test_priors_saved_by_version_0_4_0_are_the_same():
    module = TabularHMM(K, categorical(5), 1.0, 1.0)
    load_into(module, SAVED / "module_tabular_priors")
    same = TabularHMM(K, categorical(5, torch.arange(1.0, 6.0)), 2.0, 3.0)
    for (name, found), (_, expected) in zip(module.state_dict().items(), same.state_dict().items()):
        assert torch.equal(found, expected), name


def test_a_language_model_saved_by_version_0_4_0_gives_the_same_scores():
    model = LanguageModel.load(SAVED / "language_model")
    expected = EXPECTED["language_model.log_prob"]
    torch.testing.assert_close(model.score(META["lines"]), expected, rtol=1e-5, atol=1e-5)


def test_everything_that_was_saved_is_loaded():
    names = {path.name for path in SAVED.iterdir() if path.is_dir()}
    assert names == {*HMMS, *MODULES, "module_tabular_priors", "language_model"}
    assert len(HMMS) == 16
