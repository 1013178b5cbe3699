"""``StructuredHMM``: what chains with recursions of their own share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._precision import full_precision
from ..ops.sampling import refuse_nan
from .base import check_likelihood
from .hmm import HMM


class StructuredHMM(HMM):
    """An :class:`HMM` whose queries are answered by recursions other than those of dense chains."""

    _recursions: Any  # a module of ops
    _arguments: tuple[str, ...]  # what a subclass has besides the emission and its masks

    def replace(self, **changes: Any) -> Any:
        """A copy with some arguments changed: see :meth:`HMM.replace`."""
        names = (*self._arguments, "emission", "lengths", "observed", "emission_per_step",
                 "allowed")  # fmt: skip
        arguments = {name: getattr(self, name) for name in names}
        return self._validated_alike(type(self)(**(arguments | changes), validate_args=False))

    # Parameters and data as the recursions read them

    def _tables(self) -> tuple[Any, ...]:
        """The first arguments of the recursions, before log-likelihoods."""
        raise NotImplementedError

    def _beginning(self) -> tuple[Any, ...]:
        """The last arguments of the recursions that see only where sequences begin."""
        return ()

    def _ending(self) -> tuple[Any, ...]:
        """The last arguments of the recursions that see where they begin and end."""
        return ()

    def _factors(self, values: Tensor, check: bool = True) -> Any:
        """The first arguments of the recursions; with ``check`` as :meth:`HMM.log_factors`."""
        likelihood = self._restricted_likelihood(values)
        if check and self._validate_args:
            check_likelihood(likelihood)
            self.check_labels(values)
        return *self._tables(), likelihood

    def _filter(self, likelihood: Tensor) -> Tensor:
        parts = *self._tables(), likelihood, self.lengths
        return self._recursions.filtered(*parts, *self._beginning())

    def _evidence(self, likelihood: Tensor) -> Tensor:
        parts = *self._tables(), likelihood, self.lengths
        return self._recursions.log_evidence(*parts, *self._ending())

    # Queries given values (*B, T, *E)

    def log_prob(self, values: Tensor) -> Tensor:
        r"""Log evidence :math:`\log p(x_{1:T})`, ``(*B)``, in nats; summed out exactly.

        A sequence of probability zero has -inf, and gradient zero.
        """
        with full_precision(self.log_initial):
            evidence = self._evidence(self._restricted_likelihood(values))
        self._check_evidence(evidence, values)
        return evidence

    def filtered(self, values: Tensor) -> Tensor:
        r"""Filtered probabilities :math:`p(z_t \mid x_{1:t})`, ``(*B, T, K)``; 0 where padded."""
        return self._filter(self._factors(values)[-1]).exp()

    def viterbi(self, values: Tensor) -> Tensor:
        r"""Best path :math:`\arg\max_z p(z_{1:T} \mid x_{1:T})`, ``(*B, T)``; 0 where padded."""
        factors = self._factors(values)
        _refuse_nan(factors)
        return self._recursions.viterbi(*factors, self.lengths, *self._ending())

    def sample_states(self, values: Tensor, sample_shape: Sequence[int] = ()) -> Tensor:
        r"""Sample paths from :math:`p(z_{1:T} \mid x_{1:T})`, ``(*S, *B, T)``; 0 where padded."""
        shape = torch.Size(sample_shape)
        factors = self._factors(values)
        _refuse_nan(factors)
        states = self._sampled(factors, shape.numel())
        return states.reshape(shape + states.shape[1:])

    def _sampled(self, factors: tuple[Any, ...], count: int) -> Tensor:
        """Paths ``(count, *B, T)``."""
        return self._recursions.sample_states(*factors, self.lengths, count, *self._ending())

    def _sample_without_values(self, shape: torch.Size) -> Tensor:
        """Paths ``(*shape, T)`` that keep to the labels; ``shape`` ends in ``(*B)``."""
        logs = self.log_initial.new_zeros(self.num_steps, self.num_states)
        if self.allowed is not None:
            logs = logs.expand(self.allowed.shape).masked_fill(~self.allowed, -torch.inf)
        logs = logs.expand(*self.batch_shape, *logs.shape[-2:])
        impossible = self._evidence(logs).isneginf()
        if bool(impossible.any()):
            raise ValueError(
                f"the chain of this {type(self).__name__} and its labels must leave a path of "
                "positive probability, for samples to keep to; none does in sequence "
                f"{impossible.nonzero()[0].tolist()}."
            )
        count = shape[: len(shape) - len(self.batch_shape)].numel()
        return self._sampled((*self._tables(), logs), count).reshape(*shape, self.num_steps)


def _refuse_nan(factors: tuple[Any, ...]) -> None:
    """Raise if factors, of which some are tuples of tensors, hold NaN."""
    for part in factors:
        refuse_nan(*([part] if isinstance(part, Tensor) else part))
