"""Modules whose parameters are the probabilities of a chain, with Dirichlet priors on every row.

Tabular HMMs, and the sticky HDP-HMM, whose rows share their weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
from pyro.distributions import Dirichlet, Gamma
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_booleans, check_kind, check_shape, check_size
from ..chains.base import ExpectedCounts
from ..chains.blocks import BlockChain
from ..chains.markov import MarkovChain
from ..distributions.hmm import HMM
from ..distributions.sparse import SparseDirichlet
from ..distributions.structured_hmm import SecondOrderHMM
from ..ops.log_space import log
from ..ops.markov import stationary
from .base import HMMModule
from .closed_form import Family, Maximum, Statistics, row_mode, sample_rows, with_prior, with_priors
from .emissions import from_distribution
from .family import EmissionFamily, Number, build_emission, positive

MODULES: dict[type[HMM], type[ChainTables]] = {}  # by the class of HMM that they build


class ChainTables(HMMModule, Family):
    """A module whose parameters are rows of probabilities, each with a Dirichlet prior.

    The site ``name`` stands for the parameter ``log_name`` of the chain; EM maximises it by
    normalised counts. A subclass names the class of HMM that it builds, as in
    ``class TabularHMM(ChainTables, builds=HMM)``, and calls :meth:`add_rows` for each table.
    """

    builds: ClassVar[type[HMM]]
    emission: PyroModule
    num_states: Any

    def __init_subclass__(cls, builds: type[HMM] | None = None) -> None:
        super().__init_subclass__()
        if builds is not None:
            cls.builds, MODULES[builds] = builds, cls

    def __init__(self, num_states: int, emission: EmissionFamily) -> None:
        super().__init__()
        check_size("num_states", num_states)
        self.num_states = int(num_states)
        self.emission = build_emission(emission, num_states)

    def add_rows(
        self,
        name: str,
        concentration: Number,
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
            check_booleans(f"{name}_allowed", allowed)
            check_shape(f"{name}_allowed", allowed, shape, meaning)
            if not bool(allowed.any(-1).all()):
                text = f"{name}_allowed must leave at least one state to every row"
                raise ValueError(f"{text}. Set a True in each row.")
        self.register_buffer(f"{name}_allowed", allowed)
        self.supports = self.supports | {name: constraints.simplex}  # type: ignore[misc]
        self.add_parameters(**{name: shape})

    def prior(self, name: str) -> Any:
        """Dirichlet prior of the rows of a table; of other parameters that of their method."""
        if f"{name}_allowed" not in self._buffers:
            return super().prior(name)
        concentration, allowed = getattr(self, prior_name(name)), getattr(self, f"{name}_allowed")
        if allowed is None:
            return Dirichlet(concentration)
        return SparseDirichlet(concentration, allowed)

    def tables(self) -> dict[str, Any]:
        """Logarithms of the tables, by the names of the chain's parameters."""
        return {f"log_{name}": log(getattr(self, name)) for name in self.supports}

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        tables = self.tables()
        return self.builds(**tables, emission=self.emission(), lengths=lengths, observed=observed)

    @classmethod
    def from_hmm(cls, hmm: Any) -> Any:
        """Module initialised at the values of ``hmm``, parameters without priors.

        The parameters are copies; zeros stay zero under gradient steps.

        Raises:
            TypeError: If ``hmm`` is not of the kind that the module builds.
            ValueError: If parameters of ``hmm`` have a dimension of steps.
        """
        check_kind("hmm", hmm, cls.builds, f"a {cls.builds.__name__}")
        if hmm.emission_per_step:
            text = f"hmm has parameters per step, and a {cls.__name__} has not"
            raise ValueError(f"{text}. Choose one step.")
        module = cls._like(hmm, lambda _: from_distribution(hmm.emission))
        module._take_values(hmm)
        return module.to(hmm.log_initial.device)

    @classmethod
    def _like(cls, hmm: Any, emission: Any) -> ChainTables:
        """Module with as many states as ``hmm``."""
        return cls(hmm.num_states, emission)

    def _take_values(self, hmm: HMM) -> None:
        """Replace the tables by parameters without priors, with the values of ``hmm``."""
        for name, logs in hmm.chain.parameters.items():
            site = name.removeprefix("log_")
            if site != name and site in self._pyro_samples:
                self.set_points(**{site: logs.exp()})

    def emission_module(self) -> PyroModule:
        """Module that builds the emission distribution."""
        return self.emission

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Sufficient statistics: expected counts of the tables."""
        counts = expected.counts
        return {n: counts[n if n in counts else f"log_{n}"] for n in self.supports}

    def m_step(self, statistics: Statistics) -> Maximum:
        """M-step: normalised counts, pseudo-counts of the Dirichlet priors included."""
        return {name: row_mode(self._counts(name, statistics[name])) for name in statistics}, []

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample rows of probabilities from their Dirichlet posteriors."""
        samples = {}
        for name in filter(self._pyro_samples.__contains__, statistics):  # in one order
            total = statistics[name] + getattr(self, prior_name(name))
            allowed = getattr(self, f"{name}_allowed")
            samples[name] = sample_rows(total if allowed is None else total * allowed)
        return samples

    def _counts(self, name: str, counts: Tensor) -> Tensor:
        """Counts plus the pseudo-counts of the Dirichlet prior, if any."""
        if not self.has_prior(name):
            return counts
        prior, allowed = getattr(self, prior_name(name)), getattr(self, f"{name}_allowed")
        if allowed is not None:  # ones say nothing where nothing is allowed
            prior, counts = prior.masked_fill(~allowed, 1.0), counts.masked_fill(~allowed, 0.0)
        return with_prior(counts, prior)


@cache
def prior_name(name: str) -> str:
    """Name of the buffer of concentrations: ``initial_concentration_0`` of ``initial_0``."""
    kind, _, number = name.partition("_")
    return f"{kind}_concentration{f'_{number}' if number else ''}"


def module_of(hmm: HMM) -> HMMModule:
    """Tabular module of the kind of ``hmm``, with its values as parameters without priors.

    Raises:
        TypeError: If its chain is of another kind, which a Markov chain would not be equal to.
    """
    kind, chain = MODULES.get(type(hmm), TabularHMM), hmm.chain
    if kind is TabularHMM and type(chain) not in (MarkovChain, BlockChain):
        raise TypeError(f"no module has the parameters of a {type(chain).__name__}: write one "
                        "whose forward returns HMM.of(chain, ...).")  # fmt: skip
    module: HMMModule = kind.from_hmm(hmm)
    return module


class TabularHMM(ChainTables, builds=HMM):
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
        priors: False for maximum likelihood: see :func:`fit_em`.

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
        initial_concentration: Number = 1.0,
        transition_concentration: Number = 1.0,
        *,
        initial_allowed: Tensor | None = None,
        transition_allowed: Tensor | None = None,
        priors: bool = True,
    ) -> None:
        super().__init__(num_states, emission)
        self.add_rows("initial", initial_concentration, (num_states,), initial_allowed)
        self.add_rows("transition", transition_concentration, (num_states,) * 2, transition_allowed)
        with_priors(self, priors)

    def _take_values(self, hmm: HMM) -> None:
        hmm.check_constant(type(self).__name__)
        super()._take_values(hmm.expanded())

    def transition_counts(self, statistics: Statistics) -> Tensor | None:
        """Transition counts ``(R, K, K)`` plus pseudo-counts of the prior."""
        return self._counts("transition", statistics["transition"])


class TabularSecondOrderHMM(ChainTables, builds=SecondOrderHMM):
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
        priors: False for maximum likelihood: see :func:`fit_em`.

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
        initial_concentration: Number = 1.0,
        second_concentration: Number = 1.0,
        transition_concentration: Number = 1.0,
        *,
        priors: bool = True,
    ) -> None:
        super().__init__(num_states, emission)
        self.add_rows("initial", initial_concentration, (num_states,))
        self.add_rows("second", second_concentration, (num_states,) * 2)
        self.add_rows("transition", transition_concentration, (num_states,) * 3)
        with_priors(self, priors)


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
        priors: False for maximum likelihood: see :func:`fit_em`.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> hmm = StationaryHMM(3, poisson())(torch.tensor([5]))  # a sample from the prior
        >>> torch.allclose(hmm.log_initial.exp(), hmm.stationary())
        True
    """

    # no closed form: see ChainMStep and ConjugateSampler
    statistics = m_step = sample_parameters = None  # type: ignore[assignment]

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        transition_concentration: Number = 1.0,
        *,
        transition_allowed: Tensor | None = None,
        priors: bool = True,
    ) -> None:
        super().__init__(num_states, emission)
        self.add_rows("transition", transition_concentration, (num_states,) * 2, transition_allowed)
        with_priors(self, priors)

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
    check_size("jump", 0 if jump is None else jump, 0)
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


# As many states as the data ask for ---------------------------------------------------------------

LEAST = 1e-8  # concentration, below which nothing changes but what numbers can say


class StickyHDPHMM(ChainTables):
    r"""Sticky HDP-HMM of at most K states, with weights of the states that all rows share.

    .. math:: \beta \sim \mathrm{Dir}(\gamma / K, \dots, \gamma / K), \quad
              \pi \sim \mathrm{Dir}(\alpha \beta), \quad
              A_i \sim \mathrm{Dir}(\alpha \beta + \kappa e_i)

    The sticky hierarchical Dirichlet process in its weak-limit truncation (Fox, Sudderth, Jordan
    and Willsky, 2011, A sticky HDP-HMM with application to speaker diarization). States with a
    small :math:`\beta_k` are entered from nowhere: take K well above the number of states that
    are expected, and count those that the posterior visits.

    For :func:`fit_gibbs`; for :func:`fit_svi` and NUTS, by :class:`MarginalModel`. The density is
    infinite where a state has a small weight and is never entered, so that ``fit_em`` and
    ``fit_map``, which look for a maximum, refuse it.

    Sites: ``weights`` ``(K,)``, ``initial`` ``(K,)``, ``transition`` ``(K, K)``, those of
    ``emission``, and ``gamma``, ``alpha`` and ``kappa`` where they have priors.

    Args:
        num_states: K, the truncation.
        emission: An emission family: see :class:`TabularHMM`.
        gamma: Concentration of the weights; about as many states are used as it is large, times
            the logarithm of the data. A number, or two: shape and rate of a Gamma prior.
        alpha: How alike the rows are to the weights; a number, or two as of ``gamma``.
        kappa: What a state has beside to stay; a number, or two as of ``gamma``. Zero is the HDP
            that is not sticky.

    Raises:
        ValueError: If ``num_states`` is less than one, or a concentration is not positive.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = StickyHDPHMM(8, normal(0), gamma=2.0, alpha=(2.0, 0.5), kappa=10.0)
        >>> hmm = module(torch.tensor([100]))  # a sample from the prior
        >>> bool((hmm.log_transition.exp().diagonal() > 0.3).all())
        True
    """

    builds = HMM
    supports: ClassVar = {"initial": constraints.simplex, "transition": constraints.simplex}
    overcomplete = "weights", "gamma", "alpha", "kappa"  # of the prior: the HMM has its rows

    def __init__(
        self,
        num_states: int,
        emission: EmissionFamily,
        gamma: float | tuple[float, float] = 1.0,
        alpha: float | tuple[float, float] = 1.0,
        kappa: float | tuple[float, float] = 10.0,
    ) -> None:
        super().__init__(num_states, emission)
        dtype = torch.get_default_dtype()
        for name, value in (("gamma", gamma), ("alpha", alpha), ("kappa", kappa)):
            if isinstance(value, tuple):
                if len(value) != 2 or min(value) <= 0:
                    raise ValueError(f"{name} must be positive, or shape and rate; got {value}.")
                self.register_buffer(f"{name}_prior", torch.tensor(value).to(dtype))
                self.add_parameters(**{name: ()})
            else:
                if not 0 <= value < torch.inf or (value == 0 and name != "kappa"):
                    text = f"{name} must be positive and finite; got {value}"
                    raise ValueError(f"{text}. To learn it, give shape and rate of its prior.")
                self.register_buffer(name, torch.tensor(value).to(dtype))
        row = (num_states,)
        self.add_parameters(weights=row, initial=row, transition=2 * row)

    def prior(self, name: str) -> Any:
        """Gamma prior of a concentration; of rows that of their method."""
        prior = getattr(self, f"{name}_prior")
        return Gamma(*prior) if isinstance(prior, Tensor) else prior()

    def weights_prior(self) -> TorchDistribution:
        """Dirichlet prior of the state weights, which all rows share."""
        gamma = self.gamma.unsqueeze(-1)
        return _table((gamma / self.num_states).expand(*gamma.shape[:-1], self.num_states), 1)

    def initial_prior(self) -> TorchDistribution:
        """Prior of the initial probabilities given the weights, Dir(alpha * weights)."""
        return _table(self.alpha.unsqueeze(-1) * self.weights, 1)

    def transition_prior(self) -> TorchDistribution:
        """Prior of the transition rows given the weights, Dir(alpha * weights + kappa * I)."""
        weights = self.alpha.unsqueeze(-1) * self.weights
        stay = torch.eye(self.num_states).to(weights)
        return _table(weights.unsqueeze(-2) + self.kappa[..., None, None] * stay, 2)

    def statistics(self, expected: ExpectedCounts) -> Statistics:
        """Sufficient statistics: expected counts of the rows that have priors."""
        counts = super().statistics(expected)
        return {name: value for name, value in counts.items() if self.has_prior(name)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Raise ValueError: the density has no maximum."""
        raise ValueError("a StickyHDPHMM has no most probable value, which EM looks for. Use "
                         "fit_gibbs, fit_svi, or NUTS of MarginalModel(module).")  # fmt: skip

    def sample_parameters(self, statistics: Statistics, current: Statistics) -> Statistics:
        """Sample weights given table counts, then rows given weights (Fox et al., 2011)."""
        known: Any = self._buffers | current
        wide = {name: known[name].double() for name in self.overcomplete}
        least = torch.finfo(known["weights"].dtype).tiny  # what is smaller counts as that

        def strength(name: str) -> Tensor:
            return self.at(wide).prior(name).concentration

        samples = {}
        if self.has_prior("weights"):
            tables = {name: _tables(count, strength(name)) for name, count in statistics.items()}
            counts = tables.get("initial", torch.zeros_like(wide["weights"]))
            if "transition" in tables:
                entered = tables["transition"]
                pairs = entered, strength("transition")
                own, stays = (part.diagonal(dim1=-2, dim2=-1) for part in pairs)
                share = wide["kappa"].unsqueeze(-1) / stays  # of the tables that staying opens
                counts = counts + entered.sum(-2) - torch.binomial(own, share + 0 * own)
            wide["weights"] = samples["weights"] = sample_rows(strength("weights") + counts)
        for name, count in statistics.items():
            samples[name] = sample_rows(strength(name) + count).clamp(min=least)
        return samples


def _tables(counts: Tensor, strength: Tensor) -> Tensor:
    """Sample how many tables of a Chinese restaurant process ``counts`` customers occupy."""
    found, strength = torch.zeros_like(counts), strength.expand_as(counts).unsqueeze(-1)
    for start in range(0, int(counts.max()), 256):
        seated = torch.arange(start, start + 256).to(counts)
        opens = torch.rand_like(strength + seated) * (strength + seated) < strength
        found += (opens & (seated < counts.unsqueeze(-1))).sum(-1)
    return found


class SharedRows(SparseDirichlet):
    """Dirichlet distribution of the rows of a :class:`StickyHDPHMM`, which has no mode."""


def _table(concentration: Tensor, dims: int) -> SharedRows:
    """Dirichlet distribution over rows, with concentrations clamped from below."""
    concentration = concentration.clamp(min=LEAST)
    allowed = torch.ones(concentration.shape[-dims:], dtype=torch.bool, device=concentration.device)
    return SharedRows(concentration, allowed)
