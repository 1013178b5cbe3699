"""Mistakes that beginners make: each has an error that names the argument, and none a number."""

import math
import warnings
from functools import partial

import numpy as np
import pandas
import polars
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import NUTS
from pyro.infer.autoguide import AutoDelta

from pyrohmm import (
    HMM,
    HSMM,
    ContinuousTimeHMM,
    CooccurrenceModel,
    DenseHMM,
    DiversityPrior,
    Filter,
    HMMModule,
    LanguageModel,
    LinearChainCRF,
    MarginalModel,
    NeuralHMM,
    NeuralTagger,
    PosteriorDraws,
    SecondOrderHMM,
    Sequences,
    StickyHDPHMM,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    beta,
    blocks,
    categorical,
    clusters,
    datasets,
    fit_cooccurrence,
    fit_em,
    fit_map,
    fit_mcmc,
    fit_svi,
    formulas,
    freeze,
    gamma,
    metrics,
    movement,
    normal,
    normal_mixture,
    parametric,
    parametric_durations,
    plots,
    poisson,
    queries,
    regression,
    streams,
    tied,
    to_arviz,
    von_mises,
    zero_inflated,
)
from pyrohmm.data import StoredSequences, Vocabulary
from pyrohmm.data.formulas import Design
from pyrohmm.data.readers import Entry, corpus_of, read_characters, read_sentences
from pyrohmm.language.text import count_words
from pyrohmm.sklearn import GaussianHMM

PI = torch.tensor([0.6, 0.4]).log()
A = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
B = dist.Categorical(probs=torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
LENGTHS = torch.tensor([3, 2])
X = torch.tensor([[0, 1, 2], [2, 1, 0]])
VECTORS = torch.linspace(-1.0, 1.0, 12).reshape(2, 3, 2)


SHAPES = {"module.initial": (3,), "module.transition": (3, 3), "module.emission.probs": (3, 3)}
WHO = pandas.DataFrame({"who": ["a", "b"], "x": [1.0, 2.0]})
MISSING = torch.tensor([[0.5, 1.5, -999.0, 0.7, -999.0, 0.2]] * 2).double()
COUNTS = Sequences.from_list([[1.0, 4.0, 2.0]])
STORED = StoredSequences(np.array([0, 1, 2]), [2, 1])
POISSONS = dist.Poisson(torch.ones(2))


def hmm(initial=PI, transition=A, emission=B, lengths=LENGTHS, **options):
    return HMM(initial, transition, emission, lengths, validate_args=True, **options)


class Wrong(type(poisson()(2))):
    """An emission whose M-step returns ``found``."""

    def __init__(self, found, num_states):
        super().__init__(num_states)
        self.found = found

    def m_step(self, statistics):
        return self.found, []


def of_vectors():
    return hmm(emission=dist.Normal(torch.zeros(2, 2), 1.0).to_event(1))


def data(values=X, lengths=LENGTHS, **options):
    return Sequences(values, lengths, **options)


def module():
    return TabularHMM(2, categorical(3))


def model():
    return MarginalModel(module())


def language_model():
    return LanguageModel(Vocabulary(["a", "<eos>"]), blocks.from_clusters(torch.arange(2), 1), 4)


def of_plate(data):
    """A model whose plate has the size of a minibatch."""
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    states = HMM(PI, A, dist.Normal(loc, 1.0), data.lengths)
    with pyro.plate("sequences", len(data)):
        pyro.sample("x", states, obs=data.values)


def refuses(mistakes):
    """Parametrise a test by mistakes: what is done, and the type and the words of its error."""
    cases = [pytest.param(*rest, id=name) for name, *rest in mistakes]
    return pytest.mark.parametrize(("mistake", "error", "words"), cases)


BOOLEANS = torch.ones(2, 3, dtype=torch.bool)
GAPS = torch.tensor([[True, False, True], [True, True, True]])
CONVERT = "Convert it with torch.as_tensor"


@refuses([
    ("probabilities for logs", lambda: hmm(PI.exp()), ValueError,
     r"log_initial must hold log-prob.* got probabilities themselves.*\.log\(\)"),
    ("probabilities in the matrix", lambda: hmm(PI, A.exp()), ValueError,
     r"log_transition must hold log-prob.* got probabilities themselves.*\.log\(\)"),
    ("matrix transposed", lambda: hmm(PI, A.mT), ValueError,
     r"log_transition .*sums from 0.9 to .* is transposed. Row = from: give its .mT"),
    ("counts for logs", lambda: hmm(PI, 9 * torch.eye(2)), ValueError, "Divide counts"),
    ("scores not normalised", lambda: hmm(PI, A + 1), ValueError, r"Call \.log_softmax"),
    ("matrix of other K", lambda: hmm(PI, torch.zeros(3, 3)), ValueError,
     r"log_transition must end in shape \(K, K\) = \(2, 2\), as log_initial is \(2,\); got"),
    ("matrix not square", lambda: hmm(PI, A[:1]), ValueError, r"log_transition .*got shape \(1, 2"),
    ("integers for floats", lambda: hmm(torch.zeros(2).long()), TypeError,
     r"log_initial must be floating point; got dtype torch.int64. Call \.float"),
    ("NaN", lambda: hmm(PI * math.nan), ValueError, "log_initial .*it holds NaN. Look"),
    ("list", lambda: hmm(PI.tolist()), TypeError, f"log_initial must be .*got list. {CONVERT}"),
    ("emission of other K", lambda: hmm(PI, A, dist.Categorical(torch.ones(3, 3))), ValueError,
     r"emission must have a batch shape that ends in K = 2 states; got batch shape \(3,\)"),
    ("emission without to_event", lambda: hmm(PI, A, dist.Normal(torch.zeros(2, 4), 1)), ValueError,
     r"emission must .*\.to_event\(1\)"),
    ("emission as tensor", lambda: hmm(PI, A, torch.ones(2, 3)), TypeError,
     "emission must be a distribution batched over the K states; got Tensor"),
    ("observed of fewer steps", lambda: hmm(observed=BOOLEANS[:, :2]), ValueError,
     "lengths must lie between 1 and the number of steps, 2"),
    ("other device", lambda: hmm(PI, A.to("meta")), ValueError, "log_transition on meta"),
    ("HSMM that stays", lambda: HSMM(PI, A, torch.zeros(2, 1), B, LENGTHS, validate_args=True),
     ValueError, "log_transition must be -inf on the diagonal"),
    ("times that go back", lambda: ContinuousTimeHMM(
        PI, torch.tensor([[-0.5, 0.5], [0.1, -0.1]]), B, LENGTHS, torch.zeros(3),
        validate_args=True), ValueError, "step 1, there is 0.0 after"),
    ("probabilities for rates", lambda: ContinuousTimeHMM(
        PI, A.exp(), B, LENGTHS, torch.arange(3.0).expand(2, 3), validate_args=True),
     ValueError, "rates must be .*sum to zero"),
])  # fmt: skip
def test_distributions(mistake, error, words):
    with pytest.raises(error, match=words):
        mistake()


@refuses([
    ("symbols from 1", lambda: hmm().log_prob(X + 1), ValueError,
     "values must lie between 0 and V - 1 = 2; got values from 1 to 3. Are they one-based"),
    ("negative symbols", lambda: hmm().viterbi(X - 1), ValueError, "values .*from -1 to 1"),
    ("symbols as floats", lambda: hmm().log_prob(X.float()), TypeError,
     r"values must hold integers; got dtype torch.float32. .*dtype=torch.long"),
    ("a series of its own", lambda: hmm().viterbi(X[0]), ValueError,
     r"values must be those of the 2 sequences .*fit\.hmm\(data\), or hmm\.with_lengths"),
    ("one-hot", lambda: hmm().log_prob(torch.eye(3).long()[X]), ValueError, r"values \(2, 3\)"),
    ("transposed", lambda: hmm().log_prob(X.T), ValueError, r"values .*got shape \(3, 2\)"),
    ("list", lambda: hmm().log_prob(X.tolist()), TypeError, f"values .*list. {CONVERT}"),
    ("other Sequences", lambda: hmm().viterbi(data(X[:, :2], LENGTHS - 1)), ValueError,
     "values are Sequences whose lengths this HMM does not have.*fit.hmm"),
    ("Sequences with gaps", lambda: hmm().log_prob(data(observed=GAPS)), ValueError,
     r"values are Sequences whose gaps.* hmm.with_lengths\(data.lengths, data.observed\)"),
    ("vectors of other D", lambda: of_vectors().log_prob(VECTORS[..., :1]), ValueError,
     r"got shape \(2, 3, 1\)\. Build the emission for the data"),
    ("fit for HMM", lambda: Filter(fit_em(module(), data(), num_iterations=1)), TypeError,
     "got Fit. Give that of one stream: fit.hmm"),
    *[(f"{query.__name__} of a fit", lambda query=query: query(fit_em(module(), data()), X),
       TypeError, r"'Fit' object has no .*Queries take an HMM: fit\.hmm\(data\)")
      for query in (queries.impute, queries.predictive_log_prob)],
    ("segments of a fit", lambda: queries.segments(fit_em(module(), data()), X), TypeError,
     r"states must be a tensor; got Fit. Ask fit.predict\(data\)"),
    ("perplexity of a density", lambda: metrics.perplexity(of_vectors(), data(VECTORS)),
     ValueError, "perplexity is of symbols or counts"),
    ("BIC of other data", lambda: metrics.bic(fit_em(module(), data()), data()[:1]), ValueError,
     "data must be those of the fit, of 5 observed steps; got 3"),
    ("cross-validation of a module", lambda: metrics.cross_validate(module(), data()), TypeError,
     "fit must be a function .* got TabularHMM. Give lambda part: fit_em"),
    *[(f"hmm.{name}", lambda name=name: getattr(hmm(), name), AttributeError,
       rf"'HMM' object has no attribute '{name}'. Did you mean {meant}")
      for name, meant in {"decode": "viterbi", "predict": "viterbi", "smoother": "posterior",
                          "score": "log_prob", "transmat_": "log_transition.exp"}.items()],
    ("crf.decode", lambda: LinearChainCRF(torch.zeros(3, 2), A).decode(), AttributeError,
     "Did you mean viterbi"),
    *[(f"module.{name}", lambda name=name: getattr(module(), name), AttributeError,
       rf"'TabularHMM' object has no attribute '{name}'. Ask a fit: fit_em\(module, data\)")
      for name in ("viterbi", "log_prob", "fit", "predict", "means_", "log_transition", "hmm")],
    ("matrices for each step", lambda: hmm(PI, A.expand(2, 2, 2, 2)[:, :1].expand(2, 5, 2, 2)),
     ValueError, r"log_transition \(2, 5\).*say transition_per_step=True"),
    *[(f"{query.__name__} of a {type(of).__name__}", lambda query=query, of=of: query(of, data()),
       TypeError, f"fit must be a Fit, such as .*got {type(of).__name__}")
      for query in (metrics.perplexity, metrics.state_usage) for of in (module(), X)],
    ("accuracy of probabilities", lambda: metrics.one_to_one_accuracy(A, X[:, :2]), TypeError,
     r"predicted must hold integers; .*take .argmax\(-1\)"),
    ("other device", lambda: hmm().log_prob(X.to("meta")), ValueError, "values on meta"),
    ("vectors transposed", lambda: of_vectors().log_prob(VECTORS.mT), ValueError,
     r"values must end in shape \(T, \*E\) = \(3, 2\); got shape \(2, 2, 3\)"),
    ("states out of range", lambda: hmm().log_joint(X, X), ValueError, "states must lie between 0"),
    ("labels out of range", lambda: hmm().restrict(X), ValueError, "labels must lie .*got 2"),
    ("no permutation", lambda: hmm().permute_states(X[0] * 0), ValueError, "order must hold each"),
    ("module for HMM", lambda: Filter(module()), TypeError, "hmm must be an HMM; got TabularHMM"),
    ("label out of range", lambda: LinearChainCRF(
        torch.zeros(3, 2), A, validate_args=True).log_prob(X[0]), ValueError, "labels must lie"),
    ("what is stored", lambda: hmm().viterbi(STORED), TypeError, "StoredSequences. Ask part by pa"),
    ("probabilities for states", lambda: data().to_dataframe(probs=X), ValueError,
     r"probs must have shape \(M, K\) = \(5, 3\)"),
])  # fmt: skip
def test_queries(mistake, error, words):
    with pytest.raises(error, match=words):
        mistake()


@refuses([
    ("list", lambda: data([[0, 1], [1, 0]]), TypeError, "values .*list. .*from_list"),
    ("one dimension", lambda: data(X[0]), ValueError, r"values must have shape .*unsqueeze\(0\)"),
    ("NaN that is observed", lambda: data(VECTORS * math.nan, observed=BOOLEANS), ValueError,
     "values holds NaN at sequence 0, step 0"),
    ("infinite numbers", lambda: data(VECTORS / 0), ValueError,
     "values holds an infinite number at sequence 0, step 0.*Put NaN"),
    ("lengths too long", lambda: data(X, LENGTHS + 1), ValueError, "lengths .*steps, 3; got .* 4"),
    ("labels of one sequence", lambda: data(labels=X[0]), ValueError, r"labels .*\(2, 3\)"),
    ("times unsorted", lambda: data(times=torch.tensor([[0.0, 2.0, 1.0]] * 2)), ValueError,
     r"times must .*increase .*there is 1.0 after 2.0. Sort"),
    ("times twice", lambda: data(times=torch.zeros(2, 3)), ValueError, "0.0 after 0.0"),
    ("total too small", lambda: data(total=1), ValueError, "total must be at least the number of"),
    ("no sequence", lambda: Sequences.from_list([]), ValueError, "sequences is empty"),
    ("one series", lambda: Sequences.from_list(VECTORS[0, :, 0]), ValueError,
     "sequence 0 is a single number; .* Sequences.from_concatenated"),
    ("symbols without a vocabulary", lambda: Sequences.from_list([["a"]], vocabulary=["a"]),
     TypeError, r"vocabulary must be a Vocabulary; got list. Give Vocabulary\(symbols\)"),
    ("words and what is missing", lambda: Vocabulary.from_counts(["a", 1, None]), TypeError,
     "symbols must be texts; got NoneType, int among them"),
    *[(f"a {kind} for a list", lambda many=many: Sequences.from_list(many), TypeError,
       f"sequences must be a list, an item for each; got {kind}")
      for kind, many in {"dict": {"a": [1, 2]}, "DataFrame": pandas.DataFrame({"x": [1]})}.items()],
    ("a column for a table", lambda: Sequences.from_dataframe(pandas.Series([1]), columns="x"),
     TypeError, "frame must be a table; got the Series"),
    ("names of tags", lambda: Sequences.from_dataframe({"x": [1.0], "s": ["hi"]}, columns="x",
                                                       labels="s", tags=["hi"]), TypeError,
     "tags must be a Vocabulary; got list"),
    *[("numbers as text", lambda kind=kind: Sequences.from_dataframe(
        {"x": np.array(["1.5", "-2e3"], kind)}, columns="x"), TypeError,
       r"columns 'x' must be numbers; got text. Convert it: pd.to_numeric\(column\)")
      for kind in ("U", "O")],
    ("text of names", lambda: Sequences.from_list([["rest", "walk"]]), TypeError,
     "got text. Take codes: column.map"),
    ("groups of a table", lambda: Sequences.from_list([WHO, WHO]), TypeError,
     r"sequence 0 is a table whose columns \['who', 'x'\] are not numbers. Call .*by="),
    ("a column twice", lambda: Sequences.from_dataframe(WHO[["x", "x"]], columns="x"), ValueError,
     r"columns must name one column of frame; 'x' occurs twice in \['x', 'x'\]"),
    ("a group twice", lambda: Sequences.from_dataframe(WHO[["x", "who", "who"]], by="who",
                                                       columns="x"), ValueError,
     "by must name one column of frame; 'who' occurs twice"),
    ("a lazy table", lambda: Sequences.from_dataframe(polars.LazyFrame({"x": [1.0]}), columns="x"),
     TypeError, r"frame must be a table; got LazyFrame. Call .collect\(\)"),
    ("codes of what is missing", lambda: fit_em(TabularHMM(2, normal(0)), data(MISSING, None)),
     UserWarning, "values of -999 are far from all others: if they are missing, give NaN"),
    ("a mask for lengths", lambda: data(lengths=BOOLEANS), TypeError,
     r"lengths must hold integers; .*\.sum\(-1\) on a mask"),
    ("a file for a text", lambda: read_characters(__file__), ValueError,
     "text must be a text; got the file"),
    ("degrees", lambda: fit_em(TabularHMM(2, von_mises(2)), data((VECTORS * 90).round())),
     UserWarning,
     "angles reach 90: are they degrees"),
    ("a minibatch that is the whole", lambda: fit_map(of_plate, data(VECTORS[..., 0]), batch_size=1,
                                                      num_iterations=1), UserWarning,
     r'of 2: observe them in pyro.plate\("sequences", data.total, subsample=data.indices\)'),
    ("a path for a table", lambda: Sequences.from_dataframe("x.csv", columns="x"), TypeError,
     "frame must be a table; got the str 'x.csv'. .*read_csv"),
    *[(f"labels that are {kind}", lambda names=names: Sequences.from_dataframe(
        {"x": [1, 2], "state": names}, columns="x", labels="state"), TypeError,
       r"labels 'state' must be numbers; got text.*column.map\(.*NaN is unknown")
      for kind, names in {"text": np.array(["a", "b"]), "objects": ["a", None]}.items()],
    *[(f"a time twice, by {by}", lambda by=by: Sequences.from_dataframe(
        {"x": [1, 2], "who": [1, 1], "time": [3, 3]}, columns="x", by=by, time="time"), ValueError,
       f"rows 0 and 1 have the same. {cure}")
      for by, cure in {None: "Name the seq", "who": "Drop or average rows of one time"}.items()],
    *[(f"times that are {kind}", lambda times=times: Sequences.from_dataframe(
        {"x": [1, 2], "time": times}, columns="x", time="time"), TypeError,
       r"time 'time' must be numbers or dates; got text.*utc=True\).dt.tz_convert\(zone\)")
      for kind, times in {"text": np.array(["2026-03-29", "2026-03-30"]),
                          "objects": ["2026-03-29T01+01:00", "2026-03-29T03+02:00"]}.items()],
    ("shares of several", lambda: plots.state_probs(torch.ones(2, 3, 2)), ValueError,
     r"probs must be \(T, K\), of one sequence; got shape \(2, 3, 2\)"),
    ("an inverted mask", lambda: data(VECTORS.reshape(2, 6), None, observed=torch.zeros(2, 6) > 0),
     UserWarning,
     "observed is False at every step; .* Give ~observed"),
    ("tags without those of training", lambda: corpus_of(
        "test", [Entry(1, ["a"], ["x"])], vocabulary=Vocabulary(["a"])), ValueError,
     "test has tags, .* got tags=None. Give its corpus.tags"),
    ("a sequence of nothing", lambda: Sequences.from_list([[1], []]), ValueError,
     "sequence 1 has no step"),
    ("vectors of several D", lambda: Sequences.from_list([VECTORS[0], VECTORS[0, :, :1]]),
     ValueError, "sequences must share one event shape"),
    ("lengths that do not add up", lambda: Sequences.from_concatenated(X.flatten(), LENGTHS),
     ValueError, "lengths must sum to the number of rows of values, 6; they sum to 5"),
])  # fmt: skip
def test_data(mistake, error, words):
    with pytest.raises(error, match=words):
        mistake()


@refuses([
    ("no state", lambda: TabularHMM(0, categorical(3)), ValueError, "must be at least 1"),
    ("a distribution", lambda: TabularHMM(2, B), TypeError, "emission must be an emission family"),
    ("no symbol", lambda: categorical(0), ValueError, "num_symbols must be at least 1"),
    ("concentration zero", lambda: StickyHDPHMM(2, categorical(3), gamma=0.0), ValueError,
     "gamma must be positive"),
    ("called with a list", lambda: module()([3, 2]), TypeError, "lengths must be .*got list"),
    ("HMM for module", lambda: MarginalModel(hmm()), TypeError, "module must be an HMMModule"),
    ("model of a tensor", lambda: model()(X), TypeError, "data must be Sequences; got Tensor"),
    ("EM of a tensor", lambda: fit_em(module(), X), TypeError, "data must be Sequences; got Tens"),
    ("EM of a model", lambda: fit_em(model(), data()), TypeError, "module must be an HMMModule"),
    ("zeros that gamma has not", lambda: fit_em(TabularHMM(2, gamma()), data(X.float())),
     ValueError, r"without its ends.* 1 do not, such as 0\.0\. Move .*zero_inflated"),
    ("ones that beta has not", lambda: fit_em(TabularHMM(2, beta()), data((X + 1) / 3)),
     ValueError, r"values must .*upper_bound=1.0\) without its ends.*half their rounding\.$"),
    ("counts that are none", lambda: fit_em(TabularHMM(2, poisson()), data(X + 0.5)), ValueError,
     r"values must lie in the support .* 5 do not, such as 0\.5"),
    ("arguments swapped", lambda: to_arviz(data(), fit_em(module(), data())), TypeError,
     "posterior must be a fit, .* got Sequences. The data come after it"),
    ("samples of another model", lambda: to_arviz(
        {name: torch.ones(1, 5, *shape) for name, shape in SHAPES.items()}, data(), model()),
     ValueError, r"samples of 'module.[a-z.]+' must have shape .*= \(2,.*got \* = \(3"),
    ("steps of continuous time", lambda: fit_em(
        TabularContinuousTimeHMM(2, categorical(3)),
        data(times=torch.arange(3.0).expand(2, 3)), num_iterations=1,
    ).forecast(data(times=torch.arange(3.0).expand(2, 3)), 2), ValueError,
     r"forecasts of ContinuousTimeHMM need times=, \(N, H\)"),
    ("times of steps", lambda: fit_em(module(), data()).forecast(data(), times=[1.0]), ValueError,
     "forecasts of HMM need num_steps="),
    ("limits of a part", lambda: fit_em(module(), data()).intervals(data(), of="transition"),
     ValueError, r"of must be a function, such as lambda hmm: hmm.log_transition.exp\(\)"),
    ("a path by lengths", lambda: fit_em(module(), data()).predict(X, [3, 2]), TypeError,
     "data must be Sequences; got Tensor"),
    ("an algorithm", lambda: fit_em(module(), data()).predict(data(), "MAP"), ValueError,
     r"algorithm must be 'viterbi' or 'map'; got 'MAP'\.$"),
    ("a fit of what is stored", lambda: fit_em(module(), data()).hmm(STORED), TypeError,
     "got StoredSequences. Ask part by part"),
    ("a prior of no parameter", lambda: parametric(POISSONS, scale=dist.Gamma(1.0, 1.0))(2),
     TypeError, "priors of the parameters, rate, .*got scale=Gamma"),
    ("restarts of a point", lambda: fit_em(TabularHMM(2, parametric(POISSONS)), data(), restarts=2),
     ValueError, "emission.rate_unconstrained. Give them one, as parametric"),
    ("EM of no step", lambda: fit_em(module(), data(), num_iterations=0), ValueError,
     "iterations must"),
    ("EM to no tolerance", lambda: fit_em(module(), data(), tolerance=math.nan), ValueError,
     "tolerance must be a share of the loss"),
    ("EM that forgets", lambda: fit_em(module(), data(), batch_size=1, decay=2.0), ValueError,
     "decay must lie between 0.5 and 1"),
    *[(f"pairs by {name}",
       lambda name=name: fit_cooccurrence(module(), data(), **{name: True}), ValueError,
       f"{name} must be left out") for name in ("batch_size", "sharded")],
    ("EM from elsewhere", lambda: fit_em(module(), data(), start={"foo": PI}), ValueError,
     "start has no value for initial"),
    ("EM from a word", lambda: fit_em(module(), data(), start="kmeans"), TypeError,
     "start must be a function such as starts.by_kmeans"),
    *[(f"EM by {wrong}", lambda wrong=wrong: fit_em(module(), data(), **{wrong: 3}), TypeError,
       f"{wrong}'. Did you mean {meant}")
      for wrong, meant in {"n_iter": "num_iterations", "num_steps": "num_iterations",
                           "n_init": "restarts"}.items()],
    *[(f"{kind.__name__} by {wrong}", lambda kind=kind, given=given, wrong=wrong: kind(
        *given, LENGTHS, **{wrong: None}), TypeError,
       rf"^{kind.__name__}\(\) got an .*'{wrong}'. Did you mean {meant}\?")
      for kind, *given in [(HMM, PI, A, B), (HSMM, PI, A, A, B), (SecondOrderHMM, PI, A, A, B),
                           (ContinuousTimeHMM, PI, A, B, LENGTHS)]
      for wrong, meant in {"emission_per_steps": "emission_per_step", "observd": "observed",
                           "labels": "allowed", "allow": "allowed"}.items()],
    ("of by num_step", lambda: HMM.of(hmm().chain, B, LENGTHS, num_step=3), TypeError,
     r"^HMM.of\(\) got an .*'num_step'. Did you mean num_steps\?"),
    *[(f"SVI by {wrong}", lambda wrong=wrong: fit_svi(model(), AutoDelta(model()), data(),
                                                     **{wrong: 3}), TypeError,
       f"{wrong}'. Did you mean elbo") for wrong in ("loss", "num_particles")],
    *[(f"by {wrong}", call, TypeError, f"argument '{wrong}'. Did you mean {meant}")
      for wrong, meant, call in [
          ("n_components", "num_states", lambda: TabularHMM(n_components=2)),
          ("emissions", "emission", lambda: TabularHSMM(2, emissions=categorical(3))),
          ("num_states", "n_components", lambda: GaussianHMM(num_states=2)),
          ("n_symbols", "num_symbols", lambda: categorical(n_symbols=2)),
          ("mask", "observed", lambda: data(mask=BOOLEANS)),
          ("groupby", "by", lambda: Sequences.from_dataframe({}, columns="x", groupby="y")),
          ("ax", "axes", lambda: plots.transition(hmm(), ax=None)),
          ("hidden_size", "hidden_dim", lambda: NeuralHMM(2, 3, hidden_size=4)),
          ("n_features", "num_symbols", lambda: DenseHMM(2, n_features=3, dim=2)),
          ("n_params", "num_parameters", lambda: metrics.bic(None, data(), n_params=3)),
          ("n_folds", "num_folds", lambda: metrics.cross_validate(None, data(), n_folds=3)),
          ("batchsize", "batch_size", lambda: metrics.perplexity(None, data(), batchsize=3)),
          ("k", "count", lambda: queries.k_best(hmm(), X, k=3)),
          ("num_samples", "num_draws", lambda: to_arviz(None, data(), num_samples=3)),
          ("num_samples", "num_draws", lambda: PosteriorDraws.of(None, num_samples=3)),
          ("n_sequences", "num_sequences", lambda: datasets.casino(n_sequences=3)),
          ("epochs", "num_epochs", lambda: LanguageModel.fit(None, None, epochs=2)),
      ]],
    *[(f"by {wrong}, without a guess", call, TypeError, f"argument '{wrong}'.$")
      for wrong, call in [
          ("random_state", lambda: TabularHMM(2, categorical(3), random_state=0)),
          ("log_prior", lambda: fit_map(model(), data(), log_prior=0.0)),
      ]],
    ("states and emission swapped", lambda: TabularHMM(categorical(3), 2), TypeError,
     "num_states must be an int; got partial. Is it another argument"),
    ("states of chains as one", lambda: TabularFactorialHMM(2, categorical(3)), ValueError,
     r"num_states must hold .* Give them as \[2, 3\]"),
    ("a list of streams", lambda: streams([normal(2), categorical(3)]), ValueError,
     "families must be emission families"),
    ("covariances of hmmlearn", lambda: normal(2, covariance_type="full"), TypeError,
     "Families of covariances are normal_full, normal_tied and"),
    ("MAP by init", lambda: fit_map(model(), data(), init=1), TypeError, "'. Did you mean start"),
    ("parts before the dimension", lambda: normal_mixture(3, 2), TypeError,
     r"\*, num_components\) got \(int, int\): missing .*'num_components'"),
    ("BIC of data", lambda: metrics.bic(data(), None), TypeError, "fit must be a Fit"),
    ("MAP of a module", lambda: fit_map(module(), data()), TypeError,
     r"model must be a Pyro model .*MarginalModel\(module\)"),
    ("MAP that climbs", lambda: fit_map(model(), data(), learning_rate=-1.0), ValueError,
     "learning_rate must be positive"),
    ("a prior for columns", lambda: regression(dist.Normal, loc=[0], scale=1.0), ValueError,
     "of Normal, loc, scale; got loc, scale. The standard deviation of a prior is prior_scale="),
    ("regression of a family", lambda: regression(normal, loc=[0]), TypeError,
     "kind must be a class of distributions, .* got normal"),
    ("a chain from a fit", lambda: fit_mcmc(fit_em(module(), data()), data()), TypeError,
     r"model must be a Pyro model of the data; got Fit\. .*fit\.model"),
    ("a column of Sequences", lambda: data()["a"], TypeError, "index must be .*got 'a'"),
    ("losses of an HMM", lambda: plots.losses(hmm()), TypeError, "fit must be a Fit, .*got HMM"),
    ("an estimator of Sequences", lambda: GaussianHMM().fit(data()), TypeError,
     "got Sequences. Call fit_em, or give X, lengths = data.to_concatenated"),
    ("a module of data", lambda: module()(data()), TypeError, "got Sequences.* data.lengths "),
    ("a constant that is none", lambda: freeze(module(), "transition", torch.ones(2, 2)),
     ValueError, "value of 'transition' must lie in its space, "),
    ("a rate that is none", lambda: freeze(TabularHMM(2, parametric(POISSONS)), "emission.rate",
     -torch.ones(2)), ValueError, "value of 'emission.rate' must lie in its space, "),
    *[(f"MAP by the optimizer of {got}", lambda given=given: fit_map(
        model(), data(), optimizer=given), TypeError,
       f"optimizer must be a function .*got {got}. Give partial")
      for given, got in [("adam", "str"), (pyro.optim.Adam({"lr": 0.1}), "NoneType")]],
    *[(f"{name} of another kind", lambda name=name, wrong=wrong: fit_map(
        model(), data(), **{name: wrong}), TypeError, f"{name} must be {wanted}; got")
      for name, wrong, wanted in [("learning_rate", [0.1], "a number"),
                                  ("elbo", "trace", "an ELBO of Pyro, such as Trace_ELBO..")]],
    ("a class of guides", lambda: fit_svi(model(), AutoDelta, data()), TypeError,
     "guide must be of the model, .*got the class AutoDelta"),
    ("pairs of other symbols", lambda: fit_cooccurrence(module(), data(), 5), ValueError,
     "num_symbols must be V of the module, 3; got 5"),
    ("pairs by lag", lambda: fit_cooccurrence(module(), data(), lag=2), TypeError,
     r"fit_cooccurrence\(\) .*'lag'. Did you mean lags"),
    ("pairs of Sequences", lambda: CooccurrenceModel(module(), data()), TypeError,
     r"target must be Pairs, .*got Sequences. Make Pairs by count_pairs\(data, V"),
    ("clusters of Sequences", lambda: clusters.brown(data(), 2), TypeError, "pairs must be Pairs"),
    ("a matrix to draw", lambda: plots.transition(A), TypeError, "hmm must be an HMM; got Tensor"),
    ("an HMM for its forecast", lambda: plots.forecast(hmm()), TypeError,
     "predicted must be a Forecast; got HMM. Call hmm.forecast"),
    ("a list for a vocabulary", lambda: LanguageModel(["a", "b"], None), TypeError,
     "vocabulary must be a Vocabulary; got list"),
    ("a prompt in words", lambda: language_model().generate(1, prompt=["a"]), TypeError,
     "prompt must be a str; got list. Join"),
    ("a text read never", lambda: language_model().fit(data(), num_epochs=0), ValueError,
     "num_epochs must be at least 1"),
    ("words without tags", lambda: fit_map(MarginalModel(NeuralTagger(2, 3, 2, 4)), data()),
     ValueError, r"values must end in .*Pair words with tags: tagged\(data\)"),
    ("columns of a design", lambda: Sequences.from_dataframe(
        {"x": [0.5]}, columns="x", covariates=Design({"loc": {"columns": ["dose"]}})), ValueError,
     r"covariates must name columns of frame.*design.table\(frame\), covariates=design.names"),
    ("an M-step of a list", lambda: fit_em(TabularHMM(2, partial(Wrong, [PI])), COUNTS),
     TypeError, "m_step of Wrong must return a pair: .*, tensors"),
    ("an M-step of no parameter", lambda: fit_em(TabularHMM(2, partial(Wrong, {"b": PI})), COUNTS),
     AttributeError, "m_step returned 'emission.b', .* has emission.rate"),
])  # fmt: skip
def test_modules_and_fits(mistake, error, words):
    with pytest.raises(error, match=words):
        mistake()


@refuses([
    ("too many", lambda: fit_em(module(), data(), [3, 2]), TypeError,
     r"fit_em\(module, data, \*, num_.*\) got \(TabularHMM, Sequences, list\): too many pos"),
    ("no guide", lambda: fit_svi(model(), data()), TypeError,
     r"fit_svi\(model, guide, data, .*got \(MarginalModel, Sequences\): missing .* 'data'"),
    ("no data", lambda: fit_em(module(), data()).predict(), TypeError,
     r"predict\(data, algorithm\) got \(\): missing .* 'data'"),
    ("no durations", lambda: HSMM(PI, A, B, LENGTHS), TypeError,
     r"\(log_initial, log_transition, log_duration, .*got \(Tensor, Tensor, Categorical, Tensor\)"),
    ("columns by place", lambda: Sequences.from_dataframe({"x": [1.0]}, "x"), TypeError,
     r"\(frame, \*, columns, .*got \(dict, str\): too many"),
    ("scores of a CRF again", lambda: LinearChainCRF(torch.zeros(3, 2), A).viterbi(X), TypeError,
     r"viterbi\(\) got \(Tensor\): too many"),
    ("a formula first", lambda: formulas("~ x", {}), TypeError,
     r"\(frame, \*\*parts\) got \(str, dict"),
    ("samples by number", lambda: hmm().sample(10), TypeError,
     r"sample_shape must be a tuple, such as \(10,\); got int"),
    ("an HMM of values", lambda: hmm()(X), TypeError, "sample_shape .*got Tensor. Of values ask"),
    *[(f"{wrong} of a method", call, TypeError, f"'{wrong}'. Did you mean {meant}") for
      wrong, meant, call in [
          ("steps", "num_steps", lambda: fit_em(module(), data()).forecast(data(), steps=2)),
          ("k", "count", lambda: LinearChainCRF(torch.zeros(3, 2), A).k_best(k=2)),
          ("seed", "generator", lambda: LanguageModel.generate(None, 2, seed=1)),
          ("num_samples", "num_draws", lambda: PosteriorDraws.of(None, num_samples=2)),
          ("group", "animal", lambda: movement([0.0], [0.0], group=[1])),
      ]],
    ("criterion of a list", lambda: plots.criterion([1.0]), TypeError,
     r"scores must be Mapping\[int, float\] .*; got list. 'list' object has no"),
    ("a fit for samples", lambda: plots.transition_posterior(fit_em(module(), data())), TypeError,
     "samples must be Tensor; got Fit"),
    ("validation of NumPy", lambda: fit_map(model(), data(), validation=X.numpy()), TypeError,
     r"validation must be Sequences \| None; got ndarray"),
    ("folds without a fit", lambda: metrics.cross_validate(lambda part: None, data(), 2), TypeError,
     "fit must be .*Fit.*; got NoneType"),
    ("blocks by number", lambda: NeuralHMM(8, 10, blocks=4), TypeError,
     "blocks must be Blocks .*got int"),
    ("a kernel", lambda: fit_mcmc(NUTS(model()), data()), TypeError,
     "model must be a Pyro model of the data; got NUTS. Give MarginalModel"),
    *[("a class of priors", prior, TypeError, "log_prior must be a function of the HMM; got type")
      for prior in (lambda: MarginalModel(module(), DiversityPrior),
                    lambda: fit_em(module(), data(), log_prior=DiversityPrior))],
    ("a start by HMM", lambda: fit_em(module(), data(), start=hmm()), TypeError,
     r"start must be .*starts.from_hmm\(hmm\), .*got HMM"),
    ("a seed", lambda: fit_em(module(), data(), generator=0), TypeError,
     r"generator must be a torch.Generator; got int. Of a seed give"),
    ("a checkpoint, yes", lambda: fit_em(module(), data(), checkpoint=True), TypeError,
     "checkpoint must be the name of a file; got bool"),
    ("latitude first", lambda: movement("lat", "lon", frame={"lat": [52.0], "lon": [13.0]}),
     ValueError, "longitude must be degrees .*got lat. The longitude comes first"),
    ("columns of no frame", lambda: movement("lon", "latitude"), ValueError,
     "Of names give frame="),
    ("a level in percent", lambda: fit_em(module(), data()).forecast(data(), 1).interval(90),
     ValueError, "level must be between 0 and 1; got 90. For 90 % give 0.9"),
    ("limits of one name", lambda: fit_em(module(), data()).intervals(data(), of="module.initial"),
     ValueError, r"of must be a fun.*got 'module.initial'. Of a whole .*\(data\)\[name\]"),
    ("a share in percent", lambda: data().split(80), ValueError,
     "share must be between 0 and 1; got 80"),
    *[("a distribution by name", lambda make=make: make("poisson"), TypeError,
       r"distribution must be one of batch shape \(K,\); got poisson")
      for make in (parametric, lambda name: parametric_durations(name, 5)(2))],
    ("zeros of a distribution", lambda: TabularHMM(2, zero_inflated(POISSONS)), TypeError,
     "family must be an emission family, .*got Poisson"),
    ("emissions shared by name", lambda: tied(normal(0), ["a", "b"]), TypeError,
     "index must be numbers; got text"),
    ("a file of a list", lambda: read_sentences([["a"]]), TypeError,
     "path must be a file; got list"),
    ("text of words", lambda: count_words([["a"]]), TypeError,
     "lines must be lines of text, .*got a list in it. Join words"),
    ("more states than rows", lambda: GaussianHMM(3).fit(X[:, :1].float().numpy()), ValueError,
     "X must have a row for each of 3 clusters; got 2"),
    ("a column of probabilities", lambda: hmm(PI[:, None]), ValueError,
     r"log_transition must end .*= \(1, 1\), as log_initial is \(2, 1\); got shape \(2, 2\)"),
    ("sequences as an array", lambda: np.asarray(data()), TypeError, "no array. Give data.values"),
    ("sequences for the filter", lambda: Filter(hmm(lengths=torch.tensor(1))).update(data()),
     TypeError, "no array. Give data.values"),
    ("a column itself", lambda: Sequences.from_dataframe(pandas.DataFrame({"x": [1.5]}),
                                                         columns=pandas.Series([1.5])), ValueError,
     r"columns must name columns of frame, \['x'\]; got 1.5"),
    ("a word of no query", lambda: fit_em(module(), data()).pvalues, AttributeError,
     r"no attribute 'pvalues'\.$"),
    ("a negative variance", lambda: variances_of(-1.0), ValueError,
     "covars_ must be positive and finite; got -1"),
    ("variances of a matrix", lambda: variances_of(np.ones((1, 2)), "spherical"), ValueError,
     r"covars_ must have shape of type 'spherical' = \(1,\); got shape \(1, 2\)"),
    ("pairs of lists", lambda: fit_cooccurrence(module(), [[0, 1]]), ValueError,
     r"got list. .* of lists Sequences.from_list\(lists\)"),
])  # fmt: skip
def test_calls(mistake, error, words):
    with pytest.raises(error, match=words):
        mistake()


def variances_of(number, kind="diag"):
    """An estimator with a variance that its user sets."""
    rows = np.linspace(-1.0, 1.0, 6)[:, None]
    estimator = GaussianHMM(1, kind).fit(rows)
    estimator.covars_ = np.atleast_2d(number)
    return estimator.predict(rows)


def test_a_table_of_tags_read_as_sentences_is_told(tmp_path):
    path = tmp_path / "words.conll"
    path.write_text("the\tDET\ncat\tNOUN\n")
    with pytest.warns(match="has tabs, as tables of tagged words"):
        read_sentences(path)


def test_errors_inside_of_a_call_stay_as_they_are():
    """An attribute that the caller's own function lacks, and what a right argument lacks."""
    with pytest.raises(AttributeError, match="nothing"):
        metrics.cross_validate(lambda part: part.nothing, data(), 2)
    with pytest.raises(TypeError, match=r"^can only concatenate"):
        metrics.cross_validate(lambda part: [] + 1, data(), 2)


class Own(HMMModule):
    """A module of a user, who may make mistakes of his own, with options of any name."""

    def __init__(self, size, names=(), **options):
        super().__init__()
        self.loc, self.options = torch.nn.Parameter(torch.zeros(size)), options

    def forward(self, lengths, observed=None, covariates=None):
        return self.options["forward"](self, covariates)


@pytest.mark.parametrize(("forward", "words"), [
    (lambda own, covariates: covariates.shape, "'NoneType' object has no attribute 'shape'"),
    (lambda own, covariates: own.nothing, "'Own' object has no attribute 'nothing'"),
    (lambda own, covariates: HMM(own.loc, own.loc).nothing, r"HMM.__init__\(log.*missing .* 'emi"),
    (lambda own, covariates: covariates + own.loc, r"unsupported operand type"),
])  # fmt: skip
@pytest.mark.parametrize("fit", [fit_em, lambda m, d, **o: fit_map(MarginalModel(m), d, **o)])
def test_errors_of_a_users_model_are_his(fit, forward, words):
    own = Own(2, labels=["a"], forward=forward)
    with pytest.raises((AttributeError, TypeError), match=words) as caught:
        fit(own, data(), num_iterations=3, tolerance=None)
    assert any(entry.name == "<lambda>" for entry in caught.traceback)
    assert own.options["labels"] == ["a"]


def test_arrays_become_tensors_at_the_doors():
    by_arrays = HMM(PI.numpy(), A.numpy(), B, LENGTHS.numpy(), BOOLEANS.numpy())
    read = Sequences(X.numpy(), LENGTHS.numpy(), times=np.arange(3.0) + np.zeros((2, 1)))
    assert torch.equal(by_arrays.log_prob(X.numpy()), hmm().log_prob(X))
    assert torch.equal(read.values, X)
    assert torch.equal(read.lengths, LENGTHS)
    assert torch.equal(hmm().viterbi(X.numpy()), hmm().viterbi(X))
    assert TabularHMM(np.int64(2), categorical(np.int64(3)))(LENGTHS).num_states == 2


def test_whole_numbers_may_stand_for_vectors():
    whole = torch.ones(2, 3, 2)
    assert torch.equal(of_vectors().log_prob(whole.long()), of_vectors().log_prob(whole))


def scaled_by_hand(data):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    half = torch.full((2,), 0.5).log()
    hmm = HMM(half, half.expand(2, 2), dist.Normal(loc, 1.0), data.lengths)
    pyro.factor("rolls", hmm.log_prob(data.values).sum() * data.total / len(data))


def test_what_is_right_is_not_doubted():
    """Unwrapped angles, a symbol for unknown words, a scale by hand, arguments of any name."""
    turning = data(torch.linspace(0.0, 80.0, 40).view(1, -1), None)
    words = Sequences.from_list([[1, 2, 3] * 20])
    spread = data(torch.tensor([[999.0, 999.0, *range(900)]]), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_em(TabularHMM(1, von_mises(0)), turning, num_iterations=2)
        fit_em(TabularHMM(1, categorical(4)), words, num_iterations=2)
        fit_em(TabularHMM(1, normal(0)), spread, num_iterations=2)
        fit_map(scaled_by_hand, data(VECTORS[..., 0]), batch_size=1, num_iterations=1)

    class Any(TabularHMM):
        def __init__(self, **own):
            super().__init__(own["n_states"], categorical(2))

        @property
        def viterbi(self):
            return self.missing

    assert Any(n_states=3).num_states == 3
    with pytest.raises(AttributeError, match=r"viterbi'$|missing"):
        _ = Any(n_states=3).viterbi


@pytest.mark.parametrize("fit", [fit_em, lambda m, d, **o: fit_map(MarginalModel(m), d, **o)])
def test_a_warning_names_the_line_of_the_caller(fit):
    with pytest.warns(match="degrees") as caught:
        fit(TabularHMM(1, von_mises(0)), data(VECTORS[..., 0] * 0 + 90), num_iterations=1)
    assert caught[0].filename == __file__
