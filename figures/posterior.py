"""The whole posterior: effective samples a second of Gibbs sampling, HMC and NUTS, ours and others.

The same model, data and starts (at the best of ten fits by EM, or by MAP; of the 20 states at the
fit that begins at the states that made the data, since random starts end hundreds of nats below it,
where chains wander from mode to mode); of each sampler the
effective sample size of the worst parameter (the smallest of bulk sizes), for each second of
processor time of the samples, after a warmup, of which compilation is a part; R-hat of the worst
parameter. One thread. Each sampler is a run of its own, ``--sampler`` and ``--model``, and adds to
``posterior.json``; those of NumPyro and blackjax need these installed. Without ``--sampler`` the
picture is drawn.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import pyro
import torch
from common import earlier, pyplot, save, write
from pyro.distributions import Dirichlet, HalfNormal, Normal
from torch import Tensor

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_mcmc,
    normal,
    poisson,
    scale_priors,
)
from pyrohmm.infer.sampled import Chains, agreement

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # one thread
LABELS = {
    "gibbs": "pyrohmm, Gibbs",
    "hmc": "pyrohmm, HMC",
    "pyro-nuts": "Pyro, NUTS",
    "numpyro-nuts": "NumPyro, NUTS",
    "numpyro-nuts-vectorized": "NumPyro, NUTS, batched chains",
    "blackjax-chees": "blackjax, ChEES, on dynamax",
}
TITLES = {"large": "20 states", "normal": "normal", "poisson": "Poisson"}
MODELS = ("casino", "normal", "poisson", "large", "subjects")
# chains, warmup, samples of each
SIZES = {
    "gibbs": (64, 200, 1000),
    "hmc": (32, 200, 400),
    "pyro-nuts": (1, 100, 200),
    "numpyro-nuts": (2, 200, 400),
    "numpyro-nuts-vectorized": (8, 200, 400),
    "blackjax-chees": (32, 300, 400),
}
SPECIAL = {  # where chains mix more slowly, or a sample takes long
    ("gibbs", "casino"): (64, 300, 8000),
    ("gibbs", "large"): (16, 300, 1500),
    ("hmc", "large"): (16, 200, 500),
    ("numpyro-nuts", "large"): (1, 50, 50),
    ("numpyro-nuts-vectorized", "large"): (4, 100, 100),
    ("blackjax-chees", "large"): (16, 200, 200),
}


def problem(name: str) -> tuple[TabularHMM, Sequences]:
    """A module and its data."""
    torch.manual_seed(0)
    if name == "casino":
        data = datasets.casino(num_sequences=20, num_steps=100).without_labels()
        return TabularHMM(2, categorical(6)), data
    kinds = {"normal": (3, 50, 100), "poisson": (2, 1, 107), "large": (20, 200, 50)}
    num_states, count, steps = kinds[name]
    matrix = 0.85 * torch.eye(num_states) + 0.15 / num_states
    states = [torch.randint(num_states, (count,))]
    for _ in range(steps - 1):
        states.append(torch.multinomial(matrix[states[-1]], 1).squeeze(-1))
    path = torch.stack(states, 1)
    lengths = torch.full((count,), steps)
    if name == "normal":
        centres = torch.tensor([[0.0, 0.0], [2.0, 1.0], [-1.0, 2.0]])
        values = centres[path] + torch.randn(count, steps, 2)
        return TabularHMM(3, normal(2)), Sequences(values, lengths)
    if name == "poisson":
        values = torch.poisson(torch.tensor([15.0, 26.0])[path])
        return TabularHMM(2, poisson()), Sequences(values, lengths)
    rows = torch.distributions.Dirichlet(torch.full((50,), 0.2)).sample((num_states,))
    values = torch.multinomial(rows[path].flatten(0, 1), 1).reshape(count, steps)
    return TabularHMM(20, categorical(50)), Sequences(values, lengths, labels=path)


def subjects(data: Sequences) -> HMM:
    """Two states whose levels differ between subjects, about those of the population."""
    rows = pyro.sample("transition", Dirichlet(1 + 4 * torch.eye(2)).to_event(1))
    mean = pyro.sample("mean", Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    between = pyro.sample("between", HalfNormal(torch.tensor(1.0)))
    within = pyro.sample("within", HalfNormal(torch.tensor(1.0)))
    with pyro.plate("subjects", data.total, subsample=data.indices):
        level = pyro.sample("level", Normal(mean, between.unsqueeze(-1)).to_event(1))
        emission = Normal(level, within.unsqueeze(-1))
        hmm = HMM(torch.full((2,), 0.5).log(), rows.log(), emission, data.lengths)
        pyro.sample("x", hmm, obs=data.values)
    return hmm


def hierarchical_data() -> Sequences:
    """Thirty subjects of sixty steps."""
    torch.manual_seed(0)
    matrix = torch.tensor([[0.9, 0.1], [0.15, 0.85]])
    states = [torch.randint(2, (30,))]
    for _ in range(59):
        states.append(torch.multinomial(matrix[states[-1]], 1).squeeze(-1))
    levels = torch.tensor([-1.0, 1.5]) + 0.5 * torch.randn(30, 2)
    values = levels.gather(1, torch.stack(states, 1)) + 0.7 * torch.randn(30, 60)
    return Sequences(values, torch.full((30,), 60))


def ours(sampler: str, module: TabularHMM, data: Sequences, start: Any, sizes: Any) -> Any:
    """Samples by name, and seconds of warmup and of samples, of this package."""
    chains, warmup, samples = sizes
    times: list[float] = []  # the clock is read at each step
    kind = "Gibbs" if sampler == "gibbs" else "HMC"
    owner = next(part for part in Chains.__subclasses__() if part.__name__ == kind)
    original = owner.step

    def timed(self: Any) -> None:
        times.append(time.process_time())
        original(self)

    owner.step = timed  # type: ignore[method-assign]
    options = {"num_chains": chains, "warmup": warmup, "num_samples": samples, "start": start}
    first = time.process_time()
    if sampler == "gibbs":
        fit = fit_gibbs(module, data, **options)
    else:
        fit = fit_mcmc(model_of(module), data, **options)
    end = time.process_time()
    owner.step = original  # type: ignore[method-assign]
    return fit.chains, times[warmup] - first, end - times[warmup]


def model_of(module: Any) -> Any:
    """The Pyro model of a module; a model as it is."""
    return MarginalModel(module) if isinstance(module, TabularHMM) else module


def by_pyro(module: Any, data: Sequences, start: Any, sizes: Any) -> Any:
    """Samples and seconds of Pyro's NUTS of the same model."""
    _, warmup, samples = sizes
    if isinstance(module, TabularHMM):
        scale_priors(module, data)
    values = {name: value.clone() for name, value in start.start.items()}
    init = pyro.infer.autoguide.init_to_value(values=values)
    kernel = pyro.infer.NUTS(model_of(module), init_strategy=init)
    times = [time.process_time()]
    sampler = pyro.infer.MCMC(
        kernel, samples, warmup, disable_progbar=True,
        hook_fn=lambda *_: times.append(time.process_time()),
    )  # fmt: skip
    sampler.run(data)
    found = sampler.get_samples(group_by_chain=True)
    return found, times[warmup] - times[0], times[-1] - times[warmup]


def in_numpyro(module: Any, data: Sequences, evidence: Any) -> Any:
    """The same model for NumPyro, whose states a function sums out."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    values = jnp.array(data.values.numpy())
    if not isinstance(module, TabularHMM):
        return _subjects_in_numpyro(values, evidence)
    scale_priors(module, data)
    emission, num_states = module.emission, module.num_states

    def likelihoods() -> Any:
        if hasattr(emission, "prior_loc"):
            shape, rate = (jnp.array(part.numpy()) for part in (emission.shape, emission.rate))
            inner = dist.InverseGamma(shape, rate).to_event(2)
            variance = numpyro.sample("module.emission.variance", inner)
            centre = jnp.array(emission.prior_loc.numpy())
            prior = dist.Normal(centre, jnp.sqrt(variance / emission.weight)).to_event(2)
            loc = numpyro.sample("module.emission.loc", prior)
            return dist.Normal(loc, jnp.sqrt(variance)).log_prob(values[..., None, :]).sum(-1)
        if hasattr(emission, "weight"):
            parts = emission.concentration, emission.weight
            prior = dist.Gamma(*(jnp.array(part.numpy()) for part in parts)).to_event(1)
            rate = numpyro.sample("module.emission.rate", prior)
            return dist.Poisson(rate).log_prob(values[..., None])
        prior = dist.Dirichlet(jnp.array(emission.concentration.numpy())).to_event(1)
        return jnp.log(numpyro.sample("module.emission.probs", prior)).T[values]

    def model() -> None:
        ones = jnp.ones((num_states, num_states))
        initial = numpyro.sample("module.initial", dist.Dirichlet(ones[0]))
        matrix = numpyro.sample("module.transition", dist.Dirichlet(ones).to_event(1))
        numpyro.factor("x", evidence(initial, matrix, likelihoods()))

    return model


def _subjects_in_numpyro(values: Any, evidence: Any) -> Any:
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    def model() -> None:
        matrix = numpyro.sample("transition", dist.Dirichlet(1 + 4 * jnp.eye(2)).to_event(1))
        mean = numpyro.sample("mean", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))
        between = numpyro.sample("between", dist.HalfNormal(1.0))
        within = numpyro.sample("within", dist.HalfNormal(1.0))
        with numpyro.plate("subjects", len(values)):
            level = numpyro.sample("level", dist.Normal(mean, between).to_event(1))
        logs = dist.Normal(level[:, None], within).log_prob(values[..., None])
        numpyro.factor("x", evidence(jnp.full(2, 0.5), matrix, logs))

    return model


def by_scan(initial: Any, matrix: Any, logs: Any) -> Any:
    """Log evidence of log-likelihoods ``(N, T, K)``, summed."""
    import jax
    import jax.numpy as jnp

    def step(alpha: Any, log: Any) -> Any:
        peak = alpha.max(-1, keepdims=True)
        return jnp.log(jnp.exp(alpha - peak) @ matrix) + peak + log, None

    alpha, _ = jax.lax.scan(step, jnp.log(initial) + logs[:, 0], logs[:, 1:].swapaxes(0, 1))
    return jax.scipy.special.logsumexp(alpha, -1).sum()


def by_numpyro(module: Any, data: Sequences, start: Any, sizes: Any, method: str) -> Any:
    """Samples and seconds of NumPyro's NUTS of the same model."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import numpyro

    chains, warmup, samples = sizes
    model = in_numpyro(module, data, by_scan)
    init = {name: jnp.array(value.numpy()) for name, value in start.start.items()}
    kernel = numpyro.infer.NUTS(model, init_strategy=numpyro.infer.init_to_value(values=init))
    sampler = numpyro.infer.MCMC(
        kernel, num_warmup=warmup, num_samples=samples, num_chains=chains, chain_method=method,
        progress_bar=False,
    )  # fmt: skip
    times = [time.process_time()]
    sampler.warmup(jax.random.PRNGKey(0))
    sampler.run(jax.random.PRNGKey(1))  # compiles
    times.append(time.process_time())
    sampler.post_warmup_state = sampler.last_state
    sampler.run(jax.random.PRNGKey(2))
    found = sampler.get_samples(group_by_chain=True)
    times.append(time.process_time())
    samples_of = {name: torch.tensor(np.array(value)) for name, value in found.items()}
    return samples_of, times[1] - times[0], times[2] - times[1]


def by_blackjax(module: Any, data: Sequences, start: Any, sizes: Any) -> Any:
    """Samples and seconds of blackjax's ChEES-HMC of the same model, filtered by dynamax."""
    import blackjax
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from dynamax.hidden_markov_model import hmm_filter
    from jax.flatten_util import ravel_pytree
    from numpyro.infer import init_to_value
    from numpyro.infer.util import initialize_model

    def evidence(initial: Any, matrix: Any, logs: Any) -> Any:
        return jax.vmap(lambda log: hmm_filter(initial, matrix, log).marginal_loglik)(logs).sum()

    chains, warmup, samples = sizes
    first_key, *keys = jax.random.split(jax.random.PRNGKey(0), 4)
    model = in_numpyro(module, data, evidence)
    init = {name: jnp.array(value.numpy()) for name, value in start.start.items()}
    strategy = init_to_value(values=init)
    (at, *_), energy, constrain, _ = initialize_model(first_key, model, init_strategy=strategy)
    flat, unflat = ravel_pytree(at)
    begin = flat + 0.05 * jax.random.normal(keys[0], (chains, len(flat)))

    def density(place: Any) -> Any:
        return -energy(unflat(place))

    times = [time.process_time()]
    adaptation = blackjax.chees_adaptation(density, chains, mass_matrix_estimation="diagonal")
    (states, tuned), _ = adaptation.run(keys[1], begin, 0.1, optax.adam(0.025), warmup)
    step = jax.vmap(blackjax.dynamic_hmc(density, **tuned).step)

    @jax.jit
    def run(key: Any, states: Any) -> Any:
        def one(states: Any, key: Any) -> Any:
            states, _ = step(jax.random.split(key, chains), states)
            return states, states.position

        return jax.lax.scan(one, states, jax.random.split(key, samples))[1]

    jax.block_until_ready(run(keys[2], states))  # compiles
    times.append(time.process_time())
    places = jax.block_until_ready(run(keys[2], states))
    times.append(time.process_time())
    found = jax.vmap(jax.vmap(lambda place: constrain(unflat(place))))(places)
    samples_of = {n: torch.tensor(np.array(v)).transpose(0, 1) for n, v in found.items()}
    return samples_of, times[1] - times[0], times[2] - times[1]


def measure(sampler: str, name: str) -> dict[str, Any]:
    """One sampler of one model."""
    module: Any
    start: Any
    if name == "subjects":
        module, data = subjects, hierarchical_data()
        pyro.set_rng_seed(1)
        start = fit_map(subjects, data, num_iterations=300, restarts=10)  # one alone may end where
        # some subjects number the states differently: a mode of its own
    else:
        module, data = problem(name)
        pyro.set_rng_seed(1)
        made = fit_em(module, data) if data.labels is not None else None
        data = data.without_labels()
        start = fit_em(module, data, start=made) if made else fit_em(module, data, restarts=10)
    sizes = SPECIAL.get((sampler, name), SIZES[sampler])
    if sampler in ("gibbs", "hmc"):
        ours(sampler, module, data, start, (sizes[0], 1, 4))  # compiles
        found, first, rest = ours(sampler, module, data, start, sizes)
    elif sampler == "pyro-nuts":
        found, first, rest = by_pyro(module, data, start, sizes)
    elif sampler == "blackjax-chees":
        found, first, rest = by_blackjax(module, data, start, sizes)
    else:
        method = "vectorized" if sampler.endswith("vectorized") else "sequential"
        found, first, rest = by_numpyro(module, data, start, sizes, method)
    parts: dict[str, Tensor] = {n: value for n, value in found.items() if n != "x"}
    judged = [agreement(value) for value in parts.values()]
    ess = min(part.bulk.nan_to_num(1e9).min().item() for part in judged)
    tail = min(part.tail.nan_to_num(1e9).min().item() for part in judged)
    rhat = max(part.rhat.nan_to_num(1.0).max().item() for part in judged)
    return {
        "sampler": sampler, "model": name, "chains": sizes[0], "warmup": sizes[1],
        "samples": sizes[2], "seconds of warmup": round(first, 2), "seconds": round(rest, 2),
        "bulk": round(ess, 1), "tail": round(tail, 1), "rhat": round(rhat, 3),
        "bulk a second": round(ess / rest, 2),
    }  # fmt: skip


def main() -> None:
    """Measure one sampler of one model, or draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", choices=list(LABELS))
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--quick", action="store_true", help="a few samples; nothing is written")
    options = parser.parse_args()
    if options.quick:
        module, data = problem("poisson")
        pyro.set_rng_seed(1)
        start = fit_em(module, data)
        for sampler in ("gibbs", "hmc"):
            ours(sampler, module, data, start, (4, 2, 4))
        return
    if options.sampler:
        found = measure(options.sampler, options.model)
        print(found)
        known = earlier("posterior")  # others may have added to it meanwhile
        known = [run for run in known if (run["sampler"], run["model"]) !=
                 (options.sampler, options.model)] + [found]  # fmt: skip
        write("posterior", known, numpyro="0.22.0")
        return
    known, plt = earlier("posterior"), pyplot()
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for i, (sampler, label) in enumerate(LABELS.items()):
        axes.bar(0, 0, color=f"C{i}", label=label)
        for run in known:
            if run["sampler"] == sampler:
                axes.bar(
                    MODELS.index(run["model"]) + 0.14 * (i - 2.5), run["bulk a second"], 0.13,
                    color=f"C{i}", alpha=1.0 if run["rhat"] <= 1.01 else 0.25,
                )  # fmt: skip
        run = {run["model"] for run in known if run["sampler"] == sampler}
        for place in (n for n, name in enumerate(MODELS) if name not in run):
            axes.text(place + 0.14 * (i - 2.5), 0.02, "not run", rotation=90, ha="center",
                      va="bottom", fontsize=8, color=f"C{i}",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xticks(range(len(MODELS)), [TITLES.get(name, name) for name in MODELS])
    axes.bar(0, 0, color="0.8", label="pale: not converged, R-hat above 1.01")
    axes.set(yscale="log", ylabel="effective samples per second", xlim=(-0.6, len(MODELS) - 0.4),
             xlabel="model")  # fmt: skip
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside upper center", ncols=3)
    save(figure, "posterior")


if __name__ == "__main__":
    main()
