"""An HMM as a site of a Pyro model: what Pyro's own distributions do there, of every module."""

import copy
import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from families import CASES, STATES
from pyro.contrib.autoname import scope
from pyro.infer import (
    SVI,
    JitTrace_ELBO,
    JitTraceEnum_ELBO,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.infer.inspect import get_dependencies
from pyro.nn import PyroParam
from pyro.ops.provenance import ProvenanceTensor, detach_provenance, get_provenance
from torch.fx.experimental.proxy_tensor import make_fx

from pyrohmm import (
    HMM,
    HSMM,
    ContinuousTimeHMM,
    DenseHMM,
    FactorialHMM,
    HMMModule,
    MarginalModel,
    NeuralHMM,
    RegressionHMM,
    SecondOrderHMM,
    Sequences,
    StationaryHMM,
    TabularContinuousTimeHMM,
    TabularFactorialHMM,
    TabularHMM,
    TabularHSMM,
    TabularSecondOrderHMM,
    additive_normal,
    autoregressive_categorical,
    autoregressive_normal,
    blocks,
    categorical,
    fit_map,
    fit_svi,
    free_durations,
    gamma,
    negative_binomial,
    nn,
    normal,
    poisson_durations,
    regression,
)
from pyrohmm.infer.models import build
from pyrohmm.infer.objective import Objective

LENGTHS = torch.tensor([5, 1, 4])
COVARIATES = torch.ones(3, 5, 2, dtype=torch.float64)
TIMES = torch.tensor([0.0, 0.5, 2.0, 2.5, 4.0]).expand(3, 5)


def two_blocks():
    return blocks.from_clusters(torch.tensor([0, 0, 1]), 2)


MODULES = {
    **{name: lambda case=case: TabularHMM(STATES, case.family()) for name, case in CASES.items()},
    "gamma": lambda: TabularHMM(2, gamma()),
    "negative binomial": lambda: TabularHMM(2, negative_binomial()),
    "vectors before": lambda: TabularHMM(2, autoregressive_normal(2)),
    "symbols before": lambda: TabularHMM(2, autoregressive_categorical(3)),
    "stationary": lambda: StationaryHMM(2, normal(0)),
    "shared weights": lambda: nn.StickyHDPHMM(2, categorical(2), kappa=(1.0, 1.0)),
    "durations": lambda: TabularHSMM(2, normal(0), free_durations(4)),
    "poisson durations": lambda: TabularHSMM(2, categorical(3), poisson_durations(4)),
    "two before": lambda: TabularSecondOrderHMM(2, categorical(2)),
    "two chains": lambda: TabularFactorialHMM((2, 2), additive_normal((2, 2), 2)),
    "continuous time": lambda: TabularContinuousTimeHMM(2, normal(0)),
    "dense": lambda: DenseHMM(3, 3, dim=2),
    "neural": lambda: NeuralHMM(4, 3, 8),
    "neural blocks": lambda: NeuralHMM(4, 3, 8, blocks=two_blocks()),
    "regression": lambda: RegressionHMM(
        2,
        regression(dist.Poisson, rate=[0, 1], prior_scale=1.0),
        transition=[0, 1],
        prior_scale=1.0,
    ),
}


def sample_of(module):
    """Data that the module has sampled: ragged, with times and covariates."""
    further = {}
    if isinstance(module, TabularContinuousTimeHMM):
        further["times"] = TIMES
    if isinstance(module, RegressionHMM):
        further["covariates"] = COVARIATES
    values = build(module, Sequences(torch.zeros(3, 5), LENGTHS, **further)).sample()
    return Sequences(values, LENGTHS, **further)


@pytest.mark.parametrize("name", MODULES)
def test_pyro_sees_all_that_the_sequences_depend_on(name):
    """But hyperparameters of the prior of other sites."""
    module = MODULES[name]()
    dependencies = get_dependencies(MarginalModel(module), (sample_of(module),))
    sites = {*dependencies["posterior_dependencies"]} - {"module.weights", "module.kappa"}
    assert {*dependencies["prior_dependencies"]["x"]} == {"x", *sites}


# Chains with a parameter that depends on a latent variable upstream


def numbers(loc):
    return dist.Normal(torch.stack([loc, loc + 1, loc - 2]), 1.0)


def rows(*shape):
    return torch.randn(shape).log_softmax(-1)


def markov(loc, lengths=LENGTHS, **options):
    return HMM(rows(3), rows(3, 3), numbers(loc), lengths, **options)


def per_step(loc, lengths=LENGTHS, **options):
    matrices = rows(4, 3, 3)
    return HMM(rows(3), matrices, numbers(loc), lengths, transition_per_step=True, **options)


def transitions(loc, lengths=LENGTHS, **options):
    matrix = (loc * torch.arange(9.0).reshape(3, 3)).log_softmax(-1)
    return HMM(rows(3), matrix, numbers(loc), lengths, **options)


def lasting(loc, lengths=LENGTHS, **options):
    swap = torch.full((3, 3), 0.5).fill_diagonal_(0.0).log()
    return HSMM(rows(3), swap, rows(3, 2), numbers(loc), lengths, **options)


def of_pairs(loc, lengths=LENGTHS, **options):
    tables = rows(3), rows(3, 3), rows(3, 3, 3)
    return SecondOrderHMM(*tables, numbers(loc), lengths, **options)


def several(loc, lengths=LENGTHS, **options):
    return FactorialHMM([rows(3)], [rows(3, 3)], numbers(loc), lengths, **options)


def in_time(loc, lengths=LENGTHS):
    rates, times = torch.full((3, 3), 0.5).fill_diagonal_(-1.0), TIMES[0].expand(len(lengths), 5)
    return ContinuousTimeHMM(rows(3), rates, numbers(loc), lengths, times)


CHAINS = {
    "markov": markov,
    "markov per step": per_step,
    "transitions": transitions,
    "durations": lasting,
    "two before": of_pairs,
    "several": several,
    "continuous time": in_time,
}


def leaves(found):
    """The tensors of an answer."""
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found.values() if isinstance(found, dict) else found
    return [tensor for part in parts if part is not None for tensor in leaves(part)]


QUERIES = ["log_prob", "posterior", "expected_counts", "filtered", "viterbi"]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("name", CHAINS)
def test_answers_have_the_provenance_of_parameters_and_values(name, query):
    """And are the numbers of tensors without one."""
    loc, values = torch.tensor(0.5), torch.randn(3, 5)
    torch.manual_seed(1)
    plain = getattr(CHAINS[name](loc), query)(values)
    torch.manual_seed(1)
    tracked = CHAINS[name](ProvenanceTensor(loc, frozenset({"z"})))
    found = getattr(tracked, query)(ProvenanceTensor(values, frozenset({"x"})))
    for one, other in zip(leaves(found), leaves(plain), strict=True):
        assert get_provenance(one) == {"z", "x"}
        assert torch.equal(detach_provenance(one), other)


@pytest.mark.parametrize("name", ["markov", "markov per step", "transitions", "several"])
def test_the_posterior_of_the_states_has_their_provenance(name):
    loc = ProvenanceTensor(torch.tensor(0.5), frozenset({"z"}))
    values = ProvenanceTensor(torch.randn(3, 5), frozenset({"x"}))
    states = CHAINS[name](loc).posterior_states(values)
    assert get_provenance(states.log_prob(torch.zeros(3, 5).long())) == {"z", "x"}


def test_a_latent_variable_upstream_learns_from_the_sequences():
    """The score-function gradient of TraceGraph_ELBO, against the exact bound by enumeration."""
    values, hmm = torch.randn(3, 5) + 4, CHAINS["markov"](torch.tensor(0.0))
    prior, z = dist.Bernoulli(0.4), torch.tensor([0.0, 1.0])

    def shifted(upstream):
        return hmm.replace(emission=dist.Normal(hmm.emission.loc + upstream, 1.0))

    def model():
        emitted = shifted(pyro.sample("z", prior))
        with pyro.plate("sequences", 3):
            pyro.sample("x", emitted, obs=values)

    joint = prior.log_prob(z) + torch.stack([shifted(each).log_prob(values).sum() for each in z])
    baseline = {"baseline": {"baseline_value": joint.mean()}}

    def guide():
        chance = dist.Bernoulli(logits=pyro.param("logit", torch.tensor(-1.0)))
        pyro.sample("z", chance, infer=baseline)

    slopes = []
    for _ in range(8):
        TraceGraph_ELBO(num_particles=25).loss_and_grads(model, guide)
        slopes.append(pyro.param("logit").grad.clone())
        pyro.param("logit").grad = None
    logit = torch.tensor(-1.0, requires_grad=True)
    chances = dist.Bernoulli(logits=logit).log_prob(z)
    (wanted,) = torch.autograd.grad((chances.exp() * (chances - joint)).sum(), logit)
    slopes = torch.stack(slopes)
    error = slopes.std() / math.sqrt(len(slopes))
    assert abs(slopes.mean() - wanted) < 4 * error
    assert error < abs(wanted) / 4  # else the test could not tell


# Minibatches


def seeded(build, *args, **options):
    """The same parameters each time."""
    torch.manual_seed(1)
    return build(torch.tensor(0.5), *args, **options)


@pytest.mark.parametrize("name", CHAINS)
def test_a_minibatch_need_not_hold_the_longest_sequence(name):
    """Steps after the longest one of a minibatch are padding."""
    values = torch.randn(3, 5)
    whole = seeded(CHAINS[name]).log_prob(values)

    def model():
        with pyro.plate("sequences", 3, subsample_size=2) as chosen:
            pyro.sample("x", seeded(CHAINS[name], LENGTHS[chosen]), obs=values[chosen])
        return chosen

    for _ in range(8):
        trace = pyro.poutine.trace(model).get_trace()
        trace.compute_log_prob()
        chosen = trace.nodes["_RETURN"]["value"]
        torch.testing.assert_close(trace.nodes["x"]["log_prob"], 1.5 * whole[chosen])


@pytest.mark.parametrize("name", sorted({*CHAINS} - {"continuous time"}))
def test_the_number_of_steps_can_be_given(name):
    """And lengths be one integer, or left out where all are of all steps."""
    values, short = torch.randn(2, 5), torch.tensor([3, 2])
    free = seeded(CHAINS[name], short)
    given = seeded(CHAINS[name], short, num_steps=5)
    assert given.event_shape == given.expand([4, 2]).event_shape == (5,)
    assert given.replace(emission=given.emission).event_shape == (5,)
    torch.testing.assert_close(given.log_prob(values), free.log_prob(values))
    every = seeded(CHAINS[name], torch.tensor([5, 5]))
    for other in (seeded(CHAINS[name], 5), seeded(CHAINS[name], None, num_steps=5)):
        assert other.batch_shape == ()
        torch.testing.assert_close(other.log_prob(values), every.log_prob(values))
    with pytest.raises(ValueError, match="2 of num_steps"):
        seeded(CHAINS[name], short, num_steps=2)


# Objectives


ELBOS = {
    "plain": Trace_ELBO(),
    "particles": Trace_ELBO(num_particles=3),
    "particles at once": Trace_ELBO(num_particles=3, vectorize_particles=True, max_plate_nesting=1),
    "graph": TraceGraph_ELBO(num_particles=2),
    "enumeration": TraceEnum_ELBO(num_particles=2, strict_enumeration_warning=False),
    "mean field": TraceMeanField_ELBO(num_particles=2),
    "importance weights": RenyiELBO(0.5, num_particles=3),
    "wake and sleep": ReweightedWakeSleep(num_particles=2, vectorize_particles=False),
}


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", ELBOS)
def test_fits_take_any_objective_of_pyro(name, as_function):
    """A step has the loss and the gradients that Pyro's own has."""
    data = Sequences(torch.randn(4, 5), torch.full((4,), 5))
    module = MarginalModel(TabularHMM(2, normal(0)))

    def model(data, observations=None):
        return module(data)

    auto = AutoNormal(model)
    auto(data)
    guide = (lambda data, observations=None: auto(data)) if as_function else auto
    objective = Objective(model, guide, data, ELBOS[name])
    pyro.set_rng_seed(1)
    loss = objective.module(data)
    (3 * loss).backward()  # as parts of the data and processes weigh it
    slopes = [parameter.grad / 3 for parameter in objective.parameters]
    objective.module.zero_grad()
    for parameter in objective.parameters:
        parameter.grad = None
    pyro.set_rng_seed(1)
    wanted = ELBOS[name].loss_and_grads(model, guide, data)
    assert loss.item() == pytest.approx(wanted[0] if isinstance(wanted, tuple) else wanted)
    assert len(slopes) == 8
    for one, parameter in zip(slopes, objective.parameters):
        torch.testing.assert_close(one, parameter.grad)
    fit = fit_svi(model, guide, data, elbo=ELBOS[name], num_iterations=3)
    assert fit.losses.isfinite().all()


def test_two_models_stand_in_one_under_scopes():
    """With data of different size, further priors, and variables of each sequence."""
    parts = {
        "first": Sequences(torch.randn(4, 5), torch.full((4,), 5)),
        "second": Sequences(torch.randint(3, (6, 3)), torch.full((6,), 3)),
    }
    models = {
        "first": MarginalModel(
            TabularHMM(2, normal(0)), lambda hmm: -hmm.log_initial.square().sum()
        ),
        "second": MarginalModel(TabularHMM(2, categorical(3))),
    }

    def both(data):
        for name, model in models.items():
            with scope(prefix=name):
                hmm = model(data if name == "first" else parts[name])
        return hmm

    guide = AutoDelta(both)
    trace = pyro.poutine.trace(both).get_trace(parts["first"])
    assert {"first/x", "second/x", "first/log_prior", "first/module.transition"} <= {*trace.nodes}
    fit = fit_svi(both, guide, parts["first"], num_iterations=3)
    values = guide(parts["first"])
    likelihood, prior = 0.0, 0.0
    for name, model in models.items():
        inner = {site.removeprefix(f"{name}/"): x for site, x in values.items()}
        conditioned = pyro.poutine.condition(model, inner)
        alone = pyro.poutine.trace(conditioned).get_trace(parts[name])
        alone.compute_log_prob()
        own = alone.nodes["x"]["log_prob_sum"].detach()
        likelihood, prior = likelihood + own, prior + alone.log_prob_sum().detach() - own
    torch.testing.assert_close(
        Trace_ELBO().loss(both, guide, parts["first"]), -float(likelihood + prior)
    )
    again = fit_svi(both, guide, parts["first"], num_iterations=1)
    torch.testing.assert_close(again.history["log_likelihood"][0], likelihood)
    torch.testing.assert_close(again.history["log_prior"][0], prior)
    assert fit.losses[-1] < fit.losses[0]


# The parameter store


def two_words():
    return Sequences(torch.randint(3, (4, 6)), torch.full((4,), 6))


def no_guide(data):
    """Of a model without latent variables."""


def trained(model, data, num_steps=2):
    """The optimizer after some steps, and the names it has asked for learning rates of."""
    asked = []

    def options(name):
        asked.append(name)
        return {"lr": 0.01}

    optimizer = pyro.optim.Adam(options)
    svi = SVI(model, no_guide, optimizer, Trace_ELBO())
    for _ in range(num_steps):
        svi.step(data)
    return optimizer, asked


def test_the_optimizer_knows_point_parameters_by_name():
    """As of any PyroModule: learning rates by name, the state of the optimizer, the store."""
    model = MarginalModel(NeuralHMM(4, 3, 8))
    optimizer, asked = trained(model, two_words())
    names = {*pyro.get_param_store().keys()}
    assert {*asked} == {*optimizer.get_state()} == names
    assert len(asked) == len(names) == len({id(part) for part in model.parameters()})


def test_another_model_of_the_same_names_keeps_its_parameters():
    """Pyro would give it those of the first."""
    data, first = two_words(), MarginalModel(NeuralHMM(4, 3, 8))
    trained(first, data)
    other = MarginalModel(NeuralHMM(4, 3, 8))
    for model in (other, first, other):
        before = [part.detach().clone() for part in model.parameters()]
        model(data)
        assert all(map(torch.equal, before, model.parameters()))
        stored = [part for _, part in pyro.get_param_store().named_parameters()]
        assert {*map(id, stored)} == {*map(id, model.parameters())}


def test_a_fit_leaves_what_requires_no_gradient():
    """Pyro's store would make it require one."""
    model = MarginalModel(NeuralHMM(4, 3, 8))
    model.module.words.requires_grad_(False)
    before = model.module.words.table.clone()
    fit_map(model, two_words(), num_iterations=3)
    assert torch.equal(model.module.words.table, before)
    assert not model.module.words.table.requires_grad


class Levels(HMMModule):
    """One state, whose rate is a point with a constraint."""

    def __init__(self, rate):
        super().__init__()
        self.rate = PyroParam(torch.tensor([rate]), dist.constraints.positive)

    def forward(self, lengths, observed=None):
        return HMM(torch.zeros(1), torch.zeros(1, 1), dist.Poisson(self.rate), lengths, observed)


def test_parameters_that_were_loaded_replace_those_of_the_model():
    """As of any PyroModule."""
    data = Sequences(torch.ones(2, 3))
    MarginalModel(Levels(2.0))(data)
    saved = copy.deepcopy(pyro.get_param_store().get_state())
    pyro.clear_param_store()
    pyro.get_param_store().set_state(saved)
    other = MarginalModel(Levels(5.0))
    assert other(data).emission.rate == other.module.rate == torch.tensor([2.0])


# The support


@pytest.mark.parametrize("name", MODULES)
def test_the_support_holds_what_has_a_density(name):
    """Whatever padding and missing steps hold, and where components of vectors are missing."""
    module = MODULES[name]()
    data = sample_of(module)
    needs_context = name.endswith("before") and name != "two before"
    gap = torch.arange(5) == (4 if needs_context else 1)
    further = {"covariates": data.covariates, "times": data.times}
    seen = Sequences(data.values, data.lengths, data.exists & ~gap, **further)
    hmm = build(module, seen)
    values = seen.values.masked_fill(~pad(seen.observed, seen.values), -7)
    assert hmm.support.check(values).tolist() == [True] * 3
    assert hmm.log_prob(values).isfinite().all()
    if values.dim() > 2 and values.is_floating_point() and not needs_context:
        values[0, 0, 0] = torch.nan
        assert hmm.support.check(values).all() == hmm.log_prob(values).isfinite().all()
    if not torch.is_floating_point(values):
        values[0, 0] = 99
        assert hmm.support.check(values).tolist() == [False, True, True]


def pad(mask, values):
    return mask.reshape(mask.shape + (1,) * (values.dim() - 2))


def test_mixtures_of_ragged_hmms_take_them():
    values = torch.randn(3, 5).masked_fill(torch.arange(5) >= LENGTHS.unsqueeze(-1), torch.nan)
    first, second = markov(torch.tensor(0.0)), markov(torch.tensor(2.0))
    scores = torch.stack([first.log_prob(values), second.log_prob(values)], -1)
    both = HMM(
        torch.stack([first.log_initial, second.log_initial]),
        torch.stack([first.log_transition, second.log_transition]),
        dist.Normal(torch.stack([first.emission.loc, second.emission.loc]), 1.0),
        LENGTHS.unsqueeze(-1).expand(3, 2),
    )
    mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), both, validate_args=True)
    torch.testing.assert_close(mixture.log_prob(values), scores.logsumexp(-1) - math.log(2))
    chosen = torch.tensor([True, False, True])
    masked = dist.MaskedMixture(chosen, first, second, validate_args=True)
    wanted = torch.where(chosen, scores[:, 1], scores[:, 0])
    torch.testing.assert_close(masked.log_prob(values), wanted)


@pytest.mark.parametrize("guide", [AutoNormal, AutoDelta])
def test_latent_sequences_have_no_padding(guide):
    def model(lengths):
        with pyro.plate("sequences", 3):
            emission = dist.Normal(torch.zeros(1), 1.0)
            x = pyro.sample("x", HMM(torch.zeros(1), torch.zeros(1, 1), emission, lengths))
            pyro.sample("y", dist.Normal(x.sum(-1), 1.0), obs=torch.ones(3))

    with pytest.raises(NotImplementedError, match="no padding"):
        guide(model)(LENGTHS)
    whole = torch.full((3,), 5)
    assert math.isfinite(Trace_ELBO().loss(model, guide(model), whole))


# Tracers


def by_loc(name):
    """The log-probability of values as a function of one parameter."""
    values, hmm = torch.randn(3, 5), CHAINS[name](torch.tensor(0.5))
    return lambda loc: hmm.replace(emission=numbers(loc)).log_prob(values)


def traced(function, loc):
    return torch.jit.trace(function, (loc,), check_trace=False)


def traced_by_fx(function, loc):
    return make_fx(function)(loc)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated")
@pytest.mark.parametrize("tracer", [traced, traced_by_fx])
@pytest.mark.parametrize("name", sorted({*CHAINS} - {"continuous time"}))
def test_a_trace_is_right_for_other_parameters(name, tracer):
    """Value checks read numbers, which a tracer does not have."""
    if tracer is traced_by_fx and name in {"several", "two before"}:
        pytest.skip("its recursions sort sequences by their lengths, which they read")
    function = by_loc(name)
    with pyro.validation_enabled(False):
        trace = tracer(function, torch.tensor(0.5))
        other = torch.tensor(1.5, requires_grad=True)
        found, wanted = trace(other), function(other)
        torch.testing.assert_close(found, wanted)
        slopes = (torch.autograd.grad(each.sum(), other) for each in (found, wanted))
        torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", CHAINS)
def test_jacobians_of_many_rows_at_once(name):
    function, loc = by_loc(name), torch.tensor(0.5)
    found = torch.autograd.functional.jacobian(function, loc, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(function, loc))


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:TraceEnum_ELBO found no sample sites")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("elbo", [JitTrace_ELBO, JitTraceEnum_ELBO])
def test_traced_bounds_are_those_of_plain_ones(elbo):
    values, hmm = torch.randn(3, 5), markov(torch.tensor(0.5))

    def model(values):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("sequences", 3):
            pyro.sample("x", hmm.replace(emission=numbers(loc)), obs=values)

    guide = AutoDelta(model)
    guide(values)
    plain = Trace_ELBO().loss(model, guide, values)
    bound = elbo(ignore_jit_warnings=True, max_plate_nesting=1)
    assert bound.loss_and_grads(model, guide, values) == pytest.approx(plain)


def test_lengths_may_be_mapped_over():
    values, hmm = torch.randn(3, 5), markov(torch.tensor(0.5))

    def log_prob(length, row, **options):
        return hmm.replace(lengths=length, **options).log_prob(row)

    found = torch.func.vmap(partial(log_prob, num_steps=5))(LENGTHS, values)
    torch.testing.assert_close(found, hmm.log_prob(values))
    with pytest.raises(ValueError, match="num_steps must be given within vmap"):
        torch.func.vmap(log_prob)(LENGTHS, values)


@pytest.mark.slow
def test_an_exported_program_is_right_for_other_parameters():
    values, hmm = torch.randn(3, 5), markov(torch.tensor(0.5))

    class Program(torch.nn.Module):
        def forward(self, loc):
            return hmm.replace(emission=numbers(loc), num_steps=5).log_prob(values)

    with pyro.validation_enabled(False):
        program = torch.export.export(Program(), (torch.tensor(0.5),)).module()
        other = torch.tensor(1.5)
        torch.testing.assert_close(program(other), Program()(other))
