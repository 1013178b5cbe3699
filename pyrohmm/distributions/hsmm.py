"""``HSMM``: the distribution over whole sequences of segments with explicit durations."""

from __future__ import annotations

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._transforms import uncompiled
from ..chains.semi_markov import SemiMarkovChain
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
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        censored_end: Whether the last segment may go on after the data, True by default. If not,
            ``log_prob`` is that of the values *and* of a segment that ends with them.
        censored_start: Whether the first segment was there before the data, False by default. Its
            state is one of ``log_initial`` all the same; :meth:`stationary` has the shares of
            states at any moment.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.

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
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        censored_end: bool = True,
        censored_start: bool = False,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
    ) -> None:
        chain = SemiMarkovChain(
            log_initial, log_transition, log_duration, censored_end, censored_start
        )
        self._compose(chain, emission, lengths, observed, validate_args, emission_per_step, allowed)

    @property
    def log_duration(self) -> Tensor:
        """``(K, D)``, log-probabilities of durations."""
        return self.chain.log_duration

    @property
    def max_duration(self) -> int:
        """D, the longest duration."""
        return self.log_duration.size(-1)

    @property
    def censored_end(self) -> bool:
        """Whether the last segment may go on after the data."""
        return self.chain.censored_end

    @property
    def censored_start(self) -> bool:
        """Whether the first segment was there before the data."""
        return self.chain.censored_start

    def check_labels(self, values: Tensor) -> None:
        """Raise if no path keeps to the labels: a run may be longer than any duration."""
        try:
            super().check_labels(values)
        except ValueError:
            allowed: Tensor = self.allowed
            known = torch.where(allowed.sum(-1) == 1, allowed.byte().argmax(-1), -1)
            longest = 0
            for row in known.reshape(-1, known.size(-1)):
                states, steps = row.unique_consecutive(return_counts=True)
                longest = max(longest, *steps[states >= 0].tolist(), 0)
            if longest <= self.max_duration:
                raise
            raise ValueError(
                f"labels must not stay in a state for longer than its durations, of up to "
                f"{self.max_duration} steps; the longest run has {longest}. Allow durations of "
                f"{longest} steps, or correct the labels."
            ) from None

    def duration_counts(self, values: Tensor) -> Tensor:
        """Expected number of segments of each state and duration given ``values``, ``(*B, K, D)``.

        A segment that is cut counts with the whole durations that it may have.
        """
        counts = self.chain.counts_of_each(self.log_likelihood(values), self.lengths)
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
