"""Pyro models of one density: with the states summed out, or enumerated site by site.

Both call a module, which returns an :class:`HMM`, add a log-prior of that HMM as one factor
outside every plate, and observe sequences inside the plate ``sequences``. Minibatches scale the
likelihood inside the plate, not the priors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import pyro
import torch
from pyro import poutine
from pyro.distributions import Categorical, VonMises
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.ops.indexing import Vindex
from pyro.poutine import runtime
from torch import Tensor, nn
from torch.distributions import constraints

from .._checks import broadcast_shapes, warn_caller
from ..data.batches import Window
from ..data.parts import Parts, parts_of
from ..data.sequences import Sequences, check_sequences
from ..distributions.autoregressive import Autoregressive
from ..distributions.base import CHECKED
from ..distributions.block_hmm import BlockHMM, FinalState
from ..distributions.forecast import sample_emission, sample_emission_per_step
from ..distributions.hmm import HMM
from ..distributions.modified import WrappedCauchy
from ..distributions.observation import is_categorical, log_prob_per_state
from ..nn.base import PYRO, HMMModule, OwnParameters, forgotten, in_mode
from ..nn.covariances import residuals_within
from ..nn.neural import NeuralHMM
from ..nn.normals import CentredEmission, merged, moments_of
from ..nn.regression import Linear
from .process_group import ProcessGroup

LogPrior = Callable[[HMM], Tensor]
Data = TypeVar("Data", bound=Sequences | Parts)

TURN = 7.0  # radians, more than all of a circle
CODES_OF_MISSING = {sign * (10.0**digits - 1) for sign in (-1, 1) for digits in range(2, 7)}
SOME = 10_000  # rows of numbers that are looked at for it
# the module that built an HMM for data, and what the checks of that have found
_checked: WeakKeyDictionary[Sequences, tuple[Any, dict[str, Any]]] = WeakKeyDictionary()


def build(module: HMMModule, data: Sequences) -> HMM:
    """The HMM that ``module`` builds for ``data``, with covariates and times if it takes them."""
    check_sequences("data", data)
    further: dict[str, Any] = {}
    if given := [name for name in ("covariates", "times") if data.packed(name) is not None]:
        known = inspect.signature(module.forward).parameters
        if "covariates" in given and "covariates" not in known:
            raise TypeError(
                f"data has covariates, which {type(module).__name__} does not take: take "
                "RegressionHMM, an HMMModule with forward(lengths, observed, covariates), or data "
                "without them."
            )
        further = {name: getattr(data, name) for name in given if name in known}
        if (columns := further.get("covariates")) is not None:
            own = (part.dtype for part in (*module.parameters(), *module.buffers()))
            dtype = next((dtype for dtype in own if dtype.is_floating_point), columns.dtype)
            further["covariates"] = columns.to(dtype)
    last = _checked.get(data)
    token = CHECKED.set(last[1] if last is not None and last[0]() is module else None)
    try:
        hmm = module(data.lengths, data.observed if data.has_gaps else None, **further)
    except TypeError as error:
        if len(inspect.signature(module.forward).parameters) > 1:
            raise
        text = f"{type(module).__name__}.forward must take (self, lengths, observed=None); {error}"
        raise TypeError(f"{text}. Give observed to the HMM it returns.") from None
    finally:
        CHECKED.reset(token)
    if isinstance(hmm, HMM) and "ids" not in hmm.__dict__ and not data.is_ragged:
        _checked[data] = ref(module), hmm.checked(data.values)
    return hmm


def scale_priors(module: HMMModule, data: Sequences | Parts, group: Any = None) -> float:
    """Set location and scale of default priors from ``data``, and the unit of times; in place.

    Fits do so themselves. Priors with hyperparameters of their own stay: see :func:`normal`.

    Args:
        module: Builds the HMM.
        data: The sequences; steps that are not observed do not count.
        group: The ``ProcessGroup`` by whose data all scale alike; this process by default.

    Returns:
        By how much the loss exceeds that of data in units of their standard deviations, in nats;
        zero if the priors stay.

    Raises:
        ValueError: If squares of the data leave the range of the dtype of the parameters.

    Example:
        >>> module = TabularHMM(2, normal(0))
        >>> _ = scale_priors(module, Sequences.from_list([[1e3, 3e3]]))
        >>> module.emission.prior_loc, module.emission.upper
        (tensor([2000., 2000.]), tensor([5000000., 5000000.]))
    """
    group = group or ProcessGroup()
    emission: Any = module.emission_module()
    if hasattr(module, "set_times"):
        gaps = next(iter(parts_of(data))).gaps
        gaps = torch.zeros(0) if gaps is None else gaps[gaps > 0]
        unit = gaps.median().double() if len(gaps) else torch.zeros((), dtype=torch.float64)
        unit = group.from_first(unit) if data.sharded else unit
        if unit > 0:
            module.set_times(float(unit))
    if not hasattr(emission, "take_moments"):
        return 0.0
    with torch.no_grad():
        parts = [part for part in emission.modules() if isinstance(part, CentredEmission)]
        size = max((part.prior_loc.numel() // max(part.dim, 1) for part in parts), default=2)
        lags = getattr(emission, "lags", 0)
        moments = reduce(merged, [_moments(part, size, lags) for part in parts_of(data)])
        moments = reduce(merged, group.of_all(moments)) if data.sharded else moments
        units = emission.take_moments(group.from_first(moments))  # ranks may differ in rounding
        return group.from_first(torch.as_tensor(units).double()).item()


def _moments(data: Sequences, num_states: int, lags: int) -> Tensor:
    """Count, mean, variance and within-state deviation of the data; with lags also of residuals."""
    found = moments_of(data.known_values, num_states)
    if not lags or found.dim() == 1:
        return found
    pad, windows = torch.nn.functional.pad, []
    for part in data.buckets:
        seen = pad(part.observed, (lags, 0)).unfold(1, lags + 1, 1).all(-1)
        windows.append(pad(part.values, (0, 0, lags, 0)).unfold(1, lags + 1, 1)[seen])
    within = residuals_within(torch.cat(windows), num_states)
    return torch.cat([found, within.to(found)[None]])


def in_units(module: Any, data: Sequences | Parts | None, group: Any) -> None:
    """Standardise the covariates of linear predictors by ``data``; with None undo it.

    All ranks do so by the data of the first one. Of log rates that have not
    been set, intercepts start at a transition per mean time between steps.
    """
    rows, log_rate = None, 0.0
    if data is not None:
        part = next(iter(parts_of(data)))  # the first says it
        rows = part.packed("covariates")
        if rows is None:
            return
        if (gaps := part.gaps) is not None and len(gaps):
            log_rate = -float(gaps.mean().log())
    is_rates = getattr(module, "moved_by", "") == "rates"
    rates = module.transition_predictors if is_rates else None
    for linear in module.modules() if isinstance(module, torch.nn.Module) else ():
        if isinstance(linear, Linear):
            linear.in_units(rows, log_rate if linear is rates else 0.0)
            for tensor in linear.standardisation if data is not None and data.sharded else ():
                tensor.copy_(group.from_first(tensor))


def unweighted(module: Any) -> dict[str, Linear]:
    """Submodules that have smooth terms of unknown weight, by name."""
    parts = module.named_modules() if isinstance(module, HMMModule) else ()
    return {
        name: part
        for name, part in parts
        if isinstance(part, Linear) and part.terms and bool(part.spread.isnan().any())
    }


def check_module(module: object, kind: type = HMMModule, log_prior: object = None) -> None:
    """Raise unless ``module`` is an HMMModule, or of ``kind``, and ``log_prior`` a function."""
    if not isinstance(module, kind):
        inner = isinstance(getattr(module, "module", None), kind)
        cure = "Pass its .module." if inner else "Give one such as TabularHMM(K, normal())."
        raise TypeError(f"module must be an HMMModule; got {type(module).__name__}. {cure}")
    if isinstance(log_prior, type) or not (log_prior is None or callable(log_prior)):
        text = f"log_prior must be a function of the HMM; got {type(log_prior).__name__}"
        raise TypeError(f"{text}. Give one such as DiversityPrior(1.0).")


def check_returns_hmm(hmm: Any) -> HMM:
    """Raise unless the value that a model returned is an HMM; return it."""
    if not isinstance(hmm, HMM):
        text = f"the model must `return` the HMM it built; got {type(hmm).__name__}"
        raise TypeError(f"{text}. End it with `return hmm`.")
    return hmm


def to_model_device(model: Any, guide: Any, data: Data) -> Data:
    """Move ``data`` to the device of the parameters of ``model`` or ``guide``."""
    for part in (model, guide):
        if isinstance(part, nn.Module):
            for tensor in chain(part.parameters(), part.buffers()):
                moved: Any = data if tensor.device == data.device else data.to(tensor.device)
                return moved
    return data


class MarginalModel(OwnParameters):
    """Independent sequences from one HMM whose states are summed out: the form to train.

    Sites: those of ``module``, then ``log_prior`` if there is one, then ``x``, in the plate
    ``sequences``.

    Args:
        module: Builds the HMM; its ``PyroSample`` attributes are the latent variables.
        log_prior: A further log-density of the HMM built, such as a diversity prior; scalar.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences(torch.tensor([[0, 1, 1], [1, 0, 0]]), torch.tensor([3, 2]))
        >>> model = MarginalModel(TabularHMM(2, categorical(2)))
        >>> sorted(poutine.trace(model).get_trace(data).observation_nodes)
        ['x']
    """

    observe = staticmethod(pyro.sample)  # called with a name, an HMM, and its values as ``obs``

    def __init__(self, module: HMMModule, log_prior: LogPrior | None = None) -> None:
        super().__init__()
        check_module(module, torch.nn.Module, log_prior)
        self.module = module
        self.log_prior = log_prior

    def forward(self, data: Sequences) -> HMM:
        """Run the model on ``data`` and return the HMM that was built."""
        return self._condition(build(self.module, data), data)

    def _condition(self, hmm: HMM, data: Sequences) -> HMM:
        """Add the further prior of ``hmm``, and observe the sequences."""
        if self.log_prior is not None:
            pyro.factor("log_prior", self.log_prior(hmm))
        with pyro.plate("sequences", data.total, subsample=data.indices):
            known = hmm if data.labels is None else hmm.restrict(data.labels)
            self.observe("x", known, obs=data.values)
        return hmm


class StatefulModel(MarginalModel):
    """A :class:`MarginalModel` for windows of long sequences: truncated backpropagation.

    A piece that continues the window before (see :class:`pyrohmm.data.batches.Window`) starts from
    the filtered state distribution at its end. No gradient passes from window to window. The start
    of a sequence is as in the other models, and so are whole sequences.

    Args:
        module: A :class:`pyrohmm.NeuralHMM` with blocks.
        num_streams: Number of streams of the windows.
        log_prior: A further log-density of the HMM built.

    Example:
        >>> from pyrohmm import blocks
        >>> _ = pyro.set_rng_seed(0)
        >>> two = blocks.from_clusters(torch.tensor([0, 0, 1]), 2)
        >>> model = StatefulModel(NeuralHMM(4, 3, 8, blocks=two), num_streams=2)
        >>> data = Sequences.from_list([[0, 1, 2] * 20, [2, 0] * 20])
        >>> fit = fit_map(model, data, windows=(2, 10), num_iterations=50)
        >>> bool(fit.losses[-1] < fit.losses[0])
        True
    """

    def __init__(
        self, module: NeuralHMM, num_streams: int, log_prior: LogPrior | None = None
    ) -> None:
        super().__init__(module, log_prior)
        blocks = module.blocks if isinstance(module, NeuralHMM) else None
        if blocks is None:
            text = f"module must be a NeuralHMM with blocks of states; got {type(module).__name__}"
            raise ValueError(f"{text}. Give it blocks=.")
        shape = num_streams, blocks.width
        self.register_buffer("states", torch.full(shape, -1))
        self.register_buffer("log_probs", torch.zeros(shape))

    def forward(self, data: Sequences) -> HMM:
        """Run the model on ``data`` and return the HMM that was built."""
        if not isinstance(data, Window):
            return super().forward(data)
        if int(data.streams.max()) >= len(self.states):
            text = f"num_streams must be that of windows, at least {int(data.streams.max()) + 1}"
            raise ValueError(f"{text}; got {len(self.states)}.")
        continues = data.streams.masked_fill(data.begins, -1)
        # copies: the buffers are replaced before a gradient is taken
        carried = FinalState(self.states.clone(), self.log_probs.clone())
        hmm, numbers = self.module.continue_from(data.lengths, carried, continues)
        ending = hmm.final_state(data.values)
        last = torch.ones_like(data.streams, dtype=torch.bool)
        last[:-1] = data.streams[1:] != data.streams[:-1]
        rows, streams, width = ending.states[last], data.streams[last], ending.states.size(1)
        self.states[streams] = -1
        self.states[streams, :width] = numbers[rows.clamp(min=0)].masked_fill(rows < 0, -1)
        self.log_probs[streams, :width] = ending.log_probs[last].to(self.log_probs.dtype)
        return self._condition(hmm, data)


def markov_sample(name: str, hmm: HMM, obs: Tensor | None = None) -> Tensor:
    """Sample sequences from ``hmm``, its states as enumerated sites inside ``pyro.markov``.

    The same statement as ``pyro.sample(name, hmm, obs=obs)``, spelled out. Call it inside the
    plates that hold the batch dimensions of ``hmm``.

    Sites: ``{name}_state_{t}`` and ``{name}_{t}`` for each step t, and ``{name}_label_{t}`` if the
    states of ``hmm`` are restricted.

    Args:
        name: Prefix of the names of the sites.
        hmm: The distribution; of an :class:`HSMM` or :class:`SecondOrderHMM` the states are those
            of its ``expanded()``.
        obs: Observations ``(*B, T, *E)``; sampled by default.

    Returns:
        The observations ``(*B, T, *E)``.
    """
    if not hmm.chain.is_markov:
        hmm = hmm.expanded()
    hmm.chain.check_samples("the enumerated form")
    exists, event = hmm.exists, hmm.emission.event_shape
    mask, prepared = exists, obs
    if obs is not None:
        hmm.check_labels(obs)
        prepared, known = hmm.prepare_values(obs)
        mask = exists if known is None else known
    padded = not bool(exists.all())
    stay = torch.eye(hmm.num_states).log().to(hmm.log_initial)
    values: list[Tensor] = []
    state: Tensor | None = None
    for t in pyro.markov(range(hmm.num_steps)):
        if state is None:
            logits = hmm.log_initial
        else:
            matrix = hmm.log_transition
            if hmm.transition_per_step:
                matrix = matrix[..., t - 1, :, :]
            logits = Vindex(matrix)[..., state, :]
            if padded:  # the chain has ended: padding must not change the states before
                logits = torch.where(exists[..., t, None], logits, stay[state])
        state = pyro.sample(
            f"{name}_state_{t}", Categorical(logits=logits), infer={"enumerate": "parallel"}
        )
        seen = None if prepared is None else prepared.select(prepared.dim() - 1 - len(event), t)
        with poutine.mask(mask=mask[..., t]):
            emission: Any = hmm.emission
            if isinstance(emission, Autoregressive):
                emission = emission.next(_past(hmm, prepared, values, state, t))
            emission = EmissionAt(emission, state, t if hmm.emission_per_step else None)
            values.append(pyro.sample(f"{name}_{t}", emission, obs=seen))
        if hmm.allowed is not None:
            allowed = hmm.allowed[..., t, :] | ~exists[..., t, None]
            barrier = torch.zeros_like(allowed, dtype=logits.dtype)
            barrier = barrier.masked_fill(~allowed, -torch.inf)
            pyro.factor(f"{name}_label_{t}", Vindex(barrier)[..., state])
    return torch.stack(values, -1 - len(event)) if obs is None else obs


def _past(
    hmm: HMM, observed: Tensor | None, sampled: list[Tensor], state: Tensor, step: int
) -> Tensor:
    """The observations ``(*B, t, *E)`` before a step: those given, or else those sampled."""
    at = -1 - len(hmm.emission.event_shape)
    if observed is not None:
        return observed.narrow(observed.dim() + at, 0, step)
    if sampled:
        return torch.stack(sampled, at)
    return torch.empty((*state.shape, 0, *hmm.emission.event_shape), device=state.device)


class EnumeratedModel(MarginalModel):
    """Pyro model with one enumerated site per state inside ``pyro.markov``.

    This is the form that a Pyro user would write and edit. It needs ``TraceEnum_ELBO`` (or NUTS,
    which recognises enumerated sites), and agrees with :class:`MarginalModel` in loss and gradient.

    Sites: those of ``module``, then ``log_prior`` if there is one, then ``x_state_t`` (enumerated)
    and ``x_t`` for each step t, in the plate ``sequences``.

    Args:
        module: Builds the HMM; its ``PyroSample`` attributes are the latent variables.
        log_prior: A further log-density of the HMM built, such as a diversity prior; scalar.
    """

    observe = staticmethod(markov_sample)


class EmissionAt(TorchDistribution):
    r"""Distribution :math:`p(x_t \mid z_t)` of an observation at known states.

    It selects one of the K log-densities, which works for every distribution.

    Args:
        emission: Distribution of an observation, of batch shape ``(*b, K)``, or ``(*b, T, K)``.
        state: ``(*B)`` integers; dimensions of enumeration are on the left.
        step: The step t, if the emission has a dimension of steps.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface

    def __init__(self, emission: TorchDistribution, state: Tensor, step: int | None = None) -> None:
        self.emission, self.state, self.step = emission, state, step
        parameters = emission.batch_shape[: -1 if step is None else -2]
        batch = broadcast_shapes(state.shape, parameters)
        super().__init__(batch, emission.event_shape, validate_args=False)

    @property
    def support(self) -> constraints.Constraint:
        """Support of the emission."""
        return self.emission.support

    def expand(self, batch_shape: Sequence[int], _instance: EmissionAt | None = None) -> EmissionAt:
        """Expand to a larger batch."""
        return EmissionAt(self.emission, self.state.expand(torch.Size(batch_shape)), self.step)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of ``value`` ``(*B, *E)`` in the states."""
        if self.step is None:
            scores = log_prob_per_state(self.emission, value)
        else:
            value = value.unsqueeze(-1 - len(self.event_shape))  # (*B, 1, *E)
            scores = log_prob_per_state(self.emission, value)[..., self.step, :]
        return Vindex(scores)[..., self.state]

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample an observation in each state, ``(*S, *B, *E)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        state = self.state.expand(shape).unsqueeze(-1)
        with torch.no_grad():
            if self.step is None:
                return sample_emission(self.emission, state).squeeze(len(shape))
            steps = self.emission.batch_shape[-2]
            sequence = sample_emission_per_step(self.emission, state.expand(*shape, steps))
            return sequence.select(len(shape), self.step)


def check_gradients() -> None:
    """Raise where no gradient can be taken.

    Raises:
        RuntimeError: Under ``torch.inference_mode``.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a fit takes gradients: call it, and make its data, "
                           "inside `with torch.inference_mode(False):`.")  # fmt: skip


def remarks(data: Data, module: Any) -> list[str]:
    """Remarks on data that may not be as they were meant: for the notes of every fit.

    No step is observed; states are known from labels, so that no fit is supervised unnoticed;
    symbols seem to be counted from one, or angles to be degrees, or values such as -999 to stand
    for missing ones; of the last, and of whole degrees, it warns. If ``module`` is no HMM module
    only the first is told.
    """
    if not data.num_observed:
        return ["no step is observed: the parameters are those of the priors or of the start"]
    if not isinstance(module, HMMModule):
        return []
    count, total, text = data.num_labelled, int(data.lengths.sum()), list[str]()
    if count:
        text = [f"the states of {count:,} of {total:,} steps were known: the data have labels"]
    if not isinstance(data, Sequences):  # a part is not all
        return text
    values: Any = data.packed("values")
    numbers = values.is_floating_point()
    values = values[:: 1 + len(values) // SOME].nan_to_num() if numbers else data.known_values
    low, top = map(Tensor.item, values.aminmax()) if values.numel() else (0, 0)
    high = max(-low, top)
    for end in {low, top} & CODES_OF_MISSING:
        rest = values[values != end]
        far = rest.numel() and (rest - end).abs().min() > rest.max() - rest.min()
        if far and values.numel() > rest.numel() + 1:
            text += [f"values of {end:g} are far from all others: if they are missing, give NaN"]
            warn_caller(text[-1])
    if not (high > TURN if numbers else low == 1):
        return text
    one = to_model_device(module, None, data[:1])
    with PYRO, torch.no_grad(), poutine.block(), torch.random.fork_rng(), in_mode(False, module):
        hmm = build(module, one)
    if isinstance(hmm, BlockHMM):  # whose emission is a large table
        return text
    emission: Any = getattr(hmm.emission, "base_dist", hmm.emission)
    if numbers and isinstance(emission, VonMises | WrappedCauchy):
        text += [f"angles reach {high:g}: are they degrees? Radians are wanted: torch.deg2rad"]
        if high > 3 * TURN and bool((values == values.round()).all()):  # or they are unwrapped
            warn_caller(text[-1])
    elif is_categorical(emission) and high == emission.param_shape[-1] - 1:
        cure = "if symbols are counted from one, subtract it"  # 0 may stand for unknown ones
        text += [f"symbol 0 never occurs, and {high} does: {cure}"]
    return text


@contextmanager
def exclusive(gradients: bool = True) -> Iterator[None]:
    """A context, or decorator, in which a fit has Pyro for itself, and gradients.

    A fit inside another one, such as in its ``log_prior``, sees none of the effect handlers of
    that one, which are there again when it ends.

    Args:
        gradients: Whether the fit needs them; EM in closed form does not.

    Raises:
        RuntimeError: As :func:`check_gradients`, if it needs them.
    """
    if gradients:
        check_gradients()
    with PYRO, torch.enable_grad():
        stack: list[Any] = runtime._PYRO_STACK
        dims: Any = runtime._DIM_ALLOCATOR
        enumerated: Any = runtime._ENUM_ALLOCATOR
        handlers, plates, numbers = stack[:], dims._stack[:], dict(vars(enumerated))
        stack.clear()
        dims._stack.clear()
        store, before = pyro.get_param_store(), {*pyro.get_param_store()}
        try:
            yield
        finally:
            for name in {*store} - before:  # copies of modules have put them there
                forgotten(store, name)
            stack[:], dims._stack[:] = handlers, plates
            vars(enumerated).clear()
            vars(enumerated).update(numbers)
