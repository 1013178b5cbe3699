"""``HMM``: the distribution over whole sequences whose states are summed out."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import Categorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from .._checks import (
    check_booleans,
    check_broadcast,
    check_floats,
    check_integers,
    check_lengths,
    check_log_simplex,
    check_no_nan,
    check_same_device,
    check_size,
    check_tensor,
    check_trailing,
)
from .._precision import full_precision
from ..ops import recursions
from ..ops import stationary as stationary_ops
from ..ops.recursions import ExpectedCounts, Posterior
from .forecast import Forecast
from .observation import Tied, is_categorical, log_likelihood, log_prob_per_state, log_probs
from .sampling import _draw_rows, _Table, sample_emission, sample_emission_per_step


class HMM(TorchDistribution):
    r"""Sequences emitted by a Markov chain that is not seen.

    .. math:: p(x_{1:T}) = \sum_{z_{1:T}} p(z_1) \, p(x_1 | z_1)
              \prod_{t=2}^T p(z_t | z_{t-1}) \, p(x_t | z_t)

    The chain emits at its first state, as in Rabiner (1989). This differs from
    :class:`pyro.distributions.DiscreteHMM`, which moves once before it emits.

    A sequence is one event: ``event_shape`` is ``(T, *E)``, with ``E`` the event shape of
    ``emission``, and ``batch_shape`` is what the batch dimensions ``*B`` of all arguments
    broadcast to. Sequences shorter than T are padded on the right with anything.

    The parameters may have batch dimensions (particles, restarts, posterior draws), to the left of
    the dimensions below; ``(R, 1, K, K)`` with lengths ``(N,)`` are R matrices for N sequences.
    Minus infinity in the logs is legal: a move or a symbol that cannot happen.

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_transition: ``(K, K)``, log-probabilities of the next state; row = from, column = to.
            With ``transition_per_step``, ``(T-1, K, K)``: one matrix for each move.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed. A step that is not adds
            nothing, whatever ``values`` hold there. Single components of a vector are missing where
            ``values`` are NaN: see :func:`pyrohmm.distributions.marginal_log_prob`.
        validate_args: Whether to read values in order to check them; shapes are always checked.
            Pyro's setting by default.
        transition_per_step: Whether ``log_transition`` has a dimension of steps.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be; see
            :meth:`restrict`, which takes labels.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) a row of
            log-probabilities does not sum to one.

    Example:
        >>> from pyro.distributions import Categorical
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
        >>> coins = Categorical(probs=torch.tensor([[0.5, 0.5], [0.1, 0.9]]))
        >>> hmm = HMM(torch.full((2,), 0.5).log(), sticky.log(), coins, torch.tensor([3, 1]))
        >>> hmm.batch_shape, hmm.event_shape
        (torch.Size([2]), torch.Size([3]))
        >>> hmm.log_prob(torch.tensor([[1, 1, 1], [1, 0, 0]])).exp()
        tensor([0.4057, 0.7000])
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface

    def __init__(
        self,
        log_initial: Tensor,
        log_transition: Tensor,
        emission: TorchDistribution,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        transition_per_step: bool = False,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
    ) -> None:
        check_floats("log_initial", log_initial)
        check_floats("log_transition", log_transition)
        check_integers("lengths", lengths)
        if not isinstance(emission, torch.distributions.Distribution):
            raise TypeError(
                "emission must be a distribution batched over the K states; got "
                f"{type(emission).__name__}."
            )
        if log_initial.dim() < 1:
            raise ValueError("log_initial must have shape (*B, K); got a scalar.")
        num_states = log_initial.size(-1)
        check_trailing("log_transition", log_transition, (num_states, num_states), "(K, K)")
        if emission.batch_shape[-1:] != (num_states,):
            raise ValueError(
                f"emission must have a batch shape that ends in K = {num_states} states; got batch "
                f"shape {tuple(emission.batch_shape)}. Batch it over states, or call .to_event(1) "
                "on a distribution whose last dimension is one observation."
            )
        check_same_device(
            {"log_initial": log_initial, "log_transition": log_transition, **_first(emission)}
        )
        lengths = lengths.cpu().long()
        longest = int(lengths.max()) if lengths.numel() else 0
        steps = {}  # what says how many there are
        if observed is not None:
            check_booleans("observed", observed)
            check_same_device({"log_initial": log_initial, "observed": observed})
            if observed.dim() == 0:
                raise ValueError("observed must have shape (*B, T); got shape ().")
            steps["observed"] = observed.size(-1)
        if allowed is not None:
            check_booleans("allowed", allowed)
            check_same_device({"log_initial": log_initial, "allowed": allowed})
            if allowed.dim() < 2 or allowed.size(-1) != num_states:
                raise ValueError(
                    f"allowed must have shape (*B, T, K) with K = {num_states}; got "
                    f"{tuple(allowed.shape)}."
                )
            steps["allowed"] = allowed.size(-2)
        if transition_per_step:
            if log_transition.dim() < 3 or log_transition.size(-3) < longest - 1:
                raise ValueError(
                    f"log_transition must have shape (*B, T-1, K, K) with T at least {longest}, "
                    f"the longest sequence; got {tuple(log_transition.shape)}."
                )
            steps["log_transition"] = log_transition.size(-3) + 1
        if emission_per_step:
            if len(emission.batch_shape) < 2 or emission.batch_shape[-2] < longest:
                raise ValueError(
                    f"emission must have batch shape (*B, T, K) with T at least {longest}, the "
                    f"longest sequence; got {tuple(emission.batch_shape)}."
                )
            steps["emission"] = emission.batch_shape[-2]
        if len(set(steps.values())) > 1:
            listing = ", ".join(f"{name} {count}" for name, count in steps.items())
            raise ValueError(f"all arguments must be for one number of steps T; got {listing}.")
        num_steps = next(iter(steps.values()), longest)
        check_lengths(lengths, num_steps)
        shapes = {
            "log_initial": log_initial.shape[:-1],
            "log_transition": log_transition.shape[: -3 if transition_per_step else -2],
            "emission": emission.batch_shape[: -2 if emission_per_step else -1],
            "lengths": lengths.shape,
        }
        if observed is not None:
            shapes["observed"] = observed.shape[:-1]
        if allowed is not None:
            shapes["allowed"] = allowed.shape[:-2]
        self.log_initial = log_initial
        self.log_transition = log_transition
        self.emission = emission
        self.lengths = lengths
        self.observed = observed
        self.allowed = allowed
        self.transition_per_step = transition_per_step
        self.emission_per_step = emission_per_step
        super().__init__(
            check_broadcast(shapes),
            torch.Size((num_steps,)) + emission.event_shape,
            validate_args=validate_args,
        )
        if self._validate_args:
            check_log_simplex("log_initial", log_initial)
            check_log_simplex("log_transition", log_transition)

    # What a Pyro distribution must have

    @property
    def support(self) -> constraints.Constraint:
        """Sequences of what the emission can emit."""
        return constraints.independent(self.emission.support, 1)

    def expand(self, batch_shape: Any, _instance: HMM | None = None) -> HMM:
        """The same law for a larger batch; parameters are not copied."""
        shape = torch.Size(batch_shape)
        if check_broadcast({"HMM": self.batch_shape, "batch_shape": shape}) != shape:
            raise ValueError(
                f"batch_shape must be one that {tuple(self.batch_shape)} expands to; got "
                f"{tuple(shape)}."
            )
        observed, allowed = self.observed, self.allowed
        return self.replace(
            lengths=self.lengths.expand(shape),
            observed=None if observed is None else observed.expand(*shape, observed.size(-1)),
            allowed=None if allowed is None else allowed.expand(*shape, *allowed.shape[-2:]),
        )

    def restrict(self, labels: Tensor) -> HMM:
        r"""The same model, with the states of some steps known, or known to be among a few.

        Its ``log_prob`` is that of the values *and* the labels,
        :math:`\log p(x, z_t \in L_t \text{ for all } t)`; its posterior, best path and samples
        keep to the labels. A missing step may have a label, and the padding's is not read.

        Args:
            labels: ``(*B, T)`` integers, the state of each step, -1 where it is not known; or
                ``(*B, T, K)`` booleans, True for the states that may be.

        Raises:
            TypeError: If labels are neither integers nor booleans.
            ValueError: If a label is not below K, or a step has none that is allowed. With
                ``validate_args``, what reads values raises if no path keeps to the labels, and
                names the first sequence and step where that is so.

        Example:
            >>> from pyro.distributions import Categorical
            >>> even = torch.full((2, 2), 0.5).log()
            >>> hmm = HMM(even[0], even, Categorical(logits=even), torch.tensor(3))
            >>> hmm.restrict(torch.tensor([1, -1, 0])).log_prob(torch.zeros(3).long()).exp()
            tensor(0.0312)
        """
        check_tensor("labels", labels)
        own = labels.shape[: -2 if labels.dtype == torch.bool else -1]
        check_broadcast({"labels": own, "HMM": self.batch_shape})
        exists = self.exists.unsqueeze(-1)
        if labels.dtype == torch.bool:
            check_trailing("labels", labels, (self.num_steps, self.num_states), "(T, K)")
            allowed = labels | ~exists
            if not bool(allowed.any(-1).all()):
                at = (~allowed.any(-1)).nonzero()[0].tolist()
                raise ValueError(
                    f"labels allow no state at {_place(at)}; allow all where nothing is known."
                )
        else:
            check_integers("labels", labels)
            check_trailing("labels", labels, (self.num_steps,), "(T,)")
            labels = labels.to(self.log_initial.device).long().masked_fill(~exists.squeeze(-1), -1)
            if int(labels.max()) >= self.num_states or int(labels.min()) < -1:
                wrong = (labels >= self.num_states) | (labels < -1)
                at = wrong.nonzero()[0].tolist()
                raise ValueError(
                    f"labels must lie between 0 and K - 1 = {self.num_states - 1}, or be -1 where "
                    f"the state is not known; got {int(labels[tuple(at)])} at {_place(at)}."
                )
            allowed = torch.arange(self.num_states, device=labels.device) == labels.unsqueeze(-1)
            allowed = allowed | (labels == -1).unsqueeze(-1)
        allowed = allowed.to(self.log_initial.device)
        return self.replace(allowed=allowed if self.allowed is None else allowed & self.allowed)

    def replace(self, **changes: Any) -> HMM:
        """A copy with some arguments changed; parameters are not checked again."""
        given = {
            name: getattr(self, name)
            for name in ("log_initial", "log_transition", "emission", "lengths", "observed",
                         "transition_per_step", "emission_per_step", "allowed")
        }  # fmt: skip
        new = HMM(**(given | changes), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def num_states(self) -> int:
        """K, the number of states."""
        return self.log_initial.size(-1)

    @property
    def num_steps(self) -> int:
        """T, the number of steps after padding."""
        return self.event_shape[0]

    # What the data say

    def log_prob(self, values: Tensor) -> Tensor:
        """Log evidence ``(*B)``, in nats; the states are summed out exactly.

        A sequence of probability zero has -inf, and gradient zero.
        """
        with full_precision(self.log_initial):
            evidence = recursions.log_evidence(*self.log_factors(values, check=False), self.lengths)
        if self._validate_args:
            _check_likelihood(evidence)  # NaN anywhere shows here, and this is a smaller tensor
            if self.allowed is not None and bool(evidence.isneginf().any()):
                self._check_labels(values)
        return evidence

    def log_joint(self, values: Tensor, states: Tensor) -> Tensor:
        """Log-probability ``(*B)`` of the values and of one path of states ``(*B, T)``."""
        check_integers("states", states)
        check_same_device({"states": states, "log_initial": self.log_initial})
        check_trailing("states", states, (self.num_steps,), "(T,)")
        check_broadcast({"states": states.shape[:-1], "HMM": self.batch_shape})
        exists = self.exists
        states = states.long().masked_fill(~exists, 0)
        if self._validate_args and not bool(((states >= 0) & (states < self.num_states)).all()):
            raise ValueError(
                f"states must lie between 0 and K - 1 = {self.num_states - 1}; got values from "
                f"{int(states.min())} to {int(states.max())}."
            )
        initial, transition, likelihood = self.log_factors(values)
        batch = torch.broadcast_shapes(self.batch_shape, likelihood.shape[:-2], states.shape[:-1])
        states = states.expand(*batch, self.num_steps)
        seen = likelihood.expand(*batch, *likelihood.shape[-2:])
        seen = seen.gather(-1, states.unsqueeze(-1)).squeeze(-1)
        start = initial.expand(*batch, self.num_states).gather(-1, states[..., :1]).squeeze(-1)
        rows = transition.expand(*batch, self.num_steps - 1, *transition.shape[-2:])
        rows = rows.gather(
            -2, states[..., :-1, None, None].expand(*rows.shape[:-2], 1, rows.size(-1))
        )
        moves = rows.squeeze(-2).gather(-1, states[..., 1:].unsqueeze(-1)).squeeze(-1)
        seen = seen.masked_fill(~exists, 0.0).sum(-1)
        return start + seen + moves.masked_fill(~exists[..., 1:], 0.0).sum(-1)

    def posterior(self, values: Tensor) -> Posterior:
        """Smooth: evidence ``(*B)``, states ``(*B, T, K)``, expected moves ``(*B, K, K)``."""
        return recursions.posterior(*self.log_factors(values), self.lengths)

    def expected_counts(self, values: Tensor) -> ExpectedCounts:
        """Expected counts given ``values``: the E-step; see :class:`recursions.ExpectedCounts`."""
        found = recursions.expected_counts(*self.log_factors(values, check=False), self.lengths)
        if self._validate_args:
            _check_likelihood(found.log_evidence)
            if self.allowed is not None and bool(found.log_evidence.isneginf().any()):
                self._check_labels(values)
        return found

    def filtered(self, values: Tensor) -> Tensor:
        """Law of each state given the observations up to it, ``(*B, T, K)``; 0 where padded."""
        return recursions.filtered(*self.log_factors(values), self.lengths).exp()

    def viterbi(self, values: Tensor) -> Tensor:
        """Most probable path of states, ``(*B, T)`` integers; padded steps hold 0."""
        return recursions.viterbi(*self.log_factors(values), self.lengths)

    def sample_states(self, values: Tensor, sample_shape: Any = ()) -> Tensor:
        """Draw paths given the values, ``(*S, *B, T)`` integers; padded steps hold 0."""
        shape = torch.Size(sample_shape)
        drawn = recursions.sample_states(*self.log_factors(values), self.lengths, shape.numel())
        return drawn.reshape(shape + drawn.shape[1:])

    def forecast(self, values: Tensor, num_steps: int) -> Forecast:
        """The law of each of the ``num_steps`` observations that follow ``values``.

        Returns:
            A distribution of batch shape ``(*B, num_steps)``; see :class:`Forecast`.

        Raises:
            ValueError: If ``num_steps`` is less than one, or the model changes with the step,
                so that what follows is not known.
        """
        check_size("num_steps", num_steps)
        if self.transition_per_step or self.emission_per_step:
            raise ValueError(
                "forecast needs a model that does not change with the step; this one has "
                "parameters per step. Extend them, and mark the steps to come as not observed."
            )
        laws = self.filtered(values)
        last = (self.lengths.expand(laws.shape[:-2]) - 1).to(laws.device)
        law = laws.gather(-2, last[..., None, None].expand(*last.shape, 1, self.num_states))
        matrix = self.log_transition.exp()
        following = []
        for _ in range(num_steps):
            law = law @ matrix
            following.append(law)
        return Forecast(torch.cat(following, -2), self.emission)

    def stationary(self) -> Tensor:
        """Stationary law of the states, ``(*B, K)``: see :func:`cooccurrence.stationary`."""
        return stationary_ops.stationary(self.log_transition)

    # Sampling

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw sequences ``(*S, *B, T, *E)``; what stands in the padding means nothing."""
        return self.sample_with_states(sample_shape)[0]

    def sample_with_states(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw sequences ``(*S, *B, T, *E)`` and the states ``(*S, *B, T)`` that emitted them."""
        shape = torch.Size(sample_shape) + self.batch_shape
        with torch.no_grad():
            path = self._draw_path(shape)
            if self.emission_per_step:
                values = sample_emission_per_step(self.emission, path)
            else:
                values = sample_emission(self.emission, path)
        return values, path

    def _draw_path(self, shape: torch.Size) -> Tensor:
        """Draw paths ``(*shape, T)`` before anything is observed."""
        if self.allowed is None:
            state = _draw_rows(self.log_initial, torch.zeros(shape, dtype=torch.long))
            states = [state]
            matrices = self.log_transition
            if not self.transition_per_step:
                matrices = matrices.unsqueeze(-3)
            tables = [_Table(matrix) for matrix in matrices.unbind(-3)]
            for t in range(1, self.num_steps):
                state = tables[t - 1 if self.transition_per_step else 0].draw(state)
                states.append(state)
            return torch.stack(states, -1)
        transition = self.log_transition
        if not self.transition_per_step:
            transition = transition.unsqueeze(-3)
        labels = torch.zeros_like(self.allowed, dtype=self.log_initial.dtype)
        labels = labels.masked_fill(~self.allowed, -torch.inf)
        labels = labels.expand(*self.batch_shape, *labels.shape[-2:])
        possible = recursions.log_evidence(self.log_initial, transition, labels, self.lengths)
        if bool(possible.isneginf().any()):
            raise ValueError(
                "labels must leave a path of positive probability, for samples to keep to; none "
                f"does in sequence {possible.isneginf().nonzero()[0].tolist()}."
            )
        count = shape[: len(shape) - len(self.batch_shape)].numel()
        drawn = recursions.sample_states(self.log_initial, transition, labels, self.lengths, count)
        return drawn.reshape(*shape, self.num_steps)

    def with_lengths(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """The same parameters for other sequences: such as one that was loaded, for new data.

        Args:
            lengths: ``(*B)`` integers.
            observed: ``(*B, T)`` booleans; all by default.

        Raises:
            ValueError: If parameters have a dimension of steps that does not fit.
        """
        return self.replace(lengths=lengths, observed=observed, allowed=None)

    def permute_states(self, order: Tensor) -> HMM:
        """The same law with its states in another order: state k is what ``order[k]`` was.

        Args:
            order: ``(K,)`` integers, each state once. ``metrics.align(found, truth).argsort()``
                gives the states found the numbers of the true ones.

        Raises:
            ValueError: If ``order`` is not a permutation.
        """
        check_integers("order", order)
        order = order.to(self.log_initial.device).long()
        if not torch.equal(order.sort().values, torch.arange(self.num_states).to(order)):
            raise ValueError(
                f"order must hold each state from 0 to K - 1 = {self.num_states - 1} once; got "
                f"{order.tolist()}."
            )
        if is_categorical(self.emission):
            logits = log_probs(self.emission)[..., order, :]
            emission: TorchDistribution = Categorical(logits=logits)
        else:
            emission = Tied(self.emission, order)
        return self.replace(
            log_initial=self.log_initial[..., order],
            log_transition=self.log_transition[..., order, :][..., order],
            emission=emission,
            allowed=None if self.allowed is None else self.allowed[..., order],
        )

    # The one method that joins parameters and data to the recursions

    def log_factors(self, values: Tensor, check: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """What the recursions read: logs of initial, transition and likelihood."""
        given = values
        values, mask = self.prepare_values(values)
        if self.emission_per_step:
            likelihood = log_prob_per_state(self.emission, values)
        else:
            likelihood = log_likelihood(self.emission, values)
        if mask is not None and self.observed is not None:  # recursions know of padding
            likelihood = likelihood.masked_fill(~mask.unsqueeze(-1), 0.0)
        if self.allowed is not None:
            likelihood = likelihood.masked_fill(~self.allowed, -torch.inf)
        if check and self._validate_args:
            _check_likelihood(likelihood)
            if self.allowed is not None:
                self._check_labels(given)
        transition = self.log_transition
        if not self.transition_per_step:
            transition = transition.unsqueeze(-3)
        return self.log_initial, transition, likelihood

    def _check_labels(self, values: Tensor) -> None:
        """Raise if no path keeps to the labels, although some path has emitted the values."""
        with torch.no_grad():
            chain = self.log_factors(values, check=False)
            reached = recursions.filtered(*chain, self.lengths).isfinite().any(-1)
            lost = (self.exists & ~reached).any(-1)
            if not bool(lost.any()):
                return
            free = self.replace(allowed=None).log_factors(values, check=False)
            possible = recursions.log_evidence(*free, self.lengths).isfinite()
            wrong = (lost & possible).nonzero()
            if len(wrong):
                where = tuple(wrong[0].tolist())
                step = int((~reached[where]).byte().argmax())
                raise ValueError(
                    "labels must leave a path of positive probability; none does in "
                    f"{_place([*where, step])}. Correct the label, or allow the move or the symbol."
                )

    @property
    def exists(self) -> Tensor:
        """Which steps exist, ``(*B, T)``."""
        clock = torch.arange(self.num_steps)
        return (clock < self.lengths.unsqueeze(-1)).to(self.log_initial.device)

    def prepare_values(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Check ``values``, and replace what is not observed by something in the support."""
        check_tensor("values", values)
        check_same_device({"values": values, "log_initial": self.log_initial})
        check_trailing("values", values, tuple(self.event_shape), "(T, *E)")
        if not (values.dtype.is_floating_point or is_categorical(self.emission)):
            values = values.to(self.log_initial.dtype)
        event = self.emission.event_shape
        own = values.shape[: values.dim() - len(self.event_shape)]
        batch = check_broadcast({"values": own, "HMM": self.batch_shape})
        # as many dimensions as the parameters have, so that those of time and of batch stay apart
        values = values.reshape((1,) * (len(batch) - len(own)) + values.shape)
        mask = None
        if self.observed is not None or bool((self.lengths < self.num_steps).any()):
            mask = self.exists
            if self.observed is not None:
                mask = mask & self.observed
            # not the whole batch: restarts and particles see the same values
            small = torch.broadcast_shapes(values.shape[: len(batch)], mask.shape[:-1])
            known = mask.expand(*small, self.num_steps)
            flat = values.expand(*small, *self.event_shape).reshape(-1, *event)
            filler = self._filler(flat, known.flatten())
            values = torch.where(known.reshape(known.shape + (1,) * len(event)), values, filler)
        if is_categorical(self.emission):
            check_integers("values", values)
            if self._validate_args:
                num_symbols = self.emission.logits.size(-1)  # type: ignore[attr-defined]
                low, high = int(values.min()), int(values.max())
                if low < 0 or high >= num_symbols:
                    raise ValueError(
                        f"values must hold symbols from 0 to V - 1 = {num_symbols - 1}; got values "
                        f"from {low} to {high}. Build the emission with more symbols, or mark "
                        "unknown ones as not observed."
                    )
        elif self._validate_args:
            whole = values
            if len(event) and values.dtype.is_floating_point:
                gaps = values.isnan()
                if bool(gaps.any()):
                    whole = torch.where(gaps, self._inside().to(values.dtype), values)
            # in each state, for a support may depend on parameters
            seen = whole.unsqueeze(-1 - len(event))
            if not self.emission_per_step:
                seen = seen.movedim(len(batch), 0)
            inside = self.emission.support.check(seen)  # type: ignore[union-attr]  # torch's stub
            if not bool(inside.all()):
                raise ValueError(
                    f"values must lie in the support of the emission, {self.emission.support}, in "
                    f"every state; {int((~inside.all(-1)).sum())} do not. Mark missing steps as "
                    "not observed."
                )
        return values, mask

    def _filler(self, values: Tensor, known: Tensor) -> Tensor:
        """An observation that can stand where none is known: one of ``values``, or a draw."""
        first = int(known.byte().argmax())
        if bool(known[first]):
            return values[first]
        return self._inside().to(values.dtype)

    def _inside(self) -> Tensor:
        """An observation in the support; it uses up no random numbers."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            drawn = self.emission.sample()
        return drawn.reshape(-1, *self.emission.event_shape)[0]


def _first(emission: Any) -> dict[str, Tensor]:
    """One tensor of the emission, to see its device by."""
    while hasattr(emission, "base_dist"):
        emission = emission.base_dist
    tensors = (item for item in vars(emission).values() if isinstance(item, Tensor))
    tensor = next(tensors, None)
    return {} if tensor is None else {"emission": tensor}


def _place(index: list[int]) -> str:
    """Words for a sequence and its step."""
    *batch, step = index
    if not batch:
        return f"step {step}"
    return f"sequence {batch[0] if len(batch) == 1 else tuple(batch)}, step {step}"


def _check_likelihood(likelihood: Tensor) -> None:
    check_no_nan(
        "the log-likelihood of values",
        likelihood,
        "Look for NaN in values or parameters, or a scale that has shrunk to zero.",
    )
