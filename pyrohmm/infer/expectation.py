"""The E-step of EM: expected counts, batched by length, and the reseeding of unused states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from pyro.distributions.util import is_validation_enabled, validation_enabled
from torch import Tensor

from .._sync import guessing, with_one_wait
from ..chains.base import Core, ExpectedCounts
from ..data.parts import Parts, parts_of
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.closed_form import Statistics
from ..ops import recursions
from .maximization import DEAD, Maximization
from .parameters import Parameters
from .process_group import ProcessGroup
from .starts import build_once
from .tables import TableCounts

PADDED = 1 << 16  # steps, padding included, below which sequences of all lengths go together

Gather = Callable[[ExpectedCounts, Sequences | None, HMM | None, HMM, float], Statistics]


class Expectation:
    """The E-step, and the loss.

    Args:
        parameters: They build the HMM.
        gather: Reduces expected counts to what the M-step needs.
        by_length: Whether sequences of similar length may go together, which needs sums alone.
        by_symbol: Whether counts of symbols are enough, instead of those of steps.
        reseed: Whether a state that no observation supports gets half of the busiest state.
        group: The data-parallel ranks, over which statistics are added.

    Attributes:
        reseeded: Whether that has happened in the last iteration, which may have raised the loss.
    """

    def __init__(
        self,
        parameters: Parameters,
        gather: Gather,
        by_length: bool,
        by_symbol: bool,
        reseed: bool,
        group: ProcessGroup,
    ) -> None:
        self.parameters, self.gather = parameters, gather
        self.by_length, self.by_symbol = by_length, by_symbol and not reseed
        self.reseed, self.group = reseed, group
        self.reseeded = False
        alone = self.by_symbol and group.size == 1
        self.tables = TableCounts(parameters) if alone and TableCounts.suit(parameters) else None
        self._guesses = True  # until a guess was wrong
        self._seen: tuple[Any, int] = None, 0  # the last batch, and how often in succession
        self._batches: tuple[Sequences, list[tuple[Tensor, Sequences]]] | None = None

    def __call__(self, batch: Sequences | Parts) -> tuple[Tensor, Statistics]:
        """The loss ``(R,)`` with the parameters as they are, and what the M-step needs.

        The loss is on the CPU. An accelerator is waited for once, unless numbers are unusual.
        """
        last, times = self._seen
        self._seen = batch, times + 1 if batch is last else 1
        if self.tables is not None and isinstance(batch, Sequences):
            found = self._of_tables(self.tables, batch)
            if found is not None:
                return found
        if self._guesses and not self.reseed and self.group.size == 1:  # ranks stay in step
            # by then data, start and what an M-step returns have been checked
            validate = is_validation_enabled() and self._seen[1] <= 2
            with guessing() as guesses, validation_enabled(validate):
                loss, statistics = self._compute(batch, check=False)
            self._guesses, (read,) = guesses.read(loss)
            if self._guesses and bool(read.isfinite().any()) and not bool(read.isnan().any()):
                return read, statistics
        loss, statistics = self._compute(batch, check=True)
        return loss.cpu(), statistics

    def _of_tables(self, tables: TableCounts, batch: Sequences) -> tuple[Tensor, Statistics] | None:
        """As :meth:`__call__`; None if numbers go out of range, or there is an error to be told."""
        statistics: Statistics = {}
        total: Any = 0.0
        for _, part, scale in self._pieces(batch):
            if self._seen[1] <= 2:  # check data, start and what an M-step returns
                self.parameters.build(part)[0].prepare_values(part.values)
            if (expected := tables(part)) is None:
                return None
            total = total + scale * expected.log_evidence.double().sum(-1)
            hmm = self.parameters.example
            _add(statistics, self.gather(expected, None, None, hmm, scale))
        loss = -(total + self.parameters.log_density({}).double())
        return (loss, statistics) if bool(loss.isfinite().all()) else None

    def _compute(self, batch: Sequences | Parts, check: bool) -> tuple[Tensor, Statistics]:
        """The same, with the loss where the data are; ``check`` reads whether it is possible."""
        total: Any = 0.0
        statistics: Statistics = {}
        for chosen, part, scale in self._pieces(batch):
            with torch.no_grad():
                hmm, prior = self.parameters.build(part)
                by_symbol = self.by_symbol and hmm.allowed is None
                count = symbol_counts if by_symbol else type(hmm).expected_counts
                expected = count(hmm, part.values)
            evidence = expected.log_evidence.double().reshape(-1, len(part))
            if check and bool((impossible := evidence.isneginf().all(0)).any()):
                where = int(chosen[impossible.byte().argmax()])
                raise ValueError(
                    f"data: sequence {where} of this batch has probability zero; check for symbols "
                    "or transitions that no path allows, or give the parameters a prior that rules "
                    "none out."
                )
            total = total + scale * evidence.sum(-1)
            if self.reseed:
                expected = self._reseed(expected)
            steps = None if by_symbol else part
            _add(statistics, self.gather(expected, steps, hmm, hmm, scale))
        if self.group.size > 1:
            total = self.group.mean(total)
            statistics = {n: self.group.mean(v.contiguous()) for n, v in statistics.items()}
        loss = -(total + prior.double())
        if check and not bool(loss.isfinite().any()):
            raise FloatingPointError(
                f"the loss is {loss[0].item()}; the prior has density zero at the parameters."
            )
        return loss, statistics

    def _reseed(self, expected: ExpectedCounts) -> ExpectedCounts:
        """Give half of the busiest state to each that no observation supports, but might."""
        module: Any = self.parameters.module
        data: Any = self.parameters.data  # in memory, and in one process
        weights = expected.states.reshape(self.parameters.restarts, *expected.states.shape[-3:])
        visits = weights.sum((1, 2))  # (R, K)
        dead = visits < DEAD * visits.sum(-1, keepdim=True)
        if bool(dead.any()):
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                hmm = build_once(module, data)  # its zeros are those that stay
                hmm = hmm if data.labels is None else hmm.restrict(data.labels)
                alike = torch.ones(len(data), data.num_steps, hmm.num_states)
                dead = dead & (uniform_counts(hmm, data, alike.to(visits)).states.sum((0, 1)) > 0)
        self.reseeded = bool(dead.any())
        if not self.reseeded:
            return expected
        return _split_busiest(expected, weights, dead, self.parameters.example.chain.cores)

    def _pieces(self, batch: Sequences | Parts) -> Iterator[tuple[Tensor, Sequences, float]]:
        """What goes together: which sequences of a part these are, they, and their scale."""
        for part in parts_of(batch):
            scale = part.total / len(part)
            pieces = self._split(part) if self.by_length else [(torch.arange(len(part)), part)]
            for chosen, piece in pieces:
                yield chosen, piece, scale

    def _split(self, batch: Sequences) -> list[tuple[Tensor, Sequences]]:
        """Sequences of similar length, and which these are: else most of the work is padding."""
        if self._batches is None or self._batches[0] is not batch:
            order = batch.lengths.argsort(descending=True, stable=True)
            lengths = batch.lengths[order]
            if batch.num_steps * len(batch) < max(PADDED, 1.5 * int(lengths.sum())):
                self._batches = batch, [(order.sort().values, batch)]
                return self._batches[1]
            ends = [0]
            while ends[-1] < len(batch):
                ends.append(int((1.5 * lengths > lengths[ends[-1]]).sum()))
            parts = [order[a:b].sort().values for a, b in pairwise(ends)]
            self._batches = batch, [(part, batch[part]) for part in parts]
        return self._batches[1]


def _add(statistics: Statistics, new: Statistics) -> None:
    """Add those of another part."""
    for name, value in new.items():
        statistics[name] = statistics[name] + value if name in statistics else value


def symbol_counts(hmm: HMM, values: Tensor) -> ExpectedCounts:
    """As :meth:`HMM.expected_counts`, with ``states`` ``(*, V, K)``: by symbol, not by step.

    Parameters, and so their counts, have the batch dimensions of all of them.
    """

    def compute() -> ExpectedCounts:
        factors = hmm.symbol_factors(values)
        assert factors is not None  # observations are symbols, parameters constant, no labels
        initial, transition, table, symbols, lengths, known = factors
        if initial.dim() + transition.dim() > 4:  # restarts
            parts = initial.shape[:-1], transition.shape[:-3], table.shape[:-2]
            table = table.expand(*torch.broadcast_shapes(*parts), *table.shape[-2:])
        return hmm.chain.named(
            recursions.expected_counts_of_symbols(
                initial, transition, table, symbols, lengths, known
            )
        )

    counts = with_one_wait(compute)
    hmm._check_evidence(counts.log_evidence, values)
    return counts


def check_apart(
    maximize: Maximization, group: ProcessGroup, batch_size: int | None, reseed: bool
) -> None:
    """Raise unless an E-step over parts of the data, or over ranks, is that over all of it."""
    example = maximize.parameters.example
    if reseed and (example.order > 1 or not any("K" in c for c in example.chain.cores.values())):
        raise ValueError(
            "reseed divides the states of one chain, each of which depends on the one before it; "
            f"those of a {type(example).__name__} do not."
        )
    parts = isinstance(maximize.parameters.data, Parts)
    if not parts and group.size == 1:
        return
    which = "an iterable of Sequences" if parts else "several processes"
    if not maximize.summed:
        raise ValueError(
            f"{which} needs a module whose M-step needs nothing but sums over observations; that "
            f"of {type(maximize.parameters.module).__name__} needs all of them. Use fit_map."
        )
    if reseed:
        raise ValueError(f"reseed compares all observations, which {which} do not hold at once.")
    if parts and batch_size is not None:
        raise ValueError("batch_size is of Sequences; of an iterable each iteration takes all.")


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


def _split_busiest(
    expected: ExpectedCounts, weights: Tensor, dead: Tensor, cores: dict[str, Core]
) -> ExpectedCounts:
    """Give half of what supports the busiest state to each of the ``dead`` ones.

    Args:
        expected: Counts.
        weights: Their ``states``, ``(R, N, T, K)``.
        dead: ``(R, K)``.
        cores: The dimensions of each count: see :class:`Chain`.
    """
    weights = weights.clone()
    counts = {}
    for name, value in expected.counts.items():
        core = value.shape[value.dim() - len(cores[name]) :]
        counts[name] = value.reshape(len(dead), -1, *core).clone()
    for r, k in dead.nonzero().tolist():
        busy = int(weights[r].sum((0, 1)).argmax())
        part = torch.rand_like(weights[r, ..., 0]) < 0.5  # of the steps: so that the halves differ
        weights[r, ..., k] = weights[r, ..., busy] * part
        weights[r, ..., busy] *= ~part
        for name, value in counts.items():
            for axis, letter in enumerate(cores[name], -len(cores[name])):
                if letter == "K":
                    half = value[r].select(axis, busy) / 2
                    value[r].select(axis, busy).copy_(half)
                    value[r].select(axis, k).copy_(half)
    shaped = {name: value.reshape(expected.counts[name].shape) for name, value in counts.items()}
    return ExpectedCounts(expected.log_evidence, weights.reshape(expected.states.shape), shaped)
