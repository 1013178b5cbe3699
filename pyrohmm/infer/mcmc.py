r"""``fit_mcmc``: samples of the posterior by Hamiltonian Monte Carlo, all chains as one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from .._checks import check_size
from ..data.sequences import Sequences
from ..io.checkpoints import Fields
from ..nn.base import HMMModule, in_mode
from .hmc import TARGET, Hamiltonian, State, Tuning
from .models import exclusive, scale_priors, to_model_device
from .objective import LogJoint, latent_sites, trace_of_batchable
from .plates import marks_of, sequence_plates
from .results import Fit
from .sampled import Chains, SampledFit
from .starts import Values
from .training import check_model_and_data

JITTER = 0.05  # standard deviation of starts, in unconstrained coordinates
CLIMB = 200  # steps of gradient ascent before the first trajectory


@exclusive()
def fit_mcmc(
    model: Callable[..., Any],
    data: Sequences,
    *,
    num_samples: int = 500,
    num_chains: int = 32,
    warmup: int = 500,
    start: Fit | Values | None = None,
    target_accept: float = TARGET,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
    name: str | None = None,
) -> SampledFit:
    r"""Sample the posterior :math:`p(\theta \mid x)` by Hamiltonian Monte Carlo of many chains.

    All chains are one batch, in a plate around the model, and tune one step size, trajectory length
    and diagonal metric: see :mod:`pyrohmm.infer.hmc`. Torch's global source of randomness is used.

    Args:
        model: A Pyro model whose states are summed out, such as :class:`MarginalModel`, and all of
            whose parameters have priors. It must accept dimensions ``(C, 1)`` on the left of every
            latent variable, as for the restarts of :func:`fit_map`.
        data: The sequences.
        num_samples: S, kept of each chain.
        num_chains: C.
        warmup: Trajectories before the first sample, which tune.
        start: A :class:`Fit`, near whose ``values`` all chains begin; or values by name, of that
            shape, or one for each chain, ``(C, ...)``. By default gradient ascent from a sample of
            the prior for each chain, and all begin near the best of their ends. Where modes matter
            begin chains at several.
        target_accept: The acceptance that the step size aims at; raise it where trajectories
            diverge.
        progress: Whether to show a progress bar on stderr; by default if that is a terminal.
        checkpoint: A file to save to and to resume from: see :func:`fit_svi`.
        name: Of the fit, which its checkpoint must have.

    Raises:
        TypeError, ValueError: If the model enumerates states, has parameters without a prior, or
            does not keep chains apart.
        FloatingPointError: If the log-density is not finite where chains begin.

    Example:
        >>> _ = pyro.set_rng_seed(0)
        >>> data = Sequences.from_list([[0, 1] * 10, [1, 0] * 10])
        >>> model = MarginalModel(TabularHMM(2, categorical(2)))
        >>> fit = fit_mcmc(model, data, num_samples=20, warmup=20, num_chains=8)
        >>> fit.chains["module.transition"].shape
        torch.Size([8, 20, 2, 2])
    """
    arguments = dict(locals())
    check_size("num_chains", num_chains)
    if not 0.3 <= target_accept < 1:
        raise ValueError(f"target_accept must lie between 0.3 and 1; got {target_accept}.")
    check_model_and_data(model, data)
    data = to_model_device(model, None, data)
    if isinstance(module := getattr(model, "module", None), HMMModule):
        scale_priors(module, data)
    with in_mode(False, model), pyro.get_param_store().scope(), pyro.validation_enabled(False):
        sampler = HMC(model, data, num_chains, num_samples, warmup, target_accept)
        sampler.run(lambda: sampler.begin(start), checkpoint, arguments, progress)
    plates = sampler.plates
    return sampler.fit(
        model, data, sampler.supports, method="HMC", plates=plates, tuning=sampler.tuned(),
        fitted=marks_of(data) if plates else None,
    )  # fmt: skip


class HMC(Chains):
    """Trajectories of all chains, and what is kept of them.

    Args:
        model: The Pyro model.
        data: The sequences.
        num_chains: C.
        num_samples: How many trajectories are kept.
        warmup: How many before tune.
        target: Acceptance that the step size aims at.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        data: Sequences,
        num_chains: int,
        num_samples: int,
        warmup: int,
        target: float,
    ) -> None:
        super().__init__(num_samples, warmup)
        self.model, self.data, self.num_chains = model, data, num_chains
        trace = trace_of_batchable(model, data)
        with poutine.block(), torch.no_grad():
            self.plates = sequence_plates(model, data, trace)
            with pyro.plate("chains", num_chains, dim=-2):
                wide = poutine.trace(model).get_trace(data)
        self.supports, _ = latent_sites(trace)
        if not self.supports:
            raise ValueError("model has no latent variables to sample: all of it is frozen.")
        self.prior = {name: wide.nodes[name]["value"] for name in self.supports}
        self.deep = {name for name in self.supports if trace.nodes[name]["fn"].batch_shape}
        spaces = {name: wide.nodes[name]["fn"].support for name in self.supports}
        self.hamiltonian = Hamiltonian(spaces, self.prior, self.log_density, warmup, target)

    def log_density(self, values: dict[str, Tensor]) -> Tensor:
        """The log joint density of each chain, ``(C,)``."""
        with LogJoint(values, self.num_chains) as joint:
            with pyro.plate("chains", self.num_chains, dim=-2):
                self.model(self.data)
        return joint.likelihood + joint.prior

    def begin(self, start: Fit | Values | None) -> None:
        """Put the chains where they start."""
        hamiltonian = self.hamiltonian
        if start is None:
            ends = hamiltonian.climb(hamiltonian.free(self.prior), CLIMB)
            best = ends.log_density.nan_to_num(-torch.inf).argmax()
            place = ends.place[best].expand_as(ends.place)
        else:
            values = start.values if isinstance(start, Fit) else start
            place = hamiltonian.free(self._widened(values))
        hamiltonian.state = hamiltonian.at(place + JITTER * torch.randn_like(place))
        if not bool(hamiltonian.state.log_density.isfinite().all()):
            raise FloatingPointError(
                "the log joint density is not finite where a chain begins; give start values that "
                "are possible, such as those of fit_map."
            )

    def _widened(self, values: Values) -> Values:
        """Start values with a dimension of chains."""
        wide = {}
        for name, like in self.prior.items():
            if name not in values:
                raise ValueError(f"start has no value for {name}; it has {', '.join(values)}.")
            value = values[name].detach().to(like)
            single = like[0] if name in self.deep else like[0, 0]
            if value.shape == (self.num_chains, *single.shape) and name not in self.deep:
                value = value.unsqueeze(1)
            wide[name] = value.expand(like.shape)
        return wide

    def step(self) -> None:
        """A trajectory of every chain; its end is kept after the warmup."""
        moved, num_steps = self.hamiltonian.step()
        if self.done < self.warmup:
            return
        state = self.hamiltonian.state
        values, slope = self.hamiltonian.constrain(state.place)
        now = {n: v if n in self.deep else v.squeeze(1) for n, v in values.items()}
        now |= {
            "lp": (state.log_density - slope).double(), "diverging": moved.diverged,
            "acceptance": moved.accepted, "leapfrogs": torch.full_like(moved.accepted, num_steps),
        }  # fmt: skip
        self.keep(self.done - self.warmup, now)

    def tuned(self) -> dict[str, float]:
        """Step size, trajectory length, mean leapfrog steps and acceptance, after the warmup."""
        step, length = map(math.exp, self.hamiltonian.tuning.averages)
        return {
            "step size": step, "trajectory length": length,
            "leapfrog steps": self.kept["leapfrogs"].double().mean().item(),
            "acceptance": self.kept["acceptance"].double().mean().item(),
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """State of the chains and of what has been tuned, for checkpoints."""
        return {"state": vars(self.hamiltonian.state), "tuning": vars(self.hamiltonian.tuning)}

    def restore(self, state: Fields) -> None:
        """Go on from a checkpoint."""
        self.hamiltonian.state = State(**state["state"])
        self.hamiltonian.tuning = Tuning(**state["tuning"])
