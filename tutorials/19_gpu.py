# %% [markdown]
# # 19. The same model on a GPU
#
# Every tensor of a model lives on a device, and what is computed from it stays there. To train on a
# GPU one moves the model, and nothing else of the program changes. What does change is which
# programs are fast: a GPU computes much at once, one thing after another slowly, and idles while it
# waits for the host. This tutorial runs on a CPU as well; where there is a GPU, the same cells use
# it.
#
# | on paper | in code | here |
# | --- | --- | --- |
# | where parameters are | `module.to(device)` | `cuda` if there is one, or `cpu` |
# | $N$ sequences at once | `batch_tokens=`, `restarts=` | what fills a GPU |
# | $t = 1, \dots, T$ | one after the other | what no GPU does at once |

# %%
import os
import tempfile
import time

import pyro
import torch
from matplotlib import pyplot as plt
from pyro.distributions import Categorical

from pyrohmm import (
    HMM,
    Filter,
    MarginalModel,
    TabularHMM,
    categorical,
    datasets,
    fit_map,
    load_hmm,
    save,
)

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
steps = 20 if SMOKE else 200
print(device)

# %% [markdown]
# ## What changes
#
# `.to(device)`, once. The fit runs where the parameters are; the data may stay on the CPU, and each
# batch is moved as it is used. Data that fit into the memory of the device are better moved once,
# before the fit.

# %%
data = datasets.casino(num_sequences=256, num_steps=100).without_labels()


def fitted(where):
    """Losses and parameters of a fit on a device, from one seed."""
    pyro.set_rng_seed(0)
    module = TabularHMM(2, categorical(6)).to(where)
    return fit_map(MarginalModel(module), data.to(where), num_iterations=steps, tolerance=None)


fit = fitted(device)
print(fit.hmm(data.to(device)).emission.probs)  # on the device

# %% [markdown]
# First values are drawn on the CPU, so that a seed gives the same start on every device. Gradients
# are sums in another order, so that the last digits may differ from those of the CPU, and between
# two runs on a GPU. What each step of SVI, Gibbs sampling or HMC draws is drawn on the device, and
# is not the same.

# %%
here = fitted("cpu")
apart = (here.losses - fit.losses.cpu()).abs().max()
print(f"loss {here.losses[-1]:.2f} on the CPU, {fit.losses[-1]:.2f} on {device}; apart {apart:.1e}")

# %% [markdown]
# A saved model knows no device: what was trained on a GPU is loaded where there is none.

# %%
with tempfile.TemporaryDirectory() as folder:
    save(fit.hmm(data.to(device)), folder)
    hmm = load_hmm(folder)
print(hmm.log_transition.device)

# %% [markdown]
# ## How many at once
#
# A call costs a fixed time: Python, the launch of each kernel, the steps one after the other. Only
# what is computed at once fills a device. So one gives it many sequences, and restarts as one batch
# (`restarts=16`), not in a loop; for language models, `batch_tokens=` of thousands.


# %%
def seconds_of(size, num_steps=50, num_states=16, num_symbols=64):
    """Time of evidence and gradient of sequences in one batch; the least of some calls."""
    torch.manual_seed(0)
    sizes = (num_states,), (num_states, num_states), (num_states, num_symbols)
    logits = [torch.randn(shape, device=device, requires_grad=True) for shape in sizes]
    values = torch.randint(num_symbols, (size, num_steps), device=device)
    lengths = torch.full((size,), num_steps)  # lengths stay on the CPU
    taken = []
    for _ in range(2 if SMOKE else 10):
        start = time.perf_counter()
        initial, transition, emission = (part.log_softmax(-1) for part in logits)
        model = HMM(initial, transition, Categorical(logits=emission), lengths)
        torch.autograd.grad(model.log_prob(values).sum(), logits)
        if device.type == "cuda":
            torch.cuda.synchronize()  # a GPU is still at work when a call returns
        taken.append(time.perf_counter() - start)
    return min(taken)


sizes = [1, 4, 16, 64] if SMOKE else [1, 4, 16, 64, 256, 1024, 4096]
times = [seconds_of(size) for size in sizes]
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
axis.loglog(sizes, [1e6 * t / size for t, size in zip(times, sizes)], "o-")
axis.set_xlabel("sequences in a batch")
axis.set_ylabel("microseconds a sequence")
axis.set_title(f"evidence and gradient, 16 states, 50 steps, on {device.type}")
plt.show()

# %% [markdown]
# The curve falls as long as more sequences share the fixed cost, and is flat when the device is
# full. A CPU is full early, a GPU late: left of where the curve of a GPU turns, most of the GPU
# idles.
#
# ## What not to do
#
# **Do not read in a loop.** `.item()`, `print`, `float(loss)` and `if loss < best` wait until the
# device has finished, and then it waits for the host. Keep losses as tensors and read them at the
# end. The fits of this package do so; a loop of your own should:

# %%
module = TabularHMM(2, categorical(6)).to(device)
moved, losses = data.to(device), []
pyro.set_rng_seed(0)
model, guide = MarginalModel(module), pyro.infer.autoguide.AutoDelta(MarginalModel(module))
loss_of = pyro.infer.Trace_ELBO()(model, guide)
loss_of(moved)  # makes the parameters
optimizer = torch.optim.Adam(loss_of.parameters(), lr=0.05)
for _ in range(steps):
    optimizer.zero_grad()
    loss = loss_of(moved)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())  # not .item()
print(torch.stack(losses)[-5:])  # one read, of all

# %% [markdown]
# **Do not go step by step.** A `Filter` reads one observation at a time, and is no work for a GPU.
# Load the model on the CPU, as above, and filter there; a whole recording goes into one
# `hmm.filtered(values)`, on any device.

# %%
stream = Filter(hmm)
for t in range(3):
    print(stream.update(data.values[:, t])[0])  # of the first of 256 sequences

# %% [markdown]
# **Do not make data anew at each step**, nor move them from the CPU: a copy from ordinary memory
# waits for the device, too. And **do not use float64** without need: most GPUs have few units for
# it. Evidence is safe in float32, since what leaves its range is computed again in a wider one.
#
# ## When a GPU pays
#
# Measured on 26 and 27 November 2026 with a version of this package of those days on an NVIDIA H100
# (`figures/gpu_throughput.json`), beside two cores of another machine: milliseconds of evidence and
# gradient of N sequences of T steps, K states, V symbols, in float32.
#
# | N, T, K, V | GPU | two cores of a CPU | |
# | --- | --- | --- | --- |
# | 8, 64, 16, 16 | 6.9 | 1.3 | small: the CPU |
# | 256, 100, 16, 64 | 11.5 | 2.9 | few states: the CPU |
# | 1, 10000, 8, 32 | 13.4 | 4.9 | one long sequence: the CPU |
# | 64, 200, 128, 1000 | 22.7 | 19 | as fast |
# | 32, 64, 1024, 1000 | 11.0 | 115 | many states: the GPU |
#
# The package has changed since, in order to launch fewer kernels, and has not been timed on a GPU
# again: measure your own shape, as above. In these numbers a GPU paid for a thousand states, and
# not for a hundred or fewer. It should also pay for emissions that are networks, and for thousands
# of sequences or restarts at once, which was not measured. The guide's page on devices says what
# memory large models take, and how several GPUs share a fit.
