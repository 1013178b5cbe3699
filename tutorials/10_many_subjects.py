# %% [markdown]
# # 10. Many subjects: hierarchical models
#
# Animals, patients or machines are alike, but not the same. One model for all of them ignores the
# differences; one model for each has too little data. A hierarchical model gives each subject
# parameters of its own and learns from all subjects how much these differ, so that subjects of whom
# little is known borrow from the others. In Pyro this is a latent variable inside the plate of
# sequences.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $x_n$ | `data.values[n]` | counts of subject n, such as steps walked in a minute |
# | $z_{n,t}$ | states | resting or active |
# | $\mu_k, \sigma$ | `level`, `spread` | log rate of state k in the population; its spread |
# | $b_n$ | `effect` | how much the log rates of subject n differ |
# | $A_n$ | `transition` | the transition matrix of subject n |

# %%
import os
import warnings

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.distributions import Dirichlet, HalfNormal, Normal, Poisson
from pyro.infer.autoguide import AutoNormal

from pyrohmm import HMM, Sequences, fit_map, fit_svi, metrics, plots, to_arviz

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ announces its next version
    import arviz as az

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## Subjects
#
# Twenty-four subjects, observed for eight to eighty minutes. Their true effects have a standard
# deviation of 0.5, so that the most active has some five times the rate of the least active.

# %%
num_subjects = 24
lengths = torch.linspace(8, 80, num_subjects).long()[torch.randperm(num_subjects)]
true_effect = 0.5 * torch.randn(num_subjects)
true_level = torch.tensor([0.0, 2.0])
true_transition = Dirichlet(torch.tensor([[16.0, 4.0], [4.0, 16.0]])).sample((num_subjects,))
half = torch.full((2,), 0.5).log()
truth = HMM(
    half,
    true_transition.log(),
    Poisson((true_level + true_effect[:, None]).exp()),
    lengths,
)
data = Sequences(truth.sample(), lengths)
print(data)

# %% [markdown]
# ## Two models
#
# `pooled` gives all subjects the same rates. `hierarchical` gives each an effect of its own and
# learns the spread of the effects. The plate takes `data.total` and `data.indices`, so that a
# minibatch has the variables of its own subjects; without minibatches
# `pyro.plate("subjects", len(data))` is enough.


# %%
def activity(kind):
    def model(data):
        level = pyro.sample("level", Normal(true_level.mean(), 1.5).expand([2]).to_event(1))
        if kind == "hierarchical":
            spread = pyro.sample("spread", HalfNormal(1.0))
        with pyro.plate("subjects", data.total, subsample=data.indices):
            rate = level
            if kind != "pooled":
                effect = pyro.sample("effect", Normal(0.0, spread))  # (N,)
                rate = level + effect.unsqueeze(-1)  # (N, K)
            transition = pyro.sample(
                "transition", Dirichlet(torch.tensor([[4.0, 1.0], [1.0, 4.0]])).to_event(1)
            )
            hmm = HMM(half, transition.log(), Poisson(rate.exp()), data.lengths, data.observed)
            pyro.sample("counts", hmm, obs=data.values)
        return hmm

    return model


def start_in_order(site):
    """The resting state first; all else at the median of its prior."""
    if site["name"] == "level":
        return torch.tensor([0.0, 2.0])
    return pyro.infer.autoguide.init_to_median(site)


fits = {}
for kind in ("pooled", "hierarchical"):
    model = activity(kind)
    guide = AutoNormal(model, init_loc_fn=start_in_order, init_scale=0.1)
    fits[kind] = fit_svi(
        model, guide, data, num_iterations=10 if SMOKE else 450, learning_rate=0.03, batch_size=12
    )
    print(f"{kind:13s} loss {fits[kind].losses[-50:].mean():8.1f} nats")

# %% [markdown]
# ## Shrinkage
#
# `fit.mean()` and `fit.quantiles()` are those of the guide, by the name of the variable. The naive
# estimate of a subject alone is the logarithm of its mean count, less that of all subjects. Each
# arrow leads from there to the mean under the hierarchical model, which knows how long the subject
# was active and how much subjects differ. Estimates of short sequences move most.

# %%
together = fits["hierarchical"].mean()["effect"]
together, true_effect = together - together.mean(), true_effect - true_effect.mean()
alone = ((data.values * data.exists).sum(-1) / lengths).clamp(min=0.1).log()
alone -= alone.mean()
figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.scatter(lengths, alone, s=18, color="0.6", label="each subject alone")
axes.scatter(lengths, together, s=18, color="C0", label="hierarchical")
axes.scatter(lengths, true_effect, marker="_", s=90, color="C3", label="truth")
for length, before, after in zip(lengths, alone, together):
    axes.annotate("", (length, after), (length, before), arrowprops={"arrowstyle": "->", "lw": 0.6})
axes.set_xlabel("number of steps of the subject")
axes.set_ylabel("effect on the log rate")
axes.legend(frameon=False)
plt.show()

for name, effect in (("alone", alone), ("hierarchical", together)):
    error = (effect - true_effect).square()
    short = error[lengths < 30].mean().sqrt()
    print(f"{name:13s} root mean squared error {error.mean().sqrt():.2f}, short ones {short:.2f}")
low, middle, high = fits["hierarchical"].quantiles([0.05, 0.5, 0.95])["spread"]
print(f"spread of the effects: {middle:.2f}, 90 % interval {low:.2f} to {high:.2f} (truth 0.5)")

# %% [markdown]
# ## Leaving out subjects
#
# Sequences are exchangeable, so that `az.loo` leaves out one subject at a time. There are two
# questions. `to_arviz` answers how well the *fitted* effects predict their own subject:
# leaving out a subject then leaves its effect to the prior, of which importance weights know
# little, and a large $\hat k$ says so. The other, how well a *new* subject is predicted, needs no
# weights: its effect is averaged over its prior. `cross_validate` does that, with fits to the other
# subjects.

# %%
posteriors = {
    kind: to_arviz(fit, data, num_draws=50 if SMOKE else 500) for kind, fit in fits.items()
}
warnings.filterwarnings("ignore", message="Estimated shape parameter")  # k is printed below
for kind, posterior in posteriors.items():
    estimate = az.loo(posterior, pointwise=True)
    k = torch.tensor(estimate.pareto_k.values)
    score = float(estimate.elpd if "elpd" in estimate else estimate.elpd_loo)
    print(f"{kind:13s} loo {score:8.1f} nats, k > 0.7 for {(k > 0.7).sum():2d} of {num_subjects}")

# %%
pyro.set_rng_seed(1)
for kind in fits:

    def fit(part, kind=kind):
        steps = 5 if SMOKE else 40
        return fit_map(activity(kind), part, num_iterations=steps, start=start_in_order)

    found = metrics.cross_validate(
        fit, data, num_folds=4, generator=torch.Generator().manual_seed(0)
    )
    print(f"{kind:13s} new subjects {found.log_evidence.sum():8.1f} nats")

# %% [markdown]
# A single rate for all cannot explain the differences, neither of the subjects that were fitted nor
# of new ones, whose effects are unknown but not how much they may differ.
#
# ## Intervals of all subjects
#
# In ArviZ's container the dimension of subjects is called `sequence`.

# %%
order = together.argsort()
subjects = posteriors["hierarchical"].posterior["effect"].isel(sequence=order.tolist())
subjects = subjects - subjects.mean("sequence")
az.plot_forest(subjects.to_dataset(), combined=True, figsize=(6, 6))
axes = plt.gca()
axes.plot(true_effect[order.flip(0)], sorted(axes.get_yticks()), "|", color="C3", markersize=9)
axes.set_title("effects: median, 50 % and 94 % intervals; truth in red")
plt.show()

# %% [markdown]
# ## The future of one subject
#
# `fit.hmm(data)` has the parameters of each subject; `data.batch` picks some of them.

# %%
one = data.batch(lengths.argmax().reshape(1))
past = one.values[0]
single = fits["hierarchical"].hmm(one)
single = single.replace(
    log_transition=single.log_transition[0],
    emission=Poisson(single.emission.rate[0]),
    lengths=one.lengths[0],
    observed=None,
)
axes = plots.forecast(single.forecast(past, 15), past)
axes.set_ylabel("count")
plt.show()

# %% [markdown]
# A subject who was not in the data has no fitted effect. `fit.hmm(other_data)` says so, and
# `metrics.held_out_log_evidence` and `PosteriorDraws.for_new` average over what it may be.

# %%
try:
    fits["hierarchical"].hmm(data[:3])
except ValueError as error:
    print(error)
