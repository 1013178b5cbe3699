"""``ChainDistribution``: base of HMMs, which joins a chain, an emission, masks and data."""

from __future__ import annotations

import copy
import math
from contextvars import ContextVar
from typing import Any, TypedDict, cast

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution, constraints

from .._arrays import from_numpy
from .._checks import (
    CheckedCalls,
    OwnChecks,
    PyroValidation,
    check_booleans,
    check_broadcast,
    check_integers,
    check_no_nan,
    check_real,
    check_same_device,
    check_size,
)
from .._choices import CACHED
from .._transforms import exporting, opaque, tensors_of, transforming, uncompiled
from ..chains.base import Chain, refuse_steps
from ..chains.markov import MarkovChain
from ..data.parts import StoredSequences
from ..data.sequences import Sequences, check_sequences
from ..ops.log_space import step_mask
from .autoregressive import Autoregressive, AutoregressiveCategorical
from .hard_zeros import log_probs
from .observation import is_categorical, log_likelihood, log_prob_per_state
from .values import SequencesOf, as_numbers, check_support, fill_gaps, refuse_dead_ends

MOST_SEQUENCES = 1 << 28
PER_STEP = (
    "Insert dimensions of size 1 with unsqueeze; of what has a dimension of steps say "
    "transition_per_step=True, or emission_per_step=True"
)
DIMENSION = "Build the emission for the data: normal(D) for vectors of D, normal(0) for numbers"
SYMBOLS = "Call .long() on it; where some are missing, give dtype=torch.long to Sequences.from_..."


class SequenceOptions(TypedDict, total=False):
    """Keyword arguments about sequences that every kind of :class:`HMM` takes."""

    emission_per_step: bool
    allowed: Tensor | None
    num_steps: int | None


# what the checks of an HMM have found: others of its sequences and shapes take it over
CHECKED: ContextVar[dict[str, Any] | None] = ContextVar("pyrohmm_checked", default=None)


class ChainDistribution(CheckedCalls, OwnChecks):
    """The part of an :class:`HMM` that joins a chain, an emission, masks and data."""

    _validate_args = PyroValidation()
    _prepared: dict[str, Any] = {}  # noqa: RUF012  # values, and what prepare_values makes of them
    chain: Any  # a Chain
    lengths: Tensor

    @uncompiled
    def _compose(
        self,
        chain: Chain,
        emission: Any,
        lengths: Tensor | int | None,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Join ``chain`` with the emission, and the lengths and masks of the sequences."""
        self._given = lengths, observed, emission_per_step, allowed, num_steps
        self.chain, self._emission = chain, emission
        checked, ids = CHECKED.get(), [*map(id, self._given)]
        if checked and checked["ids"] == ids and checked["form"] == self._form():
            self.__dict__ |= checked
        else:
            chain.check_shapes()
            _check_emission(emission, chain.num_states, emission_per_step)
            self._num_steps, self.emission_per_step = num_steps, emission_per_step
            self.observed, self.allowed = observed, allowed
            batch_shape, num_steps = self._check_sequences(lengths)
            event_shape = torch.Size((num_steps,)) + emission.event_shape
            super().__init__(batch_shape, event_shape, validate_args=validate_args)
        if self._validate_args and not transforming():
            chain.check_values()

    def _form(self) -> tuple[Any, ...]:
        """Types and shapes of chain and emission, by which checks of an equal HMM are reused."""
        chain, emission = self.chain, self._emission
        of_emission = type(emission), emission.batch_shape, emission.event_shape
        return type(chain), chain.num_states, chain.batches, of_emission

    def checked(self, values: Tensor) -> dict[str, Any]:
        """Results of argument checks, for reuse through ``CHECKED``; those of ``values`` follow."""
        parts = [values] if self.observed is None else [values, self.observed]
        if not any(map(Tensor.is_inference, parts)):  # they count their changes
            self._prepared = {"values": values, "version": None}
        found = self.__dict__ | {"ids": [*map(id, self._given)], "form": self._form()}
        del found["chain"], found["_emission"]
        found.pop("provenance", None)
        return found

    def _check_sequences(self, lengths: Tensor | int | None) -> tuple[torch.Size, int]:
        """The batch shape ``(*B)`` and T; raises unless all arguments agree on them."""
        chain, emission = self.chain, self._emission
        steps, shapes = chain.steps, dict(chain.batches)  # by the argument that says so
        shapes["emission"] = emission.batch_shape[: -2 if self.emission_per_step else -1]
        shapes["lengths"] = torch.Size()  # in its place in messages; known below
        if self._num_steps is not None:
            check_size("num_steps", self._num_steps)
            steps["num_steps"] = self._num_steps
        if self.emission_per_step:
            steps["emission"] = emission.batch_shape[-2]
        for name, core in (("observed", ("T",)), ("allowed", ("T", "K"))):
            if getattr(self, name) is None:
                continue
            mask = from_numpy(name, getattr(self, name))
            setattr(self, name, mask)
            check_booleans(name, mask)
            if mask.dim() < len(core) or (len(core) == 2 and mask.size(-1) != chain.num_states):
                raise ValueError(
                    f"{name} must have shape (*B, {', '.join(core)}); got {tuple(mask.shape)}."
                )
            steps[name], shapes[name] = mask.size(-len(core)), mask.shape[: -len(core)]
        if lengths is None and not steps:
            text = "lengths must be given where no other argument has T steps; got None"
            raise ValueError(f"{text}. Or give num_steps=T, if all sequences have T steps.")
        lengths = min(steps.values()) if lengths is None else lengths
        given: Any = torch.tensor(lengths) if type(lengths) is int else lengths
        self.lengths = given if isinstance(given, Tensor) else from_numpy("lengths", given)
        check_integers("lengths", self.lengths)
        if self.lengths.device.type != "cpu" or self.lengths.dtype != torch.long:
            self.lengths = self.lengths.cpu().long()  # noted by tracers also where it does nothing
        self.may_be_longer, shapes["lengths"] = not steps, self.lengths.shape
        if not self.lengths.numel():
            raise ValueError("lengths is empty; wanted at least one. Give one for each sequence.")
        self._shortest, self._longest = _ends(self.lengths, self._num_steps)
        num_steps = min(steps.values(), default=self._longest)
        if self._shortest < 1 or self._longest > num_steps:
            of = ", ".join(f"{count} of {name}" for name, count in steps.items()) or num_steps
            raise ValueError(
                f"lengths must lie between 1 and the number of steps, {of}; got values from "
                f"{self._shortest} to {self._longest}. Drop empty sequences, and count steps "
                "without their padding."
            )
        if len(set(steps.values())) > 1:
            raise ValueError(f"arguments must have one number of steps T; got {steps}. Pad them.")
        return _batch_of(shapes), num_steps

    def __getstate__(self) -> dict[str, Any]:
        """Attributes to pickle, without Pyro's weak references, which it makes anew."""
        for tensor in tensors_of(self.__dict__):
            tensor.__dict__.pop("unconstrained", None)
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy whose tensors are leaves of a graph of their own, as a pickle's are."""
        for tensor in tensors_of(self.__dict__):
            if not tensor.is_leaf and id(tensor) not in memo:
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo).requires_grad_()
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    # What it is made of

    @property
    def log_initial(self) -> Tensor:
        """Log-probabilities of the first state, ``(K,)``."""
        return self.chain.log_initial

    @property
    def log_transition(self) -> Tensor:
        r"""``(K, K)``, or ``(T-1, K, K)`` per step: :math:`\log p(z_{t+1} \mid z_t)`."""
        return self.chain.log_transition

    @property
    def transition_per_step(self) -> bool:
        """Whether transitions change with the step."""
        return self.chain.per_step

    @property
    def emission(self) -> TorchDistribution:
        r"""Emission distribution :math:`p(x_t \mid z_t)`, over ``(K,)``, or ``(T, K)`` per step."""
        emission = self._emission
        return emission if isinstance(emission, Distribution) else emission.distribution

    @property
    def num_states(self) -> int:
        """K, the number of states."""
        return self.chain.num_states

    @property
    def num_steps(self) -> int:
        """T, the number of steps after padding."""
        return self.event_shape[0]

    @property
    def exists(self) -> Tensor:
        """Mask of the steps that are not padding, ``(*B, T)`` booleans."""
        return step_mask(self.lengths, self.num_steps, self.log_initial.device)

    @property
    def known(self) -> Tensor:
        """Mask of the steps that are observed and not padding, ``(*B, T)`` booleans."""
        return self.exists if self.observed is None else self.exists & self.observed

    @property
    def support(self) -> constraints.Constraint:
        """Support: sequences that the emission can emit; anything at unobserved steps.

        A ``TransformedDistribution`` of an HMM counts the Jacobian of padded steps as well, where
        there are such: transform the emission instead.
        """
        return SequencesOf(self)

    def check_constant(self, purpose: str, markov: bool = True) -> None:
        """Raise unless the parameters are the same at every step, as ``purpose`` needs.

        With ``markov`` also if the next state depends on more than the state.
        """
        if markov:
            self.chain.check_markov(purpose)
        self.chain.check_constant(purpose)
        if self.emission_per_step:
            refuse_steps(purpose)

    # Parameters and data as the recursions read them

    def log_factors(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Log factors of the joint density: initial, transition and emission terms.

        This is the one place where parameters and data meet; recursions of your own begin here.

        Args:
            values: ``(*B, T, *E)``, observations.

        Returns:
            :math:`\log p(z_1)` ``(*B, K)``, :math:`\log p(z_{t+1} \mid z_t)` ``(*B, 1|T-1, K, K)``
            and :math:`\log p(x_t \mid z_t)` ``(*B, T, K)``: 0 where a step is not observed, -inf
            for states that labels exclude. Batch dimensions broadcast, and may be missing.

        Raises:
            ValueError: If the chain is not a Markov one, or (with ``validate_args``) a
                log-likelihood is not finite or labels leave no path.
        """
        self.chain.check_markov("log_factors")
        return self.log_initial, self.chain.matrices, self.log_likelihood(values)

    @opaque
    def log_likelihood(self, values: Tensor) -> Tensor:
        r"""Log-likelihoods :math:`\log p(x_t \mid z_t)`: the last of :meth:`log_factors`."""
        return cast("Tensor", self._read(values, check=True))

    def symbol_factors(
        self, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None] | None:
        """Arguments of :func:`pyrohmm.ops.recursions.log_evidence` with a table of symbols.

        None if observations are not symbols, parameters not constant, or states restricted.
        """
        chain = self.chain
        constant = type(chain) is MarkovChain and not (chain.per_step or self.emission_per_step)
        if not constant or self.allowed is not None:
            return None
        emission = self.emission
        if not (isinstance(emission, AutoregressiveCategorical) or is_categorical(emission)):
            return None
        symbols, known = self.prepare_values(values)
        if isinstance(emission, AutoregressiveCategorical):
            symbols, table = emission.codes(emission.windows(symbols)), emission.log_symbols
        else:
            table = log_probs(emission)
        known = known if self.observed is not None else None  # recursions know of padding
        return self.log_initial, chain.matrices, table, self.lengths, symbols, known

    def _read(self, values: Tensor, check: bool = False, with_labels: bool = True) -> Any:
        """Emission log-likelihoods in the form of the chain; -inf for states that labels exclude.

        Zero where a step is not observed; with ``check`` as :meth:`log_likelihood` checks them.
        """
        (values, known), emission = self.prepare_values(values), self.emission
        if self.emission_per_step:
            likelihood = log_prob_per_state(emission, values)
        elif isinstance(emission, Autoregressive):
            likelihood = emission.log_likelihood(values)
        else:
            likelihood = log_likelihood(emission, values)
        likelihood = likelihood.to(self.log_initial.dtype)  # that of results, whatever values have
        if known is not None and self.observed is not None:  # recursions know of padding
            likelihood = likelihood.masked_fill(~known.unsqueeze(-1), 0.0)
        if self.allowed is not None and with_labels:
            likelihood = likelihood.masked_fill(~self.allowed, -torch.inf)
        if check and self._validate_args and not transforming():
            check_likelihood(likelihood)
            self.check_labels(values)
        return likelihood

    def prepare_values(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Check ``values``, and fill unobserved steps with a placeholder from the support.

        Args:
            values: ``(*B, T, *E)``, observations; what is padded or not observed may be anything.
                Where the longest length says what T is, steps after it are padding.

        Returns:
            Values of the support, with as many batch dimensions as the parameters have, so that
            those of time and of batch stay apart; and which steps exist and are observed,
            ``(*B, T)`` booleans, or None if all are.

        Raises:
            TypeError: If ``values`` are of the wrong type or dtype.
            ValueError: If shapes or devices disagree, values are one sequence where lengths differ,
                or (with ``validate_args``) an observation is not in the support.
        """
        # without a cache the default, ``self``, is no values
        kept = self._prepared if values is self._prepared.get("values", self) else {}
        version = [part._version for part in (values, self.observed) if kept and part is not None]
        if kept and kept["version"] == version:
            return cast("tuple[Tensor, Tensor | None]", kept["found"])
        values, first = self.values_of(values), self.log_initial
        check_real("values", values)
        check_same_device({"values": values, "log_initial": first})
        whole, event_shape = self.emission, self.event_shape
        emission = whole.initial if isinstance(whole, Autoregressive) else whole
        outer = values.shape[: max(values.dim() - len(event_shape), 0)]
        if values.shape[len(outer) :] != event_shape and self.may_be_longer:
            values = values[(slice(None),) * len(outer) + (slice(event_shape[0]),)]
        if values.shape[len(outer) :] != event_shape:
            same = values.shape[len(outer) :][:1] == event_shape[:1]
            cure = DIMENSION if same else f"{_others(self)}. {DIMENSION}"
            text = f"values must end in shape (T, *E) = {tuple(event_shape)}; got shape"
            raise ValueError(f"{text} {tuple(values.shape)}. {cure}.")
        if is_categorical(emission):
            check_integers("values", values, SYMBOLS)
        elif not values.dtype.is_floating_point:
            values = as_numbers(values, first.dtype)
        batch = self.batch_shape  # the usual case
        if outer != batch:
            batch = check_broadcast({"values": outer, "HMM": batch}, _others(self))
        if self._shortest < self._longest:
            self.refuse_one_series(outer)
        if len(batch) > len(outer):
            values = values.reshape((1,) * (len(batch) - len(outer)) + values.shape)
        has_gaps = self.observed is not None or self._shortest < event_shape[0]
        known = self.known if has_gaps else None
        if known is not None:
            values = fill_gaps(values, known, emission, padded=self.observed is None)
        fixed = not transforming()
        if fixed and self._validate_args:
            check_support(values, known, emission, self.emission_per_step)
        if isinstance(whole, Autoregressive):
            gaps = known if self.observed is not None else None
            whole.check_context(values if self._validate_args else None, gaps)
        if kept and fixed and values.numel() <= CACHED and not values.requires_grad:
            kept.update(version=version, found=(values, known))
        return values, known

    def refuse_one_series(self, batch: torch.Size) -> None:
        """Raise if values of one series are given for sequences of several lengths."""
        if self._shortest < self._longest and math.prod(batch) == 1 and not transforming():
            raise ValueError(
                f"values must be those of the {self.lengths.numel()} sequences of this HMM, whose "
                f"lengths differ; got one, of batch shape {tuple(batch)}. {_others(self)}."
            )

    def values_of(self, data: Any) -> Any:
        """Values of ``Sequences`` with this HMM's lengths and gaps; other data as a tensor."""
        if isinstance(data, Tensor):
            return data
        if isinstance(data, StoredSequences):
            check_sequences("values", data)
        if not isinstance(data, Sequences):
            return from_numpy("values", data)
        fits = self.lengths.shape[-1:] == data.lengths.shape and bool(
            (self.lengths == data.lengths).all()
        )
        if not fits or (data.has_gaps and self.observed is None):
            lacking = "gaps" if fits else "lengths"
            text = f"values are Sequences whose {lacking} this HMM does not have"
            raise ValueError(f"{text}. {_others(self)}.")
        return data.values

    def check_labels(self, values: Tensor) -> None:
        """Raise if labels exclude every path of values that are possible without labels.

        Nothing is read unless states are restricted, and ``validate_args`` is set.
        """
        if self.allowed is None or not self._validate_args or transforming():
            return
        with torch.no_grad():
            reached = self.chain.filtered(self._read(values), self.lengths).isfinite().any(-1)
            lost = (self.exists & ~reached).any(-1)
            if bool(lost.any()):
                free = self.chain.log_evidence(self._read(values, with_labels=False), self.lengths)
                refuse_dead_ends(reached, lost & free.isfinite())


def _batch_of(shapes: dict[str, torch.Size]) -> torch.Size:
    """Broadcast batch shape; raise if it has more sequences than can be meant."""
    batch = check_broadcast(shapes, PER_STEP)
    if (count := math.prod(batch)) > MOST_SEQUENCES:
        listing = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"batch shapes must broadcast to at most {MOST_SEQUENCES:,} sequences; got "
            f"{listing}, which make {count:,}: the evidence alone would take {4 * count:,} "
            "bytes. Give arguments of the same sequences the same batch shape."
        )
    return batch


def check_likelihood(likelihood: Tensor) -> None:
    """Raise if log-likelihoods or evidences hold NaN or plus infinity."""
    cure = "Look for NaN in values or parameters, or a scale that has shrunk to zero."
    check_no_nan("the log-likelihood of values", likelihood, cure)


def _ends(lengths: Tensor, num_steps: int | None) -> tuple[int, int]:
    """Smallest and largest length; 1 and ``num_steps`` within vmap and export, which hide them."""
    if torch._C._functorch.is_batchedtensor(lengths) or exporting():
        if num_steps is None:
            text = "num_steps must be given within vmap over lengths, and torch.export"
            raise ValueError(f"{text}. Pass T, with padding.")
        return 1, num_steps
    if torch._C._are_functorch_transforms_active():
        low, high = torch.aminmax(lengths)
    else:  # as an array, of which no tracer knows
        low, high = lengths.numpy().min(), lengths.numpy().max()
    return int(low), int(high)


def check_possible(log_evidence: Tensor) -> None:
    """Raise if a log evidence, or a log joint density of a path, is -inf."""
    if transforming():
        return
    count = int(log_evidence.isneginf().sum())
    if count:
        first = log_evidence.isneginf().nonzero()[0].tolist()
        which = f", the first at {first[0] if len(first) == 1 else tuple(first)}" if first else ""
        raise ValueError(
            f"values must be possible under the model; {count} of {log_evidence.numel()} sequences "
            f"have probability zero{which}. Leave them out, or mark what is impossible as not "
            "observed."
        )


def _others(hmm: ChainDistribution) -> str:
    """What an error says where values are not those of the HMM."""
    if hmm.transition_per_step or hmm.emission_per_step:
        return "An HMM is of the steps and covariates of its data: for others fit.hmm(data)"
    other = "fit.hmm(data), or hmm.with_lengths(data.lengths, data.observed)"
    return f"An HMM is of the lengths of its data: for others {other}"


def _check_emission(emission: Any, num_states: int, per_step: bool) -> None:
    """Raise unless the emission is batched over states, and if ``per_step`` over steps."""
    kind = type(emission).__name__
    if not isinstance(emission, Distribution) and not hasattr(type(emission), "distribution"):
        text = f"emission must be a distribution batched over the K states; got {kind}"
        raise TypeError(f"{text}. Pass one such as Normal(loc, scale), with (K,) parameters.")
    base = emission
    while hasattr(base, "base_dist"):
        base = base.base_dist
    if getattr(type(base), "support", None) is Distribution.support:
        raise TypeError(
            f"emission must say what it emits; {type(base).__name__} has no support. Define it in "
            "the class, such as support = constraints.real."
        )
    if emission.batch_shape[-1:] != (num_states,):
        raise ValueError(
            f"emission must have a batch shape that ends in K = {num_states} states; got batch "
            f"shape {tuple(emission.batch_shape)}. Call .to_event(1) on vectors."
        )
    if per_step and (len(emission.batch_shape) < 2 or isinstance(emission, Autoregressive)):
        raise ValueError(
            "with emission_per_step, emission must have batch shape (*B, T, K), and not depend on "
            f"the observations before; got {kind} of batch shape {tuple(emission.batch_shape)}. "
            "Leave that out for (*B, K)."
        )
