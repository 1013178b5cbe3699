"""``HMMModule``: what calling a module means."""

from __future__ import annotations

from pyro.nn import PyroModule
from torch import Tensor

from .hmm import HMM


class HMMModule(PyroModule):
    """A ``PyroModule`` whose call returns an :class:`HMM` for sequences of given lengths.

    Subclasses define ``forward(lengths, observed=None)``. Their parameters may be
    ``torch.nn.Parameter`` or ``PyroParam`` (points), or ``PyroSample`` (random variables, drawn
    from the prior or from a guide each time the module is called). Whoever calls the module need
    not know which.

    Example:
        >>> class Coin(HMMModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.logits = torch.nn.Parameter(torch.zeros(2, 2))
        ...
        ...     def forward(self, lengths, observed=None):
        ...         even = torch.full((2, 2), 0.5).log()
        ...         return HMM(even[0], even, Categorical(logits=self.logits), lengths, observed)
        >>> Coin()(torch.tensor([2])).log_prob(torch.tensor([[0, 1]])).exp()
        tensor([0.2500], grad_fn=<ExpBackward0>)
    """

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM.

        Args:
            lengths: ``(*B)`` integers, the number of steps of each sequence.
            observed: ``(*B, T)`` booleans, True where a step is observed; all by default.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(lengths, observed).")
