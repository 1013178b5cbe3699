# %% [markdown]
# # 16. Regimes: a market that is calm until it is not
#
# Returns of a market are small for months and then large for weeks. A model with one variance is
# wrong in both. A hidden Markov model has a regime behind each day, with its own mean, its own
# variance and its own dependence on the day before, and tells each evening in which regime the
# market is: `Filter` takes one observation at a time and never looks ahead.
#
# | on paper | in code | meaning |
# | --- | --- | --- |
# | $x_t$ | `data.values`, `(1, T, 1)` | return of day t, in percent |
# | $z_t$ | states | regime of day t, never seen |
# | $N(\mu_k + w_k x_{t-1}, \sigma_k^2)$ | `hmm.emission` | distribution of $x_t$ in regime k |
# | $p(z_t \mid x_{1:t})$ | `stream.update(x)` | filtered: what can be known in the evening |
# | $p(z_t \mid x_{1:T})$ | `hmm.posterior(values)` | smoothed: what is known at the end |
# | $p(x_{t+1} \mid x_{1:t})$ | `stream.predict()` | tomorrow, before it comes |
#
# The series is simulated, so that the regimes are known and the answers can be judged. For your own
# prices: `100 * numpy.diff(numpy.log(prices))`.

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from pyro.distributions import MultivariateNormal, Normal

from pyrohmm import (
    HMM,
    Filter,
    Sequences,
    TabularHMM,
    autoregressive_normal,
    distributions,
    fit_em,
    metrics,
    normal,
    plots,
    queries,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(1)
NAMES, COLORS = ["calm", "nervous", "crisis"], ["C2", "C1", "C3"]
PAST, NEW = (400, 60) if SMOKE else (2500, 1000)  # days

transition = torch.tensor([[0.990, 0.009, 0.001], [0.015, 0.970, 0.015], [0.0, 0.04, 0.96]])
noise = torch.tensor([0.6, 1.2, 2.8])
truth = HMM(
    torch.tensor([0.6, 0.3, 0.1]).log(),
    transition.log(),
    distributions.AutoregressiveNormal(
        MultivariateNormal(torch.zeros(3, 1), noise.square()[:, None, None]),
        MultivariateNormal(torch.tensor([[0.06], [0.0], [-0.2]]), noise.square()[:, None, None]),
        torch.tensor([0.1, 0.0, -0.3]).reshape(3, 1, 1, 1),
    ),
    torch.tensor([PAST + NEW]),
)
values, states = truth.sample_with_states()
data = Sequences(values[:, :PAST], torch.tensor([PAST]))

figure, axis = plt.subplots(figsize=(9, 2.4), layout="constrained")
axis.plot(values[0, :, 0], color="0.2", linewidth=0.6)
background = {"cmap": ListedColormap(COLORS), "vmin": 0, "vmax": 2, "alpha": 0.35, "zorder": 0}
axis.pcolorfast((0, PAST + NEW), axis.get_ylim(), states, **background)
axis.axvline(PAST, color="0.2", linestyle="--")
axis.set(xlabel="day", ylabel="return, %", xlim=(0, PAST + NEW))
plt.show()
print(f"{PAST} days to fit, {NEW} days to come; standard deviation {values.std():.2f} %")

# %% [markdown]
# Behind the curve are the true regimes: calm in green, nervous in orange, crisis in red. Models are
# fitted to what lies left of the dashed line.
#
# ## How many regimes, and does yesterday matter?
#
# Normal returns in each regime (switching variance), or returns that depend on the day before as
# well (switching autoregression). BIC, where less is better, pays for each parameter.

# %%
families = {"normal": normal(1), "autoregressive": autoregressive_normal(1, lags=1)}
fits = {}
print("regimes" + "".join(f"{name:>17s}" for name in families))
for num_states in (1, 2, 3, 4):
    row = f"{num_states:7d}"
    for name, family in families.items():
        fit = fit_em(TabularHMM(num_states, family), data, restarts=2 if SMOKE else 20)
        fits[name, num_states] = fit
        row += f"{metrics.bic(fit, data):17.1f}"
    print(row)

# %% [markdown]
# The least is at three regimes with autoregression, as simulated. The step from one regime to two
# is worth hundreds: that is the changing variance. Without autoregression three are
# the best as well, at a higher BIC.
#
# States have no order of their own, so we number them by variance. The mean duration of a regime is
# $1 / (1 - A_{kk})$ days.


# %%
def in_order(hmm):
    """The same HMM, its regimes numbered from the calmest."""
    return hmm.permute_states(hmm.emission.base.covariance_matrix[:, 0, 0].argsort())


fit = fits["autoregressive", 3]
hmm = in_order(fit.hmm(data))
print(f"{'':10s}{'mean':>14s}{'deviation':>14s}{'of yesterday':>14s}{'days':>14s}")
rows = zip(
    NAMES,
    hmm.emission.base.loc[:, 0],
    hmm.emission.base.covariance_matrix[:, 0, 0].sqrt(),
    hmm.emission.weights[:, 0, 0, 0],
    queries.dwell_time_mean(hmm).reshape(-1),
)
for name, *numbers in rows:
    print(f"{name:10s}" + "".join(f"{number:14.2f}" for number in numbers))
true_days = queries.dwell_time_mean(truth).reshape(-1)
print("truth: deviations", *(f"{n:.2f}" for n in noise), "days", *(f"{n:.0f}" for n in true_days))

# %% [markdown]
# ## Day by day
#
# Now the new days come in, one at a time. `Filter` first reads the past in one call. Then, each
# evening, `predict` gives the distribution of the next return, and `update` reads that return when
# it has come. Memory does not grow, and `state_dict` keeps the filter from one day to the next.

# %%
stream = Filter(hmm)
stream.update(data.values)
filtered, low, high, scores = [], [], [], []
for day in range(PAST, PAST + NEW):
    tomorrow = stream.predict()
    ends = tomorrow.quantiles([0.05, 0.95]).flatten()
    low.append(ends[0])
    high.append(ends[1])
    filtered.append(stream.update(values[:, day])[0])
    scores.append(-stream.surprise[0])  # log p(x_t | x_1, ..., x_{t-1})
filtered, low, high = torch.stack(filtered), torch.stack(low), torch.stack(high)
scores = torch.stack(scores)

# %% [markdown]
# At the end, when all days are known, the smoothed posterior looks back at each of them with the
# days that came after.

# %%
whole = in_order(fit.hmm(Sequences(values, torch.tensor([PAST + NEW]))))
smoothed = whole.posterior(values).state_probs[0, PAST:]
new_values, new_states = values[0, PAST:, 0], states[0, PAST:]

figure, axes = plt.subplots(
    3, 1, figsize=(9, 5.4), layout="constrained", sharex=True, height_ratios=(3, 2, 2)
)
axes[0].fill_between(range(NEW), low, high, color="0.85", label="90 % for the next day")
axes[0].plot(new_values, color="0.2", linewidth=0.7, label="return, %")
axes[0].legend(frameon=False, ncols=2, loc="upper left")
for axis, probs, title in ((axes[1], filtered, "filtered"), (axes[2], smoothed, "smoothed")):
    plots.state_probs(probs, NAMES, axes=axis)
    for k, area in enumerate(axis.collections):
        area.set_facecolor(COLORS[k])
    axis.get_legend().remove()
    axis.set(xlabel="", ylabel=title)
axes[2].set_xlabel("new day; green calm, orange nervous, red crisis")
plt.show()

# %%
print(f"{'':22s}{'filtered':>10s}{'smoothed':>10s}")
right = [(probs.argmax(-1) == new_states).double().mean() for probs in (filtered, smoothed)]
print(f"{'most probable is true':22s}" + "".join(f"{share:10.1%}" for share in right))
at_truth = [
    probs.gather(1, new_states[:, None]).clamp(min=1e-12).log().mean()
    for probs in (filtered, smoothed)
]
print(f"{'log p(true regime)':22s}" + "".join(f"{nats:10.3f}" for nats in at_truth))
delays = []
for day in range(1, NEW):
    if new_states[day] == 2 and new_states[day - 1] != 2:  # a crisis begins
        rest = new_states[day:] != 2
        end = day + int(rest.int().argmax()) if rest.any() else NEW
        alarm = (filtered[day:end, 2] > 0.5).nonzero()
        delays.append(int(alarm[0]) if len(alarm) else None)
print("days from the beginning of a crisis to p > 0.5, filtered:", delays)

# %% [markdown]
# Smoothing knows the regime better than filtering, since it sees whether a large return was the
# first of many. A filter has to wait for some of these days (None: the crisis was over before the
# filter was sure of it). A trading rule that is tested on smoothed states looks into the future.
#
# ## Is the forecast worth anything?
#
# The mean log density of the next day, over all new days: higher is better. Below are the shares of
# days that fell short of the quantile of 5 %, on all days and in true crises.

# %%
constant = Normal(values[0, :PAST].mean(), values[0, :PAST].std())
window = values[0, :, 0].unfold(0, 20, 1)[PAST - 20 : PAST + NEW - 20].std(-1)
rolling = Normal(0.0, window)
models = {
    "one normal": (constant.log_prob(new_values), constant.icdf(torch.tensor(0.05)).expand(NEW)),
    "last 20 days": (rolling.log_prob(new_values), rolling.icdf(torch.tensor(0.05)).expand(NEW)),
    "three regimes": (scores, low),
}
crisis = new_states == 2
print(f"{'':16s}{'log density':>12s}{'below 5 %':>12s}{'in crises':>12s}")
for name, (logs, quantile) in models.items():
    below = (new_values < quantile).double()
    print(f"{name:16s}{logs.mean():12.3f}{below.mean():12.1%}{below[crisis].mean():12.1%}")

# %% [markdown]
# ## The weeks ahead
#
# How uncertain is a day two months from now? `forecast` sums over all courses of the regimes. From
# a calm day uncertainty grows, from a crisis it falls, both towards that of the long run.

# %%
AHEAD = 60
figure, axis = plt.subplots(figsize=(6.5, 3), layout="constrained")
for k in (0, 1, 2):
    sure = (smoothed[:, k] * filtered[:, k]).argmax()  # a day that is surely of regime k
    until = PAST + int(sure) + 1
    model = hmm.replace(lengths=torch.tensor([until]))
    deviation = model.forecast(values[:, :until], AHEAD).variance[0, :, 0].sqrt()
    axis.plot(range(1, AHEAD + 1), deviation, color=COLORS[k], label=f"from a {NAMES[k]} day")
axis.set(xlabel="days ahead", ylabel="standard deviation, %", ylim=(0, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Several markets at once are vectors: `normal_full(D)` and `autoregressive_normal(D, lags)` have a
# covariance matrix in each regime, and `streams` adds counts of trades. Transitions that depend on
# covariates are a `RegressionHMM`; regimes that do not end at a constant rate have durations
# ([tutorial 13](13_durations.ipynb)).
