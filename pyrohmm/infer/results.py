"""Results of a fit: the fitted model, its restarts, and tables of estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from pyro.ops.stats import quantile
from torch import Tensor
from torch.distributions import constraints

from .._checks import WORDS, all_names_checked, check_kind, check_probs, check_size
from ..data.sequences import Sequences, check_sequences
from ..data.steps import read_times
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM
from ..distributions.sparse import interior
from ..nn.base import PYRO, in_mode
from ..ops.backends import advise_numba
from .bands import Bands, predictions
from .coordinates import POINT, columns_of
from .descent import Validation
from .models import to_model_device
from .objective import site_losses
from .parameters import fitted_in
from .plates import (
    SequencePlate,
    check_fitted,
    hmm_at,
    repeatable,
    samples_of,
    wide,
)
from .replicates import Bootstrap, bootstrap, match_states, profile_interval
from .uncertainty import Covariance, Information, NoMaximum, entry_names

SLOW = 10.0  # seconds
WINDOW = 25  # steps whose mean loss is compared with that of the steps before

ROUNDED = 0.05  # nats, from which on it is told that means are rounded
COLUMNS = ("estimate", "std_error", "lower", "upper")  # of a table of parameters
NONE = 1e-6  # limits this near to zero and one say nothing
FLAT = 8.0  # a logit beyond it is of a probability below 0.0004


@dataclass(repr=False)
class Fit:
    """A fitted model, with a point estimate or an approximate posterior of its parameters.

    Attributes:
        model: The Pyro model.
        guide: The approximate posterior: a point for MAP and EM, a distribution for SVI.
        losses: ``(num_iterations,)``, at each step, in nats for the whole set: minus the log joint
            density for MAP and EM, minus the evidence lower bound for SVI.
        converged: Whether a convergence test ended the fit: that of the losses, or ``patience``.
        reason: Why it ended, in words.
        seconds: Wall-clock time of the fit.
        num_observed: Number of observed steps it was fitted to; of pairs, for co-occurrences.
        names: Names of the latent variables.
        params: The parameter store at the end of the fit, without what modules carry. If the model
            or the guide is a function with ``pyro.param`` statements, call it inside
            ``pyro.get_param_store().scope(fit.params)``.
        notes: Remarks worth knowing, such as that no sequence visits some state.
        restarts: All restarts, if there were several; the other attributes are of the best one.
        method: "MAP", "SVI" or "EM".
        window: Number of last losses whose mean is reported: 1 if they have no noise.
        validation: Held-out evidence at each :class:`Validation`, if there was some; model and
            guide have the parameters of the best one.
        supports: Space of each latent variable, by name.
        unit: What ``num_observed`` counts: "observed step", or "pair" of adjacent symbols.
        parameters: One value of each latent variable, by name, always the same: the estimate of MAP
            and EM; the median of the guide of SVI, or one sample if the guide has no median.
            Variables of which each sequence has one have shape ``(N, ...)``. And points.
        plates: Of these variables, by name.
        marks: Marks by which the sequences are recognised, if there are such variables.
        history: ``log_likelihood``, the log evidence of the data, and ``log_prior``, in nats at
            each step, ``(num_iterations,)``.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    losses: Tensor
    converged: bool
    reason: str
    seconds: float
    num_observed: int
    names: list[str] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=lambda: {"params": {}, "constraints": {}})
    notes: list[str] = field(default_factory=list)
    restarts: Restarts | None = None
    method: str = "SVI"
    window: int = WINDOW
    validation: list[Validation] = field(default_factory=list)
    supports: dict[str, constraints.Constraint] = field(default_factory=dict)
    unit: str = "observed step"
    parameters: dict[str, Tensor] = field(default_factory=dict)
    plates: dict[str, SequencePlate] = field(default_factory=dict)
    marks: Tensor | None = None
    history: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = [n.removesuffix(POINT) for n, _ in fitted_in(self.model) if n.endswith(POINT)]
        points = {name: attrgetter(name)(self.model).detach().clone() for name in own}
        self.parameters = points | self.parameters
        rounded = _rounded(self.parameters, self.num_observed)
        self.notes = [*self.notes, *(note for note in rounded if note not in self.notes)]
        if self.seconds > SLOW and all(x.device.type == "cpu" for x in self.parameters.values()):
            advise_numba()

    def __repr__(self) -> str:
        last = f", {self.losses[-1].item():.2f} nats" if len(self.losses) else ""
        return (
            f"Fit({self.method} of {model_name(self.model)} to {self.num_observed:,} {self.unit}s; "
            f"{self.num_steps} steps{last}; {self.reason})"
        )

    @property
    def num_steps(self) -> int:
        """Number of steps taken: EM has a loss before each, and one at the end."""
        return len(self.losses) - (self.method == "EM")

    @property
    def start(self) -> dict[str, Tensor]:
        """Initial values for another fit: weights, and ``parameters`` inside their supports.

        EM may end at probabilities of zero, where gradient steps cannot start:
        ``AutoNormal(model, init_loc_fn=init_to_value(values=fit.start))``.
        """
        weights = {n: p.detach() for n, p in fitted_in(self.model) if not n.endswith(POINT)}
        return weights | {
            name: interior(self.supports[name], value) if name in self.supports else value
            for name, value in self.parameters.items()
        }

    def samples(self, num_samples: int = 1000, data: Sequences | None = None) -> dict[str, Tensor]:
        """Samples of the approximate posterior of SVI: ``(S, ...)``, by name.

        Args:
            num_samples: S.
            data: The sequences that were fitted, for a guide of your own that reads them.

        Raises:
            ValueError: If the fit is one of MAP or EM, a single point.

        Example:
            >>> data = Sequences.from_list([[1, 1, 0]])
            >>> model = MarginalModel(TabularHMM(1, categorical(2)))
            >>> guide = pyro.infer.autoguide.AutoNormal(model)
            >>> fit = fit_svi(model, guide, data, num_iterations=10)
            >>> fit.samples(100)["module.emission.probs"].shape
            torch.Size([100, 1, 2])
        """
        check_size("num_samples", num_samples)
        if self.method != "SVI":
            raise ValueError(
                f"samples and quantiles are of fit_svi, fit_mcmc and fit_gibbs; a fit by "
                f"{self.method} has a single point, fit.parameters."
            )
        with torch.no_grad(), self.at_rest():
            return samples_of(self.guide, self.names, num_samples, data)[0]

    def mean(self, num_samples: int = 1000, data: Sequences | None = None) -> dict[str, Tensor]:
        """Posterior means of SVI by name, over :meth:`samples`; two calls give the same.

        Means of variables that belong to states are meaningful as long as the guide keeps to one
        order of the states, as autoguides do.
        """
        with repeatable():
            return {name: value.mean(0) for name, value in self.samples(num_samples, data).items()}

    def quantiles(
        self,
        probs: Sequence[float] | Tensor = (0.05, 0.5, 0.95),
        num_samples: int = 1000,
        data: Sequences | None = None,
    ) -> dict[str, Tensor]:
        """Posterior quantiles of SVI, component by component: ``(Q, ...)``, by name.

        Those of 0.05 and 0.95 bound the central interval of 90 %. Two calls give the same.

        Args:
            probs: Q numbers between 0 and 1, in a list, a tensor or an array.
            num_samples: As in :meth:`samples`.
            data: The same.

        Example:
            >>> data = Sequences.from_list([[1, 1, 0]])
            >>> model = MarginalModel(TabularHMM(1, categorical(2)))
            >>> guide = pyro.infer.autoguide.AutoNormal(model)
            >>> fit = fit_svi(model, guide, data, num_iterations=10)
            >>> low, high = fit.quantiles([0.05, 0.95])["module.emission.probs"]
            >>> bool((low < high).all())
            True
        """
        wanted = check_probs("probs", probs)
        with repeatable():
            samples = self.samples(num_samples, data)
        return {name: quantile(value, wanted.to(value)) for name, value in samples.items()}

    def hmm(self, data: Sequences) -> HMM:
        """The fitted HMM for ``data``, at ``parameters``; its tensors have no gradient.

        If each sequence has variables of its own, ``data`` are the sequences that were fitted, or a
        part of them, ``data.batch(numbers)``. Other steps of the same subjects say whose they are:
        ``Sequences(values, lengths, indices=numbers)``.

        Labels that ``data`` may have are not used: ``fit.hmm(data).viterbi(data.values)`` can be
        compared with them. ``fit.hmm(data).restrict(data.labels)`` keeps to them, as the fit did.

        Raises:
            TypeError: If the model does not return an HMM.
            ValueError: If sequences have variables of their own, and these are others.
        """
        return self.hmms([data])[0]

    def predict(self, data: Sequences, algorithm: str = "viterbi") -> Tensor:
        """Decode the state of each step, packed ``(M,)``: one sequence after the other.

        That is the order of the sequences and of their times, not that of the rows of a table:
        ``data.to_dataframe(states=fit.predict(data))`` are its rows with their states; of padded
        ``(N, T)`` tensors ask the HMM: ``fit.hmm(data).viterbi(data)``. Labels are not used, so
        that predictions can be compared with them; to keep to them ask
        ``fit.hmm(data).restrict(data.labels)``.

        Args:
            data: The sequences, fitted or new.
            algorithm: "viterbi", the most probable path; or "map", at each step the most probable
                state.

        Example:
            >>> data = Sequences.from_list([[0, 0, 1, 1], [1]])
            >>> fit = fit_em(TabularHMM(1, categorical(2)), data)
            >>> fit.predict(data), fit.predict_proba(data).shape, fit.forecast(data, 3).probs.shape
            (tensor([0, 0, 0, 0, 0]), torch.Size([5, 1]), torch.Size([2, 3, 2]))
        """
        check_sequences("data", data)
        if not isinstance(algorithm, str) or algorithm not in ("viterbi", "map"):
            text = "algorithm must be 'viterbi' or 'map'; got"
            came = repr(algorithm) if isinstance(algorithm, str) else type(algorithm).__name__
            other = " At other values of covariates: fit.bands(data, at)."
            raise ValueError(f"{text} {came}.{'' if data.covariates is None else other}")
        if algorithm == "map":
            return self.predict_proba(data).argmax(-1)
        return self._steps(data, lambda hmm, part: hmm.viterbi(part.values))

    def predict_proba(self, data: Sequences) -> Tensor:
        r"""Smoothed state probabilities :math:`p(z_t \mid x_{1:T})` of each step, ``(M, K)``.

        Packed, one sequence after the other: ``data.to_dataframe(probs=fit.predict_proba(data))``.
        Labels are not used: see :meth:`predict`.
        """
        return self._steps(data, lambda hmm, part: hmm.posterior(part.values).state_probs)

    def score(self, data: Sequences) -> float:
        r"""Log evidence of all sequences, :math:`\sum_n \log p(x_n)`, in nats.

        Labels are not used: with them it is that of
        ``fit.hmm(data).restrict(data.labels).log_prob(data.values)``, as in ``metrics.bic``.
        """
        parts = self._placed(data).buckets
        return float(sum(self.hmm(part).log_prob(part.values).double().sum() for part in parts))

    def forecast(self, data: Sequences, num_steps: int = 1, times: Any = None) -> Forecast:
        """Predictive distributions of the next H observations of each sequence: see `HMM.forecast`.

        Args:
            data: The sequences so far.
            num_steps: H.
            times: ``(N, H)``, or ``(H,)`` for all, in the unit of those of the data, or dates: when
                they are. Of continuous time, which needs them, and has no ``num_steps``.

        Returns:
            A distribution of batch shape ``(N, H)``, with ``mean``, ``interval(0.9)``, ``sample``;
            its ``to_dataframe(data)`` is a table with keys and times.

        Raises:
            ValueError: If times are not given in continuous time, or given elsewhere.
        """
        data = self._placed(data)
        hmm: Any = self.hmm(data)
        if isinstance(hmm, ContinuousTimeHMM) != (times is not None):
            wanted = "times=, (N, H)" if times is None else "num_steps="
            raise ValueError(f"forecasts of {type(hmm).__name__} need {wanted}. Give that alone.")
        if times is not None:
            return hmm.forecast(data.values, read_times(times))
        return hmm.forecast(data.values, num_steps)

    def _placed(self, data: Sequences) -> Sequences:
        """Data of a query, on the device of the model."""
        check_sequences("data", data)
        return to_model_device(self.model, self.guide, data)

    def _steps(self, data: Sequences, query: Callable[[HMM, Sequences], Tensor]) -> Tensor:
        """Answers of the fitted HMM for all steps, packed ``(M, *)``, in the order of the rows."""
        return self._placed(data).map_steps(lambda part: query(self.hmm(part), part))

    if not TYPE_CHECKING:  # which knows the attributes there are

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}."
            near = get_close_matches(name, dir(type(self)) + list(self.__dict__), 1, 0.75)
            if name in WORDS or (near and name[0] != "_"):
                text += f" Did you mean {WORDS.get(name, near)[0]}?"
            if hasattr(HMM, name) or name in ("chain", "lengths"):
                text += f" Queries take an HMM: fit.hmm(data).{name}"
            raise AttributeError(text)

    def hmms(self, parts: list[Sequences]) -> list[HMM]:
        """Fitted HMMs, one for each part of some data."""
        for part in parts:
            check_fitted(part, self.marks)
        with self.at_rest():
            return [hmm_at(self.model, self.parameters, part, self.plates) for part in parts]

    def parts(self, data: Sequences) -> dict[str, Tensor]:
        """Terms of the final loss by name, in nats for the whole data set.

        Those of the model are minus log-densities by the name of their site: of the sequences
        (``x`` in the models of this package), of each latent variable, and of further factors, such
        as ``log_prior``, that of a diversity prior. For SVI they are those of one sample of the
        guide, whose log-densities are those named ``guide: ...``. Their sum is the loss: for EM
        the last of ``losses``, for MAP that of a step more. Nothing is computed until it is
        asked for.

        Args:
            data: The sequences; others than those of the fit give the parts of a held-out loss.

        Raises:
            ValueError: If the model enumerates its states: no site of it has the likelihood alone;
                or if sequences have variables of their own, and these are others.

        Example:
            >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
            >>> module = TabularHMM(2, categorical(2, 1.1), 1.1, 1.1)
            >>> fit = fit_em(module, data, log_prior=DiversityPrior(2.0))
            >>> parts = fit.parts(data)
            >>> sorted(name.removeprefix("module.") for name in parts)
            ['emission.probs', 'initial', 'log_prior', 'transition', 'x']
            >>> abs(sum(parts.values()) - fit.losses[-1]) < 1e-3
            tensor(True)
        """
        check_fitted(data, self.marks)
        with torch.no_grad(), self.at_rest():
            return site_losses(self.model, self.guide, data, with_guide=self.method == "SVI")

    def information(self, data: Sequences) -> Information:
        """Observed information of a fit of EM or MAP: covariance, standard errors and intervals.

        Args:
            data: The sequences that were fitted, with the labels that the fit kept to.

        Raises:
            ValueError: If the fit is one of SVI or of chains, which have quantiles; or if the
                data do not determine some parameters, which the message names.

        Example:
            >>> _ = pyro.set_rng_seed(0)
            >>> data = Sequences.from_list([torch.randn(400)])
            >>> fit = fit_em(TabularHMM(1, normal(0)), data)
            >>> fit.std_errors(data)["module.emission.loc"]
            tensor([0.0490], dtype=torch.float64)
        """
        if self.method not in ("EM", "MAP"):
            raise ValueError(f"no sample of {self.method} is the maximum: ask fit.quantiles().")
        check_sequences("data", data)
        with self.at_rest():
            try:
                return Information(self.model, self.parameters, self.supports, data)
            except NoMaximum as error:
                if self.converged:
                    raise
                cure = f"More iterations: the fit has not converged ({self.reason})"
                raise NoMaximum(f"{cure}. As it is, {error}") from None

    def std_errors(self, data: Sequences) -> dict[str, Tensor]:
        """Standard errors of the parameters by name, from the observed information."""
        return self.information(data).std_errors()

    def covariance(self, data: Sequences) -> Covariance:
        """Covariance of all parameter entries, from the observed information; with names."""
        return self.information(data).natural()

    def bootstrap(
        self, data: Sequences, num_samples: int = 200, parametric: bool = True
    ) -> Bootstrap:
        """Fit the model to B data sets that are simulated or resampled, as one batch.

        Each of them is climbed from the fit to the maximum near it, all at once, so that states
        keep their numbers. Replicates that do not converge, and those in which the posterior of
        some state is more like that of another state of the fit, are counted and left out.

        Args:
            data: The sequences that were fitted.
            num_samples: B.
            parametric: Whether data sets are simulated from the fit, with the lengths, the missing
                steps and the covariates of the data; else whole sequences are resampled, which
                does not trust the model, and needs many of them, some 50.

        Raises:
            ValueError: As :meth:`information`; or if sequences have variables of their own.

        Example:
            >>> _ = pyro.set_rng_seed(0)
            >>> data = Sequences.from_list([torch.randn(400)])
            >>> fit = fit_em(TabularHMM(1, normal(0)), data)
            >>> fit.bootstrap(data)
            Bootstrap(200 replicates; 0 have not converged, in 0 states have changed places)
        """
        if self.plates:
            raise ValueError(
                f"sequences have {min(self.plates)!r} of their own; fit_laplace integrates it out"
            )
        with self.at_rest():
            return bootstrap(self.information(data), num_samples, parametric)

    def intervals(
        self,
        data: Sequences,
        level: float = 0.95,
        of: Callable[[HMM], Tensor] | str | None = None,
        method: str = "delta",
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Limits of the parameters by name, or of a function ``of`` the fitted HMM under "of".

        Args:
            data: The sequences that were fitted.
            level: Of confidence.
            of: From an :class:`HMM` to a tensor, such as ``lambda hmm: hmm.stationary()``; or the
                name of one entry of a parameter, such as "module.transition[0, 1]".
            method: "delta", from the curvature: see :meth:`Information.intervals`. "bootstrap",
                quantiles over 200 simulated data sets: see :meth:`bootstrap`, which takes their
                number and can resample sequences. "profile", from the likelihood ratio of one
                entry, whose name ``of`` is.

        Example:
            >>> data = Sequences.from_list([torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 1, 1])])
            >>> fit = fit_em(TabularHMM(1, categorical(2)), data)
            >>> name = "module.emission.probs[0, 0]"
            >>> low, high = fit.intervals(data, of=name, method="profile")[name]
            >>> print(f"{low:.3f} {high:.3f}")
            0.036 0.499
        """
        if method not in ("delta", "bootstrap", "profile"):
            raise ValueError(f'method must be "delta", "bootstrap" or "profile"; got {method!r}.')
        if (method == "profile") != isinstance(of, str):
            text = (
                "of must be a function, such as lambda hmm: hmm.log_transition.exp(), or with "
                f'method="profile" the name of one entry, such as "module.rate[0]"; got {of!r}'
            )
            raise ValueError(f"{text}. Of a whole parameter take fit.intervals(data)[name].")
        with self.at_rest():
            if isinstance(of, str):
                return {of: profile_interval(self.information(data), of, level)}
            found: Any = self.bootstrap if method == "bootstrap" else self.information
            return found(data).intervals(level, of)

    def table(self, data: Sequences, level: float = 0.95) -> dict[str, list[Any]]:
        """Estimates of all parameters, with standard errors and limits, as columns of a table.

        ``pandas.DataFrame(fit.table(data))`` is the table; ``fit.summary(data)`` has it as text.
        Coefficients have the names of their columns.

        Args:
            data: The sequences that were fitted.
            level: Of confidence.
        """
        with self.at_rest():
            information = self.information(data)
            errors, limits = information.std_errors(), information.intervals(level)
        parts = {
            part.name: dict(zip(COLUMNS, (part.estimate, errors[part.name], *limits[part.name])))
            for part in information.coordinates
        }
        return columns_of(parts, information.names)

    def bands(
        self,
        data: Sequences,
        at: Any,
        of: str | Callable[[HMM], Tensor] = "transition",
        level: float = 0.95,
    ) -> Bands:
        """Predictions at other values of the covariates, with limits by the delta method.

        Limits of probabilities are symmetric in the logit, those of means of observations that are
        not negative in the logarithm, all others in the number itself.

        Args:
            data: The sequences that were fitted.
            at: ``(M, C)`` covariates, such as ``design.matrix(frame)``; for one part of the model
                ``design.matrix(frame, "transition")``, which needs no columns of the others.
            of: "transition", probabilities ``(M, K, K)``; "initial", ``(M, K)``; "mean", those of
                the emissions, ``(M, K)``; "rates", ``(M, K, K)``, zero on the diagonal; "duration",
                the mean, ``(M, K)``; or a function of an HMM of M sequences of two steps, each with
                one row of the covariates at both, and a unit of time between them.
            level: Of confidence.

        Raises:
            ValueError: If ``at`` has other columns than the covariates of ``data``, or ``of`` is
                what the model has not.
        """
        with self.at_rest():
            return predictions(self.information(data), at, of, level, data)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Context with the fitted parameters in Pyro's store, and modules in ``eval()`` mode."""
        with PYRO, pyro.get_param_store().scope(dict(self.params)), poutine.block():
            with in_mode(False, self.model, self.guide):
                yield

    def summary(self, data: Sequences | None = None) -> str:
        """Summary as text: the model, its loss, and why the fit ended.

        Args:
            data: The sequences that were fitted, for a table of the estimates with standard errors
                and limits: see :meth:`table`; "-" where there are none, with the reason below.
        """
        text = described(self)
        if data is not None:
            try:
                rows = lines(self.table(data))
            except ValueError as error:
                parts = {name: {"estimate": value} for name, value in self.parameters.items()}
                columns = columns_of(parts, entry_names(self.model))
                columns |= {name: [math.nan] * len(columns["parameter"]) for name in COLUMNS[1:]}
                rows = [*formatted(columns), f"no standard errors: {error}"]
            text += ["", *rows]
        return "\n".join(text)


@dataclass(repr=False)
class Restarts:
    """Batched restarts: fits of one model from R initial values.

    Attributes:
        model: The Pyro model, or the module.
        losses: ``(R, num_iterations)``, in nats; infinite where a restart has failed.
        final: ``(R,)``, the loss by which restarts are compared.
        parameters: Latent variables by name, ``(R, ...)``.
        best: The restart of least final loss.
        plated: Those that are inside a plate of the model.
        plates: Those of which each sequence has one.
        marks: See :class:`Fit`.
    """

    model: Callable[..., Any]
    losses: Tensor
    final: Tensor
    parameters: dict[str, Tensor]
    best: int
    plated: frozenset[str] = frozenset()
    plates: dict[str, SequencePlate] = field(default_factory=dict)
    marks: Tensor | None = None

    def __repr__(self) -> str:
        losses, name = self.final, model_name(self.model)
        return (
            f"Restarts({len(losses)} of {name}; losses {losses.min().item():,.4f} to "
            f"{losses.max().item():,.4f} nats, the least is that of {self.best})"
        )

    def hmm(self, data: Sequences) -> HMM:
        """The fitted HMMs of all restarts, as one HMM of batch shape ``(R, N)``."""
        check_fitted(data, self.marks)
        values = wide(self.parameters, self.plated)
        with PYRO, in_mode(False, self.model):
            hmm = hmm_at(self.model, values, data, self.plates)
        return hmm.expand(torch.Size([len(self.final), len(data)]))

    def align(self, data: Sequences) -> Tensor:
        """Match the states of all restarts to those of the best one.

        Args:
            data: Sequences whose posteriors are compared; see :func:`match_states`.

        Returns:
            ``(R, K)`` integers; row ``best`` is 0, 1, ..., K - 1.
        """
        states = self.hmm(data).posterior(data.values).state_probs  # (R, N, T, K)
        matched = match_states(states, states[self.best])
        matched[self.best] = torch.arange(matched.size(-1))
        return matched


def check_fit(fit: object) -> None:
    """Raise unless ``fit`` is a :class:`Fit`."""
    cure = "Data, where they are wanted, come after it."
    check_kind("fit", fit, Fit, "a Fit, such as fit_em returns", cure)


# Tables -------------------------------------------------------------------------------------------


def formatted(columns: Mapping[str, list]) -> list[str]:
    """Format the rows of a table as lines of text; "-" for what is not a number."""
    wide = max((len(name) for name in columns["parameter"]), default=0)
    rows = [["", *list(columns)[1:]]]
    for name, *rest in zip(*columns.values()):
        rows.append([name, *("-" if math.isnan(x) else f"{x:.4g}" for x in rest)])
    return [f"{name:{wide}}" + "".join(f"{x:>11}" for x in rest) for name, *rest in rows]


def lines(columns: Mapping[str, list]) -> list[str]:
    """Format a table as lines of text, with remarks on entries that say nothing."""
    text = formatted(columns)
    ends = zip(columns["parameter"], columns["estimate"], columns["std_error"])
    held = [name for name, x, error in ends if abs(x) > FLAT and not error <= abs(x)]
    if held:
        text.append(
            f"at the boundary, where limits say nothing: {', '.join(held)} (a logit or a logarithm "
            "that has run away: a probability or a rate of zero)"
        )
    loose = [
        name
        for name, x, error, low, high in zip(*columns.values())
        if (0 <= low < NONE and high > 1 - NONE)
        or (math.isnan(error) and NONE < abs(x) <= FLAT and abs(x - 1) > NONE)
    ]
    if loose:
        text.append(
            f"not determined by the data, with limits of all of the range or none: "
            f"{', '.join(loose)} (fewer states or columns, or a prior)"
        )
    return text


def described(fit: Any) -> list[str]:
    """Summary as lines of text: the model, its loss, and why the fit ended."""
    count, tokens, unit = min(fit.window, len(fit.losses)), fit.num_observed, fit.unit.split()[-1]
    first, last = fit.losses[0].item(), fit.losses[-count:].mean().item()
    over = f", mean of the last {count} steps" if fit.window > 1 else ""
    guide = f" with {name_of(fit.guide)}" if fit.method == "SVI" else ""
    module = getattr(fit.model, "module", None)
    model = name_of(fit.model) + (f" of {name_of(module)}" if module is not None else "")
    text = [
        f"{fit.method} of {model}{guide}: {', '.join(fit.names) or 'parameters'}",
        f"loss      {first:.2f} -> {last:.2f} nats{over}",
        f"loss per {unit} {last / max(tokens, 1):.4f} nats; {tokens:,} {fit.unit}s",
        f"ended     after {fit.num_steps} steps and {fit.seconds:.1f} s: {fit.reason}",
    ]
    if fit.validation:
        best = min(fit.validation, key=lambda past: past.nats)
        text.append(
            f"held out  {best.nats:.4f} nats per step, the best of {len(fit.validation)} "
            f"validations, at step {best.step}"
        )
    if fit.restarts is not None:
        ends = fit.restarts.final.sort().values
        text.append(
            f"restarts  {len(ends)}, losses {ends[0].item():.2f} (best), "
            f"{ends.median().item():.2f} (median), {ends[-1].item():.2f} (worst)"
        )
    text += [f"note      {note}" for note in fit.notes]
    return text


def model_name(model: Any) -> str:
    """The name of a model, or of the module that it is of."""
    return name_of(getattr(model, "module", None) or model)


def name_of(part: Any) -> str:
    """Name of a function, or of an object's class."""
    return getattr(part, "__name__", type(part).__name__)


def _rounded(parameters: dict[str, Tensor], num_observed: int) -> list[str]:
    r"""Remarks on float32 means whose rounding costs :math:`n \epsilon^2 \mu^2 / 24 \sigma^2`."""
    notes = []
    for name, loc in parameters.items():
        variance = parameters.get(name.removesuffix("loc") + "variance")
        covariance = parameters.get(name.removesuffix("loc") + "covariance")
        if covariance is not None:
            variance = covariance.diagonal(dim1=-2, dim2=-1)
        if loc.dtype != torch.float32 or variance is None:
            continue
        if name.endswith(".loc") and variance.shape == loc.shape:
            share = (torch.finfo(loc.dtype).eps * loc).square() / variance / 24
            if num_observed * share.mean(0).sum() > ROUNDED:
                text = f"{name} about {loc.abs().max():.6g} is rounded in {loc.dtype}, visibly"
                notes += [f"{text}: subtract an origin from the data, or give module.double()"]
    return notes


all_names_checked(globals())
