"""``AutoregressiveNormal``: vectors that depend linearly on those before."""

from __future__ import annotations

import math

import torch
from pyro.distributions import MultivariateNormal as PyroNormal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import MultivariateNormal

from .._checks import check_broadcast, check_floats, check_trailing
from ..ops.products import squared_norms
from .autoregressive import Autoregressive
from .observation import permuted


class AutoregressiveNormal(Autoregressive):
    r"""Switching vector autoregression: vectors that depend linearly on those before.

    .. math:: x_t | z_t = k \sim \mathrm{Normal}\Big(\mu_k + \sum_{l=1}^L
              (x_{t-l} - o) W_{kl}, \; \Sigma_k\Big)

    Vectors are rows: ``weights[k, l - 1, i, j]`` is by how much component i of the l-th observation
    before moves component j (row = from, column = to). The origin o is a constant that keeps
    numbers small; with zeros the mean :math:`\mu` is the usual intercept.

    Args:
        initial: Distribution of each of the first L vectors, batched over the K states.
        base: ``MultivariateNormal`` of batch shape ``(*b, K)``: mean :math:`\mu_k` of a vector
            when those before it are at the origin, and covariance :math:`\Sigma_k`.
        weights: ``(*b, K, L, D, D)``.
        origin: ``(D,)``; zeros by default.
        history: ``(*B, L, D)``, vectors before the first: see :class:`Autoregressive`.

    Raises:
        TypeError: If an argument is of the wrong type or dtype.
        ValueError: If shapes disagree.

    Example:
        >>> start = MultivariateNormal(torch.zeros(2, 1), torch.eye(1))
        >>> noise = MultivariateNormal(torch.tensor([[0.0], [1.0]]), 0.1 * torch.eye(1))
        >>> weights = torch.tensor([0.9, -0.5]).reshape(2, 1, 1, 1)
        >>> emission = distributions.AutoregressiveNormal(start, noise, weights)
        >>> even = torch.full((2, 2), 0.5).log()
        >>> hmm = HMM(even[0], even, emission, torch.tensor(3))
        >>> hmm.log_prob(torch.tensor([[0.0], [0.1], [0.9]]))
        tensor(-1.8475)
        >>> hmm.sample().shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        initial: TorchDistribution,
        base: TorchDistribution,
        weights: Tensor,
        origin: Tensor | None = None,
        history: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if not isinstance(base, MultivariateNormal):
            raise TypeError(f"base must be a MultivariateNormal; got {type(base).__name__}.")
        check_floats("weights", weights)
        dim = base.event_shape[0]
        check_trailing("weights", weights, (dim, dim), "(K, L, D, D)", "D is that of base.")
        states = {base.batch_shape[-1:], initial.batch_shape[-1:], weights.shape[-4:-3]}
        if weights.dim() < 4 or len(states) > 1 or initial.event_shape != base.event_shape:
            raise ValueError(
                "initial, base and weights must be of the same K states and D components, weights "
                f"(*b, K, L, D, D); got batch shapes {tuple(initial.batch_shape)} and "
                f"{tuple(base.batch_shape)}, event shapes {tuple(initial.event_shape)} and "
                f"{tuple(base.event_shape)}, and weights {tuple(weights.shape)}."
            )
        origin = weights.new_zeros(dim) if origin is None else origin
        check_trailing("origin", origin, (dim,), "(D,)", "D is that of base.")
        self.base, self.weights, self.origin = base, weights, origin
        batch = check_broadcast({"base": base.batch_shape, "weights": weights.shape[:-3]})
        super().__init__(initial, weights.size(-3), batch, history, validate_args)

    def _shift(self, context: Tensor) -> Tensor:
        """Contexts ``(*A, L, D)`` about the origin, the last one first: as ``weights`` have it."""
        return (context - self.origin).flip(-2)

    def given(self, context: Tensor) -> TorchDistribution:
        """Normal vectors ``(*A, K)``."""
        past = self._shift(context)
        loc = self.base.loc + torch.einsum("...li,...klij->...kj", past, self.weights.to(past))
        return PyroNormal(loc, scale_tril=self.base.scale_tril.to(loc), validate_args=False)

    def permuted(self, order: Tensor) -> AutoregressiveNormal:
        """Emissions in which state k emits as ``order[k]`` did, ``(K,)`` integers."""
        base = self.base
        return AutoregressiveNormal(
            permuted(self.initial, order),
            PyroNormal(base.loc[..., order, :], scale_tril=base.scale_tril[..., order, :, :]),
            self.weights.index_select(-4, order), self.origin, self.history,
        )  # fmt: skip

    def _log_prob_given(self, values: Tensor, context: Tensor) -> Tensor:
        """One product: residuals, whitened, are linear in values and contexts.

        In float64, for a residual may be far smaller than what it is the difference of.
        """
        one = torch.ones_like(values[..., :1])
        past = self._shift(context).flatten(-2)
        rows = torch.cat([values - self.origin, past, one], -1)
        root, loc = self.base.scale_tril, self.base.loc - self.origin
        eye = torch.eye(root.size(-1), dtype=root.dtype, device=root.device)
        slopes = self.weights.flatten(-3, -2).mT  # (*b, K, D, L D)
        shape = self._own_batch
        columns = torch.cat(
            [part.expand(*shape, *part.shape[-2:]) for part in (eye, -slopes, -loc.unsqueeze(-1))],
            -1,
        )
        whitened = torch.linalg.solve_triangular(root.double(), columns.double(), upper=False)
        scores = -0.5 * squared_norms(rows.double(), whitened)
        log_det = root.diagonal(dim1=-2, dim2=-1).double().log().sum(-1)
        scores = scores - log_det - 0.5 * len(eye) * math.log(2 * math.pi)
        return scores.to(torch.promote_types(values.dtype, root.dtype))

    def moments(self, states: Tensor, log_transition: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance ``(*B, H, D)`` of each of H observations after the history, exactly.

        The joint second moments of context and state obey a linear recursion. It is computed in
        float64, for a variance is the difference of a mean square and the square of a mean.

        Args:
            states: ``(*B, H, K)``, probabilities of the states at these steps.
            log_transition: ``(*b, K, K)``.
        """
        dim, size = self.event_shape[0], 1 + self.lags * self.event_shape[0]
        past = self._shift(self.history.double()).flatten(-2)
        past = torch.cat([torch.ones_like(past[..., :1]), past], -1)
        step, covariance = self._companion(size).double(), self.base.covariance_matrix.double()
        noise = torch.nn.functional.pad(covariance, (1, size - 1 - dim, 1, size - 1 - dim))
        outer = (past.unsqueeze(-1) * past.unsqueeze(-2)).unsqueeze(-3)
        first = states[..., 0, :].double()
        first = first / first.sum(-1, keepdim=True)
        before = first[..., None, None] * outer  # (*B, K, F, F)
        matrix = log_transition.double().softmax(-1)
        means, squares = [], []
        for _ in range(states.size(-2)):
            mass = before[..., :1, :1]
            now = step @ before @ step.mT + mass * noise
            total = now.sum(-3)
            means.append(total[..., 1 : 1 + dim, 0])
            squares.append(total.diagonal(dim1=-2, dim2=-1)[..., 1 : 1 + dim])
            before = torch.einsum("...jk,...jfg->...kfg", matrix, now)
        mean = torch.stack(means, -2)
        variance = torch.stack(squares, -2) - mean.square()
        return (mean + self.origin).to(states.dtype), variance.clamp(min=0.0).to(states.dtype)

    def _companion(self, size: int) -> Tensor:
        """Matrices ``(*b, K, F, F)`` from 1 and the last L vectors to those one step later."""
        dim, weights = self.event_shape[0], self.weights
        kept = torch.eye(size, dtype=weights.dtype, device=weights.device)
        kept = torch.cat([kept[:1], kept.new_zeros(dim, size), kept[1 : size - dim]])
        loc = (self.base.loc - self.origin).unsqueeze(-1)
        slopes = weights.flatten(-3, -2).mT
        loc, slopes = (part.expand(*self._own_batch, *part.shape[-2:]) for part in (loc, slopes))
        top = torch.nn.functional.pad(torch.cat([loc, slopes], -1), (0, 0, 1, size - 1 - dim))
        return kept + top
