"""Emission families of symbols, of zeros and ones, and of counts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pyro.distributions import Bernoulli, Beta, Categorical, Dirichlet, Gamma, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch import distributions as torch_dist
from torch.distributions import constraints

from ..distributions.autoregressive import AutoregressiveCategorical
from ..ops.log_space import log
from ..ops.products import add_rows
from .closed_form import Maximum, Statistics, check_mode, row_mode, sample_rows
from .family import Components, Emission, Number, family, positive


class _Rows(Emission):
    """Base of families of rows of probabilities, whose statistics are counts by their names."""

    concentrations: Any  # () -> Dirichlet concentrations of the rows, by name

    def prior(self, name: str) -> Any:
        """Dirichlet prior of the rows."""
        return Dirichlet(self.concentrations()[name])

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: normalised counts, pseudo-counts of the priors included."""
        prior = self.concentrations()
        return {
            name: row_mode(counts, prior[name] if self.has_prior(name) else None)
            for name, counts in statistics.items()
        }, []

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample rows from their Dirichlet posteriors."""
        prior = {n: c for n, c in self.concentrations().items() if self.has_prior(n)}
        return {name: sample_rows(statistics[name] + more) for name, more in prior.items()}


MOST = 10**10  # numbers in the table of a state, which would take 80 GB


class CategoricalEmission(_Rows, emits=torch_dist.Categorical):
    """Emission family of symbols 0 to V - 1, each row with a Dirichlet prior.

    Site: ``emission.probs`` ``(K, V)``.

    Args:
        num_states: K.
        num_symbols: V.
        concentration: Of the prior; a number, ``(V,)`` or ``(K, V)``. One is flat.
    """

    supports: ClassVar = {"probs": constraints.simplex}

    def __init__(self, num_states: int, num_symbols: int, concentration: Number = 1.0) -> None:
        super().__init__()
        shape = (num_states, num_symbols)
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.add_parameters(probs=shape)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of a distribution of one symbol a step."""
        if distribution.event_shape:
            return None
        module = cls(*base.probs.shape)
        module.set_points(probs=base.probs)
        return module

    def concentrations(self) -> dict[str, Tensor]:
        """Dirichlet concentrations of the rows, by name."""
        return {"probs": self.concentration}

    def forward(self) -> TorchDistribution:
        """The distribution of a symbol, batched over states."""
        return Categorical(logits=log(self.probs))

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Expected number of times each state emits each symbol."""
        size, batch = self.concentration.size(-1), len(weights)
        rows = values.long() + size * torch.arange(batch, device=values.device).unsqueeze(-1)
        counts = add_rows(weights.flatten(0, 1), rows.flatten(), batch * size)
        return {"probs": counts.unflatten(0, (batch, size)).mT}


class BernoulliEmission(Components, emits=torch_dist.Bernoulli):
    """Emission family of independent zeros and ones, with Beta priors.

    Observations are floating point, so that single components may be missing (NaN).

    Site: ``emission.probs`` ``(K, D)``, or ``(K,)`` for scalars, the probabilities of a one.

    Args:
        num_states: K.
        dim: D, the number of independent components; with zero, observations are scalars.
        concentration1: Of the prior, for ones; a number, ``(D,)`` or ``(K, D)``. One is flat.
        concentration0: Of the prior, for zeros.
    """

    kind = Bernoulli
    supports: ClassVar = {"probs": constraints.unit_interval}

    def __init__(
        self, num_states: int, dim: int, concentration1: Number = 1.0, concentration0: Number = 1.0
    ) -> None:
        super().__init__(num_states, dim)
        self.register_buffer("ones", positive("concentration1", concentration1, self.shape))
        self.register_buffer("zeros", positive("concentration0", concentration0, self.shape))

    def probs_prior(self) -> TorchDistribution:
        """Beta prior of the probabilities."""
        return Beta(self.ones, self.zeros)

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: fraction of ones, pseudo-counts of the prior included."""
        ones = statistics["sums"]
        prior = torch.stack([self.ones, self.zeros], -1) if self.has_prior("probs") else None
        counts = torch.stack([ones, statistics["known"] - ones], -1)
        return {"probs": row_mode(counts, prior)[..., 0]}, []

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample probabilities from their Beta posteriors."""
        if not self.has_prior("probs"):
            return {}
        ones, zeros = statistics["sums"], statistics["known"] - statistics["sums"]
        counts = torch.stack([ones + self.ones, zeros + self.zeros], -1)
        return {"probs": sample_rows(counts)[..., 0]}


class PoissonEmission(Components, emits=torch_dist.Poisson):
    """Emission family of counts, Poisson in each state, each rate with a Gamma prior.

    Site: ``emission.rate``, ``(K, D)``, or ``(K,)`` for scalars.

    Args:
        num_states: K.
        dim: D, the number of independent components; with zero, observations are scalars.
        concentration: Of the prior; a number or ``(D,)``.
        rate: Of the prior, how many observations it is worth; a number or ``(D,)``. By default
            0.1, and less for large counts: a fit divides it by their root mean square, if that is
            above one.
    """

    supports: ClassVar = {"rate": constraints.nonnegative}
    kind, flat = Poisson, True
    of_moments: ClassVar = {"weight": lambda mean, _, sd: 0.1 / mean.hypot(sd).clamp(min=1.0)}

    def __init__(
        self, num_states: int, dim: int = 0, concentration: Number = 1.0, rate: Number | None = None
    ) -> None:
        super().__init__(num_states, dim)
        self.of_data = rate is None
        rate = 0.1 if rate is None else rate
        self.register_buffer("concentration", positive("concentration", concentration, self.shape))
        self.register_buffer("weight", positive("rate", rate, self.shape))

    def rate_prior(self) -> TorchDistribution:
        """Gamma prior of the rates."""
        return Gamma(self.concentration, self.weight)

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: mean counts, pseudo-counts of the prior included."""
        above, below = statistics["sums"], statistics["known"]
        if self.has_prior("rate"):
            check_mode("concentration", self.concentration)
            above, below = above + self.concentration - 1, below + self.weight
        return {"rate": above / below}, []

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample rates from their Gamma posteriors."""
        if not self.has_prior("rate"):
            return {}
        gammas = torch._standard_gamma(statistics["sums"] + self.concentration)
        return {"rate": gammas / (statistics["known"] + self.weight)}


class AutoregressiveCategoricalEmission(_Rows, emits=AutoregressiveCategorical):
    """Emission family of symbols 0 to V - 1 that depend on the last L symbols, with Dirichlet rows.

    Each state has a distribution for each of the ``V ** L`` contexts, numbered as in
    :class:`pyrohmm.distributions.AutoregressiveCategorical`. The first L symbols of a sequence have
    a distribution of their own in each state. A missing symbol may not be followed by observed
    ones: what is observed after a gap is another sequence.

    Sites: ``emission.initial`` ``(K, V)``, ``emission.probs`` ``(K, V**L, V)``.

    Args:
        num_states: K.
        num_symbols: V.
        lags: L, at least 1.
        concentration: Of the priors of all rows; a number, ``(V,)``, or for ``probs`` what
            broadcasts with ``(K, V**L, V)``; that of ``initial`` is its mean over contexts.

    Raises:
        TypeError: If ``num_symbols`` or ``lags`` is not an int.
        ValueError: If an argument is out of range.

    Example:
        >>> data = Sequences.from_list([[0, 1, 0, 1, 0, 1, 1]])
        >>> fit = fit_em(TabularHMM(1, autoregressive_categorical(2)), data)
        >>> fit.parameters["module.emission.probs"]
        tensor([[[0.0000, 1.0000],
                 [0.6667, 0.3333]]])
    """

    in_time = True
    supports: ClassVar = {"initial": constraints.simplex, "probs": constraints.simplex}

    def __init__(
        self, num_states: int, num_symbols: int, lags: int = 1, concentration: Number = 1.0
    ) -> None:
        super().__init__()
        if num_symbols ** (lags + 1) > MOST:
            raise ValueError(
                f"lags must leave tables of at most {MOST:.0e} numbers a state, V ** (L + 1); got "
                f"{num_symbols} ** {lags + 1}. Use fewer lags."
            )
        shape = (num_states, num_symbols**lags, num_symbols)
        self.register_buffer("concentration", positive("concentration", concentration, shape))
        self.add_parameters(initial=(num_states, num_symbols), probs=shape)

    @classmethod
    def of(cls, distribution: Any, base: Any) -> Emission | None:
        """The module of the tables of a distribution without a history."""
        tables = base.tables.probs
        module = cls(len(tables), tables.size(-1), base.lags)
        module.set_points(initial=base.initial.probs, probs=tables)
        return module

    def concentrations(self) -> dict[str, Tensor]:
        """Dirichlet concentrations of the rows, by name."""
        return {"initial": self.concentration.mean(-2), "probs": self.concentration}

    def forward(self) -> TorchDistribution:
        """The distribution of a symbol given those before it, batched over states."""
        return AutoregressiveCategorical(
            Categorical(logits=log(self.initial)), Categorical(logits=log(self.probs))
        )

    def statistics(self, values: Tensor, weights: Tensor, current: Any) -> Statistics:
        """Expected number of times each state emits each symbol first, and after each context.

        Args:
            values: ``(M, L+1)``: see :meth:`Autoregressive.windows`.
            weights: ``(R, M, K)``.
            current: Not used, but for how contexts are numbered.
        """
        _, contexts, size = self.concentration.shape
        with torch.no_grad():
            whole: Any = self.forward() if current is None else current
        codes = whole.codes(values)
        counts = [add_rows(weight, codes, size + contexts * size).mT for weight in weights]
        first, rest = torch.stack(counts).split([size, contexts * size], -1)
        return {"initial": first, "probs": rest.unflatten(-1, (contexts, size))}


categorical = family("categorical", CategoricalEmission, num_symbols=1)
bernoulli = family("bernoulli", BernoulliEmission, dim=0)
poisson = family("poisson", PoissonEmission, dim=0)
autoregressive_categorical = family(
    "autoregressive_categorical", AutoregressiveCategoricalEmission, num_symbols=1, lags=1
)
