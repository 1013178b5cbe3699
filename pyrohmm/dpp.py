r"""Diversity of distributions: kernels between rows of probabilities, and their determinant.

Rows :math:`A_i` have the features :math:`A_i^\rho`, entry by entry. The determinant of their
kernel, normalised to ones on the diagonal, is one where no two rows share an outcome and zero where
one row's features are a combination of the others'. As a prior of the rows of a transition matrix
it is that of the diversified HMM: a determinantal point process (DPP) over distributions, of which
the law of exactly K points is all that matters here.

For as many rows as columns the mode of that prior is *a permutation matrix*: what it favours is
that each state has one successor, and each another.

References:
    Diversified Hidden Markov Models for Sequential Labeling (Qiao, Bian, Xu and Tao, 2015),
    https://arxiv.org/abs/1904.03170
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions import Dirichlet
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions import constraints

from ._checks import check_floats, check_trailing
from .distributions import log

if TYPE_CHECKING:
    from .hmm import HMM


def product_kernel(probs: Tensor, rho: float = 0.5, normalized: bool = True) -> Tensor:
    r"""Probability product kernel of rows: :math:`\sum_v (p_{iv} p_{jv})^\rho`.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.
        rho: Exponent; with 0.5 it is the Bhattacharyya coefficient.
        normalized: Whether to divide by the roots of both diagonal entries, so that these are one.

    Returns:
        ``(*B, K, K)``. The gradient at a probability of exactly zero is zero, so that a hard zero
        stays one.

    Raises:
        TypeError: If ``probs`` is not a floating-point tensor.
        ValueError: If it has no rows or a negative entry, or ``rho`` is not positive.

    References:
        Equations 2 and 5 of the paper; Probability Product Kernels (Jebara, Kondor and Howard,
        2004).

    Example:
        >>> dpp.product_kernel(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        tensor([[1.0000, 0.7071],
                [0.7071, 1.0000]])
    """
    _check(probs, rho)
    features = _features(probs, rho, normalized)
    return features @ features.mT


def log_diversity(probs: Tensor, rho: float = 0.5) -> Tensor:
    r"""Log-determinant of the normalised product kernel of rows.

    It is computed in float64 from the features themselves, not from the kernel, whose condition
    is the square of theirs: rows that differ by a part in :math:`10^{12}` have a diversity with a
    few digits still. For :math:`\rho = 1/2` and a square matrix its gradient is
    :math:`(S^{-1})_{ji} / \sqrt{A_{ij}} - 1`, where :math:`S = \sqrt{A}`; equation 15 of the paper
    has half of that.

    Args:
        probs: ``(*B, K, V)``, a distribution in each row.
        rho: Exponent of the kernel.

    Returns:
        ``(*B)``, at most 0 up to rounding; 0 if and only if no two rows share an outcome, -inf if
        the determinant is zero, as it is for equal rows and for more rows than columns. Where it is
        -inf the gradient is zero, and so it is at probabilities of exactly zero.

    Raises:
        TypeError: If ``probs`` is not a floating-point tensor.
        ValueError: If it has no rows or a negative entry, or ``rho`` is not positive.

    Example:
        >>> dpp.log_diversity(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).exp()  # 1 - 0.7071 ** 2
        tensor(0.5000)
        >>> dpp.log_diversity(torch.tensor([[0.5, 0.5], [0.5, 0.5]]))
        tensor(-inf)
    """
    _check(probs, rho)
    return _log_diversity(probs, rho)


class DiversityPrior(nn.Module):
    r"""Log-density of an HMM's transition matrix that favours rows which differ.

    .. math:: \alpha \log \det \tilde K_A - \alpha_A \lVert A - A_0 \rVert^2

    up to its normalising constant, which does not depend on A and is not known in closed form. Give
    it to a model, :class:`MarginalModel` or :class:`EnumeratedModel`, or to a fit, as
    ``log_prior``: it becomes one ``pyro.factor`` outside every plate. The density is with respect
    to the Lebesgue measure of the rows; a Dirichlet prior of the module multiplies it.

    It is zero where two rows are equal, and some guides of Pyro begin there: give them
    ``init_loc_fn=init_to_sample``, or ``init_to_value(values=fit_em(...).start)``.

    EM under the prior has many local optima, and an entry that has become zero stays zero, unless
    the M-step leaves it, as those of :mod:`pyrohmm.msteps` do where the prior gains by it: use
    ``restarts``.

    Args:
        alpha: Weight of the log-determinant, not negative; 0 leaves it out. For the usual exponent
            it has the effect, in the M-step of a chain, of that many pseudo-counts for each row.
        rho: Exponent of the kernel.
        anchor: :math:`A_0` ``(K, K)``, a transition matrix to stay close to, such as the shares of
            counted moves.
        anchor_weight: :math:`\alpha_A`.

    Raises:
        ValueError: If a number is out of range, or there is a weight and no anchor.

    References:
        Equations 6 to 8 of the paper. Its algorithm follows half the gradient of its objective, so
        that its :math:`\alpha` is twice the one here: see :meth:`as_in_paper`.

    Example:
        >>> data = Sequences.from_list([[0, 1, 2] * 5, [2, 0, 1] * 5])
        >>> fit = fit_em(TabularHMM(3, categorical(3)), data, log_prior=DiversityPrior(2.0))
        >>> bool(fit.losses[-1] <= fit.losses[0])
        True
    """

    anchor: Tensor | None

    def __init__(
        self,
        alpha: float,
        rho: float = 0.5,
        *,
        anchor: Tensor | None = None,
        anchor_weight: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("alpha", alpha), ("anchor_weight", anchor_weight)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0; got {value!r}.")
        _check_rho(rho)
        if (anchor is None) != (anchor_weight == 0):
            raise ValueError(
                "anchor and anchor_weight belong together: a matrix to stay close to, and a "
                f"positive weight; got anchor_weight = {anchor_weight} "
                f"{'without' if anchor is None else 'with'} an anchor."
            )
        if anchor is not None:
            check_floats("anchor", anchor)
            if anchor.dim() != 2 or anchor.size(0) != anchor.size(1):
                raise ValueError(f"anchor must be (K, K); got {tuple(anchor.shape)}.")
            if bool((anchor < 0).any()) or not bool(((anchor.sum(-1) - 1).abs() < 1e-3).all()):
                raise ValueError(
                    "anchor must hold probabilities, each row of which sums to one. Divide counts "
                    "by the sums of their rows; take .exp() of logarithms."
                )
        self.alpha, self.rho, self.anchor_weight = float(alpha), float(rho), float(anchor_weight)
        self.register_buffer("anchor", anchor)
        numbers = torch.tensor([alpha, rho, anchor_weight], dtype=torch.float64)
        self.register_buffer(
            "numbers", numbers, persistent=False
        )  # so that checkpoints tell priors apart

    @classmethod
    def as_in_paper(cls, alpha: float, rho: float = 0.5, **options: Any) -> DiversityPrior:
        """The prior whose mode the paper's algorithm finds for its ``alpha``: half the weight.

        Example:
            >>> DiversityPrior.as_in_paper(100.0).alpha
            50.0
        """
        return cls(alpha / 2, rho, **options)

    def forward(self, hmm: HMM) -> Tensor:
        """Log-density ``(*B)`` of the transition matrix of ``hmm``.

        Raises:
            ValueError: If transitions change with the step.
        """
        if hmm.transition_per_step:
            raise ValueError(
                "a diversity prior is one of a single transition matrix; this HMM has one for "
                "each step. Write a log_prior of your own, with dpp.log_diversity."
            )
        return self.log_density(hmm.log_transition.exp())

    def log_density(self, transition: Tensor) -> Tensor:
        """Log-density ``(*B)`` of transition matrices ``(*B, K, K)``."""
        total = transition.new_zeros(transition.shape[:-2])
        if self.alpha > 0:
            total = total + self.alpha * _log_diversity(transition, self.rho)
        if self.anchor is not None:
            check_trailing("transition", transition, tuple(self.anchor.shape), "(K, K) of anchor")
            away = transition - self.anchor.to(transition)
            total = total - self.anchor_weight * away.square().sum((-2, -1))
        return total

    def extra_repr(self) -> str:
        """The numbers, for print."""
        return f"alpha={self.alpha:g}, rho={self.rho:g}, anchor_weight={self.anchor_weight:g}"


class DiverseDirichlet(TorchDistribution):
    r"""Rows of probabilities that repel each other: Dirichlet rows times their diversity.

    .. math:: p(A) \propto \det(\tilde K_A)^\alpha \prod_i \mathrm{Dir}(A_i; \eta_i)

    A proper density, as the determinant is at most one; its normalising constant is not known, and
    ``log_prob`` leaves it out: it does not matter to MAP, SVI and sampling of A, but densities of
    different ``alpha`` or ``concentration`` cannot be compared. The same density of a chain is a
    :class:`TabularHMM` whose model has the ``log_prior`` :class:`DiversityPrior`.

    Args:
        concentration: :math:`\eta` ``(*B, K, V)``.
        alpha: Exponent of the determinant.
        rho: Exponent of the kernel.

    Raises:
        TypeError: If ``concentration`` is not a floating-point tensor.
        ValueError: If it is not positive, or there are more rows than columns, whose determinant
            is always zero.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> law = dpp.DiverseDirichlet(torch.ones(2, 2), alpha=20.0)
        >>> rows = law.sample((1000,))
        >>> dpp.log_diversity(rows).exp().mean() > 0.9  # 0.25 without the determinant
        tensor(True)
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface
    support = constraints.independent(constraints.simplex, 1)
    num_sweeps = 100  # of the sampler

    def __init__(
        self,
        concentration: Tensor,
        alpha: float,
        rho: float = 0.5,
        validate_args: bool | None = None,
    ) -> None:
        check_floats("concentration", concentration)
        if concentration.dim() < 2 or concentration.size(-2) > concentration.size(-1):
            raise ValueError(
                "concentration must be (*B, K, V) with at most as many rows as columns, for more "
                f"cannot be diverse; got {tuple(concentration.shape)}."
            )
        if not bool((concentration > 0).all()):
            raise ValueError("concentration must be positive.")
        self.prior = DiversityPrior(alpha, rho)
        self.concentration = concentration
        super().__init__(
            concentration.shape[:-2], concentration.shape[-2:], validate_args=validate_args
        )

    def expand(self, batch_shape: Any, _instance: Any = None) -> DiverseDirichlet:
        """The same law for a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        wide = self.concentration.expand(shape)
        found = DiverseDirichlet(wide, self.prior.alpha, self.prior.rho, validate_args=False)
        found.num_sweeps = self.num_sweeps
        return found

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` up to its constant."""
        if self._validate_args:
            self._validate_sample(value)
        rows = Dirichlet(self.concentration, validate_args=False).log_prob(value).sum(-1)
        return rows + self.prior.log_density(value)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw rows ``(*S, *B, K, V)`` by ``num_sweeps`` sweeps of Metropolis's algorithm.

        It begins in independent rows and proposes each row anew from its Dirichlet law, so that
        few proposals are taken where ``alpha`` is large; draws are then less diverse than they
        should be. They are good to begin a fit; NUTS samples the law itself.
        """
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.concentration.shape
            proposals = Dirichlet(self.concentration.expand(shape), validate_args=False)
            rows = proposals.sample()
            current = self.prior.log_density(rows)
            for _ in range(self.num_sweeps if self.prior.alpha > 0 else 0):
                fresh = proposals.sample()
                for k in range(rows.size(-2)):
                    trial = rows.clone()
                    trial[..., k, :] = fresh[..., k, :]
                    found = self.prior.log_density(trial)
                    taken = torch.rand_like(found).log() < found - current
                    rows = torch.where(taken[..., None, None], trial, rows)
                    current = torch.where(taken, found, current)
            return rows


def simplex_projection(values: Tensor) -> Tensor:
    """The distributions closest to rows of numbers, in Euclidean distance.

    Args:
        values: ``(*, V)``.

    Returns:
        ``(*, V)``; entries may be exactly zero.

    References:
        Projection onto the probability simplex (Wang and Carreira-Perpiñán, 2013), algorithm 1.

    Example:
        >>> dpp.simplex_projection(torch.tensor([0.2, 0.4, 2.0]))
        tensor([0., 0., 1.])
        >>> dpp.simplex_projection(torch.tensor([0.2, 0.4, 0.7]))
        tensor([0.1000, 0.3000, 0.6000])
    """
    check_floats("values", values)
    values = values - values.amax(
        -1, keepdim=True
    )  # a shift does not matter; now numbers are small
    falling = values.sort(-1, descending=True).values
    count = torch.arange(1, values.size(-1) + 1, device=values.device, dtype=values.dtype)
    excess = (falling.cumsum(-1) - 1) / count
    last = (falling > excess).sum(-1, keepdim=True) - 1  # the largest number of positive entries
    return (values - excess.gather(-1, last)).clamp(min=0.0)


def _check(probs: Tensor, rho: float) -> None:
    check_floats("probs", probs)
    if probs.dim() < 2 or 0 in probs.shape[-2:]:
        raise ValueError(
            f"probs must have at least one row and one column, (*B, K, V); got "
            f"{tuple(probs.shape)}."
        )
    if bool((probs.detach() < 0).any()):
        raise ValueError(
            f"probs must not be negative; got {probs.min().item():g}. Give probabilities, not "
            "their logarithms."
        )
    if not bool((probs.detach() > 0).any(-1).all()):
        raise ValueError("probs must have a positive entry in every row; a row is all zero.")
    _check_rho(rho)


def _check_rho(rho: float) -> None:
    if not 0 < rho < float("inf"):
        raise ValueError(f"rho must be a positive number; got {rho!r}.")


def _features(probs: Tensor, rho: float, normalized: bool) -> Tensor:
    """``probs ** rho`` ``(*B, K, V)``, its rows of length one if ``normalized``."""
    logs = rho * log(probs)  # the derivative of a power is infinite at zero
    if not normalized:
        return logs.exp()
    # a large exponent of small probabilities must not underflow
    largest = logs.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(logs.dtype).min)
    powers = (logs - largest).exp()
    return powers / powers.norm(dim=-1, keepdim=True)


def _log_diversity(probs: Tensor, rho: float) -> Tensor:
    features = _features(probs.double(), rho, normalized=True)
    count, size = features.shape[-2:]
    if count > size:
        return probs.new_full(probs.shape[:-2], -torch.inf)
    found = _log_volume(features)
    flat = ~found.isfinite()
    if bool(flat.any()):
        flat = flat & ~probs.isnan().flatten(-2).any(-1)
        eye = torch.eye(count, size, device=features.device, dtype=features.dtype)
        features = torch.where(flat[..., None, None], eye, features)
        found = _log_volume(features).masked_fill(flat, -torch.inf)
    return 2 * found.to(probs.dtype)


def _log_volume(features: Tensor) -> Tensor:
    """Logarithm of the volume that rows ``(*B, K, V)`` span."""
    if features.size(-2) < features.size(-1):
        features = torch.linalg.qr(features.mT).R
    return torch.linalg.slogdet(features).logabsdet
