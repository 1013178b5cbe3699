"""Chains mixed with an n-gram: against sums over all paths, and over all sequences."""

import itertools
import math

import pytest
import torch

from pyrohmm import BlockHMM, blocks, queries
from pyrohmm.language import NGramBlockHMM, NGramProbs, NGramWeights
from pyrohmm.ops.blocks.inner_products import InnerProductTransition, log_emission

SIZES, BLOCK = [2, 1, 3], torch.tensor([0, 1, 2, 0, 2])  # states of each block, block of each word
V, K, B = len(BLOCK), sum(SIZES), len(SIZES)
OWNER = torch.arange(B).repeat_interleave(torch.tensor(SIZES))


class Case:
    """A random chain and a random bigram, mixed for some sequences."""

    def __init__(self, lengths, seed=0, two_level=True, scale=1.0):
        torch.manual_seed(seed)
        draw = lambda *shape: (torch.randn(shape, dtype=torch.float64) * scale).requires_grad_()  # noqa: E731
        self.blocks = blocks.from_clusters(BLOCK, torch.tensor(SIZES))
        self.start, self.leave, self.enter, self.scores = (
            draw(K),
            draw(K, 2),
            draw(K, 2),
            draw(K, B),
        )
        self.emit, self.words, self.bias = draw(K, 2), draw(V, 2), draw(V)
        self.weights = NGramWeights(draw(2, B + 1), draw(2, B))
        self.bigram = torch.randn(V + 1, V, dtype=torch.float64).softmax(-1)  # the last: at first
        self.two_level = two_level
        self.lengths = torch.tensor(lengths)
        self.values = torch.randint(V, (len(lengths), max(lengths)))

    @property
    def parameters(self):
        network = [self.start, self.leave, self.enter, self.emit, self.words, self.bias]
        return [*network, *self.weights, *([self.scores] if self.two_level else [])]

    def ngram(self, values):
        """The bigram's probabilities; classes are the parity of the word before, and of a sum."""
        before = torch.cat([torch.full_like(values[:, :1], V), values[:, :-1]], 1)
        probs, block = self.bigram[before], BLOCK[values]
        of_blocks = probs @ torch.nn.functional.one_hot(BLOCK, B).double()
        share = of_blocks.gather(-1, block.unsqueeze(-1)).squeeze(-1)
        word = probs.gather(-1, values.unsqueeze(-1)).squeeze(-1)
        return NGramProbs(share.log(), (word / share).log(), before % 2, (before + block) % 2)

    def chain(self, lengths):
        scores = self.scores if self.two_level else None
        transition = InnerProductTransition(self.leave, self.enter, self.blocks, scores)
        table = log_emission(self.emit, self.words, self.bias, self.blocks)
        return BlockHMM(self.start.log_softmax(-1), transition, table, self.blocks, lengths)

    def hmm(self, values=None, lengths=None):
        values = self.values if values is None else values
        lengths = self.lengths if lengths is None else lengths
        return NGramBlockHMM(self.chain(lengths), self.ngram(values), self.weights)


def path_probs(hmm, values):
    """p(x, z) of all K^T paths of one sequence (T,), slowly; by the definition."""
    words, ngram, weights = hmm.words, hmm.ngram, hmm.weights
    initial, matrix, emission = words.log_initial, words.log_transition, words.emission.probs
    mu, nu = weights.block.sigmoid(), weights.symbol.sigmoid()

    def enter(row, state, t, before):
        """A transition by the probabilities ``row`` of all states."""
        block = OWNER[state]
        inside = row[block == OWNER]
        share = inside.sum()
        within = row[state] / share if share > 0 else 1 / len(inside)
        weight = mu[ngram.block_class[0, t], before]
        return ((1 - weight) * share + weight * ngram.log_block[0, t].exp()) * within

    paths = list(itertools.product(range(K), repeat=len(values)))
    probs = []
    for path in paths:
        prob = torch.ones((), dtype=torch.float64)
        for t, (state, word) in enumerate(zip(path, values.tolist())):
            if OWNER[state] != BLOCK[word]:
                prob = prob * 0
                break
            row = initial.exp() if t == 0 else matrix[path[t - 1]].exp()
            prob = prob * enter(row, state, t, B if t == 0 else int(OWNER[path[t - 1]]))
            weight = nu[ngram.symbol_class[0, t], OWNER[state]]
            of_ngram = ngram.log_symbol[0, t].exp()
            prob = prob * ((1 - weight) * emission[state, word] + weight * of_ngram)
        probs.append(prob)
    return torch.tensor(paths), torch.stack(probs)


def of_one(case, n):
    """The n-th sequence by itself, without padding, and its table of paths."""
    length = case.lengths[n : n + 1]
    values = case.values[n : n + 1, : int(length)]
    return path_probs(case.hmm(values, length), values[0])


@pytest.mark.parametrize("two_level", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_the_probabilities_of_all_sequences_sum_to_one(num_steps, two_level, engine):
    values = torch.tensor(list(itertools.product(range(V), repeat=num_steps)))
    case = Case([num_steps], two_level=two_level)
    found = case.hmm(values, torch.full((len(values),), num_steps)).log_prob(values)
    torch.testing.assert_close(found.exp().sum(), torch.tensor(1.0).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", [[1], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("two_level", [True, False])
def test_queries_are_those_of_the_table_of_all_paths(two_level, lengths, engine):
    case = Case(lengths, seed=1, two_level=two_level)
    hmm, values = case.hmm(), case.values
    evidence, posterior = hmm.log_prob(values), hmm.posterior(values)
    filtered, best = hmm.filtered(values), hmm.viterbi(values)
    entropy = queries.path_entropy(hmm, values)
    predictive = queries.predictive_log_prob(hmm, values)
    three, joint = queries.k_best(hmm, values, 3)
    for n, length in enumerate(lengths):
        paths, probs = of_one(case, n)
        probs = probs.detach()
        close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # noqa: E731
        close(evidence[n].detach(), probs.sum().log())
        share = probs / probs.sum()
        for t in range(length):
            at = torch.zeros(K, dtype=torch.float64).index_add_(0, paths[:, t], share)
            close(posterior.state_probs[n, t], at)
        counts = torch.zeros(K, K, dtype=torch.float64)
        for t in range(length - 1):
            counts.index_put_((paths[:, t], paths[:, t + 1]), share, accumulate=True)
        close(posterior.transitions[n], counts)
        assert best[n, :length].tolist() == paths[probs.argmax()].tolist()
        close(entropy[n], torch.special.entr(share).sum())
        close(joint[n], probs.sort(descending=True).values[:3].log())
        assert three[n, 0, :length].tolist() == best[n, :length].tolist()
        before = 0.0
        for t in range(length):  # of the beginning alone
            begun = torch.tensor([t + 1])
            part = values[n : n + 1, : t + 1]
            some, table = path_probs(case.hmm(part, begun), part[0])
            table = table.detach()
            last = torch.zeros(K, dtype=torch.float64).index_add_(0, some[:, t], table)
            close(filtered[n, t], last / last.sum())
            close(predictive[n, t], table.sum().log() - before)
            before = table.sum().log()
        final = hmm.final_state(values)
        kept = final.states[n] >= 0
        close(final.log_probs[n][kept].exp(), (last / last.sum())[final.states[n][kept]])


@pytest.mark.parametrize("two_level", [True, False])
def test_gradients_are_those_of_the_sum_over_paths(two_level, engine):
    case = Case([3, 1, 2], seed=2, two_level=two_level)
    weights = torch.randn(3, dtype=torch.float64)
    found = torch.autograd.grad((case.hmm().log_prob(case.values) * weights).sum(), case.parameters)
    slow = torch.stack([of_one(case, n)[1].sum().log() for n in range(3)])
    wanted = torch.autograd.grad((slow * weights).sum(), case.parameters)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-11)


def test_without_weight_it_is_the_chain_and_with_all_of_it_the_ngram(engine):
    case = Case([3, 1, 2], seed=3)
    hmm = case.hmm()
    none = NGramWeights(*(torch.full_like(part, -math.inf) for part in case.weights))
    chain = NGramBlockHMM(hmm.words, hmm.ngram, none).log_prob(case.values)
    torch.testing.assert_close(chain, hmm.words.log_prob(case.values), rtol=1e-12, atol=1e-12)
    every = NGramWeights(*(torch.full_like(part, math.inf) for part in case.weights))
    alone = NGramBlockHMM(hmm.words, hmm.ngram, every).log_prob(case.values)
    wanted = ((hmm.ngram.log_block + hmm.ngram.log_symbol) * hmm.exists).sum(-1)
    torch.testing.assert_close(alone, wanted, rtol=1e-12, atol=1e-12)


def test_hard_zeros_are_entered_by_the_ngram_alone(engine):
    """No path begins in the last block, none goes from the first to the second; nor is NaN made."""
    case = Case([3, 2, 3], seed=4)
    case.values = torch.tensor([[2, 0, 1], [3, 1, 0], [4, 4, 2]])
    with torch.no_grad():
        case.start[3:] = -math.inf
        case.scores[:2, 1] = -math.inf
    hmm = case.hmm()
    evidence = hmm.log_prob(case.values)
    wanted = torch.stack([of_one(case, n)[1].sum() for n in range(3)]).log()
    torch.testing.assert_close(evidence, wanted, rtol=1e-10, atol=1e-12)
    for gradient in torch.autograd.grad(evidence.sum(), case.parameters):
        assert bool(gradient.isfinite().all())
    none = NGramWeights(*(torch.full_like(part, -math.inf) for part in case.weights))
    hmm = case.hmm()
    impossible = NGramBlockHMM(hmm.words, hmm.ngram, none).log_prob(case.values)
    assert bool(impossible.isneginf().all())
    assert all(
        bool(part.isfinite().all())
        for part in torch.autograd.grad(impossible.sum(), case.parameters[:6], allow_unused=True)
        if part is not None
    )


def test_labels_keep_paths(engine):
    case = Case([3, 1, 2], seed=5)
    case.values = torch.tensor([[2, 0, 4], [2, 0, 0], [1, 3, 0]])
    labels = torch.tensor([[-1, 1, -1], [4, -1, -1], [-1, -1, 0]])
    hmm = case.hmm().restrict(labels)
    evidence, states = hmm.log_prob(case.values), hmm.posterior(case.values).state_probs
    for n, length in enumerate([3, 1, 2]):
        paths, probs = of_one(case, n)
        keeps = ((labels[n, :length] < 0) | (paths == labels[n, :length])).all(-1)
        torch.testing.assert_close(evidence[n], probs[keeps].sum().log())
    torch.testing.assert_close(states[0, 1, 1], torch.tensor(1.0).double())


def test_what_leaves_the_range_of_float32_is_exact(engine):
    """Products of weights far below one."""
    case = Case([6, 4], seed=7, scale=30.0)
    slow = case.hmm().log_prob(case.values)
    for name in ("start", "leave", "enter", "scores", "emit", "words", "bias"):
        setattr(case, name, getattr(case, name).detach().float())
    case.weights = NGramWeights(*(part.detach().float() for part in case.weights))
    torch.testing.assert_close(
        case.hmm().log_prob(case.values).double(), slow.detach(), rtol=2e-4, atol=1e-3
    )


def test_what_stands_at_padded_steps_is_not_read(engine):
    case = Case([3, 1, 2])
    hmm = case.hmm()
    padded = ~hmm.exists
    junk = [part.masked_fill(padded, math.nan) for part in hmm.ngram[:2]]
    junk += [part.masked_fill(padded, -7) for part in hmm.ngram[2:]]
    again = NGramBlockHMM(hmm.words, NGramProbs(*junk), hmm.weights)
    found, wanted = (
        torch.autograd.grad(each.log_prob(case.values).sum(), [*case.weights])
        for each in (again, hmm)
    )
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other)
