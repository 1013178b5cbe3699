"""``TabularHMM``: the probabilities themselves are the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import check_size
from ..distributions.hmm import HMM
from ..ops.log_space import log
from ..ops.stationary import stationary
from .chain_tables import ChainTables
from .closed_form import Statistics
from .family import EmissionFamily, build_emission


class TabularHMM(ChainTables):
    r"""HMM whose parameters are its probabilities, with Dirichlet priors on every row.

    .. math:: \pi \sim \mathrm{Dir}(c_0), \quad A_i \sim \mathrm{Dir}(c_i)

    With the default concentrations of one the priors are flat, and the most probable parameters
    are those of maximum likelihood. A concentration above one keeps every probability away from
    zero; below one the density has no maximum, and MAP runs away (use SVI or sampling there).

    Sites: ``initial`` ``(K,)``, ``transition`` ``(K, K)``, and those of ``emission``.

    Args:
        num_states: K.
        emission: An emission family, such as :func:`categorical` or :func:`normal`: called with K,
            it returns a ``PyroModule`` that returns a distribution batched over K states.
        initial_concentration: Of the prior of the first state; a number or ``(K,)``.
        transition_concentration: Of the priors of the rows; a number, ``(K,)`` or ``(K, K)``. A
            large diagonal makes a sticky chain: see :func:`sticky`.
        initial_allowed: ``(K,)`` booleans, in which states a sequence may begin; all by default.
        transition_allowed: ``(K, K)`` booleans, which transitions are possible; all by default.
            The others are exactly zero: see :func:`left_to_right`, :func:`banded`.

    Raises:
        ValueError: If ``num_states`` is less than one, or a concentration is not positive or has
            the wrong shape.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = TabularHMM(2, categorical(6))
        >>> hmm = module(torch.tensor([3, 1]))  # a sample from the prior
        >>> hmm.log_transition.shape, hmm.emission.probs.shape
        (torch.Size([2, 2]), torch.Size([2, 6]))
    """

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        initial_concentration: float | Tensor = 1.0,
        transition_concentration: float | Tensor = 1.0,
        *,
        initial_allowed: Tensor | None = None,
        transition_allowed: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states = int(num_states)
        self.add_rows("initial", initial_concentration, (num_states,), initial_allowed)
        square = num_states, num_states
        self.add_rows("transition", transition_concentration, square, transition_allowed)
        self.emission = build_emission(emission, num_states)

    def _take_values(self, hmm: HMM) -> None:
        hmm.check_constant(type(self).__name__)
        super()._take_values(hmm.expanded())

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        return HMM(log(self.initial), log(self.transition), self.emission(), lengths, observed)

    def transition_counts(self, statistics: Statistics) -> Tensor | None:
        """Counts ``(R, K, K)``, pseudo-counts of the prior included; None if it is frozen."""
        counts = statistics.get("transition")
        return None if counts is None else self._counts("transition", counts)


class StationaryHMM(ChainTables):
    r"""HMM whose first state has the stationary distribution of its chain, :math:`\pi = \pi A`.

    For sequences that are cut from a process which has gone on for long, the default of R's
    packages (Zucchini, MacDonald and Langrock, 2016). It has K - 1 parameters fewer than a
    :class:`TabularHMM`. EM maximises transitions by gradient steps, the emission in closed form.

    Sites: ``transition`` ``(K, K)``, and those of ``emission``.

    Args:
        num_states: K.
        emission: An emission family.
        transition_concentration: As of :class:`TabularHMM`.
        transition_allowed: ``(K, K)`` booleans, which transitions are possible; all by default.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> hmm = StationaryHMM(3, poisson())(torch.tensor([5]))  # a sample from the prior
        >>> torch.allclose(hmm.log_initial.exp(), hmm.stationary())
        True
    """

    statistics = m_step = None  # type: ignore[assignment]  # no closed form: see ChainMStep

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        transition_concentration: float | Tensor = 1.0,
        *,
        transition_allowed: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states = int(num_states)
        square = num_states, num_states
        self.add_rows("transition", transition_concentration, square, transition_allowed)
        self.emission = build_emission(emission, num_states)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        transition = log(self.transition)
        return HMM(log(stationary(transition)), transition, self.emission(), lengths, observed)


def sticky(num_states: int, stay: float, leave: float = 1.0) -> Tensor:
    """Concentrations ``(K, K)`` of a sticky chain: ``stay`` on the diagonal, ``leave`` elsewhere.

    Example:
        >>> sticky(2, 10.0)
        tensor([[10.,  1.],
                [ 1., 10.]])
    """
    check_size("num_states", num_states)
    return torch.full((num_states, num_states), leave).fill_diagonal_(stay)


def left_to_right(num_states: int, jump: int | None = None) -> Tensor:
    """Transitions ``(K, K)`` of a left-to-right chain: to a state itself or up to ``jump`` ahead.

    Example:
        >>> left_to_right(3, jump=1).int()
        tensor([[1, 1, 0],
                [0, 1, 1],
                [0, 0, 1]], dtype=torch.int32)
    """
    check_size("num_states", num_states)
    if jump is not None:
        check_size("jump", jump, 0)
    ahead = torch.ones(num_states, num_states).triu()
    return (ahead if jump is None else ahead.tril(jump)).bool()


def banded(num_states: int, width: int = 1) -> Tensor:
    """Transitions ``(K, K)`` between states whose numbers differ by at most ``width``.

    Example:
        >>> banded(3).int()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    check_size("num_states", num_states)
    check_size("width", width, 0)
    return torch.ones(num_states, num_states).triu(-width).tril(width).bool()
