"""``SecondOrderHMM``: a chain whose next state depends on the two before it."""

from __future__ import annotations

from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._transforms import uncompiled
from ..chains.second_order import SecondOrderChain
from ..chains.second_order import SecondOrderPosterior as SecondOrderPosterior
from .hmm import HMM


class SecondOrderHMM(HMM):
    r"""Sequences emitted by a chain of states, each of which depends on the two before it.

    .. math:: p(x_{1:T}) = \sum_{z_{1:T}} p(z_1) \, p(z_2 | z_1)
              \prod_{t=3}^T p(z_t | z_{t-2}, z_{t-1}) \prod_{t=1}^T p(x_t | z_t)

    Queries are those of :class:`HMM`, exact, in time O(T K³): messages are of pairs of states, and
    pair (i, j) is followed by (j, k) alone. :meth:`expanded` is the same distribution as an ``HMM``
    whose states are the pairs, at O(T K⁴).

    Args:
        log_initial: ``(K,)``, log-probabilities of the first state.
        log_second: ``(K, K)``, of the second state given the first; row = from, column = to.
        log_transition: ``(K, K, K)``, of the next state given the two before it, the earlier one
            first: [i, j, k] is that of k after i, j.
        emission: Distribution of an observation, batched over the K states; with
            ``emission_per_step`` over ``(T, K)``.
        lengths: ``(*B)`` integers, the number of steps of each sequence. They are kept on the CPU.
        observed: ``(*B, T)`` booleans, True where a step is observed.
        validate_args: Whether to read values in order to check them; Pyro's setting by default.
        emission_per_step: Whether ``emission`` has a dimension of steps.
        allowed: ``(*B, T, K)`` booleans, False where a state is known not to be.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes or devices disagree, or (with ``validate_args``) probabilities do not
            sum to one.

    Example:
        >>> even = torch.full((2,), 0.5).log()
        >>> twice = torch.tensor([[[0.1, 0.9], [0.1, 0.9]], [[0.9, 0.1], [0.9, 0.1]]])  # 0 0 1 1 0
        >>> levels = Normal(torch.tensor([0.0, 1.0]), 0.4)
        >>> hmm = SecondOrderHMM(even, even.expand(2, 2), twice.log(), levels, torch.tensor(5))
        >>> hmm.viterbi(torch.tensor([0.0, 0.1, 0.9, 0.5, 0.5]))
        tensor([0, 0, 1, 1, 0])
        >>> hmm.expanded().num_states
        6
    """

    @uncompiled
    def __init__(
        self,
        log_initial: Tensor,
        log_second: Tensor,
        log_transition: Tensor,
        emission: TorchDistribution,
        lengths: Tensor,
        observed: Tensor | None = None,
        validate_args: bool | None = None,
        *,
        emission_per_step: bool = False,
        allowed: Tensor | None = None,
    ) -> None:
        chain = SecondOrderChain(log_initial, log_second, log_transition)
        self._compose(chain, emission, lengths, observed, validate_args, emission_per_step, allowed)

    @property
    def log_second(self) -> Tensor:
        """``(K, K)``, log-probabilities of the second state given the first."""
        return self.chain.log_second
