r"""Brown clusters of words, which maximise the mutual information of neighbours.

``V`` words, ``C`` clusters, ``M`` distinct pairs that occur, ``N`` pairs in all. An assignment is
``(V,)`` integers, the cluster of each word; clusters are numbered from 0, and none is empty.

Brown's clusters keep the average mutual information of the clusters of adjacent words,

.. math:: \sum_{ab} \frac{n_{ab}}{N} \log \frac{n_{ab} N}{n_{a \cdot} n_{\cdot b}}
          = \log N + \frac1N \Big( \sum_{ab} f(n_{ab}) - \sum_a f(n_{a \cdot})
          - \sum_b f(n_{\cdot b}) \Big), \qquad f(n) = n \log n.

Each f is rounded to a multiple of a power of two. Their sums are then exact: a table that is
brought up to date merge by merge equals one that is computed anew, and the order of summation, or
whether loops are compiled, changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.special import entr
from torch import Tensor

from .._checks import check_kind, check_range, check_shape, check_size
from ..data.parts import parts_of
from ..data.vocabulary import Vocabulary
from ..infer.cooccurrence import count_pairs
from ..ops import brown_merges
from ..ops.pairs import Pairs
from .text import END, Sentences, check_ends


class Clusters(NamedTuple):
    """Brown clusters of words, and the binary tree of their merges.

    Attributes:
        assignment: ``(V,)`` long, the cluster of each word.
        paths: C strings of 0 and 1, the way from the root of the tree to each cluster. They are
            sorted, so that neighbours in number are neighbours in the tree.
        counts: ``(V,)`` long, how often each word occurs in pairs: as the first or as the second of
            them, whichever is more.
    """

    assignment: Tensor
    paths: tuple[str, ...]
    counts: Tensor

    @property
    def num_clusters(self) -> int:
        """C, the number of clusters."""
        return len(self.paths)


# Brown's clusters --------------------------------------------------------------------------------


def brown(
    pairs: Pairs, num_clusters: int, num_sweeps: int = 20, progress: bool | None = None
) -> Clusters:
    """Cluster words so that the mutual information of neighbouring clusters is large.

    Words are added by falling count. The first C have clusters of their own; each further one is
    added, and of all pairs of the C + 1 clusters those two are merged that lose least of the
    average mutual information among the words so far. Then, in sweeps over all words, each goes
    to the cluster where the information is largest, until none does; the only word of a cluster
    stays. Last, the clusters are merged to one in the same way, which makes the tree.

    Clusters rank by their most frequent word, and of equally frequent words that with the smaller
    number is first. Of several merges that lose the same, that whose first cluster ranks highest is
    made, and of those the one whose second does; of several exchanges of equal gain, that to the
    cluster which ranked highest before the sweeps. In the tree, 0 is the branch of the higher rank.
    Words that are in no pair go to the cluster whose words occur least.

    A merge takes O(C²) operations at most, for rare words far fewer, and a sweep O(M C).

    Args:
        pairs: Counts of adjacent words, as :func:`pyrohmm.cooccurrence.count_pairs` makes them.
        num_clusters: C, at most the number of words that occur in pairs.
        num_sweeps: The most sweeps over the words. With 0 these are the clusters of Brown et al.
            (1992); with more the information is larger, and often by several hundredths of a nat.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.

    Raises:
        ValueError: If there are fewer words than clusters.

    References:
        Class-Based n-gram Models of Natural Language (Brown et al., 1992),
        https://aclanthology.org/J92-4003
        Semi-Supervised Learning for Natural Language (Liang, 2005), chapter 4, for the window of
        C + 1 clusters and its tables.
        Algorithms for Bigram and Trigram Word Clustering (Martin, Liermann and Ney, 1998), for the
        sweeps.

    Example:
        >>> words = Sequences.from_list([[0, 2, 1, 3], [0, 3, 1, 2], [1, 2, 0, 2], [1, 3, 0, 3]])
        >>> found = brown(cooccurrence.count_pairs(words, 5), 2)
        >>> found.assignment, found.paths  # word 4 is in no pair
        (tensor([0, 0, 1, 1, 0]), ('0', '1'))
    """
    check_size("num_clusters", num_clusters)
    check_size("num_sweeps", num_sweeps, 0)
    check_kind("pairs", pairs, Pairs, "Pairs", "Count them: cooccurrence.count_pairs(data, V).")
    first, second, numbers = _columns(pairs)
    counts = np.zeros((2, pairs.num_symbols), np.int64)
    np.add.at(counts[0], first, numbers)
    np.add.at(counts[1], second, numbers)
    counts = counts.max(0)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    if num_clusters > len(order):
        raise ValueError(
            f"num_clusters must be at most the number of words that occur in pairs, {len(order)}; "
            f"got {num_clusters}. Ask for fewer."
        )
    rank = np.empty(pairs.num_symbols, np.int64)
    rank[order] = np.arange(len(order))
    words = brown_merges.Words(rank[first], rank[second], numbers, len(order))
    terms = brown_merges.Terms(pairs.total)
    disable = None if progress is None else not progress
    labels = brown_merges.merge_words(words, num_clusters, terms, disable)
    brown_merges.exchange(words, labels, num_clusters, num_sweeps, terms, disable)
    paths = brown_merges.tree(words, labels, num_clusters, terms)
    number = {path: n for n, path in enumerate(sorted(paths))}
    labels = np.array([number[path] for path in paths])[labels]
    assignment = np.full(pairs.num_symbols, np.bincount(labels, counts[order]).argmin())
    assignment[order] = labels
    device = pairs.first.device
    return Clusters(
        torch.from_numpy(assignment).to(device),
        tuple(sorted(paths)),
        torch.from_numpy(counts).to(device),
    )


def average_mutual_information(pairs: Pairs, assignment: Tensor) -> float:
    """Mutual information of the clusters of two adjacent words, in nats a pair.

    Args:
        pairs: Counts of adjacent words.
        assignment: ``(V,)`` integers, at least 0. With ``torch.arange(V)`` the result is that of
            the words themselves, above which no clusters come.

    Example:
        >>> pairs = cooccurrence.count_pairs(Sequences.from_list([[0, 1, 2, 3, 0]]), 4)
        >>> clusters.average_mutual_information(pairs, torch.tensor([0, 1, 0, 1]))  # log 2
        0.6931471805599453
    """
    check_shape("assignment", assignment, (pairs.num_symbols,), "(V,)")
    _, labels = np.unique(assignment.cpu().numpy(), return_inverse=True)
    first, second, numbers = _columns(pairs)
    rows, columns = labels[first], labels[second]
    _, cells = np.unique(rows * (labels.max() + 1) + columns, return_inverse=True)
    tables = (np.bincount(places, numbers) / pairs.total for places in (rows, columns, cells))
    of_rows, of_columns, joint = (entr(shares).sum() for shares in tables)
    return max(0.0, float(of_rows + of_columns - joint))


# Other assignments, and states for them -----------------------------------------------------------


def isolate(assignment: Tensor, words: Tensor | Sequence[int]) -> Tensor:
    """Move words to a separate cluster, the last.

    Clusters that are empty then are dropped, and the others keep their order.

    Args:
        assignment: ``(V,)`` integers, the cluster of each word.
        words: ``(n,)`` integers from 0 to V - 1, at least one, such as that of ``<eos>``.

    Returns:
        ``(V,)`` long.

    Example:
        >>> clusters.isolate(torch.tensor([0, 0, 1, 2, 2]), [0, 2])
        tensor([2, 0, 2, 1, 1])
    """
    words = torch.as_tensor(words, device=assignment.device)
    check_range("words", words, len(assignment), "V - 1", "V is that of assignment.")
    changed = assignment.long().clone()
    changed[words.long()] = changed.max() + 1
    return changed.unique(return_inverse=True)[1]


def find_clusters(
    data: Sentences,
    vocabulary: Vocabulary,
    num_clusters: int,
    progress: bool | None = None,
) -> Tensor:
    """Brown clusters of words, the last of which is ``<eos>`` alone: ``(V,)`` long.

    They are C - 1 clusters by :func:`brown`, out of which ``<eos>`` is taken.
    Where it has been alone, one would be missing; they are C clusters then, and if it is not alone
    among these, the two of them that are deepest in the tree are joined.

    Args:
        data: Sentences that end in ``<eos>``, as :func:`pyrohmm.language.encode` makes them, or
            :func:`pyrohmm.language.write_corpus`.
        vocabulary: The V words.
        num_clusters: C, at least 2. Where fewer words than that occur, ``<eos>`` among them, there
            are fewer clusters.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.

    Raises:
        TypeError: If ``data`` are not :class:`Sequences` of integers.
        ValueError: If a sentence does not end in ``<eos>``, or has it earlier; no sentence has a
            word; or there are fewer than two clusters.

    Example:
        >>> vocabulary = language.count_words(lines := ["a cat", "a dog", "the cat"])
        >>> data = language.encode(lines, vocabulary)
        >>> found = find_clusters(data, vocabulary, 3)
        >>> dict(zip(vocabulary, found.tolist()))  # <unk> does not occur
        {'<unk>': 1, '<eos>': 2, 'a': 0, 'cat': 1, 'dog': 1, 'the': 0}
    """
    check_size("num_clusters", num_clusters, 2)
    check_ends("data", vocabulary, data)
    if int(data.lengths.max()) < 2:
        text = "data must have a word in some sentence; all sentences are empty"
        raise ValueError(f"{text}. Look at how it was read.")
    pairs = count_pairs(parts_of(data), len(vocabulary))
    present = len(torch.cat([pairs.first, pairs.second]).unique())
    end = vocabulary.encode([END])
    assignment = brown(pairs, min(num_clusters - 1, present), progress=progress).assignment
    if num_clusters <= present and _is_alone(end, assignment):
        assignment, paths, _ = brown(pairs, num_clusters, progress=progress)
        if not _is_alone(end, assignment):
            deepest = max(range(num_clusters), key=lambda n: len(paths[n]))
            assignment[assignment == deepest + 1] = deepest  # its sister comes next
    return isolate(assignment, end)


def _is_alone(word: Tensor, assignment: Tensor) -> bool:
    return int((assignment == assignment[word]).sum()) == 1


def allocate(num_states: int, assignment: Tensor) -> Tensor:
    """Divide states equally among clusters; the first have one more where K is no multiple of C.

    Args:
        num_states: K, at least C.
        assignment: ``(V,)`` integers, the cluster of each word.

    Returns:
        ``(C,)`` long.

    Example:
        >>> clusters.allocate(10, torch.tensor([0, 1, 1, 2]))
        tensor([4, 3, 3])
    """
    count = int(assignment.max()) + 1
    check_size("num_states", num_states, count)
    return num_states // count + (torch.arange(count) < num_states % count).long()


def _columns(pairs: Pairs) -> tuple[np.ndarray, ...]:
    return tuple(part.cpu().numpy() for part in (pairs.first, pairs.second, pairs.counts))
