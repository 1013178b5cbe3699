"""The arguments of the recursions of Markov chains, checked and in one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._checks import (
    check_broadcast,
    check_lengths,
)
from ..products import add_rows, look_up
from ..tensor_cache import cached

Gradient = Callable[[Tensor], tuple[Tensor, ...] | None]  # of weights (G, n) of the evidences


class Groups(NamedTuple):
    """N sequences in G groups of n, each of which shares matrices, and a table of symbols."""

    initial: Tensor  # (G, n, K), log
    transition: Tensor  # (S, G, K, K), log, S = 1 or T - 1
    logs: Tensor  # (G, n, T, K), log-likelihoods; with symbols (G, K, V), of each of them
    symbols: Tensor | None  # (G, n, T)
    known: Tensor | None  # (G, n, T), False where a symbol is missing; None if all are known
    lengths: Tensor  # (G, n), on the CPU

    @property
    def num_steps(self) -> int:
        """T, the number of steps."""
        return self.logs.size(2) if self.symbols is None else self.symbols.size(2)

    @property
    def likelihood(self) -> Tensor:
        """Log-likelihoods ``(G, n, T, K)``."""
        if self.symbols is None:
            return self.logs
        return symbol_scores(self.logs.unsqueeze(1), self.symbols, self.known)

    def by_logs(self, states: Tensor) -> Tensor:
        """Gradient by ``logs``: that by log-likelihoods ``(G, n, T, K)``, summed per symbol."""
        if self.symbols is None:
            return states
        if self.known is not None:
            states = states.masked_fill(~self.known.unsqueeze(-1), 0.0)
        groups, num_states, num_symbols = self.logs.shape
        rows, states = self.symbols.movedim(-1, 0), states.movedim(-2, 0)  # as they are made
        if groups > 1:
            rows = rows + num_symbols * torch.arange(groups, device=states.device).unsqueeze(-1)
        sums = add_rows(states.reshape(-1, num_states), rows.reshape(-1), groups * num_symbols)
        return sums.reshape(groups, num_symbols, num_states).mT

    def subset(self, chosen: Tensor) -> Groups:
        """Sequences by index ``(m,)`` below G n: one group if all share a matrix, else m of one."""
        groups, size = self.lengths.shape
        where = chosen.to(self.initial.device)

        def rows(part: Tensor, index: Tensor = where) -> Tensor:
            part = part.flatten(0, 1)[index]
            return part.unsqueeze(0 if groups == 1 else 1)

        shared = self.transition, self.logs
        if groups > 1:
            shared = self.transition[:, where // size], self.logs[where // size]
        return Groups(
            rows(self.initial), shared[0],
            rows(self.logs) if self.symbols is None else shared[1],
            None if self.symbols is None else rows(self.symbols),
            None if self.known is None else rows(self.known),
            rows(self.lengths, chosen.cpu()),
        )  # fmt: skip


class Arguments(NamedTuple):
    """Checked arguments of a recursion, with the dimensions they came with."""

    initial: Tensor  # (*b, K), log
    transition: Tensor  # (*b, 1|T-1, K, K), log
    logs: Tensor  # (*b, T, K), log; with symbols (*b, K, V)
    symbols: Tensor | None  # (*b, T)
    known: Tensor | None  # (*b, T)
    lengths: Tensor  # (*b), on the CPU
    batch: torch.Size  # what the (*b) broadcast to
    split: int  # number of batch dimensions with matrices or tables of their own
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors by which the evidence is differentiated."""
        return self.initial, self.transition, self.logs


def symbol_scores(logs: Tensor, symbols: Tensor, known: Tensor | None) -> Tensor:
    """Log-likelihoods ``(*b, T, K)`` of symbols ``(*b, T)``, zero where they are missing."""
    scores = look_up(logs, symbols.movedim(-1, 0)).movedim(0, -2)
    return scores if known is None else scores.masked_fill(~known.unsqueeze(-1), 0.0)


def check_arguments(
    log_initial: Tensor, log_transition: Tensor, logs: Tensor, lengths: Tensor,
    symbols: Tensor | None = None, known: Tensor | None = None,
) -> Arguments:  # fmt: skip
    """Check shapes and lengths of the arguments of a recursion."""
    size = log_initial.size(-1)
    steps = logs.size(-2) if symbols is None else symbols.size(-1)
    each = (steps, size) if symbols is None else (size, logs.size(-1))
    matrices = log_transition.shape[-3:]
    if matrices not in ((1, size, size), (steps - 1, size, size)) or logs.shape[-2:] != each:
        raise ValueError(
            f"log_transition (*B, 1|T-1, K, K) and log-likelihoods must be of T = {steps} steps "
            f"and K = {size} states; got {tuple(log_transition.shape)} and {tuple(logs.shape)}."
        )
    lengths = lengths.cpu().long()
    check_lengths(lengths, steps)
    shared = [log_transition.shape[:-3]] + [logs.shape[:-2]] * (symbols is not None)
    leads = {
        "log_initial": log_initial.shape[:-1], "log_transition": log_transition.shape[:-3],
        "log_likelihood": logs.shape[:-2], "lengths": lengths.shape,
    }  # fmt: skip
    for name, rows in (("symbols", symbols), ("known", known)):
        if rows is not None:
            leads[name] = rows.shape[:-1]
    batch = check_broadcast(leads)
    double = torch.float64 in (log_initial.dtype, log_transition.dtype, logs.dtype)
    dtype = torch.float64 if double else torch.float32
    tensors = log_initial, log_transition, logs
    return Arguments(*tensors, symbols, known, lengths, batch, split_of(batch, shared), dtype)


def split_of(batch: torch.Size, shared: Sequence[torch.Size]) -> int:
    """Number of leading dimensions of ``batch`` over which tensors of ``shared`` shapes vary."""
    if not any(shared):
        return 0
    return max(
        (len(batch) - len(lead) + place + 1
         for lead in shared for place, size in enumerate(lead) if size != 1),
        default=0,
    )  # fmt: skip


def by_groups(table: Tensor, core: int, batch: torch.Size, split: int) -> Tensor:
    """Broadcast a table ``(*b, *core)`` to one per group, ``(G, *core)``."""
    lead, tail = table.shape[:-core], table.shape[-core:]
    if split == 0:
        return table.reshape(1, *tail)
    lead = torch.Size((1,) * (len(batch) - len(lead))) + lead
    table = table.reshape(lead[:split] + tail).expand(batch[:split] + tail)
    return table.reshape(math.prod(batch[:split]), *tail)


def grouped(arguments: Arguments) -> Groups:
    """Arrange sequences in groups that share a transition matrix, with one dtype."""
    initial, transition, logs, symbols, known, lengths, batch, split, dtype = arguments
    shape = math.prod(batch[:split]), math.prod(batch[split:])

    if symbols is not None and symbols.device.type != "cpu":  # in the order of the recursion
        symbols = cached(symbols, symbols.movedim(-1, 0).contiguous).movedim(0, -1)

    def each(part: Tensor, core: int) -> Tensor:
        lead, tail = part.shape[: part.dim() - core], part.shape[part.dim() - core :]
        if not lead:
            return part.expand(*shape, *tail)
        return (part if lead == batch else part.expand(*batch, *tail)).reshape(*shape, *tail)

    return Groups(
        each(initial.to(dtype), 1),
        by_groups(transition.to(dtype), 3, batch, split).transpose(0, 1),
        by_groups(logs.to(dtype), 2, batch, split) if symbols is not None
        else each(logs.to(dtype), 2),
        None if symbols is None else each(symbols, 1),
        None if known is None else each(known, 1),
        each(lengths, 0),
    )  # fmt: skip


def ungrouped(arguments: Arguments, found: tuple[Tensor, ...]) -> list[Tensor]:
    """Convert gradients by grouped tensors to gradients by the arguments, of their shapes."""
    initial, transition, logs = found
    batch, split = arguments.batch, arguments.split
    lead = (*batch[:split], *(1,) * (len(batch) - split))
    shapes = (
        (*batch, initial.size(-1)),
        (*lead, *transition.shape[:1], *transition.shape[2:]),
        (*batch, *logs.shape[2:]) if arguments.symbols is None else (*lead, *logs.shape[1:]),
    )
    gradients = []
    for part, shape, like in zip(found, shapes, arguments.tensors):
        if part is transition and len(shape) > 3:
            part = part.transpose(0, 1)
        whole = part.numel() == like.numel()  # there is nothing to add up
        part = part.reshape(like.shape if whole else shape)
        gradients.append((part if whole else part.sum_to_size(like.shape)).to(like.dtype))
    return gradients
