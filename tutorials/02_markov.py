# %% [markdown]
# # 2. The same model, written with `pyro.markov`, and tens of times faster
#
# You have written a hidden Markov model in Pyro, with one enumerated site per state. This tutorial
# keeps the model, replaces its loop by one `HMM` distribution, obtains the same loss and the same
# gradient up to rounding, and trains in a fraction of the time. The last section replaces the point
# estimate by a posterior distribution over parameters.
#
# The example is the occasionally dishonest casino (Durbin et al., 1998): it switches between a fair
# and a loaded die, and we observe only the rolls. The true parameters are known, so we can check
# the estimates.

# %%
import os
import time
from pathlib import Path

import pyro
import torch
from matplotlib import pyplot as plt
from pyro import poutine
from pyro.distributions import Categorical, Dirichlet
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value

from pyrohmm import HMM, datasets, fit_map, fit_svi, metrics

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps

pyro.set_rng_seed(0)
data = datasets.casino(num_sequences=10 if SMOKE else 50, num_steps=20 if SMOKE else 500)
print(data)

# %% [markdown]
# ## The model with `pyro.markov`
#
# Each roll has a latent site for its die, enumerated in parallel, inside `pyro.markov`.


# %%
def parameters():
    initial = pyro.sample("initial", Dirichlet(torch.ones(2)))
    transition = pyro.sample("transition", Dirichlet(torch.ones(2, 2)).to_event(1))
    faces = pyro.sample("faces", Dirichlet(torch.ones(2, 6)).to_event(1))
    return initial, transition, faces


def enumerated(data):
    initial, transition, faces = parameters()
    die = None
    with pyro.plate("sequences", len(data)):
        for t in pyro.markov(range(data.num_steps)):
            probs = initial if die is None else transition[die]
            die = pyro.sample(f"die_{t}", Categorical(probs), infer={"enumerate": "parallel"})
            pyro.sample(f"roll_{t}", Categorical(faces[die]), obs=data.values[:, t])


# %% [markdown]
# ## With pyrohmm
#
# The loop becomes one distribution, whose `log_prob` sums over all sequences of dice.


# %%
def marginal(data):
    initial, transition, faces = parameters()
    hmm = HMM(initial.log(), transition.log(), Categorical(faces), data.lengths)
    with pyro.plate("sequences", len(data)):
        pyro.sample("rolls", hmm, obs=data.values)
    return hmm


# %% [markdown]
# ## They are the same model
#
# At the same point, both have the same loss and the same gradient.

# %%
point = {
    "initial": torch.tensor([0.6, 0.4]),
    "transition": torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
    "faces": torch.tensor([[0.2, 0.1, 0.2, 0.1, 0.2, 0.2], [0.1, 0.2, 0.1, 0.2, 0.2, 0.2]]),
}


def loss_and_gradient(model, elbo):
    pyro.clear_param_store()
    guide = AutoDelta(
        poutine.block(model, expose=["initial", "transition", "faces"]),
        init_loc_fn=init_to_value(values=point),
    )
    guide(data)
    guide_parameters = list(guide.parameters())

    def evaluate():
        loss = elbo.differentiable_loss(model, guide, data)
        return loss, torch.autograd.grad(loss, guide_parameters)

    evaluate()  # excludes one-off costs
    times = []
    for _ in range(3):
        start_time = time.perf_counter()
        loss, gradient = evaluate()
        times.append(time.perf_counter() - start_time)
    return loss.item(), torch.cat([g.flatten() for g in gradient]), sorted(times)[1]


loss_1, gradient_1, seconds_1 = loss_and_gradient(enumerated, TraceEnum_ELBO(max_plate_nesting=1))
loss_2, gradient_2, seconds_2 = loss_and_gradient(marginal, Trace_ELBO())
print(f"loss      enumerated {loss_1:.3f}   marginal   {loss_2:.3f}")
difference = (gradient_1 - gradient_2).abs().max() / gradient_1.norm()
print(f"gradient  largest difference {difference:.1e} of its norm")
print(f"time      enumerated {1e3 * seconds_1:.0f} ms   marginal   {1e3 * seconds_2:.1f} ms")
print(f"          {seconds_1 / seconds_2:.0f} times as fast")
torch.testing.assert_close(loss_1, loss_2, rtol=1e-5, atol=0.0)
torch.testing.assert_close(gradient_1, gradient_2, rtol=1e-3, atol=1e-2)

# %% [markdown]
# (`pyrohmm.EnumeratedModel` writes this loop for you. Inside your own model,
# `pyrohmm.markov_sample("rolls", hmm, obs=data.values)` does the same.)
#
# ## MAP: a point estimate
#
# The log-likelihood under the true parameters is the reference.

# %%
pyro.set_rng_seed(1)
fit = fit_map(marginal, data, num_iterations=10 if SMOKE else 1000)
hmm = fit.hmm(data)
print(fit.summary())

initial, transition, faces = datasets.casino_parameters()
truth = HMM(initial.log(), transition.log(), Categorical(faces), data.lengths)
rolls = data.num_observed
print(f"truth   {truth.log_prob(data.values).sum() / rolls:.4f} nats per roll")
print(f"MAP     {hmm.log_prob(data.values).sum() / rolls:.4f} nats per roll")
accuracy = metrics.one_to_one_accuracy(hmm.viterbi(data.values), data.labels)
best_accuracy = metrics.one_to_one_accuracy(truth.viterbi(data.values), data.labels)
print(f"Viterbi accuracy {accuracy:.1%}; with the true parameters {best_accuracy:.1%}")

# %% [markdown]
# ## SVI: a distribution over parameters
#
# Only the guide changes. We initialise it at the MAP estimate and compute a credible interval for
# the probability that the loaded die shows a six.

# %%
guide = AutoNormal(
    marginal,
    init_loc_fn=init_to_value(values=fit.guide.median(data)),
    init_scale=0.02,
)
svi = fit_svi(marginal, guide, data, num_iterations=10 if SMOKE else 1000, learning_rate=0.01)
print(svi.summary())

sixes = svi.samples(20 if SMOKE else 400)["faces"][..., 5].amax(-1)
low, high = sixes.quantile(torch.tensor([0.05, 0.95])).tolist()
print(f"p(six | loaded): 90 % interval {low:.3f} to {high:.3f}; the truth is 0.500")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.hist(sixes.numpy(), bins=25, density=True, color="C0", alpha=0.8)
left.axvline(0.5, color="black", linestyle="--", label="truth")
left.set_xlabel("p(six | loaded die)")
left.set_ylabel("density under the guide")
left.locator_params(axis="x", nbins=5)
left.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)

loaded = int(hmm.emission.probs[:, 5].argmax())
posterior = hmm.posterior(data.values).state_probs[0, :, loaded]
right.plot(posterior, label="p(loaded | rolls)")
right.fill_between(
    range(data.num_steps), data.labels[0], step="mid", color="0.85", label="loaded die in use"
)
right.set(xlabel="roll", ylabel="probability")
right.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
if Path("figures").is_dir() and not SMOKE:
    figure.savefig("figures/casino.png", dpi=150)
plt.show()
