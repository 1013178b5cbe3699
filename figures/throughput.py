"""Speed of evidence, gradient, EM and fits, compared with dynamax, hmmlearn and Pyro's own HMMs.

All methods of a comparison are timed in turn in one run, a short call (``SETTLED``) from the second
round on after one that is not counted, as in a loop; with two threads and float32 (hmmlearn has
float64 only). Peers that are not installed are skipped; ``pip install pyrohmm[benchmarks]``
installs them. Each row has the load of the machine when it was measured, the number of processes
that were running; the part ``busy`` adds two that never stop. Writes ``throughput.json`` and
``throughput.png``.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from common import arguments, earlier, interleaved, plain_ticks, pyplot, ratio, save, write
from common.problems import CategoricalHMM, Problem, VectorProblem, dynamax, jax, jnp
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.optim import Adam

from pyrohmm import (
    EnumeratedModel,
    MarginalModel,
    Sequences,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    autoregressive_categorical,
    autoregressive_normal,
    bernoulli,
    categorical,
    datasets,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_svi,
    free_durations,
    normal,
    normal_full,
    normal_mixture,
    normal_spherical,
    normal_tied,
    poisson,
)
from pyrohmm.infer.models import build

SHAPES = [(256, 100, 16, 64), (64, 200, 128, 1000), (32, 64, 1024, 1000), (1, 10000, 8, 32)]
SMALL = [  # and how much longer dynamax should take
    ((1, 64, 16, 64), 1.0),
    ((8, 64, 16, 64), 1.0),
    ((32, 16, 16, 64), 1.0),
    ((32, 64, 4, 64), 1.0),
    ((32, 64, 64, 64), 2.0),
    ((32, 64, 128, 64), 2.0),
]
SETTLED = 0.2  # seconds: calls that are shorter are made twice, and the second is timed
QUICK = [(4, 10, 4, 8), (1, 300, 3, 5)]
VECTORS = [  # covariance, N, T, K, D; and how much longer dynamax and hmmlearn's EM should take
    (("diag", 64, 200, 32, 40), 12.0, 10.0),
    (("diag", 256, 100, 16, 2), 5.0, None),
    (("diag", 1, 10000, 8, 3), 6.0, None),
    (("full", 32, 200, 16, 10), 4.0, 8.0),
    (("separated", 64, 200, 32, 40), None, None),
]
ITERATIONS = [  # shape, iterations in a call, and how much longer hmmlearn should take
    ((256, 100, 16, 64), 20, 20.0),
    ((64, 200, 128, 1000), 8, 30.0),
    ((20, 50, 2, 6), 50, 1.0),
    ((1, 48502, 4, 4), 20, 3.0),
]
TARGETS = {
    "dynamax": dict(zip(SHAPES, (4.0, 2.5, 1.25, 5.0))),
    "DiscreteHMM": dict.fromkeys(SHAPES, 10.0),
    "pyro.markov": dict.fromkeys(SHAPES, 40.0),
    "hmmlearn E-step": dict.fromkeys(SHAPES, 3.0),
}


def compare(
    methods: dict[str, Callable[[], Any]],
    rounds: int,
    seconds: float,
    targets: dict[str, float | None] | None = None,
    per: int = 1,
    base: str = "pyrohmm",
    **fields: Any,
) -> list[dict[str, Any]]:
    """A row for each method: its times, and how many times longer than ``base`` it takes.

    Args:
        methods: What to time, in turn.
        rounds: As :func:`common.interleaved` takes them.
        seconds: The same.
        targets: The ratio that is wanted, by method.
        per: Number of iterations of a call.
        base: The method that the others are compared with.
        **fields: What all rows hold.
    """
    load = os.getloadavg()[0]
    times = interleaved(methods, rounds, seconds, settle=SETTLED)
    rows = []
    for name, taken in times.items():
        row: dict[str, Any] = {
            **fields,
            "method": name,
            "milliseconds": 1e3 * median(taken) / per,
            "low": 1e3 * min(taken) / per,
            "high": 1e3 * max(taken) / per,
            "runs": len(taken),
            "load": load,
        }
        if not name.startswith(base):
            row[f"times_slower_than_{base}"] = ratio(times, name, base)
            row["target"] = (targets or {}).get(name)
        rows.append(row)
        print(row, flush=True)
    return rows


def _alone(method: Callable[[], Any]) -> Callable[[], Any]:
    """The same with one thread of torch."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        method()
        torch.set_num_threads(threads)

    return run


def gradients(quick: bool) -> list[dict[str, Any]]:
    """Evidence and gradient at each shape, against every peer that supports it."""
    rows = []
    for shape in QUICK if quick else SHAPES:
        problem = Problem(*shape)
        num_sequences, num_steps, num_states, _ = shape
        methods = {
            "pyrohmm": problem.pyrohmm,
            "pyrohmm, one thread": _alone(problem.pyrohmm),
            "pyrohmm, no Numba": problem.pyrohmm_torch,
        }
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
        rows += compare(
            methods, 3 if quick else 31, 6.0,
            {name: found.get(shape) for name, found in TARGETS.items()},
            quantity="evidence and gradient", **{"shape N, T, K, V": shape},
        )  # fmt: skip
        rows.append(_share(problem, 3 if quick else 31))
    return rows


def _share(problem: Problem, rounds: int) -> dict[str, Any]:
    """The rate of arithmetic, as a share of that of a large matrix product in the same run."""
    num_sequences, num_steps, num_states, _ = problem.shape
    left, right = torch.rand(2048, 2048), torch.rand(2048, 2048)
    times = interleaved({"ours": problem.pyrohmm, "sgemm": lambda: left @ right}, rounds, 4.0)
    rate = 2 * 2048**3 / median(times["sgemm"])
    ours = 6 * num_sequences * num_steps * num_states**2 / median(times["ours"])
    row = {
        "quantity": "share of the rate of a matrix product",
        "shape N, T, K, V": problem.shape,
        "method": "sgemm 2048",
        "gflops": rate / 1e9,
        "pyrohmm_gflops": ours / 1e9,
        "share_of_sgemm": ours / rate,
    }
    print(row, flush=True)
    return row


def small(quick: bool) -> list[dict[str, Any]]:
    """Evidence and gradient of few steps, as variational inference and samplers call them."""
    rows = []
    for shape, target in [(QUICK[0], None)] if quick else SMALL:
        problem = Problem(*shape)
        methods = {"pyrohmm": problem.pyrohmm, "pyrohmm, one thread": _alone(problem.pyrohmm)}
        if jax is not None:
            methods["dynamax"] = problem.dynamax()
        rows += compare(
            methods, 3 if quick else 201, 2.0, {"dynamax": target},
            quantity="evidence and gradient, small", **{"shape N, T, K, V": shape},
        )  # fmt: skip
    return rows


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Processes that never stop, as on a machine that others use too."""
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for loop in loops:
        loop.start()
    time.sleep(2.0)  # until all are running
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


def _spin() -> None:
    while True:
        pass


def busy(quick: bool) -> list[dict[str, Any]]:
    """Evidence and gradient while each of two cores has something else to do.

    Also with one thread: exponentials and products of torch, from which a model is made, ask for a
    second one at almost any size, and wait for it.
    """
    rows = []
    shapes = [QUICK[0]] if quick else [*SHAPES, *(shape for shape, _ in SMALL)]
    for shape in shapes:
        problem = Problem(*shape)
        methods: dict[str, Callable[[], Any]] = {
            "pyrohmm": problem.pyrohmm,
            "pyrohmm, one thread": _alone(problem.pyrohmm),
        }
        if jax is not None:
            methods["dynamax"] = problem.dynamax()
        for method in methods.values():  # compiled while there is time
            method()
        with busy_cores(2):
            rows += compare(
                methods, 3 if quick else 41, 3.0, {"dynamax": 1.0},
                quantity="evidence and gradient, two busy loops beside",
                **{"shape N, T, K, V": shape},
            )  # fmt: skip
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
            rows += compare(
                methods, 3 if quick else 15, 3.0, quantity=name, **{"shape N, T, K, V": shape}
            )
    return rows


def queries_threads(quick: bool) -> list[dict[str, Any]]:
    """The same 64 calls of ``log_prob`` and Viterbi one after another, and in eight threads."""
    rows = []
    for shape in QUICK[:1] if quick else [(1, 64, 16, 64), (8, 200, 16, 64)]:
        problem = Problem(*shape)
        with torch.no_grad():
            hmm = problem.hmm()

        def query(_: int, hmm: Any = hmm, values: Any = problem.values) -> None:
            with torch.no_grad():
                hmm.log_prob(values)
                hmm.viterbi(values)

        with ThreadPoolExecutor(8) as pool:
            methods = {
                "pyrohmm": lambda query=query: list(map(query, range(64))),
                "pyrohmm, eight threads": lambda query=query: list(pool.map(query, range(64))),
            }
            rows += compare(
                methods, 3 if quick else 15, 3.0, quantity="64 calls of log_prob and Viterbi",
                **{"shape N, T, K, V": shape},
            )  # fmt: skip
    return rows


def iterations(quick: bool) -> list[dict[str, Any]]:
    """Whole iterations of EM from the same start, many in one call: E-step, M-step, log-likelihood.

    Ours include the initialisation and a last E-step, the evidence of the final parameters.
    """
    rows = []
    for shape, count, target in [(QUICK[0], 5, None)] if quick else ITERATIONS:
        problem = Problem(*shape)
        methods = {"pyrohmm": problem.em(count)}
        if CategoricalHMM is not None:
            methods["hmmlearn"] = problem.hmmlearn_em(count)
        if jax is not None:
            methods["dynamax"] = problem.dynamax_em(count)
        rows += compare(
            methods, 3 if quick else 11, 8.0, {"hmmlearn": target}, count,
            quantity="EM iteration", **{"shape N, T, K, V": shape},
        )  # fmt: skip
    return rows


def vectors(quick: bool) -> list[dict[str, Any]]:
    """Normal vectors: evidence with and without gradient, and iterations of EM."""
    rows = []
    quick_shapes = [((kind, 4, 10, 3, 2), None, None) for kind in ("diag", "full", "separated")]
    for (covariance, *shape), of_gradient, of_em in quick_shapes if quick else VECTORS:
        problem, count = VectorProblem(covariance, *shape), 3 if quick else 30
        peers: dict[str, dict[str, Callable[[], Any]]] = {
            "vectors: evidence and gradient": {"pyrohmm": problem.pyrohmm},
            "vectors: evidence": {"pyrohmm": problem.evidence},
            "vectors: EM iteration": {"pyrohmm": problem.em(count)},
        }
        gradient, evidence, em = peers.values()
        if covariance != "full":
            gradient["product by hand"] = problem.by_hand
        if jax is not None:
            gradient["dynamax"], evidence["dynamax"] = problem.dynamax(), problem.dynamax(False)
            em["dynamax"] = problem.dynamax_em(count)
        if CategoricalHMM is not None:
            em["hmmlearn"] = problem.hmmlearn_em(count)
        for quantity, methods in peers.items():
            is_em = quantity.endswith("iteration")
            targets = {"hmmlearn": of_em} if is_em else {"dynamax": of_gradient}
            rows += compare(
                methods, 3 if quick else 15, 4.0, targets, count if is_em else 1,
                quantity=quantity, covariance=covariance, **{"shape N, T, K, D": shape},
            )  # fmt: skip
    return rows


def families(quick: bool) -> list[dict[str, Any]]:
    """An iteration of EM, and evidence with gradient, of every family of emissions."""
    num_sequences, num_steps, num_states, dim = (4, 10, 3, 2) if quick else (64, 100, 8, 8)
    torch.manual_seed(0)
    shape = num_sequences, num_steps
    reals, symbols = torch.randn(*shape, dim), torch.randint(0, 16, shape)
    counts = torch.poisson(torch.full(shape, 3.0))
    bits = torch.bernoulli(torch.full((*shape, dim), 0.4))
    cases = {
        "categorical(16)": (categorical(16), symbols),
        "autoregressive_categorical(16)": (autoregressive_categorical(16), symbols),
        "poisson()": (poisson(), counts),
        f"bernoulli({dim})": (bernoulli(dim), bits),
        **{
            f"{family.__name__}({dim})": (family(dim), reals)
            for family in (
                normal, normal_spherical, normal_tied, normal_full, autoregressive_normal
            )
        },
        f"normal_mixture({dim}, 2)": (normal_mixture(dim, num_components=2), reals),
    }  # fmt: skip
    rows, count = [], 2 if quick else 10
    for name, (family, values) in cases.items():
        data = Sequences(values, torch.full((num_sequences,), num_steps))
        module = TabularHMM(num_states, family)
        taken = {"family": name, "shape N, T, K": (*shape, num_states)}
        rows += compare(
            {"pyrohmm": partial(fit_em, module, data, num_iterations=count, tolerance=None)},
            3 if quick else 9, 3.0, per=count, quantity="families: EM iteration", **taken,
        )  # fmt: skip
        rows += compare(
            {"pyrohmm": _loss_and_gradient(module, data)},
            3 if quick else 31, 3.0, quantity="families: evidence and gradient", **taken,
        )  # fmt: skip
    return rows


def _loss_and_gradient(module: Any, data: Sequences) -> Callable[[], Any]:
    """Evidence and its gradient by all parameters, where one iteration of EM has put them."""
    fit = fit_em(module, data, num_iterations=1, tolerance=None)
    values = {
        name.removeprefix("module."): value.clone().requires_grad_()
        for name, value in fit.parameters.items()
    }

    def run() -> None:
        with poutine.block(), poutine.condition(data=values):
            hmm = build(module, data)
        torch.autograd.grad(hmm.log_prob(data.values).sum(), list(values.values()))

    run()
    return run


def structure(quick: bool) -> list[dict[str, Any]]:
    """Chains of every kind, and emissions that read earlier steps, against a plain HMM.

    Gaps in time are of one to nine days, or each of its own length. The chains of a factorial HMM
    have as many product states as the others have states.
    """
    num_sequences, num_steps, side, longest = (4, 30, 2, 5) if quick else (64, 200, 4, 50)
    num_states = side**2
    torch.manual_seed(0)
    lengths = torch.full((num_sequences,), num_steps)
    values = torch.randn(num_sequences, num_steps, 2)
    days = torch.randint(1, 10, (num_sequences, num_steps)).cumsum(-1).double()
    moments = days + 0.5 * torch.rand(num_sequences, num_steps, dtype=torch.float64)
    data = Sequences(values, lengths)
    in_time = TabularContinuousTimeHMM(num_states, normal(2), rate_time=10.0)
    modules = {
        "pyrohmm": (TabularHMM(num_states, normal(2)), data),
        f"pyrohmm, durations up to {longest}": (
            TabularHSMM(num_states, normal(2), free_durations(longest)), data,
        ),
        "pyrohmm, autoregressive": (TabularHMM(num_states, autoregressive_normal(2)), data),
        "pyrohmm, second order": (TabularSecondOrderHMM(num_states, normal(2)), data),
        f"pyrohmm, chains of {side} and {side}": (
            TabularFactorialHMM((side, side), normal(2)), data,
        ),
        "pyrohmm, continuous time, 9 gaps": (in_time, Sequences(values, lengths, times=days)),
        "pyrohmm, continuous time, all gaps different": (
            in_time, Sequences(values, lengths, times=moments),
        ),
    }  # fmt: skip
    methods = {name: _loss_and_gradient(*pair) for name, pair in modules.items()}
    fields = {"shape N, T, K, D": (num_sequences, num_steps, num_states, 2)}
    return compare(
        methods, 3 if quick else 31, 3.0,
        quantity="structure: evidence and gradient", **fields,
    )  # fmt: skip


def steps(quick: bool) -> list[dict[str, Any]]:
    """Fits of a small model, each step of them, and Pyro's own enumerated form beside."""
    pyro.set_rng_seed(0)
    data = datasets.casino(num_sequences=20, num_steps=50).without_labels()
    module = TabularHMM(2, categorical(6))
    marginal, enumerated = MarginalModel(module), EnumeratedModel(module)
    count = 3 if quick else 100
    options: dict[str, Any] = {"num_iterations": count, "tolerance": None}

    def by_pyro(model: Any, guide: Any, loss: Any) -> None:
        pyro.clear_param_store()
        svi = SVI(model, guide(poutine.block(model, hide_fn=_is_step)), Adam({"lr": 0.01}), loss)
        for _ in range(count):
            svi.step(data)

    elbo = TraceEnum_ELBO(max_plate_nesting=1)
    pairs = {
        "fit_em": {"pyrohmm": lambda: fit_em(module, data, **options)},
        "fit_map": {
            "pyrohmm": lambda: fit_map(marginal, data, **options),
            "Pyro, enumerated": lambda: by_pyro(enumerated, AutoDelta, elbo),
        },
        "fit_svi": {
            "pyrohmm": lambda: fit_svi(marginal, AutoNormal(marginal), data, **options),
            "Pyro, enumerated": lambda: by_pyro(enumerated, AutoNormal, elbo),
        },
    }
    rows = []
    for name, methods in pairs.items():
        rows += compare(
            methods, 2 if quick else 5, 6.0, per=count,
            quantity="a step of a fit", fit=name, **{"shape N, T, K, V": (20, 50, 2, 6)},
        )  # fmt: skip

    def nuts(model: Any, draws: int) -> None:
        pyro.set_rng_seed(0)
        MCMC(NUTS(model, max_tree_depth=5), draws, draws, disable_progbar=True).run(data)

    few, many = (1, 3) if quick else (3, 60)
    pairs = {
        many: {"pyrohmm": lambda: nuts(marginal, many)},
        few: {
            "pyrohmm": lambda: nuts(marginal, few),
            "Pyro, enumerated": lambda: nuts(enumerated, few),
        },
    }
    for draws, methods in pairs.items():
        rows += compare(
            methods, 1, 1e3,
            quantity=f"NUTS, {draws} + {draws} draws", **{"shape N, T, K, V": (20, 50, 2, 6)},
        )  # fmt: skip
    return rows


def _is_step(site: dict[str, Any]) -> bool:
    """Whether a site is of one step, enumerated or observed."""
    return site["name"].startswith("x_")


def restarts(quick: bool) -> list[dict[str, Any]]:
    """Sixteen batched restarts of a small model, against one."""
    data = datasets.casino(num_sequences=20, num_steps=50).without_labels()
    rows = []
    for num_states in (2, 4):
        module = TabularHMM(num_states, categorical(6))
        options: dict[str, Any] = {"num_iterations": 3 if quick else 100, "tolerance": None}
        fits = {
            "EM": lambda m=module, o=options, **r: fit_em(m, data, **o, **r),
            "MAP": lambda m=module, o=options, **r: fit_map(MarginalModel(m), data, **o, **r),
            "co-occurrence": lambda m=module, o=options, **r: fit_cooccurrence(
                m, data, 6, **o, **r
            ),
        }
        for name, fit in fits.items():
            methods = {"one": fit, "sixteen": lambda fit=fit: fit(restarts=16)}
            times = interleaved(methods, 2 if quick else 7, 5.0)
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
            times = interleaved(methods, 3 if quick else 9, 2.0)
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
    """Ratios as points, growth as lines."""
    plt = pyplot()
    figure, axes = plt.subplot_mosaic(
        [["ratios"] * 3, ["N", "T", "K"]], figsize=(10, 7), layout="constrained"
    )
    names = ["dynamax", "hmmlearn E-step", "DiscreteHMM", "log space, autograd", "pyro.markov"]
    bars = axes["ratios"]
    for place, shape in enumerate(SHAPES):
        for n, name in enumerate(names):
            ratios = [
                row["times_slower_than_pyrohmm"]
                for row in rows
                if row["quantity"] == "evidence and gradient"
                and row["method"] == name
                and tuple(row["shape N, T, K, V"]) == shape
            ]
            if ratios:
                x = place + 0.17 * (n - 2)
                middle, low, high = ratios[0]
                bars.errorbar(x, middle, [[middle - low], [high - middle]], fmt="osD^v"[n],
                              color=f"C{n}", label=name if place == 0 else None)  # fmt: skip
                label = f"{middle:.0f}" if middle >= 10 else f"{middle:.1f}"
                bars.annotate(label, (x, middle), (5, 0), textcoords="offset points", fontsize=9,
                              va="center")  # fmt: skip
            else:
                bars.text(place + 0.17 * (n - 2), 1.2, "not measured", rotation=90, fontsize=8,
                          color=f"C{n}", ha="center", va="bottom")  # fmt: skip
    bars.axhline(1, color="black", linewidth=0.8)
    bars.set_yscale("log")
    plain_ticks(bars.yaxis, (1.0,))
    shapes = [f"N = {n:,}, T = {t:,}\nK = {k:,} states" for n, t, k, _ in SHAPES]
    bars.set_xticks(range(len(SHAPES)), shapes)
    bars.set_ylabel("times as long as pyrohmm")
    bars.set_title(
        "evidence and gradient, float32, two threads: time of others / time of pyrohmm "
        "(median, fastest, slowest)"
    )
    bars.grid(visible=False, axis="x")
    bars.set_xlim(-0.5, len(SHAPES) - 0.5)
    bars.margins(y=0.1)
    bars.legend(loc="upper center", ncols=2, bbox_to_anchor=(0.62, 1.0))
    fixed = {"N": "T = 64, K = 16", "T": "N = 32, K = 16", "K": "N = 32, T = 64"}
    meanings = {"N": "sequences", "T": "steps", "K": "states"}
    for letter, meaning in meanings.items():
        panel = axes[letter]
        for style, name in (("k-", "pyrohmm"), ("k:", "pyrohmm, no Numba"), ("C0-", "dynamax")):
            points = [
                (row[letter], row["milliseconds"])
                for row in rows
                if row["quantity"] == f"growth in {letter}" and row["method"] == name
            ]
            if points:
                panel.loglog(*zip(*points), style, marker="o", markersize=4, label=name)
        panel.set_xlabel(f"{letter}, number of {meaning}")
        plain_ticks(panel.yaxis)
        panel.set_title(fixed[letter])
    axes["N"].set_ylabel("milliseconds")
    axes["T"].legend(loc="upper left")
    save(figure, "throughput")


def main() -> None:
    """Measure, then write."""
    parts = (
        gradients, small, busy, vectors, families, structure, iterations, steps, restarts,
        queries, queries_threads, growth, memory, vector_memory, long_chain,
    )  # fmt: skip
    options = arguments(__doc__, [part.__name__ for part in parts])
    if options.draw:
        draw(earlier("throughput"))
        return
    torch.set_num_threads(2)
    for part in parts:
        if part.__name__ in options.only:
            rows = [{"part": part.__name__, **row} for row in part(options.quick)]
            if not options.quick:  # after each part
                _write({part.__name__: rows}, [each.__name__ for each in parts])


def _write(new: dict[str, list[dict[str, Any]]], order: list[str]) -> None:
    """Write the rows of one part beside those of the others."""
    rows = {name: [row for row in earlier("throughput") if row["part"] == name] for name in order}
    rows |= new
    flat = [row for name in order for row in rows[name]]
    write("throughput", flat)
    draw(flat)


if __name__ == "__main__":
    main()
