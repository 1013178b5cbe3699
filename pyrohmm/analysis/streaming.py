"""Filtering of observations as they come, in memory that does not grow with their number."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._arrays import to_tensor
from .._checks import check_booleans, check_shape, check_size, check_tensor, check_trailing
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM
from .block_steps import BlockSteps
from .chains import in_blocks, normalised, refuse_autoregressive


class Filter:
    r"""Filtered distribution of the current state, updated as observations come.

    .. math:: p(z_t | x_{1:t}) \propto p(x_t | z_t) \sum_{z_{t-1}} p(z_t | z_{t-1}) \,
              p(z_{t-1} | x_{1:t-1})

    The batch shape ``(*B)`` of the HMM is that of the parallel streams; what its ``lengths`` and
    ``observed`` hold plays no part. Probabilities are kept as logarithms: no stream is too long.

    After an impossible observation a stream's evidence is -inf and its states are all zero, and so
    they remain: nothing follows from what cannot happen. Other streams are not affected.

    Args:
        hmm: The model; it must not change with the step.

    Raises:
        TypeError: If ``hmm`` is not an :class:`HMM`.
        ValueError: If ``hmm`` has parameters per step, or an emission that depends on the
            observations before.

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
        hmm.check_constant("Filter")
        refuse_autoregressive(hmm, "Filter")
        if hmm.allowed is not None:
            raise ValueError(
                "hmm is restricted to labels, which belong to some steps. Give one without them."
            )
        self.hmm = hmm
        self._blocks = BlockSteps(hmm) if in_blocks(hmm.with_lengths(hmm.lengths)) else None
        dtype = hmm.log_initial.dtype
        if self._blocks is None:
            dtype = torch.promote_types(dtype, hmm.log_transition.dtype)
        with torch.no_grad():
            self._step = self._steps(1, None)
            initial = hmm.log_initial.detach().to(dtype)
            self._log_states = initial.expand(*self.batch_shape, hmm.num_states).clone()
        self._log_evidence = self._log_states.new_zeros(self.batch_shape, dtype=torch.float64)
        self._surprise = self._log_states.new_zeros(self.batch_shape)
        self._num_steps = 0

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
        return self._log_states.exp()

    def update(self, observation: Tensor | float | None, observed: Tensor | None = None) -> Tensor:
        r"""Take one step in every stream, or several, and return :math:`p(z_t \mid x_{1:t})`.

        Args:
            observation: ``(*B, *E)``, one observation for each stream; or ``(*B, L, *E)``, the next
                L of each. A number is the observation of all streams, None is a step that is
                missing in all of them. What is NaN throughout is missing.
            observed: ``(*B)`` or ``(*B, L)`` booleans, True where the step is observed; all by
                default.

        Returns:
            ``(*B, K)`` or ``(*B, L, K)``, probabilities of the state at each step.

        Raises:
            TypeError: If an argument is of the wrong type or dtype.
            ValueError: If shapes disagree, or (with the ``validate_args`` of the HMM) an
                observation is not in the support of the emission. The filter is then unchanged.
        """
        with torch.no_grad():
            likelihood, known, several = self._read(observation, observed)
            states, scores = [], []
            for t in range(1 if likelihood is None else likelihood[-1].size(-2)):
                joint = self._joint(likelihood, known, t)
                score = joint.logsumexp(-1)
                if known is not None:  # rounding is no evidence
                    score = score.masked_fill(~known[..., t], 0.0)
                self._log_evidence = self._log_evidence + score
                self._log_states = normalised(joint).to(self._log_states.dtype)
                self._num_steps += 1
                states.append(self._log_states)
                scores.append(score)
            # after what is impossible nothing follows, not even a surprise
            self._surprise = -torch.stack(scores, -1) if several else -scores[-1]
            return torch.stack(states, -2).exp() if several else self.states

    def predict(self, num_steps: int = 1) -> Forecast:
        r"""Predictive distributions :math:`p(x_{t+h} \mid x_{1:t})` of the next observations.

        A stream that has become impossible has states zero there also, and log-density -inf.

        Returns:
            A distribution of batch shape ``(*B, num_steps)``; see :class:`Forecast`.

        Raises:
            TypeError: If ``num_steps`` is not an int.
            ValueError: If ``num_steps`` is less than one.
        """
        check_size("num_steps", num_steps)
        with torch.no_grad():
            states = [self._predicted()]
            for _ in range(num_steps - 1):
                states.append(self._transition(states[-1]))
            return Forecast(torch.stack(states, -2).exp(), self.hmm.emission)

    def state_dict(self) -> dict[str, Tensor | int]:
        """The filtered distributions and evidences, as copies; the model is not included.

        Returns:
            ``log_states`` ``(*B, K)``, ``log_evidence`` ``(*B)`` and ``num_steps``.
        """
        return {
            "log_states": self._log_states.clone(),
            "log_evidence": self._log_evidence.clone(),
            "num_steps": self._num_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another filter of the same model stopped, to the last bit.

        Args:
            state_dict: What :meth:`state_dict` returned.

        Raises:
            TypeError: If an entry is of the wrong type.
            ValueError: If an entry is missing, unknown, or of the wrong shape or dtype. The filter
                is then unchanged.
        """
        current = self.state_dict()
        if set(state_dict) != set(current):
            raise ValueError(
                f"state_dict must have the entries {sorted(current)}; got {sorted(state_dict)}. "
                "Give what state_dict() returned."
            )
        meanings = {"log_states": "(*B, K)", "log_evidence": "(*B)"}
        for name, meaning in meanings.items():
            new, old = state_dict[name], current[name]
            check_tensor(name, new)
            check_shape(name, new, tuple(old.shape), meaning)  # type: ignore[union-attr]
            if new.dtype != old.dtype:  # type: ignore[union-attr]
                raise ValueError(
                    f"{name} must have dtype {old.dtype}; got {new.dtype}. "  # type: ignore[union-attr]
                    "Build the filter from a model of the dtype it had."
                )
        num_steps = state_dict["num_steps"]
        check_size("num_steps", num_steps, 0)
        device = self._log_states.device
        self._log_states = state_dict["log_states"].detach().to(device).clone()
        self._log_evidence = state_dict["log_evidence"].detach().to(device).clone()
        self._num_steps = num_steps

    def _joint(self, likelihood: tuple[Tensor, ...] | None, known: Tensor | None, t: int) -> Tensor:
        """Log p(x_t, z_t | x_{1:t-1}), ``(*B, K)``, without x_t where it is missing."""
        if likelihood is None or (known is not None and not bool(known[..., t].any())):
            return self._predicted()
        if self._blocks is None:
            return self._predicted() + likelihood[0][..., t, :]
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

    def _predicted(self) -> Tensor:
        """Log p(z_{t+1} | x_{1:t}), ``(*B, K)``."""
        return self._transition(self._log_states) if self._num_steps else self._log_states

    def _transition(self, log_states: Tensor) -> Tensor:
        """Log-probabilities ``(*B, K)`` of the states one step later."""
        if self._blocks is not None:
            return self._blocks.onward(log_states.reshape(-1, self.hmm.num_states)).reshape(
                log_states.shape
            )
        return (log_states.unsqueeze(-1) + self.hmm.log_transition).logsumexp(-2)

    def _read(
        self, observation: Any, observed: Tensor | None
    ) -> tuple[tuple[Tensor, ...] | None, Tensor | None, bool]:
        """Log p(x_t | z_t) of observations, which are observed, and whether L was given.

        Of all states ``(*B, L, K)``; or, where blocks are visited, their blocks ``(n, L)`` and
        those of the states in them ``(n, L, w)``.
        """
        if observation is None:
            known = self._log_evidence.new_zeros((*self.batch_shape, 1), dtype=torch.bool)
            return None, known, False
        values = self._as_tensor(observation)
        event = self.hmm.event_shape[1:]
        check_trailing("observation", values, tuple(event), "(*E)")
        several = values.dim() > len(self.batch_shape) + len(event)
        if not several:
            values = values.unsqueeze(-1 - len(event))
            observed = observed if observed is None else observed.unsqueeze(-1)
        self._check_batch("observation", values.shape[: values.dim() - len(event) - 1])
        num_steps = values.size(-1 - len(event))
        if num_steps == 0:
            raise ValueError("observation has no step; wanted shape (*B, L, *E) with L at least 1.")
        if observed is not None:
            check_booleans("observed", observed)
            self._check_batch("observed", observed.shape[:-1])
            check_trailing("observed", observed, (num_steps,), "(L,)")
        if values.dtype.is_floating_point:
            known = values.isnan().logical_not()
            known = known.flatten(-len(event)).any(-1) if event else known
            if not bool(known.all()):
                observed = known if observed is None else known & observed
        if observed is not None:
            observed = observed.expand(*self.batch_shape, num_steps)
        if self._blocks is not None:
            rows = values.expand(*self.batch_shape, num_steps).reshape(-1, num_steps)
            mask = None if observed is None else observed.reshape(-1, num_steps)
            lengths = torch.full((len(rows),), num_steps)
            read = self._blocks.read(rows, lengths, mask, self.hmm._validate_args)
            return read, observed, several
        one = num_steps == 1 and observed is None
        hmm = self._step if one else self._steps(num_steps, observed)
        return (hmm.log_factors(values)[2],), observed, several

    def _as_tensor(self, observation: Any) -> Tensor:
        if isinstance(observation, Real) and not isinstance(observation, bool):
            kind = torch.long if isinstance(observation, int) else self._log_states.dtype
            return torch.tensor(observation, dtype=kind, device=self._log_states.device)
        if isinstance(observation, np.ndarray):
            return to_tensor("observation", observation)
        check_tensor("observation", observation)
        return observation

    def _check_batch(self, name: str, shape: torch.Size) -> None:
        batch = self.batch_shape
        fits = all(size in (1, whole) for size, whole in zip(shape[::-1], batch[::-1]))
        if len(shape) > len(batch) or not fits:
            raise ValueError(
                f"{name} must have the batch shape {tuple(batch)} of the HMM, or one that expands "
                f"to it; got {tuple(shape)}. For more streams, build the filter from hmm.expand."
            )

    def _steps(self, num_steps: int, observed: Tensor | None) -> HMM:
        """The HMM of sequences of so many steps, which reads and checks observations."""
        return self.hmm.with_lengths(torch.full(self.batch_shape, num_steps), observed)
