# %% [markdown]
# # 13. Durations: how long a machine works before it stops
#
# In a hidden Markov model every state lasts for a geometric number of steps: whatever has gone
# before, it ends with the same probability at each one. Machines, animals and patients are not like
# that. A filter press that has pressed for forty minutes is about to stop; one that has just
# begun is not. A hidden semi-Markov model gives each state a distribution of durations, and learns
# it from data in which no state was ever seen.
#
# A segment of state $k$ lasts $d$ steps with probability $p(d \mid k)$. Two functions of it answer
# the questions that one has of a machine:
#
# | on paper | in code | what it says |
# | --- | --- | --- |
# | $p(d \mid k)$ | `hsmm.log_duration`, `(K, D)` | how long a segment lasts |
# | $S(d \mid k) = \sum_{d' \ge d} p(d' \mid k)$ | `plots.survival` | that it lasts at least $d$ |
# | $h(d \mid k) = p(d \mid k) / S(d \mid k)$ | `plots.hazard` | that it ends now, after $d$ steps |
# | $A_{jk}$, $A_{jj} = 0$ | `hsmm.log_transition` | which state is next; none follows itself |
#
# A geometric duration is the one whose hazard is constant: the machine does not age.

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.distributions import GammaPoisson, Normal, Poisson

from pyrohmm import (
    HSMM,
    Sequences,
    TabularHMM,
    TabularHSMM,
    fit_em,
    negative_binomial_durations,
    normal,
    plots,
    queries,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## A machine
#
# Each minute a filter press reports its power and its vibration. It is *idle* (mostly for a short
# while, sometimes for long), it *presses* (some 36 minutes, until the filter is full), or it
# *rinses* (a programme of 12 minutes or so). After pressing it rinses, or is emptied by hand and
# stands idle. The noise is as large as the distance between the states, so that no single minute
# tells the state.
#
# We look at windows of two hours, cut from a record that runs on: the first segment had begun
# before the window, and the last is not over at its end. `censored_start` and `censored_end` say
# so, and `stationary()` has the share of time spent in each state, from which a window begins.

# %%
NAMES = ["idle", "rinse", "press"]
LONGEST, MINUTES = 120, 120
steps = torch.arange(float(LONGEST))
durations = torch.stack(
    [
        GammaPoisson(0.9, 0.08).log_prob(steps),
        Poisson(11.0).log_prob(steps),
        GammaPoisson(60.0, 60.0 / 35.0).log_prob(steps),
    ]
).log_softmax(-1)
transition = torch.tensor([[0.0, 0.2, 0.8], [0.3, 0.0, 0.7], [0.3, 0.7, 0.0]])
emission = Normal(torch.tensor([[1.0, 0.5], [2.0, 1.8], [3.0, 1.0]]), 1.0).to_event(1)


def windows(number, minutes):
    """The model of so many windows of the record."""
    parts = transition.log(), durations, emission, torch.full((number,), minutes)
    start = HSMM(torch.full((3,), 1 / 3).log(), *parts).stationary()
    return HSMM(start.log(), *parts, censored_start=True)


truth = windows(30 if SMOKE else 150, MINUTES)
values, states = truth.sample_with_states()
data = Sequences(values, truth.lengths)
later = windows(50 if SMOKE else 300, MINUTES)
new_values, new_states = later.sample_with_states()
held_out = Sequences(new_values, later.lengths)

figure, axes = plt.subplots(
    2, 1, figsize=(8, 3.6), layout="constrained", sharex=True, height_ratios=(4, 1)
)
axes[0].plot(values[0], linewidth=1, label=["power", "vibration"])
axes[0].set_ylabel("reading")
axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
plots.timeline(states[:1], NAMES, axes=axes[1])
axes[1].set_yticks([])
axes[1].set_ylabel("state")
axes[1].set_xlabel("minute")
axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
plt.show()

# %% [markdown]
# ## Two models of the same record
#
# Both are fitted by EM, from the readings alone. The durations of the second are negative binomial:
# a mean and a shape for each state, of which geometric (a shape of one) and Poisson durations (a
# large one) are special cases; a wide prior lets the shape be either. EM counts the segments of
# each length that are to be expected given the readings, and Newton steps find the durations that
# fit those counts best.

# %%
num_steps = 5 if SMOKE else 80
markov = fit_em(TabularHMM(3, normal(2)), data, num_iterations=num_steps)
family = negative_binomial_durations(LONGEST, shape_concentration=1.0, shape_rate=0.02)
semi = fit_em(
    TabularHSMM(3, normal(2), family, censored_start=True), data, num_iterations=num_steps
)


def in_order(model):
    """States by their mean power."""
    return model.permute_states(model.emission.mean[..., 0].flatten().argsort())


models = {
    "HMM": in_order(markov.hmm(held_out)),
    "HSMM": in_order(semi.hmm(held_out)),
    "truth": later,
}
print("held out:      nats a minute   minutes decoded rightly   segments")
for name, model in models.items():
    path = model.viterbi(new_values)
    right = (path == new_states).double().mean()
    segments = (path.diff() != 0).sum() + len(path)
    evidence = model.log_prob(new_values).sum() / new_values[..., 0].numel()
    print(f"{name:12s}{evidence:14.4f}{right:22.3f}{segments:20d}")
print(f"(there were {(new_states.diff() != 0).sum() + len(new_states)} segments)")

# %% [markdown]
# The truth is the mark to beat, and the HSMM comes within reach of it, in the score of new readings
# as in the states that it decodes. The HMM overlooks one segment in seven: to it a change costs the
# same at any time, and so it smooths over a rinse that came when it was due.
#
# ## How long each state lasts
#
# The durations that both have found, over those of the truth in grey. The HMM has one number for
# each state, and where it is wrong about the shape it is wrong about the mean, too: its best
# explanation of a long and regular segment is several short ones in a row.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
found = {name: queries.dwell_time_log_prob(model, LONGEST).exp() for name, model in models.items()}
for k, (name, axis) in enumerate(zip(NAMES, axes)):
    shown = [30, 30, 80][k]
    minutes = range(1, shown + 1)
    axis.bar(minutes, found["truth"][k, :shown], width=1.0, color="0.85", label="truth")
    axis.plot(minutes, found["HMM"][k, :shown], "C3--", label="HMM")
    axis.plot(minutes, found["HSMM"][k, :shown], "C0", label="HSMM")
    axis.set_title(name)
    axis.set_xlabel("minutes")
axes[0].set_ylabel("probability")
axes[0].legend()
plt.show()
for name, model in models.items():
    means = queries.dwell_time_mean(model)
    print(f"{name:6s} mean minutes:", *(f"{n} {m:5.1f}" for n, m in zip(NAMES, means.tolist())))

# %% [markdown]
# ## Does it age?
#
# The hazard is the probability that the state ends in this minute, given that it has lasted until
# now. That of pressing rises: after forty minutes a stop is due. That of being idle does not: who
# has been idle for long may be so for longer. Dots are decoded segments; those that the window cuts
# off are counted for as long as they were seen, and not as ended (Kaplan and Meier). Dashed is the
# HMM, in which nothing ages.

# %%
learnt = models["HSMM"]
path = learnt.viterbi(new_values)
figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
plots.hazard(learnt, num_steps=45, states=path, lengths=later.lengths, names=NAMES, axes=axes)
constant = queries.dwell_time_log_prob(models["HMM"], 1).exp()
for k in range(3):
    axes.axhline(float(constant[k, 0]), color=f"C{k}", linestyle="--", linewidth=1)
axes.set_ylim(0, 0.35)
axes.set_xlabel("minutes in the state")
plt.show()

# %% [markdown]
# ## When will it stop?
#
# Two windows end while the machine presses: in one for a short while, in the other for long. The
# forecast of the HSMM knows the difference, since `forecast` sums over when the last segment may
# have begun; the HMM sees a machine that presses, and no more. Below are the probabilities that it
# presses $h$ minutes ahead.

# %%
AHEAD = 40
age = torch.zeros(len(new_states), dtype=torch.long)  # minutes that the last segment has lasted
for t in range(MINUTES):
    same = new_states[:, t] == new_states[:, t - 1] if t else torch.zeros_like(age).bool()
    age = torch.where(same, age + 1, 1)
pressing = new_states[:, -1] == 2
examples = [
    (pressing & (age >= low) & (age <= high)).nonzero()[0].item()
    for low, high in ((3, 12), (28, 45))
]
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3), layout="constrained", sharey=True)
colors = {"HMM": "C3--", "HSMM": "C0-", "truth": "k:"}
ahead = {name: model.forecast(new_values, AHEAD).state_probs for name, model in models.items()}
for axis, i in zip(axes, examples):
    for name, style in colors.items():
        axis.plot(range(1, AHEAD + 1), ahead[name][i, :, 2], style, label=name)
    axis.set_title(f"it has pressed for {age[i]} minutes", fontsize=10)
    axis.set_xlabel("minutes ahead")
axes[0].set_ylabel("probability that it presses")
axes[0].legend()
plt.show()

# %% [markdown]
# Two pictures prove nothing. Here are all held-out windows, read up to minute 80: the mean
# log-probability of the state that the machine was really in, some minutes later. Guessing by the
# shares of time alone is the bottom line.

# %%
READ = 80
cut = {
    name: model.replace(lengths=torch.full_like(later.lengths, READ)).forecast(
        new_values[:, :READ], AHEAD
    )
    for name, model in models.items()
}
shares = later.stationary().log()
print("minutes ahead " + "".join(f"{h:9d}" for h in (1, 5, 10, 20, 40)))
for name, forecast in cut.items():
    logs = (
        forecast.state_probs.log()
        .gather(-1, new_states[:, READ:].unsqueeze(-1))
        .squeeze(-1)
        .mean(0)
    )
    print(f"{name:14s}" + "".join(f"{logs[h - 1]:9.3f}" for h in (1, 5, 10, 20, 40)))
print(f"{'shares of time':14s}" + f"{shares[new_states[:, READ:]].mean():9.3f}")

# %% [markdown]
# ## What a window cuts off
#
# Short windows are where it matters to say how segments are cut. From windows of half an hour,
# in which a whole segment of pressing hardly ever fits, we fit the durations three times: as if
# segments began and ended with each window, with the end cut, and with both ends cut.

# %%
short = windows(100 if SMOKE else 500, 30)
pieces = Sequences(short.sample(), short.lengths)
print(f"{'mean minutes':24s}" + "".join(f"{name:>9s}" for name in NAMES))
for name, options in {
    "begins and ends there": {"censored_end": False},
    "cut at the end": {},
    "cut at both ends": {"censored_start": True},
}.items():
    module = TabularHSMM(3, normal(2), family, **options)
    fit = fit_em(module, pieces, num_iterations=num_steps)
    means = queries.dwell_time_mean(in_order(fit.hmm(pieces)))
    print(f"{name:24s}" + "".join(f"{m:9.1f}" for m in means.tolist()))
print(f"{'truth':24s}" + "".join(f"{m:9.1f}" for m in queries.dwell_time_mean(short).tolist()))

# %% [markdown]
# If segments must begin and end with the window, the fit breaks: most windows show a piece of a
# single segment, no duration explains why so many of them last for thirty minutes and not a minute
# more, and the states become something else. With the end cut, what had begun before the window is
# still taken for whole, and pressing seems to be over sooner than it is. With both ends cut, thirty
# minutes at a time tell how long 36 minutes are: the model knows that a window falls into a long
# segment rather than into a short one, and that what fills it has lasted longer. (Idle times, most
# of them short and few long, remain the hardest to measure in half an hour.)
#
# Other families are `poisson_durations`, `free_durations` (a probability of each length) and
# `parametric_durations` of any Pyro distribution on counts; `fit_map`, `fit_svi` and NUTS take the
# same module. The page on durations of the guide lists them.
