"""Filtering of observations as they come, in memory that does not grow with their number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_booleans, check_shape, check_size, check_tensor, check_trailing
from ..distributions.forecast import Forecast
from ..distributions.hmm import HMM


class Filter:
    r"""Law of the current state, kept up to date as observations come one at a time.

    .. math:: p(z_t | x_{1:t}) \propto p(x_t | z_t) \sum_{z_{t-1}} p(z_t | z_{t-1}) \,
              p(z_{t-1} | x_{1:t-1})

    The batch shape ``(*B)`` of the HMM is that of the parallel streams; what its ``lengths`` and
    ``observed`` hold plays no part. Laws are kept as logarithms, so that no stream is too long.

    After an impossible observation a stream's evidence is -inf and its states are all zero, and so
    they remain: nothing follows from what cannot happen. Other streams are not affected.

    Args:
        hmm: The model; it must not change with the step.

    Raises:
        TypeError: If ``hmm`` is not an :class:`HMM`.
        ValueError: If ``hmm`` has parameters per step.

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
    """

    def __init__(self, hmm: HMM) -> None:
        if not isinstance(hmm, HMM):
            raise TypeError(
                f"hmm must be an HMM; got {type(hmm).__name__}. Call a module with lengths first."
            )
        if hmm.transition_per_step or hmm.emission_per_step:
            raise ValueError(
                "hmm must not change with the step, for a stream has no last one; this one has "
                "parameters per step. Use hmm.filtered on the whole sequence."
            )
        if hmm.allowed is not None:
            raise ValueError(
                "hmm is restricted to labels, which belong to given steps. Give one without them."
            )
        self.hmm = hmm
        dtype = torch.promote_types(hmm.log_initial.dtype, hmm.log_transition.dtype)
        with torch.no_grad():
            self._one = self._one_step(None)
            law = hmm.log_initial.detach().to(dtype)
            self._law = law.expand(*self.batch_shape, hmm.num_states).clone()
        self._log_evidence = self._law.new_zeros(self.batch_shape, dtype=torch.float64)
        self._num_steps = 0

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
    def states(self) -> Tensor:
        """Law of the current state, p(z_t | x_{1:t}), ``(*B, K)``; p(z_1) before the first step."""
        return self._law.exp()

    def update(self, observation: Tensor | None, observed: Tensor | None = None) -> Tensor:
        """Take one step in every stream, and return the law of the state there.

        Args:
            observation: ``(*B, *E)``, one observation for each stream; None where the step is
                missing in all of them.
            observed: ``(*B)`` booleans, True where the stream's step is observed; all by default.

        Returns:
            ``(*B, K)``, p(z_t | x_{1:t}).

        Raises:
            TypeError: If an argument is of the wrong type or dtype.
            ValueError: If shapes disagree, or (with the ``validate_args`` of the HMM) an
                observation is not in the support of the emission. The filter is then unchanged.
        """
        with torch.no_grad():
            law = self._next_law()
            if observation is not None:
                law = law + self._log_likelihood(observation, observed)
            score = law.logsumexp(-1)
            law = law - score.masked_fill(score.isneginf(), 0.0).unsqueeze(-1)
            if observation is not None:
                if observed is not None:  # rounding is no evidence
                    score = score.masked_fill(~observed, 0.0)
                self._log_evidence = self._log_evidence + score
            self._law = law.to(self._law.dtype)
            self._num_steps += 1
            return self.states

    def predict(self, num_steps: int = 1) -> Forecast:
        """The law of each of the next ``num_steps`` observations.

        A stream that has become impossible has states zero there also, and log-density -inf.

        Returns:
            A distribution of batch shape ``(*B, num_steps)``; see :class:`Forecast`.

        Raises:
            TypeError: If ``num_steps`` is not an int.
            ValueError: If ``num_steps`` is less than one.
        """
        check_size("num_steps", num_steps)
        with torch.no_grad():
            laws = [self._next_law()]
            for _ in range(num_steps - 1):
                laws.append(self._moved(laws[-1]))
            return Forecast(torch.stack(laws, -2).exp(), self.hmm.emission)

    def state_dict(self) -> dict[str, Tensor | int]:
        """What the filter has learnt from its streams, as copies; the model is not included.

        Returns:
            ``log_states`` ``(*B, K)``, ``log_evidence`` ``(*B)`` and ``num_steps``.
        """
        return {
            "log_states": self._law.clone(),
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
        own = self.state_dict()
        if set(state_dict) != set(own):
            raise ValueError(
                f"state_dict must have the entries {sorted(own)}; got {sorted(state_dict)}. "
                "Give what state_dict() returned."
            )
        meanings = {"log_states": "(*B, K)", "log_evidence": "(*B)"}
        for name, meaning in meanings.items():
            new, old = state_dict[name], own[name]
            check_tensor(name, new)
            check_shape(name, new, tuple(old.shape), meaning)  # type: ignore[union-attr]
            if new.dtype != old.dtype:  # type: ignore[union-attr]
                raise ValueError(
                    f"{name} must have dtype {old.dtype}; got {new.dtype}. "  # type: ignore[union-attr]
                    "Build the filter from a model of the dtype it had."
                )
        num_steps = state_dict["num_steps"]
        if isinstance(num_steps, bool) or not isinstance(num_steps, int):
            raise TypeError(f"num_steps must be an int; got {type(num_steps).__name__}.")
        if num_steps < 0:
            raise ValueError(f"num_steps must not be negative; got {num_steps}.")
        device = self._law.device
        self._law = state_dict["log_states"].detach().to(device).clone()
        self._log_evidence = state_dict["log_evidence"].detach().to(device).clone()
        self._num_steps = num_steps

    def _next_law(self) -> Tensor:
        """Log p(z_{t+1} | x_{1:t}), ``(*B, K)``."""
        return self._moved(self._law) if self._num_steps else self._law

    def _moved(self, law: Tensor) -> Tensor:
        return (law.unsqueeze(-1) + self.hmm.log_transition).logsumexp(-2)

    def _log_likelihood(self, observation: Tensor, observed: Tensor | None) -> Tensor:
        """Log p(x_t | z_t) in each state, ``(*B, K)``."""
        event = self.hmm.emission.event_shape
        check_tensor("observation", observation)
        check_trailing("observation", observation, tuple(event), "(*E)")
        own = observation.shape[: observation.dim() - len(event)]
        self._check_batch("observation", own)
        one = self._one
        if observed is not None:
            check_booleans("observed", observed)
            self._check_batch("observed", observed.shape)
            one = self._one_step(observed)
        return one.log_factors(observation.unsqueeze(-1 - len(event)))[2].squeeze(-2)

    def _check_batch(self, name: str, shape: torch.Size) -> None:
        batch = self.batch_shape
        fits = all(own in (1, whole) for own, whole in zip(shape[::-1], batch[::-1]))
        if len(shape) > len(batch) or not fits:
            raise ValueError(
                f"{name} must have the batch shape {tuple(batch)} of the HMM, or one that expands "
                f"to it; got {tuple(shape)}. For more streams, build the filter from hmm.expand."
            )

    def _one_step(self, observed: Tensor | None) -> HMM:
        """The law of sequences of one step: what reads and checks an observation."""
        hmm = self.hmm
        one = HMM(
            hmm.log_initial,
            hmm.log_transition,
            hmm.emission,
            torch.ones(hmm.batch_shape, dtype=torch.long),
            None if observed is None else observed.unsqueeze(-1),
            validate_args=False,  # the parameters were checked before
        )
        one._validate_args = hmm._validate_args
        return one
