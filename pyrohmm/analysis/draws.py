r"""``PosteriorDraws``: draws of a posterior as HMMs, whose states have one name in all of them.

There are C chains of S draws. In each of them the states may have other numbers: the posterior of
an HMM does not change when they are renamed, and a sampler or a guide ends at any naming. Averages
of parameters over draws, their R-hat and their effective sample size then mean nothing, although
each draw is sound. There are two cures: rename the states of every draw
(:meth:`PosteriorDraws.aligned`),
or look at quantities in which no name occurs (:func:`invariants`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoContinuous, AutoNormal
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .._checks import check_integers, check_shape, check_size
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical, log_probs
from ..infer.guides import RotationGuide
from ..infer.models import check_returns_hmm, to_model_device
from ..infer.results import Fit, match_states
from ..nn.base import in_mode

# Names of the dimensions of the variables of TabularHMM and DenseHMM.
_KNOWN = {
    "initial": ("state",),
    "transition": ("state", "next_state"),
    "start": ("embedding",),
    "leave": ("state", "embedding"),
    "enter": ("state", "embedding"),
    "emit": ("state", "symbol_embedding"),
    "symbol": ("symbol", "symbol_embedding"),
}
_OF_STATES = ("state", "next_state")  # what is permuted when states are renamed
_CELLS = 2**22  # draws × N × T × K numbers, in one tensor


@dataclass
class PosteriorDraws:
    """C chains of S draws of the latent variables of a model.

    Make them with :meth:`of`, from a fit or from Pyro's ``MCMC``.

    Attributes:
        model: The Pyro model. It must return the HMM it builds, and accept dimensions of draws to
            the left of every latent variable, as all models of this package do.
        values: Latent variables by name, ``(C, S, ...)``.
        stats: What else is known of each draw, by name, ``(C, S)``: ``diverging`` of a sampler;
            ``log_guide``, the log-density of the guide, of SVI.
        dims: Names of the dimensions of a variable, by its name, where they are not to be guessed.
            Those called ``state`` and ``next_state`` are permuted when states are renamed.

    Raises:
        ValueError: If shapes disagree, or ``dims`` do not fit.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
        >>> model = MarginalModel(TabularHMM(2, categorical(6)))
        >>> guide = pyro.infer.autoguide.AutoNormal(model)
        >>> draws = PosteriorDraws.of(fit_svi(model, guide, data, num_steps=10), num_draws=100)
        >>> draws.hmm(data).batch_shape  # chains, draws, sequences
        torch.Size([1, 100, 5])
        >>> draws.aligned(data).values["module.transition"].mean((0, 1)).shape
        torch.Size([2, 2])
    """

    model: Callable[..., Any]
    values: dict[str, Tensor]
    stats: dict[str, Tensor] = field(default_factory=dict)
    dims: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {name: tuple(each.shape[:2]) for name, each in self.values.items()}
        if len(set(shapes.values())) > 1 or any(len(shape) < 2 for shape in shapes.values()):
            raise ValueError(
                "values must have shape (C, S, ...), S draws of each of C chains; they begin with "
                f"{shapes}. Add the dimension of chains with unsqueeze(0)."
            )
        for name, names in self.dims.items():
            own = tuple(self.values[name].shape[2:]) if name in self.values else None
            if own is None or len(names) != len(own):
                raise ValueError(
                    "dims must hold one name for each dimension of a variable; got "
                    f"{name!r}: {tuple(names)}, and variables "
                    f"{ {n: tuple(each.shape[2:]) for n, each in self.values.items()} }."
                )

    @classmethod
    def of(
        cls,
        posterior: Fit | MCMC | Mapping[str, Tensor] | PosteriorDraws,
        model: Callable[..., Any] | None = None,
        *,
        num_draws: int = 1000,
        dims: Mapping[str, Sequence[str]] | None = None,
    ) -> PosteriorDraws:
        """Take draws from what stands for a posterior.

        Args:
            posterior: A :class:`Fit`: one of SVI gives one chain of draws of its guide, one of MAP
                or EM a single draw. Or Pyro's ``MCMC`` after its run. Or draws by name,
                ``(C, S, ...)``.
            model: The Pyro model; needed only if ``posterior`` does not know it.
            num_draws: S, how many to take from a guide.
            dims: See :class:`PosteriorDraws`.

        Raises:
            TypeError: If ``posterior`` is nothing of the above.
            ValueError: If there is no ``model``, or shapes disagree.
        """
        check_size("num_draws", num_draws)
        if isinstance(posterior, PosteriorDraws):
            model = model or posterior.model
            values, stats, dims = posterior.values, posterior.stats, dims or posterior.dims
        elif isinstance(posterior, Fit):
            model = model or posterior.model
            values, stats = _of_fit(posterior, num_draws if posterior.method == "SVI" else 1)
        elif isinstance(posterior, MCMC):
            model = model or posterior.kernel.model
            values, stats = _of_sampler(posterior)
        elif isinstance(posterior, Mapping):
            values, stats = dict(posterior), {}
        else:
            raise TypeError(
                "posterior must be a Fit, Pyro's MCMC, or a dict of draws (C, S, ...); got "
                f"{type(posterior).__name__}."
            )
        if model is None:
            raise ValueError("model must be given, for these draws do not say what they are of.")
        return cls(model, values, stats, dims or {})

    @property
    def shape(self) -> torch.Size:
        """``(C, S)``; one draw if there is no latent variable."""
        return next((each.shape[:2] for each in self.values.values()), torch.Size([1, 1]))

    def thin(self, count: int) -> PosteriorDraws:
        """At most ``count`` draws of each chain, evenly spaced."""
        check_size("count", count)
        total = self.shape[1]
        chosen = torch.linspace(0, total - 1, min(count, total)).round().long()
        values = {name: each[:, chosen] for name, each in self.values.items()}
        stats = {name: each[:, chosen] for name, each in self.stats.items()}
        return replace(self, values=values, stats=stats)

    # Draws as HMMs

    def hmm(self, data: Sequences) -> HMM:
        """All draws as one HMM of batch shape ``(C, S, N)``.

        :meth:`map` goes through many draws in bounded memory. Labels that ``data`` may carry are
        not used.

        Raises:
            TypeError: If the model does not return an HMM.
            ValueError: If the model does not accept draws to the left of its variables.
        """
        data = to_model_device(self.model, None, data)
        self._check(data)
        wide = {name: value.unsqueeze(2) for name, value in self.values.items()}
        return self._run(wide, data).expand(torch.Size([*self.shape, len(data)]))

    def map(
        self, data: Sequences, function: Callable[[HMM], Any], batch_size: int | None = None
    ) -> Any:
        """Apply a function to the HMMs of all draws, some of them at a time.

        Args:
            data: What the HMMs are built for. If they carry labels the HMMs are restricted to them,
                as in the models of this package.
            function: Called with an HMM of batch shape ``(b, N)``, it returns a tensor ``(b, ...)``
                or a dict of such tensors.
            batch_size: b, how many draws at a time; by default such that N T K of them are some
                four million numbers.

        Returns:
            What the function returns, with shape ``(C, S, ...)``.

        Raises:
            TypeError, ValueError: As :meth:`hmm`.

        Example:
            >>> data = datasets.casino(num_sequences=5, num_steps=20).without_labels()
            >>> draws = PosteriorDraws.of(fit_em(TabularHMM(2, categorical(6)), data, num_steps=5))
            >>> draws.map(data, lambda hmm: hmm.log_prob(data.values)).shape
            torch.Size([1, 1, 5])
        """
        data = to_model_device(self.model, None, data)
        num_states = self._check(data).num_states
        if batch_size is None:
            batch_size = max(1, _CELLS // (data.observed.numel() * num_states))
        check_size("batch_size", batch_size)
        parts = []
        for wide, count in self._split(batch_size):
            hmm = self._run(wide, data).expand(torch.Size([count, len(data)]))
            with torch.no_grad():
                parts.append(function(hmm if data.labels is None else hmm.restrict(data.labels)))
        if isinstance(parts[0], Mapping):
            return {
                name: torch.cat([part[name] for part in parts]).unflatten(0, self.shape)
                for name in parts[0]
            }
        return torch.cat(parts).unflatten(0, self.shape)

    def log_prior(self, data: Sequences) -> Tensor:
        """Log-density ``(C, S)`` of each draw under the priors and the factors beside them.

        It is that of the variables themselves (of probabilities, not of their logits). Together
        with the evidence of the sequences it makes the log joint density.
        """
        data = to_model_device(self.model, None, data)[:1]
        self._check(data)
        ((wide, count),) = self._split(self.shape.numel())
        total = torch.zeros(count, dtype=torch.float64, device=data.values.device)
        with torch.no_grad(), poutine.block():
            trace = poutine.trace(poutine.condition(self.model, data=wide)).get_trace(data)
            for name, site in trace.nodes.items():
                factor = isinstance(site.get("fn"), Unit) and not site["cond_indep_stack"]
                if name in self.values or factor:
                    scores = site["fn"].log_prob(site["value"]).double()
                    total += scores.reshape(count, -1).sum(-1) if scores.dim() else scores
        return total.unflatten(0, self.shape)

    def _split(self, size: int) -> Iterator[tuple[dict[str, Tensor], int]]:
        """At most ``size`` draws at a time, ``(b, 1, ...)`` by name; and how many they are."""
        wide = {name: value.flatten(0, 1).unsqueeze(1) for name, value in self.values.items()}
        total = self.shape.numel()
        for begin in range(0, total, size):
            some = {name: value[begin : begin + size] for name, value in wide.items()}
            yield some, min(size, total - begin)

    def _run(self, values: dict[str, Tensor], data: Sequences) -> HMM:
        """The HMM of the model with these values of its variables."""
        with torch.no_grad(), poutine.block(), in_mode(False, self.model):
            return check_returns_hmm(poutine.condition(self.model, data=values)(data))

    def _check(self, data: Sequences) -> HMM:
        """Raise unless draws side by side are what they are one by one; return the first."""
        data = data[:1]
        wide, count = next(self._split(3))
        singles = [
            self._run({name: each[i, 0] for name, each in wide.items()}, data) for i in range(count)
        ]
        self._check_names({name: each[0, 0] for name, each in wide.items()}, data)
        wanted = torch.stack([single.log_prob(data.values) for single in singles])
        try:
            found = self._run(wide, data).expand(torch.Size([count, 1])).log_prob(data.values)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        except (ValueError, RuntimeError, IndexError, AssertionError) as error:
            raise ValueError(
                "model must accept dimensions of draws to the left of its variables, and give each "
                "draw what it gives to it alone; this one does not. Count dimensions from the "
                "right: write matrix[..., 0, :], not matrix[0]."
            ) from error
        return singles[0]

    def _check_names(self, values: dict[str, Tensor], data: Sequences) -> None:
        """Raise unless the values are those of the model's latent variables, all of them."""
        with torch.no_grad(), poutine.block():
            conditioned = poutine.condition(self.model, data=values)
            nodes = poutine.trace(conditioned).get_trace(data).nodes
        unknown = [name for name in values if name not in nodes]
        missing = [
            name
            for name, site in nodes.items()
            if site["type"] == "sample" and not site["is_observed"]
            and not site_is_subsample(site) and site["infer"].get("enumerate") != "parallel"
        ]  # fmt: skip
        if unknown or missing:
            raise ValueError(
                "values must be of the latent variables of the model, all of them; it has no "
                f"{', '.join(map(repr, unknown)) or 'other'}, and draws of "
                f"{', '.join(map(repr, missing)) or 'none'} are missing. Names in a model begin "
                "with 'module.'."
            )

    # Names of states

    def aligned(self, data: Sequences) -> PosteriorDraws:
        """The same draws with their states renamed, such that a name means one thing in all.

        Raises:
            TypeError, ValueError: As :meth:`hmm` and :meth:`permute_states`.
        """
        return self.permute_states(self.align(data), data)

    def align(self, data: Sequences) -> Tensor:
        """Which state of a common naming each state of each draw corresponds to.

        States are matched where posteriors overlap most (:func:`pyrohmm.results.match_states`):
        first with those of the draw of the largest evidence, then with the average of all draws so
        matched, until no name changes. Where the data do not tell two states apart, or never visit
        them, the match is arbitrary.

        Args:
            data: Where posteriors are compared.

        Returns:
            ``(C, S, K)`` integers: state k of a draw gets the name ``names[c, s, k]``.

        References:
            Dealing with label switching in mixture models (Stephens, 2000), where the loss is
            another.
        """
        data = to_model_device(self.model, None, data)
        evidence = self.map(data, lambda hmm: hmm.log_prob(data.values).sum(-1))
        best = int(evidence.argmax())
        values = {name: each.flatten(0, 1)[best, None, None] for name, each in self.values.items()}
        one = replace(self, values=values, stats={})
        reference = one.map(data, lambda hmm: hmm.posterior(data.values).states)[0, 0]
        names = torch.empty(0)
        for _ in range(10):
            average = torch.zeros_like(reference)

            def match(hmm: HMM, reference: Tensor = reference, average: Tensor = average) -> Tensor:
                states = hmm.posterior(data.values).states
                found = match_states(states, reference)
                order = found.argsort(-1).to(states.device)[:, None, None]
                average += states.gather(-1, order.expand(states.shape)).sum(0)
                return found

            before, names, reference = names, self.map(data, match), average
            if torch.equal(before, names):
                break
        return names

    def permute_states(self, names: Tensor, data: Sequences) -> PosteriorDraws:
        """The same draws with their states under other names.

        The dimensions of variables that run over states are known for the modules of this package,
        and guessed for others from their sizes; what is known or guessed is put to the test.

        Args:
            names: ``(C, S, K)`` integers, as from :meth:`align`.
            data: What the model can be run on.

        Raises:
            ValueError: If the renamed variables do not make the HMM with its states renamed, or if
                priors tell states apart, so that their names have a meaning already.
        """
        data = to_model_device(self.model, None, data)
        hmm = self._check(data)
        check_integers("names", names)
        check_shape("names", names, (*self.shape, hmm.num_states), "(C, S, K)")
        dims = self.named_dims(data)
        self._check_dims(dims, data)
        order = names.argsort(-1)
        values = {name: _permute(each, dims[name], order) for name, each in self.values.items()}
        return replace(self, values=values)

    def named_dims(self, data: Sequences) -> dict[str, tuple[str, ...]]:
        """Names of the dimensions of each variable: ``state``, ``next_state``, ``symbol``, ..."""
        hmm = self._run({n: v[0, 0] for n, v in self.values.items()}, data[:1])
        num_symbols = log_probs(hmm.emission).size(-1) if is_categorical(hmm.emission) else 0
        found = {}
        for name, value in self.values.items():
            shape = tuple(value.shape[2:])
            path = name.split(".")
            names = [f"{name}_dim_{i}" for i in range(len(shape))]
            if name in self.dims:
                names = list(self.dims[name])
            elif path[-1] in _KNOWN and len(_KNOWN[path[-1]]) == len(shape):
                names = list(_KNOWN[path[-1]])
            elif shape[:1] == (hmm.num_states,):
                names[0] = "state"
                if shape == (hmm.num_states,) * 2 and "emission" not in path:
                    names[1] = "next_state"
                elif len(shape) == 2 and shape[1] == num_symbols:
                    names[1] = "symbol"
            found[name] = tuple(names)
        return self._told_apart(found)

    def _told_apart(self, dims: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """The same names, with those of the module before a name that has another size already."""
        sizes: dict[str, int] = {}
        for name, names in dims.items():
            path, own = name.rpartition(".")[0], []
            for each, size in zip(names, self.values[name].shape[2:]):
                clash = sizes.setdefault(each, size) != size and name not in self.dims
                own.append(f"{path}.{each}" if clash else each)
                sizes.setdefault(own[-1], size)
            dims[name] = tuple(own)
        return dims

    def _check_dims(self, dims: Mapping[str, Sequence[str]], data: Sequences) -> None:
        """Raise unless renaming variables by ``dims`` renames the states, and priors allow it."""
        first = {name: value[:1, :1] for name, value in self.values.items()}
        hmm = self._run({name: value[0, 0] for name, value in first.items()}, data)
        order = torch.arange(hmm.num_states).roll(1)
        moved = {n: _permute(v, dims[n], order[None, None]) for n, v in first.items()}
        try:
            found = self._run({name: value[0, 0] for name, value in moved.items()}, data)
            for own, wanted in zip(
                found.log_factors(data.values), hmm.permute_states(order).log_factors(data.values)
            ):
                torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-3)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(
                "states can be renamed only if it is known which dimensions of variables run over "
                f"them; taken as {dims}, the HMM is not what it was with its states renamed. Name "
                "them: PosteriorDraws.of(..., dims={'matrix': ('state', 'next_state')}); if states "
                "share "
                "parameters, their names have a meaning already."
            ) from error
        before, after = (replace(self, values=each, stats={}).log_prior(data)
                         for each in (first, moved))  # fmt: skip
        if not torch.allclose(before, after, rtol=1e-4, atol=1e-3):
            raise ValueError(
                "states can be renamed only if priors do not tell them apart; here the log prior "
                f"of a draw changes from {before.item():.4f} to {after.item():.4f} with their "
                "names. They have a meaning already: compare draws as they are."
            )


def invariants(hmm: HMM, values: Tensor) -> dict[str, Tensor]:
    r"""What can be said of an HMM and of data without naming a state.

    Such quantities are the same whatever the order of the states, so that R-hat, effective sample
    sizes and intervals of them mean what they say.

    Args:
        hmm: Of batch shape ``(*b, N)``; N sequences are taken together.
        values: ``(N, T, *E)``, observations.

    Returns:
        By name: ``log_evidence`` ``(*b)``, of all sequences, in nats; ``occupancy`` ``(*b, K)``,
        the shares of the steps that are spent in the states, largest first;
        ``effective_states`` ``(*b)``, the exponential of the entropy of these shares, which is K if
        all states are used alike; and, unless transitions change with the step, ``move_entropy``
        ``(*b)``, the entropy of the next state given this one, averaged over steps, in nats.

    Example:
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, Categorical(logits=even), torch.tensor([3, 1]))
        >>> invariants(hmm, torch.zeros(2, 3).long())["effective_states"]
        tensor(2., dtype=torch.float64)
    """
    with torch.no_grad():
        posterior = hmm.posterior(values)
        visits = posterior.states.double().sum(-2)  # (*b, N, K)
        visits = visits / visits.sum((-2, -1), keepdim=True)
        shares = visits.sum(-2)
        found = {
            "log_evidence": posterior.log_evidence.double().sum(-1),
            "effective_states": torch.special.entr(shares).sum(-1).exp(),
        }
        if not hmm.transition_per_step:
            entropy = torch.special.entr(hmm.log_transition.double().exp()).sum(-1)
            found["move_entropy"] = (visits * entropy).sum((-2, -1))
        return found | {"occupancy": shares.sort(-1, descending=True).values}


def _permute(value: Tensor, dims: Sequence[str], order: Tensor) -> Tensor:
    """Permute the dimensions of states of ``value`` ``(C, S, ...)`` by ``order`` ``(C, S, K)``."""
    order = order.to(value.device)
    for place, name in enumerate(dims, start=2):
        if name in _OF_STATES:
            shape = [1] * value.dim()
            shape[:2], shape[place] = order.shape[:2], order.size(-1)
            value = value.gather(place, order.reshape(shape).expand(value.shape))
    return value


def _of_fit(fit: Fit, num_draws: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One chain of draws of the guide; of SVI also its log-density at each."""
    inner = fit.guide.inner if isinstance(fit.guide, RotationGuide) else fit.guide
    with torch.no_grad(), fit.at_rest():
        first = poutine.trace(fit.guide).get_trace(None)
        plain = not any(site.get("cond_indep_stack") for site in first.nodes.values())
        if plain and isinstance(inner, AutoNormal | AutoContinuous):  # these draw side by side
            with pyro.plate("draws", num_draws, dim=-2):
                trace = poutine.trace(fit.guide).get_trace(None)
            trace.compute_log_prob()
            values = {name: trace.nodes[name]["value"].squeeze(1) for name in fit.names}
            scores = torch.stack(
                [site["log_prob"] for site in trace.nodes.values() if site["type"] == "sample"]
            ).sum((0, 2))
        else:
            traces = [poutine.trace(fit.guide).get_trace(None) for _ in range(num_draws)]
            values = {
                name: torch.stack([trace.nodes[name]["value"] for trace in traces])
                for name in fit.names
            }
            scores = torch.stack([torch.as_tensor(trace.log_prob_sum()) for trace in traces])
    stats = {"log_guide": scores.double()[None]} if fit.method == "SVI" else {}
    return {name: value.detach()[None] for name, value in values.items()}, stats


def _of_sampler(mcmc: MCMC) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Chains of a sampler, and which of their draws end a trajectory that diverged."""
    values = mcmc.get_samples(group_by_chain=True)
    shape = next(iter(values.values())).shape[:2]
    reports = mcmc.diagnostics() if shape[1] >= 4 else {}  # fewer have no diagnostics
    if "divergences" not in reports:
        return values, {}
    diverging = torch.zeros(shape, dtype=torch.bool)
    for chain in range(shape[0]):
        diverging[chain, reports["divergences"][f"chain {chain}"]] = True
    return values, {"diverging": diverging}
