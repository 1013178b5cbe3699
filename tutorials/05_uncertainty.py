# %% [markdown]
# # 5. Uncertainty: SVI, NUTS and ArviZ
#
# EM and MAP return one set of parameters. How many states should the model have, and how certain
# are its parameters? A posterior distribution answers both, once two symmetries are dealt with:
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
# | elpd | `az.loo` | $\sum_n \log p(x_n \mid \text{the other words})$ |

# %%
import itertools
import math
import os
import re
import warnings
from functools import partial

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.infer import MCMC, NUTS, Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_value
from torch.distributions import biject_to

from pyrohmm import (
    DenseHMM,
    MarginalModel,
    PosteriorDraws,
    RotationGuide,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    fit_map,
    fit_svi,
    inference_data,
    metrics,
    to_arviz,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version
    import arviz as az
    import xarray

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
num_train = 40 if SMOKE else 200
train = Sequences.from_list(spelled[:num_train])
held_out = Sequences.from_list(spelled[num_train : num_train + 1000])
print(train)
print(" ".join(words[:10]))

# %% [markdown]
# ## How many states?
#
# For each number of states we run EM with eight restarts, SVI from the best of them, and take five
# hundred samples from the guide. `az.loo` estimates leave-one-out cross-validation by importance
# sampling, without refitting; $\hat k$ diagnoses for how many words the weights are unreliable.
# The reference is the log predictive density of held-out words, $\log \frac1S \sum_s p(x \mid
# \theta_s)$.


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


# a vectorised ELBO of eight particles costs hardly more than one particle
elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
num_draws = 50 if SMOKE else 500
posteriors, fits, loo, held = {}, {}, {}, {}
warnings.filterwarnings("ignore", message="Estimated shape parameter")  # k is printed below
print("states     BIC nats per word: left out  held out  words with k > 0.7")
for num_states in range(1, 3 if SMOKE else 6):
    module = TabularHMM(num_states, categorical(26))
    em = fit_em(module, train, restarts=8, num_iterations=10 if SMOKE else 200)
    model = MarginalModel(module)
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=em.start), init_scale=0.1)
    svi = fit_svi(
        model, guide, train, num_iterations=5 if SMOKE else 300, learning_rate=0.06, elbo=elbo
    )
    fits[num_states] = model, svi
    draws = PosteriorDraws.of(svi, num_draws=num_draws)
    posteriors[num_states] = to_arviz(draws, train, per_step=True)
    loo[num_states], k = left_out(posteriors[num_states])
    held[num_states] = predictive_density(draws, held_out)
    print(
        f"{num_states:6d} {metrics.bic(em, train):7.0f} {loo[num_states].mean():23.2f} "
        f"{held[num_states].mean():9.2f} {(k > 0.7).sum():11d} of {num_train}"
    )

# %% [markdown]
# The two columns of nats refer to different words, so their levels differ by chance; compare how
# they grow with the number of states. The difference of two models is a sum over words with its own
# standard error, smaller than that of either score.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
counts = list(posteriors)
for label, scores, colour in (("left out", loo, "C0"), ("held out", held, "C1")):
    gains = [scores[count] - scores[1] for count in counts]
    errors = [2 * gain.std() / len(gain) ** 0.5 for gain in gains]
    means = [gain.mean() for gain in gains]
    axes.errorbar(counts, means, errors, marker="o", capsize=3, color=colour, label=label)
axes.set_xticks(counts)
axes.set_xlabel("number of states")
axes.set_ylabel("nats per word, relative to one state")
axes.legend(frameon=False)
plt.show()

for before, after in itertools.pairwise(counts):
    gain = loo[after] - loo[before]
    error = gain.std() * len(gain) ** 0.5
    print(f"from {before} to {after} states: {gain.sum():6.1f} nats in total, ± {error:.1f}")

# %% [markdown]
# Leave-one-out and held-out scores agree, and the former needs no extra data. Two states are far
# better than one, and three better than two; a fourth and a fifth gain less. BIC, which penalises
# the number of parameters instead of estimating predictive performance, selects three. (Importance
# weights reuse the samples of one fit. They cannot show that a fit without a word might have
# reached another optimum, so some held-out data remain useful.)
#
# Words are exchangeable and can be left out. The letters of a word are not: each is predicted from
# those before it, and `x_step` holds these one-step log-probabilities.

# %%
best = max(posteriors)
for n in range(3):
    print(f"\n{words[n]:12s}" + "".join(f"{letter:>6s}" for letter in words[n]))
    for num_states in (1, best):
        steps = posteriors[num_states].log_likelihood["x_step"].mean(("chain", "draw")).values[n]
        print(f"{num_states} states    " + "".join(f"{x:6.1f}" for x in steps[: len(words[n])]))

# %% [markdown]
# ## SVI and NUTS
#
# `AutoNormal` assumes independent parameters. Its samples, weighted by $p(x, \theta) / q(\theta)$,
# are importance samples of the posterior; a small effective sample size shows a poor
# approximation. `sample_stats` has both log-densities.

# %%
for num_states, posterior in posteriors.items():
    stats = posterior.sample_stats
    weights = torch.tensor((stats["lp"] - stats["log_guide"]).values).softmax(-1)
    effective = 1 / weights.square().sum()
    print(f"{num_states} states: effective sample size {effective:6.1f} of {num_draws}")

# %% [markdown]
# The predictions are good all the same, as the scores show. For intervals we use a sampler, with
# two states: two chains of NUTS, initialised at samples from the guide to shorten the warm-up. The
# labels of states are arbitrary, and independent chains would choose them at random; here we swap
# the labels in the second start to show the effect.

# %%
model, svi = fits[2]
starts = PosteriorDraws.of(svi, num_draws=2)
starts = starts.permute_states(torch.tensor([[[0, 1], [1, 0]]]), train)
initial_params = {
    name: biject_to(svi.supports[name]).inv(value[0]) for name, value in starts.parameters.items()
}
warnings.filterwarnings("ignore", message="num_chains")  # one after the other is good enough
sampler = MCMC(
    NUTS(model, max_tree_depth=3 if SMOKE else 4),
    num_samples=10 if SMOKE else 100,
    warmup_steps=10 if SMOKE else 60,
    num_chains=2,
    initial_params=initial_params,
    disable_progbar=True,
)
sampler.run(train)
chains = PosteriorDraws.of(sampler)
aligned = chains.aligned(train)

# %% [markdown]
# ## Label switching
#
# $\hat R$ compares chains and is near one where they agree. For the raw parameters it reports
# disagreement, because the chains label the states differently. `PosteriorDraws.aligned` permutes
# the states of every sample by the overlap of their smoothed posteriors, and the chains agree.


# %%
def worst_rhat(values):
    """The largest R-hat of ``values`` ``(chains, draws, ...)``."""
    dims = ["chain", "draw", *(f"dim_{i}" for i in range(values.dim() - 2))]
    dataset = xarray.Dataset({"values": (dims, values.double().numpy())})
    return float(az.rhat(dataset)["values"].max())


for name in chains.parameters:
    before, after = worst_rhat(chains.parameters[name]), worst_rhat(aligned.parameters[name])
    print(f"{name:22s} largest R-hat {before:5.2f}, after alignment {after:5.2f}")

figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
for axes, draws, title in zip(panels, (chains, aligned), ("as sampled", "aligned")):
    for k, probs in enumerate(draws.parameters["module.emission.probs"].mean((0, 1))):
        axes.bar(torch.arange(26) + 0.4 * k, probs, width=0.4, label=f"state {k}")
    axes.set_xticks(torch.arange(26) + 0.2, "abcdefghijklmnopqrstuvwxyz")
    axes.set_title(f"posterior mean, states {title}")
panels[0].set_ylabel("emission probability")
panels[1].legend(frameon=False)
plt.show()

# %% [markdown]
# Averaged as sampled, the two chains give two nearly equal states that occur in no sample. Aligned,
# the states are vowels and consonants.
#
# Invariant quantities need no alignment. `to_arviz` adds several to the posterior: the
# log-evidence, the shares of steps spent in each state in decreasing order, the effective number
# of states, and the entropy rate of the transitions. `summary` tabulates them with the sampler's
# diagnostics.

# %%
inference_data.summary(to_arviz(chains, train))

# %% [markdown]
# The same quantities under the guide (a single chain of independent samples, so without $\hat R$).
# The means agree. The guide underestimates the standard deviation of the shares by a factor of two,
# because it ignores posterior correlations; for the same reason its log-evidence varies too much.

# %%
guided, sampled = to_arviz(svi, train, num_draws=num_draws), to_arviz(chains, train)
print("                   SVI: mean ± sd     NUTS: mean ± sd")
for name in inference_data.INVARIANTS:
    row = f"{name:17s}"
    for posterior in (guided, sampled):
        values = torch.tensor(posterior.posterior[name].values)
        values = values[..., 0] if values.dim() > 2 else values  # the largest share
        row += f"{values.mean():11.2f} ± {values.std():6.3f}"
    print(row)

# %% [markdown]
# ## Rotations of embeddings
#
# A `DenseHMM` has a further symmetry: its probabilities depend on inner products of embeddings,
# which are invariant to a joint rotation. In two dimensions the posterior of an embedding is a
# ring, and restarts of MAP end anywhere on it. `AutoNormal` covers one part of the ring.
# `RotationGuide` fits a distribution over the embeddings up to rotation and rotates every sample
# at random. Its density is exact, so the ELBOs of the two guides can be compared.

# %%
dense = MarginalModel(DenseHMM(2, 26, 2))
point = fit_map(
    dense,
    train,
    restarts=4 if SMOKE else 12,
    num_iterations=20 if SMOKE else 300,
    learning_rate=0.1,
)
guides = {
    "AutoNormal": AutoNormal(dense, init_loc_fn=init_to_value(values=point.start), init_scale=0.1),
    "RotationGuide": RotationGuide(
        dense, point.start, autoguide=partial(AutoNormal, init_scale=0.1)
    ),
}
clouds = {}
for name, guide in guides.items():
    svi = fit_svi(
        dense, guide, train, num_iterations=5 if SMOKE else 300, learning_rate=0.04, elbo=elbo
    )
    clouds[name] = PosteriorDraws.of(svi, num_draws=num_draws)
    stats = to_arviz(clouds[name], train).sample_stats
    bound = (stats["lp"] - stats["log_guide"]).values
    print(f"{name:13s} ELBO {bound.mean():8.1f} ± {bound.std() / num_draws**0.5:.1f} nats")

# %% [markdown]
# The plot shows one embedding, `emit` of the state of consonants. The cross is the posterior mean;
# it lies inside the ring, where there are no samples. (The radius varies, because a longer `emit`
# compensates for a shorter `symbol`.)

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
    emit = draws.parameters["module.emit"][0, :, vowel_probs.mean((0, 1)).argmin()]  # (S, 2)
    axes.scatter(*emit[:500].T, s=10, alpha=0.6)
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


for name, draws in {"standard, NUTS": chains, "dense, SVI": clouds["RotationGuide"]}.items():
    draws = draws.aligned(train)
    vowel_probs = draws.map(train, lambda hmm: hmm.emission.probs[:, 0][..., vowels].sum(-1))
    order = vowel_probs.mean((0, 1)).argsort(descending=True)
    probs = draws.map(train, self_transitions).flatten(0, 1)[:, order]
    ends = probs.quantile(torch.tensor([0.05, 0.95]), 0)
    for label, (low, high) in zip(("vowel", "consonant"), ends.T.tolist()):
        print(f"{name:15s} p({label:9s} | {label:9s}): 90 % interval {low:.2f} to {high:.2f}")
