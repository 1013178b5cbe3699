"""The E-step of EM: expected counts, batched by length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pyro.distributions.util import is_validation_enabled, validation_enabled
from pyro.nn import PyroModule
from torch import Tensor

from .._checks import broadcast_shapes
from .._choices import WIDEST
from .._sync import guessing, with_one_wait
from ..chains.base import ExpectedCounts
from ..data.batches import Parts, parts_of
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.closed_form import Statistics, has_foreign_priors
from ..nn.discrete import CategoricalEmission
from ..nn.tabular import TabularHMM
from ..ops import recursions
from ..ops.backends import NUMBA, pick
from ..ops.dense.chain import Chain
from ..ops.log_space import log
from .maximization import Maximization, expectation_of_logs
from .parameters import Parameters
from .process_group import ProcessGroup

PADDED = 1 << 16  # steps, padding included, below which sequences of all lengths go together


class Expectation:
    """The E-step, and the loss.

    Args:
        parameters: They build the HMM.
        maximize: Reduces expected counts to what the M-step needs.
        group: The data-parallel ranks, over which statistics are added.
        keep: Whether to keep the expected counts, for :meth:`bound`.

    Attributes:
        log_prior: ``(R,)`` or a scalar, that of the last call.
    """

    def __init__(
        self, parameters: Parameters, maximize: Maximization, group: ProcessGroup, keep: bool
    ) -> None:
        self.parameters, self.maximize, self.group, self.keep = parameters, maximize, group, keep
        self._kept: list[tuple[Sequences, float, Statistics, Tensor]] = []
        self.by_symbol = maximize.by_symbol and not keep
        alone = self.by_symbol and group.size == 1
        self.tables = TableCounts(parameters) if alone and TableCounts.suit(parameters) else None
        self.log_prior = torch.zeros(())
        self._guesses = True  # until a guess was wrong
        self._seen: tuple[Any, int] = None, 0  # the last batch, and how often in succession
        self._split_of: tuple[Sequences, list[tuple[Tensor, Sequences]]] | None = None

    def __call__(self, batch: Sequences | Parts) -> tuple[Tensor, Statistics]:
        """The loss ``(R,)`` with the parameters as they are, and what the M-step needs.

        The loss is on the CPU. An accelerator is waited for once, unless numbers are unusual.
        """
        last, times = self._seen
        self._seen = batch, times + 1 if batch is last else 1
        if self._guesses and self.group.size == 1:  # ranks stay in step
            # by then data, start and what an M-step returns have been checked
            validate = is_validation_enabled() and self._seen[1] <= 2
            with guessing() as guesses, validation_enabled(validate):
                loss, statistics = self._compute(batch, check=False)
            self._guesses, (read, log_prior) = guesses.read(loss, self.log_prior)
            if self._guesses and bool(read.isfinite().any()) and not bool(read.isnan().any()):
                self.log_prior = log_prior
                return read, statistics
        loss, statistics = self._compute(batch, check=True)
        return loss.cpu(), statistics

    def _compute(self, batch: Sequences | Parts, check: bool) -> tuple[Tensor, Statistics]:
        """Loss, on the device of the data, and statistics; ``check`` raises if it is infinite."""
        total: Any = 0.0
        statistics: Statistics = {}
        self._kept = []
        for chosen, part, scale in self._pieces(batch):
            hmm, expected, by_symbol = self._counts(part)
            evidence = expected.log_evidence.double().reshape(-1, len(part))
            if check and bool((impossible := evidence.isneginf().all(0)).any()):
                where = int(chosen[impossible.byte().argmax()])
                raise ValueError(
                    f"data: sequence {where} of this batch has probability zero; check for symbols "
                    "or transitions that no path allows, or give the parameters a prior that rules "
                    "none out."
                )
            total = total + scale * evidence.sum(-1)
            if self.keep:
                counts = expected.counts | {"states": expected.state_probs}
                value = expectation_of_logs(hmm, part.values, counts, self.parameters.restarts)
                self._kept.append((part, scale, counts, value))
            steps = None if by_symbol else part
            for name, value in self.maximize.gather(expected, steps, hmm, scale).items():
                statistics[name] = statistics[name] + value if name in statistics else value
        if self.group.size > 1:
            total = self.group.mean(total)
            statistics = {n: self.group.mean(v.contiguous()) for n, v in statistics.items()}
        loss = -(total + self.log_prior.double())
        if check and not bool(loss.isfinite().any()):
            raise FloatingPointError(
                f"the loss is {loss[0].item()}; the prior has density zero at the parameters."
            )
        return loss, statistics

    def _counts(self, part: Sequences) -> tuple[HMM, ExpectedCounts, bool]:
        """An HMM, expected counts at the parameters, and whether states are counted by symbol."""
        expected = None if self.tables is None else self.tables(part)
        if expected is not None:
            if self._seen[1] <= 2:  # check data, start and what an M-step returns
                self.parameters.build(part)[0].prepare_values(part.values)
            self.log_prior = self.parameters.log_density()
            return self.parameters.example, expected, True
        with torch.no_grad():
            hmm, self.log_prior = self.parameters.build(part)
            by_symbol = self.by_symbol and hmm.allowed is None
            count = symbol_counts if by_symbol else type(hmm).expected_counts
            return hmm, count(hmm, part.values), by_symbol

    def bound(self, loss: Tensor) -> Tensor:
        r"""Lower bound :math:`E_q[\log p(x, z, \theta) - \log q(z)]` after the M-step, ``(R,)``.

        q is the posterior of the last E-step, at whose parameters the bound was minus ``loss``.
        """
        old, rise = self.log_prior, torch.zeros_like(loss)
        with torch.no_grad():
            for part, scale, counts, before in self._kept:
                hmm, prior = self.parameters.build(part)
                value = expectation_of_logs(hmm, part.values, counts, self.parameters.restarts)
                rise = rise + scale * (value - before).to(rise)
        return rise + prior.to(rise) - old.to(rise) - loss

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


_SITES = "initial", "transition", "emission.probs"


class TableCounts:
    """Expected counts from the values of the parameters of a :class:`TabularHMM`.

    Args:
        parameters: Of a module for which :meth:`suit` is true.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._read: WeakKeyDictionary[Sequences, tuple[Tensor, ...]] = WeakKeyDictionary()

    @staticmethod
    def suit(parameters: Parameters) -> bool:
        """Whether all parameters are tables with priors of their own, and data on the CPU."""
        module, data = parameters.module, parameters.data
        return (
            _is_plain(module, TabularHMM)
            and _is_plain(module.emission, CategoricalEmission)
            and isinstance(data, Sequences)
            and data.labels is None
            and parameters.sites.keys() == set(_SITES)
            and not has_foreign_priors(module)
            and parameters.log_prior is None
            and module.num_states <= WIDEST
            and pick(data.device) is NUMBA
        )

    def __call__(self, batch: Sequences) -> ExpectedCounts | None:
        """Counts by symbol; None if numbers leave their range, or ``batch`` holds no symbols.

        What it returns depends on its arguments alone: a fit that goes on from a checkpoint has the
        same bits.
        """
        if (read := self._symbols(batch)) is None:
            return None
        values, restarts = self.parameters.values, self.parameters.restarts
        initial, transition, table = (
            log(values[name]).reshape(restarts, *values[name].shape[-dim:])
            for name, dim in zip(_SITES, (1, 2, 2))
        )
        wide = (part.expand(restarts, *part.shape) for part in read)  # fewer after each round
        chain = Chain(
            initial.unsqueeze(1).expand(-1, len(batch), -1), transition.unsqueeze(0), table, *wide
        )
        evidence, gradient = recursions.solve(chain, initial.dtype)
        found = gradient(torch.ones_like(evidence))
        assert found is not None
        counts = {"log_initial": found[0].sum(1), "log_transition": found[1][0]}
        return ExpectedCounts(evidence, found[2].mT.unsqueeze(1), counts)

    def _symbols(self, batch: Sequences) -> tuple[Tensor, ...] | None:
        """Symbols and booleans of those that are known, ``(N, T)``, and lengths.

        None if some are none of V.
        """
        if batch not in self._read:
            count = self.parameters.values["emission.probs"].size(-1)
            if batch.values.dtype.is_floating_point or batch.values.dim() != 2:
                return None
            symbols = batch.values.long().masked_fill(~batch.observed, 0)
            if symbols.amin() < 0 or symbols.amax() >= count:
                return None
            self._read[batch] = symbols, batch.observed, batch.lengths.cpu().long()
        return self._read[batch]


def _is_plain(module: PyroModule, kind: type[PyroModule]) -> bool:
    """Whether it is just a ``kind``, whose ``forward`` nothing changes or watches."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is kind and not changed
