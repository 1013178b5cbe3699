"""EM for the estimators whose parameters are arrays."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from pyro.distributions.torch_distribution import TorchDistribution
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from .._checks import check_number, check_size
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..infer.em import fit_em
from ..nn.base import freeze
from ..nn.emissions import from_distribution
from ..nn.tabular import TabularHMM
from ..ops.markov import stationary
from .base import ConvergenceMonitor, SequenceEstimator

AT_ONCE = 16  # iterations of EM between two looks at their gains


@dataclass(eq=False, repr=False)
class TabularEstimator(SequenceEstimator):
    """Parameters in arrays, which may be set by hand, and which ``fit`` sets by EM.

    Subclasses name the parameters of their emission by the letters of ``params`` and
    ``init_params``, and turn their arrays into a distribution and back.

    Args:
        n_components: K, the number of states.
        startprob_prior: hmmlearn's arguments of priors, whose names end in ``_prior`` and
            ``_weight``, must have the values that mean no prior, which are their defaults here:
            priors are those of a module in an :class:`HMMEstimator`.
        transmat_prior: As ``startprob_prior``.
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
        letters: For each letter the attribute, and what the emission's module calls it.
    """

    letters: ClassVar[dict[str, tuple[str, ...]]] = {}
    n_components: int = 1
    _: KW_ONLY
    startprob_prior: Any = 1.0
    transmat_prior: Any = 1.0
    algorithm: str = "viterbi"
    random_state: Any = None
    n_iter: int = 10
    tol: float = 1e-2
    verbose: bool = False
    n_init: int = 1
    params: str = "st"
    init_params: str = "st"

    # What an estimator defines

    def _emission(self) -> TorchDistribution:
        """The distribution of a row, batched over states, in float64."""
        raise NotImplementedError

    def _take_emission(self, emission: Any) -> None:
        """Set the arrays of the emission."""
        raise NotImplementedError

    def _start(self, table: np.ndarray, chosen: set[str], seed: Any) -> None:
        """Set the arrays of the letters ``chosen`` for a fit to ``table``."""
        raise NotImplementedError

    def _counts(self) -> dict[str, int]:
        """Number of free parameters of the emission, by letter: that of entries by default."""
        return {letter: np.size(getattr(self, names[0])) for letter, names in self.letters.items()}

    def _values(self, table: np.ndarray) -> Tensor:
        return to_tensor(table)

    def _emission_module(self) -> Any:
        """The module of the emission, whose parameters are points."""
        return from_distribution(self._emission())

    # Fitting

    def fit(self, X: Any, y: Any = None, lengths: Any = None) -> Self:
        """Find the parameters of largest likelihood by EM.

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
        table, sizes = self._table(X, lengths, reset=True, y=y)
        data = self._sequences(table, sizes)
        names = [*self._attributes().values(), "monitor_"]
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        last = self.__dict__.get("_found", {})  # of an earlier fit
        chosen = {name for letter, name in self._attributes().items() if letter in self.init_params}
        starts_anew = [n for n in given if n in chosen and given[n] is not last.get(n)]
        if starts_anew:
            warnings.warn(
                f"{', '.join(starts_anew)} had values, which init_params={self.init_params!r} "
                "overwrites: leave out their letters to start at them.", stacklevel=2
            )  # fmt: skip
        seeds = [self.random_state]
        if self.n_init > 1:
            random = check_random_state(self.random_state)
            seeds += random.randint(2**31 - 1, size=self.n_init - 1).tolist()
        best, found = -np.inf, given
        for seed in seeds:
            self.__dict__.update(given)
            self._initialise(table, given, seed)
            self._zeros = {n: np.asarray(getattr(self, n)) == 0 for n in self._probabilities()}
            self.monitor_ = ConvergenceMonitor(self.tol, self.n_iter)
            final = self._log_evidence(data) if self.n_init > 1 else 0.0
            if self.n_iter and set(self.params) & set(self._attributes()):
                while not self.monitor_.converged:
                    final = self._climb(data)
            if final > best or found is given:
                best, found = final, {name: getattr(self, name) for name in names}
        self.__dict__.update(found)
        self._found = found
        if table.size < self._num_parameters():
            warnings.warn(
                f"there are {self._num_parameters()} free parameters and {table.size} numbers in X:"
                " the fit degenerates. Take fewer states, or more data.", stacklevel=2
            )  # fmt: skip
        self.monitor_.warn()
        return self

    def _climb(self, data: Sequences) -> float:
        """Some iterations of EM, to the first that gains less than ``tol``; the density reached."""
        monitor = self.monitor_
        climb = partial(fit_em, self._module(), data, tolerance=None, progress=self.verbose)
        fit = climb(num_iterations=min(self.n_iter - monitor.iter, AT_ONCE))
        small = (-fit.losses.diff() < self.tol).nonzero().flatten().tolist()
        if small and small[0] + 2 < len(fit.losses):
            fit = climb(num_iterations=small[0] + 1)
        history = (-fit.losses).tolist()
        gain = history[-1] - history[-2] if len(history) > 1 else 0.0
        monitor.history += history[:-1]
        self._take(fit.hmm(data))
        monitor.converged = gain < self.tol or monitor.iter >= self.n_iter
        # that n_iter is few is known from the monitor, and no degeneration
        monitor.notes = [note for note in fit.notes if "still falling" not in note]
        return history[-1]

    def _log_evidence(self, data: Sequences) -> float:
        return float(self._hmm(data.lengths).log_prob(data.values).sum())

    def _module(self) -> TabularHMM:
        """The arrays as a module whose parameters are points, or frozen."""
        emission = self._emission_module()
        module = TabularHMM(self.n_components, lambda _: emission)
        module.set_points(initial=to_tensor(self.startprob_), transition=to_tensor(self.transmat_))
        sites = {"s": ["initial"], "t": ["transition"]}
        for letter, (_, *names) in self.letters.items():
            sites[letter] = [f"emission.{name}" for name in names if emission.is_free(name)]
        for name in (
            name for letter in sites if letter not in self.params for name in sites[letter]
        ):
            freeze(module, name)
        return module.double()

    def _initialise(self, table: np.ndarray, given: dict[str, Any], seed: Any) -> None:
        """Set what is to start anew, or was not ``given``."""
        chosen = {
            letter
            for letter, attribute in self._attributes().items()
            if letter in self.init_params or attribute not in given
        }
        random = check_random_state(seed)
        even = np.full(self.n_components, 1 / self.n_components)
        if "s" in chosen:
            self.startprob_ = random.dirichlet(even)
        if "t" in chosen:
            self.transmat_ = random.dirichlet(even, size=self.n_components)
        self._start(table, chosen, seed)

    def _check_options(self) -> None:
        """Raise unless options are in their ranges, and no prior is asked for."""
        for name in (name for name in vars(self) if name.endswith(("_prior", "_weight"))):
            value, field = getattr(self, name), type(self).__dataclass_fields__.get(name)
            default: Any = field and field.default
            if field is None or not np.all(np.equal(value, default)):
                none = "left out" if field is None else f"{default}, no prior"
                raise TypeError(
                    f"{name} of a {type(self).__name__} must be {none}; got {value}. Priors are "
                    "those of a module: HMMEstimator(partial(TabularHMM, emission=normal(2, "
                    "loc=0.0, weight=1.0)))."
                )
        check_size("n_components", self.n_components)
        check_size("n_init", self.n_init)
        check_size("n_iter", self.n_iter, 0)
        check_number("tol", self.tol)
        if np.isnan(self.tol):
            raise ValueError("tol must be a gain in nats; got nan.")
        self._by_marginals()
        known = "".join(self._attributes())
        for option in ("params", "init_params"):
            chosen = getattr(self, option)
            if not isinstance(chosen, str) or set(chosen) - set(known):
                raise ValueError(
                    f"{option} must be some of the letters {known!r}, or an empty string; got "
                    f"{chosen!r}."
                )

    # Queries

    def get_stationary_distribution(self) -> np.ndarray:
        """The stationary distribution of ``transmat_``, ``(n_components,)``.

        Raises:
            ValueError: If the chain has several.
        """
        check_is_fitted(self, "transmat_")
        return to_array(stationary(self._rows("transmat_", (self.n_components,) * 2).log()))

    def _hmm(self, lengths: Tensor) -> HMM:
        self._check_options()
        states = self.n_components
        initial = self._rows("startprob_", (states,))
        transition = self._rows("transmat_", (states, states))
        return HMM(initial.log(), transition.log(), self._emission(), lengths)

    def _rows(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Probabilities in an array; raises unless those of each row sum to one."""
        rows = to_tensor(getattr(self, name))
        if tuple(rows.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(rows.shape)}.")
        total = rows.sum(-1)
        if not bool((rows >= 0).all()) or not torch.allclose(total, torch.ones_like(total)):
            raise ValueError(f"{name} must hold probabilities that sum to one in each row.")
        return rows

    def _take(self, hmm: HMM) -> None:
        kept = {  # with the same bits
            name: getattr(self, name)
            for letter, name in self._attributes().items()
            if letter not in self.params
        }
        self.startprob_ = to_array(hmm.log_initial.exp())
        self.transmat_ = to_array(hmm.log_transition.exp())
        self._take_emission(hmm.emission)
        for name, value in kept.items():
            setattr(self, name, value)

    def _attributes(self) -> dict[str, str]:
        """The attribute of each letter."""
        own = {letter: names[0] for letter, names in self.letters.items()}
        return {"s": "startprob_", "t": "transmat_", **own}

    def _probabilities(self) -> dict[str, str]:
        """Letters of the arrays of probabilities, by attribute."""
        return {name: letter for letter, name in self._attributes().items() if letter in "stew"}

    def _num_parameters(self) -> int:
        states = self.n_components
        counts = {"s": states - 1, "t": states * (states - 1), **self._counts()}
        for name, letter in self._probabilities().items():  # what a fit has found zero stays so
            first = getattr(self, "_zeros", {}).get(name, False)
            counts[letter] -= int((first & (np.asarray(getattr(self, name)) == 0)).sum())
        return sum(count for letter, count in counts.items() if letter in self.params)

    def __sklearn_is_fitted__(self) -> bool:
        """Whether all parameters have values, of a fit or set by hand."""
        return all(hasattr(self, name) for name in self._attributes().values())


def to_tensor(values: Any) -> Tensor:
    """A copy in float64."""
    return torch.as_tensor(np.array(values), dtype=torch.float64)


def to_array(tensor: Tensor) -> np.ndarray:
    """A copy in float64."""
    return tensor.detach().double().numpy().copy()
