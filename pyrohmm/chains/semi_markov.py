"""``SemiMarkovChain``: states that last for explicit durations."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._checks import check_floats
from ..ops import markov as markov_ops
from ..ops import semi_markov
from ..ops.log_space import finite_or_zero
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
    """

    cores: ClassVar[dict[str, Core]] = {
        "log_initial": ("K",), "log_transition": ("K", "K"), "log_duration": ("K", "D"),
    }  # fmt: skip

    ops: ClassVar[Any] = semi_markov
    tables: tuple[Tensor, Tensor, Tensor]
    log_transition: Tensor
    log_duration: Tensor

    def __init__(
        self,
        log_initial: Tensor,
        log_transition: Tensor,
        log_duration: Tensor,
        censored_end: bool = True,
        censored_start: bool = False,
    ) -> None:
        super().__init__(censored_end=censored_end, censored_start=censored_start)
        self.take(log_initial=log_initial, log_transition=log_transition, log_duration=log_duration)
        self.censored = self.options
        self.censored_end, self.censored_start = censored_end, censored_start
        self.tables = self.log_initial, self.log_transition, self.log_duration

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

    def filtered(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        """Filtered states, whether or not a segment must end with the data."""
        parts = *self.tables, log_likelihood, lengths
        return semi_markov.filtered(*parts, self.censored_start)

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths, whose segments are their runs."""
        duration = self.log_duration
        opens, closes, age = semi_markov.boundaries(states, exists)
        last = closes & ~pad(exists[..., 1:], (0, 1))
        column = age.clamp(max=duration.size(-1)) - 1
        weights = semi_markov.segment_weights(
            duration, self.censored_end, self.censored_start
        ).flatten(0, 1)
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
        _, closes, age = semi_markov.boundaries(states, exists)
        last = closes & ~torch.nn.functional.pad(exists[..., 1:], (0, 1))
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
        weights = semi_markov.segment_weights(
            self.log_duration, self.censored_end, self.censored_start
        )
        weights = weights[: 1 + self.censored_start, 0].movedim(0, -2)  # between others, and first
        survival = semi_markov.log_survival(weights)
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
        spent = segments * semi_markov.log_mean_duration(self.log_duration).exp()
        return spent / spent.sum(-1, keepdim=True)

    def factors(self) -> dict[str, Tensor]:
        """The parameters; with left-censoring initial states less their log mean durations.

        Of all whole durations a moment in time falls into each in proportion to its length.
        """
        if not self.censored_start:
            return self.parameters
        initial = self.log_initial - semi_markov.log_mean_duration(self.log_duration)
        return self.parameters | {"log_initial": initial}

    def expected_counts(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        """Expected counts; a censored segment counts under each whole duration that it may have."""
        return semi_markov.expected_counts(
            *self.tables, log_likelihood, lengths, self.censored_end, self.censored_start
        )

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> Posterior:
        """Smoothed marginals, and expected transitions between segments of each sequence."""
        evidence, states, counts = self.counts_of_each(log_likelihood, lengths)
        return Posterior(evidence, states, counts["log_transition"])
