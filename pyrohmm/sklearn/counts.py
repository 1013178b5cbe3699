"""``CategoricalHMM`` and ``PoissonHMM``: symbols, and vectors of counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from pyro.distributions import Categorical, Poisson
from pyro.distributions.torch_distribution import TorchDistribution
from sklearn.utils import check_random_state
from torch import Tensor

from .tabular import TabularEstimator, to_array, to_tensor


class CountingEstimator(TabularEstimator):
    """Rows of whole numbers of at least zero."""

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
        **options: Those of :class:`~.tabular.TabularEstimator`.

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
    emissionprob_prior: Any = 1.0
    n_features: int | None = None
    params: str = "ste"
    init_params: str = "ste"

    def _emission(self) -> TorchDistribution:
        shape = self.n_components, np.shape(self.emissionprob_)[-1]
        return Categorical(logits=self._rows("emissionprob_", shape).log())

    def _take_emission(self, emission: Any) -> None:
        self.emissionprob_ = to_array(emission.probs)

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        if "e" in chosen:
            size = self.n_features or int(self._values(table).max()) + 1
            random = check_random_state(seed)
            weights = random.uniform(size=(self.n_components, size))
            self.emissionprob_ = weights / weights.sum(1, keepdims=True)

    def _values(self, table: np.ndarray) -> Tensor:
        return symbols(table)

    def _counts(self) -> dict[str, int]:
        states, symbols = np.shape(self.emissionprob_)
        return {"e": states * (symbols - 1)}


@dataclass(eq=False, repr=False, kw_only=True)
class PoissonHMM(CountingEstimator):
    """HMM of vectors of independent counts, fitted by maximum likelihood.

    Args:
        n_components: K, the number of states.
        params: What a fit changes: ``"s"`` startprob, ``"t"`` transmat, ``"l"`` lambdas.
        init_params: What a fit starts anew; the rest starts at its value, if it has one.
        **options: Those of :class:`~.tabular.TabularEstimator`.

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
    lambdas_prior: Any = 0.0
    lambdas_weight: Any = 0.0
    params: str = "stl"
    init_params: str = "stl"

    def _emission(self) -> TorchDistribution:
        return Poisson(to_tensor(self.lambdas_)).to_event(1)

    def _take_emission(self, emission: Any) -> None:
        self.lambdas_ = to_array(emission.mean)

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        if "l" in chosen:  # a gamma distribution with the mean and the variance of the data
            mean = max(table.mean(), 1e-3)
            scale = max(table.var(), 1e-3 * mean) / mean
            size = self.n_components, table.shape[1]
            self.lambdas_ = check_random_state(seed).gamma(mean / scale, scale, size)

    def _values(self, table: np.ndarray) -> Tensor:
        return whole_numbers(table).double()


def whole_numbers(table: np.ndarray) -> Tensor:
    """A table of counts or symbols as integers.

    Raises:
        ValueError: If one is negative, or not whole.
    """
    if (table < 0).any():  # the first words are those that scikit-learn asks for
        raise ValueError(f"Negative values in data: X must hold whole numbers; got {table.min()}.")
    wrong = table[table != np.floor(table)]
    if len(wrong):
        raise ValueError(f"X must hold whole numbers of at least 0; got {wrong[0]}.")
    return torch.as_tensor(table.astype(np.int64))


def symbols(table: np.ndarray) -> Tensor:
    """A table of one column as symbols ``(n,)``.

    Raises:
        ValueError: If there are several columns, or numbers that are no symbols.
    """
    numbers = whole_numbers(table)
    if table.shape[1] != 1:
        raise ValueError(
            f"X must have one column of symbols; got {table.shape[1]} features. X[:, None] makes "
            "a column of a vector."
        )
    return numbers[:, 0]
