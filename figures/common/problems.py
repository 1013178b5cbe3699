"""Random problems of a given shape, and all ways to compute their evidence, gradient and EM.

Peers that are not installed are None: ``pip install pyrohmm[benchmarks]`` installs them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2"
)

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions import Categorical, DiscreteHMM, MultivariateNormal, Normal
from pyro.infer import TraceEnum_ELBO

from pyrohmm import HMM, Sequences, TabularHMM, categorical, fit_em, normal, normal_full, starts
from pyrohmm.ops import backends, recursions

try:
    with warnings.catch_warnings():  # of jax, about names that dynamax's own imports use
        warnings.simplefilter("ignore", DeprecationWarning)
        import jax
        import jax.numpy as jnp
        from dynamax.hidden_markov_model import CategoricalHMM as DynamaxHMM
        from dynamax.hidden_markov_model import DiagonalGaussianHMM as DynamaxDiagonal
        from dynamax.hidden_markov_model import GaussianHMM as DynamaxFull
        from dynamax.hidden_markov_model import inference as dynamax
except ImportError:
    jax = jnp = dynamax = None
try:
    from hmmlearn.hmm import CategoricalHMM, GaussianHMM
except ImportError:
    CategoricalHMM = GaussianHMM = None


class Problem:
    """Random logits and symbols of one shape, and all ways to compute evidence and gradient."""

    def __init__(self, num_sequences: int, num_steps: int, num_states: int, num_symbols: int):
        rng = np.random.default_rng(0)
        self.shape = (num_sequences, num_steps, num_states, num_symbols)
        sizes = [(num_states,), (num_states, num_states), (num_states, num_symbols)]
        self.arrays = [rng.standard_normal(size).astype(np.float32) for size in sizes]
        self.symbols = rng.integers(0, num_symbols, (num_sequences, num_steps))
        self.logits = [torch.tensor(array, requires_grad=True) for array in self.arrays]
        self.values = torch.tensor(self.symbols)
        self.lengths = torch.full((num_sequences,), num_steps)

    def hmm(self) -> HMM:
        """The HMM of the logits."""
        initial, transition, emission = self.logits
        return HMM(
            initial.log_softmax(-1),
            transition.log_softmax(-1),
            Categorical(logits=emission),
            self.lengths,
        )

    def pyrohmm(self) -> tuple[float, list[torch.Tensor]]:
        """Ours, with Pyro's default validation of arguments."""
        loss = self.hmm().log_prob(self.values).sum()
        return loss.item(), list(torch.autograd.grad(loss, self.logits))

    def pyrohmm_torch(self) -> tuple[float, list[torch.Tensor]]:
        """Ours without Numba."""
        with backends.use(backends.TORCH):
            return self.pyrohmm()

    def log_space(self) -> None:
        """A loop of logsumexp with torch's autograd."""
        initial, transition, emission = (part.log_softmax(-1) for part in self.logits)
        seen = emission.mT[self.values]
        alpha = initial + seen[:, 0]
        for t in range(1, self.shape[1]):
            alpha = (alpha.unsqueeze(-1) + transition).logsumexp(-2) + seen[:, t]
        torch.autograd.grad(alpha.logsumexp(-1).sum(), self.logits)

    def discrete_hmm(self) -> None:
        """Pyro's distribution (with a transition before the first emission: the same work)."""
        initial, transition, emission = self.logits
        observed = Categorical(logits=emission, validate_args=False)
        hmm = DiscreteHMM(
            initial, transition, observed, duration=self.shape[1], validate_args=False
        )
        torch.autograd.grad(hmm.log_prob(self.values).sum(), self.logits)

    def markov(self) -> None:
        """The model in ``pyro.markov``, enumerated in parallel."""

        def model() -> None:
            initial, transition, emission = (part.softmax(-1) for part in self.logits)
            state = None
            with pyro.plate("sequences", self.shape[0]):
                for t in pyro.markov(range(self.shape[1])):
                    probs = initial if state is None else transition[state]
                    state = pyro.sample(
                        f"z{t}", Categorical(probs), infer={"enumerate": "parallel"}
                    )
                    pyro.sample(f"x{t}", Categorical(emission[state]), obs=self.values[:, t])

        with poutine.block():
            elbo = TraceEnum_ELBO(max_plate_nesting=1)
            loss = elbo.differentiable_loss(model, lambda: None)
        torch.autograd.grad(loss, self.logits)

    def dynamax(self) -> Any:
        """Jitted ``value_and_grad`` of the marginal likelihood of the batch."""
        symbols = jnp.array(self.symbols)

        def loss(parameters: Any) -> Any:
            initial, transition = (jax.nn.softmax(part, -1) for part in parameters[:2])
            table = jax.nn.log_softmax(parameters[2], -1).T

            def one(sequence: Any) -> Any:
                return dynamax.hmm_filter(initial, transition, table[sequence]).marginal_loglik

            return jax.vmap(one)(symbols).sum()

        compiled = jax.jit(jax.value_and_grad(loss))
        parameters = [jnp.array(array) for array in self.arrays]
        return lambda: jax.block_until_ready(compiled(parameters))

    def hmmlearn(self) -> Any:
        """The E-step of hmmlearn: evidence and expected counts, the same quantities."""
        num_sequences, num_steps, num_states, num_symbols = self.shape
        model = CategoricalHMM(num_states, implementation="scaling", n_features=num_symbols)
        initial, transition, emission = (
            torch.tensor(array).double().softmax(-1).numpy() for array in self.arrays
        )
        model.startprob_, model.transmat_, model.emissionprob_ = initial, transition, emission
        column = self.symbols.reshape(-1, 1)
        lengths = [num_steps] * num_sequences
        model._check()
        return lambda: model._do_estep(column, lengths)

    def em(self, count: int) -> Callable[[], Any]:
        """Our EM, from the logits."""
        module = TabularHMM(self.shape[2], categorical(self.shape[3]))
        data = Sequences(self.values, self.lengths)
        with torch.no_grad():
            start = starts.from_hmm(self.hmm())
        return lambda: fit_em(module, data, num_iterations=count, tolerance=None, start=start)

    def hmmlearn_em(self, count: int) -> Any:
        """``fit`` of hmmlearn, from our initial values."""
        num_sequences, num_steps, num_states, num_symbols = self.shape
        tables = [torch.tensor(array).double().softmax(-1).numpy() for array in self.arrays]
        column, lengths = self.symbols.reshape(-1, 1), [num_steps] * num_sequences
        logging.getLogger("hmmlearn").setLevel(logging.ERROR)  # it warns of few data

        def fit() -> None:
            model = CategoricalHMM(
                num_states, n_iter=count, tol=-np.inf, init_params="", n_features=num_symbols,
                implementation="scaling",
            )  # fmt: skip
            model.startprob_, model.transmat_, model.emissionprob_ = tables
            model.fit(column, lengths)

        return fit

    def dynamax_em(self, count: int) -> Any:
        """E- and M-step of dynamax, jitted as its ``fit_em`` does, compiled once."""
        _, _, num_states, num_symbols = self.shape
        model = DynamaxHMM(num_states, 1, num_symbols)
        initial, transition, emission = (jax.nn.softmax(jnp.array(a), -1) for a in self.arrays)
        start, properties = model.initialize(
            initial_probs=initial,
            transition_matrix=transition,
            emission_probs=emission[:, None],
        )
        symbols = jnp.array(self.symbols)[..., None]
        return _dynamax_em(model, start, properties, symbols, count)


def _dynamax_em(model: Any, start: Any, properties: Any, values: Any, count: int) -> Any:
    """Iterations of a model of dynamax."""

    @jax.jit
    def step(parameters: Any, state: Any) -> Any:
        statistics, evidence = jax.vmap(lambda row: model.e_step(parameters, row))(values)
        after, state = model.m_step(parameters, properties, statistics, state)
        return after, state, model.log_prior(parameters) + evidence.sum()

    def fit() -> None:
        parameters, state = start, model.initialize_m_step_state(start, properties)
        for _ in range(count):
            parameters, state, value = step(parameters, state)
            value.item()

    return fit


class VectorProblem:
    """Random normal vectors of one shape, with diagonal or full covariance.

    "separated" is diagonal, and the vectors come from states whose means lie far apart.
    """

    def __init__(self, covariance: str, *shape: int):
        generator = torch.Generator().manual_seed(0)
        num_sequences, num_steps, num_states, dim = shape
        separated, self.shape = covariance == "separated", shape
        self.covariance = "diag" if separated else covariance
        self.values = torch.randn(num_sequences, num_steps, dim, generator=generator)
        self.lengths = torch.full((num_sequences,), num_steps)
        root = 0.3 * torch.randn(num_states, dim, dim, generator=generator)
        scale = torch.full((num_states, dim), 0.9)
        if covariance == "full":
            scale = torch.linalg.cholesky(root @ root.mT + torch.eye(dim))
        self.logits = [
            torch.randn(num_states, generator=generator),
            torch.randn(num_states, num_states, generator=generator),
        ]
        loc = torch.randn(num_states, dim, generator=generator)
        if separated:
            loc *= 4.0
            path = torch.randint(num_states, (num_sequences, num_steps), generator=generator)
            stays = torch.rand(num_sequences, num_steps, generator=generator) < 0.9
            for t in range(1, num_steps):
                path[:, t] = torch.where(stays[:, t], path[:, t - 1], path[:, t])
            self.values = loc[path] + scale[path] * self.values
        self.parameters = [part.requires_grad_() for part in (*self.logits, loc, scale)]

    def hmm(self) -> HMM:
        """The HMM of the parameters."""
        initial, transition, loc, scale = self.parameters
        full = self.covariance == "full"
        emission: Any = MultivariateNormal(loc, scale_tril=scale) if full else Normal(loc, scale)
        return HMM(
            initial.log_softmax(-1),
            transition.log_softmax(-1),
            emission if full else emission.to_event(1),
            self.lengths,
        )

    def pyrohmm(self) -> None:
        """Evidence and gradient, with Pyro's default validation of arguments."""
        torch.autograd.grad(self.hmm().log_prob(self.values).sum(), self.parameters)

    def evidence(self) -> torch.Tensor:
        """Evidence alone."""
        with torch.no_grad():
            return self.hmm().log_prob(self.values)

    def by_hand(self) -> None:
        """The product of features written out, diagonal covariance, before our recursions."""
        initial, transition, loc, scale = self.parameters
        features = torch.cat([self.values.square(), self.values], -1)
        precision = scale.square().reciprocal()
        table = torch.cat([-0.5 * precision, loc * precision], -1)
        constant = (-0.5 * loc.square() * precision - scale.log()).sum(-1)
        factors = (
            initial.log_softmax(-1),
            transition.log_softmax(-1).unsqueeze(0),
            features @ table.mT + constant,
        )
        evidence = recursions.log_evidence(*factors, self.lengths)
        torch.autograd.grad(evidence.sum(), self.parameters)

    def em(self, count: int) -> Callable[[], Any]:
        """Our EM, from the parameters."""
        num_states, dim = self.shape[2:]
        family = normal_full(dim) if self.covariance == "full" else normal(dim)
        module, data = TabularHMM(num_states, family), Sequences(self.values, self.lengths)
        with torch.no_grad():
            start = starts.from_hmm(self.hmm())
        return lambda: fit_em(module, data, num_iterations=count, tolerance=None, start=start)

    def _dynamax(self) -> tuple[Any, Any, Any, Any]:
        """Model, parameters and their properties, and the vectors."""
        _, _, num_states, dim = self.shape
        full = self.covariance == "full"
        model = (DynamaxFull if full else DynamaxDiagonal)(num_states, dim)
        initial, transition, loc, scale = (part.detach() for part in self.parameters)
        given = {
            "initial_probs": jnp.array(initial.softmax(-1).numpy()),
            "transition_matrix": jnp.array(transition.softmax(-1).numpy()),
            "emission_means": jnp.array(loc.numpy()),
        }
        if full:
            given["emission_covariances"] = jnp.array((scale @ scale.mT).numpy())
        else:
            given["emission_scale_diags"] = jnp.array(scale.numpy())
        parameters, properties = model.initialize(**given)
        return model, parameters, properties, jnp.array(self.values.numpy())

    def dynamax(self, gradient: bool = True) -> Callable[[], Any]:
        """Jitted evidence of the batch, with the gradient by its parameters."""
        model, parameters, _, values = self._dynamax()

        def evidence(parameters: Any) -> Any:
            return jax.vmap(lambda row: model.marginal_log_prob(parameters, row))(values).sum()

        compiled = jax.jit(jax.value_and_grad(evidence) if gradient else evidence)
        return lambda: jax.block_until_ready(compiled(parameters))

    def dynamax_em(self, count: int) -> Callable[[], Any]:
        """E- and M-step of dynamax, jitted as its ``fit_em`` does, compiled once."""
        model, start, properties, values = self._dynamax()
        return _dynamax_em(model, start, properties, values, count)

    def hmmlearn_em(self, count: int) -> Callable[[], Any]:
        """``fit`` of hmmlearn, from our initial values."""
        num_sequences, num_steps, num_states, dim = self.shape
        with torch.no_grad():
            hmm = self.hmm()
            spread = hmm.emission.variance
            if self.covariance == "full":
                spread = hmm.emission.covariance_matrix
            arrays = [
                part.double().numpy()
                for part in (hmm.log_initial.exp(), hmm.log_transition.exp(), hmm.emission.mean)
            ]
        arrays[:2] = [part / part.sum(-1, keepdims=True) for part in arrays[:2]]
        rows, lengths = self.values.double().numpy().reshape(-1, dim), [num_steps] * num_sequences
        logging.getLogger("hmmlearn").setLevel(logging.ERROR)

        def fit() -> None:
            model = GaussianHMM(
                num_states, self.covariance, n_iter=count, tol=-np.inf, init_params="",
                implementation="scaling",
            )  # fmt: skip
            model.startprob_, model.transmat_, model.means_ = arrays
            model.covars_ = spread.detach().double().numpy()
            model.fit(rows, lengths)

        return fit
