# %% [markdown]
# # 9. Tagging words
#
# A part-of-speech tagger assigns each word a tag: noun, verb, adverb. Its simplest HMM has one
# state per tag. Here there are many more states than tags, and each state emits a word *and* a tag:
#
# $$p(w, y, z) = \prod_t p(w_t \mid z_t)\, p(y_t \mid z_t)\, p(z_t \mid z_{t-1})$$
#
# | on paper | in code | here |
# | --- | --- | --- |
# | $w_t$, $y_t$ | `values[..., 0]`, `values[..., 1]` | a word; its tag, or -1 if unknown |
# | $p(w \mid z)$ | `hmm.log_emission` | nonzero only for words of the state's block |
# | $p(y \mid z)$ | `hmm.log_tags` | for all tags |
#
# Four questions: Is decoding exact? Do sentences without tags help? How are unknown words treated?
# Is the model better than the simple one? The data come from a synthetic language, so that the
# accuracy of the best possible tagger is known.

# %%
import os

import pyro
import torch
from matplotlib import pyplot as plt
from torch.optim.lr_scheduler import CosineAnnealingLR

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
from pyrohmm.language.clusters import brown
from pyrohmm.nn.tagging import tagged

SMOKE = "PYROHMM_SMOKE" in os.environ  # the tests set this: same cells, fewer steps
pyro.set_rng_seed(0)

# %% [markdown]
# ## A synthetic language
#
# Its grammar is an HMM with 14 states and 8 tags. Two kinds of verbs share one tag: transitive
# verbs (state *hit*) need an object, intransitive verbs (state *sleep*) take none. Many words have
# several tags, and most words are rare.

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
    """Random word stems."""
    parts = [[c + v for c in "bdfgklmnprstvz" for v in "aeiou"], list("bdgklmnprt")]
    choices = [torch.randint(len(part), (count, 2)).tolist() for part in parts]
    return [f"{parts[0][a]}{parts[0][b]}{parts[1][c]}" for (a, b), (c, _) in zip(*choices)]


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
transition = torch.tensor([[NEXT[a].get(b, 0.0) for b in states] for a in states])
language = readers.Vocabulary(
    dict.fromkeys(w for s in states for w in OPEN.get(s, []) + CLOSED.get(TAG[s], "").split())
)
emission = torch.zeros(len(states), len(language))
for row, state in enumerate(states):
    for words in (OPEN.get(state, []), CLOSED.get(TAG[state], "").split()):
        order = sorted(torch.randperm(len(words)).tolist(), key=lambda n: words[n] not in many)
        for rank, n in enumerate(order):  # those of several tags are the frequent ones
            emission[row, language.index(words[n])] += 1 / (rank + 5)
for same, other in (("thing", "noun"), ("big", "adj")):
    emission[states.index(same)] = emission[states.index(other)]
emission /= emission.sum(-1, keepdim=True)

one_block = blocks.from_clusters(torch.zeros(len(language), dtype=torch.long), len(states))
tag_of = torch.tensor([[float(TAG[s] == tag) for tag in tags] for s in states])


def truth(lengths):
    """The language as an HMM: a TaggedHMM with known tables."""
    initial = transition[states.index("stop")]
    words = BlockHMM(initial.log(), transition.log(), emission.T.log(), one_block, lengths)
    return TaggedHMM(words, tag_of.log())


def speak(count):
    """A sample of sentences: words, with tags as labels."""
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
# ## Unknown words
#
# The vocabulary is that of the training text. A word that occurs only once there is replaced by a
# symbol for its class, chosen by its spelling (`word_classes`), and so are words of new text that
# are not in the vocabulary. The class symbols occur in training, so an unknown word still carries
# information: its ending.
#
# A hundred and fifty sentences have tags; the other training sentences have none.

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
      f"not in the vocabulary: {1 - in_text.double().mean():.1%}")  # fmt: skip


# %% [markdown]
# ## Baselines
#
# The most frequent tag of each word, and a tabular HMM with one state per tag (tutorial 7), fitted
# in one step to the tagged sentences.


# %%
def report(name, predicted):
    """Tagging accuracy, of all words and of words without a tag in training."""
    right = (predicted == test.labels)[test.exists].double()
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
simple_hmm = simple.hmm(new.without_labels())
report("tabular, tagged sentences", simple_hmm.posterior(new.values).state_probs.argmax(-1))

exact = tagged(test.without_labels())
report("true model", truth(test.lengths).best_tags(exact.values))

# %% [markdown]
# The last line is an upper bound: no tagger can be more accurate on average, because words are
# ambiguous. (It also knows all words.)
#
# ## The neural tagger
#
# Its states come in blocks, one for each Brown cluster of words, and a word is emitted only by the
# states of its block. This makes thousands of states feasible; here a few suffice. Networks compute
# all probabilities from embeddings of states.


# %%
pair_counts = cooccurrence.count_pairs(
    Sequences.from_list(
        [row[:n] for data in (with_tags, without) for row, n in zip(data.values, data.lengths)]
    ),
    len(vocabulary),
)
clusters = brown(pair_counts, 12, progress=False).assignment


def tagger():
    pyro.set_rng_seed(0)
    module = NeuralTagger(
        192, len(vocabulary), len(tags), 48,
        blocks=blocks.from_clusters(clusters, 16), two_level=True, dropout=0.25,
    )  # fmt: skip
    with torch.no_grad():
        module.start_vectors.state *= 1 / 8  # near-uniform probabilities at the start
    return MarginalModel(module)


def fit(data, num_steps):
    num_steps = 20 if SMOKE else num_steps
    return fit_map(
        tagger(), data, num_iterations=num_steps, batch_tokens=2048, tolerance=None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.005, weight_decay=0.1),
        schedule=lambda optimizer: CosineAnnealingLR(optimizer, num_steps),
    )  # fmt: skip


alone = fit(tagged(with_tags), 150)
words = tagged(new.without_labels())
report("neural, tagged sentences", alone.hmm(words).best_tags(words.values))

# %% [markdown]
# ## Sentences without tags
#
# A tag of -1 is summed out, so supervised, semi-supervised and unsupervised learning are the same
# call: the same as above with more sentences. (The tabular HMM takes the same data as labels of its
# states, and starts from the supervised fit.)

# %%
rows = [
    row[:n]
    for data in (tagged(with_tags), tagged(without))
    for row, n in zip(data.values, data.lengths.tolist())
]
both = Sequences.from_list(rows)
print(f"{(both.values[both.exists][:, 1] >= 0).sum()} of {both.num_observed} words have tags")
again = Sequences(both.values[..., 0], both.lengths, labels=both.values[..., 1])
for num_steps in (3, 20):
    more = fit_em(
        TabularHMM(len(tags), categorical(len(vocabulary), 1.1), 1.1, 1.1), again,
        start=simple.parameters, num_iterations=num_steps, tolerance=None,
    )  # fmt: skip
    more_hmm = more.hmm(new.without_labels())
    report(
        f"tabular, all sentences, {num_steps} steps",
        more_hmm.posterior(new.values).state_probs.argmax(-1),
    )

half = fit(both, 500)
hmm = half.hmm(words)
report("neural, all sentences", hmm.best_tags(words.values))
report("neural, all sentences, best path", hmm.best_path(words.values).tags)

# %% [markdown]
# The tabular HMM has a single state for transitive and intransitive verbs. Untagged sentences help
# it at first; after twenty steps most of the gain is lost, because its states no longer represent
# tags, as in tutorial 7. The neural tagger has states to spare, and untagged sentences improve its
# accuracy. (The tagger fitted to tagged sentences has already used the words of the others, in the
# Brown clusters.) It remains below the true model.

# %%
figure, axis = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for place, (accuracy, accuracy_unseen) in enumerate(scores.values()):
    axis.plot([accuracy_unseen, accuracy], [place, place], "-", color="0.8", zorder=0)
    axis.plot(accuracy, place, "o", color="C0", label=None if place else "all words")
    axis.plot(
        accuracy_unseen, place, "s", color="C1", label=None if place else "no tag in training"
    )
axis.set_yticks(range(len(scores)), scores)
axis.invert_yaxis()
axis.set_xlabel("tagging accuracy")
axis.legend()
plt.show()

# %% [markdown]
# ## Decoding is exact
#
# Given its state, a tag is independent of everything else, so
#
# $$p(y_t \mid w) = \sum_k p(y_t \mid z_t = k)\, p(z_t = k \mid w)$$
#
# is exact and takes one pass of forward-backward. If the model is correct, no other decoding has a
# higher expected accuracy per step. (The fitted model is not correct: above, the best path is no
# worse.) Three more queries are exact: the most probable path of states and tags, samples from
# $p(y \mid w)$, and the probability of a complete tagging. Only the most probable tagging with the
# states summed out is intractable. All of them for one sentence:

# %%
doubt = (1 - hmm.tag_probs(words.values).amax(-1)).masked_fill(~new.exists, 0).amax(-1)
n = int(doubt.masked_fill(new.lengths > 9, 0).argmax())  # a short sentence, the least certain
length = int(new.lengths[n])
sentence = language.decode(test.values[n, :length])
one, values = hmm.with_lengths(torch.tensor([length])), words.values[n : n + 1, :length]
taggings = {
    "true": test.labels[n : n + 1, :length], "best tags": one.best_tags(values),
    "best path": one.best_path(values).tags, "a sample": one.sample_tags(values),
}  # fmt: skip
print(" " * 12, "  ".join(sentence))
for name, tagging in taggings.items():
    pairs = torch.stack([values[..., 0], tagging], -1)
    probability = one.log_prob_of_tags(pairs).exp().item()
    print(f"{name:12s}", " ".join(tags.decode(tagging[0])), f"probability {probability:.4f}")

samples = one.sample_tags(values, (4000,))
frequencies = torch.nn.functional.one_hot(samples, len(tags)).double().mean(0)
gap = (frequencies - one.tag_probs(values)).abs().max()
print(f"largest difference of 4000 samples from the probabilities: {gap:.3f}")

# %% [markdown]
# Observing one tag changes the posterior of its neighbours:

# %%
probs = one.tag_probs(values)[0]
unsure = int(probs.amax(-1).argmin())
second = int(probs[unsure].argsort(descending=True)[1])
observed = values.clone()
observed[0, unsure, 1] = second
print(f"{sentence[unsure]!r} is {tags[second]} with probability {probs[unsure, second]:.2f}. "
      "Conditional on it, the others are:")  # fmt: skip
for word, before, after in zip(sentence, probs, one.tag_probs(observed)[0]):
    print(f"{word:>12s}  {tags[int(before.argmax())]:4s} {before.max():.2f} -> "
          f"{tags[int(after.argmax())]:4s} {after.max():.2f}")  # fmt: skip
