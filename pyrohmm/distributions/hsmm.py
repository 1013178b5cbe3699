"""``HSMM``: the distribution over whole sequences of segments with explicit durations."""

from __future__ import annotations

from typing import NoReturn

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._arguments import checked
from .._checks import (
    check_broadcast,
    check_floats,
    check_integers,
    check_log_simplex,
    check_same_device,
    check_size,
)
from .._transforms import transforming
from ..ops import semi_markov
from ..ops import stationary as stationary_ops
from ..ops.recursions import ExpectedCounts, Posterior
from ..ops.sampling import refuse_nan
from .forecast import Forecast, states_ahead
from .hmm import HMM
from .observation import Tied, permuted
from .structured import StructuredHMM

_Factors = tuple[Tensor, Tensor, Tensor, Tensor]


class HSMM(StructuredHMM):
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

    _recursions = semi_markov
    _arguments = "log_initial", "log_transition", "log_duration", "censored_end", "censored_start"

    @checked()
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
        _check_durations(log_initial, log_duration)
        check_integers("lengths", lengths)
        outer = {"log_duration": log_duration.shape[:-2], "lengths": lengths.shape}
        super().__init__(
            log_initial, log_transition, emission, lengths.expand(check_broadcast(outer)), observed,
            validate_args, emission_per_step=emission_per_step, allowed=allowed,
        )  # fmt: skip
        self.log_duration = log_duration
        self.censored_end, self.censored_start = self.cuts = censored_end, censored_start
        if self._validate_args:
            check_log_simplex("log_duration", log_duration)
            follows = log_transition.diagonal(dim1=-2, dim2=-1) > -torch.inf
            if not transforming() and bool(follows.any()):
                raise ValueError(
                    "log_transition must be -inf on the diagonal: no state follows itself, it "
                    "lasts. Fill the diagonal with -inf, and call .log_softmax(-1)."
                )

    @property
    def max_duration(self) -> int:
        """D, the longest duration."""
        return self.log_duration.size(-1)

    def check_labels(self, values: Tensor) -> None:
        """As :meth:`HMM.check_labels`; a run of labels may be longer than any duration."""
        try:
            super().check_labels(values)
        except ValueError:
            allowed: Tensor = self.allowed  # type: ignore[assignment]
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

    def permute_states(self, order: Tensor) -> HSMM:
        """The same with its states in another order: see :meth:`HMM.permute_states`."""
        chain = self._chain().permute_states(order)
        order = order.to(self.log_duration.device).long()
        return self.replace(
            log_initial=chain.log_initial,
            log_transition=chain.log_transition,
            log_duration=self.log_duration[..., order, :],
            emission=permuted(self.emission, order),
            allowed=chain.allowed,
        )

    def _chain(self) -> HMM:
        """The Markov chain of the segments, with one step for each."""
        return HMM(
            self.log_initial, self.log_transition, self.emission, self.lengths, self.observed,
            validate_args=False, emission_per_step=self.emission_per_step, allowed=self.allowed,
        )  # fmt: skip

    def expanded(self) -> HMM:
        """The same distribution as an HMM of K · D states, of which most transitions are zero.

        State k · D + r - 1 stands for the state k that lasts r more steps, this one included. What
        is written for any Markov chain reads it, at the cost of its matrix of (K D) x (K D).
        """
        num_states, size = self.log_duration.shape[-2:]
        parts = self.log_initial, self.log_transition, self.log_duration
        initial, matrix = semi_markov.expanded_chain(*parts, self.censored_start)
        device = matrix.device
        allowed = self.allowed
        if allowed is not None:
            allowed = allowed.repeat_interleave(size, -1)
        if not self.censored_end:
            steps = torch.arange(self.num_steps)
            last = (steps == self.lengths.unsqueeze(-1) - 1).to(device).unsqueeze(-1)
            ends = torch.arange(num_states * size, device=device) % size == 0
            allowed = ends | ~last if allowed is None else allowed & (ends | ~last)
        index = torch.arange(num_states, device=device).repeat_interleave(size)
        new = HMM(
            initial, matrix, Tied(self.emission, index), self.lengths,
            self.observed, validate_args=False, emission_per_step=self.emission_per_step,
            allowed=allowed,
        )  # fmt: skip
        return self._validated_alike(new)

    # Parameters and data as the recursions read them

    def check_markov(self, purpose: str) -> NoReturn:
        """Raise: ``purpose`` needs a chain whose next state depends on the state alone."""
        raise ValueError(
            f"{purpose} needs a Markov chain; hmm is an HSMM, whose states last for durations of "
            "their own. Give hmm.expanded(), whose states count the steps that remain; if the last "
            "segment may go on, that of hmm.replace(censored_end=True)."
        )

    def log_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Those of a Markov chain, which this is not: raises ValueError. See :meth:`expanded`."""
        self.check_markov("log_factors")

    def counted_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, ...]:
        """As :meth:`HMM.counted_factors`; the last is ``log_duration``."""
        _, transition, duration, likelihood = self._factors(values, check)
        return self.counted_initial, transition.unsqueeze(-3), likelihood, duration

    @property
    def counted_initial(self) -> Tensor:
        """``log_initial``, less the log mean duration of a first segment that is cut.

        Of all whole durations a moment in time falls into each in proportion to its length.
        """
        if not self.censored_start:
            return self.log_initial
        return self.log_initial - semi_markov.log_mean_duration(self.log_duration)

    @property
    def counted_duration(self) -> Tensor:
        """``log_duration``."""
        return self.log_duration

    def _tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.log_initial, self.log_transition, self.log_duration

    def _beginning(self) -> tuple[bool]:
        return (self.censored_start,)

    def _ending(self) -> tuple[bool, bool]:
        return self.cuts

    # Queries given values (*B, T, *E)

    def log_joint(self, values: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` with one path ``(*B, T)``; ``(*B)``, in nats."""
        exists, states = self.exists, self._path(states)
        initial, transition, duration, likelihood = self._factors(values)
        batch = torch.broadcast_shapes(self.batch_shape, likelihood.shape[:-2], states.shape[:-1])
        states, exists = (x.expand(*batch, self.num_steps) for x in (states, exists))

        opens, closes, age = semi_markov.boundaries(states, exists)
        last = closes & ~torch.nn.functional.pad(exists[..., 1:], (0, 1))
        column = age.clamp(max=self.max_duration) - 1
        weights = semi_markov.segment_weights(duration, *self.cuts)
        among, ending, opening, entire = (_at(part, states, column) for part in weights)
        lasted = torch.where(last, ending, among)
        is_first = opens.cumsum(-1) == 1
        lasted = torch.where(is_first, torch.where(last, entire, opening), lasted).to(duration)
        lasted = lasted.masked_fill(age > self.max_duration, -torch.inf)
        moved = _at(transition, states[..., :-1], states[..., 1:])
        first = initial.expand(*batch, self.num_states).gather(-1, states[..., :1]).squeeze(-1)
        emitted = likelihood.expand(*batch, *likelihood.shape[-2:])
        emitted = emitted.gather(-1, states.unsqueeze(-1)).squeeze(-1)
        parts = (emitted, exists), (lasted, closes), (moved, opens[..., 1:])
        return first + sum(part.masked_fill(~where, 0.0).sum(-1) for part, where in parts)

    def posterior(self, values: Tensor) -> Posterior:
        r"""Smoothed posterior: :math:`p(z_t \mid x_{1:T})`, ``(*B, T, K)``, zero at padded steps.

        Also the log evidence ``(*B)``, and the expected number of transitions between segments,
        ``(*B, K, K)``.
        """
        factors: _Factors = self._factors(values)
        counts = semi_markov.counts_of_each(*factors, self.lengths, *self.cuts)
        return Posterior(counts.log_evidence, counts.states, counts.transitions.squeeze(-3))

    def duration_counts(self, values: Tensor) -> Tensor:
        """Expected number of segments of each state and duration given ``values``, ``(*B, K, D)``.

        A segment that is cut counts with the whole durations that it may have.
        """
        factors: _Factors = self._factors(values)
        counts = semi_markov.counts_of_each(*factors, self.lengths, *self.cuts).durations
        assert counts is not None
        return counts

    def expected_counts(self, values: Tensor) -> ExpectedCounts:
        """Expected counts given ``values``, those of durations included: the E-step."""
        factors: _Factors = self._factors(values, check=False)
        counts = semi_markov.expected_counts(*factors, self.lengths, *self.cuts)
        self._check_evidence(counts.log_evidence, values)
        return counts

    def forecast(self, values: Tensor, num_steps: int) -> Forecast:
        r"""Predictive distributions :math:`p(x_{T+h} \mid x_{1:T})` of the next H observations.

        As :meth:`HMM.forecast`. How long the last segment has lasted is taken into account.

        Raises:
            ValueError: Also without ``censored_end``: where the data end says nothing then.
        """
        check_size("num_steps", num_steps)
        self.check_constant("forecast", markov=False)
        if not self.censored_end:
            raise ValueError(
                "forecast needs censored_end: this HSMM says that a segment ends with the data. "
                "Call replace(censored_end=True) if it may go on."
            )
        return Forecast(states_ahead(self, values, num_steps), self.emission)

    def stationary(self) -> Tensor:
        r"""Share of the time that is spent in each state in the long run, ``(*B, K)``."""
        segments = stationary_ops.stationary(self.log_transition)
        spent = segments * semi_markov.log_mean_duration(self.log_duration).exp()
        return spent / spent.sum(-1, keepdim=True)

    # Sampling

    def sample_prior_states(self, shape: torch.Size) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T})`, ``(*shape, T)``; ``shape`` ends in ``(*B)``."""
        parts = self.log_initial, self.log_transition, self.log_duration
        refuse_nan(*parts)
        leads = (part.shape[:-core] for part, core in zip(parts, (1, 2, 2)))
        alike = torch.broadcast_shapes(*leads).numel() == 1
        if alike and self.allowed is None and self.censored_end:  # one chain, sampled many times
            initial, transition, duration = (
                part.reshape(part.shape[-core:]) for part, core in zip(parts, (1, 2, 2))
            )
            logs = self.log_initial.new_zeros(self.num_steps, self.num_states)
            length, count = torch.tensor(self.num_steps), shape.numel()
            one = initial, transition, duration, logs, length, count
            states = semi_markov.sample_states(*one, *self.cuts)
            return states.reshape(*shape, self.num_steps)
        return self._sample_without_values(shape)


def _check_durations(log_initial: Tensor, log_duration: Tensor) -> None:
    """Raise unless there are durations of each of at least two states."""
    check_floats("log_duration", log_duration)
    check_floats("log_initial", log_initial)
    check_same_device({"log_initial": log_initial, "log_duration": log_duration})
    num_states = log_initial.shape[-1:].numel()
    if num_states < 2:
        raise ValueError(
            "log_initial must be of at least two states: no state follows itself, so that a "
            "single one has no other to go to. Use an HMM, whose one state lasts for ever."
        )
    shape = log_duration.shape
    if len(shape) < 2 or shape[-2] != num_states or shape[-1] < 1:
        raise ValueError(
            f"log_duration must have shape (*B, K, D) with the K = {num_states} of log_initial "
            f"and D at least 1; got {tuple(shape)}."
        )


def _at(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of ``table`` ``(*b, M, V)`` at rows and columns ``(*B, T)``."""
    picked = table.expand(*rows.shape[:-1], *table.shape[-2:])
    rows = rows.unsqueeze(-1).expand(*rows.shape, table.size(-1))
    return picked.gather(-2, rows).gather(-1, columns.unsqueeze(-1)).squeeze(-1)
