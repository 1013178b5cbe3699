"""Chains that emit words and tags: against sums over all paths of states and tags."""

import itertools
import math

import numpy as np
import oracle
import pyro
import pytest
import torch
from torch.nn.functional import one_hot

from pyrohmm import (
    NeuralHMM,
    NeuralTagger,
    Sequences,
    TaggedHMM,
    blocks,
)
from pyrohmm.nn.tagging import tagged

RAGGED = blocks.from_clusters(torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([2, 1, 2]))
VARIANTS = {
    "no blocks": {},
    "one level": {"blocks": RAGGED},
    "two levels": {"blocks": RAGGED, "two_level": True},
    "apart": {"blocks": RAGGED, "tied": False, "factored": True},
}
WORDS = Sequences(torch.tensor([[0, 3, 5, 1], [4, 9, 9, 9], [2, 5, 5, 9]]), torch.tensor([4, 1, 3]))
TAGS = torch.tensor([[-1, 1, -1, 0], [-1, 7, 7, 7], [2, 1, 0, 7]])  # padding may hold anything
DATA = tagged(Sequences(WORDS.values, WORDS.lengths, labels=TAGS))


def make(variant, num_tags=3, **options):
    pyro.set_rng_seed(0)
    return NeuralTagger(5, 6, num_tags, 8, **(VARIANTS[variant] | options)).double()


class Truth:
    """Everything about one sequence, from the table of all paths of states and of tags."""

    def __init__(self, hmm, values, length, observed=None):
        """Take the parameters of ``hmm`` as dense tables, and visit every pair of paths."""
        words, tags = values[:length].T.tolist()
        seen = [True] * length if observed is None else observed[:length].tolist()
        start, transition = hmm.log_initial.numpy(), hmm.log_transition.numpy()
        emission, log_tags = hmm.emission.parts[0].logits.numpy(), hmm.log_tags.numpy()
        size, count = log_tags.shape
        zeros = np.zeros(size)
        likelihood = np.stack([emission[:, w] if s else zeros for w, s in zip(words, seen)])
        free = oracle.all_paths(count, length)
        agrees = np.ones(len(free), bool)
        for t, tag in enumerate(tags):
            if seen[t] and tag >= 0:
                agrees &= free[:, t] == tag
        self.tags, self.states = free[agrees], oracle.all_paths(size, length)
        chain = oracle.joint(start, transition[None], likelihood, self.states)
        rows = np.stack([log_tags[self.states, y].sum(1) for y in self.tags], 1)
        self.table = chain[:, None] + rows  # (paths of states, paths of tags)
        self.evidence = oracle.log_sum(self.table.flatten())
        self.share = np.exp(self.table - self.evidence)

    def tag_probs(self, num_tags):
        weights = self.share.sum(0)
        return np.stack([
            [weights[self.tags[:, t] == tag].sum() for tag in range(num_tags)]
            for t in range(self.tags.shape[1])
        ])  # fmt: skip


@pytest.fixture(params=[False, True], ids=["whole", "gaps"])
def observed(request):
    """All steps, or some that are missing, one with a tag that then must not be read."""
    if request.param:
        return torch.tensor([[True, False, True, True], [True] * 4, [True, True, False, True]])
    return None


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_is_the_sum_over_all_paths_of_states_and_tags(variant, observed):
    with torch.no_grad():
        hmm = make(variant).eval()(DATA.lengths, observed)
        assert isinstance(hmm, TaggedHMM)
        evidence, probs = hmm.log_prob(DATA.values), hmm.tag_probs(DATA.values)
        path, tags = hmm.best_path(DATA.values), hmm.best_tags(DATA.values)
        states = hmm.posterior(DATA.values).state_probs
        for n, length in enumerate(DATA.lengths.tolist()):
            seen = None if observed is None else observed[n]
            truth = Truth(hmm, DATA.values[n], length, seen)
            assert evidence[n].item() == pytest.approx(truth.evidence, rel=1e-10)
            wanted = truth.tag_probs(3)
            np.testing.assert_allclose(probs[n, :length], wanted, atol=1e-12)
            assert tags[n, :length].tolist() == wanted.argmax(-1).tolist()
            best = np.unravel_index(truth.table.argmax(), truth.table.shape)
            assert path.states[n, :length].tolist() == truth.states[best[0]].tolist()
            assert path.tags[n, :length].tolist() == truth.tags[best[1]].tolist()
            weights = truth.share.sum(1)
            visits = one_hot(torch.tensor(truth.states), 5).double().numpy()
            np.testing.assert_allclose(
                states[n, :length], (visits * weights[:, None, None]).sum(0), atol=1e-12
            )
        for found in (probs, path.states, path.tags, tags):
            assert not found[~DATA.exists].any()


def test_without_tags_it_is_the_distribution_of_the_words():
    """The same parameters in a NeuralHMM, whose states and words have the same names."""
    module = make("two levels")
    words = NeuralHMM(5, 6, 8, **VARIANTS["two levels"]).double()
    words.load_state_dict({k: v for k, v in module.state_dict().items() if "tag" not in k})
    hmm = module.eval()(WORDS.lengths)
    plain = tagged(WORDS).values
    expected = words.eval()(WORDS.lengths).log_prob(WORDS.values)
    torch.testing.assert_close(hmm.log_prob(plain), expected)
    torch.testing.assert_close(hmm.words.log_prob(WORDS.values), expected)
    torch.testing.assert_close(hmm.viterbi(plain), hmm.words.viterbi(WORDS.values))


def test_tags_are_sampled_from_their_posterior():
    hmm = make("two levels").eval()(DATA.lengths)
    drawn = hmm.sample_tags(DATA.values, (20_000,))
    assert drawn.shape == (20_000, 3, 4)
    assert not drawn[:, ~DATA.exists].any()
    with torch.no_grad():
        for n, length in enumerate(DATA.lengths.tolist()):
            truth = Truth(hmm, DATA.values[n], length)
            powers = 3 ** np.arange(length)
            counts = np.bincount(drawn[:, n, :length].numpy() @ powers, minlength=3**length)
            probs = np.zeros(3**length)
            np.add.at(probs, truth.tags @ powers, truth.share.sum(0))
            assert oracle.looks_drawn_from(counts, probs)


@pytest.mark.parametrize("variant", ["one level", "two levels"])
def test_a_continued_sequence_is_the_rest_of_the_whole(variant):
    module = make(variant).eval()
    torch.manual_seed(0)
    words = torch.randint(6, (3, 5))
    tags = torch.full_like(words, -1)
    tags[:, 3] = torch.tensor([0, 2, -1])
    values = torch.stack([words, tags], -1)
    first, rest = values[:, :3], values[:, 3:]
    with torch.no_grad():
        start_time, whole = module(torch.full((3,), 3)), module(torch.full((3,), 5))
        hmm, _ = module.continue_from(
            torch.full((3,), 2), start_time.final_state(first), torch.arange(3)
        )
        close = torch.testing.assert_close
        close(hmm.log_prob_of_tags(rest), whole.log_prob_of_tags(values))
        close(hmm.tag_probs(rest)[:, -1], whole.tag_probs(values)[:, -1])
        close(hmm.posterior_states(rest).log_partition(), hmm.log_prob(rest))
        best, chain = hmm.best_path(rest), hmm.dense()
        emission, log_tags = hmm.emission.parts[0].logits, hmm.log_tags
        paths = torch.tensor(list(itertools.product(range(5), range(5), range(3), range(3))))
        a, b, x, y = paths.T
        for n, (one, two) in enumerate(words[:, 3:].tolist()):
            score = (
                chain.log_initial[n, a] + emission[a, one] + log_tags[a, x]
                + chain.log_transition[a, b] + emission[b, two] + log_tags[b, y]
            )  # fmt: skip
            if tags[n, 3] >= 0:
                score[x != tags[n, 3]] = -math.inf
            wanted = paths[score.argmax()]
            assert best.states[n].tolist() == wanted[:2].tolist()
            assert best.tags[n].tolist() == wanted[2:].tolist()
