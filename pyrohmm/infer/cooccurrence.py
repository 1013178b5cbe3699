"""Fits to the joint distribution of symbols a few steps apart (Sicking et al., 2020).

The names of :mod:`pyrohmm.ops.pairs` and :mod:`pyrohmm.ops.markov` that such fits need are
available here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor

from .._checks import check_integers, check_kind, check_range, check_size, names_checked
from ..data.sequences import Sequences, check_sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..nn.base import HMMModule, OwnParameters
from ..ops.markov import joint_probs as joint_probs
from ..ops.markov import predicted as predicted
from ..ops.markov import stationary as stationary
from ..ops.markov import stationary_detached as stationary_detached
from ..ops.pairs import Pairs as Pairs
from ..ops.pairs import add_up
from ..ops.pairs import cross_entropy as cross_entropy
from ..ops.pairs import relative_distance as relative_distance
from ..ops.pairs import squared_distance as squared_distance
from .descent import MINIBATCHES
from .gradient import fit_map
from .models import LogPrior, build, exclusive
from .results import Fit

CHUNK = 1 << 20  # pairs that are sorted at a time
Target = Pairs | Tensor
Loss = Callable[[Tensor, Tensor, Any], Tensor]


def count_pairs(data: Sequences | Iterable[Sequences], num_symbols: int, lag: int = 1) -> Pairs:
    """Count the pairs of symbols ``lag`` steps apart.

    Both steps of a pair lie in one sequence and are observed; steps between them need not be.

    Args:
        data: Sequences of symbols; or an iterable of them, as from a file larger than memory: only
            the distinct pairs and one of the ``Sequences`` are held at a time.
        num_symbols: V.
        lag: Distance of the pairs in steps.

    Raises:
        TypeError: If the values are not integers.
        ValueError: If a symbol is not below V, or there is no pair.

    Example:
        >>> data = Sequences.from_list([[0, 1, 1, 1], [1, 0]])
        >>> pairs = count_pairs(data, 2)
        >>> pairs.first, pairs.second, pairs.counts
        (tensor([0, 1, 1]), tensor([1, 0, 1]), tensor([1, 1, 2]))
        >>> count_pairs((data[n : n + 1] for n in range(2)), 2, lag=2)  # a stream
        Pairs(2 distinct pairs of 2 symbols, 2 in all, lag 2)
    """
    check_size("num_symbols", num_symbols)
    check_size("lag", lag)
    keys, counts = np.zeros((2, 0), np.int64)  # of all merged parts
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # not yet merged
    device = torch.device("cpu")
    for part in (data,) if isinstance(data, Sequences) else data:
        check_sequences("data", part)
        device = part.values.device
        for pairs in _keys(part, num_symbols, lag):
            parts.append(np.unique(pairs, return_counts=True))
            if sum(len(own) for own, _ in parts) > max(CHUNK, len(keys)):
                (keys, counts), parts = _merged([(keys, counts), *parts]), []
    keys, counts = _merged([(keys, counts), *parts])
    if len(keys) == 0:
        text = f"data has no two observed steps {lag} apart in one sequence; nothing to count"
        raise ValueError(f"{text}. Give a smaller lag, or longer sequences.")
    columns = *np.divmod(keys, num_symbols), counts
    first, second, number = (torch.from_numpy(column).to(device) for column in columns)
    return Pairs(first, second, number, num_symbols, lag)


def _merged(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Pair codes and their counts, summed over parts."""
    return add_up(*(np.concatenate(column) for column in zip(*parts)))


def _keys(data: Sequences, num_symbols: int, lag: int) -> Iterable[np.ndarray]:
    """Pair codes a V + b of symbols (a, b), for some sequences at a time."""
    check_integers("values of data", data.known_values)
    if len(data.shape) != 2:
        text = f"values of data must be (N, T) symbols; got {data.shape}"
        raise ValueError(f"{text}. Encode each step as one symbol.")
    symbols, known = cast(Tensor, data.packed("values")), data.known
    number = torch.arange(len(data)).repeat_interleave(data.lengths).to(symbols.device)
    both = known[:-lag] & known[lag:] & (number[:-lag] == number[lag:])
    pairs = symbols[:-lag], symbols[lag:], both
    for first, second, here in zip(*(part.split(CHUNK) for part in pairs)):
        first, second = first[here].long(), second[here].long()
        if len(first):
            check_range("values of data", torch.cat([first, second]), num_symbols, "V - 1")
            yield (first * num_symbols + second).cpu().numpy()


class CooccurrenceModel(OwnParameters):
    r"""Pyro model of pairs of symbols d steps apart: minus a loss on their counts is a factor.

    .. math:: -\sum_d w_d \, \mathrm{loss}(\Theta_d, B, W_d), \quad
              \Theta_d = \mathrm{diag}(\pi) A^d

    over lags d, by default one. Sequences are not read, so that the cost of a step does not depend
    on their number.

    Sites: those of ``module``, then ``log_prior`` if there is one, then ``pairs``.

    Args:
        module: Builds an HMM that emits symbols.
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

    Raises:
        TypeError: If the module does not emit symbols, or a target is of another kind.
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
    ) -> None:
        super().__init__()
        self.targets = [target] if isinstance(target, Pairs | Tensor) else list(target)
        kind = Pairs if len(self.targets) > 1 else Pairs | Tensor
        for each in self.targets:
            wanted = "Pairs, which know their lags, or a single tensor"
            check_kind("target", each, kind, wanted, "Make Pairs by count_pairs(data, V, lag).")
        weights: Any = weight if isinstance(weight, Sequence) else [weight] * len(self.targets)
        self.weights = list(weights)
        if not all(0 < each < math.inf for each in self.weights):
            raise ValueError(f"weight must be positive, or one for each target; got {weight!r}.")
        self.module, self.log_prior = module, log_prior
        self.loss, self.stationary = loss, stationary
        first = self.targets[0]  # of restarts that have one each, ``(R, 1, V, V)``
        self.copies = len(first) if isinstance(first, Tensor) and first.dim() > 2 else None

    def forward(self, data: Sequences) -> HMM:
        """Run the model: build the HMM, with minus the loss on the pair counts as a factor."""
        hmm = build(self.module, data)
        hmm.check_constant("fit_cooccurrence")
        probs = _symbol_probs(hmm.emission)
        if self.log_prior is not None:
            pyro.factor("log_prior", self.log_prior(hmm))
        marginal = self.stationary(hmm.log_transition)
        self.targets = [target.to(probs.device) for target in self.targets]
        total: Any = 0.0
        for target, weight in zip(self.targets, self.weights, strict=True):
            lag = 1 if isinstance(target, Tensor) else target.lag
            size = target.size(-1) if isinstance(target, Tensor) else target.num_symbols
            if size != probs.size(-1):
                text = f"num_symbols must be V of the module, {probs.size(-1)}; got {size}"
                raise ValueError(f"{text}. Leave it out, or count the pairs anew.")
            joint = joint_probs(marginal, hmm.log_transition, lag)
            total = total - weight * self.loss(joint, probs, target)
        pyro.factor("pairs", total)
        return hmm


@names_checked
@exclusive()
def fit_cooccurrence(
    module: HMMModule,
    data: Sequences | Target | Iterable[Target],
    num_symbols: int | None = None,
    *,
    lags: Iterable[int] | None = None,
    loss: Loss = squared_distance,
    stationary: Callable[[Tensor], Tensor] = stationary,
    weight: float | list[float] | None = None,
    log_prior: LogPrior | None = None,
    **options: Any,
) -> Fit:
    r"""Fit the joint distribution of symbols some steps apart: MAP of :class:`CooccurrenceModel`.

    Pairs are counted once. A step costs O(V K² + M K) for V symbols and M distinct pairs, however
    many sequences there are. Pairs at one lag do not determine the chain: models that predict them
    equally well may differ for whole sequences. Several ``lags`` distinguish them, and
    ``fit.parameters`` initialise :func:`fit_em` and :func:`fit_map`. The first state is in no pair,
    and follows its prior.

    Args:
        module: Builds an HMM that emits symbols.
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
        weight: Of the loss, against the priors; one number, or one for each lag. By default the
            number of pairs n for the cross-entropy, which is then in nats, and for the relative
            distance, which agrees with it to second order where symbols are nearly independent;
            for the squared distance :math:`n / 2 \lVert W \rVert^2`, with which it does where all
            pairs that occur are equally frequent.
        log_prior: A further log-density of the HMM built.
        **options: Further arguments of :func:`fit_map`, such as ``start`` and ``restarts``.

    Returns:
        The fit; ``num_observed`` is the number of pairs (those of the first lag).

    Raises:
        TypeError: If the module does not emit symbols.
        ValueError: If there is no pair, or ``weight`` is missing for dense shares.

    Example:
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_cooccurrence(TabularHMM(2, categorical(2)), data, restarts=4)
        >>> fit.restarts.losses.shape[0], fit.num_observed
        (4, 38)
    """
    for name in (*MINIBATCHES, "sharded"):
        if options.get(name) not in (None, False):
            text = f"{name} must be left out; got {options[name]}"
            raise ValueError(f"{text}. A step reads the counts of all pairs.")
    targets, notes = _targets(module, data, num_symbols, lags)
    model = CooccurrenceModel(
        module, targets, [_weight(each, loss) for each in targets] if weight is None else weight,
        log_prior, loss=loss, stationary=stationary,
    )  # fmt: skip
    placeholder = Sequences(torch.zeros(1, 1, dtype=torch.long), torch.tensor([1]))
    placeholder.num_observed = targets[0].total if isinstance(targets[0], Pairs) else 0
    fit = fit_map(model, placeholder, **options)
    return replace(fit, notes=fit.notes + notes, unit="pair")


def _targets(
    module: HMMModule,
    data: Sequences | Target | Iterable[Target],
    num_symbols: int | None,
    lags: Iterable[int] | None,
) -> tuple[list[Target], list[str]]:
    """Pair counts of ``data`` at each lag, and notes on data that are not used."""
    if not isinstance(data, Sequences):
        if lags is not None:
            text = f"lags must be left out where data are pairs, which have theirs; got {lags}"
            raise ValueError(f"{text}. Give them to count_pairs.")
        return [data] if isinstance(data, Pairs | Tensor) else list(data), []
    if data.covariates is not None:
        raise ValueError(
            "data must have no covariates, as pairs share a distribution. Leave them out."
        )
    notes = ["the labels of the data were not used: pairs have none"] if data.num_labelled else []
    if num_symbols is None:
        with torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
            num_symbols = _symbol_probs(module(torch.tensor([1])).emission).size(-1)
    return [count_pairs(data, num_symbols, lag) for lag in lags or (1,)], notes


def _symbol_probs(emission: Any) -> Tensor:
    """Probabilities of symbols, ``(*B, K, V)``."""
    if not is_categorical(emission):
        text = f"emission must be of symbols, Categorical; got {type(emission).__name__}"
        raise TypeError(f"{text}. Fit others by fit_em or fit_map.")
    return emission.probs


def _weight(target: Target, loss: Loss) -> float:
    """Default weight of a loss, which makes it (nearly) minus a log-likelihood of all pairs."""
    if not isinstance(target, Pairs):
        text = f"weight must be given for dense shares, no counts; got {type(target).__name__}"
        raise ValueError(f"{text}. Give the number of pairs; of lists Sequences.from_list(lists).")
    if loss is squared_distance:
        return target.total / (2 * target.squares)
    return float(target.total)
