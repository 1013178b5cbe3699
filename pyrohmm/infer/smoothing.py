r"""Weights of smooth terms, by the generalised Fellner-Schall method.

The coefficients b of a term, d of them, are independent normal with a standard deviation
:math:`\sigma`. The marginal likelihood of :math:`\sigma`, all coefficients integrated out by
Laplace's method, has its maximum where

.. math:: \sigma^2 = |b|^2 / e, \quad e = d - \operatorname{tr} V / \sigma^2

with b the most probable coefficients and V their covariance, of the exact observed information of
the HMM; e are the effective degrees of freedom (Wood and Fasiolo, 2017, Biometrics 73; the change
of the curvature with b is left out there, as here).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..data.sequences import Sequences
from ..nn.base import HMMModule
from ..nn.regression import Linear
from .results import Fit
from .uncertainty import Information

ROUNDS = 50  # of fits, each with new weights
CLOSE = 0.01  # degrees of freedom by which the last round may change a term
LONGER = 1.5  # power of the change of a spread; the method is cautious, by a half or more
LEAST = 1e-4  # spread of a curve that is not there


class _Curvature(Information):
    """Covariance of the parameters, zero along directions that the data do not determine."""

    def _compute(self) -> None:
        _, hessian = self.slopes()
        matrix = -(hessian + hessian.mT).detach() / 2
        self.covariance = torch.linalg.pinv(matrix, rtol=1e-12, hermitian=True) * self.unit**2


def unweighted(module: Any) -> dict[str, Linear]:
    """The parts of a module with smooth terms whose weights are not known, by name."""
    parts = module.named_modules() if isinstance(module, HMMModule) else ()
    return {
        name: part
        for name, part in parts
        if isinstance(part, Linear) and part.terms and bool(part.spread.isnan().any())
    }


def fit_smooth(
    fit_once: Callable[..., Fit],
    *,
    module: Any,
    data: Any,
    start: Any,
    restarts: int | None,
    **options: Any,
) -> Fit:
    """The fit of a module at weights of its smooth terms that maximise the marginal likelihood.

    Args:
        fit_once: Fits a module whose weights are known, from ``start`` and with ``restarts``.
        module: With smooth terms.
        data: The sequences.
        start: Of the first fit.
        restarts: Of the first fit; the best goes on.
        **options: Of all fits.
    """
    if options["checkpoint"] is not None or not isinstance(data, Sequences):
        raise ValueError("smooth terms need data in memory, and have no checkpoint.")
    module = copy.deepcopy(module)
    parts = unweighted(module)
    for part in parts.values():
        part.spread.fill_(1.0)
    before = torch.tensor(torch.inf)
    for _ in range(ROUNDS):
        fit = fit_once(module, data, start=start, restarts=restarts, **options)
        start, restarts = fit, 1
        known = {n: p for n, p in fit.parameters.items() if n in fit.supports}
        information = _Curvature(fit.model, known, fit.supports, data)
        freedom = [
            _update(part, f"module.{n}.smooth", fit, information) for n, part in parts.items()
        ]
        now = torch.cat(freedom)
        if bool(((now - before).abs() < CLOSE).all()):
            break
        before = now
    else:
        fit.converged = False
        fit.reason = f"weights of smooth terms still changed in the last of {ROUNDS} fits"
        fit.notes.append(fit.reason)
    for name, own in zip(parts, freedom):
        fit.model.module.get_submodule(name).freedom = own  # type: ignore[attr-defined]
    fit.notes.append(
        f"smooth terms have {', '.join(f'{e:.1f}' for e in now.clamp(min=0))} degrees of freedom"
    )
    return fit


def _update(part: Linear, name: str, fit: Fit, information: Information) -> Tensor:
    """Set the weights of the terms of a part to those of its coefficients; returns their e."""
    own = information.labels.index(f"{name}[{', '.join('0' * (len(part.shape) + 1))}]")
    b = fit.parameters[name].double()
    variance = information.covariance.diagonal()[own : own + b.numel()].reshape(b.shape)
    freedom = torch.zeros(part.spread.shape, dtype=torch.double)
    square = freedom.clone()
    terms = torch.tensor(part.terms)
    freedom.index_add_(-1, terms, 1 - variance / part.spread.double()[..., part.terms] ** 2)
    square.index_add_(-1, terms, b.square())
    ratio = (square / freedom).sqrt() / part.spread
    ratio = torch.where(freedom > 1e-9, ratio**LONGER, 1.0)  # without data it stays
    part.spread.copy_((ratio * part.spread).clamp(min=LEAST))
    return freedom.flatten()
