"""Brown's clusters against merges and exchanges computed from scratch; other assignments."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrohmm import Sequences, datasets
from pyrohmm.infer.cooccurrence import count_pairs
from pyrohmm.language.clusters import (
    average_mutual_information,
    brown,
    isolate,
)
from pyrohmm.ops.pairs import Pairs

patient = settings(deadline=None, max_examples=100, derandomize=True, database=None)


@pytest.fixture(scope="module")
def english():
    """Pairs of 300 words of English, some 30,000 of them."""
    corpus = datasets.english_words(300)
    return count_pairs(corpus.data, 300)


def dense(pairs):
    table = np.zeros((pairs.num_symbols, pairs.num_symbols), np.int64)
    table[pairs.first, pairs.second] = pairs.counts
    return table


# The slow way ------------------------------------------------------------------------------------


def information(table):
    """Mutual information of the row and the column of a table of counts, times its sum."""
    found = 0.0
    for (a, b), n in np.ndenumerate(table):
        if n > 0:
            found += n * math.log(n * table.sum() / (table[a].sum() * table[:, b].sum()))
    return found


def between(table, groups):
    """Counts between groups of words, of the pairs of which both words are in a group."""
    return np.array([[table[np.ix_(a, b)].sum() for b in groups] for a in groups])


def best_merge(table, groups, tie):
    """Of all pairs of groups (in order of rank), the first whose merge leaves the most."""
    left = {}
    for one, other in itertools.combinations(range(len(groups)), 2):
        rest = [group for n, group in enumerate(groups) if n not in (one, other)]
        left[one, other] = information(between(table, [*rest, groups[one] + groups[other]]))
    return next(pair for pair in left if left[pair] >= max(left.values()) - tie)


def slow_brown(table, num_clusters, num_sweeps):
    """Groups of words, sorted by their path from the root, and the paths."""
    counts = np.maximum(table.sum(0), table.sum(1))
    order = [int(w) for w in np.argsort(-counts, kind="stable") if counts[w] > 0]
    tie = 1e-12 * table.sum()
    groups = []
    for word in order:
        groups.append([word])
        if len(groups) > num_clusters:
            one, other = best_merge(table, groups, tie)
            groups[one] += groups.pop(other)
    for _ in range(num_sweeps):
        for word in order:
            old = next(n for n, group in enumerate(groups) if word in group)
            if len(groups[old]) == 1:
                continue
            groups[old].remove(word)
            gains = []
            for group in groups:
                group.append(word)
                gains.append(information(between(table, groups)))
                group.pop()
            new = next(n for n, gain in enumerate(gains) if gain >= max(gains) - tie)
            groups[old if gains[new] <= gains[old] + tie else new].append(word)
    groups.sort(key=lambda group: min(map(order.index, group)))
    trees = [{"": group} for group in groups]
    merged = list(groups)
    while len(merged) > 1:
        one, other = best_merge(table, merged, tie)
        merged[one] = merged[one] + merged.pop(other)
        second = trees.pop(other)
        trees[one] = {
            bit + path: group
            for bit, tree in (("0", trees[one]), ("1", second))
            for path, group in tree.items()
        }
    paths = sorted(trees[0])
    return paths, [sorted(trees[0][path]) for path in paths]


@st.composite
def some_pairs(draw, most=7):
    size = draw(st.integers(1, most))
    words = st.integers(0, size - 1)
    counts = st.integers(1, draw(st.sampled_from([1, 6])))  # with 1, many merges lose the same
    pairs = draw(st.lists(st.tuples(words, words, counts), min_size=1, max_size=25))
    first, second, counts = (torch.tensor(column) for column in zip(*pairs))
    found = Pairs(first, second, counts, size)
    return found, draw(st.integers(1, len(torch.cat([first, second]).unique())))


@patient
@given(some_pairs(), st.integers(0, 2))
def test_merges_exchanges_and_tree_are_those_computed_from_scratch(drawn, num_sweeps):
    pairs, num_clusters = drawn
    found = brown(pairs, num_clusters, num_sweeps)
    paths, groups = slow_brown(dense(pairs), num_clusters, num_sweeps)
    assert found.paths == tuple(paths)
    seen = found.counts > 0
    for number, group in enumerate(groups):
        assert ((found.assignment == number) & seen).nonzero().flatten().tolist() == group


def same(one, other):
    return (
        one.assignment.equal(other.assignment)
        and one.paths == other.paths
        and one.counts.equal(other.counts)
    )


# Properties --------------------------------------------------------------------------------------


def test_information_by_hand():
    """Of two clusters that follow each other strictly, and of words drawn independently."""
    turns = count_pairs(Sequences.from_list([[0, 1, 2, 3, 0]]), 4)
    assert average_mutual_information(turns, torch.tensor([0, 1, 0, 1])) == pytest.approx(
        math.log(2)
    )
    assert average_mutual_information(turns, torch.zeros(4, dtype=torch.long)) == 0.0
    every = torch.cartesian_prod(torch.arange(3), torch.arange(3)).T
    even = Pairs(*every, torch.full((9,), 5), 3)
    assert average_mutual_information(even, torch.arange(3)) == pytest.approx(0.0, abs=1e-15)
    assert average_mutual_information(even, torch.arange(3)) >= 0.0


def test_sweeps_never_lower_the_information(english):
    found = [
        average_mutual_information(english, brown(english, 16, sweeps).assignment)
        for sweeps in range(6)
    ]
    assert found == sorted(found)
    assert found[-1] > 1.02 * found[0]
    assert found[-1] < average_mutual_information(english, torch.arange(300))


@pytest.mark.parametrize("num_clusters", [1, 2, 7, 299, 300])
def test_clusters_are_a_partition_and_paths_a_tree(english, num_clusters):
    found = brown(english, num_clusters)
    assert found.num_clusters == len(found.paths) == num_clusters
    assert found.assignment.dtype == torch.long
    assert found.assignment.unique().equal(torch.arange(num_clusters))
    assert found.paths == tuple(sorted(found.paths))
    assert sum(Fraction(1, 2 ** len(path)) for path in found.paths) == 1  # binary, and complete


def test_the_numbers_of_the_words_do_not_matter():
    """As long as no two are equally frequent."""
    draws = torch.rand(4000, generator=torch.Generator().manual_seed(2)).pow(3) * 14
    pairs = count_pairs(Sequences.from_list([draws.long()]), 14)
    found = brown(pairs, 5)
    assert len(set(found.counts.tolist())) == 14
    renamed = torch.randperm(14)
    other = brown(Pairs(renamed[pairs.first], renamed[pairs.second], pairs.counts, 14), 5)
    assert other.assignment[renamed].equal(found.assignment)
    assert other.paths == found.paths


def test_words_in_no_pair_go_to_the_cluster_that_occurs_least():
    pairs = Pairs(torch.tensor([1, 3, 5]), torch.tensor([3, 5, 1]), torch.tensor([9, 9, 2]), 7)
    found = brown(pairs, 3)
    rare = found.assignment[5 if found.counts[5] < found.counts[1] else 1]
    mass = torch.zeros(3, dtype=torch.long).index_add(0, found.assignment, found.counts)
    assert (found.assignment[[0, 2, 4, 6]] == mass.argmin()).all()
    assert rare == mass.argmin()


# Other assignments -------------------------------------------------------------------------------


def test_words_with_a_cluster_of_their_own():
    assignment = torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32)
    kept = assignment.clone()
    assert isolate(assignment, [4]).tolist() == [0, 0, 1, 2, 3]
    assert isolate(assignment, torch.tensor([2])).tolist() == [0, 0, 2, 1, 1]  # as it had before
    assert isolate(assignment, [0, 1, 2]).tolist() == [1, 1, 1, 0, 0]
    assert isolate(assignment, range(5)).tolist() == [0] * 5
    assert isolate(isolate(assignment, [4]), [1]).tolist() == [0, 4, 1, 2, 3]
    assert assignment.equal(kept)
