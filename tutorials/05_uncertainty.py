# %% [markdown]
# # 5. Uncertainty: SVI, NUTS and ArviZ
#
# A fit by EM or MAP is one set of parameters. How many states should it have, and how sure are we
# of what it says? A posterior answers both, if two traps are avoided: states can be renamed and
# embeddings can be rotated without any change of the model, so that averages, intervals and
# $\hat R$ of the parameters themselves may mean nothing. `to_arviz` hands a posterior to
# [ArviZ](https://python.arviz.org), with the likelihood of each sequence and with quantities in
# which no state has a name.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $x_n$ | `data.values[n]` | a word of English, letter by letter |
# | $\theta_s$, of $C$ chains | `PosteriorDraws`, shape $(C, S)$ | from a guide or a sampler |
# | $\log p(x_n \mid \theta_s)$ | `log_likelihood`, `x` | what leaving out a word is computed from |
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
# Each sequence is a word, in the letters a to z: different lengths, no order among them. There are
# few of them, so that there is something to be unsure of. A thousand other words are held out, to
# check what the posterior claims.

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
# For each number of states: EM from eight starts, SVI from the best of them, five hundred draws of
# the guide. `az.loo` weighs these draws such that each word in turn is left out, without fitting
# again; `k` says for how many words the weights are not to be trusted. The last column is the
# yardstick, the score of held-out words, $\log \frac1S \sum_s p(x \mid \theta_s)$.


# %%
def left_out(found):
    """Of each word, log p(word | the other words) as ArviZ estimates it, and its diagnostic k."""
    loo = az.loo(found, var_name="x", pointwise=True)
    each = loo.elpd_i if "elpd_i" in loo else loo.loo_i  # ArviZ since, and before, version 1
    return torch.tensor(each.values), torch.tensor(loo.pareto_k.values)


def predicted(draws, data):
    """Of each word, log p(word), averaged over draws."""
    scores = draws.map(data, lambda hmm: hmm.log_prob(data.values).double()).flatten(0, 1)
    return scores.logsumexp(0) - math.log(len(scores))


# eight draws of the guide at each step, side by side, which takes hardly longer than one
elbo = Trace_ELBO(num_particles=8, vectorize_particles=True, max_plate_nesting=1)
num_draws = 50 if SMOKE else 500
found, fits, loo, held = {}, {}, {}, {}
warnings.filterwarnings("ignore", message="Estimated shape parameter")  # k is printed below
print("states     BIC   nats a word: left out  held out   words with k > 0.7")
for num_states in range(1, 3 if SMOKE else 6):
    module = TabularHMM(num_states, categorical(26))
    em = fit_em(module, train, restarts=8, num_steps=10 if SMOKE else 200)
    model = MarginalModel(module)
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=em.start), init_scale=0.1)
    svi = fit_svi(model, guide, train, num_steps=5 if SMOKE else 300, learning_rate=0.06, elbo=elbo)
    fits[num_states] = model, svi
    draws = PosteriorDraws.of(svi, num_draws=num_draws)
    found[num_states] = to_arviz(draws, train, per_step=True)
    loo[num_states], k = left_out(found[num_states])
    held[num_states] = predicted(draws, held_out)
    print(
        f"{num_states:6d} {metrics.bic(em, train):7.0f} {loo[num_states].mean():23.2f} "
        f"{held[num_states].mean():9.2f} {(k > 0.7).sum():11d} of {num_train}"
    )

# %% [markdown]
# The two columns on the right come from different words, so that their levels differ by chance;
# what is to be compared is how they rise. The difference of two models is a sum over words, and has
# a standard error of its own, smaller than that of either score.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
counts = list(found)
for label, scores, colour in (("left out", loo, "C0"), ("held out", held, "C1")):
    gains = [scores[count] - scores[1] for count in counts]
    errors = [2 * gain.std() / len(gain) ** 0.5 for gain in gains]
    means = [gain.mean() for gain in gains]
    axes.errorbar(counts, means, errors, marker="o", capsize=3, color=colour, label=label)
axes.set_xticks(counts)
axes.set_xlabel("number of states")
axes.set_ylabel("nats a word, beyond one state")
axes.legend(frameon=False)
plt.show()

for before, after in itertools.pairwise(counts):
    gain = loo[after] - loo[before]
    error = gain.std() * len(gain) ** 0.5
    print(f"from {before} to {after} states: {gain.sum():6.1f} nats in all, ± {error:.1f}")

# %% [markdown]
# Leaving out agrees with holding out, and costs no data. There is no true number of states here:
# two are far better than one, and three than two, a fourth and a fifth gain less. BIC, which counts
# parameters instead of asking what is predicted, stops at three. (Leaving out weighs the draws of
# one fit again. It cannot show that without a word another optimum might have been found: a reason
# to hold out some words all the same.)
#
# Words are exchangeable, and so they can be left out. Letters of a word are not: each is predicted
# from those before it, and `x_step` says how well. It shows where a model is surprised.

# %%
best = max(found)
for n in range(3):
    print(f"\n{words[n]:12s}" + "".join(f"{letter:>6s}" for letter in words[n]))
    for num_states in (1, best):
        steps = found[num_states].log_likelihood["x_step"].mean(("chain", "draw")).values[n]
        print(f"{num_states} states    " + "".join(f"{x:6.1f}" for x in steps[: len(words[n])]))

# %% [markdown]
# ## SVI beside NUTS
#
# `AutoNormal` takes parameters to be independent of each other. Its draws, weighted by
# $p(x, \theta) / q(\theta)$, would be draws of the posterior; where a few of them have all the
# weight, it is far from it. `sample_stats` has both logarithms.

# %%
for num_states, each in found.items():
    stats = each.sample_stats
    weights = torch.tensor((stats["lp"] - stats["log_guide"]).values).softmax(-1)
    print(f"{num_states} states: {1 / weights.square().sum():6.1f} of {num_draws} draws count")

# %% [markdown]
# Predictions are good all the same, as we have seen. For intervals we ask a sampler, with two
# states: two chains of NUTS, start_time at draws of the guide, so that they need not look for the
# posterior first. Nothing says which state is number 0, and chains begun anywhere would choose by
# chance; here we exchange the names in the second start, to see what that does.

# %%
model, svi = fits[2]
starts = PosteriorDraws.of(svi, num_draws=2)
starts = starts.permute_states(torch.tensor([[[0, 1], [1, 0]]]), train)
begin = {name: biject_to(svi.supports[name]).inv(value[0]) for name, value in starts.values.items()}
warnings.filterwarnings("ignore", message="num_chains")  # one after the other is good enough
sampler = MCMC(
    NUTS(model, max_tree_depth=3 if SMOKE else 4),
    num_samples=10 if SMOKE else 100,
    warmup_steps=10 if SMOKE else 60,
    num_chains=2,
    initial_params=begin,
    disable_progbar=True,
)
sampler.run(train)
chains = PosteriorDraws.of(sampler)
aligned = chains.aligned(train)

# %% [markdown]
# ## Names of states
#
# $\hat R$ compares chains with each other, and is near one where they agree. Of the parameters it
# says that they do not: their states have other names. `PosteriorDraws.aligned` renames
# the states of every draw, by the overlap of their posteriors, and then they agree.


# %%
def worst(values):
    """The largest R-hat of numbers ``(chains, draws, ...)``."""
    dims = ["chain", "draw", *(f"dim_{i}" for i in range(values.dim() - 2))]
    each = xarray.Dataset({"it": (dims, values.double().numpy())})
    return float(az.rhat(each)["it"].max())


for name in chains.values:
    before, after = worst(chains.values[name]), worst(aligned.values[name])
    print(f"{name:22s} largest R-hat {before:5.2f}, of aligned states {after:5.2f}")

figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
for axes, each, title in zip(panels, (chains, aligned), ("as drawn", "aligned")):
    for k, probs in enumerate(each.values["module.emission.probs"].mean((0, 1))):
        axes.bar(torch.arange(26) + 0.4 * k, probs, width=0.4, label=f"state {k}")
    axes.set_xticks(torch.arange(26) + 0.2, "abcdefghijklmnopqrstuvwxyz")
    axes.set_title(f"average of all draws, states {title}")
panels[0].set_ylabel("probability of a letter")
panels[1].legend(frameon=False)
plt.show()

# %% [markdown]
# Averaged as they are drawn, two good chains give two states that are alike, and neither was ever
# drawn. Aligned, they are vowels and consonants.
#
# Better still are quantities that need no names. `to_arviz` adds a few to the posterior: the
# evidence, the shares of steps spent in the states in order of size, how many states that amounts
# to, and the entropy of a move. `summary` is their table, by which to judge a sampler.

# %%
inference_data.summary(to_arviz(chains, train))

# %% [markdown]
# And beside it that of the guide (one chain has no $\hat R$, and its draws are independent). The
# means agree. The guide is too sure of how much the states are used, by a factor of two: it does
# not know that parameters can make up for each other. For the same reason its evidence varies
# somewhat too much.

# %%
guided, sampled = to_arviz(svi, train, num_draws=num_draws), to_arviz(chains, train)
print("                   SVI: mean ± sd     NUTS: mean ± sd")
for name in inference_data.INVARIANTS:
    row = f"{name:17s}"
    for each in (guided, sampled):
        values = torch.tensor(each.posterior[name].values)
        values = values[..., 0] if values.dim() > 2 else values  # the largest share
        row += f"{values.mean():11.2f} ± {values.std():6.3f}"
    print(row)

# %% [markdown]
# ## Rotations
#
# A `DenseHMM` has one more symmetry: its probabilities depend on inner products of embeddings,
# which can be rotated together. With two dimensions the posterior of an embedding is a ring, and
# restarts of MAP end anywhere on it. `AutoNormal` sits at one place of the ring. `RotationGuide`
# fits what rotation leaves alone, and turns every draw at random; its density is exact, so that the
# bounds can be compared.

# %%
dense = MarginalModel(DenseHMM(2, 26, 2))
point = fit_map(
    dense, train, restarts=4 if SMOKE else 12, num_steps=20 if SMOKE else 300, learning_rate=0.1
)
guides = {
    "AutoNormal": AutoNormal(dense, init_loc_fn=init_to_value(values=point.start), init_scale=0.1),
    "RotationGuide": RotationGuide(
        dense, point.start, autoguide=partial(AutoNormal, init_scale=0.1)
    ),
}
clouds = {}
for name, guide in guides.items():
    svi = fit_svi(dense, guide, train, num_steps=5 if SMOKE else 300, learning_rate=0.04, elbo=elbo)
    clouds[name] = PosteriorDraws.of(svi, num_draws=num_draws)
    stats = to_arviz(clouds[name], train).sample_stats
    bound = (stats["lp"] - stats["log_guide"]).values
    print(f"{name:13s} bound {bound.mean():8.1f} ± {bound.std() / num_draws**0.5:.1f} nats")

# %% [markdown]
# The picture shows one embedding, that of the state of consonants as it emits. The cross is the
# average of the draws: inside the ring, where no draw is. (Rings differ in radius, for a longer
# `emit` makes up for a shorter `symbol`.)

# %%
vowels = torch.tensor([0, 4, 8, 14, 20])
ends = point.restarts
good = ends.final < ends.final.min() + 1.0  # the others ended at other optima
print(f"{good.sum()} of {len(good)} restarts found the best optimum")
points = {name: value[None, good] for name, value in ends.values.items()}
panels = {"restarts of MAP": PosteriorDraws(dense, points)} | clouds

figure, row = plt.subplots(1, 3, figsize=(9, 3.2), sharex=True, sharey=True, layout="constrained")
for axes, (name, draws) in zip(row, panels.items()):
    draws = draws.aligned(train)
    spoken = draws.map(train, lambda hmm: hmm.emission.probs[:, 0][..., vowels].sum(-1))
    emit = draws.values["module.emit"][0, :, spoken.mean((0, 1)).argmin()]  # (S, 2)
    axes.scatter(*emit[:500].T, s=10, alpha=0.6)
    axes.scatter(*emit.mean(0), marker="x", color="black", s=60)
    axes.set_title(name)
    axes.set_aspect("equal")
row[0].set_ylabel("second dimension")
row[1].set_xlabel("first dimension")
plt.show()

# %% [markdown]
# Whatever is computed from probabilities is safe from rotations, and after `aligned` from names:
# `PosteriorDraws.map` applies any function of an HMM to all draws, a few at a time.


# %%
def stay(hmm):
    return hmm.log_transition.exp()[:, 0].diagonal(dim1=-2, dim2=-1)  # (b, K)


for name, draws in {"standard, NUTS": chains, "dense, SVI": clouds["RotationGuide"]}.items():
    draws = draws.aligned(train)
    spoken = draws.map(train, lambda hmm: hmm.emission.probs[:, 0][..., vowels].sum(-1))
    order = spoken.mean((0, 1)).argsort(descending=True)
    ends = draws.map(train, stay).flatten(0, 1)[:, order].quantile(torch.tensor([0.05, 0.95]), 0)
    for label, (low, high) in zip(("vowel", "consonant"), ends.T.tolist()):
        print(f"{name:15s} after a {label:9s} another: between {low:.2f} and {high:.2f}")
