"""``TabularHMM``: the probabilities themselves are the parameters."""

from __future__ import annotations

from functools import partial

import torch
from pyro.distributions import Dirichlet
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_booleans, check_shape, check_size
from ..distributions.hmm import HMM
from ..distributions.sparse_dirichlet import SparseDirichlet
from ..ops.log_space import log
from ..ops.recursions import ExpectedCounts
from . import emissions
from .base import HMMModule
from .closed_form import Maximum, Statistics, is_free, row_mode, with_prior
from .family import EmissionFamily, build_emission, positive


class TabularHMM(HMMModule):
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
        self.register_buffer(
            "initial_concentration",
            positive("initial_concentration", initial_concentration, (num_states,)),
        )
        self.register_buffer(
            "transition_concentration",
            positive(
                "transition_concentration", transition_concentration, (num_states, num_states)
            ),
        )
        if initial_allowed is not None:
            check_allowed("initial_allowed", initial_allowed, (num_states,), "(K,)")
        if transition_allowed is not None:
            shape = (num_states, num_states)
            check_allowed("transition_allowed", transition_allowed, shape, "(K, K)")
        self.register_buffer("initial_allowed", initial_allowed)
        self.register_buffer("transition_allowed", transition_allowed)
        self.initial = PyroSample(partial(rows_prior, name="initial"))
        self.transition = PyroSample(partial(rows_prior, name="transition"))
        self.emission = build_emission(emission, num_states)

    @classmethod
    def from_hmm(cls, hmm: HMM) -> TabularHMM:
        """A module with the values of ``hmm`` as parameters: points, without priors.

        The parameters are copies; zeros stay zero under gradient steps.

        Raises:
            ValueError: If parameters of ``hmm`` have a dimension of steps.
        """
        hmm.check_markov("TabularHMM")
        if hmm.transition_per_step or hmm.emission_per_step:
            raise ValueError(
                "hmm has parameters per step; a TabularHMM has one matrix for all steps."
            )
        module = cls(hmm.num_states, lambda _: emissions.from_distribution(hmm.emission))
        for name, logs in (("initial", hmm.log_initial), ("transition", hmm.log_transition)):
            delattr(module, name)
            setattr(module, name, PyroParam(logs.detach().exp(), constraints.simplex))
        return module.to(hmm.log_initial.device)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        return HMM(log(self.initial), log(self.transition), self.emission(), lengths, observed)

    def emission_module(self) -> PyroModule:
        """The module of the emission."""
        return self.emission

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Expected counts of what is free: see :class:`ChainMStep`."""
        counts = {"initial": expected.initial, "transition": expected.transitions.sum(1)}
        return {name: value for name, value in counts.items() if is_free(self, name)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, those of the Dirichlet priors included."""
        return {name: row_mode(self._counts(name, statistics[name])) for name in statistics}, []

    def transition_counts(self, statistics: Statistics) -> Tensor | None:
        """Counts ``(R, K, K)``, pseudo-counts of the prior included; None if it is frozen."""
        counts = statistics.get("transition")
        return None if counts is None else self._counts("transition", counts)

    def _counts(self, name: str, counts: Tensor) -> Tensor:
        if name not in self._pyro_samples:
            return counts
        prior, allowed = getattr(self, f"{name}_concentration"), getattr(self, f"{name}_allowed")
        if allowed is not None:  # ones say nothing where nothing is allowed
            prior, counts = prior.masked_fill(~allowed, 1.0), counts.masked_fill(~allowed, 0.0)
        return with_prior(counts, prior)


def rows_prior(module: TabularHMM, name: str) -> Dirichlet | SparseDirichlet:
    """Prior of the rows of probabilities ``name``, all as one event."""
    concentration: Tensor = getattr(module, f"{name}_concentration")
    allowed: Tensor | None = getattr(module, f"{name}_allowed")
    if allowed is None:
        return Dirichlet(concentration).to_event(concentration.dim() - 1)
    return SparseDirichlet(concentration, allowed)


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


def check_allowed(name: str, allowed: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless booleans of ``shape`` allow something in each row."""
    check_booleans(name, allowed)
    check_shape(name, allowed, shape, meaning)
    if not bool(allowed.any(-1).all()):
        raise ValueError(f"{name} must leave at least one state to every row.")
