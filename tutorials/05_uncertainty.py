# %% [markdown]
# # 5. The whole posterior: Gibbs, HMC, SVI, MAP and ArviZ
#
# EM and MAP return one set of parameters. How many states should the model have, and how certain
# are its parameters? A posterior distribution answers both. `fit_gibbs` samples it: paths given
# parameters, parameters given paths, many chains at once. Two symmetries remain to be dealt with:
# states can be permuted and embeddings can be rotated without changing the model, so means,
# intervals and $\hat R$ of the raw parameters may be meaningless. `to_arviz` converts a posterior
# for [ArviZ](https://python.arviz.org), with the log-likelihood of each sequence and with
# quantities that are invariant to both symmetries.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $x_n$ | `data.values[n]` | a word of English, letter by letter |
# | $\theta_s$, of $C$ chains | `PosteriorDraws`, shape $(C, S)$ | from a guide or a sampler |
# | $\log p(x_n \mid \theta_s)$ | `log_likelihood`, `x` | used to leave out whole words |
# | $\log p(x_{n,t} \mid x_{n,1:t-1}, \theta_s)$ | `log_likelihood`, `x_step` | letter by letter |
# | $\int p(\theta)\, p(x \mid \theta)\, d\theta$ | `marginal_likelihood` | evidence of a model |
# | elpd | `az.loo` | $\sum_n \log p(x_n \mid \text{the other words})$ |

# %%
import itertools
import math
import os
import re
import warnings

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_gibbs,
    fit_map,
    fit_mcmc,
    fit_svi,
    inference_data,
    metrics,
    to_arviz,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version
    import arviz as az

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## Words
#
# Each sequence is a word in the letters a to z. Words differ in length and are exchangeable. The
# training set is small, so that the posterior is wide; a thousand other words are held out to check
# the estimates.

# %%
words = sorted(set(re.findall(r"\b[a-z]{3,}\b", datasets.english_text())))
words = [words[i] for i in torch.randperm(len(words))]
spelled = [[ord(letter) - ord("a") for letter in word] for word in words]
num_train = 40 if SMOKE else 100
train = Sequences.from_list(spelled[:num_train])
held_out = Sequences.from_list(spelled[num_train : num_train + 1000])
print(train)
print(" ".join(words[:10]))

# %% [markdown]
# ## Samples, and whether to trust them
#
# Two states, sixteen chains, each of which begins at a sample of the prior. The first line of the
# summary says whether the chains agree.

# %%
two = TabularHMM(2, categorical(26))
sizes = {"warmup": 10, "num_samples": 20} if SMOKE else {"warmup": 200, "num_samples": 800}
lost = fit_gibbs(two, train, **sizes)
print(lost.summary())
print("mean log joint density of each chain:", lost.stats["lp"].mean(1).round().int().tolist())

# %% [markdown]
# They do not, and the densities say why: some chains have stayed in a mode that is many nats
# lower. Begin at the best of several fits by EM instead.

# %%
best = fit_em(two, train, restarts=16, num_iterations=10 if SMOKE else 200)
gibbs = fit_gibbs(two, train, start=best, warmup=200, num_samples=20 if SMOKE else 2000)
print(gibbs.summary())

# %% [markdown]
# ## How many states?
#
# For each number of states we sample with temperatures: every chain is the coldest of a ladder,
# which reaches from the prior to the posterior, and neighbours swap places. Chains so find the best
# mode from wherever they begin, and the ladder gives the marginal likelihood of the model, with its
# standard error. Hamiltonian trajectories serve better here than Gibbs sampling: on the way from
# the prior its states come apart all at once, at one temperature, which hardly any chain crosses.
#
# From the same samples, `az.loo` estimates leave-one-out cross-validation by importance sampling,
# without refitting; $\hat k$ diagnoses for how many words the weights are unreliable. The reference
# is the log predictive density of held-out words, $\log \frac1S \sum_s p(x \mid \theta_s)$.


# %%
def left_out(posterior):
    """ArviZ's estimate of log p(word | the other words) of each word, and its diagnostic k."""
    estimate = az.loo(posterior, var_name="x", pointwise=True)
    # the name changed in ArviZ 1
    per_word = estimate.elpd_i if "elpd_i" in estimate else estimate.loo_i
    return torch.tensor(per_word.values), torch.tensor(estimate.pareto_k.values)


def predictive_density(draws, data):
    """Log posterior predictive density of each word."""
    scores = draws.map(data, lambda hmm: hmm.log_prob(data.values).double()).flatten(0, 1)
    return scores.logsumexp(0) - math.log(len(scores))


num_draws = 50 if SMOKE else 400
ladder = {"num_temperatures": 4 if SMOKE else 12, "num_chains": 4}
steps = {"warmup": 10, "num_samples": 15} if SMOKE else {"warmup": 100, "num_samples": 200}
tempered, posteriors, loo, held = {}, {}, {}, {}
warnings.filterwarnings("ignore", message="Estimated shape parameter")  # k is printed below
print("states     BIC  log evidence    nats per word: left out  held out  words with k > 0.7")
for num_states in range(1, 3 if SMOKE else 5):
    module = TabularHMM(num_states, categorical(26))
    em = fit_em(module, train, restarts=16, num_iterations=10 if SMOKE else 200)
    fit = tempered[num_states] = fit_mcmc(MarginalModel(module), train, **ladder, **steps)
    value, error = fit.marginal_likelihood()
    draws = PosteriorDraws.of(fit, num_draws=num_draws)
    posteriors[num_states] = to_arviz(draws, train, per_step=True)
    loo[num_states], k = left_out(posteriors[num_states])
    held[num_states] = predictive_density(draws, held_out)
    print(
        f"{num_states:6d} {metrics.bic(em, train):7.0f} {value:9.1f} ± {error:.1f} "
        f"{loo[num_states].mean():23.2f} {held[num_states].mean():9.2f} "
        f"{(k > 0.7).sum():8d} of {num_train}"
    )

# %% [markdown]
# The two last columns of nats refer to different words, so their levels differ by chance; compare
# how they grow with the number of states. The difference of two models is a sum over words with its
# own standard error, smaller than that of either score.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
counts = list(posteriors)
for label, scores, colour in (("left out", loo, "C0"), ("held out", held, "C1")):
    gains = [scores[count] - scores[1] for count in counts]
    errors = [2 * gain.std() / len(gain) ** 0.5 for gain in gains]
    means = [gain.mean() for gain in gains]
    panels[0].errorbar(counts, means, errors, marker="o", capsize=3, color=colour, label=label)
panels[0].set_ylabel("nats per word, relative to one state")
panels[0].legend(frameon=False)
values, errors = zip(*(fit.marginal_likelihood() for fit in tempered.values()))
panels[1].errorbar(counts, values, [2 * error for error in errors], marker="o", capsize=3)
panels[1].set_ylabel("log evidence, nats")
for axes in panels:
    axes.set_xticks(counts)
    axes.set_xlabel("number of states")
plt.show()

for before, after in itertools.pairwise(counts):
    gain = loo[after] - loo[before]
    error = gain.std() * len(gain) ** 0.5
    print(f"from {before} to {after} states: {gain.sum():6.1f} nats in total, ± {error:.1f}")

# %% [markdown]
# Leave-one-out and held-out scores ask how well a model predicts another word. The evidence
# averages the likelihood over the prior, here a flat one over all distributions of letters, and so
# asks how well the prior predicts all words from the first on: it is largest at three states, where
# the scores still grow a little. BIC approximates the evidence for large data, by a penalty of the
# number of parameters alone; these data are small, and it takes two.
#
# Words are exchangeable and can be left out. The letters of a word are not: each is predicted from
# those before it, and `x_step` holds these one-step log-probabilities.

# %%
largest = max(posteriors)
for n in range(3):
    print(f"\n{words[n]:12s}" + "".join(f"{letter:>6s}" for letter in words[n]))
    for num_states in (1, largest):
        steps = posteriors[num_states].log_likelihood["x_step"].mean(("chain", "draw")).values[n]
        print(f"{num_states} states    " + "".join(f"{x:6.1f}" for x in steps[: len(words[n])]))

# %% [markdown]
# ## Label switching
#
# Tempered chains visit the modes in all orders of the states, so that $\hat R$ of the raw
# parameters is large, and averages over the samples mean nothing. `PosteriorDraws.aligned` permutes
# the states of every sample by the overlap of their smoothed posteriors.

# %%
chains = PosteriorDraws.of(tempered[2])
aligned = chains.aligned(train)
for title, draws in (("as sampled", chains), ("aligned", aligned)):
    print(f"{title}: {draws.summary()}\n")

figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
for axes, draws, title in zip(panels, (chains, aligned), ("as sampled", "aligned")):
    samples = draws.parameters["module.emission.probs"].flatten(0, 1)
    low, high = samples.quantile(torch.tensor([0.05, 0.95]), 0)
    for k, mean in enumerate(samples.mean(0)):
        bands = torch.stack([mean - low[k], high[k] - mean]).clamp(min=0)
        places = torch.arange(26) + 0.4 * k
        axes.bar(places, mean, width=0.4, yerr=bands, error_kw={"lw": 0.7}, label=f"state {k}")
    axes.set_xticks(torch.arange(26) + 0.2, "abcdefghijklmnopqrstuvwxyz")
    axes.set_title(f"posterior mean and 90 % interval, {title}")
panels[0].set_ylabel("emission probability")
panels[1].legend(frameon=False)
plt.show()

# %% [markdown]
# As sampled, the means of both states lie between vowels and consonants, and occur in no sample.
# Aligned, the states are vowels and consonants; what remains of $\hat R$ says that these tempered
# chains are short, and intervals are better taken from those of Gibbs sampling.
#
# Invariant quantities need no alignment. `to_arviz` adds several to the posterior: the
# log-evidence, the shares of steps spent in each state in decreasing order, the effective number
# of states, and the entropy rate of the transitions. `summary` tabulates them with the sampler's
# diagnostics.

# %%
inference_data.summary(to_arviz(gibbs, train))

# %% [markdown]
# ## Gibbs, HMC, SVI and MAP
#
# `fit_mcmc` takes any Pyro model whose states are summed out; Gibbs needs conjugate priors. Both
# sample the same posterior. MAP is its mode, one set of parameters. SVI with `AutoNormal`
# approximates it by independent parameters; its samples, weighted by $p(x, \theta) / q(\theta)$,
# are importance samples of the posterior, and a small effective sample size shows how far it is.

# %%
model = MarginalModel(two)
mode = fit_map(model, train, start=best, num_iterations=20 if SMOKE else 100)
# a vectorised ELBO of eight particles costs hardly more than one particle
elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
guide = AutoNormal(model, init_loc_fn=init_to_value(values=best.start), init_scale=0.1)
svi = fit_svi(
    model, guide, train, num_iterations=5 if SMOKE else 300, learning_rate=0.06, elbo=elbo
)
converted = {
    "Gibbs": to_arviz(gibbs, train),
    "HMC": to_arviz(tempered[2], train),
    "SVI": to_arviz(svi, train, num_draws=num_draws),
}
stats = converted["SVI"].sample_stats
weights = torch.tensor((stats["lp"] - stats["log_guide"]).values).softmax(-1)
print(f"effective sample size of SVI: {1 / weights.square().sum():.1f} of {num_draws}\n")
print("mean ± sd        " + "".join(f"{name:>18s}" for name in converted))
for name in inference_data.INVARIANTS:
    row = f"{name:19s}"
    for posterior in converted.values():
        values = torch.tensor(posterior.posterior[name].values)
        values = values[..., 0] if values.dim() > 2 else values  # the largest share
        row += f"{values.mean():10.2f} ± {values.std():5.3f}"
    print(row)
print(f"log_evidence at the mode {mode.hmm(train).log_prob(train.values).sum():.2f}")

# %% [markdown]
# At the mode the evidence is larger than of nearly every sample: of many parameters, most of the
# posterior lies away from its mode. The samplers agree. So do the means of SVI, but it ignores
# posterior correlations, and its standard deviations differ for that reason.

# %% [markdown]
# ## Rotations of embeddings
#
# A `DenseHMM` has a further symmetry: its probabilities depend on inner products of embeddings,
# which are invariant to a joint rotation. In two dimensions the posterior of an embedding is a
# ring, and restarts of MAP end anywhere on it. `AutoNormal` covers one part of the ring. Chains of
# HMC move along it, slowly: their embeddings disagree, and what no rotation changes need not.

# %%
dense = MarginalModel(DenseHMM(2, 26, 2))
point = fit_map(
    dense,
    train,
    restarts=4 if SMOKE else 12,
    num_iterations=20 if SMOKE else 300,
    learning_rate=0.1,
)
guide = AutoNormal(dense, init_loc_fn=init_to_value(values=point.start), init_scale=0.1)
svi = fit_svi(
    dense, guide, train, num_iterations=5 if SMOKE else 300, learning_rate=0.04, elbo=elbo
)
steps = {"warmup": 10, "num_samples": 15} if SMOKE else {"warmup": 100, "num_samples": 200}
hmc = fit_mcmc(dense, train, start=point, num_chains=8, **steps)
clouds = {"AutoNormal": PosteriorDraws.of(svi, num_draws=num_draws), "HMC": PosteriorDraws.of(hmc)}
print(hmc.summary())
inference_data.summary(to_arviz(hmc, train))

# %% [markdown]
# The plot shows one embedding, `emit` of the state of consonants. The cross is the mean: of points
# all around a ring it lies inside, where none of them is. (The radius varies, because a longer
# `emit` compensates for a shorter `symbol`.)

# %%
vowels = torch.tensor([0, 4, 8, 14, 20])
ends = point.restarts
good = ends.final < ends.final.min() + 1.0  # the others ended at other optima
print(f"{good.sum()} of {len(good)} restarts reached the best optimum")
points = {name: value[None, good] for name, value in ends.parameters.items()}
panels = {"restarts of MAP": PosteriorDraws(dense, points)} | clouds

figure, row = plt.subplots(1, 3, figsize=(9, 3.2), sharex=True, sharey=True, layout="constrained")
for axes, (name, draws) in zip(row, panels.items()):
    draws = draws.aligned(train)
    vowel_probs = draws.map(train, lambda hmm: hmm.emission.probs[:, 0][..., vowels].sum(-1))
    emit = draws.parameters["module.emit"][:, :, vowel_probs.mean((0, 1)).argmin()].flatten(0, 1)
    axes.scatter(*emit[torch.randperm(len(emit))[:500]].T, s=10, alpha=0.6)
    axes.scatter(*emit.mean(0), marker="x", color="black", s=60)
    axes.set_title(name)
    axes.set_aspect("equal")
row[0].set_ylabel("second dimension")
row[1].set_xlabel("first dimension")
plt.show()

# %% [markdown]
# Functions of the probabilities are invariant to rotations, and after `aligned` to label switching.
# `PosteriorDraws.map` applies a function of an HMM to all samples, in batches.


# %%
def self_transitions(hmm):
    return hmm.log_transition.exp()[:, 0].diagonal(dim1=-2, dim2=-1)  # (b, K)


for name, draws in {
    "standard, Gibbs": PosteriorDraws.of(gibbs),
    "dense, HMC": clouds["HMC"],
}.items():
    draws = draws.aligned(train)
    vowel_probs = draws.map(train, lambda hmm: hmm.emission.probs[:, 0][..., vowels].sum(-1))
    order = vowel_probs.mean((0, 1)).argsort(descending=True)
    probs = draws.map(train, self_transitions).flatten(0, 1)[:, order]
    ends = probs.quantile(torch.tensor([0.05, 0.95]), 0)
    for label, (low, high) in zip(("vowel", "consonant"), ends.T.tolist()):
        print(f"{name:15s} p({label:9s} | {label:9s}): 90 % interval {low:.2f} to {high:.2f}")
