"""States: agreement with a truth up to their names, how many are in use, how far they differ."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from torch import Tensor

from .._checks import (
    check_integers,
    check_range,
    check_shape,
)


def align(predicted: Tensor, truth: Tensor, num_states: int | None = None) -> Tensor:
    """Renaming of predicted states under which they agree with the truth most often.

    Args:
        predicted: ``(*)`` integers.
        truth: ``(*)`` integers, -1 where it is not known.
        num_states: K; by default one more than the largest state of either.

    Returns:
        ``(K,)`` integers: ``renaming[predicted]`` is comparable with ``truth``.

    Example:
        >>> align(torch.tensor([0, 0, 1, 2]), torch.tensor([2, 2, 0, 1]))
        tensor([2, 0, 1])
    """
    counts = _contingency(predicted, truth, num_states)
    _, columns = linear_sum_assignment(counts.cpu().numpy(), maximize=True)  # rows are in order
    return torch.as_tensor(columns, device=predicted.device)


def _contingency(predicted: Tensor, truth: Tensor, num_states: int | None = None) -> Tensor:
    """Counts of steps by predicted (row) and true (column) state, ``(K, K)``."""
    check_integers("predicted", predicted)
    check_integers("truth", truth)
    check_shape("predicted", predicted, tuple(truth.shape), "that of truth")
    predicted, truth = predicted.long(), truth.long()
    known = truth >= 0
    rows, columns = predicted[known].flatten(), truth[known].flatten()
    if rows.numel() == 0:
        raise ValueError("truth has no known state; wanted at least one that is not -1.")
    size = num_states or 1 + max(int(predicted.max()), int(truth.max()))
    check_range("predicted", rows, size, "K - 1")
    check_range("truth", columns, size, "K - 1")
    return torch.bincount(rows * size + columns, minlength=size * size).reshape(size, size)


def align_transitions(found: Tensor, truth: Tensor) -> Tensor:
    r"""Renaming of states under which a transition matrix is nearest to the true one.

    Rows and columns are permuted together so that the sum of squared differences is least. Up to
    eight states all permutations are tried; for more, :func:`scipy.optimize.quadratic_assignment`
    finds one that need not be the best.

    Where true states are known :func:`align` is better, and where there are data and two HMMs
    :func:`pyrohmm.infer.replicates.match_states`.

    Args:
        found: ``(K, K)``, a transition matrix.
        truth: ``(K, K)``, what it is compared with.

    Returns:
        ``(K,)`` integers: state k of ``found`` is state ``renaming[k]`` of ``truth``;
        ``hmm.permute_states(renaming.argsort())`` gives an HMM the true numbers.

    Example:
        >>> truth = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.8, 0.2], [0.3, 0.0, 0.7]])
        >>> order = torch.tensor([2, 0, 1])
        >>> align_transitions(truth[order][:, order], truth)
        tensor([2, 0, 1])
    """
    size = truth.size(-1)
    check_shape("truth", truth, (size, size), "(K, K)")
    check_shape("found", found, (size, size), "(K, K)")
    if size <= 8:
        orders = torch.tensor(list(itertools.permutations(range(size))), device=found.device)
        permuted = found[orders.unsqueeze(-1), orders.unsqueeze(-2)]
        order = orders[(permuted - truth).square().sum((-2, -1)).argmin()]
    else:
        pair = truth.detach().cpu().numpy(), found.detach().cpu().numpy()
        options = {"maximize": True, "rng": np.random.default_rng(0)}  # draws nothing from it here
        first = quadratic_assignment(*pair, options=options).col_ind
        options["partial_guess"] = np.stack([np.arange(size), first], 1)
        order = torch.as_tensor(quadratic_assignment(*pair, "2opt", options).col_ind)
    return order.argsort().to(found.device)


def one_to_one_accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Share of steps where predicted and true states agree, after the best renaming.

    Args:
        predicted: ``(*)`` integers.
        truth: ``(*)`` integers, -1 where it is not known; such steps do not count.

    Example:
        >>> one_to_one_accuracy(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 1]))
        0.75
    """
    renamed = align(predicted, truth)[predicted.long().clamp(min=0)]
    known = truth >= 0
    return (renamed[known] == truth[known]).double().mean().item()


def many_to_one_accuracy(predicted: Tensor, truth: Tensor) -> float:
    """Share of steps that agree if each predicted state is mapped to its most frequent true one.

    Several predicted states may be mapped to one, so that more states are never worse: compare
    models of the same number of states.

    Args:
        predicted: As for :func:`one_to_one_accuracy`.
        truth: The same.

    Example:
        >>> many_to_one_accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([1, 1, 0, 1]))
        0.75
    """
    counts = _contingency(predicted, truth)
    return (counts.amax(1).sum() / counts.sum()).item()


def variation_of_information(predicted: Tensor, truth: Tensor) -> float:
    r"""Variation of information of two labellings, :math:`H(z|y) + H(y|z)`, in nats.

    Zero if one renames the other. A distance, of at most the logarithm of the number of steps.

    Args:
        predicted: As for :func:`one_to_one_accuracy`.
        truth: The same.

    References:
        Comparing clusterings (Meila, 2007).

    Example:
        >>> variation_of_information(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2, 0, 0]))
        0.0
        >>> even = torch.tensor([0, 1, 0, 1])  # says nothing of the truth: two times log 2
        >>> round(variation_of_information(even, torch.tensor([0, 0, 1, 1])), 4)
        1.3863
    """
    counts = _contingency(predicted, truth).double()
    joint = counts / counts.sum()
    both = torch.special.entr(joint).sum()
    single = torch.special.entr(joint.sum(0)).sum() + torch.special.entr(joint.sum(1)).sum()
    return (2 * both - single).clamp(min=0.0).item()


def state_histogram(states: Tensor, num_states: int) -> Tensor:
    """Number of steps in each state, ``(K,)`` integers.

    Args:
        states: ``(*)`` integers, such as a decoding; -1 where a step does not count. At padded
            steps a decoding holds 0: count ``states[data.exists]``.
        num_states: K.

    Example:
        >>> state_histogram(torch.tensor([0, 2, 2, -1]), num_states=4)
        tensor([1, 0, 2, 0])
    """
    check_integers("states", states)
    counted = states.long().flatten()
    counted = counted[counted != -1]
    check_range("states", counted, num_states, "K - 1", "Steps that do not count are marked -1.")
    return counted.bincount(minlength=num_states)


def num_identified(states: Tensor, num_states: int, at_least: int = 50) -> int:
    """Number of states in use: those with at least ``at_least`` steps.

    Args:
        states: As of :func:`state_histogram`.
        num_states: K.
        at_least: Number of steps. Fifty is what Qiao et al. (2015) ask for, of 1,800.

    Example:
        >>> num_identified(torch.tensor([0, 2, 2, 1, 1]), num_states=4, at_least=2)
        2
    """
    return int((state_histogram(states, num_states) >= at_least).sum())


def bhattacharyya(probs: Tensor) -> Tensor:
    r"""Bhattacharyya distances between distributions: :math:`-\ln \sum_v \sqrt{p_{iv} p_{jv}}`.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.

    Returns:
        ``(*B, K, K)``, in nats; zero on the diagonal, infinite where supports are disjoint.

    Raises:
        ValueError: If one is negative, or a row does not sum to one.

    Example:
        >>> bhattacharyya(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([[0.0000, 0.3466],
                [0.3466, 0.0000]])
    """
    if not bool((probs >= 0).all() & ((probs.sum(-1) - 1).abs() <= 1e-4).all()):
        raise ValueError("probs must be probabilities that sum to one in each row.")
    root = probs.sqrt()
    overlap = root @ root.mT
    overlap = (overlap + overlap.mT) / 2  # a product may round its two halves differently
    same = torch.eye(probs.size(-2), dtype=torch.bool, device=probs.device)
    return -overlap.log().clamp(max=0.0).masked_fill(same, 0.0) + 0.0  # not minus zero


def diversity(probs: Tensor) -> Tensor:
    """Mean Bhattacharyya distance of all pairs of rows, ``(*B)``, in nats (Qiao et al., 2015).

    Infinite as soon as two rows have disjoint supports.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row, such as a transition matrix; K >= 2.

    Example:
        >>> diversity(torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]))  # 0.3466 twice of three
        tensor(0.2310)
    """
    size = probs.size(-2)
    return bhattacharyya(probs).sum((-2, -1)) / (size * (size - 1))
