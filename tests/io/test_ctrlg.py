"""Files of Ctrl-G: read, written, and of the same probabilities as its formulas give."""

import itertools
import json

import pytest
import safetensors.torch
import torch
from pyro.distributions import Categorical

from pyrohmm import HMM, from_ctrlg, to_ctrlg


def tensors(num_states=3, num_tokens=4, zeros=False):
    """Parameters as a file has them."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape):
        return torch.randn(shape, generator=generator).softmax(-1)

    alpha, beta = rows(num_states, num_states), rows(num_states, num_tokens)
    if zeros:
        alpha[0], beta[1] = torch.eye(num_states)[1], torch.eye(num_tokens)[2]
    return {"alpha_exp": alpha, "beta": beta.log(), "gamma": rows(num_states).log()}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("first", ["gamma", "gamma_exp"])
def test_probabilities_are_those_of_its_tensors(tmp_path, zeros, first):
    """The sum over all paths of gamma, alpha and beta."""
    found = tensors(zeros=zeros)
    file = dict(found)
    if first == "gamma_exp":
        file["gamma_exp"] = file.pop("gamma").exp()
    safetensors.torch.save_file(file, tmp_path / "model.safetensors")
    values = torch.tensor([2, 0, 2, 3])
    expected = 0.0
    for path in itertools.product(range(3), repeat=4):
        terms = [found["gamma"][path[0]].exp()]
        terms += [found["alpha_exp"][i, j] for i, j in itertools.pairwise(path)]
        terms += [found["beta"][i, v].exp() for i, v in zip(path, values)]
        expected += torch.stack(terms).double().prod()
    hmm = from_ctrlg(tmp_path).with_lengths(torch.tensor(4))
    torch.testing.assert_close(hmm.log_prob(values).exp().double(), expected, rtol=1e-5, atol=0)


def test_what_is_written_is_read(tmp_path):
    parts = tensors(zeros=True)
    emission = Categorical(logits=parts["beta"])
    hmm = HMM(parts["gamma"], parts["alpha_exp"].log(), emission, torch.tensor([5, 2]))
    to_ctrlg(hmm, tmp_path / "new" / "model", end=3)
    again = from_ctrlg(tmp_path / "new" / "model")
    torch.testing.assert_close(again.log_transition, hmm.log_transition.float())
    torch.testing.assert_close(again.emission.probs, hmm.emission.probs.float())
    config = json.loads((tmp_path / "new" / "model" / "config.json").read_text())
    assert config == {"hidden_states": 3, "vocab_size": 4, "eos_token_id": 3}
