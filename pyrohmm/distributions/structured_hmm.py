"""HMMs of other chains: ``HSMM``, ``FactorialHMM`` and ``SecondOrderHMM``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._arrays import from_numpy
from .._checks import check_integers, check_range, check_trailing
from .._transforms import uncompiled
from ..chains.compound import FactorialPosterior as FactorialPosterior
from ..chains.compound import ProductChain, SecondOrderChain
from ..chains.compound import SecondOrderPosterior as SecondOrderPosterior
from ..chains.semi_markov import SemiMarkovChain
from .base import SequenceOptions
from .forecast import Forecast
from .hmm import HMM


class HSMM(HMM):
    r"""Sequences emitted by hidden segments, each with a state and an explicit duration.

    .. math:: p(x_{1:T}) = \sum_{k, d} p(k_1) \prod_{s} p(d_s | k_s) \, p(k_{s+1} | k_s)
              \prod_{t \in s} p(x_t | k_s)

    A hidden semi-Markov model (Ferguson, 1980). The states of an :class:`HMM` last for a geometric
    number of steps; here they last d steps with probability ``log_duration[k, d - 1]``, and none
    follows itself. The last segment may be cut by the end of the sequence, and then counts with the
    probability of lasting at least as long as is seen. The first one begins with the sequence, or,
    with ``censored_start``, it was there before: then r of its steps remain with the probability of
    a process that is seen from any moment on (Cox, 1962, Renewal theory),

    .. math:: p(r | k) = \sum_{d \ge r} p(d | k) \; / \; \sum_d d \, p(d | k).

    Queries are those of :class:`HMM`, exact, in time O(T K (K + D)). No state follows itself, so
    that the segments of a path are its runs: ``queries.segments``. :meth:`expanded` is the same
    distribution as an ``HMM``.

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state; at least two states.
        log_transition: ``(K, K)``, log-probabilities of the next segment's state; row = from,
            column = to; -inf on the diagonal.
        log_duration: ``(K, D)``, log-probabilities of durations of 1 to D steps.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: As of :class:`HMM`.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        censored_end: Whether the last segment may go on after the data, True by default. If not,
            ``log_prob`` is that of the values *and* of a segment that ends with them.
        censored_start: Whether the first segment was there before the data, False by default. Its
            state is one of ``log_initial`` all the same; :meth:`stationary` has the shares of
            states at any moment.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.
        num_steps: As of :class:`HMM`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If there are fewer than two states, shapes or devices disagree, or (with
            ``validate_args``) probabilities do not sum to one, or a state may follow itself.

    Example:
        >>> swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).log()
        >>> durations = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]).log()
        >>> coins = Categorical(probs=torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
        >>> hsmm = HSMM(torch.tensor([1.0, 0.0]).log(), swap, durations, coins, torch.tensor(4))
        >>> values = torch.tensor([0, 0, 1, 0])
        >>> hsmm.log_prob(values).exp()  # 1/2 of 0.9 0.9 0.8 0.9 and of 0.9 0.9 0.1 0.2
        tensor(0.2997)
        >>> hsmm.viterbi(values)
        tensor([0, 0, 1, 0])
        >>> [segment.length for segment in queries.segments(hsmm.viterbi(values))]
        [2, 1, 1]
    """

    @uncompiled
    def __init__(
        self,
        log_initial: Tensor,
        log_transition: Tensor,
        log_duration: Tensor,
        emission: TorchDistribution,
        lengths: Tensor | int | None,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        censored_end: bool = True,
        censored_start: bool = False,
        **data: Unpack[SequenceOptions],
    ) -> None:
        chain = SemiMarkovChain(
            log_initial, log_transition, log_duration, censored_end, censored_start
        )
        self._compose(chain, emission, lengths, observed, validate_args, **data)

    @property
    def log_duration(self) -> Tensor:
        """Log-probabilities of durations, ``(K, D)``."""
        return self.chain.log_duration

    @property
    def max_duration(self) -> int:
        """D, the longest duration."""
        return self.log_duration.size(-1)

    @property
    def censored_end(self) -> bool:
        """Whether the last segment is right-censored: it may go on after the data."""
        return self.chain.censored_end

    @property
    def censored_start(self) -> bool:
        """Whether the first segment is left-censored: it was there before the data."""
        return self.chain.censored_start

    def duration_counts(self, values: Tensor) -> Tensor:
        """Expected number of segments of each state and duration given ``values``, ``(*B, K, D)``.

        A segment that is cut counts with the whole durations that it may have.
        """
        counts = self.chain.counts_of_each(self.log_likelihood(values), self.lengths)
        self._check_possible(counts.log_evidence)
        return counts.counts["log_duration"]

    def forecast(self, values: Tensor, num_steps: int) -> Forecast:
        r"""Predictive distributions :math:`p(x_{T+h} \mid x_{1:T})` of the next H observations.

        As :meth:`HMM.forecast`. How long the last segment has lasted is taken into account.

        Raises:
            ValueError: Also without ``censored_end``: where the data end says nothing then.
        """
        if not self.censored_end:
            raise ValueError(
                "forecast needs censored_end: this HSMM says that a segment ends with the data. "
                "Call replace(censored_end=True) if it may go on."
            )
        return super().forecast(values, num_steps)


class FactorialHMM(HMM):
    r"""Sequences emitted by M independent Markov chains of hidden states together.

    .. math:: p(x_{1:T}) = \sum_{z^1, \dots, z^M} \prod_t p(x_t | z_t^1, \dots, z_t^M)
              \prod_m p(z_1^m) \prod_{t > 1} p(z_t^m | z_{t-1}^m)

    A factorial hidden Markov model (Ghahramani and Jordan, 1997). Its K = K_1 ⋯ K_M product states
    are those of an :class:`HMM`, numbered with the last chain fastest: :meth:`chain_states` tells
    those of each chain. Queries are exact, and those of the ``HMM`` of the product states, whose
    matrix ``log_transition`` is the Kronecker product of the others: O(T K²).

    Args:
        log_initials: M of ``(K_m,)``, log-probabilities of the first state of each chain.
        log_transitions: M of ``(K_m, K_m)``, of its next state; row = from, column = to.
        emission: Distribution of an observation, batched over the K product states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: As of :class:`HMM`.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a product state is known not to be; see
            :meth:`restrict_chains`.
        num_steps: As of :class:`HMM`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If there is no chain, shapes or devices disagree, or (with ``validate_args``)
            probabilities do not sum to one.

    Example:
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> even = torch.full((2,), 0.5).log()
        >>> levels = Normal(torch.tensor([0.0, 1.0, 5.0, 6.0]), 0.3)  # 5 of one chain, 1 of another
        >>> hmm = FactorialHMM([even, even], [sticky, sticky], levels, torch.tensor(4))
        >>> values = torch.tensor([0.1, 1.1, 6.2, 5.9])
        >>> hmm.chain_states(hmm.viterbi(values))
        tensor([[0, 0],
                [0, 1],
                [1, 1],
                [1, 1]])
        >>> hmm.posterior(values).chains[0][:, 1].round(decimals=2)  # the chain of 5
        tensor([0., 0., 1., 1.])
    """

    @uncompiled
    def __init__(
        self,
        log_initials: Sequence[Tensor],
        log_transitions: Sequence[Tensor],
        emission: TorchDistribution,
        lengths: Tensor | int | None,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        **data: Unpack[SequenceOptions],
    ) -> None:
        initials = tuple(from_numpy("log_initials", part) for part in log_initials)
        transitions = tuple(from_numpy("log_transitions", part) for part in log_transitions)
        if not initials or len(initials) != len(transitions):
            raise ValueError(
                "log_initials and log_transitions must hold a tensor for each of at least one "
                f"chain; got {len(initials)} and {len(transitions)}. Give one of each for each "
                "chain."
            )
        chain = ProductChain(initials, transitions)
        self._compose(chain, emission, lengths, observed, validate_args, **data)

    @property
    def log_initials(self) -> tuple[Tensor, ...]:
        """Log-probabilities of the first state of each chain, M of ``(K_m,)``."""
        return self.chain.log_initials

    @property
    def log_transitions(self) -> tuple[Tensor, ...]:
        """Log-probabilities of the next state of each chain, M of ``(K_m, K_m)``."""
        return self.chain.log_transitions

    @property
    def sizes(self) -> tuple[int, ...]:
        """K_1, ..., K_M: the number of states of each chain."""
        return self.chain.sizes

    def __repr__(self) -> str:
        sizes = " x ".join(map(str, self.sizes))
        return super().__repr__().replace(f"({self.num_states} states", f"({sizes} states", 1)

    # Product states and those of each chain

    def chain_states(self, states: Tensor) -> Tensor:
        """The state of each chain, ``(*S, *B, T, M)``, of product states ``(*S, *B, T)``."""
        check_integers("states", states)
        check_range("states", states, self.num_states, "K - 1", "K is that of the product.")
        return self.chain.split(states)

    def product_states(self, chains: Tensor) -> Tensor:
        """Product states ``(*S, *B, T)`` of the state of each chain, ``(*S, *B, T, M)``."""
        check_integers("chains", chains)
        check_trailing("chains", chains, (len(self.sizes),), "(M,)", "M is the number of chains.")
        for m, (size, part) in enumerate(zip(self.sizes, chains.unbind(-1))):
            check_range(f"chains[..., {m}]", part, size, "K_m - 1", "Chains are in their order.")
        return self.chain.join(chains)

    def restrict_chains(self, labels: Tensor) -> HMM:
        """Restrict the states of some chains at some steps, as labels say.

        As :meth:`HMM.restrict`, which takes product states.

        Args:
            labels: ``(*B, T, M)`` integers, the state of each chain, -1 where it is not known.

        Raises:
            ValueError: If a label is not below the number of states of its chain.
        """
        check_integers("labels", labels)
        check_trailing("labels", labels, (self.num_steps, len(self.sizes)), "(T, M)")
        parts = self.chain_states(torch.arange(self.num_states, device=labels.device))
        for m, size in enumerate(self.sizes):
            known = labels[..., m][self.exists.expand(labels.shape[:-1])].clamp(min=0)
            check_range(f"labels of chain {m}", known, size, f"K_{m + 1} - 1")
        wide = labels.unsqueeze(-2)
        return self.restrict(((wide == parts) | (wide < 0)).all(-1))


class SecondOrderHMM(HMM):
    r"""Sequences emitted by a chain of states, each of which depends on the two before it.

    .. math:: p(x_{1:T}) = \sum_{z_{1:T}} p(z_1) \, p(z_2 | z_1)
              \prod_{t=3}^T p(z_t | z_{t-2}, z_{t-1}) \prod_{t=1}^T p(x_t | z_t)

    Queries are those of :class:`HMM`, exact: up to K = 24 those of :meth:`expanded`, and with more
    states in time O(T K³), as messages are of pairs of states, and
    pair (i, j) is followed by (j, k) alone. :meth:`expanded` is the same distribution as an ``HMM``
    whose states are the pairs, at O(T K⁴).

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_second: ``(K, K)``, of the second state given the first; row = from, column = to.
        log_transition: ``(K, K, K)``, of the next state given the two before it, the earlier one
            first: [i, j, k] is that of k after i, j.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: As of :class:`HMM`.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.
        num_steps: As of :class:`HMM`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) probabilities do not
            sum to one.

    Example:
        >>> even = torch.full((2,), 0.5).log()
        >>> twice = torch.tensor([[[0.1, 0.9], [0.1, 0.9]], [[0.9, 0.1], [0.9, 0.1]]])  # 0 0 1 1 0
        >>> levels = Normal(torch.tensor([0.0, 1.0]), 0.4)
        >>> hmm = SecondOrderHMM(even, even.expand(2, 2), twice.log(), levels, torch.tensor(5))
        >>> hmm.viterbi(torch.tensor([0.0, 0.1, 0.9, 0.5, 0.5]))
        tensor([0, 0, 1, 1, 0])
        >>> hmm.expanded().num_states
        6
    """

    @uncompiled
    def __init__(
        self,
        log_initial: Tensor,
        log_second: Tensor,
        log_transition: Tensor,
        emission: TorchDistribution,
        lengths: Tensor | int | None,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        **data: Unpack[SequenceOptions],
    ) -> None:
        chain = SecondOrderChain(log_initial, log_second, log_transition)
        self._compose(chain, emission, lengths, observed, validate_args, **data)

    @property
    def log_second(self) -> Tensor:
        """Log-probabilities of the second state given the first, ``(K, K)``."""
        return self.chain.log_second
