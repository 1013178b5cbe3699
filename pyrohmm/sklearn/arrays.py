"""Estimators whose parameters are arrays, under the names of hmmlearn; fitted by EM."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
from pyro.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from sklearn.cluster import KMeans
from sklearn.utils import check_random_state
from torch import Tensor, allclose, as_tensor, float64, ones_like
from torch.distributions import constraints

from .._checks import check_positive, check_shape, check_size
from ..data.sequences import Sequences
from ..distributions.hard_zeros import log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import log_prob_per_component
from ..infer.em import fit_em
from ..io.conversion import normals_of
from ..nn.base import freeze
from ..nn.closed_form import Maximum, Statistics, row_mode
from ..nn.covariances import CovarianceEmission
from ..nn.emissions import from_distribution
from ..nn.tabular import TabularHMM
from ..ops.log_space import log
from .estimators import ConvergenceMonitor, SequenceEstimator, evidence, symbols, whole_numbers

AT_ONCE = 16  # iterations of EM between two looks at their gains
CHAIN: dict[str, tuple[str, ...]] = {
    "s": ("startprob_", "initial"),
    "t": ("transmat_", "transition"),
}
COVARIANCE_TYPES = ("spherical", "diag", "full", "tied")


@dataclass(eq=False, repr=False)
class TabularEstimator(SequenceEstimator):
    """Estimator of an HMM whose parameters are arrays, set by hand or by ``fit`` (EM).

    Subclasses name the parameters of their emission by the letters of ``params`` and
    ``init_params``, and turn their arrays into a distribution and back.

    Args:
        n_components: K, the number of states.
        algorithm: How ``predict`` decodes: ``"viterbi"`` or ``"map"``.
        random_state: A seed or a ``numpy.random.RandomState``.
        n_iter: Largest number of iterations of EM.
        tol: Gain of an iteration, in nats, below which EM ends.
        verbose: Whether to show a progress bar.
        n_init: How many starts to fit from, of which the best fit is kept.
        params: What a fit changes, by letters: ``"s"`` startprob, ``"t"`` transmat.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.

    Attributes:
        monitor_: How the fit went.
        letters: For each letter the attribute, and what the module calls it.
    """

    letters: ClassVar[dict[str, tuple[str, ...]]] = CHAIN
    n_components: int = 1
    _: KW_ONLY
    algorithm: str = "viterbi"
    random_state: Any = None
    n_iter: int = 10
    tol: float = 1e-2
    verbose: bool = False
    n_init: int = 1
    params: str = "st"
    init_params: str = "st"

    # What an estimator defines
    _emission: ClassVar[Any]  # () -> the distribution of a row, batched over states, in float64
    _start: ClassVar[Any]  # (table, chosen, seed): set the arrays of the letters chosen for a fit

    def _values(self, table: np.ndarray) -> Tensor:
        return as_double(table)

    def _emission_module(self) -> Any:
        """Emission module at the arrays, its parameters without priors."""
        return from_distribution(self._emission())

    # Fitting

    def fit(self, X: Any, y: Any = None, lengths: Any = None) -> Self:
        """Maximum likelihood by EM.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays, one for each sequence.
            y: A target, with an entry for each row, is not read; any other is ``lengths``, as
                hmmlearn takes them here.
            lengths: ``(n_sequences,)`` integers; one sequence by default.

        Returns:
            The estimator.

        Raises:
            TypeError: If a prior is asked for.
            ValueError: If an option or ``lengths`` is out of range, or the data cannot be emitted.

        Warns:
            ConvergenceWarning: If the fit has degenerated: see ``monitor_.notes``.
            UserWarning: If arrays that were set by hand start anew, or there are fewer numbers than
                parameters.
        """
        self._check_options()
        table, sizes = self._table(X, lengths, y, reset=True)
        data = Sequences.from_concatenated(self._values(table), sizes)
        names = self._attributes()
        given = {n: getattr(self, n) for n in names.values() if hasattr(self, n)}
        last = self.__dict__.get("_found", {})  # of an earlier fit
        chosen = {name for letter, name in names.items() if letter in self.init_params}
        if anew := [n for n in given if n in chosen and given[n] is not last.get(n)]:
            text = f"{', '.join(anew)} had values, which init_params={self.init_params!r} "
            warnings.warn(f"{text}overwrites: leave out letters to start at them.", stacklevel=2)
        more = check_random_state(self.random_state).randint(2**31 - 1, size=self.n_init - 1)
        fits = []
        for seed in (self.random_state, *more.tolist()):
            self.__dict__.update(given)
            self._initialise(table, given, seed)
            zeros = {n: np.asarray(getattr(self, n)) == 0 for n in names.values()}
            reached = self._climb(data)
            found = {n: getattr(self, n) for n in (*names.values(), "monitor_")}
            fits.append((reached, found | {"_zeros": zeros}))
        self._found = max(fits, key=lambda fit: fit[0])[1]
        self.__dict__.update(self._found)
        if table.size < (count := self._num_parameters()):
            text = f"there are {count} free parameters and {table.size} numbers in X: the fit "
            warnings.warn(f"{text}degenerates. Take fewer states, or more data.", stacklevel=2)
        self.monitor_.warn()
        return self

    def _climb(self, data: Sequences) -> float:
        """Run EM until an iteration gains less than ``tol``; return the log-probability reached."""
        monitor = self.monitor_ = ConvergenceMonitor(self.tol, self.n_iter)
        if not self.n_iter or not set(self.params) & set(self._attributes()):
            return self._ask(data, evidence)[0]
        reached = -np.inf
        while not monitor.converged:
            climb = partial(fit_em, self._module(), data, tolerance=None, progress=self.verbose)
            fit = climb(num_iterations=min(self.n_iter - monitor.iter, AT_ONCE))
            small = (-fit.losses.diff() < self.tol).nonzero().flatten().tolist()
            if small and small[0] + 2 < len(fit.losses):
                fit = climb(num_iterations=small[0] + 1)
            reached = monitor.take(fit)
            self._take(fit.parameters)
            monitor.converged = bool(small) or monitor.iter >= self.n_iter
        return reached

    def _module(self) -> TabularHMM:
        """Module initialised at the arrays, its parameters without priors, or frozen."""
        emission = self._emission_module()
        module = TabularHMM(self.n_components, lambda _: emission)
        module.set_points(initial=as_double(self.startprob_), transition=as_double(self.transmat_))
        for letter, (_, *names) in self.letters.items():
            for name in names if letter not in self.params else ():
                if name in ("initial", "transition") or emission.is_free(name.split(".")[1]):
                    freeze(module, name)
        return module.double()

    def _initialise(self, table: np.ndarray, given: dict[str, Any], seed: Any) -> None:
        """Initialise the arrays with a letter in ``init_params``, and those not ``given``."""
        names = self._attributes().items()
        chosen = {letter for letter, n in names if letter in self.init_params or n not in given}
        random = check_random_state(seed)
        even = np.full(self.n_components, 1 / self.n_components)
        if "s" in chosen:
            self.startprob_ = random.dirichlet(even)
        if "t" in chosen:
            self.transmat_ = random.dirichlet(even, size=self.n_components)
        self._start(table, chosen, seed)

    def _check_options(self) -> None:
        """Raise unless options are in their ranges, and no prior is asked for."""
        check_size("n_components", self.n_components)
        check_size("n_init", self.n_init)
        check_size("n_iter", self.n_iter, 0)
        if priors := [n for n in vars(self) if n.endswith(("_prior", "_weight"))]:
            cure = "HMMEstimator(partial(TabularHMM, emission=normal(2, loc=0.0)))"
            raise TypeError(f"{priors[0]} cannot be set. Priors are those of a module: {cure}.")
        known = "".join(self._attributes())
        for option in ("params", "init_params"):
            chosen = getattr(self, option)
            if not isinstance(chosen, str) or set(chosen) - set(known):
                raise ValueError(f"{option} must be some of the letters {known!r}; got {chosen!r}.")

    # Arrays

    def _hmm(self, lengths: Tensor) -> HMM:
        self._check_options()
        states = self.n_components
        initial = self._rows("startprob_", (states,))
        transition = self._rows("transmat_", (states, states))
        return HMM(initial.log(), transition.log(), self._emission(), lengths)

    def _rows(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Copy an array of probabilities to a tensor; raise unless each row sums to one."""
        rows = as_double(getattr(self, name))
        check_shape(name, rows, shape, "of K states")
        total = rows.sum(-1)
        if not bool((rows >= 0).all()) or not allclose(total, ones_like(total)):
            text = f"{name} must hold probabilities that sum to one in each row, and does not"
            raise ValueError(f"{text}. Divide it by its sums.")
        return rows

    def _take(self, parameters: dict[str, Tensor]) -> None:
        """Copy the fitted parameters into the arrays."""
        for attribute, *names in self.letters.values():
            for name in names:
                if (value := parameters.get(f"module.{name}")) is not None:
                    array = value.detach().double().numpy().copy()
                    setattr(self, attribute, array.reshape(np.shape(getattr(self, attribute))))

    def _attributes(self) -> dict[str, str]:
        """Name of the attribute of each letter of ``params``."""
        return {letter: names[0] for letter, names in self.letters.items()}

    def _num_parameters(self) -> int:
        total = 0
        for letter, name in self._attributes().items():
            array = np.asarray(getattr(self, name))
            count, dim = array.size, array.shape[-1]
            if letter in "stew":  # probabilities; what a fit has found zero stays so
                zero = getattr(self, "_zeros", {}).get(name, False) & (array == 0)
                count -= array.size // dim + int(np.sum(zero))
            elif letter == "c" and vars(self)["covariance_type"] in ("full", "tied"):
                count = count // dim**2 * (dim * (dim + 1) // 2)
            total += count if letter in self.params else 0
        return total

    def __sklearn_is_fitted__(self) -> bool:
        """Whether all parameters have values, of a fit or set by hand."""
        return all(hasattr(self, name) for name in self._attributes().values())


class CountingEstimator(TabularEstimator):
    """Estimator of counts or symbols: rows of whole numbers of at least zero."""

    def __sklearn_tags__(self) -> Any:
        """Tags by which scikit-learn chooses its checks."""
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = tags.input_tags.categorical = True
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class CategoricalHMM(CountingEstimator):
    """HMM of symbols 0 to V - 1, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        n_features: V; by default that of ``emissionprob_`` if it is not started anew, else one
            more than the largest symbol of the fit.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"e"`` emissionprob.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.
        **options: Those of :class:`TabularEstimator`.

    Attributes:
        startprob_: ``(K,)``.
        transmat_: ``(K, K)``, row = from.
        emissionprob_: ``(K, V)``.
        monitor_: How the fit went.

    Example:
        >>> from pyrohmm.sklearn import CategoricalHMM
        >>> import numpy as np
        >>> X = np.array([0, 1] * 20)[:, None]
        >>> model = CategoricalHMM(n_components=2, n_iter=50, random_state=0).fit(X)
        >>> round(model.score(X), 3) + 0.0
        0.0
    """

    letters: ClassVar = {**CHAIN, "e": ("emissionprob_", "emission.probs")}
    n_features: int | None = None
    params: str = "ste"
    init_params: str = "ste"

    def _emission(self) -> TorchDistribution:
        shape = self.n_components, np.shape(self.emissionprob_)[-1]
        return Categorical(logits=self._rows("emissionprob_", shape).log())

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        if "e" in chosen:
            size = self.n_features or int(self._values(table).max()) + 1
            weights = check_random_state(seed).uniform(size=(self.n_components, size))
            self.emissionprob_ = weights / weights.sum(1, keepdims=True)

    def _values(self, table: np.ndarray) -> Tensor:
        return symbols(table)


@dataclass(eq=False, repr=False, kw_only=True)
class PoissonHMM(CountingEstimator):
    """HMM of vectors of independent counts, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"l"`` lambdas.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.
        **options: Those of :class:`TabularEstimator`.

    Attributes:
        startprob_: ``(K,)``.
        transmat_: ``(K, K)``, row = from.
        lambdas_: ``(K, D)``, the rates.
        monitor_: How the fit went.

    Example:
        >>> from pyrohmm.sklearn import PoissonHMM
        >>> import numpy as np
        >>> X = np.repeat([1, 9], 20)[:, None] + np.tile([0, 1], 20)[:, None]
        >>> model = PoissonHMM(n_components=2, n_iter=50, random_state=0).fit(X)
        >>> np.sort(model.lambdas_[:, 0]).round(1).tolist()
        [1.5, 9.5]
    """

    letters: ClassVar = {**CHAIN, "l": ("lambdas_", "emission.rate")}
    params: str = "stl"
    init_params: str = "stl"

    def _emission(self) -> TorchDistribution:
        return Poisson(as_double(self.lambdas_)).to_event(1)

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        if "l" in chosen:  # a gamma distribution with the mean and the variance of the data
            mean = max(table.mean(), 1e-3)
            scale = max(table.var(), 1e-3 * mean) / mean
            size = self.n_components, table.shape[1]
            self.lambdas_ = check_random_state(seed).gamma(mean / scale, scale, size)

    def _values(self, table: np.ndarray) -> Tensor:
        return whole_numbers(table).double()


class NormalEstimator(TabularEstimator):
    """Estimator with normal emissions: means ``(*L, D)``, and covariances of one of four types.

    L is the number of states, or of states and parts of their mixtures.
    """

    means_: np.ndarray
    covariance_type: str
    min_covar: float

    def _covars_shape(self, lead: tuple[int, ...], dim: int) -> tuple[int, ...]:
        shapes = {"spherical": lead, "diag": (*lead, dim), "full": (*lead, dim, dim)}
        return shapes.get(self.covariance_type, (*lead[:-1], dim, dim))

    def _normals(self, covars: Any) -> TorchDistribution:
        """Multivariate normals with the means and given covariances."""
        means, covars = as_double(self.means_), as_double(covars)
        shape = self._covars_shape(tuple(means.shape[:-1]), means.size(-1))
        check_shape("covars_", covars, shape, f"of type {self.covariance_type!r}")
        matrices = self.covariance_type in ("full", "tied")
        check_positive("covars_", covars.diagonal(dim1=-2, dim2=-1) if matrices else covars)
        return normals_of(means, covars, self.covariance_type)

    def _spread(self, table: np.ndarray, *lead: int) -> np.ndarray:
        """Sample covariance of all rows plus ``min_covar``, in the form of the covariance type."""
        matrix = np.cov(table.T, bias=len(table) == 1).reshape(table.shape[1], -1)
        matrix = matrix + self.min_covar * np.eye(len(matrix))
        forms = {"spherical": np.trace(matrix) / len(matrix), "diag": np.diag(matrix)}
        form = forms.get(self.covariance_type, matrix)
        return np.broadcast_to(form, self._covars_shape(lead, len(matrix))).copy()

    def _check_options(self) -> None:
        super()._check_options()
        if (kind := self.covariance_type) not in COVARIANCE_TYPES:
            raise ValueError(f"covariance_type must be one of {COVARIANCE_TYPES}; got {kind!r}.")


@dataclass(eq=False, repr=False)
class GaussianHMM(NormalEstimator):
    """HMM of normal vectors, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        covariance_type: ``"spherical"``, one variance for each state; ``"diag"``, one for each
            state and component; ``"full"``, a matrix for each state; ``"tied"``, one for all.
        min_covar: What is added to the variances at the start of a fit, as by hmmlearn, and no
            floor: those of a fit may be less, down to 1e-12 of those of the data.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"m"`` means and
            ``"c"`` covars.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.
        **options: Those of :class:`TabularEstimator`.

    Attributes:
        startprob_: ``(K,)``.
        transmat_: ``(K, K)``, row = from.
        means_: ``(K, D)``.
        covars_: ``(K, D, D)`` whatever the type. It is set as ``(K,)``, ``(K, D)``,
            ``(K, D, D)`` or ``(D, D)``.
        monitor_: How the fit went.

    Example:
        >>> from pyrohmm.sklearn import GaussianHMM
        >>> import numpy as np
        >>> X = np.r_[np.zeros((20, 1)), np.full((20, 1), 9.0)] + np.sin(np.arange(40))[:, None]
        >>> model = GaussianHMM(n_components=2, n_iter=20, random_state=0).fit(X)
        >>> np.bincount(model.predict(X)).tolist()
        [20, 20]
    """

    letters: ClassVar = {
        **CHAIN,
        "m": ("means_", "emission.loc"),
        "c": ("_covars_", "emission.variance", "emission.covariance"),
    }
    covariance_type: str = "diag"
    _: KW_ONLY
    min_covar: float = 1e-3
    params: str = "stmc"
    init_params: str = "stmc"

    @property
    def covars_(self) -> np.ndarray:
        """Covariance matrices ``(K, D, D)``."""
        states, dim = np.asarray(self.means_).shape
        covars = np.asarray(self._covars_)
        if self.covariance_type == "spherical":
            covars = covars.reshape(-1, 1).repeat(dim, 1)
        if self.covariance_type in ("spherical", "diag"):
            return covars[..., None] * np.eye(dim)
        return np.broadcast_to(covars, (states, dim, dim)).copy()

    @covars_.setter
    def covars_(self, covars: Any) -> None:
        """Set covariances in the shape of their type."""
        self._covars_ = np.array(covars, dtype=float)

    def _emission(self) -> TorchDistribution:
        covars = self._covars_
        if self.covariance_type == "spherical" and covars.shape[1:] == (1,):  # as in hmmlearn
            covars = covars[:, 0]
        return self._normals(covars)

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        if "m" in chosen:
            self.means_ = _cluster(table, self.n_components, seed)
        if "c" in chosen:
            self._covars_ = self._spread(table, self.n_components)


@dataclass(eq=False, repr=False)
class GMMHMM(NormalEstimator):
    """HMM of mixtures of normal vectors, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        n_mix: M, the number of parts of the mixture of each state.
        covariance_type: ``"diag"``, a variance for each part and component; ``"spherical"``, one
            for each part; ``"full"``, a matrix for each part; or ``"tied"``, one for each state.
        min_covar: What is added to the variances at the start of a fit, as by hmmlearn, and no
            floor: those of a fit may be less.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"m"`` means, ``"c"``
            covars and ``"w"`` weights.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.
        **options: Those of :class:`TabularEstimator`.

    Attributes:
        startprob_: ``(K,)``.
        transmat_: ``(K, K)``, row = from.
        weights_: ``(K, M)``.
        means_: ``(K, M, D)``.
        covars_: ``(K, M, D)``, or ``(K, M)`` if spherical, ``(K, M, D, D)`` if full and
            ``(K, D, D)`` if tied.
        monitor_: How the fit went.

    Example:
        >>> from pyrohmm.sklearn import GMMHMM
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(60, 2)) + 5.0 * (np.arange(60) % 3)[:, None]
        >>> GMMHMM(n_components=2, n_mix=2, random_state=0).fit(X).means_.shape
        (2, 2, 2)
    """

    letters: ClassVar = {
        **CHAIN,
        "m": ("means_", "emission.loc"),
        "c": ("covars_", "emission.variance", "emission.covariance"),
        "w": ("weights_", "emission.weights"),
    }
    n_mix: int = 1
    _: KW_ONLY
    covariance_type: str = "diag"
    min_covar: float = 1e-3
    params: str = "stmcw"
    init_params: str = "stmcw"

    def _emission(self) -> TorchDistribution:
        weights = Categorical(logits=self._rows("weights_", np.shape(self.means_)[:2]).log())
        return MixtureSameFamily(weights, self._normals(self.covars_))

    def _emission_module(self) -> Any:
        if self.covariance_type in ("spherical", "diag"):
            return super()._emission_module()
        return CovarianceMixture(self._emission(), self.covariance_type == "tied")

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        states, parts = self.n_components, self.n_mix
        if "m" in chosen:
            labels = KMeans(states, n_init=10, random_state=seed).fit_predict(table)
            groups = [table[labels == state] for state in range(states)]
            groups = [rows if len(rows) >= parts else table for rows in groups]
            self.means_ = np.stack([_cluster(rows, parts, seed) for rows in groups])
        if "c" in chosen:
            self.covars_ = self._spread(table, states, parts)
        if "w" in chosen:
            self.weights_ = np.full((states, parts), 1 / parts)

    def _check_options(self) -> None:
        super()._check_options()
        check_size("n_mix", self.n_mix)


class CovarianceMixture(CovarianceEmission):
    """Mixtures of C multivariate normals, whose components count as K · C states.

    Args:
        distribution: The values of the parameters.
        by_state: Whether the parts of a state share one matrix.
    """

    supports: ClassVar = {"weights": constraints.simplex, **CovarianceEmission.supports}

    def __init__(self, distribution: Any, by_state: bool) -> None:
        parts = distribution.component_distribution
        self.lead = tuple(parts.batch_shape)
        super().__init__(self.lead[0] * self.lead[1], parts.event_shape[0])
        self.by_state = by_state
        covariance = parts.covariance_matrix
        self.set_points(
            weights=distribution.mixture_distribution.probs,
            covariance=covariance[:, 0] if by_state else covariance.flatten(0, 1),
            loc=parts.loc.flatten(0, 1),
        )

    def forward(self) -> TorchDistribution:
        """Mixture distribution of a vector, batched over states."""
        loc, matrix = self.loc.unflatten(-2, self.lead), self.covariance
        matrix = matrix.unsqueeze(-3) if self.by_state else matrix.unflatten(-3, self.lead)
        weights = Categorical(logits=log(self.weights))
        return MixtureSameFamily(weights, MultivariateNormal(loc, matrix))

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Weighted moments of each mixture component, and its expected count."""
        mixture: Any = current
        logits = log_prob_per_component(mixture, values) + log_probs(mixture.mixture_distribution)
        joint = weights.double().unsqueeze(-1) * logits.softmax(-1)  # (R, M, K, C)
        return super().statistics(values, joint.flatten(2), None) | {"counts": joint.sum(1)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """Maximum-likelihood means, covariances and mixture weights."""
        values, notes = super().m_step(statistics)
        return values | {"weights": row_mode(statistics["counts"], None)}, notes

    def _pooled(self, sums: Tensor) -> Tensor:
        return sums.unflatten(1, self.lead).sum(2) if self.by_state else sums

    def _wide(self, covariance: Tensor) -> Tensor:
        return covariance.repeat_interleave(self.lead[1], -3) if self.by_state else covariance


def _cluster(table: np.ndarray, count: int, random_state: Any) -> np.ndarray:
    """K-means cluster centres, ``(count, D)``."""
    if len(table) < count:
        text = f"X must have a row for each of {count} clusters; got {len(table)}"
        raise ValueError(f"{text}. Take fewer n_components.")
    return KMeans(count, n_init=10, random_state=random_state).fit(table).cluster_centers_


def as_double(values: Any) -> Tensor:
    """Copy an array to a tensor in float64."""
    return as_tensor(np.array(values), dtype=float64)
