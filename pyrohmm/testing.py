"""Contract tests for chains and emission families, your own included.

They compare with sums over all paths, one by one, which share no code with the recursions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pyro
import torch
from torch import Tensor

from .chains.base import Chain
from .distributions.observation import log_likelihood
from .nn.closed_form import ConjugateSampler
from .nn.family import Emission, EmissionFamily, build_emission

SAMPLES = 4000
SWEEPS = 20
FARTHEST = 6.0  # standard errors, above which samples are refused
LEAST_P = 1e-5  # of a chi-square test, below which samples are refused


def check_chain(
    chain: Chain, lengths: tuple[int, ...] = (1, 2, 4), tolerance: float = 1e-8
) -> None:
    """Check a chain without batch dimensions against the sum over all paths.

    Args:
        chain: In float64; of few states, for there are K^T paths.
        lengths: Numbers of steps; sequences of all of them form one ragged batch.
        tolerance: Of sums of log-probabilities.

    Raises:
        AssertionError: Where the chain contradicts its own ``log_prob`` of paths.

    Example:
        >>> from pyrohmm.chains import MarkovChain
        >>> even = torch.full((2, 2), 0.5, dtype=torch.float64).log()
        >>> check_chain(MarkovChain(even[0], even))
    """
    num_steps, size = max(lengths), chain.num_states
    likelihood = torch.randn(len(lengths), num_steps, size, dtype=chain.log_initial.dtype)
    ragged = torch.tensor(lengths)
    for logs in (likelihood, _restricted(likelihood)):
        paths = [Paths(chain, logs[i], n) for i, n in enumerate(lengths)]
        _check_evidence(chain, logs, ragged, paths, tolerance)
        _check_counts(chain, logs, ragged, paths, tolerance)
        _check_paths(chain, logs, ragged, paths)
        _check_other_forms(chain, logs, ragged, tolerance)
    _check_second_derivatives(chain, likelihood[-1:], ragged[-1:])


def _restricted(likelihood: Tensor) -> Tensor:
    """Mask the second step, and rule the last state out at the steps beside it."""
    restricted = likelihood.clone()
    restricted[:, 1:2] = 0.0
    if likelihood.size(-1) > 1:
        restricted[:, 0:3:2, -1] = -torch.inf
    return restricted


class Paths:
    """All paths of one sequence, with their log joint densities.

    Args:
        chain: Its ``log_prob`` says how probable a path is.
        likelihood: ``(T, K)``.
        length: The number of steps that exist.
    """

    def __init__(self, chain: Chain, likelihood: Tensor, length: int) -> None:
        steps, size = likelihood.shape
        self.states = torch.tensor([*itertools.product(range(size), repeat=length)])
        padded = torch.nn.functional.pad(self.states, (0, steps - length))
        self.prior = chain.log_prob(
            padded, torch.arange(steps) < torch.tensor([length]).unsqueeze(-1)
        )
        emitted = likelihood[:length].expand(len(self.states), length, size)
        emitted = emitted.gather(-1, self.states.unsqueeze(-1)).squeeze(-1).sum(-1)
        self.scores = self.prior + emitted

    @property
    def evidence(self) -> Tensor:
        """Log evidence by the sum over all paths."""
        return self.scores.logsumexp(0)

    def marginals(self) -> Tensor:
        """Smoothed marginals ``(T, K)``."""
        hits = torch.nn.functional.one_hot(self.states).to(self.scores)
        return (self.scores - self.evidence).exp() @ hits.flatten(1)


PATHS = "the sum over all paths"


def _close(name: str, found: Any, wanted: Any, tolerance: float, of: str = PATHS) -> None:
    """Raise unless two tensors agree."""
    close: Any = {"rtol": tolerance, "atol": tolerance, "equal_nan": False}
    said = f"{name} differs from {of}."
    torch.testing.assert_close(found, wanted, msg=lambda text: f"{said} {text}", **close)


def _check_evidence(
    chain: Chain, likelihood: Tensor, lengths: Tensor, paths: list[Paths], tolerance: float
) -> None:
    """Compare evidence and filtered states with the sum over paths; test impossible data."""
    wanted = torch.stack([each.evidence for each in paths])
    _close("log_evidence", chain.log_evidence(likelihood, lengths), wanted, tolerance)
    padded = (_exists(lengths, likelihood) == 0).unsqueeze(-1)
    found = chain.log_evidence(likelihood.masked_fill(padded, torch.nan), lengths)
    _close("log_evidence with NaN for padding", found, wanted, tolerance)
    nothing = torch.full_like(likelihood, -torch.inf).requires_grad_()
    impossible = chain.log_evidence(nothing, lengths)
    assert bool(impossible.isneginf().all()), "impossible data: not -inf"
    (slope,) = torch.autograd.grad(impossible.sum(), nothing)
    assert bool((slope == 0).all()), "impossible data have a gradient"
    filtered = chain.filtered(likelihood, lengths).exp()
    _close("sums of filtered", filtered.sum(-1), _exists(lengths, filtered), tolerance)
    if chain.options.get("censored_end", True):  # else a prefix ends with a segment
        for i, length in enumerate(lengths.tolist()):
            prefixes = [Paths(chain, likelihood[i], t + 1) for t in range(length)]
            wanted = torch.stack([each.marginals()[-chain.num_states :] for each in prefixes])
            _close("filtered", filtered[i, :length], wanted, tolerance)


def _exists(lengths: Tensor, like: Tensor) -> Tensor:
    """Mask of the steps that are not padding, ``(N, T)`` ones and zeros."""
    return (torch.arange(like.size(-2)) < lengths.unsqueeze(-1)).to(like)


def _check_counts(
    chain: Chain, likelihood: Tensor, lengths: Tensor, paths: list[Paths], tolerance: float
) -> None:
    """Compare smoothed marginals and expected counts (Fisher's identity) with all paths."""
    counts = chain.expected_counts(likelihood, lengths)
    assert counts.counts.keys() == chain.parameters.keys(), "counts have the parameters' names"
    for i, each in enumerate(paths):
        wanted = each.marginals().reshape(-1, chain.num_states)
        _close("states", counts.state_probs[i, : len(wanted)], wanted, tolerance)
        assert bool((counts.state_probs[i, len(wanted) :] == 0).all()), "padding has posterior mass"
    leaves = {name: part.clone().requires_grad_() for name, part in chain.parameters.items()}
    moving = chain.replace(**leaves)
    slopes = torch.autograd.grad(moving.log_evidence(likelihood, lengths).sum(), [*leaves.values()])
    again = chain.replace(**leaves)
    total = sum(Paths(again, likelihood[i], n).evidence for i, n in enumerate(lengths.tolist()))
    exact = torch.autograd.grad(torch.as_tensor(total), [*leaves.values()], allow_unused=True)
    plain = all(torch.equal(part, chain.parameters[n]) for n, part in chain.factors().items())
    for name, slope, wanted in zip(leaves, slopes, exact):
        wanted = torch.zeros_like(slope) if wanted is None else wanted.nan_to_num(0.0)
        _close(f"the gradient by {name}", slope, wanted, tolerance)
        if plain:
            _close(f"counts of {name}", counts.counts[name], wanted, tolerance)


def _check_second_derivatives(chain: Chain, likelihood: Tensor, lengths: Tensor) -> None:
    """Compare second derivatives of the evidence with differences of gradients."""
    logs = likelihood.clone().requires_grad_()

    def evidence(logs: Tensor) -> Tensor:
        return chain.log_evidence(logs, lengths)

    assert torch.autograd.gradgradcheck(evidence, (logs,)), "second derivatives"


def _check_paths(chain: Chain, likelihood: Tensor, lengths: Tensor, paths: list[Paths]) -> None:
    """Test the best path, and samples of posterior and prior by chi-square."""
    best = chain.viterbi(likelihood, lengths)
    samples = chain.sample_states(likelihood, lengths, SAMPLES)
    for i, each in enumerate(paths):
        steps = each.states.size(1)
        place = _number(best[i, :steps], chain.num_states)
        assert each.scores[place] >= each.scores.max() - 1e-9, f"viterbi of sequence {i}"
        padding = best[i, steps:].any() | samples[:, i, steps:].any()
        assert not bool(padding), "paths are padded by 0"
        _check_samples("sample_states", samples[:, i, :steps], each.scores, chain.num_states)
    if chain.samples_alone:
        steps = paths[-1].states.size(1)
        prior = chain.sample_prior(torch.Size([SAMPLES]), steps)
        _check_samples("sample_prior", prior, paths[-1].prior, chain.num_states)


def _number(states: Tensor, num_states: int) -> Tensor:
    """Index of a path ``(*, T)`` in the enumeration of all paths."""
    powers = num_states ** torch.arange(states.size(-1) - 1, -1, -1)
    return (states * powers).sum(-1)


def _check_samples(name: str, states: Tensor, scores: Tensor, num_states: int) -> None:
    """Raise unless paths ``(S, T)`` look as if they had log-probabilities ``scores``."""
    probs = (scores - scores.logsumexp(0)).exp().detach().double()
    found = torch.bincount(_number(states.cpu(), num_states), minlength=len(probs)).double()
    assert bool((found[probs == 0] == 0).all()), f"{name} took an impossible path"
    rare = probs * SAMPLES < 5
    pairs = [(found[~rare], probs[~rare]), (found[rare].sum()[None], probs[rare].sum()[None])]
    counts, shares = (torch.cat(parts) for parts in zip(*pairs))
    counts, shares = counts[shares > 0], shares[shares > 0]
    if len(counts) < 2:
        return
    statistic = ((counts - SAMPLES * shares).square() / (SAMPLES * shares)).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(half, statistic / 2) > LEAST_P, f"{name}: {statistic:.1f}"


def _check_other_forms(chain: Chain, likelihood: Tensor, lengths: Tensor, tolerance: float) -> None:
    """Compare the evidence of batched, uniform, expanded and permuted chains."""
    evidence = chain.log_evidence(likelihood, lengths)
    even = chain.uniform()
    pairs = {name: [part, even.parameters[name]] for name, part in chain.parameters.items()}
    both = {name: torch.stack(pair).unsqueeze(1) for name, pair in pairs.items()}
    twice = chain.replace(**both).log_evidence(likelihood, lengths)
    wanted = torch.stack([evidence, even.log_evidence(likelihood, lengths)])
    _close("evidence of batched parameters", twice, wanted, tolerance)
    markov, state_of, allowed = chain.expanded(lengths, likelihood.size(1))
    wide = likelihood[..., state_of]
    if allowed is not None:
        wide = wide.masked_fill(~allowed, -torch.inf)
    _close("expanded", markov.log_evidence(wide, lengths), evidence, tolerance)
    if not any("K" in core for core in chain.cores.values()):
        return
    order = torch.arange(chain.num_states).roll(1)
    other = chain.permuted(order).log_evidence(likelihood[..., order], lengths)
    _close("evidence of permuted states", other, evidence, tolerance)


def check_emission(
    family: EmissionFamily, values: Tensor, num_states: int = 3, tolerance: float = 1e-6
) -> None:
    """Check an emission family: shapes, sums of statistics, its M-step, and its samples.

    The M-step must be a maximum, and ``sample_parameters``, if there is one, samples of the
    posterior given the states.

    Args:
        family: Such as :func:`pyrohmm.normal`.
        values: ``(M, *E)``, observations in its support.
        num_states: K.
        tolerance: Of log-densities, in nats an observation.

    Raises:
        AssertionError: Where the family breaks the contract.

    Example:
        >>> from pyrohmm import poisson
        >>> _ = pyro.set_rng_seed(0)
        >>> check_emission(poisson(), torch.tensor([0.0, 2.0, 5.0, 1.0]))
    """
    module: Any = build_emission(family, num_states)
    with torch.no_grad():
        emission = module()
    assert emission.batch_shape[-1:] == (num_states,), "the batch shape must end in K"
    logs = log_likelihood(emission, values)
    assert logs.shape == (len(values), num_states), "log-likelihoods are (M, K)"
    lead = [num_states] if emission.event_shape else []
    one_by_one = [emission.log_prob(value.expand([*lead, *value.shape])) for value in values]
    torch.testing.assert_close(logs, torch.stack(one_by_one), rtol=1e-4, atol=1e-4)
    if hasattr(module, "m_step"):
        _check_m_step(module, values, num_states, tolerance)
    augments = isinstance(module, Emission) and module.augments(values)
    if isinstance(module, ConjugateSampler) and not augments:
        _check_sampler(module, values, num_states)


def _check_m_step(module: Any, values: Tensor, num_states: int, tolerance: float) -> None:
    """Check that statistics are sums over observations, and the M-step is a maximum."""
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    weights = torch.rand(2, len(values), num_states).to(dtype)
    whole = module.statistics(values, weights, None)
    if getattr(module, "summed", True):
        half = len(values) // 2
        low = module.statistics(values[:half], weights[:, :half], None)
        high = module.statistics(values[half:], weights[:, half:], None)
        first = module.statistics(values, weights[:1], None)
        for name, value in whole.items():
            _close(f"statistic {name} by parts", low[name] + high[name], value, 1e-6, "the whole")
            _close(f"statistic {name} of one of two restarts", first[name], value[:1], 1e-6, "both")
            assert value.dtype == torch.float64, f"statistic {name} is a sum in {value.dtype}"
    mode = {name: value[0] for name, value in module.m_step(whole)[0].items()}
    best = _expected_log_joint(module, mode, values, weights)
    for _ in range(20):  # no parameters near the mode have a higher density
        near = {name: _moved(module, name, value) for name, value in mode.items()}
        other = _expected_log_joint(module, near, values, weights)
        assert other <= best + tolerance * len(values), f"a density of {other} beside {best}"


def _check_sampler(module: Any, values: Tensor, num_states: int) -> None:
    r"""Test posterior samples by Stein identities: E[dlog p / du] = 0 and E[u dlog p / du] = -1."""
    states = torch.arange(len(values)) % num_states
    weights = torch.nn.functional.one_hot(states, num_states)[None].to(torch.float64)
    sites = _sites(module)
    own = {name.removeprefix(f"{module._pyro_name}."): name for name in sites}
    start = {name: pyro.poutine.trace(module).get_trace().nodes[own[name]]["value"] for name in own}
    wide = {name: value.expand(SAMPLES, *value.shape) for name, value in start.items()}
    whole = module.statistics(values, weights, None)
    whole = {name: value.expand(SAMPLES, *value.shape[1:]) for name, value in whole.items()}
    samples: dict[str, Tensor] = {}
    for _ in range(SWEEPS):  # some are steps from the current ones
        samples = module.sample_parameters(whole, wide | samples)
    leaves, total = {}, torch.zeros(())
    for name, sample in samples.items():
        assert sample.shape == wide[name].shape, f"samples of {name} have shape {sample.shape}"
        transform = torch.distributions.biject_to(sites[own[name]].support)
        leaves[name] = transform.inv(sample.double().unsqueeze(1)).detach().requires_grad_()
        start[name] = transform(leaves[name])
        total = total + transform.log_abs_det_jacobian(leaves[name], start[name]).sum()
    data = {own[name]: value for name, value in start.items()}
    trace = pyro.poutine.trace(pyro.poutine.condition(module, data=data)).get_trace()
    logs = trace.nodes["_RETURN"]["value"].log_prob(values.unsqueeze(1))  # (R, M, K)
    total = total + (logs * weights).sum() + trace.log_prob_sum()
    slopes = torch.autograd.grad(total, list(leaves.values()))
    for (name, leaf), slope in zip(leaves.items(), slopes):
        for score in (slope, leaf * slope + 1):
            apart = score.mean(0).abs() / (score.std(0) / SAMPLES**0.5 + 1e-9)
            assert apart.max() < FARTHEST, f"samples of {name} are not of the posterior: {apart}"


def _sites(module: Any) -> dict[str, Any]:
    """Priors of the parameters by name."""
    trace = pyro.poutine.trace(module).get_trace()
    return {name: trace.nodes[name]["fn"] for name in trace.stochastic_nodes}


def _moved(module: Any, name: str, value: Tensor) -> Tensor:
    """A perturbed ``value`` in the support of the parameter ``name``."""
    site = next(fn for key, fn in _sites(module).items() if f".{key}".endswith(f".{name}"))
    transform: Any = torch.distributions.transform_to(site.support)
    free = transform.inv(value.to(torch.get_default_dtype()))
    return transform(free + 10 ** (-3 * torch.rand(()).item()) * torch.randn_like(free))


def _expected_log_joint(
    module: Any, parameters: dict[str, Tensor], values: Tensor, weights: Tensor
) -> float:
    """Expected log density of observations and parameters."""
    values_of = {name: value.to(torch.get_default_dtype()) for name, value in parameters.items()}
    run: Callable[..., Any] = pyro.poutine.condition(module, data=values_of)
    with torch.no_grad():
        trace = pyro.poutine.trace(run).get_trace()
        logs = log_likelihood(trace.nodes["_RETURN"]["value"], values)
        prior = float(trace.log_prob_sum())
    total = float(torch.where(weights[0] > 0, logs * weights[0], 0.0).sum()) + prior
    return -math.inf if math.isnan(total) else total
