"""Values of latent variables: in the plate of sequences, of guides, and at points.

Of a variable inside that plate each sequence has one. Its values have the size of the data:
``(N, *)``, where those of other variables are shared by all sequences. A minibatch needs those of
its own sequences, and a new sequence has none: its evidence is an average over the prior of these
variables, given the shared ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import pyro
import torch
from pyro import poutine
from pyro.distributions import Delta, Dirichlet, Gamma
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoContinuous, AutoGuide, AutoNormal
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn

from .._transforms import detached
from ..data.parts import weighted
from ..data.sequences import Sequences
from ..distributions.hmm import HMM
from ..nn.base import PYRO
from .models import MarginalModel, check_returns_hmm


class SequencePlate(NamedTuple):
    """The plate of sequences around a latent variable.

    Attributes:
        name: Of the plate.
        dim: Of the plate, counted from the right of the batch dimensions.
        full_size: Number of sequences in the whole set, as the plate has it.
        value_dim: The dimension of sequences in a value, counted from its right.
    """

    name: str
    dim: int
    full_size: float
    value_dim: int


Plates = Mapping[str, SequencePlate]


def sequence_plates(
    model: Callable[..., Any], data: Sequences, trace: poutine.Trace | None = None
) -> dict[str, SequencePlate]:
    """Latent variables inside the plate of sequences, by name, with their plates.

    Args:
        model: The Pyro model.
        data: The sequences.
        trace: Of the model on these data, if there is one.
    """
    with PYRO, torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
        trace = trace or poutine.trace(model).get_trace(data)
        found = _plates_of_size(trace, data)
        if not found:
            return {}
        more = data[[*range(len(data)), 0]]
        try:  # another plate may have as many members, and does not grow with the data
            grown = poutine.trace(model).get_trace(more)
        except (ValueError, RuntimeError, IndexError):  # the model knows how many there are
            return found
    return {name: found[name] for name in _plates_of_size(grown, more) if name in found}


def pieces_of(model: Callable[..., Any], data: Sequences) -> list[tuple[Sequences, float]]:
    """Sequences, and weights of sum one, whose weighted log joint densities are that of ``data``.

    They are buckets, of models of this package without variables of single sequences. All at once
    are those of a user's model, which may know how many there are, of one for so many steps, and of
    a ``log_prior`` where sequences have parameters of their own.
    """
    own = isinstance(model, MarginalModel) and type(model).__module__.startswith("pyrohmm.")
    if not own or len(data.bucket_members) == 1:
        return [(data, 1.0)]
    bucket = data.buckets[0]
    with PYRO, torch.no_grad(), poutine.block(), torch.random.fork_rng(devices=[]):
        trace = poutine.trace(model).get_trace(bucket)
    hmm = trace.nodes["_RETURN"]["value"]
    shared = hmm.chain.shared and hmm.emission.batch_shape[:-1].numel() == 1
    prior = cast(MarginalModel, model).log_prior
    fixed = hmm.num_steps != bucket.num_steps or (prior is not None and not shared)
    if fixed or sequence_plates(model, bucket, trace):
        return [(data, 1.0)]
    return [*weighted(data)]


def _plates_of_size(trace: poutine.Trace, data: Sequences) -> dict[str, SequencePlate]:
    """Latent variables inside a plate of the size of ``data``."""
    found = {}
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or site["is_observed"] or site_is_subsample(site):
            continue
        for frame in site["cond_indep_stack"]:
            full_size, sizes = frame.full_size or frame.size, (len(data), data.total)
            if frame.vectorized and frame.size == len(data) and full_size in sizes:
                value_dim = frame.dim - site["fn"].event_dim
                found[name] = SequencePlate(frame.name, frame.dim, full_size, value_dim)
    return found


def in_plate(site: Any) -> bool:
    """Whether the value of a site has the dimension of a plate.

    A parameter without a prior may be read inside a plate, and be shared by all its members.
    """
    value, frames = site["value"], site["cond_indep_stack"]
    if site["type"] != "param":
        return bool(frames)
    return any(value.dim() >= -f.dim and value.size(f.dim) == f.size for f in frames if f.dim)


def wide(values: Mapping[str, Tensor], plated: Container[str], dim: int = 1) -> dict[str, Tensor]:
    """Values of model copies, with a dimension ``dim`` of sequences inserted if not ``plated``."""
    return {name: x if name in plated else x.unsqueeze(dim) for name, x in values.items()}


def narrow(values: Mapping[str, Tensor], plated: Container[str]) -> dict[str, Tensor]:
    """Remove the dimension of sequences that :func:`wide` inserts."""
    return {name: x if name in plated else x.squeeze(1) for name, x in values.items()}


class AtValues(Messenger):
    """Messenger that sets latent variables and ``pyro.param`` statements to values.

    Args:
        values: By name, any dimensions of samples on the left.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"], msg["done"] = self.values[msg["name"]], True

    _pyro_param = _pyro_sample


class LogJoint(AtValues):
    """Log joint density of a model at values of its variables, of each of R copies of the model.

    Args:
        values: By name, ``(R, ...)``.
        copies: R; None for one, whose values have no dimension of copies.
        weights: ``(R, N)``, how often each sequence counts; once by default.
        inside: Whether priors are those of values off the edge, where their slopes are finite.

    Attributes:
        sites: Log-densities of each site ``(*, R, N)``, by name, with the site.
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        copies: int | None = None,
        weights: Tensor | None = None,
        inside: bool = False,
    ) -> None:
        super().__init__(values)
        self.copies, self.weights, self.inside = copies, weights, inside
        self.sites: dict[str, tuple[Tensor, Any]] = {}

    def _pyro_post_sample(self, message: Any) -> None:
        if site_is_subsample(message):
            return
        value, fn = message["value"], message["fn"]
        prior = getattr(fn, "base_dist", fn)
        if self.inside and isinstance(prior, Dirichlet | Gamma) and not message["is_observed"]:
            value = value.clamp(min=torch.finfo(value.dtype).tiny)
        scores = fn.log_prob(value, *message["args"], **message["kwargs"])
        scores = scale_and_mask(scores, message["scale"], message["mask"])
        if self.copies is not None and (scores.dim() < 2 or scores.size(-2) != self.copies):
            raise ValueError(
                f"site {message['name']!r} is the same in all restarts or chains; its parameters "
                "must keep the dimensions to the left of their own."
            )
        if self.weights is not None and is_likelihood(message):
            scores = torch.where(self.weights > 0, scores, 0.0) * self.weights
        self.sites[message["name"]] = scores, message

    def _total(self, likelihood: bool) -> Tensor:
        scores = [x for x, site in self.sites.values() if is_likelihood(site) == likelihood]
        if self.copies is None:
            return sum((x.sum() for x in scores), torch.zeros(()))
        return sum((x.sum(-1).reshape(-1, self.copies).sum(0) for x in scores), torch.zeros(()))

    @property
    def likelihood(self) -> Tensor:
        """Log-likelihood of each copy, ``(R,)``."""
        return self._total(True)

    @property
    def prior(self) -> Tensor:
        """Log-prior of each copy, ``(R,)``."""
        return self._total(False)


def is_likelihood(site: Any) -> bool:
    """Whether the log-density of a site is a part of the likelihood, not of the prior."""
    return bool(site["is_observed"]) and not is_log_prior(site["name"])


def is_log_prior(name: str) -> bool:
    """Whether a site is the factor of a further prior, under a scope of Pyro or not."""
    return name.split("/")[-1] == "log_prior"


def check_events(sites: dict[str, Any]) -> None:
    """Raise if one of ``sites`` (distributions by name) has a batch shape."""
    for name, distribution in sites.items():
        if distribution.batch_shape:
            raise ValueError(
                f"site {name!r} must be one event, without the batch shape "
                f"{tuple(distribution.batch_shape)}: call .to_event on its distribution."
            )


def values_for(values: Mapping[str, Tensor], data: Sequences, plates: Plates) -> dict[str, Tensor]:
    """Parameter values by name; per-sequence ones restricted to the sequences of ``data``."""
    return {
        name: _of_sequences(name, value, data, plates[name]) if name in plates else value
        for name, value in values.items()
    }


def _of_sequences(name: str, value: Tensor, data: Sequences, plate: SequencePlate) -> Tensor:
    """Restrict a per-sequence ``value`` to the sequences of ``data``."""
    count = value.size(plate.value_dim)
    if plate.full_size == len(data) != data.total:  # the plate is of these alone
        return value
    if count != data.total or int(data.indices.max()) >= count:
        raise ValueError(
            f"site {name!r} has one value for each of the {count} sequences that were fitted; got "
            f"data of {data.total}. Take data.batch(numbers); of new sequences "
            "metrics.held_out_log_evidence(fit, data), or PosteriorDraws.for_new(data)."
        )
    if torch.equal(data.indices, torch.arange(count)):
        return value
    return value.index_select(plate.value_dim, data.indices.to(value.device))


def marks_of(data: Sequences) -> Tensor:
    """Fingerprints ``(N,)`` of the observed values of each sequence."""
    values = data.values.detach().cpu().double().reshape(*data.observed.shape, -1)
    values = values.nan_to_num().masked_fill(~data.observed.cpu().unsqueeze(-1), 0.0).flatten(1)
    return values @ torch.arange(1.0, 1 + values.size(1)).double().cos()


def check_fitted(data: Sequences, marks: Tensor | None) -> None:
    """Raise unless ``data`` are sequences that were fitted, by their ``indices`` and values.

    Sequences of which ``indices`` were given may have other steps. (Sets of another size are
    refused where the values of their variables are taken.)

    Args:
        data: The sequences.
        marks: Marks of those that were fitted, if each has variables of its own.
    """
    if marks is None or data.numbered:
        return
    if data.total == len(marks) and int(data.indices.max()) < len(marks):
        expected = marks[data.indices]
    elif len(data) == len(marks):
        expected = marks
    else:
        return
    other = (~marks_of(data).isclose(expected, 1e-9, 1e-9)).nonzero().flatten().tolist()
    if other:
        raise ValueError(
            f"each sequence has variables of its own, and {len(other)} of {len(data)} are others, "
            f"the first is sequence {other[0]}. New: metrics.held_out_log_evidence(fit, data). "
            "Other steps of the same ones: Sequences(values, lengths, indices=...)."
        )


def hmm_at(
    model: Callable[..., Any], values: Mapping[str, Tensor], data: Sequences, plates: Plates
) -> HMM:
    """The HMM that ``model`` builds for ``data`` at these values, without a gradient."""
    with PYRO, torch.no_grad(), poutine.block(), AtValues(values_for(values, data, plates)):
        return detached(check_returns_hmm(model(data)))


def shared(values: Mapping[str, Tensor], plates: Plates) -> dict[str, Tensor]:
    """Values of the variables that all sequences share, by name."""
    return {name: value for name, value in values.items() if name not in plates}


def new_log_evidence(
    model: Callable[..., Any],
    values: Mapping[str, Tensor],
    data: Sequences,
    plates: Plates,
    num_samples: int,
) -> Tensor:
    r"""Log evidence ``(N,)`` of sequences that were not fitted, in nats.

    Variables of which each sequence has one are averaged over their prior given the shared ones,
    :math:`\log \frac1S \sum_s p(x_n \mid b_n^{(s)}, \theta)`; the samples are the same in every
    call. Without such variables it is exact.
    """
    known, count = shared(values, plates), num_samples if plates else 1
    with repeatable():
        scores = [hmm_at(model, known, data, {}).log_prob(data.values) for _ in range(count)]
    return torch.stack(scores).logsumexp(0) - math.log(count)


def plates_of_batch(
    dims: Mapping[str, int], total: int, data: Sequences | None = None
) -> list[pyro.plate]:
    """Plates of an autoguide subsampled to a minibatch; all sequences if there are no data.

    Args:
        dims: Of the plates, by name.
        total: Number of sequences.
        data: The minibatch.
    """
    chosen = None if data is None else data.indices
    return [pyro.plate(n, total, subsample=chosen, dim=dim) for n, dim in dims.items()]


# Guides -------------------------------------------------------------------------------------------


def point_of(guide: Callable[..., Any], data: Sequences | None) -> dict[str, Tensor]:
    """One value of each latent variable: the median of ``guide`` if it has one, else a sample."""
    data = None if isinstance(guide, AutoGuide) else data  # of all sequences
    if hasattr(guide, "median"):
        try:
            return guide.median(data)
        except NotImplementedError:
            pass
    trace = poutine.trace(guide).get_trace(data)
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


def samples_of(
    guide: Callable[..., Any], names: Sequence[str], count: int, data: Sequences | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """S samples of the latent variables by name, ``(S, ...)``; log-density of each, ``(S,)``."""
    data = None if isinstance(guide, AutoGuide) else data  # of all sequences
    first = poutine.trace(guide).get_trace(data)
    plated = {name for name in names if first.nodes[name]["cond_indep_stack"]}
    deep = (frame.dim for name in plated for frame in first.nodes[name]["cond_indep_stack"])
    if isinstance(guide, AutoNormal | AutoContinuous) and min(deep, default=-1) == -1:
        with pyro.plate("draws", count, dim=-2):  # these can sample as a batch
            trace = poutine.trace(guide).get_trace(data)
        trace.compute_log_prob()
        values = narrow({name: trace.nodes[name]["value"] for name in names}, plated)
        sites = [site for site in trace.nodes.values() if site["type"] == "sample"]
        scores = [site["log_prob"] for site in sites if site["log_prob"].dim()]
        return values, torch.stack([score.sum(1) for score in scores]).sum(0)
    traces = [poutine.trace(guide).get_trace(data) for _ in range(count)]
    values = {name: torch.stack([trace.nodes[name]["value"] for trace in traces]) for name in names}
    totals = [torch.as_tensor(trace.log_prob_sum()) for trace in traces]
    return values, torch.stack(totals)


@contextmanager
def repeatable() -> Iterator[None]:
    """Context with reproducible random numbers; the outer random state is restored."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def outside_modules(store: Mapping[str, Any], *parts: Any) -> dict[str, dict[str, Any]]:
    """State of the parameter store without what those ``parts`` that are modules carry."""
    modules = [part for part in parts if isinstance(part, nn.Module)]
    own = {id(parameter) for part in modules for parameter in part.parameters()}
    names = {name for name, value in store["params"].items() if id(value) not in own}
    return {kind: {n: x for n, x in held.items() if n in names} for kind, held in store.items()}


class Point(PyroModule):
    """A guide that is a single point: a Delta distribution for each latent variable.

    Args:
        values: By name; buffers of the module.
    """

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = list(values)
        for index, value in enumerate(values.values()):
            self.register_buffer(f"value_{index}", value.detach().clone())

    def forward(self, *_: Any) -> dict[str, Tensor]:
        """Sample each site from its Delta distribution."""
        values = {name: getattr(self, f"value_{index}") for index, name in enumerate(self.names)}
        return {n: pyro.sample(n, Delta(x, event_dim=x.dim())) for n, x in values.items()}
