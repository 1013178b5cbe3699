# %% [markdown]
# # 14. Music: chords found in chorales, and bars that nobody wrote
#
# A chord is a set of keys that are down. Four-part music is a sequence of such sets, and a hidden
# Markov model of it explains each by a state that nobody has written into the score: in state $k$
# key $d$ is down with probability $B_{kd}$, and the states follow each other as the harmonies do.
# Keys that are not known (three voices of four, say) are simply missing, and every answer remains
# exact.
#
# | on paper | in code | shape |
# | --- | --- | --- |
# | $x_{td} \in \{0, 1\}$, key $d$ is down at step $t$ | `data.values` | `(N, T, 88)` |
# | $B_{kd} = p(x_{td} = 1 \mid z_t = k)$ | `hmm.emission.mean` | `(K, 88)` |
# | $A_{jk}$, which state is next | `hmm.log_transition` | `(K, K)` |
# | $p(z_t = k \mid \text{known keys})$ | `hmm.posterior(values).state_probs` | `(N, T, K)` |
#
# The music is that of Bach's chorales in the collection of Boulanger-Lewandowski et al. (2012), if
# the folder `$PYROHMM_DATA` has it; otherwise triads that this tutorial makes up, so that each cell
# runs. What the text says of numbers it says of the chorales.

# %%
import os
import tempfile
from pathlib import Path

import pyro
import torch
from matplotlib import pyplot as plt
from scipy.io import loadmat

from pyrohmm import Sequences, TabularHMM, bernoulli, fit_em, queries

try:
    import mido
except ImportError:  # pip install pyrohmm[music]
    mido = None

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)
KEYS, LOWEST = 88, 21  # of a piano, and the number of its lowest key in MIDI


def made_up(number, steps=48):
    """Triads of a major scale in four voices; the upper ones take the nearest notes of each."""
    pieces = []
    for _ in range(number):
        tonic, degree, roll = int(torch.randint(24, 32, ())), 0, torch.zeros(steps, KEYS)
        for t in range(0, steps, 2):
            scale = [tonic + 12 * (d // 7) + [0, 2, 4, 5, 7, 9, 11][d % 7] for d in range(28)]
            tones = {scale[degree + step] % 12 for step in (0, 2, 4)}
            upper = [key for key in range(tonic + 12, tonic + 30) if key % 12 in tones]
            first = int(torch.randint(0, 3, ()))
            roll[t : t + 2, [scale[degree], *upper[first : first + 3]]] = 1.0
            degree = (degree + [3, 4, 5, 1][int(torch.randint(0, 4, ()))]) % 7
        pieces.append(roll)
    return Sequences.from_list(pieces)


path = Path(os.environ.get("PYROHMM_DATA", "."), "music", "JSB_Chorales.mat")
if path.exists():
    tables = loadmat(path)
    splits = {
        split: Sequences.from_list([torch.tensor(roll).float() for roll in tables[key].ravel()])
        for split, key in (("train", "traindata"), ("valid", "validdata"), ("test", "testdata"))
    }
else:
    print("no chorales under $PYROHMM_DATA: made-up music instead")
    splits = {"train": made_up(100), "valid": made_up(30), "test": made_up(30)}
if SMOKE:
    splits = {name: data[:15] for name, data in splits.items()}
train, test = splits["train"], splits["test"]
print({name: f"{len(data)} pieces, {data.num_observed} steps" for name, data in splits.items()})

# %% [markdown]
# ## States that sound
#
# A Beta prior keeps keys off zero and one: a key that no training piece has in a state is
# improbable there, not impossible. One state is the null model, in which keys are independent of
# each other and of the past. EM fits 48.

# %%
num_states, num_steps = (8, 3) if SMOKE else (48, 30)


def fitted(size, data):
    """An HMM of independent keys, by EM."""
    emission = bernoulli(data.values.size(-1), 1.02, 1.2)
    return fit_em(TabularHMM(size, emission, 1.01, 1.01), data, num_iterations=num_steps)


def nats(fit, data):
    """Minus log evidence per step: less is better."""
    return -float(fit.hmm(data).log_prob(data.values).sum()) / data.num_observed


single, fit = fitted(1, train), fitted(num_states, train)
print(f"test nats a step: one state {nats(single, test):.2f}, {num_states} {nats(fit, test):.2f}")

# %% [markdown]
# What the past and the other keys tell is worth 3.6 nats a step. What are the states? Here are
# those in which most of the time is spent, by the keys that are down more often than not, from the
# bass upwards, and the state that most often comes next.

# %%
NAMES = "C C# D Eb E F F# G Ab A Bb B".split()


def name_of(key):
    """A key of the piano by name and octave."""
    note = LOWEST + key
    return f"{NAMES[note % 12]}{note // 12 - 1}"


def chord_of(probs):
    """Keys that are down more often than not."""
    return " ".join(name_of(key) for key in (probs > 0.5).nonzero().flatten().tolist()) or "(vague)"


hmm = fit.hmm(train)
usage = hmm.posterior(train.values).state_probs.sum((0, 1))
keys, follows = hmm.emission.mean, hmm.log_transition.exp()
for k in usage.argsort(descending=True)[:8].tolist():
    others = follows[k].clone()
    stays, others[k] = float(others[k]), 0.0
    after = int(others.argmax())
    share, chord = usage[k] / usage.sum(), chord_of(keys[k])
    print(f"{share:5.1%} of the time {chord:18s} stays {stays:.2f}, then {chord_of(keys[after])}")

# %% [markdown]
# Chords, then, each at its place on the keyboard: tonic, dominant and the way between them, in C
# major and C minor, into which the collection has transposed all pieces. Below is a piece of the
# test set, which no fit has seen: at each step the keys that are down, in the colour of the state
# that the best path gives it (48 states share twenty colours). The same chord has the same colour
# wherever it returns.


# %%
def draw_roll(roll, states, axis, title):
    """Keys that are down as bars; the colour is that of the state."""
    colours = plt.get_cmap("tab20")
    for t, key in roll.nonzero().tolist():
        colour = colours(int(states[t]) % 20)
        axis.barh(key, 1.0, height=0.9, left=t - 0.5, color=colour)
    axis.set_xlim(-0.5, len(roll) - 0.5)
    axis.set_ylabel("key")
    axis.set_title(title, fontsize=10)


heard = fit.hmm(test)
paths = heard.viterbi(test.values)
piece = 0
length = min(48, int(test.lengths[piece]))
figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
draw_roll(test.values[piece, :length], paths[piece], axis, "a piece that no fit has seen")
axis.set_xlabel("step")
plt.show()

# %% [markdown]
# ## A melody is given, the other voices are not
#
# Take the highest key of each chord of the test pieces and forget the others. What lies above the
# melody is known to be silent; what lies below is missing: NaN. The posterior of the states given
# the melody alone has a probability for every key below it. We let it name as many keys as there
# were, and count how many were right. To name the commonest keys of all is the bar to clear.

# %%
values = test.values
top = (values * torch.arange(1.0, KEYS + 1)).amax(-1, keepdim=True) - 1
below = torch.arange(KEYS) < top
melody = values.masked_fill(below, torch.nan)
smoothed = heard.posterior(melody).state_probs @ keys
commonest = single.hmm(test).emission.mean[0].expand_as(smoothed)


def share_found(scores):
    """Share of the lower keys that are among as many of the highest score."""
    scores = scores.masked_fill(~below, -1.0)
    ranks = scores.argsort(-1, descending=True).argsort(-1)
    lower = (values == 1) & below
    found = lower & (ranks < lower.sum(-1, keepdim=True))
    return float(found[test.exists].sum() / lower[test.exists].sum())


for name, scores in {"the melody": smoothed, "the commonest keys": commonest}.items():
    print(f"lower keys found by {name}: {share_found(scores):.1%}")

# %% [markdown]
# Nearly half of the keys are those that Bach took, against a third. The others need not be wrong:
# a melody has more than one harmony, and a chord more than one position.
#
# ## Keys that are held
#
# Given its state, a key of this model knows nothing of itself a step ago. Voices do: they hold
# their notes. The smallest change that says so gives each key two probabilities in each state, one
# for where it was up and one for where it was down. That needs no new code. We write each key into
# the first of two columns if it was up before, into the second if it was down, and leave the other
# column missing: independent Bernoulli columns with gaps are then an autoregressive HMM, and EM
# has a closed form for it.


# %%
def told_apart(data):
    """Two columns for each key, of which one is missing: was it up before, or down?"""
    was_down = torch.nn.functional.pad(data.values[:, :-1], (0, 0, 1, 0)) == 1
    columns = [data.values.masked_fill(gone, torch.nan) for gone in (was_down, ~was_down)]
    return Sequences(torch.cat(columns, -1), data.lengths)


holding = fitted(num_states, told_apart(train))
print(f"test nats a step: {nats(holding, told_apart(test)):.2f}")
up, down = holding.hmm(told_apart(test)).emission.mean.split(KEYS, -1)
often = train.values[train.observed].mean(0) > 0.05
print(f"of the keys in use, down after up: {up[:, often].mean():.3f}, "
      f"down after down: {down[:, often].mean():.3f}")  # fmt: skip

# %% [markdown]
# ## Bars that nobody wrote
#
# Now the model continues a test piece. `queries.continuation` is the distribution of what follows
# the first eight steps: itself an HMM, whose first state has the distribution that those steps
# leave. We sample its states at once, and the keys one step after another, for each reads whether
# it was down. Above it is the model whose keys have no memory.

# %%
GIVEN, AHEAD = 8, 32


def continued(model, data, repeat):
    """The first steps of the pieces, and steps that are sampled to follow them."""
    opening = Sequences(data.values[:, :GIVEN], data.lengths.clamp(max=GIVEN))
    read = told_apart(opening) if repeat else opening
    ahead = queries.continuation(model.hmm(read), read.values, AHEAD)
    states = ahead.sample_with_states()[1]
    probs, chords = ahead.emission.mean, [opening.values[:, -1]]
    for t in range(AHEAD):
        own = probs[states[:, t]]
        if repeat:
            if_up, if_down = own.split(KEYS, -1)
            own = torch.where(chords[-1] == 1, if_down, if_up)
        chords.append(torch.bernoulli(own))
    seen = model.hmm(read).viterbi(read.values)
    whole = torch.cat([opening.values, torch.stack(chords[1:], 1)], 1)
    return whole, torch.cat([seen, states], 1)


long = test[test.lengths >= GIVEN + AHEAD]
figure, axes = plt.subplots(2, 1, figsize=(9, 6), layout="constrained", sharex=True, sharey=True)
rolls = {}
for axis, (title, model) in zip(axes, {"free keys": fit, "keys that hold": holding}.items()):
    rolls[title], states = continued(model, long, model is holding)
    draw_roll(rolls[title][0], states[0], axis, f"{title}: sampled from step {GIVEN}")
    axis.axvline(GIVEN - 0.5, color="black", linewidth=1)
axes[1].set_xlabel("step")
plt.show()

# %% [markdown]
# The share of keys that are down and stay down, in the samples and in the pieces themselves, after
# the steps that were given:

# %%
rolls["the pieces"] = long.values[:, : GIVEN + AHEAD]
for title, roll in rolls.items():
    before, after = roll[:, GIVEN - 1 : -1], roll[:, GIVEN:]
    held = float((before * after).sum() / before.sum())
    print(
        f"{title:15s} {held:.1%} of the keys are held, {float(after.sum(-1).mean()):.2f} are down"
    )

# %% [markdown]
# With 3.9 keys at a time both write four voices. Without memory too few of them are held, with it a
# few too many; what no state of either knows is that voices avoid each other, for given its state
# each key is still on its own. The network of `figures/music.py` that reads the lower keys of the
# same chord does know, and is ahead by far.
#
# ## To be heard
#
# A MIDI file is a list of messages: a key goes down, a key comes up, after so many ticks. A key
# that stays down gets no message, so that a held note sounds once.


# %%
def write_midi(roll, path):
    """A piano roll as a MIDI file, two steps a second."""
    track, wait, before = mido.MidiTrack(), 0, torch.zeros(KEYS)
    for chord in [*roll, torch.zeros(KEYS)]:
        for key in (chord != before).nonzero().flatten().tolist():
            kind = "note_on" if chord[key] else "note_off"
            track.append(mido.Message(kind, note=LOWEST + key, velocity=64, time=wait))
            wait = 0
        before, wait = chord, wait + 480  # ticks of a beat, half a second
    mido.MidiFile(tracks=[track]).save(path)


folder = tempfile.mkdtemp()
for title, roll in rolls.items():
    if mido is None:
        print("mido is not installed, so that no MIDI file is written: pip install pyrohmm[music]")
        break
    path = Path(folder, f"{title.replace(' ', '_')}.mid")
    write_midi(roll[0], path)
    print(f"{path.name}: {mido.MidiFile(path).length:.1f} seconds of music")

# %% [markdown]
# The files lie in `folder`; any player of MIDI plays them. The page on piano rolls has the numbers
# of these models and of larger ones, on four collections.
