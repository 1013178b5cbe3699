"""Filtering of observations as they come, in memory that does not grow with their number."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._arrays import to_tensor
from .._checks import (
    check_booleans,
    check_real,
    check_shape,
    check_size,
    check_tensor,
    check_times,
    check_trailing,
)
from ..chains.base import refuse_steps
from ..chains.markov import MarkovChain
from ..chains.rates import Gaps, RateChain, transitions_between
from ..distributions.autoregressive import Autoregressive
from ..distributions.block_hmm import BlockHMM
from ..distributions.forecast import AutoregressiveForecast, Forecast
from ..distributions.hmm import HMM
from ..distributions.structured_hmm import HSMM
from .block_steps import BlockSteps
from .chains import in_blocks, normalised


class Filter:
    r"""Filtered distribution of the current state, updated as observations come.

    .. math:: p(z_t | x_{1:t}) \propto p(x_t | z_t) \sum_{z_{t-1}} p(z_t | z_{t-1}) \,
              p(z_{t-1} | x_{1:t-1})

    The batch shape ``(*B)`` of the HMM is that of the parallel streams; what its ``lengths``,
    ``times`` and ``observed`` hold plays no part. Probabilities are kept as logarithms: no stream
    is too long. Parameters per step end with their last step.

    After an impossible observation a stream's evidence is -inf and its states are all zero, and so
    they remain: nothing follows from what cannot happen. Other streams are not affected.

    Args:
        hmm: The model, of any chain and emission. What filters a :class:`pyrohmm.HSMM` or a
            :class:`pyrohmm.SecondOrderHMM` is its expanded chain.

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
        >>> tosses = torch.zeros(10_000, 2).long()
        >>> tosses[7, 1] = 1
        >>> streams.update(tosses).shape
        torch.Size([10000, 2, 2])
        >>> streams.surprise[:, 1].argmin(), streams.surprise[7, 1]
        (tensor(7), tensor(0.5220))
    """

    def __init__(self, hmm: HMM) -> None:
        if not isinstance(hmm, HMM):
            raise TypeError(
                f"hmm must be an HMM; got {type(hmm).__name__}. Call a module with lengths first."
            )
        if hmm.allowed is not None:
            raise ValueError(
                "hmm is restricted to labels, which belong to some steps. Give one without them."
            )
        self.hmm = hmm
        if isinstance(hmm, BlockHMM):
            hmm.check_constant("Filter")
        self._blocks = BlockSteps(hmm) if in_blocks(hmm.with_lengths(hmm.lengths)) else None
        self._state_of: Tensor | None = None
        with torch.no_grad():
            initial = hmm.log_initial.detach()
            if self._blocks is None:
                chain = hmm.chain.replace(censored_end=True) if isinstance(hmm, HSMM) else hmm.chain
                self._chain, self._state_of, _ = chain.expanded(hmm.lengths, hmm.num_steps)
                initial = self._chain.log_initial.detach()
                initial = initial.to(torch.promote_types(initial.dtype, self._chain.matrices.dtype))
            self._log_states = initial.expand(*self.batch_shape, initial.size(-1)).clone()
        self._log_evidence = self._log_states.new_zeros(self.batch_shape, dtype=torch.float64)
        self._surprise = self._log_states.new_zeros(self.batch_shape)
        self._observations = _Observations(hmm, self._blocks, self._surprise, self._state_of)
        self._num_steps = 0
        self._time: Tensor | None = None  # of the last step, in continuous time
        self._past: tuple[Tensor, Tensor] | None = None  # what the next observation depends on

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
        return self._num_steps

    @property
    def log_evidence(self) -> Tensor:
        """Log p(x_{1:t}) so far, in nats, ``(*B)``, float64 whatever the model's dtype."""
        return self._log_evidence.clone()

    @property
    def surprise(self) -> Tensor:
        r"""Surprise of the last update, :math:`-\log p(x_t \mid x_{1:t-1})`, in nats.

        ``(*B)``, or ``(*B, L)`` of each of its L steps: zero where a step is missing, and before
        the first update; infinite where an observation is impossible.
        """
        return self._surprise.clone()

    @property
    def states(self) -> Tensor:
        r"""Filtered :math:`p(z_t \mid x_{1:t})`, ``(*B, K)``; p(z_1) before the first step."""
        return self._of_model(self._log_states.exp())

    def update(
        self,
        observation: Tensor | float | None,
        observed: Tensor | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        r"""Take one step in every stream, or several, and return :math:`p(z_t \mid x_{1:t})`.

        Args:
            observation: ``(*B, *E)``, one observation for each stream; or ``(*B, L, *E)``, the next
                L of each. A number is the observation of all streams, None is a step that is
                missing in all of them. What is NaN throughout is missing.
            observed: ``(*B)`` or ``(*B, L)`` booleans, True where the step is observed; all by
                default.
            times: ``(*B, L)``, when these steps are; of a :class:`ContinuousTimeHMM`.

        Returns:
            ``(*B, K)`` or ``(*B, L, K)``, probabilities of the state at each step.

        Raises:
            TypeError: If an argument is of the wrong type or dtype.
            ValueError: If shapes disagree, times do not increase, the HMM has parameters for fewer
                steps, or (with its ``validate_args``) an observation is not in the support of the
                emission. The filter is then unchanged.
        """
        with torch.no_grad():
            values, known, several = self._observations.read(observation, observed)
            num_steps = 1 if values is None else values.size(-len(self.hmm.event_shape))
            matrices, time = self._matrices(num_steps, known, times)
            likelihood, past = self._observations.likelihood(
                values, known, self._num_steps, self._past
            )
            states, scores = [], []
            for t, matrix in enumerate(matrices):
                joint = self._joint(likelihood, known, t, matrix)
                score = joint.logsumexp(-1)
                if known is not None:  # rounding is no evidence
                    score = score.masked_fill(~known[..., t], 0.0)
                self._log_evidence = self._log_evidence + score
                self._log_states = normalised(joint).to(self._log_states.dtype)
                self._num_steps += 1
                states.append(self.states)
                scores.append(score)
            self._time, self._past = time, past
            # after what is impossible nothing follows, not even a surprise
            self._surprise = -torch.stack(scores, -1) if several else -scores[-1]
            return torch.stack(states, -2) if several else self.states

    def predict(self, num_steps: int = 1, times: Tensor | None = None) -> Forecast:
        r"""Predictive distributions :math:`p(x_{t+h} \mid x_{1:t})` of the next observations.

        A stream that has become impossible has states zero there also, and log-density -inf.

        Args:
            num_steps: How many observations, H.
            times: ``(*B, H)``, when they are; of a :class:`ContinuousTimeHMM`.

        Returns:
            A distribution of batch shape ``(*B, H)``; see :class:`Forecast`.

        Raises:
            TypeError: If ``num_steps`` is not an int.
            ValueError: If ``num_steps`` is less than one, emissions change with the step, or depend
                on observations of which too few were seen.
        """
        check_size("num_steps", num_steps)
        emission = self.hmm.emission
        if self.hmm.emission_per_step:
            refuse_steps("predict")
        if times is not None:
            num_steps = times.size(-1)
        with torch.no_grad():
            log_states = self._log_states
            states: list[Tensor] = []
            for matrix in self._matrices(num_steps, None, times)[0]:
                is_first = self._num_steps == 0 and not states
                log_states = log_states if is_first else self._transition(log_states, matrix)
                states.append(self._of_model(log_states.exp()))
            ahead = torch.stack(states, -2)
            if not isinstance(emission, Autoregressive):
                return Forecast(ahead, emission)
            self.hmm.check_constant("predict of observations that depend on those before")
            past = emission.history[..., :0, :] if self._past is None else self._past[0]
            lengths = torch.full(self.batch_shape, past.size(-len(self.hmm.event_shape)))
            following = emission.after(past, None, lengths)
            return AutoregressiveForecast(ahead, following, self.hmm.log_transition)

    def state_dict(self) -> dict[str, Any]:
        """The filtered distributions and evidences, as copies; the model is not included.

        Returns:
            ``log_states`` ``(*B, K)``, ``log_evidence`` ``(*B)`` and ``num_steps``; of a chain in
            continuous time ``time`` ``(*B)``, and what the next observations depend on.
        """
        tensors = {"log_states": self._log_states, "log_evidence": self._log_evidence}
        if self._time is not None:
            tensors["time"] = self._time
        if self._past is not None:
            tensors["past"], tensors["past_known"] = self._past
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        return {**copies, "num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another filter of the same model stopped, to the last bit.

        Args:
            state_dict: What :meth:`state_dict` returned.

        Raises:
            TypeError: If an entry is of the wrong type.
            ValueError: If an entry is missing, unknown, or of the wrong shape or dtype. The filter
                is then unchanged.
        """
        current = {"log_states": self._log_states, "log_evidence": self._log_evidence}
        required = {*current, "num_steps"}
        others = {"time", "past", "past_known"} & set(state_dict)
        if set(state_dict) - others != required:
            raise ValueError(
                f"state_dict must have the entries {sorted(required)}; got {sorted(state_dict)}. "
                "Give what state_dict() returned."
            )
        for name, meaning in (("log_states", "(*B, K)"), ("log_evidence", "(*B)")):
            new, old = state_dict[name], current[name]
            check_tensor(name, new)
            check_shape(name, new, tuple(old.shape), meaning)
            if new.dtype != old.dtype:
                raise ValueError(
                    f"{name} must have dtype {old.dtype}; got {new.dtype}. "
                    "Build the filter from a model of the dtype it had."
                )
        check_size("num_steps", state_dict["num_steps"], 0)
        device = self._log_states.device
        copies = {
            name: tensor.detach().to(device).clone()
            for name, tensor in state_dict.items()
            if name != "num_steps"
        }
        self._log_states, self._log_evidence = copies["log_states"], copies["log_evidence"]
        self._num_steps, self._time = state_dict["num_steps"], copies.get("time")
        self._past = (copies["past"], copies["past_known"]) if "past" in copies else None

    def _of_model(self, probs: Tensor) -> Tensor:
        """Probabilities ``(*B, K)`` of the states of the HMM, from those of the expanded chain."""
        if self._state_of is None or probs.size(-1) == self.hmm.num_states:
            return probs
        return probs.new_zeros(*probs.shape[:-1], self.hmm.num_states).index_add(
            -1, self._state_of, probs
        )

    def _joint(
        self, likelihood: Any, known: Tensor | None, t: int, matrix: Tensor | None
    ) -> Tensor:
        """Log p(x_t, z_t | x_{1:t-1}), ``(*B, K)``, without x_t where it is missing."""
        missing = likelihood is None or (known is not None and not bool(known[..., t].any()))
        if missing or self._blocks is None:
            states = self._log_states
            states = self._transition(states, matrix) if self._num_steps else states
            return states if missing else states + likelihood[..., t, :]
        states = self._log_states.reshape(-1, self.hmm.num_states)
        rows = torch.ones(len(states), dtype=torch.bool)
        if known is not None:
            rows = known[..., t].reshape(-1).cpu()
        block, here = (part[:, t][rows] for part in likelihood)
        joint = self._blocks.joint(states[rows], block, here, self._num_steps == 0)
        if bool(rows.all()):
            return joint.reshape(self._log_states.shape)
        after = self._blocks.onward(states[~rows]) if self._num_steps else states[~rows]
        out = torch.empty_like(states, dtype=joint.dtype)
        out[rows], out[~rows] = joint, after.to(joint.dtype)
        return out.reshape(self._log_states.shape)

    def _transition(self, log_states: Tensor, matrix: Tensor | None) -> Tensor:
        """Log-probabilities ``(*B, K)`` of the states one step later."""
        if self._blocks is not None:
            rows = log_states.reshape(-1, self.hmm.num_states)
            return self._blocks.onward(rows).reshape(log_states.shape)
        assert matrix is not None
        return (log_states.unsqueeze(-1) + matrix).logsumexp(-2)

    def _matrices(
        self, num_steps: int, known: Tensor | None, times: Any
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Transitions ``(*b, K, K)`` to each of the next steps, and the time of the last of them.

        None to the very first step, and where blocks are visited.
        """
        first = self._num_steps == 0
        if isinstance(self.hmm.chain, RateChain):
            return self._in_time(self.hmm.chain, num_steps, known, times)
        if times is not None:
            raise ValueError("times are those of a ContinuousTimeHMM; this hmm has none.")
        if self._blocks is not None:
            return [None] * num_steps, None
        tables = self._chain.matrices
        if tables.size(-3) == 1 and not self._chain.per_step:
            return [tables.squeeze(-3)] * num_steps, None
        if self._num_steps + num_steps > tables.size(-3) + 1:
            raise ValueError(
                f"hmm has parameters for {tables.size(-3) + 1} steps; got "
                f"{self._num_steps + num_steps}."
            )
        places = range(self._num_steps - 1, self._num_steps - 1 + num_steps)
        return [None if first and t < 0 else tables[..., t, :, :] for t in places], None

    def _in_time(
        self, chain: RateChain, num_steps: int, known: Tensor | None, times: Any
    ) -> tuple[list[Tensor | None], Tensor]:
        """Transition matrices over the gaps between the times of a chain in continuous time."""
        check_real("times", times)
        if times.dim() == 0 or times.size(-1) != num_steps:
            raise ValueError(
                f"times must have shape (*B, L) with L = {num_steps}; got {tuple(times.shape)}."
            )
        self._observations.check_batch("times", times.shape[:-1])
        at = times.expand(*self.batch_shape, num_steps).to(chain.rates.device).double()
        joined = at if self._time is None else torch.cat([self._time.unsqueeze(-1), at], -1)
        check_times(joined, torch.ones_like(joined, dtype=torch.bool))
        gaps = Gaps(*joined.diff(dim=-1).unique(return_inverse=True))
        seen = None if known is None else pad(known, (joined.size(-1) - num_steps, 0), value=True)
        tables = transitions_between(chain.rates, gaps, chain.exact_entry, seen)
        tables = tables.to(self._log_states.dtype)
        matrices: list[Tensor | None] = list(tables.unbind(-3))
        return [None] * (num_steps - len(matrices)) + matrices, at[..., -1]


class _Observations:
    """Reads new observations of the streams of ``hmm``.

    Args:
        hmm: The model.
        blocks: Its steps from block to block, if these are visited.
        like: Of the dtype and device of the states.
        state_of: ``(K',)``, the state of the HMM that each state of the filter is.
    """

    def __init__(
        self, hmm: HMM, blocks: BlockSteps | None, like: Tensor, state_of: Tensor | None
    ) -> None:
        self.hmm, self.blocks, self.like, self.state_of = hmm, blocks, like, state_of
        self.batch_shape = hmm.batch_shape
        self.lags = 0
        if blocks is None:
            self.lags = hmm.emission.lags if isinstance(hmm.emission, Autoregressive) else 0
            size = hmm.num_states
            even = hmm.log_initial.new_zeros(size, size).log_softmax(-1)
            self.reader = HMM.of(  # of any number of steps
                MarkovChain(even[0], even), hmm.emission, hmm.lengths.expand(hmm.batch_shape),
                validate_args=hmm._validate_args, emission_per_step=hmm.emission_per_step,
            )  # fmt: skip

    def likelihood(
        self,
        values: Tensor | None,
        known: Tensor | None,
        num_before: int,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Any, tuple[Tensor, Tensor] | None]:
        """Log p(x_t | z_t) of new observations, and what the next ones depend on.

        Of all states ``(*B, L, K')``; or, where blocks are visited, their blocks ``(n, L)`` and
        those of the states in them ``(n, L, w)``. None if nothing is observed.
        """
        hmm, events = self.hmm, len(self.hmm.event_shape)
        lags = self.lags
        if values is None and not lags:
            return None, None
        if values is None:
            values = self.like.new_zeros(*self.batch_shape, 1, *hmm.event_shape[1:])
        num_steps = values.size(-events)
        if self.blocks is not None:
            rows = values.expand(*self.batch_shape, num_steps).reshape(-1, num_steps)
            mask = None if known is None else known.reshape(-1, num_steps)
            lengths = torch.full((len(rows),), num_steps)
            return self.blocks.read(rows, lengths, mask, hmm._validate_args), None
        wide, seen, before, after = values, known, 0, 0
        if lags:
            wide = values.expand(*self.batch_shape, num_steps, *hmm.event_shape[1:])
            seen = self._mask(num_steps, True) if known is None else known
            if past is not None:
                at, before = wide.dim() - events, past[1].size(-1)
                wide = torch.cat([past[0].to(wide), wide], at)
                seen = torch.cat([past[1], seen], -1)
        elif hmm.emission_per_step:
            before = num_before
            after = hmm.num_steps - before - num_steps
            if after < 0:
                raise ValueError(
                    f"hmm has parameters for {hmm.num_steps} steps; got {before + num_steps}."
                )
            padding = (0, 0) * (events - 1) + (before, after)
            wide = pad(values, padding)
            seen = pad(self._mask(num_steps, True) if known is None else known, (before, after))
        steps = self.reader.with_lengths(
            torch.full(self.batch_shape, before + num_steps + after),
            None if seen is None or bool(seen.all()) else seen,
        )
        likelihood = steps.log_likelihood(wide).narrow(-2, before, num_steps)
        past = None
        if lags and seen is not None:
            start = max(before + num_steps - lags, 0)
            kept = before + num_steps - start
            past = wide.narrow(wide.dim() - events, start, kept), seen[..., start:]
        assert self.state_of is not None
        return likelihood.index_select(-1, self.state_of), past

    def _mask(self, num_steps: int, value: bool) -> Tensor:
        """``(*B, num_steps)`` booleans, all equal."""
        shape = (*self.batch_shape, num_steps)
        return torch.full(shape, value, device=self.like.device)

    def read(
        self, observation: Any, observed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Observations ``(*B, L, *E)``, which are observed ``(*B, L)``, and whether L was given."""
        if observation is None:
            return None, self._mask(1, False), False
        values = self._as_tensor(observation)
        event = self.hmm.event_shape[1:]
        check_trailing("observation", values, tuple(event), "(*E)")
        several = values.dim() > len(self.batch_shape) + len(event)
        if not several:
            values = values.unsqueeze(-1 - len(event))
            observed = observed if observed is None else observed.unsqueeze(-1)
        self.check_batch("observation", values.shape[: values.dim() - len(event) - 1])
        num_steps = values.size(-1 - len(event))
        if num_steps == 0:
            raise ValueError("observation has no step; wanted shape (*B, L, *E) with L at least 1.")
        if observed is not None:
            check_booleans("observed", observed)
            self.check_batch("observed", observed.shape[:-1])
            check_trailing("observed", observed, (num_steps,), "(L,)")
        if values.dtype.is_floating_point:
            known = values.isnan().logical_not()
            known = known.flatten(-len(event)).any(-1) if event else known
            if not bool(known.all()):
                observed = known if observed is None else known & observed
        if observed is not None:
            observed = observed.expand(*self.batch_shape, num_steps)
        return values, observed, several

    def _as_tensor(self, observation: Any) -> Tensor:
        if isinstance(observation, Real) and not isinstance(observation, bool):
            kind = torch.long if isinstance(observation, int) else self.like.dtype
            return torch.tensor(observation, dtype=kind, device=self.like.device)
        if isinstance(observation, np.ndarray):
            return to_tensor("observation", observation)
        check_tensor("observation", observation)
        return observation

    def check_batch(self, name: str, shape: torch.Size) -> None:
        batch = self.batch_shape
        fits = all(size in (1, whole) for size, whole in zip(shape[::-1], batch[::-1]))
        if len(shape) > len(batch) or not fits:
            raise ValueError(
                f"{name} must have the batch shape {tuple(batch)} of the HMM, or one that expands "
                f"to it; got {tuple(shape)}. For more streams, build the filter from hmm.expand."
            )
