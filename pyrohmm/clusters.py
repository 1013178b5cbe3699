r"""Clusters of words: Brown's, which keep what neighbours say about each other, and random ones.

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

import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.special import xlogy
from torch import Tensor
from tqdm import tqdm

from . import _lookup
from ._checks import check_integers, check_shape, check_size
from .cooccurrence import Pairs

LISTED = 1 << 22  # numbers whose f is listed; above, it is computed each time
TIE = 1e-12  # nats of average mutual information; merges and moves that differ by less are equal


class Clusters(NamedTuple):
    """Clusters of words, and the binary tree in which they were merged to one.

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
        """C."""
        return len(self.paths)


# Brown's clusters --------------------------------------------------------------------------------


def brown(
    pairs: Pairs, num_clusters: int, num_sweeps: int = 20, progress: bool | None = None
) -> Clusters:
    """Cluster words so that the clusters of neighbours say much about each other.

    The words enter by falling count. The first C have clusters of their own; each further one is
    added, and of all pairs of the C + 1 clusters those two are merged that lose least of the
    average mutual information among the words so far. Then, in sweeps over all words, each moves
    to the cluster where the information is largest, until none does; the only word of a cluster
    stays. Last, the clusters are merged to one in the same way, which makes the tree.

    Clusters rank by their most frequent word, and of equally frequent words that with the smaller
    number is first. Of several merges that lose the same, that whose first cluster ranks highest is
    made, and of those the one whose second does; of several moves that gain the same, that to the
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
        >>> found = clusters.brown(cooccurrence.count_pairs(words, 5), 2)
        >>> found.assignment, found.paths  # word 4 is in no pair
        (tensor([0, 0, 1, 1, 0]), ('0', '1'))
    """
    check_size("num_clusters", num_clusters)
    if isinstance(num_sweeps, bool) or not isinstance(num_sweeps, int):
        raise TypeError(f"num_sweeps must be an int; got {type(num_sweeps).__name__}.")
    if num_sweeps < 0:
        raise ValueError(f"num_sweeps must be at least 0; got {num_sweeps}.")
    first, second, numbers = _columns(pairs)
    counts = np.zeros((2, pairs.num_symbols), np.int64)
    np.add.at(counts[0], first, numbers)
    np.add.at(counts[1], second, numbers)
    counts = counts.max(0)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    if num_clusters > len(order):
        raise ValueError(
            f"num_clusters must be at most the number of words that occur in pairs, {len(order)}; "
            f"got {num_clusters}."
        )
    rank = np.empty(pairs.num_symbols, np.int64)
    rank[order] = np.arange(len(order))
    words = _Words(rank[first], rank[second], numbers, len(order))
    terms = _Terms(pairs.total)
    disable = None if progress is None else not progress
    labels = _merge_words(words, num_clusters, terms, disable)
    _exchange(words, labels, num_clusters, num_sweeps, terms, disable)
    paths = _tree(words, labels, num_clusters, terms)
    number = {path: n for n, path in enumerate(sorted(paths))}
    labels = np.array([number[path] for path in paths])[labels]
    mass = np.bincount(labels, counts[order])
    assignment = np.full(pairs.num_symbols, mass.argmin())
    assignment[order] = labels
    device = pairs.first.device
    return Clusters(
        torch.from_numpy(assignment).to(device),
        tuple(sorted(paths)),
        torch.from_numpy(counts).to(device),
    )


def average_mutual_information(pairs: Pairs, assignment: Tensor) -> float:
    """What the cluster of a word says about that of the next, in nats a pair.

    Args:
        pairs: Counts of adjacent words.
        assignment: ``(V,)`` integers, at least 0. With ``torch.arange(V)`` the result is that of
            the words themselves, above which no clusters come.

    Example:
        >>> pairs = cooccurrence.count_pairs(Sequences.from_list([[0, 1, 2, 3, 0]]), 4)
        >>> clusters.average_mutual_information(pairs, torch.tensor([0, 1, 0, 1]))  # log 2
        0.6931471805599453
    """
    _check_assignment(assignment)
    check_shape("assignment", assignment, (pairs.num_symbols,), "(V,)")
    _, labels = np.unique(assignment.cpu().numpy(), return_inverse=True)
    first, second, numbers = _columns(pairs)
    first, second = labels[first], labels[second]
    size = int(labels.max()) + 1
    keys, places = np.unique(first * size + second, return_inverse=True)
    cells = np.bincount(places, numbers)
    rows, columns = (np.bincount(side, numbers, size) for side in (first, second))
    ratios = cells * pairs.total / (rows[keys // size] * columns[keys % size])
    return float((cells * np.log(ratios)).sum() / pairs.total)


# Other assignments, and states for them -----------------------------------------------------------


def uniform(
    num_symbols: int, num_clusters: int, generator: torch.Generator | None = None
) -> Tensor:
    """Put each word into a cluster drawn uniformly, ``(V,)`` long.

    Should some of the clusters be empty then, as many words of others are drawn and put into them.

    Args:
        num_symbols: V.
        num_clusters: C, at most V.
        generator: Source of randomness on the CPU; torch's global one by default.

    Raises:
        ValueError: If there are fewer words than clusters.

    Example:
        >>> clusters.uniform(8, 3, torch.Generator().manual_seed(0))
        tensor([2, 0, 2, 0, 1, 0, 1, 1])
    """
    check_size("num_symbols", num_symbols)
    check_size("num_clusters", num_clusters)
    if num_clusters > num_symbols:
        raise ValueError(
            f"num_clusters must be at most the number of symbols, {num_symbols}; got "
            f"{num_clusters}."
        )
    drawn = torch.randint(num_clusters, (num_symbols,), generator=generator)
    order = torch.randperm(num_symbols, generator=generator)
    found, kept = np.unique(drawn[order].numpy(), return_index=True)  # a word that each one keeps
    spare = np.delete(order.numpy(), kept)
    empty = np.setdiff1d(np.arange(num_clusters), found)
    drawn[torch.from_numpy(spare[: len(empty)])] = torch.from_numpy(empty)
    return drawn


def with_own(assignment: Tensor, words: Tensor | Sequence[int]) -> Tensor:
    """Take words out of their clusters and give them one of their own, the last.

    Clusters that are empty then are dropped, and the others keep their order.

    Args:
        assignment: ``(V,)`` integers, the cluster of each word.
        words: ``(n,)`` integers from 0 to V - 1, at least one, such as that of ``<eos>``.

    Returns:
        ``(V,)`` long.

    Example:
        >>> clusters.with_own(torch.tensor([0, 0, 1, 2, 2]), [0, 2])
        tensor([2, 0, 2, 1, 1])
    """
    _check_assignment(assignment)
    words = torch.as_tensor(words, device=assignment.device)
    if words.dim() != 1 or len(words) == 0:
        raise ValueError(
            f"words must have shape (n,), with at least one word; got shape {tuple(words.shape)}."
        )
    check_integers("words", words)
    low, high = (int(end) for end in torch.aminmax(words))
    if low < 0 or high >= len(assignment):
        raise ValueError(
            f"words must lie between 0 and V - 1 = {len(assignment) - 1}; got values from {low} to "
            f"{high}."
        )
    changed = assignment.long().clone()
    changed[words.long()] = changed.max() + 1
    return changed.unique(return_inverse=True)[1]


def allocate(
    num_states: int, assignment: Tensor, counts: Tensor | None = None, power: float = 1.0
) -> Tensor:
    """Divide states among clusters, equally or by how often their words occur.

    What is not whole goes by the largest remainders, to the first clusters where they are equal.
    Clusters whose share is below one get one state, and the others divide the rest.

    Args:
        num_states: K, at least C.
        assignment: ``(V,)`` integers, the cluster of each word.
        counts: ``(V,)`` integers, at least 0, how often each word occurs; by default the clusters
            get equally many.
        power: From 0 to 1. A cluster's share is the sum of its counts to this power: in proportion
            by default; 0.5, the root, leaves more to rare clusters.

    Returns:
        ``(C,)`` long, at least 1 each, K in sum.

    Raises:
        ValueError: If there are fewer states than clusters, a cluster has no word, no word occurs,
            or the power is out of range.

    Example:
        >>> assignment = torch.tensor([0, 1, 1, 2])
        >>> clusters.allocate(10, assignment)
        tensor([4, 3, 3])
        >>> counts = torch.tensor([70, 20, 9, 1])
        >>> clusters.allocate(10, assignment, counts)
        tensor([6, 3, 1])
        >>> clusters.allocate(10, assignment, counts, power=0.5)
        tensor([5, 4, 1])
    """
    check_size("num_states", num_states)
    _check_assignment(assignment)
    sizes = torch.bincount(assignment.long()).cpu().numpy()
    if not sizes.all():
        raise ValueError(
            f"assignment must have a word in every cluster; cluster {sizes.argmin()} of "
            f"{len(sizes)} has none. Call assignment.unique(return_inverse=True)[1] to drop such."
        )
    if num_states < len(sizes):
        raise ValueError(
            f"num_states must be at least the number of clusters, {len(sizes)}; got {num_states}."
        )
    if not 0 <= power <= 1:
        raise ValueError(f"power must be from 0, equal shares, to 1, in proportion; got {power}.")
    mass: np.ndarray = np.ones(len(sizes))
    if counts is not None:
        check_integers("counts", counts)
        check_shape("counts", counts, tuple(assignment.shape), "(V,)")
        if int(counts.min()) < 0 or int(counts.max()) == 0:
            raise ValueError(
                "counts must be at least 0, and not all of them 0; got values from "
                f"{int(counts.min())} to {int(counts.max())}."
            )
        mass = np.bincount(assignment.cpu().numpy(), counts.cpu().numpy()) ** power
    out = np.ones(len(sizes), np.int64)
    large, left = np.arange(len(sizes)), num_states
    while True:
        share = mass[large] * left  # in units of one over the sum of their masses
        total = mass[large].sum()
        if (share >= total).all():
            break
        large, left = large[share >= total], left - int((share < total).sum())
    whole, remainder = np.divmod(share, total)
    out[large] = whole
    most = np.argsort(-remainder, kind="stable")[: left - int(out[large].sum())]
    out[large[most]] += 1
    return torch.from_numpy(out).to(assignment.device)


def _check_assignment(assignment: Tensor) -> None:
    check_integers("assignment", assignment)
    if assignment.dim() != 1 or len(assignment) == 0 or int(assignment.min()) < 0:
        raise ValueError(
            "assignment must be (V,) numbers of clusters from 0, of at least one word; got shape "
            f"{tuple(assignment.shape)}"
            + (f", least value {int(assignment.min())}." if assignment.numel() else ".")
        )


# Files -------------------------------------------------------------------------------------------


def write_paths(
    path: str | os.PathLike[str], clusters: Clusters, vocabulary: Sequence[str]
) -> None:
    """Write a line for each word: the path of its cluster, the word, and its count, by tabs.

    This is the form of Liang's ``wcluster`` and of what reads its output. Lines are sorted by path,
    then by falling count.

    Args:
        path: The file, which is replaced.
        clusters: What to write.
        vocabulary: The V words, such as a :class:`pyrohmm.readers.Vocabulary`.

    Raises:
        ValueError: If there are not V words, or one of them has a tab or the end of a line in it.
    """
    if len(vocabulary) != len(clusters.assignment):
        raise ValueError(
            f"vocabulary must have V = {len(clusters.assignment)} words, as the clusters have; got "
            f"{len(vocabulary)}."
        )
    for word in vocabulary:
        if any(mark in word for mark in "\t\n\r"):
            raise ValueError(
                f"vocabulary must not have tabs or ends of lines in its words; got {word!r}."
            )
    assignment, counts = (part.cpu().numpy() for part in (clusters.assignment, clusters.counts))
    lines = [
        f"{clusters.paths[assignment[word]]}\t{vocabulary[word]}\t{counts[word]}\n"
        for word in np.lexsort((-counts, assignment))
    ]
    Path(path).write_bytes("".join(lines).encode())


def read_paths(
    path: str | os.PathLike[str], vocabulary: Sequence[str], unlisted: int | None = None
) -> Clusters:
    """Read clusters as :func:`write_paths` or Liang's ``wcluster`` writes them.

    Words that are not in the vocabulary are passed over, and so are clusters of which no word is.

    Args:
        path: The file.
        vocabulary: The V words to be clustered, such as a :class:`pyrohmm.readers.Vocabulary`.
        unlisted: Which cluster takes words that the file does not list: its place among the sorted
            paths, from the end if negative. (They may be given another by :func:`with_own`.)

    Raises:
        ValueError: If a line is malformed, a word is listed twice, a path leads on from another, no
            word is in the vocabulary, or some are not listed and ``unlisted`` does not say where
            they go; or if the vocabulary has a word twice.

    Example:
        >>> path = getfixture("tmp_path") / "paths"
        >>> _ = path.write_text("0" + chr(9) + "the" + chr(9) + "7" + chr(10)
        ...                     + "10" + chr(9) + "cat" + chr(9) + "2" + chr(10))
        >>> clusters.read_paths(path, ["the", "cat", "<eos>"], unlisted=-1)
        Clusters(assignment=tensor([0, 1, 1]), paths=('0', '10'), counts=tensor([7, 2, 0]))
    """
    codes = {word: code for code, word in enumerate(vocabulary)}
    if len(codes) < len(vocabulary):
        raise ValueError("vocabulary must hold distinct words; one of them occurs twice.")
    listed: dict[str, tuple[str, int]] = {}
    try:
        lines = Path(path).read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8; {error}.") from None
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        bits, *fields = line.rstrip("\r").split("\t")
        if len(fields) != 2 or bits.strip("01") or not re.fullmatch("[0-9]+", fields[1]):
            raise ValueError(
                f"{path}, line {number}: wanted a path of 0 and 1, a word and its count, with tabs "
                f"between; got {line[:60]!r}."
            )
        if fields[0] in listed:
            raise ValueError(f"{path}, line {number}: the word {fields[0]!r} is listed twice.")
        listed[fields[0]] = bits, int(fields[1])
    paths = sorted({bits for bits, _ in listed.values()})
    for short, long in itertools.pairwise(paths):
        if long.startswith(short):
            raise ValueError(f"{path}: the path {long} leads on from {short}, which is a cluster.")
    number_of = {bits: number for number, bits in enumerate(paths)}
    missing = [word for word in vocabulary if word not in listed]
    if len(missing) == len(vocabulary):
        raise ValueError(f"{path} lists none of the {len(vocabulary)} words of the vocabulary.")
    if unlisted is not None and not -len(paths) <= unlisted < len(paths):
        raise ValueError(
            f"unlisted must be the place of one of the {len(paths)} clusters of {path}; got "
            f"{unlisted}."
        )
    if missing and unlisted is None:
        raise ValueError(
            f"{path} does not list {len(missing)} of the {len(vocabulary)} words of the "
            f"vocabulary, such as {missing[0]!r}. Say which cluster takes them by unlisted."
        )
    other = range(len(paths))[unlisted or 0]
    assignment = torch.full((len(codes),), other)
    counts = torch.zeros(len(codes), dtype=torch.long)
    for word, code in codes.items():
        if word in listed:
            bits, count = listed[word]
            assignment[code], counts[code] = number_of[bits], count
    used, assignment = assignment.unique(return_inverse=True)
    return Clusters(assignment, tuple(paths[number] for number in used), counts)


# How Brown's clusters are found -------------------------------------------------------------------


def _columns(pairs: Pairs) -> tuple[np.ndarray, ...]:
    return tuple(part.cpu().numpy() for part in (pairs.first, pairs.second, pairs.counts))


class _Terms:
    """f(n) = n log n of whole numbers up to N, as multiples of a step so that sums are exact."""

    def __init__(self, total: int) -> None:
        most = max(total * math.log(total), 1.0)
        self.steps = 2.0 ** math.floor(49 - math.log2(most))  # in a nat; no sum is above 8 f(N)
        self.tie = TIE * total
        self.table = self._compute(np.arange(min(total, LISTED) + 1))
        self._all_listed = total <= LISTED

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        # what a cluster would share with itself may be above N, and is not used
        return self.table.take(numbers, mode="clip") if self._all_listed else self._compute(numbers)

    def shared(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """f(m + n) - f(m) - f(n), which is zero where m or n is."""
        return self(one + other) - self(one) - self(other)

    def _compute(self, numbers: np.ndarray) -> np.ndarray:
        return np.rint(xlogy(numbers, numbers) * self.steps) / self.steps


class _Words:
    """The pairs of words that are numbered by rank, with those that follow and precede each.

    ``starts`` ``(2, V + 1)``, ``others`` and ``numbers`` ``(2, M)``: those that follow word w are
    ``others[0, starts[0, w] : starts[0, w + 1]]``, as often as ``numbers`` says; in row 1, those
    that precede it.
    """

    def __init__(
        self, first: np.ndarray, second: np.ndarray, numbers: np.ndarray, size: int
    ) -> None:
        ways = [
            csr_array((numbers, places), (size, size))
            for places in ((first, second), (second, first))
        ]
        self.first, self.second, self.pairs = first, second, numbers
        self.starts = np.stack([way.indptr for way in ways]).astype(np.int64)
        self.others = np.stack([way.indices for way in ways]).astype(np.int64)
        self.numbers = np.stack([way.data for way in ways])

    def __len__(self) -> int:
        return self.starts.shape[1] - 1

    def beside(self, word: int, labels: np.ndarray, size: int) -> np.ndarray:
        """How often each of ``size`` clusters follows and precedes a word, ``(2, size)``.

        Words whose label is -1 are in none of them.
        """
        found = []
        for way in (0, 1):
            part = slice(*self.starts[way, word : word + 2])
            places = labels[self.others[way, part]] + 1
            found.append(np.bincount(places, self.numbers[way, part], size + 1)[1:])
        return np.stack(found).astype(np.int64)

    def table(self, labels: np.ndarray, size: int) -> np.ndarray:
        """How often each cluster follows each, ``(size, size)``."""
        keys = labels[self.first] * size + labels[self.second]
        found = np.bincount(keys, self.pairs, size * size)
        return found.reshape(size, size).astype(np.int64)


class _Window:
    """Some clusters, and what the merge of any two would lose: f is summed, so nats times N.

    A cluster has a slot, of ``size``. ``counts[0][a, b]`` is how often b follows a, ``counts[1]``
    its transpose; way 0 is to look at what follows, way 1 at what precedes.

    ``counts``     ``(2, size, size)``
    ``marginals``  ``(2, size)``     row sums of ``counts``
    ``shared``     ``(size, size)``  sums of f(m + n) - f(m) - f(n) over cells m, n of two rows
    ``loss``       ``(size, size)``  what a merge would lose; infinite where there are not two
    ``rank``       ``(size,)``       of a cluster's most frequent word; -1 where there is none
    """

    def __init__(self, size: int, terms: _Terms) -> None:
        self.terms = terms
        self.counts = np.zeros((2, size, size), np.int64)
        self.marginals = np.zeros((2, size), np.int64)
        self.shared = np.zeros((size, size))
        self.loss = np.full((size, size), np.inf)
        self.rank = np.full(size, -1)
        self._least, self._stale = np.full(size, np.inf), np.zeros(size, np.bool_)
        self._compiled = _lookup.kernels("_compiled_clusters")

    def _arrays(self) -> tuple[np.ndarray, ...]:
        tables = self.counts, self.marginals, self.shared, self.loss, self.rank
        return *tables, self._least, self._stale

    def enter(self, slot: int, beside: np.ndarray, rank: int) -> None:
        """Put a cluster into a free slot; ``beside`` ``(2, size)`` is what follows and precedes."""
        self.rank[slot] = rank
        for way in (0, 1):
            self.counts[way, slot] = beside[way]
            self.counts[way, :, slot] = beside[1 - way]
        if self._compiled is not None:
            self._compiled.enter_cluster(*self._arrays(), self.terms.table, self.terms.steps, slot)
        else:
            self._enter(slot)

    def merge(self, keep: int, gone: int) -> None:
        """Merge a cluster into one of lower rank."""
        if self._compiled is not None:
            self._compiled.merge_clusters(
                *self._arrays(), self.terms.table, self.terms.steps, keep, gone
            )
        else:
            self._merge(keep, gone)

    def best(self) -> tuple[int, int]:
        """The two clusters whose merge loses least, that with the more frequent word first."""
        if self._compiled is not None:
            return self._compiled.best_merge(*self._arrays()[3:], self.terms.tie)
        low, high = np.nonzero(self.loss <= self.loss.min() + self.terms.tie)
        first = np.lexsort((self.rank[high], self.rank[low]))[0]
        return int(low[first]), int(high[first])

    def _enter(self, slot: int) -> None:
        shared = self.terms.shared
        total = np.zeros(len(self.rank))
        for way in (0, 1):
            contexts, sums = self.counts[1 - way], self.marginals[way]
            more = contexts[slot]  # of each row's cells, the new one
            rows = np.flatnonzero(more)
            rows = rows[rows != slot]
            gain = shared(more[rows, None], more)
            grown = sums + more
            self._add(rows, gain, shared(sums[rows, None], sums) - shared(grown[rows, None], grown))
            sums[:] = grown
            row = self.counts[way, slot]
            sums[slot] = row.sum()
            cells = np.flatnonzero(row)
            total += shared(row[cells, None], contexts[cells]).sum(0)
        self._price(slot, total)

    def _merge(self, keep: int, gone: int) -> None:
        shared = self.terms.shared
        total = self.shared[keep].copy()
        for way in (0, 1):
            contexts = self.counts[1 - way]
            one, other = contexts[[keep, gone]]  # two cells of each row, which become one
            rows = self._beside(other, keep, gone)
            gain = (
                shared((one + other)[rows, None], one + other)
                - shared(one[rows, None], one)
                - shared(other[rows, None], other)
            )
            self._add(rows, gain, 0.0)
            row, more = self.counts[way, [keep, gone]]  # two rows, which become one
            cells = self._beside(more, keep, gone)
            old, new = row[cells, None], (row + more)[cells, None]
            total += (shared(new, contexts[cells]) - shared(old, contexts[cells])).sum(0)
            inside = (row + more)[[keep, gone]].sum()
            total += shared(inside, one + other) - shared(row[keep], one) - shared(row[gone], other)
        for table in self.counts:
            table[keep] += table[gone]
            table[:, keep] += table[:, gone]
            table[gone] = table[:, gone] = 0
        self.marginals[:, keep] += self.marginals[:, gone]
        self.marginals[:, gone] = 0
        self.loss[gone] = self.loss[:, gone] = np.inf
        self.rank[gone] = -1
        self._price(keep, total)

    def _beside(self, cells: np.ndarray, keep: int, gone: int) -> np.ndarray:
        found = np.flatnonzero(cells)
        return found[(found != keep) & (found != gone)]

    def _add(self, rows: np.ndarray, gain: np.ndarray, rise: np.ndarray | float) -> None:
        """Add to what ``rows`` share with all, ``(R, size)``, and to what their merges keep."""
        self.shared[rows] += gain
        self.shared[:, rows] = self.shared[rows].T
        self.loss[rows] -= gain + rise
        self.loss[:, rows] = self.loss[rows].T

    def _price(self, slot: int, total: np.ndarray) -> None:
        """Write what a cluster shares with each, and what their merges would lose."""
        f, shared = self.terms, self.terms.shared
        own, (after, before) = self.counts[0, slot, slot], self.counts[:, slot]
        inner = self.counts[0].diagonal()
        loss = sum(shared(sums[slot], sums) for sums in self.marginals) - total
        # the four cells of the two become one, which are not pairs of cells of two rows
        loss += f(own + before) + f(own + after) + f(inner + before) + f(inner + after)
        loss -= f(own) + f(before) + f(after) + f(inner) + f(own + before + after + inner)
        loss[self.rank < 0] = loss[slot] = np.inf
        self.shared[slot] = self.shared[:, slot] = total
        self.loss[slot] = self.loss[:, slot] = loss


def _merge_words(
    words: _Words, num_clusters: int, terms: _Terms, disable: bool | None
) -> np.ndarray:
    """Brown's clusters of words that enter by rank: ``(V,)`` labels, ordered by their ranks."""
    size = num_clusters + 1
    window = _Window(size, terms)
    labels = np.full(len(words), -1)
    members: list[list[int]] = [[] for _ in range(size)]
    free = list(range(size))
    for word in tqdm(range(len(words)), "merges", disable=disable, leave=False):
        slot = free.pop()
        labels[word] = slot
        members[slot] = [word]
        window.enter(slot, words.beside(word, labels, size), word)
        if not free:
            keep, gone = window.best()
            window.merge(keep, gone)
            labels[members[gone]] = keep
            members[keep] += members[gone]
            free = [gone]
    _, first, labels = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[labels]


def _exchange(
    words: _Words,
    labels: np.ndarray,
    num_clusters: int,
    num_sweeps: int,
    terms: _Terms,
    disable: bool | None,
) -> None:
    """Move words to better clusters, in place, until none moves or the sweeps are over."""
    compiled = _lookup.kernels("_compiled_clusters")
    table = words.table(labels, num_clusters)
    counts = np.stack([table, table.T])
    marginals = counts.sum(2)
    sizes = np.bincount(labels)
    for _ in tqdm(range(num_sweeps), "sweeps", disable=disable, leave=False):
        if compiled is not None:
            moved = compiled.sweep_clusters(
                labels, counts, marginals, sizes, words.starts, words.others, words.numbers,
                terms.table, terms.steps, terms.tie,
            )  # fmt: skip
        else:
            moved = _sweep(words, labels, counts, marginals, sizes, terms)
        if moved == 0:
            break


def _sweep(
    words: _Words,
    labels: np.ndarray,
    counts: np.ndarray,
    marginals: np.ndarray,
    sizes: np.ndarray,
    f: _Terms,
) -> int:
    """Give each word in turn its best cluster; the number of those that moved."""
    moved = 0
    for word in range(len(words)):
        old = labels[word]
        if sizes[old] == 1:
            continue
        labels[word] = len(sizes)  # apart from the others
        beside = words.beside(word, labels, len(sizes) + 1)
        own, beside = beside[0, -1], beside[:, :-1]
        totals = beside.sum(1) + own
        _shift(counts, marginals, old, beside, own, -1)
        inner = counts[0].diagonal()
        gain = f(inner + beside.sum(0) + own) - f(inner)
        for way in (0, 1):
            near = np.flatnonzero(beside[way])
            cells = counts[1 - way, near]
            gain += (f(cells + beside[way, near, None]) - f(cells)).sum(0)
            gain -= f(inner + beside[way]) - f(inner)  # the cell that is in gain already
            gain -= f(marginals[way] + totals[way]) - f(marginals[way])
        new = int((gain >= gain.max() - f.tie).argmax())
        if gain[new] <= gain[old] + f.tie:
            new = old
        _shift(counts, marginals, new, beside, own, 1)
        labels[word] = new
        sizes[old] -= 1
        sizes[new] += 1
        moved += new != old
    return moved


def _shift(
    counts: np.ndarray, marginals: np.ndarray, label: int, beside: np.ndarray, own: int, sign: int
) -> None:
    """Add a word to a cluster, or take it out."""
    for way in (0, 1):
        counts[way, label] += sign * beside[way]
        counts[way, :, label] += sign * beside[1 - way]
        counts[way, label, label] += sign * own
        marginals[way, label] += sign * (beside[way].sum() + own)


def _tree(words: _Words, labels: np.ndarray, num_clusters: int, terms: _Terms) -> list[str]:
    """Merge the clusters to one; for each, its path from the root."""
    table = words.table(labels, num_clusters)
    window = _Window(num_clusters, terms)
    ranks = np.full(num_clusters, len(labels))
    np.minimum.at(ranks, labels, np.arange(len(labels)))
    present = np.zeros(num_clusters, np.int64)
    for slot in range(num_clusters):
        present[slot] = 1
        window.enter(slot, np.stack([table[slot], table[:, slot]]) * present, ranks[slot])
    members = [[slot] for slot in range(num_clusters)]
    paths = [""] * num_clusters
    for _ in range(num_clusters - 1):
        keep, gone = window.best()
        for bit, slot in zip("01", (keep, gone)):
            for label in members[slot]:
                paths[label] = bit + paths[label]
        window.merge(keep, gone)
        members[keep] += members[gone]
    return paths
