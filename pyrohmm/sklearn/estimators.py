"""``HMMEstimator``: any module as an estimator, and the queries that all estimators answer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from .._checks import check_size, unknown_argument
from .._imports import imported
from ..analysis.metrics import num_parameters
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..infer.em import fit_em
from ..infer.models import exclusive
from ..infer.results import Fit
from ..infer.starts import build_once
from ..io.persistence import describe
from ..nn.base import PYRO, HMMModule
from ..ops.markov import stationary

try:
    imported("sklearn.utils.validation")
    from sklearn.base import BaseEstimator, DensityMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    cure = "pip install 'pyrohmm[sklearn]'"
    raise ImportError(f"pyrohmm.sklearn needs scikit-learn 1.6: {cure}.") from error

ONE = torch.tensor([1])  # lengths of one sequence of one step
Query = Callable[[HMM, Tensor], tuple[Tensor, Tensor]]  # from values to scores and answers


@dataclass
class ConvergenceMonitor:
    """History of log-probabilities of a fit, and whether it has converged.

    Attributes:
        tol: Gain of an iteration, in nats, below which a fit has converged.
        n_iter: Largest number of iterations.
        history: Log-probability of the data before each iteration, in nats; where there are
            priors, with the logarithm of their density.
        converged: Whether the last gain was below ``tol``, or all iterations were taken.
        notes: Remarks on the fit, such as that a variance was held at its floor, of which ``fit``
            warns.

    Example:
        >>> ConvergenceMonitor(0.1, 10, [-5.0, -4.0]).iter
        2
    """

    tol: float
    n_iter: int
    history: list[float] = field(default_factory=list)
    converged: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def iter(self) -> int:
        """Number of iterations taken."""
        return len(self.history)

    def take(self, fit: Fit) -> float:
        """Append the history of a fit and keep its notes; return the last log-probability."""
        *history, last = (-fit.losses).tolist()
        self.history += history
        # that n_iter is few is known from the monitor, and no degeneration
        self.notes = [note for note in fit.notes if "still falling" not in note]
        return last

    def warn(self) -> None:
        """Warn of each of the ``notes``, from within ``fit``."""
        for note in self.notes:
            warnings.warn(note, ConvergenceWarning, stacklevel=3)


class SequenceEstimator(DensityMixin, BaseEstimator):
    """Base of the estimators: queries of a fitted HMM under the names of hmmlearn.

    ``X`` is an array ``(n_samples, n_features)`` of all the sequences, one after the other, and
    ``lengths`` ``(n_sequences,)`` says how long each is; by default it is one sequence. Or ``X`` is
    a list of arrays ``(T_n, n_features)``, one for each sequence, which scikit-learn's tools of
    selection divide by sequences. Of a list, answers for each row come as an array of N arrays.

    The second argument of ``fit`` and ``score`` is the target for scikit-learn, and ``lengths`` for
    hmmlearn. One with an entry for each row of ``X`` is a target, which is not read; any other is
    ``lengths``. As the keyword ``lengths=`` they are what they say.

    Warns:
        UserWarning: If the second argument is a list of a one for each row, of which hmmlearn
            would make sequences of one step.
    """

    n_components: int
    random_state: Any
    transmat_: Any
    algorithm = "viterbi"

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options of other names, with the one that is meant."""
        known = inspect.signature(cls).parameters
        names = options.keys() - known.keys()
        if names and all(part.kind is not part.VAR_KEYWORD for part in known.values()):
            raise unknown_argument(cls, min(names), known)
        return super().__new__(cls)

    # What an estimator defines
    _hmm: Any  # (lengths) -> the HMM with the parameters as they are
    _values: Any  # (table (n, n_features)) -> rows as the emission of the HMM takes them
    _num_parameters: Any  # () -> the number of free parameters that a fit changes

    # Queries

    def score(self, X: Any, y: Any = None, lengths: Any = None) -> float:
        r"""Log evidence of all sequences, :math:`\sum_n \log p(x_n)`, in nats.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays.
            y: A target, with an entry for each row, is not read; any other is ``lengths``.
            lengths: ``(n_sequences,)`` integers; one sequence by default.
        """
        return self._ask(self._data(X, lengths, y), evidence)[0]

    def score_samples(self, X: Any, lengths: Any = None) -> tuple[float, np.ndarray]:
        """Log evidence of all sequences, in nats, and posterior state probabilities of each row."""
        total, probs = self._ask(self._data(X, lengths), _posterior)
        return total, _as_given(probs.numpy(), X)

    def predict_proba(self, X: Any, lengths: Any = None) -> np.ndarray:
        """Posterior state probabilities of each row, ``(n_samples, n_components)``.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays.
            lengths: ``(n_sequences,)`` integers.
        """
        return self.score_samples(X, lengths)[1]

    def decode(
        self, X: Any, lengths: Any = None, algorithm: str | None = None
    ) -> tuple[float, np.ndarray]:
        """Decode the states of each row, and their score.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays.
            lengths: ``(n_sequences,)`` integers.
            algorithm: ``"viterbi"``, the best path, whose score is its log joint density with the
                data; or ``"map"``, the most probable state of each row, whose score is the
                expected number of right ones. By default that of the estimator.

        Returns:
            The score, and ``(n_samples,)`` integers.

        Raises:
            ValueError: If ``algorithm`` is another.
        """
        algorithm = algorithm or self.algorithm
        if algorithm not in ("viterbi", "map"):
            raise ValueError(f"algorithm must be 'viterbi' or 'map'; got {algorithm!r}.")
        query = _best_path if algorithm == "viterbi" else _posterior
        score, states = self._ask(self._data(X, lengths), query)
        if algorithm == "map":
            score, states = float(states.amax(1).sum()), states.argmax(1)
        return score, _as_given(states.numpy(), X)

    def predict(self, X: Any, lengths: Any = None) -> np.ndarray:
        """Decode the state of each row, ``(n_samples,)``.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays.
            lengths: ``(n_sequences,)`` integers.
        """
        return self.decode(X, lengths)[1]

    def sample(
        self, n_samples: int = 1, random_state: Any = None, currstate: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sample a sequence of observations and states from the model.

        Args:
            n_samples: Number of steps.
            random_state: A seed or a ``numpy.random.RandomState``; that of the estimator by
                default.
            currstate: The first state; sampled by default.

        Returns:
            ``(n_samples, n_features)``, and the states ``(n_samples,)``.
        """
        check_is_fitted(self)
        check_size("n_samples", n_samples)
        hmm = self._hmm(torch.tensor([n_samples]))
        if currstate is not None:
            first = torch.full_like(hmm.log_initial, -torch.inf)
            first[currstate] = 0.0
            hmm = hmm.replace(log_initial=first)
        with PYRO, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed(random_state))
            values, states = hmm.sample_with_states()
        values = values.long() if hmm.emission.support.is_discrete else values
        return values.reshape(n_samples, -1).numpy(), states[0].numpy()

    def get_stationary_distribution(self) -> np.ndarray:
        """The stationary distribution of ``transmat_``, ``(n_components,)``.

        Raises:
            ValueError: If the chain has several.
        """
        check_is_fitted(self, "transmat_")
        return stationary(torch.as_tensor(np.array(self.transmat_)).log()).numpy()

    def aic(self, X: Any, lengths: Any = None) -> float:
        """Akaike's information criterion, in nats times two; less is better.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays.
            lengths: ``(n_sequences,)`` integers.
        """
        return 2 * self._num_parameters() - 2 * self.score(X, lengths=lengths)

    def bic(self, X: Any, lengths: Any = None) -> float:
        """Schwarz's information criterion, in nats times two; less is better.

        Args:
            X: ``(n_samples, n_features)``, or a list of such arrays.
            lengths: ``(n_sequences,)`` integers.
        """
        count = len(self._table(X, lengths)[0])
        return self._num_parameters() * np.log(count) - 2 * self.score(X, lengths=lengths)

    # From tables to sequences

    def _data(self, X: Any, lengths: Any, y: Any = None) -> Sequences:
        check_is_fitted(self)
        table, sizes = self._table(X, lengths, y)
        return Sequences.from_concatenated(self._values(table), sizes)

    def _ask(self, data: Sequences, query: Query) -> tuple[float, Tensor]:
        """Sum of the scores ``(N,)`` of a query, and its answers ``(M, *)`` for all rows."""
        scores = []

        def answers(part: Sequences) -> Tensor:
            score, found = query(self._hmm(part.lengths), part.values)
            scores.append(float(score.sum()))
            return found

        rows = data.map_steps(answers)
        return sum(scores), rows

    def _table(
        self, X: Any, lengths: Any, y: Any = None, reset: bool = False
    ) -> tuple[np.ndarray, list[int]]:
        """Join ``X`` to one checked table of all rows, with the lengths of its sequences."""
        if isinstance(X, Sequences):
            text = "X must be arrays (n_samples, n_features); got Sequences. Call fit_em, or"
            raise TypeError(f"{text} give X, lengths = data.to_concatenated().")
        parts = [len(part) for part in X] if _is_list(X) else None
        rows = X if parts is None else np.concatenate(X)
        table = validate_data(self, rows, reset=reset, dtype=[np.float64, np.float32, np.int64])
        if parts is not None and lengths is not None and list(lengths) != parts:
            text = f"lengths must be left out where X is a list; got {list(lengths)}"
            raise ValueError(f"{text}. Pass one or the other.")
        lengths = _lengths_in(y, len(table)) if lengths is None else lengths
        found = np.atleast_1d(parts or (len(table) if lengths is None else lengths))
        if found.dtype.kind not in "iu" or (found < 1).any() or found.sum() != len(table):
            raise ValueError(
                "lengths must be positive integers whose sum is the number of rows of X, "
                f"{len(table)}; got {found.tolist()}. Count rows of each sequence."
            )
        return table, found.tolist()

    def _seed(self, random_state: Any = None) -> int:
        chosen = self.random_state if random_state is None else random_state
        return int(check_random_state(chosen).randint(2**31 - 1))


@describe.register
def _(estimator: SequenceEstimator) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Of an estimator: its fitted HMM, of one step."""
    check_is_fitted(estimator)
    return describe(estimator._hmm(ONE))


@dataclass(eq=False, repr=False)
class HMMEstimator(SequenceEstimator):
    """Estimator of scikit-learn for any HMM module, of this package or of yours.

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
        """Fit a new module to the sequences.

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
        table, sizes = self._table(X, lengths, y, reset=True)
        options: Any = {"num_iterations": self.n_iter, "tolerance": self.tol, "progress": False}
        method: Any = self.method or partial(fit_em, restarts=self.n_init, **options)
        with exclusive(gradients=False), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed())
            module = self.module(self.n_components)
            if not isinstance(module, HMMModule):
                text = f"module must return an HMMModule; got {type(module).__name__}"
                raise TypeError(f"{text}. Give partial(TabularHMM, emission=normal()).")
            emission = build_once(module, Sequences(torch.zeros(1, 1), ONE)).emission
            self._shape, self._symbols = emission.event_shape, is_categorical(emission)
            self.fit_ = method(module, Sequences.from_concatenated(self._values(table), sizes))
        self.monitor_ = ConvergenceMonitor(self.tol or 0.0, self.n_iter)
        self.monitor_.take(self.fit_)
        self.monitor_.converged = self.fit_.converged
        self.monitor_.warn()
        return self

    @property
    def startprob_(self) -> np.ndarray:
        """Probabilities of the first state, ``(K,)``."""
        return self._hmm(ONE).log_initial.exp().numpy()

    @property
    def transmat_(self) -> np.ndarray:
        """Transition matrix ``(K, K)``, row = from."""
        return self._hmm(ONE).log_transition.exp().numpy()

    def _placeholder(self, lengths: Tensor) -> Sequences:
        return Sequences(torch.zeros(len(lengths), int(lengths.max()), *self._shape), lengths)

    def _hmm(self, lengths: Tensor) -> HMM:
        return self.fit_.hmm(self._placeholder(lengths))

    def _values(self, table: np.ndarray) -> Tensor:
        if self._symbols:
            return symbols(table)
        values = torch.as_tensor(table, dtype=torch.get_default_dtype())
        return values if self._shape else values[:, 0]

    def _num_parameters(self) -> float:
        return num_parameters(self.fit_.model, self._placeholder(ONE))


def whole_numbers(table: np.ndarray) -> Tensor:
    """Convert a table of counts or symbols to integers.

    Raises:
        ValueError: If one is negative, or not whole.
    """
    if (table < 0).any():  # the first words are those that scikit-learn asks for
        raise ValueError(f"Negative values in data: X must hold whole numbers; got {table.min()}.")
    if len(wrong := table[table != np.floor(table)]):
        text = f"X must hold whole numbers of at least 0; got {wrong[0]}"
        raise ValueError(f"{text}. Encode symbols as 0, 1, ...")
    return torch.as_tensor(table.astype(np.int64))


def symbols(table: np.ndarray) -> Tensor:
    """Convert a table of one column to symbols ``(n,)``.

    Raises:
        ValueError: If there are several columns, or numbers that are no symbols.
    """
    numbers = whole_numbers(table)
    if table.shape[1] != 1:
        text = f"X must have one column of symbols; got {table.shape[1]} features."
        raise ValueError(f"{text} X[:, None] makes a column of a vector.")
    return numbers[:, 0]


def evidence(hmm: HMM, values: Tensor) -> tuple[Tensor, Tensor]:
    """Log evidence of each sequence, and the values."""
    return hmm.log_prob(values), values


def _posterior(hmm: HMM, values: Tensor) -> tuple[Tensor, Tensor]:
    posterior = hmm.posterior(values)
    return posterior.log_evidence, posterior.state_probs


def _best_path(hmm: HMM, values: Tensor) -> tuple[Tensor, Tensor]:
    path = hmm.viterbi(values)
    return hmm.log_joint(values, path), path


def _is_list(X: Any) -> bool:
    """Whether ``X`` is a list of sequences."""
    return isinstance(X, list | tuple) and len(X) > 0 and np.ndim(X[0]) == 2


def _as_given(rows: np.ndarray, X: Any) -> np.ndarray:
    """Split results for all rows by sequence if ``X`` is a list of sequences."""
    if not _is_list(X):
        return rows
    apart = np.empty(len(X), object)
    for n, part in enumerate(np.split(rows, np.cumsum([len(part) for part in X])[:-1])):
        apart[n] = part
    return apart


def _lengths_in(second: Any, num_rows: int) -> Any:
    """Lengths given as second argument; None if it is absent or a target."""
    if second is None or len(np.atleast_1d(second)) != num_rows:
        return second
    # an array may be the labels of a fold
    if num_rows > 1 and isinstance(second, list | tuple) and set(second) == {1}:
        text = f"y is a one for each of the {num_rows} rows of X, and taken as a target, not read"
        warnings.warn(f"{text}. For sequences of one step call with lengths=y.", stacklevel=4)
    return None
