# %% [markdown]
# # 15. Panel data: a disease seen at irregular visits
#
# Patients come when they come: after a year, after three, or never again. Between two visits a
# disease may have gone through several stages, and what the doctor writes down may be wrong. A
# hidden Markov model in continuous time describes both: rates of the transitions between the true
# states, and probabilities of what is seen in each state.
#
# | on paper | in code | meaning |
# | --- | --- | --- |
# | $x_{n,t}$ | `data.values` | state of patient n as seen at visit t |
# | $\tau_{n,t}$ | `data.times` | when, in years after the operation |
# | $z_{n,t}$ | `data.labels` | true state: known at the operation and at death, hidden elsewhere |
# | $Q_{ij}$ | `hmm.rates` | rate of transitions from i to j, a year |
# | $B_{ij}$ | `hmm.emission.probs` | probability that a patient in state i is seen as state j |
# | $e^{\tau Q}$ | `hmm.transition_at(tau)` | transition matrix over $\tau$ years |
#
# The data are those on which the R package *msm* is usually shown: 622 patients after a heart
# transplant, whose coronary arteries are without disease (state 1), mildly (2) or severely (3)
# narrowed; state 4 is death, whose time is known. They are read from `cav.csv` in the folder
# `$PYROHMM_DATA` (in R: `write.csv(msm::cav, "cav.csv", row.names=FALSE)`). Without that file this
# tutorial simulates patients from the rates that *msm* finds, so that each cell runs. What the text
# says of numbers it says of the real patients.

# %%
import csv
import os
from pathlib import Path

import pyro
import torch
from matplotlib import pyplot as plt
from torch.distributions import Categorical

from pyrohmm import Sequences, TabularContinuousTimeHMM, categorical, fit_em

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)
NAMES = ["none", "mild", "severe", "dead"]
DEAD = torch.tensor([False, False, False, True])


def read(path):
    """Columns of the table: who, when, which state was seen (from 0), which is known (or -1)."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    table = {
        "patient": [int(row["PTNUM"]) for row in rows],
        "years": [float(row["years"]) for row in rows],
        "seen": [int(row["state"]) - 1 for row in rows],
        "first": [row["firstobs"] == "1" for row in rows],
    }
    pairs = zip(table["seen"], table["first"])
    table["known"] = [seen if first or seen == 3 else -1 for seen, first in pairs]
    return table


def made_up(number):
    """The same columns, simulated: a visit about each year, of patients who may die between."""
    rates = torch.tensor([[0.0, 0.09, 0, 0.041], [0, 0, 0.26, 0.033], [0, 0, 0, 0.31], [0] * 4])
    wrong = torch.tensor([[0.973, 0.027, 0, 0], [0.175, 0.762, 0.063, 0], [0, 0.115, 0.885, 0]])
    table = {"patient": [], "years": [], "seen": [], "known": []}
    for patient in range(number):
        time, state, changes = 0.0, 0, []  # the true course
        while state != 3:
            time += float(torch.empty(()).exponential_(float(rates[state].sum())))
            state = int(Categorical(rates[state]).sample())
            changes.append((time, state))
        last = float(torch.empty(()).uniform_(3.0, 16.0))
        visits = [0.0, *(torch.arange(1.0, last) + 0.2 * torch.rand(len(torch.arange(1.0, last))))]
        for visit in visits:
            now = [0, *(state for when, state in changes if when <= visit)][-1]
            if now == 3:
                break
            seen = int(Categorical(wrong[now]).sample()) if visit else 0
            for name, entry in zip(table, (patient, float(visit), seen, -1 if visit else 0)):
                table[name].append(entry)
        if changes[-1][0] < last:
            for name, entry in zip(table, (patient, changes[-1][0], 3, 3)):
                table[name].append(entry)
    return table


path = Path(os.environ.get("PYROHMM_DATA", "."), "cav.csv")
if path.exists():
    table = read(path)
else:
    print("no cav.csv under $PYROHMM_DATA: simulated patients instead")
    table = made_up(600)
data = Sequences.from_dataframe(table, by="patient", time="years", columns="seen", labels="known")
if SMOKE:
    data = data[:150]
print(data)

# %% [markdown]
# Rows of this table are the states seen, columns those seen at the next visit. The disease does not
# get better, doctors say; yet 46 times a patient seen with a mild disease is seen without any at
# the next visit. Those are errors of one visit or of the other.

# %%
pairs = torch.zeros(4, 4).long()
for row, length in zip(data.values, data.lengths.tolist()):
    pairs.index_put_((row[: length - 1], row[1:length]), torch.tensor(1), accumulate=True)
print(f"{'':8s}" + "".join(f"{name:>8s}" for name in NAMES))
for name, row in zip(NAMES, pairs[:3].tolist()):
    print(f"{name:8s}" + "".join(f"{count:8d}" for count in row))

# %% [markdown]
# ## The model
#
# Only some transitions and some errors are possible: the disease goes on by one stage at a time,
# each state may end in death, and a state is mistaken for its neighbours only. What may not happen
# is zero at the start and remains zero: `transition_allowed` for the rates, zeros in the starting
# values of `emission.probs` for what is seen.
#
# Two more things are known. Death is recorded at its own time, not at the next visit:
# `exact_entry` names the states that are entered so. And the true state at the operation is known,
# as death is: these are the labels. The first visit is conditioned on and not seen through errors,
# so it counts as a missing observation with a known state.

# %%
later = data.exists & (torch.arange(data.num_steps) > 0)
data = Sequences(data.values, data.lengths, later, labels=data.labels, times=data.times)
possible = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]).bool()
module = TabularContinuousTimeHMM(
    4,
    categorical(4),
    rate_time=1e-6,  # a flat prior: the fit is one of maximum likelihood
    transition_allowed=possible,
    exact_entry=DEAD,
    initial_allowed=torch.tensor([True, False, False, False]),
)
start = {
    "initial": torch.tensor([1.0, 0.0, 0.0, 0.0]),
    "rates": 0.1 * possible,
    "emission.probs": torch.tensor(
        [[0.9, 0.1, 0, 0], [0.1, 0.8, 0.1, 0], [0, 0.1, 0.9, 0], [0, 0, 0, 1.0]]
    ),
}
fit = fit_em(module, data, start=start, tolerance=1e-4 if SMOKE else 1e-9, acceleration=True)
hmm = fit.hmm(data)
evidence = hmm.restrict(data.labels).log_prob(data.values).double().sum()
print(fit.summary())
print(f"-2 log likelihood {-2 * evidence:.3f}; that of msm on cav.csv: 3933.738")

# %% [markdown]
# ## Rates and errors, with intervals
#
# `fit.intervals` gives 95 % limits of every parameter from the Hessian of the log likelihood.
# *msm* does the same; its estimates and limits, as it prints them for `cav.csv`, stand beside.

# %%
MSM = {  # qmatrix.msm(fit) and ematrix.msm(fit): estimate, lower and upper limit
    ("rate", 0, 1): (0.08963, 0.07576, 0.10604),
    ("rate", 0, 3): (0.04136, 0.03324, 0.05146),
    ("rate", 1, 2): (0.25864, 0.19153, 0.34928),
    ("rate", 1, 3): (0.03331, 0.00692, 0.16041),
    ("rate", 2, 3): (0.30758, 0.24278, 0.38969),
    ("seen", 0, 1): (0.02690, 0.01583, 0.04537),
    ("seen", 1, 0): (0.17491, 0.10066, 0.28648),
    ("seen", 1, 2): (0.06318, 0.03646, 0.10730),
    ("seen", 2, 1): (0.11510, 0.05732, 0.21768),
}
information = fit.information(data)  # the Hessian, computed once for all that follows
limits = information.intervals()
ours = {}
print(f"{'':22s}{'pyrohmm':>26s}{'msm':>28s}")
for (kind, i, j), printed in MSM.items():
    name = "rates" if kind == "rate" else "emission.probs"
    low, high = (end[i, j].item() for end in limits[f"module.{name}"])
    ours[kind, i, j] = fit.parameters[f"module.{name}"][i, j].item(), low, high
    text = f"{NAMES[i]} {'to' if kind == 'rate' else 'seen as'} {NAMES[j]}"
    print(f"{text:22s}" + "   ".join("{:.4f} ({:.4f}, {:.4f})".format(*row)
                                     for row in (ours[kind, i, j], printed)))  # fmt: skip

figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
for axis, kind, title in zip(axes, ("rate", "seen"), ("rate, a year", "probability of an error")):
    rows = [key for key in MSM if key[0] == kind]
    for shift, source, color, label in ((-0.12, ours, "C0", "pyrohmm"), (0.12, MSM, "C3", "msm")):
        for at, key in enumerate(rows):
            middle, low, high = source[key]
            axis.plot([low, high], [at + shift] * 2, color=color, label="" if at else label)
            axis.plot(middle, at + shift, "o", ms=4, color=color)
    word = " to " if kind == "rate" else " seen as "
    axis.set_yticks(range(len(rows)), [f"{NAMES[i]}{word}{NAMES[j]}" for _, i, j in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xticks([0.01, 0.03, 0.1, 0.3], ["0.01", "0.03", "0.1", "0.3"])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(title)
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The numbers agree to three digits. One rate is hardly known: that of dying with a mild disease,
# between 0.007 and 0.16 a year, since most who die have gone through a severe one, seen or not.
# (Limits of the errors of a mild disease are a little narrower here: *msm* prints wider ones than
# follow from its own covariance where a state has two errors.)
#
# ## After five years
#
# Any function of the fitted model has intervals too. Here is the transition matrix over five years:
# of those without disease one half still are. Below each row is that of *msm* on `cav.csv`, by its
# `pmatrix.msm(fit, t=5, ci="normal", B=2000)`, whose limits come from samples of the parameters.

# %%
YEARS = torch.arange(0.0, 15.5, 0.5)


def after(years):
    """Transition matrices after some years, as a function of the fitted model."""
    return lambda hmm: hmm.transition_at(torch.as_tensor(years, dtype=hmm.rates.dtype))


MSM_FIVE = [
    [(0.519, 0.478, 0.556), (0.160, 0.123, 0.189), (0.088, 0.064, 0.107), (0.233, 0.209, 0.280)],
    [None, (0.232, 0.138, 0.301), (0.289, 0.204, 0.339), (0.479, 0.415, 0.632)],
    [None, None, (0.215, 0.142, 0.296), (0.785, 0.704, 0.858)],
]
five = hmm.transition_at(torch.tensor(5.0))
low, high = information.intervals(of=after(5.0))["of"]
print("after 5 years" + "".join(f"{name:>22s}" for name in NAMES))
for i in range(3):
    rows = {NAMES[i]: [(five[i, j], low[i, j], high[i, j]) for j in range(i, 4)],
            "   msm": MSM_FIVE[i][i:]}  # fmt: skip
    for name, row in rows.items():
        cells = ["{:.3f} ({:.3f}, {:.3f})".format(*numbers) for numbers in row]
        print(f"{name:13s}" + " " * 22 * i + "".join(f"{cell:>22s}" for cell in cells))

# %% [markdown]
# ## Is it right?
#
# The curves are the probabilities of the states of a patient without disease at the operation. The
# share of the patients who are alive can be estimated without any model (Kaplan and Meier), from
# times of death and of last visits. The model has constant rates. It stays close to that curve for
# ten years, but does not know the deaths soon after the operation, and expects more survivors after
# eleven years: rates may rise with age, and a last visit ends the record of the living alone.

# %%
course = hmm.transition_at(YEARS)[:, 0].double()
low, high = information.intervals(of=lambda hmm: after(YEARS)(hmm)[:, 0, 3])["of"]

ends = data.times.gather(1, (data.lengths - 1)[:, None])[:, 0]
died = data.labels.gather(1, (data.lengths - 1)[:, None])[:, 0] == 3
order = ends.argsort()
at_risk = torch.arange(len(ends), 0, -1)
surviving = (1 - died[order].double() / at_risk).cumprod(0)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].stackplot(YEARS, course.T, labels=NAMES, colors=["C2", "C1", "C3", "0.7"], alpha=0.85)
axes[0].set(xlim=(0, 15), ylim=(0, 1), xlabel="years", ylabel="probability")
axes[0].legend(loc="lower left", frameon=True)
axes[1].fill_between(YEARS, 1 - high, 1 - low, color="C0", alpha=0.25, linewidth=0)
axes[1].plot(YEARS, 1 - course[:, 3], color="C0", label="model, 95 %")
axes[1].step(ends[order], surviving, where="post", color="0.3", label="Kaplan and Meier")
axes[1].set(xlim=(0, 15), ylim=(0, 1), xlabel="years", ylabel="alive")
axes[1].legend(loc="lower left", frameon=False)
plt.show()

# %% [markdown]
# ## One patient
#
# A patient comes each year and is seen without disease, then with a mild one, then without again.
# Is the patient ill? The smoothed posterior weighs an error of the second visit against one of the
# third and against each course of the disease, and a forecast starts from there.

# %%
seen = torch.tensor([[0, 0, 1, 0, 1]])
times = torch.arange(5.0)[None]
lengths = torch.tensor([5])
for read_until in (3, 4, 5):
    one = Sequences(seen[:, :read_until], torch.tensor([read_until]), times=times[:, :read_until])
    patient = fit.hmm(one)
    states = patient.posterior(one.values).state_probs[0, -1]
    ahead = patient.forecast(one.values, torch.tensor([read_until + 4.0]))
    story = ", ".join(NAMES[k] for k in seen[0, :read_until])
    print(f"seen as {story}")
    for when, probs in (("now", states), ("in 5 years", ahead.state_probs[0, 0])):
        print(f"  {when:12s}" + "".join(f"{n} {p:.2f}   " for n, p in zip(NAMES, probs.tolist())))

# %% [markdown]
# Of all visits at which a mild disease was written down, how many were of patients who had one?
# The posterior of all patients, given everything that was seen of them, says so.

# %%
states = hmm.restrict(data.labels).posterior(data.values).state_probs
for name, k in (("none", 0), ("mild", 1), ("severe", 2)):
    visits = later & (data.values == k)
    shares = zip(NAMES[:3], states[visits].mean(0).tolist())
    text = ", ".join(f"{name} {share:.2f}" for name, share in shares)
    print(f"seen as {name:7s} {int(visits.sum()):5d} visits; truly {text}")

# %% [markdown]
# `TabularContinuousTimeHMM` takes any emission family: a blood value (`normal`), counts, or several
# measurements at once (`streams`) in place of the stage that the doctor writes down. MAP, SVI and
# NUTS take the same module. The guide has a page on continuous time and one on intervals.
