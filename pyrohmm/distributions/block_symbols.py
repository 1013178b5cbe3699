"""``BlockSymbols``: emissions of states that emit only the symbols of their blocks."""

from __future__ import annotations

from typing import NoReturn

import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_floats, check_integers, check_range, check_shape
from ..ops.blocks.states import Blocks
from ..ops.log_space import step_mask
from ..ops.products import take_rows
from ..ops.tensor_cache import cached, lazy


class BlockSymbols:
    """Symbols, each emitted only by the states of its block.

    Args:
        log_probs: ``(V, w)``, log-probability of each symbol in each state of its block, in the
            order of the block; what is beyond the block is not read.
        blocks: Which states may emit which symbol.

    Raises:
        TypeError: If ``log_probs`` are not floating point.
        ValueError: If shapes disagree.
    """

    event_shape = torch.Size()
    log_missing: Tensor | None = None  # (K,), log-likelihood of states at missing steps, if not 0

    def __init__(self, log_probs: Tensor, blocks: Blocks) -> None:
        check_floats("log_emission", log_probs)
        check_shape("log_emission", log_probs, (blocks.num_symbols, blocks.width), "(V, w)")
        self.blocks = blocks
        exists = (blocks.states[blocks.symbol_block] >= 0).to(log_probs.device)
        self.log_probs = log_probs.masked_fill(~exists, -torch.inf)

    @property
    def batch_shape(self) -> torch.Size:
        """``(K,)``."""
        return torch.Size((self.blocks.num_states,))

    @property
    def support(self) -> constraints.Constraint:
        """The symbols."""
        return constraints.integer_interval(0, self.blocks.num_symbols - 1)

    @lazy
    def distribution(self) -> TorchDistribution:
        """Of all K states, -inf where a state cannot emit a symbol; computed when it is read."""
        size = self.blocks.num_states
        wide = self.log_probs.new_full((self.blocks.num_symbols, size + 1), -torch.inf)
        logits = wide.scatter(1, self.columns(), self.log_probs)[:, :-1].mT
        return Categorical(logits=logits, validate_args=False)  # sums are checked with the HMM

    def columns(self) -> Tensor:
        """The state of each of the ``log_probs``, ``(V, w)``; K beyond the block."""
        states = self.blocks.states[self.blocks.symbol_block]
        return states.masked_fill(states < 0, self.blocks.num_states).to(self.log_probs.device)

    def check_sums(self) -> None:
        """Raise unless the probabilities of what each state may emit sum to one."""
        sums = self.log_probs.new_zeros(self.blocks.num_states + 1)
        sums.index_add_(0, self.columns().flatten(), self.log_probs.detach().exp().flatten())
        low, high = (end.item() for end in torch.aminmax(sums[:-1]))
        if not 1 - 1e-4 <= low <= high <= 1 + 1e-4:
            raise ValueError(
                "log_emission must hold log-probabilities that sum to one over the symbols of each "
                f"state; got sums from {low:.6g} to {high:.6g}."
            )

    def likelihood(
        self,
        values: Tensor,
        lengths: Tensor,
        observed: Tensor | None = None,
        check: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of symbols in the states of their blocks.

        Args:
            values: ``(N, T)`` integers, symbols; anything at padded and missing steps.
            lengths: ``(N,)``, on the CPU.
            observed: ``(N, T)`` booleans; all by default.
            check: Whether to read the symbols of an accelerator in order to check them.

        Returns:
            The block of each step ``(N, T)``, on the CPU, and the log-likelihood of the step in the
            states of that block ``(N, T, w)``; at padded steps they mean nothing.

        Raises:
            TypeError: If ``values`` are not integers.
            ValueError: If a symbol is not below V.
        """
        check_integers("values", values)
        known = step_mask(lengths, values.size(1), values.device)
        known = known if observed is None else known & observed
        symbols = values.long().masked_fill(~known, 0)
        return self._of(symbols, None if observed is not None else values, lengths, check)

    def _of(
        self, symbols: Tensor, values: Tensor | None, lengths: Tensor, check: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of symbols ``values``, by block: see :meth:`likelihood`.

        While these values live and are not written to, an accelerator is not asked for the symbols
        again; if they are None it always is.
        """
        table = self.blocks.symbol_block
        if check or symbols.device.type == "cpu":
            check_range(
                "values", symbols, len(table), "V - 1",
                "Mark steps without a symbol by observed=False.",
            )  # fmt: skip
        if values is None or symbols.device.type == "cpu":
            blocks = table[symbols.cpu()]
        else:
            parts = table, lengths.numpy().tobytes()
            blocks = cached(values, lambda: table[symbols.cpu()], *parts)
        return blocks, take_rows(self.log_probs, symbols)

    def sample(self, states: Tensor) -> Tensor:
        """Sample a symbol from each of ``states``, integers of any shape; only those are read."""
        kinds, rows = states.unique(return_inverse=True)
        wanted = torch.zeros(self.blocks.num_states + 1, dtype=torch.bool, device=states.device)
        wanted[kinds] = True
        owner = self.columns().flatten()
        cells = wanted[owner].nonzero().squeeze(-1)  # of the (V, w) that belong to these states
        owner, order = torch.searchsorted(kinds, owner[cells]).sort(stable=True)
        cells = cells[order]
        sums = self.log_probs.flatten()[cells].double().exp().cumsum(0)
        last = torch.bincount(owner, minlength=len(kinds)).cumsum(0) - 1
        high = sums[last]
        low = torch.cat([high.new_zeros(1), high])[:-1]
        uniform = torch.rand(states.shape, dtype=sums.dtype, device=sums.device) * (1 - 1e-9)
        place = torch.searchsorted(sums, torch.lerp(low[rows], high[rows], uniform), right=True)
        return cells[place.minimum(last[rows])] // self.blocks.width


class ContextSymbols(BlockSymbols):
    """Symbols that depend on those before them, which have been observed.

    So states are summed out as ever; what needs the symbols of steps that are not given (samples,
    forecasts, missing steps) is refused.
    """

    kind = "such an emission"

    def refuse(self, query: str) -> NoReturn:
        """Raise: every symbol must be given."""
        raise NotImplementedError(
            f"every symbol must be given, as in {self.kind} the next depends on it: there is no "
            f"{query}."
        )

    def likelihood(
        self, values: Tensor, lengths: Tensor, observed: Tensor | None = None, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-likelihoods with every step observed: see :meth:`BlockSymbols.likelihood`."""
        if observed is not None:
            self.refuse("missing step")
        return super().likelihood(values, lengths, None, check)

    @property
    def distribution(self) -> NoReturn:
        """Refused: it depends on the symbols before."""
        self.refuse("emission of all states")

    def sample(self, states: Tensor) -> NoReturn:
        """Refused, as :attr:`distribution`."""
        self.refuse("sample")
