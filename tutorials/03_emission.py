# %% [markdown]
# # 3. Your own emission distribution, and missing data
#
# A collar on a fox measures three quantities every hour, and often fails. We first fit a built-in
# emission, normal vectors. Then we write the emission that such data call for, independent Gamma,
# von Mises and normal components, in twelve lines, and fit it by EM, MAP and SVI. Missing values
# are integrated out, never imputed; afterwards we compute their posterior distribution.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $z_t$ | `states` | 0 rests, 1 forages, 2 travels |
# | $x_t$ | `data.values[:, t]` | step length (km), turning angle (radians), temperature (°C) |
# | one component missing | `NaN` in `values` | a sensor failed |
# | the whole step missing | `data.observed` is False | all the sensors failed |
# | $p(x_t \mid z_t = k)$ | `hmm.emission` | batched over the three states |
#
# The data are simulated from known parameters, so that the fits can be checked.

# %%
import math
import os
from pathlib import Path

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.distributions import Dirichlet, Gamma, LogNormal, Normal, VonMises
from pyro.infer.autoguide import AutoNormal, init_to_value
from pyro.nn import PyroModule, PyroSample

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    PosteriorDraws,
    Sequences,
    TabularHMM,
    fit_em,
    fit_map,
    fit_svi,
    freeze,
    gamma,
    metrics,
    movement,
    normal,
    plots,
    queries,
    sticky,
    streams,
    von_mises,
)
from pyrohmm.distributions.observation import Streams

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

names = ["rests", "forages", "travels"]
sensors = ["length", "turn", "temperature"]

# %% [markdown]
# ## Writing an emission
#
# An emission is a `PyroModule` that is constructed with the number of states $K$ and whose call
# returns a distribution batched over the states. Any Pyro distribution will do. `Streams` joins
# several distributions into the components of one vector and leaves out components that are `NaN`.
# A prior is a `PyroSample`; `to_event(1)` declares its $K$ values as one event.


# %%
class Movement(PyroModule):
    def __init__(self, num_states):
        super().__init__()
        one = torch.ones(num_states)
        self.mean_length = PyroSample(LogNormal(-one, 1.0).to_event(1))
        self.shape = PyroSample(LogNormal(one, 0.7).to_event(1))
        self.straightness = PyroSample(LogNormal(0 * one, 1.0).to_event(1))
        self.warmth = PyroSample(Normal(20 * one, 3.0).to_event(1))
        self.spread = PyroSample(LogNormal(one, 0.7).to_event(1))

    def forward(self):
        length = Gamma(self.shape, self.shape / self.mean_length)
        turn = VonMises(torch.zeros(()), self.straightness)
        return Streams([length, turn, Normal(self.warmth, self.spread)])


# %% [markdown]
# ## Data
#
# `TabularHMM` combines the emission with a Markov chain and holds the priors of the chain; `sticky`
# favours self-transitions. Conditioned on values for all its sites, the module is the true HMM. We
# sample a training set and a held-out set from it.

# %%
module = TabularHMM(3, Movement, transition_concentration=sticky(3, stay=10.0))

true_values = {
    "initial": torch.tensor([0.6, 0.3, 0.1]),
    "transition": torch.tensor([[0.85, 0.12, 0.03], [0.10, 0.80, 0.10], [0.03, 0.17, 0.80]]),
    "emission.mean_length": torch.tensor([0.10, 0.50, 1.80]),
    "emission.shape": torch.tensor([1.2, 1.5, 4.0]),
    "emission.straightness": torch.tensor([0.3, 0.8, 6.0]),
    "emission.warmth": torch.tensor([23.0, 20.0, 18.0]),
    "emission.spread": torch.tensor([1.5, 2.0, 2.0]),
}


def true_hmm(lengths, observed=None):
    return pyro.condition(module, data=true_values)(lengths, observed)


def track(num_foxes):
    """Sequences with missing values; the complete values; the states, -1 after the end."""
    lengths = torch.randint(48, 121, (num_foxes,))  # hours: two to five days
    whole, states = true_hmm(lengths).sample_with_states()
    failed = torch.rand(whole.shape) < torch.tensor([0.15, 0.15, 0.30])
    failed |= torch.rand(failed.shape[:2]).unsqueeze(-1) < 0.08  # the battery: all at once
    values = whole.masked_fill(failed, torch.nan)
    ended = torch.arange(whole.size(1)) >= lengths.unsqueeze(-1)
    seen = Sequences(values, lengths, observed=~failed.all(-1))
    return seen, whole, states.masked_fill(ended, -1)


data, _, _ = track(8 if SMOKE else 20)
held_out, whole, states = track(4 if SMOKE else 30)
truth = true_hmm(held_out.lengths, held_out.observed)
print(data)
print(f"from {data.lengths.min()} to {data.lengths.max()} hours")
for name, column in zip(sensors, data.values[data.observed].unbind(-1)):
    print(f"{name:11s} missing in {column.isnan().double().mean():.0%} of the observed hours")

# %% [markdown]
# (The true states are kept apart. As `Sequences(..., labels=states)` they would count as observed,
# and a fit would use them.)
#
# ## A built-in emission: normal vectors
#
# With a normal emission every M-step has a closed form, with missing values too. EM finds a local
# optimum, so it runs ten restarts as one batch, each initialised by k-means. The prior is set to
# the scale of the data.

# %%
columns = data.values[data.observed]
centre = columns.nanmean(0)
variance = (columns - centre).square().nanmean(0)
family = normal(3, loc=centre, rate=variance)
rough = fit_em(TabularHMM(3, family), data, restarts=2 if SMOKE else 10)
print(rough.summary())

# %% [markdown]
# ## Our emission, by EM
#
# `Movement` has no closed-form M-step: its parameters are updated by gradient ascent on the
# expected log joint, and everything else stays exact. The restarts are sampled from the prior, so a
# prior on the right scale saves restarts.

# %%
em = fit_em(module, data, restarts=2 if SMOKE else 3, num_iterations=3 if SMOKE else 100)
print(em.summary())

# %% [markdown]
# ## By MAP
#
# `MarginalModel` makes a Pyro model of the module. `fit_map` maximises the same objective as EM, by
# gradient steps. From its own restarts it should reach the same optimum.

# %%
model = MarginalModel(module)
point = fit_map(
    model,
    data,
    num_iterations=5 if SMOKE else 250,
    learning_rate=0.1,
    restarts=2 if SMOKE else 3,
)
print(point.summary())
print(f"lowest loss: EM {em.restarts.final.min():.2f}, MAP {point.restarts.final.min():.2f} nats")

# %% [markdown]
# ## By SVI
#
# Only the guide changes: a normal distribution for each parameter, initialised at the MAP estimate.

# %%
guide = AutoNormal(model, init_loc_fn=init_to_value(values=point.parameters), init_scale=0.03)
svi = fit_svi(model, guide, data, num_iterations=5 if SMOKE else 400, learning_rate=0.01)
print(svi.summary())

# %% [markdown]
# ## Comparison with the truth, on held-out data
#
# The log-likelihood under the true parameters is the reference. The score of SVI is that of its
# posterior predictive distribution, $\log \tfrac1S \sum_s p(x \mid \theta_s)$, with $S$ samples of
# the parameters.


# %%
def score(hmm):
    """Log predictive density in nats per observed hour; the HMM may be of S samples."""
    totals = hmm.log_prob(held_out.values).sum(-1).flatten()
    return ((totals.logsumexp(0) - math.log(len(totals))) / held_out.num_observed).item()


def accuracy(hmm):
    return metrics.one_to_one_accuracy(hmm.viterbi(held_out.values), states)


samples = PosteriorDraws.of(svi, num_draws=10 if SMOKE else 200).hmm(held_out)
rows = {
    "truth": (truth, truth),
    "normal, EM": (rough.hmm(held_out),) * 2,
    "ours, EM": (em.hmm(held_out),) * 2,
    "ours, MAP": (point.hmm(held_out),) * 2,
    "ours, SVI": (samples, svi.hmm(held_out)),
}
print("          nats per hour  states right")
for name, (hmm, one) in rows.items():
    print(f"{name:10s} {score(hmm):13.4f} {accuracy(one):13.1%}")

# %% [markdown]
# Our emission is close to the score of the truth. The normal emission is not, and more data would
# not help, because the model is wrong. (For SVI, the medians of the parameters decode the states.)
#
# ## Parameters and credible intervals
#
# The labels of states are arbitrary: `metrics.align` finds the permutation under which a decoding
# agrees best with the true states, and we permute the parameters accordingly. `AutoNormal` assumes
# independent parameters, so its intervals tend to be too narrow.


# %%
def state_order(hmm):
    """The state of the fit that matches each true state."""
    return metrics.align(hmm.viterbi(held_out.values), states, num_states=3).argsort()


def ordered(values, order):
    """Parameters with their states permuted."""
    new = {name.removeprefix("module."): value[..., order] for name, value in values.items()}
    return new | {"transition": new["transition"][..., order, :]}


by_em = ordered(em.parameters, state_order(em.hmm(held_out)))
map_order = state_order(point.hmm(held_out))
by_map = ordered(point.parameters, map_order)
samples = ordered(svi.samples(10 if SMOKE else 500), map_order)
covered = []
print(f"{'':20s}truth    EM   MAP  SVI, 90 %")
for name, true in true_values.items():
    low, high = samples[name].quantile(torch.tensor([0.05, 0.95]), 0)
    covered += ((low <= true) & (true <= high)).flatten().tolist()
    columns = torch.stack([true, by_em[name], by_map[name], low, high], -1).reshape(-1, 5)
    for k, (a, b, c, d, e) in enumerate(columns.tolist()):
        at = f"{k // 3} to {k % 3}" if name == "transition" else k
        label = f"{name.removeprefix('emission.')} {at}"
        print(f"{label:19s} {a:5.2f} {b:5.2f} {c:5.2f}  {d:.2f} to {e:.2f}")
print(f"{sum(covered)} of {len(covered)} 90 % intervals contain the truth")

# %% [markdown]
# ## Posterior of the missing values
#
# `queries.observation_marginals` computes the marginal of each observation given all others, before
# and after it; for a missing value this is its posterior. The mean minimises the expected squared
# error, and the variance measures the uncertainty. The true values are known here.

# %%
hmm = point.hmm(held_out)
missing = queries.observation_marginals(hmm, held_out.values)
holes = held_out.values.isnan() & (states >= 0).unsqueeze(-1)
by_truth = queries.observation_marginals(truth, held_out.values).mean
print("root mean squared error       train mean   MAP  truth")
for i, unit in ((0, "km"), (2, "°C")):
    hole = holes[..., i]
    errors = [
        (guess - whole[..., i])[hole].square().mean().sqrt().item()
        for guess in (centre[i], missing.mean[..., i], by_truth[..., i])
    ]
    label = f"{sensors[i]}, {hole.sum()} holes"
    print(f"{label:25s} {unit}  {errors[0]:11.2f} {errors[1]:5.2f} {errors[2]:6.2f}")

# %% [markdown]
# ## One fox
#
# The grey track is the true one. A dot is an hour with measurements, coloured by its most probable
# state. The right panels show the measured values; open circles with bars are the posterior mean
# and standard deviation of missing values.

# %%
visits = torch.stack([(states == k).sum(-1) for k in range(3)])
fox = int(visits.amin(0).argmax())  # the one that does a bit of everything
hours = int(held_out.lengths[fox])
order = state_order(hmm)
path = order.argsort()[hmm.viterbi(held_out.values)[fox, :hours]]
posterior = hmm.posterior(held_out.values).state_probs[fox, :hours][:, order]
shades = [f"C{k}" for k in range(3)]

figure = plt.figure(figsize=(10, 5), layout="constrained")
grid = figure.add_gridspec(3, 2, width_ratios=[1, 1.5])
axes = figure.add_subplot(grid[:, 0])
heading = whole[fox, :hours, 1].cumsum(0)
steps = whole[fox, :hours, :1] * torch.stack([heading.cos(), heading.sin()], -1)
place = steps.cumsum(0)
axes.plot(*place.T, color="0.75", linewidth=1)
for k, name in enumerate(names):
    here = (path == k) & held_out.observed[fox, :hours]
    axes.scatter(*place[here].T, s=(70, 16, 16)[k], color=shades[k], label=name, zorder=2 + k)
axes.set_aspect("equal", adjustable="datalim")
axes.set_xlabel("km east")
axes.set_ylabel("km north")
axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))

clock = torch.arange(hours)
for row, (i, label) in enumerate(((0, "km an hour"), (2, "°C"))):
    axes = figure.add_subplot(grid[row, 1])
    axes.scatter(clock, held_out.values[fox, :hours, i], s=10, color=[shades[k] for k in path])
    hole = holes[fox, :hours, i]
    middle = missing.mean[fox, :hours, i][hole]
    width = missing.variance[fox, :hours, i][hole].sqrt()
    axes.errorbar(
        clock[hole], middle, width, fmt="o", markersize=3, color="0.6", markerfacecolor="white",
        linewidth=0.8, zorder=0,
    )  # fmt: skip
    axes.set_ylabel(label)
    axes.set_xlim(0, hours - 1)
    axes.tick_params(labelbottom=False)
axes = plots.state_probs(posterior, names, axes=figure.add_subplot(grid[2, 1]))
axes.get_legend().remove()
axes.set_xlabel("hour")
if Path("figures").is_dir() and not SMOKE:
    figure.savefig("figures/fox.png", dpi=150)
    print("the picture is figures/fox.png")
plt.show()

# %% [markdown]
# ## From locations
#
# Most collars record locations, not steps. `movement` makes step lengths and turning angles of
# them, missing where a location is missing, here beside the one in twenty that is lost. Families
# that come with the package then take the place of ours, and `plots.track` draws the map.

# %%
everywhere = []
for row, hours_of_row in zip(whole, held_out.lengths):
    length, turn, _ = row[:hours_of_row].unbind(-1)
    heading = turn.cumsum(0)
    step = length.unsqueeze(-1) * torch.stack([heading.cos(), heading.sin()], -1)
    everywhere.append(step.cumsum(0))
places = torch.cat(everywhere)
places[torch.rand(len(places)) < 0.05] = torch.nan
foxes = torch.arange(len(everywhere)).repeat_interleave(held_out.lengths)
tracks = movement(places[:, 0], places[:, 1], animal=foxes, plane=True)
print(tracks)
chain = {"transition_concentration": sticky(3, stay=10.0)}
walk = fit_em(
    TabularHMM(3, streams(gamma(0), von_mises(0)), **chain), tracks, restarts=2 if SMOKE else 10
)
on_map = walk.hmm(tracks)
lengths, turns = on_map.emission.parts
order = lengths.mean.argsort()  # from the shortest steps to the longest
found = {"mean_length": lengths.mean, "straightness": turns.concentration}
for name, value in found.items():
    pairs = zip(value[order].tolist(), true_values[f"emission.{name}"].tolist())
    print(f"{name:13s}", ", ".join(f"{ours:.2f} (truth {true:.2f})" for ours, true in pairs))
path = order.argsort()[on_map.viterbi(tracks.values)[fox]]
axes = plots.track(tracks.locations[fox], path, names, plane=True)
axes.set(xlabel="km east", ylabel="km north")
plt.show()

# %% [markdown]
# ## Transition probabilities that depend on the hour of the day
#
# Foxes rest by day. Covariates are part of the data, `Sequences(..., covariates=)` of shape
# $(N, T, C)$, and are passed to a module whose `forward` takes them as its third argument. With
# `transition_per_step` the HMM takes one transition matrix per step. Here daylight $u_t$, from $-1$
# at midnight to $1$ at noon, shifts the logits of every row towards rest:
#
# $$p(z_{t+1} = j \mid z_t = i, u_{t+1}) \propto A_{ij} \, e^{\beta u_{t+1} [j = 0]}$$


# %%
class Daily(HMMModule):
    def __init__(self):
        super().__init__()
        self.initial = PyroSample(Dirichlet(torch.ones(3)))
        self.transition = PyroSample(Dirichlet(sticky(3, stay=10.0)).to_event(1))
        self.slope = PyroSample(Normal(0.0, 2.0))
        self.emission = Movement(3)

    def forward(self, lengths, observed, covariates):
        to_rest = torch.tensor([1.0, 0.0, 0.0])
        tilt = self.slope * covariates[:, 1:, :1, None] * to_rest  # (N, T - 1, 1, K)
        log_transition = (self.transition.log() + tilt).log_softmax(-1)
        return HMM(
            self.initial.log(),
            log_transition,
            self.emission(),
            lengths,
            observed,
            transition_per_step=True,
        )


# %% [markdown]
# The emission is already fitted: `freeze` fixes it at the MAP estimate, and with it the labels of
# the states. The remaining parameters are fitted to new foxes.

# %%
lengths = torch.full((6 if SMOKE else 30,), 72)
hour = torch.arange(72).expand(len(lengths), 72) + torch.randint(24, (len(lengths), 1))
daylight = -(2 * torch.pi * hour / 24).cos().unsqueeze(-1)
daily = Daily()
true_daily = pyro.condition(daily, data=true_values | {"slope": torch.tensor(1.5)})
seen, _ = true_daily(lengths, None, daylight).sample_with_states()
diary = Sequences(seen, lengths, covariates=daylight)

for name, value in by_map.items():
    if name.startswith("emission."):
        freeze(daily, name, value)
model = MarginalModel(daily)
by_hour = fit_map(model, diary, num_iterations=5 if SMOKE else 200, learning_rate=0.1)
guide = AutoNormal(model, init_loc_fn=init_to_value(values=by_hour.parameters), init_scale=0.05)
svi_by_hour = fit_svi(model, guide, diary, num_iterations=5 if SMOKE else 200)
print(by_hour.summary())
slopes = svi_by_hour.samples(10 if SMOKE else 500)["module.slope"]
low, high = slopes.quantile(torch.tensor([0.05, 0.95])).tolist()
print(f"slope: truth 1.50, MAP {by_hour.parameters['module.slope']:.2f}, ", end="")
print(f"SVI 90 % between {low:.2f} and {high:.2f}")
