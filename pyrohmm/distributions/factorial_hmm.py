"""``FactorialHMM``: several independent chains of hidden states behind one observation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._arrays import from_numpy
from .._checks import check_integers, check_range, check_trailing
from .._transforms import uncompiled
from ..chains.product import FactorialPosterior as FactorialPosterior
from ..chains.product import ProductChain
from .hmm import HMM


class FactorialHMM(HMM):
    r"""Sequences emitted by M independent Markov chains of hidden states together.

    .. math:: p(x_{1:T}) = \sum_{z^1, \dots, z^M} \prod_t p(x_t | z_t^1, \dots, z_t^M)
              \prod_m p(z_1^m) \prod_{t > 1} p(z_t^m | z_{t-1}^m)

    A factorial hidden Markov model (Ghahramani and Jordan, 1997). Its K = K_1 ⋯ K_M product states
    are those of an :class:`HMM`, numbered with the last chain fastest: :meth:`chain_states` tells
    those of each chain. Queries are those of ``HMM``, exact, the transition of one chain after
    another: in time O(T K (K_1 + ⋯ + K_M)), where an ``HMM`` of the same states takes O(T K²).
    :meth:`expanded` is that ``HMM``; ``log_transition`` is its matrix, made when it is read, as by
    :meth:`forecast`.

    Args:
        log_initials: M of ``(K_m,)``, log-probabilities of the first state of each chain.
        log_transitions: M of ``(K_m, K_m)``, of its next state; row = from, column = to.
        emission: Distribution of an observation, batched over the K product states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a product state is known not to be; see
            :meth:`restrict_chains`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If there is no chain, shapes or devices disagree, or (with ``validate_args``)
            probabilities do not sum to one.

    Example:
        >>> sticky = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()
        >>> even = torch.full((2,), 0.5).log()
        >>> levels = Normal(torch.tensor([0.0, 1.0, 5.0, 6.0]), 0.3)  # 5 of one chain, 1 of another
        >>> hmm = FactorialHMM([even, even], [sticky, sticky], levels, torch.tensor(4))
        >>> values = torch.tensor([0.1, 1.1, 6.2, 5.9])
        >>> hmm.chain_states(hmm.viterbi(values))
        tensor([[0, 0],
                [0, 1],
                [1, 1],
                [1, 1]])
        >>> hmm.posterior(values).chains[0][:, 1].round(decimals=2)  # the chain of 5
        tensor([0., 0., 1., 1.])
    """

    @uncompiled
    def __init__(
        self,
        log_initials: Sequence[Tensor],
        log_transitions: Sequence[Tensor],
        emission: TorchDistribution,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
    ) -> None:
        initials = tuple(from_numpy("log_initials", part) for part in log_initials)
        transitions = tuple(from_numpy("log_transitions", part) for part in log_transitions)
        if not initials or len(initials) != len(transitions):
            raise ValueError(
                "log_initials and log_transitions must hold a tensor for each of at least one "
                f"chain; got {len(initials)} and {len(transitions)}."
            )
        self._compose(
            ProductChain(initials, transitions), emission, lengths, observed, validate_args,
            emission_per_step, allowed,
        )  # fmt: skip

    @property
    def log_initials(self) -> tuple[Tensor, ...]:
        """M of ``(K_m,)``, log-probabilities of the first state of each chain."""
        return self.chain.log_initials

    @property
    def log_transitions(self) -> tuple[Tensor, ...]:
        """M of ``(K_m, K_m)``, log-probabilities of the next state of each chain."""
        return self.chain.log_transitions

    @property
    def sizes(self) -> tuple[int, ...]:
        """K_1, ..., K_M: the number of states of each chain."""
        return self.chain.sizes

    def __repr__(self) -> str:
        return (
            super()
            .__repr__()
            .replace(f"({self.num_states} states", f"({' x '.join(map(str, self.sizes))} states", 1)
        )

    # Product states and those of each chain

    def chain_states(self, states: Tensor) -> Tensor:
        """The state of each chain, ``(*S, *B, T, M)``, of product states ``(*S, *B, T)``."""
        check_integers("states", states)
        check_range("states", states, self.num_states, "K - 1", "K is that of the product.")
        return self.chain.split(states)

    def product_states(self, chains: Tensor) -> Tensor:
        """Product states ``(*S, *B, T)`` of the state of each chain, ``(*S, *B, T, M)``."""
        check_integers("chains", chains)
        check_trailing("chains", chains, (len(self.sizes),), "(M,)", "M is the number of chains.")
        for m, (size, part) in enumerate(zip(self.sizes, chains.unbind(-1))):
            check_range(f"chains[..., {m}]", part, size, "K_m - 1", "Chains are in their order.")
        return self.chain.join(chains)

    def restrict_chains(self, labels: Tensor) -> HMM:
        """Restrict the states of some chains at some steps, as labels say.

        As :meth:`HMM.restrict`, which takes product states.

        Args:
            labels: ``(*B, T, M)`` integers, the state of each chain, -1 where it is not known.

        Raises:
            ValueError: If a label is not below the number of states of its chain.
        """
        check_integers("labels", labels)
        check_trailing("labels", labels, (self.num_steps, len(self.sizes)), "(T, M)")
        parts = self.chain_states(torch.arange(self.num_states, device=labels.device))
        for m, size in enumerate(self.sizes):
            known = labels[..., m][self.exists.expand(labels.shape[:-1])].clamp(min=0)
            check_range(f"labels of chain {m}", known, size, f"K_{m + 1} - 1")
        wide = labels.unsqueeze(-2)
        return self.restrict(((wide == parts) | (wide < 0)).all(-1))
