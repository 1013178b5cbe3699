"""Distillation: stepwise EM against EM, parts in files, and runs that were stopped."""

import numpy as np
import pytest
import torch

from pyrohmm import automata
from pyrohmm.language import ConstraintProcessor, distil

TEXTS = torch.randint(3, (60, 6), generator=torch.Generator().manual_seed(3)).cumsum(1) % 5


def run(texts=TEXTS, **options):
    options = {"num_rounds": 4, "batch_size": 20} | options
    return distil(texts, 4, 5, generator=torch.Generator().manual_seed(0), **options)


def test_whole_batches_with_full_steps_are_em():
    """Then the likelihood never falls, and the counts of tokens are those of the texts."""
    found = run(num_rounds=15, batch_size=60, power=0.0, pseudocount=1e-9)
    assert all(b <= a + 1e-6 for a, b in zip(found.perplexities, found.perplexities[1:]))
    assert found.perplexities[-1] < 0.95 * found.perplexities[0]
    hmm = found.hmm.replace(lengths=torch.full((60,), 6))
    again = torch.exp(-hmm.log_prob(TEXTS).sum() / TEXTS.numel()).item()
    assert again <= found.perplexities[-1] + 1e-5


def test_parts_in_files_are_what_one_tensor_is(tmp_path):
    for number, part in enumerate(TEXTS.split(20)):
        np.save(tmp_path / f"{number}.npy", part.numpy().astype(np.uint16))
    parts = run([tmp_path / f"{number}.npy" for number in range(3)])
    whole = run()
    assert parts.perplexities == pytest.approx(whole.perplexities)
    torch.testing.assert_close(parts.hmm.emission.probs, whole.hmm.emission.probs)


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path):
    parts, whole = list(TEXTS.split(20)), run(list(TEXTS.split(20)))

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(parts, checkpoint=tmp_path / "c", report=stop)
    resumed = run(parts, checkpoint=tmp_path / "c")
    assert resumed.perplexities == whole.perplexities
    assert resumed.hmm.log_transition.equal(whole.hmm.log_transition)
    with pytest.raises(ValueError, match="is of other states, tokens or parts"):
        run(TEXTS, checkpoint=tmp_path / "c")


def test_what_was_distilled_steers():
    tokens = ["a", " b", " c", " d", " e"]
    wanted = automata.must_contain("b", "e")
    processor = ConstraintProcessor(run().hmm, wanted, tokens, 4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(20, 1, dtype=torch.long)
    for _ in range(4):
        probs = processor(ids, torch.zeros(20, 5)).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], 1)
    texts = ["".join(tokens[code] for code in row) for row in ids[:, 1:].tolist()]
    assert all(wanted.accepts(text) for text in texts)


def test_tokens_that_the_tokenizer_does_not_have_are_refused():
    with pytest.raises(ValueError, match="tokens of texts must lie between 0 and V - 1 = 4"):
        run(TEXTS + 1)
