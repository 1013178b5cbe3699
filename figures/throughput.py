"""Speed of evidence, gradient and EM, compared with dynamax, hmmlearn and Pyro's own HMMs.

All methods of a comparison are timed in turn in one run, with two threads and float32 (hmmlearn has
float64 only). Peers that are not installed are skipped; ``pip install pyrohmm[benchmarks]``
installs them. Writes ``throughput.json`` and ``throughput.png``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault(
    "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2"
)

import numpy as np
import pyro
import torch
from common import FOLDER, arguments, earlier, interleaved, pyplot, ratio, write
from pyro import poutine
from pyro.distributions import Categorical, DiscreteHMM, MultivariateNormal, Normal
from pyro.infer import TraceEnum_ELBO

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_cooccurrence,
    fit_em,
    fit_map,
    normal,
    normal_full,
    starts,
)
from pyrohmm.ops import backends, recursions

try:
    import jax
    import jax.numpy as jnp
    from dynamax.hidden_markov_model import CategoricalHMM as DynamaxHMM
    from dynamax.hidden_markov_model import inference as dynamax
except ImportError:
    jax = None
try:
    from hmmlearn.hmm import CategoricalHMM, GaussianHMM
except ImportError:
    CategoricalHMM = None

SHAPES = [(256, 100, 16, 64), (64, 200, 128, 1000), (32, 64, 1024, 1000), (1, 10000, 8, 32)]
QUICK = [(4, 10, 4, 8), (1, 300, 3, 5)]
VECTORS = [  # covariance, N, T, K, D
    ("diag", 64, 200, 32, 40),
    ("diag", 256, 100, 16, 2),
    ("diag", 1, 10000, 8, 3),
    ("full", 32, 200, 16, 10),
]
TARGETS = {"dynamax": 1 / 0.8, "DiscreteHMM": 10.0, "pyro.markov": 40.0, "hmmlearn E-step": 3.0}


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

        @jax.jit
        def step(parameters: Any, state: Any) -> Any:
            statistics, evidence = jax.vmap(lambda row: model.e_step(parameters, row))(symbols)
            after, state = model.m_step(parameters, properties, statistics, state)
            return after, state, model.log_prior(parameters) + evidence.sum()

        def fit() -> None:
            parameters, state = start, model.initialize_m_step_state(start, properties)
            for _ in range(count):
                parameters, state, value = step(parameters, state)
                value.item()

        return fit


class VectorProblem:
    """Random normal vectors of one shape, with diagonal or full covariance."""

    def __init__(self, covariance: str, *shape: int):
        generator = torch.Generator().manual_seed(0)
        num_sequences, num_steps, num_states, dim = shape
        self.covariance, self.shape = covariance, shape
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
        return lambda: fit_em(module, data, num_steps=count, tolerance=None, start=start)

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


def gradients(quick: bool) -> list[dict[str, Any]]:
    """Evidence and gradient at each shape, against every peer that supports it."""
    rows = []
    for shape in QUICK if quick else SHAPES:
        problem = Problem(*shape)
        num_sequences, num_steps, num_states, _ = shape
        methods = {"pyrohmm": problem.pyrohmm, "pyrohmm, no Numba": problem.pyrohmm_torch}
        if jax is not None:
            methods["dynamax"] = problem.dynamax()
            value = methods["dynamax"]()[0].item()
            assert abs(problem.pyrohmm()[0] / value - 1) < 1e-4, "the peers disagree"
        if CategoricalHMM is not None and num_states < 1024:
            methods["hmmlearn E-step"] = problem.hmmlearn()
        if num_sequences * num_steps * num_states**2 <= 64 * 200 * 128**2:
            methods["DiscreteHMM"] = problem.discrete_hmm
            methods["log space, autograd"] = problem.log_space
        if num_steps <= 100 and num_states <= 16:
            methods["pyro.markov"] = problem.markov
        if num_states >= 1024:
            left, right = torch.rand(2048, 2048), torch.rand(2048, 2048)
            methods["sgemm 2048"] = lambda left=left, right=right: left @ right
        times = interleaved(methods, 3 if quick else 31, 12.0)
        flops = 6 * num_sequences * num_steps * num_states**2
        for name, seconds in times.items():
            row: dict[str, Any] = {
                "quantity": "evidence and gradient",
                "shape N, T, K, V": shape,
                "method": name,
                "milliseconds": 1e3 * median(seconds),
                "low": 1e3 * min(seconds),
                "high": 1e3 * max(seconds),
                "runs": len(seconds),
            }
            if not name.startswith("pyrohmm"):
                row["times_slower_than_pyrohmm"] = ratio(times, name, "pyrohmm")
                row["target"] = TARGETS.get(name)
            if name == "sgemm 2048":
                rate = 2 * 2048**3 / median(seconds)
                ours = flops / median(times["pyrohmm"])
                row = {**row, "gflops": rate / 1e9, "pyrohmm_gflops": ours / 1e9,
                       "share_of_sgemm": ours / rate}  # fmt: skip
                del row["times_slower_than_pyrohmm"], row["target"]
            rows.append(row)
            print(row)
    return rows


def _queries(shape: tuple[int, int, int, int]) -> dict[str, dict[str, Callable[[], Any]]]:
    """What each package calls to answer each query, without gradients."""
    problem = Problem(*shape)
    num_sequences, num_steps, num_states, _ = shape
    with torch.no_grad():
        hmm = problem.hmm()
    ours = {
        "posterior": lambda: hmm.posterior(problem.values),
        "viterbi": lambda: hmm.viterbi(problem.values),
        "path sample": lambda: hmm.sample_states(problem.values),
    }
    peers: dict[str, dict[str, Any]] = {name: {} for name in ours}
    if jax is not None:
        initial, transition = (jax.nn.softmax(jnp.array(a), -1) for a in problem.arrays[:2])
        table = jax.nn.log_softmax(jnp.array(problem.arrays[2]), -1).T
        seen = table[jnp.array(problem.symbols)]
        keys = jax.random.split(jax.random.PRNGKey(0), num_sequences)

        def smoothed(seen: Any) -> Any:
            posterior = dynamax.hmm_smoother(initial, transition, seen)
            return posterior.marginal_loglik, posterior.smoothed_probs, posterior.trans_probs

        smooth = jax.jit(jax.vmap(smoothed))
        mode = jax.jit(jax.vmap(lambda s: dynamax.hmm_posterior_mode(initial, transition, s)))
        draw = jax.jit(
            jax.vmap(lambda k, s: dynamax.hmm_posterior_sample(k, initial, transition, s))
        )
        peers["posterior"]["dynamax"] = lambda: jax.block_until_ready(smooth(seen))
        peers["viterbi"]["dynamax"] = lambda: jax.block_until_ready(mode(seen))
        peers["path sample"]["dynamax"] = lambda: jax.block_until_ready(draw(keys, seen))
    if CategoricalHMM is not None:
        peers["posterior"]["hmmlearn E-step"] = problem.hmmlearn()
        model = CategoricalHMM(num_states, algorithm="viterbi", n_features=shape[3])
        softmax = [torch.tensor(a).double().softmax(-1).numpy() for a in problem.arrays]
        model.startprob_, model.transmat_, model.emissionprob_ = softmax
        column = problem.symbols.reshape(-1, 1)
        lengths = [num_steps] * num_sequences
        peers["viterbi"]["hmmlearn"] = lambda: model.decode(column, lengths)
    return {name: {"pyrohmm": ours[name], **peers[name]} for name in ours}


def queries(quick: bool) -> list[dict[str, Any]]:
    """Posterior, Viterbi and path sampling against the peers that have them."""
    rows = []
    for shape in QUICK[:1] if quick else SHAPES[:2]:
        for name, methods in _queries(shape).items():
            times = interleaved(methods, 3 if quick else 15, 6.0)
            for method, seconds in times.items():
                row = {
                    "quantity": name,
                    "shape N, T, K, V": shape,
                    "method": method,
                    "milliseconds": 1e3 * median(seconds),
                    "low": 1e3 * min(seconds),
                    "high": 1e3 * max(seconds),
                    "runs": len(seconds),
                }
                if method != "pyrohmm":
                    row["times_slower_than_pyrohmm"] = ratio(times, method, "pyrohmm")
                rows.append(row)
                print(row)
    return rows


def iterations(quick: bool) -> list[dict[str, Any]]:
    """Whole iterations of EM from the same start, many in one call: E-step, M-step, log-likelihood.

    Ours include the initialisation and a last E-step, the evidence of the final parameters.
    """
    rows = []
    for shape in QUICK[:1] if quick else SHAPES[:2]:
        count = 5 if quick else 20 if shape[2] < 100 else 8
        problem = Problem(*shape)
        num_states, num_symbols = shape[2:]
        data = Sequences(problem.values, problem.lengths)
        module = TabularHMM(num_states, categorical(num_symbols))
        with torch.no_grad():
            start = starts.from_hmm(problem.hmm())
        methods: dict[str, Any] = {
            "pyrohmm": lambda module=module, data=data, start=start, count=count: fit_em(
                module, data, num_steps=count, tolerance=None, start=start
            )
        }
        if CategoricalHMM is not None:
            methods["hmmlearn"] = problem.hmmlearn_em(count)
        if jax is not None:
            methods["dynamax"] = problem.dynamax_em(count)
        times = interleaved(methods, 3 if quick else 11, 30.0)
        for method, seconds in times.items():
            row = {
                "quantity": "EM iteration",
                "shape N, T, K, V": shape,
                "method": method,
                "milliseconds": 1e3 * median(seconds) / count,
                "low": 1e3 * min(seconds) / count,
                "high": 1e3 * max(seconds) / count,
                "runs": len(seconds),
            }
            if method != "pyrohmm":
                row["times_slower_than_pyrohmm"] = ratio(times, method, "pyrohmm")
                row["target"] = 3.0 if method == "hmmlearn" else None
            rows.append(row)
            print(row)
    return rows


def vectors(quick: bool) -> list[dict[str, Any]]:
    """Normal vectors: evidence with and without gradient, and iterations of EM."""
    rows = []
    shapes = [("diag", 4, 10, 3, 2), ("full", 4, 10, 3, 2)] if quick else VECTORS
    for covariance, *shape in shapes:
        problem, count = VectorProblem(covariance, *shape), 3 if quick else 8
        peers: dict[str, dict[str, Callable[[], Any]]] = {
            "vectors: evidence and gradient": {"pyrohmm": problem.pyrohmm},
            "vectors: evidence": {"pyrohmm": problem.evidence},
            "vectors: EM iteration": {"pyrohmm": problem.em(count)},
        }
        if covariance == "diag":
            peers["vectors: evidence and gradient"]["product by hand"] = problem.by_hand
        if CategoricalHMM is not None:
            peers["vectors: EM iteration"]["hmmlearn"] = problem.hmmlearn_em(count)
        for quantity, methods in peers.items():
            runs = count if quantity.endswith("iteration") else 1
            times = interleaved(methods, 3 if quick else 15, 12.0)
            for method, seconds in times.items():
                row = {
                    "quantity": quantity,
                    "covariance": covariance,
                    "shape N, T, K, D": shape,
                    "method": method,
                    "milliseconds": 1e3 * median(seconds) / runs,
                    "low": 1e3 * min(seconds) / runs,
                    "high": 1e3 * max(seconds) / runs,
                    "runs": len(seconds),
                }
                if method != "pyrohmm":
                    row["times_slower_than_pyrohmm"] = ratio(times, method, "pyrohmm")
                rows.append(row)
                print(row)
    return rows


def restarts(quick: bool) -> list[dict[str, Any]]:
    """Sixteen batched restarts of a small model, against one."""
    data = datasets.casino(num_sequences=20, num_steps=50).without_labels()
    rows = []
    for num_states in (2, 4):
        module = TabularHMM(num_states, categorical(6))
        options: dict[str, Any] = {"num_steps": 3 if quick else 100, "tolerance": None}
        fits = {
            "EM": lambda m=module, o=options, **r: fit_em(m, data, **o, **r),
            "MAP": lambda m=module, o=options, **r: fit_map(MarginalModel(m), data, **o, **r),
            "co-occurrence": lambda m=module, o=options, **r: fit_cooccurrence(
                m, data, 6, **o, **r
            ),
        }
        for name, fit in fits.items():
            methods = {"one": fit, "sixteen": lambda fit=fit: fit(restarts=16)}
            times = interleaved(methods, 2 if quick else 7, 20.0)
            rows.append(
                {
                    "quantity": "sixteen restarts over one",
                    "fit": name,
                    "shape N, T, K, V": (20, 50, num_states, 6),
                    "seconds_of_one": median(times["one"]),
                    "ours": ratio(times, "sixteen", "one"),
                    "target": 3.0,
                    "runs": len(times["one"]),
                }
            )
            print(rows[-1])
    return rows


def growth(quick: bool) -> list[dict[str, Any]]:
    """Time against N, T and K, the others fixed."""
    base = {"N": 32, "T": 64, "K": 16}
    grids = {"N": [1, 8, 64, 512], "T": [16, 128, 1024, 8192], "K": [4, 16, 64, 256, 1024]}
    rows = []
    for letter, sizes in grids.items():
        for size in sizes[:2] if quick else sizes:
            shape = {**base, letter: size}
            problem = Problem(shape["N"], shape["T"], shape["K"], 64)
            methods = {"pyrohmm": problem.pyrohmm, "pyrohmm, no Numba": problem.pyrohmm_torch}
            if jax is not None:
                methods["dynamax"] = problem.dynamax()
            times = interleaved(methods, 3 if quick else 9, 4.0)
            rows += [
                {
                    "quantity": f"growth in {letter}",
                    **shape,
                    "method": name,
                    "milliseconds": 1e3 * median(seconds),
                    "runs": len(seconds),
                }
                for name, seconds in times.items()
            ]
    return rows


def _peak(kind: Any, small: tuple[Any, ...], large: tuple[Any, ...], result: Any) -> None:
    """Peak memory of the large problem above what the process held before, in bytes."""
    kind(*small).pyrohmm()
    problem = kind(*large)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak_so_far()
    problem.pyrohmm()
    result.put(_peak_so_far() - before)


def _peak_so_far() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def memory(quick: bool) -> list[dict[str, Any]]:
    """Peak memory as T doubles, each in a separate process (Linux only)."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    rows = []
    for num_steps in (500, 1000) if quick else (1000, 2000, 4000, 8000):
        peak = _peak_apart(Problem, (2, 4, 64, 8), (32, num_steps, 64, 8))
        numbers = 32 * num_steps * 64
        rows.append(
            {
                "quantity": "peak memory",
                "N": 32, "T": num_steps, "K": 64,
                "megabytes": peak / 1e6,
                "numbers_per_NTK": peak / 4 / numbers,
            }
        )  # fmt: skip
        print(rows[-1])
    return rows


def _peak_apart(kind: Any, small: tuple[Any, ...], large: tuple[Any, ...]) -> int:
    """That of :func:`_peak` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak, args=(kind, small, large, queue))
    process.start()
    peak = queue.get()
    process.join()
    return peak


def vector_memory(quick: bool) -> list[dict[str, Any]]:
    """Peak memory of normal vectors above the data, in a separate process (Linux only)."""
    if not Path("/proc/self/clear_refs").exists():
        return []
    num_sequences, num_steps, num_states, dim = (100, 200 if quick else 10_000, 32, 16)
    rows = []
    for covariance in ("diag", "full"):
        shape = covariance, num_sequences, num_steps, num_states, dim
        peak = _peak_apart(VectorProblem, (covariance, 2, 4, num_states, dim), shape)
        numbers = num_sequences * num_steps * (num_states + dim)
        rows.append(
            {
                "quantity": "vectors: peak memory",
                "covariance": covariance,
                "shape N, T, K, D": shape[1:],
                "megabytes": peak / 1e6,
                "numbers_per_NT_times_K_plus_D": peak / 4 / numbers,
                "target": 6.0,
            }
        )
        print(rows[-1])
    return rows


def long_chain(quick: bool) -> list[dict[str, Any]]:
    """One sequence of a million steps: time, and the error of float32 against float64."""
    num_steps = 2_000 if quick else 1_000_000
    problem = Problem(1, num_steps, 8, 32)
    rows = []
    for name, method in (
        ("pyrohmm", problem.pyrohmm),
        ("pyrohmm, no Numba", problem.pyrohmm_torch),
    ):
        method()
        start_time = time.perf_counter()
        value, slopes = method()
        seconds = time.perf_counter() - start_time
        single = problem.logits
        problem.logits = [part.detach().double().requires_grad_() for part in single]
        exact, exact_slopes = method()
        problem.logits = single
        largest = max(slope.abs().max().item() for slope in exact_slopes)
        error = max((a - b).abs().max().item() for a, b in zip(slopes, exact_slopes))
        rows.append(
            {
                "quantity": "one long sequence",
                "shape N, T, K, V": problem.shape,
                "method": name,
                "seconds": seconds,
                "relative_error_of_evidence": abs(value / exact - 1),
                "largest_error_of_gradient_over_largest_gradient": error / largest,
            }
        )
        print(rows[-1])
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Ratios as bars, growth as lines."""
    plt = pyplot()
    figure, axes = plt.subplot_mosaic(
        [["ratios"] * 3, ["N", "T", "K"]], figsize=(10, 7), layout="constrained"
    )
    names = ["dynamax", "hmmlearn E-step", "DiscreteHMM", "log space, autograd", "pyro.markov"]
    bars = axes["ratios"]
    for place, shape in enumerate(SHAPES):
        for n, name in enumerate(names):
            ratios = [
                row["times_slower_than_pyrohmm"][0]
                for row in rows
                if row["quantity"] == "evidence and gradient"
                and row["method"] == name
                and tuple(row["shape N, T, K, V"]) == shape
            ]
            if ratios:
                x = place + 0.17 * (n - 2)
                bars.bar(
                    x, ratios[0] - 1, 0.15, 1, color=f"C{n}", label=name if place == 0 else None
                )
                label = f"{ratios[0]:.0f}" if ratios[0] >= 10 else f"{ratios[0]:.1f}"
                bars.text(x, ratios[0] * 1.08, label, ha="center", fontsize=9)
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_yscale("log")
    shapes = [f"N = {n:,}, T = {t:,}\nK = {k:,} states" for n, t, k, _ in SHAPES]
    bars.set_xticks(range(len(SHAPES)), shapes)
    bars.set_ylabel("time / time of pyrohmm")
    bars.set_title(
        "evidence and gradient, float32, two threads: how many times slower than pyrohmm"
    )
    bars.grid(visible=False, axis="x")
    bars.margins(y=0.1)
    bars.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.6, 1.0))
    fixed = {"N": "T = 64, K = 16", "T": "N = 32, K = 16", "K": "N = 32, T = 64"}
    meanings = {"N": "sequences", "T": "steps", "K": "states"}
    for letter, meaning in meanings.items():
        panel = axes[letter]
        for color, name in (("C3", "pyrohmm"), ("C1", "pyrohmm, no Numba"), ("C0", "dynamax")):
            points = [
                (row[letter], row["milliseconds"])
                for row in rows
                if row["quantity"] == f"growth in {letter}" and row["method"] == name
            ]
            if points:
                panel.loglog(*zip(*points), marker="o", markersize=4, color=color, label=name)
        panel.set_xlabel(f"{letter}, number of {meaning}")
        panel.set_title(fixed[letter])
    axes["N"].set_ylabel("milliseconds")
    axes["T"].legend(loc="upper left")
    figure.savefig(FOLDER / "throughput.png", dpi=150)
    plt.close(figure)


def main() -> None:
    """Measure, then write."""
    parts = (
        gradients, vectors, iterations, restarts, queries, growth,
        memory, vector_memory, long_chain,
    )  # fmt: skip
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier("throughput"))
        return
    torch.set_num_threads(2)
    old = earlier("throughput")
    rows = []
    for part in parts:
        if part.__name__ in options.only:
            rows += [{"part": part.__name__, **row} for row in part(options.quick)]
        else:
            rows += [row for row in old if row["part"] == part.__name__]
    if not options.quick:
        write("throughput", rows)
        draw(rows)


if __name__ == "__main__":
    main()
