# %% [markdown]
# # 2. The same model, written with `pyro.markov`, and a hundred times faster
#
# You have written a hidden Markov model in Pyro, with one enumerated site per state. Here is how
# to keep that model, replace the loop by one `HMM` distribution, get the same loss and the same
# gradient to rounding, and train it in a fraction of the time; then, how to ask for a
# distribution over parameters in place of a point.
#
# A casino changes between a fair die and a loaded one (Durbin et al., 1998), and we see only the
# rolls. We know the truth, so we can check what we learn.

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
# ## By hand
#
# Each roll has a site for its die, enumerated in parallel, inside `pyro.markov`.


# %%
def parameters():
    start = pyro.sample("start", Dirichlet(torch.ones(2)))
    move = pyro.sample("move", Dirichlet(torch.ones(2, 2)).to_event(1))
    face = pyro.sample("face", Dirichlet(torch.ones(2, 6)).to_event(1))
    return start, move, face


def by_hand(data):
    start, move, face = parameters()
    die = None
    with pyro.plate("sequences", len(data)):
        for t in pyro.markov(range(data.num_steps)):
            law = start if die is None else move[die]
            die = pyro.sample(f"die_{t}", Categorical(law), infer={"enumerate": "parallel"})
            pyro.sample(f"roll_{t}", Categorical(face[die]), obs=data.values[:, t])


# %% [markdown]
# ## With pyrohmm
#
# The loop becomes one distribution whose `log_prob` sums over all paths of dice.


# %%
def summed_out(data):
    start, move, face = parameters()
    hmm = HMM(start.log(), move.log(), Categorical(face), data.lengths)
    with pyro.plate("sequences", len(data)):
        pyro.sample("rolls", hmm, obs=data.values)
    return hmm


# %% [markdown]
# ## They are the same model
#
# At the same point, both have the same loss and the same gradient.

# %%
point = {
    "start": torch.tensor([0.6, 0.4]),
    "move": torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
    "face": torch.tensor([[0.2, 0.1, 0.2, 0.1, 0.2, 0.2], [0.1, 0.2, 0.1, 0.2, 0.2, 0.2]]),
}


def loss_and_gradient(model, elbo):
    pyro.clear_param_store()
    guide = AutoDelta(
        poutine.block(model, expose=["start", "move", "face"]),
        init_loc_fn=init_to_value(values=point),
    )
    guide(data)
    unknowns = list(guide.parameters())

    def evaluate():
        loss = elbo.differentiable_loss(model, guide, data)
        return loss, torch.autograd.grad(loss, unknowns)

    evaluate()  # whatever is done once is done here
    times = []
    for _ in range(3):
        start_time = time.perf_counter()
        loss, gradient = evaluate()
        times.append(time.perf_counter() - start_time)
    return loss.item(), torch.cat([g.flatten() for g in gradient]), sorted(times)[1]


loss_1, gradient_1, seconds_1 = loss_and_gradient(by_hand, TraceEnum_ELBO(max_plate_nesting=1))
loss_2, gradient_2, seconds_2 = loss_and_gradient(summed_out, Trace_ELBO())
print(f"loss      by hand {loss_1:.3f}   summed out {loss_2:.3f}")
difference = (gradient_1 - gradient_2).abs().max() / gradient_1.norm()
print(f"gradient  largest difference {difference:.1e} of its norm")
print(f"time      by hand {1e3 * seconds_1:.0f} ms   summed out {1e3 * seconds_2:.1f} ms")
print(f"          {seconds_1 / seconds_2:.0f} times as fast")
torch.testing.assert_close(loss_1, loss_2, rtol=1e-5, atol=0.0)
torch.testing.assert_close(gradient_1, gradient_2, rtol=1e-3, atol=1e-2)

# %% [markdown]
# (`pyrohmm.EnumeratedModel` writes the loop for you, and `pyrohmm.markov_sample("rolls", hmm,
# obs=data.values)` does so inside a model of your own.)
#
# ## MAP: a point
#
# The likelihood of the truth is the mark to reach.

# %%
pyro.set_rng_seed(1)
fit = fit_map(summed_out, data, num_steps=10 if SMOKE else 1000)
hmm = fit.hmm(data)
print(fit.summary())

start, move, face = datasets.casino_parameters()
truth = HMM(start.log(), move.log(), Categorical(face), data.lengths)
rolls = data.num_observed
print(f"truth   {truth.log_prob(data.values).sum() / rolls:.4f} nats a roll")
print(f"learnt  {hmm.log_prob(data.values).sum() / rolls:.4f} nats a roll")
guessed = metrics.one_to_one_accuracy(hmm.viterbi(data.values), data.labels)
known = metrics.one_to_one_accuracy(truth.viterbi(data.values), data.labels)
print(f"the die is right at {guessed:.1%} of the rolls; knowing the truth, at {known:.1%}")

# %% [markdown]
# ## SVI: a distribution
#
# Nothing changes but the guide. We start it at the MAP point, and ask how sure we can be that
# the loaded die shows a six half of the time.

# %%
guide = AutoNormal(
    summed_out,
    init_loc_fn=init_to_value(values=fit.guide.median(data)),
    init_scale=0.02,
)
svi = fit_svi(summed_out, guide, data, num_steps=10 if SMOKE else 1000, learning_rate=0.01)
print(svi.summary())

draws = [svi.hmm(data) for _ in range(20 if SMOKE else 400)]
sixes = torch.stack([draw.emission.probs[:, 5].max() for draw in draws])
low, high = sixes.quantile(torch.tensor([0.05, 0.95])).tolist()
print(f"p(six | loaded): 90 % between {low:.3f} and {high:.3f}; the truth is 0.500")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.hist(sixes.numpy(), bins=25, density=True, color="C0", alpha=0.8)
left.axvline(0.5, color="black", linestyle="--", label="truth")
left.set_xlabel("p(six | loaded die)")
left.set_ylabel("density under the guide")
left.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)

loaded = int(hmm.emission.probs[:, 5].argmax())
law = hmm.posterior(data.values).states[0, :, loaded]
right.plot(law, label="p(loaded | rolls)")
right.fill_between(
    range(data.num_steps), data.labels[0], step="mid", color="0.85", label="loaded in truth"
)
right.set_xlabel("roll")
right.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)
if Path("figures").is_dir() and not SMOKE:
    figure.savefig("figures/casino.png", dpi=150)
plt.show()
