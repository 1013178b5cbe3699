"""The E-step of symbols whose parameters are all tables, without an HMM that is built.

On few data most of the time of an iteration would go into building distributions and into checks of
what has been checked before.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pyro.nn import PyroModule
from torch import Tensor

from .._choices import WIDEST
from ..chains.base import ExpectedCounts
from ..data.sequences import Sequences
from ..nn.closed_form import has_foreign_priors
from ..nn.discrete import CategoricalEmission
from ..nn.tabular import TabularHMM
from ..ops import recursions
from ..ops.backends import NUMBA, backend_for
from ..ops.log_space import log
from .parameters import Parameters

_SITES = "initial", "transition", "emission.probs"


class TableCounts:
    """Expected counts from the values of the parameters of a :class:`TabularHMM`.

    Args:
        parameters: Of a module for which :meth:`suit` is true.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._read: WeakKeyDictionary[Sequences, tuple[Tensor, Tensor]] = WeakKeyDictionary()

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
            and backend_for(data.device) is NUMBA
        )

    def __call__(self, batch: Sequences) -> ExpectedCounts | None:
        """Counts by symbol; None if numbers leave their range, or ``batch`` holds no symbols.

        What it returns depends on its arguments alone: a fit that goes on from a checkpoint has the
        same bits.
        """
        restarts, read = self.parameters.restarts, self._symbols(batch)
        if read is None:
            return None
        initial, transition, table = (
            log(value).reshape(restarts, *value.shape[-dim:])
            for value, dim in zip((self.parameters.values[name] for name in _SITES), (1, 2, 2))
        )
        symbols, lengths = read
        missing = table.size(-1)
        found = recursions.expected_counts_of_symbols(
            initial.unsqueeze(1), transition.unsqueeze(1).unsqueeze(1), table.unsqueeze(1),
            symbols.masked_fill(symbols == missing, 0), lengths, symbols != missing,
        )  # fmt: skip
        counts = {"log_initial": found.initial.squeeze(1),
                  "log_transition": found.transitions.squeeze(1).squeeze(1)}  # fmt: skip
        return ExpectedCounts(found.log_evidence, found.states, counts)

    def _symbols(self, batch: Sequences) -> tuple[Tensor, Tensor] | None:
        """Symbols ``(N, T)``, V where there is none, and lengths; None if some are none of V."""
        if batch not in self._read:
            missing = self.parameters.values["emission.probs"].size(-1)
            if batch.values.dtype.is_floating_point or batch.values.dim() != 2:
                return None
            symbols = batch.values.long().masked_fill(~batch.observed, missing)
            if symbols.amin() < 0 or (batch.observed & (symbols >= missing)).any():
                return None
            self._read[batch] = symbols.contiguous(), batch.lengths.cpu().long()
        return self._read[batch]


def _is_plain(module: PyroModule, kind: type[PyroModule]) -> bool:
    """Whether it is just a ``kind``, whose ``forward`` nothing changes or watches."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is kind and not changed
