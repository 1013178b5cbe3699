"""Online filtering of streams, in constant memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arrays import to_tensor
from .._checks import check_booleans, check_real, check_size, check_times
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
from ..ops.log_space import normalised
from .queries import in_blocks

# To the first step no transition leads; where blocks are visited sums are over those of blocks.
Transition = Tensor | Transitions | None
# log p(x_t | z_t) ``(*B, L, K)``; where blocks are visited of step t, with the blocks ``(n,)``.
Likelihood = Tensor | Callable[[int], tuple[Any, Any]]
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
        self._blocks: Transitions | None = None
        self._is_constant = False  # one transition matrix
        self._state_of: Tensor | None = None  # the state of the HMM that each state here is
        with torch.no_grad():
            initial = hmm.log_initial.detach()
            if in_blocks(hmm):
                self._blocks = hmm.chain.transitions()
            else:
                chain = hmm.chain.replace(censored_end=True) if isinstance(hmm, HSMM) else hmm.chain
                self._chain, self._state_of, _ = chain.expanded(hmm.lengths, hmm.num_steps)
                rated = isinstance(hmm.chain, RateChain)
                self._is_constant = not (rated or self._chain.per_step)
                initial = self._chain.log_initial.detach()
                initial = initial.to(torch.promote_types(initial.dtype, self._chain.matrices.dtype))
                even = hmm.log_initial.new_zeros(hmm.num_states, hmm.num_states).log_softmax(-1)
                self._reader = HMM.of(  # of any number of steps
                    MarkovChain(even[0], even), hmm.emission, hmm.lengths.expand(self.batch_shape),
                    validate_args=hmm._validate_args, emission_per_step=hmm.emission_per_step,
                )  # fmt: skip
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

        ``(*B)``, or ``(*B, L)`` of each of its L steps: zero where a step is missing, and before
        the first update; infinite where an observation is impossible.
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
            count, time = known.size(-1), None
            if count >= AT_ONCE and self._is_constant and times is None:
                likelihood, past = self._likelihood(values, known)
                states, scores, log_states = self._at_once(likelihood)
            else:
                matrices, time = self._matrices(count, known, times)
                likelihood, past = self._likelihood(values, known)
                states, scores, log_states = self._passed(matrices, likelihood)
            scores = scores.masked_fill(~known, 0.0)  # rounding is none
            _, evidence, num_steps, *_ = self._message
            evidence = evidence + scores.double().sum(-1)
            if self.hmm._validate_args:
                check_possible(evidence)
            self._message = Message(log_states, evidence, num_steps + count, time, *past)
            # after what is impossible nothing follows, not even a surprise
            self._surprise = -scores if several else -scores[..., -1]
            return states if several else states[..., -1, :]

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
            ahead = self._passed(self._matrices(num_steps, None, times)[0], _nothing)[0]
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
        probs, count = log_states.exp(), self.hmm.num_states
        if self._state_of is None or probs.size(-1) == count:
            return probs
        return probs.new_zeros(*probs.shape[:-1], count).index_add(-1, self._state_of, probs)

    def _passed(
        self, matrices: list[Transition], likelihood: Likelihood
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Filter: :math:`p(z_t \mid x_{1:t})`, :math:`\log p(x_t \mid x_{1:t-1})` by step.

        Returns:
            ``(*B, L, K)``, ``(*B, L)``, and log-probabilities of the states after the last step.
        """
        log_states, states, scores = self._message.log_states, [], []
        for t, matrix in enumerate(matrices):
            if isinstance(likelihood, Tensor):
                here, block = likelihood[..., t, :], None
            else:
                here, block = likelihood(t)
            joint = self._predicted(log_states, matrix, block) + here
            scores.append(joint.logsumexp(-1))
            log_states = normalised(joint).to(log_states.dtype)
            states.append(self._summed(log_states))
        return torch.stack(states, -2), torch.stack(scores, -1), log_states

    def _at_once(self, likelihood: Any) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`_passed`, of steps of one transition matrix, by the filter of the chain."""
        matrix, count = self._chain.matrices, likelihood.size(-2)
        first = self._message.log_states
        if self.num_steps:
            first = self._predicted(first, matrix.squeeze(-3), None)
        lengths = torch.full(self.batch_shape, count)
        logs = self._chain.replace(log_initial=first).filtered(likelihood, lengths)
        rows = max(1, CACHED // (first.numel() * first.size(-1)))
        ahead = [(part.unsqueeze(-1) + matrix).logsumexp(-2) for part in logs.split(rows, -2)]
        before = torch.cat([first.unsqueeze(-2), *ahead], -2)[..., :-1, :]
        return self._summed(logs), (before + likelihood).logsumexp(-1), logs[..., -1, :]

    def _predicted(self, log_states: Tensor, matrix: Transition, block: Tensor | None) -> Tensor:
        """Predict log-probabilities ``(*B, K)`` of the next states, in blocks ``(n,)`` if given.

        A block is one more than there are where the state may be in any.
        """
        if matrix is None:
            return log_states
        if isinstance(matrix, Tensor):
            return (log_states.unsqueeze(-1) + matrix).logsumexp(-2)
        wide = pad(log_states.reshape(-1, self.hmm.num_states), (0, 1), value=-torch.inf)
        everything = torch.full((len(wide),), matrix.all)
        possible = ~wide.isneginf().cpu()
        places = matrix.places(torch.arange(matrix.all)).cpu()
        inside = possible[:, places].sum(-1).max(-1)  # of the block that has most
        source = torch.where(inside.values == possible.sum(-1), inside.indices, everything)
        after = matrix.sums(wide, source, everything if block is None else block)
        return after[:, :-1].to(log_states.dtype).reshape(log_states.shape)

    def _matrices(
        self, num_steps: int, known: Tensor | None, times: Any
    ) -> tuple[list[Transition], Tensor | None]:
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
        steps = range(self.num_steps, self.num_steps + num_steps)
        if self._blocks is not None:
            return [self._blocks if t else None for t in steps], None
        tables = self._chain.matrices
        if tables.size(-3) == 1 and not self._chain.per_step:
            tables = tables.expand(*tables.shape[:-3], steps.stop, -1, -1)
        if steps.stop > tables.size(-3) + 1:
            raise ValueError(
                f"hmm must have transitions of as many steps as are filtered, {steps.stop}; it has "
                f"{tables.size(-3) + 1}. Give it more, or those of every step."
            )
        return [tables[..., t - 1, :, :] if t else None for t in steps], None

    # Observations

    def _likelihood(
        self, values: Tensor | None, known: Tensor
    ) -> tuple[Likelihood, tuple[Tensor, Tensor] | tuple[()]]:
        """Log-likelihoods by step, and past observations for an autoregressive emission."""
        hmm, events, num_steps = self.hmm, len(self.hmm.event_shape), known.size(-1)
        emission = hmm.emission if self._blocks is None else None
        lags = emission.lags if isinstance(emission, Autoregressive) else 0
        if values is None and not lags:
            return _nothing, ()
        if values is None:
            like = self._surprise if self._message.past is None else self._message.past
            values = like.new_zeros(*self.batch_shape, 1, *hmm.event_shape[1:])
        if self._blocks is not None and isinstance(hmm, BlockHMM):
            return _in_blocks(hmm, self._blocks, values, known), ()
        before, after, seen = 0, 0, known
        at = values.dim() - events
        if self._message.past is not None and self._message.past_known is not None:
            before = self._message.past_known.size(-1)
            values = torch.cat([self._message.past.to(values), values], at)
            seen = torch.cat([self._message.past_known, known], -1)
        elif hmm.emission_per_step:
            before = self.num_steps
            after = hmm.num_steps - before - num_steps
            if after < 0:
                raise ValueError(
                    f"hmm must have emissions of as many steps as are filtered; it has "
                    f"{hmm.num_steps}, {-after} too few. Give it more, or those of every step."
                )
            values = pad(values, (0, 0) * (events - 1) + (before, after))
            seen = pad(known, (before, after))
        total, complete = before + num_steps + after, bool(seen.all())
        if not complete or self._reader.num_steps != total or self._reader.observed is not None:
            lengths = torch.full(self.batch_shape, total)
            self._reader = self._reader.with_lengths(lengths, None if complete else seen)
        found = self._reader.log_likelihood(values).narrow(-2, before, num_steps)
        assert self._state_of is not None
        found = found.index_select(-1, self._state_of)
        start = max(before + num_steps - lags, 0)
        kept = before + num_steps - start
        past = (values.narrow(at, start, kept), seen[..., start:]) if lags else ()
        return found, past


def _read(stream: Filter, observation: Any, observed: Any) -> tuple[Tensor | None, Tensor, bool]:
    """Check new observations: values ``(*B, L, *E)``, mask ``(*B, L)``, whether L was given."""
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
    num_steps = values.size(-1 - len(event))
    values = _of_streams("observation", values, batch, num_steps, *event)
    known = torch.ones(*batch, num_steps, dtype=torch.bool, device=like.device)
    if observed is not None:
        check_booleans("observed", observed)
        marks = observed if several else observed.unsqueeze(-1)
        known = _of_streams("observed", marks, batch, num_steps)
    if values.dtype.is_floating_point:
        numbers = ~values.isnan()
        known = known & (numbers.flatten(-len(event)).any(-1) if event else numbers)
    return values, known, several


def _nothing(_: int) -> tuple[float, None]:
    """Log-likelihood of a missing step: zero in all states."""
    return 0.0, None


def _in_blocks(
    hmm: BlockHMM, transitions: Transitions, values: Tensor, known: Tensor
) -> Likelihood:
    """Function of t that returns log-likelihoods of all states, and the block of the symbol."""
    num_steps, shape = known.size(-1), (*hmm.batch_shape, hmm.num_states)
    rows = values.reshape(-1, num_steps, *hmm.event_shape[1:])
    mask = known.reshape(-1, num_steps)
    lengths = torch.full((len(rows),), num_steps)
    blocks, logs = hmm.symbols.likelihood(rows, lengths, mask, bool(hmm._validate_args))
    blocks = blocks.masked_fill(~mask.cpu(), transitions.all)

    def at(t: int) -> tuple[Tensor, Tensor]:
        wide = transitions.widened(logs[:, t], blocks[:, t])[:, :-1]
        return wide.masked_fill(~mask[:, t, None], 0.0).reshape(shape), blocks[:, t]

    return at


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
