"""The E-step of symbols whose parameters are all tables, without an HMM that is built.

On few data most of the time of an iteration would go into building distributions and into checks of
what has been checked before.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from pyro.nn import PyroModule
from torch import Tensor

from .._choices import WIDEST
from ..chains.base import ExpectedCounts
from ..data.sequences import Sequences
from ..nn.closed_form import has_foreign_priors
from ..nn.discrete import CategoricalEmission
from ..nn.tabular import TabularHMM
from ..ops.backends import NUMBA, pick
from ..ops.dense import scaling
from ..ops.dense.chain import Chain
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
        evidence, gradient = scaling.solve(chain, initial.dtype)
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
