"""``ChainTables``: what modules share whose chain is made of tables of probabilities."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pyro.distributions import Dirichlet
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_booleans, check_shape
from ..chains.base import ExpectedCounts
from ..distributions.hmm import HMM
from ..distributions.sparse_dirichlet import SparseDirichlet
from . import emissions
from .base import HMMModule
from .closed_form import Family, Maximum, Statistics, row_mode, sample_rows, with_prior
from .family import positive


class ChainTables(HMMModule, Family):
    """A module whose parameters are rows of probabilities, each with a Dirichlet prior.

    The site ``name`` stands for the parameter ``log_name`` of the chain; EM maximises it by
    normalised counts. A subclass calls :meth:`add_rows` for each.
    """

    family: ClassVar[type[HMM]] = HMM  # what :meth:`from_hmm` takes
    emission: PyroModule

    def add_rows(
        self,
        name: str,
        concentration: float | Tensor,
        shape: tuple[int, ...],
        allowed: Tensor | None = None,
    ) -> None:
        """Add a table ``name`` of ``shape``, the last dimension of which sums to one.

        Args:
            name: Of the site.
            concentration: Of the Dirichlet prior; a number or what broadcasts to ``shape``.
            shape: Of the table.
            allowed: Booleans of ``shape``, which entries may be positive; all by default.
        """
        label = prior_name(name)
        self.register_buffer(label, positive(label, concentration, shape))
        if allowed is not None:
            meaning = "(K,)" if len(shape) == 1 else f"({', '.join('K' * len(shape))})"
            check_allowed(f"{name}_allowed", allowed, shape, meaning)
        self.register_buffer(f"{name}_allowed", allowed)
        self.set_priors(**{name: partial(rows_prior, name=name)})

    @classmethod
    def from_hmm(cls, hmm: Any) -> Any:
        """A module with the values of ``hmm`` as parameters: points, without priors.

        The parameters are copies; zeros stay zero under gradient steps.

        Raises:
            TypeError: If ``hmm`` is not of the kind that the module builds.
            ValueError: If parameters of ``hmm`` have a dimension of steps.
        """
        if not isinstance(hmm, cls.family):
            raise TypeError(
                f"hmm must be of class {cls.family.__name__}; got {type(hmm).__name__}."
            )
        if hmm.emission_per_step:
            raise ValueError(
                f"hmm has parameters per step; a {cls.__name__} has one set for all steps."
            )
        module = cls._like(hmm, lambda _: emissions.from_distribution(hmm.emission))
        module._take_values(hmm)
        return module.to(hmm.log_initial.device)

    @classmethod
    def _like(cls, hmm: Any, emission: Any) -> ChainTables:
        """A module of the sizes of ``hmm``."""
        return cls(hmm.num_states, emission)

    def _take_values(self, hmm: HMM) -> None:
        """Replace the tables by points with the values of ``hmm``."""
        for name, logs in hmm.chain.parameters.items():
            if (site := name.removeprefix("log_")) in self._pyro_samples:
                set_point(self, site, logs.detach().exp())

    def emission_module(self) -> PyroModule:
        """The module of the emission."""
        return self.emission

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Expected counts of what is free: see :class:`ChainMStep`."""
        counts = {name.removeprefix("log_"): value for name, value in expected.counts.items()}
        return {n: value for n, value in counts.items() if hasattr(self, n) and self.is_free(n)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Normalised counts, those of the Dirichlet priors included."""
        return {name: row_mode(self._counts(name, statistics[name])) for name in statistics}, []

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Rows of probabilities from their Dirichlet posteriors, those of the same name."""
        samples = {}
        for name in self._pyro_samples.keys() & statistics.keys():
            allowed, total = getattr(self, f"{name}_allowed"), getattr(self, prior_name(name))
            total = statistics[name] + total
            samples[name] = sample_rows(
                total if allowed is None else total.masked_fill(~allowed, 0.0)
            )
        return samples

    def _counts(self, name: str, counts: Tensor) -> Tensor:
        """Counts with the pseudo-counts of the prior."""
        if name not in self._pyro_samples:
            return counts
        prior, allowed = getattr(self, prior_name(name)), getattr(self, f"{name}_allowed")
        if allowed is not None:  # ones say nothing where nothing is allowed
            prior, counts = prior.masked_fill(~allowed, 1.0), counts.masked_fill(~allowed, 0.0)
        return with_prior(counts, prior)


def prior_name(name: str) -> str:
    """Name of the buffer of concentrations: ``initial_concentration_0`` of ``initial_0``."""
    kind, _, number = name.partition("_")
    return f"{kind}_concentration{f'_{number}' if number else ''}"


def rows_prior(module: ChainTables, name: str) -> Dirichlet | SparseDirichlet:
    """Prior of the rows of probabilities ``name``, all as one event."""
    concentration: Tensor = getattr(module, prior_name(name))
    allowed: Tensor | None = getattr(module, f"{name}_allowed")
    if allowed is None:
        return Dirichlet(concentration).to_event(concentration.dim() - 1)
    return SparseDirichlet(concentration, allowed)


def set_point(module: PyroModule, name: str, value: Tensor, support: Any = None) -> None:
    """Replace a parameter with a prior by a point; a row of probabilities unless told."""
    delattr(module, name)
    setattr(module, name, PyroParam(value, support or constraints.simplex))


def check_allowed(name: str, allowed: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless booleans of ``shape`` allow something in each row."""
    check_booleans(name, allowed)
    check_shape(name, allowed, shape, meaning)
    if not bool(allowed.any(-1).all()):
        raise ValueError(f"{name} must leave at least one state to every row.")
