"""Estimators of normal vectors, their mixtures, symbols and counts."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pyro.distributions import (
    Categorical,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Poisson,
)
from pyro.distributions.torch_distribution import TorchDistribution
from sklearn.cluster import KMeans
from sklearn.utils import check_random_state
from torch import Tensor

from .._checks import check_size
from ..nn.emissions import CategoricalEmission, from_distribution
from .tabular import TabularEstimator, to_array, to_tensor

COVARIANCE_TYPES = ("spherical", "diag", "full", "tied")


class GaussianHMM(TabularEstimator):
    """HMM of normal vectors, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        covariance_type: ``"spherical"``, one variance for each state; ``"diag"``, one for each
            state and component; ``"full"``, a matrix for each state; ``"tied"``, one for all.
        min_covar: What is added to the variances at the start of a fit.
        startprob_prior: Dirichlet concentration of the first state; a number or ``(K,)``.
        transmat_prior: Dirichlet concentrations of the transitions; a number or ``(K, K)``.
        algorithm: How ``predict`` decodes: ``"viterbi"`` or ``"map"``.
        random_state: A seed or a ``numpy.random.RandomState``.
        n_iter: Largest number of iterations of EM.
        tol: Gain of an iteration, in nats, below which EM ends.
        verbose: Whether to show a progress bar.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"m"`` means and
            ``"c"`` covars.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.

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

    letters: ClassVar = {"m": ("means_", "loc"), "c": ("_covars_", "variance", "covariance")}
    means_: np.ndarray
    _covars_: np.ndarray

    def __init__(
        self,
        n_components: int = 1,
        covariance_type: str = "diag",
        *,
        min_covar: float = 1e-3,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "stmc",
        init_params: str = "stmc",
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.min_covar = min_covar
        self.startprob_prior = startprob_prior
        self.transmat_prior = transmat_prior
        self.algorithm = algorithm
        self.random_state = random_state
        self.n_iter = n_iter
        self.tol = tol
        self.verbose = verbose
        self.params = params
        self.init_params = init_params

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
        self._covars_ = np.array(covars, dtype=float)

    def _emission(self) -> TorchDistribution:
        means, covars = to_tensor(self.means_), to_tensor(self._covars_)
        states, dim = self.n_components, means.shape[-1]
        shape = _covars_shape(self.covariance_type, (states,), dim)
        if tuple(covars.shape) != shape:
            raise ValueError(
                f"covars_ of type {self.covariance_type!r} must have shape {shape}; got "
                f"{tuple(covars.shape)}."
            )
        if self.covariance_type == "tied":
            return MultivariateNormal(means, covars.unsqueeze(0))
        if self.covariance_type == "full":
            return MultivariateNormal(means, covars)
        return _independent(means, covars, self.covariance_type)

    def _take_emission(self, emission: Any) -> None:
        self.means_ = to_array(emission.mean)
        if self.covariance_type in ("spherical", "diag"):
            variance = to_array(emission.variance)
            self._covars_ = variance[:, 0] if self.covariance_type == "spherical" else variance
        else:
            matrices = to_array(emission.covariance_matrix)
            self._covars_ = matrices[0] if self.covariance_type == "tied" else matrices

    def _start(self, table: np.ndarray, chosen: set[str]) -> None:
        if "m" in chosen:
            self.means_ = _cluster(table, self.n_components, self.random_state)
        if "c" in chosen:
            shape = _covars_shape(self.covariance_type, (self.n_components,), table.shape[1])
            self._covars_ = _spread(table, self.min_covar, self.covariance_type, shape)

    def _check_options(self) -> None:
        super()._check_options()
        _check_covariance_type(self.covariance_type, COVARIANCE_TYPES)

    def _values(self, table: np.ndarray) -> Tensor:
        return to_tensor(table)

    def _counts(self) -> dict[str, int]:
        states, dim = np.asarray(self.means_).shape
        return {"m": states * dim, "c": _num_covars(self.covariance_type, states, dim)}


class GMMHMM(TabularEstimator):
    """HMM of mixtures of normal vectors, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        n_mix: M, the number of parts of the mixture of each state.
        covariance_type: ``"diag"``, a variance for each part and component, or ``"spherical"``,
            one for each part.
        min_covar: What is added to the variances at the start of a fit.
        startprob_prior: Dirichlet concentration of the first state; a number or ``(K,)``.
        transmat_prior: Dirichlet concentrations of the transitions; a number or ``(K, K)``.
        algorithm: How ``predict`` decodes: ``"viterbi"`` or ``"map"``.
        random_state: A seed or a ``numpy.random.RandomState``.
        n_iter: Largest number of iterations of EM.
        tol: Gain of an iteration, in nats, below which EM ends.
        verbose: Whether to show a progress bar.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"m"`` means, ``"c"``
            covars and ``"w"`` weights.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.

    Attributes:
        startprob_: ``(K,)``.
        transmat_: ``(K, K)``, row = from.
        weights_: ``(K, M)``.
        means_: ``(K, M, D)``.
        covars_: ``(K, M, D)``, or ``(K, M)`` if spherical.
        monitor_: How the fit went.

    Example:
        >>> from pyrohmm.sklearn import GMMHMM
        >>> import numpy as np
        >>> X = np.random.default_rng(0).normal(size=(60, 2)) + 5.0 * (np.arange(60) % 3)[:, None]
        >>> GMMHMM(n_components=2, n_mix=2, random_state=0).fit(X).means_.shape
        (2, 2, 2)
    """

    letters: ClassVar = {
        "m": ("means_", "loc"),
        "c": ("covars_", "variance"),
        "w": ("weights_", "weights"),
    }
    means_: np.ndarray
    covars_: np.ndarray
    weights_: np.ndarray

    def __init__(
        self,
        n_components: int = 1,
        n_mix: int = 1,
        *,
        covariance_type: str = "diag",
        min_covar: float = 1e-3,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "stmcw",
        init_params: str = "stmcw",
    ) -> None:
        self.n_components = n_components
        self.n_mix = n_mix
        self.covariance_type = covariance_type
        self.min_covar = min_covar
        self.startprob_prior = startprob_prior
        self.transmat_prior = transmat_prior
        self.algorithm = algorithm
        self.random_state = random_state
        self.n_iter = n_iter
        self.tol = tol
        self.verbose = verbose
        self.params = params
        self.init_params = init_params

    def _emission(self) -> TorchDistribution:
        weights = Categorical(logits=to_tensor(self.weights_).log())
        means, covars = to_tensor(self.means_), to_tensor(self.covars_)
        return MixtureSameFamily(weights, _independent(means, covars, self.covariance_type))

    def _take_emission(self, emission: Any) -> None:
        parts = emission.component_distribution
        variance = to_array(parts.variance)
        self.covars_ = variance[..., 0] if self.covariance_type == "spherical" else variance
        self.means_ = to_array(parts.mean)
        self.weights_ = to_array(emission.mixture_distribution.probs)

    def _start(self, table: np.ndarray, chosen: set[str]) -> None:
        states, parts = self.n_components, self.n_mix
        if "m" in chosen:
            random = check_random_state(self.random_state)
            labels = KMeans(states, n_init=10, random_state=random).fit_predict(table)
            groups = [table[labels == state] for state in range(states)]
            self.means_ = np.stack(
                [_cluster(rows if len(rows) >= parts else table, parts, random) for rows in groups]
            )
        if "c" in chosen:
            shape = _covars_shape(self.covariance_type, (states, parts), table.shape[1])
            self.covars_ = _spread(table, self.min_covar, self.covariance_type, shape)
        if "w" in chosen:
            self.weights_ = np.full((states, parts), 1 / parts)

    def _check_options(self) -> None:
        super()._check_options()
        check_size("n_mix", self.n_mix)
        _check_covariance_type(self.covariance_type, COVARIANCE_TYPES[:2])

    def _values(self, table: np.ndarray) -> Tensor:
        return to_tensor(table)

    def _counts(self) -> dict[str, int]:
        states, parts, dim = np.asarray(self.means_).shape
        return {
            "m": states * parts * dim,
            "c": _num_covars(self.covariance_type, states * parts, dim),
            "w": states * (parts - 1),
        }


class CategoricalHMM(TabularEstimator):
    """HMM of symbols 0 to V - 1, fitted by maximum likelihood, or with pseudo-counts.

    Args:
        n_components: K, the number of states.
        startprob_prior: Dirichlet concentration of the first state; a number or ``(K,)``.
        transmat_prior: Dirichlet concentrations of the transitions; a number or ``(K, K)``.
        emissionprob_prior: Dirichlet concentrations of the symbols; a number or ``(K, V)``.
        n_features: V; by default that of ``emissionprob_`` if it is not started anew, else one
            more than the largest symbol of the fit.
        algorithm: How ``predict`` decodes: ``"viterbi"`` or ``"map"``.
        random_state: A seed or a ``numpy.random.RandomState``.
        n_iter: Largest number of iterations of EM.
        tol: Gain of an iteration, in nats, below which EM ends.
        verbose: Whether to show a progress bar.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"e"`` emissionprob.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.

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

    letters: ClassVar = {"e": ("emissionprob_", "probs")}
    emissionprob_: np.ndarray

    def __init__(
        self,
        n_components: int = 1,
        *,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        emissionprob_prior: Any = 1.0,
        n_features: int | None = None,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "ste",
        init_params: str = "ste",
    ) -> None:
        self.n_components = n_components
        self.startprob_prior = startprob_prior
        self.transmat_prior = transmat_prior
        self.emissionprob_prior = emissionprob_prior
        self.n_features = n_features
        self.algorithm = algorithm
        self.random_state = random_state
        self.n_iter = n_iter
        self.tol = tol
        self.verbose = verbose
        self.params = params
        self.init_params = init_params

    def _emission(self) -> TorchDistribution:
        return Categorical(logits=to_tensor(self.emissionprob_).log())

    def _emission_module(self) -> Any:
        prior = to_tensor(self.emissionprob_prior)
        if bool((prior == 1).all()):
            return from_distribution(self._emission())
        return CategoricalEmission(*np.shape(self.emissionprob_), prior)

    def _take_emission(self, emission: Any) -> None:
        self.emissionprob_ = to_array(emission.probs)

    def _start(self, table: np.ndarray, chosen: set[str]) -> None:
        if "e" in chosen:
            size = self.n_features or int(self._values(table).max()) + 1
            random = check_random_state(self.random_state)
            weights = random.uniform(size=(self.n_components, size))
            self.emissionprob_ = weights / weights.sum(1, keepdims=True)

    def _values(self, table: np.ndarray) -> Tensor:
        return symbols(table)

    def _counts(self) -> dict[str, int]:
        states, symbols = np.shape(self.emissionprob_)
        return {"e": states * (symbols - 1)}

    def __sklearn_tags__(self) -> Any:
        """Whole numbers of at least zero, in one column."""
        return _of_counts(super().__sklearn_tags__())


class PoissonHMM(TabularEstimator):
    """HMM of vectors of independent counts, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        startprob_prior: Dirichlet concentration of the first state; a number or ``(K,)``.
        transmat_prior: Dirichlet concentrations of the transitions; a number or ``(K, K)``.
        algorithm: How ``predict`` decodes: ``"viterbi"`` or ``"map"``.
        random_state: A seed or a ``numpy.random.RandomState``.
        n_iter: Largest number of iterations of EM.
        tol: Gain of an iteration, in nats, below which EM ends.
        verbose: Whether to show a progress bar.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"l"`` lambdas.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.

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

    letters: ClassVar = {"l": ("lambdas_", "rate")}
    lambdas_: np.ndarray

    def __init__(
        self,
        n_components: int = 1,
        *,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "stl",
        init_params: str = "stl",
    ) -> None:
        self.n_components = n_components
        self.startprob_prior = startprob_prior
        self.transmat_prior = transmat_prior
        self.algorithm = algorithm
        self.random_state = random_state
        self.n_iter = n_iter
        self.tol = tol
        self.verbose = verbose
        self.params = params
        self.init_params = init_params

    def _emission(self) -> TorchDistribution:
        return Poisson(to_tensor(self.lambdas_)).to_event(1)

    def _take_emission(self, emission: Any) -> None:
        self.lambdas_ = to_array(emission.mean)

    def _start(self, table: np.ndarray, chosen: set[str]) -> None:
        if "l" in chosen:  # a gamma distribution with the mean and the variance of the data
            mean = max(table.mean(), 1e-3)
            scale = max(table.var(), 1e-3 * mean) / mean
            size = self.n_components, table.shape[1]
            self.lambdas_ = check_random_state(self.random_state).gamma(mean / scale, scale, size)

    def _values(self, table: np.ndarray) -> Tensor:
        return whole_numbers(table).double()

    def _counts(self) -> dict[str, int]:
        return {"l": np.size(self.lambdas_)}

    def __sklearn_tags__(self) -> Any:
        """Whole numbers of at least zero."""
        return _of_counts(super().__sklearn_tags__())


# What they share ---------------------------------------------------------------------------------


def whole_numbers(table: np.ndarray) -> Tensor:
    """A table of counts or symbols as integers.

    Raises:
        ValueError: If one is negative, or not whole.
    """
    wrong = table[(table < 0) | (table != np.floor(table))]
    if len(wrong):
        raise ValueError(f"X must hold whole numbers of at least 0; got {wrong[0]}.")
    return torch.as_tensor(table.astype(np.int64))


def symbols(table: np.ndarray) -> Tensor:
    """A table of one column as symbols ``(n,)``.

    Raises:
        ValueError: If there are several columns, or numbers that are no symbols.
    """
    if table.shape[1] != 1:
        raise ValueError(
            f"X must have one column of symbols; got {table.shape[1]} features. X[:, None] makes "
            "a column of a vector."
        )
    return whole_numbers(table)[:, 0]


def _of_counts(tags: Any) -> Any:
    tags.input_tags.positive_only = True
    return tags


def _independent(means: Tensor, covars: Tensor, kind: str) -> TorchDistribution:
    """Normal vectors with variances ``(*, D)``, or ``(*)`` if spherical."""
    shape = _covars_shape(kind, tuple(means.shape[:-1]), means.shape[-1])
    if tuple(covars.shape) != shape:
        raise ValueError(
            f"covars_ of type {kind!r} must have shape {shape}; got {tuple(covars.shape)}."
        )
    variances = covars.unsqueeze(-1) if kind == "spherical" else covars
    return Normal(means, variances.sqrt()).to_event(1)


def _check_covariance_type(kind: str, known: tuple[str, ...]) -> None:
    if kind not in known:
        raise ValueError(f"covariance_type must be one of {', '.join(known)}; got {kind!r}.")


def _covars_shape(kind: str, lead: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """The shape in which covariances of a type are set."""
    shapes = {"spherical": lead, "diag": (*lead, dim), "full": (*lead, dim, dim)}
    return shapes.get(kind, (dim, dim))


def _num_covars(kind: str, count: int, dim: int) -> int:
    """Number of free parameters in the covariances of ``count`` states, or parts of them."""
    matrix = dim * (dim + 1) // 2
    return {"spherical": count, "diag": count * dim, "full": count * matrix}.get(kind, matrix)


def _cluster(table: np.ndarray, count: int, random_state: Any) -> np.ndarray:
    """Centres of clusters, ``(count, D)``."""
    return KMeans(count, n_init=10, random_state=random_state).fit(table).cluster_centers_


def _spread(table: np.ndarray, floor: float, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """The covariance of all rows, in the shape of its type."""
    matrix = np.cov(table.T, bias=len(table) == 1).reshape(table.shape[1], -1)
    matrix = matrix + floor * np.eye(len(matrix))
    forms = {"spherical": np.trace(matrix) / len(matrix), "diag": np.diag(matrix)}
    return np.broadcast_to(forms.get(kind, matrix), shape).copy()
