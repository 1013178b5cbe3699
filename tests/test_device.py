"""The whole package on a second device: the same numbers, few host reads.

The device is simulated (:mod:`twin_device`). ``PYROHMM_TEST_DEVICE=cuda`` takes a real one, where
nothing is counted.
"""

import copy
import os
from contextlib import nullcontext

import numpy as np
import pyro
import pytest
import torch
from every_fit import FITS
from every_fit import MODULES as EVERY
from families import CASES, STATES
from pyro.distributions import Categorical, MultivariateNormal, Normal
from pyro.infer.autoguide import AutoNormal

import pyrohmm
from pyrohmm import (
    HMM,
    BlockHMM,
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
    fit_map,
    fit_svi,
    language,
    normal,
    queries,
    tagging,
)
from pyrohmm.ops import backends, recursions
from pyrohmm.ops.dense import _torch as torch_engine
from pyrohmm.ops.dense import chain as chains

CLUSTERS = blocks.from_clusters(torch.tensor([0, 1, 2, 0, 1]), 3)


DEVICE = os.environ.get("PYROHMM_TEST_DEVICE", "twin")
if DEVICE == "twin":  # torch has one accelerator at a time
    from twin_device import watched
else:
    watched = nullcontext
counted = pytest.mark.skipif(DEVICE != "twin", reason="nothing is counted on a real device")


def there(thing):
    return thing.to(DEVICE)


def numbers(thing):
    """The numbers of a tensor that is on the second device."""
    assert thing.device.type == DEVICE, "a result is on the CPU"
    return thing.detach().cpu() if DEVICE != "twin" else thing.detach().raw


def agree(found, expected, **tolerance):
    torch.testing.assert_close(numbers(found), expected.detach(), **tolerance)


def symbols(ragged=True, num_steps=7):
    torch.manual_seed(0)
    lengths = torch.tensor([num_steps, 4, 1] if ragged else [num_steps] * 3)
    return torch.randint(5, (3, num_steps)), lengths


def chain(emission, ragged=True, hard_zero=False):
    """An HMM of 3 states, and the same one on the twin; and values."""
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
    elif emission == "normal":
        parameters, values = (torch.randn(3, 2), torch.rand(3, 2) + 0.5), torch.randn(3, 7, 2)

        def build(loc, scale):
            return Normal(loc, scale).to_event(1)
    else:
        parameters = (torch.randn(3, 2), torch.eye(2).expand(3, 2, 2))
        values = torch.randn(3, 7, 2)

        def build(loc, root):
            return MultivariateNormal(loc, scale_tril=root)

    here = HMM(initial, transition, build(*parameters), lengths)
    moved = HMM(there(initial), there(transition), build(*map(there, parameters)), lengths)
    return here, moved, values


def block_chain():
    torch.manual_seed(1)
    module = NeuralHMM(9, 5, hidden_dim=4, blocks=CLUSTERS, two_level=True).eval()
    values, lengths = symbols()
    here = module(lengths)
    with watched():
        moved = there(copy.deepcopy(module))(lengths)
    return here, moved, values


@pytest.mark.parametrize("hard_zero", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("emission", ["symbols", "normal", "full"])
def test_queries_of_an_hmm_are_those_of_the_cpu(emission, ragged, hard_zero):
    with watched():
        here, moved, values = chain(emission, ragged, hard_zero)
        given = there(values)
        for name in ("log_prob", "filtered", "viterbi"):
            agree(getattr(moved, name)(given), getattr(here, name)(values))
        for name in ("posterior", "expected_counts"):
            answers = getattr(moved, name)(given), getattr(here, name)(values)
            for found, expected in zip(*answers):
                of_names = isinstance(found, dict)
                for key in found if of_names else [None]:
                    agree(*(part[key] if of_names else part for part in (found, expected)))
        states = here.viterbi(values)
        agree(moved.log_joint(given, there(states)), here.log_joint(values, states))
        agree(moved.stationary(), here.stationary())
        agree(queries.path_entropy(moved, given), queries.path_entropy(here, values))
        paths = numbers(moved.sample_states(given, (4,)))
        assert paths.shape == (4, 3, 7)
        drawn, hidden = moved.sample_with_states((2,))
        assert numbers(drawn).shape[:3] == numbers(hidden).shape == (2, 3, 7)
        agree(moved.restrict(there(states)).log_prob(given), here.restrict(states).log_prob(values))


def test_queries_of_a_block_model_are_those_of_the_cpu():
    with watched():
        here, moved, values = block_chain()
        given = there(values)
        assert isinstance(moved, BlockHMM)
        for name in ("log_prob", "filtered", "viterbi"):
            agree(getattr(moved, name)(given), getattr(here, name)(values))
        for name in ("posterior", "block_posterior", "final_state"):
            for found, expected in zip(getattr(moved, name)(given), getattr(here, name)(values)):
                agree(found, expected)
        assert numbers(moved.sample_states(given, (4,))).shape == (4, 3, 7)
        assert numbers(moved.sample((2,))).shape == (2, 3, 7)


def test_analyses_are_those_of_the_cpu():
    with watched():
        here, moved, values = chain("symbols")
        given = there(values)
        for query in (queries.path_entropy, queries.predictive_log_prob):
            agree(query(moved, given), query(here, values))
        for found, expected in zip(
            queries.k_best(moved, given, 2), queries.k_best(here, values, 2)
        ):
            agree(found, expected)
        agree(queries.dwell_time_mean(moved), queries.dwell_time_mean(here))
        assert numbers(queries.impute(moved, given)).shape == values.shape
        for found, expected in zip(
            queries.pseudo_residuals(moved, given), queries.pseudo_residuals(here, values)
        ):
            agree(found, expected)
        ahead = moved.forecast(given, 2), here.forecast(values, 2)
        agree(ahead[0].log_prob(there(values[:, :2])), ahead[1].log_prob(values[:, :2]))
        filters = Filter(moved), Filter(here)
        for value in values[0, :3]:
            agree(filters[0].update(there(value)), filters[1].update(value))


# Fits ---------------------------------------------------------------------------------------------


def fitted(fit, module, data, **options):
    """The same fit on the CPU and on the twin: losses, and values by name."""
    results = []
    for move in (lambda thing: thing, there):
        pyro.set_rng_seed(0)
        with watched():
            results.append(fit(move(module()), move(data), **options))
    return results


def alike(moved, here, **tolerance):
    """Whether losses are those of the CPU; of a real device, which draws other starts, finite."""
    if DEVICE == "twin":
        torch.testing.assert_close(moved, here, **tolerance)
    assert moved.isfinite().all()


def both_agree(here, moved):
    alike(moved.losses, here.losses)
    if DEVICE != "twin":
        return
    with watched():
        for name, value in moved.parameters.items():
            agree(value, here.parameters[name], atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_em_of_every_family_is_that_of_the_cpu(name):
    case, rng = CASES[name], np.random.default_rng(0)
    values = torch.tensor(case.values(rng, 24)).reshape(4, 6, *case.values(rng, 1).shape[1:])
    data = Sequences(values, torch.tensor([6, 5, 6, 2]))
    module = lambda: TabularHMM(STATES, case.family())  # noqa: E731
    both_agree(*fitted(fit_em, module, data, num_iterations=2, restarts=1, progress=False))


def some_data(vectors=False):
    values, lengths = symbols()
    return Sequences(torch.randn(3, 7, 2) if vectors else values, lengths)


MODULES = {
    "table": lambda: TabularHMM(2, categorical(5)),
    "normal": lambda: TabularHMM(2, normal(2)),
    "dense": lambda: DenseHMM(2, 5, dim=2),
    "neural": lambda: NeuralHMM(9, 5, hidden_dim=4, blocks=CLUSTERS),
    "two levels": lambda: NeuralHMM(9, 5, hidden_dim=4, blocks=CLUSTERS, two_level=True),
}


def by_map(module, data, **options):
    return fit_map(MarginalModel(module), data, progress=False, **options)


def by_svi(module, data, **options):
    model = MarginalModel(module)
    return fit_svi(model, AutoNormal(model), data, progress=False, **options)


def by_em(module, data, **options):
    return fit_em(module, data, tolerance=None, progress=False, **options)


@pytest.mark.parametrize("name", MODULES)
def test_map_is_that_of_the_cpu(name):
    def module():
        torch.manual_seed(2)
        return MODULES[name]()

    data = some_data(name == "normal")
    here, moved = fitted(by_map, module, data, num_iterations=2)
    alike(moved.losses, here.losses)


def test_svi_and_restarts_are_those_of_the_cpu():
    here, moved = fitted(by_svi, MODULES["table"], some_data(), num_iterations=2)
    alike(moved.losses, here.losses)
    for fit in (by_map, by_em):
        here, moved = fitted(fit, MODULES["table"], some_data(), num_iterations=2, restarts=2)
        alike(moved.restarts.losses, here.restarts.losses)


QUICK = [(name, "fit_map") for name in EVERY] + [
    ("TabularHMM", fit) for fit in ("fit_svi", "fit_gibbs", "fit_laplace", "fit_cooccurrence")
]


@pytest.mark.parametrize(
    ("name", "fit"),
    [
        pytest.param(name, fit, marks=[] if (name, fit) in QUICK else pytest.mark.slow)
        for name in EVERY
        for fit in FITS
    ],
)
def test_every_fit_of_every_module_is_that_of_the_cpu(name, fit):
    """What is refused on the CPU is refused there alike; the numbers of samplers are their own."""
    make, data = EVERY[name]

    def module():
        torch.manual_seed(2)
        return make()

    try:
        here, moved = fitted(FITS[fit], module, data())
    except (TypeError, ValueError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            FITS[fit](module(), data())
        return
    with watched():
        assert all(numbers(value).isfinite().all() for value in moved.parameters.values())
    if fit not in ("fit_gibbs", "fit_mcmc"):
        alike(moved.losses, here.losses, atol=1e-4, rtol=1e-4)


def test_a_tagger_is_that_of_the_cpu():
    text = Sequences.from_list([[0, 1, 2, 1], [2, 1]], labels=[[0, 1, 0, 1], [0, -1]])
    data = tagging.tagged(text)

    def module():
        torch.manual_seed(2)
        return NeuralTagger(9, 5, 2, hidden_dim=4, blocks=CLUSTERS)

    here, moved = fitted(by_map, module, data, num_iterations=2)
    alike(moved.losses, here.losses)
    with watched():
        given = there(data)
        found = moved.hmm(given)
        agree(found.best_tags(given.values), here.hmm(data).best_tags(data.values))
        agree(found.tag_probs(given.values), here.hmm(data).tag_probs(data.values))


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


# What the host waits for, and how many kernels there are ------------------------------------------


def of_log_prob(num_steps, ragged=False, dtype=torch.float32, emission="symbols"):
    """What is seen of the evidence and its gradient, without validation."""
    torch.manual_seed(0)
    logs = [torch.randn(*shape, dtype=dtype).log_softmax(-1) for shape in ((4,), (4, 4), (4, 5))]
    values, lengths = symbols(ragged, num_steps)
    with watched():
        leaves = [there(part).requires_grad_() for part in logs]
        given, ones = there(values), there(torch.ones(3, dtype=dtype))
        if emission == "normal":
            given = there(torch.randn(*values.shape, 5, dtype=dtype))
    with watched() as seen:
        initial, transition, last = leaves
        emits = Categorical(logits=last, validate_args=False)
        if emission == "normal":
            emits = Normal(last, 1.0, validate_args=False).to_event(1)
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
    # some of them add up transitions in float64, over blocks of steps; one divides twice, for the
    # product of norm and agreement overflows where potentials are large
    assert short.launches - 10 * each <= (65 if ragged else 49), short.kernels


def reads_of_a_further_iteration(fit, module, data):
    """How many times the host waits in an iteration, without validation, and where."""
    seen = []
    with pyro.validation_enabled(False):
        for num_steps in (2, 4):
            pyro.set_rng_seed(0)
            with watched() as found:
                fit(there(module()), there(data), num_iterations=num_steps)
            seen.append(found)
    return (seen[1].host_reads - seen[0].host_reads) / 2, seen[1].reads - seen[0].reads


@counted
@pytest.mark.parametrize(
    ("fit", "name", "most"),
    [
        (by_em, "table", 2), (by_em, "normal", 2), (by_map, "table", 1), (by_map, "normal", 1),
        (by_map, "dense", 1), (by_map, "neural", 1), (by_map, "two levels", 1),
        (by_svi, "table", 1),
    ],
)  # fmt: skip
def test_an_iteration_of_a_fit_waits_for_the_device_twice_at_most(fit, name, most):
    data = some_data(name == "normal")
    count, places = reads_of_a_further_iteration(fit, MODULES[name], data)
    assert count <= most, places


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
    assert seen.host_reads <= points + 3 * 2 + 12, seen


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
def test_loss_and_gradient_of_a_model_of_64_blocks_are_600_kernels_at_most(two_level, sizes):
    """Of 64 sequences of 32 symbols, with dropout: no loop is over blocks or sequences."""
    torch.manual_seed(0)
    clusters = torch.arange(128) % 64
    partition = blocks.from_clusters(clusters, torch.tensor(sizes).repeat(64 // len(sizes)))
    module = NeuralHMM(
        partition.num_states, 128, hidden_dim=4, blocks=partition, two_level=two_level, dropout=0.5
    )
    values, lengths = torch.randint(128, (64, 32)), torch.randint(16, 33, (64,))
    with watched(), pyro.validation_enabled(False):
        moved, given, ones = there(module), there(values), there(torch.ones(64))
        with watched() as seen:
            moved(lengths).log_prob(given).backward(ones)
    assert 32 * 8 < seen.launches <= 600, seen
    assert seen.host_reads <= 2, seen  # the symbols, once; and whether messages are exact


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
