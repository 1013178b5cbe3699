r"""``DenseHMM``: every probability is a normalised kernel between two embeddings.

A kernel is any function of ``rows`` ``(*B, n, D)`` and ``columns`` ``(*B, m, D)`` that returns the
logarithms ``(*B, n, m)`` of positive numbers, which are then divided by the sums of their rows.
:func:`exponential`, the softmax of inner products, is the paper's and the default.

References:
    DenseHMM: Learning Hidden Markov Models by Learning Dense Representations
    (Sicking, Pintz, Akila and Wirtz, 2020), https://arxiv.org/abs/2012.09783
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from pyro.distributions import Categorical, Normal
from pyro.distributions.torch_distribution import TorchDistribution
from pyro.nn import PyroModule, PyroSample
from torch import Tensor
from torch.nn.functional import logsigmoid

from .._checks import check_positive_number, check_size
from .._choices import first_values
from .._precision import at_least_single, full_precision
from ..distributions.hmm import HMM
from ..ops import markov as markov_ops
from ..ops.log_space import log
from .base import HMMModule
from .family import EmissionFamily, build_emission

Kernel = Callable[[Tensor, Tensor], Tensor]


# Kernels -----------------------------------------------------------------------------------------


def exponential(rows: Tensor, columns: Tensor) -> Tensor:
    r"""Logarithm of :math:`\exp(u \cdot v)`."""
    return rows @ columns.mT


def sigmoid(rows: Tensor, columns: Tensor) -> Tensor:
    r"""Logarithm of :math:`1 / (1 + \exp(-u \cdot v))`."""
    return logsigmoid(rows @ columns.mT)


def relu(rows: Tensor, columns: Tensor, floor: float = 1e-6) -> Tensor:
    r"""Logarithm of :math:`\max(u \cdot v, 0)` plus a floor, so that rows have a sum.

    Where the inner product is negative the gradient is zero.
    """
    return ((rows @ columns.mT).relu() + floor).log()


def absolute(rows: Tensor, columns: Tensor) -> Tensor:
    r"""Logarithm of :math:`|u \cdot v|`: the paper's ``normAbsLin``, an ordinary factorisation."""
    values = (rows @ columns.mT).abs()
    return (values + torch.finfo(values.dtype).tiny).log()


def rbf(width: float = 1.0) -> Kernel:
    r"""The kernel :math:`\exp(-\lVert u - v \rVert^2 / 2 w^2)` of width w.

    Example:
        >>> rbf(2.0)(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[-0.2500]])
    """
    check_positive_number("width", width)
    return partial(_rbf, width=width)


def _rbf(rows: Tensor, columns: Tensor, width: float) -> Tensor:
    squares = rows.square().sum(-1, keepdim=True) + columns.square().sum(-1).unsqueeze(-2)
    return (rows @ columns.mT - squares / 2) / width**2


def log_rows(kernel: Kernel, rows: Tensor, columns: Tensor) -> Tensor:
    r"""Log-probabilities ``(*B, n, m)``: values of the kernel, normalised over each row.

    .. math:: p_{ij} = \frac{k(u_i, v_j)}{\sum_{j'} k(u_i, v_{j'})}

    Args:
        kernel: Such as :func:`exponential`.
        rows: ``(*B, n, D)``, one vector for each row.
        columns: ``(*B, m, D)``, one vector for each column.

    Example:
        >>> log_rows(exponential, torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [1.0]])).exp()
        tensor([[0.5000, 0.5000],
                [0.2689, 0.7311]])
    """
    with full_precision(rows):
        return kernel(at_least_single(rows), at_least_single(columns)).log_softmax(-1)


# The module --------------------------------------------------------------------------------------


class DenseHMM(HMMModule):
    r"""HMM whose probabilities are softmaxes of inner products of embeddings (eq. 2).

    .. math:: A_{ij} = \frac{k(z_i, u_j)}{\sum_{j'} k(z_i, u_{j'})}, \quad
              B_{iv} = \frac{k(w_i, v_v)}{\sum_{v'} k(w_i, v_{v'})}, \quad
              \pi_i = \frac{k(z_0, u_i)}{\sum_{i'} k(z_0, u_{i'})}

    With the exponential kernel the logits of A have rank D at most, and A itself full rank in
    general. No probability is exactly zero. Only inner products matter: the posterior does not
    change when ``leave``, ``enter`` and ``start`` are rotated together, nor when ``emit`` and
    ``symbol`` are.

    Sites: ``leave`` z ``(K, D)``, ``enter`` u ``(K, D)``, ``start`` ``(D,)``, ``emit`` w
    ``(K, D')`` and ``symbol`` v ``(V, D')``, or those of ``emission``.

    Args:
        num_states: K.
        num_symbols: V; None if there is an ``emission``.
        dim: D, of the embeddings of states that make A and the initial probabilities.
        symbol_dim: D', of those that make B; D by default.
        kernel: Of A and of the first state; see the head of this module.
        symbol_kernel: Of B; ``kernel`` by default.
        scale: Standard deviation of the normal priors of all embeddings; by default
            :math:`D^{-1/4}`, with which inner products have a standard deviation of one in any
            number of dimensions. Fits from samples of wider priors start at probabilities close to
            zero and one, and converge slowly. The paper's starts have one.
        flat: Whether priors are flat, so that the most probable parameters are those of maximum
            likelihood; ``scale`` is then that of the starts alone. For points only: the posterior
            is improper, because ``emit`` may grow as ``symbol`` shrinks.
        tied: Whether a state has one embedding, ``leave``, which is ``enter`` and ``emit`` as
            well (section 6, learning Z and V only). With the kernels of this module A is then a
            symmetric matrix with its rows normalised: the chain is reversible. Any embedding may be
            held constant besides: see :func:`pyrohmm.freeze`.
        stationary: Whether initial probabilities are the stationary distribution of A, so that
            there is no ``start`` (section 3.2). Data that never leave a state may drive A to where
            that distribution is no longer unique.
        emission: An emission family, such as ``normal(2)``, instead of symbols.

    Raises:
        TypeError: If a kernel or ``emission`` is not callable.
        ValueError: If a size is less than one; ``scale`` is not positive; both or neither of
            ``num_symbols`` and ``emission`` are given; or ``tied`` is given with two dimensions.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> module = DenseHMM(num_states=4, num_symbols=10, dim=2)
        >>> hmm = module(torch.tensor([3, 1]))  # a sample from the prior
        >>> hmm.log_transition.shape, hmm.emission.probs.shape
        (torch.Size([4, 4]), torch.Size([4, 10]))
        >>> logits = hmm.log_transition - hmm.log_transition.mean(-1, keepdim=True)
        >>> torch.linalg.matrix_rank(logits, rtol=1e-5), torch.linalg.matrix_rank(logits.exp())
        (tensor(2), tensor(4))
    """

    overcomplete = "leave", "enter", "start", "emit", "symbol"  # only inner products matter

    @first_values()
    def __init__(
        self,
        num_states: int,
        num_symbols: int | None,
        dim: int,
        *,
        symbol_dim: int | None = None,
        kernel: Kernel = exponential,
        symbol_kernel: Kernel | None = None,
        scale: float | None = None,
        flat: bool = False,
        tied: bool = False,
        stationary: bool = False,
        emission: EmissionFamily | None = None,
    ) -> None:
        super().__init__()
        check_size("num_states", num_states)
        check_size("dim", dim)
        if (num_symbols is None) == (emission is None):
            got = "neither" if emission is None else "both"
            raise ValueError(f"one of num_symbols and emission must be given; got {got}.")
        if scale is not None:
            check_positive_number("scale", scale, "For flat priors, say flat=True.")
        self.num_states, self.num_symbols = num_states, num_symbols
        self.kernel, self.symbol_kernel = kernel, symbol_kernel or kernel
        self.tied, self.stationary, self.flat = tied, stationary, flat
        self.register_buffer("one", torch.ones(()))  # of the dtype and on the device of all
        self.leave = _embedding(scale, num_states, dim)
        if not tied:
            self.enter = _embedding(scale, num_states, dim)
        if not stationary:
            self.start = _embedding(scale, dim)
        if num_symbols is not None:
            symbol_dim = dim if symbol_dim is None else symbol_dim
            check_size("num_symbols", num_symbols)
            check_size("symbol_dim", symbol_dim)
            if tied and symbol_dim != dim:
                raise ValueError(
                    f"symbol_dim must be dim = {dim} where states share one embedding; got "
                    f"{symbol_dim}."
                )
            if not tied:
                self.emit = _embedding(scale, num_states, symbol_dim)
            self.symbol = _embedding(scale, num_symbols, symbol_dim)
        else:
            self.emission = build_emission(emission, num_states)

    def forward(self, lengths: Tensor, observed: Tensor | None = None) -> HMM:
        """Build the HMM for sequences of ``lengths`` ``(*B)``."""
        leave = self.leave
        enter = leave if self.tied else self.enter
        transition = log_rows(self.kernel, leave, enter)
        if self.stationary:
            # where rounding splits the chain in two, the HMM built says so, if it is validated
            initial = log(markov_ops.stationary(transition, check=False))
        else:
            initial = log_rows(self.kernel, self.start.unsqueeze(-2), enter).squeeze(-2)
        return HMM(initial, transition, self._emission(leave), lengths, observed)

    def emission_module(self) -> PyroModule | None:
        """The module of the emission, if it is not of symbols."""
        return None if self.num_symbols is not None else self.emission

    def _emission(self, leave: Tensor) -> TorchDistribution:
        if self.num_symbols is None:
            return self.emission()
        emit = leave if self.tied else self.emit
        return Categorical(logits=log_rows(self.symbol_kernel, emit, self.symbol))


def _embedding(scale: float | None, *shape: int) -> PyroSample:
    """Sample site of embedding vectors with a normal prior, all as one event."""
    return PyroSample(partial(_prior, shape=shape, scale=scale or shape[-1] ** -0.25))


def _prior(module: DenseHMM, shape: tuple[int, ...], scale: float) -> TorchDistribution:
    """Prior of one embedding; a flat one is a Normal with a log-density of zero."""
    normal = Normal(0.0 * module.one, scale * module.one)
    normal = normal.expand(torch.Size(shape)).to_event(len(shape))
    return normal.mask(False) if module.flat else normal
