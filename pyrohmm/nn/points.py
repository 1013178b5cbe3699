"""An ``HMM`` as a module whose parameters are its values, without priors."""

from __future__ import annotations

from typing import Any

from ..distributions.hmm import HMM
from .base import HMMModule
from .continuous_time import TabularContinuousTimeHMM
from .factorial import TabularFactorialHMM
from .second_order import TabularSecondOrderHMM
from .tabular import TabularHMM
from .tabular_hsmm import TabularHSMM

TABLES = (
    TabularContinuousTimeHMM, TabularFactorialHMM, TabularHMM, TabularHSMM, TabularSecondOrderHMM,
)  # fmt: skip
MODULES: dict[type, Any] = {module.family: module for module in TABLES}


def module_of(hmm: HMM) -> HMMModule:
    """The tabular module of the kind of ``hmm``, such as :meth:`TabularHMM.from_hmm`."""
    module: HMMModule = MODULES.get(type(hmm), TabularHMM).from_hmm(hmm)
    return module
