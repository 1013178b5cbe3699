"""``AutoregressiveCategorical``: symbols that depend on those before."""

from __future__ import annotations

import torch
from pyro.distributions import Categorical as PyroCategorical
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor

from .._checks import broadcast_shapes
from ..ops.products import look_up
from .autoregressive import Autoregressive
from .hard_zeros import log_probs
from .observation import is_categorical, permuted


class AutoregressiveCategorical(Autoregressive):
    r"""Symbols whose distribution in each state depends on the last L symbols: one table.

    .. math:: p(x_t = v | z_t = k, c_t = c) = \mathrm{tables}_{k c v}

    Contexts are numbered as the digits of a number to the base V, the last symbol counting
    least: :math:`c = \sum_l x_{t-l} V^{l-1}`.

    Args:
        initial: ``Categorical`` of batch shape ``(*b, K)``: each of the first L symbols.
        tables: ``Categorical`` of batch shape ``(*b, K, V**L)``.
        history: ``(*B, L)`` integers, symbols before the first: see :class:`Autoregressive`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes disagree, or the number of contexts is no power of V.

    Example:
        A state that repeats the symbol before, and one that changes it.

        >>> tables = torch.tensor([[[0.9, 0.1], [0.1, 0.9]], [[0.2, 0.8], [0.8, 0.2]]])
        >>> first = Categorical(torch.ones(2, 2))
        >>> emission = distributions.AutoregressiveCategorical(first, Categorical(tables))
        >>> sure = torch.eye(2).log()
        >>> hmm = HMM(torch.tensor([0.5, 0.5]).log(), sure, emission, torch.tensor(3))
        >>> hmm.posterior(torch.tensor([0, 0, 0])).state_probs[-1]
        tensor([0.9529, 0.0471])
    """

    def __init__(
        self,
        initial: TorchDistribution,
        tables: TorchDistribution,
        history: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        for name, part in (("initial", initial), ("tables", tables)):
            if not is_categorical(part):
                raise TypeError(f"{name} must be a Categorical; got {type(part).__name__}.")
        self.num_symbols = tables.param_shape[-1]
        lags = _num_lags(self.num_symbols, tables.batch_shape[-1] if tables.batch_shape else 0)
        shapes = initial.batch_shape[-1:], tables.batch_shape[-2:-1]
        symbols = initial.param_shape[-1]
        if not lags or shapes[0] != shapes[1] or symbols != self.num_symbols:
            raise ValueError(
                "initial must have batch shape (*b, K) and tables (*b, K, V**L), both of V "
                f"symbols; got {tuple(initial.batch_shape)} of {symbols} symbols and "
                f"{tuple(tables.batch_shape)} of {self.num_symbols}."
            )
        self.tables = tables
        super().__init__(initial, lags, tables.batch_shape[:-1], history, validate_args)

    def _context(self, symbols: Tensor) -> Tensor:
        """The numbers ``(*A)`` of contexts ``(*A, L)``."""
        place = self.num_symbols ** torch.arange(self.lags - 1, -1, -1, device=symbols.device)
        return (symbols.long() * place).sum(-1)

    def given(self, context: Tensor) -> TorchDistribution:
        """Symbols ``(*A, K)``."""
        logs = log_probs(self.tables)
        shape = broadcast_shapes(context.shape[:-1], logs.shape[:-3])
        row = self._context(context).expand(shape)[..., None, None, None]
        logs = logs.expand(*shape, *logs.shape[-3:])
        return PyroCategorical(
            logits=logs.gather(-2, row.expand(*logs.shape[:-2], 1, logs.size(-1))).squeeze(-2)
        )

    def permuted(self, order: Tensor) -> AutoregressiveCategorical:
        """Emissions in which state k emits as ``order[k]`` did, ``(K,)`` integers."""
        tables = PyroCategorical(logits=log_probs(self.tables).index_select(-3, order))
        return AutoregressiveCategorical(permuted(self.initial, order), tables, self.history)

    # As symbols of a larger alphabet: a symbol with its context is one of V + V ** (L + 1)

    @property
    def log_symbols(self) -> Tensor:
        """Log-probabilities ``(*b, K, V + V ** (L + 1))`` of first symbols, and of those after."""
        first, rest = log_probs(self.initial), log_probs(self.tables).flatten(-2)
        return torch.cat([part.expand(*self._lead(), part.size(-1)) for part in (first, rest)], -1)

    def _lead(self) -> torch.Size:
        return broadcast_shapes(self.initial.batch_shape, self._own_batch)

    def codes(self, windows: Tensor) -> Tensor:
        """The columns ``(*A)`` of :attr:`log_symbols` for windows ``(*A, L+1)``.

        A symbol that is none of 0 to V - 1 has a column that does not exist.
        """
        windows, count = windows.long(), self.num_symbols
        now, context = windows[..., -1], windows[..., :-1]
        codes = torch.where(context[..., 0] < 0, now, count + self._context(context) * count + now)
        return codes.masked_fill((now < 0) | (now >= count), count + count ** (self.lags + 1))

    def log_likelihood(self, values: Tensor) -> Tensor:
        """Log-probability ``(*A, T, K)`` of each symbol ``(*A, T)`` given those before it."""
        codes = self.codes(self.windows(values))
        return look_up(self.log_symbols, codes.movedim(-1, 0)).movedim(0, -2)

    def probs_ahead(self, states: Tensor, log_transition: Tensor) -> Tensor:
        """Probabilities ``(*B, H, V)`` of each of H symbols after the history, exactly.

        A forward pass over the pairs of state and context.

        Args:
            states: ``(*B, H, K)``, probabilities of the states at these steps.
            log_transition: ``(*b, K, K)``.
        """
        count, size = self.num_symbols, self.num_symbols**self.lags
        here = torch.nn.functional.one_hot(self._context(self.history), size)
        before = states[..., 0, :, None] * here.unsqueeze(-2)  # (*B, K, C)
        probs = []
        for _ in range(states.size(-2)):
            joint = before.unsqueeze(-1) * log_probs(self.tables).exp()  # (*B, K, C, V)
            probs.append(joint.sum((-3, -2)))
            now = joint.unflatten(-2, (count, size // count)).sum(-3).flatten(-2)
            before = torch.einsum("...jk,...jc->...kc", log_transition.exp(), now)
        return torch.stack(probs, -2)


def _num_lags(num_symbols: int, contexts: int) -> int:
    """L with ``num_symbols ** L == contexts``; zero if there is none."""
    lags, size = 1, num_symbols
    while 1 < size < contexts:
        lags, size = lags + 1, size * num_symbols
    return lags if size == contexts else 0
