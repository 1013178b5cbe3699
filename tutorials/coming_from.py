# %% [markdown]
# # Coming from hmmlearn, dynamax or plain Pyro
#
# Familiar tasks under their familiar names, beside ours. Each is done with both packages, and an
# assertion in the cell checks that the numbers agree: score, decoding, posterior, EM with and
# without priors, sampling, and the loss of a `pyro.markov` loop.
#
# | hmmlearn | dynamax | Pyro | pyrohmm |
# | --- | --- | --- | --- |
# | `n_components` | `num_states` | | `hmm.num_states` |
# | `startprob_` | `initial.probs` | `initial_logits` | `hmm.log_initial` |
# | `transmat_` | `transition_matrix` | `transition_logits` | `hmm.log_transition` |
# | `emissionprob_` | `emissions.probs` | `observation_dist` | `hmm.emission.probs` |
# | `means_` | `emissions.means` | `observation_dist` | `hmm.emission.mean` |
# | `covars_` | `.covs`, `.scale_diags` | `observation_dist` | `hmm.emission.variance` |
# | `X`, `lengths` | `emissions` | `obs=`, `mask` | `Sequences(values, lengths)` |
# | `score` | `marginal_log_prob` | `log_prob` | `hmm.log_prob` |
# | `decode`, `predict` | `most_likely_states` | `infer_discrete` | `hmm.viterbi` |
# | `predict_proba` | `smoother` | `compute_marginals` | `hmm.posterior(x).state_probs` |
# | | `filter` | `filter`, last step | `hmm.filtered` |
# | `sample` | `sample` | `sample` | `hmm.sample_with_states` |
# | `fit` | `fit_em` | | `fit_em` |
# | | `fit_sgd` | `SVI` | `fit_map`, `fit_svi` |
# | `monitor_.history` | second result | `svi.step` | `fit.losses`, sign reversed |
# | `params="st"` | `props`, `trainable` | `pyro.condition` | `freeze(module, name, value)` |
# | `init_params` | `initialize` | `init_loc_fn` | `fit_em(start=)` |
#
# and for priors:
#
# | hmmlearn | dynamax | pyrohmm |
# | --- | --- | --- |
# | `startprob_prior` | `initial_probs_concentration` | `initial_concentration` |
# | `transmat_prior` | `transition_matrix_concentration` | `transition_concentration` |
# | `emissionprob_prior` | `emission_prior_concentration` | `categorical(V, concentration)` |
# | `means_prior` | `emission_prior_mean` | `normal(D, loc=)` |
# | `means_weight` | `emission_prior_concentration` | `normal(D, weight=)` |
# | `covars_prior`, `covars_weight` | `emission_prior_scale`, `_extra_df` | see below |
#
# The data are rolls of a die that is sometimes loaded, and later points in the plane, both sampled
# from known models.

# %%
import importlib.util
import logging

import numpy as np
import pyro
import torch
from matplotlib import pyplot as plt
from pyro import poutine
from pyro.distributions import Categorical, Dirichlet, DiscreteHMM, Normal
from pyro.infer import Trace_ELBO, TraceEnum_ELBO

from pyrohmm import (
    HMM,
    MarginalModel,
    Sequences,
    TabularHMM,
    categorical,
    datasets,
    fit_em,
    from_hmmlearn,
    normal,
    to_hmmlearn,
)
from pyrohmm.infer.starts import from_hmm

pyro.set_rng_seed(0)
torch.set_default_dtype(torch.float64)  # as hmmlearn has it; torch's default is float32
same = torch.testing.assert_close
has_hmmlearn = importlib.util.find_spec("hmmlearn") is not None
if not has_hmmlearn:
    print("hmmlearn is not installed, so its part of the cells is skipped.")
    print("To see it: pip install hmmlearn")

# %% [markdown]
# ## The data: `X` and `lengths`, or padding
#
# hmmlearn concatenates all sequences into one array. Here they are rows of one tensor, padded on
# the right; `Sequences.from_list` pads, and indexing with a boolean mask removes the padding.

# %%
initial, transition, faces = datasets.casino_parameters()
lengths = torch.tensor([120, 60, 90])
truth = HMM(initial.log(), transition.log(), Categorical(faces), lengths)
rolls, dice = truth.sample_with_states()
exists = torch.arange(120) < lengths.unsqueeze(-1)

X = rolls[exists].unsqueeze(-1).numpy()  # hmmlearn: (120 + 60 + 90, 1)
data = Sequences.from_list(torch.from_numpy(X[:, 0]).split(lengths.tolist()))
print(X.shape, lengths.tolist())
print(data)
same(data.values[exists], rolls[exists])

# %% [markdown]
# ## Score, decode, posterior
#
# `to_hmmlearn` and `from_hmmlearn` convert a model; hmmlearn stores probabilities, `HMM` their
# logarithms. hmmlearn's score is the sum of our log-probabilities per sequence.

# %%
print(f"log_prob            {truth.log_prob(data.values)}")
path = truth.viterbi(data.values)
states = truth.posterior(data.values).state_probs
if has_hmmlearn:
    model = to_hmmlearn(truth)
    score, best = model.score(X, lengths), model.decode(X, lengths)
    print(f"score of hmmlearn   {score:.4f}, the sum here {truth.log_prob(data.values).sum():.4f}")
    same(truth.log_prob(data.values).sum().item(), score)
    same(path[exists], torch.from_numpy(best[1]))
    same(truth.log_joint(data.values, path).sum().item(), best[0])
    same(states[exists], torch.from_numpy(model.predict_proba(X, lengths)))
    back = from_hmmlearn(model, lengths)
    same(back.log_prob(data.values), truth.log_prob(data.values))
    print("decode, predict_proba and the converted model agree")

# %% [markdown]
# ## Sampling
#
# One call samples all sequences, any number of times. The two packages use different random number
# generators, so only the statistics agree.

# %%
values, _ = truth.sample_with_states([200])  # (200, 3, 120)
print(f"frequency of sixes, pyrohmm     {(values[:, exists] == 5).double().mean():.3f}")
if has_hmmlearn:
    sampled, _ = model.sample(30_000, random_state=0)
    print(f"frequency of sixes, hmmlearn    {(sampled == 5).mean():.3f}")
stationary = truth.stationary()
print(f"frequency of sixes, stationary  {stationary @ faces[:, 5]:.3f}")

# %% [markdown]
# ## EM
#
# `fit_em` of an `HMM` starts at its parameters and has no priors: maximum likelihood, like
# `CategoricalHMM` with its default priors of one. The two agree after every step.

# %%
guess = HMM(
    torch.tensor([0.5, 0.5]).log(),
    torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log(),
    Categorical(torch.tensor([[3.0, 2, 2, 2, 2, 1], [1.0, 2, 2, 2, 2, 3]])),
    lengths,
)


settings = {"n_iter": 20, "tol": -np.inf}  # exactly twenty steps
fit = fit_em(guess, data, num_iterations=20, tolerance=None)
print(fit.summary())
if has_hmmlearn:
    model = to_hmmlearn(guess, **settings).fit(X, lengths)
    same(-fit.losses[:-1], torch.tensor(list(model.monitor_.history)))
    same(fit.hmm(data).emission.probs, torch.from_numpy(model.emissionprob_))
    print(f"after 20 steps: {-fit.losses[-1]:.6f}, hmmlearn {model.score(X, lengths):.6f}")

# %% [markdown]
# The default stopping rules differ. hmmlearn takes at most 10 steps (`n_iter`) and stops when the
# total log-likelihood rises by less than `tol = 0.01` nats. `fit_em` takes up to 200 steps and
# stops when the relative increase is below one millionth. A fit reports which criterion stopped it;
# `monitor_.converged` is also True when the steps ran out.

# %%
longer = fit_em(guess, data)
print(f"converged: {longer.converged}; {longer.reason}, after {len(longer.losses)} steps")
if has_hmmlearn:
    model = to_hmmlearn(guess)
    model.fit(X, lengths)
    print(f"hmmlearn converged: {model.monitor_.converged}, after {model.monitor_.iter} steps")

# %% [markdown]
# ## Normal vectors, and hmmlearn's default priors
#
# `GaussianHMM` is not maximum likelihood by default: `covars_prior = 0.01` is added to the sum of
# squares of every state. Its prior corresponds to ours by
#
# $$\text{rate} = \tfrac12 \, \text{covars\_prior}, \quad
#   \text{concentration} = \tfrac12 (\text{covars\_weight} - 4), \quad
#   \text{loc} = \text{means\_prior}, \quad \text{weight} = \text{means\_weight},$$
#
# so `normal(D, loc=0.0, rate=1.0)` is `covars_prior=2, covars_weight=8, means_weight=0.01`; without
# any hyperparameter, ours is flat between two scales of the data. EM then increases the joint
# density, not the likelihood. hmmlearn monitors the likelihood and may warn that it is not
# converging; we silence the warning.

# %%
logging.getLogger("hmmlearn").setLevel(logging.ERROR)
points = HMM(
    torch.tensor([0.5, 0.5]).log(),
    torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(),
    Normal(
        torch.tensor([[-1.0, 0.0], [1.0, 0.5]]), torch.tensor([[0.6, 1.0], [0.9, 0.4]])
    ).to_event(1),
    lengths,
)
plane = Sequences(points.sample(), lengths)
flat = fit_em(points, plane, num_iterations=20, tolerance=None)
weak = TabularHMM(2, normal(2, loc=0.0, rate=1.0))
prior = fit_em(weak, plane, start=from_hmm(points), num_iterations=19, tolerance=None)
print("variances, likelihood alone  ", flat.hmm(plane).emission.variance.flatten())
print("variances, with a prior      ", prior.hmm(plane).emission.variance.flatten())
if has_hmmlearn:
    priors = {
        "likelihood alone": (flat, {"covars_prior": 0.0, "covars_weight": 1.0}),
        "with a prior": (
            prior, {"covars_prior": 2.0, "covars_weight": 8.0, "means_weight": 0.01},
        ),
    }  # fmt: skip
    for name, (fit, setting) in priors.items():
        model = to_hmmlearn(points, **settings, **setting)
        model.fit(plane.values[exists].numpy(), lengths)
        ours = fit.hmm(plane)
        same(ours.emission.mean, torch.from_numpy(model.means_))
        same(ours.emission.variance, from_hmmlearn(model, lengths).emission.variance)
        print(f"hmmlearn agrees: {name}")

# %% [markdown]
# ## dynamax
#
# The same in dynamax, whose sequences must have equal lengths (`vmap` over them, or mask by hand):
#
# ```python
# from jax import numpy as jnp, random
# from dynamax.hidden_markov_model import CategoricalHMM
#
# hmm = CategoricalHMM(num_states=2, emission_dim=1, num_classes=6)
# params, props = hmm.initialize(
#     initial_probs=jnp.array(initial.numpy()),
#     transition_matrix=jnp.array(transition.numpy()),
#     emission_probs=jnp.array(faces[:, None].numpy()),  # (K, 1, V)
# )
# rolls = jnp.array(data.values[0, :, None].numpy())  # (T, 1)
# hmm.marginal_log_prob(params, rolls)        # truth.log_prob(data.values)[0]
# hmm.most_likely_states(params, rolls)       # truth.viterbi(data.values)[0]
# hmm.smoother(params, rolls).smoothed_probs  # truth.posterior(data.values).state_probs[0]
# hmm.filter(params, rolls).filtered_probs    # truth.filtered(data.values)[0]
# hmm.sample(params, random.PRNGKey(1), 120)  # truth.sample_with_states(); states come first there
# params, history = hmm.fit_em(params, props, rolls[None], num_iters=20)
# ```
#
# Two differences. dynamax keeps parameters apart from the model and passes them to every call; an
# `HMM` here contains its parameters, and a module constructs it. And dynamax's default priors are
# not flat: `CategoricalHMM` has concentrations of 1.1.
#
# ## Plain Pyro
#
# This is the usual Pyro loop for sequences of different lengths, with `TraceEnum_ELBO`, which sums
# out the states. `MarginalModel` has the same loss at the same parameters.


# %%
def enumerated(data):
    initial = pyro.sample("initial", Dirichlet(torch.ones(2)))
    transition = pyro.sample("transition", Dirichlet(torch.ones(2, 2)).to_event(1))
    faces = pyro.sample("faces", Dirichlet(torch.ones(2, 6)).to_event(1))
    state = None
    with pyro.plate("sequences", len(data)):
        for t in pyro.markov(range(data.num_steps)):
            with poutine.mask(mask=data.lengths > t):
                probs = initial if state is None else transition[state]
                state = pyro.sample(f"z_{t}", Categorical(probs), infer={"enumerate": "parallel"})
                pyro.sample(f"x_{t}", Categorical(faces[state]), obs=data.values[:, t])


def guide(data):
    """Empty: the parameters are conditioned on, and the states are enumerated."""


first = pyro.condition(
    enumerated, data={"initial": initial, "transition": transition, "faces": faces}
)
second = pyro.condition(
    MarginalModel(TabularHMM(2, categorical(6))),
    data={
        "module.initial": initial,
        "module.transition": transition,
        "module.emission.probs": faces,
    },
)
loop = TraceEnum_ELBO(max_plate_nesting=1).loss(first, guide, data)
marginal = Trace_ELBO().loss(second, guide, data)
print(f"pyro.markov {loop:.6f}, MarginalModel {marginal:.6f}")
same(loop, marginal)

# %% [markdown]
# `fit_map` and `fit_svi` are Pyro's `SVI` with `AutoDelta` and with a guide of your choice, on such
# a model. Tutorial 2 compares the gradients and the running times.
#
# ## Differences in conventions
#
# **The first state emits**, as in hmmlearn and dynamax. Pyro's `DiscreteHMM` makes a transition
# before the first emission, so its initial state is one step earlier:

# %%
initial = torch.tensor([0.2, 0.8])
pyro_hmm = DiscreteHMM(initial.log(), transition.log(), Categorical(faces), duration=60)
shifted = HMM((initial @ transition).log(), transition.log(), Categorical(faces), torch.tensor(60))
ours = HMM(initial.log(), transition.log(), Categorical(faces), torch.tensor(60))
roll = data.values[1, :60]
print(f"DiscreteHMM {pyro_hmm.log_prob(roll):.6f}")
print(
    f"HMM         {ours.log_prob(roll):.6f}, and {shifted.log_prob(roll):.6f} after one transition"
)
same(pyro_hmm.log_prob(roll), shifted.log_prob(roll))

# %% [markdown]
# **Rows are source states**, columns target states, as in all four packages: rows sum to one.
#
# **Log-probabilities, with hard zeros.** `HMM` takes log-probabilities, and minus infinity is
# legal: a forbidden transition. An impossible sequence scores $-\infty$, with gradient zero, not
# NaN. Zeros passed as `Categorical(probs=...)` are exact zeros too, although its own `logits` clamp
# them to the smallest positive number.

# %%
log_transition = torch.tensor([[0.9, 0.1], [0.0, 1.0]]).log().requires_grad_()
emission = Categorical(probs=torch.eye(2))
one_way = HMM(torch.tensor([0.5, 0.5]).log(), log_transition, emission, torch.tensor(3))
score = one_way.log_prob(torch.tensor([1, 0, 0]))
score.backward()
print(f"impossible: {score:.1f}, gradient {log_transition.grad.tolist()}")

# %% [markdown]
# **Lengths.** hmmlearn takes `lengths` in every call; an `HMM` is constructed for its lengths. For
# other data with the same parameters use `fit.hmm(other_data)`. Values in the padding are ignored,
# but results there are padding too: `viterbi` returns 0.
#
# **Symbols are integers** of shape `(N, T)`, without the trailing dimension of one that hmmlearn
# and dynamax have. Vectors are `(N, T, D)`; for a normal distribution batched over states and
# components, `.to_event(1)` makes the last dimension the event.
#
# **Missing steps** are NaN in floating-point data, or `observed=False`; hmmlearn has none.
#
# ## Posterior of the loaded die
#
# The smoothed posterior by pyrohmm and by hmmlearn; the two curves coincide.

# %%
figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
loaded = int(faces[:, 5].argmax())
axes.fill_between(
    range(120), dice[0] == loaded, step="mid", color="0.88", label="loaded die in use"
)
if has_hmmlearn:
    theirs = to_hmmlearn(truth).predict_proba(X, lengths)[:120, loaded]
    axes.plot(theirs, color="C1", linewidth=5, alpha=0.5, label="hmmlearn, predict_proba")
axes.plot(states[0, :, loaded], color="C0", linewidth=1.5, label="pyrohmm, posterior")
axes.set_xlim(0, 119)
axes.set_xlabel("roll")
axes.set_ylabel("p(loaded | rolls)")
axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0))
plt.show()
