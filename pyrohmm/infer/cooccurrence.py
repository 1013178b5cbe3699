"""Fits to the joint distribution of symbols a few steps apart (Sicking et al., 2020).

The names of :mod:`pyrohmm.data.pair_counts`, :mod:`pyrohmm.ops.pairs` and
:mod:`pyrohmm.ops.markov` that such fits need are available here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import pyro
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.infer.autoguide import init_to_sample
from torch import Tensor

from ..data.pair_counts import binned as binned
from ..data.pair_counts import check_edges
from ..data.pair_counts import count_pairs as count_pairs
from ..data.pair_counts import counted as counted
from ..data.pair_counts import quantile_edges as quantile_edges
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..distributions.quantiles import cdf
from ..nn.base import HMMModule, OwnParameters
from ..ops.markov import joint_probs as joint_probs
from ..ops.markov import predicted as predicted
from ..ops.markov import stationary as stationary
from ..ops.markov import stationary_detached as stationary_detached
from ..ops.pairs import Pairs as Pairs
from ..ops.pairs import cross_entropy as cross_entropy
from ..ops.pairs import relative_distance as relative_distance
from ..ops.pairs import squared_distance as squared_distance
from .descent import MINIBATCHES, FitOptions
from .gradient import fit_map, init_near, near_data
from .models import LogPrior, build, exclusive, factor_log_prior
from .parameters import Values
from .results import Fit

Target = Pairs | Tensor
Loss = Callable[[Tensor, Tensor, Any], Tensor]


def bin_probs(emission: TorchDistribution, edges: Tensor) -> Tensor:
    """Probability of each bin in each state, ``(*B, K, V)``: differences of ``emission.cdf``.

    Args:
        emission: A distribution of numbers, or of vectors of size one, batched over K states.
        edges: ``(V - 1,)``, rising.

    Raises:
        TypeError: If the observations are larger.
        ValueError: If the distribution has no ``cdf``.

    Example:
        >>> bin_probs(Normal(torch.tensor([0.0, 9.0]), 1.0), torch.tensor([0.0, 9.0]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.5000]])
    """
    check_edges(edges)
    if emission.event_shape.numel() != 1:
        raise TypeError(
            "bins are of numbers; the module emits observations of shape "
            f"{tuple(emission.event_shape)}."
        )
    points = edges.double().reshape(-1, *(1,) * len(emission.batch_shape + emission.event_shape))
    below = cdf(emission, points).reshape(len(edges), *emission.batch_shape).movedim(0, -1)
    ends = [torch.full_like(below[..., :1], end) for end in (0.0, 1.0)]
    probs = torch.cat([ends[0], below, ends[1]], -1).diff(dim=-1)
    return probs.clamp(min=0.0).to(edges.dtype)


class CooccurrenceModel(OwnParameters):
    r"""Joint distribution of symbols d steps apart, counted and predicted; their loss is a factor.

    .. math:: -\sum_d w_d \, \mathrm{loss}(\Theta_d, B, W_d), \quad
              \Theta_d = \mathrm{diag}(\pi) A^d

    over lags d, by default one. Sequences are not read, so that the cost of a step does not depend
    on their number.

    Sites: those of ``module``, then ``log_prior`` if there is one, then ``pairs``.

    Args:
        module: Builds an HMM that emits symbols, or numbers that ``edges`` put into bins.
        target: W: the counted :class:`cooccurrence.Pairs`, or the dense shares ``(V, V)`` of
            adjacent symbols, which may have batch dimensions; or a list of them, of several lags.
        weight: w, the weight of the loss against the priors; one number, or one for each target.
        log_prior: A further log-density of the HMM built.
        loss: Called with the joint probabilities of the states, the probabilities of symbols and a
            target: :func:`cooccurrence.squared_distance`, :func:`cooccurrence.relative_distance`,
            :func:`cooccurrence.cross_entropy`, or a function of yours.
        stationary: Called with ``log_transition``, returns the marginal probabilities of the state
            ``(*B, K)``: :func:`cooccurrence.stationary`, or
            :func:`cooccurrence.stationary_detached`.
        edges: ``(V - 1,)``, between the bins of emissions that are numbers.
        pairs_per_step: Number of pairs sampled at each call in place of all, in proportion to their
            counts; the loss is then an unbiased estimate.
        generator: Source of randomness for them; torch's global one by default.

    Raises:
        TypeError: If the module emits neither symbols nor numbers with edges.
        ValueError: If the model changes with the step, V is not that of the target, or there are
            not as many weights as targets.
    """

    # What fits say of an infinite loss, in place of what they say of sequences.
    when_impossible = (
        "a pair that occurs has probability zero: begin at another fit, with start=fit"
    )

    def __init__(
        self,
        module: HMMModule,
        target: Target | Sequence[Target],
        weight: float | Sequence[float] = 1.0,
        log_prior: LogPrior | None = None,
        *,
        loss: Loss = squared_distance,
        stationary: Callable[[Tensor], Tensor] = stationary,
        edges: Tensor | None = None,
        pairs_per_step: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.targets = [target] if isinstance(target, Pairs | Tensor) else list(target)
        if len(self.targets) > 1 and any(isinstance(each, Tensor) for each in self.targets):
            raise ValueError(
                "target: dense shares do not say of which lag they are; several targets must be "
                "Pairs. Call pair_counts.count_pairs for each lag."
            )
        self.weights: list[Any] = (
            list(weight) if isinstance(weight, Sequence) else [weight] * len(self.targets)
        )
        if not all(0 < each < math.inf for each in self.weights):
            raise ValueError(
                f"weight must be a positive number, or one for each target; got {weight!r}."
            )
        self.module, self.log_prior, self.loss, self.stationary = (
            module, log_prior, loss, stationary
        )  # fmt: skip
        self.pairs_per_step, self.generator = pairs_per_step, generator
        self.register_buffer("edges", edges)

    def forward(self, data: Sequences) -> HMM:
        """Return the HMM built for ``data``, of which nothing but the sizes is used."""
        hmm = build(self.module, data)
        hmm.check_constant("fit_cooccurrence")
        emission: Any = hmm.emission
        probs = _symbol_probs(emission) if self.edges is None else bin_probs(emission, self.edges)
        if self.log_prior is not None:
            factor_log_prior(self.log_prior, hmm)
        marginal = self.stationary(hmm.log_transition)
        self.targets = [target.to(probs.device) for target in self.targets]
        total: Any = 0.0
        for target, weight in zip(self.targets, self.weights, strict=True):
            lag = 1 if isinstance(target, Tensor) else target.lag
            if self.pairs_per_step is not None and isinstance(target, Pairs):
                target = target.sample(self.pairs_per_step, self.generator)
            joint = joint_probs(marginal, hmm.log_transition, lag)
            total = total - weight * self.loss(joint, probs, target)
        pyro.factor("pairs", total)
        return hmm


@exclusive()
def fit_cooccurrence(  # noqa: D417  # from num_iterations on: those of fit_map
    module: HMMModule,
    data: Sequences | Target | Iterable[Target],
    num_symbols: int | None = None,
    *,
    lags: Iterable[int] | None = None,
    loss: Loss = squared_distance,
    stationary: Callable[[Tensor], Tensor] = stationary,
    edges: Tensor | None = None,
    weight: float | list[float] | None = None,
    pairs_per_step: int | None = None,
    log_prior: LogPrior | None = None,
    num_iterations: int = 1000,
    learning_rate: float = 0.05,
    tolerance: float | None = 1e-5,
    start: Callable[..., Any] | Values | Fit = init_to_sample,
    restarts: int = 1,
    validation: Sequences | None = None,
    priors: bool = True,
    **options: Unpack[FitOptions],
) -> Fit:
    r"""Fit the joint distribution of symbols some steps apart: MAP of :class:`CooccurrenceModel`.

    Pairs are counted once. A step costs O(V K² + M K) for V symbols and M distinct pairs, however
    many sequences there are. Pairs at one lag do not determine the chain: models that predict them
    equally well may differ for whole sequences. Several ``lags`` distinguish them, and
    ``fit.parameters`` initialise :func:`fit_em` and :func:`fit_map`. The first state is in no pair,
    and follows its prior.

    Arguments that are not listed, from ``num_iterations`` on, are those of :func:`fit_map`.

    Args:
        module: Builds an HMM that emits symbols, or numbers that ``edges`` put into bins.
        data: The sequences; or pairs already counted, as from a stream, by
            :func:`cooccurrence.count_pairs`; or dense shares ``(V, V)``; or a list of these.
        num_symbols: V, for sequences of symbols; by default that of the module.
        lags: Distances of the pairs in steps, such as ``(1, 2, 5)``, whose losses are added.
            Adjacent steps by default.
        loss: As in :class:`CooccurrenceModel`. For thousands of symbols take the cross-entropy or
            the relative distance: the squared distance has hardly any slope at small probabilities,
            so that priors may hold a fit at the uniform distribution.
        stationary: As in :class:`CooccurrenceModel`; ``stationary_detached`` leaves out the
            gradient of the stationary distribution, as published code does.
        edges: ``(V - 1,)``, between bins of numbers, such as :func:`cooccurrence.quantile_edges`.
            A state far from all numbers has no gradient: where priors put states there, give
            ``start=fit``, another fit.
        weight: Of the loss, against the priors; one number, or one for each lag. By default the
            number of pairs n for the cross-entropy, which is then in nats, and for the relative
            distance, which agrees with it to second order where symbols are nearly independent;
            for the squared distance :math:`n / 2 \lVert W \rVert^2`, with which it does where all
            pairs that occur are equally frequent.
        pairs_per_step: Number of pairs sampled at each step, in place of all; losses are noisy
            then, and ``tolerance=None`` takes all steps.
        log_prior: A further log-density of the HMM built.
        **options: Further arguments: :class:`FitOptions` explains them. ``generator`` is for
            ``pairs_per_step``, which takes the place of minibatches of sequences.

    Returns:
        The fit; ``num_observed`` is the number of pairs (those of the first lag).

    Raises:
        TypeError: If a model has neither symbols nor edges.
        ValueError: If there is no pair, V of data and module differ, or ``weight`` is missing for
            dense shares.

    Example:
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_cooccurrence(TabularHMM(2, categorical(2)), data, restarts=4)
        >>> fit.restarts.losses.shape[0], fit.num_observed
        (4, 38)
    """
    for name in MINIBATCHES:
        if options.get(name) is not None:
            raise ValueError(
                f"{name} is of sequences, and a step reads counts of pairs: give pairs_per_step."
            )
    targets, notes = _targets(module, data, num_symbols, lags, edges)
    if edges is not None and isinstance(data, Sequences) and start is init_to_sample:
        start = init_near(near_data(module, data, restarts), restarts)
    model = CooccurrenceModel(
        module, targets, [_weight(each, loss) for each in targets] if weight is None else weight,
        log_prior, loss=loss, stationary=stationary, edges=edges, pairs_per_step=pairs_per_step,
        generator=options.get("generator"),
    )  # fmt: skip
    total = targets[0].total if isinstance(targets[0], Pairs) else 0
    fit = fit_map(
        model, _PlaceholderData(total), num_iterations=num_iterations, learning_rate=learning_rate,
        tolerance=tolerance, start=start, restarts=restarts, validation=validation,
        priors=priors, **options,
    )  # fmt: skip
    return replace(fit, notes=fit.notes + notes, unit="pair")


class _PlaceholderData(Sequences):
    """Placeholder data for a model that reads counts of them: a single step without meaning."""

    def __init__(self, num_observed: int) -> None:
        super().__init__(torch.zeros(1, 1, dtype=torch.long), torch.tensor([1]))
        self._num_observed = num_observed

    @property
    def num_observed(self) -> int:
        """Number of pairs counted."""
        return self._num_observed


def _targets(
    module: HMMModule,
    data: Sequences | Target | Iterable[Target],
    num_symbols: int | None,
    lags: Iterable[int] | None,
    edges: Tensor | None,
) -> tuple[list[Target], list[str]]:
    """The pairs of ``data`` at each lag, and remarks on what of the data is not used."""
    if not isinstance(data, Sequences):
        if lags is not None:
            raise ValueError("lags are of sequences; pairs have theirs already. Count each lag: "
                             "pair_counts.count_pairs(data, num_symbols, lag).")  # fmt: skip
        return [data] if isinstance(data, Pairs | Tensor) else list(data), []
    if data.covariates is not None:
        raise ValueError(
            "co-occurrences need one distribution for all steps; data has covariates. Fit it with "
            "fit_map or fit_em."
        )
    notes = ["the labels of the data were not used: pairs have none"] if data.num_labelled else []
    if edges is not None:
        data, num_symbols = binned(data, edges), len(edges) + 1
    elif num_symbols is None:
        with torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
            num_symbols = _symbol_probs(module(torch.tensor([1])).emission).size(-1)
    return [count_pairs(data, num_symbols, lag) for lag in lags or (1,)], notes


def _symbol_probs(emission: Any) -> Tensor:
    """Probabilities of symbols, ``(*B, K, V)``."""
    if not is_categorical(emission):
        raise TypeError(
            f"co-occurrences are those of symbols; the module emits {type(emission).__name__}. "
            "Give edges, which put numbers into bins."
        )
    return emission.probs


def _weight(target: Target, loss: Loss) -> float:
    """The weight with which a loss is, nearly or exactly, in nats for all the data."""
    if not isinstance(target, Pairs):
        raise ValueError("weight must be given for dense shares as data, which are not counts.")
    if loss is squared_distance:
        return target.total / (2 * target.squares)
    return float(target.total)
