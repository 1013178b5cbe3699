r"""Distributions that Pyro lacks, and log-densities of vectors of which only a part is known.

An observation may be known in part: components that are NaN are missing. Where a distribution
allows it exactly they are integrated out (:func:`known_log_prob`), never filled in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    biject_to,
    constraints,
    transform_to,
)
from torch.distributions.transforms import Transform
from torch.nn.functional import softplus

from ._checks import check_booleans, check_floats, check_integers, check_trailing
from ._lookup import take_rows

# Rows of probabilities with exact zeros ----------------------------------------------------------


class SparseDirichlet(TorchDistribution):
    """Rows of probabilities, Dirichlet over the entries they may use, exactly zero elsewhere.

    The whole table is one event. Guides and samplers move the allowed entries only, so that what
    is forbidden stays forbidden to the last bit.

    Args:
        concentration: Positive, ``(*B, *rows, K)``; what stands at forbidden entries is not read.
        allowed: ``(*rows, K)`` booleans, True where an entry may be positive.

    Raises:
        TypeError: If a dtype is wrong.
        ValueError: If a row allows nothing, or shapes disagree.

    Example:
        >>> left_to_right = torch.ones(3, 3).triu().bool()
        >>> matrix = SparseDirichlet(torch.ones(3, 3), left_to_right).sample()
        >>> matrix[1, 0], matrix[2]
        (tensor(0.), tensor([0., 0., 1.]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface
    has_rsample = True

    def __init__(
        self, concentration: Tensor, allowed: Tensor, validate_args: bool | None = None
    ) -> None:
        check_floats("concentration", concentration)
        check_booleans("allowed", allowed)
        check_trailing("concentration", concentration, tuple(allowed.shape), "(*rows, K)")
        if not bool(allowed.any(-1).all()):
            raise ValueError("allowed must have at least one True in each row.")
        self.concentration, self.allowed = concentration, allowed
        batch = concentration.shape[: concentration.dim() - allowed.dim()]
        super().__init__(batch, allowed.shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Tables whose rows sum to one and are zero where nothing is allowed."""
        return _SparseSimplex(self.allowed)

    @property
    def mean(self) -> Tensor:
        """Mean of the table, ``(*B, *rows, K)``."""
        strength = self.concentration.masked_fill(~self.allowed, 0.0)
        return strength / strength.sum(-1, keepdim=True)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SparseDirichlet:
        """The same law for a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        return SparseDirichlet(self.concentration.expand(shape), self.allowed, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw tables ``(*S, *B, *rows, K)``."""
        shape = torch.Size(sample_shape) + self.concentration.shape
        strength = self.concentration.masked_fill(~self.allowed, 1.0).expand(shape)
        # Gamma(c) is Gamma(c + 1) U^(1/c); in logs, for a small c underflows in whole rows
        logs = torch.distributions.Gamma(strength + 1, 1.0).rsample().log()
        logs = logs - torch.empty_like(logs).exponential_() / strength
        drawn = logs.masked_fill(~self.allowed, -torch.inf).softmax(-1)
        # at zero itself the density is infinite
        return drawn.clamp(min=torch.finfo(drawn.dtype).tiny).masked_fill(~self.allowed, 0.0)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of tables; -inf where a forbidden entry is positive."""
        if self._validate_args:
            self._validate_sample(value)
        strength = self.concentration.masked_fill(~self.allowed, 1.0)
        total = self.concentration.masked_fill(~self.allowed, 0.0).sum(-1).lgamma()
        # a flat density has no slope, not even at zero, where xlogy has NaN
        inner = value.masked_fill(~self.allowed | (strength == 1), 1.0)
        powers = torch.xlogy(strength - 1, inner)
        rows = (powers - strength.lgamma()).sum(-1) + total
        # a row that may use one entry has no density to speak of
        rows = rows.masked_fill(self.allowed.sum(-1) == 1, 0.0)
        rows = rows.masked_fill(((value > 0) & ~self.allowed).any(-1), -torch.inf)
        return rows.flatten(1 - self.allowed.dim()).sum(-1) if self.allowed.dim() > 1 else rows


class _SparseSimplex(constraints.Constraint):
    """Tables of probabilities that are zero where ``allowed`` is not."""

    def __init__(self, allowed: Tensor) -> None:
        self.allowed = allowed
        self.event_dim = allowed.dim()
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        """Whether each table is one of them."""
        inside = ((value.sum(-1) - 1).abs() < 1e-4) & (value >= 0).all(-1)
        inside = inside & (value.masked_fill(self.allowed, 0.0) == 0).all(-1)
        return inside.flatten(-self.event_dim + 1).all(-1) if self.event_dim > 1 else inside


class _SparseSoftmax(Transform):
    """Softmax of each row over the entries that are allowed: for optimisers."""

    bijective = False

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed
        self.domain = constraints.independent(constraints.real, allowed.dim())
        self.codomain = _SparseSimplex(allowed)

    def _call(self, x: Tensor) -> Tensor:
        return x.masked_fill(~self.allowed, -torch.inf).softmax(-1)

    def _inverse(self, y: Tensor) -> Tensor:
        return y.clamp(min=torch.finfo(y.dtype).tiny).log().masked_fill(~self.allowed, 0.0)


class _SparseStickBreaking(Transform):
    """Breaks a stick for each row among the entries that are allowed: for densities.

    Rows differ in the number n of entries allowed. The n - 1 free numbers of all the rows make one
    vector; where a row is shorter than the longest one, the whole rest of the stick is taken.
    """

    bijective = True

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed
        self.domain = constraints.real_vector
        self.codomain = _SparseSimplex(allowed)
        count = allowed.sum(-1, keepdim=True)  # (*rows, 1)
        width = int(count.max())
        self.order = (~allowed).byte().argsort(stable=True)[..., :width]  # allowed ones first
        rest = count - 1 - torch.arange(width - 1, device=allowed.device)
        self.free = rest > 0  # (*rows, width - 1)
        self.offset = rest.clamp(min=1)[self.free].log()  # so that zeros are even shares

    def _break(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Share taken at each break, and the logarithm of what is left before it.

        Shares that round to one leave something all the same, which only the logarithm shows.
        """
        share = x.new_ones(x.shape[:-1] + self.free.shape)
        rest = torch.full_like(share, -torch.inf)
        logit = x - self.offset.to(x)
        share[..., self.free] = logit.sigmoid()
        rest[..., self.free] = torch.nn.functional.logsigmoid(-logit)
        left = torch.cat([x.new_zeros((*share.shape[:-1], 1)), rest.cumsum(-1)], -1)
        return share, left

    def _call(self, x: Tensor) -> Tensor:
        share, left = self._break(x)
        left = left.exp()
        parts = torch.cat([share * left[..., :-1], left[..., -1:]], -1)
        out = parts.new_zeros(parts.shape[: parts.dim() - self.allowed.dim()] + self.allowed.shape)
        return out.scatter(-1, self.order.expand(parts.shape), parts)

    def _inverse(self, y: Tensor) -> Tensor:
        batch = y.shape[: y.dim() - self.allowed.dim()]
        parts = y.gather(-1, self.order.expand(batch + self.order.shape))
        tiny = torch.finfo(y.dtype).tiny
        after = parts.flip(-1).cumsum(-1).flip(-1)[..., 1:].clamp(min=tiny)  # left after the break
        odds = parts[..., :-1].clamp(min=tiny).log() - after.log()
        return odds[..., self.free] + self.offset.to(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        logit = x - self.offset.to(x)
        slope = torch.nn.functional.logsigmoid(logit) + torch.nn.functional.logsigmoid(-logit)
        _, left = self._break(x)
        return (slope + left[..., :-1][..., self.free]).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        return torch.Size(shape[:-1]) + self.allowed.shape

    def inverse_shape(self, shape: Any) -> torch.Size:
        shape = torch.Size(shape)
        return shape[: len(shape) - self.allowed.dim()] + torch.Size([int(self.free.sum())])


@biject_to.register(_SparseSimplex)
def _bijection_to_rows(constraint: _SparseSimplex) -> Transform:
    return _SparseStickBreaking(constraint.allowed)


@transform_to.register(_SparseSimplex)
def _map_to_rows(constraint: _SparseSimplex) -> Transform:
    return _SparseSoftmax(constraint.allowed)


def interior(support: constraints.Constraint, value: Tensor) -> Tensor:
    """``value``, moved off the boundary of its space, where gradients and densities may end.

    Probabilities are moved by about a millionth; what is far inside stays to rounding.

    Args:
        support: Of a latent variable.
        value: One that may lie on the boundary, such as a probability of zero.
    """
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    try:
        transform = biject_to(support)
    except NotImplementedError:
        return value
    free = transform.inv(value)
    bounded = type(constraints.simplex) | type(constraints.unit_interval) | _SparseSimplex
    if isinstance(base, bounded):
        return transform(free.clamp(-14.0, 14.0))
    if bool(free.isfinite().all()):
        return value
    return transform(torch.where(free.isfinite(), free, -14.0))


# Covariances -------------------------------------------------------------------------------------


class InverseWishart(TorchDistribution):
    r"""Inverse Wishart distribution of a covariance matrix.

    .. math:: p(\Sigma) \propto |\Sigma|^{-(\nu + D + 1)/2}
              \exp(-\tfrac12 \mathrm{tr}(\Psi \Sigma^{-1}))

    Its mean is :math:`\Psi / (\nu - D - 1)`; with D = 1 it is the inverse gamma distribution with
    concentration :math:`\nu/2` and rate :math:`\Psi/2`.

    Args:
        degrees: :math:`\nu`, greater than D - 1.
        scale: :math:`\Psi`, ``(*B, D, D)``, positive definite.

    Example:
        >>> InverseWishart(5.0, torch.eye(2)).log_prob(torch.eye(2))
        tensor(-5.3228)
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    has_rsample = True

    def __init__(self, degrees: float, scale: Tensor, validate_args: bool | None = None) -> None:
        check_floats("scale", scale)
        dim = scale.size(-1)
        check_trailing("scale", scale, (dim, dim), "(D, D)")
        if not degrees > dim - 1:
            raise ValueError(f"degrees must be greater than D - 1 = {dim - 1}; got {degrees}.")
        self.degrees, self.scale = float(degrees), scale
        super().__init__(scale.shape[:-2], scale.shape[-2:], validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Covariance matrices."""
        return covariance_matrix

    @property
    def mean(self) -> Tensor:
        """Mean of the matrix, infinite unless degrees exceed D + 1."""
        spare = self.degrees - self.scale.size(-1) - 1
        return self.scale / spare if spare > 0 else torch.full_like(self.scale, torch.inf)

    def expand(self, batch_shape: Any, _instance: Any = None) -> InverseWishart:
        """The same law for a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        return InverseWishart(self.degrees, self.scale.expand(shape), validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw matrices ``(*S, *B, D, D)``, by Bartlett's decomposition."""
        dim = self.scale.size(-1)
        shape = torch.Size(sample_shape) + self.batch_shape
        freedom = self.degrees - torch.arange(dim, dtype=self.scale.dtype, device=self.scale.device)
        chi = torch.distributions.Chi2(freedom).rsample(shape).sqrt()
        lower = torch.randn(
            shape + self.event_shape, dtype=self.scale.dtype, device=self.scale.device
        )
        lower = lower.tril(-1) + torch.diag_embed(chi)  # W = M A A' M' with M M' = inverse of scale
        factor = torch.linalg.cholesky(self.scale)
        root = torch.linalg.solve_triangular(lower, factor.mT.expand(lower.shape), upper=False)
        return root.mT @ root

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of covariance matrices."""
        if self._validate_args:
            self._validate_sample(value)
        dim, degrees = self.scale.size(-1), self.degrees
        root = torch.linalg.cholesky(value)
        half = torch.linalg.solve_triangular(root, torch.linalg.cholesky(self.scale), upper=False)
        trace = half.pow(2).sum((-2, -1))
        norm = (
            0.5 * degrees * torch.logdet(self.scale)
            - 0.5 * degrees * dim * math.log(2)
            - torch.special.multigammaln(value.new_tensor(0.5 * degrees), dim)
        )
        return norm - 0.5 * (degrees + dim + 1) * _log_det(root) - 0.5 * trace


class _Covariance(constraints.Constraint):
    """Positive definite matrices; torch's own constraint has no bijection to vectors."""

    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        return constraints.positive_definite.check(value)


covariance_matrix = _Covariance()


class _VectorToCovariance(Transform):
    """Fills a triangle, takes the exponential of its diagonal, and squares it."""

    bijective = True
    domain = constraints.real_vector
    codomain = covariance_matrix

    def _root(self, x: Tensor) -> Tensor:
        dim = (math.isqrt(8 * x.size(-1) + 1) - 1) // 2
        rows, columns = torch.tril_indices(dim, dim, device=x.device)
        lower = x.new_zeros((*x.shape[:-1], dim, dim))
        lower[..., rows, columns] = x
        return lower.tril(-1) + torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1).exp())

    def _call(self, x: Tensor) -> Tensor:
        root = self._root(x)
        return root @ root.mT

    def _inverse(self, y: Tensor) -> Tensor:
        root = torch.linalg.cholesky(y)
        rows, columns = torch.tril_indices(y.size(-1), y.size(-1), device=y.device)
        lower = root.tril(-1) + torch.diag_embed(root.diagonal(dim1=-2, dim2=-1).log())
        return lower[..., rows, columns]

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        logs = self._root(x).diagonal(dim1=-2, dim2=-1).log()
        dim = logs.size(-1)
        powers = torch.arange(dim + 1, 1, -1, dtype=logs.dtype, device=logs.device)
        return dim * math.log(2) + (powers * logs).sum(-1)

    def forward_shape(self, shape: Any) -> torch.Size:
        dim = (math.isqrt(8 * shape[-1] + 1) - 1) // 2
        return torch.Size(shape[:-1]) + torch.Size([dim, dim])

    def inverse_shape(self, shape: Any) -> torch.Size:
        return torch.Size(shape[:-2]) + torch.Size([shape[-1] * (shape[-1] + 1) // 2])


@biject_to.register(_Covariance)
@transform_to.register(_Covariance)
def _bijection_to_covariance(_: _Covariance) -> Transform:
    return _VectorToCovariance()


def _log_det(root: Tensor) -> Tensor:
    """Log-determinant of a matrix, from its Cholesky factor."""
    return 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)


# Distributions made of others --------------------------------------------------------------------


class Streams(TorchDistribution):
    """Several observations at once, independent given the state, side by side in one vector.

    A part that emits scalars or symbols takes one component, one that emits vectors of D takes D.
    Symbols stand in the vector as whole numbers.

    Args:
        parts: Distributions with equal batch shapes and at most one dimension of events.

    Example:
        >>> from pyro.distributions import Categorical, Normal
        >>> symbols, vectors = Categorical(torch.ones(2, 3)), Normal(torch.zeros(2, 4), 1.0)
        >>> both = Streams([symbols, vectors.to_event(1)])
        >>> both.batch_shape, both.event_shape
        (torch.Size([2]), torch.Size([5]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(self, parts: Sequence[Any], validate_args: bool | None = None) -> None:
        if not parts:
            raise ValueError("parts is empty; wanted at least one distribution.")
        for part in parts:
            if len(part.event_shape) > 1:
                raise ValueError(
                    "parts must emit scalars or vectors; got one with event shape "
                    f"{tuple(part.event_shape)}."
                )
        self.parts = list(parts)
        self.widths = [part.event_shape.numel() for part in parts]
        batch = torch.broadcast_shapes(*(part.batch_shape for part in parts))
        super().__init__(batch, torch.Size([sum(self.widths)]), validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """What all the parts can emit."""
        return _StreamsSupport(self)

    @property
    def mean(self) -> Tensor:
        """Means of the parts, side by side; that of a symbol means nothing and is NaN."""
        return self._join([part.mean for part in self.parts])

    @property
    def variance(self) -> Tensor:
        """Variances of the parts, side by side; that of a symbol is NaN."""
        return self._join([part.variance for part in self.parts])

    def split(self, values: Tensor) -> list[Tensor]:
        """The observation of each part, from vectors ``(*, sum of widths)``."""
        pieces = values.split(self.widths, -1)
        return [
            piece if part.event_shape else piece.squeeze(-1)
            for piece, part in zip(pieces, self.parts)
        ]

    def _join(self, pieces: list[Tensor]) -> Tensor:
        width = [
            piece if part.event_shape else piece.unsqueeze(-1)
            for piece, part in zip(pieces, self.parts)
        ]
        lead = torch.broadcast_shapes(*(piece.shape[:-1] for piece in width))
        dtype = torch.get_default_dtype()
        for piece in width:
            if piece.dtype.is_floating_point:
                dtype = piece.dtype
        return torch.cat([piece.to(dtype).expand(*lead, piece.size(-1)) for piece in width], -1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Streams:
        """The same law for a larger batch."""
        return Streams([part.expand(torch.Size(batch_shape)) for part in self.parts])

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` of vectors; NaN components are missing."""
        pieces = self.split(value)
        scores = [known_log_prob(part, piece) for part, piece in zip(self.parts, pieces)]
        return torch.stack(torch.broadcast_tensors(*scores)).sum(0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw vectors ``(*S, *B, sum of widths)``."""
        wide = [part.expand(self.batch_shape) for part in self.parts]  # drawn apart for each entry
        return self._join([part.sample(torch.Size(sample_shape)) for part in wide])


class _StreamsSupport(constraints.Constraint):
    event_dim = 1

    def __init__(self, joined: Streams) -> None:
        self.joined = joined
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        pieces = self.joined.split(value)
        inside = [part.support.check(piece) for part, piece in zip(self.joined.parts, pieces)]
        return torch.stack(torch.broadcast_tensors(*inside)).all(0)


class Tied(TorchDistribution):
    """States that share emissions: state k emits as entry ``index[k]`` of ``base`` does.

    Args:
        base: Distribution batched over the distinct emissions, ``(*B, J)``.
        index: ``(K,)`` integers below J.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012

    def __init__(self, base: Any, index: Tensor, validate_args: bool | None = None) -> None:
        check_integers("index", index)
        self.base, self.index = base, index.long()
        if int(index.min()) < 0 or int(index.max()) >= base.batch_shape[-1]:
            raise ValueError(
                f"index must lie between 0 and {base.batch_shape[-1] - 1}, the distinct emissions; "
                f"got {int(index.min())} to {int(index.max())}."
            )
        super().__init__(
            base.batch_shape[:-1] + index.shape, base.event_shape, validate_args=validate_args
        )

    @property
    def support(self) -> constraints.Constraint:
        """What the base can emit."""
        return self.base.support

    @property
    def mean(self) -> Tensor:
        """Mean in each state."""
        return self._pick(self.base.mean)

    @property
    def variance(self) -> Tensor:
        """Variance in each state."""
        return self._pick(self.base.variance)

    def _pick(self, each: Tensor) -> Tensor:
        return each.index_select(-1 - len(self.event_shape), self.index)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Tied:
        """The same law for a larger batch."""
        shape = torch.Size(batch_shape)
        return Tied(self.base.expand(shape[:-1] + self.base.batch_shape[-1:]), self.index)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B, K)``; ``value`` has one entry for all states, or one for each."""
        at = -1 - len(self.event_shape)
        if value.dim() < -at or value.size(at) == 1:
            return known_log_prob(self.base, value).index_select(-1, self.index)
        shape = torch.broadcast_shapes(value.shape, self.batch_shape + self.event_shape)
        apart = value.expand(shape).movedim(at, 0).unsqueeze(at)  # (K, *B, 1, *E)
        every = known_log_prob(self.base, apart)  # (K, *B, J)
        index = self.index.reshape(-1, *(1,) * (every.dim() - 1))
        return every.gather(-1, index.expand(*every.shape[:-1], 1)).squeeze(-1).movedim(0, -1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw in each state, ``(*S, *B, K, *E)``."""
        states = len(self.index)
        wide = self.base.expand((states, *self.base.batch_shape))  # drawn apart for each state
        drawn = wide.sample(torch.Size(sample_shape))  # (*S, K, *b, J, *E)
        at = drawn.dim() - len(self.event_shape) - 1
        first = len(torch.Size(sample_shape))
        drawn = drawn.movedim(first, at - 1)  # (*S, *b, K, J, *E)
        index = self.index.reshape((states,) + (1,) * (1 + len(self.event_shape)))
        index = index.expand((*drawn.shape[: at - 1], states, 1, *self.event_shape))
        return drawn.gather(at, index).squeeze(at)


# Log-densities in every state --------------------------------------------------------------------


def is_categorical(emission: Any) -> bool:
    """Whether ``emission`` emits symbols."""
    return isinstance(emission, Categorical) and not emission.event_shape


def log(probs: Tensor) -> Tensor:
    """Logarithm whose gradient at zero is zero: a hard zero stays what it is, and makes no NaN."""
    zero = probs == 0
    return probs.masked_fill(zero, 1.0).log().masked_fill(zero, -torch.inf)


def log_probs(emission: Any) -> Tensor:
    """Logarithms of the probabilities of symbols; zeros that were given are exact.

    (``Categorical(probs=...).logits`` has the logarithm of the smallest number in their place.)
    """
    given = vars(emission).get("probs")
    if given is None or emission._param is not given:
        return emission.logits
    return log(given)


def in_each_state(emission: Any, values: Tensor) -> Tensor:
    """Log-density ``(*A, K)`` of ``values`` ``(*A, *E)`` in each of the K states.

    The batch of ``emission`` is ``(*b, K)``, where b broadcasts with A from the right. Components
    that are NaN are missing: see :func:`known_log_prob`.
    """
    if isinstance(emission, Streams):
        pieces = emission.split(values)
        each = [in_each_state(part, piece) for part, piece in zip(emission.parts, pieces)]
        return torch.stack(torch.broadcast_tensors(*each)).sum(0)
    if isinstance(emission, Tied):
        return in_each_state(emission.base, values).index_select(-1, emission.index)
    if _is_of_bits(emission):
        return _of_bits(emission.base_dist.logits, values)
    if not is_categorical(emission):
        return known_log_prob(emission, values.unsqueeze(-1 - len(emission.event_shape)))
    # a look-up of rows: log_prob would keep a gradient of N T K V numbers
    missing = values.isnan() if values.dtype.is_floating_point else None
    if missing is not None:
        values = values.masked_fill(missing, 0.0)
    logits = log_probs(emission)  # (*b, K, V)
    table = logits.mT.reshape(-1, logits.size(-2))
    rows = values.long()
    if logits.dim() > 2:
        matrices = torch.arange(len(table) // logits.size(-1), device=rows.device)
        rows = rows + matrices.reshape(logits.shape[:-2]) * logits.size(-1)
    scores = take_rows(table, rows)
    return scores if missing is None else scores.masked_fill(missing.unsqueeze(-1), 0.0)


def _is_of_bits(emission: Any) -> bool:
    """Whether it is one of vectors of zeros and ones, with one table for all that is observed."""
    return (
        isinstance(emission, Independent)
        and isinstance(emission.base_dist, Bernoulli)
        and len(emission.event_shape) == 1
        and emission.batch_shape[-2:-1] in ((), (1,))
    )


def _of_bits(logits: Tensor, values: Tensor) -> Tensor:
    """Log-density ``(*A, K)`` of independent bits: products of matrices, not N T K D numbers.

    Args:
        logits: ``(*b, K, D)`` with ``b[-1] = 1``, if there is one.
        values: ``(*A, D)``; NaN is missing.
    """
    if logits.dim() > 2:
        logits = logits.squeeze(-3)  # what comes before belongs to what A has before its last
    known = ~values.isnan()
    ones = torch.where(known, values, 0.0).to(logits.dtype)
    return ones @ logits.mT - known.to(logits.dtype) @ softplus(logits).mT


def known_log_prob(distribution: Any, values: Tensor) -> Tensor:
    r"""Log-density of the components of ``values`` that are not NaN.

    The others are integrated out exactly: independent components are left out, and a normal
    distribution with full covariance is marginalised, once for each pattern of missing components.

    Args:
        distribution: Of batch shape B.
        values: ``(*B, *E)``, or what broadcasts with it.

    Raises:
        ValueError: If a component is missing and the distribution has no marginal we know.

    Example:
        >>> from pyro.distributions import Normal
        >>> plane = Normal(torch.zeros(2), 1.0).to_event(1)
        >>> known_log_prob(plane, torch.tensor([0.0, torch.nan]))
        tensor(-0.9189)
    """
    if not values.dtype.is_floating_point:
        return distribution.log_prob(values)
    if isinstance(distribution, Streams | Tied):
        return distribution.log_prob(values)
    missing = values.isnan()
    if not bool(missing.any()):
        whole = isinstance(distribution, Categorical)
        return distribution.log_prob(values.long() if whole else values)
    if isinstance(distribution, MixtureSameFamily):
        at = -1 - len(distribution.event_shape)
        parts = known_log_prob(distribution.component_distribution, values.unsqueeze(at))
        return (parts + distribution.mixture_distribution.logits.log_softmax(-1)).logsumexp(-1)
    if isinstance(distribution, MultivariateNormal):
        return _marginal_normal(distribution, values)
    base, events = distribution, 0
    while isinstance(base, Independent):
        base, events = base.base_dist, events + base.reinterpreted_batch_ndims
    if base.event_shape:
        raise ValueError(
            f"values has vectors with some components NaN, which {type(base).__name__} cannot "
            "integrate out. Mark these steps as not observed, or use independent components."
        )
    filled = torch.where(missing, _stand_in(base), values)
    if isinstance(base, Categorical):
        filled = filled.long()
    scores = base.log_prob(filled).masked_fill(missing, 0.0)
    return scores.sum(tuple(range(-events, 0))) if events else scores


def _stand_in(distribution: Any) -> Tensor:
    """Something in the support, for what will not be read; it uses up no random numbers."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return distribution.sample().to(torch.get_default_dtype())


def _marginal_normal(normal: MultivariateNormal, values: Tensor) -> Tensor:
    missing = values.isnan()
    shape = torch.broadcast_shapes(values.shape, normal.batch_shape + normal.event_shape)
    out = values.new_zeros(shape[:-1])
    for pattern in missing.reshape(-1, missing.size(-1)).unique(dim=0):
        known = (~pattern).nonzero().squeeze(-1)
        if len(known) == 0:
            continue
        here = (missing == pattern).all(-1)
        part = MultivariateNormal(
            normal.loc[..., known],
            normal.covariance_matrix[..., known.unsqueeze(-1), known],
            validate_args=False,
        )
        scores = part.log_prob(values[..., known].masked_fill(~here.unsqueeze(-1), 0.0))
        out = torch.where(here, scores, out)
    return out
