"""Initial parameters of EM: samples of the prior, clusters of the observations, or a fitted HMM.

A start is any function of ``(module, data, restarts)`` that returns parameters, or what a first
M-step reads: see :class:`Start`. Without one, several kinds of start are tried for a few
iterations, and ranked.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import numpy as np
import pyro
import torch
from pyro import poutine
from scipy.cluster.vq import ClusterError, kmeans2, vq
from torch import Tensor

from .._choices import first_values
from ..chains.base import ExpectedCounts
from ..data.parts import parts_of
from ..data.sequences import Sequences
from ..distributions.continuous_time_hmm import ContinuousTimeHMM
from ..distributions.hmm import HMM
from ..distributions.sparse import interior
from ..distributions.structured_hmm import HSMM
from ..nn.base import PYRO, HMMModule
from .graphs import is_known
from .iterations import Loop, uniform_counts
from .maximization import Maximization
from .models import MarginalModel, build
from .msteps import share_labelled
from .objective import trace_of_batchable
from .parameters import Parameters, Values
from .plates import repeatable
from .process_group import ProcessGroup

FEW = 4  # restarts by default
# starts that are ranked, after so many iterations; fewer where steps over durations take longer
ROUNDS = {False: ((24, 10), (6, 20)), True: ((8, 10), (3, 10))}
MOST_STEPS = 2_000  # of the data by which they are
MOST_NUMBERS = 4_000_000  # parameters, or transitions, of all of these
MOST_ROWS = 10_000  # of the data that a start looks at
MOST_CENTRES = 64  # that are sought far apart, each among all rows
LONGEST_BLOCK = 25  # steps
ONE = "one start was tried, for the model is large; restarts=4 tries others too"


class Start(Protocol):
    """Initial parameters of EM."""

    def __call__(
        self, module: HMMModule, data: Sequences, restarts: int
    ) -> Values | Tensor | ExpectedCounts:
        """Parameters, or what a first M-step reads.

        Returns:
            Values of the latent variables by name, ``(R, 1, ...)``; or probabilities of the states
            at each step, ``(R, N, T, K)``; or expected counts, whose ``state_probs`` have that
            shape.
        """


def from_prior(module: HMMModule, data: Sequences, restarts: int) -> Values:
    """Start from samples of the prior, one for each restart."""
    with PYRO, torch.no_grad(), poutine.block(), pyro.plate("restarts", restarts, dim=-2):
        trace = poutine.trace(lambda: build(module, data[:1])).get_trace()
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


def sticky(stay: float = 0.95) -> Start:
    """Start from the prior, with transitions that are rare, as in genomes and speech.

    Rows of the transition matrix are ``stay`` on the diagonal, and a sample of the prior for the
    rest. A start whose states change at each step may take hundreds of iterations to find states
    that last, or end at a worse optimum.

    Args:
        stay: Probability of a state to follow itself; states last 1 / (1 - stay) steps on average.

    Example:
        >>> data = Sequences.from_list([[0] * 20 + [1] * 20])
        >>> module = TabularHMM(2, categorical(2))
        >>> fit = fit_em(module, data, start=starts.sticky(0.9), restarts=4)
    """

    def start(module: HMMModule, data: Sequences, restarts: int) -> Values:
        values = from_prior(module, data, restarts)
        tables = [name for name in values if _is_transition(name)]
        if not tables:
            raise ValueError(
                "starts.sticky needs a module with a prior of its transition matrix, such as "
                f"TabularHMM; {type(module).__name__} has none."
            )
        for name in tables:
            rows = values[name]
            mixed = stay * torch.eye(rows.size(-1)).to(rows) + (1 - stay) * rows
            possible = rows.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) > 0
            values[name] = torch.where(possible, mixed, rows)
        return values

    return start


def _is_transition(name: str) -> bool:
    """Whether a latent variable is a transition matrix, such as ``transition_0``."""
    return name.partition("_")[0] == "transition"


def by_kmeans(module: HMMModule, data: Sequences, restarts: int) -> Tensor:
    """Start from k-means clusters of the observations, which are scaled to unit variance.

    Centres are those of at most 10,000 random rows; of more than 64 states they begin at random
    rows. Fits cluster windows of 10,000 steps in all, where there are more. Missing steps belong to
    all clusters alike; missing components are filled by their means.
    """
    num_states = _num_states(module, data)
    seen = data.observed.cpu()
    rows = data.values.double().reshape(*seen.shape, -1).cpu()[seen]
    states = torch.full((restarts, *seen.shape), -1)
    some = rows if len(rows) <= MOST_ROWS else rows[torch.randint(len(rows), (MOST_ROWS,))]
    mean = some.nanmean(0).nan_to_num(0.0)
    rows, some = ((part - mean).nan_to_num(0.0) for part in (rows, some))
    spread = some.square().mean(0).sqrt()
    spread = torch.where(spread > 0, spread, 1.0)
    rows, some = rows / spread, some / spread
    distinct = np.unique(some.numpy(), axis=0)  # torch takes ten times as long
    for restart in range(restarts):
        states[restart, seen] = _cluster(rows, some, distinct, num_states)
    return _nearly_certain(states, num_states).to(data.values.device)


def _cluster(rows: Tensor, some: Tensor, distinct: np.ndarray, num_states: int) -> Tensor:
    """The nearest of the centres of ``some`` rows; at random if too few rows are ``distinct``."""
    many = num_states > MOST_CENTRES
    for _ in range(5 if len(distinct) >= max(num_states, 2) else 0):
        seed, centres = int(torch.randint(2**31, ())), num_states
        if many:
            centres = distinct[torch.randperm(len(distinct))[:num_states]]
        how = "matrix" if many else "++"
        try:
            centres, _ = kmeans2(some.numpy(), centres, minit=how, seed=seed, missing="raise")
        except (ClusterError, ValueError):  # a cluster has lost its points
            if not many:
                continue
        return torch.as_tensor(vq(rows.numpy(), centres)[0]).long()
    return torch.randint(num_states, (len(rows),))


def by_blocks(module: HMMModule, data: Sequences, restarts: int) -> Tensor:
    """Start from blocks of up to 25 steps in succession, each of a random state.

    States then last, and differ by what lasts: means, variances, and how a step depends on those
    before it, of which clusters of the observations see the means alone.
    """
    num_states = _num_states(module, data)
    length = min(LONGEST_BLOCK, -(-data.num_steps // 4))
    block = torch.arange(data.num_steps) // length
    states = torch.randint(num_states, (restarts, len(data), int(block[-1]) + 1))[..., block]
    states = states.masked_fill(~data.exists.cpu(), -1)
    return _nearly_certain(states, num_states).to(data.values.device)


def _num_states(module: HMMModule, data: Sequences) -> int:
    """K of the HMM that ``module`` builds."""
    known = getattr(module, "num_states", None)
    return known if isinstance(known, int) else build_once(module, data[:1]).num_states


def _nearly_certain(states: Tensor, num_states: int) -> Tensor:
    """State probabilities concentrated on ``states``, all positive; uniform where a state is -1."""
    probs = torch.full((*states.shape, num_states), 0.01 / num_states, dtype=torch.float64)
    probs.scatter_(-1, states.clamp(min=0).unsqueeze(-1), 0.99 + 0.01 / num_states)
    return probs.masked_fill_((states < 0).unsqueeze(-1), 1.0 / num_states)


def windows(data: Sequences, num_steps: int) -> Sequences:
    """Random windows of the sequences, of about ``num_steps`` in all; ``data`` if it has fewer."""
    total = int(data.lengths.sum())
    if total <= num_steps:
        return data
    width = min(data.num_steps, num_steps // 8)
    counts = -(-data.lengths // width)
    rows = torch.arange(len(data)).repeat_interleave(counts)
    starts = width * (torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows])
    chosen = torch.randperm(len(rows))[: -(-len(rows) * num_steps // total)].sort().values
    rows, starts = rows[chosen], starts[chosen]
    lengths = (data.lengths[rows] - starts).clamp(max=width)
    return data.runs(data.firsts[rows] + starts, lengths, len(rows), data.indices[rows])


def seen_by(start: Start | Values, data: Sequences) -> Sequences:
    """Data that a start reads: one sequence for the prior, windows for clusters, else all."""
    if isinstance(start, dict) or start is from_prior:
        return data[:1].truncate(MOST_ROWS)
    return windows(data, MOST_ROWS) if start in (by_kmeans, by_blocks) else data


def possible(parameters: Parameters, values: Values) -> Values:
    """Shift values found in a part of the data off zero: other parts may have further symbols."""
    return {name: interior(space, values[name]) for name, space in parameters.supports.items()}


def from_hmm(hmm: HMM) -> Start:
    """Start from the posterior of the states under a fitted HMM, of any emission family.

    Args:
        hmm: Its parameters are used, not its lengths. All restarts start alike.
    """

    def start(module: HMMModule, data: Sequences, restarts: int) -> ExpectedCounts:
        times = {"times": data.times} if isinstance(hmm, ContinuousTimeHMM) else {}
        model = hmm.replace(lengths=data.lengths, observed=data.observed, allowed=None, **times)
        if data.labels is not None:
            model = model.restrict(data.labels)
        counts = model.expected_counts(data.values)
        return ExpectedCounts(
            counts.log_evidence,
            counts.state_probs.expand(restarts, *counts.state_probs.shape),
            {name: n.expand(restarts, 1, *n.shape) for name, n in counts.counts.items()},
        )

    return start


def build_once(module: HMMModule, data: Sequences) -> HMM:
    """One HMM from the module, with samples of its priors."""
    with PYRO, torch.no_grad(), poutine.block():
        return build(module, data)


def check_restarts(parameters: Parameters) -> None:
    """Raise unless batched restarts of a user's module are independent of each other."""
    if not is_known(parameters.module, parameters.log_prior):
        model = MarginalModel(copy.deepcopy(parameters.module), parameters.log_prior)
        with repeatable():
            trace_of_batchable(model, parameters.probe, 2)


class StartSearch:
    """Search for initial parameters of EM: how many starts are ranked, and how many go on.

    ``several_tried`` says whether more starts may be tried than go on, ``several_kept`` whether by
    default more than one may go on.

    Attributes:
        num_ranked: Number of starts, the best of which go on; 0 where all are alike or go their own
            way, and 1 where several are too large.
        large: Whether they are ranked by a part of the data, so that only the first restart and
            the best go on.
        by_default: Whether the user has not asked for them.
        notes: Remarks.
    """

    def __init__(
        self, parameters: Parameters, maximize: Maximization, start: Start | Values | None,
        restarts: int | None, several_tried: bool, several_kept: bool,
    ) -> None:  # fmt: skip
        self.parameters, self.maximize, self.start = parameters, maximize, start
        (most, _), _ = ROUNDS[isinstance(parameters.example, HSMM)]
        own_way = parameters.points or maximize.gradient.step.optimizer is not None
        num_states = parameters.example.num_states
        alike = num_states == 1 or share_labelled(parameters.data) == 1
        size = sum(map(Tensor.numel, parameters.sample.values()))
        fit_in = MOST_NUMBERS // max(size, num_states**2)  # the matrix of a product of chains
        one = restarts == 1 or not several_tried or own_way or alike
        self.num_ranked = 0 if one else max(parameters.restarts, min(most, fit_in))
        self.large = self.num_ranked > 1 and int(parameters.data.lengths.sum()) > MOST_STEPS
        self.by_default = restarts is None and self.num_ranked > 1
        self.notes = [ONE] if restarts is None and self.num_ranked == 1 else []
        if self.by_default and several_kept:
            parameters.restarts = min(FEW, self.num_ranked)

    def begin(self) -> bool:
        """Initialise the parameters; False if the data do not suit the starts that are tried."""
        parameters, maximize = self.parameters, self.maximize
        try:
            if parameters.sites and max(self.num_ranked, parameters.restarts) > 1:
                check_restarts(parameters)
            if self.start is not None:
                _begin_at(parameters, maximize, self.start)
            elif self.num_ranked > 1:
                parameters.set_values(_ranked(parameters, maximize, self.num_ranked))
            elif parameters.sites and parameters.restarts == 1:
                _begin_at(parameters, maximize, _kinds(parameters, maximize)[0])
            elif parameters.sites:  # parameters without priors have values
                parameters.set_values(_in_turn(parameters, maximize, parameters.restarts))
        except (ArithmeticError, ValueError):
            if not self.by_default:
                raise
            return False
        return True


def _ranked(parameters: Parameters, maximize: Maximization, num_ranked: int) -> Values:
    """Rank starts by a few EM iterations each: parameters of the first one and of the best.

    Those are of a sample of the data if there are many steps. Random numbers do not depend on the
    number of restarts, so that more of them are these and others.
    """
    device = parameters.data.device
    with torch.random.fork_rng(devices=[]):  # all that is drawn is drawn on the CPU
        first = _in_turn(parameters, maximize, 1)
    data = windows(next(iter(parts_of(parameters.data))), MOST_STEPS)
    best: Any = None
    for most, each in ROUNDS[isinstance(parameters.example, HSMM)]:
        count = min(max(most, parameters.restarts), num_ranked)
        some = Parameters(copy.deepcopy(parameters.module), data, count, parameters.log_prior)
        step = Maximization(some, maximize.transition_step, maximize.gradient.step)
        best = _in_turn(some, step, count) if best is None else best
        some.set_values({name: value[:count] for name, value in best.items()})
        loop = Loop(some, step, ProcessGroup(), {"num_iterations": each, "progress": False})
        loop.run()
        order = loop.losses[-1].nan_to_num(nan=torch.inf).argsort(stable=True).to(device)
        best = {name: value[order] for name, value in some.values.items()}
    best = best if data is parameters.data else possible(parameters, best)
    if parameters.restarts > 1:
        best = {name: torch.cat([first[name], best[name]]) for name in first}
    return {name: value[: parameters.restarts] for name, value in best.items()}


def _kinds(parameters: Parameters, maximize: Maximization) -> list[Start]:
    """Start functions of successive restarts, which take turns.

    There are no clusters of symbols, nor where emissions cannot be maximised given them.
    """
    last = sticky() if any(map(_is_transition, parameters.sites)) else by_blocks
    if not maximize.numbers:
        return [from_prior, by_blocks, last]
    return [by_kmeans, by_blocks, last, by_kmeans, by_blocks, from_prior]


def _in_turn(parameters: Parameters, maximize: Maximization, restarts: int) -> Values:
    """Initial values of restarts by start functions in turn; the first depends on no other."""
    kinds = _kinds(parameters, maximize)
    kind_of, later = [kinds[r % len(kinds)] for r in range(restarts)], range(1, restarts)
    groups = [[0], *([r for r in later if kind_of[r] is k] for k in dict.fromkeys(kind_of[1:]))]
    found: Values = {}
    for group in groups:
        some = copy.copy(parameters)
        some.restarts, some.values = len(group), dict(parameters.sample) if group == [0] else {}
        step = Maximization(some, maximize.transition_step, maximize.gradient.step)
        _begin_at(some, step, kind_of[group[0]])
        for name, value in some.values.items():
            found.setdefault(name, value.new_empty(restarts, *value.shape[1:]))[group] = value
    return found


def _begin_at(parameters: Parameters, maximize: Maximization, start: Start | Values) -> None:
    """Set the parameters to a start, or to those of a first M-step from it."""
    with first_values(parameters.data.device):
        module = parameters.module
        if isinstance(start, HMM) or not (isinstance(start, dict) or callable(start)):
            text = "start must be a function such as starts.by_kmeans, starts.from_hmm(hmm), a fit"
            raise TypeError(f"{text}, or values by name; got {start!r}.")
        data = next(iter(parts_of(parameters.data)))
        some = data if parameters.points else seen_by(start, data)
        found = start if isinstance(start, dict) else start(module, some, parameters.restarts)
        if isinstance(found, dict):
            return parameters.set_values(found)
        if parameters.values.keys() != parameters.sites.keys():
            # gradient steps, and what no count determines, start at the prior
            parameters.set_values(from_prior(module, some, parameters.restarts))
        with torch.no_grad():
            hmm, _ = parameters.build(some)
        hmm.prepare_values(some.values)  # raises if they cannot be emitted
        if not isinstance(found, ExpectedCounts):
            found = uniform_counts(hmm, some, found)
        scale = data.total / len(data) * int(data.lengths.sum()) / int(some.lengths.sum())
        maximize(maximize.gather(found, some, hmm, scale, at_start=True))
        if some is not data:
            parameters.set_values(possible(parameters, parameters.values))
