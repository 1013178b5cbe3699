"""``TabularSecondOrderHMM``: each state depends on the two before it."""

from __future__ import annotations

from torch import Tensor

from .._checks import check_size
from ..distributions.structured_hmm import SecondOrderHMM
from ..ops.log_space import log
from .chain_tables import ChainTables
from .family import EmissionFamily, build_emission


class TabularSecondOrderHMM(ChainTables):
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

    family = SecondOrderHMM

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
        self.add_rows("initial", initial_concentration, (num_states,))
        self.add_rows("second", second_concentration, (num_states,) * 2)
        self.add_rows("transition", transition_concentration, (num_states,) * 3)
        self.emission = build_emission(emission, num_states)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> SecondOrderHMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        tables = log(self.initial), log(self.second), log(self.transition)
        return SecondOrderHMM(*tables, self.emission(), lengths, observed)
