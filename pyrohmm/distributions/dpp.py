"""``DiversityPrior``: determinantal prior of transition matrices, as of the diversified HMM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._checks import check_floats, check_number, check_trailing
from .._sync import exceeds
from ..ops.diversity import _check_rho, _log_diversity
from ..ops.diversity import log_diversity as log_diversity

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
    with one mode and chains of NUTS cross the set where rows are linearly dependent: run several
    chains, which begin on both sides of it.

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
                raise ValueError(
                    f"{name} must be a number of at least 0; got {value!r}. 0 leaves it out."
                )
        check_number("rho", rho)
        _check_rho(rho)
        if (anchor is None) != (anchor_weight == 0):
            there = "no anchor" if anchor is None else "an anchor"
            text = f"anchor and a positive anchor_weight must be given together; got {there}"
            raise ValueError(f"{text} and anchor_weight={anchor_weight}.")
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
        """Diversity prior in the paper's parametrisation, whose ``alpha`` is twice the one here.

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
        if hmm.transition_per_step or hmm.chain.order != 1:
            raise ValueError(
                "DiversityPrior is of one matrix of transitions from one state; those of this "
                f"{type(hmm).__name__} are others. Write another log_prior, with dpp.log_diversity."
            )
        return self._from_unequal_rows(hmm.log_transition.exp())

    def _from_unequal_rows(self, rows: Tensor) -> Tensor:
        if rows.requires_grad and self.alpha > 0 and rows.size(-2) > 1:
            apart = (rows - rows[..., :1, :]).detach().abs().amax()
            # rows in one corner are a sampler's overlong step, which it rejects
            corner = torch.finfo(rows.dtype).eps ** 0.5
            if not exceeds(apart, 0.0) and bool((rows > corner).all()):
                raise ValueError(
                    "log_prior: all rows of the transition matrix are equal, where the density "
                    "has no slope. Give the guide init_loc_fn=init_to_sample."
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
        """Hyperparameters, for ``print``."""
        return f"alpha={self.alpha:g}, rho={self.rho:g}, anchor_weight={self.anchor_weight:g}"
