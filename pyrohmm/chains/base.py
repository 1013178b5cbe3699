"""``Chain``: what the distribution of the hidden states of an :class:`~pyrohmm.HMM` must offer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._arrays import from_numpy
from .._checks import broadcast_shapes, check_floats, check_log_simplex, check_same_device
from .._precision import recomputing
from .._sync import exceeds
from .._transforms import gradients, transforming
from ..ops import forward
from ..ops.log_space import step_mask
from ..ops.markov import refuse_nan
from ..ops.recursions import ExpectedCounts

Core = tuple[str, ...]


class Expansion(NamedTuple):
    """A Markov chain with the same distribution, over more states.

    Attributes:
        chain: The :class:`MarkovChain` over the states k'.
        state_of: ``(K',)``, which of the K states each of its states is.
        allowed: ``(*B, T, K')`` booleans, False where a state k' cannot be; None if all can.
    """

    chain: Any
    state_of: Tensor
    allowed: Tensor | None = None


class Chain:
    """The distribution p(z) of the hidden states, by named parameters.

    A subclass sets ``cores`` and ``parameters``, and defines ``arranged``, by which
    :mod:`pyrohmm.ops.forward` takes its steps, or ``log_evidence``, ``filtered``, ``viterbi`` and
    ``sample_states`` themselves. It defines ``log_prob``, and, where they exist, ``sample_prior``,
    ``expanded`` and ``stationary``. All else follows from them. Log-likelihoods are
    ``(*B, T, K)``, lengths ``(*B)``; batch dimensions broadcast with those of the parameters.

    Attributes:
        cores: The last dimensions of each parameter, by name: ``"K"`` is one of states, which a
            permutation of the states permutes; any other letter is a dimension of its own.
        parameters: By name, each with the batch dimensions ``(*b)`` before its core.
        options: Further arguments of the constructor, which are no parameters.
        num_states: K.
        order: On how many states before it the next state depends.
        is_markov: Whether the next state depends on the state before it alone.
        samples_alone: Whether :meth:`sample_prior` may be used: it knows of no lengths.
        per_step: Whether the parameters change with the step.
    """

    cores: ClassVar[dict[str, Core]]
    options: dict[str, Any]
    log_initial: Tensor  # (*b, K)
    order = 1
    is_markov = False
    samples_alone = True
    per_step = False

    def __init__(self, **options: Any) -> None:
        self.options = options

    def take(self, **parameters: Any) -> None:
        """Set parameters as attributes; arrays of NumPy become tensors."""
        for name, value in parameters.items():
            setattr(self, name, value if isinstance(value, Tensor) else from_numpy(name, value))

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {name: getattr(self, name) for name in self.cores}

    @property
    def num_states(self) -> int:
        """K, the number of states."""
        return self.log_initial.size(-1)

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape to which the parameters broadcast."""
        return broadcast_shapes(*self.batches.values())

    @cached_property
    def batches(self) -> dict[str, torch.Size]:
        """Batch dimensions of the parameters by name."""
        cores = self.cores
        return {name: p.shape[: p.dim() - len(cores[name])] for name, p in self.parameters.items()}

    @property
    def shared(self) -> bool:
        """Whether all sequences, and all of their steps, have the same parameters."""
        sizes = {size for core in self.cores.values() for size in core}
        return not any(self.batches.values()) and sizes.isdisjoint({"T", "T-1"})

    @property
    def steps(self) -> dict[str, int]:
        """Number of steps T that time-dependent parameters have, by name; none by default."""
        return {}

    # The same chain with other parameters

    def replace(self, **changes: Any) -> Chain:
        """A copy with some parameters or options changed."""
        return type(self)(**(self.parameters | self.options | changes))

    def map(self, function: Callable[[str, Tensor, int], Tensor]) -> Chain:
        """A copy whose parameters are ``function(name, parameter, dimensions of its core)``."""
        items = self.parameters.items()
        return self.replace(**{name: function(name, p, len(self.cores[name])) for name, p in items})

    def expand(self, batch: torch.Size) -> Chain:
        """A copy whose parameters have the batch dimensions ``batch``."""
        return self.map(lambda _, p, core: p.expand(*batch, *p.shape[p.dim() - core :]))

    def permuted(self, order: Tensor) -> Chain:
        """A copy with states permuted: new state k is old state ``order[k]``."""

        def permute(name: str, parameter: Tensor, core: int) -> Tensor:
            for axis, letter in enumerate(self.cores[name], -core):
                if letter == "K":
                    parameter = parameter.index_select(axis, order)
            return parameter

        return self.map(permute)

    def uniform(self) -> Chain:
        """A copy with uniform probabilities over all that is possible."""
        return self.map(
            lambda _, p, core: p.new_zeros(()).expand(p.shape)
            .masked_fill(p.isneginf(), -torch.inf).log_softmax(-1)
        )  # fmt: skip

    # Recursions

    def arranged(self, log_likelihood: Tensor, lengths: Tensor) -> forward.Arranged:
        """The chain and its observations in the form of :mod:`pyrohmm.ops.forward`."""
        raise NotImplementedError

    def log_evidence(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats, differentiable."""
        return forward.log_evidence(self.arranged(log_likelihood, lengths))

    def filtered(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        r"""Filtered :math:`\log p(z_t \mid x_{1:t})`, ``(*B, T, K)``; -inf at padded steps."""
        return forward.filtered(self.arranged(log_likelihood, lengths))

    def viterbi(self, log_likelihood: Tensor, lengths: Tensor) -> Tensor:
        """Most probable path, ``(*B, T)``; 0 at padded steps."""
        return forward.viterbi(self.arranged(log_likelihood, lengths))

    def sample_states(self, log_likelihood: Tensor, lengths: Tensor, num_samples: int) -> Tensor:
        """Sample paths from the posterior, ``(num_samples, *B, T)``; 0 at padded steps."""
        return forward.sample_paths(self.arranged(log_likelihood, lengths), num_samples)[0]

    def log_prob(self, states: Tensor, exists: Tensor) -> Tensor:
        r"""Log-probability :math:`\log p(z_{1:T})` of paths ``(*B, T)``, ``(*B)``."""
        raise NotImplementedError

    def log_joint(self, log_likelihood: Any, lengths: Tensor, states: Tensor) -> Tensor:
        r""":math:`\log p(x_{1:T}, z_{1:T})` of paths ``(*B, T)``, ``(*B)``."""
        here = step_mask(lengths, states.size(-1), states.device)
        batch = broadcast_shapes(
            self.batch_shape, lengths.shape, log_likelihood.shape[:-2], states.shape[:-1]
        )
        states = states.expand(*batch, states.size(-1))
        emitted = log_likelihood.expand(*batch, *log_likelihood.shape[-2:])
        emitted = emitted.gather(-1, states.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        return self.log_prob(states, here) + emitted.sum(-1)

    def sample_prior(self, shape: torch.Size, num_steps: int) -> Tensor:
        """Sample paths ``(*shape, num_steps)``; ``shape`` ends in the batch dimensions."""
        raise NotImplementedError

    def expanded(self, lengths: Tensor, num_steps: int) -> Expansion:
        """A Markov chain with the same distribution."""
        raise NotImplementedError

    def stationary(self) -> Tensor:
        """Stationary distribution of the states, ``(*b, K)``."""
        raise NotImplementedError

    # What follows from the evidence

    def factors(self) -> dict[str, Tensor]:
        """Log factors that expected counts multiply, by name; the parameters by default."""
        return self.parameters

    def expected_counts(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        """Expected counts: gradients of the evidence by the parameters and log-likelihoods.

        A sequence of probability zero counts nowhere.

        Raises:
            ValueError: If a gradient is NaN where the evidence is finite.
        """
        batch = broadcast_shapes(self.batch_shape, log_likelihood.shape[:-2], lengths.shape)
        likelihood = log_likelihood.expand(*batch, *log_likelihood.shape[-2:])
        return self._counts_at(self.parameters, self.options, likelihood, lengths)

    @recomputing
    def _counts_at(
        self, names: dict[str, Tensor], options: dict[str, Any], likelihood: Tensor, lengths: Tensor
    ) -> ExpectedCounts:
        """Expected counts of the chain with these parameters and options."""

        def evidence(likelihood: Tensor, *values: Tensor) -> Tensor:
            chain = self.replace(**(options | dict(zip(names, values))))
            return chain.log_evidence(likelihood, lengths)

        total, (states, *counts) = gradients(evidence, likelihood, *names.values())
        for name, count in zip(names, counts) if not transforming() else ():
            if not exceeds((total.isnan().any() | ~count.isnan().any()).double(), 0.5):
                raise ValueError(
                    f"the gradient of the evidence by {name} is NaN. {type(self).__name__} should "
                    "take pyrohmm.ops.log_space.log of probabilities that may be zero."
                )
        return ExpectedCounts(total, states, dict(zip(names, counts)))

    def path_counts(self, states: Tensor, exists: Tensor) -> dict[str, Tensor]:
        """Counts of how often paths ``(*B, T)`` use each entry of each parameter.

        The gradient of their log-probability: whole numbers where a path says which entries it
        uses, as of tables; else expected numbers, from which parameters cannot be sampled.
        """
        names = list(self.parameters)

        def total(*values: Tensor) -> Tensor:
            return self.replace(**dict(zip(names, values))).log_prob(states, exists)

        _, counts = gradients(total, *self.parameters.values())
        return dict(zip(names, counts))

    def posterior(self, log_likelihood: Tensor, lengths: Tensor) -> Any:
        """Smoothed marginals of the states, and counts of each sequence."""
        return self.counts_of_each(log_likelihood, lengths)

    def counts_of_each(self, log_likelihood: Tensor, lengths: Tensor) -> ExpectedCounts:
        """Expected counts per sequence, not summed over the batch."""
        batch = broadcast_shapes(self.batch_shape, log_likelihood.shape[:-2], lengths.shape)
        return self.expand(batch).expected_counts(log_likelihood, lengths)

    # Refusals

    def check_markov(self, purpose: str) -> None:
        """Raise unless the next state depends on the state alone, as ``purpose`` needs."""
        if not self.is_markov:
            raise ValueError(
                f"{purpose} needs a Markov chain; hmm has a {type(self).__name__}. Give "
                "hmm.expanded(), a Markov chain with the same distribution."
            )

    def check_constant(self, purpose: str) -> None:
        """Raise if the parameters change with the step, which ``purpose`` does not allow."""
        if self.per_step:
            refuse_steps(purpose)

    def check_shapes(self) -> None:
        """Raise unless parameters are floating-point tensors of matching core dimensions."""
        sizes: dict[str, int] = {}
        cores = self.cores
        for name, tensor in self.parameters.items():
            check_floats(name, tensor)
            core = cores[name]
            shape = tensor.shape[-len(core) :]
            if len(shape) < len(core):
                text = f"{name} must have shape (*B, {', '.join(core)}); got shape {tuple(shape)}"
                raise ValueError(f"{text}. Dimensions of a batch come first.")
            for letter, size in zip(core, shape):
                sizes.setdefault(letter, size)
            if shape != (wanted := tuple(map(sizes.get, core))):
                first = next(iter(cores))
                raise ValueError(
                    f"{name} must end in shape ({', '.join(core)}) = {wanted}, as {first} is "
                    f"{tuple(self.parameters[first].shape)}; got shape {tuple(tensor.shape)}. "
                    "Dimensions of a batch come first."
                )
        check_same_device(self.parameters)

    def check_values(self) -> None:
        """Raise unless log-probabilities sum to one; not called where values cannot be read."""
        for name, parameter in self.parameters.items():
            check_log_simplex(name, parameter)

    def refuse_nan(self, *log_likelihood: Any) -> None:
        """Raise if a parameter or a log-likelihood is NaN."""
        refuse_nan(*log_likelihood, *self.parameters.values())

    def check_samples(self, purpose: str) -> None:
        """Raise unless the chain can be sampled: no transition has a density."""


def refuse_steps(purpose: str) -> NoReturn:
    """Raise: ``purpose`` does not allow parameters that change with the step."""
    raise ValueError(
        f"{purpose} needs an hmm that does not change with the step; this one has "
        "parameters per step. To predict, append the steps to come, not observed: "
        "more = Sequences(values, observed=, covariates=), (N, T + H, ...); then ask "
        "queries.observation_marginals(fit.hmm(more), more.values)."
    )


def entry(table: Tensor, *places: Tensor) -> Tensor:
    """Entries of ``table`` ``(*b, V_1, ..., V_n)`` at ``n`` indices ``(*B, T)``, ``(*B, T)``."""
    sizes = table.shape[table.dim() - len(places) :]
    flat = places[0]
    for size, place in zip(sizes[1:], places[1:]):
        flat = flat * size + place
    table = table.flatten(-len(sizes)) if len(sizes) > 1 else table
    return table.expand(*flat.shape[:-1], table.size(-1)).gather(-1, flat)
