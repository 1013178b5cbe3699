"""The E-step of EM: expected counts, batched by length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NoReturn

import torch
from pyro.distributions.util import is_validation_enabled, validation_enabled
from torch import Tensor

from .._checks import broadcast_shapes
from .._sync import guessing, with_one_wait
from ..chains.base import ExpectedCounts
from ..data.batches import Parts, parts_of
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.closed_form import Statistics
from ..ops import recursions
from .maximization import Maximization
from .parameters import Parameters
from .process_group import ProcessGroup

PADDED = 1 << 16  # steps, padding included, below which sequences of all lengths go together


class Expectation:
    """The E-step, and the loss.

    Args:
        parameters: They build the HMM.
        maximize: Reduces expected counts to what the M-step needs.
        group: The data-parallel ranks, over which statistics are added.

    Attributes:
        log_prior: ``(R,)`` or a scalar, that of the last call.
    """

    def __init__(self, parameters: Parameters, maximize: Maximization, group: ProcessGroup) -> None:
        self.parameters, self.maximize, self.group = parameters, maximize, group
        self.log_prior = torch.zeros(())
        self._seen: tuple[Any, int] = None, 0  # the last batch, and how often in succession
        self._split_of: tuple[Sequences, list[tuple[Tensor, Sequences]]] | None = None

    def __call__(self, batch: Sequences | Parts) -> tuple[Tensor, Statistics]:
        """The loss ``(R,)`` with the parameters as they are, and what the M-step needs.

        The loss is on the CPU. An accelerator is waited for once, unless numbers are unusual.
        """
        last, times = self._seen
        self._seen = batch, times + 1 if batch is last else 1
        if self.group.size == 1:  # ranks stay in step
            # by then data, start and what an M-step returns have been checked
            validate = is_validation_enabled() and self._seen[1] <= 2
            with guessing() as guesses, validation_enabled(validate):
                loss, statistics, _ = self._compute(batch)
            right, (read, log_prior) = guesses.read(loss, self.log_prior)
            if right and bool(read.isfinite().any()) and not bool(read.isnan().any()):
                self.log_prior = log_prior
                return read, statistics
        loss, statistics, evidences = self._compute(batch)
        if not bool(loss.isfinite().any()):
            self._refuse(loss, evidences)
        return loss.cpu(), statistics

    def _compute(
        self, batch: Sequences | Parts
    ) -> tuple[Tensor, Statistics, list[tuple[Tensor, Tensor]]]:
        """Loss and statistics, and which sequences have which log evidences ``(R, N)``."""
        total: Any = 0.0
        statistics: Statistics = {}
        evidences = []
        for chosen, part, scale in self._pieces(batch):
            with torch.no_grad():
                hmm, self.log_prior = self.parameters.build(part)
                by_symbol = self.maximize.by_symbol and hmm.allowed is None
                count = symbol_counts if by_symbol else type(hmm).expected_counts
                expected = count(hmm, part.values)
            evidences.append((chosen, expected.log_evidence.double().reshape(-1, len(part))))
            total = total + scale * evidences[-1][1].sum(-1)
            steps = None if by_symbol else part
            for name, value in self.maximize.gather(expected, steps, hmm, scale).items():
                statistics[name] = statistics[name] + value if name in statistics else value
        if self.group.size > 1:
            total = self.group.mean(total)
            statistics = {n: self.group.mean(v.contiguous()) for n, v in statistics.items()}
        return -(total + self.log_prior.double()), statistics, evidences

    def _refuse(self, loss: Tensor, evidences: list[tuple[Tensor, Tensor]]) -> NoReturn:
        """Raise the error of a loss that is infinite in all restarts."""
        for chosen, evidence in evidences:
            if bool((impossible := evidence.isneginf().all(0)).any()):
                where = int(chosen[impossible.byte().argmax()])
                raise ValueError(
                    f"data: sequence {where} of this batch has probability zero; check for symbols "
                    "or transitions that no path allows, or give the parameters a prior that rules "
                    "none out."
                )
        raise FloatingPointError(
            f"the loss is {loss[0].item()}; the prior has density zero at the parameters."
        )

    def _pieces(self, batch: Sequences | Parts) -> Iterator[tuple[Tensor, Sequences, float]]:
        """Pieces of a batch: numbers of the sequences, the sequences, and their scale."""
        for part in parts_of(batch):
            scale = part.total / len(part)
            apart = self.maximize.apart
            for chosen, piece in self._split(part) if apart else [(torch.arange(len(part)), part)]:
                yield chosen, piece, scale

    def _split(self, batch: Sequences) -> list[tuple[Tensor, Sequences]]:
        """Sequences of similar length, and which these are: else most of the work is padding."""
        if self._split_of is None or self._split_of[0] is not batch:
            order = batch.lengths.argsort(descending=True, stable=True)
            lengths = batch.lengths[order]
            if batch.num_steps * len(batch) < max(PADDED, 1.5 * int(lengths.sum())):
                self._split_of = batch, [(order.sort().values, batch)]
                return self._split_of[1]
            ends = [0]
            while ends[-1] < len(batch):
                ends.append(int((1.5 * lengths > lengths[ends[-1]]).sum()))
            parts = [order[a:b].sort().values for a, b in pairwise(ends)]
            self._split_of = batch, [(part, batch[part]) for part in parts]
        return self._split_of[1]


def symbol_counts(hmm: HMM, values: Tensor) -> ExpectedCounts:
    """Expected counts of an HMM of symbols, ``states`` ``(*, V, K)`` by symbol, not by step.

    Parameters, and so their counts, have the batch dimensions of all of them.
    """

    def compute() -> ExpectedCounts:
        factors = hmm.symbol_factors(values)
        assert factors is not None  # observations are symbols, parameters constant, no labels
        initial, transition, table, symbols, lengths, known = factors
        if initial.dim() + transition.dim() > 4:  # restarts
            parts = initial.shape[:-1], transition.shape[:-3], table.shape[:-2]
            table = table.expand(*broadcast_shapes(*parts), *table.shape[-2:])
        return hmm.chain.named(
            recursions.expected_counts_of_symbols(
                initial, transition, table, symbols, lengths, known
            )
        )

    counts = with_one_wait(compute)
    hmm._check_evidence(counts.log_evidence, values)
    return counts


def uniform_counts(hmm: HMM, data: Sequences, likelihood: Tensor) -> ExpectedCounts:
    """Expected counts if all transitions that ``hmm`` allows were equally probable.

    Args:
        hmm: Its zeros stay.
        data: The sequences.
        likelihood: ``(R, N, T, K)`` or ``(N, T, K)``, of each state at each step.
    """
    logs = hmm.log_likelihood(data.values, check=False)
    # restarts may share the emission: if all of it is frozen
    logs = likelihood.reshape((-1,) * (logs.dim() - 3) + logs.shape[-3:]).log().to(logs)
    if hmm.allowed is not None:
        logs = logs.masked_fill(~hmm.allowed, -torch.inf)
    return hmm.chain.uniform().expected_counts(logs, hmm.lengths)
