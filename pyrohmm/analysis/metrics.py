"""Measures of a fit: evidence, information criteria, agreement up to renaming, distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import biject_to, constraints

from .._checks import (
    check_floats,
    check_returned,
    check_size,
)
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.models import build
from ..infer.plates import new_log_evidence
from ..infer.results import Fit
from ..nn.base import HMMModule
from .agreement import align as align
from .agreement import align_transitions as align_transitions
from .agreement import many_to_one_accuracy as many_to_one_accuracy
from .agreement import num_identified as num_identified
from .agreement import one_to_one_accuracy as one_to_one_accuracy
from .agreement import state_histogram as state_histogram
from .agreement import variation_of_information as variation_of_information
from .usage import batches_of, hmms_of
from .usage import state_usage as state_usage
from .usage import transition_spectrum as transition_spectrum


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
        """Perplexity of a log evidence in nats over so many observed steps.

        Example:
            >>> print(Perplexity.of(-2 * math.log(3), 2))
            perplexity 3.00 over 2 tokens
        """
        surprise = -log_evidence / num_tokens
        return cls(math.exp(surprise) if surprise < 700.0 else math.inf, num_tokens, log_evidence)

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
    if not isinstance(data, Sequences):
        raise TypeError(f"data must be Sequences; got {type(data).__name__}.")
    tokens = data.num_observed
    if tokens == 0:
        raise ValueError("data has no observed step; there is nothing to average over.")
    return Perplexity.of(log_evidence(model, data, batch_size).double().sum().item(), tokens)


def log_evidence(model: HMM | Fit, data: Sequences, batch_size: int = 256) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` of each sequence, ``(N,)``, in nats.

    Labels of ``data`` are not used. Of a fit it is that at ``fit.values``. If sequences have
    variables of their own, ``data`` are those that were fitted; see :func:`held_out_log_evidence`.

    Args:
        model: An :class:`HMM` built for these sequences, or a :class:`Fit`.
        data: The sequences.
        batch_size: How many are evaluated at a time, if ``model`` is a fit.

    Raises:
        ValueError: If sequences have variables of their own, and ``data`` are others.
    """
    with torch.no_grad():
        hmms = hmms_of(model, data, batch_size)
        return torch.cat([hmm.log_prob(part.values) for hmm, part in hmms])


def held_out_log_evidence(
    fit: Fit, data: Sequences, num_samples: int = 100, batch_size: int = 256
) -> Tensor:
    r"""Log evidence of sequences that were not fitted, ``(N,)``, in nats.

    A new sequence has none of the fitted values of variables inside the plate of sequences. They
    are averaged over their prior, given the values of those that all sequences share:

    .. math:: \log p(x_n \mid \theta) \approx
              \log \frac{1}{S} \sum_{s=1}^S p(x_n \mid b^{(s)}, \theta), \quad
              b^{(s)} \sim p(b \mid \theta)

    The estimate grows with S on average: it is a lower bound in expectation. The samples are the
    same in every call. For models without such variables it is :func:`log_evidence`.

    Args:
        fit: The fit.
        data: New sequences.
        num_samples: S.
        batch_size: How many are evaluated at a time.
    """
    check_size("num_samples", num_samples)
    with torch.no_grad(), fit.at_rest():
        return torch.cat(
            [
                new_log_evidence(fit.model, fit.values, part, fit.plates, num_samples)
                for part in batches_of(data, batch_size)
            ]
        )


def num_parameters(module: Callable[..., Any], data: Sequences) -> int:
    """Number of free parameters p; what sums to one has one less than entries.

    Variables of which each sequence, or each group, has one count as often as there are.

    Args:
        module: An :class:`HMMModule`, a model of one, or any Pyro model.
        data: The sequences; one is enough unless they have variables of their own.

    Example:
        >>> data = Sequences.from_list([[0, 1]])
        >>> num_parameters(TabularHMM(2, categorical(3)), data)  # 1 + 2 + 4
        7
    """
    with torch.no_grad(), poutine.block():
        run = module if not isinstance(module, HMMModule) else lambda data: build(module, data)
        trace = poutine.trace(run).get_trace(data)
    count = 0
    for name in trace.stochastic_nodes:
        site = trace.nodes[name]
        if not site_is_subsample(site) and site["infer"].get("enumerate") != "parallel":
            shape = biject_to(site["fn"].support).inverse_shape(site["value"].shape)
            count += math.prod(shape)
    if not isinstance(module, torch.nn.Module):
        for site in trace.nodes.values():
            if site["type"] == "param":
                constraint = site["kwargs"].get("constraint", constraints.real)
                count += _dimension(constraint, site["value"])
        return count
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


def aic(fit: Fit, data: Sequences) -> float:
    r"""Akaike's information criterion (1974), in nats times two: less is better.

    .. math:: -2 \log p(x | \hat\theta) + 2 p

    It is meant for maximum likelihood, thus for flat priors. Variables of which each sequence has
    one, such as random effects, count as parameters at their fitted values (the conditional
    criterion); how far a prior shrinks them is not counted, which leave-one-out by
    :func:`pyrohmm.to_arviz` does.

    Args:
        fit: From :func:`fit_em` or :func:`fit_map`.
        data: What was fitted.
    """
    return _criterion(fit, data, 2.0)


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
    if fit.method == "SVI":
        raise ValueError("fit must be one of EM or MAP, a point; SVI has a distribution of them.")
    evidence = log_evidence(fit, data).double().sum().item()
    with fit.at_rest():
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
        parts.append(held_out_log_evidence(fitted, data[fold == number]).cpu())
    return CrossValidation(torch.cat(parts)[by_fold.argsort()], fold, data.num_observed)


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
