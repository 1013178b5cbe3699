"""``TabularSecondOrderHMM``: each state depends on the two before it."""

from __future__ import annotations

from functools import partial

from pyro.distributions import Dirichlet
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..distributions.second_order_hmm import SecondOrderHMM
from ..ops.log_space import log
from ..ops.recursions import ExpectedCounts
from . import emissions
from .base import HMMModule
from .closed_form import Maximum, Statistics, is_free, row_mode, with_prior
from .family import EmissionFamily, build_emission, positive


class TabularSecondOrderHMM(HMMModule):
    r"""Second-order HMM whose parameters are its probabilities, with Dirichlet priors on every row.

    K³ probabilities of transitions ask for more data than K² do: a concentration above one draws
    the rows of pairs that are hardly ever seen to even ones. See :class:`SecondOrderHMM`.

    Sites: ``initial`` ``(K,)``, ``second`` ``(K, K)``, ``transition`` ``(K, K, K)``, and those of
    ``emission``.

    Args:
        num_states: K.
        emission: An emission family: see :class:`TabularHMM`.
        initial_concentration: Of the prior of the first state; a number or ``(K,)``.
        second_concentration: Of the priors of the second state given the first; a number, ``(K,)``
            or ``(K, K)``.
        transition_concentration: Of the priors of the next state given the two before it; a number
            or what broadcasts to ``(K, K, K)``, so that ``(K, K)`` is the same after all z_{t-2}.

    Raises:
        ValueError: If ``num_states`` is less than one, or a concentration is not positive or has
            the wrong shape.

    Example:
        >>> data = Sequences.from_list([[0, 0, 1, 1] * 10, [1, 1, 0, 0] * 10])
        >>> fit = fit_em(TabularSecondOrderHMM(2, categorical(2)), data, restarts=4)
        >>> fit.hmm(data).log_prob(data.values).sum().round()  # 2 log 1/2
        tensor(-1.)
    """

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        initial_concentration: float | Tensor = 1.0,
        second_concentration: float | Tensor = 1.0,
        transition_concentration: float | Tensor = 1.0,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states = num_states
        priors = initial_concentration, second_concentration, transition_concentration
        for core, (name, prior) in enumerate(zip(_NAMES, priors), 1):
            label, shape = f"{name}_concentration", (num_states,) * core
            self.register_buffer(label, positive(label, prior, shape))
            setattr(self, name, PyroSample(partial(_rows, name=name)))
        self.emission = build_emission(emission, num_states)

    @classmethod
    def from_hmm(cls, hmm: SecondOrderHMM) -> TabularSecondOrderHMM:
        """A module with the values of ``hmm`` as parameters: points, without priors.

        Raises:
            TypeError: If ``hmm`` is not a ``SecondOrderHMM``.
            ValueError: If its emission has a dimension of steps.
        """
        if hmm.emission_per_step:
            raise ValueError("hmm has parameters per step; a module has one set for all steps.")
        module = cls(hmm.num_states, lambda _: emissions.from_distribution(hmm.emission))
        for name in _NAMES:
            delattr(module, name)
            logs: Tensor = getattr(hmm, f"log_{name}")
            setattr(module, name, PyroParam(logs.detach().exp(), constraints.simplex))
        return module.to(hmm.log_initial.device)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> SecondOrderHMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        tables = log(self.initial), log(self.second), log(self.transition)
        return SecondOrderHMM(*tables, self.emission(), lengths, observed)

    def emission_module(self) -> PyroModule:
        """The module of the emission."""
        return self.emission

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Expected counts of what is free: see :class:`pyrohmm.nn.closed_form.ChainMStep`."""
        second, table = expected.transitions[:, 0], expected.transitions[:, 1:]
        counts = {"initial": expected.initial, "second": second, "transition": table}
        return {name: value for name, value in counts.items() if is_free(self, name)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, those of the Dirichlet priors included."""
        values = {}
        for name, counts in statistics.items():
            if name in self._pyro_samples:
                counts = with_prior(counts, getattr(self, f"{name}_concentration"))
            values[name] = row_mode(counts)
        return values, []


_NAMES = "initial", "second", "transition"


def _rows(module: TabularSecondOrderHMM, name: str) -> TorchDistribution:
    """Prior of the rows of probabilities ``name``, all as one event."""
    concentration: Tensor = getattr(module, f"{name}_concentration")
    return Dirichlet(concentration).to_event(concentration.dim() - 1)
