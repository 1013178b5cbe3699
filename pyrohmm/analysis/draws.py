r"""``PosteriorDraws``: samples of a posterior as HMMs with aligned states.

There are C chains of S samples. In each of them the states may have other numbers: the posterior of
an HMM does not change when they are permuted, and a sampler or a guide ends at any order. Averages
of parameters over samples, their R-hat and their effective sample size then mean nothing, although
each sample is sound. There are two cures: permute the states of every sample
(:meth:`PosteriorDraws.aligned`), or look at quantities that depend on no order
(:func:`invariants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pyro.infer import MCMC
from pyro.ops.stats import quantile
from torch import Tensor

from .._checks import all_names_checked, check_integers, check_kind, check_shape, check_size
from ..data.sequences import Sequences
from ..distributions.hard_zeros import log_probs
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..distributions.structured_hmm import FactorialHMM
from ..infer.coordinates import columns_of
from ..infer.importance import sample_new
from ..infer.layouts import Layout, Model, arranged, layout_of, log_prior, run
from ..infer.models import to_model_device
from ..infer.plates import (
    check_fitted,
    marks_of,
    samples_of,
    sequence_plates,
    shared,
    wide,
)
from ..infer.replicates import match_states
from ..infer.results import Fit, formatted
from ..infer.sampled import SampledFit, summary_of
from ..io.files import FilePath, grouped, read_directory
from ..io.persistence import describe

GUIDE = "independent samples of a guide: there are no chains that could disagree"
MOST = 100  # rows of a summary
CELLS = 2**22  # samples × N × T × K numbers, in one tensor
# Where they come from ----------------------------------------------------------------------------


def _of_fit(
    fit: Fit, num_draws: int, data: Sequences | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Samples ``(C, S, ...)`` and per-sample statistics of a fit; its own chains if it was sampled.

    Of SVI one chain of samples of the guide, with their log-density; of MAP and EM the point.
    """
    if isinstance(fit, SampledFit):
        return fit.chains, fit.stats
    if fit.method != "SVI":
        return {name: fit.parameters[name][None, None] for name in fit.names}, {}
    with torch.no_grad(), fit.at_rest():
        values, scores = samples_of(fit.guide, fit.names, num_draws, data)
    return {n: value[None] for n, value in values.items()}, {"log_guide": scores.double()[None]}


def _of_sampler(
    mcmc: MCMC, model: Model
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Chains of Pyro's ``MCMC``, divergent samples, and fingerprints of the sequences."""
    values = mcmc.get_samples(group_by_chain=True)
    shape = next(iter(values.values())).shape[:2]
    reports = mcmc.diagnostics() if shape[1] >= 4 else {}  # fewer have no diagnostics
    stats = {}
    if "divergences" in reports:
        stats["diverging"] = torch.zeros(shape, dtype=torch.bool)
        for chain in range(shape[0]):
            stats["diverging"][chain, reports["divergences"][f"chain {chain}"]] = True
    # Pyro keeps the arguments of run
    arguments = (*getattr(mcmc, "_args", ()), *getattr(mcmc, "_kwargs", {}).values())
    data = next((part for part in arguments if isinstance(part, Sequences)), None)
    plated = data is not None and sequence_plates(model, to_model_device(model, None, data))
    return values, stats, marks_of(data) if data is not None and plated else None


# Which dimensions run over states ----------------------------------------------------------------

# Names of the dimensions of the variables of TabularHMM, DenseHMM and others.
KNOWN_DIMS = {
    "initial": ("state",),
    "transition": ("state", "next_state"),
    "rates": ("state", "next_state"),
    "start": ("embedding",),
    "leave": ("state", "embedding"),
    "enter": ("state", "embedding"),
    "emit": ("state", "symbol_embedding"),
    "symbol": ("symbol", "symbol_embedding"),
}
STATE_DIMS = ("state", "next_state")  # what is permuted when states are renamed


def _dims_of(
    variable: str, shape: tuple[int, ...], num_states: int, num_symbols: int
) -> tuple[str, ...]:
    """Names of the dimensions of a variable: ``state``, ``next_state``, ``symbol``, ...

    A first dimension of ``num_states`` is taken for states; ``num_symbols`` is zero if observations
    are not symbols.
    """
    path, names = variable.split("."), [f"{variable}_dim_{i}" for i in range(len(shape))]
    known = KNOWN_DIMS.get(path[-1], ())
    if len(known) == len(shape) > 0:
        return known
    if shape[:1] == (num_states,):
        names[0] = "state"
        if shape == (num_states,) * 2 and "emission" not in path:
            names[1] = "next_state"
        elif len(shape) == 2 and shape[1] == num_symbols:
            names[1] = "symbol"
    return tuple(names)


def permute_dims(value: Tensor, dims: Sequence[str], order: Tensor) -> Tensor:
    """Permute the dimensions of states of ``value`` ``(C, S, ...)`` by ``order`` ``(C, S, K)``."""
    order = order.to(value.device)
    for place, name in enumerate(dims, start=2):
        if name in STATE_DIMS:
            shape = [1] * value.dim()
            shape[:2], shape[place] = order.shape[:2], order.size(-1)
            value = value.gather(place, order.reshape(shape).expand(value.shape))
    return value


@dataclass(repr=False)
class PosteriorDraws:
    """C chains of S samples of latent variables, made by :meth:`of` from a fit or Pyro's ``MCMC``.

    Attributes:
        model: The Pyro model. It must return the HMM it builds, and accept dimensions of samples
            to the left of every latent variable, as all models of this package do.
        parameters: Latent variables by name, ``(C, S, ...)``; of sequences ``(C, S, N, ...)``.
        stats: What else is known of each sample, by name, ``(C, S)``: ``diverging`` of a sampler;
            ``log_guide``, the log-density of the guide, of SVI.
        dims: Names of the dimensions of a variable, by its name, where they are not to be guessed.
            Those called ``state`` and ``next_state`` are permuted with the states.
        marks: Marks by which the sequences are recognised, if each has variables of its own.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
        >>> model = MarginalModel(TabularHMM(2, categorical(6)))
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> draws = PosteriorDraws.of(fit_svi(model, guide, data, num_iterations=10), num_draws=100)
        >>> draws.aligned(data).parameters["module.transition"].mean((0, 1)).shape
        torch.Size([2, 2])
    """

    model: Callable[..., Any]
    parameters: dict[str, Tensor]
    stats: dict[str, Tensor] = field(default_factory=dict)
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)
    marks: Tensor | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        sizes = "{} chains of {} samples".format(*self.shape)
        return f"PosteriorDraws({sizes} of {', '.join(self.parameters)})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.summary()}" if self.shape[1] > 3 else repr(self)

    def __post_init__(self) -> None:
        shapes = {name: tuple(value.shape[:2]) for name, value in self.parameters.items()}
        if len(set(shapes.values())) > 1 or any(len(shape) < 2 for shape in shapes.values()):
            text = f"parameters must have shape (C, S, ...), chains first; they begin with {shapes}"
            raise ValueError(f"{text}. Add a chain by unsqueeze(0).")

    @classmethod
    def of(
        cls,
        posterior: Fit | MCMC | Mapping[str, Tensor] | PosteriorDraws,
        model: Callable[..., Any] | None = None,
        *,
        num_draws: int = 1000,
        dims: Mapping[str, Sequence[str]] | None = None,
        data: Sequences | None = None,
    ) -> PosteriorDraws:
        """Take samples from a fit, from a sampler's run or from a dict.

        Args:
            posterior: A :class:`Fit`: one of Gibbs sampling or HMC gives its chains, one of SVI one
                chain of samples of its guide, one of MAP or EM a single sample. Or Pyro's ``MCMC``
                after its run. Or samples by name, ``(C, S, ...)``.
            model: The Pyro model; needed only if ``posterior`` does not know it.
            num_draws: S, how many to take from a guide.
            dims: See :class:`PosteriorDraws`.
            data: The sequences that were fitted, for a guide of your own that reads them.

        Raises:
            TypeError: If ``posterior`` is nothing of the above.
            ValueError: If there is no ``model``, or shapes disagree.
        """
        marks = getattr(posterior, "marks", None)
        if isinstance(posterior, PosteriorDraws):
            model = model or posterior.model
            values, stats, dims = posterior.parameters, posterior.stats, dims or posterior.dims
        elif isinstance(posterior, Fit):
            model = model or posterior.model
            values, stats = _of_fit(posterior, num_draws, data)
        elif isinstance(posterior, MCMC):
            model = model or posterior.kernel.model
            values, stats, marks = _of_sampler(posterior, model)
        else:
            wanted = "a fit, MCMC or a dict of samples"
            check_kind("posterior", posterior, Mapping, wanted, "The data come after it.")
            values, stats = dict(posterior), {}
        if model is None:
            raise ValueError("model must be given beside samples: of(samples, model); got None.")
        return cls(model, values, stats, dims or {}, marks)

    @property
    def shape(self) -> torch.Size:
        """Numbers of chains and samples, ``(C, S)``; ``(1, 1)`` if there is no latent variable."""
        return next((value.shape[:2] for value in self.parameters.values()), torch.Size([1, 1]))

    def thin(self, count: int) -> PosteriorDraws:
        """At most ``count`` samples of each chain, evenly spaced."""
        check_size("count", count)
        chosen = torch.linspace(0, self.shape[1] - 1, min(count, self.shape[1])).round().long()
        return self._changed(lambda value: value[:, chosen])

    def _changed(self, change: Callable[[Tensor], Tensor]) -> PosteriorDraws:
        """Copy with ``change`` applied to all tensors ``(C, S, ...)``."""
        values = {name: change(value) for name, value in self.parameters.items()}
        stats = {name: change(value) for name, value in self.stats.items()}
        return replace(self, parameters=values, stats=stats)

    def summary(self) -> str:
        """Summary as text: whether chains agree; of a guide, a table of at most 100 entries."""
        if "log_guide" not in self.stats:
            return "\n".join(summary_of(self.parameters))
        table = table_of(self.parameters, (0.05, 0.5, 0.95))
        rows = formatted({name: column[:MOST] for name, column in table.items()})
        return "\n".join([GUIDE, *rows])

    # Samples as HMMs

    def hmm(self, data: Sequences) -> HMM:
        """All samples as one HMM of batch shape ``(C, S, N)``.

        :meth:`map` goes through many samples in bounded memory. Labels that ``data`` may carry are
        not used. If each sequence has variables of its own, ``data`` are the sequences that were
        fitted or a part of them, ``data.batch(numbers)``; for others see :meth:`for_new`.

        Raises:
            TypeError: If the model does not return an HMM.
            ValueError: If the model does not accept samples to the left of its variables, or
                sequences have variables of their own and ``data`` are others.
        """
        data, layout, _ = self._check(data)
        hmm = run(self.model, wide(self.parameters, layout.batched, 2), data, layout)
        return hmm.expand(torch.Size([*self.shape, len(data)]))

    def for_new(self, data: Sequences, num_candidates: int = 1) -> PosteriorDraws:
        """Copy for new sequences, with per-sequence variables sampled from their prior.

        Each sample gets them given its values of the shared variables. With several candidates they
        are conditioned on the data, too, by adaptive importance sampling: 200 do for a few numbers
        of a sequence, and a dozen take thousands. The likelihood is that of the returned HMM.

        Warns:
            UserWarning: If few candidates are effective for a sequence: fewer than 10.

        Raises:
            ValueError: If no variable is one of a sequence.

        Example:
            >>> def model(data):
            ...     even = torch.full((2, 2), 0.5).log()
            ...     with pyro.plate("subjects", data.total, subsample=data.indices):
            ...         face = pyro.sample("face", Dirichlet(torch.ones(2, 3)).to_event(1))
            ...         hmm = HMM(even[0], even, Categorical(face), data.lengths)
            ...         pyro.sample("x", hmm, obs=data.values)
            ...     return hmm
            >>> new = Sequences.from_list([[2, 1]])
            >>> draws = PosteriorDraws.of({"face": torch.full((1, 4, 3, 2, 3), 1 / 3)}, model)
            >>> draws.for_new(new).map(new, lambda hmm: hmm.log_prob(new.values)).shape
            torch.Size([1, 4, 1])
        """
        check_size("num_candidates", num_candidates)
        data = to_model_device(self.model, None, data)
        if not (plates := layout_of(self.model, self._one(), data).plates):
            text = "for_new needs a model with variables inside the plate of sequences"
            raise ValueError(f"{text}; this one has none, and its draws are those of any data.")
        known = shared(self.parameters, plates)
        known |= sample_new(self.model, known, self.shape, data, plates, num_candidates)
        # the density of a guide is not known of new variables; they are independent as before
        stats = {n: x * torch.nan for n, x in self.stats.items() if n == "log_guide"}
        return replace(self, parameters=known, stats=stats, marks=marks_of(data))

    def map(
        self, data: Sequences, function: Callable[[HMM], Any], batch_size: int | None = None
    ) -> Any:
        """Apply a function to the HMMs of all samples, some of them at a time.

        Args:
            data: What the HMMs are built for. If they carry labels the HMMs are restricted to them,
                as in the models of this package.
            function: Called with an HMM of batch shape ``(b, N)``, it returns a tensor ``(b, ...)``
                or a dict of such tensors.
            batch_size: b, how many samples at a time; by default such that N T K of them are some
                four million numbers.

        Returns:
            What the function returns, with shape ``(C, S, ...)``.

        Example:
            >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
            >>> fit = fit_em(TabularHMM(2, categorical(6)), data, num_iterations=5)
            >>> draws = PosteriorDraws.of(fit)
            >>> draws.map(data, lambda hmm: hmm.log_prob(data.values)).shape
            torch.Size([1, 1, 5])
        """
        data, layout, first = self._check(data)
        parts = []
        for values, count in self._split(batch_size or _room(data, first)):
            hmm = run(self.model, wide(values, layout.batched), data, layout)
            hmm = hmm.expand([count, len(data)])
            with torch.no_grad():
                parts.append(function(hmm if data.labels is None else hmm.restrict(data.labels)))
        if isinstance(parts[0], Mapping):
            return {name: self._joined([part[name] for part in parts]) for name in parts[0]}
        return self._joined(parts)

    def log_prior(self, data: Sequences) -> Tensor:
        """Log prior density of each sample ``(C, S)``, ``pyro.factor`` terms included.

        It is that of the variables themselves (of probabilities, not of their logits). Together
        with the evidence of the sequences it makes the log joint density.
        """
        data, layout, first = self._check(data)
        parts = [
            log_prior(self.model, wide(values, layout.batched), data, layout, count)
            for values, count in self._split(_room(data, first))
        ]
        return self._joined(parts)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).unflatten(0, self.shape)

    def _one(self) -> dict[str, Tensor]:
        """First sample of the first chain, by name."""
        return {name: value[0, 0] for name, value in self.parameters.items()}

    def _split(self, size: int) -> Iterator[tuple[dict[str, Tensor], int]]:
        """Iterate over batches of at most ``size`` samples ``(b, ...)`` by name, with b."""
        for some in torch.arange(self.shape.numel()).split(size):
            first, last = int(some[0]), int(some[-1]) + 1
            parts = {name: x.flatten(0, 1)[first:last] for name, x in self.parameters.items()}
            yield parts, len(some)

    def _check(self, data: Sequences) -> tuple[Sequences, Layout, HMM]:
        """Raise unless batched samples give the densities of single ones; data, layout, HMM."""
        data = to_model_device(self.model, None, data)
        check_fitted(data, self.marks)
        return data, *arranged(self.model, *next(self._split(3)), data)

    # The order of states

    def aligned(self, data: Sequences) -> PosteriorDraws:
        """Copy with the states of each sample permuted to a common order.

        Raises:
            TypeError, ValueError: As :meth:`hmm` and :meth:`permute_states`.
        """
        return self.permute_states(self.align(data), data)

    def align(self, data: Sequences) -> Tensor:
        """Match the states of each sample to a common order, which undoes label switching.

        States are matched where posteriors overlap most
        (:func:`~pyrohmm.infer.replicates.match_states`): first with those of the sample of the
        largest evidence, then with the average of all samples so matched, until no match changes.
        Where the data do not tell two states apart, or never visit them, the match is arbitrary.

        Args:
            data: Where posteriors are compared.

        Returns:
            ``(C, S, K)`` integers: state k of a sample gets the number ``names[c, s, k]``.

        References:
            Dealing with label switching in mixture models (Stephens, 2000), where the loss is
            another.
        """
        data = to_model_device(self.model, None, data)
        best = int(self.map(data, lambda hmm: hmm.log_prob(data.values).sum(-1)).argmax())
        one = self._changed(lambda value: value.flatten(0, 1)[best, None, None])
        reference = one.map(data, lambda hmm: hmm.posterior(data.values).state_probs)[0, 0]
        names = torch.empty(0)
        for _ in range(10):
            average = torch.zeros_like(reference)

            def match(hmm: HMM, reference: Tensor = reference, average: Tensor = average) -> Tensor:
                states = hmm.posterior(data.values).state_probs
                matched = match_states(states, reference)
                order = matched.argsort(-1).to(states.device)[:, None, None]
                average += states.gather(-1, order.expand(states.shape)).sum(0)
                return matched

            before, names, reference = names, self.map(data, match), average
            if torch.equal(before, names):
                break
        return names

    def permute_states(self, names: Tensor, data: Sequences) -> PosteriorDraws:
        """Copy with the states of each sample renumbered.

        The dimensions of variables that run over states are known for the modules of this package,
        and guessed for others from their sizes; what is known or guessed is put to the test.

        Args:
            names: ``(C, S, K)`` integers, as from :meth:`align`.
            data: What the model can be run on.

        Raises:
            ValueError: If the permuted variables do not make the HMM with its states permuted, or
                if priors tell states apart, so that their order has a meaning already.
        """
        data, _, hmm = self._check(data)
        check_integers("names", names)
        check_shape("names", names, (*self.shape, hmm.num_states), "(C, S, K)")
        dims = self.named_dims(data)
        self._check_dims(dims, data)
        order = names.argsort(-1)
        values = {
            name: permute_dims(value, dims[name], order) for name, value in self.parameters.items()
        }
        return replace(self, parameters=values)

    def named_dims(self, data: Sequences) -> dict[str, tuple[str, ...]]:
        """Names of the dimensions of each variable: ``state``, ``next_state``, ``symbol``, ..."""
        layout = layout_of(self.model, self._one(), data)
        hmm = run(self.model, self._one(), data, layout)
        num_symbols = log_probs(hmm.emission).size(-1) if is_categorical(hmm.emission) else 0
        sequences = {plate.name: "sequence" for plate in layout.plates.values()}
        named = {}
        for name, value in self.parameters.items():
            plates, shape = layout.inside.get(name, ()), tuple(value.shape[2:])
            if name not in layout.plates and hmm.num_states in shape[: len(plates)]:
                plates = ()  # of states
            own = _dims_of(name, shape[len(plates) :], hmm.num_states, num_symbols)
            named[name] = (*(sequences.get(plate, plate) for plate in plates), *own)
        return named | {name: tuple(dims) for name, dims in self.dims.items() if name in named}

    def _check_dims(self, dims: Mapping[str, Sequence[str]], data: Sequences) -> None:
        """Raise unless permuting variables by ``dims`` permutes the states, and priors allow it."""
        data, layout, hmm = self._check(data)
        first = {name: value[:1, :1] for name, value in self.parameters.items()}
        if isinstance(hmm, FactorialHMM):
            text = "states must be of one chain to be permuted; a FactorialHMM has several"
            raise ValueError(f"{text}. Compare what depends on no order: invariants(hmm, values).")
        order = torch.arange(hmm.num_states).roll(1)  # which moves them all
        permuted = {n: permute_dims(v, dims[n], order[None, None]) for n, v in first.items()}
        try:
            other = run(self.model, {n: v[0, 0] for n, v in permuted.items()}, data, layout)
            wanted = hmm.permute_states(order)
            pairs = zip(other.chain.parameters.values(), wanted.chain.parameters.values())
            seen = (each.log_likelihood(data.values) for each in (other, wanted))
            for factor, expected in (*pairs, tuple(seen)):
                torch.testing.assert_close(factor, expected, rtol=1e-3, atol=1e-3)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(
                "states can be permuted only if it is known which dimensions run over them, and if "
                f"they share no parameters; not so as {dims}. Name them: PosteriorDraws.of(..., "
                "dims={'matrix': ('state', 'next_state')})."
            ) from error
        both = (replace(self, parameters=values, stats={}) for values in (first, permuted))
        before, after = (one.log_prior(data) for one in both)
        if not torch.allclose(before, after, rtol=1e-4, atol=1e-3):
            text = "priors must be alike for all states, to permute them; their log-density changes"
            cure = "Chains that disagree are in different modes: give start=, or a longer warmup."
            raise ValueError(f"{text}. The order has a meaning. {cure}")


def table_of(parameters: Mapping[str, Tensor], probs: Sequence[float]) -> dict[str, list[Any]]:
    """Columns of means, standard deviations and quantiles of variables ``(C, S, ...)``."""
    flat = {name: value.flatten(0, 1).double() for name, value in parameters.items()}
    return columns_of({
        name: {"mean": x.mean(0), "sd": x.std(0)}
        | {f"{100 * q:g}%": quantile(x, q) for q in probs} for name, x in flat.items()
    })  # fmt: skip


@describe.register
def _(draws: PosteriorDraws) -> tuple[dict[str, Tensor], dict[str, Any]]:
    marks = {} if draws.marks is None else {"": draws.marks}
    parts = {"parameters": draws.parameters, "stats": draws.stats, "marks": marks}
    tensors = {f"{part}.{n}": x for part, all_of in parts.items() for n, x in all_of.items()}
    return tensors, {"kind": "draws", "dims": {n: list(d) for n, d in draws.dims.items()}}


def load_draws(directory: FilePath, model: Model) -> PosteriorDraws:
    """Load samples that :func:`pyrohmm.save` has written, for the model that they are of.

    Args:
        directory: Where ``save(PosteriorDraws.of(fit), directory)`` has put them.
        model: The Pyro model, whose code is not saved; a module with parameters without priors has
            their values: see :func:`pyrohmm.load_into`.

    Raises:
        FileNotFoundError: If nothing was saved there.
        ValueError: If the files are damaged, or hold something else.

    Example:
        >>> draws = PosteriorDraws.of({"bias": torch.rand(2, 5, 3)}, lambda data: None)
        >>> directory = getfixture("tmp_path") / "draws"
        >>> save(draws, directory)
        >>> load_draws(directory, draws.model)
        PosteriorDraws(2 chains of 5 samples of bias)
    """
    tensors, meta = read_directory(directory, "draws")
    parts = {"parameters": {}, **grouped(tensors)}
    marks = parts.pop("marks", {}).get("")
    return PosteriorDraws(model, **parts, dims=meta["dims"], marks=marks)


def invariants(hmm: HMM, values: Tensor) -> dict[str, Tensor]:
    r"""Quantities of an HMM and of data that do not depend on the order of the states.

    R-hat, effective sample sizes and intervals of them are meaningful.

    Args:
        hmm: Of batch shape ``(*b, N)``; N sequences are taken together.
        values: ``(N, T, *E)``, observations.

    Returns:
        By name: ``log_evidence`` ``(*b)``, of all sequences, in nats; ``occupancy`` ``(*b, K)``,
        the shares of the steps that are spent in the states, largest first;
        ``effective_states`` ``(*b)``, the exponential of the entropy of these shares, which is K if
        all states are used alike; and, unless transitions change with the step,
        ``transition_entropy`` ``(*b)``, the entropy of the next state given this one, averaged over
        steps, in nats; of an :class:`HSMM`, of the state of the next segment.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Categorical(logits=even), torch.tensor([3, 1]))
        >>> invariants(hmm, torch.zeros(2, 3).long())["effective_states"]
        tensor(2., dtype=torch.float64)
    """
    with torch.no_grad():
        posterior = hmm.posterior(values)
        usage = posterior.state_probs.double().sum(-2)  # (*b, N, K)
        usage = usage / usage.sum((-2, -1), keepdim=True)
        shares = usage.sum(-2)
        quantities = {
            "log_evidence": posterior.log_evidence.double().sum(-1),
            "effective_states": torch.special.entr(shares).sum(-1).exp(),
        }
        if not hmm.transition_per_step:
            entropy = torch.special.entr(hmm.log_transition.double().exp()).sum(-1)
            quantities["transition_entropy"] = (usage * entropy).sum((-2, -1))
        return quantities | {"occupancy": shares.sort(-1, descending=True).values}


def _room(data: Sequences, hmm: HMM) -> int:
    """Number of samples per batch for which S N T K stays near four million."""
    return max(1, CELLS // (data.observed.numel() * hmm.num_states))


all_names_checked(globals())
