# %% [markdown]
# # 3. Your own emission, and data with holes
#
# A collar on a fox measures three things every hour, and often fails to. We first fit what comes
# with the package, normal vectors; then we write the emission that such data ask for, a Gamma
# distribution beside a von Mises distribution beside a normal one, in twelve lines, and fit it in
# three ways: EM, MAP and SVI. Holes in the data are integrated out, never filled in; afterwards we
# ask the model what they may have been.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $z_t$ | `states` | 0 rests, 1 forages, 2 travels |
# | $x_t$ | `data.values[:, t]` | step length (km), turning angle (radians), temperature (°C) |
# | not measured | `NaN` in `values` | a sensor failed |
# | nothing measured | `data.observed` is False | all the sensors failed |
# | $p(x_t \mid z_t = k)$ | `hmm.emission` | batched over the three states |
#
# The fox is made up: we draw its data from parameters that we know, and so we can check.

# %%
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
    Sequences,
    TabularHMM,
    fit_em,
    fit_map,
    fit_svi,
    freeze,
    metrics,
    normal,
    plots,
    queries,
    sticky,
)
from pyrohmm.distributions.observation import Streams

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

names = ["rests", "forages", "travels"]
sensors = ["length", "turn", "temperature"]

# %% [markdown]
# ## An emission of your own
#
# An emission is a `PyroModule` that is made with the number of states $K$, and returns, when it is
# called, a distribution batched over the states. Any distribution of Pyro will do. `Streams` puts
# several side by side in one vector; it is also what knows how to leave out a component that is
# `NaN`. A prior is a `PyroSample`; `to_event(1)` says that its $K$ values are one thing.


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
# `TabularHMM` puts the emission onto a Markov chain; it also holds the priors of the chain, which
# likes to stay where it is. Given values for all its sites it is the truth, from which we draw:
# foxes for the fits, and others, held out, to judge them.

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
    """Sequences with holes; the same without holes; the states, -1 after the end."""
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
# (We keep the true states apart. Given as `Sequences(..., labels=states)` they would count as
# known, and a fit would use them.)
#
# ## A family of the package: normal vectors
#
# With a normal emission every M-step has a closed form, holes included. EM finds a local optimum,
# so it runs from ten starts, side by side; each is a k-means clustering. The prior is put to the
# scale of the data.

# %%
columns = data.values[data.observed]
centre = columns.nanmean(0)
variance = (columns - centre).square().nanmean(0)
family = normal(3, loc=centre, rate=variance)
rough = fit_em(TabularHMM(3, family), data, restarts=2 if SMOKE else 10)
print(rough.summary())

# %% [markdown]
# ## The emission of our own, by EM
#
# `Movement` has no closed M-step: inside each M-step EM climbs by gradients, and all the rest
# stays exact. The starts are draws from the prior, so a prior that knows the units saves restarts.

# %%
em = fit_em(module, data, restarts=2 if SMOKE else 3, num_steps=3 if SMOKE else 100)
print(em.summary())

# %% [markdown]
# ## By MAP
#
# `MarginalModel` makes a Pyro model of the module; `fit_map` climbs the same hill as EM, by
# gradients all the way. From starts of its own it should come to the same summit.

# %%
model = MarginalModel(module)
point = fit_map(
    model,
    data,
    num_steps=5 if SMOKE else 250,
    learning_rate=0.1,
    restarts=2 if SMOKE else 3,
)
print(point.summary())
print(f"least loss: EM {em.restarts.final.min():.2f}, MAP {point.restarts.final.min():.2f} nats")

# %% [markdown]
# ## By SVI
#
# Nothing changes but the guide: a normal distribution for each parameter, which starts at the MAP
# point.

# %%
guide = AutoNormal(model, init_loc_fn=init_to_value(values=point.values), init_scale=0.03)
svi = fit_svi(model, guide, data, num_steps=5 if SMOKE else 400, learning_rate=0.01)
print(svi.summary())

# %% [markdown]
# ## Against the truth, on foxes that no fit has seen
#
# The likelihood of the truth is the mark to reach. SVI's score is that of its predictive
# distribution, $\log \tfrac1S \sum_s p(x \mid \theta_s)$ with $S$ draws of the parameters.


# %%
def score(hmms):
    """Nats an observed hour."""
    each = torch.stack([hmm.log_prob(held_out.values).sum() for hmm in hmms])
    return ((each.logsumexp(0) - torch.tensor(len(hmms)).log()) / held_out.num_observed).item()


def accuracy(hmm):
    return metrics.one_to_one_accuracy(hmm.viterbi(held_out.values), states)


draws = [svi.hmm(held_out) for _ in range(10 if SMOKE else 200)]
rows = {
    "truth": [truth],
    "normal, EM": [rough.hmm(held_out)],
    "own, EM": [em.hmm(held_out)],
    "own, MAP": [point.hmm(held_out)],
    "own, SVI": draws,
}
print("            nats an hour  states right")
for name, hmms in rows.items():
    print(f"{name:10s} {score(hmms):13.4f} {accuracy(hmms[0]):13.1%}")

# %% [markdown]
# Our own emission is at the truth; the normal one is not, and no amount of data would bring it
# there. (Of SVI one draw decodes.)
#
# ## The parameters, with intervals
#
# The numbers of states mean nothing: `metrics.align` finds the renaming under which a decoding
# agrees best with the true states, and we put the parameters into its order. `AutoNormal` takes the
# parameters as independent of each other, so that its intervals tend to be somewhat narrow.


# %%
def state_order(hmm):
    """Which state of the fit is the true state 0, which 1, which 2."""
    return metrics.align(hmm.viterbi(held_out.values), states, num_states=3).argsort()


def ordered(values, order):
    """Parameters with their states in another order."""
    new = {name.removeprefix("module."): each[..., order] for name, each in values.items()}
    return new | {"transition": new["transition"][..., order, :]}


by_em = ordered(em.values, state_order(em.hmm(held_out)))
by_map = ordered(point.values, state_order(point.hmm(held_out)))
draws = [ordered(svi.values, state_order(point.hmm(held_out))) for _ in range(10 if SMOKE else 500)]
covered = []
print(f"{'':20s}truth    EM   MAP  SVI, 90 %")
for name, true in true_values.items():
    drawn = torch.stack([draw[name] for draw in draws])
    low, high = drawn.quantile(torch.tensor([0.05, 0.95]), 0)
    covered += ((low <= true) & (true <= high)).flatten().tolist()
    columns = torch.stack([true, by_em[name], by_map[name], low, high], -1).reshape(-1, 5)
    for k, (a, b, c, d, e) in enumerate(columns.tolist()):
        at = f"{k // 3} to {k % 3}" if name == "transition" else k
        label = f"{name.removeprefix('emission.')} {at}"
        print(f"{label:19s} {a:5.2f} {b:5.2f} {c:5.2f}  {d:.2f} to {e:.2f}")
print(f"{sum(covered)} of {len(covered)} intervals of 90 % hold the truth")

# %% [markdown]
# ## What was in the holes
#
# `queries.observation_marginals` gives the marginal of each observation given all others, before
# and after it: at a hole, the law of what is missing. Its mean fills the hole with the least
# squared error, and its variance says how far to trust it. We know what was there.

# %%
hmm = point.hmm(held_out)
laws = queries.observation_marginals(hmm, held_out.values)
holes = held_out.values.isnan() & (states >= 0).unsqueeze(-1)
by_truth = queries.observation_marginals(truth, held_out.values).mean
print("root mean squared error       mean of all   MAP  truth")
for i, unit in ((0, "km"), (2, "°C")):
    hole = holes[..., i]
    errors = [
        (guess - whole[..., i])[hole].square().mean().sqrt().item()
        for guess in (centre[i], laws.mean[..., i], by_truth[..., i])
    ]
    label = f"{sensors[i]}, {hole.sum()} holes"
    print(f"{label:25s} {unit}  {errors[0]:11.2f} {errors[1]:5.2f} {errors[2]:6.2f}")

# %% [markdown]
# ## One fox
#
# The track in grey is the true one. A dot is an hour in which something was measured, in the colour
# of its most probable state; where the fox rests the dots are large, for they lie on each other. On
# the right, circles and bars are holes: the mean of their law and its standard deviation.

# %%
visits = torch.stack([(states == k).sum(-1) for k in range(3)])
fox = int(visits.amin(0).argmax())  # the one that does a bit of everything
hours = int(held_out.lengths[fox])
order = state_order(hmm)
path = order.argsort()[hmm.viterbi(held_out.values)[fox, :hours]]
law = hmm.posterior(held_out.values).states[fox, :hours][:, order]
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
    middle, width = laws.mean[fox, :hours, i][hole], laws.variance[fox, :hours, i][hole].sqrt()
    axes.errorbar(
        clock[hole], middle, width, fmt="o", markersize=3, color="0.6", markerfacecolor="white",
        linewidth=0.8, zorder=0,
    )  # fmt: skip
    axes.set_ylabel(label)
    axes.set_xlim(0, hours - 1)
    axes.tick_params(labelbottom=False)
axes = plots.states(law, names, axes=figure.add_subplot(grid[2, 1]))
axes.get_legend().remove()
axes.set_xlabel("hour")
if Path("figures").is_dir() and not SMOKE:
    figure.savefig("figures/fox.png", dpi=150)
    print("the picture is figures/fox.png")
plt.show()

# %% [markdown]
# ## Moves that depend on the hour of the day
#
# Foxes rest by day. Covariates go into the data, `Sequences(..., covariates=)` of shape
# $(N, T, C)$, and reach a module whose `forward` takes them as its third argument. With
# `transition_per_step` the HMM takes one matrix for each move. Here daylight $u_t$, from $-1$ at
# midnight to $1$ at noon, tilts every row towards rest:
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
        moves = (self.transition.log() + tilt).log_softmax(-1)
        return HMM(
            self.initial.log(), moves, self.emission(), lengths, observed, transition_per_step=True
        )


# %% [markdown]
# What the fox does in each state we know by now: `freeze` keeps the emission as MAP found it, and
# with it the names of the states. The rest is fitted to new foxes.

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
by_hour = fit_map(model, diary, num_steps=5 if SMOKE else 200, learning_rate=0.1)
guide = AutoNormal(model, init_loc_fn=init_to_value(values=by_hour.values), init_scale=0.05)
sure = fit_svi(model, guide, diary, num_steps=5 if SMOKE else 200)
print(by_hour.summary())
slopes = torch.stack([sure.values["module.slope"] for _ in range(10 if SMOKE else 500)])
low, high = slopes.quantile(torch.tensor([0.05, 0.95])).tolist()
print(f"slope: truth 1.50, MAP {by_hour.values['module.slope']:.2f}, ", end="")
print(f"SVI 90 % between {low:.2f} and {high:.2f}")
