r"""``SemiMarkovChain``: states that last for explicit durations (hidden semi-Markov models).

A sequence is cut into segments. Each has a state and a duration d of 1 to D steps; the next state
is drawn when it ends. The last segment may be cut by the end of the sequence (``censored_end``),
and then counts with the probability that it lasts at least as long as is seen, or it ends there.
The first segment begins with the sequence, or it was there before (``censored_start``): its state
is drawn from ``log_initial``, and that r of its steps remain has the stationary probability

.. math:: p(r | k) = \sum_{d \ge r} p(d | k) \; / \; \sum_d d \, p(d | k)

of a process seen at any time. Recursions take time O(T K (K + D)) per sequence and memory O(T K);
the chain over pairs of state and duration is never made.

References:
    Yu (2010), Hidden semi-Markov models; Cox (1962), Renewal theory: the forward recurrence time.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_floats
from ..ops import forward
from ..ops import markov as markov_ops
from ..ops.log_space import finite_or_zero, logsumexp
from ..ops.recursions import Posterior
from .base import Chain, Core, Expansion, ExpectedCounts, entry
from .markov import MarkovChain


class SemiMarkovChain(Chain):
    """A semi-Markov chain: each segment has a state and a duration of 1 to D steps.

    Args:
        log_initial: ``(*b, K)``, of the first segment's state.
        log_transition: ``(*b, K, K)``, of the next segment's state.
        log_duration: ``(*b, K, D)``; entry d - 1 is that of d steps.
        censored_end: Whether the last segment may go on after the data.
        censored_start: Whether the first segment was there before the data.
        log_mean: ``(*b, K)``, of durations, where that by which the first segment is divided shall
            be a constant.
    """

    cores: ClassVar[dict[str, Core]] = {
        "log_initial": ("K",), "log_transition": ("K", "K"), "log_duration": ("K", "D"),
    }  # fmt: skip

    log_transition: Tensor
    log_duration: Tensor

    def __init__(
        self,
        log_initial: Tensor,
        log_transition: Tensor,
        log_duration: Tensor,
        censored_end: bool = True,
        censored_start: bool = False,
        log_mean: Tensor | None = None,
    ) -> None:
        super().__init__(
            censored_end=censored_end, censored_start=censored_start, log_mean=log_mean
        )
        self.take(log_initial=log_initial, log_transition=log_transition, log_duration=log_duration)
        self.censored_end, self.censored_start = censored_end, censored_start

    @property
    def samples_alone(self) -> bool:  # type: ignore[override]
        """Whether :meth:`sample_prior` may be used: one chain, whose last segment may go on."""
        return self.censored_end and self.batch_shape.numel() == 1

    def check_shapes(self) -> None:
        """Raise unless there are durations of each of at least two states."""
        check_floats("log_initial", self.log_initial)
        if self.log_initial.dim() and self.num_states < 2:
            raise ValueError(
                "log_initial must be of at least two states: no state follows itself, so that a "
                "single one has no other to go to. Use an HMM, whose one state lasts for ever."
            )
        super().check_shapes()
        if self.log_duration.size(-1) < 1:
            raise ValueError(
                "log_duration must have shape (*B, K, D) with D at least 1; got "
                f"{tuple(self.log_duration.shape)}. Column d is of d + 1 steps."
            )

    def check_values(self) -> None:
        """Raise unless log-probabilities sum to one, and no state follows itself."""
        super().check_values()
        if bool((self.log_transition.diagonal(dim1=-2, dim2=-1) > -torch.inf).any()):
            raise ValueError(
                "log_transition must be -inf on the diagonal: no state follows itself, it "
                "lasts. Fill the diagonal with -inf, and call .log_softmax(-1)."
            )

    def weights(self) -> Tensor:
        """Log weights of segments by censoring at either end, ``(2, 2, *b, K, D)`` in float64.

        The first index is one for the first segment, the second one for the last.
        """
        duration = self.log_duration.double()
        survival = log_survival(duration)
        right = survival if self.censored_end else duration
        left, both = duration, right
        if self.censored_start:
            log_mean = self.options["log_mean"]
            log_mean = log_mean_duration(duration) if log_mean is None else log_mean
            left = survival - log_mean.unsqueeze(-1)
            both = log_survival(left) if self.censored_end else left
        return torch.stack([duration, right, left, both]).unflatten(0, (2, 2))

    def arranged(self, log_likelihood: Tensor, lengths: Tensor) -> forward.Arranged:
        """Messages over the steps of a segment so far, ``(D, K)``."""
        duration = self.log_duration
        weights = self.weights().mT.movedim((0, 1), (-4, -3))  # (*b, 2, 2, D, K)
        initial = self.log_initial.to(torch.promote_types(self.log_initial.dtype, duration.dtype))
        initial = pad(initial.unsqueeze(-2), (0, 0, 0, duration.size(-1) - 1), value=-torch.inf)
        logs = self.log_transition[..., None, None, :, :]
        return forward.arrange(initial, logs, log_likelihood, lengths, weights)

    def filtered(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        """Filtered states, whether or not a segment must end with the data."""
        chain = self.replace(censored_end=True)
        return forward.filtered(chain.arranged(log_likelihood, lengths))

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths, whose segments are their runs."""
        duration = self.log_duration
        opens, closes, age = boundaries(states, exists)
        last = closes & ~pad(exists[..., 1:], (0, 1))
        column = age.clamp(max=duration.size(-1)) - 1
        weights = self.weights().flatten(0, 1)
        interior, right, left, both = (entry(part, states, column) for part in weights)
        lasted = torch.where(last, right, interior)
        is_first = opens.cumsum(-1) == 1
        lasted = torch.where(is_first, torch.where(last, both, left), lasted).to(duration)
        lasted = lasted.masked_fill(age > duration.size(-1), -torch.inf)
        moved = entry(self.log_transition, states[..., :-1], states[..., 1:])
        total = entry(self.log_initial, states[..., :1]).squeeze(-1)
        for part, where in ((lasted, closes), (moved, opens[..., 1:])):
            total = total + part.masked_fill(~where, 0.0).sum(-1)
        return total

    def path_counts(self, states: Tensor, exists: Tensor) -> dict[str, Tensor]:
        """Counts of durations and transitions in paths; censored durations are sampled."""
        counts = super().path_counts(states, exists)
        if not self.censored_end or self.censored_start:
            return counts
        duration = self.log_duration
        _, closes, age = boundaries(states, exists)
        last = closes & ~pad(exists[..., 1:], (0, 1))
        rows = duration.expand(*states.shape[:-1], *duration.shape[-2:])
        place = last.byte().argmax(-1, keepdim=True)
        state, least = states.gather(-1, place), age.gather(-1, place)
        logs = rows.gather(-2, state.unsqueeze(-1).expand(*state.shape, rows.size(-1)))[..., 0, :]
        steps = torch.arange(1, rows.size(-1) + 1, device=logs.device)
        noise = torch.empty_like(logs).exponential_().log()
        whole = (logs - noise).masked_fill(steps < least, -torch.inf).argmax(-1, keepdim=True)
        lasted = torch.where(last, whole, age - 1).clamp(max=rows.size(-1) - 1)
        cells = torch.zeros_like(rows).flatten(-2)
        cells.scatter_add_(-1, states * rows.size(-1) + lasted, closes.to(cells))
        return counts | {"log_duration": cells.reshape(rows.shape).sum_to_size(duration.shape)}

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Sample paths of the chain, whose last segment may go on after ``num_steps``."""
        logs = self.log_initial.new_zeros(num_steps, self.num_states)
        chain = self.map(lambda _, table, core: table.reshape(table.shape[-core:]))
        states = chain.sample_states(logs, torch.tensor(num_steps), shape.numel())
        return states.reshape(*shape, num_steps)

    def expanded(self, lengths: Tensor, num_steps: int) -> Expansion:
        """A Markov chain of K · D states: k · D + a - 1 is k in the a-th step of its segment.

        With ``censored_start`` each k has D states more, in which the first segment is seen for the
        a-th step. Without ``censored_end`` all are there twice, the second ones for a segment that
        ends at this step, as it must at the last. A path of the K states is one path of these.
        """
        weights = self.weights()[: 1 + self.censored_start, 0]
        weights = weights.movedim(0, -2)  # between others, and first
        survival = log_survival(weights)
        lasted = finite_or_zero(survival)
        stays = pad(survival[..., 1:] - lasted[..., :-1], (0, 1), value=-torch.inf).flatten(-2)
        ends = (weights - lasted).masked_fill(survival.isneginf(), 0.0)  # ages never reached
        num_states, ages = stays.shape[-2:]
        stays, ends = stays.flatten(-2).to(self.log_initial), ends.flatten(-3).to(self.log_initial)
        first = self.log_initial.unsqueeze(-1)
        begins = ages - self.log_duration.size(-1)
        first = pad(first, (begins, ages - begins - 1), value=-torch.inf).flatten(-2)
        moved = self.log_transition.repeat_interleave(ages, -2).unsqueeze(-1)
        moved = pad(moved, (0, ages - 1), value=-torch.inf).flatten(-2)  # to the first age
        index = torch.arange(num_states, device=moved.device).repeat_interleave(ages)
        older = (torch.arange(len(index), device=moved.device) + 1) % ages != 0
        older = older[:-1].diag(1)  # from each age to the next
        if self.censored_end:
            matrix = torch.where(older, stays.unsqueeze(-1), moved + ends.unsqueeze(-1))
            return Expansion(MarkovChain(first, matrix), index)
        on = torch.where(older.any(-1, keepdim=True), torch.where(older, 0.0, -torch.inf), moved)
        after = torch.cat([on, moved], -2)
        lasts, stops = stays.unsqueeze(-2), ends.unsqueeze(-2)
        chain = MarkovChain(
            torch.cat([first + stays, first + ends], -1),
            torch.cat([after + lasts, after + stops], -1),
        )
        last = (torch.arange(num_steps) == lengths.unsqueeze(-1) - 1).to(moved.device).unsqueeze(-1)
        stopped = torch.arange(2 * len(index), device=moved.device) >= len(index)
        return Expansion(chain, index.repeat(2), stopped | ~last)

    def stationary(self) -> Tensor:
        """Stationary distribution of the states, ``(*b, K)``."""
        segments = markov_ops.stationary(self.log_transition)
        spent = segments * log_mean_duration(self.log_duration).exp()
        return spent / spent.sum(-1, keepdim=True)

    def factors(self) -> dict[str, Tensor]:
        """The parameters; with left-censoring initial states less their log mean durations.

        Of all whole durations a moment in time falls into each in proportion to its length.
        """
        if not self.censored_start:
            return self.parameters
        initial = self.log_initial - log_mean_duration(self.log_duration)
        return self.parameters | {"log_initial": initial}

    def expected_counts(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        """Expected counts; a censored segment counts under each whole duration that it may have."""
        # a first segment that is cut is divided by the mean duration, which no count is part of
        chain = self.replace(log_mean=log_mean_duration(self.log_duration.double()))
        return Chain.expected_counts(chain, log_likelihood, lengths)

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> Posterior:
        """Smoothed marginals, and expected transitions between segments of each sequence."""
        evidence, states, counts = self.counts_of_each(log_likelihood, lengths)
        return Posterior(evidence, states, counts["log_transition"])


def log_survival(log_duration: Tensor) -> Tensor:
    r"""Log-probability :math:`\log \sum_{d' \ge d} p(d' \mid k)` to last at least d steps.

    Args:
        log_duration: ``(*B, K, D)``, log-probabilities.

    Returns:
        ``(*B, K, D)``: entry d - 1 is that of d steps.

    Example:
        >>> log_survival(torch.tensor([[0.5, 0.0, 0.5]]).log()).exp()
        tensor([[1.0000, 0.5000, 0.5000]])
    """
    sums, width = log_duration.double(), 1
    while width < sums.size(-1):  # sums of this many entries, of twice as many, ...
        beyond = pad(sums[..., width:], (0, width), value=-torch.inf)
        sums, width = logsumexp(torch.stack([sums, beyond]), 0), 2 * width
    return sums.to(log_duration.dtype)


def log_mean_duration(log_duration: Tensor) -> Tensor:
    r"""Log of the mean duration :math:`\log \sum_d d \, p(d \mid k)`, ``(*B, K)``.

    Args:
        log_duration: ``(*B, K, D)``, log-probabilities.

    Example:
        >>> log_mean_duration(torch.tensor([[0.5, 0.0, 0.5]]).log()).exp()
        tensor([2.])
    """
    logs = log_duration.double()
    steps = torch.arange(1, logs.size(-1) + 1, dtype=logs.dtype, device=logs.device)
    return logsumexp(logs + steps.log(), -1).to(log_duration.dtype)


def boundaries(states: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Starts and ends of segments of paths ``(*B, T)``, and how long they have lasted so far.

    Args:
        states: Integers; a segment is a run of equal ones.
        present: Booleans, which steps exist.

    Returns:
        Booleans, booleans and integers, all ``(*B, T)``.
    """
    differ = states[..., 1:] != states[..., :-1]
    opens = pad(differ, (1, 0), value=True) & present
    later = pad(opens[..., 1:] | ~present[..., 1:], (0, 1), value=True)
    steps = torch.arange(states.size(-1), device=states.device).expand(states.shape)
    start = steps.masked_fill(~opens, 0).cummax(-1).values
    return opens, later & present, steps - start + 1
