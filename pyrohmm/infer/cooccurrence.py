"""Direct fits of co-occurrences: the model, the fit, and what they are made of."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import Independent, MixtureSameFamily

from .._checks import check_size
from ..data import pair_counts
from ..data.pair_counts import _check_edges
from ..data.pair_counts import binned as binned
from ..data.pair_counts import count_pairs as count_pairs
from ..data.pair_counts import counted as counted
from ..data.pair_counts import quantile_edges as quantile_edges
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..nn.base import HMMModule, OwnParameters
from ..ops import pair_losses
from ..ops import stationary as stationary_ops
from ..ops.pair_losses import SMALL as SMALL
from ..ops.pair_losses import cross_entropy as cross_entropy
from ..ops.pair_losses import squared_distance as squared_distance
from ..ops.pairs import Pairs as Pairs
from ..ops.stationary import joint_probs as joint_probs
from ..ops.stationary import predicted as predicted
from ..ops.stationary import stationary as stationary
from ..ops.stationary import stationary_detached as stationary_detached
from .fit import fit_map
from .models import LogPrior, build
from .results import Fit

if TYPE_CHECKING:
    from ..distributions.hmm import HMM


def bin_probs(emission: Any, edges: Tensor) -> Tensor:
    """Probability of each bin in each state, ``(*B, K, V)``: differences of ``emission.cdf``.

    Args:
        emission: A distribution of numbers, or of vectors of size one, batched over K states.
        edges: ``(V - 1,)``, rising.

    Raises:
        TypeError: If the observations are larger, or the distribution has no ``cdf``.

    Example:
        >>> bin_probs(Normal(torch.tensor([0.0, 9.0]), 1.0), torch.tensor([0.0, 9.0]))
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.5000, 0.5000]])
    """
    _check_edges(edges)
    if emission.event_shape.numel() != 1:
        raise TypeError(
            "bins are of numbers; the module emits observations of shape "
            f"{tuple(emission.event_shape)}."
        )
    points = edges.double().reshape(-1, *(1,) * len(emission.batch_shape + emission.event_shape))
    below = _cdf(emission, points).reshape(len(edges), *emission.batch_shape).movedim(0, -1)
    ends = [torch.full_like(below[..., :1], end) for end in (0.0, 1.0)]
    probs = torch.cat([ends[0], below, ends[1]], -1).diff(dim=-1)
    return probs.clamp(min=0.0).to(edges.dtype)


def _cdf(distribution: Any, points: Tensor) -> Tensor:
    """Probability of a value up to each of ``points``, which broadcast with one observation."""
    if isinstance(distribution, Independent):  # of one component
        return _cdf(distribution.base_dist, points)
    if isinstance(distribution, MixtureSameFamily):
        at = -1 - len(distribution.event_shape)
        parts = _cdf(distribution.component_distribution, points.unsqueeze(at))
        shares = distribution.mixture_distribution.probs
        return (parts * shares.reshape(shares.shape + (1,) * (-1 - at))).sum(at)
    try:
        return distribution.cdf(points)
    except NotImplementedError:
        raise TypeError(
            f"bins need an emission with a cdf, such as Normal; {type(distribution).__name__} has "
            "none."
        ) from None


def average_probs(hmm: HMM, num_steps: int) -> Tensor:
    """Mean law of the state over all steps but the last: that of the first step of a random pair.

    For chains that do not begin in their stationary law.
    ``predicted(average_probs(hmm, T), hmm.log_transition, probs)`` is the law of pairs of adjacent
    symbols in sequences of T steps.

    Args:
        hmm: Its initial law and its transition matrix are used.
        num_steps: T, at least 2.

    Returns:
        ``(*B, K)`` probabilities.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> coins = Categorical(torch.ones(2, 2) / 2)
        >>> hmm = HMM(torch.tensor([1.0, 0.0]).log(), swap.log(), coins, torch.tensor(4))
        >>> average_probs(hmm, 4)  # of the states 0, 1, 0
        tensor([0.6667, 0.3333])
    """
    check_size("num_steps", num_steps)
    if num_steps < 2:
        raise ValueError("num_steps must be at least 2: a single step is in no pair; got 1.")
    if hmm.transition_per_step:
        raise ValueError("hmm must have one transition matrix for all steps; it has one per step.")
    moves = hmm.log_transition.exp()
    law = hmm.log_initial.exp().unsqueeze(-2)  # (*B, 1, K)
    total = law
    for _ in range(num_steps - 2):
        law = law @ moves
        total = total + law
    return total.squeeze(-2) / (num_steps - 1)


class CooccurrenceModel(OwnParameters):
    r"""The law of pairs of symbols, counted and predicted, and how far they are apart, as a factor.

    .. math:: -\sum_d w_d \, \mathrm{loss}(\Theta_d, B, W_d), \quad
              \Theta_d = \mathrm{diag}(\pi) A^d

    over lags d, by default one: see :mod:`pyrohmm.cooccurrence`. It never looks at sequences, so
    that its cost does not depend on how many there are.

    Sites: those of ``module``, then ``log_prior`` if there is one, then ``pairs``.

    Args:
        module: Builds an HMM that emits symbols, or numbers that ``edges`` put into bins.
        target: What was counted: :class:`cooccurrence.Pairs`, or dense shares ``(V, V)`` of
            adjacent symbols, which may have batch dimensions; or a list of them, of several lags.
        weight: w, which weighs the loss against the priors; one number, or one for each target.
        log_prior: A further log-density of the HMM built.
        loss: Called with the joint law of the states, the probabilities of symbols and a target:
            :func:`cooccurrence.squared_distance`, :func:`cooccurrence.cross_entropy`, or your own.
        stationary: Called with ``log_transition``, returns the law of the state, ``(*B, K)``:
            :func:`cooccurrence.stationary`, or :func:`cooccurrence.stationary_detached`.
        edges: ``(V - 1,)``, between the bins of emissions that are numbers.
        pairs_per_step: Number of pairs drawn at each call in place of all, in proportion to their
            counts; the loss is then an unbiased estimate.
        generator: Source of randomness for them; torch's global one by default.

    Raises:
        TypeError: If a target is neither pairs nor a tensor, or what the module builds emits
            neither symbols nor numbers with edges.
        ValueError: If the model changes with the step, V is not that of the target, there are not
            as many weights as targets, or pairs are to be drawn from a dense target.
    """

    when_impossible = (
        "a pair that occurs has probability zero: begin at another fit, with "
        "init=init_to_value(values=fit.start)"
    )

    def __init__(
        self,
        module: HMMModule,
        target: Pairs | Tensor | Sequence[Pairs | Tensor],
        weight: float | Sequence[float] = 1.0,
        log_prior: LogPrior | None = None,
        *,
        loss: Callable[[Tensor, Tensor, Any], Tensor] = pair_losses.squared_distance,
        stationary: Callable[[Tensor], Tensor] = stationary_ops.stationary,
        edges: Tensor | None = None,
        pairs_per_step: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        targets = [target] if isinstance(target, Pairs | Tensor) else list(target)
        weights = list(weight) if isinstance(weight, Sequence) else [weight] * len(targets)
        for each in targets:
            if not isinstance(each, Pairs | Tensor):
                raise TypeError(
                    "target must be Pairs or a dense tensor, or a list of them; got "
                    f"{type(each).__name__}. Call pair_counts.count_pairs on sequences."
                )
            if isinstance(each, Tensor) and len(targets) > 1:
                raise ValueError(
                    "target: dense shares are of adjacent symbols, and do not say of which lag; "
                    "several targets must be Pairs. Call pair_counts.count_pairs for each lag."
                )
            if pairs_per_step is not None and isinstance(each, Tensor):
                raise ValueError("pairs_per_step needs Pairs to draw from; the target is dense.")
        if len(weights) != len(targets) or not targets:
            raise ValueError(
                f"weight must be one number, or one for each target; got {len(weights)} for "
                f"{len(targets)} targets."
            )
        for one in weights:
            if isinstance(one, Tensor) or not 0 < one < math.inf:
                raise ValueError(
                    f"weight must be a positive number, or one for each target; got {one!r}."
                )
        for name, given in (("loss", loss), ("stationary", stationary)):
            if not callable(given):
                raise TypeError(f"{name} must be a function; got {type(given).__name__}.")
        if pairs_per_step is not None:
            check_size("pairs_per_step", pairs_per_step)
        self.module, self.log_prior, self.loss, self.stationary = (
            module, log_prior, loss, stationary
        )  # fmt: skip
        self.targets, self.weights = targets, weights
        self.pairs_per_step, self.generator = pairs_per_step, generator
        self.register_buffer("edges", edges)
        self.register_buffer("digest", self._digest())  # so that checkpoints tell models apart

    def _digest(self) -> Tensor:
        """A number that differs between models: ``()`` integer."""
        names = [getattr(each, "__qualname__", "") for each in (self.loss, self.stationary)]
        digest = zlib.crc32(repr((names, self.weights, self.pairs_per_step)).encode())
        for each in self.targets:
            parts = [each] if isinstance(each, Tensor) else [each.first, each.second, each.counts]
            for part in parts:
                digest = zlib.crc32(part.detach().cpu().contiguous().numpy().data, digest)
        return torch.tensor(digest)

    def forward(self, data: Sequences) -> HMM:
        """Return the HMM built for ``data``, of which nothing but the sizes is used."""
        hmm = build(self.module, data)
        if hmm.transition_per_step or hmm.emission_per_step:
            raise ValueError(
                "co-occurrences are those of one law for all steps; the model changes with the "
                "step. Fit it with fit_map or fit_em."
            )
        probs = self._probs(hmm.emission)
        if self.log_prior is not None:
            pyro.factor("log_prior", self.log_prior(hmm))
        law = self.stationary(hmm.log_transition)
        self.targets = [each.to(probs.device) for each in self.targets]
        total: Any = 0.0
        for target, weight in zip(self.targets, self.weights):
            lag = 1 if isinstance(target, Tensor) else target.lag
            if self.pairs_per_step is not None and isinstance(target, Pairs):
                target = target.sample(self.pairs_per_step, self.generator)
            joint = stationary_ops.joint_probs(law, hmm.log_transition, lag)
            total = total - weight * self.loss(joint, probs, target)
        pyro.factor("pairs", total)
        return hmm

    def _probs(self, emission: Any) -> Tensor:
        """Probabilities of symbols, or of bins, ``(*B, K, V)``."""
        if self.edges is not None:
            return bin_probs(emission, self.edges)
        if not is_categorical(emission):
            raise TypeError(
                "co-occurrences are those of symbols; the module emits "
                f"{type(emission).__name__}. Give edges, which put numbers into bins."
            )
        return emission.probs


def fit_cooccurrence(
    module: HMMModule,
    data: Sequences | Pairs | Tensor | Iterable[Pairs | Tensor],
    num_symbols: int | None = None,
    *,
    lags: Iterable[int] | None = None,
    loss: Callable[[Tensor, Tensor, Any], Tensor] = pair_losses.squared_distance,
    stationary: Callable[[Tensor], Tensor] = stationary_ops.stationary,
    edges: Tensor | None = None,
    weight: float | list[float] | None = None,
    pairs_per_step: int | None = None,
    log_prior: Callable[[HMM], Tensor] | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Fit:
    r"""Match the law of pairs of symbols: :func:`fit_map` of a :class:`CooccurrenceModel`.

    Pairs are counted once. A step costs O(V K² + M K) for V symbols and M distinct pairs that
    occur, however many sequences there are and however long.

    Pairs at one distance leave much of the chain open: models that predict them equally well differ
    in what they say of whole sequences. Several ``lags`` tell them apart, and :func:`fit_em` and
    :func:`fit_map` go on from ``fit.values``. The first state has no part in pairs, and stays where
    its prior puts it.

    Args:
        module: Builds an HMM that emits symbols, or numbers that ``edges`` put into bins.
        data: The sequences; or pairs that were counted before, as from a stream:
            :func:`cooccurrence.count_pairs`; or dense shares ``(V, V)``; or a list of these, of
            several lags.
        num_symbols: V; by default that of the module. Not needed with ``edges``, nor for pairs.
        lags: How many steps apart pairs of the sequences are, such as ``(1, 2, 5)``; the losses of
            all lags are added. Adjacent steps by default.
        loss: :func:`cooccurrence.squared_distance`, :func:`cooccurrence.cross_entropy`, or your
            own: see :class:`CooccurrenceModel`. For thousands of symbols take the cross-entropy:
            the squared distance has next to no slope at small probabilities, so that priors may
            hold a fit at the uniform law.
        stationary: :func:`cooccurrence.stationary`; to leave out its gradient, as published code
            does, :func:`cooccurrence.stationary_detached`.
        edges: ``(V - 1,)``, between bins of numbers, such as :func:`cooccurrence.quantile_edges`.
            A state far from all numbers has no gradient: where numbers lie far from where priors
            put the states, begin at another fit, ``init=init_to_value(values=fit.start)``.
        weight: Of the loss, against the priors. By default that of the data: the number of pairs n
            for the cross-entropy, which is then in nats, and for the squared distance
            :math:`n / 2 \lVert W \rVert^2`, with which the two agree to second order where all
            pairs that occur are equally frequent. Of each lag its own.
        pairs_per_step: Number of pairs that are drawn at each step, in place of all; losses have
            noise then, and ``tolerance=None`` runs all steps.
        log_prior: A further log-density of the HMM built.
        generator: Source of randomness for ``pairs_per_step``; torch's global one by default.
        **options: Those of :func:`fit_map`, ``restarts`` among them.

    Returns:
        The fit; ``num_observed`` is the number of pairs (those of the first lag).

    Raises:
        TypeError: If ``data`` are none of these, or a model has neither symbols nor edges.
        ValueError: If there is no pair, V of data and module differ, ``weight`` is missing for
            dense shares, or an option is given that only sequences have.

    Example:
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_cooccurrence(TabularHMM(2, categorical(2)), data, restarts=4)
        >>> fit.restarts.losses.shape[0], fit.num_observed
        (4, 38)
    """
    for name in ("batch_size", "batch_tokens"):
        if name in options:
            raise ValueError(f"{name} is of sequences, which are not read at each step; give "
                             "pairs_per_step.")  # fmt: skip
    notes, targets = [], list[Pairs | Tensor]()
    if isinstance(data, Sequences):
        if data.covariates is not None:
            raise ValueError(
                "co-occurrences are those of one law for all steps; data has covariates. Fit it "
                "with fit_map or fit_em."
            )
        if data.num_labelled:
            notes = ["the labels of the data were not used: pairs have none"]
        if edges is not None:
            data, num_symbols = pair_counts.binned(data, edges), len(edges) + 1
        elif num_symbols is None:
            num_symbols = _num_symbols(module)
        lags = (1,) if lags is None else lags
        if isinstance(lags, int) or not (lags := list(lags)):
            raise ValueError(f"lags must be some numbers of steps, such as (1, 2); got {lags}.")
        targets += [pair_counts.count_pairs(data, num_symbols, lag) for lag in lags]
    else:
        if lags is not None:
            raise ValueError("lags are of sequences; pairs have theirs already. Count each lag: "
                             "pair_counts.count_pairs(data, num_symbols, lag).")  # fmt: skip
        targets += [data] if isinstance(data, Pairs | Tensor) else data
        if any(isinstance(each, Sequences) for each in targets):
            raise TypeError(
                "data must be Sequences or what was counted; got several Sequences. Count their "
                "pairs: pair_counts.count_pairs(data, num_symbols)."
            )
    model = CooccurrenceModel(
        module,
        targets,
        [_weight(each, loss) for each in targets] if weight is None else weight,
        log_prior,
        loss=loss,
        stationary=stationary,
        edges=edges,
        pairs_per_step=pairs_per_step,
        generator=generator,
    )
    total = targets[0].total if isinstance(targets[0], Pairs) else 0
    fit = fit_map(model, _Counted(total), generator=generator, **options)
    return replace(fit, notes=fit.notes + notes)


class _Counted(Sequences):
    """What stands for the data of a fit that reads counts of them: a single step, of no meaning."""

    def __init__(self, num_observed: int) -> None:
        super().__init__(torch.zeros(1, 1, dtype=torch.long), torch.tensor([1]))
        self._num_observed = num_observed

    @property
    def num_observed(self) -> int:
        """How many were counted."""
        return self._num_observed


def _num_symbols(module: HMMModule) -> int:
    """V of the symbols that a module emits; it uses up no random numbers."""
    with torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
        emission: Any = module(torch.tensor([1])).emission
    if not is_categorical(emission):
        raise TypeError(
            f"co-occurrences are those of symbols; the module emits {type(emission).__name__}. "
            "Give edges, which put numbers into bins."
        )
    return emission.probs.size(-1)


def _weight(target: Pairs | Tensor, loss: Any) -> float:
    """The weight of a loss that makes it, nearly or exactly, one in nats for all the data."""
    if not isinstance(target, Pairs):
        raise ValueError(
            "weight must be given for dense shares, which do not say of how many pairs they are."
        )
    if loss is pair_losses.squared_distance:
        return target.total / (2 * target.squares)
    return float(target.total)
