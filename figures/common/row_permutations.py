r"""NUTS for transition matrices under a diversity prior, on both sides of a determinant of zero.

The density under a :class:`DiversityPrior` is zero where the rows are linearly dependent, and
Hamiltonian trajectories do not cross that set: chains of NUTS stay where the determinant has the
sign it began with, although the posterior may have mass on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.infer import NUTS
from torch import Tensor

Values = dict[str, Tensor]
MOST_ROWS = 4  # of which all 24 orders are summed


class RowPermutationNUTS(NUTS):
    r"""NUTS that crosses the set where the determinant of a matrix of probabilities is zero.

    Permuting the rows of A changes the sign of the determinant and not its size. Trajectories
    follow the sum of the densities of A in all orders of its rows, of which no side is special.
    After each, one of the orders is chosen by its density, so that the samples are those of the
    model itself: exact as those of NUTS, for any prior of the matrix and any data. A step takes K!
    evaluations of the model.

    Of more than four rows trajectories follow the density itself, and after each K swaps of two
    random rows, or of none, are proposed, each accepted by the ratio of the densities (Metropolis).
    The samples are those of the model as well, but where data tell the rows apart few swaps are
    accepted: compare the signs of several chains.

    Args:
        model: As for :class:`~pyro.infer.mcmc.NUTS`.
        site: Name of the site of the matrix, such as ``"module.transition"``; its value is
            ``(K, V)``, of at least two rows, each a distribution over all V columns.
        options: Other arguments of :class:`~pyro.infer.mcmc.NUTS`.

    Raises:
        ValueError: When sampling begins, if the model has no such site, or it has one row.
    """

    potential_fn: Any
    _energy: Callable[[Values], Tensor]

    def __init__(self, model: Callable[..., Any], site: str, **options: Any) -> None:
        super().__init__(model, **options)
        self.site = site

    def _initialize_model_properties(self, model_args: Any, model_kwargs: Any) -> None:
        super()._initialize_model_properties(model_args, model_kwargs)
        site = self._prototype_trace.nodes.get(self.site, {})
        space = getattr(getattr(site.get("fn"), "support", None), "base_constraint", None)
        shape: tuple[int, ...] = site["value"].shape if space is constraints.simplex else ()
        if len(shape) != 2 or shape[0] < 2:
            raise ValueError(
                "site must hold two or more rows of probabilities, (K, V), without forbidden "
                f"entries; got {self.site!r} of {', '.join(self.initial_params)}."
            )
        rows = shape[0]
        self._rows, self._energy = rows, self.potential_fn
        if rows <= MOST_ROWS:
            self._orders = [list(order) for order in permutations(range(rows))]
            self.potential_fn = self._joint_energy

    def _permuted(self, values: Values) -> list[Values]:
        rows = values[self.site]
        return [values | {self.site: rows[order]} for order in self._orders]

    def _energies(self, values: Values) -> Tensor:
        """Minus the log-densities of unconstrained values in all orders of the rows, ``(K!,)``."""
        return torch.stack([self._energy(each) for each in self._permuted(values)])

    def _joint_energy(self, values: Values) -> Tensor:
        """Minus the log of the sum of the densities of all orders."""
        return -self._energies(values).neg().logsumexp(0)

    def sample(self, params: Values) -> Values:
        """The next sample; the chain itself goes on from where its trajectory ended."""
        values = super().sample(params)
        if self._rows > MOST_ROWS:
            return self._swapped(values)
        with torch.no_grad():
            shares = self._energies(values).neg().softmax(0)
        return self._permuted(values)[int(shares.multinomial(1))]

    @torch.no_grad()
    def _swapped(self, values: Values) -> Values:
        """Metropolis steps that swap two rows; the chain goes on from where they end."""
        energy = self._energy(values)
        for _ in range(self._rows):
            order = torch.arange(self._rows)
            pair = torch.randint(self._rows, (2,))  # maybe twice the same: K swaps keep a sign
            order[pair] = pair.flip(0)
            other = values | {self.site: values[self.site][order]}
            proposed = self._energy(other)
            if torch.rand(()) < (energy - proposed).exp():
                values, energy = other, proposed
        self.clear_cache()
        return values
