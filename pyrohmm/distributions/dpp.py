"""The determinantal prior of the diversified HMM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from pyro.distributions import Dirichlet
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions import constraints

from .._checks import PyroValidation, check_floats, check_number, check_positive, check_trailing
from ..ops.diversity import _check_rho, _log_diversity
from ..ops.diversity import log_diversity as log_diversity
from ..ops.diversity import product_kernel as product_kernel
from ..ops.diversity import simplex_projection as simplex_projection

if TYPE_CHECKING:
    from .hmm import HMM


class DiversityPrior(nn.Module):
    r"""Determinantal prior: log-density of a transition matrix that favours diverse rows.

    .. math:: \alpha \log \det \tilde K_A - \alpha_A \lVert A - A_0 \rVert^2

    up to its normalising constant, which does not depend on A and is not known in closed form. Give
    it to a model, :class:`MarginalModel` or :class:`EnumeratedModel`, or to a fit, as
    ``log_prior``: it becomes one ``pyro.factor`` outside every plate. The density is with respect
    to the Lebesgue measure of the rows; a Dirichlet prior of the module multiplies it.

    It is zero where two rows are equal, and some guides of Pyro start there: give them
    ``init_loc_fn=init_to_sample``, or ``init_to_value(values=fit_em(...).start)``. Nor do guides
    with one mode and chains of NUTS cross the set where rows are linearly dependent; a
    :class:`RowPermutationNUTS` does.

    EM under the prior has many local optima, and an entry that has become zero stays zero, unless
    the M-step leaves it, as those of :mod:`pyrohmm.infer.msteps` do where the prior gains by it:
    use ``restarts``.

    Args:
        alpha: Weight of the log-determinant, not negative; 0 leaves it out. For the usual exponent
            it has the effect, in the M-step of a chain, of that many pseudo-counts for each row.
        rho: Exponent of the kernel.
        anchor: :math:`A_0` ``(K, K)``, a transition matrix to stay close to, such as the shares of
            counted transitions.
        anchor_weight: :math:`\alpha_A`.

    Raises:
        TypeError: If what must be a number is none.
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
            check_number(name, value)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a number of at least 0; got {value!r}.")
        check_number("rho", rho)
        _check_rho(rho)
        if (anchor is None) != (anchor_weight == 0):
            raise ValueError("anchor, a matrix, and a positive anchor_weight belong together.")
        if anchor is not None:
            check_floats("anchor", anchor)
            if bool((anchor < 0).any()) or not bool(((anchor.sum(-1) - 1).abs() < 1e-3).all()):
                raise ValueError(
                    "anchor must hold probabilities, each row of which sums to one. Divide counts "
                    "by the sums of their rows; take .exp() of logarithms."
                )
        self.alpha, self.rho, self.anchor_weight = float(alpha), float(rho), float(anchor_weight)
        self.register_buffer("anchor", anchor)
        # so that checkpoints tell priors apart
        numbers = torch.tensor([alpha, rho, anchor_weight], dtype=torch.float64)
        self.register_buffer("numbers", numbers, persistent=False)

    @classmethod
    def as_in_paper(cls, alpha: float, rho: float = 0.5, **options: Any) -> DiversityPrior:
        """The prior whose mode the paper's algorithm finds for its ``alpha``: half the weight.

        Example:
            >>> DiversityPrior.as_in_paper(100.0).alpha
            50.0
        """
        return cls(alpha / 2, rho, **options)

    def forward(self, hmm: HMM | Tensor) -> Tensor:
        """Log-density ``(*B)`` of the transition matrix of ``hmm``, or of matrices ``(*B, K, K)``.

        Raises:
            ValueError: If transitions change with the step, or depend on more than one state; or
                if gradient steps begin where all rows are equal, which they cannot leave.
        """
        if isinstance(hmm, Tensor):
            return self._from_unequal_rows(hmm)
        if hmm.transition_per_step or hmm.order != 1:
            raise ValueError(
                "DiversityPrior is of one matrix of transitions from one state; those of this "
                f"{type(hmm).__name__} are others. Write another log_prior, with dpp.log_diversity."
            )
        return self._from_unequal_rows(hmm.log_transition.exp())

    def _from_unequal_rows(self, rows: Tensor) -> Tensor:
        if rows.requires_grad and self.alpha > 0 and rows.size(-2) > 1:
            if torch.equal(rows, rows[..., :1, :].expand_as(rows)):
                raise ValueError(
                    "log_prior: all rows of the transition matrix are equal, where the density of "
                    "a DiversityPrior is zero and has no slope. Give the guide "
                    "init_loc_fn=init_to_sample."
                )
        return self.log_density_of_transition(rows)

    def log_density_of_transition(self, transition: Tensor) -> Tensor:
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
        ValueError: If it is not positive and finite, or there are more rows than columns, whose
            determinant is always zero.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> rows = dpp.DiverseDirichlet(torch.ones(2, 2), alpha=20.0).sample((1000,))
        >>> dpp.log_diversity(rows).exp().mean() > 0.9  # 0.25 without the determinant
        tensor(True)
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012  # torch's interface
    _validate_args = PyroValidation()
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
        check_positive("concentration", concentration)
        self.prior = DiversityPrior(alpha, rho)
        self.concentration = concentration
        super().__init__(
            concentration.shape[:-2], concentration.shape[-2:], validate_args=validate_args
        )

    def expand(self, batch_shape: Sequence[int], _instance: Any = None) -> DiverseDirichlet:
        """Expand to a larger batch."""
        shape = torch.Size(batch_shape) + self.event_shape
        wide = self.concentration.expand(shape)
        new = DiverseDirichlet(wide, self.prior.alpha, self.prior.rho, validate_args=False)
        new.num_sweeps = self.num_sweeps
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density ``(*B)`` up to its constant."""
        if self._validate_args:
            self._validate_sample(value)
        rows = Dirichlet(self.concentration, validate_args=False).log_prob(value).sum(-1)
        return rows + self.prior.log_density_of_transition(value)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Sample rows ``(*S, *B, K, V)`` by ``num_sweeps`` sweeps of Metropolis's algorithm.

        It starts from independent rows and proposes each row from its Dirichlet distribution, so
        that few proposals are accepted where ``alpha`` is large; samples are then less diverse
        than they should be. They serve to initialise a fit. For samples of the exact distribution
        take :class:`RowPermutationNUTS`: chains of plain NUTS do not cross the set where the rows
        are linearly dependent, so that with K columns the determinant keeps its first sign.
        """
        with torch.no_grad():
            shape = torch.Size(sample_shape) + self.concentration.shape
            proposals = Dirichlet(self.concentration.expand(shape), validate_args=False)
            rows = proposals.sample()
            current = self.prior.log_density_of_transition(rows)
            for _ in range(self.num_sweeps if self.prior.alpha > 0 else 0):
                fresh = proposals.sample()
                for k in range(rows.size(-2)):
                    trial = rows.clone()
                    trial[..., k, :] = fresh[..., k, :]
                    proposed = self.prior.log_density_of_transition(trial)
                    accepted = torch.rand_like(proposed).log() < proposed - current
                    rows = torch.where(accepted[..., None, None], trial, rows)
                    current = torch.where(accepted, proposed, current)
            return rows
