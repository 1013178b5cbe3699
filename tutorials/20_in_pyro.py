# %% [markdown]
# # 20. In Pyro: a prior in a network, `infer_discrete`, formulas, a component of your own
#
# An HMM here is a Pyro distribution, and what builds it is a `PyroModule`. Whatever Pyro does with
# these it does with an HMM: networks whose weights have priors, guides, discrete variables that are
# sampled or maximised, covariates, components that you write. Four short examples.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $p(x \mid \theta)$, states summed out | `MarginalModel(module)` | 512 states, 32 at a time |
# | $p(\theta)$ | `PyroSample` | a prior of the words' biases |
# | $q(\theta)$ | a guide | `AutoNormal` of the biases |
# | $p(z \mid x)$ | `hmm.posterior`, `infer_discrete` | both |

# %%
import os
from functools import partial

import pyro
import torch
from matplotlib import pyplot as plt
from pyro import poutine
from pyro.distributions import Beta, Normal, Poisson
from pyro.infer import infer_discrete
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample

from pyrohmm import (
    HMM,
    HMMModule,
    MarginalModel,
    NeuralHMM,
    RegressionHMM,
    Sequences,
    TabularHMM,
    blocks,
    categorical,
    datasets,
    fit_em,
    fit_svi,
    formulas,
    freeze,
    language,
    markov_sample,
    poisson,
    regression,
)
from pyrohmm.ops.log_space import log  # zeros stay zeros, with gradient zero

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## A large HMM whose network has a prior
#
# A `NeuralHMM` is a module of parameters: a fit of it is maximum likelihood. Any parameter becomes
# random by a `PyroSample` in its place. Here the bias of each word, the logarithm of how much more
# often it is emitted than its embedding says, has a normal prior. `MarginalModel` sums the states
# out, exactly, and `fit_svi` learns the network and the guide of the biases together.

# %%
corpus = datasets.english_words(500)
data = corpus.data[: 100 if SMOKE else 600]
train, held_out = data.split(0.9)
clusters = language.find_clusters(train, corpus.vocabulary, 16, progress=False)
parts = blocks.from_clusters(clusters, 32)  # 16 blocks of 32 states
num_words = len(corpus.vocabulary)


SCALE = 0.5  # of the prior
module = NeuralHMM(parts.num_states, num_words, hidden_dim=32, blocks=parts, two_level=True)
module.bias = PyroSample(Normal(0.0, SCALE).expand([num_words]).to_event(1))
model = MarginalModel(module)
guide = AutoNormal(model, init_scale=0.25)
fit = fit_svi(
    model,
    guide,
    train,
    num_iterations=5 if SMOKE else 120,
    learning_rate=0.02,
    batch_tokens=2048,
)
nats = -fit.hmm(held_out).log_prob(held_out.values).sum() / held_out.num_observed
print(f"held-out perplexity {nats.exp():.1f}, at the medians of the biases")

# %% [markdown]
# The guide knows how sure it is: the bias of a word that occurs often has a narrow posterior, that
# of a word which hardly occurs is about as wide as its prior.

# %%
low, high = guide.quantiles([0.16, 0.84], train)["module.bias"].detach()
widths, counts = (high - low) / 2, torch.bincount(train.packed("values"), minlength=num_words)
for least, most in ((0, 2), (3, 30), (31, 10_000)):
    some = (counts >= least) & (counts <= most)
    print(f"{least:3d} to {most:6,} times: {some.sum():3d} words, {widths[some].mean():.2f}")
figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
axes.plot(counts, widths, ".", alpha=0.5)
axes.axhline(SCALE, color="black", linestyle=":", label="prior")
axes.set(xscale="symlog", xlim=(-0.3, None), ylim=(0, None))
axes.set(xlabel="how often the word occurs", ylabel="posterior deviation of its bias")
axes.legend()
plt.show()

# %% [markdown]
# ## `infer_discrete` beside `posterior`
#
# Pyro answers questions of discrete variables with `infer_discrete`: at temperature 0 it maximises
# them together, at temperature 1 it samples them. `markov_sample` writes the same HMM as one site
# for each state and observation, which `infer_discrete` reads. The most probable path is that of
# `viterbi`; the share of samples in a state is the smoothed probability of `posterior`.

# %%
casino = datasets.casino(1, 12 if SMOKE else 40)
hmm = TabularHMM(2, categorical(6))(casino.lengths).replace(
    log_initial=torch.tensor([0.5, 0.5]).log(),
    log_transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
    emission=pyro.distributions.Categorical(torch.tensor([[1.0] * 6, [1.0] * 5 + [5.0]])),
)


def states_of(temperature):
    """States of the rolls, by Pyro's own enumeration."""

    @partial(infer_discrete, first_available_dim=-2, temperature=temperature)
    def model():
        with pyro.plate("sequences", 1):
            markov_sample("x", hmm, obs=casino.values)

    sites = poutine.trace(model).get_trace().nodes
    return torch.stack([sites[f"x_state_{t}"]["value"].flatten()[0] for t in range(len(smoothed))])


smoothed = hmm.posterior(casino.values).state_probs[0, :, 1]
path = states_of(temperature=0)
samples = torch.stack([states_of(temperature=1) for _ in range(5 if SMOKE else 100)])
print("the same path:", path.equal(hmm.viterbi(casino.values)[0]))

figure, axes = plt.subplots(figsize=(6.5, 2.8), layout="constrained")
axes.plot(smoothed, color="C0", label="hmm.posterior")
axes.plot(
    samples.float().mean(0), ".", color="C1", label=f"{len(samples)} samples by infer_discrete"
)
axes.step(range(casino.num_steps), path, color="0.5", where="mid", linewidth=0.8, label="best path")
axes.set(xlabel="roll", ylabel="p(loaded | rolls)", ylim=(-0.05, 1.35), yticks=[0, 0.5, 1])
axes.legend(ncols=3, fontsize=8, loc="upper center")
plt.show()

# %% [markdown]
# Both are exact. `posterior` takes one forward and one backward pass, for all sequences and steps;
# `infer_discrete` takes a variable for each step, and a pass for each sample. Use it where the HMM
# is a part of a larger model with discrete variables of its own.
#
# ## Covariates by formula
#
# An animal is active by day. `formulas` makes the columns of a formula from a table and remembers
# them, so that the same formula of new rows has the same columns.

# %%
hours = torch.arange(120 if SMOKE else 480) % 24
active, seen = False, []
for hour in hours:
    day = torch.cos((hour - 14) * torch.pi / 12)
    active = bool(torch.rand(()) < torch.sigmoid((3.0 if active else -3.0) + 2.0 * day))
    seen.append(int(Poisson(8.0 if active else 1.0).sample()))
frame = {"animal": [1] * len(hours), "hour": hours.tolist(), "count": seen}

by_hour = formulas(frame, transition="~ cyclic(hour, 24)")
rows = Sequences.from_dataframe(
    by_hour.table(frame), by="animal", columns="count", covariates=by_hour.names
)
bare = Sequences(rows.values, rows.lengths)
plain = fit_em(TabularHMM(2, poisson()), bare, restarts=4)
module = RegressionHMM(2, regression(Poisson, rate=None), transition=by_hour["transition"])
module.begin_at(plain.hmm(bare))
freeze(module, "initial.coefficients")  # one sequence says nothing about where others begin
with_hours = fit_em(module, rows)
print(
    f"{plain.losses[-1]:.1f} nats without the hour of the day, {with_hours.losses[-1]:.1f} with it"
)

order = plain.hmm(bare).emission.rate.argsort()  # the fit with the hour began there
day = by_hour.matrix({"hour": list(range(24))})
bands = with_hours.bands(rows, day, of="transition")
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
for before, after, label in ((*order, "begins to be active"), (*order.flip(0), "goes to rest")):
    middle, low, high = (part[:, before, after] for part in bands)
    (line,) = axes.plot(middle, label=label)
    axes.fill_between(range(24), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
axes.set(xlabel="hour of the day", ylabel="probability in the next hour (95 %)")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## A component of your own
#
# A module is what builds an HMM from its parameters: twelve lines are enough for every fit. This
# one stays in its state or goes on to the next one of a ring.

# %%


class Ring(HMMModule):
    """A chain that stays, or goes on to the next state of a ring."""

    def __init__(self, num_states, emission):
        super().__init__()
        self.num_states = num_states
        self.stay = PyroSample(Beta(torch.full((num_states,), 5.0), 1.0).to_event(1))
        self.emission = emission(num_states)

    def forward(self, lengths, observed=None):
        eye = torch.eye(self.num_states)
        stay = self.stay.unsqueeze(-1)
        transition = stay * eye + (1 - stay) * eye.roll(1, -1)
        start = torch.full((self.num_states,), 1 / self.num_states)
        return HMM(start.log(), log(transition), self.emission(), lengths, observed)


ring = Ring(4, categorical(4, 0.5))
truth = HMM(
    torch.full((4,), 0.25).log(),
    log(0.7 * torch.eye(4) + 0.3 * torch.eye(4).roll(1, -1)),
    pyro.distributions.Categorical(0.85 * torch.eye(4) + 0.0375),
    torch.full((20,), 50),
)
turns = Sequences(truth.sample(), truth.lengths)
found = fit_em(ring, turns, num_iterations=5 if SMOKE else 100, restarts=4)
print(
    "stays:", [round(share, 2) for share in found.parameters["module.stay"].tolist()], "truth: 0.7"
)

# %% [markdown]
# EM had no formula for `stay`, and took gradient steps; `fit_svi`, `fit_mcmc` and `fit_map` take
# the same module. How to give EM a closed form, and how to write emissions, chains and queries, is
# on the page on extending, and `pyrohmm.testing` checks what you write.
