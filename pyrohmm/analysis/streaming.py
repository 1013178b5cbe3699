"""Online filtering of streams, in constant memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arrays import to_tensor
from .._checks import all_names_checked, check_booleans, check_real, check_size, check_times
from .._choices import CACHED
from .._transforms import beside
from ..chains.base import refuse_steps
from ..chains.markov import MarkovChain
from ..chains.rates import Gaps, RateChain, transitions_between
from ..distributions.autoregressive import Autoregressive
from ..distributions.base import check_possible
from ..distributions.block_hmm import BlockHMM
from ..distributions.forecast import AutoregressiveForecast, Forecast
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from ..ops.blocks.transitions import Transitions
from ..ops.forward import log_sums
from ..ops.log_space import finite_or_zero, logsumexp, normalised
from ..ops.recursions import filtered
from .queries import in_blocks

FEW = 1 << 10  # numbers, of which sums over pairs of states take less time than a product
AT_ONCE = 16  # steps from which the chain's filter is faster than one by one


class Message(NamedTuple):
    """Predictive message of the next step, given all steps before it.

    Attributes:
        log_states: ``(*B, K)``, filtered log-probabilities of the states of the expanded chain.
        log_evidence: ``(*B)``, float64.
        num_steps: Number of steps so far.
        time: ``(*B)``, of the last step, in continuous time.
        past: ``(*B, l, *E)``, the last observations, if the next ones depend on them.
        past_known: ``(*B, l)`` booleans, which of these are observed.
    """

    log_states: Tensor
    log_evidence: Tensor
    num_steps: int = 0
    time: Tensor | None = None
    past: Tensor | None = None
    past_known: Tensor | None = None

    def copied(self, device: torch.device | None = None) -> dict[str, Any]:
        """Copies of the fields that are not None, by name, on ``device`` if given."""
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        return fields | {n: value.detach().to(device, copy=True) for n, value in tensors.items()}


class Filter:
    r"""Filtered distribution of the current state, updated as observations come.

    .. math:: p(z_t | x_{1:t}) \propto p(x_t | z_t) \sum_{z_{t-1}} p(z_t | z_{t-1}) \,
              p(z_{t-1} | x_{1:t-1})

    The batch shape ``(*B)`` of the HMM is that of the parallel streams; what its ``lengths``,
    ``times`` and ``observed`` hold plays no part. Probabilities are kept as logarithms: no stream
    is too long; none has a gradient. Parameters per step end with their last step. An impossible
    observation is refused; without ``validate_args`` the stream's evidence stays -inf after it, its
    states all zero.

    Args:
        hmm: The model, of any chain and emission; those that are not Markov are expanded.

    Raises:
        TypeError: If ``hmm`` is not an :class:`HMM`.
        ValueError: If ``hmm`` is restricted to labels.

    Example:
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sticky, coins, torch.tensor(1))
        >>> stream = Filter(hmm)
        >>> for toss in torch.tensor([1, 1, 1]):
        ...     states = stream.update(toss)
        >>> states
        tensor([0.1974, 0.8026])
        >>> stream.log_evidence.exp()
        tensor(0.4057, dtype=torch.float64)
        >>> stream.predict().probs
        tensor([[0.2032, 0.7968]])

        Ten thousand streams side by side, of two steps, and what the second step has surprised by:

        >>> streams = Filter(hmm.expand((10_000,)))
        >>> tosses = torch.eye(10_000, 2).long()  # of the second stream (0, 1)
        >>> streams.update(tosses).shape
        torch.Size([10000, 2, 2])
        >>> streams.surprise[:, 1].argmin(), streams.surprise[1, 1]
        (tensor(1), tensor(0.5220))
    """

    def __init__(self, hmm: HMM) -> None:
        if not isinstance(hmm, HMM):
            is_module = isinstance(hmm, torch.nn.Module)
            one = "module(one)" if is_module else "fit.hmm(data[:1]).with_lengths(one)"
            cure = f"Give that of one stream: {one}, where one = torch.tensor(1)."
            raise TypeError(f"hmm must be an HMM; got {type(hmm).__name__}. {cure}")
        if hmm.allowed is not None:
            text = "hmm must have no labels, which belong to steps that have been"
            raise ValueError(f"{text}. Give hmm.replace(allowed=None).")
        if isinstance(hmm, BlockHMM):
            hmm.check_constant("Filter")
        if isinstance(hmm.chain, RateChain):
            hmm.chain.check_rates("Filter")
        self.hmm = hmm = beside(hmm.log_initial.detach(), hmm)
        self._matrix: Any = None  # of all transitions, if it is the same; of blocks sums over them
        self._state_of: Tensor | None = None  # the state of the HMM that each state here is
        self._lags = 0  # observations before, on which the next one depends
        with torch.no_grad():
            initial, lengths = hmm.log_initial.detach(), torch.full(hmm.batch_shape, hmm.num_steps)
            if in_blocks(hmm):
                self._matrix, self._reader = hmm.chain.transitions(), hmm.with_lengths(lengths)
            else:
                chain = hmm.chain.replace(censored_end=True) if isinstance(hmm, HSMM) else hmm.chain
                chain, state_of, _ = chain.expanded(hmm.lengths, hmm.num_steps)
                self._state_of = state_of if len(state_of) != hmm.num_states else None
                self._lags = hmm.emission.lags if isinstance(hmm.emission, Autoregressive) else 0
                self._tables = chain.log_transition.detach()
                if not (isinstance(hmm.chain, RateChain) or chain.per_step):
                    self._matrix = self._tables
                initial = chain.log_initial.detach()
                initial = initial.to(torch.promote_types(initial.dtype, self._tables.dtype))
                even = hmm.log_initial.new_zeros(hmm.num_states, hmm.num_states).log_softmax(-1)
                reader = hmm.with_chain(MarkovChain(even[0], even))  # of any number of steps
                self._reader = reader.with_lengths(lengths)
            log_states = initial.expand(*self.batch_shape, initial.size(-1)).clone()
        evidence = log_states.new_zeros(self.batch_shape, dtype=torch.float64)
        self._message = Message(log_states, evidence)
        self._surprise = log_states.new_zeros(self.batch_shape)

    def __repr__(self) -> str:
        shape = tuple(self.batch_shape)
        return f"Filter({self.num_steps} steps so far of streams {shape}; {self.hmm})"

    @property
    def batch_shape(self) -> torch.Size:
        """The shape ``(*B)`` of the parallel streams."""
        return self.hmm.batch_shape

    @property
    def num_steps(self) -> int:
        """The number of steps so far, missing ones included."""
        return self._message.num_steps

    @property
    def log_evidence(self) -> Tensor:
        """Log p(x_{1:t}) so far, in nats, ``(*B)``, float64 whatever the model's dtype."""
        return self._message.log_evidence.clone()

    @property
    def surprise(self) -> Tensor:
        r"""Surprise of the last update, :math:`-\log p(x_t \mid x_{1:t-1})`, in nats.

        ``(*B)``, or ``(*B, L)`` of each of its L steps: zero where a step is missing (with
        ``exact_entry``, that of no entry having been seen), and before the first update; infinite
        where an observation is impossible.
        """
        return self._surprise.clone()

    @property
    def state_probs(self) -> Tensor:
        r"""Filtered :math:`p(z_t \mid x_{1:t})`, ``(*B, K)``; p(z_1) before the first step."""
        return self._summed(self._message.log_states)

    def update(
        self,
        observation: Tensor | float | None,
        observed: Tensor | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        r"""Filter the next step, or several, of every stream: :math:`p(z_t \mid x_{1:t})`.

        Args:
            observation: ``(*B, *E)``, one observation for each stream; or ``(*B, L, *E)``, the next
                L of each. A number is the observation of all streams, None is a step that is
                missing in all of them. What is NaN throughout is missing.
            observed: ``(*B)`` or ``(*B, L)`` booleans: which steps are observed; by default all.
            times: ``(*B, L)``, when these steps are; of a :class:`ContinuousTimeHMM`.

        Returns:
            ``(*B, K)`` or ``(*B, L, K)``, probabilities of the state at each step.

        Raises:
            TypeError, ValueError: If dtypes or shapes disagree, times do not increase, or (with
                ``validate_args``) an observation is impossible. The filter is then unchanged.
        """
        with torch.no_grad():
            values, known, several = _read(self, observation, observed)
            count = 1 if values is None else values.size(-len(self.hmm.event_shape))
            matrices, time = self._matrices(count, known, times)
            likelihood, past = self._likelihood(values, known)
            logs, scores = self._filtered(matrices, likelihood)
            if known is not None and getattr(self.hmm.chain, "exact_entry", None) is None:
                scores = scores.masked_fill(~known, 0.0)  # rounding is none
            evidence = self._message.log_evidence + scores.sum(-1, dtype=torch.float64)
            if self.hmm._validate_args:
                check_possible(evidence)
            last, num_steps = logs[..., -1, :], self.num_steps + count
            self._message = Message(last, evidence, num_steps, time, *past)
            # after what is impossible nothing follows, not even a surprise
            self._surprise = -scores if several else -scores[..., -1]
            return self._summed(logs if several else last)

    def predict(self, num_steps: int = 1, times: Tensor | None = None) -> Forecast:
        r"""Predictive distributions :math:`p(x_{t+h} \mid x_{1:t})` of the next observations.

        A stream that has become impossible has states zero there also, and log-density -inf.

        Args:
            num_steps: How many observations, H.
            times: ``(*B, H)``, when they are; of a :class:`ContinuousTimeHMM`.

        Returns:
            A distribution of batch shape ``(*B, H)``; see :class:`Forecast`.

        Raises:
            ValueError: If emissions change with the step, or depend on more than was seen.
        """
        check_size("num_steps", num_steps)
        emission, past = self.hmm.emission, self._message.past
        if self.hmm.emission_per_step:
            refuse_steps("predict")
        with torch.no_grad():
            num_steps = num_steps if times is None else times.size(-1)
            matrices, _ = self._matrices(num_steps, None, times)
            ahead = self._summed(self._filtered(matrices, None)[0])
            if not isinstance(emission, Autoregressive):
                return Forecast(ahead, emission)
            self.hmm.check_constant("predict of observations that depend on those before")
            past = emission.history[..., :0, :] if past is None else past
            lengths = torch.full(self.batch_shape, past.size(-len(self.hmm.event_shape)))
            following = emission.after(past, None, lengths)
            return AutoregressiveForecast(ahead, following, self.hmm.log_transition)

    def state_dict(self) -> dict[str, Any]:
        """The filtered distributions and evidences, as copies; the model is not included.

        Returns:
            ``log_states`` ``(*B, K)``, ``log_evidence`` ``(*B)`` and ``num_steps``; of a chain in
            continuous time ``time`` ``(*B)``, and what the next observations depend on.
        """
        return self._message.copied()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state saved by ``state_dict()`` of a filter of the same model, bit for bit.

        Args:
            state_dict: What :meth:`state_dict` returned.

        Raises:
            TypeError: If an entry is unknown or missing, or ``num_steps`` is not an int.
            ValueError: If a tensor is of the wrong shape or dtype. The filter is then unchanged.
        """
        new = Message(**state_dict)
        check_size("num_steps", new.num_steps, 0)
        for name, old in (("log_states", self._message[0]), ("log_evidence", self._message[1])):
            like = getattr(state_dict[name], "shape", None), getattr(state_dict[name], "dtype", "")
            if like != (old.shape, old.dtype):
                wanted = f"{tuple(old.shape)} of {old.dtype}, as those of this model"
                raise ValueError(f"{name} must be a tensor {wanted}; got {like[0]} of {like[1]}.")
        self._message = Message(**new.copied(self._surprise.device))

    # The recursion

    def _summed(self, log_states: Tensor) -> Tensor:
        """Sum probabilities of the expanded chain to those of the HMM's states, ``(*B, K)``."""
        probs = log_states.exp()
        if self._state_of is None:
            return probs
        sums = probs.new_zeros(*probs.shape[:-1], self.hmm.num_states)
        return sums.index_add(-1, self._state_of, probs)

    def _filtered(self, matrices: list[Any], likelihood: Any) -> tuple[Tensor, Tensor]:
        r"""Filter: :math:`\log p(z_t \mid x_{1:t})` and :math:`\log p(x_t \mid x_{1:t-1})` by step.

        Returns:
            ``(*B, L, K)`` and ``(*B, L)``.
        """
        if isinstance(self._matrix, Transitions):
            return _in_blocks(self, self._matrix, len(matrices), likelihood)
        log_states, found = self._message.log_states, []
        if len(matrices) >= AT_ONCE and self._matrix is not None and likelihood is not None:
            first, table = self._predicted(log_states, matrices[0]), self._matrix.unsqueeze(-3)
            logs = filtered(first, table, likelihood, torch.tensor(len(matrices)))[..., :-1, :]
            rows = max(1, CACHED // (first.numel() * first.size(-1)))
            ahead = [self._predicted(part.to(first), table) for part in logs.split(rows, -2)]
            return _conditioned(torch.cat([first.unsqueeze(-2), *ahead], -2), likelihood)
        seen = log_states.new_zeros(len(matrices), 1) if likelihood is None else likelihood
        for matrix, here in zip(matrices, seen.unbind(-2)):
            found.append(_conditioned(self._predicted(log_states, matrix), here))
            log_states = found[-1][0]
        logs, scores = zip(*found)
        return torch.stack(logs, -2), torch.stack(scores, -1)

    def _predicted(self, log_states: Tensor, matrix: Any) -> Tensor:
        """Predict log-probabilities ``(*B, K)`` of the next states."""
        if matrix is None:
            return log_states
        if matrix.shape[:-2].numel() > 1 or log_states.numel() <= FEW:
            return (log_states.unsqueeze(-1) + matrix).logsumexp(-2)
        rows, core = log_states.double().reshape(-1, 1, log_states.size(-1)), matrix.shape[-2:]
        found = log_sums(rows, matrix.double().reshape(1, 1, *core))
        return found.to(log_states.dtype).reshape(log_states.shape)

    def _matrices(
        self, num_steps: int, known: Tensor | None, times: Any
    ) -> tuple[list[Any], Tensor | None]:
        """Transition matrix to each of the next steps, and the time of the last step."""
        chain = self.hmm.chain
        if isinstance(chain, RateChain):
            check_real("times", times)
            at = _of_streams("times", times, self.batch_shape, num_steps)
            at, last = at.to(chain.rates.device).double(), self._message.time
            joined = at if last is None else torch.cat([last.unsqueeze(-1), at], -1)
            check_times(joined, torch.ones_like(joined, dtype=torch.bool))
            gaps = Gaps.of(joined.diff(dim=-1))
            seen = None if known is None else pad(known, (joined.size(-1) - num_steps, 0))
            found = transitions_between(chain.rates, gaps, chain.exact_entry, seen)
            found = found.to(self._message.log_states.dtype)
            return [*([None] if last is None else []), *found.unbind(-3)], at[..., -1]
        if times is not None:
            raise ValueError("times must be None, for hmm is no ContinuousTimeHMM. Leave them out.")
        begin, end = self.num_steps, self.num_steps + num_steps
        if self._matrix is not None:
            return [self._matrix if begin else None, *[self._matrix] * (num_steps - 1)], None
        if end > self._tables.size(-3) + 1:
            raise ValueError(
                f"hmm must have transitions of as many steps as are filtered, {end}; it has "
                f"{self._tables.size(-3) + 1}. Give it more, or those of every step."
            )
        return [self._tables[..., t - 1, :, :] if t else None for t in range(begin, end)], None

    # Observations

    def _likelihood(
        self, values: Tensor | None, known: Tensor | None
    ) -> tuple[Any, tuple[Tensor, Tensor] | tuple[()]]:
        """Log-likelihoods ``(*B, L, K)``, None if nothing is known, or those of a chain in blocks.

        And past observations for an autoregressive emission.
        """
        hmm, lags, event = self.hmm, self._lags, self.hmm.event_shape[1:]
        *_, past, past_known = self._message
        if values is None and not lags:
            return None, ()
        if values is None:
            like = self._surprise if past is None else past
            values = like.new_zeros(*self.batch_shape, 1, *event)
        at = values.dim() - 1 - len(event)
        seen: Any = known
        before, num_steps, after = 0, values.size(at), 0
        if seen is None and (lags or hmm.emission_per_step):
            seen = torch.ones(values.shape[: at + 1], dtype=torch.bool, device=values.device)
        if past is not None and past_known is not None:
            before = past.size(at)
            values = torch.cat([past.to(values), values], at)
            seen = torch.cat([past_known, seen], -1)
        elif hmm.emission_per_step:
            before = self.num_steps
            after = hmm.num_steps - before - num_steps
            if after < 0:
                raise ValueError(
                    f"hmm must have emissions of as many steps as are filtered; it has "
                    f"{hmm.num_steps}, {-after} too few. Give it more, or those of every step."
                )
            values = pad(values, (0, 0) * len(event) + (before, after))
            seen = pad(seen, (before, after))
        total = before + num_steps + after
        gaps = None if seen is None or bool(seen.all()) else seen
        if gaps is not None or self._reader.num_steps != total or self._reader.observed is not None:
            self._reader = self._reader.with_lengths(torch.full(self.batch_shape, total), gaps)
        found = self._reader._read(values, check=True)
        if isinstance(self._matrix, Transitions):
            return found, ()
        found = found.narrow(-2, before, num_steps)
        if self._state_of is not None:
            found = found.index_select(-1, self._state_of)
        start = max(before + num_steps - lags, 0)
        kept = before + num_steps - start
        return found, (values.narrow(at, start, kept), seen[..., start:]) if lags else ()


def _conditioned(predicted: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``(*A, K)`` of the states given an observation, and its own ``(*A)``."""
    peak = likelihood.amax(-1, keepdim=True).clamp(min=torch.finfo(likelihood.dtype).min)
    joint = predicted + (likelihood - peak)  # in this order, lest digits of the differences go
    scores = joint.logsumexp(-1, keepdim=True)
    logs = joint.log_softmax(-1).masked_fill(scores.isneginf(), -torch.inf)
    return logs.to(predicted.dtype), (scores + peak).squeeze(-1)


def _read(
    stream: Filter, observation: Any, observed: Any
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Check new observations: values ``(*B, L, *E)``, mask ``(*B, L)``, whether L was given.

    There is no mask where all are observed.
    """
    batch, event, like = stream.batch_shape, tuple(stream.hmm.event_shape[1:]), stream._surprise
    if observation is None:
        return None, torch.zeros(*batch, 1, dtype=torch.bool, device=like.device), False
    values = observation
    if not isinstance(values, Tensor):
        values = to_tensor("observation", observation).to(like.device)
        if values.dtype.is_floating_point and values.dim() == 0:
            values = values.to(like.dtype)
    several = values.dim() > len(batch) + len(event)
    values = values if several else values.unsqueeze(-1 - len(event))
    num_steps, known = values.size(-1 - len(event)), None
    values = _of_streams("observation", values, batch, num_steps, *event)
    if observed is not None:
        check_booleans("observed", observed)
        marks = observed if several else observed.unsqueeze(-1)
        known = _of_streams("observed", marks, batch, num_steps)
    if values.dtype.is_floating_point and bool((gaps := values.isnan()).any()):
        numbers = ~(gaps.flatten(-len(event)).all(-1) if event else gaps)
        known = numbers if known is None else known & numbers
    return values, known, several


def _in_blocks(
    stream: Filter, transitions: Transitions, num_steps: int, likelihood: Any
) -> tuple[Tensor, Tensor]:
    """Filtered states and scores of the next steps, by the messages of a chain in blocks."""
    chain, batch, before = stream.hmm.chain, stream.batch_shape, None
    log_states = stream._message.log_states.reshape(-1, chain.num_states)
    if likelihood is None:
        nothing = log_states.new_zeros(1).expand(*batch, num_steps, chain.num_states)
        likelihood = chain.in_blocks(nothing, torch.full(batch, num_steps))
    if stream.num_steps:  # after a block, if there is one that all states are in
        wide = pad(log_states, (0, 1), value=-torch.inf)
        possible = ~wide.isneginf().cpu()
        places = transitions.places(torch.arange(transitions.all)).cpu()
        inside = possible[:, places].sum(-1).max(-1)  # of the block that has most
        one = inside.values == possible.sum(-1)
        before = wide, inside.indices.where(one, transitions.all)
    steps = chain.messages(likelihood, before=before)
    found = [(normalised(x)[:, :-1], total + logsumexp(x, -1)) for x, total in steps]
    logs, totals = (torch.stack(parts, 1) for parts in zip(*found))
    scores = totals - finite_or_zero(pad(totals[:, :-1], (1, 0)))
    logs = logs.to(log_states.dtype).reshape(*batch, *logs.shape[1:])
    return logs, scores.reshape(*batch, num_steps)


def _of_streams(
    name: str, tensor: Tensor, batch: torch.Size, num_steps: int, *event: int
) -> Tensor:
    """Expand ``tensor`` to the batch shape of the streams."""
    shape = torch.Size([*batch, num_steps, *event])
    if num_steps and tensor.shape[-1 - len(event) :] == shape[len(batch) :]:
        with suppress(RuntimeError):  # of sizes that do not expand
            return tensor.expand(shape)
    wanted = f"(*B, L, *E) with *B = {tuple(batch)} and *E = {event}"
    raise ValueError(f"{name} must have shape {wanted}; got {tuple(tensor.shape)}.")


all_names_checked(globals())
