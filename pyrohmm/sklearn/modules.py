"""``HMMEstimator``: any module as an estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .._checks import check_size
from ..analysis.metrics import num_parameters
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..infer.em import fit_em
from ..infer.models import exclusive
from ..infer.results import Fit
from ..infer.starts import build_once
from ..nn.base import HMMModule
from .base import ConvergenceMonitor, SequenceEstimator
from .counts import symbols


@dataclass(eq=False, repr=False)
class HMMEstimator(SequenceEstimator):
    """Any module of this package, or of yours, as an estimator.

    Args:
        module: Called with K, returns the module to fit: ``partial(TabularHMM,
            emission=normal(2))``. Its priors are part of the fit.
        n_components: K, the number of states.
        method: Called with the module and the :class:`Sequences`, returns their :class:`Fit`, such
            as ``lambda module, data: fit_map(MarginalModel(module), data)``. By default
            ``fit_em`` with ``num_iterations=n_iter`` and ``tolerance=tol``.
        n_iter: Largest number of iterations.
        tol: Share of the loss below which a gain ends EM: see :func:`pyrohmm.fit_em`.
        algorithm: How ``predict`` decodes: ``"viterbi"`` or ``"map"``.
        random_state: A seed or a ``numpy.random.RandomState``.
        n_init: How many batched starts to fit from, of which the best is kept; without ``method``.

    Attributes:
        fit_: What the fit returned.
        startprob_: ``(K,)``.
        transmat_: ``(K, K)``, row = from.
        monitor_: How the fit went.

    Example:
        >>> from functools import partial
        >>> from pyrohmm.sklearn import HMMEstimator
        >>> import numpy as np
        >>> X = np.array([0, 1] * 20)[:, None]
        >>> model = HMMEstimator(partial(TabularHMM, emission=categorical(2)), n_components=2)
        >>> model.set_params(random_state=0).fit(X).transmat_.shape
        (2, 2)
    """

    module: Callable[[int], HMMModule]
    n_components: int = 1
    _: KW_ONLY
    method: Callable[[HMMModule, Sequences], Fit] | None = None
    n_iter: int = 200
    tol: float | None = 1e-6
    algorithm: str = "viterbi"
    random_state: Any = None
    n_init: int = 1

    def fit(self, X: Any, y: Any = None, lengths: Any = None) -> Self:
        """Build a module, and fit it.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays, one for each sequence.
            y: A target, with an entry for each row, is not read; any other is ``lengths``, as
                hmmlearn takes them here.
            lengths: ``(n_sequences,)`` integers; one sequence by default.

        Returns:
            The estimator.

        Raises:
            TypeError: If ``module`` does not return a module.
            ValueError: If ``lengths`` is out of range, or the data cannot be emitted.

        Warns:
            ConvergenceWarning: If the fit has remarks: see ``fit_.notes``.
        """
        check_size("n_components", self.n_components)
        table, sizes = self._table(X, lengths, reset=True, y=y)
        with exclusive(gradients=False), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed())
            module = self.module(self.n_components)
            if not isinstance(module, HMMModule):
                raise TypeError(
                    f"module must return an HMMModule; got {type(module).__name__} from "
                    f"module({self.n_components})."
                )
            one = Sequences(torch.zeros(1, 1), torch.tensor([1]))
            emission = build_once(module, one).emission
            self._shape, self._symbols = emission.event_shape, is_categorical(emission)
            data = self._sequences(table, sizes)
            if self.method is not None:
                self.fit_ = self.method(module, data)
            else:
                self.fit_ = fit_em(
                    module, data, num_iterations=self.n_iter, tolerance=self.tol,
                    restarts=self.n_init,
                    progress=False,
                )  # fmt: skip
        history = (-self.fit_.losses).tolist()
        # that n_iter is few is known from the monitor, and no degeneration
        notes = [note for note in self.fit_.notes if "still falling" not in note]
        self.monitor_ = ConvergenceMonitor(
            self.tol or 0.0, self.n_iter, history[:-1], self.fit_.converged, notes
        )
        self.monitor_.warn()
        return self

    @property
    def startprob_(self) -> np.ndarray:
        """Probabilities of the first state, ``(K,)``."""
        return self._hmm(torch.tensor([1])).log_initial.exp().numpy()

    @property
    def transmat_(self) -> np.ndarray:
        """Transition matrix ``(K, K)``, row = from."""
        return self._hmm(torch.tensor([1])).log_transition.exp().numpy()

    def _hmm(self, lengths: Tensor) -> HMM:
        steps = int(lengths.max())
        values = torch.zeros(len(lengths), steps, *self._shape)
        return self.fit_.hmm(Sequences(values, lengths))

    def _values(self, table: np.ndarray) -> Tensor:
        if self._symbols:
            return symbols(table)
        values = torch.as_tensor(table, dtype=torch.get_default_dtype())
        return values if self._shape else values[:, 0]

    def _num_parameters(self) -> float:
        one = Sequences(torch.zeros(1, 1, *self._shape), torch.tensor([1]))
        model: Any = self.fit_.model
        return num_parameters(model, one)
