r"""``fit_gibbs``: samples of the posterior by paths given parameters, and parameters given paths.

Each sweep samples the paths :math:`z \mid x, \theta` of all sequences exactly (forward filtering,
backward sampling), then the parameters :math:`\theta \mid x, z` from their conjugate posteriors.
Paths are those of buckets of similar length, whose counts are summed.
All chains are one batch. A part of the model says how its parameters are sampled, by the method
``sample_parameters`` beside ``statistics``: see :class:`pyrohmm.nn.closed_form.ConjugateSampler`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import reduce
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import pyro
import torch
from torch import Tensor

from .._checks import names_checked
from .._choices import threads_for
from ..chains.base import ExpectedCounts
from ..chains.markov import MarkovRecursions
from ..data.sequences import Sequences, check_sequences
from ..distributions.hmm import HMM
from ..distributions.observation import is_categorical
from ..nn.base import HMMModule
from ..nn.closed_form import ConjugateSampler, Statistics, has_foreign_priors, inside, under
from ..nn.family import Emission
from ..ops import recursions
from .maximization import joined, observations
from .mcmc import Hamiltonian, Moved, Tuning
from .models import MarginalModel, check_module, exclusive, to_model_device
from .parameters import Parameters, Values
from .results import Fit
from .sampled import Chains, SampledFit
from .starts import Start, by_kmeans, check_restarts, from_prior, seen_by

CHUNK = 1 << 18  # numbers of states whose statistics are summed at once
WHOLE = 1e-3  # how far counts of a path may be from whole numbers, by rounding


@names_checked
@exclusive()
def fit_gibbs(
    module: HMMModule,
    data: Sequences,
    *,
    num_samples: int = 1000,
    num_chains: int = 16,
    warmup: int = 500,
    start: Start | Values | Fit | None = None,
    num_temperatures: int = 1,
    values: Tensor | None = None,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
    name: str | None = None,
) -> SampledFit:
    r"""Sample the posterior :math:`p(\theta \mid x)` by Gibbs sampling, all chains as one batch.

    The priors are those of the module, and every parameter must have one (or be frozen). States are
    sampled and not kept: ask :meth:`PosteriorDraws.map` for their posterior. Torch's global source
    of randomness is used: ``pyro.set_rng_seed``.

    Args:
        module: Builds the HMM, such as a :class:`TabularHMM`. It is copied.
        data: The sequences. Labels restrict the states.
        num_samples: S, kept of each chain, one after each sweep.
        num_chains: C.
        warmup: Number of sweeps before the first sample.
        start: The first parameters, one for each chain: as of :func:`fit_em`; or a :class:`Fit`,
            whose ``values`` are those of all chains. Sweeps from there leave the start soon, but
            not a mode that is far from all others.
        num_temperatures: R. With more than one, each of the C chains is the coldest of R whose
            emissions have powers b of their densities, from zero, where parameters are samples of
            the prior, to one; neighbours swap places, so that the coldest visits all modes, and
            :meth:`SampledFit.marginal_likelihood` is known. A sweep takes R times as long or more.
        values: ``(D, N, T, *E)``, observations of D data sets that differ from ``data`` in nothing
            else, such as simulated ones: the first C / D chains are of the first, and so on.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to resume from: see :func:`fit_svi`.
        name: Of the fit, which its checkpoint must have.

    Raises:
        TypeError: If ``module`` is not an ``HMMModule``.
        ValueError: If a parameter has no prior, or a number is out of range.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> fit = fit_gibbs(TabularHMM(2, categorical(2)), data, num_samples=50, warmup=50)
        >>> fit.chains["module.transition"].shape
        torch.Size([16, 50, 2, 2])
    """
    arguments = dict(locals())
    check_module(module)
    check_sequences("data", data)
    sampler = Gibbs(module, data, arguments)
    parameters = sampler.parameters
    cost = parameters.cost * data.lengths.sum().item()
    with torch.no_grad(), pyro.validation_enabled(False), threads_for(cost):
        sampler.run(arguments)
    sampler.impute(False)
    supports = {f"module.{site}": space for site, space in parameters.supports.items()}
    return sampler.fit(MarginalModel(parameters.module), data, supports, method="Gibbs")


def _check_sets(values: Tensor, data: Sequences, num_chains: int, units: float) -> None:
    """Raise unless replicate values match ``data``, the number of chains, and fixed-unit priors."""
    same = values.shape[1:] == data.values.shape and not num_chains % len(values)
    if not same or bool((values.isnan() != data.values.isnan()).any()):
        text = f"values must be (D, N, T, *E), D a divisor of {num_chains}, NaN where data are"
        raise ValueError(f"{text}; got shape {tuple(values.shape)} for {tuple(data.values.shape)}.")
    if units:
        text = "priors of module must not be in the unit of data where values differ between chains"
        raise ValueError(f"{text}. Give numbers, such as normal(2, loc=0.0, scale=1.0).")


class PartialCounts(ValueError):
    """A path does not say how often each parameter of its chain was used."""


class Gibbs(Chains):
    """Sweeps over the paths and the parameters of all chains.

    Args:
        module: Builds the HMM; it is copied.
        data: The sequences.
        arguments: Of the fit, by name.

    Attributes:
        parameters: Those of the chains, as batched restarts.
    """

    def __init__(self, module: Any, data: Sequences, arguments: dict[str, Any]) -> None:
        super().__init__(to_model_device(module, None, data), arguments)
        if self.ladder.size > 1 and data.labels is not None:
            text = "data must have no labels if num_temperatures > 1"
            raise ValueError(f"{text}: use without_labels().")
        self.parameters = parameters = Parameters(copy.deepcopy(module), data, self.copies, None)
        if parameters.points:
            text = "every parameter must have a prior"
            raise ValueError(f"{text}: give one by PyroSample, or freeze it.")
        if self.copies > 1:
            check_restarts(parameters)
        if (values := arguments["values"]) is not None:
            _check_sets(values, data, len(self.ladder.rungs), parameters.units)
        self.data, module = cast(Sequences, parameters.data), parameters.module
        self.num_sets = 1 if values is None else len(values)
        fixed = parameters.example.num_steps != parameters.probe.num_steps  # of so many steps
        self.parts = [self.data] if fixed else self.data.buckets
        self.pairs: list[tuple[HMM, Sequences]] = []
        if values is not None:
            self.data = self.data.with_total(self.data.total)
            several = values.repeat_interleave(self.copies // self.num_sets, 0)
            self.data.values = several if self.num_sets > 1 else values[0]
            self.parts = [self.data]
        emission: Any = module.emission_module()
        conjugate = isinstance(emission, ConjugateSampler)
        conjugate = conjugate and not has_foreign_priors(cast(Any, emission))
        if self.ladder.size > 1 and conjugate:  # a power of a sum is no sum of powers
            parts = (part for part in emission.modules() if isinstance(part, Emission))
            every = [part.values for part in self.parts]
            conjugate = not any(part.augments(some) for part in parts for some in every)
        self.emission: Any = emission if conjugate else None
        names = {id(part): f"{name}." for name, part in module.named_modules()}
        self.prefix = names.get(id(self.emission), "")
        foreign = has_foreign_priors(module, but=module.emission_module())
        conjugate = isinstance(module, ConjugateSampler) and not foreign
        self.chain: Any = module if conjugate else None
        self.others: Others | None = None
        self.impute(True)

    def impute(self, sampled: bool) -> None:
        """Set whether emission statistics use samples of hidden quantities, not expectations."""
        for part in self.parameters.module.modules():
            if isinstance(part, Emission):
                part.imputes = sampled

    def begin(self, start: Start | Values | Fit | None) -> None:
        """Set the first parameters, and find out which of them have conjugate posteriors."""
        parameters, module = self.parameters, self.parameters.module
        start = start.parameters if isinstance(start, Fit) else start
        if start is None:
            categorical = is_categorical(parameters.example.emission)
            start = from_prior if categorical or self.emission is None else by_kmeans
        some = seen_by(start, self.data) if self.num_sets == 1 else self.data
        given = parameters.probe if start is from_prior else some  # of many sets of values, too
        begin = start if isinstance(start, dict) else start(module, given, parameters.restarts)
        if isinstance(start, dict) and self.ladder.size > 1:  # one for each ladder, or for all
            begin = {name: self._for_ladders(name, value) for name, value in start.items()}
        known = begin if isinstance(begin, dict) else None
        parameters.set_values(known or from_prior(module, parameters.probe, parameters.restarts))
        hmm, _ = parameters.build(some)
        if isinstance(begin, dict):
            states = hmm.sample_states(some.values)
        else:
            probs = begin.state_probs if isinstance(begin, ExpectedCounts) else begin
            if hmm.allowed is not None:
                probs = (probs * hmm.allowed).clamp(min=1e-30) * hmm.allowed
            shape = parameters.restarts, *probs.shape[-3:]
            states = torch.multinomial(probs.expand(shape).flatten(0, -2), 1).reshape(shape[:-1])
        paths = [(hmm, states.reshape(parameters.restarts, len(some), -1), some)]
        try:
            samples = self._sample_parameters(paths)
        except PartialCounts:  # the chain's parameters have Hamiltonian steps
            self.chain = None
            samples = self._sample_parameters(paths)
        if known is None:
            parameters.update(samples)
        others = [name for name in parameters.sites if name not in samples]
        self.others = Others(others, self) if others else None

    def _for_ladders(self, name: str, value: Tensor) -> Tensor:
        """Repeat starting values ``(C, ...)`` over the ladder of each chain; leave a single one."""
        site = self.parameters.sites.get(name.removeprefix("module."))
        one = site is None or value.dim() == len(site.event_shape)
        return value if one else value.repeat_interleave(self.ladder.size, 0)

    def step(self) -> None:
        """One Gibbs sweep: sample paths given parameters, then parameters given paths."""
        parameters = self.parameters
        if self.others is not None and self.losses:
            self.others.step()
        prior = self.build()
        states, evidence = self._sample_paths(self.ladder.own)
        coldest, index, works = self.ladder.coldest, self.index, None
        if self.ladder.size > 1:
            states, works = self._swap(states, evidence)
        joint = evidence + prior.double()
        self.losses.append(-joint.mean())
        if index > 0:  # where the sweep before has ended
            self._keep(joint, index - 1, coldest)
        if works is not None and index >= 0:
            self.keep(index, {"works": works})
        paths = [(hmm, path, part) for (hmm, part), path in zip(self.pairs, states)]
        parameters.update(self._sample_parameters(paths))
        if index == self.num_samples - 1:
            prior = self.build()
            self._keep(self.log_evidence() + prior.double(), index, self.ladder.coldest)

    def build(self) -> Tensor:
        """Build the HMM of each bucket at the parameters; returns their log prior."""
        built = [(part, *self.parameters.build(part)) for part in self.parts]
        self.pairs = [(hmm, part) for part, hmm, _ in built]
        return built[0][2]

    def _swap(self, states: list[Tensor], evidence: Tensor) -> tuple[list[Tensor], Tensor]:
        """Replica exchange: paths at the new temperatures; log acceptance terms of each pair."""
        elsewhere, other = self._sample_paths(self.ladder.others)
        swapped, works = self.ladder.swap(other - evidence)
        pairs = zip(elsewhere, states)
        return [torch.where(swapped[:, None, None], new, old) for new, old in pairs], works

    def _sample_paths(self, inverse: Tensor) -> tuple[list[Tensor], Tensor]:
        """Sample paths ``(C R, N, T)`` of all sequences at given temperatures; log evidences."""
        states, evidences = zip(*(self._paths(*pair, inverse) for pair in self.pairs))
        paths = [x.reshape(self.copies, len(part), -1) for x, part in zip(states, self.parts)]
        return paths, self._total(evidences)

    def _total(self, evidences: Iterable[Tensor]) -> Tensor:
        """Sum of log evidences of sequences, of each chain, ``(C R,)``."""
        each = [evidence.double().reshape(self.copies, -1).sum(-1) for evidence in evidences]
        return torch.stack(each).sum(0)

    def _paths(self, hmm: HMM, data: Sequences, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Sample paths of some sequences, of all chains; with log evidences."""
        chain, values = hmm.chain, data.values
        if isinstance(chain, MarkovRecursions):
            found = hmm.symbol_factors(values)
            parts: Any = found or (*hmm.log_factors(values), hmm.lengths)
            initial, matrices, logs, *rest = parts
            logs = tempered(logs, inverse) if self.ladder.size > 1 else logs
            states, evidence = recursions.sample_paths(initial, matrices, logs, *rest)
            return states[0], evidence
        likelihood = self._log_likelihood(hmm, data, inverse)
        states = chain.sample_states(likelihood, hmm.lengths, 1)
        return states, chain.log_evidence(likelihood, hmm.lengths)

    def _log_likelihood(self, hmm: HMM, data: Sequences, inverse: Tensor) -> Tensor:
        """Log-likelihoods of the states, times inverse temperatures, ``(C R, N, T, K)``."""
        likelihood = hmm.log_likelihood(data.values)
        return tempered(likelihood, inverse) if self.ladder.size > 1 else likelihood

    def log_evidence(self) -> Tensor:
        """Log evidence of each chain at its temperature, ``(C R,)``."""
        if self.ladder.size == 1:
            return self._total(hmm.log_prob(part.values) for hmm, part in self.pairs)
        likely = ((x, self._log_likelihood(x, part, self.ladder.own)) for x, part in self.pairs)
        return self._total(hmm.chain.log_evidence(logs, hmm.lengths) for hmm, logs in likely)

    def _keep(self, joint: Tensor, index: int, chosen: Tensor) -> None:
        """Keep the parameters of the chosen chains, and their log joint density."""
        now = under("module.", self.parameters.values) | {"lp": joint}
        self.keep(index, {name: value[chosen] for name, value in now.items()})

    def _sample_parameters(self, paths: list[tuple[HMM, Tensor, Sequences]]) -> Values:
        """Sample the parameters given the paths, by name."""
        values: Values = {}
        current = self.parameters.values
        if self.chain is not None:
            statistics = _sum(starmap(self._chain_statistics, paths))
            values |= self.chain.sample_parameters(statistics, current)
        if self.emission is not None:
            statistics = _sum(starmap(self._emission_statistics, paths))
            sample = self.emission.sample_parameters(statistics, inside(current, self.prefix))
            values |= under(self.prefix, sample)
        return values

    def _chain_statistics(self, hmm: HMM, states: Tensor, data: Sequences) -> Statistics:
        """Sufficient statistics of the chain given paths ``(C R, N, T)`` of some sequences."""
        restarts, counts = self.parameters.restarts, {}
        paths = states if restarts > 1 else states[0]
        for name, count in hmm.chain.path_counts(paths, hmm.exists).items():
            if bool((partial := (count - count.round()).abs() > WHOLE).any()):
                raise PartialCounts(
                    f"data: Gibbs needs whole counts of {name} given a path; got "
                    f"{count[partial][0].item():.3g}, as of parameters that are no tables. "
                    "Use fit_mcmc."
                )
            core = count.shape[count.dim() - len(hmm.chain.cores[name]) :]
            counts[name] = count.double().reshape(restarts, -1, *core).sum(1)
        no_evidence = states.new_zeros(restarts, 1, dtype=torch.float64)
        weights = no_evidence.new_zeros(restarts, 1, 1, hmm.num_states)
        found: Statistics = self.chain.statistics(ExpectedCounts(no_evidence, weights, counts))
        return found

    def _emission_statistics(self, hmm: HMM, states: Tensor, data: Sequences) -> Statistics:
        """Sufficient statistics of the observations, each with weight one in its state."""
        sets, flat = self.num_sets, states.flatten(1)  # (C R, N T)
        values, where = observations(hmm, data, int(sets > 1))
        values = values.unsqueeze(0) if sets == 1 else values[:: self.copies // sets]  # (D, M, *E)
        flat = flat if where is None else flat.index_select(1, where)
        size = CHUNK // (len(flat) * hmm.num_states) + 1

        def statistics(value: Tensor, state: Tensor) -> Statistics:
            weights = hmm.log_initial.new_zeros(*state.shape, hmm.num_states)
            weights.scatter_(-1, state.unsqueeze(-1), 1.0)
            if self.ladder.size > 1:
                weights *= self.ladder.own.to(weights)[:, None, None]
            if sets > 1:  # zero for the data sets of other chains
                own = torch.eye(sets).to(weights).repeat_interleave(self.copies // sets, 0)
                weights = torch.einsum("rmk,rd->rdmk", weights, own).flatten(1, 2)
            steps = value.flatten(0, 1)
            found: Statistics = self.emission.statistics(steps, weights, hmm.emission)
            return found

        return _sum(map(statistics, values.split(size, 1), flat.split(size, 1)))

    def state(self) -> dict[str, Any]:
        """Checkpoint state: samples, temperatures, parameters, tuning of Hamiltonian steps."""
        state = super().state() | self.parameters.state()
        if self.others is not None:
            state["others"] = vars(self.others.tuning) | {"names": self.others.names}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore samples, temperatures, parameters and tuning from a checkpoint."""
        super().restore(state)
        self.parameters.restore(state)
        if "others" in state:
            self.others = Others(state["others"].pop("names"), self)
            self.others.tuning = Tuning(**state["others"])


class Others(Hamiltonian):
    """Variables without a conjugate posterior: one Hamiltonian trajectory in each sweep.

    Paths are summed out, so that it and the paths together are one exact step given all else.

    Args:
        names: Of the latent variables.
        sampler: What samples the others.
    """

    def __init__(self, names: list[str], sampler: Gibbs) -> None:
        self.names, self.sampler, self.parameters = names, sampler, sampler.parameters
        super().__init__(self.parameters.supports, self._now(), self._given, sampler.ladder)

    def _now(self) -> Values:
        return {name: self.parameters.values[name] for name in self.names}

    def step(self) -> tuple[Moved, int]:
        """One trajectory of every chain, given the other parameters."""
        self.state = self.at(self.free(self._now()))
        moved = super().step()
        self.parameters.values |= self.packing.values(self.state.place)
        return moved

    def _given(self, values: Values) -> Tensor:
        """The log joint density of each chain, with the other parameters as they are."""
        self.parameters.values = self.parameters.values | values
        prior = self.sampler.build()
        return self.sampler.log_evidence().to(prior) + prior


def _sum(each: Iterable[Statistics]) -> Statistics:
    """Sums of statistics of parts of the data."""
    return reduce(joined, ({"sums": part} for part in each))["sums"]


def tempered(log_likelihood: Tensor, inverse: Tensor) -> Tensor:
    """Log-likelihoods times inverse temperatures ``(C,)``; zero at zero, also where impossible."""
    log_likelihood = log_likelihood[(None,) * (4 - log_likelihood.dim())]
    power = inverse.to(log_likelihood).reshape(-1, 1, 1, 1)
    return (power * log_likelihood).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
