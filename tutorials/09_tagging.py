# %% [markdown]
# # 9. Tagging words
#
# A tagger reads words and says what each is: noun, verb, adverb. Its simplest HMM has a state for
# each tag. Here states are many more than tags, and each emits a word *and* a tag:
#
# $$p(w, y, z) = \prod_t p(w_t \mid z_t)\, p(y_t \mid z_t)\, p(z_t \mid z_{t-1})$$
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $w_t$, $y_t$ | `values[..., 0]`, `values[..., 1]` | a word; its tag, or -1 if not known |
# | $p(w \mid z)$ | `hmm.log_emission` | only words of the state's block |
# | $p(y \mid z)$ | `hmm.log_tags` | any tag |
#
# What a doubtful reader wants to know: is decoding exact? Do sentences without tags help? What
# happens to words that were never seen? And is it better than the simple one? The language is made
# up, so that there is a best possible answer to compare with.

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt

from pyrohmm import (
    BlockHMM,
    MarginalModel,
    NeuralTagger,
    Sequences,
    TabularHMM,
    TaggedHMM,
    blocks,
    categorical,
    cooccurrence,
    fit_em,
    fit_map,
    readers,
)
from pyrohmm.data.tags import tagged
from pyrohmm.language.clusters import brown

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## A language
#
# Its grammar has 14 states and 8 tags. Two kinds of verbs have one tag: those that *hit* want an
# object, those that *sleep* want none. Many words have several tags, and most are rare.

# %%
TAG = {"det": "DET", "adj": "ADJ", "noun": "NOUN", "pron": "PRON", "modal": "AUX", "hit": "VERB",
       "sleep": "VERB", "its": "DET", "big": "ADJ", "thing": "NOUN", "it": "PRON", "adv": "ADV",
       "prep": "PREP", "stop": "."}  # fmt: skip
NEXT = {
    "det": {"noun": 0.7, "adj": 0.3},
    "adj": {"noun": 1.0},
    "noun": {"hit": 0.4, "sleep": 0.3, "modal": 0.3},
    "pron": {"hit": 0.4, "sleep": 0.3, "modal": 0.3},
    "modal": {"hit": 0.5, "sleep": 0.5},
    "hit": {"its": 0.3, "thing": 0.4, "big": 0.1, "it": 0.2},
    "its": {"thing": 0.7, "big": 0.3},
    "big": {"thing": 1.0},
    "thing": {"stop": 0.5, "prep": 0.3, "adv": 0.2},
    "it": {"stop": 0.5, "prep": 0.3, "adv": 0.2},
    "sleep": {"adv": 0.5, "prep": 0.4, "stop": 0.1},
    "adv": {"stop": 0.7, "prep": 0.3},
    "prep": {"its": 0.6, "thing": 0.4},
    "stop": {"det": 0.5, "noun": 0.2, "pron": 0.2, "adj": 0.1},  # also where sentences begin
}
CLOSED = {"DET": "the a this that", "PRON": "she they this that", "AUX": "can will may",
          "PREP": "in on by like past", "ADV": "fast past here", ".": "."}  # fmt: skip


def stems(count):
    """Words that nobody knows."""
    parts = [[c + v for c in "bdfgklmnprstvz" for v in "aeiou"], list("bdgklmnprt")]
    drawn = [torch.randint(len(part), (count, 2)).tolist() for part in parts]
    return [f"{parts[0][a]}{parts[0][b]}{parts[1][c]}" for (a, b), (c, _) in zip(*drawn)]


many = stems(60)  # nouns, verbs, adjectives and adverbs alike
things = [stem + ending for stem in stems(150) for ending in ("", "s", "er", "tion")]
OPEN = {
    "noun": many + [f"{stem}s" for stem in many] + things,
    "hit": many[:30] + [stem + e for stem in many[:30] + stems(30) for e in ("s", "ed")],
    "sleep": many[30:] + [stem + e for stem in many[30:] + stems(30) for e in ("s", "ed")],
    "adj": many[10:40] + [stem + e for stem in stems(40) for e in ("ous", "able")],
    "adv": many[20:50] + [f"{stem}ly" for stem in stems(60)],
}
OPEN |= {"thing": OPEN["noun"], "big": OPEN["adj"]}

states, tags = list(TAG), readers.Vocabulary(dict.fromkeys(TAG.values()))
moves = torch.tensor([[NEXT[a].get(b, 0.0) for b in states] for a in states])
language = readers.Vocabulary(
    dict.fromkeys(w for s in states for w in OPEN.get(s, []) + CLOSED.get(TAG[s], "").split())
)
spoken = torch.zeros(len(states), len(language))
for row, state in enumerate(states):
    for words in (OPEN.get(state, []), CLOSED.get(TAG[state], "").split()):
        order = sorted(torch.randperm(len(words)).tolist(), key=lambda n: words[n] not in many)
        for rank, n in enumerate(order):  # those of several tags are the frequent ones
            spoken[row, language.index(words[n])] += 1 / (rank + 5)
for same, other in (("thing", "noun"), ("big", "adj")):
    spoken[states.index(same)] = spoken[states.index(other)]
spoken /= spoken.sum(-1, keepdim=True)

one_block = blocks.from_clusters(torch.zeros(len(language), dtype=torch.long), len(states))
tag_of = torch.tensor([[float(TAG[s] == tag) for tag in tags] for s in states])


def truth(lengths):
    """The language itself: a TaggedHMM need not be neural."""
    begin = moves[states.index("stop")]
    words = BlockHMM(begin.log(), moves.log(), spoken.T.log(), one_block, lengths)
    return TaggedHMM(words, tag_of.log())


def speak(count):
    """Sentences: words with tags as labels."""
    values, path = truth(torch.full((count,), 30)).sample_with_states()
    ends = path == states.index("stop")
    kept = ends.any(-1)  # all but one in a million
    return Sequences(
        values[kept][..., 0], ends[kept].byte().argmax(-1) + 1, labels=values[kept][..., 1]
    )[:]  # as wide as the longest


few, plenty, test = speak(150), speak(600 if SMOKE else 2500), speak(600)
for n in range(3):
    length = int(test.lengths[n])
    words = language.decode(test.values[n, :length])
    print(" ".join(f"{w}/{t}" for w, t in zip(words, tags.decode(test.labels[n, :length]))))

# %% [markdown]
# ## Words that are not known
#
# The vocabulary is that of the text for training. A word that occurs once there gives way to a
# symbol for its kind, `word_classes`; so do words of new text that are not listed. In this way such
# symbols have been seen in training, and an unknown word is not a blank: it ends in something.
#
# A hundred and fifty sentences have tags, and many more have none.

# %%
print(readers.word_classes("Mozation"), readers.word_classes("pidly"))


def spelt(data):
    return language.decode(data.values[data.exists])


vocabulary = readers.Vocabulary.from_counts(
    spelt(few) + spelt(plenty), min_count=2, unknown=readers.word_classes
)


def read(data):
    values = torch.zeros_like(data.values)
    values[data.exists] = vocabulary.encode(spelt(data))
    return Sequences(values, data.lengths, labels=data.labels)


with_tags, without, new = read(few), read(plenty).without_labels(), read(test)
in_few = torch.tensor([word in set(spelt(few)) for word in spelt(test)])
in_text = torch.tensor([word in vocabulary for word in spelt(test)])
print(len(vocabulary), "symbols:", [word for word in vocabulary if word[0] == "<"])
print(f"words without a tag in training: {1 - in_few.double().mean():.1%}, "
      f"that are not listed: {1 - in_text.double().mean():.1%}")  # fmt: skip


# %% [markdown]
# ## What there is to beat
#
# The most frequent tag of each word; and a tabular HMM with a state for each tag (tutorial 7),
# fitted in one step to the sentences with tags.


# %%
def report(name, found):
    """Shares of words whose tag is right."""
    right = (found == test.labels)[test.exists].double()
    scores[name] = right.mean().item(), right[~in_few].mean().item()
    print(f"{name:40s} all {scores[name][0]:.4f}, without a tag in training {scores[name][1]:.4f}")


scores = {}
counts = torch.zeros(len(vocabulary), len(tags))
exists = with_tags.exists
counts.index_put_(
    (with_tags.values[exists], with_tags.labels[exists]), torch.ones(()), accumulate=True
)
report("most frequent tag", (counts + 0.001 * counts.sum(0)).argmax(-1)[new.values])

simple = fit_em(TabularHMM(len(tags), categorical(len(vocabulary), 1.1), 1.1, 1.1), with_tags)
law = simple.hmm(new.without_labels())
report("tabular, sentences with tags", law.posterior(new.values).states.argmax(-1))

exact = tagged(test.without_labels())
report("the language itself", truth(test.lengths).best_tags(exact.values))

# %% [markdown]
# The last line is a limit: no tagger of these words can be right more often, for words do have
# several tags. (It knows all words.)
#
# ## The neural tagger
#
# Its states come in blocks: one for each Brown cluster of the words of the text. A word can only
# come from the states of its block, which is what makes thousands of states possible; here a few
# will do. Networks make all probabilities from embeddings of states.


# %%
together = cooccurrence.count_pairs(
    Sequences.from_list(
        [row[:n] for each in (with_tags, without) for row, n in zip(each.values, each.lengths)]
    ),
    len(vocabulary),
)
clusters = brown(together, 12, progress=False).assignment


def tagger():
    pyro.set_rng_seed(0)
    module = NeuralTagger(
        192, len(vocabulary), len(tags), 48,
        blocks=blocks.from_clusters(clusters, 16), two_level=True, dropout=0.25,
    )  # fmt: skip
    with torch.no_grad():
        module.start_vectors.state *= 1 / 8  # so that it begins near indifference
    return MarginalModel(module)


def fit(data, num_steps):
    num_steps = 20 if SMOKE else num_steps
    return fit_map(
        tagger(), data, num_steps=num_steps, batch_tokens=2048, tolerance=None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.005, weight_decay=0.1),
        schedule=lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, num_steps),
    )  # fmt: skip


alone = fit(tagged(with_tags), 150)
words = tagged(new.without_labels())
report("neural, sentences with tags", alone.hmm(words).best_tags(words.values))

# %% [markdown]
# ## Sentences without tags
#
# A tag of -1 is summed out. So supervised, half-supervised and unsupervised is one call on
# different data: the same as above with more sentences. (The simple model takes the same data as
# labels of its states, from where the sentences with tags have left it.)

# %%
rows = [
    row[:n]
    for each in (tagged(with_tags), tagged(without))
    for row, n in zip(each.values, each.lengths.tolist())
]
both = Sequences.from_list(rows)
print(f"{(both.values[both.exists][:, 1] >= 0).sum()} of {both.num_observed} words have tags")
again = Sequences(both.values[..., 0], both.lengths, labels=both.values[..., 1])
for num_steps in (3, 20):
    more = fit_em(
        TabularHMM(len(tags), categorical(len(vocabulary), 1.1), 1.1, 1.1), again,
        start=simple.values, num_steps=num_steps, tolerance=None,
    )  # fmt: skip
    law = more.hmm(new.without_labels())
    report(
        f"tabular, all sentences, {num_steps} steps", law.posterior(new.values).states.argmax(-1)
    )

half = fit(both, 500)
hmm = half.hmm(words)
report("neural, all sentences", hmm.best_tags(words.values))
report("neural, all sentences, best path", hmm.best_path(words.values).tags)

# %% [markdown]
# Verbs that want an object and verbs that want none are one state of the tabular HMM. Sentences
# without tags help it at first; after twenty steps most of that is gone, for its states have ceased
# to be tags, as in tutorial 7. The neural tagger has states to spare for what the words show, and
# is right more often with those sentences than without. (Without them it has seen their words all
# the same, in the Brown clusters.) It is still short of the language itself.

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for place, (every, strange) in enumerate(scores.values()):
    axis.plot([strange, every], [place, place], "-", color="0.8", zorder=0)
    axis.plot(every, place, "o", color="C0", label="all words" if place == 0 else None)
    axis.plot(strange, place, "s", color="C1", label="no tag in training" if place == 0 else None)
axis.set_yticks(range(len(scores)), scores)
axis.invert_yaxis()
axis.set_xlabel("tags that are right")
axis.legend()
plt.show()

# %% [markdown]
# ## Decoding is exact
#
# A tag depends on nothing but its state, so that
#
# $$p(y_t \mid w) = \sum_k p(y_t \mid z_t = k)\, p(z_t = k \mid w)$$
#
# is no approximation: one run of the forward-backward algorithm, and no other guess is right at
# more steps, if the model is right. (It is fitted, not right: above, the best path is no worse.)
# Three more questions have exact answers: the most probable path of states and tags together, draws
# from $p(y \mid w)$, and the probability of a whole tagging. Only the most probable tagging, states
# summed out, is out of reach. All of them of one sentence:

# %%
doubt = (1 - hmm.tag_probs(words.values).amax(-1)).masked_fill(~new.exists, 0).amax(-1)
n = int(doubt.masked_fill(new.lengths > 9, 0).argmax())  # a short sentence, the least certain
length = int(new.lengths[n])
sentence = language.decode(test.values[n, :length])
one, values = hmm.with_lengths(torch.tensor([length])), words.values[n : n + 1, :length]
guess = {
    "true": test.labels[n : n + 1, :length], "best tags": one.best_tags(values),
    "best path": one.best_path(values).tags, "a draw": one.sample_tags(values),
}  # fmt: skip
print(" " * 12, "  ".join(sentence))
for name, found in guess.items():
    whole = torch.stack([values[..., 0], found], -1)
    chance = one.log_prob_of_tags(whole).exp().item()
    print(f"{name:12s}", " ".join(tags.decode(found[0])), f"probability {chance:.4f}")

drawn = one.sample_tags(values, (4000,))
share = torch.nn.functional.one_hot(drawn, len(tags)).double().mean(0)
gap = (share - one.tag_probs(values)).abs().max()
print(f"largest gap between 4000 draws and the probabilities: {gap:.3f}")

# %% [markdown]
# A tag that somebody has filled in is a fact, and bears on its neighbours:

# %%
probs = one.tag_probs(values)[0]
unsure = int(probs.amax(-1).argmin())
second = int(probs[unsure].argsort(descending=True)[1])
told = values.clone()
told[0, unsure, 1] = second
print(f"{sentence[unsure]!r} is {tags[second]} with probability {probs[unsure, second]:.2f}. "
      "If it is, the others are:")  # fmt: skip
for word, before, after in zip(sentence, probs, one.tag_probs(told)[0]):
    print(f"{word:>12s}  {tags[int(before.argmax())]:4s} {before.max():.2f} -> "
          f"{tags[int(after.argmax())]:4s} {after.max():.2f}")  # fmt: skip
