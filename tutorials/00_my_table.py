# %% [markdown]
# # 0. My table: from a file to states, and back into its rows
#
# A file has readings of several households, hour by hour, with gaps. What does each of them do, and
# when? The way from such a table to its hidden states is always the same: read, fit, look, put the
# states back into the rows, forecast, save, and ask the same model about next month's file.
#
# | on paper | in code | meaning |
# | --- | --- | --- |
# | $x_{nt}$ | `data`, a `Sequences` | reading of household n in hour t |
# | $z_{nt}$ | `fit.predict(data)` | its state, of the most probable path |
# | $p(z_{nt} \mid x_n)$ | `fit.predict_proba(data)` | how sure we are of that |
# | $\log p(x)$ | `fit.score(data)` | how well the model predicts data, in nats |
# | $p(x_{n,T+h} \mid x_n)$ | `fit.forecast(data, 24)` | the hours to come |
#
# ## A file
#
# The readings are made up, so that this runs anywhere. For yours, begin at `read_csv`.

# %%
import os
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import Sequences, TabularHMM, fit_em, gamma, load_hmm, plots, save

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)
folder = Path(tempfile.mkdtemp())


def write_readings(path, begin, days, seed):
    """Kilowatt hours of four households, each hour; some rows and some readings are lacking."""
    random, parts = np.random.default_rng(seed), []
    hours = pd.date_range(begin, periods=24 * days, freq="h", tz="UTC")
    local = hours.tz_convert("Europe/Berlin").hour
    for house in ("Elm", "Oak", "Ash", "Fir"):
        at_home = np.where((local >= 6) & (local < 23), 1, 0)
        at_home = np.where(random.random(len(hours)) < 0.04, 1, at_home)
        cooking = np.isin(local, [7, 18, 19]) & (random.random(len(hours)) < 0.7)
        level = np.array([0.12, 0.4, 1.6])[np.where(cooking, 2, at_home)]
        kwh = random.gamma(8.0, level / 8.0).round(3)
        kwh[random.random(len(hours)) < 0.01] = np.nan
        part = pd.DataFrame({"house": house, "time": hours, "kwh": kwh})
        parts.append(part[random.random(len(part)) > 0.01])
    pd.concat(parts).sample(frac=1.0, random_state=seed).to_csv(path, index=False)


write_readings(folder / "march.csv", "2026-03-09", 7 if SMOKE else 28, seed=1)
write_readings(folder / "april.csv", "2026-04-06", 7, seed=2)

# %% [markdown]
# ## Read it
#
# `by` are the columns that tell sequences apart, `time` the one by which they are sorted. Times
# stay in their zone, here over the change to summer time. Rows that are lacking become missing
# steps by `gaps="missing"`; so do readings that are NaN. Nothing is filled in: what is missing is
# summed out.
#
# If a file has offsets that differ, as over the change to summer time, `read_csv` leaves times as
# text. Then `pd.to_datetime(frame["time"], utc=True).dt.tz_convert(zone)`.

# %%
frame = pd.read_csv(folder / "march.csv", parse_dates=["time"])
frame["time"] = frame["time"].dt.tz_convert("Europe/Berlin")
data = Sequences.from_dataframe(frame, columns="kwh", by="house", time="time", gaps="missing")
print(data)
frame.head()

# %% [markdown]
# ## Fit it
#
# Three states, each with a gamma distribution of the readings, which are positive. EM ends at a
# maximum near its start, so it starts eight times and keeps the best; `summary` says how far apart
# they ended. The states come in any order: here they are named by their means.

# %%
fit = fit_em(TabularHMM(3, gamma()), data, restarts=2 if SMOKE else 8)
print(fit.summary(data))

hmm = fit.hmm(data)
rank = hmm.emission.mean.argsort().argsort().tolist()
names = [["asleep or away", "at home", "cooking"][place] for place in rank]
print(dict(zip(names, hmm.emission.mean.tolist())))

# %% [markdown]
# ## Look at it
#
# The columns `lower` and `upper` above are limits of 95 %. `fit.intervals` has them for any number
# that is computed from the HMM, such as the share of the time in each state.

# %%
low, high = fit.intervals(data, of=lambda hmm: hmm.stationary())["of"]
for name, share, a, b in zip(names, hmm.stationary(), low, high):
    print(f"{name:>15}: {share:5.1%} of the time, {a:.1%} to {b:.1%}")

one = data[:1]  # the first household of the file
house, times = one.keys[0], one.time_index()  # hours that have no row are among the times

figure, axes = plt.subplots(2, figsize=(10, 5), layout="constrained", sharex=True)
plots.series(fit.hmm(one), one.values, names, x=times, axes=axes[0])
axes[0].set(ylabel=f"{house}, kWh in an hour", xlabel="")
plots.state_probs(fit.predict_proba(one), names, x=times, axes=axes[1])
axes[1].set_xlim(times[0], times[0] + pd.Timedelta(7, "D"))
plt.show()

# %% [markdown]
# Above are the readings of a week, coloured by state, with the band in which nine in ten should
# lie; below, how probable each state is at each hour.
#
# ## States in the rows
#
# The answers of a fit are in the order of the sequences, and `to_dataframe` puts them into the rows
# of the file, whatever their order is there, with its index: here shuffled rows of several
# households. A table of polars comes back in polars.

# %%
rows = data.to_dataframe(states=fit.predict(data), probs=fit.predict_proba(data))
frame["state"] = rows["state"].map(lambda state: names[state])
frame["sure"] = rows.filter(regex=r"^p\d").max(axis="columns")
print(frame.dtypes["time"])
frame.head()

# %%
by_hour = pd.crosstab(frame["time"].dt.hour, frame["state"], normalize="index")
axis = by_hour[names].plot.area(figsize=(8, 2.6), linewidth=0)  # in the colours of the states
axis.set(xlabel="local hour", ylabel="share of days", ylim=(0, 1), xlim=(0, 23))
axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
plt.show()

# %% [markdown]
# ## The next day
#
# A forecast is a distribution for each hour to come; `to_dataframe` writes it as a table, in local
# time. A Markov chain forgets soon: after some hours the forecast is that of any hour. For a daily
# rhythm let the transitions depend on the hour, by `RegressionHMM` and `formulas`.

# %%
ahead = fit.forecast(data, 24).to_dataframe(data, level=0.9)
print(ahead.groupby("house", sort=False).head(2))

past = 48
figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
recent = one.values[0, -past:].masked_fill(~one.observed[0, -past:], torch.nan)
hours = one.time_index(24).iloc[-past - 24 :]
plots.forecast(fit.forecast(one, 24), recent, x=hours, axes=axis)
axis.set(ylabel=f"{house}, kWh in an hour")
plt.show()

# %% [markdown]
# ## Next month
#
# `save` keeps the fitted HMM. For other data it takes their lengths, and which of their steps are
# observed. A score per reading that is much lower than before says that the model no longer fits.

# %%
save(fit, folder / "model")

new = pd.read_csv(folder / "april.csv", parse_dates=["time"])
new["time"] = new["time"].dt.tz_convert("Europe/Berlin")
april = Sequences.from_dataframe(new, columns="kwh", by="house", time="time", gaps="missing")
saved = load_hmm(folder / "model").with_lengths(april.lengths, april.observed)
new["state"] = april.to_dataframe(states=saved.viterbi(april))["state"].map(lambda k: names[k])
then, now = fit.score(data) / data.num_observed, saved.log_prob(april).sum() / april.num_observed
print(f"nats per reading: {then:.3f} in the month of the fit, {now:.3f} in the next")
new.head()

# %% [markdown]
# Where to go on: [covariates](https://pyrohmm.readthedocs.io/en/latest/guide/covariates.html),
# such as the hour of the day;
# [random effects](https://pyrohmm.readthedocs.io/en/latest/guide/random_effects.html),
# if households differ;
# [how many states](17_number_of_states.ipynb);
# [is the model right?](https://pyrohmm.readthedocs.io/en/latest/guide/checking.html)
