"""``HeldOut``: sequences that a fit does not see, and the parameters that predicted them best."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pyro import poutine
from torch import Tensor

from ..data.batches import cut_by_steps
from ..data.process_group import ProcessGroup
from ..data.sequences import Sequences
from ..nn.base import in_mode
from .models import check_returns_hmm, to_model_device

LARGER = 4  # times the size of a minibatch is evaluated at once, without a gradient
BATCH_SIZE = 256  # sequences that are, if there are no minibatches


class Validation(NamedTuple):
    """How well held-out sequences were predicted at some step of a fit.

    Attributes:
        step: After how many gradient steps.
        nats: Minus their log evidence per observed step; ``exp(nats)`` is the perplexity.
    """

    step: int
    nats: float


class HeldOut:
    """Held-out sequences, what was found on them so far, and the best parameters.

    Args:
        data: The sequences; labels that they may carry are not used.
        batch_size: Of the minibatches of the fit, if it has some of that kind.
        batch_tokens: The same.
        patience: After how many validations without a better one to end; never by default.
        processes: Those that share the work; this one alone by default.
        report: Called with each :class:`Validation`, in the first process.

    Raises:
        ValueError: If no step is observed.
    """

    def __init__(
        self,
        data: Sequences,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        patience: int | None = None,
        processes: ProcessGroup | None = None,
        report: Callable[[Validation], object] | None = None,
    ) -> None:
        self.num_observed = data.num_observed
        if self.num_observed == 0:
            raise ValueError("validation has no observed step; there is nothing to average over.")
        order = data.lengths.argsort(stable=True)
        if batch_tokens is not None:
            chosen = cut_by_steps(data.lengths, order, LARGER * batch_tokens)
        else:
            chosen = list(order.split(LARGER * batch_size if batch_size else BATCH_SIZE))
        self.processes = processes or ProcessGroup()
        chosen = chosen[self.processes.rank :: self.processes.size]
        self.first, self.parts = data[:1], [data[each] for each in chosen]
        self.patience = patience
        self.report = report if self.processes.is_first else None
        self.history: list[Validation] = []
        self.best: list[Tensor] = []  # parameters

    def judge(self, step: int, model: Any, guide: Any, tensors: list[Tensor]) -> float:
        """Evaluate what ``tensors`` now are, and keep a copy of them if nothing was better."""
        nats = self.evaluate(model, guide)
        if not self.history or nats < min(found.nats for found in self.history):
            self.best = [each.detach().clone() for each in tensors]
        self.history.append(Validation(step, nats))
        if self.report is not None:
            self.report(self.history[-1])
        return nats

    def check(self, model: Callable[..., Any], guide: Callable[..., Any]) -> None:
        """Raise, before the fit, what :meth:`evaluate` would.

        Raises:
            TypeError: If the model does not return an HMM.
        """
        _log_evidence(model, guide, [self.first], self.first)

    def evaluate(self, model: Callable[..., Any], guide: Callable[..., Any]) -> float:
        """Minus the log evidence of all of them per observed step; infinite if it is not a number.

        Args:
            model: Run in ``eval()`` mode, where latent variables are the :func:`median`.
            guide: The same.
        """
        total = self.processes.mean(_log_evidence(model, guide, self.parts, self.first))
        nats = -self.processes.size * total.item() / self.num_observed
        return math.inf if math.isnan(nats) else nats

    @property
    def is_stale(self) -> bool:
        """Whether patience has ended: so many validations since the best one were no better."""
        if self.patience is None or not self.history:
            return False
        values = [found.nats for found in self.history]
        return len(values) - 1 - values.index(min(values)) >= self.patience

    def state(self) -> dict[str, Any]:
        """What was found so far, for checkpoints."""
        return {"trail": [list(found) for found in self.history], "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another one stood."""
        self.history = [Validation(*found) for found in state["trail"]]
        self.best = state["best"]


def _log_evidence(model: Any, guide: Any, parts: list[Sequences], first: Sequences) -> Tensor:
    """Log evidence of all parts, at one value of each latent variable."""
    with torch.no_grad(), in_mode(False, model, guide), poutine.block():
        first = to_model_device(model, guide, first)
        total = torch.zeros((), dtype=torch.float64, device=first.values.device)
        point = poutine.condition(model, data=median(guide, first))
        for part in parts:
            part = to_model_device(model, guide, part)
            total += check_returns_hmm(point(part)).log_prob(part.values).sum()
    return total


def median(guide: Callable[..., Any], data: Sequences) -> dict[str, Tensor]:
    """One value for each latent variable: the guide's median if it knows it, else a draw."""
    if hasattr(guide, "median"):
        try:
            return guide.median(data)
        except NotImplementedError:
            pass
    trace = poutine.trace(guide).get_trace(data)
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
