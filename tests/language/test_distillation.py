"""Distillation: an HMM of texts of another model, held-out perplexity and divergence by step."""

import math
from types import SimpleNamespace

import pyro
import pytest
import torch

from pyrohmm import from_ctrlg, to_ctrlg
from pyrohmm.language import distil
from pyrohmm.language.distillation import sample_texts

TOKENS, END = ["a", " b", "c", None], 3


class Bigram:
    """A language model with the two methods of ``transformers`` that are used."""

    device = torch.device("cpu")

    def __init__(self, probs):
        self.logits = torch.tensor(probs, dtype=torch.float32).log()

    def __call__(self, ids):
        return SimpleNamespace(logits=self.logits[ids])

    def generate(self, ids, attention_mask, max_new_tokens, **options):
        assert attention_mask.shape == ids.shape
        ended = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(max_new_tokens):
            new = torch.multinomial(self.logits[ids[:, -1]].softmax(-1), 1)
            new[ended] = options["pad_token_id"]
            ids = torch.cat([ids, new], 1)
            ended |= new[:, 0] == options["eos_token_id"]
            if ended.all():
                break
        return ids


class Tokenizer(list):
    eos_token_id = END


SKEWED = [[0.1, 0.7, 0.1, 0.1], [0.05, 0.05, 0.8, 0.1], [0.8, 0.05, 0.05, 0.1], [0.4, 0.3, 0.3, 0]]


def test_texts_have_the_probabilities_of_the_model_and_end_once():
    pyro.set_rng_seed(0)
    texts = sample_texts(Bigram(SKEWED), 4000, 5, END, END)
    values, exists = texts.values, texts.exists
    ends = (values == END) & exists
    assert ends.sum(1).max() == 1
    assert bool((ends.any(1) | (texts.lengths == 5)).all())
    first = values[:, 0].bincount(minlength=4) / 4000
    torch.testing.assert_close(first, torch.tensor(SKEWED[END]), atol=0.03, rtol=0.0)
    follows = values[:, 1][values[:, 0] == 0].bincount(minlength=4)
    torch.testing.assert_close(
        follows / follows.sum(), torch.tensor(SKEWED[0]), atol=0.04, rtol=0.0
    )


@pytest.mark.parametrize("num_states", [1, 6])
def test_the_divergence_by_step_is_that_of_the_held_out_texts(num_states):
    """A few more states than tokens imitate a bigram; a single one cannot."""
    pyro.set_rng_seed(0)
    model = Bigram(SKEWED)
    held_out = sample_texts(model, 500, 6, END, END)
    options = {"num_texts": 3000, "max_tokens": 6, "num_epochs": 20, "batch_size": 300}
    hmm, fit, perplexity, divergence = distil(
        model, Tokenizer(TOKENS), num_states, held_out=held_out, **options
    )
    rows = [row[:n] for row, n in zip(held_out.values.tolist(), held_out.lengths.tolist())]
    assert perplexity.num_tokens == sum(map(len, rows))
    total = hmm.with_lengths(held_out.lengths).log_prob(held_out.values).sum().item()
    assert perplexity.log_evidence == pytest.approx(total, rel=1e-5)
    own = sum(math.log(SKEWED[a][b]) for row in rows for a, b in zip([END, *row], row))
    reached = torch.tensor([sum(len(row) > t for row in rows) for t in range(6)])
    assert (divergence * reached).sum().item() == pytest.approx(own - total, abs=1e-2)
    assert len(fit.losses) == 200 + 1
    assert (divergence.mean() < 0.02) == (num_states == 6)


def test_texts_alone_and_in_parts():
    pyro.set_rng_seed(0)
    texts = sample_texts(Bigram(SKEWED), 200, 6, END, END)
    found = distil(texts, TOKENS, 2, num_epochs=2, batch_size=None)
    assert found.divergence is None
    assert found.perplexity.num_tokens == texts[-10:].num_observed
    parts = [texts[:100], texts[100:190]]
    with pytest.raises(ValueError, match="held_out must be Sequences where source is"):
        distil(parts, TOKENS, 2)
    with pytest.raises(ValueError, match=r"tokenizer must have eos_token_id.* that of list is"):
        distil(Bigram(SKEWED), TOKENS, 2)
    again = distil(parts, TOKENS, 2, held_out=texts[190:], num_epochs=2)
    assert again.perplexity.num_tokens == found.perplexity.num_tokens


def test_texts_in_parts_take_as_many_steps_as_those_in_memory():
    """And imitate the model as well."""
    pyro.set_rng_seed(0)
    texts, held_out = (sample_texts(Bigram(SKEWED), n, 6, END, END) for n in (3000, 300))
    parts = [texts[first : first + 500] for first in range(0, 3000, 500)]
    found = []
    for source in (texts, parts):
        pyro.set_rng_seed(1)
        found.append(distil(source, TOKENS, 6, held_out=held_out, num_epochs=5, batch_size=100))
    assert [len(each.fit.losses) for each in found] == [151, 151]
    assert found[1].perplexity.value == pytest.approx(found[0].perplexity.value, rel=0.01)


def test_what_goes_on_from_a_checkpoint_ends_as_one_never_stopped(tmp_path):
    found = []
    for num_epochs, name in ((40, "stopped"), (50, "stopped"), (50, "whole")):
        pyro.set_rng_seed(0)
        found.append(
            distil(
                Bigram(SKEWED), Tokenizer(TOKENS), 3, num_texts=300, max_tokens=6, batch_size=100,
                num_epochs=num_epochs, checkpoint=str(tmp_path / name),
            )
        )  # fmt: skip
    assert [each.fit.reason for each in found[:2]] == [
        "it took all 120 steps", "it took all 150 steps",
    ]  # fmt: skip
    assert found[1].divergence.shape == (6,)
    for number in (1, 2):
        to_ctrlg(found[number].hmm, tmp_path / str(number), END)
    resumed, whole = (from_ctrlg(tmp_path / str(number)) for number in (1, 2))
    assert resumed.emission.probs.equal(whole.emission.probs)
    assert resumed.log_transition.equal(whole.log_transition)
