"""Measures of a fit: perplexity, agreement up to renaming of states, distances, diversity."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ._checks import check_integers
from .fit import Fit
from .hmm import HMM
from .sequences import Sequences


class Perplexity(NamedTuple):
    """Perplexity per observed step, with its denominator.

    Attributes:
        value: exp(-log_evidence / num_tokens).
        num_tokens: Number of observed steps: the denominator.
        log_evidence: Of all sequences, in nats.
    """

    value: float
    num_tokens: int
    log_evidence: float

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} over {self.num_tokens:,} tokens"


def perplexity(model: HMM | Fit, data: Sequences, batch_size: int = 256) -> Perplexity:
    """Perplexity of ``data`` under an HMM or a fit, per observed step (``<eos>`` included, if any).

    Args:
        model: An :class:`HMM` built for these sequences, or a :class:`Fit`.
        data: The sequences.
        batch_size: How many are evaluated at a time, if ``model`` is a fit.

    Raises:
        ValueError: If nothing is observed.

    Example:
        >>> data = Sequences(torch.tensor([[0, 1, 2]]), torch.tensor([3]))
        >>> even = torch.zeros(1), torch.zeros(1, 1), Categorical(probs=torch.ones(1, 4))
        >>> print(perplexity(HMM(*even, data.lengths), data))
        perplexity 4.00 over 3 tokens
    """
    tokens = data.num_observed
    if tokens == 0:
        raise ValueError("data has no observed step; there is nothing to average over.")
    with torch.no_grad():
        if isinstance(model, HMM):
            total = model.log_prob(data.values).double().sum().item()
        else:
            total = 0.0
            for start in range(0, len(data), batch_size):
                part = data[start : start + batch_size]
                total += model.draw(part).log_prob(part.values).double().sum().item()
    surprise = -total / tokens
    value = math.exp(surprise) if surprise < 700.0 else math.inf
    return Perplexity(value, tokens, total)


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
    check_integers("predicted", predicted)
    check_integers("truth", truth)
    if predicted.shape != truth.shape:
        raise ValueError(
            f"predicted and truth must have one shape; got {tuple(predicted.shape)} and "
            f"{tuple(truth.shape)}."
        )
    predicted, truth = predicted.long(), truth.long()
    known = truth >= 0
    found, true = predicted[known].flatten(), truth[known].flatten()
    if found.numel() == 0:
        raise ValueError("truth has no known state; wanted at least one that is not -1.")
    if int(found.min()) < 0:
        raise ValueError(f"predicted must not be negative; got {int(found.min())}.")
    size = num_states or 1 + max(int(predicted.max()), int(truth.max()))
    if max(int(found.max()), int(true.max())) >= size:
        raise ValueError(f"states must be less than num_states = {size}; got "
                         f"{max(int(found.max()), int(true.max()))}.")  # fmt: skip
    counts = torch.bincount(found * size + true, minlength=size * size).reshape(size, size)
    rows, columns = linear_sum_assignment(counts.cpu().numpy(), maximize=True)
    renaming = torch.empty(size, dtype=torch.long)
    renaming[torch.as_tensor(rows)] = torch.as_tensor(columns)
    return renaming.to(predicted.device)


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


def bhattacharyya(probs: Tensor) -> Tensor:
    r"""Bhattacharyya distances between distributions: :math:`-\ln \sum_v \sqrt{p_{iv} p_{jv}}`.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.

    Returns:
        ``(*B, K, K)``, in nats; zero on the diagonal, infinite where supports are disjoint.

    Example:
        >>> bhattacharyya(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([[0.0000, 0.3466],
                [0.3466, 0.0000]])
    """
    root = probs.sqrt()
    distance = -(root @ root.mT).log().clamp(max=0.0)
    return distance.masked_fill(
        torch.eye(probs.size(-2), dtype=torch.bool, device=probs.device), 0.0
    ).abs()


def mean_absolute_deviation(first: Any, second: Any) -> float:
    """Mean of the absolute differences of two tables, such as two laws of adjacent symbols.

    Example:
        >>> mean_absolute_deviation(torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5]))
        0.25
    """
    first, second = torch.as_tensor(first), torch.as_tensor(second)
    if first.shape != second.shape:
        raise ValueError(
            f"tables must have one shape; got {tuple(first.shape)} and {tuple(second.shape)}."
        )
    return (first.double() - second.double()).abs().mean().item()
