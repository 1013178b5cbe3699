"""Metrics of a fit: log evidence, information criteria, agreement of states, distances."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from scipy.optimize import linear_sum_assignment, quadratic_assignment
from scipy.special import chdtrc
from torch import Tensor
from torch.distributions import biject_to, constraints

from .._checks import all_names_checked, check_integers, check_range, check_shape, check_size
from ..data.parts import Parts, StoredSequences, in_parts, parts_of
from ..data.sequences import Sequences, check_sequences
from ..distributions.autoregressive import Autoregressive
from ..distributions.block_hmm import BlockHMM
from ..distributions.hard_zeros import log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical, log_likelihood
from ..infer.models import build
from ..infer.plates import AtValues, new_log_evidence
from ..infer.results import Fit, check_fit
from ..nn.base import PYRO, HMMModule

MOST_PARAMETERS = 2000  # whose independence is computed

Data = Sequences | Parts | StoredSequences


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
        """Perplexity ``exp(-log_evidence / num_tokens)`` of a log evidence in nats.

        Example:
            >>> print(Perplexity.of(-2 * math.log(3), 2))
            perplexity 3.00 over 2 tokens
        """
        surprise = -log_evidence / num_tokens
        return cls(math.exp(surprise) if surprise < 700.0 else math.inf, num_tokens, log_evidence)

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} over {self.num_tokens:,} tokens"


def perplexity(model: HMM | Fit, data: Data, batch_size: int = 256) -> Perplexity:
    """Perplexity of ``data`` under an HMM or a fit, per observed step (``<eos>`` included, if any).

    Args:
        model: An :class:`HMM` built for these sequences, or a :class:`Fit`.
        data: The sequences.
        batch_size: How many are evaluated at a time, if ``model`` is a fit.

    Example:
        >>> data = Sequences(torch.tensor([[0, 1, 2]]), torch.tensor([3]))
        >>> even = torch.zeros(1), torch.zeros(1, 1), Categorical(probs=torch.ones(1, 4))
        >>> print(perplexity(HMM(*even, data.lengths), data))
        perplexity 4.00 over 3 tokens
    """
    data = in_parts(data)
    one = (data if isinstance(data, Sequences) else data.first)[:1]
    if one.known_values.dtype.is_floating_point:  # of counts, or a density
        hmm = model.hmm(one) if isinstance(model, Fit) and not model.plates else model
        emission = getattr(hmm, "emission", None)
        if emission is not None and not getattr(emission, "initial", emission).support.is_discrete:
            text = "perplexity is of symbols or counts; of a density it depends on the unit"
            raise ValueError(f"{text}. Ask fit.score(data) / data.num_observed, in nats.")
    total = log_evidence(model, data, batch_size).double().sum().item()
    return Perplexity.of(total, data.num_observed)


def log_evidence(model: HMM | Fit, data: Data, batch_size: int = 256) -> Tensor:
    r"""Log evidence :math:`\log p(x_{1:T})` of each sequence, ``(N,)``, in nats.

    Labels of ``data`` are not used. Of a fit it is that at ``fit.parameters``. If sequences have
    variables of their own, ``data`` are those that were fitted; see :func:`held_out_log_evidence`.

    Args:
        model: An :class:`HMM` built for these sequences, or a :class:`Fit`.
        data: The sequences.
        batch_size: How many are evaluated at a time, if ``model`` is a fit.

    Raises:
        ValueError: If sequences have variables of their own, and ``data`` are others.
    """
    found = []
    with torch.no_grad():
        for whole in parts_of(in_parts(data)):
            pairs = hmms_of(model, whole, batch_size)
            found.append(in_order(whole, [hmm.log_prob(part.values) for hmm, part in pairs]))
    return torch.cat(found)


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
    check_fit(fit)
    check_size("num_samples", num_samples)
    check_sequences("data", data)
    with torch.no_grad(), fit.at_rest():
        found = [
            new_log_evidence(fit.model, fit.parameters, part, fit.plates, num_samples)
            for part in batches_of(data, batch_size)
        ]
    return in_order(data, found)


def num_parameters(module: Callable[..., Any], data: Sequences) -> float:
    """Number of free parameters p; a row of K probabilities counts K - 1.

    Latent variables count by the dimension of their support; those of which each sequence, or each
    group, has one, as often as there are. Other parameters of a module, such as the logits of a
    softmax, and embeddings and additive effects, count by how many of them change the HMM
    independently of each other (the rank of its Jacobian); more than 2,000 of them, and those of
    :func:`pyro.param` without a constraint, each. Coefficients of a smooth term count as its
    effective degrees of freedom, a fraction, where a fit has chosen its weight.

    Args:
        module: An :class:`HMMModule`, a model of one, or any Pyro model.
        data: The sequences; one is enough unless they have variables of their own.

    Example:
        >>> data = Sequences.from_list([[0, 1]])
        >>> num_parameters(TabularHMM(2, categorical(3)), data)  # 1 + 2 + 4
        7
    """
    with PYRO, torch.no_grad(), poutine.block():
        run = module if not isinstance(module, HMMModule) else lambda data: build(module, data)
        trace = poutine.trace(run).get_trace(data)
    latent, count = [], 0
    values = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    parts = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
    for name in trace.stochastic_nodes:
        site, (path, _, last) = trace.nodes[name], name.rpartition(".")
        owner: Any = parts.get(path)
        if last in getattr(owner, "overcomplete", ()):
            latent.append(name)
        elif last == "smooth" and hasattr(owner, "freedom"):
            count += owner.freedom.sum().item()
        elif not site_is_subsample(site) and site["infer"].get("enumerate") != "parallel":
            count += _dimension(site["fn"].support, site["value"])
    if not isinstance(module, torch.nn.Module):
        sites = [site for site in trace.nodes.values() if site["type"] == "param"]
        spaces = [site["kwargs"].get("constraint", constraints.real) for site in sites]
        return count + sum(_dimension(space, x["value"]) for space, x in zip(spaces, sites))
    constrained = set()
    for part in parts.values():
        for name, (constraint, _) in getattr(part, "_pyro_params", {}).items():
            leaf = getattr(part, f"{name}_unconstrained")
            if leaf.requires_grad and id(leaf) not in constrained:  # parts may share one
                count += _dimension(constraint, getattr(part, name))
            constrained.add(id(leaf))
    leaves = dict(module.named_parameters())
    free = [n for n, x in leaves.items() if x.requires_grad and id(x) not in constrained]
    every = sum(x.numel() for x in (*(leaves[n] for n in free), *(values[n] for n in latent)))
    if every == 0 or every > MOST_PARAMETERS:
        return count + every
    return count + _rank(module, data, free, values, latent)


def _dimension(constraint: Any, value: Tensor) -> int:
    """Degrees of freedom of a constrained value; a probability of zero stays zero."""
    if isinstance(constraint, type(constraints.simplex)):  # also copies of it
        return int(((value > 0).sum(-1) - 1).sum())
    matrices = type(constraints.lower_cholesky), type(constraints.positive_definite)
    if isinstance(constraint, matrices):
        size = value.size(-1)
        return value.numel() // size * (size + 1) // 2
    return math.prod(biject_to(constraint).inverse_shape(value.shape))


def _rank(
    module: torch.nn.Module, data: Sequences, names: list[str], values: Any, latent: list[str]
) -> int:
    """Number of identifiable parameters, by a Jacobian rank; of a BlockHMM, of all parameters.

    The rank of random combinations of the rows of the Jacobian of all probabilities of the chain
    and of observations, in float64.
    """
    double = copy.deepcopy(module).double()
    values = {n: v.double() if v.is_floating_point() else v for n, v in values.items()}
    free = {name: values[name].clone().requires_grad_() for name in latent}
    leaves = [*(double.get_parameter(name) for name in names), *free.values()]
    size = sum(leaf.numel() for leaf in leaves)
    with PYRO, poutine.block(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        with AtValues({**values, **free}):
            hmm = build(double, data) if isinstance(double, HMMModule) else double(data)
        if isinstance(hmm, BlockHMM):
            return size
        factors = [*hmm.chain.parameters.values(), _likelihoods(hmm, data)]
        outputs = torch.cat([factor.double().exp().flatten() for factor in factors])
        rows = []
        for _ in range(size + 4 if outputs.requires_grad else 0):
            outcome = (outputs * torch.randn_like(outputs)).sum()
            parts = torch.autograd.grad(outcome, leaves, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
    jacobian = torch.stack(rows or [torch.zeros(size)]).nan_to_num(0.0)
    jacobian = jacobian / jacobian.norm(dim=0).clamp(min=1e-30)
    return int(torch.linalg.matrix_rank(jacobian, rtol=1e-9))


def _likelihoods(hmm: HMM, data: Sequences) -> Tensor:
    """Log-likelihoods, per state, of all symbols, or of observations sampled from all states."""
    emission = hmm.emission
    if hmm.emission_per_step or isinstance(emission, Autoregressive):
        return hmm.log_likelihood(data.values)
    if is_categorical(emission):
        return log_probs(emission)
    samples = emission.sample(torch.Size([50])).reshape(-1, *emission.event_shape)
    return log_likelihood(emission, samples.detach())


def aic(fit: Fit, data: Data, num_parameters: float | None = None) -> float:
    r"""Akaike's information criterion (1974), in nats times two: less is better.

    .. math:: -2 \log p(x | \hat\theta) + 2 p

    It is meant for maximum likelihood, thus for flat priors. Variables of which each sequence has
    one, such as random effects, count as parameters at their fitted values (the conditional
    criterion); how far a prior shrinks them is not counted, which leave-one-out by
    :func:`pyrohmm.to_arviz` does.

    Args:
        fit: From :func:`fit_em` or :func:`fit_map`.
        data: What was fitted; of labels it is the evidence with them, as the fit maximised it.
        num_parameters: p; by default that of :func:`num_parameters`.
    """
    evidence, count = _evidence_and_size(fit, data, num_parameters)
    return 2.0 * count - 2.0 * evidence


def bic(fit: Fit, data: Data, num_parameters: float | None = None) -> float:
    r"""Bayesian information criterion, in nats times two: less is better.

    .. math:: -2 \log p(x | \hat\theta) + p \log n

    Schwarz (1978), with n the number of observed steps, as is usual for hidden Markov models.
    Arguments are those of :func:`aic`.
    """
    evidence, count = _evidence_and_size(fit, data, num_parameters)
    return math.log(max(in_parts(data).num_observed, 1)) * count - 2.0 * evidence


def _evidence_and_size(fit: Fit, data: Data, count: float | None = None) -> tuple[float, float]:
    """Log evidence, in nats, and the number of free parameters, if it is not given."""
    check_fit(fit)
    if fit.method not in ("EM", "MAP"):
        text = f"fit must be one of EM or MAP, a point; got one of {fit.method}"
        raise ValueError(f"{text}. Compare distributions by arviz.loo(to_arviz(fit, data)).")
    data = in_parts(data)
    if fit.unit == "observed step" and data.num_observed != fit.num_observed:
        text = f"data must be those of the fit, of {fit.num_observed:,} observed steps"
        raise ValueError(f"{text}; got {data.num_observed:,}. Of other data: fit.score(data).")
    with torch.no_grad():
        known = (
            (hmm if part.labels is None else hmm.restrict(part.labels)).log_prob(part.values)
            for hmm, part in hmms_of(fit, data, 256)
        )
        evidence = sum(each.double().sum().item() for each in known)
    if count is None:
        some = data if isinstance(data, Sequences) else data.first
        if some.is_ragged and not fit.plates:
            some = max(some.buckets, key=lambda part: part.num_rows)
        with fit.at_rest():
            count = num_parameters(fit.model, some)
    return evidence, count


class LikelihoodRatio(NamedTuple):
    """Result of a likelihood-ratio test.

    Attributes:
        statistic: Twice the difference of log-likelihoods, in nats.
        degrees: How many more free parameters the larger model has.
        p_value: Probability of a larger statistic, if the smaller model holds.
    """

    statistic: float
    degrees: float
    p_value: float


def likelihood_ratio_test(smaller: Fit, larger: Fit, data: Sequences) -> LikelihoodRatio:
    r"""Likelihood-ratio test of nested models with the same number of states (Wilks, 1938).

    .. math:: 2 (\log p(x | \hat\theta_1) - \log p(x | \hat\theta_0)) \sim \chi^2_d

    Such as with and without a covariate, or transitions that are forbidden. Both are fitted to all
    ``data`` by maximum likelihood, thus with flat priors, from several starts. The distribution
    holds for many data, and inside of the space of the larger model's parameters: not for
    probabilities that the smaller one sets to zero, where p-values are too large.

    Args:
        smaller: From :func:`fit_em` or :func:`fit_map`.
        larger: That of a model which contains the smaller one.
        data: What was fitted.

    Raises:
        ValueError: If the numbers of states differ: then the statistic has another distribution,
            as a state that is not needed has no definite parameters, and criteria such as
            :func:`bic` or :func:`cross_validate` compare; if ``larger`` has no more parameters; or
            if its likelihood is less.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([torch.randn(50, 2) + torch.arange(50)[:, None] // 25 * 4])
        >>> fits = [fit_em(TabularHMM(2, f(2)), data) for f in (normal_tied, normal_full)]
        >>> metrics.likelihood_ratio_test(*fits, data).degrees  # of one covariance more
        3
    """
    from_small, count = _evidence_and_size(smaller, data)
    from_large, more = _evidence_and_size(larger, data)
    states = [fit.hmm(data).num_states for fit in (smaller, larger)]
    if states[0] != states[1]:
        raise ValueError(
            f"smaller and larger must have one number of states; got {states[0]} and {states[1]}. "
            "Else the ratio is not chi-squared: compare metrics.bic or metrics.cross_validate."
        )
    if more <= count:
        raise ValueError(
            f"larger must have more free parameters than smaller; got {more} and {count}. "
            "Are they the other way round?"
        )
    statistic = 2.0 * (from_large - from_small)
    if statistic < -1e-6 * abs(from_small):
        raise ValueError(
            f"larger must have the larger likelihood; it is {-statistic / 2:.4g} nats less. It has "
            "a prior that pulls, is no larger model, or ended at a poor optimum: run more restarts."
        )
    statistic = max(statistic, 0.0)
    return LikelihoodRatio(statistic, more - count, float(chdtrc(more - count, statistic)))


class CrossValidation(NamedTuple):
    """Held-out log evidence of each sequence, by cross-validation.

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
        """Held-out log evidence per observed step, in nats."""
        return self.log_evidence.double().sum().item() / max(self.num_observed, 1)


def cross_validate(
    fit: Callable[[Sequences], Fit],
    data: Sequences,
    num_folds: int = 5,
    generator: torch.Generator | None = None,
) -> CrossValidation:
    """K-fold cross-validation: log evidence of each fold under a fit to all others.

    Calls with as many sequences and folds have the same folds, so that fits of several numbers of
    states can be compared.

    With a flat prior, a symbol that the other folds lack makes a sequence impossible: give
    :func:`categorical` a concentration above one.

    Args:
        fit: Called with the sequences to fit, such as ``lambda data: fit_em(module, data)``.
        data: The sequences.
        num_folds: At least 2, at most the number of sequences.
        generator: Decides who is in which fold; by default always the same.

    Raises:
        ValueError: If ``num_folds`` is out of range.

    Example:
        >>> data = datasets.casino(num_sequences=10, num_steps=20)
        >>> module = TabularHMM(2, categorical(6))
        >>> found = cross_validate(lambda part: fit_em(module, part), data, num_folds=2)
        >>> found.log_evidence.shape, found.num_observed
        (torch.Size([10]), 200)
    """
    if isinstance(fit, torch.nn.Module) or not callable(fit):
        text = f"fit must be a function that fits a part of the data; got {type(fit).__name__}"
        raise TypeError(f"{text}. Give lambda part: fit_em(module, part).")
    check_sequences("data", data)
    if not 2 <= num_folds <= len(data):
        text = f"num_folds must lie between 2 and N = {len(data)}; got {num_folds}"
        raise ValueError(f"{text}. Ask for fewer.")
    order = torch.randperm(len(data), generator=generator or torch.Generator().manual_seed(0))
    fold = torch.empty(len(data), dtype=torch.long)
    fold[order] = torch.arange(len(data)) % num_folds
    parts = []
    for number in range(num_folds):
        fitted = fit(data[fold != number])
        parts.append(held_out_log_evidence(fitted, data[fold == number]).cpu())
    scores = torch.cat(parts)[fold.argsort(stable=True).argsort()]
    return CrossValidation(scores, fold, data.num_observed)


# States: how often they are used, and their agreement with a truth -------------------------------


class StateUsage(NamedTuple):
    """Expected number of steps in each state, and the effective number of states.

    Attributes:
        counts: ``(K,)`` float64, expected number of steps in each state; they sum to the number of
            steps.
        effective: exp(entropy of the counts over their sum): the number of equally frequent states
            that would be as even.
    """

    counts: Tensor
    effective: float


def state_usage(model: HMM | Fit, data: Sequences, batch_size: int = 256) -> StateUsage:
    r"""Expected number of steps in each state, :math:`\sum_{nt} p(z_t^n = k \mid x^n)`.

    With states in blocks, memory is that of the block of each symbol, not of all K states.

    Args:
        model: An :class:`HMM` built for these sequences, or a :class:`Fit`.
        data: The sequences.
        batch_size: How many are evaluated at a time, if ``model`` is a fit.

    Example:
        >>> data = Sequences.from_list([[0, 0, 0, 1]])
        >>> even, emission = torch.full((2, 2), 0.5).log(), Categorical(torch.eye(2))
        >>> found = state_usage(HMM(even[0], even, emission, data.lengths), data)
        >>> found.counts, round(found.effective, 3)
        (tensor([3., 1.], dtype=torch.float64), 1.755)
    """
    hmms = hmms_of(model, data, batch_size)
    counts = sum(_expected_steps(hmm, part.values) for hmm, part in hmms)
    shares = counts / counts.sum()
    return StateUsage(counts, float(torch.special.entr(shares).sum().exp()))


def hmms_of(model: HMM | Fit, data: Data, batch_size: int) -> Iterable[tuple[HMM, Sequences]]:
    """Iterate over pairs of HMM and sequences; the HMMs of a fit are built batch by batch."""
    if not isinstance(model, HMM):
        check_fit(model)
    for whole in parts_of(in_parts(data)):
        parts = [whole] if isinstance(model, HMM) else batches_of(whole, batch_size)
        yield from zip([model] if isinstance(model, HMM) else model.hmms(parts), parts)


def batches_of(data: Sequences, batch_size: int) -> list[Sequences]:
    """Minibatches of sequences of similar length, as parts of the whole set."""
    members = [chosen for each in data.bucket_members for chosen in each.split(batch_size)]
    return [data.batch(chosen) for chosen in members]


def in_order(data: Sequences, found: list[Tensor]) -> Tensor:
    """Concatenate per-sequence results of :func:`batches_of`, in the order of the data."""
    whole = torch.cat(found)
    return whole if len(found) == 1 else whole[torch.cat(data.bucket_members).argsort()]


def _expected_steps(hmm: HMM, values: Tensor) -> Any:
    """Expected number of steps in each state, ``(K,)`` float64."""
    with torch.no_grad():
        if not isinstance(hmm, BlockHMM) or hmm.observed is not None:
            return hmm.posterior(values).state_probs.flatten(0, -2).double().sum(0)
        found = hmm.block_posterior(values)
        exists = found.states >= 0
        counts = torch.zeros(hmm.num_states, dtype=torch.float64, device=found.probs.device)
        return counts.index_add_(0, found.states[exists], found.probs[exists].double())


def align(predicted: Tensor, truth: Tensor, num_states: int | None = None) -> Tensor:
    """Permutation of predicted states that agrees with the true ones at most steps.

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
    check_integers("predicted", predicted, "Of probabilities take .argmax(-1).")
    check_integers("truth", truth)
    check_shape("predicted", predicted, tuple(truth.shape), "that of truth")
    predicted, truth = predicted.long(), truth.long()
    known = truth >= 0
    rows, columns = predicted[known].flatten(), truth[known].flatten()
    if rows.numel() == 0:
        raise ValueError(
            f"truth must have a known state; got {truth.numel()} that are -1, which means unknown. "
            "Pass the true states."
        )
    size = num_states or 1 + max(int(predicted.max()), int(truth.max()))
    check_range("predicted", rows, size, "K - 1")
    check_range("truth", columns, size, "K - 1")
    return torch.bincount(rows * size + columns, minlength=size * size).reshape(size, size)


def align_transitions(found: Tensor, truth: Tensor) -> Tensor:
    r"""Permutation of states under which a transition matrix is nearest to the true one.

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
        low, high = probs.sum(-1).aminmax()
        text = f"probs must not be negative, and sum to one; got sums {low:.4g} to {high:.4g}"
        raise ValueError(f"{text}. Divide counts by counts.sum(-1, keepdim=True).")
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


all_names_checked(globals())
