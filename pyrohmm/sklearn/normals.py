"""``GaussianHMM`` and ``GMMHMM``: normal vectors, and mixtures of them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from pyro.distributions import Categorical, MixtureSameFamily, MultivariateNormal
from pyro.distributions.torch_distribution import TorchDistribution
from sklearn.cluster import KMeans
from torch import Tensor
from torch.distributions import constraints

from .._checks import check_size
from ..distributions.hard_zeros import log_probs
from ..distributions.observation import log_prob_per_component
from ..io.conversion import covars_of, normals_of
from ..nn.closed_form import Maximum, Statistics, row_mode
from ..nn.covariances import CovarianceEmission
from ..ops.log_space import log
from .tabular import TabularEstimator, to_array, to_tensor

COVARIANCE_TYPES = ("spherical", "diag", "full", "tied")


class NormalEstimator(TabularEstimator):
    """Means ``(*L, D)`` and their covariances, in an array of a shape for each type.

    L is the number of states, or of states and parts of their mixtures.
    """

    means_: np.ndarray
    covariance_type: str
    min_covar: float

    def _covars_shape(self, lead: tuple[int, ...], dim: int) -> tuple[int, ...]:
        shapes = {"spherical": lead, "diag": (*lead, dim), "full": (*lead, dim, dim)}
        return shapes.get(self.covariance_type, (*lead[:-1], dim, dim))

    def _normals(self, covars: Any) -> TorchDistribution:
        """Normal vectors of these covariances."""
        means, covars, kind = to_tensor(self.means_), to_tensor(covars), self.covariance_type
        shape = self._covars_shape(tuple(means.shape[:-1]), means.size(-1))
        if tuple(covars.shape) != shape:
            raise ValueError(
                f"covars_ of type {kind!r} must have shape {shape}; got {tuple(covars.shape)}."
            )
        return normals_of(means, covars, kind)

    def _covars_of(self, normals: Any) -> np.ndarray:
        """Covariances of normal vectors."""
        return to_array(covars_of(normals, self.covariance_type))

    def _spread(self, table: np.ndarray, *lead: int) -> np.ndarray:
        """The covariance of all rows, plus ``min_covar``."""
        matrix = np.cov(table.T, bias=len(table) == 1).reshape(table.shape[1], -1)
        matrix = matrix + self.min_covar * np.eye(len(matrix))
        forms = {"spherical": np.trace(matrix) / len(matrix), "diag": np.diag(matrix)}
        form = forms.get(self.covariance_type, matrix)
        return np.broadcast_to(form, self._covars_shape(lead, len(matrix))).copy()

    def _check_options(self) -> None:
        super()._check_options()
        if self.covariance_type not in COVARIANCE_TYPES:
            known = ", ".join(COVARIANCE_TYPES)
            raise ValueError(
                f"covariance_type must be one of {known}; got {self.covariance_type!r}."
            )

    def _counts(self) -> dict[str, int]:
        *lead, dim = np.shape(self.means_)
        count = int(np.prod(self._covars_shape(tuple(lead), dim)))
        if self.covariance_type in ("full", "tied"):  # which are symmetric
            count = count // dim**2 * (dim * (dim + 1) // 2)
        return super()._counts() | {"c": count}


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
        **options: Those of :class:`~.tabular.TabularEstimator`.

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
    covariance_type: str = "diag"
    _: KW_ONLY
    min_covar: float = 1e-3
    means_prior: Any = 0.0
    means_weight: Any = 0.0
    covars_prior: Any = 0.0
    covars_weight: Any = 1.0
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
        if self.covariance_type == "spherical" and covars.ndim == 2:  # a column, as in hmmlearn
            covars = covars.squeeze(1)
        return self._normals(covars)

    def _take_emission(self, emission: Any) -> None:
        self.means_, self._covars_ = to_array(emission.mean), self._covars_of(emission)

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
        **options: Those of :class:`~.tabular.TabularEstimator`.

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
        "m": ("means_", "loc"),
        "c": ("covars_", "variance", "covariance"),
        "w": ("weights_", "weights"),
    }
    n_mix: int = 1
    _: KW_ONLY
    covariance_type: str = "diag"
    min_covar: float = 1e-3
    weights_prior: Any = 1.0
    means_prior: Any = 0.0
    means_weight: Any = 0.0
    covars_prior: Any = None
    covars_weight: Any = None
    params: str = "stmcw"
    init_params: str = "stmcw"

    def _emission(self) -> TorchDistribution:
        weights = Categorical(logits=self._rows("weights_", np.shape(self.means_)[:2]).log())
        return MixtureSameFamily(weights, self._normals(self.covars_))

    def _emission_module(self) -> Any:
        if self.covariance_type in ("spherical", "diag"):
            return super()._emission_module()
        return CovarianceMixture(self._emission(), self.covariance_type == "tied")

    def _take_emission(self, emission: Any) -> None:
        parts = emission.component_distribution
        self.covars_ = self._covars_of(parts)
        self.means_ = to_array(parts.mean)
        self.weights_ = to_array(emission.mixture_distribution.probs)

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        states, parts = self.n_components, self.n_mix
        if "m" in chosen:
            labels = KMeans(states, n_init=10, random_state=seed).fit_predict(table)
            groups = [table[labels == state] for state in range(states)]
            self.means_ = np.stack(
                [_cluster(rows if len(rows) >= parts else table, parts, seed) for rows in groups]
            )
        if "c" in chosen:
            self.covars_ = self._spread(table, states, parts)
        if "w" in chosen:
            self.weights_ = np.full((states, parts), 1 / parts)

    def _check_options(self) -> None:
        super()._check_options()
        check_size("n_mix", self.n_mix)

    def _counts(self) -> dict[str, int]:
        return super()._counts() | {"w": self.n_components * (self.n_mix - 1)}


class CovarianceMixture(CovarianceEmission):
    """Mixtures of C normal vectors with covariance matrices, whose parts count as K · C states.

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
        """The distribution of a vector, batched over states."""
        loc, matrix = self.loc.unflatten(-2, self.lead), self.covariance
        matrix = matrix.unsqueeze(-3) if self.by_state else matrix.unflatten(-3, self.lead)
        return MixtureSameFamily(
            Categorical(logits=log(self.weights)), MultivariateNormal(loc, matrix)
        )

    def statistics(
        self, values: Tensor, weights: Tensor, current: TorchDistribution | None
    ) -> Statistics:
        """Sums of products for each part, weighted by its probability given state and value."""
        mixture: Any = current
        logits = log_prob_per_component(mixture, values) + log_probs(mixture.mixture_distribution)
        joint = weights.double().unsqueeze(-1) * logits.softmax(-1)  # (R, M, K, C)
        return super().statistics(values, joint.flatten(2), None) | {"counts": joint.sum(1)}

    def m_step(self, statistics: Statistics) -> Maximum:
        """The largest likelihood of the parts, and of the weights."""
        values, notes = super().m_step(statistics)
        return values | {"weights": row_mode(statistics["counts"], None)}, notes

    def _pooled(self, sums: Tensor) -> Tensor:
        return sums.unflatten(1, self.lead).sum(2) if self.by_state else sums

    def _wide(self, covariance: Tensor) -> Tensor:
        return covariance.repeat_interleave(self.lead[1], -3) if self.by_state else covariance


def _cluster(table: np.ndarray, count: int, random_state: Any) -> np.ndarray:
    """Centres of clusters, ``(count, D)``."""
    return KMeans(count, n_init=10, random_state=random_state).fit(table).cluster_centers_
