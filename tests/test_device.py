"""The whole package on a second device: the same numbers, few host reads.

The device is simulated (:mod:`twin_device`). ``PYROHMM_TEST_DEVICE=cuda`` takes a real one, where
nothing is counted.
"""

import copy
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import cache, partial

import every_fit
import numpy as np
import pyro
import pytest
import torch
from families import CASES, STATES
from pyro.distributions import Categorical, MultivariateNormal, Normal
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam
from torch.distributions import constraints
from torch.utils._pytree import tree_leaves

import pyrohmm
from pyrohmm import (
    HMM,
    DenseHMM,
    Filter,
    LanguageModel,
    MarginalModel,
    NeuralHMM,
    NeuralTagger,
    Sequences,
    TabularHMM,
    automata,
    blocks,
    categorical,
    fit_em,
    fit_laplace,
    fit_map,
    fit_svi,
    language,
    metrics,
    normal,
    queries,
    tagging,
)
from pyrohmm._choices import first_values
from pyrohmm.distributions import linear_emissions
from pyrohmm.infer import mcmc
from pyrohmm.infer.loop import FitLoop
from pyrohmm.infer.models import build
from pyrohmm.io.files import Checkpoint
from pyrohmm.nn.neural import sample_kept_states
from pyrohmm.ops import backends, recursions
from pyrohmm.ops.backends import TORCH, TRITON
from pyrohmm.ops.dense import _torch as torch_engine
from pyrohmm.ops.dense import chain as chains

CLUSTERS = blocks.from_clusters(torch.tensor([0, 1, 2, 0, 1]), 3)


DEVICE = os.environ.get("PYROHMM_TEST_DEVICE", "twin")
if DEVICE == "twin":  # torch has one accelerator at a time
    import twin_device
    from twin_device import watched
else:
    watched = nullcontext
SLOW = pytest.mark.slow
counted = pytest.mark.skipif(DEVICE != "twin", reason="nothing is counted on a real device")


def there(thing):
    return thing.to(DEVICE)


def numbers(thing):
    """The numbers of a tensor that is on the second device."""
    assert thing.device.type == DEVICE, "a result is on the CPU"
    return thing.detach().cpu()


def agree(found, expected, **tolerance):
    torch.testing.assert_close(numbers(found), expected.detach(), **tolerance)


def symbols(ragged=True, num_steps=7):
    torch.manual_seed(0)
    lengths = torch.tensor([num_steps, 4, 1] if ragged else [num_steps] * 3)
    return torch.randint(5, (3, num_steps)), lengths


def chain(emission, ragged=True, hard_zero=False):
    """An HMM of 3 states, and the same one on the second device; and values."""
    torch.manual_seed(1)
    initial, transition = torch.randn(3).log_softmax(-1), torch.randn(3, 3)
    if hard_zero:
        transition[0, 2] = -torch.inf
    transition = transition.log_softmax(-1)
    values, lengths = symbols(ragged)
    if emission == "symbols":
        parameters = (torch.randn(3, 5),)

        def build(logits):
            return Categorical(logits=logits)
    else:
        parameters = (torch.randn(3, 2), torch.eye(2).expand(3, 2, 2))
        values = torch.randn(3, 7, 2)

        def build(loc, root):
            return MultivariateNormal(loc, scale_tril=root)

    here = HMM(initial, transition, build(*parameters), lengths)
    moved = HMM(there(initial), there(transition), build(*map(there, parameters)), lengths)
    return here, moved, values


# Queries ------------------------------------------------------------------------------------------


def updated(hmm, values):
    """States and surprise of a filter, which another takes over."""
    filters = Filter(hmm), Filter(hmm)
    found = [filters[0].update(values[:, 0])]
    filters[1].load_state_dict(filters[0].state_dict())
    found.append(filters[1].update(values[:, 1]))
    return found, filters[1].surprise, filters[1].predict(2).log_prob(values[:, :2])


QUERIES = {
    "log_prob": lambda hmm, values: hmm.log_prob(values),
    "filtered": lambda hmm, values: hmm.filtered(values),
    "viterbi": lambda hmm, values: hmm.viterbi(values),
    "posterior": lambda hmm, values: hmm.posterior(values),
    "expected_counts": lambda hmm, values: hmm.expected_counts(values),
    "log_joint": lambda hmm, values: hmm.log_joint(values, hmm.viterbi(values)),
    "restrict": lambda hmm, values: hmm.restrict(hmm.viterbi(values)).log_prob(values),
    "stationary": lambda hmm, values: hmm.stationary(),
    "block_posterior": lambda hmm, values: hmm.block_posterior(values),
    "final_state": lambda hmm, values: hmm.final_state(values),
    "entropy": lambda hmm, values: queries.path_entropy(hmm, values),
    "predictive": lambda hmm, values: queries.predictive_log_prob(hmm, values),
    "visits": lambda hmm, values: queries.expected_visits(hmm, values),
    "residuals": lambda hmm, values: queries.pseudo_residuals(hmm, values).normal,
    "ahead": lambda hmm, values: queries.pseudo_residuals(hmm, values, forecast=True).middle,
    "k_best": lambda hmm, values: queries.k_best(hmm, values, 2)[1],
    "dwell": lambda hmm, values: queries.dwell_time_mean(hmm),
    "marginals": lambda hmm, values: queries.observation_marginals(hmm, values).quantiles(),
    "forecast": lambda hmm, values: hmm.forecast(values, 2).log_prob(values[:, :2]),
    "mean": lambda hmm, values: hmm.forecast(values, 2).mean,
    "continuation": lambda hmm, values: queries.continuation(hmm, values, 2).log_prob(
        torch.cat([values, values[:, :2]], 1)
    ),
    "filter": updated,
    "best_tags": lambda hmm, values: hmm.best_tags(values),
    "tag_probs": lambda hmm, values: hmm.tag_probs(values),
}
DRAWS = {
    "paths": lambda hmm, values: hmm.sample_states(values, (4,)),
    "samples": lambda hmm, values: hmm.sample_with_states((2,)),
    "imputed": lambda hmm, values: queries.impute(hmm, values),
    "residual": lambda hmm, values: queries.pseudo_residuals(hmm, values).sample(),
    "continued": lambda hmm, values: hmm.forecast(values, 2).sample((3,)),
}


def said(ask, *arguments):
    """The tensors of an answer; the type of the error if there is none."""
    try:
        answer = ask(*arguments)
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        return type(error)
    return [leaf for leaf in tree_leaves(answer) if isinstance(leaf, torch.Tensor)]


def answers_agree(here, moved, values):
    """Whether two HMMs answer alike; samples are of other numbers."""
    for name, ask in (QUERIES | DRAWS).items():
        found, expected = said(ask, moved, there(values)), said(ask, here, values)
        if isinstance(expected, type):
            assert found is expected, name
            continue
        for one, other in zip(found, expected, strict=True):
            if name in DRAWS:
                assert numbers(one).shape == other.shape, name
            else:
                agree(one, other, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("hard_zero", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("emission", ["symbols", "full"])
def test_queries_of_an_hmm_are_those_of_the_cpu(emission, ragged, hard_zero):
    with watched():
        answers_agree(*chain(emission, ragged, hard_zero))


def of_family(name):
    """A module and data of one of the families."""
    case, rng = CASES[name], np.random.default_rng(0)
    values = torch.tensor(case.values(rng, 24)).reshape(4, 6, *case.values(rng, 1).shape[1:])
    return (
        lambda: TabularHMM(STATES, case.family()),
        lambda: Sequences(values, torch.tensor([6, 5, 6, 2])),
    )


def some_data(vectors=False):
    values, lengths = symbols()
    return Sequences(torch.randn(3, 7, 2) if vectors else values, lengths)


def tagged_text():
    labels = [[0, 1, 0, 1], [0, -1]]
    return tagging.tagged(Sequences.from_list([[0, 1, 2, 1], [2, 1]], labels=labels))


def in_blocks(kind, *sizes, **options):
    return lambda: kind(9, 5, *sizes, hidden_dim=4, blocks=CLUSTERS, **options)


EVERY = every_fit.MODULES | {
    "one level": (in_blocks(NeuralHMM), some_data),
    "two levels": (in_blocks(NeuralHMM, two_level=True), some_data),
    "tagger": (in_blocks(NeuralTagger, 2), tagged_text),
}


def prepared(make, data):
    """A module on the CPU and on the second device, and data for both."""
    torch.manual_seed(2)
    module, data = make(), data()
    with watched():
        return (module, data), (there(copy.deepcopy(module)), there(data))


@pytest.mark.parametrize(
    "name", [*EVERY, "several", "full", *(pytest.param(name, marks=SLOW) for name in CASES)]
)
def test_queries_of_every_chain_and_family_are_those_of_the_cpu(name):
    make, data = EVERY[name] if name in EVERY else of_family(name)
    hmms = []
    with watched(), torch.no_grad():
        for module, given in prepared(make, data):
            pyro.set_rng_seed(0)
            with first_values(given.device):
                hmms.append(build(module.eval(), given))
        answers_agree(*hmms, data().values)


# Fits ---------------------------------------------------------------------------------------------


def fitted(fit, module, data, **options):
    """The same fit on the CPU and on the second device, after one seed."""
    results = []
    for own, given in prepared(module, lambda: data):
        pyro.set_rng_seed(0)
        with watched():
            results.append(fit(own, given, **options))
    return results


def alike(moved, here, **tolerance):
    torch.testing.assert_close(moved, here, **tolerance)
    assert moved.isfinite().all()


def both_agree(here, moved):
    alike(moved.losses, here.losses)
    with watched():
        for name, value in moved.parameters.items():
            agree(value, here.parameters[name], atol=1e-7, rtol=1e-6)


MODULES = {
    "table": lambda: TabularHMM(2, categorical(5)),
    "normal": lambda: TabularHMM(2, normal(2)),
    "dense": lambda: DenseHMM(2, 5, dim=2),
    "neural": EVERY["one level"][0],
    "two levels": EVERY["two levels"][0],
}


def by_map(module, data, **options):
    return fit_map(MarginalModel(module), data, progress=False, **options)


def by_svi(module, data, **options):
    model = MarginalModel(module)
    return fit_svi(model, AutoNormal(model), data, progress=False, **options)


def by_em(module, data, **options):
    return fit_em(module, data, tolerance=None, progress=False, **options)


@pytest.mark.parametrize("name", CASES)
def test_em_of_every_family_is_that_of_the_cpu(name):
    make, data = of_family(name)
    both_agree(*fitted(by_em, make, data(), num_iterations=2, restarts=2))


@pytest.mark.parametrize("fit", [by_map, by_em])
def test_restarts_are_those_of_the_cpu(fit):
    here, moved = fitted(fit, MODULES["table"], some_data(), num_iterations=2, restarts=2)
    alike(moved.restarts.losses, here.restarts.losses)


RANDOM = "fit_svi", "fit_gibbs", "fit_mcmc"  # whose steps draw numbers
FITS = every_fit.FITS | {"fit_em": partial(by_em, num_iterations=2, restarts=1)}
QUICK = {
    *((fit, name) for fit in FITS for name in EVERY if fit not in ("fit_em", *RANDOM)),
    *((fit, "TabularHMM") for fit in RANDOM),
    *(("fit_em", name) for name in every_fit.MODULES),
}


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        pytest.param(name, fit, marks=SLOW if (fit, name) not in QUICK else [])
        for name in EVERY
        for fit in FITS
    ],
)
def test_every_fit_of_every_module_is_that_of_the_cpu(name, fit, monkeypatch):
    """What is refused on the CPU is refused there alike; steps of samplers are their own."""
    monkeypatch.setattr(mcmc, "CLIMB", 2)
    make, data = EVERY[name]
    try:
        here, moved = fitted(FITS[fit], make, data())
    except (TypeError, ValueError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            FITS[fit](make(), data())
        return
    with watched():
        assert all(numbers(value).isfinite().all() for value in moved.parameters.values())
    if fit not in RANDOM:
        both_agree(here, moved)


@pytest.mark.parametrize("fit", RANDOM)
def test_what_draws_numbers_begins_where_it_does_on_the_cpu(fit, monkeypatch):
    begun = []

    def stop(loop):
        begun.append(loop)
        raise InterruptedError

    monkeypatch.setattr(FitLoop, "take_steps", stop)
    monkeypatch.setattr(mcmc, "CLIMB", 2)
    for module, data in prepared(*EVERY["TabularHMM"]):
        pyro.set_rng_seed(0)
        with watched(), pytest.raises(InterruptedError):
            FITS[fit](module, data)
    points = {
        "fit_svi": lambda loop: loop.tensors(),
        "fit_gibbs": lambda loop: [*loop.parameters.values.values()],
        "fit_mcmc": lambda loop: [loop.hamiltonian.state.place],
    }
    with watched():
        for expected, found in zip(*map(points[fit], begun), strict=True):
            agree(found, expected)


@pytest.mark.parametrize("fit", ["fit_em", "fit_map", *RANDOM])
@pytest.mark.parametrize("order", [1, -1])
def test_a_fit_goes_on_on_another_device(fit, order, monkeypatch, tmp_path):
    save, options = FitLoop._save, {"checkpoint": tmp_path / "fit", "progress": False}
    if fit in ("fit_gibbs", "fit_mcmc"):
        options |= {"num_samples": 2, "warmup": 2, "num_chains": 2}
    else:
        options["num_iterations"] = 4

    def stop(loop):
        save(loop)
        if len(loop.losses) == 2:
            raise InterruptedError

    def run(module, data):
        pyro.set_rng_seed(0)
        model = module if fit in ("fit_em", "fit_gibbs") else MarginalModel(module)
        guide = [AutoNormal(model)] if fit == "fit_svi" else []
        with watched():
            return getattr(pyrohmm, fit)(model, *guide, data, **options)

    monkeypatch.setattr(mcmc, "CLIMB", 2)
    monkeypatch.setattr(Checkpoint, "is_due", lambda self: True)
    first, last = prepared(*EVERY["TabularHMM"])[::order]
    with monkeypatch.context() as patch:
        patch.setattr(FitLoop, "_save", stop)
        with pytest.raises(InterruptedError):
            run(*first)
    losses = run(*last).losses.cpu()
    assert losses.isfinite().all()
    if fit not in RANDOM:
        options["checkpoint"].unlink()
        alike(losses, run(*prepared(*EVERY["TabularHMM"])[0]).losses)


class Subjects(PyroModule):
    """A mean of each subject; its parameters have a device."""

    def __init__(self):
        super().__init__()
        self.mean = PyroParam(torch.tensor(0.0))
        self.spread = PyroParam(torch.tensor(1.0), constraint=constraints.positive)
        self.register_buffer("one", torch.ones(1))

    def forward(self, data):
        zero = torch.zeros_like(self.one)
        with pyro.plate("subjects", len(data)):
            own = pyro.sample("own", Normal(0.0, self.spread))
            loc = (self.mean + own).unsqueeze(-1)
            hmm = HMM(zero, zero.unsqueeze(0), Normal(loc, 1.0), data.lengths)
            pyro.sample("x", hmm, obs=data.values)
        return hmm


def test_random_effects_are_those_of_the_cpu_wherever_the_data_are():
    torch.manual_seed(0)
    data, found = Sequences(torch.randn(3, 1) + torch.randn(3, 4), torch.full((3,), 4)), []
    with watched():
        for model, given in ((Subjects(), data), (there(Subjects()), data)):
            fit = fit_laplace(model, given, ["own"], num_steps=9)
            of = fit.intervals(given, of=lambda hmm: hmm.emission.loc)
            effect = fit.effects(given)["own"]
            found.append((fit, [*fit.intervals(given).values(), *of.values(), effect]))
    (here, ends), (moved, others) = found
    both_agree(here, moved)
    with watched():
        for one, other in zip(others, ends, strict=True):
            for part, expected in zip(one, other, strict=True):
                agree(part, expected)


# What is asked of a fit ---------------------------------------------------------------------------

ASKED = {
    "intervals": lambda fit, data: fit.intervals(data.to("cpu")),  # and moves them
    "of": lambda fit, data: fit.intervals(data, of=lambda hmm: hmm.stationary()),
    "profile": lambda fit, data: fit.intervals(
        data, of=fit.information(data).labels[0], method="profile"
    ),
    "table": lambda fit, data: fit.table(data) and fit.summary(data) and None,
    "parts": lambda fit, data: fit.parts(data),
    "aic": lambda fit, data: torch.tensor(metrics.aic(fit, data)),
    "usage": lambda fit, data: metrics.state_usage(fit, data),
    "merged": lambda fit, data: pyrohmm.merge_states(fit.hmm(data), 0, 1).log_prob(data.values),
    "started": lambda fit, data: by_map(fit.model.module, data, start=fit, num_iterations=2).losses,
    "diverse": lambda fit, data: fit_map(
        MarginalModel(fit.model.module, pyrohmm.DiversityPrior(1.0)), data, num_iterations=2
    ).losses,
    "validated": lambda fit, data: by_map(
        fit.model.module, data, validation=data[:2], num_iterations=2, validate_every=1
    ).validation,
}  # fmt: skip
SAMPLED = {
    "bootstrap": lambda fit, data: fit.bootstrap(data, 3).intervals(),
    "resampled": lambda fit, data: fit.bootstrap(data, 3, parametric=False).intervals(),
    "check": lambda fit, data: pyrohmm.check_model(fit, data, num_samples=2).p_values,
    "report": lambda fit, data: (
        pyrohmm.report(fit, data, tempfile.mkdtemp() + "/report.html") and None
    ),
    "split": lambda fit, data: pyrohmm.split_state(fit.hmm(data), 0).log_prob(data.values),
}


@cache
def two_fits(kind):
    """A fit on the CPU and on the second device, with the data."""
    torch.manual_seed(0)
    shift = 3 * torch.randint(2, (6, 8))
    values = (
        shift // 3 + torch.randint(2, (6, 8)) if kind == "symbols" else shift + torch.randn(6, 8)
    )
    data = Sequences(values, torch.tensor([8, 5, 8, 8, 6, 8]))
    family = categorical(3, concentration=1.5) if kind == "symbols" else normal(0)
    fits = fitted(by_em, lambda: TabularHMM(2, family), data, num_iterations=20, restarts=1)
    return list(zip(fits, (data, there(data))))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("intervals", "numbers"),
        *(
            pytest.param(name, "symbols", marks=SLOW if name in ("profile", "resampled") else [])
            for name in ASKED | SAMPLED
        ),
    ],
)
def test_answers_of_a_fit_are_those_of_the_cpu(name, kind):
    ask = (ASKED | SAMPLED)[name]
    with watched():
        fits = two_fits(kind)
        found = []
        for fit, data in fits:
            pyro.set_rng_seed(0)
            found.append([
                leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf)
                for leaf in tree_leaves(ask(fit, data)) if leaf is not None
            ])  # fmt: skip
    for expected, other in zip(*found, strict=True):
        assert expected.shape == other.shape
        if name in ASKED:
            torch.testing.assert_close(other, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_language_model_is_that_of_the_cpu():
    lines = ["a rose is a rose", "a daisy is a daisy"]
    vocabulary = language.count_words(lines)
    data = language.encode(lines, vocabulary)
    scores, losses, steered = [], [], []
    for move in (lambda module: module, there):
        pyro.set_rng_seed(0)
        with watched():
            model = LanguageModel.from_data(vocabulary, data, 8, 4, hidden_dim=4, dropout=0.0)
            model.module = move(model.module)
            losses.append(model.fit(data, num_epochs=2, batch_tokens=40, progress=False).losses)
            scores.append(model.score(data))
            assert len(model.generate(2)) == 2
            steering = model.steer(automata.must_contain("rose", "a"), 5)
            assert all("rose" in line for line in steering.sample(3))
            steered.append([steering.log_prob("a"), *steering.lookahead("is").tolist()])
    assert steered[1] == pytest.approx(steered[0])
    alike(losses[1], losses[0])
    torch.testing.assert_close(
        scores[1].cpu() if scores[1].is_cpu else numbers(scores[1]), scores[0]
    )


UNEQUAL = blocks.from_clusters(torch.tensor([0, 1, 2, 0, 1]), torch.tensor([3, 1, 4]))
LARGE = {
    "no blocks": lambda: NeuralHMM(9, 5, 4),
    "one level": lambda: NeuralHMM(9, 5, 4, blocks=CLUSTERS, tied=False),
    "two levels": lambda: NeuralHMM(8, 5, 4, blocks=UNEQUAL, two_level=True, factored=True),
    "tagger": lambda: NeuralTagger(4, 5, 2, 4),
    "tagger in blocks": lambda: NeuralTagger(8, 5, 2, 4, blocks=UNEQUAL, two_level=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large_models_are_made_on_the_device_or_moved_there(name, dtype):
    values, lengths = torch.tensor([[0, 3, 1, 4], [2, 0, 0, 0]]), torch.tensor([4, 1])
    gaps, found = torch.tensor([[True, False, True, True], [True] * 4]), []
    if "tagger" in name:
        values = torch.stack([values, values % 2], -1)
    torch.set_default_dtype(dtype)
    with watched():
        for device in ("cpu", DEVICE):
            pyro.set_rng_seed(0)
            with torch.device(device):
                module = LARGE[name]().to(dtype)
            module = module if device == "cpu" else there(module)
            given, seen = values.to(device), gaps.to(device)
            evidence = module(lengths).log_prob(given)
            evidence.backward(torch.ones_like(evidence))
            hmm, missing = module.eval()(lengths), module(lengths, seen)
            answers = [evidence, module.bias.grad, missing.log_prob(given),
                       hmm.posterior(given).state_probs, hmm.viterbi(given),
                       missing.viterbi(given)]  # fmt: skip
            assert hmm.sample_states(given).device.type == given.device.type
            found.append([each.detach().cpu() for each in answers])
    for here, moved in zip(*found):
        assert moved.dtype in {dtype, torch.long}
        torch.testing.assert_close(moved, here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("partition", [CLUSTERS, UNEQUAL], ids=["equal", "unequal"])
def test_states_are_dropped_on_the_device(partition):
    kept, device, counts = partition.keep(0.5), torch.device(DEVICE, 0), torch.zeros(9)
    with watched():
        torch.manual_seed(0)
        sample_kept_states(partition, kept, device)
        with watched() as seen:
            drawn = [sample_kept_states(partition, kept, device) for _ in range(200)]
        for states in map(numbers, drawn):
            assert torch.equal(partition.owner[states].bincount(), kept.sizes)
            counts[states] += 1
    wanted = (kept.sizes / partition.sizes).repeat_interleave(partition.sizes)
    spread = (wanted * (1 - wanted) / 200).sqrt()
    assert bool(((counts[: len(wanted)] / 200 - wanted).abs() <= 5 * spread + 1e-6).all())
    if DEVICE == "twin":
        assert seen.host_reads == seen.copies.total() == 0, seen
        assert seen.launches <= 10 * 200, seen


def test_texts_of_tokens_are_steered_as_on_the_cpu():
    torch.manual_seed(0)
    texts = Sequences.from_list([[0, 1, 2], [1, 0, 1, 2]] * 5)
    logs, tokens = [], ["a", " b", None]
    with watched():
        for given in (texts, there(texts)):
            pyro.set_rng_seed(0)
            found = language.distil(given, tokens, 3, num_epochs=3)
            steer = language.ConstraintProcessor(
                found.hmm, automata.must_contain("b"), tokens, max_tokens=4, end=2
            )
            scores = steer(given.values[:1, :1], torch.zeros(1, 3, device=given.device))
            logs.append([found.fit.losses.cpu(), scores.cpu()])
    for one, other in zip(*logs):
        torch.testing.assert_close(other, one)


# What the host waits for, and how many kernels there are ------------------------------------------


def of_log_prob(num_steps, ragged=False, dtype=torch.float32, emission="symbols", calls=1):
    """What is seen of the evidence and its gradient, without validation."""
    torch.manual_seed(0)
    logs = [torch.randn(*shape, dtype=dtype).log_softmax(-1) for shape in ((4,), (4, 4), (4, 5))]
    values, lengths = symbols(ragged, num_steps)
    with watched():
        leaves = [there(part).requires_grad_() for part in logs]
        given, ones = there(values), there(torch.ones(3, dtype=dtype))
        if emission == "normal":
            given = there(torch.randn(*values.shape, 5, dtype=dtype))
            leaves.append(there(torch.rand(4, 5, dtype=dtype) + 0.5).requires_grad_())
    for _ in range(calls):
        for leaf in leaves:
            leaf.grad = None
        with watched() as seen:
            initial, transition, last, *scale = leaves
            if emission == "normal":
                emits = Normal(last, *scale, validate_args=False).to_event(1)
            else:
                emits = Categorical(logits=last, validate_args=False)
            hmm = HMM(initial, transition, emits, lengths, validate_args=False)
            hmm.log_prob(given).backward(ones)
    return seen


@pytest.mark.parametrize("emission", ["symbols", "normal"])
@counted
@pytest.mark.parametrize("ragged", [False, True])
def test_evidence_and_gradient_wait_for_the_device_once(emission, ragged):
    seen = of_log_prob(7, ragged, emission=emission)
    assert seen.host_reads <= 1, seen


@counted
@pytest.mark.parametrize("ragged", [False, True])
def test_a_step_of_evidence_and_gradient_is_four_kernels(ragged):
    short, long = of_log_prob(10, ragged), of_log_prob(30, ragged)
    each = (long.launches - short.launches) / 20
    assert each <= 4, long.kernels - short.kernels
    # some of them make both ways of messages, or add up transitions in float64
    assert short.launches - 10 * each <= (60 if ragged else 48), short.kernels


class Launched:
    """A kernel of Triton, interpreted for tensors on the twin."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            twin_device._seen.kernels[self.kernel.fn.__name__] += 1
            self.kernel[grid](*map(twin_device._raw, arguments), **options)

        return launch


@counted
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy interprets
@pytest.mark.parametrize(
    ("emission", "ragged", "most"),
    [("symbols", False, 29), ("symbols", True, 32), ("normal", False, 60), ("normal", True, 62)],
)
def test_evidence_and_gradient_are_few_kernels(emission, ragged, most, monkeypatch):
    kernels = pytest.importorskip("pyrohmm.ops.dense._triton", reason="Triton is not installed")
    for name in ("_pass", "_join"):
        monkeypatch.setattr(kernels, name, Launched(getattr(kernels, name)))
    monkeypatch.setattr(torch_engine, "pick", lambda _, fits: TRITON if fits else TORCH)
    monkeypatch.setattr(linear_emissions, "SMALL", 0)  # normals are a product
    seen = of_log_prob(7, ragged, emission=emission, calls=2)
    assert seen.kernels["_pass"] == seen.kernels["_join"] == 1
    assert seen.launches <= most, seen.kernels


def reads_of_a_further_iteration(fit, module, data):
    """What the host waits for and copies in an iteration, without validation, and where."""
    seen = []
    with pyro.validation_enabled(False):
        for num_steps in (2, 4):
            pyro.set_rng_seed(0)
            with watched() as found:
                fit(there(module()), there(data), num_iterations=num_steps)
            seen.append(found)
    reads, copies = seen[1].reads - seen[0].reads, seen[1].copies - seen[0].copies
    return reads.total() / 2, copies.total() / 2, reads + copies


@counted
@pytest.mark.parametrize(
    ("fit", "name", "most", "copies"),
    [
        (by_em, "table", 2, 1), (by_em, "normal", 2, 1), (by_map, "table", 1, 1),
        (by_map, "normal", 1, 1), (by_map, "dense", 1, 1), (by_map, "neural", 1, 4),
        (by_map, "two levels", 1, 4), (by_svi, "table", 1, 1),
    ],
)  # fmt: skip
def test_an_iteration_of_a_fit_waits_for_the_device_twice_at_most(fit, name, most, copies):
    data = some_data(name == "normal")
    reads, copied, places = reads_of_a_further_iteration(fit, MODULES[name], data)
    assert reads <= most, places
    assert copied <= copies, places


@counted
def test_l_bfgs_waits_for_the_device_once_at_a_point(monkeypatch):
    points = 0
    original = recursions.torch.optim.LBFGS.step

    def counted(optimizer, closure):
        def once():
            nonlocal points
            points += 1
            return closure()

        return original(optimizer, once)

    monkeypatch.setattr(torch.optim.LBFGS, "step", counted)
    with pyro.validation_enabled(False), watched() as seen:
        by_em(there(MODULES["dense"]()), there(some_data()), num_iterations=2)
    assert points > 10
    # beside the points: the E-steps, the start of each M-step, and what comes before and after
    assert seen.host_reads <= points + 3 * 2 + 14, seen


@counted
def test_the_indices_of_blocks_are_made_once_a_batch(monkeypatch):
    made = []
    original = pyrohmm.ops.blocks.recursions.pairs_of
    monkeypatch.setattr(
        pyrohmm.ops.blocks.recursions, "pairs_of", lambda *args: made.append(1) or original(*args)
    )
    with watched():
        by_map(there(MODULES["two levels"]()), there(some_data()), num_iterations=3)
    assert len(made) == 1


@counted
@pytest.mark.parametrize("sizes", [[4], [4, 3]], ids=["equal", "unequal"])
@pytest.mark.parametrize("two_level", [False, True])
def test_a_step_of_a_model_of_64_blocks_is_600_kernels_at_most(two_level, sizes):
    """Dropout, loss, gradient and Adam, of 64 sequences of 32: no loop is over blocks."""
    torch.manual_seed(0)
    clusters = torch.arange(128) % 64
    partition = blocks.from_clusters(clusters, torch.tensor(sizes).repeat(64 // len(sizes)))
    module = NeuralHMM(
        partition.num_states, 128, hidden_dim=4, blocks=partition, two_level=two_level, dropout=0.5
    )
    values, lengths = torch.randint(128, (64, 32)), torch.randint(16, 33, (64,))
    with watched(), pyro.validation_enabled(False):
        moved, given, ones = there(module), there(values), there(torch.ones(64))
        optimizer = torch.optim.Adam(moved.parameters(), foreach=True)
        for _ in range(2):  # the first one makes the state of Adam
            optimizer.zero_grad()
            with watched() as seen:
                moved(lengths).log_prob(given).backward(ones)
                optimizer.step()
    assert 32 * 8 < seen.launches <= 600, seen.kernels
    assert (seen.host_reads, seen.copies.total()) == (1, 0), seen  # are messages exact?


# Both ways at once --------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [60.0, 500.0, 1e4])
def test_what_leaves_the_range_of_both_ways_is_computed_in_a_wider_one(apart):
    """The future favours a state that cannot have been reached: their messages hardly agree."""
    never = -torch.inf
    initial = torch.tensor([0.0, never])
    transition = torch.tensor([[[0.0, never], [never, 0.0]]])
    likelihood = torch.tensor([[0.0, apart]]).expand(4, 2)[None].repeat(2, 1, 1)
    likelihood[1] = 0.0  # a sequence that stays in the range
    logs = initial.expand(2, 2), transition, likelihood
    parts = [part.float().requires_grad_() for part in logs]
    lengths = torch.tensor([4, 4])
    with backends.use(backends.TORCH):
        evidence = recursions.log_evidence(*parts, lengths)
        assert evidence.tolist() == [0.0, 0.0]
        (gradient,) = torch.autograd.grad(evidence.sum(), parts[2])
    torch.testing.assert_close(gradient, torch.tensor([1.0, 0.0]).float().expand(2, 4, 2))
    arguments = chains.check_arguments(*(part.detach() for part in parts), lengths)
    found = torch_engine.scaled(chains.grouped(arguments), torch.float32, True, False)
    assert found[1].tolist() == [[False, True]]


def test_an_impossible_sequence_has_no_evidence_on_a_device_either():
    with watched():
        here, moved, values = chain("symbols")
        never = here.replace(log_initial=torch.tensor([0.0, -torch.inf, -torch.inf])).restrict(
            torch.tensor([1, -1, -1, -1, -1, -1, -1])
        )
        leaf = there(never.log_transition).requires_grad_()
        never = HMM(
            there(never.log_initial), leaf, moved.emission, never.lengths,
            allowed=there(never.allowed), validate_args=False,
        )  # fmt: skip
        evidence = never.log_prob(there(values))
        assert numbers(evidence).isneginf().all()
        evidence.sum().backward()
        assert not numbers(leaf.grad).any()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or DEVICE != "twin", reason="needs CUDA")
def test_all_of_this_on_a_real_device():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    subprocess.run(command, env=os.environ | {"PYROHMM_TEST_DEVICE": "cuda"}, check=True)
