"""An ``HMM`` as a module whose parameters are its values, without priors."""

from __future__ import annotations

from typing import Any

from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.factorial_hmm import FactorialHMM
from ..distributions.hmm import HMM
from ..distributions.hsmm import HSMM
from ..distributions.second_order_hmm import SecondOrderHMM
from .base import HMMModule
from .continuous_time import TabularContinuousTimeHMM
from .factorial import TabularFactorialHMM
from .second_order import TabularSecondOrderHMM
from .tabular import TabularHMM
from .tabular_hsmm import TabularHSMM

MODULES: dict[type, Any] = {
    ContinuousTimeHMM: TabularContinuousTimeHMM,
    FactorialHMM: TabularFactorialHMM,
    HSMM: TabularHSMM,
    SecondOrderHMM: TabularSecondOrderHMM,
}


def module_of(hmm: HMM) -> HMMModule:
    """The tabular module of the kind of ``hmm``, such as :meth:`TabularHMM.from_hmm`."""
    module: HMMModule = MODULES.get(type(hmm), TabularHMM).from_hmm(hmm)
    return module
