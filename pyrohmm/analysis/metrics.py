"""Measures of a fit: evidence, information criteria, agreement up to renaming, distances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from torch import Tensor
from torch.distributions import biject_to, constraints

from .._arguments import Range, checked, explained
from .._checks import (
    check_floats,
    check_integers,
    check_range,
    check_returned,
    check_shape,
    check_size,
)
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.models import build
from ..infer.results import Fit
from ..nn.base import HMMModule
from .usage import state_usage as state_usage
from .usage import transition_spectrum as transition_spectrum

LARGEST = 2**14  # number of states, of two labellings that are compared


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

    @classmethod
    def of(cls, log_evidence: float, num_tokens: int) -> Perplexity:
        """That of so many observed steps, of this log evidence in nats.

        Example:
            >>> print(Perplexity.of(-2 * math.log(3), 2))
            perplexity 3.00 over 2 tokens
        """
        surprise = -log_evidence / num_tokens
        return cls(math.exp(surprise) if surprise < 700.0 else math.inf, num_tokens, log_evidence)

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} over {self.num_tokens:,} tokens"


@checked(batch_size=Range(1))
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
    return Perplexity.of(log_evidence(model, data, batch_size).double().sum().item(), tokens)


@checked(batch_size=Range(1))
def log_evidence(model: HMM | Fit, data: Sequences, batch_size: int = 256) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` of each sequence, ``(N,)``, in nats.

    Labels of ``data`` are not used. Of an SVI fit it is that of one sample of the guide.

    Args:
        model: An :class:`HMM` built for these sequences, or a :class:`Fit`.
        data: The sequences.
        batch_size: How many are evaluated at a time, if ``model`` is a fit.
    """
    with torch.no_grad():
        if isinstance(model, HMM):
            return model.log_prob(data.values)
        parts = [data[start : start + batch_size] for start in range(0, len(data), batch_size)]
        hmms = model.hmms(parts)
        return torch.cat([hmm.log_prob(part.values) for hmm, part in zip(hmms, parts)])


@checked()
def num_parameters(module: torch.nn.Module, data: Sequences) -> int:
    """Number of free parameters p; what sums to one has one less than entries.

    Args:
        module: An :class:`HMMModule`, or a model of one.
        data: Anything the module can be built for; one sequence is enough.

    Example:
        >>> data = Sequences.from_list([[0, 1]])
        >>> num_parameters(TabularHMM(2, categorical(3)), data)  # 1 + 2 + 4
        7
    """
    with torch.no_grad(), poutine.block():
        run = module if not isinstance(module, HMMModule) else lambda data: build(module, data)
        trace = poutine.trace(run).get_trace(data[:1])
    count = 0
    for name in trace.stochastic_nodes:
        site = trace.nodes[name]
        if not site_is_subsample(site) and site["infer"].get("enumerate") != "parallel":
            shape = biject_to(site["fn"].support).inverse_shape(site["value"].shape)
            count += math.prod(shape)
    constrained = set()
    for part in module.modules():
        for name, (constraint, _) in getattr(part, "_pyro_params", {}).items():
            leaf = getattr(part, f"{name}_unconstrained")
            if leaf.requires_grad and id(leaf) not in constrained:  # parts may share one
                count += _dimension(constraint, getattr(part, name))
            constrained.add(id(leaf))
    free = [each for each in module.parameters() if id(each) not in constrained]
    return count + sum(each.numel() for each in free if each.requires_grad)


def _dimension(constraint: Any, value: Tensor) -> int:
    """Degrees of freedom of a constrained value; a probability of zero stays zero."""
    if constraint is constraints.simplex:
        return int(((value > 0).sum(-1) - 1).sum())
    if constraint in (constraints.lower_cholesky, constraints.positive_definite):
        size = value.size(-1)
        return value.numel() // size * (size + 1) // 2
    return math.prod(biject_to(constraint).inverse_shape(value.shape))


@checked()
def aic(fit: Fit, data: Sequences) -> float:
    r"""Akaike's information criterion (1974), in nats times two: less is better.

    .. math:: -2 \log p(x | \hat\theta) + 2 p

    It is meant for maximum likelihood, thus for flat priors.

    Args:
        fit: From :func:`fit_em` or :func:`fit_map`.
        data: What was fitted.
    """
    return _criterion(fit, data, 2.0)


@checked()
def bic(fit: Fit, data: Sequences) -> float:
    r"""Bayesian information criterion, in nats times two: less is better.

    .. math:: -2 \log p(x | \hat\theta) + p \log n

    Schwarz (1978), with n the number of observed steps, as is usual for hidden Markov models.

    Args:
        fit: As for :func:`aic`.
        data: The same.
    """
    return _criterion(fit, data, math.log(max(data.num_observed, 1)))


def _criterion(fit: Fit, data: Sequences, price: float) -> float:
    if not isinstance(fit.model, torch.nn.Module):
        raise TypeError(
            "fit must be of a model that is a module, whose parameters can be counted; got "
            f"{type(fit.model).__name__}."
        )
    if fit.method == "SVI":
        raise ValueError("fit must be one of EM or MAP, a point; SVI has a distribution of them.")
    evidence = log_evidence(fit, data).double().sum().item()
    return -2.0 * evidence + price * num_parameters(fit.model, data)


class CrossValidation(NamedTuple):
    """Evidence of sequences that a fit has not seen.

    Attributes:
        log_evidence: ``(N,)``, in nats, of each sequence under the fit to the other folds.
        fold: ``(N,)``, in which fold it was.
        num_observed: Number of observed steps in all.
    """

    log_evidence: Tensor
    fold: Tensor
    num_observed: int

    @property
    def per_step(self) -> float:
        """Nats per observed step."""
        return self.log_evidence.double().sum().item() / max(self.num_observed, 1)


@checked()
def cross_validate(
    fit: Callable[[Sequences], Fit],
    data: Sequences,
    num_folds: int = 5,
    generator: torch.Generator | None = None,
) -> CrossValidation:
    """Fit all folds but one, and evaluate that one: each sequence once.

    With a flat prior, a symbol that the other folds lack makes a sequence impossible: give
    :func:`categorical` a concentration above one.

    Args:
        fit: Called with the sequences to fit, such as ``lambda data: fit_em(module, data)``.
        data: The sequences.
        num_folds: At least 2, at most the number of sequences.
        generator: Decides who is in which fold; torch's global one by default.

    Raises:
        ValueError: If ``num_folds`` is out of range.

    Example:
        >>> data = datasets.casino(num_sequences=10, num_steps=20)
        >>> module = TabularHMM(2, categorical(6))
        >>> found = cross_validate(lambda part: fit_em(module, part), data, num_folds=2)
        >>> found.log_evidence.shape, found.num_observed
        (torch.Size([10]), 200)
    """
    if not 2 <= num_folds <= len(data):
        raise ValueError(
            f"num_folds must lie between 2 and the number of sequences, {len(data)}; got "
            f"{num_folds}."
        )
    order = torch.randperm(len(data), generator=generator)
    fold = torch.empty(len(data), dtype=torch.long)
    fold[order] = torch.arange(len(data)) % num_folds
    by_fold = torch.cat([(fold == number).nonzero().flatten() for number in range(num_folds)])
    parts = []
    for number in range(num_folds):
        fitted = fit(data[fold != number])
        check_returned("fit", fitted, Fit, "a Fit")
        parts.append(log_evidence(fitted, data[fold == number]).cpu())
    return CrossValidation(torch.cat(parts)[by_fold.argsort()], fold, data.num_observed)


@checked(num_states=Range(1))
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
    """How many steps of known truth have each predicted (row) and true (column) state, (K, K)."""
    check_integers("predicted", predicted)
    check_integers("truth", truth)
    if predicted.shape != truth.shape:
        raise ValueError(
            f"predicted and truth must have one shape; got {tuple(predicted.shape)} and "
            f"{tuple(truth.shape)}."
        )
    predicted, truth = predicted.long(), truth.long()
    known = truth >= 0
    rows, columns = predicted[known].flatten(), truth[known].flatten()
    if rows.numel() == 0:
        raise ValueError("truth has no known state; wanted at least one that is not -1.")
    size = num_states or 1 + max(int(predicted.max()), int(truth.max()))
    if size > LARGEST:
        raise ValueError(
            f"predicted and truth must be below {LARGEST:,}, for tables of K x K; got {size - 1}."
        )
    check_range("predicted", rows, size, "K - 1")
    check_range("truth", columns, size, "K - 1")
    return torch.bincount(rows * size + columns, minlength=size * size).reshape(size, size)


@explained()
def align_transitions(found: Tensor, truth: Tensor) -> Tensor:
    r"""Renaming of states under which a transition matrix is nearest to the true one.

    Rows and columns are permuted together so that the sum of squared differences is least. Up to
    eight states all permutations are tried; for more, :func:`scipy.optimize.quadratic_assignment`
    finds one that need not be the best.

    Where true states are known :func:`align` is better, and where there are data and two HMMs
    :func:`pyrohmm.infer.results.match_states`.

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
    check_floats("found", found)
    check_floats("truth", truth)
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


@checked()
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


@checked()
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


@checked()
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
    """How many steps are in each state, ``(K,)`` integers.

    Args:
        states: ``(*)`` integers, such as a decoding; -1 where a step does not count. At padded
            steps a decoding holds 0: count ``states[data.exists]``.
        num_states: K.

    Example:
        >>> state_histogram(torch.tensor([0, 2, 2, -1]), num_states=4)
        tensor([1, 0, 2, 0])
    """
    check_integers("states", states)
    check_size("num_states", num_states)
    counted = states.long().flatten()
    counted = counted[counted != -1]
    check_range("states", counted, num_states, "K - 1", "Steps that do not count are marked -1.")
    return counted.bincount(minlength=num_states)


@checked()
def num_identified(states: Tensor, num_states: int, at_least: int = 50) -> int:
    """Number of states in use: those that at least ``at_least`` steps are in.

    Args:
        states: As of :func:`state_histogram`.
        num_states: K.
        at_least: Number of steps. Fifty is what Qiao et al. (2015) ask for, of 1,800.

    Example:
        >>> num_identified(torch.tensor([0, 2, 2, 1, 1]), num_states=4, at_least=2)
        2
    """
    return int((state_histogram(states, num_states) >= at_least).sum())


@checked()
def bhattacharyya(probs: Tensor) -> Tensor:
    r"""Bhattacharyya distances between distributions: :math:`-\ln \sum_v \sqrt{p_{iv} p_{jv}}`.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.

    Returns:
        ``(*B, K, K)``, in nats; zero on the diagonal, infinite where supports are disjoint.

    Raises:
        TypeError: If ``probs`` are not floating point.
        ValueError: If one is negative, or a row does not sum to one.

    Example:
        >>> bhattacharyya(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([[0.0000, 0.3466],
                [0.3466, 0.0000]])
    """
    check_floats("probs", probs)
    if not bool((probs >= 0).all()):
        raise ValueError("probs must not be negative, nor NaN. Take .exp() of logarithms.")
    if not bool(((probs.sum(-1) - 1).abs() <= 1e-4).all()):
        raise ValueError("probs must sum to one in each row. Divide counts by their sums.")
    root = probs.sqrt()
    overlap = root @ root.mT
    overlap = (overlap + overlap.mT) / 2  # a product may round its two halves differently
    distance = -overlap.log().clamp(max=0.0)
    return distance.masked_fill(
        torch.eye(probs.size(-2), dtype=torch.bool, device=probs.device), 0.0
    ).abs()


@checked()
def diversity(probs: Tensor) -> Tensor:
    """Mean Bhattacharyya distance of all pairs of rows, ``(*B)``, in nats (Qiao et al., 2015).

    Infinite as soon as two rows have disjoint supports.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row, such as a transition matrix; K >= 2.

    Example:
        >>> diversity(torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]))  # 0.3466 twice of three
        tensor(0.2310)
    """
    return diversity_by_state(probs).mean(-1)


@checked()
def diversity_by_state(probs: Tensor) -> Tensor:
    """Mean Bhattacharyya distance of each row to the others, ``(*B, K)``, in nats.

    Infinite for a row whose support is disjoint from that of another.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row; K >= 2.

    Example:
        >>> diversity_by_state(torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]))
        tensor([0.3466, 0.1733, 0.1733])
    """
    if probs.dim() < 2 or probs.size(-2) < 2:
        raise ValueError(
            "probs must have shape (*B, K, V) with at least two rows to compare; got "
            f"{tuple(probs.shape)}."
        )
    return bhattacharyya(probs).sum(-1) / (probs.size(-2) - 1)


@explained()
def mean_absolute_deviation(first: Any, second: Any) -> float:
    """Mean absolute difference of two tables, such as two joint distributions of adjacent symbols.

    Example:
        >>> mean_absolute_deviation(torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5]))
        0.25
    """
    first, second = torch.as_tensor(first), torch.as_tensor(second)
    if first.shape != second.shape:
        raise ValueError(
            f"first and second must have one shape; got {tuple(first.shape)} and "
            f"{tuple(second.shape)}."
        )
    deviation = (first.double() - second.double()).abs().mean().item()
    if math.isnan(deviation):
        raise ValueError("first and second must hold numbers, and none that is NaN.")
    return deviation
