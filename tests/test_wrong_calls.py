"""Every public function, with one argument wrong at a time: who reads the error knows which.

What is public is found by looking: all that the package and its rooms name, what their public
modules define or pass on, and the methods of all these classes. Each argument is replaced by values
of other types, by numbers out of range and by tensors of other shapes, dtypes and values. The call
either answers, without NaN, or raises an error of the right class that names the argument.
"""

import ast
import doctest
import functools
import importlib
import inspect
import math
import pickle
import re
import tempfile
import types
import warnings
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from scipy.io import savemat

import pyrohmm
from pyrohmm import (
    HMM,
    HSMM,
    BlockHMM,
    ContinuousTimeHMM,
    FactorialHMM,
    Filter,
    GradientStep,
    LanguageModel,
    SecondOrderHMM,
    Sequences,
    TabularHMM,
    TaggedHMM,
    blocks,
    categorical,
    clusters,
    cooccurrence,
    language,
    msteps,
    normal,
)
from pyrohmm.data import Vocabulary
from pyrohmm.distributions import NGramBlockHMM, NGramProbs, NGramWeights, Streams
from pyrohmm.ops.blocks.inner_products import InnerProductTransition

ROOMS = ["ops", "data", "distributions", "nn", "io", "infer", "analysis", "language"]
RIGHT = ValueError, TypeError, OSError, FloatingPointError

# What is public ----------------------------------------------------------------------------------


def names_of(module):
    """The public names that a module defines, or imports in order to pass them on."""
    imports = [
        n for n in ast.parse(inspect.getsource(module)).body if isinstance(n, ast.ImportFrom)
    ]
    passed = {alias.name for n in imports for alias in n.names if alias.asname == alias.name}
    own = {
        n
        for n, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__
    }
    return sorted(name for name in passed | own if not name.startswith("_"))


def public(module, found):
    """Add to ``found`` what is callable in a module and in those that it names."""
    for name in names_of(module):
        thing = getattr(module, name)
        if isinstance(thing, types.ModuleType):
            public(thing, found)
        elif inspect.isfunction(thing) or (inspect.isclass(thing) and is_built(thing)):
            if thing.__module__.startswith("pyrohmm"):
                found[key_of(thing)] = thing
    return found


def is_built(kind):
    """Whether users may build it: results are named tuples."""
    made = inspect.isfunction(kind.__init__) or inspect.isfunction(kind.__new__)
    return made and not hasattr(kind, "_fields")


def key_of(thing):
    """Its name; for a function with that of its module."""
    return (
        thing.__name__
        if inspect.isclass(thing)
        else f"{thing.__module__.split('.')[-1]}.{thing.__name__}"
    )


def methods(kind):
    """Names of the public methods that this package has written."""
    for name in dir(kind):
        function = inspect.getattr_static(kind, name)
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function) and function.__module__.startswith("pyrohmm"):
            if not name.startswith("_") or (
                name == "__call__" and not issubclass(kind, torch.nn.Module)
            ):
                yield name


PUBLIC = {}
for room in ["", *ROOMS]:
    public(importlib.import_module(f"pyrohmm.{room}".rstrip(".")), PUBLIC)
CALLS = [
    *PUBLIC,
    *(
        f"{key}.{name}"
        for key, kind in PUBLIC.items()
        if inspect.isclass(kind)
        for name in methods(kind)
    ),
]


# Examples that are right --------------------------------------------------------------------------

folder = tempfile.TemporaryDirectory()
FOLDER = Path(folder.name)
LINES = ["a rose is a rose", "a daisy is a daisy", "is a rose a rose"]
FILES = {
    "sentences.txt": "\n".join(LINES),
    "paths.txt": "0\ta\t3\n1\trose\t2\n",
    "words.conllu": "\t".join("1 a a DET DT _ 0 root _ _".split()) + "\n\n",
    "words.tagged": "a\tDT\nrose\tNN\n\n",
    "chains.fasta": ">one\nACD\n",
    "table.tsv": "id\tsequence\tdssp3\none\tACD\tHHC\n",
    "letters.data": "\t".join(["1", "a", "-1", "1", "1", "0", *["0", "1"] * 64]) + "\n",
}
for file, content in FILES.items():
    (FOLDER / file).write_text(content)


def rows(*shape):
    """Log-probabilities that sum to one along the last dimension."""
    return torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape).log_softmax(-1)


def simplex(*shape):
    return rows(*shape).exp()


def values():
    return torch.tensor([[0, 1, 2], [1, 0, 0]])


def lengths():
    return torch.tensor([3, 2])


def data():
    return Sequences(values(), lengths())


def vectors():
    return Sequences(torch.linspace(-2.0, 2.0, 40).reshape(4, 5, 2), torch.tensor([5, 5, 4, 2]))


def hmm():
    emission = dist.Categorical(logits=rows(2, 3))
    return HMM(rows(2), rows(2, 2), emission, lengths(), validate_args=True)


def table(*shape):
    """Log-probabilities of the next segment's state."""
    return torch.tensor([[-math.inf, 0.0], [0.0, -math.inf]]).expand(*shape, 2, 2)


def hsmm():
    emission = dist.Categorical(logits=rows(2, 3))
    return HSMM(rows(2), table(), rows(2, 4), emission, lengths(), validate_args=True)


def clock():
    return torch.tensor([[0.0, 0.5, 2.0], [1.0, 3.0, 4.0]])


def speeds():
    return torch.tensor([[-0.5, 0.5], [0.25, -0.25]])


def continuous_time_hmm():
    emission = dist.Categorical(logits=rows(2, 3))
    return ContinuousTimeHMM(rows(2), speeds(), emission, lengths(), clock(), validate_args=True)


def factors():
    """Log-probabilities of two chains of two states each."""
    return {"log_initials": lambda: [rows(2), rows(2)],
            "log_transitions": lambda: [rows(2, 2), rows(2, 2)]}  # fmt: skip


def factorial_hmm():
    emission = dist.Categorical(logits=rows(4, 3))
    return FactorialHMM(
        [rows(2), rows(2)], [rows(2, 2), rows(2, 2)], emission, lengths(), validate_args=True
    )


def second_order_hmm():
    emission = dist.Categorical(logits=rows(2, 3))
    tables = rows(2), rows(2, 2), rows(2, 2, 2)
    return SecondOrderHMM(*tables, emission, lengths(), validate_args=True)


TRIPLES = {"log_second": lambda: rows(2, 2), "log_transition": lambda: rows(2, 2, 2)}
CHAINS = {
    "log_initial": lambda: rows(4),
    "log_transitions": lambda: [rows(2, 2), rows(2, 2)],
    "log_likelihood": lambda: rows(2, 3, 4),
}


def durations():
    return pyrohmm.free_durations(4)


LASTING = {"max_duration": lambda: 4}
COUNTED = {"distribution": lambda: dist.Poisson(torch.ones(2))}
SEGMENTS = {"log_duration": lambda: rows(2, 4), "log_transition": table}


def module():
    return TabularHMM(2, categorical(3))


def two_blocks():
    return blocks.from_clusters(torch.tensor([0, 1, 1]), 1)


def neural(**options):
    return pyrohmm.NeuralHMM(2, 3, 4, blocks=two_blocks(), **options)


def spelt():
    return pyrohmm.nn.networks.CharCNN(["a", "b", "ab"], 4)


def tagger():
    return pyrohmm.NeuralTagger(2, 3, 2, 4)


def block_hmm():
    emission = torch.tensor([[0.0], [0.4], [0.6]]).clamp(min=1e-30)
    emission[0] = 1.0
    return BlockHMM(
        rows(2), rows(2, 2), emission.log(), two_blocks(), lengths(), validate_args=True
    )


def model():
    return pyrohmm.MarginalModel(module())


@functools.cache
def fit():
    return pyrohmm.fit_em(module(), data(), num_steps=2)


@functools.cache
def guide_fit():
    built = model()
    return pyrohmm.fit_svi(built, pyro.infer.autoguide.AutoNormal(built), data(), num_steps=2)


def guide():
    return pyro.infer.autoguide.AutoNormal(model())


@functools.cache
def vocabulary():
    return language.count_words(LINES)


@functools.cache
def sentences():
    return language.encode(LINES, vocabulary())


@functools.cache
def speaker():
    return LanguageModel.from_data(vocabulary(), sentences(), 4, 2, 4)


def constraint():
    return pyrohmm.automata.must_contain("a")


@functools.cache
def spoken_hmm():
    with torch.no_grad():
        return speaker().module.eval()(torch.tensor([1]))


def pairs():
    return cooccurrence.count_pairs(data(), 3)


def corpus():
    tagged = Sequences(values(), lengths(), labels=torch.tensor([[0, 1, 1], [1, 0, -1]]))
    return pyrohmm.readers.Corpus(tagged, Vocabulary("abc"), Vocabulary("DN"))


def saved():
    pyrohmm.save(hmm(), FOLDER / "hmm")
    return FOLDER / "hmm"


def saved_module():
    pyrohmm.save(module(), FOLDER / "module")
    return FOLDER / "module"


def spoken():
    speaker().save(FOLDER / "speaker")
    return FOLDER / "speaker"


def draws():
    return pyrohmm.PosteriorDraws.of(guide_fit(), num_draws=3)


def dense_model():
    return pyrohmm.MarginalModel(pyrohmm.DenseHMM(2, 3, 2))


@functools.cache
def dense_fit():
    return pyrohmm.fit_map(dense_model(), data(), num_steps=2)


@functools.cache
def restarted():
    return pyrohmm.fit_em(module(), data(), num_steps=2, restarts=2)


def scalars():
    return Sequences(torch.linspace(-2.0, 2.0, 6).reshape(2, 3), lengths())


def likelihood():
    return rows(2, 3, 2)


def expected():
    return hmm().expected_counts(values())


def rolls():
    notes = np.empty((1, 1), dtype=object)
    notes[0, 0] = np.eye(2, 88, dtype=np.uint8)
    splits = ("train", "valid", "test")
    savemat(FOLDER / "rolls.mat", {f"{split}data": notes for split in splits})
    return FOLDER / "rolls.mat"


def crf():
    return pyrohmm.LinearChainCRF(rows(2, 3, 2), rows(2, 2), lengths=lengths(), validate_args=True)


def dirichlet():
    return pyrohmm.DiversityPrior(1.0)


def gaussian():
    return dist.Normal(torch.tensor([-1.0, 1.0]), 1.0)


def beside():
    return Streams([dist.Categorical(logits=rows(2, 3)), gaussian()])


def shared():
    return pyrohmm.distributions.Tied(gaussian(), torch.tensor([0, 1, 1]))


def plane():
    return dist.MultivariateNormal(torch.zeros(2, 1), torch.eye(1).expand(2, 1, 1))


def lagged():
    return pyrohmm.distributions.AutoregressiveNormal(plane(), plane(), torch.ones(2, 1, 1, 1))


def followed():
    return HMM(rows(2), rows(2, 2), lagged(), lengths(), validate_args=True)


SQUARE = {
    "rows": lambda: simplex(1, 2, 2),
    "counts": lambda: torch.ones(1, 2, 2),
    "prior": dirichlet,
}
MATRIX = {"rows": lambda: rows(2, 4), "columns": lambda: rows(3, 4)}


def some_states():
    return torch.tensor([0, 1, 1, 0])


KNOWN = {
    "predicted": some_states,
    "truth": some_states,
    "states": some_states,
    "num_states": lambda: 2,
}

# by the name of the argument, where nothing else is said below; those without are left out
COMMON = {
    "hmm": hmm,
    "values": values,
    "data": data,
    "module": module,
    "model": model,
    "guide": guide,
    "fit": fit,
    "lengths": lengths,
    "vocabulary": vocabulary,
    "pairs": pairs,
    "corpus": corpus,
    "num_states": lambda: 2,
    "num_symbols": lambda: 3,
    "num_steps": lambda: 2,
    "dim": lambda: 2,
    "log_initial": lambda: rows(2),
    "log_transition": lambda: rows(1, 2, 2),
    "log_likelihood": likelihood,
    "blocks": two_blocks,
    "emission": gaussian,
    "probs": lambda: simplex(2, 3),
    "lines": lambda: LINES,
    "sentences": lambda: LINES,
    "num_clusters": lambda: 2,
    "path": lambda: FOLDER / "sentences.txt",
    "count": lambda: 2,
    "assignment": lambda: torch.tensor([0, 1, 1]),
    "sample_shape": lambda: (2,),
    "generator": lambda: torch.Generator().manual_seed(0),
    "restarts": lambda: 2,
    "directory": saved,
    "num_sequences": lambda: 2,
    "expected": expected,
    "axes": lambda: Figure().subplots(),
    "device": lambda: "cpu",
    "batch_shape": lambda: (2,),
    "num_tags": lambda: 2,
    "hidden_dim": lambda: 4,
    "progress": lambda: False,
    "posterior": guide_fit,
    "distribution": gaussian,
    "batch_size": lambda: 2,
}


def tagged_hmm():
    return TaggedHMM(block_hmm(), rows(2, 2))


def ngram():
    log_probs, only = torch.full((2, 3), 0.5).log(), torch.zeros(2, 3, dtype=torch.long)
    return NGramProbs(log_probs, log_probs, only, only)


def ngram_weights():
    return NGramWeights(torch.zeros(1, 3), torch.zeros(1, 2))


def ngram_hmm():
    module = neural(two_level=True)
    return NGramBlockHMM(module(lengths()), ngram(), ngram_weights())


def tagged_values():
    return torch.stack([values(), torch.tensor([[0, 1, -1], [1, 0, 0]])], -1)


def transitions():
    return InnerProductTransition(rows(2, 4), rows(2, 4), two_blocks())


def filtering():
    return Filter(hmm().replace(lengths=torch.ones(2).long()))


def both():
    return pyrohmm.tagging.WordAndTag(
        dist.Categorical(logits=rows(2, 3)), dist.Categorical(logits=rows(2, 2))
    )


BEFORE = {"joint": lambda: simplex(2, 2) / 2, "probs": lambda: simplex(2, 3), "target": pairs}
LM = {"num_states": lambda: 4, "num_clusters": lambda: 2, "data": sentences}


def at(name):
    return {"path": lambda: FOLDER / name}


# by the call: what differs from the above, or is also to be replaced
SHARES = {"begin": lambda: 0.5, "end": lambda: 0.0}
SYMBOLS = {
    "log_symbols": lambda: rows(2, 3),
    "symbols": values,
    "known": lambda: torch.ones(2, 3, dtype=torch.bool),
}
SPECIAL = {
    "BlockHMM": {
        "transition": lambda: rows(2, 2),
        "log_emission": lambda: block_hmm().log_emission,
    },
    "AutoregressiveNormal": {
        "initial": plane,
        "base": plane,
        "weights": lambda: torch.ones(2, 1, 1, 1),
        "origin": lambda: torch.zeros(1),
        "history": lambda: torch.zeros(1, 1),
    },
    "AutoregressiveCategorical": {
        "initial": lambda: dist.Categorical(logits=rows(2, 3)),
        "tables": lambda: dist.Categorical(logits=rows(2, 9, 3)),
        "history": lambda: torch.tensor([0, 1]),
    },
    "AutoregressiveForecast": {
        "states": lambda: simplex(2, 1, 2),
        "emission": lagged,
        "log_transition": lambda: rows(2, 2),
    },
    "AutoregressiveForecast.log_prob": {"values": lambda: torch.zeros(2, 1, 1)},
    "CooccurrenceModel": {"target": pairs},
    "DiversityPrior": {
        "alpha": lambda: 1.0,
        "anchor": lambda: simplex(2, 2),
        "anchor_weight": lambda: 1.0,
    },
    "DiversityPrior.as_in_paper": {"alpha": lambda: 1.0},
    "DiversityPrior.log_density_of_transition": {"transition": lambda: simplex(2, 2)},
    "DiverseDirichlet": {"concentration": lambda: torch.ones(2, 2), "alpha": lambda: 1.0},
    "DiverseDirichlet.log_prob": {"value": lambda: simplex(2, 2)},
    "EnumeratedModel": {},
    "Filter.load_state_dict": {"state_dict": lambda: filtering().state_dict()},
    "Filter": {"hmm": lambda: filtering().hmm},
    "Filter.update": {
        "observation": lambda: torch.tensor([0, 1]),
        "observed": lambda: torch.tensor([True, False]),
    },
    "FixedPoint.__call__": SQUARE,
    "LogitGradient.__call__": SQUARE,
    "ProjectedGradient.__call__": SQUARE,
    "Fit.hmms": {"parts": lambda: [data()]},
    "Forecast": {"states": lambda: simplex(2, 3, 2)},
    "Forecast.log_prob": {"values": lambda: torch.zeros(2, 3)},
    "HMM": {
        "log_transition": lambda: rows(2, 2),
        "observed": lambda: torch.ones(2, 3) > 0,
        "emission": lambda: dist.Categorical(logits=rows(2, 3)),
        "validate_args": lambda: True,
        "allowed": lambda: torch.ones(2, 3, 2) > 0,
    },
    "FactorialHMM": {
        **factors(),
        "observed": lambda: torch.ones(2, 3) > 0,
        "emission": lambda: dist.Categorical(logits=rows(4, 3)),
        "validate_args": lambda: True,
        "allowed": lambda: torch.ones(2, 3, 4) > 0,
    },
    "HSMM": {
        "log_transition": table,
        "log_duration": lambda: rows(2, 4),
        "observed": lambda: torch.ones(2, 3) > 0,
        "emission": lambda: dist.Categorical(logits=rows(2, 3)),
        "validate_args": lambda: True,
        "allowed": lambda: torch.ones(2, 3, 2) > 0,
    },
    "ContinuousTimeHMM": {
        "rates": speeds,
        "times": clock,
        "observed": lambda: torch.ones(2, 3) > 0,
        "emission": lambda: dist.Categorical(logits=rows(2, 3)),
        "validate_args": lambda: True,
        "allowed": lambda: torch.ones(2, 3, 2) > 0,
    },
    "InnerProductTransition": {"leave": lambda: rows(2, 4), "enter": lambda: rows(2, 4)},
    "InverseWishart": {"degrees": lambda: 3.0, "scale": lambda: torch.eye(2)},
    "LinearChainCRF": {
        "emission_scores": lambda: torch.zeros(2, 3, 2),
        "transition_scores": lambda: torch.zeros(2, 2),
        "initial_scores": lambda: torch.zeros(2),
        "validate_args": lambda: True,
    },
    "LinearChainCRF.expand": {"batch_shape": lambda: (2,)},
    "LinearChainCRF.log_prob": {"labels": lambda: torch.tensor([[0, 1, 1], [1, 0, 0]])},
    "LinearChainCRF.restrict": {"labels": lambda: torch.tensor([[0, 1, 1], [1, 0, 0]])},
    "LinearDropout": SHARES,
    "LinearDropout.__call__": {"step": lambda: 1},
    "DefaultDropout": SHARES,
    "DefaultDropout.__call__": {"step": lambda: 1},
    "dropout.default_dropout": {
        "num_epochs": lambda: 5,
        "num_steps": lambda: 9,
        "tokens_per_parameter": lambda: 0.25,
    },
    "NeuralHMM.extended": {"words": lambda: ["ba"]},
    "RowPermutationNUTS": {"site": lambda: "module.transition"},
    "InverseWishart.log_prob": {"value": lambda: torch.eye(2)},
    "LanguageModel": {"blocks": lambda: blocks.from_clusters(torch.tensor([0, 1, 0, 1, 1, 1]), 2)},
    "LanguageModel.from_data": LM,
    "LanguageModel.fit": {"data": sentences, "num_epochs": lambda: 1},
    "LanguageModel.load": {"directory": spoken},
    "LanguageModel.save": {"directory": lambda: FOLDER / "speaker"},
    "Pairs": {
        "first": lambda: torch.tensor([0, 1]),
        "second": lambda: torch.tensor([1, 0]),
        "counts": lambda: torch.tensor([1, 3]),
    },
    "Pairs.sample": {"num_pairs": lambda: 2},
    "PosteriorDraws": {"values": lambda: draws().values, "stats": lambda: draws().stats},
    "PosteriorDraws.map": {"function": lambda: lambda hmm: hmm.log_initial},
    "PosteriorDraws.permute_states": {
        "names": lambda: torch.zeros(1, 3, 2).long() + torch.arange(2)
    },
    "RotationGuide": {"model": dense_model, "start": lambda: dense_fit().start},
    "RotationGuide.forward": {"data": data},
    "Sequences": {
        "observed": lambda: torch.ones(2, 3) > 0,
        "labels": values,
        "covariates": lambda: torch.ones(2, 3, 1),
        "times": clock,
    },
    "Sequences.batch": {"chosen": lambda: torch.tensor([0])},
    "Sequences.collate": {"parts": lambda: [data()[:1], data()[1:]]},
    "Sequences.from_concatenated": {
        "values": lambda: torch.arange(3.0),
        "lengths": lambda: torch.tensor([2, 1]),
        "observed": lambda: torch.tensor([True, False, True]),
        "labels": lambda: torch.tensor([0, 1, -1]),
        "covariates": lambda: torch.ones(3, 1),
        "vocabulary": lambda: None,
        "times": lambda: torch.arange(3.0),
    },
    "Sequences.from_dataframe": {
        "frame": lambda: {"x": [0.0, 1.0], "who": [0, 1]},
        "columns": lambda: "x",
        "by": lambda: "who",
        "vocabulary": lambda: None,
    },
    "Sequences.with_total": {"total": lambda: 3},
    "StoredSequences": {
        "values": lambda: torch.arange(3.0),
        "lengths": lambda: torch.tensor([2, 1]),
    },
    "Sequences.from_list": {"sequences": lambda: [[0, 1, 2], [1, 0]]},
    "SparseGamma": {
        "concentration": lambda: torch.ones(2, 2),
        "rate": lambda: torch.ones(2, 2),
        "allowed": lambda: torch.ones(2, 2) > 0,
    },
    "SparseGamma.log_prob": {"value": lambda: simplex(2, 2)},
    "SparseDirichlet": {
        "concentration": lambda: torch.ones(2, 2),
        "allowed": lambda: torch.ones(2, 2) > 0,
    },
    "SparseDirichlet.log_prob": {"value": lambda: simplex(2, 2)},
    "StatefulModel": {"module": neural, "num_streams": lambda: 2},
    "Streams": {"parts": lambda: beside().parts},
    "Streams.join": {"pieces": lambda: [torch.zeros(4), torch.zeros(4)]},
    "Streams.log_prob": {"value": lambda: torch.zeros(4, 1, 2)},
    "Streams.split": {"values": lambda: torch.zeros(4, 2)},
    "TabularHMM": {"emission": lambda: categorical(3)},
    "TabularFactorialHMM": {
        "num_states": lambda: (2, 2),
        "emission": lambda: categorical(3),
        "initial_concentration": lambda: 1.0,
    },
    "TabularFactorialHMM.from_hmm": {"hmm": factorial_hmm},
    "factorial.additive_normal": {"num_states": lambda: (2, 2), "dim": lambda: 1},
    "factorial.additive_bernoulli": {"num_states": lambda: (2, 2), "dim": lambda: 1},
    **dict.fromkeys(
        (
            f"factorial.{name}"
            for name in ("expected_counts", "filtered", "log_evidence", "viterbi")
        ),
        CHAINS,
    ),
    "factorial.sample_states": CHAINS | {"num_samples": lambda: 2},
    "resizing.merge_states": {"first": lambda: 0, "second": lambda: 1},
    "resizing.split_state": {"state": lambda: 0},
    "StickyHDPHMM": {"emission": lambda: categorical(3)},
    "SecondOrderHMM": {
        **TRIPLES,
        "observed": lambda: torch.ones(2, 3) > 0,
        "emission": lambda: dist.Categorical(logits=rows(2, 3)),
        "validate_args": lambda: True,
        "allowed": lambda: torch.ones(2, 3, 2) > 0,
    },
    "TabularSecondOrderHMM": {"emission": lambda: categorical(3)},
    "TabularSecondOrderHMM.from_hmm": {"hmm": second_order_hmm},
    **dict.fromkeys(
        (
            f"second_order.{name}"
            for name in ("expected_counts", "filtered", "log_evidence", "viterbi")
        ),
        TRIPLES,
    ),
    "second_order.sample_states": TRIPLES | {"num_samples": lambda: 2},
    "TabularHSMM": {"emission": lambda: categorical(3), "durations": durations},
    "TabularHSMM.from_hmm": {"hmm": hsmm},
    "TabularContinuousTimeHMM": {"emission": lambda: categorical(3)},
    "TabularContinuousTimeHMM.from_hmm": {"hmm": continuous_time_hmm},
    "TabularContinuousTimeHMM.forward": {"times": clock},
    **dict.fromkeys(
        (f"durations.{kind}_durations" for kind in ("free", "geometric", "poisson")), LASTING
    ),
    "durations.negative_binomial_durations": LASTING,
    "durations.parametric_durations": LASTING | COUNTED,
    "durations.truncated": LASTING | COUNTED,
    **dict.fromkeys(
        (
            f"semi_markov.{name}"
            for name in (
                "expanded_chain",
                "expected_counts",
                "filtered",
                "log_evidence",
                "log_mean_duration",
                "log_survival",
                "viterbi",
            )
        ),
        SEGMENTS,
    ),
    "semi_markov.sample_states": SEGMENTS | {"num_samples": lambda: 2},
    "TaggedHMM": {"words": block_hmm, "log_tags": lambda: rows(2, 2)},
    "NGramBlockHMM": {
        "words": lambda: neural(two_level=True)(lengths()),
        "ngram": ngram,
        "weights": ngram_weights,
    },
    "NGramMixture": {"words": neural},
    "NGramMixture.forward": {"covariates": lambda: torch.zeros(2, 3, 4)},
    "Tied": {"base": gaussian, "index": lambda: torch.tensor([0, 1, 1])},
    "Tied.log_prob": {"value": lambda: torch.zeros(4, 1)},
    "WarmupCosine.__call__": {"step": lambda: 1},
    "WordAndTag": {"words": lambda: both().parts[0], "tags": lambda: both().parts[1]},
    "WordAndTag.log_prob": {"value": lambda: torch.zeros(4, 1, 2)},
    "WordAndTag.join": {"pieces": lambda: [torch.zeros(4), torch.zeros(4)]},
    "WordAndTag.split": {"values": lambda: torch.zeros(4, 2)},
    "Blocks": {
        "symbol_block": lambda: torch.tensor([0, 1, 1]),
        "states": lambda: [torch.tensor([0]), torch.tensor([1])],
    },
    "Blocks.keep": {"states": lambda: torch.tensor([0, 1])},
    "Vocabulary": {"symbols": lambda: "abc"},
    "Vocabulary.encode": {"symbols": lambda: "abc"},
    "Vocabulary.decode": {"codes": lambda: torch.tensor([0, 1])},
    "Vocabulary.from_counts": {"symbols": lambda: "abca"},
    "Automaton": {
        "default": lambda: [0, 1],
        "exceptions": lambda: [{"a": 1}, {}],
        "accepting": lambda: [1],
    },
    "Automaton.accepts": {"sentence": lambda: "a rose"},
    "LanguageModel.fill": {"sentence": lambda: ["a", None]},
    "LanguageModel.steer": {"constraint": constraint},
    "Steering": {"hmm": spoken_hmm, "constraint": constraint, "max_words": lambda: 3},
    "automata.ends_with": {"suffix": lambda: "a"},
    "automata.must_contain": {"phrases": lambda: "a rose"},
    "automata.must_not_contain": {"phrases": lambda: "a rose"},
    "automata.of_length": {"low": lambda: 2},
    "automata.starts_with": {"prefix": lambda: "a"},
    "automata.template": {"items": lambda: "a"},
    "backends.use": {"backend": lambda: pyrohmm.ops.backends.backend_for(torch.device("cpu"))},
    "backends.backend_for": {"device": lambda: torch.device("cpu")},
    "base.freeze": {"name": lambda: "transition", "value": lambda: simplex(2, 2)},
    "blocks.from_clusters": {"states_per_cluster": lambda: 2},
    "blocks.uniform": {"states_per_symbol": lambda: 2},
    "clusters.isolate": {"words": lambda: torch.tensor([1])},
    "clusters.allocate": {"counts": lambda: torch.tensor([3, 2, 1])},
    "clusters.find_clusters": {"data": sentences},
    "clusters.read_paths": {
        "path": lambda: FOLDER / "paths.txt",
        "vocabulary": lambda: ["a", "rose"],
    },
    "clusters.write_paths": {
        "path": lambda: FOLDER / "written.txt",
        "vocabulary": lambda: ["a", "rose", "is"],
        "clusters": lambda: clusters.brown(pairs(), 2),
    },
    "composed.streams": {"families": lambda: categorical(3)},
    "composed.tied": {"family": lambda: categorical(3), "index": lambda: [0, 0, 1]},
    "cooccurrence.bin_probs": {"edges": lambda: torch.tensor([0.0, 1.0])},
    "cooccurrence.fit_cooccurrence": {"num_symbols": lambda: 3},
    "corpus.merge_rare": {"share": lambda: 0.2},
    "datasets.find": {"name": lambda: "ptb-train"},
    "dense.of_products": {"function": lambda: torch.exp},
    "dense.absolute": MATRIX,
    "dense.exponential": MATRIX,
    "dense.relu": MATRIX,
    "dense.sigmoid": MATRIX,
    "dense.log_rows": {"kernel": lambda: pyrohmm.dense.exponential, **MATRIX},
    "diversity.simplex_projection": {"values": lambda: torch.ones(2, 3)},
    "diversity.log_diversity": {},
    "draws.invariants": {},
    "emissions.from_distribution": {},
    "guides.log_orbit": {"diagonal": lambda: torch.ones(2)},
    "guides.uniform_rotation": {"like": lambda: torch.ones(2)},
    "hmmlearn.from_hmmlearn": {
        "model": lambda: pyrohmm.to_hmmlearn(hmm()),
        "lengths": lambda: [2, 1],
    },
    "inference_data.summary": {
        "converted": lambda: pyrohmm.to_arviz(guide_fit(), data(), num_draws=2)
    },
    "agreement.align": KNOWN,
    "agreement.align_transitions": {"found": lambda: simplex(2, 2), "truth": lambda: simplex(2, 2)},
    "metrics.cross_validate": {"fit": lambda: lambda data: fit(), "num_folds": lambda: 2},
    "metrics.mean_absolute_deviation": {
        "first": lambda: simplex(2, 2),
        "second": lambda: simplex(2, 2),
    },
    "metrics.log_evidence": {"model": fit},
    "metrics.perplexity": {"model": fit},
    "usage.state_usage": {"model": hmm},
    "mixtures.normal_mixture": {"num_components": lambda: 2},
    "models.markov_sample": {"name": lambda: "x", "obs": lambda: values()},
    "msteps.default_step": {"prior": dirichlet},
    "msteps.best_start": SQUARE,
    "msteps.objective": SQUARE,
    "msteps.relative_slope": SQUARE,
    "observation.log_prob_per_state": {"values": lambda: torch.zeros(2, 3)},
    "hard_zeros.log_probs": {"emission": lambda: dist.Categorical(logits=rows(2, 3))},
    "observation.marginal_log_prob": {
        "distribution": gaussian,
        "values": lambda: torch.zeros(3, 1),
    },
    "pair_counts.binned": {"data": lambda: scalars(), "edges": lambda: torch.tensor([0.0, 1.0])},
    "pair_counts.quantile_edges": {"data": lambda: scalars(), "num_bins": lambda: 2},
    "pair_losses.cross_entropy": BEFORE,
    "pair_losses.relative_distance": BEFORE,
    "pair_losses.squared_distance": BEFORE,
    "persistence.load_into": {"directory": saved_module},
    "persistence.save": {"thing": hmm},
    "plot_emissions.emission": {"symbols": lambda: "abc", "names": lambda: "xy"},
    **{
        f"plot_durations.{name}": {
            "states": lambda: torch.tensor([[0, 1, 1]]),
            "lengths": lambda: torch.tensor([3]),
        }
        for name in ("durations", "survival", "hazard")
    },
    "plots.criterion": {"scores": lambda: {1: 3.0, 2: 2.0}},
    "plots.forecast": {
        "predicted": lambda: pyrohmm.Forecast(simplex(4, 3), dist.Poisson(torch.ones(3)))
    },
    "plots.series": {
        "hmm": lambda: hmm().with_lengths(torch.tensor([3])),
        "values": lambda: values()[:1],
        "names": lambda: "xy",
    },
    "plots.timeline": {"states": lambda: torch.tensor([0, 1, 1])},
    "plots.transition_posterior": {"samples": lambda: simplex(4, 2, 2)},
    "segmentation.segments": {"states": lambda: torch.tensor([0, 1, 1])},
    "segmentation.to_bed": {
        "rows": lambda: [pyrohmm.queries.Segment(0, 0, 1, 2, 2)],
        "sequences": lambda: ["a"],
    },
    "plots.states": {"probs": lambda: simplex(4, 3)},
    "plots.transition": {"names": lambda: "xy"},
    "readers.plain": {"text": lambda: LINES[0], "alphabet": lambda: "abc "},
    "readers.read_characters": {"text": lambda: LINES[0]},
    "readers.read_conllu": at("words.conllu"),
    "readers.read_tagged": at("words.tagged"),
    "readers.read_fasta": at("chains.fasta"),
    "readers.read_protein_table": at("table.tsv"),
    "readers.read_ocr_letters": at("letters.data"),
    "readers.read_piano_rolls": {"path": rolls},
    "recursions.log_evidence_of_symbols": SYMBOLS,
    "recursions.expected_counts_of_symbols": SYMBOLS,
    "recursions.sample_states": {"num_samples": lambda: 2},
    "residuals.pseudo_residuals": {},
    "sparse_dirichlet.interior": {
        "support": lambda: dist.constraints.simplex,
        "value": lambda: simplex(2, 2),
    },
    "starts.by_kmeans": {"data": vectors, "module": lambda: TabularHMM(2, normal(2))},
    "stationary.joint_probs": {
        "state_probs": lambda: simplex(2),
        "log_transition": lambda: rows(2, 2),
    },
    "stationary.predicted": {
        "state_probs": lambda: simplex(2),
        "log_transition": lambda: rows(2, 2),
    },
    "stationary.stationary": {"log_transition": lambda: rows(2, 2)},
    "stationary.stationary_detached": {"log_transition": lambda: rows(2, 2)},
    "tabular.sticky": {"stay": lambda: 2.0},
    "tags.tagged": {"data": lambda: corpus().data},
    "vocabulary.word_classes": {"word": lambda: "word"},
    "dwell_times.dwell_counts": {"states": values, "num_states": lambda: 3},
    "dwell_times.dwell_time_hazard": {"states": values, "num_states": lambda: 3},
    "simulated.dirichlet_toy": {},
}
for name in (
    "num_identified",
    "state_histogram",
    "many_to_one_accuracy",
    "one_to_one_accuracy",
    "variation_of_information",
):
    SPECIAL[f"agreement.{name}"] = KNOWN
for kind, observations in {
    "HMM": values,
    "HSMM": values,
    "ContinuousTimeHMM": values,
    "FactorialHMM": values,
    "SecondOrderHMM": values,
    "BlockHMM": values,
    "TaggedHMM": tagged_values,
    "NGramBlockHMM": values,
}.items():
    for method in methods(PUBLIC[kind]):
        SPECIAL[f"{kind}.{method}"] = {
            "values": observations,
            "states": lambda: torch.tensor([[0, 1, 1], [1, 0, 0]]),
            "batch_shape": lambda: (2,),
            "labels": lambda: torch.tensor([[0, 1, 1], [1, 0, 0]]),
            "order": lambda: torch.tensor([1, 0]),
        }

SPECIAL["ContinuousTimeHMM.forecast"]["times"] = lambda: torch.tensor([9.0])
SPECIAL["ContinuousTimeHMM.with_lengths"]["times"] = clock
SPECIAL["ContinuousTimeHMM.transition_at"]["gaps"] = lambda: torch.tensor(1.0)
SPECIAL["FactorialHMM.restrict_chains"]["labels"] = lambda: torch.zeros(2, 3, 2).long()
SPECIAL["FactorialHMM.product_states"]["chains"] = lambda: torch.zeros(2, 3, 2).long()

OBJECTS = {
    "BlockHMM": block_hmm,
    "TaggedHMM": tagged_hmm,
    "NGramBlockHMM": ngram_hmm,
    "NGramMixture": lambda: pyrohmm.NGramMixture(neural(two_level=True)),
    "HMM": hmm,
    "HSMM": hsmm,
    "ContinuousTimeHMM": continuous_time_hmm,
    "FactorialHMM": factorial_hmm,
    "SecondOrderHMM": second_order_hmm,
    "StickyHDPHMM": lambda: pyrohmm.StickyHDPHMM(2, categorical(3)),
    "TabularSecondOrderHMM": lambda: pyrohmm.TabularSecondOrderHMM(2, categorical(3)),
    "TabularFactorialHMM": lambda: pyrohmm.TabularFactorialHMM((2, 2), categorical(3)),
    "Forecast": lambda: pyrohmm.Forecast(simplex(2, 3, 2), gaussian()),
    "CooccurrenceModel": lambda: pyrohmm.CooccurrenceModel(module(), pairs()),
    "DiversityPrior": dirichlet,
    "DenseHMM": lambda: pyrohmm.DenseHMM(2, 3, 2),
    "EnumeratedModel": lambda: pyrohmm.EnumeratedModel(module()),
    "MarginalModel": model,
    "StatefulModel": lambda: pyrohmm.StatefulModel(neural(), 2),
    "Filter": filtering,
    "Fit": fit,
    "LanguageModel": speaker,
    "Automaton": constraint,
    "Steering": lambda: speaker().steer(constraint(), 3),
    "LinearChainCRF": crf,
    "NeuralHMM": lambda: neural(words=spelt()),
    "NeuralTagger": tagger,
    "ScalarHMM": lambda: pyrohmm.ScalarHMM(2, 3),
    "PosteriorDraws": draws,
    "RotationGuide": lambda: pyrohmm.RotationGuide(dense_model(), dense_fit().start),
    "Restarts": lambda: restarted().restarts,
    "Sequences": data,
    "StoredSequences": lambda: pyrohmm.data.StoredSequences(torch.arange(3.0), [3]),
    "TabularHMM": module,
    "TabularHSMM": lambda: pyrohmm.TabularHSMM(2, durations(), categorical(3)),
    "TabularContinuousTimeHMM": lambda: pyrohmm.TabularContinuousTimeHMM(2, categorical(3)),
    "InnerProductTransition": transitions,
    "Blocks": two_blocks,
    "Pairs": pairs,
    "DiverseDirichlet": lambda: pyrohmm.distributions.DiverseDirichlet(torch.ones(2, 2), 1.0),
    "InverseWishart": lambda: pyrohmm.distributions.InverseWishart(3.0, torch.eye(2)),
    "SparseGamma": lambda: pyrohmm.distributions.SparseGamma(
        torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2) > 0
    ),
    "SparseDirichlet": lambda: pyrohmm.distributions.SparseDirichlet(
        torch.ones(2, 2), torch.ones(2, 2) > 0
    ),
    "AutoregressiveForecast": lambda: followed().forecast(torch.zeros(2, 3, 1), 1),
    "Streams": beside,
    "Tied": shared,
    "WordAndTag": both,
    "WarmupCosine": lambda: language.WarmupCosine(10),
    "LinearDropout": lambda: pyrohmm.nn.LinearDropout(0.5, 0.0, 10),
    "DefaultDropout": lambda: pyrohmm.language.DefaultDropout(0.5, 0.0, 10),
    "FixedPoint": msteps.FixedPoint,
    "LogitGradient": msteps.LogitGradient,
    "ProjectedGradient": msteps.ProjectedGradient,
    "GradientStep": GradientStep,
    "Vocabulary": lambda: Vocabulary("abc"),
}


# What users do not call, or what has nothing to ask of its arguments.
UNASKED = {
    "Fit": "made by fits",
    "Restarts": "made by fits",
    "Autoregressive": "abstract",
    "AutoregressiveNormal.log_prob": "there is none of a single observation",
    "AutoregressiveCategorical.log_prob": "there is none of a single observation",
    "HMMModule": "abstract",
    "HMMModule.forward": "abstract",
    "Start": "a protocol",
    "TransitionPrior": "a protocol",
    "TransitionStep": "a protocol",
    "BernoulliEmission": "made by its family, as are the next three",
    "CategoricalEmission": "",
    "PointEmission": "",
    "PoissonEmission": "",
    "emissions.from_distribution": "called by parametric",
    "DurationMStep": "a protocol",
    "FreeDurations": "made by its family, as are the next four",
    "GeometricDurations": "",
    "NegativeBinomialDurations": "",
    "ParametricDurations": "",
    "PoissonDurations": "",
    "FactorialHMM.permute_states": "refuses whatever it is given",
    "FactorialHMM.counts_of": "called by EM",
    "ContinuousTimeHMM.counts_of": "called by EM",
    "ProductTransition": "made by FactorialHMM",
    "SecondOrderHMM.counts_of": "called by EM",
    "SecondOrderHMM.log_factors": "refuses whatever it is given",
    "HSMM.log_factors": "refuses whatever it is given",
    **{
        f"NGramBlockHMM.{name}": "refuses whatever it is given"
        for name in (
            "all_transitions",
            "counted_transitions",
            "dense",
            "expected_counts",
            "forecast",
            "log_factors",
            "log_joint",
            "permute_states",
            "sample",
            "sample_with_states",
            "stationary",
            "symbol_factors",
        )
    },
    "semi_markov.boundaries": "called by HSMM",
    "semi_markov.counts_of_each": "called by HSMM",
    "semi_markov.segment_weights": "called by HSMM",
    "GradientStep.__call__": "called by EM",
    "NeuralTagger.extended": "of words and tags: the HMM of words alone has it",
    "PosteriorDraws.for_new": "needs variables of single sequences, and says so of others",
    "RowPermutationNUTS.sample": "called by MCMC",
    "maximization.expected_log_joint": "called by EM",
    "backends.backend_for": "called by all that computes",
    "datasets.download": "needs a network",
    "datasets.find": "reads the data sets that are there",
    "datasets.english_text": "has no argument",
}

# Methods by which the parts of the package call each other, of any class.
INNER = {
    "m_step", "statistics", "transition_counts", "get_extra_state", "set_extra_state", "set_points",
    "check_constant", "check_labels", "check_markov", "check_probabilities", "counted_factors",
    "prepare_values", "sample_prior_states", "continue_from",
    "at_rest", "in_each_state", "log_block_probs_from", "log_probs_from", "rows", "places",
    "emission_module", "extra_repr", "sample_observations", "given", "permuted", "windows", "codes",
    "log_likelihood", "next", "after", "check_context", "moments", "probs_ahead",
}  # fmt: skip

# Functions of tensors that are called at every step of a fit, and read no value: that would wait
# for a device. What is NaN, infinite or negative where it must not be goes through them as through
# any function of torch. An HMM reads its values under validate_args, and fits look at their loss.
UNREAD = {
    "DiversityPrior.log_density_of_transition", "FixedPoint.__call__", "LogitGradient.__call__",
    "ProjectedGradient.__call__", "Streams.split",
    "WordAndTag.split", "dense.absolute",
    "dense.exponential", "dense.log_rows", "dense.relu", "dense.sigmoid", "diversity.log_diversity",
    "diversity.product_kernel", "guides.log_orbit",
    "factorial.expected_counts", "factorial.filtered", "factorial.log_evidence",
    "msteps.best_start", "msteps.objective",
    "msteps.relative_slope", "pair_losses.cross_entropy", "pair_losses.relative_distance",
    "pair_losses.squared_distance", "recursions.expected_counts", "recursions.filtered",
    "recursions.expected_counts_of_symbols", "recursions.log_evidence",
    "recursions.log_evidence_of_symbols", "recursions.posterior",
    "second_order.expected_counts", "second_order.filtered", "second_order.log_evidence",
    "semi_markov.expanded_chain", "semi_markov.expected_counts", "semi_markov.filtered",
    "semi_markov.log_evidence", "semi_markov.log_mean_duration",
    "semi_markov.log_survival", "durations.truncated", "sparse_dirichlet.interior",
    "stationary.joint_probs", "stationary.predicted", "stationary.stationary",
    "stationary.stationary_detached",
}  # fmt: skip

# Complaints that stand, with the reason.
EXCEPTIONS = {
    **{
        (call, "device", "0"): "a number is that of the accelerator, if a second device is known"
        for call in (
            "Sequences.to",
            "Sequences.from_list",
            "Sequences.from_concatenated",
            "Sequences.from_dataframe",
            "Pairs.to",
        )
    },
    ("dwell_times.dwell_counts", "states", "shorter"): "disagrees with lengths, which are named",
    **{
        (name, "states", "shorter"): "disagrees with lengths, as dwell_counts"
        for name in (
            "dwell_times.dwell_time_hazard",
            "plot_durations.durations",
            "plot_durations.survival",
            "plot_durations.hazard",
        )
    },
    (
        "cooccurrence.fit_cooccurrence",
        "lags",
        "bytes",
    ): "are integers, lags of which data have none",
    **{
        ("Filter.update", "observation", label): "out of range; named values, as everywhere"
        for label in ("-1", "tensor()", "negative", "large")
    },
    ("LanguageModel.num_unknown", "lines", "tensor()"): "torch says that it has no items",
    **{
        (f"{kind}.log_factors", "check", label): "the truth of a tensor: torch's error"
        for kind in (
            "HMM",
            "HSMM",
            "ContinuousTimeHMM",
            "FactorialHMM",
            "SecondOrderHMM",
            "BlockHMM",
            "TaggedHMM",
        )
        for label in ("cube", "integers")
    },
}


# Values that are wrong ----------------------------------------------------------------------------


def wrong_values(right):
    """By a label, values to put in place of ``right``."""
    nan, inf = math.nan, math.inf
    always = {
        "None": None,
        "text": "no such thing",
        "object": object(),
        "complex": 1j,
        "list": [],
        "dict": {},
        "-1": -1,
        "0": 0,
        "nan": nan,
        "inf": inf,
        "-inf": -inf,
        "2.5": 2.5,
        "bytes": b"x",
        "[object]": [object()],
        "['a']": ["a"],
        "cube": torch.zeros(7, 7, 7),
        "integers": torch.arange(7),
        "function": lambda *_, **__: None,
        "class": int,
        "True": True,
        "tensor()": torch.tensor(-5),
    }
    yield from always.items()
    if isinstance(right, torch.Tensor):
        yield "complex tensor", right * 1j
        yield "one more dimension", right.unsqueeze(0).expand(5, *right.shape)
        yield "half", right.half()
        yield "as list", right.tolist()
        yield "as float", right.double()
        yield "as integers", right.long()
        yield "as booleans", right.bool()
        yield "negative", torch.full_like(right, -7) if right.dtype != torch.bool else right
        yield "large", torch.full_like(right, 10**6) if right.dtype != torch.bool else right
        if right.dtype.is_floating_point:
            yield "nan tensor", torch.full_like(right, nan)
            yield (
                "one nan",
                right.flatten().index_fill(0, torch.tensor(0), nan).reshape(right.shape),
            )
            yield "inf tensor", torch.full_like(right, inf)
        if right.dim():
            yield "none of it", right[..., :0]
            yield "shorter", right[..., :1]
            yield "longer", torch.cat([right, right, right], -1)
            yield "scalar", right.flatten()[0]


def holds_nan(result, depth=0):
    """Whether a number anywhere in ``result`` is NaN."""
    if isinstance(result, torch.Tensor):
        return bool(result.isnan().any()) if result.dtype.is_floating_point else False
    if isinstance(result, float):
        return math.isnan(result)
    if isinstance(result, dict):
        return any(holds_nan(part, depth) for part in result.values())
    if isinstance(result, list | tuple):
        return any(holds_nan(part, depth) for part in result)
    return False


# Of the arguments with a default, those of COMMON that are given in calls that are right.
QUICK = {
    "axes", "generator", "hidden_dim", "num_draws", "num_steps", "progress", "restarts",
    "sample_shape",
}  # fmt: skip
CHANGING = {"base.freeze"}  # what change an argument
SEVERAL = {"families", "items", "phrases"}  # of which there may be any number
FILED = {"path", "directory", "checkpoint"}  # whose errors name the file


def function_of(call):
    """The function, bound to an object or a class if it is a method."""
    owner, _, method = call.partition(".")
    if call in PUBLIC:
        return PUBLIC[call]
    kind = PUBLIC[owner]
    bound = isinstance(inspect.getattr_static(kind, method), classmethod | staticmethod)
    return getattr(kind if bound else OBJECTS[owner](), method)


def parameters_of(function):
    """Those with a name, but for what torch's interface passes to itself."""
    parameters = inspect.signature(function).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != "_instance"
    }


def right_arguments(call, function):
    """Right values of all arguments that must be given, and of some others."""
    special = SPECIAL.get(call, {})
    right = {}
    for name, parameter in parameters_of(function).items():
        required = parameter.default is parameter.empty
        if name in special:
            right[name] = special[name]()
        elif name in COMMON and (required or name in QUICK):
            right[name] = COMMON[name]()
        else:
            assert not required, f"{call} has no example of {name}: add one to SPECIAL"
    return right


def run(function, arguments):
    """What the call returns; of a generator, what it yields."""
    several = [value for name, value in arguments.items() if name in SEVERAL]
    named = {name: value for name, value in arguments.items() if name not in SEVERAL}
    with warnings.catch_warnings(action="ignore"), pyro.get_param_store().scope():
        result = function(*several, **named)
        return list(result) if inspect.isgenerator(result) else result


def complaint(call, function, arguments, name):
    """What is wrong with the outcome of a call with a wrong ``name``, if anything."""
    try:
        result = run(function, arguments)
    except RIGHT as error:
        named = re.search(rf"\b{name}\b", str(error))
        filed = name in FILED and str(arguments[name]) in str(error)
        return None if named or filed else f"{name} is not named: {error!r}"
    except Exception as error:
        return f"not an error for users: {error!r}"
    return "NaN" if holds_nan(result) and call not in UNREAD else None


def takes_function(parameter):
    """Whether the argument is called: what is raised in there is the caller's."""
    return "Callable" in str(parameter.annotation) or parameter.annotation in ALIASES


ALIASES = {
    "DurationFamily", "EmissionFamily", "Kernel", "Kernel | None", "Loss", "LogPrior | None",
    "Start | Values | None", "Vocabulary | Counting | None", "OptimizerFactory | None",
    "ScheduleFactory | None",
}  # fmt: skip


def is_asked(call):
    owner, _, method = call.partition(".")
    return not (owner in UNASKED or call in UNASKED or method in INNER)


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)  # some write files where they are told to


@pytest.mark.parametrize("call", [call for call in CALLS if is_asked(call)])
def test_a_wrong_argument_is_named(call):
    function = function_of(call)
    assert not holds_nan(run(function, right_arguments(call, function)))
    complaints = {}
    for name, parameter in parameters_of(function).items():
        function = function_of(call)
        right = right_arguments(call, function)
        for label, wrong in wrong_values(right.get(name, parameter.default)):
            if label == "class" and takes_function(parameter):
                continue
            if call in CHANGING:
                right = right_arguments(call, function)
            found = complaint(call, function, right | {name: wrong}, name)
            if found is not None and (call, name, label) not in EXCEPTIONS:
                complaints[name, label] = found
    assert not complaints


def test_what_is_not_asked_exists():
    methods = {call.partition(".")[2] for call in CALLS}
    assert set(UNASKED) <= set(CALLS)
    assert methods >= INNER
    assert set(CALLS) >= UNREAD | set(SPECIAL) | {call for call, *_ in EXCEPTIONS}


@pytest.mark.parametrize(
    "build",
    [
        lambda: TabularHMM(10**6, categorical(3)),
        lambda: pyrohmm.ScalarHMM(10**6, 3),
        lambda: pyrohmm.sticky(10**6, 1.0),
        lambda: pyrohmm.left_to_right(10**6),
        lambda: pyrohmm.banded(10**6),
    ],
)
def test_too_many_states_are_named(build):
    """A matrix of 4 TB."""
    with pytest.raises(
        ValueError, match=r"(?s)memory.*num_states: int 1000000|num_states: int 1000000.*memory"
    ):
        build()


def test_checked_functions_stay_what_they_are():
    """Their signatures, their names in pickles, and their examples, which doctest finds."""
    function = pyrohmm.queries.k_best
    assert list(inspect.signature(function).parameters) == ["hmm", "values", "count"]
    assert pickle.loads(pickle.dumps(function)) is function
    module = inspect.getmodule(function)
    found = doctest.DocTestFinder().find(module, module.__name__)
    assert any(test.name.endswith(".k_best") and test.examples for test in found)
